import colorsys
import math
import re
from dataclasses import fields, replace
from itertools import product

import numpy as np
import pytest
import torch
from conftest import unchanged_global_state
from hypothesis import assume, given, settings
from hypothesis import strategies as st
from PIL import Image, ImageEnhance, ImageOps

from ncdwf.config import View
from ncdwf.data.augment import (
    Views,
    augment,
    augment_views,
    check_view,
    num_draws,
    view_draw,
    view_shape,
)
from ncdwf.errors import InputError
from ncdwf.noise import Draw

HALF = 0.5
"""The draw that changes nothing: 2 · 0.5 - 1 = 0. (For the flip it means: do not mirror.)"""
LAST = 1 - 2**-24
"""The largest single-precision number below one, and so the largest draw."""
EVERYTHING = View(
    shift=1.0,
    rotation=30.0,
    scale=0.2,
    padding=2,
    resized=0.5,
    size=9,
    flip=True,
    jitter=0.7,
    solarise=0.5,
    equalise=0.5,
)

uniform = st.floats(0, 1, width=32, exclude_max=True)


def pictures(*shape, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(numbers)


def draw_names(view):
    names = ["x", "y", "rotation", "scale", "flip"]
    if view.padding or view.resized or view.size:
        names += ["resized", "left", "top"]
        names += [f"{kind}{attempt}" for attempt in range(10) for kind in ("area", "shape")]
    if view.jitter:
        names += ["jitter", "brightness", "contrast", "saturation", "hue"]
    if view.solarise:
        names += ["solarise", "threshold"]
    if view.equalise:
        names += ["equalise"]
    return names


def draws(view, num_images=1, **changed):
    """Return draws, `HALF` but for those `changed` by name, one for all pictures or one each."""
    names = draw_names(view)
    assert set(changed) <= set(names)
    columns = [np.broadcast_to(changed.get(name, HALF), num_images) for name in names]
    return torch.from_numpy(np.stack(columns, axis=1).astype(np.float32))


def random_draws(view, *shape, seed=0):
    return torch.rand(*shape, num_draws(view), generator=torch.Generator().manual_seed(seed))


def evenly(number):
    """Return numbers spread over 0 to 1, so that shares can be counted exactly."""
    return (np.arange(number) + 0.5) / number


def as_floats(images):
    return images.numpy().astype(np.float64) / 255


def as_bytes(pixels):
    return (255 * pixels).round().to(torch.uint8)


def as_pillow(image):
    """Return what Pillow calls the same picture: channels last, none at all for a grey one."""
    array = image.numpy()
    return Image.fromarray(array[0] if len(array) == 1 else np.moveaxis(array, 0, -1).copy())


def from_pillow(picture):
    array = np.asarray(picture)
    return array[None] if array.ndim == 2 else np.moveaxis(array, -1, 0)


def distance(got, expected):
    assert tuple(got.shape) == expected.shape
    return np.abs(got.numpy() - expected).max()


# Shift, rotation, scale, flip


def reference(image, view, numbers):
    """Return one view, pixel by pixel: where does it come from, which four neighbours mix there?"""
    channels, height, width = image.shape
    x, y, rotation, scale, flip = (float(number) for number in numbers)
    angle = (2 * rotation - 1) * math.radians(view.rotation)
    size = 1 + (2 * scale - 1) * view.scale
    result = np.zeros((channels, height, width))
    for row in range(height):
        for column in range(width):
            right, down = column - (width - 1) / 2, row - (height - 1) / 2
            if view.flip and flip < 0.5:
                right = -right
            from_right = (math.cos(angle) * right - math.sin(angle) * down) / size
            from_down = (math.sin(angle) * right + math.cos(angle) * down) / size
            from_column = from_right + (2 * x - 1) * view.shift + (width - 1) / 2
            from_row = from_down + (2 * y - 1) * view.shift + (height - 1) / 2
            left, top = math.floor(from_column), math.floor(from_row)
            for r, c in ((top, left), (top, left + 1), (top + 1, left), (top + 1, left + 1)):
                if 0 <= r < height and 0 <= c < width:
                    share = (1 - abs(from_row - r)) * (1 - abs(from_column - c))
                    result[:, row, column] += share * image[:, r, c]
    return result


@settings(max_examples=25, deadline=None)
@given(
    st.builds(
        View,
        shift=st.floats(0, 3),
        rotation=st.floats(0, 180),
        scale=st.floats(0, 0.9),
        flip=st.booleans(),
    ),
    st.tuples(st.sampled_from([1, 3]), st.integers(1, 7), st.integers(1, 7)),
    st.integers(0, 10),
)
def test_views_agree_with_the_slow_definition(view, shape, seed):
    images = pictures(2, *shape, seed=seed)
    numbers = random_draws(view, 2, seed=seed)
    views = augment(images, view, numbers)
    for image, row, got in zip(as_floats(images), numbers, views, strict=True):
        assert distance(got, reference(image, view, row)) < 2e-4


@pytest.mark.parametrize(("x", "y"), [(0, 0), (1, 0), (-1, 0), (0, 2), (0, -2), (2, -1), (-2, 1)])
def test_a_shift_by_whole_pixels_moves_them_and_fills_with_black(x, y):
    images = pictures(2, 3, 5, 7)
    view = View(shift=2.0)
    moved = augment(images, view, draws(view, 2, x=(x / 2 + 1) / 2, y=(y / 2 + 1) / 2))
    # The map leads from the new picture to the old one: a positive draw moves left and up.
    expected = np.roll(as_floats(images), (-y, -x), axis=(2, 3))
    rows, columns = np.arange(5) + y, np.arange(7) + x
    expected[:, :, (rows < 0) | (rows > 4)] = 0
    expected[:, :, :, (columns < 0) | (columns > 6)] = 0
    assert distance(moved, expected) < 1e-5


@pytest.mark.parametrize(("number", "mirrored"), [(0.0, True), (0.49, True), (0.5, False)])
def test_a_flip_is_a_mirror(number, mirrored):
    images = pictures(2, 3, 4, 6)
    view = View(flip=True)
    expected = np.flip(as_floats(images), 3) if mirrored else as_floats(images)
    assert distance(augment(images, view, draws(view, 2, flip=number)), expected) < 1e-6


@pytest.mark.parametrize(("number", "quarter_turns"), [(1.0, 1), (0.0, -1)])
def test_a_rotation_by_a_quarter_turns_a_square_picture(number, quarter_turns):
    images = pictures(1, 3, 6, 6)
    view = View(rotation=90.0)
    # numpy turns counter-clockwise, as seen with the first row on top.
    expected = np.rot90(as_floats(images), quarter_turns, axes=(2, 3))
    assert distance(augment(images, view, draws(view, rotation=number)), expected) < 1e-5


def test_rotation_does_not_stretch_a_wide_picture():
    # Two dots three pixels right and left of the centre of a 3×9 picture are three pixels above
    # and below it after a quarter turn: outside. One pixel away they stay inside.
    images = torch.zeros(2, 1, 3, 9, dtype=torch.uint8)
    images[0, 0, 1, [1, 7]] = 255
    images[1, 0, 1, [3, 5]] = 255
    view = View(rotation=90.0)
    got = augment(images, view, draws(view, 2, rotation=1.0))
    expected = torch.zeros(2, 1, 3, 9)
    expected[1, 0, [0, 2], 4] = 1
    assert torch.allclose(got, expected, atol=1e-5)


def test_a_large_scale_makes_things_larger():
    images = torch.zeros(3, 1, 8, 8, dtype=torch.uint8)
    images[:, :, 3:5, 3:5] = 255
    view = View(scale=0.5)
    areas = augment(images, view, draws(view, 3, scale=[0.0, 0.5, 1.0])).sum((1, 2, 3))
    assert areas[0] < areas[1] == 4 < areas[2]


def test_half_the_size_is_every_other_pixel():
    # Scale 0.5: pixel centres ±0.5, ±1.5 of a 4×4 picture come from ±1 and ±3. At ±1 two
    # pixels (±0.5, ±1.5) mix evenly; ±3 lies outside.
    images = pictures(1, 1, 4, 4)
    view = View(scale=0.5)
    got = augment(images, view, draws(view, scale=0.0)).numpy()
    blocks = as_floats(images).reshape(1, 1, 2, 2, 2, 2).mean((3, 5))
    assert np.abs(got[:, :, 1:3, 1:3] - blocks).max() < 1e-5
    assert got.sum() == pytest.approx(blocks.sum(), abs=1e-5)


def test_a_rotation_looks_as_an_image_library_draws_it():
    ramp = np.add.outer(np.arange(9), np.arange(9)).astype(np.uint8) * 12
    expected = np.asarray(Image.fromarray(ramp).rotate(20, Image.Resampling.BILINEAR)) / 255
    images = torch.from_numpy(ramp)[None, None]
    view = View(rotation=20.0)
    got = augment(images, view, draws(view, rotation=1.0))[0, 0].numpy()
    # Borders are handled differently there.
    assert np.abs(got - expected)[2:-2, 2:-2].max() < 0.01


# Crops


def place(number, room):
    """Return one of the places 0 to `room`, all of them as likely."""
    # In single precision, as draws are: LAST · (room + 1) may be room + 1 there.
    return min(int(np.float32(number) * np.float32(room + 1)), room)


@settings(max_examples=50, deadline=None)
@given(
    st.tuples(st.sampled_from([1, 3]), st.integers(4, 9), st.integers(4, 9)),
    st.integers(1, 5),
    st.sampled_from([0, 3, 4]),
    st.tuples(*[st.just(0.0) | st.just(LAST) | uniform] * 2),
)
def test_a_padded_crop_is_a_slice_of_the_padded_picture(shape, padding, size, where):
    images = pictures(1, *shape)
    view = View(padding=padding, size=size)
    padded = np.pad(as_floats(images)[0], ((0, 0), (padding, padding), (padding, padding)))
    high, wide = size or shape[1], size or shape[2]
    left = place(where[0], padded.shape[2] - wide)
    top = place(where[1], padded.shape[1] - high)
    got = augment(images, view, draws(view, left=where[0], top=where[1]))[0]
    assert distance(got, padded[:, top : top + high, left : left + wide]) < 1e-6


@pytest.mark.parametrize(("left", "column"), [(0.0, 4), (LAST, -4), (1.0, -4)])
@pytest.mark.parametrize(("top", "row"), [(0.0, 4), (LAST, -4), (1.0, -4)])
def test_the_outermost_draws_reach_the_corners_of_the_border(left, column, top, row):
    images = pictures(1, 3, 6, 8)
    view = View(padding=4)
    expected = np.zeros((1, 3, 6, 8))
    for r, c in product(range(6), range(8)):
        if 0 <= r - row < 6 and 0 <= c - column < 8:
            expected[:, :, r, c] = as_floats(images)[:, :, r - row, c - column]
    assert distance(augment(images, view, draws(view, left=left, top=top)), expected) < 1e-6


def test_a_padded_crop_starts_everywhere_equally_often():
    images = torch.zeros(49 * 9, 1, 9, 11, dtype=torch.uint8)
    images[:, :, 4, 5] = 255
    view = View(padding=3)
    left, top = zip(*product(evenly(21), evenly(21)), strict=True)
    dots = augment(images, view, draws(view, 49 * 9, left=left, top=top)).nonzero()
    places, counts = dots[:, 2:].unique(dim=0, return_counts=True)
    assert places.tolist() == [[4 + y, 5 + x] for y in range(-3, 4) for x in range(-3, 4)]
    assert counts.tolist() == [9] * 49


def test_a_view_larger_than_picture_and_border_is_black_to_the_right_and_below():
    images = pictures(3, 1, 4, 5)
    view = View(padding=1, size=9)
    expected = np.zeros((3, 1, 9, 9))
    expected[:, :, 1:5, 1:6] = as_floats(images)
    numbers = draws(view, 3, left=[0, HALF, LAST], top=[LAST, HALF, 0])
    assert distance(augment(images, view, numbers), expected) < 1e-6


def slow_part(view, height, width, attempts):
    """Return height and width of the part, as `RandomResizedCrop.get_params` of torchvision.

    Where no attempt fits, that cuts a long picture down to 4:3; here it stays whole.
    """
    for area, shape in attempts:
        target = height * width * (view.min_area + (view.max_area - view.min_area) * area)
        log_ratio = math.log(3 / 4) + (math.log(4 / 3) - math.log(3 / 4)) * shape
        wide = math.sqrt(target * math.exp(log_ratio))
        high = math.sqrt(target / math.exp(log_ratio))
        # Next to a half, single and double precision may round to different pixels.
        assume(all(abs(side % 1 - 0.5) > 1e-4 for side in (wide, high)))
        if 0 < round(wide) <= width and 0 < round(high) <= height:
            return round(high), round(wide)
    return height, width


def slow_resize(image, top, left, high, wide, size):
    """Return a part of a picture of floats, resized by Pillow channel by channel."""
    parts = (Image.fromarray(channel[top : top + high, left : left + wide]) for channel in image)
    return np.stack([np.asarray(part.resize(size, Image.Resampling.BILINEAR)) for part in parts])


@settings(max_examples=150, deadline=None)
@given(
    st.tuples(st.sampled_from([1, 3]), st.integers(3, 24), st.integers(3, 24))
    | st.sampled_from([(3, 32, 32), (1, 3, 9), (1, 9, 4), (1, 12, 5)]),
    st.sampled_from([0, 1, 5, 18, 40]),
    st.sampled_from([(0.5, 1.0), (0.05, 0.3), (0.001, 0.05), (1.0, 1.0)]),
    st.tuples(uniform, uniform),
    st.lists(st.tuples(uniform, uniform), min_size=10, max_size=10),
)
def test_a_resized_crop_is_what_pillow_makes_of_the_part_drawn(shape, size, areas, where, attempts):
    images = pictures(1, *shape)
    _, height, width = shape
    view = View(resized=1.0, min_area=areas[0], max_area=areas[1], size=size, padding=3)
    named = {}
    for number, (area, ratio) in enumerate(attempts):
        named |= {f"area{number}": area, f"shape{number}": ratio}
    got = augment(images, view, draws(view, left=where[0], top=where[1], **named))[0]

    high, wide = slow_part(view, height, width, attempts)
    left, top = place(where[0], width - wide), place(where[1], height - high)
    image = as_floats(images)[0].astype(np.float32)
    expected = slow_resize(image, top, left, high, wide, (size or width, size or height))
    assert distance(got, expected) < 1e-4


@pytest.mark.parametrize("fitting", [0, 1, 9, None])
def test_the_first_part_that_fits_counts_else_the_whole_picture(fitting):
    # Half of a picture 16 wide and 4 high is 32 pixels: at 4:3, 7 wide and 5 high, which does not
    # fit. An eighth is 3 wide and 2 high, which does; those after it would be 2 wide and 3 high.
    images = pictures(1, 1, 4, 16)
    view = View(resized=1.0, min_area=8 / 64, max_area=0.5)
    named = {f"{kind}{i}": 1.0 for kind in ("area", "shape") for i in range(10)}
    if fitting is not None:
        named |= {f"{kind}{i}": 0.0 for kind in ("area", "shape") for i in range(fitting + 1, 10)}
        named |= {f"area{fitting}": 0.0, f"shape{fitting}": 1.0}
    got = augment(images, view, draws(view, left=0.0, top=0.0, **named))[0]
    high, wide = (2, 3) if fitting is not None else (4, 16)
    image = as_floats(images)[0].astype(np.float32)
    assert distance(got, slow_resize(image, 0, 0, high, wide, (16, 4))) < 1e-4


def test_a_part_of_no_pixels_does_not_fit():
    # 0.3 pixels: at 4:3 none high, at 3:4 none wide, as a square one.
    images = pictures(1, 3, 5, 5)
    view = View(resized=1.0, min_area=0.3 / 25, max_area=0.3 / 25)
    got = augment(images, view, draws(view, left=0.0, top=LAST, shape0=1.0, shape1=0.0))
    assert distance(got, np.tile(as_floats(images)[:, :, 4:, :1], (5, 5))) < 1e-6


@pytest.mark.parametrize("share", [0.0, 0.5, 1.0])
def test_the_share_that_is_resized_follows_the_setting(share):
    # In the first corner of the border everything padded begins with black, nothing resized does.
    images = torch.full((10, 1, 8, 8), 255, dtype=torch.uint8)
    view = View(padding=2, resized=share)
    got = augment(images, view, draws(view, 10, resized=np.arange(10) / 10, left=0.0, top=0.0))
    assert (got[:, 0, 0, 0] > 0.5).tolist() == [i < 10 * share for i in range(10)]
    black = torch.zeros(8, 8)
    black[2:, 2:] = 1
    for picture in got[got[:, 0, 0, 0] < 0.5]:
        assert torch.equal(picture[0], black)


@pytest.mark.parametrize(
    "view", [View(size=18), View(size=18, padding=4), View(size=18, resized=1.0)]
)
def test_the_view_has_the_size_asked_for(view):
    assert augment(pictures(2, 3, 32, 24), view, random_draws(view, 2)).shape == (2, 3, 18, 18)


# Colours


def colours():
    """Return one picture with every extreme colour, greys and many in between."""
    extremes = torch.tensor(list(product([0, 128, 255], repeat=3)), dtype=torch.uint8)
    return torch.cat([extremes.T.reshape(3, -1), pictures(3, 93)], 1).reshape(1, 3, 12, 10)


def dull(**strengths):
    """Return a view that changes the colours of every picture in the ways that are named."""
    still = {"brightness": 0.0, "contrast": 0.0, "saturation": 0.0, "hue": 0.0}
    return View(jitter=1.0, **(still | strengths))


@pytest.mark.parametrize("number", [0.0, 0.2, 0.5, 0.9, LAST])
@pytest.mark.parametrize(
    ("name", "enhance", "num_channels"),
    [
        ("brightness", ImageEnhance.Brightness, 3),
        ("brightness", ImageEnhance.Brightness, 1),
        ("contrast", ImageEnhance.Contrast, 3),
        ("contrast", ImageEnhance.Contrast, 1),
        ("saturation", ImageEnhance.Color, 3),
        ("saturation", ImageEnhance.Color, 1),
    ],
)
def test_colours_change_as_pillow_enhances_them(name, enhance, num_channels, number):
    images = colours()[:, :num_channels]
    view = dull(**{name: 0.8})
    expected = enhance(as_pillow(images[0])).enhance(1 + (2 * number - 1) * 0.8)
    got = augment(images, view, draws(view, **{name: number}))[0]
    # Pillow cuts every intermediate result to whole levels.
    assert distance(got, from_pillow(expected) / 255) < 2 / 255


@pytest.mark.parametrize("number", [0.0, 0.1, 0.5, 0.7, LAST])
def test_the_hue_turns_around_the_colour_circle(number):
    images = colours()
    view = dull(hue=0.5)
    got = augment(images, view, draws(view, hue=number))
    assert distance(got[0], slow_hue(as_floats(images)[0], (2 * number - 1) * 0.5)) < 1e-5


def slow_hue(image, turn):
    result = np.empty_like(image)
    for row, column in product(range(image.shape[1]), range(image.shape[2])):
        hue, saturation, value = colorsys.rgb_to_hsv(*image[:, row, column])
        result[:, row, column] = colorsys.hsv_to_rgb((hue + turn) % 1, saturation, value)
    return result


def slow_jitter(image, factors, turn):
    """Return the definition, a pixel at a time: brightness, contrast, saturation, then hue."""

    def mixed(grey, colour, factor):
        return min(max(grey + factor * (colour - grey), 0), 1)

    def grey_of(pixel):
        return 0.299 * pixel[0] + 0.587 * pixel[1] + 0.114 * pixel[2]

    pixels = [[mixed(0, c, factors[0]) for c in pixel] for pixel in image.reshape(3, -1).T]
    mean = sum(grey_of(pixel) for pixel in pixels) / len(pixels)
    pixels = [[mixed(mean, c, factors[1]) for c in pixel] for pixel in pixels]
    pixels = [[mixed(grey_of(pixel), c, factors[2]) for c in pixel] for pixel in pixels]
    return slow_hue(np.array(pixels).T.reshape(image.shape), turn)


@settings(max_examples=40, deadline=None)
@given(
    st.tuples(*[st.floats(0, 1)] * 3, st.floats(0, 0.5)),
    st.tuples(*[st.just(0.0) | st.just(LAST) | uniform] * 4),
)
def test_the_colours_change_in_a_fixed_order(strengths, numbers):
    names = ("brightness", "contrast", "saturation", "hue")
    view = View(jitter=1.0, **dict(zip(names, strengths, strict=True)))
    images = colours()
    got = augment(images, view, draws(view, **dict(zip(names, numbers, strict=True))))[0]
    *changes, turn = [(2 * n - 1) * s for n, s in zip(numbers, strengths, strict=True)]
    expected = slow_jitter(as_floats(images)[0], [1 + change for change in changes], turn)
    assert distance(got, expected) < 1e-4


def test_saturation_and_hue_leave_grey_pictures_alone():
    images = pictures(5, 1, 6, 7)
    view = View(jitter=1.0, brightness=0.0, contrast=0.0, saturation=1.0, hue=0.5)
    assert distance(augment(images, view, random_draws(view, 5)), as_floats(images)) < 1e-6


@pytest.mark.parametrize("threshold", [0, 1, 77, 77.4, 128, 254.5, 255, 255.9])
def test_solarising_inverts_as_pillow_does(threshold):
    images = torch.arange(256, dtype=torch.uint8).reshape(1, 1, 16, 16).repeat(1, 3, 1, 1)
    view = View(solarise=1.0)
    expected = ImageOps.solarize(as_pillow(images[0]), math.ceil(threshold))
    got = augment(images, view, draws(view, threshold=threshold / 256))[0]
    assert distance(got, from_pillow(expected) / 255) < 1e-6


@settings(max_examples=100, deadline=None)
@given(
    st.sampled_from([1, 3]),
    st.tuples(st.integers(1, 40), st.integers(1, 40)),
    st.lists(st.tuples(st.integers(0, 255), st.integers(0, 255)), min_size=3, max_size=3),
    st.floats(0.2, 5),
    st.integers(0, 10),
)
def test_equalising_is_what_pillow_does_to_each_channel(channels, side, levels, power, seed):
    # Each channel has levels of its own, more of them dark or bright as `power` is large or small.
    shares = np.random.default_rng(seed).random((channels, *side)) ** power
    low, high = np.sort(levels[:channels])[:, :, None, None].transpose(1, 0, 2, 3)
    images = torch.from_numpy((low + (high + 1 - low) * shares).astype(np.uint8))[None]
    assert_equalised(images)


@pytest.mark.parametrize("num_bright", [0, 1, 2, 24, 512, 768, 770, 1023, 1024])
@pytest.mark.parametrize(("dark", "bright"), [(0, 255), (100, 101), (0, 1), (254, 255)])
def test_equalising_two_colours_and_flat_pictures(num_bright, dark, bright):
    images = torch.full((1, 1, 32, 32), dark, dtype=torch.uint8)
    images.view(-1)[:num_bright] = bright
    assert_equalised(images)


@pytest.mark.parametrize("num_pixels", [1, 2, 254, 255, 256, 257, 509, 510, 511, 512])
def test_equalising_few_pixels(num_pixels):
    # Pillow's whole steps jump here: below 255 + 1 pixels nothing changes, at 510 the brightest
    # level would end at 509.
    images = (torch.arange(num_pixels) % 256).to(torch.uint8).reshape(1, 1, 1, -1)
    assert_equalised(images)


def assert_equalised(images):
    view = View(equalise=1.0)
    got = augment(images, view, draws(view))
    expected = from_pillow(ImageOps.equalize(as_pillow(images[0])))
    assert distance(255 * got[0], expected) < 1e-4  # whole levels: less than one is none


# Which pictures change


@pytest.mark.parametrize("share", [0.0, 0.25, 0.5, 1.0])
@pytest.mark.parametrize("part", ["jitter", "solarise", "equalise"])
def test_the_share_that_changes_follows_the_setting(part, share):
    images = pictures(1, 3, 20, 20).repeat(8, 1, 1, 1)
    view = View(brightness=0.5, **{part: share})
    chosen = {part: np.arange(8) / 8} if share else {}
    if part == "jitter" and share:
        chosen["brightness"] = 0.0
    got = augment(images, view, draws(view, 8, **chosen))
    changed = (got != images.float() / 255).flatten(1).any(1)
    assert changed.tolist() == [i < 8 * share for i in range(8)]


def test_half_of_the_pictures_are_mirrored():
    images = pictures(1, 3, 5, 6).repeat(10, 1, 1, 1)
    view = View(flip=True)
    got = augment(images, view, draws(view, 10, flip=evenly(10)))
    plain = images.float() / 255
    assert torch.equal(got, torch.cat([plain[:5].flip(3), plain[5:]]))


def test_the_view_that_switches_everything_off_changes_nothing():
    images = pictures(3, 3, 4, 5)
    got = augment(images, View(), random_draws(View(), 3))
    assert got.dtype == torch.float32
    assert torch.equal(got, images.float() / 255)


def test_the_parts_of_a_view_follow_one_another():
    # Each part alone on the result of the one before. Whole pixels and a threshold between two
    # levels let the pictures be rounded on the way.
    images = pictures(4, 3, 20, 24)
    numbers = {
        "shift": {"x": 1.0, "y": 0.0},
        "padding": {"left": 0.1, "top": 0.9},
        "flip": {"flip": 0.0},
        "jitter": {"brightness": 0.2, "contrast": 0.9, "saturation": 0.1, "hue": 1.0},
        "solarise": {"threshold": 150.5 / 256},
        "equalise": {},
    }
    whole = View(shift=2.0, padding=3, flip=True, jitter=1.0, solarise=1.0, equalise=1.0)
    expected = images
    for part, named in numbers.items():
        view = replace(View(), **{part: getattr(whole, part)})
        expected = as_bytes(augment(expected, view, draws(view, 4, **named)))
    together = {name: number for named in numbers.values() for name, number in named.items()}
    got = augment(images, whole, draws(whole, 4, **together))
    assert torch.equal(as_bytes(got), expected)


# What a view depends on


@pytest.mark.parametrize(
    ("view", "expected"),
    [
        (View(), 5),
        (View(shift=1.0, rotation=9.0, scale=0.1, flip=True), 5),
        (View(padding=4), 28),
        (View(resized=0.5), 28),
        (View(size=18), 28),
        (View(jitter=0.5), 10),
        (View(solarise=0.5), 7),
        (View(equalise=0.5), 6),
        (EVERYTHING, 36),
    ],
)
def test_a_view_takes_as_many_draws_as_it_says(view, expected):
    assert num_draws(view) == expected == len(draw_names(view))
    augment(pictures(2, 3, 6, 6), view, torch.rand(2, expected))
    for wrong in (expected - 1, expected + 1):
        with pytest.raises(RuntimeError, match="split_with_sizes"):
            augment(pictures(2, 3, 6, 6), view, torch.rand(2, wrong))


@pytest.mark.parametrize("name", draw_names(EVERYTHING))
def test_every_draw_matters_to_its_picture_alone(name):
    images = pictures(1, 3, 12, 9).repeat(200, 1, 1, 1)
    numbers = random_draws(EVERYTHING, 200)
    if name.startswith(("area", "shape")):
        # The attempts before this one have to fail: the whole area at 4:3 is wider than 9.
        first = draw_names(EVERYTHING).index("area0")
        numbers[:, first : first + 2 * int(name[-1])] = 1.0
    changed = numbers.clone()
    column = draw_names(EVERYTHING).index(name)
    changed[::2, column] = (changed[::2, column] + 0.5) % 1
    before, after = (augment(images, EVERYTHING, n) for n in (numbers, changed))
    differs = (before != after).flatten(1).any(1)
    assert differs[::2].any()
    assert not differs[1::2].any()


def test_every_picture_follows_its_own_draws():
    images = pictures(6, 3, 10, 12)
    numbers = random_draws(EVERYTHING, 6)
    together = augment(images, EVERYTHING, numbers)
    for i in range(6):
        alone = augment(images[i : i + 1], EVERYTHING, numbers[i : i + 1])[0]
        assert torch.allclose(together[i], alone, atol=1e-6)


def test_several_views_are_made_one_by_one():
    images = pictures(4, 3, 10, 12)
    numbers = random_draws(EVERYTHING, 3, 4)
    views = augment_views(images, EVERYTHING, numbers)
    assert views.shape == (3, 4, 3, 9, 9)
    for view, row in zip(views, numbers, strict=True):
        assert torch.allclose(view, augment(images, EVERYTHING, row), atol=1e-6)


def test_equal_draws_make_equal_bits_and_nothing_else_is_touched():
    images, numbers = pictures(4, 3, 10, 12), random_draws(EVERYTHING, 4)
    copies = images.clone(), numbers.clone()
    with unchanged_global_state():
        first = augment(images, EVERYTHING, numbers)
    assert torch.equal(first, augment(copies[0], EVERYTHING, copies[1]))
    assert torch.equal(images, copies[0])
    assert torch.equal(numbers, copies[1])


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("level", [0, 255, None])
def test_views_stay_between_black_and_white(channels, level):
    images = pictures(200, channels, 10, 12)
    if level is not None:
        images = torch.full_like(images, level)
    view = replace(EVERYTHING, brightness=1.0, contrast=1.0, saturation=1.0, hue=0.5, equalise=0.0)
    for changed in (view, replace(view, solarise=0.0), replace(view, jitter=0.0)):
        got = augment(images, changed, random_draws(changed, 200))
        assert got.min() >= -1e-6
        assert got.max() <= 1 + 1e-6


def test_views_come_in_groups_of_one_size():
    large, small = torch.zeros(2, 4, 3, 8, 8), torch.zeros(5, 4, 3, 6, 6)
    assert [len(group) for group in Views(large=large).groups] == [2]
    assert [len(group) for group in Views(large=large, small=small).groups] == [2, 5]


# Vectors

# Around their means the numbers vary by 1, by 20 and not at all.
VECTORS = torch.tensor([[0.0, -30.0, 7.0], [2.0, 10.0, 7.0]])


def test_noise_is_in_the_unit_in_which_each_number_varies():
    normal = torch.tensor([[1.0, -1.0, 3.0], [2.0, 0.5, -4.0]])
    got = augment(VECTORS, View(noise=0.5), normal)
    # Half a unit times the draw: 0.5 · 1 · (1, 2), 0.5 · 20 · (-1, 0.5), 0.
    assert got.tolist() == [[0.5, -40.0, 7.0], [3.0, 15.0, 7.0]]


def test_without_noise_vectors_stay_as_they_are():
    vectors = torch.randn(20, 3, generator=torch.Generator().manual_seed(0))
    assert torch.equal(augment(vectors, View(), torch.full((20, 3), torch.nan)), vectors)


def test_a_vector_alone_has_no_unit_and_stays_as_it_is():
    assert torch.equal(augment(VECTORS[:1], View(noise=0.5), torch.ones(1, 3)), VECTORS[:1])


def test_a_number_that_never_changes_gets_no_noise_however_large_it_is():
    vectors = torch.full((1001, 2), 1e8 / 3)
    assert torch.equal(augment(vectors, View(noise=1.0), torch.ones(1001, 2)), vectors)


def test_several_views_of_vectors_have_draws_of_their_own_and_one_unit():
    normal = torch.tensor([[[1.0, 0.0, 1.0], [0.0, 1.0, 1.0]], [[-1.0, 2.0, 1.0], [0.0, 0.0, 1.0]]])
    got = augment_views(VECTORS, View(noise=0.5), normal)
    assert got.tolist() == [
        [[0.5, -30.0, 7.0], [2.0, 20.0, 7.0]],
        [[-0.5, -10.0, 7.0], [2.0, 10.0, 7.0]],
    ]
    assert torch.equal(augment_views(VECTORS, View(), normal), torch.stack([VECTORS, VECTORS]))


def test_noise_is_as_wide_as_asked_for():
    source = torch.Generator().manual_seed(0)
    vectors = torch.tensor([1e-3, 1.0, 1e6]) * torch.randn(4000, 3, generator=source)
    normal = torch.randn(4000, 3, generator=source)
    noise = (augment(vectors, View(noise=0.2), normal) - vectors) / vectors.std(0)
    # The deviation of n numbers varies by σ / √(2n), about 1 % here.
    assert noise.std(0).tolist() == pytest.approx([0.2] * 3, rel=0.05)


@pytest.mark.parametrize(
    ("view", "shape"),
    [(View(), (3, 8, 6)), (View(size=5), (3, 5, 5)), (View(padding=1), (3, 8, 6))],
)
def test_the_shape_of_a_view_is_told_beforehand(view, shape):
    pictures = torch.zeros(2, 3, 8, 6, dtype=torch.uint8)
    assert tuple(augment(pictures, view, torch.rand(2, num_draws(view))).shape[1:]) == shape
    assert view_shape(view, (3, 8, 6)) == shape
    assert view_shape(View(noise=0.5), (7,)) == (7,)


def test_vectors_and_draws_are_left_as_they_were():
    vectors, normal = VECTORS.clone(), torch.ones(2, 3)
    with unchanged_global_state():
        augment(vectors, View(noise=0.5), normal)
    assert torch.equal(vectors, VECTORS)
    assert torch.equal(normal, torch.ones(2, 3))


# What views draw, and which can be made


@pytest.mark.parametrize(
    ("view", "shape", "expected"),
    [
        (View(noise=0.1), (5,), Draw(kind="normal", shape=(3, 8, 5))),
        (View(), (5,), Draw(kind="normal", shape=(3, 8, 5))),
        (View(), (1, 6, 7), Draw(kind="uniform", shape=(3, 8, 5))),
        (EVERYTHING, (3, 6, 7), Draw(kind="uniform", shape=(3, 8, 36))),
    ],
)
def test_pictures_draw_uniform_numbers_and_vectors_normal_ones(view, shape, expected):
    assert view_draw(view, 3, 8, shape) == expected


def other_value(name):
    """Return a value of a field of `View` that is allowed and not the one it has by default."""
    kind = type(getattr(View(), name))
    return 0.75 if name == "max_area" else {bool: True, int: 1, float: 0.25}[kind]


PICTURE_FIELDS = [item.name for item in fields(View) if item.name != "noise"]


@pytest.mark.parametrize("name", PICTURE_FIELDS)
@pytest.mark.parametrize("noise", [0.0, 0.5])
def test_whatever_changes_pictures_is_refused_for_vectors(name, noise):
    view = View(**{name: other_value(name)}, noise=noise)
    assert view != View(noise=noise)
    message = "discovery.large changes pictures; vectors accept discovery.large.noise alone"
    with pytest.raises(InputError, match=re.escape(message)):
        check_view(view, (5,), name="discovery.large")
    if not noise:
        check_view(view, (3, 8, 8), name="discovery.large")


def test_noise_is_for_vectors_alone():
    check_view(View(noise=0.3), (5,), name="supervised.view")
    check_view(View(), (5,), name="supervised.view")
    check_view(EVERYTHING, (3, 8, 8), name="supervised.view")
    message = "supervised.view.noise=0.3 is for vectors; pictures need 0"
    with pytest.raises(InputError, match=re.escape(message)):
        check_view(replace(EVERYTHING, noise=0.3), (3, 8, 8), name="supervised.view")

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ncdwf.config import View
from ncdwf.data.augment import NUM_DRAWS, augment

HALF = 0.5
"""The draw that changes nothing: 2 · 0.5 - 1 = 0. (For the flip it means: do not mirror.)"""


def pictures(*shape, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 256, shape, dtype=np.uint8)
    return torch.from_numpy(numbers)


def draws(num_images=1, **changed):
    names = ("x", "y", "rotation", "scale", "flip")
    values = [changed.get(name, HALF) for name in names]
    return torch.tensor([values] * num_images)


def as_floats(images):
    return images.numpy().astype(np.float64) / 255


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
    numbers = torch.rand(2, NUM_DRAWS, generator=torch.Generator().manual_seed(seed))
    views = augment(images, view, numbers)
    for image, row, got in zip(as_floats(images), numbers, views, strict=True):
        assert np.abs(reference(image, view, row) - got.numpy()).max() < 2e-4


@pytest.mark.parametrize(("x", "y"), [(0, 0), (1, 0), (-1, 0), (0, 2), (0, -2), (2, -1), (-2, 1)])
def test_a_shift_by_whole_pixels_moves_them_and_fills_with_black(x, y):
    images = pictures(2, 3, 5, 7)
    moved = augment(images, View(shift=2.0), draws(2, x=(x / 2 + 1) / 2, y=(y / 2 + 1) / 2))
    # The map leads from the new picture to the old one: a positive draw moves left and up.
    expected = np.roll(as_floats(images), (-y, -x), axis=(2, 3))
    rows, columns = np.arange(5) + y, np.arange(7) + x
    expected[:, :, (rows < 0) | (rows > 4)] = 0
    expected[:, :, :, (columns < 0) | (columns > 6)] = 0
    assert np.abs(moved.numpy() - expected).max() < 1e-5


@pytest.mark.parametrize(("number", "mirrored"), [(0.0, True), (0.49, True), (0.5, False)])
def test_a_flip_is_a_mirror(number, mirrored):
    images = pictures(2, 3, 4, 6)
    expected = np.flip(as_floats(images), 3) if mirrored else as_floats(images)
    got = augment(images, View(flip=True), draws(2, flip=number)).numpy()
    assert np.abs(got - expected).max() < 1e-5


@pytest.mark.parametrize(("number", "quarter_turns"), [(1.0, 1), (0.0, -1)])
def test_a_rotation_by_a_quarter_turns_a_square_picture(number, quarter_turns):
    images = pictures(1, 3, 6, 6)
    # numpy turns counter-clockwise, as seen with the first row on top.
    expected = np.rot90(as_floats(images), quarter_turns, axes=(2, 3))
    got = augment(images, View(rotation=90.0), draws(rotation=number)).numpy()
    assert np.abs(got - expected).max() < 1e-5


def test_rotation_does_not_stretch_a_wide_picture():
    # Two dots three pixels right and left of the centre of a 3×9 picture are three pixels above
    # and below it after a quarter turn: outside. One pixel away they stay inside.
    images = torch.zeros(2, 1, 3, 9, dtype=torch.uint8)
    images[0, 0, 1, [1, 7]] = 255
    images[1, 0, 1, [3, 5]] = 255
    got = augment(images, View(rotation=90.0), draws(2, rotation=1.0))
    expected = torch.zeros(2, 1, 3, 9)
    expected[1, 0, [0, 2], 4] = 1
    assert torch.allclose(got, expected, atol=1e-5)


def test_a_large_scale_makes_things_larger():
    images = torch.zeros(1, 1, 8, 8, dtype=torch.uint8)
    images[:, :, 3:5, 3:5] = 255
    view = View(scale=0.5)
    areas = [float(augment(images, view, draws(scale=number)).sum()) for number in (0.0, 0.5, 1.0)]
    assert areas[0] < areas[1] == 4 < areas[2]


def test_half_the_size_is_every_other_pixel():
    # Scale 0.5: pixel centres ±0.5, ±1.5 of a 4×4 picture come from ±1 and ±3. At ±1 two
    # pixels (±0.5, ±1.5) mix evenly; ±3 lies outside.
    images = pictures(1, 1, 4, 4)
    got = augment(images, View(scale=0.5), draws(scale=0.0)).numpy()
    blocks = as_floats(images).reshape(1, 1, 2, 2, 2, 2).mean((3, 5))
    assert np.abs(got[:, :, 1:3, 1:3] - blocks).max() < 1e-5
    assert got.sum() == pytest.approx(blocks.sum(), abs=1e-5)


def test_the_view_that_switches_everything_off_changes_nothing():
    images = pictures(3, 3, 4, 5)
    got = augment(images, View(), torch.rand(3, NUM_DRAWS))
    assert got.dtype == torch.float32
    assert torch.equal(got, images.float() / 255)


def test_every_picture_follows_its_own_draws():
    images = pictures(1, 1, 6, 6).expand(4, -1, -1, -1)
    view = View(shift=1.0, rotation=30.0, scale=0.2, flip=True)
    numbers = torch.rand(4, NUM_DRAWS, generator=torch.Generator().manual_seed(0))
    together = augment(images, view, numbers)
    for i in range(4):
        assert torch.equal(together[i], augment(images[:1], view, numbers[i : i + 1])[0])
    assert not torch.equal(together[0], together[1])


def test_views_stay_between_black_and_white():
    images = torch.full((50, 1, 5, 5), 255, dtype=torch.uint8)
    view = View(shift=3.0, rotation=180.0, scale=0.5)
    numbers = torch.rand(50, NUM_DRAWS, generator=torch.Generator().manual_seed(0))
    got = augment(images, view, numbers)
    assert got.min() == 0
    assert got.max() <= 1 + 1e-6


def test_a_rotation_looks_as_an_image_library_draws_it():
    ramp = np.add.outer(np.arange(9), np.arange(9)).astype(np.uint8) * 12
    expected = np.asarray(Image.fromarray(ramp).rotate(20, Image.Resampling.BILINEAR)) / 255
    images = torch.from_numpy(ramp)[None, None]
    got = augment(images, View(rotation=20.0), draws(rotation=1.0))[0, 0].numpy()
    # Borders are handled differently there.
    assert np.abs(got - expected)[2:-2, 2:-2].max() < 0.01

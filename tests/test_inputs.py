import re
from itertools import product

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image

from ncdwf.data.decoding import read_pixels
from ncdwf.data.inputs import (
    DIGEST_ROWS,
    LARGEST_NUMBER,
    as_images,
    as_inputs,
    as_labels,
    as_vectors,
    digest,
    fitted,
)
from ncdwf.errors import InputError

ARRAY = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)
NUMBERS = [[0, 1, 2], [3, 4, 100]]


def read_only(array):
    copy = array.copy()
    copy.flags.writeable = False
    return copy


@pytest.mark.parametrize(
    "given_as",
    [
        torch.from_numpy,
        lambda a: a,
        list,
        tuple,
        lambda a: list(torch.from_numpy(a)),
        np.asfortranarray,
        lambda a: np.flip(np.flip(a, -1).copy(), -1),
        read_only,
    ],
)
def test_pictures_come_in_many_forms_and_out_in_one(given_as):
    images = as_images(given_as(ARRAY))
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy(), ARRAY)


@pytest.mark.parametrize("given_as", [torch.from_numpy, lambda a: a, list])
def test_grey_pictures_may_leave_out_the_channel(given_as):
    images = as_images(given_as(ARRAY[:, 0]))
    assert np.array_equal(images.numpy(), ARRAY[:, :1])


def test_no_pictures_are_pictures():
    assert as_images(np.zeros((0, 3, 4, 4), np.uint8)).shape == (0, 3, 4, 4)
    assert len(as_images([])) == 0


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (ARRAY.astype(np.float32), "pool are torch.float32"),
        (ARRAY.astype(np.int64), "pool are torch.int64"),
        (np.full((1, 1, 2, 2), np.nan), "pool hold NaN or infinite values"),
        (torch.full((1, 1, 2, 2), torch.inf), "pool hold NaN or infinite values"),
        (ARRAY[0, 0], "pool have shape (4, 5)"),
        (ARRAY[None], "pool have shape (1, 2, 3, 4, 5)"),
        (ARRAY[:, :2], "pool have shape (2, 2, 4, 5)"),
        (ARRAY[:, :, :0], "pool have shape (2, 3, 0, 5)"),
        (np.moveaxis(ARRAY, 1, -1), "pool have shape (2, 4, 5, 3)"),
        ([ARRAY[0], ARRAY[1, :, :3]], "number 0 is (3, 4, 5), number 1 is (3, 3, 5)"),
        ([ARRAY[0], ARRAY[1, :1]], "pool differ in size or channels"),
        ([[[1], [1, 2]]], "pool are not arrays of numbers"),
        (np.array([None, {}]), "pool are not an array of numbers"),
        ("pictures", "pool are not an array of numbers"),
        (None, "pool are not an array of numbers"),
    ],
)
def test_what_are_no_pictures_is_refused_by_name(images, message):
    with pytest.raises(InputError, match=re.escape(message)):
        as_images(images, name="pool")


# Vectors

REAL_TYPES = [
    *(np.uint8, np.int8, np.uint16, np.int16, np.uint32, np.int32, np.uint64, np.int64),
    *(np.float16, np.float32, np.float64, np.longdouble),
    *(">u2", ">i4", ">f4", ">f8", "<f8"),
]


@pytest.mark.parametrize("dtype", REAL_TYPES)
@pytest.mark.parametrize("take", [as_vectors, as_inputs])
def test_vectors_of_any_real_type_become_single_floats(take, dtype):
    vectors = take(np.array(NUMBERS, dtype))
    assert vectors.dtype == torch.float32
    assert vectors.tolist() == NUMBERS


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64, torch.int32])
@pytest.mark.parametrize("take", [as_vectors, as_inputs])
def test_tensors_of_vectors_become_single_floats(take, dtype):
    vectors = take(torch.tensor(NUMBERS, dtype=dtype))
    assert vectors.dtype == torch.float32
    assert vectors.tolist() == NUMBERS


@pytest.mark.parametrize(
    "given_as",
    [
        lambda a: a.tolist(),
        list,
        tuple,
        lambda a: [torch.from_numpy(row) for row in a],
        lambda a: [tuple(row) for row in a.tolist()],
        torch.from_numpy,
        np.asfortranarray,
        lambda a: np.flip(np.flip(a, -1).copy(), -1),
        read_only,
    ],
)
def test_vectors_come_in_many_forms_and_out_in_one(given_as):
    vectors = as_inputs(given_as(np.array(NUMBERS, np.float64)))
    assert vectors.dtype == torch.float32
    assert vectors.tolist() == NUMBERS


def test_no_vectors_are_vectors():
    vectors = as_inputs(np.zeros((0, 3)))
    assert vectors.shape == (0, 3)
    assert vectors.dtype == torch.float32


def test_the_largest_number_is_not_too_large():
    numbers = np.array([[LARGEST_NUMBER, -LARGEST_NUMBER]], np.float32)
    assert as_vectors(numbers).tolist() == numbers.tolist()


@pytest.mark.parametrize(
    ("vectors", "message"),
    [
        ([[1.0, np.nan]], "pool hold NaN, infinite or too large values"),
        (torch.tensor([[-torch.inf, 1]]), "pool hold NaN, infinite or too large values"),
        ([[1.0, 1.1e30]], "pool hold NaN, infinite or too large values; up to 1e+30 is accepted"),
        (torch.tensor([[-1e300]], dtype=torch.float64), "infinite or too large values"),
        (np.array([["1e4000"]], np.longdouble), "pool hold NaN, infinite or too large values"),
        ([[2**70, 1]], "pool are not an array of numbers"),
        ([[1j, 2j]], "pool are torch.complex128; real numbers are accepted"),
        ([[True, False]], "pool are torch.bool; real numbers are accepted"),
        (torch.ones(2, 3, dtype=torch.bool), "pool are torch.bool; real numbers are accepted"),
        (np.zeros((3, 0)), "pool have shape (3, 0); [row, number] is accepted"),
        ([[], []], "pool have shape (2, 0); [row, number] is accepted"),
        ([["cat", "dog"]], "pool are not an array of numbers"),
        ([[None, 1.0]], "pool are not an array of numbers"),
        (np.array([[None, {}]]), "pool are not an array of numbers"),
    ],
)
@pytest.mark.parametrize("take", [as_vectors, as_inputs])
def test_what_are_no_vectors_is_refused_in_one_line(take, vectors, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        take(vectors, name="pool")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("vectors", "shape"),
    [([1.0, 2.0], (2,)), (3.0, ()), ([], (0,)), (ARRAY[:, 0], (2, 4, 5)), (ARRAY, (2, 3, 4, 5))],
)
def test_vectors_have_two_dimensions(vectors, shape):
    with pytest.raises(InputError, match=re.escape(f"vectors have shape {shape}")):
        as_vectors(vectors)


def test_vectors_of_different_lengths_are_refused():
    message = "pool differ in size or channels: number 0 is (2,), number 1 is (3,)"
    with pytest.raises(InputError, match=re.escape(message)):
        as_inputs([[1.0, 2.0], [1.0, 2.0, 3.0]], name="pool")


@pytest.mark.parametrize("given_as", [torch.from_numpy, lambda a: a, list])
def test_three_and_four_dimensions_are_pictures(given_as):
    for array, expected in ((ARRAY, ARRAY), (ARRAY[:, 0], ARRAY[:, :1])):
        images = as_inputs(given_as(array))
        assert images.dtype == torch.uint8
        assert np.array_equal(images.numpy(), expected)


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (ARRAY.astype(np.float32), "pool are torch.float32; uint8 values 0 to 255 are accepted"),
        (ARRAY[:, 0].astype(np.float64), "pool are torch.float64; uint8 values 0 to 255"),
        (ARRAY[None], "pool have shape (1, 2, 3, 4, 5)"),
        (ARRAY[0, 0, 0], "pool have shape (5,)"),
        (None, "pool are not an array of numbers"),
    ],
)
def test_what_are_neither_pictures_nor_vectors_is_refused_by_name(images, message):
    with pytest.raises(InputError, match=re.escape(message)):
        as_inputs(images, name="pool")


# Sizes


@pytest.mark.parametrize(
    ("size", "cut"),
    [
        ((5, 7), (8, 11)),
        ((10, 14), (8, 11)),
        ((3, 9), (4, 11)),
        ((1, 1), (9, 9)),
        ((13, 4), (9, 3)),
    ],
)
@pytest.mark.parametrize("channels", [1, 3])
def test_the_middle_is_scaled_as_an_image_library_does_it(channels, size, cut):
    numbers = np.random.default_rng(0).integers(0, 256, (2, channels, 9, 11), dtype=np.uint8)
    got = fitted(torch.from_numpy(numbers), *size)
    assert got.dtype == torch.uint8
    assert got.shape == (2, channels, *size)
    top, left = (9 - cut[0]) // 2, (11 - cut[1]) // 2
    middle = (left, top, left + cut[1], top + cut[0])
    for image, channel in product(range(2), range(channels)):
        picture = Image.fromarray(numbers[image, channel]).crop(middle)
        expected = np.asarray(picture.resize(size[::-1], Image.Resampling.BILINEAR), np.int64)
        assert np.abs(got[image, channel].numpy() - expected).max() <= 1  # it rounds in between


@pytest.mark.parametrize("size", [(20, 30), (30, 20), (64, 16), (16, 64)])
def test_arrays_show_the_part_that_files_do(size, tmp_path):
    row, column = np.indices((40, 60))
    ramp = (row + 2 * column).astype(np.uint8)
    Image.fromarray(ramp).save(tmp_path / "ramp.png")
    of_file = read_pixels(tmp_path / "ramp.png", (1, *size)).astype(int)
    of_array = fitted(torch.from_numpy(ramp[None, None]), *size)[0].numpy()
    inside = np.s_[:, 2:-2, 2:-2]  # a file's pixels at the border know of those beyond it
    # Half a pixel of this ramp is worth 1, and either rounds.
    assert np.abs(of_file - of_array)[inside].max() <= 2


def test_the_middle_is_cut_out_in_whole_pixels():
    images = torch.arange(7, dtype=torch.uint8).expand(1, 1, 3, 7)
    assert fitted(images, 3, 3)[0, 0, 0].tolist() == [2, 3, 4]
    assert fitted(images, 3, 2)[0, 0, 0].tolist() == [2, 3]
    assert fitted(images, 1, 7)[0, 0].tolist() == [[0, 1, 2, 3, 4, 5, 6]]


def test_half_a_picture_by_hand():
    # A triangle over two pixels each side: 1, 3, 3, 1 of 8, at the border 3, 3, 1 of 7.
    images = (
        torch.tensor([0, 0, 0, 90, 0, 0], dtype=torch.uint8).view(1, 1, 1, 6).expand(-1, -1, 2, -1)
    )
    # The bright pixel is out of reach of the first, 3/8 of the second and 1/7 of the third:
    # 33.75 and 12.86.
    assert fitted(images, 1, 3).flatten().tolist() == [0, 34, 13]


def test_pictures_of_that_size_already_are_left_alone():
    images = torch.from_numpy(ARRAY)
    assert fitted(images, 4, 5) is images


def test_pictures_are_scaled_one_by_one_however_many():
    numbers = np.random.default_rng(0).integers(0, 256, (600, 1, 4, 4), dtype=np.uint8)
    images = torch.from_numpy(numbers)
    together = fitted(images, 3, 5)
    assert len(together) == 600
    for i in (0, 255, 256, 599):
        assert torch.equal(together[i : i + 1], fitted(images[i : i + 1], 3, 5))


def test_no_pictures_have_any_size():
    assert fitted(torch.zeros(0, 3, 4, 5, dtype=torch.uint8), 7, 6).shape == (0, 3, 7, 6)


# Labels


@settings(max_examples=30, deadline=None)
@given(st.integers(2, 5), st.integers(0, 10), st.randoms(), st.sampled_from([np.uint8, np.int64]))
def test_labels_of_all_classes_are_kept(num_known, more, random, dtype):
    more_of_them = (random.randrange(num_known) for _ in range(more))
    wanted = [*range(num_known), *range(num_known), *more_of_them]
    random.shuffle(wanted)
    for labels in (wanted, np.array(wanted, dtype), torch.tensor(wanted)):
        checked = as_labels(labels, len(wanted))
        assert checked.dtype == torch.int64
        assert checked.tolist() == wanted


@pytest.mark.parametrize(
    ("labels", "num_images", "message"),
    [
        ([0, 1], 3, "2 labels do not match 3 pictures"),
        ([0.0, 1.0], 2, "labels are torch.float64"),
        ([True, False], 2, "labels are torch.bool"),
        ([0j, 1j], 2, "labels are torch.complex128"),
        ([[0, 1]], 1, "of shape (1, 2)"),
        (3, 1, "of shape ()"),
        (["cat", "dog"], 2, "labels are not an array of numbers"),
        ([[1], [1, 2]], 2, "labels are not an array of numbers"),
        ([0, 2], 2, "labels run from 0 to 2 with 2 distinct values"),
        ([1, 2], 2, "labels run from 1 to 2"),
        ([-1, 0, 1], 3, "labels run from -1 to 1"),
        ([0, 0], 2, "there is one known class"),
        (np.zeros(0, np.int64), 0, "there are no labelled pictures"),
    ],
)
def test_what_are_no_labels_is_refused(labels, num_images, message):
    with pytest.raises(InputError, match=re.escape(message)):
        as_labels(labels, num_images)


def test_a_digest_tells_data_apart():
    images, labels = torch.from_numpy(ARRAY), torch.tensor([0, 1])
    known = digest(images, labels, ("a", "b"))
    assert known == digest(images.clone(), labels.clone(), ["a", "b"])
    assert (known["rows"], known["shape"]) == (2, [3, 4, 5])
    assert digest(images) == {key: known[key] for key in ("rows", "shape", "sha256")}
    changed = images.clone()
    changed[-1, -1, -1, -1] += 1
    for other in (
        changed,
        images[:1],
        images.flip(0),
        images.view(2, 3, 5, 4),
        images.float()[0, 0],
    ):
        assert digest(other) != digest(images)
    for other in (digest(images, labels.flip(0), ("a", "b")), digest(images, labels, ("a", "c"))):
        assert other != known
        assert other["sha256"] == known["sha256"]


def test_a_digest_reads_few_rows_of_a_large_pool():
    rows = torch.arange(3 * DIGEST_ROWS, dtype=torch.float32)[:, None]
    unread, read = rows.clone(), rows.clone()
    unread[1], read[3] = -1, -1
    assert digest(unread) == digest(rows) != digest(read)
    assert digest(rows[:0])["rows"] == 0

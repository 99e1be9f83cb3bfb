import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncdwf.data.images import as_images, as_labels
from ncdwf.errors import InputError

ARRAY = np.arange(2 * 3 * 4 * 5, dtype=np.uint8).reshape(2, 3, 4, 5)


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

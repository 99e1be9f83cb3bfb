"""X and y as scikit-learn takes them: what the model calls classes."""

import numpy as np
import pytest

from ncdwf.data.xy import as_the_model_names_them


@pytest.mark.parametrize(
    ("classes", "names", "expected", "named"),
    [
        # Words are taken as they are.
        (["a", "b", "n"], ["a", "7", "elk"], ["a", "7", "elk"], [1, 1, 1]),
        (["a", "b", "n"], ["a", "b", "n"], ["a", "b", "n"], [1, 1, 0]),
        # Numbers are, where classes are numbers; other words are left.
        ([0, 1, 2], ["0", "1", "novel-1"], [0, 1, 2], [1, 1, 0]),
        ([0, 1, 2], ["0", "1", "-40"], [0, 1, -40], [1, 1, 1]),
        ([0, 1, 2], ["0", "1", "2"], [0, 1, 2], [1, 1, 1]),
        ([0, 1, 2], ["0", "1", "2.5"], [0, 1, 2], [1, 1, 0]),
        ([0, 1, 2], ["elk", "1", "novel-1"], [0, 1, 2], [1, 1, 0]),
        ([0.0, 1.0, 2.0], ["0.0", "1.0", "40"], [0.0, 1.0, 40.0], [1, 1, 1]),
        # Beyond what a class may be.
        ([0, 1, 2], ["0", "1", "9" * 20], [0, 1, 2], [1, 1, 0]),
        ([0, 1, 2], ["0", "1", "9" * 9999], [0, 1, 2], [1, 1, 0]),
        ([0.0, 1.0, 2.0], ["0.0", "1.0", "nan"], [0.0, 1.0, 2.0], [1, 1, 0]),
        # No two classes are one number: what has a name keeps it.
        ([0, 1, 2, 3], ["0", "1", "3", "novel-2"], [0, 1, 3, 4], [1, 1, 1, 0]),
        ([0, 1, 2, 3], ["0", "1", "3", "2"], [0, 1, 3, 2], [1, 1, 1, 1]),
        ([0, 1, 2, 3], ["elk", "1", "0", "novel-2"], [4, 1, 0, 3], [1, 1, 1, 0]),
        ([0, 1, 2, 3], ["0", "1", "3", "40"], [0, 1, 3, 40], [1, 1, 1, 1]),
        ([0, 1, 2, 3], ["0", "1", "7", "07"], [0, 1, 2, 3], [1, 1, 0, 0]),
        ([0, 1, 2, 3], ["0", "1", "01", "1_0"], [0, 1, 2, 10], [1, 1, 0, 1]),
    ],
)
def test_classes_follow_the_names_of_the_model(classes, names, expected, named):
    before = [True, True, *[False] * (len(classes) - 2)]
    found, is_named = as_the_model_names_them(classes, before, names)
    assert found.tolist() == expected
    assert found.dtype == np.array(classes).dtype or found.dtype.kind == "U"
    assert is_named.tolist() == [bool(value) for value in named]

"""X and y as scikit-learn takes them: to tensors, and to the names of classes.

Labels are read here, so nothing of the discovery phase may import this module.
"""

import numbers
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d

from ncdwf.config import require
from ncdwf.data.folder import decode, survey
from ncdwf.data.inputs import Inputs, as_images, as_inputs, resized
from ncdwf.errors import InputError, first_line, shown

LARGEST_LABEL = 2**52
"""Up to here numbers of every kind go on one by one, as novel classes do."""


class NotNumbersError(InputError, TypeError):
    """X holds something else; scikit-learn expects a `TypeError` of it."""


def read_new(X: Any, side_of: Callable[[int], int]) -> Inputs:
    """Return X as a network that is still to be made will read it.

    Args:
        X: pictures, a list of paths of pictures, or vectors.
        side_of: from the shorter side of pictures to the one that they are scaled to.
    """
    if _are_paths(X):
        paths = [Path(path) for path in X]
        found = survey(paths)
        side = side_of(found.median_side)
        shape = (3 if found.has_colour else 1, side, side)
        return decode(paths, shape, strict=True).images
    inputs = as_inputs(_array(X), name="X")
    if inputs.ndim == 2:
        return inputs
    height, width = inputs.shape[2:]
    factor = side_of(min(height, width)) / min(height, width)  # proportions stay
    scaled = max(1, round(height * factor)), max(1, round(width * factor))
    return resized(as_images(inputs), *scaled)


def read_like(X: Any, learnt_shape: Callable[[], tuple[int, int, int]]) -> Inputs:
    """Return X as a network reads it that has learnt.

    Args:
        X: pictures, a list of paths of pictures, or vectors.
        learnt_shape: channels, height and width of the pictures that it learnt from; asked of
            pictures alone, since vectors have none.
    """
    if _are_paths(X):
        return decode([Path(path) for path in X], learnt_shape(), strict=True).images
    inputs = as_inputs(_array(X), name="X")
    if inputs.ndim == 2:
        return inputs
    _, height, width = learnt_shape()
    return resized(as_images(inputs), height, width)


def read_labels(y: Any) -> NDArray[Any]:
    """Return the labels as a flat array of numbers or strings."""
    if y is None:
        raise InputError("requires y to be passed, but the target y is None")
    try:
        labels = as_names(column_or_1d(y, warn=True))
        check_classification_targets(labels)
    except InputError:
        raise
    except (TypeError, ValueError) as error:
        raise InputError(f"y cannot be used: {first_line(error)}") from error
    return labels


def as_names(values: Any, name: str = "y") -> NDArray[Any]:
    """Return what may be the names of classes: strings alone, or finite numbers alone."""
    names = np.asarray(values)
    if names.dtype.kind in "OT":
        names = _uniform(names)
    if names.dtype.kind not in "iufU":
        raise InputError(f"{name} holds {names.dtype} values; strings or numbers are accepted")
    if names.dtype.kind != "U" and not (np.abs(names.astype(float)) <= LARGEST_LABEL).all():
        raise InputError(
            f"{name} holds NaN, infinite or too large values; up to {LARGEST_LABEL} is accepted"
        )
    return names


def known_classes(labels: NDArray[Any]) -> tuple[NDArray[Any], NDArray[np.int64]]:
    """Return the classes among the labels, and which of them each label is."""
    classes, codes, counts = np.unique(labels, return_inverse=True, return_counts=True)
    if len(classes) < 2:
        raise InputError("y holds one class; two or more classes are needed")
    if counts.min() < 2:
        scarce = classes.tolist()[counts.argmin()]
        raise InputError(f"class {scarce!r} has one row; two or more of each are needed")
    return classes, codes


def with_novel(classes: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
    """Return the classes and the novel ones: their names, or numbers that go on where they end."""
    if not np.issubdtype(classes.dtype, np.number):
        return np.array([*classes.tolist(), *names])
    first = int(np.floor(classes.max())) + 1
    numbers_on = np.arange(first, first + len(names))
    as_before = numbers_on.astype(classes.dtype)
    fits = np.array_equal(as_before, numbers_on)
    return np.concatenate([classes, as_before if fits else numbers_on])


def renamed_classes(classes: NDArray[Any], names: Mapping[Any, Any]) -> NDArray[Any]:
    """Return the classes with other names; numbers stay numbers."""
    kinds: dict[str, tuple[type, str]] = {
        "U": (str, "strings"),
        "f": (numbers.Real, "numbers"),
    }
    kind, what = kinds.get(classes.dtype.kind, (numbers.Integral, "whole numbers"))
    for new in names.values():
        is_fine = isinstance(new, kind) and not isinstance(new, bool)
        require(is_fine, f"{shown(new)} cannot be a class where classes are {what}")
    renamed = as_names([names.get(name, name) for name in classes.tolist()], "classes")
    for name, count in Counter(renamed.tolist()).items():
        require(count == 1, f"two classes would be called {name!r}")
    return renamed


def _are_paths(X: Any) -> bool:
    if isinstance(X, str | Path):
        raise InputError(f"X is one path, {shown(str(X))}; a list of paths is accepted")
    is_array = isinstance(X, np.ndarray) and X.ndim == 1 and X.dtype.kind in "OUT"
    if not (is_array or isinstance(X, Sequence)) or len(X) == 0:
        return False
    are_paths = [isinstance(item, str | Path) for item in X]
    if any(are_paths) and not all(are_paths):
        row = are_paths.index(False)
        raise InputError(f"X[{row}]={shown(X[row])} is no path, as others of X are")
    return all(are_paths)


def _array(X: Any) -> Any:
    """Return X as a tensor or an array of numbers, of pictures with the channels first."""
    is_tensor = isinstance(X, torch.Tensor)
    if hasattr(X, "toarray") or (is_tensor and X.layout != torch.strided):
        raise InputError("X is a sparse matrix; dense arrays are accepted")
    array: Any = X.detach() if is_tensor else _numbers(X)
    shape = tuple(array.shape)
    if 0 in shape[:2]:
        found = "0 feature(s)" if shape[0] else "0 sample(s)"
        raise InputError(f"X has {found} (shape={shape}) while a minimum of 1 is required.")
    if len(shape) < 2:
        raise InputError(f"X has shape {shape}. Reshape your data: one row a thing")
    if len(shape) == 4 and shape[3] in (1, 3) and shape[1] not in (1, 3):
        # Copied, since networks round by how pictures lie in memory.
        if is_tensor:
            return torch.movedim(array, 3, 1).clone(memory_format=torch.contiguous_format)
        return np.moveaxis(array, 3, 1).copy()
    return array


def _numbers(X: Any) -> NDArray[Any]:
    try:
        array = np.asarray(X)
        if array.dtype == object:
            array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        raise NotNumbersError(f"X should hold numbers: {first_line(error)}") from error
    if np.iscomplexobj(array):
        raise InputError("Complex data not supported in X; real numbers are accepted")
    return array


def _uniform(labels: NDArray[Any]) -> NDArray[Any]:
    """Return an array of objects as one of strings or of numbers."""
    values = labels.tolist()
    for kind in (str, numbers.Real):
        if all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            return np.array(values)
    raise InputError("Unknown label type: y should hold strings alone, or numbers alone")

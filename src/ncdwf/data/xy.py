"""X and y as scikit-learn takes them: to tensors, and to the names of classes.

Labels are read here, so nothing of the discovery phase may import this module.
"""

import itertools
import numbers
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import column_or_1d, validate_data

from ncdwf.config import require
from ncdwf.data.gathering import decode, glance
from ncdwf.data.inputs import Inputs, as_images, as_inputs, fitted
from ncdwf.errors import InputError, first_line, shown
from ncdwf.progress import Progress

LARGEST_LABEL = 2**52
"""Up to here numbers of every kind go on one by one, as novel classes do."""


class NotNumbersError(InputError, TypeError):
    """X holds something else; scikit-learn expects a `TypeError` of it."""


def read_new(X: Any, side_of: Callable[[int], int], progress: Progress | None = None) -> Inputs:
    """Return X as a network that is still to be made will read it.

    Args:
        X: pictures, a list or a column of paths of pictures, or vectors.
        side_of: from the shorter side of pictures to the one that they are scaled to.
        progress: hears of every file.
    """
    paths = _paths(X)
    if paths:
        found = glance(paths)
        side = side_of(found.median_side)
        shape = (3 if found.has_colour else 1, side, side)
        return decode(paths, shape, strict=True, progress=progress).images
    inputs = as_inputs(_array(X), name="X")
    if inputs.ndim == 2:
        return inputs
    height, width = inputs.shape[2:]
    factor = side_of(min(height, width)) / min(height, width)  # proportions stay
    scaled = max(1, round(height * factor)), max(1, round(width * factor))
    return fitted(as_images(inputs), *scaled)


def read_like(X: Any, shape: tuple[int, ...], progress: Progress | None = None) -> Inputs:
    """Return X as a network reads it that has learnt.

    Args:
        X: pictures, a list or a column of paths of pictures, or vectors.
        shape: of what it learnt from: channels, height and width of a picture, or how many
            numbers a vector has.
        progress: hears of every file.
    """
    paths = _paths(X)
    if paths:
        return decode(paths, _of_pictures(shape), strict=True, progress=progress).images
    inputs = as_inputs(_array(X), name="X")
    if inputs.ndim == 2:
        return inputs
    _, height, width = _of_pictures(shape)
    return fitted(as_images(inputs), height, width)


def remember_columns(estimator: BaseEstimator, X: Any) -> None:
    """Set what scikit-learn keeps of vectors: how many columns, and their names; None: nothing."""
    for name in ("n_features_in_", "feature_names_in_"):
        estimator.__dict__.pop(name, None)
    if X is not None:
        _validate(estimator, X, reset=True)


def check_columns(estimator: BaseEstimator, X: Any) -> None:
    """Refuse vectors of another width, or with other names of their columns, than `fit` saw."""
    _validate(estimator, X, reset=False)


def _validate(estimator: BaseEstimator, X: Any, *, reset: bool) -> None:
    try:
        validate_data(estimator, X, reset=reset, skip_check_array=True)
    except ValueError as error:
        # Names of columns stand below each other there.
        said = str(error).strip().replace(":\n- ", ": ").replace("\n- ", ", ").replace(".\n", ". ")
        raise InputError("; ".join(said.splitlines())) from error


def read_labels(y: Any) -> NDArray[Any]:
    """Return the labels as a flat array of numbers or strings."""
    if y is None:
        raise InputError("requires y to be passed, but the target y is None")
    try:
        # A list of several kinds would become one of strings: None, NaN and True as classes.
        # And columns of pandas with room for missing values would become fractions.
        y = np.array(y, dtype=object) if isinstance(y, list | tuple) or _is_extended(y) else y
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
    _check_names(classes)
    return classes, codes


def check_room(classes: NDArray[Any], num_novel: int) -> None:
    """Refuse numbers so large that novel classes could not go on after them."""
    largest = max(classes.tolist())  # of Python: one of eight bits would overflow
    if not isinstance(largest, str) and largest + num_novel > LARGEST_LABEL:
        raise InputError(
            f"the largest class is {largest}; novel ones could be larger than {LARGEST_LABEL}, "
            "which no class may be"
        )


def with_novel(classes: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
    """Return the classes and the novel ones: their names, or numbers that go on where they end."""
    if not np.issubdtype(classes.dtype, np.number):
        return np.array([*classes.tolist(), *names])
    first = int(np.floor(classes.max())) + 1
    numbers_on = np.arange(first, first + len(names))
    as_before = numbers_on.astype(classes.dtype)
    fits = np.array_equal(as_before, numbers_on)
    return np.concatenate([classes, as_before if fits else numbers_on])


def renamed_classes(
    classes: NDArray[Any], named: NDArray[np.bool_], names: Mapping[Any, Any]
) -> NDArray[Any]:
    """Return the classes with other names; numbers stay numbers.

    A number that nobody has `named` a class by gives way to a name: it goes on after the largest.
    """
    kinds: dict[str, tuple[type, str]] = {
        "U": (str, "strings"),
        "f": (numbers.Real, "numbers"),
    }
    kind, what = kinds.get(classes.dtype.kind, (numbers.Integral, "whole numbers"))
    for new in names.values():
        is_fine = isinstance(new, kind) and not isinstance(new, bool)
        require(is_fine, f"{shown(new)} cannot be a class where classes are {what}")
    renamed = as_names([names.get(name, name) for name in classes.tolist()], "classes")
    if renamed.dtype.kind != "U":
        gives_way = ~named & ~np.isin(classes, list(names)) & np.isin(classes, list(names.values()))
        first = int(np.floor(renamed.max())) + 1
        renamed[gives_way] = np.arange(first, first + gives_way.sum())
        renamed = as_names(renamed, "classes")
    for name, count in Counter(renamed.tolist()).items():
        require(count == 1, f"two classes would be called {name!r}")
    return renamed


def as_the_model_names_them(
    classes: Sequence[Any], named: Sequence[bool], names: Sequence[str]
) -> tuple[NDArray[Any], NDArray[np.bool_]]:
    """Return classes, and which are named, where the model got other names without them.

    Where classes are numbers, only names that are numbers can be classes. Any other class keeps
    its number, or goes on after the largest if that is now the name of another.

    Args:
        classes: as they were: strings alone, or numbers of one kind.
        named: which of them somebody had named.
        names: what the model calls them.
    """
    if isinstance(classes[0], str):
        renamed = np.array(names)
        return renamed, np.array(named) | (renamed != np.array(classes))
    given = [_number(name, type(classes[0])) for name in names]
    times = Counter(given)  # "7" and "07" are one number, which then is neither's
    given = [number if times[number] == 1 else None for number in given]
    taken = {number for number in given if number is not None}
    later = itertools.count(int(np.floor(max(*classes, *taken))) + 1)
    numbered = [
        new if new is not None else old if old not in taken else next(later)
        for old, new in zip(classes, given, strict=True)
    ]
    return np.array(numbered), np.array(named) | np.array([new is not None for new in given])


def positions(values: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.int64]:
    """Return where in `values` each of `wanted` is."""
    order = np.argsort(values)
    return order[np.searchsorted(values, wanted, sorter=order)]


def _check_names(classes: NDArray[Any]) -> None:
    """Refuse what cannot be the name of a class in a file, or beside other names."""
    for name in map(str, classes.tolist()):
        require(name.strip() != "", f"y holds the blank label {name!r}; give that class a name")
        is_text = name.encode(errors="replace").decode() == name
        require(is_text, f"y holds the label {name!a}, which is not valid text; choose another")


def _of_pictures(shape: tuple[int, ...]) -> tuple[int, int, int]:
    if len(shape) == 1:
        raise InputError(f"X holds pictures; this estimator was fitted to {shape[0]} numbers")
    return shape[0], shape[1], shape[2]


def _paths(X: Any) -> list[Path]:
    """Return the paths that X lists; none if it holds something else."""
    if isinstance(X, str | Path):
        raise InputError(f"X is one path, {shown(str(X))}; a list of paths is accepted")
    if isinstance(X, Iterator):
        kind = type(X).__name__
        raise NotNumbersError(f"X is a {kind}; a list of paths, or an array, is accepted")
    items = X if isinstance(X, Sequence) else _column(X)
    are_paths = [isinstance(item, str | Path) for item in items]
    if any(isinstance(item, bytes) for item in items):
        raise InputError("X holds bytes; paths are strings, or of pathlib")
    if not any(are_paths):
        return []
    if not all(are_paths):
        row = are_paths.index(False)
        raise InputError(f"X[{row}]={shown(items[row])} is no path, as others of X are")
    return [Path(item) for item in items]


def _column(X: Any) -> list[Any]:
    """Return what a column of strings or objects holds, of whatever library; else nothing."""
    is_array = hasattr(X, "to_numpy") or hasattr(X, "__array__")
    # Tables and tensors may be large: what says that it is no column is not converted.
    if not is_array or isinstance(X, torch.Tensor) or len(getattr(X, "shape", (0,))) != 1:
        return []
    array = np.asarray(X) if hasattr(X, "__array__") else X.to_numpy()
    return array.tolist() if array.ndim == 1 and array.dtype.kind in "OUST" else []


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
        if array.dtype == object or (array.dtype == bool and array.ndim == 2):  # or one-hot columns
            array = array.astype(np.float64)
    except (TypeError, ValueError) as error:
        if isinstance(X, Sequence):
            as_inputs(X, name="X")  # says which of them differ in size
        raise NotNumbersError(f"X should hold numbers: {first_line(error)}") from error
    if np.iscomplexobj(array):
        raise InputError("Complex data not supported in X; real numbers are accepted")
    return array


def _number(name: str, kind: type[int] | type[float]) -> int | float | None:
    """Return the number that a name is, if it is one that a class may be."""
    try:
        number = kind(name)
    except ValueError:
        return None
    return number if abs(number) <= LARGEST_LABEL else None


def _is_extended(y: Any) -> bool:
    """Tell whether y is a column of a type that NumPy does not have."""
    return hasattr(y, "dtype") and not isinstance(y.dtype, np.dtype | torch.dtype)


def _uniform(labels: NDArray[Any]) -> NDArray[Any]:
    """Return an array of objects as one of strings or of numbers."""
    values = labels.tolist()
    for kind in (str, numbers.Real):
        if all(isinstance(value, kind) and not isinstance(value, bool) for value in values):
            return np.array(values)
    raise InputError("Unknown label type: y should hold strings alone, or numbers alone")

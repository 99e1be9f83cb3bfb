"""Measures of agreement between predictions and true classes, on plain arrays."""

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray
from scipy.optimize import linear_sum_assignment

Classes = Int64[ndarray, " image"]


def count_pairs(
    predicted: Classes, true: Classes, num_predicted: int, num_true: int
) -> Int64[ndarray, "predicted true"]:
    """Return how often each prediction meets each true class."""
    counts = np.zeros((num_predicted, num_true), dtype=np.int64)
    np.add.at(counts, (predicted, true), 1)
    return counts


def match_clusters(counts: Int64[ndarray, "cluster cls"]) -> Int64[ndarray, " cluster"]:
    """Return the class of each cluster in the best one-to-one mapping; -1 where there is none.

    >>> match_clusters(np.array([[1, 5], [4, 2], [0, 1]])).tolist()
    [1, 0, -1]
    """
    mapping = np.full(len(counts), -1, dtype=np.int64)
    clusters, classes = linear_sum_assignment(counts, maximize=True)
    mapping[clusters] = classes
    return mapping


def clustering_accuracy(
    predicted: Classes,
    true: Classes,
    num_clusters: int,
    num_classes: int,
    *,
    total: int | None = None,
) -> float:
    """Return the share of pictures whose cluster is mapped to their class, by the best mapping.

    With `total`, pictures that were routed away beforehand count as wrong: they are in the
    denominator, but have no say in the mapping.
    """
    counts = count_pairs(predicted, true, num_clusters, num_classes)
    mapping = match_clusters(counts)
    matched = mapping >= 0
    right = counts[np.flatnonzero(matched), mapping[matched]].sum()
    return share(int(right), len(true) if total is None else total)


def share(part: int, whole: int) -> float:
    """Return `part / whole`, and 0 where there is nothing to share."""
    return part / whole if whole else 0.0


def per_class_accuracy(
    predicted: Classes, true: Classes, num_classes: int
) -> Float[ndarray, " cls"]:
    """Return the accuracy of every class; NaN where a class has no picture."""
    totals = np.bincount(true, minlength=num_classes).astype(np.float64)
    right = np.bincount(true[predicted == true], minlength=num_classes)
    accuracy = np.full(num_classes, np.nan)
    np.divide(right, totals, out=accuracy, where=totals > 0)
    return accuracy

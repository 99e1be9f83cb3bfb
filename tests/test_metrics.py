import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncdwf.results.metrics import (
    clustering_accuracy,
    count_pairs,
    match_clusters,
    per_class_accuracy,
    share,
)


def array(values):
    return np.array(values, dtype=np.int64)


pairs = st.integers(1, 5).flatmap(
    lambda num_clusters: st.integers(1, 5).flatmap(
        lambda num_classes: st.tuples(
            st.just(num_clusters),
            st.just(num_classes),
            st.lists(
                st.tuples(st.integers(0, num_clusters - 1), st.integers(0, num_classes - 1)),
                max_size=30,
            ),
        )
    )
)


def by_brute_force(predicted, true, num_clusters, num_classes):
    """Return the most hits of any one-to-one mapping, by trying all of them."""
    size = max(num_clusters, num_classes)
    return max(
        sum(bool(mapping[p] == t) for p, t in zip(predicted, true, strict=True))
        for mapping in itertools.permutations(range(size), num_clusters)
    )


def test_pairs_are_counted():
    counts = count_pairs(array([0, 0, 2, 0]), array([1, 1, 0, 0]), 3, 2)
    assert counts.tolist() == [[1, 2], [0, 0], [1, 0]]


@pytest.mark.parametrize(
    ("counts", "mapping"),
    [
        ([[5, 0], [0, 5]], [0, 1]),
        ([[0, 5], [5, 0]], [1, 0]),
        # Greedy would take the 9 and end with 9 + 1; 8 + 7 is better.
        ([[9, 8], [7, 1]], [1, 0]),
        # More clusters than classes: the cluster that helps least is left over.
        ([[1, 5], [4, 2], [0, 1]], [1, 0, -1]),
        # Fewer clusters than classes: a class is left over.
        ([[1, 2, 9]], [2]),
        ([[3], [4]], [-1, 0]),
    ],
)
def test_the_best_mapping_by_hand(counts, mapping):
    assert match_clusters(array(counts)).tolist() == mapping


@settings(max_examples=60, deadline=None)
@given(pairs)
def test_no_mapping_is_better(case):
    num_clusters, num_classes, both = case
    predicted, true = array([p for p, _ in both]), array([t for _, t in both])
    accuracy = clustering_accuracy(predicted, true, num_clusters, num_classes)
    best = by_brute_force(predicted, true, num_clusters, num_classes)
    assert accuracy == share(best, len(both))


@settings(max_examples=60, deadline=None)
@given(pairs, st.randoms())
def test_names_of_clusters_do_not_matter(case, random):
    num_clusters, num_classes, both = case
    predicted, true = array([p for p, _ in both]), array([t for _, t in both])
    names = list(range(num_clusters))
    random.shuffle(names)
    renamed = array([names[p] for p in predicted])
    assert clustering_accuracy(renamed, true, num_clusters, num_classes) == clustering_accuracy(
        predicted, true, num_clusters, num_classes
    )


def test_a_perfect_clustering_scores_one_and_a_constant_one_the_largest_class():
    true = array([0, 1, 2, 2])
    assert clustering_accuracy(array([2, 0, 1, 1]), true, 3, 3) == 1
    assert clustering_accuracy(array([1, 1, 1, 1]), true, 3, 3) == 0.5


def test_pictures_routed_away_are_wrong_and_have_no_say():
    # Ten novel pictures, four of them routed to known: of the six left, 5 fit the best mapping.
    predicted, true = array([0, 0, 0, 1, 1, 1]), array([1, 1, 1, 0, 0, 1])
    assert clustering_accuracy(predicted, true, 2, 2) == 5 / 6
    assert clustering_accuracy(predicted, true, 2, 2, total=10) == 0.5


def test_all_pictures_routed_away_score_nothing():
    none = array([])
    assert clustering_accuracy(none, none, 2, 2, total=7) == 0
    assert clustering_accuracy(none, none, 2, 2) == 0


def test_unmatched_clusters_count_as_wrong():
    # Three clusters of 3, 2 and 1 pictures, one class: only the largest is matched.
    assert clustering_accuracy(array([0, 0, 0, 1, 1, 2]), array([0] * 6), 3, 1) == 0.5


def test_shares():
    assert share(1, 4) == 0.25
    assert share(0, 0) == 0


def test_accuracy_class_by_class():
    got = per_class_accuracy(array([0, 1, 1, -1, 3]), array([0, 0, 1, 3, 3]), 5)
    assert got[[0, 1, 3]].tolist() == [0.5, 1, 0.5]  # -1, an unmatched cluster, is wrong
    assert np.isnan(got[[2, 4]]).all()


@settings(max_examples=30, deadline=None)
@given(st.lists(st.tuples(st.integers(-1, 4), st.integers(0, 4)), min_size=1, max_size=30))
def test_class_accuracies_add_up_to_the_whole(both):
    predicted, true = array([p for p, _ in both]), array([t for _, t in both])
    weights = np.bincount(true, minlength=5)
    weighted = np.nansum(per_class_accuracy(predicted, true, 5) * weights) / len(both)
    assert weighted == pytest.approx((predicted == true).mean())

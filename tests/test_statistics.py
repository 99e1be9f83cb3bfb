import math
import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ncdwf.errors import InputError
from ncdwf.model.initialise import build
from ncdwf.model.statistics import (
    NUM_PARTS,
    Accumulator,
    ClassStatistics,
    joined,
    quantiles,
    soft_statistics,
)
from ncdwf.noise import generator

SPREADS = ("shared-diagonal", "shared", "per-class")


def measure(features, labels, spread, *, parts=1, views=1, num_known=None):
    num_known = num_known or int(labels.max()) + 1
    sums = Accumulator(num_known, features.shape[1], spread, torch.device("cpu"))
    for some, their in zip(features.chunk(parts), labels.chunk(parts), strict=True):
        sums.add(some, their)
    statistics = sums.result(views)
    statistics.measure_angles(statistics.angles_to(features)[range(len(labels)), labels], labels)
    return statistics


def sample(seed=0, num_images=60, num_known=3, num_features=4):
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(num_images) % num_known
    mixing = torch.randn(num_features, num_features, generator=source)
    features = torch.randn(num_images, num_features, generator=source) @ mixing
    return features + 5 * labels[:, None], labels


def by_numpy(features, labels, spread):
    features, labels = features.double().numpy(), labels.numpy()
    means = np.stack([features[labels == c].mean(0) for c in np.unique(labels)])
    residual = features - means[labels]
    if spread == "shared-diagonal":
        return means, (residual**2).mean(0)
    if spread == "shared":
        return means, np.cov(residual.T, bias=True)
    return means, np.stack([np.cov(features[labels == c].T, bias=True) for c in np.unique(labels)])


@pytest.mark.parametrize("spread", SPREADS)
def test_statistics_agree_with_numpy(spread):
    features, labels = sample()
    statistics = measure(features, labels, spread)
    means, expected = by_numpy(features, labels, spread)
    assert statistics.means.dtype == statistics.spread.dtype == torch.float32
    assert np.allclose(statistics.means, means, rtol=1e-5)
    assert statistics.spread.shape == expected.shape
    assert np.allclose(statistics.spread, expected, atol=1e-5)
    assert statistics.counts.tolist() == [20, 20, 20]
    norm = np.linalg.norm(features.numpy(), axis=1).mean()
    assert statistics.feature_norm.item() == pytest.approx(norm, rel=1e-6)


def test_a_small_case_by_hand():
    features = torch.tensor([[0.0, 3.0], [0.0, 5.0], [1.0, 0.0], [3.0, 0.0]])
    labels = torch.tensor([0, 0, 1, 1])
    # Means (0, 4) and (2, 0); the residuals are ±1 in y for the first class, in x for the second.
    shared = measure(features, labels, "shared-diagonal")
    assert shared.means.tolist() == [[0, 4], [2, 0]]
    assert shared.spread.tolist() == [0.5, 0.5]
    assert measure(features, labels, "per-class").spread.tolist() == [
        [[0, 0], [0, 1]],
        [[1, 0], [0, 0]],
    ]
    assert shared.feature_norm.item() == 3  # (3 + 5 + 1 + 3) / 4


@settings(max_examples=20, deadline=None)
@given(st.sampled_from(SPREADS), st.integers(1, 7), st.integers(0, 5))
def test_batches_do_not_matter(spread, parts, seed):
    features, labels = sample(seed)
    whole, split = (measure(features, labels, spread, parts=n) for n in (1, parts))
    for name, tensor in whole.state_dict().items():
        assert torch.allclose(tensor, split.state_dict()[name], rtol=1e-5, atol=1e-6)


def test_a_small_spread_around_a_far_mean_is_not_lost():
    # In single precision the squares, about 1e8, would swallow a variance of 1e-2.
    source = torch.Generator().manual_seed(0)
    features = 1e4 + 0.1 * torch.randn(1000, 2, generator=source)
    labels = torch.arange(1000) % 2
    spread = measure(features, labels, "shared-diagonal").spread
    assert np.allclose(spread, by_numpy(features, labels, "shared-diagonal")[1], rtol=1e-3)


def test_a_spread_is_never_negative():
    features = torch.full((10, 3), 0.1).cumsum(0)[:1].expand(10, 3)
    labels = torch.arange(10) % 2
    assert (measure(features, labels, "shared-diagonal").spread >= 0).all()


def test_counts_are_pictures_not_views():
    features, labels = sample()
    statistics = measure(features, labels, "shared-diagonal", views=4)
    assert statistics.counts.tolist() == [5, 5, 5]


@pytest.mark.parametrize(
    ("labels", "views"), [([0, 0, 1], 1), ([0, 0], 1), ([0, 0, 0, 0, 1, 1], 2)]
)
def test_a_class_of_one_picture_is_refused_however_many_views(labels, views):
    labels = torch.tensor(labels)
    with pytest.raises(InputError, match="two or more pictures of every known class"):
        measure(torch.ones(len(labels), 2), labels, "shared-diagonal", views=views, num_known=2)


@pytest.mark.parametrize(
    ("spread", "shape"),
    [("shared-diagonal", (4,)), ("shared", (4, 4)), ("per-class", (3, 4, 4))],
)
def test_statistics_start_empty_and_are_stored_whole(spread, shape):
    statistics = build(lambda: ClassStatistics(3, 4, spread), generator(0))
    assert statistics.spread.shape == shape
    assert not any(tensor.any() for tensor in statistics.state_dict().values())
    assert set(statistics.state_dict()) == {"means", "spread", "counts", "feature_norm", "angles"}
    assert not list(statistics.parameters())


def test_an_unknown_spread_is_an_error():
    with pytest.raises(KeyError, match=re.escape("full")):
        ClassStatistics(3, 4, "full")


# Members to a degree


@pytest.mark.parametrize("spread", SPREADS)
def test_whole_members_have_the_statistics_of_labels(spread):
    features, labels = sample()
    soft = soft_statistics(features, F.one_hot(labels, 3).float(), spread).state_dict()
    hard = measure(features, labels, spread).state_dict()
    assert set(soft) == set(hard)
    for name, tensor in hard.items():
        assert soft[name].dtype == tensor.dtype
        assert soft[name].shape == tensor.shape
        assert torch.allclose(soft[name], tensor, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize(
    ("spread", "expected"),
    [
        ("shared-diagonal", [8, 4]),
        ("shared", [[8, -4], [-4, 4]]),
        ("per-class", [[[8, 0], [0, 0]], [[8, -8], [-8, 8]]]),
    ],
)
def test_members_to_a_degree_by_hand(spread, expected):
    features = torch.tensor([[0.0, 0.0], [6.0, 0.0], [0.0, 6.0]])
    memberships = torch.tensor([[1.0, 0.0], [0.5, 0.5], [0.0, 1.0]])
    statistics = soft_statistics(features, memberships, spread)
    # Each class has one whole and one half member, 1.5 together. Residuals of the first, whose
    # mean is (2, 0): (-2, 0) and half of (4, 0), squares 4 + 0.5 · 16 = 12. Of the second, mean
    # (2, 4): (-2, 2) and half of (4, -4): 12 in each, -12 across. All are shared by 3 pictures.
    assert statistics.means.tolist() == [[2, 0], [2, 4]]
    assert torch.allclose(statistics.spread, torch.tensor(expected).float(), atol=1e-6)
    assert statistics.feature_norm.item() == 4  # (0 + 6 + 6) / 3


@pytest.mark.parametrize("spread", SPREADS)
def test_a_class_that_is_nobodys_first_choice_has_a_mean(spread):
    features = torch.tensor([[0.0], [4.0]])
    memberships = torch.tensor([[0.9, 0.1], [0.7, 0.3]])
    statistics = soft_statistics(features, memberships, spread)
    assert statistics.counts.tolist() == [2, 0]
    # 0.7 · 4 / 1.6 and 0.3 · 4 / 0.4.
    assert statistics.means.flatten().tolist() == pytest.approx([1.75, 3.0])
    # Squares around them: 0.9 · 1.75² + 0.7 · 2.25² = 6.3 and 0.1 · 3² + 0.3 · 1² = 1.2.
    expected = [6.3 / 1.6, 1.2 / 0.4] if spread == "per-class" else [7.5 / 2]
    assert statistics.spread.flatten().tolist() == pytest.approx(expected)


def test_first_choices_are_counted():
    memberships = torch.tensor([[0.6, 0.4, 0.0], [0.3, 0.2, 0.5], [0.1, 0.0, 0.9]])
    statistics = soft_statistics(torch.eye(3), memberships, "shared-diagonal")
    assert statistics.counts.tolist() == [1, 0, 2]
    assert statistics.counts.dtype == torch.int64


@pytest.mark.parametrize("spread", SPREADS)
def test_a_class_without_any_member_stays_finite(spread):
    memberships = F.one_hot(torch.tensor([0, 0, 0]), 2).float()
    statistics = soft_statistics(torch.eye(3), memberships, spread)
    assert all(tensor.isfinite().all() for tensor in statistics.state_dict().values())


def test_a_small_spread_of_members_to_a_degree_around_a_far_mean_is_not_lost():
    source = torch.Generator().manual_seed(0)
    features = 1e4 + 0.1 * torch.randn(1000, 2, generator=source)
    labels = torch.arange(1000) % 2
    memberships = F.one_hot(labels, 2).float()
    spread = soft_statistics(features, memberships, "shared-diagonal").spread
    assert np.allclose(spread, by_numpy(features, labels, "shared-diagonal")[1], rtol=1e-3)


def test_a_spread_of_members_to_a_degree_is_never_negative():
    source = torch.Generator().manual_seed(0)
    memberships = torch.randn(50, 3, generator=source).double().softmax(1)
    # The spread of equal features is 0 but for rounding, which goes down as often as up.
    features = torch.rand(1, 100, generator=source).expand(50, 100)
    spread = soft_statistics(features, memberships, "shared-diagonal").spread
    assert (spread >= 0).all()


# How far pictures lie from the means


def test_angles_are_those_between_features_and_means():
    statistics = ClassStatistics(2, 2, "shared-diagonal")
    statistics.means = torch.tensor([[3.0, 0.0], [0.0, 2.0]])
    angles = statistics.angles_to(torch.tensor([[1.0, 0.0], [2.0, 2.0], [0.0, -5.0]]))
    quarter = math.pi / 4
    expected = torch.tensor([[0, 2 * quarter], [quarter, quarter], [2 * quarter, 4 * quarter]])
    assert torch.allclose(angles, expected, atol=1e-3)


def test_quantiles_are_evenly_spaced_and_values_count_by_their_degrees():
    values = torch.randperm(3200).float()
    numbers = range(1, NUM_PARTS)
    assert quantiles(values, torch.ones(3200)).tolist() == [100 * n - 1 for n in numbers]
    assert quantiles(values, (values < 320).float()).tolist() == [10 * n - 1 for n in numbers]
    assert quantiles(values, torch.zeros(3200)).tolist() == [0 for _ in numbers]
    assert quantiles(torch.tensor([7.0]), torch.tensor([0.1])).tolist() == [7 for _ in numbers]


def test_pictures_of_every_class_have_every_rank_equally_often():
    source = torch.Generator().manual_seed(0)
    means, width = 9 * torch.eye(4)[:3], torch.tensor([0.1, 0.5, 1.5])
    labels = torch.arange(9600) % 3
    features = means[labels] + width[labels, None] * torch.randn(9600, 4, generator=source)
    statistics = measure(features, labels, "shared-diagonal")
    ranks = statistics.rank(features)
    for label in range(3):
        counts = torch.bincount(ranks[labels == label], minlength=NUM_PARTS)
        assert (counts - 100).abs().max() <= 2
    # By the measure of its own class: what is near in one is far in another.
    assert statistics.rank(torch.tensor([[9.0, 0.5, 0.5, 0.5]])) == NUM_PARTS - 1
    assert statistics.rank(torch.tensor([[0.5, 0.5, 9.0, 0.5]])) < 4


# Known and novel classes together


def filled(spread, means, value, counts, norm):
    statistics = ClassStatistics(len(counts), 2, spread)
    statistics.means = torch.tensor(means)
    statistics.spread = statistics.spread + torch.tensor(value)
    statistics.counts = torch.tensor(counts)
    statistics.feature_norm = torch.tensor(norm)
    return statistics


def test_what_classes_share_is_averaged_by_their_sizes():
    # 3 + 1 pictures of the first two classes, 12 of the third: a quarter and three quarters.
    first = filled("shared-diagonal", [[1.0, 2.0], [3.0, 4.0]], [1.0, 1.0], [3, 1], 2.0)
    second = filled("shared-diagonal", [[5.0, 6.0]], [5.0, 9.0], [12], 6.0)
    both = joined(first, second)
    assert both.means.tolist() == [[1, 2], [3, 4], [5, 6]]
    assert both.counts.tolist() == [3, 1, 12]
    assert both.spread.tolist() == [4, 7]
    assert both.feature_norm.item() == 5
    first = filled("shared", [[1.0, 2.0]], [[4.0, 0.0], [0.0, 8.0]], [4], 2.0)
    second = filled("shared", [[5.0, 6.0]], [[8.0, 4.0], [4.0, 0.0]], [12], 6.0)
    assert joined(first, second).spread.tolist() == [[7, 3], [3, 2]]


def test_spreads_of_single_classes_are_put_one_after_another():
    first = filled("per-class", [[1.0, 2.0], [3.0, 4.0]], [[1.0, 2.0], [2.0, 3.0]], [3, 1], 2.0)
    second = filled("per-class", [[5.0, 6.0]], [[7.0, 8.0], [8.0, 9.0]], [12], 6.0)
    both = joined(first, second)
    assert both.spread.tolist() == [[[1, 2], [2, 3]], [[1, 2], [2, 3]], [[7, 8], [8, 9]]]
    assert both.feature_norm.item() == 5


def test_classes_of_which_nobody_was_counted_leave_what_is_shared_as_it_was():
    first = filled("shared-diagonal", [[1.0, 2.0]], [1.0, 2.0], [3], 2.0)
    second = filled("shared-diagonal", [[5.0, 6.0]], [5.0, 9.0], [0], 6.0)
    for left, right in ((first, second), (second, first)):
        both = joined(left, right)
        assert both.spread.tolist() == [1, 2]
        assert both.feature_norm.item() == 2
    empty = joined(second, second)
    assert empty.spread.tolist() == [5, 9]
    assert empty.feature_norm.item() == 6


@pytest.mark.parametrize("spread", SPREADS)
def test_joined_statistics_are_those_of_all_pictures(spread):
    features, labels = sample()
    whole = measure(features, labels, spread)
    is_last = labels == 2
    parts = (
        measure(features[~is_last], labels[~is_last], spread),
        measure(features[is_last], labels[is_last] - 2, spread),
    )
    before = [{name: t.clone() for name, t in part.state_dict().items()} for part in parts]
    both = joined(*parts)
    for name, tensor in whole.state_dict().items():
        assert torch.allclose(both.state_dict()[name], tensor, rtol=1e-5, atol=1e-6)
    for tensor in both.buffers():
        tensor.fill_(7)
    for part, kept in zip(parts, before, strict=True):
        assert all(torch.equal(tensor, kept[name]) for name, tensor in part.state_dict().items())

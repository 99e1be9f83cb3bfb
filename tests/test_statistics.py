import re

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ncdwf.errors import InputError
from ncdwf.model.initialise import build
from ncdwf.model.statistics import Accumulator, ClassStatistics
from ncdwf.noise import generator

SPREADS = ("shared-diagonal", "shared", "per-class")


def measure(features, labels, spread, *, parts=1, views=1, num_known=None):
    num_known = num_known or int(labels.max()) + 1
    sums = Accumulator(num_known, features.shape[1], spread, torch.device("cpu"))
    for some, their in zip(features.chunk(parts), labels.chunk(parts), strict=True):
        sums.add(some, their)
    return sums.result(views)


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
    assert set(statistics.state_dict()) == {"means", "spread", "counts", "feature_norm"}
    assert not list(statistics.parameters())


def test_an_unknown_spread_is_an_error():
    with pytest.raises(KeyError, match=re.escape("full")):
        ClassStatistics(3, 4, "full")

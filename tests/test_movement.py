import numpy as np
import pytest
import torch
from sklearn.linear_model import Ridge

from ncdwf.model.movement import Movement
from ncdwf.model.statistics import Accumulator, ClassStatistics
from ncdwf.noise import generator

TURN = torch.tensor([[0.8, 0.3], [-0.1, 1.1]])


def rows(count, seed=5):
    return torch.randn(count, 2, generator=generator(seed)) + torch.tensor([4.0, -1.0])


def test_a_linear_movement_is_found():
    movement = Movement(rows(400), rows(400) @ TURN, ridge=0.0)
    others = rows(30, seed=1)
    assert torch.allclose(movement(others), others @ TURN, atol=1e-4)


def test_the_movement_is_foretold_by_ridge_regression():
    before, others = rows(50), rows(30, seed=1)
    after = before @ TURN + torch.randn(50, 2, generator=generator(6))
    alpha = 0.2 * before.square().sum(0).mean().item()
    fit = Ridge(alpha=alpha, fit_intercept=False).fit(before.numpy(), (after - before).numpy())
    expected = others.numpy() + fit.predict(others.numpy())
    assert np.allclose(Movement(before, after, ridge=0.2)(others).numpy(), expected, atol=1e-4)


@pytest.mark.parametrize("count", [1, 50])
def test_features_stay_where_nothing_has_moved(count):
    others = rows(20, seed=1)
    for place in (rows(count), torch.zeros(count, 2)):
        assert torch.equal(Movement(place, place)(others), others)


def test_features_stay_where_none_was_seen():
    before = torch.tensor([[3.0, 0.0]]).repeat(20, 1)
    after = torch.tensor([[0.0, 3.0]]).repeat(20, 1)
    others = rows(20, seed=1)
    # Along the first axis they turn like the pool; the second it has never seen.
    turned = torch.stack([0 * others[:, 0], others[:, 1] + others[:, 0]], dim=1)
    assert torch.allclose(Movement(before, after)(others), turned, atol=0.1)


def measured(features, labels, spread):
    sums = Accumulator(2, 2, spread, torch.device("cpu"))
    sums.add(features, labels)
    return sums.result(1)


@pytest.mark.parametrize("spread", ["shared", "per-class"])
def test_statistics_are_carried_to_those_of_the_carried_features(spread):
    features, labels = rows(60), torch.arange(60) % 2
    movement = Movement(rows(400), rows(400) @ TURN, ridge=0.0)
    carried = movement.carry(measured(features, labels, spread))
    expected = measured(features @ TURN, labels, spread)
    assert torch.allclose(carried.means, expected.means, atol=1e-3)
    assert torch.allclose(carried.spread, expected.spread, atol=1e-3)
    assert torch.equal(carried.counts, expected.counts)
    assert carried.feature_norm.item() == pytest.approx(expected.feature_norm.item(), rel=0.05)


def test_a_variance_a_dimension_is_carried_as_if_dimensions_were_independent():
    statistics = ClassStatistics(2, 2, "shared-diagonal")
    statistics.means, statistics.spread = torch.eye(2), torch.tensor([1.0, 4.0])
    movement = Movement(rows(400), rows(400) @ TURN, ridge=0.0)
    expected = TURN.T @ torch.diag(statistics.spread) @ TURN
    assert torch.allclose(movement.carry(statistics).spread, expected.diagonal(), atol=1e-3)


def test_carrying_leaves_the_statistics_as_they_were_and_empty_ones_finite():
    statistics = ClassStatistics(2, 2, "shared-diagonal")
    carried = Movement(rows(40), rows(40) @ TURN).carry(statistics)
    assert all(torch.equal(tensor, torch.zeros_like(tensor)) for tensor in statistics.buffers())
    assert all(torch.isfinite(tensor).all() for tensor in carried.buffers())

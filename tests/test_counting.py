import dataclasses
from itertools import pairwise

import pytest
import torch
from conftest import unchanged_global_state
from sklearn.datasets import load_digits
from sklearn.metrics import silhouette_score
from sklearn.mixture import GaussianMixture
from torch import Tensor

import ncdwf.learning.counting as module
from ncdwf.errors import InputError
from ncdwf.learning.counting import ClassCount, count_classes
from ncdwf.model import Architecture, Model


def blobs(num: int, per_blob: int, *, spread: float = 0.4, dim: int = 16, seed: int = 0) -> Tensor:
    """Return rows around points in random directions; neighbours touch from a spread of 0.4 on."""
    source = torch.Generator().manual_seed(seed)
    points = torch.randn(num, dim, generator=source)
    rows = points.repeat(per_blob, 1)
    return rows + spread * torch.randn(rows.shape, generator=source)


def vector_model(num_numbers: int) -> Model:
    architecture = Architecture(
        backbone="vector",
        input_shape=(num_numbers,),
        num_known=2,
        temperature=0.1,
        spread="shared-diagonal",
    )
    return Model.create(architecture, ("a", "b"), seed=0).eval()


@pytest.mark.parametrize(
    ("num", "per_blob", "spread"),
    [(2, 60, 0.4), (3, 40, 0.4), (5, 40, 0.4), (8, 80, 0.4), (12, 30, 0.2), (24, 25, 0.2)],
)
def test_normal_classes_are_counted(num: int, per_blob: int, spread: float) -> None:
    found = count_classes(blobs(num, per_blob, spread=spread), seed=0)
    assert found.low <= num <= found.high
    assert abs(found.number - num) <= 0.15 * num


def test_the_number_is_the_top_of_the_curve_and_within_the_bounds() -> None:
    found = count_classes(blobs(6, 40, spread=0.9), seed=0)
    assert found.curve[found.number] == max(found.curve.values())
    assert found.low <= found.number <= found.high
    assert all(0 <= score <= 1 for score in found.curve.values())
    assert {found.low, found.high} <= set(found.curve)
    assert str(found) == f"{found.number} (between {found.low} and {found.high})"


def test_the_seed_decides_everything_and_nothing_global_is_drawn() -> None:
    rows = blobs(4, 40, spread=1.0)
    with unchanged_global_state():
        found = count_classes(rows, seed=3)
    assert found == count_classes(rows, seed=3)
    parts = [module._some(100, 50, seed, 0, rows.device).tolist() for seed in (3, 4)]
    assert parts[0] != parts[1]


def test_rows_are_left_as_they_were() -> None:
    rows = blobs(3, 20)
    before = rows.clone()
    count_classes(rows, seed=0)
    assert torch.equal(rows, before)


def test_one_normal_class_may_be_one() -> None:
    rows = 3 + torch.randn(300, 8, generator=torch.Generator().manual_seed(0))
    found = count_classes(rows, seed=0)
    assert found.number == found.low == 1
    assert found.high <= 3  # silhouettes have their peak elsewhere


@pytest.mark.parametrize("value", [0.0, 2.5])
def test_identical_rows_are_one_class(value: float) -> None:
    found = count_classes(torch.full((50, 4), value), seed=0)
    assert found == ClassCount(number=1, low=1, high=1, curve={1: 1.0})


def test_three_pictures_over_and_over_are_three_classes() -> None:
    assert count_classes(torch.eye(3).repeat(40, 1), seed=0).number == 3


def test_the_smallest_pool_has_two_candidates() -> None:
    found = count_classes(blobs(2, 10, spread=0.1), seed=0)
    assert set(found.curve) == {1, 2}
    assert (found.low, found.high) == (1, 2)


@pytest.mark.parametrize("num", [0, 1, 19])
def test_too_small_a_pool_is_refused(num: int) -> None:
    with pytest.raises(InputError, match=f"classes of {num} pictures? cannot be counted: 20 or"):
        count_classes(torch.rand(num, 4), seed=0)


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_features_that_are_no_numbers_are_refused(value: float) -> None:
    rows = torch.rand(30, 4)
    rows[7, 2] = value
    with pytest.raises(InputError, match="NaN or infinite"):
        count_classes(rows, seed=0)


def test_rows_of_one_number_are_counted() -> None:
    rows = torch.tensor([[1.0], [-1.0]]).repeat(30, 1)
    assert count_classes(rows, seed=0).number == 2


@pytest.mark.parametrize(
    ("num_rows", "last"), [(20, 2), (29, 2), (200, 20), (1999, 199), (20_000, 200)]
)
def test_candidates_follow_the_pool(num_rows: int, last: int) -> None:
    candidates = module._candidates(num_rows)
    assert candidates[0] == 1
    assert candidates[-1] == last
    assert candidates == sorted(set(candidates))
    assert len(candidates) <= 40


def test_of_a_large_pool_some_rows_are_drawn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "MOST_ROWS", 80)
    pool = blobs(3, 100, dim=6)
    found = count_classes(pool, seed=0)
    assert max(found.curve) == 8
    assert found == count_classes(pool, seed=0)


def test_silhouettes_are_those_of_scikit_learn() -> None:
    rows = blobs(4, 30, spread=1.0).float()
    labels = module._partition(rows, 5, seed=0)
    labels[labels == labels[0]] = 0
    labels[3] = 7  # a row on its own, and numbers that no row has
    everyone = torch.arange(len(rows))
    ours = module._silhouette(torch.cdist(rows, rows), everyone, labels)
    assert ours == pytest.approx(silhouette_score(rows.numpy(), labels.numpy()), abs=1e-5)


def test_the_evidence_of_one_component_is_that_of_scikit_learn() -> None:
    rows = blobs(3, 100, dim=3).double()
    labels = torch.zeros(300, dtype=torch.int64)
    theirs = GaussianMixture(1, reg_covar=1e-6).fit(rows.numpy()).bic(rows.numpy()) / -2
    constant = -300 * 3 / 2 * torch.tensor(2 * torch.pi).log()  # left out: all mixtures have it
    assert module._evidence(rows, labels) + float(constant) == pytest.approx(theirs, abs=0.1)


def test_mixtures_are_given_up_once_they_get_worse(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def evidence(rows: Tensor, labels: Tensor) -> float:
        asked.append(len(asked))
        return -abs(len(asked) - 3.0)

    monkeypatch.setattr(module, "_evidence", evidence)
    rows = torch.zeros(1, 1)
    found = module._falling(rows, [torch.zeros(1, dtype=torch.int64)] * 12)
    assert len(asked) == 3 + module.PATIENCE
    assert found.index(max(found)) == 2
    assert all(later < earlier for earlier, later in pairwise(found[2:]))


def test_digits_are_counted() -> None:
    """Raw pixels of 0-4: five classes, and a network that nobody trained lets them through."""
    data = load_digits()
    pool = torch.from_numpy(data.data[data.target < 5]).float()
    found = count_classes(vector_model(64).features(pool), seed=0)
    assert found.low <= 5 <= found.high
    assert 3 <= found.number <= 8
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.number = 5  # type: ignore[misc]

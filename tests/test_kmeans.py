from itertools import pairwise

import numpy as np
import pytest
import torch
from conftest import unchanged_global_state
from sklearn.cluster import KMeans
from sklearn.metrics import adjusted_rand_score
from torch import Tensor

from ncdwf.errors import InputError
from ncdwf.learning import kmeans as module
from ncdwf.learning.kmeans import kmeans, nearest
from ncdwf.noise import generator


def blobs(num: int = 6, per_blob: int = 40, spread: float = 0.3) -> tuple[Tensor, Tensor]:
    """Return rows around a few points, and of which point each row is."""
    source = torch.Generator().manual_seed(5)
    points = 4 * torch.randn(num, 7, generator=source)
    labels = torch.arange(num).repeat(per_blob)
    return points[labels] + spread * torch.randn(len(labels), 7, generator=source), labels


def noise(num_rows: int = 300, dim: int = 5) -> Tensor:
    """Return rows without clusters, for which many iterations are needed."""
    return torch.rand(num_rows, dim, generator=torch.Generator().manual_seed(9))


def inertia(rows: Tensor, centres: Tensor) -> float:
    return float((torch.cdist(rows.double(), centres.double()) ** 2).min(1).values.sum())


def same_partition(one: Tensor, other: Tensor | np.ndarray) -> bool:
    return bool(adjusted_rand_score(one.numpy(), np.asarray(other)) == 1)


def test_blobs_are_found_as_by_scikit_learn() -> None:
    rows, labels = blobs()
    theirs = KMeans(6, n_init=10, random_state=0).fit(rows.numpy())
    centres = kmeans(rows, 6)
    found = nearest(rows, centres)
    assert same_partition(found, theirs.labels_)
    assert same_partition(found, labels)
    assert inertia(rows, centres) == pytest.approx(theirs.inertia_, rel=1e-5)
    # Centres are the means of their rows.
    for cluster in range(6):
        assert torch.allclose(centres[cluster], rows[found == cluster].mean(0), atol=1e-5)


@pytest.mark.parametrize("num_clusters", [2, 10, 40])
def test_without_clusters_it_is_as_good_as_scikit_learn(num_clusters: int) -> None:
    rows = noise(1000)
    theirs = KMeans(num_clusters, n_init=10, random_state=0).fit(rows.numpy())
    assert inertia(rows, kmeans(rows, num_clusters)) < 1.01 * theirs.inertia_


def test_nearest_is_the_nearest() -> None:
    rows, centres = noise(100), noise(400)[300:308]
    assert torch.equal(nearest(rows, centres), torch.cdist(rows, centres).argmin(1))


def test_sum_of_distances_never_rises() -> None:
    rows = noise()
    course = [inertia(rows, kmeans(rows, 8, num_starts=1, num_iterations=i)) for i in range(25)]
    assert all(after <= before + 1e-4 for before, after in pairwise(course))
    assert course[-1] < 0.95 * course[0]


def test_it_stops_where_nothing_changes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "TOLERANCE", 0.0)
    rows = noise()
    centres = kmeans(rows, 8, num_starts=1)
    found = nearest(rows, centres)
    means = torch.stack([rows[found == cluster].mean(0) for cluster in range(8)])
    assert torch.allclose(centres, means, atol=1e-6)
    assert torch.equal(kmeans(rows, 8, num_starts=1, num_iterations=10_000), centres)


def test_small_moves_end_it(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = noise()
    first = kmeans(rows, 8, num_starts=1, num_iterations=1)
    monkeypatch.setattr(module, "TOLERANCE", 1e6)
    assert torch.equal(kmeans(rows, 8, num_starts=1), first)


def test_the_best_start_is_chosen() -> None:
    rows = noise()
    # The starts of more are those of fewer and others, so that it can only become better.
    results = [inertia(rows, kmeans(rows, 12, num_starts=n)) for n in range(1, 11)]
    assert all(more <= fewer + 1e-4 for fewer, more in pairwise(results))
    assert results[-1] < results[0]
    seeds = [inertia(rows, kmeans(rows, 12, num_starts=1, seed=seed)) for seed in range(5)]
    assert len({round(value, 3) for value in seeds}) > 1


def test_it_depends_on_the_seed_alone() -> None:
    rows = noise()
    with unchanged_global_state():
        one = kmeans(rows, 9, seed=4)
    torch.manual_seed(2)
    assert torch.equal(kmeans(rows, 9, seed=4), one)
    assert not torch.equal(kmeans(rows, 9, seed=5), one)


def test_first_centres_are_rows_drawn_by_squared_distance() -> None:
    # One row far away: with squared distances the second centre is nearly always that row, if it
    # is not the first; and of several candidates the one that helps most is taken.
    rows = torch.cat([0.01 * noise(99, 2), torch.tensor([[100.0, 100.0]])])
    for seed in range(20):
        centres = kmeans(rows, 2, num_starts=1, seed=seed, num_iterations=0)
        assert float(centres.max()) == pytest.approx(100)
    # The first is drawn evenly.
    origin = torch.zeros(1)
    line = torch.arange(4.0)[:, None]
    sources = [generator(seed, "test") for seed in range(2000)]
    counts = torch.bincount(module._seed(line, origin, 1, sources).flatten().long(), minlength=4)
    assert ((counts - 500).abs() < 100).all()


def test_candidates_are_few_and_distinct(monkeypatch: pytest.MonkeyPatch) -> None:
    seen = []
    real = module._distances

    def spy(rows: Tensor, points: Tensor) -> Tensor:
        seen.append(points)
        return real(rows, points)

    monkeypatch.setattr(module, "_distances", spy)
    module._seed(noise(), torch.zeros(5), 20, [generator(0), generator(1)])
    # Two starts; one candidate at first, then 2 + ⌊log 20⌋ = 4 different ones.
    assert [len(points) for points in seen] == [2, *[8] * 19]
    assert all(len(points[:4].unique(dim=0)) == 4 for points in seen[1:])


def test_empty_clusters_take_the_farthest_rows() -> None:
    rows = torch.tensor([[0.0], [1.0], [2.0], [9.0], [30.0]])
    origin = torch.zeros(1)
    # The second start has an even cluster; the first leaves its last two empty.
    centres = torch.tensor([[[1.0], [500.0], [600.0]], [[1.0], [9.0], [30.0]]])
    labels, distances = module._assign(rows, origin, centres)
    means = module._means(rows, origin, labels, distances, 3)
    assert means[0].flatten().tolist() == pytest.approx([42 / 5, 30, 9])
    assert means[1].flatten().tolist() == [1, 9, 30]


def test_seeds_that_leave_clusters_empty_do_no_harm(monkeypatch: pytest.MonkeyPatch) -> None:
    rows, _ = blobs()
    same = rows[:1].expand(6, -1) - rows.mean(0)
    monkeypatch.setattr(module, "_seed", lambda *_: same.unsqueeze(0).clone())
    course = [inertia(rows, kmeans(rows, 6, num_starts=1, num_iterations=i)) for i in range(10)]
    assert all(after <= before + 1e-2 for before, after in pairwise(course))
    assert len(nearest(rows, kmeans(rows, 6, num_starts=1)).unique()) == 6


@pytest.mark.parametrize("num_clusters", [2, 3, 5, 12])
def test_duplicates(num_clusters: int) -> None:
    # Three different rows, four times each: with more clusters than that some stay empty.
    different = torch.tensor([[0.1, 0.7], [5.3, 5.1], [9.9, 0.3]])
    rows = different.repeat(4, 1)
    centres = kmeans(rows, num_clusters)
    assert centres.isfinite().all()
    if num_clusters >= 3:
        assert inertia(rows, centres) == pytest.approx(0, abs=1e-8)
        assert same_partition(nearest(rows, centres), torch.arange(3).repeat(4))


def test_rows_that_are_all_the_same() -> None:
    rows = torch.full((10, 3), 0.3)
    assert torch.allclose(kmeans(rows, 4), rows[:4])


def test_one_cluster_is_the_mean() -> None:
    rows = noise()
    assert torch.allclose(kmeans(rows, 1), rows.mean(0, keepdim=True), atol=1e-6)
    assert nearest(rows, rows[:1]).tolist() == [0] * len(rows)


@pytest.mark.parametrize("num_rows", [1, 2, 30])
def test_as_many_clusters_as_rows(num_rows: int) -> None:
    rows = noise(num_rows)
    centres = kmeans(rows, num_rows)
    assert sorted(nearest(rows, centres).tolist()) == list(range(num_rows))
    assert torch.allclose(centres[nearest(rows, centres)], rows, atol=1e-6)


@pytest.mark.parametrize("chunk_bytes", [1, 4 * 5 * 7, 4 * 5 * 299])
def test_chunks_change_nothing(chunk_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = noise()
    whole = kmeans(rows, 7, num_starts=3)
    found = nearest(rows, whole)
    monkeypatch.setattr(module, "CHUNK_BYTES", chunk_bytes)
    assert torch.allclose(kmeans(rows, 7, num_starts=3), whole, atol=1e-5)
    assert torch.equal(nearest(rows, whole), found)


def test_chunks_hold_what_they_may(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(module, "CHUNK_BYTES", 4000)
    rows, origin = noise(), torch.zeros(5)
    for width, size in ((1, 200), (5, 200), (20, 50), (5000, 1)):
        parts = [chunk for _, chunk in module._chunks(rows, origin, width)]
        assert {len(part) for part in parts[:-1]} == {size}
        assert torch.equal(torch.cat(parts), rows)


def test_rows_far_from_zero() -> None:
    # Squares of these are near 1e8, where float32 is no finer than 8.
    rows, labels = blobs()
    assert same_partition(nearest(rows + 1e4, kmeans(rows + 1e4, 6)), labels)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float64])
def test_other_floats(dtype: torch.dtype) -> None:
    rows, labels = blobs()
    centres = kmeans(rows.to(dtype), 6)
    assert centres.dtype == torch.float32
    assert same_partition(nearest(rows.to(dtype), centres), labels)


def test_no_gradient_is_kept() -> None:
    assert not kmeans(noise().requires_grad_(), 3).requires_grad


@pytest.mark.parametrize(("num_clusters", "num_starts"), [(301, 10), (0, 10), (-1, 10), (3, 0)])
def test_what_cannot_be_is_refused(num_clusters: int, num_starts: int) -> None:
    with pytest.raises(InputError, match=f"cannot make {num_clusters} clusters of 300 rows"):
        kmeans(noise(), num_clusters, num_starts=num_starts)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), 1e30])
def test_rows_that_are_not_finite_are_refused(value: float) -> None:
    rows = noise()
    rows[17, 2] = value
    with pytest.raises(InputError, match="finite rows"):
        kmeans(rows, 3)


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_the_same_bits_every_time_on_a_gpu() -> None:
    rows, labels = blobs()
    centres = kmeans(rows.cuda(), 6)
    assert centres.is_cuda
    assert torch.equal(kmeans(rows.cuda(), 6), centres)
    assert same_partition(nearest(rows.cuda(), centres).cpu(), labels)

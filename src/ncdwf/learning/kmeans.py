"""k-means on the device that the rows are on; all starts go side by side. See decision 9."""

import math
from collections.abc import Iterator

import torch
from jaxtyping import Float, Int64
from torch import Tensor

from ncdwf.errors import InputError
from ncdwf.noise import generator

Rows = Float[Tensor, "row dim"]
Point = Float[Tensor, " dim"]
Starts = Float[Tensor, "start cluster dim"]
Labels = Int64[Tensor, "row start"]
Distances = Float[Tensor, "row start"]

CHUNK_BYTES = 16 * 2**20
TOLERANCE = 1e-4  # of the mean variance, as in scikit-learn


@torch.no_grad()
def kmeans(
    rows: Rows, num_clusters: int, *, num_starts: int = 10, seed: int = 0, num_iterations: int = 300
) -> Float[Tensor, "cluster dim"]:
    """Return the centres of the start with the least sum of squared distances, in float32."""
    if num_starts < 1 or not 1 <= num_clusters <= len(rows):
        wish = f"{num_clusters} clusters of {len(rows)} rows in {num_starts} starts"
        raise InputError(f"k-means cannot make {wish}")
    origin = rows.mean(0).float()
    spread = sum(float(chunk.square().sum()) for _, chunk in _chunks(rows, origin, 1))
    if not math.isfinite(spread):
        raise InputError("k-means needs finite rows; some are NaN, infinite or too large")
    sources = [generator(seed, "kmeans", i, device=rows.device) for i in range(num_starts)]
    centres = _seed(rows, origin, num_clusters, sources)
    going = torch.arange(num_starts, device=rows.device)
    labels = going.new_full((len(rows), num_starts), -1)
    for _ in range(num_iterations):
        found, distances = _assign(rows, origin, centres[going])
        moved = _means(rows, origin, found, distances, num_clusters)
        shift = (moved - centres[going]).square().sum((1, 2))
        still = (found != labels).any(0) & (shift > TOLERANCE * spread / rows.numel())
        centres[going] = moved
        labels, going = found[:, still], going[still]
        if not len(going):
            break
    inertia = _assign(rows, origin, centres)[1].sum(0, dtype=torch.float64)
    return centres[inertia.argmin()] + origin


@torch.no_grad()
def nearest(rows: Rows, centres: Float[Tensor, "cluster dim"]) -> Int64[Tensor, " row"]:
    """Return which centre is the nearest to each row."""
    origin = centres.float().mean(0)
    return _assign(rows, origin, (centres - origin).unsqueeze(0))[0].squeeze(1)


def _chunks(rows: Rows, origin: Point, width: int) -> Iterator[tuple[slice, Tensor]]:
    """Yield the rows as seen from `origin` in parts, with room for `width` numbers a row."""
    size = max(1, CHUNK_BYTES // (4 * max(rows.shape[1], width)))
    for begin in range(0, len(rows), size):
        part = slice(begin, begin + size)
        yield part, rows[part].float() - origin


def _distances(rows: Rows, points: Float[Tensor, "point dim"]) -> Float[Tensor, "row point"]:
    """Return squared distances."""
    crossed = torch.addmm(points.square().sum(1), rows, points.T, alpha=-2)
    return crossed.add_(torch.linalg.vector_norm(rows, dim=1, keepdim=True) ** 2).clamp_min_(0)


def _assign(rows: Rows, origin: Point, centres: Starts) -> tuple[Labels, Distances]:
    """Return the nearest centre of each start to each row, and how far it is."""
    points = centres.flatten(0, 1)
    distances = origin.new_empty(len(rows), len(centres))
    labels = torch.empty_like(distances, dtype=torch.int64)
    for part, chunk in _chunks(rows, origin, len(points)):
        to_all = _distances(chunk, points).unflatten(1, centres.shape[:2])
        distances[part], labels[part] = to_all.min(2)
    return labels, distances


def _means(rows: Rows, origin: Point, labels: Labels, distances: Distances, num: int) -> Starts:
    """Return the means of all `num` clusters; an empty one takes a row that is farthest."""
    clusters = torch.arange(num, device=rows.device)
    sums = origin.new_zeros(labels.shape[1] * num, rows.shape[1])
    counts = origin.new_zeros(len(sums))
    for part, chunk in _chunks(rows, origin, len(sums)):
        members = (labels[part].unsqueeze(2) == clusters).flatten(1).float()
        sums.addmm_(members.T, chunk)  # index_add_ would give other bits every time on a GPU
        counts += members.sum(0)
    means: Tensor = (sums / counts.clamp_min(1).unsqueeze(1)).unflatten(0, (-1, num))
    empty = (counts == 0).unflatten(0, (-1, num))
    for start in empty.any(1).nonzero().flatten().tolist():
        farthest = distances[:, start].topk(int(empty[start].sum())).indices
        means[start, empty[start]] = rows[farthest].float() - origin
    return means


def _seed(rows: Rows, origin: Point, num_clusters: int, sources: list[torch.Generator]) -> Starts:
    """Return k-means++ centres: of a few rows drawn by squared distance the one that helps most."""
    starts = torch.arange(len(sources), device=rows.device)
    closest = origin.new_full((len(sources), len(rows)), math.inf)
    weights, num_trials, chosen = torch.ones_like(closest), 1, []
    for _ in range(num_clusters):
        noise = [torch.empty_like(closest[0]).exponential_(generator=source) for source in sources]
        drawn = (weights / torch.stack(noise)).topk(num_trials).indices  # without replacement
        points = rows[drawn.flatten()].float() - origin
        trials = closest.unsqueeze(1).repeat(1, num_trials, 1)
        for part, chunk in _chunks(rows, origin, len(points)):
            found = _distances(chunk, points).T.unflatten(0, drawn.shape)
            trials[..., part].clamp_max_(found)
        best = trials.sum(2).argmin(1)
        chosen.append(points.unflatten(0, drawn.shape)[starts, best])
        weights = closest = trials[starts, best]
        num_trials = min(2 + int(math.log(num_clusters)), len(rows))
    return torch.stack(chosen, 1)

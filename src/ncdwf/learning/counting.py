"""How many novel classes a pool holds: an estimate from its features. See decision 13."""

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from jaxtyping import Float, Float64, Int64
from torch import Tensor
from torch.nn import functional as F

from ncdwf.errors import InputError, counted
from ncdwf.learning.kmeans import kmeans, nearest
from ncdwf.noise import generator

Rows = Float[Tensor, "row dim"]
Labels = Int64[Tensor, " row"]
Weights = Float64[Tensor, "cls term"]

FEWEST_A_CLASS = 10
"""No candidate leaves fewer pictures a class on average."""
LEAST_POOL = 2 * FEWEST_A_CLASS
"""So many pictures can be of two classes."""
MOST_CLASSES = 200
STEP = 1.15
"""From one candidate to the next, where that is more than one class."""
MOST_ROWS = 10_000
"""Of a larger pool so many pictures are drawn."""
NUM_SAMPLES, SHARE = 5, 0.8
"""Everything is repeated on so many parts of the rows, each as large as this share of them."""
KMEANS_STARTS, KMEANS_STEPS = 2, 25
SILHOUETTE_ROWS = 2_000
CLEAR = 0.7
"""A mean silhouette above this is a "strong structure" (Kaufman and Rousseeuw, 1990)."""
EM_STEPS, EM_TOLERANCE = 40, 1e-4
PATIENCE = 4
"""Mixtures are given up after so many candidates in a row that are worse than the best one."""
LEAST_VARIANCE = 1e-12


@dataclass(frozen=True, kw_only=True, slots=True)
class ClassCount:
    """How many classes a pool seems to hold, within which bounds, and what speaks for each number.

    `curve` is the share of the other candidates that one beats, the mean of both criteria.
    """

    number: int
    low: int
    high: int
    curve: Mapping[int, float]

    def __str__(self) -> str:
        return f"{self.number} (between {self.low} and {self.high})"


def check_countable(num_images: int) -> None:
    """Refuse a pool in which classes cannot be counted."""
    if num_images < LEAST_POOL:
        raise InputError(
            f"the classes of {counted(num_images, 'picture')} cannot be counted: "
            f"{LEAST_POOL} or more are needed"
        )


@torch.no_grad()
def count_classes(features: Rows, *, seed: int) -> ClassCount:
    """Estimate how many classes `features` come from.

    Two criteria judge k-means with every candidate number: how well the clusters are apart
    (silhouette [1]), and how much a normal mixture that starts from them explains (BIC [2]). The
    first hardly depends on how many rows there are, but may see groups of classes or parts of
    them; the second is better where classes are few, and too low where rows are. The number is the
    one with the best mean rank, or with the best silhouette where clusters are clearly apart. The
    bounds hold every candidate that either criterion prefers on any part of the rows, and one more
    at each end.

    References:
        [1]: Rousseeuw, Silhouettes: a graphical aid to the interpretation and validation of
            cluster analysis, 1987.
        [2]: Fraley and Raftery, Model-based clustering, discriminant analysis, and density
            estimation, 2002.

    >>> source = torch.Generator().manual_seed(0)
    >>> centres = torch.eye(4).repeat_interleave(30, 0)
    >>> count_classes(centres + 0.1 * torch.randn(120, 4, generator=source), seed=0).number
    4
    """
    check_countable(len(features))
    if not bool(torch.isfinite(features).all()):
        raise InputError("classes cannot be counted: some features are NaN or infinite")
    rows = features[_some(len(features), MOST_ROWS, seed, "pool", features.device)]
    rows = F.normalize(rows.double(), dim=1)
    rows = rows - rows.mean(0)
    if float(rows.square().sum(1).mean()) < LEAST_VARIANCE:  # the same picture again and again
        return ClassCount(number=1, low=1, high=1, curve={1: 1.0})
    wide, narrow = _projections(rows)
    candidates = _candidates(len(rows))
    silhouettes, evidence = [], []
    for sample in range(NUM_SAMPLES):
        part = _some(len(rows), round(SHARE * len(rows)), seed, sample, rows.device)
        source = generator(seed, "counting", sample, device=rows.device)
        partitions = [
            _partition(wide[part], number, NUM_SAMPLES * seed + sample) for number in candidates
        ]
        judged = torch.randperm(len(part), generator=source, device=rows.device)[:SILHOUETTE_ROWS]
        distances = torch.cdist(wide[part][judged], wide[part])
        silhouettes.append([_silhouette(distances, judged, labels) for labels in partitions])
        evidence.append(_falling(narrow[part], partitions))
    return _conclude(candidates, torch.tensor(silhouettes), torch.tensor(evidence))


def _conclude(
    candidates: list[int],
    silhouettes: Float[Tensor, "sample candidate"],
    evidence: Float[Tensor, "sample candidate"],
) -> ClassCount:
    """Return the candidate that both criteria rank highest, and where either has its peaks."""
    apart, explained = _ranks(silhouettes.mean(0)), _ranks(evidence.mean(0))
    peaks = evidence.argmax(1).tolist()
    if int(explained.argmax()) == 0:  # silhouettes cannot tell one class from several
        apart[0] = 1
    else:
        peaks += silhouettes.argmax(1).tolist()
        if float(silhouettes.mean(0).max()) > CLEAR:  # nor do mixtures count clear, small classes
            explained = apart
    mean_rank = (apart + explained) / 2
    best = int(mean_rank.argmax())
    peaks.append(best)
    return ClassCount(
        number=candidates[best],
        low=candidates[max(min(peaks) - 1, 0)],
        high=candidates[min(max(peaks) + 1, len(candidates) - 1)],
        curve=dict(zip(candidates, mean_rank.tolist(), strict=True)),
    )


def _ranks(scores: Float[Tensor, " candidate"]) -> Float[Tensor, " candidate"]:
    """Return the share of the other candidates that each one beats."""
    return (scores[:, None] > scores).sum(1) / max(len(scores) - 1, 1)


def _candidates(num_rows: int) -> list[int]:
    """Return 1, 2, 3, … and from about 7 on every number that is `STEP` times the last."""
    most = min(MOST_CLASSES, num_rows // FEWEST_A_CLASS)
    found = [1]
    while found[-1] < most:
        found.append(min(most, max(found[-1] + 1, round(found[-1] * STEP))))
    return found


def _some(num: int, wanted: int, seed: int, what: str | int, device: torch.device) -> Labels:
    """Return `wanted` of the indices 0…num-1, in order; all of them if there are no more."""
    source = generator(seed, "counting-rows", what, device=device)
    return torch.randperm(num, generator=source, device=device)[:wanted].sort().values


def _projections(
    rows: Rows,
) -> tuple[Float[Tensor, "row wide"], Float[Tensor, "row narrow"]]:
    """Return principal components for k-means, and fewer of them, at unit variance, for mixtures.

    How many follows from the variances λ: (Σλ)² / Σλ² and Σλ / max λ.
    """
    variances, directions = torch.linalg.eigh(rows.T @ rows / len(rows))
    variances, directions = variances.flip(0).clamp_min(0), directions.flip(1)
    shares = variances / variances.sum()
    wide = max(1, round(float(1 / shares.square().sum())))
    narrow = max(1, round(float(1 / shares[0])))
    components = rows @ directions[:, : max(wide, narrow)]
    return components[:, :wide].float(), components[:, :narrow] / variances[:narrow].sqrt()


def _partition(rows: Rows, number: int, seed: int) -> Labels:
    """Return clusters of k-means; a few steps are enough to judge them."""
    centres = kmeans(rows, number, num_starts=KMEANS_STARTS, seed=seed, num_iterations=KMEANS_STEPS)
    return nearest(rows, centres)


def _members(labels: Labels, number: int) -> Float[Tensor, "row cls"]:
    return torch.zeros(len(labels), number, device=labels.device).scatter_(1, labels[:, None], 1)


def _silhouette(distances: Float[Tensor, "judged row"], judged: Labels, labels: Labels) -> float:
    """Return the mean silhouette of the judged rows; 0 if there is only one cluster."""
    members = _members(labels, int(labels.max()) + 1).to(distances)
    sizes = members.sum(0)
    if members.shape[1] == 1:
        return 0.0
    own = labels[judged]
    sums = distances @ members
    inside = sums.gather(1, own[:, None]).squeeze(1) / (sizes[own] - 1).clamp_min(1)
    means = (sums / sizes.clamp_min(1)).masked_fill(sizes == 0, math.inf)
    outside = means.scatter(1, own[:, None], math.inf).amin(1)
    widths = (outside - inside) / torch.maximum(outside, inside).clamp_min(1e-12)
    return float(widths.where(sizes[own] > 1, 0).mean())


def _falling(rows: Rows, partitions: list[Labels]) -> list[float]:
    """Return the evidence for each partition; once given up, it only falls."""
    found: list[float] = []
    for labels in partitions:
        given_up = len(found) > PATIENCE and max(found[-PATIENCE:]) < max(found[:-PATIENCE])
        found.append(found[-1] - 1 if given_up else _evidence(rows, labels))
    return found


def _evidence(rows: Rows, labels: Labels) -> float:
    """Return -BIC/2, but for a constant, of a normal mixture that EM fits from a partition.

    The log-density of a component is linear in a row's first and second moments, the terms here,
    so that either half of a step is one matrix product.
    """
    dim = rows.shape[1]
    i, j = torch.triu_indices(dim, dim, device=rows.device)
    terms = torch.cat([torch.ones_like(rows[:, :1]), rows, rows[:, i] * rows[:, j]], dim=1)
    members = _members(labels, int(labels.max()) + 1).to(rows)
    last, total = -math.inf, 0.0
    for _ in range(EM_STEPS):
        joint = terms @ _mixture(members.T @ terms, dim).T
        evidence = joint.logsumexp(1)
        total = float(evidence.sum())
        members = (joint - evidence[:, None]).exp()
        if total - last < EM_TOLERANCE * len(rows):
            break
        last = total
    return total - (members.shape[1] * terms.shape[1] - 1) / 2 * math.log(len(rows))


def _mixture(sums: Weights, dim: int) -> Weights:
    """Return the components' log-densities as weights of the terms that `sums` adds up.

    Covariances are drawn to their mean as if dim + 2 more rows had it, so that few rows give one.
    """
    i, j = torch.triu_indices(dim, dim, device=sums.device)
    sizes = sums[:, 0].clamp_min(1e-9)
    moments = sums / sizes[:, None]
    means, share = moments[:, 1 : dim + 1], sizes / sizes.sum()
    scatter = sums.new_empty(len(sums), dim, dim)
    scatter[:, i, j] = scatter[:, j, i] = moments[:, dim + 1 :]
    scatter -= means[:, :, None] * means[:, None, :]
    pooled = (share[:, None, None] * scatter).sum(0)
    pooled += 1e-6 * torch.eye(dim, dtype=sums.dtype, device=sums.device)
    weight = (sizes / (sizes + dim + 2))[:, None, None]
    factor = torch.linalg.cholesky(torch.lerp(pooled.expand_as(scatter), scatter, weight))
    precision = torch.cholesky_inverse(factor)
    linear = (precision @ means[:, :, None]).squeeze(2)
    logdet = 2 * factor.diagonal(dim1=1, dim2=2).log().sum(1)
    constant = share.log() - (logdet + (linear * means).sum(1)) / 2
    squares = -precision[:, i, j] * torch.where(i == j, 0.5, 1.0).to(sums)
    return torch.cat([constant[:, None], linear, squares], dim=1)

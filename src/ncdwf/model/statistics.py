"""Class statistics: the only thing, beside weights, that outlives the labelled data."""

import copy

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.errors import InputError

NUM_PARTS = 32
"""Into so many equal parts the quantiles of the angles divide the pictures of a class."""


class ClassStatistics(nn.Module):
    """Means, spread and counts of the known classes' features, their mean norm and their angles.

    `spread` is a variance a dimension (`shared-diagonal`), one covariance for all classes
    (`shared`) or one a class (`per-class`). `angles` are quantiles, evenly spaced, of the angle
    between a class's mean and its pictures. No spread tells that: many pictures lie nearer to their
    mean than a normal distribution would have them, and some much farther away.
    """

    means: Float[Tensor, "cls feature"]
    spread: Tensor
    counts: Int64[Tensor, " cls"]
    feature_norm: Float[Tensor, ""]
    angles: Float[Tensor, "cls level"]

    def __init__(self, num_known: int, num_features: int, spread: str) -> None:
        super().__init__()
        shape = _spread_shape(spread, num_known, num_features)
        self.register_buffer("means", torch.zeros(num_known, num_features))
        self.register_buffer("spread", torch.zeros(shape))
        self.register_buffer("counts", torch.zeros(num_known, dtype=torch.int64))
        self.register_buffer("feature_norm", torch.zeros(()))
        self.register_buffer("angles", torch.zeros(num_known, NUM_PARTS - 1))

    def initialise(self, source: torch.Generator) -> None:
        """Start empty: the supervised phase puts what it measured in this place."""
        for tensor in self.buffers():
            tensor.zero_()

    def measure_angles(
        self, angles: Float[Tensor, " image"], labels: Int64[Tensor, " image"]
    ) -> None:
        """Keep the quantiles of the angles between pictures and the means of their classes."""
        members = [angles[labels == label] for label in range(len(self.means))]
        self.angles = torch.stack([quantiles(m, torch.ones_like(m)) for m in members])

    def angles_to(self, features: Float[Tensor, "image feature"]) -> Float[Tensor, "image cls"]:
        """Return the angle between every feature and every class mean."""
        cosines = F.normalize(features.float(), dim=1) @ F.normalize(self.means, dim=1).T
        return cosines.clamp(-1, 1).acos()

    def rank(self, features: Float[Tensor, "image feature"]) -> Int64[Tensor, " image"]:
        """Return in which part of the nearest class a feature lies, 0 being next to its mean.

        Pictures that the statistics were made of have all ranks equally often, in every class.
        """
        angle, nearest = self.angles_to(features).min(1)
        return (self.angles[nearest] < angle[:, None]).sum(1)


class Accumulator:
    """Adds up features batch by batch, in double precision, and forgets each batch at once."""

    def __init__(self, num_known: int, num_features: int, spread: str, device: torch.device):
        self._spread = spread
        self._num_features = num_features
        self._counts = torch.zeros(num_known, dtype=torch.float64, device=device)
        self._sums = torch.zeros(num_known, num_features, dtype=torch.float64, device=device)
        shape = _spread_shape(spread, num_known, num_features)
        self._squares = torch.zeros(shape, dtype=torch.float64, device=device)
        self._norms = torch.zeros((), dtype=torch.float64, device=device)

    def add(
        self, features: Float[Tensor, "image feature"], labels: Int64[Tensor, " image"]
    ) -> None:
        """Count in a batch of features and their classes."""
        features = features.double()
        self._counts.index_add_(0, labels, torch.ones_like(features[:, 0]))
        self._sums.index_add_(0, labels, features)
        self._norms += features.norm(dim=1).sum()
        if self._spread == "shared-diagonal":
            self._squares += features.square().sum(0)
        elif self._spread == "shared":
            self._squares += features.T @ features
        else:
            for label in torch.unique(labels).tolist():
                members = features[labels == label]
                self._squares[label] += members.T @ members

    def result(self, views_per_image: int) -> ClassStatistics:
        """Return the statistics; `counts` are pictures, not views."""
        if bool((self._counts < 2 * views_per_image).any()):
            raise InputError("statistics need two or more pictures of every known class")
        total = self._counts.sum()
        means = self._sums / self._counts[:, None]
        if self._spread == "shared-diagonal":
            between = (self._counts[:, None] * means.square()).sum(0)
            spread = ((self._squares - between) / total).clamp_min(0)
        elif self._spread == "shared":
            between = (means * self._counts[:, None]).T @ means
            spread = (self._squares - between) / total
        else:
            spread = self._squares / self._counts[:, None, None] - _outer(means)
        statistics = ClassStatistics(len(means), self._num_features, self._spread)
        statistics.means = means.float()
        statistics.spread = spread.float()
        statistics.counts = (self._counts / views_per_image).round().long()
        statistics.feature_norm = (self._norms / total).float()
        return statistics


def soft_statistics(
    features: Float[Tensor, "image feature"],
    memberships: Float[Tensor, "image cls"],
    spread: str,
) -> ClassStatistics:
    """Return the statistics of classes of which every picture is a member to a degree.

    Degrees leave no class without a mean, however few pictures it is the first choice of.
    """
    features, memberships = features.double(), memberships.double()
    sizes = memberships.sum(0).clamp_min(1e-12)
    # In units of the largest degree: no class is so faint that its mean would vanish.
    degrees = memberships / memberships.amax(0).clamp_min(1e-300)
    means = degrees.T @ features / degrees.sum(0).clamp_min(1e-12)[:, None]
    if spread == "shared-diagonal":
        between = (sizes[:, None] * means.square()).sum(0)
        scatter = ((features.square().sum(0) - between) / len(features)).clamp_min(0)
    elif spread == "shared":
        scatter = (features.T @ features - (means * sizes[:, None]).T @ means) / len(features)
    else:
        squares = [(features * degree[:, None]).T @ features for degree in memberships.T]
        scatter = torch.stack(squares) / sizes[:, None, None] - _outer(means)
    statistics = ClassStatistics(len(means), features.shape[1], spread)
    statistics.means = means.float()
    statistics.spread = scatter.float()
    statistics.counts = torch.bincount(memberships.argmax(1), minlength=len(means))
    statistics.feature_norm = features.norm(dim=1).mean().float()
    angles = statistics.angles_to(features)
    statistics.angles = torch.stack(list(map(quantiles, angles.T, degrees.T)))
    return statistics


def quantiles(
    values: Float[Tensor, " image"], degrees: Float[Tensor, " image"]
) -> Float[Tensor, " level"]:
    """Return evenly spaced quantiles of values that count to a degree each."""
    ordered, order = values.sort()
    below = degrees[order].double().cumsum(0)
    levels = torch.arange(1, NUM_PARTS, device=values.device) / NUM_PARTS
    places = torch.searchsorted(below, levels * below[-1])
    return ordered[places.clamp_max(len(ordered) - 1)].float()


def joined(first: ClassStatistics, second: ClassStatistics) -> ClassStatistics:
    """Return the statistics of all classes; what they share is averaged by their sizes."""
    result = copy.deepcopy(first)
    sizes = [statistics.counts.sum().double() for statistics in (first, second)]
    share = (sizes[1] / (sizes[0] + sizes[1]).clamp_min(1)).float()
    result.means = torch.cat([first.means, second.means])
    result.counts = torch.cat([first.counts, second.counts])
    result.angles = torch.cat([first.angles, second.angles])
    result.feature_norm = torch.lerp(first.feature_norm, second.feature_norm, share)
    if first.spread.ndim == 3:
        result.spread = torch.cat([first.spread, second.spread])
    else:
        result.spread = torch.lerp(first.spread, second.spread, share)
    return result


def _spread_shape(spread: str, num_known: int, num_features: int) -> tuple[int, ...]:
    return {
        "shared-diagonal": (num_features,),
        "shared": (num_features, num_features),
        "per-class": (num_known, num_features, num_features),
    }[spread]


def _outer(vectors: Tensor) -> Tensor:
    return vectors[:, :, None] * vectors[:, None, :]

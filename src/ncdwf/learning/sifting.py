"""Known pictures in a pool: how many there are, and which to leave out of discovery."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from ncdwf.data.inputs import Inputs
from ncdwf.model import Model
from ncdwf.model.replay import GaussianPrototypes
from ncdwf.noise import generator

NUM_SAMPLES = 20_000
NUM_THRESHOLDS = 199
SURE = (0.5, 0.8)
"""Quantiles of the known scores between which the share is read off: few novel pictures score as
high, and above them there are too few to count."""
MOSTLY_KNOWN = 0.95
"""Where more of a pool looks known, the rest may be what was not recognised."""


@dataclass(frozen=True, slots=True)
class Sifted:
    """What a pool is made of, as far as the class statistics can tell."""

    is_kept: Bool[Tensor, " image"]
    """Which pictures to discover among."""
    known_share: float
    """Which share of the pool is estimated to be of known classes."""

    @property
    def is_mostly_known(self) -> bool:
        """Tell whether what is kept may hold no novel class at all."""
        return self.known_share > MOSTLY_KNOWN


def sift(model: Model, images: Inputs, *, seed: int = 0) -> Sifted:
    """Tell which pictures of a pool are of known classes.

    A picture's score is its largest cosine to a known class. How known classes score is read off
    Gaussian samples of the stored class statistics: their pictures are gone. Where these score
    high, novel pictures are rare, so the pool's pictures there say how many known ones it holds.
    The threshold is the one that should keep novel pictures best (F1).

    Args:
        model: as it is before this discovery.
        images: the pool.
        seed: decides the samples.
    """
    memory = GaussianPrototypes(model.statistics)
    samples, _ = memory.take(NUM_SAMPLES, generator(seed, "sift", device=model.device))
    scores, known = (_scores(model, x) for x in (model.features(images), samples))
    thresholds = torch.quantile(
        known, torch.linspace(0, 1, NUM_THRESHOLDS + 2, device=known.device)[1:-1]
    )
    known_below, below = _below(known, thresholds), _below(scores, thresholds)
    is_sure = (known_below >= SURE[0]) & (known_below <= SURE[1])
    shares = (1 - below[is_sure]) / (1 - known_below[is_sure]).clamp_min(1e-6)
    share = shares.min().clamp(0, 1) if len(shares) else torch.zeros_like(known[0])
    # The last candidate keeps the whole pool.
    known_below, below = (F.pad(values, (0, 1), value=1.0) for values in (known_below, below))
    thresholds = F.pad(thresholds, (0, 1), value=torch.inf)
    novel_kept = (below - share * known_below).clamp_min(0).minimum(1 - share)
    f1 = 2 * novel_kept / (below + 1 - share).clamp_min(1e-6)
    is_kept = scores < thresholds[f1.argmax()]
    return Sifted(is_kept.cpu(), float(share))


def _scores(model: Model, features: Float[Tensor, "row feature"]) -> Float[Tensor, " row"]:
    return model.outputs(features).known_logits.amax(1).float()


def _below(
    values: Float[Tensor, " row"], thresholds: Float[Tensor, " threshold"]
) -> Float[Tensor, " threshold"]:
    """Return which share of the values lies below each threshold."""
    ordered = values.sort().values
    return torch.searchsorted(ordered, thresholds) / len(ordered)

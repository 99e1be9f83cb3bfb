"""Known pictures in a pool: how many there are, and which to leave out of discovery."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from ncdwf.model.statistics import NUM_PARTS, ClassStatistics

MOSTLY_KNOWN = 0.75
"""Where more of a pool looks known, all of it may be: the rest is what was not recognised."""

LEAST = 1e-6


@dataclass(frozen=True, slots=True)
class Sifted:
    """What a pool is made of, as far as the class statistics can tell."""

    is_kept: Bool[Tensor, " image"]
    """Which pictures to discover among."""
    known_share: float
    """Which share of the pool is of known classes: an estimate, rather too low than too high."""

    @property
    def is_mostly_known(self) -> bool:
        """Tell whether what is kept may hold no novel class at all."""
        return self.known_share > MOSTLY_KNOWN


def sift(statistics: ClassStatistics, features: Float[Tensor, "image feature"]) -> Sifted:
    """Tell which pictures of a pool are of known classes.

    What counts is how far a picture lies from the nearest mean of a known class, by the measure of
    that class: how many of its labelled pictures lie nearer (a p-value, as in conformal
    prediction). Half of the labelled ones lie nearer than the median and few novel ones do, so
    twice as many of the pool as lie there are known: at least, because pictures that a network was
    not trained on lie farther away than those that it was. The threshold is the one that should
    keep novel pictures best (F1).

    Args:
        statistics: of the known classes.
        features: of the pool, before this discovery.
    """
    ranks = statistics.rank(features)
    # Which share of the labelled pictures, and of the pool, has a lower rank than each.
    known = torch.arange(NUM_PARTS, device=ranks.device) / NUM_PARTS
    counts = torch.bincount(ranks, minlength=NUM_PARTS)
    found = (counts.cumsum(0) - counts) / len(ranks)
    share = (2 * found[NUM_PARTS // 2]).clamp_max(1)
    novel_kept = (1 - found - share * (1 - known)).minimum(1 - share)
    # Never quite 0: if nothing is novel, the best is to keep as little as can be.
    f1 = 2 * novel_kept.clamp_min(LEAST) / (2 - found - share).clamp_min(LEAST)
    return Sifted((ranks >= f1.argmax()).cpu(), float(share))

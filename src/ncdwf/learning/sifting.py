"""Known pictures in a pool: how many there are, and which to leave out of discovery."""

from dataclasses import dataclass

import torch
from jaxtyping import Bool
from torch import Tensor
from torch.nn import functional as F

from ncdwf.data.inputs import Inputs
from ncdwf.model import Model
from ncdwf.model.statistics import NUM_LEVELS

MOSTLY_KNOWN = 0.75
"""Where more of a pool looks known, all of it may be: the rest is what was not recognised."""


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


def sift(model: Model, images: Inputs) -> Sifted:
    """Tell which pictures of a pool are of known classes.

    What counts is how far a picture lies from the nearest mean of a known class, by the measure of
    that class: how many of its labelled pictures lie nearer (a p-value, as in conformal
    prediction). Half of the labelled ones lie nearer than the median and few novel ones do, so
    twice as many of the pool as lie there are known: at least, because pictures that a network was
    not trained on lie farther away than those that it was. The threshold is the one that should
    keep novel pictures best (F1).

    Args:
        model: as it is before this discovery.
        images: the pool.
    """
    ranks = model.statistics.rank(model.features(images))
    # Of those that lie nearer than each level: the share of the labelled ones, and of the pool.
    known = torch.linspace(0, 1, NUM_LEVELS + 1, device=ranks.device)
    counts = torch.bincount(ranks, minlength=NUM_LEVELS + 1)
    found = F.pad(counts[:-1].cumsum(0), (1, 0)) / len(ranks)
    share = (2 * found[NUM_LEVELS // 2]).clamp_max(1 - 1 / len(ranks))
    novel_kept = (1 - found - share * (1 - known)).clamp_min(0).minimum(1 - share)
    f1 = 2 * novel_kept / (2 - found - share)
    return Sifted((ranks >= f1.argmax()).cpu(), float(share))

"""What a pool holds, found out before discovery: which pictures are known, how many classes."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Float
from torch import Tensor

from ncdwf.config import Config
from ncdwf.errors import InputError, counted
from ncdwf.learning.counting import LEAST_POOL, ClassCount, check_countable, count_classes
from ncdwf.learning.sifting import Sifted, sift
from ncdwf.model.statistics import ClassStatistics


def check_pool(num_images: int, num_novel: int) -> None:
    """Refuse a pool in which `num_novel` classes cannot be found; 0 is yet to be estimated."""
    if num_images == 0:
        raise InputError("the pool is empty; discovery needs unlabelled pictures")
    if num_novel > num_images:
        raise InputError(
            f"{num_novel} novel classes need a pool of {num_novel} or more; "
            f"this one has {num_images}"
        )
    if num_novel == 0:
        check_countable(num_images)


@dataclass(frozen=True, kw_only=True, slots=True)
class Survey:
    """What was found out about a pool before discovery began."""

    sifted: Sifted | None
    """Of a mixed pool: which pictures are discovered among."""
    count: ClassCount | None
    """How many novel classes there are, where nobody said so."""

    def kept(self, rows: Tensor) -> Tensor:
        """Return those of `rows`, one a picture of the pool, that are discovered among."""
        return rows if self.sifted is None else rows[self.sifted.is_kept.to(rows.device)]

    def to_dict(self, names: Sequence[str] | None = None) -> dict[str, Any]:
        """Return it as plain values; what was left out by its row, or by its name in `names`."""
        record: dict[str, Any] = {}
        if self.sifted is not None:
            rows = torch.nonzero(~self.sifted.is_kept).flatten().tolist()
            record |= {
                "known_share": self.sifted.known_share,
                "num_pictures": len(self.sifted.is_kept),
                "num_left_out": len(rows),
                "left_out": rows if names is None else [names[row] for row in rows],
            }
        if self.count is not None:
            record |= {
                "num_novel": self.count.number,
                "low": self.count.low,
                "high": self.count.high,
                "curve": {str(number): value for number, value in self.count.curve.items()},
            }
        return record


def survey(
    statistics: ClassStatistics, features: Float[Tensor, "image feature"], config: Config
) -> Survey:
    """Find out what discovery needs to know of a pool and the configuration leaves open.

    Args:
        statistics: of the known classes.
        features: of the pool, before discovery.
        config: which of it is open.
    """
    settings, sifted, count = config.discovery, None, None
    if settings.pool == "mixed":
        sifted = sift(statistics, features)
        features = features[sifted.is_kept.to(features.device)]
        _check_kept(len(features), len(sifted.is_kept), settings.num_novel)
    if settings.num_novel == 0:
        count = count_classes(features, seed=config.seed)
    return Survey(sifted=sifted, count=count)


def _check_kept(num_kept: int, num_images: int, num_novel: int) -> None:
    """Refuse what sifting left of a pool if `num_novel` classes cannot be found, or counted."""
    if num_kept == 0:
        raise InputError(f"none of the pool's {num_images} pictures looks novel")
    verb = "looks" if num_kept == 1 else "look"
    if num_novel == 0 and num_kept < LEAST_POOL:
        raise InputError(
            f"{num_kept} of {num_images} pictures {verb} novel; {LEAST_POOL} or more are needed to "
            "count their classes; say how many novel classes there are instead"
        )
    if num_kept < num_novel:
        raise InputError(
            f"{num_kept} of {num_images} pictures {verb} novel; "
            f"{counted(num_novel, 'novel class')} cannot be found among them"
        )

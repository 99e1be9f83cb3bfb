"""What a model holds, tensor by tensor, and what each is made from."""

from collections.abc import Mapping
from dataclasses import dataclass

from torch import Tensor

DERIVED_FROM = {
    "backbone.normalise": "labelled pictures: each colour's mean, spread",
    "backbone": "labelled pictures, then the pool: weights, norms",
    "known_head": "labelled pictures, then replay: weights",
    "novel_head": "the pool: weights",
    "best_head": "the pool: which head has the least loss",
    "identifier.tau": "the threshold in use",
    "identifier.calibrated_tau": "the pool: a threshold",
    "identifier": "the pool and replay: weights",
    "statistics.means": "labelled pictures, carried along by discovery: each class's mean feature",
    "statistics.spread": "labelled pictures, carried along by discovery: spread around the means",
    "statistics.counts": "labelled pictures: how many of each class",
    "statistics.feature_norm": "labelled pictures, carried along by discovery: mean feature length",
    "statistics.angles": "labelled pictures: how far those of a class lie from its mean",
    "novel_statistics": "the pool: each novel class's mean feature, spread, size, angles",
}
"""What each stored tensor is made from; the longest matching prefix counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One tensor that a model holds."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    derived_from: str
    value: float | None = None
    """Of a single number."""


def list_holdings(tensors: Mapping[str, Tensor]) -> list[Holding]:
    """Return what is held, by name, in the order of `tensors`."""
    return [
        Holding(
            name=name,
            shape=tuple(tensor.shape),
            num_bytes=tensor.numel() * tensor.element_size(),
            derived_from=_derived_from(name),
            value=float(tensor) if tensor.dim() == 0 else None,
        )
        for name, tensor in tensors.items()
    ]


def _derived_from(name: str) -> str:
    prefix = max((p for p in DERIVED_FROM if name.startswith(p)), key=len)
    return DERIVED_FROM[prefix]

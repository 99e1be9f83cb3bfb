"""The shape of a model: what is needed to build it again before its weights are read."""

from dataclasses import dataclass
from typing import Literal

from ncdwf.config import require, require_shape


@dataclass(frozen=True, kw_only=True, slots=True)
class NovelHead:
    """The shape of the novel head."""

    num_novel: int
    num_heads: int
    num_hidden: int
    num_projected: int
    temperature: float = 0.1
    """Of the softmax."""

    def __post_init__(self) -> None:
        _require_positive(
            self, "num_novel", "num_heads", "num_hidden", "num_projected", "temperature"
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """All that is needed to build a model again before its weights are read."""

    backbone: str
    input_shape: tuple[int, ...]
    """Of one picture (channels, height, width), or of one vector (numbers,)."""
    num_known: int
    temperature: float
    """Of the known head's softmax."""
    spread: Literal["shared-diagonal", "shared", "per-class"]
    novel: NovelHead | None = None
    identifier: bool = False
    num_discovered: int = 0
    """How many of the known classes were discovered in earlier rounds."""

    def __post_init__(self) -> None:
        _require_positive(self, "num_known", "temperature")
        if len(self.input_shape) == 1:
            require(self.input_shape[0] > 0, f"input_shape={self.input_shape} should be above 0")
        else:
            require_shape("input_shape", self.input_shape)
        require(
            0 <= self.num_discovered <= self.num_known,
            f"num_discovered={self.num_discovered} of a model should be from 0 to num_known",
        )


def _require_positive(shape: NovelHead | Architecture, *names: str) -> None:
    for name in names:
        value = getattr(shape, name)
        require(value > 0, f"{name}={value} of a model should be above 0")

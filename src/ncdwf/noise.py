"""Randomness as an argument: everything drawn follows from a seed and a position, nothing else."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

Noise = Mapping[str, Tensor]
"""What one step draws, by name."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Draw:
    """The distribution and the shape of one thing that every step draws."""

    kind: Literal["uniform", "normal"]
    shape: tuple[int, ...]


def generator(
    seed: int, *position: str | int, device: torch.device | str = "cpu"
) -> torch.Generator:
    """Return a generator that depends on `seed` and `position` alone.

    The position (a phase, an epoch, a purpose) is hashed, so streams of neighbouring positions
    have nothing in common and a resumed run needs no stored random state.
    """
    return torch.Generator(device=device).manual_seed(_number(seed, *position))


@contextmanager
def pinned(seed: int, *position: str | int) -> Iterator[None]:
    """Have PyTorch's own generators, which dropout reads, depend on `seed` and `position` alone.

    Afterwards they go on where they were.
    """
    with torch.random.fork_rng(devices=range(torch.cuda.device_count())):
        torch.manual_seed(_number(seed, *position))
        yield


def _number(seed: int, *position: str | int) -> int:
    text = repr((int(seed), *position)).encode()
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "big") >> 1


def draw(
    specification: Mapping[str, Draw], num_steps: int, source: torch.Generator
) -> dict[str, Tensor]:
    """Return the draws of a whole epoch: for each name a tensor `[num_steps, *shape]`."""
    functions = {"uniform": torch.rand, "normal": torch.randn}
    return {
        name: functions[wanted.kind](
            (num_steps, *wanted.shape), generator=source, device=source.device
        )
        for name, wanted in sorted(specification.items())
    }

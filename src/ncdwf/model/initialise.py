"""Modules are built without storage and then filled from a generator: no global random state."""

import math
from collections.abc import Callable
from typing import Protocol, TypeVar, runtime_checkable

import torch
from torch import nn

from ncdwf.errors import InputError

M = TypeVar("M", bound=nn.Module)


@runtime_checkable
class SelfInitialising(Protocol):
    """A module that fills its own parameters and buffers (not those of its children)."""

    def initialise(self, source: torch.Generator) -> None:
        """Fill parameters and buffers from `source`."""
        ...


def build(make: Callable[[], M], source: torch.Generator) -> M:
    """Return `make()` with every parameter and buffer filled from `source`."""
    module = empty(make)
    with torch.no_grad():
        for tensor in (*module.parameters(), *module.buffers()):
            if tensor.is_floating_point():
                tensor.fill_(math.nan)  # what nobody fills below is found out at once
        for part in module.modules():
            _fill(part, source)
    for name, tensor in (*module.named_parameters(), *module.named_buffers()):
        assert not tensor.isnan().any(), f"{name} was not initialised"
    return module


def empty(make: Callable[[], M]) -> M:
    """Return `make()` with uninitialised storage on the CPU."""
    with torch.device("meta"):
        module = make()
    tensors = (*module.parameters(), *module.buffers())
    num_bytes = sum(tensor.numel() * tensor.element_size() for tensor in tensors)
    try:
        return module.to_empty(device="cpu")
    except RuntimeError as error:
        raise InputError(f"{num_bytes:,} bytes of weights do not fit into the memory") from error


def _fill(part: nn.Module, source: torch.Generator) -> None:
    if isinstance(part, nn.Conv2d):
        nn.init.kaiming_normal_(part.weight, mode="fan_out", nonlinearity="relu", generator=source)
        if part.bias is not None:
            part.bias.zero_()
    elif isinstance(part, nn.Linear):
        bound = 1 / math.sqrt(part.in_features)
        for tensor in (part.weight, part.bias):
            if tensor is not None:
                tensor.uniform_(-bound, bound, generator=source)
    elif isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
        part.reset_parameters()
    elif isinstance(part, SelfInitialising):
        part.initialise(source)

"""Where batches come from: which one comes when follows from seed and position alone."""

from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Int64
from torch import Tensor

from ncdwf.noise import generator

Batch = tuple[Tensor, ...]


@runtime_checkable
class BatchSource(Protocol):
    """Where batches come from; which one comes when follows from the position alone."""

    device: torch.device
    batch_size: int
    num_steps: int

    def batch(self, epoch: int, step: int) -> Batch:
        """Return the batch of one step, on the device."""
        ...


def place(tensor: Tensor, device: torch.device) -> Tensor:
    """Return `tensor` on `device`; where it would take more than half of the room, as it is."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        if tensor.numel() * tensor.element_size() > free // 2:
            return tensor
    return tensor.to(device)


class TensorSource:
    """Batches of tensors, or of some of their rows, shuffled anew every epoch.

    Tensors on the device are gathered there. Others (a pool that does not fit, mapped from a file)
    are gathered where they are and sent batch by batch.
    """

    def __init__(
        self,
        *tensors: Tensor,
        batch_size: int,
        seed: int,
        phase: str,
        device: torch.device | None = None,
        rows: Int64[Tensor, " row"] | None = None,
    ) -> None:
        self._tensors = tensors
        self._rows = torch.arange(len(tensors[0])) if rows is None else rows.cpu()
        self._position = (seed, phase, "order")
        self._order = (-1, torch.empty(0))
        self.device = device or tensors[0].device
        self.batch_size = min(batch_size, len(self._rows))
        self.num_steps = len(self._rows) // self.batch_size

    def batch(self, epoch: int, step: int) -> Batch:
        """Return entries `step * batch_size` and on of this epoch's order."""
        if self._order[0] != epoch:
            # Drawn on the host, whose generator is another one than a GPU's: the order, and with
            # it a resumed run, must not depend on where there was room for the tensors.
            source = generator(*self._position, epoch)
            order = torch.randperm(len(self._rows), generator=source)
            self._order = (epoch, self._rows[order].to(self._tensors[0].device))
        chosen = self._order[1][step * self.batch_size : (step + 1) * self.batch_size]
        return tuple(tensor.index_select(0, chosen).to(self.device) for tensor in self._tensors)

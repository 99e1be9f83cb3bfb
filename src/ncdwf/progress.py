"""Who hears how far a long step has come: a training, a download, the reading of pictures."""

from typing import Protocol, runtime_checkable


@runtime_checkable
class Progress(Protocol):
    """Hears how far a long step has come, counted in pictures or in bytes."""

    def start(self, task: str, total: int, done: int, /) -> None:
        """Begin a task of `total`, of which `done` were done before."""
        ...

    def advance(self, number: int, /) -> None:
        """Count in what has just been done."""
        ...

    def stop(self) -> None:
        """End the task."""
        ...


class Quiet:
    """Progress that nobody hears."""

    def start(self, task: str, total: int, done: int, /) -> None:
        """Say nothing."""

    def advance(self, number: int, /) -> None:
        """Say nothing."""

    def stop(self) -> None:
        """Say nothing."""

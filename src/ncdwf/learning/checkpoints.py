"""Checkpoints: where a training can be taken up again, and when one is written."""

import signal
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from torch import Tensor

from ncdwf import storage
from ncdwf.config import from_dict, require
from ncdwf.errors import InputError

STATE_FILE = "state.safetensors"
POSITION_FILE = "position.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Position:
    """Where a training stands, and all of its state that is no tensor."""

    phase: str
    epoch: int
    step: int
    config: str
    """The fingerprint of the run's configuration."""
    data: Mapping[str, Any] = field(default_factory=dict)
    """The digest of what is learnt from; earlier versions did not keep it."""
    history: tuple[Mapping[str, Any], ...]
    """Of every finished epoch."""
    terms: tuple[str, ...]
    """Of which sums are among the tensors, by the name `sum.TERM`."""
    seconds: float
    """That the epoch has taken so far."""

    def __post_init__(self) -> None:
        require(self.step >= 0, f"position.step={self.step} should be 0 or more")
        require(
            self.epoch == len(self.history),
            f"position.epoch={self.epoch}, but the history has {len(self.history)} epochs",
        )


class Checkpoints:
    """Checkpoints of one run: immutable directories named by their position, the last two kept.

    `data` is the digest of what is learnt from (`data.inputs.digest`), once it has been read.
    """

    def __init__(self, directory: Path, *, seconds: float, fingerprint: str) -> None:
        self.directory = directory
        self.data: Mapping[str, Any] = {}
        self._fingerprint = fingerprint
        self._seconds = seconds
        self._last = time.monotonic()
        self._is_last = False

    def of_try(self, number: int) -> "Checkpoints":
        """Return where a further try of the same phase keeps its own; those of 0 are here."""
        if number == 0:
            return self
        others = Checkpoints(
            self.directory / f"try-{number}", seconds=self._seconds, fingerprint=self._fingerprint
        )
        others.data = self.data
        return others

    def due(self) -> bool:
        """Tell whether it is time to keep another one."""
        return self._is_last or time.monotonic() - self._last >= self._seconds

    @contextmanager
    def before_interruptions(self) -> Iterator[None]:
        """Let Ctrl-C wait until another one is kept; a second Ctrl-C waits for nothing."""

        def ask(*_: object) -> None:
            if self._is_last:
                raise KeyboardInterrupt
            self._is_last = True

        usual = signal.default_int_handler
        is_main = threading.current_thread() is threading.main_thread()
        if not is_main or signal.getsignal(signal.SIGINT) is not usual:  # another's to decide
            yield
            return
        signal.signal(signal.SIGINT, ask)
        try:
            yield
        finally:
            signal.signal(signal.SIGINT, usual)
        if self._is_last:  # it came after the last one was kept
            raise KeyboardInterrupt

    def keep(
        self, phase: str, epoch: int, step: int, tensors: dict[str, Tensor], rest: Any
    ) -> None:
        """Write a checkpoint, then remove all but the last two of this phase.

        If somebody has pressed Ctrl-C in the meantime, this is where it takes effect.
        """
        position = {"phase": phase, "epoch": epoch, "step": step, "config": self._fingerprint}
        path = self.directory / f"{phase}-{epoch:06d}-{step:08d}"
        if not path.exists():  # the same position holds the same state
            files = {
                STATE_FILE: storage.to_tensor_bytes(tensors),
                POSITION_FILE: storage.to_json_bytes({**position, "data": self.data, **rest}),
            }
            storage.commit_directory(path, files)
        for old in self._all(phase)[:-2]:
            storage.remove_directory(old)
        self._last = time.monotonic()
        if self._is_last:
            raise KeyboardInterrupt

    def latest(
        self, phase: str, like: Mapping[str, Tensor] | None = None
    ) -> tuple[dict[str, Tensor], Position] | None:
        """Return the tensors and the position of the newest checkpoint, if there is one.

        A damaged one is refused, never passed over: going on from an older one is for a person to
        decide, by deleting the directory that the message names.

        Args:
            phase: whose checkpoint.
            like: what its tensors must be like, beside the sums of the terms.
        """
        found = self._all(phase)
        if not found:
            return None
        path = found[-1]
        try:
            files = storage.read_directory(path)
            require(files.keys() == {POSITION_FILE, STATE_FILE}, f"{path} holds other files")
            described = storage.parse_json(files[POSITION_FILE], path / POSITION_FILE)
            position = from_dict(Position, described, where=str(path / POSITION_FILE))
            tensors = storage.parse_tensors(files[STATE_FILE], path / STATE_FILE)
            if like is not None:
                sums = {f"sum.{term}" for term in position.terms}
                free = {name: tensors[name] for name in sums & tensors.keys()}
                storage.check_tensors(tensors, {**like, **free}, path / STATE_FILE)
                require(len(free) == len(sums), f"{path / STATE_FILE} lacks the sum of a term")
        except InputError as error:
            raise InputError(f"{error}; delete {path} to resume from the one before it") from error
        if position.config != self._fingerprint:
            raise InputError(f"{path} belongs to another configuration than this run's config.json")
        if position.data != self.data:
            told = _difference(position.data, self.data)
            raise InputError(
                f"{path} belongs to other data: {told}; put back what "
                f"was changed, or delete {self.directory} to begin this phase anew"
            )
        return tensors, position

    def _all(self, phase: str) -> list[Path]:
        return sorted(self.directory.glob(f"{phase}-*-*"))


def _difference(before: Mapping[str, Any], now: Mapping[str, Any]) -> str:
    """Say in what two digests differ."""
    if not before:
        return "with which it began is not recorded"
    sizes = [(data.get("rows"), data.get("shape")) for data in (before, now)]
    if sizes[0] != sizes[1]:
        told = [f"{rows} of shape {tuple(shape or ())}" for rows, shape in sizes]
        return f"it began with {told[0]}, there are {told[1]} now"
    if before.get("sha256") != now.get("sha256"):
        return "as many as before, but not the same"
    return "the labels or the names of the classes are others"

"""Many picture files to one tensor, decoded by worker processes."""

import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import threading
from collections.abc import Generator, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from ncdwf.data.decoding import (
    Canvas,
    Shape,
    Skipped,
    Unreadable,
    begin_work,
    no_room,
    paint,
    read_header,
    shows_colour,
)
from ncdwf.errors import InputError, StorageError
from ncdwf.progress import Progress

ALONE = 256
"""Up to so many pictures are decoded before worker processes would have started."""
LOOKED_AT = 16
"""So many pictures are decoded to see whether there is colour; a large one may take a second."""
CHUNK = 64
"""Pictures that a worker decodes at a time, at most."""
ROWS_AT_ONCE = 1024
TASK = "read"


@dataclass(frozen=True, slots=True)
class Glance:
    """What a few pictures say of all."""

    median_side: int
    """Of the shorter sides."""
    has_colour: bool
    """Whether any of them has."""


@dataclass(frozen=True, slots=True)
class Decoded:
    """Pictures in memory, or rather in a temporary file that is mapped there."""

    images: UInt8[Tensor, "image channel height width"]
    kept: list[int]
    """Which of the given files each image is."""
    skipped: tuple[Skipped, ...]


def glance(paths: Sequence[Path], limit: int = 256) -> Glance:
    """Return what up to `limit` pictures look like, spread evenly over `paths`.

    Their headers say it; where none tells of colour, some of those that tell nothing are decoded.
    """
    _require(paths)
    sides, untold, skipped, has_colour = [], [], [], False
    for path in _spread(paths, limit):
        try:
            header = read_header(path)
        except Unreadable as error:
            skipped.append(error.skipped)
            continue
        sides.append(min(header.width, header.height))
        has_colour |= header.has_colour is True
        if header.has_colour is None:
            untold.append(path)
    if not sides:
        raise _none_readable(skipped)
    has_colour = has_colour or any(map(_shows_colour, _spread(untold, LOOKED_AT)))
    return Glance(int(statistics.median(sides)), has_colour)


def _spread(paths: Sequence[Path], most: int) -> Sequence[Path]:
    """Return at most so many of the paths, spread evenly."""
    return paths[:: math.ceil(len(paths) / most) or 1]


def _shows_colour(path: Path) -> bool:
    with suppress(Unreadable):
        return shows_colour(path)
    return False


def decode(
    paths: Sequence[Path],
    shape: Shape,
    *,
    strict: bool = False,
    num_workers: int | None = None,
    progress: Progress | None = None,
) -> Decoded:
    """Return all pictures that can be read as one tensor (`decoding.read_pixels` says how).

    The tensor lies in a temporary file without a name, mapped into memory: pictures that do not fit
    there are read again from the disk, and the file is gone when the tensor is, or the process.

    Args:
        paths: the files; a missing one is skipped like any that is no picture.
        shape: channels, height and width to scale them to.
        strict: refuse the whole if one picture cannot be read.
        num_workers: processes beside this one, as many as there are cores unless it is given; 1
            decodes in this process; so few pictures are decoded, and all in a daemonic process.
        progress: hears of every chunk of pictures.
    """
    _require(paths)
    if num_workers is not None and num_workers < 1:
        raise InputError(f"num_workers is {num_workers}; 1 or more is accepted")
    if shape[0] not in (1, 3) or min(shape) < 1:
        raise InputError(
            f"the shape of pictures is {shape}; 1 or 3 channels, height, width are accepted"
        )
    with _scratch(len(paths) * math.prod(shape)) as file:
        skipped = _paint_all(Canvas(file.fileno(), shape), paths, num_workers, progress)
        rows = np.memmap(file, np.uint8, "r+", shape=(len(paths), *shape))
    in_order = tuple(skipped[row] for row in sorted(skipped))
    if len(in_order) == len(paths):
        raise _none_readable(in_order)
    if strict and in_order:
        raise InputError(f"{in_order[0]} ({len(in_order)} of {len(paths)} cannot be read)")
    kept = [row for row in range(len(paths)) if row not in skipped]
    _close_gaps(rows, kept)
    return Decoded(torch.from_numpy(rows[: len(kept)]), kept, in_order)


def _require(paths: Sequence[Path]) -> None:
    if not paths:
        raise InputError("there are no pictures to read")


def _none_readable(skipped: Sequence[Skipped]) -> InputError:
    return InputError(f"none of the files could be read as a picture; {skipped[0]}")


@contextmanager
def _scratch(num_bytes: int) -> Iterator[IO[bytes]]:
    """Open a temporary file without a name, its room on the disk reserved."""
    try:
        file = tempfile.TemporaryFile()  # noqa: SIM115 - what is done with it can fail otherwise
    except OSError as error:
        raise no_room(error) from error
    with file:
        try:
            if hasattr(os, "posix_fallocate"):  # or the writing itself finds the disk full
                os.posix_fallocate(file.fileno(), 0, num_bytes)
        except OSError as error:
            raise no_room(error) from error
        yield file


def _num_cores() -> int:
    # Not every system tells which cores this process may use.
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


Chunks = Sequence[tuple[int, Sequence[Path]]]
"""The first row of each, and its pictures."""
Painted = Generator[tuple[int, dict[int, Skipped]], None, None]
"""Chunk by chunk: how many pictures were done, and the rows that stay empty."""


def _paint_all(
    canvas: Canvas, paths: Sequence[Path], num_workers: int | None, progress: Progress | None
) -> dict[int, Skipped]:
    """Decode all pictures, a row each; return the rows that stay empty."""
    num_workers = num_workers or _num_cores()
    # A daemonic process, as of a pool, may not start others.
    is_alone = multiprocessing.current_process().daemon or num_workers == 1 or len(paths) <= ALONE
    # Large enough to be worth a message, small enough that no worker is late.
    size = min(CHUNK, math.ceil(len(paths) / (8 * num_workers)))
    chunks = [(row, paths[row : row + size]) for row in range(0, len(paths), size)]
    painted = _alone(canvas, chunks) if is_alone else _in_workers(canvas, chunks, num_workers)
    skipped: dict[int, Skipped] = {}
    if progress:
        progress.start(TASK, len(paths), 0)
    with closing(painted):  # and its workers, should `progress` be interrupted
        for num_images, failures in painted:
            skipped |= failures
            if progress:
                progress.advance(num_images)
    if progress:
        progress.stop()
    return skipped


def _alone(canvas: Canvas, chunks: Chunks) -> Painted:
    for row, paths in chunks:
        yield len(paths), canvas.paint(row, paths)


def _in_workers(canvas: Canvas, chunks: Chunks, num_workers: int) -> Painted:
    try:
        with _workers(canvas, num_workers) as pool:
            with _bare_start():  # processes start as tasks come in
                tasks = {pool.submit(paint, row, paths): len(paths) for row, paths in chunks}
            for task in as_completed(tasks):
                yield tasks[task], task.result()
    except StorageError:
        raise
    except (BrokenProcessPool, OSError) as error:
        raise InputError(
            "a worker process could not start or was killed, as happens when memory runs out; "
            f"fewer than {num_workers} need less, and with one worker none is started"
        ) from error


@contextmanager
def _workers(canvas: Canvas, num_workers: int) -> Iterator[ProcessPoolExecutor]:
    """Start worker processes; if anything goes wrong, end them whatever they are at."""
    others = multiprocessing.active_children()
    context = multiprocessing.get_context("spawn")
    pool = ProcessPoolExecutor(num_workers, context, begin_work, (canvas,))
    try:
        yield pool
    except BaseException:
        for process in multiprocessing.active_children():
            if process not in others:
                process.terminate()
        raise
    finally:
        pool.shutdown(cancel_futures=True)


_STARTING = threading.Lock()
"""Threads start their workers one after the other: each would take the other's main module."""


@contextmanager
def _bare_start() -> Iterator[None]:
    """Have the processes that start meanwhile begin with nothing but what they are sent.

    A spawned process imports the main module of its parent once more: the whole command line and
    torch, or a script that would start everything anew. It has no use for it. It also inherits
    which signals are blocked: Ctrl-C is for the parent, which ends its workers.
    """
    with _STARTING:
        main = sys.modules["__main__"]
        sys.modules["__main__"] = ModuleType("__main__")
        mask = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
        try:
            yield
        finally:
            sys.modules["__main__"] = main
            signal.pthread_sigmask(signal.SIG_SETMASK, mask)


def _close_gaps(rows: NDArray[np.uint8], kept: Sequence[int]) -> None:
    """Move the kept rows to the front, in place; a row moves to a place that was read before."""
    for first in range(0, len(kept), ROWS_AT_ONCE):
        origin = kept[first : first + ROWS_AT_ONCE]
        if origin[-1] != first + len(origin) - 1:
            rows[first : first + len(origin)] = rows[origin]

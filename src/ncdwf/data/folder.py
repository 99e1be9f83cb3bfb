"""Picture files of one's own: finding them, their labels, and all of them as one tensor."""

import csv
import io
import math
import multiprocessing
import os
import signal
import statistics
import sys
import tempfile
import unicodedata
from collections import Counter
from collections.abc import Generator, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import closing, contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import IO, Any, Protocol, runtime_checkable

import numpy as np
import torch
from jaxtyping import UInt8
from numpy.typing import NDArray
from torch import Tensor

from ncdwf import storage
from ncdwf.data.decoding import (
    Canvas,
    Shape,
    Skipped,
    Unreadable,
    begin_work,
    no_room,
    paint,
    read_header,
)
from ncdwf.errors import InputError, StorageError

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif")
ENDINGS = f"files ending in {', '.join(SUFFIXES)} are accepted"
TABLES = (".csv", ".parquet")
HIDDEN = "__MACOSX"
"""What macOS puts beside the content of an archive, under the names of the pictures."""
ALONE = 256
"""Up to so many pictures are decoded before worker processes would have started."""
CHUNK = 64
"""Pictures that a worker decodes at a time, at most."""
ROWS_AT_ONCE = 1024
TASK = "read"


@runtime_checkable
class Progress(Protocol):
    """Hears how far the pictures have come; whoever hears a training (`learning/loop.py`) fits."""

    def start(self, task: str, num_images: int, done: int, /) -> None:
        """Begin a task of `num_images`, of which `done` were done before."""
        ...

    def advance(self, num_images: int, /) -> None:
        """Count in what has just been decoded."""
        ...

    def stop(self) -> None:
        """End the task."""
        ...


@dataclass(frozen=True, slots=True)
class Listing:
    """Picture files and, if they are labelled, the class of each."""

    paths: tuple[Path, ...]
    labels: tuple[str, ...] | None


@dataclass(frozen=True, slots=True)
class Glance:
    """What the headers of a few pictures say of all."""

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


def find_pictures(paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths`, and the pictures below the folders among them, sorted.

    Hidden files and folders are passed over unless they are named.
    """
    found: list[Path] = []
    for path in paths:
        with _reachable(path):
            if path.is_dir():
                found += _pictures_below(path)
            elif path.suffix.lower() in TABLES and path.exists():
                raise InputError(
                    f"{path} is a table; 'ncdwf learn' takes tables, here give folders or pictures"
                )
            elif path.is_file():
                found.append(path)
            else:
                raise InputError(f"{path} is neither a file nor a folder")
    if not found:
        raise InputError(f"no pictures found; {ENDINGS}")
    return found


def unlabelled(paths: Iterable[Path]) -> Listing:
    """Return the pictures among and below `paths`, without labels; each file once."""
    found: dict[str, Path] = {}
    for path in find_pictures(paths):
        found.setdefault(_place(path), path)
    return Listing(tuple(found.values()), None)


def labelled_folder(folder: Path) -> Listing:
    """Return the pictures below a folder that has one sub-folder a class, named like the class.

    Each file once. Deeper sub-folders belong to the class above them.
    """
    with _reachable(folder):
        found = {name: _pictures_below(path) for name, path in _class_folders(folder).items()}
    if not any(found.values()):
        raise InputError(f"no pictures found below {folder}; {ENDINGS}")
    for name, pictures in found.items():
        if not pictures:
            raise InputError(
                f"the folder of class {name!r} in {folder} has no pictures; {ENDINGS}, "
                "or remove the folder"
            )
    rows: dict[str, tuple[Path, str]] = {}
    for name, pictures in found.items():
        for path in pictures:
            first, other = rows.setdefault(_place(path), (path, name))
            if other != name:
                raise InputError(
                    f"{path} and {first} are one file, of class {name!r} and of class {other!r}; a "
                    "picture has one label"
                )
    return _listing(list(rows.values()), folder)


def labelled_table(
    file: Path, *, path_column: str = "path", label_column: str = "label"
) -> Listing:
    """Return the pictures that a table lists, one a row, with their labels; each file once.

    Args:
        file: CSV (UTF-8, commas, a header) or Parquet, told apart by the ending.
        path_column: where the files are; relative paths start at the folder of the table.
        label_column: their classes; spaces around a name are dropped.
    """
    readers = dict(zip(TABLES, (_read_csv, _read_parquet), strict=True))
    reader = readers.get(file.suffix.lower())
    if reader is None:
        raise InputError(f"{file} ends in neither {' nor '.join(TABLES)}; such tables are accepted")
    cells = reader(file, (path_column, label_column))
    rows: dict[str, tuple[Path, str]] = {}
    for number, (place, text) in enumerate(cells, 1):
        label = _normal(text.strip())
        if not place or not label:
            missing = label_column if place else path_column
            raise InputError(f"row {number} below the header of {file} has no {missing}")
        path = file.parent / place
        _, other = rows.setdefault(_place(path), (path, label))
        if other != label:
            raise InputError(
                f"{file} lists {place} twice, as {other!r} and as {label!r}; a picture has one "
                "label"
            )
    if not rows:
        raise InputError(f"{file} has no rows below its header")
    return _listing(list(rows.values()), file)


def glance(paths: Sequence[Path], limit: int = 256) -> Glance:
    """Return what the headers of up to `limit` pictures say, spread evenly over `paths`."""
    _require(paths)
    headers, skipped = [], []
    for path in paths[:: math.ceil(len(paths) / limit)]:
        try:
            headers.append(read_header(path))
        except Unreadable as error:
            skipped.append(error.skipped)
    if not headers:
        raise _none_readable(skipped)
    sides = [min(header.width, header.height) for header in headers]
    return Glance(int(statistics.median(sides)), any(header.has_colour for header in headers))


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


@contextmanager
def _reachable(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        place = error.filename or path
        raise InputError(f"{place} cannot be searched: {error.strerror or error}") from error


def _place(path: Path) -> str:
    """Return where a file is, whatever way leads there."""
    try:
        return os.path.realpath(path)
    except ValueError:  # no file has such a name: it is named when it cannot be read
        return str(path)


def _pictures_below(folder: Path) -> list[Path]:
    """Return the pictures at any depth, also behind links; every folder is searched once."""

    def refuse(error: OSError) -> None:
        raise error

    found: list[Path] = []
    searched: set[str] = set()
    for place, folders, files in os.walk(folder, onerror=refuse, followlinks=True):
        # A link may lead to where the search has been, or round in a circle.
        is_new = _place(Path(place)) not in searched
        searched.add(_place(Path(place)))
        folders[:] = sorted(name for name in folders if is_new and not _is_hidden(name))
        pictures = (Path(place, name) for name in files if is_new and not _is_hidden(name))
        found += [path for path in pictures if path.suffix.lower() in SUFFIXES and _is_file(path)]
    return sorted(found)


def _is_file(path: Path) -> bool:
    """Tell a file from a socket or a pipe; a link to nothing is one that cannot be read."""
    return path.is_file() or (path.is_symlink() and not path.exists())


def _is_hidden(name: str) -> bool:
    return name.startswith(".") or name == HIDDEN


def _normal(name: str) -> str:
    """Return a name with its accents in one piece; macOS takes them apart."""
    return unicodedata.normalize("NFC", name)


def _class_folders(folder: Path) -> dict[str, Path]:
    if not folder.is_dir():
        raise InputError(f"{folder} is not a folder; one with a sub-folder a class is accepted")
    inside = sorted(path for path in folder.glob("*") if not _is_hidden(path.name))
    folders = [path for path in inside if path.is_dir()]
    if not folders:
        raise InputError(f"{folder} has no sub-folders; one a class is accepted")
    for path in inside:
        if path.suffix.lower() in SUFFIXES and path.is_file():
            raise InputError(f"{path} lies beside the class folders; every picture belongs in one")
    name, count = Counter(_normal(path.name) for path in folders).most_common(1)[0]
    if count > 1:
        raise InputError(f"{folder} has {count} folders of class {name!r}; one is accepted")
    return {_normal(path.name): path for path in folders}


def _listing(rows: Sequence[tuple[Path, str]], source: Path) -> Listing:
    paths, labels = zip(*rows, strict=True)
    if len(set(labels)) < 2:
        raise InputError(f"{source} has one class, {labels[0]!r}; two or more are accepted")
    return Listing(paths, labels)


def _read_csv(file: Path, wanted: Sequence[str]) -> list[tuple[str, ...]]:
    try:
        text = storage.read_bytes(file).decode("utf-8-sig")
        reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
        _check_columns(reader.fieldnames or (), wanted, file)
        rows = list(reader)
    except UnicodeDecodeError as error:
        raise InputError(f"{file} is not UTF-8, at byte {error.start}; save it as UTF-8") from error
    except csv.Error as error:
        raise InputError(f"{file} is not a valid CSV table: {error}") from error
    for number, row in enumerate(rows, 1):
        if None in row:
            raise InputError(
                f"row {number} below the header of {file} has more cells than the header; "
                "a comma inside a name needs quotes around it"
            )
    return [tuple(row[name] or "" for name in wanted) for row in rows]


def _read_parquet(file: Path, wanted: Sequence[str]) -> list[tuple[str, ...]]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise InputError(
            f"{file} needs pyarrow: pip install 'ncdwf[parquet]', or save it as CSV"
        ) from error
    source = pyarrow.BufferReader(storage.read_bytes(file))
    try:
        table = pyarrow.parquet.ParquetFile(source)
        _check_columns(table.schema_arrow.names, wanted, file)
        columns = [table.read([name]).column(0).to_pylist() for name in wanted]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        line = str(error).splitlines()[0]
        raise InputError(f"{file} is not a valid Parquet table: {line}") from error
    return [tuple(_text(cell, file) for cell in row) for row in zip(*columns, strict=True)]


def _text(cell: Any, file: Path) -> str:
    if cell is None:
        return ""
    if not isinstance(cell, str | int):
        raise InputError(f"{file} has a {type(cell).__name__} as path or label; text is accepted")
    return str(cell)


def _check_columns(columns: Sequence[str], wanted: Sequence[str], file: Path) -> None:
    for name in wanted:
        if columns.count(name) != 1:
            there = ", ".join(map(repr, columns)) or "none"
            raise InputError(f"{file} needs one column {name!r}; its columns are: {there}")


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


@contextmanager
def _bare_start() -> Iterator[None]:
    """Have the processes that start meanwhile begin with nothing but what they are sent.

    A spawned process imports the main module of its parent once more: the whole command line and
    torch, or a script that would start everything anew. It has no use for it. It also inherits
    which signals are blocked: Ctrl-C is for the parent, which ends its workers.
    """
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

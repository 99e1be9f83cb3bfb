"""Picture files of one's own, in folders and tables: finding them, and their labels."""

import csv
import io
import os
import unicodedata
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ncdwf import storage
from ncdwf.errors import InputError, first_line

SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif")
ENDINGS = f"files ending in {', '.join(SUFFIXES)} are accepted"
TABLES = (".csv", ".parquet")
HIDDEN = "__MACOSX"
"""What macOS puts beside the content of an archive, under the names of the pictures."""


@dataclass(frozen=True, slots=True)
class Listing:
    """Picture files and, if they are labelled, the class of each."""

    paths: tuple[Path, ...]
    labels: tuple[str, ...] | None


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
        # Without threads of its own: where a table is refused, they outlive it and abort the end.
        table = pyarrow.parquet.ParquetFile(source, pre_buffer=False)
        _check_columns(table.schema_arrow.names, wanted, file)
        columns = [table.read([name], use_threads=False).column(0).to_pylist() for name in wanted]
    except (pyarrow.ArrowException, OSError, UnicodeDecodeError) as error:
        raise InputError(f"{file} is not a valid Parquet table: {first_line(error)}") from error
    return [tuple(_text(cell, file) for cell in row) for row in zip(*columns, strict=True)]


def _text(cell: Any, file: Path) -> str:
    if cell is None:
        return ""
    if not isinstance(cell, str | int) or isinstance(cell, bool):
        raise InputError(f"{file} has a {type(cell).__name__} as path or label; text is accepted")
    return str(cell)


def _check_columns(columns: Sequence[str], wanted: Sequence[str], file: Path) -> None:
    for name in wanted:
        if columns.count(name) != 1:
            there = ", ".join(map(repr, columns)) or "none"
            raise InputError(f"{file} needs one column {name!r}; its columns are: {there}")

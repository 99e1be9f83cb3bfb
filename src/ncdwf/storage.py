"""All reading and writing of files: atomic, checked, and never able to run code.

A file is written beside its final place, flushed to the disk, read back and compared, then renamed:
a crash leaves the old file or the new one, never half of either. A committed directory is written
whole under a temporary name, its manifest (sha256 and size of every file) last, then renamed.
Reading takes the bytes once, checks them and parses those very bytes; tensors are safetensors,
everything else is JSON.
"""

import contextlib
import errno
import fcntl
import hashlib
import io
import json
import math
import os
import shutil
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

import numpy as np
import safetensors.torch
import torch
from numpy.typing import NDArray
from safetensors import SafetensorError
from torch import Tensor

from ncdwf.errors import InputError, InUseError, StorageError, first_line, shown

MANIFEST = "manifest.json"
LOCK_FILE = ".lock"
MAX_JSON_BYTES = 64 * 2**20


def sha256(data: bytes) -> str:
    """Return the sha256 of `data` in hexadecimal."""
    return hashlib.sha256(data).hexdigest()


def exists(path: Path) -> bool:
    """Tell whether there is something at `path`; at one that is too long is nothing."""
    try:
        return path.exists()
    except OSError:
        return False


def make_directory(path: Path) -> Path:
    """Create `path` and its parents if need be, and return it."""
    with _explained(path):
        path.mkdir(parents=True, exist_ok=True)
    return path


def write_bytes(path: Path, data: bytes) -> None:
    """Write `data` to `path` so that a crash at any moment leaves the old or the new content."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with _explained(path, len(data)):
            with temporary.open("wb") as file:
                file.write(data)
                file.flush()
                os.fsync(file.fileno())
            if sha256(temporary.read_bytes()) != sha256(data):
                raise StorageError(f"{path} could not be read back as it was written")
            temporary.replace(path)
            _sync_directory(path.parent)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as indented JSON; NaN and infinity are refused."""
    write_bytes(path, to_json_bytes(value))


def to_json_bytes(value: Any) -> bytes:
    """Return `value` as indented JSON in UTF-8; what is no text in any encoding is refused."""
    text = json.dumps(value, indent=2, allow_nan=False, ensure_ascii=False) + "\n"
    try:
        return text.encode()
    except UnicodeEncodeError as error:
        part = text[error.start : error.end]
        raise InputError(f"{part!a} is not valid text; choose a name without it") from error


def write_arrays(path: Path, arrays: Mapping[str, NDArray[Any]]) -> None:
    """Write named arrays as `.npz`; only plain numbers and strings, nothing pickled."""
    buffer = io.BytesIO()
    np.savez_compressed(buffer, allow_pickle=False, **arrays)
    write_bytes(path, buffer.getvalue())


def read_bytes(path: Path, *, expected: str | None = None, limit: int = sys.maxsize) -> bytes:
    """Return the content of a plain file; refuse it if its sha256 is not `expected`.

    A file of more than `limit` bytes is refused before it is read.
    """
    try:
        if not path.is_file():
            raise InputError(f"{path} is not a file" if path.exists() else f"{path} is missing")
        num_bytes = path.stat().st_size
        if num_bytes > limit:
            raise InputError(f"{path} has {num_bytes} bytes, too many for a description")
        data = path.read_bytes()
    except MemoryError as error:
        raise InputError(f"{path} has {num_bytes} bytes, more than memory has room for") from error
    except OSError as error:
        raise StorageError(f"cannot read {path}: {error.strerror or error}") from error
    if expected is not None and sha256(data) != expected:
        raise InputError(f"{path} is damaged or was changed: its sha256 is not the recorded one")
    return data


def read_json(path: Path, *, expected: str | None = None) -> Any:
    """Return the JSON value in `path`; refuse duplicate keys, NaN and anything over 64 MiB."""
    return parse_json(read_bytes(path, expected=expected, limit=MAX_JSON_BYTES), path)


def parse_json(data: bytes, path: Path) -> Any:
    """Return the JSON value in `data`, which was read from `path`."""
    try:
        return json.loads(
            data,
            object_pairs_hook=_no_duplicates,
            parse_constant=_no_constant,
            parse_float=_finite,
        )
    except (ValueError, RecursionError) as error:
        raise InputError(f"{path} is not valid JSON: {first_line(error)}") from error


def to_tensor_bytes(tensors: Mapping[str, Tensor]) -> bytes:
    """Return named tensors in the safetensors format."""
    plain = {name: t.detach().cpu().contiguous().clone() for name, t in tensors.items()}
    return safetensors.torch.save(plain)


def parse_tensors(data: bytes, path: Path) -> dict[str, Tensor]:
    """Return the named tensors in `data`, which was read from `path`."""
    try:
        return safetensors.torch.load(data)
    except (SafetensorError, ValueError, KeyError, TypeError, RuntimeError) as error:
        raise InputError(f"{path} is not a safetensors file: {first_line(error)}") from error


def check_tensors(tensors: Mapping[str, Tensor], wanted: Mapping[str, Tensor], path: Path) -> None:
    """Refuse other tensors than `wanted`, by name, shape and type, and values that are no numbers.

    `wanted` needs no storage: what would not fit is refused before there is any.
    """
    for name in sorted(wanted.keys() ^ tensors.keys()):
        found = "lacks" if name in wanted else "holds something else,"
        raise InputError(f"{path} does not fit: it {found} {shown(name)}")
    for name, tensor in tensors.items():
        like = wanted[name]
        if tensor.shape != like.shape:
            shapes = f"{tuple(tensor.shape)} in {name}, not {tuple(like.shape)}"
            raise InputError(f"{path} does not fit: it holds {shapes}")
        if tensor.dtype != like.dtype:
            raise InputError(f"{path} holds {tensor.dtype} in {name}, not {like.dtype}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{path} holds NaN or infinite values in {name}")


def commit_directory(directory: Path, files: Mapping[str, bytes]) -> None:
    """Create `directory` with `files` in one step; it is never changed afterwards."""
    temporary = directory.with_name(f".{directory.name}.{os.getpid()}.tmp")
    make_directory(directory.parent)
    try:
        with _explained(directory, sum(map(len, files.values()))):
            shutil.rmtree(temporary, ignore_errors=True)
            temporary.mkdir()
        for name, data in files.items():
            write_bytes(temporary / name, data)
        sums = {n: {"sha256": sha256(d), "bytes": len(d)} for n, d in files.items()}
        write_json(temporary / MANIFEST, {"format": 1, "files": sums})
        with _explained(directory):
            temporary.rename(directory)
            _sync_directory(directory.parent)
    finally:
        shutil.rmtree(temporary, ignore_errors=True)


def read_directory(directory: Path) -> dict[str, bytes]:
    """Return the files of a committed directory; refuse it if one is missing or was changed."""
    manifest = read_json(directory / MANIFEST)
    try:
        sums = {n: (e["sha256"], e["bytes"]) for n, e in manifest["files"].items()}
        valid = manifest["format"] == 1 and all(Path(name).name == name for name in sums)
    except (KeyError, TypeError, AttributeError):
        valid = False
    if not valid:
        raise InputError(f"{directory / MANIFEST} is not a manifest of this version")
    files = {name: read_bytes(directory / name, expected=sums[name][0]) for name in sums}
    for name, data in files.items():
        if len(data) != sums[name][1]:
            raise InputError(f"{directory / MANIFEST} is damaged: the size of {name} is another")
    return files


def remove_directory(directory: Path) -> None:
    """Remove a directory and what is in it, if it is there."""
    with _explained(directory):
        if directory.exists():
            shutil.rmtree(directory)


def remove_file(path: Path) -> None:
    """Remove a file, if it is there."""
    with _explained(path):
        path.unlink(missing_ok=True)


@contextlib.contextmanager
def locked(directory: Path, *, wait: bool = False) -> Iterator[None]:
    """Hold `directory` for this process; a second process gets one clear line, or waits.

    The lock belongs to the open file, so it is gone when the process is, however it ended. A
    directory that was not there is gone again if an error leaves it empty: it may be a slip of the
    finger.
    """
    missing = [place for place in (directory, *directory.parents) if not exists(place)]
    with _lock_file(directory, wait=wait):
        try:
            yield
        except BaseException:
            path = directory / LOCK_FILE
            if missing and list(directory.iterdir()) == [path]:
                remove_file(path)
                with contextlib.suppress(OSError):  # somebody else has put something there
                    for place in missing:
                        place.rmdir()
            raise


def _lock_file(directory: Path, *, wait: bool) -> TextIO:
    """Return the open lock file of `directory`, held until it is closed."""
    path = make_directory(directory) / LOCK_FILE
    with _explained(path):
        if path.is_symlink() or (path.exists() and not path.is_file()):
            raise InputError(f"{path} is no plain file, as a lock is; delete it")
        file = path.open("a")
    try:
        fcntl.flock(file, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        file.close()
        raise InUseError(f"{directory} is in use by another process") from error
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(os.fstat(file.fileno()), path.stat()):
            return file
    file.close()  # it was removed after an error, and a third process would not see it
    return _lock_file(directory, wait=wait)


@contextlib.contextmanager
def _explained(path: Path, num_bytes: int = 0) -> Iterator[None]:
    """Turn the system's errors into one line that names the file and what to do."""
    try:
        yield
    except StorageError:
        raise
    except OSError as error:
        reason = error.strerror or str(error)
        if error.errno in (errno.ENOSPC, errno.EDQUOT):
            reason = f"the disk is full; {num_bytes} bytes are needed, {_free_bytes(path)} are free"
        raise StorageError(f"cannot write {path}: {reason}") from error


def _free_bytes(path: Path) -> int:
    parent = next(p for p in (path, *path.parents) if p.exists())
    return shutil.disk_usage(parent).free


def _sync_directory(directory: Path) -> None:
    descriptor = os.open(directory, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        raise ValueError("a key stands twice")
    return result


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not allowed")


def _finite(text: str) -> float:
    if not math.isfinite(float(text)):
        raise ValueError(f"{text} is too large")
    return float(text)

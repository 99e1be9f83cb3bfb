"""Archives from the net: whole and checked in memory first, then on the disk in one step.

They have less than 200 MB, so nothing is written before all of it has come and its size and md5 are
the published ones: a cut connection, a full disk or a crash leaves no part that passes for the
whole.
"""

import gzip
import hashlib
import http.client
import io
import os
import tarfile
import urllib.error
import urllib.request
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from ncdwf import storage
from ncdwf.errors import InputError, first_line
from ncdwf.progress import Progress, Quiet

OFFLINE_VARIABLE = "NCDWF_OFFLINE"
TIMEOUT_SECONDS = 30.0
"""How long a server may be silent."""
CHUNK_BYTES = 2**16
MAX_UNPACKED_BYTES = 2**28


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A `.tar.gz` in the net: where it lies and what it must be."""

    url: str
    md5: str
    num_bytes: int


def is_allowed() -> bool:
    """Return whether anything may be downloaded; `NCDWF_OFFLINE=1` forbids it."""
    return os.environ.get(OFFLINE_VARIABLE, "") in ("", "0")


def download(
    source: Source, folder: Path, names: Iterable[str], progress: Progress | None = None
) -> None:
    """Create `folder` with the files that the archive keeps under its name, unless it is there.

    Args:
        source: the archive.
        folder: appears whole or not at all; its parent is created if need be.
        names: the files to take; whatever else the archive holds stays in it.
        progress: hears of every chunk.
    """
    # The lock is a file, so a place that cannot be written is found before anything is sent.
    with storage.locked(folder.parent, wait=True):
        if not folder.is_dir():  # it is there if another process has just let go of the lock
            files = unpack(fetch(source, progress), folder.name, names)
            storage.commit_directory(folder, files)


def fetch(source: Source, progress: Progress | None = None) -> bytes:
    """Return the archive once its size and its md5 are right; any failure is one line."""
    try:
        with urllib.request.urlopen(source.url, timeout=TIMEOUT_SECONDS) as response:
            data = _receive(response, source.num_bytes, progress or Quiet())
        _check(data, source)
    except urllib.error.HTTPError as error:
        with error:  # it holds the connection
            raise InputError(f"the download failed: {first_line(error)}") from error
    except (OSError, http.client.HTTPException, ValueError) as error:
        raise InputError(f"the download failed: {_reason(error)}") from error
    return data


def unpack(data: bytes, folder: str, names: Iterable[str]) -> dict[str, bytes]:
    """Return the files `folder/name` of a `.tar.gz`. They must be plain; no other is looked at."""
    try:
        with gzip.open(io.BytesIO(data)) as file:
            content = file.read(MAX_UNPACKED_BYTES + 1)
        if len(content) > MAX_UNPACKED_BYTES:
            raise ValueError(f"it has more than {MAX_UNPACKED_BYTES:,} bytes")
        with tarfile.open(fileobj=io.BytesIO(content), mode="r:") as archive:
            return {name: _read_plain(archive, f"{folder}/{name}") for name in names}
    except Exception as error:  # a hostile archive can make the parsers raise anything
        raise InputError(f"the archive cannot be unpacked: {first_line(error)}") from error


def _receive(response: http.client.HTTPResponse, num_bytes: int, progress: Progress) -> bytes:
    """Return what the server sends; stop listening once it is more than `num_bytes`."""
    buffer = io.BytesIO()
    progress.start("download", num_bytes, 0)
    while buffer.tell() <= num_bytes and (chunk := response.read(CHUNK_BYTES)):
        buffer.write(chunk)
        progress.advance(len(chunk))
    progress.stop()
    return buffer.getvalue()


def _check(data: bytes, source: Source) -> None:
    if len(data) != source.num_bytes:
        raise ValueError(f"{len(data):,} bytes came, {source.num_bytes:,} are expected")
    if hashlib.md5(data, usedforsecurity=False).hexdigest() != source.md5:
        raise ValueError("what came has another md5 than the one published")


def _read_plain(archive: tarfile.TarFile, name: str) -> bytes:
    member = archive.getmember(name)
    # Links would lead elsewhere; a sparse file can claim any size without holding it.
    file = archive.extractfile(member) if member.isreg() and not member.issparse() else None
    if file is None:
        raise ValueError(f"{name} is not a plain file")
    return file.read()


def _reason(error: Exception) -> str:
    """Return the system's words for a failure; urllib wraps them once more."""
    cause = getattr(error, "reason", error)
    return getattr(cause, "strerror", None) or first_line(cause)

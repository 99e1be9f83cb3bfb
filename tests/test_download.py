"""A download ends with the whole folder, or with one line and nothing on the disk."""

import contextlib
import errno
import gzip
import hashlib
import io
import os
import signal
import socket
import subprocess
import sys
import tarfile
import threading
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from http.client import IncompleteRead
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from random import Random
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_cifar import write

from ncdwf import storage
from ncdwf.data import download
from ncdwf.data.cifar import CIFAR10, CIFAR100, Archive
from ncdwf.data.download import OFFLINE_VARIABLE, Source, fetch, unpack
from ncdwf.errors import InputError, NcdwfError, StorageError
from ncdwf.progress import Progress

# More than one chunk of what gzip cannot shrink.
FILES = {"train": Random(0).randbytes(3 * download.CHUNK_BYTES), "test": b"pictures"}


def packed(*members: tuple[tarfile.TarInfo, bytes]) -> bytes:
    """Return a tar of `members` in which every header stands as it is given, true or not."""
    blocks = b""
    for header, content in members:
        blocks += header.tobuf(tarfile.PAX_FORMAT) + content + bytes(-len(content) % 512)
    return blocks + bytes(1024)


def plain(name: str, content: bytes = b"x") -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    header.size = len(content)
    return header, content


def special(name: str, kind: bytes, target: str = "") -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    header.type, header.linkname = kind, target
    return header, b""


def claiming(name: str, size: int) -> tuple[tarfile.TarInfo, bytes]:
    header = tarfile.TarInfo(name)
    header.size = size
    return header, b"x"


def good() -> bytes:
    return packed(*(plain(f"data/{name}", content) for name, content in FILES.items()))


class Server(ThreadingHTTPServer):
    """Gives the same answer to everybody, on this machine alone."""

    body = b""
    status = 200
    promised: int | None = None
    stalls = False

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), Handler)
        self.requests: list[str] = []
        self.over = threading.Event()

    def source(self, body: bytes, **changes: Any) -> Source:
        """Serve `body`; return what describes it rightly but for `changes`."""
        self.body = body
        url = f"http://127.0.0.1:{self.server_port}/data.tar.gz"
        right = Source(url=url, md5=hashlib.md5(body).hexdigest(), num_bytes=len(body))
        return replace(right, **changes)


class Handler(BaseHTTPRequestHandler):
    server: Server

    def do_GET(self) -> None:
        server = self.server
        server.requests.append(self.path)
        self.send_response(server.status)
        promised = len(server.body) if server.promised is None else server.promised
        self.send_header("Content-Length", str(promised))
        self.end_headers()
        self.wfile.write(server.body)
        if server.stalls:
            server.over.wait(1)

    def log_message(self, format: str, *args: Any) -> None:
        pass


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Iterator[Server]:
    monkeypatch.delenv(OFFLINE_VARIABLE, raising=False)
    monkeypatch.setenv("no_proxy", "*")
    with Server() as server:
        threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True).start()
        yield server
        server.over.set()
        server.shutdown()


class Ear:
    """Writes down what it hears."""

    def __init__(self) -> None:
        self.heard: list[tuple[Any, ...]] = []

    def start(self, task: str, num_images: int, done: int) -> None:
        self.heard.append(("start", task, num_images, done))

    def advance(self, num_images: int) -> None:
        self.heard.append(("advance", num_images))

    def stop(self) -> None:
        self.heard.append(("stop",))


def get(source: Source, directory: Path, progress: Progress | None = None) -> Path:
    download.download(source, directory / "data", FILES, progress)
    return directory / "data"


def refused(source: Source, directory: Path, kind: type[NcdwfError] = InputError) -> str:
    """Assert that there is one line and nothing that looks like data; return the line."""
    with pytest.raises(kind) as caught:
        get(source, directory)
    assert "\n" not in str(caught.value)
    assert {path.name for path in directory.iterdir()} <= {".lock"}
    return str(caught.value)


def test_a_good_archive_becomes_its_folder(server: Server, tmp_path: Path) -> None:
    folder = get(server.source(gzip.compress(good())), tmp_path / "new" / "place")
    assert {name: (folder / name).read_bytes() for name in FILES} == FILES
    assert {path.name for path in folder.parent.iterdir()} == {"data", ".lock"}
    assert server.requests == ["/data.tar.gz"]


def test_what_is_there_is_not_downloaded_again(server: Server, tmp_path: Path) -> None:
    source = server.source(gzip.compress(good()))
    for _ in range(2):
        get(source, tmp_path)
    assert len(server.requests) == 1


def test_progress_hears_every_byte(server: Server, tmp_path: Path) -> None:
    source = server.source(gzip.compress(good()))
    ear = Ear()
    get(source, tmp_path, ear)
    assert ear.heard[0] == ("start", "download", source.num_bytes, 0)
    assert ear.heard[-1] == ("stop",)
    steps = [count for kind, count in ear.heard[1:-1] if kind == "advance"]
    assert len(steps) > 3
    assert sum(steps) == source.num_bytes


def test_another_md5_is_refused(server: Server, tmp_path: Path) -> None:
    source = server.source(gzip.compress(good()), md5="0" * 32)
    line = "the download failed: what came has another md5 than the one published"
    assert refused(source, tmp_path) == line


def test_a_cut_transfer_is_refused(server: Server, tmp_path: Path) -> None:
    body = gzip.compress(good())
    source = server.source(body)
    server.promised, server.body = len(body), body[:1000]
    line = f"the download failed: 1,000 bytes came, {len(body):,} are expected"
    assert refused(source, tmp_path) == line


@pytest.mark.parametrize("body", [b"", b"<html>Please log in</html>"])
def test_something_shorter_is_refused(server: Server, tmp_path: Path, body: bytes) -> None:
    source = server.source(body, num_bytes=100)
    line = f"the download failed: {len(body)} bytes came, 100 are expected"
    assert refused(source, tmp_path) == line


def test_a_server_that_sends_on_and_on_is_not_listened_to(server: Server, tmp_path: Path) -> None:
    source = server.source(bytes(20 * download.CHUNK_BYTES), num_bytes=100)
    line = f"the download failed: {download.CHUNK_BYTES:,} bytes came, 100 are expected"
    assert refused(source, tmp_path) == line


@pytest.mark.parametrize(("status", "text"), [(404, "Not Found"), (503, "Service Unavailable")])
def test_an_error_of_the_server_is_named(
    server: Server, tmp_path: Path, status: int, text: str
) -> None:
    source = server.source(b"no")
    server.status = status
    assert refused(source, tmp_path) == f"the download failed: HTTP Error {status}: {text}"


def test_a_silent_server_is_given_up(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(download, "TIMEOUT_SECONDS", 0.1)
    source = server.source(b"begun", num_bytes=100)
    server.promised, server.stalls = 100, True
    assert refused(source, tmp_path) == "the download failed: timed out"


def test_a_closed_port_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("no_proxy", "*")
    with socket.socket() as taken:  # bound, but nobody listens
        taken.bind(("127.0.0.1", 0))
        url = f"http://127.0.0.1:{taken.getsockname()[1]}/data.tar.gz"
        source = Source(url=url, md5="", num_bytes=1)
        assert refused(source, tmp_path) == "the download failed: Connection refused"


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (
            urllib.error.URLError(socket.gaierror(-2, "Name or service not known")),
            "Name or service",
        ),
        (urllib.error.URLError("no host given"), "no host given"),
        (ConnectionResetError(errno.ECONNRESET, "Connection reset by peer"), "Connection reset"),
        (IncompleteRead(b"ab", 3), "IncompleteRead"),
        (TimeoutError(), "TimeoutError"),
        (ValueError("two\nlines"), "two"),
    ],
)
def test_any_failure_of_the_net_is_one_line(
    error: Exception, reason: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(urllib.request, "urlopen", failing(error))
    line = refused(Source(url="http://nowhere.invalid/", md5="", num_bytes=1), tmp_path)
    assert line.startswith(f"the download failed: {reason}")


def failing(error: BaseException) -> Callable[..., Any]:
    def fail(*_: Any, **__: Any) -> Any:
        raise error

    return fail


def test_a_place_that_cannot_be_written_is_named_before_anything_is_sent(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = server.source(gzip.compress(good()))
    # The tests may run as root, who may write anywhere.
    monkeypatch.setattr(Path, "open", failing(OSError(errno.EROFS, "Read-only file system")))
    line = f"cannot write {tmp_path / '.lock'}: Read-only file system"
    assert refused(source, tmp_path, StorageError) == line
    monkeypatch.undo()
    (tmp_path / "file").touch()
    with pytest.raises(StorageError, match=r"cannot write .*file: File exists"):
        get(source, tmp_path / "file")
    assert not server.requests


def test_a_full_disk_leaves_nothing(
    server: Server, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = server.source(gzip.compress(good()))
    monkeypatch.setattr(os, "fsync", failing(OSError(errno.ENOSPC, "No space left on device")))
    assert "the disk is full; " in refused(source, tmp_path, StorageError)


def test_a_second_process_waits_for_the_download_of_the_first(
    server: Server, tmp_path: Path
) -> None:
    source = server.source(gzip.compress(good()))
    with ThreadPoolExecutor(1) as other:
        with storage.locked(tmp_path):
            waiting = other.submit(get, source, tmp_path)
            with pytest.raises(TimeoutError):
                waiting.result(timeout=0.3)
            assert not server.requests
        waiting.result(timeout=30)
        get(source, tmp_path)
    assert len(server.requests) == 1


@pytest.mark.parametrize("error", [KeyboardInterrupt(), RuntimeError()])
def test_an_interruption_leaves_nothing(
    server: Server, tmp_path: Path, error: BaseException
) -> None:
    ear = Ear()
    ear.advance = failing(error)  # type: ignore[method-assign]
    with pytest.raises(type(error)):
        get(server.source(gzip.compress(good())), tmp_path, ear)
    assert [path.name for path in tmp_path.iterdir()] == [".lock"]


KILLED = """
import os, signal, sys
from pathlib import Path
from ncdwf.data.download import Source, download
from ncdwf.progress import Quiet

def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
class Deadly(Quiet):
    advance = die
url, md5, num_bytes, first, second = sys.argv[1:]
source = Source(url=url, md5=md5, num_bytes=int(num_bytes))
if os.fork() == 0:
    download(source, Path(first), ["train"], Deadly())
os.wait()
Path.rename = die
download(source, Path(second), ["train"])
"""


def test_a_killed_process_leaves_no_folder_and_no_lock(server: Server, tmp_path: Path) -> None:
    source = server.source(gzip.compress(good()))
    first, second = tmp_path / "1" / "data", tmp_path / "2" / "data"
    command = [sys.executable, "-c", KILLED, source.url, source.md5, str(source.num_bytes)]
    result = subprocess.run([*command, str(first), str(second)], check=False)
    assert result.returncode == -signal.SIGKILL
    assert [path.name for path in first.parent.iterdir()] == [".lock"]
    # The other one came as far as the rename.
    assert len(list(second.parent.glob(".data.*.tmp/train"))) == 1
    assert not second.exists()
    for folder in (first, second):
        get(source, folder.parent)
        assert {path.name for path in folder.iterdir()} == {*FILES, storage.MANIFEST}


EXTRAS = {
    "parent": plain("../evil"),
    "parent inside": plain("data/../../evil"),
    "absolute": plain("/tmp/evil"),
    "another file": plain("data/evil"),
    "the file elsewhere": plain("train"),
    "symbolic link": special("data/evil", tarfile.SYMTYPE, "/etc/passwd"),
    "folder that is a link": special("data", tarfile.SYMTYPE, "/tmp"),
    "hard link": special("data/evil", tarfile.LNKTYPE, "../evil"),
    "device": special("data/evil", tarfile.CHRTYPE),
    "pipe": special("data/evil", tarfile.FIFOTYPE),
}


@pytest.mark.parametrize("extra", EXTRAS.values(), ids=EXTRAS)
@pytest.mark.parametrize("is_first", [True, False], ids=["first", "last"])
def test_other_members_stay_in_the_archive(
    extra: tuple[tarfile.TarInfo, bytes], is_first: bool, server: Server, tmp_path: Path
) -> None:
    members = [plain(f"data/{name}", content) for name, content in FILES.items()]
    members.insert(0 if is_first else 2, extra)
    folder = get(server.source(gzip.compress(packed(*members))), tmp_path / "inner")
    assert {path.name for path in folder.iterdir()} == {*FILES, storage.MANIFEST}
    assert all((folder / name).read_bytes() == content for name, content in FILES.items())
    assert [path.name for path in tmp_path.iterdir()] == ["inner"]


def sparse() -> bytes:
    """Return a tar whose `data/train` says that it is a terabyte of zeros."""
    tags = {"GNU.sparse.major": "0", "GNU.sparse.map": "0,0", "GNU.sparse.size": str(2**40)}
    buffer = io.BytesIO()
    with tarfile.open(fileobj=buffer, mode="w", format=tarfile.PAX_FORMAT) as archive:
        header = tarfile.TarInfo("data/train")
        header.pax_headers = tags
        archive.addfile(header)
    return buffer.getvalue()


TEST = plain("data/test")
PLAIN = "data/train is not a plain file"
HOSTILE = {
    "nothing": (packed(), "not found"),
    "no tar": (b"garbage" * 200, "invalid header"),
    "missing": (packed(TEST), "'data/train' not found"),
    "link": (packed(plain("t"), special("data/train", tarfile.SYMTYPE, "../t"), TEST), PLAIN),
    "outside": (packed(special("data/train", tarfile.SYMTYPE, "/etc/passwd"), TEST), PLAIN),
    "hard link": (packed(plain("t"), special("data/train", tarfile.LNKTYPE, "t"), TEST), PLAIN),
    "folder": (packed(special("data/train", tarfile.DIRTYPE), TEST), PLAIN),
    "device": (packed(special("data/train", tarfile.CHRTYPE), TEST), PLAIN),
    "pipe": (packed(special("data/train", tarfile.FIFOTYPE), TEST), PLAIN),
    "huge": (packed(TEST, claiming("data/train", 2**33)), "unexpected end of data"),
    "beyond measure": (packed(TEST, claiming("data/train", 2**80)), "too large"),
    "huge before": (packed(claiming("data/evil", 2**40), TEST), "unexpected end of data"),
    "a terabyte of zeros": (sparse(), PLAIN),
    "cut": (good()[: 2 * download.CHUNK_BYTES], "unexpected end of data"),
}


@pytest.mark.parametrize(("content", "reason"), HOSTILE.values(), ids=HOSTILE)
def test_a_hostile_archive_is_refused(
    content: bytes, reason: str, server: Server, tmp_path: Path
) -> None:
    line = refused(server.source(gzip.compress(content)), tmp_path)
    assert line.startswith("the archive cannot be unpacked: ")
    assert reason in line


def test_the_terabyte_of_zeros_is_one() -> None:
    with tarfile.open(fileobj=io.BytesIO(sparse())) as archive:
        assert archive.getmember("data/train").issparse()
        assert archive.getmember("data/train").size == 2**40


@pytest.mark.parametrize(
    "content",
    [b"", b"garbage", good(), gzip.compress(good())[:-9]],
    ids=["empty", "garbage", "bare tar", "cut"],
)
def test_what_is_not_gzip_is_refused(content: bytes) -> None:
    with pytest.raises(InputError, match="the archive cannot be unpacked: ") as caught:
        unpack(content, "data", FILES)
    assert "\n" not in str(caught.value)


def test_an_archive_that_swells_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    content = good()
    monkeypatch.setattr(download, "MAX_UNPACKED_BYTES", len(content))
    assert unpack(gzip.compress(content), "data", FILES) == FILES
    with pytest.raises(InputError, match="it has more than "):
        unpack(gzip.compress(content + b"\0"), "data", FILES)


@settings(max_examples=200, deadline=None)
@given(st.integers(0, 512 * 2 - 1), st.integers(0, 255))
def test_a_damaged_header_is_refused_or_harmless(position: int, value: int) -> None:
    damaged = bytearray(packed(plain("data/train", b"a" * 512), plain("data/test")))
    damaged[position] = value
    with contextlib.suppress(InputError):
        assert unpack(gzip.compress(damaged, 1), "data", ["train", "test"])["test"] == b"x"


def fake(archive: Archive, directory: Path, server: Server) -> Archive:
    """Serve a small archive in the official layout, with the other files that those have."""
    archive = write(archive, directory)
    folder = directory / archive.folder
    files = [*archive.train, *archive.test]
    members = [plain(f"{archive.folder}/{name}", (folder / name).read_bytes()) for name in files]
    extra = [special(archive.folder, tarfile.DIRTYPE), plain(f"{archive.folder}/file.txt~")]
    return replace(archive, source=server.source(gzip.compress(packed(*extra, *members))))


@pytest.mark.parametrize("archive", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def test_cifar_is_downloaded_once_and_read(
    archive: Archive, server: Server, tmp_path: Path
) -> None:
    archive = fake(archive, tmp_path, server)
    wanted = archive.read(tmp_path)
    assert not server.requests
    for _ in range(2):
        tensors = archive.read(tmp_path / "new")
        assert all(torch.equal(one, other) for one, other in zip(tensors, wanted, strict=True))
    assert len(server.requests) == 1
    ear = Ear()
    archive.fetch(tmp_path / "newer", ear)
    assert ear.heard[0] == ("start", "download", archive.source.num_bytes, 0)


def test_a_wrong_place_leaves_no_folder(server: Server, tmp_path: Path) -> None:
    server.status = 404
    with pytest.raises(InputError):
        get(server.source(b""), tmp_path / "slip" / "of")
    assert list(tmp_path.iterdir()) == []


def test_cifar_that_cannot_be_had_says_what_to_do(server: Server, tmp_path: Path) -> None:
    archive = replace(CIFAR10, source=server.source(b""))
    server.status = 404
    with pytest.raises(InputError) as caught:
        archive.read(tmp_path)
    assert str(caught.value) == (
        f"{tmp_path} holds no cifar-10-batches-py; unpack {archive.source.url} there "
        "(the download failed: HTTP Error 404: Not Found)"
    )
    (tmp_path / "file").touch()
    with pytest.raises(
        StorageError, match=r"; unpack .* there \(cannot write .*file: File exists\)"
    ):
        archive.read(tmp_path / "file")


@pytest.mark.parametrize(("value", "allowed"), [("", True), ("0", True), ("1", False)])
def test_downloads_can_be_forbidden(
    value: str, allowed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OFFLINE_VARIABLE, value)
    assert download.is_allowed() == allowed


def test_fetch_gives_the_very_bytes(server: Server) -> None:
    assert fetch(server.source(b"any bytes")) == b"any bytes"

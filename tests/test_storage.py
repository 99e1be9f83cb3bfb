import errno
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import threading
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from ncdwf import storage
from ncdwf.errors import InputError, StorageError

FILES = {"state.safetensors": bytes(range(40)), "position.json": b'{"step": 3}', "empty": b""}

values = st.recursive(
    st.none()
    | st.booleans()
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    # What UTF-8 cannot hold is no text of ours.
    | st.text(st.characters(exclude_categories=["Cs"])),
    lambda inner: st.lists(inner) | st.dictionaries(st.text("abc", max_size=3), inner),
    max_leaves=10,
)


def failing(code):
    def fail(*_, **__):
        raise OSError(code, os.strerror(code))

    return fail


@settings(max_examples=50, deadline=None)
@given(values)
def test_json_comes_back_as_it_was_written(value):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "value.json"
        storage.write_json(path, value)
        assert storage.read_json(path) == value


@settings(max_examples=50, deadline=None)
@given(st.binary(max_size=200), st.binary(max_size=200))
def test_bytes_come_back_as_they_were_written(old, new):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "file"
        for data in (old, new):
            storage.write_bytes(path, data)
            assert storage.read_bytes(path, expected=storage.sha256(data)) == data
        assert list(Path(directory).iterdir()) == [path]


@settings(max_examples=30, deadline=None)
@given(
    st.dictionaries(
        st.text("abc.", min_size=1, max_size=5),
        hnp.arrays(
            st.sampled_from([np.float32, np.float64, np.int64, np.uint8, np.bool_]),
            hnp.array_shapes(min_dims=0, min_side=0, max_side=4),
        ),
        max_size=4,
    )
)
def test_tensors_come_back_bit_by_bit(arrays):
    tensors = {name: torch.from_numpy(np.asarray(array)) for name, array in arrays.items()}
    back = storage.parse_tensors(storage.to_tensor_bytes(tensors), Path("weights"))
    assert set(back) == set(tensors)
    for name, tensor in tensors.items():
        assert back[name].dtype == tensor.dtype
        assert back[name].shape == tensor.shape
        assert back[name].numpy().tobytes() == tensor.numpy().tobytes()  # NaN included


def test_tensors_that_share_memory_or_are_transposed_are_stored_whole():
    whole = torch.arange(6.0).reshape(2, 3)
    data = storage.to_tensor_bytes({"whole": whole, "turned": whole.T, "row": whole[1]})
    back = storage.parse_tensors(data, Path("weights"))
    assert back["turned"].tolist() == [[0, 3], [1, 4], [2, 5]]
    assert back["row"].tolist() == [3, 4, 5]


def test_arrays_come_back_and_objects_are_refused(tmp_path):
    path = tmp_path / "arrays.npz"
    storage.write_arrays(path, {"a": np.arange(3), "names": np.array(["x", "yz"])})
    with np.load(path) as back:
        assert back["a"].tolist() == [0, 1, 2]
        assert back["names"].tolist() == ["x", "yz"]
    with pytest.raises(ValueError, match="allow_pickle"):
        storage.write_arrays(path, {"a": np.array([{}], dtype=object)})


def test_a_known_sha256():
    # The published test vector for "abc" (FIPS 180-2).
    expected = "ba7816bf8f01cfea414140de5dae2223b00361a396177a9cb410ff61f20015ad"
    assert storage.sha256(b"abc") == expected


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (b'{"a": 1, "a": 2}', "a key stands twice"),
        (b'{"a": {"b": 1, "b": 1}}', "a key stands twice"),
        (b"[NaN]", "NaN is not allowed"),
        (b"[-Infinity]", "-Infinity is not allowed"),
        (b"[1e999]", "1e999 is too large"),
        (b"[-1e999]", "-1e999 is too large"),
        (b"[" * 100_000, "recursion"),
        (b'{"a":' * 100_000, "recursion"),
        (b"", "Expecting value"),
        (b'{"a": 1', "Expecting"),
        (b"{} {}", "Extra data"),
        (b"\xff\xfe\xfa", ""),
        (b'"\xc3\x28"', "can't decode"),
        (b"9" * 5000, ""),
    ],
)
def test_hostile_json_is_refused_in_one_line(tmp_path, text, reason):
    path = tmp_path / "hostile.json"
    path.write_bytes(text)
    with pytest.raises(InputError, match=f"^{re.escape(str(path))} is not valid JSON") as caught:
        storage.read_json(path)
    assert reason in str(caught.value)
    assert "\n" not in str(caught.value)


def test_json_that_is_too_large_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(storage, "MAX_JSON_BYTES", 4)
    path = tmp_path / "large.json"
    path.write_text("1234")
    assert storage.read_json(path) == 1234
    path.write_text("12345")
    with pytest.raises(InputError, match=r"large\.json has 5 bytes"):
        storage.read_json(path)


@pytest.mark.parametrize("value", [float("nan"), [float("inf")]])
def test_what_json_cannot_hold_is_not_written(tmp_path, value):
    with pytest.raises(ValueError, match="not JSON compliant"):
        storage.write_json(tmp_path / "x.json", value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("cut", [0, 4, 8, 20, -1])
def test_cut_tensor_files_are_refused(cut):
    data = storage.to_tensor_bytes({"a": torch.arange(5.0)})
    with pytest.raises(InputError, match=r"^weights is not a safetensors file") as caught:
        storage.parse_tensors(data[:cut], Path("weights"))
    assert "\n" not in str(caught.value)


def test_foreign_tensor_files_are_refused():
    # A header of 2**60 bytes, and a pickle, which must not be run.
    for data in ((2**60).to_bytes(8, "little") + b"{}", b"\x80\x04cos\nsystem\n(S'true'\ntR."):
        with pytest.raises(InputError, match=r"^weights is not a safetensors file"):
            storage.parse_tensors(data, Path("weights"))


def test_missing_files_directories_and_wrong_sums_are_named(tmp_path):
    path = tmp_path / "file"
    with pytest.raises(InputError, match="file is missing"):
        storage.read_bytes(path)
    with pytest.raises(InputError, match="is not a file"):
        storage.read_bytes(tmp_path)
    path.write_bytes(b"a")
    with pytest.raises(InputError, match="file is damaged or was changed"):
        storage.read_bytes(path, expected=storage.sha256(b"b"))


def test_an_unreadable_file_is_named(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"a")
    monkeypatch.setattr(Path, "read_bytes", failing(errno.EIO))
    with pytest.raises(StorageError, match=r"cannot read .*file: Input/output error"):
        storage.read_bytes(path)


@pytest.mark.parametrize(
    ("where", "name"),
    [(os, "fsync"), (Path, "open"), (Path, "read_bytes"), (Path, "replace")],
)
@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (errno.ENOSPC, "the disk is full; 3 bytes are needed, "),
        (errno.EDQUOT, "the disk is full; 3 bytes are needed, "),
        (errno.EACCES, "Permission denied"),
        (errno.EIO, "Input/output error"),
    ],
)
def test_a_failed_write_keeps_the_old_file_and_nothing_else(
    tmp_path, monkeypatch, where, name, code, reason
):
    path = tmp_path / "file"
    storage.write_bytes(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(where, name, failing(code))
        with pytest.raises(StorageError, match=re.escape(f"cannot write {path}: {reason}")):
            storage.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_disk_that_returns_other_bytes_is_found_out(tmp_path, monkeypatch):
    path = tmp_path / "file"
    storage.write_bytes(path, b"old")
    with monkeypatch.context() as patch:
        patch.setattr(Path, "read_bytes", lambda _: b"newt")
        with pytest.raises(StorageError, match="file could not be read back as it was written"):
            storage.write_bytes(path, b"new")
    assert path.read_bytes() == b"old"
    assert list(tmp_path.iterdir()) == [path]


def test_a_place_that_cannot_be_written_is_named(tmp_path):
    blocked = tmp_path / "file"
    blocked.write_bytes(b"")
    with pytest.raises(StorageError, match=r"cannot write .*inner: "):
        storage.make_directory(blocked / "inner")
    with pytest.raises(StorageError, match=r"cannot write .*inner: "):
        storage.write_bytes(blocked / "inner", b"x")
    with pytest.raises(StorageError, match="No such file or directory"):
        storage.write_bytes(tmp_path / "nowhere" / "file", b"x")


KILLED = """
import os, signal, sys
from pathlib import Path
from ncdwf import storage
def die(*_):
    os.kill(os.getpid(), signal.SIGKILL)
if os.fork() == 0:
    Path.replace = die
    storage.write_bytes(Path(sys.argv[1]), b"new")
os.wait()
Path.rename = die
storage.commit_directory(Path(sys.argv[2]), {"a": b"new"})
"""


def test_a_crash_before_the_rename_leaves_what_was_there(tmp_path):
    (tmp_path / "1").mkdir()
    (tmp_path / "2").mkdir()
    file, directory = tmp_path / "1" / "file", tmp_path / "2" / "checkpoint"
    storage.write_bytes(file, b"old")
    command = [sys.executable, "-c", KILLED, str(file), str(directory)]
    assert subprocess.run(command, check=False).returncode == -signal.SIGKILL
    # Both came as far as the rename.
    assert [p.read_bytes() for p in file.parent.glob(".*.tmp")] == [b"new"]
    assert len(list(directory.parent.glob(".*.tmp/manifest.json"))) == 1
    assert file.read_bytes() == b"old"
    assert not directory.exists()
    storage.write_bytes(file, b"newer")
    assert file.read_bytes() == b"newer"
    storage.commit_directory(directory, FILES)
    assert storage.read_directory(directory) == FILES


def test_a_committed_directory_comes_back_whole(tmp_path):
    path = tmp_path / "parent" / "checkpoint"
    storage.commit_directory(path, FILES)
    assert storage.read_directory(path) == FILES
    assert {p.name for p in path.iterdir()} == {*FILES, storage.MANIFEST}
    assert list(path.parent.iterdir()) == [path]


def test_files_and_the_directories_that_name_them_are_flushed_to_the_disk(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda number: flushed.append(os.fstat(number).st_ino))
    storage.write_bytes(tmp_path / "file", b"x")
    assert flushed == [(tmp_path / "file").stat().st_ino, tmp_path.stat().st_ino]
    flushed.clear()
    storage.commit_directory(tmp_path / "checkpoint", FILES)
    path = tmp_path / "checkpoint"
    assert {path.stat().st_ino, *(p.stat().st_ino for p in path.iterdir())} <= set(flushed)
    assert flushed[-1] == tmp_path.stat().st_ino


def test_what_a_crash_left_behind_does_not_get_in_the_way(tmp_path):
    left = tmp_path / f".checkpoint.{os.getpid()}.tmp"
    left.mkdir()
    (left / "stale").write_bytes(b"x")
    storage.commit_directory(tmp_path / "checkpoint", FILES)
    assert {p.name for p in (tmp_path / "checkpoint").iterdir()} == {*FILES, storage.MANIFEST}


def test_a_committed_directory_is_never_written_again(tmp_path):
    path = tmp_path / "checkpoint"
    storage.commit_directory(path, FILES)
    with pytest.raises(StorageError, match=r"cannot write .*checkpoint: "):
        storage.commit_directory(path, {"other": b"x"})
    assert storage.read_directory(path) == FILES
    assert list(tmp_path.iterdir()) == [path]


@pytest.mark.parametrize("code", [errno.ENOSPC, errno.EACCES])
def test_a_failed_commit_leaves_nothing(tmp_path, monkeypatch, code):
    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", failing(code))
        with pytest.raises(StorageError, match=r"cannot write .*checkpoint"):
            storage.commit_directory(tmp_path / "checkpoint", FILES)
    assert not list(tmp_path.iterdir())


def test_a_flipped_bit_in_any_byte_of_a_committed_directory_is_refused(tmp_path):
    path = tmp_path / "checkpoint"
    storage.commit_directory(path, FILES)
    for file in sorted(path.iterdir()):
        intact = file.read_bytes()
        for position in range(len(intact)):
            damaged = bytearray(intact)
            damaged[position] ^= 1 << position % 8
            file.write_bytes(damaged)
            with pytest.raises(InputError, match=re.escape(str(path))):
                storage.read_directory(path)
        file.write_bytes(intact)
    assert storage.read_directory(path) == FILES


@settings(max_examples=40, deadline=None)
@given(st.sampled_from([*FILES, storage.MANIFEST]), st.floats(0, 1, exclude_max=True))
def test_a_cut_or_missing_file_in_a_committed_directory_is_refused(name, share):
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "checkpoint"
        storage.commit_directory(path, FILES)
        data = (path / name).read_bytes()
        if not data or share == 0:
            (path / name).unlink()
        else:
            # Without its last byte, a newline, the manifest still says everything.
            (path / name).write_bytes(data[: int(share * (len(data) - 1))])
        with pytest.raises(InputError, match=re.escape(str(path))):
            storage.read_directory(path)


@pytest.mark.parametrize(
    "manifest",
    [
        [],
        3,
        {},
        {"format": 2, "files": {}},
        {"format": 1, "files": []},
        {"format": 1, "files": {"a": 3}},
        {"format": 1, "files": {"a": {"bytes": 1}}},
        {"format": 1, "files": {"../outside": {"sha256": storage.sha256(b"a"), "bytes": 1}}},
        {"format": 1, "files": {"/etc/hostname": {"sha256": "", "bytes": 1}}},
    ],
)
def test_foreign_manifests_are_refused(tmp_path, manifest):
    path = tmp_path / "checkpoint"
    path.mkdir()
    (tmp_path / "outside").write_bytes(b"a")
    (path / storage.MANIFEST).write_text(json.dumps(manifest))
    with pytest.raises(InputError, match=r"manifest\.json is not a manifest of this version"):
        storage.read_directory(path)


def test_removing_a_directory_twice_is_fine(tmp_path):
    path = tmp_path / "checkpoint"
    storage.commit_directory(path, FILES)
    for _ in range(2):
        storage.remove_directory(path)
        assert not path.exists()


def test_a_directory_is_locked_once_at_a_time(tmp_path):
    with (
        storage.locked(tmp_path / "run"),
        pytest.raises(InputError, match="run is in use by another process"),
        storage.locked(tmp_path / "run"),
    ):
        pass
    with storage.locked(tmp_path / "run"):
        pass


def test_a_lock_can_be_waited_for(tmp_path):
    got = []

    def second():
        with storage.locked(tmp_path, wait=True):
            got.append("second")

    thread = threading.Thread(target=second)
    with storage.locked(tmp_path):
        thread.start()
        thread.join(0.3)
        assert thread.is_alive()
        got.append("first")
    thread.join(10)
    assert got == ["first", "second"]


def test_who_waits_for_a_lock_that_an_error_removes_holds_one_that_others_see(tmp_path):
    held, over = threading.Event(), threading.Event()

    def second():
        with storage.locked(tmp_path / "new", wait=True):
            held.set()
            over.wait(10)

    def fail():
        thread.start()
        thread.join(0.3)
        raise KeyError

    thread = threading.Thread(target=second)
    with pytest.raises(KeyError), storage.locked(tmp_path / "new"):
        fail()
    assert held.wait(10)
    with pytest.raises(InputError, match="in use"), storage.locked(tmp_path / "new"):
        pass
    over.set()
    thread.join(10)


def test_a_directory_made_for_a_lock_is_gone_after_an_error_unless_it_holds_something(tmp_path):
    def fail(*files):
        for file in files:
            file.touch()
        raise KeyError

    made = tmp_path / "a" / "b"
    with pytest.raises(KeyError), storage.locked(made):
        fail()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(KeyError), storage.locked(made):
        fail(made / "file")
    assert {path.name for path in made.iterdir()} == {".lock", "file"}
    mine = tmp_path / "mine"
    mine.mkdir()
    with pytest.raises(KeyError), storage.locked(mine):
        fail()
    assert mine.exists()


def test_a_lock_is_given_back_after_an_error(tmp_path):
    with pytest.raises(KeyError), storage.locked(tmp_path):
        raise KeyError
    with storage.locked(tmp_path):
        assert (tmp_path / ".lock").is_file()


def test_what_is_no_plain_file_is_no_lock(tmp_path):
    os.mkfifo(tmp_path / storage.LOCK_FILE)  # opening it would wait for ever
    with pytest.raises(InputError, match="no plain file"), storage.locked(tmp_path):
        pass
    (tmp_path / "linked").mkdir()
    (tmp_path / "linked" / storage.LOCK_FILE).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match="no plain file"), storage.locked(tmp_path / "linked"):
        pass
    assert not (tmp_path / "elsewhere").exists()


def test_a_huge_description_is_refused_before_it_is_read(tmp_path, monkeypatch):
    path = tmp_path / "huge.json"
    path.touch()
    os.truncate(path, 60 * 2**30)  # of holes: it takes no disk

    def read(self):
        raise AssertionError("it was read")

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(InputError, match="64424509440 bytes, too many"):
        storage.read_json(path)


def test_a_file_larger_than_memory_is_one_line(tmp_path, monkeypatch):
    path = tmp_path / "file"
    path.write_bytes(b"abc")

    def read(self):
        raise MemoryError

    monkeypatch.setattr(Path, "read_bytes", read)
    with pytest.raises(InputError, match="has 3 bytes, more than memory"):
        storage.read_bytes(path)

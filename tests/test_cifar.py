"""The official files are read as they are; anything else is one line, and runs nothing."""

import hashlib
import pickle
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from ncdwf.data import cifar
from ncdwf.data.cifar import CIFAR10, CIFAR100, DATA_VARIABLE, Archive, parse_pickle
from ncdwf.data.download import OFFLINE_VARIABLE
from ncdwf.data.setting import DATA_SETS, Setting
from ncdwf.errors import InputError


def pictures(seed: int, count: int = 6) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, (count, 3072), dtype=np.uint8)


def official(pixels: np.ndarray, label_key: str, labels: list[int]) -> bytes:
    """Return a batch as the official files hold it: pickled by Python 2, pixels as a string."""
    rows, columns = pixels.shape
    key, raw = label_key.encode(), pixels.tobytes()
    return b"".join(
        [
            b"\x80\x02}(U\x04datacnumpy.core.multiarray\n_reconstruct\n",
            b"cnumpy\nndarray\nK\x00\x85U\x01b\x87R",  # _reconstruct(ndarray, (0,), "b")
            b"(K\x01K" + bytes([rows]) + b"M" + columns.to_bytes(2, "little") + b"\x86",  # shape
            b"cnumpy\ndtype\nU\x02u1K\x00K\x01\x87R(K\x03U\x01|NNN",
            b"J\xff\xff\xff\xffJ\xff\xff\xff\xffK\x00tb\x89",  # the rest of the data type
            b"T" + len(raw).to_bytes(4, "little") + raw + b"tb",
            b"U" + bytes([len(key)]) + key,
            b"](" + b"".join(b"K" + bytes([label]) for label in labels) + b"eu.",
        ]
    )


def write(archive: Archive, directory: Path, content: bytes | None = None) -> Archive:
    """Write small files in the official layout; return the archive with their md5 sums."""
    folder = directory / archive.folder
    folder.mkdir()
    sums = {}
    for number, name in enumerate((*archive.train, *archive.test)):
        data = content or official(pictures(number), archive.label_key, [number, 1, 2, 3, 4, 0])
        (folder / name).write_bytes(data)
        sums[name] = hashlib.md5(data).hexdigest()
    return replace(
        archive,
        train={name: sums[name] for name in archive.train},
        test={name: sums[name] for name in archive.test},
    )


@pytest.mark.parametrize("archive", [CIFAR10, CIFAR100], ids=["cifar10", "cifar100"])
def test_batches_are_joined_in_order(archive: Archive, tmp_path: Path) -> None:
    images, labels, test_images, test_labels = write(archive, tmp_path).read(tmp_path)
    wanted = np.concatenate([pictures(number) for number in range(len(archive.train))])
    assert images.dtype == torch.uint8
    assert np.array_equal(images.numpy().reshape(-1, 3072), wanted)
    assert labels.tolist()[::6] == list(range(len(archive.train)))
    last = len(archive.train)
    assert np.array_equal(test_images.numpy().reshape(-1, 3072), pictures(last))
    assert test_labels.tolist() == [last, 1, 2, 3, 4, 0]
    # The first 1,024 numbers of a row are the red plane, row by row: [channel, height, width].
    assert images[0, 0, 1, 2] == wanted[0, 34]
    assert images[0, 2, 0, 0] == wanted[0, 2048]


def test_the_directory_comes_from_the_argument_or_the_variable(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write(CIFAR10, tmp_path)
    monkeypatch.delenv(DATA_VARIABLE, raising=False)
    with pytest.raises(InputError, match="--data DIR or set NCDWF_DATA"):
        archive.fetch(None)
    monkeypatch.setenv(DATA_VARIABLE, "")  # not the directory one happens to be in
    with pytest.raises(InputError, match="--data DIR or set NCDWF_DATA"):
        archive.fetch(None)
    monkeypatch.setenv(DATA_VARIABLE, str(tmp_path))
    assert archive.fetch(None) == tmp_path / "cifar-10-batches-py"


def test_offline_says_what_to_unpack_and_where(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(OFFLINE_VARIABLE, "1")
    directory = tmp_path / "other"
    for step in (CIFAR10.fetch, CIFAR10.read):
        with pytest.raises(InputError) as caught:
            step(directory)
        assert str(caught.value) == (
            f"{directory} holds no cifar-10-batches-py; "
            "unpack https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz there"
        )
    assert not directory.exists()


def test_nothing_is_written_beside_files_that_are_there(tmp_path: Path) -> None:
    write(CIFAR10, tmp_path).read(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [CIFAR10.folder]


def test_a_file_that_is_not_the_official_one_is_named(tmp_path: Path) -> None:
    archive = write(CIFAR10, tmp_path)
    path = tmp_path / archive.folder / "data_batch_3"
    path.write_bytes(path.read_bytes()[:-1])
    with pytest.raises(InputError, match="data_batch_3 is not the official file"):
        archive.read(tmp_path)
    path.unlink()
    with pytest.raises(InputError, match="data_batch_3 is missing"):
        archive.read(tmp_path)


@pytest.mark.parametrize(
    "content",
    [
        pickle.dumps({}),
        pickle.dumps([1, 2]),
        official(pictures(0)[:, :7], "labels", [0] * 6),
        official(pictures(0), "fine_labels", [0] * 6),
    ],
)
def test_a_file_without_pictures_and_labels_is_named(content: bytes, tmp_path: Path) -> None:
    with pytest.raises(InputError, match="data_batch_1 does not hold pictures and labels"):
        write(CIFAR10, tmp_path, content).read(tmp_path)


class Hostile:
    def __init__(self, function: Any, *arguments: Any) -> None:
        self.call = (function, arguments)

    def __reduce__(self) -> Any:
        return self.call


@pytest.mark.parametrize("protocol", range(pickle.HIGHEST_PROTOCOL + 1))
def test_a_hostile_pickle_runs_nothing(tmp_path: Path, protocol: int) -> None:
    mark = tmp_path / "mark"
    data = pickle.dumps({"data": Hostile(Path.touch, mark)}, protocol=protocol)
    with pytest.raises(InputError, match="evil is not a pickle of plain values") as caught:
        parse_pickle(data, Path("evil"))
    assert not mark.exists()
    assert "\n" not in str(caught.value)
    pickle.loads(data)  # the control: it would have run
    assert mark.exists()


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"garbage",
        b"cbuiltins\neval\n(S'1'\ntR.",
        b"cnumpy.core.multiarray\n_reconstruct\n(cnumpy\ndtype\n(I0\ntS'b'\ntR.",
        b"(" * 100_000,
    ],
)
def test_broken_pickles_are_one_line(data: bytes) -> None:
    with pytest.raises(InputError, match="evil is not a pickle of plain values"):
        parse_pickle(data, Path("evil"))


def test_settings_read_the_files_and_know_the_classes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    archive = write(CIFAR10, tmp_path)
    data = replace(DATA_SETS["cifar10"], read=archive.read)
    monkeypatch.setitem(DATA_SETS, "cifar10", data)
    split = Setting.parse("cifar10-3-2").load(tmp_path)
    assert split.known_names == ("airplane", "automobile", "bird")
    assert split.novel_names == ("cat", "deer")
    assert split.known_images.shape[1:] == (3, 32, 32)


def test_names_are_those_of_the_official_lists() -> None:
    assert len(cifar.CIFAR100_NAMES) == len(set(cifar.CIFAR100_NAMES)) == 100
    assert list(cifar.CIFAR100_NAMES) == sorted(cifar.CIFAR100_NAMES)
    assert cifar.CIFAR10_NAMES[3] == "cat"

"""CIFAR-10 and CIFAR-100 from the official files, unpacked, in a data directory.

What is not there is downloaded. The official files are pickles. Each is compared with its published
md5 first; then an unpickler reads it that can build nothing but arrays, lists, dictionaries,
numbers and strings.
"""

import hashlib
import io
import os
import pickle
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from jaxtyping import Int64, UInt8
from numpy import ndarray
from torch import Tensor

from ncdwf import storage
from ncdwf.data import download
from ncdwf.data.inputs import TrainAndTest
from ncdwf.errors import InputError, NcdwfError, first_line
from ncdwf.progress import Progress

DATA_VARIABLE = "NCDWF_DATA"
Batch = tuple[UInt8[ndarray, "image 3 32 32"], Int64[ndarray, " image"]]

CIFAR10_NAMES = tuple("airplane automobile bird cat deer dog frog horse ship truck".split())  # noqa: SIM905
CIFAR100_NAMES = tuple(
    """
    apple aquarium_fish baby bear beaver bed bee beetle bicycle bottle bowl boy bridge bus
    butterfly camel can castle caterpillar cattle chair chimpanzee clock cloud cockroach
    couch crab crocodile cup dinosaur dolphin elephant flatfish forest fox girl hamster
    house kangaroo keyboard lamp lawn_mower leopard lion lizard lobster man maple_tree
    motorcycle mountain mouse mushroom oak_tree orange orchid otter palm_tree pear
    pickup_truck pine_tree plain plate poppy porcupine possum rabbit raccoon ray road rocket
    rose sea seal shark shrew skunk skyscraper snail snake spider squirrel streetcar
    sunflower sweet_pepper table tank telephone television tiger tractor train trout tulip
    turtle wardrobe whale willow_tree wolf woman worm
    """.split()  # noqa: SIM905 - a hundred names read better without quotes
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Archive:
    """One of the two data sets: its folder, its files with their md5 sums, its label key."""

    title: str
    folder: str
    train: dict[str, str]
    test: dict[str, str]
    label_key: str
    source: download.Source

    def fetch(self, data_dir: Path | None, progress: Progress | None = None) -> Path:
        """Return the folder of the official files; download them if it is not there.

        Args:
            data_dir: where the folder belongs; by default what `NCDWF_DATA` names.
            progress: hears of a download.
        """
        folder = self._folder(data_dir)
        if folder.is_dir():
            return folder
        missing = f"{folder.parent} holds no {self.folder}; unpack {self.source.url} there"
        if not download.is_allowed():
            raise InputError(missing)
        try:
            download.download(self.source, folder, (*self.train, *self.test), progress)
        except NcdwfError as error:
            raise type(error)(f"{missing} ({error})") from error
        return folder

    def lacking(self, data_dir: Path | None) -> str:
        """Return in brief what is needed before the files can be read; nothing if they are there.

        Args:
            data_dir: where the folder belongs; by default what `NCDWF_DATA` names.
        """
        if not (data_dir or os.environ.get(DATA_VARIABLE)):
            return f"needs --data DIR or {DATA_VARIABLE}"
        folder = self._folder(data_dir)
        if folder.is_dir():
            return ""
        allowed = download.is_allowed()
        return "will be downloaded" if allowed else f"{folder.parent} holds no {self.folder}"

    def read(self, data_dir: Path | None) -> TrainAndTest:
        """Return 50,000 training and 10,000 test pictures of 32×32 pixels with their labels."""
        folder = self.fetch(data_dir)
        train = [self._batch(folder / name, md5) for name, md5 in self.train.items()]
        test = [self._batch(folder / name, md5) for name, md5 in self.test.items()]
        return *_join(train), *_join(test)

    def _folder(self, data_dir: Path | None) -> Path:
        parent = data_dir or os.environ.get(DATA_VARIABLE)
        if not parent:
            raise InputError(
                f"{self.title} needs a data directory: give --data DIR or set {DATA_VARIABLE}; "
                f"{self.source.url} unpacked there is what it should hold"
            )
        return Path(parent) / self.folder

    def _batch(self, path: Path, md5: str) -> Batch:
        data = storage.read_bytes(path)
        if hashlib.md5(data, usedforsecurity=False).hexdigest() != md5:
            raise InputError(f"{path} is not the official file (its md5 differs); unpack it again")
        content = parse_pickle(data, path)
        try:
            labels = np.asarray(content[self.label_key], np.int64)
            pictures = np.asarray(content["data"], np.uint8).reshape(len(labels), 3, 32, 32)
        except (KeyError, TypeError, ValueError) as error:
            raise InputError(f"{path} does not hold pictures and labels of {self.title}") from error
        return pictures, labels


CIFAR10 = Archive(
    title="CIFAR-10",
    folder="cifar-10-batches-py",
    train={
        "data_batch_1": "c99cafc152244af753f735de768cd75f",
        "data_batch_2": "d4bba439e000b95fd0a9bffe97cbabec",
        "data_batch_3": "54ebc095f3ab1f0389bbae665268c751",
        "data_batch_4": "634d18415352ddfa80567beed471001a",
        "data_batch_5": "482c414d41f54cd18b22e5b47cb7c3cb",
    },
    test={"test_batch": "40351d587109b95175f43aff81a1287e"},
    label_key="labels",
    source=download.Source(
        url="https://www.cs.toronto.edu/~kriz/cifar-10-python.tar.gz",
        md5="c58f30108f718f92721af3b95e74349a",
        num_bytes=170_498_071,
    ),
)
CIFAR100 = Archive(
    title="CIFAR-100",
    folder="cifar-100-python",
    train={"train": "16019d7e3df5f24257cddd939b257f8d"},
    test={"test": "f0ef6b0ae62326f3e7ffdfab6717acfc"},
    label_key="fine_labels",
    source=download.Source(
        url="https://www.cs.toronto.edu/~kriz/cifar-100-python.tar.gz",
        md5="eb9058c3a382ffc7106e4002c42a8d85",
        num_bytes=169_001_437,
    ),
)


def _join(
    batches: list[Batch],
) -> tuple[UInt8[Tensor, "total 3 32 32"], Int64[Tensor, " total"]]:
    images, labels = zip(*batches, strict=True)
    return torch.from_numpy(np.concatenate(images)), torch.from_numpy(np.concatenate(labels))


class _Unpickler(pickle.Unpickler):
    """Builds plain values and numpy arrays; everything else, so all that runs code, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) in _ALLOWED:
            return _ALLOWED[module, name]
        raise pickle.UnpicklingError(f"{module}.{name} is not accepted")


def _array(kind: Any, shape: Any, code: Any) -> ndarray:
    """Stand in for numpy's own reconstructor, which would take any class as `kind`."""
    if kind is not np.ndarray:
        raise pickle.UnpicklingError("only plain arrays are accepted")
    return np.empty(0, np.uint8)


_ALLOWED: dict[tuple[str, str], Any] = {
    ("numpy.core.multiarray", "_reconstruct"): _array,
    ("numpy._core.multiarray", "_reconstruct"): _array,
    ("numpy", "ndarray"): np.ndarray,
    ("numpy", "dtype"): np.dtype,
}


def parse_pickle(data: bytes, path: Path) -> Any:
    """Return the plain values in a pickle that was read from `path`; run nothing."""
    try:
        return _Unpickler(io.BytesIO(data), encoding="latin1").load()
    except Exception as error:  # a hostile pickle can make the machine raise anything
        raise InputError(f"{path} is not a pickle of plain values: {first_line(error)}") from error

"""Which classes are known, which are novel, and the tensors that follow from it."""

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
from jaxtyping import Int64, UInt8
from torch import Tensor

from ncdwf.config import SETTING_NAME
from ncdwf.data import cifar, digits
from ncdwf.data.inputs import Images, Labels, TrainAndTest
from ncdwf.errors import InputError
from ncdwf.noise import generator
from ncdwf.progress import Progress

PROXY_HOLDOUT = 0.1
MIXED_HOLDOUT = 0.4
"""Share of the labelled pictures that mixed pools take their known ones from."""
LARGEST_SHARE = 75
"""In percent: no mixed pool holds more known pictures, so that all hold the same novel ones."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataSet:
    """A source of labelled pictures: how many classes it has and how it is read."""

    class_names: tuple[str, ...]
    read: Callable[[Path | None], TrainAndTest] | None
    """Takes the data directory that the user named, if any."""
    fetch: Callable[[Path | None, Progress | None], Path] | None = None
    """Downloads what `read` needs, unless it is there."""
    lacking: Callable[[Path | None], str] | None = None
    """Tells what `read` needs that is not there."""
    missing: str = ""
    """Why it cannot be read yet."""


DATA_SETS = {
    "digits": DataSet(class_names=digits.CLASS_NAMES, read=digits.read_digits),
    "cifar10": DataSet(
        class_names=cifar.CIFAR10_NAMES,
        read=cifar.CIFAR10.read,
        fetch=cifar.CIFAR10.fetch,
        lacking=cifar.CIFAR10.lacking,
    ),
    "cifar100": DataSet(
        class_names=cifar.CIFAR100_NAMES,
        read=cifar.CIFAR100.read,
        fetch=cifar.CIFAR100.fetch,
        lacking=cifar.CIFAR100.lacking,
    ),
    "imagenet": DataSet(
        class_names=tuple(f"class-{number}" for number in range(1000)),
        read=None,
        missing="reading ImageNet comes with a later release",
    ),
}

SETTINGS = (
    "digits-5-5",
    "cifar10-5-5",
    "cifar100-80-20",
    "cifar100-50-50",
    "cifar100-20-80",
    "imagenet-882-30",
)
"""The settings of the paper, and the embedded one. Other sizes parse as well."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Split:
    """The tensors of a setting; labels count known classes 0…M-1, novel ones M…M+N-1."""

    known_images: UInt8[Tensor, "known channel height width"]
    known_labels: Int64[Tensor, " known"]
    pool_images: UInt8[Tensor, "pool channel height width"]
    """The only thing of a split that the discovery phase receives."""
    pool_labels: Int64[Tensor, " pool"]
    """For evaluation only."""
    test_images: UInt8[Tensor, "test channel height width"]
    test_labels: Int64[Tensor, " test"]
    known_names: tuple[str, ...]
    novel_names: tuple[str, ...]

    @property
    def num_known(self) -> int:
        """Return the number M of known classes."""
        return len(self.known_names)

    @property
    def num_novel(self) -> int:
        """Return the number N of novel classes."""
        return len(self.novel_names)


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """A data set and its division into known and novel classes.

    >>> Setting.parse("digits-5-5").novel_classes
    (5, 6, 7, 8, 9)
    >>> Setting.parse("digits-5-5-proxy-2-3").known_classes
    (0, 1)
    """

    name: str
    data: str
    known_classes: tuple[int, ...]
    novel_classes: tuple[int, ...]
    is_proxy: bool = False
    """Made of known classes alone and scored on a held-out tenth of the training pictures."""
    known_share: int | None = None
    """Percent of the pool that is of known classes: pictures that the labelled data then lacks."""
    imbalance: int = 1
    """How many times larger the first novel class is than the last."""

    @classmethod
    def parse(cls, name: str) -> "Setting":
        """Return the setting called `name`, such as `digits-5-5` or `digits-5-5-proxy-2-3`."""
        match = SETTING_NAME.fullmatch(name)
        if match is None or match["data"] not in DATA_SETS:
            raise InputError(
                f"unknown setting {name!r}; there are {', '.join(SETTINGS)}, or the same with "
                "other numbers of classes"
            )
        is_proxy = match["proxy_known"] is not None
        num_known, num_novel = int(match["known"]), int(match["novel"])
        num_classes = len(DATA_SETS[match["data"]].class_names)
        if num_known + num_novel > num_classes:
            raise InputError(
                f"setting {name!r} asks for {num_known} + {num_novel} classes; "
                f"{match['data']} has {num_classes}"
            )
        if is_proxy:
            limit, whole = num_known, name.partition("-proxy-")[0]
            num_known, num_novel = int(match["proxy_known"]), int(match["proxy_novel"])
            if num_known + num_novel > limit:
                raise InputError(
                    f"setting {name!r} asks for {num_known} + {num_novel} classes; "
                    f"{whole} has {limit} known ones"
                )
        if num_known < 2 or num_novel < 1:
            raise InputError(f"setting {name!r} needs 2 or more known and 1 or more novel classes")
        degree = int(match["degree"] or 0)
        if match["pool"] == "mixed" and degree > LARGEST_SHARE:
            raise InputError(f"setting {name!r}: up to {LARGEST_SHARE} percent can be known")
        if match["pool"] == "imbalance" and degree < 1:
            raise InputError(f"setting {name!r}: an imbalance is 1 or more")
        return cls(
            name=name,
            data=match["data"],
            known_classes=tuple(range(num_known)),
            novel_classes=tuple(range(num_known, num_known + num_novel)),
            is_proxy=is_proxy,
            known_share=degree if match["pool"] == "mixed" else None,
            imbalance=degree if match["pool"] == "imbalance" else 1,
        )

    @property
    def labelled_name(self) -> str:
        """Return a name that settings with the same labelled data share."""
        kind = "-proxy" * self.is_proxy + "-mixed" * (self.known_share is not None)
        return f"{self.data}-{len(self.known_classes)}{kind}"

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of the known classes, then of the novel ones."""
        names = DATA_SETS[self.data].class_names
        return tuple(names[c] for c in self.known_classes + self.novel_classes)

    def fetch(self, data_dir: Path | None = None, progress: Progress | None = None) -> None:
        """Download what `load` needs, unless it is there; `load` does the same, but unheard."""
        fetch = DATA_SETS[self.data].fetch
        if fetch is not None:
            fetch(data_dir, progress)

    def load(self, data_dir: Path | None = None) -> Split:
        """Read the pictures and divide them.

        Args:
            data_dir: where downloaded data sets lie; by default what `NCDWF_DATA` names.
        """
        data = DATA_SETS[self.data]
        if data.read is None:
            raise InputError(f"setting {self.name!r} cannot be loaded: {data.missing}")
        train_images, train_labels, test_images, test_labels = data.read(data_dir)
        if self.is_proxy:
            rest, held_out = held_out_indices(train_labels, PROXY_HOLDOUT, seed=0)
            test_images, test_labels = train_images[held_out], train_labels[held_out]
            train_images, train_labels = train_images[rest], train_labels[rest]
        known = _select(train_images, train_labels, self.known_classes, first=0)
        pool = _select(
            train_images, train_labels, self.novel_classes, first=len(self.known_classes)
        )
        if self.known_share is not None:
            known, pool = _mixed(known, pool, self.known_share)
        if self.imbalance > 1:
            pool = _long_tailed(pool, self.imbalance)
        test = _select(test_images, test_labels, self.known_classes + self.novel_classes, first=0)
        return Split(
            known_images=known[0],
            known_labels=known[1],
            pool_images=pool[0],
            pool_labels=pool[1],
            test_images=test[0],
            test_labels=test[1],
            known_names=self.class_names[: len(self.known_classes)],
            novel_names=self.class_names[len(self.known_classes) :],
        )


Labelled = tuple[UInt8[Tensor, "_ channel height width"], Int64[Tensor, " _"]]
"""Pictures and their classes."""


def held_out_indices(labels: Labels, share: float, *, seed: int) -> tuple[Tensor, Tensor]:
    """Return the indices to train on and those held out: `share` of every class, in order."""
    source = generator(seed, "held-out")
    held_out = torch.zeros(len(labels), dtype=torch.bool)
    for label in torch.unique(labels).tolist():
        members = torch.nonzero(labels.cpu() == label).flatten()
        order = torch.randperm(len(members), generator=source)
        held_out[members[order[: round(share * len(members))]]] = True
    return torch.nonzero(~held_out).flatten(), torch.nonzero(held_out).flatten()


def _select(images: Images, labels: Labels, classes: tuple[int, ...], *, first: int) -> Labelled:
    """Return the pictures of `classes`; their labels count from `first` in that order."""
    renumber = torch.full((int(labels.max()) + 1,), -1)
    renumber[list(classes)] = torch.arange(first, first + len(classes))
    new = renumber[labels]
    return images[new >= 0], new[new >= 0]


def _mixed(known: Labelled, novel: Labelled, share: int) -> tuple[Labelled, Labelled]:
    """Return the labelled data and a pool of which `share` percent are of known classes.

    The labelled data and the novel pictures of the pool are the same for every share.
    """
    rest, held_out = held_out_indices(known[1], MIXED_HOLDOUT, seed=0)
    most = len(held_out) * (100 - LARGEST_SHARE) // LARGEST_SHARE
    source = generator(0, "mixed")
    chosen = torch.randperm(len(novel[1]), generator=source)[:most]
    count = len(chosen) * share // (100 - share)
    added = held_out[torch.randperm(len(held_out), generator=source)[:count]]
    images, labels = (torch.cat([a[chosen], b[added]]) for a, b in zip(novel, known, strict=True))
    return (known[0][rest], known[1][rest]), (images, labels)


def _long_tailed(pool: Labelled, imbalance: int) -> Labelled:
    """Return fewer and fewer pictures of one class after the other, by a constant factor."""
    images, labels = pool
    classes = torch.unique(labels).tolist()
    source = generator(0, "imbalance")
    kept = []
    for place, label in enumerate(classes):
        members = torch.nonzero(labels == label).flatten()
        fraction = imbalance ** (-place / max(len(classes) - 1, 1))
        order = torch.randperm(len(members), generator=source)
        kept.append(members[order[: max(1, round(fraction * len(members)))]])
    chosen = torch.cat(kept).sort().values
    return images[chosen], labels[chosen]

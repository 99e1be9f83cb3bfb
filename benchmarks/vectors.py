"""Vectors as they come: outliers, heavy tails, columns that hardly vary. Decision 16 rests on it.

    python benchmarks/vectors.py --seeds 3 4 5

Every case is learnt twice: as the package does it, and with the network reading plain normalised
numbers. Known and novel accuracy of the test rows, nobody saying which they are; a case's classes
and rows follow from the seed. About six minutes on a CPU; three tries (decision 17) take twice
as long.
"""

import argparse
from collections.abc import Callable
from unittest.mock import patch

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits, load_iris, load_wine
from sklearn.model_selection import train_test_split
from torch import Tensor

from ncdwf import NovelClassDiscoverer
from ncdwf.model.backbone import VectorNet
from ncdwf.results.environment import in_brief

Rows = NDArray[np.float64]
Labels = NDArray[np.int64]
Data = tuple[Rows, Labels]
Case = Callable[[np.random.Generator], Data]
NUM_RARE = 3
"""So many labelled rows have a 1 in a rare column."""


def digits(draw: np.random.Generator) -> Data:
    """Return the digits as 64 numbers; which five are known is drawn."""
    rows, labels = load_digits(return_X_y=True)
    return rows, draw.permutation(10)[labels]


def rare(draw: np.random.Generator, *, num_columns: int, share: float) -> Data:
    """Add columns of 0 and 1: 1 in next to no labelled row, and in a share of the others."""
    rows, labels = digits(draw)
    columns = (draw.random((len(rows), num_columns)) < share) & (labels >= 5)[:, None]
    for column in columns.T:
        column[draw.choice(np.flatnonzero(labels < 5), NUM_RARE, replace=False)] = True
    return np.c_[rows, columns], labels


def telling(draw: np.random.Generator) -> Data:
    """Add such a column that two of the novel classes have."""
    rows, labels = digits(draw)
    column = labels >= 8
    column[draw.choice(np.flatnonzero(labels < 5), NUM_RARE, replace=False)] = True
    return np.c_[rows, column], labels


def lognormal(draw: np.random.Generator) -> Data:
    """Add 20 columns of noise with a heavy tail."""
    rows, labels = digits(draw)
    return np.c_[rows, np.exp(2.5 * draw.standard_normal((len(rows), 20)))], labels


def cauchy(draw: np.random.Generator) -> Data:
    """Add ten columns of noise whose tails are so heavy that they have no spread."""
    rows, labels = digits(draw)
    return np.c_[rows, draw.standard_cauchy((len(rows), 10))], labels


def outliers(draw: np.random.Generator) -> Data:
    """Put one number of every hundredth row a thousand times too high."""
    rows, labels = digits(draw)
    places = draw.choice(len(rows), len(rows) // 100, replace=False)
    rows[places, draw.integers(0, rows.shape[1], len(places))] += 16_000
    return rows, labels


def blobs(draw: np.random.Generator, *, novel_scale: float) -> Data:
    """Return normal classes; those of novel ones may lie far from what labelled rows span."""
    labels = draw.integers(0, 10, 1500)
    centres = 2 * draw.standard_normal((10, 10))
    centres[5:] *= novel_scale
    return centres[labels] + draw.standard_normal((1500, 10)), labels


def line(draw: np.random.Generator) -> Data:
    """Return classes that one number tells apart, the novel ones beyond the known ones."""
    labels = draw.integers(0, 10, 1500)
    centres = 3.0 * np.array([-2, -1, 0, 1, 2, 5, 8, 11, 14, 17])
    number = centres[labels] + 0.5 * draw.standard_normal(1500)
    return np.c_[number, draw.standard_normal((1500, 5))], labels


def words(draw: np.random.Generator) -> Data:
    """Return counts of 300 words, nearly all of them 0."""
    labels = draw.integers(0, 10, 2000)
    shares = draw.gamma(0.08, 1, (10, 300))
    shares /= shares.sum(1, keepdims=True)
    return draw.poisson(25 * shares[labels]).astype(float), labels


def embeddings(draw: np.random.Generator) -> Data:
    """Return unit vectors of 128 numbers, as other networks give."""
    labels = draw.integers(0, 10, 2000)
    rows = 0.4 * draw.standard_normal((10, 128))[labels] + draw.standard_normal((2000, 128))
    return rows / np.linalg.norm(rows, axis=1, keepdims=True), labels


def measured(load: Callable[..., Data]) -> Case:
    """Return a table of measurements of which the last class is novel."""
    return lambda draw: load(return_X_y=True)


CASES: dict[str, Case] = {
    "digits": digits,
    "digits and a column rarely 1": lambda draw: rare(draw, num_columns=1, share=0.001),
    "… rarely 1 among labelled rows, in a tenth of the pool": (
        lambda draw: rare(draw, num_columns=1, share=0.1)
    ),
    "… ten such columns": lambda draw: rare(draw, num_columns=10, share=0.1),
    "… a column that two novel classes have": telling,
    "digits and 20 lognormal columns": lognormal,
    "digits and 10 Cauchy columns": cauchy,
    "digits, 1 % of the rows with an outlier": outliers,
    "blobs": lambda draw: blobs(draw, novel_scale=1.0),
    "blobs, novel ones six times as far out": lambda draw: blobs(draw, novel_scale=6.0),
    "classes along one line": line,
    "counts of words": words,
    "embeddings": embeddings,
    "wine": measured(load_wine),
    "iris": measured(load_iris),
}


def plainly(self: VectorNet, vectors: Tensor) -> Tensor:
    """Read normalised numbers as they are."""
    return self.layers(self.normalise(vectors))  # type: ignore[no-any-return]


def accuracies(case: Case, seed: int, tries: int) -> tuple[float, float]:
    """Return known and novel accuracy in percent, clusters matched one to one."""
    rows, labels = case(np.random.default_rng(seed))
    num_known = 5 if labels.max() == 9 else int(labels.max())
    split = train_test_split(rows, labels, test_size=0.3, stratify=labels, random_state=seed)
    train, test, names, truth = split
    is_known = names < num_known
    num_novel = int(labels.max()) + 1 - num_known
    settings = {"discovery.tries": tries}
    finder = NovelClassDiscoverer(num_novel, random_state=seed, settings=settings)
    finder.fit(train[is_known], names[is_known]).discover(train[~is_known])
    parts = (truth < num_known, truth >= num_known)
    known, novel = (100 * finder.score(test[part], truth[part]) for part in parts)
    return known, novel


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seeds", type=int, nargs="+", default=[3, 4, 5])
    parser.add_argument("--tries", type=int, default=1)
    options = parser.parse_args()
    seeds, tries = options.seeds, options.tries
    torch.set_num_threads(1)
    print(f"{in_brief()}; seeds {', '.join(map(str, seeds))}, tries {tries}\n")
    print("| vectors | known, plain | novel, plain | known | novel |")
    print("|---|---:|---:|---:|---:|")
    everything = []
    for name, case in CASES.items():
        with patch.object(VectorNet, "forward", plainly):
            before = [accuracies(case, seed, tries) for seed in seeds]
        now = [accuracies(case, seed, tries) for seed in seeds]
        row = np.hstack([before, now]).mean(0)
        everything.append(row)
        print(f"| {name} | {' | '.join(f'{value:.1f}' for value in row)} |", flush=True)
    mean = np.mean(everything, 0)
    print(f"| mean | {' | '.join(f'{value:.1f}' for value in mean)} |")


if __name__ == "__main__":
    main()

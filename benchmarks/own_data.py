"""Data of one's own, as it comes: the figures of docs/own-data.md, and of rounds in docs/pools.md.

    python benchmarks/own_data.py readme vectors

The digits stand for somebody's own data, and nothing is set. `small` takes a quarter of an hour of
one CPU core, all parts together half an hour.
"""

import argparse
import time
from collections.abc import Callable, Iterator

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.datasets import load_digits
from sklearn.model_selection import train_test_split

from ncdwf import Model, NovelClassDiscoverer
from ncdwf.results.environment import in_brief
from ncdwf.results.metrics import clustering_accuracy, count_pairs, match_clusters

Data = tuple[NDArray[np.generic], NDArray[np.int64]]
Figures = dict[str, float]
Runs = Iterator[tuple[str, list[Figures]]]
"""What was run, and what came out for every seed: percent, and seconds."""
TEST_SHARE = 0.3
KNOWN = 5


def pictures() -> Data:
    """Return the digits as pictures."""
    digits = load_digits()
    return (digits.images * 15).astype("uint8"), digits.target


def numbers() -> Data:
    """Return the digits as 64 numbers."""
    digits = load_digits()
    return digits.data, digits.target


def novel_clusters(model: Model, rows: torch.Tensor) -> NDArray[np.int64]:
    """Return the cluster of every row, told that it is novel."""
    logits = model.outputs(model.features(rows)).novel_logits[int(model.best_head)]
    return logits.argmax(1).numpy()  # type: ignore[no-any-return]


def readme() -> Runs:
    """Measure README's example: its `random_state` decides split and learning."""
    rows, labels = pictures()
    runs = []
    for seed in range(4):
        started = time.monotonic()
        X, X_test, y, y_test = train_test_split(rows, labels.astype(str), random_state=seed)
        finder = NovelClassDiscoverer(num_novel=5, random_state=seed)
        finder.fit(X[y < "5"], y[y < "5"]).discover(X[y >= "5"])
        right = 100 * finder.score(X_test, y_test)
        runs.append({"right": right, "seconds": time.monotonic() - started})
    yield "README's example", runs


def vectors() -> Runs:
    """Measure digits as 64 numbers, each test row told whether it is known or novel."""
    rows, labels = numbers()
    runs = []
    for seed in range(5):
        started = time.monotonic()
        X, X_test, y, y_test = train_test_split(
            rows, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed
        )
        finder = NovelClassDiscoverer(num_novel=5, random_state=seed)
        model = finder.fit(X[y < KNOWN], y[y < KNOWN]).discover(X[y >= KNOWN]).model_
        seconds = time.monotonic() - started
        is_novel = y_test >= KNOWN
        test = torch.from_numpy(X_test).float()
        said = model.outputs(model.features(test[~is_novel])).known_logits.argmax(1).numpy()
        clusters = novel_clusters(model, test[is_novel])
        novel = 100 * clustering_accuracy(clusters, y_test[is_novel] - KNOWN, 5, 5)
        known = 100 * float((said == y_test[~is_novel]).mean())
        runs.append({"known": known, "novel": novel, "seconds": seconds})
    yield "vectors", runs


def small() -> Runs:
    """Measure pools of 200 pictures of other digits than 5-9: the share in the right cluster."""
    rows, labels = pictures()
    drawn = [np.random.default_rng(seed).permutation(10)[KNOWN:] for seed in range(3)]
    for novel in ([1, 3, 5, 7, 9], *(sorted(classes.tolist()) for classes in drawn)):
        runs = []
        is_novel = np.isin(labels, novel)
        for seed in range(10):
            draw = np.random.default_rng(seed)
            pool = draw.choice(np.flatnonzero(is_novel), 200, replace=False)
            started = time.monotonic()
            finder = NovelClassDiscoverer(num_novel=5, random_state=seed)
            finder.fit(rows[~is_novel], labels[~is_novel]).discover(rows[pool])
            seconds = time.monotonic() - started
            clusters = novel_clusters(finder.model_, torch.from_numpy(rows[pool])[:, None])
            truth = np.searchsorted(novel, labels[pool])
            right = 100 * clustering_accuracy(clusters, truth, 5, 5)
            runs.append({"right": right, "seconds": seconds})
        yield f"200 pictures of {', '.join(map(str, novel))}", runs


def few() -> Runs:
    """Measure what known classes lose in a discovery, with few labelled pictures of some or all."""
    rows, labels = pictures()
    for counts in ((150, 10, 5, 3, 2), (34,) * KNOWN):
        runs = []
        for seed in range(3):
            order = np.random.default_rng(seed).permutation(len(labels))
            of_class = [order[labels[order] == digit] for digit in range(KNOWN)]
            known = np.concatenate([of_class[digit][:num] for digit, num in enumerate(counts)])
            test = np.setdiff1d(np.flatnonzero(labels < KNOWN), known)
            finder = NovelClassDiscoverer(num_novel=5, random_state=seed)
            finder.fit(rows[known], labels[known])
            before = finder.predict(rows[test])
            finder.discover(rows[order[labels[order] >= KNOWN][:400]])
            after = finder.predict(rows[test])
            lost = {}
            for digit, num in enumerate(counts):
                own = labels[test] == digit
                right = [(said[own] == digit).mean() for said in (before, after)]
                lost[f"lost of {digit} ({num})"] = 100 * float(right[0] - right[1])
            runs.append(lost)
        yield f"labelled: {', '.join(map(str, counts))}", runs


def rounds() -> Runs:
    """Measure 0-3 labelled, 4-6 and 7-9 found one after the other, or both at once; strict."""
    for kind, data in (("pictures", pictures()), ("vectors", numbers())):
        yield kind, [_rounds(data, seed) for seed in range(3)]


def _rounds(data: Data, seed: int) -> Figures:
    rows, labels = data
    X, X_test, y, y_test = train_test_split(
        rows, labels, test_size=TEST_SHARE, stratify=labels, random_state=seed
    )
    found: Figures = {}
    started = time.monotonic()
    finder = NovelClassDiscoverer(random_state=seed).fit(X[y < 4], y[y < 4])
    class_of = np.arange(4)
    for number, (first, end) in enumerate(((4, 7), (7, 10)), 1):
        pool = (y >= first) & (y < end)
        finder.discover(X[pool], num_novel=3)
        class_of = np.concatenate([class_of, first + _matched(finder, X[pool], y[pool] - first)])
        right = class_of[finder.predict(X_test)] == y_test
        for group in ((0, 4), (4, 7), (7, 10))[: number + 1]:
            name = f"{group[0]}-{group[1] - 1}, round {number}"
            found[name] = 100 * float(right[(y_test >= group[0]) & (y_test < group[1])].mean())
    found["all"] = 100 * float(right.mean())
    finder = NovelClassDiscoverer(6, random_state=seed).fit(X[y < 4], y[y < 4])
    finder.discover(X[y >= 4])
    class_of = np.concatenate([np.arange(4), 4 + _matched(finder, X[y >= 4], y[y >= 4] - 4)])
    found["all, both pools at once"] = 100 * float(
        (class_of[finder.predict(X_test)] == y_test).mean()
    )
    return {**found, "seconds": time.monotonic() - started}


def _matched(
    finder: NovelClassDiscoverer, pool: NDArray[np.generic], labels: NDArray[np.int64]
) -> NDArray[np.int64]:
    """Return the class of every cluster, by what the pool says."""
    rows = torch.from_numpy(pool)
    rows = rows[:, None] if rows.ndim == 3 else rows.float()
    number = int(labels.max()) + 1
    return match_clusters(count_pairs(novel_clusters(finder.model_, rows), labels, number, number))


PARTS: dict[str, Callable[[], Runs]] = {
    "readme": readme,
    "vectors": vectors,
    "small": small,
    "few": few,
    "rounds": rounds,
}


def main() -> None:
    """Print a line for everything that was run, and one for every figure of it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("parts", nargs="*", choices=PARTS, default=list(PARTS))
    parts = parser.parse_args().parts
    torch.set_num_threads(1)
    print(in_brief(), "one thread", sep=", ")
    for part in parts:
        for name, runs in PARTS[part]():
            print(f"\n{name}")
            for figure in runs[0]:
                values = [run[figure] for run in runs]
                each = " ".join(f"{value:.1f}" for value in values)
                print(f"  {figure}: mean {np.mean(values):.1f} ({each})", flush=True)


if __name__ == "__main__":
    main()

"""What documents show of single runs beside their scores, kept in `observations.json`.

So pictures and tables can be made again without a GPU.
"""

import time
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path
from typing import Any

import numpy as np

from ncdwf import storage
from ncdwf.data.setting import Setting
from ncdwf.errors import InputError
from ncdwf.learning.counting import count_classes
from ncdwf.learning.loop import choose_device
from ncdwf.model import Model
from ncdwf.results.configuration import config_record, is_record_of
from ncdwf.results.experiment import score_snapshots
from ncdwf.results.grids import CONFUSION, COUNTED, MATURITY, ONE_ROUND, TWO_ROUNDS, Cell
from ncdwf.results.metrics import count_pairs
from ncdwf.results.rounds import after_each_round, after_one_round
from ncdwf.results.run import PREDICTIONS_FILE, Run

FILE = "observations.json"


def read(directory: Path) -> dict[str, Any]:
    """Return what is kept in `directory` by its name, but nothing of another configuration."""
    return {
        name: entry
        for name, entry in _read_all(directory).items()
        if name in OBSERVATIONS and is_record_of(entry["config"], OBSERVATIONS[name][0].config)
    }


def _read_all(directory: Path) -> dict[str, Any]:
    path = directory / FILE
    kept = storage.read_json(path) if path.exists() else {}
    if not isinstance(kept, dict) or not all(
        isinstance(entry, dict) and "config" in entry for entry in kept.values()
    ):
        raise InputError(f"{path} does not hold observations of finished runs")
    return kept


def is_kept(cell: Cell, directory: Path) -> bool:
    """Tell whether nothing that should be observed of this run is missing."""
    names = {name for name, (wanted, _) in OBSERVATIONS.items() if wanted == cell}
    return names <= set(read(directory))


def keep(cell: Cell, run: Run, directory: Path, *, data_dir: Path | None = None) -> None:
    """Add what is to be observed of a finished run, if anything is."""
    for name, (wanted, observe) in OBSERVATIONS.items():
        if wanted == cell:
            entry = {
                "cell": cell.name,
                "config": config_record(cell.config),
                **run.provenance,
                **observe(run, data_dir),
            }
            with storage.locked(directory, wait=True):
                storage.write_json(directory / FILE, {**_read_all(directory), name: entry})


def _maturity(run: Run, data_dir: Path | None) -> dict[str, Any]:
    """Return how well the identifier of every snapshot tells known from novel pictures."""
    scores = score_snapshots(run, data_dir=data_dir)
    if not scores:
        raise InputError(f"{run.path} has kept no snapshots; delete it to run again")
    rules = {epochs: s.agnostic[s.default_rule] for epochs, s in scores.items()}
    return {
        "epochs": list(scores),
        "auroc": [s.auroc for s in scores.values()],
        "known_kept": [round(1 - rule.known_rejected / 100, 4) for rule in rules.values()],
        "novel_found": [round(1 - rule.novel_accepted / 100, 4) for rule in rules.values()],
    }


def _confusion(run: Run, data_dir: Path | None) -> dict[str, Any]:
    """Return how often the known head takes each novel class for each known one."""
    setting = Setting.parse(run.config.setting)
    known, novel = len(setting.known_classes), len(setting.novel_classes)
    with np.load(run.path / PREDICTIONS_FILE) as arrays:
        labels, answers = arrays["labels"], arrays["known"]
    is_novel = labels >= known
    counts = count_pairs(labels[is_novel] - known, answers[is_novel], novel, known)
    names = setting.class_names
    return {
        "known_names": list(names[:known]),
        "novel_names": list(names[known:]),
        "counts": counts.tolist(),
    }


def _number(run: Run, data_dir: Path | None) -> dict[str, Any]:
    """Return how many novel classes the pool seemed to hold before discovery."""
    setting = Setting.parse(run.config.setting)
    supervised = Model.load(run.supervised_dir).to(choose_device("auto"))
    started = time.perf_counter()
    features = supervised.features(setting.load(data_dir).pool_images)
    count = count_classes(features, seed=run.config.seed)
    seconds = round(time.perf_counter() - started, 1)
    return {"truth": len(setting.novel_classes), **asdict(count), "seconds": seconds}


OBSERVATIONS: dict[str, tuple[Cell, Callable[[Run, Path | None], dict[str, Any]]]] = {
    "maturity": (MATURITY, _maturity),
    "confusion": (CONFUSION, _confusion),
    "rounds": (TWO_ROUNDS, after_each_round),
    "one-round": (ONE_ROUND, after_one_round),
    **{f"number-{cell.setting}": (cell, _number) for cell in COUNTED},
}

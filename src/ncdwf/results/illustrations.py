"""The pictures of the documents, drawn from what is kept of finished runs."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from ncdwf import storage
from ncdwf.errors import InputError
from ncdwf.results import figures, observations, paper
from ncdwf.results.benchmark import Line
from ncdwf.results.grids import CIFAR_SETTINGS, GRIDS
from ncdwf.results.tables import runs_of

THEMES: tuple[figures.Theme, ...] = ("light", "dark")


def draw(lines: list[Line], results_dir: Path, directory: Path) -> Iterator[Path]:
    """Draw every picture on a light and on a dark ground; yield the files."""
    kept = observations.read(results_dir)
    missing = {"maturity", "confusion"} - set(kept)
    if missing:
        raise InputError(f"{results_dir} lacks the runs behind {', '.join(sorted(missing))}")
    maturity, confusion = kept["maturity"], kept["confusion"]
    storage.make_directory(directory)
    for theme in THEMES:
        pictures = {
            "overview": figures.overview(points(lines), theme),
            "maturity": figures.maturity(
                maturity["epochs"],
                maturity["auroc"],
                maturity["known_kept"],
                maturity["novel_found"],
                maturity["config"]["method"]["tau"],
                _origin(maturity),
                theme,
            ),
            "confusion": figures.confusion(
                np.asarray(confusion["counts"]),
                confusion["known_names"],
                confusion["novel_names"],
                _origin(confusion),
                theme,
            ),
        }
        for name, picture in pictures.items():
            path = directory / f"{name}-{theme}.svg"
            storage.write_bytes(path, picture)
            yield path


def _origin(entry: dict[str, Any]) -> figures.Origin:
    """Return which run something was observed of."""
    config = entry["config"]
    # The seed is no part of what is recorded of a configuration; the name ends in it.
    seed = int(entry["cell"].rpartition("-seed")[2])
    return figures.Origin(setting=config["setting"], method=config["method"]["name"], seed=seed)


def points(lines: list[Line]) -> list[figures.Point]:
    """Return known and novel accuracy (task-aware) of every method, the paper's and ours."""
    found = []
    for setting in CIFAR_SETTINGS:
        for method in ("uno", "ncdwf"):
            row = paper.TASK_AWARE[setting][method]
            found.append(
                figures.Point(
                    setting=setting, method=method, source="paper", known=row.known, novel=row.novel
                )
            )
    grid = GRIDS["main"]
    for variant in grid.variants:
        for setting in CIFAR_SETTINGS:
            runs = runs_of(grid, setting, variant, lines)
            if not runs:
                raise InputError(f"the results lack {variant.method} on {setting}: reproduce main")
            known, novel = (
                float(np.mean([run["aware"][part] for run in runs])) for part in ("known", "novel")
            )
            found.append(
                figures.Point(
                    setting=setting,
                    method=variant.method,
                    source="ours",
                    known=known,
                    novel=novel,
                    num_seeds=len(runs),
                )
            )
    return found

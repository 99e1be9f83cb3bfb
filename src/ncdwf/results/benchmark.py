"""Grids of runs and the tables made from them. Every table comes from `results/runs.jsonl`."""

import json
import statistics
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from ncdwf import storage
from ncdwf.config import override, recipe
from ncdwf.errors import InputError
from ncdwf.learning.loop import Progress
from ncdwf.results.experiment import CONFIG_FILE, SCORES_FILE, Run, complete, execute

Line = dict[str, Any]
"""One finished run."""

IDENTITY = ("setting", "method", "variant", "seed")
"""What tells one run from another."""

NOT_KEPT = ("per_class", "confusion")
"""Parts of a score file that stay in the run directory."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Variant:
    """One row of a grid: what differs from the recipe, as on the command line."""

    name: str
    title: str
    sets: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Grid:
    """Runs that belong into one table."""

    setting: str
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]


GRIDS = {
    "digits": Grid(
        setting="digits-5-5",
        seeds=(0, 1, 2, 3, 4),
        variants=(
            Variant(name="main", title="everything"),
            Variant(
                name="without-replay", title="without replay", sets=("method.weight_replay=0",)
            ),
            Variant(
                name="without-information",
                title="without the mutual-information regulariser",
                sets=("method.weight_information=0",),
            ),
            Variant(
                name="without-distillation",
                title="without distillation",
                sets=("method.weight_distill=0",),
            ),
            Variant(
                name="identifier-during",
                title="identifier trained during discovery",
                sets=("method.identifier=during",),
            ),
            Variant(name="joint", title="joint softmax", sets=("method.softmax=joint",)),
            Variant(name="gaussian", title="Gaussian replay", sets=("method.replay=gaussian",)),
            Variant(
                name="augmented-statistics",
                title="class statistics from augmented views",
                sets=("supervised.statistics_from=augmented",),
            ),
        ),
    ),
    "digits-proxy": Grid(
        setting="digits-5-5-proxy-2-3",
        seeds=(0, 1, 2, 3, 4),
        variants=(
            Variant(name="main", title="the recipe"),
            Variant(
                name="supervised-lr-0.05",
                title="supervised learning rate 0.05 instead of 0.02",
                sets=("supervised.optim.lr=0.05",),
            ),
            Variant(
                name="supervised-40",
                title="40 supervised epochs instead of 20",
                sets=("supervised.optim.epochs=40",),
            ),
            Variant(
                name="lr-0.1",
                title="discovery learning rate 0.1 instead of 0.2",
                sets=("discovery.optim.lr=0.1",),
            ),
            Variant(
                name="batch-128",
                title="discovery batch 128 instead of 64",
                sets=("discovery.optim.batch_size=128",),
            ),
            Variant(
                name="shift-0.5",
                title="views shifted by 0.5 pixels instead of 0.8",
                sets=("supervised.view.shift=0.5", "discovery.large.shift=0.5"),
            ),
            Variant(
                name="distill-1",
                title="distillation weight 1 instead of 3",
                sets=("method.weight_distill=1",),
            ),
            Variant(
                name="information-0.1",
                title="mutual-information weight 0.1 instead of 0.01",
                sets=("method.weight_information=0.1",),
            ),
            Variant(
                name="augmented-statistics",
                title="class statistics from augmented views",
                sets=("supervised.statistics_from=augmented",),
            ),
        ),
    ),
}
"""What `ncdwf reproduce` knows."""


def read_lines(path: Path) -> list[Line]:
    """Return the finished runs in `path`; none if there is no such file."""
    if not path.exists():
        return []
    lines = [storage.parse_json(text, path) for text in storage.read_bytes(path).splitlines()]
    for line in lines:
        if not isinstance(line, dict) or not set(IDENTITY) <= set(line):
            raise InputError(f"{path} holds a line that is not a finished run")
    return lines


def reproduce(
    grid: Grid, results: Path, work_dir: Path, *, progress: Progress | None = None
) -> Iterable[Line]:
    """Yield a line for every run of `grid`; those that `results` lacks are run (or resumed) first.

    Each finished run is added to `results` at once, so an interrupted grid loses nothing.
    """
    storage.make_directory(results.parent)
    for seed in grid.seeds:
        for variant in grid.variants:
            line = find(read_lines(results), grid, variant.name, seed)
            if line is None:
                line = _run(grid, variant, seed, work_dir, progress)
                lines = [*read_lines(results), line]
                text = "".join(f"{json.dumps(entry, allow_nan=False)}\n" for entry in lines)
                storage.write_bytes(results, text.encode())
            yield line


def find(lines: list[Line], grid: Grid, variant: str, seed: int) -> Line | None:
    """Return the run of one cell of `grid`, if it is among `lines`."""
    method = recipe(grid.setting).method["name"]
    wanted = (grid.setting, method, variant, seed)
    for line in lines:
        if tuple(line[key] for key in IDENTITY) == wanted:
            return line
    return None


def _run(
    grid: Grid, variant: Variant, seed: int, work_dir: Path, progress: Progress | None
) -> Line:
    config = complete(replace(recipe(grid.setting), seed=seed))
    for assignment in variant.sets:
        config = override(config, assignment)
    path = work_dir / f"{grid.setting}-{variant.name}-seed{seed}"
    run = Run.open(path) if (path / CONFIG_FILE).exists() else Run.create(path, config)
    if run.config != complete(config):
        raise InputError(f"{path} holds a run of another configuration; delete it to run again")
    execute(run, progress)
    line = storage.read_json(path / SCORES_FILE)
    return {k: v for k, v in line.items() if k not in NOT_KEPT} | {"variant": variant.name}


def markdown_table(grid: Grid, lines: list[Line]) -> str:
    """Return the table of `grid`: mean ± standard deviation over the seeds, in Markdown."""
    columns: dict[str, Callable[[Line], float]] = {
        "aware known": lambda line: line["aware"]["known"],
        "aware novel": lambda line: line["aware"]["novel"],
        "on the pool": lambda line: line["aware"]["novel_pool"],
        "strict all, τ 0.99": lambda line: line["strict"][0]["all"],
        "strict all, own τ": lambda line: line["strict"][line["default_rule"]]["all"],
        "AUROC": lambda line: 100 * line["auroc"],
        "forgetting": lambda line: line["forgetting"],
    }
    rows = [["variant", *columns], ["---"] + ["---:"] * len(columns)]
    for variant in grid.variants:
        runs = [run for seed in grid.seeds if (run := find(lines, grid, variant.name, seed))]
        if runs:
            rows.append(
                [variant.title, *(_spread([get(run) for run in runs]) for get in columns.values())]
            )
    return _markdown(rows)


def seed_table(grid: Grid, lines: list[Line]) -> str:
    """Return the runs of the first variant of `grid`, one row a seed, in Markdown."""
    header = [
        "seed",
        "after supervised",
        "aware known",
        "aware novel",
        "strict known",
        "strict novel",
        "strict all",
        "τ",
        "seconds",
        "commit",
    ]
    rows = [header, ["---:"] * len(header)]
    for seed in grid.seeds:
        run = find(lines, grid, grid.variants[0].name, seed)
        if run is not None:
            strict = run["strict"][run["default_rule"]]
            rows.append(
                [
                    str(seed),
                    f"{run['after_supervised']['known']:.2f}",
                    f"{run['aware']['known']:.2f}",
                    f"{run['aware']['novel']:.2f}",
                    f"{strict['known']:.2f}",
                    f"{strict['novel']:.2f}",
                    f"{strict['all']:.2f}",
                    f"{strict['tau']:.4f}",
                    f"{sum(run['seconds']):.0f}",
                    f"`{(run['commit'] or 'unknown')[:9]}`",
                ]
            )
    return _markdown(rows)


def summary_table(grid: Grid, lines: list[Line]) -> str:
    """Return what a newcomer wants to know of the first variant of `grid`, in Markdown."""
    runs = [r for seed in grid.seeds if (r := find(lines, grid, grid.variants[0].name, seed))]
    rows = [["", "known", "novel", "all"], ["---"] + ["---:"] * 3]
    rows.append(["after the supervised phase", _mean(runs, "after_supervised", "known"), "", ""])
    parts = ("known", "novel", "all")
    rows.append(["task-aware", *(_mean(runs, "aware", part) for part in parts)])
    for name, title in (("agnostic", "task-agnostic"), ("strict", "strict")):
        figures = [[run[name][run["default_rule"]][part] for run in runs] for part in parts]
        rows.append([f"{title}, calibrated τ", *map(_spread, figures)])
    for name, title in (("pixels", "raw pixels"), ("features", "supervised features")):
        rows.append([f"k-means on {title}", "", _mean(runs, "kmeans", name), ""])
    return _markdown(rows)


def fill(text: str, blocks: dict[str, str]) -> str:
    """Return a document with its generated blocks replaced.

    A block stands between `<!-- generated: name -->` and `<!-- end -->`.
    """
    for name, block in blocks.items():
        start, end = f"<!-- generated: {name} -->\n", "<!-- end -->"
        before, found, rest = text.partition(start)
        if found:
            text = before + start + "\n" + block + "\n" + end + rest.partition(end)[2]
    return text


def blocks(lines: list[Line]) -> dict[str, str]:
    """Return every generated block of the documents by its name."""
    grid = GRIDS["digits"]
    return {
        "digits-summary": summary_table(grid, lines),
        "digits-seeds": seed_table(grid, lines),
        "digits-ablation": markdown_table(grid, lines),
        "digits-proxy": markdown_table(GRIDS["digits-proxy"], lines),
    }


def _mean(runs: list[Line], *keys: str) -> str:
    return _spread([run[keys[0]][keys[1]] for run in runs])


def _spread(values: list[float]) -> str:
    if len(values) < 2:
        return f"{values[0]:.2f}" if values else "–"
    return f"{statistics.mean(values):.2f} ± {statistics.stdev(values):.2f}"


def _markdown(rows: list[list[str]]) -> str:
    return "".join(f"| {' | '.join(row)} |\n" for row in rows)

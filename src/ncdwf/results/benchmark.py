"""Running grids: one line of `results/runs.jsonl` a finished run, nothing is run twice.

Several processes may work on one grid, on a card each or sharing one.
"""

import hashlib
import json
from collections.abc import Iterable
from contextlib import AbstractContextManager, ExitStack
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from ncdwf import storage
from ncdwf.config import Config
from ncdwf.data.setting import Setting
from ncdwf.errors import InputError, InUseError
from ncdwf.progress import Progress
from ncdwf.results import observations
from ncdwf.results.configuration import config_record, is_record_of
from ncdwf.results.environment import environment, source_sum
from ncdwf.results.experiment import check, execute, labelled_of, learn_stage
from ncdwf.results.grids import Cell
from ncdwf.results.run import CONFIG_FILE, PROVENANCE, SCORES_FILE, Run, load_supervised

Line = dict[str, Any]
"""One finished run."""

IDENTITY = ("setting", "method", "variant", "seed")
"""What tells one run from another, beside the configuration."""

NOT_KEPT = ("per_class", "confusion")
"""Parts of a score file that stay in the run directory."""


def read_lines(path: Path) -> list[Line]:
    """Return the finished runs in `path`; none if there is no such file."""
    if not path.exists():
        return []
    lines = [storage.parse_json(text, path) for text in storage.read_bytes(path).splitlines()]
    for line in lines:
        if not isinstance(line, dict) or not {*IDENTITY, "config"} <= set(line):
            raise InputError(f"{path} holds a line that is not a finished run")
    return lines


def find(lines: list[Line], cell: Cell) -> Line | None:
    """Return the line of one run, if it is among `lines`; another configuration is another run."""
    variant = cell.variant
    wanted = (cell.setting, variant.method, variant.name, cell.seed)
    named = [line for line in lines if tuple(line[key] for key in IDENTITY) == wanted]
    config = cell.config
    return next((line for line in named if is_record_of(line["config"], config)), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Bench:
    """Where grids are run: the results file, the work directory and the data."""

    results: Path
    work_dir: Path
    data_dir: Path | None = None
    progress: Progress | None = None
    source: str = field(default_factory=source_sum)
    """The code as it is now: files may change before a later run."""

    def reproduce(self, cells: Iterable[Cell]) -> Iterable[Line]:
        """Yield a line for every run; those that the results lack are run (or resumed) first.

        Each finished run is added to the results at once, so an interrupted grid loses nothing. A
        run that another process is at is left to it, and gets no line here.
        """
        for cell in cells:
            line = self._kept(cell)
            if line is None:
                with ExitStack() as held:
                    try:
                        held.enter_context(self._claimed(cell.name))
                    except InUseError:
                        continue
                    # Another process may have done it since.
                    line = self._kept(cell) or self._made(cell)
            yield line

    def missing(self, cells: Iterable[Cell]) -> list[Cell]:
        """Return the runs that the results lack, or what is to be observed of them."""
        return [cell for cell in cells if self._kept(cell) is None]

    def _claimed(self, name: str, *, wait: bool = False) -> AbstractContextManager[None]:
        return storage.locked(self.work_dir / "claims" / name, wait=wait)

    def _kept(self, cell: Cell) -> Line | None:
        """Return the line of a run if nothing of it is missing."""
        line = find(read_lines(self.results), cell)
        return line if observations.is_kept(cell, self.results.parent) else None

    def _made(self, cell: Cell) -> Line:
        run = self._run(cell)
        execute(run, self.progress, data_dir=self.data_dir)
        line = self._added(cell, run)
        observations.keep(cell, run, self.results.parent, data_dir=self.data_dir)
        return line

    def _run(self, cell: Cell) -> Run:
        """Return the run of `cell`, begun or as far as it has come.

        Runs with the same supervised phase share it: it is done once and copied.
        """
        config, path = cell.config, self.work_dir / cell.name
        if not (path / CONFIG_FILE).exists():
            return Run.create(path, config, load_supervised(self._supervised(config).path))
        run = Run.open(path)
        if not is_record_of(config_record(run.config), config):
            raise InputError(f"{path} holds a run of another configuration; delete it to run again")
        return run

    def _supervised(self, config: Config) -> Run:
        labelled = Setting.parse(config.setting).labelled_name
        # Another commit's, device's or torch's is not taken: a line names what made all of it.
        made_with = [environment(config)[key] for key in PROVENANCE]
        # Changed files may have the commit of other changes, and an installed copy has none.
        made_with.append(self.source)
        parts = [labelled, asdict(config.supervised), config.backbone, config.seed, made_with]
        name = hashlib.sha256(storage.to_json_bytes(parts)).hexdigest()[:12]
        path = self.work_dir / "supervised" / f"{labelled}-seed{config.seed}-{name}"
        with self._claimed(path.name, wait=True):
            if (path / CONFIG_FILE).exists():
                run = Run.open(path)
            else:
                check(config, self.data_dir)  # before anything is written
                run = Run.create(path, config)
            load = partial(labelled_of, config.setting, self.data_dir)
            learn_stage(run, load, self.progress)
        return run

    def _added(self, cell: Cell, run: Run) -> Line:
        """Return the line of a finished run; the results get it if they lack it."""
        scores = storage.read_json(run.path / SCORES_FILE)
        kept = {key: value for key, value in scores.items() if key not in NOT_KEPT}
        new: Line = kept | {"variant": cell.variant.name}
        with storage.locked(self.results.parent, wait=True):
            lines = read_lines(self.results)
            line = find(lines, cell)
            if line is None:
                text = "".join(f"{json.dumps(entry, allow_nan=False)}\n" for entry in [*lines, new])
                storage.write_bytes(self.results, text.encode())
        return line or new

"""The run directory: the only interface between training and everything after it.

It holds `config.json`, `env.json`, `history.jsonl`, `supervised/` (the model before discovery),
`model.safetensors` with `model.json`, `predictions.npz` and `scores.json`, and `snapshots/` if the
configuration asks for them, and `survey.json` if discovery had to find out what the pool is made of
or how many classes it holds. Each stage is complete when its last file is there, so a run that was
cut off goes on where it stopped.
"""

import hashlib
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ncdwf import storage
from ncdwf.config import Config, from_dict
from ncdwf.errors import InputError, NonFiniteError, StorageError
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.discovery import PHASE as DISCOVERY
from ncdwf.learning.loop import Epoch, History
from ncdwf.learning.supervised import PHASE as SUPERVISED
from ncdwf.model import Model
from ncdwf.model.archive import DESCRIPTION_FILE, WEIGHTS_FILE
from ncdwf.results.configuration import complete, read_config
from ncdwf.results.environment import environment

CONFIG_FILE = "config.json"
ENVIRONMENT_FILE = "env.json"
HISTORY_FILE = "history.jsonl"
SURVEY_FILE = "survey.json"
SCORES_FILE = "scores.json"
PREDICTIONS_FILE = "predictions.npz"
PROVENANCE = ("device", "torch", "commit")
LATER = "later"
"""Where `env.json` has what a run went on with, if that was something else."""
FILES_OF_BEGIN = frozenset(
    {CONFIG_FILE, ENVIRONMENT_FILE, HISTORY_FILE, SURVEY_FILE, storage.LOCK_FILE}
)
FOLDERS_OF_BEGIN = frozenset({SUPERVISED})
"""All that a run may hold before anything was trained in it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Start:
    """What a run begins with where its supervised phase was done elsewhere."""

    model: Model
    history: History
    environment: dict[str, Any] | None = None
    """What that was made with, if it is recorded."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory: its path and what is in it. Nothing is computed again."""

    path: Path
    made: frozenset[str] = frozenset()
    """What `create` brought into the directory and may be taken back."""

    @classmethod
    def create(cls, path: Path, config: Config, start: Start | None = None) -> "Run":
        """Begin a run in `path`, which must not hold one yet.

        The configuration is written last: without it there is no run. The model of a beginning
        that was cut off is taken as it is if it is that of `start`.
        """
        names = FILES_OF_BEGIN | FOLDERS_OF_BEGIN
        made = frozenset(name for name in names if not storage.exists(path / name))
        if storage.exists(path / DESCRIPTION_FILE) and CONFIG_FILE in made:
            raise InputError(f"{path} holds a model already; choose another directory")
        run = cls(path, made)
        try:
            with storage.locked(path):
                if (path / CONFIG_FILE).exists():
                    raise InputError(
                        f"{path} holds a run already; resume it with --resume or choose another "
                        "directory"
                    )
                made_with = environment(config)
                if start is not None:
                    if not start.model.is_saved_in(run.supervised_dir):
                        start.model.save(run.supervised_dir)
                    run.record(start.history)
                    made_with = _noted(start.environment, made_with)
                storage.write_json(path / ENVIRONMENT_FILE, made_with)
                storage.write_json(path / CONFIG_FILE, asdict(complete(config)))
        except (StorageError, KeyboardInterrupt):
            with suppress(OSError):  # what went wrong first is told
                run._take_back()
            raise
        return run

    @classmethod
    def open(cls, path: Path) -> "Run":
        """Return the run in `path`."""
        if not (path / CONFIG_FILE).is_file():
            raise InputError(f"{path} holds no run ({CONFIG_FILE} is missing)")
        return cls(path)

    @property
    def config(self) -> Config:
        """Return the configuration, complete enough to replay the run."""
        return read_config(self.path / CONFIG_FILE)

    @property
    def environment(self) -> dict[str, Any]:
        """Return what the run was made with."""
        path = self.path / ENVIRONMENT_FILE
        values = storage.read_json(path)
        if not (_is_environment(values) and all(map(_is_environment, values.get(LATER, [])))):
            raise InputError(f"{path} does not tell what a run was made with")
        return values  # type: ignore[no-any-return]

    def note_environment(self) -> None:
        """Note what the run goes on with, where that is not what it has been made with so far."""
        known = self.environment
        noted = _noted(known, environment(self.config))
        if noted != known:
            storage.write_json(self.path / ENVIRONMENT_FILE, noted)

    @property
    def provenance(self) -> dict[str, Any]:
        """Return date, device, torch version and commit; all that it was made with, in order."""
        known = self.environment
        told = {}
        for key in PROVENANCE:
            values = dict.fromkeys(part.get(key) for part in (known, *known.get(LATER, ())))
            told[key] = ", ".join(map(str, values)) if len(values) > 1 else next(iter(values))
        return {**told, "date": known.get("date")}

    @property
    def supervised_dir(self) -> Path:
        """Return where the model before discovery is kept."""
        return self.path / SUPERVISED

    @property
    def is_discovering(self) -> bool:
        """Tell whether discovery has begun and not ended: there is no model of it yet."""
        began = self._checkpoints_dir(DISCOVERY).exists()
        return began and not (self.path / DESCRIPTION_FILE).exists()

    @property
    def unfinished(self) -> str:
        """Return the phase that has begun here and not ended, or nothing."""
        if not (self.path / CONFIG_FILE).is_file():
            return ""
        if not any(
            (place / DESCRIPTION_FILE).exists() for place in (self.path, self.supervised_dir)
        ):
            return SUPERVISED
        return DISCOVERY if self.is_discovering else ""

    @property
    def snapshots_dir(self) -> Path:
        """Return where the models on the way are kept."""
        return self.path / "snapshots"

    @property
    def snapshots(self) -> dict[int, Path]:
        """Return the models kept on the way, by how many epochs of discovery they had done."""
        found = sorted(self.snapshots_dir.glob(f"epoch-*/{DESCRIPTION_FILE}"))
        return {int(path.parent.name.removeprefix("epoch-")): path.parent for path in found}

    def keep_snapshot(self, num_epochs: int, model: Model) -> None:
        """Save a model on the way, unless it was saved before an interruption."""
        if num_epochs not in self.snapshots:
            model.save(self.snapshots_dir / f"epoch-{num_epochs:06d}")

    def history(self) -> History:
        """Return what every finished epoch left."""
        path = self.path / HISTORY_FILE
        if not path.exists():
            return []
        lines = storage.read_bytes(path).splitlines()
        return [from_dict(Epoch, storage.parse_json(line, path), where=str(path)) for line in lines]

    def record(self, epochs: History) -> None:
        """Add the epochs of one phase to the history; they replace those of the same phase."""
        phases = {epoch.phase for epoch in epochs}
        kept = [epoch for epoch in self.history() if epoch.phase not in phases]
        lines = [json.dumps(asdict(epoch), allow_nan=False) for epoch in kept + epochs]
        storage.write_bytes(self.path / HISTORY_FILE, "".join(f"{li}\n" for li in lines).encode())

    @contextmanager
    def checkpoints(self, phase: str) -> Iterator[Checkpoints]:
        """Give a phase its checkpoints; they are removed when it has ended well.

        Checkpoints of the supervised phase hold momentum: recent gradients of labelled pictures.
        """
        content = storage.read_bytes(self.path / CONFIG_FILE)
        directory = self._checkpoints_dir(phase)
        for place in (directory.parent, directory, self.supervised_dir, self.snapshots_dir):
            if place.is_symlink():  # what it leads to would be written, or removed in the end
                raise InputError(f"{place} is a link; all of a run lies in its own directory")
        self.history()  # a damaged one is refused before anything is learnt
        checkpoints = Checkpoints(
            directory,
            seconds=self.config.checkpoint_seconds,
            fingerprint=hashlib.sha256(content).hexdigest(),
        )
        try:
            yield checkpoints
        except (InputError, NonFiniteError):
            with suppress(OSError):  # there is something to go on from, or there never was
                directory.rmdir()
                directory.parent.rmdir()
            if not directory.exists():
                self._take_back()
            raise
        storage.remove_directory(directory)
        with suppress(OSError):  # the other phase has some, or there were none
            directory.parent.rmdir()

    def _checkpoints_dir(self, phase: str) -> Path:
        return self.path / "checkpoints" / phase

    def _take_back(self) -> None:
        """Undo `create`: what was refused, or diverged, at once could only do so again."""
        for name in self.made & FILES_OF_BEGIN:
            storage.remove_file(self.path / name)
        for name in self.made & FOLDERS_OF_BEGIN:
            storage.remove_directory(self.path / name)
        with suppress(OSError):  # it holds other files, or a run that was there before
            self.path.rmdir()


def _noted(known: dict[str, Any] | None, now: dict[str, Any]) -> dict[str, Any]:
    """Return what a run was made with so far, with `now` behind it if that is something else."""
    if known is None:
        return now
    later = known.get(LATER, [])
    latest = [known, *later][-1]
    is_same = all(latest.get(key) == now[key] for key in PROVENANCE)
    return known if is_same else {**known, LATER: [*later, now]}


def _is_environment(values: Any) -> bool:
    return isinstance(values, dict) and isinstance(values.get(LATER, []), list)


def new_run_dir(parent: Path, config: Config) -> Path:
    """Return a fresh directory below `parent`, named after setting, method and seed."""
    storage.make_directory(parent)
    stem = f"{config.setting}-{config.method['name']}-seed{config.seed}"
    for number in range(1, 10_000):
        path = parent / (stem if number == 1 else f"{stem}-{number}")
        try:
            path.mkdir()
        except FileExistsError:
            continue
        except OSError as error:
            raise InputError(f"cannot write {path}: {error.strerror}") from error
        return path
    raise InputError(f"{parent} holds too many runs named {stem}; delete some")


def load_model(path: Path) -> Model:
    """Return the model in a model directory, or the newest one of a run directory."""
    return Model.load(model_dir(path))


def model_dir(path: Path) -> Path:
    """Return where the newest model of a run directory is, or of a model directory the same."""
    run = Run(path)
    if (path / WEIGHTS_FILE).exists() and not run.is_discovering:
        return path  # also if its description is lost: the model before it is another one
    newest = path if (path / DESCRIPTION_FILE).exists() else run.supervised_dir
    return newest if (newest / DESCRIPTION_FILE).exists() else path


def start_from(path: Path, model: Model, history: Sequence[Epoch] = ()) -> Start:
    """Return the beginning of a run from a model in `path`, whose environment may be recorded."""
    is_recorded = (path / ENVIRONMENT_FILE).exists()
    made_with = Run(path).environment if is_recorded else None
    return Start(model=model, history=list(history), environment=made_with)


def load_supervised(path: Path) -> Start:
    """Return the model before discovery of a run directory, with its history, or a model alone."""
    run = Run(path)
    if not (run.supervised_dir / DESCRIPTION_FILE).exists():
        model = Model.load(path)
        if model.novel_head is not None:
            raise InputError(f"{path} has discovered already; give the model of 'ncdwf learn'")
        return start_from(path, model)
    history = [epoch for epoch in run.history() if epoch.phase == SUPERVISED]
    return start_from(path, Model.load(run.supervised_dir), history)

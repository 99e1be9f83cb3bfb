"""From a configuration to a run directory: both phases, the scores and where they came from.

A run directory holds `config.json`, `env.json`, `history.jsonl`, `supervised/` (the model before
discovery), `model.safetensors` with `model.json`, `predictions.npz` and `scores.json`, and
`snapshots/` if the configuration asks for them, and `survey.json` if discovery had to find out what
the pool is made of or how many classes it holds. Each stage is complete when its last file is
there, so a run that was cut off goes on where it stopped.
"""

import dataclasses
import hashlib
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import ncdwf.methods  # noqa: F401 - registers every method
from ncdwf import storage
from ncdwf.config import Config, from_dict
from ncdwf.data.inputs import Inputs, Labels, digest
from ncdwf.data.setting import Setting, Split
from ncdwf.errors import InputError, NonFiniteError
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.discovery import PHASE as DISCOVERY
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.loop import Epoch, History, Progress, choose_device, choose_engine
from ncdwf.learning.settling import PHASE as SETTLING
from ncdwf.learning.supervised import PHASE as SUPERVISED
from ncdwf.learning.supervised import learn_known
from ncdwf.learning.survey import Survey, check_pool
from ncdwf.model import Model
from ncdwf.model.archive import DESCRIPTION_FILE, WEIGHTS_FILE
from ncdwf.model.backbone import check_backbone
from ncdwf.recipes import recipe
from ncdwf.results.environment import environment
from ncdwf.results.evaluation import Predictions, Scores, evaluate

CONFIG_FILE = "config.json"
ENVIRONMENT_FILE = "env.json"
HISTORY_FILE = "history.jsonl"
SURVEY_FILE = "survey.json"
SCORES_FILE = "scores.json"
PREDICTIONS_FILE = "predictions.npz"
FILES_OF_BEGIN = frozenset(
    {CONFIG_FILE, ENVIRONMENT_FILE, HISTORY_FILE, SURVEY_FILE, storage.LOCK_FILE}
)
FOLDERS_OF_BEGIN = frozenset({SUPERVISED})
"""All that a run may hold before anything was trained in it."""

INDIFFERENT = {
    "seed": 0,
    "device": "auto",
    "engine": "auto",
    "checkpoint_seconds": 60.0,
    "snapshot_epochs": 0,
}
"""Fields that do not make another configuration."""


@dataclass(frozen=True, slots=True)
class Run:
    """A run directory: its path and what is in it. Nothing is computed again."""

    path: Path
    made: frozenset[str] = frozenset()
    """What `create` brought into the directory and may be taken back."""

    @classmethod
    def create(
        cls, path: Path, config: Config, start: tuple[Model, History] | None = None
    ) -> "Run":
        """Begin a run in `path`, which must not hold one yet.

        `start` is a supervised phase done elsewhere: its model and its history. The configuration
        is written last: without it there is no run.
        """
        storage.make_directory(path)
        made = frozenset(n for n in FILES_OF_BEGIN | FOLDERS_OF_BEGIN if not (path / n).exists())
        if (path / DESCRIPTION_FILE).exists() and not (path / CONFIG_FILE).exists():
            raise InputError(f"{path} holds a model already; choose another directory")
        with storage.locked(path):
            if (path / CONFIG_FILE).exists():
                raise InputError(
                    f"{path} holds a run already; resume it with --resume or choose another "
                    "directory"
                )
            run = cls(path, made)
            if start is not None:
                start[0].save(run.supervised_dir)
                run.record(start[1])
            storage.write_json(path / ENVIRONMENT_FILE, environment(config))
            storage.write_json(path / CONFIG_FILE, asdict(complete(config)))
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
        values = storage.read_json(self.path / ENVIRONMENT_FILE)
        if not isinstance(values, dict):
            raise InputError(f"{self.path / ENVIRONMENT_FILE} should hold an object")
        return values

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
    def snapshots(self) -> dict[int, Path]:
        """Return the models kept on the way, by how many epochs of discovery they had done."""
        found = sorted((self.path / "snapshots").glob(f"epoch-*/{DESCRIPTION_FILE}"))
        return {int(path.parent.name.removeprefix("epoch-")): path.parent for path in found}

    def keep_snapshot(self, num_epochs: int, model: Model) -> None:
        """Save a model on the way, unless it was saved before an interruption."""
        if num_epochs not in self.snapshots:
            model.save(self.path / "snapshots" / f"epoch-{num_epochs:06d}")

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


Labelled = tuple[Inputs, Labels, tuple[str, ...]]
"""Pictures, their labels and the names of the classes."""
Pool = tuple[Inputs, Sequence[str] | None]
"""Pictures alone, and where each was read if they are somebody's own."""


def labelled_of(setting: str, data_dir: Path | None) -> Labelled:
    """Return what the supervised phase of a setting learns from."""
    split = Setting.parse(setting).load(data_dir)
    return split.known_images, split.known_labels, split.known_names


def pool_of(setting: str, data_dir: Path | None) -> Inputs:
    """Return the pool of a setting."""
    return Setting.parse(setting).load(data_dir).pool_images


def check(config: Config, data_dir: Path | None = None) -> None:
    """Refuse what would end the run of a setting only after something was written."""
    pool = pool_of(config.setting, data_dir)
    check_pool(len(pool), config.discovery.num_novel)
    check_shape(config, tuple(pool.shape[1:]))


def check_shape(config: Config, shape: tuple[int, ...]) -> None:
    """Refuse a configuration that cannot be run on pictures of `shape`, or not on this machine."""
    check_backbone(config.backbone, shape)
    choose_engine(config.engine, choose_device(config.device))
    views = {
        "supervised.view": config.supervised.view,
        "discovery.large": config.discovery.large,
        "discovery.small": config.discovery.small,
    }
    for name, view in views.items():
        if config.backbone == "small" and view.size and (view.size,) * 2 != shape[1:]:
            raise InputError(
                f"config.{name}.size={view.size}: the backbone 'small' reads no other size than "
                "that of the pictures; leave it 0"
            )


def complete(config: Config) -> Config:
    """Return `config` with every field of its method written out; an unknown field is refused."""
    fields = asdict(make_method(config.method))  # type: ignore[call-overload]
    return replace(config, method={"name": config.method["name"], **fields})


def read_config(path: Path) -> Config:
    """Return the configuration in a JSON file."""
    return complete(from_dict(Config, storage.read_json(path)))


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


def execute(
    run: Run,
    progress: Progress | None = None,
    *,
    data_dir: Path | None = None,
    surveyed: Callable[[Survey], None] | None = None,
) -> Scores:
    """Do what is left of a run: both phases and the scores.

    The labelled tensors are dropped before discovery begins; discovery gets the pool alone.
    """
    setting = run.config.setting
    learn_stage(run, partial(labelled_of, setting, data_dir), progress)
    run = Run(run.path)  # what was learnt stays, whatever comes of the pool
    discover_stage(run, lambda: (pool_of(setting, data_dir), None), progress, surveyed)
    return evaluate_stage(run.path, setting, data_dir=data_dir)


def learn_stage(run: Run, load: Callable[[], Labelled], progress: Progress | None = None) -> bool:
    """Do the supervised phase on what `load` gives and save its model.

    A run that has the model is left as it is; tell whether there was anything to do.
    """
    config = run.config
    history: History = []
    with storage.locked(run.path), run.checkpoints(SUPERVISED) as checkpoints:
        if (run.supervised_dir / DESCRIPTION_FILE).exists():
            return False
        images, labels, names = load()
        checkpoints.data = digest(images, labels, names)
        model = learn_known(
            images,
            labels,
            config,
            class_names=names,
            checkpoints=checkpoints,
            progress=progress,
            history=history,
        )
        run.record(history)
        model.save(run.supervised_dir)
    return True


def discover_stage(
    run: Run,
    load: Callable[[], Pool],
    progress: Progress | None = None,
    surveyed: Callable[[Survey], None] | None = None,
) -> bool:
    """Do the discovery phase on the pool that `load` gives and save its model.

    A run that has the model is left as it is; tell whether there was anything to do. Neither a
    label nor a labelled picture can come through `load`: it gives pictures alone.
    """
    config = run.config
    supervised = Model.load(run.supervised_dir)
    history: History = []
    with storage.locked(run.path), run.checkpoints(DISCOVERY) as checkpoints:
        if (run.path / DESCRIPTION_FILE).exists():
            return False
        pool, names = load()
        checkpoints.data = digest(pool)
        checkpoints.latest(DISCOVERY)  # another pool is refused before anything is written of it
        storage.make_directory(checkpoints.directory)  # tells that discovery has begun

        def keep(found: Survey) -> None:
            if record := found.to_dict(names):
                storage.write_json(run.path / SURVEY_FILE, record)
            if surveyed is not None:
                surveyed(found)

        model = discover(
            supervised,
            pool,
            make_method(config.method),
            config,
            checkpoints=checkpoints,
            progress=progress,
            history=history,
            snapshot=run.keep_snapshot,
            surveyed=keep,
        )
        run.record(history)
        model.save(run.path)
    return True


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


def load_supervised(path: Path) -> tuple[Model, History]:
    """Return a model before discovery and its history: of a run directory, or of a model alone."""
    run = Run(path)
    if not (run.supervised_dir / DESCRIPTION_FILE).exists():
        model = Model.load(path)
        if model.novel_head is not None:
            raise InputError(f"{path} has discovered already; give the model of 'ncdwf learn'")
        return model, []
    history = [epoch for epoch in run.history() if epoch.phase == SUPERVISED]
    return Model.load(run.supervised_dir), history


def evaluate_stage(path: Path, setting: str, *, data_dir: Path | None = None) -> Scores:
    """Score the model in `path` on the test pictures of `setting`.

    In a run directory, and on its own setting, predictions and scores are written beside the model.
    """
    split = Setting.parse(setting).load(data_dir)
    supervised_dir = Run(path).supervised_dir
    has_supervised = (supervised_dir / DESCRIPTION_FILE).exists()
    supervised = Model.load(supervised_dir) if has_supervised else None
    model = load_model(path)
    is_its_own = (path / CONFIG_FILE).exists() and Run(path).config.setting == setting
    if not is_its_own:
        _check_names(model, split, setting)
    device = choose_device("auto")
    scores, predictions = evaluate(
        model.to(device), split, None if supervised is None else supervised.to(device)
    )
    if is_its_own:
        _write_results(Run(path), scores, predictions)
    return scores


def _check_names(model: Model, split: Split, setting: str) -> None:
    """Refuse classes that are not those of the setting; plain numbers may stand for its names."""
    names = model.known_names
    accepted = (split.known_names, tuple(map(str, range(split.num_known))))
    if len(names) == split.num_known and names not in accepted:
        raise InputError(
            f"the known classes of this model ({', '.join(names[:3])}, …) are not those of "
            f"{setting} ({', '.join(split.known_names[:3])}, …)"
        )


def score_snapshots(run: Run, *, data_dir: Path | None = None) -> dict[int, Scores]:
    """Return the scores of every model kept on the way, by how many epochs it had done."""
    split = Setting.parse(run.config.setting).load(data_dir)
    device = choose_device("auto")
    return {
        num_epochs: evaluate(Model.load(path).to(device), split, with_kmeans=False)[0]
        for num_epochs, path in run.snapshots.items()
    }


def _write_results(run: Run, scores: Scores, predictions: Predictions) -> None:
    arrays: Mapping[str, Any] = {
        item.name: getattr(predictions, item.name) for item in dataclasses.fields(predictions)
    }
    storage.write_arrays(run.path / PREDICTIONS_FILE, arrays)
    config, environment, history = run.config, run.environment, run.history()
    is_whole = any(epoch.phase == SUPERVISED for epoch in history)
    seconds, rates = [], []
    for phase in (SUPERVISED, DISCOVERY):
        epochs = [epoch for epoch in history if epoch.phase == phase]
        total = sum(epoch.seconds for epoch in epochs)
        images = sum(epoch.seconds * epoch.images_per_second for epoch in epochs)
        seconds.append(total)
        rates.append(round(images / total, 1) if total else 0.0)
    seconds[1] += sum(epoch.seconds for epoch in history if epoch.phase == SETTLING)
    storage.write_json(
        run.path / SCORES_FILE,
        {
            "setting": config.setting,
            "method": config.method["name"],
            # Nobody knows how a model that came without its run was trained.
            "variant": variant(config) if is_whole else "custom",
            "seed": config.seed,
            "config": config_record(config),
            "epochs": [
                config.supervised.optim.epochs if is_whole else None,
                config.discovery.optim.epochs,
            ],
            **scores.to_dict(),
            "seconds": [round(value, 2) for value in seconds],
            "images_per_second": rates,
            **{key: environment.get(key) for key in ("device", "torch", "commit", "date")},
        },
    )


def variant(config: Config) -> str:
    """Return `main` for the recommended configuration of a method, `custom` for any other."""
    default = recipe(config.setting, config.method["name"])
    return "main" if _essence(config) == _essence(default) else "custom"


def _essence(config: Config) -> Config:
    """Return what decides the result beside the seed and the machine."""
    return replace(complete(config), **INDIFFERENT)  # type: ignore[arg-type]


def config_record(config: Config) -> dict[str, Any]:
    """Return all that decides the result beside the seed, as plain values."""
    values = asdict(_essence(config))
    return {key: value for key, value in values.items() if key not in INDIFFERENT}


def is_record_of(record: Any, config: Config) -> bool:
    """Tell whether `record` was made of a configuration like `config`, but for the seed.

    What a later version has added counts as its default, so that old runs stay valid.
    """
    try:
        recorded = from_dict(Config, record)
        return _essence(recorded) == _essence(config)
    except InputError:  # made by a version with other fields, or by hand
        return False

"""From a configuration to a run directory: both phases, the scores and where they came from."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

from ncdwf import storage
from ncdwf.config import Config
from ncdwf.data.inputs import Inputs, Labels, digest
from ncdwf.data.setting import Setting, Split
from ncdwf.errors import InputError
from ncdwf.learning.discovery import PHASE as DISCOVERY
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.loop import History, choose_device, choose_engine
from ncdwf.learning.settling import PHASE as SETTLING
from ncdwf.learning.supervised import PHASE as SUPERVISED
from ncdwf.learning.supervised import learn_known
from ncdwf.learning.survey import Survey, check_pool
from ncdwf.model import Model
from ncdwf.model.archive import DESCRIPTION_FILE
from ncdwf.model.backbone import check_backbone
from ncdwf.progress import Progress
from ncdwf.results.configuration import config_record, variant
from ncdwf.results.evaluation import Predictions, Scores, evaluate
from ncdwf.results.run import (
    CONFIG_FILE,
    PREDICTIONS_FILE,
    SCORES_FILE,
    SURVEY_FILE,
    Run,
    load_model,
)

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
        run.note_environment()
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
        run.note_environment()
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


def evaluate_stage(path: Path, setting: str, *, data_dir: Path | None = None) -> Scores:
    """Score the model in `path` on the test pictures of `setting`.

    In a run directory, and on its own setting, predictions and scores are written beside the model.
    """
    split = Setting.parse(setting).load(data_dir)
    supervised_dir = Run(path).supervised_dir
    has_supervised = (supervised_dir / DESCRIPTION_FILE).exists()
    supervised = Model.load(supervised_dir) if has_supervised else None
    model = load_model(path)
    if supervised is not None and supervised.num_known != model.num_known:
        supervised = None  # it is of an earlier round, when fewer classes were known
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
    run.note_environment()
    arrays: Mapping[str, Any] = {
        item.name: getattr(predictions, item.name) for item in dataclasses.fields(predictions)
    }
    storage.write_arrays(run.path / PREDICTIONS_FILE, arrays)
    config, history = run.config, run.history()
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
            **run.provenance,
        },
    )

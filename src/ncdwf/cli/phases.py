"""The verbs that do the phases of a setting, or of pictures of one's own, and score them."""

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from ncdwf.cli.options import (
    ConfigFile,
    DataDir,
    MethodName,
    ModelDir,
    OutDir,
    ResumeDir,
    Seed,
    Sets,
    SettingName,
    Strict,
)
from ncdwf.cli.own import (
    class_number,
    labelled_reader,
    own_classes,
    own_config,
    own_round,
    pool_reader,
)
from ncdwf.cli.runs import (
    Changes,
    Interrupted,
    begin,
    begin_round,
    check_apart,
    check_free,
    check_learnt,
    check_once,
    fetch,
    go_on,
    recorded_config,
    reopen_round,
)
from ncdwf.config import LARGEST_IMAGE_SIZE
from ncdwf.console import Bar, out, print_scores, print_survey
from ncdwf.data.setting import DATA_SETS, SETTINGS, Setting
from ncdwf.errors import InputError
from ncdwf.learning.discovery import METHODS
from ncdwf.model import Model
from ncdwf.recipes import RECIPES
from ncdwf.results import experiment
from ncdwf.results.run import SCORES_FILE, Run

NOTHING_LEFT = "Nothing was left to do. "


def run(
    setting: SettingName = None,
    out_dir: OutDir = None,
    method: MethodName = None,
    seed: Seed = None,
    sets: Sets = None,
    config_file: ConfigFile = None,
    resume: ResumeDir = None,
    data_dir: DataDir = None,
) -> None:
    """Do both phases, score the model and print the table.

    Examples:

        ncdwf run

        ncdwf run digits-5-5 --seed 3 --set discovery.optim.lr=0.1

        ncdwf run --config runs/digits-5-5-ncdwf-seed0/config.json

        ncdwf run --resume runs/digits-5-5-ncdwf-seed0
    """
    check_once(sets or (), seed=seed, method=method)
    changes = Changes(method=method, seed=seed, sets=tuple(sets or ()), data_dir=data_dir)
    work = begin(setting, out_dir, resume, config_file, changes)
    if work.config.own is not None:
        raise InputError(
            f"{work.path} is of pictures of your own; go on with 'ncdwf learn --resume' or "
            "'ncdwf discover --resume'"
        )
    is_done = resume is not None and (work.path / SCORES_FILE).exists()
    with _resumable(work), Bar() as bar:
        scores = experiment.execute(work, bar, data_dir=data_dir, surveyed=print_survey)
    config = work.config
    print_scores(scores, f"{config.method['name']} on {config.setting}, seed {config.seed}")
    out.print(f"{NOTHING_LEFT if is_done else ''}Written to {work.path}", soft_wrap=True)


def learn(
    setting: SettingName = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(
            help="Your own pictures: a folder with one sub-folder a class, or a CSV or "
            "Parquet table with the columns path and label."
        ),
    ] = None,
    image_size: Annotated[
        int | None,
        typer.Option(
            min=1, max=LARGEST_IMAGE_SIZE, help="Side that they are scaled to; follows from them."
        ),
    ] = None,
    backbone: Annotated[
        str | None, typer.Option(help="small, resnet18 or timm:NAME; follows from the device.")
    ] = None,
    strict: Strict = False,
    out_dir: OutDir = None,
    seed: Seed = None,
    sets: Sets = None,
    config_file: ConfigFile = None,
    resume: ResumeDir = None,
    data_dir: DataDir = None,
) -> None:
    """Do the supervised phase alone: learn the known classes and save a model without pictures.

    Examples:

        ncdwf learn --images birds/ --out known

        ncdwf learn digits-5-5 --out known

        ncdwf learn --resume known
    """
    check_once(sets or (), seed=seed, backbone=backbone)
    changes = Changes(seed=seed, sets=tuple(sets or ()), data_dir=data_dir)
    load: Callable[[], experiment.Labelled] | None = None
    if not images:
        if strict or image_size is not None or backbone is not None:
            raise InputError("--image-size, --backbone and --strict go with --images")
        work = begin(setting, out_dir, resume, config_file, changes)
    elif any(other is not None for other in (setting, config_file, resume)):
        raise InputError("--images takes the place of SETTING, --config and --resume")
    else:
        if len(images) > 1:
            raise InputError("learn takes one --images: a folder with all classes, or a table")
        check_free(out_dir)
        check_apart(images[0], out_dir)
        config = own_config(images[0], image_size, backbone, strict, changes)
        work, load = own_classes(config, out_dir)
    with _resumable(work), Bar() as bar:
        load = load or labelled_reader(work.config, data_dir, bar)
        has_learnt = experiment.learn_stage(work, load, bar)
    done = "" if has_learnt else NOTHING_LEFT
    out.print(f"{done}A model of the known classes is in {work.path}", soft_wrap=True)


def discover(
    model: Annotated[
        Path | None, typer.Argument(metavar="MODEL", help="A directory with a model or a run.")
    ] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Your own pictures without labels: a folder or a file; repeatable."),
    ] = None,
    num_novel: Annotated[
        str | None,
        typer.Option("--num-novel", "-n", help="Classes to look for: a number, or auto."),
    ] = None,
    pool: Annotated[
        str | None,
        typer.Option(
            metavar="novel|mixed",
            help="mixed if there are known classes among them: those are left out.",
        ),
    ] = None,
    strict: Strict = False,
    out_dir: OutDir = None,
    setting: Annotated[
        str | None, typer.Option("--setting", help="Whose pool; that of MODEL's own run.")
    ] = None,
    method: MethodName = None,
    seed: Seed = None,
    sets: Sets = None,
    resume: ResumeDir = None,
    data_dir: DataDir = None,
) -> None:
    """Do the discovery phase alone, from a saved model and unlabelled pictures.

    With --images a model that has discovered already begins another round: its novel classes are
    known ones. In the pool of a setting discovery begins anew, with the supervised phase's model.

    Examples:

        ncdwf discover known --images unsorted/ --num-novel 5 --out both

        ncdwf discover known --images camera/ -n auto --pool mixed --out both

        ncdwf discover known --out both --method ncdwf --set method.tau=0.9

        ncdwf discover --resume both
    """
    check_once(sets or (), seed=seed, method=method, pool=pool, num_novel=num_novel)
    added = [] if pool is None else [f"discovery.pool={pool}"]
    if num_novel is not None:
        added.append(f"discovery.num_novel={class_number(num_novel)}")
    changes = Changes(method=method, seed=seed, sets=(*added, *(sets or ())), data_dir=data_dir)
    load: Callable[[], experiment.Pool] | None = None
    if not images and strict:
        raise InputError("--strict goes with --images")
    if resume is not None:
        work = reopen_round(resume, changes, model, out_dir, setting, images)
    elif model is None:
        raise InputError("discover needs MODEL, a directory that 'ncdwf learn' wrote, or --resume")
    elif images:
        if setting is not None:
            raise InputError("--images takes the place of --setting")
        check_free(out_dir)
        if num_novel is None:
            raise InputError(
                "discover needs --num-novel with --images: how many classes to look for, or auto"
            )
        work, load = own_round(model, images, strict, out_dir, changes)
    else:
        work = begin_round(model, setting, out_dir, changes)
    with _resumable(work), Bar() as bar:
        load = load or pool_reader(work.config, data_dir, bar)
        has_discovered = experiment.discover_stage(work, load, bar, print_survey)
    done = "" if has_discovered else NOTHING_LEFT
    found = ", ".join(Model.load(work.path).novel_names)
    out.print(
        f"{done}A model of known and novel classes ({found}) is in {work.path}", soft_wrap=True
    )


def evaluate(
    model: ModelDir,
    setting: Annotated[
        str | None, typer.Option("--setting", help="Whose test pictures; that of MODEL's own run.")
    ] = None,
    data_dir: DataDir = None,
) -> None:
    """Score a model; in a run directory, write scores.json and predictions.npz as well.

    Example:

        ncdwf evaluate both
    """
    check_learnt(model)
    setting = setting or recorded_config(model, None, option="--setting").setting
    fetch(setting, data_dir)
    scores = experiment.evaluate_stage(model, setting, data_dir=data_dir)
    print_scores(scores, f"{model} on {setting}")


def list_all(data_dir: DataDir = None) -> None:
    """List the settings and the methods.

    Example:

        ncdwf list
    """
    settings = Table(title="Settings", title_justify="left")
    for column in ("setting", "known", "novel", "state"):
        settings.add_column(column, overflow="fold")  # what is cut off cannot be told apart
    for name in SETTINGS:
        setting = Setting.parse(name)
        known, novel = len(setting.known_classes), len(setting.novel_classes)
        settings.add_row(name, str(known), str(novel), _state(setting.data, data_dir))
    methods = Table("method", "what it is", title="Methods", title_justify="left")
    for name, method in sorted(METHODS.items()):
        methods.add_row(name, (method.__doc__ or "").splitlines()[0])
    out.print(settings)
    out.print(
        "Other numbers of classes do as well, and so do other splits: cifar100-80-20-proxy-60-20 "
        "(known classes alone), cifar100-80-20-mixed-50 (half of the pool is known), "
        "cifar100-80-20-imbalance-10 (classes of unequal size).",
        highlight=False,
        soft_wrap=True,
    )
    out.print(methods)


def _state(data: str, data_dir: Path | None) -> str:
    """Return what stands between a data set and a run of it, or that nothing does."""
    found = DATA_SETS[data]
    if found.missing or data not in RECIPES:
        return found.missing or "no recipe yet"
    return (found.lacking and found.lacking(data_dir)) or "ready"


class _resumable:
    """Say how to go on when somebody presses Ctrl-C."""

    def __init__(self, work: Run) -> None:
        self._work = work

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            raise Interrupted(f"Go on with: {go_on(sys.argv[1], self._work.path)}")

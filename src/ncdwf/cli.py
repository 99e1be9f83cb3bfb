"""The command line: one verb, one short function."""

import io
import sys
from collections import Counter
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Annotated

import numpy as np
import torch
import typer
from rich.table import Table

from ncdwf import __version__, storage
from ncdwf.config import Config, OwnData, override
from ncdwf.console import (
    Bar,
    Format,
    err,
    out,
    print_choices,
    print_holdings,
    print_rows,
    print_scores,
    print_skipped,
)
from ncdwf.data.cifar import DATA_VARIABLE
from ncdwf.data.folder import (
    Listing,
    decode,
    find_pictures,
    labelled_folder,
    labelled_table,
    survey,
    unlabelled,
)
from ncdwf.data.inputs import Inputs
from ncdwf.data.setting import DATA_SETS, SETTINGS, Setting
from ncdwf.errors import InputError, NcdwfError
from ncdwf.estimator import LARGEST_IMAGE_SIZE
from ncdwf.export import export_onnx
from ncdwf.learning.discovery import METHODS, check_method, check_pool
from ncdwf.learning.loop import choose_device
from ncdwf.model import Model
from ncdwf.model.model import DESCRIPTION_FILE
from ncdwf.recipes import (
    LARGEST_SIDE,
    RECIPES,
    fit_discovery,
    fit_supervised,
    own_data,
    recipe,
)
from ncdwf.results import experiment, illustrations, tables
from ncdwf.results.benchmark import Bench, read_lines
from ncdwf.results.experiment import Run
from ncdwf.results.grids import CONFUSION, GRIDS, MATURITY

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Novel class discovery without forgetting.",
    epilog="Start with `ncdwf run`: both phases on the embedded digits, about a minute on a CPU.",
)
NAMES = (*tables.TABLES, "figures")

SettingName = Annotated[
    str | None,
    typer.Argument(metavar="SETTING", help="digits-5-5 by default; `ncdwf list` shows them."),
]
ModelDir = Annotated[Path, typer.Argument(metavar="MODEL", help="A run or model directory.")]
OutDir = Annotated[
    Path | None, typer.Option("--out", "-o", help="Directory to write; a new one below runs/.")
]
Sets = Annotated[
    list[str] | None,
    typer.Option("--set", metavar="KEY=VALUE", help="Override any field; may be repeated."),
]
MethodName = Annotated[str | None, typer.Option("--method", "-m", help="Discovery method.")]
Seed = Annotated[int | None, typer.Option("--seed", "-s", help="Decides every random draw.")]
ConfigFile = Annotated[
    Path | None, typer.Option("--config", help="Replay the config.json of another run.")
]
ResumeDir = Annotated[
    Path | None, typer.Option("--resume", metavar="DIR", help="Go on with a run that was cut off.")
]
Strict = Annotated[bool, typer.Option("--strict", help="Refuse all if one picture cannot be read.")]

DataDir = Annotated[
    Path | None,
    typer.Option(
        "--data", envvar=DATA_VARIABLE, help="Where data sets lie, and are downloaded to."
    ),
]


@dataclass(frozen=True, kw_only=True, slots=True)
class Changes:
    """What the options of a command change in a recipe."""

    method: str | None = None
    seed: int | None = None
    sets: tuple[str, ...] = ()
    data_dir: Path | None = None

    def apply(self, config: Config) -> Config:
        """Return the changed configuration, complete, once it is clear that it can be run."""
        if self.method is not None and self.method != config.method["name"]:
            check_method(self.method)
            other = recipe(config.setting, self.method)
            config = replace(config, method=other.method, discovery=other.discovery)
        config = self.override(config)
        _fetch(config.setting, self.data_dir)
        experiment.check(config, self.data_dir)
        return config

    def override(self, config: Config) -> Config:
        """Return the configuration with the seed and the single fields changed, complete."""
        if self.seed is not None:
            config = replace(config, seed=self.seed)
        config = experiment.complete(config)
        for assignment in self.sets:
            config = override(config, assignment)
        return experiment.complete(config)


@app.command()
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
    changes = Changes(method=method, seed=seed, sets=tuple(sets or ()), data_dir=data_dir)
    work = _begin(setting, out_dir, resume, config_file, changes)
    if work.config.own is not None:
        raise InputError(
            f"{work.path} is of pictures of your own; go on with 'ncdwf learn --resume' or "
            "'ncdwf discover --resume'"
        )
    with _resumable(work), Bar() as bar:
        scores = experiment.execute(work, bar, data_dir=data_dir)
    config = work.config
    print_scores(scores, f"{config.method['name']} on {config.setting}, seed {config.seed}")
    out.print(f"Written to {work.path}", soft_wrap=True)


@app.command()
def learn(
    setting: SettingName = None,
    images: Annotated[
        Path | None,
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
    changes = Changes(seed=seed, sets=tuple(sets or ()), data_dir=data_dir)
    load: Callable[[], experiment.Labelled] | None = None
    if images is None:
        if strict or image_size is not None or backbone is not None:
            raise InputError("--image-size, --backbone and --strict go with --images")
        work = _begin(setting, out_dir, resume, config_file, changes)
    elif any(other is not None for other in (setting, config_file, resume)):
        raise InputError("--images takes the place of SETTING, --config and --resume")
    else:
        _check_free(out_dir)
        config = _own_config(images, image_size, backbone, strict, changes)
        work, load = _own_classes(config, out_dir)
    with _resumable(work), Bar() as bar:
        experiment.learn_stage(work, load or _labelled(work.config, data_dir, bar), bar)
    out.print(f"A model of the known classes is in {work.path}", soft_wrap=True)


@app.command()
def discover(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL")] = None,
    images: Annotated[
        list[Path] | None,
        typer.Option(help="Your own pictures without labels: a folder or a file; repeatable."),
    ] = None,
    num_novel: Annotated[
        int | None, typer.Option("--num-novel", "-n", min=1, help="Classes to look for.")
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

    A model that has discovered already begins another round: its novel classes are known ones.

    Examples:

        ncdwf discover known --images unsorted/ --num-novel 5 --out both

        ncdwf discover known --out both --method ncdwf --set method.tau=0.9

        ncdwf discover --resume both
    """
    changes = Changes(method=method, seed=seed, sets=tuple(sets or ()), data_dir=data_dir)
    load: Callable[[], Inputs] | None = None
    if not images and (strict or num_novel is not None):
        raise InputError("--num-novel and --strict go with --images")
    if resume is not None:
        work = _reopen_round(resume, changes, model, out_dir, setting, images)
    elif model is None:
        raise InputError("discover needs MODEL, a directory that 'ncdwf learn' wrote, or --resume")
    elif images:
        if setting is not None:
            raise InputError("--images takes the place of --setting")
        _check_free(out_dir)
        work, load = _own_round(model, images, num_novel, strict, out_dir, changes)
    else:
        work = _round(model, setting, out_dir, changes)
    with _resumable(work), Bar() as bar:
        experiment.discover_stage(work, load or _pool(work.config, data_dir, bar), bar)
    found = ", ".join(Model.load(work.path).novel_names)
    out.print(f"A model of known and novel classes ({found}) is in {work.path}", soft_wrap=True)


@app.command()
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
    setting = setting or _recorded(model, None, option="--setting").setting
    _fetch(setting, data_dir)
    scores = experiment.evaluate_stage(model, setting, data_dir=data_dir)
    print_scores(scores, f"{model} on {setting}")


@app.command()
def predict(
    model: ModelDir,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Picture files or folders.")],
    form: Annotated[Format, typer.Option("--format", "-f")] = Format.table,
    strict: Strict = False,
) -> None:
    """Name pictures: a known class or novel-1, novel-2, …; nobody says which kind they are.

    Pictures are turned upright, their shorter side is scaled and the middle is cut out.

    Examples:

        ncdwf predict runs/digits-5-5-ncdwf-seed0 photos/

        ncdwf predict runs/digits-5-5-ncdwf-seed0 a.png b.png --format csv
    """
    loaded = experiment.load_model(model)
    files = find_pictures(paths)
    with Bar() as bar:
        decoded = decode(files, _picture_shape(loaded), strict=strict, progress=bar)
    print_skipped(decoded.skipped)
    answers = loaded.to(choose_device("auto")).predict(decoded.images)
    columns = (answers.labels, answers.probability, answers.novelty)
    rows = [
        {
            "path": str(files[row]),
            "class": loaded.class_names[label],
            "probability": round(probability, 4),
            "head": "novel" if label >= loaded.num_known else "known",
            "novelty": round(novelty, 4),
        }
        for row, label, probability, novelty in zip(
            decoded.kept, *(column.tolist() for column in columns), strict=True
        )
    ]
    print_rows(rows, form)


@app.command()
def name(
    model: ModelDir,
    names: Annotated[list[str], typer.Argument(metavar="OLD=NEW…", help="As novel-1=kakapo.")],
) -> None:
    """Give classes other names.

    Example:

        ncdwf name both novel-1=kakapo novel-2="black robin"
    """
    pairs: dict[str, str] = {}
    for text in names:
        old, _, new = text.partition("=")
        if not (old and new):
            raise InputError(f"{text!r} should be written OLD=NEW, as in novel-1=kakapo")
        if old in pairs:
            raise InputError(f"{old!r} would be called {pairs[old]!r} and {new!r}; give one name")
        pairs[old] = new
    _check_text(*pairs.values())
    directory = experiment.model_dir(model)
    loaded = Model.load(directory)
    loaded.rename(pairs)
    loaded.save_names(directory)
    out.print(f"The classes of {model}: {', '.join(loaded.class_names)}", soft_wrap=True)


@app.command()
def export(
    model: ModelDir,
    onnx: Annotated[Path, typer.Option("--onnx", help="File to write.")],
) -> None:
    """Write a model as one ONNX graph: pictures in, class probabilities and P(novel) out.

    Example:

        ncdwf export both --onnx birds.onnx
    """
    export_onnx(experiment.load_model(model), onnx)
    out.print(f"Written to {onnx}, and it answers as the model does", soft_wrap=True)


@app.command()
def inspect(model: ModelDir) -> None:
    """List everything that a saved model holds, and what each part is derived from.

    Example:

        ncdwf inspect runs/digits-5-5-ncdwf-seed0
    """
    loaded = experiment.load_model(model)
    holdings = loaded.holdings()
    print_holdings(str(model), holdings)
    total = sum(item.num_bytes for item in holdings)
    out.print(f"Together {total:,} bytes. Beside them: the shapes above and the class names")
    out.print(f"{', '.join(loaded.class_names)}.", soft_wrap=True)
    out.print(
        "No picture, no vector, label or file name of a single picture is stored. The discovery "
        "phase receives the pool alone. Weights and "
        "class statistics can still tell, to a degree, whether a given picture was among the "
        "labelled ones; richer statistics (supervised.spread) tell more.",
        soft_wrap=True,
    )


@app.command()
def reproduce(
    name: Annotated[str, typer.Argument(metavar="TABLE", help=", ".join(NAMES))],
    results: Annotated[
        Path, typer.Option("--results", help="One line a finished run; new ones are added.")
    ] = Path("results/runs.jsonl"),
    work_dir: Annotated[
        Path, typer.Option("--work", help="Where unfinished runs are kept and resumed from.")
    ] = Path("runs/reproduce"),
    docs: Annotated[
        list[Path] | None, typer.Option("--docs", help="Documents whose tables to fill in.")
    ] = None,
    settings: Annotated[
        list[str] | None, typer.Option("--setting", help="Run these alone; may be repeated.")
    ] = None,
    seeds: Annotated[
        list[int] | None, typer.Option("--seed", help="Run these alone; may be repeated.")
    ] = None,
    figures_dir: Annotated[
        Path, typer.Option("--figures", help="Where `reproduce figures` draws.")
    ] = Path("docs/figures"),
    data_dir: DataDir = None,
) -> None:
    """Run (or resume) the runs behind a table or the figures, and print the table.

    Examples:

        ncdwf reproduce digits --docs docs/digits.md

        ncdwf reproduce main --data DIR --docs docs/results.md --docs README.md

        ncdwf reproduce main --data DIR --setting cifar10-5-5 --seed 0

        ncdwf reproduce figures --data DIR
    """
    if name not in NAMES:
        raise InputError(f"unknown table {name!r}; there are {', '.join(NAMES)}")
    texts = {path: storage.read_bytes(path).decode() for path in docs or ()}
    with Bar() as bar:
        bench = Bench(results=results, work_dir=work_dir, data_dir=data_dir, progress=bar)
        grid = GRIDS.get(tables.GRID_OF.get(name, ""))
        cells = [MATURITY, CONFUSION] if grid is None else list(grid.cells())
        wanted = [
            cell
            for cell in cells
            if cell.setting in (settings or [cell.setting]) and cell.seed in (seeds or [cell.seed])
        ]
        if not wanted:
            raise InputError(
                f"no run of {name!r} fits --setting and --seed; "
                f"it has {', '.join(sorted({cell.setting for cell in cells}))}"
            )
        for line in bench.reproduce(wanted):
            keys = ("setting", "method", "variant", "seed")
            err.print(*(line[key] for key in keys), "done", highlight=False)
    lines = read_lines(results)
    blocks = tables.blocks(lines)
    for block in tables.TABLES.get(name, ()):
        out.print(f"{block}\n\n{blocks[block]}", soft_wrap=True, highlight=False)
    for path, text in texts.items():
        storage.write_bytes(path, tables.fill(text, blocks).encode())
    if name == "figures":
        for path in illustrations.draw(lines, results.parent, figures_dir):
            out.print(f"Drawn: {path}", soft_wrap=True)


@app.command("list")
def list_all() -> None:
    """List the settings and the methods.

    Example:

        ncdwf list
    """
    settings = Table("setting", "known", "novel", "state", title="Settings", title_justify="left")
    for name in SETTINGS:
        setting = Setting.parse(name)
        state = "ready" if setting.data in RECIPES else "no recipe yet"
        state = DATA_SETS[setting.data].missing or state
        known, novel = len(setting.known_classes), len(setting.novel_classes)
        settings.add_row(name, str(known), str(novel), state)
    methods = Table("method", "what it is", title="Methods", title_justify="left")
    for name, method in sorted(METHODS.items()):
        methods.add_row(name, (method.__doc__ or "").splitlines()[0])
    out.print(settings, methods)


@app.callback(invoke_without_command=True)
def _root(
    version: Annotated[bool, typer.Option("--version", help="Print the version.")] = False,
) -> None:
    if version:
        out.print(f"ncdwf {__version__}")
        raise typer.Exit


def main() -> None:
    """Run the command line; a problem that the user can mend is one line and exit code 2."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # names of files may hold any bytes
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        app()
    except NcdwfError as error:
        err.print(f"ncdwf: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


def _fetch(setting: str, data_dir: Path | None) -> None:
    """Download what a setting needs, unless it is there."""
    with Bar(unit="kB", size=1000) as bar:
        Setting.parse(setting).fetch(data_dir, bar)


class _resumable:
    """Say how to go on when somebody presses Ctrl-C."""

    def __init__(self, work: Run) -> None:
        self._work = work

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if kind is not None and issubclass(kind, KeyboardInterrupt):
            hint = f"Interrupted. Go on with: ncdwf {sys.argv[1]} --resume {self._work.path}"
            err.print(hint, markup=False, highlight=False, soft_wrap=True)


def _begin(
    setting: str | None,
    out_dir: Path | None,
    resume: Path | None,
    file: Path | None,
    changes: Changes,
) -> Run:
    if resume is not None:
        return _reopen(resume, changes, setting, out_dir, file)
    if file is not None and setting is not None:
        raise InputError("--config names the setting already; give one of the two")
    start = experiment.read_config(file) if file else _recipe(setting or "digits-5-5")
    if start.own is not None:
        raise InputError(f"{file} is of pictures of your own; 'ncdwf learn --images' takes them")
    config = changes.apply(start)
    return Run.create(_directory(out_dir, config), config)


def _reopen(resume: Path, changes: Changes, *others: object) -> Run:
    if any(other is not None for other in others) or changes != Changes(data_dir=changes.data_dir):
        raise InputError(
            "--resume goes on with the run's own configuration; give nothing beside it but --data"
        )
    return Run.open(resume)


def _reopen_round(resume: Path, changes: Changes, *others: object) -> Run:
    work = _reopen(resume, changes, *others)
    own = work.config.own
    if own is not None and not own.pool:
        raise InputError(f"{resume} has no pool yet; 'ncdwf discover {resume} --images' takes one")
    return work


def _recipe(setting: str) -> Config:
    data = Setting.parse(setting).data
    if data not in RECIPES:
        reason = DATA_SETS[data].missing or f"a recipe for {data} comes with a later release"
        raise InputError(f"setting {setting!r} cannot be run yet: {reason}")
    return recipe(setting)


def _round(model: Path, setting: str | None, out_dir: Path | None, changes: Changes) -> Run:
    """Begin a round of discovery in the pool of a setting."""
    start = experiment.load_supervised(model)
    recorded = _recorded(model, setting, option="--images")
    config = changes.apply(recorded)
    _check_over(config, recorded)
    if setting is not None:
        start[0].check(experiment.pool_of(config.setting, changes.data_dir)[:1])
    return Run.create(_directory(out_dir, config), config, start)


def _check_over(config: Config, recorded: Config) -> None:
    if (config.supervised, config.backbone) != (recorded.supervised, recorded.backbone):
        raise InputError("discover cannot change supervised or backbone: that phase is over")


def _recorded(model: Path, setting: str | None, *, option: str) -> Config:
    """Return the configuration of the run in `model`, turned to `setting` if one is named.

    A model without its run gets the recipe of `setting`. Where the run has no setting, `option`
    names other pictures.
    """
    if (model / experiment.CONFIG_FILE).exists():
        config = Run.open(model).config
        if setting is None:
            if config.own is not None:
                raise InputError(
                    f"{model} learnt from pictures of your own; {option} says which ones to take"
                )
            return config
        num_novel = len(Setting.parse(setting).novel_classes)
        discovery = replace(config.discovery, num_novel=num_novel)
        return replace(config, setting=setting, discovery=discovery, own=None)
    if setting is not None:
        return _recipe(setting)
    if not model.exists():
        raise InputError(f"{model} does not exist")
    raise InputError(f"{model} holds no {experiment.CONFIG_FILE}; name the setting with --setting")


def _check_free(out_dir: Path | None) -> None:
    """Refuse a directory with a run or a model before many pictures are read for nothing."""
    if out_dir is None:
        return
    with suppress(OSError):  # such a path is refused when it is written
        if any((out_dir / name).exists() for name in (experiment.CONFIG_FILE, DESCRIPTION_FILE)):
            raise InputError(f"{out_dir} holds a run or a model already; choose another directory")


def _directory(out_dir: Path | None, config: Config) -> Path:
    return out_dir or experiment.new_run_dir(Path("runs"), config)


def _own_config(
    images: Path, image_size: int | None, backbone: str | None, strict: bool, changes: Changes
) -> Config:
    """Return the configuration that follows from somebody's labelled pictures."""
    _check_text(images.resolve())
    listing = _labelled_listing(images)
    found, has_gpu = survey(listing.paths), choose_device("auto").type == "cuda"
    side = image_size or min(found.median_side, LARGEST_SIDE[has_gpu])
    shape = (3 if found.has_colour else 1, side, side)
    config = fit_supervised(
        own_data(shape, backbone=backbone, has_gpu=has_gpu), len(listing.paths), has_gpu=has_gpu
    )
    own = OwnData(shape=shape, labelled=str(images.resolve()), strict=strict)
    config = changes.override(replace(config, own=own))
    experiment.check_shape(config, shape)
    return config


def _own_classes(
    config: Config, out_dir: Path | None
) -> tuple[Run, Callable[[], experiment.Labelled]]:
    """Begin a supervised phase once its pictures are read: what is refused leaves no run behind."""
    with Bar() as bar:
        labelled = _labelled(config, None, bar)()
    work = Run.create(_directory(out_dir, config), config)
    print_choices(config, "supervised", pictures=len(labelled[0]), classes=len(labelled[2]))
    return work, lambda: labelled


def _own_round(
    model: Path,
    images: list[Path],
    num_novel: int | None,
    strict: bool,
    out_dir: Path | None,
    changes: Changes,
) -> tuple[Run, Callable[[], Inputs]]:
    """Begin a round of discovery in somebody's unlabelled pictures, once they are read."""
    if num_novel is None:
        raise InputError("discover needs --num-novel with --images: how many classes to look for")
    _check_text(*(path.resolve() for path in images))
    start = experiment.load_model(model)
    shape, num_pictures = _picture_shape(start), len(unlabelled(images).paths)
    has_gpu = choose_device("auto").type == "cuda"
    name = check_method(changes.method or "ncdwf")
    config = own_data(shape, method=name, backbone=start.architecture.backbone, has_gpu=has_gpu)
    if (model / experiment.CONFIG_FILE).exists():
        recorded = Run.open(model).config
        config = replace(config, supervised=recorded.supervised, seed=recorded.seed)
    config = fit_discovery(config, num_pictures, num_novel, has_gpu=has_gpu)
    own = OwnData(shape=shape, pool=tuple(str(path.resolve()) for path in images), strict=strict)
    recorded, config = config, changes.override(replace(config, own=own))
    _check_over(config, recorded)
    experiment.check_shape(config, shape)
    check_pool(num_pictures, config.discovery.num_novel)
    with Bar() as bar:
        pool = _pool(config, None, bar)()
    check_pool(len(pool), config.discovery.num_novel)
    work = Run.create(_directory(out_dir, config), config, (start, []))
    print_choices(config, "discovery", pictures=len(pool))
    return work, lambda: pool


def _labelled_listing(images: Path) -> Listing:
    if images.is_dir():
        return labelled_folder(images)
    if not images.exists():
        raise InputError(f"{images} does not exist; a folder or a table of pictures is accepted")
    return labelled_table(images)


def _check_text(*words: object) -> None:
    """Refuse names that no file of text can hold: they were written in no known encoding."""
    for word in map(str, words):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the name {word!a} is not valid text; choose another") from error


def _picture_shape(model: Model) -> tuple[int, int, int]:
    shape = model.architecture.input_shape
    if len(shape) == 1:
        raise InputError(f"this model reads vectors of {shape[0]} numbers, not pictures")
    return shape[0], shape[1], shape[2]


def _labelled(config: Config, data_dir: Path | None, bar: Bar) -> Callable[[], experiment.Labelled]:
    """Return how the labelled pictures of a run are read."""
    if config.own is None:
        return partial(experiment.labelled_of, config.setting, data_dir)
    own = config.own

    def read() -> experiment.Labelled:
        if not own.labelled:
            raise InputError("this run began with a model, without labelled pictures")
        listing = _labelled_listing(Path(own.labelled))
        assert listing.labels is not None
        _check_text(*set(listing.labels))
        decoded = decode(listing.paths, own.shape, strict=own.strict, progress=bar)  # type: ignore[arg-type]
        print_skipped(decoded.skipped)
        labels = [listing.labels[row] for row in decoded.kept]
        counts = Counter(labels)
        for name in sorted(set(listing.labels)):
            if counts[name] < 2:
                raise InputError(
                    f"of class {name!r} {counts[name]} pictures can be read; 2 or more are needed"
                )
        names, codes = np.unique(labels, return_inverse=True)
        return decoded.images, torch.from_numpy(codes), tuple(names.tolist())

    return read


def _pool(config: Config, data_dir: Path | None, bar: Bar) -> Callable[[], Inputs]:
    """Return how the pool of a run is read."""
    if config.own is None:
        return partial(experiment.pool_of, config.setting, data_dir)
    own = config.own

    def read() -> Inputs:
        listing = unlabelled(map(Path, own.pool))
        decoded = decode(listing.paths, own.shape, strict=own.strict, progress=bar)  # type: ignore[arg-type]
        print_skipped(decoded.skipped)
        return decoded.images

    return read

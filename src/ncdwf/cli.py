"""The command line: one verb, one short function."""

import csv
import json
import sys
from dataclasses import dataclass, replace
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import torch
import typer
from rich.console import Console
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table

from ncdwf import __version__, storage
from ncdwf.config import RECIPES, Config, override, recipe
from ncdwf.data.cifar import DATA_VARIABLE
from ncdwf.data.folder import find_pictures, read_picture
from ncdwf.data.setting import DATA_SETS, SETTINGS, Setting
from ncdwf.errors import InputError, NcdwfError
from ncdwf.learning.discovery import METHODS, check_method
from ncdwf.model import Model
from ncdwf.results import experiment, illustrations, tables
from ncdwf.results.benchmark import Bench, read_lines
from ncdwf.results.evaluation import PAPER_TAU, Routed, Scores
from ncdwf.results.experiment import Run
from ncdwf.results.grids import CONFUSION, GRIDS, MATURITY

app = typer.Typer(
    no_args_is_help=True,
    rich_markup_mode="markdown",
    pretty_exceptions_enable=False,
    help="Novel class discovery without forgetting.",
    epilog="Start with `ncdwf run`: both phases on the embedded digits, about a minute on a CPU.",
)
out = Console()
err = Console(stderr=True)

PICTURES_AT_ONCE = 1024
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
        if self.seed is not None:
            config = replace(config, seed=self.seed)
        config = experiment.complete(config)
        for assignment in self.sets:
            config = override(config, assignment)
        _fetch(config.setting, self.data_dir)
        experiment.check(config, self.data_dir)
        return experiment.complete(config)


class Format(StrEnum):
    """How `predict` writes its answers."""

    table = "table"
    csv = "csv"
    json = "json"


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
    with _resumable(work), Bar() as bar:
        scores = experiment.execute(work, bar, data_dir=data_dir)
    config = work.config
    _print_scores(scores, f"{config.method['name']} on {config.setting}, seed {config.seed}")
    out.print(f"Written to {work.path}", soft_wrap=True)


@app.command()
def learn(
    setting: SettingName = None,
    out_dir: OutDir = None,
    seed: Seed = None,
    sets: Sets = None,
    config_file: ConfigFile = None,
    resume: ResumeDir = None,
    data_dir: DataDir = None,
) -> None:
    """Do the supervised phase alone: learn the known classes and save a model without pictures.

    Examples:

        ncdwf learn digits-5-5 --out known

        ncdwf learn --resume known
    """
    changes = Changes(seed=seed, sets=tuple(sets or ()), data_dir=data_dir)
    work = _begin(setting, out_dir, resume, config_file, changes)
    with _resumable(work), Bar() as bar:
        experiment.learn_stage(work, bar, data_dir=data_dir)
    out.print(f"A model of the known classes is in {work.path}", soft_wrap=True)


@app.command()
def discover(
    model: Annotated[Path | None, typer.Argument(metavar="MODEL")] = None,
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
    """Do the discovery phase alone, from a saved model and the unlabelled pool of a setting.

    Examples:

        ncdwf discover known --out both

        ncdwf discover known --method ncdwf --set method.tau=0.9

        ncdwf discover --resume both
    """
    changes = Changes(method=method, seed=seed, sets=tuple(sets or ()), data_dir=data_dir)
    if resume is not None:
        work = _reopen(resume, changes, model, out_dir, setting)
    elif model is None:
        raise InputError("discover needs MODEL, a directory that 'ncdwf learn' wrote, or --resume")
    else:
        start = experiment.load_supervised(model)
        recorded = _recorded(model, setting)
        config = changes.apply(recorded)
        if (config.supervised, config.backbone) != (recorded.supervised, recorded.backbone):
            raise InputError("discover cannot change supervised or backbone: that phase is over")
        work = Run.create(_directory(out_dir, config), config, start)
    with _resumable(work), Bar() as bar:
        experiment.discover_stage(work, bar, data_dir=data_dir)
    out.print(f"A model of known and novel classes is in {work.path}", soft_wrap=True)


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
    setting = setting or _recorded(model, None).setting
    _fetch(setting, data_dir)
    scores = experiment.evaluate_stage(model, setting, data_dir=data_dir)
    _print_scores(scores, f"{model} on {setting}")


@app.command()
def predict(
    model: ModelDir,
    paths: Annotated[list[Path], typer.Argument(metavar="PATH…", help="Picture files or folders.")],
    form: Annotated[Format, typer.Option("--format", "-f")] = Format.table,
) -> None:
    """Name pictures: a known class or novel-1, novel-2, …; nobody says which kind they are.

    Pictures are turned upright and scaled to the size that the model learnt.

    Examples:

        ncdwf predict runs/digits-5-5-ncdwf-seed0 photos/

        ncdwf predict runs/digits-5-5-ncdwf-seed0 a.png b.png --format csv
    """
    loaded = experiment.load_model(model)
    rows = []
    files = find_pictures(paths)
    with Bar() as bar:
        bar.start("predict", len(files), 0)
        for first in range(0, len(files), PICTURES_AT_ONCE):
            rows += _predict_files(loaded, files[first : first + PICTURES_AT_ONCE])
            bar.advance(len(files[first : first + PICTURES_AT_ONCE]))
    if not rows:
        raise InputError("none of the files could be read as a picture")
    _print_rows(rows, form)


@app.command()
def inspect(model: ModelDir) -> None:
    """List everything that a saved model holds, and what each part is derived from.

    Example:

        ncdwf inspect runs/digits-5-5-ncdwf-seed0
    """
    loaded = experiment.load_model(model)
    holdings = loaded.holdings()
    table = Table("derived from, tensor", "shape", title=str(model), title_justify="left")
    table.add_column("bytes", justify="right")
    for source in dict.fromkeys(item.derived_from for item in holdings):
        table.add_section()
        table.add_row(f"[bold]{source}[/bold]")
        for item in holdings:
            if item.derived_from == source:
                shape = "×".join(map(str, item.shape)) or "scalar"
                table.add_row(f"  {item.name}", shape, f"{item.num_bytes:,}")
    out.print(table)
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
    try:
        app()
    except NcdwfError as error:
        err.print(f"ncdwf: {error}", style="red", markup=False, highlight=False, soft_wrap=True)
        sys.exit(2)


class Bar:
    """A progress bar with pictures a second and the time left; silent when nobody watches."""

    def __init__(self, unit: str = "images", size: int = 1) -> None:
        self._unit, self._size = unit, size
        self._bars = Bars(
            TextColumn("{task.description:>10}"),
            BarColumn(),
            TextColumn("{task.percentage:3.0f} %"),
            TextColumn("{task.fields[rate]}"),
            TimeElapsedColumn(),
            TextColumn("left"),
            TimeRemainingColumn(),
            console=err,
            disable=not err.is_terminal,
        )
        self._task = self._bars.add_task("", total=None, rate="")
        self._bars.remove_task(self._task)

    def __enter__(self) -> "Bar":
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bars.stop()

    def start(self, task: str, num_images: int, done: int) -> None:
        """Begin a task."""
        self._task = self._bars.add_task(task, total=num_images, completed=done, rate="")

    def advance(self, num_images: int) -> None:
        """Count in the pictures of one step."""
        self._bars.advance(self._task, num_images)
        speed = self._bars.tasks[-1].speed
        if speed:
            self._bars.update(self._task, rate=f"{speed / self._size:,.0f} {self._unit}/s")

    def stop(self) -> None:
        """End the task; its bar stays."""


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
    config = changes.apply(start)
    return Run.create(_directory(out_dir, config), config)


def _reopen(resume: Path, changes: Changes, *others: object) -> Run:
    if any(other is not None for other in others) or changes != Changes(data_dir=changes.data_dir):
        raise InputError(
            "--resume goes on with the run's own configuration; give nothing beside it but --data"
        )
    return Run.open(resume)


def _recipe(setting: str) -> Config:
    data = Setting.parse(setting).data
    if data not in RECIPES:
        reason = DATA_SETS[data].missing or f"a recipe for {data} comes with a later release"
        raise InputError(f"setting {setting!r} cannot be run yet: {reason}")
    return recipe(setting)


def _recorded(model: Path, setting: str | None) -> Config:
    """Return the configuration of the run in `model`, turned to `setting` if one is named.

    A model without its run gets the recipe of `setting`.
    """
    if (model / experiment.CONFIG_FILE).exists():
        config = Run.open(model).config
        if setting is None:
            return config
        num_novel = len(Setting.parse(setting).novel_classes)
        discovery = replace(config.discovery, num_novel=num_novel)
        return replace(config, setting=setting, discovery=discovery)
    if setting is not None:
        return _recipe(setting)
    if not model.exists():
        raise InputError(f"{model} does not exist")
    raise InputError(f"{model} holds no {experiment.CONFIG_FILE}; name the setting with --setting")


def _directory(out_dir: Path | None, config: Config) -> Path:
    return out_dir or experiment.new_run_dir(Path("runs"), config)


def _predict_files(model: Model, files: list[Path]) -> list[dict[str, Any]]:
    shape = (model.architecture.num_channels, model.architecture.height, model.architecture.width)
    readable, pictures = [], []
    for path in files:
        try:
            pictures.append(read_picture(path, *shape))
            readable.append(path)
        except InputError as error:
            err.print(f"skipped: {error}", markup=False, highlight=False, soft_wrap=True)
    if not pictures:
        return []
    answers = model.predict(torch.stack(pictures))
    return [
        {
            "path": str(path),
            "class": model.class_names[label],
            "probability": round(probability, 4),
            "head": "novel" if label >= model.num_known else "known",
            "novelty": round(novelty, 4),
        }
        for path, label, probability, novelty in zip(
            readable,
            answers.labels.tolist(),
            answers.probability.tolist(),
            answers.novelty.tolist(),
            strict=True,
        )
    ]


def _print_rows(rows: list[dict[str, Any]], form: Format) -> None:
    if form is Format.json:
        out.print_json(json.dumps(rows))
    elif form is Format.csv:
        writer = csv.DictWriter(sys.stdout, rows[0])
        writer.writeheader()
        writer.writerows(rows)
    else:
        table = Table(*rows[0])
        for row in rows:
            table.add_row(*(str(value) for value in row.values()))
        out.print(table)


def _print_scores(scores: Scores, title: str) -> None:
    table = Table("accuracy in %", title=title, title_justify="left")
    for column in ("known", "novel", "all"):
        table.add_column(column, justify="right")
    after = scores.after_supervised["known"]
    if after is not None:
        table.add_row("after the supervised phase", f"{after:.2f}", "", "")
    aware = scores.aware
    table.add_row("task-aware", *(f"{v:.2f}" for v in (aware.known, aware.novel, aware.all)))
    for name, entries in (("task-agnostic", scores.agnostic), ("strict", scores.strict)):
        own = entries[scores.default_rule]
        # scores.json has the other thresholds of the paper's table too.
        for entry in [e for e in entries if e.tau == PAPER_TAU and e is not own] + [own]:
            mark = " *" if entry is own else ""
            table.add_row(f"{name}, {_rule(entry)}{mark}", *_figures(entry))
    for name, text in (("pixels", "raw pixels"), ("features", "supervised features")):
        if name in scores.kmeans:
            table.add_row(f"k-means on {text}", "", f"{scores.kmeans[name]:.2f}", "")
    out.print(table)
    forgetting = "" if scores.forgetting is None else f"forgetting {scores.forgetting:.2f} · "
    out.print(
        f"{forgetting}AUROC of the routing {scores.auroc:.3f} · NMI {scores.nmi:.3f} · "
        f"ARI {scores.ari:.3f} · * the rule that the model itself uses",
        highlight=False,
    )


def _rule(entry: Routed) -> str:
    return f"{entry.rule} τ={entry.tau:.4g}"


def _figures(entry: Routed) -> tuple[str, str, str]:
    return f"{entry.known:.2f}", f"{entry.novel:.2f}", f"{entry.all:.2f}"

"""The verb that runs what the tables and figures are made from."""

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

import typer

from ncdwf import storage
from ncdwf.cli.options import DataDir
from ncdwf.cli.runs import Interrupted, fetch
from ncdwf.console import Bar, err, out
from ncdwf.data.setting import DATA_SETS, Setting
from ncdwf.errors import InputError, counted, first_line
from ncdwf.results import observations, tables
from ncdwf.results.benchmark import Bench, read_lines
from ncdwf.results.grids import ABOUT, RUNS, Cell


def _about(name: str) -> str:
    """Return a line of help: what a table is, what it needs and how long it takes."""
    (title, minutes), cells = ABOUT[name], RUNS[name]
    time = f"about {minutes} minutes" if minutes else "less than a minute"
    needs_data = any(DATA_SETS[Setting.parse(cell.setting).data].fetch for cell in cells)
    needed = "; needs --data and a GPU" if needs_data else ""
    return f"- {name}: {title}{needed}; {len(cells)} runs × {time}"


def reproduce(
    name: Annotated[
        str, typer.Argument(metavar="TABLE", help="\n".join(_about(table) for table in RUNS))
    ],
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
        list[str] | None,
        typer.Option(
            "--setting", help="Its runs of this setting alone, as cifar10-5-5; repeatable."
        ),
    ] = None,
    methods: Annotated[
        list[str] | None,
        typer.Option("--method", "-m", help="Its runs of this method alone, as uno; repeatable."),
    ] = None,
    seeds: Annotated[
        list[int] | None,
        typer.Option("--seed", help="Its runs of this seed alone, as 0; repeatable."),
    ] = None,
    variants: Annotated[
        list[str] | None,
        typer.Option(
            "--variant", help="Its runs of this row alone, as beta-1-1 of alpha; repeatable."
        ),
    ] = None,
    figures_dir: Annotated[
        Path, typer.Option("--figures", help="Where `reproduce figures` draws.")
    ] = Path("docs/figures"),
    data_dir: DataDir = None,
) -> None:
    """Run (or resume) the runs behind a table or the figures, and print the table.

    On a machine with several GPUs start it once for each: a run that another process is at is left
    to it, and a supervised phase that both need is waited for.

    Examples:

        ncdwf reproduce digits --docs docs/digits.md

        ncdwf reproduce main --data DIR --docs docs/results.md --docs README.md

        ncdwf reproduce main --data DIR --setting cifar10-5-5 --seed 0

        ncdwf reproduce alpha --data DIR --variant beta-1-1

        CUDA_VISIBLE_DEVICES=1 ncdwf reproduce main --data DIR

        ncdwf reproduce figures --data DIR
    """
    if name not in RUNS:
        raise InputError(f"unknown table {name!r}; there are {', '.join(RUNS)}")
    wanted = _wanted(name, settings or (), methods or (), seeds or (), variants or ())
    # What cannot be is refused before hours of runs.
    for path, text in _filled(docs or (), _blocks(results)).items():
        _check_document(name, path, text)
    bar = Bar()
    bench = Bench(results=results, work_dir=work_dir, data_dir=data_dir, progress=bar)
    _begin(name, bench, wanted)
    with bar:
        _work(bench, wanted)
    blocks = _blocks(results)
    for block in tables.TABLES.get(name, ()):
        out.print(f"{block}\n\n{blocks[block]}", soft_wrap=True, highlight=False)
    for path, text in _filled(docs or (), blocks).items():
        storage.write_bytes(path, text.encode())
    if name == "figures":
        from ncdwf.results import illustrations  # matplotlib takes half a second to import

        for path in illustrations.draw(read_lines(results), results.parent, figures_dir):
            out.print(f"Drawn: {path}", soft_wrap=True)


def _begin(name: str, bench: Bench, wanted: list[Cell]) -> None:
    """Download what is needed; say what is there and what is to do, so that a slip is noticed."""
    missing = bench.missing(wanted)
    for setting in dict.fromkeys(cell.setting for cell in missing):
        fetch(setting, bench.data_dir)  # refused without a word before, if it cannot be
    place = f"{bench.results.absolute()}{'' if bench.results.exists() else ', a new file'}"
    done = len(wanted) - len(missing)
    err.print(
        f"{name}: {counted(len(wanted), 'run')}, {done} done ({place}), {len(missing)} to do",
        highlight=False,
        soft_wrap=True,
    )


def _work(bench: Bench, wanted: list[Cell]) -> None:
    """Run what is missing, and say of every run that it is done or whose it is."""
    try:
        for line in bench.reproduce(wanted):
            keys = ("setting", "method", "variant", "seed")
            err.print(*(line[key] for key in keys), "done", highlight=False)
    except KeyboardInterrupt as error:
        raise Interrupted("The same command goes on with what is missing.") from error
    for cell in bench.missing(wanted):
        err.print(f"{cell.name} is being run by another process", highlight=False)


def _blocks(results: Path) -> dict[str, str]:
    lines, observed = read_lines(results), observations.read(results.parent)
    try:
        return tables.blocks(lines, observed)
    except (LookupError, TypeError, AttributeError) as error:
        raise InputError(f"a line of {results} lacks scores: {first_line(error)}") from error


def _filled(docs: Sequence[Path], blocks: dict[str, str]) -> dict[Path, str]:
    """Return the documents as they are now, with the tables filled in."""
    filled = {}
    for path in docs:
        try:
            filled[path] = tables.fill(storage.read_bytes(path).decode(), blocks)
        except UnicodeDecodeError as error:
            raise InputError(f"{path} is not a document in UTF-8") from error
    return filled


def _check_document(name: str, path: Path, text: str) -> None:
    """Refuse a document that none of the tables to be printed has a place in."""
    there, shown = tables.blocks_in(text), tables.TABLES.get(name, ())
    if not set(there) & set(shown):
        raise InputError(
            f"{path} has no generated block of {name!r}, which has {', '.join(shown) or 'none'}; "
            f"the document has {', '.join(there) or 'none'}"
        )


def _wanted(
    name: str,
    settings: Sequence[str],
    methods: Sequence[str],
    seeds: Sequence[int],
    variants: Sequence[str],
) -> list[Cell]:
    """Return the runs of a table that the options leave; refuse what the table does not have."""
    cells = RUNS[name]
    for option, given, there in (
        ("--setting", settings, [cell.setting for cell in cells]),
        ("--method", methods, [cell.variant.method for cell in cells]),
        ("--seed", seeds, [cell.seed for cell in cells]),
        ("--variant", variants, [cell.variant.name for cell in cells]),
    ):
        for value in given:
            if value not in there:
                listed = ", ".join(str(value) for value in dict.fromkeys(there))
                raise InputError(f"{name!r} has no {option} {value}; it has {listed}")
    wanted = [
        cell
        for cell in cells
        if cell.setting in (settings or [cell.setting])
        and cell.variant.method in (methods or [cell.variant.method])
        and cell.seed in (seeds or [cell.seed])
        and cell.variant.name in (variants or [cell.variant.name])
    ]
    if not wanted:
        raise InputError(f"no run of {name!r} has all of these --setting, --method, … at once")
    return wanted

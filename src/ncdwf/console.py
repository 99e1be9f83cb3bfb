"""How things look in a terminal: the progress bar, tables, and what is asked for as text."""

import csv
import json
import sys
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Any

from rich.console import Console
from rich.measure import Measurement
from rich.progress import BarColumn, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from rich.progress import Progress as Bars
from rich.table import Table
from rich.text import Text

from ncdwf.config import Config
from ncdwf.data.decoding import Skipped
from ncdwf.errors import counted, printable
from ncdwf.learning.survey import Survey
from ncdwf.model.holdings import Holding
from ncdwf.results.evaluation import PAPER_TAU, Routed, Scores


class _Console(Console):
    """A console on which names of files and classes, which come from outside, steer nothing.

    Lines may be broken: who prints a name that could break them writes it `printable`.
    """

    def print(self, *objects: Any, **options: Any) -> None:
        """Print, with control characters in texts written out."""
        texts = (printable(o, keep="\n") if isinstance(o, str) else o for o in objects)
        super().print(*texts, **options)


# They may look like markup, too.
out = _Console(markup=False, emoji=False)
err = _Console(stderr=True, markup=False, emoji=False)
ANY_WIDTH = 1_000_000
"""More columns than any row has."""
MOST_SKIPPED = 20
"""So many unreadable files are listed one by one."""


class Format(StrEnum):
    """How `predict` writes its answers."""

    table = "table"
    csv = "csv"
    json = "json"


class Bar:
    """A progress bar with pictures a second and the time left; silent when nobody watches."""

    def __init__(self, unit: str = "images", size: int = 1) -> None:
        self._unit, self._size = unit, size
        self._bars = Bars(
            TextColumn("{task.description:>13}"),
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

    def start(self, task: str, total: int, done: int) -> None:
        """Begin a task."""
        self._task = self._bars.add_task(task, total=total, completed=done, rate="")

    def advance(self, number: int) -> None:
        """Count in what has just been done."""
        self._bars.advance(self._task, number)
        speed = self._bars.tasks[-1].speed
        if speed:
            self._bars.update(self._task, rate=f"{speed / self._size:,.0f} {self._unit}/s")

    def stop(self) -> None:
        """End the task; its bar stays."""


def print_skipped(skipped: Sequence[Skipped]) -> None:
    """List files that could not be read."""
    for item in skipped[:MOST_SKIPPED]:
        err.print(f"skipped: {item}", highlight=False, soft_wrap=True)
    if len(skipped) > MOST_SKIPPED:
        err.print(f"skipped: {len(skipped) - MOST_SKIPPED} more", highlight=False)


def print_choices(
    config: Config,
    phase: str,
    shape: Sequence[int],
    *counts: str,
    way: str = "--set {}=…",
) -> None:
    """Say what followed from the data; everything can be overridden, in one way or another."""
    optim = config.supervised.optim if phase == "supervised" else config.discovery.optim
    size = "×".join(map(str, shape))
    tries = 1 if phase == "supervised" else config.discovery.tries
    epochs = counted(optim.epochs, "epoch")
    if tries > 1:
        epochs += f" (the best of {tries} tries half way)"
    out.print(
        f"{', '.join(counts)} at {size} · backbone {config.backbone} · "
        f"{epochs}, batch {optim.batch_size}, learning rate {optim.lr:g}. "
        f"Another choice: {way.format(f'{phase}.optim.epochs')}",
        highlight=False,
        soft_wrap=True,
    )


def print_survey(found: Survey, way: str = "--num-novel …") -> None:
    """Say what was found out about a pool before discovery."""
    if found.sifted is not None:
        share, total = found.sifted.known_share, len(found.sifted.is_kept)
        left_out = total - int(found.sifted.is_kept.sum())
        told = (
            f"{left_out:,} of {counted(total, 'picture')} {'looks' if left_out == 1 else 'look'} "
            f"known and will be left out (estimated known share: {share:.0%}, rather too low)."
        )
        if found.sifted.is_mostly_known:
            told += " So little of it looks novel that what is found may be no class at all."
        out.print(told, highlight=False, soft_wrap=True)
    if found.count is not None:
        count = found.count
        out.print(
            f"The pool seems to hold {counted(count.number, 'novel class')}, between {count.low} "
            f"and {count.high}: a rough estimate. Another choice: {way}",
            highlight=False,
            soft_wrap=True,
        )


def print_holdings(title: str, facts: Mapping[str, str], holdings: Sequence[Holding]) -> None:
    """List what a model is, and its tensors by what they are derived from."""
    table = Table(title=printable(title), title_justify="left")
    for column in ("derived from, tensor", "shape or value"):
        table.add_column(column, overflow="fold")
    table.add_column("bytes", justify="right")
    table.add_row(Text("the model", style="bold"))
    for name, value in facts.items():
        table.add_row(f"  {name}", printable(value))
    for source in dict.fromkeys(item.derived_from for item in holdings):
        table.add_section()
        table.add_row(Text(source, style="bold"))
        for item in holdings:
            if item.derived_from == source:
                table.add_row(f"  {printable(item.name)}", _content(item), f"{item.num_bytes:,}")
    out.print(table)


def _content(item: Holding) -> str:
    return "×".join(map(str, item.shape)) if item.value is None else f"= {item.value:.10g}"


def print_rows(rows: list[dict[str, Any]], form: Format) -> None:
    """Print one row a picture."""
    if form is Format.json:
        out.print_json(json.dumps(rows))
    elif form is Format.csv:
        writer = csv.writer(sys.stdout, lineterminator="\n")
        for values in (rows[0], *(row.values() for row in rows)):
            # A program gets names as they are; on a terminal they must not steer it.
            writer.writerow(map(_plain, values) if out.is_terminal else values)
    else:
        table = Table()
        for name in rows[0]:
            table.add_column(name, overflow="fold")  # what is cut off cannot be told apart
        for row in rows:
            table.add_row(*(printable(str(value)) for value in row.values()))
        if not out.is_terminal:  # a file or another program has no edge
            options = out.options.update(max_width=ANY_WIDTH)
            table.width = Measurement.get(out, options, table).maximum
        out.print(table, crop=out.is_terminal)


def _plain(value: Any) -> Any:
    return printable(value) if isinstance(value, str) else value


def print_scores(scores: Scores, title: str) -> None:
    """Print the scores of a model."""
    table = Table("accuracy in %", title=printable(title), title_justify="left")
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

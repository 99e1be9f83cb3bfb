import csv
import io
import json
from pathlib import Path

import pytest
import torch
from rich.console import Console

from ncdwf import console
from ncdwf.config import override
from ncdwf.console import Bar, Format, print_holdings, print_rows, print_skipped
from ncdwf.data.decoding import Skipped
from ncdwf.learning.counting import ClassCount
from ncdwf.learning.sifting import Sifted
from ncdwf.learning.survey import Survey
from ncdwf.model.holdings import Holding

# Names that the terminal could take for styles, or stumble over.
ODD = ("[red]fox[/red]", "[/]", "[/b]", "plain [1]", 'möwe, "quoted"', ":bird:")
ROWS = [{"path": f"{name}.png", "class": name, "probability": 0.5} for name in ODD]


def test_names_that_look_like_styles_are_printed_as_they_are(capsys: pytest.CaptureFixture[str]):
    print_rows(ROWS, Format.table)
    table = capsys.readouterr().out
    for name in ODD:
        assert any(f"{name}.png" in line and f" {name} " in line for line in table.splitlines())


def test_rows_survive_every_format(capsys: pytest.CaptureFixture[str]):
    print_rows(ROWS, Format.json)
    assert json.loads(capsys.readouterr().out) == ROWS
    print_rows(ROWS, Format.csv)
    parsed = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
    assert parsed == [{key: str(value) for key, value in row.items()} for row in ROWS]


def test_a_long_row_of_json_is_not_broken(capsys: pytest.CaptureFixture[str]):
    rows = [{"path": "x" * 1000}]
    print_rows(rows, Format.json)
    assert json.loads(capsys.readouterr().out) == rows


STEERING = "\x1b]0;owned\x07\x1b[2Jcat\nfox\u202e"
WRITTEN = r"\x1b]0;owned\x07\x1b[2Jcat\nfox\u202e"


def test_what_would_steer_the_terminal_is_written_out(capsys: pytest.CaptureFixture[str]):
    print_rows([{"path": STEERING, "class": STEERING}], Format.table)
    print_skipped([Skipped(Path(STEERING), "broken")])
    holding = Holding(name=STEERING, shape=(), num_bytes=4, derived_from="the pool")
    print_holdings(STEERING, {"backbone": STEERING}, [holding])
    console.out.print(STEERING.replace("\n", ""), soft_wrap=True)
    captured = capsys.readouterr()
    for text in (captured.out, captured.err):
        assert not {"\x1b", "\x07", "\u202e"} & set(text)
    assert captured.out.count(WRITTEN) == 5
    assert captured.err == f"skipped: {WRITTEN} cannot be read as a picture: broken\n"


def test_names_in_csv_steer_no_terminal_and_reach_programs_as_they_are(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
):
    for watched, expected in ((True, WRITTEN), (False, STEERING)):
        screen = Console(file=io.StringIO(), force_terminal=watched)
        monkeypatch.setattr(console, "out", screen)
        print_rows([{"path": STEERING, "probability": 0.5}], Format.csv)
        rows = list(csv.DictReader(io.StringIO(capsys.readouterr().out)))
        assert rows == [{"path": expected, "probability": "0.5"}]


LONG = [f"{'deep/' * 30}{number:03d}.png" for number in range(3)]


@pytest.mark.parametrize("watched", [True, False])
def test_long_names_in_a_table_can_be_told_apart(monkeypatch: pytest.MonkeyPatch, watched: bool):
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "out", Console(file=screen, force_terminal=watched, width=60, no_color=True)
    )
    rows = [{"path": path, "class": "kakapo", "probability": 0.5} for path in LONG]
    print_rows(rows, Format.table)
    lines = [line for line in screen.getvalue().splitlines() if line.startswith("│")]
    columns = [[cell.strip() for cell in line.strip("│").split("│")] for line in lines]
    if watched:
        assert {len(line) for line in lines} == {60}
        assert "".join(cells[0] for cells in columns) == "".join(LONG)
    else:
        assert columns == [[path, "kakapo", "0.5"] for path in LONG]


@pytest.mark.parametrize(("count", "lines"), [(0, 0), (1, 1), (20, 20), (21, 21), (500, 21)])
def test_only_the_first_skipped_files_are_listed(
    capsys: pytest.CaptureFixture[str], count: int, lines: int
):
    print_skipped([Skipped(Path(f"[/{number}].png"), "it is empty") for number in range(count)])
    captured = capsys.readouterr()
    assert captured.out == ""
    said = captured.err.splitlines()
    assert len(said) == lines
    if count:
        assert said[0] == "skipped: [/0].png cannot be read as a picture: it is empty"
    if count > 20:
        assert said[-1] == f"skipped: {count - 20} more"


def test_holdings_are_grouped_by_what_they_are_derived_from(capsys: pytest.CaptureFixture[str]):
    holdings = [
        Holding(name=name, shape=shape, num_bytes=size, derived_from=source, value=value)
        for name, shape, size, source, value in (
            ("weight", (2, 3), 24, "the pool: [/b]", None),
            ("tau", (), 4096, "a threshold", 0.12345678901),
            ("bias", (3,), 12, "the pool: [/b]", None),
        )
    ]
    print_holdings("runs/[/x]", {"input": "1×8×8", "backbone": "[/b]"}, holdings)
    title, *lines = capsys.readouterr().out.splitlines()
    assert title.strip() == "runs/[/x]"
    cells = [[cell.strip() for cell in line.split("│")[1:-1]] for line in lines]
    assert [row for row in cells if row] == [
        ["the model", "", ""],
        ["input", "1×8×8", ""],
        ["backbone", "[/b]", ""],
        ["the pool: [/b]", "", ""],
        ["weight", "2×3", "24"],
        ["bias", "3", "12"],
        ["a threshold", "", ""],
        ["tau", "= 0.123456789", "4,096"],
    ]


def test_choices_are_those_of_the_phase(capsys: pytest.CaptureFixture[str], config):
    config = override(config, "discovery.optim.epochs=77")
    shape = (3, 32, 48)
    console.print_choices(config, "discovery", shape, "12,345 pictures")
    console.print_choices(config, "supervised", shape, "3 pictures", "2 classes", way="set {}")
    discovery, supervised = capsys.readouterr().out.splitlines()
    assert discovery.startswith("12,345 pictures at 3×32×48 · backbone small · 77 epochs, batch 32")
    assert discovery.endswith("--set discovery.optim.epochs=…")
    assert supervised.startswith("3 pictures, 2 classes at 3×32×48 · backbone small · 4 epochs")
    assert supervised.endswith("Another choice: set supervised.optim.epochs")
    thrice = override(config, "discovery.tries=3")
    console.print_choices(thrice, "discovery", shape, "3 pictures")
    console.print_choices(thrice, "supervised", shape, "3 pictures")
    discovery, supervised = capsys.readouterr().out.splitlines()
    assert " · 77 epochs (the best of 3 tries half way), batch 32" in discovery
    assert "tries" not in supervised


@pytest.mark.parametrize(
    ("share", "left_out", "number", "said"),
    [
        (
            0.25,
            60,
            3,
            ("60 of 240 pictures look known", "known share: 25%, rather", "3 novel classes,"),
        ),
        (
            0.75,
            1,
            1,
            ("1 of 240 pictures looks known", "known share: 75%, rather", "1 novel class,"),
        ),
        (
            0.96,
            230,
            2,
            ("known share: 96%", "too low). So little of it", "may be no class at all."),
        ),
    ],
)
def test_what_was_found_out_about_a_pool_is_said(
    capsys: pytest.CaptureFixture[str],
    share: float,
    left_out: int,
    number: int,
    said: tuple[str, ...],
):
    sifted = Sifted(torch.arange(240) >= left_out, share)
    count = ClassCount(number=number, low=1, high=9, curve={1: 1.0})
    console.print_survey(Survey(sifted=sifted, count=count))
    text = capsys.readouterr().out
    assert len(text.splitlines()) == 2
    assert ("no class at all" in text) == (share > 0.75)
    for words in said:
        assert words in text


@pytest.mark.parametrize("watched", [True, False])
def test_a_bar_is_drawn_where_somebody_watches(monkeypatch: pytest.MonkeyPatch, watched: bool):
    screen = io.StringIO()
    monkeypatch.setattr(
        console, "err", Console(file=screen, force_terminal=watched, width=200, markup=False)
    )
    with Bar(unit="kB", size=1000) as bar:
        bar.start("read", 40_000, 10_000)
        for _ in range(3):
            bar.advance(10_000)
        bar.stop()
    drawn = screen.getvalue()
    if not watched:
        assert drawn == ""
    else:
        assert "read" in drawn
        assert "100 %" in drawn
        assert " kB/s" in drawn

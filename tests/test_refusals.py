"""The table of refused calls in docs/own-data.md: every row is made, and its answer compared."""

import re
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from ncdwf import InputError, NovelClassDiscoverer
from ncdwf.cli import main

PAGE = (Path(__file__).parent.parent / "docs" / "own-data.md").read_text()
ROWS = re.findall(r"^\| [^|`]+ \| `(.+?)` \| (.+) \|$", PAGE.split("## What is refused")[1], re.M)
CALLS = [row for row in ROWS if not row[0].startswith("ncdwf ")]
COMMANDS = [row for row in ROWS if row[0].startswith("ncdwf ")]


def test_the_table_has_rows_of_both_kinds() -> None:
    assert len(CALLS) >= 10
    assert len(COMMANDS) >= 8


def picture(path: Path) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(np.arange(64, dtype=np.uint8).reshape(8, 8)).save(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return a folder with all that the commands of the table read."""
    root = tmp_path_factory.mktemp("refused")
    (root / "empty").mkdir()
    for number in range(3):
        picture(root / f"one/cat/{number}.png")
        for folder in ("birds", "cut", "bomb"):
            for name in ("cat", "dog"):
                picture(root / folder / name / f"{number}.png")
    for path in (root / "cut").rglob("*.png"):
        path.write_bytes(path.read_bytes()[:40])
    Image.new("1", (20_000, 20_000)).save(root / "bomb/dog/huge.png")
    (root / "kinds.csv").write_text("path,kind\nbirds/cat/0.png,cat\n")
    (root / "twice.csv").write_text("path,label\nbirds/cat/0.png,cat\nbirds/cat/0.png,dog\n")
    return root


@pytest.mark.parametrize(("command", "answer"), COMMANDS)
def test_commands_are_refused_as_the_page_says(
    folder: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
    command: str,
    answer: str,
) -> None:
    monkeypatch.chdir(folder)
    monkeypatch.setattr(sys, "argv", command.split())
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    found = capfd.readouterr().err.strip().replace(f"{folder}/", "")
    assert found == f"ncdwf: {answer}"
    assert not (folder / "known").exists()


@pytest.fixture(scope="module")
def names() -> dict[str, Any]:
    """Return what the calls of the table speak of."""
    draw = np.random.default_rng(0)
    X, y = draw.integers(0, 256, (40, 3, 8, 8), dtype=np.uint8), np.array(["cat", "dog"] * 20)
    settings = {
        "supervised.optim.epochs": 1,
        "discovery.optim.epochs": 1,
        "discovery.tries": 1,
        "method.settling.epochs": 1,
    }
    finder = NovelClassDiscoverer(settings=settings)
    found = NovelClassDiscoverer(settings=settings).fit(X, y).discover(X)
    return {"np": np, "X": X, "y": y, "finder": finder, "found": found}


@pytest.mark.parametrize(("call", "answer"), CALLS)
def test_calls_are_refused_as_the_page_says(names: dict[str, Any], call: str, answer: str) -> None:
    with pytest.raises(InputError) as refused:
        eval(call, names)
    assert str(refused.value) == answer

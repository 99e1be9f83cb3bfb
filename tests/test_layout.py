"""README and documents agree with the tree, the examples and the results file."""

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from conftest import shorter

import ncdwf
from ncdwf.cli import main
from ncdwf.errors import InputError
from ncdwf.recipes import PASSES, recipe
from ncdwf.results.benchmark import read_lines
from ncdwf.results.illustrations import draw
from ncdwf.results.observations import read
from ncdwf.results.tables import blocks, fill

ROOT = Path(__file__).parent.parent
README = (ROOT / "README.md").read_text()
NAME = re.compile(r"[\w.-]+(?:/[\w.-]+)*/?")


def code_blocks(language: str, document: str = README) -> list[str]:
    blocks = re.findall(r"^```(\w*)\n(.*?)^```$", document, re.DOTALL | re.MULTILINE)
    return [text for name, text in blocks if name == language]


def tree_paths() -> set[str]:
    """Return the paths that README's tree draws, relative to the repository."""
    drawing = next(block for block in code_blocks("") if block.startswith("ncdwf/\n"))
    paths, parents = set(), [""]
    for line in drawing.splitlines()[1:]:
        match = re.match(r"((?:│   |    )*)[├└]── (.*)", line)
        assert match, line
        depth = len(match[1]) // 4
        names = re.split(r"\s{3,}", match[2])[0].split()
        parents = [*parents[: depth + 1], ""]
        for name in names:
            assert NAME.fullmatch(name), line
            paths.add(parents[depth] + name)
            if name.endswith("/"):
                parents[depth + 1] = parents[depth] + name
    return paths


def tracked() -> set[str]:
    listing = subprocess.run(
        ["git", "ls-files", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return set(listing.stdout.split())


def test_everything_in_the_tree_of_the_readme_exists() -> None:
    missing = [path for path in tree_paths() if not (ROOT / path).exists()]
    assert not missing


def test_everything_in_the_repository_is_in_the_tree_of_the_readme() -> None:
    drawn = tree_paths()
    folders = tuple(path for path in drawn if path.endswith("/") and not path.startswith("src/"))
    unknown = [p for p in tracked() if p not in drawn and not p.startswith(folders)]
    assert sorted(unknown) == [".gitignore"]


def test_readme_shows_the_quickstart_example() -> None:
    source = (ROOT / "examples" / "quickstart.py").read_text()
    assert code_blocks("python") == [source.split('"""\n\n', 1)[1]]


def test_example_of_the_readme_has_twelve_lines_at_most() -> None:
    assert sum(1 for line in code_blocks("python")[0].splitlines() if line) <= 12


@pytest.mark.slow
def test_example_of_the_readme_runs(capsys: pytest.CaptureFixture[str]) -> None:
    exec(compile(code_blocks("python")[0], "README.md", "exec"), {})
    found = re.search(r"^accuracy: ([\d.]+)$", capsys.readouterr().out, re.MULTILINE)
    assert found
    assert float(found[1]) > 0.8


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "printed"),
    [
        ("features", r"accuracy by these names: 0\.[789]\d*\nloaded, same answers: True\n$"),
        ("own_images", r"\n5-102\.png: \d \(novel-\d\), P\(novel\) [01]\.\d+\n"),
        ("own_method", r"Aware\(known="),
    ],
    ids=["features", "own_images", "own_method"],
)
def test_example_runs(name: str, printed: str, capsys: pytest.CaptureFixture[str]) -> None:
    runpy.run_path(str(ROOT / "examples" / f"{name}.py"), run_name="__main__")
    assert re.search(printed, capsys.readouterr().out)


def test_every_example_is_run() -> None:
    names = {path.stem for path in (ROOT / "examples").glob("*.py")}
    assert names == {"quickstart", "features", "own_images", "own_method"}


@pytest.mark.slow
def test_the_walk_through_runs_from_top_to_bottom(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "own-data.md").read_text()
    runpy.run_path(str(ROOT / "examples" / "own_images.py"))["write_pictures"](tmp_path, 200)
    monkeypatch.chdir(tmp_path)
    # As many epochs as are needed to get through, none for the sake of accuracy.
    for backbone in PASSES:
        monkeypatch.setitem(PASSES, backbone, (0, 0))
    monkeypatch.setattr(ncdwf, "recipe", lambda setting: shorter(recipe(setting)))
    exec(compile("\n".join(code_blocks("python", text)), "own-data.md", "exec"), {})
    assert "Aware(known=" in capsys.readouterr().out


@pytest.mark.slow
def test_the_commands_of_the_walk_through_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    text = (ROOT / "docs" / "own-data.md").read_text()
    walk = text.split("## On the command line")[1].split("\n## ")[0]
    runpy.run_path(str(ROOT / "examples" / "own_images.py"))["write_pictures"](tmp_path, 200)
    monkeypatch.chdir(tmp_path)
    for backbone in PASSES:
        monkeypatch.setitem(PASSES, backbone, (0, 0))
    commands = re.findall(r"^\$ (ncdwf [^>\n]+)", walk, re.MULTILINE)
    assert len(commands) == 6
    for command in commands:
        monkeypatch.setattr(sys, "argv", command.split())
        with pytest.raises(SystemExit) as ended:
            main()
        assert not ended.value.code, capsys.readouterr().err
    answered = capsys.readouterr().out
    assert "\nbirds/0/0-0.png," in answered
    assert answered.endswith("Written to birds.onnx, and it answers as the model does\n")


@pytest.mark.parametrize(
    "name",
    ["README.md", "docs/digits.md", "docs/pools.md", "docs/reproduction.md", "docs/results.md"],
)
def test_tables_are_those_of_the_results_file(name: str) -> None:
    text = (ROOT / name).read_text()
    assert "<!-- generated:" in text
    lines, observed = read_lines(ROOT / "results" / "runs.jsonl"), read(ROOT / "results")
    found = blocks(lines, observed)
    names = re.findall("<!-- generated: (.+) -->", text)
    assert len(set(names)) == len(names)  # only the first of a name would be filled in
    assert set(names) <= set(found)
    assert fill(text, found) == text


def test_figures_are_those_of_the_results_file(tmp_path: Path) -> None:
    results = ROOT / "results"
    drawn = list(draw(read_lines(results / "runs.jsonl"), results, tmp_path))
    assert {path.name for path in drawn} == {p.name for p in (ROOT / "docs/figures").iterdir()}
    for path in drawn:
        # Another matplotlib may write the same picture in other words; make test has this one.
        assert path.read_bytes() == (ROOT / "docs" / "figures" / path.name).read_bytes(), path.name


def test_figures_name_the_runs_that_they_were_drawn_from(tmp_path: Path) -> None:
    results = ROOT / "results"
    lines = [
        line
        for line in read_lines(results / "runs.jsonl")
        if (line["method"], line["seed"]) != ("ncdwf", 2)
    ]
    observed = (results / "observations.json").read_text()
    (tmp_path / "observations.json").write_text(observed.replace('main-seed0"', 'main-seed7"'))
    drawn = {path.name: path.read_text() for path in draw(lines, tmp_path, tmp_path)}
    for theme in ("light", "dark"):
        assert "NCDwF on CIFAR-100-50-50, seed 7" in drawn[f"maturity-{theme}.svg"]
        assert "NCDwF on CIFAR-100-20-80, seed 7" in drawn[f"confusion-{theme}.svg"]
        seeds = "(NCDwF: mean of 2 seeds; UNO, ncdwf-gauss: one seed)"
        assert seeds in drawn[f"overview-{theme}.svg"]


def test_a_figure_without_its_runs_is_refused(tmp_path: Path) -> None:
    results = ROOT / "results"
    lines = [line for line in read_lines(results / "runs.jsonl") if line["method"] != "uno"]
    with pytest.raises(InputError, match="the results lack uno on cifar10-5-5: reproduce main"):
        list(draw(lines, results, tmp_path))


def anchors(document: Path) -> set[str]:
    """Return what links to the headings of a document end in, as GitHub makes it of them."""
    text = re.sub(r"^```.*?^```$", "", document.read_text(), flags=re.DOTALL | re.MULTILINE)
    headings = re.findall(r"^#+ (.+)$", text, re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_links_between_documents_lead_somewhere() -> None:
    documents = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = []
    for document in documents:
        for target in re.findall(r"\]\((?!http)([^)]+)\)", document.read_text()):
            name, _, anchor = target.partition("#")
            there = document.parent / name if name else document
            if not there.exists() or (anchor and anchor not in anchors(there)):
                broken.append(f"{document.name}: {target}")
    assert not broken


def test_public_names_are_documented_and_there() -> None:
    for name in ncdwf.__all__:
        assert getattr(ncdwf, name).__doc__, name


def test_the_module_runs_as_a_program() -> None:
    command = [sys.executable, "-m", "ncdwf", "--version"]
    result = subprocess.run(command, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == f"ncdwf {ncdwf.__version__}"

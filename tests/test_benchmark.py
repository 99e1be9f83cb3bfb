"""A grid runs what is missing, adds a line a run, and its tables hold the figures of the lines."""

import json
from pathlib import Path

import pytest

from ncdwf.errors import InputError
from ncdwf.results import benchmark
from ncdwf.results.benchmark import Grid, Variant, find, markdown_table, read_lines, reproduce

GRID = Grid(
    setting="tiny-4-2",
    seeds=(0, 1),
    variants=(
        Variant(name="main", title="all"),
        Variant(name="bare", title="none", sets=("method.weight_distill=0",)),
    ),
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    from conftest import register_tiny, shorter, tiny_recipe

    import ncdwf.config

    register_tiny(monkeypatch)
    monkeypatch.setitem(ncdwf.config.RECIPES, "tiny", lambda *names: shorter(tiny_recipe(*names)))


def line(variant: str, seed: int, novel: float) -> benchmark.Line:
    routed = {"known": 90.0, "novel": novel, "all": (90 + novel) / 2, "tau": 0.5}
    return {
        "setting": "tiny-4-2",
        "method": "ncdwf",
        "variant": variant,
        "seed": seed,
        "after_supervised": {"known": 99.0},
        "aware": {"known": 98.0, "novel": novel, "all": novel, "novel_pool": novel},
        "agnostic": [routed],
        "strict": [routed],
        "default_rule": 0,
        "auroc": 0.5,
        "forgetting": 1.0,
        "kmeans": {"pixels": 10.0, "features": 20.0},
        "seconds": [1.0, 2.0],
        "commit": None,
    }


@pytest.mark.usefixtures("quick")
def test_a_grid_runs_what_is_missing_and_nothing_else(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    results, work = tmp_path / "results" / "runs.jsonl", tmp_path / "work"
    wanted = [(v, s) for s in (0, 1) for v in ("main", "bare")]
    first = list(reproduce(GRID, results, work))
    assert [(entry["variant"], entry["seed"]) for entry in first] == wanted
    assert read_lines(results) == first
    assert "confusion" not in first[0]
    assert first[0]["aware"] != first[1]["aware"] or first[0]["auroc"] != first[1]["auroc"]

    kept = [json.dumps(entry) for entry in first if entry["seed"] == 0]
    results.write_text("\n".join(kept) + "\n")
    executed = []
    whole = benchmark.execute
    monkeypatch.setattr(
        benchmark, "execute", lambda run, progress: executed.append(run.path) or whole(run)
    )
    again = list(reproduce(GRID, results, work))
    assert again == first  # finished runs are read, not trained again
    assert [path.name for path in executed] == ["tiny-4-2-main-seed1", "tiny-4-2-bare-seed1"]


@pytest.mark.usefixtures("quick")
def test_a_run_of_another_configuration_is_not_taken(tmp_path: Path) -> None:
    list(reproduce(GRID, tmp_path / "a.jsonl", tmp_path / "work"))
    other = Variant(name="main", title="all", sets=("method.weight_distill=1",))
    changed = Grid(setting="tiny-4-2", seeds=(0,), variants=(other,))
    with pytest.raises(InputError, match="another configuration"):
        list(reproduce(changed, tmp_path / "b.jsonl", tmp_path / "work"))


@pytest.mark.usefixtures("quick")
def test_tables_show_mean_and_deviation_over_the_seeds() -> None:
    lines = [line("main", 0, 80.0), line("main", 1, 90.0), line("bare", 0, 50.0)]
    table = markdown_table(GRID, lines).splitlines()
    assert len(table) == 4
    assert table[2].startswith("| all | 98.00 ± 0.00 | 85.00 ± 7.07 |")  # √50 = 7.07
    assert table[3].startswith("| none | 98.00 | 50.00 |")
    assert find(lines, GRID, "bare", 1) is None
    seeds = benchmark.seed_table(GRID, lines).splitlines()
    assert [row.split(" | ")[3] for row in seeds[2:]] == ["80.00", "90.00"]
    assert "| task-aware | 98.00 ± 0.00 | 85.00 ± 7.07 |" in benchmark.summary_table(GRID, lines)


@pytest.mark.parametrize("text", ["3\n", '{"setting": "x"}\n', "{\n"])
def test_a_foreign_line_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"runs\.jsonl"):
        read_lines(path)

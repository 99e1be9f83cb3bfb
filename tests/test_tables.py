"""Tables hold the figures of the lines, and the paper's beside them."""

import itertools
from typing import Any

import pytest

from ncdwf.errors import InputError
from ncdwf.results import tables
from ncdwf.results.benchmark import Line
from ncdwf.results.configuration import config_record
from ncdwf.results.grids import CIFAR_SETTINGS, GRIDS, RUNS, Cell
from ncdwf.results.tables import blocks, fill, markdown, routed, spread


def line(cell: Cell, known: float, novel: float) -> Line:
    """Return a finished run with made-up figures; agnostic `all` is ten below at τ 0.99."""

    def rule(tau: float, known: float) -> dict[str, Any]:
        figures = {"known": known, "novel": novel, "all": (known + novel) / 2}
        return {"rule": "identifier", "tau": tau, **figures}

    lower = {0.8: 30, 0.85: 35, 0.9: 40, 0.95: 45, 0.99: 20, 0.999: 50, 0.7: 10}
    rules = [rule(tau, known - less) for tau, less in lower.items()]
    return {
        "setting": cell.setting,
        "method": cell.variant.method,
        "variant": cell.variant.name,
        "seed": cell.seed,
        "config": config_record(cell.config),
        "after_supervised": {"known": 99.0},
        "aware": {"known": known, "novel": novel, "all": (known + novel) / 2, "novel_pool": 70.0},
        "agnostic": rules,
        "strict": rules,
        "default_rule": 6,
        "auroc": 0.5,
        "forgetting": 1.0,
        "kmeans": {"pixels": 10.0, "features": 20.0},
        "seconds": [1.0, 2.0],
        "commit": "0123456789abcdef",
    }


def observation(labelled: float, first: float, second: float | None = None) -> dict[str, Any]:
    """Return made-up accuracies of the classes of each round; strict ones are ten lower."""
    groups = {"labelled": labelled, "round 1": first}
    if second is not None:
        groups["round 2"] = second
    return {"aware": groups, "strict": {name: value - 10 for name, value in groups.items()}}


OBSERVED = {
    "rounds": {
        "cell": "a",
        "round 1": observation(80.0, 70.0),
        "promoted": observation(68.0, 69.0),
        "round 2": observation(75.0, 60.5, 50.0),
    },
    "one-round": {"cell": "b", "one round": observation(78.0, 66.0, 64.125)},
}


def cells_of(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in text.split("|")[1:-1]] for text in table.splitlines()]


def row(table: str, first: str) -> list[str]:
    return next(cells for cells in cells_of(table) if cells[0] == first)


def beside(table: str, setting: str, title: str) -> list[str]:
    """Return what stands beside a title below the name of a setting, which is written once."""
    rows = cells_of(table)
    begin = next(i for i, cells in enumerate(rows) if cells[0] == setting)
    block = itertools.takewhile(lambda cells: cells[0] in ("", setting), rows[begin:])
    return next(cells[2:] for cells in block if cells[1] == title)


@pytest.fixture(scope="module")
def lines() -> list[Line]:
    """Every run of the main, ablation and digits tables, known 80 + seed, novel 60."""
    cells = {
        cell.name: cell for name in ("main", "ablation", "digits") for cell in GRIDS[name].cells()
    }
    return [line(cell, 80.0 + cell.seed, 60.0) for cell in cells.values()]


@pytest.fixture(scope="module")
def found(lines: list[Line]) -> dict[str, str]:
    return blocks(lines, OBSERVED)


def test_the_main_table_holds_means_and_the_papers_rows(found: dict[str, str]) -> None:
    table = found["main-aware"]
    ours = ["81.00 ± 1.00", "60.00 ± 0.00", "70.50 ± 0.50"]
    assert beside(table, "cifar10-5-5", "`ncdwf`") == [*ours, "92.72", "90.32", "91.52"]
    assert beside(table, "cifar100-80-20", "`ncdwf`") == [*ours, "65.03", "77.03", "71.03"]
    uno = ["80.00", "60.00", "70.00", "7.95", "48.70", "28.33"]
    assert beside(table, "cifar100-20-80", "`uno`") == uno
    gauss = ["80.00", "60.00", "70.00", "", "", ""]
    assert beside(table, "cifar100-20-80", "`ncdwf-gauss`") == gauss
    assert beside(table, "cifar100-50-50", "RS") == ["", "", "", "18.14", "32.56", "25.35"]
    assert beside(table, "cifar10-5-5", "k-means on raw pixels")[1] == "10.00 ± 0.00"
    assert beside(table, "cifar10-5-5", "k-means on features")[1] == "20.00 ± 0.00"
    assert beside(table, "cifar10-5-5", "after the supervised phase")[0] == "99.00 ± 0.00"


def test_routed_figures_are_those_of_the_named_threshold(
    lines: list[Line], found: dict[str, str]
) -> None:
    run = lines[0]
    assert routed(run, "agnostic", 0.99)["known"] == run["aware"]["known"] - 20
    assert routed(run, "agnostic", "own")["tau"] == 0.7
    # A model without an identifier has one rule, whatever is asked for.
    rule = {"rule": "softmax", "tau": 0.5}
    assert routed({**run, "agnostic": [rule], "default_rule": 0}, "agnostic", 0.99) == rule
    own = beside(found["main-agnostic"], "cifar10-5-5", "`ncdwf`")
    assert own[0] == "71.00 ± 1.00"
    assert own[3:] == ["79.68", "73.66", "76.67"]
    papers = beside(found["main-agnostic-0.99"], "cifar10-5-5", "`ncdwf`")
    assert papers[0] == "61.00 ± 1.00"
    assert papers[3:] == own[3:]
    assert "paper" not in found["main-strict"]
    assert len(beside(found["main-strict"], "cifar10-5-5", "`ncdwf`")) == 3


def test_the_threshold_table_has_our_figures_beside_the_papers(found: dict[str, str]) -> None:
    table = found["tau"]
    first = beside(table, "cifar10-5-5", "0.8")
    assert first[0] == "51.00 ± 1.00"
    assert first[3:] == ["64.94", "80.66", "72.80"]
    assert beside(table, "cifar100-20-80", "0.95")[0] == "36.00 ± 1.00"
    assert beside(table, "cifar100-20-80", "0.95")[5] == "48.04"
    assert beside(table, "cifar10-5-5", "calibrated")[0] == "71.00 ± 1.00"
    assert beside(table, "cifar10-5-5", "calibrated")[3:] == ["", "", ""]


def test_ablation_and_alpha_stand_beside_the_paper(found: dict[str, str]) -> None:
    table = found["ablation"]
    assert beside(table, "cifar10-5-5", "pseudo-latent replay only")[3] == "92.12"
    assert beside(table, "cifar100-20-80", "mutual information only")[3] == "6.75"
    assert beside(table, "cifar10-5-5", "ncdwf")[5] == "91.52"
    assert beside(table, "cifar100-20-80", "pseudo-latent replay only")[0] == "80.00"
    alpha = found["alpha"]
    one = beside(alpha, "cifar100-80-20", "Beta(100, 1)")
    assert one == ["–", "–", "–", "64.80", "12.76", "38.78"]  # not run yet
    assert beside(alpha, "cifar100-80-20", "ncdwf")[0] == "81.00 ± 1.00"


def test_the_overview_is_about_all(found: dict[str, str]) -> None:
    table = found["overview"]
    assert row(table, "task-aware, paper: NCDwF")[1:] == ["91.52", "71.03", "64.42", "67.24"]
    assert row(table, "task-agnostic, paper: UNO")[1] == "35.68"
    assert row(table, "task-aware, here: `ncdwf`")[1] == "70.50 ± 0.50"
    assert row(table, "task-agnostic, here: `ncdwf`")[1] == "65.50 ± 0.50"
    assert row(table, "task-agnostic, τ 0.99, here: `ncdwf`")[1] == "60.50 ± 0.50"


def test_digits_tables(found: dict[str, str]) -> None:
    assert row(found["digits-seeds"], "3")[1:4] == ["99.00", "83.00", "60.00"]
    assert row(found["digits-seeds"], "3")[-1] == "`012345678`"
    # Standard deviation of 80, …, 84.
    assert row(found["digits-summary"], "task-aware")[1] == "82.00 ± 1.58"
    assert row(found["digits-ablation"], "everything")[1] == "82.00 ± 1.58"


def test_the_rounds_table_stands_apart_after_each_round(found: dict[str, str]) -> None:
    table = found["rounds"]
    assert row(table, "")[1:4] == [
        *("task-aware: labelled", "task-aware: round 1", "task-aware: round 2")
    ]
    assert row(table, "after the first round")[1:] == ["80.00", "70.00", "", "70.00", "60.00", ""]
    assert row(table, "then, one head for all of them")[1:3] == ["68.00", "69.00"]
    assert row(table, "after the second round")[1:] == [
        *("75.00", "60.50", "50.00", "65.00", "50.50", "40.00")
    ]
    assert row(table, "both pools in one round")[3:5] == ["64.12", "68.00"]
    assert len(table.splitlines()) == 6  # head, rule and these


@pytest.mark.parametrize(
    ("kept", "first"),
    [
        (set(), []),
        (
            {"rounds"},
            [
                "after the first round",
                "then, one head for all of them",
                "after the second round",
            ],
        ),
        ({"one-round"}, ["both pools in one round"]),
    ],
)
def test_the_rounds_table_leaves_out_what_was_not_observed(
    kept: set[str], first: list[str]
) -> None:
    table = tables.rounds_table({name: OBSERVED[name] for name in kept})
    titles = [text.split("|")[1].strip() for text in table.splitlines()[2:]]
    assert titles == first


@pytest.mark.parametrize("name", ["mixed", "imbalance"])
def test_grids_of_several_settings_name_them(name: str) -> None:
    grid = GRIDS[name]
    cells = list(grid.cells())
    # The novel accuracy tells the runs from each other; the last one has not been run.
    run = [line(cell, 80.0, 10.0 + place) for place, cell in enumerate(cells[:-1])]
    table = blocks(run, {})[name]
    rows = [[cell.strip() for cell in text.split("|")[1:-1]] for text in table.splitlines()]
    assert rows[0][:4] == ["setting", "variant", "aware known", "aware novel"]
    assert [r[:4] for r in rows[2:]] == [
        [cell.setting, cell.variant.title, "80.00", f"{10 + place:.2f}"]
        for place, cell in enumerate(cells[:-1])
    ]


def test_a_grid_of_one_setting_does_not_name_it(found: dict[str, str]) -> None:
    assert row(found["digits-ablation"], "variant")[1] == "aware known"


def test_runs_of_another_configuration_are_left_out(lines: list[Line]) -> None:
    foreign = [{**entry, "config": {**entry["config"], "backbone": "small"}} for entry in lines]
    foreign = [entry for entry in foreign if entry["setting"].startswith("cifar")]
    table = blocks(foreign, {})["main-aware"]
    for setting in CIFAR_SETTINGS:
        assert beside(table, setting, "`ncdwf`")[:3] == ["–", "–", "–"]


def test_every_table_that_can_be_asked_for_is_there() -> None:
    found = blocks([], {})
    for name, shown in tables.TABLES.items():
        assert RUNS[name]
        assert set(shown) <= set(found)
    # A document may hold any of them.
    assert set(itertools.chain(*tables.TABLES.values())) == set(found)


def test_spread() -> None:
    assert spread([]) == "–"
    assert spread([1.234]) == "1.23"
    assert spread([80.0, 90.0]) == "85.00 ± 7.07"  # √50


def test_markdown() -> None:
    assert markdown([["a", "b"], ["c", "1"]]) == "| a | b |\n| --- | ---: |\n| c | 1 |\n"


def test_fill_replaces_known_blocks_and_leaves_the_rest() -> None:
    text = "a\n<!-- generated: x -->\n\nold\n<!-- end -->\nb\n"
    assert fill(text, {"x": "new\n", "y": "z"}) == (
        "a\n<!-- generated: x -->\n\nnew\n\n<!-- end -->\nb\n"
    )


@pytest.mark.parametrize(
    "text",
    [
        "<!-- generated: x -->\nold\n# and the rest of the document\n",
        "<!-- generated: x -->\nold\n<!-- generated: y -->\nold\n<!-- end -->\n",
    ],
)
def test_a_block_without_its_end_swallows_nothing(text: str) -> None:
    with pytest.raises(InputError, match="the generated block 'x' has no <!-- end -->"):
        fill(text, {"x": "new", "y": "new"})


def test_every_commit_of_a_run_is_shown_and_whether_files_differed_from_it() -> None:
    cell = next(GRIDS["digits"].cells())
    commits = f"{'a' * 40}, {'b' * 9}+, {'c' * 40}+"
    table = blocks([line(cell, 90.0, 80.0) | {"commit": commits}], {})["digits-seeds"]
    assert f"`{'a' * 9}, {'b' * 9}+, {'c' * 9}+`" in table

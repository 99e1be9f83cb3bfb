"""What is run for every table."""

from dataclasses import replace

import pytest

from ncdwf.data.setting import Setting
from ncdwf.results.configuration import config_record, is_record_of, variant
from ncdwf.results.grids import (
    CIFAR_SETTINGS,
    CONFUSION,
    GRIDS,
    MAIN,
    MATURITY,
    ONE_ROUND,
    RUNS,
    TWO_ROUNDS,
    Cell,
    Grid,
    Variant,
)


@pytest.mark.parametrize("name", RUNS)
def test_every_run_has_a_configuration_and_a_name_of_its_own(name: str) -> None:
    cells = RUNS[name]
    names = [cell.name for cell in cells]
    assert len(set(names)) == len(names)
    for cell in cells:
        config = cell.config
        assert (config.setting, config.seed) == (cell.setting, cell.seed)
        assert config.method["name"] == cell.variant.method
        assert variant(config) == ("main" if cell.variant.name == "main" else "custom"), cell.name


def test_variants_of_a_row_differ_from_each_other() -> None:
    for grid in GRIDS.values():
        configs = [grid.row(grid.settings[0], v)[0].config for v in grid.variants]
        for config in configs:
            assert [is_record_of(config_record(config), other) for other in configs].count(
                True
            ) == 1


def test_the_main_table_has_the_runs_that_it_promises() -> None:
    runs = [(cell.variant.method, cell.setting, cell.seed) for cell in GRIDS["main"].cells()]
    for setting in CIFAR_SETTINGS:
        assert [seed for m, s, seed in runs if (m, s) == ("ncdwf", setting)] == [0, 1, 2]
        assert [seed for m, s, seed in runs if (m, s) == ("uno", setting)] == [0]
        assert [seed for m, s, seed in runs if (m, s) == ("ncdwf-gauss", setting)] == [0]
    assert len(runs) == 20


def test_the_table_over_the_threshold_has_the_runs_that_it_shows() -> None:
    rows = (GRIDS["main"].row(setting, MAIN) for setting in CIFAR_SETTINGS)
    assert list(RUNS["tau"]) == [cell for row in rows for cell in row]
    assert len(RUNS["tau"]) == 12


def test_main_is_the_same_run_in_every_table() -> None:
    for name in ("ablation", "alpha"):
        grid = GRIDS[name]
        for setting in grid.settings:
            (cell,) = grid.row(setting, MAIN)
            assert cell in list(GRIDS["main"].cells())


def test_runs_with_one_supervised_phase_follow_each_other() -> None:
    grid = Grid(
        settings=("a", "b"),
        seeds=(0, 1),
        variants=(Variant(name="x", title=""), Variant(name="y", title="", seeds=(1,))),
    )
    order = [(cell.setting, cell.seed, cell.variant.name) for cell in grid.cells()]
    assert order == [
        ("a", 0, "x"),
        ("a", 1, "x"),
        ("a", 1, "y"),
        ("b", 0, "x"),
        ("b", 1, "x"),
        ("b", 1, "y"),
    ]
    assert [cell.seed for cell in grid.row("a", grid.variants[1])] == [1]


def test_mixed_pools_are_run_with_and_without_sifting() -> None:
    for cell in GRIDS["mixed"].cells():
        assert cell.config.discovery.pool == ("mixed" if "sifted" in cell.variant.name else "novel")
    shares = {Setting.parse(name).known_share for name in GRIDS["mixed"].settings}
    assert shares == {0, 25, 50, 75}


def test_long_tails_are_run_with_and_without_equal_shares() -> None:
    for cell in GRIDS["imbalance"].cells():
        balance = cell.config.method["clustering"]["balance"]
        assert (balance < 1) == (cell.variant.name == "partial")
    degrees = [Setting.parse(name).imbalance for name in GRIDS["imbalance"].settings]
    assert degrees == [1, 10, 100]
    # Without a tail the main run is that of the main table.
    assert next(GRIDS["imbalance"].cells()) in list(GRIDS["main"].cells())


def test_one_round_has_the_classes_of_two() -> None:
    two, one = (Setting.parse(cell.setting) for cell in (TWO_ROUNDS, ONE_ROUND))
    assert two.known_classes == one.known_classes
    assert len(one.novel_classes) == 2 * len(two.novel_classes)
    assert two.labelled_name == one.labelled_name  # and so one supervised phase


def test_snapshots_are_kept_of_one_run_and_do_not_make_it_another() -> None:
    assert MATURITY.config.snapshot_epochs == 20
    assert MATURITY in list(GRIDS["main"].cells())
    plain = replace(MATURITY.config, snapshot_epochs=0, seed=7, engine="eager")
    assert is_record_of(config_record(plain), MATURITY.config)
    assert Cell(setting="cifar100-50-50", variant=MAIN, seed=1).config.snapshot_epochs == 0
    # Whatever table asks for it first.
    for grid in ("main", "alpha"):
        cells = [cell for cell in RUNS[grid] if cell.name == MATURITY.name]
        assert [cell.config.snapshot_epochs for cell in cells] == [20]


def test_figures_have_all_the_runs_that_they_show() -> None:
    assert {*GRIDS["main"].cells(), MATURITY, CONFUSION} <= set(RUNS["figures"])

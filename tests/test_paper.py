import pytest

from ncdwf.data.setting import SETTINGS
from ncdwf.results import paper
from ncdwf.results.paper import Row

TABLES = {
    "task-aware": (paper.TASK_AWARE, 5, 4),
    "generalized": (paper.GENERALIZED, 5, 2),
    "tau": (paper.TAU, 4, 6),
    "ablation": (paper.ABLATION, 2, 4),
    "alpha": (paper.ALPHA, 4, 3),
}
ROWS = {
    f"{table} {setting} {key}": row
    for table, (content, _, _) in TABLES.items()
    for setting, rows in content.items()
    for key, row in rows.items()
}


@pytest.mark.parametrize("row", ROWS.values(), ids=ROWS)
def test_all_is_the_mean_of_known_and_novel(row):
    # No row of the paper is an exception; rounding it to two digits costs up to 0.005.
    assert row.all == pytest.approx((row.known + row.novel) / 2, abs=0.011)


@pytest.mark.parametrize(("table", "num_settings", "num_rows"), TABLES.values(), ids=TABLES)
def test_tables_are_complete(table, num_settings, num_rows):
    assert len(table) == num_settings
    assert set(table) <= set(SETTINGS)
    rows = [list(rows) for rows in table.values()]
    assert rows == [rows[0]] * num_settings
    assert len(rows[0]) == num_rows


def test_values_read_off_the_paper_by_hand():
    assert paper.TASK_AWARE["cifar10-5-5"]["uno"] == Row(33.16, 93.22, 63.19)
    assert paper.TASK_AWARE["cifar100-20-80"]["ncl"] == Row(12.65, 4.73, 8.69)
    assert paper.TASK_AWARE["imagenet-882-30"]["ncdwf"] == Row(27.46, 79.07, 53.27)
    assert paper.GENERALIZED["cifar100-50-50"]["ncdwf"] == Row(62.76, 36.42, 49.59)
    assert paper.TAU["cifar100-80-20"][0.999] == Row(61.42, 45.5, 53.46)
    assert paper.ABLATION["cifar10-5-5"]["information"] == Row(34.12, 91.08, 62.6)
    assert paper.ALPHA["cifar100-80-20"][100, 1] == Row(64.8, 12.76, 38.78)


def test_the_same_run_has_the_same_numbers_in_every_table():
    for setting, rows in paper.TAU.items():
        assert rows[0.99] == paper.GENERALIZED[setting]["ncdwf"]
    for setting, rows in paper.ALPHA.items():
        assert rows[1, 100] == paper.TASK_AWARE[setting]["ncdwf"]
    for setting, rows in paper.ABLATION.items():
        assert rows["both"] == paper.TASK_AWARE[setting]["ncdwf"]


def test_uno_never_names_a_known_class_in_the_generalized_evaluation():
    assert {rows["uno"].known for rows in paper.GENERALIZED.values()} == {0}


def test_a_higher_threshold_keeps_more_known_pictures():
    for rows in paper.TAU.values():
        known = [row.known for _, row in sorted(rows.items())]
        assert known == sorted(known)

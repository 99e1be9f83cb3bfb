import os
import subprocess
import sys
from dataclasses import replace
from functools import partial
from hashlib import sha256
from pathlib import Path
from xml.etree import ElementTree

import matplotlib
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ncdwf.data.cifar import CIFAR100_NAMES
from ncdwf.errors import InputError
from ncdwf.results import paper
from ncdwf.results.figures import Origin, Point, confusion, maturity, overview
from ncdwf.results.figures.confusion import row_order
from ncdwf.results.figures.maturity import spread
from ncdwf.results.figures.overview import free_box
from ncdwf.results.figures.page import NORMAL, text_width

SVG = "{http://www.w3.org/2000/svg}"
NCDWF_COLOUR = "#d55e00"
METHODS = {"rs": "RS", "ncl": "NCL", "uno": "UNO", "ncdwf": "NCDwF"}
SETTINGS = (
    "CIFAR-10-5-5",
    "CIFAR-100-80-20",
    "CIFAR-100-50-50",
    "CIFAR-100-20-80",
    "ImageNet-882-30",
)
KNOWN, NOVEL = CIFAR100_NAMES[:20], CIFAR100_NAMES[20:]


def point(known, novel, *, setting="cifar10-5-5", method="ncdwf", source="paper"):
    return Point(setting=setting, method=method, source=source, known=known, novel=novel)


# What the paper reports, and invented numbers beside it.
POINTS = [
    point(row.known, row.novel, setting=setting, method=method)
    for setting, rows in paper.TASK_AWARE.items()
    for method, row in rows.items()
]
POINTS += [
    replace(p, source="ours", known=0.9 * p.known, novel=0.95 * p.novel)
    for p in POINTS
    if p.method in ("uno", "ncdwf")
]
COUNTS = np.random.default_rng(0).multinomial(100, np.full(20, 0.05), size=80)
COUNTS[np.arange(80), np.arange(80) % 20] += 150

ORIGIN = Origin(setting="cifar100-80-20", method="uno", seed=4)
CURVES = ([0, 5, 10], [0.5, 0.8, 0.93], [0.1, 0.7, 0.9], [0.9, 0.8, 0.7])

FIGURES = {
    "overview": partial(overview, POINTS),
    "maturity": partial(maturity, *CURVES, "calibrated", ORIGIN),
    "confusion": partial(confusion, COUNTS[:6, :4], KNOWN[:4], NOVEL[:6], ORIGIN),
}
every_figure = pytest.mark.parametrize("draw", FIGURES.values(), ids=FIGURES)
every_theme = pytest.mark.parametrize("theme", ["light", "dark"])


def texts(svg):
    return ["".join(e.itertext()).strip() for e in ElementTree.fromstring(svg).iter(f"{SVG}text")]


def markers(svg, colour):
    """Return the markers of a colour between the axes, in the order in which they were drawn."""
    return _markers(svg, "axes_2", colour)


def _markers(svg, axes, colour):
    found = ElementTree.fromstring(svg).find(f".//{SVG}g[@id='{axes}']")
    return [use for use in found.iter(f"{SVG}use") if colour in use.get("style")]


def shape(svg, marker):
    name = marker.get("{http://www.w3.org/1999/xlink}href").removeprefix("#")
    return ElementTree.fromstring(svg).find(f".//{SVG}path[@id='{name}']").get("d")


def key(svg):
    """Return the marker to the left of every name in the key."""
    page = ElementTree.fromstring(svg).find(f".//{SVG}g[@id='axes_1']")
    spots = {position(marker): marker for marker in page.iter(f"{SVG}use")}
    found = {}
    for text in page.iter(f"{SVG}text"):
        x, y = position(text)
        for (left, height), marker in spots.items():
            if abs(x - 10 - left) < 0.01 and abs(y - height) < 5:
                found["".join(text.itertext())] = marker
    assert len(found) == len(spots)
    return found


def position(marker):
    return float(marker.get("x")), float(marker.get("y"))


@every_figure
@every_theme
def test_the_file_is_svg_without_pixels(draw, theme):
    root = ElementTree.fromstring(draw(theme))
    assert root.tag == f"{SVG}svg"
    assert not list(root.iter(f"{SVG}image"))


@every_figure
def test_same_data_same_bytes_whatever_the_settings_of_the_user(draw):
    first = draw("light")
    with matplotlib.rc_context({"font.size": 30, "axes.facecolor": "red", "svg.fonttype": "path"}):
        assert draw("light") == first


@pytest.mark.slow
def test_same_bytes_in_another_process_and_no_global_figure():
    code = (
        "import sys, hashlib, test_figures\n"
        "print(hashlib.sha256(test_figures.FIGURES['overview']('dark')).hexdigest())\n"
        "print('matplotlib.pyplot' in sys.modules)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        cwd=Path(__file__).parent,
        env={**os.environ, "PYTHONHASHSEED": "7"},
        capture_output=True,
        text=True,
        check=True,
    )
    assert done.stdout.split() == [sha256(overview(POINTS, "dark")).hexdigest(), "False"]


@every_figure
def test_settings_of_matplotlib_are_left_as_they_were(draw):
    before = dict(matplotlib.rcParams)
    draw("dark")
    assert dict(matplotlib.rcParams) == before


@every_figure
def test_themes_differ_in_colours_only(draw):
    light, dark = draw("light"), draw("dark")
    assert light != dark
    assert texts(light) == texts(dark)


@every_figure
@every_theme
def test_the_background_is_transparent(draw, theme):
    root = ElementTree.fromstring(draw(theme))
    patch = root.find(f".//{SVG}g[@id='patch_1']/{SVG}path")
    assert "fill: none" in patch.get("style")


def test_overview_has_a_key_of_methods_settings_and_sources():
    svg = overview(POINTS, "light")
    assert "Known against novel accuracy" in texts(svg)
    assert {"method", "setting", "source", "all 80"} <= set(texts(svg))
    ours = "this project (UNO, NCDwF: one seed)"
    assert set(key(svg)) == {*METHODS.values(), *SETTINGS, "published", ours}
    assert "fill-opacity: 0;" in key(svg)["published"].get("style")
    assert "fill-opacity: 0;" not in key(svg)[ours].get("style")


def test_the_key_has_the_colours_and_shapes_of_the_points():
    settings = ("cifar100-50-50", "own-2-3")
    points = [point(40.0, 50.0 + i, setting=s, source="ours") for i, s in enumerate(settings)]
    svg = overview(points, "light")
    found, drawn = key(svg), markers(svg, NCDWF_COLOUR)
    assert NCDWF_COLOUR in found["NCDwF"].get("style")
    shapes = [shape(svg, found[name]) for name in ("CIFAR-100-50-50", "own-2-3")]
    assert shapes == [shape(svg, marker) for marker in drawn]
    assert shapes[0] != shapes[1]


def test_a_key_with_no_room_for_a_row_breaks_it():
    names = [*paper.TASK_AWARE, "own-data-of-the-first-kind-2-3", "own-data-of-another-kind-4-5"]
    svg = overview([point(0.0, 100.0, setting=name) for name in names], "light")
    spots = {name: position(marker) for name, marker in key(svg).items()}
    assert set(spots) == {"NCDwF", *SETTINGS, *names[-2:], "published"}
    assert max(x + 10 + text_width(name, NORMAL) for name, (x, _) in spots.items()) <= 590
    heights = [y for _, y in spots.values()]
    assert len(set(heights)) == 4  # settings have two rows
    assert heights == sorted(heights)
    assert max(heights) < position(markers(svg, NCDWF_COLOUR)[0])[1] - 10


def test_the_key_says_how_many_seeds_points_are_the_means_of():
    def told(*points):
        return next(name for name in texts(overview(points, "light")) if "this project" in name)

    ours = [
        replace(point(50.0, 50.0, source="ours", setting=setting), num_seeds=3)
        for setting in ("cifar10-5-5", "cifar100-50-50")
    ]
    others = [replace(ours[0], method=name, num_seeds=1) for name in ("uno", "ncdwf-gauss")]
    expected = "this project (NCDwF: mean of 3 seeds; UNO, ncdwf-gauss: one seed)"
    assert told(*ours, *others) == expected
    unequal = replace(ours[1], num_seeds=2)
    assert told(ours[0], unequal) == "this project (NCDwF: means of 2 to 3 seeds)"


def test_points_are_labelled_with_their_settings_once_where_they_are_near():
    far = [point(90.0, 90.0), point(10.0, 90.0, method="uno")]
    near = [point(91.0, 88.0, method="ncdwf-gauss", source="ours")]
    for points in (far, far + near):
        # Once in the key, and at each of two places.
        assert texts(overview(points, "light")).count("CIFAR-10-5-5") == 3
    assert texts(overview(far + near, "light")).count("ncdwf-gauss") == 1


def test_overview_takes_methods_and_settings_that_it_does_not_know():
    svg = overview([point(50.0, 60.0, setting="own-2-3", method="<mine> & $x$")], "light")
    assert {"own-2-3", "<mine> & $x$"} <= set(texts(svg))
    assert not [text for text in texts(svg) if "this project" in text]


def test_points_stand_where_their_accuracies_are():
    corners = [point(0.0, 0.0), point(100.0, 100.0, setting="a"), point(25.0, 75.0, setting="b")]
    low, high, third = map(position, markers(overview(corners, "light"), NCDWF_COLOUR))
    assert low[0] < high[0]
    assert low[1] > high[1]  # SVG counts downwards
    assert third[0] == pytest.approx(low[0] + 0.25 * (high[0] - low[0]))
    assert third[1] == pytest.approx(low[1] + 0.75 * (high[1] - low[1]))


PAIR = [point(40.0, 50.0), point(45.0, 52.0, source="ours")]


def test_the_paper_is_hollow_and_this_project_filled():
    hollow, filled = markers(overview(PAIR, "light"), NCDWF_COLOUR)
    assert "fill-opacity: 0;" in hollow.get("style")
    assert f"fill: {NCDWF_COLOUR}" in filled.get("style")


def test_a_line_links_the_same_method_on_the_same_setting():
    def num_lines(points):
        paths = ElementTree.fromstring(overview(points, "light")).iter(f"{SVG}path")
        # Shapes of markers have an id.
        return sum(NCDWF_COLOUR in p.get("style", "") and not p.get("id") for p in paths)

    assert num_lines(PAIR) == 1
    assert num_lines([PAIR[0], replace(PAIR[1], setting="other")]) == 0


@pytest.mark.parametrize(
    ("points", "message"),
    [
        ([], "no points"),
        ([point(101.0, 50.0)], "percentages"),
        ([point(50.0, float("nan"))], "percentages"),
        ([point(50.0, 50.0), point(51.0, 50.0)], "two points"),
        ([point(50.0, 50.0, method=f"m{i}") for i in range(9)], "too many methods"),
        ([point(50.0, 50.0, setting=f"s{i}") for i in range(9)], "too many settings"),
    ],
)
def test_overview_refuses(points, message):
    with pytest.raises(InputError, match=message):
        overview(points, "light")


ROOM = np.array([0.0, 0.0, 100.0, 100.0])
NOTHING = np.zeros((0, 4))
obstacles = st.builds(
    lambda left, bottom, width, height: [left, bottom, left + width, bottom + height],
    *(st.floats(0, 90), st.floats(0, 90), st.floats(1, 10), st.floats(1, 10)),
)


def test_a_label_prefers_the_right_hand_side():
    box = free_box((20.0, 8.0), np.array([[50.0, 50.0]]), NOTHING, ROOM)
    assert box.tolist() == [59.5, 46, 79.5, 54]


def test_a_label_evades_what_is_there_and_the_edge():
    right = np.array([[60.0, 40.0, 90.0, 60.0]])
    assert free_box((20.0, 8.0), np.array([[50.0, 50.0]]), right, ROOM)[2] == 40.5
    assert free_box((20.0, 8.0), np.array([[95.0, 50.0]]), NOTHING, ROOM)[2] == 85.5


def test_a_label_may_stand_at_another_point_of_its_pair():
    around = np.array([[0.0, 0.0, 50.0, 100.0]])
    box = free_box((20.0, 8.0), np.array([[20.0, 50.0], [60.0, 50.0]]), around, ROOM)
    assert box.tolist() == [69.5, 46, 89.5, 54]


@given(st.lists(obstacles, max_size=2), st.floats(30, 70), st.floats(30, 70))
def test_a_label_finds_a_free_side_if_little_is_in_the_way(taken, x, y):
    taken = np.array(taken, dtype=np.float64).reshape(-1, 4)
    box = free_box((12.0, 8.0), np.array([[x, y]]), taken, ROOM)
    apart = (box[:2] >= taken[:, 2:]) | (box[2:] <= taken[:, :2])
    assert apart.any(1).all()


def test_maturity_names_its_curves_with_their_last_values():
    found = texts(FIGURES["maturity"]("light"))
    assert {"AUROC 0.93", "known accepted 0.90", "novel found 0.70", "AUROC by chance"} <= set(
        found
    )


def test_maturity_names_its_run_and_its_threshold():
    found = texts(FIGURES["maturity"]("light"))
    assert "UNO on CIFAR-100-80-20, seed 4" in found
    assert any("of the calibrated threshold τ" in text for text in found)
    fixed = texts(maturity(*CURVES, 0.99, ORIGIN, "light"))
    assert any("of the threshold τ = 0.99" in text for text in fixed)
    assert not any("calibrated" in text for text in fixed)


def test_maturity_of_one_epoch_is_points_over_one_tick():
    svg = maturity([7], [0.5], [0.4], [0.6], "calibrated", ORIGIN, "light")
    assert texts(svg).count("7") == 1
    auroc, known, novel = (
        position(*markers(svg, colour)) for colour in ("#d55e00", "#0072b2", "#009e73")
    )
    assert novel[1] < auroc[1] < known[1]


@pytest.mark.parametrize(
    ("epochs", "auroc", "message"),
    [
        ([], [], "no epochs"),
        ([0, 0], [0.5, 0.5], "ascend"),
        ([0, 1], [0.5], "1 values for 2 epochs"),
        ([0], [97.0], "between 0 and 1"),
        ([0], [float("nan")], "between 0 and 1"),
    ],
)
def test_maturity_refuses(epochs, auroc, message):
    shares = [0.5] * len(epochs)
    with pytest.raises(InputError, match=message):
        maturity(epochs, auroc, shares, shares, "calibrated", ORIGIN, "light")


@given(st.lists(st.floats(0, 100), min_size=1, max_size=5))
def test_labels_are_spread_in_order_and_below_the_top(heights):
    placed = spread(heights, 10.0, 100.0)
    assert max(placed) <= 100
    order = np.argsort(heights, kind="stable")
    assert (np.diff(np.array(placed)[order]) >= 10 - 1e-9).all()


def test_labels_that_are_apart_stay():
    assert spread([70.0, 10.0, 40.0], 10.0, 100.0) == [70, 10, 40]


def test_confusion_names_all_classes():
    found = texts(confusion(COUNTS, KNOWN, NOVEL, ORIGIN, "light"))
    for name in KNOWN:  # above and below, because the picture is long
        assert found.count(name.replace("_", " ")) == 2
    for name in NOVEL:
        assert found.count(name.replace("_", " ")) == 1


def test_confusion_names_its_run():
    assert "UNO on CIFAR-100-80-20, seed 4" in texts(FIGURES["confusion"]("light"))


def test_confusion_has_its_rows_in_order():
    counts = np.array([[1, 9], [6, 4], [0, 5], [8, 2]])
    found = texts(confusion(counts, "ab", "klmn", ORIGIN, "light"))
    assert [name for name in found if name in "klmn"] == ["n", "l", "m", "k"]


def test_only_cells_above_half_carry_their_percentage():
    counts = np.array([[1, 1, 0], [3, 10, 0]])
    found = texts(confusion(counts, "abc", "kl", ORIGIN, "light"))
    assert "numbers: percent, where above 50" in found
    assert [text for text in found if text.isdigit()] == ["77"]


def test_rows_of_few_and_many_pictures_count_alike():
    few = np.array([[1, 3], [2, 2]])
    picture = confusion(few, "ab", "kl", ORIGIN, "dark")
    assert picture == confusion(few * 50, "ab", "kl", ORIGIN, "dark")
    assert row_order(few).tolist() == [1, 0]


@pytest.mark.parametrize(
    ("counts", "known", "novel", "message"),
    [
        (np.zeros((0, 2), np.int64), ["a", "b"], [], "no classes"),
        (np.ones((2, 2), np.int64), ["a"], ["k", "l"], "do not fit"),
        (np.array([[1, 2], [0, 0]]), ["a", "b"], ["k", "l"], "needs a picture"),
        (np.array([[1, -2]]), ["a", "b"], ["k"], "negative"),
    ],
)
def test_confusion_refuses(counts, known, novel, message):
    with pytest.raises(InputError, match=message):
        confusion(counts, known, novel, ORIGIN, "light")

"""Pictures of results as SVG: plain data in, the bytes of a file out, the same ones every time.

The background is transparent. Every picture is made twice, for light pages and for dark ones.
All lengths are points (1/72 inch).
"""

import io
import math
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise, product
from typing import Literal

import numpy as np
from jaxtyping import Float, Int64
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.figure import Figure
from matplotlib.patches import Rectangle
from matplotlib.textpath import TextPath
from matplotlib.ticker import MaxNLocator
from numpy import ndarray

from ncdwf.errors import InputError

Theme = Literal["light", "dark"]
Source = Literal["paper", "ours"]
Spot = tuple[float, float]
Spots = Float[ndarray, "spot 2"]
Box = Float[ndarray, "4"]
"""Left, bottom, right, top."""
Boxes = Float[ndarray, "box 4"]
Pairs = Int64[ndarray, "novel known"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Known and novel accuracy, in percent, of one method on one setting."""

    setting: str
    method: str
    source: Source
    known: float
    novel: float


@dataclass(frozen=True, kw_only=True, slots=True)
class _Look:
    """The colours of a theme."""

    text: str
    muted: str
    faint: str
    palette: tuple[str, ...]
    """By Okabe and Ito, for colour-blind readers; without what would fade on the page."""
    heat: tuple[str, ...]
    """From none to all."""
    on_heat: str
    """Text on the upper half of `heat`."""


_LOOKS: dict[Theme, _Look] = {
    "light": _Look(
        text="#1f2328",
        muted="#59636e",
        faint="#d1d9e0",
        palette=("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
        heat=("#f0f3f6", "#0072b2", "#00324f"),
        on_heat="#ffffff",
    ),
    "dark": _Look(
        text="#f0f6fc",
        muted="#9198a1",
        faint="#3d444d",
        palette=("#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#f0e442"),
        heat=("#1a2028", "#56b4e9", "#e3f4fd"),
        on_heat="#0d1117",
    ),
}
_SHAPES = ("o", "s", "^", "D", "v", "p", "h", "X")
_LARGE, _NORMAL, _SMALL = 13.0, 10.0, 8.5
_MARKER, _RING = 6.5, 9.5
_MARGIN = 10.0
_GAPS = (9.5, 12.0, 16.0)
"""How far a label may be from the middle of its marker."""
_MEANS = (20.0, 40.0, 60.0, 80.0)
_OVERVIEW = (600.0, 440.0)
_MATURITY = (600.0, 300.0)
_HEAT_WIDTH, _CELL_WIDTHS, _CELL_HEIGHT = 480.0, (13.0, 40.0), 13.0
_LONG = 40
"""A heat map of more rows repeats the names of its columns at the end."""

_METHODS = {"ncdwf": "NCDwF", "uno": "UNO", "rs": "RS", "ncl": "NCL", "ncdwf-gauss": "Gauss"}
_SETTINGS = {
    "cifar10-5-5": "CIFAR-10 5-5",
    "cifar100-80-20": "CIFAR-100 80-20",
    "cifar100-50-50": "CIFAR-100 50-50",
    "cifar100-20-80": "CIFAR-100 20-80",
    "imagenet-882-30": "ImageNet 882-30",
    "digits-5-5": "digits 5-5",
}
_SOURCES: dict[Source, str] = {"paper": "published", "ours": "this project"}


def overview(points: Sequence[Point], theme: Theme) -> bytes:
    """Draw known against novel accuracy, task-aware.

    Colours tell methods, shapes tell settings; what the paper reports is hollow, what was measured
    here is filled, and a thin line links the two.
    """
    _check_points(points)
    look = _LOOKS[theme]
    with _style(look):
        page = _page(*_OVERVIEW)
        _title(page, "Known against novel accuracy", "task-aware, in percent", look)
        axes = _axes(page, left=50.0, bottom=42.0, right=_MARGIN, top=56.0)
        axes.set(
            xlim=(-3, 103),
            ylim=(-3, 103),
            xlabel="known accuracy: less forgotten →",
            ylabel="novel accuracy: more discovered →",
        )
        _draw_means(axes, look)
        colours = _assign(_METHODS, (point.method for point in points), look.palette, "methods")
        shapes = _assign(_SETTINGS, (point.setting for point in points), _SHAPES, "settings")
        for point in points:
            at = (point.known, point.novel)
            _draw_marker(axes, at, colours[point.method], shapes[point.setting], point.source)
        for paper, ours in _linked(points):
            axes.plot(
                [paper.known, ours.known],
                [paper.novel, ours.novel],
                color=colours[paper.method],
                linewidth=1,
                zorder=1,
            )
        _draw_overview_key(page, points, colours, look)
        _label_points(page, axes, points, look)
        return _svg(page)


def maturity(
    epochs: Sequence[int],
    auroc: Sequence[float],
    known_kept: Sequence[float],
    novel_found: Sequence[float],
    theme: Theme,
) -> bytes:
    """Draw how the identifier matures over the epochs of discovery.

    Args:
        epochs: when it was measured, ascending.
        auroc: how well it ranks novel test pictures above known ones; this and the shares: 0…1.
        known_kept: the share of known test pictures that are accepted as known.
        novel_found: the share of novel test pictures that are routed to novel.
        theme: of the page.
    """
    curves = {"AUROC": auroc, "known accepted": known_kept, "novel found": novel_found}
    _check_curves(epochs, curves)
    look = _LOOKS[theme]
    with _style(look):
        page = _page(*_MATURITY)
        _title(
            page,
            "How the identifier matures",
            "AUROC, and the shares of test pictures on the right side of τ",
            look,
        )
        axes = _axes(page, left=42.0, bottom=42.0, right=132.0, top=50.0)
        axes.set(ylim=(-0.02, 1.02), xlabel="epoch of discovery")
        room = max(0.02 * (epochs[-1] - epochs[0]), 0.5)
        axes.set_xlim(epochs[0] - room, epochs[-1] + room)
        axes.xaxis.set_major_locator(MaxNLocator(integer=True, min_n_ticks=1))
        axes.axhline(0.5, color=look.faint, linewidth=1, linestyle=(0, (4, 3)))
        ends = [("AUROC by chance", 0.5, look.muted)]
        for (name, values), colour in zip(curves.items(), look.palette, strict=False):
            axes.plot(epochs, values, color=colour, linewidth=2, marker="o", markersize=3)
            ends.append((f"{name} {values[-1]:.2f}", values[-1], colour))
        _label_ends(page, axes, ends)
        return _svg(page)


def confusion(
    counts: Pairs, known_names: Sequence[str], novel_names: Sequence[str], theme: Theme
) -> bytes:
    """Draw into which known classes the known head puts the pictures of each novel class.

    Args:
        counts: how many pictures of a novel class (row) it puts into a known one (column).
        known_names: of the columns.
        novel_names: of the rows; the picture has them in the order of `row_order`.
        theme: of the page.
    """
    _check_counts(counts, known_names, novel_names)
    order = row_order(counts)
    shares = _shares(counts)[order]
    rows = [_spoken(novel_names[index]) for index in order]
    columns = [_spoken(name) for name in known_names]
    look = _LOOKS[theme]
    heat = LinearSegmentedColormap.from_list("heat", look.heat)
    with _style(look):
        page, axes = _heat_page(rows, columns, heat, look)
        _draw_cells(axes, shares, heat, look)
        _draw_groups(axes, shares, look)
        _draw_heat_key(page, heat, look)
        return _svg(page)


def row_order(counts: Pairs) -> Int64[ndarray, " novel"]:
    """Return the rows by their most frequent known class, then by its share, the largest first.

    >>> row_order(np.array([[1, 9], [6, 4], [0, 5], [8, 2]])).tolist()
    [3, 1, 2, 0]
    """
    shares = _shares(counts)
    return np.lexsort((-shares.max(1), shares.argmax(1)))


def _check_points(points: Sequence[Point]) -> None:
    if not points:
        raise InputError("there are no points to draw")
    for point in points:
        if not (0 <= point.known <= 100 and 0 <= point.novel <= 100):
            raise InputError(f"accuracies are percentages from 0 to 100; got {point}")
    if len({(p.setting, p.method, p.source) for p in points}) < len(points):
        raise InputError("a method has two points of the same source on one setting")


def _check_curves(epochs: Sequence[int], curves: dict[str, Sequence[float]]) -> None:
    if not epochs:
        raise InputError("there are no epochs to draw")
    if any(later <= earlier for earlier, later in pairwise(epochs)):
        raise InputError("epochs must ascend")
    for name, values in curves.items():
        if len(values) != len(epochs):
            raise InputError(f"{name} has {len(values)} values for {len(epochs)} epochs")
        if not all(0 <= value <= 1 for value in values):
            raise InputError(f"{name} must lie between 0 and 1")


def _check_counts(counts: Pairs, known_names: Sequence[str], novel_names: Sequence[str]) -> None:
    if not counts.size:
        raise InputError("there are no classes to draw")
    if counts.shape != (len(novel_names), len(known_names)):
        raise InputError(
            f"{len(novel_names)} novel and {len(known_names)} known names do not fit counts of "
            f"{counts.shape[0]} × {counts.shape[1]}"
        )
    if counts.min() < 0 or not counts.any(1).all():
        raise InputError("every novel class needs a picture, and no count may be negative")


@contextmanager
def _style(look: _Look) -> Iterator[None]:
    """Draw and save with these settings, whatever the user's own are; they come back afterwards."""
    settings = {
        # Text as text: small and searchable. It is laid out in the first of these fonts, which
        # matplotlib brings along; the second, wherever the first is missing, is as wide.
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica", "sans-serif"],
        "svg.hashsalt": "ncdwf",
        "text.parse_math": False,
        "text.color": look.text,
        "font.size": _NORMAL,
        "axes.facecolor": "none",
        "figure.facecolor": "none",
        "savefig.facecolor": "none",
        "axes.edgecolor": look.faint,
        "axes.labelcolor": look.text,
        "axes.spines.top": False,
        "axes.spines.right": False,
        "xtick.color": look.faint,
        "ytick.color": look.faint,
        "xtick.labelcolor": look.muted,
        "ytick.labelcolor": look.muted,
    }
    with style.context(settings, after_reset=True):
        yield


def _page(width: float, height: float) -> Axes:
    """Return the whole of a new figure as axes whose unit is the point."""
    figure = Figure(figsize=(width / 72, height / 72))
    page = figure.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, width), ylim=(0, height))
    page.set_axis_off()
    return page


def _size(page: Axes) -> Spot:
    return page.get_xlim()[1], page.get_ylim()[1]


def _axes(page: Axes, *, left: float, bottom: float, right: float, top: float) -> Axes:
    """Return new axes that keep these distances from the edges of the page."""
    width, height = _size(page)
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return page.figure.add_axes(box)


def _edges(page: Axes, axes: Axes) -> Box:
    """Return where axes lie on their page."""
    return np.array(axes.bbox.transformed(page.transData.inverted()).extents)


def _title(page: Axes, title: str, subtitle: str, look: _Look) -> None:
    top = _size(page)[1] - _MARGIN
    page.text(_MARGIN, top, title, size=_LARGE, weight="bold", va="top")
    page.text(_MARGIN, top - 19, subtitle, color=look.muted, va="top")


def _svg(page: Axes) -> bytes:
    file = io.BytesIO()
    # Neither the date nor the version of matplotlib: the same data give the same bytes.
    page.figure.canvas.print_figure(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()


def _assign(
    first: Iterable[str], used: Iterable[str], choices: Sequence[str], what: str
) -> dict[str, str]:
    """Give every name its own choice; those in `first` always have the same."""
    names = list(dict.fromkeys([*first, *used]))
    if len(names) > len(choices):
        raise InputError(f"too many {what} for one picture: {', '.join(names[len(choices) :])}")
    return dict(zip(names, choices, strict=False))


def _linked(points: Sequence[Point]) -> list[tuple[Point, Point]]:
    """Return what the paper reports beside what was measured here, where there is both."""
    paper = {(p.setting, p.method): p for p in points if p.source == "paper"}
    ours = {(p.setting, p.method): p for p in points if p.source == "ours"}
    return [(paper[key], ours[key]) for key in paper if key in ours]


def _draw_means(axes: Axes, look: _Look) -> None:
    """Draw lines of equal mean of known and novel accuracy."""
    for mean in _MEANS:
        (low, high), (right, bottom) = _mean_line(mean)
        axes.plot([low, right], [high, bottom], color=look.faint, linewidth=0.8, zorder=0)
        axes.text(
            right,
            bottom,
            f"all {mean:.0f}",
            size=_SMALL,
            color=look.muted,
            ha="right",
            va="bottom",
            rotation=-45,
            rotation_mode="anchor",
            transform_rotates_text=True,
        )


def _mean_line(mean: float) -> tuple[Spot, Spot]:
    """Return the ends of the line on which known and novel accuracy have this mean.

    >>> _mean_line(60.0)
    ((20.0, 100.0), (100.0, 20.0))
    """
    low, high = max(0.0, 2 * mean - 100), min(100.0, 2 * mean)
    return (low, high), (high, low)


def _draw_marker(axes: Axes, at: Spot, colour: str, shape: str, source: Source) -> None:
    hollow = source == "paper"
    axes.plot(
        *at,
        marker=shape,
        color=colour,
        linestyle="none",
        # The larger ring stays in sight where both sources agree.
        markersize=_RING if hollow else _MARKER,
        markerfacecolor="none" if hollow else colour,
        markeredgewidth=1.4 if hollow else 0,
        clip_on=False,
    )


def _draw_overview_key(
    page: Axes, points: Sequence[Point], colours: dict[str, str], look: _Look
) -> None:
    """Write from the right: what fillings mean, what colours mean."""
    sources = {point.source for point in points}
    methods = {point.method for point in points}
    right, top = _size(page)
    at, height = right - _MARGIN, top - _MARGIN - 24
    for source, name in reversed(_SOURCES.items()):
        if source in sources:
            at = _draw_entry(page, (at, height), name, look.muted, source)
    at -= 14
    for method, colour in reversed(colours.items()):
        if method in methods:
            name = _METHODS.get(method, method)
            at = _draw_entry(page, (at, height), name, colour, "ours")


def _draw_entry(page: Axes, at: Spot, name: str, colour: str, source: Source) -> float:
    """Write one entry of a key that ends at `at`; return where the one to its left may end."""
    left = at[0] - _text_width(name, _NORMAL)
    page.text(left, at[1], name, va="center_baseline")
    _draw_marker(page, (left - 10, at[1]), colour, "o", source)
    return left - 26


def _text_width(text: str, size: float) -> float:
    return float(TextPath((0, 0), text, size=size).get_extents().width)


def _label_points(page: Axes, axes: Axes, points: Sequence[Point], look: _Look) -> None:
    """Name the setting at its best point and the method at all others, where there is room."""
    to_page = axes.transData + page.transData.inverted()
    room = _edges(page, axes) + np.array([4, 4, -4, -4])
    lines = [_mean_line(mean) for mean in _MEANS]
    lines += [((a.known, a.novel), (b.known, b.novel)) for a, b in _linked(points)]
    dots = np.concatenate([_dots(to_page.transform(line)) for line in lines])
    spots = to_page.transform([(point.known, point.novel) for point in points])
    taken = np.concatenate([_around(spots, (_RING + 2, _RING + 2)), _around(dots, (2.0, 2.0))])
    pairs = [(point.setting, point.method) for point in points]
    best = {p.setting: p.method for p in sorted(points, key=lambda p: p.known + p.novel)}
    # The long names go first: they need most room.
    for pair in sorted(dict.fromkeys(pairs), key=lambda pair: best[pair[0]] != pair[1]):
        setting, method = pair
        is_best = best[setting] == method
        text = _SETTINGS.get(setting, setting) if is_best else _METHODS.get(method, method)
        anchors = spots[[index for index, other in enumerate(pairs) if other == pair]]
        box = free_box((_text_width(text, _SMALL), _SMALL + 3), anchors, taken, room)
        colour = look.text if is_best else look.muted
        middle = (box[1] + box[3]) / 2
        page.text(box[0], middle, text, size=_SMALL, color=colour, va="center_baseline")
        taken = np.concatenate([taken, box[None]])


def free_box(size: Spot, anchors: Spots, taken: Boxes, room: Box) -> Box:
    """Return a box near an anchor that covers little; the first of equally good ones.

    Args:
        size: its width and height.
        anchors: where it may stand.
        taken: what it should not cover.
        room: what it should not leave.
    """
    sides = ((1, 0), (-1, 0), (0, 1), (0, -1), (0.7, 0.7), (0.7, -0.7), (-0.7, 0.7), (-0.7, -0.7))
    found, least = np.zeros(4), math.inf
    for gap, (h, v) in product(_GAPS, sides):
        step = (h * gap + np.sign(h) * size[0] / 2, v * gap + np.sign(v) * size[1] / 2)
        boxes = _around(anchors + np.array(step), size)
        outside = size[0] * size[1] - _shared(boxes, room[None]).sum(1)
        # A label far from its point is as bad as one that covers a little. Rounded, so that what
        # is equally good does not depend on the last bit.
        costs = np.round(outside + _shared(boxes, taken).sum(1) + 2 * gap, 3)
        if costs.min() < least:
            found, least = boxes[costs.argmin()], costs.min()
    return found


def _around(centres: Spots, size: Spot) -> Boxes:
    half = np.array(size) / 2
    return np.concatenate([centres - half, centres + half], axis=1)


def _dots(ends: Float[ndarray, "2 2"]) -> Spots:
    """Return spots along a line, close enough that no label fits between them."""
    return np.linspace(ends[0], ends[1], 50)


def _shared(boxes: Boxes, others: Float[ndarray, "other 4"]) -> Float[ndarray, "box other"]:
    """Return the areas that boxes have in common with others."""
    low = np.maximum(boxes[:, None, :2], others[:, :2])
    high = np.minimum(boxes[:, None, 2:], others[:, 2:])
    areas: Float[ndarray, "box other"] = (high - low).clip(min=0).prod(2)
    return areas


def _label_ends(page: Axes, axes: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Write the names of curves to the right of where they end."""
    _, bottom, right, top = _edges(page, axes).tolist()
    low, high = axes.get_ylim()
    heights = [bottom + (value - low) / (high - low) * (top - bottom) for _, value, _ in ends]
    left = right + 8
    for (name, _, colour), height in zip(ends, spread(heights, 13.0, top), strict=True):
        page.text(left, height, name, color=colour, va="center_baseline")


def spread(heights: Sequence[float], gap: float, top: float) -> list[float]:
    """Move heights up, or down where there is no room, until they are `gap` apart below `top`.

    >>> spread([5.0, 50.0, 49.0], gap=10.0, top=55.0)
    [5.0, 55.0, 45.0]
    """
    order = np.argsort(heights, kind="stable").tolist()
    placed = list(heights)
    for lower, upper in pairwise(order):
        placed[upper] = max(placed[upper], placed[lower] + gap)
    placed[order[-1]] = min(placed[order[-1]], top)
    for upper, lower in pairwise(reversed(order)):
        placed[lower] = min(placed[lower], placed[upper] - gap)
    return placed


def _shares(counts: Pairs) -> Float[ndarray, "novel known"]:
    shares: Float[ndarray, "novel known"] = counts / counts.sum(1, keepdims=True)
    return shares


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _heat_page(
    rows: Sequence[str], columns: Sequence[str], heat: Colormap, look: _Look
) -> tuple[Axes, Axes]:
    """Return a page that is as large as its names need, and the axes of the cells."""
    narrow, wide = _CELL_WIDTHS
    width = len(columns) * min(max(_HEAT_WIDTH / len(columns), narrow), wide)
    left = max(_text_width(name, _SMALL) for name in rows) + 20
    slant = max(_text_width(name, _SMALL) for name in columns) * math.sqrt(0.5) + 14
    top = slant + 66
    bottom = slant if len(rows) > _LONG else _MARGIN
    subtitle = "share of the test pictures of a novel class (row) by known class (column)"
    needed = _text_width(subtitle, _NORMAL) + 3 * _MARGIN
    page = _page(max(left + width + slant, needed), top + len(rows) * _CELL_HEIGHT + bottom)
    _title(page, "What the known head takes novel classes for", subtitle, look)
    right = _size(page)[0] - left - width
    axes = _axes(page, left=left, bottom=bottom, right=right, top=top)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), xticks=[], facecolor=heat(0.0))
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.tick_params(length=0, labelsize=_SMALL, labelcolor=look.text)
    axes.spines[:].set_visible(False)
    _name_columns(axes, columns, 0, 4.0, "left")
    if len(rows) > _LONG:
        _name_columns(axes, columns, len(rows), -4.0, "right")
    return page, axes


def _name_columns(
    axes: Axes, names: Sequence[str], row: int, rise: float, side: Literal["left", "right"]
) -> None:
    """Write slanted names, which begin or end at the middle of their columns."""
    for column, name in enumerate(names):
        axes.annotate(
            name,
            (column + 0.5, row),
            xytext=(0, rise),
            textcoords="offset points",
            size=_SMALL,
            rotation=45,
            rotation_mode="anchor",
            ha=side,
            va="center",
            annotation_clip=False,
        )


def _draw_cells(
    axes: Axes, shares: Float[ndarray, "novel known"], heat: Colormap, look: _Look
) -> None:
    for row, column in np.argwhere(shares).tolist():
        share = shares[row, column]
        cell = Rectangle((column + 0.03, row + 0.03), 0.94, 0.94, facecolor=heat(share))
        axes.add_patch(cell)
        if share > 0.5:
            axes.text(
                column + 0.5,
                row + 0.5,
                f"{100 * share:.0f}",
                size=_SMALL,
                color=look.on_heat,
                ha="center",
                va="center_baseline",
            )


def _draw_groups(axes: Axes, shares: Float[ndarray, "novel known"], look: _Look) -> None:
    """Part the rows where their most frequent known class changes."""
    for row in np.flatnonzero(np.diff(shares.argmax(1))).tolist():
        axes.axhline(row + 1, color=look.muted, linewidth=0.4)


def _draw_heat_key(page: Axes, heat: Colormap, look: _Look) -> None:
    top = _size(page)[1] - _MARGIN - 48
    at = _MARGIN
    for percent in (0, 25, 50, 75, 100):
        page.add_patch(Rectangle((at, top - 5), 16, 10, color=heat(percent / 100)))
        page.text(at + 20, top, f"{percent} %", size=_SMALL, color=look.muted, va="center_baseline")
        at += 56

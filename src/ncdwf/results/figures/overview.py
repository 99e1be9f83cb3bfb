"""Known against novel accuracy: a point a method and setting, the paper's and ours."""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Literal

import numpy as np
from jaxtyping import Float
from matplotlib.axes import Axes
from numpy import ndarray

from ncdwf.errors import InputError
from ncdwf.results.figures.names import METHODS, SETTINGS, method_title, setting_title
from ncdwf.results.figures.page import (
    LOOKS,
    MARGIN,
    NORMAL,
    SMALL,
    Box,
    Look,
    Spot,
    Theme,
    drawn_in,
    edges_of,
    new_axes,
    new_page,
    size_of,
    svg,
    text_width,
    write_title,
)

Source = Literal["paper", "ours"]
Spots = Float[ndarray, "spot 2"]
Boxes = Float[ndarray, "box 4"]
_Entry = tuple[str, str, str, Source]
"""One of a key: its name and the colour, shape and source of its marker."""
_SHAPES = ("o", "s", "^", "D", "v", "p", "h", "X")
_MARKER, _RING = 6.5, 9.5
_ROW = 15.0
"""How far apart the rows of the key are."""
_GAPS = (9.5, 12.0, 16.0)
"""How far a label may be from the middle of its marker."""
_NEAR = 60.0
"""Points of a setting that are less far apart have its name but once."""
_MEANS = (20.0, 40.0, 60.0, 80.0)
_SIZE = (600.0, 490.0)
_SUBTITLE = (
    "task-aware (each picture is asked of the head it belongs to), percent; all: mean of both"
)


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Known and novel accuracy, in percent, of one method on one setting."""

    setting: str
    method: str
    source: Source
    known: float
    novel: float
    num_seeds: int = 1
    """Of how many runs these are the means; the paper does not say it of its own."""


def overview(points: Sequence[Point], theme: Theme) -> bytes:
    """Draw known against novel accuracy, task-aware.

    Colours tell methods, shapes tell settings; what the paper reports is hollow, what was measured
    here is filled, and a thin line links the two. A key says so.
    """
    _check_points(points)
    look = LOOKS[theme]
    with drawn_in(look):
        page = new_page(*_SIZE)
        colours = _assign(METHODS, (point.method for point in points), look.palette, "methods")
        shapes = _assign(SETTINGS, (point.setting for point in points), _SHAPES, "settings")
        used = write_title(page, "Known against novel accuracy", [_SUBTITLE], look)
        used = _draw_key(page, used + 12, _key(points, colours, shapes, look), look)
        axes = new_axes(page, left=50.0, bottom=42.0, right=MARGIN, top=used + 4)
        axes.set(
            xlim=(-3, 103),
            ylim=(-3, 103),
            xlabel="known accuracy: less forgotten →",
            ylabel="novel accuracy: more discovered →",
        )
        _draw_means(axes, look)
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
        _label_points(page, axes, points, look)
        return svg(page)


def _check_points(points: Sequence[Point]) -> None:
    if not points:
        raise InputError("there are no points to draw")
    for point in points:
        if not (0 <= point.known <= 100 and 0 <= point.novel <= 100):
            raise InputError(f"accuracies are percentages from 0 to 100; got {point}")
    if len({(p.setting, p.method, p.source) for p in points}) < len(points):
        raise InputError("a method has two points of the same source on one setting")


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


def _draw_means(axes: Axes, look: Look) -> None:
    """Draw lines of equal mean of known and novel accuracy."""
    for mean in _MEANS:
        (low, high), (right, bottom) = _mean_line(mean)
        axes.plot([low, right], [high, bottom], color=look.faint, linewidth=0.8, zorder=0)
        axes.text(
            right,
            bottom,
            f"all {mean:.0f}",
            size=SMALL,
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


def _key(
    points: Sequence[Point], colours: dict[str, str], shapes: dict[str, str], look: Look
) -> dict[str, list[_Entry]]:
    """Return what colours, shapes and fillings mean, but of those alone that are there."""
    methods, settings, sources = (
        {getattr(point, name) for point in points} for name in ("method", "setting", "source")
    )
    names: dict[Source, str] = {"paper": "published", "ours": f"this project ({_seeds(points)})"}
    return {
        "method": [
            (method_title(method), colour, "o", "ours")
            for method, colour in colours.items()
            if method in methods
        ],
        "setting": [
            (setting_title(setting), look.muted, shape, "ours")
            for setting, shape in shapes.items()
            if setting in settings
        ],
        "source": [
            (name, look.muted, "o", source) for source, name in names.items() if source in sources
        ],
    }


def _seeds(points: Sequence[Point]) -> str:
    """Return of how many seeds the points of this project are the means, by method."""
    numbers: dict[str, set[int]] = {}
    for point in points:
        if point.source == "ours":
            numbers.setdefault(point.method, set()).add(point.num_seeds)
    methods: dict[str, list[str]] = {}
    for method, found in numbers.items():
        methods.setdefault(_spoken(min(found), max(found)), []).append(method_title(method))
    return "; ".join(f"{', '.join(names)}: {seeds}" for seeds, names in methods.items())


def _spoken(fewest: int, most: int) -> str:
    """Return what a picture says of numbers of seeds.

    >>> _spoken(1, 1), _spoken(3, 3), _spoken(1, 3)
    ('one seed', 'mean of 3 seeds', 'means of 1 to 3 seeds')
    """
    if most == 1:
        return "one seed"
    return f"mean of {most} seeds" if fewest == most else f"means of {fewest} to {most} seeds"


def _draw_key(page: Axes, down: float, key: dict[str, list[_Entry]], look: Look) -> float:
    """Write the rows of a key so far below the top of the page; return where they end."""
    right, top = size_of(page)
    begin = MARGIN + max(text_width(heading, NORMAL) for heading in key) + 24
    for heading, entries in key.items():
        page.text(MARGIN, top - down, heading, color=look.muted, va="center_baseline")
        at = begin
        for name, colour, shape, source in entries:
            width = text_width(name, NORMAL)
            if at > begin and at + width > right - MARGIN:
                at, down = begin, down + _ROW
            _draw_marker(page, (at - 10, top - down), colour, shape, source)
            page.text(at, top - down, name, va="center_baseline")
            at += width + 30
        down += _ROW
    return down


def _label_points(page: Axes, axes: Axes, points: Sequence[Point], look: Look) -> None:
    """Name the setting beside every method's points, where they are not near to named ones."""
    to_page = axes.transData + page.transData.inverted()
    room = edges_of(page, axes) + np.array([4, 4, -4, -4])
    lines = [_mean_line(mean) for mean in _MEANS]
    lines += [((a.known, a.novel), (b.known, b.novel)) for a, b in _linked(points)]
    dots = np.concatenate([_dots(to_page.transform(line)) for line in lines])
    spots = to_page.transform([(point.known, point.novel) for point in points])
    taken = np.concatenate([_around(spots, (_RING + 2, _RING + 2)), _around(dots, (2.0, 2.0))])
    named: dict[str, list[Spots]] = {}
    pairs = [(point.setting, point.method) for point in points]
    for pair in dict.fromkeys(pairs):
        setting, _ = pair
        anchors = spots[[index for index, other in enumerate(pairs) if other == pair]]
        others = named.setdefault(setting, [])
        if any(_distance(anchors, other) < _NEAR for other in others):
            continue
        others.append(anchors)
        text = setting_title(setting)
        box = free_box((text_width(text, SMALL), SMALL + 3), anchors, taken, room)
        middle = (box[1] + box[3]) / 2
        page.text(box[0], middle, text, size=SMALL, color=look.text, va="center_baseline")
        taken = np.concatenate([taken, box[None]])


def _distance(spots: Spots, others: Float[ndarray, "other 2"]) -> float:
    """Return how far the nearest two are apart."""
    return float(np.linalg.norm(spots[:, None] - others, axis=2).min())


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

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
_SHAPES = ("o", "s", "^", "D", "v", "p", "h", "X")
_MARKER, _RING = 6.5, 9.5
_GAPS = (9.5, 12.0, 16.0)
"""How far a label may be from the middle of its marker."""
_MEANS = (20.0, 40.0, 60.0, 80.0)
_SIZE = (600.0, 440.0)
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


@dataclass(frozen=True, kw_only=True, slots=True)
class Point:
    """Known and novel accuracy, in percent, of one method on one setting."""

    setting: str
    method: str
    source: Source
    known: float
    novel: float


def overview(points: Sequence[Point], theme: Theme) -> bytes:
    """Draw known against novel accuracy, task-aware.

    Colours tell methods, shapes tell settings; what the paper reports is hollow, what was measured
    here is filled, and a thin line links the two.
    """
    _check_points(points)
    look = LOOKS[theme]
    with drawn_in(look):
        page = new_page(*_SIZE)
        write_title(page, "Known against novel accuracy", "task-aware, in percent", look)
        axes = new_axes(page, left=50.0, bottom=42.0, right=MARGIN, top=56.0)
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
        _draw_key(page, points, colours, look)
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


def _draw_key(page: Axes, points: Sequence[Point], colours: dict[str, str], look: Look) -> None:
    """Write from the right: what fillings mean, what colours mean."""
    sources = {point.source for point in points}
    methods = {point.method for point in points}
    right, top = size_of(page)
    at, height = right - MARGIN, top - MARGIN - 24
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
    left = at[0] - text_width(name, NORMAL)
    page.text(left, at[1], name, va="center_baseline")
    _draw_marker(page, (left - 10, at[1]), colour, "o", source)
    return left - 26


def _label_points(page: Axes, axes: Axes, points: Sequence[Point], look: Look) -> None:
    """Name the setting at its best point and the method at all others, where there is room."""
    to_page = axes.transData + page.transData.inverted()
    room = edges_of(page, axes) + np.array([4, 4, -4, -4])
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
        box = free_box((text_width(text, SMALL), SMALL + 3), anchors, taken, room)
        colour = look.text if is_best else look.muted
        middle = (box[1] + box[3]) / 2
        page.text(box[0], middle, text, size=SMALL, color=colour, va="center_baseline")
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

"""Into which known classes the known head puts the pictures of each novel class."""

import math
from collections.abc import Sequence
from typing import Literal

import numpy as np
from jaxtyping import Float, Int64
from matplotlib.axes import Axes
from matplotlib.colors import Colormap, LinearSegmentedColormap
from matplotlib.patches import Rectangle
from numpy import ndarray

from ncdwf.errors import InputError
from ncdwf.results.figures.names import Origin
from ncdwf.results.figures.page import (
    LOOKS,
    MARGIN,
    NORMAL,
    SMALL,
    Look,
    Theme,
    drawn_in,
    new_axes,
    new_page,
    size_of,
    svg,
    text_width,
    write_title,
)

Pairs = Int64[ndarray, "novel known"]
_HEAT_WIDTH, _CELL_WIDTHS, _CELL_HEIGHT = 480.0, (13.0, 40.0), 13.0
_LONG = 40
"""A heat map of more rows repeats the names of its columns at the end."""
_SUBTITLE = "share of the test pictures of a novel class (row) by known class (column)"
_PRINTED = 0.5
_NOTE = f"numbers: percent, where above {100 * _PRINTED:.0f}"
_HEAD = 82.0
"""The room that title and key take."""
_KEY, _KEY_STEP = (0, 25, 50, 75, 100), 56.0
"""The percentages whose colours are shown, and how far apart."""


def confusion(
    counts: Pairs,
    known_names: Sequence[str],
    novel_names: Sequence[str],
    origin: Origin,
    theme: Theme,
) -> bytes:
    """Draw into which known classes the known head puts the pictures of each novel class.

    Args:
        counts: how many pictures of a novel class (row) it puts into a known one (column).
        known_names: of the columns.
        novel_names: of the rows; the picture has them in the order of `row_order`.
        origin: the run whose known head it is.
        theme: of the page.
    """
    _check_counts(counts, known_names, novel_names)
    order = row_order(counts)
    shares = _shares(counts)[order]
    rows = [_spoken(novel_names[index]) for index in order]
    columns = [_spoken(name) for name in known_names]
    look = LOOKS[theme]
    heat = LinearSegmentedColormap.from_list("heat", look.heat)
    with drawn_in(look):
        page, axes = _new_heat_page(rows, columns, origin, heat, look)
        _draw_cells(axes, shares, heat, look)
        _draw_groups(axes, shares, look)
        _draw_key(page, heat, look)
        return svg(page)


def row_order(counts: Pairs) -> Int64[ndarray, " novel"]:
    """Return the rows by their most frequent known class, then by its share, the largest first.

    >>> row_order(np.array([[1, 9], [6, 4], [0, 5], [8, 2]])).tolist()
    [3, 1, 2, 0]
    """
    shares = _shares(counts)
    return np.lexsort((-shares.max(1), shares.argmax(1)))


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


def _shares(counts: Pairs) -> Float[ndarray, "novel known"]:
    shares: Float[ndarray, "novel known"] = counts / counts.sum(1, keepdims=True)
    return shares


def _spoken(name: str) -> str:
    return name.replace("_", " ")


def _new_heat_page(
    rows: Sequence[str], columns: Sequence[str], origin: Origin, heat: Colormap, look: Look
) -> tuple[Axes, Axes]:
    """Return a page that is as large as its names need, and the axes of the cells."""
    narrow, wide = _CELL_WIDTHS
    width = len(columns) * min(max(_HEAT_WIDTH / len(columns), narrow), wide)
    left = max(text_width(name, SMALL) for name in rows) + 20
    slant = max(text_width(name, SMALL) for name in columns) * math.sqrt(0.5) + 14
    top = slant + _HEAD
    bottom = slant if len(rows) > _LONG else MARGIN
    subtitles = [origin.title, _SUBTITLE]
    key = len(_KEY) * _KEY_STEP + MARGIN + text_width(_NOTE, SMALL)
    needed = max(key, *(text_width(line, NORMAL) for line in subtitles)) + 3 * MARGIN
    page = new_page(max(left + width + slant, needed), top + len(rows) * _CELL_HEIGHT + bottom)
    write_title(page, "What the known head takes novel classes for", subtitles, look)
    right = size_of(page)[0] - left - width
    axes = new_axes(page, left=left, bottom=bottom, right=right, top=top)
    axes.set(xlim=(0, len(columns)), ylim=(len(rows), 0), xticks=[], facecolor=heat(0.0))
    axes.set_yticks(np.arange(len(rows)) + 0.5, rows)
    axes.tick_params(length=0, labelsize=SMALL, labelcolor=look.text)
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
            size=SMALL,
            rotation=45,
            rotation_mode="anchor",
            ha=side,
            va="center",
            annotation_clip=False,
        )


def _draw_cells(
    axes: Axes, shares: Float[ndarray, "novel known"], heat: Colormap, look: Look
) -> None:
    for row, column in np.argwhere(shares).tolist():
        share = shares[row, column]
        cell = Rectangle((column + 0.03, row + 0.03), 0.94, 0.94, facecolor=heat(share))
        axes.add_patch(cell)
        if share > _PRINTED:
            axes.text(
                column + 0.5,
                row + 0.5,
                f"{100 * share:.0f}",
                size=SMALL,
                color=look.on_heat,
                ha="center",
                va="center_baseline",
            )


def _draw_groups(axes: Axes, shares: Float[ndarray, "novel known"], look: Look) -> None:
    """Part the rows where their most frequent known class changes."""
    for row in np.flatnonzero(np.diff(shares.argmax(1))).tolist():
        axes.axhline(row + 1, color=look.muted, linewidth=0.4)


def _draw_key(page: Axes, heat: Colormap, look: Look) -> None:
    """Say below the title what colours and numbers mean."""
    top = size_of(page)[1] - _HEAD + 9
    at = MARGIN
    for percent in _KEY:
        page.add_patch(Rectangle((at, top - 5), 16, 10, color=heat(percent / 100)))
        page.text(at + 20, top, f"{percent} %", size=SMALL, color=look.muted, va="center_baseline")
        at += _KEY_STEP
    page.text(at + MARGIN, top, _NOTE, size=SMALL, color=look.muted, va="center_baseline")

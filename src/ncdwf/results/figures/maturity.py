"""How the identifier matures over the epochs of discovery."""

from collections.abc import Sequence
from itertools import pairwise
from typing import Literal

import numpy as np
from matplotlib.axes import Axes
from matplotlib.ticker import MaxNLocator

from ncdwf.errors import InputError
from ncdwf.results.figures.names import Origin
from ncdwf.results.figures.page import (
    LOOKS,
    Theme,
    drawn_in,
    edges_of,
    new_axes,
    new_page,
    svg,
    write_title,
)

_SIZE = (600.0, 315.0)


def maturity(
    epochs: Sequence[int],
    auroc: Sequence[float],
    known_kept: Sequence[float],
    novel_found: Sequence[float],
    tau: float | Literal["calibrated"],
    origin: Origin,
    theme: Theme,
) -> bytes:
    """Draw how the identifier matures over the epochs of discovery.

    Args:
        epochs: when it was measured, ascending.
        auroc: how well it ranks novel test pictures above known ones; this and the shares: 0…1.
        known_kept: the share of known test pictures that are accepted as known.
        novel_found: the share of novel test pictures that are routed to novel.
        tau: the threshold on P(novel) behind these shares.
        origin: the run whose identifier it is.
        theme: of the page.
    """
    curves = {"AUROC": auroc, "known accepted": known_kept, "novel found": novel_found}
    _check_curves(epochs, curves)
    look = LOOKS[theme]
    with drawn_in(look):
        page = new_page(*_SIZE)
        threshold = "calibrated threshold τ" if tau == "calibrated" else f"threshold τ = {tau}"
        shown = f"AUROC, and the shares of test pictures on the right side of the {threshold}"
        used = write_title(page, "How the identifier matures", [origin.title, shown], look)
        axes = new_axes(page, left=42.0, bottom=42.0, right=132.0, top=used + 6)
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
        return svg(page)


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


def _label_ends(page: Axes, axes: Axes, ends: Sequence[tuple[str, float, str]]) -> None:
    """Write the names of curves to the right of where they end."""
    _, bottom, right, top = edges_of(page, axes).tolist()
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

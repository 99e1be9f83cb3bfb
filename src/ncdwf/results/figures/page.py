"""What all pictures share: colours, fonts, sizes, and how they become a file.

The background is transparent. Every picture is made twice, for light pages and for dark ones.
All lengths are points (1/72 inch).
"""

import io
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import numpy as np
from jaxtyping import Float
from matplotlib import style
from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.textpath import TextPath
from numpy import ndarray

Theme = Literal["light", "dark"]
Spot = tuple[float, float]
Box = Float[ndarray, "4"]
"""Left, bottom, right, top."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Look:
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


LOOKS: dict[Theme, Look] = {
    "light": Look(
        text="#1f2328",
        muted="#59636e",
        faint="#d1d9e0",
        palette=("#d55e00", "#0072b2", "#009e73", "#cc79a7", "#e69f00", "#56b4e9"),
        heat=("#f0f3f6", "#0072b2", "#00324f"),
        on_heat="#ffffff",
    ),
    "dark": Look(
        text="#f0f6fc",
        muted="#9198a1",
        faint="#3d444d",
        palette=("#d55e00", "#56b4e9", "#009e73", "#cc79a7", "#e69f00", "#f0e442"),
        heat=("#1a2028", "#56b4e9", "#e3f4fd"),
        on_heat="#0d1117",
    ),
}
LARGE, NORMAL, SMALL = 13.0, 10.0, 8.5
MARGIN = 10.0


@contextmanager
def drawn_in(look: Look) -> Iterator[None]:
    """Draw and save with these settings, whatever the user's own are; they come back afterwards."""
    settings = {
        # Text as text: small and searchable. It is laid out in the first of these fonts, which
        # matplotlib brings along; the second, wherever the first is missing, is as wide.
        "svg.fonttype": "none",
        "font.sans-serif": ["DejaVu Sans", "Verdana", "Arial", "Helvetica", "sans-serif"],
        "svg.hashsalt": "ncdwf",
        "text.parse_math": False,
        "text.color": look.text,
        "font.size": NORMAL,
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


def new_page(width: float, height: float) -> Axes:
    """Return the whole of a new figure as axes whose unit is the point."""
    figure = Figure(figsize=(width / 72, height / 72))
    page = figure.add_axes((0, 0, 1, 1))
    page.set(xlim=(0, width), ylim=(0, height))
    page.set_axis_off()
    return page


def size_of(page: Axes) -> Spot:
    """Return the width and height of a page."""
    return page.get_xlim()[1], page.get_ylim()[1]


def new_axes(page: Axes, *, left: float, bottom: float, right: float, top: float) -> Axes:
    """Return new axes that keep these distances from the edges of the page."""
    width, height = size_of(page)
    box = (left / width, bottom / height, 1 - (left + right) / width, 1 - (bottom + top) / height)
    return page.figure.add_axes(box)


def edges_of(page: Axes, axes: Axes) -> Box:
    """Return where axes lie on their page."""
    return np.array(axes.bbox.transformed(page.transData.inverted()).extents)


def write_title(page: Axes, title: str, subtitles: Sequence[str], look: Look) -> float:
    """Write what a picture shows at the top left of its page; return how much room that takes."""
    top = size_of(page)[1]
    page.text(MARGIN, top - MARGIN, title, size=LARGE, weight="bold", va="top")
    used = MARGIN + 19
    for subtitle in subtitles:
        page.text(MARGIN, top - used, subtitle, color=look.muted, va="top")
        used += 15
    return used


def text_width(text: str, size: float) -> float:
    """Return how wide a text is, which decides where it fits."""
    return float(TextPath((0, 0), text, size=size).get_extents().width)


def svg(page: Axes) -> bytes:
    """Return a page as the bytes of an SVG file."""
    file = io.BytesIO()
    # Neither the date nor the version of matplotlib: the same data give the same bytes.
    page.figure.canvas.print_figure(file, format="svg", metadata={"Date": None, "Creator": None})
    return file.getvalue()

"""Pictures of results as SVG: plain data in, the bytes of a file out, the same ones every time."""

from ncdwf.results.figures.confusion import confusion
from ncdwf.results.figures.maturity import maturity
from ncdwf.results.figures.names import Origin
from ncdwf.results.figures.overview import Point, overview
from ncdwf.results.figures.page import Theme

__all__ = ["Origin", "Point", "Theme", "confusion", "maturity", "overview"]

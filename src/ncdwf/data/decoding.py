"""One picture file to the pixels that a model reads.

Worker processes import this module and little else: NumPy and Pillow, no torch, so they start fast.
"""

import errno
import multiprocessing
import os
import tempfile
import threading
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from multiprocessing.reduction import DupFd
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from PIL import Image, ImageOps, UnidentifiedImageError

from ncdwf.errors import InputError, StorageError, first_line, printable

FORMATS = ("JPEG", "PNG", "GIF", "BMP", "WEBP", "TIFF")
"""Pillow guesses the format from the content; what is not listed is never decoded."""
TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)
GREY_MODES = ("1", "L", "LA", "La", "I", "F")
UNTOLD_MODES, UNTOLD_FORMATS = ("P", "PA"), ("WEBP",)
"""Palettes may hold greys alone, and WebP has no grey: nothing short of decoding tells."""
GREY_GAP = 4
"""Channels of a grey WebP differ by so much at most: it keeps brightness and colour apart."""
DRAFT_GAP = 2
"""A JPEG is decoded at the smallest scale that leaves this many times the wanted side."""
BITS_TAG, INTERPRETATION_TAG, ORIENTATION_TAG = 258, 262, 274
WHITE_IS_ZERO = 0
TURNS = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_270,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_90,
}
"""What sets a picture upright, by its orientation; 1 is upright."""

Shape = tuple[int, int, int]
"""Channels, height, width."""


@dataclass(frozen=True, slots=True)
class Skipped:
    """A file that was passed over."""

    path: Path
    reason: str

    def __str__(self) -> str:
        return f"{printable(str(self.path))} cannot be read as a picture: {self.reason}"


class Unreadable(InputError):
    """A file is not a picture that can be decoded."""

    def __init__(self, skipped: Skipped) -> None:
        super().__init__(str(skipped))
        self.skipped = skipped


@dataclass(frozen=True, slots=True)
class Header:
    """What a picture file says of itself before anything is decoded."""

    width: int
    height: int
    has_colour: bool | None
    """None where a header does not tell; `shows_colour` does."""


def read_header(path: Path) -> Header:
    """Return what the header of a picture file says; raise `Unreadable` if it has none."""
    with _opened(path) as file:
        grey = file.mode in GREY_MODES or file.mode.startswith("I;16")
        untold = file.mode in UNTOLD_MODES or file.format in UNTOLD_FORMATS
        return Header(*file.size, has_colour=None if untold else not grey)


def shows_colour(path: Path) -> bool:
    """Tell whether any pixel of a picture is no grey; raise `Unreadable` if it has none."""
    with _opened(path) as file:
        red, green, blue = map(np.asarray, _opaque(file).convert("RGB").split())
    brightest = np.maximum(np.maximum(red, green), blue)
    return bool((brightest - np.minimum(np.minimum(red, green), blue)).max() > GREY_GAP)


def read_pixels(path: Path, shape: Shape) -> NDArray[np.uint8]:
    """Return one picture as `[channel, height, width]`, turned upright; raise `Unreadable`.

    Its shorter side is scaled and the middle cut out, so that proportions stay as they were; every
    pixel of that part counts (antialiasing). Of animations and documents the first picture is read.
    Transparency is laid on white, the paper that most cut-outs and line drawings are made for: on
    black, dark lines would vanish. Grey of 9 to 16 bits is scaled from its whole range to 8 bits.
    """
    num_channels, height, width = shape
    with _opened(path) as file:
        # Which side is the shorter is not known before the picture stands upright.
        file.draft(None, (DRAFT_GAP * max(height, width),) * 2)
        picture = _opaque(_upright(file)).convert("L" if num_channels == 1 else "RGB")
        picture = ImageOps.fit(picture, (width, height), Image.Resampling.BILINEAR)
        pixels = np.asarray(picture).reshape(height, width, num_channels)
    return np.ascontiguousarray(pixels.transpose(2, 0, 1))


@dataclass(frozen=True, slots=True)
class Canvas:
    """An open file to which pictures of one shape are written side by side, and nothing else.

    It needs no name: a process that is started with a canvas inherits the open file. Rows are
    written, not mapped, since a full disk is then an error and not the end of the process.
    """

    descriptor: int
    shape: Shape

    def paint(self, first_row: int, paths: Sequence[Path]) -> dict[int, Skipped]:
        """Write one picture a row, from `first_row` on; return the rows that stay empty."""
        skipped = {}
        for row, path in enumerate(paths, first_row):
            try:
                self._write(row, read_pixels(path, self.shape).tobytes())
            except Unreadable as error:
                skipped[row] = error.skipped
        return skipped

    def _write(self, row: int, data: bytes) -> None:
        try:
            if os.pwrite(self.descriptor, data, row * len(data)) < len(data):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        except OSError as error:
            raise no_room(error) from error

    def __reduce__(self) -> tuple[Any, ...]:
        return _inherited, (DupFd(self.descriptor), self.shape)


def no_room(error: OSError) -> StorageError:
    """Return the line for a folder of temporary files that does not take what it must."""
    folder = tempfile.tempdir or "a temporary file"
    return StorageError(
        f"cannot write decoded pictures to {folder}: {error.strerror or error}; "
        "the variable TMPDIR names another folder, which needs one byte a pixel and channel"
    )


def begin_work(canvas: Canvas) -> None:
    """Prepare a worker process to paint on `canvas`."""
    global _canvas
    _canvas = canvas
    threading.Thread(target=_end_with_parent, daemon=True).start()


def paint(first_row: int, paths: Sequence[Path]) -> dict[int, Skipped]:
    """Paint, in a worker process, on the canvas that it began with."""
    return _canvas.paint(first_row, paths)


_canvas: Canvas


def _inherited(descriptor: Any, shape: Shape) -> Canvas:
    return Canvas(descriptor.detach(), shape)


def _end_with_parent() -> None:
    """End this process as soon as its parent is gone, however that ended: nobody else would."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _opened(path: Path) -> Iterator[Image.Image]:
    try:
        if not path.is_file():  # a pipe would be waited for without end
            raise ValueError("it is no file" if path.exists() else "there is no such file")
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata of somebody's picture is no concern
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            with Image.open(path, formats=FORMATS) as file:
                yield file
    # Damaged files end in nearly any error: struct.error, KeyError, EOFError, MemoryError …
    except Exception as error:
        raise Unreadable(Skipped(path, _reason(path, error))) from error


def _reason(path: Path, error: Exception) -> str:
    if isinstance(error, TOO_LARGE):
        return f"it has more than {Image.MAX_IMAGE_PIXELS} pixels"
    if isinstance(error, UnidentifiedImageError):
        accepted = f"its content is no picture of a kind that is accepted: {', '.join(FORMATS)}"
        return accepted if path.stat().st_size else "it is empty"
    return first_line(error.strerror if isinstance(error, OSError) and error.strerror else error)


def _upright(file: Image.Image) -> Image.Image:
    """Return a picture as it is meant to be seen.

    `ImageOps.exif_transpose` also writes all other metadata anew, and fails where they are odd.
    """
    file.load()  # first: a TIFF turns itself, and forgets that it had to
    turn = TURNS.get(file.getexif().get(ORIENTATION_TAG, 1))
    return file if turn is None else file.transpose(turn)


def _opaque(picture: Image.Image) -> Image.Image:
    """Return a picture with 8 bits a channel and without transparency."""
    if picture.mode.startswith("I;16"):
        return _eight_bits(picture)
    if picture.mode in ("I", "F"):  # nothing says which of their values is white
        raise ValueError("it has 32 bits a channel; 8 and 16 are accepted")
    if not picture.has_transparency_data:
        return picture
    paper = Image.new("RGBA", picture.size, "white")
    return Image.alpha_composite(paper, picture.convert("RGBA")).convert("RGB")


def _eight_bits(picture: Image.Image) -> Image.Image:
    tags = getattr(picture, "tag_v2", {})  # TIFF has them; it knows 12 bits and negatives too
    white = 2 ** tags.get(BITS_TAG, (16,))[0] - 1
    grey = np.asarray(picture).astype(np.uint32)
    if tags.get(INTERPRETATION_TAG) == WHITE_IS_ZERO:
        grey = white - grey
    return Image.fromarray(((grey * 255 + white // 2) // white).astype(np.uint8))

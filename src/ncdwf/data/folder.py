"""Picture files: finding them and reading them as a model needs them."""

import warnings
from collections.abc import Iterable
from pathlib import Path

import numpy as np
import torch
from jaxtyping import UInt8
from PIL import Image, ImageOps
from torch import Tensor

from ncdwf.errors import InputError

FORMATS = ("JPEG", "PNG", "WEBP", "TIFF", "BMP", "GIF")
"""Pillow guesses the format from the content; what is not listed is never decoded."""
TOO_LARGE = (Image.DecompressionBombError, Image.DecompressionBombWarning)
SUFFIXES = (".jpg", ".jpeg", ".png", ".webp", ".tif", ".tiff", ".bmp", ".gif")


def find_pictures(paths: Iterable[Path]) -> list[Path]:
    """Return the files among `paths`, and the pictures below the folders among them, sorted."""
    found: list[Path] = []
    for path in paths:
        if path.is_dir():
            found += sorted(
                p for p in path.rglob("*") if p.suffix.lower() in SUFFIXES and p.is_file()
            )
        elif path.is_file():
            found.append(path)
        else:
            raise InputError(f"{path} is neither a file nor a folder")
    if not found:
        raise InputError(f"no pictures found; files ending in {', '.join(SUFFIXES)} are accepted")
    return found


def read_picture(
    path: Path, num_channels: int, height: int, width: int
) -> UInt8[Tensor, "channel height width"]:
    """Return one picture, turned upright, in the colours and the size that a model reads."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # odd metadata of somebody's picture is no concern
            warnings.simplefilter("error", Image.DecompressionBombWarning)
            picture = _decode(path, num_channels).resize((width, height), Image.Resampling.BILINEAR)
    except (OSError, ValueError, SyntaxError, *TOO_LARGE) as error:
        reason = (str(error).splitlines() or ["unreadable"])[0]
        raise InputError(f"{path} cannot be read as a picture: {reason}") from error
    pixels = np.asarray(picture, dtype=np.uint8).reshape(height, width, num_channels)
    return torch.from_numpy(pixels.transpose(2, 0, 1).copy())


def _decode(path: Path, num_channels: int) -> Image.Image:
    with Image.open(path, formats=FORMATS) as file:
        if file.mode.startswith(("I", "F")):  # Pillow would clip them to white
            raise ValueError("it has more than 8 bits a channel")
        return ImageOps.exif_transpose(file).convert("L" if num_channels == 1 else "RGB")

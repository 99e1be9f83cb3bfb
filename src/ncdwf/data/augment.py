"""Augmented views, made for a whole batch at once on the device that holds it."""

import math
from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F

from ncdwf.config import View
from ncdwf.data.images import Images

NUM_DRAWS = 5
"""Uniform numbers that one view of one picture takes: shift x and y, rotation, scale, flip."""


@dataclass(frozen=True, slots=True)
class Views:
    """The augmented batch that a method gets: pictures and nothing else."""

    large: Float[Tensor, "view batch channel height width"]


def augment(
    images: Images, view: View, draws: Float[Tensor, "image draw"]
) -> Float[Tensor, "image channel height width"]:
    """Return one augmented view of each picture, in [0, 1], as `draws` (uniform) decide it.

    One affine map a picture does all of it; what comes in from outside the picture is black.
    """
    pixels = images.float() / 255
    if view == View():
        return pixels
    height, width = images.shape[-2:]
    centred = 2 * draws - 1
    angle = centred[:, 2] * math.radians(view.rotation)
    # The map goes from the new picture to the old one, hence the inverse scale.
    zoom = 1 / (1 + centred[:, 3] * view.scale)
    mirror = torch.where(draws[:, 4] < 0.5, -1.0, 1.0) if view.flip else torch.ones_like(zoom)
    cos, sin = zoom * torch.cos(angle), zoom * torch.sin(angle)
    shift_x = centred[:, 0] * (2 * view.shift / width)
    shift_y = centred[:, 1] * (2 * view.shift / height)
    rows = (
        torch.stack([cos * mirror, -sin * (height / width), shift_x], dim=1),
        torch.stack([sin * mirror * (width / height), cos, shift_y], dim=1),
    )
    grid = F.affine_grid(torch.stack(rows, dim=1), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False, padding_mode="zeros")

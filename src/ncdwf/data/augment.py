"""Augmented views, made for a whole batch at once on the device that holds it.

Every random number is an argument: `view_draw` says which ones a step has to draw.
"""

import math
from dataclasses import dataclass, replace

import torch
from jaxtyping import Bool, Float
from torch import Tensor
from torch.nn import functional as F

from ncdwf.config import View
from ncdwf.data.inputs import Images, Inputs, Vectors
from ncdwf.errors import InputError
from ncdwf.noise import Draw

Pixels = Float[Tensor, "image channel height width"]
Resized = Float[Tensor, "image channel out_height out_width"]
Uniform = Float[Tensor, " image"]

ATTEMPTS = 10
"""Draws of a part's area and shape, of which the first that fits into the picture counts."""
LOG_RATIO = math.log(4 / 3)
"""A part's sides are at most in this ratio."""
GREY = (0.299, 0.587, 0.114)
"""How bright red, green and blue look."""


@dataclass(frozen=True, slots=True)
class Views:
    """The augmented batch that a method gets: pictures and nothing else."""

    large: Float[Tensor, "large batch *shape"]
    small: Float[Tensor, "small batch *small_shape"] | None = None

    @property
    def groups(self) -> tuple[Tensor, ...]:
        """Return the views of each size: the large ones, then the small ones if there are any."""
        return (self.large,) if self.small is None else (self.large, self.small)


def view_draw(view: View, num_views: int, batch_size: int, shape: tuple[int, ...]) -> Draw:
    """Return what `num_views` views of a batch of inputs of `shape` take."""
    if len(shape) == 1:
        return Draw(kind="normal", shape=(num_views, batch_size, *shape))
    return Draw(kind="uniform", shape=(num_views, batch_size, num_draws(view)))


def check_view(view: View, shape: tuple[int, ...], *, name: str) -> None:
    """Refuse what cannot be done to inputs of `shape`."""
    if len(shape) == 1 and replace(view, noise=0.0) != View():
        raise InputError(f"{name} changes pictures; vectors accept {name}.noise alone")
    if len(shape) == 3 and view.noise:
        raise InputError(f"{name}.noise={view.noise} is for vectors; pictures need 0")


def view_shape(view: View, shape: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape of one view of an input of `shape`."""
    return (shape[0], view.size, view.size) if len(shape) == 3 and view.size else shape


def num_draws(view: View) -> int:
    """Return how many uniform numbers one view of one picture takes."""
    return sum(_needs(view).values())


def _needs(view: View) -> dict[str, int]:
    return {
        "affine": 4,
        "flip": 1,
        "crop": 3 + 2 * ATTEMPTS if _crops(view) else 0,
        "jitter": 5 if view.jitter else 0,
        "solarise": 2 if view.solarise else 0,
        "equalise": 1 if view.equalise else 0,
    }


def _crops(view: View) -> bool:
    return bool(view.padding or view.resized or view.size)


def augment_views(
    inputs: Inputs, view: View, draws: Float[Tensor, "view image draw"]
) -> Float[Tensor, "view image *shape"]:
    """Return several augmented views of each picture or vector."""
    num_views = len(draws)
    repeated = inputs.repeat(num_views, *(1,) * (inputs.ndim - 1))
    flat = augment(repeated, view, draws.flatten(0, 1))
    return flat.view(num_views, -1, *flat.shape[1:])


def augment(
    inputs: Inputs, view: View, draws: Float[Tensor, "image draw"]
) -> Float[Tensor, "image *shape"]:
    """Return one augmented view of each picture (in [0, 1]) or vector, as `draws` decide it."""
    return _noisy(inputs, view, draws) if inputs.ndim == 2 else _picture(inputs, view, draws)


def _noisy(vectors: Vectors, view: View, draws: Vectors) -> Vectors:
    """Add noise in the unit in which each number varies within the batch."""
    if not view.noise:
        return vectors
    return vectors + view.noise * vectors.std(0, correction=0) * draws


def _picture(images: Images, view: View, draws: Float[Tensor, "image draw"]) -> Resized:
    parts = iter(draws.split(list(_needs(view).values()), dim=1))
    affine, flip, crop, jitter, solarise, equalise = (part.unbind(1) for part in parts)
    pixels = images.float() / 255
    if view.shift or view.rotation or view.scale:
        pixels = _affine(pixels, view, *affine)
    if crop:
        pixels = _crop(pixels, view, *crop)
    if view.flip:
        pixels = _where(flip[0] < 0.5, pixels.flip(3), pixels)
    if jitter:
        pixels = _where(jitter[0] < view.jitter, _jitter(pixels, view, *jitter[1:]), pixels)
    if solarise:
        pixels = _where(solarise[0] < view.solarise, _solarise(pixels, solarise[1]), pixels)
    if equalise:
        pixels = _where(equalise[0] < view.equalise, _equalise(pixels), pixels)
    return pixels


def _where(chosen: Bool[Tensor, " image"], changed: Pixels, pixels: Pixels) -> Pixels:
    return torch.where(chosen[:, None, None, None], changed, pixels)


def _affine(
    pixels: Pixels, view: View, x: Uniform, y: Uniform, turn: Uniform, size: Uniform
) -> Pixels:
    """Shift, rotate and scale by one affine map; what comes in from outside is black."""
    height, width = pixels.shape[-2:]
    angle = (2 * turn - 1) * math.radians(view.rotation)
    # The map goes from the new picture to the old one, hence the inverse scale.
    zoom = 1 / (1 + (2 * size - 1) * view.scale)
    cos, sin = zoom * torch.cos(angle), zoom * torch.sin(angle)
    shift_x = (2 * x - 1) * (2 * view.shift / width)
    shift_y = (2 * y - 1) * (2 * view.shift / height)
    rows = (
        torch.stack([cos, -sin * (height / width), shift_x], dim=1),
        torch.stack([sin * (width / height), cos, shift_y], dim=1),
    )
    grid = F.affine_grid(torch.stack(rows, dim=1), list(pixels.shape), align_corners=False)
    return F.grid_sample(pixels, grid, align_corners=False, padding_mode="zeros")


def _crop(
    pixels: Pixels, view: View, choice: Uniform, x: Uniform, y: Uniform, *shape: Uniform
) -> Resized:
    """Cut a part out of every picture and bring it to the size of the view.

    Cropping and resizing act on rows and columns apart, so they are two small matrix products.
    """
    height, width = pixels.shape[-2:]
    out_height, out_width = (view.size or height, view.size or width)
    part_height, part_width = _part(view, height, width, torch.stack(shape, 1))
    resized = choice < view.resized
    rows = _axis(height, out_height, part_height, resized, y, view.padding)
    columns = _axis(width, out_width, part_width, resized, x, view.padding)
    return rows[:, None] @ pixels @ columns[:, None].transpose(2, 3)


def _part(
    view: View, height: int, width: int, draws: Float[Tensor, "image draw"]
) -> tuple[Float[Tensor, " image"], Float[Tensor, " image"]]:
    """Return height and width in whole pixels of the part that is resized."""
    areas, shapes = draws.unflatten(1, (ATTEMPTS, 2)).unbind(2)
    area = height * width * (view.min_area + (view.max_area - view.min_area) * areas)
    ratio = torch.exp((2 * shapes - 1) * LOG_RATIO)
    wide = (area * ratio).sqrt().round()
    high = (area / ratio).sqrt().round()
    fits = (wide >= 1) & (wide <= width) & (high >= 1) & (high <= height)
    first = fits.int().argmax(1, keepdim=True)
    none = ~fits.any(1)
    high = torch.where(none, height, high.gather(1, first).squeeze(1))
    wide = torch.where(none, width, wide.gather(1, first).squeeze(1))
    return high, wide


def _axis(
    num_in: int,
    num_out: int,
    part: Float[Tensor, " image"],
    resized: Bool[Tensor, " image"],
    where: Uniform,
    padding: int,
) -> Float[Tensor, "image out in"]:
    """Return the matrix that cuts and resizes one side of every picture.

    A triangle as wide as two pixels of the coarser grid weighs the source pixels: linear
    interpolation where the part grows, an average where it shrinks.
    """
    border = torch.where(resized, 0, padding)
    length = torch.where(resized, part, num_out)
    room = (num_in + 2 * border - length).clamp_min(0)
    start = (where * (room + 1)).floor().clamp(max=room) - border
    scale = length / num_out
    outs = torch.arange(num_out, device=part.device) + 0.5
    ins = torch.arange(num_in, device=part.device) + 0.5
    centre = start[:, None] + outs * scale[:, None]
    away = (ins - centre[:, :, None]).abs() / scale.clamp_min(1)[:, None, None]
    inside = (ins > start[:, None]) & (ins < (start + length)[:, None])
    weights = (1 - away).clamp_min(0) * inside[:, None]
    return weights / weights.sum(2, keepdim=True).clamp_min(1e-6)  # a row of the border is black


def _jitter(
    pixels: Pixels,
    view: View,
    brightness: Uniform,
    contrast: Uniform,
    saturation: Uniform,
    hue: Uniform,
) -> Pixels:
    """Change brightness, contrast, saturation and hue, in this order."""

    def factor(uniform: Uniform, strength: float) -> Tensor:
        return (1 + (2 * uniform - 1) * strength)[:, None, None, None]

    pixels = (pixels * factor(brightness, view.brightness)).clamp(0, 1)
    mean = _grey(pixels).mean((1, 2, 3), keepdim=True)
    pixels = torch.lerp(mean, pixels, factor(contrast, view.contrast)).clamp(0, 1)
    if pixels.shape[1] == 1:
        return pixels
    pixels = torch.lerp(_grey(pixels), pixels, factor(saturation, view.saturation)).clamp(0, 1)
    return _turn_hue(pixels, (2 * hue - 1) * view.hue)


def _grey(pixels: Pixels) -> Float[Tensor, "image 1 height width"]:
    if pixels.shape[1] == 1:
        return pixels
    red, green, blue = pixels.split(1, dim=1)
    grey: Tensor = GREY[0] * red + GREY[1] * green + GREY[2] * blue
    return grey


def _turn_hue(pixels: Pixels, turn: Float[Tensor, " image"]) -> Pixels:
    """Turn the hue by a share of the colour circle; value and saturation stay."""
    red, green, blue = pixels.unbind(1)
    value, chroma = pixels.amax(1), pixels.amax(1) - pixels.amin(1)
    safe = torch.where(chroma > 0, chroma, 1)
    sixths = torch.where(
        value == red,
        (green - blue) / safe,
        torch.where(value == green, 2 + (blue - red) / safe, 4 + (red - green) / safe),
    )
    sixths = sixths + 6 * turn[:, None, None]

    def channel(offset: int) -> Tensor:
        position = (sixths + offset) % 6
        return value - chroma * torch.minimum(position, 4 - position).clamp(0, 1)

    return torch.stack([channel(5), channel(3), channel(1)], dim=1)


def _solarise(pixels: Pixels, threshold: Uniform) -> Pixels:
    """Invert everything from a threshold between black and white upwards."""
    return torch.where(pixels * 255 < 256 * threshold[:, None, None, None], pixels, 1 - pixels)


def _equalise(pixels: Pixels) -> Pixels:
    """Spread the histogram of every channel evenly, as image libraries do for 256 levels."""
    levels = (pixels * 255).round().long().flatten(2)
    histogram = torch.zeros(*levels.shape[:2], 256, dtype=torch.int64, device=pixels.device)
    histogram = histogram.scatter_add(2, levels, torch.ones_like(levels))
    brightest = histogram.gather(2, levels.amax(2, keepdim=True))
    step = (levels.shape[2] - brightest) // 255
    below = histogram.cumsum(2) - histogram
    table = ((step // 2 + below) // step.clamp_min(1)).clamp(max=255)
    spread = table.gather(2, levels)
    return (torch.where(step > 0, spread, levels).float() / 255).view_as(pixels)

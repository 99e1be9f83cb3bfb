"""Backbones: pictures to features."""

from collections.abc import Callable
from typing import Protocol

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn

from ncdwf.errors import InputError

Pictures = UInt8[Tensor, "image channel height width"] | Float[Tensor, "image channel height width"]
Features = Float[Tensor, "image feature"]


class Backbone(Protocol):
    """What a backbone is: a module with this call and this attribute."""

    num_features: int
    normalise: "Normalise"

    def __call__(self, images: Pictures) -> Features:
        """Return one feature vector a picture."""
        ...


class Normalise(nn.Module):
    """uint8 or [0, 1] pictures to zero mean and unit variance a channel."""

    mean: Tensor
    std: Tensor

    def __init__(self, num_channels: int) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(num_channels))
        self.register_buffer("std", torch.ones(num_channels))

    def initialise(self, source: torch.Generator) -> None:
        """Start with what changes nothing."""
        self.mean.zero_()
        self.std.fill_(1)

    def measure(self, images: UInt8[Tensor, "image channel height width"]) -> None:
        """Take mean and standard deviation of each channel from `images`."""
        pixels = images.transpose(0, 1).flatten(1).double() / 255
        self.mean.copy_(pixels.mean(1))
        self.std.copy_(pixels.std(1).clamp_min(1 / 255))

    def forward(self, images: Pictures) -> Float[Tensor, "image channel height width"]:
        """Return the normalised pictures."""
        pixels = images.float() / 255 if images.dtype == torch.uint8 else images
        return (pixels - self.mean[:, None, None]) / self.std[:, None, None]


class SmallNet(nn.Module):
    """Four convolutions for pictures of about 8×8 pixels.

    Flatten and a linear layer instead of global pooling: where a stroke lies tells digits apart,
    and pooled features of the supervised phase collapse onto the class means.
    """

    def __init__(self, image_shape: tuple[int, int, int], num_features: int = 256) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.num_features = num_features
        self.normalise = Normalise(channels)
        self.layers = nn.Sequential(
            *_convolution(channels, 16),
            *_convolution(16, 16),
            nn.MaxPool2d(2, ceil_mode=True),
            *_convolution(16, 32),
            *_convolution(32, 32),
            nn.Flatten(),
            nn.Linear(32 * -(-height // 2) * -(-width // 2), num_features, bias=False),
            nn.BatchNorm1d(num_features),
            nn.ReLU(inplace=True),
        )

    def forward(self, images: Pictures) -> Features:
        """Return `[image, num_features]`."""
        return self.layers(self.normalise(images))  # type: ignore[no-any-return]


def _convolution(num_in: int, num_out: int) -> list[nn.Module]:
    return [
        nn.Conv2d(num_in, num_out, 3, padding=1, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(inplace=True),
    ]


BACKBONES: dict[str, Callable[[tuple[int, int, int]], nn.Module]] = {"small": SmallNet}
"""Backbones by name; each takes the shape (channels, height, width) of a picture."""


def check_backbone(name: str) -> str:
    """Return `name` if there is such a backbone."""
    if name not in BACKBONES:
        raise InputError(f"unknown backbone {name!r}; there are {', '.join(BACKBONES)}")
    return name

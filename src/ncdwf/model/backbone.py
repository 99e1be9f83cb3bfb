"""Backbones: pictures to features."""

from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.errors import InputError

Pictures = UInt8[Tensor, "image channel height width"] | Float[Tensor, "image channel height width"]
Features = Float[Tensor, "image feature"]


@runtime_checkable
class Backbone(Protocol):
    """What a backbone is: a module with this call and this attribute."""

    num_features: int
    normalise: "Normalise"

    def __call__(self, images: Pictures) -> Features:
        """Return one feature vector a picture."""
        ...


def apply(backbone: Backbone, images: Pictures) -> Features:
    """Return `backbone(images)`, compiled apart from the caller where that is compiled.

    A network takes longest to compile and is the same in every method and at every weight of a
    loss; apart from them it is compiled once and then found in the cache.
    """
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    features = backbone(images)
    if torch.compiler.is_compiling():
        torch._dynamo.graph_break()
    return features


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


def _convolution(num_in: int, num_out: int, stride: int = 1) -> list[nn.Module]:
    return [
        nn.Conv2d(num_in, num_out, 3, stride=stride, padding=1, bias=False),
        nn.BatchNorm2d(num_out),
        nn.ReLU(inplace=True),
    ]


class ResNet18(nn.Module):
    """ResNet-18 [1]; the features are 512 channels, averaged over the picture.

    Pictures of up to 64 pixels enter by a 3×3 convolution without pooling, larger ones by the
    original stem.

    References:
        [1]: He et al., Deep Residual Learning for Image Recognition, CVPR 2016.
    """

    def __init__(self, image_shape: tuple[int, int, int]) -> None:
        super().__init__()
        channels, height, width = image_shape
        self.num_features = 512
        self.normalise = Normalise(channels)
        if max(height, width) <= 64:
            self.stem = nn.Sequential(*_convolution(channels, 64))
        else:
            self.stem = nn.Sequential(
                nn.Conv2d(channels, 64, 7, stride=2, padding=3, bias=False),
                nn.BatchNorm2d(64),
                nn.ReLU(inplace=True),
                nn.MaxPool2d(3, stride=2, padding=1),
            )
        sizes = [(64, 64, 1), (64, 128, 2), (128, 256, 2), (256, 512, 2)]
        blocks = [
            block
            for num_in, num_out, stride in sizes
            for block in (_Residual(num_in, num_out, stride), _Residual(num_out, num_out, 1))
        ]
        self.blocks = nn.Sequential(*blocks)

    def forward(self, images: Pictures) -> Features:
        """Return `[image, 512]`; none is below 0."""
        maps: Tensor = self.blocks(self.stem(self.normalise(images)))
        return maps.mean((2, 3))


class _Residual(nn.Module):
    """Two convolutions, and a way around them."""

    def __init__(self, num_in: int, num_out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(*_convolution(num_in, num_out, stride))
        self.second = nn.Conv2d(num_out, num_out, 3, padding=1, bias=False)
        self.norm = nn.BatchNorm2d(num_out)
        self.around: nn.Module = nn.Identity()
        if stride > 1 or num_in != num_out:
            self.around = nn.Sequential(
                nn.Conv2d(num_in, num_out, 1, stride=stride, bias=False), nn.BatchNorm2d(num_out)
            )

    def forward(self, maps: Tensor) -> Tensor:
        return F.relu(self.norm(self.second(self.first(maps))) + self.around(maps))


BACKBONES: dict[str, Callable[[tuple[int, int, int]], nn.Module]] = {
    "small": SmallNet,
    "resnet18": ResNet18,
}
"""Backbones by name; each takes the shape (channels, height, width) of a picture."""


def check_backbone(name: str) -> str:
    """Return `name` if there is such a backbone."""
    if name not in BACKBONES:
        raise InputError(f"unknown backbone {name!r}; there are {', '.join(BACKBONES)}")
    return name

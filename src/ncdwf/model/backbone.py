"""Backbones: pictures (or plain vectors) to features."""

import importlib
from collections.abc import Callable
from typing import Protocol, runtime_checkable

import torch
from jaxtyping import Float, UInt8
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.errors import InputError, first_line

Pictures = UInt8[Tensor, "image channel height width"] | Float[Tensor, "image channel height width"]
Vectors = Float[Tensor, "image number"]
Features = Float[Tensor, "image feature"]
UNREADABLE = (RuntimeError, ValueError, TypeError, LookupError, AttributeError, AssertionError)
"""What somebody else's network raises at inputs that it was not made for."""


@runtime_checkable
class Backbone(Protocol):
    """What a backbone is: a module with this call and this attribute."""

    num_features: int
    normalise: "Normalise"

    def __call__(self, images: Pictures | Vectors) -> Features:
        """Return one feature vector a picture."""
        ...


def apply(backbone: Backbone, images: Pictures | Vectors) -> Features:
    """Return `backbone(images)`, compiled apart from the caller where that is compiled.

    A network takes longest to compile and is the same in every method and at every weight of a
    loss; apart from them it is compiled once and then found in the cache.
    """
    return _apply(backbone, images)


def _call(backbone: Backbone, images: Pictures | Vectors) -> Features:
    return backbone(images)


_apply = _call


def compile_apart() -> None:
    """Keep networks out of what is compiled around them from now on.

    A decorator of `apply` would do the same, but import the compiler, which takes longer than all
    else where a model is only loaded and asked.
    """
    global _apply
    if _apply is _call:
        _apply = torch.compiler.disable(_call, recursive=False)


class Normalise(nn.Module):
    """Pictures (uint8 or [0, 1]) or vectors to zero mean and unit variance a channel or number."""

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

    def measure(self, images: UInt8[Tensor, "image channel height width"] | Vectors) -> None:
        """Take mean and standard deviation of each channel (or number) from `images`."""
        if images.dtype == torch.uint8:
            mean, std = _colours(images)
        else:
            values = images.double()
            mean, std = values.mean(0), values.std(0)
            # A number that never changes is left alone; its rounding errors carry no news.
            std = torch.where(std > 1e-6 * values.abs().mean(0), std, 1)
        self.mean.copy_(mean)
        self.std.copy_(std)

    def forward(self, images: Pictures | Vectors) -> Float[Tensor, "image *shape"]:
        """Return the normalised pictures or vectors."""
        values = images.float() / 255 if images.dtype == torch.uint8 else images
        shape = (-1, *(1,) * (images.ndim - 2))
        return (values - self.mean.view(shape)) / self.std.view(shape)


def _colours(images: UInt8[Tensor, "image channel height width"]) -> tuple[Tensor, Tensor]:
    """Return mean and spread of each channel, by whole numbers and in parts of bounded size."""
    sums = torch.zeros(2, images.shape[1], dtype=torch.int64, device=images.device)
    for part in images.split(1024):
        values = part.transpose(0, 1).flatten(1).long()
        sums += torch.stack([values.sum(1), values.square().sum(1)])
    count = images.numel() // images.shape[1]
    total, squares = sums.double()
    variance = (squares - total.square() / count) / max(count - 1, 1)
    return total / count / 255, variance.clamp_min(1).sqrt() / 255


class SmallNet(nn.Module):
    """Four convolutions for pictures of about 8×8 pixels.

    Flatten and a linear layer instead of global pooling: where a stroke lies tells digits apart,
    and pooled features of the supervised phase collapse onto the class means.
    """

    def __init__(self, shape: tuple[int, ...], num_features: int = 256) -> None:
        super().__init__()
        channels, height, width = shape
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


class VectorNet(nn.Module):
    """Two hidden layers for plain vectors: tabular data, or features of another network.

    Of what is farther than one spread from the mean the logarithm counts: outliers, and numbers
    that hardly varied among labelled rows but do in the pool, would drown all others
    (docs/decisions/0016).
    """

    def __init__(self, shape: tuple[int, ...], num_features: int = 256) -> None:
        super().__init__()
        self.num_features = num_features
        self.normalise = Normalise(shape[0])
        self.layers = nn.Sequential(
            *_linear(shape[0], num_features), *_linear(num_features, num_features)
        )

    def forward(self, vectors: Vectors) -> Features:
        """Return `[image, num_features]`."""
        rows = self.normalise(vectors)
        rows = rows.clamp(-1, 1) + rows.sign() * rows.abs().clamp_min(1).log()
        return self.layers(rows)  # type: ignore[no-any-return]


def _linear(num_in: int, num_out: int) -> list[nn.Module]:
    return [nn.Linear(num_in, num_out, bias=False), nn.BatchNorm1d(num_out), nn.ReLU(inplace=True)]


class ResNet18(nn.Module):
    """ResNet-18 [1]; the features are 512 channels, averaged over the picture.

    Pictures of up to 64 pixels enter by a 3×3 convolution without pooling, larger ones by the
    original stem.

    References:
        [1]: He et al., Deep Residual Learning for Image Recognition, CVPR 2016.
    """

    def __init__(self, shape: tuple[int, ...]) -> None:
        super().__init__()
        channels, height, width = shape
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


class Foreign(nn.Module):
    """Somebody else's network as a backbone: pictures are normalised first, maps are averaged."""

    def __init__(self, module: nn.Module, shape: tuple[int, ...]) -> None:
        super().__init__()
        self.normalise = Normalise(shape[0])
        self.module = module
        self.num_features = self._measure(shape)

    def _measure(self, shape: tuple[int, ...]) -> int:
        """Return how many features come out for an input of `shape`."""
        weight = next(self.module.parameters(), torch.zeros(()))
        before = self.module.training
        try:
            with torch.no_grad():
                blank = torch.zeros(2, *shape, device=weight.device)
                features = self._features(self.module.eval()(blank))
        except UNREADABLE as error:
            reason = first_line(error)
            raise InputError(
                f"this backbone cannot read inputs of shape {shape}: {reason}"
            ) from error
        finally:
            self.module.train(before)
        return int(features.shape[1])

    def _features(self, found: object) -> Tensor:
        if isinstance(found, Tensor) and found.ndim == 4:
            found = found.mean((2, 3))
        if not isinstance(found, Tensor) or found.ndim != 2:
            raise ValueError("it should return one feature vector a picture, or maps of them")
        if found.shape[1] == 0:
            raise ValueError("it returns no features")
        return found

    def forward(self, images: Pictures | Vectors) -> Features:
        """Return `[image, num_features]`."""
        return self._features(self.module(self.normalise(images)))


BACKBONES: dict[str, Callable[[tuple[int, ...]], nn.Module]] = {
    "small": SmallNet,
    "resnet18": ResNet18,
    "vector": VectorNet,
}
"""Backbones by name; each takes the shape of one input: (channels, height, width) or (numbers,)."""
TIMM = "timm:"
"""What the names of timm's networks begin with, as in `timm:resnet50`."""
CUSTOM = "custom"
"""The name of a backbone that somebody passed as a module; loading it needs that module again."""


def check_backbone(name: str, shape: tuple[int, ...]) -> str:
    """Return `name` if there is such a backbone and it reads inputs of `shape`."""
    if name.startswith(TIMM):
        _timm(name)
    elif name not in BACKBONES:
        known = ", ".join(BACKBONES)
        raise InputError(f"unknown backbone {name!r}; there are {known} and {TIMM}NAME")
    if (name == "vector") != (len(shape) == 1):
        wanted = "vectors" if name == "vector" else "pictures"
        raise InputError(f"the backbone {name!r} reads {wanted}, not inputs of shape {shape}")
    return name


def make_backbone(name: str, shape: tuple[int, ...]) -> nn.Module:
    """Return the backbone called `name` for inputs of `shape`, without particular weights."""
    check_backbone(name, shape)
    return _timm(name)(shape) if name.startswith(TIMM) else BACKBONES[name](shape)


def _timm(name: str) -> Callable[[tuple[int, ...]], nn.Module]:
    try:
        timm = importlib.import_module("timm")
    except ImportError as error:
        raise InputError(f"the backbone {name!r} needs timm: pip install timm") from error
    except Exception as error:  # such as a torchvision that was built for another torch
        reason = first_line(error)
        raise InputError(f"the backbone {name!r} needs timm, which fails: {reason}") from error
    model = name.removeprefix(TIMM)
    if not timm.is_model(model):
        raise InputError(f"timm has no network {model!r}; timm.list_models() shows them")
    return lambda shape: Foreign(timm.create_model(model, num_classes=0, in_chans=shape[0]), shape)

"""Every number of a run: frozen dataclasses, strict JSON in and out."""

import dataclasses
import difflib
import json
import re
import sys
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, TypeVar

from ncdwf.errors import InputError, shown

SETTING_NAME = re.compile(
    r"(?P<data>[a-z]+[0-9]*)-(?P<known>[0-9]{1,6})-(?P<novel>[0-9]{1,6})"
    r"(?:-proxy-(?P<proxy_known>[0-9]{1,6})-(?P<proxy_novel>[0-9]{1,6}))?"
    r"(?:-(?P<pool>mixed|imbalance)-(?P<degree>[0-9]{1,4}))?"
)
"""`digits-5-5`; `digits-5-5-proxy-2-3`: 2 + 3 of the 5 known classes, to choose settings on;
`…-mixed-50`: half of the pool is of known classes; `…-imbalance-10`: its largest class has ten
times the pictures of its smallest."""
UNSEEN = 10
"""One picture of a pool in so many is kept out of the fit after discovery, for the threshold."""

LARGEST_IMAGE_SIZE = 4096
"""No side of a picture makes sense beyond this, whoever asks for it."""
MOST = 2**16
"""No count makes sense beyond this; a slip of the finger should not fill the memory."""
EPOCH_LIMIT = 1_000_000
"""Nobody waits for more; a slip of the finger should not run for ever."""
LONGEST_NAME = 1000
"""Characters of the name of a class."""
Engine = Literal["auto", "eager", "compiled", "captured"]
Device = Literal["auto", "cpu", "cuda"]


def require(condition: bool, message: str) -> None:
    """Raise an `InputError` with `message` unless `condition` holds."""
    if not condition:
        raise InputError(message)


def require_count(name: str, value: int, least: int, most: int = MOST) -> None:
    """Refuse a number of things that makes no sense."""
    require(least <= value <= most, f"{name}={value} should be from {least} to {most}")


def require_short(names: Iterable[str]) -> None:
    """Refuse names of classes that nobody could read."""
    longest = max(map(len, names), default=0)
    require(
        longest <= LONGEST_NAME,
        f"a class has a name of {longest:,} characters; up to {LONGEST_NAME:,} are accepted",
    )


def require_shape(name: str, shape: tuple[int, ...]) -> None:
    """Refuse what is no shape of a picture: channels, height and width."""
    most = LARGEST_IMAGE_SIZE
    require(
        len(shape) == 3 and shape[0] in (1, 3) and 1 <= min(shape) <= max(shape) <= most,
        f"{name}={shown(shape)} should be 1 or 3 channels, height and width, up to {most}",
    )


@dataclass(frozen=True, kw_only=True, slots=True)
class View:
    """How an augmented picture is made from a stored one; a zero switches that part off."""

    shift: float = 0.0
    """Largest shift in pixels, each direction."""
    rotation: float = 0.0
    """Largest rotation in degrees, each direction."""
    scale: float = 0.0
    """Largest relative change of size: 0.1 draws from 0.9 to 1.1."""
    padding: int = 0
    """Crop at random from the picture with a black border this wide."""
    resized: float = 0.0
    """Share of pictures of which a part is cut out and resized instead of that crop."""
    min_area: float = 0.5
    max_area: float = 1.0
    """How much of the picture such a part covers; its sides are up to 4:3."""
    size: int = 0
    """Side of the view in pixels; 0: that of the picture."""
    flip: bool = False
    """Mirror half of the pictures left to right."""
    jitter: float = 0.0
    """Share of pictures whose colours change by up to the next four."""
    brightness: float = 0.4
    contrast: float = 0.4
    saturation: float = 0.2
    hue: float = 0.1
    """Of the whole colour circle; the others relative to no change."""
    solarise: float = 0.0
    """Share of pictures in which everything brighter than a random threshold is inverted."""
    equalise: float = 0.0
    """Share of pictures whose histograms are made flat."""
    noise: float = 0.0
    """Normal noise on vectors, relative to how much each number varies."""

    def __post_init__(self) -> None:
        for name in ("shift", "rotation", "noise"):
            value = getattr(self, name)
            require(value >= 0, f"view.{name}={value} should be 0 or more")
        for name in ("padding", "size"):
            require_count(f"view.{name}", getattr(self, name), 0, LARGEST_IMAGE_SIZE)
        require(0 <= self.scale < 1, f"view.scale={self.scale} should be from 0 to below 1")
        shares = ("resized", "jitter", "solarise", "equalise")
        for name in (*shares, "brightness", "contrast", "saturation"):
            value = getattr(self, name)
            require(0 <= value <= 1, f"view.{name}={value} should be from 0 to 1")
        require(0 <= self.hue <= 0.5, f"view.hue={self.hue} should be from 0 to 0.5")
        require(
            0 < self.min_area <= self.max_area <= 1,
            f"view.min_area={self.min_area} and view.max_area={self.max_area} should satisfy "
            "0 < min_area <= max_area <= 1",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Optim:
    """SGD with momentum; linear warm-up, then a cosine from `lr` to `min_lr`."""

    epochs: int
    batch_size: int
    lr: float
    min_lr: float = 0.001
    warmup_epochs: int = 0
    momentum: float = 0.9
    weight_decay: float = 1e-4
    clip_norm: float = 0.0
    """Gradients longer than this are shortened to it; 0: never."""

    def __post_init__(self) -> None:
        require(
            1 <= self.epochs <= EPOCH_LIMIT,
            f"optim.epochs={self.epochs} should be 1 or more, and at most {EPOCH_LIMIT}",
        )
        # Batch normalisation has no variance of one picture.
        require(self.batch_size >= 2, f"optim.batch_size={self.batch_size} should be 2 or more")
        for name in ("lr", "min_lr", "warmup_epochs", "momentum", "weight_decay", "clip_norm"):
            value = getattr(self, name)
            require(0 <= value < float("inf"), f"optim.{name}={value} should be 0 or more")
        require(self.momentum < 1, f"optim.momentum={self.momentum} should be below 1")


@dataclass(frozen=True, kw_only=True, slots=True)
class Supervised:
    """The supervised phase: what it trains on and which statistics outlive the labelled data."""

    optim: Optim
    view: View = View()
    num_views: int = 1
    temperature: float = 0.1
    holdout: float = 0.0
    """Share of each class kept out of training; `statistics_from="held-out"` needs it."""
    statistics_from: Literal["augmented", "plain", "held-out"] = "plain"
    statistics_views: int = 4
    """How many augmented views of each picture enter the statistics."""
    spread: Literal["shared-diagonal", "shared", "per-class"] = "shared-diagonal"
    """Richer spreads replay better and leak more about who was in the labelled data."""

    def __post_init__(self) -> None:
        for name in ("num_views", "statistics_views"):
            require_count(f"supervised.{name}", getattr(self, name), 1)
        require(self.temperature > 0, f"supervised.temperature={self.temperature} should be > 0")
        require(
            0 <= self.holdout <= 0.5, f"supervised.holdout={self.holdout} should be from 0 to 0.5"
        )
        require(
            self.statistics_from != "held-out" or self.holdout > 0,
            "supervised.statistics_from='held-out' needs supervised.holdout above 0",
        )


@dataclass(frozen=True, kw_only=True, slots=True)
class Discovery:
    """The discovery phase: how many classes to look for, in which views of the pool."""

    num_novel: int
    """How many novel classes to look for; 0: as many as the pool seems to hold."""
    optim: Optim
    tries: int = 1
    """Begin so often, with the seed and those after it; whose clusters fit half way goes on."""
    pool: Literal["novel", "mixed"] = "novel"
    """Whether all its pictures are of novel classes; in a mixed one, known ones are left out."""
    backbone_rate: float = 1.0
    """How fast the backbone and the known head learn, relative to the new heads."""
    large: View = View()
    num_large: int = 2
    small: View = View()
    num_small: int = 0
    """Small views take part in the prediction; what they predict comes from the large ones."""

    def __post_init__(self) -> None:
        require(self.num_novel >= 0, f"discovery.num_novel={self.num_novel} should be 0 or more")
        require(
            0 <= self.backbone_rate <= 1,
            f"discovery.backbone_rate={self.backbone_rate} should be from 0 to 1",
        )
        require_count("discovery.tries", self.tries, 1)
        require_count("discovery.num_large", self.num_large, 2)
        require_count("discovery.num_small", self.num_small, 0)


@dataclass(frozen=True, kw_only=True, slots=True)
class OwnData:
    """Where somebody's own pictures are, and how they are read."""

    shape: tuple[int, ...]
    """Channels, height and width that they are scaled to."""
    labelled: str = ""
    """A folder with one sub-folder a class, or a table of paths and labels."""
    pool: tuple[str, ...] = ()
    """Folders and files without labels."""
    strict: bool = False
    """Refuse all if one cannot be read; otherwise it is skipped."""

    def __post_init__(self) -> None:
        require_shape("own.shape", self.shape)


@dataclass(frozen=True, kw_only=True, slots=True)
class Config:
    """A whole run. `method` holds the method's name and its own fields."""

    setting: str
    supervised: Supervised
    discovery: Discovery
    method: Mapping[str, Any] = field(default_factory=lambda: {"name": "ncdwf"})
    backbone: str = "small"
    own: OwnData | None = None
    """In the place of a setting's data."""
    seed: int = 0
    device: Device = "auto"
    engine: Engine = "auto"
    """How a training step is run: compiled and captured as a CUDA graph where there is a GPU."""
    checkpoint_seconds: float = 60.0
    """At most this much work is lost to a crash; 0 keeps a checkpoint of every step."""
    snapshot_epochs: int = 0
    """Keep a finished model every so many epochs of discovery, to be scored; 0: none."""

    def __post_init__(self) -> None:
        require(
            isinstance(self.method.get("name"), str), "config.method should hold the key 'name'"
        )
        require(self.seed >= 0, f"config.seed={self.seed} should be 0 or more")
        require(self.checkpoint_seconds >= 0, "config.checkpoint_seconds should be 0 or more")
        require(self.snapshot_epochs >= 0, "config.snapshot_epochs should be 0 or more")
        require(
            self.snapshot_epochs == 0 or self.discovery.tries == 1,
            "config.snapshot_epochs is for discovery.tries=1",
        )


T = TypeVar("T")


def from_dict(kind: type[T], values: Any, *, where: str = "config") -> T:
    """Build the dataclass `kind` from plain values; refuse unknown keys and wrong types."""
    require(isinstance(values, Mapping), f"{where}={values!r} should be an object")
    hints = typing.get_type_hints(kind)
    for key in values:
        if key not in hints:
            raise InputError(_unknown_key(where, key, hints))
    missing = [
        item.name
        for item in dataclasses.fields(kind)  # type: ignore[arg-type]
        if item.default is dataclasses.MISSING
        and item.default_factory is dataclasses.MISSING
        and item.name not in values
    ]
    require(not missing, f"{where} lacks {', '.join(missing)}")
    return kind(**{k: _convert(hints[k], v, f"{where}.{k}") for k, v in values.items()})


def override(config: T, *assignments: str) -> T:
    """Return `config` with single fields replaced, each written as `discovery.optim.lr=0.1`.

    Fields that have to fit each other are compared when all are in place, whatever their order.
    """
    changes = []
    for assignment in assignments:
        path, equals, text = assignment.partition("=")
        require(bool(equals), f"{assignment!r} should be written key=value, as in seed=1")
        changes.append((path.split("."), text))
    return typing.cast(T, _override(config, changes, "config"))


def _override(config: Any, changes: list[tuple[list[str], str]], where: str) -> Any:
    is_mapping = isinstance(config, Mapping)  # a method's own fields: typed when it is built
    require(
        is_mapping or dataclasses.is_dataclass(config), f"{where} holds a value, not further keys"
    )
    hints = dict.fromkeys(config) if is_mapping else typing.get_type_hints(type(config))
    values = {}
    for key in dict.fromkeys(path[0] for path, _ in changes):
        if key not in hints:
            raise InputError(_unknown_key(where, key, hints))
        here, value = f"{where}.{key}", config[key] if is_mapping else getattr(config, key)
        deeper = [(path[1:], text) for path, text in changes if path[0] == key and path[1:]]
        if deeper:
            value = _override(value, deeper, here)
        for text in [text for path, text in changes if path == [key]]:
            if not is_mapping and (dataclasses.is_dataclass(value) or isinstance(value, Mapping)):
                raise InputError(f"{here} holds further keys: {', '.join(_keys(value))}")
            value = _literal(text) if is_mapping else _convert(hints[key], _literal(text), here)
        values[key] = value
    return {**config, **values} if is_mapping else replace(config, **values)


def _keys(value: Any) -> list[str]:
    if isinstance(value, Mapping):
        return list(value)
    return [item.name for item in dataclasses.fields(value)]


def _unknown_key(where: str, key: str, accepted: Mapping[str, Any]) -> str:
    nearest = difflib.get_close_matches(key, accepted, n=1)
    if nearest:
        return f"unknown key {where}.{key}; did you mean {nearest[0]!r}?"
    there = f"there are {', '.join(accepted)}" if accepted else "no key is accepted there"
    return f"unknown key {where}.{key}; {there}"


def _literal(text: str) -> Any:
    try:
        return json.loads(text)
    except (ValueError, RecursionError):
        # Plain words need no quotes on the command line, and .5 no zero.
        return float(text) if re.fullmatch(r"-?(\.[0-9]+|[0-9]+\.)(e-?[0-9]+)?", text) else text


def _convert(hint: Any, value: Any, where: str) -> Any:
    origin = typing.get_origin(hint)
    if dataclasses.is_dataclass(hint):
        return from_dict(typing.cast(type, hint), value, where=where)
    if origin is Literal:
        choices = typing.get_args(hint)
        require(value in choices, f"{where}={value!r} is not one of {choices}")
        return value
    if origin in (typing.Union, types.UnionType):
        return _convert_union(typing.get_args(hint), value, where)
    if origin is tuple:  # tuple[int, ...]
        require(isinstance(value, list | tuple), f"{where}={value!r} should be a list")
        kind = typing.get_args(hint)[0]
        return tuple(_convert(kind, item, f"{where}[{i}]") for i, item in enumerate(value))
    if origin is not None:  # Mapping[str, Any]
        require(isinstance(value, Mapping), f"{where}={value!r} should be an object")
        return dict(value)
    if hint is float and type(value) in (int, float):
        # JSON writes neither NaN nor infinity, and 1e999 is read as infinity.
        require(abs(value) <= sys.float_info.max, f"{where}={value!r} should be a finite number")
        return float(value)
    require(type(value) is hint, f"{where}={value!r} should be {hint.__name__}")
    return value


def _convert_union(choices: tuple[Any, ...], value: Any, where: str) -> Any:
    for choice in choices:
        if choice is type(None) and value is None:
            return None
        try:
            return _convert(choice, value, where)
        except InputError:
            continue
    names = " or ".join(
        "null" if c is type(None) else getattr(c, "__name__", str(c)) for c in choices
    )
    raise InputError(f"{where}={value!r} should be {names}")

"""The model: backbone, known head, novel head, identifier and class statistics in one object."""

import dataclasses
import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn

from ncdwf import storage
from ncdwf.config import from_dict, require
from ncdwf.data.images import Images, as_images
from ncdwf.errors import InputError
from ncdwf.model.backbone import BACKBONES, Backbone, Features, check_backbone
from ncdwf.model.heads import CosineHead, MultiHead
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.initialise import build
from ncdwf.model.statistics import ClassStatistics
from ncdwf.noise import generator

FORMAT = 1
WEIGHTS_FILE = "model.safetensors"
DESCRIPTION_FILE = "model.json"
EVALUATION_BATCH = 1024

DERIVED_FROM = {
    "backbone.normalise": "labelled pictures: each colour's mean, spread",
    "backbone": "labelled pictures, then the pool: weights, norms",
    "known_head": "labelled pictures, then replay: weights",
    "novel_head": "the pool: weights",
    "best_head": "the pool: which head has the least loss",
    "identifier.tau": "the threshold in use",
    "identifier.calibrated_tau": "the pool: a threshold",
    "identifier": "the pool and replay: weights",
    "statistics.means": "labelled pictures: each class's mean feature",
    "statistics.spread": "labelled pictures: spread around the means",
    "statistics.counts": "labelled pictures: how many of each class",
    "statistics.feature_norm": "labelled pictures: mean feature length",
}
"""What each stored tensor is made from; the longest matching prefix counts."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NovelHead:
    """The shape of the novel head."""

    num_novel: int
    num_heads: int
    num_hidden: int
    num_projected: int

    def __post_init__(self) -> None:
        _require_positive(self, "num_novel", "num_heads", "num_hidden", "num_projected")


@dataclass(frozen=True, kw_only=True, slots=True)
class Architecture:
    """All that is needed to build a model again before its weights are read."""

    backbone: str
    num_channels: int
    height: int
    width: int
    num_known: int
    temperature: float
    spread: Literal["shared-diagonal", "shared", "per-class"]
    novel: NovelHead | None = None
    identifier: bool = False

    def __post_init__(self) -> None:
        _require_positive(self, "num_channels", "height", "width", "num_known", "temperature")


@dataclass(frozen=True, kw_only=True, slots=True)
class Outputs:
    """Everything the parts of a model say about some features, before routing."""

    known_logits: Float[Tensor, "image known"]
    novel_logits: Float[Tensor, "head image novel"]
    novelty: Float[Tensor, " image"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """The answer for some pictures; known classes are 0…M-1, novel ones M…M+N-1."""

    labels: Int64[Tensor, " image"]
    probability: Float[Tensor, " image"]
    """Of the answer, by the head that gave it."""
    novelty: Float[Tensor, " image"]
    """P(novel)."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Holding:
    """One tensor that a model holds."""

    name: str
    shape: tuple[int, ...]
    num_bytes: int
    derived_from: str


class Model(nn.Module):
    """A classifier of known classes that, after discovery, names novel ones too.

    It predicts from pictures alone: nobody tells it whether a picture is of a known class.
    """

    backbone: Backbone
    best_head: Tensor

    def __init__(
        self, architecture: Architecture, known_names: tuple[str, ...], novel_names: tuple[str, ...]
    ) -> None:
        super().__init__()
        self.architecture = architecture
        self.known_names = known_names
        self.novel_names = novel_names
        shape = (architecture.num_channels, architecture.height, architecture.width)
        self.backbone = BACKBONES[check_backbone(architecture.backbone)](shape)  # type: ignore[assignment]
        num_features = self.backbone.num_features
        self.known_head = CosineHead(num_features, architecture.num_known)
        self.statistics = ClassStatistics(
            num_features=num_features, num_known=architecture.num_known, spread=architecture.spread
        )
        self.novel_head: MultiHead | None = None
        if architecture.novel is not None:
            novel = dataclasses.asdict(architecture.novel)
            self.novel_head = MultiHead(num_features, novel.pop("num_novel"), **novel)
        self.identifier = KnownClassIdentifier(num_features) if architecture.identifier else None
        self.register_buffer("best_head", torch.zeros((), dtype=torch.int64))
        self.hold_norms = False

    def initialise(self, source: torch.Generator) -> None:
        """Start with the first head as the best; the parts fill themselves."""
        self.best_head.zero_()

    def train(self, mode: bool = True) -> "Model":
        """Switch to training mode; with `hold_norms` the backbone's norms keep what they know."""
        super().train(mode)
        if self.hold_norms:
            for part in self.backbone.modules():  # type: ignore[attr-defined]
                if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
                    part.eval()
        return self

    @classmethod
    def create(
        cls, architecture: Architecture, known_names: tuple[str, ...], *, seed: int
    ) -> "Model":
        """Return a model with fresh weights that follow from `seed` alone."""
        return build(lambda: cls(architecture, known_names, ()), generator(seed, "model"))

    def with_novel(self, novel: NovelHead, *, identifier: bool, seed: int) -> "Model":
        """Return a copy with a fresh novel head (and identifier); the rest is kept."""
        architecture = dataclasses.replace(self.architecture, novel=novel, identifier=identifier)
        names = tuple(f"novel-{i + 1}" for i in range(novel.num_novel))
        model = build(
            lambda: Model(architecture, self.known_names, names), generator(seed, "novel")
        )
        kept = {
            name: tensor.clone()
            for name, tensor in self.state_dict().items()
            if not name.startswith(("novel_head.", "identifier."))
        }
        missing, unexpected = model.load_state_dict(kept, strict=False)
        assert not unexpected
        assert all(name.startswith(("novel_head.", "identifier.")) for name in missing)
        return model.to(self.device)

    @property
    def device(self) -> torch.device:
        """Return the device that the weights are on."""
        return self.best_head.device

    @property
    def num_known(self) -> int:
        """Return the number M of known classes."""
        return self.architecture.num_known

    @property
    def num_novel(self) -> int:
        """Return the number N of novel classes; 0 before discovery."""
        return 0 if self.architecture.novel is None else self.architecture.novel.num_novel

    @property
    def class_names(self) -> tuple[str, ...]:
        """Return the names of all classes in the order of their labels."""
        return self.known_names + self.novel_names

    @property
    def tau(self) -> float:
        """Return the threshold on P(novel) from which this model calls a picture novel."""
        return 0.5 if self.identifier is None else float(self.identifier.tau)

    def features(self, images: Images) -> Features:
        """Return the features of all `images`, in evaluation mode, in batches."""
        return torch.cat(list(self._batches(images)))

    def outputs(self, features: Features) -> Outputs:
        """Return what every part of the model says about `features`; routing comes after."""
        with torch.no_grad(), _evaluation_mode(self):
            known = self.known_head(features)
            if self.novel_head is None:
                novel, novelty = known.new_zeros(0, len(known), 0), torch.zeros_like(known[:, 0])
            else:
                novel = self.novel_head(features)
                novelty = self._novelty(features, known, novel[int(self.best_head)])
        return Outputs(known_logits=known, novel_logits=novel, novelty=novelty.double())

    def _novelty(self, features: Tensor, known: Tensor, novel: Tensor) -> Tensor:
        """Return P(novel): the identifier's, or without one the novel share of a joint softmax."""
        if self.identifier is not None:
            return self.identifier.novelty(features)
        joint = torch.cat([known, novel], dim=1).double() / self.architecture.temperature
        return joint.softmax(1)[:, known.shape[1] :].sum(1)

    def predict(self, images: Any) -> Prediction:
        """Return the class of every picture: the one prediction path.

        Args:
            images: uint8, `[image, channel, height, width]`, of the size that the model learnt.
        """
        images = self.check(images)
        parts = [self._route(self.outputs(features)) for features in self._batches(images)]
        labels, probability, novelty = (torch.cat(part) for part in zip(*parts, strict=True))
        return Prediction(labels=labels, probability=probability, novelty=novelty)

    def _route(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor]:
        temperature = self.architecture.temperature
        probability, labels = (outputs.known_logits.double() / temperature).softmax(1).max(1)
        if self.novel_head is not None:
            novel = outputs.novel_logits[int(self.best_head)].double() / temperature
            novel_probability, cluster = novel.softmax(1).max(1)
            is_novel = outputs.novelty >= self.tau
            labels = torch.where(is_novel, cluster + self.num_known, labels)
            probability = torch.where(is_novel, novel_probability, probability)
        return labels.cpu(), probability.cpu(), outputs.novelty.cpu()

    def check(self, images: Any) -> Images:
        """Return `images` if this model can read them."""
        checked = as_images(images)
        wanted = (self.architecture.num_channels, self.architecture.height, self.architecture.width)
        if tuple(checked.shape[1:]) != wanted:
            raise InputError(
                f"pictures are {tuple(checked.shape[1:])}; this model reads {wanted} "
                "(channels, height, width)"
            )
        return checked

    def _batches(self, images: Images) -> Iterator[Features]:
        for batch in images.split(EVALUATION_BATCH):
            with torch.no_grad(), _evaluation_mode(self):
                features: Features = self.backbone(batch.to(self.device))
            yield features

    def holdings(self) -> list[Holding]:
        """Return everything the saved model holds beside its description."""
        return [
            Holding(
                name=name,
                shape=tuple(tensor.shape),
                num_bytes=tensor.numel() * tensor.element_size(),
                derived_from=_derived_from(name),
            )
            for name, tensor in self.state_dict().items()
        ]

    def save(self, directory: Path | str) -> None:
        """Write the model into `directory`, which must not hold one yet.

        The description is written last and names the sha256 of the weights: without it there is
        no model, so a crash leaves nothing that could be mistaken for one.
        """
        directory = storage.make_directory(Path(directory))
        if (directory / DESCRIPTION_FILE).exists():
            raise InputError(f"{directory} holds a model already; choose another directory")
        weights = storage.to_tensor_bytes(self.state_dict())
        storage.write_bytes(directory / WEIGHTS_FILE, weights)
        description = {
            "format": FORMAT,
            "architecture": dataclasses.asdict(self.architecture),
            "known_names": list(self.known_names),
            "novel_names": list(self.novel_names),
            "weights_sha256": storage.sha256(weights),
        }
        description["sha256"] = _checksum(description)
        storage.write_json(directory / DESCRIPTION_FILE, description)

    @classmethod
    def load(cls, directory: Path | str) -> "Model":
        """Return the model saved in `directory`, on the CPU; anything altered is refused."""
        path = Path(directory) / DESCRIPTION_FILE
        if not path.is_file():
            raise InputError(f"{directory} holds no model ({DESCRIPTION_FILE} is missing)")
        description = _checked_description(storage.read_json(path), path)
        weights_path = path.with_name(WEIGHTS_FILE)
        data = storage.read_bytes(weights_path, expected=str(description.get("weights_sha256")))
        tensors = storage.parse_tensors(data, weights_path)
        model = _without_weights(description, path)
        _check_tensors(model, tensors, weights_path)
        try:
            model.load_state_dict(tensors, strict=True, assign=True)
        except RuntimeError as error:
            reason = str(error).splitlines()[-1].strip()
            raise InputError(f"{weights_path} does not fit {path}: {reason}") from error
        novel = model.architecture.novel
        if not 0 <= int(model.best_head) < (1 if novel is None else novel.num_heads):
            raise InputError(f"{weights_path} names a best head that is not there")
        return model.eval()


class _evaluation_mode:
    """Switch a module to evaluation mode for a while, and every part back to what it was."""

    def __init__(self, module: nn.Module) -> None:
        self._before = [(part, part.training) for part in module.modules()]

    def __enter__(self) -> None:
        for part, _ in self._before:
            part.training = False

    def __exit__(self, *_: object) -> None:
        for part, training in self._before:
            part.training = training


def _derived_from(name: str) -> str:
    prefix = max((p for p in DERIVED_FROM if name.startswith(p)), key=len)
    return DERIVED_FROM[prefix]


def _checksum(description: dict[str, Any]) -> str:
    content = {key: value for key, value in description.items() if key != "sha256"}
    return hashlib.sha256(storage.to_json_bytes(content)).hexdigest()


def _checked_description(description: Any, path: Path) -> dict[str, Any]:
    if not isinstance(description, dict) or "format" not in description:
        raise InputError(f"{path} does not describe a model of ncdwf")
    if description["format"] != FORMAT:
        raise InputError(
            f"{path} has format {description['format']!r}; this version of ncdwf reads {FORMAT}"
        )
    if not _is_intact(description):
        raise InputError(f"{path} is damaged or was changed: its sha256 is not the recorded one")
    return description


def _is_intact(description: dict[str, Any]) -> bool:
    try:
        return bool(description.get("sha256") == _checksum(description))
    except (ValueError, RecursionError):  # what cannot be written was never saved
        return False


def _require_positive(shape: NovelHead | Architecture, *names: str) -> None:
    for name in names:
        value = getattr(shape, name)
        require(value > 0, f"{name}={value} of a model should be above 0")


def _without_weights(description: dict[str, Any], path: Path) -> Model:
    """Return the model that is described, still without storage."""
    try:
        architecture = from_dict(Architecture, description["architecture"], where="architecture")
        known, novel = (tuple(description[key]) for key in ("known_names", "novel_names"))
        require(all(isinstance(n, str) for n in known + novel), "a name is not a string")
        with torch.device("meta"):
            model = Model(architecture, known, novel)
        counts = (len(known), len(novel)) == (model.num_known, model.num_novel)
        require(counts, "it does not name every class once")
    except (InputError, KeyError, TypeError, RuntimeError) as error:
        reason = (str(error).splitlines() or [""])[0]
        raise InputError(f"{path} does not describe a model of ncdwf: {reason}") from error
    return model


def _check_tensors(model: Model, tensors: dict[str, Tensor], path: Path) -> None:
    """Refuse tensors of another type than the model's own, and values that are no numbers."""
    wanted = {name: tensor.dtype for name, tensor in model.state_dict().items()}
    for name, tensor in tensors.items():
        if tensor.dtype != wanted.get(name, tensor.dtype):
            raise InputError(f"{path} holds {tensor.dtype} in {name}, not {wanted[name]}")
        if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
            raise InputError(f"{path} holds NaN or infinite values in {name}")

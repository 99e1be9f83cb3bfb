"""The model: backbone, known head, novel head, identifier and class statistics in one object."""

import copy
import dataclasses
import itertools
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf import storage
from ncdwf.config import require, require_short
from ncdwf.data.inputs import Inputs, as_inputs
from ncdwf.errors import InputError, NonFiniteError, enough_memory, printable
from ncdwf.model import archive
from ncdwf.model.architecture import Architecture, NovelHead
from ncdwf.model.backbone import (
    CUSTOM,
    TIMM,
    UNREADABLE,
    Backbone,
    Features,
    Foreign,
    Normalise,
    make_backbone,
)
from ncdwf.model.heads import CosineHead, MultiHead
from ncdwf.model.holdings import Holding, list_holdings
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.initialise import build
from ncdwf.model.statistics import ClassStatistics, joined
from ncdwf.noise import generator

EVALUATION_BATCH = 1024
EVALUATION_PIXELS = EVALUATION_BATCH * 64 * 64
"""Of larger pictures fewer are read at once, so that memory stays bounded."""


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


class Model(nn.Module):
    """A classifier of known classes that, after discovery, names novel ones too.

    It predicts from pictures alone: nobody tells it whether a picture is of a known class.
    """

    backbone: Backbone
    best_head: Tensor

    def __init__(
        self,
        architecture: Architecture,
        known_names: tuple[str, ...],
        novel_names: tuple[str, ...],
        backbone: Backbone | None = None,
    ) -> None:
        super().__init__()
        default = torch.get_default_dtype()
        require(
            default == torch.float32,
            f"PyTorch makes {default} by default; call torch.set_default_dtype(torch.float32)",
        )
        self.architecture = architecture
        self.known_names = known_names
        self.novel_names = novel_names
        self.backbone = backbone or make_backbone(architecture.backbone, architecture.input_shape)  # type: ignore[assignment]
        num_features = self.backbone.num_features
        self.known_head = CosineHead(num_features, architecture.num_known)
        self.statistics = ClassStatistics(
            num_features=num_features, num_known=architecture.num_known, spread=architecture.spread
        )
        self.novel_head: MultiHead | None = None
        self.novel_statistics: ClassStatistics | None = None
        novel = architecture.novel
        if novel is not None:
            self.novel_head = MultiHead(
                num_features,
                novel.num_novel,
                num_heads=novel.num_heads,
                num_hidden=novel.num_hidden,
                num_projected=novel.num_projected,
            )
            self.novel_statistics = ClassStatistics(
                num_features=num_features, num_known=novel.num_novel, spread=architecture.spread
            )
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
        cls,
        architecture: Architecture,
        known_names: tuple[str, ...],
        *,
        seed: int,
        backbone: nn.Module | None = None,
    ) -> "Model":
        """Return a model with fresh weights that follow from `seed` alone.

        Args:
            architecture: what to build.
            known_names: of the known classes.
            seed: decides every weight but those of a foreign backbone.
            backbone: somebody else's network, with its weights; the architecture calls it
                `custom`. A copy of it is taken.
        """
        if architecture.backbone.startswith(TIMM):
            with torch.random.fork_rng():
                torch.manual_seed(seed)  # other people's networks draw from the global state
                foreign = make_backbone(architecture.backbone, architecture.input_shape)
        elif backbone is not None:
            foreign = Foreign(copy.deepcopy(backbone), architecture.input_shape)
        else:
            return build(lambda: cls(architecture, known_names, ()), generator(seed, "model"))
        return _with_backbone(architecture, known_names, (), foreign, generator(seed, "model"))

    def with_novel(self, novel: NovelHead, *, identifier: bool, seed: int) -> "Model":
        """Return a copy with a fresh novel head (and identifier); the rest is kept."""
        architecture = dataclasses.replace(self.architecture, novel=novel, identifier=identifier)
        names = _new_names(novel.num_novel, self.architecture.num_discovered, self.known_names)
        source = generator(seed, "novel")
        if isinstance(self.backbone, Foreign):
            foreign = copy.deepcopy(self.backbone)
            model = _with_backbone(architecture, self.known_names, names, foreign, source)
        else:
            model = build(lambda: Model(architecture, self.known_names, names), source)
        fresh = ("novel_head.", "novel_statistics.", "identifier.")
        kept = {
            name: tensor.clone()
            for name, tensor in self.state_dict().items()
            if not name.startswith(fresh)
        }
        missing, unexpected = model.load_state_dict(kept, strict=False)
        assert not unexpected
        assert all(name.startswith(fresh) for name in missing)
        return model.to(self.device)

    def promoted(self) -> "Model":
        """Return a copy to which the novel classes are known ones; see `learning.rounds.promote`.

        Their prototypes are the directions of their mean features, a start to be fitted from.
        """
        if self.novel_head is None or self.novel_statistics is None:
            raise InputError("this model has not discovered anything yet")
        names = self.class_names
        architecture = dataclasses.replace(
            self.architecture,
            num_known=len(names),
            num_discovered=self.architecture.num_discovered + self.num_novel,
            novel=None,
            identifier=False,
        )
        with torch.device("meta"):
            head = CosineHead(self.backbone.num_features, len(names))
        model = copy.deepcopy(self)
        model.architecture, model.known_names, model.novel_names = architecture, names, ()
        model.novel_head = model.novel_statistics = model.identifier = None
        model.known_head = head.to_empty(device=self.device)
        prototypes = (self.known_head.prototypes, self.novel_statistics.means)
        with torch.no_grad():
            model.known_head.prototypes.copy_(
                torch.cat([F.normalize(rows, dim=1) for rows in prototypes])
            )
        model.statistics = joined(self.statistics, self.novel_statistics)
        model.best_head.zero_()
        model.hold_norms = False
        return model.eval()

    def rename(self, names: Mapping[str, str]) -> None:
        """Give classes other names: `{"novel-1": "kakapo"}`."""
        for old in names:
            if old not in self.class_names:
                raise InputError(
                    f"there is no class {old!r}; there are {', '.join(self.class_names)}"
                )
        renamed = tuple(names.get(name, name) for name in self.class_names)
        for name in renamed:
            require(isinstance(name, str) and name.strip() != "", f"{name!r} is not a name")
            require(renamed.count(name) == 1, f"two classes would be called {name!r}")
        require_short(renamed)
        for name in names.values():  # the others may come from a folder, however it is called
            is_plain = printable(name) == name
            require(is_plain, f"{name!r} has characters that cannot be printed")
        self.known_names, self.novel_names = renamed[: self.num_known], renamed[self.num_known :]

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

    def features(self, images: Inputs) -> Features:
        """Return the features of all `images`, in evaluation mode, in batches."""
        return torch.cat(list(self._batches(images)))

    def outputs(self, features: Features) -> Outputs:
        """Return what every part of the model says about `features`; routing comes after."""
        # In parts: hidden layers of the novel heads are many times as wide as the features.
        parts = [self._say(part) for part in features.split(EVALUATION_BATCH)]
        said = Outputs(
            known_logits=torch.cat([part.known_logits for part in parts]),
            novel_logits=torch.cat([part.novel_logits for part in parts], dim=1),
            novelty=torch.cat([part.novelty for part in parts]),
        )
        for values in (said.known_logits, said.novel_logits, said.novelty):
            if not bool(torch.isfinite(values).all()):
                raise NonFiniteError("the model answers NaN: its weights are too large, or damaged")
        return said

    def _say(self, features: Features) -> Outputs:
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
        joint = torch.cat(self._scaled(known, novel), dim=1)
        return joint.softmax(1)[:, known.shape[1] :].sum(1)

    def _scaled(self, known: Tensor, novel: Tensor) -> tuple[Tensor, Tensor]:
        """Return the logits of both heads divided by their temperatures, in double precision."""
        assert self.architecture.novel is not None
        return (
            known.double() / self.architecture.temperature,
            novel.double() / self.architecture.novel.temperature,
        )

    def predict(self, images: Any) -> Prediction:
        """Return the class of every picture: the one prediction path.

        Args:
            images: uint8, `[image, channel, height, width]`, of the size that the model learnt; or
                vectors, `[image, number]`, for a model that learnt from vectors.
        """
        images = self.check(images)
        parts = [self._name(self.outputs(features)) for features in self._batches(images)]
        labels, probability, novelty = (torch.cat(part) for part in zip(*parts, strict=True))
        return Prediction(labels=labels, probability=probability, novelty=novelty)

    def _name(self, outputs: Outputs) -> tuple[Tensor, Tensor, Tensor]:
        probability, labels = self.probabilities(outputs).max(1)
        return labels.cpu(), probability.cpu(), outputs.novelty.cpu()

    def probabilities(self, outputs: Outputs) -> Float[Tensor, "image cls"]:
        """Return P(class): of the head that a picture is routed to; 0 for the other's classes."""
        known = outputs.known_logits
        if self.novel_head is None:
            return (known.double() / self.architecture.temperature).softmax(1)
        heads = self._scaled(known, outputs.novel_logits[int(self.best_head)])
        is_novel = (outputs.novelty >= self.tau)[:, None]
        of_known, of_novel = (logits.softmax(1) for logits in heads)
        return torch.cat([of_known * ~is_novel, of_novel * is_novel], dim=1)

    def check(self, images: Any) -> Inputs:
        """Return `images` if this model can read them."""
        checked = as_inputs(images)
        wanted = self.architecture.input_shape
        if tuple(checked.shape[1:]) != wanted:
            what = "pictures" if checked.ndim == 4 else "vectors"
            reads = "(channels, height, width)" if len(wanted) == 3 else "numbers each"
            size = wanted if len(wanted) == 3 else wanted[0]
            raise InputError(
                f"{what} are {tuple(checked.shape[1:])}; this model reads {size} {reads}"
            )
        return checked

    def reads(self, shape: tuple[int, ...]) -> bool:
        """Tell whether pictures of another shape get features as those of the learnt one do."""
        if shape == self.architecture.input_shape:
            return True
        try:
            features = self.features(torch.zeros(2, *shape, dtype=torch.uint8))
        except UNREADABLE:
            return False
        return tuple(features.shape) == (2, self.backbone.num_features)

    def _batches(self, images: Inputs) -> Iterator[Features]:
        for batch in torch.split(images, num_at_once(tuple(images.shape[1:]))):
            with enough_memory(), torch.no_grad(), _evaluation_mode(self):
                features: Features = self.backbone(batch.to(self.device))
            yield features

    def holdings(self) -> list[Holding]:
        """Return everything the saved model holds beside its description."""
        return list_holdings(self.state_dict())

    def save(self, directory: Path | str) -> None:
        """Write the model into `directory`, which must not hold one yet."""
        archive.write(Path(directory), self._description(), self.state_dict())

    def is_saved_in(self, directory: Path | str) -> bool:
        """Tell whether this very model was written into `directory`."""
        return archive.is_written(Path(directory), self._description(), self.state_dict())

    def save_names(self, directory: Path | str) -> None:
        """Write other names of the classes into the directory that this model was loaded from."""
        archive.rewrite_description(Path(directory), self._description())

    def _description(self) -> archive.Description:
        return archive.Description(
            architecture=self.architecture,
            known_names=self.known_names,
            novel_names=self.novel_names,
        )

    @classmethod
    def load(cls, directory: Path | str, *, backbone: nn.Module | None = None) -> "Model":
        """Return the model saved in `directory`, on the CPU; anything altered is refused.

        A model whose backbone was passed as a module needs such a module again; its weights come
        from the directory.
        """
        directory = Path(directory)
        description, tensors = archive.read(directory)
        if description.architecture.backbone == CUSTOM and backbone is None:
            raise InputError(
                f"the network of the model in {directory} was passed as a module; load it in "
                "Python with such a module: backbone=…"
            )
        with archive.blamed_on(directory / archive.DESCRIPTION_FILE):
            model = _without_weights(description, backbone)
        weights_path = directory / archive.WEIGHTS_FILE
        storage.check_tensors(tensors, model.state_dict(), weights_path)
        if description.architecture.backbone.startswith(TIMM):
            # With storage: such networks keep buffers that no file holds.
            architecture = description.architecture
            model.backbone = make_backbone(architecture.backbone, architecture.input_shape)  # type: ignore[assignment]
        model.load_state_dict(tensors, strict=True, assign=True)
        _check_values(model, weights_path)
        novel = model.architecture.novel
        if not 0 <= int(model.best_head) < (1 if novel is None else novel.num_heads):
            raise InputError(f"{weights_path} names a best head that is not there")
        if not 0 <= model.tau <= 1:
            raise InputError(f"{weights_path} has a threshold that is no probability")
        return model.eval()


def num_at_once(shape: tuple[int, ...]) -> int:
    """Return how many pictures (or vectors) of a shape are read at once, if nothing is learnt.

    >>> num_at_once((3, 32, 32)), num_at_once((3, 224, 224)), num_at_once((64,))
    (1024, 83, 1024)
    """
    return max(1, min(EVALUATION_BATCH, EVALUATION_PIXELS // math.prod(shape[1:])))


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


def _with_backbone(
    architecture: Architecture,
    known_names: tuple[str, ...],
    novel_names: tuple[str, ...],
    foreign: nn.Module,
    source: torch.Generator,
) -> Model:
    """Return a model around a backbone that has its weights already; the rest is filled."""
    assert isinstance(foreign, Foreign)
    outline = _Outline(foreign.num_features)
    model = build(
        lambda: Model(architecture, known_names, novel_names, backbone=outline),
        source,
    )
    model.backbone = foreign
    return model


class _Outline(nn.Module):
    """Holds the place of a backbone while the parts around it are filled."""

    def __init__(self, num_features: int) -> None:
        super().__init__()
        self.num_features = num_features
        self.normalise = Normalise(1)

    def forward(self, images: Tensor) -> Tensor:
        raise AssertionError("an outline reads nothing")


def _new_names(count: int, num_before: int, taken: tuple[str, ...]) -> tuple[str, ...]:
    """Return `novel-1`, `novel-2`, …, going on from earlier rounds and passing over taken names."""
    numbers = itertools.count(num_before + 1)
    names = (f"novel-{number}" for number in numbers)
    return tuple(itertools.islice((name for name in names if name not in taken), count))


def _without_weights(description: archive.Description, backbone: nn.Module | None) -> Model:
    """Return the model that is described, still without storage."""
    architecture = description.architecture
    foreign: Any = None
    if architecture.backbone == CUSTOM:
        assert backbone is not None
        foreign = Foreign(copy.deepcopy(backbone), architecture.input_shape)
    names = description.known_names, description.novel_names
    with torch.device("meta"):
        return Model(architecture, *names, backbone=foreign)


def _check_values(model: Model, path: Path) -> None:
    """Refuse spreads from which no model can have learnt: nothing but NaN would come of them."""
    for name, tensor in model.state_dict().items():
        if name == "backbone.normalise.std" and not bool((tensor > 0).all()):
            raise InputError(f"{path} holds {name} that is not above 0")
        if name.endswith("running_var") and not bool((tensor >= 0).all()):
            raise InputError(f"{path} holds {name} below 0")

"""The discovery phase: find novel classes in a bare pool of pictures, with a method of choice.

Nothing here can receive or import a label: the pool is a tensor of pictures, and an import contract
keeps the modules that know labels out of this one and of every method.
"""

import copy
import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, TypeVar

import numpy as np
import torch
from jaxtyping import Float
from torch import Tensor, nn

from ncdwf.config import Config, Discovery, Engine, from_dict
from ncdwf.data.augment import Views, augment_views, check_view, view_draw, view_shape
from ncdwf.data.inputs import Inputs
from ncdwf.errors import InputError, NonFiniteError, enough_memory
from ncdwf.learning.batches import Batch, TensorSource, place
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.loop import Epoch, History, Terms, Training, choose_device
from ncdwf.learning.rounds import promote
from ncdwf.learning.survey import Survey, check_pool, survey
from ncdwf.model import Model
from ncdwf.model.backbone import apply
from ncdwf.model.movement import Movement
from ncdwf.model.statistics import soft_statistics
from ncdwf.noise import Draw, Noise
from ncdwf.progress import Progress

PHASE = "discovery"

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a method's `finish` may use beside the model and its own state."""

    before: Float[Tensor, "image feature"]
    """The features of the pool before discovery."""
    after: Float[Tensor, "image feature"]
    """The same as they are now."""
    history: History
    """What each epoch left; `finish` adds the epochs of what it fits."""
    seed: int
    engine: Engine
    progress: Progress | None


class Method(ABC):
    """A way to discover novel classes: a frozen dataclass whose fields are its hyper-parameters.

    A method gives loss terms; the loop does the rest.
    """

    __slots__ = ()

    @abstractmethod
    def prepare(self, model: Model, num_novel: int, *, seed: int) -> tuple[Model, nn.Module]:
        """Return the model with its novel head, and the method's own state.

        Trainable parameters of the state (a regressor, over-clustering heads) are trained with the
        model; frozen ones (a teacher) are not.
        """

    @abstractmethod
    def noise(self, state: nn.Module, batch_size: int) -> dict[str, Draw]:
        """Return what `loss` reads from its noise, by name."""

    @abstractmethod
    def loss(
        self, model: Model, views: Views, state: nn.Module, progress: Tensor, noise: Noise
    ) -> Terms:
        """Return the named loss terms of one step, weights included."""

    @abstractmethod
    def finish(self, model: Model, state: nn.Module, outcome: Outcome) -> None:
        """Put into `model` what is found after the last step: best head, identifier, threshold."""


METHODS: dict[str, type[Method]] = {}
"""Every registered method by its name."""

C = TypeVar("C", bound=type[Method])


def register(name: str) -> Callable[[C], C]:
    """Return a decorator that enters a method class into `METHODS`."""

    def enter(method: C) -> C:
        assert name not in METHODS, f"{name} is registered already"
        METHODS[name] = method
        return method

    return enter


def check_method(name: str) -> str:
    """Return `name` if there is such a method."""
    if name not in METHODS:
        raise InputError(f"unknown method {name!r}; there are {', '.join(sorted(METHODS))}")
    return name


def make_method(description: Mapping[str, Any]) -> Method:
    """Return the method that `{"name": …, field: value, …}` describes."""
    fields = dict(description)
    name = fields.pop("name")
    return from_dict(METHODS[check_method(name)], fields, where="config.method")


class Teacher(nn.Module):
    """A frozen copy of the model after the supervised phase, always in evaluation mode."""

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.model = copy.deepcopy(model).requires_grad_(False).eval()

    def train(self, mode: bool = True) -> "Teacher":
        """Stay in evaluation mode."""
        return self

    @torch.no_grad()
    def features(self, images: Tensor) -> Tensor:
        """Return the features that `images` had before discovery."""
        return apply(self.model.backbone, images)

    @torch.no_grad()
    def known_logits(self, features: Tensor) -> Tensor:
        """Return the cosines of the known head as it was before discovery."""
        return self.model.known_head(features)  # type: ignore[no-any-return]


def best_head(history: History, term: str = "cluster") -> int:
    """Return the head with the least loss over the last epoch: its loss, not its accuracy."""
    losses = history[-1].terms[term]
    assert isinstance(losses, list)
    return min(range(len(losses)), key=losses.__getitem__)


def remember(
    model: Model,
    before: Float[Tensor, "image feature"],
    features: Float[Tensor, "image feature"],
) -> None:
    """Put the statistics of all classes into the model, as it sees them now.

    A later round needs them: the pool will be gone by then. Those of known classes move as the
    features of the pool have moved; those of novel ones are what the model makes of the pool.
    """
    assert model.architecture.novel is not None
    model.statistics = Movement(before, features).carry(model.statistics)
    logits = model.outputs(features).novel_logits[int(model.best_head)]
    memberships = (logits.double() / model.architecture.novel.temperature).softmax(1)
    model.novel_statistics = soft_statistics(features, memberships, model.architecture.spread)


def reads_small_views(model: Model, settings: Discovery) -> bool:
    """Tell whether the network reads the small views, if there are any: some have one size only."""
    shape = view_shape(settings.small, model.architecture.input_shape)
    return settings.num_small == 0 or model.reads(shape)


def _check_views(model: Model, settings: Discovery) -> None:
    """Refuse views that the pool cannot give, or the network cannot read."""
    shape = model.architecture.input_shape
    check_view(settings.large, shape, name="discovery.large")
    check_view(settings.small, shape, name="discovery.small")
    if not reads_small_views(model, settings):
        small = view_shape(settings.small, shape)
        raise InputError(
            f"this backbone cannot read small views of shape {small}; set discovery.num_small=0"
        )


@enough_memory()
def discover(
    model: Model,
    images: Any,
    method: Method,
    config: Config,
    *,
    checkpoints: Checkpoints | None = None,
    progress: Progress | None = None,
    history: History | None = None,
    snapshot: Callable[[int, Model], None] | None = None,
    surveyed: Callable[[Survey], None] | None = None,
) -> Model:
    """Return a model that also names the novel classes of the pool; `model` is left as it was.

    Args:
        model: as the supervised phase left it; or as an earlier discovery did, whose novel classes
            are then known ones to this round.
        images: the pool: pictures (uint8) or vectors as the model reads them, no labels.
        method: how to discover; `METHODS` lists what is registered, any `Method` will do.
        config: `config.discovery`, the seed and the device are used.
        checkpoints: where to keep checkpoints, and to resume from.
        progress: hears of every step.
        history: what each epoch left is added to this list.
        snapshot: gets the model as it would be if discovery ended now, and how many epochs are
            done, every `config.snapshot_epochs` epochs.
        surveyed: hears what was found out about the pool beforehand.
    """
    images = model.check(images)
    settings, device = config.discovery, choose_device(config.device)
    check_pool(len(images), settings.num_novel)
    _check_views(model, settings)
    model = copy.deepcopy(model).to(device)
    if model.novel_head is not None:
        model = promote(model, seed=config.seed, engine=config.engine, progress=progress)
    images = place(images, device)
    features = model.features(images)
    found = survey(model.statistics, features, config)
    if surveyed is not None:
        surveyed(found)
    work = _Round(model, images, found.kept(features), found, method, config, progress, snapshot)
    numbers = range(settings.tries)
    kept = [None if checkpoints is None else checkpoints.of_try(number) for number in numbers]
    # No name holds the other tries once the best one is known: they take memory.
    best = _best(list(map(work.begin, numbers, kept)), settings.optim.epochs)
    work.finish(best.model, best.state, best.training.history, best.training.seed, progress)
    if history is not None:
        history.extend(best.training.history)
    return best.model


@dataclass(frozen=True, slots=True)
class _Try:
    """One of several discoveries in the same pool."""

    number: int
    model: Model
    state: nn.Module
    training: Training


@dataclass(frozen=True, slots=True)
class _Round:
    """What all tries of a round begin with."""

    model: Model
    images: Inputs
    before: Float[Tensor, "kept feature"]
    """The features of those that are discovered among."""
    found: Survey
    method: Method
    config: Config
    progress: Progress | None
    snapshot: Callable[[int, Model], None] | None

    def begin(self, number: int, checkpoints: Checkpoints | None) -> _Try:
        """Return a try that is ready to be trained, or to be gone on with."""
        method, config, settings = self.method, self.config, self.config.discovery
        seed, counted = config.seed + number, self.found.count
        num_novel = settings.num_novel if counted is None else counted.number
        model, state = method.prepare(self.model, num_novel, seed=seed)
        state = state.to(model.device)
        rows = torch.arange(len(self.images))
        source = TensorSource(
            self.images,
            batch_size=settings.optim.batch_size,
            seed=seed,
            phase=PHASE,
            device=model.device,
            rows=self.found.kept(rows),  # a pool mapped from a file is not copied
        )
        counts = {"large": settings.num_large, "small": settings.num_small}
        sizes = {name: getattr(settings, name) for name, count in counts.items() if count > 0}
        draws = {
            name: view_draw(view, counts[name], source.batch_size, model.architecture.input_shape)
            for name, view in sizes.items()
        }

        def make_views(batch: Batch, noise: Noise) -> Batch:
            return tuple(augment_views(batch[0], view, noise[name]) for name, view in sizes.items())

        def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
            return method.loss(model, Views(*batch), state, progress, noise)

        def after_epoch(epochs: History) -> None:
            every = config.snapshot_epochs
            if self.snapshot is not None and every and len(epochs) % every == 0:
                now = copy.deepcopy(model)
                self.finish(now, state, list(epochs), seed, None)
                self.snapshot(len(epochs), now)

        training = Training(
            nn.ModuleDict({"model": model, "state": state}),
            loss,
            source,
            settings.optim,
            noise={**draws, **method.noise(state, source.batch_size)},
            seed=seed,
            phase=PHASE,
            make_views=make_views,
            engine=config.engine,
            slower=dict.fromkeys(("model.backbone", "model.known_head"), settings.backbone_rate),
            checkpoints=checkpoints,
            progress=self.progress,
            after_epoch=after_epoch,
        )
        return _Try(number + 1, model, state, training)

    def finish(
        self,
        model: Model,
        state: nn.Module,
        epochs: History,
        seed: int,
        progress: Progress | None,
    ) -> None:
        """Put into `model` what is found once its features no longer move."""
        model.eval()
        after = self.found.kept(model.features(self.images))
        outcome = Outcome(
            before=self.before,
            after=after,
            history=epochs,
            seed=seed,
            engine=self.config.engine,
            progress=progress,
        )
        self.method.finish(model, state, outcome)
        model.eval()
        remember(model, self.before, after)


def _best(tries: list[_Try], epochs: int) -> _Try:
    """Return the try whose clusters fit best half way, trained to the end.

    One that diverges does not count, unless all do.
    """
    num_tries, half = len(tries), math.ceil(epochs / 2)
    errors: list[NonFiniteError] = []

    def reaches(one: _Try, until: int, title: str) -> bool:
        try:
            one.training.run(until, title=title)
        except NonFiniteError as error:
            errors.append(error)
            if len(errors) < num_tries:
                log.warning("try %d of %d does not count: %s", one.number, num_tries, error)
            return False
        return True

    if num_tries > 1:
        tries = [one for one in tries if reaches(one, half, f"{PHASE} {one.number}/{num_tries}")]
        tries.sort(key=lambda one: _misfit(one.training.history[half - 1]))
    for one in tries:
        if reaches(one, epochs, PHASE):
            return one
    raise errors[-1]


def _misfit(epoch: Epoch) -> float:
    """Return how badly clusters fit the pool: the least loss of a head that finds them, or all."""
    if "cluster" in epoch.terms:
        return float(np.min(epoch.terms["cluster"]))
    return sum(float(np.mean(value)) for value in epoch.terms.values())

"""Gaussian replay instead of pseudo-latents: what the search for the paper's reading left over."""

from dataclasses import dataclass
from typing import Literal, cast

from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import Optim, require
from ncdwf.data.augment import Views
from ncdwf.learning.clustering import Clustering, cluster, cluster_terms, encode
from ncdwf.learning.discovery import (
    Method,
    Outcome,
    Teacher,
    best_head,
    register,
)
from ncdwf.learning.loop import Terms
from ncdwf.learning.losses import distillation, known_scale
from ncdwf.learning.settling import settle
from ncdwf.model import Model
from ncdwf.model.heads import MultiHead
from ncdwf.model.replay import GaussianPrototypes, check_ratio
from ncdwf.noise import Draw, Noise, generator


class State(nn.Module):
    """What the method needs beside the model while discovery runs."""

    def __init__(
        self, teacher: Teacher, memory: GaussianPrototypes, overclusters: MultiHead | None
    ) -> None:
        super().__init__()
        self.teacher = teacher
        self.memory = memory
        self.overclusters = overclusters


@register("ncdwf-gauss")
@dataclass(frozen=True, kw_only=True, slots=True)
class NcdwfGauss(Method):
    """Gaussian samples stand in for the known classes (after Joseph et al., ECCV 2022).

    Self-labelling of the pool, distillation of the features, a known head that keeps answering
    Gaussian samples, an identifier fitted after discovery with a threshold found without labels.
    """

    clustering: Clustering = Clustering()
    norms: Literal["pool", "held"] = "held"
    """Normalise the backbone's layers by the batch, or by the statistics of the labelled data."""
    replay_ratio: float = 0.25
    """Samples a step, relative to the batch."""
    weight_replay: float = 1.0
    weight_distill: float = 3.0
    """Relative to the mean feature norm, where known and novel classes are as many."""
    settling: Optim = Optim(epochs=60, batch_size=512, lr=0.3)
    """Of the fit after discovery, in which the known head is settled, too."""
    novel_lost: float = 0.2
    """Share of unseen pool pictures that the threshold gives up."""
    least_tau: float = 0.0
    """What the threshold is at least, if half of those pictures stay novel."""

    def __post_init__(self) -> None:
        for name in ("weight_replay", "weight_distill"):
            value = getattr(self, name)
            require(value >= 0, f"config.method.{name}={value} should be 0 or more")
        check_ratio(self.replay_ratio)
        value = self.novel_lost
        require(0 < value < 1, f"config.method.novel_lost={value} should be between 0 and 1")
        value = self.least_tau
        require(0 <= value < 1, f"config.method.least_tau={value} should be from 0 to below 1")

    def prepare(self, model: Model, num_novel: int, *, seed: int) -> tuple[Model, nn.Module]:
        """Return the model with novel heads and identifier, and teacher and memory."""
        source = generator(seed, "ncdwf-gauss")
        state = State(
            Teacher(model),
            GaussianPrototypes(model.statistics),
            self.clustering.overclusters(model, num_novel, source),
        )
        shape = self.clustering.novel_head(num_novel)
        model = model.with_novel(shape, identifier=True, seed=seed)
        model.hold_norms = self.norms == "held"
        return model, state

    def noise(self, state: nn.Module, batch_size: int) -> dict[str, Draw]:
        """Return what the memory draws."""
        return cast(State, state).memory.draws(max(1, round(self.replay_ratio * batch_size)))

    def loss(
        self, model: Model, views: Views, state: nn.Module, progress: Tensor, noise: Noise
    ) -> Terms:
        """Return the terms of one step."""
        state = cast(State, state)
        features = encode(model, views).flatten(0, 1)
        before = state.teacher.features(views.large.flatten(0, 1))
        samples, labels = state.memory.sample(noise)
        known = model.known_head(samples).float() / model.architecture.temperature
        cosines = cluster(model, state.overclusters, features)
        weight_distill = self.weight_distill * known_scale(model.num_known, model.num_novel)
        return {
            **cluster_terms(cosines, views, self.clustering, progress),
            "replay": self.weight_replay * F.cross_entropy(known, labels),
            "distill": weight_distill
            * distillation(features[: len(before)], before, model.statistics.feature_norm),
        }

    def finish(self, model: Model, state: nn.Module, outcome: Outcome) -> None:
        """Choose the best head, settle identifier and known head, set the threshold."""
        state = cast(State, state)
        model.best_head.fill_(best_head(outcome.history))
        settle(
            model,
            state.memory,
            state.teacher,
            outcome,
            optim=self.settling,
            weight_replay=self.weight_replay,
            tau="calibrated",
            novel_lost=self.novel_lost,
            least_tau=self.least_tau,
        )

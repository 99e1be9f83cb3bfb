"""Novel Class Discovery without Forgetting (Joseph et al., ECCV 2022), part by part."""

from dataclasses import dataclass
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import Optim, require
from ncdwf.data.augment import Views
from ncdwf.learning.discovery import Method, Outcome, Teacher, best_head, register
from ncdwf.learning.identification import calibrate, fit_identifier
from ncdwf.learning.information import VariationalRegressor
from ncdwf.learning.loop import Terms
from ncdwf.learning.losses import (
    balanced_binary_cross_entropy,
    distillation,
    sinkhorn,
    swapped_prediction,
)
from ncdwf.model import Model, NovelHead
from ncdwf.model.heads import MultiHead
from ncdwf.model.initialise import build
from ncdwf.model.replay import GaussianPrototypes, KnownMemory, PseudoLatents, invert
from ncdwf.noise import Draw, Noise, generator

MOST = 2**16
"""No size makes sense beyond this; a slip of the finger should not fill the memory."""


class State(nn.Module):
    """What the method needs beside the model while discovery runs."""

    def __init__(
        self,
        teacher: Teacher,
        memory: KnownMemory,
        overclusters: MultiHead | None,
        regressor: VariationalRegressor,
    ) -> None:
        super().__init__()
        self.teacher = teacher
        self.memory = memory
        self.overclusters = overclusters
        self.regressor = regressor


@register("ncdwf")
@dataclass(frozen=True, kw_only=True, slots=True)
class Ncdwf(Method):
    """Novel Class Discovery without Forgetting (Joseph et al., ECCV 2022).

    Self-labelling of the pool, pseudo-latent replay for the known head, a mutual-information
    regulariser between both, distillation of the features, an identifier that routes. A weight of
    0 switches a part off.
    """

    num_heads: int = 4
    num_hidden: int = 2048
    num_projected: int = 256
    overclustering: int = 3
    """How many times more clusters the over-clustering heads have; 0: there are none."""
    softmax: Literal["separate", "joint"] = "separate"
    """Over the novel logits alone, or over known and novel ones together."""
    replay: Literal["pseudo-latents", "gaussian"] = "pseudo-latents"
    replay_ratio: float = 0.25
    """Latents a step, relative to the batch."""
    weight_replay: float = 1.0
    gamma: float = 1.0
    rho: float = 100.0
    """Latent mixup draws its coefficient from Beta(gamma, rho)."""
    latents_per_class: int = 500
    inversion_iterations: int = 100
    weight_distill: float = 3.0
    """Relative to the mean feature norm."""
    weight_information: float = 0.01
    information_from: Literal["frozen", "current"] = "frozen"
    """Whose known logits the regulariser aims at; the current ones carry no gradient."""
    min_variance: float = 1.0
    identifier: Literal["during", "after"] = "after"
    """Trained with every step of discovery, or fitted after it on evaluation-mode features."""
    identifier_optim: Optim = Optim(epochs=60, batch_size=64, lr=0.1)
    tau: float | Literal["calibrated"] = 0.99

    def __post_init__(self) -> None:
        for name in (
            "num_heads",
            "num_hidden",
            "num_projected",
            "latents_per_class",
            "inversion_iterations",
        ):
            value = getattr(self, name)
            require(1 <= value <= MOST, f"config.method.{name}={value} should be from 1 to {MOST}")
        for name in ("overclustering", "weight_replay", "weight_distill", "weight_information"):
            value = getattr(self, name)
            require(value >= 0, f"config.method.{name}={value} should be 0 or more")
        for name in ("gamma", "rho", "min_variance", "replay_ratio"):
            value = getattr(self, name)
            require(value > 0, f"config.method.{name}={value} should be above 0")
        require(
            self.tau == "calibrated" or 0 < float(self.tau) < 1,
            f"config.method.tau={self.tau} should be between 0 and 1, or 'calibrated'",
        )

    def prepare(self, model: Model, num_novel: int, *, seed: int) -> tuple[Model, nn.Module]:
        """Return the model with novel heads and identifier, and teacher, memory and regressor."""
        shape = NovelHead(
            num_novel=num_novel,
            num_heads=self.num_heads,
            num_hidden=self.num_hidden,
            num_projected=self.num_projected,
        )
        source = generator(seed, "ncdwf")
        overclusters = None
        if self.overclustering > 0:
            overclusters = build(
                lambda: MultiHead(
                    model.backbone.num_features,
                    num_novel * self.overclustering,
                    num_heads=self.num_heads,
                    num_hidden=self.num_hidden,
                    num_projected=self.num_projected,
                ),
                source,
            )
        regressor = build(
            lambda: VariationalRegressor(
                num_novel,
                model.num_known,
                num_heads=self.num_heads,
                min_variance=self.min_variance,
            ),
            source,
        )
        memory = self._memory(model, seed)
        state = State(Teacher(model), memory, overclusters, regressor)
        return model.with_novel(shape, identifier=True, seed=seed), state

    def _memory(self, model: Model, seed: int) -> KnownMemory:
        if self.replay == "gaussian":
            return GaussianPrototypes(model.statistics)
        source = generator(seed, "inversion", device=model.device)
        labels = torch.arange(model.num_known, device=model.device)
        labels = labels.repeat_interleave(self.latents_per_class)
        start = torch.randn(
            len(labels), model.backbone.num_features, generator=source, device=model.device
        )
        bank = invert(
            model.known_head,
            start,
            labels,
            num_iterations=self.inversion_iterations,
            temperature=model.architecture.temperature,
        )
        bank = bank.unflatten(0, (model.num_known, self.latents_per_class))
        return PseudoLatents(model.statistics, bank, gamma=self.gamma, rho=self.rho)

    def noise(self, state: nn.Module, batch_size: int) -> dict[str, Draw]:
        """Return what the memory draws."""
        return cast(State, state).memory.draws(max(1, round(self.replay_ratio * batch_size)))

    def loss(
        self, model: Model, views: Views, state: nn.Module, progress: Tensor, noise: Noise
    ) -> Terms:
        """Return the terms of one step."""
        state = cast(State, state)
        assert model.novel_head is not None
        assert model.identifier is not None
        temperature = model.architecture.temperature
        images = views.large.flatten(0, 1)
        features = model.backbone(images)
        before = state.teacher.features(images)
        latents, labels = state.memory.sample(noise)
        both = torch.cat([features, latents])
        known = model.known_head(both).float() / temperature
        # The novel heads see the latents only where a joint softmax needs their answer to them.
        seen = both if self.softmax == "joint" else features
        novel = model.novel_head(seen).float()
        clusterings = {"cluster": novel}
        if state.overclusters is not None:
            clusterings["overcluster"] = state.overclusters(seen).float()

        terms: Terms = {}
        share = 1 / len(clusterings)
        for name, logits in clusterings.items():
            cluster, replay = self._classify(
                logits, known, labels, num_views=len(views.large), temperature=temperature
            )
            terms[name] = share * cluster
            terms["replay"] = terms.get("replay", 0) + share * self.weight_replay * replay
        terms["distill"] = self.weight_distill * distillation(
            features, before, model.statistics.feature_norm
        )
        if self.weight_information > 0:
            target = (
                state.teacher.known_logits(before) / temperature
                if self.information_from == "frozen"
                else known[: len(features)].detach()
            )
            u = novel[:, : len(features)] / temperature
            terms["information"] = self.weight_information * state.regressor(u, target)
        if self.identifier == "during":
            terms["identify"] = balanced_binary_cross_entropy(
                model.identifier(latents), model.identifier(features.detach())
            )
        return terms

    def _classify(
        self, logits: Tensor, known: Tensor, labels: Tensor, *, num_views: int, temperature: float
    ) -> tuple[Tensor, Tensor]:
        """Return the self-labelling loss of each head and the loss on the replayed latents."""
        num_pool = len(known) - len(labels)
        scaled = logits / temperature
        if self.softmax == "joint":
            num_known = known.shape[1]
            joint = torch.cat([known.expand(len(logits), -1, -1), scaled], dim=2).log_softmax(2)
            log_probs = joint[:, :num_pool, num_known:]
            replay = F.nll_loss(joint[:, num_pool:].transpose(1, 2), labels.expand(len(joint), -1))
        else:
            log_probs = scaled[:, :num_pool].log_softmax(2)
            replay = F.cross_entropy(known[num_pool:], labels)
        assignments = sinkhorn(logits[:, :num_pool].unflatten(1, (num_views, -1)))
        return swapped_prediction(log_probs.unflatten(1, (num_views, -1)), assignments), replay

    def finish(self, model: Model, state: nn.Module, outcome: Outcome) -> None:
        """Choose the best head, fit the identifier (unless it is trained) and set the threshold.

        Every tenth picture of the pool is kept out of the fit and calibrates the threshold.
        """
        state = cast(State, state)
        assert model.identifier is not None
        model.best_head.fill_(best_head(outcome.history))
        features = model.features(outcome.images)
        position = torch.arange(len(features), device=features.device)
        held_out = features[position % 10 == 0]
        if self.identifier == "after":
            fit_identifier(
                model.identifier,
                state.memory,
                features[position % 10 != 0] if len(features) > 1 else features,
                self.identifier_optim,
                seed=outcome.seed,
                progress=outcome.progress,
            )
        calibrated = calibrate(model.identifier, held_out)
        model.identifier.calibrated_tau.fill_(calibrated)
        model.identifier.tau.fill_(calibrated if self.tau == "calibrated" else float(self.tau))

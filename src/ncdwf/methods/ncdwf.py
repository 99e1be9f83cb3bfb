"""Novel Class Discovery without Forgetting (Joseph et al., ECCV 2022), part by part."""

from dataclasses import dataclass, replace
from typing import Literal, cast

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import Optim, require, require_count
from ncdwf.data.augment import Views
from ncdwf.learning.clustering import Clustering, cluster, cluster_terms, encode
from ncdwf.learning.discovery import (
    Method,
    Outcome,
    Teacher,
    best_head,
    register,
)
from ncdwf.learning.information import VariationalRegressor
from ncdwf.learning.loop import Terms
from ncdwf.learning.losses import balanced_binary_cross_entropy, distillation, known_scale
from ncdwf.learning.settling import settle
from ncdwf.model import Model
from ncdwf.model.heads import MultiHead
from ncdwf.model.initialise import build
from ncdwf.model.replay import PseudoLatents, check_ratio, invert
from ncdwf.noise import Draw, Noise, generator


class State(nn.Module):
    """What the method needs beside the model while discovery runs."""

    def __init__(
        self,
        teacher: Teacher,
        memory: PseudoLatents,
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

    clustering: Clustering = Clustering()
    softmax: Literal["separate", "joint"] = "separate"
    """Over the novel logits alone, or over known and novel ones together."""
    norms: Literal["pool", "held"] = "held"
    """Normalise the backbone's layers by the batch, or by the statistics of the labelled data."""
    replay_ratio: float = 0.25
    """Latents a step, relative to the batch."""
    weight_replay: float = 1.0
    gamma: float = 1.0
    rho: float = 100.0
    """Latent mixup draws its coefficient from Beta(gamma, rho)."""
    latents_per_class: int = 500
    inversion_iterations: int = 100
    weight_distill: float = 3.0
    """Relative to the mean feature norm, where known and novel classes are as many."""
    weight_information: float = 0.01
    """Of the push on the novel heads; the regressor itself learns in full."""
    information_from: Literal["frozen", "current"] = "frozen"
    """Whose known logits the regulariser aims at; the current ones carry no gradient."""
    min_variance: float = 1.0
    identifier: Literal["during", "after"] = "after"
    """Trained with every step of discovery, or fitted after it on evaluation-mode features."""
    settling: Optim = Optim(epochs=60, batch_size=512, lr=0.3)
    """Of the fit after discovery, in which the known head is settled, too."""
    tau: float | Literal["calibrated"] = "calibrated"
    """The threshold on P(novel), or the one that `novel_lost` leads to."""
    novel_lost: float = 0.2
    """Share of unseen pool pictures that the calibrated threshold gives up."""
    least_tau: float = 0.0
    """What the calibrated threshold is at least, if half of those pictures stay novel."""

    def __post_init__(self) -> None:
        for name in ("latents_per_class", "inversion_iterations"):
            require_count(f"config.method.{name}", getattr(self, name), 1)
        for name in ("weight_replay", "weight_distill", "weight_information"):
            value = getattr(self, name)
            require(value >= 0, f"config.method.{name}={value} should be 0 or more")
        for name in ("gamma", "rho", "min_variance"):
            value = getattr(self, name)
            require(value > 0, f"config.method.{name}={value} should be above 0")
        check_ratio(self.replay_ratio)
        require(
            0 < self.novel_lost < 1,
            f"config.method.novel_lost={self.novel_lost} should be between 0 and 1",
        )
        require(
            0 <= self.least_tau < 1,
            f"config.method.least_tau={self.least_tau} should be from 0 to below 1",
        )
        require(
            self.tau == "calibrated" or 0 < float(self.tau) < 1,
            f"config.method.tau={self.tau} should be between 0 and 1, or 'calibrated'",
        )

    def prepare(self, model: Model, num_novel: int, *, seed: int) -> tuple[Model, nn.Module]:
        """Return the model with novel heads and identifier, and teacher, memory and regressor."""
        source = generator(seed, "ncdwf")
        overclusters = self.clustering.overclusters(model, num_novel, source)
        regressor = build(
            lambda: VariationalRegressor(
                num_novel,
                model.num_known,
                num_heads=self.clustering.num_heads,
                min_variance=self.min_variance,
            ),
            source,
        )
        state = State(Teacher(model), self._memory(model, seed), overclusters, regressor)
        shape = self.clustering.novel_head(num_novel)
        model = model.with_novel(shape, identifier=True, seed=seed)
        model.hold_norms = self.norms == "held"
        if self.softmax == "joint":  # one softmax has one temperature
            temperature = self.clustering.temperature
            model.architecture = replace(model.architecture, temperature=temperature)
        return model, state

    def _memory(self, model: Model, seed: int) -> PseudoLatents:
        """Return the latents of Algorithm 1: the inversion needs the frozen known head alone."""
        source = generator(seed, "inversion", device=model.device)
        shape = (model.num_known, self.latents_per_class, model.backbone.num_features)
        start = torch.randn(shape, generator=source, device=model.device)
        bank = invert(
            model.known_head.prototypes.detach(),
            start,
            num_iterations=self.inversion_iterations,
            temperature=model.architecture.temperature,
        )
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
        temperature = self.clustering.temperature
        # Both networks first: what follows is compiled as one part.
        pool = encode(model, views).flatten(0, 1)
        before = state.teacher.features(views.large.flatten(0, 1))
        large = pool[: len(before)]
        latents, labels = state.memory.sample(noise)
        rows = torch.cat([pool, latents])
        known = model.known_head(rows).float() / model.architecture.temperature
        joint = self.softmax == "joint"
        # The novel heads see the latents only where a joint softmax needs their answer to them.
        cosines = cluster(model, state.overclusters, rows if joint else pool)
        on_pool = {name: values[:, : len(pool)] for name, values in cosines.items()}
        terms = cluster_terms(
            on_pool,
            views,
            self.clustering,
            progress,
            others=known[: len(pool)] if joint else None,
        )
        replays = [
            _replay_loss(known[len(pool) :], values[:, len(pool) :] / temperature, labels)
            for values in cosines.values()
        ]
        terms["replay"] = self.weight_replay * torch.stack(replays).mean()
        weight_distill = self.weight_distill * known_scale(model.num_known, model.num_novel)
        terms["distill"] = weight_distill * distillation(
            large, before, model.statistics.feature_norm
        )
        if self.weight_information > 0:
            target = (
                state.teacher.known_logits(before).float() / model.architecture.temperature
                if self.information_from == "frozen"
                else known[: len(large)].detach()
            )
            u = on_pool["cluster"][:, : len(large)] / temperature
            # Scaling the term would also slow the regressor, and weight decay would outrun it.
            u = torch.lerp(u.detach(), u, self.weight_information)
            terms["information"] = state.regressor(u, target)
        if self.identifier == "during":
            terms["identify"] = balanced_binary_cross_entropy(
                model.identifier(latents), model.identifier(large.detach())
            )
        return terms

    def finish(self, model: Model, state: nn.Module, outcome: Outcome) -> None:
        """Choose the best head, settle identifier and known head, set the threshold."""
        state = cast(State, state)
        model.best_head.fill_(best_head(outcome.history))
        settle(
            model,
            state.memory,
            state.teacher,
            outcome,
            optim=self.settling if self.identifier == "after" else None,
            weight_replay=self.weight_replay,
            tau=self.tau,
            novel_lost=self.novel_lost,
            least_tau=self.least_tau,
        )


def _replay_loss(known: Tensor, novel: Tensor, labels: Tensor) -> Tensor:
    """Return the cross-entropy of the latents; `novel` has no rows under a separate softmax."""
    if novel.shape[1] == 0:
        return F.cross_entropy(known, labels)
    joint = torch.cat([known.expand(len(novel), -1, -1), novel], dim=2)
    return F.cross_entropy(joint.transpose(1, 2), labels.expand(len(novel), -1))

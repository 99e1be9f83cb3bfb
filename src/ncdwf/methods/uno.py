"""A Unified Objective for Novel Class Discovery (Fini et al., ICCV 2021) without labelled data."""

from dataclasses import dataclass, replace
from typing import cast

from torch import Tensor, nn

from ncdwf.data.augment import Views
from ncdwf.learning.clustering import Clustering, cluster, cluster_terms, encode
from ncdwf.learning.discovery import Method, Outcome, best_head, register
from ncdwf.learning.loop import Terms
from ncdwf.model import Model
from ncdwf.model.heads import MultiHead
from ncdwf.noise import Draw, Noise, generator


class State(nn.Module):
    """What the method needs beside the model while discovery runs."""

    def __init__(self, overclusters: MultiHead | None) -> None:
        super().__init__()
        self.overclusters = overclusters


@register("uno")
@dataclass(frozen=True, kw_only=True, slots=True)
class Uno(Method):
    """A Unified Objective for Novel Class Discovery (Fini et al., ICCV 2021), pool only.

    Version 2: one softmax over known and novel classes, self-labelling of the pool, nothing that
    protects the known classes. Its labelled half is gone, as in the paper's comparison. Pictures
    are routed by that softmax.
    """

    clustering: Clustering = Clustering()

    def prepare(self, model: Model, num_novel: int, *, seed: int) -> tuple[Model, nn.Module]:
        """Return the model with novel heads, and the over-clustering heads."""
        source = generator(seed, "uno")
        state = State(self.clustering.overclusters(model, num_novel, source))
        model = model.with_novel(self.clustering.novel_head(num_novel), identifier=False, seed=seed)
        # One softmax has one temperature; routing reads it from here.
        model.architecture = replace(model.architecture, temperature=self.clustering.temperature)
        return model, state

    def noise(self, state: nn.Module, batch_size: int) -> dict[str, Draw]:
        """Return nothing: only the views are random."""
        return {}

    def loss(
        self, model: Model, views: Views, state: nn.Module, progress: Tensor, noise: Noise
    ) -> Terms:
        """Return the terms of one step."""
        features = encode(model, views).flatten(0, 1)
        return cluster_terms(
            cluster(model, cast(State, state).overclusters, features),
            views,
            self.clustering,
            progress,
            others=model.known_head(features).float() / model.architecture.temperature,
        )

    def finish(self, model: Model, state: nn.Module, outcome: Outcome) -> None:
        """Choose the best head."""
        model.best_head.fill_(best_head(outcome.history))

"""What methods that cluster the pool share: the sizes of their heads, features, and the loss."""

from dataclasses import dataclass

import torch
from jaxtyping import Float
from torch import Tensor

from ncdwf.config import require, require_count
from ncdwf.data.augment import Views
from ncdwf.learning.loop import Terms
from ncdwf.learning.losses import partial_sinkhorn, self_labelling, sinkhorn
from ncdwf.model import Model, NovelHead
from ncdwf.model.backbone import apply
from ncdwf.model.heads import MultiHead
from ncdwf.model.initialise import build


@dataclass(frozen=True, kw_only=True, slots=True)
class Clustering:
    """Several heads that cluster the pool, and as many that cluster it more finely."""

    num_heads: int = 4
    num_hidden: int = 2048
    num_projected: int = 256
    overclustering: int = 3
    """How many times more clusters the over-clustering heads have; 0: there are none."""
    temperature: float = 0.1
    """Of the novel classes' softmax."""
    balance: float = 1.0
    """How much novel classes are held to one size: 1 wholly; 0.5 where sizes differ much.

    Below 1 the clearest pictures are assigned first, and all of them at the end of discovery.
    """

    def __post_init__(self) -> None:
        for name in ("num_heads", "num_hidden", "num_projected"):
            require_count(f"clustering.{name}", getattr(self, name), 1)
        require(
            self.temperature > 0, f"clustering.temperature={self.temperature} should be above 0"
        )
        require(
            0 <= self.balance <= 1,
            f"clustering.balance={self.balance} should be from 0 to 1",
        )
        require_count("clustering.overclustering", self.overclustering, 0)

    def assign(
        self, cosines: Float[Tensor, "*any image cluster"], progress: Float[Tensor, ""]
    ) -> Float[Tensor, "*any image cluster"]:
        """Return soft assignments of the images of a batch to clusters."""
        if self.balance == 1:
            return sinkhorn(cosines)
        # The rise of [5] in losses.py. Unclear pictures would divide a large class at the start.
        mass = 0.1 + 0.9 * torch.exp(-5 * (1 - progress) ** 2)
        return partial_sinkhorn(cosines, balance=self.balance, mass=mass)

    def novel_head(self, num_novel: int) -> NovelHead:
        """Return the shape of the heads that become part of the model."""
        return NovelHead(
            num_novel=num_novel,
            num_heads=self.num_heads,
            num_hidden=self.num_hidden,
            num_projected=self.num_projected,
            temperature=self.temperature,
        )

    def overclusters(
        self, model: Model, num_novel: int, source: torch.Generator
    ) -> MultiHead | None:
        """Return the over-clustering heads, if there are any."""
        if self.overclustering == 0:
            return None
        return build(
            lambda: MultiHead(
                model.backbone.num_features,
                num_novel * self.overclustering,
                num_heads=self.num_heads,
                num_hidden=self.num_hidden,
                num_projected=self.num_projected,
            ),
            source,
        )


def encode(model: Model, views: Views) -> Float[Tensor, "view image feature"]:
    """Return the features of all views, the large ones first."""
    groups = [
        apply(model.backbone, group.flatten(0, 1)).unflatten(0, group.shape[:2])
        for group in views.groups
    ]
    return torch.cat(groups)


def cluster(
    model: Model, overclusters: MultiHead | None, features: Float[Tensor, "row feature"]
) -> dict[str, Float[Tensor, "head row clusters"]]:
    """Return the cosines of the novel heads and of the over-clustering ones, by their term."""
    heads = {"cluster": model.novel_head, "overcluster": overclusters}
    return {name: head(features).float() for name, head in heads.items() if head is not None}


def cluster_terms(
    cosines: dict[str, Float[Tensor, "head row clusters"]],
    views: Views,
    clustering: Clustering,
    progress: Float[Tensor, ""],
    *,
    others: Float[Tensor, "row other"] | None = None,
) -> Terms:
    """Return the self-labelling loss of each head; both kinds of heads weigh the same.

    Args:
        cosines: of all views, in the order of `encode`.
        views: what they belong to.
        clustering: temperature and balance.
        progress: of discovery, from 0 to 1.
        others: scaled logits of further classes that share the softmax and that no picture
            belongs to.
    """
    shape, num_large = (sum(map(len, views.groups)), views.large.shape[1]), len(views.large)
    terms = {}
    for name, values in cosines.items():
        of_views = values.unflatten(1, shape)
        loss = self_labelling(
            of_views,
            clustering.assign(of_views[:, :num_large], progress),
            temperature=clustering.temperature,
            others=None if others is None else others.unflatten(0, shape),
        )
        terms[name] = loss / len(cosines)
    return terms

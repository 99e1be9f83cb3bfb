"""Heads: features to logits. Every head normalises what it needs normalised, inside itself."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class CosineHead(nn.Module):
    """One prototype a class; the logits are cosines in [-1, 1], without a temperature."""

    def __init__(self, num_features: int, num_classes: int) -> None:
        super().__init__()
        self.prototypes = nn.Parameter(torch.empty(num_classes, num_features))

    def initialise(self, source: torch.Generator) -> None:
        """Draw directions; their lengths do not matter."""
        self.prototypes.normal_(std=1 / math.sqrt(self.prototypes.shape[1]), generator=source)

    def forward(self, features: Float[Tensor, "image feature"]) -> Float[Tensor, "image cls"]:
        """Return the cosine of each feature vector to each prototype."""
        return F.normalize(features, dim=-1) @ F.normalize(self.prototypes, dim=-1).T


class MultiHead(nn.Module):
    """Several clustering heads side by side: a projection (one hidden layer) and prototypes each.

    The heads share their input, so each layer is one batched matrix product over all of them.
    """

    def __init__(
        self,
        num_features: int,
        num_clusters: int,
        *,
        num_heads: int,
        num_hidden: int,
        num_projected: int,
    ) -> None:
        super().__init__()
        self.num_heads = num_heads
        self.num_clusters = num_clusters
        self.hidden = nn.Linear(num_features, num_heads * num_hidden)
        self.norm = nn.BatchNorm1d(num_heads * num_hidden)
        self.projection = nn.Parameter(torch.empty(num_heads, num_hidden, num_projected))
        self.prototypes = nn.Parameter(torch.empty(num_heads, num_projected, num_clusters))

    def initialise(self, source: torch.Generator) -> None:
        """Draw the weights of both batched layers, scaled by their number of inputs."""
        for weight in (self.projection, self.prototypes):
            bound = 1 / math.sqrt(weight.shape[1])
            weight.uniform_(-bound, bound, generator=source)

    def forward(
        self, features: Float[Tensor, "image feature"]
    ) -> Float[Tensor, "head image cluster"]:
        """Return the cosines of each head."""
        hidden = F.relu(self.norm(self.hidden(features)))
        hidden = hidden.unflatten(1, (self.num_heads, -1)).transpose(0, 1)
        projected = F.normalize(hidden @ self.projection, dim=-1)
        return projected @ F.normalize(self.prototypes, dim=1)

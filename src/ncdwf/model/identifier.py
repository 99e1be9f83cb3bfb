"""The known-class identifier: features to P(novel), and its threshold."""

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F


class KnownClassIdentifier(nn.Module):
    """A 128-128-1 network on L2-normalised features; novel is the positive class.

    A picture is novel iff P(novel) ≥ `tau`. `calibrated_tau` is the threshold found without
    labels after discovery; a method decides which of the two becomes `tau`.
    """

    tau: Float[Tensor, ""]
    calibrated_tau: Float[Tensor, ""]

    def __init__(self, num_features: int, num_hidden: int = 128) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_features, num_hidden),
            nn.ReLU(),
            nn.Linear(num_hidden, num_hidden),
            nn.ReLU(),
            nn.Linear(num_hidden, 1),
        )
        # Double precision: a calibrated threshold may lie very close to 1.
        self.register_buffer("tau", torch.zeros((), dtype=torch.float64))
        self.register_buffer("calibrated_tau", torch.zeros((), dtype=torch.float64))

    def initialise(self, source: torch.Generator) -> None:
        """Start at even odds; the layers fill themselves."""
        self.tau.fill_(0.5)
        self.calibrated_tau.fill_(0.5)

    def forward(self, features: Float[Tensor, "image feature"]) -> Float[Tensor, " image"]:
        """Return the logit of P(novel)."""
        return self.layers(F.normalize(features, dim=-1)).squeeze(1)  # type: ignore[no-any-return]

    def novelty(self, features: Float[Tensor, "image feature"]) -> Float[Tensor, " image"]:
        """Return P(novel) in double precision."""
        return torch.sigmoid(self(features).double())

"""How features have moved while a network learnt, told from pictures that were seen moving."""

import copy

import torch
from jaxtyping import Float
from torch import Tensor, nn

from ncdwf.model.statistics import ClassStatistics

LEAST = 1e-9
ROWS_AT_ONCE = 16_384


class Movement(nn.Module):
    """Foretells where features of pictures that nobody has any more lie now.

    How the pool's features have moved is seen; the linear map that foretells it best from where
    they were (ridge regression: what is not seen to move stays) foretells how those of known
    classes have moved as well (docs/reproduction.md). A cosine head reads directions, hence a map
    that leaves the origin alone.
    """

    turn: Float[Tensor, "feature feature"]

    def __init__(
        self,
        before: Float[Tensor, "row feature"],
        after: Float[Tensor, "row feature"],
        *,
        ridge: float = 0.01,
    ) -> None:
        super().__init__()
        size, device = before.shape[1], before.device
        scatter, together = torch.zeros(2, size, size, dtype=torch.float64, device=device)
        # In parts: a large pool is in memory in single precision alone.
        for earlier, later in zip(
            before.split(ROWS_AT_ONCE), after.split(ROWS_AT_ONCE), strict=True
        ):
            places, steps = earlier.double(), later.double() - earlier.double()
            scatter += places.T @ places
            together += places.T @ steps
        # The least keeps it solvable where all features are 0.
        scatter.diagonal().add_(ridge * scatter.diagonal().mean() + LEAST)
        self.register_buffer("turn", torch.linalg.solve(scatter, together).float())

    def forward(self, features: Float[Tensor, "row feature"]) -> Float[Tensor, "row feature"]:
        """Return where such features are now."""
        return features + features @ self.turn

    def carry(self, statistics: ClassStatistics) -> ClassStatistics:
        """Return the statistics that the same pictures would have now; angles are taken to stay."""
        carried = copy.deepcopy(statistics)
        carried.means = self(statistics.means)
        lengths = [means.norm(dim=1).mean() for means in (statistics.means, carried.means)]
        carried.feature_norm = statistics.feature_norm * lengths[1] / lengths[0].clamp_min(LEAST)
        whole = torch.eye(len(self.turn), device=self.turn.device) + self.turn
        carried.spread = (
            statistics.spread @ whole.square()
            if statistics.spread.ndim == 1
            else whole.T @ statistics.spread @ whole
        )
        return carried

"""Stand-ins for known data: features that replay the known classes when their pictures are gone."""

from abc import ABC, abstractmethod

import torch
from jaxtyping import Float, Int64
from scipy.special import betaincinv
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import MOST, require
from ncdwf.model.statistics import ClassStatistics
from ncdwf.noise import Draw, Noise, draw

Latents = tuple[Float[Tensor, "latent feature"], Int64[Tensor, " latent"]]


class KnownMemory(nn.Module, ABC):
    """Gives features that stand for the known classes, with their labels; holds no picture."""

    @abstractmethod
    def draws(self, num_latents: int) -> dict[str, Draw]:
        """Return what `sample` reads from its noise, by name."""

    @abstractmethod
    def sample(self, noise: Noise) -> Latents:
        """Return as many latents as the noise has entries; classes are drawn evenly."""

    def take(self, num_latents: int, source: torch.Generator) -> Latents:
        """Return latents outside of a training step, where nothing is drawn in advance."""
        noise = draw(self.draws(num_latents), 1, source)
        return self.sample({name: drawn[0] for name, drawn in noise.items()})


class PseudoLatents(KnownMemory):
    """The paper's Algorithm 1 [1]: inverted latents of the frozen known head, mixed with means.

    The inversion depends on the frozen head alone, so a bank of `per_class` inverted latents is
    made once; each sample mixes one of them afresh: `α z_L + (1 - α) mean`, α ~ Beta(γ, ρ).
    The paper does not say on which scale the two meet. Here z_L takes the mean feature norm
    first; otherwise the same α means something else in every run (docs/decisions/0004).

    References:
        [1]: Joseph et al., Novel Class Discovery without Forgetting, ECCV 2022, Sec. 3.2.
    """

    bank: Float[Tensor, "cls entry feature"]
    means: Float[Tensor, "cls feature"]

    def __init__(
        self, statistics: ClassStatistics, bank: Tensor, *, gamma: float, rho: float
    ) -> None:
        super().__init__()
        self.register_buffer("means", statistics.means)
        self.register_buffer("bank", F.normalize(bank, dim=-1) * statistics.feature_norm)
        self.alpha = BetaQuantile(gamma, rho)

    def draws(self, num_latents: int) -> dict[str, Draw]:
        """Return one uniform number a latent for its class, its bank entry and its α."""
        return {"replay": Draw(kind="uniform", shape=(num_latents, 3))}

    def sample(self, noise: Noise) -> Latents:
        """Return mixed latents, one for each row of `noise["replay"]`."""
        uniform = noise["replay"]
        num_known, per_class, _ = self.bank.shape
        labels = pick(uniform[:, 0], num_known)
        inverted = self.bank[labels, pick(uniform[:, 1], per_class)]
        alpha = self.alpha(uniform[:, 2]).unsqueeze(1)
        return alpha * inverted + (1 - alpha) * self.means[labels], labels


class GaussianPrototypes(KnownMemory):
    """Normal samples around the class means, as wide as the stored spread."""

    means: Float[Tensor, "cls feature"]
    factor: Tensor

    def __init__(self, statistics: ClassStatistics) -> None:
        super().__init__()
        self.register_buffer("means", statistics.means)
        spread = statistics.spread
        if spread.ndim == 1:
            factor = spread.sqrt()
        else:
            # A covariance from few pictures has no Cholesky factor: lift its diagonal a little.
            diagonal = spread.diagonal(dim1=-2, dim2=-1).mean(-1)[..., None, None]
            lifted = spread.double() + (1e-4 * diagonal + 1e-12) * torch.eye(
                spread.shape[-1], device=spread.device, dtype=torch.float64
            )
            factor = torch.linalg.cholesky(lifted).float()
        self.register_buffer("factor", factor)

    def draws(self, num_latents: int) -> dict[str, Draw]:
        """Return one uniform number (the class) and one normal vector a latent."""
        return {
            "replay": Draw(kind="uniform", shape=(num_latents, 1)),
            "replay_normal": Draw(kind="normal", shape=(num_latents, self.means.shape[1])),
        }

    def sample(self, noise: Noise) -> Latents:
        """Return Gaussian samples, one for each row of `noise["replay"]`."""
        labels = pick(noise["replay"][:, 0], len(self.means))
        normal = noise["replay_normal"]
        if self.factor.ndim == 1:
            offset = normal * self.factor
        elif self.factor.ndim == 2:
            offset = normal @ self.factor.T
        else:
            offset = torch.einsum("nfg,ng->nf", self.factor[labels], normal)
        return self.means[labels] + offset, labels


class BetaQuantile(nn.Module):
    """Beta(γ, ρ) samples from uniform numbers, on the device.

    Beta(1, ρ) and Beta(γ, 1) have closed forms; other shapes are read off a table.
    """

    table: Tensor

    def __init__(self, gamma: float, rho: float, *, num_entries: int = 4097) -> None:
        super().__init__()
        self.gamma, self.rho = gamma, rho
        # Whatever is drawn lies between two entries: at 0 and 1 tails are long.
        grid = (torch.arange(num_entries, dtype=torch.float64) + 0.5) / num_entries
        self.register_buffer(
            "table",
            torch.from_numpy(betaincinv(gamma, rho, grid.numpy())).float(),
            persistent=False,
        )

    def forward(self, uniform: Float[Tensor, "*any"]) -> Float[Tensor, "*any"]:
        """Return the quantiles of `uniform`."""
        if self.gamma == 1:
            return 1 - (1 - uniform) ** (1 / self.rho)
        if self.rho == 1:
            return uniform ** (1 / self.gamma)
        position = (uniform * len(self.table) - 0.5).clamp(0, len(self.table) - 1)
        below = position.long().clamp(max=len(self.table) - 2)
        return torch.lerp(self.table[below], self.table[below + 1], position - below)


def invert(
    prototypes: Float[Tensor, "cls feature"],
    start: Float[Tensor, "cls latent feature"],
    *,
    num_iterations: int,
    temperature: float,
) -> Float[Tensor, "cls latent feature"]:
    """Return latents that activate their class: gradient ascent on a cosine logit [1, Algo. 1].

    The step is the gradient of `logit / temperature` itself, as in the paper. That of a cosine
    never leaves the plane of latent and prototype, so two numbers a latent are followed: how far
    it reaches along the prototype, and how far aside.
    """
    towards = F.normalize(prototypes, dim=-1).unsqueeze(1)
    reach = (start * towards).sum(-1, keepdim=True)
    rest = start - reach * towards
    away = F.normalize(rest, dim=-1)
    along, aside = reach.double(), rest.norm(dim=-1, keepdim=True).double()
    for _ in range(num_iterations):
        step = aside / (along.square() + aside.square()).pow(1.5) / temperature
        along, aside = along + step * aside, aside - step * along
    latents: Tensor = along.float() * towards + aside.float() * away
    return latents


def check_ratio(value: float) -> None:
    """Refuse a number of latents, relative to the batch, that makes no sense."""
    name = "config.method.replay_ratio"
    require(0 < value <= MOST, f"{name}={value} should be above 0, and at most {MOST}")


def pick(uniform: Tensor, count: int) -> Tensor:
    """Return integers 0…count-1 from uniform numbers."""
    return (uniform * count).long().clamp(max=count - 1)

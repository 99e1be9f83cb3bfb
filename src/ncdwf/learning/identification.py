"""Fitting the known-class identifier after discovery, and finding its threshold without labels."""

import torch
from jaxtyping import Float
from torch import Tensor

from ncdwf.config import Optim
from ncdwf.learning.loop import Batch, Progress, TensorSource, Terms, train
from ncdwf.learning.losses import balanced_binary_cross_entropy
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.replay import KnownMemory
from ncdwf.noise import Noise, draw, generator

PHASE = "identifier"


def fit_identifier(
    identifier: KnownClassIdentifier,
    memory: KnownMemory,
    features: Float[Tensor, "image feature"],
    optim: Optim,
    *,
    seed: int,
    progress: Progress | None = None,
) -> None:
    """Train `identifier` to tell the memory's latents from the features of the pool.

    Every step draws as many fresh latents as it has pool features.
    """
    source = TensorSource(features, batch_size=optim.batch_size, seed=seed, phase=PHASE)

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        latents, _ = memory.sample(noise)
        return {
            "identify": balanced_binary_cross_entropy(identifier(latents), identifier(batch[0]))
        }

    train(
        identifier,
        loss,
        source,
        optim,
        noise=memory.draws(source.batch_size),
        seed=seed,
        phase=PHASE,
        progress=progress,
    )


@torch.no_grad()
def calibrate(
    identifier: KnownClassIdentifier,
    memory: KnownMemory,
    features: Float[Tensor, "image feature"],
    *,
    seed: int,
    num_latents: int = 4096,
) -> float:
    """Return the threshold at which known latents and pool features are mistaken equally often.

    Neither labels nor test pictures enter: the latents are drawn afresh and `features` are of pool
    pictures that the identifier was not fitted on.
    """
    source = generator(seed, "calibrate", device=features.device)
    drawn = draw(memory.draws(num_latents), 1, source)
    known = identifier(memory.sample({name: d[0] for name, d in drawn.items()})[0]).double()
    novel = identifier(features).double()
    return float(torch.sigmoid(_equal_error(known, novel)))


def _equal_error(known: Float[Tensor, " known"], novel: Float[Tensor, " novel"]) -> Tensor:
    """Return the score from which as large a share of `known` lies above as of `novel` below."""
    scores = torch.cat([known, novel]).unique()
    middles = torch.cat([scores[:1] - 1, (scores[1:] + scores[:-1]) / 2])
    rejected = (known[:, None] >= middles).double().mean(0)
    accepted = (novel[:, None] < middles).double().mean(0)
    gap = (rejected - accepted).abs()
    return middles[gap == gap.min()].median()

"""Fitting the known-class identifier after discovery, and finding its threshold without labels."""

import torch
from jaxtyping import Float
from torch import Tensor

from ncdwf.config import Optim
from ncdwf.learning.loop import Batch, Progress, TensorSource, Terms, train
from ncdwf.learning.losses import balanced_binary_cross_entropy
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.replay import KnownMemory
from ncdwf.noise import Noise

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
    features: Float[Tensor, "image feature"],
    *,
    lost: float = 0.05,
) -> float:
    """Return the threshold that loses the share `lost` of `features` to the known side.

    Neither labels nor test pictures enter: `features` are of pool pictures, novel by definition,
    that the identifier was not fitted on. The known side has no such real pictures; a threshold
    that also balances replayed latents is too low, because latents are easier than pictures.
    """
    return float(torch.quantile(identifier.novelty(features), lost))

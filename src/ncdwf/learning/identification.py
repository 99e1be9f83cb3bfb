"""Fitting the known-class identifier after discovery, and finding its threshold without labels."""

from typing import Literal

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import Engine, Optim
from ncdwf.learning.discovery import Outcome
from ncdwf.learning.loop import Batch, History, Progress, TensorSource, Terms, train
from ncdwf.model import Model
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.replay import KnownMemory
from ncdwf.noise import Draw, Noise, generator

PHASE = "identifier"
NEWTON_STEPS = 30


def settle_identifier(
    model: Model,
    memory: KnownMemory,
    outcome: Outcome,
    *,
    optim: Optim | None,
    tau: float | Literal["calibrated"],
    novel_lost: float,
) -> None:
    """Fit the identifier of `model` on evaluation-mode features and set its thresholds.

    Every tenth picture of the pool is kept out of the fit, for the scale and the threshold.

    Args:
        model: after the last step of discovery.
        memory: stands in for the known classes.
        outcome: the pool, and where the epochs of the fit are added.
        optim: how to fit; None keeps the identifier that was trained during discovery.
        tau: the threshold in use.
        novel_lost: share of the unseen pool that the calibrated threshold gives up.
    """
    identifier = model.identifier
    assert identifier is not None
    features = model.features(outcome.images)
    position = torch.arange(len(features), device=features.device)
    unseen = features[position % 10 == 0]
    if optim is not None:
        epochs = fit_identifier(
            identifier,
            memory,
            features[position % 10 != 0] if len(features) > 1 else features,
            optim,
            seed=outcome.seed,
            engine=outcome.engine,
            progress=outcome.progress,
        )
        outcome.history.extend(epochs)
        source = generator(outcome.seed, "sharpen", device=features.device)
        latents, _ = memory.take(len(unseen), source)
        sharpen(identifier, latents, unseen)
    calibrated = calibrate(identifier, unseen, lost=novel_lost)
    identifier.calibrated_tau.fill_(calibrated)
    identifier.tau.fill_(calibrated if tau == "calibrated" else tau)


def fit_identifier(
    identifier: KnownClassIdentifier,
    memory: KnownMemory,
    features: Float[Tensor, "image feature"],
    optim: Optim,
    *,
    seed: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
) -> History:
    """Train `identifier` to tell the memory's latents from the features of the pool.

    Every step draws as many fresh latents as it has pool features, and learns from mixtures [1] of
    them. Latents lie far closer to their class means than pictures that nobody trained on; without
    the mixtures the identifier learns a sharp border close to the latents (docs/reproduction.md).

    References:
        [1]: Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018.
    """
    source = TensorSource(features, batch_size=optim.batch_size, seed=seed, phase=PHASE)
    count = 2 * source.batch_size

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        latents, _ = memory.sample(noise)
        inputs = F.normalize(torch.cat([latents, batch[0]]), dim=1)
        targets = torch.cat([torch.zeros_like(latents[:, 0]), torch.ones_like(batch[0][:, 0])])
        partner, share = noise["partner"].argsort(), noise["share"]
        mixed = torch.lerp(inputs, inputs[partner], share[:, None])
        return {
            "identify": F.binary_cross_entropy_with_logits(
                identifier(mixed).float(), torch.lerp(targets, targets[partner], share)
            )
        }

    return train(
        identifier,
        loss,
        source,
        optim,
        noise={
            **memory.draws(source.batch_size),
            "partner": Draw(kind="uniform", shape=(count,)),
            "share": Draw(kind="uniform", shape=(count,)),
        },
        seed=seed,
        phase=PHASE,
        engine=engine,
        progress=progress,
    )


@torch.no_grad()
def sharpen(
    identifier: KnownClassIdentifier,
    latents: Float[Tensor, "latent feature"],
    features: Float[Tensor, "image feature"],
) -> None:
    """Bring P(novel) to the scale of unmixed features: Platt scaling [1] of the last layer.

    An identifier that learnt from mixtures is hardly ever sure; ranks stay as they are.

    References:
        [1]: Platt, Probabilistic Outputs for Support Vector Machines, 1999.
    """
    logits = torch.cat([identifier(latents), identifier(features)]).double()
    # Platt's targets: as if one more of each kind had been seen, on the wrong side.
    known = torch.full_like(logits[: len(latents)], 1 / (len(latents) + 2))
    novel = torch.full_like(logits[len(latents) :], 1 - 1 / (len(features) + 2))
    targets = torch.cat([known, novel])
    inputs = torch.stack([logits, torch.ones_like(logits)], dim=1)
    line = torch.zeros(2, dtype=torch.float64, device=logits.device)
    sizes = 0.5 ** torch.arange(30, dtype=torch.float64, device=logits.device)
    eye = torch.eye(2, dtype=torch.float64, device=logits.device)
    for _ in range(NEWTON_STEPS):  # with a line search: bare Newton steps overshoot
        answers = torch.sigmoid(inputs @ line)
        curvature = (inputs * (answers * (1 - answers))[:, None]).T @ inputs
        damped = curvature + 1e-9 * (1 + curvature.trace()) * eye
        step = torch.linalg.solve(damped, inputs.T @ (answers - targets))
        tried = line - sizes[:, None] * step
        scaled = tried @ inputs.T
        line = tried[(F.softplus(scaled) - targets * scaled).sum(1).argmin()]
    last = identifier.layers[-1]
    assert isinstance(last, nn.Linear)
    if bool(line[0] > 0):  # else it ranks no better than chance, and no scale can mend that
        last.weight.mul_(line[0])
        last.bias.mul_(line[0]).add_(line[1])


@torch.no_grad()
def calibrate(
    identifier: KnownClassIdentifier,
    features: Float[Tensor, "image feature"],
    *,
    lost: float,
) -> float:
    """Return the threshold that loses the share `lost` of `features` to the known side.

    Neither labels nor test pictures enter: `features` are of pool pictures, novel by definition,
    that the identifier was not fitted on. The known side has no such real pictures; a threshold
    that also balances replayed latents is too low, because latents are easier than pictures.
    """
    return float(torch.quantile(identifier.novelty(features), lost))

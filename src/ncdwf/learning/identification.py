"""Fitting the known-class identifier after discovery, and finding its threshold without labels."""

from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor
from torch.nn import functional as F

from ncdwf.config import Engine, Optim
from ncdwf.learning.discovery import Outcome, Teacher
from ncdwf.learning.loop import Batch, History, Progress, TensorSource, Terms, train
from ncdwf.learning.losses import balanced_binary_cross_entropy
from ncdwf.model import Model
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.replay import Carried, KnownMemory, pick
from ncdwf.noise import Draw, Noise

PHASE = "identifier"


def settle_identifier(
    model: Model,
    memory: KnownMemory,
    teacher: Teacher,
    outcome: Outcome,
    *,
    optim: Optim | None,
    tau: float | Literal["calibrated"],
    novel_lost: float,
) -> None:
    """Fit the identifier of `model` on evaluation-mode features and set its thresholds.

    Every tenth picture of the pool is kept out of the fit, for the threshold.

    Args:
        model: after the last step of discovery.
        memory: stands in for the known classes.
        teacher: whose features the memory's latents are like.
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
        seen = position % 10 != 0 if len(features) > 1 else position == 0
        before = teacher.model.features(outcome.images)
        epochs = fit_identifier(
            identifier,
            Carried(memory, before[seen], features[seen]),
            features[seen],
            model.outputs(features[seen]).novel_logits[int(model.best_head)].argmax(1),
            optim,
            seed=outcome.seed,
            engine=outcome.engine,
            progress=outcome.progress,
        )
        outcome.history.extend(epochs)
    calibrated = calibrate(identifier, unseen, lost=novel_lost)
    identifier.calibrated_tau.fill_(calibrated)
    identifier.tau.fill_(calibrated if tau == "calibrated" else tau)


def fit_identifier(
    identifier: KnownClassIdentifier,
    memory: KnownMemory,
    features: Float[Tensor, "image feature"],
    labels: Int64[Tensor, " image"],
    optim: Optim,
    *,
    seed: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
) -> History:
    """Train `identifier` to tell the memory's latents from the centres of the pool's clusters.

    Latents have next to no spread, unlike pictures: told from the features themselves, they would
    be known by that. So both kinds are given the same spread, that of the pool in its clusters:
    to every latent and to every centre the distance of some picture from its own centre is added.
    What is left to tell them apart is where they lie (docs/reproduction.md).

    Args:
        identifier: what to train.
        memory: gives latents that lie where features of known pictures lie.
        features: of the pool.
        labels: the cluster of each of them.
        optim: how to train.
        seed: of the order and of all draws.
        engine: how steps run.
        progress: hears of every step.
    """
    members = F.one_hot(labels).to(features)
    centres = (members.T @ features / members.sum(0).clamp_min(1)[:, None])[labels]
    spread = features - centres
    source = TensorSource(centres, batch_size=optim.batch_size, seed=seed, phase=PHASE)
    count = 2 * source.batch_size

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        latents, _ = memory.sample(noise)
        rows = torch.cat([latents, batch[0]]) + spread[pick(noise["spread"], len(spread))]
        return {
            "identify": balanced_binary_cross_entropy(
                identifier(rows[: len(latents)]), identifier(rows[len(latents) :])
            )
        }

    return train(
        identifier,
        loss,
        source,
        optim,
        noise={
            **memory.draws(source.batch_size),
            "spread": Draw(kind="uniform", shape=(count,)),
        },
        seed=seed,
        phase=PHASE,
        engine=engine,
        progress=progress,
    )


@torch.no_grad()
def calibrate(
    identifier: KnownClassIdentifier,
    features: Float[Tensor, "image feature"],
    *,
    lost: float,
) -> float:
    """Return the threshold that loses the share `lost` of `features` to the known side.

    Neither labels nor test pictures enter: `features` are of pool pictures, novel by definition,
    that the identifier was not fitted on. The known side has no such real pictures.
    """
    return float(torch.quantile(identifier.novelty(features), lost))

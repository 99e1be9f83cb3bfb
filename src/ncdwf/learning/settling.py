"""What is fitted after discovery, when features no longer move: the heads that answer for the
known classes, and the threshold between known and novel. No label enters."""

import math
from typing import Literal

import torch
from jaxtyping import Float, Int64
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import UNSEEN, Engine, Optim
from ncdwf.learning.batches import Batch, TensorSource
from ncdwf.learning.discovery import Outcome, Teacher
from ncdwf.learning.loop import History, Terms, Training
from ncdwf.learning.losses import balanced_binary_cross_entropy
from ncdwf.model import Model
from ncdwf.model.heads import CosineHead
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.movement import Movement
from ncdwf.model.replay import KnownMemory, pick
from ncdwf.noise import Draw, Noise, generator
from ncdwf.progress import Progress

PHASE = "settling"
FEWEST_LOST = 2
"""From so many unseen pictures on that a threshold should lose, they alone decide where it is."""


def settle(
    model: Model,
    memory: KnownMemory,
    teacher: Teacher,
    outcome: Outcome,
    *,
    optim: Optim | None,
    weight_replay: float,
    tau: float | Literal["calibrated"],
    novel_lost: float,
    least_tau: float,
) -> None:
    """Fit identifier and known head of `model` to its features as they are now; set thresholds.

    A tenth of the pool, drawn by the seed, is kept out of the fit, for the threshold.

    Args:
        model: after the last step of discovery.
        memory: stands in for the known classes as they were before discovery.
        teacher: the model as it was before discovery.
        outcome: the pool, and where the epochs of the fit are added.
        optim: how to fit; None keeps identifier and known head as discovery left them.
        weight_replay: 0 leaves the known head alone.
        tau: the threshold in use.
        novel_lost: share of the unseen pool that the calibrated threshold gives up.
        least_tau: what the calibrated threshold is at least, unless that loses half of the pool.
    """
    identifier = model.identifier
    assert identifier is not None
    features = outcome.after
    unseen, seen = (rows.to(features.device) for rows in divide(len(features), outcome.seed))
    if optim is not None:
        epochs = fit_heads(
            identifier,
            model.known_head,
            teacher.model.known_head,
            memory,
            outcome.before[seen],
            features[seen],
            model.outputs(features[seen]).novel_logits[int(model.best_head)].argmax(1),
            optim,
            temperature=model.architecture.temperature,
            weight_replay=weight_replay,
            seed=outcome.seed,
            engine=outcome.engine,
            progress=outcome.progress,
        )
        outcome.history.extend(epochs)
    calibrated = calibrate(identifier, features[unseen], features, lost=novel_lost, least=least_tau)
    identifier.calibrated_tau.fill_(calibrated)
    identifier.tau.fill_(calibrated if tau == "calibrated" else tau)


def divide(num_images: int, seed: int) -> tuple[Int64[Tensor, " unseen"], Int64[Tensor, " seen"]]:
    """Return the rows of a pool that are kept for the threshold, and those to fit on.

    They are drawn: every tenth in order could be of one class, as cameras and files have rhythms.
    """
    order = torch.randperm(num_images, generator=generator(seed, PHASE, "unseen"))
    num_unseen = math.ceil(num_images / UNSEEN)
    return order[:num_unseen], order[num_unseen:] if num_images > 1 else order


def fit_heads(
    identifier: KnownClassIdentifier,
    known_head: CosineHead,
    teacher_head: CosineHead,
    memory: KnownMemory,
    before: Float[Tensor, "image feature"],
    after: Float[Tensor, "image feature"],
    labels: Int64[Tensor, " image"],
    optim: Optim,
    *,
    temperature: float,
    weight_replay: float,
    seed: int,
    engine: Engine = "auto",
    progress: Progress | None = None,
) -> History:
    """Train `identifier` to tell known latents from the pool, and `known_head` to name them.

    The memory's latents lie where features of known pictures were before discovery; they are
    carried along to where such features are now. They have next to no spread, unlike pictures: told
    from the pool's features themselves, they would be known by that. So both kinds are given the
    same spread, that of the pool in its clusters: to every latent and to every centre the distance
    of some picture from its own centre is added. What is left to tell them apart is where they lie.
    The known head learns to answer such a latent as the head before discovery answered it where it
    was; if nothing has moved, there is nothing to learn (docs/reproduction.md).

    Args:
        identifier: what to train.
        known_head: what to train beside it.
        teacher_head: the known head before discovery.
        memory: gives the latents.
        before: features of the pool before discovery.
        after: the same as they are now.
        labels: the cluster of each picture of the pool.
        optim: how to train.
        temperature: of the known classes' softmax.
        weight_replay: of the known head's loss; at 0 the head is left alone.
        seed: of the order and of all draws.
        engine: how steps run.
        progress: hears of every step.
    """
    members = F.one_hot(labels).to(after)
    members = members / members.sum(0).clamp_min(1)
    spread_before = before - (members.T @ before)[labels]
    centres = (members.T @ after)[labels]
    spread = after - centres
    movement = Movement(before, after)
    source = TensorSource(centres, batch_size=optim.batch_size, seed=seed, phase=PHASE)

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        latents, _ = memory.sample(noise)
        known_spread, novel_spread = pick(noise["spread"], len(spread)).split(source.batch_size)
        known = movement(latents) + spread[known_spread]
        novel = batch[0] + spread[novel_spread]
        terms = {"identify": balanced_binary_cross_entropy(identifier(known), identifier(novel))}
        if weight_replay > 0:
            taught = teacher_head(latents + spread_before[known_spread]).detach()
            answers = (taught / temperature).softmax(1)
            terms["replay"] = weight_replay * F.cross_entropy(
                known_head(known) / temperature, answers
            )
        return terms

    return Training(
        nn.ModuleList([identifier, known_head] if weight_replay > 0 else [identifier]),
        loss,
        source,
        optim,
        noise={
            **memory.draws(source.batch_size),
            "spread": Draw(kind="uniform", shape=(2 * source.batch_size,)),
        },
        seed=seed,
        phase=PHASE,
        engine=engine,
        progress=progress,
    ).run()


@torch.no_grad()
def calibrate(
    identifier: KnownClassIdentifier,
    features: Float[Tensor, "image feature"],
    pool: Float[Tensor, "picture feature"],
    *,
    lost: float,
    least: float = 0.0,
) -> float:
    """Return the threshold that loses the share `lost` of `features` to the known side.

    Neither labels nor test pictures enter: `features` are of pool pictures, novel by definition,
    that the identifier was not fitted on. If they are so few that less than `FEWEST_LOST` should be
    lost, chance rules the lowest ones, and the threshold loses no more than that share of the
    whole `pool`.

    The known side has no such real pictures: its stand-ins look less novel than they do. Where
    known and novel are hard to tell apart, `least` keeps them from being lost; it costs half of
    the `features` at most.
    """
    novelty = identifier.novelty(features)
    found = torch.quantile(novelty, lost)
    if len(features) * lost < FEWEST_LOST:
        found = found.minimum(torch.quantile(identifier.novelty(pool), lost))
    return max(float(found), min(least, float(torch.quantile(novelty, 0.5))))

"""Another round of discovery: the novel classes of the last one become known ones."""

import torch
from torch import Tensor
from torch.nn import functional as F

from ncdwf.config import Engine, Optim
from ncdwf.learning.batches import Batch, TensorSource
from ncdwf.learning.loop import Terms, Training
from ncdwf.model import Model
from ncdwf.model.replay import GaussianPrototypes
from ncdwf.noise import Draw, Noise
from ncdwf.progress import Progress

PHASE = "promotion"
OPTIM = Optim(epochs=4, batch_size=512, lr=1.0, min_lr=0.01, weight_decay=0.0)
STEPS_PER_EPOCH = 50


def promote(
    model: Model, *, seed: int, engine: Engine = "auto", progress: Progress | None = None
) -> Model:
    """Return a model to which all classes of `model` are known; `model` is left as it was.

    One cosine head takes the place of known head, novel head and identifier. It is fitted on
    mixtures [1] of normal samples around the stored class means: no picture is needed, and so none
    of an earlier round. Unfitted, the means of novel classes draw every picture to themselves,
    because their features are less collapsed than those of classes that had labels.

    References:
        [1]: Zhang et al., mixup: Beyond Empirical Risk Minimization, ICLR 2018.
    """
    model = model.promoted()
    memory = GaussianPrototypes(model.statistics)
    head, temperature = model.known_head, model.architecture.temperature

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        samples, labels = memory.sample(noise)
        partner, share = noise["partner"].argsort(), noise["share"]
        logits = head(torch.lerp(samples, samples[partner], share[:, None])).float() / temperature
        own = F.cross_entropy(logits, labels, reduction="none")
        other = F.cross_entropy(logits, labels[partner], reduction="none")
        return {"classify": torch.lerp(own, other, share).mean()}

    # Samples come from noise alone; the source only says how many steps an epoch has.
    rows = torch.zeros(STEPS_PER_EPOCH * OPTIM.batch_size, device=model.device)
    Training(
        head,
        loss,
        TensorSource(rows, batch_size=OPTIM.batch_size, seed=seed, phase=PHASE),
        OPTIM,
        noise={
            **memory.draws(OPTIM.batch_size),
            "partner": Draw(kind="uniform", shape=(OPTIM.batch_size,)),
            "share": Draw(kind="uniform", shape=(OPTIM.batch_size,)),
        },
        seed=seed,
        phase=PHASE,
        engine=engine,
        progress=progress,
    ).run()
    return model.eval()

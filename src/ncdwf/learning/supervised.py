"""The supervised phase: learn the known classes, keep their statistics, forget the pictures."""

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from ncdwf.config import Config, View
from ncdwf.data.augment import augment, augment_views, num_draws
from ncdwf.data.images import Images, Labels, as_images, as_labels
from ncdwf.data.setting import held_out_indices
from ncdwf.errors import InputError
from ncdwf.learning.loop import (
    Batch,
    Checkpoints,
    History,
    Progress,
    TensorSource,
    Terms,
    choose_device,
    train,
)
from ncdwf.model import Architecture, Model
from ncdwf.model.backbone import apply
from ncdwf.model.statistics import Accumulator
from ncdwf.noise import Draw, Noise, generator

PHASE = "supervised"


def learn_known(
    images: Any,
    labels: Any,
    config: Config,
    *,
    class_names: tuple[str, ...] | None = None,
    checkpoints: Checkpoints | None = None,
    progress: Progress | None = None,
    history: History | None = None,
) -> Model:
    """Return a model of the known classes; it holds no picture and no label.

    Args:
        images: uint8, `[image, channel, height, width]`.
        labels: one integer a picture; classes 0…M-1.
        config: `config.supervised`, the backbone, the seed and the device are used.
        class_names: how the model calls the classes; their numbers by default.
        checkpoints: where to keep checkpoints, and to resume from.
        progress: hears of every step.
        history: what each epoch left is added to this list.
    """
    images = as_images(images)
    labels = as_labels(labels, len(images))
    num_known = int(labels.max()) + 1
    names = class_names or tuple(str(label) for label in range(num_known))
    if len(names) != num_known:
        raise InputError(f"{len(names)} class names do not match {num_known} known classes")
    settings, device = config.supervised, choose_device(config.device)
    training, held_out = held_out_indices(labels, settings.holdout, seed=config.seed)
    if settings.statistics_from == "held-out":
        scarce = int(torch.bincount(labels[held_out], minlength=num_known).min())
        if scarce < 2:
            raise InputError(
                f"supervised.holdout={settings.holdout} leaves {scarce} held-out pictures of a "
                "class; two or more of each are needed"
            )
    train_images, train_labels = images[training].to(device), labels[training].to(device)
    model = _new_model(train_images, names, config)

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        pictures, targets = batch
        views = augment_views(pictures, settings.view, noise["view"])
        logits = model.known_head(apply(model.backbone, views.flatten(0, 1)))
        return {
            "classify": F.cross_entropy(
                logits.float() / settings.temperature, targets.repeat(len(views))
            )
        }

    source = TensorSource(
        train_images,
        train_labels,
        batch_size=settings.optim.batch_size,
        seed=config.seed,
        phase=PHASE,
    )
    shape = (settings.num_views, source.batch_size, num_draws(settings.view))
    epochs = train(
        model,
        loss,
        source,
        settings.optim,
        noise={"view": Draw(kind="uniform", shape=shape)},
        seed=config.seed,
        phase=PHASE,
        engine=config.engine,
        checkpoints=checkpoints,
        progress=progress,
    )
    if history is not None:
        history.extend(epochs)
    if settings.statistics_from == "held-out":
        train_images, train_labels = images[held_out].to(device), labels[held_out].to(device)
    _measure(model, train_images, train_labels, config)
    return model.eval()


def _new_model(images: Images, names: tuple[str, ...], config: Config) -> Model:
    _, channels, height, width = images.shape
    architecture = Architecture(
        backbone=config.backbone,
        num_channels=channels,
        height=height,
        width=width,
        num_known=len(names),
        temperature=config.supervised.temperature,
        spread=config.supervised.spread,
    )
    model = Model.create(architecture, names, seed=config.seed).to(images.device)
    model.backbone.normalise.measure(images)
    return model


def _measure(model: Model, images: Images, labels: Labels, config: Config) -> None:
    """Put the class statistics into the model, from augmented views or the pictures as they are."""
    settings = config.supervised
    augmented = settings.statistics_from == "augmented"
    view = settings.view if augmented else View()
    num_views = settings.statistics_views if augmented else 1
    sums = Accumulator(model.num_known, model.backbone.num_features, settings.spread, model.device)
    source = generator(config.seed, "statistics", device=model.device)
    model.eval()
    with torch.no_grad():
        for _ in range(num_views):
            for part, targets in zip(images.split(1024), labels.split(1024), strict=True):
                draws = torch.rand(
                    len(part), num_draws(view), generator=source, device=source.device
                )
                sums.add(model.backbone(augment(part, view, draws)), targets)
    model.statistics = sums.result(num_views)

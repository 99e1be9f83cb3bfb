"""The supervised phase: learn the known classes, keep their statistics, forget the pictures."""

import logging
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import Config, View, require_short
from ncdwf.data.augment import augment, augment_views, check_view, view_draw
from ncdwf.data.inputs import Inputs, Labels, as_inputs, as_labels
from ncdwf.data.setting import held_out_indices
from ncdwf.errors import InputError, enough_memory, shown
from ncdwf.learning.batches import Batch, TensorSource, place
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.loop import History, Terms, Training, choose_device
from ncdwf.model import Architecture, Model
from ncdwf.model.backbone import CUSTOM, apply
from ncdwf.model.model import num_at_once
from ncdwf.model.statistics import Accumulator
from ncdwf.noise import Noise, draw, generator
from ncdwf.progress import Progress

PHASE = "supervised"
FEW, MOST_NAMED = 10, 20
"""Classes of fewer labelled pictures are named in a warning, but no more of them than that."""

log = logging.getLogger(__name__)


@enough_memory()
def learn_known(
    images: Any,
    labels: Any,
    config: Config,
    *,
    class_names: tuple[str, ...] | None = None,
    backbone: nn.Module | None = None,
    checkpoints: Checkpoints | None = None,
    progress: Progress | None = None,
    history: History | None = None,
) -> Model:
    """Return a model of the known classes; it holds no picture and no label.

    Args:
        images: uint8, `[image, channel, height, width]`; or vectors, `[image, number]`.
        labels: one integer a picture; classes 0…M-1.
        config: `config.supervised`, the backbone, the seed and the device are used.
        class_names: how the model calls the classes; their numbers by default.
        backbone: a network of your own instead of `config.backbone`: pictures (normalised) to one
            feature vector each. It is trained on from the weights it has; a copy is taken.
        checkpoints: where to keep checkpoints, and to resume from.
        progress: hears of every step.
        history: what each epoch left is added to this list.
    """
    images = as_inputs(images)
    labels = as_labels(labels, len(images))
    num_known = int(labels.max()) + 1
    names = class_names or tuple(str(label) for label in range(num_known))
    _check_names(names, num_known)
    settings, device = config.supervised, choose_device(config.device)
    training, held_out = held_out_indices(labels, settings.holdout, seed=config.seed)
    if settings.statistics_from == "held-out":
        scarce = int(torch.bincount(labels[held_out], minlength=num_known).min())
        if scarce < 2:
            raise InputError(
                f"supervised.holdout={settings.holdout} leaves {scarce} held-out pictures of a "
                "class; two or more of each are needed"
            )
    train_images, train_labels = images, labels
    if len(held_out):  # indexing copies: what is mapped from a file is left there otherwise
        train_images, train_labels = images[training], labels[training]
    model = _new_model(train_images, names, config, backbone).to(device)
    train_images = place(train_images, device)
    train_labels = train_labels.to(train_images.device)
    check_view(settings.view, model.architecture.input_shape, name="supervised.view")
    if all(torch.equal(part, images[:1].expand_as(part)) for part in images.split(1024)):
        kind = "pictures" if images.ndim > 2 else "rows"
        raise InputError(
            f"all {len(images)} labelled {kind} are the same; there is nothing to tell apart"
        )

    _warn_of_few(labels, names)

    def make_views(batch: Batch, noise: Noise) -> Batch:
        pictures, targets = batch
        views = augment_views(pictures, settings.view, noise["view"])
        return views.flatten(0, 1), targets.repeat(len(views))

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        views, targets = batch
        logits = model.known_head(apply(model.backbone, views))
        return {"classify": F.cross_entropy(logits.float() / settings.temperature, targets)}

    source = TensorSource(
        train_images,
        train_labels,
        batch_size=settings.optim.batch_size,
        seed=config.seed,
        phase=PHASE,
        device=device,
    )
    shape = model.architecture.input_shape
    epochs = Training(
        model,
        loss,
        source,
        settings.optim,
        noise={"view": view_draw(settings.view, settings.num_views, source.batch_size, shape)},
        seed=config.seed,
        phase=PHASE,
        make_views=make_views,
        engine=config.engine,
        checkpoints=checkpoints,
        progress=progress,
    ).run()
    if history is not None:
        history.extend(epochs)
    if settings.statistics_from == "held-out":
        train_images, train_labels = images[held_out], labels[held_out]
    _measure(model, train_images, train_labels, config)
    return model.eval()


def _warn_of_few(labels: Labels, names: tuple[str, ...]) -> None:
    """Say which classes will be forgotten most easily."""
    counts = torch.bincount(labels, minlength=len(names)).tolist()
    few = [f"{shown(n)} ({c})" for n, c in zip(names, counts, strict=True) if c < FEW]
    if few:
        rest = f" and {len(few) - MOST_NAMED} more" if len(few) > MOST_NAMED else ""
        log.warning(
            "classes of few labelled examples are easily called novel after a discovery: %s%s",
            ", ".join(few[:MOST_NAMED]),
            rest,
        )


def _check_names(names: tuple[str, ...], num_known: int) -> None:
    if len(names) != num_known:
        raise InputError(f"{len(names)} class names do not match {num_known} known classes")
    if len(set(names)) < num_known:
        raise InputError(f"two classes are called {max(names, key=names.count)!r}")
    require_short(names)


def _new_model(
    images: Inputs, names: tuple[str, ...], config: Config, backbone: nn.Module | None
) -> Model:
    architecture = Architecture(
        backbone=CUSTOM if backbone is not None else config.backbone,
        input_shape=tuple(images.shape[1:]),
        num_known=len(names),
        temperature=config.supervised.temperature,
        spread=config.supervised.spread,
    )
    model = Model.create(architecture, names, seed=config.seed, backbone=backbone)
    model.backbone.normalise.measure(images)
    return model


def _measure(model: Model, images: Inputs, labels: Labels, config: Config) -> None:
    """Put the class statistics into the model, from augmented views or the pictures as they are."""
    settings = config.supervised
    augmented = settings.statistics_from == "augmented"
    view = settings.view if augmented else View()
    num_views = settings.statistics_views if augmented else 1
    size = num_at_once(model.architecture.input_shape)
    sums = Accumulator(model.num_known, model.backbone.num_features, settings.spread, model.device)

    def batches() -> Iterator[tuple[Tensor, Tensor]]:
        source = generator(config.seed, "statistics", device=model.device)
        for _ in range(num_views):
            for part, targets in zip(torch.split(images, size), labels.split(size), strict=True):
                wanted = view_draw(view, 1, len(part), model.architecture.input_shape)
                draws = draw({"view": wanted}, 1, source)["view"]
                pictures = augment(part.to(model.device), view, draws[0, 0])
                yield model.backbone(pictures), targets.to(model.device)

    model.eval()
    with torch.no_grad():
        for features, targets in batches():
            sums.add(features, targets)
        model.statistics = sums.result(num_views)
        # Once more the same: how far they lie from the means can be told when there are means.
        angles, classes = [], []
        for features, targets in batches():
            angles.append(model.statistics.angles_to(features).gather(1, targets[:, None])[:, 0])
            classes.append(targets)
    model.statistics.measure_angles(torch.cat(angles), torch.cat(classes))

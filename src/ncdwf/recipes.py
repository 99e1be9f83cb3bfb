"""Recommended configurations: for the settings of the paper, and for anybody's own data."""

import math
from dataclasses import replace
from typing import Any

from ncdwf.config import SETTING_NAME, UNSEEN, Config, Discovery, Optim, Supervised, View
from ncdwf.errors import InputError

PROTECTING = ("ncdwf", "ncdwf-gauss")
"""Methods that distil features and are settled after discovery: recipes say how."""
CLUSTERING = ("uno", *PROTECTING)
"""Methods with several clustering heads; any other keeps its own defaults."""
OWN = "own"
"""What a configuration for somebody's own data has in the place of a setting."""
SMALL_SIDE = 12
"""Pictures up to this side are read by the small network, also on a GPU."""
LARGEST_SIDE = {True: 64, False: 32}
"""Larger pictures are scaled down to this side, with and without a GPU."""
COLOURS = 3
"""Only colour pictures are mirrored: grey ones are often of writing, which nobody sees so."""
SUPERVISED, DISCOVERY = 0, 1
"""Places in the pairs below."""
STEPS, SMALLEST_BATCH = (8, 4), (16, 32)
"""An epoch of either phase has so many steps, unless batches would be too small. Discovery divides
every batch into equal clusters and wants larger ones."""
FEWEST_EPOCHS, MOST_EPOCHS = 10, 200
PASSES = {"vector": (8_000, 50_000), "small": (16_000, 80_000)}
"""Over how many pictures the epochs of a phase pass together, or those of a try; on the digits a
fifth less."""
FEWEST_SETTLING_STEPS, MOST_SETTLING_STEPS = 400, 6_000
"""Of the fit after discovery. After fewer an identifier calls every picture as likely known as
novel; the digits take 480, the largest pool of CIFAR 4,200."""
LARGE_PASSES = {True: (8_000_000, 4_000_000), False: (20_000, 20_000)}
"""The same for other networks, with and without a GPU: minutes, or about an hour."""
TRIES = 3
"""With vectors and pictures up to `SMALL_SIDE` a try takes seconds, and finds a class in two parts
now and then (decision 17). Where the fewest epochs take longer than `PASSES` there is one."""
LEAST_TAU = 0.9
"""Of vectors and small networks: what is called novel is at least as likely to be (decision 15)."""


def _digits(setting: str, num_novel: int, method: str) -> Config:
    view = View(shift=0.8, rotation=9.0, scale=0.2)
    fields: dict[str, Any] = {}
    if method in CLUSTERING:
        fields["clustering"] = {"num_heads": 3, "num_hidden": 128, "num_projected": 64}
    if method in PROTECTING:
        fields["settling"] = {"epochs": 60, "batch_size": 64, "lr": 0.1}
        fields |= {"norms": "pool", "novel_lost": 0.05}
    supervised = Optim(epochs=20, batch_size=64, lr=0.02, warmup_epochs=1, weight_decay=1e-3)
    discovery = Optim(epochs=100, batch_size=64, lr=0.2, warmup_epochs=5, weight_decay=1e-3)
    return Config(
        setting=setting,
        supervised=Supervised(optim=supervised, view=view),
        discovery=Discovery(num_novel=num_novel, optim=discovery, large=view),
        method={"name": method, **fields},
    )


def _cifar(setting: str, num_novel: int, method: str) -> Config:
    """Follow UNO [1] in views, heads and schedules, but for the choices of docs/reproduction.md.

    References:
        [1]: Fini et al., A Unified Objective for Novel Class Discovery, ICCV 2021 (version 2).
    """
    large = View(padding=4, resized=0.5, flip=True, jitter=0.6, solarise=0.1, equalise=0.1)
    small = View(
        size=18,
        resized=1.0,
        min_area=0.3,
        max_area=0.8,
        flip=True,
        jitter=0.8,
        solarise=0.2,
        equalise=0.2,
    )
    fields: dict[str, Any] = {}
    if method in CLUSTERING:
        fields["clustering"] = {"overclustering": 5}
    if method in PROTECTING:
        fields["weight_distill"] = 2.0
        fields["settling"] = {"epochs": 60, "batch_size": 512, "lr": 0.3}
    return Config(
        setting=setting,
        backbone="resnet18",
        supervised=Supervised(
            optim=Optim(epochs=200, batch_size=512, lr=0.2, warmup_epochs=10, weight_decay=5e-4),
            view=View(padding=4, flip=True),
            temperature=0.07,
        ),
        discovery=Discovery(
            num_novel=num_novel,
            optim=Optim(
                epochs=200,
                batch_size=512,
                lr=2.0,
                # Held norms do not bound the activations.
                clip_norm=1.0,
                warmup_epochs=10,
                weight_decay=1.5e-4,
            ),
            backbone_rate=0.05,
            large=large,
            small=small,
            num_small=2,
        ),
        method={"name": method, **fields},
    )


RECIPES = {"digits": _digits, "cifar10": _cifar, "cifar100": _cifar}
"""What is known to work, by the name of the data."""


def recipe(setting: str, method: str = "ncdwf") -> Config:
    """Return the configuration that this project recommends for `setting` and `method`.

    >>> recipe("digits-5-5").discovery.num_novel
    5
    """
    match = SETTING_NAME.fullmatch(setting)
    if match is None or match["data"] not in RECIPES:
        raise InputError(
            f"no recipe for setting {setting!r}; there are recipes for {', '.join(RECIPES)}"
        )
    return RECIPES[match["data"]](setting, int(match["proxy_novel"] or match["novel"]), method)


def own_data(
    shape: tuple[int, ...],
    *,
    method: str = "ncdwf",
    backbone: str | None = None,
    has_gpu: bool = False,
) -> Config:
    """Return a configuration for pictures (or vectors) of `shape` that nobody tuned for.

    `fit_supervised` and `fit_discovery` bring its phases to the amount of data.

    >>> own_data((64,)).backbone, own_data((3, 32, 32), has_gpu=True).backbone
    ('vector', 'resnet18')
    """
    if backbone is None:
        large = has_gpu and max(shape[1:], default=0) > SMALL_SIDE
        backbone = "vector" if len(shape) == 1 else "resnet18" if large else "small"
    if backbone in PASSES or len(shape) == 1:
        config = _own_small(_digits(OWN, 0, method), shape)
    else:
        config = _own_large(_cifar(OWN, 0, method), shape)
    is_quick = backbone in PASSES and max(shape[1:], default=0) <= SMALL_SIDE
    discovery = replace(config.discovery, tries=TRIES if is_quick else 1)
    return replace(config, backbone=backbone, discovery=discovery)


def fit_supervised(config: Config, num_images: int, *, has_gpu: bool = False) -> Config:
    """Return what `own_data` gave with a supervised phase for so many labelled pictures."""
    passes = PASSES.get(config.backbone, LARGE_PASSES[has_gpu])
    optim = _fitted(config.supervised.optim, num_images, passes, SUPERVISED)
    return replace(config, supervised=replace(config.supervised, optim=optim))


def fit_discovery(
    config: Config, num_images: int, num_novel: int, *, has_gpu: bool = False
) -> Config:
    """Return what `own_data` gave with a discovery phase for `num_novel` classes in a pool."""
    passes = PASSES.get(config.backbone, LARGE_PASSES[has_gpu])
    optim = _fitted(config.discovery.optim, num_images, passes, DISCOVERY)
    tries = 1 if num_images * FEWEST_EPOCHS > passes[DISCOVERY] else config.discovery.tries
    discovery = replace(config.discovery, num_novel=num_novel, optim=optim, tries=tries)
    method = dict(config.method)
    if "settling" in method:
        settling = method["settling"]
        seen = num_images - math.ceil(num_images / UNSEEN)
        steps = max(1, seen // settling["batch_size"])
        fewest, most = math.ceil(FEWEST_SETTLING_STEPS / steps), MOST_SETTLING_STEPS // steps
        epochs = max(1, fewest, min(settling["epochs"], most))
        method["settling"] = {**settling, "epochs": epochs}
    return replace(config, discovery=discovery, method=method)


def _fitted(optim: Optim, num_images: int, passes: tuple[int, int], phase: int) -> Optim:
    """Return `optim` with a batch that grows with the data and epochs that shrink with it.

    All epochs of the phase together pass over about `passes` pictures, which takes minutes on the
    device that the network is meant for; `FEWEST_EPOCHS` pass over more where there are more.
    """
    batch_size = optim.batch_size
    while batch_size > SMALLEST_BATCH[phase] and num_images // batch_size < STEPS[phase]:
        batch_size //= 2
    epochs = max(FEWEST_EPOCHS, min(MOST_EPOCHS, round(passes[phase] / max(num_images, 1))))
    return replace(
        optim,
        batch_size=batch_size,
        epochs=epochs,
        warmup_epochs=min(optim.warmup_epochs, epochs // 10),
        lr=optim.lr * batch_size / optim.batch_size,
    )


def _own_large(config: Config, shape: tuple[int, ...]) -> Config:
    """Return the CIFAR recipe, its views in proportion to the pictures."""
    side, flip = min(shape[1:], default=0), shape[0] == COLOURS
    discovery = replace(
        config.discovery,
        large=replace(config.discovery.large, padding=side // 8, flip=flip),
        small=replace(config.discovery.small, size=max(1, round(side * 18 / 32)), flip=flip),
    )
    view = replace(config.supervised.view, padding=side // 8, flip=flip)
    return replace(config, supervised=replace(config.supervised, view=view), discovery=discovery)


def _own_small(config: Config, shape: tuple[int, ...]) -> Config:
    """Return the digits recipe for vectors, or for pictures that a CPU has to learn from."""
    method = dict(config.method)
    of_vectors = len(shape) == 1
    if method["name"] in PROTECTING:
        method["least_tau"] = LEAST_TAU
        if of_vectors:
            method["weight_distill"] = 1.0
    if of_vectors:
        view = View(noise=0.5)
    else:
        shift = 0.1 * min(shape[1:])
        view = replace(config.supervised.view, shift=shift, flip=shape[0] == COLOURS)
    return replace(
        config,
        supervised=replace(config.supervised, view=view),
        discovery=replace(config.discovery, large=view),
        method=method,
    )

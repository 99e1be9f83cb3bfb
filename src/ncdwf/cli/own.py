"""Work on pictures of one's own: what follows from them, and how they are read."""

import os
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import numpy as np
import torch

from ncdwf.cli.runs import Changes, check_learnt, check_over, go_on, run_dir
from ncdwf.config import Config, OwnData
from ncdwf.console import Bar, print_choices, print_skipped
from ncdwf.data.folder import Listing, labelled_folder, labelled_table, unlabelled
from ncdwf.data.gathering import decode, glance
from ncdwf.errors import InputError, counted
from ncdwf.learning.discovery import check_method, reads_small_views
from ncdwf.learning.loop import choose_device
from ncdwf.learning.survey import check_pool
from ncdwf.model import Model
from ncdwf.recipes import LARGEST_SIDE, fit_discovery, fit_supervised, own_data
from ncdwf.results import experiment
from ncdwf.results.run import CONFIG_FILE, Run, load_model, start_from


def own_config(
    images: Path, image_size: int | None, backbone: str | None, strict: bool, changes: Changes
) -> Config:
    """Return the configuration that follows from somebody's labelled pictures."""
    check_text(os.path.realpath(images))
    listing = _labelled_listing(images)
    found, has_gpu = glance(listing.paths), choose_device("auto").type == "cuda"
    side = image_size or min(found.median_side, LARGEST_SIDE[has_gpu])
    shape = (3 if found.has_colour else 1, side, side)
    config = fit_supervised(
        own_data(shape, backbone=backbone, has_gpu=has_gpu), len(listing.paths), has_gpu=has_gpu
    )
    own = OwnData(shape=shape, labelled=os.path.realpath(images), strict=strict)
    config = changes.override(replace(config, own=own))
    experiment.check_shape(config, shape)
    return config


def own_classes(
    config: Config, out_dir: Path | None
) -> tuple[Run, Callable[[], experiment.Labelled]]:
    """Begin a supervised phase once its pictures are read: what is refused leaves no run behind."""
    with Bar() as bar:
        labelled = labelled_reader(config, None, bar)()
    work = Run.create(run_dir(out_dir, config), config)
    counts = counted(len(labelled[0]), "picture"), counted(len(labelled[2]), "class")
    assert config.own is not None
    print_choices(config, "supervised", config.own.shape, *counts)
    return work, lambda: labelled


def own_round(
    model: Path,
    images: list[Path],
    strict: bool,
    out_dir: Path | None,
    changes: Changes,
) -> tuple[Run, Callable[[], experiment.Pool]]:
    """Begin a round of discovery in somebody's unlabelled pictures, once they are read."""
    places = tuple(os.path.realpath(path) for path in images)
    check_text(*places)
    check_learnt(model)
    if Run(model).is_discovering:
        raise InputError(
            f"discovery in {model} has not finished, and a round begins with what the last one "
            f"found; go on with: {go_on('discover', model)}"
        )
    start = load_model(model)
    shape, num_pictures = picture_shape(start), len(unlabelled(images).paths)
    has_gpu = choose_device("auto").type == "cuda"
    name = check_method(changes.method or "ncdwf")
    config = own_data(shape, method=name, backbone=start.architecture.backbone, has_gpu=has_gpu)
    if (model / CONFIG_FILE).exists():
        recorded = Run.open(model).config
        config = replace(config, supervised=recorded.supervised, seed=recorded.seed)
    config = fit_discovery(config, num_pictures, 0, has_gpu=has_gpu)
    if not reads_small_views(start, changes.override(config).discovery):
        config = replace(config, discovery=replace(config.discovery, num_small=0))
    own = OwnData(shape=shape, pool=places, strict=strict)
    recorded, config = config, changes.override(replace(config, own=own))
    check_over(config, recorded)
    experiment.check_shape(config, shape)
    check_pool(num_pictures, config.discovery.num_novel)
    with Bar() as bar:
        pool = pool_reader(config, None, bar)()
    check_pool(len(pool[0]), config.discovery.num_novel)
    work = Run.create(run_dir(out_dir, config), config, start_from(model, start))
    print_choices(config, "discovery", shape, counted(len(pool[0]), "picture"))
    return work, lambda: pool


def labelled_reader(
    config: Config, data_dir: Path | None, bar: Bar
) -> Callable[[], experiment.Labelled]:
    """Return how the labelled pictures of a run are read."""
    if config.own is None:
        return partial(experiment.labelled_of, config.setting, data_dir)
    own = config.own

    def read() -> experiment.Labelled:
        if not own.labelled:
            raise InputError("this run began with a model, without labelled pictures")
        listing = _labelled_listing(Path(own.labelled))
        assert listing.labels is not None
        check_text(*set(listing.labels))
        decoded = decode(listing.paths, own.shape, strict=own.strict, progress=bar)  # type: ignore[arg-type]
        print_skipped(decoded.skipped)
        labels = [listing.labels[row] for row in decoded.kept]
        counts = Counter(labels)
        for name in sorted(set(listing.labels)):
            if counts[name] < 2:
                raise InputError(
                    f"of class {name!r} {counted(counts[name], 'picture')} can be read; "
                    "2 or more are needed"
                )
        names, codes = np.unique(labels, return_inverse=True)
        return decoded.images, torch.from_numpy(codes), tuple(names.tolist())

    return read


def pool_reader(config: Config, data_dir: Path | None, bar: Bar) -> Callable[[], experiment.Pool]:
    """Return how the pool of a run is read."""
    if config.own is None:
        return lambda: (experiment.pool_of(config.setting, data_dir), None)
    own = config.own

    def read() -> experiment.Pool:
        listing = unlabelled(map(Path, own.pool))
        decoded = decode(listing.paths, own.shape, strict=own.strict, progress=bar)  # type: ignore[arg-type]
        print_skipped(decoded.skipped)
        # Names of files may hold any bytes.
        names = [
            os.fsencode(listing.paths[row]).decode(errors="backslashreplace")
            for row in decoded.kept
        ]
        return decoded.images, names

    return read


def check_text(*words: object) -> None:
    """Refuse names that no file of text can hold: they were written in no known encoding."""
    for word in map(str, words):
        try:
            word.encode()
        except UnicodeEncodeError as error:
            raise InputError(f"the name {word!a} is not valid text; choose another") from error


def picture_shape(model: Model) -> tuple[int, int, int]:
    """Return channels, height and width of the pictures that a model reads."""
    shape = model.architecture.input_shape
    if len(shape) == 1:
        raise InputError(f"this model reads vectors of {shape[0]} numbers, not pictures")
    return shape[0], shape[1], shape[2]


def class_number(text: str) -> int:
    """Return how many classes to look for; 0 leaves it to discovery."""
    if text == "auto":
        return 0
    if not (text.isascii() and text.isdigit() and len(text) <= 7 and int(text) > 0):
        raise InputError(
            f"--num-novel {text[:20]}: a whole number from 1 on, of 7 digits at most, or auto, is "
            "accepted"
        )
    return int(text)


def _labelled_listing(images: Path) -> Listing:
    try:
        is_folder, is_there = images.is_dir(), images.exists()
    except OSError as error:  # such as a name that is too long
        raise InputError(f"{images} cannot be read: {error.strerror}") from error
    if not is_there:
        raise InputError(f"{images} does not exist; a folder or a table of pictures is accepted")
    return labelled_folder(images) if is_folder else labelled_table(images)

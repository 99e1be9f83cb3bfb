"""Several rounds of discovery against one: what becomes of the classes of each."""

import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
from jaxtyping import Float, Int64
from numpy import ndarray
from torch import Tensor

from ncdwf.data.inputs import Images
from ncdwf.data.setting import Setting, Split
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.loop import choose_device
from ncdwf.learning.rounds import promote
from ncdwf.model import Model
from ncdwf.results.metrics import count_pairs, match_clusters
from ncdwf.results.run import Run

Groups = dict[str, float]
"""Accuracy in percent, by a group of classes."""


def after_each_round(run: Run, data_dir: Path | None = None) -> dict[str, Any]:
    """Go on from a finished run with a second round, on as many classes again.

    Returns the accuracy on the classes that had labels and on those of either round: after each
    round, and between them, when one head has learnt all classes so far. A cluster keeps the class
    that it was mapped to on the pool it was found in.
    """
    setting = Setting.parse(run.config.setting)
    known, novel = len(setting.known_classes), len(setting.novel_classes)
    split = Setting.parse(f"{setting.data}-{known}-{2 * novel}").load(data_dir)
    is_first = split.pool_labels < known + novel
    groups = _groups(known, novel)
    model = Model.load(run.path).to(choose_device("auto"))
    first, labels = split.pool_images[is_first], split.pool_labels[is_first].numpy()
    class_of = np.concatenate([np.arange(known), _found(model, first, labels)])
    so_far = dict(list(groups.items())[:2])
    config = replace(run.config, snapshot_epochs=0)
    # `discover` begins with the same; its score tells what one head costs and what the round does.
    promoted = promote(model, seed=config.seed, engine=config.engine)
    scores = {
        "round 1": _scores(model, split, class_of, so_far),
        "promoted": _scores(promoted, split, class_of, so_far),
    }

    second, labels = split.pool_images[~is_first], split.pool_labels[~is_first].numpy()
    model = discover(model, second, make_method(config.method), config)
    class_of = np.concatenate([class_of, _found(model, second, labels)])
    return {**scores, "round 2": _scores(model, split, class_of, groups)}


def after_one_round(run: Run, data_dir: Path | None = None) -> dict[str, Any]:
    """Return the same of a run that was given both pools at once."""
    setting = Setting.parse(run.config.setting)
    known, half = len(setting.known_classes), len(setting.novel_classes) // 2
    split = setting.load(data_dir)
    groups = _groups(known, half)
    model = Model.load(run.path).to(choose_device("auto"))
    found = _found(model, split.pool_images, split.pool_labels.numpy())
    return {"one round": _scores(model, split, np.concatenate([np.arange(known), found]), groups)}


def _groups(known: int, size: int) -> dict[str, tuple[int, int]]:
    """Return the first class and the end of each group: as many in either round."""
    bounds = (0, known, known + size, known + 2 * size)
    return dict(zip(("labelled", "round 1", "round 2"), itertools.pairwise(bounds), strict=True))


def _found(
    model: Model, pool: Images, labels: Int64[ndarray, " pool"]
) -> Int64[ndarray, " cluster"]:
    """Return the class that each novel cluster is mapped to on its pool."""
    answers = _numbers(model.outputs(model.features(pool)).novel_logits[int(model.best_head)])
    classes, places = np.unique(labels, return_inverse=True)
    counts = count_pairs(answers, places, model.num_novel, len(classes))
    mapping = match_clusters(counts)
    return np.where(mapping >= 0, classes[mapping], -1)


def _scores(
    model: Model,
    split: Split,
    class_of: Int64[ndarray, " cls"],
    groups: dict[str, tuple[int, int]],
) -> dict[str, Groups]:
    """Return task-aware and strict accuracy of every group of classes (first, end)."""
    outputs = model.outputs(model.features(split.test_images))
    told = _numbers(outputs.known_logits)
    labels = split.test_labels.numpy()
    if model.num_novel:
        novel = model.num_known + _numbers(outputs.novel_logits[int(model.best_head)])
        # Whose head a picture belongs to follows from its class; unmatched clusters have none.
        told = np.where(np.isin(labels, class_of[model.num_known :]), novel, told)
    answers = {
        "aware": class_of[told],
        "strict": class_of[_numbers(model.probabilities(outputs))],
    }
    return {
        name: {
            group: round(100 * float((found == labels)[(labels >= a) & (labels < b)].mean()), 2)
            for group, (a, b) in groups.items()
        }
        for name, found in answers.items()
    }


def _numbers(scores: Float[Tensor, "image cls"]) -> Int64[ndarray, " image"]:
    return scores.argmax(1).cpu().numpy()

"""Scores of a model on a split: task-aware, task-agnostic and strict. See docs/evaluation.md."""

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import numpy as np
import torch
from jaxtyping import Bool, Float, Int64
from numpy import ndarray
from torch import Tensor

from ncdwf.data.inputs import Images
from ncdwf.data.setting import Split
from ncdwf.errors import InputError
from ncdwf.learning.kmeans import kmeans, nearest
from ncdwf.model import Model, Outputs
from ncdwf.results.metrics import (
    Classes,
    clustering_accuracy,
    count_pairs,
    match_clusters,
    per_class_accuracy,
    share,
)

PAPER_TAU = 0.99
PAPER_TAUS = (0.8, 0.85, 0.9, 0.95, PAPER_TAU, 0.999)
"""The thresholds that the paper compares; its own choice is 0.99."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Accuracy:
    """Known and novel accuracy in percent; `all` is their plain mean, as in the paper."""

    known: float
    novel: float
    all: float
    all_weighted: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Aware:
    """Task-aware scores: every picture is asked of the head that it belongs to."""

    known: float
    novel: float
    all: float
    all_weighted: float
    novel_mean_over_heads: float
    novel_pool: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Routed:
    """Scores under a routing rule; nobody says whether a picture is of a known class."""

    rule: str
    tau: float
    known: float
    novel: float
    all: float
    all_weighted: float
    known_rejected: float
    novel_accepted: float


@dataclass(frozen=True, kw_only=True, slots=True)
class Scores:
    """All scores of one model on one split; percent with two decimals, AUROC, NMI, ARI with four.

    `default_rule` is the index of the rule that the model itself uses.
    """

    after_supervised: dict[str, float | None]
    aware: Aware
    agnostic: list[Routed]
    strict: list[Routed]
    default_rule: int
    forgetting: float | None
    auroc: float
    nmi: float
    ari: float
    kmeans: dict[str, float]
    per_class: dict[str, float | None] = field(repr=False)
    confusion: list[list[int]] = field(repr=False)

    def to_dict(self) -> dict[str, Any]:
        """Return the scores as plain values."""
        return asdict(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class Predictions:
    """What a model says about the test pictures, as arrays: the content of `predictions.npz`."""

    labels: Classes
    """True classes."""
    predicted: Classes
    """The model's answers under its own rule; novel clusters count from M."""
    strict: Classes
    """The same with clusters renamed to classes by the mapping found on the pool; -1: unmatched."""
    known: Classes
    """Answers of the known head."""
    novel: Int64[ndarray, "head image"]
    """Answers of every novel head."""
    novelty: Float[ndarray, " image"]
    """P(novel)."""


def evaluate(
    model: Model, split: Split, supervised: Model | None = None, *, with_kmeans: bool = True
) -> tuple[Scores, Predictions]:
    """Return the scores of `model` and what they were computed from.

    Args:
        model: after discovery.
        split: its test pictures are scored; the pool's labels fix the strict mapping.
        supervised: the model before discovery, for forgetting and a k-means row.
        with_kmeans: whether to fit the k-means rows, which owe nothing to `model` and take long.
    """
    # It takes most of a second to import, which no other verb should wait for.
    from sklearn.metrics import adjusted_rand_score, normalized_mutual_info_score, roc_auc_score

    _check_classes(model, split)
    head = int(model.best_head)
    outputs = model.outputs(model.features(split.test_images))
    known_answers, novel_answers = _answers(outputs)
    labels = split.test_labels.cpu().numpy()
    is_novel = labels >= split.num_known
    novelty = outputs.novelty.cpu().numpy()

    in_pool = split.pool_labels >= split.num_known  # a mixed pool holds known classes, too
    pool_features = model.features(split.pool_images[in_pool])
    pool_answers = _answers(model.outputs(pool_features))[1]
    pool_labels = split.pool_labels[in_pool].cpu().numpy() - split.num_known
    mapping = match_clusters(
        count_pairs(pool_answers[head], pool_labels, model.num_novel, split.num_novel)
    )
    strict_answers = np.where(mapping >= 0, mapping + split.num_known, -1)[novel_answers[head]]

    rules = _rules(model)
    agnostic, strict = [], []
    for rule, tau in rules:
        routed_novel = novelty >= tau
        figures = _Figures(rule=rule, tau=tau, routed_novel=routed_novel, is_novel=is_novel)
        known_right = (known_answers == labels) & ~routed_novel
        strict_right = (strict_answers == labels) & routed_novel
        matched = _agnostic_novel(novel_answers[head], labels, routed_novel, split, model.num_novel)
        agnostic.append(figures.scores(known_right[~is_novel].mean(), matched))
        strict.append(figures.scores(known_right[~is_novel].mean(), strict_right[is_novel].mean()))

    after = None if supervised is None else _percent(_known_accuracy(supervised, split))
    aware = _aware(known_answers, novel_answers, labels, pool_answers, pool_labels, split, model)
    own = np.where(novelty >= model.tau, strict_answers, known_answers)
    prediction = np.where(
        novelty >= model.tau, novel_answers[head] + split.num_known, known_answers
    )
    novel_true, novel_found = labels[is_novel], novel_answers[head][is_novel]
    scores = Scores(
        after_supervised={"known": after},
        aware=aware,
        agnostic=agnostic,
        strict=strict,
        default_rule=next(i for i, (_, tau) in enumerate(rules) if tau == model.tau),
        forgetting=None if after is None else round(after - aware.known, 2),
        auroc=round(float(roc_auc_score(is_novel, novelty)), 4),
        nmi=round(float(normalized_mutual_info_score(novel_true, novel_found)), 4),
        ari=round(float(adjusted_rand_score(novel_true, novel_found)), 4),
        kmeans=kmeans_rows(split, supervised) if with_kmeans else {},
        per_class=_per_class(own, labels, split),
        confusion=_confusion(own, labels, split),
    )
    predictions = Predictions(
        labels=labels,
        predicted=prediction,
        strict=own,
        known=known_answers,
        novel=novel_answers,
        novelty=novelty,
    )
    return scores, predictions


def kmeans_rows(split: Split, supervised: Model | None) -> dict[str, float]:
    """Return the task-aware novel accuracy of two rows without learning.

    k-means (seed 0, ten starts) is fitted on the pool and names the novel test pictures, on the
    device of the supervised model where there is one.
    """
    chosen = split.test_labels >= split.num_known
    pool, test = split.pool_images, split.test_images[chosen]
    labels = (split.test_labels[chosen] - split.num_known).cpu().numpy()
    device = torch.device("cpu") if supervised is None else supervised.device

    def accuracy(describe: Callable[[Images], Float[Tensor, "image dim"]]) -> float:
        centres = kmeans(describe(pool), split.num_novel, num_starts=10, seed=0)
        found = nearest(describe(test), centres).cpu().numpy()
        return _percent(clustering_accuracy(found, labels, split.num_novel, split.num_novel))

    rows = {"pixels": accuracy(lambda images: _pixels(images.to(device)))}
    if supervised is not None:
        rows["features"] = accuracy(supervised.features)
    return rows


@dataclass(frozen=True, kw_only=True, slots=True)
class _Figures:
    """What all scores under one routing rule share."""

    rule: str
    tau: float
    routed_novel: Bool[ndarray, " image"]
    is_novel: Bool[ndarray, " image"]

    def scores(self, known: float, novel: float) -> Routed:
        accuracy = _accuracy(known, novel, self.is_novel)
        return Routed(
            rule=self.rule,
            tau=self.tau,
            **asdict(accuracy),
            known_rejected=_percent(self.routed_novel[~self.is_novel].mean()),
            novel_accepted=_percent((~self.routed_novel[self.is_novel]).mean()),
        )


def _check_classes(model: Model, split: Split) -> None:
    if model.novel_head is None:
        raise InputError("this model has not discovered anything yet; run 'ncdwf discover' first")
    if model.num_known != split.num_known:
        raise InputError(
            f"this model knows {model.num_known} classes, the setting has {split.num_known}"
        )
    model.check(split.test_images)


def _answers(outputs: Outputs) -> tuple[Classes, Int64[ndarray, "head image"]]:
    return (
        outputs.known_logits.argmax(1).cpu().numpy(),
        outputs.novel_logits.argmax(2).cpu().numpy(),
    )


def _rules(model: Model) -> list[tuple[str, float]]:
    if model.identifier is None:
        return [("softmax", model.tau)]
    taus = [*PAPER_TAUS, float(model.identifier.calibrated_tau), model.tau]
    return [("identifier", tau) for tau in dict.fromkeys(taus)]


def _agnostic_novel(
    answers: Classes,
    labels: Classes,
    routed_novel: Bool[ndarray, " image"],
    split: Split,
    num_clusters: int,
) -> float:
    is_novel = labels >= split.num_known
    chosen = is_novel & routed_novel
    return clustering_accuracy(
        answers[chosen],
        labels[chosen] - split.num_known,
        num_clusters,
        split.num_novel,
        total=int(is_novel.sum()),
    )


def _aware(
    known_answers: Classes,
    novel_answers: Int64[ndarray, "head image"],
    labels: Classes,
    pool_answers: Int64[ndarray, "head pool"],
    pool_labels: Int64[ndarray, " pool"],
    split: Split,
    model: Model,
) -> Aware:
    head = int(model.best_head)
    is_novel = labels >= split.num_known
    novel_true = labels[is_novel] - split.num_known

    def accuracy(answers: Classes, true: Classes) -> float:
        return clustering_accuracy(answers, true, model.num_novel, split.num_novel)

    by_head = [accuracy(answers[is_novel], novel_true) for answers in novel_answers]
    known = float((known_answers == labels)[~is_novel].mean())
    return Aware(
        **asdict(_accuracy(known, by_head[head], is_novel)),
        novel_mean_over_heads=_percent(float(np.mean(by_head))),
        novel_pool=_percent(accuracy(pool_answers[head], pool_labels)),
    )


def _known_accuracy(model: Model, split: Split) -> float:
    chosen = split.test_labels < split.num_known
    images, labels = split.test_images[chosen], split.test_labels[chosen]
    answers = model.outputs(model.features(images)).known_logits.argmax(1).cpu()
    return share(int((answers == labels.cpu()).sum()), len(labels))


def _accuracy(known: float, novel: float, is_novel: Bool[ndarray, " image"]) -> Accuracy:
    weight = float(is_novel.mean())
    return Accuracy(
        known=_percent(known),
        novel=_percent(novel),
        all=_percent((known + novel) / 2),
        all_weighted=_percent((1 - weight) * known + weight * novel),
    )


def _per_class(own: Classes, labels: Classes, split: Split) -> dict[str, float | None]:
    names = split.known_names + split.novel_names
    values = per_class_accuracy(own, labels, len(names))
    return {n: None if np.isnan(v) else _percent(v) for n, v in zip(names, values, strict=True)}


def _confusion(own: Classes, labels: Classes, split: Split) -> list[list[int]]:
    """Return true classes by predicted ones; the last column counts unmatched clusters."""
    num_classes = split.num_known + split.num_novel
    columns = np.where(own >= 0, own, num_classes)
    counts: list[list[int]] = count_pairs(labels, columns, num_classes, num_classes + 1).tolist()
    return counts


def _pixels(images: Images) -> Float[Tensor, "image pixel"]:
    return images.flatten(1).to(torch.float32) / 255


def _percent(value: float) -> float:
    return round(100 * float(value), 2)

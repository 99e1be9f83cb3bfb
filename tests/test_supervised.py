"""The supervised phase: what it learns, which statistics it leaves, and what it refuses."""

from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from conftest import (
    Stop,
    StopAfter,
    fingerprint,
    shorter,
    timeless,
    tiny_pictures,
    unchanged_global_state,
)
from sklearn.linear_model import LogisticRegression
from torch import Tensor, nn

import ncdwf.model.model
from ncdwf.config import Config, Supervised, View
from ncdwf.data.augment import augment, num_draws
from ncdwf.data.setting import Split, held_out_indices
from ncdwf.errors import InputError
from ncdwf.learning import supervised
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.loop import History
from ncdwf.learning.supervised import learn_known
from ncdwf.model import Model
from ncdwf.model.statistics import quantiles
from ncdwf.noise import generator


def with_supervised(config: Config, **changes: Any) -> Config:
    return replace(config, supervised=replace(config.supervised, **changes))


@pytest.fixture(scope="module")
def short(config: Config) -> Config:
    return shorter(config)


def class_means(features: Tensor, labels: Tensor) -> Tensor:
    return torch.stack([features[labels == c].double().mean(0) for c in range(4)])


def test_a_linear_probe_solves_the_tiny_setting(split: Split) -> None:
    train_images, train_labels = tiny_pictures(32, seed=1)
    probe = LogisticRegression(max_iter=1000).fit(
        train_images.flatten(1).numpy() / 255, train_labels
    )
    score = probe.score(split.test_images.flatten(1).numpy() / 255, split.test_labels)
    assert score > 0.95


def test_learns_the_known_classes(known_model: Model, split: Split) -> None:
    known = split.test_labels < 4
    answers = known_model.predict(split.test_images[known])
    assert (answers.labels == split.test_labels[known]).double().mean() > 0.95
    assert known_model.known_names == ("ant", "bee", "cat", "dog")
    assert known_model.novel_head is None
    assert not known_model.training


def test_history_has_an_entry_an_epoch(split: Split, config: Config) -> None:
    history: History = []
    learn_known(
        split.known_images,
        split.known_labels,
        shorter(config, supervised=3),
        history=history,
    )
    assert [(e.phase, e.epoch, list(e.terms)) for e in history] == [
        ("supervised", epoch, ["classify"]) for epoch in range(3)
    ]
    losses = [e.terms["classify"] for e in history]
    assert losses[2] < losses[0]


@pytest.mark.parametrize("source", ["plain", "augmented", "held-out"])
def test_statistics_come_from_where_they_should(split: Split, short: Config, source: str) -> None:
    holdout = 0.25 if source == "held-out" else 0.0
    config = with_supervised(short, statistics_from=source, holdout=holdout, statistics_views=3)
    config = replace(config, seed=3)
    images, labels = split.known_images, split.known_labels.clone()
    labels[:16] = (labels[:16] + 1) % 4  # these lie nearer to another mean than to their own
    model = learn_known(images, labels, config)
    if source == "augmented":
        draws = generator(config.seed, "statistics")
        views = [
            augment(
                images,
                config.supervised.view,
                torch.rand(128, num_draws(config.supervised.view), generator=draws),
            )
            for _ in range(3)
        ]
        pictures, targets, per_class = torch.cat(views), labels.repeat(3), 32
    elif source == "held-out":
        held_out = held_out_indices(labels, 0.25, seed=config.seed)[1]
        pictures, targets, per_class = images[held_out], labels[held_out], 8
    else:
        pictures, targets, per_class = images, labels, 32
    with torch.no_grad():
        features = model.backbone(pictures)
    assert torch.allclose(
        model.statistics.means.double(), class_means(features, targets), atol=1e-4
    )
    assert model.statistics.counts.tolist() == [per_class] * 4
    angles = model.statistics.angles_to(features)
    assert (angles.argmin(1) != targets).any()
    for label, found in enumerate(model.statistics.angles):
        expected = quantiles(angles[targets == label, label], torch.ones(len(targets) // 4))
        assert torch.allclose(found, expected, atol=1e-3)
    assert float(model.statistics.feature_norm) == pytest.approx(
        float(features.norm(dim=1).mean()), rel=1e-4
    )


def test_the_three_sources_differ(split: Split, short: Config) -> None:
    means = [
        learn_known(
            split.known_images,
            split.known_labels,
            with_supervised(short, statistics_from=source, holdout=0.25),
        ).statistics.means
        for source in ("plain", "augmented", "held-out")
    ]
    for first, second in ((0, 1), (0, 2), (1, 2)):
        assert not torch.allclose(means[first], means[second], atol=1e-3)


@pytest.mark.parametrize(
    ("spread", "num_axes"), [("shared-diagonal", 1), ("shared", 2), ("per-class", 3)]
)
def test_spread_is_what_its_name_says(
    split: Split, short: Config, spread: str, num_axes: int
) -> None:
    config = with_supervised(short, spread=spread, statistics_from="plain")
    model = learn_known(split.known_images, split.known_labels, config)
    size = model.backbone.num_features
    assert model.statistics.spread.shape == (4, size, size)[3 - num_axes :]
    features = model.features(split.known_images).double()
    centred = features - class_means(features, split.known_labels)[split.known_labels]
    within = centred.T @ centred / len(centred)
    per_class = torch.stack(
        [torch.cov(features[split.known_labels == c].T, correction=0) for c in range(4)]
    )
    wanted = {"shared-diagonal": within.diagonal(), "shared": within, "per-class": per_class}
    scale = float(within.diagonal().mean())
    error = (model.statistics.spread.double() - wanted[spread]).abs().max()
    assert float(error) < 1e-3 * scale


def test_held_out_pictures_do_not_reach_the_weights(split: Split, short: Config) -> None:
    config = with_supervised(short, holdout=0.25)
    held_out = held_out_indices(split.known_labels, 0.25, seed=config.seed)[1]
    poisoned = split.known_images.clone()
    poisoned[held_out] = 255 - poisoned[held_out]
    assert len(held_out) == 32
    models = [learn_known(i, split.known_labels, config) for i in (split.known_images, poisoned)]
    assert fingerprint(models[0]) == fingerprint(models[1])


def test_no_view_means_the_pictures_as_they_are(split: Split, short: Config) -> None:
    models = [
        learn_known(
            split.known_images,
            split.known_labels,
            with_supervised(short, view=View(), statistics_from=source, statistics_views=2),
        )
        for source in ("plain", "augmented")
    ]
    assert torch.allclose(*(m.statistics.means for m in models), atol=1e-5)
    assert models[1].statistics.counts.tolist() == [32] * 4


def test_same_seed_same_model_and_other_seed_another(split: Split, short: Config) -> None:
    prints = [
        fingerprint(learn_known(split.known_images, split.known_labels, replace(short, seed=seed)))
        for seed in (0, 0, 1)
    ]
    assert prints[0] == prints[1] != prints[2]


def test_learning_runs_on_the_engine_asked_for(split: Split, short: Config) -> None:
    with pytest.raises(InputError, match="'captured' needs a CUDA device"):
        learn_known(split.known_images, split.known_labels, replace(short, engine="captured"))


def test_every_kind_of_array_gives_the_same_model(split: Split, short: Config) -> None:
    images, labels = split.known_images, split.known_labels
    wanted = fingerprint(learn_known(images, labels, short))
    for variant in (images.numpy(), images[:, 0], list(images.numpy())):
        assert fingerprint(learn_known(variant, labels.numpy(), short)) == wanted


def test_inputs_and_global_random_state_are_left_as_they_were(split: Split, short: Config) -> None:
    images, labels = split.known_images.clone(), split.known_labels.clone()
    with unchanged_global_state():
        learn_known(images, labels, short)
    assert torch.equal(images, split.known_images)
    assert torch.equal(labels, split.known_labels)


def test_resuming_changes_nothing(tmp_path: Path, split: Split, config: Config) -> None:
    config = shorter(config, supervised=2)

    def learn(checkpoints: Checkpoints | None, stop: StopAfter | None) -> tuple[Model, History]:
        history: History = []
        model = learn_known(
            split.known_images,
            split.known_labels,
            config,
            checkpoints=checkpoints,
            progress=stop,
            history=history,
        )
        return model, history

    whole, wanted = learn(None, None)
    for steps in (2, 4, 7):
        checkpoints = Checkpoints(tmp_path / str(steps), seconds=0.0, fingerprint="a")
        with pytest.raises(Stop):
            learn(checkpoints, StopAfter(steps))
        resumed, history = learn(checkpoints, None)
        assert fingerprint(resumed) == fingerprint(whole)
        assert timeless(history) == timeless(wanted)


def test_a_network_that_draws_on_its_own_follows_the_seed(
    tmp_path: Path, split: Split, config: Config
) -> None:
    config = shorter(config, supervised=2)

    def learn(
        config: Config, checkpoints: Checkpoints | None = None, stop: StopAfter | None = None
    ) -> Model:
        with torch.random.fork_rng():
            torch.manual_seed(0)
            network = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), nn.Dropout(0.3))
        with unchanged_global_state():
            return learn_known(
                split.known_images,
                split.known_labels,
                config,
                backbone=network,
                checkpoints=checkpoints,
                progress=stop,
            )

    prints = []
    for seed in (0, 1):
        torch.manual_seed(seed)
        prints.append(fingerprint(learn(config)))
    assert prints[0] == prints[1] != fingerprint(learn(replace(config, seed=1)))
    checkpoints = Checkpoints(tmp_path, seconds=0.0, fingerprint="a")
    with pytest.raises(Stop):
        learn(config, checkpoints, StopAfter(3))
    assert fingerprint(learn(config, checkpoints)) == prints[0]


def test_steps_of_a_network_that_draws_differ(split: Split, short: Config) -> None:
    masks: list[Tensor] = []

    class Watcher(nn.Dropout):
        def forward(self, input: Tensor) -> Tensor:
            kept = super().forward(input)
            masks.append(kept == 0)
            return kept

    network = nn.Sequential(nn.Flatten(), nn.Linear(256, 16), Watcher(0.5))
    learn_known(split.known_images, split.known_labels, short, backbone=network)
    in_training = [mask for mask in masks if mask.sum() > mask.numel() / 4]
    assert len(in_training) > 1
    assert not torch.equal(in_training[0], in_training[1])


PICTURES = np.zeros((6, 1, 16, 16), np.uint8)
LABELS = np.array([0, 1, 0, 1, 0, 1])


@pytest.mark.parametrize(
    ("images", "labels", "words"),
    [
        (PICTURES, np.zeros(6, np.int64), "one known class; two or more"),
        (PICTURES, LABELS[:5], "5 labels do not match 6 pictures"),
        (PICTURES, LABELS + 1, "labels run from 1 to 2"),
        (PICTURES, LABELS * 2, "labels run from 0 to 2"),
        (PICTURES, LABELS - 1, "labels run from -1 to 0"),
        (PICTURES, LABELS.astype(float), "labels are torch.float64"),
        (PICTURES, LABELS[:, None], r"labels are .* shape \(6, 1\)"),
        (PICTURES[:0], LABELS[:0], "no labelled pictures"),
        ([PICTURES[0], PICTURES[0][:, :8]] * 3, LABELS, r"number 1 is \(1, 8, 16\)"),
        ([PICTURES[0], np.zeros((3, 16, 16), np.uint8)] * 3, LABELS, r"number 1 is \(3, 16, 16\)"),
        (np.full((6, 1, 16, 16), np.nan, np.float32), LABELS, "NaN"),
        (np.full((6, 1, 16, 16), np.inf, np.float32), LABELS, "infinite"),
        (PICTURES.astype(np.float32), LABELS, "float32; uint8"),
        (PICTURES.astype(np.int64), LABELS, "int64; uint8"),
        (np.zeros((6, 2, 16, 16), np.uint8), LABELS, "1 or 3 channels"),
        (
            np.zeros((6, 16), np.uint8),
            LABELS,
            r"'small' reads pictures, not inputs of shape \(16,\)",
        ),
        ("pictures", LABELS, "images"),
    ],
)
def test_bad_input_is_refused_with_the_offending_value(
    config: Config, images: Any, labels: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        learn_known(images, labels, config)


def test_class_names_must_match(config: Config) -> None:
    with pytest.raises(InputError, match="3 class names do not match 2 known classes"):
        learn_known(PICTURES, LABELS, config, class_names=("a", "b", "c"))


def test_a_name_is_that_of_one_class(config: Config) -> None:
    with pytest.raises(InputError, match="two classes are called 'a'"):
        learn_known(PICTURES, LABELS, config, class_names=("a", "a"))


def test_classes_of_few_pictures_are_named(
    split: Split, short: Config, caplog: pytest.LogCaptureFixture
) -> None:
    of_one = [(split.known_labels == label).nonzero()[:, 0] for label in range(4)]
    for few, told in (((10, 9, 12, 3), ["'bee' (9), 'dog' (3)"]), ((10, 10, 10, 10), [])):
        rows = torch.cat([rows[:num] for rows, num in zip(of_one, few, strict=True)])
        caplog.clear()
        learn_known(
            split.known_images[rows],
            split.known_labels[rows],
            short,
            class_names=("ant", "bee", "cat", "dog"),
        )
        assert [record.message.rpartition(": ")[2] for record in caplog.records] == told


def test_not_all_of_many_such_classes_are_named(
    split: Split,
    short: Config,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = torch.cat([(split.known_labels == label).nonzero()[:2, 0] for label in range(4)])
    images, labels = split.known_images[rows], split.known_labels[rows]
    for most, end in ((4, "'3' (2)"), (3, "'2' (2) and 1 more")):
        monkeypatch.setattr(supervised, "MOST_NAMED", most)
        caplog.clear()
        learn_known(images, labels, short)
        assert caplog.records[0].message.endswith(f", {end}")


def test_a_class_of_one_picture_is_refused_before_training(split: Split, short: Config) -> None:
    labels = torch.tensor([0, 1, 0, 1, 0, 2])
    with pytest.raises(InputError, match="class 2 has one picture"):
        learn_known(split.known_images[:6], labels, with_supervised(short, statistics_from="plain"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"statistics_from": "held-out"}, "holdout"),
        ({"holdout": 0.6}, "holdout=0.6"),
        ({"num_views": 0}, "num_views=0"),
        ({"temperature": 0.0}, "temperature=0.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(
    config: Config, changes: dict[str, Any], words: str
) -> None:
    with pytest.raises(InputError, match=words):
        Supervised(optim=config.supervised.optim, **changes)


def test_too_few_held_out_pictures_are_refused_before_training(split: Split, short: Config) -> None:
    config = with_supervised(short, holdout=0.02, statistics_from="held-out")
    with pytest.raises(InputError, match=r"holdout=0\.02 leaves 1 held-out pictures"):
        learn_known(split.known_images, split.known_labels, config, progress=StopAfter(1))


def test_colour_pictures_are_learnt_too(short: Config) -> None:
    images, labels = tiny_pictures(8, seed=3)
    model = learn_known(images.expand(-1, 3, -1, -1), labels, short)
    assert model.architecture.input_shape[0] == 3
    assert model.predict(images.expand(-1, 3, -1, -1)).labels.max() <= 5


@pytest.mark.parametrize(("shape", "kind"), [((1, 16, 16), "pictures"), ((5,), "rows")])
def test_what_is_the_same_everywhere_is_refused(
    short: Config, shape: tuple[int, ...], kind: str
) -> None:
    backbone, dtype = ("small", torch.uint8) if len(shape) == 3 else ("vector", torch.float32)
    inputs, labels = torch.zeros(6, *shape, dtype=dtype), torch.arange(6) % 2
    config = replace(with_supervised(short, view=View()), backbone=backbone)
    words = f"all 6 labelled {kind} are the same; there is nothing to tell apart"
    with pytest.raises(InputError, match=words):
        learn_known(inputs, labels, config)


class Counting(nn.Module):
    """Notes how many pictures it reads at once where nothing is learnt."""

    sizes: ClassVar[list[int]] = []

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(()))

    def forward(self, images: Tensor) -> Tensor:
        if not self.training:
            self.sizes.append(len(images))
        return self.weight * images.flatten(1)


def test_where_nothing_is_learnt_no_more_pictures_are_read_than_memory_holds(
    split: Split, short: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncdwf.model.model, "EVALUATION_PIXELS", 5 * 16 * 16)
    config = replace(short, backbone="custom")
    monkeypatch.setattr(Counting, "sizes", [])
    model = learn_known(split.known_images, split.known_labels, config, backbone=Counting())
    assert max(Counting.sizes) == 5
    Counting.sizes.clear()
    model.predict(split.test_images)
    assert max(Counting.sizes) == 5

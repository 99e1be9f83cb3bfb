"""The discovery phase: what it finds, what it leaves alone, what it refuses, and own methods."""

import json
import re
import runpy
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar, cast

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
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.config import Config, Engine, View, override
from ncdwf.data.augment import Views
from ncdwf.data.setting import Split
from ncdwf.errors import InputError, NonFiniteError
from ncdwf.learning import discovery
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.counting import ClassCount
from ncdwf.learning.discovery import (
    METHODS,
    Method,
    Outcome,
    Teacher,
    best_head,
    discover,
    make_method,
    register,
)
from ncdwf.learning.loop import Epoch, History, Terms, Training
from ncdwf.learning.sifting import Sifted
from ncdwf.learning.supervised import learn_known
from ncdwf.learning.survey import Survey
from ncdwf.model import Model
from ncdwf.model.movement import Movement
from ncdwf.noise import Noise
from ncdwf.progress import Quiet
from ncdwf.results.evaluation import evaluate

EXAMPLES = Path(__file__).parent.parent / "examples"
LwF = runpy.run_path(str(EXAMPLES / "own_method.py"))["LearningWithoutForgetting"]
"""A method from outside the package: the one that the documents show."""


@pytest.fixture(scope="module")
def short(config: Config) -> Config:
    return shorter(config)


@pytest.fixture
def method(short: Config) -> Method:
    return make_method(short.method)


def test_finds_the_novel_classes_and_keeps_the_known_ones(
    found_model: Model, known_model: Model, split: Split
) -> None:
    scores, _ = evaluate(found_model, split, known_model)
    assert scores.aware.novel > 90  # 30 of 32
    assert scores.aware.known > 95
    assert scores.agnostic[scores.default_rule].all > 80
    assert found_model.class_names == ("ant", "bee", "cat", "dog", "novel-1", "novel-2")
    assert not found_model.training


def test_the_given_model_stays_bit_identical(
    known_model: Model, split: Split, method: Method, short: Config
) -> None:
    before = fingerprint(known_model)
    flags = [
        (part.training, [p.requires_grad for p in part.parameters()])
        for part in known_model.modules()
    ]
    found = discover(known_model, split.pool_images, method, short)
    assert fingerprint(known_model) == before
    assert known_model.novel_head is None
    assert flags == [
        (part.training, [p.requires_grad for p in part.parameters()])
        for part in known_model.modules()
    ]
    shared = {t.data_ptr() for t in known_model.state_dict().values()}
    assert not shared & {t.data_ptr() for t in found.state_dict().values()}


def test_pool_and_global_random_state_are_left_as_they_were(
    known_model: Model, split: Split, method: Method, short: Config
) -> None:
    pool = split.pool_images.clone()
    with unchanged_global_state():
        discover(known_model, pool, method, short)
    assert torch.equal(pool, split.pool_images)


def test_statistics_of_known_classes_move_with_the_features(
    known_model: Model, found_model: Model, split: Split
) -> None:
    before, after = known_model.statistics, found_model.statistics
    features = [model.features(split.pool_images) for model in (known_model, found_model)]
    assert torch.equal(after.means, Movement(*features)(before.means))
    assert torch.equal(after.counts, before.counts)
    # They come nearer to what the labelled pictures would tell, if they were still there.
    now = found_model.features(split.known_images)
    means = torch.stack([now[split.known_labels == label].mean(0) for label in range(4)])
    assert (after.means - means).norm() < 0.8 * (before.means - means).norm()


def test_history_has_an_entry_an_epoch(
    known_model: Model, split: Split, method: Method, short: Config
) -> None:
    history: History = []
    discover(known_model, split.pool_images, method, short, history=history)
    assert [(e.phase, e.epoch) for e in history] == [
        *(("discovery", 0), ("discovery", 1)),
        *(("settling", 0), ("settling", 1)),
    ]


def test_snapshots_are_finished_models_and_change_nothing(
    known_model: Model, split: Split, method: Method, short: Config
) -> None:
    taken: dict[int, Model] = {}
    watched: History = []
    alone: History = []
    config = replace(short, snapshot_epochs=1)
    found = discover(
        known_model,
        split.pool_images,
        method,
        config,
        history=watched,
        snapshot=taken.__setitem__,
    )
    plain = discover(known_model, split.pool_images, method, short, history=alone)
    assert fingerprint(found) == fingerprint(plain)
    assert timeless(watched) == timeless(alone)
    assert list(taken) == [1, 2]
    # The last one is the model itself, and the first one is another; both can predict.
    assert fingerprint(taken[2]) == fingerprint(found) != fingerprint(taken[1])
    for model in taken.values():
        assert not model.training
        assert model.identifier is not None
        assert float(model.identifier.calibrated_tau) != 0.5
        assert model.predict(split.test_images).labels.max() <= 5
    shared = {t.data_ptr() for t in found.state_dict().values()}
    assert not shared & {t.data_ptr() for m in taken.values() for t in m.state_dict().values()}


@pytest.mark.parametrize(("every", "wanted"), [(0, []), (2, [2, 4]), (3, [3]), (9, [])])
def test_snapshots_come_every_so_many_epochs(
    known_model: Model, split: Split, short: Config, every: int, wanted: list[int]
) -> None:
    taken: dict[int, Model] = {}
    four = replace(short.discovery, optim=replace(short.discovery.optim, epochs=4))
    config = replace(short, discovery=four, snapshot_epochs=every)
    discover(known_model, split.pool_images, LwF(), config, snapshot=taken.__setitem__)
    assert list(taken) == wanted


@pytest.mark.parametrize("num_novel", [1, 3])
def test_the_number_of_novel_classes_is_the_callers(
    known_model: Model, split: Split, method: Method, short: Config, num_novel: int
) -> None:
    config = replace(short, discovery=replace(short.discovery, num_novel=num_novel))
    found = discover(known_model, split.pool_images, method, config)
    assert found.num_novel == num_novel
    assert found.predict(split.test_images).labels.max() < 4 + num_novel


@pytest.mark.parametrize("num_pictures", [1, 3])
def test_a_pool_smaller_than_a_batch_will_do(
    known_model: Model, split: Split, method: Method, short: Config, num_pictures: int
) -> None:
    config = replace(short, discovery=replace(short.discovery, num_novel=1))
    found = discover(known_model, split.pool_images[:num_pictures], method, config)
    assert found.predict(split.test_images).labels.max() <= 4


@pytest.mark.parametrize(
    ("images", "words"),
    [
        (np.zeros((0, 1, 16, 16), np.uint8), "pool is empty"),
        ([], "."),
        (np.zeros((1, 1, 16, 16), np.uint8), "2 novel classes need a pool of 2 or more"),
        (np.zeros((8, 1, 8, 8), np.uint8), r"\(1, 8, 8\); this model reads \(1, 16, 16\)"),
        (np.zeros((8, 3, 16, 16), np.uint8), r"\(3, 16, 16\); this model reads"),
        (np.zeros((8, 1, 16, 16), np.float32), "float32; uint8"),
        (np.full((8, 1, 16, 16), np.nan), "NaN"),
        ([np.zeros((1, 16, 16), np.uint8), np.zeros((1, 8, 16), np.uint8)], "differ in size"),
        ("pool", "images"),
    ],
)
def test_bad_input_is_refused_with_the_offending_value(
    known_model: Model, method: Method, config: Config, images: Any, words: str
) -> None:
    with pytest.raises(InputError, match=words):
        discover(known_model, images, method, config)


def mixed(config: Config, num_novel: int = 2) -> Config:
    return replace(config, discovery=replace(config.discovery, pool="mixed", num_novel=num_novel))


def test_a_mixed_pool_is_one_without_the_pictures_that_look_known(
    known_model: Model, method: Method, short: Config
) -> None:
    images, labels = tiny_pictures(30, seed=5)
    heard: list[Survey] = []
    before = images.clone()
    with unchanged_global_state():
        found = discover(known_model, images, method, mixed(short), surveyed=heard.append)
    (surveyed,) = heard
    assert surveyed.sifted is not None
    assert surveyed.count is None  # somebody said so
    is_kept = surveyed.sifted.is_kept
    assert is_kept.shape == labels.shape
    assert is_kept[labels < 4].float().mean() < 0.2
    assert is_kept[labels >= 4].float().mean() > 0.9
    assert surveyed.sifted.known_share == pytest.approx(4 / 6, abs=0.2)
    assert torch.equal(images, before)

    alone = discover(known_model, images[is_kept], method, short)
    assert fingerprint(found) == fingerprint(alone)
    whole = discover(known_model, images, method, short)
    assert fingerprint(found) != fingerprint(whole)


def test_of_a_novel_pool_nothing_is_left_out(
    known_model: Model, method: Method, short: Config
) -> None:
    heard: list[Survey] = []
    images, _ = tiny_pictures(5, seed=5)
    found = discover(known_model, images, method, short, surveyed=heard.append)
    assert heard == [Survey(sifted=None, count=None)]
    assert fingerprint(found) == fingerprint(discover(known_model, images, method, short))


def test_classes_are_counted_with_the_seed_of_the_run(
    known_model: Model, method: Method, short: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    seeds: list[int] = []

    def count(features: Tensor, *, seed: int) -> ClassCount:
        seeds.append(seed)
        return ClassCount(number=2, low=2, high=2, curve={2: 1.0})

    monkeypatch.setattr("ncdwf.learning.survey.count_classes", count)
    config = override(replace(short, seed=5), "discovery.num_novel=0")
    discover(known_model, tiny_pictures(5, seed=5)[0], method, config)
    assert seeds == [5]


def test_a_mixed_pool_with_too_few_novel_pictures_is_refused(
    known_model: Model, method: Method, short: Config
) -> None:
    images, labels = tiny_pictures(100, seed=5)
    chosen = torch.cat([torch.nonzero(labels < 4), torch.nonzero(labels >= 4)[:20]]).flatten()
    with pytest.raises(InputError) as caught:
        discover(known_model, images[chosen], method, mixed(short, num_novel=200))
    assert re.fullmatch(
        r"\d\d of \d+ pictures look novel; 200 novel classes cannot be found among them",
        str(caught.value),
    )
    # As many classes can be found in the same pool if all of it is novel.
    few = replace(short, discovery=replace(short.discovery, num_novel=200))
    assert discover(known_model, images[chosen], method, few).num_novel == 200


@pytest.mark.parametrize(
    ("num_kept", "said"),
    [(1, "1 of 30 pictures looks novel"), (19, "19 of 30 pictures look novel")],
)
def test_classes_of_too_few_novel_pictures_in_a_mixed_pool_are_not_counted(
    known_model: Model,
    method: Method,
    short: Config,
    monkeypatch: pytest.MonkeyPatch,
    num_kept: int,
    said: str,
) -> None:
    def sifting(model: Model, images: Tensor) -> Sifted:
        return Sifted(torch.arange(len(images)) < num_kept, 0.5)

    monkeypatch.setattr("ncdwf.learning.survey.sift", sifting)
    with pytest.raises(InputError) as caught:
        discover(known_model, tiny_pictures(5, seed=5)[0], method, mixed(short, num_novel=0))
    assert str(caught.value) == (
        f"{said}; 20 or more are needed to count their classes; "
        "say how many novel classes there are instead"
    )


def test_a_mixed_pool_without_novel_pictures_is_refused(
    known_model: Model, method: Method, short: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing(model: Model, images: Tensor) -> Sifted:
        return Sifted(torch.zeros(len(images), dtype=torch.bool), 1.0)

    monkeypatch.setattr("ncdwf.learning.survey.sift", nothing)
    with pytest.raises(InputError, match="none of the pool's 30 pictures looks novel"):
        discover(known_model, tiny_pictures(5, seed=5)[0], method, mixed(short))


def test_to_a_later_round_the_classes_of_the_earlier_ones_are_known(
    found_model: Model, method: Method, short: Config
) -> None:
    heard: list[Survey] = []
    images, labels = tiny_pictures(100, seed=5)
    # A pattern that no class has.
    novel = torch.zeros_like(images[:100])
    novel[:, :, ::2] = 255
    noise = torch.randint(0, 30, novel.shape, generator=torch.Generator().manual_seed(0))
    pool = torch.cat([images[labels >= 4], (novel // 2 + noise).to(torch.uint8)])
    discover(found_model, pool, method, mixed(short, num_novel=1), surveyed=heard.append)
    assert heard[0].sifted is not None
    is_kept = heard[0].sifted.is_kept
    assert is_kept[200:].float().mean() > 0.8
    assert is_kept[:200].float().mean() < 0.5


def test_a_model_that_has_discovered_begins_another_round(
    found_model: Model, split: Split, method: Method, config: Config
) -> None:
    again = discover(found_model, split.pool_images, method, config)
    assert (
        again.known_names
        == found_model.class_names
        == (
            *("ant", "bee", "cat", "dog"),
            *("novel-1", "novel-2"),
        )
    )
    assert again.novel_names == ("novel-3", "novel-4")
    assert (again.num_known, again.architecture.num_discovered) == (6, 2)
    means = torch.cat([found_model.statistics.means, found_model.novel_statistics.means])  # type: ignore[union-attr]
    features = [model.features(split.pool_images) for model in (found_model, again)]
    assert torch.equal(again.statistics.means, Movement(*features)(means))
    assert again.predict(split.test_images).labels.max() < 8


def test_the_pool_leaves_the_statistics_of_the_novel_classes(
    found_model: Model, split: Split
) -> None:
    """Few pictures lie between two classes here, so degrees say the same as first choices."""
    statistics = found_model.novel_statistics
    assert statistics is not None
    features = found_model.features(split.pool_images)
    chosen = found_model.outputs(features).novel_logits[int(found_model.best_head)].argmax(1)
    assert torch.equal(statistics.counts, torch.bincount(chosen, minlength=2))
    for label in range(2):
        wanted = features[chosen == label].mean(0)
        assert F.cosine_similarity(statistics.means[label], wanted, dim=0) > 0.95


def entry(epoch: int, losses: list[float]) -> Epoch:
    terms: dict[str, float | list[float]] = {"cluster": losses, "distill": 0.0}
    return Epoch(
        phase="discovery", epoch=epoch, lr=0.1, terms=terms, seconds=1.0, images_per_second=1.0
    )


def test_best_head_has_the_least_loss_over_the_last_epoch() -> None:
    history = [entry(0, [0.1, 0.9, 0.9]), entry(1, [0.7, 0.6, 0.3]), entry(2, [0.5, 0.2, 0.4])]
    assert best_head(history) == 1
    assert best_head(history[:2]) == 2
    assert best_head(history[:1]) == 0


def test_the_best_head_answers(
    known_model: Model, split: Split, method: Method, short: Config
) -> None:
    answering = set()
    for seed in range(4):
        history: History = []
        config = replace(short, seed=seed)
        found = discover(known_model, split.pool_images, method, config, history=history)
        last = [epoch for epoch in history if epoch.phase == "discovery"][-1]
        losses = cast(list[float], last.terms["cluster"])
        assert int(found.best_head) == losses.index(min(losses))
        answering.add(int(found.best_head))
    assert answering == {0, 1}  # or a head that never changes would do


def test_a_method_from_outside_the_package_works(
    known_model: Model, split: Split, config: Config
) -> None:
    assert LwF.__name__ not in {kind.__name__ for kind in METHODS.values()}
    before = fingerprint(known_model)
    found = discover(known_model, split.pool_images, LwF(weight_distill=1.0), config)
    assert fingerprint(known_model) == before
    assert found.identifier is None
    scores, _ = evaluate(found, split, known_model)
    assert scores.aware.novel > 95
    assert scores.aware.known > 60
    assert scores.agnostic[0].rule == "softmax"
    answers = found.predict(split.test_images)
    assert set(answers.labels.tolist()) <= set(range(6))


def test_an_own_method_is_saved_and_loaded_like_any(
    tmp_path: Path, known_model: Model, split: Split, short: Config
) -> None:
    found = discover(known_model, split.pool_images, LwF(), short)
    found.save(tmp_path)
    loaded = Model.load(tmp_path)
    answers = [m.predict(split.test_images) for m in (found, loaded)]
    assert torch.equal(answers[0].labels, answers[1].labels)
    assert torch.equal(answers[0].novelty, answers[1].novelty)


def test_a_method_registers_under_one_name_and_is_built_by_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ncdwf.learning.discovery.METHODS", {})
    assert register("lwf")(LwF) is LwF
    assert make_method({"name": "lwf", "weight_distill": 2}) == LwF(weight_distill=2.0)
    with pytest.raises(AssertionError, match="lwf"):
        register("lwf")(LwF)
    with pytest.raises(InputError, match="unknown method 'lfw'; there are lwf"):
        make_method({"name": "lfw"})
    with pytest.raises(InputError, match="did you mean 'weight_distill'"):
        make_method({"name": "lwf", "weight_distil": 2.0})


def test_the_teacher_is_a_frozen_copy(known_model: Model, split: Split) -> None:
    teacher = Teacher(known_model).train()
    assert not any(part.training for part in teacher.model.modules())
    assert not any(p.requires_grad for p in teacher.parameters())
    assert all(p.requires_grad for p in known_model.parameters())
    features = teacher.features(split.test_images)
    assert torch.equal(features, known_model.features(split.test_images))
    assert not features.requires_grad
    with torch.no_grad():
        assert torch.equal(teacher.known_logits(features), known_model.known_head(features))


def test_what_was_learnt_stays_at_a_rate_of_0_and_the_new_heads_learn(
    known_model: Model, split: Split, short: Config
) -> None:
    config = replace(short, discovery=replace(short.discovery, backbone_rate=0.0))
    method = make_method({"name": "uno"})
    model = discover(known_model, split.pool_images, method, config)
    freed = discover(known_model, split.pool_images, method, short)
    learnt = ("backbone", "known_head")
    for part in learnt:
        for name, before in known_model.get_submodule(part).named_parameters():
            assert torch.equal(model.get_submodule(part).get_parameter(name), before)
    assert model.novel_head is not None
    start = known_model.with_novel(model.architecture.novel, identifier=False, seed=config.seed)
    assert start.novel_head is not None
    heads = zip(model.novel_head.parameters(), start.novel_head.parameters(), strict=True)
    assert all(not torch.equal(after, before) for after, before in heads)
    for part in learnt:
        assert any(
            not torch.equal(freed.get_submodule(part).get_parameter(name), before)
            for name, before in known_model.get_submodule(part).named_parameters()
        )


def test_views_reach_the_method_augmented_and_in_number(
    known_model: Model, split: Split, short: Config
) -> None:
    seen: list[Tensor] = []
    seen_small: list[Tensor | None] = []

    class Watcher(LwF):
        __slots__ = ()

        def loss(
            self, model: Model, views: Views, state: nn.Module, progress: Tensor, noise: Noise
        ) -> Terms:
            seen.append(views.large)
            seen_small.append(views.small)
            return LwF.loss(self, model, views, state, progress, noise)

    config = replace(short, discovery=replace(short.discovery, num_large=3))
    discover(known_model, split.pool_images, Watcher(), config)
    assert [tuple(views.shape) for views in seen] == [(3, 32, 1, 16, 16)] * 4
    assert not torch.equal(seen[0][0], seen[0][1])
    assert seen_small == [None] * 4

    convolution = nn.Conv2d(1, 4, 3, padding=1)
    of_any_size = nn.Sequential(convolution, nn.AdaptiveAvgPool2d(2), nn.Flatten())
    any_model = learn_known(split.known_images, split.known_labels, short, backbone=of_any_size)
    seen.clear()
    seen_small.clear()
    part = View(size=5, resized=1.0)
    config = replace(short, discovery=replace(short.discovery, small=part, num_small=2))
    discover(any_model, split.pool_images, Watcher(), config)
    assert [tuple(views.shape) for views in seen] == [(2, 32, 1, 16, 16)] * 4
    small = [views for views in seen_small if views is not None]
    assert [tuple(views.shape) for views in small] == [(2, 32, 1, 5, 5)] * 4
    assert not torch.equal(small[0][0], small[0][1])

    seen.clear()
    plain = replace(short, discovery=replace(short.discovery, large=View()))
    discover(known_model, split.pool_images, Watcher(), plain)
    assert torch.equal(seen[0][0], seen[0][1])


def test_small_views_that_the_network_cannot_read_are_refused_before_anything_is_trained(
    monkeypatch: pytest.MonkeyPatch,
    known_model: Model,
    found_model: Model,
    split: Split,
    method: Method,
    short: Config,
) -> None:
    monkeypatch.setattr("ncdwf.learning.discovery.promote", None)
    monkeypatch.setattr("ncdwf.learning.discovery.survey", None)
    small = replace(short.discovery, small=View(size=5, resized=1.0), num_small=2)
    said = (
        r"^this backbone cannot read small views of shape \(1, 5, 5\); set discovery.num_small=0$"
    )
    for model in (known_model, found_model):
        before = fingerprint(model)
        with pytest.raises(InputError, match=said):
            discover(model, split.pool_images, method, replace(short, discovery=small))
        assert fingerprint(model) == before


def test_finishing_knows_the_seed_and_how_the_pool_has_moved(
    known_model: Model, split: Split, short: Config
) -> None:
    heard: list[Outcome] = []

    class Listener(LwF):
        __slots__ = ()

        def finish(self, model: Model, state: nn.Module, outcome: Outcome) -> None:
            heard.append(outcome)
            LwF.finish(self, model, state, outcome)

    found = discover(known_model, split.pool_images, Listener(), replace(short, seed=5))
    (outcome,) = heard
    assert outcome.seed == 5
    assert torch.equal(outcome.before, known_model.features(split.pool_images))
    assert torch.equal(outcome.after, found.features(split.pool_images))
    assert not torch.equal(outcome.before, outcome.after)


def test_all_of_a_later_round_runs_on_the_engine_asked_for(
    found_model: Model,
    split: Split,
    method: Method,
    short: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[Engine] = []

    def choose(engine: Engine, _: torch.device) -> Engine:
        asked.append(engine)
        return "eager"

    monkeypatch.setattr("ncdwf.learning.loop.choose_engine", choose)
    discover(found_model, split.pool_images, method, replace(short, engine="captured"))
    assert asked == ["captured"] * 3  # promotion, discovery, settling


def test_resuming_changes_nothing(
    tmp_path: Path, known_model: Model, split: Split, method: Method, short: Config
) -> None:
    def run(checkpoints: Checkpoints | None, progress: Quiet) -> tuple[Model, History]:
        history: History = []
        model = discover(
            known_model,
            split.pool_images,
            method,
            short,
            checkpoints=checkpoints,
            progress=progress,
            history=history,
        )
        return model, history

    whole, wanted = run(None, Quiet())
    # Four steps of discovery, then steps of the identifier that is fitted after them.
    for steps in (2, 4, 7):
        checkpoints = Checkpoints(tmp_path / str(steps), seconds=0.0, fingerprint="a")
        with pytest.raises(Stop):
            run(checkpoints, StopAfter(steps))
        resumed, history = run(checkpoints, Quiet())
        assert fingerprint(resumed) == fingerprint(whole)
        assert timeless(history) == timeless(wanted)


def tried(config: Config, tries: int, seed: int) -> Config:
    return replace(config, seed=seed, discovery=replace(config.discovery, tries=tries))


class Headless(LwF):
    """Has no term of clustering heads."""

    __slots__ = ()

    def loss(self, *parts: Any) -> Terms:
        return {f"own {name}": term for name, term in LwF.loss(self, *parts).items()}

    def finish(self, *_: Any) -> None:
        pass


@pytest.mark.parametrize("name", ["ncdwf", "uno", "headless"])
def test_of_several_tries_the_one_whose_clusters_fit_half_way_is_kept(
    known_model: Model, split: Split, short: Config, name: str
) -> None:
    method = Headless() if name == "headless" else make_method({"name": name})
    short = override(short, "discovery.optim.epochs=5")

    def run(tries: int, seed: int) -> tuple[Model, History]:
        history: History = []
        config = tried(short, tries, seed)
        model = discover(known_model, split.pool_images, method, config, history=history)
        return model, history

    def misfit(history: History) -> float:
        terms = [entry for entry in history if entry.phase == "discovery"][2].terms
        if name != "headless":
            return float(np.min(terms["cluster"]))
        return sum(float(np.mean(term)) for term in terms.values())

    alone = {seed: run(1, seed) for seed in (3, 4, 5, 6)}
    losses = {seed: misfit(history) for seed, (_, history) in alone.items()}
    first = next(seed for seed in (3, 4, 5) if losses[seed + 1] < losses[seed])
    best, wanted = alone[first + 1]
    model, history = run(2, first)
    assert fingerprint(model) == fingerprint(best)
    assert timeless(history) == timeless(wanted)
    assert {entry.seed for entry in history} == {first + 1}


class Losses(Training):
    """A training of which nothing is known but its losses."""

    def __init__(self, losses: list[float]) -> None:
        self.losses, self.history = losses, []

    def run(self, until: int | None = None, *, title: str | None = None) -> History:
        assert until is not None
        for epoch in range(len(self.history), until):
            if np.isnan(self.losses[epoch]):
                raise NonFiniteError(f"epoch {epoch}")
            terms: dict[str, float | list[float]] = {"cluster": [9.0, float(self.losses[epoch])]}
            entry = Epoch(
                phase="discovery",
                epoch=epoch,
                lr=0.0,
                terms=terms,
                seconds=1.0,
                images_per_second=1.0,
            )
            self.history.append(entry)
        return self.history


def tries_of(model: Model, losses: list[list[float]]) -> list[discovery._Try]:
    state = nn.Module()
    return [discovery._Try(n, model, state, Losses(each)) for n, each in enumerate(losses, 1)]


@pytest.mark.parametrize(
    ("losses", "best", "ran"),
    [
        ([[3, 2, 1, 9], [1, 3, 2, 2], [2, 4, 3, 1]], 0, [4, 2, 2]),  # two of four epochs
        ([[3, 2, 3], [1, 3, 2], [2, 2.5, 3]], 0, [3, 2, 2]),  # two of three
        ([[2], [1], [3]], 1, [1, 1, 1]),
        ([[5, 2, 1, 1], [5, 1, np.nan, 1], [5, 3, 0, 0]], 0, [4, 2, 2]),  # diverges too late
        ([[5, np.nan, 1, 1], [5, 1, np.nan, 1], [5, 3, 0, 0]], 2, [1, 2, 4]),
        ([[4, 3, 2, 1]], 0, [4]),
    ],
)
def test_the_best_try_half_way_is_the_one_that_goes_on(
    known_model: Model, losses: list[list[float]], best: int, ran: list[int]
) -> None:
    tries = tries_of(known_model, losses)
    assert discovery._best(list(tries), len(losses[0])) is tries[best]
    assert [len(one.training.history) for one in tries] == ran


def test_a_try_that_is_past_its_half_is_judged_by_what_it_had_there(known_model: Model) -> None:
    tries = tries_of(known_model, [[5.0, 2.0, 9.0, 9.0], [5.0, 3.0, 0.0, 0.0]])
    tries[0].training.run(3)  # resumed from later
    assert discovery._best(list(tries), 4) is tries[0]


def test_where_the_last_try_diverges_late_the_error_is_told(known_model: Model) -> None:
    tries = tries_of(known_model, [[np.nan, 5], [5, np.nan]])
    with pytest.raises(NonFiniteError, match="epoch 1"):  # of the one that came farthest
        discovery._best(tries, 2)
    with pytest.raises(NonFiniteError, match="epoch 0"):
        discovery._best(tries_of(known_model, [[np.nan, 1]]), 2)


class Diverging(LwF):
    """Ends in NaN with some seeds."""

    __slots__ = ()
    bad_seeds: ClassVar[set[int]] = set()

    def prepare(self, model: Model, num_novel: int, *, seed: int) -> tuple[Model, nn.Module]:
        found, state = LwF.prepare(self, model, num_novel, seed=seed)
        if seed in self.bad_seeds:
            with torch.no_grad():
                found.known_head.prototypes.fill_(torch.nan)
        return found, state


@pytest.mark.parametrize("bad", [{4}, {3}, {3, 4}, {4, 5}])
def test_a_try_that_diverges_does_not_count(
    known_model: Model,
    split: Split,
    short: Config,
    bad: set[int],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Diverging, "bad_seeds", bad)
    histories: list[History] = []
    for config in (tried(short, 3, 3), *(tried(short, 1, seed) for seed in {3, 4, 5} - bad)):
        histories.append([])
        discover(known_model, split.pool_images, Diverging(), config, history=histories[-1])
    of_tries, *alone = map(timeless, histories)
    assert of_tries in alone
    told = [record.message for record in caplog.records]
    assert len(told) == len(bad)
    assert all(
        f"try {seed - 2} of 3 does not count: " in message
        for seed, message in zip(sorted(bad), told, strict=True)
    )


def test_where_every_try_diverges_there_is_nothing(
    known_model: Model,
    split: Split,
    short: Config,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(Diverging, "bad_seeds", {3, 4, 5})
    with pytest.raises(NonFiniteError, match="discovery phase"):
        discover(known_model, split.pool_images, Diverging(), tried(short, 3, 3))
    assert len(caplog.records) == 2  # the third is the error


def test_resuming_goes_on_in_the_try_that_was_cut_off(
    tmp_path: Path, known_model: Model, split: Split, method: Method, short: Config
) -> None:
    config = tried(short, 3, 0)
    whole = discover(known_model, split.pool_images, method, config)
    # Two steps of each try, then two more of the one that is kept.
    for steps in (1, 3, 4, 6, 7):
        checkpoints = Checkpoints(tmp_path / str(steps), seconds=0.0, fingerprint="a")
        counted = StopAfter(steps)
        with pytest.raises(Stop):
            discover(
                known_model,
                split.pool_images,
                method,
                config,
                checkpoints=checkpoints,
                progress=counted,
            )
        rest = Steps()
        resumed = discover(
            known_model, split.pool_images, method, config, checkpoints=checkpoints, progress=rest
        )
        assert fingerprint(resumed) == fingerprint(whole)
        # What was cut off had not been kept yet.
        left = {f"discovery {n + 1}/3": min(2, 2 * n + 3 - steps) for n in range(3)}
        wanted = {title: num for title, num in left.items() if num > 0} | {
            "discovery": min(2, 9 - steps)
        }
        assert {t: num for t, num in rest.of.items() if t.startswith("discovery")} == wanted


class Steps(Quiet):
    """Counts the steps of every phase."""

    def __init__(self) -> None:
        self.of: dict[str, int] = {}

    def start(self, task: str, total: int, done: int, /) -> None:
        self._task = task
        self.of.setdefault(task, 0)

    def advance(self, number: int, /) -> None:
        self.of[self._task] += 1


# In a process of its own: the shape checks of the tests would be compiled, too.
COMPILED = """
import json
import sys

import torch

from ncdwf.config import override
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.supervised import learn_known
from ncdwf.recipes import recipe
from ncdwf.results.configuration import complete

torch.set_num_threads(1)
config = complete(recipe("digits-5-5"))
for phase in ("supervised.optim", "discovery.optim", "method.settling"):
    for field in ("epochs=1", "batch_size=32"):
        config = override(config, f"{phase}.{field}")
source = torch.Generator().manual_seed(0)
images = torch.randint(0, 256, (96, 1, 8, 8), dtype=torch.uint8, generator=source)
compile_, graphs, models = torch.compile, [], {}


def note(graph, _):
    graphs.append([str(node.target) for node in graph.graph.nodes])
    return graph.forward


torch.compile = lambda function, **options: compile_(function, backend=note, **options)
for engine in ("eager", "compiled"):
    chosen = override(config, f"engine={engine}")
    known = learn_known(images, torch.arange(96) % 4, chosen)
    models[engine] = discover(known, images, make_method(chosen.method), chosen).state_dict()
same = [torch.allclose(models["eager"][n], t, atol=1e-5) for n, t in models["compiled"].items()]
print(json.dumps({"same": all(same), "graphs": graphs}))
"""


@pytest.mark.slow
def test_networks_are_compiled_apart_from_views_and_losses() -> None:
    """What takes longest to compile is the same for every method, and found in the cache."""
    command = [sys.executable, "-W", "ignore", "-c", COMPILED]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    found = json.loads(answer.stdout.splitlines()[-1])
    assert found["same"]

    def holding(word: str) -> list[list[str]]:
        return [graph for graph in found["graphs"] if any(word in target for target in graph)]

    networks = holding("conv2d")
    assert len(networks) == 3  # of the supervised phase, and then beside its teacher
    for word in ("grid_sample", "cross_entropy", "logsumexp"):  # views, replay, self-labelling
        assert holding(word), word
        assert not any(graph in networks for graph in holding(word)), word

"""The contract that every registered method keeps, and the parts of each one by one."""

import copy
import dataclasses
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, cast

import pytest
import torch
from conftest import SHORT_METHOD, TINY_METHOD, fields_of, fingerprint, shorter
from torch import Tensor, nn
from torch.nn import functional as F

import ncdwf.methods
from ncdwf.config import Config, Optim, View, from_dict
from ncdwf.data.augment import Views, augment_views, num_draws
from ncdwf.data.setting import Split
from ncdwf.errors import InputError
from ncdwf.learning.clustering import Clustering
from ncdwf.learning.discovery import METHODS, Method, Outcome, discover, make_method
from ncdwf.learning.loop import Epoch, History, Terms
from ncdwf.methods.ncdwf import State
from ncdwf.model import Model
from ncdwf.model.replay import invert
from ncdwf.noise import Draw, Noise, draw, generator
from ncdwf.results.evaluation import evaluate

NAMES = sorted(METHODS)
FORGETFUL = {"uno"}
"""Methods that protect no known class: they may come to call every picture novel."""
every_method = pytest.mark.parametrize("name", NAMES)


SMALL = View(resized=1.0, min_area=0.3, max_area=0.8)
"""Parts of the pictures, at their size: the small backbone reads no other."""
SIZES = {
    "num_heads": 3,
    "num_hidden": 5,
    "num_projected": 7,
    "overclustering": 4,
    "temperature": 0.2,
}


def small(name: str, **changes: Any) -> Method:
    """Return a method by name, made small where it has a field for it."""
    return make_method({"name": name, **fields_of(name, SHORT_METHOD), **changes})


@pytest.fixture(scope="module")
def discovered(
    known_model: Model, split: Split, config: Config
) -> dict[str, tuple[Model, History, float]]:
    """Every method's model, history and seconds on the tiny setting, made when asked for."""

    class Results(dict[str, tuple[Model, History, float]]):
        def __missing__(self, name: str) -> tuple[Model, History, float]:
            history: History = []
            method = make_method({"name": name, **fields_of(name, TINY_METHOD)})
            start = time.monotonic()
            model = discover(known_model, split.pool_images, method, config, history=history)
            self[name] = (model, history, time.monotonic() - start)
            return self[name]

    return Results()


def make_views(split: Split, config: Config, num_small: int = 0, small_seed: int = 0) -> Views:
    """Return two large views of sixteen pictures of the pool, and as many small ones as wanted."""

    def some(view: View, count: int, *position: str | int) -> Tensor:
        wanted = {"views": Draw(kind="uniform", shape=(count, 16, num_draws(view)))}
        noise = draw(wanted, 1, generator(0, *position))["views"][0]
        return augment_views(split.pool_images[:16], view, noise)

    large = some(config.discovery.large, 2, "large")
    if num_small == 0:
        return Views(large=large)
    return Views(large=large, small=some(SMALL, num_small, "small", small_seed))


def one_loss(
    method: Method,
    known: Model,
    split: Split,
    config: Config,
    views: Views | None = None,
    prepared: tuple[Model, nn.Module] | None = None,
    progress: float = 0.0,
) -> tuple[Model, Terms]:
    """Return the prepared model and the terms of one step in training mode."""
    model, state = prepared or method.prepare(known, 2, seed=0)
    model.train()
    state.train()
    views = views or make_views(split, config)
    return model, method.loss(model, views, state, torch.tensor(progress), one_noise(method, state))


def one_noise(method: Method, state: nn.Module) -> Noise:
    """Return what `one_loss` draws."""
    drawn = draw(method.noise(state, 16), 1, generator(0, "test"))
    return {key: value[0] for key, value in drawn.items()}


def test_every_file_of_the_package_registers_one_method() -> None:
    files = {path.stem for path in Path(ncdwf.methods.__file__).parent.glob("*.py")}
    modules = {kind.__module__.rpartition(".")[2] for kind in METHODS.values()}
    assert modules == files - {"__init__"}


@every_method
def test_docstring_names_the_paper(name: str) -> None:
    first = (METHODS[name].__doc__ or "").splitlines()[0]
    assert re.search(r"\(.+, .*(19|20)\d\d\)", first), first


@every_method
def test_fields_pass_through_json_unchanged(name: str) -> None:
    for method in (METHODS[name](), small(name)):
        assert from_dict(METHODS[name], json.loads(json.dumps(asdict(method)))) == method
        assert make_method({"name": name, **dataclasses.asdict(method)}) == method  # type: ignore[call-overload]


@every_method
def test_is_frozen(name: str) -> None:
    method = METHODS[name]()
    for item in dataclasses.fields(method):  # type: ignore[arg-type]
        with pytest.raises(dataclasses.FrozenInstanceError):
            setattr(method, item.name, getattr(method, item.name))


@every_method
def test_terms_are_named_finite_and_reach_backbone_and_novel_head(
    name: str, known_model: Model, split: Split, config: Config
) -> None:
    model, terms = one_loss(small(name), known_model, split, config)
    assert terms
    assert all(key.isidentifier() for key in terms)
    for key, term in terms.items():
        assert term.isfinite().all(), key
        assert term.ndim <= 1, key
    torch.stack([term.float().mean() for term in terms.values()]).sum().backward()
    assert model.novel_head is not None
    for part in (model.backbone, model.novel_head):
        for key, parameter in part.named_parameters():
            assert parameter.grad is not None, key
            assert parameter.grad.isfinite().all(), key
            assert parameter.grad.abs().max() > 0, key


@every_method
def test_preparing_is_repeatable_and_leaves_the_model_alone(name: str, known_model: Model) -> None:
    before = fingerprint(known_model)
    prepared = [small(name).prepare(known_model, 2, seed=seed) for seed in (0, 0, 1)]
    prints = [(fingerprint(model), fingerprint(state)) for model, state in prepared]
    assert prints[0] == prints[1]
    assert prints[0][0] != prints[2][0]
    drawn = [state.get_parameter("overclusters.prototypes") for _, state in prepared]
    assert not torch.equal(drawn[0], drawn[2])
    assert fingerprint(known_model) == before


@every_method
def test_loss_falls(name: str, discovered: dict[str, tuple[Model, History, float]]) -> None:
    history = [epoch for epoch in discovered[name][1] if epoch.phase == "discovery"]
    assert len(history) * 2 >= 20  # two steps an epoch
    totals = [
        sum(float(torch.tensor(term).mean()) for term in epoch.terms.values()) for epoch in history
    ]
    assert totals[-1] < 0.8 * totals[0]


@every_method
def test_takes_less_than_five_seconds(
    name: str, discovered: dict[str, tuple[Model, History, float]]
) -> None:
    assert discovered[name][2] < 5


@every_method
def test_same_seed_same_weights_and_other_seed_others(
    name: str, known_model: Model, split: Split, config: Config
) -> None:
    short = shorter(config)
    prints = [
        fingerprint(
            discover(known_model, split.pool_images, small(name), replace(short, seed=seed))
        )
        for seed in (0, 0, 1)
    ]
    assert prints[0] == prints[1] != prints[2]


@every_method
def test_predictions_stay_within_the_classes(
    name: str, discovered: dict[str, tuple[Model, History, float]], split: Split
) -> None:
    model = discovered[name][0]
    noise = torch.randint(
        0, 256, (64, 1, 16, 16), generator=generator(0, "pictures"), dtype=torch.uint8
    )
    answers = model.predict(torch.cat([split.test_images, noise]))
    assert set(answers.labels.tolist()) <= set(range(6))
    found = set(model.predict(split.test_images).labels.tolist())
    assert found >= set(range(4 if name in FORGETFUL else 0, 6))
    for values in (answers.probability, answers.novelty):
        assert ((values >= 0) & (values <= 1)).all()


@every_method
def test_saving_and_loading_changes_no_prediction(
    tmp_path: Path,
    name: str,
    discovered: dict[str, tuple[Model, History, float]],
    split: Split,
) -> None:
    model = discovered[name][0]
    model.save(tmp_path)
    loaded = Model.load(tmp_path)
    assert fingerprint(loaded) == fingerprint(model)
    before, after = model.predict(split.test_images), loaded.predict(split.test_images)
    for part in ("labels", "probability", "novelty"):
        assert torch.equal(getattr(before, part), getattr(after, part))


ALONE = {**SHORT_METHOD["clustering"], "overclustering": 0}
ALL = {"backbone", "known_head", "novel_head", "identifier"}
SWITCHED: dict[str, tuple[Any, set[str]]] = {
    # The novel heads do not see the latents, so replay teaches the known head alone.
    "weight_replay": (0.0, {"known_head"}),
    "replay_ratio": (0.5, {"known_head"}),
    "weight_information": (0.0, ALL),
    "weight_distill": (0.0, ALL),
    "softmax": ("joint", ALL),
    "norms": ("held", ALL),
    "information_from": ("current", ALL),
    "clustering": (ALONE, ALL),
    # When heads are fitted must not change what discovery learns.
    "identifier": ("during", {"identifier", "known_head"}),
    "novel_lost": (0.6, {"identifier"}),
    "least_tau": (1 - 1e-12, {"identifier"}),
}
"""Another value of each part of the method, and the parts of the model that it changes."""
OFF = {
    "weight_replay": "replay",
    "weight_information": "information",
    "weight_distill": "distill",
    "clustering": "overcluster",
}
"""The term that is gone, or 0, with that value of a part."""
ON: dict[str, Any] = {
    "weight_replay": 1.0,
    "replay_ratio": 0.25,
    "weight_information": 0.5,
    "weight_distill": 3.0,
    "softmax": "separate",
    "norms": "pool",
    "information_from": "frozen",
    "clustering": SHORT_METHOD["clustering"],
    "identifier": "after",
    "novel_lost": 0.2,
    "least_tau": 0.0,
}


@pytest.fixture(scope="module")
def whole(known_model: Model, split: Split, config: Config) -> tuple[Model, History]:
    """The method with every part switched on, after a short discovery."""
    return short_discovery(known_model, split, config, ON)


def short_discovery(
    known: Model, split: Split, config: Config, changes: dict[str, Any]
) -> tuple[Model, History]:
    history: History = []
    method = small("ncdwf", **changes)
    model = discover(known, split.pool_images, method, shorter(config), history=history)
    return model, history


@pytest.mark.parametrize("part", SWITCHED)
def test_each_part_can_be_switched_on_its_own(
    part: str,
    known_model: Model,
    split: Split,
    config: Config,
    whole: tuple[Model, History],
) -> None:
    value, changes = SWITCHED[part]
    model, history = short_discovery(known_model, split, config, {**ON, part: value})
    found = {
        name
        for name in ALL
        if fingerprint(getattr(model, name)) != fingerprint(getattr(whole[0], name))
    }
    assert found == changes
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    if part in OFF:
        assert mean_of(whole[1], OFF[part]) > 0
        assert mean_of(history, OFF[part]) == 0


def mean_of(history: History, term: str) -> float:
    """Return the mean of a term over the first epoch; a term that is not there is 0."""
    value = torch.tensor(history[0].terms.get(term, 0.0))
    return float(value.mean())


def test_everything_off_is_still_a_method(known_model: Model, split: Split, config: Config) -> None:
    off = {part: SWITCHED[part][0] for part in OFF}
    model, history = short_discovery(known_model, split, config, {**ON, **off})
    assert model.predict(split.test_images).labels.max() <= 5
    assert {"cluster", "replay", "distill"} == set(history[0].terms)


def test_the_frozen_target_of_information_does_not_move_and_the_current_one_has_no_gradient(
    known_model: Model, split: Split, config: Config
) -> None:
    for source in ("frozen", "current"):
        method = small("ncdwf", weight_information=1.0, information_from=source)
        model, terms = one_loss(method, known_model, split, config)
        terms["information"].mean().backward()
        assert model.known_head.prototypes.grad is None


def test_the_weight_of_information_scales_the_push_on_the_heads_and_not_the_regressor(
    known_model: Model, split: Split, config: Config
) -> None:
    heads, values = {}, {}
    for weight in (0.1, 0.2):
        method = small("ncdwf", weight_information=weight)
        model, state = method.prepare(known_model, 2, seed=0)
        regressor = cast(State, state).regressor
        with torch.no_grad():  # the last layer starts at 0 and would stop every gradient
            regressor.layers[-1].fill_(0.1)
        terms = one_loss(method, known_model, split, config, prepared=(model, state))[1]
        terms["information"].mean().backward()
        assert model.novel_head is not None
        heads[weight] = [p.grad for p in model.novel_head.parameters()]
        values[weight] = [terms["information"], *(p.grad for p in regressor.parameters())]
    torch.testing.assert_close(heads[0.2], [2 * gradient for gradient in heads[0.1]])
    torch.testing.assert_close(values[0.2], values[0.1])
    assert all(gradient.abs().max() > 0 for gradient in heads[0.1])


# Three temperatures that differ, and assignments that depend on how far discovery is.
COLD = 0.05
SOFT = {**SHORT_METHOD["clustering"], "temperature": 0.2, "balance": 0.5}
PROGRESS = 0.7


def cold(known: Model) -> Model:
    """Return a copy whose known head learnt with a temperature of its own."""
    made = copy.deepcopy(known)
    made.architecture = replace(made.architecture, temperature=COLD)
    return made


@pytest.mark.parametrize("information_from", ["frozen", "current"])
@pytest.mark.parametrize("softmax", ["separate", "joint"])
def test_the_terms_of_one_step_by_hand(
    softmax: str, information_from: str, known_model: Model, split: Split, config: Config
) -> None:
    changes = {"softmax": softmax, "information_from": information_from, "identifier": "during"}
    method = small("ncdwf", clustering=SOFT, weight_replay=2.0, **changes)
    model, made = prepared = method.prepare(cold(known_model), 2, seed=0)
    state = cast(State, made)
    with torch.no_grad():
        state.regressor.layers[-1].fill_(0.1)  # it starts at 0, where no logit matters
        model.known_head.prototypes.add_(0.3)  # as if some steps had been done
    views = make_views(split, config)
    terms = one_loss(
        method, known_model, split, config, views, prepared=prepared, progress=PROGRESS
    )[1]

    temperature = SOFT["temperature"] if softmax == "joint" else COLD
    large = views.large.flatten(0, 1)
    pool = model.backbone(large)
    latents, labels = state.memory.sample(one_noise(method, state))
    rows = torch.cat([pool, latents])
    known = model.known_head(rows) / temperature
    replays = []
    for name, head in (("cluster", model.novel_head), ("overcluster", state.overclusters)):
        assert head is not None
        cosines = head(rows if softmax == "joint" else pool)
        num_clusters = cosines.shape[2]
        novel, answers = cosines / SOFT["temperature"], known.expand(len(cosines), -1, -1)
        told = novel
        if softmax == "joint":
            told, answers = (torch.cat(both, 2) for both in ((novel, answers), (answers, novel)))
        chosen = Clustering(**SOFT).assign(
            cosines[:, :32].unflatten(1, (2, 16)), torch.tensor(PROGRESS)
        )
        found = told.log_softmax(2)[:, :32, :num_clusters].unflatten(1, (2, 16))
        swapped = -(chosen.flip(1) * found).sum(3).mean((1, 2))
        torch.testing.assert_close(terms[name], swapped / 2)
        replays.append(-answers.log_softmax(2)[:, range(32, 36), labels].mean())
        if name == "cluster":
            teacher = state.teacher.model
            old = teacher.known_head(teacher.backbone(large)) / temperature
            target = old if information_from == "frozen" else known[:32]
            torch.testing.assert_close(terms["information"], state.regressor(novel[:, :32], target))
    torch.testing.assert_close(terms["replay"], 2 * torch.stack(replays).mean())
    assert model.identifier is not None
    right = 1 - model.identifier.novelty(latents), model.identifier.novelty(pool)
    surprise = -sum(answer.log().mean().item() for answer in right) / 2
    assert terms["identify"].item() == pytest.approx(surprise, rel=1e-4)


@pytest.mark.parametrize("seed", [0, 1])
def test_latents_are_inverted_at_the_temperature_that_the_known_head_learnt_with(
    known_model: Model, seed: int
) -> None:
    head = known_model.known_head.prototypes.detach()
    for softmax in ("separate", "joint"):
        _, state = small("ncdwf", softmax=softmax).prepare(cold(known_model), 2, seed=seed)
        start = torch.randn(4, 20, head.shape[1], generator=generator(seed, "inversion"))
        inverted = invert(head, start, num_iterations=10, temperature=COLD)
        torch.testing.assert_close(
            F.normalize(cast(State, state).memory.bank, dim=2), F.normalize(inverted, dim=2)
        )


@pytest.mark.parametrize("name", ["ncdwf", "ncdwf-gauss"])
def test_what_is_settled_after_discovery_is_the_methods(
    name: str, known_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: dict[str, Any] = {}
    module = METHODS[name].__module__
    monkeypatch.setattr(f"{module}.settle", lambda *_, **settings: given.update(settings))
    settings = {"weight_replay": 2.5, "novel_lost": 0.3, "least_tau": 0.1}
    optim = Optim(epochs=3, batch_size=16, lr=0.2)
    method = small(name, **settings, settling=asdict(optim), **fields_of(name, {"tau": 0.7}))
    last = Epoch(
        phase="discovery",
        epoch=0,
        lr=0.0,
        terms={"cluster": [2.0, 1.0]},
        seconds=1.0,
        images_per_second=1.0,
    )
    features = torch.zeros(1, known_model.backbone.num_features)
    outcome = Outcome(
        before=features, after=features, history=[last], seed=0, engine="auto", progress=None
    )
    model, state = method.prepare(known_model, 2, seed=0)
    method.finish(model, state, outcome)
    tau = 0.7 if name == "ncdwf" else "calibrated"
    assert given == {**settings, "optim": optim, "tau": tau}
    assert int(model.best_head) == 1


@pytest.mark.parametrize(("ratio", "num_latents"), [(0.25, 4), (0.5, 8), (2.0, 32), (0.01, 1)])
@pytest.mark.parametrize("name", ["ncdwf", "ncdwf-gauss"])
def test_as_many_latents_are_replayed_as_asked_for(
    name: str, ratio: float, num_latents: int, known_model: Model
) -> None:
    method = small(name, replay_ratio=ratio)
    _, state = method.prepare(known_model, 2, seed=0)
    latents, _ = cast(State, state).memory.sample(one_noise(method, state))
    assert len(latents) == num_latents


def test_identifier_during_adds_a_term_that_does_not_reach_the_backbone(
    known_model: Model, split: Split, config: Config
) -> None:
    model, terms = one_loss(small("ncdwf", identifier="during"), known_model, split, config)
    terms["identify"].backward()
    assert model.identifier is not None
    assert all(p.grad is not None for p in model.identifier.parameters())
    assert all(p.grad is None for p in model.backbone.parameters())  # type: ignore[attr-defined]
    assert "identify" not in one_loss(small("ncdwf"), known_model, split, config)[1]


@pytest.mark.parametrize("tau", [0.3, "calibrated"])
def test_tau_is_the_methods(
    tau: float | str, known_model: Model, split: Split, config: Config, whole: tuple[Model, History]
) -> None:
    model, _ = short_discovery(known_model, split, config, {**ON, "tau": tau})
    assert model.identifier is not None
    calibrated = float(model.identifier.calibrated_tau)
    assert model.tau == (calibrated if tau == "calibrated" else tau)
    assert whole[0].tau == 0.5
    assert fingerprint(model.backbone) == fingerprint(whole[0].backbone)  # type: ignore[arg-type]


@pytest.mark.parametrize("spread", ["shared-diagonal", "shared", "per-class"])
def test_gaussian_replay_reads_every_spread(
    spread: str, known_model: Model, split: Split, config: Config
) -> None:
    architecture = replace(known_model.architecture, spread=spread)
    model = Model.create(architecture, known_model.known_names, seed=0)
    eye = torch.eye(model.backbone.num_features)
    shapes = {"shared-diagonal": eye[0] + 1, "shared": eye, "per-class": eye.repeat(4, 1, 1)}
    model.statistics.means.copy_(known_model.statistics.means)
    model.statistics.spread.copy_(shapes[spread])
    model.statistics.feature_norm.fill_(1)
    _, terms = one_loss(small("ncdwf-gauss"), model, split, config)
    assert terms["replay"].isfinite()


def test_joint_softmax_lets_latents_reach_the_novel_heads(
    known_model: Model, split: Split, config: Config
) -> None:
    def gradient(reading: str) -> Tensor | None:
        model, terms = one_loss(small("ncdwf", softmax=reading), known_model, split, config)
        terms["replay"].mean().backward()
        assert model.novel_head is not None
        return model.novel_head.prototypes.grad

    assert gradient("separate") is None
    joint = gradient("joint")
    assert joint is not None
    assert joint.abs().max() > 0


@pytest.mark.parametrize(
    ("name", "changes", "words"),
    [
        ("ncdwf", {"tau": 1.0}, "tau=1.0"),
        ("ncdwf", {"tau": 0.0}, "tau=0.0"),
        ("ncdwf", {"rho": 0.0}, "rho=0.0"),
        ("ncdwf", {"weight_distill": -1.0}, "weight_distill=-1.0"),
        ("ncdwf", {"latents_per_class": 0}, "latents_per_class=0"),
        ("ncdwf", {"novel_lost": 1.0}, "novel_lost=1.0"),
        ("ncdwf", {"least_tau": 1.0}, "least_tau=1.0"),
        ("ncdwf", {"least_tau": -0.1}, "least_tau=-0.1"),
        ("ncdwf-gauss", {"least_tau": 1.0}, "least_tau=1.0"),
        ("ncdwf-gauss", {"weight_replay": -1.0}, "weight_replay=-1.0"),
        ("ncdwf-gauss", {"weight_distill": -1.0}, "weight_distill=-1.0"),
        ("ncdwf-gauss", {"replay_ratio": 0.0}, "replay_ratio=0.0"),
        ("ncdwf", {"replay_ratio": 65537.0}, "replay_ratio=65537.0"),
        ("ncdwf-gauss", {"novel_lost": 0.0}, "novel_lost=0.0"),
    ],
)
def test_fields_out_of_range_are_refused(name: str, changes: dict[str, Any], words: str) -> None:
    with pytest.raises(InputError, match=re.escape(f"config.method.{words} should be")):
        METHODS[name](**changes)


@every_method
def test_the_sizes_of_the_heads_are_checked_and_used(name: str, known_model: Model) -> None:
    with pytest.raises(InputError, match=r"clustering\.num_heads=0 should be from 1"):
        make_method({"name": name, "clustering": {"num_heads": 0}})
    model, state = small(name, clustering=SIZES).prepare(known_model, 2, seed=0)
    novel = model.architecture.novel
    assert novel is not None
    assert dataclasses.asdict(novel) == {
        "num_novel": 2,
        "num_heads": 3,
        "num_hidden": 5,
        "num_projected": 7,
        "temperature": 0.2,
    }
    assert state.overclusters.prototypes.shape == (3, 7, 2 * 4)  # type: ignore[union-attr]


@every_method
def test_small_views_take_part(name: str, known_model: Model, split: Split, config: Config) -> None:
    def terms(num_small: int, seed: int = 0) -> Terms:
        views = make_views(split, config, num_small, seed)
        return one_loss(small(name), known_model, split, config, views)[1]

    without, two, other = terms(0), terms(2), terms(2, seed=1)
    assert set(without) == set(two)
    for key in ("cluster", "overcluster"):
        assert two[key].isfinite().all()
        assert not torch.equal(two[key], without[key])
        assert not torch.equal(two[key], other[key])
    for key in {"replay", "distill"} & set(two):  # these are about latents and large views
        assert torch.equal(two[key], other[key])


@pytest.mark.parametrize("norms", ["pool", "held"])
@pytest.mark.parametrize("name", ["ncdwf", "ncdwf-gauss"])
def test_norms_follow_the_pool_or_are_held(
    name: str, norms: str, known_model: Model, split: Split, config: Config
) -> None:
    model, _ = one_loss(small(name, norms=norms), known_model, split, config)
    before = dict(known_model.backbone.named_buffers())  # type: ignore[attr-defined]
    running = {
        key: torch.equal(buffer, before[key])
        for key, buffer in model.backbone.named_buffers()  # type: ignore[attr-defined]
        if "running" in key
    }
    assert set(running.values()) == {norms == "held"}


def test_in_uno_every_known_class_is_pushed_away_by_the_joint_softmax(
    known_model: Model, split: Split, config: Config
) -> None:
    method = small("uno")
    model, terms = one_loss(method, known_model, split, config)
    assert set(terms) == {"cluster", "overcluster"}
    (terms["cluster"].mean() + terms["overcluster"].mean()).backward()
    gradient = model.known_head.prototypes.grad
    assert gradient is not None
    assert (gradient.abs().amax(1) > 0).all()
    # The share of the known classes in the softmax is all that pulls on them: a step down the
    # gradient lowers every known logit of the pool on average.
    features = model.features(split.pool_images[:16])
    with torch.no_grad():
        old = model.known_head(features)
        model.known_head.prototypes -= 1e-3 * gradient / gradient.norm()
        assert (model.known_head(features) - old).mean() < 0


def test_uno_has_no_identifier_and_routes_by_its_softmax(
    discovered: dict[str, tuple[Model, History, float]], split: Split
) -> None:
    model, history, _ = discovered["uno"]
    assert model.identifier is None
    assert {epoch.phase for epoch in history} == {"discovery"}
    scores, _ = evaluate(model, split)
    assert [entry.rule for entry in scores.agnostic] == ["softmax"]
    assert scores.aware.novel > 90


def test_the_softmax_of_uno_has_one_temperature(
    known_model: Model, split: Split, config: Config
) -> None:
    model, terms = one_loss(small("uno"), cold(known_model), split, config)
    assert model.architecture.novel is not None
    assert model.architecture.temperature == model.architecture.novel.temperature != COLD
    _, same = one_loss(small("uno"), known_model, split, config)
    assert torch.equal(terms["cluster"], same["cluster"])


def test_a_joint_softmax_has_one_temperature(
    known_model: Model, split: Split, config: Config
) -> None:
    terms = {
        (softmax, known is not known_model): one_loss(
            small("ncdwf", softmax=softmax), known, split, config
        )[1]
        for softmax in ("joint", "separate")
        for known in (known_model, cold(known_model))
    }
    # Latents are inverted at that of the known head, and the heads' norms see them, too.
    assert torch.allclose(
        terms["joint", True]["cluster"], terms["joint", False]["cluster"], rtol=1e-3
    )
    # A softmax of its own keeps the temperature that the known head learnt with.
    assert not torch.equal(terms["separate", True]["replay"], terms["separate", False]["replay"])


def test_uno_without_overclustering_has_one_term(
    known_model: Model, split: Split, config: Config
) -> None:
    _, terms = one_loss(small("uno", clustering=ALONE), known_model, split, config)
    assert set(terms) == {"cluster"}


def test_gaussian_replay_teaches_the_known_head_alone(
    known_model: Model, split: Split, config: Config
) -> None:
    method = small("ncdwf-gauss", clustering=SOFT)
    prepared = method.prepare(cold(known_model), 2, seed=0)
    model, terms = one_loss(method, known_model, split, config, prepared=prepared)
    assert set(terms) == {"cluster", "overcluster", "replay", "distill"}
    samples, labels = cast(State, prepared[1]).memory.sample(one_noise(method, prepared[1]))
    expected = F.cross_entropy(model.known_head(samples) / COLD, labels)
    assert terms["replay"].item() == pytest.approx(expected.item(), rel=1e-5)
    terms["replay"].backward()
    assert model.known_head.prototypes.grad is not None
    assert model.known_head.prototypes.grad.abs().max() > 0
    for part in (model.backbone, model.novel_head):
        assert all(p.grad is None for p in part.parameters())  # type: ignore[union-attr]


def test_the_weights_of_gaussian_replay_multiply_their_terms(
    known_model: Model, split: Split, config: Config
) -> None:
    _, once = one_loss(
        small("ncdwf-gauss", weight_replay=1.0, weight_distill=1.0), known_model, split, config
    )
    _, more = one_loss(
        small("ncdwf-gauss", weight_replay=2.0, weight_distill=5.0), known_model, split, config
    )
    for key, factor in (("cluster", 1), ("overcluster", 1), ("replay", 2), ("distill", 5)):
        assert (once[key] > 0).all()
        assert torch.allclose(more[key], factor * once[key], rtol=1e-5), key


@pytest.mark.parametrize("name", ["ncdwf", "ncdwf-gauss"])
def test_distillation_weighs_less_the_more_classes_are_novel(
    name: str, known_model: Model, split: Split, config: Config
) -> None:
    method = small(name, weight_distill=3.0)
    found = {}
    for num_novel in (4, 28):  # after 4 known ones
        prepared = method.prepare(known_model, num_novel, seed=0)
        _, terms = one_loss(method, known_model, split, config, prepared=prepared)
        found[num_novel] = terms["distill"].item()
    assert found[4] > 0
    assert found[28] == pytest.approx(found[4] * (2 * 4 / 32) ** 0.5, rel=1e-4)


def test_gaussian_replay_keeps_the_known_classes_and_calibrates(
    discovered: dict[str, tuple[Model, History, float]], known_model: Model, split: Split
) -> None:
    model = discovered["ncdwf-gauss"][0]
    assert model.identifier is not None
    assert model.tau == float(model.identifier.calibrated_tau)
    scores, _ = evaluate(model, split, known_model)
    assert scores.aware.known > 95
    assert scores.aware.novel > 90

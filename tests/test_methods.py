"""The contract that every registered method keeps, and the parts of `ncdwf` one by one."""

import dataclasses
import json
import re
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import SHORT_METHOD, TINY_METHOD, fingerprint, shorter
from torch import Tensor

import ncdwf.methods
from ncdwf.config import Config, from_dict
from ncdwf.data.augment import Views, augment
from ncdwf.data.setting import Split
from ncdwf.learning.discovery import METHODS, Method, discover, make_method
from ncdwf.learning.loop import History, Terms
from ncdwf.methods.ncdwf import Ncdwf
from ncdwf.model import Model
from ncdwf.noise import Draw, draw, generator

NAMES = sorted(METHODS)
every_method = pytest.mark.parametrize("name", NAMES)


def small(name: str, **changes: Any) -> Method:
    """Return a method by name, made small where it has a field for it."""
    fields = {item.name for item in dataclasses.fields(METHODS[name])}  # type: ignore[arg-type]
    sizes = {key: value for key, value in SHORT_METHOD.items() if key in fields}
    return make_method({"name": name, **sizes, **changes})


@pytest.fixture(scope="module")
def discovered(
    known_model: Model, split: Split, config: Config
) -> dict[str, tuple[Model, History, float]]:
    """Every method's model, history and seconds on the tiny setting."""
    results = {}
    for name in NAMES:
        history: History = []
        method = small(name)
        if hasattr(method, "identifier_optim"):
            method = small(name, identifier_optim=TINY_METHOD["identifier_optim"])
        start = time.monotonic()
        model = discover(known_model, split.novel_images, method, config, history=history)
        results[name] = (model, history, time.monotonic() - start)
    return results


def one_loss(method: Method, known: Model, split: Split, config: Config) -> tuple[Model, Terms]:
    """Return the prepared model and the terms of one step in training mode."""
    model, state = method.prepare(known, 2, seed=0)
    model.train()
    state.train()
    wanted = {"large": Draw(kind="uniform", shape=(2, 16, 5)), **method.noise(state, 16)}
    noise = {key: value[0] for key, value in draw(wanted, 1, generator(0, "test")).items()}
    views = [augment(split.novel_images[:16], config.discovery.large, d) for d in noise["large"]]
    terms = method.loss(model, Views(large=torch.stack(views)), state, torch.zeros(()), noise)
    return model, terms


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
    assert fingerprint(known_model) == before


@every_method
def test_loss_falls(name: str, discovered: dict[str, tuple[Model, History, float]]) -> None:
    history = discovered[name][1]
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
            discover(known_model, split.novel_images, small(name), replace(short, seed=seed))
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
    assert set(model.predict(split.test_images).labels.tolist()) == set(range(6))
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


SWITCHED: dict[str, tuple[Any, set[str]]] = {
    # The novel heads do not see the latents, so replay teaches the known head alone.
    "weight_replay": (0.0, {"known_head"}),
    "weight_information": (0.0, {"backbone", "novel_head", "identifier"}),
    "weight_distill": (0.0, {"backbone", "novel_head", "identifier"}),
    "softmax": ("joint", {"backbone", "known_head", "novel_head", "identifier"}),
    "replay": ("gaussian", {"known_head", "identifier"}),
    "information_from": ("current", {"backbone", "novel_head", "identifier"}),
    "overclustering": (0, {"backbone", "novel_head", "identifier"}),
    # When the identifier is fitted must not change what discovery learns.
    "identifier": ("during", {"identifier"}),
}
"""Another value of each part of the method, and the parts of the model that it changes."""
ON: dict[str, Any] = {
    "weight_replay": 1.0,
    "weight_information": 0.5,
    "weight_distill": 3.0,
    "softmax": "separate",
    "replay": "pseudo-latents",
    "information_from": "frozen",
    "overclustering": 3,
    "identifier": "after",
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
    model = discover(known, split.novel_images, method, shorter(config), history=history)
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
        for name in ("backbone", "known_head", "novel_head", "identifier")
        if fingerprint(getattr(model, name)) != fingerprint(getattr(whole[0], name))
    }
    assert found == changes
    assert all(torch.isfinite(t).all() for t in model.state_dict().values())
    if value == 0:
        term = part.removeprefix("weight_").removesuffix("ing")
        assert mean_of(whole[1], term) > 0
        assert mean_of(history, term) == 0


def mean_of(history: History, term: str) -> float:
    """Return the mean of a term over the first epoch; a term that is not there is 0."""
    value = torch.tensor(history[0].terms.get(term, 0.0))
    return float(value.mean())


def test_everything_off_is_still_a_method(known_model: Model, split: Split, config: Config) -> None:
    off = {part: value for part, (value, _) in SWITCHED.items() if value == 0}
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
    _, terms = one_loss(small("ncdwf", replay="gaussian"), model, split, config)
    assert terms["replay"].isfinite()


def test_fields_out_of_range_are_refused() -> None:
    for changes in ({"tau": 1.0}, {"tau": 0.0}, {"rho": 0.0}, {"num_heads": 0}):
        with pytest.raises(ValueError, match=r"config\.method"):
            Ncdwf(**changes)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match="weight_distill=-1"):
        Ncdwf(weight_distill=-1.0)


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

import dataclasses
import itertools
import json
import re
import typing
from dataclasses import asdict
from typing import Literal

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ncdwf.config import (
    Config,
    Discovery,
    Engine,
    Optim,
    OwnData,
    Supervised,
    View,
    from_dict,
    override,
)
from ncdwf.errors import InputError

SHARES = ("resized", "jitter", "solarise", "equalise", "brightness", "contrast", "saturation")
"""The fields of a view that go from 0 to 1."""


def small_config() -> Config:
    return Config(
        setting="digits-5-5",
        supervised=Supervised(optim=Optim(epochs=1, batch_size=2, lr=0.1)),
        discovery=Discovery(num_novel=5, optim=Optim(epochs=3, batch_size=4, lr=0.2)),
        method={"name": "ncdwf", "gamma": 1.0, "optim": {"lr": 0.5}},
    )


def sizes(low=0.0, high=1e6, **options):
    return st.floats(low, high, allow_nan=False, **options)


views = st.builds(
    View,
    shift=sizes(),
    rotation=sizes(),
    scale=sizes(high=1, exclude_max=True),
    padding=st.integers(0, 99),
    resized=sizes(high=1),
    min_area=sizes(low=0.01, high=0.5),
    max_area=sizes(low=0.5, high=1),
    size=st.integers(0, 99),
    flip=st.booleans(),
    jitter=sizes(high=1),
    brightness=sizes(high=1),
    contrast=sizes(high=1),
    saturation=sizes(high=1),
    hue=sizes(high=0.5),
    solarise=sizes(high=1),
    equalise=sizes(high=1),
)
optims = st.builds(
    Optim,
    epochs=st.integers(1, 10**6),
    batch_size=st.integers(2, 10**6),
    lr=sizes(),
    min_lr=sizes(),
    warmup_epochs=st.integers(0, 100),
    momentum=sizes(high=1, exclude_max=True),
    weight_decay=sizes(),
    clip_norm=sizes(),
)
configs = st.builds(
    Config,
    setting=st.text(),
    supervised=st.builds(
        Supervised,
        optim=optims,
        view=views,
        num_views=st.integers(1, 9),
        temperature=sizes(low=1e-6),
        holdout=sizes(low=0.01, high=0.5),
        statistics_from=st.sampled_from(["augmented", "plain", "held-out"]),
        statistics_views=st.integers(1, 9),
        spread=st.sampled_from(["shared-diagonal", "shared", "per-class"]),
    ),
    discovery=st.builds(
        Discovery,
        num_novel=st.integers(1, 99),
        optim=optims,
        pool=st.sampled_from(["novel", "mixed"]),
        backbone_rate=st.floats(0, 1),
        large=views,
        num_large=st.just(2),
        small=views,
        num_small=st.integers(0, 9),
    ),
    method=st.dictionaries(st.text(), st.none() | st.integers() | st.text()).map(
        lambda fields: {**fields, "name": "ncdwf"}
    ),
    backbone=st.text(),
    seed=st.integers(min_value=0),
    device=st.sampled_from(["auto", "cpu", "cuda"]),
    engine=st.sampled_from(typing.get_args(Engine)),
    checkpoint_seconds=sizes(),
    snapshot_epochs=st.integers(0, 99),
)


@settings(max_examples=50, deadline=None)
@given(configs)
def test_json_round_trip_keeps_every_field(config):
    assert from_dict(Config, json.loads(json.dumps(asdict(config)))) == config


@settings(max_examples=50, deadline=None)
@given(optims, st.data())
def test_override_replaces_one_field_and_no_other(wanted, data):
    before = small_config()
    key = data.draw(st.sampled_from([item.name for item in dataclasses.fields(Optim)]))
    value = getattr(wanted, key)
    after = override(before, f"discovery.optim.{key}={value!r}")
    expected = dataclasses.replace(before.discovery.optim, **{key: value})
    assert after.discovery.optim == expected
    assert dataclasses.replace(after, discovery=before.discovery) == before


@pytest.mark.parametrize(
    ("assignment", "read", "expected"),
    [
        ("seed=7", lambda c: c.seed, 7),
        ("device=cpu", lambda c: c.device, "cpu"),  # plain words need no quotes
        ("engine=eager", lambda c: c.engine, "eager"),
        ("discovery.pool=mixed", lambda c: c.discovery.pool, "mixed"),
        ('device="cpu"', lambda c: c.device, "cpu"),
        ("supervised.view.flip=true", lambda c: c.supervised.view.flip, True),
        ("discovery.optim.lr=1", lambda c: c.discovery.optim.lr, 1.0),
        ("discovery.optim.lr=.5", lambda c: c.discovery.optim.lr, 0.5),
        ("discovery.optim.lr=.5e-3", lambda c: c.discovery.optim.lr, 5e-4),
        ("method.gamma=2.", lambda c: c.method["gamma"], 2.0),
        ("method.gamma=2.5", lambda c: c.method["gamma"], 2.5),
        ("method.optim.lr=2", lambda c: c.method["optim"], {"lr": 2}),
        ("setting=a=b", lambda c: c.setting, "a=b"),
    ],
)
def test_override_reads_json_or_plain_words(assignment, read, expected):
    before = small_config()
    value = read(override(before, assignment))
    assert value == expected
    assert type(value) is type(expected)
    assert before == small_config()


@pytest.mark.parametrize(
    ("assignment", "message"),
    [
        ("discovery.optim.lrr=1", "unknown key config.discovery.optim.lrr; did you mean 'lr'?"),
        ("sed=1", "unknown key config.sed; did you mean 'seed'?"),
        ("method.gama=1", "unknown key config.method.gama; did you mean 'gamma'?"),
        ("seed=abc", "config.seed='abc' should be int"),
        ("seed=1.5", "config.seed=1.5 should be int"),
        ("seed=.5", "config.seed=0.5 should be int"),
        ("discovery.optim.lr=.", "config.discovery.optim.lr='.' should be float"),
        ("seed=true", "config.seed=True should be int"),
        ("supervised.view.flip=1", "config.supervised.view.flip=1 should be bool"),
        ("discovery.optim.lr=true", "config.discovery.optim.lr=True should be float"),
        ("device=tpu", "config.device='tpu' is not one of ('auto', 'cpu', 'cuda')"),
        (
            "engine=fast",
            "config.engine='fast' is not one of ('auto', 'eager', 'compiled', 'captured')",
        ),
        ("discovery.pool=some", "config.discovery.pool='some' is not one of ('novel', 'mixed')"),
        ("discovery.pool=1", "config.discovery.pool=1 is not one of ('novel', 'mixed')"),
        ("seed", "'seed' should be written key=value, as in seed=1"),
        ("seed.x=1", "config.seed holds a value, not further keys"),
        ("method.gamma.x=1", "config.method.gamma holds a value, not further keys"),
        ("discovery.optim=1", "config.discovery.optim holds further keys: epochs, batch_size,"),
        ("method=1", "config.method holds further keys: name, gamma, optim"),
        ("discovery.optim.lr=NaN", "config.discovery.optim.lr=nan should be a finite number"),
        ("checkpoint_seconds=1e999", "config.checkpoint_seconds=inf should be a finite number"),
        ("discovery.optim.lr=1" + 400 * "0", "should be a finite number"),
        ("seed=" + 100_000 * "[", "should be int"),
    ],
)
def test_override_refuses_with_one_line(assignment, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        override(small_config(), assignment)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("build", "message"),
    [
        (lambda: Optim(epochs=0, batch_size=2, lr=1.0), "optim.epochs=0"),
        (lambda: Optim(epochs=10**14, batch_size=2, lr=1.0), "at most 1000000"),
        (lambda: Optim(epochs=1, batch_size=0, lr=1.0), "optim.batch_size=0"),
        (lambda: Optim(epochs=1, batch_size=2, lr=-0.1), "optim.lr=-0.1"),
        (lambda: Optim(epochs=1, batch_size=2, lr=float("inf")), "optim.lr=inf"),
        (lambda: Optim(epochs=1, batch_size=2, lr=1.0, momentum=1.0), "optim.momentum=1.0"),
        (lambda: _supervised(num_views=0), "supervised.num_views=0 should be from 1 to 65536"),
        (lambda: _supervised(num_views=65537), "supervised.num_views=65537"),
        (lambda: _supervised(temperature=0.0), "supervised.temperature=0.0"),
        (lambda: _supervised(holdout=0.6), "supervised.holdout=0.6"),
        (lambda: _supervised(statistics_from="held-out"), "needs supervised.holdout above 0"),
        (lambda: _supervised(statistics_views=0), "supervised.statistics_views=0"),
        (lambda: _discovery(num_novel=-1), "discovery.num_novel=-1"),
        (lambda: _discovery(num_large=1), "discovery.num_large=1"),
        (lambda: _discovery(backbone_rate=1.5), "discovery.backbone_rate=1.5 should be from 0 to"),
        (lambda: _discovery(num_large=10**9), "discovery.num_large=1000000000 should be from 2 to"),
        (lambda: _discovery(num_small=-1), "discovery.num_small=-1"),
        (lambda: _discovery(num_small=65537), "discovery.num_small=65537"),
        (lambda: OwnData(shape=()), "own.shape=() should be 1 or 3 channels, height and width"),
        (lambda: OwnData(shape=(3, 4097, 8)), "own.shape=(3, 4097, 8)"),
        (lambda: OwnData(shape=(4, 8, 8)), "own.shape=(4, 8, 8)"),
        (lambda: OwnData(shape=(1, 8, 0)), "own.shape=(1, 8, 0)"),
        (lambda: dataclasses.replace(small_config(), method={}), "the key 'name'"),
        (lambda: dataclasses.replace(small_config(), method={"name": 3}), "the key 'name'"),
        (
            lambda: dataclasses.replace(small_config(), checkpoint_seconds=-1.0),
            "config.checkpoint_seconds should be 0 or more",
        ),
        (lambda: _discovery(tries=0), "discovery.tries=0 should be from 1"),
        (
            lambda: dataclasses.replace(
                small_config(), snapshot_epochs=1, discovery=_discovery(tries=2)
            ),
            "config.snapshot_epochs is for discovery.tries=1",
        ),
        (
            lambda: dataclasses.replace(small_config(), snapshot_epochs=-1),
            "config.snapshot_epochs should be 0 or more",
        ),
    ],
)
def test_values_out_of_range_are_refused(build, message):
    with pytest.raises(InputError, match=re.escape(message)):
        build()


@pytest.mark.parametrize(
    "assignments",
    [
        ("snapshot_epochs=5", "discovery.tries=1"),
        ("supervised.statistics_from=held-out", "supervised.holdout=0.1"),
        ("discovery.large.max_area=0.4", "discovery.large.min_area=0.3"),
    ],
)
def test_fields_that_have_to_fit_each_other_may_come_in_any_order(assignments):
    config = override(small_config(), "discovery.tries=3", "discovery.large.min_area=0.9")
    both = override(config, *assignments)
    assert override(config, *reversed(assignments)) == both
    with pytest.raises(InputError):
        override(config, assignments[0])  # alone it does not fit


def test_of_a_field_that_is_given_twice_the_last_counts():
    config = override(small_config(), "discovery.tries=3", "seed=4", "discovery.tries=2")
    assert (config.discovery.tries, config.seed) == (2, 4)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("shift", -1.0),
        ("rotation", -0.1),
        ("rotation", float("nan")),
        ("scale", -0.1),
        ("scale", 1.0),
        ("padding", -1),
        ("size", -1),
        ("padding", 4097),
        ("size", 4097),
        *itertools.product(SHARES, (-0.1, 1.1, float("nan"))),
        ("hue", -0.1),
        ("hue", 0.6),
        ("min_area", 0.0),
        ("min_area", 1.1),
        ("max_area", 0.4),  # less than the default of min_area
        ("max_area", 1.1),
        ("max_area", float("nan")),
    ],
)
def test_a_view_out_of_range_is_refused_by_name(name, value):
    with pytest.raises(InputError, match=re.escape(f"view.{name}={value}")):
        View(**{name: value})


def test_a_view_may_reach_its_limits():
    View(**dict.fromkeys(SHARES, 1.0), hue=0.5, min_area=1.0, max_area=1.0)
    View(**dict.fromkeys(SHARES, 0.0), hue=0.0, min_area=1e-6, max_area=1e-6)


def _supervised(**fields):
    return Supervised(optim=Optim(epochs=1, batch_size=2, lr=1.0), **fields)


def _discovery(num_novel=2, **fields):
    optim = Optim(epochs=1, batch_size=2, lr=1.0)
    return Discovery(num_novel=num_novel, optim=optim, **fields)


@pytest.mark.parametrize(
    ("kind", "values", "message"),
    [
        (View, {"shfit": 1}, "unknown key config.shfit; did you mean 'shift'?"),
        (View, [1], "config=[1] should be an object"),
        (Optim, {"epochs": 1}, "config lacks batch_size, lr"),
        (Discovery, {"num_novel": 1, "optim": 3}, "config.optim=3 should be an object"),
        (Discovery, {"num_novel": 1, "optim": {"lr": None}}, "config.optim lacks"),
    ],
)
def test_from_dict_refuses_what_does_not_fit(kind, values, message):
    with pytest.raises(InputError, match=re.escape(message)):
        from_dict(kind, values)


def test_keys_are_listed_where_none_is_close():
    with pytest.raises(
        InputError, match=r"unknown key optim\.foo; there are epochs, batch_size, lr"
    ):
        from_dict(Optim, {"foo": 1}, where="optim")


def test_a_key_where_none_is_accepted_is_refused():
    nothing = dataclasses.make_dataclass("Nothing", [])
    with pytest.raises(InputError, match=r"unknown key method\.x; no key is accepted there"):
        from_dict(nothing, {"x": 1}, where="method")


@dataclasses.dataclass(frozen=True, kw_only=True)
class Choice:
    tau: float | Literal["calibrated"]
    view: View | None = None


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        ({"tau": 1}, Choice(tau=1.0)),
        ({"tau": "calibrated"}, Choice(tau="calibrated")),
        ({"tau": 0.5, "view": None}, Choice(tau=0.5)),
        ({"tau": 0.5, "view": {"shift": 2}}, Choice(tau=0.5, view=View(shift=2.0))),
    ],
)
def test_unions_take_the_type_that_fits(values, expected):
    assert from_dict(Choice, values) == expected


@pytest.mark.parametrize(
    ("values", "message"),
    [
        ({"tau": "other"}, "config.tau='other' should be float or "),
        ({"tau": 0.5, "view": 3}, "config.view=3 should be View or null"),
    ],
)
def test_unions_name_what_would_fit(values, message):
    with pytest.raises(InputError, match=re.escape(message)):
        from_dict(Choice, values)


def test_a_view_changes_nothing_unless_told_to():
    names = ("shift", "rotation", "scale", "resized", "jitter", "solarise", "equalise")
    off = dict.fromkeys(names, 0.0)
    assert View() == View(**off, padding=0, size=0, flip=False)


def test_configs_cannot_be_changed():
    with pytest.raises(dataclasses.FrozenInstanceError):
        small_config().seed = 1

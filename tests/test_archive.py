"""Models on disk: what is written, and what is refused."""

import dataclasses
import errno
import json
import os
import shutil
import subprocess
import sys
import types

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_model import SHAPE, refused, same_weights, whole_model
from torch import nn

from ncdwf import storage
from ncdwf.errors import InputError, NonFiniteError, StorageError
from ncdwf.model import Model, NovelHead
from ncdwf.model.archive import DESCRIPTION_FILE, FORMAT, WEIGHTS_FILE


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return where a model is saved; tests that damage it put it back."""
    directory = tmp_path_factory.mktemp("models") / "saved"
    whole_model().save(directory)
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copied")


def test_a_second_model_is_not_saved_over_the_first(saved):
    before = (saved / WEIGHTS_FILE).read_bytes()
    with pytest.raises(InputError, match="saved holds a model already"):
        whole_model(seed=1).save(saved)
    assert (saved / WEIGHTS_FILE).read_bytes() == before


def test_a_full_disk_leaves_no_model(tmp_path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(os, "fsync", full)
        with pytest.raises(StorageError, match=r"model\.safetensors: the disk is full"):
            whole_model().save(tmp_path)
    with pytest.raises(InputError, match=r"holds no model \(model\.json is missing\)"):
        Model.load(tmp_path)
    assert not list(tmp_path.iterdir())
    whole_model().save(tmp_path)
    assert same_weights(Model.load(tmp_path), whole_model())


def test_a_flipped_bit_in_any_byte_of_the_description_is_refused(copied):
    path = copied / DESCRIPTION_FILE
    intact = path.read_bytes()
    for position in range(len(intact)):
        damaged = bytearray(intact)
        damaged[position] ^= 1 << position % 8
        path.write_bytes(damaged)
        refused(copied, DESCRIPTION_FILE)


@settings(max_examples=40, deadline=None)
@given(st.floats(0, 1, exclude_max=True), st.integers(0, 7), st.booleans())
def test_flipped_bits_and_cuts_in_the_weights_are_refused(saved, place, bit, cut):
    path = saved / WEIGHTS_FILE
    intact = path.read_bytes()
    position = int(place * len(intact))
    damaged = bytearray(intact)
    damaged[position] ^= 1 << bit
    try:
        path.write_bytes(intact[:position] if cut else damaged)
        assert "damaged or was changed" in refused(saved, WEIGHTS_FILE)
    finally:
        path.write_bytes(intact)
    Model.load(saved)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not valid JSON"),
        ("{", "is not valid JSON"),
        ("[1, 2]", "does not describe a model of ncdwf"),
        ('"format"', "does not describe a model of ncdwf"),
        ("{}", "does not describe a model of ncdwf"),
        ('{"format": 4, "format": 1}', "a key stands twice"),
        ('{"format": 4, "x": NaN}', "NaN is not allowed"),
        ('{"format": 4, "x": 1e999}', "1e999 is too large"),
        ('{"format": 4, "x": ' + 100_000 * "[", "recursion"),
        ('{"format": 4, "x": "\\ud800"}', "damaged or was changed"),
        ('{"format": 4, "x": ' + 600 * "[" + 600 * "]" + "}", "damaged or was changed"),
        ('{"format": 4}', "damaged or was changed"),
        ('{"format": 1}', f"has format 1; this version of ncdwf reads {FORMAT}"),
        ('{"format": [1]}', "has format [1]"),
    ],
)
def test_foreign_descriptions_are_refused(copied, content, message):
    (copied / DESCRIPTION_FILE).write_text(content)
    assert message in refused(copied, DESCRIPTION_FILE)


def rewrite(directory, change, tensors=None):
    """Change a saved model as someone would who knows how its sums are made."""
    path = directory / DESCRIPTION_FILE
    description = json.loads(path.read_text())
    if tensors is not None:
        weights = storage.to_tensor_bytes(tensors)
        (directory / WEIGHTS_FILE).write_bytes(weights)
        description["weights_sha256"] = storage.sha256(weights)
    change(description)
    del description["sha256"]
    description["sha256"] = storage.sha256(storage.to_json_bytes(description))
    path.write_bytes(storage.to_json_bytes(description))


def test_a_rewritten_model_with_the_right_sums_loads(copied):
    # Otherwise the tests below would see a wrong sum and nothing else.
    rewrite(copied, lambda d: d.update(known_names=["x", "y"]), whole_model().state_dict())
    assert Model.load(copied).known_names == ("x", "y")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda d: d.pop("architecture"), "architecture"),
        (lambda d: d.update(architecture=3), "architecture=3 should be an object"),
        (lambda d: d["architecture"].update(extra=1), "unknown key architecture.extra"),
        (lambda d: d["architecture"].update(backbone="huge"), "unknown backbone 'huge'"),
        (lambda d: d["architecture"].update(num_known=-1), "num_known=-1"),
        (lambda d: d["architecture"].update(input_shape=[1, 0, 4]), "input_shape=(1, 0, 4)"),
        (lambda d: d["architecture"].update(input_shape=[]), "input_shape=()"),
        (lambda d: d["architecture"].update(input_shape=7), "input_shape=7 should be a list"),
        (lambda d: d["architecture"].update(input_shape=[1, 4, 4.5]), "input_shape[2]=4.5"),
        (lambda d: d["architecture"].update(input_shape=[16]), "'small' reads pictures"),
        (lambda d: d["architecture"].update(backbone="vector"), "'vector' reads vectors"),
        (lambda d: d["architecture"].update(num_discovered=3), "num_discovered=3"),
        (lambda d: d["architecture"].update(num_known="2"), "num_known='2' should be int"),
        (lambda d: d["architecture"].update(temperature=0), "temperature=0.0"),
        (lambda d: d["architecture"].update(spread="wide"), "spread='wide' is not one of"),
        (lambda d: d["architecture"]["novel"].update(num_heads=0), "novel="),
        (lambda d: d["architecture"].update(input_shape=[2**62, 4, 4]), "input_shape=(4611"),
        # Small files that would ask for much memory: no picture is so large.
        (lambda d: d["architecture"].update(input_shape=[1, 15000, 15000]), "up to 4096"),
        (lambda d: d["architecture"].update(input_shape=[1, 4, 4097]), "up to 4096"),
        (lambda d: d["architecture"].update(input_shape=[2, 4, 4]), "1 or 3 channels"),
        (lambda d: d["architecture"].update(input_shape=[1, 4]), "input_shape=(1, 4) should be"),
        (lambda d: d["architecture"].update(input_shape=[0]), "input_shape=(0,) should be above 0"),
        (lambda d: d.pop("known_names"), "known_names"),
        (lambda d: d.update(known_names=["one"]), "does not name every class once"),
        (lambda d: d.update(novel_names=[]), "does not name every class once"),
        (lambda d: d.update(known_names=["one", "one"]), "does not name every class once"),
        (
            lambda d: d.update(known_names=["one", d["novel_names"][0]]),
            "does not name every class once",
        ),
        (lambda d: d.update(known_names=[1, 2]), "a name is not a string"),
        (lambda d: d.update(known_names=7), "names of classes are no list"),
        (lambda d: d.update(known_names="ab"), "names of classes are no list"),
    ],
)
def test_descriptions_of_impossible_models_are_refused(copied, change, message):
    rewrite(copied, change)
    assert message in refused(copied, DESCRIPTION_FILE)


@pytest.mark.parametrize(
    "change", [lambda d: d.pop("weights_sha256"), lambda d: d.update(weights_sha256=None)]
)
def test_weights_are_never_read_unchecked(copied, change):
    rewrite(copied, change)
    assert "damaged or was changed" in refused(copied, WEIGHTS_FILE)


@pytest.mark.parametrize(
    ("name", "make", "message"),
    [
        ("known_head.prototypes", lambda t: t * torch.nan, "NaN or infinite values in known_head"),
        ("statistics.means", lambda t: t + torch.inf, "NaN or infinite values in statistics"),
        ("known_head.prototypes", lambda t: t[:, :-1], "does not fit"),
        ("known_head.prototypes", lambda t: t.double(), "holds torch.float64 in known_head"),
        ("known_head.prototypes", lambda t: t.long(), "holds torch.int64 in known_head"),
        ("extra", lambda t: torch.zeros(1), "does not fit"),
        ("extra", lambda t: torch.zeros(1).to(torch.float8_e4m3fn), "something else, 'extra'"),
        ("known_head.prototypes", lambda t: t.to(torch.float8_e4m3fn), "holds torch.float8_e4m3fn"),
        ("backbone.normalise.std", lambda t: t * 0, "that is not above 0"),
        ("backbone.layers.1.running_var", lambda t: t - 2, "running_var below 0"),
        ("identifier.tau", lambda t: t + 7, "has a threshold that is no probability"),
        ("identifier.tau", lambda t: t * -1, "has a threshold that is no probability"),
        ("best_head", lambda t: t + 2, "names a best head that is not there"),
        ("best_head", lambda t: t - 1, "names a best head that is not there"),
    ],
)
def test_weights_that_do_not_fit_are_refused(copied, name, make, message):
    tensors = {n: t.clone() for n, t in whole_model().state_dict().items()}
    tensors[name] = make(tensors.get(name))
    rewrite(copied, lambda d: None, tensors)
    assert message in refused(copied, WEIGHTS_FILE)


def test_missing_weights_are_refused(copied):
    tensors = whole_model().state_dict()
    del tensors["novel_head.prototypes"]
    rewrite(copied, lambda d: None, tensors)
    assert "novel_head.prototypes" in refused(copied, WEIGHTS_FILE)
    (copied / WEIGHTS_FILE).unlink()
    assert "is missing" in refused(copied, WEIGHTS_FILE)


def test_a_name_that_nobody_could_read_is_refused(copied):
    rewrite(copied, lambda d: d["known_names"].__setitem__(0, "a" * 1001))
    assert "a name of 1,001 characters; up to 1,000" in refused(copied, DESCRIPTION_FILE)


def test_the_line_about_many_wrong_tensors_is_short(copied):
    extra = {f"{number:0200}": torch.zeros(0) for number in range(1000)}
    rewrite(copied, lambda d: None, {**whole_model().state_dict(), **extra})
    assert len(refused(copied, WEIGHTS_FILE)) < 300 + len(str(copied))


@pytest.mark.parametrize("part", ["known_head", "novel_head", "identifier"])
def test_no_part_of_a_model_answers_nan(part):
    model = whole_model()
    with torch.no_grad():
        next(getattr(model, part).parameters()).fill_(torch.nan)
    pictures = torch.arange(48, dtype=torch.uint8).reshape(3, *model.architecture.input_shape)
    with pytest.raises(NonFiniteError, match="the model answers NaN"):
        model.predict(pictures)


def test_weights_that_are_too_large_give_an_error_and_no_answer(copied):
    tensors = {n: t.clone() for n, t in whole_model().state_dict().items()}
    tensors["backbone.normalise.std"].fill_(1e-38)
    tensors["backbone.layers.14.weight"] *= 1e6
    rewrite(copied, lambda d: None, tensors)
    model = Model.load(copied)
    pictures = torch.arange(48, dtype=torch.uint8).reshape(3, *model.architecture.input_shape)
    with pytest.raises(NonFiniteError, match="the model answers NaN"):
        model.predict(pictures)


def test_a_network_of_timm_is_built_once_the_weights_fit_it(copied, monkeypatch):
    devices = []

    def create_model(name, *, num_classes, in_chans):
        layer = nn.Conv2d(in_chans, 7, 1)
        devices.append(layer.weight.device.type)
        return layer

    fake = types.ModuleType("timm")
    fake.is_model, fake.create_model = lambda name: True, create_model
    monkeypatch.setitem(sys.modules, "timm", fake)
    small = Model.create(dataclasses.replace(SHAPE, backbone="timm:giant"), ("a", "b"), seed=0)
    small.save(copied / "fits")
    assert devices == ["cpu"]
    loaded = Model.load(copied / "fits")
    assert devices == ["cpu", "meta", "cpu"]
    assert same_weights(loaded, small)
    rewrite(copied, lambda d: d["architecture"].update(backbone="timm:giant"))
    assert "does not fit" in refused(copied, WEIGHTS_FILE)
    assert devices == ["cpu", "meta", "cpu", "meta"]


def test_weights_of_another_model_are_refused(copied, tmp_path):
    whole_model(seed=1).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS_FILE, copied / WEIGHTS_FILE)
    assert "damaged or was changed" in refused(copied, WEIGHTS_FILE)


def test_a_pickle_in_place_of_weights_is_not_run(copied):
    data = b"cos\nabort\n(tR."
    (copied / WEIGHTS_FILE).write_bytes(data)
    rewrite(copied, lambda d: d.update(weights_sha256=storage.sha256(data)))
    assert "is not a safetensors file" in refused(copied, WEIGHTS_FILE)


LOADING = """
import json
import sys
import time

import torch

import ncdwf.model

started = time.perf_counter()
model = ncdwf.model.Model.load(sys.argv[1])
seconds = time.perf_counter() - started
model.predict(torch.zeros(2, *model.architecture.input_shape, dtype=torch.uint8))
slow_to_import = {"torch._dynamo", "torch._inductor"}
print(json.dumps([seconds, sorted(slow_to_import & sys.modules.keys())]))
"""


def test_a_model_of_full_size_is_little_more_than_its_numbers_and_loads_fast(tmp_path):
    shape = dataclasses.replace(SHAPE, backbone="resnet18", input_shape=(3, 32, 32), num_known=80)
    model = Model.create(shape, tuple(map(str, range(80))), seed=0)
    model = model.with_novel(
        NovelHead(num_novel=20, num_heads=4, num_hidden=2048, num_projected=256),
        identifier=True,
        seed=0,
    )
    model.save(tmp_path)
    numbers = [*model.parameters(), *model.buffers()]
    needed = sum(tensor.numel() * tensor.element_size() for tensor in numbers)
    assert sum(path.stat().st_size for path in tmp_path.iterdir()) <= 1.1 * needed
    assert same_weights(Model.load(tmp_path), model)
    # In a new process: nothing is imported or warm there.
    command = [sys.executable, "-c", LOADING, str(tmp_path)]
    answer = subprocess.run(command, capture_output=True, text=True, check=True)
    seconds, imported = json.loads(answer.stdout)
    assert seconds < 1
    assert imported == []

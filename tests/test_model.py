import dataclasses
import errno
import json
import math
import os
import re
import shutil

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn import functional as F

from ncdwf import storage
from ncdwf.errors import InputError, StorageError
from ncdwf.model import Architecture, Model, NovelHead, Outputs
from ncdwf.model.model import DERIVED_FROM, DESCRIPTION_FILE, FORMAT, WEIGHTS_FILE

SHAPE = Architecture(
    backbone="small",
    num_channels=1,
    height=4,
    width=4,
    num_known=2,
    temperature=0.1,
    spread="shared-diagonal",
)
NOVEL = NovelHead(num_novel=3, num_heads=2, num_hidden=8, num_projected=4)


def known_model(seed=0, **changes):
    return Model.create(dataclasses.replace(SHAPE, **changes), ("cat", "dog"), seed=seed)


def whole_model(seed=0, *, identifier=True, **changes):
    return known_model(seed, **changes).with_novel(NOVEL, identifier=identifier, seed=seed)


def pictures(num_images=20, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 256, (num_images, 1, 4, 4), dtype=np.uint8)
    return torch.from_numpy(numbers)


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Return where a model is saved; tests that damage it put it back."""
    directory = tmp_path_factory.mktemp("models") / "saved"
    whole_model().save(directory)
    return directory


@pytest.fixture
def copied(saved, tmp_path):
    return shutil.copytree(saved, tmp_path / "copied")


def same_weights(left, right):
    left, right = left.state_dict(), right.state_dict()
    return set(left) == set(right) and all(torch.equal(left[name], right[name]) for name in left)


def same_predictions(left, right):
    return all(
        torch.equal(getattr(left, item.name), getattr(right, item.name))
        for item in dataclasses.fields(left)
    )


def test_weights_follow_from_the_seed_and_no_global_state_is_touched():
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = whole_model()
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    torch.manual_seed(2)
    assert same_weights(first, whole_model())
    other = whole_model(seed=1)
    for name in ("backbone.layers.0.weight", "known_head.prototypes", "novel_head.prototypes"):
        assert not torch.equal(first.state_dict()[name], other.state_dict()[name])


def test_discovery_gets_a_copy_that_keeps_what_was_learnt():
    known = known_model()
    known.statistics.means.normal_(generator=torch.Generator().manual_seed(0))
    before = {name: tensor.clone() for name, tensor in known.state_dict().items()}
    whole = known.with_novel(NOVEL, identifier=True, seed=3)
    for name, tensor in before.items():
        assert torch.equal(whole.state_dict()[name], tensor)
    with torch.no_grad():
        for tensor in whole.state_dict().values():
            tensor.fill_(1)
    assert all(torch.equal(known.state_dict()[name], tensor) for name, tensor in before.items())
    assert known.novel_head is None
    assert known.identifier is None


def test_a_novel_head_can_be_replaced():
    again = whole_model().with_novel(
        NovelHead(num_novel=5, num_heads=1, num_hidden=2, num_projected=2), identifier=False, seed=1
    )
    assert again.num_novel == 5
    assert again.identifier is None
    assert torch.equal(again.known_head.prototypes, known_model().known_head.prototypes)


def test_classes_have_names_and_numbers():
    assert known_model().class_names == ("cat", "dog")
    assert (known_model().num_known, known_model().num_novel) == (2, 0)
    assert whole_model().class_names == ("cat", "dog", "novel-1", "novel-2", "novel-3")
    assert whole_model().num_novel == 3


@pytest.mark.parametrize("training", [True, False])
def test_predicting_changes_nothing(training):
    model = whole_model().train(training)
    model.known_head.train(not training)
    modes = [part.training for part in model.modules()]
    before = {name: tensor.clone() for name, tensor in model.state_dict().items()}
    prediction = model.predict(pictures())
    assert [part.training for part in model.modules()] == modes
    assert all(torch.equal(before[name], tensor) for name, tensor in model.state_dict().items())
    assert same_predictions(prediction, whole_model().eval().predict(pictures()))


def running_statistics(model):
    buffers = model.backbone.named_buffers()
    return {name: tensor.clone() for name, tensor in buffers if "running" in name}


@pytest.mark.parametrize("hold", [True, False])
def test_norms_of_the_backbone_move_in_training_unless_they_are_held(hold):
    model = whole_model()
    assert not model.hold_norms
    model.hold_norms = hold
    model.train()
    before = running_statistics(model)
    features = model.backbone(pictures())
    model.novel_head(features)
    after = running_statistics(model)
    assert before
    assert {torch.equal(before[name], after[name]) for name in before} == {hold}
    # The novel heads have norms of their own, and those follow the pool in either case.
    assert not torch.equal(model.novel_head.norm.running_mean, torch.zeros(2 * 8))


def test_holding_norms_leaves_every_other_part_in_training_mode():
    model = whole_model()
    model.hold_norms = True
    model.train()
    held = {part for part in model.modules() if not part.training}
    assert held == {
        part
        for part in model.backbone.modules()
        if isinstance(part, torch.nn.BatchNorm1d | torch.nn.BatchNorm2d)
    }
    assert all(p.requires_grad for p in model.parameters())
    torch.nn.ModuleDict({"model": model.eval()}).train()  # as the loop does it
    assert {part for part in model.modules() if not part.training} == held
    assert not any(part.training for part in model.eval().modules())


def test_held_norms_see_every_picture_as_in_evaluation():
    model = whole_model()
    model.hold_norms = True
    with torch.no_grad():
        held = model.train().backbone(pictures())
        assert torch.equal(held, model.eval().backbone(pictures()))
        model.hold_norms = False
        assert not torch.allclose(held, model.train().backbone(pictures()))


def test_batches_do_not_matter(monkeypatch):
    model, images = whole_model(), pictures(7)
    together = model.predict(images)
    monkeypatch.setattr("ncdwf.model.model.EVALUATION_BATCH", 3)
    apart = model.predict(images)
    assert torch.equal(together.labels, apart.labels)
    assert torch.allclose(together.probability, apart.probability, atol=1e-5)
    assert torch.allclose(together.novelty, apart.novelty, atol=1e-5)
    assert model.features(images).shape == (7, model.backbone.num_features)


@pytest.mark.parametrize("make", [known_model, whole_model])
def test_no_pictures_give_no_answers(make):
    model = make()
    prediction = model.predict(pictures(0))
    assert {len(getattr(prediction, item.name)) for item in dataclasses.fields(prediction)} == {0}
    assert prediction.labels.dtype == torch.int64
    assert model.features(pictures(0)).shape == (0, model.backbone.num_features)


def scripted(model, known, novel, novelty):
    """Let `model` say what the tables say, whatever the pictures."""
    answers = Outputs(
        known_logits=torch.tensor(known),
        novel_logits=torch.tensor(novel),
        novelty=torch.tensor(novelty, dtype=torch.float64),
    )
    model.outputs = lambda features: answers
    return model


def test_routing_by_hand():
    model = scripted(
        whole_model(),
        known=[[0.9, 0.8], [0.1, 0.3], [0.9, 0.8]],
        novel=[[[0.9, 0.0, 0.0]] * 3, [[0.0, 0.1, 0.2], [0.0, 0.5, 0.4], [0.5, 0.1, 0.2]]],
        novelty=[0.79999, 0.8, 0.95],
    )
    model.identifier.tau.fill_(0.8)
    model.best_head.fill_(1)
    got = model.predict(pictures(3))
    # Below, at and above the threshold: known class 0, then clusters 1 and 0 of the second head.
    assert got.labels.tolist() == [0, 3, 2]
    assert got.novelty.tolist() == [0.79999, 0.8, 0.95]
    # Softmax at a temperature of 0.1: differences of the logits times ten.
    expected = [
        1 / (1 + math.exp(-1)),
        1 / (1 + math.exp(-5) + math.exp(-1)),
        1 / (1 + math.exp(-4) + math.exp(-3)),
    ]
    assert got.probability.tolist() == pytest.approx(expected, rel=1e-5)


def test_before_discovery_every_picture_is_known():
    model = known_model()
    got = model.predict(pictures())
    assert set(got.labels.tolist()) <= {0, 1}
    assert got.novelty.tolist() == [0] * 20
    logits = model.outputs(model.features(pictures())).known_logits
    assert torch.equal(got.labels, logits.argmax(1))
    assert torch.allclose(got.probability, (logits.double() / 0.1).softmax(1).max(1).values)


def test_outputs_are_what_the_parts_say():
    model = whole_model().eval()
    features = model.features(pictures())
    outputs = model.outputs(features)
    cosines = F.cosine_similarity(features[:, None], model.known_head.prototypes[None], dim=-1)
    assert torch.allclose(outputs.known_logits, cosines, atol=1e-5)
    assert torch.equal(outputs.novel_logits, model.novel_head(features))
    assert torch.equal(outputs.novelty, model.identifier.novelty(features))
    assert outputs.novelty.dtype == torch.float64
    assert not outputs.known_logits.requires_grad


@pytest.mark.parametrize("head", [0, 1])
def test_without_an_identifier_novelty_is_the_novel_share_of_one_softmax(head):
    model = whole_model(identifier=False)
    model.best_head.fill_(head)
    outputs = model.outputs(model.features(pictures()))
    known = np.exp(outputs.known_logits.double().numpy() / 0.1).sum(1)
    novel = np.exp(outputs.novel_logits[head].double().numpy() / 0.1).sum(1)
    assert np.allclose(outputs.novelty, novel / (known + novel))
    assert model.tau == 0.5


@pytest.mark.parametrize(
    ("images", "message"),
    [
        (np.zeros((2, 1, 5, 4), np.uint8), "pictures are (1, 5, 4); this model reads (1, 4, 4)"),
        (np.zeros((2, 3, 4, 4), np.uint8), "pictures are (3, 4, 4); this model reads (1, 4, 4)"),
        (np.zeros((2, 1, 4, 4), np.float32), "uint8 values 0 to 255 are accepted"),
    ],
)
def test_pictures_of_another_kind_are_refused(images, message):
    with pytest.raises(InputError, match=re.escape(message)):
        whole_model().predict(images)


@pytest.mark.parametrize("spread", ["shared-diagonal", "shared", "per-class"])
@pytest.mark.parametrize("make", [known_model, whole_model])
def test_a_saved_model_predicts_as_before(tmp_path, make, spread):
    model = make(spread=spread)
    model.statistics.spread.normal_(generator=torch.Generator().manual_seed(0))
    if model.identifier is not None:
        model.identifier.tau.fill_(1 - 1e-12)
        model.best_head.fill_(1)
    model.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model")
    assert same_weights(model, loaded)
    assert same_predictions(model.predict(pictures()), loaded.predict(pictures()))
    assert loaded.architecture == model.architecture
    assert loaded.class_names == model.class_names
    assert loaded.tau == model.tau
    assert {p.name for p in (tmp_path / "model").iterdir()} == {DESCRIPTION_FILE, WEIGHTS_FILE}


def test_a_loaded_model_can_be_trained_further(saved):
    model = Model.load(saved)
    assert not model.training
    assert all(weight.requires_grad for weight in model.parameters())
    with torch.no_grad():
        model.known_head.prototypes.add_(1)
    assert not same_weights(model, Model.load(saved))


def test_names_in_any_script_are_kept(tmp_path):
    names = ('"quoted"\n', "猫 \U0001f408")
    Model.create(SHAPE, names, seed=0).save(str(tmp_path / "model"))
    assert Model.load(str(tmp_path / "model")).known_names == names


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


def refused(directory, file):
    """Check that loading is refused in one line that names `file`."""
    with pytest.raises(InputError, match=re.escape(str(directory / file))) as caught:
        Model.load(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
        ('{"format": 1, "format": 1}', "a key stands twice"),
        ('{"format": 1, "x": NaN}', "NaN is not allowed"),
        ('{"format": 1, "x": 1e999}', "1e999 is too large"),
        ('{"format": 1, "x": ' + 100_000 * "[", "recursion"),
        ('{"format": 1, "x": "\\ud800"}', "damaged or was changed"),
        ('{"format": 1, "x": ' + 600 * "[" + 600 * "]" + "}", "damaged or was changed"),
        ('{"format": 1}', "damaged or was changed"),
        ('{"format": 2}', f"has format 2; this version of ncdwf reads {FORMAT}"),
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
        (lambda d: d["architecture"].update(height=0), "height=0"),
        (lambda d: d["architecture"].update(num_known="2"), "num_known='2' should be int"),
        (lambda d: d["architecture"].update(temperature=0), "temperature=0.0"),
        (lambda d: d["architecture"].update(spread="wide"), "spread='wide' is not one of"),
        (lambda d: d["architecture"]["novel"].update(num_heads=0), "novel="),
        (lambda d: d["architecture"].update(num_channels=2**62), ""),
        (lambda d: d.pop("known_names"), "known_names"),
        (lambda d: d.update(known_names=["one"]), "does not name every class once"),
        (lambda d: d.update(novel_names=[]), "does not name every class once"),
        (lambda d: d.update(known_names=[1, 2]), "a name is not a string"),
        (lambda d: d.update(known_names=7), "not iterable"),
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


def test_weights_of_another_model_are_refused(copied, tmp_path):
    whole_model(seed=1).save(tmp_path / "other")
    shutil.copy(tmp_path / "other" / WEIGHTS_FILE, copied / WEIGHTS_FILE)
    assert "damaged or was changed" in refused(copied, WEIGHTS_FILE)


def test_a_pickle_in_place_of_weights_is_not_run(copied):
    data = b"cos\nabort\n(tR."
    (copied / WEIGHTS_FILE).write_bytes(data)
    rewrite(copied, lambda d: d.update(weights_sha256=storage.sha256(data)))
    assert "is not a safetensors file" in refused(copied, WEIGHTS_FILE)


@pytest.mark.parametrize("spread", ["shared-diagonal", "shared", "per-class"])
def test_every_stored_tensor_says_what_it_is_made_from(spread):
    model = whole_model(spread=spread)
    used = set()
    for name in model.state_dict():
        prefix = max((p for p in DERIVED_FROM if f"{name}.".startswith(f"{p}.")), key=len)
        used.add(prefix)
        # Statistics and thresholds are told one by one; weights by the part they belong to.
        if name.startswith("statistics.") or "tau" in name:
            assert prefix == name
        (holding,) = (h for h in model.holdings() if h.name == name)
        assert holding.derived_from == DERIVED_FROM[prefix]
    assert used == set(DERIVED_FROM)


def test_holdings_list_every_tensor_and_its_size(saved):
    model = Model.load(saved)
    holdings = {holding.name: holding for holding in model.holdings()}
    stored = storage.parse_tensors((saved / WEIGHTS_FILE).read_bytes(), saved)
    assert {name: h.shape for name, h in holdings.items()} == {
        name: tuple(tensor.shape) for name, tensor in stored.items()
    }
    assert holdings["identifier.tau"].num_bytes == 8  # one double
    num_features = model.backbone.num_features
    assert holdings["known_head.prototypes"].num_bytes == 2 * num_features * 4  # single floats


@pytest.mark.parametrize(
    ("kind", "name", "value"),
    [(SHAPE, "num_known", 0), (SHAPE, "temperature", -0.1), (NOVEL, "num_novel", 0)],
)
def test_impossible_shapes_are_refused(kind, name, value):
    with pytest.raises(InputError, match=f"{name}={value}"):
        dataclasses.replace(kind, **{name: value})

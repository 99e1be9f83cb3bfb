import dataclasses
import math
import re
import sys
import types

import numpy as np
import pytest
import torch
from conftest import fingerprint, unchanged_global_state
from torch import nn
from torch.nn import functional as F

from ncdwf.errors import InputError
from ncdwf.model import Architecture, Model, NovelHead, Outputs
from ncdwf.model.archive import DESCRIPTION_FILE, WEIGHTS_FILE
from ncdwf.model.initialise import build
from ncdwf.noise import generator

SHAPE = Architecture(
    backbone="small",
    input_shape=(1, 4, 4),
    num_known=2,
    temperature=0.1,
    spread="shared-diagonal",
)
NOVEL = NovelHead(num_novel=3, num_heads=2, num_hidden=8, num_projected=4)


VECTOR_SHAPE = dataclasses.replace(SHAPE, backbone="vector", input_shape=(5,))
OWN_SHAPE = dataclasses.replace(VECTOR_SHAPE, backbone="custom")


def known_model(seed=0, **changes):
    return Model.create(dataclasses.replace(SHAPE, **changes), ("cat", "dog"), seed=seed)


def whole_model(seed=0, *, identifier=True, **changes):
    return known_model(seed, **changes).with_novel(NOVEL, identifier=identifier, seed=seed)


def test_another_default_type_is_refused_by_name():
    torch.set_default_dtype(torch.float64)
    try:
        with pytest.raises(InputError, match=r"torch\.float64 by default; call torch\.set_default"):
            known_model()
    finally:
        torch.set_default_dtype(torch.float32)


def pictures(num_images=20, seed=0):
    numbers = np.random.default_rng(seed).integers(0, 256, (num_images, 1, 4, 4), dtype=np.uint8)
    return torch.from_numpy(numbers)


def vectors(num_vectors=20, seed=0):
    return torch.randn(num_vectors, 5, generator=torch.Generator().manual_seed(seed))


def vector_model(seed=0):
    """Return a model of vectors that knows how they are spread."""
    model = Model.create(VECTOR_SHAPE, ("cat", "dog"), seed=seed)
    model.backbone.normalise.measure(100 * vectors(seed=7))
    return model


def own_backbone(seed=0, num_features=6):
    """Return somebody's network for vectors, with weights that follow from `seed`."""
    module = nn.Sequential(nn.Linear(5, num_features), nn.BatchNorm1d(num_features), nn.ReLU())
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for tensor in (*module.parameters(), module[1].running_mean):
            tensor.normal_(generator=source)
    return module


def own_model(seed=0, backbone=None):
    module = own_backbone() if backbone is None else backbone
    return Model.create(OWN_SHAPE, ("cat", "dog"), seed=seed, backbone=module)


def with_statistics(model, seed=0):
    """Return the model with numbers in the place of what both phases measure."""
    source = torch.Generator().manual_seed(seed)
    for statistics in (model.statistics, model.novel_statistics):
        statistics.means.normal_(generator=source)
        statistics.spread.uniform_(0.5, 1.5, generator=source)
        statistics.counts.random_(1, 10, generator=source)
        statistics.feature_norm.uniform_(1, 2, generator=source)
        statistics.angles.uniform_(0, 1, generator=source)
    return model


def state(model):
    return {name: tensor.clone() for name, tensor in model.state_dict().items()}


def is_still(model, before):
    after = model.state_dict()
    return list(after) == list(before) and all(torch.equal(after[n], before[n]) for n in before)


def refused(directory, file):
    """Check that loading is refused in one line that names `file`."""
    with pytest.raises(InputError, match=re.escape(str(directory / file))) as caught:
        Model.load(directory)
    assert "\n" not in str(caught.value)
    return str(caught.value)


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
    known.backbone.normalise.measure(pictures())
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


def test_what_discovery_gets_is_drawn_from_a_stream_of_its_own():
    whole = known_model().with_novel(NOVEL, identifier=True, seed=3)
    shape = whole.architecture, whole.known_names, whole.novel_names
    for stream in ("novel", "model"):
        drawn = build(lambda: Model(*shape), generator(3, stream))
        for name in ("novel_head.prototypes", "identifier.layers.0.weight"):
            same = torch.equal(whole.get_parameter(name), drawn.get_parameter(name))
            assert same == (stream == "novel")


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
    widths = []
    model.novel_head.register_forward_pre_hook(lambda _, inputs: widths.append(len(inputs[0])))
    assert model.outputs(model.features(images)).novel_logits.shape == (2, 7, 3)
    assert widths == [3, 3, 1]  # hidden layers of a whole pool would fill the memory


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


def test_each_head_has_a_temperature_of_its_own():
    novel = dataclasses.replace(NOVEL, temperature=0.5)
    model = scripted(
        known_model(temperature=0.2).with_novel(novel, identifier=True, seed=0),
        known=[[0.9, 0.8], [0.9, 0.8]],
        novel=[[[0.9, 0.0, 0.0]] * 2, [[0.0, 0.1, 0.2], [0.5, 0.1, 0.2]]],
        novelty=[0.1, 0.9],
    )
    model.best_head.fill_(1)
    got = model.probabilities(model.outputs(None))
    # Differences of the known logits times five, of the novel ones (second head) times two.
    known = 1 + math.exp(-0.5)
    clusters = 1 + math.exp(-0.8) + math.exp(-0.6)
    assert got.dtype == torch.float64
    assert got[0].tolist() == pytest.approx([1 / known, math.exp(-0.5) / known, 0, 0, 0])
    expected = [0, 0, 1 / clusters, math.exp(-0.8) / clusters, math.exp(-0.6) / clusters]
    assert got[1].tolist() == pytest.approx(expected)
    predicted = model.predict(pictures(2))
    assert predicted.labels.tolist() == [0, 2]
    assert predicted.probability.tolist() == pytest.approx([1 / known, 1 / clusters])


def test_novelty_without_an_identifier_knows_both_temperatures():
    novel = dataclasses.replace(NOVEL, temperature=0.5)
    model = known_model(temperature=0.2).with_novel(novel, identifier=False, seed=0)
    outputs = model.outputs(model.features(pictures()))
    known = np.exp(outputs.known_logits.double().numpy() / 0.2).sum(1)
    clusters = np.exp(outputs.novel_logits[0].double().numpy() / 0.5).sum(1)
    assert np.allclose(outputs.novelty, clusters / (known + clusters))


@pytest.mark.parametrize(("identifier", "num_known"), [(True, 12), (False, 30)])
def test_the_classes_of_the_head_that_answers_share_one_probability(identifier, num_known):
    source = torch.Generator().manual_seed(0)
    model = scripted(
        whole_model(identifier=identifier),
        known=(2 * torch.rand(60, 2, generator=source) - 1).tolist(),
        novel=(2 * torch.rand(2, 60, 3, generator=source) - 1).tolist(),
        novelty=(np.arange(60) / 60).tolist(),
    )
    if identifier:
        model.identifier.tau.fill_(0.2)  # one half without one
    images = pictures(60)
    got = model.probabilities(model.outputs(None))
    is_novel = torch.arange(60) >= num_known
    assert got.shape == (60, 5)
    assert torch.allclose(got.sum(1), torch.ones(60, dtype=torch.float64))
    assert not got[is_novel, :2].any()
    assert not got[~is_novel, 2:].any()
    assert (got[is_novel, 2:] > 0).all()
    assert (got[~is_novel, :2] > 0).all()
    predicted = model.predict(images)
    assert torch.equal(got.argmax(1), predicted.labels)
    assert torch.allclose(got.max(1).values, predicted.probability)


def test_before_discovery_known_classes_share_one_probability():
    model = known_model(temperature=0.2)
    outputs = model.outputs(model.features(pictures()))
    expected = np.exp(outputs.known_logits.double().numpy() / 0.2)
    expected /= expected.sum(1, keepdims=True)
    assert np.allclose(model.probabilities(outputs), expected)


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
        (
            np.zeros((2, 16)),
            "vectors are (16,); this model reads (1, 4, 4) (channels, height, width)",
        ),
    ],
)
def test_pictures_of_another_kind_are_refused(images, message):
    with pytest.raises(InputError, match=re.escape(message)):
        whole_model().predict(images)


@pytest.mark.parametrize(
    ("inputs", "message"),
    [
        (np.zeros((2, 4)), "vectors are (4,); this model reads 5 numbers each"),
        ([[1.0] * 6], "vectors are (6,); this model reads 5 numbers each"),
        (np.zeros((2, 1, 4, 4), np.uint8), "pictures are (1, 4, 4); this model reads 5 numbers"),
        (np.zeros((2, 5, 5), np.uint8), "pictures are (1, 5, 5); this model reads 5 numbers"),
        (np.full((2, 5), np.nan), "images hold NaN, infinite or too large values"),
    ],
)
@pytest.mark.parametrize("make", [vector_model, own_model])
def test_vectors_of_another_width_are_refused(make, inputs, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        make().predict(inputs)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("make", [vector_model, own_model])
def test_models_of_vectors_predict_from_vectors_in_any_form(make):
    model = make().with_novel(NOVEL, identifier=True, seed=0)
    numbers = vectors().double()
    got = model.predict(numbers)
    assert len(got.labels) == 20
    assert same_predictions(got, model.predict(numbers.tolist()))
    assert same_predictions(got, model.predict(numbers.numpy()))
    assert len(set(model.features(vectors()).flatten().tolist())) > 20
    assert len(model.predict(np.zeros((0, 5))).labels) == 0


def test_a_saved_model_of_vectors_predicts_as_before(tmp_path):
    model = with_statistics(vector_model().with_novel(NOVEL, identifier=True, seed=0))
    model.save(tmp_path / "model")
    loaded = Model.load(tmp_path / "model")
    assert same_weights(model, loaded)
    assert loaded.architecture == model.architecture
    assert loaded.architecture.input_shape == (5,)
    assert same_predictions(model.predict(vectors()), loaded.predict(vectors()))


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


# Backbones of others


def test_a_backbone_of_ones_own_is_copied_with_its_weights():
    module = own_backbone()
    before = state(module)
    with unchanged_global_state():
        model = own_model(backbone=module)
    assert model.backbone.num_features == 6
    assert model.known_head.prototypes.shape == (2, 6)
    assert is_still(model.backbone.module, before)
    with torch.no_grad():
        assert torch.allclose(model.features(vectors()), module.eval()(vectors()))
        for tensor in model.state_dict().values():
            tensor.fill_(1)
    assert is_still(module, before)


def test_the_seed_decides_the_weights_around_a_backbone_of_ones_own():
    first, again, other = own_model(), own_model(), own_model(seed=1)
    assert same_weights(first, again)
    assert same_weights(first.backbone, other.backbone)
    assert not torch.equal(first.known_head.prototypes, other.known_head.prototypes)


def test_discovery_gets_a_copy_of_a_backbone_of_ones_own():
    known = own_model()
    known.backbone.normalise.measure(vectors())
    known.backbone.module[0].weight.requires_grad_(False)
    before = state(known)
    whole = known.with_novel(NOVEL, identifier=True, seed=3)
    assert all(torch.equal(whole.state_dict()[name], tensor) for name, tensor in before.items())
    assert torch.equal(whole.features(vectors()), known.features(vectors()))
    assert not whole.backbone.module[0].weight.requires_grad  # what is frozen stays frozen
    with torch.no_grad():
        for tensor in whole.state_dict().values():
            tensor.fill_(1)
    assert is_still(known, before)


@pytest.mark.parametrize("discovered", [False, True])
def test_a_saved_model_with_a_backbone_of_ones_own_needs_it_again(tmp_path, discovered):
    model = own_model()
    model.backbone.normalise.measure(vectors())
    if discovered:
        model = with_statistics(model.with_novel(NOVEL, identifier=True, seed=0))
    model.save(tmp_path)
    given_again = own_backbone(seed=1)
    before = state(given_again)
    loaded = Model.load(tmp_path, backbone=given_again)
    assert same_weights(model, loaded)
    assert same_predictions(model.predict(vectors()), loaded.predict(vectors()))
    assert not loaded.training
    assert loaded.backbone.module is not given_again
    assert is_still(given_again, before)
    message = f"the network of the model in {tmp_path} was passed as a module; load it in Python"
    with pytest.raises(InputError, match=re.escape(message)):
        Model.load(tmp_path)


@pytest.mark.parametrize(
    ("module", "file", "message"),
    [
        (own_backbone(num_features=7), WEIGHTS_FILE, "does not fit"),
        (nn.Linear(5, 6), WEIGHTS_FILE, "does not fit"),
        (nn.Linear(4, 6), DESCRIPTION_FILE, "cannot read inputs of shape (5,)"),
    ],
)
def test_a_saved_model_refuses_another_backbone_than_its_own(tmp_path, module, file, message):
    own_model().save(tmp_path)
    with pytest.raises(InputError, match=re.escape(str(tmp_path / file))) as caught:
        Model.load(tmp_path, backbone=module)
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


def test_names_that_cannot_be_written_leave_nothing_behind(tmp_path):
    model = Model.create(SHAPE, ("cat", "d\udcffg"), seed=0)
    with pytest.raises(InputError, match=r"^'\\udcff' is not valid text"):
        model.save(tmp_path / "model")
    assert not (tmp_path / "model").exists()


def test_a_backbone_that_cannot_read_the_inputs_makes_no_model():
    with pytest.raises(InputError, match=re.escape("cannot read inputs of shape (5,)")):
        own_model(backbone=nn.Linear(4, 6))


@pytest.fixture
def timm(monkeypatch):
    """Stand in for timm with one network, `net`, whose weights are drawn from the global state."""

    def create_model(name, *, num_classes, in_chans):
        return nn.Sequential(nn.Conv2d(in_chans, 6, 3), nn.GroupNorm(2, 6))

    fake = types.ModuleType("timm")
    fake.is_model = lambda name: name == "net"
    fake.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", fake)


@pytest.mark.parametrize(
    ("network", "reads"),
    [
        (nn.Conv2d(1, 3, 3, padding=1), True),
        (nn.Sequential(nn.Flatten(), nn.Linear(16, 3)), False),
        (nn.Flatten(), False),  # it returns another number of features
    ],
)
def test_a_model_tells_which_shapes_its_network_reads(network, reads):
    architecture = dataclasses.replace(SHAPE, backbone="custom")
    model = Model.create(architecture, ("cat", "dog"), seed=0, backbone=network).train()
    before = fingerprint(model)
    assert model.reads((1, 4, 4))
    assert model.reads((1, 2, 2)) == reads
    assert model.training
    assert fingerprint(model) == before


@pytest.mark.usefixtures("timm")
def test_weights_of_a_network_of_timm_follow_from_the_seed(tmp_path):
    torch.manual_seed(1)
    with unchanged_global_state():
        first = whole_model(backbone="timm:net")
    torch.manual_seed(2)
    assert same_weights(first, whole_model(backbone="timm:net"))
    other = whole_model(seed=1, backbone="timm:net")
    for name in ("backbone.module.0.weight", "known_head.prototypes"):
        assert not torch.equal(first.state_dict()[name], other.state_dict()[name])
    first.save(tmp_path)
    loaded = Model.load(tmp_path)  # timm makes the network again
    assert same_weights(first, loaded)
    assert same_predictions(first.predict(pictures()), loaded.predict(pictures()))


def test_a_saved_network_of_timm_needs_timm(tmp_path, timm, monkeypatch):
    whole_model(backbone="timm:net").save(tmp_path)
    monkeypatch.setitem(sys.modules, "timm", None)
    assert "the backbone 'timm:net' needs timm" in refused(tmp_path, DESCRIPTION_FILE)


# Another round


def test_promotion_makes_novel_classes_known():
    model = with_statistics(whole_model())
    model.best_head.fill_(1)
    model.hold_norms = True
    promoted = model.promoted()
    assert promoted.class_names == promoted.known_names == model.class_names
    assert (promoted.num_known, promoted.num_novel) == (5, 0)
    assert promoted.architecture == dataclasses.replace(
        SHAPE, num_known=5, num_discovered=3, novel=None, identifier=False
    )
    assert promoted.novel_head is None
    assert promoted.novel_statistics is None
    assert promoted.identifier is None
    assert int(promoted.best_head) == 0
    assert not promoted.hold_norms
    assert not any(part.training for part in promoted.modules())
    assert same_weights(promoted.backbone, model.backbone)
    known, novel = model.statistics, model.novel_statistics
    assert torch.equal(promoted.statistics.means, torch.cat([known.means, novel.means]))
    assert torch.equal(promoted.statistics.counts, torch.cat([known.counts, novel.counts]))
    assert set(promoted.predict(pictures()).labels.tolist()) <= set(range(5))
    assert promoted.predict(pictures()).novelty.tolist() == [0] * 20


def test_promoted_prototypes_point_to_the_known_ones_and_to_the_novel_means():
    model = with_statistics(whole_model())
    prototypes = model.promoted().known_head.prototypes
    rows = torch.cat([model.known_head.prototypes, model.novel_statistics.means])
    assert torch.allclose(prototypes, rows / rows.norm(dim=1, keepdim=True), atol=1e-6)
    assert prototypes.requires_grad
    # The known classes are told apart as before.
    features = model.features(pictures())
    before, after = (m.outputs(features).known_logits for m in (model, model.promoted()))
    assert torch.allclose(before, after[:, :2], atol=1e-5)


@pytest.mark.parametrize("spread", ["shared-diagonal", "shared", "per-class"])
def test_a_promoted_model_is_a_copy_that_can_be_saved(tmp_path, spread):
    model = with_statistics(whole_model(spread=spread)).train()
    before = state(model)
    promoted = model.promoted()
    promoted.save(tmp_path)
    loaded = Model.load(tmp_path)
    assert same_weights(promoted, loaded)
    assert loaded.architecture == promoted.architecture
    assert same_predictions(promoted.predict(pictures()), loaded.predict(pictures()))
    with torch.no_grad():
        for tensor in promoted.state_dict().values():
            tensor.fill_(1)
    assert is_still(model, before)
    assert all(part.training for part in model.modules())
    assert model.num_novel == 3
    assert model.class_names == ("cat", "dog", "novel-1", "novel-2", "novel-3")


@pytest.mark.parametrize("make", [known_model, lambda: with_statistics(whole_model()).promoted()])
def test_only_what_was_discovered_can_be_promoted(make):
    with pytest.raises(InputError, match="this model has not discovered anything yet"):
        make().promoted()


def next_names(model, num_novel=2):
    shape = dataclasses.replace(NOVEL, num_novel=num_novel)
    return model.with_novel(shape, identifier=False, seed=0).novel_names


def test_names_of_novel_classes_go_on_after_a_promotion():
    model = with_statistics(whole_model()).promoted()
    assert next_names(model) == ("novel-4", "novel-5")
    again = with_statistics(model.with_novel(NOVEL, identifier=False, seed=0)).promoted()
    assert again.architecture.num_discovered == 6
    assert next_names(again) == ("novel-7", "novel-8")
    model.rename({"novel-1": "kakapo"})
    assert next_names(model) == ("novel-4", "novel-5")  # a name that became free stays free


def test_names_that_are_taken_are_passed_over():
    model = Model.create(SHAPE, ("novel-2", "novel-3"), seed=0)
    assert next_names(model, 3) == ("novel-1", "novel-4", "novel-5")
    promoted = with_statistics(whole_model()).promoted()
    promoted.rename({"cat": "novel-5"})
    assert next_names(promoted) == ("novel-4", "novel-6")


def test_classes_can_be_given_other_names(tmp_path):
    model = whole_model()
    model.rename({"novel-1": "kakapo", "cat": "猫"})
    assert model.known_names == ("猫", "dog")
    assert model.novel_names == ("kakapo", "novel-2", "novel-3")
    model.rename({"dog": "kakapo", "kakapo": "dog"})  # all at once, so two can change places
    assert model.class_names == ("猫", "kakapo", "dog", "novel-2", "novel-3")
    model.rename({})
    model.rename({"dog": "dog"})
    model.save(tmp_path)
    assert Model.load(tmp_path).class_names == ("猫", "kakapo", "dog", "novel-2", "novel-3")


@pytest.mark.parametrize(
    ("names", "message"),
    [
        ({"novel-4": "kakapo"}, "there is no class 'novel-4'; there are cat, dog, novel-1, novel-"),
        ({"novel-1": "kea", "cow": "kakapo"}, "there is no class 'cow'"),
        ({"novel-1": "dog"}, "two classes would be called 'dog'"),
        ({"novel-1": "d" * 1001}, "a name of 1,001 characters; up to 1,000 are accepted"),
        ({"novel-1": "novel-2"}, "two classes would be called 'novel-2'"),
        ({"novel-1": "kakapo", "cat": "kakapo"}, "two classes would be called 'kakapo'"),
        ({"novel-1": ""}, "'' is not a name"),
        ({"novel-1": " \t"}, "' \\t' is not a name"),
        ({"novel-1": "new\nline"}, "'new\\nline' has characters that cannot be printed"),
        ({"novel-1": "\x1b[31mred"}, "'\\x1b[31mred' has characters that cannot be printed"),
        ({"novel-1": "evil\u202egpj"}, "'evil\\u202egpj' has characters that cannot be printed"),
    ],
)
def test_names_that_cannot_be_given_are_refused_and_change_nothing(names, message):
    model = whole_model()
    with pytest.raises(InputError, match=re.escape(message)):
        model.rename(names)
    assert model.class_names == whole_model().class_names


@pytest.mark.parametrize(
    "name", ["می\u200cخواهم", "鳥\u3000類", "👨\u200d👩\u200d👧", "no\xa0break"]
)
def test_names_of_any_script_can_be_given(name):
    model = whole_model()
    model.rename({"novel-1": name})
    assert model.novel_names[0] == name


# Saving and loading


def test_a_loaded_model_can_be_trained_further(tmp_path):
    whole_model().save(tmp_path)
    model = Model.load(tmp_path)
    assert not model.training
    assert all(weight.requires_grad for weight in model.parameters())
    with torch.no_grad():
        model.known_head.prototypes.add_(1)
    assert not same_weights(model, Model.load(tmp_path))


def test_names_in_any_script_are_kept(tmp_path):
    names = ('"quoted"\n', "猫 \U0001f408")
    Model.create(SHAPE, names, seed=0).save(str(tmp_path / "model"))
    assert Model.load(str(tmp_path / "model")).known_names == names


@pytest.mark.parametrize("spread", ["shared-diagonal", "shared", "per-class"])
def test_what_outlives_the_pool_is_told_and_fits_what_outlives_the_labelled_data(spread):
    model = whole_model(spread=spread)
    holdings = {holding.name: holding for holding in model.holdings()}
    told = {name: h for name, h in holdings.items() if name.startswith("novel_statistics.")}
    assert {h.derived_from for h in told.values()} == {
        "the pool: each novel class's mean feature, spread, size, angles"
    }
    # 256 features; three novel classes, where there are two known ones.
    shapes = {"shared-diagonal": (256,), "shared": (256, 256), "per-class": (3, 256, 256)}
    assert {name: h.shape for name, h in told.items()} == {
        "novel_statistics.means": (3, 256),
        "novel_statistics.spread": shapes[spread],
        "novel_statistics.counts": (3,),
        "novel_statistics.feature_norm": (),
        "novel_statistics.angles": (3, 31),
    }
    assert not any(h.name.startswith("novel") for h in known_model(spread=spread).holdings())

import dataclasses
import errno
import json
import math
import os
import sys
import types

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from conftest import fingerprint, unchanged_global_state
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import ncdwf
from ncdwf import export
from ncdwf.errors import InputError, NcdwfError, StorageError
from ncdwf.export import TOLERANCE, _Graph, _least_logit, export_onnx
from ncdwf.model import Architecture, Model, NovelHead
from ncdwf.model.backbone import Foreign

SHAPE = Architecture(
    backbone="small", input_shape=(1, 6, 5), num_known=3, temperature=0.1, spread="shared-diagonal"
)
NOVEL = NovelHead(num_novel=4, num_heads=3, num_hidden=8, num_projected=5, temperature=0.2)
NAMES = ("cat", '"dog"\n', "猫 \U0001f408")


def known_model(seed=0, **changes):
    return Model.create(dataclasses.replace(SHAPE, **changes), NAMES, seed=seed)


def whole_model(seed=0, *, identifier=True, best_head=1, novel=NOVEL, **changes):
    model = known_model(seed, **changes).with_novel(novel, identifier=identifier, seed=seed)
    model.best_head.fill_(best_head)
    settle_norms(model)
    return model.eval()


def settle_norms(model):
    """Let the norms see pictures once, so that they have something to do."""
    for part in model.train().modules():
        if isinstance(part, nn.BatchNorm1d | nn.BatchNorm2d):
            part.momentum = 1.0
    with torch.no_grad():
        model.novel_head(model.backbone(pictures(model, 32, seed=1)))


def pictures(model, num_images=64, seed=0):
    size = (num_images, *model.architecture.input_shape)
    if len(size) == 2:
        return torch.randn(size, generator=torch.Generator().manual_seed(seed))
    return torch.from_numpy(np.random.default_rng(seed).integers(0, 256, size, dtype=np.uint8))


def split_routes(model, images):
    """Set the identifier's threshold so that half of `images` are novel, with room between."""
    logits = model.identifier(model.features(images)).detach().double().sort().values
    gaps = logits.diff()[len(logits) // 4 : -len(logits) // 4]
    widest = int(gaps.argmax()) + len(logits) // 4
    model.identifier.tau.copy_(logits[widest : widest + 2].mean().sigmoid())
    assert gaps.max() > 1e-5  # rounding does not reach over it
    return model


def load(path, **provider):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 4
    providers = provider.get("providers", ["CPUExecutionProvider"])
    return onnxruntime.InferenceSession(path, options, providers=providers)


def run(path, images, **provider):
    session = load(path, **provider)
    return tuple(map(torch.from_numpy, session.run(None, {"images": images.numpy()})))


def assert_same_answers(path, model, images, tolerance=TOLERANCE / 4, **provider):
    probabilities, novelty = run(path, images, **provider)
    outputs = model.outputs(model.features(images))
    expected = model.predict(images)
    assert probabilities.dtype == novelty.dtype == torch.float32
    assert probabilities.shape == (len(images), model.num_known + model.num_novel)
    assert torch.equal(probabilities.argmax(1), expected.labels)
    torch.testing.assert_close(
        probabilities.double(), model.probabilities(outputs).cpu(), atol=tolerance, rtol=0
    )
    torch.testing.assert_close(novelty.double(), expected.novelty, atol=tolerance, rtol=0)


@pytest.fixture
def path(tmp_path):
    return tmp_path / "model.onnx"


@pytest.mark.parametrize("best_head", [0, 1, 2])
def test_the_file_answers_as_the_model_does(path, best_head):
    model = whole_model(best_head=best_head)
    images = pictures(model)
    split_routes(model, images)
    export_onnx(model, path)
    assert_same_answers(path, model, images)
    labels = model.predict(images).labels
    assert 0 < int((labels < model.num_known).sum()) < len(images)  # both heads answered


def test_probabilities_are_those_of_the_head_that_answers(path):
    model = whole_model()
    images = pictures(model)
    split_routes(model, images)
    export_onnx(model, path)
    probabilities, _ = run(path, images)
    is_novel = model.predict(images).labels >= model.num_known
    assert bool((probabilities[is_novel, : model.num_known] == 0).all())
    assert bool((probabilities[~is_novel, model.num_known :] == 0).all())
    torch.testing.assert_close(probabilities.sum(1), torch.ones(len(images)))


def test_a_learnt_model_keeps_its_answers(path, found_model, split):
    export_onnx(found_model, path)
    assert_same_answers(path, found_model, split.test_images)


def test_what_holds_a_model_is_exported_by_it(path, found_model, split):
    export_onnx(types.SimpleNamespace(model_=found_model), path)
    assert_same_answers(path, found_model, split.test_images)


def test_a_model_before_discovery_calls_nothing_novel(path, known_model, split):
    export_onnx(known_model, path)
    assert_same_answers(path, known_model, split.test_images)
    assert not run(path, split.test_images)[1].any()


def test_a_model_without_identifier_routes_by_the_joint_softmax(path):
    model = whole_model(identifier=False)
    images = pictures(model)
    export_onnx(model, path)
    assert_same_answers(path, model, images)
    labels = model.predict(images).labels
    assert 0 < int((labels < model.num_known).sum()) < len(images)


@pytest.mark.parametrize("make", [known_model, whole_model])
@pytest.mark.parametrize("num_images", [0, 1, 2, 3, 100])
def test_a_batch_may_have_any_size(path, make, num_images):
    model = make()
    export_onnx(model, path)
    assert_same_answers(path, model, pictures(model, num_images))


@pytest.mark.parametrize("shape", [(1, 1, 1), (3, 8, 8), (1, 3, 9)])
def test_pictures_may_have_any_size(path, shape):
    model = whole_model(input_shape=shape)
    export_onnx(model, path)
    assert_same_answers(path, model, pictures(model))


def test_vectors_go_in_as_single_floats(path):
    model = whole_model(backbone="vector", input_shape=(7,))
    export_onnx(model, path)
    assert_same_answers(path, model, pictures(model))
    assert load(path).get_inputs()[0].type == "tensor(float)"


def test_one_class_of_each_kind_is_enough(path):
    novel = dataclasses.replace(NOVEL, num_novel=1, num_heads=1)
    model = whole_model(novel=novel, best_head=0)
    export_onnx(model, path)
    assert_same_answers(path, model, pictures(model))


def test_resnet18(path):
    model = whole_model(backbone="resnet18", input_shape=(3, 32, 32))
    images = pictures(model, 16)
    split_routes(model, images)
    export_onnx(model, path)
    assert_same_answers(path, model, images)
    assert path.stat().st_size <= 1.02 * weights_needed(model)


def weights_needed(model):
    return sum(t.numel() * t.element_size() for t in _Graph(model).state_dict().values())


@pytest.mark.parametrize("make", [known_model, whole_model])
def test_only_what_answers_is_in_the_file(path, make):
    novel = NovelHead(num_novel=4, num_heads=9, num_hidden=64, num_projected=64, temperature=0.1)
    model = whole_model(novel=novel) if make is whole_model else make()
    export_onnx(model, path)
    assert path.stat().st_size <= 1.1 * weights_needed(model)
    assert [p.name for p in path.parent.iterdir()] == [path.name]
    assert all(not t.external_data for t in onnx.load(path).graph.initializer)


@pytest.mark.parametrize("logit", [16.1, 18.0, 25.0])
def test_a_threshold_very_near_1_is_compared_exactly(path, logit):
    model = whole_model()
    images = pictures(model)
    with torch.no_grad():
        model.identifier.layers[-1].weight.mul_(100)
        mean = model.identifier(model.features(images)).mean()
        model.identifier.layers[-1].bias.add_(logit - mean)
    split_routes(model, images)
    assert 0 < 1 - model.tau < 2e-7
    export_onnx(model, path)
    assert_same_answers(path, model, images)
    is_novel = model.predict(images).labels >= model.num_known
    assert 0 < int(is_novel.sum()) < len(images)
    if logit > 17:  # P(novel) in single precision would not do
        assert not torch.equal(run(path, images)[1] >= np.float32(model.tau), is_novel)


def novelty_of(logit):
    return float(torch.tensor(logit, dtype=torch.float64).sigmoid())


@pytest.mark.parametrize(
    "tau", [5e-324, 1e-30, 0.25, 0.5, 1 - 1e-7, 1 - 1e-12, math.nextafter(1, 0), 1.0]
)
def test_the_least_logit_is_the_first_that_reaches_the_threshold(tau):
    least = np.float32(_least_logit(tau))
    assert novelty_of(least) >= tau
    assert novelty_of(np.nextafter(least, np.float32(-np.inf))) < tau


@given(st.floats(0, 1), st.floats(-100, 100, width=32))
def test_logits_are_routed_as_probabilities_are(tau, logit):
    assert (logit >= _least_logit(tau)) == (novelty_of(logit) >= tau)


def test_thresholds_that_all_or_none_reach():
    assert _least_logit(0.0) == _least_logit(-1.0) == -math.inf
    assert math.isnan(_least_logit(1.5))  # nothing is at or above it


def test_the_file_says_what_its_numbers_mean(path):
    model = whole_model()
    model.identifier.tau.fill_(1 - 1e-7)
    export_onnx(model, path)
    session = load(path)
    assert [(i.name, i.type, i.shape) for i in session.get_inputs()] == [
        ("images", "tensor(uint8)", ["batch", 1, 6, 5])
    ]
    assert [(o.name, o.type, o.shape) for o in session.get_outputs()] == [
        ("probabilities", "tensor(float)", ["batch", 7]),
        ("novelty", "tensor(float)", ["batch"]),
    ]
    metadata = session.get_modelmeta().custom_metadata_map
    assert json.loads(metadata.pop("class_names")) == list(model.class_names)
    assert float(metadata.pop("tau")) == 1 - 1e-7
    assert metadata == {"num_known": "3", "ncdwf_version": ncdwf.__version__}


def test_the_file_is_valid_and_names_no_place_on_this_machine(path):
    export_onnx(whole_model(), path)
    onnx.checker.check_model(path, full_check=True)
    for folder in (os.getcwd(), os.path.dirname(torch.__file__)):  # noqa: PTH109, PTH120
        assert folder.encode() not in path.read_bytes()


def test_the_same_model_makes_the_same_file(path, tmp_path):
    export_onnx(whole_model(), path)
    export_onnx(whole_model().train(), str(tmp_path / "new" / "folder" / "other"), check=False)
    assert (tmp_path / "new" / "folder" / "other").read_bytes() == path.read_bytes()


def test_exporting_changes_neither_the_model_nor_global_state(path):
    model = whole_model().train()
    model.known_head.eval()
    before, modes = fingerprint(model), [part.training for part in model.modules()]
    with unchanged_global_state():
        export_onnx(model, path)
    assert fingerprint(model) == before
    assert [part.training for part in model.modules()] == modes
    assert all(weight.requires_grad for weight in model.parameters())


def test_a_file_that_is_there_is_kept(path):
    path.write_text("mine")
    with pytest.raises(InputError, match=r"model\.onnx is there already; choose another file"):
        export_onnx(whole_model(), path)
    assert path.read_text() == "mine"


@pytest.mark.parametrize("name", ["", ".", "folder"])
def test_a_folder_is_not_overwritten(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "folder").mkdir()
    with pytest.raises(InputError, match="is there already"):
        export_onnx(whole_model(), name)


@pytest.mark.parametrize("name", ["x" * 300, "file/model.onnx"])
def test_impossible_paths_are_refused_in_one_line(tmp_path, name):
    (tmp_path / "file").write_text("")
    with pytest.raises(NcdwfError, match="cannot write") as caught:
        export_onnx(whole_model(), tmp_path / name)
    assert "\n" not in str(caught.value)


def test_a_full_disk_leaves_no_file(path, monkeypatch):
    def full(_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(StorageError, match=r"model\.onnx: the disk is full"):
        export_onnx(whole_model(), path)
    assert not list(path.parent.iterdir())


def refused(model, path, message):
    """Check that exporting is refused in one line and leaves no file."""
    with pytest.raises(NcdwfError, match=message) as caught:
        export_onnx(model, path)
    assert "\n" not in str(caught.value)
    assert not list(path.parent.iterdir())


def test_a_file_with_other_answers_is_not_written(path, monkeypatch):
    one_head = export._one_head
    monkeypatch.setattr(export, "_one_head", lambda heads, number: one_head(heads, number - 1))
    model = whole_model()
    model.identifier.tau.fill_(0)
    refused(model, path, r"model\.onnx is not written, onnxruntime and PyTorch differ by 0\.\d+")
    export_onnx(model, path, check=False)
    assert path.exists()


def test_a_file_with_another_threshold_is_not_written(path, monkeypatch):
    model = whole_model()
    model.identifier.tau.fill_(0)
    monkeypatch.setattr(export, "_least_logit", lambda tau: math.inf)
    refused(model, path, "onnxruntime and PyTorch differ by")


def test_weights_that_are_no_numbers_are_not_written(path):
    model = whole_model()
    with torch.no_grad():
        model.known_head.prototypes.fill_(torch.nan)
        model.identifier.tau.fill_(1)
    refused(model, path, "is not written: the model answers NaN")


def test_a_file_that_cannot_be_run_is_not_written(path, monkeypatch):
    monkeypatch.setattr(onnx.ModelProto, "SerializeToString", lambda self: b"\x08broken")
    refused(whole_model(), path, "is not written, onnxruntime cannot run it")


class Odd(nn.Module):
    """A layer that ONNX has no words for."""

    def forward(self, features):
        return features + torch.linalg.eigvals(torch.eye(2) + features.mean()).abs().sum()


def test_a_network_that_cannot_be_written_is_refused(path):
    model = whole_model()
    model.backbone.layers.append(Odd())
    refused(model, path, "this model cannot be written as ONNX: .*linalg_eig")


def test_a_foreign_network_is_exported(path):
    model = whole_model()
    network = nn.Conv2d(1, model.backbone.num_features, 3)
    model.backbone = Foreign(network, SHAPE.input_shape)
    export_onnx(model, path)
    assert_same_answers(path, model, pictures(model))


def test_more_weights_than_a_file_holds_are_refused(path, monkeypatch):
    monkeypatch.setattr(export, "MAX_BYTES", 1000)
    refused(whole_model(), path, r"the weights have \d+ bytes; an ONNX file holds 1000")


@pytest.mark.parametrize(("name", "check"), [("onnx", False), ("onnxruntime", True)])
def test_a_missing_package_is_named(path, monkeypatch, name, check):
    monkeypatch.setitem(sys.modules, name, None)
    with pytest.raises(InputError, match=rf"needs {name}: pip install 'ncdwf\[onnx\]'"):
        export_onnx(whole_model(), path, check=check)
    assert not path.exists()


def test_without_a_check_onnxruntime_is_not_needed(path, monkeypatch):
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "onnxruntime", None)
        export_onnx(whole_model(), path, check=False)
    assert_same_answers(path, whole_model(), pictures(whole_model()))


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")
def test_a_model_on_the_gpu_makes_the_same_file(path, tmp_path):
    export_onnx(whole_model().to("cuda"), path)
    export_onnx(whole_model(), tmp_path / "cpu.onnx")
    assert path.read_bytes() == (tmp_path / "cpu.onnx").read_bytes()


@pytest.mark.gpu
@pytest.mark.skipif(
    "CUDAExecutionProvider" not in onnxruntime.get_available_providers(),
    reason="needs onnxruntime with CUDA",
)
@pytest.mark.parametrize("backbone", ["small", "resnet18"])
def test_the_file_runs_on_a_gpu(path, backbone):
    model = whole_model(backbone=backbone, input_shape=(3, 32, 32))
    images = pictures(model)
    split_routes(model, images)
    export_onnx(model, path)
    cuda = ("CUDAExecutionProvider", {"use_tf32": "0"})
    assert "CUDAExecutionProvider" in load(path, providers=[cuda]).get_providers()
    assert_same_answers(path, model, images, tolerance=TOLERANCE, providers=[cuda])

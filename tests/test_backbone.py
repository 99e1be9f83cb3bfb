import math
import re
import sys
import types

import numpy as np
import pytest
import torch
from conftest import unchanged_global_state
from torch import nn
from torch.nn import functional as F

from ncdwf.errors import InputError
from ncdwf.model.backbone import (
    BACKBONES,
    Foreign,
    Normalise,
    ResNet18,
    SmallNet,
    VectorNet,
    apply,
    check_backbone,
    make_backbone,
)
from ncdwf.model.initialise import build
from ncdwf.noise import generator


def test_measured_pixels_get_zero_mean_and_unit_variance():
    source = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (20, 3, 4, 5), dtype=torch.uint8, generator=source)
    images[:, 1] //= 4
    normalise = Normalise(3)
    normalise.measure(images)
    pixels = normalise(images).transpose(0, 1).flatten(1)
    assert torch.allclose(pixels.mean(1), torch.zeros(3), atol=1e-5)
    assert torch.allclose(pixels.std(1), torch.ones(3), atol=1e-5)


def test_colours_are_measured_over_all_pictures_however_many():
    source = torch.Generator().manual_seed(0)
    images = torch.randint(0, 256, (1030, 3, 2, 1), dtype=torch.uint8, generator=source)
    images[1024:, 2] = 255  # the last ones differ from those before
    normalise = Normalise(3)
    normalise.measure(images)
    pixels = np.moveaxis(images.numpy() / 255, 1, 0).reshape(3, -1)
    assert normalise.mean.tolist() == pytest.approx(pixels.mean(1).tolist(), rel=1e-6)
    assert normalise.std.tolist() == pytest.approx(pixels.std(1, ddof=1).tolist(), rel=1e-6)


def test_one_pixel_has_a_colour_and_no_spread():
    normalise = Normalise(1)
    normalise.measure(torch.full((1, 1, 1, 1), 51, dtype=torch.uint8))
    assert normalise.mean.item() == pytest.approx(0.2)
    assert normalise.std.item() == pytest.approx(1 / 255)


def test_bytes_and_shares_of_white_are_the_same_picture():
    normalise = Normalise(1)
    normalise.mean.fill_(0.2)
    normalise.std.fill_(0.5)
    images = torch.tensor([[[[0, 51, 255]]]], dtype=torch.uint8)
    # (0, 0.2, 1) - 0.2, in units of 0.5.
    expected = torch.tensor([[[[-0.4, 0.0, 1.6]]]])
    assert torch.allclose(normalise(images), expected, atol=1e-6)
    assert torch.allclose(normalise(images.float() / 255), expected, atol=1e-6)


def test_pictures_are_left_alone_until_they_were_measured():
    images = torch.rand(2, 3, 4, 4, generator=generator(0))
    assert torch.equal(build(lambda: Normalise(3), generator(0))(images), images)


def test_a_channel_without_contrast_stays_finite():
    normalise = Normalise(1)
    images = torch.full((2, 1, 2, 2), 7, dtype=torch.uint8)
    normalise.measure(images)
    # The deviation is at least one step of brightness: 1/255.
    assert normalise.std.item() == pytest.approx(1 / 255)
    assert torch.allclose(normalise(images), torch.zeros(2, 1, 2, 2), atol=1e-4)


def test_numbers_of_very_different_scale_are_brought_to_one():
    # Mean and sample deviation of (m - s, m, m + s) are m and s: -1, 0 and 1 come out.
    means = torch.tensor([0.0, 5e6, -1e20, 0.5, 2e38])
    scales = torch.tensor([1e-9, 2e6, 1e19, 1 / 256, 1e38])
    vectors = means + torch.tensor([[-1.0], [0.0], [1.0]]) * scales
    normalise = Normalise(5)
    normalise.measure(vectors)
    expected = torch.tensor([[-1.0], [0.0], [1.0]]).expand(3, 5)
    assert torch.allclose(normalise(vectors), expected, atol=1e-5)
    # Measured numbers are what the next vectors are told by.
    later = normalise((means - 3 * scales)[None])
    assert torch.allclose(later, torch.full((1, 5), -3.0), atol=1e-5)


def test_numbers_that_never_change_are_left_alone():
    vectors = torch.tensor([[0.0, 0.25, -1.0, 4.0], [0.0, 0.25, -1.0, 6.0]])
    normalise = Normalise(4)
    normalise.measure(vectors)
    assert normalise.std.tolist() == pytest.approx([1, 1, 1, math.sqrt(2)])
    assert torch.equal(normalise(vectors)[:, :3], torch.zeros(2, 3))
    # Later they may change after all: by 3, 3 and 3 here.
    later = normalise(torch.tensor([[3.0, 3.25, 2.0, 5.0]]))
    assert torch.allclose(later, torch.tensor([[3.0, 3.0, 3.0, 0.0]]))


def test_rounding_errors_of_a_constant_are_not_blown_up():
    # The neighbour of 1000 among single floats is 6e-5 away.
    vectors = torch.full((10, 1), 1000.0)
    vectors[0] = torch.nextafter(vectors[0], torch.tensor(torch.inf))
    normalise = Normalise(1)
    normalise.measure(vectors)
    assert normalise(vectors).abs().max() < 0.1


def test_vectors_are_left_alone_until_they_were_measured():
    vectors = torch.tensor([[300.0, -2.0]])
    assert torch.equal(Normalise(2)(vectors), vectors)
    assert torch.equal(build(lambda: Normalise(2), generator(0))(vectors), vectors)


@pytest.mark.parametrize("name", ["small", "resnet18"])
@pytest.mark.parametrize("shape", [(1, 8, 8), (3, 7, 5), (1, 1, 1)])
def test_features_come_one_a_picture_and_depend_on_it(name, shape):
    backbone = build(lambda: BACKBONES[name](shape), generator(0)).eval()
    images = torch.randint(
        0, 256, (3, *shape), dtype=torch.uint8, generator=torch.Generator().manual_seed(1)
    )
    with torch.no_grad():
        features = backbone(images)
        alone = backbone(images[1:2])
    assert features.shape == (3, backbone.num_features)
    assert torch.allclose(features[1:2], alone, atol=1e-5)
    assert not torch.allclose(features[0], features[1])


def test_the_number_of_features_can_be_chosen():
    backbone = build(lambda: SmallNet((1, 8, 8), num_features=5), generator(0)).eval()
    assert backbone(torch.zeros(2, 1, 8, 8)).shape == (2, 5)


def test_features_tell_where_something_is():
    # Global pooling would lose it; see the class.
    backbone = build(lambda: SmallNet((1, 8, 8)), generator(0)).eval()
    images = torch.zeros(2, 1, 8, 8)
    images[0, 0, 1:3, 1:3] = 1
    images[1, 0, 5:7, 5:7] = 1
    with torch.no_grad():
        upper, lower = nn.functional.normalize(backbone(images))
    assert float((upper - lower).norm()) > 0.1


def test_unknown_backbones_are_refused():
    assert check_backbone("small", (1, 8, 8)) == "small"
    with pytest.raises(InputError, match="unknown backbone 'large'; there are small, resnet18"):
        check_backbone("large", (1, 8, 8))


@pytest.mark.parametrize(
    ("name", "shape", "kind"),
    [
        ("small", (1, 8, 8), SmallNet),
        ("resnet18", (3, 8, 8), ResNet18),
        ("vector", (5,), VectorNet),
        ("vector", (1,), VectorNet),
    ],
)
def test_every_backbone_has_a_name_and_a_kind_of_input(name, shape, kind):
    assert check_backbone(name, shape) == name
    with torch.device("meta"):
        assert type(make_backbone(name, shape)) is kind


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("vector", (1, 8, 8), "the backbone 'vector' reads vectors, not inputs of shape (1, 8, 8)"),
        ("small", (5,), "the backbone 'small' reads pictures, not inputs of shape (5,)"),
        ("resnet18", (5,), "the backbone 'resnet18' reads pictures, not inputs of shape (5,)"),
        ("large", (5,), "unknown backbone 'large'; there are small, resnet18, vector and timm:"),
    ],
)
@pytest.mark.parametrize("ask", [check_backbone, make_backbone])
def test_backbones_are_refused_for_inputs_that_they_do_not_read(ask, name, shape, message):
    with pytest.raises(InputError, match=re.escape(message)):
        ask(name, shape)


# Networks of timm


@pytest.mark.parametrize("ask", [check_backbone, make_backbone])
def test_without_timm_its_networks_are_refused_in_one_line(monkeypatch, ask):
    monkeypatch.setitem(sys.modules, "timm", None)  # importing it is an ImportError then
    message = "the backbone 'timm:resnet50' needs timm: pip install timm"
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        ask("timm:resnet50", (3, 8, 8))
    assert check_backbone("small", (1, 8, 8)) == "small"


def test_a_timm_that_fails_to_import_is_one_line(monkeypatch, tmp_path):
    (tmp_path / "timm.py").write_text("raise RuntimeError('operator nms does not exist\\nmore')")
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "timm", raising=False)
    message = "the backbone 'timm:resnet50' needs timm, which fails: operator nms does not exist"
    with pytest.raises(InputError, match=f"^{message}$"):
        make_backbone("timm:resnet50", (3, 8, 8))


@pytest.fixture
def timm(monkeypatch):
    """Stand in for timm with one network, `net`; return what was asked of it."""
    asked = []

    def create_model(name, *, num_classes, in_chans):
        asked.append((name, num_classes, in_chans))
        return nn.Sequential(nn.Conv2d(in_chans, 7, 3), nn.ReLU())

    fake = types.ModuleType("timm")
    fake.is_model = lambda name: name == "net"
    fake.create_model = create_model
    monkeypatch.setitem(sys.modules, "timm", fake)
    return asked


@pytest.mark.parametrize("channels", [1, 3])
def test_a_network_of_timm_comes_without_its_classifier(timm, channels):
    backbone = make_backbone("timm:net", (channels, 8, 6))
    assert timm == [("net", 0, channels)]  # no classes: features
    assert isinstance(backbone, Foreign)
    assert backbone.num_features == 7
    images = torch.zeros(2, channels, 8, 6, dtype=torch.uint8)
    assert backbone(images).shape == (2, 7)
    assert check_backbone("timm:net", (channels, 8, 6)) == "timm:net"


@pytest.mark.parametrize(
    ("name", "shape", "message"),
    [
        ("timm:other", (3, 8, 8), "timm has no network 'other'; timm.list_models() shows them"),
        ("timm:", (3, 8, 8), "timm has no network ''"),
        ("timm:net", (5,), "the backbone 'timm:net' reads pictures, not inputs of shape (5,)"),
        ("timm:net", (3, 2, 2), "this backbone cannot read inputs of shape (3, 2, 2): "),
    ],
)
@pytest.mark.usefixtures("timm")
def test_networks_that_timm_has_not_and_inputs_that_they_do_not_read(name, shape, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        make_backbone(name, shape)
    assert "\n" not in str(caught.value)


# Vectors


def test_a_vector_network_is_what_its_weights_say():
    net = build(lambda: VectorNet((3,), num_features=4), generator(0)).eval()
    source = generator(2)
    for part in net.modules():  # as after training: norms that do something
        if isinstance(part, nn.BatchNorm1d):
            for tensor, low in ((part.weight, 0.5), (part.running_var, 0.5), (part.bias, -0.2)):
                tensor.detach().uniform_(low, low + 0.4, generator=source)
            part.running_mean.uniform_(-0.2, 0.2, generator=source)
    net.normalise.mean.copy_(torch.tensor([1.0, 2.0, 3.0]))
    net.normalise.std.copy_(torch.tensor([0.5, 1.0, 2.0]))
    weights = net.state_dict()
    vectors = torch.randn(6, 3, generator=source)
    rows = (vectors - torch.tensor([1.0, 2.0, 3.0])) * torch.tensor([2.0, 1.0, 0.5])
    rows = torch.where(rows.abs() <= 1, rows, rows.sign() * (1 + rows.abs().log()))
    assert (rows.abs() > 1).any()
    for linear, norm in (("layers.0", "layers.1"), ("layers.3", "layers.4")):
        values = [weights[f"{norm}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")]
        rows = F.relu(F.batch_norm(rows @ weights[f"{linear}.weight"].T, *values))
    with torch.no_grad():
        assert torch.allclose(net(vectors), rows, atol=1e-6)
    assert (rows > 0).any()


@pytest.mark.parametrize("num_numbers", [1, 5])
def test_features_come_one_a_vector_and_depend_on_it(num_numbers):
    backbone = build(lambda: VectorNet((num_numbers,)), generator(0)).eval()
    vectors = torch.randn(3, num_numbers, generator=generator(1))
    with torch.no_grad():
        features, alone = backbone(vectors), backbone(vectors[1:2])
    assert features.shape == (3, backbone.num_features) == (3, 256)
    assert torch.allclose(features[1:2], alone, atol=1e-5)
    assert not torch.allclose(features[0], features[1])


def test_the_units_of_vectors_do_not_matter_once_they_are_measured():
    vectors = torch.randn(20, 3, generator=generator(1))
    units, origin = torch.tensor([1e-6, 1e6, 2.0]), torch.tensor([0.0, 3e6, -7.0])
    features = []
    for given in (vectors, vectors * units + origin):
        backbone = build(lambda: VectorNet((3,), num_features=8), generator(0)).eval()
        backbone.normalise.measure(given)
        with torch.no_grad():
            features.append(backbone(given))
    assert torch.allclose(*features, atol=1e-4)
    assert features[0].std() > 0.1


# Networks of others


def test_maps_are_averaged_over_the_picture():
    backbone = Foreign(nn.Conv2d(1, 2, 1, bias=False), (1, 2, 2))
    with torch.no_grad():
        backbone.module.weight.copy_(torch.tensor([1.0, -2.0]).view(2, 1, 1, 1))
    images = torch.tensor([[[[0, 51], [102, 255]]]], dtype=torch.uint8)
    # (0 + 0.2 + 0.4 + 1) / 4 = 0.4, once and minus twice.
    assert backbone(images)[0].tolist() == pytest.approx([0.4, -0.8])
    backbone.normalise.mean.fill_(0.2)
    backbone.normalise.std.fill_(0.5)
    assert backbone(images)[0].tolist() == pytest.approx([0.4, -0.8])  # (0.4 - 0.2) / 0.5


@pytest.mark.parametrize(
    ("module", "shape", "num_features"),
    [
        (nn.Linear(3, 7), (3,), 7),
        (nn.Identity(), (3,), 3),  # no parameter at all
        (nn.Conv2d(3, 5, 3), (3, 8, 6), 5),
        (nn.Flatten(), (3, 2, 4), 24),
        (nn.Sequential(nn.Flatten(), nn.Linear(8, 1)), (2, 2, 2), 1),
    ],
)
def test_the_number_of_features_of_a_foreign_network_is_found(module, shape, num_features):
    backbone = Foreign(module, shape)
    assert backbone.num_features == num_features
    assert backbone(torch.zeros(4, *shape)).shape == (4, num_features)
    assert len(backbone.normalise.mean) == shape[0]


def test_vectors_reach_a_foreign_network_normalised():
    backbone = Foreign(nn.Identity(), (2,))
    vectors = torch.tensor([[1.0, 300.0], [2.0, 500.0], [3.0, 700.0]])
    backbone.normalise.measure(vectors)
    assert torch.allclose(backbone(vectors), torch.tensor([[-1.0], [0.0], [1.0]]).expand(3, 2))


class Dropping(nn.Module):
    """Draws and counts what it sees in training mode."""

    def __init__(self, num_in):
        super().__init__()
        self.layers = nn.Sequential(
            nn.Linear(num_in, 4, bias=False), nn.BatchNorm1d(4), nn.Dropout()
        )

    def forward(self, vectors):
        return self.layers(vectors)


@pytest.mark.parametrize("training", [True, False])
def test_finding_the_number_of_features_changes_nothing(training):
    module = Dropping(3).train(training)
    before = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    with unchanged_global_state():
        backbone = Foreign(module, (3,))
    assert backbone.module is module
    assert {part.training for part in module.modules()} == {training}
    assert all(torch.equal(before[name], tensor) for name, tensor in module.state_dict().items())
    assert all(weight.grad is None and weight.requires_grad for weight in module.parameters())


@pytest.mark.parametrize("training", [True, False])
def test_a_network_that_cannot_read_the_inputs_is_refused_as_it_was(training):
    module = Dropping(4).train(training)
    message = "this backbone cannot read inputs of shape (3,): mat1 and mat2 shapes"
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        Foreign(module, (3,))
    assert "\n" not in str(caught.value)
    assert {part.training for part in module.modules()} == {training}


class Answering(nn.Module):
    """Returns what it is told to."""

    def __init__(self, answer):
        super().__init__()
        self.answer = answer

    def forward(self, images):
        return self.answer(images)


def test_a_network_without_any_feature_is_refused():
    with pytest.raises(InputError, match="shape \\(3, 4, 4\\): it returns no features"):
        Foreign(Answering(lambda images: images.flatten(1)[:, :0]), (3, 4, 4))


@pytest.mark.parametrize(
    "answer",
    [
        lambda images: (images, images),
        lambda images: {"features": images},
        lambda images: None,
        lambda images: images[:, 0],  # [image, height, width]
        lambda images: images.mean((1, 2, 3)),  # [image]
        lambda images: images[..., None],
    ],
)
def test_a_network_that_returns_no_features_is_refused(answer):
    message = (
        "this backbone cannot read inputs of shape (3, 4, 4): "
        "it should return one feature vector a picture, or maps of them"
    )
    with pytest.raises(InputError, match=f"^{re.escape(message)}$"):
        Foreign(Answering(answer), (3, 4, 4))


@pytest.mark.parametrize("error", [ValueError, TypeError, IndexError, RuntimeError])
def test_one_line_of_what_a_foreign_network_says_is_kept(error):
    def answer(images):
        raise error("first line\nsecond line")

    with pytest.raises(InputError, match=r"of shape \(3,\): first line$"):
        Foreign(Answering(answer), (3,))


# Residual networks


@pytest.fixture(scope="module")
def resnet():
    """Return a ResNet-18 for CIFAR; not to be changed."""
    return build(lambda: ResNet18((3, 32, 32)), generator(0)).eval()


def some_pictures(num_images, side, num_channels=3):
    return torch.rand(num_images, num_channels, side, side, generator=generator(1))


@pytest.mark.parametrize("side", [32, 18, 33])
def test_a_residual_network_takes_pictures_of_any_size(resnet, side):
    with torch.no_grad():
        features = resnet(some_pictures(2, side))
    assert features.shape == (2, resnet.num_features) == (2, 512)


def test_small_pictures_are_halved_three_times_and_large_ones_five_times(resnet):
    large = build(lambda: ResNet18((3, 96, 96)), generator(0)).eval()
    sizes = []
    for net, side in ((resnet, 32), (resnet, 18), (large, 96)):
        with torch.no_grad():
            maps = net.blocks(net.stem(some_pictures(1, side)))
        sizes.append(tuple(maps.shape))
    # 32 / 8, ⌈18 / 8⌉ and 96 / 32.
    assert sizes == [(1, 512, 4, 4), (1, 512, 3, 3), (1, 512, 3, 3)]
    assert large.stem[0].weight.shape == (64, 3, 7, 7)
    assert resnet.stem[0].weight.shape == (64, 3, 3, 3)
    with torch.no_grad():
        assert large(some_pictures(1, 96)).shape == (1, 512)


@pytest.mark.parametrize(("side", "kernel"), [(64, 3), (65, 7)])
def test_the_original_stem_begins_above_64_pixels(side, kernel):
    with torch.device("meta"):
        assert ResNet18((3, 8, side)).stem[0].kernel_size == (kernel, kernel)
        assert ResNet18((3, side, 8)).stem[0].kernel_size == (kernel, kernel)


def test_a_residual_network_has_the_published_number_of_parameters(resnet):
    # 11,689,512 of the original, without its classifier (512 · 1000 + 1000) and with a stem of
    # 3 × 3 instead of 7 × 7 weights for each pair of 3 and 64 channels.
    expected = 11_689_512 - 513_000 - (7 * 7 - 3 * 3) * 3 * 64
    assert expected == 11_168_832
    assert sum(parameter.numel() for parameter in resnet.parameters()) == expected


def test_convolutions_start_as_wide_as_their_outputs_ask_for(resnet):
    convolutions = [part for part in resnet.modules() if isinstance(part, nn.Conv2d)]
    assert len(convolutions) == 1 + 16 + 3
    for part in convolutions:
        num_outputs = part.out_channels * part.kernel_size[0] * part.kernel_size[1]
        weights = part.weight.detach().double()
        # The sample deviation of n numbers varies by σ / √(2n): four times that much is allowed.
        tolerance = 4 / math.sqrt(2 * weights.numel())
        assert weights.std().item() == pytest.approx(math.sqrt(2 / num_outputs), rel=tolerance)
        assert part.bias is None


def test_features_of_a_residual_network_are_never_negative(resnet):
    with torch.no_grad():
        features = resnet(some_pictures(4, 32))
    assert (features >= 0).all()
    assert (features > 0).any()


def test_a_residual_network_is_what_its_weights_say():
    net = build(lambda: ResNet18((3, 32, 32)), generator(0)).eval()
    source = generator(2)
    for part in net.modules():  # as after training: norms that do something
        if isinstance(part, nn.BatchNorm2d):
            for tensor, low in ((part.weight, 0.5), (part.running_var, 0.5), (part.bias, -0.2)):
                tensor.detach().uniform_(low, low + 0.4, generator=source)
            part.running_mean.uniform_(-0.2, 0.2, generator=source)
    weights = net.state_dict()

    def convolve(maps, conv, norm, stride=1):
        kernel = weights[f"{conv}.weight"]
        maps = F.conv2d(maps, kernel, stride=stride, padding=kernel.shape[-1] // 2)
        values = [weights[f"{norm}.{n}"] for n in ("running_mean", "running_var", "weight", "bias")]
        return F.batch_norm(maps, *values)

    images = some_pictures(2, 10)
    maps = F.relu(convolve(images, "stem.0", "stem.1"))
    for index in range(8):
        name, stride = f"blocks.{index}", 2 if index in (2, 4, 6) else 1
        inner = F.relu(convolve(maps, f"{name}.first.0", f"{name}.first.1", stride))
        inner = convolve(inner, f"{name}.second", f"{name}.norm")
        if stride == 2:
            maps = convolve(maps, f"{name}.around.0", f"{name}.around.1", stride)
        maps = F.relu(inner + maps)
    with torch.no_grad():
        assert torch.allclose(net(images), maps.mean((2, 3)), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("training", [True, False])
def test_applying_a_backbone_is_calling_it(training):
    applied, called = (
        build(lambda: SmallNet((1, 8, 8)), generator(0)).train(training) for _ in range(2)
    )
    images = some_pictures(4, 8, num_channels=1)
    got, expected = apply(applied, images), called(images)
    assert torch.equal(got, expected)
    got.sum().backward()
    expected.sum().backward()
    for left, right in zip(applied.parameters(), called.parameters(), strict=True):
        assert torch.equal(left.grad, right.grad)
    for left, right in zip(applied.buffers(), called.buffers(), strict=True):
        assert torch.equal(left, right)

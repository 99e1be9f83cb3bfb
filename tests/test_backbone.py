import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from ncdwf.errors import InputError
from ncdwf.model.backbone import BACKBONES, Normalise, ResNet18, SmallNet, apply, check_backbone
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


@pytest.mark.parametrize("name", BACKBONES)
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
    assert check_backbone("small") == "small"
    with pytest.raises(InputError, match="unknown backbone 'large'; there are small, resnet18"):
        check_backbone("large")


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

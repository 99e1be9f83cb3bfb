import pytest
import torch
from torch import nn

from ncdwf.errors import InputError
from ncdwf.model.backbone import BACKBONES, Normalise, SmallNet, check_backbone
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
    with pytest.raises(InputError, match="unknown backbone 'large'; there are small"):
        check_backbone("large")

import math

import numpy as np
import pytest
import torch
from torch import nn

from ncdwf.errors import InputError
from ncdwf.model.backbone import SmallNet
from ncdwf.model.initialise import build, empty
from ncdwf.noise import generator


def small_net():
    return SmallNet((1, 8, 8))


def test_building_leaves_the_global_random_state_alone():
    torch.manual_seed(1)
    before = torch.get_rng_state(), np.random.get_state()[1].copy()  # noqa: NPY002
    first = build(small_net, generator(0))
    assert torch.equal(torch.get_rng_state(), before[0])
    assert np.array_equal(np.random.get_state()[1], before[1])  # noqa: NPY002
    torch.manual_seed(2)
    again = build(small_net, generator(0))
    assert all(
        torch.equal(a, b)
        for a, b in zip(first.state_dict().values(), again.state_dict().values(), strict=True)
    )


def test_another_seed_gives_other_weights():
    def net():
        return nn.Sequential(nn.Conv2d(1, 2, 3), nn.Linear(2, 3))

    first, other = (build(net, generator(seed)).state_dict() for seed in (0, 1))
    assert {name for name in first if not torch.equal(first[name], other[name])} == {
        "0.weight",
        "1.weight",
        "1.bias",
    }


def test_layers_start_at_the_scale_of_their_inputs():
    net = build(lambda: nn.Sequential(nn.Linear(100, 400), nn.Conv2d(8, 50, 3)), generator(0))
    linear, convolution = net
    for tensor in (linear.weight, linear.bias):  # uniform in ±1/sqrt(100)
        assert 0.098 < tensor.abs().max() <= 0.1
    # He et al.: a variance of 2 over the outputs that one input reaches, 50 · 3 · 3.
    assert convolution.weight.std().item() == pytest.approx(math.sqrt(2 / 450), rel=0.05)
    assert torch.equal(convolution.bias, torch.zeros(50))


def test_normalisation_starts_as_the_identity():
    net = build(lambda: nn.Sequential(nn.BatchNorm1d(3), nn.BatchNorm2d(2)), generator(0))
    for norm in net:
        assert norm.weight.unique().tolist() == [1]
        assert norm.bias.unique().tolist() == [0]
        assert norm.running_mean.unique().tolist() == [0]
        assert norm.running_var.unique().tolist() == [1]
        assert norm.num_batches_tracked.item() == 0


def test_a_module_fills_its_own_tensors():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3))
            self.register_buffer("offset", torch.empty(2))

        def initialise(self, source):
            self.weight.uniform_(generator=source)
            self.offset.fill_(4)

    module = build(Own, generator(0))
    expected = torch.empty(3).uniform_(generator=generator(0))
    assert torch.equal(module.weight.detach(), expected)
    assert module.weight.requires_grad
    assert module.offset.tolist() == [4, 4]


def test_what_nobody_fills_is_found_out():
    with pytest.raises(AssertionError, match=r"0\.weight was not initialised"):
        build(lambda: nn.Sequential(nn.PReLU()), generator(0))


def test_an_empty_module_has_storage_on_the_cpu():
    module = empty(small_net)
    assert {tensor.device.type for tensor in module.state_dict().values()} == {"cpu"}


def test_weights_beyond_the_memory_are_one_line():
    def huge():
        return nn.Linear(2**31, 2**24, bias=False)

    with pytest.raises(InputError, match="144,115,188,075,855,872 bytes"):  # 2**55 * 4
        empty(huge)

import math

import pytest
import torch

from ncdwf.learning.information import VariationalRegressor
from ncdwf.model.initialise import build
from ncdwf.noise import generator


def regressor(num_novel=3, num_known=2, num_heads=2, min_variance=1.0, seed=0):
    return build(
        lambda: VariationalRegressor(
            num_novel, num_known, num_heads=num_heads, min_variance=min_variance
        ),
        generator(seed),
    )


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("min_variance", [0.01, 1.0, 4.0])
def test_it_starts_with_a_mean_of_zero_and_a_variance_of_five(min_variance):
    made = regressor(min_variance=min_variance)
    novel, known = normal(2, 4, 3).requires_grad_(), torch.full((4, 2), 3.0)
    losses = made(novel, known)
    losses.sum().backward()
    # Whatever the novel logits are: 0.5 · (3²/5 + ln 5), and nothing pushes them anywhere.
    assert losses.tolist() == pytest.approx([0.5 * (9 / 5 + math.log(5))] * 2)
    assert not novel.grad.any()
    assert made.layers[-1].grad.any()


def test_three_layers_without_bias_by_hand():
    made = regressor(num_novel=1, num_known=2, num_heads=1)
    with torch.no_grad():
        made.layers[0].copy_(torch.tensor([[[1.0, -1.0]]]))
        made.layers[1].copy_(torch.tensor([[[2.0, 0.0], [5.0, 5.0]]]))
        made.layers[2].copy_(torch.tensor([[[1.0, -3.0], [7.0, 7.0]]]))
    # u = 2: relu(2, -2) = (2, 0); relu(4, 0) = (4, 0); mean (4, -12), not cut off at the end.
    # l = (5, -10): squares 1 and 4, over a variance of 5.
    got = made(torch.tensor([[[2.0]]]), torch.tensor([[5.0, -10.0]]))
    expected = 0.5 * ((1 + 4) / 2 / 5 + math.log(5))
    assert got.item() == pytest.approx(expected)


def test_the_variance_is_bounded_from_below():
    made = regressor(min_variance=1.5)
    with torch.no_grad():
        made.free_variance.fill_(-100)
    novel, known = torch.zeros(2, 4, 3), torch.full((4, 2), 3.0)
    assert made(novel, known).tolist() == pytest.approx([0.5 * (9 / 1.5 + math.log(1.5))] * 2)


def test_heads_have_their_own_layers():
    made = regressor()
    with torch.no_grad():
        made.layers[-1].fill_(1)
    novel, known = normal(2, 6, 3), normal(6, 2, seed=1)
    losses = made(novel, known)
    assert losses.shape == (2,)
    losses[0].backward()
    for weight in made.parameters():
        assert weight.grad[1].abs().sum() == 0
    assert made.layers[0].grad[0].abs().sum() > 0
    assert made.free_variance.grad[0].abs().sum() > 0


def test_the_loss_is_smaller_where_novel_logits_tell_the_known_ones():
    made = regressor(num_novel=2, num_heads=1)
    with torch.no_grad():
        for layer in made.layers:
            layer.copy_(torch.eye(2))
        made.free_variance.fill_(-100)
    told = normal(200, 2).abs()
    known = told.clone()
    unrelated = told[torch.randperm(200, generator=generator(2))]
    # The mean hits exactly: 0.5 · ln 1 = 0.
    assert made(told[None], known).item() == pytest.approx(0, abs=1e-5)
    assert made(unrelated[None], known).item() > 0.1


def test_it_trains_to_tell():
    made = regressor(num_novel=2, num_heads=1)
    novel = normal(1, 64, 2)
    known = 2 * novel[0].relu()
    before = made(novel, known).item()
    optimiser = torch.optim.Adam(made.parameters(), lr=0.05)
    for _ in range(120):
        optimiser.zero_grad()
        made(novel, known).sum().backward()
        optimiser.step()
    # With a variance of at least 1 no loss is below 0.
    assert 0 <= made(novel, known).item() < 0.3 * before


def test_the_loss_is_the_mean_likelihood_over_images():
    made = regressor(num_heads=1)
    novel, known = normal(1, 5, 3), normal(5, 2, seed=1)
    each = [made(novel[:, i : i + 1], known[i : i + 1]).item() for i in range(5)]
    assert made(novel, known).item() == pytest.approx(sum(each) / 5, rel=1e-5)


def test_same_seed_same_weights():
    first, again, other = (list(regressor(seed=s).parameters())[1] for s in (0, 0, 1))
    assert torch.equal(first, again)
    assert not torch.equal(first, other)


def test_hidden_layers_start_at_the_scale_of_their_inputs():
    made = regressor(num_novel=50, num_known=20, num_heads=4)
    # He et al.: a variance of 2 over the number of inputs.
    for layer, num_inputs in zip(made.layers, (50, 20), strict=False):
        assert layer.std().item() == pytest.approx(math.sqrt(2 / num_inputs), rel=0.06)

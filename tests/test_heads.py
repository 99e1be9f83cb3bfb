import math

import pytest
import torch
from torch.nn import functional as F

from ncdwf.model.heads import CosineHead, MultiHead
from ncdwf.model.initialise import build
from ncdwf.noise import generator


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def multi_head(num_heads=3, seed=0):
    return build(
        lambda: MultiHead(6, 4, num_heads=num_heads, num_hidden=5, num_projected=7),
        generator(seed),
    )


def test_logits_of_the_cosine_head_are_cosines():
    head = CosineHead(2, 3)
    with torch.no_grad():
        head.prototypes.copy_(torch.tensor([[2.0, 0.0], [0.0, 0.1], [-3.0, 0.0]]))
    features = torch.tensor([[5.0, 0.0], [1.0, 1.0], [0.0, -0.01]])
    half = math.sqrt(0.5)
    expected = torch.tensor([[1, 0, -1], [half, half, -half], [0, -1, 0]])
    assert torch.allclose(head(features), expected, atol=1e-6)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e4])
def test_cosines_depend_on_no_length(scale):
    head = build(lambda: CosineHead(6, 4), generator(0))
    expected = head(normal(5, 6))
    with torch.no_grad():
        head.prototypes.mul_(scale)
    assert torch.allclose(head(normal(5, 6) / scale), expected, atol=1e-6)


def test_a_feature_of_length_zero_gives_finite_logits_and_gradients():
    head = build(lambda: CosineHead(6, 4), generator(0))
    features = torch.zeros(2, 6, requires_grad=True)
    logits = head(features)
    logits.sum().backward()
    assert torch.equal(logits, torch.zeros(2, 4))
    assert torch.isfinite(features.grad).all()


def test_prototypes_start_with_a_length_of_about_one():
    head = build(lambda: CosineHead(400, 50), generator(0))
    # The squared length has mean 1 and deviation sqrt(2/400) = 0.07.
    assert head.prototypes.square().sum(1).mean().item() == pytest.approx(1, abs=0.05)


def test_every_head_computes_what_it_would_alone():
    head = multi_head().eval()
    with torch.no_grad():
        head.norm.running_mean.copy_(normal(15))
        head.norm.running_var.copy_(normal(15).square() + 0.5)
    features = normal(8, 6, seed=1)
    logits = head(features)
    assert logits.shape == (3, 8, 4)
    for i in range(3):
        part = slice(5 * i, 5 * i + 5)
        hidden = F.linear(features, head.hidden.weight[part], head.hidden.bias[part])
        hidden = F.batch_norm(
            hidden, head.norm.running_mean[part], head.norm.running_var[part], training=False
        ).relu()
        projected = hidden @ head.projection[i]
        expected = F.cosine_similarity(
            projected[:, None, :], head.prototypes[i].T[None, :, :], dim=-1
        )
        assert torch.allclose(logits[i], expected, atol=1e-5)


def test_heads_start_differently_and_do_not_touch_each_other():
    head = multi_head().eval()
    logits = head(normal(8, 6))
    assert not torch.allclose(logits[0], logits[1])
    logits[1].sum().backward()
    for name in ("projection", "prototypes"):
        gradient = getattr(head, name).grad
        assert gradient[1].abs().sum() > 0
        assert gradient[[0, 2]].abs().sum() == 0


def test_weights_start_within_their_bounds():
    head = multi_head(num_heads=50)
    for weight, num_inputs in ((head.projection, 5), (head.prototypes, 7)):
        bound = 1 / math.sqrt(num_inputs)
        assert 0.95 * bound < weight.abs().max() <= bound
        # The deviation of a uniform number in ±b is b/sqrt(3).
        assert weight.std().item() == pytest.approx(bound / math.sqrt(3), rel=0.05)


def test_same_seed_same_weights():
    first, again, other = multi_head().state_dict(), multi_head().state_dict(), multi_head(seed=1)
    assert all(torch.equal(first[name], again[name]) for name in first)
    assert not torch.equal(first["prototypes"], other.prototypes)

import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.stats import beta
from torch.nn import functional as F

from ncdwf.model.heads import CosineHead
from ncdwf.model.initialise import build
from ncdwf.model.replay import BetaQuantile, GaussianPrototypes, PseudoLatents, invert
from ncdwf.model.statistics import ClassStatistics
from ncdwf.noise import draw, generator

MEANS = torch.tensor([[1.0, 0.0], [0.0, 2.0], [-3.0, 0.0]])
COVARIANCES = torch.tensor([[[2.0, 0.5], [0.5, 1.0]], [[1.0, -0.9], [-0.9, 1.0]]])


def statistics(spread, means=MEANS, feature_norm=2.0):
    kind = {1: "shared-diagonal", 2: "shared", 3: "per-class"}[spread.ndim]
    filled = ClassStatistics(*means.shape, kind)
    filled.means = means
    filled.spread = spread
    filled.feature_norm = torch.tensor(feature_norm)
    return filled


def drawn(memory, num_latents, seed=0):
    noise = draw(memory.draws(num_latents), 1, generator(seed))
    return memory.sample({name: tensor[0] for name, tensor in noise.items()})


def ascend(head, start, *, num_iterations, temperature):
    """Return latents after gradient ascent on their class's logit, as the paper writes it."""
    latents = start.double()
    for _ in range(num_iterations):
        latents = latents.detach().requires_grad_()
        logits = head(latents.flatten(0, 1)).unflatten(0, latents.shape[:2]) / temperature
        score = logits.diagonal(dim1=0, dim2=2).sum()  # of each class its own logit
        latents = latents + torch.autograd.grad(score, latents)[0]
    return latents.detach().float()


@given(
    sizes=st.tuples(st.integers(1, 5), st.integers(1, 4), st.integers(2, 9)),
    num_iterations=st.integers(0, 9),
    temperature=st.floats(0.05, 2),
    seed=st.integers(0, 99),
)
@settings(deadline=None)
def test_inversion_is_gradient_ascent_on_the_heads_own_logits(
    sizes, num_iterations, temperature, seed
):
    num_classes, num_latents, num_features = sizes
    head = build(lambda: CosineHead(num_features, num_classes), generator(seed)).double()
    start = torch.randn(num_classes, num_latents, num_features, generator=generator(seed + 1))
    numbers = {"num_iterations": num_iterations, "temperature": temperature}
    got = invert(head.prototypes.detach().float(), start, **numbers)
    expected = ascend(head, start, **numbers)
    assert torch.allclose(got, expected, atol=1e-4 * float(expected.abs().max()))


@pytest.mark.parametrize("sign", [1, -1])
def test_a_latent_on_the_line_of_its_prototype_stays_there(sign):
    prototypes = torch.tensor([[0.0, 3.0], [4.0, 0.0]])
    start = sign * prototypes.unsqueeze(1)
    got = invert(prototypes, start, num_iterations=3, temperature=0.1)
    assert torch.allclose(got, start)


def test_inverting_turns_latents_to_their_prototypes():
    head = build(lambda: CosineHead(16, 4), generator(1))
    prototypes = head.prototypes.detach()
    start = torch.randn(4, 5, 16, generator=generator(2))
    cosines = [
        F.cosine_similarity(
            invert(prototypes, start, num_iterations=n, temperature=0.1), prototypes[:, None], dim=2
        )
        for n in (1, 10, 100)
    ]
    assert (cosines[0] < cosines[1]).all()
    assert (cosines[1] < cosines[2]).all()
    assert cosines[2].min() > 0.98


def test_inversion_leaves_prototypes_and_start_alone():
    prototypes, start = torch.eye(2), torch.ones(2, 3, 2)
    got = invert(prototypes, start, num_iterations=3, temperature=0.1)
    assert torch.equal(prototypes, torch.eye(2))
    assert torch.equal(start, torch.ones(2, 3, 2))
    assert not torch.equal(got, start)


uniform = st.lists(st.floats(0, 1, exclude_max=True, width=32), min_size=1, max_size=20)


@settings(max_examples=50, deadline=None)
@given(uniform, st.floats(0.1, 200))
def test_beta_with_a_one_has_a_closed_form(numbers, shape):
    u = torch.tensor(numbers, dtype=torch.float64)
    # P(α ≤ x) is 1 - (1-x)^b for Beta(1, b) and x^a for Beta(a, 1).
    assert torch.allclose(BetaQuantile(1.0, shape)(u), 1 - (1 - u) ** (1 / shape))
    assert torch.allclose(BetaQuantile(shape, 1.0)(u), u ** (1 / shape))


@pytest.mark.parametrize(("gamma", "rho"), [(2.0, 2.0), (2.0, 5.0), (0.5, 0.5), (20.0, 3.0)])
def test_other_betas_are_read_off_a_table(gamma, rho):
    u = torch.rand(2000, generator=generator(0))
    got = BetaQuantile(gamma, rho)(u)
    expected = beta.ppf(u.double().numpy(), gamma, rho)
    error = np.abs(got.numpy() - expected)
    assert error.mean() < 1e-3
    # The table has 4097 entries; what is rarer than they are is drawn as the last of them.
    assert error[(u > 2 / 4096).numpy() & (u < 1 - 2 / 4096).numpy()].max() < 5e-3


@pytest.mark.parametrize(("gamma", "rho"), [(2.0, 100.0), (0.5, 100.0), (100.0, 0.5)])
def test_nothing_is_drawn_beyond_the_tails(gamma, rho):
    """Between a quantile and the end of [0, 1] there may be nearly all of it, and no sample."""
    ends = BetaQuantile(gamma, rho)(torch.tensor([0.0, 1.0]))
    wanted = beta.ppf([0.5 / 4097, 1 - 0.5 / 4097], gamma, rho)
    assert np.allclose(ends, wanted, atol=1e-6)
    samples = BetaQuantile(gamma, rho)(torch.rand(200_000, generator=generator(0)))
    assert samples.double().mean().item() == pytest.approx(beta.mean(gamma, rho), rel=0.02)


@pytest.mark.parametrize(("gamma", "rho"), [(1.0, 100.0), (3.0, 1.0), (2.0, 4.0)])
def test_beta_samples_have_the_moments_of_a_beta(gamma, rho):
    samples = BetaQuantile(gamma, rho)(torch.rand(50_000, generator=generator(0)))
    assert samples.mean().item() == pytest.approx(beta.mean(gamma, rho), rel=0.02)
    assert samples.std().item() == pytest.approx(beta.std(gamma, rho), rel=0.02)


def pseudo_latents(gamma=1.0, rho=100.0):
    bank = torch.randn(3, 4, 2, generator=generator(5)) * 50
    return PseudoLatents(statistics(torch.ones(2)), bank, gamma=gamma, rho=rho), bank


def test_a_pseudo_latent_mixes_one_inverted_latent_with_its_mean():
    memory, bank = pseudo_latents()
    # Columns: class (of 3), entry (of 4), α. 0.5 · 3 -> class 1; 0.99 · 4 -> entry 3.
    noise = torch.tensor([[0.5, 0.99, 0.3], [0.99, 0.0, 0.9], [0.0, 0.3, 0.0]])
    latents, labels = memory.sample({"replay": noise})
    assert labels.tolist() == [1, 2, 0]
    alpha = [1 - (1 - u) ** (1 / 100) for u in (0.3, 0.9, 0.0)]
    for latent, label, entry, a in zip(latents, (1, 2, 0), (3, 0, 1), alpha, strict=True):
        inverted = bank[label, entry]
        scaled = 2.0 * inverted / inverted.norm()  # the mean feature norm is 2
        assert torch.allclose(latent, a * scaled + (1 - a) * MEANS[label], atol=1e-5)


def test_pseudo_latents_near_alpha_one_are_the_inverted_ones():
    memory, _ = pseudo_latents(gamma=1e6, rho=1.0)  # α = u^(1e-6), which is 1
    latents, labels = drawn(memory, 200)
    assert torch.allclose(latents.norm(dim=1), torch.tensor(2.0), atol=1e-3)
    distances = torch.cdist(latents[:, None], memory.bank[labels])[:, 0].min(1).values
    assert distances.max() < 1e-3


@pytest.mark.parametrize("kind", ["pseudo", "gaussian"])
def test_classes_are_drawn_evenly_and_follow_the_noise(kind):
    memory = (
        pseudo_latents()[0] if kind == "pseudo" else GaussianPrototypes(statistics(torch.ones(2)))
    )
    latents, labels = drawn(memory, 30_000)
    assert latents.shape == (30_000, 2)
    # A third each, give or take four standard errors of sqrt(2/9/30000) = 0.0027.
    assert np.allclose(np.bincount(labels, minlength=3) / 30_000, 1 / 3, atol=0.011)
    again, _ = drawn(memory, 30_000)
    assert torch.equal(latents, again)
    other, _ = drawn(memory, 30_000, seed=1)
    assert not torch.equal(latents, other)


@pytest.mark.parametrize(
    "spread",
    [
        torch.tensor([0.25, 4.0]),
        COVARIANCES[0],
        torch.stack([*COVARIANCES, torch.eye(2) * 3]),
    ],
    ids=["shared-diagonal", "shared", "per-class"],
)
def test_gaussian_samples_have_the_stored_moments(spread):
    latents, labels = drawn(GaussianPrototypes(statistics(spread)), 60_000)
    for label, mean in enumerate(MEANS):
        members = latents[labels == label].numpy()
        expected = spread[label] if spread.ndim == 3 else spread
        expected = torch.diag(expected) if expected.ndim == 1 else expected
        assert np.allclose(members.mean(0), mean, atol=0.06)
        assert np.allclose(np.cov(members.T), expected, atol=0.15)


def test_one_gaussian_sample_by_hand():
    memory = GaussianPrototypes(statistics(torch.tensor([0.25, 4.0])))
    noise = {"replay": torch.tensor([[0.4]]), "replay_normal": torch.tensor([[2.0, -1.0]])}
    latents, labels = memory.sample(noise)
    # Class 1 has the mean (0, 2); deviations are 0.5 and 2.
    assert labels.tolist() == [1]
    assert latents.tolist() == [[1.0, 0.0]]


def test_covariances_of_few_pictures_can_be_sampled():
    # Two pictures span a line: the covariance has rank 1 and no Cholesky factor of its own.
    line = torch.tensor([3.0, 4.0])
    flat = torch.outer(line, line)
    latents, labels = drawn(GaussianPrototypes(statistics(flat)), 1000)
    offsets = latents - MEANS[labels]
    across = offsets @ torch.tensor([-0.8, 0.6])
    assert across.std() < 0.01 * math.sqrt(25)
    assert offsets.norm(dim=1).square().mean().item() == pytest.approx(25, rel=0.15)


def test_memories_hold_no_trainable_weights():
    for memory in (pseudo_latents()[0], GaussianPrototypes(statistics(COVARIANCES[0]))):
        assert not list(memory.parameters())


def test_the_bank_takes_the_mean_feature_norm_and_keeps_its_directions():
    memory, bank = pseudo_latents()
    assert torch.allclose(memory.bank.norm(dim=-1), torch.full((3, 4), 2.0))
    assert torch.allclose(F.cosine_similarity(memory.bank, bank, dim=-1), torch.ones(3, 4))

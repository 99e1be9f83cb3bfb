import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributions import Normal
from torch.nn import functional as F

from ncdwf.learning.losses import (
    balanced_binary_cross_entropy,
    distillation,
    gaussian_nll,
    known_scale,
    partial_sinkhorn,
    self_labelling,
    sinkhorn,
    swapped_prediction,
)


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 12), st.integers(1, 6), st.floats(-3, 3), st.integers(0, 9))
def test_rows_of_assignments_sum_to_one(num_images, num_clusters, log_scale, seed):
    logits = normal(2, num_images, num_clusters, seed=seed) * 10**log_scale
    assignments = sinkhorn(logits)
    assert assignments.shape == logits.shape
    assert (assignments >= 0).all()
    assert torch.allclose(assignments.sum(-1), torch.ones(2, num_images), atol=1e-5)


def test_converged_clusters_get_equal_shares():
    assignments = sinkhorn(normal(12, 4) * 0.1, num_iterations=200)
    # 12 images over 4 clusters.
    assert torch.allclose(assignments.sum(0), torch.full((4,), 3.0), atol=1e-4)
    assert torch.allclose(assignments.sum(1), torch.ones(12), atol=1e-5)


@pytest.mark.parametrize("difference", [0.0, 0.01, -0.02, 0.2])
def test_two_images_and_two_clusters_have_a_closed_form(difference):
    # A 2×2 table with all margins 1 is [[p, 1-p], [1-p, p]]; scaling rows and columns keeps the
    # cross ratio p²/(1-p)², which is exp(d/ε) here: p = sigmoid(d / 2ε).
    logits = torch.tensor([[difference, 0.0], [0.0, 0.0]]) + torch.tensor([[0.03], [-0.01]])
    got = sinkhorn(logits, epsilon=0.05, num_iterations=100)
    p = 1 / (1 + math.exp(-difference / (2 * 0.05)))
    assert torch.allclose(got, torch.tensor([[p, 1 - p], [1 - p, p]]), atol=1e-5)


def test_one_iteration_by_hand():
    # exp(logits/ε) = [[1, 2], [3, 2]]; columns to 1: [[1/4, 1/2], [3/4, 1/2]]; rows to 1.
    logits = 0.05 * torch.tensor([[1.0, 2.0], [3.0, 2.0]]).log()
    expected = torch.tensor([[1 / 3, 2 / 3], [3 / 5, 2 / 5]])
    assert torch.allclose(sinkhorn(logits, num_iterations=1), expected, atol=1e-6)


def test_assignments_agree_with_plain_matrix_scaling():
    logits = normal(7, 3) * 0.2
    table = np.exp(logits.double().numpy() / 0.05)
    for _ in range(3):
        table /= table.sum(0, keepdims=True)
        table /= table.sum(1, keepdims=True)
    assert np.allclose(sinkhorn(logits), table, atol=1e-5)


WHOLE = torch.tensor(1.0)


@pytest.mark.parametrize("num_iterations", [1, 3, 50])
def test_without_balance_every_image_chooses_alone(num_iterations):
    logits = 0.2 * normal(2, 9, 4)
    assignments = partial_sinkhorn(logits, balance=0.0, mass=WHOLE, num_iterations=num_iterations)
    assert torch.allclose(assignments, (logits / 0.05).softmax(-1), atol=1e-6)


def test_one_iteration_with_half_the_balance_by_hand():
    # exp(logits/ε) = [[1, 3], [3, 5]], and 1 in the column for what is left out; rows to 1: [[1/5,
    # 3/5], [3/9, 5/9]]; columns have 8/15 and 52/45 and are divided by the roots of that; nothing
    # may be left out, so rows to 1.
    logits = 0.05 * torch.tensor([[1.0, 3.0], [3.0, 5.0]]).log()
    table = np.array([[1.0, 3.0], [3.0, 5.0]]) / np.sqrt([8 / 15, 52 / 45])
    expected = torch.tensor(table / table.sum(1, keepdims=True)).float()
    got = partial_sinkhorn(logits, balance=0.5, mass=WHOLE, num_iterations=1)
    assert torch.allclose(got, expected, atol=1e-6)


def test_the_whole_mass_in_full_balance_is_what_equal_shares_converge_to():
    logits = 0.2 * normal(2, 9, 4)
    got = partial_sinkhorn(logits, balance=1.0, mass=WHOLE, num_iterations=200)
    assert torch.allclose(got, sinkhorn(logits, num_iterations=200), atol=1e-4)


@pytest.mark.parametrize("mass", [0.1, 0.5, 0.99])
@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
def test_as_much_is_assigned_as_asked_for(mass, balance):
    got = partial_sinkhorn(uneven(), balance=balance, mass=torch.tensor(mass), num_iterations=300)
    assert got.sum().item() == pytest.approx(40 * mass, rel=0.02)
    assert got.sum(1).max() <= 1 + 1e-5


def test_the_usual_iterations_come_close_to_half_of_the_mass():
    got = partial_sinkhorn(uneven(), balance=0.5, mass=torch.tensor(0.5))
    assert got.sum().item() / 40 == pytest.approx(0.5, abs=0.02)


def test_the_clearest_images_are_assigned_first():
    # Two images are sure of their cluster, two are not.
    logits = torch.tensor([[0.5, 0.0], [0.0, 0.5], [0.26, 0.25], [0.25, 0.26]])
    first, second, third, fourth = partial_sinkhorn(
        logits, balance=0.5, mass=torch.tensor(0.5), num_iterations=100
    ).sum(1)
    assert min(first, second) > 0.85
    assert max(third, fourth) < 0.15


def test_parts_are_those_of_optimal_transport_with_a_divergence():
    # As below, for half of the mass: a table that leaves the other half in one more column.
    logits, epsilon, balance = uneven().double(), 0.05, 0.5
    penalty = epsilon * balance / (1 - balance)
    wide = F.pad(logits, (0, 1))
    free = torch.zeros_like(wide, requires_grad=True)
    price = 0.0
    descent = torch.optim.LBFGS([free], max_iter=500, line_search_fn="strong_wolfe")

    def objective():
        descent.zero_grad()
        table = free.softmax(1)
        sizes = table.sum(0)
        divergence = (sizes[:3] * (sizes[:3] / 20 * 3).log() - sizes[:3]).sum()
        left_out = 50 * (sizes[3] - 20).square() - price * (sizes[3] - 20)
        entropy = (table * table.log()).sum()
        total = -(wide * table).sum() + epsilon * entropy + penalty * divergence + left_out
        total.backward()
        return total

    for _ in range(20):  # an augmented Lagrangian holds the column to its size
        descent.step(objective)
        price -= 100 * (free.softmax(1).sum(0)[3].item() - 20)
    got = partial_sinkhorn(
        logits.float(), balance=balance, mass=torch.tensor(0.5), num_iterations=300
    )
    assert torch.allclose(got, free.softmax(1)[:, :3].float(), atol=2e-3)


def uneven(num_images=40):
    """Return cosines of images of which three quarters belong to the first of three clusters."""
    labels = torch.tensor([0] * 30 + [1] * 7 + [2] * 3)[:num_images]
    return 0.2 * F.one_hot(labels, 3) + 0.05 * normal(num_images, 3)


@pytest.mark.parametrize("num_iterations", [3, 300])
def test_less_balance_lets_cluster_sizes_differ_more(num_iterations):
    differences = []
    for balance in (0.0, 0.25, 0.5, 0.75, 1.0):
        assignments = partial_sinkhorn(
            uneven(), balance=balance, mass=WHOLE, num_iterations=num_iterations
        )
        assert torch.allclose(assignments.sum(-1), torch.ones(40), atol=1e-5)
        sizes = assignments.sum(0)
        differences.append(float(sizes.max() - sizes.min()))
    for more, less in itertools.pairwise(differences):
        assert more > less + 0.5


@pytest.mark.parametrize("balance", [0.2, 0.5, 0.9])
def test_relaxed_shares_are_those_of_optimal_transport_with_a_divergence(balance):
    # The least of <C, P> + ε KL + λ KL(shares, equal shares) over P with rows of 1, found by
    # gradient descent; balance = λ / (λ + ε).
    logits, epsilon = uneven().double(), 0.05
    penalty = epsilon * balance / (1 - balance)
    free = torch.zeros_like(logits, requires_grad=True)
    descent = torch.optim.LBFGS([free], max_iter=500, line_search_fn="strong_wolfe")

    def objective():
        descent.zero_grad()
        table = free.softmax(1)
        sizes = table.sum(0)
        entropy = (table * table.log()).sum()
        divergence = (sizes * (sizes / len(table) * 3).log()).sum()
        total = -(logits * table).sum() + epsilon * entropy + penalty * divergence
        total.backward()
        return total

    descent.step(objective)
    got = partial_sinkhorn(logits.float(), balance=balance, mass=WHOLE, num_iterations=300)
    assert torch.allclose(got, free.softmax(1).float(), atol=1e-3)


@pytest.mark.parametrize("balance", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("mass", [0.1, 0.999, 1.0])
def test_no_logit_is_too_large_for_unequal_shares(balance, mass):
    logits = 1e30 * torch.tensor([[1.0, 0.0], [0.0, 1.0], [1.0, -1.0]])
    assignments = partial_sinkhorn(logits, balance=balance, mass=torch.tensor(mass))
    assert ((assignments >= 0) & (assignments <= 1)).all()
    if mass == 1:
        assert torch.allclose(assignments.sum(1), torch.ones(3))


@pytest.mark.parametrize("size", [1e4, 1e30])
def test_no_logit_is_too_large(size):
    logits = torch.tensor([[size, 0.0], [0.0, size], [size, -size]])
    assignments = sinkhorn(logits)
    assert torch.isfinite(assignments).all()
    assert torch.allclose(assignments.sum(1), torch.ones(3))


def test_constants_a_row_or_a_cluster_do_not_matter():
    logits = normal(8, 4) * 0.1
    expected = sinkhorn(logits)
    assert torch.allclose(sinkhorn(logits + 0.7), expected, atol=1e-4)
    assert torch.allclose(sinkhorn(logits + normal(1, 4, seed=1)), expected, atol=1e-4)
    converged = sinkhorn(logits, num_iterations=200)
    moved = sinkhorn(logits + 0.1 * normal(8, 1, seed=1), num_iterations=200)
    assert torch.allclose(moved, converged, atol=1e-4)


def test_every_batch_of_logits_is_assigned_on_its_own():
    logits = normal(2, 3, 6, 4) * 0.1
    together = sinkhorn(logits)
    for head in range(2):
        for view in range(3):
            assert torch.allclose(together[head, view], sinkhorn(logits[head, view]), atol=1e-6)


def test_assignments_carry_no_gradient():
    assert not sinkhorn(normal(4, 2).requires_grad_()).requires_grad


def test_two_views_predict_each_other():
    # One head, one image. View 0 is assigned (1, 0), view 1 (0.25, 0.75).
    assignments = torch.tensor([[[[1.0, 0.0]], [[0.25, 0.75]]]])
    log_probs = torch.tensor([[[[0.5, 0.5]], [[0.2, 0.8]]]]).log()
    # View 1 on the first: -ln 0.2; view 0 on the second: -ln 0.5; their mean.
    expected = (-math.log(0.2) - math.log(0.5)) / 2
    assert swapped_prediction(log_probs, assignments).item() == pytest.approx(expected)


def test_small_views_predict_and_are_not_predicted():
    # Two large views and one small one: assignments 0 -> views 1, 2 and 1 -> views 0, 2.
    assignments = torch.tensor([[[[1.0, 0.0]], [[0.0, 1.0]]]])
    log_probs = torch.tensor([[[[0.9, 0.1]], [[0.8, 0.2]], [[0.7, 0.3]]]]).log()
    terms = [-math.log(p) for p in (0.8, 0.7, 0.1, 0.3)]
    got = swapped_prediction(log_probs, assignments).item()
    assert got == pytest.approx(sum(terms) / 4)


def test_heads_are_kept_apart_and_images_averaged():
    log_probs = normal(3, 2, 5, 4).log_softmax(-1)
    assignments = normal(3, 2, 5, 4, seed=1).softmax(-1)
    losses = swapped_prediction(log_probs, assignments)
    assert losses.shape == (3,)
    for head in range(3):
        expected = (
            F.cross_entropy(log_probs[head, 1], assignments[head, 0])
            + F.cross_entropy(log_probs[head, 0], assignments[head, 1])
        ) / 2
        assert losses[head].item() == pytest.approx(expected.item(), rel=1e-5)


def test_swapped_prediction_is_least_where_the_views_agree_with_their_assignments():
    assignments = normal(1, 2, 5, 4).softmax(-1)
    swapped = assignments.flip(1).log()
    least = swapped_prediction(swapped, assignments)
    for seed in range(5):
        other = (swapped + 0.3 * normal(1, 2, 5, 4, seed=seed)).log_softmax(-1)
        assert swapped_prediction(other, assignments) > least


@pytest.mark.parametrize("num_others", [0, 1, 4])
def test_self_labelling_is_swapped_prediction_by_one_concatenated_softmax(num_others):
    cosines = normal(2, 3, 5, 4).tanh()
    others = 3 * normal(3, 5, num_others, seed=1) if num_others else None
    got = self_labelling(cosines, sinkhorn(cosines[:, :2]), temperature=0.2, others=others)
    assert got.shape == (2,)
    for head in range(2):
        parts = [cosines[head] / 0.2] if others is None else [cosines[head] / 0.2, others]
        log_probs = torch.cat(parts, dim=2).log_softmax(2)[:, :, :4]
        assignments = torch.stack([sinkhorn(cosines[head, view]) for view in range(2)])
        expected = swapped_prediction(log_probs[None], assignments[None])
        assert got[head].item() == pytest.approx(expected.item(), rel=1e-5)


def test_rows_that_are_left_out_do_not_count():
    cosines = normal(1, 2, 5, 4).tanh()
    assignments = sinkhorn(cosines)
    assignments[:, :, 3:] = 0
    got = self_labelling(cosines, assignments, temperature=0.2)
    expected = self_labelling(cosines[:, :, :3], assignments[:, :, :3], temperature=0.2)
    assert got.item() == pytest.approx(3 / 5 * expected.item(), rel=1e-5)


def test_a_single_cluster_leaves_the_softmax():
    # One cluster is right whatever happens, so what is left is the softmax: two views of one image
    # in a single cluster, beside another class with the same logit: -ln(1/2).
    cosines = torch.full((1, 2, 1, 1), 0.3)
    alone = self_labelling(cosines, sinkhorn(cosines), temperature=0.1)
    assert alone.item() == pytest.approx(0, abs=1e-6)
    beside = self_labelling(
        cosines, sinkhorn(cosines), temperature=0.1, others=torch.full((2, 1, 1), 3.0)
    )
    assert beside.item() == pytest.approx(math.log(2), rel=1e-5)


def test_the_gradient_of_self_labelling_is_the_softmax_minus_the_swapped_assignments():
    cosines = normal(1, 2, 5, 4).tanh().requires_grad_()
    others = normal(2, 5, 3, seed=1).requires_grad_()
    self_labelling(
        cosines, sinkhorn(cosines[:, :2]), temperature=0.2, others=others
    ).sum().backward()
    assignments = sinkhorn(cosines[0])
    shares = torch.cat([cosines[0] / 0.2, others], dim=2).softmax(2)
    # Two views of five images; the slope of the logits is that of the cosines times 0.2.
    expected = (shares[:, :, :4] - assignments.flip(0)) / (2 * 5)
    assert torch.allclose(0.2 * cosines.grad[0], expected, atol=1e-6)
    assert torch.allclose(others.grad, shares[:, :, 4:] / (2 * 5), atol=1e-6)


def test_distillation_is_the_mean_distance_in_units_of_the_norm():
    features = torch.tensor([[3.0, 4.0], [1.0, 1.0]])
    target = torch.tensor([[0.0, 0.0], [1.0, 0.0]])
    # Distances 5 and 1, mean 3, in units of 2.
    got = distillation(features, target, torch.tensor(2.0))
    assert got.item() == pytest.approx(1.5)


@pytest.mark.parametrize("scale", [1e-3, 1.0, 1e3])
def test_distillation_does_not_depend_on_the_scale_of_features(scale):
    features, target = normal(6, 3), normal(6, 3, seed=1)
    expected = distillation(features, target, torch.tensor(1.7))
    got = distillation(scale * features, scale * target, torch.tensor(scale * 1.7))
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)


@pytest.mark.parametrize("scale", [1e-2, 1.0, 1e2])
def test_distillation_has_a_finite_gradient_where_nothing_has_moved(scale):
    features = scale * normal(4, 3)
    moved = features.clone().requires_grad_()
    loss = distillation(moved, features, torch.tensor(scale))
    loss.backward()
    # sqrt(1e-12) in units of the norm is left.
    assert loss.item() == pytest.approx(1e-6, rel=1e-3)
    assert torch.equal(moved.grad, torch.zeros(4, 3))


def test_the_gradient_of_distillation_has_unit_length_an_image():
    # The distance is not squared: far or near, each image pulls with strength 1/(images · norm).
    target = torch.zeros(2, 3)
    moved = torch.tensor([[0.1, 0.0, 0.0], [0.0, 30.0, 40.0]], requires_grad=True)
    distillation(moved, target, torch.tensor(4.0)).backward()
    expected = torch.tensor([[1.0, 0.0, 0.0], [0.0, 0.6, 0.8]]) / (2 * 4)
    assert torch.allclose(moved.grad, expected, atol=1e-6)


@pytest.mark.parametrize(
    ("num_known", "num_novel", "expected"), [(5, 5, 1.0), (3, 1, 1.5**0.5), (1, 7, 0.5)]
)
def test_the_scale_of_distillation_follows_the_share_of_known_classes(
    num_known, num_novel, expected
):
    assert known_scale(num_known, num_novel) == pytest.approx(expected)


def test_gaussian_likelihood_agrees_with_torch():
    mean, target = normal(2, 5, 3), normal(2, 5, 3, seed=1)
    variance = normal(2, 1, 3, seed=2).square() + 0.1
    expected = -Normal(mean, variance.sqrt()).log_prob(target) - 0.5 * math.log(2 * math.pi)
    got = gaussian_nll(mean, variance.expand_as(mean), target)
    assert torch.allclose(got, expected.mean(-1), atol=1e-5)


def test_gaussian_likelihood_by_hand():
    # 0.5 · (2²/4 + ln 4) and 0.5 · (0/1 + ln 1), averaged.
    got = gaussian_nll(torch.tensor([3.0, 7.0]), torch.tensor([4.0, 1.0]), torch.tensor([1.0, 7.0]))
    assert got.item() == pytest.approx(0.25 * (1 + math.log(4)))


def test_gaussian_likelihood_is_best_at_the_right_variance():
    # For one residual r the minimum over the variance is at r².
    variance = torch.linspace(0.5, 8, 751)[:, None]
    losses = gaussian_nll(torch.zeros(751, 1), variance, torch.full((751, 1), 2.0))
    assert variance[losses.argmin()].item() == pytest.approx(4, abs=0.011)


def test_balanced_cross_entropy_by_hand():
    # Known logits 0 and ln 3: -ln(1/2), -ln(1/4). Novel logit ln 3: -ln(3/4).
    known, novel = torch.tensor([0.0, math.log(3)]), torch.tensor([math.log(3)])
    expected = 0.5 * ((math.log(2) + math.log(4)) / 2 + math.log(4 / 3))
    assert balanced_binary_cross_entropy(known, novel).item() == pytest.approx(expected)


def test_both_sides_weigh_the_same_however_many_there_are():
    known, novel = normal(6), normal(4, seed=1)
    expected = balanced_binary_cross_entropy(known, novel)
    got = balanced_binary_cross_entropy(known.repeat(50), novel)
    assert got.item() == pytest.approx(expected.item(), rel=1e-5)
    even = balanced_binary_cross_entropy(known, novel[:4].repeat(3)[:6])
    targets = torch.cat([torch.zeros(6), torch.ones(6)])
    logits = torch.cat([known, novel.repeat(3)[:6]])
    plain = F.binary_cross_entropy_with_logits(logits, targets)
    assert even.item() == pytest.approx(plain.item(), rel=1e-5)


def test_balanced_cross_entropy_stays_finite_for_certain_mistakes():
    got = balanced_binary_cross_entropy(torch.tensor([1e4]), torch.tensor([-1e4]))
    assert got.item() == pytest.approx(1e4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_losses_compute_in_single_precision(dtype):
    low = {"dtype": dtype}
    assert sinkhorn(normal(4, 3).to(dtype)).dtype == torch.float32
    pool = torch.full((2, 1), 0.5)
    assert distillation(pool.to(**low), pool, torch.tensor(1.0)).dtype == torch.float32
    assert gaussian_nll(pool.to(**low), pool, pool.to(**low)).dtype == torch.float32
    logits = torch.zeros(2, **low)
    assert balanced_binary_cross_entropy(logits, logits).dtype == torch.float32
    log_probs = normal(1, 2, 3, 4).log_softmax(-1)
    assignments = sinkhorn(normal(1, 2, 3, 4))
    exact = swapped_prediction(log_probs.to(dtype).float(), assignments)
    assert torch.equal(swapped_prediction(log_probs.to(dtype), assignments), exact)
    with torch.autocast("cpu", dtype=dtype):
        assert torch.equal(swapped_prediction(log_probs.to(dtype), assignments), exact)

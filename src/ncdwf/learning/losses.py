"""Loss functions without state. All of them compute in single precision, also under autocast.

References:
    [1]: Joseph et al., Novel Class Discovery without Forgetting, ECCV 2022.
    [2]: Fini et al., A Unified Objective for Novel Class Discovery, ICCV 2021 (version 2).
    [3]: Chizat et al., Scaling Algorithms for Unbalanced Optimal Transport Problems, 2018.
    [4]: Hou et al., Learning a Unified Classifier Incrementally via Rebalancing, CVPR 2019.
    [5]: Zhang et al., P²OT: Progressive Partial Optimal Transport for Deep Imbalanced Clustering,
        ICLR 2024.
"""

import math

import torch
from jaxtyping import Float
from torch import Tensor
from torch.nn import functional as F


@torch.no_grad()
def sinkhorn(
    logits: Float[Tensor, "*any image cluster"],
    *,
    epsilon: float = 0.05,
    num_iterations: int = 3,
) -> Float[Tensor, "*any image cluster"]:
    """Return soft assignments: every row sums to 1, every cluster gets an equal share [2, Sec. 3].

    Sinkhorn-Knopp in the log domain, so that no logit is too large for it. After a finite number
    of iterations the rows are exact and the clusters' shares approximate.
    """
    log_assignments = logits.float() / epsilon
    for _ in range(num_iterations):
        log_assignments = log_assignments - log_assignments.logsumexp(dim=-2, keepdim=True)
        log_assignments = log_assignments - log_assignments.logsumexp(dim=-1, keepdim=True)
    return log_assignments.exp()


@torch.no_grad()
def partial_sinkhorn(
    logits: Float[Tensor, "*any image cluster"],
    *,
    balance: float,
    mass: Float[Tensor, ""],
    epsilon: float = 0.05,
    num_iterations: int = 10,
) -> Float[Tensor, "*any image cluster"]:
    """Return soft assignments of a part of the images to clusters whose sizes may differ [5].

    Args:
        logits: cosines.
        balance: 1 holds the clusters to equal shares, at 0 every image chooses alone. It is the
            λ / (λ + ε) of optimal transport whose second marginal is held by λ times a
            Kullback-Leibler divergence [3].
        mass: above 0, at most 1. How much of the images is assigned, the clearest ones first: a
            row sums to less than 1 where it is left out, and so weighs less in a loss. It is
            approximate, and rather too large, after a finite number of iterations.
        epsilon: how soft the assignments are.
        num_iterations: unequal shares need more than equal ones.
    """
    num_images, num_clusters = logits.shape[-2:]
    # One more cluster, as far from all images, takes what is left out; it is held to its share.
    log_kernel = F.pad(logits.float() / epsilon, (0, 1))
    is_real = torch.arange(num_clusters + 1, device=logits.device) < num_clusters
    log_sizes = (num_images * torch.where(is_real, mass / num_clusters, 1 - mass)).log()
    strength = torch.where(is_real, balance, 1.0)
    scales = torch.zeros_like(log_kernel[..., :1, :])  # of the clusters; a log, too
    for _ in range(num_iterations):
        rows = log_kernel - (log_kernel + scales).logsumexp(dim=-1, keepdim=True)
        scales = strength * (log_sizes - rows.logsumexp(dim=-2, keepdim=True))
    return (log_kernel + scales).softmax(-1)[..., :-1]


def swapped_prediction(
    log_probs: Float[Tensor, "head view image cluster"],
    assignments: Float[Tensor, "head large image cluster"],
) -> Float[Tensor, " head"]:
    """Return the loss of each head: every view predicts the assignments of every other large view.

    The first views of `log_probs` are the large ones that `assignments` belong to.
    """
    num_views, num_images = log_probs.shape[1:3]
    num_large = assignments.shape[1]
    # Products of single elements and one sum. A product of matrices of so few rows and columns over
    # all pictures and clusters is off by 2e-4 (400 clusters, CPU), and the loss decides which head
    # answers.
    log_probs = log_probs.float()
    others = log_probs.sum(1, keepdim=True) - log_probs[:, :num_large]
    agreement = (assignments * others).sum((1, 2, 3))
    return -agreement / (num_images * num_large * (num_views - 1))


def self_labelling(
    logits: Float[Tensor, "head view image cluster"],
    assignments: Float[Tensor, "head large image cluster"],
    *,
    temperature: float,
    others: Float[Tensor, "view image other"] | None = None,
) -> Float[Tensor, " head"]:
    """Return the loss of each head on its own assignments of the first views.

    Args:
        logits: cosines.
        assignments: of the first views, the large ones.
        temperature: of the softmax.
        others: scaled logits of further classes that share the softmax and that no picture
            belongs to.
    """
    scaled = logits / temperature
    total = scaled.logsumexp(3)
    if others is not None:
        total = torch.logaddexp(total, others.logsumexp(2))
    return swapped_prediction(scaled - total[..., None], assignments)


def distillation(
    features: Float[Tensor, "image feature"],
    target: Float[Tensor, "image feature"],
    feature_norm: Float[Tensor, ""],
) -> Float[Tensor, ""]:
    """Return the mean distance of features to where they were, in units of `feature_norm`.

    The distance is the un-squared one of [1, Sec. 3.1]. Under a cosine head the features' scale is
    free and differs by a factor of fifty between runs; without the unit no weight would carry over.
    """
    difference = features.float() - target.float()
    # The gradient of a norm at zero is NaN, and at the first step nothing has moved yet.
    distance = (difference.square().sum(1) + 1e-12 * feature_norm.square()).sqrt()
    return (distance / feature_norm).mean()


def known_scale(num_known: int, num_novel: int) -> float:
    """Return how much distillation weighs: 1 where known and novel classes are as many.

    The more of the classes are known, the more there is to keep. [4] weighs by √(M / N), which has
    no bounds; this stays below √2.

    >>> known_scale(50, 50), round(known_scale(20, 80), 2)
    (1.0, 0.63)
    """
    return math.sqrt(2 * num_known / (num_known + num_novel))


def gaussian_nll(
    mean: Float[Tensor, "*any dim"],
    variance: Float[Tensor, "*#any dim"],
    target: Float[Tensor, "*any dim"],
) -> Float[Tensor, "*any"]:
    """Return the negative log-likelihood of `target`, without its constant, averaged over `dim`.

    This is -E[log q(l|u)] of [1, Eq. 4], whose printed sign would maximise it. The mean over the
    known classes instead of the sum makes its weight independent of their number.
    """
    squares = (mean.float() - target.float()).square()
    return 0.5 * (squares / variance + variance.log()).mean(-1)


def balanced_binary_cross_entropy(
    negative_logits: Float[Tensor, " negative"], positive_logits: Float[Tensor, " positive"]
) -> Float[Tensor, ""]:
    """Return the binary cross-entropy with both sides weighing the same, however many there are."""
    negative = F.softplus(negative_logits.float()).mean()
    positive = F.softplus(-positive_logits.float()).mean()
    return 0.5 * (negative + positive)

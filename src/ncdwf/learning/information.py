"""The mutual-information regulariser: how well novel logits tell the known head's answer."""

import math

import torch
from jaxtyping import Float
from torch import Tensor, nn
from torch.nn import functional as F

from ncdwf.learning.losses import gaussian_nll


class VariationalRegressor(nn.Module):
    """The Gaussian q(l|u) of [1, Sec. 3.3]: known logits l from the novel logits u of each head.

    Three bias-free layers give the mean; the variance is one number a known class and head, as in
    variational information distillation [2]. It is bounded from below: a variance that may shrink
    makes the gradient grow without end, and this term would come to rule the loss.

    References:
        [1]: Joseph et al., Novel Class Discovery without Forgetting, ECCV 2022.
        [2]: Ahn et al., Variational Information Distillation for Knowledge Transfer, CVPR 2019.
    """

    def __init__(
        self, num_novel: int, num_known: int, *, num_heads: int, min_variance: float
    ) -> None:
        super().__init__()
        self.min_variance = min_variance
        sizes = [(num_novel, num_known), (num_known, num_known), (num_known, num_known)]
        self.layers = nn.ParameterList(torch.empty(num_heads, *size) for size in sizes)
        self.free_variance = nn.Parameter(torch.empty(num_heads, 1, num_known))

    def initialise(self, source: torch.Generator) -> None:
        """Scale the layers by their inputs; start with a variance of 5, as [2] does.

        The last layer starts at zero: a regressor that knows nothing yet must not push the heads
        around (on the digits proxies that cost 3 points of novel accuracy, docs/digits.md).
        """
        for layer in self.layers:
            layer.normal_(std=math.sqrt(2 / layer.shape[1]), generator=source)
        self.layers[-1].zero_()
        self.free_variance.fill_(math.log(math.expm1(max(5.0 - self.min_variance, 0.1))))

    def forward(
        self,
        novel_logits: Float[Tensor, "head image novel"],
        known_logits: Float[Tensor, "image known"],
    ) -> Float[Tensor, " head"]:
        """Return the loss of each head; it is smallest where u tells most about l."""
        mean = novel_logits.float()
        for layer in list(self.layers)[:-1]:
            mean = F.relu(mean @ layer)
        mean = mean @ self.layers[-1]
        variance = self.min_variance + F.softplus(self.free_variance)
        return gaussian_nll(mean, variance, known_logits.expand_as(mean)).mean(1)

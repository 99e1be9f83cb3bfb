import pytest
import torch

from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.initialise import build
from ncdwf.noise import generator


def identifier():
    return build(lambda: KnownClassIdentifier(3), generator(0))


def constant(logit):
    """Return an identifier that gives every picture this logit."""
    made = identifier()
    with torch.no_grad():
        made.layers[-1].weight.zero_()
        made.layers[-1].bias.fill_(logit)
    return made


def test_novelty_is_the_logistic_function_of_the_logit():
    features = torch.randn(4, 3, generator=generator(1))
    made = identifier()
    logits = made(features)
    assert logits.shape == (4,)
    expected = 1 / (1 + torch.exp(-logits.double()))
    assert torch.allclose(made.novelty(features), expected)
    assert logits.unique().numel() == 4


def test_even_odds_by_hand():
    features = torch.ones(2, 3)
    assert constant(0.0).novelty(features).tolist() == [0.5, 0.5]
    # odds of 3 : 1
    assert constant(torch.tensor(3.0).log()).novelty(features)[0].item() == pytest.approx(0.75)


def test_only_the_direction_of_features_counts():
    features = torch.randn(4, 3, generator=generator(1))
    made = identifier()
    assert torch.allclose(made(features), made(1000 * features), atol=1e-5)
    assert not torch.allclose(made(features), made(-features), atol=1e-3)


def test_thresholds_close_to_one_stay_apart():
    # In single precision both would be exactly 1.
    features = torch.ones(1, 3)
    lower, upper = (constant(logit).novelty(features) for logit in (20.0, 21.0))
    assert lower < upper < 1
    made = identifier()
    made.tau.fill_(upper.item())
    assert lower < made.tau
    assert upper >= made.tau


def test_thresholds_start_in_the_middle_and_are_stored():
    state = identifier().state_dict()
    assert state["tau"].item() == state["calibrated_tau"].item() == 0.5
    assert state["tau"].dtype == state["calibrated_tau"].dtype == torch.float64


def test_it_has_two_hidden_layers_of_128():
    shapes = [tuple(weight.shape) for weight in identifier().parameters() if weight.ndim == 2]
    assert shapes == [(128, 3), (128, 128), (1, 128)]

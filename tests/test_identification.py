import pytest
import torch

from ncdwf.config import Optim
from ncdwf.learning.identification import calibrate, fit_identifier
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.initialise import build
from ncdwf.model.replay import GaussianPrototypes
from ncdwf.model.statistics import ClassStatistics
from ncdwf.noise import generator

OPTIM = Optim(epochs=8, batch_size=32, lr=0.3, min_lr=0.01)


def memory():
    """Return known classes along both directions of the first axis."""
    statistics = ClassStatistics(2, 4, "shared-diagonal")
    statistics.means = torch.tensor([[3.0, 0.0, 0.0, 0.0], [-3.0, 0.0, 0.0, 0.0]])
    statistics.spread = torch.full((4,), 0.3)
    return GaussianPrototypes(statistics)


def pool(num_images=128, seed=0):
    """Return novel features along the second axis."""
    features = 0.5 * torch.randn(num_images, 4, generator=generator(seed))
    features[:, 1] += 3
    return features


def identifier(seed=0):
    return build(lambda: KnownClassIdentifier(4), generator(seed))


def fitted(seed=0):
    made = identifier()
    fit_identifier(made, memory(), pool(), OPTIM, seed=seed)
    return made


def test_a_fitted_identifier_tells_the_pool_from_the_memory():
    made = fitted()
    novelty = made.novelty(pool(seed=7))
    known = torch.tensor([[5.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    assert (novelty > 0.5).double().mean() > 0.95
    assert (made.novelty(known) < 0.1).all()


def test_fitting_follows_from_the_seed_alone():
    torch.manual_seed(3)
    first = fitted()
    torch.manual_seed(4)
    again, other = fitted(), fitted(seed=1)
    weights = [dict(made.named_parameters()) for made in (first, again, other)]
    assert all(torch.equal(weights[0][name], weights[1][name]) for name in weights[0])
    assert not torch.equal(weights[0]["layers.0.weight"], weights[2]["layers.0.weight"])


def test_fitting_leaves_thresholds_and_features_alone():
    features = pool()
    made = identifier()
    fit_identifier(made, memory(), features, OPTIM, seed=0)
    assert torch.equal(features, pool())
    assert made.tau.item() == made.calibrated_tau.item() == 0.5
    assert not torch.equal(made.layers[0].weight, identifier().layers[0].weight)


def test_fitting_reports_its_progress():
    heard = []

    class Listener:
        def start(self, task, num_images, done):
            heard.append((task, num_images, done))

        def advance(self, num_images):
            heard.append(num_images)

        def stop(self):
            heard.append("stop")

    fit_identifier(identifier(), memory(), pool(64), OPTIM, seed=0, progress=Listener())
    # 64 features in batches of 32, 8 epochs.
    assert heard == [("identifier", 8 * 64, 0), *[32] * 16, "stop"]


def reading(values):
    """Return an identifier and features whose P(novel) is `values`."""
    made = identifier()
    made.novelty = lambda features: features[:, 0].double()
    return made, torch.tensor(values)[:, None].expand(-1, 4)


@pytest.mark.parametrize(
    ("lost", "threshold"),
    # Of 101 scores 0.00, 0.01, … the fraction q lies below the score q.
    [(0.05, 0.05), (0.5, 0.5), (0.0, 0.0), (1.0, 1.0)],
)
def test_the_threshold_is_a_quantile_of_the_pool(lost, threshold):
    order = torch.randperm(101, generator=generator(0))
    made, features = reading((torch.arange(101.0) / 100)[order].tolist())
    assert calibrate(made, features, lost=lost) == pytest.approx(threshold, abs=1e-6)


def test_by_default_a_twentieth_of_the_pool_is_lost():
    made, features = reading([i / 20 for i in range(21)])
    # The second of 21 scores: one lies below it, and a score at the threshold is novel.
    assert calibrate(made, features) == pytest.approx(0.05, abs=1e-6)


def test_one_picture_is_enough_to_calibrate():
    made, features = reading([0.3])
    assert calibrate(made, features) == pytest.approx(0.3)


def test_thresholds_close_to_one_keep_their_precision():
    made, features = identifier(), pool()
    with torch.no_grad():
        made.layers[-1].bias.fill_(25.0)  # 1 - P(novel) is about 1e-11
    tau = calibrate(made, features)
    lost = (made.novelty(features) < tau).double().mean().item()
    assert tau < 1
    assert lost == pytest.approx(0.05, abs=0.01)


def test_calibration_accepts_what_the_identifier_learnt_and_changes_nothing():
    made = fitted()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    tau = calibrate(made, pool(200, seed=5))
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())
    accepted = (made.novelty(pool(500, seed=6)) >= tau).double().mean().item()
    assert accepted == pytest.approx(0.95, abs=0.04)
    known = torch.tensor([[5.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    assert (made.novelty(known) < tau).all()

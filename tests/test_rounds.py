import inspect

import pytest
import torch
from conftest import fingerprint, unchanged_global_state
from torch import nn
from torch.nn import functional as F

from ncdwf.errors import InputError
from ncdwf.learning.rounds import promote
from ncdwf.model import Architecture, Model, NovelHead
from ncdwf.progress import Quiet

SPREADS = ("shared-diagonal", "shared", "per-class")
# Two known classes and two novel ones, each 30 degrees from one of the known.
MEANS = torch.tensor([[4.0, 0.0, 0.0], [0.0, 0.0, 4.0], [3.46, 2.0, 0.0], [0.0, 2.0, 3.46]])
# Prototypes of the known classes, 45 degrees from their means and 75 from the novel ones.
PROTOTYPES = torch.tensor([[1.0, -1.0, 0.0], [0.0, -1.0, 1.0]])
VARIANCE = 0.05
TEMPERATURE = 0.2


class Reader(nn.Module):
    """Passes vectors on through a norm, until its eyes are shut."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm1d(3)
        self.is_shut = False

    def forward(self, vectors):
        assert not self.is_shut
        return self.norm(vectors)


def discovered(spread="shared-diagonal"):
    """Return a model that has the statistics of four classes, as after discovery."""
    architecture = Architecture(
        backbone="custom", input_shape=(3,), num_known=2, temperature=TEMPERATURE, spread=spread
    )
    model = Model.create(architecture, ("cat", "dog"), seed=0, backbone=Reader())
    novel = NovelHead(num_novel=2, num_heads=2, num_hidden=4, num_projected=4)
    model = model.with_novel(novel, identifier=True, seed=0)
    with torch.no_grad():
        model.known_head.prototypes.copy_(PROTOTYPES)
    variance = VARIANCE * (torch.ones(3) if spread == "shared-diagonal" else torch.eye(3))
    parts = ((model.statistics, MEANS[:2]), (model.novel_statistics, MEANS[2:]))
    for statistics, means in parts:
        statistics.means.copy_(means)
        statistics.spread.copy_(variance.expand_as(statistics.spread))
        statistics.counts.fill_(10)
        statistics.feature_norm.fill_(4)
    return model


def classes(model, features):
    return model.outputs(features).known_logits.argmax(1).tolist()


@pytest.mark.parametrize("spread", SPREADS)
def test_the_means_of_all_classes_are_told_apart(spread):
    model = discovered(spread)
    # Unfitted, the novel classes draw the known ones to themselves: 30 degrees against 45.
    assert classes(model.promoted(), MEANS) == [2, 3, 2, 3]
    assert classes(promote(model, seed=0), MEANS) == [0, 1, 2, 3]


def test_samples_of_all_classes_are_told_apart():
    model = promote(discovered(), seed=0)
    labels = torch.arange(4).repeat(500)
    normal = torch.randn(2000, 3, generator=torch.Generator().manual_seed(1))
    found = torch.tensor(classes(model, MEANS[labels] + VARIANCE**0.5 * normal))
    # Neighbours are 2 · 4 · sin 15° apart, half of that is 4.6 deviations.
    assert (found == labels).float().mean() > 0.99


def test_the_loss_of_two_mixtures_by_hand(monkeypatch):
    caught = {}

    class Caught:
        def __init__(self, module, loss, source, optim, *, noise, **rest):
            caught.update(loss=loss, noise=noise)

        def run(self):
            pass

    monkeypatch.setattr("ncdwf.learning.rounds.Training", Caught)
    prototypes = promote(discovered(), seed=0).known_head.prototypes.detach().double()
    draws = {
        "replay": torch.tensor([[0.1], [0.6]]),  # classes 0 and 2 of four
        "replay_normal": torch.zeros(2, 3),
        "partner": torch.tensor([0.9, 0.2]),  # in the order of these numbers: the other one
        "share": torch.tensor([0.25, 0.4]),
    }
    terms = caught["loss"]((), draws, torch.zeros(()))
    first, second = MEANS[0].double(), MEANS[2].double()
    mixtures = torch.stack([0.75 * first + 0.25 * second, 0.6 * second + 0.4 * first])
    logits = F.normalize(mixtures, dim=1) @ F.normalize(prototypes, dim=1).T / TEMPERATURE
    surprise = -logits.log_softmax(1)
    expected = 0.75 * surprise[0, 0] + 0.25 * surprise[0, 2]
    expected = (expected + 0.6 * surprise[1, 2] + 0.4 * surprise[1, 0]) / 2
    assert set(terms) == {"classify"}
    assert terms["classify"].item() == pytest.approx(expected.item(), rel=1e-5)
    assert {name: draw.kind for name, draw in caught["noise"].items()} == {
        "replay": "uniform",
        "replay_normal": "normal",
        "partner": "uniform",
        "share": "uniform",
    }


def test_the_given_model_is_left_as_it_was():
    model = discovered().train()
    model.identifier.eval()
    model.hold_norms = True
    before, names = fingerprint(model), model.class_names
    architecture, modes = model.architecture, [part.training for part in model.modules()]
    promote(model, seed=0)
    assert fingerprint(model) == before
    assert model.architecture == architecture
    assert model.class_names == names
    assert model.num_novel == 2
    assert model.hold_norms
    assert [part.training for part in model.modules()] == modes
    assert all(weight.grad is None and weight.requires_grad for weight in model.parameters())


def test_no_picture_is_needed():
    assert set(inspect.signature(promote).parameters) == {"model", "seed", "engine", "progress"}
    model = discovered()
    model.backbone.module.is_shut = True
    assert classes(promote(model, seed=0), MEANS) == [0, 1, 2, 3]


def test_nothing_but_the_head_is_fitted():
    model = discovered()
    start, promoted = model.promoted(), promote(model, seed=0)
    assert fingerprint(promoted.backbone) == fingerprint(model.backbone)
    assert fingerprint(promoted.statistics) == fingerprint(start.statistics)
    changed = {
        name
        for name, tensor in promoted.state_dict().items()
        if not torch.equal(tensor, start.state_dict()[name])
    }
    assert changed == {"known_head.prototypes"}
    assert promoted.architecture == start.architecture
    assert promoted.class_names == ("cat", "dog", "novel-1", "novel-2")
    assert not any(part.training for part in promoted.modules())


@pytest.mark.parametrize("spread", SPREADS)
def test_the_seed_decides_every_bit(spread):
    model = discovered(spread)
    torch.manual_seed(1)
    with unchanged_global_state():
        first = promote(model, seed=3)
    torch.manual_seed(2)
    assert fingerprint(first) == fingerprint(promote(model, seed=3))
    assert fingerprint(first) != fingerprint(promote(model, seed=4))


def test_a_promoted_model_has_the_spread_of_both():
    model = discovered("per-class")
    model.novel_statistics.spread.mul_(2)
    promoted = promote(model, seed=0)
    expected = VARIANCE * torch.tensor([1.0, 1.0, 2.0, 2.0])[:, None, None] * torch.eye(3)
    assert torch.allclose(promoted.statistics.spread, expected)


@pytest.mark.parametrize("again", [False, True])
def test_a_model_without_novel_classes_is_refused(again):
    model = promote(discovered(), seed=0) if again else discovered().promoted()
    with pytest.raises(InputError, match="this model has not discovered anything yet"):
        promote(model, seed=0)


def test_a_model_before_discovery_is_refused(known_model):
    with pytest.raises(InputError, match="this model has not discovered anything yet"):
        promote(known_model, seed=0)


def test_after_a_promotion_another_discovery_can_begin():
    model = promote(discovered(), seed=0)
    novel = NovelHead(num_novel=3, num_heads=1, num_hidden=4, num_projected=4)
    again = model.with_novel(novel, identifier=True, seed=1)
    assert again.novel_names == ("novel-3", "novel-4", "novel-5")
    assert torch.equal(again.known_head.prototypes, model.known_head.prototypes)
    assert classes(again, MEANS) == [0, 1, 2, 3]


def test_the_steps_are_heard_of():
    class Heard(Quiet):
        def __init__(self):
            self.tasks, self.num_samples, self.num_stops = [], 0, 0

        def start(self, task, num_images, done):
            self.tasks.append((task, num_images, done))

        def advance(self, num_images):
            self.num_samples += num_images

        def stop(self):
            self.num_stops += 1

    heard = Heard()
    promote(discovered(), seed=0, progress=heard)
    # Four epochs of 50 steps of 512 samples.
    assert heard.tasks == [("promotion", 102_400, 0)]
    assert (heard.num_samples, heard.num_stops) == (102_400, 1)


def test_the_engine_is_the_one_asked_for():
    with pytest.raises(InputError, match="'captured' needs a CUDA device"):
        promote(discovered(), seed=0, engine="captured")


def test_known_pictures_are_known_again_once_the_head_is_fitted(found_model, split):
    is_known = split.test_labels < 4
    images, labels = split.test_images[is_known], split.test_labels[is_known]
    unfitted, fitted = found_model.promoted(), promote(found_model, seed=0)
    right = [
        (model.predict(images).labels == labels).float().mean() for model in (unfitted, fitted)
    ]
    assert right[0] < 0.6 < right[1]
    assert classes(fitted, fitted.statistics.means) == list(range(6))
    assert fitted.class_names == found_model.class_names

import math

import numpy as np
import pytest
import torch
from sklearn.linear_model import LogisticRegression
from torch import nn
from torch.nn import functional as F

from ncdwf.config import Optim
from ncdwf.learning import identification
from ncdwf.learning.discovery import Outcome
from ncdwf.learning.identification import calibrate, fit_identifier, settle_identifier, sharpen
from ncdwf.model import NovelHead
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.initialise import build
from ncdwf.model.replay import GaussianPrototypes
from ncdwf.model.statistics import ClassStatistics
from ncdwf.noise import draw, generator

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


def test_fitting_returns_what_each_epoch_left():
    history = fit_identifier(identifier(), memory(), pool(), OPTIM, seed=0)
    assert [(epoch.phase, epoch.epoch) for epoch in history] == [
        ("identifier", i) for i in range(8)
    ]
    losses = [epoch.terms["identify"] for epoch in history]
    # It begins at the ln 2 of a guess and cannot go below 1/4: half of all pairs are of both kinds,
    # and the entropy of their targets, averaged over all shares, is 1/2.
    assert losses[0] == pytest.approx(math.log(2), abs=0.05)
    assert 0.25 < losses[-1] < 0.8 * losses[0]


@pytest.fixture
def intercepted(monkeypatch):
    """Return what `fit_identifier` hands to the loop, instead of training with it."""
    handed = {}

    def train(module, loss, source, optim, **rest):
        handed.update(module=module, loss=loss, source=source, optim=optim, **rest)
        return []

    monkeypatch.setattr(identification, "train", train)
    made = identifier()
    fit_identifier(made, memory(), pool(64), OPTIM, seed=0, engine="eager")
    assert handed["module"] is made
    return handed


def handed_loss(handed, **changes):
    """Return the loss of one step, with some of its draws replaced, and what the step is given."""
    noise = {name: drawn[0] for name, drawn in draw(handed["noise"], 1, generator(1)).items()}
    noise |= changes
    batch = handed["source"].batch(0, 0)
    loss = handed["loss"](batch, noise, torch.zeros(()))["identify"]
    return loss.item(), memory().sample(noise)[0], batch[0], noise


@pytest.mark.parametrize("share", [0.0, 1.0])
def test_unmixed_the_loss_is_plain_cross_entropy(intercepted, share):
    # A share of one is the partner instead: the same inputs in another order.
    loss, latents, features, _ = handed_loss(intercepted, share=torch.full((64,), share))
    assert latents.shape == features.shape == (32, 4)
    made = intercepted["module"]
    known, novel = 1 - made.novelty(latents), made.novelty(features)
    expected = -torch.cat([known, novel]).log().mean().item()
    assert loss == pytest.approx(expected, rel=1e-5)


def test_the_loss_is_that_of_mixtures(intercepted):
    loss, latents, features, noise = handed_loss(intercepted)
    made = intercepted["module"]
    inputs = [row / row.norm() for row in torch.cat([latents, features])]
    partners = sorted(range(64), key=lambda i: noise["partner"][i].item())
    losses = []
    for i, share in enumerate(noise["share"].tolist()):
        j = partners[i]
        mixed = (1 - share) * inputs[i] + share * inputs[j]
        target = (1 - share) * (i >= 32) + share * (j >= 32)
        novelty = made.novelty(mixed[None]).item()
        losses.append(-target * math.log(novelty) - (1 - target) * math.log(1 - novelty))
    assert loss == pytest.approx(np.mean(losses), rel=1e-5)
    assert sorted(partners) == list(range(64))  # everything is a partner once


def test_fitting_runs_on_the_engine_asked_for(intercepted):
    assert (intercepted["engine"], intercepted["phase"]) == ("eager", "identifier")


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


def test_a_twentieth_of_the_pool_is_lost_if_that_is_asked_for():
    made, features = reading([i / 20 for i in range(21)])
    # The second of 21 scores: one lies below it, and a score at the threshold is novel.
    assert calibrate(made, features, lost=0.05) == pytest.approx(0.05, abs=1e-6)


def test_one_picture_is_enough_to_calibrate():
    made, features = reading([0.3])
    assert calibrate(made, features, lost=0.05) == pytest.approx(0.3)


def test_thresholds_close_to_one_keep_their_precision():
    made, features = identifier(), pool()
    with torch.no_grad():
        made.layers[-1].bias.fill_(25.0)  # 1 - P(novel) is about 1e-11
    tau = calibrate(made, features, lost=0.05)
    lost = (made.novelty(features) < tau).double().mean().item()
    assert tau < 1
    assert lost == pytest.approx(0.05, abs=0.01)


def test_calibration_accepts_what_the_identifier_learnt_and_changes_nothing():
    made = fitted()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    tau = calibrate(made, pool(200, seed=5), lost=0.05)
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())
    accepted = (made.novelty(pool(500, seed=6)) >= tau).double().mean().item()
    assert accepted == pytest.approx(0.95, abs=0.04)
    known = torch.tensor([[5.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    assert (made.novelty(known) < tau).all()


class Line(KnownClassIdentifier):
    """An identifier whose logit is its only feature, times a weight, plus a bias."""

    def __init__(self):
        super().__init__(1)
        self.layers = nn.Sequential(nn.Linear(1, 1))
        with torch.no_grad():
            self.layers[0].weight.fill_(1)
            self.layers[0].bias.zero_()

    def forward(self, features):
        return self.layers(features).squeeze(1)

    @property
    def slope_and_offset(self):
        return [self.layers[0].weight.item(), self.layers[0].bias.item()]


def column(values):
    return torch.as_tensor(values, dtype=torch.float32)[:, None]


def sharpened(known, novel):
    made = Line()
    sharpen(made, column(known), column(novel))
    return made


def platt(known, novel):
    """Return the slope and offset of scikit-learn for Platt's targets."""
    logits = np.concatenate([known, novel])[:, None]
    targets = np.repeat([1 / (len(known) + 2), 1 - 1 / (len(novel) + 2)], [len(known), len(novel)])
    # A soft target is two hard ones that share its weight.
    fit = LogisticRegression(C=1e12, tol=1e-10, max_iter=1000).fit(
        np.concatenate([logits, logits]),
        np.repeat([1, 0], len(logits)),
        sample_weight=np.concatenate([targets, 1 - targets]),
    )
    return [fit.coef_.item(), fit.intercept_.item()]


def test_sharpening_finds_the_relation_that_made_the_data():
    source = np.random.default_rng(0)
    logits = 1.5 * source.normal(size=20_000)
    is_novel = source.random(20_000) < 1 / (1 + np.exp(-(2 * logits - 1)))
    got = sharpened(logits[~is_novel], logits[is_novel]).slope_and_offset
    assert got == pytest.approx([2, -1], abs=0.1)
    assert got == pytest.approx(platt(logits[~is_novel], logits[is_novel]), rel=1e-3)


@pytest.mark.parametrize(
    ("centre", "width", "counts"),
    [
        (0.3, 0.2, (200, 200)),
        (0.3, 1.0, (300, 40)),  # far more known than novel
        (1.0, 3.0, (200, 200)),  # far too sure of itself
        (1.0, 10.0, (200, 200)),
    ],
)
def test_sharpening_is_the_best_line_whatever_the_scale(centre, width, counts):
    source = np.random.default_rng(0)
    known, novel = (
        sign * centre + width * source.normal(size=count)
        for sign, count in zip((-1, 1), counts, strict=True)
    )
    got = sharpened(known, novel).slope_and_offset
    assert got == pytest.approx(platt(known, novel), rel=1e-2, abs=1e-3)


@pytest.mark.parametrize(
    ("size", "count"),
    [
        (0.03, 50),
        (0.1, 1),
        (1.0, 50),
        (3.0, 50),
        (10.0, 50),
        (5.0, 1),
        (1e3, 50),
    ],
)
def test_sharpening_of_what_is_told_apart_ends_at_platts_targets(size, count):
    # Two points can have any two probabilities, so the best ones are the targets themselves.
    made = sharpened([-size] * count, [size] * count)
    assert all(map(math.isfinite, made.slope_and_offset))
    got = made.novelty(column([-size, size])).tolist()
    assert got == pytest.approx([1 / (count + 2), 1 - 1 / (count + 2)], rel=1e-3)


def test_sharpening_keeps_ranks_and_makes_surer():
    made = fitted()
    known, novel = made_latents(), pool(seed=3)
    rows = torch.cat([known, novel, normal_features()])
    before = made(rows)
    sharpen(made, known, novel)
    after = made(rows)
    assert torch.equal(before.argsort(), after.argsort())
    assert made.novelty(novel).mean() > torch.sigmoid(before[128:256]).mean() > 0.5
    assert made.novelty(known).mean() < torch.sigmoid(before[:128]).mean() < 0.5
    assert made.tau.item() == made.calibrated_tau.item() == 0.5


def made_latents(num_latents=128):
    recall = memory()
    noise = draw(recall.draws(num_latents), 1, generator(4))
    return recall.sample({name: drawn[0] for name, drawn in noise.items()})[0]


def normal_features(num_images=128):
    return torch.randn(num_images, 4, generator=generator(9))


def test_sharpening_leaves_an_identifier_alone_that_ranks_the_wrong_way_round():
    made = fitted()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    sharpen(made, pool(seed=3), made_latents())
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())


def test_sharpening_stays_finite_where_every_logit_is_the_same():
    assert all(map(math.isfinite, sharpened([0.7] * 5, [0.7] * 5).slope_and_offset))


SETTLE = Optim(epochs=3, batch_size=16, lr=0.1)


def settled(known_model, images, history=None, *, optim=SETTLE, tau="calibrated", **changes):
    """Return a model whose identifier was settled on `images`."""
    shape = NovelHead(num_novel=2, num_heads=1, num_hidden=4, num_projected=4)
    model = known_model.with_novel(shape, identifier=True, seed=0).eval()
    outcome = Outcome(
        images=images,
        history=[] if history is None else history,
        seed=changes.pop("seed", 0),
        engine="auto",
        progress=None,
    )
    recall = GaussianPrototypes(model.statistics)
    settle_identifier(model, recall, outcome, optim=optim, tau=tau, novel_lost=0.25)
    return model


def layers(model):
    """Return the weights of the identifier but for the last layer, which is sharpened."""
    linear = [part for part in model.identifier.layers if isinstance(part, nn.Linear)]
    return [tensor for part in linear[:-1] for tensor in (part.weight, part.bias)]


def test_every_tenth_picture_of_the_pool_has_no_part_in_the_fit(known_model, split):
    images = split.pool_images
    poisoned, other = images.clone(), images.clone()
    poisoned[::10] = 255 - poisoned[::10]
    other[11] = 255 - other[11]
    models = [settled(known_model, pool) for pool in (images, poisoned, other)]
    assert all(map(torch.equal, layers(models[0]), layers(models[1])))
    assert not any(map(torch.equal, layers(models[0]), layers(models[2])))
    # It is there for the scale and the threshold.
    assert models[0].tau != models[1].tau


@pytest.mark.parametrize("tau", ["calibrated", 0.4])
def test_settling_sets_both_thresholds(known_model, split, tau):
    model = settled(known_model, split.pool_images, tau=tau)
    unseen = model.identifier.novelty(model.features(split.pool_images[::10]))
    expected = np.quantile(unseen.detach().numpy(), 0.25)
    assert float(model.identifier.calibrated_tau) == pytest.approx(expected, rel=1e-9)
    assert model.tau == (float(model.identifier.calibrated_tau) if tau == "calibrated" else tau)


def test_settling_adds_its_epochs_to_the_history(known_model, split):
    before = fit_identifier(identifier(), memory(), pool(), SETTLE, seed=0)
    history = list(before)
    settled(known_model, split.pool_images, history)
    assert history[:3] == before
    assert [(epoch.phase, epoch.epoch) for epoch in history[3:]] == [
        ("identifier", epoch) for epoch in range(3)
    ]


def test_settling_sharpens_on_the_scale_of_unseen_pictures(known_model, split, monkeypatch):
    seen = []
    monkeypatch.setattr(identification, "sharpen", lambda *arguments: seen.append(arguments))
    model = settled(known_model, split.pool_images)
    ((sharpened_one, latents, features),) = seen
    assert sharpened_one is model.identifier
    assert torch.equal(features, model.features(split.pool_images)[::10])
    assert latents.shape == features.shape  # both kinds weigh the same
    # Latents point where the known classes are.
    cosines = F.normalize(latents) @ F.normalize(model.statistics.means).T
    assert (cosines.max(1).values > 0.5).all()


def test_an_identifier_that_was_trained_before_gets_thresholds_and_nothing_else(known_model, split):
    history = []
    shape = NovelHead(num_novel=2, num_heads=1, num_hidden=4, num_projected=4)
    fresh = known_model.with_novel(shape, identifier=True, seed=0)
    model = settled(known_model, split.pool_images, history, optim=None)
    for left, right in zip(
        fresh.identifier.parameters(), model.identifier.parameters(), strict=True
    ):
        assert torch.equal(left, right)
    assert history == []
    assert model.tau != 0.5


def test_settling_follows_from_the_seed(known_model, split):
    first, again, other = (settled(known_model, split.pool_images, seed=s) for s in (0, 0, 1))
    assert first.tau == again.tau != other.tau


@pytest.mark.parametrize("num_images", [1, 2, 11])
def test_settling_takes_a_pool_of_any_size(known_model, split, num_images):
    model = settled(known_model, split.pool_images[:num_images])
    assert 0 < model.tau < 1

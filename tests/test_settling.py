import copy
import math

import numpy as np
import pytest
import torch

from ncdwf.config import Optim
from ncdwf.errors import InputError
from ncdwf.learning import settling
from ncdwf.learning.discovery import Outcome, Teacher
from ncdwf.learning.settling import calibrate, divide, fit_heads, settle
from ncdwf.model import NovelHead
from ncdwf.model.heads import CosineHead
from ncdwf.model.identifier import KnownClassIdentifier
from ncdwf.model.initialise import build
from ncdwf.model.movement import Movement
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


def known_head(seed=0):
    return build(lambda: CosineHead(4, 2), generator(seed))


def fit(made, features, *, optim=OPTIM, **rest):
    """Fit `made` on one cluster of features that have not moved, and leave the known head alone."""
    labels = torch.zeros(len(features), dtype=torch.int64)
    heads = made, known_head(), known_head()
    rest = {"temperature": 0.1, "weight_replay": 0.0, "seed": 0, **rest}
    return fit_heads(
        *heads, rest.pop("recall", memory()), features, features, labels, optim, **rest
    )


def fitted(seed=0):
    made = identifier()
    fit(made, pool(), seed=seed)
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
    fit(made, features)
    assert torch.equal(features, pool())
    assert made.tau.item() == made.calibrated_tau.item() == 0.5
    assert not torch.equal(made.layers[0].weight, identifier().layers[0].weight)


def test_fitting_returns_what_each_epoch_left():
    history = fit(identifier(), pool())
    assert [(epoch.phase, epoch.epoch) for epoch in history] == [("settling", i) for i in range(8)]
    losses = [epoch.terms["identify"] for epoch in history]
    assert losses[0] == pytest.approx(math.log(2), abs=0.1)  # it begins with a guess
    assert losses[-1] < 0.5 * losses[0]


LABELS = torch.arange(64) % 3
TURN = torch.eye(4) + 0.2 * torch.randn(4, 4, generator=generator(9))


@pytest.fixture
def intercepted(monkeypatch):
    """Return what `fit_heads` hands to the loop, instead of training with it."""
    handed = {}

    class Training:
        def __init__(self, module, loss, source, optim, **rest):
            handed.update(module=module, loss=loss, source=source, optim=optim, **rest)

        def run(self):
            return []

    monkeypatch.setattr(settling, "Training", Training)
    made, head = identifier(), known_head()
    fit_heads(
        *(made, head, known_head(seed=1), memory(), pool(64), pool(64) @ TURN, LABELS, OPTIM),
        temperature=0.2,
        weight_replay=3.0,
        seed=0,
        engine="eager",
    )
    assert list(handed["module"]) == [made, head]
    return handed


def test_latents_are_carried_along_and_both_sides_are_given_the_spread_of_the_clusters(intercepted):
    noise = draw(intercepted["noise"], 1, generator(1))
    noise = {name: drawn[0] for name, drawn in noise.items()}
    spreads, centres = [], []
    for features in (pool(64), pool(64) @ TURN):
        means = torch.stack([features[label == LABELS].mean(0) for label in range(3)])
        centres.append(means)
        spreads.append(features - means[LABELS])
    rows = intercepted["source"].batch(0, 0)[0]
    assert all((row - centres[1]).norm(dim=1).min() < 1e-5 for row in rows)

    seen = []
    made, head = intercepted["module"]
    made.register_forward_pre_hook(lambda module, arguments: seen.append(arguments[0]))
    terms = intercepted["loss"]((rows,), noise, torch.zeros(()))
    known, novel = seen
    latents, _ = memory().sample(noise)
    places = (noise["spread"] * 64).long()
    carried = Movement(pool(64), pool(64) @ TURN)(latents)
    assert not torch.allclose(carried, latents, atol=0.1)
    assert torch.allclose(known, carried + spreads[1][places[:32]], atol=1e-5)
    assert torch.allclose(novel, rows + spreads[1][places[32:]], atol=1e-5)
    answers = torch.cat([1 - made.novelty(known), made.novelty(novel)])
    assert terms["identify"].item() == pytest.approx(-answers.log().mean().item(), rel=1e-5)

    # The known head is to answer as the old one did where the latent was.
    old = (known_head(seed=1)(latents + spreads[0][places[:32]]) / 0.2).softmax(1)
    cross_entropy = -(old * (head(known) / 0.2).log_softmax(1)).sum(1).mean()
    assert terms["replay"].item() == pytest.approx(3 * cross_entropy.item(), rel=1e-5)


def test_spread_does_not_tell_latents_from_the_pool():
    """The known classes lie where the pool does: only an identifier that reads spread tells."""
    statistics = ClassStatistics(1, 4, "shared-diagonal")
    statistics.means = torch.tensor([[0.0, 3.0, 0.0, 0.0]])
    statistics.spread = torch.full((4,), 1e-6)
    made, features = identifier(), pool(500)
    fit(made, features, recall=GaussianPrototypes(statistics))
    assert made.novelty(pool(500, seed=3)).std() < 0.1


def turned(angle, head):
    """Fit `head` to features that a turn by `angle` has moved since it was right."""
    turn = torch.eye(4)
    turn[:2, :2] = torch.tensor([[np.cos(angle), np.sin(angle)], [-np.sin(angle), np.cos(angle)]])
    before = torch.randn(200, 4, generator=generator(3))
    labels = torch.zeros(200, dtype=torch.int64)
    old = copy.deepcopy(head)
    history = fit_heads(
        *(identifier(), head, old, memory(), before, before @ turn, labels, OPTIM),
        temperature=0.1,
        weight_replay=1.0,
        seed=0,
    )
    return history, turn


def right_head():
    head = known_head()
    with torch.no_grad():
        head.prototypes.copy_(memory().means)
    return head


def test_the_known_head_turns_with_the_features():
    head = right_head()
    history, turn = turned(1.2, head)
    losses = [epoch.terms["replay"] for epoch in history]
    assert losses[-1] < 0.3 * losses[0]
    assert torch.cosine_similarity(head.prototypes, memory().means @ turn).min() > 0.95


def test_a_known_head_stays_where_nothing_has_moved():
    head = right_head()
    turned(0.0, head)
    assert torch.cosine_similarity(head.prototypes, memory().means).min() > 0.999


def test_fitting_runs_on_the_engine_asked_for(intercepted):
    assert (intercepted["engine"], intercepted["phase"]) == ("eager", "settling")


def test_fitting_reports_its_progress():
    heard = []

    class Listener:
        def start(self, task, num_images, done):
            heard.append((task, num_images, done))

        def advance(self, num_images):
            heard.append(num_images)

        def stop(self):
            heard.append("stop")

    fit(identifier(), pool(64), progress=Listener())
    # 64 features in batches of 32, 8 epochs.
    assert heard == [("settling", 8 * 64, 0), *[32] * 16, "stop"]


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
    assert calibrate(made, features, features, lost=lost) == pytest.approx(threshold, abs=1e-6)


def test_a_twentieth_of_the_pool_is_lost_if_that_is_asked_for():
    made, features = reading([i / 20 for i in range(21)])
    # The second of 21 scores: one lies below it, and a score at the threshold is novel.
    assert calibrate(made, features, features, lost=0.05) == pytest.approx(0.05, abs=1e-6)


def test_one_picture_is_enough_to_calibrate():
    made, features = reading([0.3])
    assert calibrate(made, features, features, lost=0.05) == pytest.approx(0.3)


@pytest.mark.parametrize(
    ("least", "threshold"), [(0.0, 0.2), (0.1, 0.2), (0.4, 0.4), (0.5, 0.5), (0.9, 0.5)]
)
def test_the_least_costs_half_of_the_pool_at_most(least, threshold):
    made, features = reading(np.linspace(0, 1, 101).tolist())
    found = calibrate(made, features, features, lost=0.2, least=least)
    assert found == pytest.approx(threshold, abs=1e-6)


@pytest.mark.parametrize("lost", [0.2, 0.6])
def test_what_is_asked_for_may_cost_more_than_half(lost):
    made, features = reading(np.linspace(0, 1, 101).tolist())
    found = calibrate(made, features, features, lost=lost, least=0.1)
    assert found == pytest.approx(lost, abs=1e-6)


@pytest.mark.parametrize(
    ("num_unseen", "of_the_pool", "threshold"), [(19, 0.6, 0.6), (19, 0.9, 0.8), (20, 0.6, 0.8)]
)
def test_few_unseen_pictures_lose_no_more_than_the_whole_pool(num_unseen, of_the_pool, threshold):
    made, features = reading([0.8] * num_unseen + [of_the_pool] * 180)
    found = calibrate(made, features[:num_unseen], features, lost=0.1)
    assert found == pytest.approx(threshold, abs=1e-6)


def test_thresholds_close_to_one_keep_their_precision():
    made, features = identifier(), pool()
    with torch.no_grad():
        made.layers[-1].bias.fill_(25.0)  # 1 - P(novel) is about 1e-11
    tau = calibrate(made, features, features, lost=0.05)
    lost = (made.novelty(features) < tau).double().mean().item()
    assert tau < 1
    assert lost == pytest.approx(0.05, abs=0.01)


def test_calibration_accepts_what_the_identifier_learnt_and_changes_nothing():
    made = fitted()
    before = {name: tensor.clone() for name, tensor in made.state_dict().items()}
    tau = calibrate(made, pool(200, seed=5), pool(200, seed=5), lost=0.05)
    assert all(torch.equal(before[name], tensor) for name, tensor in made.state_dict().items())
    accepted = (made.novelty(pool(500, seed=6)) >= tau).double().mean().item()
    assert accepted == pytest.approx(0.95, abs=0.04)
    known = torch.tensor([[5.0, 0.0, 0.0, 0.0], [-1.0, 0.0, 0.0, 0.0]])
    assert (made.novelty(known) < tau).all()


SETTLE = Optim(epochs=3, batch_size=16, lr=0.1)


def settled(known_model, images, history=None, *, optim=SETTLE, tau="calibrated", **changes):
    """Return a model whose identifier was settled on `images`."""
    shape = NovelHead(num_novel=2, num_heads=1, num_hidden=4, num_projected=4)
    model = known_model.with_novel(shape, identifier=True, seed=0).eval()
    teacher = changes.pop("teacher", known_model)
    outcome = Outcome(
        before=teacher.features(images),
        after=model.features(images),
        history=[] if history is None else history,
        seed=changes.pop("seed", 0),
        engine=changes.pop("engine", "auto"),
        progress=None,
    )
    recall = GaussianPrototypes(model.statistics)
    settle(
        model,
        recall,
        Teacher(teacher),
        outcome,
        optim=optim,
        weight_replay=changes.pop("weight_replay", 1.0),
        tau=tau,
        novel_lost=0.25,
        least_tau=changes.pop("least_tau", 0.0),
    )
    assert not changes
    return model


def layers(model):
    return list(model.identifier.parameters())


@pytest.mark.parametrize(
    ("num_images", "num_unseen"), [(1, 1), (2, 1), (10, 1), (11, 2), (600, 60)]
)
def test_a_tenth_of_the_pool_is_kept_out_of_the_fit(num_images, num_unseen):
    unseen, seen = divide(num_images, 0)
    assert len(unseen) == num_unseen
    if num_images > 1:
        assert sorted([*unseen.tolist(), *seen.tolist()]) == list(range(num_images))
    else:
        assert unseen.tolist() == seen.tolist() == [0]
    assert all(map(torch.equal, divide(num_images, 0), (unseen, seen)))


def test_the_tenth_has_no_rhythm():
    """Classes that come in turn are all in it."""
    unseen, _ = divide(600, 0)
    assert set((unseen % 5).tolist()) == set(range(5))
    assert not torch.equal(unseen, divide(600, 1)[0])


def test_what_is_kept_out_has_no_part_in_the_fit(known_model, split):
    images = split.pool_images
    unseen, seen = divide(len(images), 0)
    poisoned, other = images.clone(), images.clone()
    poisoned[unseen] = 255 - poisoned[unseen]
    other[seen[0]] = 255 - other[seen[0]]
    models = [settled(known_model, pool) for pool in (images, poisoned, other)]
    assert all(map(torch.equal, layers(models[0]), layers(models[1])))
    assert not any(map(torch.equal, layers(models[0]), layers(models[2])))
    # It is there for the threshold.
    assert models[0].tau != models[1].tau


@pytest.mark.parametrize("tau", ["calibrated", 0.4])
def test_settling_sets_both_thresholds(known_model, split, tau):
    model = settled(known_model, split.pool_images, tau=tau)
    rows, _ = divide(len(split.pool_images), 0)
    novelty = model.identifier.novelty(model.features(split.pool_images)).detach().numpy()
    # Unseen pictures are few here: the whole pool has a say, too.
    expected = min(np.quantile(novelty[rows.numpy()], 0.25), np.quantile(novelty, 0.25))
    assert float(model.identifier.calibrated_tau) == pytest.approx(expected, rel=1e-9)
    assert model.tau == (float(model.identifier.calibrated_tau) if tau == "calibrated" else tau)


@pytest.mark.parametrize("tau", ["calibrated", 0.4])
def test_the_least_is_of_the_calibrated_threshold(known_model, split, tau):
    images = split.pool_images
    model = settled(known_model, images, tau=tau, least_tau=1 - 1e-12)
    rows, _ = divide(len(images), 0)
    novelty = model.identifier.novelty(model.features(images[rows]))
    median = float(novelty.detach().quantile(0.5))
    assert float(model.identifier.calibrated_tau) == pytest.approx(median, rel=1e-6)
    assert model.tau == (pytest.approx(median, rel=1e-6) if tau == "calibrated" else tau)


def test_settling_adds_its_epochs_to_the_history(known_model, split):
    before = fit(identifier(), pool(), optim=SETTLE)
    history = list(before)
    settled(known_model, split.pool_images, history)
    assert history[:3] == before
    assert [(epoch.phase, epoch.epoch) for epoch in history[3:]] == [
        ("settling", epoch) for epoch in range(3)
    ]


def test_the_fit_knows_how_the_pool_has_moved(known_model, split, monkeypatch):
    seen = []
    monkeypatch.setattr(settling, "fit_heads", lambda *given, **rest: seen.extend(given) or [])
    moved = copy.deepcopy(known_model)
    with torch.no_grad():  # as if discovery had made every feature twice as long
        for tensor in (moved.backbone.layers[-2].weight, moved.backbone.layers[-2].bias):
            tensor.mul_(2)
        moved.known_head.prototypes.neg_()
    settled(moved, split.pool_images, teacher=known_model)
    _, head, teacher_head, recall, before, after, *_ = seen
    assert torch.allclose(after, 2 * before, atol=1e-4)
    assert torch.equal(head.prototypes, -teacher_head.prototypes)
    assert torch.equal(recall.means, known_model.statistics.means)


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


@pytest.mark.parametrize(("weight_replay", "optim"), [(1.0, SETTLE), (0.0, SETTLE), (1.0, None)])
def test_the_known_head_is_settled_if_it_is_replayed_to(known_model, split, weight_replay, optim):
    moved = copy.deepcopy(known_model)
    with torch.no_grad():
        moved.known_head.prototypes.add_(0.1)
    fit = {"weight_replay": weight_replay, "optim": optim}
    model = settled(moved, split.pool_images, teacher=known_model, **fit)
    is_left_alone = weight_replay == 0 or optim is None
    assert torch.equal(model.known_head.prototypes, moved.known_head.prototypes) == is_left_alone


def test_settling_runs_on_the_engine_asked_for(known_model, split):
    with pytest.raises(InputError, match="'captured' needs a CUDA device"):
        settled(known_model, split.pool_images, engine="captured")


def test_settling_follows_from_the_seed(known_model, split):
    first, again, other = (settled(known_model, split.pool_images, seed=s) for s in (0, 0, 1))
    assert first.tau == again.tau != other.tau


@pytest.mark.parametrize("num_images", [1, 2, 11])
def test_settling_takes_a_pool_of_any_size(known_model, split, num_images):
    model = settled(known_model, split.pool_images[:num_images])
    assert 0 < model.tau < 1

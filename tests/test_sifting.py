"""Known pictures are told from novel ones by class statistics alone."""

import inspect

import pytest
import torch
from conftest import fingerprint, tiny_pictures, unchanged_global_state
from torch import nn

from ncdwf.learning.rounds import promote
from ncdwf.learning.sifting import Sifted, sift
from ncdwf.model import Architecture, Model
from ncdwf.model.statistics import quantiles

SIZE = 8
# Three known classes and two novel ones, each along an axis of its own.
MEANS = 4 * torch.eye(SIZE)[:5]
NUM_KNOWN = 3
DEVIATION = 0.7


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def vector_model(spread="shared-diagonal", deviation=DEVIATION):
    """Return a model that takes vectors for features and has the statistics of known classes."""
    shape = Architecture(
        backbone="custom",
        input_shape=(SIZE,),
        num_known=NUM_KNOWN,
        temperature=0.1,
        spread=spread,
    )
    model = Model.create(shape, ("ant", "bee", "cat"), seed=0, backbone=nn.Identity()).eval()
    with torch.no_grad():
        model.known_head.prototypes.copy_(MEANS[:NUM_KNOWN])
    variance = deviation**2 * (torch.ones(SIZE) if "diagonal" in spread else torch.eye(SIZE))
    model.statistics.means.copy_(MEANS[:NUM_KNOWN])
    model.statistics.spread.copy_(variance.expand_as(model.statistics.spread))
    model.statistics.counts.fill_(100)
    model.statistics.feature_norm.fill_(4)
    for label in range(NUM_KNOWN):
        labelled = MEANS[label] + deviation * normal(3000, SIZE, seed=99 + label)
        angles = model.statistics.angles_to(labelled)[:, label]
        model.statistics.angles[label] = quantiles(angles, torch.ones(len(angles)))
    return model


def sifted(model, pool):
    return sift(model.statistics, model.features(pool))


def vectors(num_known, num_novel, seed=0):
    """Return a pool of both kinds, shuffled, and which of it is of known classes."""
    labels = torch.cat([torch.arange(num_known) % 3, 3 + torch.arange(num_novel) % 2])
    labels = labels[torch.randperm(len(labels), generator=torch.Generator().manual_seed(seed))]
    return MEANS[labels] + DEVIATION * normal(len(labels), SIZE, seed=seed), labels < NUM_KNOWN


@pytest.mark.parametrize("num_images", [1, 2, 50, 1000])
def test_nothing_is_left_out_of_a_purely_novel_pool(num_images):
    pool, _ = vectors(0, num_images)
    found = sifted(vector_model(), pool)
    assert found.is_kept.tolist() == [True] * num_images
    assert found.known_share < 0.01


@pytest.mark.parametrize("spread", ["shared-diagonal", "shared", "per-class"])
@pytest.mark.parametrize("seed", [0, 1, 2])
def test_known_vectors_are_left_out_and_novel_ones_kept(spread, seed):
    pool, is_known = vectors(500, 500, seed=seed)
    is_kept = sifted(vector_model(spread), pool).is_kept
    assert is_kept.shape == is_known.shape
    assert is_kept[is_known].float().mean() < 0.1
    assert is_kept[~is_known].float().mean() > 0.95


@pytest.mark.parametrize("percent", [0, 10, 25, 50, 75, 90, 100])
def test_the_estimated_share_is_near_the_truth(percent):
    for seed in range(3):
        pool, _ = vectors(50 * percent, 50 * (100 - percent), seed=seed)
        found = sifted(vector_model(), pool)
        # The least of many noisy ratios is taken, so the estimate errs on the low side.
        assert percent / 100 - 0.13 < found.known_share < percent / 100 + 0.02


def test_what_scores_below_all_that_is_remembered_is_novel():
    # The same vectors, once as wide as the statistics say and once ten times wider.
    pool, _ = vectors(300, 300)
    assert not sifted(vector_model(), pool).is_kept.all()
    found = sifted(vector_model(deviation=DEVIATION / 10), pool)
    assert found.is_kept.all()
    assert found.known_share < 0.05


def test_a_vector_is_kept_or_left_out_by_its_direction():
    # Scores are cosines: the length of a vector says nothing.
    pool, _ = vectors(300, 300)
    expected = sifted(vector_model(), pool)
    lengths = 0.5 + normal(len(pool), 1, seed=1).abs()
    assert sifted(vector_model(), lengths * pool).is_kept.equal(expected.is_kept)


def test_what_is_kept_goes_with_the_vector_and_not_with_its_place():
    pool, _ = vectors(300, 300)
    order = torch.randperm(len(pool), generator=torch.Generator().manual_seed(3))
    first, moved = (sifted(vector_model(), some) for some in (pool, pool[order]))
    assert moved.is_kept.equal(first.is_kept[order])
    assert moved.known_share == pytest.approx(first.known_share)


def test_nothing_is_drawn_and_nothing_changed():
    model = vector_model()
    pool, _ = vectors(3000, 3000)
    before = fingerprint(model)
    torch.manual_seed(1)
    with unchanged_global_state():
        first = sifted(model, pool)
    torch.manual_seed(2)
    again = sifted(model, pool)
    assert first.known_share == again.known_share
    assert first.is_kept.equal(again.is_kept)
    assert fingerprint(model) == before


def test_pictures_that_lie_farther_out_than_those_with_labels_make_the_share_too_low():
    # As those do that a network was not trained on; novel ones are kept all the same.
    labels = torch.arange(1000) % 5
    pool = MEANS[labels] + 1.2 * DEVIATION * normal(1000, SIZE)
    found = sifted(vector_model(), pool)
    assert 0.1 < found.known_share < 0.6
    assert found.is_kept[labels >= NUM_KNOWN].float().mean() > 0.95


def test_which_known_classes_are_there_makes_no_difference():
    # One class lies four times as close around its mean as the others do.
    model = vector_model()
    model.statistics.angles[0] = vector_model(deviation=DEVIATION / 4).statistics.angles[0]
    near = MEANS[0] + DEVIATION / 4 * normal(300, SIZE, seed=1)
    wide = MEANS[1] + DEVIATION * normal(300, SIZE, seed=2)
    novel, _ = vectors(0, 300)
    for known in (near, wide):
        found = sifted(model, torch.cat([known, novel]))
        assert found.known_share == pytest.approx(0.45, abs=0.1)
        assert found.is_kept[:300].float().mean() < 0.1
        assert found.is_kept[300:].float().mean() > 0.95


def test_where_no_angle_was_measured_all_is_kept():
    model = vector_model()
    model.statistics.angles.zero_()
    found = sifted(model, vectors(100, 100)[0])
    assert found.is_kept.all()
    assert found.known_share == 0


@pytest.mark.parametrize("direction", range(5))
def test_a_pool_of_one_vector_has_an_answer(direction):
    found = sifted(vector_model(), MEANS[direction : direction + 1])
    assert found.is_kept.shape == (1,)
    assert 0 <= found.known_share <= 1
    if direction >= NUM_KNOWN:
        assert found.is_kept.all()


@pytest.mark.parametrize("value", [0.0, 1.0])
def test_vectors_that_are_all_the_same_have_an_answer(value):
    found = sifted(vector_model(), torch.full((10, SIZE), value))
    assert len(set(found.is_kept.tolist())) == 1
    assert 0 <= found.known_share <= 1


def test_classes_without_any_spread_have_an_answer():
    pool, is_known = vectors(100, 100)
    found = sifted(vector_model(deviation=0.0), pool)
    assert found.is_kept[~is_known].all()
    assert 0 <= found.known_share <= 1


def test_a_pool_of_known_vectors_is_said_to_be_known():
    for seed in range(3):
        pool, _ = vectors(1000, 0, seed=seed)
        found = sifted(vector_model(), pool)
        assert found.known_share > 0.8


def test_of_a_pool_that_lies_nearer_than_the_labelled_pictures_next_to_nothing_is_kept():
    labels = torch.arange(900) % NUM_KNOWN
    found = sifted(vector_model(), MEANS[labels] + 0.8 * DEVIATION * normal(900, SIZE))
    assert found.known_share == 1
    assert found.is_kept.float().mean() < 0.1


def pool_of(per_class, known_classes):
    """Return pictures of the first known classes and of all novel ones, and which are known."""
    images, labels = tiny_pictures(per_class, seed=5)
    chosen = (labels >= 4) | (labels < known_classes)
    return images[chosen], labels[chosen] < 4


def test_nothing_is_left_out_of_novel_pictures(known_model, split):
    assert sifted(known_model, split.pool_images).is_kept.all()
    assert sifted(known_model, pool_of(100, 0)[0]).known_share < 0.05


@pytest.mark.parametrize("known_classes", [2, 4])
def test_known_pictures_are_left_out_and_their_share_is_told(known_model, known_classes):
    images, is_known = pool_of(100, known_classes)
    found = sifted(known_model, images)
    assert found.is_kept[is_known].float().mean() < 0.2
    assert found.is_kept[~is_known].float().mean() > 0.9
    assert found.known_share == pytest.approx(float(is_known.float().mean()), abs=0.15)


@pytest.mark.parametrize("place", [0, 4])
def test_a_pool_of_one_picture_has_an_answer(known_model, place):
    images, _ = tiny_pictures(1, seed=5)
    found = sifted(known_model, images[place : place + 1])
    assert isinstance(found, Sifted)
    assert found.is_kept.shape == (1,)


def test_a_model_of_a_later_round_knows_the_classes_of_the_earlier_ones(found_model):
    novel, _ = pool_of(100, 0)
    # Novel in the first round, these are known to the second.
    assert sifted(found_model, novel).known_share < 0.05
    assert sifted(promote(found_model, seed=0), novel).known_share > 0.3


def test_no_label_is_needed():
    assert set(inspect.signature(sift).parameters) == {"statistics", "features"}

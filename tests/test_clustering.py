import math

import pytest
import torch

from ncdwf.config import MOST
from ncdwf.data.augment import Views
from ncdwf.errors import InputError
from ncdwf.learning.clustering import Clustering, cluster, cluster_terms, encode
from ncdwf.learning.losses import partial_sinkhorn, sinkhorn
from ncdwf.model import Architecture, Model, NovelHead
from ncdwf.noise import generator

SIZES = Clustering(num_heads=3, num_hidden=5, num_projected=7, overclustering=2)
START = torch.tensor(0.0)
SHAPE = Architecture(
    backbone="small",
    input_shape=(1, 4, 4),
    num_known=2,
    temperature=0.1,
    spread="shared-diagonal",
)


def known_model():
    return Model.create(SHAPE, ("cat", "dog"), seed=0)


def whole_model():
    return known_model().with_novel(SIZES.novel_head(4), identifier=False, seed=0)


def pictures(*shape, seed=0):
    return torch.rand(*shape, 1, 4, 4, generator=generator(seed))


def normal(*shape, seed=0):
    return torch.randn(*shape, generator=generator(seed))


@pytest.mark.parametrize("name", ["num_heads", "num_hidden", "num_projected", "overclustering"])
def test_sizes_without_sense_are_refused_by_name(name):
    least = 0 if name == "overclustering" else 1
    for value in (least - 1, MOST + 1):
        message = f"clustering.{name}={value} should be from {least} to {MOST}"
        with pytest.raises(InputError, match=message):
            Clustering(**{name: value})
    assert Clustering(**{name: least}) != Clustering(**{name: MOST})


@pytest.mark.parametrize("balance", [-0.1, 1.1, float("nan")])
def test_a_balance_without_sense_is_refused_by_name(balance):
    message = f"clustering.balance={balance} should be from 0 to 1"
    with pytest.raises(InputError, match=message):
        Clustering(balance=balance)


def test_a_balance_may_reach_its_limits():
    assert Clustering(balance=0.0) != Clustering(balance=1.0) == Clustering()


def test_the_novel_head_has_the_sizes_asked_for():
    assert SIZES.novel_head(4) == NovelHead(num_novel=4, num_heads=3, num_hidden=5, num_projected=7)


def test_overclustering_heads_have_several_times_as_many_clusters():
    model = known_model()
    made = SIZES.overclusters(model, 4, generator(0))
    # Three heads; four novel classes, each in two parts.
    assert made(torch.zeros(6, model.backbone.num_features)).shape == (3, 6, 4 * 2)
    assert made.hidden.out_features == 3 * 5
    assert made.projection.shape == (3, 5, 7)


def test_overclustering_heads_follow_from_the_generator():
    first, again, other = (SIZES.overclusters(known_model(), 4, generator(s)) for s in (0, 0, 1))
    assert torch.equal(first.prototypes, again.prototypes)
    assert not torch.equal(first.prototypes, other.prototypes)


def test_without_overclustering_there_are_no_such_heads():
    assert Clustering(overclustering=0).overclusters(known_model(), 4, generator(0)) is None


def test_features_come_in_the_order_of_the_views_large_ones_first():
    model = whole_model().eval()
    large, small = pictures(2, 3), pictures(4, 3, seed=1)
    features = encode(model, Views(large=large, small=small))
    assert features.shape == (6, 3, model.backbone.num_features)
    for view, images in enumerate([*large, *small]):
        assert torch.allclose(features[view], model.backbone(images), atol=1e-5)
    assert torch.equal(encode(model, Views(large=large)), features[:2])


def test_every_size_of_views_is_normalised_on_its_own():
    # The small views have no part in the mean and variance that the large ones are divided by.
    model, alone = whole_model().train(), whole_model().train()
    large, small = pictures(2, 3), 0.1 * pictures(2, 3, seed=1)
    features = encode(model, Views(large=large, small=small))
    assert torch.allclose(features[:2].flatten(0, 1), alone.backbone(large.flatten(0, 1)))
    assert torch.allclose(features[2:].flatten(0, 1), alone.backbone(small.flatten(0, 1)))


def test_both_kinds_of_heads_give_cosines_in_single_precision():
    model = whole_model().eval()
    overclusters = SIZES.overclusters(model, 4, generator(0)).eval()
    features = normal(6, model.backbone.num_features)
    cosines = cluster(model, overclusters, features)
    assert list(cosines) == ["cluster", "overcluster"]
    assert torch.equal(cosines["cluster"], model.novel_head(features))
    assert torch.equal(cosines["overcluster"], overclusters(features))
    assert list(cluster(model, None, features)) == ["cluster"]
    with torch.autocast("cpu", torch.bfloat16):
        low = cluster(model, overclusters, features)
    assert {values.dtype for values in low.values()} == {torch.float32}


def slow_assignments(cosines):
    """Return the assignments of one head to the images of one view, by plain matrix scaling."""
    table = torch.exp(cosines.double() / 0.05)
    for _ in range(3):
        table = table / table.sum(0, keepdim=True)
        table = table / table.sum(1, keepdim=True)
    return table


def slow_loss(cosines, num_large, temperature, others):
    """Return the loss of one head, `[view, image, cluster]`, image by image."""
    num_views, num_images, num_clusters = cosines.shape
    losses = []
    for target in range(num_large):
        assignments = slow_assignments(cosines[target])
        for view in range(num_views):
            if view == target:
                continue
            for image in range(num_images):
                logits = (cosines[view, image] / temperature).tolist()
                rest = [] if others is None else others[view, image].tolist()
                total = sum(math.exp(logit) for logit in logits + rest)
                losses += [
                    -sum(
                        float(assignments[image, c]) * math.log(math.exp(logits[c]) / total)
                        for c in range(num_clusters)
                    )
                ]
    return sum(losses) / len(losses)


@pytest.mark.parametrize("num_others", [0, 3])
@pytest.mark.parametrize("num_small", [0, 2])
def test_the_terms_agree_with_a_slow_loop(num_small, num_others):
    small = pictures(num_small, 5, seed=1) if num_small else None
    views = Views(large=pictures(2, 5), small=small)
    num_views = 2 + num_small
    cosines = {
        "cluster": normal(3, num_views * 5, 4).tanh(),
        "overcluster": normal(3, num_views * 5, 8, seed=1).tanh(),
    }
    others = 5 * normal(num_views * 5, num_others, seed=2) if num_others else None
    terms = cluster_terms(cosines, views, Clustering(temperature=0.2), START, others=others)
    assert list(terms) == ["cluster", "overcluster"]
    for name, values in cosines.items():
        assert terms[name].shape == (3,)
        for head in range(3):
            expected = slow_loss(
                values[head].unflatten(0, (num_views, 5)),
                num_large=2,
                temperature=0.2,
                others=None if others is None else others.unflatten(0, (num_views, 5)),
            )
            # Both kinds of heads weigh the same: half each.
            assert terms[name][head].item() == pytest.approx(expected / 2, rel=1e-4)


def test_one_kind_of_heads_has_the_whole_weight():
    views = Views(large=pictures(2, 5))
    cosines = normal(3, 10, 4).tanh()
    sizes = Clustering(temperature=0.2)
    both = cluster_terms({"cluster": cosines, "overcluster": cosines}, views, sizes, START)
    alone = cluster_terms({"cluster": cosines}, views, sizes, START)
    assert torch.allclose(alone["cluster"], both["cluster"] + both["overcluster"])


def test_other_classes_in_the_softmax_are_pushed_down():
    views = Views(large=pictures(2, 5))
    others = normal(10, 3).requires_grad_()
    cosines = {"cluster": normal(3, 10, 4).tanh()}
    terms = cluster_terms(cosines, views, Clustering(temperature=0.2), START, others=others)
    terms["cluster"].sum().backward()
    assert (others.grad > 0).all()


@pytest.mark.parametrize("progress", [0.0, 0.5, 1.0])
def test_the_balance_reaches_both_kinds_of_heads(progress):
    views = Views(large=pictures(2, 5))
    cosines = {
        "cluster": normal(3, 10, 4).tanh(),
        "overcluster": normal(3, 10, 8, seed=1).tanh(),
    }
    clustering, progress = Clustering(balance=0.5), torch.tensor(progress)
    terms = cluster_terms(cosines, views, clustering, progress)
    held = cluster_terms(cosines, views, Clustering(), progress)
    for name, values in cosines.items():
        values = values.unflatten(1, (2, 5))
        chosen = clustering.assign(values, progress).flip(1)
        expected = -(chosen * (values / 0.1).log_softmax(3)).sum(3).mean((1, 2)) / 2
        assert torch.allclose(terms[name], expected, rtol=1e-4)
        assert (terms[name] != held[name]).all()


def test_full_balance_is_sinkhorn_whatever_the_progress():
    cosines = normal(3, 10, 4).tanh()
    for progress in (0.0, 0.7):
        assert torch.equal(Clustering().assign(cosines, torch.tensor(progress)), sinkhorn(cosines))


@pytest.mark.parametrize(
    ("progress", "mass"),
    [(0.0, 0.1 + 0.9 * math.exp(-5)), (0.8, 0.1 + 0.9 * math.exp(-0.2)), (1, 1)],
)
def test_with_less_balance_more_and_more_is_assigned(progress, mass):
    cosines = 0.3 * normal(40, 3).tanh()
    got = Clustering(balance=0.5).assign(cosines, torch.tensor(float(progress)))
    expected = partial_sinkhorn(cosines, balance=0.5, mass=torch.tensor(float(mass)))
    assert torch.allclose(got, expected, atol=1e-5)

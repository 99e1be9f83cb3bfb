import dataclasses

import numpy as np
import pytest
import torch

from ncdwf.data.setting import Split
from ncdwf.errors import InputError
from ncdwf.model import Architecture, Model, NovelHead, Outputs
from ncdwf.results.evaluation import PAPER_TAUS, evaluate, kmeans_rows

# Four known and six novel test pictures, five in the pool; two known and two novel classes.
TEST_LABELS = [0, 0, 1, 1, 2, 2, 2, 3, 3, 3]
POOL_LABELS = [2, 2, 3, 3, 3]
KNOWN_ANSWERS = [0, 0, 1, 0, 0, 1, 0, 1, 0, 1]
OTHER_HEAD = [0, 0, 0, 0, 0, 0, 0, 1, 1, 1]
BEST_HEAD = [0, 0, 1, 1, 1, 1, 0, 0, 0, 1]
OTHER_HEAD_ON_POOL = [1, 1, 0, 0, 0]
POOL_ANSWERS = [0, 0, 1, 1, 0]
NOVELTY = [0.1, 0.7, 0.2, 0.995, 0.999, 0.7, 0.3, 0.995, 0.65, 0.7]


def numbered(first, count):
    """Return pictures that can be told apart by their brightness."""
    values = torch.arange(first, first + count, dtype=torch.uint8)
    return values[:, None, None, None].expand(-1, 1, 4, 4).contiguous()


def made_split(**changes):
    split = Split(
        known_images=numbered(200, 2),
        known_labels=torch.tensor([0, 1]),
        pool_images=numbered(100, len(POOL_LABELS)),
        pool_labels=torch.tensor(POOL_LABELS),
        test_images=numbered(0, len(TEST_LABELS)),
        test_labels=torch.tensor(TEST_LABELS),
        known_names=("a", "b"),
        novel_names=("c", "d"),
    )
    return dataclasses.replace(split, **changes)


def known_model(num_known=2):
    shape = Architecture(
        backbone="small",
        input_shape=(1, 4, 4),
        num_known=num_known,
        temperature=0.1,
        spread="shared-diagonal",
    )
    return Model.create(shape, tuple("abcdef"[:num_known]), seed=0)


def real_model(num_clusters=2, *, identifier=True):
    novel = NovelHead(num_novel=num_clusters, num_heads=2, num_hidden=4, num_projected=4)
    return known_model().with_novel(novel, identifier=identifier, seed=0)


def one_hot(answers, count):
    return torch.nn.functional.one_hot(torch.tensor(answers), count).float()


def scripted(
    known=KNOWN_ANSWERS,
    heads=(OTHER_HEAD, BEST_HEAD),
    pool_heads=(OTHER_HEAD_ON_POOL, POOL_ANSWERS),
    num_clusters=2,
    novelty=NOVELTY,
    tau=0.6,
):
    """Return a model whose answers stand in the tables, by the brightness of the picture."""
    model = real_model(num_clusters)
    model.best_head.fill_(1)
    model.identifier.tau.fill_(tau)
    model.identifier.calibrated_tau.fill_(0.6)
    padding = 100 - len(known)
    all_known = one_hot([*known, *[0] * padding, *[0] * len(POOL_LABELS)], 2)
    all_novel = torch.stack(
        [
            one_hot([*answers, *[0] * padding, *pool], num_clusters)
            for answers, pool in zip(heads, pool_heads, strict=True)
        ]
    )
    all_novelty = torch.zeros(100 + len(POOL_LABELS), dtype=torch.float64)
    all_novelty[: len(novelty)] = torch.tensor(novelty, dtype=torch.float64)

    def outputs(features):
        rows = features[:, 0].long()
        return Outputs(
            known_logits=all_known[rows],
            novel_logits=all_novel[:, rows],
            novelty=all_novelty[rows],
        )

    model.features = lambda images: images[:, 0, 0, :1].float()
    model.outputs = outputs
    return model


@pytest.fixture(scope="module")
def result():
    return evaluate(scripted(), made_split(), scripted(known=TEST_LABELS[:4] + [0] * 6))


def test_task_aware_scores_by_hand(result):
    aware = result[0].aware
    # Known: pictures 0, 1, 2 of 4 are right.
    assert aware.known == 75
    # Best head, class by cluster: c (1, 2), d (2, 1); cluster 0 is d, 1 is c: 4 of 6.
    assert aware.novel == 66.67
    assert aware.all == 70.83
    # Ten pictures: 3 + 4 are right.
    assert aware.all_weighted == 70
    # The other head is perfect: (66.67 + 100) / 2.
    assert aware.novel_mean_over_heads == 83.33
    # Pool: c (2, 0), d (1, 2): 4 of 5.
    assert aware.novel_pool == 80


@pytest.mark.parametrize(
    ("rule", "tau", "known", "novel", "both", "weighted", "rejected", "accepted"),
    [
        # Only 3, 4 and 7 are routed to novel. Known 0, 1, 2 are right. Cluster 1 meets c once
        # and cluster 0 d once: 2 of all 6.
        (0, 0.8, 75, 33.33, 54.17, 50, 25, 66.67),
        (4, 0.99, 75, 33.33, 54.17, 50, 25, 66.67),
        # Only 4 is routed to novel.
        (5, 0.999, 75, 16.67, 45.83, 40, 0, 83.33),
        # 1 and 3 are lost, so 0 and 2 are right. 6 is lost; c (0, 2), d (2, 1): 4 of all 6.
        (6, 0.6, 50, 66.67, 58.33, 60, 50, 16.67),
    ],
)
def test_task_agnostic_scores_by_hand(
    result, rule, tau, known, novel, both, weighted, rejected, accepted
):
    routed = result[0].agnostic[rule]
    assert (routed.rule, routed.tau) == ("identifier", tau)
    assert (routed.known, routed.novel) == (known, novel)
    assert (routed.all, routed.all_weighted) == (both, weighted)
    assert (routed.known_rejected, routed.novel_accepted) == (rejected, accepted)


@pytest.mark.parametrize(
    ("rule", "known", "novel", "both", "weighted"),
    [
        # The pool says: cluster 0 is c, 1 is d. 4 is called d, 7 is called c: both wrong.
        (4, 75, 0, 37.5, 30),
        # Of 4, 5, 7, 8, 9 only 9 is right. (6 would be, but was routed to known.)
        (6, 50, 16.67, 33.33, 30),
    ],
)
def test_strict_scores_by_hand(result, rule, known, novel, both, weighted):
    routed = result[0].strict[rule]
    assert (routed.known, routed.novel) == (known, novel)
    assert (routed.all, routed.all_weighted) == (both, weighted)
    agnostic = result[0].agnostic[rule]
    assert (routed.rule, routed.tau) == (agnostic.rule, agnostic.tau)
    assert routed.known_rejected == agnostic.known_rejected


def test_the_rest_of_the_scores_by_hand(result):
    scores = result[0]
    assert scores.default_rule == 6
    # The supervised model had all four known pictures right.
    assert scores.after_supervised == {"known": 100}
    assert scores.forgetting == 25
    # Of 24 pairs of a known and a novel picture: 0.1 and 0.2 lie below all six, 0.7 below two and
    # level with two, 0.995 below one and level with one: 6 + 6 + 3 + 1.5.
    assert scores.auroc == round(16.5 / 24, 4)
    # Both margins are even. Mutual information 2/3 ln 4/3 + 1/3 ln 2/3 over ln 2.
    information = 2 / 3 * np.log(4 / 3) + 1 / 3 * np.log(2 / 3)
    assert scores.nmi == pytest.approx(information / np.log(2), abs=5e-5)
    # Pairs: 2 together in both, 6 in each, 15 in all; 36/15 = 2.4 by chance: -0.4 / 3.6.
    assert scores.ari == -0.1111
    # Rule 0.6, strict names. Known: 1 and 3 are lost. Novel: only 9 is right.
    assert scores.per_class == {"a": 50, "b": 50, "c": 0, "d": 33.33}
    assert scores.confusion == [[1, 0, 1, 0, 0], [0, 1, 0, 1, 0], [1, 0, 0, 2, 0], [0, 0, 2, 1, 0]]


def test_predictions_are_kept_as_they_were(result):
    predictions = result[1]
    assert predictions.labels.tolist() == TEST_LABELS
    assert predictions.known.tolist() == KNOWN_ANSWERS
    assert predictions.novel.tolist() == [OTHER_HEAD, BEST_HEAD]
    assert predictions.novelty.tolist() == NOVELTY
    # Routed to novel at 0.6: all but 0, 2 and 6; clusters count from 2.
    assert predictions.predicted.tolist() == [0, 2, 1, 3, 3, 3, 0, 2, 2, 3]
    # By the pool's mapping cluster 0 is c (2), cluster 1 is d (3), which are the same numbers.
    assert predictions.strict.tolist() == [0, 2, 1, 3, 3, 3, 0, 2, 2, 3]


def test_scores_are_plain_values(result):
    plain = result[0].to_dict()
    assert plain["agnostic"][6]["tau"] == 0.6
    assert plain["aware"]["novel_pool"] == 80
    assert set(plain) == {item.name for item in dataclasses.fields(result[0])}


def test_without_the_supervised_model_there_is_no_forgetting():
    scores, _ = evaluate(scripted(), made_split())
    assert scores.forgetting is None
    assert scores.after_supervised == {"known": None}
    assert set(scores.kmeans) == {"pixels"}


def test_names_of_clusters_change_no_score(result):
    def swapped(answers):
        return [1 - answer for answer in answers]

    model = scripted(
        heads=(swapped(OTHER_HEAD), swapped(BEST_HEAD)),
        pool_heads=(swapped(POOL_ANSWERS), swapped(POOL_ANSWERS)),
    )
    scores, predictions = evaluate(model, made_split())
    for name in ("aware", "agnostic", "strict", "auroc", "nmi", "ari", "per_class", "confusion"):
        assert getattr(scores, name) == getattr(result[0], name)
    assert predictions.strict.tolist() == result[1].strict.tolist()
    assert predictions.predicted.tolist() == [0, 3, 1, 2, 2, 2, 0, 3, 3, 2]


def test_known_pictures_in_the_pool_have_no_say(result):
    # The novel head puts pictures of brightness 50 to 57, which are of known classes, into
    # cluster 0.
    plain = made_split()
    order = torch.randperm(13, generator=torch.Generator().manual_seed(0))
    mixed = made_split(
        pool_images=torch.cat([plain.pool_images, numbered(50, 8)])[order],
        pool_labels=torch.cat([plain.pool_labels, torch.tensor([0, 1] * 4)])[order],
    )
    scores, predictions = evaluate(scripted(), mixed)
    assert scores.aware == result[0].aware
    assert scores.agnostic == result[0].agnostic
    assert scores.strict == result[0].strict
    assert scores.per_class == result[0].per_class
    assert scores.confusion == result[0].confusion
    assert predictions.strict.tolist() == result[1].strict.tolist()


@pytest.mark.parametrize("num_known", [0, 1, 5])
def test_the_mapping_is_found_on_the_novel_pictures_of_the_pool_alone(num_known):
    # One novel picture of either class says: cluster 0 is d, 1 is c. Known ones, all in cluster 0
    # (brightness 50 to 54), come before them.
    model = scripted(pool_heads=([1, 0, 0, 0, 0], [1, 0, 0, 0, 0]))
    split = made_split(
        pool_images=torch.cat([numbered(50, num_known), numbered(100, 2)]),
        pool_labels=torch.tensor([0] * num_known + [2, 3]),
    )
    scores, predictions = evaluate(model, split)
    assert scores.aware.novel_pool == 100
    # Routed to novel at 0.6 (1, 3, 4, 5, 7, 8, 9), with the names changed.
    assert predictions.strict.tolist() == [0, 3, 1, 2, 2, 2, 0, 3, 3, 2]


def test_more_clusters_than_classes():
    # Cluster 2 is nobody's: on the pool 0 is c, 1 is d. Everything is routed rightly.
    heads = [[0, 0, 0, 0, 0, 0, 2, 1, 2, 2]] * 2
    pool = [[0, 0, 1, 1, 2]] * 2
    novelty = [0.0] * 4 + [1.0] * 6
    model = scripted(num_clusters=3, heads=heads, pool_heads=pool, novelty=novelty)
    scores, predictions = evaluate(model, made_split())
    # On the test pictures the best mapping is 0 -> c and 2 -> d: 2 + 2 of 6.
    assert scores.aware.novel == scores.agnostic[0].novel == 66.67
    # By the pool's mapping 4, 5 and 7 are right.
    assert scores.strict[0].novel == 50
    assert scores.aware.novel_pool == 80
    assert predictions.strict.tolist() == [0, 0, 1, 0, 2, 2, -1, 3, -1, -1]
    assert [row[-1] for row in scores.confusion] == [0, 0, 1, 2]
    assert predictions.predicted.tolist() == [0, 0, 1, 0, 2, 2, 4, 3, 4, 4]


def test_fewer_clusters_than_classes():
    heads, pool = [[0] * 10] * 2, [[0] * 5] * 2
    novelty = [0.0] * 4 + [1.0] * 6
    scores, _ = evaluate(
        scripted(num_clusters=1, heads=heads, pool_heads=pool, novelty=novelty), made_split()
    )
    # One cluster of three c and three d; on the pool most are d.
    assert scores.aware.novel == scores.strict[0].novel == 50
    assert scores.aware.novel_pool == 60
    assert scores.per_class["c"] == 0
    assert scores.per_class["d"] == 100


def test_a_threshold_is_met_from_the_value_on():
    scores, _ = evaluate(scripted(tau=0.7), made_split())
    assert [routed.tau for routed in scores.agnostic] == [*PAPER_TAUS, 0.6, 0.7]
    assert scores.default_rule == 7
    # 1 and 3 are at 0.7 or above; of the novel ones all but 6 (0.3) and 8 (0.65).
    assert scores.agnostic[7].known_rejected == 50
    assert scores.agnostic[7].novel_accepted == 33.33


def test_equal_thresholds_are_scored_once():
    model = scripted(tau=0.99)
    model.identifier.calibrated_tau.fill_(0.99)
    scores, _ = evaluate(model, made_split())
    assert [routed.tau for routed in scores.strict] == [0.8, 0.85, 0.9, 0.95, 0.99, 0.999]
    assert scores.default_rule == 4


def test_without_an_identifier_the_rule_is_the_softmax():
    scores, _ = evaluate(real_model(identifier=False), made_split())
    assert [(routed.rule, routed.tau) for routed in scores.agnostic] == [("softmax", 0.5)]


@pytest.mark.parametrize("identifier", [True, False])
def test_scores_and_predict_go_the_same_way(identifier):
    model = real_model(identifier=identifier)
    split = made_split()
    if identifier:  # a threshold that some pictures pass
        novelty = model.outputs(model.features(split.test_images)).novelty
        model.identifier.tau.fill_(novelty.median())
    _, predictions = evaluate(model, split)
    answer = model.predict(split.test_images)
    assert predictions.predicted.tolist() == answer.labels.tolist()
    assert predictions.novelty.tolist() == answer.novelty.tolist()
    if identifier:
        assert {label >= 2 for label in answer.labels.tolist()} == {True, False}


def test_classes_without_test_pictures_have_no_accuracy():
    kept = torch.tensor(TEST_LABELS) != 1
    split = made_split()
    split = dataclasses.replace(
        split, test_images=split.test_images[kept], test_labels=split.test_labels[kept]
    )
    scores, _ = evaluate(scripted(), split)
    assert scores.per_class["b"] is None
    assert scores.per_class["a"] == 50


def test_rows_without_learning():
    # Two dark and bright classes. These features group the first picture of each class against all
    # others, so that one cluster holds one picture of either class and the other two of either.
    values = torch.tensor([10, 12, 14, 200, 202, 204], dtype=torch.uint8)
    images = values[:, None, None, None].expand(-1, 1, 4, 4).contiguous()
    labels = torch.tensor([2, 2, 2, 3, 3, 3])
    split = made_split(
        pool_images=images,
        pool_labels=labels,
        test_images=torch.cat([numbered(90, 2), images]),
        test_labels=torch.cat([torch.tensor([0, 1]), labels]),
    )
    model = known_model()
    first = {10: 0.0, 200: 0.1}
    model.features = lambda some: torch.tensor(
        [[first.get(int(v), 5 + int(v) / 1000)] for v in some[:, 0, 0, 0]]
    )
    # One of the one cluster and two of the other: 3 of 6.
    assert kmeans_rows(split, model) == {"pixels": 100, "features": 50}
    assert kmeans_rows(split, None) == {"pixels": 100}


def test_models_that_do_not_fit_the_split_are_refused():
    with pytest.raises(InputError, match="has not discovered anything yet"):
        evaluate(known_model(), made_split())
    three = known_model(3).with_novel(
        NovelHead(num_novel=2, num_heads=1, num_hidden=2, num_projected=2),
        identifier=True,
        seed=0,
    )
    with pytest.raises(InputError, match="knows 3 classes, the setting has 2"):
        evaluate(three, made_split())
    split = made_split()
    names = ("known_images", "pool_images", "test_images")
    taller = {name: getattr(split, name)[:, :, [0, 0, 1, 2, 3]] for name in names}
    with pytest.raises(InputError, match="this model reads"):
        evaluate(real_model(), dataclasses.replace(split, **taller))

"""Two rounds against one: what becomes of the classes of each."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import fingerprint, register_tiny, shorter, tiny_recipe
from torch import Tensor
from torch.nn import functional as F

import ncdwf.recipes
from ncdwf.config import Config
from ncdwf.data.setting import DATA_SETS, DataSet
from ncdwf.model import Architecture, Model, NovelHead, Outputs
from ncdwf.results import observations, rounds
from ncdwf.results.benchmark import Bench, find, read_lines
from ncdwf.results.grids import Cell, Variant
from ncdwf.results.rounds import after_each_round, after_one_round
from ncdwf.results.run import Run

# Two classes with labels, two of the first round and two of the second; every class has three
# pictures in the pool (or among the labelled ones) and four test pictures.
TRAIN = [0] * 3 + [1] * 3 + [2] * 3 + [3] * 3 + [4] * 3 + [5] * 3
TEST = [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 4 + [5] * 4
FIRST_TEST = 100
"""The brightness of the first test picture; a picture is told from others by its brightness."""


Given = list[tuple[Model, Tensor, Config]]


def numbered(first: int, count: int) -> Tensor:
    values = torch.arange(first, first + count, dtype=torch.uint8)
    return values[:, None, None, None].expand(-1, 1, 4, 4).contiguous()


def read_toy(data_dir: Path | None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    train, test = numbered(0, len(TRAIN)), numbered(FIRST_TEST, len(TEST))
    return train, torch.tensor(TRAIN), test, torch.tensor(TEST)


def scripted(
    num_known: int, num_novel: int, known: list[int], novel: list[int], routed: list[int]
) -> Model:
    """Return a model that answers from tables of all training pictures, then all test ones.

    `routed` says which answer it gives: 1, that of the novel head.
    """
    shape = Architecture(
        backbone="small",
        input_shape=(1, 4, 4),
        num_known=num_known,
        temperature=0.1,
        spread="shared-diagonal",
    )
    model = Model.create(shape, tuple("abcdefgh"[:num_known]), seed=0)
    if num_novel:
        head = NovelHead(num_novel=num_novel, num_heads=2, num_hidden=4, num_projected=4)
        model = model.with_novel(head, identifier=True, seed=0)
        model.best_head.fill_(1)
        assert model.identifier is not None
        model.identifier.tau.fill_(0.6)
    best = F.one_hot(torch.tensor(novel), max(1, num_novel)).float()
    every_known = F.one_hot(torch.tensor(known), num_known).float()

    def outputs(features: Tensor) -> Outputs:
        values = features[:, 0].long()
        rows = torch.where(values < FIRST_TEST, values, values - FIRST_TEST + len(TRAIN))
        return Outputs(
            known_logits=every_known[rows],
            novel_logits=torch.stack([-best[rows], best[rows]]),  # the other head is wrong
            novelty=torch.tensor(routed, dtype=torch.float64)[rows],
        )

    model.features = lambda images: images[:, 0, 0, :1].float()  # type: ignore[method-assign]
    model.outputs = outputs  # type: ignore[method-assign]
    return model


FIRST = scripted(
    2,
    2,
    # Labelled: one picture of class 1 is wrong. Of the others the known head knows nothing.
    known=[0] * 18 + [0] * 4 + [1] * 3 + [0] + [0] * 16,
    # On the pool class 2 is cluster 1 and class 3 is cluster 0, but for one picture. The test
    # pictures of the second round are nobody's.
    novel=[0] * 6 + [1, 1, 0] + [0] * 3 + [0] * 6 + [0] * 8 + [1] * 4 + [0] * 3 + [1] + [0] * 8,
    # Of the labelled test pictures two are taken for novel, of class 2 one for known.
    routed=[1] * 18 + [1, 1] + [0] * 6 + [0] + [1] * 7 + [1] * 8,
)
PROMOTED = scripted(
    4,
    0,
    # Of class 0 one picture is taken for class 3, of class 2 one for class 0.
    known=[0] * 18 + [2, 0, 0, 0] + [1] * 4 + [0, 3, 3, 3] + [2] * 4 + [0] * 8,
    novel=[0] * 42,
    routed=[0] * 42,
)
SECOND = scripted(
    4,
    2,
    # Clusters of the first round have become 2 and 3 in their order: class 2 is 3, class 3 is 2.
    # Two pictures of class 2 and one of class 0 are taken for class 3.
    known=[0] * 18 + [2, 0, 0, 0] + [1] * 4 + [2, 2, 3, 3] + [2] * 4 + [0] * 8,
    # Class 4 is cluster 1, class 5 is cluster 0.
    novel=[0] * 12 + [1] * 3 + [0] * 3 + [0] * 16 + [1] * 4 + [0, 0, 1, 1],
    # One picture of class 3 is taken for novel, all of class 4 for known.
    routed=[1] * 18 + [0] * 12 + [1] + [0] * 3 + [0] * 4 + [1] * 4,
)
ONE_ROUND = scripted(
    2,
    4,
    known=[0] * 18 + [0] * 4 + [1] * 4 + [0] * 16,
    # Class 2 is cluster 3, 3 is 2, 4 is 1 and 5 is 0; one test picture of each is wrong.
    novel=[
        *([0] * 6 + [3] * 3 + [2] * 3 + [1] * 3 + [0] * 3),
        *([0] * 8 + [3, 3, 3, 2] + [2, 2, 2, 1] + [1, 1, 1, 0] + [3, 0, 0, 0]),
    ],
    # Two of the last class are taken for known.
    routed=[1] * 18 + [0] * 8 + [1] * 14 + [0] * 2,
)


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> Given:
    """Put scripted models in the place of learnt ones; return what discovery was given."""
    data = DataSet(class_names=tuple("abcdef"), read=read_toy)
    monkeypatch.setitem(DATA_SETS, "toy", data)
    given: Given = []

    def discover(model: Model, images: Tensor, method: Any, config: Config) -> Model:
        given.append((model, images, config))
        return SECOND

    monkeypatch.setattr(rounds, "discover", discover)
    monkeypatch.setattr(rounds, "promote", lambda model, **arguments: PROMOTED)
    monkeypatch.setattr(Model, "load", lambda path: FIRST)
    return given


def test_scores_after_each_round_by_hand(toy: Given, tmp_path: Path) -> None:
    scores = after_each_round(Run.create(tmp_path, tiny_recipe("toy-2-2")))
    assert scores["round 1"] == {
        # 7 of 8; 4 + 3 of 8.
        "aware": {"labelled": 87.5, "round 1": 87.5},
        # Two and one less for being routed wrongly. (Class 1's wrong picture is another.)
        "strict": {"labelled": 62.5, "round 1": 75.0},
    }
    # 3 + 4 of 8 and 3 + 4 of 8; there is no other head that a picture could be lost to.
    assert scores["promoted"]["aware"] == {"labelled": 87.5, "round 1": 87.5}
    assert scores["promoted"]["strict"] == scores["promoted"]["aware"]
    assert scores["round 2"] == {
        # 3 + 4 of 8. Of class 2 half, of class 3 all: its clusters keep their class, which they
        # would not have if the names were matched anew. 4 + 2 of 8.
        "aware": {"labelled": 87.5, "round 1": 75.0, "round 2": 75.0},
        "strict": {"labelled": 87.5, "round 1": 62.5, "round 2": 25.0},
    }


def test_the_second_round_gets_the_pictures_of_its_classes_alone(
    toy: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    config = replace(tiny_recipe("toy-2-2"), snapshot_epochs=3, seed=5)
    run = Run.create(tmp_path, config)
    promoted: list[tuple[Model, object]] = []

    def promote(model: Model, **arguments: object) -> Model:
        promoted.append((model, arguments))
        return PROMOTED

    monkeypatch.setattr(rounds, "promote", promote)
    after_each_round(run)
    assert promoted == [(FIRST, {"seed": 5, "engine": config.engine})]
    ((model, images, used),) = toy
    assert model is FIRST  # it makes one head of them itself
    assert images[:, 0, 0, 0].tolist() == list(range(12, 18))
    assert used == replace(run.config, snapshot_epochs=0)


def test_scores_after_one_round_by_hand(
    toy: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Model, "load", lambda path: ONE_ROUND)
    scores = after_one_round(Run.create(tmp_path, tiny_recipe("toy-2-4", 4)))
    assert toy == []  # nothing is discovered again
    assert scores == {
        "one round": {
            # Three right of four but for the labelled ones; 3 + 1 of 8 where two are lost.
            "aware": {"labelled": 100.0, "round 1": 75.0, "round 2": 75.0},
            "strict": {"labelled": 100.0, "round 1": 75.0, "round 2": 50.0},
        }
    }


def test_a_cluster_too_many_in_the_first_round_takes_no_picture_from_the_second(
    toy: Given, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    # Classes 2 and 3 are clusters 0 and 1; cluster 2 has no picture, but the known head of the
    # second round has a place for it, and takes what it does not know for it.
    nothing = [0] * 42
    clusters = [0] * 9 + [1] * 3 + [0] * 30
    known = [0] * 18 + [0] * 4 + [1] * 4 + [2] * 4 + [3] * 4 + [4] * 8
    first = scripted(2, 3, known=nothing, novel=clusters, routed=nothing)
    promoted = scripted(5, 0, known=known, novel=nothing, routed=nothing)
    # Classes 4 and 5 are clusters 0 and 1 of the second pool.
    clusters = [0] * 15 + [1] * 3 + [0] * 20 + [1] * 4
    second = scripted(5, 2, known=known, novel=clusters, routed=nothing)
    monkeypatch.setattr(Model, "load", lambda path: first)
    monkeypatch.setattr(rounds, "promote", lambda *_, **__: promoted)
    monkeypatch.setattr(rounds, "discover", lambda *_: second)
    scores = after_each_round(Run.create(tmp_path, tiny_recipe("toy-2-2", 3)))
    assert scores["round 2"]["aware"] == {"labelled": 100, "round 1": 100, "round 2": 100}


VARIANT = Variant(name="main", title="")
TWO = Cell(setting="tiny-2-2", variant=VARIANT, seed=0)
ONE = Cell(setting="tiny-2-4", variant=VARIANT, seed=0)


def quick(patch: pytest.MonkeyPatch) -> None:
    register_tiny(patch)
    patch.setitem(
        ncdwf.recipes.RECIPES,
        "tiny",
        lambda *names: shorter(tiny_recipe(*names), supervised=4, discovery=5),
    )


@pytest.fixture(scope="module")
def observed(tmp_path_factory: pytest.TempPathFactory) -> tuple[dict[str, Any], Path]:
    """What is kept of two quick runs, and where."""
    path = tmp_path_factory.mktemp("rounds")
    with pytest.MonkeyPatch.context() as patch:
        quick(patch)
        wanted = {"rounds": (TWO, after_each_round), "one-round": (ONE, after_one_round)}
        patch.setattr(observations, "OBSERVATIONS", wanted)
        bench = Bench(results=path / "results" / "runs.jsonl", work_dir=path / "work")
        assert len(list(bench.reproduce([TWO, ONE]))) == 2
        assert observations.is_kept(TWO, bench.results.parent)
        assert observations.is_kept(ONE, bench.results.parent)
        return observations.read(path / "results"), path


def test_both_kinds_of_rounds_are_kept_beside_the_results(
    observed: tuple[dict[str, Any], Path],
) -> None:
    kept, path = observed
    assert (path / "results" / "observations.json").exists()
    assert set(kept) == {"rounds", "one-round"}
    assert (kept["rounds"]["cell"], kept["one-round"]["cell"]) == (TWO.name, ONE.name)
    both = {**kept["rounds"], **kept["one-round"]}
    for name, groups in (
        ("round 1", {"labelled", "round 1"}),
        ("promoted", {"labelled", "round 1"}),
        ("round 2", {"labelled", "round 1", "round 2"}),
        ("one round", {"labelled", "round 1", "round 2"}),
    ):
        assert set(both[name]) == {"aware", "strict"}
        for scores in both[name].values():
            assert set(scores) == groups
            assert all(0 <= value <= 100 for value in scores.values())
    assert both["round 1"]["aware"]["round 1"] > 80


def test_the_first_round_has_the_scores_of_its_run(
    observed: tuple[dict[str, Any], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    quick(monkeypatch)
    kept, path = observed
    run = Run.open(path / "work" / TWO.name)
    before = fingerprint(Model.load(run.path))
    again = after_each_round(run)
    assert again == {name: kept["rounds"][name] for name in ("round 1", "promoted", "round 2")}
    assert fingerprint(Model.load(run.path)) == before  # the run is left as it was
    line = find(read_lines(path / "results" / "runs.jsonl"), TWO)
    assert line is not None
    first = kept["rounds"]["round 1"]
    assert first["aware"]["labelled"] == line["aware"]["known"]
    strict = line["strict"][line["default_rule"]]
    assert first["strict"]["round 1"] == strict["novel"]
    assert first["strict"]["labelled"] == strict["known"]

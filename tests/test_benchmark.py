"""A grid runs what is missing, shares supervised phases, and adds a line a run."""

import json
import multiprocessing
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest
import torch
from conftest import register_tiny, shorter, tiny_recipe
from torch import Tensor

import ncdwf.recipes
from ncdwf import storage
from ncdwf.config import Config
from ncdwf.data.setting import Split
from ncdwf.errors import InputError, InUseError
from ncdwf.learning.counting import ClassCount
from ncdwf.model import Model
from ncdwf.results import benchmark, experiment, observations
from ncdwf.results.benchmark import Bench, find, read_lines
from ncdwf.results.grids import Cell, Grid, Variant
from ncdwf.results.run import Run

BARE = Variant(name="bare", title="none", sets=("method.weight_distill=0",))
GRID = Grid(
    settings=("tiny-4-2",), seeds=(0, 1), variants=(Variant(name="main", title="all"), BARE)
)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    register_tiny(monkeypatch)
    monkeypatch.setitem(ncdwf.recipes.RECIPES, "tiny", lambda *names: shorter(tiny_recipe(*names)))


@pytest.fixture
def bench(tmp_path: Path, quick: None) -> Bench:
    return Bench(results=tmp_path / "results" / "runs.jsonl", work_dir=tmp_path / "work")


def test_a_grid_runs_what_is_missing_and_nothing_else(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    wanted = [(variant, seed) for seed in (0, 1) for variant in ("main", "bare")]
    first = list(bench.reproduce(GRID.cells()))
    assert [(entry["variant"], entry["seed"]) for entry in first] == wanted
    assert read_lines(bench.results) == first
    assert "confusion" not in first[0]
    assert first[0]["aware"] != first[1]["aware"] or first[0]["auroc"] != first[1]["auroc"]

    kept = [json.dumps(entry) for entry in first if entry["seed"] == 0]
    bench.results.write_text("\n".join(kept) + "\n")
    executed: list[str] = []
    whole = benchmark.execute

    def counting(run: Run, *arguments: Any, **options: Any) -> Any:
        executed.append(run.path.name)
        return whole(run, *arguments, **options)

    monkeypatch.setattr(benchmark, "execute", counting)
    again = list(bench.reproduce(GRID.cells()))
    assert again == first  # finished runs are read, not trained again
    assert executed == ["tiny-4-2-ncdwf-main-seed1", "tiny-4-2-ncdwf-bare-seed1"]


def test_a_run_that_another_process_is_at_is_left_to_it(bench: Bench) -> None:
    cells = list(GRID.cells())
    assert bench.missing(cells) == cells
    with storage.locked(bench.work_dir / "claims" / cells[1].name):
        lines = list(bench.reproduce(cells[:3]))
    assert [(line["variant"], line["seed"]) for line in lines] == [("main", 0), ("main", 1)]
    assert bench.missing(cells[:3]) == [cells[1]]
    assert len(list(bench.reproduce(cells[:3]))) == 3


def test_a_run_that_another_process_ends_before_it_is_claimed_is_not_run_again(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = list(replace(GRID, seeds=(0,)).cells())[:1]
    lines = list(bench.reproduce(cells))
    done = bench.results.read_bytes()
    bench.results.unlink()
    claim = Bench._claimed

    def late(bench: Bench, name: str, **options: bool) -> Any:
        bench.results.write_bytes(done)
        return claim(bench, name, **options)

    def never(*_: Any, **__: Any) -> None:
        raise AssertionError("it has been run")

    monkeypatch.setattr(Bench, "_claimed", late)
    monkeypatch.setattr(benchmark, "execute", never)
    assert list(bench.reproduce(cells)) == lines


def test_two_processes_share_a_grid_and_run_nothing_twice(bench: Bench) -> None:
    def work() -> None:
        list(bench.reproduce(GRID.cells()))

    fork = multiprocessing.get_context("fork")  # a fresh process would not know the tiny setting
    workers = [fork.Process(target=work) for _ in range(2)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    assert [worker.exitcode for worker in workers] == [0, 0]
    found = sorted((line["variant"], line["seed"]) for line in read_lines(bench.results))
    assert found == [("bare", 0), ("bare", 1), ("main", 0), ("main", 1)]


def test_a_line_that_came_meanwhile_is_not_written_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    whole = benchmark.execute
    foreign = dict.fromkeys((*benchmark.IDENTITY, "config"), "elsewhere")

    def slow(run: Run, *arguments: Any, **options: Any) -> Any:
        scores = whole(run, *arguments, **options)
        bench.results.parent.mkdir()
        bench.results.write_text(json.dumps(foreign) + "\n")
        return scores

    monkeypatch.setattr(benchmark, "execute", slow)
    list(bench.reproduce(list(GRID.cells())[:1]))
    assert [line["setting"] for line in read_lines(bench.results)] == ["elsewhere", "tiny-4-2"]


def test_results_are_written_by_one_process_at_a_time(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = next(GRID.cells())
    monkeypatch.setitem(observations.OBSERVATIONS, "seen", (cell, lambda *_: {}))
    write, written = storage.write_bytes, []

    def watched(path: Path, data: bytes) -> None:
        if path.parent == bench.results.parent:
            with pytest.raises(InUseError), storage.locked(path.parent):
                pass
            written.append(path.name)
        write(path, data)

    monkeypatch.setattr(storage, "write_bytes", watched)
    list(bench.reproduce([cell]))
    assert written == ["runs.jsonl", "observations.json"]


def test_only_the_claim_of_a_run_lets_it_be_passed_over(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def busy(*_: Any, **__: Any) -> None:
        raise InUseError("the data are in use by another process")

    monkeypatch.setattr(benchmark, "check", busy)
    with pytest.raises(InUseError, match="the data"):
        list(bench.reproduce(GRID.cells()))


def test_damaged_results_are_refused_before_anything_is_run(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = next(GRID.cells())
    monkeypatch.setitem(observations.OBSERVATIONS, "seen", (cell, lambda *_: {}))
    bench.results.parent.mkdir()
    bench.results.write_text('{"setting": "tin')
    with pytest.raises(InputError, match="not valid JSON"):
        list(bench.reproduce([cell]))
    assert not bench.work_dir.exists()


def test_variants_share_their_supervised_phase(bench: Bench) -> None:
    other = Variant(name="longer", title="", sets=("supervised.optim.epochs=2",))
    grid = replace(GRID, seeds=(0,), variants=(*GRID.variants, other))
    list(bench.reproduce(grid.cells()))
    shared = sorted((bench.work_dir / "supervised").iterdir())
    assert len(shared) == 2  # main and bare have one, `longer` has its own
    weights = {
        name: (bench.work_dir / f"tiny-4-2-ncdwf-{name}-seed0" / "supervised").joinpath(
            "model.safetensors"
        )
        for name in ("main", "bare", "longer")
    }
    assert weights["main"].read_bytes() == weights["bare"].read_bytes()
    assert weights["main"].read_bytes() != weights["longer"].read_bytes()
    line = read_lines(bench.results)[0]
    assert line["epochs"] == [1, 2]
    assert line["seconds"][0] > 0


def test_a_supervised_phase_of_another_commit_is_not_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    for commit, cell in zip(("aaa", "bbb"), replace(GRID, seeds=(0,)).cells(), strict=True):
        monkeypatch.setenv("NCDWF_COMMIT", commit)
        assert next(iter(bench.reproduce([cell])))["commit"] == commit
    assert len(list((bench.work_dir / "supervised").iterdir())) == 2


@pytest.mark.parametrize("commit", ["abc+", None])
def test_a_supervised_phase_of_other_code_is_not_taken_where_the_commit_is_the_same(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, commit: str | None
) -> None:
    main, bare = replace(GRID, seeds=(0,)).cells()
    made_with = {**benchmark.environment(main.config), "commit": commit}
    monkeypatch.setattr(benchmark, "environment", lambda _: made_with)
    shared = bench.work_dir / "supervised"
    list(bench.reproduce([main]))
    list(replace(bench).reproduce([bare]))  # as another process with the same files does
    assert len(list(shared.iterdir())) == 1
    list(replace(bench, source="other").reproduce([replace(main, setting="tiny-4-1")]))
    assert len(list(shared.iterdir())) == 2


def test_a_supervised_phase_of_another_backbone_is_not_taken(bench: Bench) -> None:
    other = Variant(name="other", title="", sets=("backbone=resnet18",))
    grid = replace(GRID, seeds=(0,), variants=(GRID.variants[0], other))
    list(bench.reproduce(grid.cells()))
    runs = [Run.open(bench.work_dir / cell.name) for cell in grid.cells()]
    assert [run.config.backbone for run in runs] == ["small", "resnet18"]
    models = [Model.load(run.supervised_dir) for run in runs]
    assert [model.architecture.backbone for model in models] == ["small", "resnet18"]


@pytest.mark.parametrize("part", ["torch", "device"])
def test_a_supervised_phase_of_another_machine_is_not_taken(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, part: str
) -> None:
    for name, cell in zip(("aaa", "bbb"), replace(GRID, seeds=(0,)).cells(), strict=True):
        made_with = {**benchmark.environment(cell.config), part: name}
        monkeypatch.setattr(benchmark, "environment", lambda config, e=made_with: e)
        list(bench.reproduce([cell]))
    assert len(list((bench.work_dir / "supervised").iterdir())) == 2


def test_settings_with_the_same_labelled_data_share_their_supervised_phase(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    learnt: list[str] = []
    whole = experiment.learn_known

    def counting(images: Any, labels: Any, config: Config, **options: Any) -> Any:
        learnt.append(config.setting)
        return whole(images, labels, config, **options)

    monkeypatch.setattr(experiment, "learn_known", counting)
    names = (
        "tiny-4-2",
        "tiny-4-2-imbalance-4",
        "tiny-4-1",
        "tiny-4-2-mixed-25",
        "tiny-4-2-mixed-50",
    )
    grid = Grid(settings=names, seeds=(0,), variants=(Variant(name="main", title=""),))
    lines = list(bench.reproduce(grid.cells()))
    assert [line["setting"] for line in lines] == list(names)
    # A mixed pool takes its known pictures from the labelled data.
    assert learnt == ["tiny-4-2", "tiny-4-2-mixed-25"]
    weights = [
        (bench.work_dir / f"{name}-ncdwf-main-seed0" / "supervised" / "model.safetensors")
        for name in names
    ]
    first, *others = (path.read_bytes() for path in weights)
    assert [other == first for other in others] == [True, True, False, False]
    assert others[2] == others[3]
    # Each run is one of its own setting all the same.
    runs = [Run.open(path.parent.parent) for path in weights]
    assert [run.config.setting for run in runs] == list(names)
    assert len({line["auroc"] for line in lines}) > 1


def test_digits_with_fewer_pictures_in_the_pool_have_the_supervised_phase_of_all(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    digits = ncdwf.recipes.RECIPES["digits"]
    monkeypatch.setitem(
        ncdwf.recipes.RECIPES, "digits", lambda *names: shorter(digits(*names), discovery=1)
    )
    bench = Bench(results=tmp_path / "runs.jsonl", work_dir=tmp_path / "work")
    names = ("digits-5-5", "digits-5-5-imbalance-10")
    grid = Grid(settings=names, seeds=(0,), variants=(Variant(name="main", title=""),))
    first, second = bench.reproduce(grid.cells())
    assert [path.name[:15] for path in (bench.work_dir / "supervised").iterdir()] == [
        "digits-5-seed0-"
    ]
    assert first["after_supervised"] == second["after_supervised"]
    assert first["kmeans"] != second["kmeans"]  # of another pool


def test_a_run_of_another_configuration_is_not_taken(bench: Bench) -> None:
    main = Cell(setting="tiny-4-2", variant=GRID.variants[0], seed=0)
    (line,) = bench.reproduce([main])
    other = replace(main, variant=replace(BARE, name="main"))
    assert find([line], main) == line
    assert find([line], other) is None
    with pytest.raises(InputError, match="another configuration"):
        list(bench.reproduce([other]))


def test_a_run_that_a_figure_shows_is_done_again_for_it(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = Cell(setting="tiny-4-2", variant=GRID.variants[0], seed=0)
    first = list(bench.reproduce([cell]))
    wanted = {"confusion": (cell, observations._confusion)}
    monkeypatch.setattr(observations, "OBSERVATIONS", wanted)
    assert list(bench.reproduce([cell])) == first == read_lines(bench.results)
    kept = observations.read(bench.results.parent)["confusion"]
    assert kept["known_names"] == ["ant", "bee", "cat", "dog"]
    assert kept["novel_names"] == ["elk", "fox"]
    assert [sum(row) for row in kept["counts"]] == [16, 16]  # every novel test picture once
    assert observations.is_kept(cell, bench.results.parent)
    assert not observations.is_kept(cell, bench.work_dir)
    # What another configuration left is not shown, but stays until it is replaced.
    other = replace(cell, variant=BARE)
    monkeypatch.setattr(
        observations, "OBSERVATIONS", {"confusion": (other, observations._confusion)}
    )
    assert observations.read(bench.results.parent) == {}
    assert not observations.is_kept(other, bench.results.parent)
    assert "confusion" in observations._read_all(bench.results.parent)


@pytest.mark.usefixtures("tiny")
def test_confusion_is_what_the_known_head_takes_novel_pictures_for(run_copy: Path) -> None:
    path = run_copy / "predictions.npz"
    with np.load(path) as kept:
        arrays = dict(kept)
    # Two pictures of the classes with labels, three of the fifth class and one of the sixth. All
    # but one of the novel ones were routed rightly.
    arrays["labels"] = np.array([0, 3, 4, 4, 4, 5])
    arrays["known"] = np.array([0, 1, 2, 2, 3, 1])
    arrays["predicted"] = np.array([0, 1, 4, 4, 3, 5])
    storage.write_arrays(path, arrays)
    found = observations._confusion(Run.open(run_copy), None)
    assert found["counts"] == [[0, 0, 2, 1], [0, 1, 0, 0]]


def test_classes_are_counted_before_discovery_and_with_the_seed_of_the_run(
    tmp_path: Path, tiny: Config, split: Split, known_model: Model, monkeypatch: pytest.MonkeyPatch
) -> None:
    given: list[tuple[Tensor, int]] = []

    def count(features: Tensor, *, seed: int) -> ClassCount:
        given.append((features, seed))
        return ClassCount(number=3, low=2, high=4, curve={3: 1.0})

    monkeypatch.setattr(observations, "count_classes", count)
    run = Run.create(tmp_path / "run", replace(tiny, seed=5))
    known_model.save(run.supervised_dir)
    found = observations._number(run, None)
    assert (found["truth"], found["number"], found["low"], found["high"]) == (2, 3, 2, 4)
    ((features, seed),) = given
    wanted = known_model.features(split.pool_images)
    torch.testing.assert_close(features.cpu(), wanted, rtol=1e-3, atol=1e-3)
    assert seed == 5


def test_maturity_tells_what_the_rule_of_each_snapshot_keeps_and_finds(
    finished_run: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def scored(auroc: float, known_rejected: float, novel_accepted: float) -> SimpleNamespace:
        other = SimpleNamespace(known_rejected=50.0, novel_accepted=50.0)
        own = SimpleNamespace(known_rejected=known_rejected, novel_accepted=novel_accepted)
        return SimpleNamespace(auroc=auroc, agnostic=[other, own], default_rule=1)

    snapshots = {5: scored(0.6, 10.0, 70.0), 10: scored(0.9, 1.25, 20.0)}
    monkeypatch.setattr(observations, "score_snapshots", lambda *_, **__: snapshots)
    assert observations._maturity(Run.open(finished_run), None) == {
        "epochs": [5, 10],
        "auroc": [0.6, 0.9],
        "known_kept": [0.9, 0.9875],
        "novel_found": [0.3, 0.8],
    }


def test_a_run_that_kept_no_snapshots_is_not_kept_as_a_curve(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    cell = next(GRID.cells())
    wanted = {"maturity": (cell, observations._maturity)}
    monkeypatch.setattr(observations, "OBSERVATIONS", wanted)
    with pytest.raises(InputError, match="has kept no snapshots; delete it to run again"):
        list(bench.reproduce([cell]))
    assert observations.read(bench.results.parent) == {}


@pytest.mark.parametrize("text", ["3\n", '{"setting": "x"}\n', "{\n"])
def test_a_foreign_line_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "runs.jsonl"
    path.write_text(text)
    with pytest.raises(InputError, match=r"runs\.jsonl"):
        read_lines(path)

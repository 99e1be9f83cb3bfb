"""Experiments: what they leave behind, replaying, resuming in the same process, locking."""

import json
import shutil
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from conftest import Stop, StopAfter, same_results, shorter

from ncdwf import storage
from ncdwf.config import Config
from ncdwf.errors import InputError
from ncdwf.model import Model
from ncdwf.model.architecture import NovelHead
from ncdwf.results import experiment
from ncdwf.results.configuration import read_config
from ncdwf.results.evaluation import PAPER_TAUS
from ncdwf.results.experiment import evaluate_stage, execute
from ncdwf.results.run import Run, load_supervised

NOVEL = NovelHead(num_novel=2, num_heads=2, num_hidden=8, num_projected=4)

SCORE_KEYS = {
    "setting",
    "method",
    "variant",
    "seed",
    "config",
    "epochs",
    "after_supervised",
    "aware",
    "agnostic",
    "strict",
    "default_rule",
    "forgetting",
    "auroc",
    "nmi",
    "ari",
    "kmeans",
    "per_class",
    "confusion",
    "seconds",
    "images_per_second",
    "device",
    "torch",
    "commit",
    "date",
}
ACCURACY = {"known", "novel", "all", "all_weighted"}


def files(path: Path) -> dict[str, bytes]:
    return {
        str(p.relative_to(path)): p.read_bytes() for p in sorted(path.rglob("*")) if p.is_file()
    }


def test_a_finished_run_holds_this_and_nothing_else(finished_run: Path) -> None:
    assert set(files(finished_run)) == {
        ".lock",
        "config.json",
        "env.json",
        "history.jsonl",
        "model.json",
        "model.safetensors",
        "predictions.npz",
        "scores.json",
        "supervised/model.json",
        "supervised/model.safetensors",
    }
    assert [p.name for p in finished_run.iterdir() if p.is_dir()] == ["supervised"]


def test_scores_have_the_keys_of_the_protocol(finished_run: Path) -> None:
    scores = json.loads((finished_run / "scores.json").read_text())
    assert set(scores) == SCORE_KEYS
    assert scores["setting"] == "tiny-4-2"
    assert scores["method"] == "ncdwf"
    assert scores["epochs"] == [1, 2]
    assert set(scores["after_supervised"]) == {"known"}
    assert set(scores["aware"]) == ACCURACY | {"novel_mean_over_heads", "novel_pool"}
    assert len(scores["agnostic"]) == len(scores["strict"]) > scores["default_rule"]
    for entry in scores["agnostic"] + scores["strict"]:
        assert set(entry) == ACCURACY | {"rule", "tau", "known_rejected", "novel_accepted"}
    taus = [entry["tau"] for entry in scores["agnostic"]]
    assert taus[: len(PAPER_TAUS)] == list(PAPER_TAUS)
    assert scores["agnostic"][scores["default_rule"]]["tau"] == 0.5
    assert scores["forgetting"] == pytest.approx(
        scores["after_supervised"]["known"] - scores["aware"]["known"], abs=0.005
    )
    assert all(value > 0 for value in scores["seconds"] + scores["images_per_second"])


def test_predictions_agree_with_model_and_scores(finished_run: Path, tiny: Config) -> None:
    predictions = np.load(finished_run / "predictions.npz", allow_pickle=False)
    scores = json.loads((finished_run / "scores.json").read_text())
    labels, novelty = predictions["labels"], predictions["novelty"]
    assert set(predictions) == {"labels", "predicted", "strict", "known", "novel", "novelty"}
    known = labels < 4
    right = (predictions["known"] == labels)[known]
    assert scores["aware"]["known"] == pytest.approx(100 * right.mean(), abs=0.005)
    routed = right & (novelty[known] < 0.5)
    default = scores["agnostic"][scores["default_rule"]]
    assert default["known"] == pytest.approx(100 * routed.mean(), abs=0.005)
    split = experiment.Setting.parse("tiny-4-2").load()
    answers = Model.load(finished_run).predict(split.test_images)
    assert np.array_equal(predictions["predicted"], answers.labels.numpy())


def test_environment_says_what_the_run_was_made_with(
    finished_run: Path, tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    environment = Run.open(finished_run).environment
    assert set(environment) >= {"ncdwf", "commit", "torch", "numpy", "device", "threads", "date"}
    monkeypatch.setenv("NCDWF_COMMIT", "0123abc")
    assert Run.create(tmp_path / "run", tiny).environment["commit"] == "0123abc"


def test_history_covers_both_phases_and_the_identifier(finished_run: Path) -> None:
    epochs = [(e.phase, e.epoch) for e in Run.open(finished_run).history()]
    assert epochs == [
        ("supervised", 0),
        *(("discovery", 0), ("discovery", 1)),
        *(("settling", 0), ("settling", 1)),
    ]


def test_the_recorded_configuration_replays_to_the_same_bits(
    finished_run: Path, tmp_path: Path, tiny: Config
) -> None:
    config = read_config(finished_run / "config.json")
    # Every field is written out, so a changed default cannot change a replay.
    assert len(config.method) > len(tiny.method)
    execute(Run.create(tmp_path / "again", config))
    same_results(tmp_path / "again", finished_run)
    assert (tmp_path / "again/config.json").read_bytes() == (
        finished_run / "config.json"
    ).read_bytes()


def test_scores_name_every_commit_that_had_a_part_in_them(
    tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    run = None
    steps = {"aaa": 1, "bbb": 1, "ccc": 4 + 1, "ddd": 100}  # cut off twice in the first phase
    for commit, num_steps in steps.items():
        monkeypatch.setenv("NCDWF_COMMIT", commit)
        run = run or Run.create(tmp_path / "run", replace(shorter(tiny), checkpoint_seconds=0.0))
        with suppress(Stop):
            execute(run, StopAfter(num_steps))
    assert storage.read_json(tmp_path / "run" / "scores.json")["commit"] == ", ".join(steps)


def test_snapshots_are_kept_scored_and_change_nothing(
    finished_run: Path, tmp_path: Path, tiny: Config
) -> None:
    config = replace(shorter(tiny), snapshot_epochs=1, checkpoint_seconds=0.0)
    run = Run.create(tmp_path / "run", config)
    with pytest.raises(Stop):  # after the first snapshot, in the second epoch of discovery
        execute(run, StopAfter(4 + 3))
    assert list(run.snapshots) == [1]
    execute(run)
    same_results(run.path, finished_run)
    assert list(run.snapshots) == [1, 2]
    last = (run.snapshots[2] / "model.safetensors").read_bytes()
    assert last == (run.path / "model.safetensors").read_bytes()
    scores = experiment.score_snapshots(run)
    assert list(scores) == [1, 2]
    recorded = json.loads((run.path / "scores.json").read_text())
    assert scores[2].to_dict()["aware"] == recorded["aware"]
    # They are those of the whole run, and take longer than the rest of the scores.
    assert recorded["kmeans"]
    assert [snapshot.kmeans for snapshot in scores.values()] == [{}, {}]


def test_another_seed_gives_another_model(finished_run: Path, tmp_path: Path, tiny: Config) -> None:
    execute(Run.create(tmp_path / "other", replace(shorter(tiny), seed=1)))
    for name in ("supervised/model.safetensors", "model.safetensors"):
        assert (tmp_path / "other" / name).read_bytes() != (finished_run / name).read_bytes()


def test_a_run_in_use_is_refused_and_free_again_afterwards(run_copy: Path, tiny: Config) -> None:
    with storage.locked(run_copy), pytest.raises(InputError, match="in use by another process"):
        execute(Run.open(run_copy))
    execute(Run.open(run_copy))


def test_resuming_a_finished_run_learns_nothing_again(run_copy: Path, tiny: Config) -> None:
    before = files(run_copy)
    # A single step would raise.
    execute(Run.open(run_copy), StopAfter(1))
    after = files(run_copy)
    changed = {name for name in before if before[name] != after[name]}
    assert changed <= {"scores.json"}
    assert set(after) == set(before)


@pytest.mark.parametrize("steps", [3, 6, 10])
def test_an_interrupted_run_goes_on_to_the_same_bits(
    tmp_path: Path, tiny: Config, finished_run: Path, steps: int
) -> None:
    """Four steps of the supervised phase, four of discovery, then the identifier's."""
    run = Run.create(tmp_path / "cut", replace(shorter(tiny), checkpoint_seconds=0.0))
    with pytest.raises(Stop):
        execute(run, StopAfter(steps))
    assert not (run.path / "scores.json").exists()
    assert (run.path / "checkpoints").is_dir()
    assert (run.path / "checkpoints/discovery").exists() == (steps > 4)
    execute(run)
    same_results(run.path, finished_run)
    assert set(files(run.path)) == set(files(finished_run))


@pytest.mark.parametrize("phase", ["supervised", "discovery"])
def test_checkpoints_that_a_crash_left_behind_are_removed(
    run_copy: Path, tiny: Config, phase: str
) -> None:
    # Killed after the model was saved and before its checkpoints were removed.
    left = run_copy / "checkpoints" / phase / f"{phase}-000001-00000000"
    left.mkdir(parents=True)
    (left / "state.safetensors").write_bytes(b"momentum")
    execute(Run.open(run_copy))
    assert not (run_copy / "checkpoints").exists()


def test_removing_what_one_phase_left_keeps_the_checkpoints_of_the_other(
    tmp_path: Path, tiny: Config
) -> None:
    config = replace(shorter(tiny), checkpoint_seconds=0.0)
    run = Run.create(tmp_path / "run", config)
    with pytest.raises(Stop):
        execute(run, StopAfter(7))
    left = run.path / "checkpoints/supervised/supervised-000001-00000000"
    left.mkdir(parents=True)
    with pytest.raises(Stop):  # two steps are left, and the first one's end is never reached
        execute(run, StopAfter(1))
    assert not left.parent.exists()
    assert sorted(p.name for p in (run.path / "checkpoints/discovery").iterdir()) == [
        "discovery-000000-00000001",
        "discovery-000001-00000000",
    ]


def test_evaluating_a_bare_model_writes_nothing(
    finished_run: Path, tmp_path: Path, tiny: Config
) -> None:
    bare = tmp_path / "bare"
    bare.mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(finished_run / name, bare)
    before = files(bare)
    scores = evaluate_stage(bare, "tiny-4-2")
    assert files(bare) == before
    recorded = json.loads((finished_run / "scores.json").read_text())
    assert scores.to_dict()["aware"] == recorded["aware"]
    assert scores.to_dict()["strict"] == recorded["strict"]
    assert scores.after_supervised == {"known": None}
    assert scores.forgetting is None


def test_evaluating_a_run_again_gives_the_same_scores(run_copy: Path, tiny: Config) -> None:
    before = json.loads((run_copy / "scores.json").read_text())
    (run_copy / "scores.json").unlink()
    (run_copy / "predictions.npz").unlink()
    evaluate_stage(run_copy, "tiny-4-2")
    assert json.loads((run_copy / "scores.json").read_text()) == before
    assert (run_copy / "predictions.npz").exists()


def test_the_time_of_settling_is_that_of_discovery(run_copy: Path, tiny: Config) -> None:
    run = Run.open(run_copy)
    # One epoch of the supervised phase, two of discovery and two of settling.
    times = zip(run.history(), (1.0, 2.0, 4.0, 8.0, 16.0), (9.0, 30.0, 60.0, 7.0, 7.0), strict=True)
    run.record([replace(e, seconds=s, images_per_second=rate) for e, s, rate in times])
    evaluate_stage(run_copy, "tiny-4-2")
    recorded = storage.read_json(run_copy / "scores.json")
    assert recorded["seconds"] == [1, 2 + 4 + 8 + 16]
    # How fast pictures are learnt from: settling reads none.
    assert recorded["images_per_second"] == [9, (2 * 30 + 4 * 60) / 6]


def test_scores_name_what_they_were_made_with(
    run_copy: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = storage.read_json(run_copy / "scores.json")["commit"]
    monkeypatch.setenv("NCDWF_COMMIT", "later")
    evaluate_stage(run_copy, "tiny-4-2")
    assert storage.read_json(run_copy / "scores.json")["commit"] == f"{before}, later"


@pytest.mark.usefixtures("tiny")
def test_a_later_round_is_not_compared_with_the_model_before_it(
    tmp_path: Path, finished_run: Path
) -> None:
    learnt = Model.load(finished_run / "supervised").architecture
    first = Model.create(replace(learnt, num_known=3), ("ant", "bee", "cat"), seed=0)
    first = first.with_novel(NOVEL, identifier=True, seed=0)
    first.save(tmp_path / "supervised")
    first.rename({"novel-1": "dog", "novel-2": "elk"})
    first.promoted().with_novel(replace(NOVEL, num_novel=1), identifier=True, seed=0).save(tmp_path)
    scores = evaluate_stage(tmp_path, "tiny-5-1")
    assert scores.after_supervised == {"known": None}
    assert scores.forgetting is None


def test_evaluating_before_discovery_or_on_other_classes_is_refused(
    finished_run: Path, tiny: Config
) -> None:
    with pytest.raises(InputError, match="has not discovered"):
        evaluate_stage(finished_run / "supervised", "tiny-4-2")
    with pytest.raises(InputError, match="knows 4 classes, the setting has 3"):
        evaluate_stage(finished_run, "tiny-3-2")


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"setting": "cifar10-5-5"}, "needs a data directory"),
        ({"setting": "tiny-9-9"}, "asks for 9"),
        ({"backbone": "resnet"}, "unknown backbone 'resnet'; there are small"),
    ],
)
def test_what_cannot_run_is_refused_beforehand(
    tiny: Config, change: dict[str, str], words: str
) -> None:
    experiment.check(tiny)
    with pytest.raises(InputError, match=words):
        experiment.check(replace(tiny, **change))


@pytest.mark.usefixtures("tiny")
def test_scores_on_another_setting_leave_the_runs_own_alone(run_copy: Path) -> None:
    before = files(run_copy)
    scores = experiment.evaluate_stage(run_copy, "tiny-4-1")
    assert scores.aware.novel <= 100
    assert files(run_copy) == before


@pytest.mark.usefixtures("tiny")
def test_a_model_without_its_run_claims_nothing_about_its_training(
    tmp_path: Path, finished_run: Path
) -> None:
    config = Run.open(finished_run).config
    start = load_supervised(finished_run / "supervised")
    run = Run.create(tmp_path / "new", config, start)
    execute(run)
    recorded = storage.read_json(run.path / "scores.json")
    assert recorded["epochs"] == [None, config.discovery.optim.epochs]
    assert (recorded["variant"], recorded["seconds"][0]) == ("custom", 0)


@pytest.mark.parametrize("link", ["checkpoints", "checkpoints/discovery"])
def test_a_link_in_the_place_of_checkpoints_leads_to_nothing_that_is_removed(
    tmp_path: Path, finished_run: Path, link: str
) -> None:
    precious = tmp_path / "precious" / "discovery"
    precious.mkdir(parents=True)
    (precious / "thesis.txt").write_text("all of it")
    run = tmp_path / "run"
    shutil.copytree(finished_run, run)
    (run / "model.json").unlink()
    place = run / link
    place.parent.mkdir(exist_ok=True)
    place.symlink_to(precious if link.endswith("discovery") else precious.parent)
    with pytest.raises(InputError, match="is a link"):
        execute(Run.open(run))
    assert (precious / "thesis.txt").read_text() == "all of it"

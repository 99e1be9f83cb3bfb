"""The command line: every verb, every help text, and one line for everything that can go wrong."""

import csv
import io
import json
import os
import pickle
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass, replace
from pathlib import Path

import numpy as np
import pytest
import torch
from conftest import TINY_METHOD, Stop, StopAfter, same_results, shorter, tiny_recipe
from PIL import Image

from ncdwf import __version__
from ncdwf.cli import main
from ncdwf.config import Config, override
from ncdwf.data.cifar import DATA_VARIABLE
from ncdwf.data.setting import SETTINGS, Split
from ncdwf.learning.discovery import METHODS
from ncdwf.model import Model
from ncdwf.recipes import RECIPES
from ncdwf.results.experiment import Run, execute

VERBS = ("run", "learn", "discover", "evaluate", "predict", "inspect", "reproduce", "list")
SHORT = (
    "--set=supervised.optim.epochs=1",
    "--set=discovery.optim.epochs=2",
    "--set=method.identifier_optim.epochs=2",
)


@dataclass(frozen=True, slots=True)
class Answer:
    code: int
    out: str
    err: str


Call = Callable[..., Answer]


@pytest.fixture
def call(
    tiny: Config,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> Call:
    """Run the command line in this process, in an empty directory, with the tiny setting."""
    monkeypatch.chdir(tmp_path)
    for name in ("FORCE_COLOR", "TTY_COMPATIBLE", DATA_VARIABLE):
        monkeypatch.delenv(name, raising=False)

    def run(*words: str | Path) -> Answer:
        monkeypatch.setattr(sys, "argv", ["ncdwf", *map(str, words)])
        capfd.readouterr()
        with pytest.raises(SystemExit) as ended:
            main()
        code = ended.value.code
        return Answer(code if isinstance(code, int) else 0, *capfd.readouterr())

    return run


def contents(path: Path) -> dict[str, bytes]:
    """Return every file and directory below `path`; what locks them is no content."""
    return {
        str(p.relative_to(path)): p.read_bytes() if p.is_file() else b"directory"
        for p in path.rglob("*")
        if p.name != ".lock"
    }


def save_picture(path: Path, pixels: np.ndarray) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)


@pytest.fixture
def model_dir(tmp_path: Path, found_model: Model) -> Path:
    found_model.save(tmp_path / "model")
    return tmp_path / "model"


def test_run_does_both_phases_and_prints_the_scores(call: Call, finished_run: Path) -> None:
    answer = call("run", "tiny-4-2", "--out", "here", *SHORT)
    assert answer.code == 0
    assert answer.err == ""  # no progress bar when nobody watches
    for words in ("ncdwf on tiny-4-2, seed 0", "task-aware", "strict", "k-means on raw pixels"):
        assert words in answer.out
    assert "Written to here" in answer.out
    scores = json.loads(Path("here/scores.json").read_text())
    assert f"{scores['aware']['novel']:.2f}" in answer.out
    same_results(Path("here"), finished_run)


def test_a_fresh_directory_is_found_where_none_is_given(call: Call) -> None:
    for name in ("tiny-4-2-ncdwf-seed7", "tiny-4-2-ncdwf-seed7-2"):
        assert call("learn", "tiny-4-2", "--seed", "7", *SHORT).code == 0
        assert (Path("runs") / name / "supervised" / "model.json").is_file()


def test_learn_and_discover_give_what_run_gives(call: Call, finished_run: Path) -> None:
    learnt = call("learn", "tiny-4-2", "--out", "known", *SHORT)
    assert (learnt.code, learnt.err) == (0, "")
    assert "known" in learnt.out
    for name in ("model.json", "model.safetensors"):
        wanted = (finished_run / "supervised" / name).read_bytes()
        assert (Path("known/supervised") / name).read_bytes() == wanted
    assert not Path("known/checkpoints").exists()

    before = contents(Path("known"))
    found = call("discover", "known", "--out", "both")
    assert (found.code, found.err) == (0, "")
    assert contents(Path("known")) == before
    assert call("evaluate", "both").code == 0
    for name in ("model.json", "model.safetensors", "predictions.npz"):
        assert (Path("both") / name).read_bytes() == (finished_run / name).read_bytes()


def test_discover_takes_another_setting_seed_and_fields(call: Call, finished_run: Path) -> None:
    known = finished_run / "supervised"  # a bare model: it does not know its run
    answer = call("discover", known, "--setting", "tiny-4-1", "-o", "one", "-s", "5", *SHORT[1:])
    assert answer.code == 0
    config = Run.open(Path("one")).config
    assert (config.setting, config.seed, config.discovery.num_novel) == ("tiny-4-1", 5, 1)
    assert Model.load("one").novel_names == ("novel-1",)


def other_recipe(setting: str, num_novel: int, method: str) -> Config:
    """Return a recipe whose discovery tells which method it is for."""
    config = tiny_recipe(setting, num_novel, method)
    return config if method == "ncdwf" else override(config, "discovery.optim.lr=0.077")


@pytest.mark.parametrize("method", sorted(METHODS))
def test_another_method_brings_its_own_recipe(
    call: Call, finished_run: Path, monkeypatch: pytest.MonkeyPatch, method: str
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", other_recipe)
    recorded = Run.open(finished_run).config
    answer = call("discover", finished_run, "-m", method, "-o", "other", SHORT[1])
    assert (answer.code, answer.err) == (0, "")
    config = Run.open(Path("other")).config
    assert config.method["name"] == method
    if method == recorded.method["name"]:  # naming the recorded method changes nothing
        assert config == recorded
    else:
        assert config.discovery.optim.lr == 0.077
        clustering = config.method["clustering"]
        assert clustering.items() >= TINY_METHOD["clustering"].items()
    assert config.supervised == recorded.supervised
    assert Model.load("other").num_novel == 2


def test_another_method_of_a_whole_run_brings_its_own_recipe(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(RECIPES, "tiny", other_recipe)
    answer = call("run", "tiny-4-2", "--method", "uno", "--out", "here", *SHORT[:2])
    assert (answer.code, answer.err) == (0, "")
    assert "uno on tiny-4-2, seed 0" in answer.out
    assert "softmax" in answer.out
    config = Run.open(Path("here")).config
    assert config.discovery.optim.lr == 0.077
    assert set(config.method) == {"name", "clustering"}
    assert call("run", "tiny-4-2", "-m", "uno", "--set", "method.tau=0.5").code == 2


def test_a_recorded_configuration_is_replayed(call: Call, finished_run: Path) -> None:
    answer = call("run", "--config", finished_run / "config.json", "--out", "again")
    assert answer.code == 0
    same_results(Path("again"), finished_run)


def test_resume_goes_on(call: Call, finished_run: Path, tiny: Config) -> None:
    run = Run.create(Path("cut"), replace(shorter(tiny), checkpoint_seconds=0.0))
    with pytest.raises(Stop):
        execute(run, StopAfter(6))
    answer = call("run", "--resume", "cut")
    assert (answer.code, answer.err) == (0, "")
    same_results(Path("cut"), finished_run)


def test_resuming_learn_removes_checkpoints_that_a_crash_left(call: Call) -> None:
    assert call("learn", "tiny-4-2", "--out", "known", *SHORT).code == 0
    left = Path("known/checkpoints/supervised/supervised-000001-00000000")
    left.mkdir(parents=True)
    assert call("learn", "--resume", "known").code == 0
    assert not Path("known/checkpoints").exists()


def test_evaluate_prints_what_it_writes(call: Call, finished_run: Path) -> None:
    shutil.copytree(finished_run, "copy")
    Path("copy/scores.json").unlink()
    answer = call("evaluate", "copy")
    assert answer.code == 0
    scores = json.loads(Path("copy/scores.json").read_text())
    assert f"{scores['agnostic'][0]['known']:.2f}" in answer.out
    assert f"{scores['after_supervised']['known']:.2f}" in answer.out


def test_evaluate_takes_a_bare_model_with_a_setting(call: Call, model_dir: Path) -> None:
    before = contents(model_dir)
    answer = call("evaluate", model_dir, "--setting", "tiny-4-2")
    assert answer.code == 0
    assert "task-agnostic" in answer.out
    assert contents(model_dir) == before


def test_list_shows_every_setting_and_method(call: Call) -> None:
    answer = call("list")
    assert answer.code == 0
    for name in (*SETTINGS, *METHODS):
        assert name in answer.out
    for name in SETTINGS:
        line = next(line for line in answer.out.splitlines() if f" {name} " in line)
        assert ("later release" if "imagenet" in name else "ready") in line


def test_version(call: Call) -> None:
    assert call("--version").out.strip() == f"ncdwf {__version__}"


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(call: Call, verb: str) -> None:
    answer = call(verb, "--help")
    assert answer.code == 0
    _, _, examples = answer.out.partition("Example")
    assert f"ncdwf {verb}" in examples


def test_help_names_every_verb(call: Call) -> None:
    answer = call("--help")
    for verb in VERBS:
        assert any(line.strip("│ ").startswith(f"{verb} ") for line in answer.out.splitlines())


@pytest.fixture
def photos(tmp_path: Path, split: Split) -> Path:
    """Pictures in nested folders: of the model's size, in colour, larger, not square."""
    folder = tmp_path / "photos"
    for index in range(12):
        pixels = split.test_images[index, 0].numpy()
        save_picture(folder / f"grey/{index:02d}.png", pixels)
        save_picture(folder / f"deep/er/{index:02d}.PNG", np.stack([pixels] * 3, axis=2))
    save_picture(folder / "large.png", pixels.repeat(4, 0).repeat(4, 1))
    save_picture(folder / "wide.jpg", np.full((5, 40, 3), 90, np.uint8))
    (folder / "notes.txt").write_text("not a picture, and not called one")
    return folder


def test_predict_names_pictures_as_the_model_does(
    call: Call, model_dir: Path, photos: Path, split: Split
) -> None:
    answer = call("predict", model_dir, photos, "--format", "json")
    assert (answer.code, answer.err) == (0, "")
    rows = {row["path"]: row for row in json.loads(answer.out)}
    assert len(rows) == 26
    model = Model.load(model_dir)
    wanted = model.predict(split.test_images[:12])
    for index in range(12):
        label = int(wanted.labels[index])
        for path in (photos / f"grey/{index:02d}.png", photos / f"deep/er/{index:02d}.PNG"):
            row = rows[str(path)]
            assert set(row) == {"path", "class", "probability", "head", "novelty"}
            assert row["class"] == model.class_names[label]
            assert row["head"] == ("novel" if label >= 4 else "known")
            assert row["novelty"] == pytest.approx(float(wanted.novelty[index]), abs=1e-4)
    # Two of six classes are novel, in turn: their names count from 1.
    classes = {row["class"] for row in rows.values()}
    assert {"ant", "novel-1", "novel-2"} <= classes
    assert not {"novel-0", "novel-3"} & classes
    # Four times as large, and scaled down to the same picture.
    assert rows[str(photos / "large.png")]["class"] == rows[str(photos / "grey/11.png")]["class"]


def test_predict_writes_csv_and_a_table_with_the_same_answers(
    call: Call, model_dir: Path, photos: Path
) -> None:
    rows = json.loads(call("predict", model_dir, photos, "-f", "json").out)
    answer = call("predict", model_dir, photos, "-f", "csv")
    assert answer.err == ""
    parsed = list(csv.DictReader(io.StringIO(answer.out)))
    assert parsed == [{key: str(value) for key, value in row.items()} for row in rows]
    table = call("predict", model_dir, photos / "grey").out
    for row in rows:
        name = Path(row["path"]).name
        if "grey" in row["path"]:
            assert any(name in line and f" {row['class']} " in line for line in table.splitlines())


def test_predict_takes_single_files_in_the_given_order(
    call: Call, model_dir: Path, photos: Path
) -> None:
    paths = [photos / "wide.jpg", photos / "grey/03.png"]
    rows = json.loads(call("predict", model_dir, *paths, "-f", "json").out)
    assert [row["path"] for row in rows] == [str(path) for path in paths]


def test_predict_skips_what_it_cannot_read_with_a_line(
    call: Call, model_dir: Path, photos: Path
) -> None:
    (photos / "broken.png").write_bytes(b"no picture")
    cut = (photos / "grey/00.png").read_bytes()[:40]
    (photos / "grey/cut.png").write_bytes(cut)
    answer = call("predict", model_dir, photos, "-f", "json")
    assert answer.code == 0
    assert len(json.loads(answer.out)) == 26
    lines = answer.err.splitlines()
    assert len(lines) == 2
    assert any("broken.png" in line for line in lines)
    assert any("cut.png" in line for line in lines)


def test_predict_with_nothing_readable_ends_with_code_2(call: Call, model_dir: Path) -> None:
    Path("broken.png").write_bytes(b"no picture")
    answer = call("predict", model_dir, "broken.png")
    assert answer.code == 2
    assert answer.out == ""
    assert answer.err.splitlines()[-1].startswith("ncdwf: none of the files")


def test_predict_before_discovery_knows_the_known_classes(
    call: Call, finished_run: Path, photos: Path
) -> None:
    answer = call("predict", finished_run / "supervised", photos, "-f", "json")
    assert {row["head"] for row in json.loads(answer.out)} == {"known"}


def test_a_training_that_diverges_ends_with_one_line_and_no_model(call: Call) -> None:
    answer = call("run", "tiny-4-2", "--out", "here", *SHORT, "--set=supervised.optim.lr=1e38")
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 1
    assert "became NaN or infinite" in answer.err
    assert not list(Path("here").rglob("model.*"))


@dataclass(frozen=True, slots=True)
class Bad:
    """What to prepare, what to call, and the words that the one line must hold."""

    words: list[str]
    said: tuple[str, ...]
    prepare: Callable[[Path], None] = lambda finished: None


def sets(assignment: str, *said: str) -> Bad:
    return Bad(["run", "tiny-4-2", "--out", "new", "--set", assignment], said)


def config_file(text: str, *said: str) -> Bad:
    def prepare(finished: Path) -> None:
        Path("config.json").write_text(text)

    return Bad(["run", "--config", "config.json", "--out", "new"], said, prepare)


def broken_model(change: Callable[[Path], None], *said: str) -> Bad:
    def prepare(finished: Path) -> None:
        shutil.copytree(finished, "broken")
        change(Path("broken"))

    return Bad(["inspect", "broken"], said, prepare)


def flip(path: Path) -> None:
    content = bytearray(path.read_bytes())
    content[-100] ^= 1
    path.write_bytes(content)


def edit_json(path: Path, **changes: object) -> None:
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def cut_run(finished: Path) -> Path:
    """Leave a run that was cut off in its supervised phase; return its newest checkpoint."""
    run = Run.create(Path("cut"), replace(Run.open(finished).config, checkpoint_seconds=0.0))
    with pytest.raises(Stop):
        execute(run, StopAfter(3))
    return sorted(Path("cut/checkpoints/supervised").iterdir())[-1]


def damage_checkpoint(finished: Path) -> None:
    flip(cut_run(finished) / "state.safetensors")


def edit_config_of_cut_run(finished: Path) -> None:
    cut_run(finished)
    edit_json(Path("cut/config.json"), seed=9)


def copy_run(finished: Path) -> None:
    shutil.copytree(finished, "run")


def copy_model(finished: Path) -> None:
    shutil.copytree(finished / "supervised", "model")


def copy_discovered(finished: Path) -> None:
    Path("model").mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(finished / name, "model")


BAD = {
    "unknown setting": Bad(["run", "digit-5-5"], ("unknown setting 'digit-5-5'", "digits-5-5")),
    "setting without numbers": Bad(["run", "digits"], ("unknown setting 'digits'",)),
    "too many classes": Bad(["run", "digits-8-5"], ("8 + 5", "10")),
    "one known class": Bad(["run", "digits-1-5"], ("2 or more known",)),
    "no novel class": Bad(["learn", "digits-5-0"], ("1 or more novel",)),
    "cifar": Bad(["run", "cifar100-80-20"], ("CIFAR-100", "--data")),
    "a setting that a table lacks": Bad(
        ["reproduce", "digits", "--setting", "cifar10-5-5"], ("no run", "digits-5-5")
    ),
    "a seed that a table lacks": Bad(["reproduce", "main", "--seed", "99"], ("no run", "--seed")),
    "a table without its data": Bad(["reproduce", "main"], ("CIFAR-10", "--data")),
    "imagenet": Bad(["learn", "imagenet-882-30"], ("ImageNet", "later release")),
    "setting by override": sets("setting=digit-5-5", "unknown setting"),
    "missing data by override": sets("setting=cifar10-5-5", "CIFAR-10", "--data"),
    "unknown method": Bad(["run", "tiny-4-2", "-m", "ncd"], ("'ncd'", "ncdwf")),
    "unknown method by override": sets("method.name=ncd", "'ncd'", "ncdwf"),
    "unknown key": sets("sed=1", "config.sed", "'seed'"),
    "unknown key, deeper": sets("discovery.larg.shift=1", "config.discovery.larg", "'large'"),
    "unknown key, deepest": sets("supervised.optim.lrr=1", "config.supervised.optim.lrr", "'lr'"),
    "unknown key of the method": sets("method.weight_distil=1", "'weight_distill'"),
    "unknown key in the method": sets("method.identifier_optim.lrr=1", "'lr'"),
    "no value": sets("seed", "key=value"),
    "no key": sets("=1", "unknown key"),
    "a key below a value": sets("seed.x=1", "config.seed"),
    "a value for a group": sets("supervised.optim=1", "epochs"),
    "text for a number": sets("seed=abc", "config.seed='abc'", "int"),
    "text for a rate": sets("discovery.optim.lr=fast", "config.discovery.optim.lr='fast'"),
    "number for a switch": sets("supervised.view.flip=1", "config.supervised.view.flip=1", "bool"),
    "fraction for a count": sets(
        "method.clustering.num_heads=2.5", "config.method.clustering.num_heads=2.5", "int"
    ),
    "switch for a number": sets("supervised.optim.lr=true", "config.supervised.optim.lr"),
    "unknown choice": sets("method.softmax=both", "'both'", "separate", "joint"),
    "unknown device": sets("device=gpu", "'gpu'", "cuda"),
    "unknown backbone": sets("backbone=resnet", "'resnet'", "small"),
    "NaN": sets("supervised.optim.lr=NaN", "lr"),
    "infinite": sets("method.rho=Infinity", "rho"),
    "infinite shift": sets("supervised.view.shift=1e999", "shift"),
    "negative rate": sets("supervised.optim.lr=-1", "lr=-1"),
    "no epochs": sets("discovery.optim.epochs=0", "epochs=0"),
    "tau out of range": sets("method.tau=2", "tau=2"),
    "negative snapshots": sets("snapshot_epochs=-1", "snapshot_epochs"),
    "unknown engine": sets("engine=fast", "'fast'", "compiled"),
    "a view too small for the backbone": sets("supervised.view.size=5", "size=5", "small"),
    "a small view too small for the backbone": Bad(
        [
            *("run", "tiny-4-2", "-o", "new"),
            *("--set=discovery.num_small=1", "--set=discovery.small.size=5"),
        ],
        ("size=5", "small"),
    ),
    "negative time": sets("checkpoint_seconds=-1", "checkpoint_seconds"),
    "config file missing": Bad(["run", "--config", "no.json"], ("no.json is missing",)),
    "config file is a folder": Bad(["run", "--config", "."], ("not a file",)),
    "config file not JSON": config_file("{", "config.json is not valid JSON"),
    "config file empty": config_file("", "config.json is not valid JSON"),
    "config file not text": config_file("\x00", "config.json is not valid JSON"),
    "config file not an object": config_file("[]", "should be an object"),
    "config file lacks keys": config_file('{"setting": "tiny-4-2"}', "lacks", "discovery"),
    "config file twice a key": config_file('{"seed": 1, "seed": 2}', "twice"),
    "config file with an unknown key": config_file('{"sed": 1}', "'seed'"),
    "a run is there": Bad(["run", "tiny-4-2", "-o", "run"], ("holds a run already",), copy_run),
    "a model is there": Bad(
        ["learn", "tiny-4-2", "-o", "model"], ("holds a model already",), copy_model
    ),
    "a file is there": Bad(
        ["run", "tiny-4-2", "--out", "file"], ("file",), lambda f: Path("file").touch()
    ),
    "a file is above": Bad(
        ["learn", "tiny-4-2", "--out", "file/run"], ("file",), lambda f: Path("file").touch()
    ),
    "runs is a file": Bad(["run", "tiny-4-2"], ("runs",), lambda f: Path("runs").touch()),
    "resume nothing": Bad(["run", "--resume", "no"], ("no holds no run",)),
    "resume a bare model": Bad(["learn", "--resume", "model"], ("holds no run",), copy_model),
    "resume a broken config": Bad(
        ["run", "--resume", "run"],
        ("config.json is not valid JSON",),
        lambda f: (copy_run(f), Path("run/config.json").write_text("{"))[0],
    ),
    "checkpoint damaged": Bad(
        ["run", "--resume", "cut"], ("state.safetensors is damaged", "delete"), damage_checkpoint
    ),
    "checkpoint of another configuration": Bad(
        ["run", "--resume", "cut"], ("another configuration",), edit_config_of_cut_run
    ),
    "discover without a model": Bad(["discover"], ("MODEL",)),
    "discover from nothing": Bad(["discover", "no"], ("no holds no model",)),
    "too many novel classes": sets("discovery.num_novel=100000", "more than the pool's"),
    "discover too many": Bad(
        ["discover", "run", "--out", "new", "--set", "discovery.num_novel=100000"],
        ("more than the pool's",),
        copy_run,
    ),
    "discover with another supervised phase": Bad(
        ["discover", "run", "--out", "new", "--set", "supervised.optim.epochs=77"],
        ("that phase is over",),
        copy_run,
    ),
    "a hidden layer beyond measure": sets(
        "method.clustering.num_hidden=1000000000", "from 1 to 65536"
    ),
    "a table for no document": Bad(
        ["reproduce", "digits", "--docs", "no.md"], ("no.md is missing",)
    ),
    "a batch of one": sets("supervised.optim.batch_size=1", "2 or more"),
    "a name that is too long": Bad(["run", "tiny-4-2", "--out", "x" * 300], ("cannot write",)),
    "a setting beside a configuration": Bad(
        ["run", "tiny-4-1", "--config", "run/config.json"], ("one of the two",), copy_run
    ),
    "a setting beside a resume": Bad(
        ["run", "tiny-4-1", "--resume", "run"], ("nothing beside it",), copy_run
    ),
    "discover again": Bad(["discover", "model"], ("discovered already",), copy_discovered),
    "discover in an unknown pool": Bad(
        ["discover", "model", "--setting", "tiny-9"], ("unknown setting",), copy_model
    ),
    "discover without a setting": Bad(["discover", "model"], ("--setting",), copy_model),
    "discover into a run": Bad(
        ["discover", "run/supervised", "--setting", "tiny-4-2", "-o", "run"],
        ("holds a run already",),
        copy_run,
    ),
    "evaluate nothing": Bad(["evaluate", "no"], ("no does not exist",)),
    "evaluate too early": Bad(
        ["evaluate", "model", "--setting", "tiny-4-2"], ("not discovered",), copy_model
    ),
    "evaluate without a setting": Bad(["evaluate", "model"], ("--setting",), copy_model),
    "evaluate on other classes": Bad(
        ["evaluate", "run", "--setting", "tiny-3-2"], ("4 classes", "3"), copy_run
    ),
    "evaluate on other pictures": Bad(
        ["evaluate", "run", "--setting", "digits-4-2"], ("8", "16"), copy_run
    ),
    "predict without a model": Bad(["predict", "no", "."], ("no holds no model",)),
    "predict nothing": Bad(["predict", "run", "no"], ("no is neither",), copy_run),
    "predict an empty folder": Bad(["predict", "run", "run"], ("no pictures found",), copy_run),
    "inspect nothing": Bad(["inspect", "no"], ("no holds no model",)),
    "weights missing": broken_model(
        lambda path: (path / "model.safetensors").unlink(), "model.safetensors is missing"
    ),
    "weights truncated": broken_model(
        lambda path: os.truncate(path / "model.safetensors", 1000), "model.safetensors is damaged"
    ),
    "weights edited": broken_model(
        lambda path: flip(path / "model.safetensors"), "model.safetensors is damaged"
    ),
    "weights of another model": broken_model(
        lambda path: shutil.copy(path / "supervised/model.safetensors", path) and None,
        "model.safetensors is damaged or was changed",
    ),
    "weights pickled": broken_model(
        lambda path: (path / "model.safetensors").write_bytes(pickle.dumps([])) and None,
        "model.safetensors is damaged or was changed",
    ),
    "description edited": broken_model(
        lambda path: edit_json(path / "model.json", known_names=["a", "b", "c", "e"]),
        "model.json is damaged or was changed",
    ),
    "description truncated": broken_model(
        lambda path: os.truncate(path / "model.json", 100), "model.json is not valid JSON"
    ),
    "description foreign": broken_model(
        lambda path: (path / "model.json").write_text('{"model_type": "bert"}') and None,
        "model.json does not describe a model",
    ),
    "description of another version": broken_model(
        lambda path: edit_json(path / "model.json", format=1), "has format 1", "reads 2"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_code_2_and_nothing_written(
    call: Call, finished_run: Path, tmp_path: Path, name: str
) -> None:
    bad = BAD[name]
    bad.prepare(finished_run)
    before = contents(tmp_path)
    answer = call(*bad.words)
    assert answer.code == 2
    assert answer.out == ""
    assert len(answer.err.splitlines()) == 1
    assert answer.err.startswith("ncdwf: ")
    assert "Traceback" not in answer.err
    for words in bad.said:
        assert words in answer.err
    assert contents(tmp_path) == before


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
@pytest.mark.parametrize("assignment", ["device=cuda", "engine=captured"])
def test_a_missing_device_is_refused_before_anything_is_written(
    call: Call, tmp_path: Path, assignment: str
) -> None:
    answer = call("run", "tiny-4-2", "--set", assignment)
    assert answer.code == 2
    assert "CUDA" in answer.err
    assert len(answer.err.splitlines()) == 1
    assert contents(tmp_path) == {}


def test_any_verb_goes_on_where_another_stopped(call: Call, finished_run: Path) -> None:
    assert call("learn", "tiny-4-2", "--out", "known", *SHORT).code == 0
    assert call("discover", "--resume", "known").code == 0
    assert call("run", "--resume", "known").code == 0
    same_results(Path("known"), finished_run)


def test_the_model_before_discovery_of_a_run_serves_another_discovery(
    call: Call, finished_run: Path
) -> None:
    assert call("discover", finished_run, "--out", "again").code == 0
    wanted = (finished_run / "model.safetensors").read_bytes()
    assert Path("again/model.safetensors").read_bytes() == wanted


@pytest.mark.parametrize("verb", ["run", "learn", "discover"])
def test_resume_takes_no_other_configuration(call: Call, finished_run: Path, verb: str) -> None:
    answer = call(verb, "--resume", finished_run, "--seed", "3")
    assert answer.code == 2
    assert "nothing beside it" in answer.err


def test_a_real_process_ends_with_code_2_and_one_line(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "ncdwf", "run", "digits-5-5", "--set", "sed=1"],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 2
    assert done.stdout == ""
    assert done.stderr == "ncdwf: unknown key config.sed; did you mean 'seed'?\n"
    assert contents(tmp_path) == {}

"""The command line: every verb, every help text, and one line for everything that can go wrong."""

import csv
import io
import json
import os
import pickle
import re
import shutil
import struct
import subprocess
import sys
import tomllib
import types
import zlib
from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np
import onnxruntime
import pytest
import torch
from conftest import (
    TINY_METHOD,
    Stop,
    StopAfter,
    same_results,
    shorter,
    tiny_pictures,
    tiny_recipe,
)
from PIL import Image
from torch import nn

import ncdwf.cli.benchmark
import ncdwf.cli.own
import ncdwf.cli.phases
from ncdwf import NovelClassDiscoverer, __version__, storage
from ncdwf.cli import main
from ncdwf.config import Config, OwnData, override
from ncdwf.console import Bar
from ncdwf.data.cifar import CIFAR10, CIFAR100, DATA_VARIABLE
from ncdwf.data.download import OFFLINE_VARIABLE
from ncdwf.data.setting import SETTINGS, Setting, Split
from ncdwf.learning.discovery import METHODS
from ncdwf.learning.sifting import Sifted
from ncdwf.model import Model
from ncdwf.model.archive import FORMAT
from ncdwf.recipes import RECIPES
from ncdwf.results.benchmark import Bench, find, read_lines
from ncdwf.results.configuration import config_record
from ncdwf.results.experiment import execute
from ncdwf.results.grids import ABOUT, GRIDS, RUNS
from ncdwf.results.run import Run

VERBS = (
    *("run", "learn", "discover", "evaluate", "predict", "name", "export", "inspect"),
    *("reproduce", "list"),
)
SHORT = (
    "--set=supervised.optim.epochs=1",
    "--set=discovery.optim.epochs=2",
    "--set=method.settling.epochs=2",
)
OWN_ROUND = (
    *SHORT[1:],
    "--set=method.latents_per_class=5",
    "--set=method.inversion_iterations=2",
    "--set=method.clustering.num_heads=2",
    "--set=method.clustering.num_hidden=16",
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


def save_bomb(path: Path) -> None:
    """Write a small PNG file that says it is 60000 pixels wide and high."""

    def chunk(name: bytes, data: bytes) -> bytes:
        check = struct.pack(">I", zlib.crc32(name + data))
        return struct.pack(">I", len(data)) + name + data + check

    header = struct.pack(">IIBBBBB", 60_000, 60_000, 8, 0, 0, 0, 0)
    content = chunk(b"IHDR", header) + chunk(b"IDAT", zlib.compress(bytes(1000)))
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(b"\x89PNG\r\n\x1a\n" + content + chunk(b"IEND", b""))


def save_own(folder: Path) -> None:
    """Write pictures of two classes in sub-folders of `birds`, and of four others in `pool`."""
    images, labels = tiny_pictures(6, seed=5)
    for number, (image, label) in enumerate(zip(images, labels.tolist(), strict=True)):
        place = f"birds/{('robin', 'emu')[label]}" if label < 2 else "pool"
        save_picture(folder / place / f"{number:02d}.png", image[0].numpy())


@pytest.fixture(scope="session")
def own_runs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Own pictures and two runs on them, `known` and `both`; to be copied before any change."""
    folder = tmp_path_factory.mktemp("own")
    save_own(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        for words in (
            ["learn", "--images", "birds", "--out", "known", *SHORT[:1]],
            ["discover", "known", "--images", "pool", "-n", "2", "--out", "both", *OWN_ROUND],
        ):
            patch.setattr(sys, "argv", ["ncdwf", *words])
            with pytest.raises(SystemExit, match="0"):
                main()
    return folder


@pytest.fixture
def own(own_runs: Path, tmp_path: Path) -> Path:
    """The same in this test's directory."""
    shutil.copytree(own_runs, tmp_path, dirs_exist_ok=True)
    return tmp_path


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
        state = listed_state(answer, name)
        if "cifar" in name:
            assert state == f"needs --data DIR or {DATA_VARIABLE}"
        else:
            assert ("later release" if "imagenet" in name else "ready") in state
    others = re.findall(r"cifar100-\d+-\d+-[a-z]+-[\d-]+", answer.out)
    kinds = [Setting.parse(name) for name in others]
    assert [(s.is_proxy, s.known_share, s.imbalance) for s in kinds] == [
        (True, None, 1),
        (False, 50, 1),
        (False, None, 10),
    ]


def listed_state(answer: Answer, name: str) -> str:
    line = next(line for line in answer.out.splitlines() if f" {name} " in line)
    return line.strip("│").split("│")[-1].strip()


def test_list_says_which_data_are_there(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    Path("data", CIFAR100.folder).mkdir(parents=True)
    answer = call("list", "--data", "data")
    assert listed_state(answer, "cifar100-80-20") == "ready"
    assert listed_state(answer, "cifar10-5-5") == f"data holds no {CIFAR10.folder}"
    monkeypatch.setenv(DATA_VARIABLE, "data")
    assert call("list") == answer
    monkeypatch.delenv(OFFLINE_VARIABLE)
    assert listed_state(call("list"), "cifar10-5-5") == "will be downloaded"


def test_names_in_a_narrow_list_are_whole(call: Call, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "40")
    cells = [line.split("│")[1].strip() for line in call("list").out.splitlines() if "│" in line]
    for name in SETTINGS:
        assert name in "".join(cells)


def test_version(call: Call) -> None:
    assert call("--version").out.strip() == f"ncdwf {__version__}"


@pytest.mark.parametrize("verb", VERBS)
def test_help_shows_an_example(call: Call, verb: str) -> None:
    answer = call(verb, "--help")
    assert answer.code == 0
    _, _, examples = answer.out.partition("Example")
    assert f"ncdwf {verb}" in examples


def test_help_says_what_every_table_is_and_needs(call: Call) -> None:
    text = call("reproduce", "--help").out
    assert set(ABOUT) == set(RUNS)
    for name, cells in RUNS.items():
        (line,) = (line for line in text.splitlines() if f"• {name}: " in line)
        assert ABOUT[name][0] in line
        assert f" {len(cells)} runs × " in line
        on_digits = all(cell.setting.startswith("digits") for cell in cells)
        assert ("needs --data and a GPU" in line) == (not on_digits)
        assert ("less than a minute" in line) == on_digits
    for option in ("setting cifar10-5-5", "method uno", "seed 0", "variant beta-1-1"):
        kind, value = option.split()
        assert value in next(line for line in text.splitlines() if f"--{kind}  " in line)


@pytest.mark.parametrize("verb", ["run", "discover"])
def test_help_says_where_methods_and_fields_are_found(call: Call, verb: str) -> None:
    text = " ".join(call(verb, "--help").out.replace("│", " ").split())
    where = ("ncdwf list shows them", "config.json of a run", "docs/method.md")
    for words in ("ncdwf by default", *where):
        assert words in text


def test_help_names_every_verb(call: Call) -> None:
    answer = call("--help")
    for verb in VERBS:
        assert any(line.strip("│ ").startswith(f"{verb} ") for line in answer.out.splitlines())


@pytest.mark.parametrize(
    ("words", "about"),
    [
        (("run", "--seed", "abc"), "--seed"),
        (("run", "--frobnicate"), "--frobnicate"),
        (("run", "--out"), "--out"),
        (("run", "digits-5-5", "extra"), "extra"),
        (("predict",), "MODEL"),
        (("frobnicate",), "frobnicate"),
    ],
)
def test_wrong_use_is_one_line(call: Call, words: tuple[str, ...], about: str) -> None:
    answer = call(*words)
    assert answer.code == 2
    assert answer.out == ""
    assert len(answer.err.splitlines()) == 1
    assert about in answer.err


def test_runs_of_another_process_are_named(call: Call) -> None:
    names = [cell.name for cell in GRIDS["digits"].cells() if cell.seed == 0]
    with ExitStack() as held:
        for name in names:
            held.enter_context(storage.locked(Path("runs/reproduce/claims") / name))
        answer = call("reproduce", "digits", "--seed=0")
    assert answer.code == 0
    first, *rest = answer.err.splitlines()
    assert first.startswith(f"digits: {len(names)} runs, 0 done (")
    assert rest == [f"{name} is being run by another process" for name in names]
    assert not Path("results").exists()


def test_a_part_of_a_table_can_be_run(call: Call) -> None:
    name = "digits-5-5-ncdwf-held-seed3"
    with storage.locked(Path("runs/reproduce/claims") / name):
        words = ("--setting=digits-5-5", "--seed=3", "--variant=held")
        answer = call("reproduce", "digits", *words)
    assert answer.err.splitlines()[1:] == [f"{name} is being run by another process"]


def test_without_a_verb_the_help_is_shown(call: Call) -> None:
    answer = call()
    assert answer.code == 0
    assert "reproduce" in answer.out


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
    assert "\r" not in answer.out
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
    assert not Path("here").exists()  # to go on from there would only do so again


def test_a_model_whose_description_is_lost_is_not_replaced_by_the_one_before_it(
    call: Call, finished_run: Path, photos: Path
) -> None:
    run = Path(shutil.copytree(finished_run, "run"))
    (run / "model.json").unlink()
    for words in (("predict", run, photos), ("inspect", run), ("name", run, "ant=bug")):
        answer = call(*words)
        assert answer.code == 2
        assert "model.json is missing" in answer.err


def test_learn_takes_one_place_of_pictures(call: Call, own_runs: Path) -> None:
    birds = own_runs / "birds"
    answer = call("learn", "--images", birds, "--images", birds, "--out", "new")
    assert (answer.code, answer.err) == (
        2,
        "ncdwf: learn takes one --images: a folder with all classes, or a table\n",
    )


def test_an_empty_argument_is_refused(call: Call, model_dir: Path) -> None:
    answer = call("predict", model_dir, "")
    assert (answer.code, answer.out) == (2, "")
    assert answer.err == "ncdwf: an argument is empty; is a variable of the shell not set?\n"


def test_pictures_without_any_difference_leave_no_run_behind(call: Call) -> None:
    for number in range(24):
        pixels = np.zeros((8, 8), np.uint8)
        save_picture(Path("same", "ab"[number % 2], f"{number}.png"), pixels)
    answer = call("learn", "--images", "same", "--out", "new")
    assert answer.code == 2
    assert answer.err.splitlines()[-1].startswith("ncdwf: all 24 labelled pictures are the same")
    assert not Path("new").exists()


def test_a_reader_that_goes_away_is_nobody_s_fault(model_dir: Path) -> None:
    command = [sys.executable, "-m", "ncdwf", "inspect", str(model_dir)]
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(command, stdout=writer, stderr=subprocess.PIPE, check=False)
    os.close(writer)
    assert (done.returncode, done.stderr) == (1, b"")


def test_discovery_is_not_resumed_where_nothing_was_learnt(call: Call, own_runs: Path) -> None:
    run = Path(shutil.copytree(own_runs / "known", "run"))
    shutil.rmtree(run / "supervised")
    answer = call("discover", "--resume", run)
    assert answer.code == 2
    assert answer.err.endswith("go on with it: ncdwf learn --resume run\n")


@pytest.mark.parametrize("verb", ["list", "inspect", "predict"])
@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs /dev/full")
def test_no_room_for_the_output_is_one_line(verb: str, model_dir: Path, photos: Path) -> None:
    words = {
        "list": ["list"],
        "inspect": ["inspect", model_dir],
        # Its lines wait in a buffer until the end.
        "predict": ["predict", model_dir, photos / "large.png", "--format", "csv"],
    }[verb]
    with Path("/dev/full").open("w") as full:
        done = subprocess.run(
            [sys.executable, "-m", "ncdwf", *map(str, words)],
            stdout=full,
            stderr=subprocess.PIPE,
            text=True,
            env=os.environ | {"PYTHONUNBUFFERED": ""},
            check=False,
        )
    assert done.returncode == 2
    assert done.stderr == "ncdwf: [Errno 28] No space left on device\n"


def test_a_closed_output_is_nobody_s_loss() -> None:
    words = [sys.executable, "-m", "ncdwf", "list"]
    done = subprocess.run(["sh", "-c", '"$@" >&-', "sh", *words], capture_output=True, check=False)
    assert (done.returncode, done.stderr) == (0, b"")


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


def write_blocks(documents: dict[str, list[str]]) -> None:
    for path, names in documents.items():
        blocks = (f"<!-- generated: {name} -->\n<!-- end -->\n" for name in names)
        Path(path).write_text("words\n".join(blocks))


def copy_discovered(finished: Path) -> None:
    Path("model").mkdir()
    for name in ("model.json", "model.safetensors"):
        shutil.copy(finished / name, "model")


BAD = {
    "unknown setting": Bad(["run", "digit-5-5"], ("unknown setting 'digit-5-5'", "digits-5-5")),
    "setting without numbers": Bad(["run", "digits"], ("unknown setting 'digits'",)),
    "a name that steers terminals": Bad(
        ["inspect", "no\x1b[2J\nmodel"], (r"no\x1b[2J\nmodel holds no model",)
    ),
    "too many classes": Bad(["run", "digits-8-5"], ("8 + 5", "10")),
    "one known class": Bad(["run", "digits-1-5"], ("2 or more known",)),
    "no novel class": Bad(["learn", "digits-5-0"], ("1 or more novel",)),
    "cifar": Bad(["run", "cifar100-80-20"], ("CIFAR-100", "--data")),
    "a setting that a table lacks": Bad(
        ["reproduce", "digits", "--setting", "cifar10-5-5"],
        ("'digits' has no --setting cifar10-5-5", "digits-5-5"),
    ),
    "a seed that a table lacks": Bad(
        ["reproduce", "main", "--seed", "99"], ("'main' has no --seed 99", "0, 1, 2")
    ),
    "a variant that a table lacks": Bad(
        ["reproduce", "alpha", "--variant=main", "--variant=beta"],
        ("'alpha' has no --variant beta;", "beta-1-1"),
    ),
    "a seed that one variant alone has": Bad(
        ["reproduce", "main", "--seed=1", "--method=uno"],
        ("no run of 'main'", "has all of these --setting, --method, … at once"),
    ),
    "a table without its data": Bad(["reproduce", "main"], ("CIFAR-10", "--data")),
    "imagenet": Bad(["learn", "imagenet-882-30"], ("ImageNet", "later release")),
    "setting by override": sets("setting=digits-5-5", "--set cannot choose setting; the argument"),
    "own data by override": sets("own=null", "--set cannot choose own; the argument SETTING and"),
    "own shape by override": sets("own.shape=[1,8,8]", "--set cannot choose own"),
    "a method that a table lacks": Bad(
        ["reproduce", "digits", "--method", "frost"],
        ("'digits' has no --method frost; it has ncdwf, ncdwf-gauss, uno",),
    ),
    "a document that is no text": Bad(
        ["reproduce", "digits", "--docs", "odd.md"],
        ("odd.md is not a document in UTF-8",),
        lambda _: Path("odd.md").write_bytes(b"\xff"),
    ),
    "a table without its end": Bad(
        ["reproduce", "digits", "--docs", "open.md"],
        ("the generated block 'digits-seeds' has no <!-- end -->",),
        lambda _: Path("open.md").write_text("<!-- generated: digits-seeds -->\nand more\n"),
    ),
    "unknown method": Bad(["run", "tiny-4-2", "-m", "ncd"], ("'ncd'", "ncdwf")),
    "unknown method by override": sets("method.name=ncd", "'ncd'", "ncdwf"),
    "another method by override": sets("method.name=uno", "--set cannot", "--method uno of"),
    "unknown key": sets("sed=1", "config.sed", "'seed'"),
    "unknown key, deeper": sets("discovery.larg.shift=1", "config.discovery.larg", "'large'"),
    "unknown key, deepest": sets("supervised.optim.lrr=1", "config.supervised.optim.lrr", "'lr'"),
    "unknown key of the method": sets("method.weight_distil=1", "'weight_distill'"),
    "unknown key in the method": sets("method.settling.lrr=1", "'lr'"),
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
    "endless epochs": sets("method.settling.epochs=99999999999999", "at most 1000000"),
    "tau out of range": sets("method.tau=2", "tau=2"),
    "negative seed": Bad(["run", "tiny-4-2", "--seed", "-5"], ("config.seed=-5", "0 or more")),
    "a seed twice": Bad(
        ["run", "tiny-4-2", "--seed", "1", "--set", "seed=2"], ("--seed and --set seed=…",)
    ),
    "a method twice": Bad(
        ["run", "tiny-4-2", "-m", "uno", "--set", "method.name=ncdwf"], ("--method and --set",)
    ),
    "a backbone twice": Bad(
        ["learn", "--images", ".", "--backbone", "small", "--set", "backbone=resnet18"],
        ("--backbone and --set backbone=…",),
    ),
    "a pool twice": Bad(
        ["discover", "run", "--pool", "mixed", "--set", "discovery.pool=novel"],
        ("--pool and --set discovery.pool=…",),
        copy_run,
    ),
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
    "too many novel classes": sets("discovery.num_novel=100000", "need a pool of"),
    "discover too many": Bad(
        ["discover", "run", "--out", "new", "--set", "discovery.num_novel=100000"],
        ("need a pool of",),
        copy_run,
    ),
    "discover with another supervised phase": Bad(
        ["discover", "run", "--out", "new", "--set", "supervised.optim.epochs=77"],
        ("that phase is over",),
        copy_run,
    ),
    "a document without any table": Bad(
        ["reproduce", "digits", "--docs", "bare.md"],
        ("bare.md has no", "'digits', which has digits-summary, digits-seeds,", "has none"),
        lambda _: Path("bare.md").write_text("words\n"),
    ),
    "a document of other tables": Bad(
        ["reproduce", "tau", "--docs", "a.md", "--docs", "b.md"],
        ("b.md has no generated block of 'tau', which has tau; the document has overview, number",),
        lambda _: write_blocks({"a.md": ["tau"], "b.md": ["overview", "number"]}),
    ),
    "a document for pictures": Bad(
        ["reproduce", "figures", "--docs", "a.md"],
        ("a.md has no generated block of 'figures', which has none; the document has tau",),
        lambda _: write_blocks({"a.md": ["tau"]}),
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
    "discover in a pool of which the known part was learnt from": Bad(
        ["discover", "run", "--setting", "tiny-4-2-mixed-50", "-o", "new"],
        ("run learnt from the labelled pictures of tiny-4-2", "has others"),
        copy_run,
    ),
    "discover with fewer known classes": Bad(
        ["discover", "run", "--setting", "tiny-3-2", "-o", "new"],
        ("run learnt from the labelled pictures of tiny-4-2", "has others"),
        copy_run,
    ),
    "discover in a pool of other pictures": Bad(
        ["discover", "run", "--setting", "digits-4-2", "-o", "new"],
        ("run learnt from the labelled pictures of tiny-4-2", "digits-4-2 has others"),
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
        ["evaluate", "run", "--setting", "digits-4-2"],
        ("(ant, bee, cat, …)", "digits-4-2 (0, 1, 2, …)"),
        copy_run,
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
        lambda path: edit_json(path / "model.json", format=1), "has format 1", f"reads {FORMAT}"
    ),
}


@pytest.mark.parametrize("name", BAD)
def test_bad_input_is_one_line_code_2_and_nothing_written(
    call: Call, finished_run: Path, tmp_path: Path, name: str
) -> None:
    BAD[name].prepare(finished_run)
    assert_refused(call, BAD[name], tmp_path)


def assert_refused(call: Call, bad: Bad, tmp_path: Path) -> None:
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


Prepare = Callable[[Path], None]


def learn_own(*words: str, said: tuple[str, ...], prepare: Prepare = lambda own: None) -> Bad:
    return Bad(["learn", "--out", "new", *words], said, prepare)


def discover_own(*words: str, said: tuple[str, ...], prepare: Prepare = lambda own: None) -> Bad:
    return Bad(["discover", "known", "--out", "new", *words], said, prepare)


def table(text: str) -> Prepare:
    return lambda own: (own / "table.csv").write_text(text) and None


def make_dir(name: str) -> Prepare:
    return lambda own: (own / name).mkdir()


def copy_pictures(*places: str) -> Prepare:
    """Copy one picture to every place."""

    def prepare(own: Path) -> None:
        for place in places:
            (own / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(own / "birds/emu/01.png", own / place)

    return prepare


def spoil(*patterns: str) -> Prepare:
    """Write over every picture that fits."""

    def prepare(own: Path) -> None:
        for pattern in patterns:
            for path in own.glob(pattern):
                path.write_bytes(b"no picture")

    return prepare


def bombs(*places: str) -> Prepare:
    return lambda own: [save_bomb(own / place) for place in places] and None


def save_vector_model(own: Path) -> None:
    rows = np.random.default_rng(0).normal(size=(20, 5))
    settings = {"supervised.optim.epochs": 1}
    NovelClassDiscoverer(settings=settings).fit(rows, np.arange(20) % 2).save(own / "vectors")


BESIDE_IMAGES = ("--images takes the place of SETTING, --config and --resume",)
GO_WITH = ("go with --images",)
OWN_BAD = {
    "an empty folder": learn_own(
        "--images", "empty", said=("empty has no sub-folders",), prepare=make_dir("empty")
    ),
    "a folder without classes": learn_own("--images", "pool", said=("pool has no sub-folders",)),
    "a folder of one class": learn_own(
        "--images",
        "one",
        said=("one has one class, 'emu'",),
        prepare=copy_pictures("one/emu/a.png"),
    ),
    "a class without pictures": learn_own(
        "--images", "birds", said=("class 'owl' in birds",), prepare=make_dir("birds/owl")
    ),
    "a class of one picture": learn_own(
        "--images",
        "birds",
        said=("of class 'owl' 1 picture can be read; 2 or more",),
        prepare=copy_pictures("birds/owl/a.png"),
    ),
    "a picture beside the classes": learn_own(
        "--images", "birds", said=("birds/a.png lies beside",), prepare=copy_pictures("birds/a.png")
    ),
    "two folders of one class": learn_own(
        *("--images", "birds"),
        said=("birds has 2 folders of class 'm\u00f6we'",),
        prepare=copy_pictures("birds/m\u00f6we/a.png", "birds/mo\u0308we/a.png"),
    ),
    "no folder": learn_own("--images", "brids", said=("brids does not exist",)),
    "a picture for a folder": learn_own(
        "--images", "pool/02.png", said=("pool/02.png ends in neither",)
    ),
    "a table without labels": learn_own(
        *("--images", "table.csv"),
        said=("needs one column 'label'", "'path', 'class'"),
        prepare=table("path,class\npool/02.png,emu\n"),
    ),
    "a table of one class": learn_own(
        *("--images", "table.csv"),
        said=("table.csv has one class, 'emu'",),
        prepare=table("path,label\npool/02.png,emu\npool/03.png,emu\n"),
    ),
    "a table that names a picture twice": learn_own(
        *("--images", "table.csv"),
        said=("lists pool/02.png twice, as 'emu' and as 'owl'",),
        prepare=table("path,label\npool/02.png,emu\npool/02.png,owl\n"),
    ),
    "a table of missing files": learn_own(
        *("--images", "table.csv"),
        said=("none of the files could be read", "a.png", "there is no such file"),
        prepare=table("path,label\na.png,emu\nb.png,owl\n"),
    ),
    "corrupt pictures alone": learn_own(
        *("--images", "birds"),
        said=("none of the files could be read as a picture",),
        prepare=spoil("birds/*/*.png"),
    ),
    "pictures beyond measure": learn_own(
        *("--images", "bombs"),
        said=("none of the files could be read", "it has more than", "pixels"),
        prepare=bombs("bombs/a/a.png", "bombs/b/b.png"),
    ),
    "one corrupt picture, strictly": learn_own(
        *("--images", "birds", "--strict"),
        said=("birds/emu/01.png cannot be read", "(1 of 12 cannot be read)"),
        prepare=spoil("birds/emu/01.png"),
    ),
    "pictures beside a setting": learn_own("tiny-4-2", "--images", "birds", said=BESIDE_IMAGES),
    "pictures beside a configuration": learn_own(
        "--images", "birds", "--config", "known/config.json", said=BESIDE_IMAGES
    ),
    "pictures beside a resume": learn_own(
        "--images", "birds", "--resume", "known", said=BESIDE_IMAGES
    ),
    "a size without pictures": learn_own("tiny-4-2", "--image-size", "8", said=GO_WITH),
    "a backbone without pictures": learn_own("tiny-4-2", "--backbone", "small", said=GO_WITH),
    "strictly without pictures": learn_own("tiny-4-2", "--strict", said=GO_WITH),
    "another size beside a resume": Bad(
        ["learn", "--resume", "known", "--image-size", "8"], GO_WITH
    ),
    "an unknown backbone": learn_own(
        "--images", "birds", "--backbone", "nest", said=("unknown backbone 'nest'",)
    ),
    "a backbone of vectors": learn_own(
        "--images", "birds", "--backbone", "vector", said=("'vector' reads vectors",)
    ),
    "an unknown key": learn_own("--images", "birds", "--set", "sed=1", said=("config.sed",)),
    "a view of another size": learn_own(
        "--images", "birds", "--set", "supervised.view.size=5", said=("size=5", "'small'")
    ),
    "a run is there": Bad(["learn", "--images", "birds", "--out", "known"], ("known holds a run",)),
    "a model is there": Bad(
        ["learn", "--images", "birds", "--out", "known/supervised"], ("holds a run or a model",)
    ),
    "a file is there": Bad(
        ["learn", "--images", "birds", "--out", "pool/02.png"], ("pool/02.png",)
    ),
    "a name that is too long": Bad(
        ["learn", "--images", "birds", "--out", "x" * 300], ("cannot write",)
    ),
    **{
        f"a run into the pictures, {place}": Bad(
            ["learn", "--images", "birds", "--out", place],
            (f"would be written to {place}, among the pictures of birds; choose a directory",),
            lambda own: (own / "link").symlink_to("birds"),
        )
        for place in ("birds", "birds/new", "pool/../birds/emu/new", "link/new")
    },
    "no number of classes": discover_own("--images", "pool", said=("needs --num-novel",)),
    "an empty pool": discover_own(
        *("--images", "empty", "-n", "2"), said=("no pictures found",), prepare=make_dir("empty")
    ),
    "no pool": discover_own("--images", "no", "-n", "2", said=("no is neither a file nor",)),
    "a table for a pool": discover_own(
        *("--images", "pool", "--images", "table.csv", "-n", "2"),
        said=("table.csv is a table; 'ncdwf learn' takes tables, here give folders or pictures",),
        prepare=table("path\npool/02.png\n"),
    ),
    "predict a table": Bad(
        ["predict", "both", "table.csv"],
        ("table.csv is a table",),
        table("path\npool/02.png\n"),
    ),
    "a corrupt pool": discover_own(
        *("--images", "pool", "-n", "2"),
        said=("none of the files could be read as a picture",),
        prepare=spoil("pool/*.png"),
    ),
    "a pool beyond measure": discover_own(
        *("--images", "bomb.png", "-n", "1"),
        said=("bomb.png", "it has more than"),
        prepare=bombs("bomb.png"),
    ),
    "one corrupt picture of the pool, strictly": discover_own(
        *("--images", "pool", "-n", "2", "--strict"),
        said=("pool/02.png cannot be read", "(1 of 24 cannot be read)"),
        prepare=spoil("pool/02.png"),
    ),
    **{
        f"{text!r} for a number of classes": discover_own(
            "--images", "pool", "-n", text, said=(f"--num-novel {text}: a whole number from 1 on",)
        )
        for text in ("0", "two", "2.5", "٣", "000000000", "10000000")
    },
    "a number of classes of 5,000 digits": discover_own(
        *("--images", "pool", "-n", "9" * 5000),
        said=("--num-novel 99999999999999999999: a whole number from 1 on, of 7 digits at most",),
    ),
    "a pool of another kind": discover_own(
        *("--images", "pool", "-n", "2", "--pool", "some"),
        said=("config.discovery.pool='some' is not one of ('novel', 'mixed')",),
    ),
    "more classes than pictures": discover_own(
        "--images", "pool", "-n", "25", said=("25 novel classes", "this one has 24")
    ),
    "a pool beside a setting": discover_own(
        *("--images", "pool", "-n", "2", "--setting", "tiny-4-2"),
        said=("--images takes the place of --setting",),
    ),
    "too few to be counted": discover_own(
        *("--images", "few", "-n", "auto"),
        said=("the classes of 1 picture cannot be counted: 20 or more are needed",),
        prepare=copy_pictures("few/a.png"),
    ),
    "a number twice": discover_own(
        *("--images", "pool", "-n", "3", "--set", "discovery.num_novel=4"),
        said=("--num-novel and --set discovery.num_novel=…",),
    ),
    "a name on two lines": Bad(["name", "both", "novel-1=new\nline"], ("cannot be printed",)),
    "a number without a pool": discover_own("-n", "2", said=("--images says which ones to take",)),
    "strictly without a pool": discover_own("--strict", said=("goes with --images",)),
    "a pool beside a resume": Bad(
        ["discover", "--resume", "both", "--images", "pool", "-n", "2"], ("nothing beside it",)
    ),
    "a number beside a resume": Bad(
        ["discover", "--resume", "both", "-n", "2"], ("nothing beside it",)
    ),
    "a pool without a model": Bad(["discover", "--images", "pool", "-n", "2"], ("needs MODEL",)),
    "a pool for no model": Bad(
        ["discover", "no", "--images", "pool", "-n", "2"], ("no holds no model",)
    ),
    "an unknown method": discover_own(
        "--images", "pool", "-n", "2", "-m", "ncd", said=("unknown method 'ncd'",)
    ),
    "another method by override": discover_own(
        *("--images", "pool", "-n", "2", "--set", "method.name=ncdwf-gauss"),
        said=("--set cannot choose the method; --method ncdwf-gauss of",),
    ),
    "another supervised phase": discover_own(
        *("--images", "pool", "-n", "2", "--set", "supervised.optim.epochs=9"),
        said=("that phase is over",),
    ),
    "another backbone": discover_own(
        "--images", "pool", "-n", "2", "--set", "backbone=resnet18", said=("that phase is over",)
    ),
    "a discovery is there": Bad(
        ["discover", "known", "--images", "pool", "-n", "2", "--out", "both"], ("both holds a run",)
    ),
    "discover without a pool": discover_own(
        said=("known learnt from pictures of your own; --images says which",)
    ),
    "resume a discovery that never began": Bad(
        ["discover", "--resume", "known"], ("known has no pool yet",)
    ),
    "resume a discovery that never began, in a folder with a space": Bad(
        ["discover", "--resume", "my birds"],
        ("my birds has no pool yet; give one with: ncdwf discover 'my birds' --images",),
        lambda own: shutil.copytree(own / "known", own / "my birds") and None,
    ),
    "a name too long for a folder": Bad(
        ["learn", "--images", 300 * "x"], ("x cannot be read: File name too long",)
    ),
    "evaluate own pictures": Bad(
        ["evaluate", "both"], ("both learnt from pictures of your own; --setting says which",)
    ),
    "evaluate own classes by their place": Bad(
        ["evaluate", "both", "--setting", "tiny-2-2"],
        ("the known classes of this model (", "are not those of tiny-2-2 (ant, bee"),
    ),
    "a setting after a discovery of one's own": Bad(
        ["discover", "both", "--setting", "tiny-2-2"],
        ("both has discovered classes in pictures of your own", "--images begins another round"),
    ),
    "run own pictures": Bad(
        ["run", "--resume", "both"], ("both is of pictures of your own", "ncdwf discover --resume")
    ),
    "replay own pictures": Bad(
        ["learn", "--config", "known/config.json", "--out", "new"],
        ("known/config.json is of pictures of your own",),
    ),
    "learn what came as a model": Bad(
        ["learn", "--resume", "both"],
        ("without labelled pictures",),
        lambda own: shutil.rmtree(own / "both/supervised"),
    ),
    "predict with a model of vectors": Bad(
        ["predict", "vectors", "pool"], ("reads vectors of 5 numbers",), save_vector_model
    ),
    "discover with a model of vectors": Bad(
        ["discover", "vectors", "--images", "pool", "-n", "2"],
        ("reads vectors of 5 numbers",),
        save_vector_model,
    ),
    "a class that is not there": Bad(
        ["name", "both", "novel-9=owl"], ("no class 'novel-9'", "emu, robin, novel-1, novel-2")
    ),
    "a name without a class": Bad(["name", "both", "=owl"], ("'=owl' should be written OLD=NEW",)),
    "a class without a name": Bad(
        ["name", "both", "novel-1="], ("'novel-1=' should be written OLD=NEW",)
    ),
    "no equals sign": Bad(["name", "both", "novel-1"], ("'novel-1' should be written OLD=NEW",)),
    "a name of spaces": Bad(["name", "both", "novel-1= "], ("' ' is not a name",)),
    "a name that is taken": Bad(["name", "both", "novel-1=emu"], ("two classes", "'emu'")),
    "one name for two": Bad(
        ["name", "both", "novel-1=owl", "novel-2=owl"], ("two classes", "'owl'")
    ),
    "two names for one": Bad(
        ["name", "both", "novel-1=owl", "novel-1=rail"], ("'novel-1'", "'owl' and 'rail'")
    ),
    "name no model": Bad(["name", "no", "novel-1=owl"], ("no holds no model",)),
    "export over a file": Bad(
        ["export", "both", "--onnx", "pool/02.png"], ("pool/02.png is there already",)
    ),
    "export over a folder": Bad(["export", "both", "--onnx", "pool"], ("pool is there already",)),
    "export below a file": Bad(
        ["export", "both", "--onnx", "pool/02.png/m.onnx"], ("cannot write pool/02.png",)
    ),
    "export no model": Bad(["export", "no", "--onnx", "m.onnx"], ("no holds no model",)),
}


@pytest.mark.parametrize("name", OWN_BAD)
def test_bad_input_beside_own_pictures_is_one_line_code_2_and_nothing_written(
    call: Call, own: Path, name: str
) -> None:
    OWN_BAD[name].prepare(own)
    assert_refused(call, OWN_BAD[name], own)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are always text")
@pytest.mark.parametrize(
    ("place", "words"),
    [
        (b"birds/\xff", ["learn", "--out", "new", "--images", "birds"]),
        (b"\xff", ["learn", "--out", "new", "--images", "\udcff"]),
        (b"\xff", ["discover", "known", "--out", "new", "-n", "1", "--images", "\udcff"]),
        (b"\xff", ["name", "both", "novel-1=\udcff"]),
    ],
)
def test_names_that_are_no_text_are_refused(
    call: Call, own: Path, place: bytes, words: list[str]
) -> None:
    shutil.copytree(own / "birds/emu", own / os.fsdecode(place))
    assert_refused(call, Bad(words, ("udcff' is not valid text",)), own)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are always text")
def test_pictures_whose_names_are_no_text_are_named(call: Call, own: Path) -> None:
    shutil.copy(own / "pool/02.png", own / os.fsdecode(b"\xff.png"))
    for form in ("table", "csv", "json"):
        answer = call("predict", "both", "\udcff.png", "-f", form)
        assert (answer.code, answer.err) == (0, "")
        assert "\\udcff.png" in answer.out


def test_own_pictures_are_learnt_and_discovered_in(call: Call, own: Path) -> None:
    learnt = call("learn", "--images", "birds", "--out", "first", "--seed", "3", SHORT[0])
    assert (learnt.code, learnt.err) == (0, "")
    assert learnt.out.splitlines() == [
        "12 pictures, 2 classes at 1×16×16 · backbone small · 1 epoch, batch 16, "
        "learning rate 0.005. Another choice: --set supervised.optim.epochs=…",
        "A model of the known classes is in first",
    ]
    config = Run.open(Path("first")).config
    assert config.own == OwnData(shape=(1, 16, 16), labelled=str(own / "birds"))
    assert (config.setting, config.seed, config.discovery.num_novel) == ("own", 3, 0)

    shutil.rmtree("birds")  # discovery needs nothing of it
    before = contents(Path("first"))
    found = call(
        *("discover", "first", "--images", "pool", "-n", "3", "--out", "second", "--method", "uno"),
        *OWN_ROUND[:1],
    )
    assert (found.code, found.err) == (0, "")
    assert found.out.splitlines() == [
        "24 pictures at 1×16×16 · backbone small · 2 epochs, batch 32, learning rate "
        "0.1. Another choice: --set discovery.optim.epochs=…",
        "A model of known and novel classes (novel-1, novel-2, novel-3) is in second",
    ]
    assert contents(Path("first")) == before
    recorded, config = config, Run.open(Path("second")).config
    assert config.own == OwnData(shape=(1, 16, 16), pool=(str(own / "pool"),))
    assert (config.method["name"], config.seed, config.discovery.num_novel) == ("uno", 3, 3)
    assert config.supervised == recorded.supervised
    assert Model.load("second").class_names == ("emu", "robin", "novel-1", "novel-2", "novel-3")


def test_the_default_directory_is_not_among_the_pictures(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(own / "birds")
    assert_refused(call, Bad(["learn", "--images", "."], ("written to runs, among", "--out")), own)
    assert call("learn", "--images", ".", "--out", "../new", SHORT[0]).code == 0


def test_a_table_of_own_pictures_gives_what_the_folder_gives(call: Call, own: Path) -> None:
    paths = sorted(Path("birds").rglob("*.png"))
    rows = [f"{path},{path.parent.name}" for path in paths]
    Path("table.csv").write_text("\n".join(["path,label", *rows]))
    assert call("learn", "--images", "table.csv", "--out", "again", SHORT[0]).code == 0
    for name in ("model.json", "model.safetensors"):
        wanted = (own / "known/supervised" / name).read_bytes()
        assert Path("again/supervised", name).read_bytes() == wanted
    assert Run.open(Path("again")).config.own.labelled == str(own / "table.csv")


def test_own_pictures_are_scaled_on_request_and_their_colours_kept(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for path in Path("birds").rglob("*.png"):
        Image.open(path).convert("RGB").resize((50, 70)).save(path)
    assert call("learn", "--images", "birds", "--out", "auto", SHORT[0]).code == 0
    side = 64 if torch.cuda.is_available() else 32
    assert Model.load("auto/supervised").architecture.input_shape == (3, side, side)
    monkeypatch.setattr(ncdwf.cli.phases.experiment, "learn_stage", lambda *rest: None)
    words = ("learn", "--images", "birds", "--out", "asked")
    assert call(*words, "--image-size", "9", "--backbone", "resnet18").code == 0
    config = Run.open(Path("asked")).config
    assert (config.own.shape, config.backbone) == ((3, 9, 9), "resnet18")


def test_pictures_that_cannot_be_read_are_listed_and_passed_over(call: Call, own: Path) -> None:
    spoil("birds/emu/01.png", "pool/0[2-4].png")(own)
    learnt = call("learn", "--images", "birds", "--out", "first", SHORT[0])
    assert learnt.code == 0
    assert learnt.out.startswith("11 pictures, 2 classes")
    (line,) = learnt.err.splitlines()
    assert line.startswith(f"skipped: {own / 'birds/emu/01.png'} cannot be read as a picture: ")
    found = call("discover", "first", "--images", "pool", "-n", "2", "--out", "both2", *OWN_ROUND)
    assert found.code == 0
    assert found.out.startswith("21 pictures at")
    assert [line.split()[1] for line in found.err.splitlines()] == [
        str(own / f"pool/{number:02d}.png") for number in (2, 3, 4)
    ]


def test_networks_of_one_size_discover_without_small_views(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    timm = types.ModuleType("timm")
    layers = nn.Flatten(), nn.Linear(256, 8)
    monkeypatch.setattr(timm, "is_model", lambda name: True, raising=False)
    monkeypatch.setattr(
        timm, "create_model", lambda *_, **__: nn.Sequential(*layers), raising=False
    )
    monkeypatch.setitem(sys.modules, "timm", timm)
    words = ("learn", "--images", "birds", "--backbone", "timm:net", "--out", "first", SHORT[0])
    assert call(*words).code == 0
    words = ("discover", "first", "--images", "pool", "-n", "2", "--out", "new", *OWN_ROUND)
    answer = call(*words, "--set=discovery.num_small=1")
    assert answer.code == 2
    assert "cannot read small views of shape (1, 9, 9); set discovery.num_small=0" in answer.err
    answer = call(*words)
    assert (answer.code, answer.err) == (0, "")
    assert Run.open(Path("new")).config.discovery.num_small == 0


def test_what_is_left_open_about_a_pool_is_found_out_and_said(call: Call, own: Path) -> None:
    images, _ = tiny_pictures(20, seed=6)
    for number, image in enumerate(images):
        save_picture(own / f"camera/{number:03d}.png", image[0].numpy())
    words = ("--images", "camera", "--num-novel", "auto", "--pool", "mixed", "--out", "new")
    answer = call("discover", "known", *words, *OWN_ROUND)
    assert (answer.code, answer.err) == (0, "")
    assert re.search(
        r"\d+ of 120 pictures look known and will be left out \(estimated known share: \d+%",
        answer.out,
    )
    number = re.search(r"seems to hold (\d+) novel classes, between \d+ and \d+", answer.out)
    assert number is not None
    assert Model.load("new").num_novel == int(number[1])
    config = Run.open(Path("new")).config
    assert (config.discovery.num_novel, config.discovery.pool) == (0, "mixed")
    survey = json.loads(Path("new/survey.json").read_text())
    left_out = re.search(r"(\d+) of 120 pictures", answer.out)
    assert left_out is not None
    assert (survey["num_pictures"], survey["num_left_out"]) == (120, int(left_out[1]))
    assert len(survey["left_out"]) == survey["num_left_out"]
    assert set(survey["left_out"]) < {str(path) for path in (own / "camera").iterdir()}
    assert 0 <= survey["known_share"] <= 1
    assert survey["low"] <= survey["num_novel"] == int(number[1]) <= survey["high"]
    assert survey["curve"][number[1]] == max(survey["curve"].values())


def test_what_run_finds_out_about_a_pool_is_said_and_kept(call: Call) -> None:
    answer = call("run", "tiny-4-2", "--out", "there", *SHORT, "--set=discovery.num_novel=0")
    assert (answer.code, answer.err) == (0, "")
    survey = json.loads(Path("there/survey.json").read_text())
    assert f"seems to hold {survey['num_novel']} novel" in answer.out
    words = ("run", "tiny-4-2-mixed-50", "--out", "here", *SHORT, "--set=discovery.pool=mixed")
    answer = call(*words)
    assert (answer.code, answer.err) == (0, "")
    survey = json.loads(Path("here/survey.json").read_text())
    assert f"{survey['num_left_out']} of {survey['num_pictures']} pictures" in answer.out
    rows = survey["left_out"]
    assert rows == sorted(set(rows))
    assert set(rows) < set(range(survey["num_pictures"]))


MIXED_ROUND = ("discover", "known", "--images", "pool", "--pool", "mixed", "--out", "new")


def keep_of_mixed_pools(monkeypatch: pytest.MonkeyPatch, number: int) -> None:
    """Have all but the first pictures of every mixed pool pass for known ones."""

    def sift(model: Model, images: torch.Tensor) -> Sifted:
        return Sifted(torch.arange(len(images)) < number, 0.5)

    monkeypatch.setattr("ncdwf.learning.survey.sift", sift)


@pytest.mark.skipif(sys.platform == "darwin", reason="its file names are always text")
def test_a_picture_whose_name_is_no_text_can_be_left_out(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_of_mixed_pools(monkeypatch, 20)
    for path in list(Path("pool").iterdir()):
        path.rename(os.fsdecode(b"pool/\xff" + os.fsencode(path.name)))
    answer = call(*MIXED_ROUND, *OWN_ROUND, "-n", "2")
    assert (answer.code, answer.err) == (0, "")
    left_out = json.loads(Path("new/survey.json").read_text())["left_out"]
    assert len(left_out) == 4
    assert all(r"pool/\xff" in path for path in left_out)


def test_a_discovery_that_refuses_its_pool_leaves_nothing(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_of_mixed_pools(monkeypatch, 0)
    for _ in range(2):
        answer = call(*MIXED_ROUND, "-n", "2")
        assert answer.code == 2
        assert "none of the pool's 24 pictures looks novel" in answer.err
        assert not Path("new").exists()
    Path("new/supervised").mkdir(parents=True)
    for name in ("notes.txt", "history.jsonl", "supervised/mine.txt"):
        Path("new", name).write_text("")
    before = contents(Path("new"))
    assert call(*MIXED_ROUND, "-n", "2").code == 2
    after = contents(Path("new"))
    assert {name: after[name] for name in before} == before
    assert not Path("new/config.json").exists()


def test_what_was_learnt_stays_if_the_pool_is_refused(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    keep_of_mixed_pools(monkeypatch, 0)
    words = ("run", "tiny-4-2", "--out", "here", *SHORT, "--set=discovery.pool=mixed")
    assert call(*words).code == 2
    assert Path("here/supervised/model.json").exists()
    before = contents(Path("here"))
    assert call("discover", "--resume", "here").code == 2
    assert contents(Path("here")) == before
    assert not Path("here/checkpoints").exists()  # nothing is unfinished


def test_learning_that_refuses_its_pictures_leaves_nothing(call: Call, own: Path) -> None:
    before = contents(own)
    sets = ("--set=supervised.holdout=0.1", "--set=supervised.statistics_from=held-out")
    answer = call("learn", "--images", "birds", "--out", "new", *sets)
    assert answer.code == 2
    assert "held-out pictures" in answer.err
    assert contents(own) == before


def test_a_class_of_which_nothing_can_be_read_is_not_dropped(call: Call, own: Path) -> None:
    copy_pictures("birds/owl/a.png", "birds/owl/b.png")(own)
    spoil("birds/owl/*.png")(own)
    answer = call("learn", "--images", "birds", "--out", "new", SHORT[0])
    assert (answer.code, answer.out) == (2, "")
    *skipped, last = answer.err.splitlines()
    assert [line.split()[0] for line in skipped] == ["skipped:"] * 2
    assert last == "ncdwf: of class 'owl' 0 pictures can be read; 2 or more are needed"
    assert not Path("new").exists()


def test_what_can_be_read_of_a_pool_is_what_counts(call: Call, own: Path) -> None:
    spoil("pool/0*.png")(own)
    left = 24 - len(list(Path("pool").glob("0*.png")))
    words = ("discover", "known", "--images", "pool", "--out", "new", *OWN_ROUND)
    answer = call(*words, "-n", str(left + 1))
    assert answer.code == 2
    assert answer.err.splitlines()[-1] == (
        f"ncdwf: {left + 1} novel classes need a pool of {left + 1} or more; this one has {left}"
    )
    assert not Path("new").exists()


def test_a_pool_may_be_of_several_folders_and_files(call: Call, own: Path) -> None:
    words = ("--images", "pool", "--images", "birds/emu/01.png", "-n", "2")
    answer = call("discover", "known", *words, "--out", "new", *OWN_ROUND)
    assert answer.code == 0
    assert answer.out.startswith("25 pictures at")
    pool = Run.open(Path("new")).config.own.pool
    assert pool == (str(own / "pool"), str(own / "birds/emu/01.png"))


def test_a_picture_given_twice_is_one_of_the_pool(call: Call, own: Path) -> None:
    words = ("--images", "pool", "--images", "pool/02.png", "--images", own / "pool", "-n", "2")
    answer = call("discover", "known", *words, "--out", "new", *OWN_ROUND)
    assert answer.code == 0
    assert answer.out.startswith("24 pictures at")


def test_a_discovered_model_begins_another_round(call: Call, own: Path) -> None:
    assert call("name", "both", "novel-1=owl").code == 0
    before = contents(Path("both"))
    answer = call("discover", "both", "--images", "pool", "-n", "1", "--out", "third", *OWN_ROUND)
    assert answer.code == 0
    assert "(novel-3) is in third" in answer.out
    model = Model.load("third")
    assert model.class_names == ("emu", "robin", "owl", "novel-2", "novel-3")
    assert (model.num_known, model.num_novel) == (4, 1)
    assert contents(Path("both")) == before
    rows = json.loads(call("predict", "third", "pool", "birds", "-f", "json").out)
    assert {row["class"] for row in rows} <= set(model.class_names)


def test_the_number_of_classes_may_be_another_than_the_settings(call: Call, run_copy: Path) -> None:
    words = ("discover", run_copy, "-n", "3", "--out", "new", *OWN_ROUND)
    assert call(*words).code == 0
    assert Run.open(Path("new")).config.discovery.num_novel == 3
    answer = call("discover", run_copy, "-n", "3", "--set", "discovery.num_novel=3", "-o", "other")
    assert "say the same" in answer.err


def test_a_setting_does_not_go_on_from_a_round_that_was_cut_off(call: Call, own: Path) -> None:
    words = ("--images", "pool", "-n", "2", "--out", "later", *OWN_ROUND)
    assert call("discover", "both", *words).code == 0
    Path("later/model.json").unlink()
    Path("later/model.safetensors").unlink()
    answer = call("discover", "later", "--setting", "tiny-2-3", "--out", "new", *OWN_ROUND)
    assert answer.code == 2
    assert "later has discovered classes in pictures of your own" in answer.err


def test_a_link_that_leads_to_itself_is_one_line(call: Call, own: Path) -> None:
    Path("round").symlink_to("round")
    for words in (
        ("learn", "--images", "round"),
        ("discover", "known", "--images", "round", "-n2"),
    ):
        answer = call(*words, "--out", "new")
        assert (answer.code, answer.err.count("\n")) == (2, 1)
        assert "round" in answer.err


def test_documents_are_filled_in_as_they_are_when_the_runs_are_done(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    Path("a.md").write_text("before\n<!-- generated: digits-seeds -->\n<!-- end -->\n")

    def reproduce(*_: Any) -> list[Any]:
        Path("a.md").write_text(Path("a.md").read_text() + "written meanwhile\n")
        return []

    monkeypatch.setattr(Bench, "reproduce", reproduce)
    monkeypatch.setattr(Bench, "missing", lambda *_: [])
    assert call("reproduce", "digits", "--docs", "a.md").code == 0
    text = Path("a.md").read_text()
    assert text.endswith("written meanwhile\n")
    assert "| seed |" in text


def test_a_table_says_beforehand_what_is_there_and_what_will_be_run(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    cells = [cell for cell in RUNS["tau"] if cell.setting == "cifar10-5-5" and cell.seed > 0]
    whole = read_lines(Path(__file__).parent.parent / "results" / "runs.jsonl")
    lines = [line for cell in cells if (line := find(whole, cell))]
    assert len(lines) == 2
    fetched: list[str] = []
    monkeypatch.setattr(ncdwf.cli.benchmark, "fetch", lambda setting, _: fetched.append(setting))
    monkeypatch.setattr(Bench, "reproduce", lambda *_: [])
    words = ("reproduce", "tau", "--setting=cifar10-5-5", "--results=kept/runs.jsonl")
    place = Path.cwd() / "kept" / "runs.jsonl"
    said = f"tau: 3 runs, 0 done ({place}, a new file), 3 to do"
    assert call(*words).err.splitlines()[0] == said
    place.parent.mkdir()
    place.write_text("".join(f"{json.dumps(line)}\n" for line in lines))
    said = f"tau: 3 runs, 2 done ({place}), 1 to do"
    assert call(*words).err.splitlines()[0] == said
    assert fetched == 2 * ["cifar10-5-5"]
    assert call(*words, "--seed=2").err == f"tau: 1 run, 1 done ({place}), 0 to do\n"
    assert fetched == 2 * ["cifar10-5-5"]  # nothing is downloaded for runs that are there


@pytest.mark.parametrize(
    "words",
    [
        ["learn", "--images", "birds", "--out", "new"],
        ["discover", "known", "--images", "pool", "-n", "2", "--out", "new"],
    ],
)
def test_an_interruption_while_pictures_are_read_is_told_and_leaves_nothing(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch, words: list[str]
) -> None:
    def interrupt(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(ncdwf.cli.own, "decode", interrupt)
    before = contents(Path())
    answer = call(*words)
    assert (answer.code, answer.out, answer.err) == (130, "", "Interrupted.\n")
    assert contents(Path()) == before


def test_an_interrupted_table_says_how_to_go_on(
    call: Call, monkeypatch: pytest.MonkeyPatch
) -> None:
    def reproduce(*_: Any) -> list[Any]:
        raise KeyboardInterrupt

    monkeypatch.setattr(Bench, "reproduce", reproduce)
    answer = call("reproduce", "digits")
    assert "The same command goes on with what is missing." in answer.err


@pytest.mark.parametrize(
    ("name", "text", "words"),
    [
        ("runs.jsonl", None, "lacks scores"),
        ("observations.json", "[]", "does not hold observations"),
        ("observations.json", '{"maturity": 3}', "does not hold observations"),
    ],
)
def test_results_that_are_none_are_one_line(
    call: Call, name: str, text: str | None, words: str
) -> None:
    cell = RUNS["digits"][0]
    line = {"setting": cell.setting, "method": "ncdwf", "variant": "main", "seed": 0}
    whole = json.dumps({**line, "config": config_record(cell.config)})
    Path("results").mkdir()
    Path("results", name).write_text(whole if text is None else text)
    answer = call("reproduce", "digits", "--seed", "0", "--variant", "main", "--method", "ncdwf")
    assert (answer.code, answer.err.count("\n")) == (2, 1)
    assert words in answer.err


def test_a_model_of_own_pictures_discovers_in_the_pool_of_a_setting(call: Call, own: Path) -> None:
    answer = call("discover", "known", "--setting", "tiny-2-3", "--out", "new", *OWN_ROUND)
    assert (answer.code, answer.err) == (0, "")
    config = Run.open(Path("new")).config
    assert (config.setting, config.own, config.discovery.num_novel) == ("tiny-2-3", None, 3)
    assert Model.load("new").class_names == ("emu", "robin", "novel-1", "novel-2", "novel-3")
    assert call("evaluate", "new").code == 0


def test_an_estimator_goes_on_on_the_command_line(call: Call, own: Path) -> None:
    paths = sorted(Path("birds").rglob("*.png"))
    finder = NovelClassDiscoverer(settings={"supervised.optim.epochs": 1})
    finder.fit(paths, [path.parent.name for path in paths]).save("estimator")
    words = ("--images", "pool", "-n", "2", "--out", "new", "-s", "0", *OWN_ROUND)
    assert call("discover", "estimator", *words).code == 0
    rows = json.loads(call("predict", "new", "birds", "-f", "json").out)
    assert [row["path"] for row in rows] == [str(path) for path in paths]
    wanted = (own / "both/model.safetensors").read_bytes()
    assert Path("new/model.safetensors").read_bytes() == wanted


def test_names_are_given_to_a_model_and_its_weights_stay(call: Call, own: Path) -> None:
    before = contents(Path("both"))
    answer = call("name", "both", "novel-2=black robin", "emu=rhea=nandu")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "The classes of both: rhea=nandu, robin, novel-1, black robin\n"
    after = contents(Path("both"))
    assert {name for name in after if after[name] != before[name]} == {"model.json"}
    rows = json.loads(call("predict", "both", "pool", "birds", "-f", "json").out)
    assert {row["class"] for row in rows} <= {"rhea=nandu", "robin", "novel-1", "black robin"}
    assert call("name", "known", "emu=rhea").out == "The classes of known: rhea, robin\n"


def test_a_class_with_an_equals_sign_can_be_named(call: Call, own: Path) -> None:
    assert call("name", "both", "emu=x=y", "robin==").out.startswith("The classes of both: x=y, =,")
    answer = call("name", "both", "x=y=rhea=nandu", "===robin", "novel-1=x")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out == "The classes of both: rhea=nandu, =robin, x, novel-2\n"
    assert call("name", "both", "novel-2=x=y").code == 0
    said = ("'x=y=z' begins with the classes 'x' and 'x=y'; give one of them a name without '='",)
    assert_refused(call, Bad(["name", "both", "x=y=z"], said), own)
    assert_refused(call, Bad(["name", "both", "y=z=1"], ("there is no class 'y'",)), own)
    assert call("name", "both", "x=owl").code == 0
    assert call("name", "both", "x=y=z").out.endswith("owl, z\n")


def test_a_model_is_exported_into_a_new_folder(call: Call, own: Path) -> None:
    answer = call("export", "both", "--onnx", "deep/er/birds.onnx")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.startswith("Written to deep/er/birds.onnx")
    session = onnxruntime.InferenceSession("deep/er/birds.onnx")
    names = json.loads(session.get_modelmeta().custom_metadata_map["class_names"])
    assert names == ["emu", "robin", "novel-1", "novel-2"]
    images, _ = tiny_pictures(6, seed=5)
    probabilities, novelty = session.run(None, {"images": images.numpy()})
    wanted = Model.load("both").predict(images)
    assert np.allclose(novelty, wanted.novelty, atol=1e-4)
    assert (probabilities.argmax(1) == wanted.labels.numpy()).mean() > 0.9


class InterruptedBar(Bar):
    """A bar under which somebody presses Ctrl-C after some steps of a phase."""

    phase, left = "", 0

    def start(self, task: str, num_images: int, done: int) -> None:
        self.task = task
        super().start(task, num_images, done)

    def advance(self, num_images: int) -> None:
        super().advance(num_images)
        if self.task == self.phase:
            type(self).left -= 1
            if self.left == 0:
                raise KeyboardInterrupt


OWN_COMMANDS = {
    "learn": ("--images", "birds", "--set=supervised.optim.epochs=4"),
    "discover": ("known", "--images", "pool", "-n", "2", *OWN_ROUND),
}
PHASES = {"learn": "supervised", "discover": "discovery"}


@pytest.mark.parametrize("verb", OWN_COMMANDS)
def test_work_on_own_pictures_goes_on_after_an_interruption(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    words = (verb, *OWN_COMMANDS[verb], "--set=checkpoint_seconds=0")
    assert call(*words, "--out", "whole").code == 0
    monkeypatch.setattr(ncdwf.cli.phases, "Bar", InterruptedBar)
    monkeypatch.setattr(InterruptedBar, "phase", PHASES[verb])
    monkeypatch.setattr(InterruptedBar, "left", 2)
    cut = call(*words, "--out", "cut")
    assert cut.code == 130
    assert f"Interrupted. Go on with: ncdwf {verb} --resume cut" in cut.err
    assert any(Path("cut/checkpoints", PHASES[verb]).iterdir())
    assert not Path("cut/model.json").exists()

    # The pictures are read again, so they must still be there.
    folder = Path("birds" if verb == "learn" else "pool")
    folder.rename("elsewhere")
    before = contents(Path("cut"))
    answer = call(verb, "--resume", "cut")
    assert answer.code == 2
    assert len(answer.err.splitlines()) == 1
    assert str(own / folder) in answer.err
    assert contents(Path("cut")) == before
    Path("elsewhere").rename(folder)

    assert call(verb, "--resume", "cut").code == 0
    model = "supervised" if verb == "learn" else "."
    for name in ("model.json", "model.safetensors"):
        assert Path("cut", model, name).read_bytes() == Path("whole", model, name).read_bytes()
    assert not Path("cut/checkpoints").exists()


def take_one(own: Path, folder: Path) -> None:
    next(folder.rglob("*.png")).unlink()


def paint_one(own: Path, folder: Path) -> None:
    save_picture(next(folder.rglob("*.png")), np.zeros((16, 16), np.uint8))


def rename_class(own: Path, folder: Path) -> None:
    (folder / "emu").rename(folder / "eagle")


@pytest.mark.parametrize(
    ("verb", "change", "said"),
    [
        ("learn", take_one, "it began with 12 of shape (1, 16, 16), there are 11"),
        ("learn", paint_one, "as many as before, but not the same"),
        ("learn", rename_class, "the names of the classes are others"),
        ("discover", take_one, "it began with 24 of shape (1, 16, 16), there are 23"),
        ("discover", paint_one, "as many as before, but not the same"),
    ],
)
def test_work_does_not_go_on_with_other_pictures(
    call: Call,
    own: Path,
    monkeypatch: pytest.MonkeyPatch,
    verb: str,
    change: Callable[[Path, Path], None],
    said: str,
) -> None:
    interrupt(call, monkeypatch, verb)
    folder = own / ("birds" if verb == "learn" else "pool")
    shutil.copytree(folder, own / "safe")
    change(own, folder)
    bad = Bad([verb, "--resume", "cut"], ("belongs to other data", said, "delete cut/checkpoints"))
    assert_refused(call, bad, own)
    shutil.rmtree(folder)
    (own / "safe").rename(folder)
    assert call(verb, "--resume", "cut").code == 0


def test_a_model_before_an_unfinished_discovery_is_called_that(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    commands = {
        "predict": ("predict", "cut", "pool"),
        "name": ("name", "cut", "emu=rhea"),
        "export": ("export", "cut", "--onnx", "birds.onnx"),
        "inspect": ("inspect", "cut"),
    }
    interrupt(call, monkeypatch, "discover", "--set=checkpoint_seconds=60")  # none is kept yet
    for words in commands.values():
        answer = call(*words)
        assert answer.code == 0
        assert answer.err == (
            "discovery in cut has not finished; this is the model before it. "
            "Go on with: ncdwf discover --resume cut\n"
        )
    answer = call("discover", "cut", "--images", "pool", "--num-novel", "2", "--out", "third")
    assert answer.code == 2
    assert "has not finished, and a round begins with what the last one found; go on" in answer.err
    assert not Path("third").exists()
    assert call("discover", "--resume", "cut").code == 0
    shutil.copytree("both", "cut2")
    for run in ("cut", "cut2", "known"):
        assert call("predict", run, "pool").err == ""


@pytest.mark.parametrize("verb", OWN_COMMANDS)
def test_the_command_that_began_a_run_names_the_one_that_goes_on(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    interrupt(call, monkeypatch, verb)
    said = ("cut holds a run that has not finished", f"ncdwf {verb} --resume cut\n")
    assert_refused(call, Bad([verb, *OWN_COMMANDS[verb], "--out", "cut"], said), own)


def test_a_run_without_a_model_yet_is_called_unfinished(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    interrupt(call, monkeypatch, "learn")
    Path("cut").rename("it's cut")
    said = (
        "the run in it's cut has not finished and holds no model yet",
        """ncdwf learn --resume 'it'"'"'s cut'""",
    )
    for words in (
        ["predict", "it's cut", "pool"],
        ["name", "it's cut", "emu=rhea"],
        ["discover", "it's cut", "--images", "pool", "-n", "2"],
        ["discover", "it's cut"],
        ["evaluate", "it's cut"],
    ):
        assert_refused(call, Bad(words, said), own)


@pytest.mark.parametrize("verb", OWN_COMMANDS)
def test_the_hint_after_an_interruption_can_be_pasted(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch, verb: str
) -> None:
    monkeypatch.setattr(ncdwf.cli.phases, "Bar", InterruptedBar)
    monkeypatch.setattr(InterruptedBar, "phase", PHASES[verb])
    monkeypatch.setattr(InterruptedBar, "left", 1)
    cut = call(verb, *OWN_COMMANDS[verb], "--out", "my $run")
    assert cut.err.splitlines()[0].endswith(f"Go on with: ncdwf {verb} --resume 'my $run'")
    if verb == "discover":
        hint = call("predict", "my $run", "pool").err
        assert hint.endswith("ncdwf discover --resume 'my $run'\n")


def interrupt(call: Call, monkeypatch: pytest.MonkeyPatch, verb: str, *words: str) -> None:
    """Leave a run on own pictures in `cut` that somebody ended after two steps."""
    with monkeypatch.context() as patch:
        patch.setattr(ncdwf.cli.phases, "Bar", InterruptedBar)
        patch.setattr(InterruptedBar, "phase", PHASES[verb])
        patch.setattr(InterruptedBar, "left", 2)
        words = words or ("--set=checkpoint_seconds=0",)
        assert call(verb, *OWN_COMMANDS[verb], *words, "--out", "cut").code not in (0, 2)


@pytest.mark.parametrize("verb", ["run", "learn", "discover"])
def test_resuming_what_is_finished_says_so(call: Call, finished_run: Path, verb: str) -> None:
    shutil.copytree(finished_run, "run")
    answer = call(verb, "--resume", "run")
    assert (answer.code, answer.err) == (0, "")
    assert answer.out.splitlines()[-1].startswith("Nothing was left to do. ")


def python(code: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)


def test_ctrl_c_during_the_imports_is_one_line() -> None:
    done = python(
        "import sys\n"
        "class Impatient:\n"
        "    def find_spec(self, name, *rest):\n"
        "        if name == 'torch': raise KeyboardInterrupt\n"
        "sys.meta_path.insert(0, Impatient())\n"
        "sys.argv = ['ncdwf', 'list']\n"
        "from ncdwf.__main__ import main\n"
        "main()"
    )
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "Interrupted.\n")


def test_verbs_do_not_wait_for_libraries_that_few_of_them_need() -> None:
    done = python(
        "import sys, ncdwf.cli\n"
        "assert not {'sklearn', 'matplotlib', 'onnx', 'onnxruntime'} & set(sys.modules)"
    )
    assert done.returncode == 0, done.stderr


def test_the_version_is_told_without_torch() -> None:
    done = python(
        "import sys\n"
        "sys.argv = ['ncdwf', '--version']\n"
        "from ncdwf.__main__ import main\n"
        "main()\n"
        "assert 'torch' not in sys.modules"
    )
    assert (done.returncode, done.stdout) == (0, f"ncdwf {__version__}\n"), done.stderr


def test_the_command_begins_where_the_module_does() -> None:
    text = Path(__file__).parents[1].joinpath("pyproject.toml").read_text()
    assert tomllib.loads(text)["project"]["scripts"] == {"ncdwf": "ncdwf.__main__:main"}


def test_an_interruption_before_anything_is_learnt_leaves_nothing(
    call: Call, own: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ncdwf.cli.own, "Bar", InterruptedBar)
    monkeypatch.setattr(InterruptedBar, "phase", "read")
    monkeypatch.setattr(InterruptedBar, "left", 1)
    before = contents(own)
    answer = call("learn", "--images", "birds", "--out", "new")
    assert answer.code not in (0, 2)
    assert "Traceback" not in answer.err
    assert contents(own) == before

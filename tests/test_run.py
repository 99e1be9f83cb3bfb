"""Run directories: how they begin, what they record, what is left alone."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
from conftest import shorter
from test_experiment import files
from test_model import NOVEL

from ncdwf import storage
from ncdwf.config import Config
from ncdwf.errors import InputError, StorageError
from ncdwf.learning.loop import Epoch
from ncdwf.results import experiment
from ncdwf.results.run import Run, load_supervised, new_run_dir


def test_a_directory_with_a_run_or_a_model_is_refused(
    run_copy: Path, tmp_path: Path, tiny: Config
) -> None:
    before = files(run_copy)
    with pytest.raises(InputError, match="holds a run already"):
        Run.create(run_copy, tiny)
    assert files(run_copy) == before
    with pytest.raises(InputError, match="holds a model already"):
        Run.create(run_copy / "supervised", tiny)
    assert files(run_copy) == before
    with pytest.raises(InputError, match="holds no run"):
        Run.open(tmp_path)


@pytest.mark.parametrize("name", ["env.json", "config.json"])
@pytest.mark.parametrize("others", [False, True])
def test_a_disk_that_is_full_leaves_no_beginning(
    tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch, name: str, others: bool
) -> None:
    write = storage.write_bytes

    def full(path: Path, data: bytes) -> None:
        if path.name == name:
            raise StorageError(f"cannot write {path}: the disk is full")
        write(path, data)

    if others:
        (tmp_path / "run").mkdir()
        (tmp_path / "run" / "notes.txt").write_text("mine")
    before = files(tmp_path)
    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_bytes", full)
        with pytest.raises(StorageError, match="the disk is full"):
            Run.create(tmp_path / "run", tiny)
    assert files(tmp_path) == before
    assert (tmp_path / "run").exists() == others
    assert Run.create(tmp_path / "run", tiny).config.setting == tiny.setting


def test_ctrl_c_leaves_no_beginning(
    tmp_path: Path, tiny: Config, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def interrupted(path: Path, value: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(storage, "write_json", interrupted)
    with pytest.raises(KeyboardInterrupt):
        Run.create(tmp_path / "new", tiny, load_supervised(run_copy))
    assert not (tmp_path / "new").exists()


def test_a_beginning_that_was_killed_is_begun_again(
    tmp_path: Path, tiny: Config, run_copy: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def killed(path: Path, value: Any) -> None:
        raise SystemExit

    start, path = load_supervised(run_copy), tmp_path / "new"
    with monkeypatch.context() as patched:
        patched.setattr(storage, "write_json", killed)
        with pytest.raises(SystemExit):
            Run.create(path, tiny, start)
    assert files(path / "supervised")
    other = replace(start, model=start.model.with_novel(NOVEL, identifier=True, seed=0))
    with pytest.raises(InputError, match="holds a model already"):
        Run.create(path, tiny, other)
    run = Run.create(path, tiny, start)
    assert files(run.supervised_dir) == files(run_copy / "supervised")


def test_what_a_supervised_phase_was_made_with_stays_known(
    tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCDWF_COMMIT", "aaa")
    first = Run.create(tmp_path / "first", shorter(tiny))
    experiment.learn_stage(first, partial(experiment.labelled_of, tiny.setting, None))
    for name, commits in (("bbb", "aaa, bbb"), ("aaa", "aaa")):
        monkeypatch.setenv("NCDWF_COMMIT", name)
        second = Run.create(tmp_path / name, shorter(tiny), load_supervised(first.path))
        assert second.provenance["commit"] == commits


def test_new_run_directories_have_fresh_names(tmp_path: Path, tiny: Config) -> None:
    config = replace(tiny, seed=3)
    names = [new_run_dir(tmp_path / "runs", config).name for _ in range(3)]
    stem = "tiny-4-2-ncdwf-seed3"
    assert names == [stem, f"{stem}-2", f"{stem}-3"]
    (tmp_path / "file").touch()
    with pytest.raises((InputError, storage.StorageError)):
        new_run_dir(tmp_path / "file", config)


def test_recording_a_phase_twice_replaces_it(tmp_path: Path, tiny: Config) -> None:
    def entry(phase: str, lr: float) -> Epoch:
        return Epoch(
            phase=phase, epoch=0, lr=lr, terms={"a": 1.0}, seconds=1.0, images_per_second=1.0
        )

    run = Run.create(tmp_path / "run", tiny)
    assert run.history() == []
    run.record([entry("supervised", 0.1)])
    run.record([entry("discovery", 0.2)])
    run.record([entry("supervised", 0.3)])
    assert [(e.phase, e.lr) for e in run.history()] == [("discovery", 0.2), ("supervised", 0.3)]


def test_files_of_others_in_the_directory_stay(tmp_path: Path, tiny: Config) -> None:
    (tmp_path / "sub").mkdir()
    for name in (".precious.tmp", "sub/.other.1.tmp", "notes.txt"):
        (tmp_path / name).write_text("mine")
    Run.create(tmp_path, tiny)
    for name in (".precious.tmp", "sub/.other.1.tmp", "notes.txt"):
        assert (tmp_path / name).read_text() == "mine"


@pytest.mark.parametrize("content", ["[]", '{"later": 5}', '{"later": [3]}', '{"later": {}}'])
def test_an_environment_that_tells_nothing_is_refused(
    tmp_path: Path, tiny: Config, content: str
) -> None:
    run = Run.create(tmp_path / "run", tiny)
    (run.path / "env.json").write_text(content)
    with pytest.raises(InputError, match=r"env\.json does not tell what a run was made with"):
        run.note_environment()


def test_a_damaged_history_is_refused_before_anything_is_learnt(
    tmp_path: Path, tiny: Config
) -> None:
    run = Run.create(tmp_path / "run", tiny)
    (run.path / "history.jsonl").write_text('{"phase": 3}')
    with pytest.raises(InputError, match=r"history\.jsonl"), run.checkpoints("supervised"):
        pytest.fail("a phase began")


@pytest.mark.parametrize("name", ["supervised", "snapshots", "checkpoints"])
def test_a_run_with_a_link_in_the_place_of_a_folder_is_refused(
    tmp_path: Path, tiny: Config, name: str
) -> None:
    run = Run.create(tmp_path / "run", tiny)
    (tmp_path / "elsewhere").mkdir()
    (run.path / name).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(InputError, match=f"{name} is a link"), run.checkpoints("discovery"):
        pytest.fail("a phase began")
    assert list((tmp_path / "elsewhere").iterdir()) == []


def test_what_a_run_went_on_with_is_told_beside_what_it_began_with(
    tmp_path: Path, tiny: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("NCDWF_COMMIT", "aaa")
    run = Run.create(tmp_path / "run", tiny)
    began = (run.path / "env.json").read_bytes()
    run.note_environment()
    assert (run.path / "env.json").read_bytes() == began
    assert run.provenance["commit"] == "aaa"
    for commit in ("bbb", "bbb", "aaa"):
        monkeypatch.setenv("NCDWF_COMMIT", commit)
        run.note_environment()
    assert run.provenance["commit"] == "aaa, bbb"
    assert [later["commit"] for later in run.environment["later"]] == ["bbb", "aaa"]
    assert run.provenance["device"] == run.environment["device"]
    assert run.provenance["date"] == run.environment["date"]

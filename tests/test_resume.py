"""Crashes: runs that are killed, interrupted or out of disk go on to the very same bits."""

import errno
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import same_results, shorter

from ncdwf import storage
from ncdwf.config import Config
from ncdwf.errors import StorageError
from ncdwf.results.experiment import execute
from ncdwf.results.run import Run

SETS = (
    "checkpoint_seconds=0",
    "supervised.optim.epochs=2",
    "discovery.optim.epochs=3",
    "method.clustering.num_heads=2",
    "method.clustering.num_hidden=16",
    "method.clustering.num_projected=8",
    "method.latents_per_class=10",
    "method.inversion_iterations=3",
    "method.settling.epochs=2",
)
PATIENCE = 60.0


def begin(
    directory: Path, *words: str, limit_bytes: int = resource.RLIM_INFINITY
) -> subprocess.Popen[str]:
    """Start the command line in a process of its own, which may write files up to a size."""
    return subprocess.Popen(
        [sys.executable, "-m", "ncdwf", "run", *words],
        cwd=directory,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        preexec_fn=lambda: resource.setrlimit(resource.RLIMIT_FSIZE, (limit_bytes, limit_bytes)),
    )


NEW = (
    *("digits-5-5", "--out", "run"),
    *(word for assignment in SETS for word in ("--set", assignment)),
)
RESUMED = ("--resume", "run")


def finish(process: subprocess.Popen[str]) -> str:
    """Wait for a good end; return what was said on stderr."""
    _, said = process.communicate(timeout=PATIENCE)
    assert process.returncode == 0, said
    return said


def stop_when(
    process: subprocess.Popen[str], reached: Callable[[], bool], how: signal.Signals
) -> str:
    """Send a signal as soon as `reached`; return what was said on stderr."""
    end = time.monotonic() + PATIENCE
    while not reached():
        assert process.poll() is None, process.communicate()[1]
        assert time.monotonic() < end
        time.sleep(0.001)
    process.send_signal(how)
    return process.communicate(timeout=PATIENCE)[1]


def kill_at(process: subprocess.Popen[str], run: Path, moment: str) -> None:
    """Kill a process for good once a file or a checkpoint is there or a later one is."""

    def reached() -> bool:
        if not moment.startswith("checkpoints/"):
            return (run / moment).exists()
        wanted = run / moment
        try:
            return any(p.name >= wanted.name for p in wanted.parent.glob("[a-z]*"))
        except OSError:  # removed while we looked
            return False

    stop_when(process, reached, signal.SIGKILL)
    assert process.returncode == -signal.SIGKILL


@pytest.fixture(scope="module")
def uninterrupted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("whole")
    finish(begin(directory, *NEW))
    return directory / "run"


@pytest.mark.slow
@pytest.mark.parametrize(
    "moment",
    [
        "checkpoints/supervised/supervised-000000-00000004",
        "checkpoints/supervised/supervised-000001-00000000",
        "supervised/model.json",
        "checkpoints/discovery/discovery-000001-00000002",
        "model.safetensors",
    ],
)
def test_a_killed_run_goes_on_to_the_same_bits(
    tmp_path: Path, uninterrupted: Path, moment: str
) -> None:
    kill_at(begin(tmp_path, *NEW), tmp_path / "run", moment)
    assert not (tmp_path / "run/scores.json").exists()
    finish(begin(tmp_path, *RESUMED))
    same_results(tmp_path / "run", uninterrupted)
    assert not (tmp_path / "run/checkpoints").exists()


@pytest.mark.slow
def test_a_run_killed_again_and_again_goes_on_to_the_same_bits(
    tmp_path: Path, uninterrupted: Path
) -> None:
    run = tmp_path / "run"
    kill_at(begin(tmp_path, *NEW), run, "checkpoints/supervised/supervised-000000-00000002")
    for moment in (
        "checkpoints/supervised/supervised-000000-00000007",
        "checkpoints/discovery/discovery-000000-00000002",
        "checkpoints/discovery/discovery-000001-00000001",
    ):
        kill_at(begin(tmp_path, *RESUMED), run, moment)
    finish(begin(tmp_path, *RESUMED))
    same_results(run, uninterrupted)


@pytest.mark.slow
def test_ctrl_c_says_how_to_go_on(tmp_path: Path, uninterrupted: Path) -> None:
    checkpoints = tmp_path / "run/checkpoints/supervised"
    process = begin(tmp_path, *NEW)
    said = stop_when(process, lambda: any(checkpoints.glob("supervised-*")), signal.SIGINT)
    assert process.returncode not in (0, -signal.SIGINT)
    assert "ncdwf run --resume run" in said
    assert "Traceback" not in said
    finish(begin(tmp_path, *RESUMED))
    same_results(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_a_file_that_grows_too_large_for_the_disk_is_one_line_and_can_be_resumed(
    tmp_path: Path, uninterrupted: Path
) -> None:
    # The checkpoints of discovery are larger, so the last limit stops the second phase.
    weights = (uninterrupted / "supervised/model.safetensors").stat().st_size
    for words, limit, phase in (
        (NEW, weights // 4, "supervised"),
        (RESUMED, 3 * weights, "discovery"),
    ):
        process = begin(tmp_path, *words, limit_bytes=limit)
        out, said = process.communicate(timeout=PATIENCE)
        assert process.returncode == 2
        assert out == ""
        assert len(said.splitlines()) == 1
        assert "cannot write" in said
        assert f"checkpoints/{phase}" in said
        left = [p for p in (tmp_path / "run").rglob("*") if p.name.endswith(".tmp")]
        assert left == []
    finish(begin(tmp_path, *RESUMED))
    same_results(tmp_path / "run", uninterrupted)


@pytest.mark.slow
def test_two_processes_cannot_work_on_one_run(tmp_path: Path, uninterrupted: Path) -> None:
    first = begin(tmp_path, *NEW)
    end = time.monotonic() + PATIENCE
    while not (tmp_path / "run/checkpoints/supervised").exists():
        assert time.monotonic() < end
        time.sleep(0.001)
    first.send_signal(signal.SIGSTOP)
    second = begin(tmp_path, *RESUMED)
    _, said = second.communicate(timeout=PATIENCE)
    assert second.returncode == 2
    assert said == "ncdwf: run is in use by another process\n"
    first.send_signal(signal.SIGCONT)
    finish(first)
    same_results(tmp_path / "run", uninterrupted)


def in_child(work: Callable[[], object]) -> int:
    """Do something in a child process without the price of a new interpreter; wait for it."""
    child = os.fork()
    if child == 0:
        status = 1
        try:
            work()
            status = 0
        finally:
            os._exit(status)
    return os.waitpid(child, 0)[1]


def execute_until_sync(run: Run, number: int) -> bool:
    """Go on with a run in a child that is killed at its n-th fsync; tell whether it was."""
    syncs = iter(range(1, number))

    def fsync(descriptor: int) -> None:
        if next(syncs, None) is None:
            os.kill(os.getpid(), signal.SIGKILL)
        real(descriptor)

    def work() -> None:
        storage.os.fsync = fsync  # type: ignore[attr-defined]
        execute(run)

    real = os.fsync
    status = in_child(work)
    assert status in (0, signal.SIGKILL)
    return status == signal.SIGKILL


forking = pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")


@pytest.mark.slow
@forking
@pytest.mark.parametrize("first", range(1, 5))
def test_a_kill_in_the_middle_of_any_write_changes_nothing(
    tmp_path: Path, tiny: Config, finished_run: Path, first: int
) -> None:
    """Every file is synced twice, itself and its directory: all kinds of writes are cut off."""
    config = replace(shorter(tiny), checkpoint_seconds=0.0)
    kills = 0
    for number in range(first, 200, 12):
        run = Run.create(tmp_path / str(number), config)
        if not execute_until_sync(run, number):
            break
        kills += 1
        execute(run)
        same_results(run.path, finished_run)
        assert not (run.path / "checkpoints").exists()
    assert kills >= 5


@pytest.mark.slow
@forking
def test_many_kills_in_one_run_change_nothing(
    tmp_path: Path, tiny: Config, finished_run: Path
) -> None:
    run = Run.create(tmp_path / "run", replace(shorter(tiny), checkpoint_seconds=0.0))
    kills = 0
    # Eight syncs are one checkpoint and a part of the next, so every attempt gets a step further.
    while execute_until_sync(run, 8 + kills % 5):
        kills += 1
        assert kills < 40
    assert kills >= 8
    same_results(run.path, finished_run)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "words"),
    [(errno.ENOSPC, "bytes are needed, [0-9]+ are free"), (errno.EIO, "cannot write")],
)
def test_a_failing_disk_at_any_sync_loses_nothing(
    tmp_path: Path,
    tiny: Config,
    finished_run: Path,
    monkeypatch: pytest.MonkeyPatch,
    code: int,
    words: str,
) -> None:
    config = replace(shorter(tiny), checkpoint_seconds=0.0)
    real = os.fsync
    # A finished run takes about eighty syncs; half a dozen of the last ones are its results'.
    for number in range(5, 70, 16):
        run = Run.create(tmp_path / str(number), config)
        syncs = iter(range(1, number))

        def fsync(descriptor: int, syncs: Iterator[int] = syncs) -> None:
            if next(syncs, None) is None:
                raise OSError(code, os.strerror(code))
            real(descriptor)

        with monkeypatch.context() as patch:
            patch.setattr(os, "fsync", fsync)
            with pytest.raises(StorageError, match=words):
                execute(run)
        assert not [p for p in run.path.rglob("*") if p.name.endswith(".tmp")]
        execute(run)
        same_results(run.path, finished_run)

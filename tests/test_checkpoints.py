"""Checkpoints: when they are written, which are kept, and what is refused."""

import json
import re
import shutil
import signal
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from conftest import Stop, StopAfter, fingerprint, timeless
from safetensors.torch import load
from test_loop import OPTIM, STEPS, Net, every_step, kept, run_net
from torch import Tensor

from ncdwf import storage
from ncdwf.errors import InputError
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.progress import Quiet


def test_last_two_checkpoints_are_kept(tmp_path: Path) -> None:
    run_net(Net(), checkpoints=every_step(tmp_path))
    assert kept(tmp_path) == ["test-000002-00000004", "test-000003-00000000"]


def test_checkpoints_wait_for_their_time_but_the_end_is_always_kept(tmp_path: Path) -> None:
    run_net(Net(), checkpoints=Checkpoints(tmp_path, seconds=3600.0, fingerprint="a"))
    assert kept(tmp_path) == ["test-000003-00000000"]


class Impatient(Quiet):
    """Somebody who presses Ctrl-C after some steps, so many times."""

    def __init__(self, num_steps: int, times: int = 1) -> None:
        self.left, self.times = num_steps, times

    def advance(self, num_images: int) -> None:
        self.left -= 1
        if self.left == 0:
            for _ in range(self.times):
                signal.raise_signal(signal.SIGINT)


@pytest.mark.parametrize(
    ("num_steps", "position"),
    [(1, "000000-00000001"), (STEPS, "000001-00000000"), (STEPS + 2, "000001-00000002")],
)
def test_ctrl_c_waits_for_a_checkpoint(tmp_path: Path, num_steps: int, position: str) -> None:
    def rarely() -> Checkpoints:
        return Checkpoints(tmp_path, seconds=3600.0, fingerprint="a")

    resumed, whole = Net(), Net()
    with pytest.raises(KeyboardInterrupt):
        run_net(Net(), checkpoints=rarely(), progress=Impatient(num_steps))
    assert kept(tmp_path) == [f"test-{position}"]
    history = run_net(resumed, checkpoints=rarely())
    assert timeless(history) == timeless(run_net(whole))
    assert fingerprint(resumed) == fingerprint(whole)


class PressedLate(Checkpoints):
    """Somebody presses Ctrl-C right after one was kept."""

    def keep(self, *position: Any) -> None:
        super().keep(*position)
        signal.raise_signal(signal.SIGINT)


def test_ctrl_c_after_the_last_checkpoint_is_no_less_heard(tmp_path: Path) -> None:
    with pytest.raises(KeyboardInterrupt):
        run_net(Net(), checkpoints=PressedLate(tmp_path, seconds=3600.0, fingerprint="a"))
    assert kept(tmp_path) == ["test-000003-00000000"]
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_second_ctrl_c_waits_for_nothing(tmp_path: Path) -> None:
    checkpoints = Checkpoints(tmp_path, seconds=3600.0, fingerprint="a")
    with pytest.raises(KeyboardInterrupt):
        run_net(Net(), checkpoints=checkpoints, progress=Impatient(1, times=2))
    assert kept(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_a_program_that_handles_ctrl_c_itself_goes_on_to(tmp_path: Path) -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGINT, lambda number, _: heard.append(number))
    try:
        run_net(Net(), checkpoints=every_step(tmp_path), progress=Impatient(1))
    finally:
        signal.signal(signal.SIGINT, before)
    assert heard == [signal.SIGINT]


def test_training_in_a_thread_leaves_ctrl_c_alone(tmp_path: Path) -> None:
    net, whole = Net(), Net()
    with ThreadPoolExecutor(1) as pool:
        pool.submit(run_net, net, checkpoints=every_step(tmp_path)).result()
    run_net(whole)
    assert fingerprint(net) == fingerprint(whole)


def test_checkpoints_of_another_phase_are_left_alone(tmp_path: Path) -> None:
    run_net(Net(), checkpoints=every_step(tmp_path), phase="first")
    net, alone = Net(), Net()
    run_net(net, checkpoints=every_step(tmp_path), phase="second")
    run_net(alone, phase="second")
    assert fingerprint(net) == fingerprint(alone)
    assert len(kept(tmp_path)) == 4


def test_a_flipped_bit_anywhere_in_a_checkpoint_is_refused(tmp_path: Path) -> None:
    run_net(Net(), checkpoints=every_step(tmp_path), optim=replace(OPTIM, epochs=1))
    newest = sorted(tmp_path.iterdir())[-1]
    assert every_step(tmp_path).latest("test") is not None
    flips = 0
    for file in sorted(newest.iterdir()):
        content = file.read_bytes()
        for position in range(len(content)):
            damaged = bytearray(content)
            damaged[position] ^= 1 << (position % 8)
            file.write_bytes(damaged)
            with pytest.raises(InputError, match=newest.name) as caught:
                every_step(tmp_path).latest("test")
            assert file.name == "manifest.json" or str(file) in str(caught.value)
            flips += 1
        file.write_bytes(content)
    assert flips > 1000
    assert every_step(tmp_path).latest("test") is not None


@pytest.mark.parametrize("name", ["state.safetensors", "position.json", "manifest.json"])
def test_a_checkpoint_that_lacks_or_lost_the_end_of_a_file_is_refused(
    tmp_path: Path, name: str
) -> None:
    run_net(Net(), checkpoints=every_step(tmp_path))
    file = tmp_path / "test-000003-00000000" / name
    file.write_bytes(file.read_bytes().rstrip()[:-1])
    with pytest.raises(InputError, match=name):
        every_step(tmp_path).latest("test")
    file.unlink()
    with pytest.raises(InputError, match=f"{name} is missing"):
        every_step(tmp_path).latest("test")


def test_training_refuses_a_damaged_checkpoint_and_goes_on_once_it_is_deleted(
    tmp_path: Path,
) -> None:
    with pytest.raises(Stop):
        run_net(Net(), checkpoints=every_step(tmp_path), progress=StopAfter(9))
    newest = sorted(tmp_path.iterdir())[-1]
    (newest / "position.json").write_text("{}")
    with pytest.raises(InputError, match=f"delete {newest}"):
        run_net(Net(), checkpoints=every_step(tmp_path))
    for file in newest.iterdir():
        file.unlink()
    newest.rmdir()
    resumed, whole = Net(), Net()
    run_net(resumed, checkpoints=every_step(tmp_path))
    run_net(whole)
    assert fingerprint(resumed) == fingerprint(whole)


def rewrite(directory: Path, change: Callable[[dict[str, Any], dict[str, Tensor]], None]) -> None:
    """Change the newest checkpoint as someone would who knows how its sums are made."""
    newest = sorted(directory.iterdir())[-1]
    position = json.loads((newest / "position.json").read_text())
    tensors = load((newest / "state.safetensors").read_bytes())
    change(position, tensors)
    files = {
        "state.safetensors": storage.to_tensor_bytes(tensors),
        "position.json": storage.to_json_bytes(position),
    }
    shutil.rmtree(newest)
    storage.commit_directory(newest, files)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda p, t: p.pop("history"), "lacks history"),
        (lambda p, t: p.update(epoch="1"), "epoch='1' should be int"),
        (lambda p, t: p.update(epoch=7), "the history has 1 epochs"),
        (lambda p, t: p.update(step=-1), "position.step=-1 should be 0 or more"),
        (lambda p, t: p["history"][0].pop("lr"), "history of the checkpoint lacks lr"),
        (lambda p, t: p.update(terms=[*p["terms"], "more"]), "lacks the sum of a term"),
        (lambda p, t: p.update(terms=p["terms"][1:]), "it holds something else, 'sum.fit'"),
        (lambda p, t: t.pop("module.linear.weight"), "it lacks 'module.linear.weight'"),
        (lambda p, t: t.pop("momentum.linear.bias"), "it lacks 'momentum.linear.bias'"),
        (lambda p, t: t.update(other=t["sum.fit"]), "it holds something else, 'other'"),
        (lambda p, t: t.update({"module.linear.bias": t["sum.fit"]}), "it holds () in module.lin"),
        (lambda p, t: t["module.linear.bias"].fill_(torch.nan), "NaN or infinite values"),
        (lambda p, t: t["sum.fit"].fill_(torch.nan), "NaN or infinite values in sum.fit"),
    ],
)
def test_a_checkpoint_with_the_right_sums_and_other_content_is_refused(
    tmp_path: Path,
    change: Callable[[dict[str, Any], dict[str, Tensor]], None],
    words: str,
) -> None:
    with pytest.raises(Stop):
        run_net(Net(), checkpoints=every_step(tmp_path), progress=StopAfter(STEPS + 3))
    rewrite(tmp_path, lambda position, tensors: None)
    every_step(tmp_path).latest("test")  # or the sums alone would be refused below
    rewrite(tmp_path, change)
    net = Net()
    before = fingerprint(net)
    with pytest.raises(InputError, match=re.escape(words)):
        run_net(net, checkpoints=every_step(tmp_path))
    assert fingerprint(net) == before


def test_a_checkpoint_whose_manifest_names_no_file_is_refused(tmp_path: Path) -> None:
    storage.commit_directory(tmp_path / "test-000001-00000000", {})
    with pytest.raises(InputError, match="holds other files; delete "):
        run_net(Net(), checkpoints=every_step(tmp_path))


def test_a_checkpoint_of_another_configuration_is_refused(tmp_path: Path) -> None:
    run_net(Net(), checkpoints=every_step(tmp_path, "a"))
    with pytest.raises(InputError, match="another configuration"):
        run_net(Net(), checkpoints=every_step(tmp_path, "b"))


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"rows": 5}, r"it began with 6 of shape \(2,\), there are 5 of shape \(2,\) now"),
        ({"shape": [3]}, r"it began with 6 of shape \(2,\), there are 6 of shape \(3,\) now"),
        ({"sha256": "d"}, "as many as before, but not the same"),
        ({"labels": "e"}, "the labels or the names of the classes are others"),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(
    tmp_path: Path, changes: dict[str, object], words: str
) -> None:
    data = {"rows": 6, "shape": [2], "sha256": "b", "labels": "c"}
    checkpoints = every_step(tmp_path)
    checkpoints.data = data
    run_net(Net(), checkpoints=checkpoints)
    assert checkpoints.latest("test") is not None
    checkpoints.data = {**data, **changes}
    with pytest.raises(InputError, match=f"belongs to other data: {words}; .* delete {tmp_path} "):
        run_net(Net(), checkpoints=checkpoints)


def test_a_checkpoint_that_does_not_tell_its_data_is_refused(tmp_path: Path) -> None:
    run_net(Net(), checkpoints=every_step(tmp_path))
    checkpoints = every_step(tmp_path)
    checkpoints.data = {"rows": 6}
    with pytest.raises(InputError, match="with which it began is not recorded"):
        checkpoints.latest("test")


def test_every_try_knows_its_data(tmp_path: Path) -> None:
    checkpoints = every_step(tmp_path)
    checkpoints.data = {"rows": 3}
    run_net(Net(), checkpoints=checkpoints.of_try(1))
    assert checkpoints.of_try(1).latest("test") is not None
    checkpoints.data = {"rows": 4}
    with pytest.raises(InputError, match="belongs to other data"):
        checkpoints.of_try(1).latest("test")

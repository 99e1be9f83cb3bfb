"""Checkpoints: when they are written, which are kept, and what is refused."""

import signal
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
from conftest import Stop, StopAfter, fingerprint, timeless
from test_loop import OPTIM, STEPS, Net, every_step, kept, run_net

from ncdwf.errors import InputError
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.loop import Quiet


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

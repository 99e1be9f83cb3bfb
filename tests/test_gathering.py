"""Many picture files to one tensor: a look at their headers, decoding, worker processes."""

import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image
from test_folder import GONE, save, touch, write

from ncdwf.data import gathering
from ncdwf.data.decoding import Skipped, read_header, read_pixels
from ncdwf.data.gathering import ALONE, Glance, decode, glance
from ncdwf.errors import InputError, StorageError

SHAPE = (1, 4, 4)
MANY = ALONE + 44


def numbered(place, num_images):
    """Write pictures of which number i has the grey value i modulo 256 all over."""
    values = [np.full((4, 4), i % 256, np.uint8) for i in range(num_images)]
    return [save(place / f"{i:04d}.png", pixels) for i, pixels in enumerate(values)]


def values(images):
    """Return the grey value of each picture of one colour."""
    assert torch.equal(images, images[:, :, :1, :1].expand_as(images))
    return images[:, 0, 0, 0].tolist()


@pytest.fixture(scope="module")
def many(tmp_path_factory):
    return numbered(tmp_path_factory.mktemp("many"), MANY)


class Record:
    """Progress that remembers what it heard, and which worker processes there were."""

    def __init__(self):
        self.heard, self.workers = [], {}

    def start(self, task, num_images, done):
        self.heard.append((task, num_images, done))

    def advance(self, num_images):
        self.heard.append(num_images)
        self.workers |= {process.pid: process for process in multiprocessing.active_children()}

    def stop(self):
        self.heard.append("stop")


# A look at the headers


def test_a_glance_tells_the_median_side_and_colour(tmp_path):
    sizes = [(10, 90), (20, 20), (70, 30)]
    grey = [save(tmp_path / f"{s}.png", np.zeros(s, np.uint8)) for s in sizes]
    assert glance([*grey, tmp_path / "gone.png"]) == Glance(median_side=20, has_colour=False)
    colour = save(tmp_path / "colour.png", np.zeros((20, 20, 3), np.uint8))
    assert glance([*grey, colour]) == Glance(median_side=20, has_colour=True)
    with pytest.raises(InputError, match=r"none of the files could be read .*gone\.png cannot"):
        glance([tmp_path / "gone.png"])


@pytest.mark.parametrize("form", ["webp", "gif", "lossy"])
def test_where_headers_do_not_tell_the_picture_does(tmp_path, form):
    drawn = np.random.default_rng(0)
    ending, options = ("webp", {"quality": 30}) if form == "lossy" else (form, {"lossless": True})
    pixels = drawn.integers(0, 256, (20, 30), np.uint8)
    for name, picture in (
        ("grey", pixels),
        ("colour", np.stack([pixels, pixels, 255 - pixels], 2)),
    ):
        Image.fromarray(picture).convert("RGB").save(tmp_path / f"{name}.{ending}", **options)
    grey, colour = (tmp_path / f"{name}.{ending}" for name in ("grey", "colour"))
    assert read_header(grey).has_colour is None
    assert not glance([grey]).has_colour
    assert glance([grey, colour, tmp_path / "gone.webp"]).has_colour


def test_faint_colour_is_colour_and_transparency_is_none(tmp_path):
    faint = np.full((20, 30, 3), 100, np.uint8)
    faint[0, 0, 2] += 10
    Image.fromarray(faint).save(tmp_path / "faint.webp", lossless=True)
    assert glance([tmp_path / "faint.webp"]).has_colour
    # What lies below transparency is not seen.
    hidden = np.dstack([faint, np.full((20, 30), 255, np.uint8)])
    hidden[0, 0] = (200, 0, 0, 0)
    Image.fromarray(hidden).save(tmp_path / "hidden.webp", lossless=True, exact=True)
    assert not glance([tmp_path / "hidden.webp"]).has_colour


def test_few_pictures_are_looked_at_and_none_where_a_header_tells(tmp_path, monkeypatch):
    grey = np.zeros((4, 4, 3), np.uint8)
    paths = [tmp_path / f"{number:03d}.webp" for number in range(40)]
    for path in paths:
        Image.fromarray(grey).save(path, lossless=True)
    looked = []
    look = gathering.shows_colour
    monkeypatch.setattr(gathering, "shows_colour", lambda path: looked.append(path) or look(path))
    assert not glance(paths).has_colour
    assert looked == paths[::3]
    looked.clear()
    Image.fromarray(grey).save(tmp_path / "told.png")
    assert glance([*paths, tmp_path / "told.png"]).has_colour
    assert looked == []


def test_a_picture_that_is_cut_off_is_not_looked_at(tmp_path):
    drawn = np.random.default_rng(0).integers(0, 256, (40, 40, 3), np.uint8)
    cut, whole = tmp_path / "cut.webp", save(tmp_path / "grey.png", drawn[..., 0].copy())
    Image.fromarray(drawn).save(cut, lossless=True)
    cut.write_bytes(cut.read_bytes()[:1000])
    assert glance([cut, whole]) == Glance(median_side=40, has_colour=False)


def test_a_glance_is_spread_evenly(tmp_path, monkeypatch):
    looked = []
    read = gathering.read_header
    monkeypatch.setattr(gathering, "read_header", lambda path: looked.append(path) or read(path))
    paths = numbered(tmp_path, 11)
    glance(paths, limit=4)
    assert looked == paths[::3]
    looked.clear()
    glance(paths, limit=11)
    assert looked == paths


# Decoding


def test_few_pictures_are_decoded_in_this_process(tmp_path):
    record = Record()
    decoded = decode(numbered(tmp_path, 20), SHAPE, num_workers=2, progress=record)
    assert decoded.images.dtype == torch.uint8
    assert decoded.images.shape == (20, *SHAPE)
    assert values(decoded.images) == list(range(20))
    assert (decoded.kept, decoded.skipped) == (list(range(20)), ())
    assert record.workers == {}
    assert record.heard[0] == ("read", 20, 0)
    assert record.heard[-1] == "stop"
    assert sum(record.heard[1:-1]) == 20


def test_many_pictures_are_decoded_by_worker_processes(many):
    record = Record()
    paths = [*many[:100], many[0].with_name("gone.png"), *many[100:]]
    decoded = decode(paths, SHAPE, num_workers=2, progress=record)
    assert len(record.workers) == 2
    assert os.getpid() not in record.workers
    assert values(decoded.images) == [i % 256 for i in range(MANY)]
    assert decoded.kept == [i for i in range(MANY + 1) if i != 100]
    assert decoded.skipped == (Skipped(paths[100], GONE),)
    assert record.heard[0] == ("read", MANY + 1, 0)
    assert sum(record.heard[1:-1]) == MANY + 1
    assert multiprocessing.active_children() == []


def test_one_worker_is_this_process(many):
    record = Record()
    decoded = decode(many, SHAPE, num_workers=1, progress=record)
    assert record.workers == {}
    assert values(decoded.images) == [i % 256 for i in range(MANY)]


def sum_of(paths, answers):
    answers.put(int(decode(paths, SHAPE, num_workers=2).images.sum()))


def test_a_daemonic_process_decodes_alone(many):
    context = multiprocessing.get_context("spawn")
    answers = context.SimpleQueue()
    process = context.Process(target=sum_of, args=(many, answers), daemon=True)
    process.start()
    process.join(120)
    assert process.exitcode == 0
    assert answers.get() == 16 * sum(i % 256 for i in range(MANY))


def test_pictures_are_those_of_the_decoder(tmp_path):
    pixels = np.random.default_rng(0).integers(0, 256, (9, 14, 3), dtype=np.uint8)
    path = save(tmp_path / "x.png", pixels)
    images = decode([path], (3, 5, 6)).images
    assert np.array_equal(images[0].numpy(), read_pixels(path, (3, 5, 6)))


@pytest.mark.parametrize("broken", [[0], [19], [3, 4, 5, 11], [*range(0, 20, 2)], [*range(19)]])
def test_what_cannot_be_read_leaves_no_gap(tmp_path, monkeypatch, broken):
    monkeypatch.setattr(gathering, "ROWS_AT_ONCE", 3)
    paths = numbered(tmp_path, 20)
    for row in broken:
        paths[row].unlink()
    decoded = decode(paths, SHAPE)
    kept = [row for row in range(20) if row not in broken]
    assert values(decoded.images) == kept == decoded.kept
    assert decoded.skipped == tuple(Skipped(paths[row], GONE) for row in broken)


def test_strict_decoding_names_the_first_that_cannot_be_read(tmp_path):
    paths = numbered(tmp_path, 20)
    paths[7].unlink()
    paths[9].unlink()
    message = rf"0007\.png cannot be read as a picture: {GONE} \(2 of 20 cannot be read\)"
    with pytest.raises(InputError, match=message):
        decode(paths, SHAPE, strict=True)


def test_nothing_to_decode_is_said(tmp_path):
    touch(tmp_path / "1.png")
    with pytest.raises(InputError, match=r"none of the files could .*1\.png .*: it is empty"):
        decode([tmp_path / "1.png", tmp_path / "2.png"], SHAPE)
    for empty in (lambda: decode([], SHAPE), lambda: glance([])):
        with pytest.raises(InputError, match="there are no pictures to read"):
            empty()
    with pytest.raises(InputError, match="num_workers is 0; 1 or more is accepted"):
        decode([tmp_path / "1.png"], SHAPE, num_workers=0)


@pytest.mark.parametrize("shape", [(2, 4, 4), (1, 0, 4), (3, 4, -1)])
def test_shapes_that_no_picture_has_are_refused(tmp_path, shape):
    with pytest.raises(InputError, match="1 or 3 channels, height, width are accepted"):
        decode(numbered(tmp_path, 1), shape)


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a list of mapped files")
def test_pictures_lie_in_a_mapped_file_that_goes_with_them(tmp_path, monkeypatch):
    scratch = tmp_path / "scratch"
    scratch.mkdir()
    monkeypatch.setattr(tempfile, "tempdir", str(scratch))
    decoded = decode(numbered(tmp_path / "pictures", 20), SHAPE)
    part = decoded.images[3:5]
    del decoded
    assert values(part) == [3, 4]
    assert str(scratch) in Path("/proc/self/maps").read_text()
    assert list(scratch.iterdir()) == []
    del part
    assert str(scratch) not in Path("/proc/self/maps").read_text()


def test_a_disk_that_is_too_small_is_found_before_decoding(tmp_path, monkeypatch):
    def full(descriptor, first, num_bytes):
        assert num_bytes == 20 * 16
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "posix_fallocate", full, raising=False)
    record = Record()
    with pytest.raises(StorageError, match="No space left on device; the variable TMPDIR names"):
        decode(numbered(tmp_path, 20), SHAPE, progress=record)
    assert record.heard == []


def test_a_folder_for_temporary_files_that_is_gone_is_named(tmp_path, monkeypatch):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path / "gone"))
    with pytest.raises(StorageError, match=r"to .*gone: No such file or directory; .* TMPDIR"):
        decode(numbered(tmp_path, 2), SHAPE)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_disk_that_fills_up_under_the_workers_is_one_line(many, monkeypatch):
    @contextmanager
    def full(num_bytes):
        with Path("/dev/full").open("r+b", buffering=0) as file:
            yield file

    monkeypatch.setattr(gathering, "_scratch", full)
    with pytest.raises(StorageError, match="No space left on device; the variable TMPDIR names"):
        decode(many, SHAPE, num_workers=2)
    assert multiprocessing.active_children() == []


def test_a_killed_worker_is_one_line(many):
    class Kill(Record):
        def advance(self, num_images):
            super().advance(num_images)
            for pid in self.workers:
                os.kill(pid, signal.SIGKILL)

    with pytest.raises(
        InputError, match="was killed, as happens when memory runs out; fewer than 2"
    ):
        decode(many * 20, SHAPE, num_workers=2, progress=Kill())
    assert multiprocessing.active_children() == []


def test_workers_end_at_once_when_nobody_waits_for_them(many):
    class Stop(Record):
        def advance(self, num_images):
            super().advance(num_images)
            raise KeyboardInterrupt

    stop = Stop()
    with pytest.raises(KeyboardInterrupt):
        decode(many * 20, SHAPE, num_workers=2, progress=stop)
    assert [worker.exitcode for worker in stop.workers.values()] == [-signal.SIGTERM] * 2


# A script as people write them: nothing keeps a second import of it from starting all over.
SCRIPT = """
import multiprocessing, sys, time
from pathlib import Path
from ncdwf.data.folder import find_pictures
from ncdwf.data.gathering import decode

class Wait:
    def start(self, *_): pass
    def stop(self): pass
    def advance(self, num_images):
        for worker in multiprocessing.active_children():
            maps = Path(f"/proc/{worker.pid}/maps").read_text()
            print(worker.pid, "with torch" if "libtorch" in maps else "bare")
        print("end", flush=True)
        time.sleep(60)

print("begin")
decode(find_pictures([Path(sys.argv[1])]), (1, 4, 4), num_workers=2, progress=Wait())
"""


def is_running(pid):
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] not in "ZX"
    except FileNotFoundError:
        return False


@pytest.mark.skipif(not Path("/proc/self/maps").exists(), reason="needs a list of processes")
@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_workers_are_bare_and_end_with_the_program(many, tmp_path, sent):
    script = write(tmp_path / "script.py", SCRIPT)
    with subprocess.Popen(
        [sys.executable, script, many[0].parent],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    ) as program:
        lines = [program.stdout.readline().split() for _ in range(4)]
        try:
            assert [line[-1] for line in lines] == ["begin", "bare", "bare", "end"]
            workers = [int(line[0]) for line in lines[1:3]]
            if sent == signal.SIGINT:  # Ctrl-C in a terminal reaches all
                time.sleep(0.5)  # until they wait for more
                for pid in workers:
                    os.kill(pid, sent)
                time.sleep(0.3)
                assert all(map(is_running, workers))
        finally:
            os.kill(program.pid, sent)
        errors = program.communicate(timeout=20)[1]
    assert program.returncode == -sent
    assert errors.count("Traceback") == errors.count("KeyboardInterrupt") == (sent == signal.SIGINT)
    deadline = time.monotonic() + 10
    while any(map(is_running, workers)) and time.monotonic() < deadline:
        time.sleep(0.02)
    assert not any(map(is_running, workers))


def test_threads_that_start_workers_leave_the_main_module_alone():
    main = sys.modules["__main__"]
    first_is_in, first_is_out = threading.Event(), threading.Event()

    def first():
        with gathering._bare_start():
            first_is_in.set()
            time.sleep(0.2)  # the second comes in meanwhile, if it can
        first_is_out.set()

    def second():
        first_is_in.wait()
        with gathering._bare_start():
            first_is_out.wait()

    threads = [threading.Thread(target=first), threading.Thread(target=second)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sys.modules["__main__"] is main

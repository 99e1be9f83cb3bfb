import errno
import multiprocessing
import os
import signal
import subprocess
import sys
import tempfile
import time
import unicodedata
from contextlib import contextmanager
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
import torch
from PIL import Image

from ncdwf.data import folder
from ncdwf.data.decoding import Skipped, read_pixels
from ncdwf.data.folder import (
    ALONE,
    Glance,
    Listing,
    decode,
    find_pictures,
    glance,
    labelled_folder,
    labelled_table,
    unlabelled,
)
from ncdwf.errors import InputError, StorageError

SHAPE = (1, 4, 4)
MANY = ALONE + 44
GONE = "there is no such file"


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


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


# Finding


def test_folders_are_searched_and_files_taken_as_they_are(tmp_path):
    inner = tmp_path / "b" / "inner"
    touch(*(inner / name for name in ("z.PNG", "a.jpeg", "notes.txt")))
    (tmp_path / "b" / "folder.png").mkdir()
    odd = tmp_path / "odd.name"
    touch(odd)
    assert find_pictures([odd, tmp_path / "b"]) == [odd, inner / "a.jpeg", inner / "z.PNG"]
    listing = unlabelled([odd, tmp_path / "b"])
    assert listing == Listing((odd, inner / "a.jpeg", inner / "z.PNG"), None)


def test_a_file_is_taken_once_into_a_pool(tmp_path, monkeypatch):
    first, second = tmp_path / "a" / "1.png", tmp_path / "a" / "b" / "2.png"
    touch(first, second)
    (tmp_path / "link.png").symlink_to(second)
    monkeypatch.chdir(tmp_path)
    ways = [tmp_path / "a", second.parent, Path("a/b/../1.png"), Path("link.png"), Path("a")]
    assert unlabelled(ways).paths == (first, second)


def test_links_to_folders_are_followed(tmp_path):
    real, pool = tmp_path / "real", tmp_path / "pool"
    touch(real / "1.png", real / "inner" / "2.png", pool / "0.png")
    (pool / "camera").symlink_to(real)
    (real / "round").symlink_to(real)  # a circle
    (real / "inner" / "again").symlink_to(pool)
    assert find_pictures([pool]) == [
        pool / name for name in ("0.png", "camera/1.png", "camera/inner/2.png")
    ]


def test_a_link_to_nothing_is_named_with_what_cannot_be_read(tmp_path):
    save(tmp_path / "1.png", np.zeros((4, 4), np.uint8))
    (tmp_path / "2.png").symlink_to(tmp_path / "gone.png")
    found = find_pictures([tmp_path])
    assert found == [tmp_path / "1.png", tmp_path / "2.png"]
    (skipped,) = decode(found, (1, 4, 4)).skipped
    assert "2.png" in str(skipped)


def test_a_folder_that_nobody_may_read_is_named(tmp_path, monkeypatch):
    touch(tmp_path / "1.png", tmp_path / "closed" / "2.png")
    scan = os.scandir

    def closed(place):
        if Path(place).name == "closed":
            raise PermissionError(13, "Permission denied", str(place))
        return scan(place)

    monkeypatch.setattr(os, "scandir", closed)
    with pytest.raises(InputError, match=r"closed cannot be searched: Permission denied"):
        find_pictures([tmp_path])


def test_what_is_hidden_is_passed_over_unless_it_is_named(tmp_path):
    place = tmp_path / ".cache"
    seen = place / "seen.png"
    touch(seen, place / "._seen.png", place / ".thumbs" / "a" / "x.png", place / "__MACOSX/x.png")
    assert find_pictures([place]) == [seen]
    assert find_pictures([place / "._seen.png"]) == [place / "._seen.png"]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere is neither a file nor a folder"):
        find_pictures([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"no pictures found; files ending in \.jpg, "):
        find_pictures([tmp_path])
    with pytest.raises(InputError, match="cannot be searched: File name too long"):
        find_pictures([tmp_path / ("x" * 500)])


@pytest.mark.parametrize("name", ["t.csv", "t.PARQUET"])
def test_a_table_is_no_picture(tmp_path, name):
    touch(tmp_path / name, tmp_path / "a.png")
    with pytest.raises(InputError, match=f"{name} is a table; 'ncdwf learn' takes tables, here"):
        unlabelled([tmp_path / "a.png", tmp_path / name])
    assert find_pictures([tmp_path]) == [tmp_path / "a.png"]  # inside a folder it is passed over
    (tmp_path / "folder.csv").mkdir()
    touch(tmp_path / "folder.csv" / "a.png")
    assert len(find_pictures([tmp_path / "folder.csv"])) == 1


# Labels from folders


def test_the_first_folder_is_the_class(tmp_path):
    cat, deep, dog = (tmp_path / name for name in ("cat/1.png", "cat/more/2.jpg", "dog/1.png"))
    touch(dog, cat, deep, tmp_path / ".DS_Store", tmp_path / "README.txt")
    touch(tmp_path / "__MACOSX" / "cat" / "1.png", tmp_path / ".cache" / "x.png")
    assert labelled_folder(tmp_path) == Listing((cat, deep, dog), ("cat", "cat", "dog"))


def test_names_of_classes_have_their_accents_in_one_piece(tmp_path):
    parted = unicodedata.normalize("NFD", "café")
    assert parted != "café"
    touch(tmp_path / parted / "1.png", tmp_path / "tea" / "1.png")
    assert labelled_folder(tmp_path).labels == ("café", "tea")
    touch(tmp_path / "café" / "1.png")
    if len(list(tmp_path.iterdir())) == 3:  # some file systems take the two for one
        with pytest.raises(InputError, match="has 2 folders of class 'café'; one is accepted"):
            labelled_folder(tmp_path)


FOLDERS = {
    "no sub-folder": (["1.png"], "has no sub-folders; one a class is accepted"),
    "nothing": ([], "has no sub-folders"),
    "one class": (["a/1.png", "a/b/2.png"], "has one class, 'a'; two or more are accepted"),
    "an empty class": (["a/1.png", "b/x.txt"], "class 'b' in .* has no pictures; files ending in"),
    "stray pictures": (["a/1.png", "b/1.png", "2.png"], r"2\.png lies beside the class folders"),
    "no pictures": (["a/x.txt", "b/y.txt"], "no pictures found below .*; files ending in"),
}


@pytest.mark.parametrize("case", FOLDERS)
def test_what_is_wrong_with_a_folder_of_classes_is_said(tmp_path, case):
    files, message = FOLDERS[case]
    touch(*(tmp_path / name for name in files))
    with pytest.raises(InputError, match=message) as caught:
        labelled_folder(tmp_path)
    assert str(tmp_path) in str(caught.value)


def test_a_file_in_two_classes_is_refused(tmp_path):
    touch(tmp_path / "a" / "1.png", tmp_path / "a" / "2.png", tmp_path / "b" / "3.png")
    (tmp_path / "a" / "4.png").symlink_to(tmp_path / "a" / "1.png")
    assert labelled_folder(tmp_path).labels == ("a", "a", "b")
    (tmp_path / "b" / "1.png").symlink_to(tmp_path / "a" / "1.png")
    with pytest.raises(InputError, match=r"of class 'b' and of class 'a'; a picture has one label"):
        labelled_folder(tmp_path)


def test_classes_need_a_folder(tmp_path):
    with pytest.raises(InputError, match="nowhere is not a folder; one with a sub-folder a class"):
        labelled_folder(tmp_path / "nowhere")


# Labels from tables


def write(path, text):
    path.write_bytes(text if isinstance(text, bytes) else text.encode())
    return path


def test_a_csv_table_names_pictures_and_classes(tmp_path):
    text = f'\ufefflabel,size,path\r\n cat ,1,a/1.png\r\n"dog, wild",2,{tmp_path / "2.png"}\r\n'
    listing = labelled_table(write(tmp_path / "t.CSV", text))
    assert listing.paths == (tmp_path / "a" / "1.png", tmp_path / "2.png")
    assert listing.labels == ("cat", "dog, wild")


def test_a_file_that_a_table_lists_again_is_taken_once(tmp_path):
    (tmp_path / "link.png").symlink_to("1.png")
    text = f"path,label\n1.png,a\n2.png,b\n./x/../1.png,a\nlink.png, a\n{tmp_path}/2.png,b\n\0,b\n"
    listing = labelled_table(write(tmp_path / "t.csv", text))
    assert listing.paths == (tmp_path / "1.png", tmp_path / "2.png", tmp_path / "\0")
    assert listing.labels == ("a", "b", "b")


def test_columns_can_be_named(tmp_path):
    table = write(tmp_path / "t.csv", "path,file,kind\n0,1.png,a\n0,2.png,b\n")
    listing = labelled_table(table, path_column="file", label_column="kind")
    assert listing == Listing((tmp_path / "1.png", tmp_path / "2.png"), ("a", "b"))


def test_a_parquet_table_names_pictures_and_classes(tmp_path):
    labels = pyarrow.array(["cafe\u0301", "tea"]).dictionary_encode()
    table = pyarrow.table({"path": ["1.png", "b/2.png"], "label": labels, "other": [1.5, 2.5]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    listing = labelled_table(tmp_path / "t.parquet")
    assert listing == Listing((tmp_path / "1.png", tmp_path / "b" / "2.png"), ("café", "tea"))
    table = pyarrow.table({"path": ["1.png", "2.png"], "label": [7, 8]})
    pyarrow.parquet.write_table(table, tmp_path / "t.parquet")
    assert labelled_table(tmp_path / "t.parquet").labels == ("7", "8")


TABLES = {
    "no header": ("", "needs one column 'path'; its columns are: none"),
    "missing column": ("path,class\n1,a\n", "needs one column 'label'; its .* 'path', 'class'"),
    "semicolons": ("path;label\n1;a\n", "needs one column 'path'; its columns are: 'path;label'"),
    "a column twice": ("path,label,label\n1,a,b\n", "needs one column 'label'"),
    "no rows": ("path,label\n", "has no rows below its header"),
    "empty label": ("path,label\n1,a\n2, \n", "row 2 below the header of .* has no label"),
    "short row": ("path,label\n1,a\n2\n", "row 2 below the header of .* has no label"),
    "long row": ("path,label\n1,a,b\n", "row 1 below the header of .* has more cells"),
    "empty path": ("path,label\n,a\n", "row 1 below the header of .* has no path"),
    "contradiction": ("path,label\n1,a\n2,b\n1,b\n", "lists 1 twice, as 'a' and as 'b'; a pic"),
    "two ways": ("path,label\n1,a\n2,b\nx/../1,b\n", r"lists x/\.\./1 twice, as 'a' and as 'b'"),
    "one class": ("path,label\n1,a\n2,a\n", "has one class, 'a'; two or more are accepted"),
    "latin-1": ("path,label\n1,é\n".encode("latin-1"), "is not UTF-8, at byte 13; save it as"),
    "open quote": ('path,label\n1,"a\n', "is not a valid CSV table: "),
}


@pytest.mark.parametrize("case", TABLES)
def test_what_is_wrong_with_a_csv_table_is_said(tmp_path, case):
    text, message = TABLES[case]
    with pytest.raises(InputError, match=message) as caught:
        labelled_table(write(tmp_path / "t.csv", text))
    assert str(tmp_path / "t.csv") in str(caught.value)
    assert "\n" not in str(caught.value)


PARQUET = {
    "missing column": ({"path": ["1"], "class": ["a"]}, "needs one column 'label'; its .* 'class'"),
    "no rows": ({"path": [], "label": []}, "has no rows"),
    "null": ({"path": ["1", "2"], "label": ["a", None]}, "row 2 below the header .* has no label"),
    "numbers": ({"path": ["1"], "label": [0.5]}, "a float as path or label; text is accepted"),
    "bytes": ({"path": [{"bytes": b"x"}], "label": ["a"]}, "a dict as path or label; text is"),
}


@pytest.mark.parametrize("case", PARQUET)
def test_what_is_wrong_with_a_parquet_table_is_said(tmp_path, case):
    columns, message = PARQUET[case]
    pyarrow.parquet.write_table(pyarrow.table(columns), tmp_path / "t.parquet")
    with pytest.raises(InputError, match=message):
        labelled_table(tmp_path / "t.parquet")


def test_what_is_no_table_is_refused(tmp_path):
    with pytest.raises(InputError, match=r"t\.xlsx ends in neither \.csv nor \.parquet"):
        labelled_table(write(tmp_path / "t.xlsx", "path,label\n1,a\n"))
    with pytest.raises(InputError, match=r"t\.parquet is not a valid Parquet table: "):
        labelled_table(write(tmp_path / "t.parquet", "path,label\n1,a\n"))
    with pytest.raises(InputError, match=r"nowhere\.csv is missing"):
        labelled_table(tmp_path / "nowhere.csv")


def test_parquet_without_pyarrow_says_what_to_install(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(InputError, match=r"needs pyarrow: pip install 'ncdwf\[parquet\]'"):
        labelled_table(tmp_path / "t.parquet")


# A look at the headers


def test_a_glance_tells_the_median_side_and_colour(tmp_path):
    sizes = [(10, 90), (20, 20), (70, 30)]
    grey = [save(tmp_path / f"{s}.png", np.zeros(s, np.uint8)) for s in sizes]
    assert glance([*grey, tmp_path / "gone.png"]) == Glance(median_side=20, has_colour=False)
    colour = save(tmp_path / "colour.png", np.zeros((20, 20, 3), np.uint8))
    assert glance([*grey, colour]) == Glance(median_side=20, has_colour=True)
    with pytest.raises(InputError, match=r"none of the files could be read .*gone\.png cannot"):
        glance([tmp_path / "gone.png"])


def test_a_glance_is_spread_evenly(tmp_path, monkeypatch):
    looked = []
    read = folder.read_header
    monkeypatch.setattr(folder, "read_header", lambda path: looked.append(path) or read(path))
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
    monkeypatch.setattr(folder, "ROWS_AT_ONCE", 3)
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

    monkeypatch.setattr(folder, "_scratch", full)
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
from ncdwf.data.folder import decode, find_pictures

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

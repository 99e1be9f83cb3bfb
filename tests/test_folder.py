import re

import numpy as np
import pytest
import torch
from PIL import Image

from ncdwf.data.folder import find_pictures, read_picture
from ncdwf.errors import InputError

COLOURS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)


def save(path, pixels=COLOURS, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


def test_folders_are_searched_and_files_taken_as_they_are(tmp_path):
    inner = tmp_path / "b" / "inner"
    inner.mkdir(parents=True)
    for name in ("z.PNG", "a.jpeg", "notes.txt"):
        (inner / name).touch()
    (tmp_path / "b" / "folder.png").mkdir()
    odd = tmp_path / "odd.name"
    odd.touch()
    assert find_pictures([odd, tmp_path / "b"]) == [odd, inner / "a.jpeg", inner / "z.PNG"]


def test_what_is_not_there_is_named(tmp_path):
    with pytest.raises(InputError, match="nowhere is neither a file nor a folder"):
        find_pictures([tmp_path / "nowhere"])
    with pytest.raises(InputError, match=r"no pictures found; files ending in \.jpg, "):
        find_pictures([tmp_path])


@pytest.mark.parametrize("suffix", ["png", "bmp", "tiff", "webp"])
def test_a_picture_of_the_right_size_comes_in_unchanged(tmp_path, suffix):
    options = {"lossless": True} if suffix == "webp" else {}
    picture = read_picture(save(tmp_path / f"x.{suffix}", **options), 3, 4, 6)
    assert picture.dtype == torch.uint8
    assert np.array_equal(picture.numpy(), COLOURS.transpose(2, 0, 1))


@pytest.mark.parametrize("suffix", ["jpg", "gif"])
def test_lossy_pictures_come_in_nearly_unchanged(tmp_path, suffix):
    grey = np.full((4, 6), 100, np.uint8)
    picture = read_picture(save(tmp_path / f"x.{suffix}", grey), 3, 4, 6)
    assert (picture.int() - 100).abs().max() <= 2


def test_grey_and_colour_are_converted_into_each_other(tmp_path):
    grey = np.arange(24, dtype=np.uint8).reshape(4, 6)
    colour = read_picture(save(tmp_path / "grey.png", grey), 3, 4, 6)
    assert np.array_equal(colour.numpy(), np.stack([grey] * 3))
    red = np.zeros((4, 6, 3), np.uint8)
    red[..., 0] = 200
    # Luma of ITU-R 601-2: 0.299 of the red.
    assert set(read_picture(save(tmp_path / "red.png", red), 1, 4, 6).unique().tolist()) == {60}


def test_pictures_are_resized(tmp_path):
    halves = np.zeros((8, 4), np.uint8)
    halves[4:] = 255
    picture = read_picture(save(tmp_path / "x.png", halves), 1, 4, 2)
    assert picture.shape == (1, 4, 2)
    assert picture[0, 0].tolist() == [0, 0]
    assert picture[0, 3].tolist() == [255, 255]


def test_pictures_are_turned_upright(tmp_path):
    exif = Image.Exif()
    exif[0x0112] = 6  # orientation: the stored picture has to be turned clockwise by a quarter
    path = save(tmp_path / "x.png", exif=exif)
    upright = np.rot90(COLOURS, -1).transpose(2, 0, 1)
    assert np.array_equal(read_picture(path, 3, 6, 4).numpy(), upright)


@pytest.mark.parametrize("dtype", [np.uint16, np.int32, np.float32])
def test_more_than_eight_bits_are_refused_rather_than_clipped(tmp_path, dtype):
    path = save(tmp_path / "deep.tiff", np.full((4, 6), 40_000, dtype))
    with pytest.raises(InputError, match="more than 8 bits a channel"):
        read_picture(path, 1, 4, 6)


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"not a picture",
        b"\x89PNG\r\n\x1a\n",
        b"P6 2 2 255\n" + bytes(12),  # a format that is not accepted
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",  # never hand this to an interpreter
    ],
)
def test_what_is_no_picture_is_refused_in_one_line(tmp_path, content):
    path = tmp_path / "x.png"
    path.write_bytes(content)
    message = f"^{re.escape(str(path))} cannot be read as a picture: "
    with pytest.raises(InputError, match=message) as caught:
        read_picture(path, 3, 8, 8)
    assert "\n" not in str(caught.value)


def test_cut_pictures_are_refused(tmp_path):
    data = save(tmp_path / "x.png").read_bytes()
    for length in range(0, len(data) // 2, 5):
        (tmp_path / "cut.png").write_bytes(data[:length])
        with pytest.raises(InputError, match=r"cut\.png cannot be read"):
            read_picture(tmp_path / "cut.png", 3, 4, 6)


def test_a_decompression_bomb_is_refused(tmp_path, monkeypatch):
    path = save(tmp_path / "x.png")
    monkeypatch.setattr(Image, "MAX_IMAGE_PIXELS", 5)
    with pytest.raises(InputError, match="decompression bomb"):
        read_picture(path, 3, 4, 6)


def test_a_directory_is_refused(tmp_path):
    with pytest.raises(InputError, match="cannot be read as a picture"):
        read_picture(tmp_path, 3, 4, 6)

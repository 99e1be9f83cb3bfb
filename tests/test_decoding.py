import io
import os
import re
import struct
import subprocess
import sys
import zlib
from pathlib import Path

import numpy as np
import pytest
from PIL import Image, ImageFile

from ncdwf.data.decoding import Canvas, Header, Skipped, Unreadable, read_header, read_pixels
from ncdwf.errors import StorageError, printable

COLOURS = np.random.default_rng(0).integers(0, 256, (4, 6, 3), dtype=np.uint8)
CHANNELS_FIRST = COLOURS.transpose(2, 0, 1)
LOSSLESS = {"png": {}, "bmp": {}, "tiff": {}, "webp": {"lossless": True}}
SUFFIXES = [*LOSSLESS, "jpg", "gif"]
RED, BLUE = Image.new("RGB", (8, 8), (255, 0, 0)), Image.new("RGB", (8, 8), (0, 0, 255))


def save(path, pixels=COLOURS, **options):
    Image.fromarray(pixels).save(path, **options)
    return path


def tiff(path, data, *, size, bits, interpretation):
    """Write a TIFF by hand: kinds of grey that Pillow reads but does not write."""
    tags = {256: size[0], 257: size[1], 258: bits, 259: 1, 262: interpretation, 273: 8}
    tags |= {277: 1, 278: size[1], 279: len(data)}
    entries = b"".join(struct.pack("<HHII", tag, 4, 1, value) for tag, value in tags.items())
    directory = struct.pack("<H", len(tags)) + entries + bytes(4)
    path.write_bytes(struct.pack("<2sHI", b"II", 42, 8 + len(data)) + data + directory)
    return path


def refusal(path, shape=(3, 4, 6)):
    """Return why a file is refused; the line names the file."""
    with pytest.raises(Unreadable) as caught:
        read_pixels(path, shape)
    line = str(caught.value)
    assert "\n" not in line
    name = printable(str(path))
    assert line == f"{name} cannot be read as a picture: {caught.value.skipped.reason}"
    return caught.value.skipped.reason


@pytest.mark.parametrize("suffix", LOSSLESS)
def test_a_picture_of_the_right_size_comes_in_unchanged(tmp_path, suffix):
    pixels = read_pixels(save(tmp_path / f"x.{suffix}", **LOSSLESS[suffix]), (3, 4, 6))
    assert pixels.dtype == np.uint8
    assert np.array_equal(pixels, CHANNELS_FIRST)


@pytest.mark.parametrize("suffix", ["jpg", "gif"])
def test_lossy_pictures_come_in_nearly_unchanged(tmp_path, suffix):
    pixels = read_pixels(save(tmp_path / f"x.{suffix}", np.full((4, 6), 100, np.uint8)), (3, 4, 6))
    assert np.abs(pixels.astype(int) - 100).max() <= 2


def test_the_content_decides_on_the_format_and_not_the_name(tmp_path):
    path = save(tmp_path / "x.png").rename(tmp_path / "x.jpg")
    assert np.array_equal(read_pixels(path, (3, 4, 6)), CHANNELS_FIRST)


def test_grey_and_colour_are_converted_into_each_other(tmp_path):
    grey = np.arange(24, dtype=np.uint8).reshape(4, 6)
    colour = read_pixels(save(tmp_path / "grey.png", grey), (3, 4, 6))
    assert np.array_equal(colour, np.stack([grey] * 3))
    red = np.zeros((4, 6, 3), np.uint8)
    red[..., 0] = 200
    # Luma of ITU-R 601-2: 0.299 of the red.
    assert set(np.unique(read_pixels(save(tmp_path / "red.png", red), (1, 4, 6)))) == {60}


def test_bits_and_palettes_are_read_as_the_colours_they_stand_for(tmp_path):
    bits = Image.fromarray(np.array([[True, False]]))
    bits.save(tmp_path / "bits.png")
    assert read_pixels(tmp_path / "bits.png", (1, 1, 2)).tolist() == [[[255, 0]]]
    palette = Image.fromarray(np.array([[1, 0]], np.uint8))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.save(tmp_path / "palette.png")
    with Image.open(tmp_path / "palette.png") as file:
        assert file.mode == "P"
    expected = [[[40, 10]], [[50, 20]], [[60, 30]]]
    assert read_pixels(tmp_path / "palette.png", (3, 1, 2)).tolist() == expected


def test_cmyk_becomes_rgb(tmp_path):
    inks = np.array([[[0, 255, 255, 0], [0, 0, 0, 255]]], np.uint8)
    Image.fromarray(inks, "CMYK").save(tmp_path / "x.tiff")
    assert read_pixels(tmp_path / "x.tiff", (3, 1, 2)).tolist() == [[[255, 0]], [[0, 0]], [[0, 0]]]
    Image.new("CMYK", (8, 8), (0, 255, 255, 0)).save(tmp_path / "x.jpg")
    red, green, blue = read_pixels(tmp_path / "x.jpg", (3, 8, 8))
    assert red.min() >= 250
    assert max(green.max(), blue.max()) <= 5


def test_transparency_is_laid_on_white(tmp_path):
    colours = np.array([[[200, 100, 0, 255], [0, 0, 0, 0], [0, 0, 0, 128]]], np.uint8)
    for name in ("x.png", "x.tiff", "x.webp"):
        pixels = read_pixels(save(tmp_path / name, colours, **LOSSLESS[name[2:]]), (3, 1, 3))
        # 255 · (1 - 128/255) of the paper shines through half-transparent black.
        assert pixels.tolist() == [[[200, 255, 127]], [[100, 255, 127]], [[0, 255, 127]]]
    grey = np.array([[[7, 255], [7, 0]]], np.uint8)
    assert read_pixels(save(tmp_path / "la.png", grey), (1, 1, 2)).tolist() == [[[7, 255]]]


@pytest.mark.parametrize("suffix", ["png", "gif"])
def test_transparent_entries_of_palettes_are_laid_on_white(tmp_path, suffix):
    palette = Image.fromarray(np.array([[1, 0]], np.uint8))
    palette.putpalette([10, 20, 30, 40, 50, 60])
    palette.save(tmp_path / f"x.{suffix}", transparency=0)
    expected = [[[40, 255]], [[50, 255]], [[60, 255]]]
    assert read_pixels(tmp_path / f"x.{suffix}", (3, 1, 2)).tolist() == expected


DEEP = np.array([[0, 128, 129, 257, 32767, 32768, 65406, 65407, 65535]], np.uint16)
# Value / 257, to the nearest: 128.5 and 127.5 · 257 lie just between two of them.
SHALLOW = [[[0, 0, 1, 1, 127, 128, 254, 255, 255]]]


@pytest.mark.parametrize("suffix", ["png", "tiff"])
def test_sixteen_bits_are_scaled_to_eight(tmp_path, suffix):
    path = save(tmp_path / f"x.{suffix}", DEEP)
    with Image.open(path) as file:
        assert file.mode == "I;16"
    assert read_pixels(path, (1, 1, 9)).tolist() == SHALLOW
    assert read_pixels(path, (3, 1, 9)).tolist() == SHALLOW * 3


def test_sixteen_bits_are_read_in_the_order_of_their_bytes(tmp_path):
    path = save(tmp_path / "x.tiff", DEEP.astype(">u2"))
    assert path.read_bytes()[:2] == b"MM"
    assert read_pixels(path, (1, 1, 9)).tolist() == SHALLOW


def test_sixteen_bits_whose_zero_is_white_are_turned_round(tmp_path):
    data = np.array([0, 257, 65535], "<u2").tobytes()
    path = tiff(tmp_path / "x.tiff", data, size=(3, 1), bits=16, interpretation=0)
    assert read_pixels(path, (1, 1, 3)).tolist() == [[[255, 254, 0]]]


def test_twelve_bits_are_scaled_from_their_own_range(tmp_path):
    data = bytes.fromhex("fff800000010")  # twelve bits each: 4095, 2048, 0, 16
    path = tiff(tmp_path / "x.tiff", data, size=(4, 1), bits=12, interpretation=1)
    assert read_pixels(path, (1, 1, 4)).tolist() == [[[255, 128, 0, 1]]]


@pytest.mark.parametrize("dtype", [np.int32, np.float32])
def test_thirty_two_bits_are_refused_rather_than_clipped(tmp_path, dtype):
    path = save(tmp_path / "deep.tiff", np.full((4, 6), 40_000, dtype))
    assert refusal(path) == "it has 32 bits a channel; 8 and 16 are accepted"


@pytest.mark.parametrize("name", ["x.gif", "x.webp", "x.png", "x.tiff", "x.mpo"])
def test_the_first_of_several_pictures_is_read(tmp_path, name):
    RED.save(tmp_path / name, save_all=True, append_images=[BLUE])
    with Image.open(tmp_path / name) as file:
        assert file.n_frames == 2
    pixels = read_pixels(tmp_path / name, (3, 8, 8)).astype(int)
    assert np.abs(pixels - np.array([255, 0, 0]).reshape(3, 1, 1)).max() <= 2


UPRIGHT = {
    1: lambda x: x,
    2: np.fliplr,
    3: lambda x: np.rot90(x, 2),
    4: np.flipud,
    5: lambda x: x.transpose(1, 0, 2),
    6: lambda x: np.rot90(x, -1),
    7: lambda x: np.rot90(x, 2).transpose(1, 0, 2),
    8: lambda x: np.rot90(x, 1),
}


@pytest.mark.parametrize("suffix", ["png", "tiff", "webp"])
@pytest.mark.parametrize("orientation", UPRIGHT)
def test_pictures_are_turned_upright(tmp_path, suffix, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    path = save(tmp_path / f"x.{suffix}", exif=exif, **LOSSLESS[suffix])
    upright = UPRIGHT[orientation](COLOURS)
    pixels = read_pixels(path, (3, *upright.shape[:2]))
    assert np.array_equal(pixels, upright.transpose(2, 0, 1))


def test_odd_metadata_keep_no_picture_out(tmp_path):
    exif = Image.Exif()
    exif[0x010F], exif[0x0112] = "camera", 6
    # The maker of the camera under the tag of a number: `exif_transpose` fails to write it back.
    odd = exif.tobytes().replace(b"\x01\x0f", b"\x01\x1e")
    path = save(tmp_path / "x.png", exif=odd)
    assert np.array_equal(read_pixels(path, (3, 6, 4)), np.rot90(COLOURS, -1).transpose(2, 0, 1))


def test_the_middle_is_cut_out_and_proportions_stay(tmp_path):
    columns = np.tile(np.arange(0, 80, 10, dtype=np.uint8), (4, 1))
    wide = read_pixels(save(tmp_path / "wide.png", columns), (1, 4, 4))
    assert wide[0].tolist() == [[20, 30, 40, 50]] * 4
    high = read_pixels(save(tmp_path / "high.png", columns.T.copy()), (1, 4, 4))
    assert high[0].tolist() == [[value] * 4 for value in (20, 30, 40, 50)]


def test_pictures_are_scaled(tmp_path):
    columns = np.tile(np.arange(0, 160, 10, dtype=np.uint8), (8, 1))
    smaller = read_pixels(save(tmp_path / "x.png", columns), (1, 4, 4))
    # The means of columns 4 and 5, 6 and 7, … : a slope stays one under any even filter.
    assert smaller[0].tolist() == [[45, 65, 85, 105]] * 4
    larger = read_pixels(save(tmp_path / "x.png", np.full((2, 2), 9, np.uint8)), (1, 4, 4))
    assert (larger == 9).all()


def test_every_pixel_counts_when_pictures_shrink(tmp_path):
    checks = (255 * (np.indices((64, 64)).sum(0) % 2)).astype(np.uint8)
    pixels = read_pixels(save(tmp_path / "x.png", checks), (1, 4, 4))
    assert np.abs(pixels - 127.5).max() <= 2


@pytest.mark.parametrize("orientation", [1, 6])
def test_large_jpegs_are_decoded_small_and_give_the_same(tmp_path, orientation, monkeypatch):
    coarse = Image.fromarray(COLOURS).resize((960, 640), Image.Resampling.BICUBIC)
    exif = Image.Exif()
    exif[0x0112] = orientation
    coarse.save(tmp_path / "x.png", exif=exif)
    coarse.save(tmp_path / "x.jpg", exif=exif, quality=95)
    sizes = []
    load = Image.Image.convert
    monkeypatch.setattr(
        Image.Image, "convert", lambda self, *rest: sizes.append(self.size) or load(self, *rest)
    )
    shape = (3, 20, 40)
    exact, quick = (read_pixels(tmp_path / f"x.{s}", shape).astype(int) for s in ("png", "jpg"))
    upright = (960, 640) if orientation == 1 else (640, 960)
    assert sizes == [upright, (upright[0] // 8, upright[1] // 8)]
    assert np.abs(exact - quick).mean() < 2


@pytest.mark.parametrize(
    "content",
    [
        b"not a picture",
        b"\x89PNG\r\n\x1a\n",
        b"P6 2 2 255\n" + bytes(12),  # a format that is not accepted
        b"%!PS-Adobe-3.0 EPSF-3.0\n%%BoundingBox: 0 0 1 1\n",  # never hand this to an interpreter
    ],
)
def test_what_is_no_picture_is_refused_whatever_its_name(tmp_path, content):
    path = tmp_path / "x.png"
    path.write_bytes(content)
    accepted = "its content is no picture of a kind that is accepted: JPEG, PNG, "
    assert refusal(path).startswith(accepted)


def test_what_is_no_file_is_refused(tmp_path):
    (tmp_path / "empty.png").touch()
    assert refusal(tmp_path / "empty.png") == "it is empty"
    assert refusal(tmp_path) == "it is no file"
    assert refusal(tmp_path / "nowhere.png") == "there is no such file"
    assert refusal(tmp_path / ("x" * 500)) == "File name too long"
    assert refusal(tmp_path / "nul\0.png") == "there is no such file"
    os.mkfifo(tmp_path / "pipe.png")  # reading it would wait for a writer
    assert refusal(tmp_path / "pipe.png") == "it is no file"


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_cut_pictures_are_refused(tmp_path, suffix):
    large = np.random.default_rng(1).integers(0, 256, (40, 40, 3), dtype=np.uint8)
    data = save(tmp_path / f"x.{suffix}", large).read_bytes()
    for length in range(1, len(data) * 3 // 4, len(data) // 20):
        (tmp_path / "cut").write_bytes(data[:length])
        assert refusal(tmp_path / "cut")


@pytest.mark.parametrize("suffix", SUFFIXES)
def test_damaged_pictures_give_pixels_or_one_line(tmp_path, suffix):
    exif = Image.Exif()
    exif[0x0112] = 6
    options = {} if suffix in ("bmp", "gif") else {"exif": exif}
    original = np.frombuffer(save(tmp_path / f"x.{suffix}", **options).read_bytes(), np.uint8)
    rng = np.random.default_rng(2)
    outcomes = set()
    for _ in range(80):
        data = original.copy()
        data[rng.integers(0, len(data), 6)] = rng.integers(0, 256, 6)
        (tmp_path / "damaged").write_bytes(data.tobytes())
        try:
            outcomes.add(read_pixels(tmp_path / "damaged", (3, 5, 5)).shape)
        except Unreadable as error:
            outcomes.add(len(str(error).splitlines()))
    assert 1 in outcomes
    assert outcomes <= {(3, 5, 5), 1}


def test_whatever_a_decoder_stumbles_on_is_one_line(tmp_path, monkeypatch):
    def stumble(self):
        raise KeyError

    monkeypatch.setattr(ImageFile.ImageFile, "load", stumble)
    assert refusal(save(tmp_path / "x.bmp")) == "KeyError"


@pytest.mark.parametrize("side", [10_000, 60_000])  # Pillow warns of the one, refuses the other
def test_a_decompression_bomb_is_refused(tmp_path, side):
    data = bytearray(save(tmp_path / "x.png").read_bytes())
    data[16:24] = struct.pack(">II", side, side)
    data[29:33] = struct.pack(">I", zlib.crc32(data[12:29]))
    (tmp_path / "bomb.png").write_bytes(data)
    assert re.fullmatch(r"it has more than \d+ pixels", refusal(tmp_path / "bomb.png"))


def test_headers_tell_size_and_colour_without_decoding(tmp_path):
    data = io.BytesIO()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (40, 60, 3), np.uint8)).save(
        data, "png"
    )
    (tmp_path / "cut.png").write_bytes(data.getvalue()[:200])
    assert read_header(tmp_path / "cut.png") == Header(60, 40, has_colour=True)
    for name, pixels in (("grey", COLOURS[..., 0].copy()), ("deep", DEEP)):
        header = read_header(save(tmp_path / f"{name}.png", pixels))
        assert header == Header(*pixels.shape[::-1], has_colour=False)
    with pytest.raises(Unreadable, match="there is no such file"):
        read_header(tmp_path / "nowhere.png")


def test_a_canvas_has_a_row_for_each_picture(tmp_path):
    paths = [
        save(tmp_path / "a.png"),
        tmp_path / "gone.png",
        save(tmp_path / "b.png", 255 - COLOURS),
    ]
    with (tmp_path / "rows").open("w+b") as file:
        skipped = Canvas(file.fileno(), (3, 4, 6)).paint(2, paths)
    assert skipped == {3: Skipped(paths[1], "there is no such file")}
    rows = np.frombuffer((tmp_path / "rows").read_bytes(), np.uint8).reshape(5, 3, 4, 6)
    assert not rows[[0, 1, 3]].any()
    assert np.array_equal(rows[2], CHANNELS_FIRST)
    assert np.array_equal(rows[4], 255 - CHANNELS_FIRST)


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="needs a device that is always full")
def test_a_full_disk_is_one_line(tmp_path):
    path = save(tmp_path / "a.png")
    with Path("/dev/full").open("r+b", buffering=0) as file, pytest.raises(StorageError) as caught:
        Canvas(file.fileno(), (3, 4, 6)).paint(0, [path])
    assert re.search("No space left on device; the variable TMPDIR", str(caught.value))


def run(code):
    command = [sys.executable, "-c", code]
    return subprocess.run(command, capture_output=True, text=True, check=True).stdout.split()


def test_decoding_imports_no_torch():
    heavy = "{'torch', 'jaxtyping', 'scipy', 'sklearn', 'matplotlib'}"
    assert run(f"import sys, ncdwf.data.decoding; print(*({heavy} & set(sys.modules)))") == []


def test_the_package_imports_its_names_when_they_are_used():
    first, *methods = run(
        "import ncdwf, sys\n"
        "assert set(ncdwf.__all__) <= set(dir(ncdwf))\n"
        "assert issubclass(ncdwf.StorageError, ncdwf.NcdwfError)\n"
        "print('torch' in sys.modules)\n"
        "from ncdwf import make_method\n"
        "make_method({'name': 'uno'})\n"
        "print(*sorted(ncdwf.METHODS))\n"
    )
    assert first == "False"
    assert {"ncdwf", "ncdwf-gauss", "uno"} <= set(methods)


def test_a_misspelt_name_is_not_in_the_package():
    import ncdwf

    with pytest.raises(AttributeError, match="module 'ncdwf' has no attribute 'Modell'"):
        ncdwf.Modell  # noqa: B018


def test_a_name_of_two_lines_is_told_in_one(tmp_path):
    with pytest.raises(Unreadable, match=r"a\\nb\.png cannot be read as a picture") as caught:
        read_pixels(tmp_path / "a\nb.png", (1, 4, 4))
    assert "\n" not in str(caught.value)

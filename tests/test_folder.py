import os
import sys
import unicodedata
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet
import pytest
from PIL import Image

from ncdwf.data.folder import (
    Listing,
    find_pictures,
    labelled_folder,
    labelled_table,
    unlabelled,
)
from ncdwf.data.gathering import decode
from ncdwf.errors import InputError

GONE = "there is no such file"


def save(path, pixels):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(pixels).save(path)
    return path


def touch(*paths):
    for path in paths:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.touch()


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
    "truths": ({"path": ["1"], "label": [True]}, "a bool as path or label; text is accepted"),
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

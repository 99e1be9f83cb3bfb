import re
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from sklearn.datasets import load_digits

from ncdwf.data.cifar import CIFAR10, CIFAR100
from ncdwf.data.digits import CLASS_NAMES, read_digits
from ncdwf.data.setting import DATA_SETS, SETTINGS, DataSet, Setting, held_out_indices
from ncdwf.errors import InputError


@pytest.mark.parametrize(
    ("name", "known", "novel", "is_proxy"),
    [
        ("digits-5-5", range(5), range(5, 10), False),
        ("digits-2-1", range(2), range(2, 3), False),
        ("cifar100-80-20", range(80), range(80, 100), False),
        ("digits-5-5-proxy-2-3", range(2), range(2, 5), True),
        ("cifar100-80-20-proxy-60-20", range(60), range(60, 80), True),
        ("digits-5-5-mixed-50", range(5), range(5, 10), False),
        ("digits-5-5-imbalance-10", range(5), range(5, 10), False),
        ("digits-5-5-proxy-2-3-mixed-0", range(2), range(2, 5), True),
        ("digits-5-5-proxy-2-3-imbalance-100", range(2), range(2, 5), True),
    ],
)
def test_a_name_says_which_classes_are_known(name, known, novel, is_proxy):
    setting = Setting.parse(name)
    assert setting.name == name
    assert setting.data == name.partition("-")[0]
    assert setting.known_classes == tuple(known)
    assert setting.novel_classes == tuple(novel)
    assert setting.is_proxy is is_proxy


@pytest.mark.parametrize(
    ("name", "known_share", "imbalance"),
    [
        ("digits-5-5", None, 1),
        ("digits-5-5-mixed-0", 0, 1),
        ("digits-5-5-mixed-75", 75, 1),
        ("digits-5-5-proxy-2-3-mixed-25", 25, 1),
        ("digits-5-5-imbalance-1", None, 1),
        ("cifar100-80-20-imbalance-100", None, 100),
    ],
)
def test_a_name_says_what_the_pool_holds(name, known_share, imbalance):
    setting = Setting.parse(name)
    assert (setting.known_share, setting.imbalance) == (known_share, imbalance)


@pytest.mark.parametrize(
    ("name", "labelled"),
    [
        ("digits-5-5", "digits-5"),
        ("digits-5-2", "digits-5"),
        ("digits-5-5-imbalance-10", "digits-5"),
        ("digits-5-5-mixed-0", "digits-5-mixed"),
        ("digits-5-5-mixed-75", "digits-5-mixed"),
        ("digits-6-4", "digits-6"),
        ("digits-7-3-proxy-5-2", "digits-5-proxy"),
        ("digits-7-3-proxy-5-2-imbalance-10", "digits-5-proxy"),
        ("digits-7-3-proxy-5-2-mixed-25", "digits-5-proxy-mixed"),
        ("cifar10-5-5", "cifar10-5"),
    ],
)
def test_the_labelled_data_has_a_name(name, labelled):
    assert Setting.parse(name).labelled_name == labelled


def test_settings_have_one_name_for_labelled_data_where_it_is_the_same():
    names = [
        f"digits-{classes}{pool}"
        for classes in ("5-5", "5-2", "6-4", "8-2-proxy-5-2", "7-3-proxy-5-1")
        for pool in ("", "-imbalance-4", "-mixed-0", "-mixed-60")
    ]
    settings = [Setting.parse(name) for name in names]
    data = [
        (split.known_images.numpy().tobytes(), split.known_labels.numpy().tobytes())
        for split in (setting.load() for setting in settings)
    ]
    for i, setting in enumerate(settings):
        for j, other in enumerate(settings):
            is_same = setting.labelled_name == other.labelled_name
            assert (data[i] == data[j]) == is_same, (names[i], names[j])


@pytest.mark.parametrize("name", SETTINGS)
def test_every_listed_setting_parses(name):
    setting = Setting.parse(name)
    num_classes = len(setting.known_classes) + len(setting.novel_classes)
    assert num_classes <= len(DATA_SETS[setting.data].class_names)


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("", "unknown setting ''; there are digits-5-5"),
        ("digits", "unknown setting 'digits'"),
        ("letters-5-5", "unknown setting 'letters-5-5'"),
        ("digits-5-5-proxy", "unknown setting"),
        ("digits--5-5", "unknown setting"),
        ("digits-5-5\n", "unknown setting"),
        ("digits-6-5", "asks for 6 + 5 classes; digits has 10"),
        ("cifar10-6-5", "cifar10 has 10"),
        ("cifar100-81-20", "cifar100 has 100"),
        ("imagenet-971-30", "imagenet has 1000"),
        ("digits-999999-5", "asks for 999999 + 5 classes"),
        ("digits-5-5-proxy-3-3", "asks for 3 + 3 classes; digits-5-5 has 5 known ones"),
        ("digits-1-5", "needs 2 or more known and 1 or more novel"),
        ("digits-5-0", "needs 2 or more known and 1 or more novel"),
        ("digits-5-5-proxy-5-0", "needs 2 or more known and 1 or more novel"),
        ("digits-5-5-mixed", "unknown setting"),
        ("digits-5-5-mixed-", "unknown setting"),
        ("digits-5-5-mixed--1", "unknown setting"),
        ("digits-5-5-mixed-0.5", "unknown setting"),
        ("digits-5-5-mixed-50-proxy-2-3", "unknown setting"),
        ("digits-5-5-mixed-50-imbalance-10", "unknown setting"),
        ("digits-5-5-imbalance-10000", "unknown setting"),
        ("digits-5-5-mixed-76", "'digits-5-5-mixed-76': up to 75 percent can be known"),
        ("digits-5-5-mixed-100", "up to 75 percent can be known"),
        ("digits-5-5-imbalance-0", "'digits-5-5-imbalance-0': an imbalance is 1 or more"),
        ("digits-1-5-mixed-50", "needs 2 or more known and 1 or more novel"),
    ],
)
def test_names_that_make_no_setting_are_refused(name, message):
    with pytest.raises(InputError, match=re.escape(message)) as caught:
        Setting.parse(name)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("name", ["cifar10-5-5", "cifar100-80-20", "imagenet-882-30"])
def test_what_cannot_be_read_yet_says_so(name, monkeypatch):
    data = name.partition("-")[0]
    unread = DataSet(class_names=DATA_SETS[data].class_names, read=None, missing="not yet there")
    monkeypatch.setitem(DATA_SETS, data, unread)
    with pytest.raises(InputError, match=f"{name}.* cannot be loaded: not yet there"):
        Setting.parse(name).load()


class Listener:
    """Progress that the download tells; which one does not matter here."""

    def start(self, task, num_images, done):
        pass

    def advance(self, num_images):
        pass

    def stop(self):
        pass


@pytest.mark.parametrize("directory", [None, Path("somewhere")])
def test_fetching_hands_directory_and_progress_to_the_data_set(monkeypatch, directory):
    asked = []

    def fetch(data_dir, progress):
        asked.append((data_dir, progress))
        return Path("there")

    names = DATA_SETS["cifar100"].class_names
    monkeypatch.setitem(DATA_SETS, "cifar100", DataSet(class_names=names, read=None, fetch=fetch))
    listener = Listener()
    Setting.parse("cifar100-80-20").fetch(directory, listener)
    Setting.parse("cifar100-50-50-proxy-20-10").fetch(directory)
    assert asked == [(directory, listener), (directory, None)]


def test_fetching_takes_the_data_set_of_the_setting():
    assert DATA_SETS["cifar10"].fetch == CIFAR10.fetch
    assert DATA_SETS["cifar100"].fetch == CIFAR100.fetch


def test_embedded_digits_need_no_fetching(tmp_path):
    assert DATA_SETS["digits"].fetch is None
    Setting.parse("digits-5-5").fetch(tmp_path / "nowhere")
    assert not list(tmp_path.iterdir())


def made_up(labels, test_labels):
    """Return a data set of 1×1 pictures; the value of a picture tells it from the others."""

    def read(data_dir):
        train, test = torch.tensor(labels), torch.tensor(test_labels)
        values = torch.arange(len(train) + len(test), dtype=torch.uint8)[:, None, None, None]
        return values[: len(train)], train, values[len(train) :], test

    return DataSet(class_names=("a", "b", "c", "d", "e"), read=read)


def test_a_split_divides_pictures_by_class(monkeypatch):
    monkeypatch.setitem(DATA_SETS, "toy", made_up([3, 0, 4, 1, 2, 0], [4, 3, 2, 1, 0]))
    split = Setting.parse("toy-2-2").load()
    assert split.known_images.flatten().tolist() == [1, 3, 5]
    assert split.known_labels.tolist() == [0, 1, 0]
    assert split.pool_images.flatten().tolist() == [0, 4]
    assert split.pool_labels.tolist() == [3, 2]
    assert split.test_images.flatten().tolist() == [7, 8, 9, 10]  # class 4 is in neither group
    assert split.test_labels.tolist() == [3, 2, 1, 0]
    assert (split.known_names, split.novel_names) == (("a", "b"), ("c", "d"))
    assert (split.num_known, split.num_novel) == (2, 2)


def test_a_split_counts_novel_classes_after_the_known_ones(monkeypatch):
    monkeypatch.setitem(DATA_SETS, "toy", made_up([4, 0, 2], [4, 2]))
    setting = Setting(name="toy", data="toy", known_classes=(4, 0), novel_classes=(2,))
    split = setting.load()
    assert split.known_labels.tolist() == [0, 1]
    assert split.pool_labels.tolist() == [2]
    assert split.test_labels.tolist() == [0, 2]
    assert split.known_names == ("e", "a")


def test_a_proxy_never_sees_novel_classes_or_test_pictures(monkeypatch):
    labels = [0, 1, 2, 3, 4] * 20
    monkeypatch.setitem(DATA_SETS, "toy", made_up(labels, [0, 1, 2, 3, 4]))
    split = Setting.parse("toy-4-1-proxy-2-2").load()
    images = [split.known_images, split.pool_images, split.test_images]
    values = torch.cat(images).flatten().tolist()
    # All 20 pictures of each of the 4 known classes, each once; no test picture (100 and more).
    assert sorted(values) == [i for i in range(100) if labels[i] < 4]
    assert torch.bincount(split.test_labels).tolist() == [2, 2, 2, 2]  # a tenth
    of_test = [labels[value] for value in split.test_images.flatten().tolist()]
    assert of_test == split.test_labels.tolist()


def values(images):
    """Return what tells the pictures of a made-up data set from each other."""
    return images.flatten().tolist()


def toy_split(name, monkeypatch, per_class=40):
    """Return the split of a data set of five classes; the class of picture n is n modulo 5."""
    data = made_up([0, 1, 2, 3, 4] * per_class, [0, 1, 2, 3, 4])
    monkeypatch.setitem(DATA_SETS, "toy", data)
    return Setting.parse(name).load()


@pytest.mark.parametrize("share", [0, 25, 50, 60, 75])
def test_a_mixed_pool_has_its_share_of_known_pictures(monkeypatch, share):
    split = toy_split(f"toy-3-2-mixed-{share}", monkeypatch)
    # 40 pictures a class: 16 of each of the 3 known ones are held out, and a third of these 48
    # is how many novel ones the pool holds.
    assert torch.bincount(split.known_labels).tolist() == [24, 24, 24]
    is_known = split.pool_labels < 3
    assert int((~is_known).sum()) == 16
    assert int(is_known.sum()) == 16 * share // (100 - share)
    assert float(is_known.float().mean()) == pytest.approx(share / 100, abs=0.02)


@pytest.mark.parametrize("name", ["toy-3-2", "toy-4-1-proxy-3-1"])
def test_mixed_pools_differ_in_their_known_pictures_alone(monkeypatch, name):
    shares = (0, 25, 50, 75)
    splits = [toy_split(f"{name}-mixed-{share}", monkeypatch) for share in shares]
    novel = [sorted(values(s.pool_images[s.pool_labels >= 3])) for s in splits]
    known = [set(values(s.pool_images[s.pool_labels < 3])) for s in splits]
    for index, split in enumerate(splits):
        assert split.known_images.equal(splits[0].known_images)
        assert split.known_labels.equal(splits[0].known_labels)
        assert split.test_images.equal(splits[0].test_images)
        assert novel[index] == novel[0] != []
        assert known[max(index - 1, 0)] <= known[index]
    assert [len(some) > 0 for some in known] == [False, True, True, True]


@pytest.mark.parametrize(
    "name", ["toy-3-2-mixed-75", "toy-4-1-proxy-3-1-mixed-75", "toy-3-2-imbalance-5"]
)
def test_no_picture_is_in_two_places_and_labels_stay_with_theirs(monkeypatch, name):
    split = toy_split(name, monkeypatch)
    parts = [(split.known_images, split.known_labels), (split.pool_images, split.pool_labels)]
    if "proxy" in name:  # scored on training pictures, so that these must be others, too
        parts.append((split.test_images, split.test_labels))
    together = [value for images, _ in parts for value in values(images)]
    assert len(set(together)) == len(together)
    for images, labels in parts:
        assert [value % 5 for value in values(images)] == labels.tolist()


def test_known_pictures_of_a_mixed_pool_are_of_every_known_class(monkeypatch):
    split = toy_split("toy-3-2-mixed-75", monkeypatch)
    assert torch.bincount(split.pool_labels)[:3].tolist() == [16, 16, 16]
    assert set(split.pool_labels.tolist()) == {0, 1, 2, 3, 4}


@pytest.mark.parametrize(
    ("name", "counts"),
    [
        ("toy-2-3-imbalance-1", [40, 40, 40]),
        ("toy-2-3-imbalance-4", [40, 20, 10]),
        ("toy-2-3-imbalance-9", [40, 13, 4]),  # 40/3, 40/9
        ("toy-2-3-imbalance-9999", [40, 1, 1]),  # at least one
        ("toy-3-2-imbalance-4", [40, 10]),
        ("toy-4-1-imbalance-4", [40]),  # the first is the last
    ],
)
def test_a_long_tail_falls_by_a_constant_factor(monkeypatch, name, counts):
    split = toy_split(name, monkeypatch)
    assert torch.bincount(split.pool_labels)[split.num_known :].tolist() == counts
    assert torch.bincount(split.known_labels).tolist() == [40] * split.num_known
    assert len(split.test_labels) == 5


def test_a_long_tail_is_a_part_of_the_whole_pool_in_its_order(monkeypatch):
    whole, part = (toy_split(f"toy-3-2{tail}", monkeypatch) for tail in ("", "-imbalance-4"))
    kept = set(values(part.pool_images))
    assert values(part.pool_images) == [v for v in values(whole.pool_images) if v in kept]
    assert part.known_images.equal(whole.known_images)
    # Which ones are left is drawn: neither the first nor the last of their class.
    of_tail = [value for value in values(whole.pool_images) if value % 5 == 4]
    assert not {tuple(of_tail[:10]), tuple(of_tail[-10:])} & {
        tuple(value for value in of_tail if value in kept)
    }


@pytest.mark.parametrize("name", ["digits-5-5-mixed-50", "digits-5-5-imbalance-10"])
def test_pools_do_not_depend_on_the_global_random_state(name):
    first = Setting.parse(name).load()
    torch.manual_seed(5)
    again = Setting.parse(name).load()
    assert first.pool_images.equal(again.pool_images)
    assert first.pool_labels.equal(again.pool_labels)
    assert first.known_images.equal(again.known_images)


def test_digits_with_other_pools_have_the_sizes_that_the_tables_are_about():
    plain, mixed, tail = (
        Setting.parse(f"digits-5-5{pool}").load() for pool in ("", "-mixed-50", "-imbalance-10")
    )
    assert (len(plain.known_labels), len(plain.pool_labels)) == (630, 627)
    assert (len(mixed.known_labels), len(mixed.pool_labels)) == (377, 168)
    assert int((mixed.pool_labels < 5).sum()) == 84
    whole = torch.bincount(plain.pool_labels)[5:]
    counts = torch.bincount(tail.pool_labels)[5:]
    assert counts.tolist() == sorted(counts.tolist(), reverse=True)
    assert counts[0] == whole[0]
    assert counts[4] == round(int(whole[4]) / 10)


@settings(max_examples=50, deadline=None)
@given(
    st.lists(st.integers(0, 4), max_size=60),
    st.floats(0, 0.5),
    st.integers(0, 5),
)
def test_the_held_out_share_is_taken_from_every_class(labels, share, seed):
    labels = torch.tensor(labels, dtype=torch.int64)
    rest, held_out = held_out_indices(labels, share, seed=seed)
    assert sorted(rest.tolist() + held_out.tolist()) == list(range(len(labels)))
    assert rest.tolist() == sorted(rest.tolist())
    for label in range(5):
        count = int((labels == label).sum())
        assert int((labels[held_out] == label).sum()) == round(share * count)


def test_what_is_held_out_follows_from_the_seed():
    labels = torch.zeros(100, dtype=torch.int64)
    first = held_out_indices(labels, 0.3, seed=0)[1]
    torch.manual_seed(5)
    assert torch.equal(first, held_out_indices(labels, 0.3, seed=0)[1])
    assert not torch.equal(first, held_out_indices(labels, 0.3, seed=1)[1])


def test_digits_are_a_fixed_stratified_split():
    train, train_labels, test, test_labels = read_digits()
    assert (tuple(train.shape), tuple(test.shape)) == ((1257, 1, 8, 8), (540, 1, 8, 8))
    assert train.dtype == torch.uint8
    assert "".join(CLASS_NAMES) == "0123456789"
    # The source counts brightness from 0 to 16: 16 becomes 255, 8 becomes 127.5, rounded to even.
    assert set(torch.cat([train, test]).unique().tolist()) == {
        round(value * 255 / 16) for value in range(17)
    }
    source = load_digits()
    both = torch.cat([train, test]).flatten(1).numpy() * (16 / 255)
    key = np.lexsort(np.round(both).T)
    expected = np.lexsort(source.data.T)
    assert np.array_equal(np.round(both)[key], source.data[expected])
    labels = torch.cat([train_labels, test_labels]).numpy()
    assert np.array_equal(np.bincount(labels), np.bincount(source.target))
    counts = np.bincount(source.target)
    assert np.abs(np.bincount(test_labels.numpy()) - 0.3 * counts).max() <= 1
    # The split itself is part of every published number.
    assert train_labels[:12].tolist() == [6, 4, 4, 3, 2, 7, 2, 2, 7, 0, 2, 1]


def test_labels_of_digits_stay_with_their_pictures():
    images, labels, _, _ = read_digits()
    source = load_digits()
    known = {row.tobytes(): target for row, target in zip(source.data, source.target, strict=True)}
    for image, label in zip(images[:100], labels[:100].tolist(), strict=True):
        row = np.round(image.numpy().astype(np.float64).reshape(-1) * 16 / 255)
        assert known[row.tobytes()] == label

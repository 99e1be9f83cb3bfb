"""The scikit-learn face: what it learns, what it refuses, and how it is kept."""

import copy
import gc
import inspect
import json
import logging
import re
import weakref
from dataclasses import replace
from pathlib import Path
from types import MappingProxyType, SimpleNamespace

import numpy as np
import pyarrow
import pytest
import scipy.sparse
import torch
from conftest import fingerprint, tiny_pictures, unchanged_global_state
from PIL import Image
from scipy.optimize import linear_sum_assignment
from sklearn.base import clone
from sklearn.calibration import CalibratedClassifierCV
from sklearn.datasets import load_digits
from sklearn.exceptions import DataConversionWarning, NotFittedError
from sklearn.metrics import accuracy_score
from sklearn.model_selection import cross_val_score, train_test_split
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.utils.estimator_checks import check_estimator
from torch import nn

import ncdwf.estimator
from ncdwf import NovelClassDiscoverer, storage
from ncdwf.cli import main
from ncdwf.console import Bar
from ncdwf.data.inputs import fitted
from ncdwf.errors import InputError, StorageError
from ncdwf.learning.discovery import METHODS
from ncdwf.learning.sifting import Sifted
from ncdwf.model import Model

# Enough for what does not depend on how well it learns.
SHORT = {"supervised.optim.epochs": 1, "discovery.optim.epochs": 1}
REPLAY = {
    "method.settling.epochs": 1,
    "method.inversion_iterations": 2,
    "method.latents_per_class": 5,
}
WIDTH = 5


def blobs(per_class, seed, classes=(0, 1, 2, 3)):
    """Return vectors around one centre a class, far apart, and their classes."""
    centres = 20 * np.eye(WIDTH)
    labels = np.repeat(classes, per_class)
    noise = np.random.default_rng(seed).normal(size=(len(labels), WIDTH))
    return (centres[labels] + noise).astype(np.float32), labels


X, CODES = blobs(20, seed=1, classes=(0, 1))
Y = np.array(["cat", "dog"])[CODES]
POOL, _ = blobs(15, seed=2, classes=(2, 3))
TEST, TEST_CODES = blobs(10, seed=3)
TEST_Y = np.array(["cat", "dog", "elk", "fox"])[TEST_CODES]
PICTURES = tiny_pictures(12, seed=1)
IS_KNOWN = PICTURES[1] < 2
IMAGES, IMAGE_Y = PICTURES[0][IS_KNOWN].numpy(), np.array(["ant", "bee"])[PICTURES[1][IS_KNOWN]]
IMAGE_POOL = PICTURES[0][~IS_KNOWN].numpy()


def short(num_novel=2, **parameters):
    return NovelClassDiscoverer(num_novel, settings=SHORT | REPLAY, **parameters)


def tiny_net(num_channels=1):
    convolution = nn.Conv2d(num_channels, 6, 3, padding=1)
    return nn.Sequential(convolution, nn.ReLU(), nn.AdaptiveAvgPool2d(2), nn.Flatten())


@pytest.fixture(scope="module")
def learnt():
    """Fitted, nothing discovered yet; not to be changed."""
    return short().fit(X, Y)


@pytest.fixture(scope="module")
def found():
    """Fitted and discovered, for as long as it takes to be right; not to be changed."""
    settings = {
        "supervised.optim.epochs": 10,
        "discovery.optim.epochs": 80,
        # The norms of so small a pool would move features beyond recognition.
        "method.norms": "held",
    }
    return NovelClassDiscoverer(2, settings=settings).fit(X, Y).discover(POOL)


@pytest.fixture(scope="module")
def of_pictures():
    """Fitted to pictures; not to be changed."""
    return short().fit(IMAGES, IMAGE_Y)


def state(finder):
    """Return everything that was learnt, to be compared."""
    return {
        "model": fingerprint(finder.model_),
        "names": finder.model_.class_names,
        "classes": finder.classes_.tolist(),
        "named": finder.named_.tolist(),
        "num_known": finder.num_known_,
        "num_novel": finder.num_novel_,
        "config": finder.config_,
        "columns": getattr(finder, "n_features_in_", None),
    }


def test_known_classes_are_named_and_novel_ones_are_told_apart(found):
    rows, codes = blobs(200, seed=3)  # so many that one of them decides nothing
    names = np.array(["cat", "dog", "elk", "fox"])[codes]
    answers, is_known = found.predict(rows), codes < 2
    assert accuracy_score(names[is_known], answers[is_known]) >= 0.95
    assert np.isin(answers[~is_known], ["novel-1", "novel-2"]).mean() >= 0.8
    assert found.score(rows, names) >= 0.9


def test_what_was_found_is_told(learnt, found):
    assert learnt.classes_.tolist() == ["cat", "dog"]
    assert (learnt.num_known_, learnt.num_novel_) == (2, [])
    assert found.classes_.tolist() == ["cat", "dog", "novel-1", "novel-2"]
    assert found.named_.tolist() == [True, True, False, False]
    assert (found.num_known_, found.num_novel_) == (2, [2])
    assert found.n_features_in_ == WIDTH


@pytest.mark.parametrize(
    ("labels", "classes"),
    [
        (np.array(["owl", "emu"]), np.array(["emu", "owl", "novel-1", "novel-2"])),
        (np.array(["novel-1", "emu"]), np.array(["emu", "novel-1", "novel-2", "novel-3"])),
        (np.array(["a", "b"], object), np.array(["a", "b", "novel-1", "novel-2"])),
        (np.array([7, 3]), np.array([3, 7, 8, 9])),
        (np.array([-5, -4]), np.array([-5, -4, -3, -2])),
        (np.array([1, 0], object), np.array([0, 1, 2, 3])),
        (np.array([1, 2], np.uint8), np.array([1, 2, 3, 4], np.uint8)),
        (np.array([254, 255], np.uint8), np.array([254, 255, 256, 257])),
        (np.array([126, 127], np.int8), np.array([126, 127, 128, 129])),
        (np.array([0, 1], np.float32), np.array([0, 1, 2, 3], np.float32)),
        (np.array([0, 2048], np.float16), np.array([0, 2048, 2049, 2050.0])),
    ],
    ids=lambda value: f"{value.dtype}-{value[0]}",
)
def test_names_go_on_as_names_and_numbers_as_numbers(labels, classes):
    finder = short().fit(X, labels[CODES]).discover(POOL)
    assert finder.classes_.dtype.kind == classes.dtype.kind
    assert np.array_equal(finder.classes_, classes)
    assert set(finder.predict(TEST)) <= set(classes)


@pytest.mark.parametrize("dtype", [">f8", ">f4", np.longdouble, np.float64])
def test_numbers_may_be_of_any_byte_order_and_length(learnt, dtype):
    assert fingerprint(short().fit(X.astype(dtype), Y).model_) == fingerprint(learnt.model_)
    assert np.array_equal(learnt.predict_proba(TEST.astype(dtype)), learnt.predict_proba(TEST))


def test_rounds_add_classes_and_keep_those_before():
    finder = short().fit(X, Y).discover(POOL).rename({"novel-1": "elk"})
    finder.discover(POOL, num_novel=1)
    assert finder.num_novel_ == [2, 1]
    finder.set_params(num_novel=3).discover(POOL)
    novel = ["elk", *(f"novel-{number}" for number in range(2, 7))]
    assert finder.classes_.tolist() == ["cat", "dog", *novel]
    assert finder.classes_.tolist() == list(finder.model_.class_names)
    assert (finder.num_known_, finder.num_novel_) == (2, [2, 1, 3])
    assert finder.named_.tolist() == [True] * 3 + [False] * 5
    assert finder.predict_proba(TEST).shape == (len(TEST), 8)


def test_numbers_of_the_next_round_go_on_after_the_largest():
    finder = short().fit(X, CODES).discover(POOL).rename({2: 30, 3: 20}).discover(POOL)
    assert finder.classes_.tolist() == [0, 1, 30, 20, 31, 32]
    assert finder.named_.tolist() == [True] * 4 + [False] * 2


def test_the_most_probable_class_is_the_answer(learnt, found):
    for finder in (learnt, found):
        probabilities = finder.predict_proba(TEST)
        assert probabilities.shape == (len(TEST), len(finder.classes_))
        assert np.array_equal(finder.classes_[probabilities.argmax(1)], finder.predict(TEST))
        assert np.allclose(probabilities.sum(1), 1)
    is_novel = np.isin(found.predict(TEST), ["novel-1", "novel-2"])
    assert 0 < is_novel.sum() < len(TEST)
    assert not probabilities[is_novel, :2].any()
    assert not probabilities[~is_novel, 2:].any()


def test_more_rows_than_fit_into_one_batch_get_the_same_answers(found):
    many = np.tile(TEST, (30, 1))
    assert np.array_equal(found.predict(many), np.tile(found.predict(TEST), 30))
    assert np.allclose(found.predict_proba(many), np.tile(found.predict_proba(TEST), (30, 1)))


def test_rows_from_0_on_are_called_novel(found):
    is_novel = np.isin(found.predict(TEST), ["novel-1", "novel-2"])
    assert 0 < is_novel.sum() < len(TEST)
    assert np.array_equal(found.decision_function(TEST) >= 0, is_novel)


@pytest.mark.parametrize("tau", [0.0, 1e-320, 0.3, 0.5, 0.9999999, 1 - 2**-53, 1.0])
def test_rounding_does_not_move_rows_across_the_border(learnt, tau):
    near = [np.nextafter(tau, 0), tau, np.nextafter(tau, 1), 0.0, 1.0]
    novelty = torch.tensor(near, dtype=torch.float64)
    finder = copy.copy(learnt)
    finder.num_novel_ = [2]
    finder.model_ = SimpleNamespace(
        tau=tau,
        architecture=learnt.model_.architecture,
        check=lambda rows: rows,
        predict=lambda rows: SimpleNamespace(novelty=novelty),
    )
    decision = finder.decision_function(X[:5])
    assert np.isfinite(decision).all()
    assert (decision >= 0).tolist() == [value >= tau for value in near]


def test_how_novel_a_row_is_can_be_asked_after_a_discovery(learnt, found):
    assert hasattr(found, "decision_function")
    assert not hasattr(copy.copy(found).fit(X, Y), "decision_function")
    for finder, said in ((short(), "not fitted yet"), (learnt, "call discover first")):
        assert not hasattr(finder, "decision_function")
        with pytest.raises(AttributeError, match="no attribute 'decision_function'") as caught:
            finder.decision_function(X)
        assert said in str(caught.value.__cause__)
    refused("X has 3 features", found.decision_function, TEST[:, :3])


def test_scikit_learn_scores_known_classes_by_their_probability():
    finder = NovelClassDiscoverer(settings={"supervised.optim.epochs": 10})
    areas = cross_val_score(finder, X, Y, scoring="roc_auc", cv=2)
    assert areas.min() > 0.95
    calibrated = CalibratedClassifierCV(finder, cv=2, ensemble=False).fit(X, Y)
    assert calibrated.score(X, Y) > 0.95


def test_features_are_those_of_the_model(found):
    features = found.transform(TEST)
    assert features.dtype == np.float32
    assert np.array_equal(features, found.model_.features(torch.from_numpy(TEST)).numpy())
    assert np.array_equal(short().fit_transform(X, Y), short().fit(X, Y).transform(X))


def test_features_have_names(learnt, of_pictures):
    for finder, rows in ((learnt, X), (of_pictures, IMAGES)):
        names = finder.get_feature_names_out()
        assert len(names) == finder.transform(rows).shape[1]
        assert names[:2].tolist() == ["novelclassdiscoverer0", "novelclassdiscoverer1"]
    with pytest.raises(NotFittedError, match="not fitted yet"):
        short().get_feature_names_out()
    plain = copy.copy(learnt).set_output(transform="default")
    assert np.array_equal(plain.transform(X), learnt.transform(X))


def test_neither_rows_nor_labels_are_kept():
    finder = short()
    kept = {}
    for name, rows in (("x", X), ("pool", POOL), ("y", Y)):
        kept[name] = rows.copy()
    references = [weakref.ref(rows) for rows in kept.values()]
    finder.fit(kept["x"], kept["y"]).discover(kept["pool"])
    kept.clear()
    gc.collect()
    assert all(reference() is None for reference in references)


def test_what_is_kept_does_not_grow_with_the_data():
    sizes = []
    for per_class in (10, 100):
        rows, codes = blobs(per_class, seed=1, classes=(0, 1))
        finder = short().fit(rows, codes).discover(rows)
        tensors = finder.model_.state_dict().values()
        arrays = [value for value in vars(finder).values() if isinstance(value, np.ndarray)]
        sizes.append((sum(t.numel() for t in tensors), sum(array.size for array in arrays)))
    assert sizes[0] == sizes[1]


def test_fitting_again_drops_what_was_found():
    finder = short().fit(X, Y).discover(POOL).rename({"novel-1": "elk"})
    again = finder.fit(X[:, :3], CODES)
    assert again is finder
    assert state(finder) == state(short().fit(X[:, :3], CODES))
    assert finder.classes_.tolist() == [0, 1]


def test_fitting_again_to_pictures_drops_the_columns():
    table = pyarrow.table({name: X[:, number] for number, name in enumerate("abcde")})
    finder = short().fit(table, Y)
    assert finder.feature_names_in_.tolist() == list("abcde")
    finder.fit(IMAGES, IMAGE_Y)
    assert not hasattr(finder, "n_features_in_")
    assert not hasattr(finder, "feature_names_in_")
    assert len(finder.predict(IMAGES)) == len(IMAGES)


def test_columns_of_one_name_are_one_line():
    table = pyarrow.table([*X.T], names=["a", "b", "c", "d", "a"])
    refused("Expected unique column names, got: 'a' 2 times", short().fit, table, Y)


def test_classes_with_endless_names_are_refused():
    refused("a class has a name of 1,001 characters", short().fit, X, np.char.add(Y, "a" * 998))


def test_columns_need_the_names_they_had():
    columns = dict(zip("abcde", X.T, strict=True))
    finder = short().fit(pyarrow.table(columns), Y)
    answers = finder.predict(pyarrow.table(columns))
    assert answers.tolist() == short().fit(X, Y).predict(X).tolist()
    for old, new in zip("de", "fg", strict=True):
        columns[new] = columns.pop(old)
    said = (
        "The feature names should match those that were passed during fit. Feature names unseen at "
        "fit time: f, g; Feature names seen at fit time, yet now missing: d, e"
    )
    refused(said, finder.predict, pyarrow.table(columns))


def test_columns_need_the_order_they_had_after_loading_too(tmp_path):
    columns = dict(zip("abcde", X.T, strict=True))
    finder = short().fit(pyarrow.table(columns), Y)
    finder.save(tmp_path)
    loaded = NovelClassDiscoverer.load(tmp_path)
    assert loaded.feature_names_in_.tolist() == list("abcde")
    assert loaded.feature_names_in_.dtype == finder.feature_names_in_.dtype
    table = pyarrow.table(columns)
    assert np.array_equal(loaded.predict(table), finder.predict(table))
    said = "passed during fit. Feature names must be in the same order as they were in fit."
    refused(said, loaded.predict, table.select(list("edcba")))


def test_estimators_that_were_saved_without_names_of_columns_are_read(tmp_path, learnt):
    learnt.save(tmp_path)
    path = tmp_path / "estimator.json"
    content = json.loads(path.read_text())
    assert content.pop("feature_names") is None
    path.write_text(json.dumps(content))
    loaded = NovelClassDiscoverer.load(tmp_path)
    assert not hasattr(loaded, "feature_names_in_")
    assert np.array_equal(loaded.predict(X), learnt.predict(X))


REFUSED = {
    "fit": lambda finder: finder.fit(X[:, :3], Y[:-1]),
    "fit in the middle": lambda finder: finder.set_params(
        settings={"supervised.view.shift": 1.0}
    ).fit(X[:, :3], CODES),
    "discover": lambda finder: finder.discover(POOL, num_novel=31),
    "rename": lambda finder: finder.rename({"novel-1": "elk", "novel-2": "cat"}),
    "rename to nothing": lambda finder: finder.rename({"novel-1": " "}),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_refused_leaves_everything_as_it_was(found, name):
    finder = copy.deepcopy(found)
    with pytest.raises(InputError):
        REFUSED[name](finder)
    assert state(finder) == state(found)
    assert np.array_equal(finder.predict(TEST), found.predict(TEST))


UNFITTED = {
    "discover": (POOL,),
    "predict": (X,),
    "predict_proba": (X,),
    "transform": (X,),
    "score": (X, Y),
    "rename": ({"novel-1": "elk"},),
    "save": ("directory",),
}


@pytest.mark.parametrize("name", UNFITTED)
def test_nothing_works_before_fit(tmp_path, monkeypatch, name):
    monkeypatch.chdir(tmp_path)
    with pytest.raises(NotFittedError, match="not fitted yet"):
        getattr(short(), name)(*UNFITTED[name])
    assert not list(tmp_path.iterdir())


def test_parameters_are_read_set_and_cloned():
    net = tiny_net()
    parameters = {
        "num_novel": 3,
        "method": "uno",
        "backbone": net,
        "image_size": 24,
        "settings": {"supervised.optim.epochs": 2},
        "device": "cpu",
        "random_state": 7,
        "verbose": True,
    }
    finder = NovelClassDiscoverer().set_params(**parameters)
    assert finder.get_params() == parameters
    twin = clone(finder)
    assert {**twin.get_params(), "backbone": net} == parameters
    assert twin.backbone is not net
    assert fingerprint(twin.backbone) == fingerprint(net)
    with pytest.raises(ValueError, match="Invalid parameter 'num_old'"):
        finder.set_params(num_old=1)


def test_parameters_are_kept_as_they_were_given():
    settings = MappingProxyType(SHORT | REPLAY)
    finder = short().set_params(num_novel=np.int64(2), settings=settings)
    finder.fit(X, Y).discover(POOL)
    assert finder.settings is settings
    assert isinstance(finder.num_novel, np.int64)


def test_a_scaler_may_come_first():
    scaled = make_pipeline(StandardScaler(), short()).fit(1000 * X, Y)
    scaled[-1].discover(scaled[:-1].transform(1000 * POOL))
    by_hand = StandardScaler().fit(1000 * X)
    finder = short().fit(by_hand.transform(1000 * X), Y).discover(by_hand.transform(1000 * POOL))
    assert scaled.classes_.tolist() == ["cat", "dog", "novel-1", "novel-2"]
    assert np.array_equal(
        scaled.predict(1000 * TEST), finder.predict(by_hand.transform(1000 * TEST))
    )
    assert scaled.transform(1000 * TEST).shape == (len(TEST), 256)


IMAGE_FORMS = {
    "a tensor": torch.from_numpy,
    "channels last": lambda images: np.moveaxis(images, 1, 3),
    "channels last in memory too": lambda images: np.moveaxis(images, 1, 3).copy(),
    "a tensor with the channels last": lambda images: torch.from_numpy(
        np.moveaxis(images, 1, 3).copy()
    ),
    "without the channel": lambda images: images[:, 0],
    "a list of arrays": list,
    "a list of arrays with the channels last": lambda images: list(np.moveaxis(images, 1, 3)),
}


@pytest.mark.parametrize("name", IMAGE_FORMS)
def test_pictures_come_in_many_forms_and_lead_to_one_model(of_pictures, name):
    form = IMAGE_FORMS[name]
    finder = short().fit(form(IMAGES), IMAGE_Y)
    assert fingerprint(finder.model_) == fingerprint(of_pictures.model_)
    assert np.array_equal(
        finder.predict_proba(form(IMAGE_POOL)), of_pictures.predict_proba(IMAGE_POOL)
    )


def test_colour_comes_with_the_channels_first_or_last():
    images = np.random.default_rng(0).integers(0, 256, (12, 3, 10, 14), np.uint8)
    labels = np.arange(12) % 2
    models = [short().fit(given, labels).model_ for given in (images, np.moveaxis(images, 1, 3))]
    assert models[0].architecture.input_shape == (3, 10, 14)
    assert fingerprint(models[0]) == fingerprint(models[1])


@pytest.mark.parametrize(
    ("size", "image_size", "shape"),
    [
        ((16, 16), "auto", (1, 16, 16)),
        ((40, 40), "auto", (1, 32, 32)),
        ((40, 60), "auto", (1, 32, 48)),
        ((16, 16), 8, (1, 8, 8)),
        ((20, 10), 5, (1, 10, 5)),
        ((8, 8), 16, (1, 16, 16)),
    ],
)
def test_pictures_are_scaled_in_proportion(size, image_size, shape):
    images = np.random.default_rng(0).integers(0, 256, (4, 1, *size), np.uint8)
    finder = short(image_size=image_size, device="cpu").fit(images, [0, 1, 0, 1])
    assert finder.model_.architecture.input_shape == shape


def test_pictures_of_another_size_are_scaled_to_the_one_that_was_learnt(of_pictures):
    larger = IMAGE_POOL.repeat(3, 2).repeat(3, 3)
    finder = short().fit(IMAGES, IMAGE_Y).discover(larger)
    assert finder.classes_.tolist() == ["ant", "bee", "novel-1", "novel-2"]
    scaled = fitted(torch.from_numpy(larger), 16, 16)
    assert np.array_equal(of_pictures.predict_proba(larger), of_pictures.predict_proba(scaled))
    assert np.array_equal(of_pictures.transform(larger), of_pictures.transform(scaled))


def write_pictures(folder, images):
    paths = [folder / f"{number:02d}.png" for number in range(len(images))]
    for path, image in zip(paths, images, strict=True):
        Image.fromarray(image[0]).save(path)
    return paths


class Column:
    """A column as other libraries have it: no sequence, and rows have labels, not numbers."""

    def __init__(self, paths):
        self._values = np.array([*map(str, paths)], object)

    def to_numpy(self):
        return self._values

    def __getitem__(self, label):
        raise KeyError(label)


class ArrayLike:
    """A column that NumPy alone can read."""

    def __init__(self, paths):
        self._values = np.array(paths)
        self.shape = self._values.shape

    def __array__(self, dtype=None, copy=None):
        return self._values


@pytest.mark.parametrize(
    "form", [list, tuple, lambda paths: [*map(str, paths)], np.array, Column, ArrayLike]
)
def test_paths_are_as_good_as_pictures(tmp_path, of_pictures, form):
    paths = write_pictures(tmp_path, IMAGES)
    finder = short().fit(form(paths), IMAGE_Y)
    assert fingerprint(finder.model_) == fingerprint(of_pictures.model_)
    assert np.array_equal(finder.predict(form(paths[:5])), of_pictures.predict(IMAGES[:5]))


def test_paths_of_large_colour_pictures_are_scaled_to_squares(tmp_path):
    for name in "abcd":
        Image.new("RGB", (70, 50), (ord(name), 0, 0)).save(tmp_path / f"{name}.png")
    paths = sorted(tmp_path.iterdir())
    assert short(device="cpu").fit(paths, [0, 1, 0, 1]).model_.architecture.input_shape == (
        3,
        32,
        32,
    )
    small = short(image_size=9).fit(paths, [0, 1, 0, 1])
    assert small.model_.architecture.input_shape == (3, 9, 9)


def test_a_network_of_ones_own_is_trained_as_a_copy():
    net = tiny_net()
    before = fingerprint(net)
    finder = short(backbone=net).fit(IMAGES, IMAGE_Y).discover(IMAGE_POOL)
    assert fingerprint(net) == before
    assert finder.backbone is net
    assert fingerprint(finder.model_.backbone.module) != before
    assert finder.transform(IMAGES).shape == (len(IMAGES), 24)
    assert finder.config_.backbone == "custom"


def test_a_network_of_ones_own_may_read_vectors():
    finder = short(backbone=nn.Sequential(nn.Linear(WIDTH, 8), nn.ReLU())).fit(X, Y).discover(POOL)
    assert finder.transform(X).shape == (len(X), 8)


def fixed_net():
    return nn.Sequential(nn.Flatten(), nn.Linear(16 * 16, 8))


@pytest.mark.parametrize(
    ("make", "settings", "num_small"),
    [
        (tiny_net, {}, 2),
        (fixed_net, {}, 0),
        (fixed_net, {"discovery.small.size": 16}, 2),
        (nn.Flatten, {}, 0),  # as many features as there are pixels
    ],
)
def test_small_views_are_left_out_where_a_network_cannot_read_them(make, settings, num_small):
    finder = short(backbone=make()).set_params(settings=SHORT | REPLAY | settings)
    finder.fit(IMAGES, IMAGE_Y).discover(IMAGE_POOL)
    assert finder.config_.discovery.num_small == num_small
    assert len(finder.classes_) == 4


def test_small_views_that_somebody_asks_for_are_not_left_out():
    finder = short(backbone=fixed_net())
    finder.set_params(settings=SHORT | REPLAY | {"discovery.num_small": 1}).fit(IMAGES, IMAGE_Y)
    refused("set discovery.num_small=0", finder.discover, IMAGE_POOL)


def test_a_network_of_ones_own_is_needed_again(tmp_path):
    finder = short(backbone=tiny_net()).fit(IMAGES, IMAGE_Y)
    finder.save(tmp_path / "kept")
    other = tiny_net()
    loaded = NovelClassDiscoverer.load(tmp_path / "kept", backbone=other)
    assert loaded.backbone is other
    assert np.array_equal(loaded.predict_proba(IMAGES), finder.predict_proba(IMAGES))
    assert state(loaded.discover(IMAGE_POOL)) == state(finder.discover(IMAGE_POOL))
    with pytest.raises(InputError, match="was passed as a module"):
        NovelClassDiscoverer.load(tmp_path / "kept")
    with pytest.raises(InputError, match="does not fit"):
        NovelClassDiscoverer.load(tmp_path / "kept", backbone=nn.Flatten())


def test_a_network_that_nobody_asked_for_is_left_alone(tmp_path, learnt):
    learnt.save(tmp_path / "kept")
    loaded = NovelClassDiscoverer.load(tmp_path / "kept", backbone=tiny_net())
    assert loaded.backbone == "auto"
    assert np.array_equal(loaded.predict_proba(X), learnt.predict_proba(X))


def test_settings_override_what_follows_from_the_data():
    settings = {
        **SHORT,
        **REPLAY,
        "supervised.optim.epochs": np.int64(3),
        "discovery.optim.lr": np.float32(0.25),
        "method.tau": 0.75,
        "method.clustering.num_heads": 2,
    }
    finder = NovelClassDiscoverer(2, settings=settings).fit(X, Y).discover(POOL)
    config = finder.config_
    assert (config.supervised.optim.epochs, config.discovery.optim.epochs) == (3, 1)
    assert config.discovery.optim.lr == 0.25
    assert (config.method["tau"], finder.model_.tau) == (0.75, 0.75)
    assert finder.model_.architecture.novel.num_heads == 2


def test_without_settings_the_configuration_follows_from_the_data(monkeypatch, learnt):
    caught = []

    def catch(*arguments, **rest):
        caught.append(arguments)
        return learnt.model_

    monkeypatch.setattr(ncdwf.estimator, "learn_known", catch)
    finder = NovelClassDiscoverer(device="cpu", random_state=5).fit(X, Y)
    config = caught[0][2]
    assert config is finder.config_
    assert (config.backbone, config.seed, config.device) == ("vector", 5, "cpu")
    assert (config.supervised.optim.epochs, config.supervised.optim.batch_size) == (200, 16)
    assert config.supervised.view.noise == 0.5


@pytest.mark.parametrize("method", sorted(METHODS))
def test_every_method_discovers(method):
    settings = SHORT if method == "uno" else SHORT | {"method.settling.epochs": 1}
    finder = NovelClassDiscoverer(2, method=method, settings=settings).fit(X, Y).discover(POOL)
    assert finder.config_.method["name"] == method
    assert len(finder.classes_) == 4
    # The supervised phase is the same, so another method may take over after it.
    other = NovelClassDiscoverer(2, settings=SHORT).fit(X, Y)
    other.set_params(method=method, settings=settings).discover(POOL)
    assert fingerprint(other.model_) == fingerprint(finder.model_)


def test_the_seed_decides_every_bit():
    with unchanged_global_state():
        one, same = (short(random_state=3).fit(X, Y).discover(POOL) for _ in range(2))
    other = short(random_state=13).fit(X, Y).discover(POOL)  # 4 and 5 are tried with 3, too
    assert state(one) == state(same)
    assert fingerprint(one.model_) != fingerprint(other.model_)


@pytest.mark.parametrize("other", [13, np.random.RandomState(1), None])
def test_a_seed_that_is_set_after_fit_decides_what_is_discovered_and_saved(tmp_path, other):
    finder = short(random_state=3).fit(X, Y).set_params(random_state=other)
    finder.save(tmp_path / "before")
    finder.discover(POOL).save(tmp_path / "after")
    seed = finder.config_.seed
    assert seed == 13 if other == 13 else seed > 13
    for name in ("before", "after"):
        assert NovelClassDiscoverer.load(tmp_path / name).random_state == seed
    assert state(NovelClassDiscoverer.load(tmp_path / "before").discover(POOL)) == state(finder)
    as_it_was = short(random_state=3).fit(X, Y).discover(POOL)
    assert fingerprint(as_it_was.model_) != fingerprint(finder.model_)


def test_a_seed_that_is_set_after_fit_is_checked(learnt):
    finder = copy.copy(learnt).set_params(random_state="a")
    refused("random_state='a'", finder.discover, POOL)


def test_a_source_of_random_numbers_gives_another_seed_every_time():
    finder = short(random_state=np.random.RandomState(1))
    seeds = [finder.fit(X, Y).config_.seed for _ in range(2)]
    again = np.random.RandomState(1)
    assert seeds == [again.randint(2**31), again.randint(2**31)]
    assert seeds[0] != seeds[1]


def test_without_a_seed_the_global_state_decides():
    np.random.seed(11)  # noqa: NPY002 - what scikit-learn's users do
    seeds = [short(random_state=None).fit(X, Y).config_.seed for _ in range(2)]
    again = np.random.RandomState(11)
    assert seeds == [again.randint(2**31), again.randint(2**31)]


def test_labels_may_stand_in_a_column_with_a_warning():
    with pytest.warns(DataConversionWarning, match="column-vector"):
        finder = short().fit(X, Y[:, None])
    assert finder.classes_.tolist() == ["cat", "dog"]


def test_labels_may_be_a_list_or_a_tensor():
    for labels in (CODES.tolist(), torch.from_numpy(CODES)):
        assert short().fit(X, labels).classes_.tolist() == [0, 1]


def answering(answers, classes, named):
    """Return an estimator that gives these answers."""
    finder = NovelClassDiscoverer()
    finder.predict = lambda rows: np.array(answers)
    finder.classes_, finder.named_ = np.array(classes), np.array(named)
    return finder


CLASSES = ["cat", "dog", "novel-1", "novel-2"]


@pytest.mark.parametrize(
    ("answers", "true", "named", "score"),
    [
        # Names that somebody gave count as they are.
        (["cat", "dog", "dog"], ["cat", "cat", "dog"], 2, 2 / 3),
        # Others are matched, each to one: fox is novel-1, elk is novel-2.
        (["novel-1", "novel-1", "novel-2"], ["fox", "fox", "elk"], 2, 1),
        (["novel-1", "novel-1", "novel-1"], ["fox", "fox", "elk"], 2, 2 / 3),
        (["novel-1", "novel-1", "novel-2"], ["fox", "fox", "fox"], 2, 2 / 3),
        # Across the border everything is wrong.
        (["cat", "novel-1", "novel-1"], ["fox", "cat", "fox"], 2, 1 / 3),
        # A class that is called novel-1 may be any of them.
        (["novel-1", "novel-2"], ["novel-2", "novel-1"], 2, 1),
        (["novel-1", "novel-2"], ["novel-2", "novel-1"], 4, 0),
        # More classes than were discovered.
        (["novel-1", "novel-2", "novel-1"], ["fox", "elk", "owl"], 2, 2 / 3),
    ],
)
def test_labels_that_nobody_named_are_matched_to_discovered_classes(answers, true, named, score):
    finder = answering(answers, CLASSES, [number < named for number in range(4)])
    assert finder.score(None, true) == pytest.approx(score)


def test_rows_may_weigh_differently():
    finder = answering(["cat", "novel-1", "novel-2"], CLASSES, [True, True, False, False])
    assert finder.score(None, ["dog", "fox", "elk"], sample_weight=[2, 1, 1]) == 0.5


def test_before_discovery_labels_that_nobody_named_are_wrong(learnt):
    share = (learnt.predict(TEST) == TEST_Y).mean()
    assert learnt.score(TEST, TEST_Y) == share
    assert learnt.score(TEST[TEST_CODES >= 2], TEST_Y[TEST_CODES >= 2]) == 0


def test_classes_get_other_names(found):
    finder = copy.deepcopy(found)
    before = finder.predict(TEST)
    assert finder.rename({"novel-2": "elk", "cat": "lynx"}) is finder
    assert finder.classes_.tolist() == ["lynx", "dog", "novel-1", "elk"]
    assert finder.model_.class_names == ("lynx", "dog", "novel-1", "elk")
    assert finder.named_.tolist() == [True, True, False, True]
    renamed = np.array([{"novel-2": "elk", "cat": "lynx"}.get(name, name) for name in before])
    assert np.array_equal(finder.predict(TEST), renamed)
    assert found.classes_.tolist() == ["cat", "dog", "novel-1", "novel-2"]


def test_names_may_be_exchanged():
    finder = short().fit(X, CODES).discover(POOL)
    finder.rename({2: np.int64(3), 3: 2})
    assert finder.classes_.tolist() == [0, 1, 3, 2]
    assert finder.model_.class_names == ("0", "1", "3", "2")
    assert finder.named_.all()


@pytest.fixture(scope="module")
def by_kind():
    """Estimators by the kind of their labels; not to be changed."""
    labels = {"words": Y, "integers": CODES, "floats": CODES.astype(float)}
    return {kind: short().fit(X, values).discover(POOL) for kind, values in labels.items()}


@pytest.mark.parametrize(
    ("kind", "names", "message"),
    [
        ("words", {"elk": "x"}, "there is no class 'elk'; there are ['cat', 'dog', 'novel-1',"),
        ("words", {"novel-1": "cat"}, "two classes would be called 'cat'"),
        ("words", {"novel-1": "x", "novel-2": "x"}, "two classes would be called 'x'"),
        ("words", {"novel-1": ""}, "'' is not a name"),
        ("words", {"novel-1": 3}, "3 cannot be a class where classes are strings"),
        ("integers", {2: "elk"}, "'elk' cannot be a class where classes are whole numbers"),
        ("integers", {2: 2.5}, "2.5 cannot be a class where classes are whole numbers"),
        ("integers", {2: True}, "True cannot be a class"),
        ("integers", {2: 1}, "two classes would be called 1"),
        ("integers", {2: 10**30}, "classes holds object values"),
        ("integers", {2: 2**52 + 1}, "too large values"),
        ("integers", {2: 3, 0: 2**52}, "too large values"),  # what gives way goes on after it
        ("words", ["novel-1", "elk"], "['novel-1', 'elk'] does not map old names to new ones"),
        ("floats", {2: 1}, "two classes would be called 1.0"),
        ("floats", {2: float("nan")}, "classes holds NaN"),
    ],
)
def test_names_that_cannot_be_given_are_refused(by_kind, kind, names, message):
    finder = by_kind[kind]
    before = state(finder)
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        finder.rename(names)
    assert "\n" not in str(refused.value)
    assert state(finder) == before


def test_names_may_come_as_pairs(by_kind):
    finder = copy.deepcopy(by_kind["words"])
    assert finder.rename([("novel-1", "elk")]).classes_[2] == "elk"


def test_numbers_that_leave_no_room_for_others_are_refused_before_discovery():
    finder = short().fit(X, CODES + 2**52 - 1)
    before = state(finder)
    refused(
        "the largest class is 4503599627370496; novel ones could be larger", finder.discover, POOL
    )
    assert state(finder) == before


def test_discovery_does_not_claim_another_supervised_phase_than_there_was():
    finder = short().fit(X, Y)
    trained = finder.config_.supervised
    finder.set_params(settings={**finder.settings, "supervised.optim.epochs": 9})
    assert finder.discover(POOL).config_.supervised == trained


@pytest.mark.parametrize("kind", ["integers", "floats"])
def test_a_number_that_nobody_chose_gives_way_to_a_name(tmp_path, by_kind, kind):
    finder = copy.deepcopy(by_kind[kind])
    assert finder.classes_.tolist() == [0, 1, 2, 3]
    finder.rename({2: 3})
    assert finder.classes_.tolist() == [0, 1, 3, 4]
    assert finder.named_.tolist() == [True, True, True, False]
    finder.save(tmp_path)
    assert NovelClassDiscoverer.load(tmp_path).classes_.tolist() == [0, 1, 3, 4]
    refused("two classes would be called 3", finder.rename, {4: 3})  # 3 is a name now
    assert finder.rename({4: 2}).classes_.tolist() == [0, 1, 3, 2]


@pytest.mark.parametrize("labels", [Y, CODES, CODES.astype(float)], ids=["str", "int", "float"])
def test_a_saved_estimator_answers_as_before(tmp_path, labels):
    finder = short(random_state=np.random.RandomState(0)).fit(X, labels).discover(POOL)
    finder.rename({finder.classes_[-1].item(): "elk" if labels is Y else 9})
    finder.save(tmp_path / "kept")
    files = {"estimator.json", "model.json", "model.safetensors"}
    assert {path.name for path in (tmp_path / "kept").iterdir()} == files
    loaded = NovelClassDiscoverer.load(tmp_path / "kept")
    assert loaded.get_params() == {**finder.get_params(), "random_state": finder.config_.seed}
    assert state(loaded) == state(finder)
    assert loaded.classes_.dtype == finder.classes_.dtype
    assert np.array_equal(loaded.predict(TEST), finder.predict(TEST))
    assert np.array_equal(loaded.decision_function(TEST), finder.decision_function(TEST))


def test_a_saved_estimator_goes_on_to_the_same_bits(tmp_path):
    finder = short(random_state=np.random.RandomState(0)).fit(X, Y)
    finder.save(tmp_path)
    loaded = NovelClassDiscoverer.load(tmp_path)
    assert state(loaded.discover(POOL)) == state(finder.discover(POOL))


def saved_on_a_gpu(learnt, directory):
    """Save an estimator as a machine with a GPU would have done."""
    finder = copy.copy(learnt)
    finder._base = replace(finder._base, device="cuda")
    finder.set_params(device="cuda").save(directory)
    return finder


def test_an_estimator_of_a_gpu_is_loaded_without_one(tmp_path, monkeypatch, learnt):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    saved_on_a_gpu(learnt, tmp_path)
    with pytest.warns(
        UserWarning, match="was saved with device='cuda'.*; device='auto' is"
    ) as said:
        loaded = NovelClassDiscoverer.load(tmp_path)
    assert len(said) == 1
    assert "\n" not in str(said[0].message)
    assert loaded.device == "auto"
    assert loaded.discover(POOL).config_.device == "auto"
    assert fingerprint(loaded.model_) == fingerprint(copy.copy(learnt).discover(POOL).model_)


def test_an_estimator_is_loaded_to_another_device(tmp_path, recwarn, monkeypatch, learnt):
    monkeypatch.setattr("torch.cuda.is_available", lambda: False)
    saved_on_a_gpu(learnt, tmp_path)
    loaded = NovelClassDiscoverer.load(tmp_path, device="cpu")
    assert not recwarn.list
    assert np.array_equal(loaded.predict_proba(X), learnt.predict_proba(X))
    assert loaded.discover(POOL).config_.device == loaded.device == "cpu"
    loaded.save(tmp_path / "again")
    assert NovelClassDiscoverer.load(tmp_path / "again").device == "cpu"
    assert not recwarn.list
    load = NovelClassDiscoverer.load
    refused("this machine has no CUDA device", load, tmp_path, device="cuda")
    refused("device='gpu' should be one of", load, tmp_path, device="gpu")


def test_numbers_of_numpy_are_saved_as_numbers(tmp_path):
    settings = MappingProxyType({**SHORT, "supervised.optim.epochs": np.int64(1)})
    finder = short(image_size=8).set_params(num_novel=np.int64(2), settings=settings)
    finder.fit(IMAGES, IMAGE_Y).save(str(tmp_path / "kept"))
    loaded = NovelClassDiscoverer.load(str(tmp_path / "kept"))
    assert (loaded.num_novel, loaded.image_size) == (2, 8)
    assert loaded.settings == SHORT
    assert np.array_equal(loaded.predict(IMAGES), finder.predict(IMAGES))


def named(directory, monkeypatch, *names):
    """Return what is loaded after `ncdwf name`."""
    monkeypatch.setattr("sys.argv", ["ncdwf", "name", str(directory), *names])
    with pytest.raises(SystemExit, match="0"):
        main()
    return NovelClassDiscoverer.load(directory)


def test_names_of_the_command_line_are_the_estimators_too(tmp_path, monkeypatch, found):
    found.save(tmp_path / "kept")
    loaded = named(tmp_path / "kept", monkeypatch, "novel-1=elk")
    assert loaded.classes_.tolist() == ["cat", "dog", "elk", "novel-2"]
    assert loaded.named_.tolist() == [True, True, True, False]


def test_names_of_the_command_line_are_numbers_where_classes_are(tmp_path, monkeypatch, by_kind):
    by_kind["integers"].save(tmp_path / "kept")
    loaded = named(tmp_path / "kept", monkeypatch, "novel-1=40", "novel-2=elk")
    assert loaded.classes_.tolist() == [0, 1, 40, 3]
    assert loaded.classes_.dtype == np.int64
    assert loaded.named_.tolist() == [True, True, True, False]
    loaded.rename({3: 50, 40: 41})
    assert loaded.model_.class_names == ("0", "1", "41", "50")
    loaded.save(tmp_path / "again")
    assert NovelClassDiscoverer.load(tmp_path / "again").classes_.tolist() == [0, 1, 41, 50]


def test_a_number_that_the_command_line_gives_is_no_other_class_any_more(
    tmp_path, monkeypatch, by_kind
):
    by_kind["floats"].save(tmp_path / "kept")
    loaded = named(tmp_path / "kept", monkeypatch, "novel-1=3")
    assert loaded.classes_.tolist() == [0.0, 1.0, 3.0, 4.0]
    assert loaded.named_.tolist() == [True, True, True, False]
    assert loaded.rename({4.0: 2.0}).classes_.tolist() == [0.0, 1.0, 3.0, 2.0]


def test_a_second_estimator_is_not_saved_over_the_first(tmp_path, learnt, found):
    learnt.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    with pytest.raises(InputError, match="holds a model already"):
        found.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before


def test_a_disk_that_runs_full_leaves_room_for_another_try(tmp_path, learnt, monkeypatch):
    write, written = storage.write_bytes, []

    def full(path, data):
        written.append(path.name)
        if len(written) == number:
            raise StorageError(f"cannot write {path}: the disk is full")
        write(path, data)

    for number in (1, 2, 3):
        written.clear()
        with monkeypatch.context() as patched:
            patched.setattr(storage, "write_bytes", full)
            with pytest.raises(StorageError, match="the disk is full"):
                learnt.save(tmp_path / str(number))
        learnt.save(tmp_path / str(number))
        loaded = NovelClassDiscoverer.load(tmp_path / str(number))
        assert np.array_equal(loaded.predict(X), learnt.predict(X))
    assert written[-1] == "model.json"  # with it all is there


def test_what_cannot_be_written_is_said_before_anything_is(tmp_path, learnt):
    finder = copy.copy(learnt).set_params(settings={"seed": object()})
    with pytest.raises(InputError, match=r"settings=.* cannot be written: object is no value"):
        finder.save(tmp_path / "kept")
    refused(
        "image_size='big' should be", finder.set_params(image_size="big").save, tmp_path / "kept"
    )
    assert not (tmp_path / "kept").exists()


def test_names_of_columns_that_cannot_be_written_leave_nothing_behind(tmp_path, learnt):
    finder = copy.copy(learnt)
    finder.feature_names_in_ = np.array([*"abcd", "\udcff"], object)
    refused(r"'\udcff' is not valid text", finder.save, tmp_path / "kept")
    assert not (tmp_path / "kept").exists()


@pytest.fixture(scope="module")
def kept(tmp_path_factory, found):
    directory = tmp_path_factory.mktemp("estimator") / "kept"
    found.save(directory)
    return directory


def changed(path, value):
    """Return what puts `value` at a dotted path of the description."""

    def change(content):
        *parents, last = path.split(".")
        for name in parents:
            content = content[name]
        content[last] = value

    return change


def without(path):
    def change(content):
        *parents, last = path.split(".")
        for name in parents:
            content = content[name]
        del content[last]

    return change


HOSTILE = {
    "another parameter": (
        changed("parameters.n_jobs", 2),
        "unknown key estimator.parameters.n_jobs",
    ),
    "a missing parameter": (without("parameters.method"), "estimator.parameters lacks method"),
    "a missing key": (without("named"), "estimator lacks named"),
    "another key": (changed("model", {}), "unknown key estimator.model"),
    "parameters that are none": (changed("parameters", []), "parameters=[] should be an object"),
    "text for a number": (changed("parameters.num_novel", "2"), "num_novel='2' should be int"),
    "a list for text": (changed("parameters.method", []), "method=[] should be str"),
    "an unknown method": (changed("parameters.method", "ncd"), "unknown method 'ncd'"),
    "an unknown device": (changed("parameters.device", "gpu"), "device='gpu' is not one of"),
    "a size beyond measure": (changed("parameters.image_size", 10**30), "image_size=1000"),
    "a list of settings": (changed("parameters.settings", ["a"]), "settings=['a'] should be"),
    "another number of classes": (changed("classes", ["cat"]), "does not name every class"),
    "a class twice": (changed("classes", ["a", "a", "b", "c"]), "does not name every class"),
    "names and numbers": (changed("classes", ["a", 1, 2, 3]), "does not name every class"),
    "numbers beyond measure": (changed("classes", [1, 2, 3, 10**400]), "classes holds object"),
    "numbers that are too large": (changed("classes", [1, 2, 3, 2**60]), "too large values"),
    "classes that are none": (changed("classes", [None] * 4), "classes[0]=None should be str"),
    "classes that are truths": (changed("classes", [True] * 4), "classes[0]=True should be str"),
    "classes that are lists": (changed("classes", [[]] * 4), "classes[0]=[] should be str"),
    "no list of classes": (changed("classes", "abcd"), "classes='abcd' should be a list"),
    "numbers for truths": (changed("named", [1, 1, 0, 0]), "named[0]=1 should be bool"),
    "too few truths": (changed("named", [True]), "does not name every class"),
    "other known classes": (changed("num_known", 3), "num_known=3 and num_novel=[2] are not"),
    "a fraction of a class": (changed("num_known", 2.0), "num_known=2.0 should be int"),
    "other novel classes": (changed("num_novel", [1]), "num_novel=[1] are not the model's"),
    "another round": (changed("num_novel", [0, 2]), "num_novel=[0, 2] are not the model's"),
    "rounds that make up for each other": (changed("num_novel", [-1, 1, 2]), "are not the model's"),
    "a known class that was discovered": (
        lambda content: content.update(num_known=1, num_novel=[1, 2]),
        "num_known=1 and num_novel=[1, 2] are not the model's",
    ),
    "too few names of columns": (
        changed("feature_names", ["a"]),
        "feature_names are not one for each number",
    ),
    "columns that are numbers": (changed("feature_names", [1] * 5), "should be tuple or null"),
    "no rounds": (changed("num_novel", []), "num_novel=[] are not the model's"),
    "a broken configuration": (changed("base.seed", "a"), "estimator.base.seed='a' should be int"),
    "impossible epochs": (changed("config.supervised.optim.epochs", 0), "optim.epochs=0 should"),
    "an unknown field": (changed("base.method.speed", 1), "unknown key config.method.speed"),
    "no configuration": (changed("base", None), "estimator.base=None should be an object"),
}


@pytest.mark.parametrize("name", HOSTILE)
def test_descriptions_that_were_changed_are_refused_in_one_line(tmp_path, kept, name):
    change, message = HOSTILE[name]
    for file in kept.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    path = tmp_path / "estimator.json"
    content = json.loads(path.read_text())
    change(content)
    path.write_text(json.dumps(content))
    with pytest.raises(InputError, match=re.escape(message)) as refused:
        NovelClassDiscoverer.load(tmp_path)
    assert str(refused.value).startswith(f"{path} does not describe an estimator of ncdwf: ")
    assert "\n" not in str(refused.value)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("estimator.json", None, "estimator.json is missing"),
        ("estimator.json", b"", "estimator.json is not valid JSON"),
        ("estimator.json", b"[]", "estimator=[] should be an object"),
        ("estimator.json", b"[" * 10**5, "estimator.json is not valid JSON"),
        ("estimator.json", b"9" * 5000, "estimator.json is not valid JSON"),
        ("estimator.json", b"[" + b'"a", ' * 10**5 + b'"a"]', "estimator=['a', 'a', 'a', "),
        ("estimator.json", b"\x80\x04N.", "estimator.json is not valid JSON"),
        ("model.json", None, "holds no model"),
        ("model.safetensors", b"", "model.safetensors is damaged"),
    ],
    ids=lambda value: None if isinstance(value, str) else str(value)[:8],
)
def test_damaged_files_are_refused_in_one_line(tmp_path, kept, name, content, message):
    for file in kept.iterdir():
        (tmp_path / file.name).write_bytes(file.read_bytes())
    (tmp_path / name).unlink() if content is None else (tmp_path / name).write_bytes(content)
    with pytest.raises(InputError) as refused:
        NovelClassDiscoverer.load(tmp_path)
    said = str(refused.value)
    assert message in said
    assert "\n" not in said
    assert len(said) < len(str(tmp_path)) + 500


def test_a_model_without_its_estimator_is_refused(tmp_path, found):
    found.model_.save(tmp_path)
    with pytest.raises(InputError, match=r"estimator.json is missing"):
        NovelClassDiscoverer.load(tmp_path)


def with_value(value):
    rows = X.copy()
    rows[3, 2] = value
    return rows


def objects(value):
    rows = X.astype(object)
    rows[3, 2] = value
    return rows


BAD_ROWS = {
    "a row": (X[0], "X has shape (5,)"),
    "a number": (3, "X has shape ()"),
    "nothing": (None, "X has shape ()"),
    "no rows": (X[:0], "X has 0 sample(s) (shape=(0, 5))"),
    "an empty list": ([], "X has 0 sample(s) (shape=(0,))"),
    "no columns": (X[:, :0], "X has 0 feature(s) (shape=(40, 0))"),
    "a tensor without rows": (torch.zeros(0, 5), "X has 0 sample(s)"),
    "a tensor of one dimension": (torch.zeros(5), "X has shape (5,)"),
    "three dimensions of fractions": (X[:, :, None], "X are torch.float32; uint8"),
    "five dimensions": (np.zeros((40, 1, 2, 2, 2), np.uint8), "X have shape (40, 1, 2, 2, 2)"),
    "two channels": (np.zeros((40, 2, 8, 8), np.uint8), "X have shape (40, 2, 8, 8)"),
    "pictures without height": (np.zeros((40, 1, 0, 8), np.uint8), "X have shape (40, 1, 0, 8)"),
    "pictures of long integers": (IMAGES.astype(int), "X are torch.int64; uint8"),
    "pictures of fractions": (IMAGES / 255, "X are torch.float64; uint8"),
    "NaN": (with_value(np.nan), "X hold NaN"),
    "infinite": (with_value(-np.inf), "X hold NaN, infinite"),
    "too large for single precision": (
        X.astype(float) * 1e300,
        "X hold NaN, infinite or too large",
    ),
    "complex numbers": (X + 1j, "Complex data not supported in X"),
    "complex tensors": (torch.zeros(40, 5, dtype=torch.complex64), "X are torch.complex64"),
    "words": (np.full((40, 5), "a"), "X are not an array of numbers"),
    "bytes": (np.full((40, 5), b"a"), "X are not an array of numbers"),
    "dates": (np.zeros((40, 5), "datetime64[s]"), "X are not an array of numbers"),
    "an object that is a word": (objects("a"), "X should hold numbers: could not convert"),
    "an object that is nothing": (objects(None), "X hold NaN"),
    "an object that is a dict": (objects({}), "X should hold numbers: float() argument"),
    "a dict": ({"a": 1}, "X should hold numbers"),
    "a generator": ((row for row in X), "X is a generator; a list of paths, or an array, is"),
    "paths one after another": (map(Path, "ab"), "X is a map; a list of paths, or an array, is"),
    "rows of different lengths": (
        [[1.0, 2.0], [1.0]],
        "X differ in size or channels: number 0 is (2,), number 1 is (1,)",
    ),
    "pictures of different sizes": (
        [IMAGES[0], IMAGES[0, :, :4]],
        "X differ in size or channels: number 0 is (1, 16, 16), number 1 is (1, 4, 16)",
    ),
    "a list of things": ([[1.0, {}], [1.0, {}]], "X are not an array of numbers"),
    "a column of numbers": (pyarrow.array(X[:, 0]), "X has shape (40,)"),
    "a column of words that are no paths": (pyarrow.array(Y), "cat cannot be read as a picture"),
    "a sparse matrix": (scipy.sparse.csr_matrix(X), "X is a sparse matrix"),
    "a sparse array": (scipy.sparse.coo_array(X), "X is a sparse matrix"),
    "a sparse tensor": (torch.from_numpy(X).to_sparse(), "X is a sparse matrix"),
    "one path": ("a.png", "X is one path, 'a.png'"),
    "one Path": (Path("a.png"), "X is one path, 'a.png'"),
    "words that are no paths": (["cat", "dog"] * 20, "cat cannot be read as a picture"),
    "an array of such words": (Y, "cat cannot be read as a picture"),
    "paths and numbers": (["good.png", 3], "X[1]=3 is no path"),
    "paths as bytes": ([b"good.png"] * 40, "X holds bytes; paths are strings"),
    "a column of bytes": (np.array([b"good.png"] * 40), "X holds bytes; paths are strings"),
    "a path and bytes": (["good.png", b"good.png"], "X holds bytes; paths are strings"),
    "a column with a gap": (pyarrow.array(["good.png", None] * 20), "X[1]=None is no path"),
    "a missing file": (["good.png", "no.png"], "no.png cannot be read as a picture: there is no"),
    "a corrupt picture": (["good.png", "bad.png"], "bad.png cannot be read as a picture: its"),
    "an empty file": (["good.png", "empty.png"], "empty.png cannot be read as a picture: it is"),
    "a folder": (["good.png", "."], ". cannot be read as a picture: it is no file"),
    "corrupt pictures alone": (["bad.png", "bad.png"], "none of the files could be read"),
}


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    Image.new("L", (8, 8)).save("good.png")
    Path("bad.png").write_bytes(b"no picture")
    Path("empty.png").touch()


def refused(message, function, *arguments, **rest):
    """Assert that a call ends with one line that holds `message`."""
    with pytest.raises(InputError) as caught:
        function(*arguments, **rest)
    said = str(caught.value)
    assert message in said
    assert "\n" not in said


@pytest.mark.parametrize("name", BAD_ROWS)
def test_rows_that_cannot_be_used_are_refused_in_one_line(files, name):
    rows, message = BAD_ROWS[name]
    labels = np.arange(len(rows) if isinstance(rows, list) and rows else 40) % 2
    refused(message, short().fit, rows, labels)


OTHER_ROWS = {
    "fewer columns": (X[:, :3], "X has 3 features, but NovelClassDiscoverer is expecting 5"),
    "pictures": (IMAGES, "X holds pictures; this estimator was fitted to 5 numbers"),
    "paths": (["good.png"], "X holds pictures; this estimator was fitted to 5 numbers"),
    "no rows": (X[:0], "X has 0 sample(s)"),
    "NaN": (with_value(np.nan), "X hold NaN"),
}
OTHER_PICTURES = {
    "vectors": (X, "vectors are (5,); this model reads (1, 16, 16)"),
    "colour": (np.zeros((2, 3, 16, 16), np.uint8), "pictures are (3, 16, 16); this model reads"),
    "a missing file": (["good.png", "no.png"], "no.png cannot be read as a picture"),
    "no pictures": (IMAGES[:0], "X has 0 sample(s)"),
}


@pytest.mark.parametrize("verb", ["discover", "predict", "predict_proba", "transform"])
@pytest.mark.parametrize(
    ("kind", "name"),
    [
        *(("learnt", name) for name in OTHER_ROWS),
        *(("of_pictures", name) for name in OTHER_PICTURES),
    ],
)
def test_rows_of_another_kind_than_was_learnt_are_refused(files, request, verb, kind, name):
    finder = request.getfixturevalue(kind)
    rows, message = (OTHER_ROWS if kind == "learnt" else OTHER_PICTURES)[name]
    refused(message, getattr(finder, verb), rows)


BAD_LABELS = {
    "none": (None, "requires y to be passed"),
    "one class": (np.zeros(40, int), "y holds one class"),
    "a class of one row": (np.array([*Y[:-1], "emu"]), "class 'emu' has one row"),
    "a number of one row": (np.array([*CODES[:-1], 7]), "class 7 has one row"),
    "too few": (Y[:-1], "39 labels do not match 40 rows"),
    "too many": ([*Y, "cat"], "41 labels do not match 40 rows"),
    "two columns": (
        np.stack([CODES, CODES], 1),
        "y should be a 1d array, got an array of shape (40, 2)",
    ),
    "a word": ("cat", "y should be a 1d array"),
    "a number": (3, "y should be a 1d array"),
    "a dict": ({}, "y should be a 1d array"),
    "lists": ([[1], [1, 2]] * 20, "Unknown label type: y should hold strings alone, or"),
    "a list of several kinds": (["a", 1] * 20, "Unknown label type: y should hold strings alone"),
    "a list with gaps": (["a", float("nan")] * 20, "y should hold strings alone, or numbers alone"),
    "a list of truths": ([True, False] * 20, "y should hold strings alone, or numbers alone"),
    "fractions": (CODES + 0.5, "Unknown label type: continuous"),
    "NaN": (np.where(CODES, np.nan, 0), "y holds NaN"),
    "infinite": (np.where(CODES, np.inf, 0), "y holds NaN, infinite"),
    "numbers without room for others": (CODES + 2**60, "y holds NaN, infinite or too large"),
    "the largest numbers": (np.where(CODES, 2**64 - 1, 0).astype(np.uint64), "too large values"),
    "numbers beyond measure": ([0, 10**30] * 20, "y holds object values"),
    "complex numbers": (CODES + 1j, "Complex data not supported"),
    "truths": (CODES == 1, "y holds bool values; strings or numbers"),
    "bytes": (Y.astype(bytes), "y holds |S3 values"),
    "dates": (CODES.astype("datetime64[D]"), "y holds datetime64[D] values"),
    "words and numbers": (np.array(["cat", 1] * 20, object), "y should hold strings alone"),
    "words and nothing": (np.array(["cat", None] * 20, object), "y should hold strings alone"),
    "truths that are objects": (
        np.array([True, False] * 20, object),
        "y should hold strings alone",
    ),
    "no name": (np.where(CODES, "cat", ""), "y holds the blank label ''; give that class a name"),
    "a blank name": (np.where(CODES, "cat", " "), "y holds the blank label ' '"),
    "half a character": (
        np.where(CODES, "cat", "\udcff"),
        r"y holds the label '\udcff', which is not valid text; choose another",
    ),
    "things": ([object()] * 40, "y should hold strings alone"),
}


class Nullable:
    """A column as pandas has it for whole numbers of which some may be missing."""

    dtype = "Int64"

    def __init__(self, values):
        self._values = values
        self.shape = (len(values),)

    def __array__(self, dtype=None, copy=None):
        return np.array(self._values, dtype or object)


def test_whole_numbers_in_a_column_with_room_for_missing_ones_stay_whole():
    finder = short().fit(X, Nullable(CODES.tolist()))
    assert finder.classes_.tolist() == [0, 1]
    assert finder.classes_.dtype.kind == "i"
    refused("y should hold strings alone", short().fit, X, Nullable([None, *CODES[1:].tolist()]))


def test_columns_of_truths_are_zeros_and_ones():
    truths, pool = X.mean(0) < X, POOL.mean(0) < POOL
    found = short().fit(truths, Y).discover(pool)
    expected = short().fit(truths.astype(float), Y).discover(pool.astype(float))
    assert fingerprint(found.model_) == fingerprint(expected.model_)


@pytest.mark.parametrize("name", BAD_LABELS)
def test_labels_that_cannot_be_used_are_refused_in_one_line(name):
    labels, message = BAD_LABELS[name]
    refused(message, short().fit, X, labels)


BAD_SCORES = {
    "labels": ((TEST, None), "requires y to be passed"),
    "too few labels": ((TEST, TEST_Y[:-1]), "39 labels do not match 40 rows of X"),
    "numbers for names": ((TEST, TEST_CODES), "y holds int64 values; the classes are <U7"),
    "too few weights": ((TEST, TEST_Y, [1.0]), "sample_weight does not fit the rows"),
    "no weight at all": ((TEST, TEST_Y, np.zeros(40)), "sample_weight does not fit the rows"),
    "weights that are none": ((TEST, TEST_Y, ["a"] * 40), "sample_weight does not fit the rows"),
}


@pytest.mark.parametrize("name", BAD_SCORES)
def test_what_cannot_be_scored_is_refused_in_one_line(found, name):
    arguments, message = BAD_SCORES[name]
    refused(message, found.score, *arguments)


@pytest.mark.parametrize("num_novel", [0, -1, 2.5, 2.0, "2", None, True, float("nan"), [2]])
def test_novel_classes_are_counted_in_whole_numbers(learnt, num_novel):
    finder = copy.copy(learnt).set_params(num_novel=num_novel)
    refused(
        f"num_novel={num_novel!r} should be 'auto' or a whole number from 1 on",
        finder.discover,
        POOL,
    )


@pytest.mark.parametrize("place", [".", "supervised"], ids=["a model", "a run of learn"])
def test_a_model_of_the_command_line_is_said_to_be_one(tmp_path, learnt, place):
    learnt.model_.save(tmp_path / place)
    with pytest.raises(InputError, match=r"a model alone, .* is read by ncdwf\.Model\.load"):
        NovelClassDiscoverer.load(tmp_path)


def test_what_could_not_be_loaded_is_not_saved(tmp_path, learnt):
    finder = copy.copy(learnt).set_params(num_novel=2.0)
    refused("num_novel=2.0 should be", finder.save, tmp_path / "kept")
    refused("num_novel=2.0 should be", finder.discover, POOL, num_novel=2)
    assert not (tmp_path / "kept").exists()


def test_the_number_of_one_round_is_checked(learnt):
    refused("num_novel=0 should be 'auto' or a whole", learnt.discover, POOL, num_novel=0)


def test_more_novel_classes_than_rows_are_refused(learnt):
    for num_novel in (31, 10**30):
        refused(f"{num_novel} novel classes", learnt.discover, POOL, num_novel=num_novel)


def test_the_number_of_novel_classes_can_be_estimated(learnt):
    pool, _ = blobs(40, seed=4, classes=(2, 3, 4))
    finder = copy.copy(learnt).discover(pool, num_novel="auto")
    count = finder.survey_.count
    assert (finder.num_novel_, finder.model_.num_novel) == ([count.number], count.number)
    assert count.low <= count.number == max(count.curve, key=count.curve.get) <= count.high
    assert abs(count.number - 3) <= 1
    assert len(finder.classes_) == 2 + count.number
    assert copy.copy(learnt).discover(POOL).survey_.count is None


def test_auto_is_a_parameter_that_is_saved(tmp_path):
    finder = short("auto").fit(X, Y)
    finder.discover(blobs(40, seed=4, classes=(2, 3))[0]).save(tmp_path)
    loaded = NovelClassDiscoverer.load(tmp_path)
    assert loaded.num_novel == "auto"
    assert loaded.num_novel_ == finder.num_novel_


def test_known_rows_of_a_mixed_pool_are_left_out(learnt):
    labelled, classes = blobs(100, seed=1, classes=(0, 1))
    pool, codes = blobs(30, seed=4)
    finder = short().set_params(settings={**SHORT, **REPLAY, "supervised.optim.epochs": 20})
    finder.fit(labelled, classes).discover(pool, pool="mixed")
    sifted = finder.survey_.sifted
    kept = sifted.is_kept.numpy()
    assert kept[codes >= 2].mean() > 0.9
    assert kept[codes < 2].mean() < 0.25
    assert 0.3 < sifted.known_share < 0.7
    assert finder.config_.discovery.pool == "mixed"
    assert copy.copy(learnt).discover(POOL).survey_.sifted is None


@pytest.mark.parametrize(("share", "warnings"), [(0.75, 0), (0.764, 1)])
def test_a_pool_that_is_known_almost_all_of_it_is_warned_of(
    monkeypatch, caplog, learnt, share, warnings
):
    everything = Sifted(torch.ones(len(POOL), dtype=torch.bool), share)
    monkeypatch.setattr("ncdwf.learning.survey.sift", lambda *_, **__: everything)
    with caplog.at_level(logging.WARNING, logger="ncdwf.estimator"):
        copy.copy(learnt).discover(POOL, pool="mixed")
    said = "at least 76 % of the pool looks known: what was found may be no class at all"
    assert [record.getMessage() for record in caplog.records] == [said] * warnings


def test_a_new_fit_forgets_what_the_last_pool_was_like():
    finder = short().fit(X, Y).discover(POOL)
    assert finder.survey_ is not None
    assert not hasattr(finder.fit(X, Y), "survey_")


@pytest.mark.parametrize("pool", ["known", ""])
def test_a_pool_is_novel_or_mixed(learnt, pool):
    refused(f"pool={pool!r} should be 'novel' or 'mixed'", learnt.discover, POOL, pool=pool)


def test_too_small_a_pool_is_not_counted(learnt):
    refused(
        "the classes of 10 pictures cannot be counted", learnt.discover, POOL[:10], num_novel="auto"
    )


BAD_PARAMETERS = [
    ("num_novel", 0, "num_novel=0 should be 'auto' or a whole number from 1 on"),
    ("num_novel", 2.0, "num_novel=2.0 should be"),
    ("num_novel", "many", "num_novel='many' should be"),
    ("method", "ncd", "unknown method 'ncd'; there are ncdwf"),
    ("method", 3, "method=3 should be the name of a method"),
    ("method", ["ncdwf"], "method=['ncdwf'] should be the name of a method"),
    ("backbone", "resnet", "unknown backbone 'resnet'"),
    ("backbone", "small", "the backbone 'small' reads pictures, not inputs of shape (5,)"),
    ("backbone", "timm:nothing", "timm"),
    ("backbone", "custom", "unknown backbone 'custom'"),
    ("backbone", None, "backbone=None should be 'auto', a name or a module"),
    ("backbone", nn.Identity, "should be 'auto', a name or a module"),
    ("image_size", 0, "image_size=0 should be 'auto' or a whole number from 1 to 4096"),
    ("image_size", 4097, "image_size=4097 should be"),
    ("image_size", 2.5, "image_size=2.5 should be"),
    ("image_size", "big", "image_size='big' should be"),
    ("image_size", True, "image_size=True should be"),
    ("image_size", np.arange(500).reshape(5, 100), "image_size=array([[ 0, 1, 2,"),
    ("device", "gpu", "device='gpu' should be one of ('auto', 'cpu', 'cuda')"),
    ("device", None, "device=None should be one of"),
    ("random_state", "a", "random_state='a': 'a' cannot be used to seed"),
    ("verbose", 2, "verbose=2 should be True or False"),
    ("random_state", 2.5, "random_state=2.5"),
    ("random_state", -1, "random_state=-1: Seed must be between 0 and 2**32 - 1"),
    ("random_state", 2**70, f"random_state={2**70}: Seed must be between"),
    ("random_state", np.random.default_rng(0), "random_state=Generator(PCG64)"),
    ("settings", "seed=1", "settings='seed=1' should be a mapping, or None"),
    ("settings", ["a"], "settings=['a'] should be a mapping"),
    ("settings", {"sed": 1}, "unknown key config.sed; did you mean"),
    ("settings", {"discovery.optim.lrr": 1}, "unknown key config.discovery.optim.lrr"),
    ("settings", {"method.tua": 0.5}, "unknown key config.method.tua; did you mean 'tau'?"),
    ("settings", {3: 1}, "unknown key config.3"),
    (
        "settings",
        {"discovery.optim.epochs": "x"},
        "config.discovery.optim.epochs='x' should be int",
    ),
    ("settings", {"method.tau": 2}, "config.method.tau=2.0 should be between 0 and 1"),
    ("settings", {"discovery.optim.lr": float("nan")}, "config.discovery.optim.lr=nan should be"),
    ("settings", {"engine": object()}, "settings['engine']=<object"),
    ("settings", {"seed": 5}, "settings['seed'] is given as random_state=…"),
    ("settings", {"device": "cpu"}, "settings['device'] is given as device=…"),
    ("settings", {"backbone": "vector"}, "settings['backbone'] is given as backbone=…"),
    ("settings", {"method.name": "uno"}, "settings['method.name'] is given as method=…"),
    (
        "settings",
        {"discovery.num_novel": 3},
        "settings['discovery.num_novel'] is given as num_novel",
    ),
    (
        "settings",
        {"discovery.pool": "mixed"},
        "settings['discovery.pool'] is given as discover(X, pool=…)",
    ),
]


@pytest.mark.parametrize(("name", "value", "message"), BAD_PARAMETERS)
def test_parameters_are_checked_before_anything_is_learnt(monkeypatch, name, value, message):
    monkeypatch.setattr(ncdwf.estimator, "fit_discovery", None)
    monkeypatch.setattr(ncdwf.learning.batches.TensorSource, "batch", None)
    refused(message, NovelClassDiscoverer(2).set_params(**{name: value}).fit, X, Y)


def test_parameters_that_were_changed_after_fit_are_checked_again(learnt):
    finder = copy.copy(learnt).set_params(settings={"sed": 1})
    refused("unknown key config.sed", finder.discover, POOL)
    refused("device='gpu' should be", finder.set_params(device="gpu").discover, POOL)


def test_a_network_that_cannot_read_the_rows_is_refused():
    message = "this backbone cannot read inputs of shape (1, 16, 16)"
    refused(message, short(backbone=tiny_net(num_channels=3)).fit, IMAGES, IMAGE_Y)


@pytest.mark.skipif(torch.cuda.is_available(), reason="the device is there")
def test_a_missing_device_is_named():
    refused("this machine has no CUDA device", short(device="cuda").fit, X, Y)


EXPECTED_FAILURES = {
    "check_methods_subset_invariance": "features are single precision, the check is not",
}


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_the_checks_of_scikit_learn_pass(monkeypatch):
    # They construct it from impossible values, which the shape checker of the tests would refuse.
    plain = inspect.unwrap(NovelClassDiscoverer.__init__)
    monkeypatch.setattr(NovelClassDiscoverer, "__init__", plain)
    finder = NovelClassDiscoverer(settings={"supervised.optim.epochs": 30})
    results = check_estimator(finder, expected_failed_checks=EXPECTED_FAILURES, on_skip=None)
    status = {result["check_name"]: result["status"] for result in results}
    assert list(status.values()).count("passed") >= 40
    # None of them is listed in vain.
    assert {name for name, found in status.items() if found == "xfail"} == set(EXPECTED_FAILURES)


@pytest.mark.slow
def test_five_digits_are_discovered_in_vectors_of_64_numbers():
    rows, digits = load_digits(return_X_y=True)
    known, novel = [], []
    for seed in range(5):
        train, test, labels, truth = train_test_split(
            rows, digits, test_size=0.3, stratify=digits, random_state=seed
        )
        finder = NovelClassDiscoverer(5, random_state=seed).fit(
            train[labels < 5], labels[labels < 5]
        )
        model: Model = finder.discover(train[labels >= 5]).model_
        said = model.outputs(model.features(torch.from_numpy(test).float()))
        by_known = said.known_logits.argmax(1).numpy()
        known.append((by_known == truth)[truth < 5].mean())
        by_novel = said.novel_logits[int(model.best_head)].argmax(1).numpy()
        pairs = np.zeros((5, 5))
        np.add.at(pairs, (by_novel[truth >= 5], truth[truth >= 5] - 5), 1)
        novel.append(pairs[linear_sum_assignment(-pairs)].sum() / pairs.sum())
    assert 100 * np.mean(known) >= 97
    assert 100 * np.mean(novel) >= 88


@pytest.mark.slow
def test_a_second_round_forgets_neither_labelled_classes_nor_those_of_the_first():
    rows, digits = load_digits(return_X_y=True)
    train, test, labels, truth = train_test_split(
        rows, digits, test_size=0.3, stratify=digits, random_state=0
    )
    finder = NovelClassDiscoverer(2, settings={"discovery.tries": 1})
    finder.fit(train[labels < 6], labels[labels < 6])
    for round_ in ((6, 7), (8, 9)):
        finder.discover(train[np.isin(labels, round_)])
    right = [
        finder.score(test[np.isin(truth, classes)], truth[np.isin(truth, classes)])
        for classes in (range(6), (6, 7), (8, 9))
    ]
    # Without distillation 46 % of the labelled ones would be right, and 68 of the first round.
    assert min(right) > 0.8


def test_what_follows_from_the_data_is_said_to_who_asks(capsys, tmp_path):
    quiet = short("auto").fit(X, Y).discover(POOL)
    assert capsys.readouterr() == ("", "")
    loud = short("auto", verbose=True).fit(X, Y).discover(POOL)
    learnt, discovered, counted = capsys.readouterr().out.splitlines()
    assert learnt.startswith("40 rows, 2 classes at 5 · backbone vector · ")
    assert learnt.endswith('Another choice: settings={"supervised.optim.epochs": …}')
    assert discovered.startswith("30 rows at 5 · backbone vector · ")
    assert counted.endswith("a rough estimate. Another choice: num_novel=…")
    assert np.array_equal(loud.predict_proba(TEST), quiet.predict_proba(TEST))
    loud.save(tmp_path / "model")
    assert NovelClassDiscoverer.load(tmp_path / "model").verbose


def test_how_far_learning_has_come_is_shown_to_who_asks(monkeypatch):
    class Seen(Bar):
        def start(self, task, total, done):
            shown.append(task)
            super().start(task, total, done)

    shown = []
    monkeypatch.setattr(ncdwf.estimator, "Bar", Seen)
    short().fit(X, Y).discover(POOL)
    assert shown == []
    twice = {**SHORT, **REPLAY, "discovery.optim.epochs": 2}
    short(verbose=True).set_params(settings=twice).fit(X, Y).discover(POOL)
    tries = [f"discovery {number}/3" for number in (1, 2, 3)]
    assert shown == ["supervised", *tries, "discovery", "settling"]


def test_columns_are_refused_before_anything_is_learnt(monkeypatch):
    finder = short().fit(X, Y)
    before = state(finder)

    def refuse(estimator, columns):
        raise InputError("such columns")

    monkeypatch.setattr("ncdwf.estimator.remember_columns", refuse)
    with pytest.raises(InputError, match="such columns"):
        finder.fit(X[:, :3], Y)
    assert state(finder) == before

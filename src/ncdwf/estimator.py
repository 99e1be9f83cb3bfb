"""The scikit-learn face: learn labelled classes, discover novel ones, name anything."""

import json
import logging
from collections.abc import Mapping, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.utils import check_random_state
from sklearn.utils.multiclass import check_classification_targets
from sklearn.utils.validation import check_is_fitted, column_or_1d, validate_data
from torch import nn

import ncdwf.methods  # noqa: F401 - registers every method
from ncdwf import storage
from ncdwf.config import Config, from_dict, override, require
from ncdwf.data.folder import decode, survey
from ncdwf.data.inputs import Images, Inputs, as_images, as_inputs, resized
from ncdwf.errors import InputError
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.loop import choose_device
from ncdwf.learning.supervised import learn_known
from ncdwf.model import Model
from ncdwf.model.backbone import CUSTOM
from ncdwf.recipes import LARGEST_SIDE, fit_discovery, fit_supervised, own_data
from ncdwf.results.experiment import complete
from ncdwf.results.metrics import count_pairs, match_clusters

log = logging.getLogger(__name__)
ESTIMATOR_FILE = "estimator.json"


class NovelClassDiscoverer(TransformerMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that discovers classes nobody labelled, without forgetting the labelled ones.

    `fit` learns the known classes and keeps neither `X` nor `y`; `discover`, as often as you like,
    finds novel classes in unlabelled data; `predict` names anything, and nobody says which kind it
    is. `X` may be pictures (uint8, `[image, channel, height, width]` or with the channels last),
    a list of paths of pictures, or vectors (`[row, number]`).

    Args:
        num_novel: how many novel classes `discover` looks for.
        method: how to discover; `ncdwf list` shows the methods.
        backbone: the network: `auto`, a name, `timm:NAME`, or any module of your own.
        image_size: pictures are scaled to this side; `auto` keeps small ones as they are.
        settings: fields of the configuration to override: `{"discovery.optim.epochs": 50}`.
        device: `auto`, `cpu` or `cuda`.
        random_state: decides every draw.

    Attributes:
        classes_: every class in the order of its probability: labelled ones, then discovered ones.
        named_: which of them somebody has named: by a label, or by `rename`.
        num_known_: how many classes had labels.
        num_novel_: how many were discovered, in each round.
        model_: what was learnt.
        config_: the configuration that followed from the data.

    >>> from sklearn.datasets import load_digits
    >>> X, y = load_digits(return_X_y=True)
    >>> finder = NovelClassDiscoverer(num_novel=5).fit(X[y < 5], y[y < 5])
    >>> finder.discover(X[y >= 5]).classes_
    array([0, 1, 2, 3, 4, 5, 6, 7, 8, 9])
    """

    def __init__(
        self,
        num_novel: int = 2,
        *,
        method: str = "ncdwf",
        backbone: str | nn.Module = "auto",
        image_size: int | Literal["auto"] = "auto",
        settings: Mapping[str, Any] | None = None,
        device: Literal["auto", "cpu", "cuda"] = "auto",
        random_state: Any = 0,
    ) -> None:
        self.num_novel = num_novel
        self.method = method
        self.backbone = backbone
        self.image_size = image_size
        self.settings = settings
        self.device = device
        self.random_state = random_state

    def fit(self, X: Any, y: Any) -> "NovelClassDiscoverer":
        """Learn the known classes; what an earlier `fit` or `discover` found is dropped."""
        labels = _checked_labels(y)
        inputs = self._inputs(X, is_new=True)
        if len(inputs) != len(labels):
            raise InputError(f"{len(labels)} labels do not match {len(inputs)} rows of X")
        classes, codes = np.unique(labels, return_inverse=True)
        if len(classes) < 2:
            raise InputError("y holds one class; two or more classes are needed")
        module = self.backbone if isinstance(self.backbone, nn.Module) else None
        has_gpu = self._has_gpu()
        base = own_data(
            tuple(inputs.shape[1:]),
            method=self.method,
            backbone=self._backbone_name(),
            has_gpu=has_gpu,
        )
        base = replace(base, seed=_seed(self.random_state), device=self.device)
        base = fit_supervised(base, len(inputs), has_gpu=has_gpu)
        config = self._overridden(base)
        log.info("supervised phase: %s", config.supervised)
        self.model_ = learn_known(
            inputs,
            codes,
            config,
            class_names=tuple(map(str, classes.tolist())),
            backbone=module,
        )
        self._base, self.config_ = base, config
        self.classes_, self.named_ = classes, np.ones(len(classes), dtype=bool)
        self.num_known_ = len(classes)
        self.num_novel_: list[int] = []
        return self

    def discover(self, X: Any, *, num_novel: int | None = None) -> "NovelClassDiscoverer":
        """Find novel classes in unlabelled data; those of earlier rounds are known ones by now.

        Args:
            X: the pool; no labels, and nothing of earlier rounds.
            num_novel: how many classes to look for, if it is another number than usual.
        """
        check_is_fitted(self)
        inputs = self._inputs(X)
        wanted = self.num_novel if num_novel is None else num_novel
        config = fit_discovery(self._base, len(inputs), int(wanted), has_gpu=self._has_gpu())
        config = self._overridden(config)
        log.info("discovery phase: %s", config.discovery)
        self.model_ = discover(self.model_, inputs, make_method(config.method), config)
        self.config_ = config
        self.classes_ = _with_novel(self.classes_, self.model_.novel_names)
        self.num_novel_ = [*self.num_novel_, self.model_.num_novel]
        unnamed = np.zeros(self.model_.num_novel, dtype=bool)
        self.named_ = np.concatenate([self.named_, unnamed])
        return self

    def predict(self, X: Any) -> NDArray[Any]:
        """Return the class of every row: a labelled one or a discovered one."""
        check_is_fitted(self)
        labels = self.model_.predict(self._inputs(X)).labels
        return self.classes_[labels.numpy()]  # type: ignore[no-any-return]

    def predict_proba(self, X: Any) -> NDArray[np.float64]:
        """Return P(class) by the head that answers; the classes of the other head have 0."""
        check_is_fitted(self)
        parts = self.model_.features(self._inputs(X)).split(1024)
        found = [self.model_.probabilities(self.model_.outputs(part)).cpu() for part in parts]
        return torch.cat(found).numpy()

    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return how novel every row is; 0 and above is called novel."""
        check_is_fitted(self)
        novelty = self.model_.predict(self._inputs(X)).novelty.clamp(1e-300, 1 - 2**-53)
        tau = torch.tensor(self.model_.tau, dtype=torch.float64).clamp(1e-300, 1 - 2**-53)
        return (torch.logit(novelty) - torch.logit(tau)).numpy()

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the features of every row."""
        check_is_fitted(self)
        return self.model_.features(self._inputs(X)).cpu().numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy; labels that nobody named yet are matched to discovered classes.

        The name of a discovered class means nothing before `rename`, so the best one-to-one
        mapping counts.
        """
        true = _checked_labels(y)
        predicted = self.predict(X)
        discovered = self.classes_[~self.named_]
        unseen = np.setdiff1d(true, self.classes_[self.named_])
        rows = np.isin(predicted, discovered) & np.isin(true, unseen)
        right = (predicted == true) & ~np.isin(true, unseen)
        if len(unseen) and len(discovered):
            clusters = _positions(discovered, predicted[rows])
            names = np.searchsorted(unseen, true[rows])
            counts = count_pairs(clusters, names, len(discovered), len(unseen))
            right[rows] = match_clusters(counts)[clusters] == names
        return float(np.average(right, weights=sample_weight))

    def rename(self, names: Mapping[Any, Any]) -> "NovelClassDiscoverer":
        """Give classes other names: `{"novel-1": "kakapo"}`."""
        check_is_fitted(self)
        present = dict(zip(self.classes_.tolist(), self.model_.class_names, strict=True))
        for old in names:
            if old not in present:
                raise InputError(f"there is no class {old!r}; there are {list(present)}")
        self.model_.rename({present[old]: str(new) for old, new in names.items()})
        self.named_ = self.named_ | np.isin(self.classes_, list(names))
        self.classes_ = np.array([names.get(name, name) for name in present])
        return self

    def save(self, directory: Path | str) -> None:
        """Write the model and what belongs to it into `directory`, without any pickle."""
        check_is_fitted(self)
        self.model_.save(directory)
        parameters = {
            **self.get_params(),
            "backbone": self._backbone_name() or "auto",
            "random_state": self._base.seed,
        }
        storage.write_json(
            Path(directory) / ESTIMATOR_FILE,
            {
                "parameters": parameters,
                "classes": self.classes_.tolist(),
                "named": self.named_.tolist(),
                "num_known": self.num_known_,
                "num_novel": self.num_novel_,
                "base": asdict(self._base),
                "config": asdict(self.config_),
            },
        )

    @classmethod
    def load(
        cls, directory: Path | str, *, backbone: nn.Module | None = None
    ) -> "NovelClassDiscoverer":
        """Return what `save` wrote; a module that was passed as `backbone` is needed again."""
        path = Path(directory) / ESTIMATOR_FILE
        found = storage.read_json(path)
        keys = {"parameters", "classes", "named", "num_known", "num_novel", "base", "config"}
        if not isinstance(found, dict) or set(found) != keys:
            raise InputError(f"{path} does not describe an estimator of ncdwf")
        parameters = found["parameters"]
        estimator = cls()
        require(
            isinstance(parameters, dict) and set(parameters) == set(estimator.get_params()),
            f"{path} holds other parameters than this version has",
        )
        estimator.set_params(**parameters)
        if backbone is not None:
            estimator.backbone = backbone
        estimator.model_ = Model.load(directory, backbone=backbone)
        estimator.model_.to(choose_device(estimator.device))
        estimator._base = from_dict(Config, found["base"])
        estimator.config_ = from_dict(Config, found["config"])
        estimator.classes_ = np.array(found["classes"])
        estimator.named_ = np.array(found["named"], dtype=bool)
        estimator.num_known_, estimator.num_novel_ = found["num_known"], found["num_novel"]
        require(
            estimator.classes_.shape
            == estimator.named_.shape
            == (len(estimator.model_.class_names),),
            f"{path} does not name every class of the model once",
        )
        return estimator

    def __sklearn_tags__(self) -> Any:
        """Say that features are single precision, whatever comes in."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _inputs(self, X: Any, *, is_new: bool = False) -> Inputs:
        """Return X as the network reads it."""
        if _are_paths(X):
            return self._decoded([Path(path) for path in X], is_new)
        array = _array(X)
        inputs = as_inputs(array, name="X")
        if inputs.ndim == 2:
            validate_data(self, X, reset=is_new, skip_check_array=True)
            return inputs
        height, width = self._scaled(*inputs.shape[2:]) if is_new else self._size()
        return resized(as_images(inputs), height, width)

    def _scaled(self, height: int, width: int) -> tuple[int, int]:
        """Return the size to which pictures of another size are scaled; proportions stay."""
        factor = self._side(min(height, width)) / min(height, width)
        return max(1, round(height * factor)), max(1, round(width * factor))

    def _decoded(self, paths: Sequence[Path], is_new: bool) -> Images:
        if is_new:
            found = survey(paths)
            side = self._side(found.median_side)
            shape = (3 if found.has_colour else 1, side, side)
        else:
            channels, height, width = self.model_.architecture.input_shape
            shape = (channels, height, width)
        return decode(paths, shape, strict=True).images

    def _side(self, side: int) -> int:
        if self.image_size == "auto":
            return min(side, LARGEST_SIDE[self._has_gpu()])
        require(self.image_size >= 1, f"image_size={self.image_size} should be 1 or more")
        return self.image_size

    def _size(self) -> tuple[int, int]:
        shape = self.model_.architecture.input_shape
        if len(shape) == 1:
            raise InputError(f"X holds pictures; this estimator was fitted to {shape[0]} numbers")
        return shape[1], shape[2]

    def _backbone_name(self) -> str | None:
        """Return the name of the network; None where the data decides."""
        if isinstance(self.backbone, nn.Module):
            return CUSTOM
        return None if self.backbone == "auto" else self.backbone

    def _has_gpu(self) -> bool:
        return choose_device(self.device).type == "cuda"

    def _overridden(self, config: Config) -> Config:
        config = complete(config)
        for key, value in (self.settings or {}).items():
            config = override(config, f"{key}={json.dumps(value)}")
        return config


def _checked_labels(y: Any) -> NDArray[Any]:
    """Return the labels as a flat array of numbers or strings."""
    if y is None:
        raise InputError("requires y to be passed, but the target y is None")
    labels = column_or_1d(y, warn=True)
    if labels.dtype == object:
        strings = [label for label in labels.tolist() if isinstance(label, str)]
        require(
            len(strings) == len(labels),
            "Unknown label type: y should hold strings alone, or numbers alone",
        )
        labels = labels.astype(str)
    if np.issubdtype(labels.dtype, np.floating) and not np.isfinite(labels).all():
        raise InputError("y holds NaN or infinite values; finite labels are accepted")
    check_classification_targets(labels)
    return np.asarray(labels)


def _seed(random_state: Any) -> int:
    if isinstance(random_state, int | np.integer):
        return int(random_state)
    return int(check_random_state(random_state).randint(2**31))


def _with_novel(classes: NDArray[Any], names: Sequence[str]) -> NDArray[Any]:
    """Return the classes and the novel ones: their names, or numbers that go on where they end."""
    if not np.issubdtype(classes.dtype, np.number):
        return np.array([*classes.tolist(), *names])
    first = int(np.floor(classes.max())) + 1
    return np.concatenate([classes, np.arange(first, first + len(names)).astype(classes.dtype)])


def _positions(values: NDArray[Any], wanted: NDArray[Any]) -> NDArray[np.int64]:
    """Return where in `values` each of `wanted` is."""
    order = np.argsort(values)
    return order[np.searchsorted(values, wanted, sorter=order)]


def _are_paths(X: Any) -> bool:
    is_list = isinstance(X, Sequence) and not isinstance(X, str) and len(X) > 0
    if is_list or (isinstance(X, np.ndarray) and X.ndim == 1 and X.dtype.kind in "OU"):
        return all(isinstance(path, str | Path) for path in X)
    return False


def _array(X: Any) -> Any:
    """Return X as a tensor or an array of numbers, of pictures with the channels first."""
    if hasattr(X, "toarray"):
        raise InputError("X is a sparse matrix; dense arrays are accepted")
    if isinstance(X, torch.Tensor):
        return X
    array = np.asarray(X)
    if array.dtype == object:
        try:
            array = array.astype(np.float64)
        except (TypeError, ValueError) as error:
            raise InputError(f"X should hold numbers: {error}") from error
    if np.iscomplexobj(array):
        raise InputError("Complex data not supported in X; real numbers are accepted")
    if array.ndim < 2:
        raise InputError(f"X has shape {array.shape}. Reshape your data: one row a thing")
    if 0 in array.shape[:2]:
        found = f"{array.shape[0]} sample(s)" if array.shape[1] else "0 feature(s)"
        raise InputError(f"X has {found} (shape={array.shape}) while a minimum of 1 is required.")
    if array.ndim == 4 and array.shape[3] in (1, 3) and array.shape[1] not in (1, 3):
        return np.moveaxis(array, 3, 1)
    return array

"""The scikit-learn face: learn labelled classes, discover novel ones, name anything."""

import json
import logging
import numbers
import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

import numpy as np
import torch
from numpy.typing import NDArray
from sklearn.base import BaseEstimator, ClassifierMixin, TransformerMixin
from sklearn.base import ClassNamePrefixFeaturesOutMixin as FeatureNamesMixin
from sklearn.utils import check_random_state
from sklearn.utils.metaestimators import available_if
from sklearn.utils.validation import check_is_fitted
from torch import nn

import ncdwf.methods  # noqa: F401 - registers every method
from ncdwf import storage
from ncdwf.config import LARGEST_IMAGE_SIZE, Config, Device, from_dict, override, require
from ncdwf.console import Bar, print_choices, print_survey
from ncdwf.data.inputs import Inputs
from ncdwf.data.xy import (
    as_names,
    as_the_model_names_them,
    check_columns,
    check_room,
    known_classes,
    positions,
    read_labels,
    read_like,
    read_new,
    remember_columns,
    renamed_classes,
    with_novel,
)
from ncdwf.errors import InputError, counted, first_line, shown
from ncdwf.learning.discovery import check_method, discover, make_method, reads_small_views
from ncdwf.learning.loop import choose_device
from ncdwf.learning.supervised import learn_known
from ncdwf.learning.survey import Survey
from ncdwf.model import Model
from ncdwf.model.archive import DESCRIPTION_FILE, free_directory
from ncdwf.model.backbone import CUSTOM
from ncdwf.progress import Progress
from ncdwf.recipes import (
    LARGEST_SIDE,
    fit_discovery,
    fit_supervised,
    own_data,
)
from ncdwf.results.configuration import complete
from ncdwf.results.metrics import count_pairs, match_clusters
from ncdwf.results.run import model_dir

log = logging.getLogger(__name__)
ESTIMATOR_FILE = "estimator.json"
DEVICES = get_args(Device)
OWN_PARAMETERS = {
    "seed": "random_state=…",
    "device": "device=…",
    "backbone": "backbone=…",
    "method.name": "method=…",
    "discovery.num_novel": "num_novel=…",
    "discovery.pool": "discover(X, pool=…)",
}
"""Fields of the configuration that a parameter decides, or an argument of `discover`."""


class NovelClassDiscoverer(FeatureNamesMixin, TransformerMixin, ClassifierMixin, BaseEstimator):  # type: ignore[misc]
    """A classifier that discovers classes nobody labelled, without forgetting the labelled ones.

    `fit` learns the known classes and keeps neither `X` nor `y`; `discover`, as often as you like,
    finds novel classes in unlabelled data; `predict` names anything, and nobody says which kind it
    is. `X` may be pictures (uint8, `[image, channel, height, width]` or with the channels last),
    a list or a column of paths of pictures, or vectors (`[row, number]`).

    Args:
        num_novel: how many novel classes `discover` looks for; `auto` estimates it.
        method: how to discover; `ncdwf list` shows the methods.
        backbone: the network: `auto`, a name, `timm:NAME`, or any module of your own.
        image_size: pictures are scaled to this side; `auto` keeps small ones as they are.
        settings: fields of the configuration to override: `{"discovery.optim.epochs": 50}`.
        device: `auto`, `cpu` or `cuda`.
        random_state: decides every draw.
        verbose: say what follows from the data, and show how far learning has come.

    Attributes:
        classes_: every class in the order of its probability: labelled ones, then discovered ones.
        named_: which of them somebody has named: by a label, or by `rename`.
        num_known_: how many classes had labels.
        num_novel_: how many were discovered, in each round.
        survey_: what the last `discover` found out about its pool: `survey_.count` has the number
            of classes with its interval and curve, `survey_.sifted` which rows were kept. It
            is about single rows, so `save` leaves it out.
        model_: what was learnt.
        config_: the configuration that followed from the data.

    >>> from sklearn.datasets import make_blobs
    >>> X, y = make_blobs(60, centers=4, random_state=0)
    >>> finder = NovelClassDiscoverer(num_novel=2).fit(X[y < 2], y[y < 2])
    >>> finder.discover(X[y >= 2]).classes_
    array([0, 1, 2, 3])
    """

    def __init__(
        self,
        num_novel: int | Literal["auto"] = 2,
        *,
        method: str = "ncdwf",
        backbone: str | nn.Module = "auto",
        image_size: int | Literal["auto"] = "auto",
        settings: Mapping[str, Any] | None = None,
        device: Device = "auto",
        random_state: Any = 0,
        verbose: bool = False,
    ) -> None:
        self.num_novel = num_novel
        self.method = method
        self.backbone = backbone
        self.image_size = image_size
        self.settings = settings
        self.device = device
        self.random_state = random_state
        self.verbose = verbose

    def fit(self, X: Any, y: Any) -> "NovelClassDiscoverer":
        """Learn the known classes; what an earlier `fit` or `discover` found is dropped."""
        self._check_parameters()
        seed = _seed(self.random_state)
        labels = read_labels(y)
        with self._watched() as progress:
            inputs = read_new(X, self._side, progress)
        if len(inputs) != len(labels):
            raise InputError(f"{len(labels)} labels do not match {len(inputs)} rows of X")
        classes, codes = known_classes(labels)
        columns = X if inputs.ndim == 2 else None
        remember_columns(NovelClassDiscoverer(), columns)  # refused before anything is learnt
        module = self.backbone if isinstance(self.backbone, nn.Module) else None
        has_gpu = self._has_gpu()
        base = own_data(
            tuple(inputs.shape[1:]),
            method=self.method,
            backbone=self._backbone_name(),
            has_gpu=has_gpu,
        )
        base = replace(base, seed=seed, device=self.device)
        base = fit_supervised(base, len(inputs), has_gpu=has_gpu)
        config = self._overridden(base)
        self._tell(config, "supervised", inputs, counted(len(classes), "class"))
        with self._watched() as progress:
            self.model_ = learn_known(
                inputs,
                codes,
                config,
                class_names=tuple(map(str, classes.tolist())),
                backbone=module,
                progress=progress,
            )
        remember_columns(self, columns)
        self._base, self._drawn_from, self.config_ = base, self.random_state, config
        self.classes_, self.named_ = classes, np.ones(len(classes), dtype=bool)
        self.num_known_ = len(classes)
        self.num_novel_: list[int] = []
        self.__dict__.pop("survey_", None)
        return self

    def discover(
        self,
        X: Any,
        *,
        num_novel: int | Literal["auto"] | None = None,
        pool: str = "novel",
    ) -> "NovelClassDiscoverer":
        """Find novel classes in unlabelled data; those of earlier rounds are known ones by now.

        Args:
            X: the pool; no labels, and nothing of earlier rounds.
            num_novel: how many classes to look for, if it is another number than usual.
            pool: `novel`, or `mixed` if X holds known classes, too: rows that look known are left
                out then.
        """
        check_is_fitted(self)
        self._check_parameters()
        wanted = self.num_novel if num_novel is None else num_novel
        _check_num_novel(wanted)
        require(_is_one(pool, "novel", "mixed"), f"pool={shown(pool)} should be 'novel' or 'mixed'")
        with self._watched() as progress:
            inputs = self._inputs(X, progress)
        check_room(self.classes_, len(inputs))
        base, has_gpu = self._for_method(), self._has_gpu()
        number = 0 if wanted == "auto" else int(wanted)
        config = fit_discovery(base, len(inputs), number, has_gpu=has_gpu)
        if not reads_small_views(self.model_, self._overridden(config).discovery):
            config = override(config, "discovery.num_small=0")  # settings may still differ
        config = self._overridden(override(config, f"discovery.pool={pool}"))
        config = replace(config, supervised=self.config_.supervised)  # it is over
        self._tell(config, "discovery", inputs)
        found: list[Survey] = []

        def surveyed(survey: Survey) -> None:
            found.append(survey)
            if self.verbose:
                print_survey(survey, "num_novel=…")

        method = make_method(config.method)
        with self._watched() as progress:
            self.model_ = discover(
                self.model_, inputs, method, config, progress=progress, surveyed=surveyed
            )
        self.config_, self.survey_ = config, found[0]
        sifted = self.survey_.sifted
        if sifted is not None and sifted.is_mostly_known:
            log.warning(
                "at least %.0f %% of the pool looks known: what was found may be no class at all",
                100 * sifted.known_share,
            )
        self.classes_ = with_novel(self.classes_, self.model_.novel_names)
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

    def _has_discovered(self) -> bool:
        """Tell whether rows can be novel; the error says what is missing for that."""
        check_is_fitted(self)
        if not self.num_novel_:
            raise AttributeError("nothing is novel before a discovery; call discover first")
        return True

    # Before a discovery no row is more novel than another, and scikit-learn, which takes this for
    # the score of the second class, goes on to `predict_proba` where there is no such method.
    @available_if(_has_discovered)  # type: ignore[untyped-decorator]
    def decision_function(self, X: Any) -> NDArray[np.float64]:
        """Return how novel every row is; 0 and above is called novel. It needs a discovery."""
        novelty = self.model_.predict(self._inputs(X)).novelty
        tau = torch.tensor(self.model_.tau, dtype=torch.float64)
        logits = [torch.logit(value.clamp(1e-300, 1 - 2**-53)) for value in (novelty, tau)]
        distance = logits[0] - logits[1]
        # Rounding does not decide on which side of 0 a row is.
        tiny = torch.finfo(torch.float64).tiny
        sides = distance.clamp(min=0), distance.clamp(max=-tiny)
        return torch.where(novelty >= tau, *sides).numpy()

    def transform(self, X: Any) -> NDArray[np.float32]:
        """Return the features of every row."""
        check_is_fitted(self)
        return self.model_.features(self._inputs(X)).cpu().numpy()

    def score(self, X: Any, y: Any, sample_weight: Any = None) -> float:
        """Return the accuracy; labels that nobody named yet are matched to discovered classes.

        The name of a discovered class means nothing before `rename`, so the best one-to-one
        mapping counts.
        """
        true = read_labels(y)
        predicted = self.predict(X)
        if len(predicted) != len(true):
            raise InputError(f"{len(true)} labels do not match {len(predicted)} rows of X")
        if (true.dtype.kind == "U") != (predicted.dtype.kind == "U"):
            raise InputError(f"y holds {true.dtype} values; the classes are {predicted.dtype}")
        discovered = self.classes_[~self.named_]
        unseen = np.setdiff1d(true, self.classes_[self.named_])
        rows = np.isin(predicted, discovered) & np.isin(true, unseen)
        right = predicted == true
        if len(unseen) and len(discovered):
            clusters = positions(discovered, predicted[rows])
            names = np.searchsorted(unseen, true[rows])
            counts = count_pairs(clusters, names, len(discovered), len(unseen))
            right[rows] = match_clusters(counts)[clusters] == names
        try:
            return float(np.average(right, weights=sample_weight))
        except (TypeError, ValueError, ZeroDivisionError) as error:
            raise InputError(f"sample_weight does not fit the rows: {error}") from error

    def rename(self, names: Iterable[Any]) -> "NovelClassDiscoverer":
        """Give classes other names: `{"novel-1": "kakapo"}`, or pairs of such names.

        Where classes are numbers, one that a discovered class has only provisionally may be given
        to another: that class then goes on after the largest.
        """
        check_is_fitted(self)
        try:
            names = dict(names)
        except (TypeError, ValueError) as error:
            raise InputError(f"{shown(names)} does not map old names to new ones") from error
        present = dict(zip(self.classes_.tolist(), self.model_.class_names, strict=True))
        for old in names:
            if old not in present:
                raise InputError(f"there is no class {old!r}; there are {list(present)}")
        renamed = renamed_classes(self.classes_, self.named_, names)
        pairs = zip(present, renamed.tolist(), strict=True)
        self.model_.rename({present[old]: str(new) for old, new in pairs if old in names})
        self.named_ = self.named_ | np.isin(self.classes_, list(names))
        self.classes_ = renamed
        return self

    def save(self, directory: Path | str) -> None:
        """Write the model and what belongs to it into `directory`, without any pickle."""
        check_is_fitted(self)
        self._check_parameters()
        base = self._present_base()
        own = {"backbone": self._backbone_name() or "auto", "random_state": base.seed}
        parameters = {**self.get_params(), **own}
        content = {
            "parameters": {name: _plain(name, value) for name, value in parameters.items()},
            "classes": self.classes_.tolist(),
            "named": self.named_.tolist(),
            "num_known": self.num_known_,
            "num_novel": self.num_novel_,
            "feature_names": list(getattr(self, "feature_names_in_", ())) or None,
            "base": asdict(base),
            "config": asdict(self.config_),
        }
        data = storage.to_json_bytes(content)  # what cannot be written leaves nothing behind
        path = free_directory(Path(directory)) / ESTIMATOR_FILE
        storage.write_bytes(path, data)  # first: with the model's description all is there
        self.model_.save(directory)

    @classmethod
    def load(
        cls,
        directory: Path | str,
        *,
        backbone: nn.Module | None = None,
        device: str | None = None,
    ) -> "NovelClassDiscoverer":
        """Return what `save` wrote.

        Args:
            directory: where it was written.
            backbone: a module that was passed as `backbone` is needed again.
            device: another one than it was saved with.
        """
        is_device = device is None or _is_one(device, *DEVICES)
        require(is_device, f"device={shown(device)} should be one of {DEVICES}, or None")
        path = Path(directory) / ESTIMATOR_FILE
        place = model_dir(path.parent)
        if not path.exists() and (place / DESCRIPTION_FILE).exists():
            raise InputError(
                f"{path} is missing: a model alone, as the command line writes it, is read by "
                f"ncdwf.Model.load; it is in {place}"
            )
        content = storage.read_json(path)
        model = Model.load(directory, backbone=backbone)
        try:
            saved = from_dict(_Saved, content, where="estimator")
            saved.check(model)
            estimator = cls(**asdict(saved.parameters))
            estimator._check_parameters()
        except InputError as error:
            reason = str(error)[:200]
            raise InputError(f"{path} does not describe an estimator of ncdwf: {reason}") from error
        if backbone is not None and model.architecture.backbone == CUSTOM:
            estimator.backbone = backbone
        estimator.set_params(device=device or _device_here(estimator.device, path))
        estimator.model_ = model.to(choose_device(estimator.device))
        estimator._base, estimator.config_ = saved.base, saved.config
        estimator._drawn_from = estimator.random_state
        # `ncdwf name` gives names to the model alone.
        estimator.classes_, estimator.named_ = as_the_model_names_them(
            saved.classes, saved.named, model.class_names
        )
        estimator.num_known_, estimator.num_novel_ = saved.num_known, list(saved.num_novel)
        if len(model.architecture.input_shape) == 1:
            estimator.n_features_in_ = model.architecture.input_shape[0]
        if saved.feature_names is not None:
            estimator.feature_names_in_ = np.array(saved.feature_names, dtype=object)
        return estimator

    @property
    def _n_features_out(self) -> int:
        """Return how many features there are: scikit-learn gives each a name."""
        return self.model_.backbone.num_features

    def __sklearn_tags__(self) -> Any:
        """Say that features are single precision, whatever comes in."""
        tags = super().__sklearn_tags__()
        tags.transformer_tags.preserves_dtype = []
        return tags

    def _check_parameters(self) -> None:
        """Refuse parameters before anything is read or learnt."""
        sizes = f"'auto' or a whole number from 1 to {LARGEST_IMAGE_SIZE}"
        size = self.image_size
        is_size = _is_one(size, "auto") or _is_count(size, LARGEST_IMAGE_SIZE)
        accepted = {
            "method": (isinstance(self.method, str), "the name of a method"),
            "backbone": (isinstance(self.backbone, str | nn.Module), "'auto', a name or a module"),
            "image_size": (is_size, sizes),
            "settings": (isinstance(self.settings, Mapping | None), "a mapping, or None"),
            "device": (_is_one(self.device, *DEVICES), f"one of {DEVICES}"),
            "verbose": (isinstance(self.verbose, bool), "True or False"),
        }
        _check_num_novel(self.num_novel)
        for name, (is_fine, what) in accepted.items():
            require(is_fine, f"{name}={shown(getattr(self, name))} should be {what}")
        check_method(self.method)

    @contextmanager
    def _watched(self) -> Iterator[Progress | None]:
        """Give what hears how far a long step has come, if anybody wants to see it."""
        if not self.verbose:
            yield None
            return
        with Bar() as bar:
            yield bar

    def _tell(self, config: Config, phase: str, inputs: Inputs, *counts: str) -> None:
        """Say what followed from the data."""
        log.info("%s phase: %s", phase, getattr(config, phase))
        if self.verbose:
            counts = counted(len(inputs), "row"), *counts
            way = 'settings={{"{}": …}}'
            print_choices(config, phase, inputs.shape[1:], *counts, way=way)

    def _inputs(self, X: Any, progress: Progress | None = None) -> Inputs:
        """Return X as the network reads it."""
        inputs = read_like(X, self.model_.architecture.input_shape, progress)
        if inputs.ndim == 2:
            check_columns(self, X)
        return self.model_.check(inputs)

    def _side(self, side: int) -> int:
        """Return the side that pictures are scaled to whose shorter one is `side`."""
        if self.image_size == "auto":
            return min(side, LARGEST_SIDE[self._has_gpu()])
        return int(self.image_size)

    def _for_method(self) -> Config:
        """Return the configuration that `fit` found; with another method, for that method."""
        base = self._present_base()
        if self.method == base.method["name"]:
            return base
        other = own_data(
            self.model_.architecture.input_shape,
            method=self.method,
            backbone=base.backbone,
            has_gpu=self._has_gpu(),
        )
        return replace(base, method=other.method, discovery=other.discovery)

    def _present_base(self) -> Config:
        """Return the configuration that `fit` found, with the present `random_state` and `device`.

        A source of random numbers gives one seed: what was saved goes on to the same bits.
        """
        if self.random_state is not self._drawn_from:
            self._base = replace(self._base, seed=_seed(self.random_state))
            self._drawn_from = self.random_state
        return replace(self._base, device=self.device)

    def _backbone_name(self) -> str | None:
        """Return the name of the network; None where the data decides."""
        if isinstance(self.backbone, nn.Module):
            return CUSTOM
        return None if self.backbone == "auto" else self.backbone

    def _has_gpu(self) -> bool:
        return choose_device(self.device).type == "cuda"

    def _overridden(self, config: Config) -> Config:
        assignments = []
        for key, value in (self.settings or {}).items():
            if key in OWN_PARAMETERS:
                raise InputError(f"settings[{key!r}] is given as {OWN_PARAMETERS[key]}")
            assignments.append(f"{key}={json.dumps(_plain(f'settings[{key!r}]', value))}")
        return complete(override(complete(config), *assignments))


@dataclass(frozen=True, kw_only=True, slots=True)
class _Parameters:
    """The parameters of an estimator, as they are saved."""

    num_novel: int | Literal["auto"]
    method: str
    backbone: str
    image_size: int | Literal["auto"]
    settings: Mapping[str, Any] | None
    device: Device
    random_state: int
    verbose: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class _Saved:
    """What is saved of an estimator beside its model."""

    parameters: _Parameters
    classes: tuple[str | int | float, ...]
    named: tuple[bool, ...]
    num_known: int
    num_novel: tuple[int, ...]
    base: Config
    config: Config
    feature_names: tuple[str, ...] | None = None
    """Of the columns of vectors, if they had any; earlier versions did not save them."""

    def check(self, model: Model) -> None:
        """Refuse what does not belong to `model`."""
        num_classes, num_before = len(model.class_names), model.architecture.num_discovered
        require(
            len(self.classes) == len(self.named) == len(set(self.classes)) == num_classes
            and len({type(name) for name in self.classes}) == 1,
            "it does not name every class of the model once",
        )
        as_names(self.classes, "classes")
        rounds = (*self.num_novel[:-1], model.num_novel) if model.num_novel else ()
        require(
            self.num_known == model.num_known - num_before
            and self.num_novel == rounds
            and all(num_novel >= 1 for num_novel in rounds)
            and self.num_known + sum(rounds) == num_classes,
            f"num_known={self.num_known} and num_novel={list(self.num_novel)} are not the model's",
        )
        require(
            self.feature_names is None
            or model.architecture.input_shape == (len(self.feature_names),),
            "feature_names are not one for each number that the model reads",
        )
        for config in (self.base, self.config):
            complete(config)


def _seed(random_state: Any) -> int:
    try:
        source = check_random_state(random_state)
    except ValueError as error:
        raise InputError(f"random_state={shown(random_state)}: {first_line(error)}") from error
    if isinstance(random_state, numbers.Integral):
        return int(random_state)
    return int(source.randint(2**31))


def _device_here(saved: Device, path: Path) -> Device:
    """Return the device to go on with on this machine; a warning says if it is another one."""
    if saved != "cuda" or torch.cuda.is_available():
        return saved
    warnings.warn(
        f"{path} was saved with device='cuda', which this machine has not; device='auto' is taken",
        stacklevel=3,
    )
    return "auto"


def _check_num_novel(value: Any) -> None:
    is_fine = _is_one(value, "auto") or _is_count(value)
    require(is_fine, f"num_novel={shown(value)} should be 'auto' or a whole number from 1 on")


def _is_count(value: Any, most: int | None = None) -> bool:
    is_whole = isinstance(value, numbers.Integral) and not isinstance(value, bool)
    return is_whole and value >= 1 and (most is None or value <= most)


def _is_one(value: Any, *words: str) -> bool:
    return isinstance(value, str) and value in words


def _plain(name: str, value: Any) -> Any:
    """Return a value as JSON gives it back; scalars of NumPy are numbers."""
    try:
        return json.loads(json.dumps(value, default=_plain_scalar))
    except (TypeError, ValueError, RecursionError) as error:
        raise InputError(f"{name}={shown(value)} cannot be written: {error}") from error


def _plain_scalar(value: Any) -> Any:
    if isinstance(value, np.generic):
        return value.item()
    if isinstance(value, Mapping):
        return dict(value)
    raise TypeError(f"{type(value).__name__} is no value of JSON")

"""Novel class discovery without forgetting.

The names below are imported when they are first used: a process that decodes pictures needs none of
them, and would import torch for nothing.
"""

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"

if TYPE_CHECKING:
    from ncdwf.config import Config
    from ncdwf.data.setting import Setting, Split
    from ncdwf.errors import InputError, NcdwfError, NonFiniteError, StorageError
    from ncdwf.estimator import NovelClassDiscoverer
    from ncdwf.export import export_onnx
    from ncdwf.learning.discovery import METHODS, Method, discover, make_method
    from ncdwf.learning.supervised import learn_known
    from ncdwf.methods.ncdwf import Ncdwf
    from ncdwf.model import Model, Prediction
    from ncdwf.recipes import recipe
    from ncdwf.results.evaluation import Scores, evaluate

__all__ = [
    "METHODS",
    "Config",
    "InputError",
    "Method",
    "Model",
    "Ncdwf",
    "NcdwfError",
    "NonFiniteError",
    "NovelClassDiscoverer",
    "Prediction",
    "Scores",
    "Setting",
    "Split",
    "StorageError",
    "discover",
    "evaluate",
    "export_onnx",
    "learn_known",
    "make_method",
    "recipe",
]

_DISCOVERY = "ncdwf.learning.discovery"
_NAMES = {
    "ncdwf.config": ("Config",),
    "ncdwf.data.setting": ("Setting", "Split"),
    "ncdwf.errors": ("InputError", "NcdwfError", "NonFiniteError", "StorageError"),
    "ncdwf.estimator": ("NovelClassDiscoverer",),
    "ncdwf.export": ("export_onnx",),
    _DISCOVERY: ("METHODS", "Method", "discover", "make_method"),
    "ncdwf.learning.supervised": ("learn_known",),
    "ncdwf.methods.ncdwf": ("Ncdwf",),
    "ncdwf.model": ("Model", "Prediction"),
    "ncdwf.recipes": ("recipe",),
    "ncdwf.results.evaluation": ("Scores", "evaluate"),
}
_HOMES = {name: home for home, names in _NAMES.items() for name in names}

if not TYPE_CHECKING:  # or a misspelt name would pass for one of any type

    def __getattr__(name: str) -> Any:
        if name not in _HOMES:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        if _HOMES[name] == _DISCOVERY:
            importlib.import_module("ncdwf.methods")  # registers every method
        value = getattr(importlib.import_module(_HOMES[name]), name)
        globals()[name] = value
        return value


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})

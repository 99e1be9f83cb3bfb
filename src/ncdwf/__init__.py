"""Novel class discovery without forgetting."""

__version__ = "0.1.0"

from ncdwf.config import Config, recipe
from ncdwf.data.setting import Setting, Split
from ncdwf.errors import InputError, NcdwfError, NonFiniteError, StorageError
from ncdwf.learning.discovery import METHODS, Method, discover, make_method
from ncdwf.learning.supervised import learn_known
from ncdwf.methods.ncdwf import Ncdwf
from ncdwf.model import Model, Prediction
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
    "Prediction",
    "Scores",
    "Setting",
    "Split",
    "StorageError",
    "discover",
    "evaluate",
    "learn_known",
    "make_method",
    "recipe",
]

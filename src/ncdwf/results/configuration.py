"""Configurations with every field of their method: completed, read, compared, recorded."""

from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import ncdwf.methods  # noqa: F401 - registers every method
from ncdwf import storage
from ncdwf.config import Config, from_dict
from ncdwf.errors import InputError
from ncdwf.learning.discovery import make_method
from ncdwf.recipes import recipe

INDIFFERENT = {
    "seed": 0,
    "device": "auto",
    "engine": "auto",
    "checkpoint_seconds": 60.0,
    "snapshot_epochs": 0,
}
"""Fields that do not make another configuration."""


def complete(config: Config) -> Config:
    """Return `config` with every field of its method written out; an unknown field is refused."""
    fields = asdict(make_method(config.method))  # type: ignore[call-overload]
    return replace(config, method={"name": config.method["name"], **fields})


def read_config(path: Path) -> Config:
    """Return the configuration in a JSON file."""
    return complete(from_dict(Config, storage.read_json(path)))


def variant(config: Config) -> str:
    """Return `main` for the recommended configuration of a method, `custom` for any other."""
    default = recipe(config.setting, config.method["name"])
    return "main" if _essence(config) == _essence(default) else "custom"


def _essence(config: Config) -> Config:
    """Return what decides the result beside the seed and the machine."""
    return replace(complete(config), **INDIFFERENT)  # type: ignore[arg-type]


def config_record(config: Config) -> dict[str, Any]:
    """Return all that decides the result beside the seed, as plain values."""
    values = asdict(_essence(config))
    return {key: value for key, value in values.items() if key not in INDIFFERENT}


def is_record_of(record: Any, config: Config) -> bool:
    """Tell whether `record` was made of a configuration like `config`, but for the seed.

    What a later version has added counts as its default, so that old runs stay valid.
    """
    try:
        recorded = from_dict(Config, record)
        return _essence(recorded) == _essence(config)
    except InputError:  # made by a version with other fields, or by hand
        return False

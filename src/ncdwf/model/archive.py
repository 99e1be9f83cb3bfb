"""A model on disk: its weights, and a description of it that is written last."""

import hashlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ncdwf import storage
from ncdwf.config import from_dict, require, require_short
from ncdwf.errors import InputError, first_line
from ncdwf.model.architecture import Architecture

FORMAT = 4
WEIGHTS_FILE = "model.safetensors"
DESCRIPTION_FILE = "model.json"


@dataclass(frozen=True, kw_only=True, slots=True)
class Description:
    """All of a model but its weights."""

    architecture: Architecture
    known_names: tuple[str, ...]
    novel_names: tuple[str, ...]


def write(directory: Path, description: Description, tensors: Mapping[str, Tensor]) -> None:
    """Write a model into `directory`, which must not hold one yet.

    The description is written last and names the sha256 of the weights: without it there is no
    model, so a crash leaves nothing that could be mistaken for one.
    """
    weights = storage.to_tensor_bytes(dict(tensors))
    content = _to_bytes(description, storage.sha256(weights))  # names may be refused
    directory = free_directory(directory)
    storage.write_bytes(directory / WEIGHTS_FILE, weights)
    storage.write_bytes(directory / DESCRIPTION_FILE, content)


def is_written(directory: Path, description: Description, tensors: Mapping[str, Tensor]) -> bool:
    """Tell whether `write` has written just this into `directory`."""
    path = directory / DESCRIPTION_FILE
    weights_sha256 = storage.sha256(storage.to_tensor_bytes(dict(tensors)))
    return path.is_file() and storage.read_bytes(path) == _to_bytes(description, weights_sha256)


def free_directory(directory: Path) -> Path:
    """Create `directory` if need be and return it, unless it holds a model."""
    directory = storage.make_directory(directory)
    if (directory / DESCRIPTION_FILE).exists():
        raise InputError(f"{directory} holds a model already; choose another directory")
    return directory


def rewrite_description(directory: Path, description: Description) -> None:
    """Write another description of the model in `directory`; the weights stay."""
    path = directory / DESCRIPTION_FILE
    before = _intact(storage.read_json(path), path)
    storage.write_bytes(path, _to_bytes(description, str(before["weights_sha256"])))


def read(directory: Path) -> tuple[Description, dict[str, Tensor]]:
    """Return description and weights of the model in `directory`; anything altered is refused."""
    path, weights_path = directory / DESCRIPTION_FILE, directory / WEIGHTS_FILE
    if not path.is_file():
        raise InputError(f"{directory} holds no model ({DESCRIPTION_FILE} is missing)")
    content = _intact(storage.read_json(path), path)
    weights = storage.read_bytes(weights_path, expected=str(content.get("weights_sha256")))
    tensors = storage.parse_tensors(weights, weights_path)
    with blamed_on(path):
        return _parsed(content), tensors


@contextmanager
def blamed_on(path: Path) -> Iterator[None]:
    """Say that `path` describes no model of ncdwf where one cannot be built from it."""
    try:
        yield
    except (InputError, KeyError, TypeError, RuntimeError) as error:
        reason = first_line(error)
        raise InputError(f"{path} does not describe a model of ncdwf: {reason}") from error


def _to_bytes(description: Description, weights_sha256: str) -> bytes:
    content = {
        "format": FORMAT,
        "architecture": asdict(description.architecture),
        "known_names": list(description.known_names),
        "novel_names": list(description.novel_names),
        "weights_sha256": weights_sha256,
    }
    content["sha256"] = _checksum(content)
    return storage.to_json_bytes(content)


def _parsed(content: dict[str, Any]) -> Description:
    architecture = from_dict(Architecture, content["architecture"], where="architecture")
    lists = [content[key] for key in ("known_names", "novel_names")]
    require(all(isinstance(names, list) for names in lists), "names of classes are no list")
    known, novel = map(tuple, lists)
    require(all(isinstance(n, str) for n in known + novel), "a name is not a string")
    require_short(known + novel)
    num_novel = 0 if architecture.novel is None else architecture.novel.num_novel
    counts = (len(known), len(novel)) == (architecture.num_known, num_novel)
    is_unique = len({*known, *novel}) == len(known) + len(novel)
    require(counts and is_unique, "it does not name every class once")
    return Description(architecture=architecture, known_names=known, novel_names=novel)


def _checksum(content: dict[str, Any]) -> str:
    rest = {key: value for key, value in content.items() if key != "sha256"}
    return hashlib.sha256(storage.to_json_bytes(rest)).hexdigest()


def _intact(content: Any, path: Path) -> dict[str, Any]:
    """Return what a description file holds, if it is one of this version and unchanged."""
    if not isinstance(content, dict) or "format" not in content:
        raise InputError(f"{path} does not describe a model of ncdwf")
    if content["format"] != FORMAT:
        raise InputError(
            f"{path} has format {content['format']!r}; this version of ncdwf reads {FORMAT}"
        )
    try:
        is_intact = content.get("sha256") == _checksum(content)
    except (ValueError, RecursionError):  # what cannot be written was never saved
        is_intact = False
    if not is_intact:
        raise InputError(f"{path} is damaged or was changed: its sha256 is not the recorded one")
    return content

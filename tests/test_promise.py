"""The promise: nothing of the labelled pictures but weights and class statistics outlives learning.

Discovery neither needs nor gets a labelled picture or a label, and a model holds none.
"""

import base64
import gc
import inspect
import subprocess
import sys
import weakref
from dataclasses import fields, replace
from pathlib import Path

import grimp
import numpy as np
import pytest
import torch
from conftest import fingerprint, shorter, tiny_pictures
from torch import Tensor
from typer.testing import CliRunner

import ncdwf.methods
from ncdwf.cli import app
from ncdwf.config import Config
from ncdwf.data.augment import Views
from ncdwf.data.setting import Split
from ncdwf.learning.discovery import Method, Outcome, discover, make_method
from ncdwf.learning.supervised import learn_known
from ncdwf.model import Model
from ncdwf.progress import Quiet
from ncdwf.results.experiment import execute
from ncdwf.results.run import Run

NUM_LABELLED = 211


def labelled(num_images: int = NUM_LABELLED) -> tuple[Tensor, Tensor]:
    """Return labelled pictures of four classes; the first one carries a message."""
    images, labels = tiny_pictures(80, seed=11)
    images, labels = images[labels < 4][:num_images], labels[labels < 4][:num_images]
    message = b"canary" * 43
    images[0] = torch.frombuffer(bytearray(message[:256]), dtype=torch.uint8).view(1, 16, 16)
    return images.clone(), labels.clone()


def reachable_tensors(start: object) -> list[Tensor]:
    """Return every tensor that can be reached from an object, modules and types left aside."""
    seen: set[int] = set()
    waiting, found = [start], []
    while waiting:
        item = waiting.pop()
        if id(item) in seen or isinstance(item, type) or inspect.ismodule(item):
            continue
        seen.add(id(item))
        if isinstance(item, Tensor):
            found.append(item)
        if inspect.isfunction(item):
            waiting += [cell.cell_contents for cell in item.__closure__ or ()]
        else:
            waiting += gc.get_referents(item)
    return found


def test_labelled_tensors_may_be_overwritten_and_deleted_before_discovery(
    split: Split, config: Config
) -> None:
    short = shorter(config)
    method = make_method(short.method)
    images, labels = labelled()
    untouched = discover(learn_known(images, labels, short), split.pool_images, method, short)

    images, labels = labelled()
    watched = weakref.ref(images), weakref.ref(labels)
    model = learn_known(images, labels, short)
    images.random_(0, 256, generator=torch.Generator().manual_seed(0))
    labels.fill_(77)
    del images, labels
    gc.collect()
    assert watched[0]() is None
    assert watched[1]() is None
    found = discover(model, split.pool_images, method, short)
    assert fingerprint(found) == fingerprint(untouched)

    # The control: what discovery does get, it uses.
    pool = split.pool_images.clone()
    pool[0] = 255 - pool[0]
    assert fingerprint(discover(model, pool, method, short)) != fingerprint(untouched)


def test_the_model_reaches_no_picture(config: Config) -> None:
    images, labels = labelled()
    model = learn_known(images, labels, shorter(config))
    tensors = reachable_tensors(model)
    assert len(tensors) >= len(model.state_dict())  # the control: the search does find tensors
    for tensor in tensors:
        assert tensor.dtype != torch.uint8
        assert NUM_LABELLED not in tensor.shape


def test_no_copy_of_the_pictures_is_left_in_memory(config: Config) -> None:
    images, labels = labelled()
    model = learn_known(images, labels, shorter(config))
    gc.collect()
    alike = [
        t
        for t in gc.get_objects()
        if issubclass(type(t), Tensor) and t.shape[:1] == (NUM_LABELLED,) and t is not images
    ]
    assert all(t is labels for t in alike)
    assert model.num_known == 4


LEARN = ["supervised.optim.epochs=1", "discovery.optim.epochs=1"]
SMALL = [
    "method.clustering.num_heads=2",
    "method.clustering.num_hidden=16",
    "method.clustering.num_projected=8",
    "method.latents_per_class=10",
    "method.inversion_iterations=3",
    "method.settling.epochs=1",
]
POISON = """
import sys
import numpy as np
from sklearn import datasets, model_selection
from ncdwf.data.setting import Setting

honest = Setting.parse("digits-5-5").load()
load_digits, train_test_split = datasets.load_digits, model_selection.train_test_split

def poisoned():
    data, source = load_digits(), np.random.default_rng(0)
    known, novel = np.flatnonzero(data.target < 5), np.flatnonzero(data.target >= 5)
    data.images[known] = source.integers(0, 17, data.images[known].shape)
    data.target[novel] = source.permutation(data.target[novel])
    return data

# Stratified by the true classes, or shuffled labels would choose other pictures for the pool.
datasets.load_digits = poisoned
model_selection.train_test_split = lambda indices, *, stratify, **rest: train_test_split(
    indices, stratify=load_digits().target, **rest
)

false = Setting.parse("digits-5-5").load()
assert false.pool_images.equal(honest.pool_images)
assert not false.pool_labels.equal(honest.pool_labels)
assert not (false.known_images == honest.known_images).flatten(1).all(1).any()

from ncdwf.cli import main
main()
"""


@pytest.mark.slow
def test_discovery_in_another_process_neither_needs_known_pictures_nor_labels(
    tmp_path: Path,
) -> None:
    def python(*words: str) -> None:
        done = subprocess.run(
            [sys.executable, *words], cwd=tmp_path, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stderr

    sets = [word for assignment in LEARN + SMALL for word in ("--set", assignment)]
    python("-m", "ncdwf", "learn", "--out", "known", *sets)
    python("-m", "ncdwf", "discover", "known", "--out", "honest")
    python("-c", POISON, "discover", "known", "--out", "poisoned")
    for name in ("model.safetensors", "model.json"):
        assert (tmp_path / "honest" / name).read_bytes() == (
            tmp_path / "poisoned" / name
        ).read_bytes()


@pytest.mark.parametrize(
    ("function", "names"),
    [
        (
            discover,
            {
                *("model", "images", "method", "config"),
                *("checkpoints", "progress", "history", "snapshot", "surveyed"),
            },
        ),
        (Method.prepare, {"self", "model", "num_novel", "seed"}),
        (Method.noise, {"self", "state", "batch_size"}),
        (Method.loss, {"self", "model", "views", "state", "progress", "noise"}),
        (Method.finish, {"self", "model", "state", "outcome"}),
    ],
)
def test_signatures_have_no_place_for_labels(function: object, names: set[str]) -> None:
    parameters = inspect.signature(function).parameters  # type: ignore[arg-type]
    assert set(parameters) == names
    assert all(p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD) for p in parameters.values())


def test_what_a_method_receives_has_no_place_for_labels() -> None:
    assert [item.name for item in fields(Views)] == ["large", "small"]
    assert {item.name for item in fields(Outcome)} == {
        *("before", "after", "history", "seed", "engine", "progress")
    }


def test_discovery_and_methods_do_not_import_what_knows_labels() -> None:
    graph = grimp.build_graph("ncdwf", include_external_packages=True, cache_dir=None)
    blind = {f"ncdwf.learning.{name}" for name in ("clustering", "discovery", "settling")}
    blind |= graph.find_descendants(ncdwf.methods.__name__)
    seeing = {f"ncdwf.data.{name}" for name in ("setting", "digits", "cifar")}
    seeing |= {"ncdwf.learning.supervised", "sklearn"}
    seeing |= {"ncdwf.results", *graph.find_descendants("ncdwf.results")}
    assert "ncdwf.methods.ncdwf" in blind
    for importer in blind:
        for imported in seeing:
            assert graph.find_shortest_chain(importer, imported) is None, (importer, imported)
    # The control: the graph does hold such chains.
    assert graph.find_shortest_chain("ncdwf.results.experiment", "ncdwf.data.digits")


def traces(picture: Tensor) -> list[bytes]:
    """Return the forms in which a picture might lie in a file."""
    raw = picture.numpy().tobytes()
    pixels = (picture.float() / 255).numpy().tobytes()
    return [raw, pixels, base64.b64encode(raw)[:64]]


def test_saved_models_hold_no_picture_and_nothing_of_the_size_of_the_labelled_data(
    tmp_path: Path, split: Split, config: Config
) -> None:
    short = shorter(config)
    images, labels = labelled()
    known = learn_known(images, labels, short)
    found = discover(known, split.pool_images, make_method(short.method), short)
    for name, model in (("known", known), ("found", found)):
        model.save(tmp_path / name)
        for holding in Model.load(tmp_path / name).holdings():
            assert NUM_LABELLED not in holding.shape, holding.name
        assert int(model.statistics.counts.sum()) == NUM_LABELLED  # the only trace of the number
        written = b"".join(p.read_bytes() for p in sorted((tmp_path / name).iterdir()))
        for picture in images:
            assert not any(trace in written for trace in traces(picture))
        assert b"canary" not in written


def test_a_run_directory_holds_no_picture_of_the_labelled_data(
    finished_run: Path, split: Split
) -> None:
    contents = {p: p.read_bytes() for p in finished_run.rglob("*") if p.is_file()}
    assert len(contents) == 10
    with np.load(finished_run / "predictions.npz", allow_pickle=False) as arrays:
        unpacked = b"".join(arrays[name].tobytes() for name in arrays)
    for picture in split.known_images:
        for trace in traces(picture):
            assert trace not in unpacked
            assert not any(trace in content for content in contents.values())


def test_supervised_checkpoints_are_gone_when_discovery_begins_and_when_the_run_ends(
    tmp_path: Path, tiny: Config
) -> None:
    run = Run.create(tmp_path / "run", replace(shorter(tiny), checkpoint_seconds=0.0))
    seen: list[tuple[str, bool]] = []

    class Watcher(Quiet):
        def start(self, task: str, num_images: int, done: int) -> None:
            self.task = task

        def advance(self, num_images: int) -> None:
            names = [p.name for p in run.path.rglob("supervised-*")]
            seen.append((self.task, bool(names)))

    execute(run, Watcher())
    assert ("supervised", True) in seen  # the control: there were some
    assert ("discovery", True) not in seen
    assert ("discovery", False) in seen
    assert not (run.path / "checkpoints").exists()


def test_inspect_lists_every_tensor_and_promises_nothing_that_does_not_hold(
    finished_run: Path,
) -> None:
    result = CliRunner().invoke(app, ["inspect", str(finished_run)])
    assert result.exit_code == 0
    model = Model.load(finished_run)
    lines = result.output.splitlines()
    for holding in model.holdings():
        matching = [line for line in lines if f" {holding.name} " in line]
        assert len(matching) == 1, holding.name
        assert f"{holding.num_bytes:,}" in matching[0]
        above = lines[: lines.index(matching[0])]
        titles = [line.strip("│ ") for line in above if not line.startswith(("│   ", "├"))]
        assert holding.derived_from in titles[-1]
    shown = {
        "backbone": "small",
        "input": "1×16×16",
        "classes": "4 known, 2 novel",
        "identifier.tau": f"{model.tau:.10g}",
    }
    for name, value in shown.items():
        assert any(line.strip("│ ").startswith(name) and f" {value} " in line for line in lines)
    for name in model.class_names:
        assert name in result.output
    lowered = result.output.lower()
    for word in ("private", "privacy", "anonymous", "gdpr", "unlearn", "forgotten"):
        assert word not in lowered
    assert "can still tell" in lowered

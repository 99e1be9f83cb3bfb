"""The tiny setting: six classes of small synthetic pictures on which both phases take a second.

And a record of what was seen on a GPU: `pytest tests/gpu --records benchmarks/RECORDS.md` adds a
section with every test, its outcome and what it measured (`record_property`).
"""

import os
import shutil
import signal

# Before torch is imported: one thread is fastest for such small nets, and repeatable.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Before the command line is imported: its consoles take their width then.
os.environ["COLUMNS"] = "200"
# No test may reach the real network.
os.environ["NCDWF_OFFLINE"] = "1"

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict, fields, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import ncdwf.data.setting
import ncdwf.recipes
from ncdwf import storage
from ncdwf.config import Config, Discovery, Optim, Supervised, View, override
from ncdwf.data.setting import DataSet, Setting, Split
from ncdwf.learning.discovery import METHODS, discover, make_method
from ncdwf.learning.loop import History
from ncdwf.learning.supervised import learn_known
from ncdwf.model import Model
from ncdwf.progress import Quiet
from ncdwf.results import experiment
from ncdwf.results.environment import in_brief
from ncdwf.results.run import Run

torch.set_num_threads(1)
# A shell starts its background jobs deaf to Ctrl-C, and so would the tests of Ctrl-C be.
signal.signal(signal.SIGINT, signal.default_int_handler)

NAMES = ("ant", "bee", "cat", "dog", "elk", "fox")
TINY_METHOD: dict[str, Any] = {
    "clustering": {"num_heads": 2, "num_hidden": 32, "num_projected": 16},
    "latents_per_class": 20,
    "inversion_iterations": 10,
    "settling": {"epochs": 60, "batch_size": 16, "lr": 0.1},
    "tau": 0.5,
    "norms": "pool",
}
SHORT_METHOD = {**TINY_METHOD, "settling": {"epochs": 2, "batch_size": 16, "lr": 0.1}}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--records", type=Path, help="Markdown file to add the outcomes to")


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    path = config.getoption("--records")
    if path is None:
        return
    lines = [
        f"\n## {in_brief()}: tests\n",
        "| test | outcome | measured | seconds |",
        "| --- | --- | --- | ---: |",
    ]
    for outcome in ("passed", "failed", "error", "skipped"):
        for report in terminalreporter.getreports(outcome):
            if report.when == "call" or outcome != "passed":
                name = report.nodeid.split("::")[-1].removeprefix("test_").replace("_", " ")
                measured = ", ".join(f"{key} {value}" for key, value in report.user_properties)
                lines.append(f"| {name} | {outcome} | {measured} | {report.duration:.0f} |")
    with path.open("a") as file:
        file.write("\n".join([*lines, ""]))


def tiny_pictures(per_class: int, seed: int) -> tuple[Tensor, Tensor]:
    """Return pictures (a coarse pattern a class, moved in brightness, plus noise) and labels."""
    patterns = torch.rand(len(NAMES), 1, 4, 4, generator=torch.Generator().manual_seed(7))
    source = torch.Generator().manual_seed(seed)
    labels = torch.arange(len(NAMES)).repeat(per_class)
    pixels = patterns[labels].repeat_interleave(4, 2).repeat_interleave(4, 3)
    pixels = pixels * (0.7 + 0.3 * torch.rand(len(labels), 1, 1, 1, generator=source))
    pixels = pixels + 0.1 * torch.randn(pixels.shape, generator=source)
    return (255 * pixels.clamp(0, 1)).to(torch.uint8), labels


def read_tiny(data_dir: Path | None = None) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    return *tiny_pictures(32, seed=1), *tiny_pictures(16, seed=2)


def fields_of(method: str, values: dict[str, Any]) -> dict[str, Any]:
    """Return those of `values` that a method has a field for."""
    names = {item.name for item in fields(METHODS[method])}  # type: ignore[arg-type]
    return {name: value for name, value in values.items() if name in names}


def tiny_recipe(setting: str = "tiny-4-2", num_novel: int = 2, method: str = "ncdwf") -> Config:
    view = View(shift=1.0, rotation=5.0)
    return Config(
        setting=setting,
        supervised=Supervised(optim=Optim(epochs=4, batch_size=32, lr=0.05), view=view),
        discovery=Discovery(
            num_novel=num_novel, optim=Optim(epochs=10, batch_size=32, lr=0.05), large=view
        ),
        method={"name": method, **fields_of(method, TINY_METHOD)},
        device="cpu",
    )


def register_tiny(patch: pytest.MonkeyPatch) -> None:
    data = DataSet(class_names=NAMES, read=read_tiny)
    patch.setitem(ncdwf.data.setting.DATA_SETS, "tiny", data)
    patch.setitem(ncdwf.recipes.RECIPES, "tiny", tiny_recipe)


class Stop(Exception):
    """Stands for anything that ends a process between two steps."""


class StopAfter(Quiet):
    """Progress that lets a number of steps through and then ends the training."""

    def __init__(self, num_steps: int) -> None:
        self.left = num_steps

    def advance(self, num_images: int) -> None:
        self.left -= 1
        if self.left == 0:
            raise Stop


def fingerprint(module: nn.Module) -> str:
    """Return the sha256 of every parameter and buffer, bit for bit."""
    return storage.sha256(storage.to_tensor_bytes(module.state_dict()))


def timeless(history: History) -> list[dict[str, Any]]:
    """Return a history without what depends on the clock."""
    clock = ("seconds", "images_per_second")
    return [{k: v for k, v in asdict(e).items() if k not in clock} for e in history]


def same_results(run: Path, other: Path) -> None:
    """Assert that two run directories hold the same bits, but for the clock."""
    for name in ("model.safetensors", "model.json", "predictions.npz"):
        assert (run / name).read_bytes() == (other / name).read_bytes(), name
    assert timeless(Run(run).history()) == timeless(Run(other).history())


def shorter(config: Config, *, supervised: int = 1, discovery: int = 2) -> Config:
    """Return `config` with fewer epochs, for what does not depend on how well it learns."""
    for key, epochs in (("supervised", supervised), ("discovery", discovery)):
        config = override(config, f"{key}.optim.epochs={epochs}")
    return replace(config, method={"name": "ncdwf", **SHORT_METHOD})


@contextmanager
def no_synchronisation() -> Iterator[None]:
    """Raise where the host waits for the GPU."""
    try:
        torch.cuda.set_sync_debug_mode("error")
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@contextmanager
def unchanged_global_state() -> Iterator[None]:
    """Assert that nothing is drawn; the package does not import Python's own `random` at all."""
    before = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    yield
    after = torch.get_rng_state(), np.random.get_state()  # noqa: NPY002
    assert torch.equal(before[0], after[0])
    assert all(np.array_equal(b, a) for b, a in zip(before[1], after[1], strict=True))


@pytest.fixture
def tiny(monkeypatch: pytest.MonkeyPatch) -> Config:
    """Make `tiny-4-2` a setting like any other for one test; return its recipe."""
    register_tiny(monkeypatch)
    return tiny_recipe()


@pytest.fixture(scope="session")
def config() -> Config:
    return tiny_recipe()


@pytest.fixture(scope="session")
def split() -> Split:
    with pytest.MonkeyPatch.context() as patch:
        register_tiny(patch)
        return Setting.parse("tiny-4-2").load()


@pytest.fixture(scope="session")
def known_model(split: Split, config: Config) -> Model:
    """The tiny setting after its supervised phase; not to be changed."""
    return learn_known(
        split.known_images, split.known_labels, config, class_names=split.known_names
    )


@pytest.fixture(scope="session")
def found_model(known_model: Model, split: Split, config: Config) -> Model:
    """The tiny setting after its discovery phase; not to be changed."""
    return discover(known_model, split.pool_images, make_method(config.method), config)


@pytest.fixture(scope="session")
def finished_run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A finished run of the tiny setting; to be copied before anything in it is changed."""
    with pytest.MonkeyPatch.context() as patch:
        register_tiny(patch)
        run = Run.create(tmp_path_factory.mktemp("finished") / "run", shorter(tiny_recipe()))
        experiment.execute(run)
    return run.path


@pytest.fixture
def run_copy(tmp_path: Path, finished_run: Path) -> Path:
    """A finished run of the tiny setting; anything in it may be changed."""
    return shutil.copytree(finished_run, tmp_path / "copy")

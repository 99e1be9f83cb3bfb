"""The three ways to run a step agree, none waits for the host, and a captured run resumes."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from conftest import Stop, StopAfter, fields_of, no_synchronisation
from torch import Tensor

from ncdwf.config import Config, Engine, override
from ncdwf.learning import loop
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.supervised import learn_known
from ncdwf.model import Model
from ncdwf.recipes import recipe
from ncdwf.results.configuration import complete

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    # The compiler warns of its own parts, and the sync debug mode calls itself a prototype.
    pytest.mark.filterwarnings("ignore"),
]

ENGINES: tuple[Engine, ...] = ("eager", "compiled", "captured")
TOLERANCES = {torch.float32: 0.002, torch.bfloat16: 0.1}
"""Relative, by the precision of the networks. In bfloat16 (8 bits), as the recipes run, compiled
and eager networks round differently, and the distance between two equal networks, where
distillation begins, is all rounding. In single precision steps without momentum (0.26 % and more
on a CPU) or with a learning rate a tenth too high (0.5 % and more) would be found out."""
NUM_STEPS = 2
"""In each of the two epochs that are compared. Every step multiplies what rounding began."""
PRECISIONS = pytest.mark.parametrize("precision", list(TOLERANCES))
SMALLEST = 0.25
"""A term below this is compared as if it were this large."""


@pytest.fixture(scope="module")
def config() -> Config:
    """The CIFAR recipe itself, on few pictures."""
    config = complete(recipe("cifar100-80-20"))
    for assignment in (
        "device=cuda",
        "supervised.optim.epochs=2",
        "supervised.optim.batch_size=128",
        "supervised.optim.warmup_epochs=0",
        "supervised.optim.lr=0.05",
        "discovery.optim.epochs=2",
        "discovery.optim.batch_size=64",
        "discovery.optim.warmup_epochs=0",
        "discovery.optim.lr=0.01",
        "discovery.num_novel=4",
        "method.settling.epochs=1",
        "method.settling.batch_size=64",
    ):
        config = override(config, assignment)
    return config


@pytest.fixture(scope="module")
def pictures() -> tuple[Tensor, Tensor]:
    # A pattern a class: on noise alone features collapse, and rounding is all that is left of them.
    source = torch.Generator().manual_seed(0)
    patterns = torch.randint(0, 180, (8, 3, 4, 4), dtype=torch.uint8, generator=source)
    noise = torch.randint(0, 76, (512, 3, 32, 32), dtype=torch.uint8, generator=source)
    labels = torch.arange(512) % 8
    patterns = patterns.repeat_interleave(8, dim=2).repeat_interleave(8, dim=3)
    return patterns[labels] + noise, labels


@pytest.fixture(scope="module")
def known(pictures: tuple[Tensor, Tensor], config: Config) -> Model:
    return learn_known(*pictures, config)


def means(history: loop.History) -> dict[tuple[str, int, str], float]:
    return {
        (epoch.phase, epoch.epoch, name): float(torch.tensor(term).mean())
        for epoch in history
        for name, term in epoch.terms.items()
    }


Record = Callable[[str, object], None]


def agree(
    found: dict[Engine, dict[tuple[str, int, str], float]], tolerance: float, record: Record
) -> None:
    """Compare every term with that of eager steps; record the largest relative difference."""
    for engine in ENGINES[1:]:
        differences = {
            key: abs(found[engine][key] - wanted) / max(abs(wanted), SMALLEST)
            for key, wanted in found["eager"].items()
        }
        largest = max(differences, key=lambda key: differences[key])
        record(f"{engine} against eager", f"{differences[largest]:.2%} ({largest[2]})")
        # Every one of them: what is not a number is never the largest.
        assert all(value <= tolerance for value in differences.values()), (engine, differences)


def compute_in(precision: torch.dtype, patch: pytest.MonkeyPatch) -> None:
    patch.setattr(loop, "PRECISION", precision)
    # Single precision in earnest: by default convolutions round to 10 bits.
    patch.setattr(torch.backends.cudnn, "allow_tf32", False)


@PRECISIONS
def test_supervised_steps_agree(
    precision: torch.dtype,
    pictures: tuple[Tensor, Tensor],
    config: Config,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute_in(precision, monkeypatch)
    few = [part[: NUM_STEPS * config.supervised.optim.batch_size] for part in pictures]
    found = {}
    for engine in ENGINES:
        history: loop.History = []
        learn_known(*few, replace(config, engine=engine), history=history)
        found[engine] = means(history)
    agree(found, TOLERANCES[precision], record_property)


@PRECISIONS
@pytest.mark.parametrize("name", ["ncdwf", "uno", "ncdwf-gauss"])
def test_discovery_steps_agree(
    name: str,
    precision: torch.dtype,
    known: Model,
    pictures: tuple[Tensor, Tensor],
    config: Config,
    record_property: Record,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    compute_in(precision, monkeypatch)
    settling = fields_of(name, {"settling": config.method["settling"]})
    fields = config.method if name == "ncdwf" else {"name": name, **settling}
    pool = pictures[0][: NUM_STEPS * config.discovery.optim.batch_size]
    found = {}
    for engine in ENGINES:
        history: loop.History = []
        changed = replace(config, engine=engine)
        discover(known, pool, make_method(fields), changed, history=history)
        found[engine] = means(history)
    agree(found, TOLERANCES[precision], record_property)


def test_no_captured_step_waits_for_the_device(
    known: Model,
    pictures: tuple[Tensor, Tensor],
    config: Config,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, counted = loop.Training.step, []

    def guarded(self: loop.Training, *arguments: object) -> None:
        if self.graph is None:  # the capture itself waits, once
            step(self, *arguments)  # type: ignore[arg-type]
            return
        with no_synchronisation():
            step(self, *arguments)  # type: ignore[arg-type]
        counted.append(self.phase)

    monkeypatch.setattr(loop.Training, "step", guarded)
    discover(known, pictures[0], make_method(config.method), config)
    assert counted.count("discovery") == 2 * 8 - 1


def test_a_captured_run_resumes_where_it_stopped(
    known: Model, pictures: tuple[Tensor, Tensor], config: Config, tmp_path: Path
) -> None:
    method = make_method(config.method)
    whole: loop.History = []
    discover(known, pictures[0], method, config, history=whole)
    checkpoints = Checkpoints(tmp_path, seconds=0, fingerprint="x")
    with pytest.raises(Stop):
        discover(
            known, pictures[0], method, config, checkpoints=checkpoints, progress=StopAfter(11)
        )
    resumed: loop.History = []
    discover(known, pictures[0], method, config, checkpoints=checkpoints, history=resumed)
    assert means(resumed).keys() == means(whole).keys()
    for key, wanted in means(whole).items():
        assert means(resumed)[key] == pytest.approx(wanted, rel=0.02, abs=1e-3), key


def test_a_captured_run_goes_on_after_a_pause(
    known: Model, pictures: tuple[Tensor, Tensor], config: Config, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Tries pause half way, which drops their graph; the best one is captured once more."""
    capture, captured = loop.Training._capture, []

    def counted(self: loop.Training, inputs: loop._Inputs) -> None:
        captured.append(self.phase)
        capture(self, inputs)

    monkeypatch.setattr(loop.Training, "_capture", counted)
    method = make_method(config.method)
    tried: loop.History = []
    discover(known, pictures[0], method, override(config, "discovery.tries=2"), history=tried)
    assert captured.count("discovery") == 2 + 1
    seed = tried[0].seed
    assert seed is not None
    alone: loop.History = []
    discover(known, pictures[0], method, replace(config, seed=seed), history=alone)
    assert means(tried).keys() == means(alone).keys()
    for key, wanted in means(alone).items():
        assert means(tried)[key] == pytest.approx(wanted, rel=0.02, abs=1e-3), key


def test_capturing_leaves_no_trace(pictures: tuple[Tensor, Tensor], config: Config) -> None:
    """A learning rate of 0 must leave the weights alone, whatever the warm-up steps did."""
    still = override(override(config, "supervised.optim.lr=0"), "supervised.optim.min_lr=0")
    model = learn_known(*pictures, still)
    fresh = Model.create(model.architecture, model.known_names, seed=still.seed)
    for name, weight in fresh.named_parameters():
        assert torch.equal(model.get_parameter(name).cpu(), weight), name


def test_the_captured_step_is_fast(record_property: Record) -> None:
    """A floor far below what was measured (benchmarks/RECORDS.md): it finds a lost capture."""
    config = complete(recipe("cifar100-80-20"))
    config = override(config, "supervised.optim.epochs=3")
    images = torch.randint(0, 256, (20_480, 3, 32, 32), dtype=torch.uint8)
    history: loop.History = []
    learn_known(images, torch.arange(20_480) % 80, config, history=history)
    record_property("supervised images/s", f"{history[-1].images_per_second:,.0f}")
    assert history[-1].images_per_second > 50_000

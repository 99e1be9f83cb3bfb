"""The one loop: schedule, update, history, engines, guard against NaN, checkpoints, resumption."""

import itertools
import shutil
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import grimp
import pytest
import torch
from conftest import Stop, StopAfter, fingerprint, timeless, unchanged_global_state
from torch import Tensor, nn

from ncdwf.config import Engine, Optim
from ncdwf.errors import InputError, NonFiniteError
from ncdwf.learning.batches import Batch, TensorSource
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.learning.loop import (
    History,
    Loss,
    Terms,
    Training,
    choose_device,
    choose_engine,
    fastest_convolutions,
    learning_rate,
)
from ncdwf.noise import Draw, Noise, draw, generator
from ncdwf.progress import Progress, Quiet

STEPS, EPOCHS = 5, 3
OPTIM = Optim(epochs=EPOCHS, batch_size=4, lr=0.1, min_lr=0.01, warmup_epochs=1)
NOISE = {"move": Draw(kind="normal", shape=(4, 3)), "keep": Draw(kind="uniform", shape=(2,))}


class Net(nn.Module):
    """Weights, running statistics and a frozen part: all that a checkpoint has to hold."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(3, 2)
        self.norm = nn.BatchNorm1d(2)
        self.frozen = nn.Parameter(torch.ones(2), requires_grad=False)
        source = torch.Generator().manual_seed(0)
        with torch.no_grad():
            for parameter in (self.linear.weight, self.linear.bias):
                parameter.normal_(generator=source)

    def terms(self, batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        answers = self.norm(self.linear(batch[0] + noise["move"])) * self.frozen
        return {
            "fit": (answers - batch[1]).square().mean(),
            "heads": noise["keep"] * self.linear.weight.square().sum(1) * (1 + progress),
        }


class Recorder(Quiet):
    """Progress that keeps a copy of the weights after every step."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.weights: list[list[Tensor]] = []

    def advance(self, num_images: int) -> None:
        self.weights.append([p.detach().clone() for p in self.module.parameters()])


class Scalar(nn.Module):
    """One parameter, for what can be worked out by hand."""

    def __init__(self, start: float) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.tensor(start, dtype=torch.float64))


def make_source(seed: int = 0, phase: str = "test") -> TensorSource:
    drawn = torch.Generator().manual_seed(5)
    inputs, targets = torch.randn(22, 3, generator=drawn), torch.randn(22, 2, generator=drawn)
    return TensorSource(inputs, targets, batch_size=4, seed=seed, phase=phase)


def run_net(
    net: Net,
    *,
    loss: Loss | None = None,
    optim: Optim = OPTIM,
    seed: int = 0,
    phase: str = "test",
    engine: Engine = "auto",
    checkpoints: Checkpoints | None = None,
    progress: Progress | None = None,
    after_epoch: Callable[[History], None] | None = None,
) -> History:
    return Training(
        net,
        loss or net.terms,
        make_source(seed, phase),
        optim,
        noise=NOISE,
        seed=seed,
        phase=phase,
        engine=engine,
        checkpoints=checkpoints,
        progress=progress,
        after_epoch=after_epoch,
    ).run()


def every_step(directory: Path, config: str = "a") -> Checkpoints:
    return Checkpoints(directory, seconds=0.0, fingerprint=config)


def kept(directory: Path) -> list[str]:
    return sorted(path.name for path in directory.iterdir())


def test_steps_get_the_noise_of_their_position() -> None:
    seen: list[dict[str, Tensor]] = []
    net = Net()

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        seen.append({name: tensor.clone() for name, tensor in noise.items()})
        return net.terms(batch, noise, progress)

    run_net(net, loss=loss, seed=3, phase="here")
    assert len(seen) == EPOCHS * STEPS
    for epoch in range(EPOCHS):
        wanted = draw(NOISE, STEPS, generator(3, "here", epoch))
        for step in range(STEPS):
            for name in NOISE:
                assert torch.equal(seen[epoch * STEPS + step][name], wanted[name][step])
    assert not torch.equal(seen[0]["move"], seen[STEPS]["move"])


def test_progress_of_the_phase_runs_from_zero_towards_one() -> None:
    seen: list[float] = []
    net = Net()

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        seen.append(float(progress))
        return net.terms(batch, noise, progress)

    run_net(net, loss=loss)
    assert seen == pytest.approx([i / (EPOCHS * STEPS) for i in range(EPOCHS * STEPS)])


@pytest.mark.parametrize(
    ("epochs_done", "rate"),
    [
        (0.0, 0.1),  # warm-up begins at min_lr
        (1.0, 0.3),
        (2.0, 0.5),  # warm-up ends at lr
        (4.0, 0.1 + 0.2 * (1 + 2**-0.5)),  # a quarter of the cosine: cos 45° = 1/√2
        (6.0, 0.3),  # half of it
        (10.0, 0.1),  # its end
        (11.0, 0.1),  # and no way back up
    ],
)
def test_learning_rate_by_hand(epochs_done: float, rate: float) -> None:
    optim = Optim(epochs=10, batch_size=2, lr=0.5, min_lr=0.1, warmup_epochs=2)
    assert learning_rate(optim, epochs_done) == pytest.approx(rate, abs=1e-12)


def test_every_step_applies_the_rate_of_its_position() -> None:
    # The slope of w is 1, so without momentum every step moves w by its learning rate.
    scalar = Scalar(0.0)
    optim = replace(OPTIM, momentum=0.0, weight_decay=0.0)
    recorder = Recorder(scalar)
    history = Training(
        scalar,
        lambda batch, noise, progress: {"w": scalar.weight},
        make_source(),
        optim,
        noise={},
        seed=0,
        phase="test",
        progress=recorder,
    ).run()
    places = [0.0, *(float(weights[0]) for weights in recorder.weights)]
    moves = [before - after for before, after in itertools.pairwise(places)]
    wanted = [learning_rate(optim, i / STEPS) for i in range(EPOCHS * STEPS)]
    assert moves == pytest.approx(wanted, rel=1e-6)
    assert [epoch.lr for epoch in history] == pytest.approx([wanted[0], wanted[5], wanted[10]])


def test_update_is_sgd_with_momentum_and_weight_decay_by_hand() -> None:
    scalar = Scalar(2.0)
    optim = Optim(epochs=1, batch_size=4, lr=0.1, min_lr=0.1, momentum=0.5, weight_decay=0.2)
    recorder = Recorder(scalar)
    Training(
        scalar,
        lambda batch, noise, progress: {"bowl": 3 * scalar.weight**2},
        make_source(),
        optim,
        noise={},
        seed=0,
        phase="test",
        progress=recorder,
    ).run()
    weight, speed, wanted = 2.0, 0.0, []
    for _ in range(STEPS):
        speed = 0.5 * speed + 6 * weight + 0.2 * weight
        weight -= 0.1 * speed
        wanted.append(weight)
    assert [float(weights[0]) for weights in recorder.weights] == pytest.approx(wanted, rel=1e-6)


def test_long_gradients_are_shortened_and_short_ones_left() -> None:
    scalar = Scalar(2.0)
    optim = Optim(epochs=1, batch_size=4, lr=0.1, min_lr=0.1, momentum=0.0, weight_decay=0.0)
    recorder = Recorder(scalar)
    Training(
        scalar,
        lambda batch, noise, progress: {"bowl": 3 * scalar.weight**2},
        make_source(),
        replace(optim, clip_norm=4.0),
        noise={},
        seed=0,
        phase="test",
        progress=recorder,
    ).run()
    weight, wanted = 2.0, []
    for _ in range(STEPS):
        weight -= 0.1 * min(6 * weight, 4.0)
        wanted.append(weight)
    assert 6 * wanted[-2] < 4 < 6 * wanted[0]  # both cases come up
    assert [float(weights[0]) for weights in recorder.weights] == pytest.approx(wanted, rel=1e-5)


def test_slower_parts_move_by_their_share_of_the_rate() -> None:
    parts = nn.ModuleDict({name: Scalar(1.0) for name in ("slow", "slower", "free")})
    optim = Optim(epochs=1, batch_size=4, lr=0.1, min_lr=0.1, momentum=0.0, weight_decay=0.0)
    Training(
        parts,
        lambda batch, noise, progress: {"line": sum(part.weight for part in parts.values())},
        make_source(),
        optim,
        noise={},
        seed=0,
        phase="test",
        slower={"slow": 0.25},
    ).run()
    moves = {name: 1.0 - part.weight.item() for name, part in parts.items()}
    assert moves == pytest.approx(
        {"slow": 0.025 * STEPS, "slower": 0.1 * STEPS, "free": 0.1 * STEPS}
    )


def test_vector_terms_count_by_their_mean() -> None:
    def moved(loss: Callable[[Tensor], Tensor]) -> float:
        scalar = Scalar(1.0)
        optim = replace(OPTIM, epochs=1)
        Training(
            scalar,
            lambda batch, noise, progress: {"a": loss(scalar.weight), "b": scalar.weight},
            make_source(),
            optim,
            noise={},
            seed=0,
            phase="test",
        ).run()
        return scalar.weight.item()

    slopes = torch.tensor([1.0, 2.0, 6.0])
    assert moved(lambda w: slopes * w) == pytest.approx(moved(lambda w: 3 * w))
    assert moved(lambda w: slopes * w) != pytest.approx(moved(lambda w: 9 * w))


def test_history_holds_means_of_scalars_and_of_every_head() -> None:
    # Without a learning rate the terms follow from the batches alone.
    scalar = Scalar(1.0)
    values = torch.arange(8.0)
    source = TensorSource(values, batch_size=2, seed=0, phase="test")
    heads = torch.tensor([1.0, 10.0])
    history = Training(
        scalar,
        lambda batch, noise, progress: {
            "sum": scalar.weight * batch[0].sum(),
            "heads": scalar.weight * heads * batch[0].mean(),
        },
        source,
        Optim(epochs=2, batch_size=2, lr=0.0, min_lr=0.0),
        noise={},
        seed=0,
        phase="test",
    ).run()
    assert [(epoch.phase, epoch.epoch) for epoch in history] == [("test", 0), ("test", 1)]
    for epoch in history:
        assert epoch.terms == {"sum": 7.0, "heads": [3.5, 35.0]}
        assert epoch.seconds > 0
        assert epoch.images_per_second == pytest.approx(8 / epoch.seconds)


@pytest.mark.parametrize("pauses", [(1,), (2,), (1, 2), (0, 1, 1, 2)])
def test_a_pause_changes_nothing(pauses: tuple[int, ...]) -> None:
    nets = Net(), Net()
    wanted = run_net(nets[0])
    training = Training(
        nets[1], nets[1].terms, make_source(), OPTIM, noise=NOISE, seed=0, phase="test"
    )
    for until in pauses:
        assert len(training.run(until)) == until
    history = training.run()
    assert timeless(history) == timeless(wanted)
    assert fingerprint(nets[0]) == fingerprint(nets[1])
    assert training.run(1) is training.run() is history  # there is nothing left to do


def test_a_pause_is_kept_and_told(tmp_path: Path) -> None:
    net, told = Net(), Tasks()
    kept_here = Checkpoints(tmp_path, seconds=1e9, fingerprint="a")
    training = Training(
        *(net, net.terms, make_source(), OPTIM),
        **{"noise": NOISE, "seed": 0, "phase": "test"},
        checkpoints=kept_here,
        progress=told,
    )
    training.run(1, title="half")
    assert kept(tmp_path) == ["test-000001-00000000"]
    training.run()
    assert kept(tmp_path) == ["test-000001-00000000", "test-000003-00000000"]
    training.run()  # there is nothing left to tell
    assert told.all == [("half", 20, 0), ("test", 60, 20)]
    assert all(parameter.grad is None for parameter in net.parameters())


class Tasks(Quiet):
    """Notes what is begun."""

    def __init__(self) -> None:
        self.all: list[tuple[str, int, int]] = []

    def start(self, task: str, total: int, done: int, /) -> None:
        self.all.append((task, total, done))


def test_after_every_epoch_what_was_left_so_far_is_told() -> None:
    told: list[list[int]] = []
    history = run_net(Net(), after_epoch=lambda epochs: told.append([e.epoch for e in epochs]))
    assert told == [[0], [0, 1], [0, 1, 2]]
    assert len(history) == EPOCHS


def test_frozen_parameters_stay_and_trainable_ones_move() -> None:
    net, fresh = Net(), Net()
    run_net(net)
    assert torch.equal(net.frozen, fresh.frozen)
    assert not torch.equal(net.linear.weight, fresh.linear.weight)


def test_progress_hears_of_every_picture() -> None:
    heard: list[tuple[object, ...]] = []

    class Listener:
        def start(self, task: str, num_images: int, done: int) -> None:
            heard.append(("start", task, num_images, done))

        def advance(self, num_images: int) -> None:
            heard.append(("advance", num_images))

        def stop(self) -> None:
            heard.append(("stop",))

    run_net(Net(), progress=Listener())
    steps = [("advance", 4)] * (EPOCHS * STEPS)
    assert heard == [("start", "test", EPOCHS * STEPS * 4, 0), *steps, ("stop",)]


def test_the_engine_follows_from_the_device() -> None:
    cpu, cuda = torch.device("cpu"), torch.device("cuda")
    assert choose_engine("auto", cpu) == "eager"
    assert choose_engine("auto", cuda) == "captured"
    for engine in ("eager", "compiled"):
        assert choose_engine(engine, cpu) == choose_engine(engine, cuda) == engine
    assert choose_engine("captured", cuda) == "captured"


def test_a_capture_without_a_gpu_is_refused_in_one_line() -> None:
    net = Net()
    before = fingerprint(net)
    with pytest.raises(
        InputError, match=r"config\.engine='captured' needs a CUDA device"
    ) as caught:
        run_net(net, engine="captured")
    assert "\n" not in str(caught.value)
    assert fingerprint(net) == before


def test_looking_for_fast_convolutions_changes_nothing_else(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    cudnn = torch.backends.cudnn
    monkeypatch.setattr(cudnn, "allow_tf32", False)
    monkeypatch.setattr(cudnn, "deterministic", True)
    before = cudnn.benchmark
    with fastest_convolutions():
        assert cudnn.benchmark
        assert not cudnn.allow_tf32
        assert cudnn.deterministic
    assert cudnn.benchmark == before


@pytest.mark.parametrize(("engine", "num_compiled"), [("auto", 0), ("eager", 0), ("compiled", 1)])
def test_only_the_compiled_engine_compiles_and_for_one_shape(
    monkeypatch: pytest.MonkeyPatch, engine: Engine, num_compiled: int
) -> None:
    compiled: list[tuple[Loss, dict[str, Any]]] = []

    def compile_(loss: Loss, **options: Any) -> Loss:
        compiled.append((loss, options))
        return loss

    monkeypatch.setattr(torch, "compile", compile_)
    net, plain = Net(), Net()
    run_net(net, engine=engine)
    assert compiled == [(net.terms, {"dynamic": False})] * num_compiled
    run_net(plain)
    assert fingerprint(net) == fingerprint(plain)


def test_views_are_made_in_single_precision_whatever_the_network_computes_in(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Half precision would leave colours with seven bits, and move pixels by hundredths of one."""
    usual, seen = torch.autocast, {}
    monkeypatch.setattr(torch, "autocast", lambda device, dtype, enabled: usual(device, dtype))
    net = Net()

    def make_views(batch: Batch, noise: Noise) -> Batch:
        seen["views"] = (batch[0] @ batch[0].T).dtype
        return (2 * batch[0],)

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        assert torch.equal(batch[0], torch.full((2, 3), 2.0))
        product = net.linear(batch[0])
        seen["loss"] = product.dtype
        return {"fit": product.float().square().mean()}

    source = TensorSource(torch.ones(2, 3), batch_size=2, seed=0, phase="test")
    optim = replace(OPTIM, epochs=1, batch_size=2)
    Training(net, loss, source, optim, noise={}, seed=0, phase="test", make_views=make_views).run()
    assert seen == {"views": torch.float32, "loss": torch.bfloat16}


@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_more_shapes_are_compiled_than_the_compiler_would_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    sizes = range(2, 14)
    graphs: list[torch.fx.GraphModule] = []

    def note(graph: torch.fx.GraphModule, examples: list[Tensor]) -> Callable[..., Any]:
        graphs.append(graph)
        return graph.forward

    monkeypatch.setattr(torch, "compile", partial(torch.compile, backend=note))
    monkeypatch.setattr(torch._dynamo.config, "recompile_limit", 8)  # put back afterwards
    net = Net()

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        return {"fit": net.linear(batch[0]).square().mean()}

    for size in sizes:
        source = TensorSource(torch.ones(size, 3), batch_size=size, seed=0, phase="test")
        optim = replace(OPTIM, epochs=2, batch_size=size)
        Training(net, loss, source, optim, noise={}, seed=0, phase="test", engine="compiled").run()
    assert len(graphs) == len(sizes)


@pytest.mark.slow
@pytest.mark.skipif(shutil.which("g++") is None, reason="torch.compile needs a C++ compiler")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
def test_compiled_steps_do_what_eager_ones_do() -> None:
    eager, compiled = Net(), Net()
    wanted = run_net(eager, engine="eager")
    got = run_net(compiled, engine="compiled")
    for left, right in zip(got, wanted, strict=True):
        assert left.terms["fit"] == pytest.approx(right.terms["fit"], rel=1e-4)
        assert left.terms["heads"] == pytest.approx(right.terms["heads"], rel=1e-4)
    for name, tensor in compiled.state_dict().items():
        assert torch.allclose(tensor, eager.state_dict()[name], atol=1e-4), name


def momentum_of(directory: Path) -> dict[str, Tensor]:
    latest = every_step(directory).latest("test")
    assert latest is not None
    return {n.removeprefix("momentum."): t for n, t in latest[0].items() if "momentum." in n}


def test_momentum_is_there_from_the_start_also_where_nothing_was_learnt_yet(
    tmp_path: Path,
) -> None:
    # A capture replays one step over and over: nothing may come into being in a later one.
    net = Net()

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        return {"weight": net.linear.weight.square().sum()}  # no other parameter has a gradient

    with pytest.raises(Stop):
        run_net(net, loss=loss, checkpoints=every_step(tmp_path), progress=StopAfter(2))
    momentum = momentum_of(tmp_path)
    assert set(momentum) == {"linear.weight", "linear.bias", "norm.weight", "norm.bias"}
    assert momentum["linear.weight"].abs().max() > 0
    for name in ("linear.bias", "norm.weight", "norm.bias"):
        assert torch.equal(momentum[name], torch.zeros(2)), name


def test_resuming_takes_up_the_momentum(tmp_path: Path) -> None:
    with pytest.raises(Stop):
        run_net(Net(), checkpoints=every_step(tmp_path), progress=StopAfter(7))
    kept_momentum = momentum_of(tmp_path)
    weights = every_step(tmp_path).latest("test")
    assert weights is not None
    # The slope is zero from here on, so momentum alone moves the weights: by 0.9 of it, times the
    # learning rate of the seventh step.
    net = Net()
    optim = replace(OPTIM, weight_decay=0.0)
    recorder = Recorder(net)
    zero = {name: p for name, p in net.named_parameters() if p.requires_grad}

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        flat = torch.stack([0 * p.sum() for p in zero.values()]).sum()
        return {"fit": flat, "heads": torch.stack([flat, flat])}

    run_net(net, loss=loss, optim=optim, checkpoints=every_step(tmp_path), progress=recorder)
    rate = learning_rate(optim, 6 / STEPS)
    for (name, _), after in zip(net.named_parameters(), recorder.weights[0], strict=True):
        before = weights[0][f"module.{name}"]
        moved = rate * 0.9 * kept_momentum[name] if name in kept_momentum else 0 * before
        assert torch.allclose(before - after, moved, atol=1e-6), name


def test_global_random_state_is_not_touched() -> None:
    net = Net()
    with unchanged_global_state():
        run_net(net)


def test_the_package_has_no_use_for_random() -> None:
    graph = grimp.build_graph("ncdwf", include_external_packages=True, cache_dir=None)
    assert "hashlib" in graph.modules
    assert "random" not in graph.modules


def test_global_random_state_has_no_influence() -> None:
    results = []
    for seed in (1, 2):
        torch.manual_seed(seed)
        net = Net()
        run_net(net)
        results.append(fingerprint(net))
    assert results[0] == results[1]


def inject(net: Net, step: int, value: float, place: str) -> Loss:
    """Return the net's loss with `value` put into a term, or into a gradient alone, at one step."""
    calls = iter(range(EPOCHS * STEPS))

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        terms = net.terms(batch, noise, progress)
        if next(calls) != step:
            return terms
        if place == "gradient":
            extra = net.linear.bias * 1
            extra.register_hook(lambda gradient: gradient * value)
            return {**terms, "heads": terms["heads"] + extra.sum()}
        factor = torch.tensor([1.0, value]) if terms[place].ndim else torch.tensor(value)
        return {**terms, place: terms[place] * factor}

    return loss


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
@pytest.mark.parametrize("place", ["fit", "heads", "gradient"])
@pytest.mark.parametrize("step", [0, 7, EPOCHS * STEPS - 1])
def test_non_finite_step_is_named_and_not_made(
    tmp_path: Path, step: int, place: str, value: float
) -> None:
    clean = Net()
    recorder = Recorder(clean)
    start = [p.detach().clone() for p in clean.parameters()]
    run_net(clean, progress=recorder)
    before = [start, *recorder.weights][step]

    # With a checkpoint at every step and, as on a device, with one look at the end of the epoch.
    for checkpoints in (every_step(tmp_path / "often"), None):
        net = Net()
        with pytest.raises(NonFiniteError, match=rf"test phase: '{place}' .* step {step} "):
            run_net(net, loss=inject(net, step, value, place), checkpoints=checkpoints)
        assert all(map(torch.equal, net.parameters(), before))


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_last_good_checkpoint_outlives_a_non_finite_step(tmp_path: Path, value: float) -> None:
    net = Net()
    with pytest.raises(NonFiniteError):
        run_net(net, loss=inject(net, 7, value, "fit"), checkpoints=every_step(tmp_path))
    assert kept(tmp_path) == ["test-000001-00000001", "test-000001-00000002"]

    resumed, whole = Net(), Net()
    history = run_net(resumed, checkpoints=every_step(tmp_path))
    assert timeless(history) == timeless(run_net(whole))
    assert fingerprint(resumed) == fingerprint(whole)


def final_state(directory: Path) -> tuple[dict[str, bytes], list[str]]:
    """Return every tensor of the last checkpoint (weights, buffers, momentum), bit for bit."""
    latest = every_step(directory).latest("test")
    assert latest is not None
    tensors, position = latest
    assert (position.epoch, position.step) == (EPOCHS, 0)
    return {name: t.numpy().tobytes() for name, t in tensors.items()}, sorted(tensors)


@pytest.mark.parametrize("steps", range(1, EPOCHS * STEPS + 1))
def test_resume_after_any_number_of_steps_changes_nothing(tmp_path: Path, steps: int) -> None:
    whole = Net()
    history = run_net(whole, checkpoints=every_step(tmp_path / "whole"))
    with pytest.raises(Stop):
        run_net(Net(), checkpoints=every_step(tmp_path / "cut"), progress=StopAfter(steps))
    resumed = Net()
    again = run_net(resumed, checkpoints=every_step(tmp_path / "cut"))
    assert timeless(again) == timeless(history)
    assert fingerprint(resumed) == fingerprint(whole)
    tensors, names = final_state(tmp_path / "cut")
    assert "momentum.linear.weight" in names
    assert tensors == final_state(tmp_path / "whole")[0]


@pytest.mark.parametrize("chain", [(2,) * 20, (3, 4, 5), (6, 2, 2, 7), (5, 5, 5), (14, 2)])
def test_chains_of_interruptions_change_nothing(tmp_path: Path, chain: tuple[int, ...]) -> None:
    interruptions = 0
    for steps in chain:
        try:
            run_net(Net(), checkpoints=every_step(tmp_path), progress=StopAfter(steps))
        except Stop:
            interruptions += 1
    assert interruptions >= 2
    resumed, whole = Net(), Net()
    history = run_net(resumed, checkpoints=every_step(tmp_path))
    assert timeless(history) == timeless(run_net(whole))
    assert fingerprint(resumed) == fingerprint(whole)


def test_resuming_a_finished_training_does_nothing(tmp_path: Path) -> None:
    first = Net()
    history = run_net(first, checkpoints=every_step(tmp_path))
    again = Net()

    def loss(batch: Batch, noise: Noise, progress: Tensor) -> Terms:
        raise AssertionError("there is no step left")

    assert run_net(again, loss=loss, checkpoints=every_step(tmp_path)) == history
    assert fingerprint(again) == fingerprint(first)


def test_resume_tells_progress_what_was_done_before(tmp_path: Path) -> None:
    class Listener(Quiet):
        def start(self, task: str, num_images: int, done: int) -> None:
            self.done = done

    with pytest.raises(Stop):
        run_net(Net(), checkpoints=every_step(tmp_path), progress=StopAfter(8))
    listener = Listener()
    run_net(Net(), checkpoints=every_step(tmp_path), progress=listener)
    assert listener.done == 7 * 4  # the eighth step ended before its checkpoint


def test_a_missing_cuda_device_is_named() -> None:
    if torch.cuda.is_available():
        assert choose_device("cuda").type == "cuda"
    else:
        assert choose_device("auto").type == "cpu"
        with pytest.raises(InputError, match="CUDA"):
            choose_device("cuda")

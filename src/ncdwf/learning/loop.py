"""The one loop: the only place with a backward pass and an optimiser step.

A step reads tensors only (batch, noise, learning rate, position) and never waits for the device:
losses add up there and are read once an epoch. So the same step runs eagerly on a CPU and is
compiled and captured whole, as one CUDA graph, on a GPU. What a step draws follows from seed,
phase, epoch and step, so a checkpoint holds no random state.
"""

import math
import time
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass
from typing import Any, TypeVar, cast

import torch
from torch import Tensor, nn

from ncdwf.config import Engine, Optim, from_dict
from ncdwf.errors import InputError, NonFiniteError
from ncdwf.learning.batches import Batch, BatchSource
from ncdwf.learning.checkpoints import Checkpoints
from ncdwf.model.backbone import Foreign, compile_apart
from ncdwf.noise import Draw, Noise, draw, generator, pinned
from ncdwf.progress import Progress, Quiet

Terms = dict[str, Tensor]
"""Named loss terms, weights included. Of a vector (one entry a head) the mean counts."""
MakeViews = Callable[[Batch, Noise], Batch]
"""Makes of a batch and its noise what a loss reads, such as augmented views."""
Loss = Callable[[Batch, Noise, Tensor], Terms]
"""Maps a batch, its noise and the progress of the phase (0 to 1) to loss terms."""

NEVER = torch.iinfo(torch.int64).max


@dataclass(frozen=True, kw_only=True, slots=True)
class Epoch:
    """What one epoch left behind: the mean of every term, and how fast it went."""

    phase: str
    seed: int | None = None
    """Of several tries of a phase it tells which one was kept; earlier versions did not say."""
    epoch: int
    lr: float
    terms: dict[str, float | list[float]]
    seconds: float
    images_per_second: float


History = list[Epoch]


def choose_device(name: str) -> torch.device:
    """Return the device called `name`; `auto` is a GPU where there is one."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("config.device='cuda', but this machine has no CUDA device")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def choose_engine(engine: Engine, device: torch.device) -> Engine:
    """Return how steps are run on `device`."""
    if engine == "captured" and device.type != "cuda":
        raise InputError("config.engine='captured' needs a CUDA device; 'auto' fits every device")
    if engine == "auto":
        return "captured" if device.type == "cuda" else "eager"
    return engine


def learning_rate(optim: Optim, epochs_done: float) -> float:
    """Return the learning rate after `epochs_done`: a line up to `lr`, then a cosine down."""
    if epochs_done < optim.warmup_epochs:
        return optim.min_lr + (optim.lr - optim.min_lr) * epochs_done / optim.warmup_epochs
    span = max(optim.epochs - optim.warmup_epochs, 1)
    done = min((epochs_done - optim.warmup_epochs) / span, 1.0)
    return optim.min_lr + 0.5 * (optim.lr - optim.min_lr) * (1 + math.cos(math.pi * done))


PRECISION = torch.bfloat16
"""What networks compute in on a GPU; weights, losses and updates stay in single precision."""
NUM_SHAPES = 64
"""Networks, batches and views of so many shapes are compiled in one process."""
WARM_UP_STEPS = 3
"""Steps before a capture: they compile, choose kernels and allocate."""


F = TypeVar("F", bound=Callable[..., Any])


@contextmanager
def fastest_convolutions() -> Iterator[None]:
    """Let cuDNN look for the fastest convolution, once for every shape."""
    # `torch.backends.cudnn.flags` would set all its other switches, too, and allow TF32.
    before = torch.backends.cudnn.benchmark
    torch.backends.cudnn.benchmark = True
    try:
        yield
    finally:
        torch.backends.cudnn.benchmark = before


def _compiled(function: F) -> F:
    """Return `function`, compiled for the shapes that it meets."""
    compile_apart()
    # After eight shapes the compiler would give up and run the rest eagerly.
    torch._dynamo.config.recompile_limit = NUM_SHAPES
    # It proposes a lower precision for products that are kept out of bfloat16 on purpose.
    warnings.filterwarnings("ignore", message="TensorFloat32")
    # Shapes never change within a phase; one compiled for any size would be slower.
    return cast(F, torch.compile(function, dynamic=False))


class Training:
    """Minimises a loss over the trainable parameters of a module; it may pause between epochs."""

    def __init__(
        self,
        module: nn.Module,
        loss: Loss,
        source: BatchSource,
        optim: Optim,
        *,
        noise: Mapping[str, Draw],
        seed: int,
        phase: str,
        make_views: MakeViews | None = None,
        engine: Engine = "auto",
        slower: Mapping[str, float] | None = None,
        checkpoints: Checkpoints | None = None,
        progress: Progress | None = None,
        after_epoch: Callable[[History], None] | None = None,
    ) -> None:
        """Make the module ready, and take up the newest checkpoint of this phase if there is one.

        Args:
            module: all that is trained and all that a checkpoint must hold.
            loss: gives the terms; their means are summed.
            source: gives the batches.
            optim: epochs, batch size and the schedule.
            noise: what every step draws.
            seed: with `phase` and the position it decides every draw.
            phase: the name of this training in checkpoints, history and messages.
            make_views: what a step does first, always in single precision.
            engine: how a step is run; `auto` captures it on a GPU and runs it eagerly on a CPU.
            slower: parts of the module whose learning rate is so many times the schedule's.
            checkpoints: where to keep them, and to resume from.
            progress: hears of every step.
            after_epoch: called with what the epochs so far left; it must not change the module.
        """
        self.module = module.train()
        self.source = source
        self.optim = optim
        self.noise, self.seed, self.phase = noise, seed, phase
        self.checkpoints, self.progress = checkpoints, progress or Quiet()
        self.after_epoch = after_epoch
        self.history: History = []
        """What each epoch left."""
        self.device = source.device
        engine = choose_engine(engine, source.device)
        self.is_captured = engine == "captured"
        self.make_views, self.loss = make_views, loss
        if engine != "eager":
            self.make_views = None if make_views is None else _compiled(make_views)
            self.loss = _compiled(loss)
        if self.device.type == "cuda":
            module.to(memory_format=torch.channels_last)  # type: ignore[call-overload]
        # Somebody else's network may draw on its own, as dropout does.
        self.draws_itself = any(isinstance(part, Foreign) for part in module.modules())
        self.parameters = {n: p for n, p in module.named_parameters() if p.requires_grad}
        self.inputs: _Inputs | None = None
        groups: dict[float, list[nn.Parameter]] = {}
        for name, parameter in self.parameters.items():
            factors = [f for part, f in (slower or {}).items() if name.startswith(f"{part}.")]
            groups.setdefault(math.prod(factors), []).append(parameter)
        self.lr = {factor: torch.zeros((), device=self.device) for factor in groups}
        self.optimizer = torch.optim.SGD(
            [{"params": groups[factor], "lr": lr} for factor, lr in self.lr.items()],
            momentum=optim.momentum,
            weight_decay=optim.weight_decay,
            fused=True,  # also skips the update where `found_inf` says so, without asking the host
        )
        for parameter in self.parameters.values():
            self.optimizer.state[parameter]["momentum_buffer"] = torch.zeros_like(parameter)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.sums: dict[str, Tensor] = {}
        self.first_bad = torch.full((), NEVER, device=self.device)
        self.found_inf = torch.zeros((), device=self.device)
        self.optimizer.found_inf = self.found_inf  # type: ignore[attr-defined]
        self.started = time.monotonic()
        self.seconds_before = 0.0
        self.epoch, self.first_step = self.resume()

    def run(self, until: int | None = None, *, title: str | None = None) -> History:
        """Train until so many epochs are done, or all of them; return what each epoch left.

        `title` is what `progress` calls it, if not the phase.
        """
        until = self.optim.epochs if until is None else until
        if self.epoch >= until:
            return self.history
        num_steps, size = self.source.num_steps, self.source.batch_size
        done = (self.epoch * num_steps + self.first_step) * size
        self.progress.start(title or self.phase, until * num_steps * size, done)
        kept = self.checkpoints
        try:
            with nullcontext() if kept is None else kept.before_interruptions():
                self._run(until)
        finally:
            self._release()
        self.progress.stop()
        return self.history

    def _run(self, until: int) -> None:
        kept, num_steps = self.checkpoints, self.source.num_steps
        for epoch in range(self.epoch, until):
            self.begin(epoch)
            source_of_noise = generator(self.seed, self.phase, epoch, device=self.device)
            draws = draw(self.noise, num_steps, source_of_noise)
            for step in range(self.first_step, num_steps):
                drawn = {name: values[step] for name, values in draws.items()}
                place = (self.seed, self.phase, epoch, step)
                with pinned(*place) if self.draws_itself else nullcontext():
                    self.step(self.source.batch(epoch, step), drawn, step)
                self.progress.advance(self.source.batch_size)
                if kept is not None and step + 1 < num_steps and kept.due():
                    self.keep(kept, epoch, step + 1)
            self.end(epoch)
            self.epoch, self.first_step = epoch + 1, 0
            if self.after_epoch is not None:
                self.after_epoch(self.history)
            if kept is not None and (kept.due() or epoch + 1 == until):
                self.keep(kept, epoch + 1, 0)

    def _release(self) -> None:
        """Free what steps alone need, as in a pause; who goes on captures them again."""
        self.graph = self.inputs = None
        self.optimizer.zero_grad(set_to_none=True)  # gradients lie in the memory of the graph

    def begin(self, epoch: int) -> None:
        """Lay out what the steps of this epoch read."""
        steps = torch.arange(self.source.num_steps)
        numbers = epoch * self.source.num_steps + steps
        done = epoch + steps / self.source.num_steps
        rates = [learning_rate(self.optim, float(e)) for e in done]
        self.rates = torch.tensor(rates).to(self.device)
        self.numbers = numbers.to(self.device)
        self.shares_done = (done / self.optim.epochs).to(self.device)
        self.started = time.monotonic()

    def step(self, batch: Batch, noise: Noise, step: int) -> None:
        """Do one step; nothing here waits for the device, but for a capture the first time."""
        position = self.rates[step], self.shares_done[step], self.numbers[step]
        inputs = _Inputs(batch, noise, *position)
        if self.is_captured and self.graph is None:
            self._capture(inputs)
        if self.graph is None:
            self.inputs = inputs
            self._advance()
        else:
            assert self.inputs is not None
            self.inputs.copy_(inputs)
            self.graph.replay()

    def _advance(self) -> None:
        """Run the step on what `inputs` hold: all that a CUDA graph captures."""
        inputs = self.inputs
        assert inputs is not None
        for factor, lr in self.lr.items():
            lr.copy_(factor * inputs.lr)
        self.optimizer.zero_grad(set_to_none=True)
        batch = inputs.batch
        if self.make_views is not None:
            batch = self.make_views(batch, inputs.noise)
        with torch.autocast(self.device.type, PRECISION, enabled=self.device.type == "cuda"):
            terms = self.loss(batch, inputs.noise, inputs.progress)
        total = torch.stack([term.float().mean() for term in terms.values()]).sum()
        total.backward()
        self._guard(terms, inputs.number)
        self.optimizer.step()
        for name, term in terms.items():
            value = term.detach().float()
            if name in self.sums:
                self.sums[name].add_(value)
            else:
                self.sums[name] = value.clone()

    def _capture(self, inputs: "_Inputs") -> None:
        """Record the step as one CUDA graph; weights, momentum and sums end as they began."""
        self.inputs = inputs.clone()
        had_sums = {name: total.clone() for name, total in self.sums.items()}
        state = [*self.module.state_dict().values(), *self._momentum().values(), self.first_bad]
        before = [tensor.clone() for tensor in state]
        stream = torch.cuda.Stream()
        stream.wait_stream(torch.cuda.current_stream())
        with fastest_convolutions():
            with torch.cuda.stream(stream):
                for _ in range(WARM_UP_STEPS):
                    self._advance()
            torch.cuda.current_stream().wait_stream(stream)
            self.graph = torch.cuda.CUDAGraph()
            with torch.cuda.graph(self.graph):
                self._advance()
        for tensor, old in zip(state, before, strict=True):
            tensor.copy_(old)
        for name, total in self.sums.items():
            total.copy_(had_sums.get(name, torch.zeros_like(total)))

    def _momentum(self) -> dict[str, Tensor]:
        return {
            name: self.optimizer.state[parameter]["momentum_buffer"]
            for name, parameter in self.parameters.items()
        }

    def _state(self) -> dict[str, Tensor]:
        """Return the tensors of a checkpoint, but for the sums."""
        module = {f"module.{name}": t for name, t in self.module.state_dict().items()}
        return module | {f"momentum.{name}": t for name, t in self._momentum().items()}

    def _guard(self, terms: Terms, number: Tensor) -> None:
        """Remember the first non-finite term on the device, and let no update happen from then."""
        gradients = [p.grad for p in self.parameters.values() if p.grad is not None]
        norm = torch.nn.utils.get_total_norm(gradients)
        values = [term.detach().float().sum() for term in terms.values()]
        bad = ~torch.isfinite(torch.stack([*values, norm]))
        code = number * len(bad) + bad.int().argmax()
        self.first_bad.copy_(torch.minimum(self.first_bad, torch.where(bad.any(), code, NEVER)))
        self.found_inf.copy_(self.first_bad != NEVER)
        if self.optim.clip_norm > 0:
            torch.nn.utils.clip_grads_with_norm_(
                self.parameters.values(), self.optim.clip_norm, norm
            )

    def check(self) -> None:
        """Raise if a step since the last check was not finite (sync point)."""
        code = int(self.first_bad)
        if code != NEVER:
            names = [*self.sums, "gradient"]
            step, term = divmod(code, len(names))
            raise NonFiniteError(
                f"{self.phase} phase: {names[term]!r} became NaN or infinite at step {step} "
                f"(epoch {step // self.source.num_steps}); nothing since was kept. "
                "Try a lower learning rate or a lower weight of that term"
            )

    def end(self, epoch: int) -> None:
        """Read the sums of this epoch into the history (sync point)."""
        self.check()
        means: dict[str, float | list[float]] = {
            name: (total / self.source.num_steps).tolist() for name, total in self.sums.items()
        }
        seconds = self.seconds_before + time.monotonic() - self.started
        images = self.source.num_steps * self.source.batch_size
        self.history.append(
            Epoch(
                phase=self.phase,
                seed=self.seed,
                epoch=epoch,
                lr=learning_rate(self.optim, float(epoch)),
                terms=means,
                seconds=seconds,
                images_per_second=images / max(seconds, 1e-9),
            )
        )
        for total in self.sums.values():
            total.zero_()
        self.seconds_before = 0.0

    def keep(self, checkpoints: Checkpoints, epoch: int, step: int) -> None:
        """Write all that is needed to go on from this position (sync point)."""
        self.check()
        seconds = 0.0 if step == 0 else self.seconds_before + time.monotonic() - self.started
        sums = {f"sum.{name}": total for name, total in self.sums.items()}
        tensors = {**self._state(), **sums}
        history = [asdict(entry) for entry in self.history]
        rest = {"history": history, "terms": list(self.sums), "seconds": seconds}
        checkpoints.keep(self.phase, epoch, step, tensors, rest)

    def resume(self) -> tuple[int, int]:
        """Take up the newest checkpoint of this phase; return the position to go on from."""
        kept = self.checkpoints
        latest = None if kept is None else kept.latest(self.phase, self._state())
        if latest is None:
            return 0, 0
        tensors, position = latest
        where = "history of the checkpoint"
        self.history = [from_dict(Epoch, entry, where=where) for entry in position.history]
        groups: dict[str, dict[str, Tensor]] = {"module": {}, "momentum": {}, "sum": {}}
        for name, tensor in tensors.items():
            group, _, rest = name.partition(".")
            groups[group][rest] = tensor.to(self.device)
        self.module.load_state_dict(groups["module"], strict=True)
        for name, momentum in self._momentum().items():
            momentum.copy_(groups["momentum"][name])
        self.sums = {name: groups["sum"][name] for name in position.terms}
        self.seconds_before = position.seconds
        return position.epoch, position.step


@dataclass(slots=True)
class _Inputs:
    """The tensors that one step reads."""

    batch: Batch
    noise: Noise
    lr: Tensor
    progress: Tensor
    number: Tensor

    def tensors(self) -> list[Tensor]:
        return [*self.batch, *self.noise.values(), self.lr, self.progress, self.number]

    def clone(self) -> "_Inputs":
        batch = tuple(tensor.clone() for tensor in self.batch)
        noise = {name: tensor.clone() for name, tensor in self.noise.items()}
        return _Inputs(batch, noise, self.lr.clone(), self.progress.clone(), self.number.clone())

    def copy_(self, other: "_Inputs") -> None:
        for mine, theirs in zip(self.tensors(), other.tensors(), strict=True):
            mine.copy_(theirs)

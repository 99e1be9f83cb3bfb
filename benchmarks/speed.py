"""How fast the steps are, beside the bare network on the same card: one table, one run.

    python benchmarks/speed.py --records benchmarks/RECORDS.md

A ceiling is the network alone: forward, backward and SGD on data that is there already, in the
precision of the steps, channels last, compiled, captured as a CUDA graph. Everything else goes
through the same calls as a real run (`learn_known`, `discover`) on random pictures. Compiling takes
most of the time, so all of it is compiled beforehand, side by side.
"""

import argparse
import itertools
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from unittest.mock import patch

import torch
from torch import Tensor, nn

from ncdwf.config import Config, override
from ncdwf.learning.discovery import discover, make_method
from ncdwf.learning.loop import PRECISION, History, fastest_convolutions
from ncdwf.learning.supervised import learn_known
from ncdwf.model import Architecture, Model
from ncdwf.model.backbone import BACKBONES
from ncdwf.model.heads import MultiHead
from ncdwf.model.initialise import build
from ncdwf.noise import generator
from ncdwf.progress import Quiet
from ncdwf.recipes import recipe
from ncdwf.results.configuration import complete
from ncdwf.results.environment import in_brief

NUM_KNOWN, NUM_NOVEL = 80, 20
BATCH_SIZE = 512
BATCH_SIZES = (BATCH_SIZE, 256, 1024, 2048)
DISCOVERIES = (
    *((BATCH_SIZE, num_novel) for num_novel in (NUM_NOVEL, 5, 80)),
    *((batch_size, NUM_NOVEL) for batch_size in BATCH_SIZES[1:]),
)
"""Batch size and number of novel classes."""
SECONDS = 1.5
"""How long each figure is measured for."""
NUM_AT_ONCE, NUM_THREADS = 8, 2
"""So many are compiled side by side, with so many threads each."""


def captured(work: Callable[[], None]) -> float:
    """Return the seconds that one replay of `work`, captured as a CUDA graph, takes."""
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with fastest_convolutions():  # as in the loop
        with torch.cuda.stream(stream):
            for _ in range(3):
                work()
        torch.cuda.current_stream().wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            work()
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    for count in (5, 0):
        if count == 0:  # as many as fill the time, by the first five
            count = max(10, int(SECONDS * 5000 / start.elapsed_time(end)))
        start.record()
        for _ in range(count):
            graph.replay()
        end.record()
        torch.cuda.synchronize()
    return start.elapsed_time(end) / 1000 / count


def bare_step(
    module: nn.Module, inputs: Tensor, *, train: bool = True, hold_norms: bool = False
) -> float:
    """Return the seconds of forward, backward and SGD (or of a forward alone) of `module`."""
    module = module.cuda().to(memory_format=torch.channels_last).train(train)
    if hold_norms:
        for part in module.modules():
            if isinstance(part, nn.modules.batchnorm._BatchNorm):
                part.eval()
    forward = torch.compile(module, dynamic=False)
    optimizer = torch.optim.SGD(module.parameters(), lr=1e-3, momentum=0.9, fused=True)

    def work() -> None:
        with torch.autocast("cuda", PRECISION), torch.set_grad_enabled(train):
            loss = forward(inputs).float().square().mean()
        if train:
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            optimizer.step()

    return captured(work)


def network(shape: tuple[int, int, int] = (3, 32, 32)) -> nn.Module:
    """Return the backbone of the CIFAR recipes with fresh weights."""
    return build(lambda: BACKBONES["resnet18"](shape), generator(0, "speed"))


def pictures(count: int, side: int = 32) -> Tensor:
    """Return random pictures in [0, 1] on the card."""
    return torch.rand(count, 3, side, side, device="cuda").contiguous(
        memory_format=torch.channels_last
    )


def settings(**changes: object) -> Config:
    """Return the CIFAR-100-80-20 recipe, changed."""
    config = complete(recipe("cifar100-80-20"))
    for key, value in changes.items():
        config = override(config, f"{key.replace('__', '.')}={value}")
    return config


def rate(history: History, phase: str) -> float:
    """Return images a second over the epochs of `phase`, without the first, which compiles."""
    epochs = [epoch for epoch in history if epoch.phase == phase][1:]
    images = sum(epoch.images_per_second * epoch.seconds for epoch in epochs)
    return images / sum(epoch.seconds for epoch in epochs)


def fresh_model() -> Model:
    """Return a model as after the supervised phase, but with weights that nobody trained."""
    learnt = settings().supervised
    architecture = Architecture(
        backbone="resnet18",
        input_shape=(3, 32, 32),
        num_known=NUM_KNOWN,
        temperature=learnt.temperature,
        spread=learnt.spread,
    )
    model = Model.create(architecture, tuple(map(str, range(NUM_KNOWN))), seed=0)
    model.statistics.feature_norm.fill_(1)
    return model


def ceiling(batch_size: int) -> float:
    """Return images a second of the network alone."""
    return batch_size / bare_step(network(), pictures(batch_size))


def supervised(batch_size: int, num_images: int = 40_960) -> float:
    """Return images a second of the supervised phase."""
    images = torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8)
    labels = torch.arange(num_images) % NUM_KNOWN
    config = settings(supervised__optim__epochs=4, supervised__optim__batch_size=batch_size)
    history: History = []
    learn_known(images, labels, config, history=history)
    return rate(history, "supervised")


def discovery(batch_size: int, num_novel: int, num_images: int = 20_480) -> float:
    """Return unlabelled images a second of the discovery phase."""
    images = torch.randint(0, 256, (num_images, 3, 32, 32), dtype=torch.uint8)
    config = settings(
        discovery__optim__epochs=4,
        discovery__optim__batch_size=batch_size,
        discovery__num_novel=num_novel,
        method__settling__epochs=1,
    )
    history: History = []
    discover(fresh_model(), images, make_method(config.method), config, history=history)
    return rate(history, "discovery")


def bare_discovery() -> dict[str, float]:
    """Return the seconds that the parts of a discovery step need bare."""
    config = settings()
    num_large, num_small = config.discovery.num_large, config.discovery.num_small
    clustering, hold_norms = config.method["clustering"], config.method["norms"] == "held"
    features = torch.rand((num_large + num_small) * BATCH_SIZE, 512, device="cuda")

    def heads(num_clusters: int) -> nn.Module:
        sizes = {key: clustering[key] for key in ("num_heads", "num_hidden", "num_projected")}
        return build(lambda: MultiHead(512, num_clusters, **sizes), generator(0, "heads"))

    return {
        "large views": bare_step(
            network(), pictures(num_large * BATCH_SIZE), hold_norms=hold_norms
        ),
        "small views": bare_step(
            network(), pictures(num_small * BATCH_SIZE, side=18), hold_norms=hold_norms
        ),
        "teacher": bare_step(network(), pictures(num_large * BATCH_SIZE), train=False),
        "heads": bare_step(heads(NUM_NOVEL), features),
        "over-clustering heads": bare_step(
            heads(NUM_NOVEL * clustering["overclustering"]), features
        ),
    }


def start_up() -> tuple[float, float]:
    """Return the seconds until the first discovery step is done: cold, and with a warm cache.

    They count from the start of Python, imports and all.
    """
    with tempfile.TemporaryDirectory() as cache:
        # Where Python may keep no bytecode, every start would compile torch's sources, too.
        environment = {**os.environ, "PYTHONDONTWRITEBYTECODE": ""}
        environment["TORCHINDUCTOR_CACHE_DIR"] = cache
        command = [sys.executable, __file__, "--first-step"]

        def seconds() -> float:
            began = time.time()
            run = subprocess.run(command, env=environment, capture_output=True, check=True)
            return float(run.stdout) - began

        return seconds(), seconds()


class FirstStep(Quiet):
    """Notes when the first step was done."""

    def __init__(self) -> None:
        self.when = 0.0

    def advance(self, num_images: int) -> None:
        """Wait for the card, once."""
        if self.when == 0.0:
            torch.cuda.synchronize()
            self.when = time.time()


def first_step() -> float:
    """Return when the first discovery step of this process was done, by the machine's clock."""
    config = settings(discovery__optim__epochs=1, method__settling__epochs=1)
    model = fresh_model()
    images = torch.randint(0, 256, (1024, 3, 32, 32), dtype=torch.uint8)
    watch = FirstStep()
    discover(model, images, make_method(config.method), config, progress=watch)
    return watch.when


def evaluation() -> float:
    """Return the seconds that 10,000 pictures take from the host's memory to their answers."""
    method = make_method(settings().method)
    model, _ = method.prepare(fresh_model().to("cuda"), NUM_NOVEL, seed=0)
    images = torch.randint(0, 256, (10_000, 3, 32, 32), dtype=torch.uint8)
    model.predict(images)
    start = time.monotonic()
    model.predict(images)
    return time.monotonic() - start


def compile_all() -> None:
    """Run everything once, side by side: it finds what it compiled when it is measured."""
    work: list[Callable[[], object]] = [bare_discovery]
    work += [partial(discovery, *sizes) for sizes in DISCOVERIES]
    work += [partial(step, size) for size in BATCH_SIZES for step in (supervised, ceiling)]
    context = get_context("spawn")
    with (
        patch.dict(os.environ, TORCHINDUCTOR_COMPILE_THREADS=str(NUM_THREADS)),
        ProcessPoolExecutor(NUM_AT_ONCE, mp_context=context, max_tasks_per_child=1) as pool,
    ):
        for done in [pool.submit(part) for part in work]:
            done.result()


def table() -> Iterator[str]:
    """Measure one thing after the other; yield the lines of a Markdown section."""
    compile_all()
    torch.cuda.reset_peak_memory_stats()
    yield "| step | batch | images/s | of the ceiling |"
    yield "| --- | ---: | ---: | ---: |"
    for batch_size in BATCH_SIZES:
        bare, reached = ceiling(batch_size), supervised(batch_size)
        yield f"| network alone | {batch_size} | {bare:,.0f} | |"
        yield f"| supervised | {batch_size} | {reached:,.0f} | {reached / bare:.1%} |"
    parts = bare_discovery()
    bare = BATCH_SIZE / sum(parts.values())
    listed = ", ".join(f"{name} {1000 * seconds:.2f} ms" for name, seconds in parts.items())
    yield f"| parts of discovery alone: {listed} | {BATCH_SIZE} | {bare:,.0f} | |"
    for batch_size, num_novel in DISCOVERIES:
        reached = discovery(batch_size, num_novel)
        alike = (batch_size, num_novel) == (BATCH_SIZE, NUM_NOVEL)
        share = f"{reached / bare:.1%}" if alike else ""
        yield f"| discovery, {num_novel} novel | {batch_size} | {reached:,.0f} | {share} |"
    peak = torch.cuda.max_memory_allocated() / 2**30
    cold, warm = start_up()
    yield ""
    yield (
        f"First discovery step after {cold:.1f} s cold, {warm:.1f} s with a warm compile cache. "
        f"10,000 pictures are named in {evaluation():.3f} s. "
        f"Peak memory over all of it: {peak:.1f} GiB."
    )


def main() -> None:
    """Print the table; with `--records` add it to that file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--records",
        type=Path,
        default=Path(os.devnull),
        help="Markdown file to add the table to, line by line as it is measured",
    )
    parser.add_argument("--first-step", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        parser.exit(2, "speed.py: this machine has no CUDA device\n")
    if arguments.first_step:
        print(first_step())
        return
    with arguments.records.open("a") as records:
        for line in itertools.chain(["", f"## {in_brief()}", ""], table()):
            for file in (sys.stdout, records):
                print(line, file=file, flush=True)


if __name__ == "__main__":
    main()

"""A model as one ONNX file: whoever runs it needs neither PyTorch nor this package.

The graph takes `images` `[batch, channel, height, width]` (uint8; for a model of vectors
`[batch, number]`, float32) and gives `probabilities` `[batch, class]` and `novelty` `[batch]`,
P(novel). It routes as `Model.predict` does: the probabilities are those of the head that answers
and 0 for the classes of the other head, so the class of a picture is where they are largest. That
is safer than a look at `novelty`, which in single precision has no room for thresholds near 1. The
file's metadata holds `class_names` (JSON), `num_known`, `tau` and `ncdwf_version`.
"""

import bisect
import copy
import importlib
import io
import json
import warnings
from pathlib import Path
from typing import Any, Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor, nn

from ncdwf import __version__, storage
from ncdwf.errors import InputError, NcdwfError, NonFiniteError, first_line
from ncdwf.model import Model
from ncdwf.model.heads import CosineHead, MultiHead
from ncdwf.noise import generator

OPSET = 17
OUTPUTS = ("probabilities", "novelty")
MAX_BYTES = 2**31 - 1
"""More does not fit into one file of this format."""
CHECKED_BATCHES = (1, 2, 61)
TOLERANCE = 1e-4
"""How far a probability of onnxruntime may lie from PyTorch's. Rounding alone gives 1e-6 at a
temperature of 0.1 and 1e-5 at 0.02."""


@runtime_checkable
class Fitted(Protocol):
    """What holds a model, as `NovelClassDiscoverer` does."""

    model_: Model


def export_onnx(model: Model | Fitted, path: Path | str, *, check: bool = True) -> None:
    """Write `model` to `path` as one ONNX file, with one clustering head: the best.

    Args:
        model: before or after discovery, or what holds it; it is not changed.
        path: of the file, which must not be there yet.
        check: run what was made in onnxruntime and write nothing if PyTorch answers otherwise.
    """
    path = _free(Path(path))
    onnx = _import("onnx", "an ONNX file")
    runtime = _import("onnxruntime", "the check of an ONNX file") if check else None
    storage.make_directory(path.parent)
    model = copy.deepcopy(model if isinstance(model, Model) else model.model_).cpu().eval()
    proto = onnx.load_from_string(_traced(model))
    onnx.helper.set_model_props(proto, _metadata(model))
    data = proto.SerializeToString()
    if check:
        _check(runtime, data, model, path)
    storage.write_bytes(path, data)


def _free(path: Path) -> Path:
    try:
        taken = path.exists()
    except OSError as error:
        raise InputError(f"cannot write {path}: {error.strerror or error}") from error
    if taken:
        raise InputError(f"{path} is there already; choose another file")
    return path


def _import(name: str, purpose: str) -> Any:
    try:
        return importlib.import_module(name)
    except ImportError as error:
        raise InputError(f"{purpose} needs {name}: pip install 'ncdwf[onnx]'") from error


def _metadata(model: Model) -> dict[str, str]:
    return {
        "class_names": json.dumps(model.class_names, ensure_ascii=False),
        "num_known": str(model.num_known),
        "tau": repr(model.tau),
        "ncdwf_version": __version__,
    }


def _traced(model: Model) -> bytes:
    graph = _Graph(model).eval()
    num_bytes = sum(t.numel() * t.element_size() for t in graph.state_dict().values())
    if num_bytes > MAX_BYTES:
        raise InputError(f"the weights have {num_bytes} bytes; an ONNX file holds {MAX_BYTES}")
    buffer = io.BytesIO()
    try:
        with warnings.catch_warnings():
            # The tracing exporter is the older of PyTorch's two. The newer one needs a further
            # package, takes six times as long or more and writes the paths of source files.
            warnings.simplefilter("ignore", DeprecationWarning)
            # Only the batch may change its size, and the check tries several.
            warnings.simplefilter("ignore", torch.jit.TracerWarning)  # type: ignore[attr-defined]
            torch.onnx.export(
                graph,
                (_examples(model, 2),),
                buffer,  # type: ignore[arg-type]
                dynamo=False,
                opset_version=OPSET,
                input_names=["images"],
                output_names=list(OUTPUTS),
                dynamic_axes={name: {0: "batch"} for name in ("images", *OUTPUTS)},
            )
    except RuntimeError as error:
        raise InputError(f"this model cannot be written as ONNX: {first_line(error)}") from error
    return buffer.getvalue()


def _examples(model: Model, num_images: int) -> Tensor:
    """Return noise as bright and as varied as what the model learnt from."""
    shape = model.architecture.input_shape
    noise = torch.randn(num_images, *shape, generator=generator(0, "export", num_images))
    mean, std = (
        values.view(-1, *(1,) * (len(shape) - 1))
        for values in (model.backbone.normalise.mean, model.backbone.normalise.std)
    )
    values = mean + std * noise
    return values if len(shape) == 1 else (255 * values.clamp(0, 1)).to(torch.uint8)


class _Graph(nn.Module):
    """What the file computes: the rule of `Model.predict` in single precision."""

    least_logit: Tensor

    def __init__(self, model: Model) -> None:
        super().__init__()
        self.architecture = model.architecture
        self.backbone = model.backbone
        self.known_head = model.known_head
        self.novel_head = (
            None if model.novel_head is None else _one_head(model.novel_head, int(model.best_head))
        )
        self.identifier = model.identifier
        self.register_buffer("least_logit", torch.tensor(_least_logit(model.tau)))

    def forward(self, images: Tensor) -> tuple[Tensor, Tensor]:
        features = self.backbone(images)
        known = self.known_head(features) / self.architecture.temperature
        if self.novel_head is None or self.architecture.novel is None:
            return known.softmax(1), torch.zeros_like(known[:, 0])
        novel = self.novel_head(features) / self.architecture.novel.temperature
        novelty, is_novel = self._novelty(features, known, novel)
        is_novel = is_novel[:, None]
        of_known = torch.where(is_novel, 0.0, known.softmax(1))
        of_novel = torch.where(is_novel, novel.softmax(1), 0.0)
        return torch.cat([of_known, of_novel], dim=1), novelty

    def _novelty(self, features: Tensor, known: Tensor, novel: Tensor) -> tuple[Tensor, Tensor]:
        """Return P(novel) and whether that makes a picture novel."""
        if self.identifier is None:
            share = torch.cat([known, novel], dim=1).softmax(1)[:, known.shape[1] :].sum(1)
            return share, share >= 0.5
        logit = self.identifier(features)
        return logit.sigmoid(), logit >= self.least_logit


def _one_head(heads: MultiHead, number: int) -> nn.Sequential:
    """Return one clustering head as plain layers, which any batch fits, an empty one too."""
    _, num_hidden, num_projected = heads.projection.shape
    with torch.device("meta"):  # no weights are drawn
        head = nn.Sequential(
            nn.Linear(heads.hidden.in_features, num_hidden),
            nn.BatchNorm1d(num_hidden),
            nn.ReLU(),
            nn.Linear(num_hidden, num_projected, bias=False),
            CosineHead(num_projected, heads.num_clusters),
        )
    hidden = {
        f"{layer}.{name}": tensor.chunk(heads.num_heads)[number] if tensor.ndim else tensor
        for layer, part in enumerate((heads.hidden, heads.norm))
        for name, tensor in part.state_dict().items()
    }
    weights = {"3.weight": heads.projection[number].T, "4.prototypes": heads.prototypes[number].T}
    head.load_state_dict(hidden | weights, assign=True)
    return head


def _least_logit(tau: float) -> float:
    """Return the least single-precision logit whose P(novel), in double precision, reaches `tau`.

    Near 1 single precision has no room for thresholds, near the logit of 1 it has plenty. Read as
    integers, floats keep their order; NaN, which no logit reaches, comes after infinity.
    """
    infinity = int(np.float32(np.inf).view(np.int32))
    positions = range(-infinity, infinity + 1)

    def logit(position: int) -> float:
        return float(np.copysign(np.int32(abs(position)).view(np.float32), position))

    def novelty(position: int) -> float:
        return float(torch.tensor(logit(position), dtype=torch.float64).sigmoid())

    return logit(bisect.bisect_left(positions, tau, key=novelty) - infinity)


def _check(runtime: Any, data: bytes, model: Model, path: Path) -> None:
    """Refuse what onnxruntime cannot run or answers otherwise than PyTorch does."""
    options = runtime.SessionOptions()
    options.log_severity_level = 4  # what goes wrong is told in one line below
    try:
        session = runtime.InferenceSession(data, options, providers=["CPUExecutionProvider"])
        batches = [_difference(session, model, number) for number in CHECKED_BATCHES]
    except NonFiniteError as error:
        raise NonFiniteError(f"{path} is not written: {error}") from error
    except Exception as error:  # those of onnxruntime have no other base
        raise NcdwfError(
            f"{path} is not written, onnxruntime cannot run it: {first_line(error)}"
        ) from error
    difference = float(torch.tensor(batches).max())  # unlike Python's, it keeps NaN
    if not difference <= TOLERANCE:
        raise NcdwfError(
            f"{path} is not written, onnxruntime and PyTorch differ by {difference:.2g}, "
            f"which is more than {TOLERANCE:g}"
        )


def _difference(session: Any, model: Model, num_images: int) -> float:
    """Return how far the answers lie apart, but for routes that the last bits decide."""
    images = _examples(model, num_images)
    found = session.run(list(OUTPUTS), {"images": images.numpy()})
    probabilities, novelty = map(torch.from_numpy, found)
    outputs = model.outputs(model.features(images))
    border = torch.tensor(model.tau, dtype=torch.float64).logit()
    decided = ~((outputs.novelty.logit() - border).abs() <= TOLERANCE)
    wrong = (probabilities - model.probabilities(outputs)).abs().amax(1) * decided
    return float(torch.cat([wrong, (novelty - outputs.novelty).abs()]).max())

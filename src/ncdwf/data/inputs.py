"""Checks at the door: what pictures, plain vectors and their labels must look like."""

import hashlib
import json
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from jaxtyping import Float, Int64, UInt8
from torch import Tensor
from torch.nn import functional as F

from ncdwf.errors import InputError

Images = UInt8[Tensor, "image channel height width"]
Vectors = Float[Tensor, "image number"]
Inputs = Images | Vectors
"""What a model reads: pictures, or one vector of numbers in the place of each."""
Labels = Int64[Tensor, " image"]
LARGEST_NUMBER = 1e30
"""In a vector: single precision ends at 3.4e38, and `vector` adds many of them up. Networks of
one's own may overflow earlier."""
DIGEST_ROWS = 4096
"""So many rows say whether data is the same as before."""
TrainAndTest = tuple[
    UInt8[Tensor, "train channel height width"],
    Int64[Tensor, " train"],
    UInt8[Tensor, "test channel height width"],
    Int64[Tensor, " test"],
]


def as_images(images: Any, *, name: str = "images") -> Images:
    """Return `images` (a tensor, an array or a sequence of them) as one uint8 tensor, checked.

    Grey pictures may leave out the channel; channels come first, as in PyTorch.
    """
    if isinstance(images, Sequence):
        images = _stack(images, name)
    tensor = images if isinstance(images, Tensor) else _from_array(images, name)
    if tensor.is_floating_point() and not bool(torch.isfinite(tensor).all()):
        raise InputError(f"{name} hold NaN or infinite values; uint8 values 0 to 255 are accepted")
    if tensor.dtype != torch.uint8:
        raise InputError(f"{name} are {tensor.dtype}; uint8 values 0 to 255 are accepted")
    if tensor.ndim == 3:
        tensor = tensor.unsqueeze(1)
    if tensor.ndim != 4 or tensor.shape[1] not in (1, 3) or 0 in tensor.shape[1:]:
        raise InputError(
            f"{name} have shape {tuple(tensor.shape)}; "
            "[image, channel, height, width] with 1 or 3 channels is accepted"
        )
    return tensor


def as_vectors(vectors: Any, *, name: str = "vectors") -> Vectors:
    """Return `vectors`, one row of finite numbers for each thing, as a float32 tensor."""
    tensor = vectors if isinstance(vectors, Tensor) else _from_array(vectors, name)
    if tensor.ndim != 2 or tensor.shape[1] == 0:
        raise InputError(
            f"{name} have shape {tuple(tensor.shape)}; [row, number] is accepted, with one or more "
            "numbers"
        )
    if tensor.is_complex() or tensor.dtype == torch.bool:
        raise InputError(f"{name} are {tensor.dtype}; real numbers are accepted")
    tensor = tensor.detach().to(torch.float32)  # features may come with a graph behind them
    if not bool((tensor.abs() <= LARGEST_NUMBER).all()):  # NaN is not, either
        raise InputError(
            f"{name} hold NaN, infinite or too large values; up to {LARGEST_NUMBER:g} is accepted"
        )
    return tensor


def as_inputs(inputs: Any, *, name: str = "images") -> Inputs:
    """Return pictures (three or four dimensions) or vectors (two), checked."""
    if isinstance(inputs, Sequence):
        inputs = _stack(inputs, name)
    if getattr(inputs, "ndim", None) == 2:
        return as_vectors(inputs, name=name)
    return as_images(inputs, name=name)


def fitted(
    images: Images, height: int, width: int
) -> UInt8[Tensor, "image channel out_height out_width"]:
    """Return the middle of the pictures, as much as has these proportions, scaled to this size.

    Files are read in the same way (`read_pixels`), but for half a pixel where the cut is made. It
    is done in parts: memory stays bounded.
    """
    had_height, had_width = images.shape[2:]
    if (had_height, had_width) == (height, width):
        return images
    cut_height = min(had_height, max(1, round(had_width * height / width)))
    cut_width = min(had_width, max(1, round(had_height * width / height)))
    top, left = (had_height - cut_height) // 2, (had_width - cut_width) // 2
    images = images[:, :, top : top + cut_height, left : left + cut_width]
    parts = [
        F.interpolate(
            part.float(), (height, width), mode="bilinear", antialias=True, align_corners=False
        )
        .round()
        .clamp(0, 255)
        .to(torch.uint8)
        for part in images.split(256)
    ]
    return torch.cat(parts) if parts else images.new_zeros(0, images.shape[1], height, width)


def as_labels(labels: Any, num_images: int) -> Labels:
    """Return `labels` as an int64 tensor: one a picture, classes 0 to M-1, each of them there."""
    tensor = labels if isinstance(labels, Tensor) else _from_array(labels, "labels")
    is_integer = not (tensor.is_floating_point() or tensor.is_complex())
    if not is_integer or tensor.dtype == torch.bool or tensor.ndim != 1:
        raise InputError(
            f"labels are {tensor.dtype} of shape {tuple(tensor.shape)}; "
            "one integer a picture is accepted"
        )
    if len(tensor) != num_images:
        raise InputError(f"{len(tensor)} labels do not match {num_images} pictures")
    if num_images == 0:
        raise InputError("there are no labelled pictures")
    tensor = tensor.to(torch.int64)
    present = torch.unique(tensor)
    if not torch.equal(present, torch.arange(len(present), device=present.device)):
        raise InputError(
            f"labels run from {int(present[0])} to {int(present[-1])} with {len(present)} distinct "
            "values; 0 to M-1, each of them there, is accepted"
        )
    if len(present) < 2:
        raise InputError("there is one known class; two or more are needed")
    scarce = int(torch.bincount(tensor).argmin())
    if int((tensor == scarce).sum()) < 2:
        raise InputError(f"class {scarce} has one picture; two or more of each are needed")
    return tensor


def digest(
    inputs: Inputs, labels: Labels | None = None, names: Sequence[str] = ()
) -> dict[str, Any]:
    """Return by what data is known again, as plain values.

    Of a pool that is larger than memory few rows are read, spread evenly over it.
    """
    total = hashlib.sha256(str(inputs.dtype).encode())
    count = min(len(inputs), DIGEST_ROWS)
    for number in range(count):
        total.update(inputs[number * len(inputs) // count].cpu().numpy().tobytes())
    known = {"rows": len(inputs), "shape": list(inputs.shape[1:]), "sha256": total.hexdigest()}
    if labels is None:
        return known
    named = hashlib.sha256(json.dumps(list(names)).encode())
    named.update(labels.cpu().numpy().tobytes())
    return {**known, "labels": named.hexdigest()}


def _from_array(values: Any, name: str) -> Tensor:
    try:
        array = np.asarray(values)
        with np.errstate(over="ignore"):  # what became infinite is refused by name
            array = np.require(array, _torch_type(array.dtype), ["C", "W"])
        return torch.from_numpy(array)
    except (TypeError, ValueError) as error:
        raise InputError(f"{name} are not an array of numbers") from error


def _torch_type(dtype: np.dtype[Any]) -> np.dtype[Any]:
    """Return the type in which torch can read numbers of `dtype`: of this machine's byte order."""
    if np.issubdtype(dtype, np.longdouble):
        return np.dtype(np.float64)
    return dtype.newbyteorder("=")


def _stack(images: Sequence[Any], name: str) -> Any:
    try:
        arrays = [np.asarray(image) for image in images]
    except (TypeError, ValueError, RuntimeError) as error:
        raise InputError(f"{name} are not arrays of numbers") from error
    shapes = [array.shape for array in arrays]
    for position, shape in enumerate(shapes):
        if shape != shapes[0]:
            raise InputError(
                f"{name} differ in size or channels: number 0 is {shapes[0]}, "
                f"number {position} is {shape}; one size for all is accepted"
            )
    return np.stack(arrays) if arrays else np.zeros((0, 1, 1, 1), np.uint8)

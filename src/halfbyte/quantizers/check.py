"""Validation of weights and scales: no NaN or infinity, and scales that fit their dtype."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, FormatError, check_type
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format

_NORMAL = torch.finfo(torch.float32).smallest_normal
_LARGEST = torch.finfo(torch.float32).max
_SMALL = 2.0**-100  # largest scales from here on need no look at the weight
_CHUNK = 1 << 22  # elements checked at a time: temporaries take a few MB whatever the tensor's size


def check_weight(weight: Tensor, name: str) -> None:
    """Raise ArgumentError unless `weight` is a tensor of float32, float16 or bfloat16 [..., K], and has data."""
    check_type(weight, Tensor, f"{name} is a tensor", "pass torch.as_tensor(array), or the weight of a module")
    check_dense(weight, name)
    if weight.dtype not in (torch.float32, torch.float16, torch.bfloat16):
        raise ArgumentError(
            f"{name} is {weight.dtype}, only float32, float16 and bfloat16 weights are quantized: convert it with .float() first"
        )
    if weight.dim() < 1:
        raise ArgumentError(f"{name} has no dimensions, a weight has at least one: [..., N, K]")
    if weight.is_meta:
        raise ArgumentError(f"{name} has no data (it is on the meta device): load it first")


def check_dense(tensor: Tensor, name: str) -> None:
    """Raise ArgumentError for a tensor that is sparse, nested, or in an order of another library."""
    if tensor.layout != torch.strided or tensor.is_nested:
        kind = "nested" if tensor.is_nested else str(tensor.layout).removeprefix("torch.").lstrip("_")
        remedy = "pass the tensors of its unbind() one by one" if tensor.is_nested else "convert it with .to_dense() first"
        raise ArgumentError(f"{name} is a dense tensor, got a {kind} one: {remedy}")


def check_finite(weight: Tensor, name: str) -> None:
    """Raise ArgumentError naming the tensor, how many of its values are NaN or infinite, and the index of the first.

    weight: floating point, any shape. It is read in pieces; a non-contiguous one is copied.
    """
    if (what := non_finite(weight, name)) is not None:
        raise ArgumentError(f"{what}: only finite weights can be quantized")


def non_finite(tensor: Tensor, name: str, *, infinities: bool = False) -> str | None:
    """Says how many values are NaN or infinite and where the first is: "w [4] holds 1 NaN or infinite value, the first (nan) at [2]".
    None where there is no such value. One pass over the memory, without a temporary.

    Args:
        tensor: Floating point, any shape.
        name: Its name in the sentence.
        infinities: Whether infinities are allowed.
    """
    flat = tensor.detach().reshape(-1)
    bad, first = 0, -1
    for start in range(0, flat.numel(), _CHUNK):
        piece = flat[start : start + _CHUNK]
        piece = piece.float() if piece.dtype.itemsize == 1 else piece  # 8-bit floats have no arithmetic
        ends = [float(end) for end in torch.aminmax(piece)]  # NaN if there is one
        if all(map(math.isfinite, ends)) or (infinities and not math.isnan(ends[0])):
            continue
        wrong = piece.isnan() if infinities else ~torch.isfinite(piece)
        bad += int(wrong.sum())
        if first < 0:
            first = start + int(wrong.to(torch.uint8).argmax())
    if not bad:
        return None
    place = [int(i) for i in torch.unravel_index(torch.tensor(first, device="cpu"), tensor.shape)]
    what = f"NaN{'' if infinities else ' or infinite'} value{'s' * (bad > 1)}"
    return f"{name} {list(tensor.shape)} holds {bad} {what}, the first ({float(flat[first])}) at {place}"


def check_scales(codes: Codes, weight: Tensor, name: str) -> None:
    """Raise FormatError for a weight that is too small or too large for its scales.

    Too small: rounding the largest scale moves the largest weights by more than half a code; or that scale, or that of the largest
    weight, is subnormal in float32: the reciprocals of those a little smaller overflow. Weights of zeros are accepted, and so are blocks
    that are small compared with others. With offsets the scales may be small since weights are similar. There it counts whether one is
    moved by more than a code of the largest.

    Too large: scale * q, the scale rounded up, exceeds float32 (or scale * q + offset does).
    """
    fmt, limits = codes.format, torch.finfo(codes.format.scale)
    if not weight.numel():
        return
    largest, unit = float(codes.scale.abs().max()), limits.smallest_normal * limits.eps
    offset = float(codes.zero.abs().max()) if fmt.zero == "offset" and codes.zero is not None else 0.0
    if largest * max(-fmt.q_min, fmt.q_max) + offset > _LARGEST / 2 and not bool(torch.isfinite(codes.dequantize()).all()):
        raise FormatError(
            f"{name}: its largest value is {float(weight.abs().max()):.6g}, which {fmt} codes round beyond {_LARGEST:.6g}, the largest "
            "float32: multiply it by a power of two below 1, and what it computes by the inverse"
        )
    if largest < max(fmt.q_max * unit, _SMALL) and (amax := float(weight.abs().max())) > 0:
        if largest >= max(fmt.q_max * unit, _NORMAL) and amax >= fmt.q_max * _NORMAL:
            return
        if fmt.zero == "offset" and float((codes.dequantize().to(weight.device) - weight).abs().max()) <= 2 * amax / fmt.q_max:
            return
        remedy = "skip it, or multiply it by a power of two and what it computes by the inverse"
        if fmt.scale == torch.float16 and amax > 4 * fmt.q_max * _NORMAL:
            remedy = f"use bfloat16 or float32 scales, for example {fmt.with_scale(torch.bfloat16)}, or skip it"
        raise FormatError(
            f"{name}: its largest value is {amax:.3g}, for which the {str(fmt.scale)[6:]} scales of {fmt} are too coarse: {remedy}"
        )


def overflow(fmt: Format, name: str, what: str, place: str, value: float) -> FormatError:
    """The error for a `what` ("scale" or "offset") of `value`, beyond the range of the format's scale dtype."""
    limit = torch.finfo(fmt.scale).max
    remedy = "multiply the weight by a smaller factor"
    if fmt.scale == torch.float16:
        wide = fmt.with_scale(torch.bfloat16)
        remedy = f"use bfloat16 or float32 scales, for example {wide}"
    return FormatError(f"{name}: the {what} of {place} is {value:.6g}, and {str(fmt.scale)[6:]} holds at most {limit:.6g}: {remedy}")

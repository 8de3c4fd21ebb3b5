"""Elementwise scaled sums of one or two tensors: the custom op `halfbyte::combine` and the validation of its arguments."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.kernels.problem import Combination
from halfbyte.ops import cuda
from halfbyte.ops.modes import plain
from halfbyte.ops.registration import bounded, loops, optional, refuses_derivatives

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.steps import ProgramStep

_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int8)
_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "combine(Tensor a, float scale_a, float offset, ScalarType dtype, Tensor? b, float scale_b, float? low, float? high) -> Tensor"
)


def combine(a: Tensor, how: Combination, b: Tensor | None = None) -> Tensor:
    """The combination `how` of a and b, float32, bfloat16, float16 or int8 of one shape -> that shape in `how.dtype`.

    Raises ArgumentError for other dtypes, shapes that differ, and a clamp that is empty or, for int8, not within -128 … 127.
    """
    dtype, scale_a, offset, scale_b, low, high = how
    if plain(a, b):
        return _combine(a, scale_a, offset, dtype, b, scale_b, low, high)
    return torch.ops.halfbyte.combine.default(a, scale_a, offset, dtype, b, scale_b, *optional(low, high))  # type: ignore[no-any-return]


def _combine(
    a: Tensor, scale_a: float, offset: float, dtype: torch.dtype, b: Tensor | None, scale_b: float, low: float, high: float
) -> Tensor:
    for tensor in (a, *(() if b is None else (b,))):
        if tensor.dtype not in _DTYPES or tensor.shape != a.shape or tensor.device != a.device:
            got = f"{tensor.dtype} {list(tensor.shape)} on {tensor.device}"
            raise ArgumentError(f"combine takes tensors {list(a.shape)} of {', '.join(map(str, _DTYPES))} on {a.device}, got {got}")
    if dtype not in _DTYPES:
        raise ArgumentError(f"combine gives {', '.join(map(str, _DTYPES))}, not {dtype}")
    if not low <= high or (dtype == torch.int8 and not -128 <= low <= high <= 127):
        raise ArgumentError(f"clamp takes (low, high) with low <= high, in -128 … 127 for int8, got ({low}, {high})")
    if a.numel() == 0:
        return a.to(dtype)
    a = a if _is_dense(a) else a.contiguous()
    if b is not None and b.stride() != a.stride():
        b = torch.empty_like(a, dtype=b.dtype).copy_(b)
    how = Combination(dtype, scale_a, offset, scale_b, low, high)
    if a.is_cpu:
        from halfbyte.kernels.cpu.conv import elementwise as cpu

        return cpu.combine(a, how, b)
    if (reason := why_no_triton()) is not None:
        raise UnsupportedError(f"combine needs Triton: {reason}, or use the CPU")
    from halfbyte.kernels.gpu.conv import elementwise as gpu

    with cuda.on(a):
        return gpu.combine(a, how, b)


def combine_step(a: Tensor, how: Combination, b: Tensor | None = None) -> ProgramStep | None:
    """`combine` of tensors on the CPU of the sizes and strides of a and b, as a step of a program; None where it is none."""
    from halfbyte.kernels.cpu.conv import elementwise as cpu

    same_layout = b is None or (b.shape, b.stride()) == (a.shape, a.stride())
    return cpu.program_step(a, how, b) if a.numel() and _is_dense(a) and same_layout else None


def _is_dense(a: Tensor) -> bool:
    """Whether the result has the memory format of a, which it takes in the order of its elements in memory."""
    return a.is_contiguous() or (a.dim() == 4 and a.is_contiguous(memory_format=torch.channels_last))


def _fake(a: Tensor, scale_a: float, offset: float, dtype: torch.dtype, *_: object) -> Tensor:
    return torch.empty_like(a if _is_dense(a) else a.contiguous(), dtype=dtype)


_library.impl("combine", bounded(_combine), "CPU")
_library.impl("combine", bounded(_combine), "CUDA")
refuses_derivatives(_library, "combine")
loops(_library, "combine")
torch.library.register_fake("halfbyte::combine", _fake, lib=_library)

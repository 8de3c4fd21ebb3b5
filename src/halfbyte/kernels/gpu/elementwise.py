"""Sums of one or two tensors with scales, element by element: `problem.Combination`, what int8 networks do between their products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.activations import INTERPRETED, MAGIC
from halfbyte.kernels.gpu.launch import run
from halfbyte.kernels.problem import Combination

_BLOCK = 2048


def combine(a: Tensor, how: Combination, b: Tensor | None = None) -> Tensor:
    """The sum of `a` and, where it is there, `b`, of the same shape and strides and without gaps -> the same in `dtype`."""
    out, n = torch.empty_like(a, dtype=how.dtype), a.numel()
    factors, bounds = (how.scale_a, how.scale_b, how.offset), (how.low, how.high)
    run(_combine, (-(-n // _BLOCK),), a, b, out, n, factors, bounds, WIDE=n >= 1 << 31, BLOCK=_BLOCK, num_warps=4)
    return out


@triton.jit(do_not_specialize=["n"])
def _combine(a, b, out, n, scales, bounds, WIDE: tl.constexpr, BLOCK: tl.constexpr):
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    i = first * BLOCK + tl.arange(0, BLOCK)
    total = _fma(tl.load(a + i, mask=i < n, other=0).to(tl.float32), scales[0], scales[2])
    if b is not None:
        total = _fma(tl.load(b + i, mask=i < n, other=0).to(tl.float32), scales[1], total)
    if out.dtype.element_ty == tl.int8:
        total = tl.where(total >= bounds[0], tl.minimum(total, bounds[1]), bounds[0])
        y = ((total + MAGIC) - MAGIC).to(tl.int8)
    else:
        total = tl.maximum(total, bounds[0], propagate_nan=tl.PropagateNan.ALL)
        y = tl.minimum(total, bounds[1], propagate_nan=tl.PropagateNan.ALL).to(out.dtype.element_ty)
    tl.store(out + i, y, mask=i < n)


@triton.jit
def _fma(x, factor, addend):
    factor = tl.full(x.shape, 0.0, tl.float32) + factor
    addend = tl.full(x.shape, 0.0, tl.float32) + addend
    if INTERPRETED:  # whose fma rounds twice
        return (x.to(tl.float64) * factor.to(tl.float64) + addend.to(tl.float64)).to(tl.float32)
    else:
        return tl.fma(x, factor, addend)

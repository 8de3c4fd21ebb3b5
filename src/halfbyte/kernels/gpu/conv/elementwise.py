"""Sums of one or two tensors with scales, element by element: `problem.Combination`, what int8 networks do between their products."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import MAGIC, clamped, fma
from halfbyte.kernels.gpu.runtime.launch import early_after, run
from halfbyte.kernels.problem import Combination

_BLOCK = 2048


def combine(a: Tensor, how: Combination, b: Tensor | None = None) -> Tensor:
    """The sum of `a` and, where it is there, `b`, of the same shape and strides and without gaps -> the same in `dtype`."""
    out, n = torch.empty_like(a, dtype=how.dtype), a.numel()
    factors, bounds = (how.scale_a, how.scale_b, how.offset), (how.low, how.high)
    early = early_after(a)
    wide = n >= 1 << 31
    run(_combine, (-(-n // _BLOCK),), a, b, out, n, factors, bounds, WIDE=wide, BLOCK=_BLOCK, EARLY=early, num_warps=4, early=early)
    return out


@triton.jit  # a size that 16 divides is one of which masked accesses take 16 elements together
def _combine(a, b, out, n, scales, bounds, WIDE: tl.constexpr, BLOCK: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    first = tl.program_id(0)
    if WIDE:
        first = first.to(tl.int64)
    i = first * BLOCK + tl.arange(0, BLOCK)
    total = fma(tl.load(a + i, mask=i < n, other=0).to(tl.float32), scales[0], scales[2])
    if b is not None:
        total = fma(tl.load(b + i, mask=i < n, other=0).to(tl.float32), scales[1], total)
    if out.dtype.element_ty == tl.int8:
        total = tl.where(total >= bounds[0], tl.minimum(total, bounds[1]), bounds[0])
        y = ((total + MAGIC) - MAGIC).to(tl.int8)
    else:
        y = clamped(total, bounds[0], bounds[1]).to(out.dtype.element_ty)
    tl.store(out + i, y, mask=i < n)

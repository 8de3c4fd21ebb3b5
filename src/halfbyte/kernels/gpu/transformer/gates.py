"""Activations and gated activations of x, in float32, rounded once; f is a gate function of `layer_kinds.py`.

    launch, gated       y [M, N] = factor * f(gate) * up           x [M, 2 N]: gate, the first half of the columns, and up, the second
    launch, not gated   y [M, N] = factor * f(x) * multiplier      x [M, N]
    launch_clamped      y [M, N] = (up + 1) * gate * sigmoid(alpha * gate)      x [M, 2 N]: gate, up, gate, …, clamped before (gpt-oss)

`skinny.py` and `skinny_hopper.py` compute gates in their epilogue; these kernels follow other products.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import clamped, row_and_column
from halfbyte.kernels.gpu.epilogue import activated, times_sigmoid
from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.machine import Gpu

_WIDE = 1024  # elements of a thread block


def launch(
    gpu: Gpu, x: Tensor, out: Tensor, gates: str = "silu", factor: float = 1.0, *, gated: bool = True, multiplier: Tensor | None = None
) -> None:
    """Launch the activation.

    Args:
        gpu: Where.
        x: [M, 2 N], or [M, N] if not `gated`; contiguous.
        out: [M, N], contiguous.
        gates: The name of f.
        factor: One number.
        gated: Whether x has gate and up.
        multiplier: [M, N] with contiguous rows, if not `gated`; None: 1.
    """
    m, n = out.shape
    pdl = launcher.starts_early(gpu)
    other = None if multiplier is None else (multiplier, multiplier.stride(0))
    grid = launcher.flat_grid(m, -(-n // _WIDE))
    launcher.run(_gates, grid, x, out, other, n, factor, _WIDE, gates, gated, pdl, num_warps=4, early=pdl)


def launch_clamped(gpu: Gpu, x: Tensor, out: Tensor, alpha: float, limit: float) -> None:
    """Launch the clamped activation of x [M, 2 N] to out [M, N], contiguous. Gates are clamped to at most `limit`, up to -limit … limit."""
    m, n = out.shape
    pdl = launcher.starts_early(gpu)
    grid = launcher.flat_grid(m, -(-n // _WIDE))
    launcher.run(_clamped, grid, x, out, n, alpha, limit, _WIDE, pdl, num_warps=4, early=pdl)


@triton.jit
def _gates(x, out, other, N, factor, WIDE: tl.constexpr, GATES: tl.constexpr, GATED: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row, column = row_and_column(tl.cdiv(N, WIDE))
    row, i = row.to(tl.int64), column * WIDE + tl.arange(0, WIDE)
    if PDL:
        gdc_wait()
    if GATED:
        gate = tl.load(x + 2 * row * N + i, mask=i < N, other=0.0).to(tl.float32)
        up = tl.load(x + (2 * row + 1) * N + i, mask=i < N, other=0.0).to(tl.float32)
        y = with_gates(gate, up, factor, GATES)
    else:
        y = activated(tl.load(x + row * N + i, mask=i < N, other=0.0).to(tl.float32), GATES) * factor
        if other is not None:
            y *= tl.load(other[0] + row * other[1] + i, mask=i < N, other=0.0).to(tl.float32)
    tl.store(out + row * N + i, y.to(out.dtype.element_ty), mask=i < N)


@triton.jit
def _clamped(x, out, N, alpha, limit, WIDE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row, column = row_and_column(tl.cdiv(N, WIDE))
    row, begin = row.to(tl.int64), column * WIDE
    i, pairs = begin + tl.arange(0, WIDE), 2 * begin + tl.arange(0, 2 * WIDE)
    if PDL:
        gdc_wait()
    both = tl.load(x + 2 * row * N + pairs, mask=pairs < 2 * N, other=0.0).to(tl.float32)
    gate, up = tl.split(tl.reshape(both, (WIDE, 2)))
    gate = clamped(gate, float("-inf"), limit)
    y = times_sigmoid(gate, alpha * gate) * (clamped(up, -limit, limit) + 1)
    tl.store(out + row * N + i, y.to(out.dtype.element_ty), mask=i < N)

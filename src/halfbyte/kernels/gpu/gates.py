"""y [M, N / 2] = factor * f(x[:, : N / 2]) * x[:, N / 2 :] of x [M, N], in float32, rounded once.

Where the product before it has gates, `skinny.py` computes them before it writes; this is for products of other kernels.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.epilogue import gated
from halfbyte.machine import Gpu

_WIDE = 1024


def launch(gpu: Gpu, x: Tensor, out: Tensor, gates: str = "silu", factor: float = 1.0) -> None:
    """x [M, N], out [M, N / 2], contiguous; `gates` names f: one of `problem.GATES`."""
    m, half = out.shape
    pdl = launcher.starts_early(gpu)
    launcher.run(_gates, (m, -(-half // _WIDE)), x, out, half, factor, _WIDE, gates, pdl, num_warps=4, early=pdl)


@triton.jit
def _gates(x, out, half, factor, WIDE: tl.constexpr, GATES: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    i = tl.program_id(1) * WIDE + tl.arange(0, WIDE)
    row = tl.program_id(0).to(tl.int64)
    if PDL:
        gdc_wait()
    gate = tl.load(x + 2 * row * half + i, mask=i < half, other=0.0).to(tl.float32)
    up = tl.load(x + (2 * row + 1) * half + i, mask=i < half, other=0.0).to(tl.float32)
    tl.store(out + row * half + i, gated(gate, up, factor, GATES).to(out.dtype.element_ty), mask=i < half)

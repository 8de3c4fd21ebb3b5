"""y = x / sqrt(mean(x²) + eps) * weight for each row of x, in float32, rounded once (RMS norm: Zhang and Sennrich, 2019).

For the few rows of a decoding step, a block each: what matters there is that the next kernel may start, and read its weights, meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import launch as launcher
from halfbyte.machine import Gpu

MOST = 1 << 15  # columns: all of a row is in registers


def launch(gpu: Gpu, x: Tensor, weight: Tensor, eps: float, out: Tensor) -> None:
    """x, out [M, K], contiguous, K at most MOST; weight [K], of the same type."""
    m, k = x.shape
    pdl = launcher.starts_early(gpu)
    launcher.run(_norm, (m,), x, weight, eps, out, k, triton.next_power_of_2(k), pdl, num_warps=16, early=pdl)


@triton.jit
def _norm(x, weight, eps, out, K, WIDE: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    i = tl.arange(0, WIDE)
    at = tl.program_id(0).to(tl.int64) * K + i
    factor = tl.load(weight + i, mask=i < K, other=0.0).to(tl.float32)
    if PDL:
        gdc_wait()
    v = tl.load(x + at, mask=i < K, other=0.0).to(tl.float32)
    root = tl.rsqrt(tl.sum(v * v) / K + eps)
    tl.store(out + at, (v * root * factor).to(out.dtype.element_ty), mask=i < K)

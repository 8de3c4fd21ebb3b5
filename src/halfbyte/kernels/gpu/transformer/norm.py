"""RMSNorm (Zhang and Sennrich, 2019) and LayerNorm (Ba, Kiros and Hinton, 2016) of the rows of x [M, K], in float32, rounded once.

    RMSNorm     norm(x) = x / sqrt(mean(x²) + eps) * weight, or * (1 + weight) with `unit_offset` (Gemma)
    LayerNorm   norm(x) = RMSNorm(x - mean(x)) + bias

    launch             y = norm(x)
    launch_sections    y = RMSNorm of two parts of a row, each with its own weight
    launch_added       h = scale * (residual + RMSNorm(x)), z = RMSNorm(h): the norm of a sublayer's output, the residual connection, and
                       the norm of the next sublayer's input

A thread block computes a row. In a decode step there are few, and the next kernel starts and loads its weights meanwhile.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.machine import Gpu

MOST = 1 << 15  # columns: a row is in registers

Norm = tuple[Tensor, float, bool]  # weight [K] of x's dtype, eps, unit_offset: 1 + weight is multiplied


def why_not_pair(norms: tuple[Norm, Norm]) -> str | None:
    """Return why one kernel cannot apply two RMSNorms, each to its own columns, or None: it reads both weights by one pointer type."""
    (first, *first_settings), (second, *second_settings) = norms
    if first_settings != second_settings:
        return f"eps and unit_offset must be equal, got {first_settings} and {second_settings}"
    if first.dtype != second.dtype or not (first.is_contiguous() and second.is_contiguous()):
        got = f"{first.dtype} with strides {first.stride()}, {second.dtype} with strides {second.stride()}"
        return f"weights must be contiguous and of one dtype, got {got}"
    return None


def pair_arguments(norms: tuple[Norm, Norm]) -> tuple[Tensor, Tensor, float]:
    """Return both weights, and eps, as kernels take two norms. Raise KernelError for those of `why_not_pair`."""
    if (reason := why_not_pair(norms)) is not None:
        raise KernelError(f"one kernel applies both norms: {reason}")
    return norms[0][0], norms[1][0], norms[0][1]


def launch(gpu: Gpu, x: Tensor, norm: Norm, out: Tensor, *, layer_norm: bool = False, bias: Tensor | None = None) -> None:
    """Launch out = RMSNorm(x) or LayerNorm(x); both [M, K], contiguous, K at most MOST; bias [K] of x's dtype, or None."""
    weight, eps, unit_offset = norm
    m, k = x.shape
    pdl, wide = launcher.starts_early(gpu), triton.next_power_of_2(k)
    launcher.run(_norm, (m,), x, weight, bias, eps, out, k, wide, layer_norm, unit_offset, pdl, num_warps=16, early=pdl)


def launch_sections(gpu: Gpu, x: Tensor, norms: tuple[Norm, Norm], out: Tensor) -> None:
    """Launch RMSNorm of two sections of columns of x, which follow each other: the widths are those of the weights. The other columns are
    copied. x, out [M, K], contiguous; each of the three parts is at most MOST wide."""
    (first, second, eps), unit_offset = pair_arguments(norms), norms[0][2]
    pdl, a, b = launcher.starts_early(gpu), len(first), len(second)
    sizes, wide = (a, b, x.shape[1]), triton.next_power_of_2(max(a, b, x.shape[1] - a - b))
    launcher.run(_sections, (x.shape[0], 3), x, first, second, eps, out, sizes, wide, unit_offset, pdl, num_warps=16, early=pdl)


def launch_added(
    gpu: Gpu,
    x: Tensor,
    norm: Norm,
    residual: Tensor,
    out: Tensor,
    then: tuple[Norm, Tensor] | None,
    scale: Tensor | None = None,
) -> None:
    """Launch out = scale * (residual + RMSNorm(x)), and RMSNorm(out).

    Args:
        gpu: Where.
        x, residual, out: [M, K], contiguous, K at most MOST.
        norm: Of x.
        then: The norm of `out`, and where its result [M, K] is written; None: there is none.
        scale: [1]; None: 1.
    """
    weight, eps, unit_offset = norm
    m, k = x.shape
    pdl = launcher.starts_early(gpu)
    second = None if then is None else (*then[0][:2], then[1])
    wide = triton.next_power_of_2(k)
    launcher.run(_added, (m,), x, weight, eps, residual, out, second, scale, k, wide, unit_offset, pdl, num_warps=16, early=pdl)


@triton.jit
def _factor(weight, i, K, UNIT_OFFSET: tl.constexpr):
    """Return elements i of what is multiplied, in float32; 0 beyond K."""
    factor = tl.load(weight + i, mask=i < K, other=0.0).to(tl.float32)
    return factor + 1 if UNIT_OFFSET else factor


@triton.jit
def _normed(v, factor, K, eps):
    """Return RMSNorm of v, float32, which is 0 beyond K."""
    return v * tl.rsqrt(tl.sum(v * v) / K + eps) * factor


@triton.jit
def _norm(
    x, weight, bias, eps, out, K, WIDE: tl.constexpr, LAYER_NORM: tl.constexpr, UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr
):  # fmt: skip
    if PDL:
        gdc_launch_dependents()
    i = tl.arange(0, WIDE)
    at = tl.program_id(0).to(tl.int64) * K + i
    factor = _factor(weight, i, K, UNIT_OFFSET)
    if bias is not None:
        added = _factor(bias, i, K, False)
    if PDL:
        gdc_wait()
    v = tl.load(x + at, mask=i < K, other=0.0).to(tl.float32)
    if LAYER_NORM:
        v = tl.where(i < K, v - tl.sum(v) / K, 0.0)
    y = _normed(v, factor, K, eps)
    if bias is not None:
        y += added
    tl.store(out + at, y.to(out.dtype.element_ty), mask=i < K)


@triton.jit
def _sections(x, first, second, eps, out, sizes, WIDE: tl.constexpr, UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr):
    """Compute section program_id(1), the third of which is copied; `sizes`: columns of the first, of the second, and of all."""
    if PDL:
        gdc_launch_dependents()
    i, section = tl.arange(0, WIDE), tl.program_id(1)
    begin = tl.where(section == 0, 0, tl.where(section == 1, sizes[0], sizes[0] + sizes[1]))
    K = tl.where(section == 0, sizes[0], tl.where(section == 1, sizes[1], sizes[2] - sizes[0] - sizes[1]))
    at = tl.program_id(0).to(tl.int64) * sizes[2] + begin + i
    factor = _factor(tl.where(section == 0, first, second), i, tl.where(section == 2, 0, K), UNIT_OFFSET)
    if PDL:
        gdc_wait()
    v = tl.load(x + at, mask=i < K, other=0.0)
    y = _normed(v.to(tl.float32), factor, K, eps).to(v.dtype)
    tl.store(out + at, tl.where(section == 2, v, y), mask=i < K)


@triton.jit
def _added(x, weight, eps, residual, out, then, scale, K, WIDE: tl.constexpr, UNIT_OFFSET: tl.constexpr, PDL: tl.constexpr):
    """Compute row program_id(0); `then`: None, or weight, eps and output of the second norm."""
    if PDL:
        gdc_launch_dependents()
    i = tl.arange(0, WIDE)
    at = tl.program_id(0).to(tl.int64) * K + i
    factor = _factor(weight, i, K, UNIT_OFFSET)
    if then is not None:
        factor_then = _factor(then[0], i, K, UNIT_OFFSET)
    if PDL:
        gdc_wait()
    v = tl.load(x + at, mask=i < K, other=0.0).to(tl.float32)
    h = _normed(v, factor, K, eps) + tl.load(residual + at, mask=i < K, other=0.0).to(tl.float32)
    if scale is not None:
        h *= tl.load(scale).to(tl.float32)
    h = h.to(out.dtype.element_ty)
    tl.store(out + at, h, mask=i < K)
    if then is not None:
        z = _normed(h.to(tl.float32), factor_then, K, then[1])
        tl.store(then[2] + at, z.to(out.dtype.element_ty), mask=i < K)

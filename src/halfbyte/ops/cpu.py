"""The custom ops on the CPU. They validate all arguments before a kernel is called."""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.errors import ArgumentError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.layer_kinds import Gelu
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops import long_sums
from halfbyte.ops.checks import check_bias, check_ids, check_linear, check_out_dtype, check_packed, check_qlinear, check_residual
from halfbyte.ops.tensors import aligned, empty_sum, empty_sum_codes, geglu

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.linear.linear import LinearKernel
    from halfbyte.kernels.cpu.steps import ProgramStep

_INFINITE = float("inf")
_CPU = torch.device("cpu")


def quantize(weight: Tensor, fmt: Format) -> Codes | None:
    """`quantizers.absmax` by a kernel; None where no kernel supports it, or where `absmax` would raise an error."""
    from halfbyte.kernels.cpu.quantize import quantize as kernel

    return kernel.quantize(weight, fmt) if kernel.supports(weight, fmt) is None else None


def linear(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    n: int,
    k: int,
    compute: str,
    activation: str,
    low: float,
    high: float,
    gelu: Gelu = "",
) -> Tensor:
    """With `gelu`, GELU is applied instead of the clamp, and multiplied with the residual, not added to it."""
    kernel = PLANS.linear_kernels.get((format, n, k, weight.numel(), x.dtype, compute, activation, gelu))
    if kernel is None:
        kernel = _linear_kernel(x, weight, format, n, k, compute, activation, gelu)
    shape = x.shape
    fits = weight.shape == (kernel.nbytes,) and weight.dtype == torch.uint8 and weight.is_cpu
    if not shape or shape[-1] != k or not fits or not low <= high:
        check_linear(x, weight, format, n, k, activation, low, high)
    if bias is not None:
        check_bias(bias, n, _CPU)
        if bias.dtype != torch.float32 or not bias.is_contiguous():
            bias = bias.to(torch.float32).contiguous()
    if residual is not None:
        check_residual(residual, x, (*shape[:-1], n))
        residual = residual.contiguous()
    if x.numel() == 0 or n == 0:
        if gelu:
            active = functional.gelu(empty_sum(x, (*shape[:-1], n), bias, None), approximate=gelu)
            return (active if residual is None else active * residual).to(x.dtype)
        return empty_sum(x, (*shape[:-1], n), bias, residual).clamp_(low, high).to(x.dtype)
    weight = aligned(weight)
    if not x.is_contiguous():
        x = x.reshape(-1, k)
        if x.stride(1) != 1:
            x = x.contiguous()
        return kernel(x, weight.data_ptr(), bias, low, high, residual).view((*shape[:-1], n))
    return kernel(x, weight.data_ptr(), bias, low, high, residual)


def linear_gelu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    format: str,
    n: int,
    k: int,
    compute: str,
    activation: str,
    approximate: Gelu = "none",
) -> Tensor:
    return linear(x, weight, bias, None, format, n, k, compute, activation, -_INFINITE, _INFINITE, gelu=approximate)


def linear_geglu(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, compute: str, activation: str) -> Tensor:
    """Two products, by the halves of the weight, of which the second one's epilogue has the GELU and the other factor.

    Where halves are no whole panels, torch computes these after one product.
    """
    if n % (2 * cpu_tiles.PANEL):
        return geglu(linear(x, weight, bias, None, format, n, k, compute, activation, -_INFINITE, _INFINITE))
    half, settings = n // 2, (compute, activation, -_INFINITE, _INFINITE)
    weights = weight.tensor_split(2)  # panels follow each other
    biases = (None, None) if bias is None else bias.tensor_split(2)
    up = linear(x, weights[0], biases[0], None, format, half, k, *settings)
    return linear(x, weights[1], biases[1], up, format, half, k, *settings, gelu="none")


def _linear_kernel(x: Tensor, weight: Tensor, format: str, n: int, k: int, compute: str, activation: str, gelu: Gelu) -> LinearKernel:
    """Check what all calls of this kind have in common, and find the kernel."""
    from halfbyte.dispatch.choose import cpu_kernel

    check_linear(x, weight, format, n, k, activation, -_INFINITE, _INFINITE)
    sparse = cpu_tiles.geometry_of(as_format(format), n, k, weight.numel()).sparse
    problem = Problem("linear", 1, n, k, as_format(format), x.dtype, compute, activation, sparse=sparse)  # type: ignore[arg-type]
    kernel = cpu_kernel(problem, gelu=gelu)
    PLANS.linear_kernels[format, n, k, weight.numel(), x.dtype, compute, activation, gelu] = kernel
    return kernel


def qlinear(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> Tensor:
    check_qlinear(x, weight, table, format, n, k, low, high)
    if k == 0:
        return empty_sum_codes(x, table, n, low, high)
    if x.numel() == 0 or n == 0:
        return x.new_empty((*x.shape[:-1], n))
    flat = x.reshape(-1, k)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    sparse = cpu_tiles.geometry_of(as_format(format), n, k, weight.numel()).sparse
    if long_sums.overflows(k):
        packed = Packed(as_format(format), (n, k), cpu_tiles.SPARSE if sparse else cpu_tiles.NAME, weight)
        return long_sums.qlinear(x, cpu_tiles.unpack(packed), table, low, high)
    kernel = _qlinear_kernel(as_format(format), n, k, sparse)
    return kernel(flat, aligned(weight).data_ptr(), table, float(low), float(high)).view((*x.shape[:-1], n))  # type: ignore[no-any-return]


@functools.lru_cache(maxsize=1024)
def _qlinear_kernel(fmt: Format, n: int, k: int, sparse: bool) -> Any:
    from halfbyte.dispatch.choose import cpu_kernel

    return cpu_kernel(Problem("qlinear", 1, n, k, fmt, torch.int8, "int8", sparse=sparse))


def qlinear_step(x: Tensor, packed: Packed, table: Tensor, clamp: tuple[int, int]) -> ProgramStep | None:
    """`qlinear` of tensors of the sizes and strides of x, as a step of a program; None where it is none."""
    from halfbyte.kernels.cpu.linear.linear import ROWS_A_PASS
    from halfbyte.kernels.cpu.steps import linear_step

    n, k = packed.shape
    if x.numel() == 0 or n == 0 or not x.is_contiguous() or x.numel() > k * ROWS_A_PASS or long_sums.overflows(k):
        return None
    kernel = _qlinear_kernel(packed.format, n, k, packed.layout == cpu_tiles.SPARSE)
    return linear_step(kernel, x.numel() // k, aligned(packed.data), table, *map(float, clamp))


def embedding(ids: Tensor, weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    from halfbyte.kernels.cpu.quantize.dequantize import dequantize as run

    check_packed(weight, format, n, k, _CPU)
    check_ids(ids)
    check_out_dtype(dtype)
    if ids.numel():
        least, most = (int(bound) for bound in torch.aminmax(ids))
        if least < 0 or most >= n:
            raise ArgumentError(f"embedding ids lie in 0 … {n - 1}, got {least} … {most}")
    geo = cpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
    return run(aligned(weight), geo, dtype, ids.to(torch.int64).flatten().contiguous()).view((*ids.shape, k))


def dequantize(weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    from halfbyte.kernels.cpu.quantize.dequantize import dequantize as run

    check_packed(weight, format, n, k, _CPU)
    check_out_dtype(dtype)
    return run(aligned(weight), cpu_tiles.geometry_of(as_format(format), n, k, weight.numel()), dtype)

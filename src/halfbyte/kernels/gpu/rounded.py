"""y [M, N] = x^ [M, K] . W^T, where x^ are the quantized activations as floats again: blocks of 32 and 64 on Hopper, many rows.

The function is that of `gemm_int8.py`. Integers of such short blocks must become floats and be scaled once for each 32 or 64 products of
every sum, which takes longer than the products. Here they do before the product: one pass writes x^ = scale * q in x's type, and
`gemm_hopper.py` multiplies, which makes floats of the weight once for many rows of x.

Arithmetic: q and scale as `activations.py` makes them; x^ is rounded once to x's type, all else is `gemm_hopper.py`'s.
"""

from __future__ import annotations

from dataclasses import replace

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import activations, gemm_hopper
from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.arithmetic import INTERPRETED, round_product, scale_of
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_BLOCKS = (32, 64)
_HELD = 4096  # elements of a program

Config = gemm_hopper.Config


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this way, or None."""
    if problem.op != "linear" or problem.compute != "int8" or problem.activation != "block":
        return f"it takes activations with a scale per block, not {problem.op} in {problem.compute} with a scale per {problem.activation}"
    block = problem.format.block_size(problem.k)
    if block not in _BLOCKS:
        return f"integers are multiplied faster but in blocks of 32 and 64, not {block}"
    return gemm_hopper.supports(_product(problem), gpu)


def _product(problem: Problem) -> Problem:
    return replace(problem, compute="float")


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    return gemm_hopper.configs(_product(problem), gpu)


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] (unit stride along K) times the weight whose sections are codes, scale, zero -> out [M, N], contiguous."""
    nbytes = problem.m * problem.k * x.element_size()
    own = activations.aligned(nbytes)
    memory = launcher.workspace(out.device, own + gemm_hopper.beside(problem, config))
    seen = memory[:nbytes].view(x.dtype).view(problem.m, problem.k)
    round_activations(x, seen, problem.format.block_size(problem.k))
    gemm_hopper.multiply(_product(problem), config, seen, gpu_tiles.Views(codes, scale, zero), out, epilogue, memory[own:])


def round_activations(x: Tensor, out: Tensor, block: int) -> None:
    """x [M, K] (unit stride along K) quantized with a scale for each block (a power of two) along K, as floats -> out [M, K]."""
    m, k = x.shape
    held = min(_HELD // block, triton.next_power_of_2(-(-k // block)))
    early = not INTERPRETED  # the product's first weights are on their way meanwhile
    launcher.run(
        _round,
        (m, -(-k // (held * block))),
        x,
        out,
        k,
        x.stride(0),
        BLOCK=block,
        HELD=held,
        EARLY=early,
        num_warps=max(1, held * block // 512),
        early=early,
    )


@triton.jit
def _round(x, out, k, stride, BLOCK: tl.constexpr, HELD: tl.constexpr, EARLY: tl.constexpr):
    if EARLY:
        gdc_launch_dependents()
        gdc_wait()
    row = tl.program_id(0).to(tl.int64)
    at = ((tl.program_id(1) * HELD + tl.arange(0, HELD)) * BLOCK)[:, None] + tl.arange(0, BLOCK)[None, :]
    v = tl.load(x + row * stride + at, mask=at < k, other=0.0).to(tl.float32)
    most = tl.max(v.to(tl.int32, bitcast=True) & 0x7FFFFFFF, axis=1)  # a NaN is the greatest
    step, inverse, _ = scale_of(most.to(tl.float32, bitcast=True), tl.zeros([HELD], tl.float32), most < 0x7F800000)
    v = tl.where((step < float("inf"))[:, None], v, 0.0)
    q = tl.minimum(tl.maximum(round_product(v, tl.broadcast_to(inverse[:, None], v.shape)), -127), 127)
    tl.store(out + row * k + at, (q.to(tl.float32) * step[:, None]).to(out.dtype.element_ty), mask=at < k)

"""y [M, N] = x^ [M, K] . W^T, where x^ are the quantized activations as floats again: short blocks or an offset on Hopper, many rows.

The function is that of `gemm_int8.py`. Integers of blocks of 32 and 64 must become floats and be scaled once for each 32 or 64 products
of every sum, which takes longer than the products. Here they do before the product: one pass writes x^ = scale * q + offset in x's type,
and `gemm_hopper.py` multiplies, which makes floats of the weight once for many rows of x; few rows are for `skinny_rounded.py`.

Arithmetic: q, scale and offset as `quantize/activations.py` makes them; x^ is rounded once to x's type, all else is `gemm_hopper.py`'s.
"""

from __future__ import annotations

from dataclasses import replace

import triton
from torch import Tensor

from halfbyte.kernels.gpu.linear import gemm_hopper, gemm_int8
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

Config = gemm_hopper.Config


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this way, or None."""
    return refused(problem, gpu) or gemm_hopper.supports(product(problem), gpu)


def refused(problem: Problem, gpu: Gpu) -> str | None:
    """Whatever multiplies."""
    if reason := gemm_int8.supports(problem, gpu):
        return reason
    plan = activations.plan(problem)
    if not problem.sparse and plan.granule == gpu_tiles.RECORD and not plan.with_offset:
        return f"integers are multiplied faster but in blocks of less than {gpu_tiles.RECORD} or with an offset, not of {plan.block}"
    return None


def product(problem: Problem) -> Problem:
    return replace(problem, compute="float")


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    return gemm_hopper.configs(product(problem), gpu)


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """x [M, K] (unit stride along K) times the weight whose sections are codes, scale, zero -> out [M, N], contiguous."""
    seen, memory = round_first(problem, x, gemm_hopper.workspace_bytes(problem, config))
    views = gpu_tiles.Views(codes, scale, zero)
    gemm_hopper.multiply(product(problem), config, seen, views, out, epilogue, memory, registers(problem, config))


def registers(problem: Problem, config: Config) -> int | None:
    """Of a thread of the product: so few that the pass that rounds the next x has room beside, where none are spilled then (zeros take
    more) and it was measured (4 bits)."""
    fmt, small = problem.format, config.rows == 64 and config.block_m <= 128
    return 128 if small and fmt.bits == 4 and fmt.zero == "none" else None


def round_first(problem: Problem, x: Tensor, beside: int) -> tuple[Tensor, Tensor]:
    """x^ [M with padding, K], and so many bytes of memory. The product's first weights are on their way meanwhile."""
    plan = activations.plan(problem)
    nbytes = plan.columns * problem.k * x.element_size()
    own = activations.aligned(nbytes)
    memory = workspace(x.device, own + beside)
    seen = memory[:nbytes].view(x.dtype).view(plan.columns, problem.k)
    activations.round_activation(x, plan, seen[: problem.m], early=not triton.knobs.runtime.interpret)
    return seen, memory[own:]

"""y [M, N] = x^ [M, K] · Wᵀ, where x^ are the dequantized codes of dynamically quantized activations: short blocks or an offset on Hopper.

The result is that of `gemm_int8.py`. With blocks of up to 64 its integer sums take a conversion and a multiplication by a scale per block:
longer than its products. Here one pass writes x^ = scale * q + offset in x's type, and `gemm_hopper.py` multiplies.
`skinny_rounded.py` does the same for few rows.

Arithmetic: q, scale and offset as in `quantize/activations.py`; x^ is rounded once to x's type, the rest is `gemm_hopper.py`'s.
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
    """Return the reason why this kernel does not compute `problem`, or None."""
    return why_not(problem, gpu) or gemm_hopper.supports(product(problem), gpu)


def why_not(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why no kernel multiplies rounded activations, or None."""
    if reason := gemm_int8.supports(problem, gpu):
        return reason
    plan = activations.plan(problem)
    if not problem.sparse and plan.granule == gpu_tiles.RECORD and not plan.with_offset:
        return f"integers are multiplied faster but in blocks of less than {gpu_tiles.RECORD} or with an offset, not of {plan.block}"
    return None


def product(problem: Problem) -> Problem:
    """Return the problem of the product."""
    return replace(problem, compute="float")


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    return gemm_hopper.configs(product(problem), gpu)


def launch(problem: Problem, config: Config, x: Tensor, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue) -> None:
    """Launch both kernels for x [M, K] (unit stride along K) and the weight's sections; out is [M, N], contiguous."""
    rounded_x, memory = round_first(problem, x, gemm_hopper.workspace_bytes(problem, config))
    gemm_hopper.launch(product(problem), config, rounded_x, weight, out, epilogue, memory, registers(problem, config))


def registers(problem: Problem, config: Config) -> int | None:
    """Return the average registers per thread of the product: few enough that the pass for the next x runs during it, where none are
    spilled (zeros take more) and it was measured (4 bits)."""
    fmt, small = problem.format, config.rows == 64 and config.block_m <= 128
    return 128 if small and fmt.bits == 4 and fmt.zero == "none" else None


def round_first(problem: Problem, x: Tensor, extra_bytes: int) -> tuple[Tensor, Tensor]:
    """Return x^ [M with padding, K], and `extra_bytes` of memory. The product's first weights are loaded meanwhile."""
    plan = activations.plan(problem)
    nbytes = plan.m_padded * problem.k * x.element_size()
    x_bytes = activations.aligned(nbytes)
    memory = workspace(x.device, x_bytes + extra_bytes)
    rounded_x = memory[:nbytes].view(x.dtype).view(plan.m_padded, problem.k)
    activations.round_activation(x, plan, rounded_x[: problem.m], early=not triton.knobs.runtime.interpret)
    return rounded_x, memory[x_bytes:]

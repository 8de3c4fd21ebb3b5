"""int8 x [M, K] -> int8 y [M, N], requantized as `reference.qlinear` has it:

    y = clamp(rne(multiplier * (sum(x * q) + start) + constant))

with q a weight of one scale per channel or tensor. `ops.requantization_table` makes start = -in_zero * sum(q), multiplier and
constant, a number each for each n. The sums are those of `gemm_int8.py`, exact; the rest is one fused multiply-add in float32.
"""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.gpu.linear import gemm_int8
from halfbyte.kernels.gpu.linear.gemm_int8 import Config
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.problem import LONGEST_INTEGER_SUM, Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "qlinear":
        return f"it is for qlinear, not {problem.op}"
    if problem.m < 1 or problem.n < 1 or problem.k < 1:
        return f"there is nothing to multiply: m={problem.m}, n={problem.n}, k={problem.k}"
    if problem.format.zero != "none" or isinstance(problem.format.block, int):
        return f"it takes symmetric weights with one scale per channel or tensor, not {problem.format}"
    if problem.k > LONGEST_INTEGER_SUM:
        return f"sums of {problem.k} products may overflow an int32"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    return gemm_int8.configs(problem, gpu)


def launch(
    problem: Problem, config: Config, x: Tensor, weight: gpu_tiles.Views, table: Tensor, out: Tensor, clamp: tuple[int, int]
) -> None:
    """x int8 [M, K], contiguous, at a multiple of 16 bytes; the weight's sections, table float32 [3, at least N], out int8 [M, N]."""
    plan = activations.plan(problem)
    memory = workspace(out.device, plan.nbytes + gemm_int8.workspace_bytes(problem, config))
    quantized = activations.views(plan, memory)
    if plan.order != "plain" or plan.k != plan.k_padded:
        activations.arrange(x, plan, memory)
    else:
        quantized = activations.Quantized(plan, x, quantized.scale, quantized.sums, None)
    epilogue = Epilogue(None, None, float(clamp[0]), float(clamp[1]))
    gemm_int8.multiply(problem, config, quantized, weight, out, epilogue, memory[plan.nbytes :], table)

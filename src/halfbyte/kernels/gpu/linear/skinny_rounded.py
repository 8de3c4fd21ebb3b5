"""y [M, N] = x^ [M, K] . W^T as in `rounded.py`, of which it has all but the product: for few rows, which `skinny_hopper.py` multiplies."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.gpu.linear import rounded, skinny_hopper, skinny_hopper_config
from halfbyte.kernels.gpu.linear.skinny_hopper_config import Config
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.machine import Gpu


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this way, or None."""
    return rounded.refused(problem, gpu) or skinny_hopper_config.supports(rounded.product(problem), gpu)


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    return skinny_hopper_config.configs(rounded.product(problem), gpu)


def launch(
    problem: Problem, config: Config, x: Tensor, codes: Tensor, scale: Tensor, zero: Tensor | None, out: Tensor, epilogue: Epilogue
) -> None:
    """As `rounded.launch`."""
    floats = rounded.product(problem)
    seen, memory = rounded.round_first(problem, x, skinny_hopper_config.workspace_bytes(floats, config))
    static = skinny_hopper_config.compiled_for(floats, config, clamp=epilogue.clamps)
    skinny_hopper.multiply(floats, config, static, (seen[: problem.m], None), (codes, scale, zero), out, epilogue, memory)

"""y [M, N] = x^ [M, K] · Wᵀ as in `rounded.py`, for few rows, multiplied by `skinny_hopper.py`."""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.gpu.linear import rounded, skinny_hopper, skinny_hopper_config
from halfbyte.kernels.gpu.linear.skinny_hopper_config import Config
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    return rounded.why_not(problem, gpu) or skinny_hopper_config.supports(rounded.product(problem), gpu)


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    return skinny_hopper_config.configs(rounded.product(problem), gpu)


def launch(problem: Problem, config: Config, x: Tensor, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue) -> None:
    """Launch both kernels; arguments as in `rounded.launch`."""
    floats = rounded.product(problem)
    rounded_x, memory = rounded.round_first(problem, x, skinny_hopper_config.workspace_bytes(floats, config))
    static = skinny_hopper_config.compiled_for(floats, config, clamp=epilogue.clamps)
    skinny_hopper.multiply(floats, config, static, (rounded_x[: problem.m], None), weight, out, epilogue, memory)

"""Which kernel multiplies the experts of a mixture on a GPU: the literal list of candidates, the first that can being taken, and why others
are not. What `explain` says that they take is predicted, from what `roofline` knows of linear layers; the choice does not depend on it."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from halfbyte.dispatch.gpu import GpuCandidate, GpuChoice, GpuOption
from halfbyte.dispatch.roofline import COST_MODELS, Tiles, gpu_ceilings, predict
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

GPU_GROUPED = (
    GpuCandidate(
        "grouped_hopper", "float", "grouped_hopper", "one launch for all experts, made for Hopper: TMA, weights from registers into wgmma",
        lambda c, p: Tiles(c.block_m, 128), direct=False,
    ),
    GpuCandidate(
        "grouped_dequantized", "float", "grouped_dequantized", "all experts' weights dequantized first, then torch's grouped product",
        lambda c, p: Tiles(128, 128, 4), direct=False,
    ),
    GpuCandidate(
        "grouped", "float", "grouped", "one launch for all experts: weights dequantized in registers, tensor cores",
        lambda c, p: Tiles(c.tile.columns, 16 * c.tile.bands),
    ),
)  # fmt: skip

_LONGER = 1.35  # than linear layers that are alike: fitted to the times on an H100 in docs/experts.md


def gpu_options(problem: Problem, gpu: Gpu) -> list[tuple[Any, Any]]:
    """The files of kernels that can solve `problem`, each with its configs, the best guess first."""
    able = [candidate.module for candidate in GPU_GROUPED if candidate.module.supports(problem, gpu) is None]
    return [(module, config) for module in able for config in module.configs(problem, gpu)]


def choose_gpu_grouped(problem: Problem, gpu: Gpu) -> GpuChoice:
    """What `grouped_linear` takes for `problem` (sizes of at least 1), and what every candidate would take or why it cannot."""
    options: list[GpuOption] = []
    rejected: list[tuple[GpuCandidate, str]] = []
    for candidate in GPU_GROUPED:
        if reason := candidate.module.supports(problem, gpu):
            rejected.append((candidate, reason))
        else:
            configs = candidate.module.configs(problem, gpu)
            options += [GpuOption(candidate, config, _LONGER * _seconds(problem, gpu, candidate, config)) for config in configs]
    if not options:
        reasons = "; ".join(f"{candidate.name}: {reason}" for candidate, reason in rejected)
        raise UnsupportedError(f"no kernel on {gpu.name} solves {problem} ({reasons}): use the CPU")
    return GpuChoice(options[0], tuple(options[1:]), tuple(rejected))


def _seconds(problem: Problem, gpu: Gpu, candidate: GpuCandidate, config: Any) -> float:
    """Predicted for rows that are spread evenly over the experts."""
    ceilings, n, k = gpu_ceilings(gpu), problem.n, problem.k
    active = min(problem.m, problem.experts)
    tiles = candidate.tiles(config, problem)
    if candidate.name != "grouped_dequantized":  # as one linear layer whose weight is as high as those of all tiles of rows together
        ordered = candidate.name == "grouped_hopper" or config.sort
        count = active * -(-problem.m // (active * tiles.rows)) if ordered else problem.m
        alike = replace(problem, op="linear", m=min(tiles.rows, -(-problem.m // active)), n=n * count, experts=1)
        cost_model = "skinny" if candidate.name == "grouped" else "gemm_hopper"
        return predict(alike, gpu, cost_model, tiles) + (ceilings.start if ordered else 0.0)
    cost, element = COST_MODELS["dequantized"], problem.dtype.itemsize
    written = problem.experts * (gpu_tiles.geometry(problem.format, (n, k)).nbytes + n * k * element)
    read = active * n * k * element + 2 * element * problem.m * (k + n)
    arithmetic = 2 * problem.m * n * k / (ceilings.half * cost.arithmetic)
    return 4 * ceilings.start + cost.overhead + written / (ceilings.bandwidth * cost.memory) + max(arithmetic, read / ceilings.bandwidth)

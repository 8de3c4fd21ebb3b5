"""Tuning: the kernels that could solve a problem, measured on this machine, the most promising of each.

All are timed in a few rounds, and those near the best in many: noise should not choose between them.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from dataclasses import replace
from functools import partial

import torch

from halfbyte.dispatch import gpu as rules
from halfbyte.dispatch import tune
from halfbyte.dispatch.choose import forget
from halfbyte.errors import KernelError
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

MOST_CONFIGS = 6  # of one candidate
_CLOSE = 1.12  # times of a few rounds are off by less: what is that near to the best is timed again, more often


def tune_linear(problem: Problem, gpu: Gpu, *, anew: bool = True, device: torch.device | None = None) -> tune.Times:
    """Measure `problem`, its M taken up to a power of two, and keep the times. Takes seconds, most of them to compile.

    anew    False: measured times that are already there are returned
    device  the current one, and so it is without
    """
    if not anew and (known := tune.measured(gpu, problem, here=True).times):
        return known
    from halfbyte.kernels.gpu.runtime.clock import graph_times

    device = device or torch.device("cuda", torch.cuda.current_device())
    paired = not problem.sparse and rules.packs_code_pairs(problem.format, (problem.n, problem.k), gpu)
    problem = replace(problem, m=tune.rows_class(problem.m), paired=paired)
    contenders: dict[str, list[Callable[[], object]]] = {}
    for candidate in rules.GPU_LINEAR:
        asked = candidate.multiplied(problem)
        if candidate.sparse <= problem.sparse and candidate.supports(problem, gpu) is None:
            for config in candidate.module.configs(asked, gpu)[:MOST_CONFIGS]:
                contenders[f"{candidate.name}\n{config}"] = linear_launches(problem, gpu, candidate, config, device)
    compile_launches(contenders, device)
    seconds = {name: timing.median for name, timing in graph_times(contenders, rounds=7).items()}
    close = {name: launches for name, launches in contenders.items() if seconds[name] <= _CLOSE * min(seconds.values())}
    seconds |= {name: timing.median for name, timing in graph_times(close, rounds=25).items()}
    times: tune.Times = {}
    for name, median in seconds.items():
        candidate_name, config_text = name.split("\n")
        times.setdefault(candidate_name, {})[config_text] = median
    tune.keep(gpu, problem, times)
    forget()
    return times


def compile_launches(contenders: dict[str, list[Callable[[], object]]], device: torch.device) -> None:
    """Compiles what contenders launch, side by side, and launches each once; one whose kernel does not compile is told of and taken out."""
    from halfbyte.kernels.gpu.runtime import launch

    with launch.compiling(device):
        for launches in contenders.values():
            launches[0]()
    for name, launches in list(contenders.items()):
        try:
            launches[0]()
        except KernelError as error:
            warnings.warn(f"{name} does not run here, and is left out: {error}".replace("\n", " "), stacklevel=3)
            del contenders[name]


def linear_launches(
    problem: Problem, gpu: Gpu, candidate: rules.GpuCandidate, config: object, device: torch.device
) -> list[Callable[[], object]]:
    """Launches of one kernel on different weights of random bits, which together no cache holds."""
    from halfbyte.kernels.gpu.runtime.clock import copies

    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=problem.sparse, paired=problem.paired)
    x = torch.randn(problem.m, problem.k, device=device, dtype=torch.float32).to(problem.dtype)
    out = torch.empty(problem.m, problem.n, dtype=problem.dtype, device=device)
    weights = [gpu_tiles.views(random_matrix(geo, device), geo) for _ in range(copies(geo.nbytes, gpu.l2))]
    return [partial(candidate.launch, problem, config, x, sections, out, Epilogue()) for sections in weights]


def grouped_launches(
    problem: Problem, gpu: Gpu, candidate: rules.GpuCandidate, config: object, device: torch.device
) -> list[Callable[[], object]]:
    """The same for experts, to which the rows are sent evenly; other ones at each launch."""
    from halfbyte.kernels.gpu.runtime.clock import copies

    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    x = torch.randn(problem.m, problem.k, device=device, dtype=torch.float32).to(problem.dtype)
    out = torch.empty(problem.m, problem.n, dtype=problem.dtype, device=device)
    count = copies(min(problem.m, problem.experts) * geo.nbytes, gpu.l2)
    stacks = -(-count * min(problem.m, problem.experts) // problem.experts)
    weights = [torch.cat([random_matrix(geo, device) for _ in range(problem.experts)]) for _ in range(max(1, stacks))]
    rows = torch.arange(problem.m, device=device)
    ids = [(launch * problem.m + rows) % problem.experts for launch in range(count)]
    return [partial(candidate.launch, problem, config, x, weights[i % len(weights)], each, out, None) for i, each in enumerate(ids)]


def random_matrix(geo: gpu_tiles.Geometry, device: torch.device) -> torch.Tensor:
    """A packed weight of random codes and sound scales."""
    data = torch.randint(0, 256, (geo.nbytes,), dtype=torch.uint8, device=device)
    if geo.sparse:
        data[geo.kept_bytes : geo.codes_bytes] = 0x44  # of four the first two, as no two are at one position
    sections = gpu_tiles.views(data, geo)
    sections.scale.copy_(torch.rand(sections.scale.shape, device=device, dtype=torch.float32) * 1e-2 + 1e-3)
    if sections.zero is not None and sections.zero.is_floating_point():
        sections.zero.copy_(torch.rand(sections.zero.shape, device=device, dtype=torch.float32) * 1e-2)
    elif sections.zero is not None:
        sections.zero.bitwise_and_((1 << geo.format.bits) - 1)
    return data

"""Times the GPU's kernels for a linear layer on this machine: `tune_linear`, called by `halfbyte tune` and, with HALFBYTE_TUNE=1, by the
first call of each shape (ops/cuda.py). `explain` times one kernel by `linear_launches` or `grouped_launches`.

All configs are timed in a few rounds, and those near the best again in many, so that noise does not choose between them.
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

MOST_CONFIGS = 6  # of each candidate: the first ones, which its module expects to be the fastest
_FEW_ROUNDS, _MANY_ROUNDS = 7, 25
_CLOSE = 1.12  # medians of _FEW_ROUNDS are off by less: configs within this factor of the best are timed again


def tune_linear(problem: Problem, gpu: Gpu, *, anew: bool = True, device: torch.device | None = None) -> tune.Times:
    """Time the kernels that could solve a linear layer, and store the times for `choose`. This takes seconds, most of them to compile.

    Args:
        problem: The layer. It is timed with M rounded up to a power of two, as `tune.py` stores times.
        gpu: The current GPU.
        anew: Measure also what was measured on this machine before; False: return the stored times.
        device: Of `gpu`; None: the current device.

    Returns:
        Candidate -> config -> median seconds.
    """
    if not anew and (stored := tune.measured(gpu, problem, here=True).times):
        return stored
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
    seconds = {name: timing.median for name, timing in graph_times(contenders, rounds=_FEW_ROUNDS).items()}
    close = {name: launches for name, launches in contenders.items() if seconds[name] <= _CLOSE * min(seconds.values())}
    seconds |= {name: timing.median for name, timing in graph_times(close, rounds=_MANY_ROUNDS).items()}
    times: tune.Times = {}
    for name, median in seconds.items():
        candidate_name, config_text = name.split("\n")
        times.setdefault(candidate_name, {})[config_text] = median
    tune.keep(gpu, problem, times)
    forget()
    return times


def compile_launches(contenders: dict[str, list[Callable[[], object]]], device: torch.device) -> None:
    """Compile the kernels of all contenders in parallel, and launch each once. A contender whose kernel does not compile or run is removed,
    with a warning."""
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
    """Return launches of one kernel on different weights of random codes, which together exceed the caches."""
    from halfbyte.kernels.gpu.runtime.clock import copies

    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=problem.sparse, paired=problem.paired)
    x = torch.randn(problem.m, problem.k, device=device, dtype=torch.float32).to(problem.dtype)
    out = torch.empty(problem.m, problem.n, dtype=problem.dtype, device=device)
    weights = [gpu_tiles.views(random_matrix(geo, device), geo) for _ in range(copies(geo.nbytes, gpu.l2))]
    return [partial(candidate.launch, problem, config, x, sections, out, Epilogue()) for sections in weights]


def grouped_launches(
    problem: Problem, gpu: Gpu, candidate: rules.GpuCandidate, config: object, device: torch.device
) -> list[Callable[[], object]]:
    """Return launches of one kernel of experts: each sends its rows evenly to experts, and the next one takes other experts."""
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
    """Return a packed weight uint8 [geo.nbytes] of random codes, with scales of 1e-3 to 1.1e-2 and valid zeros and positions."""
    data = torch.randint(0, 256, (geo.nbytes,), dtype=torch.uint8, device=device)
    if geo.sparse:
        data[geo.kept_bytes : geo.codes_bytes] = 0x44  # positions 0 and 1: the first two of each four codes are kept
    sections = gpu_tiles.views(data, geo)
    sections.scale.copy_(torch.rand(sections.scale.shape, device=device, dtype=torch.float32) * 1e-2 + 1e-3)
    if sections.zero is not None and sections.zero.is_floating_point():
        sections.zero.copy_(torch.rand(sections.zero.shape, device=device, dtype=torch.float32) * 1e-2)
    elif sections.zero is not None:
        sections.zero.bitwise_and_((1 << geo.format.bits) - 1)
    return data

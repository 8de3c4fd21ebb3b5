"""Which kernel solves a linear layer on a GPU, or one of experts: the literal lists of candidates, and why each may not be taken.

All candidates read the layout of a weight, whichever it has, so the choice is repeated for every number of rows. (Most read 2:4 sparse
weights after their zeros were put back.) Of linear layers, what was measured decides where this machine has been tuned or the package
carries a table for its architecture; elsewhere what `roofline` predicts. Of experts, the first candidate that can is taken; what `explain`
says that they take is predicted.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache, lru_cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import inf, prod
from types import ModuleType
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.dispatch import tune
from halfbyte.dispatch.roofline import Tiles, predict, reading, spreading
from halfbyte.errors import UnsupportedError, unreachable
from halfbyte.formats.spec import Format
from halfbyte.kernels.problem import Compute, Problem, check_compute
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

OLDEST_TRITON = (3, 6)


@dataclass(frozen=True, slots=True)
class GpuCandidate:
    """One way to multiply. The module `home` of kernels/gpu has supports, configs and launch.

    tiles       of a config, for a problem
    replayable  its launches can be replayed (`kernels/gpu/runtime/tape.py`): all are Triton's
    floats      the candidate that multiplies for it, in floating point: its times tell which configs are good
    sparse      it reads 2:4 sparse weights as they are packed, and no others
    """

    name: str
    compute: Compute
    home: str
    summary: str
    tiles: Callable[[Any, Problem], Tiles]
    replayable: bool = True
    floats: str = ""
    sparse: bool = False

    def refuses(self, problem: Problem, gpu: Gpu) -> str | None:
        if problem.format.codebook and self.compute == "int8" and not self.floats:
            return f"it multiplies integers of 4 or 8 bits, not {problem.format}"
        return self.module.supports(self.multiplied(problem), gpu)  # type: ignore[no-any-return]

    @property
    def module(self) -> ModuleType:
        return import_module(f"halfbyte.kernels.gpu.{self.home}")

    def multiplied(self, problem: Problem) -> Problem:
        """What the file is asked for: the weight with its zeros, where it reads no other."""
        return replace(problem, sparse=False) if problem.sparse and not self.sparse else problem

    def launch(self, problem: Problem, config: object, x: Tensor, *operands: Any) -> None:
        """Multiplies. Of a linear layer the weight's sections are the first operands."""
        multiplied = self.multiplied(problem)
        if multiplied is not problem:
            from halfbyte.kernels.gpu.quantize.spread import spread

            geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=True)
            operands = *spread(gpu_tiles.Views(*operands[:3]), geo), *operands[3:]
        self.module.launch(multiplied, config, x, *operands)


def _hopper_tiles(config: Any, problem: Problem) -> Tiles:
    count = -(-problem.m // config.block_m) * -(-problem.n // (2 * config.rows))
    return Tiles(config.block_m, 2 * config.rows, max(1, config.programs // count), count % config.programs != 0)


GPU_LINEAR = (
    GpuCandidate(
        "skinny", "float", "linear.skinny", "weights dequantized in registers, tensor cores, K shared by blocks",
        lambda c, p: Tiles(c.columns, 16 * c.bands, c.split * c.slices),
    ),
    GpuCandidate(
        "skinny_hopper", "float", "linear.skinny_hopper", "as skinny, fed by TMA, warps specialized, equal shares of all K",
        lambda c, p: Tiles(c.columns, 64 * c.panels, even=True),
    ),
    GpuCandidate(
        "gemm_hopper", "float", "linear.gemm_hopper", "weights dequantized in registers, wgmma fed by TMA, warps specialized",
        _hopper_tiles,
    ),
    GpuCandidate(
        "dequantized", "float", "linear.dequantized", "the whole weight dequantized first, then torch's product",
        lambda c, p: Tiles(128, 128, 4), replayable=False,
    ),
    GpuCandidate(
        "gemm_int8", "int8", "linear.gemm_int8", "activations quantized to int8 in a first pass, integer tensor cores",
        lambda c, p: Tiles(c.block_m, c.block_n, c.split),
    ),
    GpuCandidate(
        "skinny_int8_hopper", "int8", "linear.skinny_int8_hopper", "activations quantized to int8 in a first pass, then as skinny_hopper",
        lambda c, p: Tiles(c.columns, 64 * c.panels, even=True),
    ),
    GpuCandidate(
        "gemm_int8_hopper", "int8", "linear.gemm_int8_hopper", "activations quantized to int8 in a first pass, wgmma fed by TMA",
        lambda c, p: Tiles(c.block_m, 64 * c.panels, max(1, c.programs // (-(-p.m // c.block_m) * -(-p.n // (64 * c.panels))))),
    ),
    GpuCandidate(
        "rounded", "int8", "linear.rounded", "activations quantized and made floats again in a first pass, then as gemm_hopper",
        _hopper_tiles, floats="gemm_hopper",
    ),
    GpuCandidate(
        "skinny_rounded", "int8", "linear.skinny_rounded",
        "activations quantized and made floats again in a first pass, then as skinny_hopper",
        lambda c, p: Tiles(c.columns, 64 * c.panels, even=True), floats="skinny_hopper",
    ),
    GpuCandidate(
        "sparse", "float", "linear.skinny_hopper", "as skinny_hopper, what is kept of a 2:4 sparse weight, sparse tensor cores",
        lambda c, p: Tiles(c.columns, 64 * c.panels, even=True), sparse=True,
    ),
    GpuCandidate(
        "sparse_rounded", "int8", "linear.skinny_rounded", "activations quantized and made floats again in a first pass, then as sparse",
        lambda c, p: Tiles(c.columns, 64 * c.panels, even=True), floats="sparse", sparse=True,
    ),
)  # fmt: skip
GPU_GROUPED = (
    GpuCandidate(
        "grouped_int8_hopper", "int8", "experts.grouped_int8_hopper", "one launch for all experts, made for Hopper: TMA, integers in wgmma",
        lambda c, p: Tiles(c.block_m, 64 * c.panels, ordered=True),
    ),
    GpuCandidate(
        "grouped_hopper", "float", "experts.grouped_hopper",
        "one launch for all experts, made for Hopper: TMA, weights from registers into wgmma",
        lambda c, p: Tiles(c.block_m, 128, ordered=True),
    ),
    GpuCandidate(
        "grouped_dequantized", "float", "experts.grouped_dequantized",
        "all experts' weights dequantized first, then torch's grouped product",
        lambda c, p: Tiles(128, 128, 4), replayable=False,
    ),
    GpuCandidate(
        "grouped", "float", "experts.grouped", "one launch for all experts: weights dequantized in registers, tensor cores",
        lambda c, p: Tiles(c.tile.columns, 16 * c.tile.bands, ordered=c.sort),
    ),
)  # fmt: skip


class GpuOption(NamedTuple):
    """A kernel that could run, and the seconds that it takes: predicted, or measured on the GPU of that name."""

    candidate: GpuCandidate
    config: Any
    seconds: float
    measured: str = ""


class GpuChoice(NamedTuple):
    """The kernel taken (None: torch's own operations, for want of Triton), the next best, and the reasons against all others."""

    taken: GpuOption | None
    others: tuple[GpuOption, ...]
    rejected: tuple[tuple[GpuCandidate, str], ...]

    @property
    def options(self) -> tuple[GpuOption, ...]:
        """All that could run, the best first."""
        return () if self.taken is None else (self.taken, *self.others)


@cache
def why_no_triton() -> str | None:
    """Why there are no kernels for GPUs here; None if there are."""
    wanted = ".".join(map(str, OLDEST_TRITON))
    if find_spec("triton") is None:
        return f"Triton is not installed: install triton>={wanted}"
    try:
        found = version("triton")
    except PackageNotFoundError:
        found = str(import_module("triton").__version__)
    if tuple(int(part) for part in found.split(".")[:2]) < OLDEST_TRITON:
        return f"Triton {found} is too old: install triton>={wanted}"
    return None


def compute_of(compute: str) -> Compute:
    """What "auto" means on a GPU: "float", which is as fast where rows are few and leaves the activations as they are."""
    match check_compute(compute):
        case "int8":
            return "int8"
        case "auto" | "float":
            return "float"
        case asked:
            raise unreachable(asked, "on a GPU compute")


def why_no_sparse_layout(fmt: Format, shape: tuple[int, ...], gpu: Gpu) -> str | None:
    """Why a 2:4 sparse weight [..., N, K] is packed with its zeros for `gpu`; None if it isn't."""
    n, k = prod(shape[:-1]), shape[-1]
    if not n or not k:
        return "there are no codes"
    if fmt.codebook:
        return "codes of a table are packed with their zeros"
    few_rows = Problem("linear", 1, n, k, fmt, torch.bfloat16, sparse=True)
    return why_no_triton() or import_module("halfbyte.kernels.gpu.linear.skinny_hopper").supports(few_rows, gpu)


def packs_code_pairs(fmt: Format, shape: tuple[int, ...], gpu: Gpu) -> bool:
    """Whether a linear weight [N, K] is packed in pairs for `gpu`: where its wgmma takes bytes from registers."""
    hopper = gpu.backend == "cuda" and gpu.capability == (9, 0) and why_no_triton() is None
    return hopper and fmt.bits == 8 and gpu_tiles.geometry(fmt, shape).contiguous


# Configs that could not be compiled or started here, and why: by GPU, kind of problem, number of rows, candidate and config.
_failures: dict[tuple[str, str, int, str, str], str] = {}


def report_failure(problem: Problem, gpu: Gpu, option: GpuOption, reason: str) -> None:
    """`option` does not run here: it will not be chosen again for such a problem, and `explain` gives the reason."""
    _failures[_failure_key(problem, gpu, option.candidate, option.config)] = reason
    choose_gpu.cache_clear()


def _failure_key(problem: Problem, gpu: Gpu, candidate: GpuCandidate, config: object) -> tuple[str, str, int, str, str]:
    return gpu.name, tune.kind(replace(problem, sparse=False)), tune.rows_class(problem.m), candidate.name, str(config)


@lru_cache(maxsize=4096)
def choose_gpu(problem: Problem, gpu: Gpu) -> GpuChoice:
    """The kernel for `problem` (no size 0) on `gpu`. Raises UnsupportedError where none can solve it."""
    linear = problem.op == "linear"
    candidates = [one for one in (GPU_LINEAR if linear else GPU_GROUPED) if problem.sparse or not one.sparse]
    by_torch = linear and problem.compute == "float"  # where there are no kernels
    if (no_triton := why_no_triton()) is not None:
        if not by_torch:
            what, instead = ("compute='int8'", "compute='float'") if linear else ("grouped_linear", "the CPU")
            raise UnsupportedError(f"{what} needs Triton: {no_triton}, or use {instead}")
        return GpuChoice(None, (), tuple((candidate, no_triton) for candidate in candidates))
    options: list[GpuOption] = []
    rejected = []
    for candidate in candidates:
        if candidate.compute != problem.compute and (linear or candidate.compute == "int8"):
            rejected.append((candidate, f"compute={problem.compute!r} was asked for"))
        elif reason := candidate.refuses(problem, gpu):
            rejected.append((candidate, reason))
        else:
            found, failures = _options(candidate, problem, gpu)
            options += found
            rejected += [(candidate, failure) for failure in failures]
    if not options and by_torch:
        return GpuChoice(None, (), tuple(rejected))
    if not options:
        reasons = "; ".join(f"{candidate.name}: {reason}" for candidate, reason in rejected if candidate.compute == problem.compute)
        what = f"{problem.op} of {problem.format} and {problem.dtype} with compute={problem.compute!r}"
        instead = "compute='float'" if linear else "the CPU"
        raise UnsupportedError(f"no kernel on {gpu.name} solves {what} ({reasons}): use {instead}")
    if linear:  # what was measured comes before what was not, however good that looks
        options.sort(key=lambda option: (not option.measured, option.seconds))
    return GpuChoice(options[0], tuple(options[1:]), tuple(rejected))


def _options(candidate: GpuCandidate, problem: Problem, gpu: Gpu) -> tuple[list[GpuOption], list[str]]:
    """Its configs, in its own order where nothing was measured, which it knows better than a prediction; and why some do not run."""
    found: list[GpuOption] = []
    failures: list[str] = []
    times, where = tune.measured(gpu, problem)
    of_candidate = times.get(candidate.name, {})
    if (multiplied := candidate.multiplied(problem)) is not problem:
        options, failures = _options(candidate, multiplied, gpu)
        longer = spreading(problem, gpu)
        for option in options:
            seconds = of_candidate.get(str(option.config))
            found.append(option._replace(seconds=seconds or option.seconds + longer, measured="" if seconds is None else where))
        return found, failures
    guess, configs, known = None, candidate.module.configs(problem, gpu), getattr(candidate.module, "seconds", None)
    if candidate.floats and not of_candidate:
        float_times = tune.measured(gpu, replace(problem, compute="float")).times.get(candidate.floats, {})
        configs = sorted(configs, key=lambda config: float_times.get(str(config), inf))
    for config in configs:
        if failure := _failures.get(_failure_key(problem, gpu, candidate, config)):
            failures.append(f"{config} failed: {failure}")
            continue
        seconds = of_candidate.get(str(config))
        if seconds is None and known is not None and (config_estimate := known(problem, config)) is not None:
            guess = max(config_estimate, reading(problem, gpu))
        elif seconds is None and guess is None:
            guess = predict(problem, gpu, candidate.name, candidate.tiles(config, problem))
        found.append(GpuOption(candidate, config, seconds or guess or 0.0, "" if seconds is None else where))
    return found, failures

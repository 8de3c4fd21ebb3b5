"""Which kernel multiplies on a GPU: the lists GPU_LINEAR, GPU_GROUPED (experts) and GPU_QLINEAR (codes), and `choose_product`.

All candidates read a weight as it is packed, so each number of rows has a choice of its own. (Candidates that do not read 2:4 sparse
weights get the weight with its zeros put back, which another launch writes first.)

Linear layers take the kernel and config with the least time. Times were measured (`tune.py`) if this machine was tuned, or if the package
has a table for its architecture; otherwise `roofline.py` predicts them. Experts and codes take the first candidate that supports them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from importlib.util import find_spec
from math import inf, nan, prod
from types import ModuleType
from typing import Any

import torch

from halfbyte.dispatch import tune
from halfbyte.dispatch.candidate import Candidate, Choice, Option, decide
from halfbyte.dispatch.roofline import Tiles, least_seconds, predict, spread_seconds
from halfbyte.errors import UnsupportedError, unreachable
from halfbyte.formats.spec import Format
from halfbyte.kernels.problem import Compute, Problem, check_compute
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

OLDEST_TRITON = (3, 6)


@dataclass(frozen=True)
class GpuCandidate(Candidate[Problem, Gpu]):
    """A product on GPUs.

    Attributes:
        compute: As in Problem.
        home: Its module in kernels/gpu, which has `supports`, `configs` and `launch`.
        tiles: (config, problem) -> how the config cuts the result.
        replayable: Whether its launches can be replayed (`kernels/gpu/runtime/tape.py`): all are Triton's.
        floats: Of a kernel that quantizes activations and then multiplies floats, the name of the candidate that multiplies; its measured
            times rank the configs of this one.
        sparse: Whether it reads 2:4 sparse weights as they are packed, and no others.
    """

    compute: Compute = field(kw_only=True)
    home: str = field(kw_only=True)
    tiles: Callable[[Any, Problem], Tiles] = field(kw_only=True)
    replayable: bool = True
    floats: str = ""
    sparse: bool = False

    def supports(self, problem: Problem, machine: Gpu) -> str | None:
        """Return the reason why it does not multiply `problem`, or None."""
        if self.compute != problem.compute and (problem.op == "linear" or self.compute == "int8"):
            return f"compute={problem.compute!r} was asked for"
        if problem.format.codebook and self.compute == "int8" and not self.floats:
            return f"it multiplies integers of 4 or 8 bits, not {problem.format}"
        return self.module.supports(self.multiplied(problem), machine)  # type: ignore[no-any-return]

    def configs(self, problem: Problem, machine: Gpu) -> Sequence[object]:
        """Return the configs in the order of its module; with `floats`, by the measured times of that candidate if there are any."""
        configs: Sequence[object] = self.module.configs(problem, machine)
        if self.floats and not tune.measured(machine, problem).times.get(self.name):
            float_times = tune.measured(machine, replace(problem, compute="float")).times.get(self.floats, {})
            return sorted(configs, key=lambda config: float_times.get(str(config), inf))
        return configs

    def cost(self, problem: Problem, machine: Gpu, config: object) -> float:
        """Return the predicted seconds."""
        estimate = self._module_estimate(problem, machine, config)
        return predict(problem, machine, self.name, self.tiles(config, problem)) if estimate is None else estimate

    def _module_estimate(self, problem: Problem, machine: Gpu, config: object) -> float | None:
        """Return the seconds that the module's own model predicts for a config; None where it has no model."""
        model = getattr(self.module, "seconds", None)
        seconds = None if model is None else model(problem, config)
        return None if seconds is None else max(seconds, least_seconds(problem, machine))

    def options(self, problem: Problem, machine: Gpu) -> tuple[list[Option[Any]], list[str]]:
        """Return its configs, those that were measured here or on a GPU like this with their times, and failures of others."""
        measured_times, measured_on = tune.measured(machine, problem)
        times = measured_times.get(self.name, {})
        if (dense := self.multiplied(problem)) is not problem:
            dense_options, failures = self.options(dense, machine)
            predicted = [(option.config, option.seconds + spread_seconds(problem, machine)) for option in dense_options]
        else:
            predicted, failures = self._predicted(problem, machine, times)
        options: list[Option[Any]] = []
        for config, seconds in predicted:
            is_measured = str(config) in times
            options.append(Option(self, config, times[str(config)] if is_measured else seconds, measured_on if is_measured else ""))
        return options, failures

    def _predicted(self, problem: Problem, machine: Gpu, times: Mapping[str, float]) -> tuple[list[tuple[object, float]], list[str]]:
        """Return the configs that have not failed with their predicted times, and the failures of the others.

        `roofline.py` does not tell configs of a kernel apart well: where the module has no model of its own, all have the time of the first
        one, so that they stay in the module's order. Configs with measured `times` need no prediction; theirs is 0.
        """
        predicted: list[tuple[object, float]] = []
        failures: list[str] = []
        latest: float | None = None
        for config in self.configs(problem, machine):
            if failure := _failures.get(_failure_key(problem, machine, self, config)):
                failures.append(f"{config} failed: {failure}")
                continue
            if str(config) not in times:
                estimate = self._module_estimate(problem, machine, config)
                if estimate is not None or latest is None:
                    latest = self.cost(problem, machine, config) if estimate is None else estimate
            predicted.append((config, latest or 0.0))
        return predicted, failures

    @property
    def module(self) -> ModuleType:
        return import_module(f"halfbyte.kernels.gpu.{self.home}")

    def multiplied(self, problem: Problem) -> Problem:
        """Return the problem that the module gets: of a 2:4 sparse weight that it does not read, the one of the weight with its zeros."""
        return replace(problem, sparse=False) if problem.sparse and not self.sparse else problem

    def launch(self, problem: Problem, config: object, *operands: Any) -> None:
        """Multiply. Of a linear layer the first operands are x and the weight's `Views`."""
        multiplied = self.multiplied(problem)
        if multiplied is not problem:
            from halfbyte.kernels.gpu.quantize.spread import spread

            geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=True)
            operands = operands[0], spread(operands[1], geo), *operands[2:]
        self.module.launch(multiplied, config, *operands)


@dataclass(frozen=True)
class QlinearCandidate(GpuCandidate):
    """A product of codes with requantization, of whose times nothing is known."""

    def cost(self, problem: Problem, machine: Gpu, config: object) -> float:
        """Return NaN."""
        return nan


# How configs cut the result, for `predict`. A config is the `Config` of its candidate's module.


def _skinny_hopper_tiles(config: Any, problem: Problem) -> Tiles:
    return Tiles(config.columns, 64 * config.panels, even=True)


def _gemm_hopper_tiles(config: Any, problem: Problem) -> Tiles:
    count = -(-problem.m // config.block_m) * -(-problem.n // (2 * config.rows))
    return Tiles(config.block_m, 2 * config.rows, max(1, config.programs // count), count % config.programs != 0)


def _gemm_int8_hopper_tiles(config: Any, problem: Problem) -> Tiles:
    columns = 64 * config.panels
    count = -(-problem.m // config.block_m) * -(-problem.n // columns)
    return Tiles(config.block_m, columns, max(1, config.programs // count))


def _library_tiles(config: Any, problem: Problem) -> Tiles:
    """Return the tiles that are assumed for torch's own products, whose library chooses them."""
    return Tiles(128, 128, 4)


GPU_LINEAR = (
    GpuCandidate(
        "skinny", "weights dequantized in registers, tensor cores, K shared by blocks",
        compute="float", home="linear.skinny", tiles=lambda c, p: Tiles(c.columns, 16 * c.bands, c.split * c.slices),
    ),
    GpuCandidate(
        "skinny_hopper", "as skinny, fed by TMA, warps specialized, equal shares of all K",
        compute="float", home="linear.skinny_hopper", tiles=_skinny_hopper_tiles,
    ),
    GpuCandidate(
        "gemm_hopper", "weights dequantized in registers, wgmma fed by TMA, warps specialized",
        compute="float", home="linear.gemm_hopper", tiles=_gemm_hopper_tiles,
    ),
    GpuCandidate(
        "dequantized", "the whole weight dequantized first, then torch's product",
        compute="float", home="linear.dequantized", tiles=_library_tiles, replayable=False,
    ),
    GpuCandidate(
        "gemm_int8", "activations quantized to int8 in a first pass, integer tensor cores",
        compute="int8", home="linear.gemm_int8", tiles=lambda c, p: Tiles(c.block_m, c.block_n, c.split),
    ),
    GpuCandidate(
        "skinny_int8_hopper", "activations quantized to int8 in a first pass, then as skinny_hopper",
        compute="int8", home="linear.skinny_int8_hopper", tiles=_skinny_hopper_tiles,
    ),
    GpuCandidate(
        "gemm_int8_hopper", "activations quantized to int8 in a first pass, wgmma fed by TMA",
        compute="int8", home="linear.gemm_int8_hopper",
        tiles=_gemm_int8_hopper_tiles,
    ),
    GpuCandidate(
        "rounded", "activations quantized and made floats again in a first pass, then as gemm_hopper",
        compute="int8", home="linear.rounded", tiles=_gemm_hopper_tiles, floats="gemm_hopper",
    ),
    GpuCandidate(
        "skinny_rounded", "activations quantized and made floats again in a first pass, then as skinny_hopper",
        compute="int8", home="linear.skinny_rounded", tiles=_skinny_hopper_tiles,
        floats="skinny_hopper",
    ),
    GpuCandidate(
        "sparse", "as skinny_hopper, what is kept of a 2:4 sparse weight, sparse tensor cores",
        compute="float", home="linear.skinny_hopper", tiles=_skinny_hopper_tiles, sparse=True,
    ),
    GpuCandidate(
        "sparse_rounded", "activations quantized and made floats again in a first pass, then as sparse",
        compute="int8", home="linear.skinny_rounded", tiles=_skinny_hopper_tiles,
        floats="sparse", sparse=True,
    ),
)  # fmt: skip
GPU_GROUPED = (
    GpuCandidate(
        "grouped_int8_hopper", "one launch for all experts, made for Hopper: TMA, integers in wgmma",
        compute="int8", home="experts.grouped_int8_hopper", tiles=lambda c, p: Tiles(c.block_m, 64 * c.panels, ordered=True),
    ),
    GpuCandidate(
        "grouped_hopper", "one launch for all experts, made for Hopper: TMA, weights from registers into wgmma",
        compute="float", home="experts.grouped_hopper", tiles=lambda c, p: Tiles(c.block_m, 128, ordered=True),
    ),
    GpuCandidate(
        "grouped_dequantized", "all experts' weights dequantized first, then torch's grouped product",
        compute="float", home="experts.grouped_dequantized", tiles=_library_tiles, replayable=False,
    ),
    GpuCandidate(
        "grouped", "one launch for all experts: weights dequantized in registers, tensor cores",
        compute="float", home="experts.grouped", tiles=lambda c, p: Tiles(c.tile.columns, 16 * c.tile.bands, ordered=c.sort),
    ),
)  # fmt: skip


GPU_QLINEAR = (
    QlinearCandidate(
        "qlinear", "codes multiplied as integers, requantized in the same pass",
        compute="int8", home="linear.qlinear", tiles=lambda c, p: Tiles(c.block_m, c.block_n),
    ),
)  # fmt: skip


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


# Configs that could not be compiled or started here -> why: by GPU, kind of problem, number of rows, candidate and config. There are as
# many as this process has tried in vain, until it ends; `report_failure` adds them, and discards the choices from before. Threads may add
# entries at the same time: each sets one key.
_failures: dict[tuple[str, str, int, str, str], str] = {}


def keep_failure(problem: Problem, gpu: Gpu, option: Option[GpuCandidate], reason: str) -> None:
    """Record that `option` does not run here: `options` leaves it out from now on. `choose.report_failure` calls this."""
    _failures[_failure_key(problem, gpu, option.candidate, option.config)] = reason


def _failure_key(problem: Problem, gpu: Gpu, candidate: GpuCandidate, config: object) -> tuple[str, str, int, str, str]:
    return gpu.name, tune.kind(replace(problem, sparse=False)), tune.rows_class(problem.m), candidate.name, str(config)


def choose_product(problem: Problem, gpu: Gpu) -> Choice[Problem, GpuCandidate]:
    """Choose the kernel for `problem`, no size of which is 0: for linear layers the fastest, for experts and codes the first that can.

    Raises:
        UnsupportedError: No kernel solves it, and torch's operations do not, either.
    """
    problem = replace(problem, compute=compute_of(problem.compute))
    linear = problem.op == "linear"
    by_torch = linear and problem.compute == "float"  # torch's operations solve it if no kernel does
    candidates = [one for one in _CANDIDATES[problem.op] if problem.sparse or not one.sparse]
    if (no_triton := why_no_triton()) is not None:
        if not by_torch:
            raise UnsupportedError(_NEEDS_TRITON[problem.op].format(no_triton))
        return Choice(problem, None, (), tuple((candidate, no_triton) for candidate in candidates))
    choice = decide(candidates, problem, gpu, by_time=linear)
    if choice.taken is None and not by_torch:
        reasons = "; ".join(f"{one.name}: {reason}" for one, reason in choice.rejected if one.compute == problem.compute)
        what = f"{problem.op} of {problem.format} and {problem.dtype} with compute={problem.compute!r}"
        instead = "compute='float'" if linear else "the CPU"
        raise UnsupportedError(f"no kernel on {gpu.name} solves {what} ({reasons}): use {instead}")
    return choice


_CANDIDATES: dict[str, tuple[GpuCandidate, ...]] = {"linear": GPU_LINEAR, "grouped_linear": GPU_GROUPED, "qlinear": GPU_QLINEAR}
_NEEDS_TRITON = {
    "linear": "compute='int8' needs Triton: {}, or use compute='float'",
    "grouped_linear": "grouped_linear needs Triton: {}, or use the CPU",
    "qlinear": "qlinear needs Triton: {}, or use the CPU",
}

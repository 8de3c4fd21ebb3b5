"""`choose`: the kernel for a problem on a machine, of whichever kind. Nothing else in halfbyte chooses between kernels.

The lists are in one file for each kind and machine; this one knows which.
"""

from __future__ import annotations

import sys
from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, overload

from halfbyte.dispatch.candidate import Choice, Option
from halfbyte.kernels.layer_kinds import Gelu
from halfbyte.kernels.problem import AttentionProblem, ConvProblem, ExpertsProblem, NormedProblem, Problem
from halfbyte.machine import Gpu

if TYPE_CHECKING:
    from collections.abc import Callable

    from halfbyte.dispatch.cpu import CpuCandidate
    from halfbyte.dispatch.cpu_conv import CpuConvCandidate
    from halfbyte.dispatch.gpu import GpuCandidate
    from halfbyte.dispatch.gpu_conv import GpuConvCandidate
    from halfbyte.dispatch.layers import AttentionCandidate, ExpertsCandidate, NormedCandidate
    from halfbyte.kernels.cpu.codegen.isa import ISA
    from halfbyte.kernels.cpu.linear.linear import LinearKernel


@overload
def choose(problem: Problem, machine: Gpu) -> Choice[Problem, GpuCandidate]: ...
@overload
def choose(problem: ConvProblem, machine: Gpu) -> Choice[ConvProblem, GpuConvCandidate]: ...
@overload
def choose(problem: ConvProblem, machine: ISA) -> Choice[ConvProblem, CpuConvCandidate]: ...
@overload
def choose(problem: AttentionProblem, machine: Gpu | ISA) -> Choice[AttentionProblem, AttentionCandidate]: ...
@overload
def choose(problem: ExpertsProblem, machine: Gpu | ISA) -> Choice[ExpertsProblem, ExpertsCandidate]: ...
@overload
def choose(problem: NormedProblem, machine: Gpu) -> Choice[NormedProblem, NormedCandidate]: ...
@overload
def choose(problem: Problem, machine: ISA) -> Choice[Problem, CpuCandidate]: ...
def choose(problem: object, machine: Gpu | ISA) -> object:
    """Choose the kernel for a problem, which has something to compute.

    Args:
        problem: What to compute.
        machine: A GPU, present or not, or the instruction set of a CPU.

    Returns:
        What is taken and its config, what else could run, and why the others may not. The same object for equal arguments, until a kernel
        fails or is measured.

    Raises:
        UnsupportedError: No kernel solves it there, and torch's own operations do not, either.
    """
    return _choose(problem, machine)


def _home(problem: object, machine: Gpu | ISA) -> Callable[[object, Gpu | ISA], object]:
    """The function that chooses for this kind of problem and machine."""
    home = next(home for kind, home in _HOMES if isinstance(problem, kind))
    module, name = home[0 if isinstance(machine, Gpu) else 1].split(":")
    chooser: Callable[[object, Gpu | ISA], object] = getattr(import_module(f"halfbyte.dispatch.{module}"), name)
    return chooser


# The functions that choose on GPUs and on CPUs, by the kind of problem. Those of CPUs import llvmlite: they are imported when needed.
_HOMES: tuple[tuple[type, tuple[str, str]], ...] = (
    (Problem, ("gpu:choose_product", "cpu:choose_product")),
    (ConvProblem, ("gpu_conv:choose_conv", "cpu_conv:choose_conv")),
    (AttentionProblem, ("layers:choose_attention", "layers:choose_cpu_attention")),
    (ExpertsProblem, ("layers:choose_experts", "layers:choose_cpu_experts")),
    (NormedProblem, ("layers:choose_normed", "")),
)


@lru_cache(maxsize=4096)
def _choose(problem: object, machine: Gpu | ISA) -> object:
    return _home(problem, machine)(problem, machine)


def cpu_kernel(problem: Problem, *, gelu: Gelu = "") -> LinearKernel:
    """Return the compiled kernel of a product on this CPU, for any number of rows, followed by GELU if `gelu`.

    Raises ArgumentError for an unknown compute."""
    from halfbyte.kernels.cpu.codegen.isas import current

    choice = choose(problem, current())
    return choice.options[0].candidate.kernel(choice.problem, gelu=gelu)


def forget() -> None:
    """Choose anew from now on: other times are known."""
    _choose.cache_clear()
    if (products := sys.modules.get("halfbyte.dispatch.gpu")) is not None:
        products.choose_product.cache_clear()


def report_failure(problem: Problem, gpu: Gpu, option: Option[GpuCandidate], reason: str) -> None:
    """`option` does not run here: it will not be chosen again for such a problem, and `explain` gives the reason."""
    from halfbyte.dispatch.gpu import keep_failure

    keep_failure(problem, gpu, option, reason)
    forget()

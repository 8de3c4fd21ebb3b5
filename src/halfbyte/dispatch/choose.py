"""`choose`: the kernel for a problem on a machine, of whichever kind. Nothing else in halfbyte chooses between kernels.

    problem                        on a GPU      on a CPU
    Problem, a product             gpu.py        cpu.py
    ConvProblem                    gpu_conv.py   cpu_conv.py
    AttentionProblem               layers.py     layers.py
    ExpertsProblem                 layers.py     layers.py
    NormedProblem, norm + product  layers.py     -

Each of these files has a list of candidates (`candidate.py`) for each kind of problem, of which one is taken. `ops` runs it, `explain.py`
prints why.
"""

from __future__ import annotations

from functools import lru_cache
from importlib import import_module
from typing import TYPE_CHECKING, overload

from halfbyte.dispatch.candidate import Choice, Option, decide
from halfbyte.errors import UnsupportedError, lookup
from halfbyte.kernels.layer_kinds import Gelu
from halfbyte.kernels.problem import AttentionProblem, ConvProblem, ExpertsProblem, NormedProblem, Problem
from halfbyte.machine import Gpu

if TYPE_CHECKING:
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
    """Choose the kernel for a problem.

    Args:
        problem: What to compute; none of its sizes is 0.
        machine: A GPU, present or not, or the instruction set of a CPU.

    Returns:
        The kernel and config to run, the others that could, and the reasons against the rest. The same object for equal arguments, until
        `forget`.

    Raises:
        UnsupportedError: Neither a kernel nor torch's own operations solve it there.
    """
    return _choose(problem, machine)


# On GPUs and on CPUs, by the kind of problem: a function that chooses, or the list of candidates of which the first that supports a problem
# is taken. They are imported when needed, as those of CPUs import llvmlite.
_CHOOSERS: dict[type, tuple[str, str | None]] = {
    Problem: ("gpu:choose_product", "cpu:choose_product"),
    ConvProblem: ("gpu_conv:choose_conv", "cpu_conv:choose_conv"),
    AttentionProblem: ("layers:GPU_ATTENTION", "layers:CPU_ATTENTION"),
    ExpertsProblem: ("layers:choose_experts", "layers:CPU_EXPERTS"),
    NormedProblem: ("layers:choose_normed", None),
}


@lru_cache(maxsize=4096)
def _choose(problem: object, machine: Gpu | ISA) -> object:
    on_gpu, on_cpu = lookup(_CHOOSERS, type(problem), "the kind of problem")
    chooser = on_gpu if isinstance(machine, Gpu) else on_cpu
    if chooser is None:
        raise UnsupportedError(f"{type(problem).__name__} has kernels on GPUs alone, got {machine.name}: compute its parts there")
    module, name = chooser.split(":")
    found = getattr(import_module(f"halfbyte.dispatch.{module}"), name)
    return decide(found, problem, machine) if isinstance(found, tuple) else found(problem, machine)


def cpu_kernel(problem: Problem, *, gelu: Gelu = "") -> LinearKernel:
    """Return the compiled kernel of a product on this CPU.

    Args:
        problem: The product; the kernel is for any number of rows.
        gelu: The GELU that follows it; "": none.

    Raises:
        ArgumentError: The problem's compute is unknown.
    """
    from halfbyte.kernels.cpu.codegen.isas import current

    choice = choose(problem, current())
    return choice.options[0].candidate.kernel(choice.problem, gelu=gelu)


def forget() -> None:
    """Discard all memoized choices: times or failures that they depend on have changed."""
    _choose.cache_clear()


def report_failure(problem: Problem, gpu: Gpu, option: Option[GpuCandidate], reason: str) -> None:
    """Record that `option` does not run on this GPU: `choose` passes over it for such problems, and `explain` prints `reason`."""
    from halfbyte.dispatch.gpu import keep_failure

    keep_failure(problem, gpu, option, reason)
    forget()

"""Which kernel solves a linear layer on a CPU, or one of experts: the candidates, best first, and why each may not be taken.

Experts are linear layers that run together, in one parallel region: the kernel is that of one.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, cast

import torch

from halfbyte.dispatch.candidate import Candidate, Choice, decide
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.tuning import Tiling
from halfbyte.kernels.cpu.linear.linear import LinearKernel, linear_kernel
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.kernels.layer_kinds import Gelu
from halfbyte.kernels.problem import Compute, Problem, check_compute
from halfbyte.layouts import cpu_tiles


@dataclass(frozen=True)
class CpuCandidate(Candidate[Problem, ISA]):
    """A product on CPUs.

    Attributes:
        compute: As in Problem.
        why_not: The reason why the dot products of the name are missing, or do not pay, whatever compute was asked for.
    """

    compute: Compute = field(kw_only=True)

    @property
    def inner(self) -> Inner:
        """The kind of dot products that the kernel consists of."""
        return cast(Inner, self.name)

    def supports(self, problem: Problem, machine: ISA) -> str | None:
        """Return the reason why it does not multiply `problem`, or None."""
        if (reason := self.why_not(problem, machine)) is not None:
            return reason
        return None if problem.compute in ("auto", self.compute) else f"compute={problem.compute!r} was asked for"

    def configs(self, problem: Problem, machine: ISA) -> Sequence[Tiling]:
        """Return how the kernel cuts outputs into tiles; for experts, those of the expert with the most rows."""
        rows = max(1, -(-problem.m // problem.experts))
        geo = cpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=problem.sparse)
        return (machine.for_rows(rows, self.inner).tuning.tile(rows, self.inner, geo, codes=problem.dtype == torch.int8),)

    def kernel(self, problem: Problem, *, gelu: Gelu = "") -> LinearKernel:
        """Return the compiled kernel, followed by GELU if `gelu`. It is one for all numbers of rows, and finds their tiles itself."""
        sizes = problem.format, problem.n, problem.k, problem.dtype
        return linear_kernel(*sizes, self.inner, problem.activation, gelu=gelu, sparse=problem.sparse)

    def launch(self, problem: Problem, config: object, *operands: Any) -> Any:
        """Multiply: operands of `LinearKernel`."""
        return self.kernel(problem)(*operands)


def _why_not_bf16(problem: Problem, isa: ISA) -> str | None:
    if not isa.bf16_dot:
        return f"{isa.name} has no dot product of bfloat16"
    if not isa.tuning.bf16_pays:
        return "this CPU's dot products of bfloat16 take longer than float32 multiply-adds"
    if problem.dtype != torch.bfloat16:
        return f"it would round {str(problem.dtype).removeprefix('torch.')} activations to bfloat16"
    if problem.format.bits != 4:
        return "8-bit codes have no quick way to bfloat16"
    return None


_ADVANTAGE = "it does more products with one instruction"
# In the order of preference. compute="auto" takes the first that supports the problem, "float" and "int8" the first of that compute.
CPU_LINEAR = (
    CpuCandidate(
        "int8", "activations quantized to int8 on the fly, integer dot products", _ADVANTAGE, compute="int8"
    ),
    CpuCandidate(
        "bf16", "weights dequantized in registers to bfloat16, bfloat16 dot products", _ADVANTAGE, compute="float", why_not=_why_not_bf16
    ),
    CpuCandidate(
        "float", "weights dequantized in registers, float32 fused multiply-adds", compute="float",
        why_not=lambda problem, isa: "it has no products of codes" if problem.dtype == torch.int8 else None,
    ),
)  # fmt: skip


def choose_product(problem: Problem, isa: ISA) -> Choice[Problem, CpuCandidate]:
    """Choose the kernel for `problem`. Raises ArgumentError for an unknown compute."""
    check_compute(problem.compute)
    choice = decide(CPU_LINEAR, problem, isa)
    if choice.taken is None:  # "int8" supports everything, "float" all but codes
        raise UnsupportedError(f"compute={problem.compute!r} has no kernel on a CPU: this is a fault in halfbyte, please report it")
    return replace(choice, problem=replace(problem, compute=choice.taken.candidate.compute))

"""Which kernel solves a linear layer on a CPU: the literal list of candidates, best first, and why each may not be taken."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfbyte.errors import UnsupportedError
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.linear.linear import LinearKernel, linear_kernel
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.kernels.problem import check_compute


@dataclass(frozen=True, slots=True)
class Candidate:
    """One way to multiply. `refuses(format, dtype, isa)` says why it can't be taken, or None."""

    inner: Inner
    compute: str
    summary: str
    refuses: Callable[[Format, torch.dtype, ISA], str | None]


class Choice(NamedTuple):
    """The kernel taken, and the reason against each of the others."""

    taken: Candidate
    rejected: tuple[tuple[Candidate, str], ...]


def _bf16_refuses(fmt: Format, dtype: torch.dtype, isa: ISA) -> str | None:
    if not isa.bf16_dot:
        return f"{isa.name} has no dot product of bfloat16"
    if not isa.tuning.bf16_pays:
        return "this CPU's dot products of bfloat16 take longer than float32 multiply-adds"
    if dtype != torch.bfloat16:
        return f"it would round {str(dtype).removeprefix('torch.')} activations to bfloat16"
    if fmt.bits != 4:
        return "8-bit codes have no quick way to bfloat16"
    return None


# In the order of preference. "auto" takes the first that does not refuse, "float" and "int8" the first of that compute.
CPU_LINEAR = (
    Candidate("int8", "int8", "activations quantized to int8 on the fly, integer dot products", lambda *_: None),
    Candidate("bf16", "float", "weights dequantized in registers to bfloat16, bfloat16 dot products", _bf16_refuses),
    Candidate("float", "float", "weights dequantized in registers, float32 fused multiply-adds", lambda *_: None),
)


def choose_linear(fmt: Format, dtype: torch.dtype, compute: str, isa: ISA) -> Choice:
    """The kernel for a linear layer of `fmt` weights and `dtype` activations. Raises ArgumentError for an unknown compute."""
    check_compute(compute)
    taken, rejected = None, []
    for candidate in CPU_LINEAR:
        reason = candidate.refuses(fmt, dtype, isa)
        if reason is None and compute not in ("auto", candidate.compute):
            reason = f"compute={compute!r} was asked for"
        elif reason is None and taken is not None:
            reason = f"{taken.inner} comes first: it does more products with one instruction"
        if reason is None:
            taken = candidate
        else:
            rejected.append((candidate, reason))
    if taken is None:  # the plain candidates of both computes refuse nothing
        raise UnsupportedError(f"compute={compute!r} has no kernel on a CPU: this is a fault in halfbyte, please report it")
    return Choice(taken, tuple(rejected))


def kernel_for(
    format: str, n: int, k: int, dtype: torch.dtype, compute: str, activation: str, *, gelu: bool = False, sparse: bool = False
) -> LinearKernel:
    """The kernel of a linear layer with a weight [n, k], packed as a 2:4 sparse one if `sparse`, on this CPU, followed by GELU if `gelu`.

    Raises as `choose_linear`."""
    fmt = as_format(format)
    inner = choose_linear(fmt, dtype, compute, current()).taken.inner
    return linear_kernel(fmt, n, k, dtype, inner, activation, gelu=gelu, sparse=sparse)

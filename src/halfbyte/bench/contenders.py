"""The contenders of the CPU benchmark: halfbyte in the requested formats, and torch's dense products. All others are in `benchmarks/`."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte import ops
from halfbyte.bench.workload import Built, Workload
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.cpu.codegen.isas import current

Peak = Literal["dot_peak", "fma_peak"]


@dataclass(frozen=True)
class Arithmetic:
    """The arithmetic of a contender.

    error   x [M, K] -> the bound of ‖y - reference‖ / ‖reference‖
    peak    the ceiling of its multiplications; None where none is probed
    """

    error: Callable[[Tensor], float]
    peak: Peak | None


def step_error(levels: float, x: Tensor) -> float:
    """Each activation is off by at most half a step of max|x| / levels, whatever block the scale spans."""
    return float(x.abs().max() / x.square().mean().sqrt()) / (2 * levels)


# A sum of K products, each rounded to 24 bits: a random walk of sqrt(K) half units, times 8 for the order of summing.
_FLOAT32 = Arithmetic(lambda x: 8 * math.sqrt(x.shape[-1]) * 2**-24, "fma_peak")
# Weights, activations and results rounded to 8 bits of mantissa, at most 2^-9 each, which rarely point the same way.
_BFLOAT16 = Arithmetic(lambda x: 2**-8, None)
INT8 = Arithmetic(partial(step_error, 127), "dot_peak")
# Activations and results in bfloat16, products in float32; halfbyte's `float` may do so where the CPU multiplies bfloat16 faster.
FLOAT = Arithmetic(_BFLOAT16.error, "fma_peak")


@dataclass(frozen=True)
class Contender:
    """One row of the table: `build` prepares its weights; `weights` describes how they are stored."""

    name: str
    label: str
    weights: str
    arithmetic: Arithmetic
    build: Callable[[Workload], Built]
    peer: bool = True


def halfbyte_linear(work: Workload, format: str, compute: str, dtype: torch.dtype) -> Built:
    """`ops.linear` on activations of `dtype`."""
    slab = work.codes(format)
    copy_bytes = work.take(slab, 0).nbytes
    weights = [ops.pack(work.take(slab, copy)) for copy in range(work.copies(copy_bytes))]

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        x = x.to(dtype)
        return lambda: (ops.linear(x, weight, compute=compute) for weight in weights)

    return Built(slab.dequantize(torch.float64), copy_bytes, len(weights), bind, dtype)


def dense(work: Workload, dtype: torch.dtype) -> Built:
    """torch's `linear` on weights of `dtype`."""
    slab = work.slab.to(dtype)
    copy_bytes = work.n * work.k * dtype.itemsize
    weights = [slab[work.rows(copy)] for copy in range(work.copies(copy_bytes))]

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        x = x.to(dtype)
        return lambda: (functional.linear(x, weight) for weight in weights)

    return Built(slab.double(), copy_bytes, len(weights), bind, dtype)


PEERS = (
    Contender("torch_fp32", "torch fp32", "float32", _FLOAT32, partial(dense, dtype=torch.float32)),
    Contender("torch_bf16", "torch bf16", "bfloat16", _BFLOAT16, partial(dense, dtype=torch.bfloat16)),
)
# The ways in which halfbyte multiplies. The rate of bfloat16 products is not probed.
_ARITHMETIC = {"": INT8, "float": FLOAT, "bf16": _BFLOAT16}


def contender(name: str, peers: Sequence[Contender] = PEERS) -> Contender:
    """The contender of a name: one of `peers`, or `halfbyte:<format>`, with `:float` behind it for float compute, `:bf16` for that on
    bfloat16.

    Raises ArgumentError or FormatError if there is none.
    """
    if (found := next((peer for peer in peers if peer.name == name), None)) is not None:
        return found
    package, _, rest = name.partition(":")
    format, _, compute = rest.partition(":")
    if package != "halfbyte" or compute not in _ARITHMETIC:
        ways = ", ".join(f"halfbyte:<format>{':' if way else ''}{way}" for way in _ARITHMETIC)
        raise ArgumentError(f"there is no contender {name!r}: use one of {', '.join(peer.name for peer in peers)}, {ways}")
    fmt, arithmetic = str(as_format(format)), _ARITHMETIC[compute]
    dtype = torch.bfloat16 if compute == "bf16" else torch.float32
    build = partial(halfbyte_linear, format=fmt, compute="float" if compute else "auto", dtype=dtype)
    return Contender(name, " ".join(filter(None, ("halfbyte", fmt, compute))), fmt, arithmetic, build, peer=False)


def select(formats: Sequence[str], names: Sequence[str], peers: Sequence[Contender] = PEERS) -> list[Contender]:
    """halfbyte in these formats, and those of `peers` with these names. Raises ArgumentError or FormatError for an unknown name."""
    ways = ("", ":float", ":bf16") if current().bf16_dot and current().tuning.bf16_pays else ("", ":float")
    halfbyte_names = [f"halfbyte:{fmt}{way}" for fmt in formats for way in ways]
    return [contender(name, peers) for name in (*halfbyte_names, *names)]

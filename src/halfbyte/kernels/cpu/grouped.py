"""y [P, N]: y[p] = x[p / share] · W[id[p]]ᵀ + bias[id[p]] on the CPU: rows sorted by expert, and one parallel region for all experts.

Each expert that has rows is a linear layer as `linear.py` plans it, with a block of arguments of its own. Threads go through the blocks
one after the other and draw work from each; there is one barrier in all, between the phases of `driver.py`.
"""

from __future__ import annotations

import ctypes
import math
from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu import jit, linear, runtime
from halfbyte.kernels.cpu.arguments import GROUPED, LINEAR
from halfbyte.kernels.cpu.ir import Function, Module
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.kept import Kept
from halfbyte.kernels.cpu.linear import LinearKernel

_BLOCK_BYTES = 8 * len(LINEAR.fields)
_INFINITE = float("inf")


def build(isa: ISA) -> Module:
    """A module with the two phases of many blocks of arguments."""
    module = Module(isa.attributes)
    for phase in ("first_phase", "second_phase"):
        _each(module.function(phase, ["ptr", "i64", "i64"]), phase)
    return module


def _each(f: Function, phase: str) -> None:
    args, thread, threads = f.parameters
    for i in f.loop(GROUPED.load(args, "count")):
        block = GROUPED.load(args, "blocks", "ptr") + i * _BLOCK_BYTES
        # One row is always the same thread's: that each block begins with another thread shares the rows of many blocks.
        f.call_pointer(LINEAR.load(block, phase, "ptr"), block, (thread + i) % threads, threads)


class _Part(NamedTuple):
    """Rows `start` … `start + rows` - 1 of the sorted pairs, which one expert multiplies."""

    expert: int
    start: int
    rows: int


_arguments: Kept[tuple[bytes, int]] = Kept()


def run(kernel: LinearKernel, x: Tensor, ids: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    """x [P / share, K] contiguous, ids [P] of experts that there are, weight uint8 [E * bytes of a matrix], bias float32 [E, N] -> [P, N].

    `kernel` is that of one expert, whose conditions hold.
    """
    numbers = ids.tolist()
    pairs, share = len(numbers), len(numbers) // len(x)
    order = sorted(range(pairs), key=numbers.__getitem__)
    parts = _parts([numbers[pair] for pair in order])
    out = torch.empty(pairs, kernel.geometry.n, dtype=kernel.out_dtype)
    apart = len(parts) == pairs  # each expert has one row: where that is does not matter
    rows = x if apart else x[torch.tensor(order) // share]
    threads = max(1, min(runtime.threads(), pairs * kernel.geometry.n * kernel.geometry.k // linear.WORK_A_THREAD))
    at = [order[part.start] if apart else part.start for part in parts]
    first = 0
    for some in _passes(parts):
        last = first + len(some)
        places = [(i // share if apart else i, i) for i in at[first:last]]
        _pass(kernel, some, places, (rows, weight, bias, out), threads)
        first = last
    if not apart:
        sorted_out, out = out, torch.empty_like(out)
        out[torch.tensor(order)] = sorted_out
    return out if kernel.out_dtype == kernel.dtype else out.to(kernel.dtype)


def _parts(experts: Sequence[int]) -> list[_Part]:
    """Of sorted pairs, whose experts these are; none has more rows than one pass takes."""
    parts, start = list[_Part](), 0
    for expert, group in groupby(experts):
        rows, most = sum(1 for _ in group), linear.ROWS_A_PASS
        parts += [_Part(expert, start + done, min(most, rows - done)) for done in range(0, rows, most)]
        start += rows
    return parts


def _passes(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Parts that together have as many rows as one pass takes, so that scratch memory does not grow with the number of rows."""
    some, rows = list[_Part](), 0
    for part in parts:
        if rows + part.rows > linear.ROWS_A_PASS:
            yield some
            some, rows = [], 0
        some.append(part)
        rows += part.rows
    yield some


def _pass(
    kernel: LinearKernel,
    parts: Sequence[_Part],
    places: Sequence[tuple[int, int]],
    operands: tuple[Tensor, Tensor, Tensor | None, Tensor],
    threads: int,
) -> None:
    """`places`: the first rows of x and of out of each part."""
    x, weight, bias, out = operands
    plans = [
        _arguments.get((kernel.number, part.rows, threads), lambda m=part.rows: _plan(kernel, m, threads))  # type: ignore[misc]
        for part in parts
    ]
    _memory, scratch = linear.thread.memory(sum(size for _, size in plans))
    blocks = ctypes.create_string_buffer(b"".join(plan for plan, _ in plans), len(parts) * _BLOCK_BYTES)
    row_bytes, out_bytes, n = x.shape[1] * x.element_size(), out.shape[1] * out.element_size(), out.shape[1]
    px, pw, py, pb = x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    for i, (part, (row, place), (_, size)) in enumerate(zip(parts, places, plans, strict=True)):
        linear.pack_call(
            blocks,
            i * _BLOCK_BYTES + linear.CALL,
            0,
            px + row * row_bytes,
            row_bytes,
            scratch,
            pw + part.expert * kernel.nbytes,
            pb and pb + part.expert * n * 4,
            py + place * out_bytes,
            0,
            -_INFINITE,
            _INFINITE,
        )
        scratch += size
    phases = jit.load("grouped", build, kernel.isa)
    table = {"openmp": runtime.openmp_address(), "blocks": ctypes.addressof(blocks), "count": len(parts), **phases}
    arguments = GROUPED.buffer({name: value for name, value in table.items() if name in GROUPED.fields})
    kernel.run(ctypes.addressof(arguments), threads)


def _plan(kernel: LinearKernel, m: int, threads: int) -> tuple[bytes, int]:
    """The arguments of one part, and the bytes of scratch memory that it takes."""
    buffer, size = kernel.arguments(m, threads)
    return buffer.raw, math.ceil(size / 64) * 64

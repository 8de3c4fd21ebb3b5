"""y [P, N]: y[p] = x[p // share] · W[id[p]]ᵀ + bias[id[p]] on the CPU: rows sorted by expert, and one parallel region for all experts.

`ops/grouped.py` calls `run`. Each expert that has rows is a linear layer as `linear.py` plans it, with a LINEAR block of its own. Threads
go through the blocks one after the other and draw work from each; there is one barrier, between the phases of `driver.py`, for each pass of
ROWS_A_PASS rows.
"""

from __future__ import annotations

import ctypes
import functools
from collections import Counter
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.arguments import GROUPED, LINEAR
from halfbyte.kernels.cpu.codegen.ir import Function, Module
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import run as run_native
from halfbyte.kernels.cpu.linear import linear
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.layouts.base import round_up

_BLOCK_BYTES = LINEAR.nbytes
_pack = GROUPED.struct().pack
_INFINITE = float("inf")


def build(isa: ISA) -> Module:
    """Return a module with the two phases of a GROUPED block: each runs that phase of all its LINEAR blocks."""
    module = Module(isa.attributes)
    for phase in ("first_phase", "second_phase"):
        _each(module.function(phase, ["ptr", "i64", "i64"]), phase)
    return module


def _each(f: Function, phase: str) -> None:
    args, thread, threads = f.parameters
    for i in f.loop(GROUPED.load(args, "count")):
        block = GROUPED.load(args, "blocks", "ptr") + i * _BLOCK_BYTES
        # The row of a block with one row is the first thread's: each block begins with another thread, so that all have some.
        f.call_pointer(LINEAR.load(block, phase, "ptr"), block, (thread + i) % threads, threads)


class _Part(NamedTuple):
    """Consecutive rows that one expert multiplies.

    Attributes:
        expert: Its number.
        x_row, out_row: The first of the rows in x, and in the result.
        rows: Their number.
    """

    expert: int
    x_row: int
    out_row: int
    rows: int


@functools.cache
def _phases(isa: ISA) -> tuple[int, int]:
    """Return the addresses of both phases."""
    functions = jit.load("grouped", build, isa)
    return functions["first_phase"], functions["second_phase"]


def run(kernel: LinearKernel, x: Tensor, ids: Sequence[int], weight: Tensor, bias: Tensor | None) -> Tensor:
    """Multiply each row by the matrix of its expert.

    Args:
        kernel: That of one expert; `linear.py` states its conditions.
        x: [P / share, K], contiguous: a row for `share` consecutive ids, those of one token.
        ids: P > 0 experts, each below E.
        weight: uint8 [E * kernel.nbytes].
        bias: [E, N] float32.

    Returns:
        [P, N].
    """
    routed_rows, share = len(ids), len(ids) // len(x)
    out = torch.empty(routed_rows, kernel.geometry.n, dtype=kernel.out_dtype, device="cpu")
    if len(set(ids)) == routed_rows:  # each row is a part: none is moved
        parts = [_Part(expert, i // share, i, 1) for i, expert in enumerate(ids)]
        _run(kernel, parts, (x, weight, bias, out))
    else:
        order = sorted(range(routed_rows), key=ids.__getitem__)
        places, by_expert = torch.tensor(order, device="cpu"), torch.empty_like(out)
        _run(kernel, _sorted_parts([ids[i] for i in order]), (x[places // share], weight, bias, by_expert))
        out[places] = by_expert
    return out if kernel.out_dtype == kernel.dtype else out.to(kernel.dtype)


def _sorted_parts(experts: Sequence[int]) -> list[_Part]:
    """Cut routed rows, which are sorted by these experts, into parts of at most the rows of one pass."""
    parts, start = list[_Part](), 0
    for expert, rows in Counter(experts).items():
        for done in range(0, rows, linear.ROWS_A_PASS):
            parts.append(_Part(expert, start + done, start + done, min(linear.ROWS_A_PASS, rows - done)))
        start += rows
    return parts


def _run(kernel: LinearKernel, parts: Sequence[_Part], operands: tuple[Tensor, Tensor, Tensor | None, Tensor]) -> None:
    """Multiply the parts, in passes. `operands`: x, weight, bias, out."""
    geo, routed_rows = kernel.geometry, len(operands[3])
    threads = runtime.useful_threads(routed_rows * geo.n * geo.k, linear.WORK_A_THREAD)
    for some in _passes(parts) if routed_rows > linear.ROWS_A_PASS else (parts,):
        _pass(kernel, some, operands, threads)


def _passes(parts: Sequence[_Part]) -> Iterator[list[_Part]]:
    """Yield parts that together have at most ROWS_A_PASS rows, so that scratch memory does not grow with the number of rows."""
    some, rows = list[_Part](), 0
    for part in parts:
        if rows + part.rows > linear.ROWS_A_PASS:
            yield some
            some, rows = [], 0
        some.append(part)
        rows += part.rows
    yield some


def cached_plan(kernel: LinearKernel, rows: int, threads: int) -> tuple[bytes, int]:
    """Return the arguments of a part of so many rows, and its bytes of scratch memory, a multiple of 64; cached for each Python thread."""
    key = kernel.number, rows, threads
    plan = PLANS.experts.get(key)
    if plan is None:
        buffer, size = kernel.arguments(rows, threads)
        plan = PLANS.experts[key] = buffer.raw, round_up(size, 64)
    return plan


def _pass(kernel: LinearKernel, parts: Sequence[_Part], operands: tuple[Tensor, Tensor, Tensor | None, Tensor], threads: int) -> None:
    """Multiply the parts of one pass in one native call."""
    x, weight, bias, out = operands
    plans = [cached_plan(kernel, part.rows, threads) for part in parts]
    _memory, scratch = PLANS.memory(sum(size for _, size in plans))
    blocks = ctypes.create_string_buffer(b"".join(plan for plan, _ in plans), len(parts) * _BLOCK_BYTES)
    row_bytes, out_bytes, n = x.shape[1] * x.element_size(), out.shape[1] * out.element_size(), out.shape[1]
    px, pw, py, pb = x.data_ptr(), weight.data_ptr(), out.data_ptr(), 0 if bias is None else bias.data_ptr()
    for i, (part, (_, size)) in enumerate(zip(parts, plans, strict=True)):
        linear.pack_call(
            blocks,
            i * _BLOCK_BYTES + linear.CALL,
            0,
            px + part.x_row * row_bytes,
            row_bytes,
            scratch,
            pw + part.expert * kernel.nbytes,
            pb and pb + part.expert * n * 4,
            py + part.out_row * out_bytes,
            0,
            -_INFINITE,
            _INFINITE,
        )
        scratch += size
    # Arguments go by position, as names take a microsecond.
    arguments = _pack(*_phases(kernel.isa), runtime.openmp_address(), 0, ctypes.addressof(blocks), len(parts))
    run_native(ctypes.create_string_buffer(arguments, len(arguments)), threads)

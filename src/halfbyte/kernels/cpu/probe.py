"""The ceilings of this machine, measured: what memory delivers and what the arithmetic units can do.

A kernel's time is judged against these, measured in the same run: shared and virtual machines drift.
"""

from __future__ import annotations

import functools
import time

import torch

from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.arguments import PROBE
from halfbyte.kernels.cpu.codegen.ir import Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_amx import COLUMN_BYTES, ROWS, AMXTiles, Register
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.machine import machine
from halfbyte.memory import in_huge_pages

_ACCUMULATORS = 12  # independent accumulators: more than latency times units on the CPUs at hand
_TILE_ACCUMULATORS = 4
_AHEAD = 8192
_PIECE = 1 << 20
_LEAST_BUFFER, _MOST_BUFFER = 1 << 28, 1 << 30


def build(isa: ISA) -> Module:
    """A module with three phases: read, dots, fmas."""
    module = Module(isa.attributes)
    _build_read(module, isa)
    if isinstance(isa.matrix, AMXTiles):
        _build_tile_products(module, isa.matrix)
    else:
        _build_arithmetic(module, isa, "dots")
    _build_arithmetic(module, isa, "fmas")
    return module


def _build_read(module: Module, isa: ISA) -> None:
    """Reads the buffer, whose size is a multiple of _PIECE; threads draw pieces, as the kernels' threads draw panels."""
    f = module.function("read", ["ptr", "i64", "i64"])
    args, thread, _ = f.parameters
    pieces, width = PROBE.load(args, "size") // _PIECE, 4 * isa.lanes
    sums = [f.variable(f.value(isa.ints, 0)) for _ in range(512 // width)]
    for piece in f.draw(lambda: f.fetch_add(args + PROBE.offset("counter")), pieces):
        buffer = PROBE.load(args, "buffer", "ptr") + piece * _PIECE
        for i in f.loop(_PIECE, step=512):
            for line in range(0, 512, 64):
                f.prefetch(buffer + i + (_AHEAD + line))
            for j, total in enumerate(sums):
                total.value = total.value + (buffer + i).load(isa.ints, j * width, width)
    out = PROBE.load(args, "out", "ptr") + thread * 64
    out.store(functools.reduce(Value.__add__, (s.value for s in sums)))


def _build_arithmetic(module: Module, isa: ISA, name: str) -> None:
    """`size` rounds of _CHAINS integer dot products (of 4-bit weights) or fused multiply-adds."""
    f = module.function(name, ["ptr", "i64", "i64"])
    args, thread, _ = f.parameters
    buffer, out = PROBE.load(args, "buffer", "ptr"), PROBE.load(args, "out", "ptr") + thread * 64
    if name == "dots":
        weights = buffer.load(isa.quads, 0, 64) & 15
        sums = [f.variable(isa.start(f, f.value(isa.ints, 0), 4)) for _ in range(_ACCUMULATORS)]
    else:
        x, y = buffer.load(isa.floats, 0, 64), buffer.load(isa.floats, 64, 64)
        sums = [f.variable(f.value(isa.floats, 0.0)) for _ in range(_ACCUMULATORS)]
    for _ in f.loop(PROBE.load(args, "size")):
        for i, total in enumerate(sums):
            if name == "fmas":
                total.value = f.fma(x, y, total.value)
            else:  # operands of their own, read anew each time: LLVM would compute equal products once
                total.value = isa.product(f, total.value, weights, buffer.load(isa.ints, 64 * i, 64))
        f.fence()
    out.store(functools.reduce(Value.__add__, (s.value for s in sums)))


def _build_tile_products(module: Module, isa: AMXTiles) -> None:
    """`size` rounds of products of whole tiles, of zeros."""
    f = module.function("dots", ["ptr", "i64", "i64"])
    isa.configure(f, [Register(COLUMN_BYTES, ROWS)] * 8)
    for _ in f.loop(PROBE.load(f.parameters[0], "size")):
        for total in range(_TILE_ACCUMULATORS):
            isa.tile_product(f, total, 6, 7)
    isa.release(f)


@functools.cache
def _phases() -> dict[str, int]:
    return jit.load("probe", build, current())


@functools.cache
def _buffer(size: int) -> torch.Tensor:
    return in_huge_pages(torch.empty(size // 4, dtype=torch.int32, device="cpu")).random_(100)  # as weights are


def free_buffers() -> None:
    """Free what is read, up to 1 GB."""
    _buffer.cache_clear()


def _seconds(phase: str, buffer: torch.Tensor, size: int, threads: int) -> float:
    out = torch.zeros(threads * 16, dtype=torch.int32, device="cpu")
    block = PROBE.struct().pack(_phases()[phase], 0, runtime.openmp_address(), 0, buffer.data_ptr(), out.data_ptr(), size)
    start = time.perf_counter()
    runtime.run(block, threads)
    return time.perf_counter() - start


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read from memory (at most as many as the kernels use); takes about 0.1 s."""
    threads = min(threads, runtime.threads())
    wanted = 4 * (machine().caches.l3 or 1 << 25)
    size = min(max(wanted, _LEAST_BUFFER), _MOST_BUFFER) // _PIECE * _PIECE
    buffer = _buffer(size)
    return size / min(_seconds("read", buffer, size, threads) for _ in range(3))


def _rate(phase: str, threads: int, operations: int) -> float:
    threads = min(threads, runtime.threads())
    buffer, rounds = _buffer(4096), 1 << 12
    while (seconds := _seconds(phase, buffer, rounds, threads)) < 0.03:
        rounds *= 4
    return max(operations * rounds * threads / t for t in (seconds, _seconds(phase, buffer, rounds, threads)))


def dot_peak(threads: int) -> float:
    """Operations per second (a multiplication and an addition are two) of the integer dot products that int8 compute uses."""
    if current().matrix is not None:
        return _rate("dots", threads, _TILE_ACCUMULATORS * 2 * ROWS * COLUMN_BYTES * ROWS)
    return _rate("dots", threads, _ACCUMULATORS * 2 * current().lane_products * current().lanes)


def fma_peak(threads: int) -> float:
    """Operations per second of float32 fused multiply-adds."""
    return _rate("fmas", threads, _ACCUMULATORS * 2 * current().lanes)

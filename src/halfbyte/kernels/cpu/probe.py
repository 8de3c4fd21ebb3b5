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
from halfbyte.kernels.cpu.codegen.kernel import arguments, run
from halfbyte.machine import machine
from halfbyte.memory import in_huge_pages

_ACCUMULATORS = 12  # independent accumulators: more than latency times units on the CPUs at hand
_TILE_ACCUMULATORS, _TILE_OPERANDS = 4, (6, 7)  # the first tile registers hold sums, the last two what is multiplied
_AHEAD = 8192  # bytes from a load to what is prefetched with it
_PIECE = 1 << 20  # bytes that a thread draws at a time
_LEAST_BUFFER, _MOST_BUFFER = 1 << 28, 1 << 30  # bytes that are read
_LEAST_SECONDS = 0.03  # of the last measurement of a rate, as far as it computes
_LEAST_ROUNDS = 1 << 20  # some milliseconds
_SATURATED = 1.5  # a rate that four times as many rounds raise by less is that of the arithmetic, not of starting the threads


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
    """`size` rounds of _ACCUMULATORS integer dot products (of 4-bit weights) or fused multiply-adds, each one vector wide."""
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
            isa.tile_product(f, total, *_TILE_OPERANDS)
    isa.release(f)


@functools.cache
def _phases() -> dict[str, int]:
    return jit.load("probe", build, current())


@functools.cache
def _buffer(size: int) -> torch.Tensor:
    return in_huge_pages(torch.empty(size // 4, dtype=torch.int32, device="cpu")).random_(100)  # as weights are


def free_buffers() -> None:
    """Free the buffers, at most 1 GiB, which otherwise stay allocated for the next measurement."""
    _buffer.cache_clear()


def _seconds(phase: str, buffer: torch.Tensor, size: int, threads: int) -> float:
    """Seconds that `threads` threads take for `size` bytes of the buffer ("read") or `size` rounds each ("dots", "fmas")."""
    out = torch.zeros(threads * 16, dtype=torch.int32, device="cpu")
    block = arguments(PROBE, _phases()[phase], {"buffer": buffer.data_ptr(), "out": out.data_ptr(), "size": size})
    start = time.perf_counter()
    run(block, threads)
    return time.perf_counter() - start


def read_bandwidth(threads: int) -> float:
    """Bytes per second that `threads` threads read from memory; takes about 0.1 s, and longer where the buffer is allocated first.

    threads  1 or more; the kernels' own number is used where it is smaller
    """
    threads = _available(threads)
    wanted = 4 * (machine().caches.l3 or 1 << 25)
    size = min(max(wanted, _LEAST_BUFFER), _MOST_BUFFER) // _PIECE * _PIECE
    buffer = _buffer(size)
    return size / min(_seconds("read", buffer, size, threads) for _ in range(3))


def _available(threads: int) -> int:
    return max(1, min(threads, runtime.threads()))


def _rate(phase: str, threads: int, operations: int) -> float:
    """Operations per second, where a round of a thread has `operations`: the best over numbers of rounds that grow until it is saturated.

    The time of one measurement alone does not say that its rounds are enough: where other processes have the cores, a few rounds take as
    long as many.
    """
    threads, buffer, rounds, best = _available(threads), _buffer(4096), _LEAST_ROUNDS, 0.0
    while True:
        work = operations * rounds * threads
        rate = work / min(_seconds(phase, buffer, rounds, threads) for _ in range(2))
        saturated, best = rate < _SATURATED * best, max(best, rate)
        if saturated and work / best >= _LEAST_SECONDS:
            return best
        rounds *= 4


def dot_peak(threads: int) -> float:
    """Operations per second (a multiplication and an addition are two) of the integer dot products that int8 compute uses."""
    if current().matrix is not None:
        return _rate("dots", threads, _TILE_ACCUMULATORS * 2 * ROWS * COLUMN_BYTES * ROWS)
    return _rate("dots", threads, _ACCUMULATORS * 2 * current().lane_products * current().lanes)


def fma_peak(threads: int) -> float:
    """Operations per second of float32 fused multiply-adds."""
    return _rate("fmas", threads, _ACCUMULATORS * 2 * current().lanes)

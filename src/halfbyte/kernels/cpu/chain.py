"""Steps that follow each other in one call: threads are woken once, and meet between the steps.

    chain(steps)        every thread runs its share of each step; none begins a step before all have finished the one before
    product(args)       y = epilogue(norm(x) · dequantize(W)ᵀ): `linear.LinearKernel`'s tiles, with what comes before and after them

A step is a block of arguments that begins with the address of its phase, as in `arguments.py`.

A product of one row: every thread prepares the row for itself, so that nobody waits. Of more rows: threads share them in a step before.
Panels of weights are cut into groups that become smaller (`shares`): the first of each thread is a long run of memory, and at the end
nobody waits long for the last.
"""

from __future__ import annotations

import ctypes
import functools
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate

from halfbyte.kernels.cpu import driver, jit, runtime
from halfbyte.kernels.cpu.arguments import LINEAR, Block
from halfbyte.kernels.cpu.attend import inverse_root
from halfbyte.kernels.cpu.exponential import silu
from halfbyte.kernels.cpu.ir import Function, Module, Value
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.layouts.cpu_tiles import PANEL

_HEADER = LINEAR.fields[:4]
CHAIN = Block((*_HEADER, "steps", "count"))
PRODUCT = Block(
    (
        *_HEADER,
        "linear",  # a block of LINEAR
        # RMS norm of x before it is laid out: its weight (0: none), float32, memory for a row of each thread, and epsilon
        *("norm", "normed", "normed_stride", "eps"),
        "private",  # bytes between the threads' own copies of what is laid out; 0 where they share one
        *("groups", "shares"),  # of panels: group i is shares[i] … shares[i + 1] - 1
        "gate",  # panels of gates; those behind them are multiplied by silu of them, in their place
    ),
    frozenset({"eps"}),
)


@dataclass(frozen=True, slots=True)
class Step:
    """name: "chain", or of a product "rows" (prepare them), "panels" (multiply) or "product" (both, each thread for itself)."""

    name: str
    gated: bool = False


def build(step: Step, isa: ISA) -> Module:
    """A module with one phase: step.name(arguments, thread, threads)."""
    module = Module(isa.attributes)
    f = module.function(step.name, ["ptr", "i64", "i64"])
    if step.name == "chain":
        _chain(f)
        return module
    args, thread, threads = f.parameters
    linear = PRODUCT.load(args, "linear", "ptr")
    if step.name == "rows":
        m = LINEAR.load(linear, "m")
        _prepare(f, isa, linear, thread * m // threads, (thread + 1) * m // threads)
    else:
        if step.name == "product":
            _prepare(f, isa, linear, f.value("i64", 0), LINEAR.load(linear, "m"))
        _multiply(f, isa, linear, step.gated)
    return module


def phase(step: Step) -> int:
    """Its address."""
    return _phase(step, current())


@functools.cache
def _phase(step: Step, isa: ISA) -> int:
    return jit.load(f"{step.name}{'_gated' if step.gated else ''}", functools.partial(build, step), isa)[step.name]


def _chain(f: Function) -> None:
    args, thread, threads = f.parameters
    steps, count = CHAIN.load(args, "steps", "ptr"), CHAIN.load(args, "count")
    for i in f.loop(count):
        step = (steps + i * 8).load("ptr", 0, 8)
        more = (i + 1) < count
        with f.when(thread.equals(0) & more):  # nobody counts in the next step now
            (steps + (i + 1) * 8).load("ptr", 0, 8).store(f.value("i64", 0), LINEAR.offset("counter"), 8)
        f.call_pointer(step.load("ptr", 0, 8), step, thread, threads)
        with f.when((threads > 1) & more):
            f.call_pointer(LINEAR.load(args, "openmp", "ptr").load("ptr", 8 * 3))


def _prepare(f: Function, isa: ISA, linear: Value, start: Value, stop: Value) -> None:
    """Rows start … stop - 1 of x, normed, into the order that tiles read; as `driver.py` does it."""
    args, thread, _ = f.parameters
    function, x = LINEAR.load(linear, "row_function", "ptr"), LINEAR.load(linear, "x", "ptr")
    scratch = LINEAR.load(linear, "scratch", "ptr") + thread * PRODUCT.load(args, "private")
    stride, row_bytes, k = (LINEAR.load(linear, field) for field in ("x_stride", "row_bytes", "k"))
    big, count = LINEAR.load(linear, "tile_rows"), LINEAR.load(linear, "tiles")
    split = big * count
    weight = PRODUCT.load(args, "norm", "ptr")
    normed = PRODUCT.load(args, "normed", "ptr") + thread * PRODUCT.load(args, "normed_stride")
    plain = f.emit("i1", f"icmp eq ptr {weight.name}, null")
    for r in f.loop(stop, start):
        row = x + r * stride
        with f.when(plain.equals(0)):
            _norm(f, isa, row, weight, normed, k)
        first_kind = f.emit("i1", f"icmp ult i64 {r.name}, {split.name}")
        rows = first_kind.select(big, big - 1)
        inside = first_kind.select(r, r - split) % rows
        f.call_pointer(function, linear, plain.select(row, normed), scratch + (r - inside) * row_bytes, rows, inside)


def _norm(f: Function, isa: ISA, x: Value, weight: Value, to: Value, k: Value) -> None:
    """to = x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich, 2019): four sums of fused multiply-adds side by side."""
    size, step = 4 * isa.lanes, 4 * isa.lanes
    sums = [f.variable(f.value(isa.floats, 0.0)) for _ in range(4)]
    whole = k // step * step
    for i in f.loop(whole, step=step):
        for v, total in enumerate(sums):
            part = (x + i * 4).load(isa.floats, v * size, 4)
            total.value = f.fma(part, part, total.value)
    total = f.variable(((sums[0].value + sums[1].value) + (sums[2].value + sums[3].value)).fold(lambda a, b: a + b))
    for i in f.loop(k, start=whole):
        part = x.load("float", i * 4, 4)
        total.value = f.fma(part, part, total.value)
    eps = (f.parameters[0] + PRODUCT.offset("eps")).load("float", 0, 4)
    root = inverse_root(f, total.value / k.to("float") + eps)
    roots = root.splat(isa.lanes)
    for i in f.loop(whole, step=step):
        for v in range(4):
            part = (x + i * 4).load(isa.floats, v * size, 4) * roots
            (to + i * 4).store(part * (weight + i * 4).load(isa.floats, v * size, 4), v * size, 4)
    for i in f.loop(k, start=whole):
        to.store(x.load("float", i * 4, 4) * root * weight.load("float", i * 4, 4), i * 4, 4)


def _multiply(f: Function, isa: ISA, linear: Value, gated: bool) -> None:
    """Each thread its own first group, then whichever is left."""
    args, thread, threads = f.parameters
    groups, shares, gate = PRODUCT.load(args, "groups"), PRODUCT.load(args, "shares", "ptr"), PRODUCT.load(args, "gate")
    a = LINEAR.load(linear, "scratch", "ptr") + thread * PRODUCT.load(args, "private")
    out, weights, bias = (LINEAR.load(linear, name, "ptr") for name in ("out", "weights", "bias"))
    tiles = f.value("i64", 0), LINEAR.load(linear, "tiles") + LINEAR.load(linear, "lesser_tiles")
    taken = f.variable(thread)

    def following() -> Value:
        return taken.value

    for group in f.draw(following, groups):
        start, stop = ((shares + group * 8).load("i64", at, 8) for at in (0, 8))
        driver.multiply(f, linear, tiles, (start, stop), a, out, weights, bias)
        if gated:
            driver.multiply(f, linear, tiles, (start + gate, stop + gate), a, out, weights, bias)
            _gates(f, isa, linear, out, start * (4 * PANEL), (stop - start) * PANEL, gate * (4 * PANEL))
        taken.value = f.fetch_add(args + LINEAR.offset("counter")) + threads


def _gates(f: Function, isa: ISA, linear: Value, out: Value, first: Value, count: Value, apart: Value) -> None:
    """silu(gate) * up in the gates' place, `count` columns from byte `first` of each row on."""
    for row in f.loop(LINEAR.load(linear, "m")):
        gates = out + row * LINEAR.load(linear, "out_stride") + first
        for i in f.loop(count, step=isa.lanes):
            at = gates + i * 4
            at.store(silu(f, at.load(isa.floats, 0, 4)) * (at + apart).load(isa.floats, 0, 4), 0, 4)


def shares(panels: int, threads: int, least: int = 1) -> list[int]:
    """Where groups of panels begin, and the end: for each thread three fifths of its share, then ever less."""
    sizes: list[int] = []
    left = panels
    while left:
        size = min(left, max(least, left * 3 // (5 * threads)))
        sizes += [size] * min(threads, left // size)
        left = panels - sum(sizes)
    return [0, *accumulate(sizes)]


class Chain:
    """Steps, ready to run again and again: `blocks` of arguments, each with its phase in the first field."""

    def __init__(self, blocks: Sequence[ctypes.Array[ctypes.c_char]], threads: int) -> None:
        self._blocks, self._threads = blocks, threads
        self._steps = (ctypes.c_int64 * len(blocks))(*map(ctypes.addressof, blocks))
        fields = {"first_phase": phase(Step("chain")), "openmp": runtime.openmp_address()}
        fields |= {"steps": ctypes.addressof(self._steps), "count": len(blocks)}
        self._buffer = CHAIN.buffer(fields)
        self._address = ctypes.addressof(self._buffer)
        self._run = runtime.runner()

    def run(self) -> None:
        ctypes.memset(self._steps[0] + LINEAR.offset("counter"), 0, 8)
        if self._threads == 1 or runtime.openmp_address():
            self._run(self._address, self._threads)
            return
        for address in self._steps:  # a pool of threads that cannot meet within a call
            ctypes.memset(address + LINEAR.offset("counter"), 0, 8)
            self._run(address, self._threads)

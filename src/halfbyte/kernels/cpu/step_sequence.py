"""Sequences of steps in one native call: threads are woken once, with a barrier between the steps.

    sequence(steps)     every thread runs its share of each step; none begins a step before all have finished the one before
    lanes(sequences)    every thread runs sequences of its own, alone
    norm(args)          y = norm(x), or that + residual, or c * (that + residual)
    scale(args)         y = factor * x + residual
    each(args)          x = function(x, c) in place, one of `EACH`
    product(args)       y = epilogue(norm(x) · dequantize(W)ᵀ): `linear.LinearKernel`'s tiles, with what comes before and after them

A step is a block of arguments that begins with the address of its phase, as in `arguments.py`.

Norms are RMSNorms, x / sqrt(mean(x²) + eps) * weight (Zhang and Sennrich, 2019), or LayerNorms,
(x - mean(x)) / sqrt(mean((x - mean(x))²) + eps) * weight + shift (Ba and others, arXiv:1607.06450); under `unit_offset` with 1 + weight
(Gemma, Nemotron).

Before a product of one row every thread prepares the row for itself, without a barrier; more rows are shared by the threads in a separate
step. Panels of weights are cut into groups that become smaller (`shares`): the first of each thread is a long run of memory, and at the end
the wait for the last thread is short.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal

from halfbyte.errors import KernelError, lookup, unreachable
from halfbyte.kernels.cpu.codegen import kernel, runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Block
from halfbyte.kernels.cpu.codegen.elementary import gelu_tanh, relu_squared, silu, tanh
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.linear import driver
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.transformer.attend import inverse_root
from halfbyte.kernels.layer_kinds import GateFunction, LogitsFunction
from halfbyte.layouts.cpu_tiles import PANEL

SEQUENCE = Block("steps", "count")
LANES = Block("sequences", "count")
NORM = Block(
    # `residual`: bytes from an output to what is added to it; `eps` and the factor
    *("x", "x_stride", "out", "residual", "out_stride", "rows", "k", "weight", "shift", "eps"),
    floats=["eps"],
)
PRODUCT = Block(
    "linear",  # a block of LINEAR
    # norm of x before it is laid out: its weight (0: none) and its shift, float32; where normed rows go, and bytes between those of the
    # threads and of the rows; and epsilon
    *("norm", "shift", "normed", "normed_thread", "normed_row", "eps"),
    "private",  # bytes between the threads' own copies of what is laid out; 0 where they share one
    *("groups", "shares"),  # of panels: group i is shares[i] … shares[i + 1] - 1
    "gate",  # panels of gates; those behind them are multiplied by a function of them, in their place
    *("up", "up_row"),  # what outputs are multiplied by that are all gates, float32, and bytes between its rows
    floats=["eps"],
)


StepKind = Literal["", "sequence", "lanes", "norm", "scale", "times", "over", "cap", "rows", "panels", "product"]
EACH: dict[LogitsFunction, Callable[[Function, Value, Value], Value]] = {
    "times": lambda f, x, c: x * c,
    "over": lambda f, x, c: x / c,
    "cap": lambda f, x, c: tanh(f, x / c) * c,
}
GATES: dict[GateFunction, Callable[[Function, Value], Value]] = {"silu": silu, "gelu_tanh": gelu_tanh, "relu2": relu_squared}


@dataclass(frozen=True, slots=True)
class Step:
    """What the code of a step is generated for.

    Attributes:
        kind: "sequence", "lanes", "norm", "scale", one of EACH, or of a product "rows" (prepare them), "panels" (multiply) or "product"
            (both, each thread for itself).
        gates: Function of a product's activation, one of GATES; "none": no activation.
        layer_norm: Norms are LayerNorms.
        unit_offset: Norms multiply by 1 + weight.
        added: A norm's result has a residual added.
        ungated: The activation is f of all outputs of the product, which has no up half.
        external_up: The activation multiplies a tensor that is an argument.
        scaled: The sum with the residual is multiplied by a float, which lies at `shift`.
    """

    kind: StepKind
    gates: GateFunction | Literal["none"] = "none"
    layer_norm: bool = False
    unit_offset: bool = False
    added: bool = False
    ungated: bool = False
    external_up: bool = False
    scaled: bool = False

    def __post_init__(self) -> None:
        assert not (self.layer_norm and self.added), "a LayerNorm adds its bias where an RMSNorm adds the residual"
        assert self.added or not self.scaled, "the scale is that of a sum with a residual"


@kernel.phase
def build(step: Step, isa: ISA, f: Function) -> None:
    """Emit the code of a step."""
    match step.kind:
        case "sequence":
            _sequence(f)
        case "lanes":
            _lanes(f)
        case "norm":
            _norms(f, isa, step)
        case "scale":
            _scales(f, isa)
        case "times" | "over" | "cap":
            _each(f, isa, lookup(EACH, step.kind, "the function of logits"))
        case "rows" | "panels" | "product":
            _product(f, isa, step)
        case "":
            raise KernelError("a step without a kind cannot be compiled: this is a fault in halfbyte, please report it")
        case _:
            raise unreachable(step.kind, "the step")


def phase(step: Step) -> int:
    """Return the address of a step's compiled code."""
    return kernel.compiled(build, step, current())


def _product(f: Function, isa: ISA, step: Step) -> None:
    args, thread, threads = f.parameters
    linear = PRODUCT.load(args, "linear", "ptr")
    m = LINEAR.load(linear, "m")
    if step.kind == "rows":
        prepare(
            f, isa, linear, (thread * m // threads, (thread + 1) * m // threads), layer_norm=step.layer_norm, unit_offset=step.unit_offset
        )
        return
    if step.kind == "product":
        prepare(f, isa, linear, (f.value("i64", 0), m), layer_norm=step.layer_norm, unit_offset=step.unit_offset)
    _multiply(f, isa, linear, step)


def _lanes(f: Function) -> None:
    args, thread, threads = f.parameters
    for i in f.loop((LANES.load(args, "count") - thread + (threads - 1)) // threads):
        sequence = (LANES.load(args, "sequences", "ptr") + (thread + i * threads) * 8).load("ptr", 0, 8)
        f.call_pointer(sequence.load("ptr", 0, 8), sequence, f.value("i64", 0), f.value("i64", 1))


def _sequence(f: Function) -> None:
    args, thread, threads = f.parameters
    steps, count = SEQUENCE.load(args, "steps", "ptr"), SEQUENCE.load(args, "count")
    for i in f.loop(count):
        step = (steps + i * 8).load("ptr", 0, 8)
        more = (i + 1) < count
        with f.when(thread.equals(0) & more):  # no thread uses the next step's counter yet
            (steps + (i + 1) * 8).load("ptr", 0, 8).store(f.value("i64", 0), LINEAR.offset("counter"), 8)
        f.call_pointer(step.load("ptr", 0, 8), step, thread, threads)
        with f.when((threads > 1) & more):
            f.call_pointer(LINEAR.load(args, "openmp", "ptr").load("ptr", 8 * 3))


def prepare(
    f: Function, isa: ISA, linear: Value, rows: tuple[Value, Value], *, layer_norm: bool = False, unit_offset: bool = False
) -> None:
    """Norm rows of x and lay them out as tiles read them, like `driver.py`.

    Args:
        f: Its arguments are PRODUCT's. Without a norm's weight there, rows are not normed.
        isa: Emits the instructions.
        linear: The product's arguments.
        rows: The first row, and the end.
        layer_norm, unit_offset: As in Step.
    """
    args, thread, _ = f.parameters
    x, stride, k = LINEAR.load(linear, "x", "ptr"), LINEAR.load(linear, "x_stride"), LINEAR.load(linear, "k")
    normed = PRODUCT.load(args, "normed", "ptr") + thread * PRODUCT.load(args, "normed_thread")
    function = LINEAR.load(linear, "row_function", "ptr")
    scratch = LINEAR.load(linear, "scratch", "ptr") + thread * PRODUCT.load(args, "private")
    row_bytes, big, count = (LINEAR.load(linear, field) for field in ("row_bytes", "tile_rows", "tiles"))
    split = big * count
    vectors = PRODUCT.load(args, "norm", "ptr"), PRODUCT.load(args, "shift", "ptr")
    norm = RowNorm(f, isa, k, vectors, args + PRODUCT.offset("eps"), layer_norm, unit_offset)
    plain = norm.weight.is_null()
    for r in f.loop(rows[1], rows[0]):
        row, to = x + r * stride, normed + r * PRODUCT.load(args, "normed_row")
        with f.when(plain.equals(0)):
            norm.emit(row, to)
        first_kind = r.below(split)
        in_tile = first_kind.select(big, big - 1)
        inside = first_kind.select(r, r - split) % in_tile
        f.call_pointer(function, linear, plain.select(row, to), scratch + (r - inside) * row_bytes, in_tile, inside)


def _norms(f: Function, isa: ISA, step: Step) -> None:
    """Emit norms of rows, which threads share evenly."""
    args = f.parameters[0]
    x, out = (NORM.load(args, name, "ptr") for name in ("x", "out"))
    rows, k, x_stride, out_stride, residual = (NORM.load(args, name) for name in ("rows", "k", "x_stride", "out_stride", "residual"))
    vectors = NORM.load(args, "weight", "ptr"), NORM.load(args, "shift", "ptr")
    norm = RowNorm(f, isa, k, vectors, args + NORM.offset("eps"), step.layer_norm, step.unit_offset)
    for r in f.share(rows):
        norm.emit(x + r * x_stride, out + r * out_stride, residual if step.added else None, vectors[1] if step.scaled else None)


def _scales(f: Function, isa: ISA) -> None:
    """Emit factor * x + residual of rows, which threads share evenly."""
    args = f.parameters[0]
    x, out = (NORM.load(args, name, "ptr") for name in ("x", "out"))
    rows, k, x_stride, out_stride, residual = (NORM.load(args, name) for name in ("rows", "k", "x_stride", "out_stride", "residual"))
    _, factor = NORM.load_floats(args, "eps")
    whole = k // isa.lanes * isa.lanes
    for r in f.share(rows):
        row, to = x + r * x_stride, out + r * out_stride

        def write(at: Value, type_: str, by: Value, row: Value = row, to: Value = to) -> None:
            (to + at).store(f.fma((row + at).load(type_, 0, 4), by, (to + residual + at).load(type_, 0, 4)), 0, 4)

        for i in f.loop(whole, step=isa.lanes):
            write(i * 4, isa.floats, factor.splat(isa.lanes))
        for i in f.loop(k, start=whole):
            write(i * 4, "float", factor)


def _each(f: Function, isa: ISA, function: Callable[[Function, Value, Value], Value]) -> None:
    """Emit function(x, constant) in place, of elements that threads share evenly."""
    args, thread, threads = f.parameters
    x, k = NORM.load(args, "x", "ptr"), NORM.load(args, "k")
    _, constant = NORM.load_floats(args, "eps")
    vectors = k // isa.lanes
    start, stop = (i * vectors // threads * isa.lanes for i in (thread, thread + 1))
    for i in f.loop(stop, start=start, step=isa.lanes):
        (x + i * 4).store(function(f, (x + i * 4).load(isa.floats, 0, 4), constant.splat(isa.lanes)), 0, 4)
    for i in f.loop((thread + 1).equals(threads).select(k, stop), start=stop):
        (x + i * 4).store(function(f, (x + i * 4).load("float", 0, 4), constant), 0, 4)


class RowNorm:
    """RMSNorm or LayerNorm of rows of k elements: four partial sums, those of squares by fused multiply-adds."""

    def __init__(
        self, f: Function, isa: ISA, k: Value, vectors: tuple[Value, Value], eps: Value, layer_norm: bool, unit_offset: bool = False
    ) -> None:
        self.f, self.isa, self.k, (self.weight, self.shift), self.eps = f, isa, k, vectors, eps
        self.layer_norm, self.unit_offset = layer_norm, unit_offset
        self.size, self.step = 4 * isa.lanes, 4 * isa.lanes
        self.whole = k // self.step * self.step

    def emit(self, x: Value, to: Value, residual: Value | None = None, factor: Value | None = None) -> None:
        """Emit the norm of the row at x.

        Args:
            x, to: Addresses of the row and of its result.
            residual: Bytes from an output to what is added to it, of an RMSNorm alone.
            factor: Address of the factor of that sum.
        """
        f, lanes = self.f, self.isa.lanes
        count = self.k.to("float")
        mean = self._sum(x, lambda total, part: total + part) / count if self.layer_norm else None

        def minus_mean(part: Value) -> Value:
            return part if mean is None else part - (mean if part.type == "float" else mean.splat(lanes))

        def squared(total: Value, part: Value) -> Value:
            difference = minus_mean(part)
            return f.fma(difference, difference, total)

        root = inverse_root(f, self._sum(x, squared) / count + self.eps.load("float", 0, 4))
        roots = root.splat(lanes)
        of_sum = None if factor is None else factor.load("float", 0, 4)

        def write(at: Value, type_: str, by: Value, more: int = 0) -> None:
            part, weight = minus_mean((x + at).load(type_, more, 4)) * by, (self.weight + at).load(type_, more, 4)
            if self.unit_offset:
                weight = weight + 1.0
            if self.layer_norm:
                y = f.fma(part, weight, (self.shift + at).load(type_, more, 4))
            elif residual is not None:
                y = f.fma(part, weight, (to + residual + at).load(type_, more, 4))
                if of_sum is not None:
                    y = y * (of_sum if type_ == "float" else of_sum.splat(lanes))
            else:
                y = part * weight
            (to + at).store(y, more, 4)

        for i in f.loop(self.whole, step=self.step):
            for v in range(4):
                write(i * 4, self.isa.floats, roots, v * self.size)
        for i in f.loop(self.k, start=self.whole):
            write(i * 4, "float", root)

    def _sum(self, x: Value, add: Callable[[Value, Value], Value]) -> Value:
        """add(… add(add(0, x[0]), x[1]) …)"""
        f, floats = self.f, self.isa.floats
        sums = [f.variable(f.value(floats, 0.0)) for _ in range(4)]
        for i in f.loop(self.whole, step=self.step):
            for v, total in enumerate(sums):
                total.value = add(total.value, (x + i * 4).load(floats, v * self.size, 4))
        total = f.variable(((sums[0].value + sums[1].value) + (sums[2].value + sums[3].value)).fold(lambda a, b: a + b))
        for i in f.loop(self.k, start=self.whole):
            total.value = add(total.value, x.load("float", i * 4, 4))
        return total.value


def _multiply(f: Function, isa: ISA, linear: Value, step: Step) -> None:
    """Emit the product's groups of panels, each followed by the activation: a thread's own first group, then whichever is left."""
    activated, gated = step.gates != "none", step.gates != "none" and not step.ungated
    args, thread, _ = f.parameters
    gate = PRODUCT.load(args, "gate")
    a = LINEAR.load(linear, "scratch", "ptr") + thread * PRODUCT.load(args, "private")
    out, weights, bias = (LINEAR.load(linear, name, "ptr") for name in ("out", "weights", "bias"))
    tiles = f.value("i64", 0), LINEAR.load(linear, "tiles") + LINEAR.load(linear, "lesser_tiles")
    for start, stop, following in drawn_shares(f):
        driver.multiply(f, linear, tiles, (start, stop), a, out, weights, bias, start + gate if gated else following)
        if gated:
            driver.multiply(f, linear, tiles, (start + gate, stop + gate), a, out, weights, bias, following)
        if activated:
            for row in f.loop(LINEAR.load(linear, "m")):
                at = out + row * LINEAR.load(linear, "out_stride") + start * (4 * PANEL)
                up = at + gate * (4 * PANEL) if gated else None
                if step.external_up:
                    up = PRODUCT.load(args, "up", "ptr") + row * PRODUCT.load(args, "up_row") + start * (4 * PANEL)
                through_gates(f, isa, at, (stop - start) * PANEL, up, gate_function(step))


def gate_function(step: Step) -> GateFunction:
    assert step.gates != "none"
    return step.gates


def drawn_shares(f: Function) -> Iterator[tuple[Value, Value, Value]]:
    """`for start, stop, following in drawn_shares(f):` the groups of panels of a thread; the arguments of `f` are PRODUCT's.

    A group is drawn while the one before it is computed: `following` is the first panel of the next one, or the end of all.
    """
    args, thread, threads = f.parameters
    groups, shares = PRODUCT.load(args, "groups"), PRODUCT.load(args, "shares", "ptr")
    taken = f.variable(thread)

    def drawn() -> Value:
        return taken.value

    for group in f.draw(drawn, groups):
        taken.value = f.fetch_add(args + LINEAR.offset("counter")) + threads
        start, stop = ((shares + group * 8).load("i64", at, 8) for at in (0, 8))
        yield start, stop, (shares + f.umin(taken.value, groups) * 8).load("i64", 0, 8)


def through_gates(f: Function, isa: ISA, gates: Value, count: Value, up: Value | None, function: GateFunction = "silu") -> None:
    """Emit function(gate) * up in the gates' place.

    Args:
        f, isa: Emit the instructions.
        gates: Address of the gates, float32.
        count: How many, a multiple of the lanes.
        up: Address of what they multiply; None: nothing.
        function: One of GATES.
    """
    for i in f.loop(count, step=isa.lanes):
        at = gates + i * 4
        y = lookup(GATES, function, "the gate function")(f, at.load(isa.floats, 0, 4))
        at.store(y if up is None else y * (up + i * 4).load(isa.floats, 0, 4), 0, 4)


@dataclass(frozen=True, eq=False, slots=True)
class Product:
    """A weight [N, K]: its kernel for float32 activations, the address of its packed bytes and that of its bias, float32 [N], or 0."""

    kernel: LinearKernel
    weight: int
    bias: int

    @property
    def n(self) -> int:
        return self.kernel.geometry.n

    @property
    def k(self) -> int:
        return self.kernel.geometry.k


def shares(panels: int, threads: int) -> list[int]:
    """Return where groups of panels begin, and the end. A thread's first group is three fifths of its share, later ones are ever smaller:
    the wait for the last thread is short."""
    sizes: list[int] = []
    left = panels
    while left:
        size = max(1, left * 3 // (5 * threads))
        sizes += [size] * min(threads, left // size)
        left = panels - sum(sizes)
    return [0, *accumulate(sizes)]


class StepSequence:
    """Steps that run in one native call, as often as one likes, by one Python thread at a time: they share their arguments."""

    def __init__(self, blocks: Sequence[ctypes.Array[ctypes.c_char]], threads: int) -> None:
        """Prepare the call.

        Args:
            blocks: Arguments of the steps, in order, each with the address of its code in the first field. What they point to is the
                caller's to keep alive. No block may be listed twice in a row, as its counter is reset while the step before it runs.
            threads: That run all steps.
        """
        self._blocks, self._threads = blocks, threads
        self._steps = (ctypes.c_int64 * len(blocks))(*map(ctypes.addressof, blocks))
        fields = {"steps": ctypes.addressof(self._steps), "count": len(blocks)}
        self._buffer = kernel.arguments(SEQUENCE, phase(Step("sequence")), fields)
        self._address = ctypes.addressof(self._buffer)
        self._run = runtime.runner()

    def ready(self) -> int:
        """Prepare one run, and return the address of its arguments."""
        ctypes.memset(self._steps[0] + LINEAR.offset("counter"), 0, 8)
        return self._address

    def run(self) -> None:
        """Run the steps; returns when all are done."""
        self.ready()
        if self._threads == 1 or runtime.openmp_address():
            self._run(self._address, self._threads)
            return
        for address in self._steps:  # threads of a pool have no barrier within a call: a call for each step
            ctypes.memset(address + LINEAR.offset("counter"), 0, 8)
            self._run(address, self._threads)


def run_lanes(sequences: Sequence[StepSequence]) -> None:
    """Run independent single-threaded sequences in parallel."""
    addresses = (ctypes.c_int64 * len(sequences))(*(sequence.ready() for sequence in sequences))
    block = kernel.arguments(LANES, phase(Step("lanes")), {"sequences": ctypes.addressof(addresses), "count": len(sequences)})
    runtime.runner()(ctypes.addressof(block), len(sequences))

"""A mixture of experts for many rows, such as those of a prompt, on the CPU in one native call.

    y[m] = sum over t of w[m, t] * (g[m, t] · Wdown[id[m, t]]ᵀ + bias[id[m, t]]),   g[m, t] = silu(gate) * up, or `Clamped` gates,
    gate, up = x[m] · Wgate_up[id[m, t]]ᵀ + bias[id[m, t]]

`run` is called by `ops/transformer/experts.py`. The R = M * T pairs (m, t) are the routed rows. numpy sorts them by expert (`_sorted`) and
cuts those of each expert into items of at most _MOST_ROWS rows (`_items`). One native call then runs two phases (`_Items`):

    "items"  threads draw items from a counter; the thread that draws an item computes all of it, in memory of its own (`_ThreadMemory`):
                 lay out its rows of x -> gate_up product -> gates -> lay out the activations -> down product
             which gives the item's rows of products [R, K], in the order of experts
    "sums"   after a barrier each thread computes its share of the rows of y from the products

Threads do not share an item, because experts of today's mixtures are small: barriers and counters would cost more than the product. An
item's intermediate results stay in the cache of a core. All memory is kept from call to call, because the first touch of fresh pages takes
longer than the products that would be stored there. All intermediate results are float32.

For few rows, in `steps.py`, all threads share each expert.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from itertools import accumulate
from typing import Literal, NamedTuple, TypeAlias

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Block
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, compiled
from halfbyte.kernels.cpu.codegen.kernel import phase as emitted
from halfbyte.kernels.cpu.linear import grouped
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.cpu.step_sequence import Product, through_gates
from halfbyte.kernels.cpu.transformer.experts.steps import Clamped, clamped_gates
from halfbyte.layouts.base import round_up

_FIELDS = len(LINEAR.fields)
_COLUMN = {name: LINEAR.offset(name) // 8 for name in LINEAR.fields}  # of a field in a table of LINEAR blocks, int64 [items, _FIELDS]
_NO_CLAMP = struct.unpack("<q", struct.pack("<2f", -float("inf"), float("inf")))[0]
_LEAST_ROWS, _MOST_ROWS = 8, 128  # of an item: with fewer rows tiles are half empty, more rows take memory and are no faster
_ITEMS_A_THREAD = 4  # at least, if experts have enough rows: so the other threads wait less for the last one
_PRODUCTS_BYTES = 1 << 25  # of `products` in one native call; more rows take several calls
_ALIGNMENT = 64  # bytes: a cache line, and the widest vector
ITEMS = Block(
    *("items", "up", "down"),  # their number, and the addresses of a block of LINEAR for each
    "starts",  # int64 [items]: index in `order` of an item's first routed row
    "order",  # int64 [R]: m * T + t of the routed rows, sorted by expert
    "top_k",
    *("memory", "thread_bytes"),  # `_ThreadMemory` of all threads, and the bytes of one
    *("gate_up", "activations", "down_rows"),  # offsets in bytes of the parts of `_ThreadMemory`
    "products",  # float32 [R, K]: outputs of the down product in the order of `order`
    *("rows", "k"),  # M, K
    "weights",  # float32 [M, T]
    "product_rows",  # int64 [M, T]: the row of products that belongs to (m, t)
    "out",  # y, float32 [M, K]
    "alpha_limit",  # two floats, the parameters of clamped gates
    floats=["alpha_limit"],
)


@dataclass(frozen=True, slots=True)
class ItemsPhase:
    """What the code of a phase is generated for.

    Attributes:
        kind: "items" computes `products`, "sums" computes y from them.
        clamped: Whether the gates of "items" are `Clamped`.
    """

    kind: Literal["items", "sums"]
    clamped: bool = False


@emitted
def build(phase: ItemsPhase, isa: ISA, f: Function) -> None:
    """Emit a phase; its arguments are an ITEMS block, its thread and the number of threads."""
    getattr(_Items(phase, isa, f), phase.kind)()


class _Row(NamedTuple):
    """A row of an item, as `LINEAR.row_function` takes it.

    Attributes:
        number: Its index among the item's rows.
        tile_rows: Rows of the tile that it is in.
        inside: Its index among these.
    """

    number: Value
    tile_rows: Value
    inside: Value


class _Items(Emitter):
    """Emits the phases, each by the method of its name."""

    block = ITEMS
    spec: ItemsPhase

    def items(self) -> None:
        """Emit the products of the items that this thread draws."""
        f, (_, thread, _) = self.f, self.f.parameters
        memory, top_k, order = self.pointer("memory") + thread * self.get("thread_bytes"), self.get("top_k"), self.pointer("order")
        gate_up, down_rows = (memory + self.get(name) for name in ("gate_up", "down_rows"))
        for i in f.draw(lambda: f.fetch_add(self.args + ITEMS.offset("counter")), self.get("items")):
            up, down = (self.pointer(name) + i * (8 * _FIELDS) for name in ("up", "down"))
            start, rows = (self.pointer("starts") + i * 8).load("i64", 0, 8), LINEAR.load(up, "m")
            x, x_stride, up_stride = LINEAR.load(up, "x", "ptr"), LINEAR.load(up, "x_stride"), LINEAR.load(up, "out_stride")
            for row in self._tiles(up, rows):
                routed = (order + (start + row.number) * 8).load("i64", 0, 8)
                self._lay_out(up, row, x + routed // top_k * x_stride, memory)
            self._multiply(up, memory, gate_up)
            inner, activations, stride = LINEAR.load(down, "k"), gate_up, up_stride
            if self.spec.clamped:
                activations, stride = memory + self.get("activations"), inner * 4
            for r in f.loop(rows):
                self._gates(gate_up + r * up_stride, activations + r * stride, inner)
            for row in self._tiles(down, rows):
                self._lay_out(down, row, activations + row.number * stride, down_rows)
            self._multiply(down, down_rows, self.pointer("products") + start * LINEAR.load(down, "out_stride"))

    def _tiles(self, linear: Value, rows: Value) -> Iterator[_Row]:
        """Emit a loop over the rows of an item, cut into tiles as `linear/driver.py` does: `for row in self._tiles(linear, n):`."""
        big = LINEAR.load(linear, "tile_rows")
        split = big * LINEAR.load(linear, "tiles")  # the first row of the lesser tiles
        for r in self.f.loop(rows):
            is_large = r.below(split)
            in_tile = is_large.select(big, big - 1)
            yield _Row(r, in_tile, is_large.select(r, r - split) % in_tile)

    def _lay_out(self, linear: Value, row: _Row, x: Value, scratch: Value) -> None:
        """Emit the layout of the row at address x. `scratch`: address of the item's first laid-out row."""
        tile = scratch + (row.number - row.inside) * LINEAR.load(linear, "row_bytes")
        self.f.call_pointer(LINEAR.load(linear, "row_function", "ptr"), linear, x, tile, row.tile_rows, row.inside)

    def _multiply(self, linear: Value, scratch: Value, out: Value) -> None:
        """Emit the product of the rows laid out at `scratch`, by this thread alone, to `out`."""
        f = self.f
        linear.store(scratch, LINEAR.offset("scratch"), 8)
        linear.store(out, LINEAR.offset("out"), 8)
        f.call_pointer(LINEAR.load(linear, "second_phase", "ptr"), linear, f.value("i64", 0), f.value("i64", 1))

    def _gates(self, gate_up: Value, activations: Value, inner: Value) -> None:
        """Emit the activations of a row of gate_up.

        Whole vectors are computed, up to isa.lanes - 1 numbers more than `inner`. In place, these replace ups of the same row that were
        read already: `_up_stride` keeps them off the next row. Clamped activations of later rows are written afterwards.
        """
        f, isa = self.f, self.isa
        count = (inner + (isa.lanes - 1)) // isa.lanes * isa.lanes
        if self.spec.clamped:
            clamped_gates(f, isa, gate_up, activations, count, ITEMS.load_floats(self.args, "alpha_limit"))
        else:
            through_gates(f, isa, gate_up, count, gate_up + inner * 4)

    def sums(self) -> None:
        """Emit y; threads share its rows evenly."""
        f, isa = self.f, self.isa
        rows, k, top_k = (self.get(name) for name in ("rows", "k", "top_k"))
        products, whole = self.pointer("products"), k // isa.lanes * isa.lanes
        for r in f.share(rows):
            weights, product_rows = self.pointer("weights") + r * top_k * 4, self.pointer("product_rows") + r * top_k * 8
            out = self.pointer("out") + r * k * 4

            def sum_at(i: Value, type_: str, weights: Value = weights, product_rows: Value = product_rows, out: Value = out) -> None:
                total = f.variable(f.value(type_, 0.0))
                for t in f.loop(top_k):
                    product = products + (product_rows + t * 8).load("i64", 0, 8) * k * 4
                    weight = (weights + t * 4).load("float", 0, 4)
                    by = weight if type_ == "float" else weight.splat(isa.lanes)
                    total.value = f.fma((product + i * 4).load(type_, 0, 4), by, total.value)
                (out + i * 4).store(total.value, 0, 4)

            for i in f.loop(whole, step=isa.lanes):
                sum_at(i, isa.floats)
            for i in f.loop(k, start=whole):
                sum_at(i, "float")


def run(products: tuple[Product, Product], x: Tensor, ids: Tensor, weights: Tensor, clamped: Clamped | None = None) -> Tensor:
    """Compute y, float32 [M, K].

    Args:
        products: gate_up [2 I, K] and down [K, I] of the first expert; weights and biases of the others follow in memory.
        x: float32 [M, K], contiguous and on the CPU, like all others.
        ids: int64 [M, T], each in 0 … E - 1, which the caller checks.
        weights: float32 [M, T].
        clamped: Parameters of clamped gates; None: silu(gate) * up.
    """
    y, top_k = torch.empty_like(x), ids.shape[1]
    rows = max(1, _PRODUCTS_BYTES // (4 * top_k * x.shape[1]))
    for part in zip(*(tensor.split(rows) for tensor in (x, ids, weights, y)), strict=True):
        _run(products, _Tensors(*part), clamped)
    return y


class _Tensors(NamedTuple):
    """The rows of one native call: x, ids and weights as `run` takes them, and y, which it writes."""

    x: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


def _run(products: tuple[Product, Product], tensors: _Tensors, clamped: Clamped | None) -> None:
    """Compute y in one native call. All numpy arrays whose addresses are among its arguments live until it has returned."""
    (gate_up, down), (x, ids, weights, y) = products, tensors
    (m, k), top_k, available = x.shape, ids.shape[1], runtime.threads()
    order, product_rows, counts = _sorted(ids.reshape(-1).numpy())
    most_rows = min(_MOST_ROWS, max(_LEAST_ROWS, len(order) // (_ITEMS_A_THREAD * available)))
    items = _items(counts, most_rows)
    threads = min(available, len(items.rows))

    up_blocks, up_bytes = _blocks(gate_up, items)
    down_blocks, down_bytes = _blocks(down, items)
    up_stride = _up_stride(gate_up)
    for name, value in (("x", x.data_ptr()), ("x_stride", 4 * k), ("out_stride", up_stride)):
        up_blocks[:, _COLUMN[name]] = value
    of_thread = _ThreadMemory.of(
        up_bytes, most_rows * up_stride, 0 if clamped is None else 4 * most_rows * down.k, down_bytes, gate_up.kernel.isa.lanes
    )
    memory = PLANS.expert_items.of(threads * of_thread.nbytes + 4 * k * len(order))
    phases = [compiled(build, ItemsPhase(kind, clamped is not None and kind == "items"), gate_up.kernel.isa) for kind in ("items", "sums")]
    arguments = ITEMS.buffer(
        {
            "first_phase": phases[0],
            "second_phase": phases[1],
            "openmp": runtime.openmp_address(),
            "items": len(items.rows),
            "up": up_blocks.ctypes.data,
            "down": down_blocks.ctypes.data,
            "starts": items.starts.ctypes.data,
            "order": order.ctypes.data,
            "top_k": top_k,
            "memory": memory,
            "thread_bytes": of_thread.nbytes,
            "gate_up": of_thread.gate_up,
            "activations": of_thread.activations,
            "down_rows": of_thread.down_rows,
            "products": memory + threads * of_thread.nbytes,
            "rows": m,
            "k": k,
            "weights": weights.data_ptr(),
            "product_rows": product_rows.ctypes.data,
            "out": y.data_ptr(),
            "alpha_limit": clamped or (0.0, 0.0),
        }
    )
    gate_up.kernel.run(ctypes.addressof(arguments), threads)


def _up_stride(gate_up: Product) -> int:
    """Return the bytes from one row of gate_up to the next: at least a vector, which `_Items._gates` writes whole."""
    return 4 * max(gate_up.n, gate_up.kernel.isa.lanes)


class _ThreadMemory(NamedTuple):
    """Offsets in bytes of what a thread stores for one item; its rows of x, laid out for the gate_up product, begin at 0.

    Attributes:
        gate_up: float32 [rows, 2 I], in rows `_up_stride` apart; the activations replace the gates, unless these are clamped.
        activations: float32 [rows, I] of clamped gates.
        down_rows: The activations, laid out for the down product.
        nbytes: Bytes of all.
    """

    gate_up: int
    activations: int
    down_rows: int
    nbytes: int

    @classmethod
    def of(cls, up_rows: int, gate_up: int, activations: int, down_rows: int, lanes: int) -> _ThreadMemory:
        """Place parts of so many bytes. Two vectors behind each part belong to it: `_Items._gates` reads and writes there."""
        sizes = (round_up(size + 2 * 4 * lanes, _ALIGNMENT) for size in (up_rows, gate_up, activations, down_rows))
        return cls(*accumulate(sizes))


# Planning. All arrays are int64, whose type is named where numpy would take C's long (32 bits on Windows before numpy 2).

_Integers: TypeAlias = NDArray[np.int64]


def _sorted(experts: _Integers) -> tuple[_Integers, _Integers, _Integers]:
    """Sort routed rows by expert.

    Args:
        experts: [M * T], of each routed row.

    Returns:
        order: [R], the routed rows by expert.
        product_rows: [R], where in `order` each routed row is.
        counts: [E], rows in `order` of each expert.
    """
    counts = np.bincount(experts).astype(np.int64, copy=False)
    order = np.argsort(experts, kind="stable").astype(np.int64, copy=False)
    product_rows = np.empty_like(order)
    product_rows[order] = np.arange(len(order), dtype=np.int64)
    return order, product_rows, counts


class _ItemTable(NamedTuple):
    """The items, those with the most rows first: a thread that draws one of the last soon ends.

    Attributes:
        experts: The expert of each item.
        rows: Its number of rows.
        starts: Its first row in `order`.
    """

    experts: _Integers
    rows: _Integers
    starts: _Integers


def _items(counts: _Integers, most_rows: int) -> _ItemTable:
    """Cut the rows of each expert into as few items of at most `most_rows` as there can be, whose sizes differ by one at most."""
    pieces = -(-counts // most_rows)  # items of each expert
    experts = np.repeat(np.arange(len(counts), dtype=np.int64), pieces)
    index_in_expert = np.arange(len(experts), dtype=np.int64) - np.repeat(np.cumsum(pieces) - pieces, pieces)
    rows, one_more = np.divmod(counts[experts], pieces[experts])
    rows = rows + (index_in_expert < one_more)
    starts = np.cumsum(rows) - rows
    largest_first = np.argsort(-rows, kind="stable")
    return _ItemTable(*(np.ascontiguousarray(column[largest_first]) for column in (experts, rows, starts)))


def _blocks(product: Product, items: _ItemTable) -> tuple[_Integers, int]:
    """Return the LINEAR blocks of the items for one of the products.

    Returns:
        blocks: [items, fields]; _Items._multiply fills in `scratch` and `out`, `_run` those of x.
        nbytes: What the laid-out rows of the largest item take.
    """
    plans = {rows: grouped.cached_plan(product.kernel, rows, 1) for rows in np.unique(items.rows).tolist()}
    blocks = np.frombuffer(bytearray().join(plans[rows][0] for rows in items.rows.tolist()), dtype=np.int64).reshape(-1, _FIELDS)
    blocks[:, _COLUMN["weights"]] = product.weight + items.experts * product.kernel.nbytes
    if product.bias:
        blocks[:, _COLUMN["bias"]] = product.bias + items.experts * (4 * product.n)
    blocks[:, _COLUMN["clamp"]] = _NO_CLAMP
    return blocks, max(nbytes for _, nbytes in plans.values())

"""A mixture of experts for many rows, such as those of a prompt, on the CPU in one native call.

    y[m] = sum over t of w[m, t] * (g[m, t] · Wdown[id[m, t]]ᵀ + bias[id[m, t]]),   g[m, t] = silu(gate) * up, or `Clamped` gates,
    gate, up = x[m] · Wgate_up[id[m, t]]ᵀ + bias[id[m, t]]

Routed rows, one for each row of x and expert, are sorted by expert and cut into items, each some rows of one expert. A thread draws an item
and computes all of it alone:

    lay out its rows of x -> gate_up product -> gates -> lay out the activations -> down product -> products [R, K], sorted by expert

After a barrier threads share the rows of y, each the sum of its T rows of products. Experts of today's mixtures are small: to share one of
them between threads costs more in barriers and counters than a product takes. Besides, an item's intermediate results stay in its core's
cache, and all memory is kept from call to call: the first touch of fresh pages takes longer than the products that would be stored there.

All between the products is float32. Few rows are computed by `steps.py`, where all threads share each expert.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal, NamedTuple

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

_FIELDS = len(LINEAR.fields)
_COLUMN = {name: LINEAR.offset(name) // 8 for name in LINEAR.fields}
_NO_CLAMP = struct.unpack("<q", struct.pack("<2f", -float("inf"), float("inf")))[0]
_LEAST_ROWS, _MOST_ROWS = 8, 128  # of an item: fewer leave tiles half empty, more take memory and gain nothing
_ITEMS_A_THREAD = 4  # at least, where experts have rows enough: the wait for the last thread is short
_PRODUCTS_BYTES = 1 << 25  # of one call: more rows take several
ITEMS = Block(
    (
        *("first_phase", "second_phase", "openmp", "counter"),
        *("items", "up", "down"),  # their number, and the addresses of a block of LINEAR for each
        "starts",  # int64 [items]: the first of an item's rows, in the order of experts
        "order",  # int64: m * T + t of the routed rows, in the order of experts
        "top_k",
        *("memory", "thread_bytes"),  # of the threads, and bytes of each; laid-out rows of x come first
        *("gate_up", "activations", "down_rows"),  # bytes from the start of a thread's memory
        "products",  # float32 [R + 1, K], of which the last row is 0
        *("rows", "k", "weights", "places", "out"),  # M, K; float32 and int64 [M, T]: the rows of products; float32 [M, K]
        "alpha_limit",  # floats of clamped gates
    ),
    frozenset({"alpha_limit"}),
)


@dataclass(frozen=True, slots=True)
class ItemsPhase:
    """What a phase is generated for.

    Attributes:
        kind: "items" computes products, "sums" y from them.
        clamped: Gates are `Clamped`.
    """

    kind: Literal["items", "sums"]
    clamped: bool = False


@emitted
def build(phase: ItemsPhase, isa: ISA, f: Function) -> None:
    """Emit a phase; its arguments are an ITEMS block, its thread and the number of threads."""
    getattr(_Items(phase, isa, f), phase.kind)()


class _Row(NamedTuple):
    """A row of an item: its number, the rows of the tile that it is in, and which of these it is."""

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
        """`for row in self._tiles(linear, n):` the rows of an item, in the tiles in which the product reads them."""
        big = LINEAR.load(linear, "tile_rows")
        split = big * LINEAR.load(linear, "tiles")  # the first row of the lesser tiles
        for r in self.f.loop(rows):
            is_large = r.below(split)
            in_tile = is_large.select(big, big - 1)
            yield _Row(r, in_tile, is_large.select(r, r - split) % in_tile)

    def _lay_out(self, linear: Value, row: _Row, x: Value, scratch: Value) -> None:
        """Emit the layout of the row at address x, in memory where the item's first row is at `scratch`."""
        tile = scratch + (row.number - row.inside) * LINEAR.load(linear, "row_bytes")
        self.f.call_pointer(LINEAR.load(linear, "row_function", "ptr"), linear, x, tile, row.tile_rows, row.inside)

    def _multiply(self, linear: Value, scratch: Value, out: Value) -> None:
        """Emit the product of laid-out rows, by this thread alone."""
        f = self.f
        linear.store(scratch, LINEAR.offset("scratch"), 8)
        linear.store(out, LINEAR.offset("out"), 8)
        f.call_pointer(LINEAR.load(linear, "second_phase", "ptr"), linear, f.value("i64", 0), f.value("i64", 1))

    def _gates(self, gate_up: Value, activations: Value, inner: Value) -> None:
        """Emit the activations of a row. Whole vectors are computed: what lies behind the row was read already, or is not read."""
        f, isa = self.f, self.isa
        count = (inner + (isa.lanes - 1)) // isa.lanes * isa.lanes
        if self.spec.clamped:
            clamped_gates(f, isa, gate_up, activations, count, ITEMS.load_floats(self.args, "alpha_limit"))
        else:
            through_gates(f, isa, gate_up, count, gate_up + inner * 4)

    def sums(self) -> None:
        """Emit y; threads share its rows evenly."""
        f, isa, (_, thread, threads) = self.f, self.isa, self.f.parameters
        rows, k, top_k = (self.get(name) for name in ("rows", "k", "top_k"))
        products, whole = self.pointer("products"), k // isa.lanes * isa.lanes
        for r in f.loop((thread + 1) * rows // threads, thread * rows // threads):
            weights, places = self.pointer("weights") + r * top_k * 4, self.pointer("places") + r * top_k * 8
            out = self.pointer("out") + r * k * 4

            def sum_at(i: Value, type_: str, weights: Value = weights, places: Value = places, out: Value = out) -> None:
                total = f.variable(f.value(type_, 0.0))
                for t in f.loop(top_k):
                    product = products + (places + t * 8).load("i64", 0, 8) * k * 4
                    weight = (weights + t * 4).load("float", 0, 4)
                    by = weight if type_ == "float" else weight.splat(isa.lanes)
                    total.value = f.fma((product + i * 4).load(type_, 0, 4), by, total.value)
                (out + i * 4).store(total.value, 0, 4)

            for i in f.loop(whole, step=isa.lanes):
                sum_at(i, isa.floats)
            for i in f.loop(k, start=whole):
                sum_at(i, "float")


def run(
    products: tuple[Product, Product], x: Tensor, ids: Tensor, weights: Tensor, clamped: Clamped | None = None, first: int = 0
) -> Tensor:
    """Compute y, float32 [M, K].

    Args:
        products: gate_up [2 I, K] and down [K, I] of the first expert; weights and biases of the others follow in memory.
        x: float32 [M, K], contiguous and on the CPU, like all others.
        ids: int64 [M, T], each in 0 … E - 1, which the caller checks.
        weights: float32 [M, T].
        clamped: Parameters of clamped gates; None: silu(gate) * up.
        first: Experts before this one are left out of the sums.
    """
    y, top_k = torch.empty_like(x), ids.shape[1]
    rows = max(1, _PRODUCTS_BYTES // (4 * top_k * x.shape[1]))
    for part_x, part_ids, part_weights, part_y in zip(*(t.split(rows) for t in (x, ids, weights, y)), strict=True):
        _run(products, (part_x, part_ids, part_weights, part_y), clamped, first)
    return y


def _run(products: tuple[Product, Product], tensors: tuple[Tensor, Tensor, Tensor, Tensor], clamped: Clamped | None, first: int) -> None:
    """Compute as many rows as one call takes. `tensors`: x, ids, weights and y."""
    (gate_up, down), (x, ids, weights, y) = products, tensors
    (m, k), top_k, available = x.shape, ids.shape[1], runtime.threads()
    experts = ids.reshape(-1).numpy()
    order = np.argsort(experts, kind="stable")
    counts = np.bincount(experts)
    order, counts[:first] = order[counts[:first].sum() :], 0
    places = np.full(len(experts), len(order))  # of what is left out: a row of zeros
    places[order] = np.arange(len(order))
    most_rows = min(_MOST_ROWS, max(_LEAST_ROWS, len(order) // (_ITEMS_A_THREAD * available)))
    items = _items(counts, most_rows)
    threads = max(1, min(available, len(items.rows)))

    up_blocks, up_bytes = _blocks(gate_up, items)
    down_blocks, down_bytes = _blocks(down, items)
    up_blocks[:, _COLUMN["x"]], up_blocks[:, _COLUMN["x_stride"]] = x.data_ptr(), 4 * k
    n, inner = gate_up.n, down.k
    starts = np.cumsum([0, up_bytes, 4 * most_rows * n + 64, 0 if clamped is None else 4 * most_rows * inner + 64, down_bytes])
    starts = (starts + 63) // 64 * 64 + 64 * np.arange(len(starts))
    thread_bytes, product_bytes = int(starts[-1]), 4 * k * (len(order) + 1)
    memory = PLANS.expert_items.of(threads * thread_bytes + product_bytes)
    outputs = memory + threads * thread_bytes
    ctypes.memset(outputs + product_bytes - 4 * k, 0, 4 * k)
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
            "thread_bytes": thread_bytes,
            "gate_up": int(starts[1]),
            "activations": int(starts[2]),
            "down_rows": int(starts[3]),
            "products": outputs,
            "rows": m,
            "k": k,
            "weights": weights.data_ptr(),
            "places": places.ctypes.data,
            "out": y.data_ptr(),
            "alpha_limit": clamped or (0.0, 0.0),
        }
    )
    gate_up.kernel.run(ctypes.addressof(arguments), threads)


class _ItemTable(NamedTuple):
    """Items, those with the most rows first: their experts, numbers of rows, and first rows in the order of experts; int64 all."""

    experts: NDArray[np.int64]
    rows: NDArray[np.int64]
    starts: NDArray[np.int64]


def _items(counts: NDArray[np.int64], most_rows: int) -> _ItemTable:
    """Cut the rows of each expert into items of almost the same size. `counts`: rows of each expert."""
    pieces = -(-counts // most_rows)
    experts = np.repeat(np.arange(len(counts)), pieces)
    number = np.arange(len(experts)) - np.repeat(np.cumsum(pieces) - pieces, pieces)  # among the expert's items
    rows, larger = np.divmod(counts[experts], pieces[experts])
    rows = rows + (number < larger)
    starts = np.cumsum(rows) - rows
    largest_first = np.argsort(-rows, kind="stable")
    return _ItemTable(*(np.ascontiguousarray(part[largest_first]) for part in (experts, rows, starts)))


def _blocks(product: Product, items: _ItemTable) -> tuple[NDArray[np.int64], int]:
    """Return the blocks of LINEAR of items, [items, fields], and the bytes that the largest item's laid-out rows take."""
    plans = {int(rows): grouped.cached_plan(product.kernel, int(rows), 1) for rows in np.unique(items.rows)}
    blocks = np.frombuffer(bytearray().join(plans[rows][0] for rows in items.rows.tolist()), dtype=np.int64).reshape(-1, _FIELDS)
    blocks[:, _COLUMN["weights"]] = product.weight + items.experts * product.kernel.nbytes
    if product.bias:
        blocks[:, _COLUMN["bias"]] = product.bias + items.experts * (4 * product.n)
    blocks[:, _COLUMN["clamp"]] = _NO_CLAMP
    return blocks, max((size for _, size in plans.values()), default=0)

"""Encoder layers (BERT and others), one after the other, for whole sequences in one native call: x [B, T, K] -> [B, T, K], float32.

    qkv = x · Wqkvᵀ + bias                   each is a product of `linear.py`: activations are laid out, and quantized, once
    a   = attention(qkv)                     every token sees every other, where a mask lets it (`attend_whole.py`)
    h   = norm(a · Woᵀ + bias + x)           layer norms (`step_sequence.py`)
    g   = gelu(h · Wupᵀ + bias)
    y   = norm(g · Wdownᵀ + bias + h)

or, where the norms come before (ViT):

    qkv = norm(x) · Wqkvᵀ + bias,  h = a · Woᵀ + bias + x,  g = gelu(norm(h) · Wupᵀ + bias),  y = g · Wdownᵀ + bias + h

A norm is computed with the laying out of its rows, so the last one of a layer with that of the next layer. Everything between the steps is
float32. Many sequences are taken some at a time, so that what lies between the steps stays in caches; where there are enough of them each
thread takes its own, so that no data moves between cores and there are no barriers.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear import driver
from halfbyte.kernels.cpu.linear.linear import CALL, WORK_A_THREAD, pack_call
from halfbyte.kernels.cpu.plan_cache import PLANS, PlanCache
from halfbyte.kernels.cpu.step_sequence import NORM, PRODUCT, Product, Step, StepSequence, phase, run_lanes
from halfbyte.kernels.cpu.transformer import attend_whole
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE, WholeSpec
from halfbyte.kernels.cpu.transformer.sublayers import Fields, Norm, rowwise_step

_BYTES = 1 << 23  # of what lies between the steps at a time, of threads that share it
_LANE_BYTES = 1 << 21  # and of one that does not: what is in its core's second-level cache
_SEQUENCES_A_LANE = 4  # fewer are shared: a lane may have one sequence more than another
_PLANS = 128
_INFINITE = float("inf")
_X, _OUT, _RESIDUAL = (LINEAR.offset(name) for name in ("x", "out", "residual"))
_NORMED, _MASK = PRODUCT.offset("normed"), WHOLE.offset("mask")
_pack_one, _pack_two, _pack_seven = (struct.Struct(f"<{n}q").pack_into for n in (1, 2, 7))
_Places = list[tuple[Buffer, int, int, int]]


class _Size(NamedTuple):
    """The sizes of a call. `lane`: the index of a parallel lane, each of which has its own memory."""

    batch: int
    tokens: int
    masked: bool
    biased: bool
    threads: int
    lane: int


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer by their addresses; the caller must keep them alive.

    up      its kernel has GELU
    norms   after attention and after `down`; where they come `before`, before qkv and before `up`
    scale   of scores
    """

    qkv: Product
    o: Product
    up: Product
    down: Product
    norms: tuple[Norm, Norm]
    before: bool
    heads: int
    dim: int
    scale: float
    plans: PlanCache[Any] = field(default_factory=lambda: PlanCache(_PLANS))  # of _Plan, for this layer and those behind it

    @property
    def row_bytes(self) -> int:
        """Bytes of a token between the steps."""
        laid_out = max(product.kernel.row_bytes for product in (self.qkv, self.o, self.up, self.down))
        return laid_out + 4 * (self.qkv.n + self.o.k + 2 * self.o.n + self.up.n)


class _Plan:
    """The steps of layers for so many tokens, with all arguments but those that change from call to call."""

    def __init__(self, layers: tuple[Layer, ...], size: _Size) -> None:
        first = layers[0]
        self.layers, self._m, self._threads = layers, size.batch * size.tokens, size.threads
        products = first.qkv, first.o, first.up, first.down
        padded, thread_bytes = attend_whole.sizes(size.tokens, size.tokens, first.dim, current())
        laid_out = self._m * max(product.kernel.taking(self._m).row_bytes for product in products)
        widths = first.qkv.n, first.o.k, first.o.n, first.o.n, first.up.n
        sizes = laid_out, size.threads * thread_bytes, size.threads * 4 * first.o.n, *(4 * self._m * n for n in widths)
        *starts, end = accumulate((n + 63 & ~63 for n in sizes), initial=0)
        self.base = PLANS.lanes[size.lane].of(end)
        self._laid_out, scratch, rows, *between = (self.base + start for start in starts)
        self._private, self._between = (rows, 4 * first.o.n, 0), tuple(between)
        self._panels = driver.phases(current())["panels"]
        self._attend = _attention(first, size, (between[0], between[1], scratch), padded, thread_bytes)
        self._blocks: list[Buffer] = []
        # For x and what each layer gives: (block, offset, sign, summand) wherever sign * its address + summand is an argument.
        self._places: list[_Places] = [[] for _ in range(len(layers) + 1)]
        before: Layer | None = None
        for layer, x, y in zip(layers, self._places, self._places[1:], strict=False):
            if layer.before:
                self._norm_first(layer, x, y)
            else:
                self._norm_last(layer, before, x)
            before = layer
        if not layers[-1].before:
            sums = between[3]
            norm, k = layers[-1].norms[1], first.o.n
            last = rowwise_step(norm.step("norm"), self._m, k, 4 * k, {"x": sums, **norm.fields})
            self._blocks.append(last)
            self._places[-1].append((last, NORM.offset("out"), 1, 0))
        self._sequence = StepSequence(self._blocks, size.threads)

    def _norm_last(self, layer: Layer, before: Layer | None, x: _Places) -> None:
        """y = norm(sums), which the next step computes."""
        qkv, attended, hidden, sums, gates = self._between
        kept = 0, 0, 4 * layer.o.n
        if before is None:
            _, linear = self._product(layer.qkv, 0, qkv)
            x.append((linear, _X, 1, 0))
        else:
            rows, _ = self._product(layer.qkv, sums, qkv, before.norms[1], kept)
            x.append((rows, _NORMED, 1, 0))
        self._blocks.append(self._attend)
        _, linear = self._product(layer.o, attended, sums)
        x.append((linear, _RESIDUAL, 1, -sums))
        self._product(layer.up, sums, gates, layer.norms[0], (hidden, *kept[1:]))
        _, linear = self._product(layer.down, gates, sums)
        _pack_one(linear, _RESIDUAL, hidden - sums)

    def _norm_first(self, layer: Layer, x: _Places, y: _Places) -> None:
        qkv, attended, hidden, _sums, gates = self._between
        _, linear = self._product(layer.qkv, 0, qkv, layer.norms[0], self._private)
        x.append((linear, _X, 1, 0))
        self._blocks.append(self._attend)
        _, linear = self._product(layer.o, attended, hidden)
        x.append((linear, _RESIDUAL, 1, -hidden))
        self._product(layer.up, hidden, gates, layer.norms[1], self._private)
        _, linear = self._product(layer.down, gates, 0)
        y += [(linear, _OUT, 1, 0), (linear, _RESIDUAL, -1, hidden)]

    def _product(
        self, product: Product, x: int, out: int, norm: Norm | None = None, normed: tuple[int, int, int] = (0, 0, 0)
    ) -> tuple[Buffer, Buffer]:
        """Two steps: the one that lays out rows, normed rows first, and the one that multiplies them."""
        linear, _ = product.kernel.arguments(self._m, self._threads)
        pack_call(linear, CALL, 0, x, 4 * product.k, self._laid_out, product.weight, product.bias, out, 0, -_INFINITE, _INFINITE)
        _pack_two(linear, 0, self._panels, 0)
        fields: Fields = {"linear": ctypes.addressof(linear)}
        if norm is not None:
            fields |= {"norm": norm.weight, "shift": norm.bias, "eps": (norm.eps, 0.0)}
            fields |= dict(zip(("normed", "normed_thread", "normed_row"), normed, strict=True))
        rows = arguments(PRODUCT, phase(Step("rows", layer_norm=True)), fields)
        self._blocks += [rows, linear]
        return rows, linear

    def ready(self, addresses: Sequence[int], mask: tuple[int, ...], bias: tuple[int, ...]) -> StepSequence:
        """addresses: of x and of what each layer gives; mask, bias: as `attend_whole` gives their fields."""
        for address, places in zip(addresses, self._places, strict=True):
            for block, offset, sign, summand in places:
                _pack_one(block, offset, sign * address + summand)
        _pack_seven(self._attend, _MASK, *mask, *bias)
        return self._sequence


def _attention(layer: Layer, size: _Size, memory: tuple[int, int, int], padded: int, thread_bytes: int) -> Buffer:
    """memory: queries, keys and values; what is attended; memory of the threads."""
    qkv, attended, scratch = memory
    head, row = 4 * layer.dim, 4 * layer.qkv.n
    fields: Fields = {
        "out": attended,
        "batch": size.batch,
        "heads": layer.heads,
        "tokens": size.tokens,
        "length": size.tokens,
        "padded": padded,
        "parts": attend_whole.parts(size.batch * layer.heads, size.tokens, size.threads),
        "scratch": scratch,
        "thread_bytes": thread_bytes,
        "scale": (layer.scale, 0.0),
    }
    for i, name in enumerate(("q", "k", "v")):
        fields |= {name: qkv + i * layer.heads * head, f"{name}_batch": size.tokens * row, f"{name}_head": head, f"{name}_token": row}
    spec = WholeSpec(layer.dim, size.masked, size.biased)
    return arguments(WHOLE, compiled(attend_whole.build, spec, current()), fields)


def run(layers: Sequence[Layer], x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> list[Tensor]:
    """x [B, T, K], contiguous float32 -> what each of the layers gives, one after the other, each [B, T, K].

    The layers have the same sizes, and their norms the same places.

    mask    bool [B or 1, 1, T or 1, T] with contiguous last dimension: which tokens each may see; None: all
    bias    float32 [B or 1, H or 1, T or 1, T] with contiguous last dimension: what is added to scores
    """
    batch, tokens, width = x.shape
    key, first = tuple(layers), layers[0]
    outputs = [torch.empty_like(x) for _ in layers]
    mask, bias = (None if scores is None else attend_whole.readable(scores) for scores in (mask, bias))
    seen, added = attend_whole.mask_fields(mask), attend_whole.bias_fields(bias)
    threads = max(1, min(runtime.threads(), batch * tokens * first.up.n * first.up.k // WORK_A_THREAD))
    lanes = threads if batch >= _SEQUENCES_A_LANE * threads else 1
    at_once = max(1, (_LANE_BYTES if lanes > 1 else _BYTES) // (tokens * first.row_bytes))
    rounds = -(-batch // (lanes * at_once))
    for i in range(rounds):
        sequences = list[StepSequence]()
        for lane in range(lanes):
            first_one, last = lane * batch // lanes, (lane + 1) * batch // lanes
            start, stop = (first_one + j * (last - first_one) // rounds for j in (i, i + 1))
            if start == stop:
                continue
            size = _Size(stop - start, tokens, mask is not None, bias is not None, threads // lanes, lane)
            plan: _Plan | None = first.plans.entries.get(size)
            if plan is None or plan.layers != key or plan.base != PLANS.lanes[lane].start:
                plan = first.plans.entries[size] = _Plan(key, size)
            at = 4 * start * tokens * width
            scores = ((fields[0] + start * fields[1], *fields[1:]) for fields in (seen, added))
            sequences.append(plan.ready([t.data_ptr() + at for t in (x, *outputs)], *scores))
        if lanes > 1:
            run_lanes(sequences)
        else:
            sequences[0].run()
    return outputs

"""Decoder layers of Llama and its like for the newest tokens of each sequence, in one call: x [B, t, K] -> [B, t, K], float32.

    qkv = norm(x) · Wqkvᵀ + bias             each is a product of `linear.py`: activations are laid out, and quantized, once; where formats
                                             differ, queries, keys and values are up to three products
    a   = attend(qkv)                        positions, the cache's new entries, attention (`attend.py`; of many tokens `attend_whole.py`)
    h   = a · Woᵀ + bias + x
    g   = norm(h) · Wgate_upᵀ                silu(gate) * up where the gates were
    y   = g · Wdownᵀ + bias + h

Everything between the steps is float32 and stays in memory of a few KB a row. Layers that follow each other are one chain: what a
program does between two of them would run with caches that are full of weights, some ten times as long as otherwise. Prompts are read
some tokens at a time, or some sequences, so that what lies between the steps stays in memory of some MB.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu import attend, attend_whole, runtime
from halfbyte.kernels.cpu.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.attend import ATTEND, AttendSpec
from halfbyte.kernels.cpu.attend_whole import WHOLE, WholeSpec
from halfbyte.kernels.cpu.chain import PRODUCT, Chain, Product, Step, phase, shares
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear import CALL, KINDS, WORK_A_THREAD, pack_call
from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import PANEL

_INFINITE = float("inf")
_X, _OUT, _RESIDUAL, _OUT_STRIDE = (LINEAR.offset(field) for field in ("x", "out", "residual", "out_stride"))
_pack_one, _pack_two = struct.Struct("<q").pack_into, struct.Struct("<2q").pack_into
_pack_cache = ATTEND.struct("cos", "length").pack_into
_CACHE = ATTEND.offset("cos")
_pack_seen = WHOLE.struct("before", "mask_token").pack_into
_SEEN = WHOLE.offset("before")
CACHES = {**KINDS, torch.int8: "int8"}  # of keys and values
_ROWS, _STEP = 256, 64  # at a time; memory is for multiples of so many
_FEW = 8  # tokens: for more of them keys are laid out before they are multiplied


class Size(NamedTuple):
    """Of a call. kind: of the cache."""

    batch: int
    tokens: int
    kind: str
    masked: bool
    threads: int


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer, by their addresses: whoever calls sees to it that they are there. What is not packed is float32.

    qkv         one product, or one after the other those whose outputs stand side by side
    norms       weights [K] before qkv and before gate_up
    eps         of both, and of head_norms
    head_norms  weights [D] of queries and keys; 0 where heads have no norms
    scale       of scores
    """

    qkv: tuple[Product, ...]
    o: Product
    gate_up: Product
    down: Product
    norms: tuple[int, int]
    head_norms: tuple[int, int]
    eps: tuple[float, float, float]
    heads: int
    kv_heads: int
    dim: int
    scale: float
    plans: PlanCache[Any] = field(default_factory=PlanCache)  # of Plan

    @property
    def both(self) -> int:
        """Outputs of qkv."""
        return sum(product.n for product in self.qkv)


@dataclass(frozen=True, eq=False, slots=True)
class _Memory:
    """What the calls of layers of one size share in a thread: addresses in one block of memory."""

    block: Tensor
    normed: int
    laid_out: int
    qkv: int
    attended: int
    hidden: int
    gates: int
    scratch: int  # of attention


class Plan:
    """A layer's steps for so many rows, with all arguments but those that change from token to token."""

    def __init__(self, layer: Layer, size: Size) -> None:
        m, threads = size.batch * size.tokens, size.threads
        self._tokens = size.tokens
        products = *layer.qkv, layer.o, layer.gate_up, layer.down
        alone, most_k = m == 1, max(p.k for p in products)
        linears = [p.kernel.arguments(m, threads) for p in products]
        private = max(laid_out for _, laid_out in linears) + 63 & ~63
        room = m if m <= _FEW else round_up(m, _STEP)  # rows, so that prompts of all lengths share memory
        widths = layer.both, layer.o.k, layer.o.n, layer.gate_up.n
        laid_out = threads * private if alone else -(-private // m) * room
        scratch = _attention_sizes(layer, room)[1] if size.tokens > _FEW else 0
        self._memory = memory = _shared((threads * most_k * 4, laid_out, *(room * n * 4 for n in widths), threads * scratch))
        self._linears = [buffer for buffer, _ in linears]
        self.attention = _attention(layer, memory, size)
        self._tables: list[ctypes.Array[ctypes.c_int64]] = []
        common = {"normed": memory.normed, "normed_thread": 4 * most_k, "private": private if alone else 0}
        blocks: list[Buffer] = []
        columns = accumulate((4 * product.n for product in layer.qkv[:-1]), initial=memory.qkv)
        places = *((0, to) for to in columns), (memory.attended, memory.hidden), (memory.hidden, memory.gates), (memory.gates, 0)
        for i, (product, buffer, (x, out)) in enumerate(zip(products, self._linears, places, strict=True)):
            stride = 4 * (layer.gate_up.n if product is layer.down else product.k)
            pack_call(buffer, CALL, 0, x, stride, memory.laid_out, product.weight, product.bias, out, 0, -_INFINITE, _INFINITE)
            gated, first = product is layer.gate_up, i < len(layer.qkv)
            if first:
                _pack_one(buffer, _OUT_STRIDE, 4 * layer.both)
            fields: dict[str, int | tuple[float, float]] = {
                **common,
                "norm": layer.norms[0] if first else layer.norms[1] if gated else 0,
                "eps": (layer.eps[gated], 0.0),
            }
            steps, table = product_steps(product.n, buffer, fields, alone=alone, threads=threads, gated=gated)
            self._tables.append(table)
            blocks += steps
            if product is layer.qkv[-1]:
                blocks += self.attention
        self.blocks = tuple(blocks)

    def point(self, x: int, out: int, cache: Sequence[int]) -> None:
        """Fills in what changes; `cache`: the arguments of ATTEND from `cos` to `length`."""
        *qkv, o, _, down = self._linears
        hidden = self._memory.hidden
        for product in qkv:
            _pack_one(product, _X, x)
        _pack_one(o, _RESIDUAL, x - hidden)
        _pack_two(down, _OUT, out, hidden - out)
        _pack_cache(self.attention[0], _CACHE, *cache)
        if len(self.attention) > 1:
            *seen, length = cache[4:]
            _pack_seen(self.attention[1], _SEEN, length, length + self._tokens, *seen)


def product_steps(
    n: int, linear: Buffer, fields: Mapping[str, int | tuple[float, float]], *, alone: bool, threads: int, gated: bool = False
) -> tuple[list[Buffer], ctypes.Array[ctypes.c_int64]]:
    """One step for one row (`alone`), two for more, with the arguments of the product with n outputs, and others of PRODUCT; and what they
    read, to be kept."""
    panels = -(-n // PANEL) // (2 if gated else 1)
    cut = shares(panels, threads)
    table = (ctypes.c_int64 * len(cut))(*cut)
    of_panels = {"groups": len(cut) - 1, "shares": ctypes.addressof(table), "gate": panels if gated else 0}
    steps = (Step("product", gated),) if alone else (Step("rows"), Step("panels", gated))
    return [arguments(PRODUCT, phase(step), {**fields, **of_panels, "linear": ctypes.addressof(linear)}) for step in steps], table


def _attention(layer: Layer, memory: _Memory, size: Size) -> tuple[Buffer, ...]:
    """One step, or for many tokens two: they enter the cache, and attend to it."""
    group, many = layer.heads // layer.kv_heads, size.tokens > _FEW
    spec = AttendSpec(layer.dim, group, size.kind, layer.head_norms != (0, 0), size.masked and not many, many)
    sizes = {"batch": size.batch, "tokens": size.tokens}
    fields: dict[str, int | tuple[float, float]] = {
        **sizes,
        "qkv": memory.qkv,
        "qkv_stride": 4 * layer.both,
        "out": memory.attended,
        "out_stride": 4 * layer.o.k,
        "kv_heads": layer.kv_heads,
        "q_norm": layer.head_norms[0],
        "k_norm": layer.head_norms[1],
        "scale_eps": (layer.scale, layer.eps[2]),
    }
    first = arguments(ATTEND, compiled(attend.build, spec, current()), fields)
    if not many:
        return (first,)
    padded, thread_bytes = _attention_sizes(layer, size.tokens)
    fields = {
        **sizes,
        "q": memory.qkv,
        "q_batch": 4 * layer.both * size.tokens,
        "q_head": 4 * layer.dim,
        "q_token": 4 * layer.both,
        "out": memory.attended,
        "heads": layer.kv_heads,
        "padded": padded,
        "parts": attend_whole.parts(size.batch * layer.kv_heads, size.tokens * group, size.threads),
        "scratch": memory.scratch,
        "thread_bytes": thread_bytes,
        "scale": (layer.scale, 0.0),
    }
    whole = WholeSpec(layer.dim, size.masked, group=group, kind=size.kind, causal=True)
    return first, arguments(WHOLE, compiled(attend_whole.build, whole, current()), fields)


def _attention_sizes(layer: Layer, tokens: int) -> tuple[int, int]:
    return attend_whole.sizes(attend_whole.MOST_AT_ONCE, tokens * layer.heads // layer.kv_heads, layer.dim, current())


_memories: PlanCache[_Memory] = PlanCache()


def _shared(sizes: tuple[int, ...]) -> _Memory:
    return _memories.get(sizes, lambda: _allocated(sizes))


def _allocated(sizes: tuple[int, ...]) -> _Memory:
    ends = [0, *accumulate(size + 63 & ~63 for size in sizes)]
    block = torch.empty(ends[-1] + 64, dtype=torch.uint8, device="cpu")
    start = block.data_ptr() + 63 & ~63
    return _Memory(block, *(start + end for end in ends[:-1]))


def supports(gates: int, heads: int, kv_heads: int, dim: int) -> str | None:
    """Why a layer with so many gates, and such heads, is not computed here; None where it is."""
    if gates % PANEL:
        return f"{gates} gates are not whole panels of {PANEL}"
    return attend.supports(heads, kv_heads, dim)


class Entry(NamedTuple):
    """Where the tokens enter a layer's cache: keys and values [B, Hkv, T, D] with D contiguous, T >= length + t, of one type that is
    float32, bfloat16 or float16; or int8, with the records of `layouts/records.py` in the place of D elements."""

    keys: Tensor
    values: Tensor
    length: int


def run(layers: Sequence[Layer], x: Tensor, rotary: tuple[Tensor, Tensor], entries: Sequence[Entry], mask: Tensor | None) -> list[Tensor]:
    """x [B, t, K], contiguous float32 -> what each of the layers gives, one after the other.

    rotary  cosines and sines, each [B or 1, t, D], contiguous float32
    mask    bool [B or 1, 1, t or 1, length + t or more] with contiguous last dimension; None: each token sees those before it
    """
    batch, tokens, _ = x.shape
    out = [torch.empty_like(x) for _ in layers]
    if mask is not None and tokens > _FEW:
        mask = attend_whole.readable(mask)
    if batch * tokens <= _ROWS:
        _run(layers, x, rotary, entries, mask, [y.data_ptr() for y in out])
        return out
    sequences, most = max(1, _ROWS // tokens), min(tokens, _ROWS)
    pieces = -(-tokens // most)
    for layer, entry, y in zip(layers, entries, out, strict=True):
        for b in range(0, batch, sequences):
            some = slice(b, b + sequences)
            of_some = [part[some] if len(part) > 1 else part for part in (*rotary, mask) if part is not None]
            for i in range(pieces):
                begin, end = (j * tokens // pieces for j in (i, i + 1))
                turns = of_some[0][:, begin:end], of_some[1][:, begin:end]
                seen = None if mask is None else of_some[2]
                if seen is not None and seen.shape[2] > 1:
                    seen = seen[:, :, begin:end]
                place = Entry(entry.keys[some], entry.values[some], entry.length + begin)
                _run((layer,), x[some, begin:end], turns, (place,), seen, [y[some, begin:end].data_ptr()])
        x = y
    return out


def _run(
    layers: Sequence[Layer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    entries: Sequence[Entry],
    mask: Tensor | None,
    targets: Sequence[int],
) -> None:
    """`run` for up to _ROWS rows; targets: where what the layers give goes."""
    batch, tokens, _ = x.shape
    first = layers[0]
    threads = threads_of(first, batch * tokens)
    cos, sin = rotary
    before = cos.data_ptr(), sin.data_ptr(), 4 * cos.stride(0) if len(cos) > 1 else 0, 4 * first.dim
    after = (0, 0, 0)
    if mask is not None:
        after = mask.data_ptr(), mask.stride(0) if len(mask) > 1 else 0, mask.stride(2) if mask.shape[2] > 1 else 0
    source = x.data_ptr()
    plans = []
    for layer, (keys, values, length), target in zip(layers, entries, targets, strict=True):
        size = Size(batch, tokens, CACHES[keys.dtype], mask is not None, threads)
        plan: Plan = layer.plans.entries.get(size) or layer.plans.get(size, functools.partial(Plan, layer, size))
        plan.point(source, target, (*before, *places(keys, values), *after, length))
        source = target
        plans.append(plan)
    _chain(first, tuple(plans), threads).run()


def threads_of(layer: Layer, rows: int) -> int:
    """Of those there are, how many are worth waking for so many rows."""
    return max(1, min(runtime.threads(), rows * layer.gate_up.n * layer.gate_up.k // WORK_A_THREAD))


def places(keys: Tensor, values: Tensor) -> list[int]:
    """The arguments of ATTEND from `keys` to `value_token`."""
    found = []
    for tensor in (keys, values):
        nbytes, strides = tensor.element_size(), tensor.stride()
        found += [tensor.data_ptr(), strides[0] * nbytes, strides[1] * nbytes, strides[2] * nbytes]
    return found


def _chain(first: Layer, plans: tuple[Plan, ...], threads: int) -> Chain:
    """The steps of all plans, kept with the first layer until others follow it."""
    key = "chain", len(plans), threads
    found = first.plans.entries.get(key)
    if found is None or found[0] != plans:
        found = first.plans.entries[key] = plans, Chain([block for plan in plans for block in plan.blocks], threads)
    chain: Chain = found[1]
    return chain

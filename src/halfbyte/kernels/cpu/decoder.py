"""Decoder layers of Llama and its like for the newest tokens of each sequence, in one call: x [B, t, K] -> [B, t, K], float32.

    qkv = norm(x) · Wqkvᵀ + bias             each is a product of `linear.py`: activations are laid out, and quantized, once
    a   = attend(qkv)                        positions, the cache's new entries, attention (`attend.py`)
    h   = a · Woᵀ + bias + x
    g   = norm(h) · Wgate_upᵀ                silu(gate) * up where the gates were
    y   = g · Wdownᵀ + bias + h

Everything between the steps is float32 and stays in memory of a few KB a row. Layers that follow each other are one chain: what a
program does between two of them would run with caches that are full of weights, some ten times as long as otherwise.
"""

from __future__ import annotations

import ctypes
import functools
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu import attend, runtime
from halfbyte.kernels.cpu.arguments import LINEAR
from halfbyte.kernels.cpu.attend import ATTEND, AttendSpec
from halfbyte.kernels.cpu.chain import PRODUCT, Chain, Product, Step, phase, shares
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear import CALL, KINDS, WORK_A_THREAD, pack_call
from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.layouts.cpu_tiles import PANEL

_INFINITE = float("inf")
_X, _OUT, _RESIDUAL = (LINEAR.offset(field) for field in ("x", "out", "residual"))
_pack_one, _pack_two = struct.Struct("<q").pack_into, struct.Struct("<2q").pack_into
_pack_cache = ATTEND.struct("cos", "length").pack_into
_CACHE = ATTEND.offset("cos")


class _Size(NamedTuple):
    """Of a call. kind: of the cache."""

    batch: int
    tokens: int
    kind: str
    masked: bool
    threads: int


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer, by their addresses: whoever calls sees to it that they are there. What is not packed is float32.

    norms       weights [K] before qkv and before gate_up
    eps         of both, and of head_norms
    head_norms  weights [D] of queries and keys; 0 where heads have no norms
    scale       of scores
    """

    qkv: Product
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
    plans: PlanCache[Any] = field(default_factory=PlanCache)  # of _Plan


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


class _Plan:
    """A layer's steps for so many rows, with all arguments but those that change from token to token."""

    def __init__(self, layer: Layer, size: _Size) -> None:
        m, threads = size.batch * size.tokens, size.threads
        products = layer.qkv, layer.o, layer.gate_up, layer.down
        alone, most_k = m == 1, max(p.k for p in products)
        linears = [p.kernel.arguments(m, threads) for p in products]
        private = max(laid_out for _, laid_out in linears) + 63 & ~63
        widths = layer.qkv.n, layer.o.k, layer.o.n, layer.gate_up.n
        self._memory = memory = _shared((threads * most_k * 4, threads * private, *(m * n * 4 for n in widths)))
        self._linears = [buffer for buffer, _ in linears]
        self._attend = _attention(layer, memory, size)
        self._tables: list[ctypes.Array[ctypes.c_int64]] = []
        common = {"normed": memory.normed, "normed_thread": 4 * most_k, "private": private if alone else 0}
        blocks: list[ctypes.Array[ctypes.c_char]] = []
        places = (0, memory.qkv), (memory.attended, memory.hidden), (memory.hidden, memory.gates), (memory.gates, 0)
        for i, (product, buffer, (x, out)) in enumerate(zip(products, self._linears, places, strict=True)):
            stride = 4 * (layer.gate_up.n if product is layer.down else product.k)
            pack_call(buffer, CALL, 0, x, stride, memory.laid_out, product.weight, product.bias, out, 0, -_INFINITE, _INFINITE)
            gated = product is layer.gate_up
            panels = -(-product.n // PANEL) // (2 if gated else 1)
            cut = shares(panels, threads)
            self._tables.append((ctypes.c_int64 * len(cut))(*cut))
            fields: dict[str, int | tuple[float, float]] = {
                **common,
                "linear": ctypes.addressof(buffer),
                "norm": (layer.norms[0], 0, layer.norms[1], 0)[i],
                "eps": (layer.eps[i // 2], 0.0),
                "groups": len(cut) - 1,
                "shares": ctypes.addressof(self._tables[-1]),
                "gate": panels if gated else 0,
            }
            steps = (Step("product", gated),) if alone else (Step("rows"), Step("panels", gated))
            blocks.extend(arguments(PRODUCT, phase(step), fields) for step in steps)
            if product is layer.qkv:
                blocks.append(self._attend)
        self.blocks = tuple(blocks)

    def point(self, x: int, out: int, cache: Sequence[int]) -> None:
        """Fills in what changes; `cache`: the arguments of ATTEND from `cos` to `length`."""
        qkv, o, _, down = self._linears
        hidden = self._memory.hidden
        _pack_one(qkv, _X, x)
        _pack_one(o, _RESIDUAL, x - hidden)
        _pack_two(down, _OUT, out, hidden - out)
        _pack_cache(self._attend, _CACHE, *cache)


def _attention(layer: Layer, memory: _Memory, size: _Size) -> ctypes.Array[ctypes.c_char]:
    spec = AttendSpec(layer.dim, layer.heads // layer.kv_heads, size.kind, layer.head_norms != (0, 0), size.masked)
    fields: dict[str, int | tuple[float, float]] = {
        "qkv": memory.qkv,
        "qkv_stride": 4 * layer.qkv.n,
        "out": memory.attended,
        "out_stride": 4 * layer.o.k,
        "batch": size.batch,
        "tokens": size.tokens,
        "kv_heads": layer.kv_heads,
        "q_norm": layer.head_norms[0],
        "k_norm": layer.head_norms[1],
        "scale_eps": (layer.scale, layer.eps[2]),
    }
    return arguments(ATTEND, compiled(attend.build, spec, current()), fields)


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
    float32, bfloat16 or float16."""

    keys: Tensor
    values: Tensor
    length: int


def run(layers: Sequence[Layer], x: Tensor, rotary: tuple[Tensor, Tensor], entries: Sequence[Entry], mask: Tensor | None) -> Tensor:
    """x [B, t, K], contiguous float32 -> what each of the layers gives, one after the other: [layers, B, t, K].

    rotary  cosines and sines, each [B or 1, t, D], contiguous float32
    mask    bool [B or 1, 1, t or 1, length + t or more] with contiguous last dimension; None: each token sees those before it
    """
    batch, tokens, _ = x.shape
    first = layers[0]
    threads = max(1, min(runtime.threads(), batch * tokens * first.gate_up.n * first.gate_up.k // WORK_A_THREAD))
    cos, sin = rotary
    turn = 4 * first.dim
    before = cos.data_ptr(), sin.data_ptr(), turn * tokens if len(cos) > 1 else 0, turn
    after = (0, 0, 0)
    if mask is not None:
        after = mask.data_ptr(), mask.stride(0) if len(mask) > 1 else 0, mask.stride(2) if mask.shape[2] > 1 else 0
    out = x.new_empty((len(layers), *x.shape))
    source, target, step = x.data_ptr(), out.data_ptr(), 4 * x.numel()
    plans = []
    for layer, (keys, values, length) in zip(layers, entries, strict=True):
        size = _Size(batch, tokens, KINDS[keys.dtype], mask is not None, threads)
        plan: _Plan = layer.plans.entries.get(size) or layer.plans.get(size, functools.partial(_Plan, layer, size))
        places = []
        for tensor in (keys, values):
            nbytes, strides = tensor.element_size(), tensor.stride()
            places += [tensor.data_ptr(), strides[0] * nbytes, strides[1] * nbytes, strides[2] * nbytes]
        plan.point(source, target, (*before, *places, *after, length))
        source, target = target, target + step
        plans.append(plan)
    _chain(first, tuple(plans), threads).run()
    return out


def _chain(first: Layer, plans: tuple[_Plan, ...], threads: int) -> Chain:
    """The steps of all plans, kept with the first layer until others follow it."""
    key = "chain", len(plans), threads
    found = first.plans.entries.get(key)
    if found is None or found[0] != plans:
        found = first.plans.entries[key] = plans, Chain([block for plan in plans for block in plan.blocks], threads)
    chain: Chain = found[1]
    return chain

"""A decoder layer of Llama and its like for the newest tokens of each sequence, in one call: x [B, t, K] -> [B, t, K], float32.

    qkv = norm(x) · Wqkvᵀ + bias             each is a product of `linear.py`: activations are laid out, and quantized, once
    a   = attend(qkv)                        positions, the cache's new entries, attention (`attend.py`)
    h   = a · Woᵀ + bias + x
    g   = norm(h) · Wgate_upᵀ                silu(gate) * up where the gates were
    y   = g · Wdownᵀ + bias + h

Everything between the steps is float32 and stays in memory of a few KB a row.
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

from halfbyte.kernels.cpu import attend, jit, runtime
from halfbyte.kernels.cpu.arguments import LINEAR
from halfbyte.kernels.cpu.attend import ATTEND, AttendSpec
from halfbyte.kernels.cpu.chain import PRODUCT, Chain, Step, phase, shares
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kept import Kept
from halfbyte.kernels.cpu.linear import CALL, KINDS, WORK_A_THREAD, LinearKernel, pack_call
from halfbyte.layouts.cpu_tiles import PANEL

MOST_ROWS = 64
_INFINITE = float("inf")
_X, _OUT, _RESIDUAL = (LINEAR.offset(field) for field in ("x", "out", "residual"))
_pack_one, _pack_two = struct.Struct("<q").pack_into, struct.Struct("<2q").pack_into
_pack_cache = ATTEND.struct("cos", "length").pack_into
_CACHE = ATTEND.offset("cos")


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
    plans: Kept[Any] = field(default_factory=Kept)  # of _Plan


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
    """A layer's chain for so many rows, with all arguments but those that change from token to token."""

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
        common = {"normed": memory.normed, "normed_stride": 4 * most_k, "private": private if alone else 0}
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
                "openmp": runtime.openmp_address(),
                "linear": ctypes.addressof(buffer),
                "norm": (layer.norms[0], 0, layer.norms[1], 0)[i],
                "eps": (layer.eps[i // 2], 0.0),
                "groups": len(cut) - 1,
                "shares": ctypes.addressof(self._tables[-1]),
                "gate": panels if gated else 0,
            }
            steps = (Step("product", gated),) if alone else (Step("rows"), Step("panels", gated))
            blocks.extend(PRODUCT.buffer(fields | {"first_phase": phase(step)}) for step in steps)
            if product is layer.qkv:
                blocks.append(self._attend)
        self._chain = Chain(blocks, threads)

    def run(self, x: int, out: int, cache: Sequence[int]) -> None:
        """`cache`: the arguments of ATTEND from `cos` to `length`."""
        qkv, o, _, down = self._linears
        hidden = self._memory.hidden
        _pack_one(qkv, _X, x)
        _pack_one(o, _RESIDUAL, x - hidden)
        _pack_two(down, _OUT, out, hidden - out)
        _pack_cache(self._attend, _CACHE, *cache)
        self._chain.run()


def _attention(layer: Layer, memory: _Memory, size: _Size) -> ctypes.Array[ctypes.c_char]:
    spec = AttendSpec(layer.dim, layer.heads // layer.kv_heads, size.kind, layer.head_norms != (0, 0), size.masked)
    return ATTEND.buffer(
        {
            "first_phase": _attend_phase(spec, current()),
            "openmp": runtime.openmp_address(),
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
    )


_memories: Kept[_Memory] = Kept()


def _shared(sizes: tuple[int, ...]) -> _Memory:
    return _memories.get(sizes, lambda: _allocated(sizes))


def _allocated(sizes: tuple[int, ...]) -> _Memory:
    ends = [0, *accumulate(size + 63 & ~63 for size in sizes)]
    block = torch.empty(ends[-1] + 64, dtype=torch.uint8)
    start = block.data_ptr() + 63 & ~63
    return _Memory(block, *(start + end for end in ends[:-1]))


@functools.cache
def _attend_phase(spec: AttendSpec, isa: ISA) -> int:
    return jit.load(spec.name, functools.partial(attend.build, spec), isa)[spec.name]


def supports(gates: int, heads: int, kv_heads: int, dim: int) -> str | None:
    """Why a layer with so many gates, and such heads, is not computed here; None where it is."""
    if gates % PANEL:
        return f"{gates} gates are no whole panels of {PANEL}"
    return attend.supports(heads, kv_heads, dim)


def run(layer: Layer, x: Tensor, rotary: tuple[Tensor, Tensor], keys: Tensor, values: Tensor, length: int, mask: Tensor | None) -> Tensor:
    """x [B, t, K], contiguous float32, enters the cache at `length`: y [B, t, K].

    rotary        cosines and sines, each [B or 1, t, D], contiguous float32
    keys, values  [B, Hkv, T, D] with D contiguous, T >= length + t, float32, bfloat16 or float16
    mask          bool [B or 1, 1, t or 1, length + t or more] with contiguous last dimension; None: each token sees those before it
    """
    batch, tokens, _ = x.shape
    threads = max(1, min(runtime.threads(), batch * tokens * layer.gate_up.n * layer.gate_up.k // WORK_A_THREAD))
    size = _Size(batch, tokens, KINDS[keys.dtype], mask is not None, threads)
    plan = layer.plans.plans.get(size) or layer.plans.get(size, lambda: _Plan(layer, size))
    out = torch.empty_like(x)
    cos, sin = rotary
    nbytes, turn = keys.element_size(), 4 * layer.dim
    kb, kh, kt, _ = keys.stride()
    vb, vh, vt, _ = values.stride()
    mask_at = (0, 0, 0)
    if mask is not None:
        mask_at = mask.data_ptr(), mask.stride(0) if len(mask) > 1 else 0, mask.stride(2) if mask.shape[2] > 1 else 0
    cache = (
        *(cos.data_ptr(), sin.data_ptr(), turn * tokens if len(cos) > 1 else 0, turn),
        *(keys.data_ptr(), kb * nbytes, kh * nbytes, kt * nbytes),
        *(values.data_ptr(), vb * nbytes, vh * nbytes, vt * nbytes),
        *mask_at,
        length,
    )
    plan.run(x.data_ptr(), out.data_ptr(), cache)
    return out

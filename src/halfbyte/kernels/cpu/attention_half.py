"""The attention half of a decoder layer: x [m, K] -> h [m, K], float32.

    qkv = norm(x) · Wqkvᵀ + bias             each is a product of `linear.py`: activations are laid out, and quantized, once; where formats
                                             differ, queries, keys and values are up to three products
    a   = attend(qkv)                        positions, the cache's new entries, attention (`attend.py`; of many tokens `attend_whole.py`)
    h   = a · Woᵀ + bias + x
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from halfbyte.kernels.cpu import attend, attend_whole
from halfbyte.kernels.cpu.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.attend import ATTEND, AttendSpec
from halfbyte.kernels.cpu.attend_whole import WHOLE, WholeSpec
from halfbyte.kernels.cpu.chain import Product
from halfbyte.kernels.cpu.halves import FEW, OUT_STRIDE, RESIDUAL, Fields, Laid, Norm, room, shared
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kernel import arguments, compiled

_X = LINEAR.offset("x")
_pack_one = struct.Struct("<q").pack_into
_pack_cache = ATTEND.struct("cos", "length").pack_into
_CACHE = ATTEND.offset("cos")
_pack_seen = WHOLE.struct("before", "mask_token").pack_into
_SEEN = WHOLE.offset("before")


class Size(NamedTuple):
    """Of a call. kind: of the cache."""

    batch: int
    tokens: int
    kind: str
    masked: bool
    threads: int


@dataclass(frozen=True, eq=False)
class Attention:
    """The weights, by their addresses: whoever calls sees to it that they are there. What is not packed is float32.

    qkv         one product, or one after the other those whose outputs stand side by side
    before      the norm of x
    head_norms  of queries and keys, weights [D], with one eps; None where heads have no norms
    scale       of scores
    """

    qkv: tuple[Product, ...]
    o: Product
    before: Norm
    head_norms: tuple[Norm, Norm] | None
    heads: int
    kv_heads: int
    dim: int
    scale: float

    @property
    def both(self) -> int:
        """Outputs of qkv."""
        return sum(product.n for product in self.qkv)


class AttentionPlan:
    """steps: those of attention itself, which change with the cache."""

    def __init__(self, half: Attention, size: Size, hidden: int) -> None:
        m, threads = size.batch * size.tokens, size.threads
        self._tokens, self._hidden, products = size.tokens, hidden, (*half.qkv, half.o)
        scratch = threads * _sizes(half, room(m))[1] if size.tokens > FEW else 0
        widths = half.both, half.o.k
        memory = shared("attention", (*Laid.sizes(products, m, threads), *(room(m) * n * 4 for n in widths), scratch))
        laid, (qkv, attended, scratch) = Laid.of(products, m, threads, memory.starts), memory.starts[2:]
        first = []
        for product, column in zip(half.qkv, accumulate((4 * p.n for p in half.qkv[:-1]), initial=qkv), strict=True):
            first.append(laid.steps(product, 0, column, norm=half.before))
            _pack_one(first[-1].linear, OUT_STRIDE, 4 * half.both)
        self.steps = _steps(half, size, (qkv, attended, scratch))
        last = laid.steps(half.o, attended, hidden)
        self._first, self._last = [steps.linear for steps in first], last.linear
        self._kept = memory, first, last
        self.blocks: list[Buffer] = [*(block for steps in first for block in steps.blocks), *self.steps, *last.blocks]

    def point(self, x: int, cache: Sequence[int]) -> None:
        """Fills in what changes: where x is, and the arguments of ATTEND from `cos` to `length`."""
        for linear in self._first:
            _pack_one(linear, _X, x)
        _pack_one(self._last, RESIDUAL, x - self._hidden)
        _pack_cache(self.steps[0], _CACHE, *cache)
        if len(self.steps) > 1:
            *seen, length = cache[4:]
            _pack_seen(self.steps[1], _SEEN, length, length + self._tokens, *seen)


def _steps(half: Attention, size: Size, memory: tuple[int, int, int]) -> tuple[Buffer, ...]:
    """One step, or for many tokens two: they enter the cache, and attend to it. memory: qkv, what is attended, and of threads."""
    qkv, attended, scratch = memory
    group, many = half.heads // half.kv_heads, size.tokens > FEW
    spec = AttendSpec(half.dim, group, size.kind, half.head_norms is not None, size.masked and not many, many)
    sizes = {"batch": size.batch, "tokens": size.tokens}
    norms = half.head_norms or (Norm(0, 0.0), Norm(0, 0.0))
    fields: Fields = {
        **sizes,
        "qkv": qkv,
        "qkv_stride": 4 * half.both,
        "out": attended,
        "out_stride": 4 * half.o.k,
        "kv_heads": half.kv_heads,
        "q_norm": norms[0].weight,
        "k_norm": norms[1].weight,
        "scale_eps": (half.scale, norms[0].eps),
    }
    first = arguments(ATTEND, compiled(attend.build, spec, current()), fields)
    if not many:
        return (first,)
    padded, thread_bytes = _sizes(half, size.tokens)
    fields = {
        **sizes,
        "q": qkv,
        "q_batch": 4 * half.both * size.tokens,
        "q_head": 4 * half.dim,
        "q_token": 4 * half.both,
        "out": attended,
        "heads": half.kv_heads,
        "padded": padded,
        "parts": attend_whole.parts(size.batch * half.kv_heads, size.tokens * group, size.threads),
        "scratch": scratch,
        "thread_bytes": thread_bytes,
        "scale": (half.scale, 0.0),
    }
    whole = WholeSpec(half.dim, size.masked, group=group, kind=size.kind, causal=True)
    return first, arguments(WHOLE, compiled(attend_whole.build, whole, current()), fields)


def _sizes(half: Attention, tokens: int) -> tuple[int, int]:
    return attend_whole.sizes(attend_whole.MOST_AT_ONCE, tokens * half.heads // half.kv_heads, half.dim, current())

"""The attention half of a decoder layer: x [m, K] -> h [m, K], float32.

    qkv = norm(x) · Wqkvᵀ + bias             each is a product of `linear.py`: activations are laid out, and quantized, once; where formats
                                             differ, queries, keys and values are up to three products
    q, k = norm(q), norm(k)                  where whole rows of queries and of keys have norms (OLMo 2); those of heads are `attend`'s
    a   = attend(qkv)                        positions, the cache's new entries, attention (`attend.py`; of many tokens `attend_whole.py`)
    h   = x + factor * norm(a · Woᵀ + bias)

Either norm may be missing.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.step_sequence import Product
from halfbyte.kernels.cpu.transformer import attend, attend_whole
from halfbyte.kernels.cpu.transformer.attend import ATTEND, AttendSpec, CacheKind
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE, WholeSpec
from halfbyte.kernels.cpu.transformer.halves import FEW, OUT_STRIDE, Added, Fields, Laid, Norm, needs_sums, room, shared
from halfbyte.kernels.layer_kinds import Projections, RopeInterleaved

_X = LINEAR.offset("x")
_pack_one = struct.Struct("<q").pack_into
_pack_cache = ATTEND.struct("cos", "length").pack_into
_CACHE = ATTEND.offset("cos")
_pack_seen = WHOLE.struct("before", "mask_token").pack_into
_SEEN = WHOLE.offset("before")


class Size(NamedTuple):
    """The sizes of a call. kind: of the cache."""

    batch: int
    tokens: int
    kind: CacheKind
    masked: bool
    threads: int


class Heads(NamedTuple):
    """The heads of attention, as `ops.transformer.decoder.Heads` has them, norms by their addresses; `sinks`: the address of float32 [H],
    or 0."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    scale: float
    qk_norm: tuple[Norm, Norm] | None
    qk_norm_whole: bool
    rotary_dim: int
    softcap: float | None
    sinks: int
    rope_interleaved: RopeInterleaved
    norm_after_rope: bool = False
    projections: Projections = "qkv"
    v_norm: bool = False


@dataclass(frozen=True, eq=False)
class Attention:
    """The attention half of a layer, as `ops.transformer.decoder.Attention` has it, by the addresses of its tensors, which the caller must
    keep alive.

    What is not packed is float32. `qkv`: one product, or several whose outputs stand side by side.
    """

    qkv: tuple[Product, ...]
    o_proj: Product
    pre_norm: Norm | None
    post_norm: Norm | None
    residual_multiplier: float
    heads: Heads

    @property
    def both(self) -> int:
        """Outputs of qkv."""
        return sum(product.n for product in self.qkv)


class AttentionPlan:
    """steps: those of attention itself, which change with the cache."""

    def __init__(self, half: Attention, size: Size) -> None:
        m, threads = size.batch * size.tokens, size.threads
        self._tokens, products = size.tokens, (*half.qkv, half.o_proj)
        scratch = threads * _sizes(half, room(m))[1] if size.tokens > FEW else 0
        widths = half.both, half.o_proj.k, half.o_proj.n if needs_sums(half.post_norm, half.residual_multiplier) else 0
        memory = shared("attention", (*Laid.sizes(products, m, threads), *(room(m) * n * 4 for n in widths), scratch))
        laid, (qkv, attended, sums, scratch) = Laid.of(products, m, threads, memory.starts), memory.starts[2:]
        first = []
        for product, column in zip(half.qkv, accumulate((4 * p.n for p in half.qkv[:-1]), initial=qkv), strict=True):
            first.append(laid.steps(product, 0, column, norm=half.pre_norm))
            _pack_one(first[-1].linear, OUT_STRIDE, 4 * half.both)
        self.steps = _steps(half, size, (qkv, attended, scratch))
        self._last = Added(laid, half.o_proj, attended, 4 * half.o_proj.k, sums, half.post_norm, half.residual_multiplier)
        self._first = [steps.linear for steps in first]
        self._kept = memory, first
        products_of_x = [block for steps in first for block in steps.blocks]
        self.blocks: list[Buffer] = [*products_of_x, *_norms_of_rows(half, laid, qkv), *self.steps, *self._last.blocks]

    def point(self, x: int, out: int, cache: Sequence[int]) -> None:
        """Fills in what changes: where x is and h goes, and the arguments of ATTEND from `cos` to `length`."""
        for linear in self._first:
            _pack_one(linear, _X, x)
        self._last.point(out, x)
        _pack_cache(self.steps[0], _CACHE, *cache)
        if len(self.steps) > 1:
            *seen, length = cache[4:]
            _pack_seen(self.steps[1], _SEEN, length, length + self._tokens, *seen)


def _norms_of_rows(half: Attention, laid: Laid, qkv: int) -> list[Buffer]:
    heads = half.heads
    if heads.qk_norm is None or not heads.qk_norm_whole:
        return []
    widths = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    places = qkv, qkv + 4 * widths[0]
    return [laid.norm(norm, at, at, 4 * half.both, width) for norm, at, width in zip(heads.qk_norm, places, widths, strict=True)]


def _steps(half: Attention, size: Size, memory: tuple[int, int, int]) -> tuple[Buffer, ...]:
    """One step, or for many tokens two: they enter the cache, and attend to it. memory: qkv, what is attended, and of threads."""
    qkv, attended, scratch = memory
    heads, many = half.heads, size.tokens > FEW
    group = heads.num_heads // heads.num_kv_heads
    norms = None if heads.qk_norm_whole else heads.qk_norm
    capped, sinks, unit_offset = heads.softcap is not None, heads.sinks != 0, norms is not None and norms[0].unit_offset
    rotary_dim = None if heads.rotary_dim == heads.head_dim else heads.rotary_dim
    masked = size.masked and not many
    of_scores = capped and not many, sinks and not many
    spec = AttendSpec(
        *(heads.head_dim, group, size.kind, norms is not None, masked, many, rotary_dim, unit_offset, *of_scores),
        rope_interleaved=heads.rope_interleaved,
        norm_after_rope=heads.norm_after_rope,
        projections=heads.projections,
        v_norm=heads.v_norm,
    )
    sizes = {"batch": size.batch, "tokens": size.tokens}
    norms = norms or (Norm(0, 0.0), Norm(0, 0.0))
    fields: Fields = {
        **sizes,
        "qkv": qkv,
        "qkv_stride": 4 * half.both,
        "out": attended,
        "out_stride": 4 * half.o_proj.k,
        "kv_heads": heads.num_kv_heads,
        "q_norm": norms[0].weight,
        "k_norm": norms[1].weight,
        "sinks": heads.sinks,
        "scale_eps": (heads.scale, norms[0].eps),
        "cap": (heads.softcap or 0.0, 0.0),
    }
    first = arguments(ATTEND, compiled(attend.build, spec, current()), fields)
    if not many:
        return (first,)
    padded, thread_bytes = _sizes(half, size.tokens)
    fields = {
        **sizes,
        "q": qkv,
        "q_batch": 4 * half.both * size.tokens,
        "q_head": 4 * heads.head_dim,
        "q_token": 4 * half.both,
        "out": attended,
        "heads": heads.num_kv_heads,
        "padded": padded,
        "parts": attend_whole.parts(size.batch * heads.num_kv_heads, size.tokens * group, size.threads),
        "scratch": scratch,
        "thread_bytes": thread_bytes,
        "sinks": heads.sinks,
        "scale": (heads.scale, heads.softcap or 0.0),
    }
    whole = WholeSpec(heads.head_dim, size.masked, group=group, kind=size.kind, causal=True, capped=capped, sinks=sinks)
    return first, arguments(WHOLE, compiled(attend_whole.build, whole, current()), fields)


def _sizes(half: Attention, tokens: int) -> tuple[int, int]:
    heads = half.heads
    return attend_whole.sizes(attend_whole.MOST_AT_ONCE, tokens * heads.num_heads // heads.num_kv_heads, heads.head_dim, current())

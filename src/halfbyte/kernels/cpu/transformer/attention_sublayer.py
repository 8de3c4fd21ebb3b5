"""The attention sublayer of a decoder layer on a CPU: x [m, K] -> h [m, K], float32.

    qkv = norm(x) · Wqkvᵀ + bias             products of `linear.py`: activations are laid out, and quantized, once; where formats differ,
                                             queries, keys and values are up to three products
    q, k = norm(q), norm(k)                  where whole rows of queries and of keys have norms (OLMo 2); norms of heads are `attend.py`'s
    a   = attend(qkv)                        rope, the KV cache's new entries, attention: `attend.py`; for more than
                                             MOST_STREAMED_TOKENS of a sequence that only fills the cache, and `attend_whole.py` attends
    h   = x + residual_multiplier * norm(a · Woᵀ + bias)

Either norm may be missing. `decoder.py` plans both sublayers of a layer once for each size of a call (`AttentionPlan`): a list of steps
whose arguments are filled in but for addresses that change from call to call, which `set_addresses` writes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import NamedTuple

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.step_sequence import Product
from halfbyte.kernels.cpu.transformer import attend, attend_whole
from halfbyte.kernels.cpu.transformer.attend import ATTEND, AttendSpec, CacheKind
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE, WholeSpec
from halfbyte.kernels.cpu.transformer.sublayers import (
    MOST_STREAMED_TOKENS,
    Fields,
    Norm,
    ResidualProduct,
    Workspace,
    memory_rows,
    needs_sums,
)
from halfbyte.kernels.layer_kinds import Projections, RopeInterleaved

_X, _OUT_STRIDE = LINEAR.offset("x"), LINEAR.offset("out_stride")
# The arguments that change from call to call: of attend.py from `cos` to `length`, of attend_whole.py from `before` to `mask_token`.
_pack_attend, _ATTEND_CALL = ATTEND.struct("cos", "length").pack_into, ATTEND.offset("cos")
_pack_whole, _WHOLE_CALL = WHOLE.struct("before", "mask_token").pack_into, WHOLE.offset("before")
_ROPE_ARGUMENTS = 4  # that only attend.py has: cos, sin and their strides


class Size(NamedTuple):
    """The sizes of a call, for which a plan is made.

    Attributes:
        batch, tokens: Sequences, and new tokens of each.
        kind: Element type of the KV cache.
        masked: Whether there is a mask in addition to the causal one.
        threads: Threads that compute the call.
    """

    batch: int
    tokens: int
    kind: CacheKind
    masked: bool
    threads: int


class Heads(NamedTuple):
    """The heads of attention, as `ops.transformer.sublayers.Heads` has them, with addresses in place of tensors.

    Attributes:
        sinks: Address of float32 [H]; 0: none.
    """

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
    """The attention sublayer of a layer, as `ops.transformer.sublayers.Attention` has it, by the addresses of its tensors, which the caller
    must keep alive. Tensors that are not packed are float32.

    Attributes:
        qkv: One product, or several whose outputs are adjacent columns of one matrix.
    """

    qkv: tuple[Product, ...]
    o_proj: Product
    pre_norm: Norm | None
    post_norm: Norm | None
    residual_multiplier: float
    heads: Heads

    @property
    def qkv_width(self) -> int:
        """Columns of qkv: (H + 2 Hkv) * D, or of the projections that the layer has."""
        return sum(product.n for product in self.qkv)


class AttentionPlan:
    """The steps of an attention sublayer for calls of one size.

    Attributes:
        blocks: The arguments of all steps, in order; `StepSequence` runs them.
        steps: Those of attention among them, one or two, whose arguments depend on the KV cache.
    """

    def __init__(self, attention: Attention, size: Size) -> None:
        """Lay out memory, which all layers of one size share, and fill in all arguments that do not change from call to call."""
        m, rows, self._tokens = size.batch * size.tokens, memory_rows(size.batch * size.tokens), size.tokens
        scratch_bytes = size.threads * _whole_sizes(attention, rows)[1] if size.tokens > MOST_STREAMED_TOKENS else 0
        widths = (
            attention.qkv_width,
            attention.o_proj.k,
            attention.o_proj.n if needs_sums(attention.post_norm, attention.residual_multiplier) else 0,
        )
        buffers = *(rows * n * 4 for n in widths), scratch_bytes
        workspace = Workspace.of("attention", (*attention.qkv, attention.o_proj), m, size.threads, buffers)
        qkv, attended, sums, scratch = workspace.buffers
        qkv_steps = []
        for product, column in zip(attention.qkv, accumulate((4 * p.n for p in attention.qkv[:-1]), initial=qkv), strict=True):
            qkv_steps.append(workspace.product(product, 0, column, norm=attention.pre_norm))
            pack_integer(qkv_steps[-1].linear, _OUT_STRIDE, 4 * attention.qkv_width)
        self.steps = _steps(attention, size, (qkv, attended, scratch))
        self._o_proj = ResidualProduct(
            workspace, attention.o_proj, attended, 4 * attention.o_proj.k, sums, attention.post_norm, attention.residual_multiplier
        )
        self._qkv_linears = [steps.linear for steps in qkv_steps]
        self._alive = workspace, qkv_steps  # what the addresses in arguments belong to
        qkv_blocks = [block for steps in qkv_steps for block in steps.blocks]
        self.blocks: list[Buffer] = [*qkv_blocks, *_norms_of_rows(attention, workspace, qkv), *self.steps, *self._o_proj.blocks]

    def set_addresses(self, x: int, out: int, cache: Sequence[int]) -> None:
        """Fill in the arguments of a call.

        Args:
            x, out: Addresses of x and of h.
            cache: The arguments of ATTEND from `cos` to `length`: rope, the KV cache and the mask.
        """
        for linear in self._qkv_linears:
            pack_integer(linear, _X, x)
        self._o_proj.set_addresses(out, x)
        _pack_attend(self.steps[0], _ATTEND_CALL, *cache)
        if len(self.steps) > 1:
            *keys_values_mask, length = cache[_ROPE_ARGUMENTS:]
            _pack_whole(self.steps[1], _WHOLE_CALL, length, length + self._tokens, *keys_values_mask)


def _norms_of_rows(attention: Attention, workspace: Workspace, qkv: int) -> list[Buffer]:
    """Return the steps that apply norms to whole rows of queries and of keys, in place at the address `qkv`; none if heads have norms."""
    heads = attention.heads
    if heads.qk_norm is None or not heads.qk_norm_whole:
        return []
    widths = heads.num_heads * heads.head_dim, heads.num_kv_heads * heads.head_dim
    places = qkv, qkv + 4 * widths[0]
    return [
        workspace.norm(norm, at, at, 4 * attention.qkv_width, width) for norm, at, width in zip(heads.qk_norm, places, widths, strict=True)
    ]


def _steps(attention: Attention, size: Size, memory: tuple[int, int, int]) -> tuple[Buffer, ...]:
    """Return the steps of attention: one (`attend.py`), or for many tokens two: keys and values enter the cache, then queries attend.

    Args:
        attention: The weights and heads.
        size: Of the calls.
        memory: Addresses of qkv, of a, and of the threads' scratch memory.
    """
    qkv, attended, scratch = memory
    heads, many = attention.heads, size.tokens > MOST_STREAMED_TOKENS
    group = heads.num_heads // heads.num_kv_heads
    norms = None if heads.qk_norm_whole else heads.qk_norm
    capped, sinks, unit_offset = heads.softcap is not None, heads.sinks != 0, norms is not None and norms[0].unit_offset
    rotary_dim = None if heads.rotary_dim == heads.head_dim else heads.rotary_dim
    spec = AttendSpec(
        heads.head_dim,
        group,
        size.kind,
        normed=norms is not None,
        masked=size.masked and not many,
        enters=many,
        rotary_dim=rotary_dim,
        unit_offset=unit_offset,
        capped=capped and not many,
        sinks=sinks and not many,
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
        "qkv_stride": 4 * attention.qkv_width,
        "out": attended,
        "out_stride": 4 * attention.o_proj.k,
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
    padded, thread_bytes = _whole_sizes(attention, size.tokens)
    fields = {
        **sizes,
        "q": qkv,
        "q_batch": 4 * attention.qkv_width * size.tokens,
        "q_head": 4 * heads.head_dim,
        "q_token": 4 * attention.qkv_width,
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


def _whole_sizes(attention: Attention, tokens: int) -> tuple[int, int]:
    """Return `attend_whole.sizes` for so many tokens, whatever the length of the cache."""
    heads = attention.heads
    return attend_whole.sizes(attend_whole.MOST_AT_ONCE, tokens * heads.num_heads // heads.num_kv_heads, heads.head_dim, current())

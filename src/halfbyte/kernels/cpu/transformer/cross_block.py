"""Transformer blocks of UNets with self-attention, cross-attention and GEGLU in one native call: x [B, T, K] -> y [B, T, K], float32.

    h = x + attention(q, k, v of norm0(x)) · Woᵀ + bias                        context c [B, S, E]; H heads of D elements
    r = h + attention(q of norm1(h); k, v of c) · Wcoᵀ + bias
    y = r + ((n · Wupᵀ + bias) * gelu(n · Wgateᵀ + bias)) · Wdownᵀ + bias       n = norm2(r); up and gate [B, T, I]

`ops/transformer/cross_block.py` calls a `CrossBlock`, which plans calls of each size once (`_Plan`): a list of steps (`step_sequence.py`)
with all arguments but the addresses of x, c and y. A product takes two steps: its rows are normed and laid out as its tiles read them, then
multiplied (`linear.py`); the products by Wup and Wgate share the first one. Everything between the steps is float32. Attention is that of
`attend_whole.py`; next to products in int8, on CPUs with products of bfloat16, that of `attend_bf16.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.linear.linear import WORK_A_THREAD
from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.kernels.cpu.step_sequence import Product, StepSequence
from halfbyte.kernels.cpu.transformer import attend_bf16, attend_whole
from halfbyte.kernels.cpu.transformer.attend_bf16 import AttendPairsSpec
from halfbyte.kernels.cpu.transformer.attend_whole import AttentionScratch, Heads, SequenceAttention, WholeSpec
from halfbyte.kernels.cpu.transformer.sublayers import Norm, NormedRows, linear_arguments, shared_memory, shared_product

_PLANS = 64  # of a block in each Python thread
_X, _OUT, _RESIDUAL = (LINEAR.offset(name) for name in ("x", "out", "residual"))


class _Size(NamedTuple):
    """Sequences, tokens of each and of its context, and threads of a call."""

    batch: int
    tokens: int
    context: int
    threads: int


@dataclass(frozen=True, eq=False)
class CrossBlock:
    """The weights of a block by their addresses; the caller must keep them alive.

    Attributes:
        qkv, o: The products of self-attention.
        q, kv, cross_o: Those of cross-attention.
        up, gate, down: Those of GEGLU. The kernel of `gate` has GELU and multiplies its outputs by those of `up`; otherwise it is that of
            `up`, with the same K.
        norms: LayerNorms, norm0 to norm2.
        heads: H of both attentions: qkv.n = 3 H D.
    """

    qkv: Product
    o: Product
    q: Product
    kv: Product
    cross_o: Product
    up: Product
    gate: Product
    down: Product
    norms: tuple[Norm, Norm, Norm]
    heads: int
    plans: PlanCache[_Plan] = field(default_factory=lambda: PlanCache(_PLANS))

    @property
    def head_dim(self) -> int:
        return self.o.k // self.heads

    def __call__(self, x: Tensor, context: Tensor) -> Tensor:
        """Compute the block: x [B, T, K] and context [B, S, E], contiguous float32, not empty -> y [B, T, K]."""
        batch, tokens, _ = x.shape
        threads = runtime.useful_threads(batch * tokens * self.up.n * self.up.k, WORK_A_THREAD)
        size, y = _Size(batch, tokens, context.shape[1], threads), torch.empty_like(x)
        self.plans.get(size, lambda: _Plan(self, size)).run(x.data_ptr(), context.data_ptr(), y.data_ptr())
        return y


class _Buffers(NamedTuple):
    """The addresses of intermediate results, float32.

    Attributes:
        qkv: [B T, 3 H D]; q of cross-attention, [B T, H D], after self-attention.
        kv: Keys and values of the context, [B S, 2 H D].
        attended: Of both attentions, [B T, H D].
        h, r: [B T, K].
        up: [B T, I].
        gates: up * gelu(gate), [B T, I].
    """

    qkv: int
    kv: int
    attended: int
    h: int
    r: int
    up: int
    gates: int


class _Plan:
    """The steps of a block for calls of one size, with all arguments but the addresses of x, the context and y."""

    def __init__(self, block: CrossBlock, size: _Size) -> None:
        self._block, self._size = block, size
        m, context_rows = size.batch * size.tokens, size.batch * size.context
        width, k, inner = block.o.k, block.o.n, block.up.n  # H D, K, I
        products = [(block.kv, context_rows), *((p, m) for p in (block.qkv, block.o, block.q, block.cross_o, block.up, block.down))]
        thread_bytes = max(self._attention_kernel(keys)[2] for keys in (size.tokens, size.context))
        # Elements, in the order of `_Buffers`.
        buffers = m * 3 * width, context_rows * 2 * width, m * width, m * k, m * k, m * inner, m * inner
        self._memory = shared_memory(
            "cross_block",
            (
                max(product.kernel.scratch_bytes(rows) for product, rows in products),  # rows as tiles read them
                size.threads * 4 * k,  # a normed row of each thread
                size.threads * thread_bytes,  # scratch memory of attention
                *(4 * elements for elements in buffers),
            ),
        )
        self._laid_out, normed, self._scratch, *addresses = self._memory.starts
        self._normed_rows, self._buffers = NormedRows(normed, 4 * k, 0), _Buffers(*addresses)
        self._steps = list[Buffer]()
        self._add_steps(m, context_rows)
        self._sequence = StepSequence(self._steps, size.threads)

    def _add_steps(self, m: int, context_rows: int) -> None:
        """Add all steps, and keep the arguments of those that read x or the context, or write y."""
        block, size, at = self._block, self._size, self._buffers
        norm0, norm1, norm2 = block.norms
        row = 4 * block.o.k  # bytes of all heads of a token
        self._kv = self._add_product(block.kv, context_rows, 0, at.kv)
        self._qkv = self._add_product(block.qkv, m, 0, at.qkv, norm0)
        self._add_attention(Heads(at.qkv, 3 * row, size.tokens), Heads(at.qkv + row, 3 * row, size.tokens))
        self._o = self._add_product(block.o, m, at.attended, at.h)
        self._add_product(block.q, m, at.h, at.qkv, norm1)
        self._add_attention(Heads(at.qkv, row, size.tokens), Heads(at.kv, 2 * row, size.context))
        pack_integer(self._add_product(block.cross_o, m, at.attended, at.r), _RESIDUAL, at.h - at.r)
        self._add_product(block.up, m, at.r, at.up, norm2)
        pack_integer(self._add_product(block.gate, m, at.r, at.gates, is_laid_out=True), _RESIDUAL, at.up - at.gates)
        self._down = self._add_product(block.down, m, at.gates, 0)

    def _add_product(self, product: Product, m: int, x: int, out: int, norm: Norm | None = None, *, is_laid_out: bool = False) -> Buffer:
        """Add the steps of out = norm(x) · Wᵀ + bias, and return the arguments of the product.

        Args:
            product: W and bias.
            m: Rows of x.
            x, out: Their addresses; 0: filled in later.
            norm: Of the rows of x; None: none.
            is_laid_out: Whether the product before has the same rows, which are then neither normed nor laid out again.
        """
        linear = linear_arguments(product, m, self._size.threads, x, self._laid_out, out)
        steps = shared_product(linear, norm, self._normed_rows)
        self._steps += steps[1:] if is_laid_out else steps
        return linear

    def _add_attention(self, queries: Heads, keys: Heads) -> None:
        """Add the step of attention; values lie behind the keys of all heads of a token."""
        block, size = self._block, self._size
        function, padded, thread_bytes = self._attention_kernel(keys.tokens)
        attention = SequenceAttention(size.batch, block.heads, block.head_dim, block.head_dim**-0.5, size.threads)
        values = keys._replace(address=keys.address + 4 * block.o.k)
        scratch = AttentionScratch(self._scratch, padded, thread_bytes)
        self._steps.append(attend_whole.sequence_step(function, attention, queries, keys, values, self._buffers.attended, scratch))

    def _attention_kernel(self, keys: int) -> tuple[int, int, int]:
        """Return the address of the code of attention to so many keys, these with their padding, and a thread's bytes of scratch memory."""
        isa, dim = current(), self._block.head_dim
        if isa.bf16_dot and self._block.qkv.kernel.inner == "int8":
            return compiled(attend_bf16.build, AttendPairsSpec(dim), isa), *attend_bf16.sizes(keys, dim)
        function = compiled(attend_whole.build, WholeSpec(dim, masked=False), isa)
        return function, *attend_whole.sizes(keys, self._size.tokens, dim, isa)

    def run(self, x: int, context: int, y: int) -> None:
        """Fill in the addresses of a call, and run it."""
        pack_integer(self._kv, _X, context)
        pack_integer(self._qkv, _X, x)
        pack_integer(self._o, _RESIDUAL, x - self._buffers.h)
        pack_integer(self._down, _OUT, y)
        pack_integer(self._down, _RESIDUAL, self._buffers.r - y)
        self._sequence.run()

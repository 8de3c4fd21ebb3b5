"""Transformer blocks of UNets with self-attention, cross-attention and GEGLU in one native call: x [B, T, K] -> y [B, T, K], float32.

    h = x + attention(q, k, v of norm1(x)) · Woᵀ + bias                        context c [B, S, E]
    r = h + attention(q of norm2(h); k, v of c) · Wcoᵀ + bias
    y = r + ((n · Wupᵀ + bias) * gelu(n · Wgateᵀ + bias)) · Wdownᵀ + bias       n = norm3(r)

Products are those of `linear.py`; a norm is computed with the laying out of its rows (`step_sequence.py`), and the products by Wup and
Wgate read the same rows. Everything between the steps is float32. Attention is that of `attend_bf16.py` next to products in int8 on CPUs
with products of bfloat16, and else that of `attend_whole.py`. `ops/transformer/cross_block.py` calls it.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear.linear import WORK_A_THREAD
from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.kernels.cpu.step_sequence import Product, StepSequence
from halfbyte.kernels.cpu.transformer import attend_bf16, attend_whole
from halfbyte.kernels.cpu.transformer.attend_bf16 import AttendPairsSpec
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE, Heads, WholeSpec
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
        up, gate, down: Those of GEGLU; the kernel of `gate` has GELU and multiplies, and otherwise is that of `up`.
        norms: Layer norms of the three inputs.
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

    def __call__(self, x: Tensor, context: Tensor) -> Tensor:
        """x [B, T, K] and context [B, S, E], contiguous float32, not empty -> y [B, T, K]"""
        batch, tokens, _ = x.shape
        threads = runtime.useful_threads(batch * tokens * self.up.n * self.up.k, WORK_A_THREAD)
        size, y = _Size(batch, tokens, context.shape[1], threads), torch.empty_like(x)
        self.plans.get(size, lambda: _Plan(self, size)).run(x.data_ptr(), context.data_ptr(), y.data_ptr())
        return y


class _Plan:
    """The steps of a block for calls of one size, with all arguments but the addresses of x, context and y."""

    def __init__(self, block: CrossBlock, size: _Size) -> None:
        self._threads, m, rows = size.threads, size.batch * size.tokens, size.batch * size.context
        width, k = block.o.k, block.o.n  # H D, K
        products = [(block.kv, rows), *((p, m) for p in (block.qkv, block.o, block.q, block.cross_o, block.up, block.down))]
        scratch_bytes = max(_attention(block, n, size.tokens)[2] for n in (size.tokens, size.context))
        self._memory = shared_memory(
            "cross_block",
            (
                max(product.kernel.scratch_bytes(count) for product, count in products),
                size.threads * 4 * k,
                size.threads * scratch_bytes,
                *(4 * n for n in (m * 3 * width, rows * 2 * width, m * width, m * k, m * k, m * block.up.n, m * block.up.n)),
            ),
        )
        self._laid_out, self._normed, scratch, qkv, kv, attended, h, r, up, gates = self._memory.starts
        self._blocks = list[Buffer]()
        row = 4 * width
        norm1, norm2, norm3 = block.norms

        self._context = self._product(block.kv, rows, 0, kv)
        self._first = self._product(block.qkv, m, 0, qkv, norm1)
        self._attend(block, size, Heads(qkv, 3 * row, size.tokens), Heads(qkv + row, 3 * row, size.tokens), attended, scratch)
        self._first_residual = self._product(block.o, m, attended, h)
        self._product(block.q, m, h, qkv, norm2)
        self._attend(block, size, Heads(qkv, row, size.tokens), Heads(kv, 2 * row, size.context), attended, scratch)
        pack_integer(self._product(block.cross_o, m, attended, r), _RESIDUAL, h - r)
        self._product(block.up, m, r, up, norm3)
        pack_integer(self._product(block.gate, m, r, gates, laid_out=True), _RESIDUAL, up - gates)
        self._last, self._last_residual = self._product(block.down, m, gates, 0), r
        self._sequence = StepSequence(self._blocks, size.threads)

    def _product(self, product: Product, m: int, x: int, out: int, norm: Norm | None = None, *, laid_out: bool = False) -> Buffer:
        """Add the steps of a product: rows are normed, if asked, and laid out, unless they are `laid_out` already, as those of the product
        before; then multiplied. Return the arguments of the latter."""
        linear = linear_arguments(product, m, self._threads, x, self._laid_out, out)
        steps = shared_product(linear, norm, NormedRows(self._normed, 4 * product.k, 0))
        self._blocks += steps[1:] if laid_out else steps
        return linear

    def _attend(self, block: CrossBlock, size: _Size, queries: Heads, keys: Heads, out: int, scratch: int) -> None:
        """Add the step of attention; values lie behind the keys of all heads."""
        dim = block.o.k // block.heads
        function, padded, thread_bytes = _attention(block, keys.tokens, size.tokens)
        values = keys._replace(address=keys.address + 4 * block.o.k)
        fields = attend_whole.head_fields(queries, keys, values, 4 * dim) | {
            "out": out,
            "batch": size.batch,
            "heads": block.heads,
            "padded": padded,
            "parts": attend_whole.parts(size.batch * block.heads, size.tokens, size.threads),
            "scratch": scratch,
            "thread_bytes": thread_bytes,
            "scale": (dim**-0.5, 0.0),
        }
        self._blocks.append(arguments(WHOLE, function, fields))

    def run(self, x: int, context: int, y: int) -> None:
        """Fill in the addresses of a call, and run it."""
        pack_integer(self._context, _X, context)
        pack_integer(self._first, _X, x)
        pack_integer(self._first_residual, _RESIDUAL, x - self._memory.starts[6])
        pack_integer(self._last, _OUT, y)
        pack_integer(self._last, _RESIDUAL, self._last_residual - y)
        self._sequence.run()


def _attention(block: CrossBlock, length: int, tokens: int) -> tuple[int, int, int]:
    """The code of attention to `length` keys; keys with their padding, and bytes of scratch memory of a thread."""
    isa, dim = current(), block.o.k // block.heads
    if isa.bf16_dot and block.qkv.kernel.inner == "int8":
        return compiled(attend_bf16.build, AttendPairsSpec(dim), isa), *attend_bf16.sizes(length, dim)
    return compiled(attend_whole.build, WholeSpec(dim, masked=False), isa), *attend_whole.sizes(length, tokens, dim, isa)

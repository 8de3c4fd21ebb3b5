"""Encoder layers (BERT, ViT and others), one after the other, for whole sequences in one native call: x [B, T, K] -> [B, T, K], float32.

    post-norm (BERT)                      pre-norm (ViT)                        M = B * T rows; H heads of D elements
    qkv = x · Wqkvᵀ + bias                qkv = norm0(x) · Wqkvᵀ + bias         [M, 3 H D]
    a   = attention(qkv)                  a   = attention(qkv)                  [M, H D]     all tokens see each other, but for a mask
    h   = norm0(a · Woᵀ + bias + x)       h   = a · Woᵀ + bias + x              [M, K]
    g   = gelu(h · Wupᵀ + bias)           g   = gelu(norm1(h) · Wupᵀ + bias)    [M, I]
    y   = norm1(g · Wdownᵀ + bias + h)    y   = g · Wdownᵀ + bias + h           [M, K]

Norms are LayerNorms, GELU is the exact one, and everything between the steps is float32.

`ops/transformer/encoder.py` calls `run`, which plans calls of each size once (`_Plan`): a list of steps (`step_sequence.py`) with all
arguments but a few addresses. A product takes two steps: its rows are normed and laid out as its tiles read them, then multiplied
(`linear.py`). So a norm is computed by the step that reads it, and the last norm of a post-norm layer by the first step of the next layer.

A call computes a part of the batch at a time, so that intermediate results stay in caches. Where there are enough sequences each thread
takes its own (a lane), so that no data moves between cores and there are no barriers; otherwise all threads share each step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.linear.linear import WORK_A_THREAD
from halfbyte.kernels.cpu.plan_cache import PLANS, PlanCache
from halfbyte.kernels.cpu.step_sequence import NORM, PRODUCT, Product, StepSequence, run_lanes
from halfbyte.kernels.cpu.transformer import attend_whole
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE, AttentionScratch, Heads, SequenceAttention, WholeSpec
from halfbyte.kernels.cpu.transformer.sublayers import Norm, NormedRows, linear_arguments, rowwise_step, shared_product
from halfbyte.layouts.base import round_up

_BYTES = 1 << 23  # of intermediate results at a time, where threads share sequences
_LANE_BYTES = 1 << 21  # the same of a lane: its core's second-level cache
_SEQUENCES_A_LANE = 4  # with fewer, threads share sequences: a lane may have one more than another, for which that waits
_PLANS = 128  # of a first layer in each Python thread; one more drops the others
_X, _OUT, _RESIDUAL = (LINEAR.offset(name) for name in ("x", "out", "residual"))
_NORMED, _MASK = PRODUCT.offset("normed"), WHOLE.offset("mask")
_pack_scores = WHOLE.struct("mask", "bias_token").pack_into


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer by their addresses; the caller must keep them alive.

    Attributes:
        qkv, o, up, down: The products; the kernel of `up` has GELU.
        norms: norm0 and norm1.
        pre_norm: Whether norms come before qkv and `up`; otherwise they come after the sums with a residual.
        heads, head_dim: H, as many of keys as of queries, and D.
        scale: What q · k is multiplied by.
        plans: For calls that begin with this layer.
    """

    qkv: Product
    o: Product
    up: Product
    down: Product
    norms: tuple[Norm, Norm]
    pre_norm: bool
    heads: int
    head_dim: int
    scale: float
    plans: PlanCache[_Plan] = field(default_factory=lambda: PlanCache(_PLANS))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a token's intermediate results."""
        laid_out = max(product.kernel.row_bytes for product in (self.qkv, self.o, self.up, self.down))
        return laid_out + 4 * (self.qkv.n + self.o.k + 2 * self.o.n + self.up.n)


def run(layers: Sequence[Layer], x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> list[Tensor]:
    """Compute consecutive layers.

    Args:
        layers: One or more, of the same shapes and heads and with norms at the same places.
        x: [B, T, K], contiguous float32, not empty.
        mask: bool [B or 1, 1, T or 1, T] with contiguous last dimension: which tokens each may see; None: all.
        bias: float32 [B or 1, H or 1, T or 1, T] with contiguous last dimension: what is added to scores.

    Returns:
        The output of each layer, [B, T, K].
    """
    batch, tokens, width = x.shape
    layers, first = tuple(layers), layers[0]
    outputs = [torch.empty_like(x) for _ in layers]
    mask, bias = (None if scores is None else attend_whole.readable(scores) for scores in (mask, bias))
    mask_fields, bias_fields = attend_whole.mask_fields(mask), attend_whole.bias_fields(bias)
    threads = runtime.useful_threads(batch * tokens * first.up.n * first.up.k, WORK_A_THREAD)
    lanes = threads if batch >= _SEQUENCES_A_LANE * threads else 1
    at_once = max(1, (_LANE_BYTES if lanes > 1 else _BYTES) // (tokens * max(layer.row_bytes for layer in layers)))  # sequences of a lane
    rounds = -(-batch // (lanes * at_once))
    for i in range(rounds):
        sequences = list[StepSequence]()
        for lane in range(lanes):
            lane_start, lane_stop = lane * batch // lanes, (lane + 1) * batch // lanes
            start, stop = (lane_start + j * (lane_stop - lane_start) // rounds for j in (i, i + 1))
            if start == stop:
                continue
            plan = _planned(layers, _Size(stop - start, tokens, mask is not None, bias is not None, threads // lanes, lane))
            addresses = [tensor.data_ptr() + 4 * start * tokens * width for tensor in (x, *outputs)]
            # Both begin with an address and the bytes from a sequence to the next.
            mask_part, bias_part = ((fields[0] + start * fields[1], *fields[1:]) for fields in (mask_fields, bias_fields))
            sequences.append(plan.with_addresses(addresses, mask_part, bias_part))
        if lanes > 1:
            run_lanes(sequences)
        else:
            sequences[0].run()
    return outputs


class _Size(NamedTuple):
    """The sizes of a part of a call.

    Attributes:
        batch, tokens: Sequences, and tokens of each.
        masked, biased: Whether scores have a mask, and a bias.
        threads: That compute it.
        lane: The index of its lane, each of which has its own memory.
    """

    batch: int
    tokens: int
    masked: bool
    biased: bool
    threads: int
    lane: int


def _planned(layers: tuple[Layer, ...], size: _Size) -> _Plan:
    """Return the plan of these layers for calls of this size, of which each Python thread makes one."""
    plans = layers[0].plans.entries
    plan = plans.get(size)
    if plan is None or plan.layers != layers or plan.memory != PLANS.lanes[size.lane].start:  # other layers, or the memory has moved
        plan = plans[size] = _Plan(layers, size)
    return plan


class _AddressSlot(NamedTuple):
    """An argument that depends on the address of a tensor, which changes from call to call.

    Attributes:
        block, offset: Arguments of a step, and the offset of the field there.
        sign, summand: Its value is sign * address + summand: an address, or the distance from one to another.
    """

    block: Buffer
    offset: int
    sign: int = 1
    summand: int = 0


class _Buffers(NamedTuple):
    """The addresses of intermediate results, float32: qkv [M, 3 H D], a [M, H D], h [M, K], sums before a norm [M, K], g [M, I]."""

    qkv: int
    attended: int
    hidden: int
    sums: int
    gates: int


class _Plan:
    """The steps of layers for calls of one size, with all arguments but those that depend on x, the outputs, the mask and the bias.

    The layers have the same shapes, heads and places of norms (`EncoderLayer.kind`); their formats and scales may differ.

    Attributes:
        layers: All of them.
        memory: Address of the lane's memory, which the arguments point to.
    """

    def __init__(self, layers: tuple[Layer, ...], size: _Size) -> None:
        first = layers[0]
        self.layers, self._m, self._threads = layers, size.batch * size.tokens, size.threads
        products = [product for layer in layers for product in (layer.qkv, layer.o, layer.up, layer.down)]
        padded, thread_bytes = attend_whole.sizes(size.tokens, size.tokens, first.head_dim, current())
        widths = first.qkv.n, first.o.k, first.o.n, first.o.n, first.up.n  # of `_Buffers`
        sizes = (
            self._m * max(product.kernel.for_rows(self._m).row_bytes for product in products),  # rows as tiles read them
            size.threads * thread_bytes,  # scratch memory of attention
            size.threads * 4 * first.o.n,  # a normed row of each thread
            *(4 * self._m * width for width in widths),
        )
        *starts, end = accumulate((round_up(n, 64) for n in sizes), initial=0)
        self.memory = PLANS.lanes[size.lane].of(end)
        self._laid_out, scratch, normed, *buffers = (self.memory + start for start in starts)
        self._normed_rows, self._buffers = NormedRows(normed, 4 * first.o.n, 0), _Buffers(*buffers)
        attention_scratch = AttentionScratch(scratch, padded, thread_bytes)
        scales = {layer.scale for layer in layers}
        self._attention = {scale: _attention_step(first, scale, size, self._buffers, attention_scratch) for scale in scales}
        self._steps: list[Buffer] = []
        self._slots: list[list[_AddressSlot]] = [[] for _ in range(len(layers) + 1)]  # of x and of each layer's output
        previous: Layer | None = None
        for layer, x_slots, y_slots in zip(layers, self._slots, self._slots[1:], strict=False):
            if layer.pre_norm:
                self._add_pre_norm_layer(layer, x_slots, y_slots)
            else:
                self._add_post_norm_layer(layer, previous, x_slots)
            previous = layer
        if not layers[-1].pre_norm:
            norm, k = layers[-1].norms[1], first.o.n
            last = rowwise_step(norm.step("norm"), self._m, k, 4 * k, {"x": self._buffers.sums, **norm.fields})
            self._steps.append(last)
            self._slots[-1].append(_AddressSlot(last, NORM.offset("out")))
        self._sequence = StepSequence(self._steps, size.threads)

    def _add_post_norm_layer(self, layer: Layer, previous: Layer | None, x_slots: list[_AddressSlot]) -> None:
        """Add the steps of a post-norm layer up to the sums of y = norm1(sums): the next layer's first step norms these, or one more step.

        Args:
            layer: The layer.
            previous: The one before it, whose norm1 of the sums is x; None for the first layer, whose x is an argument of the call.
            x_slots: Slots of the layer's input, to which its own are added.
        """
        buffers, row_bytes = self._buffers, 4 * layer.o.n
        if previous is None:
            _, qkv = self._add_product(layer.qkv, 0, buffers.qkv)
            x_slots.append(_AddressSlot(qkv, _X))
        else:  # normed rows are the previous layer's output
            prepare, _ = self._add_product(layer.qkv, buffers.sums, buffers.qkv, previous.norms[1], NormedRows(0, 0, row_bytes))
            x_slots.append(_AddressSlot(prepare, _NORMED))
        self._steps.append(self._attention[layer.scale])
        _, o = self._add_product(layer.o, buffers.attended, buffers.sums)
        x_slots.append(_AddressSlot(o, _RESIDUAL, summand=-buffers.sums))
        self._add_product(layer.up, buffers.sums, buffers.gates, layer.norms[0], NormedRows(buffers.hidden, 0, row_bytes))
        _, down = self._add_product(layer.down, buffers.gates, buffers.sums)
        pack_integer(down, _RESIDUAL, buffers.hidden - buffers.sums)

    def _add_pre_norm_layer(self, layer: Layer, x_slots: list[_AddressSlot], y_slots: list[_AddressSlot]) -> None:
        """Add the steps of a pre-norm layer, and the slots of its input x and output y."""
        buffers = self._buffers
        _, qkv = self._add_product(layer.qkv, 0, buffers.qkv, layer.norms[0], self._normed_rows)
        x_slots.append(_AddressSlot(qkv, _X))
        self._steps.append(self._attention[layer.scale])
        _, o = self._add_product(layer.o, buffers.attended, buffers.hidden)
        x_slots.append(_AddressSlot(o, _RESIDUAL, summand=-buffers.hidden))
        self._add_product(layer.up, buffers.hidden, buffers.gates, layer.norms[1], self._normed_rows)
        _, down = self._add_product(layer.down, buffers.gates, 0)
        y_slots += [_AddressSlot(down, _OUT), _AddressSlot(down, _RESIDUAL, sign=-1, summand=buffers.hidden)]

    def _add_product(
        self, product: Product, x: int, out: int, norm: Norm | None = None, normed: NormedRows | None = None
    ) -> tuple[Buffer, Buffer]:
        """Add the two steps of a product, and return their arguments: of `shared_product`, whose norm and normed rows these are."""
        linear = linear_arguments(product, self._m, self._threads, x, self._laid_out, out)
        steps = shared_product(linear, norm, normed)
        self._steps += steps
        return steps

    def with_addresses(self, addresses: Sequence[int], mask: tuple[int, ...], bias: tuple[int, ...]) -> StepSequence:
        """Fill in the arguments that change from call to call, and return the steps.

        Args:
            addresses: Of x and of the output of each layer.
            mask, bias: As `attend_whole.mask_fields` and `bias_fields` return them.
        """
        for address, slots in zip(addresses, self._slots, strict=True):
            for block, offset, sign, summand in slots:
                pack_integer(block, offset, sign * address + summand)
        for attention in self._attention.values():
            _pack_scores(attention, _MASK, *mask, *bias)
        return self._sequence


def _attention_step(layer: Layer, scale: float, size: _Size, buffers: _Buffers, scratch: AttentionScratch) -> Buffer:
    """Return the step of attention of layers with the sizes of `layer`, which may have another scale."""
    attention = SequenceAttention(size.batch, layer.heads, layer.head_dim, scale, size.threads)
    width = 4 * layer.heads * layer.head_dim
    queries, keys, values = (Heads(buffers.qkv + i * width, 4 * layer.qkv.n, size.tokens) for i in range(3))
    function = compiled(attend_whole.build, WholeSpec(layer.head_dim, size.masked, size.biased), current())
    return attend_whole.sequence_step(function, attention, queries, keys, values, buffers.attended, scratch)

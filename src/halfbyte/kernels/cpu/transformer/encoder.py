"""Encoder layers (BERT and others), one after the other, for whole sequences in one native call: x [B, T, K] -> [B, T, K], float32.

    qkv = x · Wqkvᵀ + bias                   each is a product of `linear.py`: activations are laid out, and quantized, once
    a   = attention(qkv)                     every token sees every other, where a mask lets it (`attend_whole.py`)
    h   = norm(a · Woᵀ + bias + x)           layer norms (`step_sequence.py`)
    g   = gelu(h · Wupᵀ + bias)
    y   = norm(g · Wdownᵀ + bias + h)

or, where the norms come before (ViT):

    qkv = norm(x) · Wqkvᵀ + bias,  h = a · Woᵀ + bias + x,  g = gelu(norm(h) · Wupᵀ + bias),  y = g · Wdownᵀ + bias + h

`ops/transformer/encoder.py` calls `run`. A norm is computed when its rows are laid out for the next product: the last norm of a layer when
those of the next layer are. Everything between the steps is float32. Many sequences are computed some at a time, so that intermediate
results stay in caches; where there are enough of them each thread takes its own (a lane), so that no data moves between cores and there are
no barriers.
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
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear.linear import WORK_A_THREAD
from halfbyte.kernels.cpu.plan_cache import PLANS, PlanCache
from halfbyte.kernels.cpu.step_sequence import NORM, PRODUCT, Product, StepSequence, run_lanes
from halfbyte.kernels.cpu.transformer import attend_whole
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE, Heads, WholeSpec
from halfbyte.kernels.cpu.transformer.sublayers import Norm, NormedRows, linear_arguments, rowwise_step, shared_product
from halfbyte.layouts.base import round_up

_BYTES = 1 << 23  # of intermediate results at a time, where threads share sequences
_LANE_BYTES = 1 << 21  # the same for a thread with sequences of its own: its core's second-level cache
_SEQUENCES_A_LANE = 4  # fewer are shared by all threads: a lane may have one sequence more than another
_PLANS = 128  # of a first layer in each Python thread; one more drops the others
_X, _OUT, _RESIDUAL = (LINEAR.offset(name) for name in ("x", "out", "residual"))
_NORMED, _MASK = PRODUCT.offset("normed"), WHOLE.offset("mask")
_pack_scores = WHOLE.struct("mask", "bias_token").pack_into


class _Place(NamedTuple):
    """An argument that depends on an address that changes from call to call: sign * address + summand, at `offset` of a block."""

    block: Buffer
    offset: int
    sign: int
    summand: int


class _Intermediates(NamedTuple):
    """The addresses of intermediate results, float32: q, k and v [M, 3 H D], a [M, H D], h [M, K], sums before a norm [M, K], g [M, N]."""

    qkv: int
    attended: int
    hidden: int
    sums: int
    gates: int


class _Size(NamedTuple):
    """The sizes of a call.

    Attributes:
        batch, tokens: Sequences, and tokens of each.
        masked, biased: Whether scores have a mask, and a bias.
        threads: That compute the call.
        lane: The index of a parallel lane, each of which has its own memory.
    """

    batch: int
    tokens: int
    masked: bool
    biased: bool
    threads: int
    lane: int


@dataclass(frozen=True, eq=False)
class Layer:
    """The weights of a layer by their addresses; the caller must keep them alive.

    Attributes:
        qkv, o, up, down: The products; the kernel of `up` has GELU.
        norms: Layer norms, after attention and after `down`; where they come `before`, before qkv and before `up`.
        heads, dim: H, as many of keys as of queries, and D.
        scale: What q · k is multiplied by.
        plans: For this layer and those behind it in a call.
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
    plans: PlanCache[_Plan] = field(default_factory=lambda: PlanCache(_PLANS))

    @cached_property
    def row_bytes(self) -> int:
        """Bytes of a token between the steps of this layer."""
        laid_out = max(product.kernel.row_bytes for product in (self.qkv, self.o, self.up, self.down))
        return laid_out + 4 * (self.qkv.n + self.o.k + 2 * self.o.n + self.up.n)


class _Plan:
    """The steps of layers for calls of one size, with all arguments but those that change from call to call.

    Layers have the same shapes, heads and places of norms (`EncoderLayer.kind`); their formats and scales may differ.
    """

    def __init__(self, layers: tuple[Layer, ...], size: _Size) -> None:
        first = layers[0]
        self.layers, self._m, self._threads = layers, size.batch * size.tokens, size.threads
        products = [product for layer in layers for product in (layer.qkv, layer.o, layer.up, layer.down)]
        padded, thread_bytes = attend_whole.sizes(size.tokens, size.tokens, first.dim, current())
        laid_out = self._m * max(product.kernel.for_rows(self._m).row_bytes for product in products)
        widths = first.qkv.n, first.o.k, first.o.n, first.o.n, first.up.n  # as in _Intermediates
        sizes = laid_out, size.threads * thread_bytes, size.threads * 4 * first.o.n, *(4 * self._m * n for n in widths)
        *starts, end = accumulate((round_up(n, 64) for n in sizes), initial=0)
        self.base = PLANS.lanes[size.lane].of(end)
        self._laid_out, scratch, rows, *addresses = (self.base + start for start in starts)
        self._private, self._intermediates = NormedRows(rows, 4 * first.o.n, 0), _Intermediates(*addresses)
        memory = self._intermediates.qkv, self._intermediates.attended, scratch
        self._attend = {scale: _attention(first, scale, size, memory, padded, thread_bytes) for scale in {layer.scale for layer in layers}}
        self._blocks: list[Buffer] = []
        # x, and what each layer gives.
        self._places: list[list[_Place]] = [[] for _ in range(len(layers) + 1)]
        before: Layer | None = None
        for layer, x, y in zip(layers, self._places, self._places[1:], strict=False):
            if layer.before:
                self._norm_first(layer, x, y)
            else:
                self._norm_last(layer, before, x)
            before = layer
        if not layers[-1].before:
            norm, k = layers[-1].norms[1], first.o.n
            last = rowwise_step(norm.step("norm"), self._m, k, 4 * k, {"x": self._intermediates.sums, **norm.fields})
            self._blocks.append(last)
            self._places[-1].append(_Place(last, NORM.offset("out"), 1, 0))
        self._sequence = StepSequence(self._blocks, size.threads)

    def _norm_last(self, layer: Layer, before: Layer | None, x: list[_Place]) -> None:
        """Add the steps of a layer whose norms come last, up to the sums of y = norm(sums), which the next step norms.

        Args:
            layer: The layer.
            before: The one before it, whose last norm gives x; None for the first layer, whose x is an argument of the call.
            x: The places of the layer's input, which are added to.
        """
        at, row_bytes = self._intermediates, 4 * layer.o.n
        if before is None:
            _, linear = self._product(layer.qkv, 0, at.qkv)
            x.append(_Place(linear, _X, 1, 0))
        else:
            rows, _ = self._product(layer.qkv, at.sums, at.qkv, (before.norms[1], NormedRows(0, 0, row_bytes)))
            x.append(_Place(rows, _NORMED, 1, 0))
        self._blocks.append(self._attend[layer.scale])
        _, linear = self._product(layer.o, at.attended, at.sums)
        x.append(_Place(linear, _RESIDUAL, 1, -at.sums))
        self._product(layer.up, at.sums, at.gates, (layer.norms[0], NormedRows(at.hidden, 0, row_bytes)))
        _, linear = self._product(layer.down, at.gates, at.sums)
        pack_integer(linear, _RESIDUAL, at.hidden - at.sums)

    def _norm_first(self, layer: Layer, x: list[_Place], y: list[_Place]) -> None:
        """Add the steps of a layer whose norms come first, and the places of its input x and output y."""
        at = self._intermediates
        _, linear = self._product(layer.qkv, 0, at.qkv, (layer.norms[0], self._private))
        x.append(_Place(linear, _X, 1, 0))
        self._blocks.append(self._attend[layer.scale])
        _, linear = self._product(layer.o, at.attended, at.hidden)
        x.append(_Place(linear, _RESIDUAL, 1, -at.hidden))
        self._product(layer.up, at.hidden, at.gates, (layer.norms[1], self._private))
        _, linear = self._product(layer.down, at.gates, 0)
        y += [_Place(linear, _OUT, 1, 0), _Place(linear, _RESIDUAL, -1, at.hidden)]

    def _product(self, product: Product, x: int, out: int, norm_to: tuple[Norm, NormedRows] | tuple[()] = ()) -> tuple[Buffer, Buffer]:
        """Add two steps and return them: the first norms rows, if asked, and lays them out; the second multiplies them."""
        steps = shared_product(linear_arguments(product, self._m, self._threads, x, self._laid_out, out), *norm_to)
        self._blocks += steps
        return steps

    def ready(self, addresses: Sequence[int], mask: tuple[int, ...], bias: tuple[int, ...]) -> StepSequence:
        """Fill in the arguments of a call, and return the steps.

        Args:
            addresses: Of x and of what each layer gives.
            mask, bias: As `attend_whole` gives their fields.
        """
        for address, places in zip(addresses, self._places, strict=True):
            for block, offset, sign, summand in places:
                pack_integer(block, offset, sign * address + summand)
        for attend in self._attend.values():
            _pack_scores(attend, _MASK, *mask, *bias)
        return self._sequence


def _attention(layer: Layer, scale: float, size: _Size, memory: tuple[int, int, int], padded: int, thread_bytes: int) -> Buffer:
    """Return the step of attention of layers with the sizes of `layer`.

    Args:
        layer: Any of them.
        scale: Of their scores.
        size: Of the calls.
        memory: Addresses of qkv, of a, and of the threads' scratch memory.
        padded, thread_bytes: As `attend_whole.sizes` gives them.
    """
    qkv, attended, scratch = memory
    head = 4 * layer.dim
    queries, keys, values = (Heads(qkv + i * layer.heads * head, 4 * layer.qkv.n, size.tokens) for i in range(3))
    fields = attend_whole.head_fields(queries, keys, values, head) | {
        "out": attended,
        "batch": size.batch,
        "heads": layer.heads,
        "padded": padded,
        "parts": attend_whole.parts(size.batch * layer.heads, size.tokens, size.threads),
        "scratch": scratch,
        "thread_bytes": thread_bytes,
        "scale": (scale, 0.0),
    }
    spec = WholeSpec(layer.dim, size.masked, size.biased)
    return arguments(WHOLE, compiled(attend_whole.build, spec, current()), fields)


def run(layers: Sequence[Layer], x: Tensor, mask: Tensor | None, bias: Tensor | None = None) -> list[Tensor]:
    """Compute consecutive layers.

    Args:
        layers: One or more, of the same shapes and heads and with norms at the same places.
        x: [B, T, K], contiguous float32, not empty.
        mask: bool [B or 1, 1, T or 1, T] with contiguous last dimension: which tokens each may see; None: all.
        bias: float32 [B or 1, H or 1, T or 1, T] with contiguous last dimension: what is added to scores.

    Returns:
        What each of the layers gives, [B, T, K].
    """
    batch, tokens, width = x.shape
    key, first = tuple(layers), layers[0]
    outputs = [torch.empty_like(x) for _ in layers]
    mask, bias = (None if scores is None else attend_whole.readable(scores) for scores in (mask, bias))
    mask_fields, bias_fields = attend_whole.mask_fields(mask), attend_whole.bias_fields(bias)
    threads = runtime.useful_threads(batch * tokens * first.up.n * first.up.k, WORK_A_THREAD)
    lanes = threads if batch >= _SEQUENCES_A_LANE * threads else 1
    at_once = max(1, (_LANE_BYTES if lanes > 1 else _BYTES) // (tokens * max(layer.row_bytes for layer in layers)))
    rounds = -(-batch // (lanes * at_once))
    for i in range(rounds):
        sequences = list[StepSequence]()
        for lane in range(lanes):
            lane_start, lane_stop = lane * batch // lanes, (lane + 1) * batch // lanes
            start, stop = (lane_start + j * (lane_stop - lane_start) // rounds for j in (i, i + 1))
            if start == stop:
                continue
            size = _Size(stop - start, tokens, mask is not None, bias is not None, threads // lanes, lane)
            plan = first.plans.entries.get(size)
            if plan is None or plan.layers != key or plan.base != PLANS.lanes[lane].start:
                plan = first.plans.entries[size] = _Plan(key, size)
            offset = 4 * start * tokens * width
            # (address, bytes between sequences, …)
            mask_part, bias_part = ((fields[0] + start * fields[1], *fields[1:]) for fields in (mask_fields, bias_fields))
            sequences.append(plan.ready([t.data_ptr() + offset for t in (x, *outputs)], mask_part, bias_part))
        if lanes > 1:
            run_lanes(sequences)
        else:
            sequences[0].run()
    return outputs

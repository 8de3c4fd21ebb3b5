"""Decoder layers for the newest tokens of each sequence, in one call: x [B, t, K] -> [B, t, K], float32.

    h = attention(x)                         `attention_half.py`
    y = feed_forward(h)                      `feed_forward.py`, `experts.py`; or h is all
    y = per_layer(y, e)                      `per_layer.py`, where a layer has an input e of its own

Everything between the steps is float32 and stays in memory of a few KB a row. Layers that follow each other are one chain: what a
program does between two of them would run with caches that are full of weights, some ten times as long as otherwise. Prompts are read
some tokens at a time, or some sequences, so that what lies between the steps stays in memory of some MB.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.linear.linear import WORK_A_THREAD
from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.kernels.cpu.transformer import attend_whole
from halfbyte.kernels.cpu.transformer.attend import CACHES
from halfbyte.kernels.cpu.transformer.attention_half import Attention, AttentionPlan, Size
from halfbyte.kernels.cpu.transformer.per_layer import PerLayerInput, PerLayerInputPlan
from halfbyte.kernels.cpu.transformer.sublayers import MOST_STREAMED_TOKENS, FeedForward, memory_rows, shared_memory

_ROWS = 256  # at a time


@dataclass(frozen=True, eq=False)
class Layer:
    attention: Attention
    feed_forward: FeedForward | None
    per_layer: PerLayerInput | None = None  # of a layer with a feed-forward half
    plans: PlanCache[Any] = field(default_factory=PlanCache)  # of Plan

    @property
    def k(self) -> int:
        return self.attention.o_proj.n

    @property
    def work(self) -> int:
        """Multiplications for a row, or nearly."""
        return self.attention.qkv_width * self.k if self.feed_forward is None else self.feed_forward.work

    @property
    def rotary(self) -> int:
        """Elements of a head that have positions."""
        return self.attention.heads.rotary_dim


class Plan:
    """A layer's steps for so many rows, with all arguments but those that change from token to token."""

    def __init__(self, layer: Layer, size: Size) -> None:
        m, second, third = size.batch * size.tokens, layer.feed_forward, layer.per_layer
        self._attention = AttentionPlan(layer.attention, size)
        self.attention, self.blocks = self._attention.steps, self._attention.blocks
        self._memory = shared_memory("hidden", (4 * memory_rows(m) * layer.k,) * ((second is not None) + (third is not None)))
        self._per_layer: PerLayerInputPlan | None = None
        if second is not None:
            self._feed_forward = second.plan(m, size.threads, self._memory.starts[0])
            self.blocks = [*self.blocks, *self._feed_forward.blocks]
        if third is not None:
            self._per_layer = PerLayerInputPlan(third, m, size.threads, self._memory.starts[1])
            self.blocks = [*self.blocks, *self._per_layer.blocks]
        self._whole = second is not None

    def point(self, x: int, out: int, cache: Sequence[int], per_layer_input: tuple[int, int] | None = None) -> None:
        """Fills in what changes; `cache`: the arguments of ATTEND from `cos` to `length`; `per_layer_input`: of a layer with an input of
        its own where that lies, and bytes from row to row."""
        self._attention.point(x, self._memory.starts[0] if self._whole else out, cache)
        if self._whole:
            self._feed_forward.point(out if self._per_layer is None else self._memory.starts[1], x)
        if self._per_layer is not None:
            assert per_layer_input is not None
            self._per_layer.point(out, per_layer_input)


class Entry(NamedTuple):
    """Where the tokens enter a layer's cache: keys and values [B, Hkv, T, D] with D contiguous, T >= length + t, of one type that is
    float32, bfloat16 or float16; or int8, with the records of `layouts/records.py` in the place of D elements."""

    keys: Tensor
    values: Tensor
    length: int


def run(
    layers: Sequence[Layer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    entries: Sequence[Entry],
    mask: Tensor | None,
    per_layer_inputs: Tensor | None = None,
) -> list[Tensor]:
    """x [B, t, K], contiguous float32 -> what each of the layers gives, one after the other.

    rotary  cosines and sines, each [B or 1, t, R or R / 2], contiguous float32
    mask    bool [B or 1, 1, t or 1, length + t or more] with contiguous last dimension; None: each token sees those before it
    per_layer_inputs  of a layer that has one: float32 [B, t, P], contiguous in its last dimension
    """
    batch, tokens, _ = x.shape
    out = [torch.empty_like(x) for _ in layers]
    if mask is not None and tokens > MOST_STREAMED_TOKENS:
        mask = attend_whole.readable(mask)
    if batch * tokens <= _ROWS:
        _run(layers, x, rotary, entries, mask, [y.data_ptr() for y in out], per_layer_inputs)
        return out
    sequences, most = max(1, _ROWS // tokens), min(tokens, _ROWS)
    pieces = -(-tokens // most)
    for layer, entry, y in zip(layers, entries, out, strict=True):
        for b in range(0, batch, sequences):
            some = slice(b, b + sequences)
            of_some = [part[some] if len(part) > 1 else part for part in (*rotary, mask) if part is not None]
            for i in range(pieces):
                begin, end = (j * tokens // pieces for j in (i, i + 1))
                rotary_rows = of_some[0][:, begin:end], of_some[1][:, begin:end]
                seen = None if mask is None else of_some[2]
                if seen is not None and seen.shape[2] > 1:
                    seen = seen[:, :, begin:end]
                place = Entry(entry.keys[some], entry.values[some], entry.length + begin)
                layer_inputs = None if per_layer_inputs is None else per_layer_inputs[some, begin:end]
                _run((layer,), x[some, begin:end], rotary_rows, (place,), seen, [y[some, begin:end].data_ptr()], layer_inputs)
        x = y
    return out


def _run(
    layers: Sequence[Layer],
    x: Tensor,
    rotary: tuple[Tensor, Tensor],
    entries: Sequence[Entry],
    mask: Tensor | None,
    targets: Sequence[int],
    per_layer_inputs: Tensor | None,
) -> None:
    """`run` for up to _ROWS rows; targets: where what the layers give goes."""
    batch, tokens, _ = x.shape
    first = layers[0]
    threads = threads_of(first, batch * tokens)
    cos, sin = rotary
    before = cos.data_ptr(), sin.data_ptr(), 4 * cos.stride(0) if len(cos) > 1 else 0, 4 * cos.shape[2]
    after = (0, 0, 0)
    if mask is not None:
        after = mask.data_ptr(), mask.stride(0) if len(mask) > 1 else 0, mask.stride(2) if mask.shape[2] > 1 else 0
    source = x.data_ptr()
    layer_inputs = None if per_layer_inputs is None else (per_layer_inputs.data_ptr(), 4 * per_layer_inputs.stride(1))
    plans = []
    for layer, (keys, values, length), target in zip(layers, entries, targets, strict=True):
        size = Size(batch, tokens, CACHES[keys.dtype], mask is not None, threads)
        plan: Plan = layer.plans.entries.get(size) or layer.plans.get(size, functools.partial(Plan, layer, size))
        plan.point(source, target, (*before, *places(keys, values), *after, length), layer_inputs)
        source = target
        plans.append(plan)
    _sequence(first, tuple(plans), threads).run()


def threads_of(layer: Layer, rows: int) -> int:
    """The number of available threads that are worth waking for so many rows."""
    return max(1, min(runtime.threads(), rows * layer.work // WORK_A_THREAD))


def places(keys: Tensor, values: Tensor) -> list[int]:
    """The arguments of ATTEND from `keys` to `value_token`."""
    found = []
    for tensor in (keys, values):
        nbytes, strides = tensor.element_size(), tensor.stride()
        found += [tensor.data_ptr(), strides[0] * nbytes, strides[1] * nbytes, strides[2] * nbytes]
    return found


def _sequence(first: Layer, plans: tuple[Plan, ...], threads: int) -> StepSequence:
    """The steps of all plans, kept with the first layer until others follow it."""
    key = "chain", len(plans), threads
    found = first.plans.entries.get(key)
    if found is None or found[0] != plans:
        found = first.plans.entries[key] = plans, StepSequence([block for plan in plans for block in plan.blocks], threads)
    sequence: StepSequence = found[1]
    return sequence

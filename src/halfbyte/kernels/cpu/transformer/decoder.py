"""Decoder layers for the newest tokens of each sequence, in one native call: x [B, t, K] -> [B, t, K], float32.

    h = attention(x)                         `attention_sublayer.py`
    y = feed_forward(h)                      `feed_forward.py`, `experts/plan.py`; y = h in layers without one
    y = per_layer(y, e)                      `per_layer.py`, in layers with a per-layer input e

`ops/transformer/decoder.py` calls `run`; `whole_model.py` takes the `Plan`s of all layers for a decode step. Everything between the steps
is float32 and stays in memory of a few KB a row. Consecutive layers are one native call, since Python between two of them would run with
caches that are full of weights, some ten times as long as otherwise. Prompts are computed _ROWS tokens at a time, so that intermediate
results stay in memory of some MB.
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
from halfbyte.kernels.cpu.transformer.attention_sublayer import Attention, AttentionPlan, Size
from halfbyte.kernels.cpu.transformer.per_layer import PerLayerInput, PerLayerInputPlan
from halfbyte.kernels.cpu.transformer.sublayers import MOST_STREAMED_TOKENS, FeedForward, FeedForwardPlan, memory_rows, shared_memory

_ROWS = 256  # rows of a native call


@dataclass(frozen=True, eq=False)
class Layer:
    """A decoder layer by the addresses of its tensors.

    Attributes:
        attention, feed_forward, per_layer: Its sublayers; the latter two may be missing, and `per_layer` requires `feed_forward`.
        plans: Its `Plan`s by `Size`, and the sequence of steps of the layers that last followed it (`_sequence`).
    """

    attention: Attention
    feed_forward: FeedForward | None
    per_layer: PerLayerInput | None = None
    plans: PlanCache[Any] = field(default_factory=PlanCache)

    def __post_init__(self) -> None:
        assert self.per_layer is None or self.feed_forward is not None, "a per-layer input is that of a layer with a feed-forward sublayer"

    @property
    def k(self) -> int:
        return self.attention.o_proj.n

    @property
    def work(self) -> int:
        """Multiplications for a row, approximately."""
        return self.attention.qkv_width * self.k if self.feed_forward is None else self.feed_forward.work

    @property
    def rotary(self) -> int:
        """Elements of a head that rope rotates."""
        return self.attention.heads.rotary_dim


class Plan:
    """A layer's steps for calls of one size.

    Attributes:
        blocks: The arguments of all steps, in order, without those that change from call to call.
        attention: Those of attention among them (`AttentionPlan.steps`).
    """

    def __init__(self, layer: Layer, size: Size) -> None:
        m, feed_forward, per_layer = size.batch * size.tokens, layer.feed_forward, layer.per_layer
        self._attention = AttentionPlan(layer.attention, size)
        self.attention, self.blocks = self._attention.steps, self._attention.blocks
        # h, and y before a per-layer sublayer; the last sublayer writes to the call's output
        self._hidden = shared_memory("hidden", (4 * memory_rows(m) * layer.k,) * ((feed_forward is not None) + (per_layer is not None)))
        self._feed_forward: FeedForwardPlan | None = None
        self._per_layer: PerLayerInputPlan | None = None
        if feed_forward is not None:
            self._feed_forward = feed_forward.plan(m, size.threads, self._hidden.starts[0])
            self.blocks = [*self.blocks, *self._feed_forward.blocks]
        if per_layer is not None:
            self._per_layer = PerLayerInputPlan(per_layer, m, size.threads, self._hidden.starts[1])
            self.blocks = [*self.blocks, *self._per_layer.blocks]

    def set_addresses(self, x: int, out: int, cache: Sequence[int], per_layer_input: tuple[int, int] | None = None) -> None:
        """Fill in the arguments of a call.

        Args:
            x, out: Addresses of the layer's input and output.
            cache: The arguments of ATTEND from `cos` to `length`.
            per_layer_input: Address of the per-layer input, and bytes from row to row; None: the layer takes none.
        """
        self._attention.set_addresses(x, out if self._feed_forward is None else self._hidden.starts[0], cache)
        if self._feed_forward is not None:
            self._feed_forward.set_addresses(out if self._per_layer is None else self._hidden.starts[1], x)
        if self._per_layer is not None:
            assert per_layer_input is not None, "the layer has a per-layer input, and the call has none"
            self._per_layer.set_addresses(out, per_layer_input)


class Entry(NamedTuple):
    """A layer's KV cache, which t new tokens enter behind `length` ones.

    Attributes:
        keys, values: [B, Hkv, T, D] with D contiguous, T >= length + t, of one dtype, float32, bfloat16 or float16; or int8, with the
            records of `layouts/records.py` in place of D elements.
        length: Tokens in the cache.
    """

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
    """Compute consecutive layers.

    Args:
        layers: One or more; with `per_layer_inputs`, one.
        x: [B, t, K], contiguous float32.
        rotary: Cosines and sines, each [B or 1, t, R or R / 2], contiguous float32.
        entries: Each layer's KV cache.
        mask: bool [B or 1, 1, t or 1, length + t or more] with contiguous last dimension; None: the causal one alone.
        per_layer_inputs: [B, t, P] float32, contiguous in its last dimension.

    Returns:
        The output of each of the layers, [B, t, K].
    """
    batch, tokens, _ = x.shape
    out = [torch.empty_like(x) for _ in layers]
    if mask is not None and tokens > MOST_STREAMED_TOKENS:
        mask = attend_whole.readable(mask)
    if batch * tokens <= _ROWS:
        _run(layers, x, rotary, entries, mask, [y.data_ptr() for y in out], per_layer_inputs)
        return out
    # More rows: layer by layer, some sequences, or some tokens of one, at a time.
    sequences, most_tokens = max(1, _ROWS // tokens), min(tokens, _ROWS)
    chunks = -(-tokens // most_tokens)
    for layer, entry, y in zip(layers, entries, out, strict=True):
        for b in range(0, batch, sequences):
            some = slice(b, b + sequences)
            cos, sin, *masks = (part[some] if len(part) > 1 else part for part in (*rotary, mask) if part is not None)
            for i in range(chunks):
                begin, end = (j * tokens // chunks for j in (i, i + 1))
                mask_rows = masks[0] if masks else None
                if mask_rows is not None and mask_rows.shape[2] > 1:
                    mask_rows = mask_rows[:, :, begin:end]
                some_entry = Entry(entry.keys[some], entry.values[some], entry.length + begin)
                layer_inputs = None if per_layer_inputs is None else per_layer_inputs[some, begin:end]
                rotary_rows, outputs = (cos[:, begin:end], sin[:, begin:end]), [y[some, begin:end].data_ptr()]
                _run((layer,), x[some, begin:end], rotary_rows, (some_entry,), mask_rows, outputs, layer_inputs)
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
    """Compute `run` for at most _ROWS rows, contiguous in x; `targets`: addresses of the layers' outputs."""
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
        plan.set_addresses(source, target, (*before, *places(keys, values), *after, length), layer_inputs)
        source = target
        plans.append(plan)
    _sequence(first, tuple(plans), threads).run()


def threads_of(layer: Layer, rows: int) -> int:
    """Return the number of available threads that are worth waking for so many rows."""
    return runtime.useful_threads(rows * layer.work, WORK_A_THREAD)


def places(keys: Tensor, values: Tensor) -> list[int]:
    """Return the arguments of ATTEND from `keys` to `value_token`: addresses and strides."""
    fields = []
    for tensor in (keys, values):
        nbytes, strides = tensor.element_size(), tensor.stride()
        fields += [tensor.data_ptr(), strides[0] * nbytes, strides[1] * nbytes, strides[2] * nbytes]
    return fields


def _sequence(first: Layer, plans: tuple[Plan, ...], threads: int) -> StepSequence:
    """Return the steps of all plans, cached with the first layer until other layers follow it."""
    key = "sequence", len(plans), threads
    cached = first.plans.entries.get(key)
    if cached is None or cached[0] != plans:
        cached = first.plans.entries[key] = plans, StepSequence([block for plan in plans for block in plan.blocks], threads)
    sequence: StepSequence = cached[1]
    return sequence

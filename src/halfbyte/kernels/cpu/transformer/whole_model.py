"""A decode step: new tokens through all layers of a decoder in one native call: ids [M] -> logits [M, N], float32.

The tokens are one of each of B sequences, or the next 1 … 8 of one sequence. Each row is computed in the same order of operations
whatever M is: the logits after a token are the same, bit by bit, whether it is alone or among others of its sequence.

    x  = embed_scale * table[ids]                                    [M, K]; without a quantized table the caller writes x
    e  = scale * (multiplier * table[ids] + norm(x · Wᵀ))            [M, layers * P], of models with per-layer inputs (Gemma 3n, 4)
    x  = layer(x)                                                    each of the layers, as in `decoder.py`, in place; with its part of e
    y  = f(norm(x) · Wᵀ + bias)                                      the head, as in `step_sequence.py`; norm(x) [M, K] without one

`ops/transformer/whole_model_decode.py` keeps a `DecodeSteps` for each size of batch. From step to step all arguments stay but the ids, the
rope caches, the length of the KV cache and where y goes: what Python does between two tokens runs with caches that are full of weights,
some three times as long as otherwise.
"""

from __future__ import annotations

import ctypes
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen.arguments import DEQUANTIZE, LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.quantize import dequantize
from halfbyte.kernels.cpu.step_sequence import NORM, Product, Step, StepSequence, phase
from halfbyte.kernels.cpu.transformer import decoder
from halfbyte.kernels.cpu.transformer.attend import ATTEND, CACHES
from halfbyte.kernels.cpu.transformer.attention_sublayer import Size
from halfbyte.kernels.cpu.transformer.decoder import Entry, Layer, Plan
from halfbyte.kernels.cpu.transformer.sublayers import Fields, Norm, Workspace, linear_arguments, product_steps
from halfbyte.kernels.layer_kinds import LogitsFunction
from halfbyte.layouts.cpu_tiles import Geometry

_pack_mask = ATTEND.struct("mask", "mask_batch").pack_into
_WHERE, _QKV = ATTEND.struct("qkv", "out_stride"), ATTEND.offset("qkv")
_ROTARY = ATTEND.struct("cos", "sin")
_KEYS, _VALUES, _MASK, _LENGTH = (ATTEND.offset(field) for field in ("keys", "values", "mask", "length"))


@dataclass(frozen=True, eq=False, slots=True)
class PerLayerInputs:
    """How the per-layer inputs of a token are computed, P elements for each layer, by the addresses of tensors.

    Attributes:
        table: As of a Model, with rows of all layers' elements.
        multiplier: Of its rows.
        projection: From x to all layers' elements.
        norm: Of each P of them.
        scale: Address of a float32.
    """

    table: tuple[Geometry, int] | None
    multiplier: float
    projection: Product
    norm: Norm
    scale: int

    def steps(self, rows: int, layers: int, threads: int, ids: int, x: int, per_layer_inputs: int) -> tuple[list[Buffer], object]:
        """Return the steps from x [rows, K] to e [rows, layers * P], and what they read, which the caller keeps alive; `ids`, `x` and
        `per_layer_inputs` are addresses."""
        product = self.projection
        wide, width = 4 * product.n, product.n // layers
        workspace = Workspace.of("per_layer_inputs", (product,), rows, threads, (rows * wide,))
        projected = workspace.buffers[0]
        first = workspace.product(product, x, projected)
        fields: Fields = {
            "x": projected,
            "x_stride": 4 * width,
            "out": per_layer_inputs,
            "out_stride": 4 * width,
            "rows": rows * layers,
            "k": width,
        }
        fields |= {"weight": self.norm.weight, "shift": self.scale, "eps": (self.norm.eps, 0.0)}
        added = arguments(NORM, phase(self.norm.step("norm", added=True, scaled=True)), fields)
        return [*_looked_up(self.table, self.multiplier, rows, product.n, ids, per_layer_inputs), *first.blocks, added], (workspace, first)


@dataclass(frozen=True, eq=False, slots=True)
class Model:
    """A decoder by the addresses of its tensors; the caller must keep them alive.

    Attributes:
        layers: The layers.
        table: Shape of the embedding and address of its packed bytes; None: it is not quantized.
        embed_scale: Factor of its rows.
        norm: The last norm.
        head: The product with the head's weight; None: there is none, or it is not packed.
        logits: f, one of `step_sequence.EACH`, and its constant; None: none.
        windows: Of each layer the sliding window: how many tokens a new one sees, itself the last; None: all.
        rope_index: Of each layer the rope cache that it uses.
        per_layer_inputs: None: layers have none.
    """

    layers: tuple[Layer, ...]
    table: tuple[Geometry, int] | None
    embed_scale: float
    norm: Norm
    head: Product | None
    logits: tuple[LogitsFunction, float] | None
    windows: tuple[int | None, ...]
    rope_index: tuple[int, ...]
    per_layer_inputs: PerLayerInputs | None = None


class _Windowed(NamedTuple):
    """The attention steps of a layer with a sliding window, one for each new token of a sequence.

    Attributes:
        blocks: Their arguments.
        window: Tokens of the window.
        keys, values: Where those of the sequence's first token would be, though the cache may have dropped it.
        key_bytes, value_bytes: From a token to the next.
    """

    blocks: Sequence[Buffer]
    window: int
    keys: int
    key_bytes: int
    values: int
    value_bytes: int

    @classmethod
    def of(cls, blocks: Sequence[Buffer], entry: Entry, length: int, window: int) -> _Windowed:
        keys, _, _, key_bytes, values, _, _, value_bytes = decoder.places(entry.keys, entry.values)
        dropped = length - entry.length
        return cls(blocks, window, keys - dropped * key_bytes, key_bytes, values - dropped * value_bytes, value_bytes)


class DecodeSteps:
    """The steps of B sequences with one KV cache, for one Python thread: of one token of each, or of `tokens` of one sequence.

    Attributes:
        x: [M, K] Rows of the tokens, which the caller writes if the model has no table.
        per_layer_inputs: [M, layers * P] The same, or empty.
        ids: The tokens, rows of the table.
        cache: Dtype of keys and values.
        threads: That run the steps, as many as there are when this is made.
    """

    def __init__(self, model: Model, entries: Sequence[Entry], length: int, *, masked: bool, tokens: int = 1) -> None:
        """Plan the steps.

        Args:
            model: The decoder.
            entries: Keys, values and length of each layer's cache.
            length: Tokens of the sequences before the new ones.
            masked: Whether calls have a mask.
            tokens: New tokens of a sequence; 1 for several sequences.
        """
        first, batch = model.layers[0], len(entries[0].keys)
        rows = batch * tokens
        self.cache = entries[0].keys.dtype
        self.threads = decoder.threads_of(first, rows)
        rope_count, rotary_dim = 1 + max(model.rope_index), max(layer.rotary for layer in model.layers)
        with torch.inference_mode(False):  # written again and again, and not always in that mode
            self.x = torch.zeros(rows, first.k, dtype=torch.float32, device="cpu")
            self._rope_tables = torch.zeros(rows, rope_count, 2, rotary_dim, dtype=torch.float32, device="cpu")
            width = 0 if model.per_layer_inputs is None else model.per_layer_inputs.projection.n
            self.per_layer_inputs = torch.zeros(rows, width, dtype=torch.float32, device="cpu")
        self.ids = (ctypes.c_int64 * rows)()
        self._model, self._batch, self._rows = model, batch, rows
        self._cosine_bytes, self._rope_bytes = 4 * rotary_dim, 8 * rotary_dim * rope_count  # of a rope cache's row, and of a token's
        size = Size(batch, tokens, CACHES[self.cache], masked, self.threads)
        self._plans = [Plan(layer, size) for layer in model.layers]
        plans_and_windows = list(zip(self._plans, model.windows, strict=True))
        self._full_attention = [plan.attention[0] for plan, window in plans_and_windows if window is None]
        # Each token of a sequence has a window that begins elsewhere, and so a step of attention of its own.
        self._attention = [
            [plan.attention[0]] if window is None else _split_by_token(plan.attention[0], tokens) for plan, window in plans_and_windows
        ]
        self._windowed: list[_Windowed]
        self._out_places: list[tuple[Buffer, int]]  # blocks and offsets at which the address of y is written
        of_layers = (block for plan, attention in zip(self._plans, self._attention, strict=True) for block in _with(plan, attention))
        blocks = [*self._begin(), *of_layers, *self._end()]
        self._sequence = StepSequence(blocks, self.threads)
        self.set_addresses(entries, length)

    def _begin(self) -> list[Buffer]:
        """Return the steps before the layers: embeddings, and per-layer inputs."""
        model, ids, x = self._model, ctypes.addressof(self.ids), self.x.data_ptr()
        blocks = _looked_up(model.table, model.embed_scale, self._rows, self.x.shape[1], ids, x)
        if model.per_layer_inputs is None:
            return blocks
        sizes = self._rows, len(model.layers), self.threads
        more, self._alive = model.per_layer_inputs.steps(*sizes, ids, x, self.per_layer_inputs.data_ptr())
        return [*blocks, *more]

    def _end(self) -> list[Buffer]:
        """Return the steps after the layers: norm, head, and the function of logits."""
        norm, head, k = self._model.norm, self._model.head, self.x.shape[1]
        if head is None:
            sizes = {"x": self.x.data_ptr(), "x_stride": 4 * k, "out_stride": 4 * k, "rows": self._rows, "k": k}
            block = arguments(NORM, phase(norm.step("norm")), {**sizes, **norm.fields})
            self._out_places = [(block, NORM.offset("out"))]
            return [block]
        alone = self._rows == 1
        private = head.kernel.scratch_bytes(self._rows) + 63 & ~63
        with torch.inference_mode(False):
            self._memory = torch.empty(self.threads * (private + 4 * k) + 64, dtype=torch.uint8, device="cpu")
        laid_out = self._memory.data_ptr() + 63 & ~63
        buffer = linear_arguments(head, self._rows, self.threads, self.x.data_ptr(), laid_out, 0)
        self._out_places = [(buffer, LINEAR.offset("out"))]
        fields: Fields = {
            "normed": laid_out + self.threads * private,
            "normed_thread": 4 * k,
            "private": private if alone else 0,
            "norm": norm.weight,
            "shift": norm.bias,
            "eps": (norm.eps, 0.0),
        }
        steps, _, self._table = product_steps(head.n, buffer, fields, single_row=alone, threads=self.threads, step=norm.step(""))
        if self._model.logits is not None:
            function, constant = self._model.logits
            steps.append(_each(function, self._rows * head.n, constant))
            self._out_places.append((steps[-1], NORM.offset("x")))
        return steps

    def set_addresses(self, entries: Sequence[Entry], length: int) -> None:
        """Set the KV cache of later runs: of the same dtype and batch, with `length` tokens of each sequence, of which a sliding window's
        entry may hold the last ones only."""
        at, ropes = self.x.data_ptr(), self._rope_tables.data_ptr()
        row_bytes = 4 * self.per_layer_inputs.shape[1]
        input_bytes = row_bytes // len(self._plans)  # of one layer
        for index, (plan, entry, number) in enumerate(zip(self._plans, entries, self._model.rope_index, strict=True)):
            cosines = ropes + 2 * number * self._cosine_bytes
            strides = (self._rope_bytes, 0) if self._batch > 1 else (0, self._rope_bytes)  # of sequences, or of the tokens of one
            rotary = cosines, cosines + self._cosine_bytes, *strides
            layer_input = self.per_layer_inputs.data_ptr() + index * input_bytes, row_bytes
            plan.set_addresses(at, at, (*rotary, *decoder.places(entry.keys, entry.values), 0, 0, 0, entry.length), layer_input)
        layers = zip(self._plans, self._attention, entries, self._model.windows, strict=True)
        self._windowed = []
        for plan, blocks, entry, window in layers:
            if window is not None:
                _point_each(blocks, plan.attention[0], self._rope_bytes)
                self._windowed.append(_Windowed.of(blocks, entry, length, window))

    def set_rope(self, b: int, rotary: int) -> None:
        """Copy the cosines and sines [rope caches, 2, R], float32, at an address into row b."""
        ctypes.memmove(self._rope_tables.data_ptr() + b * self._rope_bytes, rotary, self._rope_bytes)

    def run(self, length: int, out: int, mask: Tensor | None) -> None:
        """Run a decode step.

        Args:
            length: Tokens of each sequence before the new ones.
            out: Address of y.
            mask: bool [B, length + 1], contiguous: the tokens that each new one sees; if and only if the steps are `masked`.
        """
        for block in self._full_attention:
            pack_integer(block, _LENGTH, length)
        for layer in self._windowed:
            for before, block in enumerate(layer.blocks, length):
                begin = max(0, before + 1 - layer.window)
                pack_integer(block, _KEYS, layer.keys + begin * layer.key_bytes)
                pack_integer(block, _VALUES, layer.values + begin * layer.value_bytes)
                pack_integer(block, _LENGTH, before - begin)
                if mask is not None:
                    _pack_mask(block, _MASK, mask.data_ptr() + begin, mask.stride(0))
        if mask is not None:
            at, stride = mask.data_ptr(), mask.stride(0)
            for block in self._full_attention:
                _pack_mask(block, _MASK, at, stride)
        for block, place in self._out_places:
            pack_integer(block, place, out)
        self._sequence.run()


def _split_by_token(block: Buffer, tokens: int) -> list[Buffer]:
    """Return a step of attention for each of a sequence's new tokens, from the step of all of them; of one token, that step itself."""
    if tokens == 1:
        return [block]
    (qkv, qkv_stride, out, out_stride) = _WHERE.unpack_from(block, _QKV)
    steps = []
    for token in range(tokens):
        steps.append(ctypes.create_string_buffer(block.raw, len(block)))
        _WHERE.pack_into(steps[-1], _QKV, qkv + token * qkv_stride, qkv_stride, out + token * out_stride, out_stride)
        pack_integer(steps[-1], ATTEND.offset("tokens"), 1)
    return steps


def _point_each(blocks: Sequence[Buffer], block: Buffer, width: int) -> None:
    """Copy the arguments that `Plan.point` set in the step of all tokens, `block`, to the steps of single tokens; `width`: bytes from a
    token's cosines to the next."""
    if len(blocks) == 1:
        return
    first, last = ATTEND.offset("cos"), ATTEND.offset("length")
    changing = block.raw[first:last]
    for token, one in enumerate(blocks):
        ctypes.memmove(ctypes.addressof(one) + first, changing, len(changing))
        _ROTARY.pack_into(one, first, *(at + token * width for at in _ROTARY.unpack_from(block, first)))


def _with(plan: Plan, attention: Sequence[Buffer]) -> Iterator[Buffer]:
    """Yield a layer's steps, with these in the place of its attention."""
    for block in plan.blocks:
        yield from attention if block is plan.attention[0] else (block,)


def _looked_up(table: tuple[Geometry, int] | None, factor: float, rows: int, width: int, ids: int, out: int) -> list[Buffer]:
    """Return the steps that write factor * table[ids] [rows, width] at `out`; without a table, of what is there already."""
    scaled = [] if factor == 1.0 else [_each("times", rows * width, factor, out)]
    if table is None:
        return scaled
    geo, weights = table
    fields = dequantize.weight_fields(weights, geo)
    fields |= {"ids": ids, "rows": rows, "out": out, "out_stride": 4 * geo.k}
    function = compiled(dequantize.build, dequantize.spec_of(geo, "f32"), current())
    return [arguments(DEQUANTIZE, function, fields), *scaled]


def _each(function: LogitsFunction, count: int, constant: float, x: int = 0) -> Buffer:
    """Return the step of a function of `step_sequence.EACH` of `count` floats in place, from the address x on."""
    return arguments(NORM, phase(Step(function)), {"x": x, "k": count, "eps": (0.0, constant)})

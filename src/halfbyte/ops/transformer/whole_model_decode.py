"""New tokens through a whole language model in one call on a CPU: one of each sequence, or several of one."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.kernels.layer_kinds import LogitsFunction
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops.transformer.decoder import DecoderLayer, Norm, norm_of
from halfbyte.ops.transformer.weights import TensorAddresses, Weight, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer.whole_model import Steps

MOST_IN_A_ROW = 8  # tokens of one sequence: attention of more is computed in another order
_MOST_KINDS = 128  # of calls, for which a thread keeps the arguments: batches of 1 to 64 sequences, with and without a mask


class Inputs(NamedTuple):
    """e = scale * (factor * table[ids] + norm(projected * projection(x))), each layer's own input (Gemma 4's per-layer embeddings), of P
    elements for each layer side by side, of the rows x that go into the first layer.

    table       [N', layers * P], packed for CPUs, or floats in any dtype
    projection  [layers * P, K]
    norm        [P], an RMS norm of each P
    """

    table: Packed | Tensor
    table_multiplier: float
    projection: Weight
    projection_multiplier: float
    norm: Norm
    scale: float

    def check(self, layers: Sequence[DecoderLayer]) -> None:
        """Raises ArgumentError where it does not fit to layers, or is not supported."""
        k, widths = layers[0].k, {layer.per_layer_width for layer in layers}
        width, shapes = self.norm.weight.shape[0], [tuple(self.table.shape), tuple(self.projection.packed.shape)]
        expected = len(layers) * width
        fits = widths == {width} and len(shapes[0]) == 2 and shapes[0][1] == expected and shapes[1] == (expected, k)
        if not fits or self.norm.layer_norm:
            raise ArgumentError(
                f"inputs of {len(layers)} layers' own are made by an RMS norm [P], a table [N, {len(layers)} * P] and a projection "
                f"[{len(layers)} * P, {k}], got {[width]} and {shapes} for layers that take {sorted(map(str, widths))}"
            )


class DecodingStep:
    """logits = f(head(norm(layers(factor * table[ids]))))

    layers   one after the other
    table    [N, K], packed for CPUs, or floats in any dtype
    norm     the one behind the layers
    head     [N, K]; None: the result is the normed rows
    windows  of each layer, how many tokens it sees, itself the last; None: all
    rope_index  of each layer: which of the model's rope caches it uses; None: all use one
    logits   f and c: "over", y / c, "times", y * c, or "cap", c * tanh(y / c); None: none, as where there is no head
    inputs   what layers' own inputs are made of, if they have any

    Everything between the products is float32. Raises ArgumentError for parts that do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        table: Packed | Tensor,
        norm: Norm,
        head: Weight | None,
        windows: Sequence[int | None] | None = None,
        rope_index: Sequence[int] | None = None,
        *,
        factor: float = 1.0,
        logits: tuple[LogitsFunction, float] | None = None,
        inputs: Inputs | None = None,
    ) -> None:
        from halfbyte.kernels.cpu.codegen import runtime
        from halfbyte.kernels.cpu.plan_cache import PlanCache
        from halfbyte.kernels.cpu.transformer import whole_model

        k = layers[0].k
        shapes = [tuple(table.shape), tuple(norm.weight.shape), *([] if head is None else [tuple(head.packed.shape)])]
        if any(layer.k != k for layer in layers) or any(shape[-1:] != (k,) for shape in shapes) or len(shapes[0]) != 2:
            raise ArgumentError(
                f"layers of one width K take a table [N, K], a norm [K] and a head [N, K], got {[layer.k for layer in layers]} and {shapes}"
            )
        if inputs is not None:
            inputs.check(layers)
        tables = [table, *([] if inputs is None else [inputs.table])]
        packed = [*(one for one in tables if isinstance(one, Packed)), *([] if head is None else [head.packed])]
        packed += [] if inputs is None else [inputs.projection.packed]
        if (reason := why_not_packed(packed)) is not None:
            raise ArgumentError(f"this model is not computed in one call: {reason}")
        self._layers, self._tables, self._rows, self._k = layers, tables, min(one.shape[0] for one in tables), k
        self._width = k if head is None else head.packed.shape[0]
        self._tensors = tensors = TensorAddresses()
        rows = [_rows_of(one) for one in tables]
        last = None if head is None else tensors.product(head)
        self._windows = tuple(windows or (None,) * len(layers))
        inner = tuple(layer.inner for layer in layers)
        rope_index = tuple(rope_index or (0,) * len(layers))
        of_layers = None
        if inputs is not None:
            # norm(s * y) is that of y with another eps.
            norm_of_each = norm_of(tensors, inputs.norm)._replace(eps=inputs.norm.eps / inputs.projection_multiplier**2)
            with torch.inference_mode(False):
                scale = tensors.as_float32(torch.tensor([inputs.scale], dtype=torch.float32, device="cpu"))
            product = tensors.product(inputs.projection)
            of_layers = whole_model.Inputs(rows[1], inputs.table_multiplier, product, norm_of_each, scale)
        of_last = norm_of(tensors, norm)
        self._model = whole_model.Model(inner, rows[0], factor, of_last, last, logits, self._windows, rope_index, of_layers)
        self._threads = runtime.threads
        self._kept: PlanCache[tuple[Steps, Hashable]] = PlanCache(_MOST_KINDS)
        self._copied = [one for one in (*(layer.tensors for layer in layers), tensors) if one.has_copies]

    def __call__(
        self,
        ids: Sequence[int],
        rotary: Sequence[int],
        cache: Hashable,
        entries: Callable[[], Sequence[tuple[Tensor, Tensor, int]]],
        length: int,
        mask: Tensor | None = None,
        *,
        in_a_row: bool = False,
    ) -> Tensor:
        """Tokens ids [B], appended to a cache that has `length` tokens -> float32 [B, 1, N], or [B, 1, K].

        rotary   the address of each token's cosines and sines, [turns, 2, R] float32
        cache    stands for the memory of the cache's keys and values: unique per allocation, never reused
        entries  gives for each layer keys, values and length as a call of DecoderLayer takes them, of one batch and type; of `length`
                 tokens a window may have lost the first. It is called if the thread's last call had another cache
        mask     bool [B, length + 1], contiguous: which tokens of the cache and new ones may be seen
        in_a_row  the tokens, MOST_IN_A_ROW at most, are those of one sequence, one after the other, without a mask: the result is, bit by
                 bit, that of as many calls

        Raises ArgumentError for ids that the table does not have, and for entries that layers do not take.
        """
        if min(ids) < 0 or max(ids) >= self._rows:
            raise ArgumentError(f"embedding ids lie in 0 … {self._rows - 1}, got {min(ids)} … {max(ids)}")
        for tensors in self._copied:
            tensors.refresh()
        if in_a_row and (len(ids) > MOST_IN_A_ROW or mask is not None):
            raise ArgumentError(f"1 to {MOST_IN_A_ROW} tokens of one sequence, without a mask, are decoded in a row, got {len(ids)}")
        steps = self._steps((1, len(ids)) if in_a_row else (len(ids), 1), mask is not None, cache, entries, length)
        steps.ids[:] = [*ids]
        for table, to in zip(self._tables, (steps.x, steps.per_layer_inputs), strict=False):
            if isinstance(table, Tensor):
                to.copy_(table[ids])
        for b, at in enumerate(rotary):
            steps.set_rope(b, at)
        y = torch.empty(len(ids), 1, self._width, dtype=torch.float32, device="cpu")
        steps.run(length, y.data_ptr(), mask)
        return y

    def _steps(
        self, size: tuple[int, int], masked: bool, cache: Hashable, entries: Callable[[], Sequence[tuple[Tensor, Tensor, int]]], length: int
    ) -> Steps:
        (batch, tokens), kind = size, (*size, masked, self._threads())
        kept = self._kept.entries.get(kind)
        if kept is not None and kept[1] == cache:
            return kept[0]
        from halfbyte.kernels.cpu.transformer import whole_model
        from halfbyte.kernels.cpu.transformer.decoder import Entry

        found, x = tuple(entries()), torch.empty(batch, tokens, self._k, dtype=torch.float32, device="cpu")
        for layer, entry in zip(self._layers, found, strict=True):
            angles = x.new_empty(1, tokens, layer.rotary)
            layer.check(x, (angles, angles), *entry, None)
        if len(dtypes := {keys.dtype for keys, _, _ in found}) > 1:
            raise ArgumentError(f"a cache of one type is taken, got {dtypes}")
        for (_, _, there), window in zip(found, self._windows, strict=True):
            if there > length or there < (length if window is None else min(length, window - 1)):
                raise ArgumentError(f"of {length} tokens and a window of {window} a cache has those that are seen, got one of {there}")
        places = [Entry(*entry) for entry in found]
        if kept is not None and kept[0].cache in dtypes:
            steps = kept[0]
            steps.point(places, length)
        else:
            steps = whole_model.Steps(self._model, places, length, masked=masked, tokens=tokens)
        self._kept.entries[kind] = steps, cache
        return steps


def _rows_of(table: Packed | Tensor) -> tuple[cpu_tiles.Geometry, int] | None:
    """The shape of a packed table and the address of its bytes."""
    if isinstance(table, Tensor):
        return None
    return cpu_tiles.geometry(table.format, table.shape, sparse=table.layout == cpu_tiles.SPARSE), table.data.data_ptr()

"""Decoding on a CPU: one native call computes new tokens through a whole language model.

`WholeModelDecode` takes the addresses of embeddings, layers (decoder.py), last norm and head, and starts
kernels/cpu/transformer/whole_model.py. decoder/lower_cpu.py builds one for a model and calls it for each decode step.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.kernels.layer_kinds import LogitsFunction
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops.transformer.decoder import DecoderLayer
from halfbyte.ops.transformer.sublayers import Norm, native_norm
from halfbyte.ops.transformer.weights import TensorAddresses, Weight, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.transformer import whole_model
    from halfbyte.kernels.cpu.transformer.whole_model import DecodeSteps

MOST_CONSECUTIVE = 8  # tokens of one sequence in a call: attention of more is computed in another order
_MOST_CALLS = 128  # kinds of calls whose steps a thread caches: batches of 1 to 64 sequences, with and without a mask

# For each layer keys, values and length, as a call of DecoderLayer takes them.
CacheEntries = Sequence[tuple[Tensor, Tensor, int]]


class PerLayerInputs(NamedTuple):
    """e = scale * (table_multiplier * table[ids] + norm(projection_multiplier * projection(x)))

    The per-layer inputs (Gemma 4) for the rows x of the first layer: P elements for each layer, side by side.

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
        """Raise ArgumentError where these do not fit to layers, or are not supported."""
        k, layer_widths = layers[0].k, {layer.per_layer_width for layer in layers}
        width, table, projection = self.norm.weight.shape[0], tuple(self.table.shape), tuple(self.projection.packed.shape)
        total = len(layers) * width
        fits = layer_widths == {width} and len(table) == 2 and table[1] == total and projection == (total, k)
        if not fits or self.norm.layer_norm:
            raise ArgumentError(
                f"inputs of {len(layers)} layers' own are made by an RMS norm [P], a table [N, {len(layers)} * P] and a projection "
                f"[{len(layers)} * P, {k}], got {[width]} and {[table, projection]} for layers that take "
                f"{sorted(map(str, layer_widths))}"
            )

    def native(self, tensors: TensorAddresses) -> whole_model.PerLayerInputs:
        """Return the same by the addresses of its tensors, which `tensors` keeps alive."""
        from halfbyte.kernels.cpu.transformer import whole_model

        # norm(s * y) is that of y with another eps.
        norm = native_norm(tensors, self.norm)._replace(eps=self.norm.eps / self.projection_multiplier**2)
        with torch.inference_mode(False):
            scale = tensors.as_float32(torch.tensor([self.scale], dtype=torch.float32, device="cpu"))
        return whole_model.PerLayerInputs(_packed_rows(self.table), self.table_multiplier, tensors.product(self.projection), norm, scale)


class WholeModelDecode:
    """logits = f(head(norm(layers(factor * table[ids]))))

    Everything between the products is float32.

    Args:
        layers: One after the other, of one width K.
        table: The embeddings [N, K], packed for CPUs, or floats in any dtype.
        norm: The one behind the layers.
        head: [N, K]; None: the result is the normed rows.
        windows: For each layer, how many tokens it sees, itself the last; None: all.
        rope_index: For each layer, which of the model's rope caches it uses; None: all use the first.
        factor: The embedding multiplier.
        logits: f and c: "over", y / c, "times", y * c, or "cap", c * tanh(y / c); None: none, as where there is no head.
        per_layer_inputs: What the layers' own inputs are computed from, if they have any.

    Raises:
        ArgumentError: The parts do not fit together, or are not packed for CPUs.
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
        per_layer_inputs: PerLayerInputs | None = None,
    ) -> None:
        from halfbyte.kernels.cpu.codegen import runtime
        from halfbyte.kernels.cpu.plan_cache import PlanCache
        from halfbyte.kernels.cpu.transformer import whole_model

        _check_parts(layers, table, norm, head, per_layer_inputs)
        self._layers, self._k = layers, layers[0].k
        self._tables = [table, *([] if per_layer_inputs is None else [per_layer_inputs.table])]
        self._tokens = min(each.shape[0] for each in self._tables)
        self._outputs = self._k if head is None else head.packed.shape[0]
        self._windows = tuple(windows or (None,) * len(layers))
        self._tensors = tensors = TensorAddresses()
        self._model = whole_model.Model(
            tuple(layer.native for layer in layers),
            _packed_rows(table),
            factor,
            native_norm(tensors, norm),
            None if head is None else tensors.product(head),
            logits,
            self._windows,
            tuple(rope_index or (0,) * len(layers)),
            None if per_layer_inputs is None else per_layer_inputs.native(tensors),
        )
        self._threads = runtime.threads
        # For each kind of call the steps, and the cache that they point to.
        self._calls: PlanCache[tuple[DecodeSteps, Hashable]] = PlanCache(_MOST_CALLS)
        self._with_copies = [each for each in (*(layer.tensors for layer in layers), tensors) if each.has_copies]

    def __call__(
        self,
        ids: Sequence[int],
        rope_rows: Sequence[int],
        cache: Hashable,
        entries: Callable[[], CacheEntries],
        length: int,
        mask: Tensor | None = None,
        *,
        consecutive: bool = False,
    ) -> Tensor:
        """Compute tokens ids [B], appended to a KV cache that has `length` tokens.

        Args:
            ids: A new token for each of B sequences, or B tokens of one.
            rope_rows: For each token, the address of its cosines and sines, [rope caches, 2, R] float32.
            cache: Identifies the memory of keys and values: unique per allocation, never reused.
            entries: Returns the layers' keys and values; of `length` tokens a window may have lost the first. Called if the thread's last
                call of this kind had another `cache`.
            length: Tokens in the cache.
            mask: bool [B, length + 1], contiguous: which tokens of the cache and new ones may be seen.
            consecutive: The tokens, MOST_CONSECUTIVE at most, follow each other in one sequence, without a mask. The result is, bit by
                bit, that of as many calls.

        Returns:
            float32 [B, 1, N], or [B, 1, K] without a head.

        Raises:
            ArgumentError: The table does not have these ids, or layers do not take these entries.
        """
        if min(ids) < 0 or max(ids) >= self._tokens:
            raise ArgumentError(f"embedding ids lie in 0 … {self._tokens - 1}, got {min(ids)} … {max(ids)}")
        for tensors in self._with_copies:
            tensors.refresh()
        if consecutive and (len(ids) > MOST_CONSECUTIVE or mask is not None):
            raise ArgumentError(f"1 to {MOST_CONSECUTIVE} tokens of one sequence, without a mask, are decoded in a row, got {len(ids)}")
        batch, tokens = (1, len(ids)) if consecutive else (len(ids), 1)
        steps = self._steps(batch, tokens, mask is not None, cache, entries, length)
        steps.ids[:] = [*ids]
        for table, rows in zip(self._tables, (steps.x, steps.per_layer_inputs), strict=False):
            if isinstance(table, Tensor):
                rows.copy_(table[ids])
        for b, address in enumerate(rope_rows):
            steps.set_rope(b, address)
        y = torch.empty(len(ids), 1, self._outputs, dtype=torch.float32, device="cpu")
        steps.run(length, y.data_ptr(), mask)
        return y

    def _steps(
        self, batch: int, tokens: int, masked: bool, cache: Hashable, entries: Callable[[], CacheEntries], length: int
    ) -> DecodeSteps:
        """Return the steps of a kind of call, pointing to this cache's memory."""
        kind = batch, tokens, masked, self._threads()
        cached = self._calls.entries.get(kind)
        if cached is not None and cached[1] == cache:
            return cached[0]
        from halfbyte.kernels.cpu.transformer import whole_model
        from halfbyte.kernels.cpu.transformer.decoder import Entry

        layer_entries = tuple(entries())
        dtype = self._check_entries(layer_entries, batch, tokens, length)
        native_entries = [Entry(*entry) for entry in layer_entries]
        if cached is not None and cached[0].cache == dtype:
            steps = cached[0]
            steps.set_addresses(native_entries, length)
        else:
            steps = whole_model.DecodeSteps(self._model, native_entries, length, masked=masked, tokens=tokens)
        self._calls.entries[kind] = steps, cache
        return steps

    def _check_entries(self, entries: CacheEntries, batch: int, tokens: int, length: int) -> torch.dtype:
        """Return the dtype of the KV cache. Raise ArgumentError for entries that layers do not take."""
        x = torch.empty(batch, tokens, self._k, dtype=torch.float32, device="cpu")
        for layer, entry in zip(self._layers, entries, strict=True):
            angles = x.new_empty(1, tokens, layer.rotary)
            layer.check(x, (angles, angles), entry, None)
        for (_, _, cached), window in zip(entries, self._windows, strict=True):
            if cached > length or cached < (length if window is None else min(length, window - 1)):
                raise ArgumentError(f"of {length} tokens and a window of {window} a cache has those that are seen, got one of {cached}")
        dtype, *others = {keys.dtype for keys, _, _ in entries}
        if others:
            raise ArgumentError(f"a cache of one type is taken, got {[dtype, *others]}")
        return dtype


def _check_parts(
    layers: Sequence[DecoderLayer], table: Packed | Tensor, norm: Norm, head: Weight | None, per_layer_inputs: PerLayerInputs | None
) -> None:
    """Raise ArgumentError for parts of a model that do not fit together, or are not packed for CPUs."""
    k = layers[0].k
    shapes = [tuple(table.shape), tuple(norm.weight.shape), *([] if head is None else [tuple(head.packed.shape)])]
    if any(layer.k != k for layer in layers) or any(shape[-1:] != (k,) for shape in shapes) or len(shapes[0]) != 2:
        raise ArgumentError(
            f"layers of one width K take a table [N, K], a norm [K] and a head [N, K], got {[layer.k for layer in layers]} and {shapes}"
        )
    weights = [table, *([] if head is None else [head.packed])]
    if per_layer_inputs is not None:
        per_layer_inputs.check(layers)
        weights += [per_layer_inputs.table, per_layer_inputs.projection.packed]
    if (reason := why_not_packed([weight for weight in weights if isinstance(weight, Packed)])) is not None:
        raise ArgumentError(f"this model is not computed in one call: {reason}")


def _packed_rows(table: Packed | Tensor) -> tuple[cpu_tiles.Geometry, int] | None:
    """Return the shape of a packed table and the address of its bytes; None for floats, whose rows are copied at each call."""
    if isinstance(table, Tensor):
        return None
    return cpu_tiles.geometry(table.format, table.shape, sparse=table.layout == cpu_tiles.SPARSE), table.data.data_ptr()

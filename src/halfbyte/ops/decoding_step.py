"""One new token of each sequence through a whole language model in one call on a CPU."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.ops.decoder import DecoderLayer, Norm, norm_of
from halfbyte.ops.layers import Addresses, Weight, why_not_packed

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.decoding_step import Steps

_MOST_KINDS = 8  # of calls, for which a thread keeps the arguments


class DecodingStep:
    """logits = f(head(norm(layers(factor * table[ids]))))

    layers   one after the other
    table    [N, K], packed for CPUs, or floats in any dtype
    norm     the one behind the layers
    head     [N, K]; None: the result is the normed rows
    windows  of each layer, how many tokens it sees, itself the last; None: all
    turns    of each layer, the number of its rotary positions; None: all have the same
    logits   f and c: "over", y / c, "times", y * c, or "cap", c * tanh(y / c); None: none, as where there is no head

    Everything between the products is float32. Raises ArgumentError for parts that do not fit together.
    """

    def __init__(
        self,
        layers: Sequence[DecoderLayer],
        table: Packed | Tensor,
        norm: Norm,
        head: Weight | None,
        windows: Sequence[int | None] | None = None,
        turns: Sequence[int] | None = None,
        *,
        factor: float = 1.0,
        logits: tuple[str, float] | None = None,
    ) -> None:
        from halfbyte.kernels.cpu import decoding_step, runtime
        from halfbyte.kernels.cpu.plan_cache import PlanCache

        k = layers[0].k
        shapes = [tuple(table.shape), tuple(norm.weight.shape), *([] if head is None else [tuple(head.packed.shape)])]
        if any(layer.k != k for layer in layers) or any(shape[-1:] != (k,) for shape in shapes) or len(shapes[0]) != 2:
            raise ArgumentError(
                f"layers of one width K take a table [N, K], a norm [K] and a head [N, K], got {[layer.k for layer in layers]} and {shapes}"
            )
        packed = [*([table] if isinstance(table, Packed) else []), *([] if head is None else [head.packed])]
        if (reason := why_not_packed(packed)) is not None:
            raise ArgumentError(f"this model is not computed in one call: {reason}")
        self._layers, self._table, self._rows, self._k = layers, table, table.shape[0], k
        self._width = k if head is None else head.packed.shape[0]
        self._tensors = tensors = Addresses()
        rows = None
        if isinstance(table, Packed):
            geo = cpu_tiles.geometry(table.format, table.shape, sparse=table.layout == cpu_tiles.SPARSE)
            rows = geo, table.data.data_ptr()
        last = None if head is None else tensors.product(head)
        self._windows = tuple(windows or (None,) * len(layers))
        inner = tuple(layer.inner for layer in layers)
        turns = tuple(turns or (0,) * len(layers))
        self._model = decoding_step.Model(inner, rows, factor, norm_of(tensors, norm), last, logits, self._windows, turns)
        self._threads = runtime.threads
        self._kept: PlanCache[tuple[Steps, Hashable]] = PlanCache(_MOST_KINDS)
        self._copied = [one for one in (*(layer.tensors for layer in layers), tensors) if one.copied]

    def __call__(
        self,
        ids: Sequence[int],
        rotary: Sequence[int],
        cache: Hashable,
        entries: Callable[[], Sequence[tuple[Tensor, Tensor, int]]],
        length: int,
        mask: Tensor | None = None,
    ) -> Tensor:
        """Tokens ids [B], appended to a cache that has `length` tokens -> float32 [B, 1, N], or [B, 1, K].

        rotary   the address of each token's cosines and sines, [turns, 2, R] float32
        cache    stands for the memory of the cache's keys and values: other memory, something else, for ever
        entries  gives for each layer keys, values and length as a call of DecoderLayer takes them, of one batch and type; of `length`
                 tokens a window may have lost the first. It is called if the thread's last call had another cache
        mask     bool [B, length + 1], contiguous: which tokens of the cache and new ones may be seen

        Raises ArgumentError for ids that the table does not have, and for entries that layers do not take.
        """
        if min(ids) < 0 or max(ids) >= self._rows:
            raise ArgumentError(f"embedding ids lie in 0 … {self._rows - 1}, got {min(ids)} … {max(ids)}")
        for tensors in self._copied:
            tensors.refresh()
        steps = self._steps(len(ids), mask is not None, cache, entries, length)
        if isinstance(self._table, Tensor):
            steps.x.copy_(self._table[ids])
        else:
            steps.ids[:] = [*ids]
        for b, at in enumerate(rotary):
            steps.turn(b, at)
        y = torch.empty(len(ids), 1, self._width, dtype=torch.float32, device="cpu")
        steps.run(length, y.data_ptr(), mask)
        return y

    def _steps(
        self, batch: int, masked: bool, cache: Hashable, entries: Callable[[], Sequence[tuple[Tensor, Tensor, int]]], length: int
    ) -> Steps:
        kind = batch, masked, self._threads()
        kept = self._kept.entries.get(kind)
        if kept is not None and kept[1] == cache:
            return kept[0]
        from halfbyte.kernels.cpu import decoding_step
        from halfbyte.kernels.cpu.decoder import Entry

        found, sizes = tuple(entries()), ((batch, 1, self._k), (1, 1, max(layer.rotary for layer in self._layers)))
        x, turn = (torch.empty(size, dtype=torch.float32, device="cpu") for size in sizes)
        for layer, entry in zip(self._layers, found, strict=True):
            layer.check(x, (turn, turn), *entry, None)
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
            steps = decoding_step.Steps(self._model, places, length, masked=masked)
        self._kept.entries[kind] = steps, cache
        return steps

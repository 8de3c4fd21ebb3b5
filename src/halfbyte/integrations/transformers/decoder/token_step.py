"""One new token of each sequence through a compiled decoder stack, in one native call on a CPU (`ops.transformer.whole_model_decode`).

This is for growing caches. What Python does between two tokens counts, as it runs with caches that are full of weights: everything that
stays from token to token is made once.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from halfbyte.bounded import Bounded
from halfbyte.decoder.family import Family
from halfbyte.decoder.spec import Logits
from halfbyte.integrations.transformers.cache import growing
from halfbyte.integrations.transformers.decoder.compiled_layers import CompiledLayer
from halfbyte.integrations.transformers.decoder.live_ends import embedding_of, longrope_switch, per_layer_inputs_of
from halfbyte.integrations.transformers.decoder.live_layer import norm_of
from halfbyte.nn.modules.quantized import QuantEmbedding
from halfbyte.ops.transformer.decoder import MOST_SEQUENCES
from halfbyte.ops.transformer.layers import Weight
from halfbyte.ops.transformer.whole_model_decode import DecodingStep

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_BLOCK, _MOST_BLOCKS = 64, 256  # positions whose cosines and sines are computed at once, and how many blocks are kept


class TokenStep:
    """The decode step of a stack, with or without the model's head.

    Attributes:
        most_rows: Sequences for which it is the fastest way.
        kept: Number of layers that have keys and values of their own; layers that reuse these come behind.
        query_scale_from: Position from which on queries have a factor, which is not computed; None: they have none.
    """

    def __init__(
        self,
        stack: Part,
        family: Family,
        layers: Sequence[CompiledLayer],
        *,
        ropes: Sequence[str],
        query_scale_from: int | None,
        head: Weight | None = None,
        logits: Logits = None,
    ) -> None:
        """Compile the step of a stack for which `why_no_step` has no reason.

        Args:
            stack: The module of transformers.
            family: Its family.
            layers: Its layers.
            ropes: Type of layers that have each rotary embedding; "" where all have the same.
            query_scale_from: See the attribute.
            head: The output embedding; None: the step ends with the last norm.
            logits: Function of the logits.
        """
        embedding, self._rotary = stack.embed_tokens, stack.rotary_emb
        self.dtype: torch.dtype = embedding.dtype if isinstance(embedding, QuantEmbedding) else embedding.weight.dtype
        whole, specs = [layer.whole for layer in layers], [layer.spec for layer in layers]
        self.most_rows = min((layer.most_rows for layer in whole if layer.most_rows is not None), default=MOST_SEQUENCES)
        self.query_scale_from, self._windows = query_scale_from, [spec.sliding_window for spec in specs]
        self._sources = [index if spec.kv_source is None else spec.kv_source for index, spec in enumerate(specs)]
        self.count, self.kept = len(layers), sum(spec.kv_source is None for spec in specs)
        self._kinds, self._mrope = ropes, family.mrope
        self._switch = longrope_switch(stack)
        table, factor = embedding_of(stack, family, self.dtype)
        inputs = None if whole[0].per_layer_width is None else per_layer_inputs_of(stack, family, self.dtype)
        norm = norm_of(getattr(stack, family.final_norm), family)
        self._step = DecodingStep(
            whole, table, norm, head, self._windows, [spec.rope for spec in specs], factor=factor, logits=logits, inputs=inputs
        )
        self._rotary_dim = max(layer.rotary for layer in whole)
        self._blocks: Bounded[tuple[int, bool], tuple[Tensor, int]] = Bounded(_MOST_BLOCKS)
        self._last = _LastCache()

    def __call__(self, ids: Tensor, mask: Tensor | None, positions: Tensor | None, layers: Sequence[Any]) -> Tensor | None:
        """Compute the logits, or normed hidden states, [B, 1, N] of ids [B, 1], which enter the cache.

        Args:
            ids: The tokens.
            mask: Which tokens are no padding [B, T + 1], or None.
            positions: Of the tokens [B or 1, 1]; None: the cache's length.
            layers: The layers of the cache.

        Returns:
            None if the call is none that the step supports: another kind of cache, more sequences, later positions.
        """
        batch = ids.shape[0]
        if not 0 < batch <= min(self.most_rows, MOST_SEQUENCES) or len(layers) not in (self.count, self.kept):
            return None
        layers = layers[: self.kept]
        last = self._last
        if not last.is_of(layers, batch) and not last.take(self, layers, batch):
            return None
        length: int = layers[0].length
        seen, where = None, [length] * batch
        if mask is not None:
            if type(mask) is not Tensor or mask.shape != (batch, length + 1):
                return None
            seen = None if mask.all() else mask.to(torch.bool).contiguous()
        if positions is not None:
            if type(positions) is not Tensor or positions.is_floating_point() or positions.shape not in ((batch, 1), (1, 1)):
                return None
            where = positions.flatten().tolist() * (batch // len(positions))
            if min(where) < 0:
                return None
        furthest = max(where)
        if self.query_scale_from is not None and furthest >= self.query_scale_from:
            return None
        rows = [self._rotary_row(position, furthest) for position in where]  # with their tables: others may put new ones in their place
        entries = partial(_entries, layers, self._sources)
        y = self._step(ids.flatten().tolist(), [address for _, address in rows], last.stamps, entries, length, seen)
        for layer in layers:
            layer.length = length + 1
        return y if y.dtype == self.dtype else y.to(self.dtype)

    def fits(self, layers: Sequence[object]) -> bool:
        """Whether layers of a cache have the sliding windows of the model's."""
        return all(growing.window_of(layer) in (None, window) for layer, window in zip(layers, self._windows[: self.kept], strict=True))

    def _rotary_row(self, position: int, furthest: int) -> tuple[Tensor, int]:
        """A table, and the address in it of the cosines and sines [kinds, 2, R] of a position, float32, where all sequences reach to
        `furthest`."""
        block, row = divmod(position, _BLOCK)
        far = self._switch is not None and furthest >= self._switch
        found = self._blocks.get((block, far))
        if found is None:
            table = self._rotary_block(block, far)
            found = self._blocks[block, far] = table, table.data_ptr()
        return found[0], found[1] + row * found[0].stride(0) * 4

    def _rotary_block(self, block: int, far: bool) -> Tensor:
        with torch.inference_mode(False), torch.no_grad():
            positions = torch.arange(block * _BLOCK, (block + 1) * _BLOCK, device="cpu").unsqueeze(0)
            if far:  # the furthest decides for all
                positions = torch.cat((positions, torch.tensor([[self._switch]], device="cpu")), 1)
            elif self._switch is not None:
                positions = positions.clamp(max=self._switch - 1)
            if self._mrope:
                positions = positions[None].expand(3, -1, -1)
            x = torch.empty(0, dtype=self.dtype, device="cpu")
            parts = [part for kind in self._kinds for part in self._rotary(x, positions, *([kind] if kind else []))]
            # Cosines of half of what rotates stand for both halves; those of heads that are smaller are followed by anything.
            size = self._rotary_dim
            wide = [torch.cat([part] * max(1, -(-size // part.shape[-1])), -1)[..., :size] for part in parts]
            return torch.cat(wide, -1)[0].float().contiguous()


class _LastCache(threading.local):
    """The cache that a thread wrote to last: the stamps of its layers, and for how many sequences and tokens they have room."""

    stamps: tuple[int, ...] = ()
    batch = room = 0

    def is_of(self, layers: Sequence[Any], batch: int) -> bool:
        """Whether it is of these layers, equally long, with room for a token."""
        try:
            lengths = [layer.length for layer in layers]
            same = self.stamps == tuple([layer.stamp for layer in layers])
        except AttributeError:  # not growing, or not yet
            return False
        return same and self.batch == batch and lengths[0] < self.room and lengths.count(lengths[0]) == len(lengths)

    def take(self, step: TokenStep, layers: Sequence[Any], batch: int) -> bool:
        """Make room for a token in these layers; False where they are none for this."""
        if any(type(layer) not in growing.LAYERS or not layer.is_initialized for layer in layers):
            return False
        views = [layer.buffers if isinstance(layer, growing.Growing) else (layer.keys, layer.values) for layer in layers]
        dtypes = {step.dtype if type(layer) not in growing.IN_8_BITS else torch.int8 for layer in layers}
        if len(dtypes) > 1 or len({layer.get_seq_length() for layer in layers}) > 1:
            return False
        if not all(keys.shape == values.shape and len(keys) == batch and keys.dtype in dtypes and keys.is_cpu for keys, values in views):
            return False
        if not step.fits(layers) or not all(map(growing.is_whole, layers)):
            return False
        grown = [growing.grow(layer, 1) for layer in layers]
        self.stamps, self.batch = tuple(layer.stamp for layer in grown), batch
        self.room = min(layer.first + layer.buffers[0].shape[2] for layer in grown)
        return True


def _entries(layers: Sequence[growing.Growing], sources: Sequence[int]) -> list[tuple[Tensor, Tensor, int]]:
    """Keys, values and lengths for all layers, by the indices of those whose keys and values they read."""
    entries = [(*layer.buffers, layer.length - layer.first) for layer in layers]
    return [entries[source] for source in sources]

"""Computes the first layers of a model on the CPU, with their KV cache there, before the others run on a GPU.

Called by `lower_gpu.py` with hidden states, which cross through pinned memory as those of `host_experts.py` do.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.decoder.cache import Cache, LayerCache
from halfbyte.decoder.lower_cpu import check_layers, lowered_layers, window_mask
from halfbyte.decoder.offload.crossing import Host
from halfbyte.decoder.rope import Rope
from halfbyte.decoder.spec import LayerSpec

_CHUNK = 512  # tokens of a prompt at a time: masks of sliding windows and intermediate results stay small


class HostStep(NamedTuple):
    """The tokens that are computed next, as the host knows them.

    Attributes:
        cache: Of the tokens before, without the new ones.
        positions: Of the token of each sequence; or of all tokens of one sequence.
        total: Length of the whole sequence of a prompt, which decides between short and long frequencies; None: one token of each.
        starts: Index of the first token of each sequence.
    """

    cache: Cache
    positions: Sequence[int]
    total: int | None = None
    starts: Sequence[int] = ()


class HostLayers:
    """The first layers of a model.

    Attributes:
        step: What is computed next; the caller sets it before launches, also of those that were captured. It is None afterwards, as it
            holds a cache.
    """

    step: HostStep | None = None

    def __init__(self, specs: Sequence[LayerSpec], ropes: Sequence[Rope], device: torch.device) -> None:
        """Prepare layers, which are packed for a CPU.

        Raises:
            UnsupportedError: A part of a layer has no kernel on a CPU.
        """
        check_layers(specs)
        self._specs, self._ropes, self._device = specs, ropes, device
        self._layers = lowered_layers(specs)
        self._buffers: dict[tuple[int, ...], tuple[Tensor, Tensor]] = {}
        self._event = torch.cuda.Event() if device.type == "cuda" else None

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._specs)

    def __call__(self, x: Tensor, host: Host) -> Tensor:
        """Compute hidden states [B, t, K] on the device after these layers."""
        given, found = self._buffers_for(x)
        given.copy_(x, non_blocking=True)

        def compute() -> None:
            if self._event is not None:
                self._event.record(torch.cuda.current_stream(self._device))
                self._event.synchronize()
            found.copy_(self._computed(given.float()))

        host.between(compute)
        return torch.empty_like(x).copy_(found, non_blocking=True)

    def _buffers_for(self, x: Tensor) -> tuple[Tensor, Tensor]:
        key = (*x.shape[:2],)
        if key not in self._buffers:
            if x.shape[1] > 1:  # prompts of other lengths
                self._buffers = {other: both for other, both in self._buffers.items() if other[1] == 1}
            pinned = self._device.type == "cuda"
            both = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned) for _ in range(2)]
            self._buffers[key] = both[0], both[1]
        return self._buffers[key]

    def _computed(self, x: Tensor) -> Tensor:
        """The hidden states, float32, after all layers; new keys and values enter the cache."""
        step, self.step = self.step, None
        assert step is not None
        if step.total is None:
            tables = [[rope.tables(position, position + 1, position + 1) for position in step.positions] for rope in self._ropes]
            rotary = [(torch.cat([cos for cos, _ in rows]), torch.cat([sin for _, sin in rows])) for rows in tables]
            return self._through(x, rotary, step, 0)
        parts = []
        for start in range(0, x.shape[1], _CHUNK):
            some = x[:, start : start + _CHUNK]
            bounds = step.positions[start], step.positions[start] + some.shape[1]
            parts.append(self._through(some, [rope.tables(*bounds, step.total) for rope in self._ropes], step, start))
        return torch.cat(parts, 1)

    def _through(self, x: Tensor, rotary: Sequence[tuple[Tensor, Tensor]], step: HostStep, done: int) -> Tensor:
        """All layers for tokens [B, t] behind the `done` ones that the caches have not counted."""
        batch, tokens = x.shape[:2]
        for index, (spec, layer) in enumerate(zip(self._specs, self._layers, strict=True)):
            entry, before = step.cache.by_layer[index], step.cache.by_layer[index].length + done
            cached = (entry.keys[:batch], entry.values[:batch], before)
            x = layer(x, rotary[spec.rope], *cached, _mask(spec, entry, before, tokens, step))
        return x


def _mask(spec: LayerSpec, entry: LayerCache, before: int, tokens: int, step: HostStep) -> Tensor | None:
    """bool [B or 1, 1, t or 1, T]: which of a buffer's tokens each new one may see; None: all before it."""
    mask = window_mask(spec.sliding_window, tokens, before)
    if not any(step.starts):
        return mask
    columns = torch.arange(before + tokens, device="cpu")
    begun = (columns >= (torch.tensor(step.starts, device="cpu") - entry.first)[:, None])[:, None, None]
    return (begun if mask is None else mask & begun).contiguous()

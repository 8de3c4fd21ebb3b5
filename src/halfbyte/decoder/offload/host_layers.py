"""`HostLayers`: the first layers of a model, computed on the CPU where the GPU's memory has no room for them, with their KV cache there.

    GPU   embedding ─ copy of x to pinned memory                                           copy of y to the GPU ─ other layers ─ logits
    CPU                                          waits for x ─ first layers, float32 ─ y

`lower_gpu.py` makes it of the layers that a plan leaves on the CPU. For each call it sets `step`, which tells what the hidden states do
not: positions and the cache. The call itself may be captured in CUDA graphs: each replay then runs the CPU's part between two of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import check_layers, lowered_layers, window_mask
from halfbyte.decoder.offload.crossing import Host
from halfbyte.decoder.rope import Rope
from halfbyte.decoder.spec import LayerSpec

_CHUNK = 512  # tokens of a prompt that go through all layers together: it bounds the sizes of masks and intermediate results


class HostStep(NamedTuple):
    """The tokens of one call: one new token of each sequence (a decode step), or several tokens of one prompt (a prefill).

    Attributes:
        cache: The KV cache, which has the tokens before these. The call writes keys and values behind them; the caller counts them.
        positions: Decode step: the position of each sequence's token. Prefill: the consecutive positions of the prompt's tokens.
        prompt_length: Prefill: the length of the whole prompt, which decides between short and long rope frequencies. None: decode step.
        starts: Decode step: the index of each sequence's first token, before which nothing is attended to; (): 0 for all.
    """

    cache: Cache
    positions: Sequence[int]
    prompt_length: int | None = None
    starts: Sequence[int] = ()


class _PinnedBuffers(NamedTuple):
    """Memory of the host for hidden states [B, t, K] before and after the layers, pinned next to a GPU."""

    x: Tensor
    y: Tensor


class HostLayers:
    """The first layers of a model.

    Attributes:
        step: The tokens of the next call, which the caller sets before each call and each replay of a captured one. A call resets it to
            None, so that it does not keep the cache alive.
    """

    step: HostStep | None = None

    def __init__(self, specs: Sequence[LayerSpec], ropes: Sequence[Rope], device: torch.device) -> None:
        """Prepare the layers.

        Args:
            specs: The layers, with weights packed for a CPU.
            ropes: The rotary embeddings of the model; a layer takes number `spec.rope`.
            device: Device of the hidden states that calls take and return.

        Raises:
            UnsupportedError: A part of a layer has no kernel on a CPU.
        """
        check_layers(specs)
        self._specs, self._ropes, self._device = specs, ropes, device
        self._layers = lowered_layers(specs)
        self._buffers: dict[tuple[int, int], _PinnedBuffers] = {}  # by (B, t)
        self._x_copied = torch.cuda.Event() if device.type == "cuda" else None

    def __len__(self) -> int:
        """Return the number of layers."""
        return len(self._specs)

    def __call__(self, x: Tensor, host: Host) -> Tensor:
        """Compute the hidden states after these layers, from x [B, t, K] on the device, and of its dtype.

        Args:
            x: The embedded tokens of `step`.
            host: Runs the CPU's part between the launches before it and those after it.
        """
        buffers = self._buffers_for(x)
        buffers.x.copy_(x, non_blocking=True)

        def compute() -> None:
            if self._x_copied is not None:
                self._x_copied.record(torch.cuda.current_stream(self._device))
                self._x_copied.synchronize()
            step, self.step = self.step, None
            assert step is not None, "`step` is set before each call"
            buffers.y.copy_(self._compute(buffers.x.float(), step))

        host.between(compute)
        return torch.empty_like(x).copy_(buffers.y, non_blocking=True)

    def _buffers_for(self, x: Tensor) -> _PinnedBuffers:
        """Return the buffers for x [B, t, K]: always the same ones for a decode step, as CUDA graphs hold their addresses."""
        batch, tokens = x.shape[:2]
        if (batch, tokens) not in self._buffers:
            if tokens > 1:  # keep the buffers of one prompt length only
                self._buffers = {shape: buffers for shape, buffers in self._buffers.items() if shape[1] == 1}
            pinned = self._device.type == "cuda"
            memory = [torch.empty(x.shape, dtype=x.dtype, device="cpu", pin_memory=pinned) for _ in _PinnedBuffers._fields]
            self._buffers[batch, tokens] = _PinnedBuffers(*memory)
        return self._buffers[batch, tokens]

    def _compute(self, x: Tensor, step: HostStep) -> Tensor:
        """Compute the hidden states after all layers, from x float32 [B, t, K]; write keys and values to the cache."""
        if step.prompt_length is None:
            return self._run_layers(x, [_decode_tables(rope, step.positions) for rope in self._ropes], step, 0)
        chunks = []
        for start in range(0, x.shape[1], _CHUNK):
            chunk = x[:, start : start + _CHUNK]
            first, stop = step.positions[start], step.positions[start] + chunk.shape[1]
            tables = [rope.tables(first, stop, step.prompt_length) for rope in self._ropes]
            chunks.append(self._run_layers(chunk, tables, step, start))
        return torch.cat(chunks, 1)

    def _run_layers(self, x: Tensor, tables: Sequence[tuple[Tensor, Tensor]], step: HostStep, offset: int) -> Tensor:
        """Compute all layers for a chunk of a call's tokens.

        Args:
            x: [B, t, K]
            tables: Cosines and sines of the tokens' positions for each rope, [B or 1, t, rotary_dim / 2].
            step: The call.
            offset: Tokens of the call before the chunk, which the lengths of the caches do not count yet.
        """
        batch, tokens = x.shape[:2]
        for spec, layer, entry in zip(self._specs, self._layers, step.cache.by_layer[: len(self._specs)], strict=True):
            before = entry.length + offset
            mask = _mask(spec.sliding_window, entry.first, before, tokens, step.starts)
            x = layer(x, tables[spec.rope], entry.keys[:batch], entry.values[:batch], before, mask)
        return x


def _decode_tables(rope: Rope, positions: Sequence[int]) -> tuple[Tensor, Tensor]:
    """Return cosines and sines [B, 1, rotary_dim / 2] of one token of each sequence, for sequences that end with it."""
    cos, sin = zip(*(rope.tables(position, position + 1, position + 1) for position in positions), strict=True)
    return torch.cat(cos), torch.cat(sin)


def _mask(sliding_window: int | None, first: int, before: int, tokens: int, starts: Sequence[int]) -> Tensor | None:
    """Return which tokens of a layer's cache each new one attends to, bool [B or 1, 1, t or 1, before + t]; None: all up to itself.

    Args:
        sliding_window: That of the layer; None: it has none.
        first: Index in the sequences of the cache's first token.
        before: Tokens in the cache before the new ones.
        tokens: New tokens of each sequence.
        starts: Index of the first token of each sequence; (): 0.
    """
    mask = window_mask(sliding_window, tokens, before)
    if not any(starts):
        return mask
    columns = torch.arange(before + tokens, device="cpu")
    is_in_sequence = (columns >= (torch.tensor(starts, device="cpu") - first)[:, None])[:, None, None]
    return (is_in_sequence if mask is None else mask & is_in_sequence).contiguous()

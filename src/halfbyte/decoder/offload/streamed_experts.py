"""Computes routed experts that lie in main memory on the GPU: for prompts, whose rows use most of them.

    link   experts of layer 1 | experts of layer 2  | …    | experts of layer 1      to the staging buffer, in the CPU's layout
    GPU    repack 0 | layer 0 | repack 1 | layer 1  | …    | last layer | repack 0   to the slot, in the GPU's

The experts cross as the CPU's kernels read them, so that there is one copy of them in main memory, which is pinned. A layer crosses by two
copies of many megabytes, on a stream of its own, while the layer before it computes; another stream repacks it. After the last layers the
first ones cross again, so that they are there for the next prompt. Without a GPU the same copies are made on a CPU, as tests do.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterable, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.decoder.offload.pinned import pin
from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.dispatch.packed import packed_format
from halfbyte.errors import UnsupportedError
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import Packed, round_up
from halfbyte.layouts.experts import PREFIX
from halfbyte.memory import size_text
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.routing import add_experts
from halfbyte.ops.transformer.weights import Weight

_ALIGNMENT = 256  # bytes, of stacks in `gpu_tiles`


class _Buffer:
    """GPU memory for one of the two stacks of experts of a layer.

    Attributes:
        data: uint8
        written: Event: the last copy to it, or the last repacking, has ended.
        read: Event: what reads it has ended.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.written, self.read = (torch.cuda.Event() if device.type == "cuda" else None for _ in range(2))
        if self.read is not None:  # kernels that were launched before may still use the memory
            self.read.record(torch.cuda.current_stream(device))


class StreamedExperts:
    """The routed experts of some layers, which are computed in the order of these.

    Attributes:
        layer_bytes: Bytes of a layer that cross the link, in the mean.

    Example:
        streamed.begin()
        for layer in layers:
            x = streamed.add(layer, x)
    """

    def __init__(self, mixtures: Mapping[int, Experts], device: torch.device, memory: int | None = None) -> None:
        """Prepare the experts of layers.

        Args:
            mixtures: By the index of their layer, routed experts packed for a CPU, the rest on the device.
            device: The GPU.
            memory: Its bytes that may be taken; None: no bound.

        Raises:
            UnsupportedError: There is too little memory, or main memory cannot be pinned.
        """
        self._order, self._device = [*mixtures], device
        self._sources = {index: (mixture.gate_up.packed, mixture.down_proj.packed) for index, mixture in mixtures.items()}
        self._targets = {index: tuple(_for_device(stack, device) for stack in stacks) for index, stacks in self._sources.items()}
        weights = [weight for mixture in mixtures.values() for weight in (mixture.gate_up, mixture.down_proj)]
        staged, ready = (_largest(stacks.values()) for stacks in (self._sources, self._targets))
        taken = sum(staged) + sum(ready) + sum(0 if weight.bias is None else weight.bias.nbytes for weight in weights)
        if memory is not None and taken > memory:
            raise UnsupportedError(f"those that cross take {size_text(taken)} of GPU memory, and {size_text(memory)} are left")
        self._sizes, self._staging, self._slot = (staged, ready), list[_Buffer](), list[_Buffer]()
        self._staged: int | None = None  # the layer whose experts are in the staging buffers or on their way; None: none
        self._ready: int | None = None  # … in the slot
        self._streams = [torch.cuda.Stream(device) if device.type == "cuda" else None for _ in range(2)]  # of copies and repacking
        self._pinned = pin([stack.data for stacks in self._sources.values() for stack in stacks], device)
        self._mixtures = {
            index: mixture._replace(gate_up=_bias_on(mixture.gate_up, device), down_proj=_bias_on(mixture.down_proj, device))
            for index, mixture in mixtures.items()
        }
        self.layer_bytes = sum(stack.data.nbytes for both in self._sources.values() for stack in both) / len(mixtures)
        for stream in self._streams:
            if stream is not None:  # the last copies may still be on their way
                weakref.finalize(self, stream.synchronize).atexit = False

    def begin(self) -> None:
        """Start to copy the experts of the first layers, unless they crossed after the last layers of the prompt before."""
        if not self._slot:
            self._staging, self._slot = ([_Buffer(size, self._device) for size in sizes] for sizes in self._sizes)
        first, *following = self._order[:2]
        if self._ready != first or (following and self._staged != following[0]):
            self._copy(first)
            self._repack()
            for layer in following:
                self._copy(layer)

    def add(self, layer: int, x: Tensor) -> Tensor:
        """Compute x + experts(norm(x)) of a layer, and start to copy the experts of a later one.

        Args:
            layer: In the order of layers.
            x: [..., K] on the device.
        """
        assert self._ready == layer, "layers are computed in their order"
        _wait(self._current(), *(buffer.written for buffer in self._slot))
        y = add_experts(x, self._in_slot(layer))
        _record(self._current(), *(buffer.read for buffer in self._slot))
        if len(self._order) > 1:
            following = self._staged
            self._repack()
            assert following is not None
            self._copy(self._after(following))
        return y

    def _after(self, layer: int) -> int:
        return self._order[(self._order.index(layer) + 1) % len(self._order)]

    def _current(self) -> torch.cuda.Stream | None:
        return torch.cuda.current_stream(self._device) if self._device.type == "cuda" else None

    def _copy(self, layer: int) -> None:
        """Copy experts of a layer to the staging buffers, after those that were there have been repacked."""
        self._staged, (stream, _) = None, self._streams
        with _on(stream):
            for stack, buffer in zip(self._sources[layer], self._staging, strict=True):
                _wait(stream, buffer.read)
                buffer.data[: stack.data.nbytes].copy_(stack.data, non_blocking=True)
                _record(stream, buffer.written)
        self._staged = layer

    def _repack(self) -> None:
        """Move the experts that are in the staging buffers to the slot, after those that were there have been used."""
        layer, (_, stream) = self._staged, self._streams
        assert layer is not None
        self._ready = None
        with _on(stream):
            for source, target, staging, slot in zip(self._sources[layer], self._targets[layer], self._staging, self._slot, strict=True):
                _wait(stream, staging.written, slot.read)
                _to_layout_of(target, source, staging.data, slot.data)
                _record(stream, staging.read, slot.written)
        self._ready = layer

    def _in_slot(self, layer: int) -> Experts:
        """The experts of a layer whose stacks are in the slot."""
        mixture = self._mixtures[layer]
        gate_up, down = (
            replace(target, data=buffer.data[: target.data.nbytes]) for target, buffer in zip(self._targets[layer], self._slot, strict=True)
        )
        return mixture._replace(gate_up=mixture.gate_up._replace(packed=gate_up), down_proj=mixture.down_proj._replace(packed=down))


def _on(stream: torch.cuda.Stream | None) -> AbstractContextManager[object]:
    return nullcontext() if stream is None else torch.cuda.stream(stream)


def _wait(stream: torch.cuda.Stream | None, *events: torch.cuda.Event | None) -> None:
    for event in events:
        if stream is not None and event is not None:
            stream.wait_event(event)


def _record(stream: torch.cuda.Stream | None, *events: torch.cuda.Event | None) -> None:
    for event in events:
        if stream is not None and event is not None:
            event.record(stream)


def _geometries(stack: Packed) -> tuple[cpu_tiles.Geometry, gpu_tiles.Geometry]:
    """The geometries of an expert of a stack that is packed for a CPU: there, and on a GPU."""
    _, *shape = stack.shape
    fmt = packed_format(stack.codes_format, on_cpu=False)
    return cpu_tiles.geometry(stack.format, (*shape,)), gpu_tiles.geometry(fmt, (*shape,))


def _for_device(stack: Packed, device: torch.device) -> Packed:
    """A stack as it will be in the slot, without memory (device "meta"); the CPU's own stands for a GPU's where there is none.

    Raises:
        UnsupportedError: The GPU does not repack it.
    """
    if device.type != "cuda":
        return replace(stack, data=stack.data.to("meta"))
    from halfbyte.kernels.gpu.quantize import repack

    source, target = _geometries(stack)
    reason = why_no_triton() or (None if stack.layout == PREFIX + cpu_tiles.NAME else "they are not packed for CPUs")
    if reason := reason or repack.why_not(source, target):
        raise UnsupportedError(reason)
    data = torch.empty(stack.shape[0] * target.nbytes, dtype=torch.uint8, device="meta")
    source_format = None if target.format == stack.codes_format else stack.codes_format
    return Packed(target.format, stack.shape, PREFIX + gpu_tiles.NAME, data, stack.sparse, source_format)


def _to_layout_of(target: Packed, source: Packed, data: Tensor, out: Tensor) -> None:
    """Write a stack that is in `data`, in the layout of `source`, to `out` in the layout of `target`."""
    if target.layout == source.layout:
        out[: source.data.nbytes].copy_(data[: source.data.nbytes])
        return
    from halfbyte.kernels.gpu.quantize import repack

    repack.repack(data[: source.data.nbytes], *_geometries(source), out[: target.data.nbytes], source.shape[0])


def _largest(stacks: Iterable[tuple[Packed, ...]]) -> list[int]:
    """Bytes of the larger stacks of all layers, of the two that each has."""
    return [max(round_up(stack.data.nbytes, _ALIGNMENT) for stack in both) for both in zip(*stacks, strict=True)]


def _bias_on(weight: Weight, device: torch.device) -> Weight:
    return weight if weight.bias is None else weight._replace(bias=weight.bias.to(device))

"""Computes routed experts that lie in main memory on the GPU: for prompts, whose rows use most of them.

    link  experts of layer 0 → slot 0 | layer 1 → slot 1 |   layer 2 → slot 0   | … | layer 0 → slot 0 | layer 1 → slot 1
    GPU                      attention | experts, slot 0 | attention, experts, slot 1 | …                | last layer     | decoding

A second copy of the experts, in the order of a GPU's kernels, lies in pinned memory, so that a layer crosses the link by two copies of
many megabytes, on a stream of its own, while the layer before it computes. After the last layers the first ones cross again, so that
they are there for the next prompt. Without a GPU the same copies are made on a CPU, as tests do.
"""

from __future__ import annotations

import weakref
from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import replace

import torch
from torch import Tensor

from halfbyte.decoder.offload.placement import bytes_on_gpu
from halfbyte.errors import UnsupportedError
from halfbyte.layouts.base import Packed, round_up
from halfbyte.memory import available_memory, in_huge_pages, size_text
from halfbyte.ops.functions import pack, unpack
from halfbyte.ops.transformer.experts import Experts
from halfbyte.ops.transformer.routing import add_experts
from halfbyte.ops.transformer.weights import Weight

_SLOTS = 2  # layers whose experts are on the GPU at the same time
_ALIGNMENT = 256  # bytes, of stacks in `gpu_tiles`
_PIECE = 32 << 20  # bytes of experts that are packed at a time
_SHARE = 0.5  # of the main memory that is available, for the second copy


class _Slot:
    """GPU memory for the experts of a layer.

    Attributes:
        data: uint8
        layer: Whose experts are there or on their way; None: none's.
        copied: Event: they have arrived.
        consumed: Event: the kernels that read them have run.
    """

    def __init__(self, nbytes: int, device: torch.device) -> None:
        self.data = torch.empty(nbytes, dtype=torch.uint8, device=device)
        self.layer: int | None = None
        self.copied, self.consumed = (torch.cuda.Event() if device.type == "cuda" else None for _ in range(2))
        if self.consumed is not None:  # kernels that were launched before may still use the memory
            self.consumed.record(torch.cuda.current_stream(device))


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
        """Copy the experts of layers.

        Args:
            mixtures: By the index of their layer, routed experts packed for a CPU, the rest on the device.
            device: The GPU.
            memory: Its bytes that may be taken; None: no bound.

        Raises:
            UnsupportedError: There is too little memory.
        """
        self._order, self._device = [*mixtures], device
        weights = [weight for mixture in mixtures.values() for weight in (mixture.gate_up, mixture.down_proj)]
        biases = sum(0 if weight.bias is None else weight.bias.nbytes for weight in weights)
        taken = _SLOTS * max(map(_stack_bytes, mixtures.values())) + biases
        if memory is not None and taken > memory:
            raise UnsupportedError(f"those of {_SLOTS} layers take {size_text(taken)} of GPU memory, and {size_text(memory)} are left")
        needed, available = sum(bytes_on_gpu(weight.packed, torch.float32) for weight in weights), available_memory()
        if available is not None and needed > _SHARE * available:
            raise UnsupportedError(
                f"a copy of them for the GPU takes {size_text(needed)} of main memory, and half of the {size_text(available)} that are"
                " available may be used"
            )
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._mixtures, self._stacks = dict[int, Experts](), dict[int, tuple[Packed, Packed]]()
        for index, mixture in mixtures.items():
            self._stacks[index] = _for_device(mixture.gate_up.packed, device), _for_device(mixture.down_proj.packed, device)
            gate_up, down = (_bias_on(weight, device) for weight in (mixture.gate_up, mixture.down_proj))
            self._mixtures[index] = mixture._replace(gate_up=gate_up, down_proj=down)
        self._sizes = [max(round_up(both[i].data.nbytes, _ALIGNMENT) for both in self._stacks.values()) for i in range(2)]
        self.layer_bytes = sum(stack.data.nbytes for both in self._stacks.values() for stack in both) / len(mixtures)
        self._slots = list[_Slot]()
        if self._stream is not None:  # the last copies may still be on their way
            weakref.finalize(self, self._stream.synchronize).atexit = False

    def begin(self) -> None:
        """Start to copy the experts of the first layers, unless they crossed after the last layers of the prompt before."""
        if not self._slots:
            self._slots = [_Slot(sum(self._sizes), self._device) for _ in range(min(_SLOTS, len(self._order)))]
        first = self._order[: len(self._slots)]
        if {slot.layer for slot in self._slots} != {*first}:
            for slot, layer in zip(self._slots, first, strict=True):
                self._copy(layer, slot)

    def add(self, layer: int, x: Tensor) -> Tensor:
        """Compute x + experts(norm(x)) of a layer, and start to copy the experts of a later one.

        Args:
            layer: In the order of layers.
            x: [..., K] on the device.
        """
        slot = next(slot for slot in self._slots if slot.layer == layer)
        if slot.copied is not None:
            torch.cuda.current_stream(self._device).wait_event(slot.copied)
        y = add_experts(x, self._in_slot(layer, slot))
        if slot.consumed is not None:
            slot.consumed.record(torch.cuda.current_stream(self._device))
        if len(self._order) > _SLOTS:
            self._copy(self._order[(self._order.index(layer) + _SLOTS) % len(self._order)], slot)
        return y

    def _copy(self, layer: int, slot: _Slot) -> None:
        """Copy experts of a layer to a slot, after those that were there have been used."""
        slot.layer = None
        with nullcontext() if self._stream is None else torch.cuda.stream(self._stream):
            if self._stream is not None and slot.consumed is not None:
                self._stream.wait_event(slot.consumed)
            for stack, memory in zip(self._stacks[layer], slot.data.split(self._sizes), strict=True):
                memory[: stack.data.nbytes].copy_(stack.data, non_blocking=True)
            if self._stream is not None and slot.copied is not None:
                slot.copied.record(self._stream)
        slot.layer = layer

    def _in_slot(self, layer: int, slot: _Slot) -> Experts:
        """The experts of a layer whose stacks are in a slot."""
        mixture = self._mixtures[layer]
        gate_up, down = (
            replace(stack, data=memory[: stack.data.nbytes])
            for stack, memory in zip(self._stacks[layer], slot.data.split(self._sizes), strict=True)
        )
        return mixture._replace(gate_up=mixture.gate_up._replace(packed=gate_up), down_proj=mixture.down_proj._replace(packed=down))


def _stack_bytes(mixture: Experts) -> int:
    """Bytes of the experts of a layer in the order of a GPU's kernels."""
    stacks = mixture.gate_up.packed, mixture.down_proj.packed
    return sum(round_up(bytes_on_gpu(stack, torch.float32), _ALIGNMENT) for stack in stacks)


def _bias_on(weight: Weight, device: torch.device) -> Weight:
    return weight if weight.bias is None else weight._replace(bias=weight.bias.to(device))


def _for_device(stack: Packed, device: torch.device) -> Packed:
    """A stack, packed for a device by that device, in main memory. Some experts at a time, as the device has little memory for their
    codes."""
    count, *shape = stack.shape
    some, matrices, target = max(1, _PIECE * count // stack.data.nbytes), stack.data.view(count, -1), None
    for first in range(0, count, some):
        data = matrices[first : first + some].to(device).flatten()
        piece = pack(unpack(replace(stack, data=data, shape=(min(some, count - first), *shape))), device)
        crossing = piece.data.view(piece.shape[0], -1)
        if target is None:
            target, packed = _main_memory(count * crossing.shape[1], device).view(count, -1), replace(piece, shape=stack.shape)
        target[first : first + len(crossing)] = crossing
    assert target is not None  # of no expert
    return replace(packed, data=target.flatten())


def _main_memory(nbytes: int, device: torch.device) -> Tensor:
    """Main memory from which a GPU copies by itself. torch's pinned memory would take a power of 2 of bytes."""
    memory = in_huge_pages(torch.empty(nbytes, dtype=torch.uint8, device="cpu"))
    if device.type == "cuda":
        runtime = torch.cuda.cudart()
        try:
            torch.cuda.check_error(int(runtime.cudaHostRegister(memory.data_ptr(), nbytes, 0)))
        except RuntimeError as e:  # as `ulimit -l` or a container may bound it
            raise UnsupportedError(f"main memory of {size_text(nbytes)} cannot be pinned ({e})") from e
        weakref.finalize(memory.untyped_storage(), runtime.cudaHostUnregister, memory.data_ptr())
    return memory

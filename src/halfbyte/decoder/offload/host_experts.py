"""Computes routed experts on the CPU for a model whose other ops run on a GPU.

    GPU   … attention, norm, router, top-k ─ z, ids, weights → pinned memory ─ shared expert ─ … ─ y → GPU, residual …
    CPU                                            routed experts: z → y, from the time that z is there

The GPU computes those of long prompts (`streamed_experts.py`). Called by `lower_gpu.py` for each layer. A captured decode step is one
CUDA graph for each stretch between host functions; the host waits for an event, not for the GPU. Without a GPU the same code runs on a
CPU, as tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cached_property, partial
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.decoder.offload.placement import CHUNK
from halfbyte.decoder.offload.rates import FEWEST_ROWS, link_bandwidth, rows_worth_crossing
from halfbyte.decoder.offload.streamed_experts import LEAST_ROWS, StreamedExperts
from halfbyte.errors import UnsupportedError
from halfbyte.ops.transformer.experts import Experts, Mixture, why_not
from halfbyte.ops.transformer.routing import Routed, add_mixed, mixed, route, shared_output

HostCall = Callable[[Callable[[], None]], None]  # runs a function on the host, after what was launched before and before what comes next


def at_once(function: Callable[[], None]) -> None:
    """Run a function of the host where nothing is captured."""
    function()


class _Buffers(NamedTuple):
    """Pinned memory of M rows: what the CPU reads, and float32 y [M, K], which it writes."""

    z: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


class HostExperts:
    """The routed experts of some layers.

    Attributes:
        notes: Why torch's operations compute some of them, or the CPU those of long prompts, too.
    """

    def __init__(self, mixtures: Mapping[int, Experts], device: torch.device, memory: int | None = None) -> None:
        """Prepare the experts of layers.

        Args:
            mixtures: By the index of their layer, routed experts packed for a CPU, the rest on the device.
            device: Of the other ops.
            memory: Bytes of the device that experts of prompts may take (`streamed_experts.py`); None: no bound.
        """
        self._mixtures, self._device = mixtures, device
        self._kernels = {
            index: Mixture(mixture.gate_up, mixture.down_proj, mixture.clamped)
            if why_not(mixture.gate_up, mixture.down_proj) is None
            else None
            for index, mixture in mixtures.items()
        }
        # Keys: rows of a captured step, whose CUDA graph keeps the addresses, or 0 for all other calls; and top_k.
        self._buffers: dict[tuple[int, int], _Buffers] = {}
        self._event = torch.cuda.Event() if device.type == "cuda" else None
        self._streamed: StreamedExperts | None = None
        reasons = dict.fromkeys(why_not(mixture.gate_up, mixture.down_proj) for mixture in mixtures.values())
        self.notes = tuple(f"torch computes experts on the CPU: {reason}" for reason in reasons if reason is not None)
        try:
            self._streamed = StreamedExperts(mixtures, device, memory) if mixtures else None
        except UnsupportedError as e:
            self.notes += (f"prompts are read with experts on the CPU, not on the GPU: {e}",)

    def __len__(self) -> int:
        """Number of layers."""
        return len(self._mixtures)

    def __contains__(self, layer: int) -> bool:
        return layer in self._mixtures

    @property
    def has_copy(self) -> bool:
        """Whether there is a copy of the experts from which they cross to the device."""
        return self._streamed is not None

    def streams(self, rows: int) -> bool:
        """Whether the GPU computes the experts of so many rows of a prompt."""
        return self._streamed is not None and rows >= FEWEST_ROWS and rows >= self._least_rows

    @cached_property
    def _least_rows(self) -> int:
        """Rows of a prompt from which a layer's experts cross the link faster than the CPU computes them, measured where there is one."""
        if self._streamed is None or self._device.type != "cuda":
            return LEAST_ROWS
        return self._measured_rows(self._streamed.layer_bytes / link_bandwidth(self._device))

    def _measured_rows(self, crossing: float) -> int:
        layer, mixture = next(iter(self._mixtures.items()))
        experts, top_k = len(mixture.router), mixture.top_k

        def compute(rows: int) -> Tensor:  # which choose all experts equally often
            ids = torch.arange(rows * top_k, device="cpu").view(rows, top_k) % experts
            return self._routed(layer, torch.ones(rows, mixture.k, dtype=torch.float32, device="cpu"), ids, ids.float())

        return rows_worth_crossing(compute, crossing, CHUNK)

    def begin(self, rows: int) -> Callable[[int, Tensor], Tensor]:
        """Prepare for the layers of so many rows of a prompt; return the function that computes them, which is called in their order."""
        if self._streamed is None or not self.streams(rows):
            return partial(self.add, host=at_once)
        self._streamed.begin()
        return self._streamed.add

    def add(self, layer: int, x: Tensor, host: HostCall) -> Tensor:
        """Compute x + experts(norm(x)) of a layer, x [..., K] on the device, with the routed experts on the CPU."""
        mixture = self._mixtures[layer]
        routed = route(x, mixture)
        buffers = self._buffers_for(routed, is_captured=host is not at_once)
        for there, here in zip(buffers[:3], (routed.z, routed.ids, routed.weights), strict=True):
            there.copy_(here, non_blocking=True)
        compute = partial(self._compute, layer, buffers)
        if mixture.shared_expert is None:
            host(partial(self._marked, compute))
            total = self._on_device(buffers.y)
        else:
            host(self._mark)
            shared = shared_output(routed, mixture)
            host(compute)
            total = self._on_device(buffers.y)
            total = total if shared is None else total.add_(shared)
        return add_mixed(x, total)

    def _marked(self, compute: Callable[[], None]) -> None:
        self._mark()
        compute()

    def _mark(self) -> None:
        """Note that the rows are on their way."""
        if self._event is not None:
            self._event.record(torch.cuda.current_stream(self._device))

    def _compute(self, layer: int, buffers: _Buffers) -> None:
        """Compute y of the rows in pinned memory, as soon as they are there."""
        if self._event is not None:
            self._event.synchronize()
        buffers.y.copy_(self._routed(layer, *buffers[:3]))

    def _routed(self, layer: int, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum of the routed experts of rows by their weights."""
        mixture, kernel = self._mixtures[layer], self._kernels[layer]
        few = kernel is not None and len(z) <= mixture.most_rows
        return kernel(z.float(), ids, weights) if few and kernel is not None else mixed(z.float(), ids.long(), weights, mixture)

    def _on_device(self, y: Tensor) -> Tensor:
        return torch.empty_like(y, device=self._device).copy_(y, non_blocking=True)

    def _buffers_for(self, routed: Routed, *, is_captured: bool) -> _Buffers:
        rows, top_k = routed.ids.shape
        key = rows if is_captured else 0, top_k
        found = self._buffers.get(key)
        if found is None or len(found.z) < rows:
            wanted = routed.z, routed.ids, routed.weights, routed.z.float()
            pinned = self._device.type == "cuda"
            found = _Buffers(*(torch.empty(one.shape, dtype=one.dtype, device="cpu", pin_memory=pinned) for one in wanted))
            self._buffers[key] = found
        return _Buffers(*(one[:rows] for one in found))

"""Computes routed experts on the CPU for a model whose other ops run on a GPU.

    GPU   … attention, norm, router, top-k ─ z, ids, weights → pinned memory ─ shared expert ─ … ─ y → GPU, residual …
    CPU                                            routed experts: z → y, from the time that z is there

Rows cross as `crossing.py` has it. For prompts that would take the CPU longer than the link takes for all experts, these cross instead
(`streamed_experts.py`). Called by `lower_gpu.py` for each layer. Without a GPU the same code runs on a CPU, as tests do.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import cached_property, partial

import torch
from torch import Tensor

from halfbyte.decoder.offload.crossing import AT_ONCE, Crossing, Host, Rows
from halfbyte.decoder.offload.placement import CHUNK
from halfbyte.decoder.offload.rates import FEWEST_ROWS, SecondsOfRows, link_bandwidth
from halfbyte.decoder.offload.streamed_experts import StreamedExperts
from halfbyte.errors import UnsupportedError
from halfbyte.ops.transformer.experts import Experts, Mixture, why_no_mixture
from halfbyte.ops.transformer.routing import mixed, route, shared_output

_MOST_TIMES = 8  # the time of the link, up to which the CPU is measured: more rows take in proportion
LEAST_ROWS = 64  # of a prompt whose experts cross, where there is no link to measure


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
            if why_no_mixture(mixture.gate_up, mixture.down_proj) is None
            else None
            for index, mixture in mixtures.items()
        }
        self._crossing = Crossing(device)
        self._streamed: StreamedExperts | None = None
        reasons = dict.fromkeys(why_no_mixture(mixture.gate_up, mixture.down_proj) for mixture in mixtures.values())
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
    def can_stream(self) -> bool:
        """Whether experts can cross to the device."""
        return self._streamed is not None

    def streams(self, rows: int) -> bool:
        """Return whether the experts of each layer cross to the GPU for so many rows of a prompt: if they do in less time than the CPU
        computes them."""
        if self._streamed is None or rows < FEWEST_ROWS:
            return False
        if self._device.type != "cuda":
            return rows >= LEAST_ROWS
        return self._link_seconds < self._cpu_seconds(rows)

    @cached_property
    def _link_seconds(self) -> float:
        """Seconds that the experts of a layer take to cross the link."""
        assert self._streamed is not None
        return self._streamed.layer_bytes / link_bandwidth(self._device)

    @cached_property
    def _cpu_seconds(self) -> SecondsOfRows:
        """Seconds that the CPU takes for the experts of a layer, measured, by the number of rows."""
        layer, mixture = next(iter(self._mixtures.items()))
        experts, top_k = len(mixture.router), mixture.top_k

        def compute(rows: int) -> Tensor:  # which choose all experts equally often
            ids = torch.arange(rows * top_k, device="cpu").view(rows, top_k) % experts
            return self._routed(layer, torch.ones(rows, mixture.k, dtype=torch.float32, device="cpu"), ids, ids.float())

        return SecondsOfRows.of(compute, _MOST_TIMES * self._link_seconds, CHUNK)

    def begin(self, rows: int) -> Callable[[int, Tensor], Tensor]:
        """Prepare for the layers of so many rows of a prompt; return the function that computes them, which is called in their order."""
        if self._streamed is None or not self.streams(rows):
            return partial(self.add, host=AT_ONCE)
        self._streamed.begin()
        return self._streamed.add

    def add(self, layer: int, x: Tensor, host: Host) -> Tensor:
        """Compute x + experts(norm(x)) of a layer, x [..., K] on the device, with the routed experts on the CPU."""
        mixture, crossing = self._mixtures[layer], self._crossing
        routed = route(x, mixture)
        rows = crossing.rows(routed, is_captured=host is not AT_ONCE)
        with crossing.settles() if host is AT_ONCE else nullcontext():
            crossing.send(routed, rows)
            shared = shared_output(routed, mixture)
        compute = partial(self._compute, layer, rows)
        if crossing.waits or host is AT_ONCE:
            host.meanwhile(compute, crossing.settle)
        else:
            host.between(compute)
        return crossing.receive(x, rows, shared)

    def _compute(self, layer: int, rows: Rows) -> None:
        """Compute y of rows as soon as they are there."""
        kernel = self._kernels[layer]
        if kernel is not None and kernel.for_few_rows(rows.ids) is not None:
            kernel.serve(*rows, self._crossing.flags)
        else:
            self._crossing.wait()
            rows.y.copy_(self._routed(layer, *rows[:3]))
            self._crossing.done()
        self._crossing.check()

    def _routed(self, layer: int, z: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """The sum of the routed experts of rows, float32, by their weights."""
        kernel = self._kernels[layer]
        return mixed(z, ids, weights, self._mixtures[layer]) if kernel is None else kernel(z, ids, weights)

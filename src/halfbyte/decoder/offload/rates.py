"""What a CPU, a GPU and the link between them do in a second: measured once a process, or those of a GPU that is not here."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from functools import cache, partial
from itertools import pairwise
from typing import NamedTuple

import torch

from halfbyte.dispatch.roofline import gpu_ceilings
from halfbyte.machine import Gpu, gpu, machine
from halfbyte.memory import size_text
from halfbyte.ops.functions import linear, pack, quantize

_LINK = 25e9  # bytes per second, where there is no GPU to measure: 16 lanes of PCIe 4.0
_COPIED = 32 << 20  # bytes of pinned memory
_COPIES = 4
FEWEST_ROWS = 16  # of a prompt whose experts may cross the link
_OF_PRODUCTS = 0.8  # of a GPU's 16-bit peak, which prompts reach
_PRODUCT = 2048, 2048, 256  # N, K and rows of the product by which a CPU is measured


class Rates(NamedTuple):
    """Rates of a machine.

    Attributes:
        cpu_bandwidth: Bytes per second that the CPU reads from main memory.
        gpu_bandwidth: Bytes per second that the GPU reads from its memory.
        link_bandwidth: Bytes per second from pinned memory to the GPU.
        cpu_operations: Operations per second of products of prompts on the CPU (a multiplication and an addition are two).
        gpu_operations: The same on the GPU.
        measured: Whether the GPU is here, so that bandwidths were measured; else those of the GPU and the link are assumed.
    """

    cpu_bandwidth: float
    gpu_bandwidth: float
    link_bandwidth: float
    cpu_operations: float
    gpu_operations: float
    measured: bool = True

    def to_json(self) -> dict[str, object]:
        """Return the rates as a document of JSON."""
        return self._asdict()

    def __str__(self) -> str:
        cpu, gpu_memory, link = (f"{size_text(int(one))}/s" for one in self[:3])
        if self.measured:
            return f"measured: CPU memory {cpu}, GPU memory {gpu_memory}, link {link}"
        return f"CPU memory {cpu} measured; GPU memory {gpu_memory} and link {link} assumed, as the GPU is not here"


def rates_of(device: torch.device | str) -> Rates:
    """Return the rates of this machine with a GPU: "cuda", "cuda:1", …, or the architecture of one that is not here, such as "sm_90".

    The first call for a device takes about a second.

    Raises:
        UnsupportedError: There is no such GPU, or the architecture is unknown.
    """
    if isinstance(device, str) and not device.startswith("cuda"):
        from halfbyte.dispatch.explain_gpu import described_gpu  # which decoding does not need

        ceilings = gpu_ceilings(described_gpu(device))
        bandwidth, operations = _cpu()
        return Rates(bandwidth, ceilings.bandwidth, _LINK, operations, _OF_PRODUCTS * ceilings.half, measured=False)
    index = torch.device(device).index
    return _measured(index if index is not None else torch.cuda.current_device())


@cache
def _measured(index: int) -> Rates:
    here, device = gpu(index), _device(index)
    bandwidth, operations = _cpu()
    return Rates(bandwidth, _memory_bandwidth(here, device), link_bandwidth(device), operations, _OF_PRODUCTS * gpu_ceilings(here).half)


def _device(index: int) -> torch.device:
    return torch.device("cuda", index)


@cache
def _cpu() -> tuple[float, float]:
    """Bytes and operations per second of all cores."""
    from halfbyte.kernels.cpu import probe

    cores = machine().cores
    try:
        return probe.read_bandwidth(cores), product_rate()
    finally:
        probe.free_buffers()


def product_rate() -> float:
    """Measure the operations per second of products of prompts on all cores, by 4-bit weights in blocks of 32; takes some ms."""
    n, k, rows = _PRODUCT
    random = torch.Generator().manual_seed(0)
    weight, x = (torch.randn(*size, generator=random, device="cpu", dtype=torch.float32) for size in ((n, k), (rows, k)))
    packed = pack(quantize(weight, "q4_0"))
    return 2 * n * k * rows / min(_seconds(partial(linear, x, packed, compute="int8")) for _ in range(_COPIES))


def link_bandwidth(device: torch.device) -> float:
    """Measure the bytes per second that cross from pinned memory to a device; takes a few ms. A CPU stands in for a GPU in tests."""
    source = torch.zeros(_COPIED, dtype=torch.uint8, device="cpu", pin_memory=device.type == "cuda")
    return _COPIED / _copy_seconds(torch.empty_like(source, device=device), source)


class SecondsOfRows:
    """The seconds that something takes by its number of rows: between measured numbers on a line, beyond them in proportion."""

    def __init__(self, measured: Sequence[tuple[int, float]]) -> None:
        """Keep (rows, seconds), in the order of rows."""
        self._measured = measured

    @classmethod
    def of(cls, compute: Callable[[int], object], enough: float, most: int) -> SecondsOfRows:
        """Measure what computes so many rows.

        Args:
            compute: Is called for FEWEST_ROWS, and for twice as many until that takes long enough.
            enough: Seconds.
            most: Rows, at most.
        """
        rows, measured = FEWEST_ROWS, list[tuple[int, float]]()
        while not measured or (measured[-1][1] < enough and measured[-1][0] < most):
            measured.append((rows, min(_seconds(partial(compute, rows)) for _ in range(2))))
            rows = min(2 * rows, most)
        return cls(measured)

    def __call__(self, rows: int) -> float:
        for (fewer, faster), (more, slower) in pairwise(self._measured):
            if fewer <= rows <= more:
                return faster + (slower - faster) * (rows - fewer) / (more - fewer)
        last, seconds = self._measured[-1]
        return max(seconds, seconds * rows / last)


def _seconds(run: Callable[[], object]) -> float:
    start = time.perf_counter()
    run()
    return time.perf_counter() - start


def _memory_bandwidth(here: Gpu, device: torch.device) -> float:
    """Bytes per second of a GPU's memory, measured by a copy, which reads and writes them; what its clocks give where there is no room."""
    size = max(_COPIED, 2 * here.l2)
    try:
        source, target = (torch.zeros(size, dtype=torch.uint8, device=device) for _ in range(2))
    except torch.OutOfMemoryError:
        return gpu_ceilings(here).bandwidth
    return 2 * size / _copy_seconds(target, source)


def _copy_seconds(target: torch.Tensor, source: torch.Tensor) -> float:
    """Seconds of a copy: the least of a few, after one that warms up."""
    copy = partial(target.copy_, source, non_blocking=True)
    copy()
    if not target.is_cuda:
        return min(_seconds(copy) for _ in range(_COPIES))
    with torch.cuda.device(target.device):
        events = [torch.cuda.Event(enable_timing=True) for _ in range(_COPIES + 1)]
        events[0].record()
        for event in events[1:]:
            copy()
            event.record()
        events[-1].synchronize()
        return min(float(one.elapsed_time(other)) for one, other in pairwise(events)) / 1e3

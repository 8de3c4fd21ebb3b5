"""Memory through which rows cross to the CPU's experts, and their sum comes back: one pinned buffer for each number of rows, and the flags
of `kernels/crossing.py`.

    GPU   … top-k ─ send: z, ids, weights, READY ─ shared expert ─ receive: waits for DONE, x + y + shared ─ …
    CPU           waits for READY ─ experts ─ y, DONE

With `GPU_WAITS` the GPU waits by a kernel, so that a decode step is one CUDA graph. Without, and where there is no such kernel (no GPU, as
in tests, another one than NVIDIA's, or launches that block), rows are copied, and the host computes between launches.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from ctypes import c_int64
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.dispatch.gpu import why_no_triton
from halfbyte.errors import KernelError
from halfbyte.kernels.crossing import ARRIVED, DONE, FAILED, READY, WORDS
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.machine import gpu
from halfbyte.ops.transformer.routing import Routed, add_mixed

# Whether GPUs wait by a kernel where they can: a crossing takes some 30 us less (Qwen3-30B-A3B, H200). Tests run both ways.
GPU_WAITS = True
_MOST_SECONDS = 30.0  # that the host waits for rows
_ALIGNED = 64


class Host(Protocol):
    """Runs functions of the host in a sequence of launches; `ops.graph_capture.CapturedGraph` does in each replay."""

    def between(self, function: Callable[[], None]) -> None:
        """Run a function after what was launched before was, and before what comes next is."""

    def meanwhile(self, function: Callable[[], None], settle: Callable[[], None]) -> None:
        """Run a function while what comes next may be running, which waits for it; or, where it or one before it fails, `settle`."""


class AtOnce:
    """A host where nothing is captured."""

    def between(self, function: Callable[[], None]) -> None:
        function()

    def meanwhile(self, function: Callable[[], None], settle: Callable[[], None]) -> None:
        try:
            function()
        except BaseException:
            settle()
            raise


AT_ONCE = AtOnce()


class Rows(NamedTuple):
    """Memory of M rows, each in a part of one buffer: z float32 [M, K], ids int64 and weights float32 [M, T], and y float32 [M, K]."""

    z: Tensor
    ids: Tensor
    weights: Tensor
    y: Tensor


class Crossing:
    """What all layers of a model cross through, one at a time.

    Attributes:
        flags: int64 [WORDS], pinned.
        waits: Whether the GPU waits for the CPU by a kernel.
    """

    def __init__(self, device: torch.device) -> None:
        """Allocate the flags."""
        self._device, self._pins = device, device.type == "cuda"
        self.flags = torch.zeros(WORDS, dtype=torch.int64, device="cpu", pin_memory=self._pins)
        self._words = (c_int64 * WORDS).from_address(self.flags.data_ptr())
        self._count = torch.zeros(1, dtype=torch.int64, device=device)
        blocks = os.environ.get("CUDA_LAUNCH_BLOCKING", "0") != "0"
        self.waits = GPU_WAITS and self._pins and not blocks and gpu(device.index or 0).backend == "cuda" and why_no_triton() is None
        # Keys: rows of a captured step, whose CUDA graph keeps the addresses, or 0 for all other calls; and top_k.
        self._rows: dict[tuple[int, int], Rows] = {}

    def rows(self, routed: Routed, *, is_captured: bool) -> Rows:
        """The memory for rows."""
        (rows, k), top_k = routed.z.shape, routed.ids.shape[1]
        key = rows if is_captured else 0, top_k
        if key not in self._rows or len(self._rows[key].z) < rows:
            self._rows[key] = self._allocated(rows, k, top_k)
        return Rows(*(one[:rows] for one in self._rows[key]))

    def _allocated(self, rows: int, k: int, top_k: int) -> Rows:
        shapes = ((rows, k), torch.float32), ((rows, top_k), torch.int64), ((rows, top_k), torch.float32), ((rows, k), torch.float32)
        sizes = [m * n * dtype.itemsize for (m, n), dtype in shapes]
        padded = [-(-size // _ALIGNED) * _ALIGNED for size in sizes]
        parts = torch.zeros(sum(padded), dtype=torch.uint8, device="cpu", pin_memory=self._pins).split(padded)
        return Rows(*(part[:size].view(dtype).view(shape) for part, size, (shape, dtype) in zip(parts, sizes, shapes, strict=True)))

    def send(self, routed: Routed, rows: Rows) -> None:
        """Launch what stores rows and their experts in memory and says so."""
        given = routed.z, routed.ids, routed.weights
        if not self.waits:
            for target, source in zip(rows[:3], given, strict=True):
                target.copy_(source, non_blocking=True)
            self._count.add_(1)
            self.flags[READY : READY + 1].copy_(self._count, non_blocking=True)
            return
        from halfbyte.kernels.gpu.experts import crossing

        if len(rows.z) > crossing.MOST_ROWS:
            for target, source in zip(rows[:3], given, strict=True):
                target.copy_(source.to(target.dtype), non_blocking=True)
        z, ids, weights = (one.contiguous() for one in given)
        crossing.launch_send(gpu(self._device.index or 0), (z, ids, weights), rows[:3], self._count, self.flags)

    def receive(self, x: Tensor, rows: Rows, shared: Tensor | None) -> Tensor:
        """Launch x + y + shared, x [..., K] on the device, shared float32 [M, K]; on the GPU it waits for y."""
        if not self.waits:
            y = torch.empty_like(rows.y, device=self._device).copy_(rows.y, non_blocking=True)
            return add_mixed(x, y if shared is None else y.add_(shared))
        from halfbyte.kernels.gpu.experts import crossing

        flat = x.contiguous().view(-1, x.shape[-1])
        out = output(torch.empty_like(flat))
        crossing.launch_receive(gpu(self._device.index or 0), flat, rows.y, shared, out, self._count, self.flags)
        return out.view(x.shape)

    def wait(self) -> None:
        """Wait until rows have arrived; the experts' kernel waits by itself."""
        deadline = time.monotonic() + _MOST_SECONDS
        while self._words[READY] == self._words[DONE] and not self._words[FAILED]:
            time.sleep(0)
            self._words[FAILED] = int(time.monotonic() > deadline)

    def done(self) -> None:
        """Say that y is there."""
        self._words[DONE] = self._words[READY]

    def check(self) -> None:
        """Raise KernelError where rows have not arrived in time."""
        if self._words[FAILED]:
            raise KernelError(
                "the GPU has not sent the next hidden states to the CPU in time: it may have failed or be used by another program, so open"
                " the model again"
            )

    @contextmanager
    def settles(self) -> Iterator[None]:
        """A context that ends with `settle` where it fails. Rows that were sent and not computed would be taken for the next ones."""
        try:
            yield
        except BaseException:
            self.settle()
            raise

    def settle(self) -> None:
        """After a failure of the host: let the GPU run what waits for it, whose results are undefined, and begin anew."""
        if self._pins:
            with suppress(RuntimeError):  # a GPU that has failed runs nothing
                event = torch.cuda.Event()
                event.record(torch.cuda.current_stream(self._device))
                while not event.query():
                    self.done()
                    time.sleep(0)
        self.done()
        self._words[FAILED] = self._words[ARRIVED] = 0

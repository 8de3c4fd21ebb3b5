"""CUDA graphs that share memory: a graph's memory serves those that are captured after it, and so do the scratch buffers of each graph
(`scratch.release`).

Graphs of one device and stream share a memory pool, so they must be replayed one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import torch

from halfbyte.dispatch.gpu import why_no_triton

T = TypeVar("T")


class _DeviceGraphs:
    """What the graphs of one device share.

    Attributes:
        stream: On which all are captured.
        pools: A graph whose memory others share, by the stream of replays: two graphs in one memory must not run at the same time.
        lost: Graphs in whose memory a capture failed, at most one for each failure: torch cannot free them while it keeps that memory.
    """

    def __init__(self, device: torch.device) -> None:
        self.stream = torch.cuda.Stream(device)
        self.pools: dict[int, torch.cuda.CUDAGraph] = {}
        self.lost: list[torch.cuda.CUDAGraph] = []


# What graphs share, by the index of the device: created by its first capture, and never invalidated. Captures of one device must not
# overlap, as torch allows one at a time.
_devices: dict[int, _DeviceGraphs] = {}
_MODE = "thread_local"  # other threads may go on using the GPU


class CapturedGraph:
    """A CUDA graph in the memory of those before it; or several, between which functions of the host run. Others run while a graph does.

    Example:
        graph = CapturedGraph(device)
        y = graph.capture(lambda: x + 1)  # a static tensor
        graph.replay()
    """

    def __init__(self, device: torch.device) -> None:
        self._device, self._graphs = device, list[torch.cuda.CUDAGraph]()
        self._steps: list[Callable[[], None]] = []  # replays of the graphs, and functions of the host between them
        self._meanwhile: list[Callable[[], None]] = []  # functions that run after the launch of the graph that is being captured
        self._settle: dict[Callable[[], None], None] = {}
        self._owners: list[tuple[int, int, int]] = []
        here = torch.cuda.current_stream(device)
        self._replayed_on = here.cuda_stream
        self._shared = _devices.get(here.device_index) or _devices.setdefault(here.device_index, _DeviceGraphs(device))

    def capture(self, run: Callable[[], T]) -> T:
        """Capture the launches of `run`, without running them, and return its result.

        Raises:
            RuntimeError: Something in it synchronizes with the GPU.
        """
        shared = self._shared
        shared.stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(shared.stream):
            if self._replayed_on not in shared.pools:
                shared.pools[self._replayed_on] = _trivial(self._device)
            try:
                self._begin()
                result = run()
                self._end()
            except BaseException:
                self._abandon()
                raise
        return result

    def between(self, function: Callable[[], None]) -> None:
        """While launches are captured: let each replay call a function of the host between those before and those after it."""
        self._end()
        self._steps.append(function)
        self._begin()

    def meanwhile(self, function: Callable[[], None], settle: Callable[[], None]) -> None:
        """While launches are captured: let each replay call a function of the host after the graph's launch. Kernels in it wait for the
        function; where a replay fails, `settle` lets them end."""
        self._meanwhile.append(function)
        self._settle[settle] = None

    def _begin(self) -> None:
        self._graphs.append(torch.cuda.CUDAGraph())
        self._graphs[-1].capture_begin(pool=self._shared.pools[self._replayed_on].pool(), capture_error_mode=_MODE)
        if why_no_triton() is None:
            from halfbyte.kernels.gpu.runtime import scratch

            self._owners.append(scratch.owner(self._device))

    def _end(self) -> None:
        self._graphs[-1].capture_end()
        self._steps += [self._graphs[-1].replay, *self._meanwhile]
        self._meanwhile = []

    def _abandon(self) -> None:
        """Ends a capture that failed. torch leaves its random numbers as they were within: another capture brings them back."""
        with suppress(RuntimeError):
            self._graphs[-1].capture_end()
        self._shared.lost.append(self._shared.pools.pop(self._replayed_on))
        _trivial(self._device)
        self.close()

    def replay(self) -> None:
        """Run what was captured, on the current stream."""
        try:
            for step in self._steps:
                step()
        except BaseException:
            for settle in self._settle:
                settle()
            raise

    def close(self) -> None:
        """Free it."""
        torch.cuda.current_stream(self._device).synchronize()
        self._steps.clear()
        for graph in self._graphs:
            graph.reset()
        for owner in self._owners:
            from halfbyte.kernels.gpu.runtime import scratch

            scratch.release(owner)


def _trivial(device: torch.device) -> torch.cuda.CUDAGraph:
    """A graph that does nothing of use, captured on the current stream. What torch keeps of graphs that share memory goes with the last of
    them, and cannot be taken up again."""
    graph = torch.cuda.CUDAGraph()
    graph.capture_begin(capture_error_mode=_MODE)
    torch.zeros(1, dtype=torch.int32, device=device)
    graph.capture_end()
    return graph

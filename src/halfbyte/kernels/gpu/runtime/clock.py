"""Times on a GPU as models see them: launches replayed from a CUDA graph, weights from memory, contenders in turn.

A contender is a sequence of launches of the same work on different weights, together larger than the caches. Its graph holds
them all, so that the time of one launch includes what follows from its neighbours (the tail of a wave, overlapping starts)
and nothing of the host's.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from statistics import median

import torch

from halfbyte.kernels.gpu.runtime import scratch
from halfbyte.timing import Timing


def graph_times(
    contenders: Mapping[str, Sequence[Callable[[], object]]], *, rounds: int = 15, min_seconds: float = 2e-4
) -> dict[str, Timing]:
    """Seconds that one launch of each contender takes. Contenders take repeats, every other round backwards.

    A graph repeats its contender's launches until they take about `min_seconds`. What a launch returns is dropped.
    """
    graphs = {name: _graph(launches, min_seconds) for name, launches in contenders.items()}
    runs: dict[str, list[float]] = {name: [] for name in graphs}
    order = list(graphs)
    for _ in range(rounds):
        for name in order:
            graph, count, _ = graphs[name]
            runs[name].append(_seconds(graph.replay) / count)
        order.reverse()
    for graph, _, owner in graphs.values():
        graph.reset()
        scratch.release(owner)
    return {name: Timing(median(times), min(times), max(times), len(times), sum(times)) for name, times in runs.items()}


def copies(nbytes: int, l2: int) -> int:
    """How many copies of `nbytes` exceed the second-level cache four times over (at least 2, at most 64)."""
    return max(2, min(64, -(-4 * l2 // max(1, nbytes))))


def _graph(launches: Sequence[Callable[[], object]], min_seconds: float) -> tuple[torch.cuda.CUDAGraph, int, scratch.Owner]:
    """The graph, how many launches it holds, and who keeps the memory that kernels share in it."""

    def once() -> None:
        for each in launches:
            each()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates what is kept
        once()
        once()
        seconds = _seconds(once)
    torch.cuda.current_stream().wait_stream(stream)
    repeats = max(1, min(64, round(min_seconds / max(seconds, 1e-6))))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        owner = scratch.owner(torch.device("cuda", torch.cuda.current_device()))
        for _ in range(repeats):
            once()
    graph.replay()
    return graph, repeats * len(launches), owner


def _seconds(run: Callable[[], object]) -> float:
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))

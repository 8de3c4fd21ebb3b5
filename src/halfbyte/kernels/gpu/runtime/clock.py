"""Measures kernels as models run them: replayed from a CUDA graph, with weights that are not in the caches.

A contender is a sequence of launches of the same work on different weights, together larger than the caches. Its graph holds
them all, so that the time of one launch includes the effects of its neighbours (the tail of a wave, overlapping starts)
and no host overhead.
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
    """Return the seconds that one launch of each contender takes.

    Args:
        contenders: The launches of each, by name; their results are dropped.
        rounds: Times that each is measured. Contenders take turns, every other round in the reverse order.
        min_seconds: About how long a replay takes: a graph repeats its contender's launches so often.
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
    """Return how many copies of `nbytes` exceed the second-level cache four times over (at least 2, at most 64)."""
    return max(2, min(64, -(-4 * l2 // max(1, nbytes))))


def _graph(launches: Sequence[Callable[[], object]], min_seconds: float) -> tuple[torch.cuda.CUDAGraph, int, scratch.Owner]:
    """Return the graph, how many launches it holds, and the owner of its scratch buffers."""

    def once() -> None:
        for each in launches:
            each()

    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):  # compiles, and allocates scratch buffers that are cached
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
    """Return the seconds that the GPU takes for `run`."""
    start, end = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
    start.record()
    run()
    end.record()
    end.synchronize()
    return 1e-3 * float(start.elapsed_time(end))

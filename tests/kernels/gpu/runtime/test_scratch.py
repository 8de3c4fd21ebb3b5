"""Scratch buffers: for each stream and for each graph, and what a graph leaves to others."""

from __future__ import annotations

import pytest
import torch

from halfbyte.kernels.gpu.runtime import scratch
from halfbyte.kernels.gpu.runtime.clock import graph_times


def test_scratch_memory_grows_and_locks_are_zero(device: torch.device) -> None:
    small = scratch.locks(device, 3)
    assert scratch.locks(device, 5) is small
    large = scratch.locks(device, small.numel() + 1)
    assert large.numel() > small.numel()
    assert not large.any()
    assert scratch.locks(device, 1) is large
    memory = scratch.workspace(device, 1 << 20)
    assert memory.dtype == torch.uint8
    assert memory.numel() >= 1 << 20
    assert memory.data_ptr() % 64 == 0
    assert scratch.workspace(device, scratch._MOST_CACHED_BYTES + 1) is not scratch.workspace(device, scratch._MOST_CACHED_BYTES + 1)


def test_double_buffers_alternate(device: torch.device) -> None:
    first, second, third = (scratch.double_buffer(device, 1000) for _ in range(3))
    assert first.data_ptr() == third.data_ptr() != second.data_ptr()
    assert abs(first.data_ptr() - second.data_ptr()) >= third.numel()
    larger = scratch.double_buffer(device, third.numel() + 1)
    assert larger.numel() > third.numel()
    assert scratch.double_buffer(device, scratch._MOST_CACHED_BYTES + 1).numel() > scratch._MOST_CACHED_BYTES


def test_scratch_buffers_of_a_graph_that_is_gone_are_given_to_another(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    index, graphs = 99, (41, 42, 43)
    monkeypatch.setitem(scratch._devices, index, scratch._DeviceScratch())
    scratch._devices[index].lock_arena = torch.zeros(1 << 12, dtype=torch.int32, device=device)
    scratch._devices[index].buffer_arena = torch.zeros(8 * scratch._BUFFER_ALIGNMENT, dtype=torch.uint8, device=device)
    buffers = []
    for graph in graphs:
        monkeypatch.setattr(scratch, "_where", lambda device, graph=graph: (index, 1, graph))
        buffers.append([scratch.locks(device, 5), *(scratch.double_buffer(device, 100) for _ in range(2))])
        if graph == graphs[1]:
            scratch.release((index, 1, graphs[0]))
    addresses = [{tensor.data_ptr() for tensor in tensors} for tensors in buffers]
    assert addresses[0] == addresses[2]
    assert not addresses[0] & addresses[1]
    for graph in graphs:
        scratch.release((index, 1, graph))
    assert scratch.locks(device, 600).data_ptr() not in addresses[0] | addresses[1], "those that are free are too small"


def test_graphs_find_locks_while_others_need_them_too(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    index = 99
    monkeypatch.setitem(scratch._devices, index, scratch._DeviceScratch())
    scratch._devices[index].lock_arena = torch.zeros(1 << 12, dtype=torch.int32, device=device)
    for graph in range(3):  # a launch comes before its graph
        monkeypatch.setattr(scratch, "_where", lambda device: (index, 1, 0))
        assert scratch.locks(device, 5).numel() >= 5
        monkeypatch.setattr(scratch, "_where", lambda device, graph=graph: (index, 1, 50 + graph))
        actual = scratch.locks(device, scratch._ARENA_LOCKS // 2 + 1)
        assert not actual.any()
        assert (1, 50 + graph) in scratch._devices[index].graph_locks, "memory of a graph's own is set to 0 each time"
    for graph in range(3):
        scratch.release((index, 1, 50 + graph))


needs_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")


@needs_gpu
def test_graphs_that_are_timed_leave_nothing_behind(device: torch.device) -> None:
    x, left = torch.ones(8, device=device), []
    for _ in range(2):
        graph_times({"locks": [lambda: x.add_(scratch.locks(device, 5000)[:8])] * 2}, rounds=1)
        left.append([buffers.lock_arena.numel() for buffers in scratch._devices.values() if buffers.lock_arena is not None])
    assert left[0] == left[1]


@needs_gpu
def test_each_stream_and_each_graph_has_its_own(device: torch.device) -> None:
    here = scratch.locks(device, 1)
    with torch.cuda.stream(torch.cuda.Stream()):
        assert scratch.locks(device, 1).data_ptr() != here.data_ptr()
    addresses, graphs = [], []
    for _ in range(2):
        graph, something = torch.cuda.CUDAGraph(), torch.zeros(1, device=device)
        with torch.cuda.graph(graph):
            something.add_(1)
            first, second = scratch.locks(device, 1), scratch.locks(device, 1)
            more = scratch.locks(device, first.numel() + 1)
        assert first.data_ptr() == second.data_ptr()
        assert more.data_ptr() not in (first.data_ptr(), here.data_ptr())
        assert not first.any()
        assert not more.any()
        addresses.append(first.data_ptr())
        graphs.append(graph)
    assert addresses[0] != addresses[1]
    assert scratch.locks(device, 1) is here
    place = scratch.double_buffer(device, 1000)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        something.add_(1)
        found = [scratch.double_buffer(device, size) for size in (1000, 1000, 1000, 2 * place.numel())]
    assert found[0].data_ptr() == found[2].data_ptr() != found[1].data_ptr()
    assert place.data_ptr() not in [one.data_ptr() for one in found]
    assert found[3].numel() == 2 * place.numel()

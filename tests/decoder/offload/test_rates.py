"""Measured rates of this machine; copies between CPUs stand in for those to a GPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from halfbyte.decoder.offload import rates
from halfbyte.decoder.offload.rates import Rates, SecondsOfRows, link_bandwidth, rates_of
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.cpu import probe
from halfbyte.machine import GPUS, machine


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """The CPU's probe, which takes a second, is replaced; how often it is asked."""
    asked: list[int] = []
    monkeypatch.setattr(probe, "read_bandwidth", lambda threads: (asked.append(threads), 5e10)[1])
    monkeypatch.setattr(rates, "product_rate", lambda: 2e12)
    for function in (rates._cpu, rates._measured):
        function.cache_clear()
    yield asked
    for function in (rates._cpu, rates._measured):
        function.cache_clear()


def test_of_a_gpu_that_is_not_here(quick: list[int]) -> None:
    """Its reference machine's bandwidth, an assumed link; the CPU is measured once."""
    found = rates_of("sm_90")
    assert not found.measured
    assert found.cpu_bandwidth == 5e10
    assert found.gpu_bandwidth <= (GPUS["sm_90"].bandwidth or 0.0)
    assert found.cpu_operations == 2e12 < found.gpu_operations
    assert "link 25.0 GB/s assumed, as the GPU is not here" in str(found)
    assert rates_of("sm_120").gpu_bandwidth < found.gpu_bandwidth
    assert len(quick) == 1
    with pytest.raises(UnsupportedError, match="there are no kernels for device 'sm_1'"):
        rates_of("sm_1")


def test_of_the_gpu_here(quick: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    """All are measured, once; where there is no memory for that, the GPU's clocks tell."""
    copies: list[int] = []

    def copied(target: torch.Tensor, source: torch.Tensor) -> float:
        copies.append(source.numel())
        return 1e-3

    monkeypatch.setattr(rates, "gpu", lambda index: GPUS["sm_90"])
    monkeypatch.setattr(rates, "link_bandwidth", lambda device: 5.5e10)
    monkeypatch.setattr(rates, "_copy_seconds", copied)
    monkeypatch.setattr(rates, "_device", lambda index: torch.device("cpu"))
    found = rates._measured(0)
    assert found == rates._measured(0)
    assert found.measured
    assert found.link_bandwidth == 5.5e10
    assert copies == [2 * GPUS["sm_90"].l2]
    assert found.gpu_bandwidth == 2 * copies[0] / 1e-3
    assert "measured: CPU memory 50.0 GB/s" in str(found)

    def full(*_: object, **__: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(torch, "zeros", full)
    assert rates._memory_bandwidth(GPUS["sm_90"], torch.device("cpu")) == rates_of("sm_90").gpu_bandwidth


def test_products_of_prompts_are_measured() -> None:
    """A core multiplies 10^9 to 10^13 numbers a second."""
    assert 1e9 < rates.product_rate() < 1e13 * machine().cores


def test_the_link_is_measured_by_copies() -> None:
    """Of pinned memory; between CPUs of main memory, which reads and writes at least 100 MB/s and less than 10 TB/s."""
    assert 1e8 < link_bandwidth(torch.device("cpu")) < 1e13


def test_seconds_by_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """A millisecond of reading and then 10 us a row: 16, 32, … rows are measured, others follow from those."""
    asked: list[int] = []
    monkeypatch.setattr(rates, "_seconds", lambda run: run())

    def compute(rows: int) -> float:
        asked.append(rows)
        return 1e-3 + 1e-5 * rows

    seconds = SecondsOfRows.of(compute, 4e-3, 4096)
    assert sorted(set(asked)) == [16, 32, 64, 128, 256, 512]
    assert len(asked) == 12, "the first time kernels may have to be compiled"
    for rows in (16, 17, 100, 300, 512):
        assert seconds(rows) == pytest.approx(1e-3 + 1e-5 * rows)
    assert seconds(1024) == pytest.approx(2 * seconds(512))
    assert SecondsOfRows.of(compute, 1.0, 100)(100) == pytest.approx(2e-3)
    assert SecondsOfRows.of(compute, 0.0, 4096)(8) == pytest.approx(1e-3 + 16e-5), "fewer than were measured"


def test_rates_are_a_document() -> None:
    assert Rates(1.0, 2.0, 3.0, 4.0, 5.0).to_json() == {
        "cpu_bandwidth": 1.0,
        "gpu_bandwidth": 2.0,
        "link_bandwidth": 3.0,
        "cpu_operations": 4.0,
        "gpu_operations": 5.0,
        "measured": True,
    }


def test_the_probe_frees_its_buffers() -> None:
    probe._buffer(1 << 20)
    probe.free_buffers()
    assert probe._buffer.cache_info().currsize == 0

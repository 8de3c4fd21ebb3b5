"""The measured ceilings of a CPU: rates are those of the arithmetic, also while other processes have the cores."""

from __future__ import annotations

from collections.abc import Iterable

import pytest
from torch import Tensor

from halfbyte.kernels.cpu import probe

OPERATIONS, ROUND, START = 1000, 1e-9, 1e-5  # of a round; seconds that it takes, and that starting the threads takes


def simulate(monkeypatch: pytest.MonkeyPatch, delays: Iterable[float]) -> list[int]:
    """Replace the clock: measurements take their rounds' time, and the first of them these delays. Returns where they are recorded."""
    measured: list[int] = []
    left = iter(delays)

    def seconds(phase: str, buffer: Tensor, size: int, threads: int) -> float:
        measured.append(size)
        return START + size * ROUND + next(left, 0.0)

    monkeypatch.setattr(probe, "_seconds", seconds)
    return measured


@pytest.mark.parametrize("delays", [(), (0.04,), (0.04,) * 2, (0.04, 0.05, 0.06, 0.04), (0.0,) * 8 + (0.1,) * 2])
def test_waiting_for_a_core_does_not_end_a_measurement(monkeypatch: pytest.MonkeyPatch, delays: tuple[float, ...]) -> None:
    measured = simulate(monkeypatch, delays)
    peak = OPERATIONS / ROUND  # of one thread
    # 0.03 s of rounds of 1 ns are 2^25 rounds; to start the threads takes less than 1 % of it.
    assert 0.99 * peak < probe._rate("dots", 1, OPERATIONS) <= peak
    assert max(measured) <= 1 << 26


def test_rates_are_positive_for_every_number_of_threads() -> None:
    for threads in (0, 1, 1000):
        assert probe.dot_peak(threads) > 0
        assert probe.fma_peak(threads) > 0


def test_buffers_are_freed() -> None:
    probe.free_buffers()
    assert probe.read_bandwidth(1) > 0
    assert probe._buffer.cache_info().currsize == 1
    probe.free_buffers()
    assert probe._buffer.cache_info().currsize == 0

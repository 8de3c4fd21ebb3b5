"""The benchmark of convolutions, `benchmarks/conv.py`."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import conv_cpu
import pytest
from conv_contenders import Layer

from halfbyte.bench.process import Worker


@pytest.mark.parametrize("name", ["halfbyte int8→int8", "halfbyte fp32, int8 weight, float", "torch fp32"])
def test_a_contender_is_right_and_timed(name: str) -> None:
    with Worker(1, conv_cpu.PROGRAM) as one:
        found = one.ask("convolve", name=name, layer=asdict(Layer(32, 7, 16, 3)), min_time=0.001)
    assert 0 < found["seconds"] < 1
    assert found["error"] <= found["allowed"]


def test_the_table_of_convolutions() -> None:
    def row(contender: str, seconds: float | None, **more: Any) -> dict[str, Any]:
        return {"network": "net", "threads": 2, "contender": contender, "seconds": seconds} | more

    rows = [row("own", 0.002, of_dot_peak=0.5), row("a", 0.003), row("b", None, reason="gone")]
    assert conv_cpu.table(rows, ["own", "a", "b"], ["a", "b"]).splitlines()[2:] == [
        "| net | 2 | 2.000 (×1.50, 50%) | 3.000 | - |",
        "not measured: b: gone",
    ]
    assert "| 2.000 | - |" in conv_cpu.table([row("own", 0.002), row("a", None)], ["own", "a"], ["a"])

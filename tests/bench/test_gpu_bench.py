"""The GPU benchmark's arithmetic and pictures. What it measures needs a GPU."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from xml.etree import ElementTree

import pytest
import torch
from gpu_contenders import contenders, marlin
from gpu_main import main
from gpu_results import markdown, plot, written

from halfbyte.bench import gpu
from halfbyte.bench.gpu_contenders import Absent, GpuWork, tinygemm
from halfbyte.bench.gpu_report import GpuMeasurement, GpuReport, text
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.formats.spec import as_format
from halfbyte.machine import GPUS


def measured(label: str, m: int, seconds: float, *, peer: bool = True) -> GpuMeasurement:
    return GpuMeasurement(
        contender=label, label=label, peer=peer, n=64, k=32, m=m, format="q4_0", dtype="float16", compute="float",
        kernel="" if peer else "skinny Config()", error=1e-3, seconds=seconds, spread=(seconds, seconds), floor=1e-5,
    )  # fmt: skip


def report() -> GpuReport:
    points = [
        one
        for m in (1, 16)
        for one in gpu._rank([measured("own", m, 2e-5, peer=False), measured("a <b>", m, 3e-5), measured("c", m, 4e-5)])
    ]
    return GpuReport(
        "today", asdict(GPUS["sm_90"]), {"torch": "2"}, {}, {"read": 4e12, "half": 7e14, "integer": 1e15}, points, ["d: not here"]
    )


def test_the_best_peer_is_who_counts() -> None:
    halfbyte_point, a, c = report().measurements[:3]
    assert halfbyte_point.best_peer == pytest.approx(1.5)
    assert halfbyte_point.best_peer_name == "a <b>"
    assert a.best_peer == 1
    assert c.best_peer == pytest.approx(0.75)


def test_table_and_json() -> None:
    found = text(report())
    assert "1.50" in found
    assert "50%" in found
    assert "not measured: d: not here" in found
    assert json.loads(written(report())) == json.loads(json.dumps(report().to_json()))


def test_what_was_measured_is_shown_again(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path, plot = tmp_path / "a.json", tmp_path / "a.svg"
    path.write_text(written(report()))
    assert main(["--read", str(path), "--markdown"]) == 0
    shown = capsys.readouterr().out
    assert shown == markdown(report()) + "\n"
    assert "| 64 x 32 | 1 | 20.0 | 30.0 | 40.0 | 1.50 | 50% |" in shown
    assert main(["--read", str(path), str(path), "--m", "16", "--plot", str(plot)]) == 0
    assert "50%" in capsys.readouterr().out
    assert ElementTree.fromstring(plot.read_text()).findall(".//{http://www.w3.org/2000/svg}circle")
    path.write_text("{}")
    assert main(["--read", str(path)]) == 2
    assert "--json wrote" in capsys.readouterr().err


def test_picture() -> None:
    shown = report()
    shown.gpu["name"] = "a & b"
    lines = ElementTree.fromstring(plot(shown)).findall(".//{http://www.w3.org/2000/svg}polyline")
    assert len(lines) == 3
    assert all(len(line.get("points", "").split()) == 2 for line in lines)


def test_who_can_not_take_part_says_why() -> None:
    work = GpuWork(GPUS["sm_90"], 64, 100, as_format("int4_g32"), torch.float16, "float", "row")
    with pytest.raises(Absent, match="takes bfloat16 activations"):
        tinygemm(work)
    with pytest.raises(Absent, match=r"vLLM is not installed|cannot be loaded|takes"):
        marlin(GpuWork(GPUS["sm_90"], 64, 128, as_format("int4_g32_zp"), torch.float16, "float", "row"), None)


def test_refusals() -> None:
    with pytest.raises(ArgumentError, match="no peer 'me'"):
        gpu.run(gpu.GpuPlan(peers=("me",)))
    with pytest.raises(ArgumentError, match="from 1 on"):
        gpu.run(gpu.GpuPlan(ms=(0,)))
    if not torch.cuda.is_available():
        with pytest.raises(UnsupportedError, match="no device cuda:0"):
            gpu.run(gpu.GpuPlan(peers=tuple(peer.name for peer in contenders())), peers=contenders())

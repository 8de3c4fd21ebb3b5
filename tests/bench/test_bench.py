"""The benchmark's machinery: that it rotates, checks, survives its contenders, and reports what it saw."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from dataclasses import fields, replace
from pathlib import Path
from threading import Event
from typing import Any
from xml.etree import ElementTree

import cpu_main
import pytest
import torch
from cpu_contenders import ALL, RUNTIMES, TORCH
from torch import Tensor

from halfbyte.bench import contenders, worker
from halfbyte.bench.contenders import PEERS, Contender, dense, halfbyte_linear, select
from halfbyte.bench.process import Worker, WorkerError, cores
from halfbyte.bench.report import Ceilings, Measurement, Report, Sample, plot, rank, summarize, text
from halfbyte.bench.workload import Workload, relative_error
from halfbyte.errors import HalfbyteError, UnsupportedError
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.machine import machine
from halfbyte.plot import line_plot

WORK = Workload(n=80, k=128, threads=1, cache_bytes=10_000, memory_bytes=1 << 20)
BENCH_FORMATS = ["q4_0", "int4_g128", "int4_g128_zp", "q8_0", "int8_channel"]


@pytest.fixture(autouse=True)
def _settings_of_torch() -> Iterator[None]:
    """Contenders built in this process change them."""
    threads, engine = torch.get_num_threads(), torch.backends.quantized.engine
    yield
    torch.set_num_threads(threads)
    torch.backends.quantized.engine = engine


def ask(*requests: dict[str, Any]) -> list[dict[str, Any]]:
    """What one worker answers, in this process."""
    return list(worker.answers(worker.Bench(ALL), map(json.dumps, requests)))


def prepare(name: str, work: Workload = WORK) -> dict[str, Any]:
    workload = {field.name: getattr(work, field.name) for field in fields(work)}
    return {"do": "prepare", "name": name, "workload": workload}


# What is multiplied


@pytest.mark.parametrize("cache_bytes", [10_000, 1 << 17])
def test_rotation_passes_over_more_than_the_cache(cache_bytes: int) -> None:
    work = replace(WORK, cache_bytes=cache_bytes)
    for built in (halfbyte_linear(work, "q4_0", "auto", torch.float32), dense(work, torch.float32)):
        assert built.copies * built.copy_bytes >= 4 * cache_bytes


def test_copies_fit_into_the_memory_allowed() -> None:
    assert WORK.copies(300_000) == 2
    assert replace(WORK, cache_bytes=1 << 30).copies(100_000) == WORK.memory_bytes // 100_000
    with pytest.raises(UnsupportedError, match="--memory"):
        WORK.copies(WORK.memory_bytes // 2 + 1)


@pytest.mark.parametrize("format", ["q4_0", "int4_g128_zp", "int8_channel", "int8_tensor"])
def test_copies_differ_and_are_rows_of_the_slab(format: str) -> None:
    slab = WORK.codes(format)
    copies = [WORK.take(slab, copy) for copy in range(20)]
    assert len({copy.data.numpy().tobytes() for copy in copies}) == 20
    for at, copy in enumerate(copies):
        assert torch.equal(copy.dequantize(), slab.dequantize()[WORK.rows(at)])


# Who multiplies


def contender(name: str) -> Contender:
    return contenders.contender(name, ALL)


def allowed(name: str, m: int, work: Workload = WORK) -> float:
    return contender(name).arithmetic.error(work.activations(m))


NAMES = [peer.name for peer in (*PEERS, *TORCH)]
CONTENDERS = [*(one.name for one in select(BENCH_FORMATS, NAMES, ALL)), "halfbyte_qlinear", "onednn_qlinear"]


@pytest.mark.parametrize("name", CONTENDERS)
@pytest.mark.parametrize("m", [1, 5])
def test_a_contender_is_right(name: str, m: int) -> None:
    built = contender(name).build(WORK)
    assert relative_error(WORK, built, m) <= allowed(name, m)


@pytest.mark.parametrize("name", [*(peer.name for peer in RUNTIMES), "ort_qlinear"])
def test_a_runtime_is_right(name: str) -> None:
    pytest.importorskip({"ort": "onnxruntime", "ov": "openvino", "ggml": "llama_cpp"}[name.partition("_")[0]])
    built = contender(name).build(WORK)
    assert max(relative_error(WORK, built, m) / allowed(name, m) for m in (1, 5, 1)) <= 1


def test_a_wrong_contender_is_caught() -> None:
    def broken(change: Callable[[int, Tensor], Tensor]) -> float:
        right = dense(WORK, torch.float32)

        def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
            return lambda: (change(copy, y.clone()) for copy, y in enumerate(right.bind(x)()))

        return relative_error(WORK, replace(right, bind=bind), 2)

    assert broken(lambda copy, y: y) <= allowed("torch_fp32", 2)
    assert broken(lambda copy, y: y.roll(1, dims=-1)) > 0.1
    assert broken(lambda copy, y: y if copy == 0 else torch.zeros_like(y)) == pytest.approx(1)
    assert broken(lambda copy, y: y.index_fill(1, torch.tensor([79]), float("nan"))) == float("inf")


def test_unknown_names_are_refused() -> None:
    for names in (["q5_9"], []), (["q4_0"], ["tensorflow"]):
        with pytest.raises(HalfbyteError, match=r"q5_9|tensorflow"):
            select(*names)


# The worker


def test_worker_answers_in_order() -> None:
    prepared, checked, measured = ask(prepare("halfbyte:q4_0"), {"do": "check", "m": 3}, {"do": "measure", "m": 3, "min_time": 0.001})
    assert prepared == {"ok": True, "copy_bytes": 80 * 128 // 32 * 18, "copies": 7}
    assert checked["ok"]
    assert 0 <= checked["error"] <= checked["allowed"] < 0.03
    assert measured["ok"]
    assert 0 < measured["min"] <= measured["median"] <= measured["max"]


def test_worker_says_what_is_missing_or_unsupported(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "onnxruntime", None)
    odd = replace(WORK, n=81)
    missing, unsupported, fine = ask(prepare("ort_int4_g32"), prepare("torch_int4", odd), prepare("torch_fp32", odd))
    assert missing == {"ok": False, "reason": "onnxruntime is not installed"}
    assert not unsupported["ok"]
    assert "N % 16" in unsupported["reason"]
    assert fine["ok"]


def test_a_worker_that_dies_or_hangs_gives_a_reason() -> None:
    with Worker(1) as dying:
        dying._process.kill()
        with pytest.raises(WorkerError, match="signal 9"):
            dying.ask("check", m=1)
    with Worker(1) as hanging, pytest.raises(WorkerError, match="no answer within"):
        hanging.ask("check", timeout=0.01, m=1)


def test_a_worker_that_hangs_is_not_said_to_have_died(monkeypatch: pytest.MonkeyPatch) -> None:
    """Though it ends before the thread that kills it does."""
    with Worker(1) as hanging:
        kill, ended = hanging._process.kill, Event()

        def kill_slowly() -> None:
            kill()
            ended.wait(60)

        monkeypatch.setattr(hanging._process, "kill", kill_slowly)
        try:
            with pytest.raises(WorkerError, match="no answer within"):
                hanging.ask("check", timeout=0.01, m=1)
        finally:
            ended.set()


def test_cores_are_distinct_and_usable() -> None:
    chosen = cores(1000)
    assert len(set(chosen)) == len(chosen) == (machine().cores if sys.platform == "linux" else 0)
    assert cores(1) == chosen[:1]


# The whole


def test_a_small_run_end_to_end(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "report.json"
    arguments = "--shapes 81x128 --m 3 --threads 1 --formats q4_0 --peers torch_fp32,torch_int4 --rounds 2 --min-time 0.001 --memory 64"
    assert cpu_main.main([*arguments.split(), "--json", str(file)]) == 0
    printed = capsys.readouterr().out
    assert "N=81 K=128, 1 thread" in printed
    assert "not measured: torch int4pack g128: UnsupportedError" in printed
    data = json.loads(file.read_text())
    assert data["schema"] == 1
    assert data["versions"]["torch"].split("+")[0] == torch.__version__.split("+")[0]
    ways = ("", ":float", ":bf16") if current().bf16_dot and current().tuning.bf16_pays else ("", ":float")
    names = [*(f"halfbyte:q4_0{way}" for way in ways), "torch_fp32"]
    assert [(one["contender"], one["m"]) for one in data["measurements"]] == [(name, 3) for name in names]
    for one in data["measurements"]:
        assert set(one) == set(Measurement.__dataclass_fields__)
        assert len(one["samples"]) == 2
        assert all(sample["idle"] for sample in one["samples"])
        assert 0 < one["seconds"] < 1
        assert one["best_peer"] > 0
        assert one["copies"] * one["copy_bytes"] > data["settings"]["cache_bytes"] or one["copies"] == 256
    assert [one["contender"] for one in data["absences"]] == ["torch_int4"]


@pytest.mark.parametrize("arguments", ["--formats q9_0", "--peers nobody", "--threads 9999", "--m 0", "--rounds 0"])
def test_a_senseless_request_is_one_line(arguments: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cpu_main.main(arguments.split()) == 2
    assert capsys.readouterr().err.count("\n") == 1


# What is reported


def sample(median: float, dot_peak: float = 100.0) -> Sample:
    return Sample(median, median, median, 1, True, Ceilings(read_bandwidth=10.0, dot_peak=100.0, fma_peak=20.0), dot_peak)


def test_rounds_on_a_busy_host_are_left_out() -> None:
    samples = [sample(1.0), sample(2.0, dot_peak=50.0), sample(1.2), sample(2.2, dot_peak=50.0), sample(2.1, dot_peak=79.0)]
    found = summarize(samples, 100.0, "dot_peak", nbytes=5, operations=30)
    assert found["seconds"] == pytest.approx(1.1)
    assert found["steady"] == 2
    assert summarize(samples[1:2], 100.0, "dot_peak", 5, 30)["seconds"] == 2.0  # better than nothing


def test_fraction_is_of_the_ceiling_that_binds() -> None:
    assert summarize([sample(2.0)], 100.0, "dot_peak", nbytes=10, operations=50)["fraction"] == pytest.approx(0.5)  # 1 s to read
    assert summarize([sample(2.0)], 100.0, "fma_peak", nbytes=10, operations=30)["fraction"] == pytest.approx(0.75)  # 1.5 s of FMA
    assert summarize([sample(2.0)], 100.0, None, nbytes=10, operations=30)["fraction"] is None
    assert summarize([sample(2.0)], 100.0, None, nbytes=10, operations=10)["fraction"] == pytest.approx(0.5)


def report() -> Report:
    def measurement(name: str, m: int, seconds: float, peer: bool) -> Measurement:
        summary = summarize([sample(seconds)], 100.0, "dot_peak", 64, 128 * m)
        return Measurement(name, name, "q4_0", peer, 8, 16, m, 1, 64, 9, 0.001, 0.01, **summary, samples=[sample(seconds)])

    ranked = rank([measurement("halfbyte", 1, 10.0, False), measurement("a", 1, 20.0, True), measurement("b", 1, 15.0, True)])
    return Report("2026-01-01", {"cpu": "C"}, {"torch": "2"}, {"rounds": 1}, [*ranked, measurement("halfbyte", 4, 12.0, False)])


def test_ratio_is_to_the_best_peer() -> None:
    assert [one.best_peer for one in report().measurements] == [1.5, 0.75, 1.0, None]


def test_tables() -> None:
    plain = text(report()).splitlines()
    assert "halfbyte  4.00  10000 ms ×1.50 64%  12000 ms 53%" in plain
    assert next(line for line in plain if line.startswith("b ")).split()[-1] == "-"
    assert len({len(line) for line in plain[5:9]}) == 1
    assert "reads 0 (0-0) GB/s" in plain[3]


def labels(svg: str) -> list[str]:
    return [element.text or "" for element in ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}text")]


def test_a_plot_names_what_it_shows() -> None:
    shown = labels(plot(report()))
    for label in {one.label for one in report().measurements} | {"GFLOP/s", "M, rows of activations"}:
        assert label in shown
    assert any(label.startswith("ceiling: ") for label in shown)


@pytest.mark.parametrize("log", [False, True])
def test_points_lie_inside_the_axes_in_order(log: bool) -> None:
    points = [(1.0, 20.0), (7.0, 300.0), (512.0, 1800.0)]
    lines = {"<ceiling> & more": [(1.0, 2000.0), (512.0, 2000.0)]}
    svg = line_plot({"a": points}, title="t", x_label="x", y_label="y", log_x=log, log_y=log, lines=lines)
    circles = list(ElementTree.fromstring(svg).iter("{http://www.w3.org/2000/svg}circle"))
    at = [(float(circle.get("cx")), float(circle.get("cy"))) for circle in circles]
    assert [x for x, _ in at] == sorted(x for x, _ in at)
    assert [y for _, y in at] == sorted((y for _, y in at), reverse=True)
    assert all(70 <= x <= 610 and 44 <= y <= 426 for x, y in at)
    assert "<ceiling> & more" in labels(svg)


@pytest.mark.parametrize(
    ("points", "complaint"), [([], "at least one point"), ([(0.0, 1.0)], "positive, got 0"), ([(1.0, float("nan"))], "got nan")]
)
def test_what_cannot_be_plotted_is_refused(points: list[tuple[float, float]], complaint: str) -> None:
    with pytest.raises(HalfbyteError, match=complaint):
        line_plot({"a": points}, title="", x_label="", y_label="", log_x=True)

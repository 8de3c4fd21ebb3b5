"""The page of `halfbyte bench --model`: a decode step, layer by layer."""

from __future__ import annotations

from halfbyte.bench.pages.charts import Bar, bars
from halfbyte.bench.pages.page import card, page, rows
from halfbyte.bench.step import StepOp, StepReport
from halfbyte.timing import time_text


def step_page(report: StepReport) -> str:
    """Return the page of a measured step."""
    timed = [op for op in report.ops if op.step_seconds is not None]
    lines = [_bar(op, report) for op in timed]
    rest = report.rest_seconds
    if rest > 0:
        shown = f"{time_text(rest)} · {rest / report.step_seconds:.0%}"
        lines.append(Bar("attention, norms and all else", rest, shown, "the whole step without the linear layers above", colour=7))
    least = sum(op.calls * op.least for op in timed if op.least is not None)
    tiles = {
        "a decode step of one sequence": time_text(report.step_seconds),
        "tokens per second": f"{1 / report.step_seconds:,.0f}",
        "in linear layers, one by one": time_text(report.linear_seconds),
        "of the linear layers' roofline": f"{least / report.linear_seconds:.0%}" if report.linear_seconds else "-",
    }
    note = f"Each linear layer, timed by itself over weights that no cache holds, times its calls. Mark: the roofline. {report.rest_text}."
    columns = ("op", "kernel", "with", "shape", "format", "layers", "one call", "roofline", "of the step")
    cards = [card("Where the time goes", bars(lines), note=note, wide=True)]
    cards.append(card("Kernels", rows(columns, (_cells(op, report) for op in report.ops), 5), wide=True))
    versions = " · ".join(f"{name} {version}" for name, version in report.versions.items())
    about = [f"{report.machine} · {report.dtype} activations · {report.date}", versions]
    return page(f"{report.model}: a decode step", about, tiles, cards, report.to_json())


def _bar(op: StepOp, report: StepReport) -> Bar:
    """Return the bar of an op that was timed."""
    seconds = op.step_seconds or 0.0
    name = f"{op.name} × {op.calls}" if op.calls > 1 else op.name
    tip = [f"{'×'.join(map(str, op.shape))} {op.format}, {op.kernel}", f"one call: {time_text(op.seconds or 0)}"]
    if op.of_roofline is not None:
        tip.append(f"{op.of_roofline:.0%} of the roofline")
    mark = None if op.least is None else op.calls * op.least
    return Bar(name, seconds, f"{time_text(seconds)} · {seconds / report.step_seconds:.0%}", "\n".join(tip), mark=mark)


def _cells(op: StepOp, report: StepReport) -> tuple[str, ...]:
    layers = f"{op.layers[0]} to {op.layers[-1]}" if len(op.layers) > 1 else ", ".join(map(str, op.layers))
    one_call, of_roofline, of_step = "", "", ""
    if op.seconds is not None and op.step_seconds is not None:
        one_call, of_step = time_text(op.seconds), f"{op.step_seconds / report.step_seconds:.1%}"
        of_roofline = "" if op.of_roofline is None else f"{op.of_roofline:.0%}"
    return op.name, op.kernel, ", ".join(op.fused), "×".join(map(str, op.shape)), op.format, layers, one_call, of_roofline, of_step

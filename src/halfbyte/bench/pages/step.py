"""The page of `halfbyte bench --model`: a decode step, layer by layer."""

from __future__ import annotations

from halfbyte.bench.pages.charts import Bar, bars
from halfbyte.bench.pages.page import card, page, rows
from halfbyte.bench.step import StepOp, StepReport, rest_text
from halfbyte.timing import time_text


def step_page(report: StepReport) -> str:
    """Return the page of a measured step."""
    timed = [op for op in report.ops if op.seconds is not None]
    rest = report.step_seconds - report.linear_seconds
    lines = [
        Bar(
            f"{op.name}{_times(op)}",
            op.calls * (op.seconds or 0),
            f"{time_text(op.calls * (op.seconds or 0))} · {op.calls * (op.seconds or 0) / report.step_seconds:.0%}",
            _tip(op),
            mark=None if op.least is None else op.calls * op.least,
        )
        for op in timed
    ]
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
    note = f"Each linear layer, timed by itself over weights that no cache holds, times its calls. Mark: the roofline. {rest_text(rest)}."
    columns = ("op", "kernel", "with", "shape", "format", "layers", "one call", "roofline", "of the step")
    cards = [card("Where the time goes", bars(lines), note=note, wide=True)]
    cards.append(card("Kernels", rows(columns, (_cells(op, report) for op in report.ops), 5), wide=True))
    versions = " · ".join(f"{name} {version}" for name, version in report.versions.items())
    about = [f"{report.machine} · {report.dtype} activations · {report.date}", versions]
    return page(f"{report.model}: a decode step", about, tiles, cards, report.to_json())


def _times(op: StepOp) -> str:
    return f" × {op.calls}" if op.calls > 1 else ""


def _tip(op: StepOp) -> str:
    lines = [f"{'×'.join(map(str, op.shape))} {op.format}, {op.kernel}", f"one call: {time_text(op.seconds or 0)}"]
    if op.least is not None and op.seconds:
        lines.append(f"{op.least / op.seconds:.0%} of the roofline")
    return "\n".join(lines)


def _cells(op: StepOp, report: StepReport) -> tuple[str, ...]:
    layers = f"{op.layers[0]} to {op.layers[-1]}" if len(op.layers) > 1 else ", ".join(map(str, op.layers))
    one, least, part = "", "", ""
    if op.seconds is not None:
        one, part = time_text(op.seconds), f"{op.calls * op.seconds / report.step_seconds:.1%}"
        least = "" if op.least is None else f"{op.least / op.seconds:.0%}"
    return op.name, op.kernel, ", ".join(op.fused), "×".join(map(str, op.shape)), op.format, layers, one, least, part

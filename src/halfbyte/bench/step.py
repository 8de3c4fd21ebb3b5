"""A language model's decode step, layer by layer: each linear layer timed by itself, and what the whole step takes.

Called by `halfbyte bench --model`. The times of the linear layers are those of `explain`, over weights that no cache holds; equal layers
are timed once.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime

import halfbyte
from halfbyte.bench.cpu import versions
from halfbyte.decoder.explain import DecoderExplanation
from halfbyte.decoder.program import Lowered
from halfbyte.dispatch.explain import explain
from halfbyte.errors import FormatError
from halfbyte.formats.spec import as_format
from halfbyte.nn.report import table
from halfbyte.timing import time_text

SCHEMA = 1
_SHOWN_INNER = {"int8": "int8", "float": "float"}  # what a CPU's kernels of linear layers are called -> `compute`


@dataclass(frozen=True)
class StepOp:
    """An op of the program, in all layers that are equal.

    Attributes:
        layers: Indices of those layers; none for what is before or after them.
        calls: How often a step computes it.
        fused: Names of the ops that its kernel computes, too.
        seconds: One call; None where it was not timed.
        least: What the roofline allows for one call.
    """

    layers: tuple[int, ...]
    calls: int
    name: str
    kind: str
    shape: tuple[int, ...]
    format: str
    kernel: str
    fused: tuple[str, ...]
    seconds: float | None
    least: float | None


@dataclass(frozen=True)
class StepReport:
    """A decode step of one sequence.

    Attributes:
        step_seconds: The whole step, measured while text was generated.
        ops: Those that have a kernel of their own, in their order.
    """

    date: str
    model: str
    machine: str
    dtype: str
    versions: dict[str, str]
    step_seconds: float
    ops: tuple[StepOp, ...]

    @property
    def linear_seconds(self) -> float:
        """The sum of what was timed by itself."""
        return sum(op.calls * op.seconds for op in self.ops if op.seconds is not None)

    def to_json(self) -> dict[str, object]:
        return {"schema": SCHEMA, "kind": "step", **asdict(self)}

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("op", "kernel", "shape", "format", "calls", "time", "roofline", "of the step")]
        for op in self.ops:
            shape = "×".join(map(str, op.shape))
            timed = ("", "", "")
            if op.seconds is not None:
                least = "" if op.least is None else f"{op.least / op.seconds:.0%}"
                timed = (time_text(op.calls * op.seconds), least, f"{op.calls * op.seconds / self.step_seconds:.1%}")
            lines.append((op.name, op.kernel, shape, op.format, str(op.calls), *timed))
        rest = self.step_seconds - self.linear_seconds
        heading = f"{self.model}: a decode step of one sequence on {self.machine} takes {time_text(self.step_seconds)}"
        return "\n".join([f"{self.date} · {heading}", "", *table(lines, left=4), "", rest_text(rest)])


def rest_text(rest: float) -> str:
    """What the rest of a step is, in words."""
    if rest < 0:
        return f"one by one the linear layers take {time_text(-rest)} longer than the whole step, which finds weights in a cache"
    return f"attention, norms and all else: {time_text(rest)}"


def measure_step(
    explanation: DecoderExplanation,
    device: str,
    model: str,
    step_seconds: float,
    progress: Callable[[float, float, str], object] = lambda done, total, doing: None,
) -> StepReport:
    """Times the linear layers of a decode step.

    Args:
        explanation: The program, with the kernels of this device.
        device: "cpu" or "cuda".
        model: Its name.
        step_seconds: What the whole step takes.
        progress: Called with (done, total, what is timed).
    """
    groups = explanation.groups
    kernels = [(layers, lowered) for layers, group in groups for lowered in group if lowered.fused_into is None]
    fused = {
        (layers, lowered.op.name): tuple(other.op.name for other in group if other.fused_into == lowered.op.name)
        for layers, group in groups
        for lowered in group
    }
    timed: dict[tuple[object, ...], tuple[float | None, float | None]] = {}
    ops = []
    for at, (layers, lowered) in enumerate(kernels):
        op = lowered.op
        progress(at, len(kernels), op.name)
        key = (op.kind, op.shape, op.format, lowered.kernel)
        if key not in timed:
            timed[key] = _timed(lowered, explanation, device)
        about = (op.name, op.kind, tuple(op.shape or ()), op.format or "", lowered.kernel, fused[layers, op.name])
        ops.append(StepOp(tuple(layers), max(1, len(layers)), *about, *timed[key]))
    return StepReport(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        model=model,
        machine=explanation.machine,
        dtype=str(explanation.dtype).removeprefix("torch."),
        versions={"python": sys.version.split()[0], "halfbyte": halfbyte.__version__, **versions()},
        step_seconds=step_seconds,
        ops=tuple(ops),
    )


def _timed(lowered: Lowered, explanation: DecoderExplanation, device: str) -> tuple[float | None, float | None]:
    """Seconds of one call of a linear layer, and those that the roofline allows; None for all else."""
    op = lowered.op
    if op.kind != "linear" or len(op.shape or ()) != 2:
        return None, None
    try:
        format = as_format(op.format)
    except FormatError:  # a layer in floating point
        return None, None
    n, k = op.shape
    compute = _SHOWN_INNER.get(lowered.kernel, "auto") if device == "cpu" else "auto"
    found = explain(explanation.rows, n, k, format, dtype=explanation.dtype, compute=compute, device=device)
    return found.measured, None if found.roofline is None else found.roofline.seconds

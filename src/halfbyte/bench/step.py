"""Time of a language model's decode step: of the whole step, and of each linear layer by itself.

Called by `halfbyte bench --model`. `explain` times one call of each linear layer on random weights that no cache holds, once for all layers
of the model that are equal. What is left of the step is the time of all other ops, which are not timed one by one.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import NamedTuple

import halfbyte
from halfbyte.bench.cpu import versions
from halfbyte.decoder.explain import Explanation
from halfbyte.decoder.program import Op
from halfbyte.dispatch.explain import explain
from halfbyte.errors import FormatError
from halfbyte.formats.spec import as_format
from halfbyte.nn.report import table
from halfbyte.timing import time_text

SCHEMA = 1  # of `StepReport.to_json`


@dataclass(frozen=True)
class StepOp:
    """An op of the decode step with a kernel of its own; one for all layers of the model in which it is equal.

    Attributes:
        layers: Indices of these layers; empty for an op before or after the layers.
        calls: How often the step computes it.
        name: Name of the op in its layer, such as "qkv".
        kind: `Op.kind`, such as "linear".
        shape: Shape of its weight, [N, K] of a linear layer; () if it has none.
        format: Format or dtype of its weight; "" if it has none.
        kernel: Name of the kernel.
        fused: Names of the ops that the same kernel computes.
        seconds: Time of one call; None: not timed, as for all ops but quantized linear layers.
        least: Lower bound of `seconds` by the roofline; None: unknown.
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

    @property
    def step_seconds(self) -> float | None:
        """Seconds of all its calls in a step; None: not timed."""
        return None if self.seconds is None else self.calls * self.seconds

    @property
    def of_roofline(self) -> float | None:
        """The roofline's lower bound as a fraction of the measured time; None: not timed, or no bound is known."""
        return self.least / self.seconds if self.seconds and self.least is not None else None


@dataclass(frozen=True)
class StepReport:
    """A decode step of one sequence.

    Attributes:
        date: Date and time in UTC.
        model: Name of the model.
        machine: Name of the GPU, or "the CPU".
        dtype: Dtype of activations, such as "float32".
        versions: Versions of Python, halfbyte and other packages.
        step_seconds: Time of the whole step, measured while text was generated.
        ops: The ops that have a kernel of their own, in the order in which they are computed first.
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
        """The sum of the ops that were timed: the quantized linear layers, one by one."""
        return sum(op.step_seconds for op in self.ops if op.step_seconds is not None)

    @property
    def rest_seconds(self) -> float:
        """The step without `linear_seconds`; negative where the step finds weights in a cache, as they were timed without one."""
        return self.step_seconds - self.linear_seconds

    @property
    def rest_text(self) -> str:
        """What `rest_seconds` is, in words."""
        if self.rest_seconds < 0:
            longer = time_text(-self.rest_seconds)
            return f"one by one the linear layers take {longer} longer than the whole step, which finds weights in a cache"
        return f"attention, norms and all else: {time_text(self.rest_seconds)}"

    def to_json(self) -> dict[str, object]:
        """Return the report as a document of JSON."""
        return {"schema": SCHEMA, "kind": "step", **asdict(self)}

    def __str__(self) -> str:
        lines: list[tuple[str, ...]] = [("op", "kernel", "shape", "format", "calls", "time", "roofline", "of the step")]
        for op in self.ops:
            shape = "×".join(map(str, op.shape))
            times = ("", "", "")
            if op.step_seconds is not None:
                of_roofline = "" if op.of_roofline is None else f"{op.of_roofline:.0%}"
                times = (time_text(op.step_seconds), of_roofline, f"{op.step_seconds / self.step_seconds:.1%}")
            lines.append((op.name, op.kernel, shape, op.format, str(op.calls), *times))
        heading = f"{self.model}: a decode step of one sequence on {self.machine} takes {time_text(self.step_seconds)}"
        return "\n".join([f"{self.date} · {heading}", "", *table(lines, left=4), "", self.rest_text])


class _Times(NamedTuple):
    """`StepOp.seconds` and `least`."""

    seconds: float | None
    least: float | None


def measure_step(
    explanation: Explanation,
    device: str,
    model: str,
    step_seconds: float,
    progress: Callable[[float, float, str], object] = lambda done, total, doing: None,
) -> StepReport:
    """Time the quantized linear layers of a decode step.

    Args:
        explanation: The ops of the step, with their kernels on this device.
        device: "cpu" or "cuda".
        model: Name of the model.
        step_seconds: Measured time of the whole step.
        progress: Called with (number of ops done, number of ops, name of the op that is timed next).

    Returns:
        The times. Linear layers of equal shape, format, kernel and settings are timed once.
    """
    not_fused = [(layers, lowered, group) for group, layers, *_ in explanation.groups for lowered in group if lowered.fused_into is None]
    timed: dict[tuple[object, ...], _Times] = {}
    ops = []
    for done, (layers, lowered, group) in enumerate(not_fused):
        op = lowered.op
        progress(done, len(not_fused), op.name)
        key = (op.kind, op.shape, op.format, op.settings, lowered.kernel)
        if key not in timed:
            timed[key] = _time(op, explanation, device)
        ops.append(
            StepOp(
                layers=tuple(layers),
                calls=max(1, len(layers)),
                name=op.name,
                kind=op.kind,
                shape=op.shape,
                format=op.format,
                kernel=lowered.kernel,
                fused=tuple(other.op.name for other in group if other.fused_into == op.name),
                seconds=timed[key].seconds,
                least=timed[key].least,
            )
        )
    return StepReport(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        model=model,
        machine=explanation.machine,
        dtype=str(explanation.dtype).removeprefix("torch."),
        versions={"python": sys.version.split()[0], "halfbyte": halfbyte.__version__, **versions()},
        step_seconds=step_seconds,
        ops=tuple(ops),
    )


def _time(op: Op, explanation: Explanation, device: str) -> _Times:
    """Time one call of a quantized linear layer; other ops are not timed."""
    if op.kind != "linear" or len(op.shape) != 2:
        return _Times(None, None)
    try:
        format = as_format(op.format)
    except FormatError:  # a dtype: the layer is not quantized
        return _Times(None, None)
    n, k = op.shape
    found = explain(
        explanation.rows,
        n,
        k,
        format,
        dtype=explanation.dtype,
        compute=op.setting("compute") or "auto",
        activation=op.setting("activation_scales") or "block",
        sparse=op.setting("sparsity") is not None,
        device=device,
    )
    return _Times(found.measured, None if found.roofline is None else found.roofline.seconds)

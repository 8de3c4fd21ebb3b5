"""`explain` of a model: its ops, with the kernel of each on a device, parts that are the same together.

`explain_decoder` explains a program, for `LanguageModel.explain` and `halfbyte explain`; explain_model.py of integrations/transformers
modules. The kernels are those that `lower_cpu.py` and `kernels_gpu.py` say.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import NamedTuple

import torch

from halfbyte.decoder import kernels_gpu, lower_cpu
from halfbyte.decoder.offload.expected import Expected, expected
from halfbyte.decoder.offload.placement import ON_GPU, Plan, Request, plan_of
from halfbyte.decoder.offload.rates import rates_of
from halfbyte.decoder.program import Lowered, Program, grouped, kernel_columns, lines_of, program_of
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.dispatch.explain_gpu import described_gpu
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.machine import named_device


class Explained(NamedTuple):
    """Parts of a model that are computed in the same way.

    Attributes:
        ops: Their ops, with the kernel of each; of modules that transformers computes, their quantized linear layers alone.
        layers: Indices of layers of a program; none for what is before or after the layers, and for modules.
        names: Of modules; none for parts of a program.
        reason: Why transformers computes what is around the ops.
    """

    ops: tuple[Lowered, ...]
    layers: tuple[int, ...] = ()
    names: tuple[str, ...] = ()
    reason: str | None = None

    def lines(self, *, shows_device: bool) -> list[str]:
        """Return what is said line by line; `shows_device`: with what is computed on the CPU."""
        rows = kernel_columns(self.ops, shows_device=shows_device)
        if not self.names:
            return lines_of(self.layers, rows)
        first, *more = self.names
        reason = [] if self.reason is None else [f"  as transformers computes it: {self.reason}"]
        return [f"{first}{f' and {len(more)} more' if more else ''}", *reason, *(f"  {line}" for line in lines_of((), rows) if rows)]


@dataclass(frozen=True)
class Explanation:
    """How a device computes one new token of each sequence; an encoder, some tokens.

    Attributes:
        heading: What is computed, in words.
        machine: Name of the GPU, or "the CPU".
        rows: Number of sequences; of an encoder, of tokens.
        dtype: Of activations.
        groups: Parts of the model.
        encoder: Whether it is an encoder.
        plan: What is on the CPU, the rest on a GPU; None: nothing was asked for.
        expected: Expected times of the plan.
        notes: What the caller says besides.
    """

    heading: str
    machine: str
    rows: int
    dtype: torch.dtype
    groups: tuple[Explained, ...]
    encoder: bool = False
    plan: Plan | None = None
    expected: Expected | None = None
    notes: tuple[str, ...] = ()

    @property
    def kernels(self) -> list[Lowered]:
        """What computes each op, of equal layers of the first."""
        return [lowered for group in self.groups for lowered in group.ops]

    @property
    def native_calls(self) -> list[str]:
        """The native calls that make up the step; none on a GPU."""
        return sorted({lowered.call for lowered in self.kernels if lowered.call is not None})

    def to_json(self) -> dict[str, object]:
        """Return what is said as a document of JSON."""
        groups = [{**group._asdict(), "ops": [lowered.to_json() for lowered in group.ops]} for group in self.groups]
        about = {"machine": self.machine, "encoder": self.encoder, "rows": self.rows, "dtype": str(self.dtype).removeprefix("torch.")}
        times = {} if self.expected is None else self.expected.to_json()
        placed = {} if self.plan is None else {"plan": {**self.plan.to_json(), **times}}
        return {**about, **placed, "native_calls": self.native_calls, "groups": groups, "notes": [*self.notes]}

    def __str__(self) -> str:
        lines = [self.heading] if self.plan is None else [self.heading, *str(self.plan).split("; "), *str(self.expected).splitlines()]
        for group in self.groups:
            lines += group.lines(shows_device=self.plan is not None)
        return "\n".join([*lines, *(f"note: {note}" for note in self.notes)])


def explain_decoder(
    spec: DecoderSpec,
    device: torch.device | str | None = None,
    rows: int = 1,
    dtype: torch.dtype | None = None,
    request: Request | None = None,
) -> Explanation:
    """Say which kernels decode one new token of each of several sequences.

    Args:
        spec: The model; its weights may be packed for any device.
        device: "cpu", "cuda", "cuda:1", … or the architecture of a GPU that is not here, such as "sm_90"; None: where the weights are.
        rows: Number of sequences.
        dtype: Of activations; None: float32 on a CPU, the only one there, and bfloat16 on a GPU.
        request: For a part of the model on the CPU, the rest on a GPU.

    Raises:
        ArgumentError: The device decodes no such number of sequences at the same time.
        UnsupportedError: The device is unknown, or a part of the model has no kernel there.
    """
    if rows < 1:
        raise ArgumentError(f"a step is for 1 or more sequences, got {rows}: pass how many there are")
    device = spec.embedding.device if device is None else device
    asked = named_device(device)
    if asked is not None and asked.type == "cpu" and request is None:
        if dtype not in (None, torch.float32):
            raise UnsupportedError(f"it computes in float32, not in {str(dtype).removeprefix('torch.')}")
        program = program_of(spec)
        kernels = lower_cpu.decode_kernels(program)
        if rows > (most := lower_cpu.most_decode(spec)):
            raise ArgumentError(f"this model decodes 1 to {most} sequences at a time on a CPU, got {rows}: ask for {most}, others wait")
        others = ", in addition to what torch computes" if any(lowered.call is None for lowered in kernels) else ""
        heading = f"{_heading(rows, 'the CPU', torch.float32)}\none native call ({lower_cpu.STEP}){others}"
        return Explanation(heading, "the CPU", rows, torch.float32, _grouped(program, kernels))
    here, dtype = described_gpu(str(device)), dtype or torch.bfloat16
    plan = None if request is None else plan_of(spec, request, dtype)
    name = "cuda" if asked is None else str(asked)  # a GPU that is not here is named by its architecture
    program = program_of(spec, name, ON_GPU if plan is None else plan.placement)
    machine = here.name if plan is None else f"{here.name} and the CPU"
    times = None if plan is None else expected(plan, rates_of(device), rows)
    groups = _grouped(program, kernels_gpu.decode_kernels(program, here, rows, dtype))
    return Explanation(_heading(rows, machine, dtype), machine, rows, dtype, groups, plan=plan, expected=times)


def _heading(rows: int, machine: str, dtype: torch.dtype) -> str:
    sequences = f"{rows} sequence{'s' if rows > 1 else ''}"
    return f"one new token of {sequences} on {machine}, {str(dtype).removeprefix('torch.')} activations"


def _grouped(program: Program, kernels: Iterable[Lowered]) -> tuple[Explained, ...]:
    """Return the ops of a program with their kernels, equal layers together."""
    each = iter(kernels)
    return tuple([Explained(ops, layers) for layers, ops in grouped((i, tuple([next(each) for _ in ops])) for i, ops in program.scopes())])

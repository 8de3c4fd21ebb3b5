"""`explain` of a language model: its program, with the kernel of each op on a device, layers that are the same together.

Called by `LanguageModel.explain` and `halfbyte explain`. The kernels are those that `lower_cpu.py` and `kernels_gpu.py` say.
"""

from __future__ import annotations

from dataclasses import dataclass

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


@dataclass(frozen=True)
class DecoderExplanation:
    """How a device decodes one new token of each sequence.

    Attributes:
        machine: Name of the GPU, or "the CPU".
        rows: Number of sequences.
        dtype: Of activations.
        program: The ops.
        kernels: What computes each of them, in the same order.
        plan: What is on the CPU, the rest on a GPU; None: nothing was asked for.
        expected: Expected times of the plan.
    """

    machine: str
    rows: int
    dtype: torch.dtype
    program: Program
    kernels: tuple[Lowered, ...]
    plan: Plan | None = None
    expected: Expected | None = None

    @property
    def groups(self) -> list[tuple[tuple[int, ...], tuple[Lowered, ...]]]:
        """Equal layers, by their indices, with their ops; what is before or after the layers has none."""
        kernels = iter(self.kernels)
        return grouped((layer, tuple(next(kernels) for _ in ops)) for layer, ops in self.program.scopes())

    def to_json(self) -> dict[str, object]:
        """Return what is said as a document of JSON."""
        groups = [{"layers": [*layers], "ops": [lowered.to_json() for lowered in ops]} for layers, ops in self.groups]
        about = {"machine": self.machine, "encoder": False, "rows": self.rows, "dtype": str(self.dtype).removeprefix("torch.")}
        times = {} if self.expected is None else self.expected.to_json()
        placed = {} if self.plan is None else {"plan": {**self.plan.to_json(), **times}}
        return {**about, **placed, "native_calls": self.native_calls, "groups": groups}

    @property
    def native_calls(self) -> list[str]:
        """The native calls that make up the step; none on a GPU."""
        return sorted({lowered.call for lowered in self.kernels if lowered.call is not None})

    def __str__(self) -> str:
        sequences = f"{self.rows} sequence{'s' if self.rows > 1 else ''}"
        lines = [f"one new token of {sequences} on {self.machine}, {str(self.dtype).removeprefix('torch.')} activations"]
        if self.plan is not None:
            lines += [*str(self.plan).split("; "), *str(self.expected).splitlines()]
        elif self.native_calls:
            others = any(lowered.call is None for lowered in self.kernels)
            lines.append(f"one native call ({', '.join(self.native_calls)}){', in addition to what torch computes' if others else ''}")
        for layers, group in self.groups:
            lines += lines_of(layers, kernel_columns(group, shows_device=self.plan is not None))
        return "\n".join(lines)


def explain_decoder(
    spec: DecoderSpec,
    device: torch.device | str | None = None,
    rows: int = 1,
    dtype: torch.dtype | None = None,
    request: Request | None = None,
) -> DecoderExplanation:
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
        return DecoderExplanation("the CPU", rows, torch.float32, program, tuple(kernels))
    here, dtype = described_gpu(str(device)), dtype or torch.bfloat16
    plan = None if request is None else plan_of(spec, request, dtype)
    name = "cuda" if asked is None else str(asked)  # a GPU that is not here is named by its architecture
    program = program_of(spec, name, ON_GPU if plan is None else plan.placement)
    lowered = tuple(kernels_gpu.decode_kernels(program, here, rows, dtype))
    if plan is None:
        return DecoderExplanation(here.name, rows, dtype, program, lowered)
    return DecoderExplanation(f"{here.name} and the CPU", rows, dtype, program, lowered, plan, expected(plan, rates_of(device), rows))

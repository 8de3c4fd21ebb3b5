"""`explain` for a GPU: the kernel that runs, what it is predicted to take, what was measured, and why no other runs."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from halfbyte.dispatch.candidate import Choice, Option
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import GpuCandidate, compute_of, packs_code_pairs, why_no_sparse_layout, why_no_triton
from halfbyte.dispatch.roofline import Ceilings, Roofline, gpu_ceilings, roofline
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.sparse import SPARSITY
from halfbyte.machine import GPUS, Gpu, gpu, named_device
from halfbyte.timing import time_text

EXPERTS_HAVE_ZEROS = "experts are packed with all of their zeros"


def shape_json(problem: Problem) -> dict[str, object]:
    """What was asked for."""
    shape = {"m": problem.m, "n": problem.n, "k": problem.k} | ({} if problem.op == "linear" else {"experts": problem.experts})
    return {"op": problem.op, **shape, "format": str(problem.format), "dtype": str(problem.dtype).removeprefix("torch.")}


def shape_text(problem: Problem) -> str:
    """The same on one line."""
    experts = "" if problem.op == "linear" else f"{problem.experts} experts of "
    dtype = str(problem.dtype).removeprefix("torch.")
    return f"{problem.op}  [{problem.m}, {problem.k}] x {experts}[{problem.n}, {problem.k}] {problem.format}, {dtype} activations"


def weight_text(problem: Problem, nbytes: int, sparsity: str | None) -> list[str]:
    """What the packed weight takes, of experts all of them; and `Explanation.sparsity`."""
    bits = 8 * nbytes / max(1, problem.experts * problem.n * problem.k)
    line = f"weight  {nbytes:,} bytes, {bits:.2f} bits per element"
    if sparsity == SPARSITY:
        return [f"{line}, {SPARSITY}: half of the codes, zeros, are left out"]
    return [line] if sparsity is None else [f"  not {SPARSITY}: {sparsity}", line]


@dataclass(frozen=True)
class GpuExplanation:
    """What `explain` found. Times are seconds; `measured` is None where nothing was run.

    sparsity  as in Explanation
    launcher  how an eager call reaches the kernel
    """

    problem: Problem
    gpu: Gpu
    choice: Choice[Problem, GpuCandidate]
    sparsity: str | None
    launcher: str
    weight_bytes: int
    roofline: Roofline
    measured: float | None

    def to_json(self) -> dict[str, object]:
        problem, taken, roof = self.problem, self.choice.taken, self.roofline
        return {
            **shape_json(problem),
            "compute": problem.compute,
            "activation": problem.activation,
            "machine": self.gpu.name,
            "arch": self.gpu.arch,
            "kernel": "torch" if taken is None else taken.candidate.name,
            "config": None if taken is None else str(taken.config),
            "expected_seconds": None if taken is None else taken.seconds,
            "expected_from": None if taken is None else "measurement" if taken.measured else "prediction",
            "measured_on": (taken and taken.measured) or None,
            "rejected": self.choice.reasons,
            "launcher": self.launcher,
            "weight_bytes": self.weight_bytes,
            "sparsity": self.sparsity,
            "roofline": {**roof._asdict(), "bound": roof.bound},
            "measured_seconds": self.measured,
            "of_roofline": roof.seconds / self.measured if self.measured else None,
        }

    def __str__(self) -> str:
        problem, taken, roof = self.problem, self.choice.taken, self.roofline
        integers = taken is not None and taken.candidate.compute == "int8"
        scheme = f", activations scaled per {problem.activation.replace('_', ' with ')}" if integers else ""
        lines = [
            shape_text(problem),
            f"machine  {self.gpu.name}: {self.gpu.arch}, {self.gpu.sms} multiprocessors, {self.gpu.l2 / 1e6:.0f} MB of L2",
        ]
        if taken is None:
            lines.append("kernel  none: torch dequantizes the whole weight and multiplies, at every call")
        else:
            first = "" if taken.candidate.multiplied(problem) is problem else "zeros put back first, then "
            lines.append(f"kernel  {taken.candidate.name}: {first}{taken.candidate.summary}{scheme}")
            lines.append(f"config  {taken.config}")
            lines.append(f"expected  {time_text(taken.seconds)}, {f'measured on {taken.measured}' if taken.measured else 'predicted'}")
        lines += [f"  not {name}: {reason}" for name, reason in self.choice.reasons.items()]
        lines.append(f"launcher  {self.launcher}")
        lines += weight_text(problem, self.weight_bytes, self.sparsity)
        parts = f"memory {time_text(roof.memory_seconds)}, arithmetic {time_text(roof.compute_seconds)}"
        lines.append(f"roofline  {time_text(roof.seconds)}, bound by {roof.bound} ({parts}; ceilings from the GPU's clocks)")
        if self.measured:
            lines.append(f"measured  {time_text(self.measured)}: {roof.seconds / self.measured:.0%} of the roofline")
        return "\n".join(lines)


def explain_gpu(problem: Problem, device: str, compute: str, *, measured: bool) -> GpuExplanation:
    """`device` is "cuda", "cuda:1", or the architecture of a GPU that is not here, of which nothing is measured."""
    absent, found = device in GPUS, described_gpu(device)
    problem = replace(problem, compute=compute_of(compute))
    if not (problem.m and problem.n and problem.k):
        raise ArgumentError(f"there is no kernel to explain for m={problem.m}, n={problem.n}, k={problem.k}: no size may be 0")
    sparsity = None
    if problem.sparse:
        experts = None if problem.op == "linear" else EXPERTS_HAVE_ZEROS
        sparsity = experts or why_no_sparse_layout(problem.format, (problem.n, problem.k), found) or SPARSITY
        problem = replace(problem, sparse=sparsity == SPARSITY)
    if problem.op == "linear" and not problem.sparse:
        problem = replace(problem, paired=packs_code_pairs(problem.format, (problem.n, problem.k), found))
    choice = choose(problem, found)
    if compute == "auto":  # the caller asked for none in particular
        auto = f"compute='auto' is {problem.compute!r} on a GPU"
        told = ((candidate, auto if candidate.compute != problem.compute else reason) for candidate, reason in choice.rejected)
        choice = replace(choice, rejected=tuple(told))
    nbytes = gpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=problem.sparse, paired=problem.paired).nbytes
    ceilings = gpu_ceilings(found)
    rate = ceilings.integer if problem.compute == "int8" else ceilings.half
    roof = roofline(problem, nbytes, Ceilings(ceilings.bandwidth, rate))
    seconds = None
    if measured and not absent and choice.taken is not None:
        seconds = _time(problem, found, choice.taken, torch.device("cuda", _index(device)))
    how = "the GPU is not here" if absent else launcher(_index(device))
    return GpuExplanation(problem, found, choice, sparsity, how, problem.experts * nbytes, roof, seconds)


def described_gpu(device: str) -> Gpu:
    """The GPU of "cuda" or "cuda:1", or one that need not be here, by its architecture."""
    if device not in GPUS:
        return gpu(_index(device))
    if (reason := why_no_triton()) is not None:
        raise UnsupportedError(f"which kernels {device} has is not known here: {reason}")
    return GPUS[device]


def _index(device: str) -> int:
    asked = named_device(device)
    if asked is None or asked.type != "cuda":
        raise UnsupportedError(f"there are no kernels for device {device!r}: use cpu, cuda, or an architecture ({', '.join(GPUS)})")
    return asked.index or 0


def launcher(index: int) -> str:
    """How eager calls on cuda:`index` reach their kernels, and if not the short way, why."""
    if (why := why_no_triton()) is not None:
        return f"none: {why}"
    from halfbyte.kernels.gpu.runtime import tape

    with torch.cuda.device(index):
        reason = tape.why_not_replayed(torch.device("cuda", index))
    return "direct" if reason is None else f"Triton's own, which takes the host longer: {reason}"


def _time(problem: Problem, gpu: Gpu, taken: Option[GpuCandidate], device: torch.device) -> float:
    from halfbyte.dispatch.measure import grouped_launches, linear_launches
    from halfbyte.kernels.gpu.runtime.clock import graph_times

    with torch.cuda.device(device):
        make = linear_launches if problem.op == "linear" else grouped_launches
        launches = make(problem, gpu, taken.candidate, taken.config, device)
        return graph_times({"it": launches})["it"].median

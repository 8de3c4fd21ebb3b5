"""`explain`: which kernel runs for a shape on this machine, why, which ones were rejected, and how far it is from the roofline."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, get_args

import torch

from halfbyte.dispatch.explain_gpu import GpuExplanation, explain_gpu
from halfbyte.dispatch.roofline import Ceilings, Roofline, linear_roofline
from halfbyte.dispatch.rules import Choice, choose_linear
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.cpu import probe, runtime
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import ISAS, current
from halfbyte.kernels.cpu.linear import KINDS, linear_kernel
from halfbyte.kernels.cpu.quantize import quantize
from halfbyte.kernels.problem import Activation, Problem
from halfbyte.layouts import cpu_tiles
from halfbyte.machine import machine
from halfbyte.quantizers import METHODS
from halfbyte.timing import measure

_MOST_BYTES = 1 << 29  # of weights to rotate over


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Times are seconds; `measured` is None where nothing was run."""

    problem: Problem
    isa: ISA
    threads: int
    choice: Choice
    tile: tuple[int, int]
    weight_bytes: int
    roofline: Roofline | None
    measured: float | None

    def to_json(self) -> dict[str, Any]:
        problem, roof = self.problem, self.roofline
        return {
            "m": problem.m,
            "n": problem.n,
            "k": problem.k,
            "format": str(problem.format),
            "dtype": str(problem.dtype).removeprefix("torch."),
            "activation": problem.activation,
            "machine": machine().cpu,
            "isa": self.isa.name,
            "isas_rejected": {isa.name: isa.missing() for isa in ISAS if isa.missing()},
            "threads": self.threads,
            "kernel": self.choice.taken.inner,
            "tile": {"rows": self.tile[0], "vectors": self.tile[1]},
            "rejected": {candidate.inner: reason for candidate, reason in self.choice.rejected},
            "weight_bytes": self.weight_bytes,
            "roofline": None if roof is None else {**roof._asdict(), "bound": roof.bound},
            "measured_seconds": self.measured,
            "of_roofline": None if roof is None or not self.measured else roof.seconds / self.measured,
        }

    def __str__(self) -> str:
        problem, roof, taken = self.problem, self.roofline, self.choice.taken
        dtype = str(problem.dtype).removeprefix("torch.")
        scheme = f", activations scaled per {problem.activation.replace('_', ' with ')}" if taken.inner == "int8" else ""
        lines = [
            f"linear  [{problem.m}, {problem.k}] x [{problem.n}, {problem.k}] {problem.format}, {dtype} activations",
            f"machine  {machine().cpu}: {self.isa.name}, {self.threads} thread{'s' if self.threads > 1 else ''} ({runtime.name()})",
            f"kernel  {taken.inner}: {taken.summary}{scheme}",
            f"tiles  up to {self.tile[0]} rows x {self.tile[1] * self.isa.lanes} outputs",
        ]
        lines += [f"  not {candidate.inner}: {reason}" for candidate, reason in self.choice.rejected]
        lines += [f"  not {isa.name}: {isa.missing()}" for isa in ISAS if isa.missing()]
        bits = 8 * self.weight_bytes / max(1, problem.n * problem.k)
        lines.append(f"weight  {self.weight_bytes / 1e6:.2f} MB, {bits:.2f} bits an element")
        if roof is not None:
            parts = f"memory {roof.memory_seconds * 1e3:.3f} ms, arithmetic {roof.compute_seconds * 1e3:.3f} ms"
            lines.append(f"roofline  {roof.seconds * 1e3:.3f} ms, bound by {roof.bound} ({parts}; ceilings measured just now)")
        if roof is not None and self.measured:
            lines.append(f"measured  {self.measured * 1e3:.3f} ms: {roof.seconds / self.measured:.0%} of the roofline")
        return "\n".join(lines)


def explain(
    m: int,
    n: int,
    k: int,
    format: str | Format,
    *,
    dtype: torch.dtype = torch.float32,
    compute: str = "auto",
    activation: str = "block",
    device: str = "cpu",
    measured: bool = True,
) -> Explanation | GpuExplanation:
    """Say which kernel `linear` takes for x [m, k] and a weight [n, k], and time it on random weights that no cache holds.

    device    "cpu", "cuda", "cuda:1", … or the architecture of a GPU that is not here, such as "sm_90"
    measured  False: only the choice, without the second or so that probing and timing take
    """
    if dtype not in KINDS or not dtype.is_floating_point:
        raise ArgumentError(f"linear takes activations of float32, bfloat16 or float16, got {dtype}")
    fmt = as_format(format)
    if activation not in get_args(Activation):
        raise ArgumentError(f"unknown activation scaling {activation!r}: use one of {', '.join(get_args(Activation))}")
    if device != "cpu":
        return explain_gpu(Problem("linear", m, n, k, fmt, dtype, "float", activation), device, compute, measured=measured)  # type: ignore[arg-type]
    isa, threads = current(), runtime.threads()
    choice = choose_linear(fmt, dtype, compute, isa)
    problem = Problem("linear", m, n, k, fmt, dtype, choice.taken.compute, activation)  # type: ignore[arg-type]
    geo = cpu_tiles.geometry(fmt, (n, k))
    roof, seconds = None, None
    if measured and m and n and k:
        before = _ceilings(choice, threads)
        seconds = _time(problem, choice)
        # Shared machines drift by the second: what it could do is the best of just before and just after.
        ceilings = Ceilings(*(max(pair) for pair in zip(before, _ceilings(choice, threads), strict=True)))
        roof = linear_roofline(m, n, k, geo.nbytes, dtype.itemsize, ceilings)
    tile = isa.taking(m, choice.taken.inner).tile(max(1, m), choice.taken.inner, fmt.bits, geo.block)
    return Explanation(problem, isa, threads, choice, tile, geo.nbytes, roof, seconds)


def _ceilings(choice: Choice, threads: int) -> Ceilings:
    peak = probe.dot_peak if choice.taken.inner == "int8" else probe.fma_peak
    return Ceilings(probe.read_bandwidth(threads), peak(threads))


def _time(problem: Problem, choice: Choice) -> float:
    """Median seconds of a call, over copies of the weight that together exceed the last-level cache."""
    weight = torch.randn(problem.n, problem.k)
    codes = quantize(weight, problem.format) if problem.format.block != "tensor" else None
    first = cpu_tiles.pack(codes or METHODS["absmax"](weight, problem.format, "weight")).data
    cache = machine().caches.l3 or 1 << 25
    copies = [first, *(first.clone() for _ in range(min(4 * cache, _MOST_BYTES) // max(1, first.nbytes)))]
    kernel = linear_kernel(problem.format, problem.n, problem.k, problem.dtype, choice.taken.inner, problem.activation)
    x = torch.randn(problem.m, problem.k).to(problem.dtype)
    turn = 0

    def call() -> None:
        nonlocal turn
        turn = (turn + 1) % len(copies)
        kernel(x, copies[turn].data_ptr(), None, float("-inf"), float("inf"))

    return measure(call, min_time=0.3).median

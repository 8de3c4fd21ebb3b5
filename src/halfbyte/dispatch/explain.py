"""`explain`: which kernel runs for a shape on this machine, why, which ones were rejected, and how far it is from the roofline.

Experts are linear layers that run together on a CPU, in one parallel region: the kernel is that of one.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import get_args, overload

import torch

from halfbyte.dispatch.candidate import Choice
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.cpu import CpuCandidate
from halfbyte.dispatch.explain_gpu import EXPERTS_HAVE_ZEROS, GpuExplanation, explain_gpu, shape_json, shape_text, weight_text
from halfbyte.dispatch.explain_shapes import AttentionShape, ConvShape, ExpertsShape, Shape, ShapeExplanation, explain_shape
from halfbyte.dispatch.packed import packed_format
from halfbyte.dispatch.roofline import Ceilings, Roofline, roofline
from halfbyte.errors import ArgumentError, check_type, check_whole
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.cpu import probe
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.elements import KINDS
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current, native
from halfbyte.kernels.cpu.codegen.tuning import Tiling
from halfbyte.kernels.cpu.linear import grouped
from halfbyte.kernels.cpu.linear.sparse import pack as pack_sparse
from halfbyte.kernels.cpu.linear.sparse import why_no_layout
from halfbyte.kernels.cpu.quantize.quantize import quantize
from halfbyte.kernels.problem import Activation, Problem
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.sparse import SPARSITY
from halfbyte.machine import machine, named_device
from halfbyte.quantizers import METHODS
from halfbyte.quantizers.sparse import as_sparsity, prune
from halfbyte.timing import measure, time_text

_MOST_BYTES = 1 << 29  # of weights to rotate over


@dataclass(frozen=True)
class Explanation:
    """What `explain` found. Times are seconds; `measured` is None where nothing was run.

    sparsity  "2:4" where zeros are left out; where it was asked for and they are not, why; else None
    """

    problem: Problem
    isa: ISA
    threads: int
    choice: Choice[Problem, CpuCandidate]
    weight_bytes: int
    sparsity: str | None
    roofline: Roofline | None
    measured: float | None

    @property
    def taken(self) -> CpuCandidate:
        """The kernel."""
        return self.choice.options[0].candidate

    @property
    def tile(self) -> Tiling:
        """How it cuts outputs into tiles."""
        return self.choice.options[0].config  # type: ignore[no-any-return]

    def to_json(self) -> dict[str, object]:
        problem, roof = self.problem, self.roofline
        return {
            **shape_json(problem),
            "activation": problem.activation,
            "machine": machine().cpu,
            "isa": self.isa.name,
            "isas_rejected": {isa.name: isa.missing() for isa in native() if isa.missing()},
            "threads": self.threads,
            "kernel": self.taken.name,
            "tile": {"rows": self.tile.rows, "vectors": self.tile.vectors},
            "rejected": self.choice.reasons,
            "weight_bytes": self.weight_bytes,
            "sparsity": self.sparsity,
            "roofline": None if roof is None else {**roof._asdict(), "bound": roof.bound},
            "measured_seconds": self.measured,
            "of_roofline": None if roof is None or not self.measured else roof.seconds / self.measured,
        }

    def __str__(self) -> str:
        problem, roof, taken, tile = self.problem, self.roofline, self.taken, self.tile
        scheme = f", activations scaled per {problem.activation.replace('_', ' with ')}" if taken.compute == "int8" else ""
        lines = [
            shape_text(problem),
            f"machine  {machine().cpu}: {self.isa.name}, {self.threads} thread{'s' if self.threads > 1 else ''} ({runtime.name()})",
            f"kernel  {taken.name}: {taken.summary}{scheme}",
            f"tiles  up to {tile.rows} rows x {tile.vectors * self.isa.lanes} outputs{' of expanded codes' * tile.expanded}",
        ]
        lines += [f"  not {name}: {reason}" for name, reason in self.choice.reasons.items()]
        lines += [f"  not {isa.name}: {isa.missing()}" for isa in native() if isa.missing()]
        lines += weight_text(problem, self.weight_bytes, self.sparsity)
        if roof is not None:
            parts = f"memory {time_text(roof.memory_seconds)}, arithmetic {time_text(roof.compute_seconds)}"
            lines.append(f"roofline  {time_text(roof.seconds)}, bound by {roof.bound} ({parts}; ceilings measured just now)")
        if roof is not None and self.measured:
            lines.append(f"measured  {time_text(self.measured)}: {roof.seconds / self.measured:.0%} of the roofline")
        return "\n".join(lines)


@overload
def explain(
    m: int,
    n: int,
    k: int,
    format: str | Format,
    *,
    dtype: torch.dtype = ...,
    compute: str = ...,
    activation: str = ...,
    experts: int | None = ...,
    sparse: bool = ...,
    device: torch.device | str = ...,
    measured: bool = ...,
) -> Explanation | GpuExplanation: ...
@overload
def explain(
    m: Shape,
    *,
    format: str | Format | None = ...,
    dtype: torch.dtype = ...,
    compute: str = ...,
    activation: str = ...,
    device: torch.device | str = ...,
    measured: bool = ...,
) -> ShapeExplanation: ...
def explain(
    m: int | Shape,
    n: int | None = None,
    k: int | None = None,
    format: str | Format | None = None,
    *,
    dtype: torch.dtype = torch.float32,
    compute: str = "auto",
    activation: str = "block",
    experts: int | None = None,
    sparse: bool = False,
    device: torch.device | str = "cpu",
    measured: bool = True,
) -> Explanation | GpuExplanation | ShapeExplanation:
    """Say which kernel `linear` takes for x [m, k] and a weight [n, k], and time it on random weights that no cache holds.

    Args:
        m: Rows of activations. Or a `ConvShape`, an `AttentionShape` or an `ExpertsShape`, without n and k: which kernels compute that;
            nothing is timed.
        n: Outputs.
        k: Inputs.
        format: Of the weight.
        dtype: Of the activations; of a convolution also int8, which is `qconv2d`.
        compute: As in `linear`.
        activation: As in `linear`.
        experts: instead, which one `grouped_linear` takes for m rows (a row is a token for one of its experts) and so many weights [n, k];
            the rows are spread evenly over them.
        sparse: For a 2:4 sparse weight.
        device: "cpu", "cuda", "cuda:1", … or the architecture of a GPU that is not here, such as "sm_90".
        measured: False: only the choice, without the second or so that probing and timing take.

    Returns:
        The kernel, the reasons why others were not taken, and times; `str()` is a text.

    Example:
        >>> print(hb.explain(1, 64, 64, "q4_0", measured=False) is not None)
        True
    """
    if dtype not in KINDS or not (dtype.is_floating_point or (isinstance(m, ConvShape) and dtype == torch.int8)):
        raise ArgumentError(f"linear takes activations of float32, bfloat16 or float16, got {dtype}")
    scalings = (*get_args(Activation), *(["image"] if isinstance(m, ConvShape) else []))
    if activation not in scalings:
        raise ArgumentError(f"unknown activation scaling {activation!r}: use one of {', '.join(scalings)}")
    if isinstance(m, ConvShape | AttentionShape | ExpertsShape):
        if n is not None or k is not None or experts is not None or sparse:
            raise ArgumentError(f"{type(m).__name__} has all sizes itself, got n, k, experts or sparse besides: leave them out")
        return explain_shape(m, None if format is None else as_format(format), dtype, compute, activation, device)
    check_type(m, int, "explain takes a number of rows, or the shape of an op", "for a model call hb.report, or `halfbyte explain --model`")
    if n is None or k is None or format is None:
        raise ArgumentError(f"explain takes m, n, k and a format, got {m}, {n}, {k} and {format}: pass all four, or a ConvShape")
    check_whole("a product", (m, n, k, *([] if experts is None else [experts])))
    fmt = as_format(format)
    if experts is not None and experts < 1:
        raise ArgumentError(f"grouped_linear has 1 or more experts, got {experts}: leave them out for linear")
    asked = named_device(device)
    on_cpu = asked is not None and asked.type == "cpu"
    fmt = packed_format(fmt, on_cpu=on_cpu)
    problem = Problem("linear" if experts is None else "grouped_linear", m, n, k, fmt, dtype, "float", activation, experts or 1)  # type: ignore[arg-type]
    if not on_cpu:
        return explain_gpu(replace(problem, sparse=sparse), str(device), compute, measured=measured)
    isa, threads = current(), runtime.threads()
    sparsity = (_why_dense(problem, isa) or SPARSITY) if sparse else None
    choice = choose(replace(problem, compute=compute, sparse=sparsity == SPARSITY), isa)  # type: ignore[arg-type]
    problem = choice.problem
    geo = cpu_tiles.geometry(fmt, (n, k), sparse=sparsity == SPARSITY)
    roof, seconds = None, None
    if measured and m and n and k:
        before = _ceilings(choice, threads)
        seconds = _time(problem, choice, geo)
        # Shared machines drift by the second: what it could do is the best of just before and just after.
        ceilings = Ceilings(*(max(pair) for pair in zip(before, _ceilings(choice, threads), strict=True)))
        roof = roofline(problem, geo.nbytes, ceilings)
    return Explanation(problem, isa, threads, choice, problem.experts * geo.nbytes, sparsity, roof, seconds)


def _why_dense(problem: Problem, isa: ISA) -> str | None:
    """Why a 2:4 sparse weight is packed as any other; None if it isn't."""
    if problem.op != "linear":
        return EXPERTS_HAVE_ZEROS
    return why_no_layout(problem.format, problem.n, problem.k, isa)


def _ceilings(choice: Choice[Problem, CpuCandidate], threads: int) -> Ceilings:
    peak = probe.dot_peak if choice.problem.compute == "int8" else probe.fma_peak
    return Ceilings(probe.read_bandwidth(threads), peak(threads))


def _time(problem: Problem, choice: Choice[Problem, CpuCandidate], geo: cpu_tiles.Geometry) -> float:
    """Median seconds of a call, over copies of the weight that together exceed the last-level cache."""
    weight = torch.randn(problem.n, problem.k, dtype=torch.float32, device="cpu")
    weight = prune(weight, as_sparsity(SPARSITY), "magnitude") if geo.sparse else weight
    codes = quantize(weight, problem.format) if problem.format.block != "tensor" else None
    packed = cpu_tiles.pack(codes or METHODS["absmax"](weight, problem.format, "weight"))
    matrix = (pack_sparse(packed) if geo.sparse else packed).data
    first = cpu_tiles.allocate(problem.experts * matrix.nbytes)
    first.view(problem.experts, -1)[:] = matrix
    cache = machine().caches.l3 or 1 << 25
    copies = [first, *(first.clone() for _ in range(min(4 * cache, _MOST_BYTES) // max(1, first.nbytes)))]
    kernel = choice.options[0].candidate.kernel(problem)
    x = torch.randn(problem.m, problem.k, dtype=torch.float32, device="cpu").to(problem.dtype)
    call_index = 0

    def call() -> None:
        nonlocal call_index
        call_index += 1
        data = copies[call_index % len(copies)]
        if problem.op == "linear":
            kernel(x, data.data_ptr(), None, float("-inf"), float("inf"))
        else:  # other experts at each turn
            grouped.run(kernel, x, [(call_index * problem.m + row) % problem.experts for row in range(problem.m)], data, None)

    return measure(call, min_time=0.3).median

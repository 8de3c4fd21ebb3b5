"""The GPU benchmark: halfbyte and its peers on linear layers, interleaved in one process by replays of CUDA graphs.

Each contender's weights rotate over more memory than the caches hold; medians of rounds are quoted. The floor is what the GPU takes
at the least: to read the same bytes, measured here by a kernel that only reads, or to do the arithmetic at the rate that a large
product of cuBLAS reached here (int8: at twice that rate, as the units are built).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from datetime import UTC, datetime
from functools import partial

import torch

import halfbyte
from halfbyte.bench.gpu_contenders import HALFBYTE, PEERS, Absent, Bind, GpuContender, GpuWork
from halfbyte.bench.gpu_report import GpuMeasurement, GpuReport
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu import compute_of
from halfbyte.errors import ArgumentError, HalfbyteError, check_counts
from halfbyte.formats.spec import as_format
from halfbyte.kernels.gpu.runtime.clock import copies, graph_times
from halfbyte.kernels.gpu.runtime.launch import compiling
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu, gpu

SHAPES = (
    *((4096, 4096), (14336, 4096), (4096, 14336), (8192, 8192), (28672, 8192), (8192, 28672)),
    *((11008, 4096), (3584, 18944), (151936, 896)),
)
MS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 1024, 4096)


@dataclass(frozen=True)
class GpuPlan:
    """What to measure."""

    shapes: tuple[tuple[int, int], ...] = SHAPES
    ms: tuple[int, ...] = MS
    formats: tuple[str, ...] = ("int4_g128",)
    dtypes: tuple[str, ...] = ("bfloat16",)
    computes: tuple[str, ...] = ("float",)
    activation: str = "row"
    peers: tuple[str, ...] = tuple(peer.name for peer in PEERS)
    rounds: int = 15


def run(
    plan: GpuPlan,
    progress: Callable[[str], None] = lambda doing: None,
    keep: Callable[[GpuReport], None] = lambda so_far: None,
    peers: Sequence[GpuContender] = PEERS,
) -> GpuReport:
    """Measure everything in the plan on the current GPU. `keep` is given the report after each weight."""
    names = {peer.name: peer for peer in peers}
    if unknown := set(plan.peers) - names.keys():
        raise ArgumentError(f"there is no peer {min(unknown)!r}: use some of {', '.join(names)}")
    check_counts("a benchmark", m=plan.ms, n=[n for n, _ in plan.shapes], k=[k for _, k in plan.shapes], rounds=(plan.rounds,))
    here = gpu(torch.cuda.current_device() if torch.cuda.is_available() else 0)
    report = GpuReport(
        date=datetime.now(UTC).strftime("%Y-%m-%d %H:%M UTC"),
        gpu=asdict(here),
        versions={"halfbyte": halfbyte.__version__, "torch": torch.__version__, "triton": __import__("triton").__version__},
        settings=asdict(plan),
        ceilings=_ceilings(here),
    )
    contenders = [HALFBYTE, *(names[name] for name in plan.peers)]
    for n, k in plan.shapes:
        for fmt in plan.formats:
            for dtype in plan.dtypes:
                for compute in plan.computes:
                    work = GpuWork(here, n, k, as_format(fmt), getattr(torch, dtype), compute, plan.activation)
                    progress(f"{n}x{k} {fmt} {dtype} {compute}")
                    report.measurements += _shape(plan, work, contenders, report)
                    keep(report)
                    torch.cuda.empty_cache()
    return report


def _shape(plan: GpuPlan, work: GpuWork, contenders: Sequence[GpuContender], report: GpuReport) -> list[GpuMeasurement]:
    binds: dict[GpuContender, Bind] = {}
    for contender in contenders:
        try:
            binds[contender] = contender.bind(work)
        except Absent as reason:
            _absent(report, work, contender, str(reason))
        except Exception as reason:  # whatever a peer raises
            _absent(report, work, contender, _short(reason))
    if HALFBYTE in binds:
        with compiling(torch.device("cuda", torch.cuda.current_device())):
            for m in plan.ms:
                binds[HALFBYTE](_activations(m, work))[-1]()
    geo = gpu_tiles.geometry(work.format, (work.n, work.k))
    reading = _read_seconds(geo.nbytes, work.gpu)
    found = []
    for m in plan.ms:
        rate = report.ceilings["integer" if work.compute == "int8" else "half"]
        other_bytes = work.dtype.itemsize * m * (work.k + work.n)
        floor = max(reading + other_bytes / report.ceilings["read"], 2 * m * work.n * work.k / rate)
        found += _rank(_rows(plan, work, binds, m, floor, report))
    return found


def _rows(plan: GpuPlan, work: GpuWork, binds: dict[GpuContender, Bind], m: int, floor: float, report: GpuReport) -> list[GpuMeasurement]:
    x = _activations(m, work)
    launches, errors = {}, {}
    for contender, bind in binds.items():
        try:
            launches[contender.name] = bind(x)
            y = launches[contender.name][-1]()
        except Exception as reason:  # whatever a peer raises
            launches.pop(contender.name, None)
            _absent(report, work, contender, f"M={m}: {_short(reason)}")
            continue
        errors[contender.name] = None if y.dtype == torch.int32 else _error(y, x, work)
    times = graph_times(launches, rounds=plan.rounds)
    problem = Problem("linear", m, work.n, work.k, work.format, work.dtype, compute_of(work.compute), work.activation)  # type: ignore[arg-type]
    taken = choose(problem, work.gpu).taken
    kernel = "torch" if taken is None else f"{taken.candidate.name} {taken.config}"
    return [
        GpuMeasurement(
            contender=contender.name,
            label=contender.label,
            peer=contender.peer,
            n=work.n,
            k=work.k,
            m=m,
            format=str(work.format),
            dtype=str(work.dtype).removeprefix("torch."),
            compute=work.compute,
            kernel="" if contender.peer else kernel,
            error=errors[contender.name],
            seconds=times[contender.name].median,
            spread=(times[contender.name].min, times[contender.name].max),
            floor=floor,
        )
        for contender in binds
        if contender.name in times
    ]


def _activations(m: int, work: GpuWork) -> torch.Tensor:
    return torch.randn(m, work.k, generator=torch.Generator("cuda").manual_seed(m), device="cuda").to(work.dtype)


def _short(error: Exception) -> str:
    words = " ".join(str(error).split())[:200]
    return words if isinstance(error, Absent | HalfbyteError) else f"{type(error).__name__}: {words}"


def _absent(report: GpuReport, work: GpuWork, contender: GpuContender, reason: str) -> None:
    line = f"{contender.label}, {work.n}x{work.k} {work.format} {work.compute}: {reason}"
    if line not in report.absences:
        report.absences.append(line)


def _rank(measurements: list[GpuMeasurement]) -> list[GpuMeasurement]:
    peers = [one for one in measurements if one.peer]
    if not peers:
        return measurements
    best = min(peers, key=lambda one: one.seconds)
    return [replace(one, best_peer=best.seconds / one.seconds, best_peer_name=best.label) for one in measurements]


def _error(y: torch.Tensor, x: torch.Tensor, work: GpuWork) -> float:
    """The relative error of up to 64 rows, in norm, against the dequantized weight in float64."""
    rows = x[:64].double()
    reference = torch.cat([rows @ part.double().T for part in work.weight.split(4096)], dim=1)
    return float((y[:64].double() - reference).norm() / reference.norm())


def _ceilings(here: Gpu) -> dict[str, float]:
    """Operations per second of 16 bits that cuBLAS reached on a large product, twice as many of int8, and bytes per second read."""
    side = 8192
    a, b = (torch.randn(side, side, device="cuda").to(torch.bfloat16) for _ in range(2))
    half = 2 * side**3 / graph_times({"half": [partial(torch.mm, a, b.t())]}, rounds=9)["half"].median
    return {"half": half, "integer": 2 * half, "read": (1 << 31) / _read_seconds(1 << 31, here)}


def _read_seconds(nbytes: int, here: Gpu) -> float:
    """The least seconds that a kernel takes to read so many bytes that no cache holds."""
    from halfbyte.kernels.gpu.runtime.probe import read_launches

    data = [torch.empty(nbytes, dtype=torch.uint8, device="cuda").random_() for _ in range(copies(nbytes, here.l2))]
    return min(time.median for time in graph_times(read_launches(data, here), rounds=7).values())

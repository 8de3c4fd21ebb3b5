"""The least time that a product can take: what must be moved and what must be computed, over what the machine can do."""

from __future__ import annotations

from functools import cache
from typing import NamedTuple

from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu


class Ceilings(NamedTuple):
    """bandwidth in bytes a second, operations a second of the units that a kernel uses."""

    bandwidth: float
    operations: float


class Roofline(NamedTuple):
    """Bytes and operations of a product, and the seconds that each takes at least."""

    nbytes: int
    operations: int
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_seconds >= self.compute_seconds else "arithmetic"


def linear_roofline(m: int, n: int, k: int, weight_bytes: int, element_bytes: int, ceilings: Ceilings) -> Roofline:
    """Of x [m, k] times a weight of `weight_bytes`: weights, activations and outputs move once, 2mnk operations are done."""
    nbytes = weight_bytes + element_bytes * m * (k + n)
    operations = 2 * m * n * k
    return Roofline(nbytes, operations, nbytes / ceilings.bandwidth, operations / ceilings.operations)


# GPUs


class Tiles(NamedTuple):
    """How a kernel cuts the result [M, N]: tiles of rows x columns, K shared by `split` blocks."""

    rows: int
    columns: int
    split: int = 1


class GpuCeilings(NamedTuple):
    """bandwidth  bytes a second that a kernel reads from memory
    half, integer  operations a second of the matrix units, dense: float16 and bfloat16, int8
    start  seconds that the smallest kernel of a graph takes
    """

    bandwidth: float
    half: float
    integer: float
    start: float


# Operations a clock of a multiprocessor's matrix units: float16 with float32 sums, int8. From NVIDIA's and AMD's white papers.
_OPERATIONS = {
    "sm_80": (2048, 4096),
    "sm_86": (512, 2048),
    "sm_89": (1024, 2048),
    "sm_90": (4096, 8192),
    "sm_100": (8192, 16384),
    "sm_120": (512, 2048),
    "gfx942": (2048, 4096),
}
# What of the clock's rates remains under load: measured on an H200 (sm_90), and assumed to be alike elsewhere.
_OF_BANDWIDTH = 0.93
_OF_HALF = 0.66
_OF_INTEGER = 0.70
_START = 1.6e-6


@cache
def gpu_ceilings(gpu: Gpu) -> GpuCeilings:
    """What `gpu` can do, from its clocks; where torch does not tell them, those of the reference machine of its architecture."""
    like = GPUS.get(gpu.arch) or min(GPUS.values(), key=lambda g: (g.backend != gpu.backend, abs(g.capability[0] - gpu.capability[0])))
    half, integer = _OPERATIONS[like.arch]
    cycles = gpu.sms * (gpu.clock or like.clock or 1e9)
    bandwidth = gpu.bandwidth or like.bandwidth or 1e12
    return GpuCeilings(_OF_BANDWIDTH * bandwidth, _OF_HALF * half * cycles, _OF_INTEGER * integer * cycles, _START)


class Skill(NamedTuple):
    """What part of the ceilings a kernel reaches where it is at its best, and seconds that it needs besides."""

    memory: float
    arithmetic: float
    more: float = 0.0


# Measured on an H200.
SKILLS = {
    "skinny": Skill(0.85, 0.45),
    "gemm_hopper": Skill(0.80, 0.90, 3e-6),
    "gemm_int8": Skill(0.85, 0.55, 2e-6),
    "gemm_int8_hopper": Skill(0.80, 0.90, 4e-6),
}


def predict(problem: Problem, gpu: Gpu, candidate: str, tiles: Tiles) -> float:
    """Seconds of a linear layer: bytes over bandwidth or operations of whole waves of tiles over the matrix units' rate."""
    ceilings, skill = gpu_ceilings(gpu), SKILLS[candidate]
    geo, element = gpu_tiles.geometry(problem.format, (problem.n, problem.k)), problem.dtype.itemsize
    row_tiles, column_tiles = -(-problem.m // tiles.rows), -(-problem.n // tiles.columns)
    count = row_tiles * column_tiles * tiles.split
    waves = -(-count // gpu.sms) * gpu.sms / count
    rate = ceilings.integer if problem.compute == "int8" else ceilings.half / (3 if element == 4 else 1)
    operations = 2 * row_tiles * tiles.rows * column_tiles * tiles.columns * problem.k
    # Weights that do not stay in the cache are read again for each of its fills.
    again = max(1, row_tiles * tiles.rows * problem.k * element / gpu.l2)
    nbytes = (
        geo.nbytes * again + element * problem.m * (problem.k + problem.n) + 8 * problem.m * problem.n * (tiles.split > 1) * tiles.split
    )
    arithmetic = operations * waves / (rate * skill.arithmetic)
    memory = nbytes / (ceilings.bandwidth * skill.memory)
    return ceilings.start + skill.more + max(arithmetic, memory)

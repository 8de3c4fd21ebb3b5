"""The least time that a product can take: what must be moved and what must be computed, over what the machine can do."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from halfbyte.kernels.problem import Compute, Problem, scaling_of
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu


class Ceilings(NamedTuple):
    """bandwidth in bytes per second, operations per second of the units that a kernel uses."""

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


def roofline(problem: Problem, matrix_bytes: int, ceilings: Ceilings) -> Roofline:
    """Weights of `matrix_bytes` (of experts those that rows are sent to, spread evenly), activations and outputs move once, 2mnk operations
    are done."""
    m, n, k = problem.m, problem.n, problem.k
    nbytes = min(max(m, 1), problem.experts) * matrix_bytes + problem.dtype.itemsize * m * (k + n)
    operations = 2 * m * n * k
    return Roofline(nbytes, operations, nbytes / ceilings.bandwidth, operations / ceilings.operations)


# GPUs


class Tiles(NamedTuple):
    """How a kernel cuts the result [M, N]: tiles of rows x columns, K shared by `split` blocks.

    even     tiles are cut, so that all multiprocessors have the same to do
    ordered  of experts: a launch before this one brings rows of one expert together
    """

    rows: int
    columns: int
    split: int = 1
    even: bool = False
    ordered: bool = False


class GpuCeilings(NamedTuple):
    """bandwidth  bytes per second that a kernel reads from memory
    half, integer  operations per second of the matrix units, dense: float16 and bfloat16, int8
    start  seconds that the smallest kernel of a graph takes
    clocks  a second, of all multiprocessors together
    """

    bandwidth: float
    half: float
    integer: float
    start: float
    clocks: float


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
# What of the clock's rates remains under load: measured on an H100 (sm_90), and assumed to be the same elsewhere.
_OF_BANDWIDTH = 0.93
_OF_HALF = 0.73
_OF_INTEGER = 0.70
_START = 1.6e-6


@cache
def gpu_ceilings(gpu: Gpu) -> GpuCeilings:
    """What `gpu` can do, from its clocks; where torch does not tell them, those of the reference machine of its architecture."""
    like = GPUS.get(gpu.arch) or min(GPUS.values(), key=lambda g: (g.backend != gpu.backend, abs(g.capability[0] - gpu.capability[0])))
    half, integer = _OPERATIONS[like.arch]
    cycles = gpu.sms * (gpu.clock or like.clock or 1e9)
    bandwidth = gpu.bandwidth or like.bandwidth or 1e12
    return GpuCeilings(_OF_BANDWIDTH * bandwidth, _OF_HALF * half * cycles, _OF_INTEGER * integer * cycles, _START, cycles)


class CostModel(NamedTuple):
    """What part of the ceilings a kernel reaches where it is at its best, and seconds that it needs besides.

    norm     how the times of reading and of arithmetic add up: 1, one after the other, as where the same warps do both; 2, partly at once
    unpacks  the weight is written and read once more in the activations' type
    scaling  of integers, what the scales of a block take, over 128 products of the same rows: of rows of x and blocks of the weight; of
             blocks on both sides
    floats   it multiplies in floating point, whatever becomes of the activations before
    hides    of weights with a scale a channel: up to so many rows of x are quantized while the weight is on its way, which half of the
             multiprocessors read half as fast as all; with more rows it is the cache that is read
    """

    memory: float
    arithmetic: float
    overhead: float
    norm: int
    unpacks: bool = False
    scaling: tuple[float, float] = (0.0, 0.0)
    floats: bool = True
    hides: int = 0


# Fitted to times on an H100; those of an H200: gemm_hopper, skinny_hopper, of whose arithmetic most lies under the reading, sparse, and
# integers of few rows.
COST_MODELS = {
    "skinny": CostModel(0.90, 1.00, 0.5e-6, norm=1),
    "skinny_hopper": CostModel(0.93, 3.10, 2.0e-6, norm=1),
    "gemm_hopper": CostModel(0.90, 1.08, 5e-6, norm=2),
    "dequantized": CostModel(0.93, 0.97, 4e-6, norm=2, unpacks=True),
    "gemm_int8": CostModel(0.90, 1.00, 2e-6, norm=1, scaling=(0.80, 1.30), floats=False),
    "skinny_int8_hopper": CostModel(0.90, 2.00, 1.5e-6, norm=2, floats=False, hides=64),
    "gemm_int8_hopper": CostModel(0.90, 1.00, 1e-6, norm=2, scaling=(0.70, 0.84), floats=False, hides=64),
    "rounded": CostModel(0.90, 1.08, 7e-6, norm=2),
    "skinny_rounded": CostModel(0.93, 3.10, 2.0e-6, norm=1),
    "sparse": CostModel(0.90, 0.61, 2.4e-6, norm=2),
    "sparse_rounded": CostModel(0.90, 0.61, 2.4e-6, norm=2),
}
_BETWEEN_SCALES = 0.85  # of the time of products, what is left where scales interrupt them
# Fraction of the floating-point rate where each of a block's bytes is multiplied by its scale before the product (H100).
_OF_SCALED_BYTES = 0.4
# Seconds that skinny takes besides for 8-bit weights and more than eight rows: the median of what eleven times of an H200, 15 to 115 us,
# were above the prediction without.
_MANY_ROWS_OF_BYTES = 7e-6
# What skinny takes of its prediction with more than 64 rows on Hopper, where mma is slower than wgmma: the median of 83 times of an H200,
# 0.9 to 2.8. Others were faster in 82 of these.
_MANY_ROWS = 1.7
# The same with 2 to 64 rows (8 bits: 2 to 8), and of 4 bits with blocks of 32 and 64 or points: with these the faster kernel is found in
# 341 of 344 cells of an H200, 19 shapes, within 5 %.
_FEW_ROWS, _SHORT_BLOCKS = 1.25, 1.3
# Bytes of the weight that a multiprocessor makes floats of in a clock by `skinny`, at the most: with more bandwidth for each than an H100
# has, reading is not what it waits for (H200).
_UNPACKED = 12.0
# Seconds that gemm_int8 takes besides for activations with an offset, at the least in eleven of twelve times of an H200.
_OF_OFFSETS = 6e-6
_CACHE = 2.5  # times the memory's bandwidth
_QUANTIZE_START = 2e-6
_OF_QUANTIZE = 0.6
_LONGER = 1.35  # time relative to a linear layer of the same sizes: fitted to times of an H100


def predict(problem: Problem, gpu: Gpu, candidate: str, tiles: Tiles) -> float:
    """Seconds of a linear layer: bytes over bandwidth, operations of whole waves of tiles over the matrix units' rate."""
    if problem.op == "grouped_linear":
        return _LONGER * _predict_experts(problem, gpu, candidate, tiles)
    seconds = _predict_linear(problem, gpu, candidate, tiles)
    return seconds * _of_skinny(problem) if candidate == "skinny" and gpu.arch == "sm_90" else seconds


def _of_skinny(problem: Problem) -> float:
    """What skinny takes of its prediction on Hopper, where rows, short blocks and points cost more than elsewhere."""
    if problem.m > 64:
        return _MANY_ROWS
    words = problem.format.bits == 4
    short = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD
    taken = _SHORT_BLOCKS if words and (short or problem.format.zero == "point") else 1.0
    return taken * (_FEW_ROWS if 1 < problem.m <= (64 if words else 8) else 1.0)


def _predict_linear(problem: Problem, gpu: Gpu, candidate: str, tiles: Tiles) -> float:
    ceilings, cost = gpu_ceilings(gpu), COST_MODELS[candidate]
    m, n, k, element = problem.m, problem.n, problem.k, problem.dtype.itemsize
    geo = gpu_tiles.geometry(problem.format, (n, k), sparse=problem.sparse)
    row_tiles, column_tiles = -(-m // tiles.rows), -(-n // tiles.columns)
    count = row_tiles * column_tiles * tiles.split
    # A multiprocessor runs several small tiles at once, so that less than a wave of them leaves some idle, and more than a few none.
    waves = -(-count // gpu.sms) * gpu.sms / count if count > gpu.sms and not tiles.even else 1.0
    idle = 1.0 if tiles.even else max(1.0, gpu.sms / count)
    operations = 2 * row_tiles * tiles.rows * column_tiles * tiles.columns * k
    partial_sums = 4 * m * n * tiles.split if tiles.split > 1 else 0  # written and read, much of it in the cache
    # What does not stay in the cache is read again.
    again = max(1.0, row_tiles * tiles.rows * k * element / gpu.l2) if row_tiles > 1 else 1.0
    nbytes = geo.nbytes * again + element * m * (k + n) + partial_sums
    seconds = ceilings.start + cost.overhead
    if cost.unpacks:
        seconds += (geo.nbytes + n * k * element) / (ceilings.bandwidth * cost.memory)
        nbytes = n * k * element + element * m * (k + n)
    fed = cost.hides > 0 and geo.block_rows == 1
    if problem.compute == "int8" and not (fed and m <= cost.hides):
        seconds += _QUANTIZE_START + (element + (element if cost.floats else 1)) * m * k / (ceilings.bandwidth * _OF_QUANTIZE)
    if not cost.floats:
        seconds += _OF_OFFSETS if scaling_of(problem.activation).with_offset else 0.0
        rate = ceilings.integer
        if geo.block_rows > 1:
            scaling = cost.scaling[not scaling_of(problem.activation).whole_row]
            rate /= _BETWEEN_SCALES + scaling * max(1.0, 128 / geo.padded)
    else:
        rate = ceilings.half / (3 if element == 4 else 1)
        if candidate == "skinny" and gpu.arch == "sm_90" and problem.format.bits == 8:
            rate *= _OF_SCALED_BYTES if geo.padded < gpu_tiles.RECORD else 1.0
            seconds += _MANY_ROWS_OF_BYTES if m > 8 else 0.0
    arithmetic = operations * waves * min(idle, 8.0) / (rate * cost.arithmetic)
    memory = nbytes * min(idle, (2.2 if m <= cost.hides else 1.3) if fed else 4.0) / (ceilings.bandwidth * cost.memory)
    if candidate == "skinny":
        memory = max(memory, geo.nbytes * min(idle, 4.0) / (_UNPACKED * ceilings.clocks))
    if cost.norm == 1:  # each further tile of rows reads and unpacks the weight once more, from the cache
        memory += (row_tiles - 1) * geo.nbytes / (_CACHE * ceilings.bandwidth)
    seconds += (arithmetic**cost.norm + memory**cost.norm) ** (1 / cost.norm)
    return float(seconds)


def reading(problem: Problem, gpu: Gpu) -> float:
    """Seconds to start and to read and write what must be."""
    m, n, k = problem.m, problem.n, problem.k
    nbytes = gpu_tiles.geometry(problem.format, (n, k)).nbytes + problem.dtype.itemsize * m * (k + n)
    return _START + nbytes / gpu_ceilings(gpu).bandwidth


def spreading(problem: Problem, gpu: Gpu) -> float:
    """Seconds to put the zeros of a 2:4 sparse weight back, fitted to times on an H200."""
    sparse, dense = (gpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=sparse).nbytes for sparse in (True, False))
    return _START + (sparse + dense) / (0.85 * gpu_ceilings(gpu).bandwidth)


def _predict_experts(problem: Problem, gpu: Gpu, candidate: str, tiles: Tiles) -> float:
    """The same for rows that are spread evenly over the experts."""
    ceilings, n, k = gpu_ceilings(gpu), problem.n, problem.k
    active = min(problem.m, problem.experts)
    if candidate != "grouped_dequantized":  # as one linear layer whose weight is as high as those of all tiles of rows together
        count = active * -(-problem.m // (active * tiles.rows)) if tiles.ordered else problem.m
        cost_model = {"grouped": "skinny", "grouped_hopper": "gemm_hopper", "grouped_int8_hopper": "gemm_int8_hopper"}[candidate]
        compute: Compute = "float" if COST_MODELS[cost_model].floats else "int8"
        rows = min(tiles.rows, -(-problem.m // active))
        dense = replace(problem, op="linear", m=rows, n=n * count, experts=1, compute=compute)
        return _predict_linear(dense, gpu, cost_model, tiles) + (ceilings.start if tiles.ordered else 0.0)
    cost, element = COST_MODELS["dequantized"], problem.dtype.itemsize
    written = problem.experts * (gpu_tiles.geometry(problem.format, (n, k)).nbytes + n * k * element)
    read = active * n * k * element + 2 * element * problem.m * (k + n)
    arithmetic = 2 * problem.m * n * k / (ceilings.half * cost.arithmetic)
    return 4 * ceilings.start + cost.overhead + written / (ceilings.bandwidth * cost.memory) + max(arithmetic, read / ceilings.bandwidth)

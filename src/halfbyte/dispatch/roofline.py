"""The least time that a product can take, and on GPUs the time that each kernel is expected to take.

    roofline   max(bytes / bandwidth, operations / rate), of what must be moved and computed          for `explain`
    predict    start + overhead + (memory**norm + arithmetic**norm)**(1 / norm), by a `CostModel`     for `dispatch/gpu.py`

    memory      bytes that the kernel moves, with what is read again, over the bandwidth that it reaches
    arithmetic  operations of whole tiles, times the share of waves that is idle, over the rate that it reaches

The numbers of the cost models are fitted to measured times; `docs/engineering/gpu-tables.md` says how well they choose.
"""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import NamedTuple

from halfbyte.kernels.problem import Compute, Problem, scaling_of
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu


class Ceilings(NamedTuple):
    """What a machine can do.

    Attributes:
        bandwidth: Bytes per second.
        operations: Operations per second of the units that a kernel uses.
    """

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
    """Return the roofline of a product: 2 M N K operations; weights, activations and outputs move once.

    Args:
        problem: The product; rows of experts are spread evenly over these.
        matrix_bytes: Bytes of the weight, or of one expert's.
        ceilings: Of the machine.
    """
    m, n, k = problem.m, problem.n, problem.k
    nbytes = min(max(m, 1), problem.experts) * matrix_bytes + problem.dtype.itemsize * m * (k + n)
    operations = 2 * m * n * k
    return Roofline(nbytes, operations, nbytes / ceilings.bandwidth, operations / ceilings.operations)


# GPUs


class Tiles(NamedTuple):
    """How a kernel cuts the result [M, N].

    Attributes:
        rows, columns: Of a tile.
        split: Thread blocks that share the K of a tile.
        even: Tiles are cut along K so that all SMs have the same to do (stream-K).
        ordered: Rows of one expert are together: a launch before this one sorts them.
    """

    rows: int
    columns: int
    split: int = 1
    even: bool = False
    ordered: bool = False


class GpuCeilings(NamedTuple):
    """What a GPU can do under load.

    Attributes:
        bandwidth: Bytes per second that a kernel reads from memory.
        half, integer: Dense operations per second of the tensor cores: float16 and bfloat16, int8.
        start: Seconds that the smallest kernel of a graph takes.
        clocks: Clock cycles per second, of all SMs together.
    """

    bandwidth: float
    half: float
    integer: float
    start: float
    clocks: float


# Operations per clock of an SM's tensor cores: float16 with float32 sums, int8. From NVIDIA's and AMD's white papers.
_OPERATIONS = {
    "sm_80": (2048, 4096),
    "sm_86": (512, 2048),
    "sm_89": (1024, 2048),
    "sm_90": (4096, 8192),
    "sm_100": (8192, 16384),
    "sm_120": (512, 2048),
    "gfx942": (2048, 4096),
}
# Fractions of the nominal rates that remain under load: measured on an H100 (sm_90), and assumed to be the same elsewhere.
_BANDWIDTH_REACHED = 0.93
_HALF_REACHED = 0.73
_INTEGER_REACHED = 0.70
_START = 1.6e-6


@cache
def gpu_ceilings(gpu: Gpu) -> GpuCeilings:
    """Return what `gpu` can do, from its clocks; where torch does not report them, from those of the nearest known architecture."""
    like = GPUS.get(gpu.arch) or min(GPUS.values(), key=lambda g: (g.backend != gpu.backend, abs(g.capability[0] - gpu.capability[0])))
    half, integer = _OPERATIONS[like.arch]
    cycles = gpu.sms * (gpu.clock or like.clock or 1e9)
    bandwidth = gpu.bandwidth or like.bandwidth or 1e12
    return GpuCeilings(_BANDWIDTH_REACHED * bandwidth, _HALF_REACHED * half * cycles, _INTEGER_REACHED * integer * cycles, _START, cycles)


class CostModel(NamedTuple):
    """What fraction of the ceilings a kernel reaches at its best, and what it takes in addition.

    Attributes:
        memory, arithmetic: Fractions of the bandwidth, and of the tensor cores' rate.
        overhead: Seconds.
        norm: How the times of memory and arithmetic add up: 1, one after the other, as where the same warps do both; 2, partly at once.
        unpacks: The weight is first written in the activations' dtype, and then read.
        scaling: Of int8 products in blocks, the time of scaling a block relative to 128 products of the same rows: with one scale for a row
            of x, and with scales of its blocks.
        floats: It multiplies in floating point, even if activations are quantized first.
        hides: For weights with one scale per channel: up to so many rows of x are quantized while half of the SMs read the weight, half as
            fast as all of them; with more rows they read the cache.
    """

    memory: float
    arithmetic: float
    overhead: float
    norm: int
    unpacks: bool = False
    scaling: tuple[float, float] = (0.0, 0.0)
    floats: bool = True
    hides: int = 0


# Fitted to times on an H100, or on an H200: gemm_hopper, skinny_hopper (whose arithmetic mostly overlaps with reading), sparse, and
# skinny_int8_hopper.
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
_INTERRUPTED_PRODUCTS = 0.85  # time of products between which blocks are scaled, relative to uninterrupted ones
# Fraction of the floating-point rate where each byte of a block is multiplied by its scale before the product (H100).
_SCALED_BYTES_RATE = 0.4
# Seconds that skinny takes in addition for 8-bit weights and more than eight rows: the median of eleven times of an H200, 15 to 115 us,
# less the prediction without.
_MANY_ROWS_OF_BYTES = 7e-6
# Times of skinny on Hopper relative to the prediction. More than 64 rows, where mma is slower than wgmma: the median of 83 times of an
# H200, 0.9 to 2.8; other kernels were faster in 82 of these. 2 to 64 rows (8 bits: 2 to 8); 4 bits with zero points, or blocks under 128:
# with these the faster kernel is found in 341 of 344 cells of an H200, 19 shapes, within 5 %.
_MANY_ROWS, _FEW_ROWS, _SHORT_BLOCKS = 1.7, 1.25, 1.3
# Most bytes of the weight that skinny dequantizes per SM and clock: with more bandwidth per SM than an H100 has, this is the limit (H200).
_DEQUANTIZED_PER_CLOCK = 12.0
# Seconds that gemm_int8 takes in addition for activations with an offset, at the least in eleven of twelve times of an H200.
_OFFSET_SECONDS = 6e-6
_CACHE_BANDWIDTH = 2.5  # relative to the memory's
_QUANTIZE_START = 2e-6
_QUANTIZE_BANDWIDTH = 0.6  # relative to reading
_EXPERTS_FACTOR = 1.35  # time relative to a linear layer of the same sizes: fitted to times of an H100


def predict(problem: Problem, gpu: Gpu, candidate: str, tiles: Tiles) -> float:
    """Return the seconds that a kernel is expected to take.

    Args:
        problem: A linear layer, or one of experts.
        gpu: The GPU.
        candidate: Name of the kernel.
        tiles: How it cuts the result.
    """
    if problem.op == "grouped_linear":
        return _EXPERTS_FACTOR * _predict_experts(problem, gpu, candidate, tiles)
    seconds = _predict_linear(problem, gpu, candidate, tiles)
    return seconds * _skinny_factor(problem) if candidate == "skinny" and gpu.arch == "sm_90" else seconds


def _skinny_factor(problem: Problem) -> float:
    """Return the time of skinny on Hopper relative to the prediction: rows, short blocks and zero points take longer there."""
    if problem.m > 64:
        return _MANY_ROWS
    four_bits = problem.format.bits == 4
    short = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD
    factor = _SHORT_BLOCKS if four_bits and (short or problem.format.zero == "point") else 1.0
    return factor * (_FEW_ROWS if 1 < problem.m <= (64 if four_bits else 8) else 1.0)


def _predict_linear(problem: Problem, gpu: Gpu, candidate: str, tiles: Tiles) -> float:
    ceilings, cost = gpu_ceilings(gpu), COST_MODELS[candidate]
    m, n, k, element = problem.m, problem.n, problem.k, problem.dtype.itemsize
    geo = gpu_tiles.geometry(problem.format, (n, k), sparse=problem.sparse)
    row_tiles, column_tiles = -(-m // tiles.rows), -(-n // tiles.columns)
    count = row_tiles * column_tiles * tiles.split
    # An SM runs several small tiles at once, so that less than a wave of them leaves some SMs idle, and more than a few waves none.
    waves = -(-count // gpu.sms) * gpu.sms / count if count > gpu.sms and not tiles.even else 1.0
    idle = 1.0 if tiles.even else max(1.0, gpu.sms / count)
    quantizes_meanwhile = cost.hides > 0 and geo.block_rows == 1
    seconds = ceilings.start + cost.overhead
    # Memory
    partial_sums = 4 * m * n * tiles.split if tiles.split > 1 else 0  # written and read, much of it in the cache
    reads = max(1.0, row_tiles * tiles.rows * k * element / gpu.l2) if row_tiles > 1 else 1.0  # of a weight that the L2 cache loses
    nbytes = geo.nbytes * reads + element * m * (k + n) + partial_sums
    if cost.unpacks:
        seconds += (geo.nbytes + n * k * element) / (ceilings.bandwidth * cost.memory)
        nbytes = n * k * element + element * m * (k + n)
    if problem.compute == "int8" and not (quantizes_meanwhile and m <= cost.hides):
        quantized_bytes = (element + (element if cost.floats else 1)) * m * k
        seconds += _QUANTIZE_START + quantized_bytes / (ceilings.bandwidth * _QUANTIZE_BANDWIDTH)
    most_idle = (2.2 if m <= cost.hides else 1.3) if quantizes_meanwhile else 4.0
    memory = nbytes * min(idle, most_idle) / (ceilings.bandwidth * cost.memory)
    if candidate == "skinny":
        memory = max(memory, geo.nbytes * min(idle, 4.0) / (_DEQUANTIZED_PER_CLOCK * ceilings.clocks))
    if cost.norm == 1:  # each further tile of rows reads and unpacks the weight once more, from the cache
        memory += (row_tiles - 1) * geo.nbytes / (_CACHE_BANDWIDTH * ceilings.bandwidth)
    # Arithmetic
    rate, more_seconds = _rate(problem, gpu, candidate, geo)
    operations = 2 * row_tiles * tiles.rows * column_tiles * tiles.columns * k
    arithmetic = operations * waves * min(idle, 8.0) / (rate * cost.arithmetic)
    seconds += more_seconds + (arithmetic**cost.norm + memory**cost.norm) ** (1 / cost.norm)
    return float(seconds)


def _rate(problem: Problem, gpu: Gpu, candidate: str, geo: gpu_tiles.Geometry) -> tuple[float, float]:
    """Return the operations per second of a kernel's products with their scales, at the ceiling, and seconds that it takes in addition."""
    ceilings, cost, scaling = gpu_ceilings(gpu), COST_MODELS[candidate], scaling_of(problem.activation)
    if not cost.floats:
        rate = ceilings.integer
        if geo.block_rows > 1:
            rate /= _INTERRUPTED_PRODUCTS + cost.scaling[not scaling.whole_row] * max(1.0, 128 / geo.padded)
        return rate, _OFFSET_SECONDS if scaling.with_offset else 0.0
    rate = ceilings.half / (3 if problem.dtype.itemsize == 4 else 1)
    if candidate == "skinny" and gpu.arch == "sm_90" and problem.format.bits == 8:
        rate *= _SCALED_BYTES_RATE if geo.padded < gpu_tiles.RECORD else 1.0
        return rate, _MANY_ROWS_OF_BYTES if problem.m > 8 else 0.0
    return rate, 0.0


def least_seconds(problem: Problem, gpu: Gpu) -> float:
    """Return the seconds to start, and to read and write what must be."""
    m, n, k = problem.m, problem.n, problem.k
    nbytes = gpu_tiles.geometry(problem.format, (n, k)).nbytes + problem.dtype.itemsize * m * (k + n)
    return _START + nbytes / gpu_ceilings(gpu).bandwidth


def spread_seconds(problem: Problem, gpu: Gpu) -> float:
    """Return the seconds that `quantize/spread.py` takes to put the zeros of a 2:4 sparse weight back, fitted to times on an H200."""
    sparse, dense = (gpu_tiles.geometry(problem.format, (problem.n, problem.k), sparse=sparse).nbytes for sparse in (True, False))
    return _START + (sparse + dense) / (0.85 * gpu_ceilings(gpu).bandwidth)


def _predict_experts(problem: Problem, gpu: Gpu, candidate: str, tiles: Tiles) -> float:
    """`predict` for rows that are spread evenly over the experts, before `_EXPERTS_FACTOR`."""
    ceilings, n, k = gpu_ceilings(gpu), problem.n, problem.k
    active = min(problem.m, problem.experts)
    if candidate != "grouped_dequantized":  # one linear layer with N for each tile of rows
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

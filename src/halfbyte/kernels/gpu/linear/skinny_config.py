"""The host side of `skinny_tile.py`: `Config` and `configs`, the tiles that are tried for a problem, and `Static` and `compiled_for`, the
constants that the kernel is compiled for.

A thread block multiplies bands * slices * 16 rows of the weight by columns * slices of x at a time, and steps along its part of K by
`records` K slabs of 128. `skinny_tile.py` says what bands, slices and batch are.

The rules of `configs`, the numbers in them and the tiles that they list come from measurements on an H100. They order the candidates, of
which dispatch takes the first one or one that was measured to be faster (`dispatch/tables`); results are the same up to rounding.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Literal

import torch
import triton

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_of
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu

BAND = 16  # rows of the weight that one matrix instruction takes
_PREFETCHED_SLABS = 4  # of each part of K, before the preceding kernel has ended
_PREFETCHED_SCALES = 16  # K slabs of each part whose scales are prefetched then, with several stages

# Thread blocks per multiprocessor, as measured on an H100.
_RESIDENT = 2.2  # blocks of 8 warps that take no longer than the two that are resident together
_RESIDENT_SMALL = 4.0  # the same of blocks of 4 warps, if a tile has one band or is staged
_RESIDENT_WIDE = 3.0  # the same of other blocks of 4 warps, which keep several bands in registers
_HIDES_LATENCY = 3  # blocks that hide each other's latency, and whose last wave is a small share of all
_ONE_SLAB_STEPS = 3.5  # from so many blocks of one band on, steps of one K slab are faster than steps of two or four
_LARGE_TILES = 4.5  # from so many bands on, tiles of several bands are faster than tiles of one or two
_SPLIT_OVERFILL = 1.4  # K is split as long as that gives at most so many times the blocks that are wanted

_LONG_K = 8192  # from here on, 5 to 8 rows of x are faster in staged tiles, and up to 4 rows with 8 parts of K rather than 4
_RESERVED_BYTES = 4 << 10  # of shared memory that stages leave free
_MOST_STAGES = 3
# Since 3.8 Triton multiplies 8 columns, too, by wgmma or tcgen05.
_EIGHT_SHARED = tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 8)


@dataclass(frozen=True)
class Config:
    """How a thread block computes its tile.

    Attributes:
        bands: Times 16: outputs of a tile.
        columns: Rows of x of a tile.
        slices: Parts of K that fill the columns of a matrix instruction.
        batch: Parts of K with products of their own, which are summed at the end: 1, or `warps`.
        records: K slabs of each part that are read at a time, a step.
        stages: Steps in flight through shared memory; 1: weights are read as they are needed, straight to registers.
        warps: Of a thread block.
        split: Thread blocks that share the K of a tile.
        ahead: K slabs of each part that are prefetched to the L2 cache before the kernel before has ended. With several stages their scales
            are read to registers one step ahead, and the scales of more slabs are prefetched. With one stage and one row of x, or one step,
            the weights themselves are loaded to registers instead; and of one row those of a second step, if steps are short and many.
        ptx: Whether codes are converted by PTX instructions (NVIDIA).
        pdl: Whether it starts before the kernel before has ended (programmatic dependent launch).
        hopper: Whether the GPU has Hopper's wgmma.
        separate_warps: Whether only a batch makes warps multiply 8 columns, each by its own mma (`_with_batch`).
    """

    bands: int
    columns: int
    slices: int = 1
    batch: int = 1
    records: int = 1
    stages: int = 1
    warps: int = 8
    split: int = 1
    ahead: int = 0
    ptx: bool = True
    pdl: bool = True
    hopper: bool = field(default=False, repr=False)  # follows from the GPU, and is no choice
    separate_warps: bool = field(default=False, repr=False)  # from GPU and compiler


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    if not _reads_to_registers(problem, gpu):
        candidates = _staged(problem, gpu)
    elif problem.format.bits == 4:
        candidates = _one_row_4bit(problem, gpu) if problem.m == 1 else _few_rows_4bit(problem, gpu)
    else:
        candidates = _few_rows_8bit(problem, gpu)
    ptx, pdl = gpu.backend == "cuda" and not triton.knobs.runtime.interpret, launcher.starts_early(gpu)
    separate = ptx and _EIGHT_SHARED and gpu.capability[0] in (9, 10)
    candidates = [replace(config, ptx=ptx, pdl=pdl, hopper=_is_hopper(gpu), separate_warps=separate) for config in candidates]
    if pdl:
        candidates = [replace(config, ahead=_PREFETCHED_SLABS if _prefetches(config, problem, gpu) else 0) for config in candidates]
        candidates += [replace(config, ahead=_PREFETCHED_SLABS - config.ahead) for config in candidates[:2]]  # with the other choice
    return tuple(dict.fromkeys(candidates))


def _is_hopper(gpu: Gpu) -> bool:
    return gpu.backend == "cuda" and gpu.capability[0] == 9


def _reads_to_registers(problem: Problem, gpu: Gpu) -> bool:
    """Return whether weights are loaded straight to registers, without stages in shared memory: with few rows of x there is no other
    latency to hide."""
    most_rows = 8 if problem.format.bits == 4 or _is_hopper(gpu) else 16
    return gpu.backend == "cuda" and problem.m <= most_rows and problem.dtype != torch.float32


def _prefetches(config: Config, problem: Problem, gpu: Gpu) -> bool:
    """Return whether the first weights are prefetched while the preceding kernel runs: if all thread blocks are resident at once. With more
    of them, prefetches would compete with the loads of blocks that run already."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if config.stages > 1 and geo.nbytes > gpu.l2:
        return False
    if problem.format.bits == 8 and (config.stages == 1 or config.slices == 8):
        return False
    if config.warps > 4:
        resident = _RESIDENT
    else:
        resident = _RESIDENT_SMALL if config.bands == 1 or config.stages > 1 else _RESIDENT_WIDE
    return _tiles(problem, config.bands, config.columns) * config.split <= resident * gpu.sms


def _tiles(problem: Problem, bands: int, columns: int) -> int:
    return -(-problem.n // (BAND * bands)) * -(-problem.m // columns)


def _slabs(problem: Problem) -> int:
    """Return the K slabs of x."""
    return -(-problem.k // gpu_tiles.RECORD)


def _has_short_blocks(problem: Problem) -> bool:
    """Return whether a K slab has several quantization blocks: their scales take registers."""
    return gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD


def _most_bands(problem: Problem, gpu: Gpu) -> int:
    """Return the bands of the largest tile (up to 4) with which there are enough thread blocks to hide latency."""
    return next((bands for bands in (4, 2) if -(-problem.n // BAND) >= _HIDES_LATENCY * bands * gpu.sms), 1)


def _one_row_4bit(problem: Problem, gpu: Gpu) -> list[Config]:
    """Return configs for one row of x: eight slices of K fill the columns of the matrix instruction."""
    slices, most_bands = 8, _most_bands(problem, gpu)
    blocks = -(-problem.n // BAND)  # with one band each
    more_than_resident = most_bands == 1 and blocks > _RESIDENT * gpu.sms
    if problem.format.codebook:  # decoding takes more registers: with larger tiles one block is resident, not two or three
        tiles = [(1, 2), (1, 1)]  # bands, and K slabs a step
    elif _has_short_blocks(problem):
        tiles = [(min(most_bands, 2), 2), (most_bands, 1), (most_bands, 2)]
        if more_than_resident:
            tiles.insert(0, (2, 1))
    else:
        if _slabs(problem) <= slices or (most_bands == 1 and blocks >= _ONE_SLAB_STEPS * gpu.sms):
            slabs = 1
        else:  # four slabs of a band at a time; two take fewer registers, so that more than two blocks are resident
            slabs = 2 if more_than_resident else 4 // most_bands
        tiles = [(most_bands, slabs), (most_bands, max(1, slabs // 2)), (1, 4), (2, 2)]
    return [Config(bands, 1, slices, records=slabs) for bands, slabs in tiles]


def _few_rows_4bit(problem: Problem, gpu: Gpu) -> list[Config]:
    """Return configs for 2 to 8 rows of x. A tile may have more columns than there are rows: reading the weight takes all of the time."""
    columns, blocks, few_bands = triton.next_power_of_2(problem.m), -(-problem.n // BAND), _most_bands(problem, gpu) < 4
    short_blocks, long_k = _has_short_blocks(problem), problem.k >= _LONG_K
    staged = [config for config in _staged(replace(problem, m=16), gpu) if config.bands == 8]
    # Named by their columns.
    four_shared_k = [Config(1, 4, 2, batch=warps, records=2, warps=warps) for warps in (4, 8)]
    eight_one_band, eight_two_bands = Config(1, 8, batch=8, records=2), Config(2, 8, batch=8, records=2)
    eight_large = Config(2, 8, batch=4, records=2, warps=4) if few_bands else Config(4, 8, batch=4, warps=4)
    if blocks < _RESIDENT * gpu.sms:
        candidates = [*(reversed(four_shared_k) if long_k else four_shared_k), eight_one_band, *staged]
        if columns == 8 and long_k:
            best = staged
        elif short_blocks:
            best = [eight_one_band]
        else:
            in_one_step = [Config(1, 4, 2, batch=4, records=4, warps=4), Config(1, 8, 1, batch=8, records=4, warps=8)]
            best = [config for config in in_one_step if problem.k <= config.slices * config.batch * config.records * gpu_tiles.RECORD]
    elif blocks < _LARGE_TILES * gpu.sms:
        candidates = [*four_shared_k, eight_two_bands, eight_large, *staged]
        best = staged if short_blocks else []
    else:
        two, four = Config(4, 2, 4, records=2), Config(4 if few_bands else 8, 4, 2, records=2)
        candidates = [two, eight_large, four, four_shared_k[0], *staged]
        best = [eight_large] if columns > 2 or short_blocks else []
    return [config for config in dict.fromkeys([*best, *candidates]) if config.columns >= columns]


def _few_rows_8bit(problem: Problem, gpu: Gpu) -> list[Config]:
    """Return configs for 1 to 16 rows of x and 8 bits."""
    columns = triton.next_power_of_2(problem.m)
    if columns == 1:
        candidates = [Config(1, 1, 8), Config(1, 1, 8, warps=4), Config(2, 1, 8)]
        if _has_short_blocks(problem) and -(-problem.n // BAND) >= _HIDES_LATENCY * gpu.sms:
            # There are as many threads as the tile has rows in all slices: each loads the scales of one row.
            candidates = [candidates[1], candidates[2], candidates[0]]
        candidates += [Config(2, 1, 8, records=2), Config(1, 1, 8, records=2)]
    elif columns <= 4:
        candidates = [Config(1, 4, 2, batch=4, warps=4), Config(2, 8, batch=8), Config(1, 8, batch=4, records=2, warps=4)]
    elif columns == 8:
        candidates = [Config(1, 8, batch=4, records=2, warps=4), Config(2, 8, batch=8), Config(1, 8, batch=4, warps=4)]
    else:
        candidates = [Config(1, 16, batch=4, warps=4), Config(4, 16, batch=4, warps=4, split=2)]
    return [*candidates, *_staged(problem, gpu)]


def _staged(problem: Problem, gpu: Gpu) -> list[Config]:
    """Return configs that load weights and x to stages in shared memory, with K split over as many thread blocks as fill the GPU."""
    cuda, bits = gpu.backend == "cuda", problem.format.bits
    if bits == 8 and problem.dtype.itemsize == 2 and problem.m > 4 and _is_hopper(gpu):
        return _staged_8bit_hopper(problem, gpu)
    most_columns = 16 if problem.dtype == torch.float32 else 128
    if not cuda or gpu.capability[0] not in (9, 10):
        most_columns = min(most_columns, 64)  # without wgmma the sums of larger tiles do not fit in registers
    columns = min(triton.next_power_of_2(problem.m), most_columns)
    slices = max(1, (8 if cuda else 16) // columns)  # AMD's matrix instructions have 16 columns at least
    sums_scaled, candidates = mode(problem) == "sums", []
    if cuda and columns == 1 and bits == 8:  # one row of bytes: each warp has a part of K, as in `_few_rows_8bit`
        stages = max(1, min(_MOST_STAGES, (gpu.shared - _RESERVED_BYTES) // (2 * _slab_bytes(problem, 2, 1, slices))))
        candidates = [Config(2, 1, slices, records=2, stages=stages), Config(1, 1, slices)][:: 1 if sums_scaled else -1]
    # Smaller and larger tiles: bands of all slices, and thread blocks per multiprocessor.
    candidates += [_staged_tile(problem, gpu, max(1, bands // slices), columns, slices, blocks) for bands, blocks in ((4, 3.0), (8, 1.5))]
    if columns == 32 and bits == 4:  # half of the warps: two of the matrix instructions use the x that each reads
        candidates.append(replace(candidates[1], warps=4))
    return candidates[::-1] if slices < columns <= 32 and bits == 4 and sums_scaled else candidates


def _staged_tile(problem: Problem, gpu: Gpu, bands: int, columns: int, slices: int, blocks_per_sm: float) -> Config:
    """Return the config of such a tile, with K split until there are `blocks_per_sm`, and as many stages as shared memory has room for."""
    slabs = _slabs(problem)
    # Sums of 64 columns and more take the registers of two blocks. A split keeps at least so many slabs for each slice.
    wanted_blocks = blocks_per_sm * gpu.sms / (2 if columns >= 64 else 1)
    least_slabs = slices * (4 if bands == 8 and columns <= 32 else 8)
    split = _split(_tiles(problem, bands, columns), wanted_blocks, slabs // least_slabs, most=16)
    step_slabs = 2 if columns <= 64 and slabs >= 4 * slices * split and problem.dtype != torch.float32 else 1
    slab_bytes, room = _slab_bytes(problem, bands, columns, slices), gpu.shared - _RESERVED_BYTES
    if gpu.backend != "cuda":  # weights change lanes through shared memory, in float16, and only x is staged, with one step of weights
        slab_bytes = _slab_bytes(problem, 0, columns, slices)
        room = gpu.shared - slices * bands * BAND * 2 * gpu_tiles.RECORD + step_slabs * slab_bytes
    if room < 2 * step_slabs * slab_bytes:  # a single stage overlaps nothing: shorter steps instead
        step_slabs = 1
    stages = max(1, min(_MOST_STAGES, room // (step_slabs * slab_bytes)))
    return Config(bands, columns, slices, records=step_slabs, stages=stages, warps=min(8, bands * slices), split=split)


def _staged_8bit_hopper(problem: Problem, gpu: Gpu) -> list[Config]:
    """Return staged configs for 8 bits on Hopper: several small thread blocks per multiprocessor, or few with many bytes in flight."""
    columns = max(16, min(triton.next_power_of_2(problem.m), 64))
    best = (8, 1, 4, 2) if columns == 32 else (4, 1, 4, 4)
    candidates = []
    # Bands, K slabs a step, stages, and thread blocks per multiprocessor.
    for bands, step_slabs, stages, blocks in dict.fromkeys((best, (8, 2, 3, 1), (4, 1, 4, 4), (8, 1, 4, 1), (8, 1, 4, 2), (4, 2, 3, 4))):
        wanted_blocks = gpu.sms * (blocks if columns < 64 else -(-blocks // 2))
        split = _split(_tiles(problem, bands, columns), wanted_blocks, _slabs(problem) // 4, most=8)
        room = gpu.shared - _RESERVED_BYTES - 2 * gpu_tiles.RECORD * columns  # without the x that changes its order
        stages = max(2, min(stages, room // (step_slabs * _slab_bytes(problem, bands, columns, 1))))
        candidates.append(Config(bands, columns, records=step_slabs, stages=stages, warps=bands, split=split))
    return candidates


def _split(tiles: int, wanted_blocks: float, most_parts: int, *, most: int) -> int:
    """Return the thread blocks that share K: the largest power of two up to `most` and `most_parts` that leaves no more than are wanted."""
    split = 1
    while split < most and 2 * split <= most_parts and 2 * split * tiles <= _SPLIT_OVERFILL * wanted_blocks:
        split *= 2
    return split


def _slab_bytes(problem: Problem, bands: int, columns: int, slices: int) -> int:
    """Return the bytes of a K slab of each slice in shared memory: codes and x."""
    return slices * gpu_tiles.RECORD * (bands * BAND * problem.format.bits // 8 + columns * problem.dtype.itemsize)


def gated(problem: Problem, config: Config) -> Config | None:
    """Return `config` as a gated epilogue needs it, or None where the shape does not allow it (`takes_gates`).

    One row of x has tiles of two bands and four K slabs a step, so that many weights are loaded before the preceding kernel has ended.
    """
    if config.columns == 1 and config.bands * config.records == 4 and config.pdl:
        slabs_per_slice = -(-_slabs(problem) // config.slices)
        config = replace(config, bands=2, records=min(4, slabs_per_slice))
    config = replace(config, bands=max(2, config.bands))
    return config if takes_gates(problem, config) else None


def takes_gates(problem: Problem, config: Config) -> bool:
    """Return whether gates can be computed with the sums: a tile has all of K and a band of each half of the weight, which has whole
    panels."""
    return config.bands >= 2 and config.split == 1 and problem.n % (2 * gpu_tiles.PANEL) == 0


def takes_norm(config: Config) -> bool:
    """Return whether the norm of x is computed with the product: one row of x, and all of K in each thread block, which computes the mean
    of squares by itself. From two rows on that takes longer than a separate kernel."""
    return config.split == config.batch == config.columns == 1


Mode = Literal["sums", "weights", "exact"]


@dataclass(frozen=True, kw_only=True)
class Static(CompileTime, Config):
    """What the kernel is compiled for, in addition to Config.

    Attributes:
        split: 2: thread blocks share K; 1: they do not.
        ahead, scales_ahead: K slabs of each part whose codes, and whose scales, are prefetched before the kernel before has ended.
        mode: What happens to scales, as `skinny_tile.py` says.
        bits, zero: Of the weight.
        padded: Elements of a block, with padding.
        block: Elements of a block without padding; 0 where blocks need none.
        per_channel: There is one quantization block along K.
        even: No element of K is out of bounds in any step.
        clamp: Whether y is clamped.
        early: Weights of the first step are loaded to registers before the kernel before has ended.
        single_step: There is one step.
        pipe: Weights of a step are loaded while the one before it is multiplied, the second one's early, too.
        wide: wgmma: four warps share an instruction, which reads x from shared memory.
        gates: Function of gates, which are half of a tile's rows (`epilogue.gated`); "": none.
        unit_offset: The norm multiplies by 1 + weight.
        table: Codes are 4-bit floats.
        paired: Codes are bytes in pairs (`layouts/gpu_tiles.py`).
        taps: Of a convolution, whose patches are the rows of x; 0: x is a matrix.
    """

    scales_ahead: int
    mode: Mode
    bits: int
    zero: Zero
    padded: int
    block: int
    per_channel: bool
    even: bool
    clamp: bool
    early: bool
    single_step: bool
    pipe: bool
    wide: bool
    gates: str = ""
    unit_offset: bool = False
    table: bool = False
    paired: bool = False
    taps: int = 0

    @property
    def threads(self) -> int:
        """Threads of a thread block."""
        return 32 * self.warps

    @property
    def permuted_k(self) -> bool:
        """Whether a lane multiplies the 16 bytes that it reads, and x is permuted accordingly."""
        return self.bits == 8 and (self.stages == 1 or self.wide)

    @property
    def gated(self) -> bool:
        return self.gates != ""

    @property
    def late(self) -> bool:
        """Whether the mean of squares of a norm is reduced with the sums at the end: if registers can hold it so long."""
        return self.single_step or self.bands == 1

    @property
    def groups(self) -> int:
        """Quantization blocks in a K slab."""
        return max(1, 128 // self.padded)

    @property
    def rows(self) -> int:
        """Rows of the weight that one matrix product takes."""
        return self.bands * self.slices * BAND

    @property
    def outputs(self) -> int:
        """Outputs of a tile."""
        return self.bands * BAND

    @property
    def width(self) -> int:
        """Columns of a matrix product."""
        return self.columns * self.slices

    @property
    def codes_step(self) -> int:
        """Distance of K slabs in the codes: words of 16 bits, or bytes."""
        return 2048 if self.bits == 4 else 64 if self.permuted_k else 128


def compiled_for(problem: Problem, config: Config, *, clamps: bool) -> tuple[Static, int]:
    """Return what the kernel is compiled for, and how many K slabs each part of K has."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if config.separate_warps and config.batch == config.stages == 1 and config.slices * config.columns == 8:
        config = _with_batch(config)
    chunks = config.split * config.batch * config.slices
    part_slabs = round_up(-(-geo.records // chunks), config.records)
    # A kernel for one row has registers to spare for early weights; with more rows, more slabs are prefetched to the cache instead.
    bits, single_step = geo.format.bits, part_slabs == config.records
    rows, width = config.bands * config.slices * BAND, config.columns * config.slices
    wide = config.hopper and config.batch == 1 and config.warps % 4 == rows % 64 == 0 and width >= 16
    early = config.pdl and config.stages == 1 and (config.columns == 1 or (single_step and config.ahead > 0))
    ahead = min(config.ahead, part_slabs) if config.pdl and not early else 0
    return Static(
        **vars(replace(config, ahead=ahead, split=min(2, config.split))),
        scales_ahead=min(_PREFETCHED_SCALES, part_slabs) if ahead and config.stages > 1 else ahead,
        mode=mode(problem),
        bits=bits,
        zero=zero_of(geo.format),
        table=has_floats(geo.format),
        paired=problem.paired,
        padded=geo.padded,
        block=0 if geo.contiguous else geo.block,
        per_channel=geo.block_rows == 1,
        even=geo.contiguous and problem.k % gpu_tiles.RECORD == 0 and part_slabs * chunks == geo.records,
        clamp=clamps,
        early=early,
        single_step=early and single_step,
        wide=wide,
        pipe=early and config.ahead > 0 and bits == 4 and config.bands * config.records <= 2 and part_slabs >= 3 * config.records,
    ), part_slabs


def _with_batch(config: Config) -> Config:
    """Return `config` with a part of K for each warp, and as many K slabs a step, so that warps multiply by mma.

    Instructions of four warps read x, and on Blackwell the weight, through memory that these warps fill and wait for together, and keep the
    registers of the weight until they have ended. 8 columns, the width of an mma, are no faster by them.
    """
    slices = max(1, config.slices // config.warps)
    records = max(1, config.records * config.slices // (config.warps * slices))
    return replace(config, batch=config.warps, slices=slices, records=records)


def mode(problem: Problem) -> Mode:
    """Return what happens to scales: "sums", "weights" or "exact", as `skinny_tile.py` says."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if problem.dtype == torch.float32:
        return "exact"
    if geo.padded % gpu_tiles.RECORD == 0 and geo.format.zero != "offset":
        return "sums"
    # A scale of larger range than float16's is multiplied in float32.
    return "exact" if problem.dtype == torch.float16 and geo.format.scale != torch.float16 else "weights"

"""The tile of `skinny_tile.py`: `Config`, what `skinny.configs` chooses for a problem, and `Static`, what the kernel is compiled for.

A thread block multiplies bands * slices * 16 rows of the weight by columns * slices of x at a time, and steps along its part of K by
`records` K slabs of 128. `skinny_tile.py` says what bands, slices and batch are.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Literal

import torch

from halfbyte.formats.spec import Zero
from halfbyte.kernels.gpu.runtime.compile_time import CompileTime
from halfbyte.kernels.gpu.weight_kinds import has_floats, zero_of
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import round_up

BAND = 16  # rows of the weight that one matrix instruction takes
_SCALES_AHEAD = 16


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


Mode = Literal["sums", "weights", "exact"]


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for; the first fields are those of Config.

    Attributes:
        threads: 32 * warps.
        ahead, scales_ahead: K slabs of each part whose codes, and whose scales, are prefetched before the kernel before has ended.
        split: Whether thread blocks share K.
        mode: What happens to scales, as `skinny_tile.py` says.
        bits, zero: Of the weight.
        padded: Elements of a block, with padding.
        block: Elements of a block without padding; 0 where blocks need none.
        whole: One block along K.
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

    bands: int
    columns: int
    slices: int
    batch: int
    records: int
    stages: int
    threads: int
    ahead: int
    scales_ahead: int
    split: bool
    mode: Mode
    ptx: bool
    pdl: bool
    bits: int
    zero: Zero
    padded: int
    block: int
    whole: bool
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
    chunks = config.split * config.batch * config.slices
    per = round_up(-(-geo.records // chunks), config.records)
    # A kernel for one row has registers to spare for early weights; with more rows, more slabs are prefetched to the cache instead.
    bits, single_step = geo.format.bits, per == config.records
    rows, width = config.bands * config.slices * BAND, config.columns * config.slices
    wide = config.hopper and config.batch == 1 and config.warps % 4 == rows % 64 == 0 and width >= 16
    early = config.pdl and config.stages == 1 and (config.columns == 1 or (single_step and config.ahead > 0))
    ahead = min(config.ahead, per) if config.pdl and not early else 0
    return Static(
        bands=config.bands,
        columns=config.columns,
        slices=config.slices,
        batch=config.batch,
        records=config.records,
        stages=config.stages,
        threads=32 * config.warps,
        ahead=ahead,
        scales_ahead=min(_SCALES_AHEAD, per) if ahead and config.stages > 1 else ahead,
        split=config.split > 1,
        mode=mode(problem),
        ptx=config.ptx,
        pdl=config.pdl,
        bits=bits,
        zero=zero_of(geo.format),
        table=has_floats(geo.format),
        paired=problem.paired,
        padded=geo.padded,
        block=0 if geo.contiguous else geo.block,
        whole=geo.block_rows == 1,
        even=geo.contiguous and problem.k % gpu_tiles.RECORD == 0 and per * chunks == geo.records,
        clamp=clamps,
        early=early,
        single_step=early and single_step,
        wide=wide,
        pipe=early and config.ahead > 0 and bits == 4 and config.bands * config.records <= 2 and per >= 3 * config.records,
    ), per


def mode(problem: Problem) -> Mode:
    """Return what happens to scales: "sums", "weights" or "exact", as `skinny_tile.py` says."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if problem.dtype == torch.float32:
        return "exact"
    if geo.padded % gpu_tiles.RECORD == 0 and geo.format.zero != "offset":
        return "sums"
    # A scale of larger range than float16's is multiplied in float32.
    return "exact" if problem.dtype == torch.float16 and geo.format.scale != torch.float16 else "weights"

"""How a block of `skinny_tile.py` takes its tile: what is chosen for a problem, and what the kernel is compiled for."""

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
    """bands, columns, slices, batch, split: see `skinny_tile.py`; batch is 1 or `warps`. A thread block has `warps` warps and reads
    `records` of each part of K at a time, `stages` - 1 steps ahead (1: as they are needed). The first `ahead` records of each part are
    on their way to the L2 cache before the kernel before has ended, and with several stages the scales of more of them: those are read
    into registers one step ahead, which is less than memory takes. One row of x takes weights to registers instead, and with `ahead` those
    of a second step, where steps are short and many; so do more rows, with `ahead`, where one step is all. `hopper` goes without saying."""

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
    hopper: bool = field(default=False, repr=False)  # the GPU's


Mode = Literal["sums", "weights", "exact"]


@dataclass(frozen=True)
class Static(CompileTime):
    """What the kernel is compiled for."""

    bands: int
    columns: int
    slices: int
    batch: int
    records: int
    stages: int
    threads: int
    ahead: int  # records of each part that are on their way to the L2 cache before the kernel before has ended
    scales_ahead: int  # records whose scales are, too
    split: bool
    mode: Mode  # "sums", "weights", or "exact": see the text of `skinny_tile.py`
    ptx: bool
    pdl: bool
    bits: int
    zero: Zero
    padded: int  # elements of a block with its padding
    block: int  # without; 0 where padded k is k
    whole: bool  # one block along K
    even: bool  # nothing of K is missing in any step
    clamp: bool
    early: bool  # weights of the first step are on their way to registers before the kernel before has ended
    single_step: bool  # one step is all
    pipe: bool  # and those of the second; each step's while the one before it is multiplied
    wide: bool  # four warps take an instruction of Hopper's matrix units together, which reads x from shared memory
    gates: str = ""  # half of a tile's rows are gates of the others: `epilogue.gated`
    unit_offset: bool = False  # 1 + the norm's weight is multiplied by
    table: bool = False  # codes are 4-bit floats
    paired: bool = False  # codes are bytes in pairs (`layouts/gpu_tiles.py`)
    taps: int = 0  # of a convolution, whose patches are the rows of x

    @property
    def permuted_k(self) -> bool:
        """A lane multiplies the 16 bytes that it reads."""
        return self.bits == 8 and (self.stages == 1 or self.wide)

    @property
    def gated(self) -> bool:
        return self.gates != ""

    @property
    def late(self) -> bool:
        """Threads meet for the mean of squares as late as for the sums: where there are registers to keep them in so long."""
        return self.single_step or self.bands == 1

    @property
    def groups(self) -> int:
        """Blocks in a record."""
        return max(1, 128 // self.padded)

    @property
    def rows(self) -> int:
        """Rows of the weight that one matrix product takes."""
        return self.bands * self.slices * BAND

    @property
    def outputs(self) -> int:
        return self.bands * BAND

    @property
    def width(self) -> int:
        return self.columns * self.slices

    @property
    def codes_step(self) -> int:
        """Distance of records in the codes: words of 16 bits, or bytes."""
        return 2048 if self.bits == 4 else 64 if self.permuted_k else 128


def compiled_for(problem: Problem, config: Config, *, clamps: bool) -> tuple[Static, int]:
    """What the kernel is compiled for, and how many records each part of K has."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    chunks = config.split * config.batch * config.slices
    per = round_up(-(-geo.records // chunks), config.records)
    # Few registers of a kernel for one row are taken otherwise; of more rows, more is on its way to the cache.
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
    """Where the scale goes: "sums", "weights" or "exact"."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if problem.dtype == torch.float32:
        return "exact"
    if geo.padded % gpu_tiles.RECORD == 0 and geo.format.zero != "offset":
        return "sums"
    # A scale of larger range than float16's is multiplied in float32.
    return "exact" if problem.dtype == torch.float16 and geo.format.scale != torch.float16 else "weights"

"""y [M, N] = x [M, K] · Wᵀ with few rows M (1 … 128): as fast as the weight can be read.

Weight: `layouts/gpu_tiles.py`, 4 or 8 bits, any zero. Yᵀ = W · Xᵀ: weights become the matrix units' A operand in the registers that
they were loaded to, x is the B operand, and the columns of the result are the rows of x.

A block of threads computes one tile, or its share of K, as `skinny_tile.py` has it, with its arithmetic. `split` blocks share K: their
sums are reduced in a workspace, by the last to arrive, in a fixed order, so that results are the same bits from run to run.

It wins up to about 64 rows, where reading the weight is most of the work; it takes any number. (On Hopper `skinny_hopper.py` is ahead
of it on most shapes.) With blocks of 128, one row of x takes 1.02 to 1.2 times as long as a bare read of the weight (H100, 8 to 117 MB), 8
rows 1.0 to 1.3 times as long as one.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from halfbyte.errors import KernelError
from halfbyte.kernels.gpu.arithmetic import in_groups, store_partial, sum_partials
from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.linear.skinny_config import BAND, Config, compiled_for, mode
from halfbyte.kernels.gpu.linear.skinny_tile import sums
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import locks, workspace
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_AHEAD = 4


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if geo.block_rows * geo.n_padded >= 1 << 31:
        return f"it counts scales in 32 bits, and there are {geo.block_rows} x {geo.n_padded}"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first. The rules come from measurements on an H100."""
    ptx = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    pdl = launcher.starts_early(gpu)
    if not _reads_directly(problem, gpu):
        candidates = _staged(problem, gpu)
    elif problem.format.bits == 4:
        candidates = _few_rows(problem, gpu)
    else:
        candidates = _few_rows_of_bytes(problem, gpu)
    hopper = _is_hopper(gpu)
    candidates = [
        replace(config, ptx=ptx, pdl=pdl, hopper=hopper, ahead=_ahead(config, problem, gpu) if pdl else 0) for config in candidates
    ]
    if pdl:  # the best ones also the other way
        candidates += [replace(config, ahead=_AHEAD - config.ahead) for config in candidates[:2]]
    return tuple(dict.fromkeys(candidates))


def _ahead(config: Config, problem: Problem, gpu: Gpu) -> int:
    """Where all blocks run at once, they ask for their weights before they may start; where others follow, that would be in their way."""
    blocks = -(-problem.n // (BAND * config.bands)) * -(-problem.m // config.columns) * config.split
    at_once = 2.2 if config.warps > 4 else 4.0 if config.bands == 1 or config.stages > 1 else 3.0
    if config.stages > 1 and gpu_tiles.geometry(problem.format, (problem.n, problem.k)).nbytes > gpu.l2:
        return 0
    return _AHEAD if blocks <= at_once * gpu.sms and (problem.format.bits == 4 or (config.stages > 1 and config.slices < 8)) else 0


def _is_hopper(gpu: Gpu) -> bool:
    return gpu.backend == "cuda" and gpu.capability[0] == 9


def _reads_directly(problem: Problem, gpu: Gpu) -> bool:
    """Whether weights go to registers without a stop in shared memory: where few rows of x leave nothing else to wait for."""
    return (
        gpu.backend == "cuda" and problem.m <= (8 if problem.format.bits == 4 or _is_hopper(gpu) else 16) and problem.dtype != torch.float32
    )


def _few_rows(problem: Problem, gpu: Gpu) -> list[Config]:
    """K is split among the warps of a block only, four ways or more."""
    bands_n = -(-problem.n // BAND)
    # Three blocks and more for each multiprocessor hide each other's waits and leave no long last wave.
    most = next((bands for bands in (8, 4, 2) if bands_n >= 3 * bands * gpu.sms), 1)
    columns = triton.next_power_of_2(problem.m)
    short = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD  # blocks: more scales, more registers
    if columns == 1:
        bands = min(most, 4)
        records = -(-problem.k // (8 * gpu_tiles.RECORD))  # of a warp
        deep = 1 if records == 1 or (bands == 1 and bands_n >= 3.5 * gpu.sms) else 4 // bands
        if bands == 1 and bands_n > 2.2 * gpu.sms:
            deep = min(deep, 2)  # fewer registers, so that more than two blocks find room
        choices = [(bands, deep), (bands, max(1, deep // 2)), (1, 4), (2, 2)]
        if short:
            choices = [(min(bands, 2), 2), (bands, 1), (bands, 2)]
            choices = [(2, 1)] * (bands == 1 and bands_n > 2.2 * gpu.sms) + choices
        if problem.format.codebook:  # whose decoding takes more registers: with larger tiles one block finds room, not two or three
            choices = [(1, 2), (1, 1)]
        return [Config(b, columns, 8, records=r) for b, r in choices]
    # A kernel for more rows than there are takes the same time: what is read of x is little, and products are free.
    whole = [Config(1, c, s, batch=b, records=4, warps=b) for c, s, b in ((4, 2, 4), (8, 1, 8)) if problem.k <= 32 * gpu_tiles.RECORD]
    two, four = Config(4, 2, 4, records=2), Config(4 if most < 4 else 8, 4, 2, records=2)
    alone = [Config(1, 4, 2, batch=n, records=2, warps=n) for n in (4, 8)]  # a band, and warps with parts of K
    eight = Config(2, 8, batch=4, records=2, warps=4) if most < 4 else Config(4, 8, batch=4, warps=4)
    single = Config(1, 8, batch=8, records=2)
    staged = [config for config in _staged(replace(problem, m=16), gpu) if config.bands == 8]
    long = problem.k >= 64 * gpu_tiles.RECORD
    if bands_n < 2.2 * gpu.sms:
        candidates = [*alone[:: -1 if long else 1], single, *staged]
        first = staged if columns == 8 and long else [single] if short else whole
    elif bands_n < 4.5 * gpu.sms:
        candidates = [*alone, Config(2, 8, batch=8, records=2), eight, *staged]
        first = staged if short else []
    else:
        candidates = [two, eight, four, alone[0], *staged]
        first = [eight] if columns > 2 or short else []
    return [config for config in dict.fromkeys([*first, *candidates]) if config.columns >= columns]


def _few_rows_of_bytes(problem: Problem, gpu: Gpu) -> list[Config]:
    """The same for 8 bits. Scales of short blocks are best read by as many threads as there are rows in a block of threads."""
    columns = triton.next_power_of_2(problem.m)
    short = gpu_tiles.geometry(problem.format, (problem.n, problem.k)).padded < gpu_tiles.RECORD
    fills = -(-problem.n // BAND) >= 3 * gpu.sms
    if columns == 1:
        one, few = Config(1, 1, 8), Config(1, 1, 8, warps=4)
        candidates = [few, Config(2, 1, 8), one] if short and fills else [one, few, Config(2, 1, 8)]
        candidates += [Config(2, 1, 8, records=2), Config(1, 1, 8, records=2)]
    elif columns <= 4:
        candidates = [Config(1, 4, 2, batch=4, warps=4), Config(2, 8, batch=8), Config(1, 8, batch=4, records=2, warps=4)]
    elif columns == 8:
        candidates = [Config(1, 8, batch=4, records=2, warps=4), Config(2, 8, batch=8), Config(1, 8, batch=4, warps=4)]
    else:
        candidates = [Config(1, 16, batch=4, warps=4), Config(4, 16, batch=4, warps=4, split=2)]
    return [*candidates, *_staged(problem, gpu)]


def _staged_bytes(problem: Problem, gpu: Gpu) -> list[Config]:
    """8 bits on Hopper: several small blocks for each multiprocessor, or few with much on its way. From measurements on an H100."""
    columns = max(16, min(triton.next_power_of_2(problem.m), 64))
    records = -(-problem.k // gpu_tiles.RECORD)
    candidates = []
    best = (8, 1, 4, 2) if columns == 32 else (4, 1, 4, 4)  # bands, records, stages, and blocks for each multiprocessor
    for bands, deep, stages, blocks in dict.fromkeys((best, (8, 2, 3, 1), (4, 1, 4, 4), (8, 1, 4, 1), (8, 1, 4, 2), (4, 2, 3, 4))):
        tiles = -(-problem.n // (BAND * bands)) * -(-problem.m // columns)
        split = 1
        while split < 8 and 2 * split * tiles <= 1.4 * gpu.sms * (blocks if columns < 64 else -(-blocks // 2)) and records >= 8 * split:
            split *= 2
        step = deep * (bands * 2048 + 256 * columns)
        stages = max(2, min(stages, (gpu.shared - (4 << 10) - 256 * columns) // step))
        candidates.append(Config(bands, columns, records=deep, stages=stages, warps=bands, split=split))
    return candidates


def _staged(problem: Problem, gpu: Gpu) -> list[Config]:
    """Weights and x are read ahead into shared memory; K is split over as many blocks as fill the GPU."""
    element, bits = problem.dtype.itemsize, problem.format.bits
    if bits == 8 and element == 2 and problem.m > 4 and _is_hopper(gpu):
        return _staged_bytes(problem, gpu)
    records = -(-problem.k // gpu_tiles.RECORD)
    columns = min(triton.next_power_of_2(problem.m), 16 if problem.dtype == torch.float32 else 128)
    if gpu.backend != "cuda" or gpu.capability[0] not in (9, 10):
        columns = min(columns, 64)  # without wgmma larger tiles do not fit in registers
    slices = max(1, (8 if gpu.backend == "cuda" else 16) // columns)
    candidates = []
    if slices == 8 and bits == 8:  # a row of bytes: each warp has a part of K, as in _few_rows
        sums = mode(problem) == "sums"
        stages = min(3, (gpu.shared - (4 << 10)) // (4 * (16384 + 128 * element)))
        candidates = [Config(2, 1, 8, records=2, stages=stages), Config(1, 1, 8)][:: 1 if sums else -1]
    for bands, blocks in ((4, 3.0), (8, 1.5)):  # of a tile, and for each multiprocessor
        bands = max(1, bands // slices)
        tiles = -(-problem.n // (BAND * bands)) * -(-problem.m // columns)
        wanted = blocks * gpu.sms / (2 if columns >= 64 else 1)
        split = 1
        least = 4 if bands == 8 and columns <= 32 else 8  # records of a block
        while split < 16 and 2 * split * tiles <= 1.4 * wanted and records >= 2 * least * slices * split:
            split *= 2
        deep = 2 if columns <= 64 and records >= 4 * slices * split and problem.dtype != torch.float32 else 1
        step, room = slices * (bands * 256 * bits + 128 * columns * element), gpu.shared - (4 << 10)
        if gpu.backend != "cuda":  # weights go from lane to lane through shared memory, and only x is read ahead into it
            step = slices * 128 * columns * element
            room = gpu.shared - slices * bands * BAND * 256 + step * deep
        deep = deep if room // (deep * step) >= 2 else 1  # nothing is read ahead in a single stage
        stages = max(1, min(3, room // (deep * step)))
        candidates.append(Config(bands, columns, slices, records=deep, stages=stages, warps=min(8, bands * slices), split=split))
    if columns == 32 and bits == 4:  # two of the matrix units' instructions for each x that they read
        candidates.append(replace(candidates[1], warps=4))
    return candidates[::-1] if slices < columns <= 32 and bits == 4 and mode(problem) == "sums" else candidates


def gated(problem: Problem, config: Config) -> Config | None:
    """`config` as gates need it: all of K in one block, and two bands of whole panels; None where the shape is not for them.

    One row of x: two bands, four records at a time, so that much of a block is read before the kernel before has ended.
    """
    if config.columns == 1 and config.bands * config.records == 4 and config.pdl:
        config = replace(config, bands=2, records=min(4, -(-problem.k // (config.slices * gpu_tiles.RECORD))))
    config = replace(config, bands=max(2, config.bands))
    return config if _takes_gates(problem, config) else None


def takes_norm(config: Config) -> bool:
    """Whether there is one row of x, and one block has all of K: each block finds the mean of its squares. From two rows on that takes
    longer than a kernel of its own."""
    return config.split == config.batch == config.columns == 1


def _takes_gates(problem: Problem, config: Config) -> bool:
    return config.bands >= 2 and config.split == 1 and problem.n % (2 * gpu_tiles.PANEL) == 0


def launch(
    problem: Problem,
    config: Config,
    x: Tensor,
    weight: gpu_tiles.Views,
    out: Tensor,
    epilogue: Epilogue,
    norm: tuple[Tensor, float, bool] | None = None,
) -> None:
    """x [M, K] (unit stride along K), after a norm (as `norm.py` has it) if there is one, times the weight of these sections -> out
    [M, N], contiguous (gates: [M, N / 2]).

    Raises KernelError where `config` is not for gates that are asked for.
    """
    if epilogue.gates and not _takes_gates(problem, config):
        raise KernelError(f"{config} of {problem} takes no gates: take what `gated` gives, or compute them apart")
    static, per = compiled_for(problem, config, clamps=epilogue.clamps)
    static = replace(static, gates=epilogue.gates, unit_offset=norm is not None and norm[2])
    tiles = -(-problem.n // static.outputs) * -(-problem.m // config.columns)
    scratch: tuple[Tensor, Tensor] | None = None
    if config.split > 1:
        nbytes = 4 * config.split * tiles * static.outputs * config.columns
        scratch = workspace(out.device, nbytes).view(torch.float32), locks(out.device, tiles)
    options: dict[str, int] = {}
    if epilogue.gates and config.pdl:
        options["maxnreg"] = min(255, 1024 // config.warps)  # two blocks for each multiprocessor: left alone the compiler takes more
    elif norm is not None and static.early and config.bands == 1 and config.warps == 8:
        options["maxnreg"] = 80  # three blocks
    elif config.batch > 1 and config.bands == 1 and config.pdl:
        options["maxnreg"] = 128  # 16 warps for each: with 137 half as many blocks of 8 ran at once, and took 1.4 times as long
    launcher.run(
        _skinny,
        (tiles, config.split),
        x,
        tuple(weight),
        out,
        (epilogue.bias, epilogue.residual),
        scratch,
        problem.m,
        problem.n,
        problem.k,
        x.stride(0),
        per,
        (epilogue.low, epilogue.high, epilogue.factor),
        None if norm is None else norm[:2],
        static,
        num_warps=config.warps,
        early=config.pdl,
        **options,
    )


# The kernel. `S` is a Static; rows are (batch, band, slice, row of 16), columns (slice, row of x).


@triton.jit(do_not_specialize=["M", "per"])
def _skinny(x, weight, out, added, scratch, M, N, K, stride, per, bounds, norm, S: tl.constexpr):
    SLICES: tl.constexpr = S.slices
    COLUMNS: tl.constexpr = S.columns
    OUTPUTS: tl.constexpr = S.outputs
    if S.pdl:
        gdc_launch_dependents()
    pm, pn = in_groups(tl.program_id(0), tl.cdiv(M, COLUMNS), tl.cdiv(N, OUTPUTS))
    first = tl.program_id(1) * (S.batch * SLICES) * per  # record of the first slice
    rn = pn * OUTPUTS + tl.arange(0, OUTPUTS)
    rm = pm * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.minimum(pm * COLUMNS + tl.arange(0, S.width) % COLUMNS, M - 1)
    residual = None
    if added[1] is not None and not S.gated and not S.split:
        residual = (added[1] + rm[None, :].to(tl.int64) * N + rn[:, None], (rn < N)[:, None] & (rm < M)[None, :])
    total = sums(x, rows, weight, N, K, stride, per, first, pn, norm, residual, S)
    if S.gated:
        HALF: tl.constexpr = S.outputs // 2
        GATES: tl.constexpr = S.gates
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, COLUMNS)), (1, 2, 0)))
        write(
            with_gates(gate, up, bounds[2], GATES),
            out,
            added,
            pn * HALF + tl.arange(0, HALF),
            rm,
            M,
            N // 2,
            bounds[0],
            bounds[1],
            S.clamp,
        )
    elif S.split:
        tiles = tl.num_programs(0)
        local = tl.arange(0, OUTPUTS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        part = scratch[0] + tl.program_id(0).to(tl.int64) * (OUTPUTS * COLUMNS) + local
        step = tiles.to(tl.int64) * (OUTPUTS * COLUMNS)
        lock = scratch[1] + tl.program_id(0)
        if store_partial(total, part, step, lock) == tl.num_programs(1) - 1:
            total = sum_partials(total, part, step, 4)
            write(total, out, added, rn, rm, M, N, bounds[0], bounds[1], S.clamp)
            tl.store(lock, 0)
    else:
        write(total, out, (added[0], None), rn, rm, M, N, bounds[0], bounds[1], S.clamp)

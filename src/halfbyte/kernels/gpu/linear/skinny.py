"""y [M, N] = x [M, K] · Wᵀ with few rows M (1 … 128): as fast as the weight can be read.

Weight: `layouts/gpu_tiles.py`, 4 or 8 bits, any zero. Yᵀ = W · Xᵀ: weights become the matrix units' A operand in the registers that
they were loaded to, x is the B operand, and the columns of the result are the rows of x.

Flow: `dispatch` asks `supports` and `configs`; `launch` starts `_skinny`, each of whose thread blocks computes one tile by
`skinny_tile.tile_sums`, which also defines the arithmetic. With `split` > 1 thread blocks share the K of a tile: their sums are reduced in
a workspace, by the last to arrive, in a fixed order, so that results are the same bits from run to run.

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
from halfbyte.kernels.gpu.arithmetic import grouped_ordering, store_partial, sum_partials
from halfbyte.kernels.gpu.epilogue import gated as with_gates
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.linear import skinny_config
from halfbyte.kernels.gpu.linear.skinny_config import Config, Static, compiled_for, takes_gates
from halfbyte.kernels.gpu.linear.skinny_tile import tile_sums
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import locks, workspace
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

# Which configs are tried, and what they allow: functions that `dispatch` finds here, as in each kernel's file.
configs, gated, takes_norm = skinny_config.configs, skinny_config.gated, skinny_config.takes_norm


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    if geo.block_rows * geo.n_padded >= 1 << 31:
        return f"it counts scales in 32 bits, and there are {geo.block_rows} x {geo.n_padded}"
    return None


def launch(
    problem: Problem,
    config: Config,
    x: Tensor,
    weight: gpu_tiles.Views,
    out: Tensor,
    epilogue: Epilogue,
    norm: tuple[Tensor, float, bool] | None = None,
) -> None:
    """Launch y = epilogue(norm(x) · Wᵀ).

    Args:
        problem: Of `m` rows, also with a norm or gates.
        config: One of `configs`; with gates one that `gated` returned, with a norm one that `takes_norm`.
        x: [M, K], unit stride along K.
        weight: The sections of W in layout "gpu_tiles".
        out: [M, N], contiguous; with gates [M, N / 2].
        epilogue: Bias [N] and residual [M, N], clamp, gates.
        norm: Of RMSNorm its weight [K], eps, and whether 1 + weight is multiplied (`transformer/norm.py`); None: x is multiplied as it is.

    Raises:
        KernelError: `config` does not allow the gates that are asked for.
    """
    if epilogue.gates and not takes_gates(problem, config):
        raise KernelError(f"{config} of {problem} takes no gates: take what `gated` gives, or compute them apart")
    static, part_slabs = compiled_for(problem, config, clamps=epilogue.clamps)
    static = replace(static, gates=epilogue.gates, unit_offset=norm is not None and norm[2])
    tiles = -(-problem.n // static.outputs) * -(-problem.m // config.columns)
    split_k: tuple[Tensor, Tensor] | None = None
    if config.split > 1:
        nbytes = 4 * config.split * tiles * static.outputs * config.columns
        split_k = workspace(out.device, nbytes).view(torch.float32), locks(out.device, tiles)
    most_registers = _most_registers(config, static, normed=norm is not None)
    added = epilogue.bias, epilogue.residual
    bounds = epilogue.low, epilogue.high, epilogue.factor
    launcher.run(
        _skinny,
        (tiles, config.split),
        x,
        tuple(weight),
        out,
        added,
        split_k,
        problem.m,
        problem.n,
        problem.k,
        x.stride(0),
        part_slabs,
        bounds,
        None if norm is None else norm[:2],
        static,
        num_warps=config.warps,
        early=config.pdl,
        **({} if most_registers is None else {"maxnreg": most_registers}),
    )


def _most_registers(config: Config, static: Static, *, normed: bool) -> int | None:
    """Return the registers per thread that the compiler may take; None: as many as it likes, with which too few thread blocks are resident
    in these cases, as measured on an H100."""
    if static.gated and config.pdl:
        return min(255, 65536 // (2 * 32 * config.warps))  # two thread blocks of the 65536 registers of a multiprocessor
    if normed and static.early and config.bands == 1 and config.warps == 8:
        return 80  # three thread blocks of 256 threads
    if config.batch > 1 and config.bands == 1 and config.pdl:
        return 128  # 16 warps: with 137 half as many blocks of 8 warps were resident, and it took 1.4 times as long
    if static.batch > config.batch and static.mode != "sums":
        return 128  # the same, of `skinny_config._with_batch`: Triton 3.9 takes up to 166
    return None


# The kernel. `S` is a `skinny_config.Static`. Rows of products are (batch, band, slice, row of 16), their columns (slice, row of x).


@triton.jit(do_not_specialize=["M", "part_slabs"])
def _skinny(x, weight, out, added, split_k, M, N, K, stride, part_slabs, bounds, norm, S: tl.constexpr):
    """Compute tile program_id(0) over the share of K that program_id(1) has.

    weight      codes, scales and zeros
    added       bias and residual; each may be None
    split_k     workspace and locks; None: one program has all of K
    part_slabs  K slabs of each part: a slice of a batch
    bounds      those of the clamp, and the factor of gates
    norm        its weight and eps, or None
    """
    SLICES: tl.constexpr = S.slices
    COLUMNS: tl.constexpr = S.columns
    OUTPUTS: tl.constexpr = S.outputs
    if S.pdl:
        gdc_launch_dependents()
    bias, residual = added
    low, high, factor = bounds
    pm, pn = grouped_ordering(tl.program_id(0), tl.cdiv(M, COLUMNS), tl.cdiv(N, OUTPUTS))
    first_slab = tl.program_id(1) * (S.batch * SLICES) * part_slabs
    rn = pn * OUTPUTS + tl.arange(0, OUTPUTS)
    rm = pm * COLUMNS + tl.arange(0, COLUMNS)
    rows = tl.minimum(pm * COLUMNS + tl.arange(0, S.width) % COLUMNS, M - 1)
    residual_tile = None  # is loaded together with x, unless sums are gated or reduced first
    if residual is not None and not S.gated and S.split == 1:
        residual_tile = (residual + rm[None, :].to(tl.int64) * N + rn[:, None], (rn < N)[:, None] & (rm < M)[None, :])
    total = tile_sums(x, rows, weight, N, K, stride, part_slabs, first_slab, pn, norm, residual_tile, S)
    if S.gated:
        HALF: tl.constexpr = S.outputs // 2
        GATES: tl.constexpr = S.gates
        gate, up = tl.split(tl.permute(tl.reshape(total, (2, HALF, COLUMNS)), (1, 2, 0)))
        y = with_gates(gate, up, factor, GATES)
        write(y, out, added, pn * HALF + tl.arange(0, HALF), rm, M, N // 2, low, high, S.clamp)
    elif S.split > 1:
        tiles = tl.num_programs(0)
        local = tl.arange(0, OUTPUTS)[:, None] * COLUMNS + tl.arange(0, COLUMNS)[None, :]
        partial = split_k[0] + tl.program_id(0).to(tl.int64) * (OUTPUTS * COLUMNS) + local
        stride_of_share = tiles.to(tl.int64) * (OUTPUTS * COLUMNS)
        lock = split_k[1] + tl.program_id(0)
        if store_partial(total, partial, stride_of_share, lock) == tl.num_programs(1) - 1:  # the last to arrive
            total = sum_partials(total, partial, stride_of_share, 4)
            write(total, out, added, rn, rm, M, N, low, high, S.clamp)
            tl.store(lock, 0)
    else:
        write(total, out, (bias, None), rn, rm, M, N, low, high, S.clamp)

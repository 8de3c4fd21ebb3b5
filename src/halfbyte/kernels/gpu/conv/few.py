"""y = x * W, a convolution of few pixels in float16 or bfloat16: a small tile has the whole of K at once, shared by the warps of a block.

The sums of `implicit_gemm.py`, made as `linear/skinny_tile.py` makes those of a few rows: each warp of a block has a part of K (`batch`),
of which it reads `records` together, codes to registers and x through shared memory; the warps' sums are added at the end, inside the
block. With one image it is the time from the first load to the last addition that counts, and there is only one wait for memory in it where
a part of K is not longer than `records`. Rows of x are patches: column k of one is found as `conv_tile.of_patches` has it. On Hopper,
stride 1 and channels by 64 take less time in `teams.py`.

Arithmetic: that of `linear/skinny_tile.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from halfbyte.kernels.gpu.conv.tile import places
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.linear import skinny_config
from halfbyte.kernels.gpu.linear.skinny_config import BAND, Config
from halfbyte.kernels.gpu.linear.skinny_tile import tile_sums
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.problem import ConvProblem, Epilogue, Problem
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import Gpu

_MOST_PIXELS = 4096
_MOST_SLABS = 3  # of a warp together: they are in registers
_LEAST_SLABS = 8


@dataclass(frozen=True)
class Static(skinny_config.Static):
    """What the kernel is compiled for. channels: of a tap; bounded: patches may reach beyond the image."""

    kernel_w: int = 1
    channels: int = 0
    bounded: bool = False


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    sizes = problem.sizes
    if not problem.m or not sizes.out or not sizes.k:
        return "there is nothing to multiply"
    if gpu.backend != "cuda":
        return f"it was measured on GPUs of CUDA alone, not on {gpu.name}"
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes 16 bits, not {problem.dtype}"
    if problem.m > _MOST_PIXELS:
        return f"{problem.m} pixels are not few: up to {_MOST_PIXELS}"
    if sizes.groups > 1 or sizes.channels % 32 or convolution.padded_for_gpu(sizes).padded != sizes.channels:
        return f"it takes no groups and channels by 32, not {sizes.groups} and {sizes.channels}"
    if not convolution.gpu_geometry(sizes).contiguous:
        return f"blocks of {sizes.format} are padded"
    return None


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return the best guess, as measured on an H100."""
    geo = convolution.gpu_geometry(problem.sizes)
    k_parts = 4 if geo.records <= 8 else 8
    bands = 1 if k_parts == 4 and geo.format.bits == 8 else 2
    ptx, pdl = not triton.knobs.runtime.interpret, launcher.starts_early(gpu)
    records = min(_MOST_SLABS, -(-geo.records // k_parts))
    return (Config(bands, 16, batch=k_parts, records=records, warps=k_parts, ptx=ptx, pdl=pdl),)


def wins(problem: ConvProblem, gpu: Gpu) -> bool:
    """Return whether it is that fast: all programs run at once, and each warp waits for memory once. There must be K to share."""
    records, (config,) = convolution.gpu_geometry(problem.sizes).records, configs(problem, gpu)
    warps = -(-problem.n // (BAND * config.bands)) * -(-problem.m // config.columns) * config.warps
    return _LEAST_SLABS <= records <= _MOST_SLABS * config.warps and warps <= 8 * gpu.sms


def launch(problem: ConvProblem, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M,
    Co]."""
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    product = Problem("linear", problem.m, problem.n, geo.k, geo.format, problem.dtype)
    static, part_slabs = skinny_config.compiled_for(product, config, clamps=epilogue.clamps)
    of_patches = Static(
        **vars(replace(static, taps=sizes.taps, early=True, single_step=part_slabs == config.records)),
        kernel_w=sizes.kernel[1],
        channels=sizes.channels,
        bounded=any(problem.window.padding),
    )
    image, window = places(problem, x)
    launcher.run(
        _conv,
        (-(-problem.n // of_patches.outputs), -(-problem.m // config.columns)),
        x,
        tuple(gpu_tiles.views(weight, geo)),
        out,
        (epilogue.bias, epilogue.residual),
        problem.m,
        problem.n,
        geo.k,
        part_slabs,
        image,
        (1 / problem.out[1], 1 / problem.out[0]),
        window,
        (epilogue.low, epilogue.high),
        of_patches,
        num_warps=config.warps,
        early=config.pdl,
    )


# The kernel. `S` is a Static.


@triton.jit
def _over(i, n, inverse):
    """Return i // n of small i, with `inverse` = 1 / n: an integer division takes ten times as long. (i + 1/2) / n is at least 1 / 2n
    away from an integer, and off by 2^-22 i / n at most."""
    if isinstance(n, tl.constexpr):  # 1
        return i
    else:
        return ((i.to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit(do_not_specialize=["M", "part_slabs"])
def _conv(x, weight, out, added, M, N, K, part_slabs, image, k_parts, window, bounds, S: tl.constexpr):
    COLUMNS: tl.constexpr = S.columns
    OUTPUTS: tl.constexpr = S.outputs
    if S.pdl:
        gdc_launch_dependents()
    height, width, ho, wo, pixel, _channels = image
    pn = tl.program_id(0)
    rn = pn * OUTPUTS + tl.arange(0, OUTPUTS)
    rm = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.minimum(rm, M - 1)
    row = _over(m, wo, k_parts[0])
    b = _over(row, ho, k_parts[1])
    y0 = ((row - b * ho) * window[0] - window[2])[None, None, :]
    x0 = ((m - row * wo) * window[1] - window[3])[None, None, :]
    first = x + b.to(tl.int64)[None, None, :] * (height * width * pixel) + (y0 * width + x0) * pixel
    residual = None
    if added[1] is not None:
        residual = (added[1] + rm[None, :].to(tl.int64) * N + rn[:, None], (rn < N)[:, None] & (rm < M)[None, :])
    total = tile_sums(x, (first, y0, x0, image, window), weight, N, K, 0, part_slabs, 0, pn, None, residual, S)
    write(total, out, (added[0], None), rn, rm, M, N, bounds[0], bounds[1], S.clamp)

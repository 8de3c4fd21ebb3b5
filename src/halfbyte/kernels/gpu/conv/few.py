"""y = x * W, a convolution of few pixels in float16 or bfloat16: a small tile has the whole of K at once, shared by the warps of a block.

It computes the sums of `implicit_gemm.py` with the tile of `linear/skinny_tile.py`, whose rows of x are patches (`tile.of_patches`): each
warp of a block has a part of K (`batch`), of which it reads `records` K slabs together, codes to registers and x through shared memory; the
warps' sums are added at the end, inside the block. With one image the latency from the first load to the last addition counts, and a warp
waits for memory only once if its part of K is not longer than `records`. On Hopper, `teams.py` takes less time for stride 1 and channels
that are a multiple of 64.

Arithmetic: that of `linear/skinny_tile.py`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents

from halfbyte.kernels.gpu.conv.implicit_gemm import supports as supports_any
from halfbyte.kernels.gpu.conv.tile import shapes
from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.linear import skinny_config
from halfbyte.kernels.gpu.linear.skinny_config import BAND, Config
from halfbyte.kernels.gpu.linear.skinny_tile import tile_sums
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.problem import ConvProblem, Epilogue, Problem
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import Gpu

# Limits from measurements on an H100.
_MOST_PIXELS = 4096  # of y
_MOST_SLABS = 3  # K slabs that a warp loads together: they are in registers
_LEAST_SLABS = 8  # K slabs of a filter from which warps share it
_RESIDENT_WARPS = 8  # per multiprocessor


@dataclass(frozen=True, kw_only=True)
class Static(skinny_config.Static):
    """What the kernel is compiled for, in addition to `skinny_config.Static`.

    Attributes:
        kernel_w: Taps of a row of the filter.
        channels: Of a tap.
        pads_image: Whether patches may reach beyond the image.
    """

    kernel_w: int = 1
    channels: int = 0
    pads_image: bool = False


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    sizes = problem.sizes
    if reason := supports_any(problem, gpu):
        return reason
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
    if convolution.gpu_geometry(sizes).blocks_a_record > 4:
        return f"it has no registers for the scales of blocks of {sizes.format}, of 16 elements of K: from 32 on"
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
    """Return whether dispatch takes this kernel: all programs run at once, each warp waits for memory once, and there is K to share."""
    records, (config,) = convolution.gpu_geometry(problem.sizes).records, configs(problem, gpu)
    warps = -(-problem.n // (BAND * config.bands)) * -(-problem.m // config.columns) * config.warps
    return _LEAST_SLABS <= records <= _MOST_SLABS * config.warps and warps <= _RESIDENT_WARPS * gpu.sms


def launch(problem: ConvProblem, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M,
    Co]."""
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    product = Problem("linear", problem.m, problem.n, geo.k, geo.format, problem.dtype)
    static, part_slabs = skinny_config.compiled_for(product, config, clamps=epilogue.clamps)
    static_of_patches = Static(
        **vars(replace(static, taps=sizes.taps, early=True, single_step=part_slabs == config.records)),
        kernel_w=sizes.kernel[1],
        channels=sizes.channels,
        pads_image=any(problem.window.padding),
    )
    image, window = shapes(problem, x)
    launcher.run(
        _conv,
        (-(-problem.n // static_of_patches.outputs), -(-problem.m // config.columns)),
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
        static_of_patches,
        num_warps=config.warps,
        early=config.pdl,
    )


# The kernel. `S` is a Static.


@triton.jit
def _divided(i, n, inverse):
    """Return i // n for i < 2^21, with `inverse` = 1 / n, as an integer division takes ten times as long. It is exact: (i + 1/2) / n is at
    least 1 / 2n away from an integer, and its error at most 2^-22 i / n."""
    if isinstance(n, tl.constexpr):  # Triton makes an argument of 1 a constant
        return i
    else:
        return ((i.to(tl.float32) + 0.5) * inverse).to(tl.int32)


@triton.jit(do_not_specialize=["M", "part_slabs"])
def _conv(x, weight, out, added, M, N, K, part_slabs, image, inverses, window, bounds, S: tl.constexpr):
    """Compute tile (program_id(0), program_id(1)). `inverses` of width and height of y; other arguments as in `skinny._skinny` and
    `implicit_gemm._conv`."""
    COLUMNS: tl.constexpr = S.columns
    OUTPUTS: tl.constexpr = S.outputs
    if S.pdl:
        gdc_launch_dependents()
    bias, residual = added
    low, high = bounds
    pn = tl.program_id(0)
    rn = pn * OUTPUTS + tl.arange(0, OUTPUTS)
    rm = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    m = tl.minimum(rm, M - 1)
    row = _divided(m, image.out_width, inverses[0])
    b = _divided(row, image.out_height, inverses[1])
    y0 = ((row - b * image.out_height) * window.stride_y - window.top)[None, None, :]
    x0 = ((m - row * image.out_width) * window.stride_x - window.left)[None, None, :]
    image_elements = image.height * image.width * image.pixel_stride
    first_pixel = x + b.to(tl.int64)[None, None, :] * image_elements + (y0 * image.width + x0) * image.pixel_stride
    residual_tile = None
    if residual is not None:
        residual_tile = (residual + rm[None, :].to(tl.int64) * N + rn[:, None], (rn < N)[:, None] & (rm < M)[None, :])
    total = tile_sums(x, (first_pixel, y0, x0, image, window), weight, N, K, 0, part_slabs, 0, pn, None, residual_tile, S)
    write(total, out, (bias, None), rn, rm, M, N, low, high, S.clamp)

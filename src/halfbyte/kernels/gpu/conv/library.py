"""y = x * W with the weight written out in x's type and convolved by cuDNN (MIOpen): for many pixels, where nothing better is.

What it costs besides cuDNN's convolution is one pass over the weight, and memory for it that lasts as long as the call; what is added
to the sums takes a pass over y.

Arithmetic: the weight is rounded once to x's type, sums are as cuDNN makes them, and are rounded to x's type before anything is added.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import clamped
from halfbyte.kernels.gpu.quantize import dequantize
from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.problem import ConvProblem, Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import Gpu

_BLOCK = 4096


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this way, or None."""
    sizes, (top, bottom, left, right) = problem.sizes, problem.window.padding
    padded = convolution.padded_for_gpu(sizes)
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it is for float16 and bfloat16, not {problem.dtype}"
    if (top, left) != (bottom, right):
        return f"cuDNN pads both sides equally, not by {problem.window.padding}"
    if padded.padded != sizes.channels:
        return f"the {sizes.channels} channels of a tap are padded to {padded.padded}"
    return None


def launch(problem: ConvProblem, x: Tensor, weight: Tensor, epilogue: Epilogue) -> Tensor:
    """x [B, H, W, C] in memory, weight of layout "gpu_tiles" -> [M, Co]; bias [Co] and residual [M, Co] in the epilogue."""
    sizes, window, geo = problem.sizes, problem.window, convolution.gpu_geometry(problem.sizes)
    shape = (sizes.groups, problem.n, geo.k)
    nbytes = sizes.out * geo.k * x.element_size()
    rows = workspace(x.device, nbytes)[:nbytes].view(x.dtype).view(shape)
    for group in range(sizes.groups):
        dequantize.write(gpu_tiles.views(weight[group * geo.nbytes :][: geo.nbytes], geo), geo, rows[group])
    floats = rows.view(sizes.out, *sizes.kernel, sizes.channels).permute(0, 3, 1, 2)
    padding = window.padding[0], window.padding[2]
    y = torch.nn.functional.conv2d(x.permute(0, 3, 1, 2), floats, None, window.stride, padding, window.dilation, sizes.groups)
    out = y.permute(0, 2, 3, 1).reshape(problem.m, sizes.out)
    if epilogue.bias is not None or epilogue.residual is not None or epilogue.clamps:
        added, ends = (epilogue.bias, epilogue.residual), (epilogue.low, epilogue.high)
        run(
            _finish,
            (-(-out.numel() // _BLOCK),),
            out,
            added,
            out.numel(),
            sizes.out,
            ends,
            CLAMP=epilogue.clamps,
            BLOCK=_BLOCK,
            num_warps=8,
        )
    return out


@triton.jit(do_not_specialize=["size"])
def _finish(out, added, size, N, bounds, CLAMP: tl.constexpr, BLOCK: tl.constexpr):
    """out = clamp(out + bias + residual), rows of N."""
    i = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(out + i, mask=i < size, other=0.0).to(tl.float32)
    if added[0] is not None:
        total += tl.load(added[0] + i % N).to(tl.float32)
    if added[1] is not None:
        total += tl.load(added[1] + i, mask=i < size, other=0.0).to(tl.float32)
    if CLAMP:
        total = clamped(total, bounds[0], bounds[1])
    tl.store(out + i, total.to(out.dtype.element_ty), mask=i < size)

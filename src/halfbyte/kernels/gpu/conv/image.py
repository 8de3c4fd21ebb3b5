"""y = x * W, a convolution of images that are quantized once, with a scale each (`activation="image"`).

    q[b] = rne(fl(x[b] * fl(127 / amax[b])))        scale[b] = fl(amax[b] / 127)
    y[m, n] = clamp(scale[b] * sw[n] * sum(q * qw) + bias[n] + residual[m, n])        b: the image of patch m

as `conv_reference.quantized_images` has it, bit for bit. Two launches read x, for the greatest magnitude of each image and for its codes;
the third is the integer product of `implicit_gemm.py`. Weights are symmetric with one scale per channel or tensor, so that the zeros
outside of an image are codes 0.

Arithmetic: sums are exact; a sum as float32, the product of the scales, their product, and each addend are rounded once.
"""

from __future__ import annotations

from dataclasses import replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.arithmetic import MAGIC, row_and_column, scale_of
from halfbyte.kernels.gpu.conv import implicit_gemm as conv
from halfbyte.kernels.gpu.conv.tile import Config
from halfbyte.kernels.gpu.quantize.activations import aligned
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.problem import ConvProblem, Epilogue
from halfbyte.layouts import convolution
from halfbyte.machine import Gpu

_BLOCK = 4096  # elements that a program looks at together
_MOST_PIECES = 256  # of an image, each with a greatest magnitude of its own at first
_MOST_ELEMENTS = (1 << 31) - _MOST_PIECES * _BLOCK  # of an image: `_largest` counts, in int32, up to a block of each piece beyond them


def _of_codes(problem: ConvProblem) -> ConvProblem:
    return replace(problem, dtype=torch.int8)


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    elements = problem.image[0] * problem.image[1] * convolution.gpu_image_channels(problem.sizes)
    if elements > _MOST_ELEMENTS:
        return f"an image of {elements} elements has more than the {_MOST_ELEMENTS} that are counted in int32"
    return conv.supports(_of_codes(problem), gpu)


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs of the product, the best guess first."""
    return conv.configs(_of_codes(problem), gpu)


def launch(problem: ConvProblem, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M,
    Co]."""
    batch, size, integers = problem.batch, x[0].numel(), _of_codes(problem)
    pieces = min(_MOST_PIECES, -(-size // _BLOCK))
    scales_at = aligned(x.numel())
    most_at = scales_at + aligned(4 * batch)
    image_bytes = most_at + aligned(4 * batch * pieces)
    memory = workspace(out.device, image_bytes + conv.workspace_bytes(integers, config))
    q = memory[: x.numel()].view(torch.int8).view(x.shape)
    scales = memory[scales_at:][: 4 * batch].view(torch.float32)
    most = memory[most_at:][: 4 * batch * pieces].view(torch.int32)
    launcher.run(_largest, (batch, pieces), x, most, size, BLOCK=_BLOCK, num_warps=4)
    # Without fused multiply-adds: a product is rounded to float32 before it is rounded to an integer.
    grid, piece_lanes = launcher.flat_grid(batch, -(-size // _BLOCK)), triton.next_power_of_2(pieces)
    launcher.run(_quantize, grid, x, most, q, scales, size, pieces, BLOCK=_BLOCK, PIECES=piece_lanes, num_warps=4, enable_fp_fusion=False)
    conv.launch(integers, config, q, weight, out, epilogue, (scales, memory[image_bytes:]))


@triton.jit
def _largest(x, most, size, BLOCK: tl.constexpr):
    """Write most [B, pieces]: the greatest magnitude, as bits, of every pieces-th block of image program_id(0)."""
    x += tl.program_id(0).to(tl.int64) * size
    largest = tl.zeros([BLOCK], tl.int32)
    for start in range(tl.program_id(1) * BLOCK, size, tl.num_programs(1) * BLOCK):
        i = start + tl.arange(0, BLOCK)
        values = tl.load(x + i, mask=i < size, other=0.0).to(tl.float32)
        largest = tl.maximum(largest, values.to(tl.int32, bitcast=True) & 0x7FFFFFFF)
    tl.store(most + tl.program_id(0) * tl.num_programs(1) + tl.program_id(1), tl.max(largest, axis=0))


@triton.jit
def _quantize(x, most, q, scales, size, pieces, BLOCK: tl.constexpr, PIECES: tl.constexpr):
    """Quantize a block of an image (`row_and_column`)."""
    b, column = row_and_column(tl.cdiv(size, BLOCK))
    piece = tl.arange(0, PIECES)
    largest = tl.max(tl.load(most + b * pieces + piece, mask=piece < pieces, other=0), axis=0, keep_dims=True)
    reach = largest.to(tl.float32, bitcast=True)
    scale, inverse, _ = scale_of(reach, tl.zeros_like(reach), largest < 0x7F800000)
    if column == 0:
        tl.store(scales + b + tl.arange(0, 1), scale)
    i = column * BLOCK + tl.arange(0, BLOCK)
    at = b.to(tl.int64) * size + i
    values = tl.load(x + at, mask=i < size, other=0.0).to(tl.float32)
    values = tl.where(tl.abs(values) < float("inf"), values, 0.0) * inverse
    codes = (tl.minimum(tl.maximum(values, -127.0), 127.0) + MAGIC) - MAGIC
    tl.store(q + at, codes.to(tl.int8), mask=i < size)

"""Which kernel convolves on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.dispatch.cpu import choose_product
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.conv import amx, arranged, depthwise_dot, unsigned, winograd
from halfbyte.kernels.cpu.conv.amx import MatrixConvKernel
from halfbyte.kernels.cpu.conv.arranged import ArrangedConvKernel
from halfbyte.kernels.cpu.conv.depthwise import DepthwiseKernel
from halfbyte.kernels.cpu.conv.depthwise_dot import DepthwiseDotKernel
from halfbyte.kernels.cpu.conv.gathered import ConvKernel, ImageConvKernel, ImageMatrixKernel
from halfbyte.kernels.cpu.conv.planned import RearrangedWeights
from halfbyte.kernels.cpu.conv.unsigned import UnsignedConvKernel
from halfbyte.kernels.cpu.conv.winograd import WinogradKernel
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.kernels.problem import Problem, Window
from halfbyte.layouts.convolution import Filter


class CpuConvChoice(NamedTuple):
    """The kernel that takes the packed weight as it is, and one with weights in a form of its own, where that is faster."""

    kernel: Callable[..., Tensor]
    other: RearrangedWeights | None


def multiplied(sizes: Filter, dtype: torch.dtype, compute: str, activation: str) -> Inner:
    """What products are made of. A scale for each image asks for integers. Raises ArgumentError for an unknown compute."""
    wanted = "int8" if activation == "image" and compute == "auto" else compute
    if dtype == torch.int8:
        return "int8"
    problem = Problem("linear", 1, sizes.out, sizes.k, sizes.matrix_format, dtype, wanted)  # type: ignore[arg-type]
    return choose_product(problem, current()).options[0].candidate.inner


def choose_cpu_conv(
    sizes: Filter, window: Window, out: tuple[int, int, int], dtype: torch.dtype, inner: Inner, activation: str, outside: int
) -> CpuConvChoice:
    """The kernels for images of `dtype` and outputs [B, Ho, Wo], of which there are some. `outside` is what stands for 0 among codes."""
    isa = current()
    if sizes.depthwise:
        quads = dtype == torch.int8 and depthwise_dot.supports(sizes, window, isa)
        return CpuConvChoice(DepthwiseKernel(sizes, dtype), DepthwiseDotKernel(sizes, window, out[1]) if quads else None)
    by_image = activation == "image" and inner == "int8"
    codes, way = (torch.int8, "block") if by_image else (dtype, activation)
    direct = ConvKernel(sizes, codes, inner, way, out=dtype)  # type: ignore[arg-type]
    other: RearrangedWeights | None = None
    if codes == torch.int8 and amx.supports(sizes, window, out, isa):
        matrix = MatrixConvKernel(sizes, window, isa.matrix, dtype)  # type: ignore[arg-type]
        other = ImageMatrixKernel(matrix) if by_image else matrix
    elif dtype == torch.int8 and winograd.supports(sizes, window, isa) and winograd.pays(sizes, out, isa):
        other = WinogradKernel(sizes)
    elif dtype == torch.int8 and arranged.supports(sizes, isa):
        other = ArrangedConvKernel(sizes, window, direct.linear)
    elif dtype == torch.int8 and unsigned.supports(sizes, window, out[1], outside, isa):
        other = UnsignedConvKernel(sizes, window, direct.linear)
    return CpuConvChoice(ImageConvKernel(direct) if by_image else direct, other)

"""Which kernel convolves on a CPU: the literal list, best first, and why each may not be taken.

Several multiply by weights in a form of their own, which is made of the packed ones once and which some weights do not fit: these go to
the first kernel after it that takes weights as they are packed.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

import torch

from halfbyte.dispatch.candidate import Candidate, Choice, decide
from halfbyte.dispatch.cpu import choose_product
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.conv import amx, arranged, depthwise_dot, unsigned
from halfbyte.kernels.cpu.conv.amx import MatrixConvKernel
from halfbyte.kernels.cpu.conv.arranged import ArrangedConvKernel
from halfbyte.kernels.cpu.conv.depthwise import DepthwiseKernel
from halfbyte.kernels.cpu.conv.depthwise_dot import DepthwiseDotKernel
from halfbyte.kernels.cpu.conv.gathered import ConvKernel, ImageConvKernel, ImageRearrangedKernel
from halfbyte.kernels.cpu.conv.unsigned import UnsignedConvKernel
from halfbyte.kernels.cpu.conv.winograd import winograd_call
from halfbyte.kernels.cpu.conv.winograd.winograd_call import WinogradKernel, WinogradScalingKernel
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.kernels.problem import ConvProblem, Problem, check_one_scale

_MOST_WEIGHTS = 3  # times the bytes of the outputs, where weights in a second form are for networks that are quantized to be small


@dataclass(frozen=True)
class CpuConvCandidate(Candidate[ConvProblem, ISA]):
    """A convolution on CPUs. A config is what its products are made of.

    Attributes:
        make: Returns the compiled kernel.
        rearranges: Whether it multiplies by weights in a form of its own (`RearrangedWeights`).
    """

    make: Callable[[ConvProblem, ISA, Inner], Any] = field(kw_only=True)
    rearranges: bool = True

    def configs(self, problem: ConvProblem, machine: ISA) -> Sequence[Inner]:
        """Return what products are made of."""
        return (inner_of(problem, machine),)

    def kernel(self, problem: ConvProblem, machine: ISA, config: Inner) -> Any:
        """Return the compiled kernel for images of the size of the problem's."""
        return self.make(problem, machine, config)


def inner_of(problem: ConvProblem, isa: ISA) -> Inner:
    """What products are made of: codes of images in their own type, others as in a linear layer; a scale for each image asks for integers.

    Raises ArgumentError for an unknown compute."""
    if problem.dtype == torch.int8:
        return "int8"
    sizes = problem.sizes
    wanted = "int8" if problem.activation == "image" and problem.compute == "auto" else problem.compute
    product = Problem("linear", 1, sizes.out, sizes.k, sizes.matrix_format, problem.dtype, wanted)
    return choose_product(product, isa).options[0].candidate.inner


def quantizes_images(problem: ConvProblem) -> bool:
    """Whether images of a `settled` problem are quantized with one scale each."""
    return problem.activation == "image" and problem.compute == "int8" and problem.dtype != torch.int8


def settled(problem: ConvProblem, isa: ISA) -> ConvProblem:
    """Return the problem with its compute: depthwise convolutions of numbers are computed in floating point.

    Raises ArgumentError for an unknown compute."""
    compute: Literal["float", "int8"] = "int8" if inner_of(problem, isa) == "int8" else "float"
    return replace(problem, compute="float" if problem.sizes.depthwise and problem.dtype != torch.int8 else compute)


def choose_conv(problem: ConvProblem, isa: ISA) -> Choice[ConvProblem, CpuConvCandidate]:
    """The kernel for `problem`, of which there are outputs: the first of the list that may be taken. Among the others is one that takes any
    weights, where that one may not. Raises ArgumentError for an unknown compute."""
    problem = settled(problem, isa)
    if (reason := problem.why_long()) is not None:
        return Choice(problem, None, (), tuple((candidate, reason) for candidate in CPU_CONV))
    if quantizes_images(problem):
        check_one_scale(problem.sizes)
    choice = decide(CPU_CONV, problem, isa)
    if choice.taken is None:  # the last ones refuse nothing
        raise UnsupportedError(f"{problem} has no kernel on a CPU: this is a fault in halfbyte, please report it")
    return choice


# The reasons


def _why_not_dense(problem: ConvProblem) -> str | None:
    return "a depthwise convolution multiplies no matrix" if problem.sizes.depthwise else None


def _why_not_numbers(problem: ConvProblem) -> str | None:
    if (reason := _why_not_dense(problem)) is not None:
        return reason
    return None if problem.dtype == torch.int8 else "it is for images of codes"


def _why_not_format(problem: ConvProblem, *, symmetric: bool = True) -> str | None:
    fmt = problem.sizes.format
    if fmt.bits != 8 or (symmetric and (fmt.zero != "none" or isinstance(fmt.block, int))):
        return f"it takes weights of 8 bits{' with one scale per channel or tensor' if symmetric else ''}, not {fmt}"
    return None


def _why_not_depthwise_dot(problem: ConvProblem, isa: ISA) -> str | None:
    sizes, window = problem.sizes, problem.window
    if not sizes.depthwise or problem.dtype != torch.int8:
        return "it is for depthwise convolutions of codes"
    if not isa.mixed_dot:
        return f"{isa.name} has no dot product of unsigned with signed bytes"
    if (reason := _why_not_format(problem, symmetric=False)) is not None:
        return reason
    if depthwise_dot.supports(sizes, window, isa):
        return None
    kernel = f"{sizes.kernel[0]} x {sizes.kernel[1]}"
    return f"{sizes.out} channels are few, or a kernel of {kernel} with stride {window.stride} and dilation {window.dilation} is too large"


def _why_not_depthwise(problem: ConvProblem, isa: ISA) -> str | None:
    return None if problem.sizes.depthwise else "it is for convolutions with one channel in each group"


def _why_not_amx(problem: ConvProblem, isa: ISA) -> str | None:
    if (reason := _why_not_dense(problem)) is not None:
        return reason
    if problem.dtype != torch.int8 and not quantizes_images(problem):
        return "it is for images of codes, or such that are quantized with one scale each (activation='image')"
    if isa.matrix is None:
        return f"{isa.name} has no matrix unit"
    if (reason := _why_not_format(problem)) is not None:
        return reason
    if amx.supports(problem.sizes, problem.window, (problem.batch, *problem.out), isa):
        return None
    return f"{problem.m} outputs of {problem.n} channels are too few for it, or filled up with too many zeros"


def _why_not_winograd(problem: ConvProblem, isa: ISA) -> str | None:
    if (reason := _why_not_dense(problem)) is not None:
        return reason
    if problem.dtype != torch.int8:
        if not quantizes_images(problem):
            return "it is for images of codes, or such that are quantized with one scale each (activation='image')"
        if (reason := _why_not_format(problem)) is not None:
            return reason
        if problem.sizes.out % (2 * isa.lanes) or (problem.dtype == torch.float16 and not isa.half_conversions):
            return f"it writes floating point of channels by {2 * isa.lanes}, and no halves without the CPU's conversions"
        if winograd_call.weight_bytes(problem.sizes) > problem.m * problem.n * problem.dtype.itemsize * _MOST_WEIGHTS:
            return "its second form of the weights is larger than what it computes"
    if isa.tuning.winograd is None:
        return f"it was not found faster with {isa.name}"
    if not winograd_call.supports(problem.sizes, problem.window, isa):
        return f"it takes 8 bits, 3 x 3 kernels, stride and dilation 1, no groups, and channels by {2 * isa.lanes}"
    if not winograd_call.pays(problem.sizes, (problem.batch, *problem.out), isa):
        return "its fewer products take longer here, as images and outputs are transformed"
    return None


def _why_not_arranged(problem: ConvProblem, isa: ISA) -> str | None:
    if (reason := _why_not_numbers(problem)) is not None:
        return reason
    if not isa.tuning.arranged_conv:
        return f"{isa.name} has better products of bytes than it is for" if isa.mixed_dot else f"{isa.name} lacks the products of bytes"
    if (reason := _why_not_format(problem)) is not None:
        return reason
    return None if arranged.supports(problem.sizes, isa) else f"sums of {problem.sizes.k} products may overflow an int32"


def _why_not_unsigned(problem: ConvProblem, isa: ISA) -> str | None:
    if (reason := _why_not_numbers(problem)) is not None:
        return reason
    if not isa.mixed_dot:
        return f"{isa.name} has no dot product of unsigned with signed bytes"
    if (reason := _why_not_format(problem)) is not None:
        return reason
    if unsigned.supports(problem.sizes, problem.window, problem.out[0], problem.outside, isa):
        return None
    return "too little of it lies outside of the image, and its channels are multiples of 8, or fill up quads badly"


# The kernels


def _gathered(problem: ConvProblem, inner: Inner) -> ConvKernel:
    codes, way = (torch.int8, "block") if quantizes_images(problem) else (problem.dtype, problem.activation)
    return ConvKernel(problem.sizes, codes, inner, way, out=problem.dtype)  # type: ignore[arg-type]


def _make_gathered(problem: ConvProblem, isa: ISA, inner: Inner) -> ConvKernel | ImageConvKernel:
    kernel = _gathered(problem, inner)
    return ImageConvKernel(kernel) if quantizes_images(problem) else kernel


def _make_amx(problem: ConvProblem, isa: ISA, inner: Inner) -> MatrixConvKernel | ImageRearrangedKernel:
    matrix = MatrixConvKernel(problem.sizes, problem.window, isa.matrix, problem.dtype)  # type: ignore[arg-type]
    return ImageRearrangedKernel(matrix) if quantizes_images(problem) else matrix


def _make_winograd(problem: ConvProblem, isa: ISA, inner: Inner) -> WinogradKernel | ImageRearrangedKernel:
    if problem.dtype == torch.int8:
        return WinogradKernel(problem.sizes)
    return ImageRearrangedKernel(WinogradScalingKernel(problem.sizes, problem.dtype))


# The list, in the order of preference.
CPU_CONV = (
    CpuConvCandidate(
        "depthwise_dot", "four taps of a channel with one dot product of bytes", "it makes more products with one instruction",
        why_not=_why_not_depthwise_dot, make=lambda p, isa, inner: DepthwiseDotKernel(p.sizes, p.window, p.out[0]),
    ),
    CpuConvCandidate(
        "depthwise", "each channel by itself, channels side by side in a vector", "it is made for one channel in each group",
        why_not=_why_not_depthwise, make=lambda p, isa, inner: DepthwiseKernel(p.sizes, p.dtype), rearranges=False,
    ),
    CpuConvCandidate(
        "amx", "products of bytes on the CPU's matrix unit", "the matrix unit does the most products", why_not=_why_not_amx, make=_make_amx
    ),
    CpuConvCandidate(
        "winograd", "minimal filtering of 3 x 3 kernels: fewer products, of transformed images and weights", "it needs fewer products",
        why_not=_why_not_winograd, make=_make_winograd,
    ),
    CpuConvCandidate(
        "arranged", "signed bytes in an order in which no pair of products overflows 16 bits", "it needs fewer instructions for a product",
        why_not=_why_not_arranged, make=lambda p, isa, inner: ArrangedConvKernel(p.sizes, p.window, _gathered(p, inner).linear),
    ),
    CpuConvCandidate(
        "unsigned", "images as unsigned bytes: what lies outside of one is 0, and is not multiplied", "it leaves products out",
        why_not=_why_not_unsigned, make=lambda p, isa, inner: UnsignedConvKernel(p.sizes, p.window, _gathered(p, inner).linear),
    ),
    CpuConvCandidate(
        "gathered", "patches gathered a cacheful at a time, for the tiles of linear layers", rearranges=False,
        why_not=lambda p, isa: _why_not_dense(p), make=_make_gathered,
    ),
)  # fmt: skip

"""Which kernel convolves on a GPU: `choose_conv` takes the first of the list GPU_CONV that has no reason against it.

The reasons (`_why_not_…`) follow what was measured on an H100 and an H200 (`benchmarks/conv.py --device cuda`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from importlib import import_module
from typing import Any, Literal

import torch

from halfbyte.dispatch.candidate import Candidate, Choice, decide
from halfbyte.dispatch.gpu import compute_of, why_no_triton
from halfbyte.errors import UnsupportedError
from halfbyte.kernels.problem import ConvProblem, check_one_scale
from halfbyte.machine import Gpu

_LEAST_WRITTEN = 4096  # patches from which on it pays to write the dequantized weight to memory first
_FEW_ROWS = 64  # up to so many, linear layers have kernels of their own

# How a kernel reads a convolution:
#   "pixels"   as the op `linear`, with a row for each pixel
#   "taps"     the image, and the taps of each channel
#   "image"    the image and the weight, as they are
#   "patches"  as `as_read` describes it
Reads = Literal["pixels", "taps", "image", "patches"]


@dataclass(frozen=True)
class GpuConvCandidate(Candidate[ConvProblem, Gpu]):
    """A kernel that convolves on GPUs.

    Attributes:
        reads: How it reads a convolution.
        home: Its module in kernels/gpu, which has `configs` and `launch`; "": the op `linear` computes it, which chooses a kernel.
        replayable: Whether it writes to a given tensor by launches that can be replayed; else torch's operations return a new tensor.
        adds: Whether it computes an `Addition` to codes before it writes them.
    """

    reads: Reads = field(kw_only=True)
    home: str = ""
    replayable: bool = True
    adds: bool = False

    @property
    def module(self) -> Any:
        return import_module(f"halfbyte.kernels.gpu.{self.home}")

    def supports(self, problem: ConvProblem, machine: Gpu) -> str | None:
        """Return the reason why it does not solve `problem`, or should not; None if it may be taken."""
        if self.home and (no_triton := why_no_triton()) is not None:
            return no_triton
        if self.reads == "patches" and (reason := _why_not_patches(problem)) is not None:
            return reason
        return self.why_not(self.solved(problem), machine)

    def solved(self, problem: ConvProblem) -> ConvProblem:
        """Return the problem as its module takes it."""
        return as_read(problem) if self.reads == "patches" else problem

    def configs(self, problem: ConvProblem, machine: Gpu) -> Sequence[object]:
        """Return the config that its module lists first: times of convolutions are not predicted."""
        if not self.home or not self.replayable:
            return (None,)
        return self.module.configs(self.solved(problem), machine)[:1]  # type: ignore[no-any-return]

    def launch(self, problem: ConvProblem, config: object, *operands: object) -> Any:
        """Convolve images.

        Args:
            problem: `solved`.
            config: One of `configs`.
            operands: The image in memory [B, H, W, C], the weight, the result [M, Co], an Epilogue. Without the result where the kernel is
                not `replayable`, which returns it.
        """
        return self.module.launch(problem, config, *operands)


def as_read(problem: ConvProblem) -> ConvProblem:
    """Return a convolution as kernels of patches read it.

    One with few channels has pieces of lines as taps (`conv/stem.py`); one of one tap has a pixel for each image (`ConvProblem.flat`).
    """
    from halfbyte.kernels.gpu.conv import stem

    return stem.stem_of(problem) or problem.flat


def choose_conv(problem: ConvProblem, gpu: Gpu) -> Choice[ConvProblem, GpuConvCandidate]:
    """Choose the kernel of a convolution on a GPU; nothing taken: torch's operations compute it.

    Raises:
        UnsupportedError: No kernel computes it, and torch's operations do not, either.
    """
    problem = replace(problem, compute=_compute_of(problem))
    if (reason := problem.why_long()) is not None:
        return Choice(problem, None, (), tuple((candidate, reason) for candidate in GPU_CONV))
    if problem.activation == "image" and problem.compute == "int8" and problem.dtype != torch.int8:
        check_one_scale(problem.sizes)
    choice = decide(GPU_CONV, problem, gpu)
    if choice.taken is not None:
        return choice
    if (no_triton := why_no_triton()) is not None:
        if problem.dtype == torch.int8:
            raise UnsupportedError(f"qconv2d needs Triton: {no_triton}, or use the CPU")
        if problem.compute == "int8":
            raise UnsupportedError(f"compute='int8' needs Triton: {no_triton}, or use compute='float'")
        return choice
    reasons = "; ".join(f"{name}: {reason}" for name, reason in choice.reasons.items())
    raise UnsupportedError(f"no kernel on {gpu.name} solves {problem} ({reasons}): use the CPU")


def _compute_of(problem: ConvProblem) -> Literal["float", "int8"]:
    """Return what a convolution is computed in: int8 where a scale for each image is asked for; depthwise ones of floats in float."""
    if problem.dtype == torch.int8:
        return "int8"
    wanted = compute_of("int8" if problem.activation == "image" and problem.compute == "auto" else problem.compute)
    return "float" if problem.sizes.depthwise else wanted


# The reasons


def _why_not_depthwise(problem: ConvProblem, gpu: Gpu) -> str | None:
    return None if problem.sizes.depthwise else "it is for convolutions with one channel in each group"


def _why_not_quantized(problem: ConvProblem) -> str | None:
    """Return why kernels that quantize images are not for a problem; None if they are."""
    if problem.dtype == torch.int8:
        return "it quantizes images, and these are codes"
    if problem.sizes.depthwise:
        return "depthwise convolutions are computed in floating point"
    return None if problem.compute == "int8" else "compute='float' was asked for"


def _why_not_image(problem: ConvProblem, gpu: Gpu) -> str | None:
    from halfbyte.kernels.gpu.conv import image

    if (reason := _why_not_quantized(problem)) is not None:
        return reason
    return (
        image.supports(problem, gpu) if problem.activation == "image" else f"activation={problem.activation!r} was asked for, not 'image'"
    )


def _why_not_dynamic(problem: ConvProblem, gpu: Gpu) -> str | None:
    from halfbyte.kernels.gpu.conv import dynamic

    if (reason := _why_not_quantized(problem)) is not None:
        return reason
    return "activation='image' was asked for" if problem.activation == "image" else dynamic.supports(problem, gpu)


def _why_not_linear(problem: ConvProblem, gpu: Gpu) -> str | None:
    sizes = problem.sizes
    if sizes.taps > 1 or sizes.groups > 1:
        return f"it is for kernels of one tap without groups, not {sizes.kernel[0]} x {sizes.kernel[1]} in {sizes.groups} groups"
    if sizes.k != sizes.channels:
        return f"blocks of {sizes.format} are padded with channels that the image does not have"
    if problem.dtype == torch.int8:
        return None if sizes.format.bits == 4 else "codes of 8 bits in and out are faster as a convolution"
    if problem.compute == "float" and why_no_triton() is None and beats_linear(problem.flat, gpu):
        return "a convolution of so many pixels is faster"
    return None


def _why_not_patches(problem: ConvProblem) -> str | None:
    """Return why kernels of patches, in floating point or of codes, are not for a problem."""
    if problem.sizes.depthwise:
        return "the weight of a depthwise convolution is not packed as a matrix"
    return "compute='int8' was asked for" if problem.compute == "int8" and problem.dtype != torch.int8 else None


def beats_linear(problem: ConvProblem, gpu: Gpu) -> bool:
    """Whether a convolution of one tap, which is a linear layer of pixels, takes less time by a kernel of convolutions of floats."""
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return False
    if _why_not_teams(problem, gpu) is None and problem.m > _FEW_ROWS:
        return True
    many = problem.m >= _LEAST_WRITTEN or problem.window.stride != (1, 1)  # whose pixels would be copied before
    if _why_not_few(problem, gpu) is None or (many and _why_not_hopper(problem, gpu) is None):
        return True
    # 196 pixels of 1024 channels and bytes with one scale take 7.4 us on an H100, as a linear layer 9.0.
    fmt = problem.sizes.format
    return fmt.bits == 8 and not isinstance(fmt.block, int) and problem.m <= _LEAST_WRITTEN


def _why_overlap(problem: ConvProblem) -> str | None:
    return "its pixels overlap" if problem.overlap else None


def _why_not_teams(problem: ConvProblem, gpu: Gpu) -> str | None:
    from halfbyte.kernels.gpu.conv import teams as conv_teams

    if reason := _why_overlap(problem) or conv_teams.supports(problem, gpu):
        return reason
    tiles = conv_teams.tiles(problem, conv_teams.configs(problem, gpu)[0])
    return None if tiles <= gpu.sms else f"its {tiles} tiles are more than {gpu.sms} multiprocessors compute at once"


def _why_not_few(problem: ConvProblem, gpu: Gpu) -> str | None:
    from halfbyte.kernels.gpu.conv import few as conv_few

    if reason := _why_overlap(problem) or conv_few.supports(problem, gpu):
        return reason
    if not conv_few.wins(problem, gpu):
        return f"{problem.m} x {problem.n} sums of {problem.sizes.k} are too many for blocks that run at once, or too short to share"
    return None


def _why_not_hopper(problem: ConvProblem, gpu: Gpu) -> str | None:
    from halfbyte.kernels.gpu.conv import hopper as conv_hopper

    if reason := _why_overlap(problem) or conv_hopper.supports(problem, gpu):
        return reason
    if problem.dtype == torch.int8 and problem.sizes.taps > 1 and problem.window.stride != (1, 1):
        return "integers of several taps with a stride take longer there: what lies outside of the image is added pixel by pixel"
    if problem.sizes.channels % 64 and problem.m < _LEAST_WRITTEN:
        return f"{problem.sizes.channels} channels are not a multiple of 64, and {problem.m} patches few: from {_LEAST_WRITTEN} on"
    tiles = conv_hopper.configs(problem, gpu)[0].tiles(problem)
    return None if 2 * tiles >= gpu.sms else f"its {tiles} tiles leave most of {gpu.sms} multiprocessors idle"


def _why_not_library(problem: ConvProblem, gpu: Gpu) -> str | None:
    from halfbyte.kernels.gpu.conv import library as conv_library

    if reason := _why_overlap(problem) or conv_library.supports(problem, gpu):
        return reason
    if problem.m < _LEAST_WRITTEN:
        return f"to write the weight out takes longer than to convolve {problem.m} patches: from {_LEAST_WRITTEN} on"
    return None


def _why_not_conv(problem: ConvProblem, gpu: Gpu) -> str | None:
    from halfbyte.kernels.gpu.conv import implicit_gemm

    return implicit_gemm.supports(problem, gpu)


# The list, in the order of preference.
GPU_CONV = (
    GpuConvCandidate(
        "depthwise", "each channel by itself, rows of the image in registers", "it is made for one channel in each group",
        reads="taps", why_not=_why_not_depthwise, home="conv.depthwise",
    ),
    GpuConvCandidate(
        "conv_image", "images quantized to int8 with one scale each in two passes, then patches on integer tensor cores",
        "it is what activation='image' asks for",
        reads="image", why_not=_why_not_image, home="conv.image",
    ),
    GpuConvCandidate(
        "linear", "pixels as rows of a linear layer, whose kernel is chosen as for one", "nothing but pixels is read", reads="pixels",
        why_not=_why_not_linear,
    ),
    GpuConvCandidate(
        "conv_dynamic", "patches quantized to int8 as they are read, integer tensor cores",
        reads="image", why_not=_why_not_dynamic, home="conv.dynamic",
    ),
    GpuConvCandidate(
        "conv_teams", "warps share the taps and channels of a tile, fed by TMA, wgmma", "it is the fastest where all tiles run at once",
        reads="patches", why_not=_why_not_teams, home="conv.teams",
    ),
    GpuConvCandidate(
        "conv_few", "a small tile has all of K, shared by the warps of a block", "it is the fastest for few pixels",
        reads="patches", why_not=_why_not_few, home="conv.few",
    ),
    GpuConvCandidate(
        "conv_hopper", "boxes of pixels fetched by TMA, wgmma, warps specialized", "it keeps Hopper's matrix units busy",
        reads="patches", why_not=_why_not_hopper, home="conv.hopper", adds=True,
    ),
    GpuConvCandidate(
        "conv_library", "the weight written out first, then convolved by cuDNN", "cuDNN is faster from so many patches on",
        reads="patches", why_not=_why_not_library, home="conv.library", replayable=False,
    ),
    GpuConvCandidate(
        "conv", "patches gathered as they are multiplied, weights dequantized in registers",
        reads="patches", why_not=_why_not_conv, home="conv.implicit_gemm", adds=True,
    ),
)  # fmt: skip

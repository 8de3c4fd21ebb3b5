"""GroupNorms and the convolutions behind them in one native call, for images of one size: x [B, C, H, W] -> y, both channels_last.

    y = conv1(silu(norm1(x + added)))                           one stage
    y = conv2(silu(norm2(conv1(silu(norm1(x))) + added)))       two: a residual block; the last convolution may add a residual

The steps are those of `quantize/group_norm.py` and of `conv/planned.py`, with the same threads for all (`step_sequence.py`).
`ops/conv/group_norm.py` plans and calls it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.conv.gathered import ImageConvKernel
from halfbyte.kernels.cpu.conv.planned import ConvCall, PlannedConv
from halfbyte.kernels.cpu.linear.linear import CALL, pack_call
from halfbyte.kernels.cpu.quantize.group_norm import GROUP_NORM, TENSORS, GroupNormCall, pack_tensors, prepare
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.kernels.cpu.steps import phases_of
from halfbyte.kernels.cpu.transformer.sublayers import shared_memory
from halfbyte.kernels.problem import Window

_INFINITE = float("inf")
_pack = struct.Struct("<q").pack_into
_NORM_X, _NORM_ADDED = GROUP_NORM.offset("x"), GROUP_NORM.offset("added")
_OUT, _RESIDUAL = (LINEAR.offset(name) for name in ("out", "residual"))


class Stage(NamedTuple):
    """A norm and the convolution behind it.

    Attributes:
        groups, eps, weight, bias: Of the norm; weight and bias are contiguous float32 [C].
        activated: Whether there is a SiLU between them.
        kernel: Of the convolution; an ImageConvKernel takes the codes that the norm writes.
        window: Stride, padding and dilation.
        weights: As the kernel reads them.
        conv_bias: Contiguous float32 [Co], or None.
    """

    groups: int
    eps: float
    weight: Tensor
    bias: Tensor
    activated: bool
    kernel: PlannedConv | ImageConvKernel
    window: Window
    weights: Tensor
    conv_bias: Tensor | None


def why_not(kernel: object, dtype: torch.dtype) -> str | None:
    """Return why a convolution of images of this dtype is no step of a sequence; None if it is."""
    codes = isinstance(kernel, ImageConvKernel)
    of_step = kernel.codes if isinstance(kernel, ImageConvKernel) else kernel
    if not isinstance(of_step, PlannedConv):
        return "there is nothing to multiply"
    if of_step.dtype != (torch.int8 if codes else dtype) or not of_step.out_dtype == of_step.result == dtype:
        return f"its kernel does not read and write {dtype}"
    return None


class NormedConvsPlan:
    """The steps for images of one size, with all arguments but the addresses of the tensors of a call.

    Attributes:
        out_shape: [B, Co, Ho, Wo]
    """

    def __init__(self, stages: Sequence[Stage], shape: Sequence[int], dtype: torch.dtype, *, added: bool, residual: bool) -> None:
        """Plan calls for x of this shape and dtype. `added` (to the last norm's input) and `residual`: whether calls have one."""
        self._dtype, self._stages = dtype, stages
        calls = list[tuple[GroupNormCall, ConvCall]]()
        sizes = list[int]()  # of each stage's normed images, scales and result
        for i, stage in enumerate(stages):
            last, codes = i == len(stages) - 1, isinstance(stage.kernel, ImageConvKernel)
            norm = prepare(shape, dtype, stage.groups, stage.eps, added=added and last, activated=stage.activated, codes=codes)
            like = torch.empty(tuple(shape), dtype=torch.int8 if codes else dtype, device="meta")
            kernel = stage.kernel.codes if isinstance(stage.kernel, ImageConvKernel) else stage.kernel
            has_residual = residual and last and kernel.specializes_residual
            conv = kernel.prepare(like, stage.window, 0, stage.weights, has_residual=has_residual)
            calls.append((norm, conv))
            shape = conv.out_shape
            sizes += [like.numel() * like.itemsize, 4 * like.shape[0], 0 if last else math.prod(shape) * dtype.itemsize]
        threads = max(call.threads for pair in calls for call in pair)
        scratch_bytes = max(threads * (conv.scratch_bytes // conv.threads) for _, conv in calls)
        self._memory = shared_memory("normed_convs", (*sizes, scratch_bytes))
        *places, scratch = self._memory.starts
        self.out_shape, blocks, x = calls[-1][1].out_shape, list[Buffer](), 0
        self._alive: list[object] = [calls]
        for i, (stage, (norm, conv)) in enumerate(zip(stages, calls, strict=True)):
            normed, scales, out = places[3 * i : 3 * i + 3]
            norms = self._norm(stage, norm, x, normed, scales)
            convs = self._convolution(stage, conv, normed, scales, out, scratch)
            if i == 0:
                self._first = norms
            self._last_norm, self._last, x = norms, convs, out
            blocks += [*norms, *convs]
        self._line = self.out_shape[3] * self.out_shape[1]
        self._sequence = StepSequence(blocks, threads)

    def _norm(self, stage: Stage, call: GroupNormCall, x: int, out: int, scales: int) -> list[Buffer]:
        blocks = phases_of(call.buffer)
        for block in blocks:
            pack_tensors(block, TENSORS, x, out, stage.weight.data_ptr(), stage.bias.data_ptr(), 0, scales)
        return blocks

    def _convolution(self, stage: Stage, call: ConvCall, x: int, scales: int, out: int, scratch: int) -> list[Buffer]:
        codes = isinstance(stage.kernel, ImageConvKernel)
        kernel = stage.kernel.codes if isinstance(stage.kernel, ImageConvKernel) else stage.kernel
        table = kernel.table(stage.conv_bias, torch.empty(0, device="cpu") if codes else None)
        self._alive.append(table)
        bias = 0 if table is None else table.data_ptr()
        pack_call(call.buffer, CALL, 0, x, 0, scratch, stage.weights.data_ptr(), bias, out, 0, -_INFINITE, _INFINITE)
        if codes:
            _pack(call.buffer, kernel.scales_at, scales)
        return phases_of(call.buffer)

    def run(self, x: Tensor, added: Tensor | None, residual: Tensor | None) -> Tensor:
        """Compute y in x's dtype.

        Args:
            x: [B, C, H, W] with channels_last strides.
            added: Contiguous float32 [B, channels of the last norm].
            residual: Of y's shape and dtype, with channels_last strides.
        """
        _, channels, height, _ = self.out_shape
        out = torch.empty_strided(self.out_shape, (height * self._line, 1, self._line, channels), dtype=self._dtype, device="cpu")
        at = x.data_ptr()
        for block in self._first:
            _pack(block, _NORM_X, at)
        if added is not None:
            at = added.data_ptr()
            for block in self._last_norm:
                _pack(block, _NORM_ADDED, at)
        at = out.data_ptr()
        for block in self._last:
            _pack(block, _OUT, at)
            if residual is not None:
                _pack(block, _RESIDUAL, residual.data_ptr() - at)
        self._sequence.run()
        return out

"""GroupNorms and the convolutions behind them in one native call, for images of one size: x [B, C, H, W] -> y, both channels_last.

    y = conv1(silu(norm1(x + added)))                           one stage
    y = conv2(silu(norm2(conv1(silu(norm1(x))) + added)))       two: a residual block; the last convolution may add a residual

The steps are those of `quantize/group_norm.py` and of `conv/planned.py`, with the same threads for all (`step_sequence.py`).
`ops/conv/group_norm.py` plans and calls it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.conv.gathered import ImageConvKernel
from halfbyte.kernels.cpu.conv.planned import ConvCall, PlannedConv
from halfbyte.kernels.cpu.linear.linear import CALL, pack_call
from halfbyte.kernels.cpu.plan_cache import PLANS, Call
from halfbyte.kernels.cpu.quantize.group_norm import GROUP_NORM, TENSORS, pack_tensors, prepare
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.kernels.cpu.steps import phases_of
from halfbyte.kernels.problem import Window
from halfbyte.layouts.base import round_up

_INFINITE = float("inf")
_NORM_X, _NORM_OUT, _NORM_ADDED, _NORM_SCALES = (GROUP_NORM.offset(name) for name in ("x", "out", "added", "scales"))
_X, _OUT, _RESIDUAL, _SCRATCH = (LINEAR.offset(name) for name in ("x", "out", "residual", "scratch"))
_ALIGNED = 64  # bytes


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
    if not isinstance(kernel, PlannedConv | ImageConvKernel):
        return "there is nothing to multiply"
    of_step = _of_step(kernel)
    if of_step.dtype != (dtype if of_step is kernel else torch.int8) or not of_step.out_dtype == of_step.result == dtype:
        return f"its kernel does not read and write {dtype}"
    return None


def _of_step(kernel: PlannedConv | ImageConvKernel) -> PlannedConv:
    return kernel.codes if isinstance(kernel, ImageConvKernel) else kernel


class NormedConvsPlan:
    """The steps for images of one size, with all arguments but the addresses of the tensors of a call.

    Attributes:
        out_shape: [B, Co, Ho, Wo]
    """

    def __init__(self, stages: Sequence[Stage], shape: Sequence[int], dtype: torch.dtype, *, added: bool, residual: bool) -> None:
        """Plan calls for x of this shape and dtype. `added` (to the last norm's input) and `residual`: whether calls have one."""
        self._dtype, self._stages = dtype, stages  # kept alive: steps have the addresses of their weights
        calls = list[tuple[Call, ConvCall]]()
        normed_bytes, scales_bytes, result_bytes = 0, 4 * shape[0], 0
        for i, stage in enumerate(stages):
            last, codes = i == len(stages) - 1, isinstance(stage.kernel, ImageConvKernel)
            norm = prepare(shape, dtype, stage.groups, stage.eps, added=added and last, activated=stage.activated, codes=codes)
            like = torch.empty(tuple(shape), dtype=torch.int8 if codes else dtype, device="meta")
            kernel = _of_step(stage.kernel)
            has_residual = residual and last and kernel.specializes_residual
            conv = kernel.prepare(like, stage.window, 0, stage.weights, has_residual=has_residual)
            calls.append((norm, conv))
            shape, normed_bytes = conv.out_shape, max(normed_bytes, like.numel() * like.itemsize)
            result_bytes = max(result_bytes, 0 if last else math.prod(shape) * dtype.itemsize)
        threads = max(call.threads for pair in calls for call in pair)
        scratch_bytes = max(threads * (conv.scratch_bytes // conv.threads) for _, conv in calls)
        sizes = normed_bytes, scales_bytes, result_bytes, scratch_bytes
        *self._starts, self._bytes = accumulate((round_up(size, _ALIGNED) for size in sizes), initial=0)
        # Where addresses in the memory of a call are written, their distances from its start, and the start that they are written for.
        self._places, self._at = list[tuple[Buffer, int, int]](), 0
        self.out_shape, blocks = calls[-1][1].out_shape, list[Buffer]()
        self._alive: list[object] = [calls]
        first = list[Buffer]()
        for i, (stage, (norm, conv)) in enumerate(zip(stages, calls, strict=True)):
            self._last_norm = self._norm(stage, norm, first=i == 0)
            first = first or self._last_norm
            self._last = self._convolution(stage, conv, last=i == len(stages) - 1)
            blocks += [*self._last_norm, *self._last]
        self._first, self._line = first, self.out_shape[3] * self.out_shape[1]
        self._sequence = StepSequence(blocks, threads)

    def _norm(self, stage: Stage, call: Call, *, first: bool) -> list[Buffer]:
        normed, scales, result, _ = self._starts
        blocks = phases_of(call.buffer)
        for block in blocks:
            pack_tensors(block, TENSORS, 0, 0, stage.weight.data_ptr(), stage.bias.data_ptr(), 0, 0)
            self._places += [(block, _NORM_OUT, normed), (block, _NORM_SCALES, scales)]
            self._places += [] if first else [(block, _NORM_X, result)]
        return blocks

    def _convolution(self, stage: Stage, call: ConvCall, *, last: bool) -> list[Buffer]:
        normed, scales, result, scratch = self._starts
        codes, kernel = isinstance(stage.kernel, ImageConvKernel), _of_step(stage.kernel)
        table = kernel.table(stage.conv_bias, torch.empty(0, dtype=torch.float32, device="cpu") if codes else None)
        self._alive.append(table)
        bias = 0 if table is None else table.data_ptr()
        pack_call(call.buffer, CALL, 0, 0, 0, 0, stage.weights.data_ptr(), bias, 0, 0, -_INFINITE, _INFINITE)
        blocks = phases_of(call.buffer)
        for block in blocks:
            self._places += [(block, _X, normed), (block, _SCRATCH, scratch)]
            self._places += [(block, kernel.scales_at, scales)] if codes else []
            self._places += [] if last else [(block, _OUT, result)]
        return blocks

    def run(self, x: Tensor, added: Tensor | None, residual: Tensor | None) -> Tensor:
        """Compute y in x's dtype.

        Args:
            x: [B, C, H, W] with channels_last strides.
            added: Contiguous float32 [B, channels of the last norm].
            residual: Of y's shape and dtype, with channels_last strides.
        """
        _, channels, height, _ = self.out_shape
        out = torch.empty_strided(self.out_shape, (height * self._line, 1, self._line, channels), dtype=self._dtype, device="cpu")
        _memory, start = PLANS.memory(self._bytes)
        if start != self._at:
            for block, offset, distance in self._places:
                pack_integer(block, offset, start + distance)
            self._at = start
        at = x.data_ptr()
        for block in self._first:
            pack_integer(block, _NORM_X, at)
        if added is not None:
            at = added.data_ptr()
            for block in self._last_norm:
                pack_integer(block, _NORM_ADDED, at)
        at = out.data_ptr()
        for block in self._last:
            pack_integer(block, _OUT, at)
            if residual is not None:
                pack_integer(block, _RESIDUAL, residual.data_ptr() - at)
        self._sequence.run()
        return out

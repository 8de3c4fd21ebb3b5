"""GroupNorm with SiLU before quantized convolutions on a CPU: what residual blocks of diffusion models are made of.

`nn/fused_blocks.py` calls `NormedConvs`; where that has no native call it leaves the block to diffusers. The kernels are in
`kernels/cpu/normed_convs.py`, which functions import here, so that `import halfbyte` does not import llvmlite.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.layouts.convolution import PackedConv
from halfbyte.ops.conv import cpu
from halfbyte.ops.conv.images import channels_last
from halfbyte.ops.modes import plain

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.normed_convs import NormedConvsPlan

_PLANS = 64  # of a block in each Python thread


class NormedConv(NamedTuple):
    """A norm of G groups and C channels, and the convolution behind it, whose arguments are those of `conv2d`, with `Window.numbers`."""

    groups: int
    eps: float
    norm_weight: Tensor
    norm_bias: Tensor
    packed: PackedConv
    bias: Tensor | None
    window_numbers: tuple[int, ...]
    compute: str
    activation: str


class NormedConvs:
    """One or two stages y = conv2d(silu(norm(x))) in one native call; something may be added to the last norm's input and to the result.

    A norm writes codes where the convolution behind it quantizes images with one scale each. Weights are read where they lie, but for
    those of norms and biases that are not contiguous float32: a caller that writes to these makes a new object.

    Args:
        stages: The norms and convolutions, each of which takes the channels of the one before it.
        activated: Whether there is a SiLU.
    """

    def __init__(self, stages: Sequence[NormedConv], *, activated: bool) -> None:
        from halfbyte.kernels.cpu.codegen.runtime import threads

        self._stages, self._activated, self._threads = stages, activated, threads
        self._channels, self._width = len(stages[0].norm_weight), len(stages[-1].norm_weight)
        self._parameters = [parameter for stage in stages for parameter in (stage.norm_weight, stage.norm_bias, stage.bias)]
        self._plans: PlanCache[NormedConvsPlan | str] = PlanCache(_PLANS)

    def fits(self, x: Tensor, added: Tensor | None = None) -> bool:
        """Whether x is images on a CPU, without tracing, autocast, transforms and gradients; `added`, or what it is computed from, too."""
        if not plain(x, None, added) or not x.is_cpu or x.dim() != 4 or x.shape[1] != self._channels or not x.numel():
            return False
        if not torch.is_grad_enabled():
            return True
        return not any(tensor is not None and tensor.requires_grad for tensor in (x, added, *self._parameters))

    def __call__(self, x: Tensor, added: Tensor | None = None, residual: Tensor | None = None) -> Tensor | None:
        """Compute the stages. The caller has asked `fits`.

        Args:
            x: [B, C, H, W]
            added: [B or 1, channels of the last norm or 1], or None: added to all pixels of that norm's input.
            residual: Added to the result, or None.

        Returns:
            [B, Co, Ho, Wo] in x's dtype, channels_last; None where no native call computes it: of this dtype, these channels or a
            residual of another shape or dtype.

        Raises:
            RuntimeError: `added` has another shape.
        """
        key = x.shape, x.dtype, added is None, residual is None, self._threads()
        plan = self._plans.get(key, lambda: self._plan(x, added=added is not None, residual=residual is not None))
        if isinstance(plan, str):
            return None
        if residual is not None:
            if residual.shape != plan.out_shape or residual.dtype != x.dtype or not plain(residual):
                return None
            residual = channels_last(residual)
        if added is not None:
            added = added.float().expand(len(x), self._width).contiguous()
        return plan.run(channels_last(x), added, residual)

    def _plan(self, x: Tensor, *, added: bool, residual: bool) -> NormedConvsPlan | str:
        """The plan for images like x, or why there is none."""
        from halfbyte.kernels.cpu.codegen.isas import current
        from halfbyte.kernels.cpu.conv.gathered import ImageConvKernel
        from halfbyte.kernels.cpu.conv.planned import PlannedConv
        from halfbyte.kernels.cpu.normed_convs import NormedConvsPlan, Stage, why_not
        from halfbyte.kernels.cpu.quantize import group_norm

        planned, like = list[Stage](), torch.empty(x.shape, dtype=x.dtype, device="meta")
        for stage in self._stages:
            if (reason := group_norm.supports(x.dtype, len(stage.norm_weight), current())) is not None:
                return reason
            found = cpu.kernel_for(like, stage.packed, stage.window_numbers, stage.compute, stage.activation)
            if found is None:
                return "an image is empty"
            kernel, weights, window, shape = found
            if (reason := why_not(kernel, x.dtype)) is not None:
                return reason
            assert isinstance(kernel, PlannedConv | ImageConvKernel)
            norm = stage.groups, stage.eps, _floats(stage.norm_weight), _floats(stage.norm_bias), self._activated
            planned.append(Stage(*norm, kernel, window, weights, None if stage.bias is None else _floats(stage.bias)))
            like = like.new_empty(shape)
        return NormedConvsPlan(planned, x.shape, x.dtype, added=added, residual=residual)


def _floats(tensor: Tensor) -> Tensor:
    return tensor.detach().float().contiguous()

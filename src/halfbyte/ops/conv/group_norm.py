"""GroupNorm with SiLU before a quantized convolution on a CPU: what residual blocks of diffusion models are made of.

`nn/fused_blocks.py` asks `supports`, then calls `normed_conv2d`; where `supports` has a reason it leaves the block to diffusers. The
kernel is in `kernels/cpu/quantize/group_norm.py`, which functions import here, so that `import halfbyte` does not import llvmlite.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfbyte.layouts.convolution import PackedConv
from halfbyte.ops.conv import cpu
from halfbyte.ops.conv.images import channels_last
from halfbyte.ops.modes import plain

_INFINITE = float("inf")


def supports(x: Tensor, *norms: nn.GroupNorm, added: Tensor | None = None) -> str | None:
    """Return why `normed_conv2d` does not take these; None if it does.

    Args:
        x: As for `normed_conv2d`; anything else is answered with a reason.
        norms: The norm of x, and others whose images have other channels, but x's dtype.
        added: A tensor that is added to one of the images, or that what is added is computed from.
    """
    if not plain(x, None, added) or not x.is_cpu or x.dim() != 4 or not x.numel() or norms[0].num_channels != x.shape[1]:
        return "it is for images on a CPU with the norm's channels, without tracing, autocast or transforms"
    if any(norm.weight is None or norm.bias is None or not norm.weight.is_cpu for norm in norms):
        return "a norm has no weights"
    weights = [weight for norm in norms for weight in (norm.weight, norm.bias)]
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, added, *weights)):
        return "gradients are needed"
    from halfbyte.kernels.cpu.codegen.isas import current
    from halfbyte.kernels.cpu.quantize import group_norm as kernel

    return next((reason for norm in norms if (reason := kernel.supports(x.dtype, norm.num_channels, current())) is not None), None)


def normed_conv2d(
    x: Tensor,
    norm: nn.GroupNorm,
    packed: PackedConv,
    bias: Tensor | None,
    window_numbers: tuple[int, ...],
    *,
    activated: bool,
    added: Tensor | None = None,
    residual: Tensor | None = None,
    compute: str,
    activation: str,
) -> Tensor:
    """Compute conv2d(silu(norm(x + added))) + residual. The caller has checked `supports`, and that `packed` takes x's channels.

    The norm writes codes where the convolution quantizes images with one scale each.

    Args:
        x: [B, C, H, W] in float32, bfloat16 or float16.
        norm: Its groups, weight, bias and eps.
        activated: Whether there is a SiLU.
        added: [B or 1, C or 1], or None: added to all pixels first.
        packed, bias, residual, compute, activation: As for `conv2d`.
        window_numbers: `Window.numbers` of stride, padding and dilation.

    Returns:
        [B, Co, Ho, Wo] in x's dtype, channels_last.

    Raises:
        ArgumentError: `bias` or `residual` does not fit to the result.
        RuntimeError: `added` has another shape.
    """
    weight, settings = packed.data, (packed.name, packed.numbers, window_numbers, compute, activation)
    codes = cpu.quantizes_images(x, *settings)
    y, scales = _normed(x, norm, added, activated=activated, codes=codes)
    return cpu.conv2d(x if codes else y, weight, bias, residual, *settings, -_INFINITE, _INFINITE, (y, scales) if codes else None)


def _normed(x: Tensor, norm: nn.GroupNorm, added: Tensor | None, *, activated: bool, codes: bool) -> tuple[Tensor, Tensor | None]:
    from halfbyte.kernels.cpu.quantize import group_norm as kernel

    if added is not None:
        added = added.float().expand(x.shape[:2]).contiguous()
    weight, bias = (tensor.detach().float().contiguous() for tensor in (norm.weight, norm.bias))
    return kernel.group_norm(channels_last(x), norm.num_groups, weight, bias, norm.eps, added, activated=activated, codes=codes)

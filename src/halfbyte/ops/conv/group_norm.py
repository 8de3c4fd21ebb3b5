"""GroupNorm with SiLU before a quantized convolution on a CPU: what residual blocks of diffusion models are made of.

`nn/fused_blocks.py` asks `supports`, then calls `group_norm` or `normed_conv2d`; where `supports` has a reason it leaves the block to
diffusers. The kernel is in `kernels/cpu/quantize/group_norm.py`, which functions import here, so that `import halfbyte` does not import
llvmlite.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfbyte.layouts.convolution import PackedConv
from halfbyte.ops.conv import cpu
from halfbyte.ops.conv.images import channels_last
from halfbyte.ops.library import plain

_INFINITE = float("inf")


def supports(x: Tensor, norm: nn.GroupNorm, added: Tensor | None = None) -> str | None:
    """Return why `group_norm` does not take these; None if it does.

    Args:
        x, norm, added: As for `group_norm`; anything else is answered with a reason.
    """
    if not plain(x, norm.weight, added) or not x.is_cpu or x.dim() != 4 or not x.numel():
        return "it is for images on a CPU, without tracing, autocast or transforms"
    if torch.is_grad_enabled() and any(tensor is not None and tensor.requires_grad for tensor in (x, added, norm.weight, norm.bias)):
        return "gradients are needed"
    if norm.weight is None or norm.bias is None or norm.num_channels != x.shape[1]:
        return f"the norm has no weights of {x.shape[1]} channels"
    from halfbyte.kernels.cpu.codegen.isas import current
    from halfbyte.kernels.cpu.quantize import group_norm as kernel

    return kernel.supports(x.dtype, x.shape[1], current())


def group_norm(x: Tensor, norm: nn.GroupNorm, added: Tensor | None = None) -> Tensor:
    """Compute silu(norm(x + added)) of images. The caller has checked `supports`.

    Args:
        x: [B, C, H, W].
        norm: Its groups, weight, bias and eps.
        added: [B or 1, C], or None: added to all pixels first.

    Returns:
        [B, C, H, W] in x's dtype, channels_last.
    """
    return _normed(x, norm, added, codes=False)[0]


def normed_conv2d(
    x: Tensor,
    norm: nn.GroupNorm,
    packed: PackedConv,
    bias: Tensor | None,
    window_numbers: tuple[int, ...],
    *,
    added: Tensor | None = None,
    residual: Tensor | None = None,
    compute: str,
    activation: str,
) -> Tensor:
    """Compute conv2d(silu(norm(x + added))) + residual. The caller has checked `supports`.

    A convolution that quantizes images with one scale each gets codes from the norm; any other gets what `group_norm` returns.

    Args:
        x, norm, added: As for `group_norm`.
        packed, bias, residual, compute, activation: As for `conv2d`.
        window_numbers: `Window.numbers` of stride, padding and dilation.

    Returns:
        [B, Co, Ho, Wo] in x's dtype, channels_last.
    """
    weight, settings = packed.data, (packed.name, packed.numbers, window_numbers, compute, activation)
    codes = cpu.quantizes_images(x, *settings)
    y, scales = _normed(x, norm, added, codes=codes)
    return cpu.conv2d(x if codes else y, weight, bias, residual, *settings, -_INFINITE, _INFINITE, (y, scales) if codes else None)


def _normed(x: Tensor, norm: nn.GroupNorm, added: Tensor | None, *, codes: bool) -> tuple[Tensor, Tensor | None]:
    from halfbyte.kernels.cpu.quantize import group_norm as kernel

    if added is not None:
        added = added.float().expand(len(x), -1).contiguous()
    weight, bias = (tensor.detach().float().contiguous() for tensor in (norm.weight, norm.bias))
    return kernel.group_norm(channels_last(x), norm.num_groups, weight, bias, norm.eps, added, activated=True, codes=codes)

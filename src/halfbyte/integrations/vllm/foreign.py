"""Weights of AWQ, GPTQ and compressed-tensors checkpoints, as vLLM has loaded them, as codes. Needs no vLLM."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format


def weight_only_format(bits: int, group_size: int, *, zero_points: bool, scale: torch.dtype) -> Format:
    """Return the format of weights whose blocks have `group_size` inputs, or all of them where it is -1."""
    return Format(bits, "channel" if group_size == -1 else group_size, "point" if zero_points else "none", scale)


def weight_only_codes(fmt: Format, stored: Tensor, scale: Tensor, zero: Tensor | None) -> Codes:
    """Return the codes of a weight [N, K].

    Args:
        stored: Unsigned integers [N, K], those of symmetric weights with an offset of half their range.
        scale: [N, blocks]
        zero: Unsigned integers in the shape of `scale`, or None.
    """
    if zero is not None:
        return Codes.from_values(fmt, stored, scale.contiguous(), zero.to(torch.uint8).contiguous())
    return Codes.from_values(fmt, stored - (1 << (fmt.bits - 1)), scale.contiguous())


def int8_codes(weight: Tensor, scale: Tensor, widths: list[int]) -> Codes:
    """Return the codes of an int8 weight [N, K] with a scale for each row.

    Args:
        scale: [N, 1] or [N], or one for each of the parts of a fused layer.
        widths: Rows of the parts.
    """
    n = len(weight)
    if scale.numel() != n:
        scale = scale.flatten().repeat_interleave(torch.tensor(widths, device=scale.device)) if scale.numel() > 1 else scale.expand(n)
    return Codes.from_values(Format(8, "channel", "none", torch.float32), weight, scale.float().reshape(n, 1).contiguous())

"""Placeholder in plain torch, being replaced by the kernels."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.layouts.base import Packed
from halfbyte.quantizers import METHODS

_CODES: dict[int, Codes] = {}


def quantize(weight: Tensor, format: str | Format, method: str = "absmax", *, name: str = "weight") -> Codes:
    return METHODS[method](weight.detach(), as_format(format))


def pack(codes: Codes, device: torch.device | str = "cpu") -> Packed:
    data = torch.cat([t.contiguous().view(torch.uint8).flatten() for t in codes.tensors().values()])
    return Packed(codes.format, codes.shape, "plain", data)


def unpack(packed: Packed) -> Codes:
    fmt, shape, data = packed.format, packed.shape, packed.data
    width = (shape[-1] + 1) // 2 if fmt.bits == 4 else shape[-1]
    parts: list[tuple[tuple[int, ...], torch.dtype]] = [((*shape[:-1], width), torch.int8 if fmt.bits == 8 and fmt.signed else torch.uint8), (fmt.scale_shape(shape), fmt.scale)]
    if fmt.zero != "none":
        parts.append((fmt.scale_shape(shape), torch.uint8 if fmt.zero == "point" else fmt.scale))
    tensors, at = [], 0
    for size, dtype in parts:
        n = torch.Size(size).numel() * dtype.itemsize
        tensors.append(data[at : at + n].clone().view(dtype).reshape(size))
        at += n
    return Codes(fmt, shape, *tensors)


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    return unpack(packed).dequantize(dtype)


def linear(x: Tensor, packed: Packed, bias: Tensor | None = None, *, compute: str = "auto", activation: str = "block", clamp: tuple[float, float] | None = None) -> Tensor:
    y = torch.nn.functional.linear(x, dequantize(packed, x.dtype), bias)
    return y if clamp is None else y.clamp(*clamp)


def embedding(ids: Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    return dequantize(packed, dtype)[ids]


def qlinear(xq: Tensor, packed: Packed, bias: Tensor | None, *, in_scale: float, in_zero: int, out_scale: float, out_zero: int, clamp: tuple[int, int] = (-128, 127)) -> Tensor:
    y = (xq.float() - in_zero) * in_scale @ dequantize(packed).T + (0 if bias is None else bias)
    return (y / out_scale + out_zero).round().clamp(*clamp).to(torch.int8)

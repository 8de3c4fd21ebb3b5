"""What the arguments of the operations must be. Each check raises one sentence: what came, what is allowed."""

from __future__ import annotations

from typing import get_args

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, FormatError
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.problem import Activation
from halfbyte.layouts import cpu_tiles, gpu_tiles

FLOATS = (torch.float32, torch.bfloat16, torch.float16)
ACTIVATIONS = get_args(Activation)
_INFINITE = float("inf")
_LONGEST_INTEGER_SUM = 131072  # 128 * 128 * 131072 = 2^31: longer sums might overflow an int32
TABLE_PANEL = cpu_tiles.PANEL  # rows of qlinear's table are padded to a multiple of it


def place(device_type: str) -> str:
    return {"cpu": "the CPU", "cuda": "the GPU"}.get(device_type, device_type)


def packed_bytes(format: str, n: int, k: int, device_type: str) -> int:
    """How many bytes a weight [n, k] is where it is packed for such a device."""
    fmt = as_format(format)
    return cpu_tiles.geometry(fmt, (n, k)).nbytes if device_type == "cpu" else gpu_tiles.geometry(fmt, (n, k)).nbytes


def check_packed(weight: Tensor, format: str, n: int, k: int, device: torch.device) -> None:
    wanted = packed_bytes(format, n, k, device.type)
    if weight.dtype != torch.uint8 or weight.dim() != 1 or weight.numel() != wanted or weight.device != device:
        raise FormatError(
            f"{format} of shape [{n}, {k}] is {wanted} packed bytes on {place(device.type)}, "
            f"got {weight.dtype} {list(weight.shape)} on {weight.device}: pack the codes with halfbyte.pack"
        )


def check_linear(x: Tensor, weight: Tensor, format: str, n: int, k: int, activation: str, low: float, high: float) -> None:
    """All but bias and residual."""
    if x.dtype not in FLOATS:
        raise ArgumentError(f"linear takes activations of float32, bfloat16 or float16, got {x.dtype}: convert them first")
    if activation not in ACTIVATIONS:
        raise ArgumentError(f"unknown activation scaling {activation!r}: use one of {', '.join(ACTIVATIONS)}")
    if x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"a weight of shape [{n}, {k}] takes activations [..., {k}], got {list(x.shape)}")
    if not low <= high:
        raise ArgumentError(f"clamp takes (low, high) with low <= high, got ({low}, {high})")
    check_packed(weight, format, n, k, x.device)


def check_bias(bias: Tensor, n: int, device: torch.device) -> None:
    if bias.shape != (n,) or not bias.dtype.is_floating_point or bias.device != device:
        got = f"{bias.dtype} {list(bias.shape)} on {bias.device}"
        raise ArgumentError(f"the bias of {n} outputs is floating point [{n}] on {place(device.type)}, got {got}")


def check_residual(residual: Tensor, x: Tensor, n: int) -> None:
    wanted = (*x.shape[:-1], n)
    if residual.shape != wanted or residual.dtype != x.dtype or residual.device != x.device:
        got = f"{residual.dtype} {list(residual.shape)} on {residual.device}"
        raise ArgumentError(f"the residual is {x.dtype} {list(wanted)} on {place(x.device.type)}, like the result, got {got}")


def check_qlinear(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> None:
    if x.dtype != torch.int8 or x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"qlinear with a weight of shape [{n}, {k}] takes int8 [..., {k}], got {x.dtype} {list(x.shape)}")
    if not -128 <= low <= high <= 127:
        raise ArgumentError(f"clamp takes (low, high) with -128 <= low <= high <= 127, got ({low}, {high})")
    check_packed(weight, format, n, k, x.device)
    wanted = (3, -(-n // TABLE_PANEL) * TABLE_PANEL)
    if table.shape != wanted or table.dtype != torch.float32 or not table.is_contiguous() or table.device != x.device:
        got = f"{table.dtype} {list(table.shape)} on {table.device}"
        raise ArgumentError(
            f"qlinear's table is contiguous float32 {list(wanted)} on {place(x.device.type)}, got {got}: use requantization_table"
        )


def check_requantization(fmt: Format, k: int, in_scale: float, in_zero: int, out_scale: float, out_zero: int) -> None:
    if fmt.zero != "none" or isinstance(fmt.block, int) or k > _LONGEST_INTEGER_SUM:
        raise FormatError(
            f"requantization takes symmetric weights with one scale a channel or a tensor and K up to {_LONGEST_INTEGER_SUM}, "
            f"got {fmt} with K = {k}: quantize to int8_channel"
        )
    for what, step in (("in_scale", in_scale), ("out_scale", out_scale)):
        if not 0 < step < _INFINITE:
            raise ArgumentError(f"{what} is positive and finite, got {step}")
    for what, zero in (("in_zero", in_zero), ("out_zero", out_zero)):
        if not -128 <= zero <= 127:
            raise ArgumentError(f"{what} lies in -128 … 127, got {zero}")


def check_ids(ids: Tensor) -> None:
    if ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"embedding takes ids of int64 or int32, got {ids.dtype}")


def check_out_dtype(dtype: torch.dtype) -> None:
    if dtype not in FLOATS:
        raise ArgumentError(f"weights are dequantized to float32, bfloat16 or float16, not {dtype}")

"""Checks of the arguments of halfbyte's ops, which raise the errors that users see.

The ops of linear layers, convolutions and embeddings (ops/cpu.py, ops/cuda.py, ops/conv) call them before a kernel reads an address, and
the public functions (ops/functions.py, ops/conv/functions.py) where a wrong type would fail with an error of torch. Each check returns
None or raises: ArgumentError for arguments, FormatError for packed weights, UnsupportedError for devices.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from numbers import Integral, Real
from typing import get_args

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, FormatError, UnsupportedError, check_type
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.problem import Activation
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import Packed, round_up
from halfbyte.layouts.convolution import PackedConv
from halfbyte.machine import named_device
from halfbyte.quantizers.check import check_dense

FLOATS = (torch.float32, torch.bfloat16, torch.float16)  # the dtypes of activations that kernels take
ACTIVATIONS = get_args(Activation)
TABLE_PANEL = cpu_tiles.PANEL  # qlinear's table [3, N] has N rounded up to a multiple of it


def device_name(device_type: str) -> str:
    """Return the words for a device in errors: "the CPU", "the GPU", or torch's own name of another one."""
    return {"cpu": "the CPU", "cuda": "the GPU"}.get(device_type, device_type)


# Tensors and devices


def check_device(device: torch.device | str) -> torch.device:
    """Return the device to pack a weight for. Raise UnsupportedError where there is no such device, or no kernels for it."""
    known = named_device(device)
    if known is not None and (known.type == "cpu" or (known.type == "cuda" and torch.cuda.is_available())):
        return known
    why = "torch knows no such device" if known is None else "torch sees no GPU" if known.type == "cuda" else "there are no kernels for it"
    raise UnsupportedError(f"a weight cannot be packed for device {str(device)!r}, {why}: use device='cpu'")


def check_operands(x: object, packed: object, kind: type, bias: object, residual: object = None, clamp: object = None) -> None:
    """Raise ArgumentError for an operand of the wrong type. This takes longer than a small kernel, so it runs after a failed call.

    Args:
        x: The input.
        packed: The weight.
        kind: What it has to be: Packed or PackedConv.
        bias, residual: Tensors or None.
        clamp: (low, high) or None.
    """
    packers = {
        Packed: ("pack", "pack(quantize(weight, format))"),
        PackedConv: ("pack_conv", "pack_conv(quantize_conv(weight, format), size)"),
    }
    packer, call = packers[kind]
    check_type(x, Tensor, "the first argument is the input, a tensor", "pass torch.as_tensor(x), and the packed weight second")
    check_type(packed, kind, f"the second argument is a weight that {packer} has made", f"pass {call}")
    for what, operand in (("bias", bias), ("residual", residual)):
        check_type(operand, (Tensor, type(None)), f"{what} is a tensor or None", f"pass torch.as_tensor({what})")
    for what, operand in (("the input", x), ("the bias", bias), ("the residual", residual)):
        if isinstance(operand, Tensor):
            check_plain_tensor(operand, what)
    if clamp is not None and not (isinstance(clamp, tuple | list) and len(clamp) == 2 and all(isinstance(end, Real) for end in clamp)):
        raise ArgumentError(f"clamp is (low, high) or None, got {clamp!r}: write (0, 6) for ReLU6, or (0, inf) for ReLU")


def check_plain_tensor(tensor: Tensor, what: str) -> None:
    """Raise ArgumentError for a DTensor, a sparse or a nested tensor; `what` is its name in the error."""
    if hasattr(tensor, "to_local"):
        raise ArgumentError(
            f"{what} is a plain tensor, got a {type(tensor).__name__}, which is distributed over processes: pass its to_local()"
        )
    check_dense(tensor, what)


def check_floats(x: Tensor, what: str) -> None:
    """Raise ArgumentError unless x has one of FLOATS; `what` is the op and the argument, as "linear takes activations"."""
    if x.dtype not in FLOATS:
        raise ArgumentError(f"{what} of float32, bfloat16 or float16, got {x.dtype}: convert them first")


def check_ids(ids: Tensor) -> None:
    """Raise ArgumentError unless the ids of an embedding are integers of 32 or 64 bits."""
    if ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"embedding takes ids of int64 or int32, got {ids.dtype}: convert them with .long() first")


def check_out_dtype(dtype: torch.dtype) -> None:
    """Raise ArgumentError unless kernels dequantize to `dtype`."""
    if dtype not in FLOATS:
        raise ArgumentError(f"weights are dequantized to float32, bfloat16 or float16, got {dtype}: convert a model with .float()")


# Packed weights


def packed_bytes(format: str, n: int, k: int, device_type: str) -> int:
    """Return the bytes of a dense weight [n, k] packed for a device of this type."""
    fmt = as_format(format)
    return cpu_tiles.geometry(fmt, (n, k)).nbytes if device_type == "cpu" else gpu_tiles.geometry(fmt, (n, k)).nbytes


def check_bytes(weight: Tensor, nbytes: int, device: torch.device, what: object, packer: str = "pack") -> None:
    """Raise FormatError unless `weight` has `nbytes` packed bytes on `device`.

    Args:
        weight: uint8 [nbytes].
        what: The weight in words, or an object whose str describes it.
        packer: The function of halfbyte that packs such a weight.
    """
    if weight.shape != (nbytes,) or weight.dtype != torch.uint8 or weight.device != device:
        raise FormatError(
            f"{what} is {nbytes} packed bytes on {device_name(device.type)}, "
            f"got {weight.dtype} {list(weight.shape)} on {weight.device}: pack the codes with halfbyte.{packer}"
        )


def check_packed(weight: Tensor, format: str, n: int, k: int, device: torch.device) -> None:
    """Raise FormatError unless `weight` is the packed bytes of [n, k] in `format`, in any layout of the device."""
    nbytes = packed_bytes(format, n, k, device.type)
    if weight.numel() != nbytes:  # the size of another layout of the device: sparse or paired
        geometry_of = cpu_tiles.geometry_of if device.type == "cpu" else gpu_tiles.geometry_of
        nbytes = geometry_of(as_format(format), n, k, weight.numel()).nbytes
    check_bytes(weight, nbytes, device, f"{format} of shape [{n}, {k}]")


# Products in floating point


def check_linear(x: Tensor, weight: Tensor, format: str, n: int, k: int, activation: str, low: float, high: float) -> None:
    """Check the arguments of x [..., K] · weightᵀ -> [..., N], clamped to low … high; bias and residual have checks of their own."""
    check_floats(x, "linear takes activations")
    check_activation(activation)
    if x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"a weight of shape [{n}, {k}] takes activations [..., {k}], got {list(x.shape)}")
    check_clamp(low, high)
    check_packed(weight, format, n, k, x.device)


def check_activation(activation: str, allowed: tuple[str, ...] = ACTIVATIONS) -> None:
    """Raise ArgumentError unless `activation`, what a scale of quantized activations is shared by, is allowed."""
    if activation not in allowed:
        raise ArgumentError(f"unknown activation scaling {activation!r}: use one of {', '.join(allowed)}")


def check_clamp(low: float, high: float) -> None:
    """Raise ArgumentError unless low <= high; NaN is refused too."""
    if not low <= high:
        raise ArgumentError(f"clamp takes (low, high) with low <= high, got ({low}, {high}): write the lower number first")


def check_bias(bias: Tensor, n: int, device: torch.device) -> None:
    """Raise ArgumentError unless `bias` is floating point [n] on `device`."""
    if bias.shape != (n,) or not bias.dtype.is_floating_point or bias.device != device:
        got = f"{bias.dtype} {list(bias.shape)} on {bias.device}"
        raise ArgumentError(f"the bias of {n} outputs is floating point [{n}] on {device_name(device.type)}, got {got}")


def check_residual(residual: Tensor, x: Tensor, shape: tuple[int, ...]) -> None:
    """Raise ArgumentError unless `residual` has the result's `shape`, and dtype and device of the input x."""
    if residual.shape != shape or residual.dtype != x.dtype or residual.device != x.device:
        got = f"{residual.dtype} {list(residual.shape)} on {residual.device}"
        raise ArgumentError(f"the residual is {x.dtype} {list(shape)} on {device_name(x.device.type)}, like the result, got {got}")


# Products of int8 codes with requantization


def check_qlinear(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> None:
    """Check the arguments of qlinear: int8 codes x [..., K] -> int8 codes [..., N] by `table` [3, N rounded up to TABLE_PANEL]."""
    if x.dtype != torch.int8 or x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"qlinear with a weight of shape [{n}, {k}] takes int8 [..., {k}], got {x.dtype} {list(x.shape)}")
    check_packed(weight, format, n, k, x.device)
    check_table(table, (3, round_up(n, TABLE_PANEL)), x.device, low, high, "requantization_table")


def check_table(table: Tensor, shape: tuple[int, ...], device: torch.device, low: int, high: int, builder: str) -> None:
    """Check a requantization table, which the function called `builder` returns, and the clamp low … high of the codes."""
    if not -128 <= low <= high <= 127:
        raise ArgumentError(f"clamp takes (low, high) with -128 <= low <= high <= 127, got ({low}, {high}): write (out_zero, 127) for ReLU")
    if table.shape != shape or table.dtype != torch.float32 or not table.is_contiguous() or table.device != device:
        got = f"{table.dtype} {list(table.shape)} on {table.device}"
        raise ArgumentError(f"the table is contiguous float32 {list(shape)} on {device_name(device.type)}, got {got}: use {builder}")


def code_range(clamp: tuple[int, int] | None) -> tuple[int, int]:
    """Return the lowest and the highest code of a result; `check_table` says whether they are int8."""
    ends: Sequence[int] = (-128, 127) if clamp is None else clamp
    low, high = ends
    if not all(isinstance(end, Integral) for end in ends):
        raise ArgumentError(f"clamp takes codes, whole numbers in -128 … 127, got ({low!r}, {high!r}): write (out_zero, 127) for ReLU")
    return low, high


def check_requantization(fmt: Format, in_scale: float, in_zero: int, out_scale: float, out_zero: int) -> None:
    """Check what a requantization table is computed from: the weight's format, and scales and zero points of input and output codes."""
    if fmt.zero != "none" or isinstance(fmt.block, int):
        raise FormatError(
            f"requantization takes symmetric weights with one scale per channel or tensor, got {fmt}: quantize to int8_channel"
        )
    for what, scale in (("in_scale", in_scale), ("out_scale", out_scale)):
        _check_number(scale, f"{what} is a number", "pass the step of the codes, a float")
        if not 0 < scale < math.inf:
            raise ArgumentError(f"{what} is positive and finite, got {scale}: pass the step of the codes, as calibration gives it")
    for what, zero in (("in_zero", in_zero), ("out_zero", out_zero)):
        _check_number(zero, f"{what} is a whole number", "pass the code of 0, an int")
        if not -128 <= zero <= 127 or int(zero) != zero:
            raise ArgumentError(f"{what} is a whole number in -128 … 127, got {zero}: pass the code of 0")


def _check_number(value: object, expected: str, remedy: str) -> None:
    """Raise ArgumentError unless `value` is a real number or a tensor of one."""
    check_type(value, (Real, Tensor), expected, remedy)
    if isinstance(value, Tensor) and (value.numel() != 1 or value.is_complex()):
        raise ArgumentError(f"{expected}, got {value.dtype} {list(value.shape)}: {remedy}")

"""The operations, as functions on Codes and Packed and as torch custom ops `halfbyte::…` below them.

The custom ops take the packed bytes as one uint8 tensor with the format's name and the sizes beside it, so that
`torch.compile`, `torch.export` and autograd see plain tensors. They check everything before a kernel is called.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping
from typing import Any, get_args

import torch
from torch import Tensor
from torch.utils._python_dispatch import is_in_torch_dispatch_mode
from torch.utils.weak import WeakTensorKeyDictionary

from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.problem import Activation
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.quantizers import METHODS

_INFINITE = float("inf")
_FLOATS = (torch.float32, torch.bfloat16, torch.float16)
_ACTIVATIONS = get_args(Activation)
_LONGEST_INTEGER_SUM = 131072  # 128 * 128 * 131072 = 2^31: longer sums might overflow an int32

# Sums of codes and scales of the weights that qlinear has seen, by their packed bytes.
_integer_sums: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()

# Codes and layouts


def quantize(weight: Tensor, format: str | Format, method: str = "absmax", *, name: str = "weight") -> Codes:
    """Quantize `weight` [..., N, K] (float32, float16 or bfloat16) to `format`.

    method  "absmax": scales from each block's extremes; "mse": scales that minimise the squared error
    name    what an error calls the tensor

    Raises ArgumentError for a NaN or infinity in the weight, FormatError for an unknown format or an overflowing scale.
    """
    fmt = as_format(format)
    if method not in METHODS:
        raise ArgumentError(f"unknown quantization method {method!r}: use one of {', '.join(METHODS)}")
    weight = weight.detach()
    if method == "absmax":
        from halfbyte.kernels.cpu import quantize as kernel

        codes = kernel.quantize(weight, fmt) if kernel.supports(weight, fmt) is None else None
        if codes is not None:
            return codes
    return METHODS[method](weight, fmt, name)


def pack(codes: Codes, device: torch.device | str = "cpu") -> Packed:
    """Arrange `codes` for the kernels of `device`. The numbers stay the same: `unpack` gives them back."""
    from halfbyte.kernels.cpu import pack as kernel

    _cpu_only(torch.device(device))
    codes = codes.to("cpu")
    return kernel.pack(codes) if kernel.supports(codes) is None else cpu_tiles.pack(codes)


def unpack(packed: Packed) -> Codes:
    """The Codes that `packed` was made from."""
    return cpu_tiles.unpack(packed)


def _cpu_only(device: torch.device) -> None:
    if device.type != "cpu":
        raise UnsupportedError(f"there are no kernels for device {str(device)!r} in this version: use device='cpu'")


# Public functions


def linear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    compute: str = "auto",
    activation: str = "block",
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """x [..., K] · dequantize(packed)ᵀ + bias -> [..., N] in x's dtype (float32, bfloat16 or float16).

    packed      weight of shape [N, K]
    bias        [N] or None
    compute     "float": weights become floating point in registers; "int8": x is quantized on the fly and integers are
                multiplied; "auto": the faster one on this machine
    activation  scales of x under "int8": "block" (one for each block of the weight along K) or "row", each also with an
                offset for one-sided activations: "block_offset", "row_offset"
    clamp       (low, high) applied to the result: (0, inf) is ReLU, (0, 6) ReLU6

    Gradients flow to x and bias (dX = dY · W); the weight is frozen. Raises ArgumentError for shapes, dtypes or settings
    that do not fit. A row of x with a NaN or infinity gives a row of NaN under "int8".
    """
    n, k = packed.shape if len(packed.shape) == 2 else _matrix(packed)
    low, high = (-_INFINITE, _INFINITE) if clamp is None else clamp
    if _plain(x) and not _differentiated(x, bias):
        return _linear_cpu(x, packed.data, bias, packed.name, n, k, compute, activation, low, high)
    return _ops.linear.default(x, packed.data, bias, packed.name, n, k, compute, activation, low, high)  # type: ignore[no-any-return]


def qlinear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    in_scale: float,
    in_zero: int,
    out_scale: float,
    out_zero: int,
    clamp: tuple[int, int] = (-128, 127),
) -> Tensor:
    """int8 [..., K] -> int8 [..., N], with requantization fused into the product:

        y = clamp(round(M * (sum(x * q) + fused_bias))),   M = in_scale * scale / out_scale,
        fused_bias = -in_zero * sum(q) + bias / (in_scale * scale) + out_zero / M

    where x stands for in_scale * (x - in_zero), y for out_scale * (y - out_zero), and q, scale are the weight's: symmetric
    codes [N, K] with one scale a channel or a tensor. Sums are exact in int32, the rest is float32 as in
    `kernels/reference.py`; ties go to even. `clamp` is in output codes: (out_zero, 127) is ReLU.
    """
    n, k = _matrix(packed)
    table = requantization_table(packed, bias, in_scale=in_scale, in_zero=in_zero, out_scale=out_scale, out_zero=out_zero)
    return _ops.qlinear.default(x, packed.data, table, packed.name, n, k, *clamp)  # type: ignore[no-any-return]


def requantization_table(
    packed: Packed, bias: Tensor | None, *, in_scale: float, in_zero: int, out_scale: float, out_zero: int
) -> Tensor:
    """What `halfbyte::qlinear` reads beside the weight, float32 [3, N padded to 32]: offset, multiplier, int32 start."""
    n, k = _matrix(packed)
    fmt = packed.format
    if fmt.zero != "none" or isinstance(fmt.block, int) or k > _LONGEST_INTEGER_SUM:
        raise FormatError(
            f"qlinear takes symmetric weights with one scale a channel or a tensor and K up to {_LONGEST_INTEGER_SUM}, "
            f"got {fmt} with K = {k}: quantize to int8_channel"
        )
    for what, step in (("in_scale", in_scale), ("out_scale", out_scale)):
        if not 0 < step < _INFINITE:
            raise ArgumentError(f"{what} is positive and finite, got {step}")
    for what, zero in (("in_zero", in_zero), ("out_zero", out_zero)):
        if not -128 <= zero <= 127:
            raise ArgumentError(f"{what} lies in -128 … 127, got {zero}")
    if packed.data not in _integer_sums:
        codes = unpack(packed)
        scales = codes.scale.double().expand(n, 1).flatten() if k else torch.zeros(n, dtype=torch.float64)
        _integer_sums[packed.data] = codes.values().sum(1, dtype=torch.int32), scales
    sums, scale = _integer_sums[packed.data]
    table = torch.zeros(3, -(-n // cpu_tiles.PANEL) * cpu_tiles.PANEL)
    table[0, :n] = float(out_zero) if bias is None else _fit_bias(bias, n).double() / out_scale + out_zero
    table[1, :n] = scale * (in_scale / out_scale)
    table[2, :n] = (sums * -in_zero).view(torch.float32)
    return table


def embedding(ids: Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Rows `ids` (int64 or int32 [...], each in 0 … N - 1) of the dequantized weight [N, K] -> [..., K] in `dtype`."""
    n, k = _matrix(packed)
    if _plain(ids):
        return _embedding_cpu(ids, packed.data, packed.name, n, k, dtype)
    return _ops.embedding.default(ids, packed.data, packed.name, n, k, dtype)  # type: ignore[no-any-return]


def dequantize(packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """The weight that `packed` stands for, in its logical shape [..., N, K] and `dtype`."""
    *lead, k = packed.shape
    return _ops.dequantize.default(packed.data, packed.name, math.prod(lead), k, dtype).reshape(packed.shape)  # type: ignore[no-any-return]


def _plain(x: Tensor) -> bool:
    """Nobody is watching (no tracing, no modes, no functorch), so the dispatcher, which costs more than a small kernel, may be skipped."""
    return (
        type(x) is Tensor
        and x.is_cpu
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and torch._C._functorch.peek_interpreter_stack() is None
    )


def _differentiated(x: Tensor, bias: Tensor | None) -> bool:
    return torch.is_grad_enabled() and (x.requires_grad or (bias is not None and bias.requires_grad))


def _matrix(packed: Packed) -> tuple[int, int]:
    if len(packed.shape) != 2:
        raise ArgumentError(f"this operation takes a weight [N, K], got one of shape {list(packed.shape)}")
    return packed.shape[0], packed.shape[1]


# Custom ops

_library = torch.library.Library("halfbyte", "DEF")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, str format, int n, int k, str compute, str activation, float low, float high) -> Tensor"
)
_library.define("qlinear(Tensor x, Tensor weight, Tensor table, str format, int n, int k, int low, int high) -> Tensor")
_library.define("embedding(Tensor ids, Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")
_library.define("dequantize(Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")
_ops = torch.ops.halfbyte

_linear_kernels: dict[tuple[Any, ...], Any] = {}


def _linear_cpu(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, compute: str, activation: str, low: float, high: float
) -> Tensor:
    kernel = _linear_kernels.get((format, n, k, x.dtype, compute, activation))
    if kernel is None:
        kernel = _linear_kernel(x, weight, format, n, k, compute, activation)
    shape = x.shape
    fits = weight.shape == (kernel.nbytes,) and weight.dtype == torch.uint8 and weight.is_cpu
    if not shape or shape[-1] != k or not fits or not low <= high:
        _refuse(x, weight, format, n, k, low, high)
    if bias is not None:
        bias = _fit_bias(bias, n)
    if x.numel() == 0 or n == 0:
        empty = x.new_zeros((*shape[:-1], n))  # K = 0: a sum of nothing
        return empty.clamp_(low, high) if bias is None else empty.add_(bias).clamp_(low, high)
    flat = x if len(shape) == 2 else x.reshape(-1, k)
    if not flat.is_contiguous() and flat.stride(1) != 1:
        flat = flat.contiguous()
    if not weight.is_contiguous() or weight.data_ptr() % 64:
        weight = weight.clone(memory_format=torch.contiguous_format)
    out: Tensor = kernel(flat, weight.data_ptr(), bias, low, high)
    return out if len(shape) == 2 else out.view((*shape[:-1], n))


def _linear_kernel(x: Tensor, weight: Tensor, format: str, n: int, k: int, compute: str, activation: str) -> Any:
    """Check what does not change from call to call, and find the kernel."""
    from halfbyte.dispatch.rules import choose_linear
    from halfbyte.kernels.cpu.isas import current
    from halfbyte.kernels.cpu.linear import linear_kernel

    if x.dtype not in _FLOATS:
        raise ArgumentError(f"linear takes activations of float32, bfloat16 or float16, got {x.dtype}: convert them first")
    if activation not in _ACTIVATIONS:
        raise ArgumentError(f"unknown activation scaling {activation!r}: use one of {', '.join(_ACTIVATIONS)}")
    _check_packed(weight, format, n, k)
    fmt = as_format(format)
    inner = choose_linear(fmt, x.dtype, compute, current()).taken.inner
    kernel = linear_kernel(fmt, n, k, x.dtype, inner, activation)
    _linear_kernels[format, n, k, x.dtype, compute, activation] = kernel
    return kernel


def _refuse(x: Tensor, weight: Tensor, format: str, n: int, k: int, low: float, high: float) -> None:
    if x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"a weight of shape [{n}, {k}] takes activations [..., {k}], got {list(x.shape)}")
    if not low <= high:
        raise ArgumentError(f"clamp takes (low, high) with low <= high, got ({low}, {high})")
    _check_packed(weight, format, n, k)


def _check_packed(weight: Tensor, format: str, n: int, k: int) -> None:
    wanted = cpu_tiles.geometry(as_format(format), (n, k)).nbytes
    if weight.dtype != torch.uint8 or weight.dim() != 1 or weight.numel() != wanted or weight.device.type != "cpu":
        raise FormatError(
            f"{format} of shape [{n}, {k}] is {wanted} packed bytes on the CPU, "
            f"got {weight.dtype} {list(weight.shape)} on {weight.device}: pack the codes with halfbyte.pack"
        )


def _fit_bias(bias: Tensor, n: int) -> Tensor:
    if bias.shape != (n,) or not bias.dtype.is_floating_point or bias.device.type != "cpu":
        got = f"{bias.dtype} {list(bias.shape)} on {bias.device}"
        raise ArgumentError(f"the bias of {n} outputs is floating point [{n}] on the CPU, got {got}")
    return bias if bias.dtype == torch.float32 and bias.is_contiguous() else bias.to(torch.float32).contiguous()


def _qlinear_cpu(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> Tensor:
    from halfbyte.kernels.cpu.linear import linear_kernel

    if x.dtype != torch.int8 or x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"qlinear with a weight of shape [{n}, {k}] takes int8 [..., {k}], got {x.dtype} {list(x.shape)}")
    if not -128 <= low <= high <= 127:
        raise ArgumentError(f"clamp takes (low, high) with -128 <= low <= high <= 127, got ({low}, {high})")
    _check_packed(weight, format, n, k)
    wanted = (3, -(-n // cpu_tiles.PANEL) * cpu_tiles.PANEL)
    if table.shape != wanted or table.dtype != torch.float32 or not table.is_contiguous() or not table.is_cpu:
        got = f"{table.dtype} {list(table.shape)} on {table.device}"
        raise ArgumentError(f"qlinear's table is contiguous float32 {list(wanted)} on the CPU, got {got}: use requantization_table")
    if k == 0:  # a sum of nothing: the same as one code that is 0
        return table[0, :n].round().clamp(low, high).to(torch.int8).expand(*x.shape[:-1], n).clone()
    if x.numel() == 0 or n == 0:
        return x.new_empty((*x.shape[:-1], n))
    flat = x.reshape(-1, k)
    if flat.stride(1) != 1:
        flat = flat.contiguous()
    kernel = linear_kernel(as_format(format), n, k, torch.int8, "int8", "block")
    return kernel(flat, _aligned(weight).data_ptr(), table, float(low), float(high)).view((*x.shape[:-1], n))


def _embedding_cpu(ids: Tensor, weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    from halfbyte.kernels.cpu.dequantize import dequantize as run

    _check_packed(weight, format, n, k)
    if ids.dtype not in (torch.int64, torch.int32):
        raise ArgumentError(f"embedding takes ids of int64 or int32, got {ids.dtype}")
    if ids.numel():
        least, most = (int(bound) for bound in torch.aminmax(ids))
        if least < 0 or most >= n:
            raise ArgumentError(f"embedding ids lie in 0 … {n - 1}, got {least} … {most}")
    geo = cpu_tiles.geometry(as_format(format), (n, k))
    return run(_aligned(weight), geo, _out_dtype(dtype), ids.to(torch.int64).flatten()).view((*ids.shape, k))


def _dequantize_cpu(weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    from halfbyte.kernels.cpu.dequantize import dequantize as run

    _check_packed(weight, format, n, k)
    return run(_aligned(weight), cpu_tiles.geometry(as_format(format), (n, k)), _out_dtype(dtype))


def _out_dtype(dtype: torch.dtype) -> torch.dtype:
    if dtype not in _FLOATS:
        raise ArgumentError(f"weights are dequantized to float32, bfloat16 or float16, not {dtype}")
    return dtype


def _aligned(weight: Tensor) -> Tensor:
    return weight if weight.is_contiguous() and weight.data_ptr() % 64 == 0 else weight.clone(memory_format=torch.contiguous_format)


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, compute: str, activation: str, low: float, high: float
) -> Tensor:
    if x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"a weight of shape [{n}, {k}] takes activations [..., {k}], got {list(x.shape)}")
    return x.new_empty((*x.shape[:-1], n))


class _Linear(torch.autograd.Function):
    """dX = dY · W with the dequantized W, whatever the forward computed in; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output: Tensor = _ops.linear.default(x, weight, bias, *settings)
        ctx.settings, ctx.bias_dtype = settings, None if bias is None else bias.dtype
        ctx.save_for_backward(weight, output if settings[-2:] != (-_INFINITE, _INFINITE) else None)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, output = ctx.saved_tensors
        format, n, k, _, _, low, high = ctx.settings
        if output is not None:  # nothing flows through an output that was clamped
            grad = torch.where((output > low) & (output < high), grad, 0)
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            grad_x = grad @ _ops.dequantize.default(weight, format, n, k, grad.dtype)
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.reshape(-1, n).sum(0).to(ctx.bias_dtype)
        return (grad_x, None, grad_bias, *[None] * len(ctx.settings))


def _linear_autograd(x: Tensor, weight: Tensor, bias: Tensor | None, *settings: Any) -> Tensor:
    if _differentiated(x, bias):
        return _Linear.apply(x, weight, bias, *settings)  # type: ignore[no-any-return,no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.linear.default(x, weight, bias, *settings)  # type: ignore[no-any-return]


_library.impl("linear", _linear_cpu, "CPU")
_library.impl("linear", _linear_autograd, "AutogradCPU")
_library.impl("qlinear", _qlinear_cpu, "CPU")
_library.impl("embedding", _embedding_cpu, "CPU")
_library.impl("dequantize", _dequantize_cpu, "CPU")
torch.library.register_fake("halfbyte::linear", _linear_fake, lib=_library)
torch.library.register_fake(
    "halfbyte::qlinear", lambda x, weight, table, format, n, k, low, high: x.new_empty((*x.shape[:-1], n)), lib=_library
)
torch.library.register_fake(
    "halfbyte::embedding", lambda ids, weight, format, n, k, dtype: weight.new_empty((*ids.shape, k), dtype=dtype), lib=_library
)
torch.library.register_fake("halfbyte::dequantize", lambda weight, format, n, k, dtype: weight.new_empty((n, k), dtype=dtype), lib=_library)

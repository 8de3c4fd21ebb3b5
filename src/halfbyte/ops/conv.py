"""Convolution: the functions on Codes and PackedConv, and the custom ops `halfbyte::conv2d` and `halfbyte::qconv2d` below them.

Images and outputs have their channels together in memory (torch's channels_last): an image that is laid out otherwise is copied,
and an output always is so.
"""

from __future__ import annotations

import math
from collections.abc import MutableMapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.grad import conv2d_input
from torch.utils.weak import WeakTensorKeyDictionary

from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.problem import Window
from halfbyte.layouts import convolution, cpu_tiles, gpu_tiles
from halfbyte.layouts.convolution import Filter, PackedConv
from halfbyte.ops import cuda_conv, functions
from halfbyte.ops.checks import ACTIVATIONS, FLOATS, check_bias, check_requantization
from halfbyte.ops.images import channels_last, depthwise, from_numbers, out_shape
from halfbyte.ops.library import differentiated, plain

_INFINITE = float("inf")
_Sizes = int | Sequence[int]
_Padding = int | str | Sequence[int] | Sequence[Sequence[int]]

# What depthwise kernels multiply by, and sums of codes of each tap and scales for requantization, by the packed bytes they come from.
_taps: MutableMapping[Tensor, dict[bool, Tensor]] = WeakTensorKeyDictionary()
_integer_sums: MutableMapping[Tensor, tuple[Tensor, Tensor]] = WeakTensorKeyDictionary()
_KEPT_PLANS = 4096
_kept_moves: dict[tuple[Any, ...], tuple[int, ...]] = {}


# Codes and layouts


def quantize_conv(weight: Tensor, format: str | Format, method: str = "absmax", *, name: str = "weight") -> Codes:
    """Quantize the weight of a convolution, [Co, Ci/groups, Kh, Kw] or [Co, Ci/groups, Kw].

    Blocks run along the channels of one tap, so codes have the shape [Co, Kh*Kw, Ci/groups]; where a format has one scale a channel
    or a tensor, [Co, Kh*Kw*Ci/groups]. `method` and errors as for `quantize`.
    """
    fmt = as_format(format)
    return functions.quantize(convolution.channels_last(weight.detach(), fmt), fmt, method, name=name)


def pack_conv(codes: Codes, kernel_size: _Sizes, groups: int = 1, device: torch.device | str = "cpu") -> PackedConv:
    """Arrange the codes of a convolution's weight for the kernels of `device`; `unpack` gives the same numbers back.

    kernel_size   (Kh, Kw) or (Kw,); one number stands for a square
    """
    sizes = convolution.filter_of(codes, (kernel_size, kernel_size) if isinstance(kernel_size, int) else kernel_size, groups)
    device = torch.device(device)
    if device.type == "cuda" and torch.cuda.is_available():
        return cuda_conv.pack(codes.to(device), sizes)
    if device.type != "cpu":
        there = "torch sees no GPU" if device.type == "cuda" else "there are no kernels for it"
        raise UnsupportedError(f"a weight cannot be packed for device {str(device)!r}, {there}: use device='cpu'")
    codes = codes.to("cpu")
    if depthwise(sizes):
        return PackedConv(sizes, convolution.CANONICAL, _aligned(convolution.canonical_bytes(codes)))
    parts = [functions.pack(part).data for part in convolution.groups_of(codes, sizes)]
    return PackedConv(sizes, cpu_tiles.NAME, parts[0] if len(parts) == 1 else _aligned(torch.cat(parts)))


def _aligned(data: Tensor) -> Tensor:
    return data if data.data_ptr() % 64 == 0 else data.clone(memory_format=torch.contiguous_format)


# Public functions


def conv2d(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None = None,
    stride: _Sizes = 1,
    padding: _Padding = 0,
    dilation: _Sizes = 1,
    *,
    compute: str = "auto",
    activation: str = "block",
    clamp: tuple[float, float] | None = None,
    residual: Tensor | None = None,
) -> Tensor:
    """x [B, C, H, W] (or [C, H, W]) with the kernel moved over it, + bias + residual, clamped -> [B, Co, Ho, Wo] in x's dtype.

    packed      weight, made by `pack_conv`, which also knows the groups
    padding     one number, (height, width), ((top, bottom), (left, right)), "valid" or "same" (stride 1)
    compute     "float": weights become floating point in registers; "int8": patches of x are quantized on the fly and integers are
                multiplied; "auto": the faster one. Depthwise convolutions are always "float".
    activation  scales under "int8": as in `linear`, one for each block of a patch or for the patch ("row"); or one for each image of the
                batch ("image"), which is quantized once: faster, and less exact where an image's values differ much in size. It takes
                weights with a scale a channel or tensor and no zero
    clamp       (low, high) applied to the result: (0, inf) is ReLU, (0, 6) ReLU6
    residual    [B, Co, Ho, Wo] in x's dtype, added before the clamp

    x is float32, bfloat16 or float16. Gradients flow to x, bias and residual; the weight is frozen.
    """
    if x.dim() == 3:
        image, more = x.unsqueeze(0), None if residual is None else residual.unsqueeze(0)
        settings = {"compute": compute, "activation": activation, "clamp": clamp}
        return conv2d(image, packed, bias, stride, padding, dilation, residual=more, **settings)[0]  # type: ignore[arg-type]
    low, high = (-_INFINITE, _INFINITE) if clamp is None else clamp
    moves = _moves(packed.sizes.kernel, stride, padding, dilation)
    run: Any = _ops.conv2d.default
    if plain(x) and not differentiated(x, bias, residual):
        run = _conv2d_cpu if x.is_cpu else cuda_conv.conv2d
    return run(x, packed.data, bias, residual, packed.name, packed.numbers, moves, compute, activation, low, high)  # type: ignore[no-any-return]


def conv1d(
    x: Tensor, packed: PackedConv, bias: Tensor | None = None, stride: int = 1, padding: _Padding = 0, dilation: int = 1, **more: Any
) -> Tensor:
    """x [B, C, L] (or [C, L]) -> [B, Co, Lo]: `conv2d` of an image of one line, with a kernel (1, Kw)."""
    if not isinstance(padding, str):
        padding = ((0, 0), (padding, padding) if isinstance(padding, int) else tuple(_flat(padding)) * (2 // len(_flat(padding))))
    if (residual := more.get("residual")) is not None:
        more["residual"] = residual.unsqueeze(-2)
    return conv2d(x.unsqueeze(-2), packed, bias, (1, stride), padding, (1, dilation), **more).squeeze(-2)


def qconv2d(
    x: Tensor,
    packed: PackedConv,
    bias: Tensor | None = None,
    stride: _Sizes = 1,
    padding: _Padding = 0,
    dilation: _Sizes = 1,
    *,
    in_scale: float,
    in_zero: int,
    out_scale: float,
    out_zero: int,
    clamp: tuple[int, int] = (-128, 127),
) -> Tensor:
    """int8 [B, C, H, W] -> int8 [B, Co, Ho, Wo] with requantization fused, as `qlinear` of each patch. Outside of x lies `in_zero`,
    which means 0. `clamp` is in output codes: (out_zero, 127) is ReLU."""
    table = conv_requantization_table(packed, bias, in_scale=in_scale, in_zero=in_zero, out_scale=out_scale, out_zero=out_zero)
    return qconv2d_with(x, packed, table, _moves(packed.sizes.kernel, stride, padding, dilation), in_zero, clamp)


def qconv2d_with(
    x: Tensor, packed: PackedConv, table: Tensor, moves: tuple[int, ...], in_zero: int, clamp: tuple[int, int] = (-128, 127)
) -> Tensor:
    """`qconv2d` with what does not change from call to call made before: `conv_requantization_table` and `Window.numbers`."""
    run: Any = _ops.qconv2d.default
    if plain(x):
        run = _qconv2d_cpu if x.is_cpu else cuda_conv.qconv2d
    return run(x, packed.data, table, packed.name, packed.numbers, moves, in_zero, *clamp)  # type: ignore[no-any-return]


def conv_requantization_table(
    packed: PackedConv, bias: Tensor | None, *, in_scale: float, in_zero: int, out_scale: float, out_zero: int
) -> Tensor:
    """What `halfbyte::qconv2d` reads beside the weight, float32 [groups, 3, Co/groups padded to 32] (depthwise: [1, 3, Co]): offset,
    multiplier, int32 start. On a GPU [groups, 4 + taps, Co/groups padded to 64], see `ops/cuda_conv.py`."""
    sizes = packed.sizes
    check_requantization(sizes.format, sizes.k, in_scale, in_zero, out_scale, out_zero)
    n = sizes.out // sizes.groups
    if packed.data not in _integer_sums:
        codes = convolution.unpack(packed)
        sums = codes.values().reshape(sizes.out, sizes.taps, sizes.channels).sum(2, dtype=torch.int32)
        _integer_sums[packed.data] = sums, codes.scale.double().expand(sizes.out, 1).flatten()
    sums, scale = _integer_sums[packed.data]
    if bias is not None:
        check_bias(bias, sizes.out, packed.device)
    rows = functions.requantization_rows(sums.sum(1, dtype=torch.int32), scale, bias, in_scale, in_zero, out_scale, out_zero)
    if rows.is_cuda:
        return cuda_conv.table(rows, sums, sizes, in_zero)
    if depthwise(sizes):
        return rows.unsqueeze(0)
    table = torch.zeros(sizes.groups, 3, -(-n // cpu_tiles.PANEL) * cpu_tiles.PANEL)
    table[:, :, :n] = rows.view(3, sizes.groups, n).transpose(0, 1)
    return table


def _pair(value: _Sizes, what: str) -> tuple[int, int]:
    pair = (value, value) if isinstance(value, int) else tuple(value)
    if len(pair) != 2:
        raise ArgumentError(f"{what} is one number or (height, width), got {value!r}")
    return pair[0], pair[1]


def _flat(value: Sequence[Any]) -> list[int]:
    return [n for item in value for n in (_flat(item) if isinstance(item, Sequence) else [item])]


def _moves(kernel: tuple[int, int], stride: _Sizes, padding: _Padding, dilation: _Sizes) -> tuple[int, ...]:
    """`written_moves`, kept: reading takes longer than a small kernel."""
    if torch.compiler.is_compiling():
        return written_moves(kernel, stride, padding, dilation)
    key = kernel, _frozen(stride), _frozen(padding), _frozen(dilation)
    if key not in _kept_moves:
        if len(_kept_moves) >= _KEPT_PLANS:
            _kept_moves.clear()
        _kept_moves[key] = written_moves(kernel, stride, padding, dilation)
    return _kept_moves[key]


def _frozen(value: Any) -> Any:
    return value if isinstance(value, int | str) else tuple(map(_frozen, value))


def written_moves(kernel: tuple[int, int], stride: _Sizes, padding: _Padding, dilation: _Sizes) -> tuple[int, ...]:
    """`Window.numbers` of what a caller wrote."""
    strides, dilations = _pair(stride, "stride"), _pair(dilation, "dilation")
    if padding == "same":
        if strides != (1, 1):
            raise ArgumentError(f'padding "same" takes stride 1, got {stride}')
        reach = [(k - 1) * d for k, d in zip(kernel, dilations, strict=True)]
        sides = reach[0] // 2, reach[0] - reach[0] // 2, reach[1] // 2, reach[1] - reach[1] // 2
    elif padding == "valid":
        sides = 0, 0, 0, 0
    elif isinstance(padding, str):
        raise ArgumentError(f'padding is "same", "valid" or numbers, got {padding!r}')
    else:
        flat = [padding] * 2 if isinstance(padding, int) else _flat(padding)
        if len(flat) not in (2, 4):
            raise ArgumentError(f"padding is one number, (height, width) or ((top, bottom), (left, right)), got {padding!r}")
        sides = (flat[0], flat[0], flat[1], flat[1]) if len(flat) == 2 else (flat[0], flat[1], flat[2], flat[3])
    return Window(strides, sides, dilations).numbers


# Custom ops

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "conv2d(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str format, int[] sizes, int[] window, str compute, str activation, "
    "float low, float high) -> Tensor"
)
_library.define(
    "qconv2d(Tensor x, Tensor weight, Tensor table, str format, int[] sizes, int[] window, int in_zero, int low, int high) -> Tensor"
)
_ops = torch.ops.halfbyte


def _packed_bytes(sizes: Filter) -> int:
    if depthwise(sizes):
        stored = stored_tensors(sizes.format, sizes.codes_shape).values()
        return sum(math.prod(shape) * dtype.itemsize for dtype, shape in stored)
    return sizes.groups * cpu_tiles.geometry(sizes.matrix_format, (sizes.out // sizes.groups, sizes.k)).nbytes


def _taps_of(weight: Tensor, sizes: Filter, *, integer: bool) -> Tensor:
    from halfbyte.kernels.cpu.depthwise import taps

    made = _taps.setdefault(weight, {})
    if integer not in made:
        made[integer] = taps(convolution.from_canonical_bytes(weight, sizes), sizes, integer=integer)
    return made[integer]


class _Plan(NamedTuple):
    """What calls on images of one shape share; everything that does not change from call to call has been checked."""

    sizes: Filter
    window: Window
    out_shape: tuple[int, int, int, int]
    strides: tuple[int, int, int, int]
    weight_bytes: int
    depthwise: bool
    kernel: Any


_plans: dict[tuple[Any, ...], _Plan] = {}


def _plan(x: Tensor, format: str, numbers: Sequence[int], moves: Sequence[int], compute: str, activation: str) -> _Plan:
    key = format, tuple(numbers), tuple(moves), tuple(x.shape), x.dtype, compute, activation
    plan = _plans.get(key)
    if plan is None:
        if len(_plans) >= _KEPT_PLANS:
            _plans.clear()
        plan = _plans[key] = _new_plan(x, format, numbers, moves, compute, activation)
    return plan


def _new_plan(x: Tensor, format: str, numbers: Sequence[int], moves: Sequence[int], compute: str, activation: str) -> _Plan:
    from halfbyte.dispatch.rules import choose_linear
    from halfbyte.kernels.cpu.conv import ConvKernel, ImageConvKernel
    from halfbyte.kernels.cpu.depthwise import DepthwiseKernel
    from halfbyte.kernels.cpu.isas import current

    sizes, window = from_numbers(format, numbers, moves)
    shape = out_shape(x, sizes, window)
    if activation not in (*ACTIVATIONS, "image"):
        raise ArgumentError(f"unknown activation scaling {activation!r}: use one of {', '.join(ACTIVATIONS)}, image")
    _, c, h, w = x.shape
    # What asks for a scale of the image asks for integers.
    wanted = "int8" if activation == "image" and compute == "auto" else compute
    inner = "int8" if x.dtype == torch.int8 else choose_linear(sizes.matrix_format, x.dtype, wanted, current()).taken.inner
    by_image = activation == "image" and inner == "int8" and not depthwise(sizes)
    if by_image:
        _check_one_scale(sizes)
    kernel: Any = None
    if 0 not in shape and x.numel():
        if depthwise(sizes):
            kernel = DepthwiseKernel(sizes, x.dtype)
        else:
            kernel = ImageConvKernel(sizes, x.dtype) if by_image else ConvKernel(sizes, x.dtype, inner, activation)  # type: ignore[arg-type]
    return _Plan(sizes, window, shape, (h * w * c, 1, w * c, c), _packed_bytes(sizes), depthwise(sizes), kernel)


def _check_one_scale(sizes: Filter) -> None:
    fmt = sizes.format
    if fmt.zero != "none" or isinstance(fmt.block, int):
        raise UnsupportedError(
            f"activation='image' takes weights with a scale a channel or tensor and no zero, got {fmt}: use int8_channel, or 'row'"
        )
    if sizes.k > cpu_tiles.LONGEST_BLOCK:
        raise UnsupportedError(f"activation='image' takes patches of at most {cpu_tiles.LONGEST_BLOCK} numbers, got {sizes.k}: use 'row'")


def _fit_weight(weight: Tensor, plan: _Plan, *, integer: bool = False) -> Tensor:
    """What the plan's kernel takes for the packed bytes."""
    if weight.shape != (plan.weight_bytes,) or weight.dtype != torch.uint8 or not weight.is_cpu:
        got = f"{weight.dtype} {list(weight.shape)} on {weight.device}"
        wanted = f"{plan.weight_bytes} packed bytes on the CPU"
        raise FormatError(f"the weight of {plan.sizes} is {wanted}, got {got}: pack the codes with halfbyte.pack_conv")
    if plan.depthwise:
        return _taps_of(weight, plan.sizes, integer=integer)
    return weight if weight.is_contiguous() and weight.data_ptr() % 64 == 0 else weight.clone(memory_format=torch.contiguous_format)


def _conv2d_cpu(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    numbers: Sequence[int],
    moves: Sequence[int],
    compute: str,
    activation: str,
    low: float,
    high: float,
) -> Tensor:
    if x.dtype not in FLOATS:
        raise ArgumentError(f"conv2d takes images of float32, bfloat16 or float16, got {x.dtype}: convert them first")
    plan = _plan(x, format, numbers, moves, compute, activation)
    if not low <= high:
        raise ArgumentError(f"clamp takes (low, high) with low <= high, got ({low}, {high})")
    weights = _fit_weight(weight, plan)
    if bias is not None:
        check_bias(bias, plan.sizes.out, x.device)
        bias = bias.to(torch.float32).contiguous()
    if residual is not None:
        if residual.shape != plan.out_shape or residual.dtype != x.dtype or not residual.is_cpu:
            got = f"{residual.dtype} {list(residual.shape)} on {residual.device}"
            raise ArgumentError(f"the residual is {x.dtype} {list(plan.out_shape)} on the CPU, got {got}")
        residual = channels_last(residual)
    if plan.kernel is None:  # nothing to multiply
        y = x.new_zeros(plan.out_shape)
        for more in (None if bias is None else bias.view(1, -1, 1, 1), residual):
            y = y if more is None else y + more
        return y.clamp(low, high).to(x.dtype)
    if x.stride() != plan.strides:
        x = channels_last(x)
    return plan.kernel(x, plan.window, weights, bias, low, high, residual=residual)  # type: ignore[no-any-return]


def _qconv2d_cpu(
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    format: str,
    numbers: Sequence[int],
    moves: Sequence[int],
    in_zero: int,
    low: int,
    high: int,
) -> Tensor:
    if x.dtype != torch.int8:
        raise ArgumentError(f"qconv2d takes int8 images, got {x.dtype}: quantize them first")
    plan = _plan(x, format, numbers, moves, "int8", "block")
    if not -128 <= low <= high <= 127:
        raise ArgumentError(f"clamp takes (low, high) with -128 <= low <= high <= 127, got ({low}, {high})")
    weights, sizes = _fit_weight(weight, plan, integer=True), plan.sizes
    n = sizes.out // sizes.groups
    wanted = (1, 3, sizes.out) if plan.depthwise else (sizes.groups, 3, -(-n // cpu_tiles.PANEL) * cpu_tiles.PANEL)
    if table.shape != wanted or table.dtype != torch.float32 or not table.is_contiguous() or not table.is_cpu:
        got = f"{table.dtype} {list(table.shape)} on {table.device}"
        raise ArgumentError(f"qconv2d's table is contiguous float32 {list(wanted)} on the CPU, got {got}: use conv_requantization_table")
    if plan.kernel is None:
        return x.new_empty(plan.out_shape)
    if x.stride() != plan.strides:
        x = channels_last(x)
    return plan.kernel(x, plan.window, weights, table, float(low), float(high), outside=in_zero)  # type: ignore[no-any-return]


class _Conv2d(torch.autograd.Function):
    """Gradients as of a convolution with the dequantized weight, whatever the forward computed in; the weight is frozen."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: Any) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            output: Tensor = _ops.conv2d.default(x, weight, bias, residual, *settings)
        ctx.settings, ctx.shape, ctx.bias_dtype = settings, x.shape, None if bias is None else bias.dtype
        ctx.save_for_backward(weight, output if settings[-2:] != (-_INFINITE, _INFINITE) else None)
        return output

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, output = ctx.saved_tensors
        format, numbers, moves, _, _, low, high = ctx.settings
        if output is not None:  # nothing flows through an output that was clamped
            grad = torch.where((output > low) & (output < high), grad, 0)
        grad_x = grad_bias = None
        if ctx.needs_input_grad[0]:
            sizes, window = from_numbers(format, numbers, moves)
            top, bottom, left, right = window.padding
            batch, channels, height, width = ctx.shape
            layout = convolution.CANONICAL if depthwise(sizes) else gpu_tiles.NAME if weight.is_cuda else cpu_tiles.NAME
            floats = convolution.dequantize(PackedConv(sizes, layout, weight), grad.dtype)
            padded = (batch, channels, height + top + bottom, width + left + right)
            whole = conv2d_input(padded, floats, grad, window.stride, 0, window.dilation, sizes.groups)
            grad_x = whole[:, :, top : top + height, left : left + width]
        if ctx.bias_dtype is not None and ctx.needs_input_grad[2]:
            grad_bias = grad.sum((0, 2, 3)).to(ctx.bias_dtype)
        return (grad_x, None, grad_bias, grad if ctx.needs_input_grad[3] else None, *[None] * len(ctx.settings))


def _conv2d_autograd(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: Any) -> Tensor:
    if differentiated(x, bias, residual):
        return _Conv2d.apply(x, weight, bias, residual, *settings)  # type: ignore[no-any-return,no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return _ops.conv2d.default(x, weight, bias, residual, *settings)  # type: ignore[no-any-return]


def _fake(x: Tensor, weight: Tensor, *arguments: Any) -> Tensor:
    format, numbers, moves = next(arguments[i : i + 3] for i, a in enumerate(arguments) if isinstance(a, str))
    return x.new_empty(out_shape(x, *from_numbers(format, numbers, moves))).contiguous(memory_format=torch.channels_last)


for _device, _float, _integer in (("CPU", _conv2d_cpu, _qconv2d_cpu), ("CUDA", cuda_conv.conv2d, cuda_conv.qconv2d)):
    _library.impl("conv2d", _float, _device)
    _library.impl("conv2d", _conv2d_autograd, f"Autograd{_device}")
    _library.impl("qconv2d", _integer, _device)
torch.library.register_fake("halfbyte::conv2d", _fake, lib=_library)
torch.library.register_fake("halfbyte::qconv2d", _fake, lib=_library)

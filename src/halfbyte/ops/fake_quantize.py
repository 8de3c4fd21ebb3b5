"""Fake quantization: weights and activations quantized and dequantized, in floating point and with gradients.

    forward    dequantize(quantize(w)), bit for bit what the stored codes stand for
    backward   that of the identity (the straight-through estimator: Bengio, Léonard, Courville, arXiv:1308.3432, 2013), but 0 for weights
               that lie more than half a step beyond the ends of their block's grid, where the result does not depend on them

With learned scales (LSQ: Esser et al., Learned Step Size Quantization, arXiv:1902.08153, ICLR 2020) a scale s has the gradient

    ds = 1 / sqrt(B * q_max) * sum over its block of  dw * { (dequantize(q) - w) / s     inside of the grid
                                                           { q, or q minus its zero point      beyond its ends

for blocks of B weights. The scale is used as it is stored, rounded to its dtype; its gradient passes that rounding unchanged.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol, TypeVarTuple, Unpack

import torch
from torch import Tensor

from halfbyte.errors import FormatError, unreachable
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.conv_reference import quantized_images
from halfbyte.kernels.problem import Activation, scaling_of
from halfbyte.kernels.reference import quantize_block
from halfbyte.layouts.cpu_tiles import piece
from halfbyte.ops import functions
from halfbyte.ops.checks import check_floats, check_plain_tensor
from halfbyte.ops.modes import has_tangent, transformed
from halfbyte.ops.registration import loops
from halfbyte.quantizers import quantize_to_grid

_Settings = TypeVarTuple("_Settings")


def fake_quantize(weight: Tensor, format: str | Format, method: str = "absmax", *, name: str = "weight") -> Tensor:
    """dequantize(quantize(weight)) of a weight [..., N, K] with this format and method, in its dtype, with the gradient above.

    Raises what `quantize` does.
    """
    check_plain_tensor(weight, name)
    rows, settings = weight.reshape(-1, weight.shape[-1]), (str(as_format(format)), method, name)
    if transformed() or has_tangent(rows):
        rounded, inside = _fake_quantize(rows.detach(), *settings)
        return (rounded + _change(rows) * inside).reshape(weight.shape)  # type: ignore[no-any-return]
    return _fake_quantize(rows, *settings)[0].reshape(weight.shape)  # type: ignore[no-any-return]


def fake_quantize_given(weight: Tensor, format: str | Format, scale: Tensor, zero: Tensor | None, *, name: str = "weight") -> Tensor:
    """The same with given scales, which get gradients, and zeros, which do not, in the shape `Format.scale_shape`.

    scale  floating point, of either sign
    zero   zero points (uint8) or offsets (the scale's dtype); None where the format has none
    """
    check_plain_tensor(weight, name)
    fmt = as_format(format)
    rows = weight.reshape(-1, weight.shape[-1])
    shape = fmt.scale_shape(tuple(rows.shape))
    points = None if zero is None else zero.reshape(shape)
    scale = scale.reshape(shape)
    if transformed() or has_tangent(rows, scale):
        still = rows.detach(), scale.detach(), points
        rounded, inside = _fake_quantize_given(*still, str(fmt), name)
        slope = _slope(*still, rounded, inside, fmt) * (_change(scale).unsqueeze(-1) * _learning_rate(fmt, rows))
        moved = slope.reshape(len(rows), -1)[:, : rows.shape[1]]
        return (rounded + _change(rows) * inside + moved.to(rounded.dtype)).reshape(weight.shape)  # type: ignore[no-any-return]
    return _fake_quantize_given(rows, scale, points, str(fmt), name)[0].reshape(weight.shape)  # type: ignore[no-any-return]


def fake_quantize_activation(x: Tensor, block: int, activation: Activation) -> Tensor:
    """Activations [..., K] as "int8" compute reads them, in x's dtype: `kernels/reference.quantize_activation` and back.

    block  elements of a block of the weight along K

    The gradient is that of the identity: no value is clipped.
    """
    return _straight_through(x, _fake_quantize_activation, block, activation)


def fake_quantize_images(x: Tensor) -> Tensor:
    """Images [B, C, H, W] as convolutions with `activation="image"` read them, in x's dtype, with the gradient of the identity."""
    return _straight_through(x, _fake_quantize_images)


def _straight_through(x: Tensor, op: Callable[[Tensor, Unpack[_Settings]], Tensor], *settings: *_Settings) -> Tensor:
    """op(x, *settings) with the derivative of the identity."""
    check_plain_tensor(x, "the input")
    check_floats(x, "fake quantization takes activations")
    return op(x.detach(), *settings) + _change(x) if transformed() or has_tangent(x) else op(x, *settings)


def _change(x: Tensor) -> Tensor:
    """0, with the derivative of x: what torch.func and forward-mode differentiation, which the custom ops do not have, need."""
    return x - x.detach()


# Weights

_library = torch.library.Library("halfbyte", "FRAGMENT")


@torch.library.custom_op(
    "halfbyte::fake_quantize", mutates_args=(), schema="(Tensor rows, str format, str method, str name) -> (Tensor, Tensor)"
)
def _fake_quantize(rows: Tensor, format: str, method: str, name: str) -> tuple[Tensor, Tensor]:
    """The weight [R, K], and which weights lie within their block's grid."""
    codes = functions.quantize(rows, format, method, name=name)
    return _dequantized(codes, rows), _inside(rows, codes)


@torch.library.custom_op(
    "halfbyte::fake_quantize_given",
    mutates_args=(),
    schema="(Tensor rows, Tensor scale, Tensor? zero, str format, str name) -> (Tensor, Tensor)",
)
def _fake_quantize_given(rows: Tensor, scale: Tensor, zero: Tensor | None, format: str, name: str) -> tuple[Tensor, Tensor]:
    codes = quantize_to_grid(rows, as_format(format), scale, zero, name)
    return _dequantized(codes, rows), _inside(rows, codes)


@_fake_quantize.register_fake
@_fake_quantize_given.register_fake
def _(rows: Tensor, *_: object) -> tuple[Tensor, Tensor]:
    return rows.new_empty(rows.shape), rows.new_empty(rows.shape, dtype=torch.bool)


def _dequantized(codes: Codes, like: Tensor) -> Tensor:
    return functions.dequantize(functions.pack(codes, like.device), like.dtype)


def _inside(rows: Tensor, codes: Codes) -> Tensor:
    """bool [R, K]: no more than half a step beyond the ends of the grid. True for a block whose scale is 0, so that it can grow again."""
    fmt, scale = codes.format, codes.scale.float()
    point, offset = _zeros(fmt, codes.zero)
    ends = [scale * (end - point) + offset for end in (fmt.q_min - 0.5, fmt.q_max + 0.5)]
    low, high = torch.minimum(*ends).unsqueeze(-1), torch.maximum(*ends).unsqueeze(-1)
    x = _blocks(rows, fmt)
    inside = (x >= low) & (x <= high) | (scale == 0).unsqueeze(-1)
    return inside.reshape(len(rows), -1)[:, : rows.shape[1]].contiguous()


def _zeros(fmt: Format, zero: Tensor | None) -> tuple[Tensor | float, Tensor | float]:
    """Zero points and offsets, 0 where there are none."""
    if zero is None:
        return 0.0, 0.0
    match fmt.zero:
        case "point":
            return zero.float(), 0.0
        case "offset":
            return 0.0, zero.float()
        case "none":
            raise FormatError(f"{fmt} codes have no zero, got a tensor of shape {list(zero.shape)}")
        case _:
            raise unreachable(fmt.zero, "the zero of a format")


def _blocks(rows: Tensor, fmt: Format) -> Tensor:
    """[R, K] -> [R, blocks, B], a short last block padded with 0; [1, 1, R * K] with one scale per tensor."""
    if fmt.block == "tensor":
        return rows.reshape(1, 1, -1)
    size = fmt.block_size(rows.shape[1])
    short = -rows.shape[1] % size
    return (torch.nn.functional.pad(rows, (0, short)) if short else rows).reshape(len(rows), -1, size)


class _Context(Protocol):
    """What torch keeps between the forward and the gradient."""

    format: str
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...


def _keep_inside(ctx: _Context, inputs: object, output: tuple[Tensor, Tensor]) -> None:
    ctx.save_for_backward(output[1])


def _weight_gradient(ctx: _Context, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    (inside,) = ctx.saved_tensors
    return grad * inside, None, None, None


def _keep_given(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor | None, str, str], output: tuple[Tensor, Tensor]) -> None:
    rows, scale, zero, ctx.format, _ = inputs
    ctx.save_for_backward(rows, scale, zero, *output)


def _given_gradient(ctx: _Context, grad: Tensor, _: object) -> tuple[Tensor | None, ...]:
    rows, scale, zero, rounded, inside = ctx.saved_tensors
    fmt = as_format(ctx.format)
    slope = _slope(rows, scale, zero, rounded, inside, fmt)
    grad_scale = (_blocks(grad.float(), fmt) * slope).sum(-1) * _learning_rate(fmt, rows)
    return grad * inside, grad_scale.to(scale.dtype), None, None, None


def _slope(rows: Tensor, scale: Tensor, zero: Tensor | None, rounded: Tensor, inside: Tensor, fmt: Format) -> Tensor:
    """The derivative of the rounded weight by the scale of its block, in blocks."""
    stored = scale.to(fmt.scale).float()
    inverse = torch.where(stored == 0, 0.0, 1 / stored).unsqueeze(-1)
    _, offset = _zeros(fmt, zero)
    x, w, within = (_blocks(t, fmt) for t in (rows.float(), rounded.float(), inside))
    beyond = w - (offset.unsqueeze(-1) if isinstance(offset, Tensor) else 0.0)
    return torch.where(within, w - x, beyond) * inverse


def _learning_rate(fmt: Format, rows: Tensor) -> float:
    """What derivatives by scales are multiplied by."""
    size = rows.numel() if fmt.block == "tensor" else fmt.block_size(rows.shape[1])
    return 1 / math.sqrt(size * fmt.q_max)


_fake_quantize.register_autograd(_weight_gradient, setup_context=_keep_inside)
_fake_quantize_given.register_autograd(_given_gradient, setup_context=_keep_given)

loops(_library, "fake_quantize", "fake_quantize_given")

# Activations


@torch.library.custom_op("halfbyte::fake_quantize_activation", mutates_args=(), schema="(Tensor x, int block, str activation) -> Tensor")
def _fake_quantize_activation(x: Tensor, block: int, activation: str) -> Tensor:
    k = x.shape[-1]
    whole_row, with_offset = scaling_of(activation)  # type: ignore[arg-type]
    size = max(1, k) if whole_row else piece(block, k)
    flat = x.reshape(-1, k).float()
    whole = k // size * size
    # The whole blocks of all rows at once, then the short last ones.
    parts = [part for part in (flat[:, :whole].reshape(len(flat), whole // size, size), flat[:, whole:].unsqueeze(1)) if part.numel()]
    rounded = []
    for part in parts:
        q, scale, offset = quantize_block(part, with_offset)
        rounded.append((q * scale.unsqueeze(-1) + offset.unsqueeze(-1)).flatten(1))
    return torch.cat([*rounded, flat[:, :0]], dim=1).reshape(x.shape).to(x.dtype)


@torch.library.custom_op("halfbyte::fake_quantize_images", mutates_args=(), schema="(Tensor x) -> Tensor")
def _fake_quantize_images(x: Tensor) -> Tensor:
    q, scale = quantized_images(x)
    return (q * scale.view(-1, 1, 1, 1)).to(x.dtype).contiguous()  # as its fake says


@_fake_quantize_activation.register_fake
@_fake_quantize_images.register_fake
def _(x: Tensor, *_: object) -> Tensor:
    return x.new_empty(x.shape)


_fake_quantize_activation.register_autograd(lambda ctx, grad: (grad, None, None))
_fake_quantize_images.register_autograd(lambda ctx, grad: grad)
loops(_library, "fake_quantize_activation", "fake_quantize_images")

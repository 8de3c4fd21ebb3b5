"""Norms between the products of a decoder layer: the custom ops `halfbyte::normed` and `halfbyte::add_normed`.

On NVIDIA GPUs each is one kernel that starts while the previous one is still running; elsewhere torch's operations compute the same. GPU
steps (normed_linear.py, attend.py, decoder/gpu_layer.py) and encoders call them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.dispatch.layers import why_not_norm
from halfbyte.errors import ArgumentError
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.ops.modes import in_mode, plain, transformed
from halfbyte.ops.registration import OPS, refuses_derivatives
from halfbyte.ops.transformer.sublayers import Norm

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define("normed(Tensor x, Tensor norm, float eps, bool unit_offset, bool layer_norm, Tensor? bias) -> Tensor")
_library.define(
    "add_normed(Tensor x, Tensor residual, Tensor norm, float eps, bool unit_offset, Tensor? next_norm, float next_eps, Tensor? scale) "
    "-> (Tensor, Tensor)"
)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """Compute norm(x) over the last dimension, in float32, rounded once to x's dtype; no gradients.

    Args:
        x: [..., K].
        norm: An RMS norm or a layer norm, weight and bias [K] of x's dtype.

    Returns:
        [..., K] in x's dtype.

    Raises:
        ArgumentError: Shapes, dtypes or devices do not fit.
    """
    if plain(x):
        return norm_on_gpu(x, norm) if x.is_cuda else norm_in_torch(x, norm)
    y: Tensor = norm_in_torch(x, norm) if in_mode() or transformed() else OPS.normed.default(x, *norm)
    return y


def add_normed(
    x: Tensor, residual: Tensor, norm: Norm, next_norm: Norm | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """Compute h = scale * (residual + norm(x)), rounded to x's dtype, and next_norm(h); no gradients.

    Args:
        x, residual: [..., K] of one dtype.
        norm: An RMS norm.
        next_norm: An RMS norm of the same `unit_offset`; None: there is none.
        scale: One number, [1]; None: 1.

    Returns:
        h and next_norm(h), or None, [..., K] in x's dtype.

    Raises:
        ArgumentError: Shapes, dtypes or devices do not fit, or norms are of other kinds.
    """
    weight, eps, next_unit_offset = rms_parts(next_norm)
    if next_norm is not None and next_unit_offset != norm.unit_offset:
        raise ArgumentError(f"both norms have one unit_offset, got {norm.unit_offset} and {next_unit_offset}: call `normed` for the second")
    run: Callable[..., tuple[Tensor, Tensor]] = _add_normed_on_gpu if x.is_cuda else _add_normed_in_torch
    if not plain(x):
        run = _add_normed_in_torch if in_mode() or transformed() else OPS.add_normed.default
    h, z = run(x, residual, *rms_parts(norm), weight, eps, scale)
    return h, None if next_norm is None else z


def rms_parts(norm: Norm | None) -> tuple[Tensor | None, float, bool]:
    """Return the weight of an RMS norm, its eps and its `unit_offset`. Raise ArgumentError for a layer norm."""
    if norm is None:
        return None, 0.0, False
    if norm.layer_norm:
        raise ArgumentError("a norm within another step is an RMS norm, got a layer norm: call `normed` before")
    return norm.weight, norm.eps, norm.unit_offset


def check_norm(x: Tensor, weight: Tensor) -> None:
    """Raise ArgumentError unless `weight`, or a bias, is [K] of x's [..., K] dtype, on its device."""
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.dtype != x.dtype or weight.device != x.device:
        got = f"x {list(x.shape)} of {x.dtype} on {x.device}, norm {list(weight.shape)} of {weight.dtype} on {weight.device}"
        raise ArgumentError(f"a norm takes x [..., K] and its weight [K] of one dtype on one device, got {got}: convert them")


def norm_in_torch(x: Tensor, norm: Norm) -> Tensor:
    """Compute the norm by torch's operations."""
    _check(x, norm)
    return wide_norm(x.float(), norm).to(x.dtype)


def wide_norm(x: Tensor, norm: Norm) -> Tensor:
    """Compute the norm of float32 x, not rounded."""
    weight = norm.weight.float() + 1 if norm.unit_offset else norm.weight.float()
    if norm.layer_norm:
        x = x - x.mean(-1, keepdim=True)
    y = x * torch.rsqrt(x.square().mean(-1, keepdim=True) + norm.eps) * weight
    return y if norm.bias is None else y + norm.bias.float()


def norm_on_gpu(x: Tensor, norm: Norm) -> Tensor:
    """Compute the norm by a GPU kernel where one supports it, else in torch."""
    from halfbyte.machine import gpu
    from halfbyte.ops.cuda import on
    from halfbyte.ops.replay import replayed

    _check(x, norm)
    here = gpu(x.get_device())
    if not x.numel() or why_not_norm(x.shape[-1], here) is not None:
        return norm_in_torch(x, norm)
    from halfbyte.kernels.gpu.transformer import norm as kernel

    z = x.contiguous()
    weight, bias = norm.weight.contiguous(), None if norm.bias is None else norm.bias.contiguous()

    def launch() -> Tensor:
        out, rows, parts = output(torch.empty_like(z)), (-1, z.shape[-1]), (weight, norm.eps, norm.unit_offset)
        kernel.launch(here, z.view(rows), parts, out.view(rows), layer_norm=norm.layer_norm, bias=bias)
        return out

    with on(x):
        return replayed(launch, (z, weight, bias), "normed", norm.eps, norm.unit_offset, norm.layer_norm)


def _check(x: Tensor, norm: Norm) -> None:
    for part in (norm.weight, norm.bias):
        if part is not None:
            check_norm(x, part)


class _AddNormed(NamedTuple):
    """The arguments of the op `add_normed`, as its schema has them."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    unit_offset: bool
    next_weight: Tensor | None
    next_eps: float
    scale: Tensor | None

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.eps, self.unit_offset)

    def check(self) -> None:
        """Raise ArgumentError where shapes, dtypes or devices do not fit."""
        x, residual, scale = self.x, self.residual, self.scale
        for weight in (self.weight, self.next_weight):
            if weight is not None:
                check_norm(x, weight)
        if residual.shape != x.shape or residual.dtype != x.dtype or residual.device != x.device:
            got = f"{residual.dtype} {list(residual.shape)} on {residual.device}"
            raise ArgumentError(f"what is added to {x.dtype} {list(x.shape)} on {x.device} is of its shape and type, got {got}: convert it")
        if scale is not None and (scale.numel() != 1 or not scale.is_floating_point()):
            raise ArgumentError(f"a sum is multiplied by one number, got {scale.dtype} {list(scale.shape)}: pass a float of shape [1]")


def _add_normed_in_torch(*args: *_AddNormed) -> tuple[Tensor, Tensor]:
    a = _AddNormed(*args)
    a.check()
    wide = wide_norm(a.x.float(), a.norm) + a.residual.float()
    h = (wide if a.scale is None else wide * a.scale.float()).to(a.x.dtype)
    return h, h.new_empty(0) if a.next_weight is None else norm_in_torch(h, Norm(a.next_weight, a.next_eps, a.unit_offset))


def _add_normed_on_gpu(*args: *_AddNormed) -> tuple[Tensor, Tensor]:
    """Compute the op by a GPU kernel where one supports it, else in torch."""
    from halfbyte.machine import gpu
    from halfbyte.ops.cuda import on
    from halfbyte.ops.replay import replayed

    a = _AddNormed(*args)
    a.check()
    here, k = gpu(a.x.get_device()), a.x.shape[-1]
    if not a.x.numel() or why_not_norm(k, here) is not None:
        return _add_normed_in_torch(*args)
    from halfbyte.kernels.gpu.transformer import norm as kernel

    x, residual = a.x.contiguous().view(-1, k), a.residual.contiguous().view(-1, k)
    weight, next_weight = a.weight.contiguous(), None if a.next_weight is None else a.next_weight.contiguous()
    eps, unit_offset, next_eps, scale = a.eps, a.unit_offset, a.next_eps, a.scale

    def launch() -> list[Tensor]:
        h, *normed_h = (output(torch.empty_like(x)) for _ in range(1 if next_weight is None else 2))
        following = None if next_weight is None else ((next_weight, next_eps, unit_offset), normed_h[0])
        kernel.launch_added(here, x, (weight, eps, unit_offset), residual, h, following, scale)
        return [h, *normed_h]

    with on(x):
        h, *normed_h = replayed(launch, (x, weight, residual, next_weight, scale), "add_normed", eps, unit_offset, next_eps)
    return h.view(a.x.shape), normed_h[0].view(a.x.shape) if normed_h else h.new_empty(0)


def _add_normed_fake(*args: *_AddNormed) -> tuple[Tensor, Tensor]:
    a = _AddNormed(*args)
    a.check()
    return a.x.new_empty(a.x.shape), a.x.new_empty(0 if a.next_weight is None else a.x.shape)


_library.impl("normed", lambda x, *norm: norm_in_torch(x, Norm(*norm)), "CPU")
_library.impl("normed", lambda x, *norm: norm_on_gpu(x, Norm(*norm)), "CUDA")
_library.impl("add_normed", _add_normed_in_torch, "CPU")
_library.impl("add_normed", _add_normed_on_gpu, "CUDA")
refuses_derivatives(_library, "normed")
refuses_derivatives(_library, "add_normed")
torch.library.register_fake("halfbyte::normed", lambda x, *_: x.new_empty(x.shape), lib=_library)
torch.library.register_fake("halfbyte::add_normed", _add_normed_fake, lib=_library)

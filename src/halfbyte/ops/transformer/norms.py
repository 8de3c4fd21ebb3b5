"""Norms between the products of a decoder layer: the custom ops `halfbyte::normed` and `halfbyte::add_normed`, a kernel each
on NVIDIA GPUs that starts while the previous one is still running, and the same formula in torch's operations elsewhere."""

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
from halfbyte.ops.transformer.decoder import Norm

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define("normed(Tensor x, Tensor norm, float eps, bool unit_offset, bool centred, Tensor? shift) -> Tensor")
_library.define(
    "add_normed(Tensor x, Tensor residual, Tensor norm, float eps, bool unit_offset, Tensor? then, float then_eps, Tensor? scale) "
    "-> (Tensor, Tensor)"
)


def normed(x: Tensor, norm: Norm) -> Tensor:
    """norm(x), an RMS norm or a layer norm over the last dimension: x [..., K] -> [..., K], computed in float32 and rounded once to x's
    dtype, which is that of the norm's weight and shift [K]. No gradients. Raises ArgumentError for shapes and dtypes that do not fit."""
    if plain(x):
        return norm_on_gpu(x, norm) if x.is_cuda else norm_in_torch(x, norm)
    y: Tensor = norm_in_torch(x, norm) if in_mode() or transformed() else OPS.normed.default(x, *norm)
    return y


def add_normed(
    x: Tensor, residual: Tensor, norm: Norm, then: Norm | None = None, scale: Tensor | None = None
) -> tuple[Tensor, Tensor | None]:
    """h = residual + norm(x), rounded to x's dtype, and then(h), if there is a norm `then`: RMS norms over the last dimension, of one kind
    (unit_offset). x, residual and results [..., K] of one dtype. scale: one number, by which h is multiplied before it is rounded. No
    gradients. Raises ArgumentError for shapes and dtypes that do not fit.
    """
    weight, eps, _ = rms_parts(then)
    run: Callable[..., tuple[Tensor, Tensor]] = _add_normed_cuda if x.is_cuda else _add_normed
    if not plain(x):
        run = _add_normed if in_mode() or transformed() else OPS.add_normed.default
    h, z = run(x, residual, *rms_parts(norm), weight, eps, scale)
    return h, None if then is None else z


def rms_parts(norm: Norm | None) -> tuple[Tensor | None, float, bool]:
    """The weight of an RMS norm, its eps and whether 1 + weight is multiplied by. Raises ArgumentError for a layer norm."""
    if norm is not None and norm.layer_norm:
        raise ArgumentError("a norm within another step is an RMS norm, got a layer norm: call `normed` before")
    return (None, 0.0, False) if norm is None else norm[:3]


def check_norm(x: Tensor, weight: Tensor) -> None:
    if x.dim() == 0 or weight.shape != x.shape[-1:] or weight.dtype != x.dtype:
        got = f"x {list(x.shape)} of {x.dtype}, norm {list(weight.shape)} of {weight.dtype}"
        raise ArgumentError(f"a norm takes x [..., K] and its weight [K] of one dtype, got {got}: convert them")


def norm_in_torch(x: Tensor, norm: Norm) -> Tensor:
    """In torch's operations."""
    _check(x, norm)
    return wide_norm(x.float(), norm).to(x.dtype)


def wide_norm(x: Tensor, norm: Norm) -> Tensor:
    """The norm of float32 x, not rounded."""
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
    weight, shift = norm.weight.contiguous(), None if norm.bias is None else norm.bias.contiguous()

    def steps() -> Tensor:
        out, rows, parts = output(torch.empty_like(z)), (-1, z.shape[-1]), (weight, norm.eps, norm.unit_offset)
        if norm.layer_norm:
            kernel.launch_layer_norm(here, z.view(rows), parts, shift, out.view(rows))
        else:
            kernel.launch(here, z.view(rows), parts, out.view(rows))
        return out

    with on(x):
        return replayed(steps, (z, weight, shift), "normed", *norm[1:4])


def _check(x: Tensor, norm: Norm) -> None:
    for part in (norm.weight, norm.bias):
        if part is not None:
            check_norm(x, part)


class _Sum(NamedTuple):
    """The arguments of the op `add_normed`."""

    x: Tensor
    residual: Tensor
    weight: Tensor
    eps: float
    unit_offset: bool
    then: Tensor | None
    then_eps: float
    scale: Tensor | None

    @property
    def norm(self) -> Norm:
        return Norm(self.weight, self.eps, self.unit_offset)

    def check(self) -> None:
        """Raises ArgumentError where shapes or dtypes do not fit."""
        x, residual, scale = self.x, self.residual, self.scale
        for norm in (self.weight, self.then):
            if norm is not None:
                check_norm(x, norm)
        if residual.shape != x.shape or residual.dtype != x.dtype:
            got = f"{residual.dtype} {list(residual.shape)}"
            raise ArgumentError(f"what is added to {x.dtype} {list(x.shape)} is of its shape and type, got {got}: convert it")
        if scale is not None and (scale.numel() != 1 or not scale.is_floating_point()):
            raise ArgumentError(f"a sum is multiplied by one number, got {scale.dtype} {list(scale.shape)}: pass a float of shape [1]")


def _add_normed(*args: *_Sum) -> tuple[Tensor, Tensor]:
    """In torch's operations."""
    of = _Sum(*args)
    of.check()
    wide = wide_norm(of.x.float(), of.norm) + of.residual.float()
    h = (wide if of.scale is None else wide * of.scale.float()).to(of.x.dtype)
    return h, h.new_empty(0) if of.then is None else norm_in_torch(h, Norm(of.then, of.then_eps, of.unit_offset))


def _add_normed_cuda(*args: *_Sum) -> tuple[Tensor, Tensor]:
    from halfbyte.machine import gpu
    from halfbyte.ops.cuda import on
    from halfbyte.ops.replay import replayed

    of = _Sum(*args)
    of.check()
    x, eps, unit_offset, then_eps, scale = of.x, of.eps, of.unit_offset, of.then_eps, of.scale
    here, k = gpu(x.get_device()), x.shape[-1]
    if not x.numel() or why_not_norm(k, here) is not None:
        return _add_normed(*args)
    from halfbyte.kernels.gpu.transformer import norm as kernel

    z, added = x.contiguous().view(-1, k), of.residual.contiguous().view(-1, k)
    weight, then = of.weight.contiguous(), None if of.then is None else of.then.contiguous()

    def steps() -> list[Tensor]:
        h, *second = (output(torch.empty_like(z)) for _ in range(1 if then is None else 2))
        following = None if then is None else ((then, then_eps, unit_offset), second[0])
        kernel.launch_added(here, z, (weight, eps, unit_offset), added, h, following, scale)
        return [h, *second]

    with on(x):
        h, *second = replayed(steps, (z, weight, added, then, scale), "add_normed", eps, unit_offset, then_eps)
    return h.view(x.shape), second[0].view(x.shape) if second else h.new_empty(0)


def _add_normed_fake(*args: *_Sum) -> tuple[Tensor, Tensor]:
    of = _Sum(*args)
    of.check()
    return of.x.new_empty(of.x.shape), of.x.new_empty(0 if of.then is None else of.x.shape)


_library.impl("normed", lambda x, *norm: norm_in_torch(x, Norm(*norm)), "CPU")
_library.impl("normed", lambda x, *norm: norm_on_gpu(x, Norm(*norm)), "CUDA")
_library.impl("add_normed", _add_normed, "CPU")
_library.impl("add_normed", _add_normed_cuda, "CUDA")
refuses_derivatives(_library, "normed")
refuses_derivatives(_library, "add_normed")
torch.library.register_fake("halfbyte::normed", lambda x, *_: x.new_empty(x.shape), lib=_library)
torch.library.register_fake("halfbyte::add_normed", _add_normed_fake, lib=_library)

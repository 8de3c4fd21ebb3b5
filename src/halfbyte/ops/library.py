"""The custom ops of linear layers and embeddings, `halfbyte::…`, as torch sees them: schemas, shapes of results, rules.

They take the packed bytes as one uint8 tensor with the format's name and the sizes, so that `torch.compile`, `torch.export` and autograd
see plain tensors. What they compute is in cpu.py and cuda.py; derivatives, autocast and vmap are in registration.py.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.errors import ArgumentError
from halfbyte.ops import cpu
from halfbyte.ops.modes import differentiated
from halfbyte.ops.registration import OPS, Gradients, VmapInfo, bounded, casts, differentiable, loops, transformation
from halfbyte.ops.tensors import geglu

_library = torch.library.Library("halfbyte", "DEF")
_library.define(
    "linear(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, str format, int n, int k, str compute, str activation, "
    "float? low, float? high) -> Tensor"
)
_library.define(
    "linear_gelu(Tensor x, Tensor weight, Tensor? bias, str format, int n, int k, str compute, str activation, str approximate) -> Tensor"
)
_library.define("linear_geglu(Tensor x, Tensor weight, Tensor? bias, str format, int n, int k, str compute, str activation) -> Tensor")
_library.define(
    "linear_codes(Tensor q, Tensor scale, Tensor weight, Tensor? bias, Tensor? residual, str format, int n, int k, ScalarType dtype, "
    "float? low, float? high) -> Tensor"
)
_library.define(
    "linear_low_rank(Tensor x, Tensor inner, Tensor outer, Tensor weight, Tensor? bias, str format, int n, int k, str compute, "
    "str activation) -> Tensor"
)
_library.define("qlinear(Tensor x, Tensor weight, Tensor table, str format, int n, int k, int low, int high) -> Tensor")
_library.define("embedding(Tensor ids, Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")
_library.define("dequantize(Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, format: str, n: int, k: int, *_: object
) -> Tensor:
    if x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"a weight of shape [{n}, {k}] takes activations [..., {k}], got {list(x.shape)}")
    return x.new_empty((*x.shape[:-1], n))


def _linear_product(x: Tensor, weight: Tensor, format: str, n: int, k: int, *_: object) -> Tensor:
    """x · Wᵀ"""
    return x @ OPS.dequantize.default(weight, format, n, k, x.dtype).T  # type: ignore[no-any-return]


def _linear_gradient(grad: Tensor, weight: Tensor, shape: torch.Size, format: str, n: int, k: int, *_: object) -> Tensor:
    """dX = dY · W"""
    return grad @ OPS.dequantize.default(weight, format, n, k, grad.dtype)  # type: ignore[no-any-return]


_gradients = Gradients(OPS.linear.default, _linear_product, _linear_gradient, lambda grad: grad.reshape(-1, grad.shape[-1]).sum(0), (-1,))
transformed_linear = transformation(_gradients)


def _linear_then_activation(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
    """Compute `linear`, then GELU or GEGLU by torch: on GPUs, and where the derivative needs the argument of GELU."""
    y: Tensor = OPS.linear.default(x, weight, bias, None, *settings[:5], None, None)
    return geglu(y) if name == "linear_geglu" else functional.gelu(y, approximate=str(settings[5]))


def _activated_under_autograd(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
    """Compute the op `name` under autograd."""
    if differentiated(x, bias, None):
        return _linear_then_activation(name, x, weight, bias, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(OPS, name).default(x, weight, bias, *settings)  # type: ignore[no-any-return]


def _linear_geglu_fake(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, *_: object) -> Tensor:
    return _linear_fake(x, weight, bias, None, format, n, k).new_empty((*x.shape[:-1], n // 2))


def _linear_vmap(
    info: VmapInfo,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *settings: object,
) -> tuple[Tensor, int]:
    """Compute all calls of a batch as the rows of one product."""

    def batch_first(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    if in_dims[1] is not None or in_dims[2] is not None:
        raise ArgumentError("vmap takes one weight and bias for all of its calls, got one for each: add the biases to the product")
    residuals = None if residual is None else batch_first(residual, in_dims[3])
    return OPS.linear.default(batch_first(x, in_dims[0]), weight, bias, residuals, *settings), 0


@functools.cache
def gpu_ops() -> ModuleType:
    """Import cuda.py when it is first needed: a program on a CPU never needs it."""
    from halfbyte.ops import cuda

    return cuda


def _implementation(device: str, name: str) -> Callable[..., Tensor]:
    """Return the function that computes an op on a device."""
    if device == "CPU":
        return getattr(cpu, name)  # type: ignore[no-any-return]

    def run(*arguments: object) -> Tensor:
        return getattr(gpu_ops(), name)(*arguments)  # type: ignore[no-any-return]

    return run


for _name in ("linear_gelu", "linear_geglu"):
    _library.impl(_name, getattr(cpu, _name), "CPU")
    _library.impl(_name, partial(_linear_then_activation, _name), "CUDA")
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, partial(_activated_under_autograd, _name), f"Autograd{_device}")
    casts(_library, _name, 0)
for _device in ("CPU", "CUDA"):
    _library.impl("linear", bounded(_implementation(_device, "linear")), _device)
    _library.impl("linear", partial(differentiable, _gradients, bounded(_implementation(_device, "linear"))), f"Autograd{_device}")
    _library.impl("qlinear", _implementation(_device, "qlinear"), _device)
    _library.impl("embedding", _implementation(_device, "embedding"), _device)
    _library.impl("dequantize", _implementation(_device, "dequantize"), _device)
_library.impl("linear_codes", bounded(_implementation("CUDA", "linear_codes")), "CUDA")
_library.impl("linear_low_rank", _implementation("CUDA", "linear_low_rank"), "CUDA")
casts(_library, "linear", 0, 3)
loops(_library, "linear_gelu", "linear_geglu", "qlinear", "embedding")
torch.library.register_fake("halfbyte::linear", _linear_fake, lib=_library)
torch.library.register_vmap("halfbyte::linear", _linear_vmap, lib=_library)
torch.library.register_fake(
    "halfbyte::linear_gelu", lambda x, weight, bias, *sizes: _linear_fake(x, weight, bias, None, *sizes[:-1]), lib=_library
)
torch.library.register_fake(
    "halfbyte::linear_codes",
    lambda q, scale, weight, bias, residual, format, n, k, dtype, *_: q.new_empty((*q.shape[:-1], n), dtype=dtype),
    lib=_library,
)
torch.library.register_fake(
    "halfbyte::linear_low_rank",
    lambda x, inner, outer, weight, bias, *sizes: _linear_fake(x, weight, bias, None, *sizes),
    lib=_library,
)
torch.library.register_fake("halfbyte::linear_geglu", _linear_geglu_fake, lib=_library)
torch.library.register_fake(
    "halfbyte::qlinear", lambda x, weight, table, format, n, k, low, high: x.new_empty((*x.shape[:-1], n)), lib=_library
)
torch.library.register_fake(
    "halfbyte::embedding", lambda ids, weight, format, n, k, dtype: ids.new_empty((*ids.shape, k), dtype=dtype), lib=_library
)
torch.library.register_fake("halfbyte::dequantize", lambda weight, format, n, k, dtype: weight.new_empty((n, k), dtype=dtype), lib=_library)

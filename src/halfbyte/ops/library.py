"""The custom ops `halfbyte::…` as torch sees them: their schemas, the shapes of their results, and gradients.

They take the packed bytes as one uint8 tensor with the format's name and the sizes, so that `torch.compile`,
`torch.export` and autograd see plain tensors.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from types import ModuleType
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.autograd import forward_ad
from torch.nn import functional
from torch.utils._python_dispatch import is_in_torch_dispatch_mode

from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.ops import cpu
from halfbyte.ops.ends import bounded, ends
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
_library.define("qlinear(Tensor x, Tensor weight, Tensor table, str format, int n, int k, int low, int high) -> Tensor")
_library.define("embedding(Tensor ids, Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")
_library.define("dequantize(Tensor weight, str format, int n, int k, ScalarType dtype) -> Tensor")
OPS = torch.ops.halfbyte


def differentiated(x: Tensor, bias: Tensor | None, residual: Tensor | None) -> bool:
    """Whether the result has a derivative, in reverse or in forward mode."""
    return (
        torch.is_grad_enabled()
        and (x.requires_grad or (bias is not None and bias.requires_grad) or (residual is not None and residual.requires_grad))
    ) or has_tangent(x, bias, residual)


def has_tangent(*tensors: Tensor | None) -> bool:
    """Whether one is a dual tensor of `torch.autograd.forward_ad`."""
    if forward_ad._current_level < 0:
        return False
    return any(tensor is not None and forward_ad.unpack_dual(tensor).tangent is not None for tensor in tensors)


def in_mode() -> bool:
    """Whether a mode of torch is on that acts in the dispatcher: autocast, or forward-mode differentiation."""
    return torch._C._is_any_autocast_enabled() or forward_ad._current_level >= 0


_KINDS = Tensor, nn.Parameter  # plain tensors: a DTensor has no memory of its own


def plain(x: Tensor, bias: Tensor | None = None, residual: Tensor | None = None) -> bool:
    """Whether the dispatcher, which takes longer than a small kernel, may be bypassed: no tracing, modes, autocast, forward-mode
    differentiation, functorch or subclasses, and no negative views (`z.conj().imag`), whose memory holds other numbers."""
    return (
        type(x) is Tensor
        and (x.is_cpu or x.is_cuda)
        and (bias is None or type(bias) in _KINDS)
        and (residual is None or type(residual) in _KINDS)
        and not torch.compiler.is_compiling()
        and not is_in_torch_dispatch_mode()
        and torch._C._get_tracing_state() is None  # of torch.jit.trace
        and torch._C._functorch.peek_interpreter_stack() is None
        and not in_mode()
        and not (x.is_neg() or (bias is not None and bias.is_neg()) or (residual is not None and residual.is_neg()))
    )


def _linear_fake(
    x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, format: str, n: int, k: int, *_: object
) -> Tensor:
    if x.dim() == 0 or x.shape[-1] != k:
        raise ArgumentError(f"a weight of shape [{n}, {k}] takes activations [..., {k}], got {list(x.shape)}")
    return x.new_empty((*x.shape[:-1], n))


class Gradients(NamedTuple):
    """An op and its gradients: op(x, weight, bias, residual, *settings) -> y = clamp(x · W + bias + residual), a linear layer or a
    convolution, whose settings end with the clamp's low and high, None where it has none (`ends.py`).

    product  (x, packed weight, *settings) -> x · W, in torch's operations with the dequantized weight, whatever the op's compute
    of_x     (dy, packed weight, shape of x, *settings) -> dx, with the same weight
    of_bias  dy -> its sum for each output
    outputs  the shape of a bias that is added to y
    """

    op: Callable[..., Tensor]
    product: Callable[..., Tensor]
    of_x: Callable[..., Tensor]
    of_bias: Callable[[Tensor], Tensor]
    outputs: tuple[int, ...]


class _Context(Protocol):
    """What torch keeps between the forward and the derivatives of `_Differentiable`."""

    gradients: Gradients
    shape: torch.Size
    bias_dtype: torch.dtype
    settings: tuple[object, ...]
    clamp: tuple[float, float]
    saved_tensors: tuple[Tensor, Tensor | None]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor | None) -> None: ...
    def save_for_forward(self, *tensors: Tensor | None) -> None: ...


_Inputs = tuple[Gradients, Tensor, Tensor, "Tensor | None", "Tensor | None", *tuple[object, ...], "float | None", "float | None"]


class _Differentiable(torch.autograd.Function):
    """The weight is frozen."""

    generate_vmap_rule = True

    @staticmethod
    def forward(gradients: Gradients, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: object) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return gradients.op(x, weight, bias, residual, *settings)

    @staticmethod
    def setup_context(ctx: _Context, inputs: _Inputs, output: Tensor) -> None:
        gradients, x, weight, bias, _, *settings, low, high = inputs
        ctx.gradients, ctx.shape, ctx.bias_dtype = gradients, x.shape, x.dtype if bias is None else bias.dtype
        ctx.settings, ctx.clamp = (*settings, low, high), ends(low, high)
        clamped = None if low is None and high is None else output
        ctx.save_for_backward(weight, clamped)
        ctx.save_for_forward(weight, clamped)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, output = ctx.saved_tensors
        grad = _unclamped(grad, output, *ctx.clamp)
        _, x_too, _, bias_too, residual_too = ctx.needs_input_grad[:5]
        grad_x = ctx.gradients.of_x(grad, weight, ctx.shape, *ctx.settings) if x_too else None
        grad_bias = ctx.gradients.of_bias(grad).to(ctx.bias_dtype) if bias_too else None
        return (None, grad_x, None, grad_bias, grad if residual_too else None, *[None] * len(ctx.settings))

    @staticmethod
    def jvp(ctx: _Context, _: None, x: Tensor, __: object, bias: Tensor | None, residual: Tensor | None, *settings: object) -> Tensor:
        """Takes tangents."""
        weight, output = ctx.saved_tensors
        y: Tensor = ctx.gradients.product(x, weight, *ctx.settings)
        if bias is not None:
            y = y + bias.to(y.dtype).view(ctx.gradients.outputs)
        return _unclamped(y if residual is None else y + residual, output, *ctx.clamp)


def _unclamped(derivative: Tensor, output: Tensor | None, low: float, high: float) -> Tensor:
    """A derivative, 0 where the output is clamped; `output`: None where it has no clamp."""
    return derivative if output is None else torch.where((output > low) & (output < high), derivative, 0)


def differentiable(
    gradients: Gradients,
    run: Callable[..., Tensor],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *settings: object,
) -> Tensor:
    """The op under autograd; `run` is the op on the device of x, `bounded`."""
    if differentiated(x, bias, residual):
        return _Differentiable.apply(gradients, x, weight, bias, residual, *settings)  # type: ignore[no-any-return,no-untyped-call]
    if plain(x, bias, residual):  # a second dispatch would take as long as a small kernel
        return run(x, weight, bias, residual, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        return gradients.op(x, weight, bias, residual, *settings)


def _linear_product(x: Tensor, weight: Tensor, format: str, n: int, k: int, *_: object) -> Tensor:
    """x · Wᵀ"""
    return x @ OPS.dequantize.default(weight, format, n, k, x.dtype).T  # type: ignore[no-any-return]


def _linear_gradient(grad: Tensor, weight: Tensor, shape: torch.Size, format: str, n: int, k: int, *_: object) -> Tensor:
    """dX = dY · W"""
    return grad @ OPS.dequantize.default(weight, format, n, k, grad.dtype)  # type: ignore[no-any-return]


def transformed() -> bool:
    """Whether a transform of torch.func (grad, vmap, …) is active, which needs the autograd.Function itself, not an op that wraps it."""
    return not torch.compiler.is_compiling() and torch._C._functorch.peek_interpreter_stack() is not None


def transformation(gradients: Gradients) -> Callable[..., Tensor]:
    """An op under torch.func."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: object) -> Tensor:
        return _Differentiable.apply(gradients, autocast(x), weight, bias, autocast(residual), *settings)  # type: ignore[no-any-return,no-untyped-call]

    return run


_Tensor = TypeVar("_Tensor", Tensor, Tensor | None)


def autocast(x: _Tensor) -> _Tensor:
    """x in the dtype of autocast where that is on for its device, as for torch's own products: floats, but not float64."""
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if device in ("cpu", "cuda") and torch.is_autocast_enabled(device) else x


class _VmapInfo(Protocol):
    """What torch.func tells a batching rule."""

    batch_size: int


def casts(library: torch.library.Library, name: str, *operands: int) -> None:
    """Registers the op as one whose `operands` autocast casts. Biases need not be: kernels add them in float32."""
    op = getattr(OPS, name).default
    for device in ("CPU", "CUDA"):
        above = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

        def run(*arguments: Any, above: torch._C.DispatchKeySet = above) -> Tensor:
            given = [autocast(argument) if i in operands else argument for i, argument in enumerate(arguments)]
            with torch._C._ExcludeDispatchKeyGuard(above):  # within which autocast counts as off
                return op(*given)  # type: ignore[no-any-return]

        library.impl(name, run, f"Autocast{device}")


def loops(library: torch.library.Library, *names: str) -> None:
    """Registers ops that vmap calls once for each of a batch."""
    for name in names:
        op = getattr(OPS, name).default

        def run(
            info: _VmapInfo, in_dims: tuple[int | None, ...], *arguments: Any, op: Callable[..., Any] = op
        ) -> tuple[Tensor | tuple[Tensor, ...], int | tuple[int, ...]]:
            given = list(zip(arguments, in_dims, strict=True))
            calls = [op(*(a.select(dim, i) if isinstance(dim, int) else a for a, dim in given)) for i in range(info.batch_size)]
            if isinstance(calls[0], Tensor):
                return torch.stack(calls), 0
            results = tuple(map(torch.stack, zip(*calls, strict=True)))
            return results, (0,) * len(results)

        torch.library.register_vmap(f"halfbyte::{name}", run, lib=library)


def refuses_derivatives(library: torch.library.Library, name: str) -> None:
    """Registers the op as one that raises UnsupportedError where its result would have a derivative."""
    op = getattr(OPS, name).default

    def run(*arguments: object) -> object:
        for tensor in arguments:
            if isinstance(tensor, Tensor) and differentiated(tensor, None, None):
                what = "a dual tensor" if has_tangent(tensor) else "a tensor that requires grad"
                raise UnsupportedError(f"halfbyte::{name} has no derivatives, got {what}: pass its detach(), or use the float model")
        with torch._C._AutoDispatchBelowAutograd():
            return op(*arguments)

    for device in ("CPU", "CUDA"):
        library.impl(name, run, f"Autograd{device}")


_gradients = Gradients(OPS.linear.default, _linear_product, _linear_gradient, lambda grad: grad.reshape(-1, grad.shape[-1]).sum(0), (-1,))
transformed_linear = transformation(_gradients)


def _linear_then(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
    """The product, then GELU or GEGLU by torch."""
    y: Tensor = OPS.linear.default(x, weight, bias, None, *settings[:5], None, None)
    return geglu(y) if name == "linear_geglu" else functional.gelu(y, approximate=str(settings[5]))


def _linear_with(name: str, x: Tensor, weight: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
    """Under autograd, which needs the argument of GELU."""
    if differentiated(x, bias, None):
        return _linear_then(name, x, weight, bias, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        return getattr(OPS, name).default(x, weight, bias, *settings)  # type: ignore[no-any-return]


def _linear_geglu_fake(x: Tensor, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, *_: object) -> Tensor:
    return _linear_fake(x, weight, bias, None, format, n, k).new_empty((*x.shape[:-1], n // 2))


def _linear_vmap(
    info: _VmapInfo,
    in_dims: tuple[int | None, ...],
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    *settings: object,
) -> tuple[Tensor, int]:
    """The rows of all calls in one product."""

    def first(tensor: Tensor, dim: int | None) -> Tensor:
        return tensor.expand(info.batch_size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)

    if in_dims[1] is not None or in_dims[2] is not None:
        raise ArgumentError("vmap takes one weight and bias for all of its calls, got one for each: add the biases to the product")
    rest = None if residual is None else first(residual, in_dims[3])
    return OPS.linear.default(first(x, in_dims[0]), weight, bias, rest, *settings), 0


@functools.cache
def gpu_ops() -> ModuleType:
    """`cuda.py`, imported when it is first needed: a program on a CPU never needs it."""
    from halfbyte.ops import cuda

    return cuda


def _home(device: str, name: str) -> Callable[..., Tensor]:
    """The function behind an op on a device."""
    if device == "CPU":
        return getattr(cpu, name)  # type: ignore[no-any-return]

    def run(*arguments: object) -> Tensor:
        return getattr(gpu_ops(), name)(*arguments)  # type: ignore[no-any-return]

    return run


for _name in ("linear_gelu", "linear_geglu"):
    _library.impl(_name, getattr(cpu, _name), "CPU")
    _library.impl(_name, partial(_linear_then, _name), "CUDA")
    for _device in ("CPU", "CUDA"):
        _library.impl(_name, partial(_linear_with, _name), f"Autograd{_device}")
    casts(_library, _name, 0)
for _device in ("CPU", "CUDA"):
    _library.impl("linear", bounded(_home(_device, "linear")), _device)
    _library.impl("linear", partial(differentiable, _gradients, bounded(_home(_device, "linear"))), f"Autograd{_device}")
    _library.impl("qlinear", _home(_device, "qlinear"), _device)
    _library.impl("embedding", _home(_device, "embedding"), _device)
    _library.impl("dequantize", _home(_device, "dequantize"), _device)
casts(_library, "linear", 0, 3)
loops(_library, "linear_gelu", "linear_geglu", "qlinear", "embedding")
torch.library.register_fake("halfbyte::linear", _linear_fake, lib=_library)
torch.library.register_vmap("halfbyte::linear", _linear_vmap, lib=_library)
torch.library.register_fake(
    "halfbyte::linear_gelu", lambda x, weight, bias, *sizes: _linear_fake(x, weight, bias, None, *sizes[:-1]), lib=_library
)
torch.library.register_fake("halfbyte::linear_geglu", _linear_geglu_fake, lib=_library)
torch.library.register_fake(
    "halfbyte::qlinear", lambda x, weight, table, format, n, k, low, high: x.new_empty((*x.shape[:-1], n)), lib=_library
)
torch.library.register_fake(
    "halfbyte::embedding", lambda ids, weight, format, n, k, dtype: ids.new_empty((*ids.shape, k), dtype=dtype), lib=_library
)
torch.library.register_fake("halfbyte::dequantize", lambda weight, format, n, k, dtype: weight.new_empty((n, k), dtype=dtype), lib=_library)

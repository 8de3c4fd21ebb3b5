"""Rules of torch for ops, which library.py and others register for the ops that they define: derivatives, autocast and vmap, and the ends
of clamps, of which an infinite one is None, since AOTInductor's packages cannot store infinite numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol, TypeVar

import torch
from torch import Tensor

from halfbyte.errors import UnsupportedError
from halfbyte.ops.modes import differentiated, has_tangent, plain

OPS = torch.ops.halfbyte
_INFINITE = float("inf")


def optional(low: float, high: float) -> tuple[float | None, float | None]:
    """The ends for an op."""
    return None if low == -_INFINITE else low, None if high == _INFINITE else high


def ends(low: float | None, high: float | None) -> tuple[float, float]:
    """The inverse of `optional`."""
    return -_INFINITE if low is None else low, _INFINITE if high is None else high


def bounded(run: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """`run`, whose last two arguments are the ends of a clamp, with those of an op."""

    def with_ends(*arguments: *tuple[*tuple[object, ...], float | None, float | None]) -> Tensor:
        *others, low, high = arguments
        return run(*others, *ends(low, high))

    return with_ends


class Gradients(NamedTuple):
    """An op and its gradients: op(x, weight, bias, residual, *settings) -> y = clamp(x · W + bias + residual).

    It is a linear layer or a convolution. Its settings end with the clamp's low and high, None where it has none.

    op       on any device
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
    """y = op(x, weight, bias, residual, *settings), differentiable by x, bias and residual; the weight is frozen."""

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
        _, needs_x, _, needs_bias, needs_residual = ctx.needs_input_grad[:5]
        grad_x = ctx.gradients.of_x(grad, weight, ctx.shape, *ctx.settings) if needs_x else None
        grad_bias = ctx.gradients.of_bias(grad).to(ctx.bias_dtype) if needs_bias else None
        return (None, grad_x, None, grad_bias, grad if needs_residual else None, *[None] * len(ctx.settings))

    @staticmethod
    def jvp(ctx: _Context, _: None, x: Tensor, __: object, bias: Tensor | None, residual: Tensor | None, *settings: object) -> Tensor:
        """Return the tangent of y; x, bias and residual are tangents."""
        weight, output = ctx.saved_tensors
        y: Tensor = ctx.gradients.product(x, weight, *ctx.settings)
        if bias is not None:
            y = y + bias.to(y.dtype).view(ctx.gradients.outputs)
        return _unclamped(y if residual is None else y + residual, output, *ctx.clamp)


def _unclamped(derivative: Tensor, output: Tensor | None, low: float, high: float) -> Tensor:
    """Return a derivative with 0 where the output is clamped; `output`: None where the op does not clamp."""
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
    """Compute the op under autograd; `run` computes it on the device of x, `bounded`."""
    if differentiated(x, bias, residual):
        return _Differentiable.apply(gradients, x, weight, bias, residual, *settings)  # type: ignore[no-any-return,no-untyped-call]
    if plain(x, bias, residual):  # a second dispatch would take as long as a small kernel
        return run(x, weight, bias, residual, *settings)
    with torch._C._AutoDispatchBelowAutograd():
        return gradients.op(x, weight, bias, residual, *settings)


def transformation(gradients: Gradients) -> Callable[..., Tensor]:
    """Return an op for use under transforms of torch.func, which need the autograd.Function itself."""

    def run(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: object) -> Tensor:
        return _Differentiable.apply(gradients, autocast(x), weight, bias, autocast(residual), *settings)  # type: ignore[no-any-return,no-untyped-call]

    return run


_Tensor = TypeVar("_Tensor", Tensor, Tensor | None)


def autocast(x: _Tensor) -> _Tensor:
    """Return x in the dtype of autocast where that is on for its device, as for torch's own products: floats, but not float64."""
    if x is None or not x.is_floating_point() or x.dtype == torch.float64:
        return x
    device = x.device.type
    return x.to(torch.get_autocast_dtype(device)) if device in ("cpu", "cuda") and torch.is_autocast_enabled(device) else x


class VmapInfo(Protocol):
    """What torch.func tells a batching rule."""

    batch_size: int


def casts(library: torch.library.Library, name: str, *operands: int) -> None:
    """Register the op as one whose `operands` autocast casts. Biases need not be: kernels add them in float32."""
    op = getattr(OPS, name).default
    for device in ("CPU", "CUDA"):
        above = torch._C.DispatchKeySet(getattr(torch._C.DispatchKey, f"Autocast{device}"))

        def run(*arguments: Any, above: torch._C.DispatchKeySet = above) -> Tensor:
            given = [autocast(argument) if i in operands else argument for i, argument in enumerate(arguments)]
            with torch._C._ExcludeDispatchKeyGuard(above):  # within which autocast counts as off
                return op(*given)  # type: ignore[no-any-return]

        library.impl(name, run, f"Autocast{device}")


def loops(library: torch.library.Library, *names: str) -> None:
    """Register ops that vmap calls once for each of a batch."""
    for name in names:
        op = getattr(OPS, name).default

        def run(
            info: VmapInfo, in_dims: tuple[int | None, ...], *arguments: Any, op: Callable[..., Any] = op
        ) -> tuple[Tensor | tuple[Tensor, ...], int | tuple[int, ...]]:
            given = list(zip(arguments, in_dims, strict=True))
            calls = [op(*(a.select(dim, i) if isinstance(dim, int) else a for a, dim in given)) for i in range(info.batch_size)]
            if isinstance(calls[0], Tensor):
                return torch.stack(calls), 0
            results = tuple(map(torch.stack, zip(*calls, strict=True)))
            return results, (0,) * len(results)

        torch.library.register_vmap(f"halfbyte::{name}", run, lib=library)


def refuses_derivatives(library: torch.library.Library, name: str) -> None:
    """Register the op as one that raises UnsupportedError where its result would have a derivative."""
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

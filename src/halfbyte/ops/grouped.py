"""Mixture of experts: `grouped_linear` on stacked weights, and the custom op `halfbyte::grouped_linear` below it."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple, Protocol

import torch
from torch import Tensor

from halfbyte.errors import ArgumentError, check_type
from halfbyte.formats.spec import as_format
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.problem import Problem
from halfbyte.layouts.base import Packed
from halfbyte.ops.checks import check_activation, check_bytes, check_floats, check_operands, device_name, packed_bytes
from halfbyte.ops.modes import differentiated, plain, transformed
from halfbyte.ops.registration import OPS, autocast, casts, loops
from halfbyte.ops.tensors import aligned

if TYPE_CHECKING:
    from halfbyte.kernels.cpu.linear.linear import LinearKernel


def grouped_linear(
    x: Tensor,
    packed: Packed,
    expert_ids: Tensor,
    bias: Tensor | None = None,
    *,
    compute: str = "auto",
    activation: str = "block",
) -> Tensor:
    """Multiply each row of x with the quantized weight of its expert, and add that expert's bias.

        expert_ids [M]      x [M, K]                       y[m]    = x[m] · W[id[m]]ᵀ            -> [M, N]
        expert_ids [M, T]   x [M, K], shared by all T      y[m, t] = x[m] · W[id[m, t]]ᵀ         -> [M, T, N]
                            or [M, T, K]                   y[m, t] = x[m, t] · W[id[m, t]]ᵀ

    The routing weights of a layer are applied afterwards: `(y * weights.unsqueeze(-1)).sum(1)`. Gradients flow to x and the bias; the
    weights are frozen.

    Args:
        x: [M, K], or [M, T, K] where each of T experts has its own input; float32, bfloat16 or float16.
        packed: Weights of shape [E, N, K]: `pack` of codes of that shape.
        expert_ids: int64 or int32, each in 0 … E - 1. Another id is an error on the CPU. On a GPU its rows are NaN: checking ids would
            synchronize with the device.
        bias: [E, N] or None.
        compute: As in `linear`. On GPUs "int8" quantizes activations where there is a kernel for it: on Hopper, 4 bits with one scale a
            channel or blocks of 128 and more, some 48 rows an expert and more; elsewhere products are in floating point (`halfbyte explain
            --experts` says which).
        activation: See `compute`.

    Returns:
        [M, N] or [M, T, N] in x's dtype.

    Raises:
        ArgumentError: Shapes, dtypes or settings do not fit.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(4, 8, 32), "q8_0"))
        >>> hb.grouped_linear(torch.randn(3, 32), packed, torch.tensor([[0, 1], [3, 1], [2, 0]])).shape
        torch.Size([3, 2, 8])
    """
    try:
        if len(packed.shape) != 3:
            raise ArgumentError(f"grouped_linear takes stacked weights [E, N, K], got one of shape {list(packed.shape)}: use linear")
        settings = (packed.name, *packed.shape, compute, activation)
        if transformed():
            return _GroupedLinear.apply(autocast(x), packed.data, expert_ids, bias, *settings)  # type: ignore[no-any-return,no-untyped-call]
        if plain(x, bias) and not differentiated(x, bias, None):
            return _grouped(x, packed.data, expert_ids, bias, *settings)
        return OPS.grouped_linear.default(x, packed.data, expert_ids, bias, *settings)  # type: ignore[no-any-return]
    except Exception:
        check_operands(x, packed, Packed, bias)
        check_type(expert_ids, Tensor, "the experts of each row are a tensor", "pass torch.as_tensor(expert_ids), after the packed weights")
        raise


_Sizes = tuple[str, int, int, int, str, str]  # `_Settings`, in its order


class _Settings(NamedTuple):
    """The arguments of the op besides tensors: a weight of `experts` matrices [n, k]."""

    format: str
    experts: int
    n: int
    k: int
    compute: str
    activation: str

    def problem(self, rows: int, dtype: torch.dtype) -> Problem:
        """Return the problem of `rows` rows of activations, as `dispatch` is asked for it."""
        kinds = self.compute, self.activation
        return Problem("grouped_linear", rows, self.n, self.k, as_format(self.format), dtype, *kinds, experts=self.experts)  # type: ignore[arg-type]


def _shape(x: Tensor, ids: Tensor, s: _Settings) -> tuple[int, ...]:
    """Return the shape of the result. Raise ArgumentError where those of x and ids do not fit."""
    shared = x.shape == (*ids.shape[:1], s.k)
    if ids.dim() not in (1, 2) or not (shared or x.shape == (*ids.shape, s.k)):
        wanted = f"x [M, {s.k}] with ids [M] or [M, T], or x [M, T, {s.k}] with ids [M, T]"
        got = f"x {list(x.shape)} and ids {list(ids.shape)}"
        raise ArgumentError(f"{s.experts} experts of shape [{s.n}, {s.k}] take {wanted}, got {got}: flatten the tokens")
    return (*ids.shape, s.n)


def _check(x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, s: _Settings) -> None:
    """Check everything but the shapes of x and ids, the compute, and the ids themselves."""
    check_floats(x, "grouped_linear takes activations")
    check_activation(s.activation)
    if ids.dtype not in (torch.int64, torch.int32) or ids.device != x.device:
        raise ArgumentError(f"expert ids are int64 or int32 on {device_name(x.device.type)}, like x, got {ids.dtype} on {ids.device}")
    nbytes = s.experts * packed_bytes(s.format, s.n, s.k, x.device.type)
    check_bytes(weight, nbytes, x.device, f"{s.format} of shape [{s.experts}, {s.n}, {s.k}]")
    if bias is not None and (bias.shape != (s.experts, s.n) or not bias.is_floating_point() or bias.device != x.device):
        got = f"{bias.dtype} {list(bias.shape)} on {bias.device}"
        wanted = f"floating point [{s.experts}, {s.n}] on {device_name(x.device.type)}"
        raise ArgumentError(f"the bias of {s.experts} experts is {wanted}, got {got}")


def _grouped(x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, *settings: *_Sizes) -> Tensor:
    """Compute the op on the device of x."""
    s = _Settings(*settings)
    shape = _shape(x, ids, s)
    _check(x, weight, ids, bias, s)
    multiply = _on_cpu(x, ids, s) if x.is_cpu else _on_gpu(x, ids, s)
    if 0 in (x.numel(), s.n, ids.numel(), s.experts):
        return _empty_product(x, ids, bias, shape, s.experts)
    return multiply(x.reshape(-1, s.k), weight, bias).view(shape)


# (x [M, K] or [M * T, K], packed bytes, bias of all experts) -> [number of ids, N]
_Multiply = Callable[[Tensor, Tensor, "Tensor | None"], Tensor]


def _empty_product(x: Tensor, ids: Tensor, bias: Tensor | None, shape: tuple[int, ...], experts: int) -> Tensor:
    """Return the result where K or another size is 0: the bias."""
    y = x.new_zeros(shape)
    if bias is not None and y.numel() and experts:
        y += bias[ids.long().clamp(0, experts - 1)]
    return torch.where(((ids >= 0) & (ids < experts)).unsqueeze(-1), y, torch.nan)


def _on_cpu(x: Tensor, ids: Tensor, s: _Settings) -> _Multiply:
    """Return the product on a CPU. Raise ArgumentError for an id that is out of range and an unknown compute."""
    kernel = _cpu_kernel(s, x.dtype)
    _check_ids(ids, s)
    id_list = ids.flatten().tolist()

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        from halfbyte.kernels.cpu.linear import grouped

        biases = None if bias is None else bias.to(torch.float32).contiguous()
        return grouped.run(kernel, x.contiguous(), id_list, aligned(weight), biases)

    return multiply


def check_stack(x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, *settings: *_Sizes) -> None:
    """Raise ArgumentError where operands of the op on a CPU do not fit, but for the shapes of x and ids, or ids are out of range."""
    s = _Settings(*settings)
    _check(x, weight, ids, bias, s)
    _check_ids(ids, s)


def _check_ids(ids: Tensor, s: _Settings) -> None:
    if ids.numel():
        lowest, highest = (int(i) for i in ids.aminmax())
        if lowest < 0 or highest >= s.experts:
            raise ArgumentError(f"expert ids lie in 0 … {s.experts - 1}, got {lowest} … {highest}")


@functools.lru_cache(maxsize=1024)  # to import at each call takes longer
def _cpu_kernel(s: _Settings, dtype: torch.dtype) -> LinearKernel:
    from halfbyte.dispatch.choose import cpu_kernel

    return cpu_kernel(s.problem(1, dtype))


def _on_gpu(x: Tensor, ids: Tensor, s: _Settings) -> _Multiply:
    """Return the product on a GPU, whose launches are recorded at the first call and replayed at others."""
    from halfbyte.dispatch.choose import choose
    from halfbyte.dispatch.gpu import compute_of
    from halfbyte.machine import gpu
    from halfbyte.ops import cuda
    from halfbyte.ops.replay import replayed

    chosen = s._replace(compute=compute_of(s.compute))

    def multiply(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        if bias is not None:
            bias = aligned(bias.float() if bias.dtype == torch.float64 else bias)
        operands = (aligned(x), aligned(weight), aligned(ids.flatten()))

        def launch() -> Tensor:
            out, here = output(x.new_empty(ids.numel(), s.n)), gpu(x.get_device())
            cuda.run_first(choose(chosen.problem(ids.numel(), x.dtype), here), here, (*operands, out, bias))
            return out

        with cuda.on(x):
            return replayed(launch, (*operands, bias), "grouped_linear", *s)

    return multiply


class _Context(Protocol):
    """What torch keeps between the forward and the derivatives of `_GroupedLinear`."""

    settings: _Settings
    shared: bool
    bias_dtype: torch.dtype
    saved_tensors: tuple[Tensor, Tensor]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...
    def save_for_forward(self, *tensors: Tensor) -> None: ...


class _GroupedLinear(torch.autograd.Function):
    """dX[p] = dY[p] · W[id[p]] and dB[e] = sum of dY[p] with id[p] = e, with the dequantized W, whatever the compute of the forward; the
    weights are frozen."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
        with torch._C._AutoDispatchBelowAutograd():
            return OPS.grouped_linear.default(x, weight, ids, bias, *settings)  # type: ignore[no-any-return]

    @staticmethod
    def setup_context(ctx: _Context, inputs: tuple[Tensor, Tensor, Tensor, Tensor | None, *_Sizes], output: Tensor) -> None:
        x, weight, ids, bias = inputs[:4]
        ctx.settings, ctx.shared = _Settings(*inputs[4:]), x.dim() < ids.dim() + 1
        ctx.bias_dtype = x.dtype if bias is None else bias.dtype
        ctx.save_for_backward(weight, ids)
        ctx.save_for_forward(weight, ids)

    @staticmethod
    def backward(ctx: _Context, grad: Tensor) -> tuple[Tensor | None, ...]:
        weight, ids = ctx.saved_tensors
        s, (needs_x, _, _, needs_bias) = ctx.settings, ctx.needs_input_grad[:4]
        grad_x = grad_bias = None
        rows = grad.reshape(-1, s.n)
        if needs_x:
            grad_x = _by_expert(rows, ids, s.experts, s.k, lambda e: _matrix(weight, e, s, grad.dtype)).view(*ids.shape, s.k)
            grad_x = grad_x.sum(1) if ctx.shared else grad_x
        if needs_bias:
            one_hot = (ids.reshape(-1) == torch.arange(s.experts, device=ids.device).unsqueeze(1)).to(rows.dtype)
            grad_bias = (one_hot @ rows).to(ctx.bias_dtype)
        return (grad_x, None, None, grad_bias, *[None] * len(s))

    @staticmethod
    def jvp(ctx: _Context, x: Tensor, _: object, __: object, bias: Tensor | None, *settings: object) -> Tensor:
        """Return the tangent of y; x and bias are tangents."""
        weight, ids = ctx.saved_tensors
        s = ctx.settings
        rows = (x.unsqueeze(1).expand(*ids.shape, s.k) if ctx.shared else x).reshape(-1, s.k)
        y = _by_expert(rows, ids, s.experts, s.n, lambda e: _matrix(weight, e, s, x.dtype).T).view(*ids.shape, s.n)
        return y if bias is None else y + bias[ids.long().clamp(0, s.experts - 1)].to(y.dtype)


def _matrix(weight: Tensor, expert: int, s: _Settings, dtype: torch.dtype) -> Tensor:
    """Return the dequantized weight [N, K] of one expert."""
    return OPS.dequantize.default(weight.view(s.experts, -1)[expert], s.format, s.n, s.k, dtype)  # type: ignore[no-any-return]


def _by_expert(rows: Tensor, ids: Tensor, experts: int, width: int, matrix_of: Callable[[int], Tensor]) -> Tensor:
    """Multiply rows [P, a], each by the matrix [a, width] of its expert -> [P, width]; 0 where an id is out of range."""
    flat_ids = ids.reshape(-1)
    present = sorted(set(flat_ids.tolist()) & set(range(experts)))
    places = [(flat_ids == expert).nonzero().flatten() for expert in present]
    out_of_range = ((flat_ids < 0) | (flat_ids >= experts)).nonzero().flatten()
    products = [rows[at] @ matrix_of(expert) for expert, at in zip(present, places, strict=True)]
    by_place = torch.cat([*places, out_of_range]).argsort()
    return torch.cat([*products, rows.new_zeros(len(out_of_range), width)])[by_place]


def _autograd(x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, *settings: object) -> Tensor:
    if differentiated(x, bias, None):
        return _GroupedLinear.apply(x, weight, ids, bias, *settings)  # type: ignore[no-any-return,no-untyped-call]
    with torch._C._AutoDispatchBelowAutograd():
        return OPS.grouped_linear.default(x, weight, ids, bias, *settings)  # type: ignore[no-any-return]


def _fake(x: Tensor, weight: Tensor, ids: Tensor, bias: Tensor | None, *settings: *_Sizes) -> Tensor:
    return x.new_empty(_shape(x, ids, _Settings(*settings)))


_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "grouped_linear(Tensor x, Tensor weight, Tensor expert_ids, Tensor? bias, str format, int experts, int n, int k, str compute, "
    "str activation) -> Tensor"
)
for _device in ("CPU", "CUDA"):
    _library.impl("grouped_linear", _grouped, _device)
    _library.impl("grouped_linear", _autograd, f"Autograd{_device}")
casts(_library, "grouped_linear", 0)
loops(_library, "grouped_linear")
torch.library.register_fake("halfbyte::grouped_linear", _fake, lib=_library)

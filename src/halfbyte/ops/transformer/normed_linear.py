"""A linear layer with the norm before it and the gate after it: the custom op `halfbyte::normed_linear`, and gates by themselves.

    y = factor * f(gate) * up,   gate, up = halves of linear(norm(x))

Decode steps (decoder/gpu_layer.py) call it: a token takes a chain of short kernels, so on an NVIDIA GPU these are one to three kernels,
where `dispatch` finds some that support it, and each starts while the previous one is still running. Elsewhere torch computes the formula.
Prefills call `activated` after a product of their own.
"""

from __future__ import annotations

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.layers import why_not_norm
from halfbyte.errors import ArgumentError
from halfbyte.formats.spec import as_format
from halfbyte.kernels.gpu.runtime.launch import output
from halfbyte.kernels.layer_kinds import GATES, GateFunction, gate_in_torch
from halfbyte.kernels.problem import Epilogue, NormedProblem, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.machine import gpu
from halfbyte.ops.checks import check_bias, check_linear
from halfbyte.ops.cuda import on
from halfbyte.ops.registration import OPS
from halfbyte.ops.replay import replayed
from halfbyte.ops.tensors import aligned
from halfbyte.ops.transformer.norms import check_norm, norm_in_torch, norm_on_gpu, normed, rms_parts
from halfbyte.ops.transformer.sublayers import Norm

_library = torch.library.Library("halfbyte", "FRAGMENT")
_library.define(
    "normed_linear(Tensor x, Tensor? norm, float eps, bool unit_offset, Tensor weight, Tensor? bias, str format, int n, int k, str gates, "
    "bool gated, float factor) -> Tensor"
)


def normed_linear(
    x: Tensor,
    norm: Norm | None,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    gates: GateFunction | Literal[""] = "",
    gated: bool = True,
    factor: float = 1.0,
) -> Tensor:
    """Compute y = norm(x) · dequantize(packed)ᵀ + bias, and its gates. No gradients.

    Args:
        x: [..., K].
        norm: An RMS norm, a part of the op, or a layer norm, which is computed before; its weight is [K] of x's dtype. None: x as it is.
        packed: Weight [N, K], packed for x's device.
        bias: [N].
        gates: f, by its name in `layer_kinds.py`; "": the result is y.
        gated: Whether the first half of the outputs of y are gates of the second half; otherwise all of y goes through f.
        factor: Of the output of gates.

    Returns:
        In x's dtype: factor * f(y[..., : N / 2]) * y[..., N / 2 :], [..., N / 2]; not `gated`: factor * f(y), [..., N]; without gates: y,
        [..., N].

    Raises:
        ArgumentError: Shapes, dtypes or settings do not fit.
    """
    n, k = packed.shape
    if norm is not None and norm.layer_norm:
        x, norm = normed(x, norm), None
    weight, eps, unit_offset = rms_parts(norm)
    settings = packed.name, n, k, gates, gated, factor
    return OPS.normed_linear.default(x, weight, eps, unit_offset, packed.data, bias, *settings)  # type: ignore[no-any-return]


class _Arguments(NamedTuple):
    """The arguments of the op `normed_linear`, as its schema names them."""

    x: Tensor
    norm: Tensor | None
    eps: float
    unit_offset: bool
    weight: Tensor
    bias: Tensor | None
    format: str
    n: int
    k: int
    gates: GateFunction | Literal[""]
    gated: bool
    factor: float

    @property
    def rms_norm(self) -> Norm | None:
        return None if self.norm is None else Norm(self.norm, self.eps, self.unit_offset)

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of the result."""
        return *self.x.shape[:-1], self.n // 2 if self.gates and self.gated else self.n

    def check(self) -> None:
        """Raise ArgumentError where shapes, dtypes or settings do not fit."""
        x, n, k = self.x, self.n, self.k
        if self.norm is not None:
            check_norm(x, self.norm)
        if x.dim() == 0 or x.shape[-1] != k:
            raise ArgumentError(f"a weight [{n}, {k}] takes x [..., {k}], got {list(x.shape)}: the last dimensions must agree")
        if self.gates not in ("", *GATES):
            raise ArgumentError(f"gates are one of {', '.join(GATES)}, got {self.gates!r}")
        if self.gates and self.gated and n % 2:
            raise ArgumentError(f"half of {n} outputs cannot be gates of the others: their number is even")
        if not self.gates and self.factor != 1:
            raise ArgumentError(
                f"a factor multiplies the output of gates, got factor={self.factor} without: pass gates, or multiply the result"
            )

    def product(self, x: Tensor) -> Tensor:
        """x [..., K] times the weight, with the bias."""
        settings = self.format, self.n, self.k, "float", "block", None, None
        return OPS.linear.default(x, self.weight, self.bias, None, *settings)  # type: ignore[no-any-return]


def _in_torch(*args: *_Arguments) -> Tensor:
    """Compute the op with torch's operations around the product: the norm in float32, rounded once."""
    a = _Arguments(*args)
    a.check()
    y = a.product(a.x if a.rms_norm is None else norm_in_torch(a.x, a.rms_norm))
    return activated_in_torch(y, a.gates, a.factor, gated=a.gated) if a.gates else y


def _on_gpu(*args: *_Arguments) -> Tensor:
    """Compute the op by kernels: norm and gates are parts of the product's where it takes them, and otherwise kernels of their own."""
    a = _Arguments(*args)
    a.check()
    x, n, k, norm = a.x, a.n, a.k, a.rms_norm
    if norm is None and not a.gates:
        return a.product(x)
    rows = x.numel() // k if k else 0
    here = gpu(x.get_device())
    geo = gpu_tiles.geometry_of(as_format(a.format), n, k, a.weight.numel())
    problem = Problem("linear", rows, n, k, geo.format, x.dtype, sparse=geo.sparse, paired=geo.paired)
    choice = choose(NormedProblem(problem, norm is not None, bool(a.gates) and a.gated, a.bias is not None), here)
    if choice.taken is None:
        return _in_torch(*args)
    candidate, config = choice.taken.candidate, choice.taken.config
    check_linear(x, a.weight, a.format, n, k, "block", -float("inf"), float("inf"))
    if a.bias is not None:
        check_bias(a.bias, n, x.device)
    fused_gates = a.gates if a.gated and candidate.home else ""
    fused_norm = None if norm is None or not candidate.takes_norm(choice.problem, config) else (norm.weight.contiguous(), *norm[1:3])
    with on(x):
        z = x.contiguous() if norm is None or fused_norm is not None else norm_on_gpu(x, norm)
        z = z.view(rows, k)
        if candidate.home:
            weight, bias = aligned(a.weight), None if a.bias is None else a.bias.contiguous()

            def multiply() -> Tensor:
                out = output(x.new_empty(rows, a.shape[-1] if fused_gates else n))
                views, epilogue = gpu_tiles.views(weight, geo), Epilogue(bias, gates=fused_gates, factor=a.factor)
                candidate.launch(choice.problem, config, z, views, out, epilogue, *([] if fused_norm is None else [fused_norm]))
                return out

            operands = z, weight, bias, fused_norm and fused_norm[0]
            settings = choice.problem, config, fused_gates, a.factor, fused_norm and fused_norm[1:]
            y = replayed(multiply, operands, "normed_linear", *settings)
        else:
            y = a.product(z)
        if a.gates and not fused_gates:
            y = activated_on_gpu(y, a.gates, a.factor, gated=a.gated)
    return y.view(a.shape)


def _fake(*args: *_Arguments) -> Tensor:
    a = _Arguments(*args)
    a.check()
    return a.x.new_empty(a.shape)


_library.impl("normed_linear", _in_torch, "CPU")
_library.impl("normed_linear", _on_gpu, "CUDA")
torch.library.register_fake("halfbyte::normed_linear", _fake, lib=_library)


# Gates


def activated(y: Tensor, gates: GateFunction, factor: float = 1.0, *, gated: bool = True, multiplier: Tensor | None = None) -> Tensor:
    """Compute factor * f(y[..., : N / 2]) * y[..., N / 2 :], [..., N / 2]; not `gated`: factor * f(y) * multiplier, [..., N].

    Args:
        y: [..., N].
        gates: f, by its name in `layer_kinds.py`.
        factor, gated: As above.
        multiplier: Where y is not gated, of y's shape and dtype; None: 1.

    Raises:
        ArgumentError: `multiplier` does not fit, or gated y has no two halves.
    """
    if gated and y.shape[-1] % 2:
        raise ArgumentError(f"gated y has two halves, gates and what they multiply, got {list(y.shape)}: its last dimension must be even")
    if multiplier is not None and (gated or multiplier.shape != y.shape or multiplier.dtype != y.dtype):
        got = f"{multiplier.dtype} {list(multiplier.shape)}{' for gated y' if gated else ''}"
        raise ArgumentError(f"`multiplier` must have y's shape and dtype, {y.dtype} {list(y.shape)}, where y is not gated; got {got}")
    here = gpu(y.get_device()) if y.is_cuda and y.numel() and y.is_contiguous() else None
    if here is None or why_not_norm(1, here) is not None:
        return activated_in_torch(y, gates, factor, gated=gated, multiplier=multiplier)
    with on(y):
        return activated_on_gpu(y, gates, factor, gated=gated, multiplier=multiplier)


def activated_on_gpu(y: Tensor, gates: GateFunction, factor: float, *, gated: bool, multiplier: Tensor | None = None) -> Tensor:
    """Compute `activated` by a kernel, for contiguous y on the current device."""
    from halfbyte.kernels.gpu.transformer import gates as kernel

    multiplier_rows = None if multiplier is None else multiplier.reshape(-1, multiplier.shape[-1])
    if multiplier_rows is not None and multiplier_rows.stride(1) != 1:
        multiplier_rows = multiplier_rows.contiguous()

    def launch() -> Tensor:
        out = output(y.new_empty((*y.shape[:-1], y.shape[-1] // 2 if gated else y.shape[-1])))
        rows = y.view(-1, y.shape[-1]), out.view(-1, out.shape[-1])
        kernel.launch(gpu(y.get_device()), *rows, gates, factor, gated=gated, multiplier=multiplier_rows)
        return out

    return replayed(launch, (y, multiplier_rows), "gates", gates, factor, gated)


def activated_in_torch(y: Tensor, gates: GateFunction, factor: float, *, gated: bool, multiplier: Tensor | None = None) -> Tensor:
    """Apply the gate function in float32, rounded once; `multiplier` is the other factor where `y` has no up projection."""
    gate, up = y.float().chunk(2, -1) if gated else (y.float(), None if multiplier is None else multiplier.float())
    active = gate_in_torch(gate, gates)
    return (active * factor if up is None else active * up * factor).to(y.dtype)

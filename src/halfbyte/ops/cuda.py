"""The custom ops on GPUs: no call synchronizes with the device, so all of them may be captured in a CUDA graph.

Calls of linear layers are cached by shapes, dtypes and settings, whatever the weight: the kernel, its config, and its launches, which
are replayed with other addresses.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from functools import partial
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from halfbyte import env
from halfbyte.dispatch.gpu import choose_gpu_linear, compute_of, report_failure, triton_trouble
from halfbyte.dispatch.measure import tune_linear
from halfbyte.errors import KernelError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.gpu import plain
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.machine import gpu
from halfbyte.ops.checks import check_bias, check_ids, check_linear, check_out_dtype, check_packed, check_qlinear, check_residual

_INFINITE = float("inf")
_KEPT_PLANS = 4096  # cached per kind of layer, and calls of all weights
_KEPT_CALLS = 64  # cached per weight

_kernels: dict[tuple[Any, ...], _Linear] = {}


# A repeated call: replays the launches; returns None if the layout of the operands differs.
_Again = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor | None]


def _again(replay: Callable[..., None], shape: tuple[int, ...], stride: tuple[int, ...], device: int) -> _Again:
    """`replay` for tensors on `device`, usually the current one; the result is a new tensor of `shape` and `stride`."""

    def again(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None) -> Tensor | None:
        px, pw, pb, pr = x.data_ptr(), weight.data_ptr(), 0, 0
        fits = x.is_contiguous() and weight.get_device() == device  # tensors can be changed in place
        if bias is not None:
            pb = bias.data_ptr()
            fits = fits and bias.get_device() == device and bias.is_contiguous()
        if residual is not None:
            pr = residual.data_ptr()
            fits = fits and residual.get_device() == device and residual.is_contiguous()
        if not fits or (px | pw | pb | pr) & 15 or torch._C._cuda_getDevice() != device:
            return None
        out = _empty(shape, stride, x.dtype)
        replay(px, pw, out.data_ptr(), pb, pr)
        return out

    return again


_calls: dict[tuple[Any, ...], _Again] = {}  # for all weights; calls of one weight are cached in it


def linear_again(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    residual: Tensor | None,
    compute: str,
    activation: str,
    low: float,
    high: float,
) -> Tensor:
    """`linear` with a weight that has been validated."""
    key = _call_key(x, bias, residual, (compute, activation, low, high))
    again = packed.calls.get(key)
    if again is not None and (y := again(x, packed.data, bias, residual)) is not None:
        return y  # type: ignore[no-any-return]
    settings, weight = (packed.name, *packed.shape, compute, activation, low, high), packed.data
    y = linear(x, weight, bias, residual, *settings)
    found = _calls.get((weight.shape, weight.dtype, weight.get_device(), _call_key(x, bias, residual, settings)))
    if again is None and found is not None and weight.is_contiguous():
        if len(packed.calls) >= _KEPT_CALLS:
            packed.calls.clear()
        packed.calls[key] = found
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: Any) -> Tensor:
    """The op. settings: format, n, k, compute, activation, low, high."""
    key = (weight.shape, weight.dtype, weight.get_device(), _call_key(x, bias, residual, settings))
    again = _calls.get(key)
    if again is not None and weight.is_contiguous() and (y := again(x, weight, bias, residual)) is not None:
        return y
    y = _first(x, weight, bias, residual, *settings)
    if again is None:
        format, n, k, compute, activation, low, high = settings
        kernel = _kernels.get((format, n, k, x.dtype, compute, activation, x.get_device()))
        replay = None if kernel is None else kernel.plans.get(_key(x, k, bias, residual, low, high))
        if replay is not None:
            if len(_calls) >= _KEPT_PLANS:
                _calls.clear()
            _calls[key] = _again(replay, tuple(y.shape), y.stride(), x.get_device())
    return y


def _call_key(x: Tensor, bias: Tensor | None, residual: Tensor | None, settings: tuple[Any, ...]) -> tuple[Any, ...]:
    """Equal for calls that differ only in addresses."""
    return (
        x.shape,
        x.dtype,
        x.get_device(),
        settings,
        None if bias is None else (bias.dtype, bias.shape),
        None if residual is None else (residual.dtype, residual.shape),
    )


def _key(x: Tensor, k: int, bias: Tensor | None, residual: Tensor | None, low: float, high: float) -> tuple[Any, ...]:
    """The same for calls of one kernel, where the shape of x may vary."""
    return x.numel() // max(1, k), low, high, None if bias is None else bias.dtype, residual is None


def _first(
    x: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    n: int,
    k: int,
    compute: str,
    activation: str,
    low: float,
    high: float,
) -> Tensor:
    """The first call of its kind, or one with an unusual layout of operands."""
    device = x.get_device()
    kernel = _kernels.get((format, n, k, x.dtype, compute, activation, device))
    if kernel is None:
        check_linear(x, weight, format, n, k, activation, low, high)
        kernel = _kernels[format, n, k, x.dtype, compute, activation, device] = _Linear(format, n, k, x, compute, activation)
    shape = x.shape
    fits = weight.shape == (kernel.nbytes,) and weight.dtype == torch.uint8 and weight.get_device() == device
    if not shape or shape[-1] != k or not fits or not low <= high:
        check_linear(x, weight, format, n, k, activation, low, high)
    if bias is not None and (bias.shape != (n,) or not bias.is_floating_point() or bias.get_device() != device):
        check_bias(bias, n, x.device)
    if residual is not None and (residual.shape != (*shape[:-1], n) or residual.dtype != x.dtype or residual.get_device() != device):
        check_residual(residual, x, (*shape[:-1], n))
    if x.numel() == 0 or n == 0:
        y = x.new_zeros((*shape[:-1], n))  # K = 0: a sum of nothing
        for addend in (bias, residual):
            if addend is not None:
                y = y + addend
        return y.clamp(low, high).to(x.dtype)
    if device != torch._C._cuda_getDevice():
        with on(x):
            return kernel(x, weight, bias, residual, low, high)
    return kernel(x, weight, bias, residual, low, high)


class _Linear:
    """A linear layer of one shape, format and dtype on one GPU, for any M and any weight."""

    def __init__(self, format: str, n: int, k: int, x: Tensor, compute: str, activation: str) -> None:
        fmt = as_format(format)
        self.problem = Problem("linear", 1, n, k, fmt, x.dtype, compute_of(compute), activation)  # type: ignore[arg-type]
        self.geometry = gpu_tiles.geometry(fmt, (n, k))
        self.nbytes, self.n, self.k, self.dtype = self.geometry.nbytes, n, k, x.dtype
        self.device, self.gpu = x.device, gpu(x.get_device())
        self.plans: dict[tuple[Any, ...], Callable[..., None] | None] = {}

    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, low: float, high: float) -> Tensor:
        """The arguments are valid, not empty, and on the current device."""
        x, weight = aligned(x), aligned(weight)
        residual = None if residual is None else aligned(residual)
        if bias is not None:
            bias = aligned(bias.float() if bias.dtype == torch.float64 else bias)
        shape, n = x.shape, self.n
        if len(shape) == 2:
            out = _empty((shape[0], n), (n, 1), self.dtype)
        else:
            out = torch.empty((*shape[:-1], n), dtype=self.dtype, device=self.device)
        key = _key(x, self.k, bias, residual, low, high)
        replay = self.plans.get(key)
        if replay is None:
            m = key[0]
            flat = None if residual is None else residual.view(m, n)
            self._launch(key, x.view(m, self.k), weight, out.view(m, n), Epilogue(bias, flat, low, high))
        else:
            replay(*(0 if t is None else t.data_ptr() for t in (x, weight, out, bias, residual)))
        return out

    def _launch(self, key: tuple[Any, ...], x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
        """Calls the kernel's own `launch` and records its launches for replays, if possible."""
        problem = self._problem(x.shape[0])
        capturing = torch.cuda.is_current_stream_capturing()
        if env.tune() and not capturing:
            tune_linear(problem, self.gpu, anew=False)
        choice = choose_gpu_linear(problem, self.gpu)
        if choice.taken is None:
            plain.linear(problem, x, weight, out, epilogue)
            return
        for option in (choice.taken, *choice.others):
            run = partial(option.candidate.module.launch, problem, option.config, x)
            run = partial(run, *gpu_tiles.views(weight, self.geometry), out, epilogue)
            try:
                run()
                break
            except KernelError as error:
                report_failure(problem, self.gpu, option, str(error))
                warnings.warn(f"{option.candidate.name} {option.config} is skipped: {error}", stacklevel=2)
        else:
            raise UnsupportedError(f"no kernel on {self.gpu.name} runs {problem}: halfbyte explain says why; use the CPU")
        from halfbyte.kernels.gpu import direct, launch

        operands = (x, weight, out, epilogue.bias, epilogue.residual)
        known = key in self.plans or not option.candidate.direct
        if known or capturing or overlap(operands) or direct.broken(self.device) is not None:
            return
        with launch.recording() as calls:  # again: now everything is compiled, and all memory is there
            run()
        plan = direct.bind(calls, operands, self.device)
        if len(self.plans) >= _KEPT_PLANS:
            self.plans.clear()
        self.plans[key] = None if isinstance(plan, str) else plan

    def _problem(self, m: int) -> Problem:
        p = self.problem
        return Problem(p.op, m, p.n, p.k, p.format, p.dtype, p.compute, p.activation)


def overlap(operands: tuple[Tensor | None, ...]) -> bool:
    """Whether two of them share memory, so that an address does not identify an operand."""
    ranges = sorted((t.data_ptr(), t.data_ptr() + t.nbytes) for t in operands if t is not None)
    return any(start < end for (_, end), (start, _) in pairwise(ranges))


def _public_empty(shape: tuple[int, ...], stride: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.empty_strided(shape, stride, dtype=dtype, device="cuda")


# On the current device. The private function takes 1.2 us, the public one 3.4.
_empty: Callable[[tuple[int, ...], tuple[int, ...], torch.dtype], Tensor] = getattr(
    torch._C._dynamo.guards, "_empty_strided_cuda", _public_empty
)


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's device is the current one, as Triton requires."""
    return nullcontext() if tensor.get_device() == torch._C._cuda_getDevice() else torch.cuda.device(tensor.device)


def quantize(weight: Tensor, fmt: Format) -> Codes | None:
    """`quantizers.absmax` by a kernel; None where no kernel supports it, or where `absmax` would raise an error."""
    if triton_trouble() is not None:
        return None
    from halfbyte.kernels.gpu import quantize as kernel

    with on(weight):
        return kernel.quantize(weight, fmt) if kernel.supports(weight, fmt) is None else None


def qlinear(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> Tensor:
    check_qlinear(x, weight, table, format, n, k, low, high)
    if k == 0:  # a sum of nothing: the same as one code that is 0
        return table[0, :n].round().clamp(low, high).to(torch.int8).expand(*x.shape[:-1], n).clone()
    out = torch.empty((*x.shape[:-1], n), dtype=torch.int8, device=x.device)
    if out.numel() == 0:
        return out
    if (trouble := triton_trouble()) is not None:
        raise UnsupportedError(f"qlinear needs Triton: {trouble}, or use the CPU")
    from halfbyte.kernels.gpu import qlinear as kernel

    here, flat, fmt = gpu(x.get_device()), x.reshape(-1, k), as_format(format)
    problem = Problem("qlinear", len(flat), n, k, fmt, torch.int8, "int8", "row")
    if (reason := kernel.supports(problem, here)) is not None:
        raise UnsupportedError(f"there is no kernel for qlinear with {format} of shape [{n}, {k}] on {here.name}: {reason}")
    codes, scale, _ = gpu_tiles.views(aligned(weight), gpu_tiles.geometry(fmt, (n, k)))
    with on(x):
        kernel.launch(problem, kernel.configs(problem, here)[0], flat, codes, scale, table, out.view(-1, n), (low, high))
    return out


def embedding(ids: Tensor, weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    check_packed(weight, format, n, k, ids.device)
    check_ids(ids)
    check_out_dtype(dtype)
    if triton_trouble() is None:
        from halfbyte.kernels.gpu import dequantize as kernel

        with on(ids):
            rows = kernel.embedding(ids.flatten().contiguous(), aligned(weight), gpu_tiles.geometry(as_format(format), (n, k)), dtype)
        return rows.view(*ids.shape, k)
    if n == 0 or k == 0:
        return torch.full((*ids.shape, k), torch.nan, dtype=dtype, device=ids.device)
    rows = dequantize(weight, format, n, k, dtype)[ids.clamp(0, n - 1).long()]
    return torch.where(((ids >= 0) & (ids < n)).unsqueeze(-1), rows, torch.nan)


def dequantize(weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    check_packed(weight, format, n, k, weight.device)
    check_out_dtype(dtype)
    if triton_trouble() is None:
        from halfbyte.kernels.gpu import dequantize as kernel

        with on(weight):
            return kernel.dequantize(aligned(weight), gpu_tiles.geometry(as_format(format), (n, k)), dtype)
    return gpu_tiles.unpack(Packed(as_format(format), (n, k), gpu_tiles.NAME, weight)).dequantize(dtype)


def aligned(tensor: Tensor) -> Tensor:
    """Contiguous, at an address that is a multiple of 16: kernels read 16 bytes at a time, and are compiled for that."""
    return tensor if tensor.is_contiguous() and not tensor.data_ptr() % 16 else tensor.clone(memory_format=torch.contiguous_format)

"""The custom ops on GPUs: no call synchronizes with the device, so all of them may be captured in a CUDA graph.

Calls of linear layers are cached by shapes, dtypes and settings, whatever the weight: the kernel, its config, and its launches, which
are replayed with other addresses.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor

from halfbyte import env
from halfbyte.bounded import Bounded
from halfbyte.dispatch.gpu import choose_gpu, compute_of, packs_pairs, triton_trouble, why_no_sparse_layout
from halfbyte.dispatch.measure import tune_linear
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.gpu import plain
from halfbyte.kernels.made import is_noted, keep
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.sparse import why_not_sparse
from halfbyte.machine import Gpu, gpu
from halfbyte.ops import long_sums
from halfbyte.ops.checks import check_bias, check_ids, check_linear, check_out_dtype, check_packed, check_qlinear, check_residual
from halfbyte.ops.replay import MOST_REPLAYS, Replay, can_record, empty, recorded, run_first
from halfbyte.ops.tensors import aligned, codes_of_nothing, sum_of_nothing

# A repeated call: replays the launches; returns None if the layout of the operands differs.
_Again = Callable[[Tensor, Tensor, Tensor | None, Tensor | None], Tensor | None]


def _again(replay: Replay, shape: tuple[int, ...], device: int) -> _Again:
    """`replay` for tensors on `device`, usually the current one; the result is a new contiguous tensor of `shape`."""
    stride = torch.empty(shape, device="meta", dtype=torch.int8).stride()

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
        out = empty(shape, stride, x.dtype)
        replay(px, pw, out.data_ptr(), pb, pr)
        return out

    return again


# By all that calls differ in but addresses. For all weights; calls of one weight are cached in it. None: these cannot be replayed.
_calls = Bounded[tuple[Any, ...], _Again | None](MOST_REPLAYS)


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
    again = None if is_noted() else packed.calls.get(key)
    if again is not None and (y := again(x, packed.data, bias, residual)) is not None:
        return y  # type: ignore[no-any-return]
    settings, weight = (packed.name, *packed.shape, compute, activation, low, high), packed.data
    y = linear(x, weight, bias, residual, *settings)
    found = _calls.get((weight.shape, weight.dtype, weight.get_device(), _call_key(x, bias, residual, settings)))
    if again is None and found is not None and weight.is_contiguous():
        packed.calls[key] = found
    return y


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: Any) -> Tensor:
    """The op. settings: format, n, k, compute, activation, low, high."""
    if bias is not None and bias.dtype == torch.float64:
        bias = bias.float()
    key = (weight.shape, weight.dtype, weight.get_device(), _call_key(x, bias, residual, settings))
    again = None if is_noted() else _calls.get(key)
    if again is not None and weight.is_contiguous() and (y := again(x, weight, bias, residual)) is not None:
        return y
    return _linear(key, x, weight, bias, residual, *settings)


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


def _linear(
    key: tuple[Any, ...],
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
    check_linear(x, weight, format, n, k, activation, low, high)
    shape = (*x.shape[:-1], n)
    if bias is not None:
        check_bias(bias, n, x.device)
    if residual is not None:
        check_residual(residual, x, shape)
    if x.numel() == 0 or n == 0:
        return sum_of_nothing(x, shape, bias, residual).clamp_(low, high).to(x.dtype)
    x, weight = aligned(x), aligned(weight)
    bias, residual = None if bias is None else aligned(bias), None if residual is None else aligned(residual)
    again = None if is_noted() else _calls.get(key)
    with on(x):
        if again is not None and (y := again(x, weight, bias, residual)) is not None:
            return y
        out = keep(x.new_empty(shape))
        operands, flat = (x, weight, out, bias, residual), x.view(-1, k)
        geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
        settings = {"compute": compute_of(compute), "activation": activation, "sparse": geo.sparse, "paired": geo.paired}
        problem = Problem("linear", len(flat), n, k, geo.format, x.dtype, **settings)  # type: ignore[arg-type]
        ends = Epilogue(bias, None if residual is None else residual.view(-1, n), low, high)
        run = _run(problem, flat, (weight, geo), out.view(-1, n), ends)
        if key not in _calls and not is_noted() and can_record(operands):
            replay = None if run is None else recorded(run, operands)
            _calls[key] = None if replay is None else _again(replay, shape, x.get_device())
    return out


def is_replayed(rows: int, packed: Packed, dtype: torch.dtype) -> bool:
    """Whether launches of a product of so many rows can be made again: not where torch computes it."""
    n, k = packed.shape
    geo = gpu_tiles.geometry_of(packed.format, n, k, packed.data.numel())
    problem = Problem("linear", rows, n, k, geo.format, dtype, sparse=geo.sparse, paired=geo.paired)
    taken = choose_gpu(problem, gpu(packed.data.get_device())).taken
    return taken is not None and taken.candidate.replayable


def _run(
    problem: Problem, x: Tensor, weight: tuple[Tensor, gpu_tiles.Geometry], out: Tensor, epilogue: Epilogue
) -> Callable[[], None] | None:
    """Multiplies. A function that does so again, where its launches can be replayed."""
    here = gpu(x.get_device())
    if env.tune() and not torch.cuda.is_current_stream_capturing():
        tune_linear(problem, here, anew=False)
    choice = choose_gpu(problem, here)
    if choice.taken is None:
        plain.linear(problem, x, weight[0], out, epilogue)
        return None
    return run_first(problem, here, choice.options, (x, *gpu_tiles.views(*weight), out, epilogue))


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's device is the current one, as Triton requires."""
    return nullcontext() if tensor.get_device() == torch._C._cuda_getDevice() else torch.cuda.device(tensor.device)


def leaves_zeros_out(codes: Codes, here: Gpu | None = None) -> bool:
    """Whether codes [N, K] are packed as 2:4 sparse ones for this GPU; None: for the one that they are on."""
    here = here or gpu(codes.data.get_device())
    return why_no_sparse_layout(codes.format, codes.shape, here) is None and why_not_sparse(codes) is None


def takes_pairs(codes: Codes) -> bool:
    """Whether codes [N, K] are packed in pairs for the GPU that they are on."""
    return packs_pairs(codes.format, codes.shape, gpu(codes.data.get_device()))


def with_zeros(packed: Packed) -> Packed:
    """A sparse weight in the layout of all others."""
    from halfbyte.kernels.gpu import spread

    geo = gpu_tiles.geometry(packed.format, packed.shape, sparse=True)
    with on(packed.data):
        codes = spread.sections(packed.data, geo).codes
    data = torch.cat((codes.flatten().view(torch.uint8), packed.data[geo.codes_bytes :]))
    return Packed(packed.format, packed.shape, gpu_tiles.NAME, data)


def quantize(weight: Tensor, fmt: Format) -> Codes | None:
    """`quantizers.absmax` by a kernel; None where no kernel supports it, or where `absmax` would raise an error."""
    if triton_trouble() is not None:
        return None
    from halfbyte.kernels.gpu import quantize as kernel

    with on(weight):
        return kernel.quantize(weight, fmt) if kernel.supports(weight, fmt) is None else None


def qlinear(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> Tensor:
    check_qlinear(x, weight, table, format, n, k, low, high)
    if k == 0:
        return codes_of_nothing(x, table, n, low, high)
    out = torch.empty((*x.shape[:-1], n), dtype=torch.int8, device=x.device)
    if out.numel() == 0:
        return out
    if long_sums.overflows(k):
        geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
        packed = Packed(geo.format, (n, k), geo.layout, weight)
        return long_sums.qlinear(x, gpu_tiles.unpack(with_zeros(packed) if geo.sparse else packed), table, low, high)
    if (trouble := triton_trouble()) is not None:
        raise UnsupportedError(f"qlinear needs Triton: {trouble}, or use the CPU")
    from halfbyte.kernels.gpu import qlinear as kernel
    from halfbyte.kernels.gpu import spread

    here, flat, fmt = gpu(x.get_device()), x.reshape(-1, k), as_format(format)
    geo = gpu_tiles.geometry_of(fmt, n, k, weight.numel())
    problem = Problem("qlinear", len(flat), n, k, fmt, torch.int8, "int8", "row", paired=geo.paired)
    if (reason := kernel.supports(problem, here)) is not None:
        raise UnsupportedError(f"there is no kernel for qlinear with {format} of shape [{n}, {k}] on {here.name}: {reason}")
    with on(x):
        codes, scale, _ = spread.sections(aligned(weight), geo)
        kernel.launch(problem, kernel.configs(problem, here)[0], flat, codes, scale, table, out.view(-1, n), (low, high))
    return out


def embedding(ids: Tensor, weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    check_packed(weight, format, n, k, ids.device)
    check_ids(ids)
    check_out_dtype(dtype)
    if triton_trouble() is None:
        from halfbyte.kernels.gpu import dequantize as kernel

        geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
        with on(ids):
            rows = kernel.embedding(ids.flatten().contiguous(), aligned(weight), geo, dtype)
        return rows.view(*ids.shape, k)
    if n == 0 or k == 0:
        return torch.full((*ids.shape, k), torch.nan, dtype=dtype, device=ids.device)
    rows = dequantize(weight, format, n, k, dtype)[ids.clamp(0, n - 1).long()]
    return torch.where(((ids >= 0) & (ids < n)).unsqueeze(-1), rows, torch.nan)


def dequantize(weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    check_packed(weight, format, n, k, weight.device)
    check_out_dtype(dtype)
    geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
    if triton_trouble() is None:
        from halfbyte.kernels.gpu import dequantize as kernel

        with on(weight):
            return kernel.dequantize(aligned(weight), geo, dtype)
    return gpu_tiles.unpack(Packed(geo.format, (n, k), geo.layout, weight)).dequantize(dtype)

"""The custom ops on GPUs: no call synchronizes with the device, so all of them may be captured in a CUDA graph.

Calls of linear layers with the same shapes, dtypes and settings share a tape (`replay.py`), whatever the weight.
"""

from __future__ import annotations

import math
import warnings
from contextlib import AbstractContextManager, nullcontext
from contextvars import Context

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte import env
from halfbyte.dispatch.candidate import Choice
from halfbyte.dispatch.choose import choose, report_failure
from halfbyte.dispatch.gpu import GpuCandidate, compute_of, packs_code_pairs, why_no_sparse_layout, why_no_triton
from halfbyte.dispatch.measure import tune_linear
from halfbyte.errors import ArgumentError, KernelError, UnsupportedError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.kernels.gpu.linear import plain
from halfbyte.kernels.gpu.runtime.launch import current_recording, output
from halfbyte.kernels.problem import LOW_RANK, Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.sparse import why_not_sparse
from halfbyte.machine import Gpu, gpu
from halfbyte.ops import long_sums
from halfbyte.ops.checks import (
    check_bias,
    check_clamp,
    check_ids,
    check_linear,
    check_out_dtype,
    check_packed,
    check_qlinear,
    check_residual,
)
from halfbyte.ops.replay import key_of, replayed, tapes
from halfbyte.ops.tensors import aligned, empty_sum, empty_sum_codes


def packed_linear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None,
    residual: Tensor | None,
    compute: str,
    activation: str,
    low: float,
    high: float,
) -> Tensor:
    """`linear` with a weight that has been validated, which caches the replays of its calls."""
    key = (
        compute,
        activation,
        low,
        high,
        (x.shape, x.stride(), x.dtype, x.get_device()),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        None if residual is None else (residual.shape, residual.stride(), residual.dtype, residual.get_device()),
    )  # `key_of`, written out: to call it takes longer
    replay = packed.calls.get(key)
    if replay is not None and current_recording() is None and (y := replay(x, packed.data, bias, residual)) is not None:
        return y  # type: ignore[no-any-return]
    settings = (packed.name, packed.shape[0], packed.shape[1], compute, activation, low, high)
    y = linear(x, packed.data, bias, residual, *settings)
    if replay is None and (tape := tapes.get(key_of((x, packed.data, bias, residual), "linear", *settings))) is not None and tape.replay:
        packed.calls[key] = tape.replay
    return y


LinearSettings = tuple[str, int, int, str, str, float, float]  # format, n, k, compute, activation, low, high


def linear(x: Tensor, weight: Tensor, bias: Tensor | None, residual: Tensor | None, *settings: *LinearSettings) -> Tensor:
    """The op."""
    if bias is not None and bias.dtype == torch.float64:
        bias = bias.float()
    key = (
        "linear",
        *settings,
        (x.shape, x.stride(), x.dtype, x.get_device()),
        (weight.shape, weight.stride(), weight.dtype, weight.get_device()),
        None if bias is None else (bias.shape, bias.stride(), bias.dtype, bias.get_device()),
        None if residual is None else (residual.shape, residual.stride(), residual.dtype, residual.get_device()),
    )  # `key_of`, written out
    tape = tapes.get(key)
    if tape is not None and tape.replay is not None and current_recording() is None:
        y: Tensor | None = tape.replay(x, weight, bias, residual)
        if y is not None:
            return y
    return _linear(x, weight, bias, residual, *settings)


def _linear(
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
    """One of the first calls of its kind, or one with an unusual layout of operands."""
    check_linear(x, weight, format, n, k, activation, low, high)
    shape = (*x.shape[:-1], n)
    if bias is not None:
        check_bias(bias, n, x.device)
    if residual is not None:
        check_residual(residual, x, shape)
    if x.numel() == 0 or n == 0:
        return empty_sum(x, shape, bias, residual).clamp_(low, high).to(x.dtype)
    x, weight = aligned(x), aligned(weight)
    bias, residual = None if bias is None else aligned(bias), None if residual is None else aligned(residual)

    def steps() -> Tensor:
        out, flat = output(x.new_empty(shape)), x.view(-1, k)
        geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
        settings = {"compute": compute_of(compute), "activation": activation, "sparse": geo.sparse, "paired": geo.paired}
        problem = Problem("linear", len(flat), n, k, geo.format, x.dtype, **settings)  # type: ignore[arg-type]
        ends = Epilogue(bias, None if residual is None else residual.view(-1, n), low, high)
        _run(problem, flat, (weight, geo), out.view(-1, n), ends)
        return out

    with on(x):
        settings = format, n, k, compute, activation, low, high
        return replayed(steps, (x, weight, bias, residual), "linear", *settings, weight=1)


def linear_codes(
    q: Tensor,
    scale: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    residual: Tensor | None,
    format: str,
    n: int,
    k: int,
    dtype: torch.dtype,
    low: float,
    high: float,
) -> Tensor:
    """`linear` with rows that are quantized already (`row_codes.py`): q int8 [..., K], scale float32 [...] -> [..., N] of `dtype`."""
    check_packed(weight, format, n, k, q.device)
    check_clamp(low, high)
    from halfbyte.kernels.gpu.quantize import activations

    out, weight = q.new_empty((*q.shape[:-1], n), dtype=dtype), aligned(weight)
    geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
    problem = Problem("linear", scale.numel(), n, k, geo.format, dtype, "int8", "row", paired=geo.paired)
    rows = activations.quantized(activations.plan(problem), aligned(q).view(-1, k), scale)
    bias, residual = None if bias is None else aligned(bias), None if residual is None else aligned(residual)
    ends = Epilogue(bias, None if residual is None else residual.view(-1, n), low, high)
    here = gpu(q.get_device())
    with on(q):
        run_first(choose(problem, here), here, (rows, gpu_tiles.views(weight, geo), out.view(-1, n), ends))
    return out


def linear_low_rank(
    x: Tensor, inner: Tensor, outer: Tensor, weight: Tensor, bias: Tensor | None, format: str, n: int, k: int, compute: str, activation: str
) -> Tensor:
    """`linear` plus branches of low rank: inner = x · Aᵀ [..., branches * r], outer = B [N, r]; each has an equal part of N.

    Where `gemm_int8_hopper` multiplies, it adds them to its sums; elsewhere torch's product is a residual.
    """
    check_linear(x, weight, format, n, k, activation, -math.inf, math.inf)
    if bias is not None:
        check_bias(bias, n, x.device)
    rank = outer.shape[1] if outer.dim() == 2 else 0
    branches = inner.shape[-1] // rank if rank and inner.dim() == x.dim() else 0
    sizes = (*x.shape[:-1], branches * rank), (n, rank)
    same = all(t.dtype == x.dtype and t.device == x.device for t in (inner, outer))
    if not same or (inner.shape, outer.shape) != sizes or branches < 1 or n % branches:
        got = ", ".join(f"{t.dtype} {list(t.shape)} on {t.device}" for t in (inner, outer))
        raise ArgumentError(f"low rank takes inner [..., branches * r] and outer [{n}, r] like x {x.dtype} {list(x.shape)}, got {got}")
    with on(x):
        if x.numel() and n and (added := _low_rank_sums(x, inner, outer, weight, bias, (format, n, k, compute, activation))) is not None:
            return added
    parts = zip(inner.chunk(branches, -1), outer.chunk(branches), strict=True)
    branch = torch.cat([functional.linear(a, b) for a, b in parts], -1)
    return linear(x, weight, bias, branch, format, n, k, compute, activation, -math.inf, math.inf)


def _low_rank_sums(
    x: Tensor, inner: Tensor, outer: Tensor, weight: Tensor, bias: Tensor | None, settings: tuple[str, int, int, str, str]
) -> Tensor | None:
    """`linear_low_rank` by one kernel; None where another one multiplies."""
    format, n, k, compute, activation = settings
    flat, inner, weight = aligned(x).view(-1, k), aligned(inner).view(-1, inner.shape[-1]), aligned(weight)
    geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
    ways = {"compute": compute_of(compute), "activation": activation, "sparse": geo.sparse, "paired": geo.paired}
    problem = Problem("linear", len(flat), n, k, geo.format, x.dtype, **ways)  # type: ignore[arg-type]
    taken = choose(problem, gpu(x.get_device())).taken
    if taken is None or taken.candidate.name != "gemm_int8_hopper" or outer.shape[1] != LOW_RANK:
        return None
    if taken.candidate.module.why_no_low_rank(problem, taken.config, inner.shape[1] // LOW_RANK) is not None:
        return None
    out = x.new_empty((*x.shape[:-1], n))
    ends = Epilogue(None if bias is None else aligned(bias), low_rank=(inner, aligned(outer)))
    taken.candidate.launch(problem, taken.config, flat, gpu_tiles.views(weight, geo), out.view(-1, n), ends)
    return out


def _run(problem: Problem, x: Tensor, weight: tuple[Tensor, gpu_tiles.Geometry], out: Tensor, epilogue: Epilogue) -> None:
    """Multiply."""
    here = gpu(x.get_device())
    if env.tune() and not torch.cuda.is_current_stream_capturing():
        Context().run(tune_linear, problem, here, anew=False)  # whose launches are not recorded
    choice = choose(problem, here)
    if choice.taken is not None:
        run_first(choice, here, (x, gpu_tiles.views(*weight), out, epilogue))
        return
    if (recording := current_recording()) is not None:
        recording.why_not_replayed = "torch multiplies"
    plain.linear(problem, x, weight[0], out, epilogue)


def run_first(choice: Choice[Problem, GpuCandidate], here: Gpu, arguments: tuple[object, ...]) -> None:
    """Run the first option of `choice` that runs on this GPU; those before it are not chosen again."""
    problem = choice.problem
    recording = current_recording()
    before = 0 if recording is None else len(recording.launches)
    for option in choice.options:
        try:
            option.candidate.launch(problem, option.config, *arguments)
        except KernelError as error:
            report_failure(problem, here, option, str(error))
            warnings.warn(f"{option.candidate.name} {option.config} is skipped: {error}", stacklevel=2)
            if recording is not None:
                del recording.launches[before:]
            continue
        if recording is not None and not option.candidate.replayable:
            recording.why_not_replayed = f"the kernel {option.candidate.name} is not replayable"
        return
    raise UnsupportedError(f"no kernel on {here.name} runs {problem}: halfbyte explain says why; use the CPU")


def on(tensor: Tensor) -> AbstractContextManager[object]:
    """A context in which the tensor's device is the current one, as Triton requires."""
    return nullcontext() if tensor.get_device() == torch._C._cuda_getDevice() else torch.cuda.device(tensor.device)


def leaves_zeros_out(codes: Codes, here: Gpu | None = None) -> bool:
    """Whether codes [N, K] are packed as 2:4 sparse ones for this GPU; None: for the one that they are on."""
    here = here or gpu(codes.data.get_device())
    return why_no_sparse_layout(codes.format, codes.shape, here) is None and why_not_sparse(codes) is None


def takes_code_pairs(codes: Codes) -> bool:
    """Whether codes [N, K] are packed in pairs for the GPU that they are on."""
    return packs_code_pairs(codes.format, codes.shape, gpu(codes.data.get_device()))


def with_zeros(packed: Packed) -> Packed:
    """A sparse weight in the layout of all others."""
    from halfbyte.kernels.gpu.quantize import spread

    geo = gpu_tiles.geometry(packed.format, packed.shape, sparse=True)
    with on(packed.data):
        codes = spread.sections(packed.data, geo).codes
    data = torch.cat((codes.flatten().view(torch.uint8), packed.data[geo.codes_bytes :]))
    return Packed(packed.format, packed.shape, gpu_tiles.NAME, data)


def quantize(weight: Tensor, fmt: Format) -> Codes | None:
    """`quantizers.absmax` by a kernel; None where no kernel supports it, or where `absmax` would raise an error."""
    if why_no_triton() is not None:
        return None
    from halfbyte.kernels.gpu.quantize import quantize as kernel

    with on(weight):
        return kernel.quantize(weight, fmt) if kernel.supports(weight, fmt) is None else None


def qlinear(x: Tensor, weight: Tensor, table: Tensor, format: str, n: int, k: int, low: int, high: int) -> Tensor:
    check_qlinear(x, weight, table, format, n, k, low, high)
    if k == 0:
        return empty_sum_codes(x, table, n, low, high)
    out = torch.empty((*x.shape[:-1], n), dtype=torch.int8, device=x.device)
    if out.numel() == 0:
        return out
    if long_sums.overflows(k):
        geo = gpu_tiles.geometry_of(as_format(format), n, k, weight.numel())
        packed = Packed(geo.format, (n, k), geo.layout, weight)
        return long_sums.qlinear(x, gpu_tiles.unpack(with_zeros(packed) if geo.sparse else packed), table, low, high)
    here, flat, fmt = gpu(x.get_device()), aligned(x).view(-1, k), as_format(format)
    geo = gpu_tiles.geometry_of(fmt, n, k, weight.numel())
    choice = choose(Problem("qlinear", len(flat), n, k, fmt, torch.int8, "int8", "row", paired=geo.paired), here)
    from halfbyte.kernels.gpu.quantize import spread

    with on(x):
        candidate, config = choice.options[0].candidate, choice.options[0].config
        candidate.launch(choice.problem, config, flat, spread.sections(aligned(weight), geo), table, out.view(-1, n), (low, high))
    return out


def embedding(ids: Tensor, weight: Tensor, format: str, n: int, k: int, dtype: torch.dtype) -> Tensor:
    check_packed(weight, format, n, k, ids.device)
    check_ids(ids)
    check_out_dtype(dtype)
    if why_no_triton() is None:
        from halfbyte.kernels.gpu.quantize import dequantize as kernel

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
    if why_no_triton() is None:
        from halfbyte.kernels.gpu.quantize import dequantize as kernel

        with on(weight):
            return kernel.dequantize(aligned(weight), geo, dtype)
    return gpu_tiles.unpack(Packed(geo.format, (n, k), geo.layout, weight)).dequantize(dtype)

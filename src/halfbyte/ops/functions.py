"""The public functions on Codes and Packed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from torch import Tensor
from torch.nn import functional

from halfbyte.bounded import writes_to
from halfbyte.dispatch.packed import packed_format
from halfbyte.errors import ArgumentError, check_type
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format, as_format
from halfbyte.layouts import convolution, cpu_tiles, experts, gpu_tiles
from halfbyte.layouts.base import Packed, round_up
from halfbyte.layouts.convolution import PackedConv
from halfbyte.machine import Gpu
from halfbyte.memory import joined
from halfbyte.ops import cpu
from halfbyte.ops.checks import TABLE_PANEL, check_bias, check_device, check_operands, check_plain_tensor, check_requantization, code_range
from halfbyte.ops.library import gpu_ops, transformed_linear
from halfbyte.ops.long_sums import starts
from halfbyte.ops.modes import differentiated, plain, transformed
from halfbyte.ops.registration import OPS, optional
from halfbyte.ops.row_codes import fused_by_inductor, quantize_rows, takes_codes
from halfbyte.ops.tensors import geglu, gelu_tanh
from halfbyte.quantizers import CALIBRATED, METHODS
from halfbyte.quantizers.check import check_scales, check_weight

_INFINITE = float("inf")

# Codes and layouts


def quantize(weight: Tensor, format: str | Format, method: str = "absmax", *, name: str = "weight") -> Codes:
    """Quantize a weight [..., N, K] to codes.

    Args:
        weight: [..., N, K] in float32, float16 or bfloat16.
        format: The format, or its name.
        method: "absmax": scales from each block's extremes; "mse": scales that minimise the squared error; "hqq": a norm of the error in
            which outliers count little.
        name: The tensor's name in error messages.

    Returns:
        The codes, on the device of the weight.

    Raises:
        ArgumentError: The weight has a NaN or infinity.
        FormatError: The format is unknown, a scale overflows, or the weight is too small for the precision of its scales' dtype.

    Example:
        >>> hb.quantize(torch.ones(2, 32), "q8_0").data.dtype
        torch.int8
    """
    fmt = as_format(format)
    if method not in METHODS:
        why = f"{method} looks at the inputs of a model's layers" if method in CALIBRATED else f"unknown quantization method {method!r}"
        raise ArgumentError(f"{why}: use one of {', '.join(METHODS)}" + (", or quantize_" if method in CALIBRATED else ""))
    check_weight(weight, name)
    weight = weight.detach().resolve_neg()
    if method == "absmax":
        codes = gpu_ops().quantize(weight, fmt) if weight.is_cuda else cpu.quantize(weight, fmt)
        if codes is not None:
            check_scales(codes, weight, name)
            return codes
    codes = METHODS[method](weight, fmt, name)
    check_scales(codes, weight, name)
    return codes


def pack(codes: Codes, device: torch.device | str = "cpu", *, sparse: bool | None = None) -> Packed:
    """Arrange codes in the byte order of a device's kernels. No number changes: `unpack` is the exact inverse.

    Codes of iq4 formats are integers of 8 bits on a GPU; so are those of 5 and 6 bits, also on CPUs with AMX or i8mm.

    Args:
        codes: Codes [N, K] become a weight for `linear`, `qlinear` and `embedding`, stacked ones [E, N, K] one for `grouped_linear`.
        device: "cpu" or "cuda".
        sparse: Whether zeros of codes [N, K] that are 2:4 sparse are left out, where there are kernels for such weights: they take less
            memory, and few rows less time; many rows take longer on a GPU. None: on CPUs alone.

    Returns:
        The packed weight, on the device.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> packed.shape
        (8, 32)
    """
    check_type(codes, Codes, "pack takes Codes", "pass what quantize(weight, format) gives")
    device = check_device(device)
    on_cpu, codes = device.type == "cpu", codes.to(device)
    if packed_format(codes.format, on_cpu=on_cpu) == codes.format:
        return _pack(codes, on_cpu, sparse)
    return replace(_pack(codes.integers(), on_cpu, sparse), source_format=codes.format)


def _pack(codes: Codes, on_cpu: bool, sparse: bool | None) -> Packed:
    """`pack` for the device that the codes are on, which reads their format."""
    if len(codes.shape) == 3:
        return experts.pack(codes, pack_dense if on_cpu else gpu_tiles.pack, cpu_tiles.NAME if on_cpu else gpu_tiles.NAME)
    if on_cpu:
        packed = pack_dense(codes) if sparse is False else _pack_cpu(codes)
    else:
        sparse_here = sparse is True and gpu_ops().leaves_zeros_out(codes)
        packed = gpu_tiles.pack(codes, sparse=sparse_here, paired=not sparse_here and gpu_ops().takes_code_pairs(codes))
    return packed if sparse is None else replace(packed, sparse=sparse)


def _pack_cpu(codes: Codes) -> Packed:
    from halfbyte.kernels.cpu.linear import sparse

    dense = pack_dense(codes)
    return sparse.pack(dense) if sparse.why_not(codes) is None else dense


def pack_dense(codes: Codes) -> Packed:
    """`pack` for the CPU, in the layout that all kernels there read."""
    from halfbyte.kernels.cpu.quantize import pack as kernel

    return kernel.pack(codes) if kernel.supports(codes) is None else cpu_tiles.pack(codes)


def unpack(packed: Packed | PackedConv) -> Codes:
    """Return the codes of a packed weight.

    Args:
        packed: The packed weight.

    Returns:
        The Codes that it was packed from, on its device.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> hb.unpack(packed).data.shape
        torch.Size([8, 32])
    """
    check_type(packed, (Packed, PackedConv), "unpack takes a weight that pack or pack_conv has made", "Codes are unpacked already")
    if isinstance(packed, PackedConv):
        return convolution.unpack(packed)
    codes = _unpack(packed)
    return codes if packed.source_format is None else codes.limited_to(packed.source_format)


def _unpack(packed: Packed) -> Codes:
    """The codes as kernels read them."""
    if len(packed.shape) == 3:
        return experts.unpack(packed, _unpack)
    if packed.layout in (gpu_tiles.NAME, gpu_tiles.PAIRED, gpu_tiles.SPARSE):
        return gpu_tiles.unpack(gpu_ops().with_zeros(packed) if packed.layout == gpu_tiles.SPARSE else packed)
    return cpu_tiles.unpack(_all_codes(packed) if packed.layout == cpu_tiles.SPARSE else packed)


def sparse_on(packed: Packed, gpu: Gpu) -> bool:
    """Whether a weight [N, K], wherever it is now, is packed as a 2:4 sparse one on that GPU."""
    if packed.data.is_cuda:
        return packed.layout == gpu_tiles.SPARSE
    return packed.sparse is True and bool(gpu_ops().leaves_zeros_out(unpack(packed), gpu))


def _all_codes(packed: Packed) -> Packed:
    """A sparse weight in the layout that is unpacked faster, where there is a kernel for that."""
    from halfbyte.kernels.cpu.codegen.isas import current
    from halfbyte.kernels.cpu.linear import sparse

    geo = cpu_tiles.geometry(packed.format, packed.shape, sparse=True)
    return sparse.unpack(packed) if current().spreads and packed.nbytes == geo.nbytes else packed


def in_order(packed: Packed) -> Packed:
    """The weight with its bytes in the order of K, not in the pairs that float compute takes on Hopper: int8 compute takes either, and
    torch.compile writes codes of activations in the order of K (`row_codes.py`)."""
    if packed.layout != gpu_tiles.PAIRED:
        return packed
    return replace(gpu_tiles.pack(_unpack(packed)), sparse=packed.sparse, source_format=packed.source_format)


def join(parts: Sequence[Packed]) -> Packed:
    """The rows of weights [N, K] of one format and K, one weight after the other, as one: in their own memory where they were packed one
    after the other."""
    first, n = parts[0], sum(part.shape[0] for part in parts)
    if all(part.layout == cpu_tiles.NAME and part.shape[0] % cpu_tiles.PANEL == 0 for part in parts) and first.format.block != "tensor":
        given = [part.data for part in parts]
        if (memory := joined(given)) is None:
            data = torch.cat(given, out=cpu_tiles.allocate(sum(part.nbytes for part in parts)))
        else:
            data = torch.frombuffer(memory, dtype=torch.uint8)
        return Packed(first.format, (n, first.shape[1]), cpu_tiles.NAME, data, first.sparse, first.source_format)
    return pack(Codes.joined([unpack(part) for part in parts], torch.cat), first.device, sparse=first.sparse)


# Public functions


def linear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    residual: Tensor | None = None,
    compute: str = "auto",
    activation: str = "block",
    clamp: tuple[float, float] | None = None,
) -> Tensor:
    """Multiply activations with a quantized weight: x [..., K] · dequantize(packed)ᵀ + bias + residual.

    Gradients flow to x, bias and residual (dX = dY · W); the weight is frozen. A row of x with a NaN or infinity gives a row of NaN under
    "int8". Products of codes and activations are summed over a block, of B elements, before they are scaled: from |x| = 3.4e38 / (128 B)
    on, 8e34 for B = 32, these sums may leave float32's range, and the result may be infinite or NaN.

    Args:
        x: [..., K] in float32, bfloat16 or float16.
        packed: The weight [N, K].
        bias: [N] or None.
        residual: [..., N] of x's dtype, or None; added before the clamp.
        compute: "float": weights become floating point in registers; "int8": x is quantized on the fly and integers are multiplied; "auto":
            the faster one on a CPU, "float" on a GPU.
        activation: Scales of x under "int8": "block" (one for each block of the weight along K) or "row", each also with an offset for
            one-sided activations: "block_offset", "row_offset".
        clamp: (low, high) applied to the result: (0, inf) is ReLU, (0, 6) ReLU6.

    Returns:
        [..., N] in x's dtype.

    Raises:
        ArgumentError: Shapes, dtypes or settings do not fit.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> hb.linear(torch.randn(3, 32), packed).shape
        torch.Size([3, 8])
    """
    try:
        n, k = packed.shape if len(packed.shape) == 2 else _matrix(packed)
        low, high = (-_INFINITE, _INFINITE) if clamp is None else clamp
        if plain(x, bias, residual) and not differentiated(x, bias, residual):
            if x.is_cpu:
                return cpu.linear(x, packed.data, bias, residual, packed.name, n, k, compute, activation, low, high)
            return gpu_ops().packed_linear(x, packed, bias, residual, compute, activation, low, high)  # type: ignore[no-any-return]
        if takes_codes(x, packed, bias, residual, compute, activation):
            arguments = packed.data, bias, residual, packed.name, n, k, x.dtype, *optional(low, high)
            return OPS.linear_codes.default(*quantize_rows(x), *arguments)  # type: ignore[no-any-return]
        run = transformed_linear if transformed() else OPS.linear.default
        return run(x, packed.data, bias, residual, packed.name, n, k, compute, activation, *optional(low, high))
    except Exception:
        check_operands(x, packed, Packed, bias, residual, clamp)
        raise


def linear_low_rank(x: Tensor, inner: Tensor, outer: Tensor, packed: Packed, bias: Tensor | None, compute: str, activation: str) -> Tensor:
    """linear(x, packed, bias) + inner · outerᵀ, where `row_codes.adds_low_rank`; of several branches as `cuda.linear_low_rank` has it."""
    n, k = _matrix(packed)
    return OPS.linear_low_rank.default(x, inner, outer, packed.data, bias, packed.name, n, k, compute, activation)  # type: ignore[no-any-return]


def linear_gelu(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    compute: str = "auto",
    activation: str = "block",
    approximate: Literal["none", "tanh"] = "none",
) -> Tensor:
    """gelu(linear(x, packed, bias)): x [..., K] -> [..., N]; approximate: as of torch's gelu.

    On the CPU it is computed before the product is rounded and written, with an error of at most 2^-20 of its argument; elsewhere,
    and where gradients are needed, by torch after the product. Otherwise as `linear`.
    """
    if transformed() or fused_by_inductor(x):
        y = linear(x, packed, bias, compute=compute, activation=activation)
        return gelu_tanh(y) if approximate == "tanh" and fused_by_inductor(x) else functional.gelu(y, approximate=approximate)
    try:
        n, k = _matrix(packed)
        if plain(x, bias) and x.is_cpu and not differentiated(x, bias, None):
            return cpu.linear_gelu(x, packed.data, bias, packed.name, n, k, compute, activation, approximate)
        settings = packed.name, n, k, compute, activation, approximate
        return OPS.linear_gelu.default(x, packed.data, bias, *settings)  # type: ignore[no-any-return]
    except Exception:
        check_operands(x, packed, Packed, bias)
        raise


def linear_geglu(x: Tensor, packed: Packed, bias: Tensor | None = None, *, compute: str = "auto", activation: str = "block") -> Tensor:
    """Multiply with both halves of a weight, and gate one product with the GELU of the other (GEGLU, Shazeer, arXiv:2002.05202).

        y = (x · W₁ᵀ + b₁) * gelu(x · W₂ᵀ + b₂),  W = [W₁; W₂] [N, K]; x [..., K] -> y [..., N / 2]

    On the CPU the second product's epilogue gates, before it is rounded, if N is a multiple of 64; elsewhere, and where gradients are
    needed, torch does after one product. Otherwise as `linear`.
    """
    n, k = _matrix(packed)
    if n % 2:
        raise ArgumentError(f"linear_geglu takes a weight with an even number of rows, the two halves, got [{n}, {k}]")
    if transformed() or fused_by_inductor(x):
        return geglu(linear(x, packed, bias, compute=compute, activation=activation))
    try:
        arguments = x, packed.data, bias, packed.name, n, k, compute, activation
        if plain(x, bias) and x.is_cpu and not differentiated(x, bias, None):
            return cpu.linear_geglu(*arguments)
        return OPS.linear_geglu.default(*arguments)  # type: ignore[no-any-return]
    except Exception:
        check_operands(x, packed, Packed, bias)
        raise


def qlinear(
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    *,
    in_scale: float,
    in_zero: int,
    out_scale: float,
    out_zero: int,
    clamp: tuple[int, int] | None = None,
) -> Tensor:
    """Multiply int8 activations with a quantized weight, with requantization fused into the product.

        y = clamp(round(M * (sum(x * q) + fused_bias))),   M = in_scale * scale / out_scale,
        fused_bias = -in_zero * sum(q) + bias / (in_scale * scale) + out_zero / M

    where x represents in_scale * (x - in_zero), y represents out_scale * (y - out_zero), and q, scale are the weight's: symmetric codes [N,
    K] with one scale per channel or tensor. Sums are exact in int32, the rest is float32 as in `kernels/reference.py`; ties go to even.

    Args:
        x: int8 [..., K], the codes of in_scale * (x - in_zero).
        packed: The weight: symmetric codes [N, K] with one scale per channel or tensor.
        bias: [N] in floating point, or None.
        in_scale: Scale of the input.
        in_zero: Zero point of the input.
        out_scale: Scale of the output.
        out_zero: Zero point of the output.
        clamp: (low, high) in output codes; (out_zero, 127) is ReLU; None is (-128, 127).

    Returns:
        int8 [..., N], the codes of out_scale * (y - out_zero).

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "int8_channel"))
        >>> scales = {"in_scale": 0.1, "in_zero": 0, "out_scale": 0.5, "out_zero": 3}
        >>> hb.qlinear(torch.zeros(2, 32, dtype=torch.int8), packed, **scales).unique()
        tensor([3], dtype=torch.int8)
    """
    try:
        n, k = _matrix(packed)
        low, high = code_range(clamp)
        table = requantization_table(packed, bias, in_scale=in_scale, in_zero=in_zero, out_scale=out_scale, out_zero=out_zero)
        return OPS.qlinear.default(x, packed.data, table, packed.name, n, k, low, high)  # type: ignore[no-any-return]
    except Exception:
        check_operands(x, packed, Packed, bias, clamp=clamp)
        raise


def requantization_table(packed: Packed, bias: Tensor | None, *, in_scale: float, in_zero: int, out_scale: float, out_zero: int) -> Tensor:
    """The table that `halfbyte::qlinear` reads besides the weight, float32 [3, N padded to 32]: offset, multiplier, int32 start (see
    `long_sums.starts`)."""
    n, k = _matrix(packed)
    check_requantization(packed.format, in_scale, in_zero, out_scale, out_zero)
    sums, scale = integer_sums(packed, n, k, 1)
    if bias is not None:
        check_bias(bias, n, packed.device)
    table = torch.zeros(3, round_up(n, TABLE_PANEL), device=packed.device, dtype=torch.float32)
    table[:, :n] = requantization_rows(starts(sums.flatten(), k), scale, bias, in_scale, in_zero, out_scale, out_zero)
    return table


def integer_sums(packed: Packed | PackedConv, n: int, k: int, taps: int) -> tuple[Tensor, Tensor]:
    """Sums of the codes of each of N outputs and of `taps` parts of K, int32 [N, taps], and the outputs' scales, float64 [N]."""
    key = "integer_sums", writes_to(packed.data)
    sums: tuple[Tensor, Tensor] | None = packed.calls.get(key)
    if sums is None:
        codes = unpack(packed)
        scales = codes.scale.double().expand(n, 1).flatten() if k else codes.scale.new_zeros(n, dtype=torch.float64)
        sums = packed.calls[key] = codes.values().reshape(n, taps, k // taps).sum(2, dtype=torch.int32), scales
    return sums


def requantization_rows(
    sums: Tensor, scale: Tensor, bias: Tensor | None, in_scale: float, in_zero: int, out_scale: float, out_zero: int
) -> Tensor:
    """Offset, multiplier and int32 start of N outputs, float32 [3, N], from the sums of their codes (int32) and their scales (float64)."""
    offset = torch.full_like(scale, float(out_zero)) if bias is None else bias.float().double() / out_scale + out_zero
    return torch.stack((offset.float(), (scale * (in_scale / out_scale)).float(), (sums * -in_zero).view(torch.float32)))


def embedding(ids: Tensor, packed: Packed, dtype: torch.dtype = torch.float32) -> Tensor:
    """Look up rows of a quantized weight [N, K].

    Args:
        ids: int64 or int32 [...], each in 0 … N - 1. Another id is an error on the CPU. On a GPU its row is NaN: checking ids would
            synchronize with the device.
        packed: The weight.
        dtype: The dtype of the rows.

    Returns:
        The dequantized rows [..., K].

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> hb.embedding(torch.tensor([0, 7]), packed).shape
        torch.Size([2, 32])
    """
    check_type(ids, Tensor, "the first argument is the ids, a tensor", "pass torch.as_tensor(ids), and the packed weight second")
    n, k = _matrix(packed)
    try:
        if plain(ids):
            run = cpu.embedding if ids.is_cpu else gpu_ops().embedding
            return run(ids, packed.data, packed.name, n, k, dtype)
        return OPS.embedding.default(ids, packed.data, packed.name, n, k, dtype)  # type: ignore[no-any-return]
    except Exception:
        check_plain_tensor(ids, "the input")
        raise


def dequantize(packed: Packed | PackedConv | Codes, dtype: torch.dtype = torch.float32) -> Tensor:
    """Dequantize a weight.

    Args:
        packed: A packed weight, or codes.
        dtype: The dtype of the result.

    Returns:
        The weight in its logical shape [..., N, K], of a convolution [Co, Ci/groups, Kh, Kw]; of Codes in their shape.

    Example:
        >>> packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
        >>> hb.dequantize(packed).dtype
        torch.float32
    """
    kinds = (Packed, PackedConv, Codes)
    check_type(packed, kinds, "dequantize takes a weight that quantize or pack has made", "pass quantize(weight, format)")
    if isinstance(packed, Codes):
        return packed.dequantize(dtype)
    if isinstance(packed, PackedConv):
        return torch.ops.halfbyte.dequantize_conv.default(packed.data, packed.name, packed.numbers, dtype)  # type: ignore[no-any-return]
    if len(packed.shape) == 3:
        weight = torch.empty(packed.shape, dtype=dtype, device=packed.device)
        for one, matrix in zip(weight, experts.matrices(packed), strict=True):
            one.copy_(dequantize(matrix, dtype))
        return weight
    *lead, k = packed.shape
    return OPS.dequantize.default(packed.data, packed.name, math.prod(lead), k, dtype).reshape(packed.shape)  # type: ignore[no-any-return]


def _matrix(packed: Packed) -> tuple[int, int]:
    check_type(packed, Packed, "this operation takes a weight that pack has made", "pass pack(quantize(weight, format))")
    if len(packed.shape) != 2:
        remedy = "use grouped_linear" if len(packed.shape) == 3 else "for a convolution use quantize_conv, pack_conv and conv2d"
        raise ArgumentError(f"this operation takes a weight [N, K], got one of shape {list(packed.shape)}: {remedy}")
    return packed.shape[0], packed.shape[1]

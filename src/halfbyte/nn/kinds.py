"""The kinds of modules that are quantized, and for each: quantizing its weight, packing the codes, their error, and the module that
replaces it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import cast, get_args

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.layouts.convolution import Filter, PackedConv, channels_last
from halfbyte.layouts.folding import Fold
from halfbyte.nn.described import CONVOLUTIONS, KINDS
from halfbyte.nn.modules.conv import FloatConv, QuantConv2d, fold_of, image_groups
from halfbyte.nn.modules.experts import QuantExperts, StackedExperts
from halfbyte.nn.modules.quantized import QuantEmbedding, QuantEmbeddingBag, QuantLinear, QuantModule, keep_hooks
from halfbyte.nn.modules.scaled import factor_of
from halfbyte.nn.modules.subclassed import form_of
from halfbyte.nn.modules.transposed import is_conv1d, is_transposed
from halfbyte.nn.modules.weight_view import AnyPacked, pack_like
from halfbyte.nn.static.integer import IntegerModule
from halfbyte.ops.conv.functions import pack_conv, quantize_conv

FLOAT_MODULES = (nn.Linear, nn.Embedding, nn.EmbeddingBag, *get_args(FloatConv), StackedExperts)
_ROWS = 128  # of a weight, from which its error is estimated: all would take longer than quantizing


def kind_of(module: nn.Module) -> str:
    """The kind of a module that is quantized or can be, such as "Linear"; else the name of its class."""
    if isinstance(module, QuantModule):
        return module.kind
    if is_conv1d(module):
        return "Linear"
    found = next((kind for kind, base in zip(KINDS, FLOAT_MODULES, strict=True) if isinstance(module, base)), None)
    return found or type(module).__name__


def codes_shape(module: nn.Module, shape: Sequence[int], fmt: Format) -> tuple[int, ...]:
    """The shape of the codes in `fmt` of a weight of `shape` that belongs to a module like this one. Raises ArgumentError where a
    convolution has no such weight."""
    if isinstance(module, QuantModule) and isinstance(module.packed, PackedConv):
        return replace(module.packed.sizes, format=fmt).codes_shape
    if (fold := fold_of(module)) is None:
        return tuple(shape)
    out, channels, *_ = fold.fold(torch.empty(tuple(shape), device="meta")).shape
    return Filter(fmt, out, channels, fold.image_kernel).codes_shape


def quantize_weight(kind: str, weight: Tensor, fmt: Format, method: str, name: str, fold: Fold | None = None) -> Codes:
    """Quantize the weight of a module of this kind. fold: of a convolution."""
    if kind not in CONVOLUTIONS:
        return ops.quantize(weight, fmt, method, name=name)
    if fold is None:
        return quantize_conv(weight, fmt, method, name=name)
    if fold.zeros and fmt.zero == "offset" and (not isinstance(fmt.block, int) or (weight.shape[0] // fold.groups) % fmt.block):
        raise FormatError(
            f"{name} is completed with zeros, as its stride does not divide its kernel {list(fold.kernel)}, and they share blocks of {fmt} "
            "with other weights, where no code is exactly 0: use a format without an offset, such as int8_channel"
        )
    return quantize_conv(fold.fold(weight), fmt, method, name=name)


def pack_weight(module: nn.Module, codes: Codes, device: torch.device | str) -> AnyPacked:
    """Pack the codes of a module's weight for `device`."""
    if isinstance(module, IntegerModule):
        return pack_like(module.packed, codes, torch.device(device))
    if isinstance(module, FloatConv | QuantConv2d):
        fold = fold_of(module)
        assert fold is not None
        return pack_conv(codes, fold.image_kernel, image_groups(module, fold), device)
    return ops.pack(codes, device)


def quantized_module(
    module: nn.Module, packed: AnyPacked, dtype: torch.dtype, compute: str, activation: str, error: float | None
) -> QuantModule:
    """The quantized module with the weight `packed` that replaces `module`, which may be quantized itself, and keeps its hooks."""
    quantized: QuantModule
    if isinstance(module, IntegerModule):
        quantized = module.with_weight(packed, dtype, error)
    elif isinstance(packed, PackedConv):
        assert isinstance(module, FloatConv | QuantConv2d)
        shared_by = module_activation(activation, packed.format, convolution=True)
        quantized = form_of(module)(packed, module, compute, shared_by, dtype=dtype, error=error)
    elif isinstance(module, nn.Embedding | QuantEmbedding):
        factor = factor_of(module) if isinstance(module, nn.Embedding) else module.embed_scale
        quantized = QuantEmbedding(packed, module.padding_idx, embed_scale=factor, dtype=dtype, error=error)
    elif isinstance(module, nn.EmbeddingBag | QuantEmbeddingBag):
        quantized = QuantEmbeddingBag(packed, module, dtype=dtype, error=error)
    elif isinstance(module, StackedExperts | QuantExperts):
        quantized = QuantExperts(packed, compute, activation, dtype=dtype, error=error)
    else:
        assert isinstance(module, nn.Linear | QuantLinear) or is_conv1d(module)
        bias = cast("Tensor | None", module.bias)
        shared_by = module_activation(activation, packed.format, convolution=False)
        quantized = QuantLinear(packed, bias, compute, shared_by, dtype=dtype, error=error)
    quantized.transposed = is_transposed(module)
    keep_hooks(module, quantized)
    return quantized.train(module.training)


def module_activation(activation: str, fmt: Format, *, convolution: bool) -> str:
    """Return what a scale of a module's quantized activations is shared by, where the config asks for `activation`.

    "image" applies to convolutions whose weight has one scale per channel or tensor and no zero; it means "row" for all others.
    """
    applies = convolution and not isinstance(fmt.block, int) and fmt.zero == "none"
    return "row" if activation == "image" and not applies else activation


def relative_error(weight: Tensor, codes: Codes, kind: str = "Linear", fold: Fold | None = None) -> float:
    """||weight - codes|| / ||weight|| (Frobenius) of the weight of a module of this kind; 0 for a weight of zeros. fold: of a convolution.

    Of more than 128 rows it is an estimate from 128 of them, evenly spread.
    """
    if len(codes.shape) != weight.dim() or weight.dim() != 2:  # experts, or a convolution
        weight = weight if fold is None else fold.fold(weight)
        weight = (weight if kind == "Experts" else channels_last(weight, codes.format)).reshape(-1, codes.shape[-1])
        codes = codes.reshape((weight.shape[0], weight.shape[1]))
    n = codes.shape[0]
    rows = torch.linspace(0, n - 1, min(n, _ROWS), dtype=torch.float32, device=weight.device).round().long()
    w = weight.detach()[rows].float()
    rounded = codes.select(rows.to(codes.data.device)).dequantize().to(w.device)
    return relative_distance(w, rounded)


def relative_distance(weight: Tensor, rounded: Tensor) -> float:
    """||weight - rounded|| / ||weight|| (Frobenius); 0 for a weight of zeros."""
    norm = float(weight.norm())
    return float((weight - rounded).norm()) / norm if norm else 0.0

"""Weights of compressed-tensors, pack-quantized and int-quantized <-> Codes. Nothing is rounded.

    pack-quantized   weight_packed      int32 [N, ceil(K * bits / 32)]  codes as q + 2^(bits-1), lowest bits first along K
                     weight_zero_point  int32 [ceil(N * bits / 32), G]  zero points, likewise, packed along N; older files: int8 [N, G]
                     weight_shape       int64 [2]: N, K
    int-quantized    weight             int8 [N, K]
                     weight_zero_point  int8 [N, G]
    both             weight_scale       [N, G]; [N, 1] per channel; [1] or [] per tensor
                     weight_g_idx       int [K]  the block of each input, where they are not in order (see gptq.py)
    w = weight_scale * (q - weight_zero_point)

All of this follows from dtypes and shapes, except the number of bits and, where groups do not divide K, their size, which the config gives.

Source: github.com/vllm-project/compressed-tensors, compressors/pack_quantized and naive_quantized
"""

from __future__ import annotations

from collections.abc import Mapping
from reprlib import repr as short

import torch
from torch import Tensor

from halfbyte.errors import CheckpointError
from halfbyte.formats.codes import Codes
from halfbyte.formats.spec import Format
from halfbyte.io.weights import zero_points
from halfbyte.io.weights.gptq import order_of

PACKED = ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx")
INTEGER = ("weight", "weight_scale", "weight_zero_point", "weight_g_idx")


def read(parts: Mapping[str, Tensor], bits: int, group_size: object, where: str) -> tuple[Codes, Tensor | None]:
    """The weight [N, K], and the order of its columns (int32 [K]) where it is not that of the inputs. `group_size` is the config's."""
    if "weight_packed" in parts:
        data, n, k = _packed(parts, bits, where)
    else:
        weight = zero_points.take(parts, "weight", (torch.int8,), (None, None), where)
        (n, k), data, bits = weight.shape, zero_points.flip(weight), 8
    scale = parts.get("weight_scale")
    if scale is not None and scale.numel() == 1 and scale.dim() < 2 and n:  # one scale for all: the same for each channel
        parts = {**parts, "weight_scale": scale.reshape(1, 1).expand(n, 1).contiguous()}
    scale = zero_points.take(parts, "weight_scale", zero_points.SCALES, (n, None), where)
    size = group_size_of(k, scale.shape[1], group_size, where)
    order = None
    if "weight_g_idx" in parts:
        g_idx = zero_points.take(parts, "weight_g_idx", (torch.int32, torch.int64), (k,), where)
        order = order_of(g_idx, zero_points.block_of(size, k), where) if bool((g_idx >= 0).all()) else None  # all -1: not used
    if order is not None:
        data = zero_points.reorder(data, bits, order)
    zero = points_of(parts, bits, (n, scale.shape[1]), where)
    return zero_points.codes_of(bits, size, k, data, scale, zero), order


def write(codes: Codes, order: Tensor | None, *, packed: bool) -> dict[str, Tensor]:
    """The tensors of a weight for which `why_not` gives None; as int-quantized unless `packed`."""
    bits, (n, k) = codes.format.bits, codes.shape
    data, zeros = zero_points.unsigned(codes)
    parts = {"weight_scale": codes.scale.contiguous()}
    if order is not None:
        back = order.long().argsort()
        data = zero_points.reorder(data, bits, back)
        parts["weight_g_idx"] = (torch.arange(k, dtype=torch.int32, device=data.device) // codes.format.block_size(k))[back]
    if not packed:
        parts["weight"] = zero_points.flip(data).view(torch.int8)
        if codes.zero is not None:
            parts["weight_zero_point"] = zero_points.flip(zeros.contiguous()).view(torch.int8)
        return parts
    parts |= {"weight_packed": zero_points.words(data), "weight_shape": torch.tensor([n, k], device="cpu")}
    if codes.zero is not None:
        parts["weight_zero_point"] = zero_points.pack(zeros.T, bits).T.contiguous()
    return parts


def why_not(fmt: Format, shape: tuple[int, ...]) -> str | None:
    """Why a weight cannot be written, or None."""
    return zero_points.why_not(fmt, shape, (4, 8), n_multiple=1, k_multiple=1)


def group_size_of(k: int, groups: int, configured: object, where: str) -> int:
    """Return the size of the groups of `k` inputs that share a scale, -1 if there is one group.

    It is the `configured` one if that gives this number of groups, the last of which may be smaller; otherwise that of equal groups.

    Raises:
        CheckpointError: Neither fits.
    """
    if groups == 1:
        return -1
    if type(configured) is int and configured > 0 and -(-k // configured) == groups:
        return configured
    if groups == 0 or k < groups or k % groups:
        what = (
            f"{where} has {groups} scales for each {k} inputs, which do not divide them, and the config's group_size is {short(configured)}"
        )
        raise CheckpointError(f"{what}: the checkpoint is damaged")
    return k // groups


def shape_of(packed: tuple[int, ...], shape: Tensor, bits: int, where: str) -> tuple[int, int]:
    """N and K of a packed weight, from weight_shape; raises CheckpointError where they do not fit."""
    sound = tuple(shape.shape) == (2,) and shape.dtype in (torch.int64, torch.int32)
    n, k = shape.tolist() if sound else (-1, -1)
    if len(packed) != 2 or packed[0] != n or packed[1] != -(-k * bits // 32) or k < 0:
        what = f"{bits}-bit codes of shape {[n, k]} packed as int32 {list(packed)}"
        raise CheckpointError(f"{where} would be {what}, which does not fit: the checkpoint is damaged")
    return n, k


def bits_of(packed: tuple[int, ...], shape: Tensor) -> list[int]:
    """The numbers of bits, of 1 to 8, that codes of this shape have in words of this shape: of rows of 32 codes or more there is one."""
    k = int(shape[1]) if tuple(shape.shape) == (2,) and shape.dtype in (torch.int64, torch.int32) else 0
    return [bits for bits in range(1, 9) if len(packed) == 2 and k > 0 and packed[1] == -(-k * bits // 32)]


def points_of(parts: Mapping[str, Tensor], bits: int, shape: tuple[int, int], where: str) -> Tensor | None:
    """The zero points of unsigned codes, uint8 [N, blocks]; None for a symmetric weight, which stores none."""
    stored = parts.get("weight_zero_point")
    if stored is None:
        return None
    n, blocks = shape
    if stored.dtype == torch.int8:  # not packed
        matrix = stored.reshape(shape) if stored.numel() == n * blocks else stored
        signed = zero_points.take({"weight_zero_point": matrix}, "weight_zero_point", (torch.int8,), shape, where)
        return (signed.to(torch.int16) + zero_points.middle(bits)).to(torch.uint8)
    words = zero_points.take(parts, "weight_zero_point", (torch.int32,), (-(-n * bits // 32), blocks), where)
    return zero_points.unpack(words.T, bits, n).T.contiguous()


def _packed(parts: Mapping[str, Tensor], bits: int, where: str) -> tuple[Tensor, int, int]:
    words = zero_points.take(parts, "weight_packed", (torch.int32,), (None, None), where)
    shape = zero_points.take(parts, "weight_shape", (torch.int64, torch.int32), (2,), where)
    n, k = shape_of(tuple(words.shape), shape, bits, where)
    data = zero_points.bytes_of(words)[:, : -(-k * bits // 8)].contiguous()
    if bits == 4 and k % 2:
        data[:, -1] &= 15  # the padding of a row may have any value
    return data, n, k

"""The byte blocks of ggml and InferLLM: each block of 32 weights with its scale beside its codes, as their files hold them.

Blocks of a row follow one another without padding; numbers are little-endian; nibbles hold q + 8 (q4_0) or q (q4_1).

    q4_0           d f16 | 16 bytes: q[0] and q[16], q[1] and q[17], …, low nibble first            18 bytes
    q4_1           d f16 | m f16 | 16 bytes as q4_0                  w = d * q + m                   20
    q8_0           d f16 | 32 int8                                                                  34
    q8_1           d f16 | s f16 | 32 int8                           s = d * sum(q)                  36
    inferllm_q4_0  d f32 | 16 bytes: q[0] and q[1], q[2] and q[3], …, low nibble first              20
    inferllm_q8_0  d f32 | 32 int8                                                                  36

Sources: block_q4_0, block_q4_1, block_q8_0, block_q8_1 in ggml-common.h; BlockQ40, BlockQ80 in InferLLM's
src/kern/kernel_define.h. ggml makes q8_1 only of activations, on the fly, and computes s with the unrounded float32 d, so
that its s may differ by rounding from the one written here from the stored d.
"""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes, pack_nibbles, unpack_nibbles
from halfbyte.formats.spec import Format

_SIZE = 32  # weights of a block


def row_bytes(fmt: Format, k: int) -> int:
    """Bytes of a row of `k` weights. Raises FormatError where the format has no blocks or `k` is not a multiple of 32."""
    if fmt.family not in ("ggml", "inferllm"):
        raise FormatError(f"{fmt} has no block encoding: only the formats of ggml and InferLLM have one, for example q4_0")
    if k % _SIZE:
        raise FormatError(
            f"a row of {fmt} blocks has a multiple of {_SIZE} weights, got {k}: pad the weight, or take a format without blocks, "
            f"for example int{fmt.bits}_g32"
        )
    return k // _SIZE * (_head_bytes(fmt) + _SIZE * fmt.bits // 8)


def to_blocks(codes: Codes) -> Tensor:
    """Codes [..., N, K] -> their blocks, uint8 [..., N, row_bytes]."""
    fmt, shape = codes.format, codes.shape
    width = row_bytes(fmt, shape[-1])
    blocks = (*shape[:-1], shape[-1] // _SIZE)
    values = [codes.scale] if codes.zero is None else [codes.scale, codes.zero]
    if fmt.sums:
        values.append(_sums(codes, blocks))
    parts = [value.unsqueeze(-1).contiguous().view(torch.uint8) for value in values]
    if fmt.bits == 8:
        parts.append(codes.data.contiguous().view(torch.uint8).reshape(*blocks, _SIZE))
    else:
        parts.append(_reorder(codes.data.reshape(*blocks, _SIZE // 2), to_halves=True, fmt=fmt))
    return torch.cat(parts, dim=-1).reshape(*shape[:-1], width)


def from_blocks(fmt: Format, shape: tuple[int, ...], data: Tensor) -> Codes:
    """The inverse of `to_blocks`: uint8 [..., N, row_bytes] -> Codes of `shape` [..., N, K]. The sums of q8_1 are left out."""
    wanted = (*shape[:-1], row_bytes(fmt, shape[-1]))
    if data.dtype != torch.uint8 or tuple(data.shape) != wanted:
        raise FormatError(
            f"the blocks of a {fmt} weight of shape {list(shape)} are uint8 {list(wanted)}, got {data.dtype} {list(data.shape)}"
        )
    head, size = _head_bytes(fmt), fmt.scale.itemsize
    count = shape[-1] // _SIZE
    blocks = data.reshape(*shape[:-1], count, head + _SIZE * fmt.bits // 8)

    def numbers(at: int) -> Tensor:
        return blocks[..., at : at + size].contiguous().view(fmt.scale).squeeze(-1)

    codes = blocks[..., head:]
    if fmt.bits == 8:
        codes = codes.contiguous().view(torch.int8)
    else:
        codes = _reorder(codes, to_halves=False, fmt=fmt)
    flat = codes.reshape(*shape[:-1], shape[-1] * fmt.bits // 8)
    return Codes(fmt, tuple(shape), flat, numbers(0), None if fmt.zero == "none" else numbers(size))


def _head_bytes(fmt: Format) -> int:
    """Bytes of a block before its codes: a scale, and an offset or a sum."""
    return fmt.scale.itemsize * (2 if fmt.sums or fmt.zero != "none" else 1)


def _reorder(packed: Tensor, *, to_halves: bool, fmt: Format) -> Tensor:
    """Reorders the nibbles of blocks [..., 16]: a byte holds neighbours (the order of Codes) or elements i and i + 16 (ggml's)."""
    if fmt.family != "ggml":
        return packed
    nibbles = unpack_nibbles(packed, _SIZE).unflatten(-1, (2, _SIZE // 2) if to_halves else (_SIZE // 2, 2))
    return pack_nibbles(nibbles.transpose(-1, -2).flatten(-2))


def _sums(codes: Codes, blocks: tuple[int, ...]) -> Tensor:
    sums = codes.data.reshape(*blocks, _SIZE).sum(dim=-1, dtype=torch.float32) * codes.scale.float()
    stored = sums.to(codes.format.scale)
    if not bool(torch.isfinite(stored).all()):
        raise FormatError(
            f"a block of these {codes.format} codes has scale * sum(q) = {float(sums.abs().max()):.6g}, more than float16 holds: "
            "use q8_0, whose blocks have no sums"
        )
    return stored

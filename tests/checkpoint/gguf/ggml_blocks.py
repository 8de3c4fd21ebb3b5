"""The byte blocks of ggml and InferLLM, written out: each block of 32 weights holds its scale and its codes, as in their files.

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
from halfbyte.formats.codes import Codes
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
        packed = codes.data.reshape(-1, _SIZE // 2)
        parts.append((_to_halves(packed) if fmt.family == "ggml" else packed).reshape(*blocks, _SIZE // 2))
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
    elif fmt.family == "ggml":
        codes = _from_halves(codes.reshape(-1, _SIZE // 2))
    flat = codes.reshape(*shape[:-1], shape[-1] * fmt.bits // 8)
    return Codes(fmt, tuple(shape), flat, numbers(0), None if fmt.zero == "none" else numbers(size))


def _head_bytes(fmt: Format) -> int:
    """Bytes of a block before its codes: a scale, and an offset or a sum."""
    return fmt.scale.itemsize * (2 if fmt.sums or fmt.zero != "none" else 1)


_LOW = 0x0F0F0F0F0F0F0F0F  # the lower nibbles of eight bytes


def _to_halves(packed: Tensor) -> Tensor:
    """Bytes of blocks [B, 16] of neighbours (the order of Codes) -> of elements i and i + 16 (ggml's)."""
    aligned = packed.clone() if packed.storage_offset() % 8 else packed  # as torch wants it
    first, second = aligned.view(torch.int64).unbind(-1)
    even, odd = first & _LOW | (second & _LOW) << 4, first >> 4 & _LOW | second & ~_LOW
    code_pairs = [part.contiguous().unsqueeze(-1).view(torch.uint8).to(torch.int16) for part in (even, odd)]
    return (code_pairs[0] | code_pairs[1] << 8).view(torch.uint8)


def _from_halves(halves: Tensor) -> Tensor:
    """The inverse."""
    code_pairs = halves.view(torch.int16)
    even, odd = (part.to(torch.uint8).view(torch.int64) for part in (code_pairs, code_pairs >> 8))
    return torch.cat((even & _LOW | (odd & _LOW) << 4, even >> 4 & _LOW | odd & ~_LOW), dim=-1).view(torch.uint8)


def _sums(codes: Codes, blocks: tuple[int, ...]) -> Tensor:
    sums = codes.data.reshape(*blocks, _SIZE).sum(dim=-1, dtype=torch.float32) * codes.scale.float()
    stored = sums.to(codes.format.scale)
    if not bool(torch.isfinite(stored).all()):
        raise FormatError(
            f"a block of these {codes.format} codes has scale * sum(q) = {float(sums.abs().max()):.6g}, more than float16 holds: "
            "use q8_0, whose blocks have no sums"
        )
    return stored

"""Encodes Codes as blocks of ggml's tensor types: the inverse of `ggml.decode`. Nothing is rounded.

`checkpoint/gguf/export.py` asks `candidates` which types may hold a weight's format, `holds` whether one of them holds its codes and scales
exactly, and calls `encode`. The byte orders are those in the docstring of ggml.py.

The scales of K-quants and of iq4_xs are products d s of one float16 d for each block of 256 weights and small integers s. Codes only have
the products, so d must be recovered: the scale of largest magnitude is d times one of the few possible s, and each of these is tried
(`_factor_scales`). d and s may differ from those of the file that the codes were read from (2 d and s / 2 are as good), their products do
not.

tq1_0 and the types of grids.py are read only: they have no entry in `_SCALE_WRITERS`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes, unpack_nibbles
from halfbyte.formats.ggml import NUMBERS, TYPES, BlockType
from halfbyte.formats.spec import Format

_CHUNK = 1 << 22  # weights that are encoded at a time


def candidates(fmt: Format, k: int) -> list[BlockType]:
    """List the types that may hold weights of a format, the best first.

    Args:
        fmt: The format of the codes.
        k: Elements of a row.

    Returns:
        First the type that is read as `fmt`, which may have fewer codes than it; then types that hold all its codes and any of its scales
        (`is_certain`); then those that hold all its codes but only some scales. Smaller types come before larger ones.
    """
    kinds = (TYPES[NUMBERS[name]] for name in _SCALE_WRITERS)
    fitting = [kind for kind in kinds if _may_hold(kind, fmt, k)]
    return sorted(fitting, key=lambda kind: (kind.format != fmt, not is_certain(kind, fmt), kind.nbytes / kind.weights))


def is_certain(kind: BlockType, fmt: Format) -> bool:
    """Return whether a candidate holds every weight of `fmt`, so that none needs to be read to know it."""
    return _SCALE_WRITERS[kind.name].any_float16 and fmt.scale == torch.float16 and _has_all_codes(kind, fmt)


def holds(kind: BlockType, codes: Codes) -> bool:
    """Return whether a candidate holds these codes and scales exactly."""
    return all(_write_scales(kind, _empty_blocks(kind, len(chunk.q)), chunk) for chunk in _chunks(kind, codes))


def encode(kind: BlockType, codes: Codes) -> Tensor:
    """Encode codes as blocks.

    Args:
        kind: One of `candidates` for the codes' format.
        codes: Of shape [..., N, K].

    Returns:
        The blocks, uint8 [..., N, row_bytes].

    Raises:
        FormatError: The type does not hold these codes or scales exactly.
    """
    out = _empty_blocks(kind, codes.rows * codes.shape[-1] // kind.weights)
    first = 0
    for chunk in _chunks(kind, codes):
        blocks = out[first : first + len(chunk.q)]
        if not _write_scales(kind, blocks, chunk):
            raise FormatError(f"{kind.name} does not hold these {codes.format} codes with their scales: write them in another type")
        for field in kind.fields:
            bits = chunk.q if field.bits == 8 else chunk.q >> field.shift & (1 << field.bits) - 1
            blocks[:, field.start : field.start + field.nbytes] = _pack_bits(bits, field.run, field.bits)
        first += len(chunk.q)
    return out.reshape(*codes.shape[:-1], kind.row_bytes(codes.shape[-1]))


def _block_size(kind: BlockType) -> int:
    """Return how many weights of a type share a scale."""
    block = kind.format.block
    assert isinstance(block, int)
    return block


def _may_hold(kind: BlockType, fmt: Format, k: int) -> bool:
    if k % kind.weights or fmt.block_size(k) % _block_size(kind) or (kind.format.zero == "offset") != (fmt.zero == "offset"):
        return False
    return kind.format == fmt or _has_all_codes(kind, fmt)


def _has_all_codes(kind: BlockType, fmt: Format) -> bool:
    """Return whether a type has each code of `fmt`; of a format with zero points, each difference q - point."""
    if kind.format.codebook:
        return kind.format.codebook == fmt.codebook
    least = -kind.point if kind.point or not kind.format.signed else -(1 << _code_bits(kind) - 1)
    least_wanted = fmt.q_min - fmt.q_max if fmt.zero == "point" else fmt.q_min
    return least <= least_wanted and fmt.q_max <= least + (1 << _code_bits(kind)) - 1


def _code_bits(kind: BlockType) -> int:
    """Return the bits of a code in a block; its format may have more (q2_K is read as 4-bit codes)."""
    return max(field.shift + field.bits for field in kind.fields)


@dataclass(frozen=True)
class _Chunk:
    """Some rows of a weight, cut into B blocks of a type.

    Attributes:
        q: Codes as the type stores them, uint8 [B, weights]. One that the type lacks is at least 2^bits, as differences wrap modulo 256.
        scale: float64 [B, scales of a block].
        offset: The same for a format with offsets; else None.
    """

    q: Tensor
    scale: Tensor
    offset: Tensor | None


def _chunks(kind: BlockType, codes: Codes) -> Iterator[_Chunk]:
    """Yield a weight, a few rows at a time.

    The first chunk is a single row: where the scales are not those of the type, that row nearly always tells, and no more is converted.
    """
    if codes.format.codebook and not kind.format.codebook:
        codes = codes.integers()
    fmt, n, k, block = codes.format, codes.rows, codes.shape[-1], _block_size(kind)
    data = codes.data.reshape(n, -1)

    def per_block(numbers: Tensor, rows: slice) -> Tensor:
        """Repeat scales or zeros of longer blocks of `codes` for each block of the type: [rows, K / block]."""
        numbers = numbers.reshape(1, 1).expand(n, 1) if fmt.block == "tensor" else numbers.reshape(n, -1)
        return numbers[rows].repeat_interleave(fmt.block_size(k) // block, dim=1)[:, : k // block]

    # Codes store signed 4-bit integers as q + 8 (q - q_min) and 8-bit ones as q; the type stores q + point.
    shift = 0 if kind.format.codebook else kind.point + (fmt.q_min if fmt.bits == 4 else 0) & 255
    first, count = 0, 1
    while first < n and k:
        rows = slice(first, min(n, first + count))
        q = unpack_nibbles(data[rows], k) if fmt.bits == 4 else data[rows].view(torch.uint8)
        scale, offset = per_block(codes.scale, rows), None
        if codes.zero is not None and fmt.zero == "point":
            q = q - per_block(codes.zero, rows).repeat_interleave(block, dim=1)
        elif codes.zero is not None:
            offset = per_block(codes.zero, rows).reshape(-1, kind.weights // block).double()
        if shift:
            q = q + shift
        yield _Chunk(q.reshape(-1, kind.weights), scale.reshape(-1, kind.weights // block).double(), offset)
        first, count = rows.stop, max(1, _CHUNK // k)


def _empty_blocks(kind: BlockType, count: int) -> Tensor:
    return torch.empty(count, kind.nbytes, dtype=torch.uint8, device="cpu")


def _write_scales(kind: BlockType, blocks: Tensor, chunk: _Chunk) -> bool:
    """Write the scales and offsets of a chunk, not its codes, into blocks uint8 [B, nbytes].

    Returns:
        False where the type lacks one of the codes, or does not hold a scale or offset exactly; `blocks` are incomplete then.
    """
    bits = _code_bits(kind)
    if bits < 8 and int(chunk.q.max()) >= 1 << bits:
        return False
    numbers = (chunk.scale,) if chunk.offset is None else (chunk.scale, chunk.offset)
    return _SCALE_WRITERS[kind.name].write(blocks, *numbers)


def _pack_bits(fields: Tensor, run: int, bits: int) -> Tensor:
    """Pack numbers of `bits` bits, uint8 [B, n], into bytes [B, n * bits / 8]: the inverse of `unpack_bits` of ggml.py."""
    groups = fields.reshape(len(fields), -1, 8 // bits, run)
    out = groups[:, :, 0]
    for i in range(1, 8 // bits):
        out = out | groups[:, :, i] << i * bits
    return out.flatten(1)


def _write_float16(blocks: Tensor, start: int, numbers: Tensor) -> bool:
    """Write a float16 [B, 1] at byte `start` of each block; return whether all are float16 numbers."""
    half = numbers.half()
    blocks[:, start : start + 2] = half.contiguous().view(torch.uint8)
    return torch.equal(half.double(), numbers)


def _factor_scales(blocks: Tensor, start: int, products: Tensor, low: int, high: int) -> Tensor | None:
    """Factor the scales of each block into a float16 d, which is written at byte `start`, and integers s.

    Division is in float64: a quotient of numbers of at most 24 and 11 bits is a whole number only if the product is exact.

    Args:
        blocks: uint8 [B, nbytes].
        start: The first byte of d.
        products: d s, float64 [B, n].
        low: The least s.
        high: The largest s.

    Returns:
        s - low, uint8 [B, n]; None where a block has no such d. Where `low` is 0, this is s.
    """
    largest = products.gather(1, products.abs().argmax(1, keepdim=True))
    d, s = torch.zeros_like(largest), torch.zeros_like(products)
    pending = largest[:, 0].nonzero()[:, 0]  # blocks without a d yet; d = 0 where all products are 0
    # Candidates for the s of the largest product, first those that quantizers choose. Of the negative ones only `low` is tried: with any
    # other, all of -s are in the range, too, so that -d and -s do as well.
    for s_of_largest in (*([low] if low < 0 else []), *range(high, 0, -1)):
        if not len(pending):
            break
        tried_d = largest[pending] / s_of_largest
        tried_s = products[pending] / tried_d
        whole = (tried_s == tried_s.round()) & (tried_s >= low) & (tried_s <= high)
        fits = ((tried_d == tried_d.half()) & whole.all(1, keepdim=True))[:, 0]
        d[pending[fits]], s[pending[fits]] = tried_d[fits], tried_s[fits]
        pending = pending[~fits]
    if len(pending):
        return None
    _write_float16(blocks, start, d)
    return (s - low).to(torch.uint8)


def _write_q2_k(blocks: Tensor, scale: Tensor, offset: Tensor) -> bool:
    s, m = _factor_scales(blocks, 80, scale, 0, 15), _factor_scales(blocks, 82, -offset, 0, 15)
    if s is None or m is None:
        return False
    blocks[:, :16] = s | m << 4
    return True


def _write_q3_k(blocks: Tensor, scale: Tensor) -> bool:
    if (s := _factor_scales(blocks, 108, scale, -32, 31)) is None:
        return False
    blocks[:, 96:104], blocks[:, 104:108] = _pack_bits(s & 15, 8, 4), _pack_bits(s >> 4, 4, 2)
    return True


def _write_q4_k(blocks: Tensor, scale: Tensor, offset: Tensor) -> bool:
    """Write the scales of q4_K and q5_K."""
    s, m = _factor_scales(blocks, 0, scale, 0, 63), _factor_scales(blocks, 2, -offset, 0, 63)
    if s is None or m is None:
        return False
    blocks[:, 4:8], blocks[:, 8:12] = (each[:, :4] | each[:, 4:] >> 4 << 6 for each in (s, m))
    blocks[:, 12:16] = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return True


def _write_q6_k(blocks: Tensor, scale: Tensor) -> bool:
    if (s := _factor_scales(blocks, 208, scale, -128, 127)) is None:
        return False
    blocks[:, 192:208] = s + 128  # back from s + 128 to s as int8, modulo 256
    return True


def _write_iq4_xs(blocks: Tensor, scale: Tensor) -> bool:
    if (s := _factor_scales(blocks, 0, scale, -32, 31)) is None:
        return False
    blocks[:, 2:4], blocks[:, 4:8] = _pack_bits(s >> 4, 1, 2), _pack_bits(s & 15, 1, 4)
    return True


def _write_mxfp4(blocks: Tensor, scale: Tensor) -> bool:
    mantissa, exponent = torch.frexp(scale)  # scale = mantissa * 2^exponent with a mantissa in [1/2, 1): 1/2 for powers of two
    blocks[:, :1] = exponent + 127
    return bool(((mantissa == 0.5) & (exponent >= -127) & (exponent <= 128)).all())


def _write_nvfp4(blocks: Tensor, scale: Tensor) -> bool:
    stored = (2 * scale).to(torch.float8_e4m3fn)
    blocks[:, :4] = stored.view(torch.uint8)
    return torch.equal(stored.double(), 2 * scale) and not bool(scale.signbit().any())


def _write_scale(start: int = 0) -> Callable[[Tensor, Tensor], bool]:
    return lambda blocks, scale: _write_float16(blocks, start, scale)


def _write_scale_and_offset(blocks: Tensor, scale: Tensor, offset: Tensor) -> bool:
    return _write_float16(blocks, 0, scale) and _write_float16(blocks, 2, offset)


@dataclass(frozen=True)
class _ScaleWriter:
    """How the scales of a type are written.

    Attributes:
        write: Writes scales and, of types with offsets, these, float64 [B, n], into blocks uint8 [B, nbytes], and returns whether the type
            holds them exactly.
        any_float16: Whether it holds all float16 scales and offsets.
    """

    write: Callable[..., bool]
    any_float16: bool = False


# The types that are written, by name.
_SCALE_WRITERS = {
    "q4_0": _ScaleWriter(_write_scale(), any_float16=True),
    "q5_0": _ScaleWriter(_write_scale(), any_float16=True),
    "q8_0": _ScaleWriter(_write_scale(), any_float16=True),
    "iq4_nl": _ScaleWriter(_write_scale(), any_float16=True),
    "q4_1": _ScaleWriter(_write_scale_and_offset, any_float16=True),
    "q5_1": _ScaleWriter(_write_scale_and_offset, any_float16=True),
    "tq2_0": _ScaleWriter(_write_scale(start=64), any_float16=True),
    "q2_K": _ScaleWriter(_write_q2_k),
    "q3_K": _ScaleWriter(_write_q3_k),
    "q4_K": _ScaleWriter(_write_q4_k),
    "q5_K": _ScaleWriter(_write_q4_k),
    "q6_K": _ScaleWriter(_write_q6_k),
    "iq4_xs": _ScaleWriter(_write_iq4_xs),
    "mxfp4": _ScaleWriter(_write_mxfp4),
    "nvfp4": _ScaleWriter(_write_nvfp4),
}

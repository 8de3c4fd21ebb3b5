"""The encoding of codes as blocks of ggml's types, the inverse of ggml.py: only where a type holds them with all numbers unchanged.

Scales of K-quants and of iq4_xs are products d s of a float16 for 256 weights and small integers. The largest scale of these weights is d
times one of those few integers: each is tried, first the largest one, which quantizers choose. A d with which all scales are such products
gives them back exactly; where there is none, the type does not hold them. d and s need not be those of the file that the scales came from
(2 d and s / 2 are as good), but their products are.

The byte orders are those of ggml.py. The tables of iq1, iq2 and iq3 are not searched: these types are only read.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes, unpack_nibbles
from halfbyte.formats.ggml import NUMBERS, TYPES, BlockType
from halfbyte.formats.spec import Format

_CHUNK = 1 << 22  # weights that are encoded at a time


def candidates(fmt: Format, k: int) -> list[BlockType]:
    """The types that may hold codes of `fmt` in rows of `k`: those that are read as `fmt`, of which some have fewer codes, and those that
    have each of its codes. These first, then those that do whatever the scales are, the smaller before the larger."""
    kinds = (TYPES[NUMBERS[name]] for name in _SCALES)
    found = (kind for kind in kinds if _may_hold(kind, fmt, k))
    return sorted(found, key=lambda kind: (kind.format != fmt, not is_certain(kind, fmt), kind.nbytes / kind.weights))


def is_certain(kind: BlockType, fmt: Format) -> bool:
    """Whether a candidate holds all codes of `fmt`, whatever they and their scales are."""
    return isinstance(_SCALES[kind.name], partial) and fmt.scale == torch.float16 and _has_all_codes(kind, fmt)


def holds(kind: BlockType, codes: Codes) -> bool:
    """Whether a candidate holds these codes."""
    return all(_put_scales(kind, _blocks(kind, len(part[0])), *part) for part in _parts(kind, codes))


def encode(kind: BlockType, codes: Codes) -> Tensor:
    """Codes [..., N, K] -> the blocks of a candidate, uint8 [..., N, row_bytes]. Raises FormatError where it does not hold them."""
    out = _blocks(kind, codes.rows * codes.shape[-1] // kind.weights)
    at = 0
    for q, numbers in _parts(kind, codes):
        blocks = out[at : at + len(q)]
        if not _put_scales(kind, blocks, q, numbers):
            raise FormatError(f"{kind.name} does not hold these {codes.format} codes with their scales: write them in another type")
        for field in kind.fields:
            part = q if field.bits == 8 else q >> field.place & (1 << field.bits) - 1
            blocks[:, field.at : field.at + field.size] = _bytes_of(part, field.run, field.bits)
        at += len(q)
    return out.reshape(*codes.shape[:-1], kind.row_bytes(codes.shape[-1]))


def _may_hold(kind: BlockType, fmt: Format, k: int) -> bool:
    block = kind.format.block
    assert isinstance(block, int)
    if k % kind.weights or fmt.block_size(k) % block or (kind.format.zero == "offset") != (fmt.zero == "offset"):
        return False
    return kind.format == fmt or _has_all_codes(kind, fmt)


def _has_all_codes(kind: BlockType, fmt: Format) -> bool:
    if kind.format.codebook:
        return kind.format.codebook == fmt.codebook
    bits = _bits(kind)
    least = -kind.point if kind.point or not kind.format.signed else -(1 << bits - 1)
    # With a zero point codes are differences.
    return least <= fmt.q_min - fmt.q_max * (fmt.zero == "point") and fmt.q_max <= least + (1 << bits) - 1


def _bits(kind: BlockType) -> int:
    """Bits of a code in the file."""
    return max(field.place + field.bits for field in kind.fields)


def _parts(kind: BlockType, codes: Codes) -> Iterator[tuple[Tensor, list[Tensor]]]:
    """For some rows at a time: codes as the type stores them, uint8 [blocks, weights], or beyond its range where it does not hold them;
    scales and, with offsets, these, float64 [blocks, n]. First a single row: other scales than a type has are found there."""
    if codes.format.codebook and not kind.format.codebook:
        codes = codes.integers()
    fmt, n, k = codes.format, codes.rows, codes.shape[-1]
    block = kind.format.block
    assert isinstance(block, int)
    data = codes.data.reshape(n, -1)
    single = fmt.block == "tensor"
    numbers = [t.expand(n, 1) if single else t.reshape(n, -1) for t in (codes.scale, codes.zero) if t is not None]
    step, first = max(1, _CHUNK // max(1, k)), 0
    while first < n and k:
        rows = slice(first, min(n, first + (step if first else 1)))
        of_blocks = [t[rows].repeat_interleave(fmt.block_size(k) // block, dim=1)[:, : k // block] for t in numbers]
        q = unpack_nibbles(data[rows], k) if fmt.bits == 4 else data[rows].view(torch.uint8)
        if fmt.zero == "point":
            q = q - of_blocks.pop().repeat_interleave(block, dim=1)
        if not kind.format.codebook and (added := kind.point + (fmt.q_min if fmt.bits == 4 else 0) & 255):
            q = q + added
        yield q.reshape(-1, kind.weights), [t.reshape(-1, kind.weights // block).double() for t in of_blocks]
        first = rows.stop


def _blocks(kind: BlockType, count: int) -> Tensor:
    return torch.empty(count, kind.nbytes, dtype=torch.uint8, device="cpu")


def _put_scales(kind: BlockType, blocks: Tensor, q: Tensor, numbers: list[Tensor]) -> bool:
    """Write the scales, but not the codes, into blocks uint8 [B, bytes]; False where the type does not hold one of either."""
    bits = _bits(kind)
    return (bits == 8 or int(q.max()) < 1 << bits) and _SCALES[kind.name](blocks, *numbers)


def _bytes_of(fields: Tensor, run: int, bits: int) -> Tensor:
    """Bit fields, uint8 [B, n] -> bytes [B, n * bits / 8]: the inverse of ggml's `_fields`."""
    groups = fields.reshape(len(fields), -1, 8 // bits, run)
    out = groups[:, :, 0]
    for i in range(1, 8 // bits):
        out = out | groups[:, :, i] << i * bits
    return out.flatten(1)


# Scales, and offsets, float64 [B, n] of each, into blocks; whether they are in them unchanged


def _put_half(b: Tensor, at: int, numbers: Tensor) -> bool:
    half = numbers.half()
    b[:, at : at + 2] = half.contiguous().view(torch.uint8)
    return torch.equal(half.double(), numbers)


def _halves(b: Tensor, *numbers: Tensor, at: tuple[int, ...]) -> bool:
    return all(_put_half(b, place, each) for place, each in zip(at, numbers, strict=True))


def _put_products(b: Tensor, at: int, numbers: Tensor, low: int, high: int) -> Tensor | None:
    """Find numbers [B, n] as d s with integers s in low … high, and put d at byte `at`. s - min(low, 0) [B, n] as uint8, or None."""
    top = numbers.gather(1, numbers.abs().argmax(1, keepdim=True))
    d, s = torch.zeros_like(top), torch.zeros_like(numbers)
    left = top[:, 0].nonzero()[:, 0]
    for most in (*range(low, min(low, 0) + (low < 0)), *range(high, 0, -1)):
        if not len(left):
            break
        factor = top[left] / most
        found = numbers[left] / factor
        good = (factor == factor.half()) & ((found == found.round()) & (found >= low) & (found <= high)).all(1, keepdim=True)
        done = good[:, 0]
        d[left[done]], s[left[done]] = factor[done], found[done]
        left = left[~done]
    if len(left):
        return None
    _put_half(b, at, d)
    return (s - low).to(torch.uint8)


def _q2_k(b: Tensor, scale: Tensor, offset: Tensor) -> bool:
    s, m = _put_products(b, 80, scale, 0, 15), _put_products(b, 82, -offset, 0, 15)
    if s is None or m is None:
        return False
    b[:, :16] = s | m << 4
    return True


def _q3_k(b: Tensor, scale: Tensor) -> bool:
    if (s := _put_products(b, 108, scale, -32, 31)) is None:
        return False
    b[:, 96:104], b[:, 104:108] = _bytes_of(s & 15, 8, 4), _bytes_of(s >> 4, 4, 2)
    return True


def _q4_k(b: Tensor, scale: Tensor, offset: Tensor) -> bool:
    """Also of q5_K."""
    s, m = _put_products(b, 0, scale, 0, 63), _put_products(b, 2, -offset, 0, 63)
    if s is None or m is None:
        return False
    b[:, 4:8], b[:, 8:12] = (each[:, :4] | each[:, 4:] >> 4 << 6 for each in (s, m))
    b[:, 12:16] = s[:, 4:] & 15 | (m[:, 4:] & 15) << 4
    return True


def _q6_k(b: Tensor, scale: Tensor) -> bool:
    if (s := _put_products(b, 208, scale, -128, 127)) is None:
        return False
    b[:, 192:208] = s + 128  # modulo 256
    return True


def _iq4_xs(b: Tensor, scale: Tensor) -> bool:
    if (s := _put_products(b, 0, scale, -32, 31)) is None:
        return False
    b[:, 2:4], b[:, 4:8] = _bytes_of(s >> 4, 1, 2), _bytes_of(s & 15, 1, 4)
    return True


def _mxfp4(b: Tensor, scale: Tensor) -> bool:
    mantissa, exponent = torch.frexp(scale)
    b[:, :1] = exponent + 127
    return bool(((mantissa == 0.5) & (exponent >= -127) & (exponent <= 128)).all())


def _nvfp4(b: Tensor, scale: Tensor) -> bool:
    stored = (2 * scale).to(torch.float8_e4m3fn)
    b[:, :4] = stored.view(torch.uint8)
    return torch.equal(stored.double(), 2 * scale) and not bool(scale.signbit().any())


# The types that are written.
_SCALES: dict[str, Callable[..., bool]] = {
    **{name: partial(_halves, at=(0,)) for name in ("q4_0", "q5_0", "q8_0", "iq4_nl")},
    **{name: partial(_halves, at=(0, 2)) for name in ("q4_1", "q5_1")},
    "tq2_0": partial(_halves, at=(64,)),
    "q2_K": _q2_k,
    "q3_K": _q3_k,
    "q4_K": _q4_k,
    "q5_K": _q4_k,
    "q6_K": _q6_k,
    "iq4_xs": _iq4_xs,
    "mxfp4": _mxfp4,
    "nvfp4": _nvfp4,
}

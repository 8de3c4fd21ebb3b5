"""The tensor types of ggml that are read, and the decoding of their blocks to codes, scales and zeros. Nothing is rounded.

Each type maps to a Format whose codes are the file's codes and whose scales are the exact products of the file's scales:
a float16 scale times a 6-bit integer fits a float32. "2-bit" fields are packed four to a byte. Blocks, little-endian, by `block_*` of
ggml-common.h:

    type     weights: bytes                                                                     w of a block      held as
    q4_0     32: d f16 | 16 nibbles                                                             d (q - 8)         q4_0
    q4_1     32: d f16 | m f16 | 16 nibbles                                                     d q + m           q4_1
    q8_0     32: d f16 | 32 int8                                                                d q               q8_0
    q5_0     32: d f16 | 32 high bits | 16 low nibbles                                          d (q - 16)        int5_g32
    q5_1     32: d f16 | m f16 | 32 high bits | 16 low nibbles                                  d q + m           int5_g32_offset
    iq4_nl   32: d f16 | 16 nibbles                                                             d table[q]        iq4_nl
    q2_K    256: 16 x (4-bit scale s, 4-bit minimum m) | 256 2-bit | d f16 | e f16              d s q - e m       int4_g16_offset_f32
    q3_K    256: 256 high bits | 256 2-bit | 16 6-bit scales s | d f16                          d (s - 32)(q - 4) int4_g16_f32
    q4_K    256: d f16 | e f16 | 8 x (6-bit s, 6-bit m) | 128 nibbles                           d s q - e m       int4_g32_offset_f32
    q5_K    256: d f16 | e f16 | 8 x (6-bit s, 6-bit m) | 256 high bits | 128 low nibbles       d s q - e m       int5_g32_offset_f32
    q6_K    256: 128 low nibbles | 256 high 2-bit | 16 int8 scales s | d f16                    d s (q - 32)      int6_g16_f32
    iq4_xs  256: d f16 | 8 6-bit scales s | 128 nibbles                                         d (s - 32) table[q]  iq4_g32_f32
    tq1_0   256: 48 bytes of 5 digits to the base 3 | 4 of 4 | d f16                            d (q - 1)         int4_g256
    tq2_0   256: 256 2-bit | d f16                                                              d (q - 1)         int4_g256
    mxfp4    32: exponent e | 16 nibbles                                                        2^(e-128) table[q]   mxfp4
    nvfp4    64: 4 scales s, float8 e4m3 | 32 nibbles                                           s / 2 table[q]    fp4_g16
    iq…     256: codes that are looked up in tables of vectors: grids.py                        d m q             int8_g16_f32, int8_g32_f32

All but tq1_0 and those of grids.py are written, too: ggml_encoding.py.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial, reduce
from typing import Protocol

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats import grids
from halfbyte.formats.codes import Codes, pack_nibbles
from halfbyte.formats.spec import Format, as_format

# The result of decoding blocks uint8 [B, nbytes]: codes int8 [B, weights], scales [B, n], zeros [B, n] or None.
Decoded = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class BitField:
    """A part of a block that holds some bits of each of its codes.

    The bytes are taken in runs. The lowest `bits` bits of the `run` bytes of a run belong to `run` consecutive codes, the next bits of the
    same bytes to the next `run` codes, and so on. q4_0, for example, has one run of 16 bytes: code i is the low nibble of byte i for
    i < 16, and the high nibble of byte i - 16 after that.

    Attributes:
        start: The first byte within the block.
        nbytes: How many bytes it takes.
        run: Bytes of a run.
        bits: Bits of each code that the field holds.
        shift: The position of the lowest of these bits within the code.
    """

    start: int
    nbytes: int
    run: int
    bits: int
    shift: int = 0


@dataclass(frozen=True)
class BlockType:
    """A ggml tensor type: blocks of `weights` weights in `nbytes` bytes.

    Attributes:
        name: ggml's, as q4_K.
        weights: Consecutive weights of a row that make a block.
        nbytes: Bytes of a block.
        format: The format that holds its weights exactly.
        fields: Where the bits of the codes are; empty for types that `decode` reads.
        point: The number that is stored for the code 0.
        scales: Reads the scales and zeros [B, n] of blocks uint8 [B, nbytes]; None for types that `decode` reads.
        decode: Reads codes, scales and zeros of a type whose codes are not simply bits of a block; None for all others.
    """

    name: str
    weights: int
    nbytes: int
    format: Format
    fields: tuple[BitField, ...] = ()
    point: int = 0
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None
    decode: Callable[[Tensor], Decoded] | None = None

    @property
    def codes_shift(self) -> int:
        """The number to add, modulo 256, to a code as the block stores it (q + point), for the byte or nibble that Codes store.

        Codes store 8-bit codes as q, signed 4-bit integers as q + 8, and indices of a codebook as they are.
        """
        is_signed_nibble = self.format.bits == 4 and self.format.signed and not self.format.codebook
        return ((8 if is_signed_nibble else 0) - self.point) & 255

    def row_bytes(self, k: int) -> int:
        """Return the bytes of a row of `k` weights. Raises FormatError where `k` is not a multiple of the block."""
        if k % self.weights:
            raise FormatError(f"a row of {self.name} has a multiple of {self.weights} weights, got {k}: the file is damaged")
        return k // self.weights * self.nbytes


class Extract(Protocol):
    """A function that gathers the codes of blocks from their bit fields: `extract`, or the compiled one of kernels/cpu."""

    def __call__(self, kind: BlockType, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the codes as Codes store them.

        Args:
            kind: A type with `fields`.
            blocks: uint8 [B, nbytes].
            out: Contiguous; the codes are written there and it is returned. None: allocate it.

        Returns:
            int8 or uint8 [B, weights * format.bits / 8].
        """


def extract(kind: BlockType, blocks: Tensor, out: Tensor | None = None) -> Tensor:
    """Gather codes by torch's operations, as `Extract` documents; `kernels/cpu/quantize/extract.py` does the same faster."""
    parts = (unpack_bits(blocks[:, f.start : f.start + f.nbytes], f.run, f.bits) << f.shift for f in kind.fields)
    q = reduce(torch.bitwise_or, parts) + kind.codes_shift
    codes = pack_nibbles(q) if kind.format.bits == 4 else q.view(torch.int8) if kind.format.signed else q
    return codes if out is None else out.copy_(codes)


def decode(kind: BlockType, shape: tuple[int, ...], data: Tensor, extract: Extract = extract) -> Codes:
    """Decode the blocks of a tensor.

    Args:
        kind: The type.
        shape: The tensor's logical shape [..., N, K].
        data: Its blocks, uint8 [..., N, row_bytes].
        extract: Gathers the codes of types with bit fields.

    Returns:
        Codes of `shape` in `kind.format`; data is on the CPU.

    Raises:
        FormatError: `data` has another dtype or shape.
    """
    wanted = (*shape[:-1], kind.row_bytes(shape[-1]))
    if data.dtype != torch.uint8 or tuple(data.shape) != wanted:
        raise FormatError(f"{kind.name} of shape {list(shape)} is uint8 {list(wanted)}, got {data.dtype} {list(data.shape)}")
    fmt, blocks = kind.format, data.reshape(-1, kind.nbytes)

    def per_block(scales: Tensor, zeros: Tensor | None) -> list[Tensor]:
        return [numbers.reshape(fmt.scale_shape(shape)).to(fmt.scale) for numbers in (scales, zeros) if numbers is not None]

    if kind.scales is not None:
        stored = extract(kind, blocks).reshape(*shape[:-1], shape[-1] * fmt.bits // 8)
        return Codes(fmt, shape, stored, *per_block(*kind.scales(blocks)))
    assert kind.decode is not None
    values, scales, zeros = kind.decode(blocks)
    return Codes.from_values(fmt, values.reshape(shape), *per_block(scales, zeros))


def _f16(blocks: Tensor, at: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """Read the float16 number at byte `at` of each block, as `dtype` [B, 1]."""
    # A view as float16 needs even offsets. Its column is copied, so that the result does not keep all blocks in memory.
    if blocks.shape[1] % 2 == 0 and blocks.is_contiguous() and blocks.storage_offset() % 2 == 0:
        return blocks.view(torch.float16)[:, at // 2 : at // 2 + 1].to(dtype, memory_format=torch.contiguous_format, copy=True)
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(dtype)


def unpack_bits(packed: Tensor, run: int, bits: int) -> Tensor:
    """Unpack bytes [B, n] into numbers of `bits` bits, uint8 [B, n * 8 / bits], in the order that `BitField` describes."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu").view(-1, 1)
    numbers = packed.reshape(len(packed), packed.shape[1] // run, 1, run) >> shifts & (1 << bits) - 1
    return numbers.flatten(1)


# Functions that read the scales, and zeros or None, of blocks b, uint8 [B, nbytes]; the table in the module's docstring has the byte order.


def _d(b: Tensor, at: int = 0) -> tuple[Tensor, None]:
    return _f16(b, at, torch.float16), None


def _d_and_m(b: Tensor) -> tuple[Tensor, Tensor]:
    return _f16(b, 0, torch.float16), _f16(b, 2, torch.float16)


def _q2_k(b: Tensor) -> tuple[Tensor, Tensor]:
    return _f16(b, 80) * (b[:, :16] & 15), -(_f16(b, 82) * (b[:, :16] >> 4))


def _q3_k(b: Tensor) -> tuple[Tensor, None]:
    scales = unpack_bits(b[:, 96:104], 8, 4) | unpack_bits(b[:, 104:108], 4, 2) << 4
    return _f16(b, 108) * (scales.to(torch.int8) - 32), None


def _q4_k(b: Tensor) -> tuple[Tensor, Tensor]:
    """Read the scales of q4_K and q5_K: 8 s and 8 m of 6 bits in bytes 4 to 15.

    The low 6 bits of bytes 4 to 7 are s 0 to 3, those of bytes 8 to 11 are m 0 to 3. Bytes 12 to 15 hold the low nibbles of s 4 to 7 (low)
    and m 4 to 7 (high), whose two highest bits are the highest of bytes 4 to 7 and of bytes 8 to 11.
    """
    s, m, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((s & 63, rest & 15 | s >> 6 << 4), dim=1)
    minima = torch.cat((m & 63, rest >> 4 | m >> 6 << 4), dim=1)
    return _f16(b, 0) * scales, -(_f16(b, 2) * minima)


def _q6_k(b: Tensor) -> tuple[Tensor, None]:
    return _f16(b, 208) * b[:, 192:208].view(torch.int8), None


def _iq4_xs(b: Tensor) -> tuple[Tensor, None]:
    high = unpack_bits(b[:, 2:4], 1, 2)
    scales = unpack_bits(b[:, 4:8], 1, 4) | high << 4
    return _f16(b, 0) * (scales.to(torch.int8) - 32), None


def _tq1_0(b: Tensor) -> Decoded:
    # byte / 256 is a fraction in base 3, whose digit i is (byte * 3^i % 256) * 3 // 256. Byte j of n holds the codes j, n + j, 2 n + j, ….
    powers = torch.tensor((1, 3, 9, 27, 81), dtype=torch.uint8, device="cpu").view(1, -1, 1)
    runs = ((b[:, :32], 5), (b[:, 32:48], 5), (b[:, 48:52], 4))
    fractions = torch.cat([(run.unsqueeze(1) * powers[:, :digits]).flatten(1) for run, digits in runs], dim=1)
    return (fractions.to(torch.int16) * 3 >> 8).to(torch.int8) - 1, _f16(b, 52, torch.float16), None


def _mxfp4(b: Tensor) -> tuple[Tensor, None]:
    scale = torch.ldexp(torch.ones(len(b), 1, dtype=torch.float32, device="cpu"), b[:, :1].to(torch.int32) - 128)
    return scale.to(torch.bfloat16), None


def _nvfp4(b: Tensor) -> tuple[Tensor, None]:
    scale = (b[:, :4] & 127).contiguous().view(torch.float8_e4m3fn).float()
    scale = torch.where(scale.isnan(), 0.0, scale) / 2  # as ggml has it
    return scale.half(), None


def _with_fields(
    name: str,
    weights: int,
    nbytes: int,
    format: str,
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    *fields: BitField,
    point: int = 0,
) -> BlockType:
    return BlockType(name, weights, nbytes, as_format(format), fields, point, scales)


def _with_decode(name: str, nbytes: int, format: str, decode: Callable[[Tensor], Decoded]) -> BlockType:
    return BlockType(name, 256, nbytes, as_format(format), decode=decode)


# Types by their numbers in files, ggml's enum ggml_type.
TYPES: dict[int, BlockType] = {
    2: _with_fields("q4_0", 32, 18, "q4_0", _d, BitField(2, 16, 16, 4), point=8),
    3: _with_fields("q4_1", 32, 20, "q4_1", _d_and_m, BitField(4, 16, 16, 4)),
    6: _with_fields("q5_0", 32, 22, "int5_g32", _d, BitField(6, 16, 16, 4), BitField(2, 4, 1, 1, shift=4), point=16),
    7: _with_fields("q5_1", 32, 24, "int5_g32_offset", _d_and_m, BitField(8, 16, 16, 4), BitField(4, 4, 1, 1, shift=4)),
    8: _with_fields("q8_0", 32, 34, "q8_0", _d, BitField(2, 32, 32, 8)),
    10: _with_fields("q2_K", 256, 84, "int4_g16_offset_f32", _q2_k, BitField(16, 64, 32, 2)),
    11: _with_fields("q3_K", 256, 110, "int4_g16_f32", _q3_k, BitField(32, 64, 32, 2), BitField(0, 32, 32, 1, shift=2), point=4),
    12: _with_fields("q4_K", 256, 144, "int4_g32_offset_f32", _q4_k, BitField(16, 128, 32, 4)),
    13: _with_fields("q5_K", 256, 176, "int5_g32_offset_f32", _q4_k, BitField(48, 128, 32, 4), BitField(16, 32, 32, 1, shift=4)),
    14: _with_fields("q6_K", 256, 210, "int6_g16_f32", _q6_k, BitField(0, 128, 64, 4), BitField(128, 64, 32, 2, shift=4), point=32),
    20: _with_fields("iq4_nl", 32, 18, "iq4_nl", _d, BitField(2, 16, 16, 4)),
    23: _with_fields("iq4_xs", 256, 136, "iq4_g32_f32", _iq4_xs, BitField(8, 128, 16, 4)),
    **{
        number: _with_decode(name, nbytes, f"int8_g{256 // scales}_f32", partial(grids.decode, name))
        for number, name, nbytes, scales in grids.TYPES
    },
    34: _with_decode("tq1_0", 54, "int4_g256", _tq1_0),
    35: _with_fields("tq2_0", 256, 66, "int4_g256", partial(_d, at=64), BitField(0, 64, 32, 2), point=1),
    39: _with_fields("mxfp4", 32, 17, "mxfp4", _mxfp4, BitField(1, 16, 16, 4)),
    40: _with_fields("nvfp4", 64, 36, "fp4_g16", _nvfp4, BitField(4, 32, 8, 4)),
}
# Name -> its number.
NUMBERS = {kind.name: number for number, kind in TYPES.items()}

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

# The result of decoding blocks uint8 [B, bytes]: codes [B, weights], scales [B, n], zeros [B, n] or None.
Parts = tuple[Tensor, Tensor, Tensor | None]


@dataclass(frozen=True, slots=True)
class Field:
    """Where the codes of a block have some of their bits: `size` bytes from byte `at` on. Of each `run` bytes the lowest `bits` bits belong
    to as many codes, the next ones to the next codes. In a code they are those from bit `place` on."""

    at: int
    size: int
    run: int
    bits: int
    place: int = 0


@dataclass(frozen=True)
class BlockType:
    """A type of quantized tensors: blocks of `weights` weights in `nbytes` bytes, held exactly by `format`.

    Attributes:
        fields: The bit fields of which its codes consist; none for types whose codes are computed otherwise.
        point: The code that stands for 0.
        scales: The function of blocks [B, nbytes] that returns their scales and zeros [B, n].
        decode: The same function for types without fields; it also returns their codes.
    """

    name: str
    weights: int
    nbytes: int
    format: Format
    fields: tuple[Field, ...] = ()
    point: int = 0
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]] | None = None
    decode: Callable[[Tensor], Parts] | None = None

    @property
    def added(self) -> int:
        """What is added to a code, modulo 256, as it is stored in Codes."""
        nibble = self.format.bits == 4 and self.format.signed and not self.format.codebook
        return (8 * nibble - self.point) & 255

    def row_bytes(self, k: int) -> int:
        """Bytes of a row of `k` weights. Raises FormatError where `k` is not a multiple of the block."""
        if k % self.weights:
            raise FormatError(f"a row of {self.name} has a multiple of {self.weights} weights, got {k}: the file is damaged")
        return k // self.weights * self.nbytes


class Extract(Protocol):
    """Computes the codes of blocks [B, nbytes] of a type with fields, as Codes store them."""

    def __call__(self, kind: BlockType, blocks: Tensor, out: Tensor | None = None) -> Tensor:
        """Return the codes [B, weights * bits / 8]: `out`, contiguous, where it is given."""


def extract(kind: BlockType, blocks: Tensor, out: Tensor | None = None) -> Tensor:
    """An Extract; `kernels/cpu/quantize/extract.py` does the same faster."""
    parts = (_fields(blocks[:, f.at : f.at + f.size], f.run, f.bits) << f.place for f in kind.fields)
    q = reduce(torch.bitwise_or, parts) + kind.added
    codes = pack_nibbles(q) if kind.format.bits == 4 else q.view(torch.int8) if kind.format.signed else q
    return codes if out is None else out.copy_(codes)


def decode(kind: BlockType, shape: tuple[int, ...], data: Tensor, extract: Extract = extract) -> Codes:
    """uint8 [..., N, row_bytes] -> Codes of `shape` [..., N, K]."""
    wanted = (*shape[:-1], kind.row_bytes(shape[-1]))
    if data.dtype != torch.uint8 or tuple(data.shape) != wanted:
        raise FormatError(f"{kind.name} of shape {list(shape)} is uint8 {list(wanted)}, got {data.dtype} {list(data.shape)}")
    fmt, blocks = kind.format, data.reshape(-1, kind.nbytes)

    def shaped(*parts: Tensor | None) -> list[Tensor]:
        return [part.reshape(fmt.scale_shape(shape)).to(fmt.scale) for part in parts if part is not None]

    if kind.scales is not None:
        stored = extract(kind, blocks).reshape(*shape[:-1], shape[-1] * fmt.bits // 8)
        return Codes(fmt, shape, stored, *shaped(*kind.scales(blocks)))
    assert kind.decode is not None
    values, *numbers = kind.decode(blocks)
    return Codes.from_values(fmt, values.reshape(shape), *shaped(*numbers))


def _f16(blocks: Tensor, at: int, dtype: torch.dtype = torch.float32) -> Tensor:
    """The float16 number of each block at byte `at`, [B, 1]."""
    if blocks.shape[1] % 2 == 0 and blocks.is_contiguous() and blocks.storage_offset() % 2 == 0:
        return blocks.view(torch.float16)[:, at // 2 : at // 2 + 1].to(dtype, memory_format=torch.contiguous_format, copy=True)
    return blocks[:, at : at + 2].contiguous().view(torch.float16).to(dtype)


def _fields(bytes: Tensor, run: int, bits: int) -> Tensor:
    """Bit fields of bytes [B, n] -> [B, n * 8 / bits]: for each `run` of bytes all lowest fields, then all next ones."""
    shifts = torch.arange(0, 8, bits, dtype=torch.uint8, device="cpu").view(-1, 1)
    fields = bytes.reshape(len(bytes), bytes.shape[1] // run, 1, run) >> shifts & (1 << bits) - 1
    return fields.flatten(1)


# Scales, and zeros or None


def _d(b: Tensor, at: int = 0) -> tuple[Tensor, None]:
    return _f16(b, at, torch.float16), None


def _d_and_m(b: Tensor) -> tuple[Tensor, Tensor]:
    return _f16(b, 0, torch.float16), _f16(b, 2, torch.float16)


def _q2_k(b: Tensor) -> tuple[Tensor, Tensor]:
    return _f16(b, 80) * (b[:, :16] & 15), -(_f16(b, 82) * (b[:, :16] >> 4))


def _q3_k(b: Tensor) -> tuple[Tensor, None]:
    scales = _fields(b[:, 96:104], 8, 4) | _fields(b[:, 104:108], 4, 2) << 4
    return _f16(b, 108) * (scales.to(torch.int8) - 32), None


def _q4_k(b: Tensor) -> tuple[Tensor, Tensor]:
    """Also of q5_K. Of bytes 4 to 15, four hold s, four m, and four the low nibbles of four more of each."""
    s, m, rest = b[:, 4:8], b[:, 8:12], b[:, 12:16]
    scales = torch.cat((s & 63, rest & 15 | s >> 6 << 4), dim=1)
    minima = torch.cat((m & 63, rest >> 4 | m >> 6 << 4), dim=1)
    return _f16(b, 0) * scales, -(_f16(b, 2) * minima)


def _q6_k(b: Tensor) -> tuple[Tensor, None]:
    return _f16(b, 208) * b[:, 192:208].view(torch.int8), None


def _iq4_xs(b: Tensor) -> tuple[Tensor, None]:
    high = _fields(b[:, 2:4], 1, 2)
    scales = _fields(b[:, 4:8], 1, 4) | high << 4
    return _f16(b, 0) * (scales.to(torch.int8) - 32), None


def _tq1_0(b: Tensor) -> Parts:
    # A byte is a fraction of 256: multiplying by 3 moves the next base-3 digit to the front.
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


def _type(
    name: str,
    weights: int,
    nbytes: int,
    format: str,
    scales: Callable[[Tensor], tuple[Tensor, Tensor | None]],
    *fields: Field,
    point: int = 0,
) -> BlockType:
    return BlockType(name, weights, nbytes, as_format(format), fields, point, scales)


def _other(name: str, weights: int, nbytes: int, format: str, decode: Callable[[Tensor], Parts]) -> BlockType:
    return BlockType(name, weights, nbytes, as_format(format), decode=decode)


# Types by ggml's numbers, enum ggml_type.
TYPES: dict[int, BlockType] = {
    2: _type("q4_0", 32, 18, "q4_0", _d, Field(2, 16, 16, 4), point=8),
    3: _type("q4_1", 32, 20, "q4_1", _d_and_m, Field(4, 16, 16, 4)),
    6: _type("q5_0", 32, 22, "int5_g32", _d, Field(6, 16, 16, 4), Field(2, 4, 1, 1, place=4), point=16),
    7: _type("q5_1", 32, 24, "int5_g32_offset", _d_and_m, Field(8, 16, 16, 4), Field(4, 4, 1, 1, place=4)),
    8: _type("q8_0", 32, 34, "q8_0", _d, Field(2, 32, 32, 8)),
    10: _type("q2_K", 256, 84, "int4_g16_offset_f32", _q2_k, Field(16, 64, 32, 2)),
    11: _type("q3_K", 256, 110, "int4_g16_f32", _q3_k, Field(32, 64, 32, 2), Field(0, 32, 32, 1, place=2), point=4),
    12: _type("q4_K", 256, 144, "int4_g32_offset_f32", _q4_k, Field(16, 128, 32, 4)),
    13: _type("q5_K", 256, 176, "int5_g32_offset_f32", _q4_k, Field(48, 128, 32, 4), Field(16, 32, 32, 1, place=4)),
    14: _type("q6_K", 256, 210, "int6_g16_f32", _q6_k, Field(0, 128, 64, 4), Field(128, 64, 32, 2, place=4), point=32),
    20: _type("iq4_nl", 32, 18, "iq4_nl", _d, Field(2, 16, 16, 4)),
    23: _type("iq4_xs", 256, 136, "iq4_g32_f32", _iq4_xs, Field(8, 128, 16, 4)),
    **{
        number: _other(name, 256, nbytes, f"int8_g{256 // scales}_f32", partial(grids.decode, name))
        for number, name, nbytes, scales in grids.TYPES
    },
    34: _other("tq1_0", 256, 54, "int4_g256", _tq1_0),
    35: _type("tq2_0", 256, 66, "int4_g256", partial(_d, at=64), Field(0, 64, 32, 2), point=1),
    39: _type("mxfp4", 32, 17, "mxfp4", _mxfp4, Field(1, 16, 16, 4)),
    40: _type("nvfp4", 64, 36, "fp4_g16", _nvfp4, Field(4, 32, 8, 4)),
}
NUMBERS = {kind.name: number for number, kind in TYPES.items()}

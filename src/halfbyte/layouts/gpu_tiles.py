"""The weight layout of the GPU kernels: it serves every number of rows M, 4 and 8 bits, floating-point and integer compute.

    data = codes | scales | zeros     each section begins at a multiple of 256 bytes

Rows: N is padded to whole panels of 64. Along K each block is padded to 16 elements (blocks up to 16), to 32 (up to 32), to 64 (up to 64)
or to a multiple of 128, and the whole row to whole records of 128; so is a block that is all of K, however short. Element i of block j lies
at padded k = j * padded + i.

    scales  [block rows, N padded] in the format's scale dtype; a block row for every `padded` elements of the padded K
    zeros   the same shape: zero points (uint8) or offsets (the scale's dtype)
    codes   8 bits: int8 [N padded, K padded]: q where the codes are signed, q - 128 where they have a zero
            4 bits: nibbles u = q + 8 where the codes are signed, u = q where they have a zero, in 16-bit words

Padding has q = 0 and the scale 0.

4 bits: record r of panel p holds 64 rows by 128 k in 2048 words, [panel][record][kt 2][nt 4][row 8][k4 4][khalf 2][rowhalf 2][k 2].
The word of row n = 16*nt + 8*rowhalf + row and kq = 16*kt + 8*khalf + 2*k4 + k holds the weights k = 32*j + kq of nibbles j:

    bit   15 … 12 | 11 … 8 | 7 … 4 | 3 … 0         one lane's 16 bytes (lane = 4*row + k4), a word each:
    k     96 + kq |64 + kq |32 + kq|   kq          khalf     0 0 0 0   1 1 1 1
                                                   rowhalf   0 0 1 1   0 0 1 1      n = row, row + 8
                                                   k         0 1 0 1   0 1 0 1      kq = 2*k4, 2*k4 + 1 (+ 8)

which is the A operand of one mma.m16n8k16 (of wgmma too), four times: nibble j of the words is the operand for k = 32*j + 16*kt, which
with blocks of 16 is block 2*j + kt of the record.
A lane reads its operands with one 16-byte load, and neighbours in a 32-bit register are the pairs that half2 instructions take.

The layout `gpu_tiles_paired` is for 8 bits of linear layers on Hopper: of each 16 bytes of a row, which are eight pairs, these are in the
order 0 4 1 5 2 6 3 7. So word k4 of them is lane k4's half of an operand of one mma.m16n8k16 (of wgmma too), and lies where ldmatrix looks
for it. All else is the same, but for 256 bytes at the end that hold nothing: operations know it by its size.

The layout `gpu_tiles_2_4` is for weights that are 2:4 sparse (`sparse.py`) and whose padded k is k: `gpu_sparse.py` has its codes, all else
is the same.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.errors import FormatError
from halfbyte.formats.codes import Codes, pack_nibbles, stored_tensors, unpack_nibbles
from halfbyte.formats.spec import Format
from halfbyte.layouts import gpu_sparse
from halfbyte.layouts.base import Packed, Section, round_up
from halfbyte.layouts.sparse import GROUP, KEPT

NAME = "gpu_tiles"
PAIRED = "gpu_tiles_paired"
SPARSE = "gpu_tiles_2_4"
PANEL = 64  # rows of a panel
RECORD = 128  # padded k of a record
_SECTION = 256  # bytes: sections begin at multiples of it
_CHUNK_ELEMENTS = 1 << 26  # pack and unpack this much at a time, to bound their memory


@dataclass(frozen=True)
class Geometry:
    """Sizes of a weight [N, K] of `format` in this layout, or in the `paired` one, or in that for `sparse` weights; offsets and sizes of
    sections in bytes."""

    format: Format
    n: int
    k: int
    sparse: bool = False
    paired: bool = False

    @property
    def layout(self) -> str:
        return SPARSE if self.sparse else PAIRED if self.paired else NAME

    @functools.cached_property
    def block(self) -> int:
        """Real elements of a block (the last may be shorter)."""
        return self.format.block_size(self.k)

    @functools.cached_property
    def padded(self) -> int:
        """Elements of a block with its padding. A block that is all of K has one row of scales, whose `block_rows` say so."""
        if self.block >= self.k or self.block > 64:
            return round_up(max(1, self.block), RECORD)
        return next(size for size in (16, 32, 64) if self.block <= size)

    @functools.cached_property
    def blocks(self) -> int:
        return -(-self.k // self.block)

    @functools.cached_property
    def blocks_a_record(self) -> int:
        """1 where a block is longer."""
        return max(1, RECORD // self.padded)

    @functools.cached_property
    def records_a_block(self) -> int:
        """1 where a block is shorter."""
        return max(1, self.padded // RECORD)

    @functools.cached_property
    def k_padded(self) -> int:
        return round_up((self.blocks - 1) * self.padded + self.last, RECORD) if self.k else 0

    @functools.cached_property
    def last(self) -> int:
        """Real elements of the last block."""
        return self.k - (self.blocks - 1) * self.block if self.k else 0

    @functools.cached_property
    def block_rows(self) -> int:
        """Rows of scales: those of the blocks and of the padding after them."""
        return -(-self.k_padded // self.padded)

    @functools.cached_property
    def contiguous(self) -> bool:
        """Padded k is k: no block but the last is padded."""
        return self.blocks <= 1 or self.block == self.padded

    @functools.cached_property
    def n_padded(self) -> int:
        return round_up(self.n, PANEL)

    @functools.cached_property
    def panels(self) -> int:
        return self.n_padded // PANEL

    @functools.cached_property
    def records(self) -> int:
        return self.k_padded // RECORD

    @functools.cached_property
    def kept_bytes(self) -> int:
        """Bytes of codes without their positions."""
        return self.n_padded * self.k_padded * self.format.bits // 8 * KEPT // (GROUP if self.sparse else KEPT)

    @functools.cached_property
    def codes_bytes(self) -> int:
        return self.kept_bytes + self.sparse * self.n_padded * self.k_padded // 8

    @functools.cached_property
    def scale_bytes(self) -> int:
        return self.block_rows * self.n_padded * self.format.scale.itemsize

    @functools.cached_property
    def zero_dtype(self) -> torch.dtype | None:
        return self.format.zero_dtype

    @functools.cached_property
    def zero_bytes(self) -> int:
        return 0 if self.zero_dtype is None else self.block_rows * self.n_padded * self.zero_dtype.itemsize

    @functools.cached_property
    def scale_offset(self) -> int:
        return round_up(self.codes_bytes, _SECTION)

    @functools.cached_property
    def zero_offset(self) -> int:
        return self.scale_offset + round_up(self.scale_bytes, _SECTION)

    @functools.cached_property
    def nbytes(self) -> int:
        if self.n == 0 or self.k == 0:
            return 0
        return self.zero_offset + round_up(self.zero_bytes, _SECTION) + self.paired * _SECTION

    @property
    def sections(self) -> tuple[Section, ...]:
        """Codes, of which panels follow one another, and rows of scales and of zeros."""
        per_block = ((self.scale_offset, self.scale_bytes), (self.zero_offset, self.zero_bytes))
        rows = (Section(start, self.block_rows, nbytes // self.block_rows) for start, nbytes in per_block if nbytes)
        return Section(0, 1, self.codes_bytes), *rows


@functools.lru_cache(maxsize=4096)
def geometry(fmt: Format, shape: tuple[int, ...], *, sparse: bool = False, paired: bool = False) -> Geometry:
    """The geometry of a weight of logical `shape` [..., N, K]; leading dimensions count as rows."""
    return Geometry(fmt, math.prod(shape[:-1]), shape[-1], sparse, paired)


def geometry_of(fmt: Format, n: int, k: int, nbytes: int) -> Geometry:
    """The layout of a weight [n, k] by its number of packed bytes: a sparse one has fewer than any other and a paired one more, and so
    operations know which it is."""
    layouts = [geometry(fmt, (n, k)), geometry(fmt, (n, k), sparse=True)]
    if fmt.bits == 8:
        layouts.append(geometry(fmt, (n, k), paired=True))
    return next((found for found in layouts[1:] if 0 < nbytes == found.nbytes), layouts[0])


class Views(NamedTuple):
    """The sections of packed bytes, sharing their memory.

    Attributes:
        codes: int16 [panels, records, 2048] for 4 bits, int8 [N padded, K padded] for 8; of sparse weights int32 [bytes / 4].
        scale: [block rows, N padded].
        zero: The same shape; None where the format has none.
    """

    codes: Tensor
    scale: Tensor
    zero: Tensor | None


def views(data: Tensor, geo: Geometry) -> Views:
    """Sections of `data`, uint8 [geo.nbytes], of a weight that has elements."""
    codes = codes_of(data, geo)
    per_block = (geo.block_rows, geo.n_padded)
    scale = data[geo.scale_offset :][: geo.scale_bytes].view(geo.format.scale).view(per_block)
    if geo.zero_dtype is None:
        return Views(codes, scale, None)
    return Views(codes, scale, data[geo.zero_offset :][: geo.zero_bytes].view(geo.zero_dtype).view(per_block))


def codes_of(data: Tensor, geo: Geometry) -> Tensor:
    """The first of these sections."""
    codes = data[: geo.codes_bytes]
    if geo.sparse:
        return codes.view(torch.int32)
    if geo.format.bits == 4:
        return codes.view(torch.int16).view(geo.panels, geo.records, PANEL * RECORD // 4)
    return codes.view(torch.int8).view(geo.n_padded, geo.k_padded)


def pack(codes: Codes, *, sparse: bool = False, paired: bool = False) -> Packed:
    """Codes -> Packed, on the device of the codes. Those in the layout for `sparse` weights must be; those in the `paired` one are of 8
    bits."""
    fmt, geo = codes.format, geometry(codes.format, codes.shape, sparse=sparse, paired=paired)
    data = torch.zeros(geo.nbytes, dtype=torch.uint8, device=codes.data.device)
    if geo.nbytes:
        n, out = geo.n, views(data, geo)
        for section, per_block in ((out.scale, codes.scale), (out.zero, codes.zero)):
            if section is not None and per_block is not None:
                flat = per_block.reshape(1, 1).expand(n, 1) if fmt.block == "tensor" else per_block.reshape(n, geo.blocks)
                section[: geo.blocks, :n] = flat.T
        rows = codes.data.reshape(n, -1)
        for start, stop in _chunks(geo):
            u = _padded(_stored(rows[start : min(n, stop)], geo), stop - start, geo)
            if geo.sparse:
                pad_codes = _pad_codes(out, geo, start, stop)
                u[:, geo.k :] = pad_codes[:, geo.k :]
                kept, positions = out.codes.view(torch.uint8).tensor_split([geo.kept_bytes])
                panels = slice(start // PANEL, stop // PANEL)
                for section, part in zip((kept, positions), gpu_sparse.kept(u, pad_codes, fmt.bits), strict=True):
                    section.view(geo.panels, -1)[panels] = part
            elif fmt.bits == 4:
                out.codes[start // PANEL : stop // PANEL] = _words(u).view(torch.int16)
            else:
                out.codes[start:stop] = (_paired(u) if paired else u).view(torch.int8)
    return Packed(fmt, codes.shape, geo.layout, data)


def in_order(packed: Packed) -> Packed:
    """The same weight in K's order where it is in pairs; others as they are."""
    if packed.layout != PAIRED:
        return packed
    geo = geometry(packed.format, packed.shape)
    if not geo.nbytes:
        return replace(packed, layout=NAME)
    data = packed.data[: geo.nbytes].clone()
    for start, stop in _chunks(geo):
        rows = codes_of(data, geo)[start:stop]
        rows.copy_(_in_order(rows))
    return replace(packed, layout=NAME, data=data)


def unpack(packed: Packed) -> Codes:
    """The exact inverse of `pack`; `kernels/gpu/quantize/spread.py` puts the zeros of sparse weights back before."""
    fmt, shape, geo = packed.format, packed.shape, geometry(packed.format, packed.shape, paired=packed.layout == PAIRED)
    if packed.layout != geo.layout or packed.data.numel() != geo.nbytes:
        got = f"{packed.data.numel()} in layout {packed.layout}"
        raise FormatError(f"{fmt} of shape {list(shape)} takes {geo.nbytes} bytes in layout {geo.layout}, got {got}")
    if geo.nbytes == 0:
        return Codes.zeros(fmt, shape, packed.device)
    n, scale_shape = geo.n, fmt.scale_shape(shape)
    dtype, size = stored_tensors(fmt, shape)["data"]
    data = torch.empty(size, dtype=dtype, device=packed.device)
    stored, rows = views(packed.data, geo), data.view(n, -1)
    for start, stop in _chunks(geo):
        if fmt.bits == 4:
            u = _nibbles(stored.codes[start // PANEL : stop // PANEL].view(torch.uint8))
        else:
            u = stored.codes[start:stop].view(torch.uint8)
            u = _in_order(u) if geo.paired else u
        u = _real(u, geo)[: min(n, stop) - start]
        rows[start : min(n, stop)] = pack_nibbles(u) if fmt.bits == 4 else u.view(torch.int8) if fmt.signed else u ^ 128
    tails = [
        section[:1, :1].reshape(scale_shape).clone() if fmt.block == "tensor" else section[: geo.blocks, :n].T.reshape(scale_shape)
        for section in (stored.scale, stored.zero)
        if section is not None
    ]
    return Codes(fmt, shape, data, *(tail.contiguous() for tail in tails))


def _pad_codes(sections: Views, geo: Geometry, start: int, stop: int) -> Tensor:
    """The stored codes that mean 0 in rows `start` to `stop`: uint8 [rows, K padded]."""
    if sections.zero is None:
        zero = 8 if geo.format.bits == 4 else 0
        return torch.full((1, 1), zero, dtype=torch.uint8, device=sections.codes.device).expand(stop - start, geo.k_padded)
    points = sections.zero[:, start:stop].T.repeat_interleave(min(geo.padded, geo.k_padded), dim=1)[:, : geo.k_padded]
    return points if geo.format.bits == 4 else points ^ 128


def _chunks(geo: Geometry) -> list[tuple[int, int]]:
    """Row ranges of whole panels with about _CHUNK_ELEMENTS each."""
    step = max(1, _CHUNK_ELEMENTS // (PANEL * geo.k_padded)) * PANEL
    return [(start, min(geo.n_padded, start + step)) for start in range(0, geo.n_padded, step)]


def _stored(rows: Tensor, geo: Geometry) -> Tensor:
    """Canonical data of some rows -> one byte per element, as this layout stores it: uint8 [rows, K]."""
    if geo.format.bits == 4:
        return unpack_nibbles(rows, geo.k)
    return rows.view(torch.uint8) if geo.format.signed else rows ^ 128


def _padded(u: Tensor, rows: int, geo: Geometry) -> Tensor:
    """uint8 [some rows, K] -> [rows, K padded], the padding filled with q = 0."""
    fmt = geo.format
    pad_code = fmt.pad_index if fmt.bits == 4 else fmt.pad_index ^ 128
    out = torch.full((rows, geo.k_padded), pad_code, dtype=torch.uint8, device=u.device)
    if geo.contiguous:
        out[: len(u), : geo.k] = u
        return out
    full = geo.blocks - 1
    body = out[: len(u), : full * geo.padded].unflatten(1, (full, geo.padded))
    body[:, :, : geo.block] = u[:, : full * geo.block].unflatten(1, (full, geo.block))
    out[: len(u), full * geo.padded :][:, : geo.last] = u[:, full * geo.block :]
    return out


def _real(u: Tensor, geo: Geometry) -> Tensor:
    """The inverse of `_padded` along K: [rows, K padded] -> [rows, K]."""
    if geo.contiguous:
        return u[:, : geo.k]
    full = geo.blocks - 1
    body = u[:, : full * geo.padded].unflatten(1, (full, geo.padded))[:, :, : geo.block].flatten(1)
    return torch.cat((body, u[:, full * geo.padded :][:, : geo.last]), dim=1)


def _paired(u: Tensor) -> Tensor:
    """Bytes [rows, K padded] in the order of K -> in that of the `paired` layout."""
    return u.view(len(u), -1, 2, 4, 2).transpose(2, 3).reshape(u.shape)  # khalf, k4, k -> k4, khalf, k


def _in_order(u: Tensor) -> Tensor:
    """The inverse of `_paired`."""
    return u.view(len(u), -1, 4, 2, 2).transpose(2, 3).reshape(u.shape)


def _words(u: Tensor) -> Tensor:
    """Nibbles uint8 [rows, K padded] -> the bytes of the words, uint8 [panels, records, 4096]."""
    #         panel  nt rowhalf row  record                     j  kt khalf k4 k
    u = u.view(len(u) // PANEL, 4, 2, 8, u.shape[1] // RECORD, 4, 2, 2, 4, 2)
    code_pairs = torch.stack((u[:, :, :, :, :, 0] | u[:, :, :, :, :, 1] << 4, u[:, :, :, :, :, 2] | u[:, :, :, :, :, 3] << 4), dim=-1)
    # panel 0, nt 1, rowhalf 2, row 3, record 4, kt 5, khalf 6, k4 7, k 8, byte 9
    return code_pairs.permute(0, 4, 5, 1, 3, 7, 6, 2, 8, 9).flatten(2)


def _nibbles(words: Tensor) -> Tensor:
    """The inverse of `_words`: uint8 [panels, records, 4096] -> [rows, K padded]."""
    panels, records, _ = words.shape
    #                            kt nt row k4 khalf rowhalf k byte
    code_pairs = words.reshape(panels, records, 2, 4, 8, 4, 2, 2, 2, 2).permute(0, 3, 7, 4, 1, 9, 2, 6, 5, 8)
    # panel 0, nt 1, rowhalf 2, row 3, record 4, byte 5, kt 6, khalf 7, k4 8, k 9
    return torch.stack((code_pairs & 15, code_pairs >> 4), dim=6).reshape(panels * PANEL, records * RECORD)

"""The one weight layout of the CPU kernels: it serves every number of rows M, int4 and int8, integer and float compute.

    weight = panels of 32 rows   (N is padded with rows of 0)
    panel  = records, one for each block along K
    record = data | 32 scales | 32 zeros | 32 sums of pairs | padding to 64 bytes

    data, 4 bits, for each 8 k:  128 bytes; byte 4*row + j holds k = j in its low nibble and k = 4 + j in its high nibble
    data, 8 bits, for each 4 k:  128 bytes; byte 4*row + j holds k = j

      byte   0   1   2   3 | 4   5   6   7 | …  127
      row    0   0   0   0 | 1   1   1   1 | …   31          so that one 32-bit lane holds four k of one row,
      low   k0  k1  k2  k3 |k0  k1  k2  k3 | …   k3          which is what a dot-product instruction reads
      high  k4  k5  k6  k7 |k4  k5  k6  k7 | …   k7

Elements are stored unsigned: q + 8 or q + 128 where the codes are signed, q where they have a zero, the index where they are in a table.
Elements that pad a block represent 0 (with a float offset: q = 0, and the kernel counts the offset for real elements only; of iq4: 1).
Codes of 5 and 6 bits (`Format.packed_bits`) are stored in two planes, for each unit of 16 or 32 k, plus 16 or 32 where they are signed:

    data, 5 or 6 bits, for each unit:  the lowest 4 bits, as codes of 4 bits;  then, for each 32 or 16 k, 128 bytes of which byte 4*row + j
                                       holds the highest bits of k = j in its lowest 1 or 2 bits, of k = 4 + j in the next, …

Sums of pairs exist for 8 bits with one scale per row or tensor: int32 sums of u[2i] * u[2i + 1], which kernels without
dot-product instructions subtract (`kernels/cpu/codegen/isa_x86.py`). They take 4 bytes per row and record.
A block longer than 32768 is cut into several records with the same scale, so that int32 sums can't overflow.

The layout `cpu_tiles_2_4` is for weights that are 2:4 sparse (`sparse.py`) whose blocks are padded to multiples of 32. Data hold two codes
of each 4 k, those that are not 0 first, and a mask of where in the 4 k they belong; there are no sums of pairs:

    data, 4 bits, for each 32 k:  256 bytes of codes: for each 8 k byte 2*row + i holds the i-th code of k = 0 … 3 in its low nibble and
                                  that of k = 4 … 7 in its high nibble;  then 128 bytes of masks
    data, 8 bits, for each 32 k:  512 bytes of codes: for each 4 k byte 2*row + i holds the i-th;  then 128 bytes of masks
    masks: for each 4 k and row 4 bits, of which two are 1, k = 0 in the lowest; rows with even numbers in low nibbles

All is read by vectors of 16 rows: an instruction expands 32 codes to 64 bytes by 64 bits of masks.
"""

from __future__ import annotations

import functools
import math
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import FormatError, lookup
from halfbyte.formats.codes import Codes, pack_nibbles, unpack_nibbles
from halfbyte.formats.spec import Format
from halfbyte.layouts.base import Packed, Section, round_up
from halfbyte.layouts.sparse import GROUP, KEPT
from halfbyte.memory import side_by_side

NAME, SPARSE = "cpu_tiles", "cpu_tiles_2_4"
PANEL = 32  # rows of a panel
SPARSE_UNIT = 32  # k of a piece of the data of 2:4 sparse weights
LONGEST_BLOCK = 32768  # 255 * 127 * 32768 < 2^31
_CHUNK_ELEMENTS = 1 << 24  # of a weight, that `pack` and `unpack` take at a time, to bound their memory


def plane_groups(packed_bits: int) -> int:
    """Return how many groups of 4 k have their high bits in one byte of the second plane, for codes of 5 or 6 bits."""
    return lookup({5: 8, 6: 4}, packed_bits, "the planes of codes of so many bits,")


def has_pair_sums(fmt: Format) -> bool:
    """Whether records of `fmt` hold sums of pairs."""
    return fmt.bits == 8 and not isinstance(fmt.block, int)


def data_bytes(bits: int, k: int, *, sparse: bool) -> int:
    """Return the bytes of a panel's data.

    Args:
        bits: Bits of a stored code.
        k: Elements of each row, padded.
        sparse: Whether zeros of 2:4 sparsity are left out.
    """
    return PANEL * k * (bits * KEPT // GROUP + 1 if sparse else bits) // 8


def tail_bytes(scale_bytes: int, zero_bytes: int, *, pair_sums: bool) -> int:
    """Return the bytes of a record after its data."""
    return round_up(PANEL * (scale_bytes + zero_bytes + 4 * pair_sums), 64)


def piece(block: int, k: int) -> int:
    """Return how many elements of a row a record holds, whose products are summed in int32.

    That is a block. One longer than LONGEST_BLOCK is split into the fewest equal pieces that are not longer; or, where it covers the whole
    row, into pieces of LONGEST_BLOCK and a remainder.

    Args:
        block: Elements of a block.
        k: Elements of a row.
    """
    if block >= k or block <= LONGEST_BLOCK:
        return min(block, LONGEST_BLOCK)
    return next(block // pieces for pieces in range(-(-block // LONGEST_BLOCK), block + 1) if block % pieces == 0)


@dataclass(frozen=True)
class Geometry:
    """Where the parts of a weight are in this layout.

    A row of K elements is cut into `blocks` records of `block` elements, of which the last may have fewer (`last`); each is padded to whole
    units.

    Attributes:
        format: Of the codes.
        n: Rows, N.
        k: Elements of a row, K.
        sparse: Whether it is the layout for 2:4 sparse weights.
    """

    format: Format
    n: int
    k: int
    sparse: bool = False

    @property
    def layout(self) -> str:
        return SPARSE if self.sparse else NAME

    @functools.cached_property
    def block(self) -> int:
        """Real elements of a record: the format's block, or a piece of it where it is too long."""
        return piece(self.format.block_size(self.k), self.k)

    @functools.cached_property
    def unit(self) -> int:
        """Elements that a kernel takes at a time: 32, or 8 where blocks are short and no multiple of 32; of 6 bits 16."""
        short = 8 if not self.format.packed_bits else 4 * plane_groups(self.format.packed_bits)
        return 32 if self.block % 32 == 0 or self.block > 256 else short

    @functools.cached_property
    def bits(self) -> int:
        """Bits of a stored code."""
        return self.format.stored_bits

    @functools.cached_property
    def padded(self) -> int:
        """Elements of a record with those that pad it."""
        return round_up(self.block, self.unit)

    @functools.cached_property
    def blocks(self) -> int:
        """Records of a panel."""
        return -(-self.k // self.block)

    @functools.cached_property
    def last(self) -> int:
        """Real elements of the last record."""
        return self.k - (self.blocks - 1) * self.block if self.k else 0

    @functools.cached_property
    def last_padded(self) -> int:
        """`padded` of the last record."""
        return round_up(self.last, self.unit)

    @functools.cached_property
    def panels(self) -> int:
        return -(-self.n // PANEL)

    @functools.cached_property
    def n_padded(self) -> int:
        return self.panels * PANEL

    @functools.cached_property
    def scale_bytes(self) -> int:
        return self.format.scale.itemsize

    @functools.cached_property
    def zero_bytes(self) -> int:
        return 0 if self.format.zero_dtype is None else self.format.zero_dtype.itemsize

    @functools.cached_property
    def pair_sums(self) -> bool:
        """Whether records hold sums of pairs."""
        return has_pair_sums(self.format) and not self.sparse

    @functools.cached_property
    def tail_bytes(self) -> int:
        """Bytes of a record after its data."""
        return tail_bytes(self.scale_bytes, self.zero_bytes, pair_sums=self.pair_sums)

    def record_bytes(self, padded: int) -> int:
        """Return the bytes of a record of so many elements for each row."""
        return data_bytes(self.bits, padded, sparse=self.sparse) + self.tail_bytes

    @functools.cached_property
    def panel_bytes(self) -> int:
        return (self.blocks - 1) * self.record_bytes(self.padded) + self.record_bytes(self.last_padded) if self.k else 0

    @functools.cached_property
    def nbytes(self) -> int:
        return self.panels * self.panel_bytes

    @property
    def sections(self) -> tuple[Section, ...]:
        """Panels follow one another."""
        return (Section(0, 1, self.nbytes),)


@functools.lru_cache(maxsize=4096)
def geometry(fmt: Format, shape: tuple[int, ...], *, sparse: bool = False) -> Geometry:
    """Return the geometry of a weight of logical `shape` [..., N, K]; leading dimensions count as rows."""
    return Geometry(fmt, math.prod(shape[:-1]), shape[-1], sparse)


@functools.lru_cache(maxsize=4096)
def sparse_bytes(fmt: Format, n: int, k: int) -> int | None:
    """Return the bytes of a weight [n, k] in the layout for sparse ones; None where it has no such layout.

    They are fewer than in the dense layout: operations, which are handed bytes, know by their number which layout it is (`geometry_of`).
    """
    geo = geometry(fmt, (n, k), sparse=True)
    return geo.nbytes if n and k and geo.unit == SPARSE_UNIT and fmt.zero != "offset" and not fmt.has_limited_codes else None


def geometry_of(fmt: Format, n: int, k: int, nbytes: int) -> Geometry:
    """Return the geometry of a weight [n, k] in the one of the two layouts in which it has so many bytes."""
    return geometry(fmt, (n, k), sparse=nbytes == sparse_bytes(fmt, n, k))


def allocate(nbytes: int) -> Tensor:
    """Return zeros, uint8 [nbytes], for packed weights, in huge pages where Linux provides them.

    A product with few rows is bound by memory bandwidth, some of which goes to address translation where pages have 4 KB.
    """
    memory = side_by_side(nbytes)
    return torch.zeros(nbytes, dtype=torch.uint8, device="cpu") if memory is None else torch.frombuffer(memory, dtype=torch.uint8)


def _pad_k(u: Tensor, padded: int, fill: Tensor | int) -> Tensor:
    """Pad [..., size] to [..., padded] with `fill`, which broadcasts to [..., 1]."""
    if u.shape[-1] == padded:
        return u
    out = u.new_empty(*u.shape[:-1], padded)
    out[...] = fill
    out[..., : u.shape[-1]] = u
    return out


def _records(u: Tensor, tails: list[Tensor], padded: int, geo: Geometry) -> Tensor:
    """Write the records of some panels.

    Args:
        u: Stored elements, uint8 [P, 32, blocks, padded].
        tails: Scales and zeros, [P, 32, blocks] each.
        padded: Elements of a record.
        geo: Of the weight.

    Returns:
        uint8 [P, blocks, record bytes].
    """
    panels, _, blocks, _ = u.shape
    quads = u.view(panels, PANEL, blocks, padded // 4, 4)
    if geo.format.packed_bits:
        quads = _planes(quads, geo)
    elif geo.format.bits == 4:
        quads = quads[:, :, :, 0::2] | quads[:, :, :, 1::2] << 4
    if has_pair_sums(geo.format):
        pair_sums = (u[..., 0::2].to(torch.int32) * u[..., 1::2]).sum(-1, dtype=torch.int32)
        tails = [*tails, pair_sums]
    out = u.new_zeros(panels, blocks, geo.record_bytes(padded))
    at = PANEL * padded * geo.bits // 8
    out[:, :, :at] = quads.permute(0, 2, 3, 1, 4).reshape(panels, blocks, at)
    for tail in tails:
        size = PANEL * tail.element_size()
        out[:, :, at : at + size] = tail.permute(0, 2, 1).contiguous().view(torch.uint8).view(panels, blocks, size)
        at += size
    return out


def _planes(quads: Tensor, geo: Geometry) -> Tensor:
    """Turn unsigned bytes [P, 32, blocks, groups of 4 k, 4] into the data of 5 or 6 bits, in the order of their groups of 128 bytes."""
    packed_bits, groups = geo.format.packed_bits, plane_groups(geo.format.packed_bits)
    q = (quads - (geo.format.pad_index - (1 << packed_bits - 1) if geo.format.signed else 0)).unflatten(3, (-1, geo.unit // 4))
    low, high = q & 15, (q >> 4).unflatten(4, (-1, groups))
    shifts = torch.arange(groups, dtype=torch.uint8, device="cpu").view(-1, 1) * (packed_bits - 4)
    planes = low[..., 0::2, :] | low[..., 1::2, :] << 4, (high << shifts).sum(5, dtype=torch.uint8)
    return torch.cat(planes, dim=4).flatten(3, 4)


def _from_planes(quads: Tensor, geo: Geometry) -> Tensor:
    """Invert `_planes`."""
    packed_bits, groups = geo.format.packed_bits, plane_groups(geo.format.packed_bits)
    low, high = quads.unflatten(3, (-1, geo.unit * packed_bits // 32)).split((geo.unit // 8, geo.unit // 4 // groups), dim=4)
    low = torch.stack((low & 15, low >> 4), dim=5).flatten(4, 5)
    shifts = torch.arange(groups, dtype=torch.uint8, device=quads.device).view(-1, 1) * (packed_bits - 4)
    high = (high.unsqueeze(5) >> shifts & (1 << packed_bits - 4) - 1).flatten(4, 5)
    q: Tensor = low | high << 4
    return (q + (geo.format.pad_index - (1 << packed_bits - 1) if geo.format.signed else 0)).flatten(3, 4)


def pack(codes: Codes) -> Packed:
    """Pack codes for the CPU; 2:4 sparse ones as any others: `kernels/cpu/linear/sparse.py` leaves zeros out."""
    fmt, geo = codes.format, geometry(codes.format, codes.shape)
    n, k = geo.n, geo.k
    if n == 0 or k == 0:
        return Packed(fmt, codes.shape, NAME, torch.empty(0, dtype=torch.uint8, device="cpu"))
    data = codes.data.reshape(n, -1)
    tails = [_per_row(t, n, geo) for t in (codes.scale, codes.zero) if t is not None]
    out = allocate(geo.nbytes).view(geo.panels, geo.panel_bytes)
    full = geo.blocks - 1  # the last record may be shorter
    step = max(1, _CHUNK_ELEMENTS // (PANEL * k))
    for start in range(0, geo.panels, step):
        stop = min(geo.panels, start + step)
        rows = slice(start * PANEL, min(n, stop * PANEL))
        missing = (stop - start) * PANEL - (rows.stop - rows.start)
        u = _stored(data[rows], k, fmt)
        u = torch.nn.functional.pad(u, (0, 0, 0, missing), value=fmt.pad_index).view(stop - start, PANEL, k)
        parts = [torch.nn.functional.pad(t[rows], (0, 0, 0, missing)).view(stop - start, PANEL, geo.blocks) for t in tails]
        fill = torch.tensor(fmt.pad_index, dtype=torch.uint8, device="cpu").expand(stop - start, PANEL, geo.blocks, 1)
        if fmt.zero == "point":
            fill = parts[1].unsqueeze(-1)
        cut = full * geo.record_bytes(geo.padded)
        if full:
            body = u[:, :, : full * geo.block].reshape(stop - start, PANEL, full, geo.block)
            body = _pad_k(body, geo.padded, fill[:, :, :full])
            out[start:stop, :cut] = _records(body, [p[:, :, :full] for p in parts], geo.padded, geo).flatten(1)
        last = _pad_k(u[:, :, full * geo.block :].unsqueeze(2), geo.last_padded, fill[:, :, full:])
        out[start:stop, cut:] = _records(last, [p[:, :, full:] for p in parts], geo.last_padded, geo).flatten(1)
    return Packed(fmt, codes.shape, NAME, out.view(-1))


def _stored(data: Tensor, k: int, fmt: Format) -> Tensor:
    """Turn canonical data of some rows into a byte for each element, as it is stored."""
    if fmt.bits == 4:
        return unpack_nibbles(data, k)
    return data.view(torch.uint8) ^ 128 if fmt.signed else data


def _per_row(per_block: Tensor, n: int, geo: Geometry) -> Tensor:
    """Turn scales or zeros of canonical shape into [N, records]."""
    if geo.format.block == "tensor":
        return per_block.reshape(1, 1).expand(n, geo.blocks)
    flat = per_block.reshape(n, -1)
    if flat.shape[1] == geo.blocks:
        return flat
    return flat[:, torch.arange(geo.blocks, device="cpu") * geo.block // geo.format.block_size(geo.k)]


def unpack(packed: Packed) -> Codes:
    """Return the codes of a weight in either layout: the exact inverse of `pack`."""
    fmt, shape, geo = packed.format, packed.shape, geometry(packed.format, packed.shape, sparse=packed.layout == SPARSE)
    if packed.layout != geo.layout or packed.data.numel() != geo.nbytes:
        got = f"{packed.data.numel()} in layout {packed.layout}"
        raise FormatError(f"{fmt} of shape {list(shape)} takes {geo.nbytes} bytes in layout {geo.layout}, got {got}")
    n, k, full = geo.n, geo.k, geo.blocks - 1
    if k == 0 or n == 0:
        return Codes.zeros(fmt, shape)
    panels = packed.data.view(geo.panels, geo.panel_bytes)
    cut = full * geo.record_bytes(geo.padded)
    data_parts, tail_parts = list[Tensor](), list[list[Tensor]]()
    step = max(1, _CHUNK_ELEMENTS // (PANEL * k))
    for start in range(0, geo.panels, step):
        chunk = panels[start : start + step]
        sections = [(chunk[:, :cut].reshape(len(chunk), full, -1), geo.padded, geo.block)] if full else []
        sections.append((chunk[:, cut:].unsqueeze(1), geo.last_padded, geo.last))
        read = [_read_records(records, padded, size, geo) for records, padded, size in sections]
        rows = min(n, (start + len(chunk)) * PANEL) - start * PANEL
        u = torch.cat([r[0] for r in read], dim=1)[:rows]
        data_parts.append(pack_nibbles(u) if fmt.bits == 4 else (u ^ 128).view(torch.int8) if fmt.signed else u)
        tail_parts.append([torch.cat(column, dim=1)[:rows] for column in zip(*(r[1] for r in read), strict=True)])
    tails = [_canonical(torch.cat(column), fmt.scale_shape(shape), geo) for column in zip(*tail_parts, strict=True)]
    data = torch.cat(data_parts)
    return Codes(fmt, shape, data.reshape(*shape[:-1], data.shape[-1]), *tails)


def _read_records(records: Tensor, padded: int, size: int, geo: Geometry) -> tuple[Tensor, list[Tensor]]:
    """Read the records of some panels: the inverse of `_records`, for both layouts.

    Args:
        records: uint8 [P, blocks, record bytes].
        padded: Elements of a record, with those that pad it.
        size: Elements of a record without them.
        geo: Of the weight.

    Returns:
        Stored elements, uint8 [P * 32, blocks * size], and scales and zeros, [P * 32, blocks] each.
    """
    fmt, (panels, blocks, _) = geo.format, records.shape
    at = data_bytes(geo.bits, padded, sparse=geo.sparse)
    if geo.sparse:
        points = records[:, :, at + PANEL * geo.scale_bytes :][:, :, :PANEL].unsqueeze(2) if fmt.zero == "point" else fmt.pad_index
        quads = _quads(records[:, :, :at].reshape(panels, blocks, -1, at * SPARSE_UNIT // padded), fmt.bits, points).permute(0, 3, 1, 2, 4)
    else:
        quads = records[:, :, :at].reshape(panels, blocks, -1, PANEL, 4).permute(0, 3, 1, 2, 4)
    if fmt.packed_bits:
        quads = _from_planes(quads, geo)
    elif fmt.bits == 4 and not geo.sparse:
        quads = torch.stack((quads & 15, quads >> 4), dim=4)
    u = quads.reshape(panels * PANEL, blocks, padded)[:, :, :size].reshape(panels * PANEL, blocks * size)
    tails = []
    for dtype in (fmt.scale, fmt.zero_dtype):
        if dtype is None:
            continue
        width = PANEL * dtype.itemsize
        tail = records[:, :, at : at + width].contiguous().view(dtype).view(panels, blocks, PANEL)
        tails.append(tail.permute(0, 2, 1).reshape(panels * PANEL, blocks))
        at += width
    return u, tails


def _quads(units: Tensor, bits: int, zero: Tensor | int) -> Tensor:
    """Expand the data of 2:4 sparse weights.

    Args:
        units: The data, uint8 [P, blocks, units, bytes of each].
        bits: Bits of a code.
        zero: The stored code that means 0: a number, or [P, blocks, 1, 32].

    Returns:
        Stored elements, uint8 [P, blocks, groups of 4 k, 32, 4].
    """
    codes, masks = units.split((units.shape[-1] - 128, 128), dim=-1)
    codes = codes.reshape(*units.shape[:3], -1, 1, PANEL, KEPT)
    if bits == 4:
        codes = torch.cat((codes & 15, codes >> 4), dim=4)
    first, second = codes.reshape(*units.shape[:2], -1, PANEL, KEPT).unbind(-1)
    masks = torch.stack((masks & 15, masks >> 4), dim=-1).reshape(first.shape).int()
    # The shuffle that moves each number to its byte of a 32-bit word, by positions: the first code, the second, and the code of 0.
    kept_positions = [[k for k in range(GROUP) if p >> k & 1] for p in range(1 << GROUP)]
    moved = [[1 << 8 * ks[i] if len(ks) == KEPT else 0 for ks in kept_positions] for i in range(KEPT)]
    moved.append([sum(1 << 8 * k for k in range(GROUP) if k not in ks) for ks in kept_positions])
    by_mask = torch.tensor(moved, dtype=torch.int32, device="cpu")
    words: Tensor = first * by_mask[0][masks] + second * by_mask[1][masks] + zero * by_mask[2][masks]
    return words.view(torch.uint8).view(*masks.shape, GROUP)


def _canonical(tail: Tensor, scale_shape: tuple[int, ...], geo: Geometry) -> Tensor:
    """Invert `_per_row`."""
    if geo.format.block == "tensor":
        return tail[:1, :1].reshape(scale_shape).clone()
    blocks = scale_shape[-1]
    if blocks != geo.blocks:
        tail = tail[:, torch.arange(blocks, device=tail.device) * geo.format.block_size(geo.k) // geo.block]
    return tail.reshape(scale_shape).contiguous()

"""The weight layouts: `unpack` as the exact inverse of `pack`; the CPU's byte by byte against its text."""

import math
from types import ModuleType

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import formats, random_codes, same_codes

from halfbyte.errors import FormatError
from halfbyte.formats import Codes, Format, as_format
from halfbyte.formats.codes import unpack_nibbles
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import geometry, pack, unpack

LAYOUTS = pytest.mark.parametrize("layout", [cpu_tiles, gpu_tiles], ids=lambda layout: layout.NAME)
shapes = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 140), st.integers(0, 330)).map(lambda s: (*s[0], s[1], s[2]))


@LAYOUTS
@given(formats, shapes)
def test_unpack_is_the_inverse_of_pack(layout: ModuleType, fmt: Format, shape: tuple[int, ...]) -> None:
    codes = random_codes(fmt, shape)
    packed = layout.pack(codes)
    assert (packed.format, packed.shape, packed.layout, packed.data.dtype) == (fmt, shape, layout.NAME, torch.uint8)
    assert packed.data.numel() == layout.geometry(fmt, shape).nbytes
    back = layout.unpack(packed)
    if math.prod(shape):
        assert same_codes(back, codes)
    else:  # nothing is stored of a weight without elements, not even the one scale of a tensor
        assert torch.equal(back.data, codes.data)
        assert back.scale.shape == codes.scale.shape


@LAYOUTS
@pytest.mark.parametrize("name", ["q4_0", "int4_g20_zp", "int8_g300_offset", "int8_channel_zp", "int4_tensor"])
def test_large_weights_go_through_in_several_pieces(layout: ModuleType, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(as_format(name), (5, 33, 301))
    whole = layout.pack(codes).data
    # Two panels at a time: 165 rows are six of 32, or three of 64.
    monkeypatch.setattr(layout, "_CHUNK_ELEMENTS", 2 * 32 * 301 if layout is cpu_tiles else 2 * 64 * 512)
    packed = layout.pack(codes)
    assert torch.equal(packed.data, whole)
    assert same_codes(layout.unpack(packed), codes)


@LAYOUTS
def test_bytes_of_another_size_or_layout_are_refused(layout: ModuleType) -> None:
    packed = layout.pack(random_codes(as_format("q4_0"), (3, 40)))
    size, name = packed.data.numel(), layout.NAME
    with pytest.raises(FormatError, match=rf"q4_0 of shape \[3, 40\] takes {size} bytes in layout {name}, got {size - 1} in layout {name}"):
        layout.unpack(Packed(packed.format, packed.shape, name, packed.data[:-1]))
    with pytest.raises(FormatError, match=f"got {size} in layout plain"):
        layout.unpack(Packed(packed.format, packed.shape, "plain", packed.data))


# The CPU's


@pytest.mark.parametrize("block", ["channel", "tensor", 200, 96, 97])
@pytest.mark.parametrize("zero", ["none", "point", "offset"])
def test_long_blocks_are_cut_into_records_with_the_same_scale(block: int | str, zero: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tiles, "LONGEST_BLOCK", 64)
    codes = random_codes(Format(4, block, zero), (35, 203))
    geo = geometry(codes.format, codes.shape)
    # 203 elements in pieces of at most 64. In a row of several blocks a piece divides the block: 200 = 4 * 50, 96 = 2 * 48, 97 is prime.
    assert (geo.block, geo.blocks, geo.last) == {200: (50, 5, 3), 96: (48, 5, 11), 97: (1, 203, 1)}.get(block, (64, 4, 11))
    assert same_codes(unpack(pack(codes)), codes)
    assert pack(codes).data.tolist() == written_out(codes)


@given(formats, st.integers(1, 40), st.integers(1, 110))
def test_every_byte_is_where_the_text_says(fmt: Format, n: int, k: int) -> None:
    codes = random_codes(fmt, (n, k))
    assert pack(codes).data.tolist() == written_out(codes)


def written_out(codes: Codes) -> list[int]:
    """The bytes of `codes` by the text of cpu_tiles.py, one at a time."""
    fmt, (n, k) = codes.format, codes.shape
    geo = geometry(fmt, codes.shape)
    stored = unpack_nibbles(codes.data, k) if fmt.bits == 4 else codes.values() - fmt.q_min
    scales, zeros = (None if t is None else codes.spread(t).expand(n, k) for t in (codes.scale, codes.zero))

    def tail(values: torch.Tensor, panel: int, at: int) -> list[int]:
        column = torch.zeros(32, dtype=values.dtype)
        rows = values[panel * 32 : panel * 32 + 32, at]
        column[: len(rows)] = rows
        return column.view(torch.uint8).tolist()

    def element(panel: int, row: int, at: int, stop: int) -> int:
        r = panel * 32 + row
        if r < n and at < stop:
            return int(stored[r, at])
        if fmt.zero == "point":
            return int(zeros[r, stop - 1]) if r < n else 0
        return fmt.pad_index

    out: list[int] = []
    for panel in range(-(-n // 32)):
        for start in range(0, k, geo.block):
            stop = min(k, start + geo.block)
            length = -(-(stop - start) // geo.unit) * geo.unit
            step = 32 // fmt.bits
            for first in range(start, start + length, step):
                for row in range(32):
                    q = [element(panel, row, first + i, stop) for i in range(step)]
                    out += [q[j] | q[4 + j] << 4 for j in range(4)] if fmt.bits == 4 else q
            out += tail(scales, panel, start) + ([] if zeros is None else tail(zeros, panel, start))
            if fmt.bits == 8 and not isinstance(fmt.block, int):
                rows = [[element(panel, row, at, stop) for at in range(start, start + length)] for row in range(32)]
                pairs = [sum(a * b for a, b in zip(row[0::2], row[1::2], strict=True)) for row in rows]
                out += torch.tensor(pairs, dtype=torch.int32).view(torch.uint8).tolist()
            out += [0] * (-len(out) % 64)
    return out


@given(formats, st.integers(1, 100), st.integers(1, 1000))
def test_geometry(fmt: Format, n: int, k: int) -> None:
    geo = geometry(fmt, (n, k))
    assert geo.unit in (8, 32)
    assert (geo.blocks - 1) * geo.block + geo.last == k
    assert 0 < geo.last <= geo.block <= geo.padded < geo.block + geo.unit
    # A vector load of any width stays within a record, and each record begins a cache line.
    assert geo.record_bytes(geo.padded) % 64 == geo.record_bytes(geo.last_padded) % 64 == geo.panel_bytes % 64 == 0
    data = pack(random_codes(fmt, (n, k))).data
    assert data.numel() == geo.nbytes
    assert data.data_ptr() % 64 == 0

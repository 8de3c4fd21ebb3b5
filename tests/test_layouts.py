"""The CPU weight layout: byte by byte against its text, and `unpack` as the exact inverse of `pack`."""

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import random_codes

from halfbyte.errors import FormatError
from halfbyte.formats import PRESETS, Codes, Format, as_format
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import NAME, geometry, pack, unpack

SCALES = (torch.float16, torch.bfloat16, torch.float32)
formats = st.one_of(
    st.builds(
        Format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 3, 8, 20, 32, 33, 64, 100, 288, 300, "channel", "tensor"]),
        st.sampled_from(["none", "point", "offset"]),
        st.sampled_from(SCALES),
    ),
    st.sampled_from(list(PRESETS.values())),
)
shapes = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 70), st.integers(0, 330)).map(lambda s: (*s[0], s[1], s[2]))


def equal(a: Codes, b: Codes) -> bool:
    """The same format, shape and bits, which dequantize() and a checkpoint are made of."""
    mine, other = a.tensors(), b.tensors()
    same = (a.format, a.shape, mine.keys()) == (b.format, b.shape, other.keys())
    return same and all(torch.equal(mine[name], other[name]) for name in mine)


@given(formats, shapes)
def test_unpack_is_the_inverse_of_pack(fmt: Format, shape: tuple[int, ...]) -> None:
    codes = random_codes(fmt, shape)
    packed = pack(codes)
    assert (packed.format, packed.shape, packed.layout, packed.data.dtype) == (fmt, shape, NAME, torch.uint8)
    back = unpack(packed)
    if math.prod(shape):
        assert equal(back, codes)
    else:  # nothing is stored of a weight without elements, not even the one scale of a tensor
        assert torch.equal(back.data, codes.data)
        assert back.scale.shape == codes.scale.shape


@pytest.mark.parametrize("name", ["q4_0", "int4_g20_zp", "int8_g300_offset", "int8_channel_zp", "int4_tensor"])
def test_large_weights_go_through_in_several_pieces(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(as_format(name), (5, 33, 301))
    whole = pack(codes).data
    monkeypatch.setattr(cpu_tiles, "_CHUNK_ELEMENTS", 2 * 32 * 301)  # two panels at a time; 165 rows are six
    packed = pack(codes)
    assert torch.equal(packed.data, whole)
    assert equal(unpack(packed), codes)


@pytest.mark.parametrize("block", ["channel", "tensor", 200, 96, 97])
@pytest.mark.parametrize("zero", ["none", "point", "offset"])
def test_long_blocks_are_cut_into_records_with_the_same_scale(block: int | str, zero: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cpu_tiles, "LONGEST_BLOCK", 64)
    codes = random_codes(Format(4, block, zero), (35, 203))
    geo = geometry(codes.format, codes.shape)
    # 203 elements in pieces of at most 64. In a row of several blocks a piece divides the block: 200 = 4 * 50, 96 = 2 * 48, 97 is prime.
    assert (geo.block, geo.blocks, geo.last) == {200: (50, 5, 3), 96: (48, 5, 11), 97: (1, 203, 1)}.get(block, (64, 4, 11))
    assert equal(unpack(pack(codes)), codes)
    assert pack(codes).data.tolist() == written_out(codes)


@given(formats, st.integers(1, 40), st.integers(1, 110))
def test_every_byte_is_where_the_text_says(fmt: Format, n: int, k: int) -> None:
    codes = random_codes(fmt, (n, k))
    assert pack(codes).data.tolist() == written_out(codes)


def written_out(codes: Codes) -> list[int]:
    """The bytes of `codes` by the text of cpu_tiles.py, one at a time."""
    fmt, (n, k) = codes.format, codes.shape
    geo = geometry(fmt, codes.shape)
    stored = codes.values() - fmt.q_min
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
        return -fmt.q_min

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


def test_bytes_of_another_size_or_layout_are_refused() -> None:
    packed = pack(random_codes(as_format("q4_0"), (3, 40)))
    with pytest.raises(FormatError, match=r"q4_0 of shape \[3, 40\] takes 1152 bytes in layout cpu_tiles, got 1151 in layout cpu_tiles"):
        unpack(Packed(packed.format, packed.shape, NAME, packed.data[:-1]))
    with pytest.raises(FormatError, match="got 1152 in layout plain"):
        unpack(Packed(packed.format, packed.shape, "plain", packed.data))

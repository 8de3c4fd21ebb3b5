"""The GPU weight layout: element by element against its text, and `unpack` as the exact inverse of `pack`."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import random_codes

from halfbyte.errors import FormatError
from halfbyte.formats import PRESETS, Codes, Format, as_format
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.gpu_tiles import NAME, geometry, pack, unpack, views

formats = st.one_of(
    st.builds(
        Format,
        st.sampled_from([4, 8]),
        st.sampled_from([1, 3, 20, 32, 33, 64, 65, 100, 128, 288, 300, 10**8, "channel", "tensor"]),
        st.sampled_from(["none", "point", "offset"]),
        st.sampled_from([torch.float16, torch.bfloat16, torch.float32]),
    ),
    st.sampled_from(list(PRESETS.values())),
)
shapes = st.tuples(st.lists(st.integers(0, 3), max_size=2), st.integers(0, 140), st.integers(0, 330)).map(lambda s: (*s[0], s[1], s[2]))


def equal(a: Codes, b: Codes) -> bool:
    mine, other = a.tensors(), b.tensors()
    same = (a.format, a.shape, mine.keys()) == (b.format, b.shape, other.keys())
    return same and all(torch.equal(mine[name], other[name]) for name in mine)


@given(formats, shapes)
def test_unpack_is_the_inverse_of_pack(fmt: Format, shape: tuple[int, ...]) -> None:
    codes = random_codes(fmt, shape)
    packed = pack(codes)
    assert (packed.format, packed.shape, packed.layout, packed.data.dtype) == (fmt, shape, NAME, torch.uint8)
    assert packed.data.numel() == geometry(fmt, shape).nbytes
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
    monkeypatch.setattr(gpu_tiles, "_CHUNK_ELEMENTS", 2 * 64 * 512)
    packed = pack(codes)
    assert torch.equal(packed.data, whole)
    assert equal(unpack(packed), codes)


@given(formats, st.integers(1, 140), st.integers(1, 330))
@settings(max_examples=30)
def test_every_element_is_where_the_text_says(fmt: Format, n: int, k: int) -> None:
    codes = random_codes(fmt, (n, k))
    geo = geometry(fmt, (n, k))
    stored = views(pack(codes).data, geo)
    q, rows, ks = torch.zeros(geo.n_padded, geo.k_padded, dtype=torch.int64), torch.arange(geo.n_padded), torch.arange(geo.k_padded)
    for start in range(0, k, geo.block):
        at, size = start // geo.block * geo.padded, min(geo.block, k - start)
        q[:n, at : at + size] = codes.values()[:, start : start + size]
    if fmt.bits == 8:
        assert torch.equal(stored.codes.long(), q if fmt.signed else q - 128)
    else:
        row, column = rows % 64, ks % 128
        nt, rowhalf, row = row // 16, row // 8 % 2, row % 8
        j, kt, khalf, k4, low = column // 32, column // 16 % 2, column // 8 % 2, column // 2 % 4, column % 2
        by_row = rows // 64 * geo.records * 2048 + nt * 256 + row * 32 + rowhalf * 2
        by_column = ks // 128 * 2048 + kt * 1024 + k4 * 8 + khalf * 4 + low
        words = stored.codes.reshape(-1).long() & 0xFFFF
        nibbles = words[by_row[:, None] + by_column] >> 4 * j & 15
        assert torch.equal(nibbles, q + 8 if fmt.signed else q)
    for section, values in ((stored.scale, codes.scale), (stored.zero, codes.zero)):
        if section is not None:
            assert torch.equal(section[: geo.blocks, :n].T, values.expand(n, geo.blocks))
            assert not section[geo.blocks :].any()
            assert not section[:, n:].any()


@given(formats, st.integers(1, 200), st.integers(1, 1000))
def test_geometry(fmt: Format, n: int, k: int) -> None:
    geo = geometry(fmt, (n, k))
    assert (geo.blocks - 1) * geo.block + geo.last == k
    assert geo.padded in (32, 64) or geo.padded % 128 == 0
    assert geo.n_padded % 64 == geo.k_padded % 128 == geo.nbytes % 256 == geo.scale_offset % 256 == geo.zero_offset % 256 == 0
    assert 0 <= geo.k_padded - ((geo.blocks - 1) * geo.padded + geo.last) < 128
    assert geo.blocks <= geo.block_rows == -(-geo.k_padded // geo.padded)
    if geo.contiguous:
        assert 0 <= geo.k_padded - k < 128


def test_bytes_of_another_size_or_layout_are_refused() -> None:
    packed = pack(random_codes(as_format("q4_0"), (3, 40)))
    with pytest.raises(FormatError, match=r"q4_0 of shape \[3, 40\] takes 4608 bytes in layout gpu_tiles, got 4607 in layout gpu_tiles"):
        unpack(Packed(packed.format, packed.shape, NAME, packed.data[:-1]))
    with pytest.raises(FormatError, match="got 4608 in layout plain"):
        unpack(Packed(packed.format, packed.shape, "plain", packed.data))

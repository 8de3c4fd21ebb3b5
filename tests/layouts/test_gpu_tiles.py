"""The GPU weight layout: element by element against its text (and see test_layouts.py)."""

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import formats, random_codes, same_codes

from halfbyte import ops
from halfbyte.formats import Format, as_format
from halfbyte.formats.codes import unpack_nibbles
from halfbyte.layouts.gpu_tiles import geometry, geometry_of, in_order, pack, unpack, views
from halfbyte.nn.described import Scale
from halfbyte.nn.static.integer import IntegerLinear


@given(formats, st.integers(1, 140), st.integers(1, 330))
@settings(max_examples=30)
def test_every_element_is_where_the_text_says(fmt: Format, n: int, k: int) -> None:
    codes = random_codes(fmt, (n, k))
    geo = geometry(fmt, (n, k))
    stored = views(pack(codes).data, geo)
    values = unpack_nibbles(codes.data, k).long() - 8 if fmt.codebook else codes.values()  # of a table: the index is what lies there
    q, rows, ks = torch.zeros(geo.n_padded, geo.k_padded, dtype=torch.int64), torch.arange(geo.n_padded), torch.arange(geo.k_padded)
    for start in range(0, k, geo.block):
        at, size = start // geo.block * geo.padded, min(geo.block, k - start)
        q[:n, at : at + size] = values[:, start : start + size]
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


@given(formats.filter(lambda fmt: fmt.bits == 8), st.integers(1, 140), st.integers(1, 330))
@settings(max_examples=30)
def test_paired_bytes(fmt: Format, n: int, k: int) -> None:
    codes = random_codes(fmt, (n, k))
    plain, paired = pack(codes), pack(codes, paired=True)
    geo = geometry(fmt, (n, k), paired=True)
    assert (geometry_of(fmt, n, k, paired.data.numel()), geometry_of(fmt, n, k, plain.data.numel())) == (geo, geometry(fmt, (n, k)))
    order = [2 * pair + low for pair in (0, 4, 1, 5, 2, 6, 3, 7) for low in (0, 1)]
    at = torch.arange(0, geo.k_padded, 16)[:, None] + torch.tensor(order)
    for i, (there, here) in enumerate(zip(views(plain.data, geo), views(paired.data, geo), strict=True)):
        assert (there is None and here is None) or torch.equal(there[:, at.flatten()] if i == 0 else there, here)
    assert same_codes(unpack(paired), codes)
    back = in_order(paired)
    assert (back.layout, in_order(plain)) == (plain.layout, plain)
    assert torch.equal(back.data, plain.data)


def test_layers_on_codes_keep_the_order_of_k() -> None:
    codes, scale = random_codes(as_format("int8_channel"), (70, 100)), Scale(0.1, 3)
    layer = IntegerLinear(pack(codes, paired=True), None, scale, scale, (-128, 127))
    assert torch.equal(layer.packed_data, pack(codes).data)
    layer._set_packed(pack(codes, paired=True))  # as `.to` does
    assert torch.equal(layer.packed.data, pack(codes).data)
    assert layer.packed.layout == pack(codes).layout


@given(formats, st.integers(1, 200), st.integers(1, 1000))
def test_geometry(fmt: Format, n: int, k: int) -> None:
    geo = geometry(fmt, (n, k))
    assert (geo.blocks - 1) * geo.block + geo.last == k
    assert geo.padded in (16, 32, 64) or geo.padded % 128 == 0
    assert geo.n_padded % 64 == geo.k_padded % 128 == geo.nbytes % 256 == geo.scale_offset % 256 == geo.zero_offset % 256 == 0
    assert 0 <= geo.k_padded - ((geo.blocks - 1) * geo.padded + geo.last) < 128
    assert geo.blocks <= geo.block_rows == -(-geo.k_padded // geo.padded)
    if geo.contiguous:
        assert 0 <= geo.k_padded - k < 128


@pytest.mark.parametrize("fmt", ["int8_g16", "int8_g16_zp", "int4_g16", "int4_g16_offset", "nvfp4"])
def test_blocks_of_16_are_not_padded(fmt: str) -> None:
    """Q6_K's and NVFP4's blocks: a record has eight, each the k of one mma.m16n8k16."""
    geo = geometry(as_format(fmt), (64, 256))
    assert geo.contiguous
    assert (geo.padded, geo.blocks_a_record, geo.block_rows, geo.codes_bytes) == (16, 8, 16, 64 * 256 * geo.format.bits // 8)
    words = pack(ops.quantize(torch.eye(64, 256), fmt)).data
    assert len(words) == geo.nbytes

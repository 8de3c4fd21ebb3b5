"""The packing kernel gives the bytes that the layout's own definition gives."""

import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import random_codes

import halfbyte as hb
from halfbyte.formats import as_format
from halfbyte.kernels.cpu import pack
from halfbyte.layouts import cpu_tiles

FORMATS = ("q4_0", "q4_1", "q8_0", "int4_g128_zp", "int8_g64_zp", "int4_g40_offset_bf16", "int8_channel", "int4_channel_zp")
FORMATS += ("int8_g264_offset",)  # blocks that are padded


@given(name=st.sampled_from(FORMATS), n=st.integers(1, 100), eights=st.integers(1, 80), seed=st.integers(0, 9))
def test_the_same_bytes(name: str, n: int, eights: int, seed: int) -> None:
    codes = random_codes(as_format(name), (n, 8 * eights), seed)
    assert pack.supports(codes) is None
    assert pack.pack(codes).data.equal(cpu_tiles.pack(codes).data)
    assert pack.pack(codes).data.data_ptr() % 64 == 0


LEFT = [("q4_0", (3, 33)), ("int4_g20", (5, 40)), ("q8_0", (0, 32)), ("q8_0", (2, 3, 31)), ("int8_tensor", (3, 16))]


@pytest.mark.parametrize(("name", "shape"), LEFT)
def test_what_it_leaves_to_the_layout(name: str, shape: tuple[int, ...]) -> None:
    codes = random_codes(as_format(name), shape)
    assert pack.supports(codes)
    assert hb.pack(codes).data.equal(cpu_tiles.pack(codes).data)
    for key, tensor in codes.tensors().items():
        assert tensor.numel() == 0 or hb.unpack(hb.pack(codes)).tensors()[key].equal(tensor)


def test_experts_are_rows() -> None:
    codes = random_codes(as_format("q4_0"), (3, 21, 64))
    assert pack.pack(codes).data.equal(cpu_tiles.pack(codes).data)
    assert hb.dequantize(hb.pack(codes)).equal(codes.dequantize())

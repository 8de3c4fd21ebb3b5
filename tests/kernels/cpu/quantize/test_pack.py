"""The packing kernel gives the bytes that the layout's own definition gives."""

import re
import sys
from pathlib import Path

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from samples import random_codes

import halfbyte as hb
from halfbyte import ops
from halfbyte.formats import Codes, as_format
from halfbyte.kernels.cpu.quantize import pack
from halfbyte.layouts import cpu_tiles

FORMATS = ("q4_0", "q4_1", "q8_0", "int4_g128_zp", "int8_g64_zp", "int4_g40_offset_bf16", "int8_channel", "int4_channel_zp")
FORMATS += ("int8_g264_offset",)  # blocks that are padded


@given(name=st.sampled_from(FORMATS), n=st.integers(1, 100), eights=st.integers(1, 80), seed=st.integers(0, 9))
def test_the_same_bytes(name: str, n: int, eights: int, seed: int) -> None:
    codes = random_codes(as_format(name), (n, 8 * eights), seed)
    assert pack.supports(codes) is None
    assert pack.pack(codes).data.equal(cpu_tiles.pack(codes).data)
    assert pack.pack(codes).data.data_ptr() % 64 == 0


LEFT = [("q4_0", (3, 33)), ("int4_g20", (5, 40)), ("q8_0", (0, 32)), ("q8_0", (6, 31)), ("int8_tensor", (3, 16))]


@pytest.mark.parametrize(("name", "shape"), LEFT)
def test_what_it_leaves_to_the_layout(name: str, shape: tuple[int, ...]) -> None:
    codes = random_codes(as_format(name), shape)
    assert pack.supports(codes)
    assert hb.pack(codes).data.equal(cpu_tiles.pack(codes).data)
    for key, tensor in codes.tensors().items():
        assert tensor.numel() == 0 or hb.unpack(hb.pack(codes)).tensors()[key].equal(tensor)


@pytest.mark.parametrize(("name", "rows"), [("q4_0", 32), ("int4_g128_zp", 64), ("int8_channel", 96), ("int8_g16", 33)])
def test_joined_rows(name: str, rows: int) -> None:
    parts = [random_codes(as_format(name), (n, 200), n) for n in (64, rows)]
    whole = ops.join([hb.pack(part) for part in parts])
    expected = hb.pack(Codes.joined(parts, torch.cat))
    assert whole.shape == expected.shape == (64 + rows, 200)
    assert whole.data.equal(expected.data)
    assert whole.data.data_ptr() % 64 == 0


@pytest.mark.skipif(sys.platform != "linux", reason="elsewhere weights do not lie side by side")
def test_weights_packed_one_after_the_other_are_joined_where_they_are() -> None:
    codes = [random_codes(as_format("q4_0"), (n, 64), n) for n in (64, 32, 96)]
    first, second, third = (hb.pack(each) for each in codes)
    start, other = first.data.data_ptr(), ops.join([second, first])
    assert other.data.data_ptr() not in (start, second.data.data_ptr())
    whole = ops.join([first, second, third])
    assert whole.data.data_ptr() == start
    del first, second, third
    cpu_tiles.allocate(1 << 20).fill_(255)
    assert hb.dequantize(whole).equal(torch.cat([each.dequantize() for each in codes]))


def test_experts_are_rows() -> None:
    codes = random_codes(as_format("q4_0"), (3, 21, 64))
    assert pack.pack(codes).data.equal(cpu_tiles.pack(codes).data)
    assert hb.dequantize(hb.pack(codes)).equal(codes.dequantize())


@pytest.mark.skipif(sys.platform != "linux", reason="how Linux is asked for huge pages")
def test_large_weights_and_outputs_lie_in_huge_pages_where_there_are_such() -> None:
    if not Path("/sys/kernel/mm/transparent_hugepage/enabled").exists():
        pytest.skip("this kernel has no transparent huge pages")
    packed = hb.pack(random_codes(as_format("q8_0"), (4096, 2048)))
    assert in_huge_pages(packed.data)
    assert hb.unpack(packed).data.shape == (4096, 2048)
    assert in_huge_pages(hb.linear(torch.zeros(2048, 32), hb.pack(random_codes(as_format("q8_0"), (4096, 32)))))


def in_huge_pages(memory: torch.Tensor) -> bool:
    middle, inside = memory.data_ptr() + memory.nbytes // 2, False
    for line in Path("/proc/self/smaps").read_text().splitlines():
        if match := re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line):
            inside = int(match[1], 16) <= middle < int(match[2], 16)
        elif inside and line.startswith("VmFlags:"):
            return " hg" in line
    return False


@pytest.mark.parametrize("nbytes", [0, 1, 100, 1 << 20, 1 << 21, (1 << 22) + 7, 9 << 20])
def test_any_amount_is_allocated(nbytes: int) -> None:
    memory = cpu_tiles.allocate(nbytes)
    assert memory.shape == (nbytes,)
    assert memory.fill_(3).eq(3).all()

"""Codes of 5 and 6 bits: what the CPU's layout makes of them, and that every product is that of the same codes in 8 bits, bit for bit."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from samples import random_codes

import halfbyte as hb
from halfbyte.errors import FormatError, KernelError
from halfbyte.formats import Codes, as_format
from halfbyte.kernels.cpu.codegen.isa_amx import AMXInt8
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.quantize import pack
from halfbyte.layouts import cpu_tiles

NAMES = ("int6_g16", "int6_g32_offset", "int5_g32_offset_f32", "int5_g16", "int6_g264")


@pytest.mark.parametrize("shape", [(33, 48), (5, 264)])
@pytest.mark.parametrize("name", NAMES)
def test_products_are_those_of_8_bits(name: str, shape: tuple[int, int]) -> None:
    fmt = as_format(name)
    assert str(fmt) == name
    codes = random_codes(fmt, shape)
    codes.check_values()
    laid_out = cpu_tiles.pack(codes)
    back = cpu_tiles.unpack(laid_out)
    assert back.data.equal(codes.data)
    assert back.scale.equal(codes.scale)
    assert pack.pack(codes).data.equal(laid_out.data)
    packed, wide = hb.pack(codes), hb.pack(codes.integers())
    assert hb.dequantize(packed).equal(codes.dequantize())
    assert hb.embedding(torch.tensor([4, 0, 4]), packed).equal(codes.dequantize()[[4, 0, 4]])
    x = torch.randn(60, shape[1])
    for rows in (1, 3, 60):
        for compute in ("int8", "float"):
            assert hb.linear(x[:rows], packed, compute=compute).equal(hb.linear(x[:rows], wide, compute=compute))


@pytest.mark.skipif(not current().reads_packed_bits, reason="they have 8 bits here")
def test_bytes() -> None:
    """Of two panels: records of codes and float16 scales."""
    assert hb.pack(random_codes(as_format("int6_g16"), (64, 160))).nbytes == 2 * 10 * 32 * (16 * 6 // 8 + 2)
    assert hb.pack(random_codes(as_format("int5_g32_offset"), (64, 160))).nbytes == 2 * 5 * 32 * (32 * 5 // 8 + 4)


def test_every_code() -> None:
    for name, low, high in (("int5_g32", -16, 15), ("int6_g32", -32, 31), ("int6_g32_offset", 0, 63)):
        fmt = as_format(name)
        assert (fmt.q_min, fmt.q_max) == (low, high)
        values = torch.arange(low, high + 1, dtype=torch.int16).repeat(3, 3)[:, :96]
        zero = torch.zeros(3, 3, dtype=torch.float16) if fmt.zero == "offset" else None
        codes = Codes.from_values(fmt, values, torch.ones(3, 3, dtype=torch.float16), zero)
        assert hb.dequantize(hb.pack(codes)).equal(values.float())
        with pytest.raises(FormatError, match="codes lie in"):
            Codes.from_values(fmt, values + 1, codes.scale, zero)
        codes.data[1, 5] = high + 1
        with pytest.raises(FormatError, match="codes lie in"):
            codes.check_values()


def test_where_no_kernel_reads_them_they_have_8_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = random_codes(as_format("int6_g16"), (40, 64))
    monkeypatch.setattr(type(current()), "reads_packed_bits", False)
    packed = hb.pack(codes)
    assert str(packed.format) == "int8_g16"
    assert hb.dequantize(packed).equal(codes.dequantize())
    with pytest.raises(KernelError, match="5 and 6 bits"):
        LinearKernel(codes.format, 40, 64, torch.float32, "int8", "block", isa=AMXInt8())


@pytest.mark.parametrize("name", ["int6_channel", "int5_tensor", "int6_g32_zp", "int7_g32"])
def test_there_are_blocks_and_no_points(name: str) -> None:
    with pytest.raises(FormatError):
        as_format(name)


def test_weights_are_quantized_to_them() -> None:
    w = torch.randn(64, 128)
    names = ("int4_g32", "int5_g32", "int6_g32")
    errors = [float((hb.quantize(w, name).dequantize() - w).norm() / w.norm()) for name in names]
    # The step is the largest of 32 over q_max, and errors are uniform in it.
    assert [round(coarser / finer, 1) for coarser, finer in pairwise(errors)] == pytest.approx([15 / 7, 31 / 15], rel=0.1)

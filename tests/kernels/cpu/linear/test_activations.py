"""The conversion of activation rows, bit for bit: codes, scales, offsets and sums where a tile reads them."""

import ctypes

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support import RUNNABLE, examples, pairwise
from torch import Tensor

from halfbyte.formats import Format, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.linear import linear
from halfbyte.kernels.cpu.linear.block_end import HIGHEST_CODE, correction_point
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import ROUND_BITS
from halfbyte.kernels.problem import Activation

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
WAYS = ("block", "row", "block_offset", "row_offset")
# Blocks of one unit and of several, padded and not; with each way of summing: none, of the codes, of the values.
NAMES = ("q4_0", "int8_g20_zp", "int4_g128_offset", "int8_channel_zp", "int8_g33_offset", "q8_0")
FORMATS = [as_format(name) for name in NAMES]
isas = pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)


class Tile:
    """Rows as `kernel` wrote them for one tile of all rows, read by the text of linear/tile.py."""

    def __init__(self, kernel: LinearKernel, x: Tensor) -> None:
        geo, rows = kernel.geometry, len(x)
        memory = torch.full((rows * kernel.row_bytes,), 0xA5, dtype=torch.uint8)
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(linear, "compiled", lambda *_: 0)  # the tiles that would read the rows: compiling them takes most of the time
            arguments = kernel._prepare(1, 1).address
        function = ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * 3, *[ctypes.c_int64] * 2)(kernel.row_function)
        for r in range(rows):
            function(arguments, x[r].data_ptr(), memory.data_ptr(), rows, r)
        inner, bits = kernel.inner, geo.format.bits
        kind = {"int8": torch.int8, "float": torch.float32, "bf16": torch.bfloat16}[inner]
        wide = kernel.isa.activation_bytes(inner, bits) > kind.itemsize  # int16, of each quad the even ones first
        kind = torch.int16 if wide else kind
        data, fields, at = [], [], 0
        for b in range(geo.blocks):
            padded = geo.last_padded if b == geo.blocks - 1 else geo.padded
            size = rows * padded * kind.itemsize
            units = memory[at : at + size].view(kind).view(padded // geo.unit, rows, geo.unit)
            if wide:
                units = units.reshape(-1, 2, 2).transpose(1, 2).reshape(units.shape)
            data.append(units.transpose(0, 1).reshape(rows, padded))
            fields.append(memory[at + size : at + size + 16 * rows].view(4, 4 * rows))
            at += size + 16 * rows
        assert at == memory.numel()
        real = [geo.block] * (geo.blocks - 1) + [geo.last]
        self.padding = torch.cat([d[:, size:] for d, size in zip(data, real, strict=True)], dim=1)
        self.data = torch.cat([d[:, :size] for d, size in zip(data, real, strict=True)], dim=1)
        self.scale, self.sum, self.offset = (torch.stack([f[i].view(torch.float32) for f in fields], dim=1) for i in (0, 2, 3))
        corrections = torch.float32 if kernel.tile_spec.activation.block_sum == "folded" else torch.int32
        self.correction = torch.stack([f[1].view(corrections) for f in fields], dim=1)


def check(kernel: LinearKernel, x: Tensor, way: Activation) -> None:
    fmt, geo, got = kernel.geometry.format, kernel.geometry, Tile(kernel, x)
    wanted = reference.quantize_activation(x, fmt.block_size(geo.k), way)
    good = ~wanted.scale.isnan().expand_as(got.scale)
    columns = good.repeat_interleave(geo.block, dim=1)[:, : geo.k]
    assert torch.equal(got.scale.nan_to_num(nan=-1), wanted.scale.expand_as(got.scale).nan_to_num(nan=-1))
    assert torch.equal(got.data[columns], wanted.q[columns])
    assert not bool(got.padding[good.all(dim=1)].any())
    block_sum, subtracts_points = kernel.tile_spec.activation.block_sum, kernel.tile_spec.weight.subtracts_points
    highest = HIGHEST_CODE if subtracts_points else correction_point(kernel.isa, fmt.bits, fmt.zero, block_sum == "biased")
    start = wanted.sums * (kernel.isa.correction(fmt.bits, fmt.signed) - highest)
    if kernel.paired:
        q = torch.nn.functional.pad(wanted.q.int(), (0, -geo.k % 2)).unflatten(1, (-1, 2))
        start = start - q.prod(2, dtype=torch.int32).sum(1, keepdim=True, dtype=torch.int32)  # there is one block
    if block_sum == "folded":
        start = start.float() * wanted.scale
    elif block_sum == "biased":
        start = start + ROUND_BITS
    assert torch.equal(got.correction[good], start[good])
    offset = wanted.offset.expand_as(got.scale)
    if way.endswith("offset"):
        assert torch.equal(got.offset[good], offset[good])
    if subtracts_points:
        assert not bool(got.sum.any())
    elif fmt.zero == "point" and block_sum == "biased":  # int16, beside a 0
        assert torch.equal(got.sum[good].view(torch.int32), wanted.sums[good] & 0xFFFF)
    elif fmt.zero == "point" or (fmt.zero == "offset" and (way == "row" or block_sum == "bracketed")):  # short blocks: bracketed.py
        assert torch.equal(got.sum[good], wanted.sums.float()[good])
    elif fmt.zero == "offset":  # sum(x as quantized) = scale * sum(q) + size * offset: a product, then perhaps one fused multiply-add
        product = wanted.sums.float() * wanted.scale
        size = torch.tensor([geo.block] * (geo.blocks - 1) + [geo.last]).double()
        exact = product.double() + size * offset
        assert torch.equal(got.sum[good], (exact.float() if way.endswith("offset") else product)[good])


def kernel_of(number: int, isa: ISA, way: Activation, patch: pytest.MonkeyPatch, k: int) -> LinearKernel:
    """For FORMATS[number], and one of the dtypes: a few kernels, which are compiled once."""
    patch.setenv("HALFBYTE_ISA", isa.name)
    return LinearKernel(FORMATS[number], 1, k, DTYPES[number % 3], "int8", way)


finite = st.floats(width=32, allow_nan=False, allow_infinity=False)
numbers = st.lists(st.one_of(st.floats(-2, 2, width=32), finite, st.sampled_from([0.0, -0.0, 1.0, 127.0])), min_size=1, max_size=12)


@isas
@pytest.mark.parametrize("way", WAYS)
def test_rows_are_quantized_as_the_reference_does(isa: ISA, way: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    @settings(max_examples=examples(isa, 80))
    @given(st.integers(0, len(FORMATS) - 1), st.integers(1, 4), st.integers(1, 150), numbers, st.integers(0, 2**16))
    def sweep(number: int, m: int, k: int, few: list[float], seed: int) -> None:
        x = torch.tensor(few)[torch.randint(0, len(few), (m, k), generator=torch.Generator().manual_seed(seed))]
        kernel = kernel_of(number, isa, way, monkeypatch, k)
        check(kernel, x.to(kernel.dtype), way)

    sweep()


@isas
@pytest.mark.parametrize("way", WAYS)
def test_particular_rows(isa: ISA, way: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    k = 141
    inf, nan, ramp = torch.inf, torch.nan, torch.arange(k) - 70.0
    ties = (torch.arange(k) - 70).clamp(-63, 63) + 0.5
    ties[::32] = 127.0  # with a scale of 1 every other number is midway between two codes
    rows = torch.stack((
        torch.zeros(k), -torch.zeros(k), torch.ones(k), ramp, ties, -ties, ramp * 1e-40, torch.full((k,), 1e-45), ramp * 1e-38, ramp * 1e36,
        ramp * 4e36, torch.full((k,), 3.4e38), torch.full((k,), -3.4e38), torch.where(ramp > 0, 3.4e38, -3.4e38),
        torch.where(ramp == 3, nan, ramp), torch.where(ramp == 70, inf, ramp), torch.where(ramp == -70, -inf, ramp), torch.full((k,), nan),
        torch.where(ramp == 5, inf, torch.where(ramp == 6, -inf, ramp)), ramp + 1e4, torch.randn(k), torch.randn(k).abs(),
    ))  # fmt: skip
    for number in range(len(FORMATS)):
        kernel = kernel_of(number, isa, way, monkeypatch, k)
        check(kernel, rows.to(kernel.dtype), way)


@pytest.mark.parametrize(("isa", "dtype", "fmt"), pairwise(RUNNABLE, DTYPES, FORMATS), ids=lambda v: getattr(v, "name", None) or str(v))
def test_float_rows_are_copied_and_summed(isa: ISA, dtype: torch.dtype, fmt: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    k = 141
    kernel = LinearKernel(fmt, 1, k, dtype, "float", "block")
    x = torch.randn(5, k).to(dtype)
    got = Tile(kernel, x)
    assert torch.equal(got.data, x.float())
    assert not bool(got.padding.any())
    if fmt.zero != "none":
        blocks = x.double().split(kernel.geometry.block, dim=1)
        exact, size = (torch.stack([b.sum(dim=1) for b in each], dim=1) for each in (blocks, [b.abs() for b in blocks]))
        assert bool(((got.sum - exact).abs() <= kernel.geometry.block * 2.0**-24 * size).all())  # as many additions at most


@pytest.mark.skipif(not any(isa.bf16_dot for isa in RUNNABLE), reason="this CPU has no dot product of bfloat16")
def test_bfloat16_rows_are_pairs_in_the_order_of_the_dot_product(monkeypatch: pytest.MonkeyPatch) -> None:
    isa = next(isa for isa in RUNNABLE if isa.bf16_dot)
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    kernel = LinearKernel(Format(4, 32), 1, 64, torch.bfloat16, "bf16", "block")
    x = torch.randn(3, 64).bfloat16()
    order = [k for pair in isa.bf16_order() for k in pair]
    assert torch.equal(Tile(kernel, x).data, x.view(3, 8, 8)[:, :, order].reshape(3, 64))

"""Sums of so many products of codes that an int32 may overflow: exact on both sides of the bound."""

import pytest
import torch
from support import RUNNABLE, run_linear
from torch import Tensor, nn

import halfbyte as hb
from halfbyte import ops
from halfbyte.formats import Codes
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.problem import LONGEST_INTEGER_SUM, Window
from halfbyte.ops.conv import functions as conv

EXTREMES = [(127, -128, 127), (127, -128, -128), (-128, 127, 127), (-128, 127, -128)]  # x, in_zero, codes of the weight


def codes_of(value: int, n: int, k: int, format: str = "int8_channel") -> Codes:
    codes = hb.quantize(torch.ones(n, k), format)
    codes.data.fill_(value)
    return codes


def scales(x: int, in_zero: int, k: int) -> dict[str, float]:
    """Where the results are near 100."""
    return {"in_scale": 1.0, "in_zero": in_zero, "out_scale": abs(x - in_zero) * k / 100, "out_zero": 3}


def test_the_bound_is_the_largest_number_of_products_that_fits() -> None:
    largest = 255 * 128
    assert LONGEST_INTEGER_SUM * largest < 2**31 <= (LONGEST_INTEGER_SUM + 1) * largest


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
@pytest.mark.parametrize(("x", "in_zero", "code"), EXTREMES)
def test_kernels_are_exact_at_the_bound(isa: ISA, x: int, in_zero: int, code: int, monkeypatch: pytest.MonkeyPatch) -> None:
    k = LONGEST_INTEGER_SUM
    codes, rows = codes_of(code, 1, k), torch.full((1, k), x, dtype=torch.int8)
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    kernel = LinearKernel(codes.format, 1, k, torch.int8, "int8", "block")
    table = ops.requantization_table(packed := hb.pack(codes), None, **scales(x, in_zero, k))
    y = run_linear(kernel, rows, packed, table, (-128, 127))
    assert bool(reference.qlinear(rows, codes, None, **scales(x, in_zero, k)).agrees(y).all())


@pytest.mark.parametrize(("x", "in_zero", "code"), EXTREMES)
@pytest.mark.parametrize("k", [LONGEST_INTEGER_SUM + 1, 140000])
def test_linear_layers_are_exact_beyond_the_bound(x: int, in_zero: int, code: int, k: int) -> None:
    codes, rows, bias = codes_of(code, 3, k), torch.full((2, k), x, dtype=torch.int8), torch.tensor([0.0, 1e8, -1e8])
    rows[1] = torch.randint(-128, 128, (k,), generator=torch.Generator().manual_seed(k)).to(torch.int8)
    codes.scale.copy_(torch.tensor([[1.0], [0.5], [0.25]]))
    settings = scales(x, in_zero, k)
    y = hb.qlinear(rows.view(2, 1, k), hb.pack(codes), bias, **settings, clamp=(-90, 90))
    assert bool(reference.qlinear(rows.view(2, 1, k), codes, bias, **settings, clamp=(-90, 90)).agrees(y).all())


@pytest.mark.parametrize("format", ["int4_channel", "int8_tensor", "int8_channel_2:4"])
def test_every_layout_is_read(format: str) -> None:
    k, name = 65824, format.removesuffix("_2:4")
    weight = torch.randn(2, k)
    if format != name:
        weight.view(2, -1, 4)[..., 2:] = 0
    codes, rows = hb.quantize(weight, name), torch.randint(-128, 128, (1, k), dtype=torch.int8)
    settings = {"in_scale": 0.1, "in_zero": -5, "out_scale": 10.0, "out_zero": 0}
    y = hb.qlinear(rows, hb.pack(codes), None, **settings)
    assert bool(reference.qlinear(rows, codes, None, **settings).agrees(y).all())


@pytest.mark.parametrize("code", [127, -128])
@pytest.mark.parametrize(("channels", "outputs", "kernel", "groups"), [(7312, 2, 3, 1), (2 * 7312, 2, 3, 2), (65800, 1, 1, 1)])
def test_convolutions_are_exact_beyond_the_bound(channels: int, outputs: int, kernel: int, groups: int, code: int) -> None:
    """Padded with in_zero, in groups, and of one tap."""
    k, window = channels // groups * kernel**2, Window((1, 1), (kernel // 2, kernel // 2, 1, 0))
    codes, settings = codes_of(code, outputs, k), scales(127, -128, k)
    x = torch.full((1, channels, 3, 2), 127, dtype=torch.int8)
    packed = hb.pack_conv(codes, kernel, groups)
    y = conv.qconv2d(x, packed, None, padding=((kernel // 2, kernel // 2), (1, 0)), **settings)
    expected = conv_reference.qconv2d(x, codes, (kernel, kernel), window, None, **settings, groups=groups)
    assert bool(expected.agrees(y).all())
    assert y.is_contiguous() == x.is_contiguous()


class Long(nn.Module):
    """A linear layer behind codes that are all the largest, whose sums overflow."""

    def __init__(self, k: int) -> None:
        super().__init__()
        self.first, self.second = nn.Conv2d(1, 1, 1), nn.Linear(k, 2)
        nn.init.constant_(self.first.weight, 1.0)
        nn.init.constant_(self.second.weight, 1.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x).relu().flatten(1))


def test_a_network_on_codes_gives_the_right_sign() -> None:
    side = 300
    model, x = Long(side * side).eval(), torch.ones(1, 1, side, side)
    expected = model(x)
    hb.quantize_(model, hb.Config("int8_channel", activations="static"), [x])
    for _ in range(3):  # node by node, then as a program
        assert torch.allclose(model(x), expected, rtol=0.02)


@pytest.mark.parametrize("activation", ["block", "row", "block_offset", "row_offset"])
def test_integers_of_floats_do_not_overflow(activation: str) -> None:
    """Blocks are cut, so that their sums fit, whatever their scale."""
    k = 300000
    x, codes = torch.ones(2, k), codes_of(-127, 2, k)
    x[1, ::2] = 0.5
    y = hb.linear(x, hb.pack(codes), compute="int8", activation=activation)
    error = reference.error_bound(x, codes, None, "int8", activation)
    assert bool(reference.agrees(y, reference.linear(x, codes, None, "int8", activation), error).all())

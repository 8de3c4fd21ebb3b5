"""Tiles that multiply scales and offsets at once, as integers, on CPUs where they are used or that could use them."""

import math

import pytest
import torch
from samples import random_codes
from support import activations, run_linear
from torch import Tensor

from halfbyte import quantize
from halfbyte.formats import Codes, Format, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.codegen.ir import Module
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512VNNI
from halfbyte.kernels.cpu.linear import bracketed
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.problem import Activation
from halfbyte.layouts.cpu_tiles import pack

ISA = AVX512VNNI("zen5")
M = ISA.tuning.bracketed_rows + 3  # row tiles of two sizes

pytestmark = pytest.mark.skipif(ISA.missing() is not None, reason=str(ISA.missing()))


def kernel_of(codes: Codes, dtype: torch.dtype = torch.float32, activation: Activation = "block") -> LinearKernel:
    kernel = LinearKernel(codes.format, *codes.shape, dtype, "int8", activation, isa=ISA)
    assert kernel.tile_spec.activation.block_sum == "bracketed"
    assert "bracketing_tile_function" in kernel.fields(M)
    return kernel


def same(a: Tensor, b: Tensor) -> bool:
    return torch.equal(a.nan_to_num(nan=7e37), b.nan_to_num(nan=7e37)) and torch.equal(a.isnan(), b.isnan())


def check(codes: Codes, x: Tensor, activation: Activation = "block") -> Tensor:
    """Of M rows and of few, which go through plain tiles, the same results, those of the reference."""
    kernel, packed, bias = kernel_of(codes, x.dtype, activation), pack(codes), torch.randn(codes.shape[0])
    y = run_linear(kernel, x, packed, bias)
    error = reference.error_bound(x, codes, bias, "int8", activation)
    assert bool(reference.agrees(y, reference.linear(x, codes, bias, "int8", activation), error).all())
    assert same(torch.cat([run_linear(kernel, rows, packed, bias) for rows in x.split(20)]), y)
    return y


def multiplied_by_integers(codes: Codes, x: Tensor, monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """For each output whether it came from integers: plain tiles do nothing here."""
    module = Module(ISA.attributes)
    module.function("nothing", [*["ptr"] * 5, *["i64"] * 4])
    placeholder = jit.load("nothing", lambda _: module, ISA)["nothing"]
    kernel = kernel_of(codes)
    fields = kernel.fields(M)
    monkeypatch.setattr(LinearKernel, "fields", lambda *_: fields | {"tile_function": placeholder, "lesser_tile_function": placeholder})
    y = run_linear(kernel, x, pack(codes))
    columns: list[bool] = y.isfinite().all(dim=0).tolist()
    assert columns == y.isfinite().any(dim=0).tolist()
    return columns


@pytest.mark.parametrize("activation", ["block", "row"])
@pytest.mark.parametrize("name", ["q4_1", "int4_g20_offset_f16", "int4_g8_offset_f16"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_products_are_those_of_the_reference(name: str, dtype: torch.dtype, activation: Activation) -> None:
    fmt, n, k = as_format(name), 75, 333
    x = activations(M, k, dtype, 1, 3)
    generator = torch.Generator().manual_seed(0)
    for codes in (quantize(torch.randn(n, k, generator=generator), fmt), random_codes(fmt, (n, k), 2)):
        check(codes, x, activation)


def test_weights_as_they_are_quantized_are_multiplied_by_integers(monkeypatch: pytest.MonkeyPatch) -> None:
    weight = torch.randn(75, 1024, generator=torch.Generator().manual_seed(0))
    weight[3] = 0
    weight[40, 32:64] = 0.25
    x = activations(M, 1024, torch.float32, 0)
    assert all(multiplied_by_integers(quantize(weight, "q4_1"), x, monkeypatch))


@pytest.mark.parametrize(
    ("scale", "offset", "integers"),
    [
        (-0.02, 0.15, True),
        (0.0, -0.0, True),
        (0.0, 3.0, True),
        (0.01, 30.0, False),  # far apart
        (2.0**-24, -1.7, False),
        (2.0**-3, 2.0**-24, False),
        (60000.0, -60000.0, False),
        (torch.inf, 1.0, False),
        (torch.nan, 1.0, False),
        (1.0, -torch.inf, False),
        (1.0, torch.nan, False),
    ],
)
def test_one_block_with_other_numbers(scale: float, offset: float, integers: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k, column = 70, 96, 33
    codes = quantize(torch.randn(n, k, generator=torch.Generator().manual_seed(0)), "q4_1")
    codes.scale[column, 1], codes.zero[column, 1] = scale, offset
    x = activations(M, k, torch.float32, 5)
    if math.isfinite(scale + offset):
        check(codes, x)
    else:
        kernel, packed = kernel_of(codes), pack(codes)
        y = run_linear(kernel, x, packed)
        assert same(torch.cat([run_linear(kernel, rows, packed) for rows in x.split(20)]), y)
        assert torch.equal(y.isfinite().all(dim=0), torch.arange(n) != column)
        assert not bool(y[:, column].isfinite().any())
    assert multiplied_by_integers(codes, x, monkeypatch) == [integers or n // 32 != column // 32 for n in range(n)]


def test_one_hot_activations_give_the_weight_exactly() -> None:
    k = 2 * M
    quantized = quantize(torch.randn(40, k, generator=torch.Generator().manual_seed(0)), "q4_1")
    for codes in (quantized, random_codes(as_format("q4_1"), (40, k), 1)):
        packed, kernel = pack(codes), kernel_of(codes)
        for half in (127 * torch.eye(k)).split(M):
            y = run_linear(kernel, half, packed)
            assert torch.equal(y, (half.double() @ codes.dequantize(torch.float64).T).float())


def test_the_largest_sums() -> None:
    fmt, n, k = Format(4, 32, "offset"), 32, 128
    values = torch.full((n, k), 15)
    values[::2] = 0
    values[::3, ::2] = 15
    scale, zero = torch.full((n, 4), 2047.0 / 2048).half(), torch.full((n, 4), -7.9961).half()
    scale[:, 1] *= 8
    zero[:, 2] = 0.5
    x = torch.ones(M, k)
    x[1] = -1
    x[2, ::2] = x[3, 1::2] = -1
    check(Codes.from_values(fmt, values, scale, zero), x)


def test_huge_activations_and_those_that_are_not_finite(monkeypatch: pytest.MonkeyPatch) -> None:
    codes = quantize(torch.randn(64, 256, generator=torch.Generator().manual_seed(0)) * 2.0**-12, "q4_1")
    x = activations(M, 256, torch.float32, 0).clamp(-100, 100)
    x[5], x[6] = x[5] * 2.0**118, x[6] * 2.0**-126  # totals of the former overflow before they are multiplied by the power
    x[7, 9], x[30, 200] = torch.nan, torch.inf
    kernel, packed = kernel_of(codes), pack(codes)
    y = run_linear(kernel, x, packed)
    few = torch.cat([run_linear(kernel, rows, packed) for rows in x.split(20)])
    normal = torch.arange(M) != 6
    assert same(y[normal], few[normal])
    assert bool((y[6] - few[6]).abs().max() < 2.0**-140)
    assert y.isfinite().all(dim=1).logical_not().nonzero().flatten().tolist() == [7, 30]


def test_longer_rows_than_there_is_memory_for() -> None:
    k = 32 * (bracketed.MOST_BLOCKS + 1)
    codes = random_codes(as_format("q4_1"), (3, k), 0)
    kernel = LinearKernel(codes.format, 3, k, torch.float32, "int8", "block", isa=ISA)
    assert "bracketing_tile_function" not in kernel.fields(M)
    x = activations(M, k, torch.float32, 0)
    error = reference.error_bound(x, codes, None, "int8", "block")
    assert bool(reference.agrees(run_linear(kernel, x, pack(codes)), reference.linear(x, codes, None, "int8", "block"), error).all())


OTHERS = ["q4_0", "int4_g64_offset_f16", "int4_g32_offset_bf16", "int4_g32_offset_f32", "int8_g32_offset_f16", "int4_g32_zp"]


@pytest.mark.parametrize("name", OTHERS)
def test_other_formats_have_plain_tiles(name: str) -> None:
    kernel = LinearKernel(as_format(name), 32, 96, torch.float32, "int8", "block", isa=ISA)
    assert kernel.tile_spec.activation.block_sum != "bracketed"

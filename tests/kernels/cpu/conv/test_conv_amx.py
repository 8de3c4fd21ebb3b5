"""Convolutions on matrix units, whose registers are emulated where the CPU has none."""

import random
from dataclasses import replace

import pytest
import torch
from emulated.amx import EmulatedTiles
from samples import random_codes
from torch import Tensor

from halfbyte.dispatch.choose import forget
from halfbyte.errors import ArgumentError
from halfbyte.formats import as_format
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.isa_amx import AMXTiles
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.conv import amx, direct, planned
from halfbyte.kernels.cpu.conv.amx import MatrixConvKernel, MatrixSpec
from halfbyte.kernels.cpu.conv.gathered import ImageRearrangedKernel
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter
from halfbyte.ops.conv import functions as ops

UNIT = EmulatedTiles()
runs = pytest.mark.skipif(UNIT.missing() is not None, reason=str(UNIT.missing()))


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)


def image(shape: tuple[int, int, int, int], rng: torch.Generator) -> Tensor:
    """Codes, channels last, in the midst of memory that holds 99."""
    b, c, h, w = shape
    around = torch.full((b * c * h * w + 256,), 99, dtype=torch.int8)
    x = around[128:-128].view(b, h, w, c)
    x.copy_(torch.randint(-128, 128, x.shape, generator=rng))
    return x.permute(0, 3, 1, 2)


def windows(rng: random.Random, most: int) -> tuple[tuple[int, int], Window]:
    kernel, strides, dilations = ((rng.randint(1, most), rng.randint(1, most)) for most in (most, 3, 3))
    if rng.random() < 0.5:
        dilations = (dilations[0], 1)
    return kernel, Window(strides, tuple(rng.randint(0, 3) * rng.randint(0, 1) for _ in range(4)), dilations)  # type: ignore[arg-type]


def cases(count: int, seed: int) -> list[tuple[Filter, Window, tuple[int, int, int, int]]]:
    rng, found = random.Random(seed), list[tuple[Filter, Window, tuple[int, int, int, int]]]()
    while len(found) < count:
        kernel, window = windows(rng, 3)
        groups = rng.choice((1, 1, 2))
        sizes = Filter(
            as_format(rng.choice(("int8_channel", "int8_tensor"))),
            rng.choice((1, 5, 32, 33)) * groups,
            rng.choice((2, 3, 20, 64, 65)),
            kernel,
            groups,
        )
        shape = rng.randint(1, 2), sizes.channels * groups, rng.randint(1, 9), rng.randint(1, 11)
        try:
            window.out_size(shape[2:], kernel)
        except ArgumentError:
            continue
        found.append((sizes, window, shape))
    stem = Filter(as_format("int8_channel"), 40, 3, (7, 7))
    return [*found, (stem, Window((2, 2), (3, 3, 3, 3)), (2, 3, 21, 26)), (stem, Window((2, 1), (0, 1, 2, 3)), (1, 3, 12, 17))]


@runs
def test_codes_are_those_of_the_reference(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs, rng = torch.Generator().manual_seed(0), random.Random(0)
    for number, (sizes, window, shape) in enumerate(cases(40, 0)):
        monkeypatch.setattr(direct, "_MOST_STRIP_BYTES", rng.choice((256, 1 << 18)))
        codes, x = random_codes(sizes.format, sizes.codes_shape, number), image(shape, torchs)
        bias = torch.randn(sizes.out, generator=torchs) * 10 if rng.random() < 0.5 else None
        zeros = {"in_zero": rng.randint(-128, 127), "out_zero": rng.randint(-128, 127)}
        scales = {"in_scale": 0.02, "out_scale": 0.03 * sizes.k**0.5 * 2**8, **zeros}
        table = ops.conv_requantization_table(ops.pack_conv(codes, sizes.kernel, sizes.groups), bias, **scales)  # type: ignore[arg-type]
        kernel = MatrixConvKernel(sizes, window, UNIT)
        y = kernel(x, window, kernel.weights_of(codes), table, -100, 120, outside=zeros["in_zero"])
        assert y.is_contiguous(memory_format=torch.channels_last)
        wanted = conv_reference.qconv2d(x, codes, sizes.kernel, window, bias, groups=sizes.groups, clamp=(-100, 120), **scales)  # type: ignore[arg-type]
        assert bool(wanted.agrees(y).all()), (sizes, window, shape)


@runs
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_images_with_one_scale_each_are_those_of_the_reference(dtype: torch.dtype) -> None:
    torchs, rng = torch.Generator().manual_seed(1), random.Random(1)
    for number, (sizes, window, shape) in enumerate(cases(12, 1)):
        codes = random_codes(sizes.format, sizes.codes_shape, number)
        x = (torch.randn(shape, generator=torchs) * 3).to(dtype).contiguous(memory_format=torch.channels_last)
        bias = torch.randn(sizes.out, generator=torchs) if rng.random() < 0.5 else None
        wanted, error = conv_reference.conv2d_of_images(x, codes, sizes.kernel, window, bias, sizes.groups)
        residual = None
        if rng.random() < 0.5:
            residual = torch.randn(wanted.shape, generator=torchs).to(dtype).contiguous(memory_format=torch.channels_last)
            wanted = wanted + residual.double()
            error = error + wanted.abs() * 2.0**-23
        kernel = ImageRearrangedKernel(MatrixConvKernel(sizes, window, UNIT, dtype))
        y = kernel(x, window, kernel.weights_of(codes), bias, -5.0, 40.0, residual=residual)
        assert y.dtype == dtype
        assert bool(reference.agrees(y, wanted.clamp(-5, 40), error).all()), (sizes, window, shape)


@runs
def test_the_op_takes_it_and_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(type(current()), "matrix", UNIT)
    monkeypatch.setattr(current(), "tuning", replace(current().tuning, matrix_rows=3), raising=False)
    PLANS.conv2d.clear()
    forget()
    taken = list[Tensor]()
    prepare = MatrixConvKernel.prepare
    monkeypatch.setattr(MatrixConvKernel, "prepare", lambda *a, **k: taken.append(a[4]) or prepare(*a, **k))
    sizes = Filter(as_format("int8_channel"), 48, 64, (3, 3))
    codes, x = random_codes(sizes.format, sizes.codes_shape, 0), image((1, 64, 6, 5), torch.Generator().manual_seed(2))
    packed, around = ops.pack_conv(codes, 3), ((1, 1), (1, 1))
    scales = {"in_scale": 0.02, "in_zero": 3, "out_scale": 0.03 * sizes.k**0.5 * 2**8, "out_zero": -5}
    for stride in (1, 2):
        y = ops.qconv2d(x, packed, None, stride, around, **scales)  # type: ignore[arg-type]
        wanted = conv_reference.qconv2d(x, codes, (3, 3), Window((stride,) * 2, (1,) * 4, (1, 1)), None, **scales)  # type: ignore[arg-type]
        assert bool(wanted.agrees(y).all())
    floats = x.float()
    y = ops.conv2d(floats, packed, None, 1, around, activation="image")
    wanted, error = conv_reference.conv2d_of_images(floats, codes, (3, 3), Window((1, 1), (1,) * 4, (1, 1)), None, 1)
    assert bool(reference.agrees(y, wanted, error).all())
    assert len(taken) == 3
    assert len({weights.data_ptr() for weights in taken}) == 1
    PLANS.conv2d.clear()
    forget()


# The machine code, for any CPU


def test_the_inner_loop_is_four_products_for_four_loads() -> None:
    isa = AMXTiles()
    lines = jit.compile_assembly(amx.build(MatrixSpec(64, 0, 32, "i8", False), isa), isa).splitlines()

    def count(instruction: str) -> int:
        return sum(line.startswith(f"\t{instruction}\t") for line in lines)

    assert count("tdpbssd") == count("tilestored") == 4
    assert count("tileloadd") == 4 + 4  # with those of what sums begin at
    assert count("vpmovdb") == 2 * 2  # of a row, in the loop and after it
    assert count("ldtilecfg") == 1

"""Minimal filtering of 3 x 3 convolutions: exact by its identity, its bounds, and against the reference."""

import itertools
import random

import pytest
import torch
from samples import random_codes
from support import RUNNABLE, examples
from torch import Tensor

from halfbyte import ConvShape, explain
from halfbyte.formats import as_format
from halfbyte.formats.codes import Codes
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512VNNI
from halfbyte.kernels.cpu.codegen.isas import ISAS, current
from halfbyte.kernels.cpu.conv import planned
from halfbyte.kernels.cpu.conv.gathered import ConvKernel, ImageConvKernel, ImageRearrangedKernel
from halfbyte.kernels.cpu.conv.winograd import transforms, winograd, winograd_call
from halfbyte.kernels.cpu.conv.winograd.tiling import PositionClass, Tiles, WinogradSpec, group_size
from halfbyte.kernels.cpu.conv.winograd.transforms import (
    FULL_AXIS,
    SHORT_AXIS,
    Axis,
    input_transform,
    short_input_transform,
    transformed_weights,
)
from halfbyte.kernels.cpu.conv.winograd.winograd_call import WinogradKernel, WinogradScalingKernel
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter
from halfbyte.ops.conv import functions as ops

MINIMAL = [isa for isa in RUNNABLE if isa.tuning.winograd and isa.matrix is None]
isas = pytest.mark.parametrize("isa", MINIMAL, ids=lambda isa: isa.name)
INT8 = as_format("int8_channel")
AROUND = ((1, 1), (1, 1))


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)


def along_both(vertical, horizontal, numbers: list[list[int]]) -> list[list[int]]:
    """A transform along each axis."""
    lines = [horizontal(line) for line in numbers]
    return [list(line) for line in zip(*(vertical(list(column)) for column in zip(*lines, strict=True)), strict=True)]


def weights(w: list[int]) -> list[int]:
    return [sum(a * b for a, b in zip(row, w, strict=True)) for row in transforms.WEIGHT_TRANSFORM]


@pytest.mark.parametrize("vertical", [FULL_AXIS, SHORT_AXIS], ids=lambda axis: str(axis.outputs))
@pytest.mark.parametrize("horizontal", [FULL_AXIS, SHORT_AXIS], ids=lambda axis: str(axis.outputs))
def test_a_tile_is_the_convolution_times_its_factor(vertical: Axis, horizontal: Axis) -> None:
    rng = random.Random(0)
    for _ in range(25):
        x = [[rng.randint(-128, 127) for _ in range(horizontal.pixels)] for _ in range(vertical.pixels)]
        w = [[rng.randint(-128, 127) for _ in range(3)] for _ in range(3)]
        image, filters = along_both(vertical.input_transform, horizontal.input_transform, x), along_both(weights, weights, w)
        products = [
            [code * filters[i][j] for j, code in zip(horizontal.positions, line, strict=True)]
            for i, line in zip(vertical.positions, image, strict=True)
        ]
        y = along_both(vertical.output_transform, horizontal.output_transform, products)
        for i, j in itertools.product(range(vertical.outputs), range(horizontal.outputs)):
            wanted = sum(w[a][b] * x[i + a][j + b] for a in range(3) for b in range(3))
            assert y[i][j] == 576 * wanted
            modulo = y[i][j] * transforms.INVERSE_OF_9 % 2**32  # as the kernel has it
            assert (modulo - (modulo >> 31 << 32)) >> transforms.SHIFT == wanted


def reach(of_one, size: int) -> int:
    """The largest sum of magnitudes of a transformation's coefficients."""
    columns = [of_one([int(i == at) for i in range(size)]) for at in range(size)]
    return max(sum(map(abs, row)) for row in zip(*columns, strict=True))


def test_factors_fit_int16() -> None:
    assert reach(short_input_transform, 4) < reach(input_transform, 6)
    assert reach(input_transform, 6) ** 2 * 128 == 12800 < 2**15
    assert reach(weights, 3) ** 2 * 128 == 6272 < 2**15
    for step in (
        lambda x: [x[4] - (x[2] << 2), x[3] - (x[1] << 2), (x[3] - x[1]) << 1, (x[0] - x[2]) << 2],
    ):  # on the way to those of pixels
        assert reach(step, 6) * reach(input_transform, 6) * 128 < 2**15


def scales(k: int, in_zero: int, out_zero: int) -> dict[str, float]:
    return {"in_scale": 0.02, "in_zero": in_zero, "out_scale": 0.03 * k**0.5 * 2**8, "out_zero": out_zero}


def run(codes: Codes, sizes: Filter, x: Tensor, window: Window, bias: Tensor | None, clamp: tuple[int, int], **more: float) -> Tensor:
    built = transformed_weights(codes, sizes)
    assert built is not None
    table = ops.conv_requantization_table(ops.pack_conv(codes, 3), bias, **more)
    return WinogradKernel(sizes)(x, window, built, table, *map(float, clamp), outside=int(more["in_zero"]))


def image(shape: tuple[int, int, int, int], rng: torch.Generator) -> Tensor:
    b, c, h, w = shape
    return torch.randint(-128, 128, (b, h, w, c), generator=rng, dtype=torch.int8).permute(0, 3, 1, 2)


@isas
def test_images_of_all_sizes_are_those_of_the_reference(isa, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    rng, torchs = random.Random(1), torch.Generator().manual_seed(1)
    for case in range(examples(isa, 24)):
        channels, out = rng.choice((1, 2, 3, 5)) * 2 * isa.lanes, rng.choice((1, 5, 16, 17, 32, 33, 64, 70))
        sizes = Filter(as_format(rng.choice(("int8_channel", "int8_tensor"))), out, channels, (3, 3))
        window = Window((1, 1), tuple(rng.randint(0, 3) for _ in range(4)), (1, 1))  # type: ignore[arg-type]
        x = image((rng.randint(1, 3), channels, rng.randint(3, 14), rng.randint(3, 14)), torchs)
        codes = random_codes(sizes.format, sizes.codes_shape, case)
        bias = torch.randn(out, generator=torchs) * 10 if rng.random() < 0.5 else None
        more = scales(sizes.k, rng.randint(-128, 127), rng.randint(-128, 127))
        assert winograd_call.supports(sizes, window, current())
        y = run(codes, sizes, x, window, bias, (-100, 120), **more)
        assert y.is_contiguous(memory_format=torch.channels_last)
        wanted = conv_reference.qconv2d(x, codes, (3, 3), window, bias, clamp=(-100, 120), **more)  # type: ignore[arg-type]
        assert bool(wanted.agrees(y).all()), (sizes, window, x.shape)


@isas
def test_chunks_of_tiles(isa, monkeypatch) -> None:
    """More tiles than stay in the cache at once, where any of them are short."""
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    channels, torchs, more = 2 * isa.lanes, torch.Generator().manual_seed(2), scales(18 * isa.lanes, 3, -5)
    sizes, window = Filter(INT8, 40, channels, (3, 3)), Window((1, 1), (1,) * 4, (1, 1))
    codes = random_codes(INT8, sizes.codes_shape, 0)
    for height, width in ((22, 26), (25, 32), (32, 22)):
        x = image((3, channels, height, width), torchs)
        wanted = conv_reference.qconv2d(x, codes, (3, 3), window, None, clamp=(-100, 120), **more)  # type: ignore[arg-type]
        assert bool(wanted.agrees(run(codes, sizes, x, window, None, (-100, 120), **more)).all())


@isas
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_floating_point_outputs_are_those_of_the_other_kernel(isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """Images with one scale each, bit for bit: whole and short tiles, what reaches beyond the image, residuals, a bias or none, clamped."""
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    monkeypatch.setattr(planned, "WORK_A_THREAD", 1)
    window = Window((1, 1), (1,) * 4, (1, 1))
    for n, (batch, height, width) in enumerate([(1, 4, 4), (2, 9, 14), (1, 7, 5), (1, 13, 13), (1, 1, 1), (1, 33, 40)]):
        sizes = Filter(as_format(("int8_channel", "int8_tensor")[n % 2]), 4 * isa.lanes, 2 * isa.lanes, (3, 3))
        codes, random = random_codes(sizes.format, sizes.codes_shape, n), torch.Generator().manual_seed(n)
        x, residual = (
            torch.randn(batch, height, width, c, generator=random).to(dtype).permute(0, 3, 1, 2) for c in (sizes.channels, sizes.out)
        )
        bias = torch.randn(sizes.out, generator=random) if n % 3 else None
        added, packed = residual if n < 4 else None, ops.pack_conv(codes, 3).data
        wanted = ImageConvKernel(ConvKernel(sizes, torch.int8, "int8", "block", out=dtype))(
            x, window, packed, bias, -40.0, 50.0, residual=added
        )
        kernel = ImageRearrangedKernel(WinogradScalingKernel(sizes, dtype))
        weights = kernel.weights_of(codes)
        assert weights is not None
        PLANS.scratch = torch.full((1 << 22,), 255, dtype=torch.uint8)
        assert torch.equal(kernel(x, window, weights, bias, -40.0, 50.0, residual=added), wanted), (height, width)


def test_floating_point_where_it_pays() -> None:
    """Not where the second form of the weights would be far larger than the outputs."""
    if not MINIMAL or current() not in MINIMAL:
        pytest.skip("this CPU has no minimal filtering")
    sizes = Filter(INT8, 64, 64, (3, 3))
    codes, x = random_codes(INT8, sizes.codes_shape, 0), torch.randn(1, 64, 32, 32)
    packed = ops.pack_conv(codes, 3)
    for side, taken in ((32, True), (4, False)):
        shape = ConvShape((1, 64, side, side), (64, 64, 3, 3), 1, 1)
        assert (explain(shape, format="int8_channel", activation="image").kernel == "winograd") == taken
    y = ops.conv2d(x, packed, None, 1, AROUND, activation="image")
    wanted, error = conv_reference.conv2d_of_images(x, codes, (3, 3), Window((1, 1), (1,) * 4, (1, 1)), None, 1)
    assert bool(reference.agrees(y, wanted, error).all())


def of_one_code(channels: int, code: int) -> Codes:
    data = torch.full((2, 9 * channels), code, dtype=torch.int8)
    return Codes(INT8, (2, 9 * channels), data, torch.ones(2, 1, dtype=INT8.scale), None)


@isas
@pytest.mark.parametrize("code", [-127, 127])
@pytest.mark.parametrize("value", [-128, 127])
def test_the_largest_sums_are_exact(isa, code: int, value: int, monkeypatch) -> None:
    """As many channels as there may be, all codes at their ends: y is just below 2^25."""
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    channels = 224
    sizes, window = Filter(INT8, 2, channels, (3, 3)), Window((1, 1), (0,) * 4, (1, 1))
    codes, x = of_one_code(channels, code), torch.full((1, 6, 6, channels), value, dtype=torch.int8).permute(0, 3, 1, 2)
    y = 9 * channels * code * value
    assert 2**24 < abs(y) < 2**25
    more = {"in_scale": 1.0, "in_zero": 0, "out_scale": abs(y) / 100, "out_zero": 0}
    assert run(codes, sizes, x, window, None, (-128, 127), **more).unique().tolist() == [100 if y > 0 else -100]


@isas
def test_sums_that_may_be_too_large_go_another_way(isa, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    channels = 256
    sizes, codes = Filter(INT8, 2, channels, (3, 3)), of_one_code(channels, 127)
    assert transformed_weights(codes, sizes) is None
    x = image((1, channels, 16, 16), torch.Generator().manual_seed(0))
    more = scales(sizes.k, 3, -5)
    y = ops.qconv2d(x, ops.pack_conv(codes, 3), None, 1, AROUND, **more)  # type: ignore[arg-type]
    wanted = conv_reference.qconv2d(x, codes, (3, 3), Window((1, 1), (1,) * 4, (1, 1)), None, **more)  # type: ignore[arg-type]
    assert bool(wanted.agrees(y).all())


@isas
def test_the_op_takes_it_where_it_pays(isa, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    PLANS.conv2d.clear()
    channels, taken = 64, list[Tensor]()
    sizes = Filter(INT8, 64, channels, (3, 3))
    codes, x = random_codes(INT8, sizes.codes_shape, 0), image((1, channels, 28, 28), torch.Generator().manual_seed(0))
    planned = WinogradKernel.planned
    monkeypatch.setattr(WinogradKernel, "planned", lambda *a, **k: taken.append(a[4]) or planned(*a, **k))
    more, packed = scales(sizes.k, 3, -5), ops.pack_conv(codes, 3)
    for stride in (1, 2):
        y = ops.qconv2d(x, packed, None, stride, AROUND, **more)  # type: ignore[arg-type]
        wanted = conv_reference.qconv2d(x, codes, (3, 3), Window((stride,) * 2, (1,) * 4, (1, 1)), None, **more)  # type: ignore[arg-type]
        assert bool(wanted.agrees(y).all())
    assert len(taken) == 1
    PLANS.conv2d.clear()


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.tuning.winograd], ids=lambda isa: isa.name)
def test_products_are_made_in_registers(isa) -> None:
    """The innermost loop: for each pair of channels two vectors of weights times the tiles of a group."""
    groups = sorted({isa.tuning.conv_tile[0], isa.tuning.conv_tile[0] - 1})
    spec = WinogradSpec(tuple(PositionClass(at, 18, group) for at, group in zip((0, 18), groups, strict=True)))
    loops = jit.compile_assembly(winograd.build(spec, isa), isa).split("\n.L")
    product = "vpdpwssd" if isa.sums_shorts else "vpmaddwd"
    found = [part.splitlines() for part in loops if product in part]
    for group, loop in zip(groups, sorted(found, key=lambda loop: sum(product in line for line in loop)), strict=True):
        products = group * 2 * isa.lanes  # pairs of channels times tiles times vectors
        assert sum(product in line for line in loop) == products
        assert sum("vpaddd" in line for line in loop) == (0 if isa.sums_shorts else products)
        assert not any("%rsp" in line for line in loop if "mm" in line)


def test_left_over_lines_are_short_tiles() -> None:
    assert [Tiles.of((2, side, 16)).short for side in (4, 5, 6, 7)] == [(short, False) for short in (False, True, True, False)]
    tiles = Tiles.of((1, 14, 14))
    assert tiles.counts == [3, 9, 3, 1]
    assert sum(len(positions) * (stop - start) for positions, (start, stop) in zip(transforms.CLASSES, tiles.ranges, strict=True)) == 484


def test_groups_of_tiles_are_nearly_full() -> None:
    isa = AVX512VNNI("intel")
    groups = {side: group_size((side // 4) ** 2, isa) for side in (16, 28, 56)}
    assert groups == {16: 8, 28: 10, 56: 11}

"""Convolutions of codes by kernels with weights in a form of their own are those of the reference, and of the kernel without."""

import random

import pytest
import torch
from samples import random_codes
from support import RUNNABLE, tile_spec
from torch import Tensor

from halfbyte.formats import as_format
from halfbyte.formats.codes import Codes
from halfbyte.kernels import conv_reference
from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.isas import ISAS
from halfbyte.kernels.cpu.conv import depthwise_dot, direct_call, planned, unsigned
from halfbyte.kernels.cpu.conv.arranged import ArrangedConvKernel
from halfbyte.kernels.cpu.conv.depthwise import DepthwiseKernel
from halfbyte.kernels.cpu.conv.depthwise_dot import DepthwiseDotKernel
from halfbyte.kernels.cpu.conv.gathered import ConvKernel
from halfbyte.kernels.cpu.conv.unsigned import UnsignedConvKernel
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter, taps
from halfbyte.ops.conv import functions as ops

KERNELS = [pytest.param(isa, ArrangedConvKernel, id=f"arranged-{isa.name}") for isa in RUNNABLE if isa.tuning.arranged_conv]
KERNELS += [pytest.param(isa, UnsignedConvKernel, id=f"unsigned-{isa.name}") for isa in RUNNABLE if isa.mixed_dot and isa.matrix is None]


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)


def scales(k: int, in_zero: int, out_zero: int) -> dict[str, float]:
    return {"in_scale": 0.02, "in_zero": in_zero, "out_scale": 0.02 * k**0.5, "out_zero": out_zero}


@pytest.mark.parametrize(("isa", "form"), KERNELS)
def test_images_of_all_sizes_are_those_of_the_reference(isa, form, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    PLANS.conv2d.clear()
    rng, torchs, taken = random.Random(1), torch.Generator().manual_seed(1), list[Tensor]()
    planned = form.planned
    monkeypatch.setattr(form, "planned", lambda *a, **k: taken.append(a[4]) or planned(*a, **k))
    for case in range(12):
        monkeypatch.setattr(runtime, "threads", lambda threads=1 + case % 2: threads)  # one takes small images in one piece
        groups = rng.choice((1, 1, 1, 2, 3))
        channels = rng.choice((3, 5, 11, 17, 16, 40) if form is UnsignedConvKernel else (1, 2, 3, 5, 8, 16, 17, 24, 40, 64, 100))
        out = rng.choice((1, 5, 16, 17, 33, 64)) * groups
        kernel_size = rng.choice((1, 1, 2, 3, 5)), rng.choice((1, 1, 2, 3, 7))
        sizes = Filter(as_format(rng.choice(("int8_channel", "int8_tensor"))), out, channels, kernel_size, groups)
        moves = (rng.randint(1, 3), rng.randint(1, 3)), (rng.randint(1, 2), rng.randint(1, 2))
        window = Window(moves[0], tuple(rng.choice((0, 0, 1, 2)) for _ in range(4)), moves[1])  # type: ignore[arg-type]
        shape = rng.randint(1, 2), rng.choice((5, 6, 9, 14)), rng.randint(13, 17), channels * groups
        x = torch.randint(-128, 128, shape, generator=torchs, dtype=torch.int8).permute(0, 3, 1, 2)
        codes = random_codes(sizes.format, sizes.codes_shape, case)
        if case % 3:
            codes = Codes(codes.format, codes.shape, codes.data // 2, codes.scale, None)
        bias = torch.randn(out, generator=torchs) * 10 if rng.random() < 0.5 else None
        more = scales(sizes.k, rng.choice((-128, -128, 0, rng.randint(-127, 127))), rng.randint(-128, 127))
        (top, bottom, left, right) = window.padding
        packed = ops.pack_conv(codes, kernel_size, groups)
        around = (top, bottom), (left, right)
        y = ops.qconv2d(x, packed, bias, moves[0], around, moves[1], clamp=(-100, 120), **more)  # type: ignore[arg-type]
        wanted = conv_reference.qconv2d(x, codes, kernel_size, window, bias, groups=groups, clamp=(-100, 120), **more)  # type: ignore[arg-type]
        assert bool(wanted.agrees(y).all()), (sizes, window, x.shape)
        # What adds products in another way has the same sums, so the same codes, bit for bit.
        plan = list(PLANS.conv2d.values())[-1]
        if isinstance(plan.other, form):
            assert isinstance(plan.kernel, ConvKernel)
            table = ops.conv_requantization_table(packed, bias, **more)  # type: ignore[arg-type]
            assert torch.equal(y, plan.kernel(x, window, packed.data, table, -100.0, 120.0, outside=int(more["in_zero"])))
    assert len(taken) > 2
    PLANS.conv2d.clear()


@pytest.mark.parametrize("isa", [isa for isa in RUNNABLE if isa.mixed_dot and isa.matrix is None], ids=lambda isa: isa.name)
def test_depthwise_quads_have_the_sums_of_single_products(isa, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    monkeypatch.setattr(planned, "WORK_A_THREAD", 1)
    rng, torchs = random.Random(2), torch.Generator().manual_seed(2)
    for case in range(24):
        channels, kernel_size = rng.choice((16, 17, 33, 64, 65, 100, 144)), (rng.randint(1, 3), rng.randint(1, 3))
        sizes = Filter(as_format("int8_channel"), channels, 1, kernel_size, channels)
        window = Window((rng.randint(1, 3), rng.randint(1, 3)), tuple(rng.randint(0, 2) for _ in range(4)))  # type: ignore[arg-type]
        x = torch.randint(
            -128, 128, (rng.randint(1, 2), rng.randint(3, 11), rng.randint(3, 9), channels), generator=torchs, dtype=torch.int8
        )
        image, codes, more = (
            x.permute(0, 3, 1, 2),
            random_codes(sizes.format, sizes.codes_shape, case),
            scales(9, rng.randint(-128, 127), 7),
        )
        table = ops.conv_requantization_table(
            ops.pack_conv(codes, kernel_size, channels), torch.randn(channels, generator=torchs) * 10, **more
        )  # type: ignore[arg-type]
        assert depthwise_dot.supports(sizes, window, isa)
        kernel = DepthwiseDotKernel(sizes, window, window.out_size((image.shape[2], image.shape[3]), kernel_size)[0])
        rest = table, float(rng.randint(-128, 0)), float(rng.randint(0, 127))
        y = kernel(image, window, kernel.weights_of(codes), *rest, outside=int(more["in_zero"]))
        wanted = DepthwiseKernel(sizes, torch.int8)(image, window, taps(codes, sizes, integer=True), *rest, outside=int(more["in_zero"]))
        assert torch.equal(y, wanted), (sizes, window, x.shape)


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.mixed_dot], ids=lambda isa: isa.name)
def test_products_of_unsigned_codes_are_made_in_registers(isa) -> None:
    """A loop over units: each quad of codes of each row times two vectors, and no accumulator leaves its register."""
    (rows, vectors), unit = isa.tuning.conv_tile, 24
    spec = tile_spec("int8", 8, "none", (unit, False), rows, vectors, scale="f32", out="i8", pair_sums=True)
    loops = [part.splitlines() for part in jit.compile_assembly(unsigned.build_tile(spec, isa), isa).split("\n.L") if "vpdpbusd" in part]
    assert [sum("vpdpbusd" in line for line in loop) for loop in loops] == [unit // 4 * rows * vectors]
    assert not any("%rsp" in line for loop in loops for line in loop if "mm" in line)


def test_lines_of_kernels_outside_of_images_need_no_products() -> None:
    rng = random.Random(3)
    for _ in range(200):
        kernel, height = rng.randint(1, 5), rng.randint(1, 9)
        window = Window((rng.randint(1, 3), 1), (rng.randint(0, 4), rng.randint(0, 4), 0, 0), (rng.randint(1, 3), 1))
        for y, (first, stop) in enumerate(direct_call.lines_inside(window, kernel, height, 6)):
            top = y * window.stride[0] - window.padding[0]
            assert [*range(first, stop)] == [k for k in range(kernel) if 0 <= top + k * window.dilation[0] < height]
    small, around = Filter(as_format("int8_channel"), 512, 512, (3, 3)), Window(padding=(1, 1, 1, 1))
    for isa in ISAS:
        if isa.mixed_dot:
            assert unsigned.supports(small, around, 7, -128, isa)
            assert not unsigned.supports(small, around, 7, -127, isa)
            assert not unsigned.supports(small, around, 14, -128, isa)

"""The convolution of an enlarged image, computed from the small one, is that of the enlarged one bit for bit."""

import pytest
import torch
from support import RUNNABLE
from torch import Tensor
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.cpu import upsampled_conv
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.conv.gathered import ConvKernel, ImageConvKernel
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.cpu.upsampled_conv import UpsampledConvKernel, why_not
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter, PackedConv

WINDOW = Window((1, 1), (1, 1, 1, 1), (1, 1))
# channels, outputs, and images: one pixel, a line, a column, several strips of which the last one overlaps, a batch
CASES = [(16, 16, (1, 1, 1)), (32, 48, (1, 1, 5)), (48, 80, (2, 7, 1)), (32, 96, (1, 11, 6)), (160, 32, (3, 4, 9))]


def packed(channels: int, out: int, kernel: int = 3, fmt: str = "int8_channel") -> PackedConv:
    torch.manual_seed(channels)
    return hb.pack_conv(hb.quantize_conv(torch.randn(out, channels, kernel, kernel), fmt), kernel)


def codes_kernel(sizes: Filter, dtype: torch.dtype = torch.float32) -> ConvKernel:
    return ConvKernel(sizes, torch.int8, "int8", "block", out=dtype)


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_bit_for_bit(isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    monkeypatch.setattr(runtime, "threads", lambda: 2)
    for channels, out, (batch, height, width) in CASES:
        weight = packed(channels, out)
        codes = codes_kernel(weight.sizes, dtype)
        if (reason := why_not(codes, WINDOW)) is not None:
            assert codes.linear.paired or out % codes.linear.isa.lanes, reason
            continue
        # T of 5 lines and the 2 around them, of which each tap meets 5 or 6
        monkeypatch.setattr(upsampled_conv, "_STRIP_BYTES", (3 * 5 + 2) * 3 * width * 128)
        x = torch.randn(batch, channels, height, width).to(dtype).to(memory_format=torch.channels_last)
        bias = torch.randn(out) if height > 1 else None
        large = functional.interpolate(x, scale_factor=2.0, mode="nearest").to(memory_format=torch.channels_last)
        wanted = ImageConvKernel(codes)(large, WINDOW, weight.data, bias, -20.0, 30.0)
        kernel = ImageConvKernel(UpsampledConvKernel(codes))
        PLANS.scratch = torch.full((1 << 22,), 255, dtype=torch.uint8)  # nothing is read that was not written
        for y in (kernel(x, WINDOW, weight.data, bias, -20.0, 30.0) for _ in range(2)):
            assert (y.shape, y.dtype) == (wanted.shape, dtype)
            assert y.is_contiguous(memory_format=torch.channels_last)
            assert torch.equal(y, wanted)


def test_the_largest_sums_are_exact() -> None:
    """All codes at their ends: sums beyond 2^24, which floats would round before they are added."""
    weight = hb.pack_conv(hb.quantize_conv(torch.ones(16, 256, 3, 3), "int8_channel"), 3)
    codes, x = codes_kernel(weight.sizes), torch.ones(1, 256, 3, 3).to(memory_format=torch.channels_last)
    if why_not(codes, WINDOW) is not None:
        pytest.skip("this CPU's products are paired")
    y: Tensor = ImageConvKernel(UpsampledConvKernel(codes))(x, WINDOW, weight.data, None, -1e9, 1e9)
    assert torch.equal(y[0, 0, 2:4, 2:4], y[0, 0, 2, 2].expand(2, 2))
    assert abs(float(y[0, 0, 2, 2]) - 256 * 9) < 256 * 9 * 2**-22
    assert float(y[0, 0, 0, 0]) < float(y[0, 0, 2, 2])  # what lies outside is 0


@pytest.mark.parametrize(
    ("channels", "kernel", "window", "dtype", "words"),
    [
        (32, 1, WINDOW, torch.float32, "3 x 3"),
        (32, 3, Window((2, 2), (1, 1, 1, 1), (1, 1)), torch.float32, "stride"),
        (32, 3, Window((1, 1), (0, 0, 0, 0), (1, 1)), torch.float32, "padding 1"),
        (32, 3, WINDOW, torch.int8, "writes floating point"),
        (24, 3, WINDOW, torch.float32, "multiple of 16"),
    ],
)
def test_what_it_does_not_compute(channels: int, kernel: int, window: Window, dtype: torch.dtype, words: str) -> None:
    assert words in (why_not(codes_kernel(packed(channels, 32, kernel).sizes, dtype), window) or "")

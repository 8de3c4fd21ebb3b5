"""Convolutions of enlarged images: which have a native call, and that it is the same convolution."""

import pytest
import torch
from torch.nn import functional

import halfbyte as hb
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.ops.conv.functions import window_numbers
from halfbyte.ops.conv.upsampled import UpsampledConv

NUMBERS = window_numbers((3, 3), 1, 1, 1)


def weight(channels: int = 32, fmt: str = "int8_channel") -> hb.PackedConv:
    torch.manual_seed(0)
    return hb.pack_conv(hb.quantize_conv(torch.randn(32, channels, 3, 3), fmt), 3)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
def test_the_convolution_of_the_enlarged_image(dtype: torch.dtype, memory_format: torch.memory_format) -> None:
    packed, bias = weight(), torch.randn(64)[::2]
    convs = UpsampledConv(packed, bias, NUMBERS, "int8", "image")
    for shape in ((1, 32, 3, 5), (2, 32, 4, 4)):
        x = torch.randn(shape).to(dtype).to(memory_format=memory_format)
        y = convs(x)
        if y is None:
            pytest.skip(f"{current().name} does not compute it")
        large = functional.interpolate(x, scale_factor=2.0, mode="nearest")
        assert torch.equal(y, hb.conv2d(large, packed, bias, padding=1, compute="int8", activation="image"))
        assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.parametrize(
    ("fmt", "compute", "activation", "channels"),
    [("int8_channel", "float", "block", 32), ("int8_channel", "int8", "block", 32), ("int8_channel", "int8", "image", 24)],
)
def test_others_have_none(fmt: str, compute: str, activation: str, channels: int) -> None:
    convs = UpsampledConv(weight(channels, fmt), None, NUMBERS, compute, activation)
    assert convs(torch.randn(1, channels, 4, 4)) is None


def test_images_that_are_none() -> None:
    convs = UpsampledConv(weight(), None, NUMBERS, "int8", "image")
    assert convs(torch.randn(0, 32, 4, 4)) is None
    assert convs(torch.randn(32, 4, 4)) is None

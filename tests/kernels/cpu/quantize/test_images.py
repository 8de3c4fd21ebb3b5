"""Codes of images with one scale each: those of the reference, bit for bit, also where an element is not finite."""

import pytest
import torch
from support import RUNNABLE
from torch import Tensor

from halfbyte.kernels import conv_reference
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.quantize import images

SHAPES = [(1, 4, 3, 5), (3, 7, 9, 70), (2, 64, 65, 33), (1, 1, 1, 1)]  # the third: a share for each of two threads


def quantize_images(x: Tensor) -> tuple[Tensor, Tensor]:
    """The codes of images that lie one after the other without gaps, and the scales."""
    call, codes = images.prepare(len(x), x[0].numel(), x.dtype), torch.empty_like(x, dtype=torch.int8)
    scales = torch.empty(len(x), dtype=torch.float32)
    images.pack_tensors(call.buffer, images.TENSORS, x.data_ptr(), codes.data_ptr(), scales.data_ptr())
    runtime.runner()(call.address, call.threads)
    return codes, scales


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_codes_are_those_of_the_reference(isa, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    monkeypatch.setattr(runtime, "threads", lambda: 2)
    for shape in SHAPES:
        torch.manual_seed(0)
        x = torch.randn(shape).to(dtype).to(memory_format=torch.channels_last)
        for found, wanted in zip(quantize_images(x), conv_reference.quantized_images(x), strict=True):
            assert torch.equal(found, wanted)
            assert shape[0] == 1 or found.dim() == 1 or found.stride() == x.stride()


@pytest.mark.parametrize("value", [torch.nan, torch.inf, -torch.inf])
@pytest.mark.parametrize("place", [0, 12345, 2 * 65 * 33 * 8 - 1])
def test_an_image_that_is_not_finite(value: float, place: int) -> None:
    x = torch.randn(2, 65, 33, 16).permute(0, 3, 1, 2)
    wanted, wanted_scales = conv_reference.quantized_images(x)
    x[1].permute(1, 2, 0).reshape(-1)[place] = value
    x[1].permute(1, 2, 0).view(-1)[place] = value
    codes, scales = quantize_images(x)
    assert torch.equal(codes[0], wanted[0])
    assert scales[0] == wanted_scales[0]
    assert scales[1].isnan()


def test_an_image_of_zeros_and_one_of_denormals() -> None:
    x = torch.stack([torch.zeros(3, 5, 7), torch.full((3, 5, 7), 1e-44)]).to(memory_format=torch.channels_last)
    for found, wanted in zip(quantize_images(x), conv_reference.quantized_images(x), strict=True):
        assert torch.equal(found, wanted)

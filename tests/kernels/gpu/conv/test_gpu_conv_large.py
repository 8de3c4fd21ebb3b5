"""Images so large that offsets in them do not fit an int32. Memory that no program touches costs nothing."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from torch._subclasses import FakeTensorMode

from halfbyte.formats import as_format
from halfbyte.kernels.gpu.conv import depthwise, dynamic, few, implicit_gemm
from halfbyte.kernels.gpu.conv import image as conv_image
from halfbyte.kernels.gpu.conv.stem import memory_for, stem_of, write
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.problem import ConvProblem, Epilogue, Window
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import GPUS, Gpu
from halfbyte.ops.conv import pool as pool_ops


def only_last_program(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let the interpreter run the last program of a grid of one dimension, and leave arguments where they are."""
    from triton.runtime import interpreter

    builder: Any = interpreter.interpreter_builder
    run: Any = interpreter.GridExecutor.__call__

    def run_last(self: Any, *args: object, **kwargs: object) -> None:
        (programs,) = self.grid
        self.grid = (1,)
        monkeypatch.setattr(builder, "set_grid_idx", lambda x, y, z: setattr(builder, "grid_idx", (programs - 1, 0, 0)))
        run(self, *args, **kwargs)

    monkeypatch.setattr(interpreter.GridExecutor, "__call__", run_last)
    monkeypatch.setattr(interpreter.GridExecutor, "_restore_args_dev", lambda *_: None)  # it would copy all of the memory to itself


@pytest.mark.parametrize("dilation", [1, 2])  # rows of y that share rows of x, and others
def test_depthwise_images_of_2_31_elements(dilation: int, gpu: Gpu, interpreted: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    if not interpreted:
        pytest.skip("it takes 9 GB, of which the interpreter touches some MB")
    batch, height, width, channels, rows, columns = 2, (1 << 14) + 8, 1 << 14, 8, 4, 64
    sizes = Filter(as_format("int8_channel"), channels, 1, (3, 3), channels)
    problem = ConvProblem(sizes, Window((1, 1), (dilation,) * 4, (dilation,) * 2), batch, (height, width), torch.int8)
    assert height * width * channels > 1 << 31
    image, out = (torch.empty(batch, height, width, channels, dtype=torch.int8) for _ in range(2))
    corner = image[1, -rows - dilation :, -columns - dilation :]
    corner.copy_(torch.randint(-3, 4, corner.shape))
    taps = torch.randint(-2, 3, (9, channels), dtype=torch.int32)
    table = torch.zeros(1, 4 + 9, 64)
    table[:, 1] = 1.0  # sums are codes
    config = replace(depthwise.configs(problem, gpu)[0], vectors=columns, rows=rows)
    only_last_program(monkeypatch)
    depthwise.launch(problem, config, image, taps, out.view(-1, channels), Epilogue.of_codes(table, 0, (-128, 127)))
    padded = torch.nn.functional.pad(corner.permute(2, 0, 1).double(), (0, dilation, 0, dilation))
    weight = taps.T.reshape(channels, 1, 3, 3).double()
    expected = torch.nn.functional.conv2d(padded[None], weight, dilation=dilation, groups=channels)[0].permute(1, 2, 0)
    assert torch.equal(out[1, -rows:, -columns:].double(), expected)


def test_pixels_of_a_stem_overlap() -> None:
    """An image of 8192 x 8192 is multiplied by pieces of 32 elements, of which each adds 4."""
    sizes = Filter(as_format("int8_channel"), 64, 3, (3, 3))
    problem = ConvProblem(sizes, Window((1, 1), (1, 1, 1, 1)), 1, (8192, 8192), torch.float16)
    stem = stem_of(problem)
    assert stem is not None
    assert implicit_gemm.supports(stem, GPUS["sm_90"]) is None
    large = stem_of(replace(problem, image=(20000, 30000)))
    assert large is not None
    assert "2^31" in (implicit_gemm.supports(large, GPUS["sm_90"]) or "")


def test_images_of_2_31_elements_are_declined() -> None:
    """Kernels compute offsets inside of an image in int32: those of few pixels of y, too, which a large stride leaves of a large image."""
    sizes = Filter(as_format("int8_channel"), 64, 64, (1, 1))
    problem = ConvProblem(sizes, Window((128, 128), (0, 0, 0, 0)), 1, (8192, 8192), torch.float16)
    assert problem.m == 4096
    assert few.supports(replace(problem, image=(4096, 4096)), GPUS["sm_90"]) is None
    assert "2^31" in (few.supports(problem, GPUS["sm_90"]) or "")


def test_padding_of_channels_counts() -> None:
    """An image of one channel has four where kernels read it: fewer than 2^31 elements become more."""
    sizes = Filter(as_format("int8_channel"), 64, 1, (3, 3))
    problem = ConvProblem(sizes, Window((2, 2), (1, 1, 1, 1), (2, 2)), 1, (30000, 30000), torch.float16)
    assert convolution.gpu_image_channels(sizes) == 4
    assert "2^31" in (implicit_gemm.supports(problem, GPUS["sm_90"]) or "")
    assert implicit_gemm.supports(replace(problem, image=(20000, 20000)), GPUS["sm_90"]) is None
    wide = replace(sizes, channels=40)  # is read as it is
    assert convolution.gpu_image_channels(wide) == 40
    assert convolution.gpu_image_channels(replace(wide, groups=2)) == 80


def test_int32_numbers_of_masked_elements_do_not_overflow() -> None:
    """Programs count elements in whole blocks: one beyond 2^31 is negative, and so below the number that masks it."""
    hopper, sizes = GPUS["sm_90"], Filter(as_format("int8_channel"), 64, 64, (1, 1))
    problem = ConvProblem(sizes, Window((128, 128)), 1, (1 << 13, (1 << 12) - 2), torch.float16, compute="int8", activation="image")
    largest = (1 << 31) - (1 << 20)  # 256 programs, each of which takes blocks of 4096 elements
    assert problem.image[0] * problem.image[1] * 64 == largest
    assert conv_image.supports(problem, hopper) is None
    assert str(largest) in (conv_image.supports(replace(problem, image=(1 << 13, (1 << 12) - 1)), hopper) or "")


def test_pixels_are_counted_in_int32() -> None:
    hopper, sizes = GPUS["sm_90"], Filter(as_format("int8_channel"), 64, 64, (1, 1))
    problem = ConvProblem(sizes, Window(), (1 << 17) - 1, (1 << 7, 1 << 7), torch.float16)
    for module in (implicit_gemm, dynamic):
        assert module.supports(problem, hopper) is None
        assert "counted in int32" in (module.supports(replace(problem, batch=1 << 17), hopper) or "")
    strided = replace(problem, batch=1 << 17, window=Window((2, 2)))
    assert implicit_gemm.supports(strided, hopper) is None
    assert "counted in int32" in (dynamic.supports(strided, hopper) or "")


def test_pixels_of_a_stem_are_counted_in_int32() -> None:
    sizes = Filter(as_format("int8_channel"), 64, 3, (1, 1))
    most = (1 << 31) // 256 - 2  # images of 256 pixels with what pads the last piece: a program writes 512 pixels
    problem = ConvProblem(sizes, Window(), most, (1, 256 - 9), torch.float16)
    stem = stem_of(problem)
    assert stem is not None
    assert stem.image == (1, 256)
    assert stem_of(replace(problem, batch=most + 1)) is None


def test_offsets_of_a_stem_are_int32() -> None:
    """Where a pixel's batch comes last in memory, rows of one image may lie 2^31 elements from each other: the image is copied then."""
    sizes, strides = Filter(as_format("int8_channel"), 64, 3, (3, 3)), list[tuple[int, ...]]()
    for batch in (1 << 14, 1 << 15):
        stem = stem_of(ConvProblem(sizes, Window((2, 2), (1, 1, 1, 1)), batch, (128, 256), torch.float16))
        assert stem is not None
        x = torch.empty(128, 256, 3, batch, dtype=torch.float16, device="meta").permute(3, 2, 0, 1)
        with launcher.recording(dry=True) as recording:
            write(stem, x, memory_for(stem, x), 0)
        strides.append(recording.launches[0].args[3])  # type: ignore[arg-type]
    assert strides == [(1, 1 << 14, 768 << 14, 3 << 14), (98304, 32768, 256, 1)]


def test_outputs_of_a_pool_are_counted_in_int32(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_ops, "why_no_triton", lambda: None)
    pool = torch.nn.MaxPool2d(3, 1, 1)
    with FakeTensorMode():
        few_images, images = (torch.empty(n, 1, 1 << 9, 1 << 9, dtype=torch.int8, device="cuda") for n in ((1 << 13) - 1, 1 << 13))
        assert pool_ops.kernel_pool(few_images, pool) is not None
        assert pool_ops.kernel_pool(images, pool) is None


def test_blocks_of_a_pixel_fit_a_grid() -> None:
    """`_ranges` has a program for each block of channels along the grid's second dimension, of at most 65 535."""
    hopper, channels = GPUS["sm_90"], 32 * ((1 << 16) - 1)
    sizes = Filter(as_format("q8_0"), 32, channels, (1, 1))
    problem = ConvProblem(sizes, Window(), 1, (8, 8), torch.float16, compute="int8", activation="block")
    assert dynamic.supports(problem, hopper) is None
    more = replace(problem, sizes=replace(sizes, channels=channels + 32))
    assert dynamic.supports(more, hopper) == "65536 blocks of a pixel's channels are more than the 65535 of a grid's second dimension"
    assert dynamic.supports(replace(more, activation="row"), hopper) is None, "one range for all channels"

"""Convolutions on the GPU (or in Triton's interpreter) against the float64 reference."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import gluon_interpreter
import pytest
import torch
from float_support import UNIT, launched
from samples import random_codes
from torch import Tensor

from halfbyte.dispatch.choose import choose
from halfbyte.formats import Codes, as_format
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.gpu.conv import depthwise as conv_depthwise
from halfbyte.kernels.gpu.conv import dynamic as conv_dynamic
from halfbyte.kernels.gpu.conv import elementwise
from halfbyte.kernels.gpu.conv import few as conv_few
from halfbyte.kernels.gpu.conv import hopper as conv_hopper
from halfbyte.kernels.gpu.conv import image as conv_image
from halfbyte.kernels.gpu.conv import implicit_gemm as conv
from halfbyte.kernels.gpu.conv import stem as conv_stem
from halfbyte.kernels.gpu.conv import teams as conv_teams
from halfbyte.kernels.gpu.conv.tile import Config
from halfbyte.kernels.gpu.hopper.gluon_compat import LARGER_VIEWS
from halfbyte.kernels.problem import Addition, Combination, ConvProblem, Epilogue, Window
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import Gpu
from halfbyte.ops import functions
from halfbyte.ops.conv import cuda as cuda_conv

# (batch, height, width, channels a group, groups, outputs, kernel, window)
SHAPES = {
    "3x3 same": (2, 5, 6, 32, 1, 70, (3, 3), Window((1, 1), (1, 1, 1, 1))),
    "odd channels, stride, dilation": (1, 9, 8, 21, 1, 5, (3, 2), Window((2, 1), (0, 2, 1, 3), (2, 1))),
    "stem": (1, 13, 12, 3, 1, 16, (7, 7), Window((2, 2), (3, 3, 3, 3))),
    "groups": (2, 6, 5, 8, 3, 6, (3, 3), Window((1, 2), (1, 1, 0, 1))),
    "one tap of groups": (1, 4, 5, 34, 2, 6, (1, 1), Window()),
    "one tap": (1, 5, 4, 35, 1, 6, (1, 1), Window((2, 1), (1, 0, 0, 1))),
    "pixels of 24": (1, 3, 5, 24, 1, 70, (1, 1), Window()),
    "every second of 80": (1, 3, 5, 80, 1, 6, (1, 1), Window((2, 2))),
    "line": (1, 1, 40, 40, 1, 9, (1, 5), Window((1, 1), (0, 0, 2, 2))),
    "patches of 16": (2, 8, 8, 4, 1, 64, (2, 2), Window((2, 2))),  # a row of the weight is shorter than a block is padded to
    "patches of 64": (1, 6, 4, 16, 1, 20, (2, 2), Window((2, 2))),
    "3x3 of 16": (1, 4, 5, 16, 1, 20, (3, 3), Window((1, 1), (1, 1, 1, 1))),
    "3x3 of 48": (1, 4, 5, 48, 1, 20, (3, 3), Window((1, 1), (1, 1, 1, 1))),
}
FEW = {
    "3x3 of 32": (1, 5, 4, 32, 1, 20, (3, 3), Window((1, 1), (1, 1, 1, 1))),
    "stride, dilation": (2, 4, 3, 64, 1, 20, (3, 2), Window((2, 1), (0, 1, 1, 0), (1, 2))),
    "one tap of 128": (2, 5, 4, 128, 1, 33, (1, 1), Window()),
}
FORMATS = ("int8_channel", "int4_channel", "int4_g32", "int4_g128_zp", "q4_1", "q8_0", "int8_g20_zp")


def codes_of(name: str, channels: int, groups: int, outputs: int, kernel: tuple[int, int]) -> tuple[Codes, Filter]:
    fmt = as_format(name)
    taps = kernel[0] * kernel[1]
    shape = (outputs, taps, channels) if isinstance(fmt.block, int) else (outputs, taps * channels)
    codes = random_codes(fmt, shape)
    return codes, convolution.filter_of(codes, kernel, groups)


def image(batch: int, channels: int, height: int, width: int, dtype: torch.dtype) -> Tensor:
    if dtype == torch.int8:
        return torch.randint(-128, 128, (batch, channels, height, width), dtype=torch.int8)
    return torch.randn(batch, channels, height, width).to(dtype)


def in_memory(x: Tensor, device: torch.device) -> Tensor:
    return x.permute(0, 2, 3, 1).contiguous().to(device)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("format", FORMATS)
def test_weights_come_back(shape: str, format: str) -> None:
    _, _, _, channels, groups, outputs, kernel, _ = SHAPES[shape]
    codes, sizes = codes_of(format, channels, groups, outputs, kernel)
    again = convolution.unpack(convolution.pack_gpu(codes, sizes))
    for name, tensor in codes.tensors().items():
        assert torch.equal(tensor, again.tensors()[name]), name


def check(name: str, shape: str, dtype: torch.dtype, gpu: Gpu, device: torch.device, config: Any = None, module: Any = conv) -> None:
    batch, height, width, channels, groups, outputs, kernel, window = (SHAPES | FEW | HOPPER | TEAMS)[shape]
    codes, sizes = codes_of(name, channels, groups, outputs, kernel)
    problem = ConvProblem(sizes, window, batch, (height, width), dtype)
    assert module.supports(problem, gpu) is None
    x = image(batch, channels * groups, height, width, dtype)
    bias = torch.randn(outputs).to(dtype)
    residual = torch.randn(problem.m, outputs).to(dtype)
    low, high = -1.5, 2.5
    weight = convolution.pack_gpu(codes, sizes).data.to(device)
    memory = cuda_conv.with_channels(in_memory(x, device), sizes, 0)
    config, epilogue = config or module.configs(problem, gpu)[0], Epilogue(bias.to(device), residual.to(device), low, high)
    shape = problem.m, outputs
    y = launched(lambda out: module.launch(problem, config, memory, weight, out, epilogue), shape, dtype, device)
    y = y.view(batch, *problem.out, outputs).permute(0, 3, 1, 2)
    expected = conv_reference.conv2d(x, codes, kernel, window, bias, groups)
    error = 2 * conv_reference.error_bound(x, codes, kernel, window, bias, groups)
    more = residual.view(batch, *problem.out, outputs).permute(0, 3, 1, 2).double()
    expected = expected + more
    error = error + 2.0**-22 * (expected.abs() + more.abs())
    size = torch.nn.functional.conv2d(
        torch.nn.functional.pad(x.double().abs(), _sides(window)),
        convolution.channels_first(codes.dequantize(torch.float64), kernel).abs(),
        None,
        window.stride,
        0,
        window.dilation,
        groups,
    )
    error = error + 2 * UNIT[dtype] * size
    wrong = ~reference.agrees(y, expected.clamp(low, high), error)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong"


def _sides(window: Window) -> tuple[int, int, int, int]:
    top, bottom, left, right = window.padding
    return left, right, top, bottom


@pytest.mark.parametrize(
    ("format", "dtype"), [*((format, torch.float16) for format in FORMATS), ("int8_channel", torch.float32), ("q4_1", torch.float32)]
)
def test_formats(format: str, dtype: torch.dtype, gpu: Gpu, device: torch.device) -> None:
    check(format, "odd channels, stride, dilation", dtype, gpu, device)


@pytest.mark.parametrize("format", ["int8_channel", "int4_g32"])
@pytest.mark.parametrize("shape", SHAPES)
def test_windows(shape: str, format: str, gpu: Gpu, device: torch.device) -> None:
    check(format, shape, torch.float16, gpu, device)


@pytest.mark.parametrize(
    ("shape", "format"),
    [*((shape, "int8_channel") for shape in FEW), *(("stride, dilation", format) for format in ("int4_g32_zp", "q4_1", "q8_0"))],
)
def test_few(shape: str, format: str, gpu: Gpu, device: torch.device) -> None:
    check(format, shape, torch.float16, gpu, device, module=conv_few)


@pytest.mark.parametrize("config", [(1, 8, 2, 1, True), (2, 16, 4, 2, False)])
def test_few_shares(config: tuple[int, int, int, int, bool], gpu: Gpu, device: torch.device) -> None:
    """Parts of K of one step and of several, which are read ahead or not, and more warps than there are parts."""
    bands, columns, warps, records, ahead = config
    base = replace(conv_few.configs(ConvProblem(*_FEW_PROBLEM), gpu)[0], bands=bands, columns=columns, batch=warps, warps=warps)
    check("int8_channel", "stride, dilation", torch.float16, gpu, device, replace(base, records=records, ahead=int(ahead)), conv_few)


_FEW_PROBLEM = Filter(as_format("int8_channel"), 64, 64, (1, 1)), Window(), 1, (4, 4), torch.float16


def table_of(codes: Codes, sizes: Filter, bias: Tensor | None, *scales: float) -> Tensor:
    sums = codes.values().reshape(sizes.out, sizes.taps, sizes.channels).sum(2, dtype=torch.int32)
    scale = codes.scale.double().expand(sizes.out, 1).flatten()
    rows = functions.requantization_rows(sums.sum(1, dtype=torch.int32), scale, bias, *scales)  # type: ignore[arg-type]
    return cuda_conv.table(rows, sums, sizes, int(scales[1]))


def addition_to(codes: Tensor, *, codes_first: bool) -> Addition:
    other = torch.randint(-128, 128, codes.shape, dtype=torch.int8).to(codes.device)
    return Addition(other, Combination(torch.int8, 0.37, -3.5, 0.21, -100.0, 90.0), codes_first)


@pytest.mark.parametrize(
    ("format", "in_zero", "selects_address"),
    [
        ("int8_channel", 0, True),
        ("int8_channel", -7, True),
        ("int8_channel", -7, False),
        ("int4_channel", -7, True),
        ("int8_tensor", 0, True),
    ],
)
@pytest.mark.parametrize("shape", SHAPES)
def test_integers(shape: str, format: str, in_zero: int, selects_address: bool, gpu: Gpu, device: torch.device) -> None:
    batch, height, width, channels, groups, outputs, kernel, window = SHAPES[shape]
    codes, sizes = codes_of(format, channels, groups, outputs, kernel)
    problem = ConvProblem(sizes, window, batch, (height, width), torch.int8)
    x, bias = image(batch, channels * groups, height, width, torch.int8), torch.randn(outputs)
    out_scale = 0.02 * float(codes.scale.max()) * 128 * sizes.k**0.5 / 16
    scales = 0.02, in_zero, out_scale, 3
    weight, table = convolution.pack_gpu(codes, sizes).data.to(device), table_of(codes, sizes, bias, *scales).to(device)
    memory = cuda_conv.with_channels(in_memory(x, device), sizes, in_zero)
    out = torch.full((problem.m, outputs), 99, dtype=torch.int8, device=device)
    config = replace(conv.configs(problem, gpu)[0], selects_address=selects_address)
    conv.launch(problem, config, memory, weight, out, Epilogue.of_codes(table, in_zero, (-120, 127)))
    expected = conv_reference.qconv2d(x, codes, kernel, window, bias, 0.02, in_zero, out_scale, 3, groups, (-120, 127))
    wrong = ~expected.agrees(out.cpu().view(batch, *problem.out, outputs).permute(0, 3, 1, 2))
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong"
    addition, both = addition_to(out, codes_first=selects_address), torch.empty_like(out)
    conv.launch(problem, config, memory, weight, both, Epilogue.of_codes(table, in_zero, (-120, 127), addition))
    assert torch.equal(both, elementwise.combine(*addition.of(out)))


@pytest.mark.parametrize("format", ["int4_g32", "q8_0"])
@pytest.mark.parametrize("split", [1, 3])
def test_programs_that_share_k(format: str, split: int, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    record = 128 if format == "int4_g32" else 32
    check(format, "3x3 same", torch.float16, gpu, device, Config(64, 32, record, 2, 4, split, not interpreted))


@pytest.mark.parametrize("format", ["int8_g16", "int8_g16_zp", "int8_g16_offset", "int4_g16", "int4_g16_zp", "int8_g8_zp"])
@pytest.mark.parametrize("shape", ["patches of 64", "pixels of 24", "3x3 of 48", "odd channels, stride, dilation"])
def test_blocks_of_16(format: str, shape: str, gpu: Gpu, device: torch.device) -> None:
    check(format, shape, torch.float32 if format == "int8_g16_offset" else torch.float16, gpu, device)


@pytest.mark.parametrize("format", ["int8_channel_zp", "int4_channel_zp"])
@pytest.mark.parametrize("split", [1, 2])
def test_one_zero_point_a_row_where_a_step_has_several_taps(format: str, split: int, gpu: Gpu, device: torch.device) -> None:
    config = replace(conv.configs(_problem_of(format), gpu)[0], split=split)
    check(format, "3x3 of 16", torch.float16, gpu, device, config)


def _problem_of(format: str) -> ConvProblem:
    batch, height, width, channels, groups, outputs, kernel, window = SHAPES["3x3 of 16"]
    _, sizes = codes_of(format, channels, groups, outputs, kernel)
    return ConvProblem(sizes, window, batch, (height, width), torch.float16)


@pytest.mark.parametrize("activation", ["block", "row", "block_offset", "row_offset"])
@pytest.mark.parametrize(
    ("format", "shape"),
    [
        ("int8_channel", "3x3 same"),
        ("int8_channel_offset", "stem"),
        ("int4_g32", "odd channels, stride, dilation"),
        ("q8_0", "groups"),
        ("int8_g20_zp", "odd channels, stride, dilation"),
        ("q4_1", "line"),
        ("int4_channel", "stem"),
        ("int8_channel", "patches of 16"),
        ("int8_channel", "patches of 64"),
        ("int4_channel", "patches of 16"),
        ("int8_channel_offset", "patches of 64"),
        ("int8_g16", "3x3 of 48"),
        ("int8_g16_zp", "3x3 of 16"),
        ("int4_g16_zp", "3x3 of 16"),
        ("int4_g16_offset", "pixels of 24"),
    ],
)
def test_dynamic(format: str, shape: str, activation: str, gpu: Gpu, device: torch.device) -> None:
    batch, height, width, channels, groups, outputs, kernel, window = SHAPES[shape]
    codes, sizes = codes_of(format, channels, groups, outputs, kernel)
    problem = ConvProblem(sizes, window, batch, (height, width), torch.float16, "int8", activation)  # type: ignore[arg-type]
    assert conv_dynamic.supports(problem, gpu) is None
    x = image(batch, channels * groups, height, width, torch.float16)
    x = x * 2 + 3 if "offset" in activation else x
    x[0, 0, 0, 0] = torch.nan
    bias = torch.randn(outputs)
    out = torch.full((problem.m, outputs), 7.0, dtype=torch.float16, device=device)
    weight = convolution.pack_gpu(codes, sizes).data.to(device)
    config = conv_dynamic.configs(problem, gpu)[0]
    memory = cuda_conv.with_channels(in_memory(x, device), sizes, 0)
    conv_dynamic.launch(problem, config, memory, weight, out, Epilogue(bias.to(device)))
    y = out.cpu().view(batch, *problem.out, outputs).permute(0, 3, 1, 2)
    settings = (x, codes, kernel, window, bias, groups, "int8", activation)
    expected, error = conv_reference.conv2d(*settings), conv_reference.error_bound(*settings)  # type: ignore[arg-type]
    wrong = ~reference.agrees(y, expected, error)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong"


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("format", "shape"),
    [
        ("int8_channel", "3x3 same"),
        ("int8_channel", "odd channels, stride, dilation"),
        ("int8_tensor", "groups"),
        ("int8_channel", "stem"),
        ("int4_channel", "one tap"),
    ],
)
def test_images_that_are_quantized_once(format: str, shape: str, dtype: torch.dtype, gpu: Gpu, device: torch.device) -> None:
    (_, height, width, channels, groups, outputs, kernel, window), batch = SHAPES[shape], 4
    codes, sizes = codes_of(format, channels, groups, outputs, kernel)
    problem = ConvProblem(sizes, window, batch, (height, width), dtype)
    assert conv_image.supports(problem, gpu) is None
    x = image(batch, channels * groups, height, width, dtype) * torch.tensor([1.0, 0.0, 30.0, 1.0]).view(-1, 1, 1, 1).to(dtype)
    x[0, 0, 0, 0], x[2, -1, -1, -1] = torch.inf, -100
    bias, residual = torch.randn(outputs), torch.randn(problem.m, outputs).to(dtype)
    weight = convolution.pack_gpu(codes, sizes).data.to(device)
    memory = cuda_conv.with_channels(in_memory(x, device), sizes, 0)
    expected, error = conv_reference.conv2d_of_images(x, codes, kernel, window, bias, groups)
    more = residual.view(batch, *problem.out, outputs).permute(0, 3, 1, 2).double()
    expected, error = expected + more, error + 2.0**-23 * (expected + more).abs()
    best = conv_image.configs(problem, gpu)[0]
    for config in (best, replace(best, split=2)):
        out = torch.full((problem.m, outputs), 7.0, dtype=dtype, device=device)
        conv_image.launch(problem, config, memory, weight, out, Epilogue(bias.to(device), residual.to(device), -1.5, 250.0))
        y = out.cpu().view(batch, *problem.out, outputs).permute(0, 3, 1, 2)
        wrong = ~reference.agrees(y, expected.clamp(-1.5, 250), error)
        assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong"


@pytest.mark.parametrize(
    ("kernel", "window", "channels", "rows"),
    [
        ((3, 3), Window((2, 1), (1, 0, 2, 1), (1, 2)), 70, 3),
        ((1, 5), Window((2, 1), (1, 0, 2, 1), (1, 2)), 70, 1),
        ((3, 3), Window((1, 1), (1, 1, 1, 1)), 144, 3),
        ((2, 3), Window((1, 2), (0, 2, 1, 0), (1, 1)), 20, 4),
        ((5, 5), Window((1, 1), (2, 2, 2, 2)), 33, 5),
    ],
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.float32, torch.int8])
def test_depthwise(
    dtype: torch.dtype, kernel: tuple[int, int], window: Window, channels: int, rows: int, device: torch.device, gpu: Gpu,
) -> None:  # fmt: skip
    """Strips of several rows, too, of which there are none where so little is to do."""
    in_zero = -9
    codes, sizes = codes_of("int8_channel", 1, channels, channels, kernel)
    problem = ConvProblem(sizes, window, 2, (5, 6), dtype)
    x, bias = image(2, channels, 5, 6, dtype), torch.randn(channels)
    config = replace(conv_depthwise.configs(problem, gpu)[0], rows=rows)
    out = torch.full((problem.m, channels), 99, dtype=dtype, device=device)
    taps = codes.values().to(torch.int32) if dtype == torch.int8 else codes.dequantize(torch.float32)
    taps = taps.T.contiguous().to(device)
    if dtype == torch.int8:
        table = table_of(codes, sizes, bias, 0.02, in_zero, 0.3, 3).to(device)
        conv_depthwise.launch(problem, config, in_memory(x, device), taps, out, Epilogue.of_codes(table, in_zero, (-120, 127)))
        wanted = conv_reference.qconv2d(x, codes, kernel, window, bias, 0.02, in_zero, 0.3, 3, channels, (-120, 127))
        wrong = ~wanted.agrees(out.cpu().view(2, *problem.out, channels).permute(0, 3, 1, 2))
    else:
        conv_depthwise.launch(problem, config, in_memory(x, device), taps, out, Epilogue(bias.to(device), None, -1.0, 3.0))
        expected = conv_reference.conv2d(x, codes, kernel, window, bias, channels).clamp(-1, 3)
        error = conv_reference.error_bound(x, codes, kernel, window, bias, channels)
        wrong = ~reference.agrees(out.cpu().view(2, *problem.out, channels).permute(0, 3, 1, 2), expected, error)
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are wrong"


STEMS = {
    "7x7": (2, 13, 12, 3, 16, (7, 7), Window((2, 2), (3, 3, 3, 3))),
    "rows apart": (1, 9, 14, 6, 20, (2, 5), Window((1, 2), (2, 0, 1, 3), (3, 1))),
    "larger than the image": (1, 3, 2, 4, 16, (3, 3), Window((1, 1), (1, 4, 2, 1))),
}


@pytest.mark.parametrize("dtype", [torch.int8, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", STEMS)
def test_stem(shape: str, dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """Rows of the kernel as taps, of images in both layouts."""
    if interpreted and dtype == torch.bfloat16:
        pytest.skip("the interpreter multiplies bfloat16 wrongly")
    batch, height, width, channels, outputs, kernel, window = STEMS[shape]
    codes, sizes = codes_of("int8_channel", channels, 1, outputs, kernel)
    problem = ConvProblem(sizes, window, batch, (height, width), dtype)
    stem = conv_stem.stem_of(problem)
    assert stem is not None
    assert choose(problem, gpu).options[0].candidate.name == "conv"
    assert stem.m == problem.m
    x, bias = image(batch, channels, height, width, dtype).to(device), torch.randn(outputs)
    weight = conv_stem.weight_of(convolution.pack_gpu(codes, sizes).data.to(device), stem)
    memory = torch.full_like(conv_stem.memory_for(stem, x), 77)
    out = torch.full((problem.m, outputs), 99, dtype=dtype, device=device)
    config = conv.configs(stem, gpu)[0]
    scales = 0.02, -7, 0.02 * float(codes.scale.max()) * 8 * sizes.k**0.5, 3
    for laid_out in (x, x.contiguous(memory_format=torch.channels_last)):
        conv_stem.write(stem, laid_out, memory, scales[1] if dtype == torch.int8 else 0)
        if dtype == torch.int8:
            table = table_of(codes, sizes, bias, *scales).to(device)
            conv.launch(stem, config, memory, weight, out, Epilogue.of_codes(table, scales[1], (-120, 127)))
            wanted = conv_reference.qconv2d(x.cpu(), codes, kernel, window, bias, *scales, 1, (-120, 127))  # type: ignore[arg-type]
            assert wanted.agrees(out.cpu().view(batch, *problem.out, outputs).permute(0, 3, 1, 2)).all()
            continue
        conv.launch(stem, config, memory, weight, out, Epilogue(bias.to(device)))
        expected = conv_reference.conv2d(x.cpu(), codes, kernel, window, bias, 1)
        error = 2 * conv_reference.error_bound(x.cpu(), codes, kernel, window, bias, 1) + 2 * UNIT[dtype] * expected.abs()
        assert reference.agrees(out.cpu().view(batch, *problem.out, outputs).permute(0, 3, 1, 2), expected, error).all()


HOPPER = {
    "3x3 of 64": (9, 13, 9, 64, 1, 80, (3, 3), Window((1, 1), (1, 1, 1, 1))),
    "3x2 of 128": (17, 5, 6, 128, 1, 48, (3, 2), Window((1, 1), (0, 2, 1, 3), (2, 1))),
    "pixels of 48": (9, 3, 5, 48, 1, 176, (1, 1), Window()),
    "3x3 of 64, stride 2": (9, 6, 10, 64, 1, 80, (3, 3), Window((2, 2), (1, 1, 1, 1))),
    "2x3 of 128, stride 2": (2, 8, 6, 128, 1, 72, (2, 3), Window((2, 2), (0, 1, 3, 0), (1, 2))),
    "3x3 of 192": (20, 7, 7, 192, 1, 144, (3, 3), Window((1, 1), (1, 1, 1, 1))),
    "one tap of 64": (1, 5, 4, 64, 1, 64, (1, 1), Window()),
    "pixels of 128": (9, 6, 5, 128, 1, 200, (1, 1), Window()),
}


def by_two(config: conv_hopper.Config) -> conv_hopper.Config:
    """The same with two programs."""
    return replace(config, programs=2, with_residual=config.with_residual and replace(config.with_residual, programs=2))


@pytest.mark.parametrize("dtype", [torch.int8, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("shape", HOPPER)
def test_hopper(shape: str, dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """Without a GPU: integers, and a tile of each kind, in the interpreter of `test_gluon_interpreter.py`, which has the others."""
    if gpu.capability != (9, 0) or (interpreted and (shape not in list(HOPPER)[:4] or dtype != torch.int8)):
        pytest.skip("it is made of Hopper's instructions")
    batch, height, width, channels, _, outputs, kernel, window = HOPPER[shape]
    codes, sizes = codes_of("int8_channel" if dtype == torch.int8 else "int4_g32", channels, 1, outputs, kernel)
    problem = ConvProblem(sizes, window, batch, (height, width), dtype)
    assert conv_hopper.supports(problem, gpu) is None
    x, bias = image(batch, channels, height, width, dtype), torch.randn(outputs)
    weight = convolution.pack_gpu(codes, sizes).data.to(device)
    configs = conv_hopper.configs(problem, gpu)
    assert {config.sweep for config in configs} == {False, LARGER_VIEWS and kernel[1] > 1 and batch > 8 and window.stride == (1, 1)}
    if interpreted:
        configs = tuple(by_two(config) for config in {config.sweep: config for config in reversed(configs)}.values())
    for config in configs:
        if dtype != torch.int8:
            check("int4_g32", shape, dtype, gpu, device, config, conv_hopper)
            continue
        out = torch.full((problem.m, outputs), 99, dtype=dtype, device=device)
        for in_zero in (0, -7):
            scales = 0.02, in_zero, 0.02 * float(codes.scale.max()) * 8 * sizes.k**0.5, 3
            table = table_of(codes, sizes, bias, *scales).to(device)
            with gluon_interpreter.interpreted(conv_hopper) if interpreted else nullcontext():
                conv_hopper.launch(problem, config, in_memory(x, device), weight, out, Epilogue.of_codes(table, in_zero, (-120, 127)))
            wanted = conv_reference.qconv2d(x, codes, kernel, window, bias, *scales, 1, (-120, 127))  # type: ignore[arg-type]
            assert wanted.agrees(out.cpu().view(batch, *problem.out, outputs).permute(0, 3, 1, 2)).all(), (config, in_zero)
        addition, both = addition_to(out, codes_first=config.sweep), torch.empty_like(out)
        with gluon_interpreter.interpreted(conv_hopper) if interpreted else nullcontext():
            conv_hopper.launch(
                problem, config, in_memory(x, device), weight, both, Epilogue.of_codes(table, in_zero, (-120, 127), addition)
            )
        assert torch.equal(both, elementwise.combine(*addition.of(out)))


TEAMS = {
    "records of two taps": (1, 4, 6, 64, 1, 80, (3, 3), Window((1, 1), (1, 1, 1, 1))),
    "more records than stages": (1, 5, 6, 128, 1, 48, (3, 2), Window((1, 1), (0, 2, 1, 3), (2, 1))),
    "long": (1, 7, 7, 448, 1, 72, (3, 3), Window((1, 1), (1, 1, 1, 1))),
    "less than a record": (1, 5, 4, 64, 1, 64, (1, 1), Window()),
    "pixels": (2, 5, 4, 256, 1, 80, (1, 1), Window()),
}


@pytest.mark.parametrize(
    ("shape", "format"), [*zip(TEAMS, ("int4_g32", "int8_channel", "int8_channel", "q4_1", "int4_g64_zp"), strict=True)]
)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_teams(shape: str, format: str, dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """Without a GPU: some, in the interpreter of `test_gluon_interpreter.py`."""
    if gpu.capability != (9, 0) or (interpreted and (shape == "long" or dtype == torch.bfloat16)):
        pytest.skip("it is made of Hopper's instructions")
    batch, height, width, channels, _, outputs, kernel, window = TEAMS[shape]
    _, sizes = codes_of(format, channels, 1, outputs, kernel)
    configs = conv_teams.configs(ConvProblem(sizes, window, batch, (height, width), dtype), gpu)
    for config in configs[:1] if interpreted else configs:
        stages = 5 if shape == "more records than stages" else config.stages
        with gluon_interpreter.interpreted(conv_teams) if interpreted else nullcontext():
            check(format, shape, dtype, gpu, device, replace(config, stages=stages), conv_teams)

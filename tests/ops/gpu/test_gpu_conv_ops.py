"""Convolutions through the public functions and modules on a GPU; without one, that nothing pretends there is."""

from __future__ import annotations

import copy
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from float_support import UNIT
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.dispatch.choose import choose
from halfbyte.dispatch.gpu_conv import GPU_CONV, beats_linear
from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats import as_format
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.problem import ConvProblem, Window
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import GPUS
from halfbyte.ops import cuda
from halfbyte.ops.conv import cuda as cuda_conv

on_gpu = pytest.mark.skipif(not torch.cuda.is_available(), reason="there is no GPU")

# (format, channels, outputs, kernel, groups, stride, padding): patches, pixels as a linear layer, depthwise, a stem
LAYERS = [
    ("int8_channel", 64, 64, 3, 1, 1, 1),
    ("int4_g32", 64, 70, 3, 1, 2, 1),
    ("int4_g32", 64, 64, 1, 1, 1, 0),
    ("int8_channel", 64, 96, 1, 1, 2, 0),
    ("int8_channel", 32, 32, 1, 1, 1, 1),
    ("int8_channel", 33, 33, 3, 33, 2, 1),
    ("int8_channel", 64, 64, 3, 4, 1, 1),
    ("int8_channel", 3, 64, 7, 1, 2, 3),
    ("int4_g32", 48, 24, 1, 1, 1, 0),
]


def layer(format: str, channels: int, outputs: int, kernel: int, groups: int) -> tuple[hb.Codes, hb.PackedConv]:
    codes = hb.quantize_conv(torch.randn(outputs, channels // groups, kernel, kernel) * 0.1, format)
    return codes, hb.pack_conv(codes, kernel, groups, device="cuda")


def floats(x: Tensor, codes: hb.Codes, kernel: int, groups: int, stride: int, padding: int) -> Tensor:
    weight = hb.dequantize(hb.pack_conv(codes, kernel, groups)).double()
    return torch.nn.functional.conv2d(x.double(), weight, None, stride, padding, 1, groups)


def integers(
    x: Tensor, codes: hb.Codes, setting: tuple[str, int, int, int, int, int, int], bias: Tensor, activation: str
) -> tuple[Tensor, Tensor]:
    """What a layer gives under compute="int8", float64, and how far a kernel may be from it. Depthwise layers stay in floating point."""
    _, channels, outputs, size, groups, stride, padding = setting
    kernel, window = (size, size), Window((stride, stride), (padding,) * 4)
    if activation == "image" and groups < outputs:
        return conv_reference.conv2d_of_images(x, codes, kernel, window, bias, groups)
    how = ("float", "block") if groups == channels == outputs else ("int8", activation)
    settings = (x, codes, kernel, window, bias, groups, *how)
    expected, error = conv_reference.conv2d(*settings), conv_reference.error_bound(*settings)  # type: ignore[arg-type]
    short = isinstance(codes.format.block, int) and codes.format.block <= 64
    if size == groups == stride == 1 and short:  # quantized activations may be multiplied as floats: see test_rounded.py
        weight = hb.dequantize(hb.pack_conv(codes, size, groups)).double().abs()
        error = 2 * error + 3 * UNIT[torch.float16] * 1.01 * torch.nn.functional.conv2d(x.double().abs(), weight, None, 1, padding)
    return expected, error


def sums(x: Tensor, codes: hb.Codes, setting: tuple[str, int, int, int, int, int, int], bias: Tensor) -> tuple[Tensor, Tensor]:
    """The same of compute="float", for float16.

    `reference.error_bound` is that of float32 sums, twice because matrix units align products before they add and cut what is below.
    Besides, the weight may be rounded twice (the scale, the product), and cuDNN's sums once before anything is added to them.
    Depthwise layers have float32 weights.
    """
    _, channels, outputs, size, groups, stride, padding = setting
    settings = (x, codes, (size, size), Window((stride, stride), (padding,) * 4), bias, groups)
    expected, error = conv_reference.conv2d(*settings), 2 * conv_reference.error_bound(*settings)
    if not groups == channels == outputs:
        weight = hb.dequantize(hb.pack_conv(codes, size, groups)).double().abs()
        error += 3 * UNIT[torch.float16] * torch.nn.functional.conv2d(x.double().abs(), weight, None, stride, padding, 1, groups)
    return expected, error


@on_gpu
@pytest.mark.parametrize("compute", ["float", "int8"])
@pytest.mark.parametrize("setting", LAYERS)
def test_conv2d(setting: tuple[str, int, int, int, int, int, int], compute: str) -> None:
    fmt, channels, outputs, kernel, groups, stride, padding = setting
    codes, packed = layer(fmt, channels, outputs, kernel, groups)
    assert torch.equal(hb.unpack(packed).data.cpu(), codes.data)
    x, bias = torch.randn(2, channels, 13, 14).half(), torch.randn(outputs).half()
    expected, error = sums(x, codes, setting, bias) if compute == "float" else integers(x, codes, setting, bias, "block")
    residual = torch.randn_like(expected).half()
    wanted, error = expected + residual.double(), error + 2.0**-22 * (expected.abs() + residual.double().abs())
    for image in (x.cuda(), *(x.cuda().to(memory_format=torch.channels_last) for _ in range(3))):  # one call is like another
        y = hb.conv2d(image, packed, bias.cuda(), stride, padding, compute=compute, clamp=(0, 6), residual=residual.cuda())
        assert y.is_contiguous(memory_format=torch.channels_last) == (image.stride()[1] == 1)
        assert y.is_contiguous() == image.is_contiguous()
        assert reference.agrees(y.cpu(), wanted.clamp(0, 6), error).all()


@on_gpu
@pytest.mark.parametrize("setting", LAYERS)
def test_qconv2d(setting: tuple[str, int, int, int, int, int, int]) -> None:
    _, channels, outputs, kernel, groups, stride, padding = setting
    codes, packed = layer("int8_channel", channels, outputs, kernel, groups)
    x, bias = torch.randint(-128, 128, (2, channels, 13, 14), dtype=torch.int8), torch.randn(outputs)
    scales = {"in_scale": 0.02, "in_zero": -9, "out_scale": 0.07, "out_zero": 4}
    window = Window((stride, stride), (padding,) * 4)
    wanted = conv_reference.qconv2d(x, codes, (kernel, kernel), window, bias, 0.02, -9, 0.07, 4, groups)
    for image in (x.cuda(), *(x.cuda().to(memory_format=torch.channels_last) for _ in range(3))):
        y = hb.qconv2d(image, packed, bias.cuda(), stride, padding, **scales)  # type: ignore[arg-type]
        assert wanted.agrees(y.cpu()).all()


@on_gpu
def test_compiled_and_captured() -> None:
    codes, packed = layer("int8_channel", 64, 64, 3, 1)
    x = torch.randn(2, 64, 14, 14, device="cuda", dtype=torch.float16)
    y = hb.conv2d(x, packed, None, 1, 1)
    assert torch.equal(torch.compile(lambda x: hb.conv2d(x, packed, None, 1, 1), fullgraph=True)(x), y)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        again = hb.conv2d(x, packed, None, 1, 1)
    again.zero_()
    graph.replay()
    assert torch.equal(again, y)
    del codes


@on_gpu
def test_weights_are_written_while_others_are_multiplied() -> None:
    weights = [layer(format, 128, 128, 3, 1)[1] for format in ("int8_channel", "int4_g32") * 3]
    x = torch.randn(16, 128, 28, 28, device="cuda", dtype=torch.bfloat16).contiguous(memory_format=torch.channels_last)

    def run_layers(between: Callable[[], None]) -> Tensor:
        y = x
        for packed in weights:
            y = hb.conv2d(y, packed, None, 1, 1)
            between()
        return y

    wanted, graph = run_layers(torch.cuda.synchronize), torch.cuda.CUDAGraph()
    assert torch.equal(run_layers(lambda: None), wanted)
    with torch.cuda.graph(graph):
        found = run_layers(lambda: None)
    for _ in range(3):
        graph.replay()
        assert torch.equal(found, wanted)


@on_gpu
def test_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.backends.cudnn, "allow_tf32", False)  # the backward pass is cuDNN's
    codes, packed = layer("int8_channel", 8, 8, 3, 1)
    x = torch.randn(1, 8, 6, 6, device="cuda", requires_grad=True)
    hb.conv2d(x, packed, None, 1, 1).square().sum().backward()
    other = x.detach().cpu().double().requires_grad_()
    floats(other, codes, 3, 1, 1, 1).square().sum().backward()
    assert x.grad is not None
    assert other.grad is not None
    assert (x.grad.cpu() - other.grad).abs().max() < 1e-3


@on_gpu
def test_modules_and_chains_move() -> None:
    """Sums in another order may make a code its neighbour, and all behind it sees another input: results on the GPU differ from the CPU's,
    but by no more than quantization took those from the float network's."""
    model = nn.Sequential(
        nn.Conv2d(3, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 1, 1, groups=2), nn.ReLU(), nn.MaxPool2d(2), nn.Conv2d(64, 64, 1),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    ).eval()  # fmt: skip
    images = [torch.randn(4, 3, 32, 32) for _ in range(2)]
    for activations, calibration in (("dynamic", None), ("static", images)):
        quantized = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations=activations), calibration)
        here = quantized(images[0])
        there = quantized.cuda()(images[0].cuda()).cpu()
        assert (there - here).norm() <= (here - model(images[0])).norm()


@on_gpu
def test_errors() -> None:
    _, packed = layer("int8_channel", 4, 8, 3, 1)
    x = torch.randn(1, 4, 8, 8, device="cuda")
    with pytest.raises(ArgumentError, match="takes \\[B, 4, H, W\\]"):
        hb.conv2d(torch.randn(1, 5, 8, 8, device="cuda"), packed)
    with pytest.raises(FormatError, match="packed bytes"):
        hb.conv2d(x.cpu(), packed)
    with pytest.raises(ArgumentError, match="convert them first"):
        hb.conv2d(x.double(), packed)
    with pytest.raises(ArgumentError, match="bias of 8 outputs"):
        hb.conv2d(x, packed, torch.randn(8))
    with pytest.raises(ArgumentError, match="image at least as large"):
        hb.conv2d(x[..., :2, :2], packed)
    with pytest.raises(ArgumentError, match="unknown activation scaling"):
        hb.conv2d(x, packed, compute="int8", activation="pixel")
    _, blocks = layer("int4_g32", 64, 64, 3, 1)
    with pytest.raises(UnsupportedError, match=r"a scale per channel"):
        hb.conv2d(torch.randn(1, 64, 8, 8, device="cuda"), blocks, activation="image")


@on_gpu
@pytest.mark.parametrize("activation", ["image", "row_offset", "block_offset"])
@pytest.mark.parametrize("setting", LAYERS)
def test_other_scales(setting: tuple[str, int, int, int, int, int, int], activation: str) -> None:
    """As on the CPU, whose tests compare it with the reference: within what both may differ from that by."""
    fmt, channels, outputs, kernel, groups, stride, padding = setting
    if activation == "image" and fmt != "int8_channel":
        pytest.skip("it takes weights with one scale")
    codes, packed = layer(fmt, channels, outputs, kernel, groups)
    x, bias = torch.randn(2, channels, 13, 14) + 1, torch.randn(outputs)
    expected, error = integers(x, codes, setting, bias, activation)
    y = hb.conv2d(x.cuda(), packed, bias.cuda(), stride, padding, compute="int8", activation=activation)
    assert reference.agrees(y.cpu(), expected, error).all()


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("activation", ["block", "image", "row_offset", "block_offset"])
@pytest.mark.parametrize("setting", [LAYERS[0], LAYERS[3], LAYERS[5], LAYERS[7], LAYERS[8]])
def test_the_op_in_the_interpreter(
    setting: tuple[str, int, int, int, int, int, int], activation: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies between the op and its kernels runs without a GPU, too, on the CPU's tensors. A replay is imitated."""

    def bind(recording: Any, operands: Any, result: Any, device: Any, *, weight: int) -> Any:
        assert weight == 1
        assert any(result is buffer for buffer in recording.buffers)
        return lambda *tensors: seen.append(tuple(t.data_ptr() for t in tensors)) or torch.empty_like(result)

    from halfbyte.kernels.gpu.runtime import tape
    from halfbyte.ops import replay

    monkeypatch.setattr(cuda, "on", lambda tensor: nullcontext())
    monkeypatch.setattr(cuda_conv, "gpu", lambda index: GPUS["sm_90"])
    monkeypatch.setattr(tape, "why_not_replayed", lambda device: None)
    monkeypatch.setattr(tape, "bind", bind)
    replay.tapes.clear()
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    fmt, channels, outputs, kernel, groups, stride, padding = setting
    if kernel == 1 and activation != "image" and channels % 32 == 0:
        pytest.skip("pixels go to linear layers' kernels")
    if activation == "image" and fmt != "int8_channel":
        pytest.skip("images have one scale, and so have their weights")
    codes = hb.quantize_conv(torch.randn(outputs, channels // groups, kernel, kernel) * 0.1, fmt)
    packed = cuda_conv.pack(codes, convolution.filter_of(codes, (kernel, kernel), groups))
    x, bias, window = torch.randn(2, channels, 7, 8), torch.randn(outputs), Window((stride, stride), (padding,) * 4)
    x, seen = x.contiguous(memory_format=torch.channels_last), list[tuple[int, ...]]()
    compute = "auto" if activation == "image" else "int8"  # whoever asks for a scale of the image asks for integers
    arguments = (window.numbers, compute, activation, 0.0, 6.0)
    expected, error = integers(x, codes, setting, bias, activation)
    residual = torch.randn(expected.shape).contiguous(memory_format=torch.channels_last)
    for _ in range(2):
        y = cuda_conv.packed_conv2d(x, packed, bias, residual, *arguments)
    wanted, error = expected + residual.double(), error + 2.0**-22 * (expected.abs() + residual.double().abs())
    assert reference.agrees(y, wanted.clamp(0, 6), error).all()
    assert y.is_contiguous(memory_format=torch.channels_last)
    if channels == 3:  # a copy with more of them was multiplied
        assert not packed.calls
        return
    x = x.clone(memory_format=torch.preserve_format)
    y = cuda_conv.packed_conv2d(x, packed, bias, residual, *arguments)
    assert (seen[-1][0], *seen[-1][2:]) == tuple(t.data_ptr() for t in (x, bias, residual))
    assert seen[-1][1] == packed.data.data_ptr() or packed.sizes.depthwise
    assert y.is_contiguous(memory_format=torch.channels_last)


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_no_gpu() -> None:
    codes = hb.quantize_conv(torch.randn(8, 4, 3, 3), "int8_channel")
    with pytest.raises(UnsupportedError, match="torch sees no GPU"):
        hb.pack_conv(codes, 3, device="cuda")


@pytest.mark.parametrize(
    ("arch", "batch", "channels", "dtype", "taken"),
    [
        ("sm_90", 32, 128, torch.int8, "conv_hopper"),
        ("sm_90", 32, 128, torch.bfloat16, "conv_hopper"),
        ("sm_90", 1, 128, torch.int8, "conv"),
        ("sm_90", 1, 128, torch.bfloat16, "conv_teams"),
        ("sm_90", 32, 96, torch.bfloat16, "conv_library"),
        ("sm_90", 32, 128, torch.float32, "conv"),
        ("sm_80", 32, 128, torch.int8, "conv"),
        ("sm_80", 32, 128, torch.bfloat16, "conv_library"),
    ],
)
def test_choice(arch: str, batch: int, channels: int, dtype: torch.dtype, taken: str) -> None:
    pytest.importorskip("triton", exc_type=ImportError)
    sizes = Filter(as_format("int8_channel" if dtype == torch.int8 else "int4_g32"), 128, channels, (3, 3))
    choice = choose(ConvProblem(sizes, Window((1, 1), (1, 1, 1, 1)), batch, (28, 28), dtype), GPUS[arch])
    assert choice.taken is not None
    assert choice.taken.candidate.name == taken, choice.reasons
    assert {*choice.reasons, taken} == {candidate.name for candidate in GPU_CONV}
    assert all(choice.reasons.values())


@pytest.mark.parametrize(
    ("outputs", "channels", "kernel", "batch", "taken", "beats"),
    [
        (256, 256, 3, 1, "conv_teams", True),
        (256, 256, 1, 1, "conv_teams", True),
        (256, 160, 3, 1, "conv_few", True),
        (256, 96, 1, 1, "conv", False),
        (256, 1024, 1, 32, "conv_hopper", True),
        (144, 24, 1, 32, "conv_hopper", True),
        (144, 24, 1, 16, "conv", False),
    ],
)
def test_choice_of_pixels(outputs: int, channels: int, kernel: int, batch: int, taken: str, beats: bool) -> None:
    pytest.importorskip("triton", exc_type=ImportError)
    sizes, window = Filter(as_format("int4_g32"), outputs, channels, (kernel, kernel)), Window((1, 1), (kernel // 2,) * 4)
    problem = ConvProblem(sizes, window, batch, (14, 14), torch.float16)
    choice = choose(problem, GPUS["sm_90"])
    names = [option.candidate.name for option in choice.options if option.candidate.home]
    assert names[0] == taken
    assert beats_linear(problem.flat, GPUS["sm_90"]) == beats
    assert (choice.options[0].candidate.reads == "pixels") == (kernel == 1 and not beats)
    assert problem.flat.m == problem.m


@on_gpu
def test_sums_that_an_int32_cannot_hold_are_exact() -> None:
    settings = {"in_scale": 1.0, "in_zero": -128, "out_scale": 255 * 65808 / 100, "out_zero": 0}
    for format in ("int8_channel", "int4_channel"):
        weight = torch.ones(8, 7312, 3, 3)
        codes, x = hb.quantize_conv(weight, format), torch.full((1, 7312, 4, 4), 127, dtype=torch.int8)
        y = hb.qconv2d(x.cuda(), hb.pack_conv(codes, 3, device="cuda"), **settings, padding=1)
        expected = conv_reference.qconv2d(x, codes, (3, 3), Window(padding=(1, 1, 1, 1)), None, **settings)
        assert bool(expected.agrees(y.cpu()).all())
        codes, rows = hb.quantize(weight.flatten(1), format), x[:, :, :3, :3].flatten(1)
        y = hb.qlinear(rows.cuda(), hb.pack(codes, "cuda"), **settings)
        assert bool(reference.qlinear(rows, codes, None, **settings).agrees(y.cpu()).all())

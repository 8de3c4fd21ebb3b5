"""Convolutions against their definition: any kernel, stride, padding, dilation and groups; images that touch nothing else."""

import random
from dataclasses import dataclass

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from samples import random_codes
from support import RUNNABLE, examples, pairwise
from torch import Tensor

from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats import as_format
from halfbyte.formats.codes import Codes
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.conv import gathered, planned
from halfbyte.kernels.cpu.conv.depthwise import DepthwiseKernel
from halfbyte.kernels.cpu.conv.gathered import ConvKernel, ImageConvKernel
from halfbyte.kernels.cpu.conv.pool import pool
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.problem import Window
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.convolution import Filter, from_matrix, groups_of, taps, to_matrix
from halfbyte.ops import functions
from halfbyte.ops.conv import functions as ops

FORMATS = ("q4_0", "q8_0", "q4_1", "int4_g20_zp", "int8_channel", "int4_channel_zp", "int8_tensor", "int8_channel_offset")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
isas = pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
few = settings(max_examples=10, suppress_health_check=[HealthCheck.filter_too_much])


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORK_A_THREAD", 1)
    monkeypatch.setattr(gathered, "_CHUNK_BYTES", 4096)  # several chunks of even the smallest image
    monkeypatch.setattr(runtime, "threads", lambda: 2)


@dataclass(frozen=True)
class Case:
    sizes: Filter
    window: Window
    image: tuple[int, int, int, int]
    seed: int

    def codes(self) -> Codes:
        return random_codes(self.sizes.format, self.sizes.codes_shape, self.seed)

    def image_of(self, dtype: torch.dtype) -> Tensor:
        """Channels last, in the midst of memory that holds NaN (or 99)."""
        rng = torch.Generator().manual_seed(self.seed)
        b, c, h, w = self.image
        around = torch.full((b * h * w * c + 256,), 99 if dtype == torch.int8 else torch.nan, dtype=dtype)
        x = around[128:-128].view(b, h, w, c)
        random = torch.randint(-128, 128, x.shape, generator=rng) if dtype == torch.int8 else torch.randn(x.shape, generator=rng) * 3
        x.copy_(random)
        return x.permute(0, 3, 1, 2)


@st.composite
def cases(draw: st.DrawFn, formats: tuple[str, ...] = FORMATS, depthwise: bool = False) -> Case:
    groups = draw(st.integers(1, 40)) if depthwise else draw(st.sampled_from((1, 1, 2, 3)))
    channels, out = (1, 1) if depthwise else (draw(st.sampled_from((1, 3, 8, 20, 33, 64))), draw(st.sampled_from((1, 5, 33, 64))))
    kernel = draw(st.tuples(st.integers(1, 4), st.integers(1, 4)))
    pair = st.tuples(st.integers(1, 3), st.integers(1, 3))
    padding = draw(st.tuples(*[st.integers(0, 3)] * 4))
    case = Case(
        Filter(as_format(draw(st.sampled_from(formats))), out * groups, channels, kernel, groups),
        Window(draw(pair), padding, draw(pair)),
        (draw(st.integers(1, 2)), channels * groups, draw(st.integers(1, 12)), draw(st.integers(1, 12))),
        draw(st.integers(0, 2**16)),
    )
    try:
        case.window.out_size(case.image[2:], kernel)
    except ArgumentError:
        assume(False)
    return case


def packed(codes: Codes, sizes: Filter) -> Tensor:
    parts = torch.cat([cpu_tiles.pack(part).data for part in groups_of(codes, sizes)])
    memory = torch.empty(parts.numel() + 64, dtype=torch.uint8)
    at = -memory.data_ptr() % 64
    return memory[at : at + parts.numel()].copy_(parts)


@isas
@pytest.mark.parametrize("way", ["float", "block", "row", "block_offset"])
def test_convolutions_are_those_of_the_reference(isa, way, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    compute, activation = ("float", "block") if way == "float" else ("int8", way)

    @settings(few, max_examples=examples(isa, 12))
    @given(cases(), st.sampled_from(DTYPES), st.booleans())
    def sweep(case: Case, dtype: torch.dtype, more: bool) -> None:
        codes, x, sizes = case.codes(), case.image_of(dtype), case.sizes
        bias = torch.randn(sizes.out) if more else None
        arguments = (x, codes, sizes.kernel, case.window, bias, sizes.groups, compute, activation)
        wanted, error = conv_reference.conv2d(*arguments), conv_reference.error_bound(*arguments)
        residual = None
        if more:
            residual = torch.randn(wanted.shape).to(dtype).contiguous(memory_format=torch.channels_last)
            wanted = wanted + residual.double()
            error = error + wanted.abs() * 2.0**-23
        kernel, weights = ConvKernel(sizes, dtype, compute, activation), packed(codes, sizes)
        y = kernel(x, case.window, weights, bias, -5.0, 40.0, residual=residual)
        assert y.is_contiguous(memory_format=torch.channels_last)
        assert bool(reference.agrees(y, wanted.clamp(-5, 40), error).all())

    sweep()


@isas
def test_integer_convolutions_are_those_of_the_reference(isa, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    zeros = st.integers(-128, 127)

    @settings(few, max_examples=examples(isa, 20))
    @given(st.booleans().flatmap(lambda d: cases(("int8_channel", "int8_tensor", "int4_channel"), d)), zeros, zeros, st.booleans())
    def sweep(case: Case, in_zero: int, out_zero: int, with_bias: bool) -> None:
        codes, x, sizes, window = case.codes(), case.image_of(torch.int8), case.sizes, case.window
        bias = torch.randn(sizes.out) * 10 if with_bias else None
        scales = {"in_scale": 0.02, "in_zero": in_zero, "out_scale": 0.03 * sizes.k**0.5 * 2**sizes.format.bits, "out_zero": out_zero}
        wanted = conv_reference.qconv2d(x, codes, sizes.kernel, window, bias, groups=sizes.groups, clamp=(-100, 127), **scales)
        weight = ops.pack_conv(codes, sizes.kernel, sizes.groups)
        table = ops.conv_requantization_table(weight, bias, **scales)
        if sizes.channels == 1 and sizes.groups == sizes.out:
            y = DepthwiseKernel(sizes, torch.int8)(x, window, taps(codes, sizes, integer=True), table, -100, 127, outside=in_zero)
        else:
            kernel = ConvKernel(sizes, torch.int8, "int8", "block")
            y = kernel(x, window, weight.data, table, -100, 127, outside=in_zero)
        assert bool(wanted.agrees(y).all())

    sweep()


def test_many_integer_convolutions_are_those_of_the_reference() -> None:
    """Shapes, strides, paddings, dilations, groups and zero points by chance, on the best instruction set at hand."""
    rng, done = random.Random(0), 0
    while done < 150:
        alone = rng.random() < 0.3
        groups = rng.randint(1, 40) if alone else rng.choice((1, 1, 2, 3))
        channels, out = (1, 1) if alone else (rng.choice((1, 2, 3, 5, 8, 16, 20, 24, 32, 33, 64)), rng.choice((1, 5, 16, 32, 33, 64, 70)))
        kernel, strides, dilations = ((rng.randint(1, most), rng.randint(1, most)) for most in (5, 3, 3))
        window = Window(strides, tuple(rng.randint(0, 4) for _ in range(4)), dilations)  # type: ignore[arg-type]
        sizes = Filter(
            as_format(rng.choice(("int8_channel", "int8_channel", "int8_tensor", "int4_channel"))), out * groups, channels, kernel, groups
        )
        case = Case(sizes, window, (rng.randint(1, 3), channels * groups, rng.randint(1, 14), rng.randint(1, 30)), done)
        try:
            window.out_size(case.image[2:], kernel)
        except ArgumentError:
            continue
        done += 1
        codes, x = case.codes(), case.image_of(torch.int8)
        bias = torch.randn(sizes.out) * 10 if rng.random() < 0.5 else None
        zeros = {"in_zero": rng.randint(-128, 127), "out_zero": rng.randint(-128, 127)}
        scales = {"in_scale": 0.02, "out_scale": 0.03 * sizes.k**0.5 * 2**sizes.format.bits, **zeros}
        weight, padding = ops.pack_conv(codes, kernel, groups), (window.padding[:2], window.padding[2:])
        y = ops.qconv2d(x, weight, bias, strides, padding, dilations, **scales)  # type: ignore[arg-type]
        wanted = conv_reference.qconv2d(x, codes, kernel, window, bias, groups=groups, **scales)  # type: ignore[arg-type]
        assert bool(wanted.agrees(y).all()), case


@pytest.mark.parametrize(("isa", "channels", "bits"), pairwise(RUNNABLE, (8, 32, 64), (4, 8)), ids=lambda v: getattr(v, "name", v))
def test_integer_patches_of_whole_units(isa, channels: int, bits: int, monkeypatch) -> None:
    """Units of 8, of 32 and of more codes, with kernels of one tap and of several."""
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    for kernel in ((1, 1), (3, 2)):
        sizes, window = Filter(as_format(f"int{bits}_channel"), 33, channels, kernel), Window((1, 1), (1, 0, 1, 1))
        case = Case(sizes, window, (1, channels, 7, 6), bits)
        codes, x = case.codes(), case.image_of(torch.int8)
        scales = {"in_scale": 0.02, "in_zero": 5, "out_scale": 0.03 * sizes.k**0.5 * 2**bits, "out_zero": -7}
        weight = ops.pack_conv(codes, kernel)
        table = ops.conv_requantization_table(weight, None, **scales)
        y = ConvKernel(sizes, torch.int8, "int8", "block")(x, window, weight.data, table, -128, 127, outside=5)
        assert bool(conv_reference.qconv2d(x, codes, kernel, window, None, **scales).agrees(y).all())


@isas
@pytest.mark.parametrize("channels", [3, 5, 12])
def test_stems(isa, channels: int, monkeypatch) -> None:
    """Taps of few channels: lines of the kernel of a multiple of 8 codes, also by taps of 0 at their ends, and of others."""
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    PLANS.conv2d.clear()
    torchs, rng = torch.Generator().manual_seed(channels), random.Random(channels)
    for kernel in ((7, 7), (2, 8), (3, 2)):
        window = Window((rng.randint(1, 2), rng.randint(1, 2)), (rng.randint(0, 3), 1, rng.randint(0, 3), 2))
        sizes = Filter(as_format("int8_channel"), 35, channels, kernel)
        case = Case(sizes, window, (2, channels, rng.randint(8, 14), rng.randint(24, 50)), channels)
        codes, x = case.codes(), case.image_of(torch.int8)
        scales = {"in_scale": 0.02, "in_zero": rng.randint(-128, 127), "out_scale": 0.03 * sizes.k**0.5 * 2**8, "out_zero": -7}
        packed_, padding = ops.pack_conv(codes, kernel), (window.padding[:2], window.padding[2:])
        y = ops.qconv2d(x, packed_, None, window.stride, padding, **scales)  # type: ignore[arg-type]
        assert bool(conv_reference.qconv2d(x, codes, kernel, window, None, **scales).agrees(y).all())
        floats = torch.randn(x.shape, generator=torchs)
        wanted, error = conv_reference.conv2d_of_images(floats, codes, kernel, window, None, 1)
        y = ops.conv2d(floats, packed_, None, window.stride, padding, activation="image")
        assert bool(reference.agrees(y, wanted, error).all())
    PLANS.conv2d.clear()


@isas
def test_images_with_one_scale_each(isa, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)

    @settings(few, max_examples=examples(isa, 20))
    @given(cases(("int8_channel", "int8_tensor", "int4_channel")), st.sampled_from(DTYPES), st.booleans())
    def sweep(case: Case, dtype: torch.dtype, more: bool) -> None:
        codes, x, sizes = case.codes(), case.image_of(dtype), case.sizes
        bias = torch.randn(sizes.out) if more else None
        wanted, error = conv_reference.conv2d_of_images(x, codes, sizes.kernel, case.window, bias, sizes.groups)
        residual = None
        if more:
            residual = torch.randn(wanted.shape).to(dtype).contiguous(memory_format=torch.channels_last)
            wanted = wanted + residual.double()
            error = error + wanted.abs() * 2.0**-23
        y = ImageConvKernel(ConvKernel(sizes, torch.int8, "int8", "block", out=dtype))(
            x, case.window, packed(codes, sizes), bias, -5.0, 40.0, residual=residual
        )
        assert bool(reference.agrees(y, wanted.clamp(-5, 40), error).all())

    sweep()


@pytest.mark.parametrize("activation", ["block", "row", "block_offset", "row_offset", "image"])
@pytest.mark.parametrize("groups", [1, 8])
def test_images_of_a_batch_do_not_influence_each_other(activation: str, groups: int) -> None:
    torch.manual_seed(0)
    weight = ops.pack_conv(ops.quantize_conv(torch.randn(8, 8 // groups, 3, 3), "int8_channel"), 3, groups)
    x = torch.randn(4, 8, 9, 7) * torch.tensor([1.0, 1000.0, 1e-3, 1.0]).view(4, 1, 1, 1)
    x[3, 2, 1, 1] = torch.nan
    together = ops.conv2d(x, weight, padding=1, compute="int8", activation=activation)
    for i in range(4):
        alone = ops.conv2d(x[i : i + 1], weight, padding=1, compute="int8", activation=activation)
        assert torch.equal(together[i : i + 1].nan_to_num(), alone.nan_to_num())
        assert bool(alone.isnan().any()) == (i == 3)
    if activation == "image" and groups == 1:
        assert bool(together[3].isnan().all())


@isas
def test_depthwise_convolutions_are_those_of_the_reference(isa, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)

    @settings(few, max_examples=examples(isa, 20))
    @given(cases(depthwise=True), st.sampled_from(DTYPES))
    def sweep(case: Case, dtype: torch.dtype) -> None:
        codes, x, sizes = case.codes(), case.image_of(dtype), case.sizes
        bias = torch.randn(sizes.out)
        arguments = (x, codes, sizes.kernel, case.window, bias, sizes.groups)
        wanted, error = conv_reference.conv2d(*arguments), conv_reference.error_bound(*arguments)
        residual = torch.randn(wanted.shape).to(dtype).contiguous(memory_format=torch.channels_last)
        wanted = wanted + residual.double()
        error = error + wanted.abs() * 2.0**-23
        numbers = taps(codes, sizes, integer=False)
        y = DepthwiseKernel(sizes, dtype)(x, case.window, numbers, bias, -5.0, 40.0, residual=residual)
        assert bool(reference.agrees(y, wanted.clamp(-5, 40), error).all())

    sweep()


@given(cases())
@few
def test_the_matrix_gives_the_codes_back(case: Case) -> None:
    codes = case.codes()
    for back in (
        from_matrix(to_matrix(codes, case.sizes), case.sizes),
        functions.unpack(ops.pack_conv(codes, case.sizes.kernel, case.sizes.groups)),
    ):
        assert all(torch.equal(a, b) for a, b in zip(back.tensors().values(), codes.tensors().values(), strict=True))


@pytest.mark.parametrize("groups", [1, 2, 12])
@pytest.mark.parametrize("padding", [0, (1, 2), ((0, 1), (2, 0)), "same", "valid"])
def test_the_op_is_torchs_convolution_of_the_dequantized_weight(groups: int, padding) -> None:
    torch.manual_seed(0)
    weight = torch.randn(12, 12 // groups, 3, 2)
    p = ops.pack_conv(ops.quantize_conv(weight, "int8_channel"), (3, 2), groups)
    x, bias = torch.randn(2, 12, 9, 8, requires_grad=True), torch.randn(12, requires_grad=True)
    y = ops.conv2d(x, p, bias, padding=padding, dilation=(1, 2), compute="float", clamp=(-1, 2))
    floats = functions.dequantize(p)
    if isinstance(padding, tuple) and isinstance(padding[0], tuple):
        (top, bottom), (left, right) = padding
        wanted = torch.nn.functional.conv2d(torch.nn.functional.pad(x, (left, right, top, bottom)), floats, bias, 1, 0, (1, 2), groups)
    else:
        wanted = torch.nn.functional.conv2d(x, floats, bias, 1, padding, (1, 2), groups)
    wanted = wanted.clamp(-1, 2)
    torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-4)
    grad = torch.randn_like(y)
    for actual, torchs in zip(torch.autograd.grad(y, (x, bias), grad), torch.autograd.grad(wanted, (x, bias), grad), strict=True):
        torch.testing.assert_close(actual, torchs, rtol=1e-4, atol=1e-3)


def test_one_dimension_and_no_batch() -> None:
    torch.manual_seed(0)
    p = ops.pack_conv(ops.quantize_conv(torch.randn(8, 6, 5), "q8_0"), (5,))
    floats = functions.dequantize(p).squeeze(2)
    for x in (torch.randn(3, 6, 20), torch.randn(6, 20)):
        y = ops.conv1d(x, p, None, 2, 2, compute="float")
        torch.testing.assert_close(y, torch.nn.functional.conv1d(x, floats, None, 2, 2), rtol=1e-5, atol=1e-4)
    residual = torch.randn(3, 8, 16)
    y = ops.conv1d(torch.zeros(3, 6, 20), p, residual=residual, clamp=(0, 1))
    assert torch.equal(y, residual.clamp(0, 1))


def test_the_ops_pass_torchs_own_checks() -> None:
    p = ops.pack_conv(ops.quantize_conv(torch.randn(8, 6, 3, 3), "int8_channel"), 3)
    numbers, moves = list(p.numbers), list(Window((2, 1), (1, 1, 1, 1)).numbers)
    settings_ = ("int8_channel", numbers, moves, "float", "block", -torch.inf, torch.inf)
    x = torch.randn(2, 6, 7, 8, requires_grad=True)
    torch.library.opcheck(torch.ops.halfbyte.conv2d.default, (x, p.data, torch.randn(8), None, *settings_))
    table = ops.conv_requantization_table(p, None, in_scale=0.1, in_zero=1, out_scale=0.2, out_zero=2)
    xq = torch.randint(-128, 128, (2, 6, 7, 8), dtype=torch.int8)
    torch.library.opcheck(torch.ops.halfbyte.qconv2d.default, (xq, p.data, table, "int8_channel", numbers, moves, 1, -128, 127))


def test_an_empty_batch_gives_an_empty_batch() -> None:
    p = ops.pack_conv(ops.quantize_conv(torch.randn(8, 6, 3, 3), "q4_0"), 3)
    assert ops.conv2d(torch.randn(0, 6, 5, 5), p).shape == (0, 8, 3, 3)


@pytest.mark.parametrize(
    ("change", "error", "words"),
    [
        ({"x": torch.randn(1, 5, 9, 9)}, ArgumentError, "6 input channels"),
        ({"x": torch.randn(1, 6, 2, 9)}, ArgumentError, "at least as large, got 2 x 9"),
        ({"x": torch.zeros(1, 6, 9, 9, dtype=torch.int8)}, ArgumentError, "convert them first"),
        ({"padding": "full"}, ArgumentError, '"same", "valid" or whole numbers'),
        ({"padding": (1, 2, 3)}, ArgumentError, "padding is one whole number"),
        ({"padding": "same", "stride": 2}, ArgumentError, "takes stride 1"),
        ({"padding": -1}, ArgumentError, "padding is 0 or more"),
        ({"stride": 0}, ArgumentError, "are 1 or more"),
        ({"clamp": (1, 0)}, ArgumentError, "low <= high"),
        ({"compute": "int3"}, ArgumentError, "unknown compute"),
        ({"activation": "blok"}, ArgumentError, "unknown activation"),
        ({"activation": "image"}, UnsupportedError, "a scale per channel or tensor and no zero"),
        ({"bias": torch.randn(7)}, ArgumentError, "bias of 8 outputs"),
        ({"residual": torch.randn(1, 8, 7, 6)}, ArgumentError, "residual is torch.float32"),
    ],
)
def test_what_does_not_fit_is_refused(change, error, words) -> None:
    p = ops.pack_conv(ops.quantize_conv(torch.randn(8, 6, 3, 3), "q4_0"), 3)
    arguments = {"x": torch.randn(1, 6, 9, 9), "packed": p} | change
    with pytest.raises(error, match=words):
        ops.conv2d(**arguments)


def test_packing_refuses_what_is_no_convolution() -> None:
    codes = ops.quantize_conv(torch.randn(8, 6, 3, 3), "q4_0")
    with pytest.raises(FormatError, match="codes of a 5 x 5 kernel"):
        ops.pack_conv(codes, 5)
    with pytest.raises(ArgumentError, match="groups divide the 8"):
        ops.pack_conv(codes, 3, groups=3)
    with pytest.raises(FormatError, match="requantization takes symmetric"):
        ops.qconv2d(torch.zeros(1, 6, 5, 5, dtype=torch.int8), ops.pack_conv(codes, 3), in_scale=1, in_zero=0, out_scale=1, out_zero=0)


def test_a_mean_of_padded_images_is_an_error() -> None:
    x = torch.zeros(1, 16, 4, 4, dtype=torch.int8).contiguous(memory_format=torch.channels_last)
    with pytest.raises(AssertionError, match="counts all pixels"):  # the kernel would divide by pixels that it does not sum
        pool(x, (3, 3), Window(padding=(1, 1, 1, 1)), (4, 4), zero=3)
    with pytest.raises(AssertionError, match="counts all pixels"):  # the window of the last outputs leaves the image
        pool(x, (3, 3), Window(), (3, 2), zero=3)
    assert pool(x, (3, 3), Window(), (2, 2), zero=3).shape == (1, 16, 2, 2)

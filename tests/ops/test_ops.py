"""The public operations as torch sees them: what they accept, what they refuse, tracing, compiling and gradients."""

from __future__ import annotations

import copy
import json
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte import ops
from halfbyte.errors import ArgumentError, FormatError, UnsupportedError
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.quantizers import METHODS

N, K = 37, 70
INFINITE = math.inf


def packed_weight(fmt: str = "q4_0", n: int = N, k: int = K) -> hb.Packed:
    return hb.pack(hb.quantize(torch.randn(n, k), fmt))


# Values


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("compute", ["auto", "int8", "float"])
def test_linear_equals_the_reference(compute: str, dtype: torch.dtype) -> None:
    packed, x, bias = packed_weight("int4_g33_zp"), torch.randn(2, 3, K).to(dtype), torch.randn(N)
    y = hb.linear(x, packed, bias, compute=compute, clamp=(-0.5, 6))
    arithmetic = "float" if compute == "float" else "int8"
    expected = reference.linear(x, hb.unpack(packed), bias, arithmetic, "block", (-0.5, 6))
    assert y.shape == (2, 3, N)
    assert y.dtype == dtype
    assert reference.agrees(y, expected, reference.error_bound(x, hb.unpack(packed), bias, arithmetic)).all()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_a_residual_is_added_before_the_clamp(dtype: torch.dtype) -> None:
    packed, x, bias, residual = packed_weight(), torch.randn(2, 3, K).to(dtype), torch.randn(N), torch.randn(2, 3, N).to(dtype)
    y = hb.linear(x, packed, bias, residual=residual, clamp=(-0.5, 6))
    expected = (reference.linear(x, hb.unpack(packed), bias, "int8") + residual.double()).clamp(-0.5, 6)
    bound = reference.error_bound(x, hb.unpack(packed), bias, "int8") + torch.finfo(dtype).eps * (expected - residual.double()).abs()
    assert reference.agrees(y, expected, bound).all()
    x.requires_grad_()
    residual.requires_grad_()
    hb.linear(x, packed, residual=residual).sum().backward()
    assert residual.grad is not None
    assert torch.equal(residual.grad, torch.ones_like(residual))


@pytest.mark.parametrize("fmt", ["q4_0", "q4_1", "q8_0", "int4_g33_zp", "int8_channel", "int8_tensor", "int4_g64_offset_bf16"])
def test_pack_keeps_the_numbers(fmt: str) -> None:
    codes = hb.quantize(torch.randn(N, K), fmt)
    packed = hb.pack(codes)
    for name, tensor in codes.tensors().items():
        assert torch.equal(hb.unpack(packed).tensors()[name], tensor)
    assert torch.equal(hb.dequantize(packed), codes.dequantize())
    ids = torch.tensor([[3, 0], [N - 1, 3]], dtype=torch.int32)
    assert torch.equal(hb.embedding(ids, packed, torch.bfloat16), codes.dequantize(torch.bfloat16)[ids])
    one = torch.arange(6).view(2, 3)[:, 1:2]  # flattened it is a view whose numbers do not follow each other
    assert torch.equal(hb.embedding(one, packed), codes.dequantize()[one])


def test_weights_are_printed_in_a_line() -> None:
    codes = hb.quantize(torch.randn(25, 40), "int4_g128_zp")
    assert str(codes) == "Codes(int4_g128_zp, [25, 40], on cpu)"
    assert str(hb.pack(codes)) == "Packed(int4_g128_zp, [25, 40], cpu_tiles on cpu)"
    kernel = hb.pack_conv(hb.quantize_conv(torch.randn(8, 4, 3, 3), "int8_channel"), 3, 2)
    assert str(kernel) == "PackedConv(int8_channel, [8, 4, 3, 3], 2 groups, cpu_tiles on cpu)"


def test_a_weight_of_three_dimensions_is_dequantized_in_its_shape() -> None:
    codes = hb.quantize(torch.randn(3, 5, 40), "q8_0")
    assert torch.equal(hb.dequantize(hb.pack(codes)), codes.dequantize())
    with pytest.raises(ArgumentError, match=r"takes a weight \[N, K\], got one of shape \[3, 5, 40\]"):
        hb.linear(torch.randn(2, 40), hb.pack(codes))


def test_qlinear_equals_the_reference() -> None:
    packed, x, bias = packed_weight("int8_channel"), torch.randint(-128, 128, (2, 5, K), dtype=torch.int8), torch.randn(N)
    settings: dict[str, Any] = {"in_scale": 0.02, "in_zero": 3, "out_scale": 0.1, "out_zero": -4}
    y = hb.qlinear(x, packed, bias, **settings, clamp=(-4, 127))
    expected = reference.qlinear(x, hb.unpack(packed), bias, **settings, clamp=(-4, 127))
    assert y.dtype == torch.int8
    assert expected.agrees(y).all()


@pytest.mark.parametrize(("m", "n", "k"), [(0, N, K), (3, 0, K), (3, N, 0), (0, 0, 0)])
def test_nothing_times_something(m: int, n: int, k: int) -> None:
    packed, bias = packed_weight("q8_0", n, k), torch.linspace(-1, 1, n)
    assert torch.equal(hb.linear(torch.randn(m, k), packed, bias, clamp=(-0.5, 0.5)), bias.clamp(-0.5, 0.5).expand(m, n))
    assert hb.linear(torch.randn(m, k), packed).shape == (m, n)
    assert hb.dequantize(packed).shape == (n, k)
    channel = packed_weight("int8_channel", n, k)
    y = hb.qlinear(torch.zeros(m, k, dtype=torch.int8), channel, bias, in_scale=1, in_zero=0, out_scale=0.5, out_zero=1)
    assert torch.equal(y, (bias.double() / 0.5 + 1).round().to(torch.int8).expand(m, n))
    assert hb.unpack(packed_weight("int8_tensor", n, k)).shape == (n, k)


def test_a_sum_of_nothing_is_rounded_once() -> None:
    packed, x, bias, residual = packed_weight("q8_0", N, 0), torch.randn(5, 0).bfloat16(), torch.randn(N), torch.randn(5, N).bfloat16()
    assert torch.equal(hb.linear(x, packed, bias, residual=residual), (bias + residual.float()).bfloat16())


@pytest.mark.parametrize("default", [torch.bfloat16, torch.float64, "meta"], ids=str)
def test_torchs_defaults_do_not_matter(default: torch.dtype | str) -> None:
    weight, kernel, x, image = torch.randn(N, 64), torch.randn(24, 1, 3, 3), torch.randn(5, 64), torch.randn(2, 24, 9, 9)
    steps: dict[str, Any] = {"in_scale": 0.02, "in_zero": 3, "out_scale": 0.1, "out_zero": -4}
    x8, image8, ids = (x * 30).to(torch.int8), (image * 30).to(torch.int8), torch.tensor([3, 0])

    def results() -> list[Tensor]:
        packed, channel = hb.pack(hb.quantize(weight, "q4_0")), hb.pack(hb.quantize(weight, "int8_channel"))
        conv = hb.pack_conv(hb.quantize_conv(kernel, "int8_channel"), 3, 24)
        products = [hb.linear(x, packed), hb.qlinear(x8, channel, **steps), hb.embedding(ids, packed)]
        return [*products, hb.conv2d(image, conv), hb.qconv2d(image8, conv, **steps)]

    wanted = results()
    try:
        if isinstance(default, str):
            torch.set_default_device(default)
        else:
            torch.set_default_dtype(default)
        got = results()
    finally:
        torch.set_default_device(None)
        torch.set_default_dtype(torch.float32)
    assert all(map(torch.equal, got, wanted))


def test_one_vector_and_strided_activations() -> None:
    packed, x = packed_weight(), torch.randn(K, 6)
    by_rows = hb.linear(x.T.contiguous(), packed)
    assert torch.equal(hb.linear(x.T, packed), by_rows)
    assert torch.equal(hb.linear(x.T[::2], packed), by_rows[::2])
    assert torch.equal(hb.linear(x[:, 0].contiguous(), packed), by_rows[0])


def test_negative_views_are_read_as_the_numbers_they_are() -> None:
    weight, x, bias, residual = torch.randn(N, K), torch.randn(3, K), torch.randn(N), torch.randn(3, N)

    packed = hb.pack(hb.quantize(torch.complex(weight, -weight).conj().imag, "int8_channel"))
    assert torch.equal(hb.unpack(packed).data, hb.quantize(weight, "int8_channel").data)
    wanted = hb.linear(x, packed, bias, residual=residual)
    given = x, bias, residual
    for i in range(3):
        a, b, c = (torch._neg_view(-tensor) if i == j else tensor for j, tensor in enumerate(given))
        assert torch.equal(hb.linear(a, packed, b, residual=c), wanted)


def test_packed_bytes_that_moved_are_read_where_they_are() -> None:
    packed, x = packed_weight(), torch.randn(3, K)
    memory = torch.empty(packed.nbytes + 1, dtype=torch.uint8)
    memory[1:] = packed.data  # an address that no kernel takes
    moved = hb.Packed(packed.format, packed.shape, packed.layout, memory[1:])
    assert torch.equal(hb.linear(x, moved), hb.linear(x, packed))
    assert torch.equal(hb.dequantize(moved), hb.dequantize(packed))


def test_a_bias_of_another_dtype() -> None:
    packed, x, bias = packed_weight(), torch.randn(3, K), torch.randn(N).to(torch.bfloat16)
    assert torch.equal(hb.linear(x, packed, bias), hb.linear(x, packed, bias.float()))


def test_a_nan_spoils_its_row_alone() -> None:
    packed, x = packed_weight(), torch.randn(5, K)
    clean = hb.linear(x, packed)
    for bad in (math.nan, math.inf, -math.inf):
        x[2, 7] = bad
        y = hb.linear(x, packed)
        assert y[2].isnan().all()
        assert torch.equal(y[[0, 1, 3, 4]], clean[[0, 1, 3, 4]])


# Refusals: what came, what is allowed


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda p: hb.linear(torch.randn(2, K + 1), p), rf"takes activations \[..., {K}\], got \[2, {K + 1}\]"),
        (lambda p: hb.linear(torch.tensor(1.0), p), rf"takes activations \[..., {K}\], got \[\]"),
        (lambda p: hb.linear(torch.randn(2, K).double(), p), "float32, bfloat16 or float16, got torch.float64"),
        (lambda p: hb.linear(torch.randn(2, K), p, torch.randn(N + 1)), rf"the bias of {N} outputs .* got torch.float32 \[{N + 1}\]"),
        (lambda p: hb.linear(torch.randn(2, K), p, torch.zeros(N, dtype=torch.int32)), "got torch.int32"),
        (lambda p: hb.linear(torch.randn(2, K), p, compute="int4"), "unknown compute 'int4': use one of auto, int8, float"),
        (lambda p: hb.linear(torch.randn(2, K), p, activation="tensor"), "unknown activation scaling 'tensor': use one of block"),
        (lambda p: hb.linear(torch.randn(2, K), p, clamp=(1, 0)), r"low <= high, got \(1"),
        (lambda p: hb.linear(torch.randn(2, K), p, clamp=(math.nan, 0)), r"low <= high, got \(nan"),
        (lambda p: hb.embedding(torch.tensor([0, N]), p), rf"ids lie in 0 … {N - 1}, got 0 … {N}"),
        (lambda p: hb.embedding(torch.tensor([-1]), p), "got -1 … -1"),
        (lambda p: hb.embedding(torch.tensor([0.5]), p), "int64 or int32, got torch.float32"),
        (lambda p: hb.dequantize(p, torch.float64), "float32, bfloat16 or float16, got torch.float64"),
        (lambda p: hb.quantize(torch.full((2, 3), math.nan), "q4_0", name="head"), "head"),
        (lambda p: hb.quantize(torch.randn(2, 3), "q4_0", "best"), "unknown quantization method 'best': use one of absmax, mse"),
        (lambda p: hb.quantize(torch.randn(2, 3), "q5_9"), "unknown format 'q5_9'"),
        (lambda p: hb.quantize(torch.full((2, 3), 1e38), "q4_0"), "float16"),
        (lambda p: hb.pack(hb.unpack(p), device="meta"), "device 'meta', there are no kernels for it"),
        (
            lambda p: hb.linear(torch.randn(2, K), p, residual=torch.randn(2, K)),
            rf"torch.float32 \[2, {N}\] .* got torch.float32 \[2, {K}\]",
        ),
        (lambda p: hb.linear(torch.randn(2, K), p, residual=torch.randn(2, N).half()), "got torch.float16"),
    ],
)
def test_refusals(call: Callable[[hb.Packed], object], message: str) -> None:
    with pytest.raises((ArgumentError, FormatError, UnsupportedError), match=message):
        call(packed_weight())


def test_refusals_of_qlinear() -> None:
    x = torch.zeros(2, K, dtype=torch.int8)
    good: dict[str, Any] = {"in_scale": 0.1, "in_zero": 0, "out_scale": 0.1, "out_zero": 0}
    with pytest.raises(FormatError, match="symmetric weights with one scale per channel or tensor"):
        hb.qlinear(x, packed_weight("q8_0"), **good)
    packed = packed_weight("int8_channel")
    for changed, message in (
        ({"in_scale": 0.0}, "in_scale is positive and finite, got 0"),
        ({"out_scale": math.inf}, "out_scale is positive and finite"),
        ({"in_zero": 128}, "in_zero is a whole number in -128 … 127, got 128"),
        ({"clamp": (5, 4)}, r"got \(5, 4\)"),
        ({"clamp": (-129, 4)}, r"got \(-129, 4\)"),
        ({"in_scale": torch.tensor([0.1, 0.2])}, r"in_scale is a number, got torch.float32 \[2\]"),
        ({"out_zero": torch.tensor([1, 2])}, r"out_zero is a whole number, got torch.int64 \[2\]"),
        ({"in_scale": torch.tensor(1j)}, "in_scale is a number, got torch.complex64"),
    ):
        with pytest.raises(ArgumentError, match=message):
            hb.qlinear(x, packed, **{**good, **changed})
    with pytest.raises(ArgumentError, match="takes int8"):
        hb.qlinear(x.float(), packed, **good)


@pytest.mark.parametrize("bad", [lambda d: d[:-1], lambda d: d.to(torch.int8), lambda d: d.view(2, -1), lambda d: torch.cat((d, d))])
def test_packed_bytes_of_another_size_are_refused(bad: Callable[[Tensor], Tensor]) -> None:
    packed = packed_weight()
    broken = hb.Packed(packed.format, packed.shape, packed.layout, bad(packed.data))
    calls = (lambda: hb.linear(torch.randn(2, K), broken), lambda: hb.dequantize(broken), lambda: hb.embedding(torch.tensor([0]), broken))
    for call in calls:
        with pytest.raises(FormatError, match="packed bytes on the CPU"):
            call()


def test_packed_bytes_elsewhere_are_refused_and_not_read() -> None:
    packed, x = packed_weight(), torch.randn(2, K)
    hb.linear(x, packed)  # so that the kernel for this weight is known
    elsewhere = hb.Packed(packed.format, packed.shape, packed.layout, packed.data.to("meta"))
    calls = (lambda: hb.linear(x, elsewhere), lambda: hb.embedding(torch.tensor([0]), elsewhere))
    for call in calls:
        with pytest.raises(FormatError, match=r"packed bytes on the CPU.* on meta"):
            call()


# Tracing, compiling, gradients


def settings(clamp: tuple[float, float] = (-INFINITE, INFINITE)) -> tuple[Any, ...]:
    return "q4_0", N, K, "auto", "block", *clamp


@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor")  # torch 2.14's own check reads it
def test_opcheck() -> None:
    packed, channel = packed_weight(), packed_weight("int8_channel")
    x = torch.randn(2, 3, K)
    linear = torch.ops.halfbyte.linear.default
    torch.library.opcheck(linear, (x, packed.data, None, None, *settings()))
    bias, residual = torch.randn(N, requires_grad=True), torch.randn(2, 3, N, requires_grad=True)
    torch.library.opcheck(linear, (x.clone().requires_grad_(), packed.data, bias, residual, *settings((0, 6))))
    torch.library.opcheck(torch.ops.halfbyte.embedding.default, (torch.tensor([[1, 2]]), packed.data, "q4_0", N, K, torch.float32))
    torch.library.opcheck(torch.ops.halfbyte.dequantize.default, (packed.data, "q4_0", N, K, torch.bfloat16))
    table = ops.requantization_table(channel, None, in_scale=0.1, in_zero=1, out_scale=0.1, out_zero=2)
    xq = torch.randint(-128, 128, (2, K), dtype=torch.int8)
    torch.library.opcheck(torch.ops.halfbyte.qlinear.default, (xq, channel.data, table, "int8_channel", N, K, -128, 127))


def test_compiled_whole() -> None:
    packed, bias = packed_weight(), torch.randn(N)

    def model(x: Tensor) -> Tensor:
        return hb.linear(x.relu(), packed, bias, clamp=(0, 6)) * 2

    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    for m in (4, 9):
        x = torch.randn(m, K)
        assert torch.equal(compiled(x), model(x))
    with torch.inference_mode():
        assert torch.equal(compiled(x), model(x))


def test_meta_and_fake_tensors_take_shapes_only() -> None:
    packed = packed_weight()
    assert hb.linear(torch.empty(2, 3, K, device="meta"), packed).shape == (2, 3, N)
    assert hb.embedding(torch.empty(2, dtype=torch.int64, device="meta"), packed).is_meta
    with torch._subclasses.FakeTensorMode(allow_non_fake_inputs=True) as mode:
        y = hb.linear(mode.from_tensor(torch.randn(5, K)), packed)
        assert isinstance(y, torch._subclasses.FakeTensor)
        assert y.shape == (5, N)


@pytest.mark.parametrize("compute", ["int8", "float"])
def test_gradients_are_those_of_the_dequantized_weight(compute: str) -> None:
    packed = packed_weight("int4_g33_zp")
    x, bias = torch.randn(2, 3, K, requires_grad=True), torch.randn(N, requires_grad=True)
    dy = torch.randn(2, 3, N)
    hb.linear(x, packed, bias, compute=compute).backward(dy)
    codes = hb.unpack(packed)
    assert x.grad is not None
    assert bias.grad is not None
    expected = reference.linear_gradient(dy, codes)
    # A product of N terms in float32, in any order: N roundings of each term (Higham, chapter 3).
    bound = 2 * N * 2.0**-24 * (dy.double().abs() @ codes.dequantize(torch.float64).abs())
    assert ((x.grad.double() - expected).abs() <= bound).all()
    assert torch.allclose(bias.grad, dy.sum((0, 1)), rtol=1e-5, atol=1e-6)


def test_no_gradient_through_a_clamped_output() -> None:
    packed, x = packed_weight(), torch.randn(4, K, requires_grad=True)
    y = hb.linear(x, packed, clamp=(0, INFINITE))
    y.sum().backward()
    inside = (y > 0).float()
    assert 0 < inside.sum() < inside.numel()
    assert x.grad is not None
    assert torch.allclose(x.grad, inside @ hb.dequantize(packed), rtol=1e-5, atol=1e-5)


def test_the_fast_way_past_the_dispatcher_gives_what_the_op_gives() -> None:
    packed, x = packed_weight(), torch.randn(3, K)
    seen = []

    class Watch(torch.utils._python_dispatch.TorchDispatchMode):
        def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
            seen.append(str(func))
            return func(*args, **(kwargs or {}))

    y = hb.linear(x, packed)
    with Watch():
        assert torch.equal(hb.linear(x, packed), y)
    assert "halfbyte.linear.default" in seen


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
def test_quantize_equals_the_slow_method_bit_for_bit(dtype: torch.dtype) -> None:
    weight = (torch.randn(9, 130) * 10.0 ** torch.randint(-6, 3, (9, 1))).to(dtype)
    for fmt in ("q4_0", "q4_1", "q8_0", "inferllm_q4_0", "int4_g33_zp", "int8_channel_offset", "int4_g40_bf16", "int8_g64_zp"):
        fast, slow = hb.quantize(weight, fmt), METHODS["absmax"](weight, hb.as_format(fmt), "weight")
        for name, tensor in slow.tensors().items():
            assert torch.equal(fast.tensors()[name].view(torch.uint8), tensor.view(torch.uint8)), (fmt, name)


def test_torch_func() -> None:
    """grad, vmap and their like go through a product; tests/ops/test_torch_modes.py has all operations."""
    weight, x, bias = torch.randn(8, 64), torch.randn(3, 64), torch.randn(8)
    packed = hb.pack(hb.quantize(weight, "q8_0"))

    def loss(x: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
        return hb.linear(x, packed, bias, compute="float", clamp=(0, 6)).square().sum()

    leaves = x.clone().requires_grad_(), bias.clone().requires_grad_()
    loss(*leaves).backward()
    of_x, of_bias = torch.func.grad(loss, argnums=(0, 1))(x, bias)
    assert torch.equal(of_x, leaves[0].grad)  # type: ignore[arg-type]
    assert torch.equal(of_bias, leaves[1].grad)  # type: ignore[arg-type]
    each = torch.func.vmap(torch.func.grad(loss), in_dims=(0, None))(x, bias)
    assert torch.allclose(each, of_x, rtol=0, atol=1e-5)
    rows = torch.func.vmap(lambda row: hb.linear(row, packed, compute="float"))(x)
    assert torch.allclose(rows, hb.linear(x, packed, compute="float"), rtol=0, atol=1e-5)
    with pytest.raises(ArgumentError, match="one weight and bias for all of its calls"):
        torch.func.vmap(lambda row, custom: hb.linear(row, packed, custom))(x, torch.randn(3, 8))
    _, along = torch.func.jvp(loss, (x, bias), (x, bias))
    assert torch.allclose(along, (of_x * x).sum() + (of_bias * bias).sum())


@pytest.mark.parametrize("method", ["absmax", "mse", "hqq"])
def test_a_weight_too_small_for_its_scales_is_refused(method: str) -> None:
    tiny = torch.randn(8, 64) * 1e-7
    for name in ("q4_0", "q8_0", "int4_g32_zp", "q4_1", "int8_g32_offset"):
        with pytest.raises(hb.HalfbyteError, match=r"scales of .* are too coarse"):
            hb.quantize(tiny, name, method)
    for name in ("int4_g32_bf16", "int4_g32_offset_bf16"):
        assert (hb.quantize(tiny, name, method).dequantize() - tiny).norm() < 0.2 * tiny.norm()
    for weight in (
        torch.zeros(8, 64),
        torch.full((8, 64), 1e-3),
        torch.cat((torch.ones(1, 64), tiny)),
    ):  # beside ones, others do not matter
        for name in ("q4_0", "q4_1", "int8_g32_offset"):
            assert (hb.quantize(weight, name, method).dequantize() - weight).norm() <= 1e-2 * weight.norm()


TINY = (
    "int8_channel", "int8_channel_zp", "int8_channel_offset", "int8_g32_f32", "int4_g32_bf16", "int4_g32_zp_f32", "int4_g32_offset_bf16",
    "int6_g16_f32", "int5_g32_offset_f32", "int8_tensor", "mxfp4", "nvfp4", "iq4_g32_f32",
)  # fmt: skip


@pytest.mark.parametrize("method", ["absmax", "mse", "hqq"])
@pytest.mark.parametrize("name", TINY)
def test_weights_near_the_least_float32(name: str, method: str) -> None:
    """Scales whose reciprocal overflows make zeros: of a whole weight they are refused, in a part of it exact."""
    fmt = as_format(name)
    for shape in ((8, 64), (3, 4, 64)):
        refused = 0
        for size in (1e-33, 1e-35, 1e-36, 1e-37, 3e-38, 1e-38, 1e-40):
            tiny = torch.randn(shape) * size
            message = ""
            try:
                found = hb.quantize(tiny, fmt, method).dequantize()
            except FormatError as e:
                message = str(e)
            if message:
                assert message.endswith("too coarse: skip it, or multiply it by a power of two and what it computes by the inverse")
                tiny, refused = tiny * 2.0**64, refused + 1
                found = hb.quantize(tiny, fmt, method).dequantize()
            assert relative(found, tiny) < 0.3
        assert 1 <= refused <= 6
        mixed = torch.randn(shape)
        mixed[0] *= 1e-37
        if fmt.block != "tensor":
            found = hb.quantize(mixed, fmt, method).dequantize()[0]
            assert relative(found, mixed[0]) <= 1.0  # 1: zeros
            if method == "absmax" and fmt.block == "channel":
                assert torch.equal(found, torch.zeros_like(found))
        positive = torch.rand(shape)
        positive[0] *= 1e-37
        found = hb.quantize(positive, fmt, method).dequantize()[0]
        assert fmt.block == "tensor" or relative(found, positive[0]) <= 1.0


def relative(found: Tensor, wanted: Tensor) -> float:
    return float((found.double() - wanted.double()).norm() / wanted.double().norm())


def test_the_advice_for_scales_that_are_too_coarse_helps() -> None:
    for size in (1e-7, 1e-20, 1e-35):
        tiny = torch.randn(8, 64) * size
        with pytest.raises(FormatError, match=r"use bfloat16 or float32 scales, for example (\w+), or skip it") as e:
            hb.quantize(tiny, "int4_g32_zp")
        assert relative(hb.quantize(tiny, str(e.value).split("for example ")[1].split(",")[0]).dequantize(), tiny) < 0.2


def test_exported_programs_hold_finite_numbers() -> None:
    """AOTInductor writes the arguments of ops as JSON, which has no infinity."""
    torch.manual_seed(0)
    x, static = torch.randn(2, 3, 8, 8), hb.Config("int8_channel", activations="static")
    layers = nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 1), nn.SiLU(), nn.Flatten(), nn.Linear(144, 4)
    for config, images in (("int8_channel", None), (static, [x])):
        model = hb.quantize_(copy.deepcopy(nn.Sequential(*layers)).eval(), config, images)
        with torch.no_grad():
            exported = torch.export.export(model, (x,))
            assert torch.equal(exported.module()(x), model(x))
        ops = [node for node in exported.graph.nodes if "halfbyte" in str(node.target)]
        assert len(ops) == (3 if images is None else 7)
        for node in ops:
            json.dumps([a for a in node.args if isinstance(a, float | int)], allow_nan=False)


def test_clamps_with_one_end() -> None:
    packed, x = hb.pack(hb.quantize(torch.randn(8, 16), "int8_channel")), torch.randn(4, 16, requires_grad=True)
    y = hb.linear(x, packed)
    for low, high in ((0.0, math.inf), (-math.inf, 0.5), (-math.inf, math.inf), (-0.1, 0.1)):
        got, wanted = hb.linear(x, packed, clamp=(low, high)), y.clamp(low, high)
        assert torch.equal(got, wanted)
        for weights in torch.randn(2, 4, 8):
            found = [torch.autograd.grad((out * weights).sum(), x, retain_graph=True)[0] for out in (got, wanted)]
            torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("format", ["int8_g32_f32", "int4_g32_zp_bf16", "int4_channel_offset_f32", "inferllm_q8_0"])
@pytest.mark.parametrize("method", ["absmax", "mse"])
def test_weights_near_the_largest_float32_are_finite_as_codes_or_refused(format: str, method: str) -> None:
    refusals = []
    for peak in torch.linspace(0.96, 1.0, 9) * torch.finfo(torch.float32).max:  # codes round by up to 1/15 of the range, and scales
        weight = torch.randn(4, 64)
        weight[1, 7] = peak
        try:
            codes = ops.quantize(weight, format, method, name="fc.weight")
        except FormatError as e:
            refusals.append(str(e))
        else:
            assert torch.isfinite(codes.dequantize()).all()
    assert len(refusals) < 9
    assert all("fc.weight: its largest value is 3." in text and "multiply it by a power of two" in text for text in refusals)

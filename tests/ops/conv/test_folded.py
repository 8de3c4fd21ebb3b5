"""3-D and transposed convolutions against torch's in float64, with the dequantized weight."""

from __future__ import annotations

import copy
from unittest.mock import Mock

import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.errors import ArgumentError, FormatError, HalfbyteError
from halfbyte.nn.modules.conv import FloatConv, QuantConv2d
from halfbyte.ops.conv import folded
from halfbyte.ops.conv.images import is_channels_last
from halfbyte.ops.conv.transposed import _Axis

LAST = {4: torch.channels_last, 5: torch.channels_last_3d}
HALF = {torch.float32: 2.0**-24, torch.bfloat16: 2.0**-8, torch.float16: 2.0**-11}  # the unit roundoff


def quantized(layer: nn.Module, format: str = "int8_channel", compute: str = "float", **how: str) -> QuantConv2d:
    found = hb.quantize_(nn.Sequential(copy.deepcopy(layer)), hb.Config(format, compute=compute, strict=True, **how))[0]  # type: ignore[arg-type]
    assert isinstance(found, QuantConv2d)
    return found


def exact(layer: FloatConv, module: QuantConv2d, x: Tensor, *more: object) -> tuple[Tensor, Tensor]:
    """The result in float64, and the bound of the error of sums in float32.

    A sum of K products, each of which takes the roundings of the dequantized weight, the product and at most K additions, is within
    (K + 2) u of the sum of their magnitudes; the bias and the sum of parts are two more. The result is rounded to x's dtype.
    """
    double, sizes = copy.deepcopy(layer).double(), copy.deepcopy(layer).double()
    double.weight.data = module.weight.clone().double()
    sizes.weight.data = double.weight.data.abs()
    if sizes.bias is not None:
        sizes.bias.data = sizes.bias.data.abs()
    y = double(x.double(), *more)
    k = layer.weight[0].numel() if not layer.transposed else layer.weight.numel() // layer.out_channels
    bound = (k + 4) * 2.0**-24 * sizes(x.double().abs(), *more) + HALF[x.dtype] * y.abs() + 2.0**-24 * (x.dtype == torch.float16)
    return y, bound + 2.0**-126


def check(layer: FloatConv, module: QuantConv2d, x: Tensor, *more: object) -> None:
    (wanted, bound), y = exact(layer, module, x, *more), module(x, *more)
    assert y.shape == wanted.shape
    assert y.dtype == x.dtype
    assert bool(((y.double() - wanted).abs() <= bound).all()), (layer, float(((y.double() - wanted).abs() / bound).max()))
    if layer.padding_mode == "zeros" and y.numel():
        assert y.is_contiguous(memory_format=LAST[x.dim()] if is_channels_last(x) else torch.contiguous_format)


def numbers(n: int, low: int, high: int) -> st.SearchStrategy[tuple[int, ...]]:
    return st.tuples(*[st.integers(low, high)] * n)


def channels(draw: st.DrawFn) -> tuple[int, int, int]:
    """Inputs, outputs and groups; some are depthwise."""
    groups, inputs, outputs = draw(st.sampled_from([1, 1, 2, 3])), draw(st.sampled_from([1, 2, 16, 33])), draw(st.sampled_from([1, 3]))
    return groups * inputs, groups * outputs, groups


def images(draw: st.DrawFn, inputs: int, n: int) -> Tensor:
    batch, size = draw(st.sampled_from([(), (1,), (2,), (0,)])), draw(numbers(n, 1, 6))
    x = torch.randn(*batch, inputs, *size, dtype=draw(st.sampled_from([torch.float32, torch.float32, torch.bfloat16, torch.float16])))
    match draw(st.sampled_from(["contiguous", "channels_last", "strided"])):
        case "channels_last" if n > 1 and batch:
            return x.contiguous(memory_format=LAST[n + 2])
        case "strided":
            return x.repeat_interleave(2, -1)[..., ::2]
        case _:
            return x


@st.composite
def volumes(draw: st.DrawFn) -> tuple[FloatConv, Tensor]:
    kernel, (inputs, outputs, groups) = draw(numbers(3, 1, 3)), channels(draw)
    patches = draw(st.sampled_from([False, False, True]))
    padding = (0,) * 3 if patches else draw(st.one_of(numbers(3, 0, 2), st.just("valid")))
    stride, dilation = kernel if patches else draw(numbers(3, 1, 3)), draw(numbers(3, 1, 2))
    if draw(st.sampled_from([False, False, True])):
        padding, stride = "same", (1, 1, 1)
    mode = draw(st.sampled_from(["zeros", "zeros", "reflect", "replicate", "circular"]))
    layer = nn.Conv3d(inputs, outputs, kernel, stride, padding, dilation, groups, draw(st.booleans()), mode)
    return layer, images(draw, inputs, 3)


@st.composite
def transposed(draw: st.DrawFn) -> tuple[FloatConv, Tensor]:
    n = draw(st.integers(1, 3))
    kernel, stride, dilation, (inputs, outputs, groups) = (
        draw(numbers(n, 1, 4)),
        draw(numbers(n, 1, 4)),
        draw(numbers(n, 1, 3)),
        channels(draw),
    )
    more = tuple(draw(st.integers(0, max(pair) - 1)) for pair in zip(stride, dilation, strict=True))
    form = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)[n - 1]
    settings = draw(numbers(n, 0, 3)), more, groups, draw(st.booleans()), dilation
    return form(inputs, outputs, kernel, stride, *settings), images(draw, inputs, n)  # type: ignore[arg-type]


quick = settings(max_examples=25, deadline=None, suppress_health_check=[HealthCheck.filter_too_much, HealthCheck.too_slow])


@pytest.mark.filterwarnings("ignore:Using padding='same' with even kernel lengths")  # torch's, of its own copy
@quick
@given(st.one_of(volumes(), transposed()), st.sampled_from(["int8_channel", "q8_0", "int4_g32_zp", "q4_1"]))
def test_any_setting_gives_what_torch_gives_in_float64(given: tuple[FloatConv, Tensor], format: str) -> None:
    layer, x = given
    try:
        wanted = copy.deepcopy(layer).double()(x.double())
    except (RuntimeError, ValueError):  # kernels larger than images, padding larger than what it repeats
        wanted = None
    try:
        module = quantized(layer, format)
    except FormatError:  # zeros that are no codes of q4_1
        assume(False)
    if wanted is None or 0 in wanted.shape[-len(layer.kernel_size) :]:
        with pytest.raises(HalfbyteError):
            module(x)
    else:
        check(layer, module, x)


LAYERS = {
    "causal": (nn.Conv3d(32, 24, 3, padding=(0, 1, 1)), (2, 32, 4, 7, 5)),
    "patches": (nn.Conv3d(16, 24, (1, 2, 2), (1, 2, 2)), (2, 16, 3, 7, 6)),
    "pixels": (nn.Conv3d(32, 24, 1), (1, 32, 3, 4, 5)),
    "depthwise": (nn.Conv3d(20, 20, 3, padding=1, groups=20), (2, 20, 3, 4, 5)),
    "upsampling": (nn.ConvTranspose2d(32, 16, 2, 2), (2, 32, 5, 3)),
    "overlapping": (nn.ConvTranspose2d(32, 16, 4, 2, 1), (2, 32, 5, 3)),
    "uneven": (nn.ConvTranspose2d(32, 16, 3, 2, 1, 1), (2, 32, 5, 3)),
    "lines": (nn.ConvTranspose1d(32, 16, 16, 8, 4), (2, 32, 5)),
    "volumes": (nn.ConvTranspose3d(32, 16, (1, 2, 2), (1, 2, 2)), (1, 32, 2, 3, 4)),
    "bilinear": (nn.ConvTranspose2d(20, 20, 4, 2, 1, groups=20), (2, 20, 5, 3)),
}
layers = pytest.mark.parametrize("name", LAYERS)


@layers
@pytest.mark.parametrize("activation", ["block", "row", "image"])
def test_activations_are_quantized_as_those_of_images(name: str, activation: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    x, module = torch.randn(shape), quantized(layer, compute="int8", activation=activation)
    with torch.no_grad():
        wanted, _ = exact(layer, module, x)
    # A code is off by up to half a step, amax / 254: uniform, this is .0023 amax, and amax of normal numbers is 3 to 5 times their size.
    assert float((module(x).double() - wanted).norm() / wanted.norm()) < 0.0023 * 5 * 1.5


@layers
def test_gradients_are_those_of_the_dequantized_weight(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    module, x = quantized(layer), torch.randn(shape, requires_grad=True)
    double = copy.deepcopy(layer).double()
    double.weight.data = module.weight.clone().double()
    y = module(x)
    grad = torch.randn_like(y)
    (got,) = torch.autograd.grad(y, x, grad)
    wide = x.detach().double().requires_grad_()
    (wanted,) = torch.autograd.grad(double(wide), wide, grad.double())
    torch.testing.assert_close(got.double(), wanted, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(torch.func.grad(lambda x: (module(x) * grad).sum())(x.detach()), got)


@pytest.mark.parametrize("name", ["causal", "depthwise", "uneven"])
def test_traced(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    module, x = quantized(layer).eval(), torch.randn(shape)
    wanted = module(x)
    assert torch.equal(torch.compile(module, fullgraph=True, backend="aot_eager", dynamic=False)(x), wanted)
    assert torch.equal(torch.export.export(nn.Sequential(module), (x,)).module()(x), wanted)


@layers
@pytest.mark.parametrize("last", [False, True])
def test_vmap_computes_each_image_as_it_does_alone(name: str, last: bool) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    module, x = quantized(layer), torch.randn(3, *shape)
    if last and len(shape) > 3:
        x = x.movedim(2, -1).contiguous().movedim(-1, 2)  # each image in channels_last
    wanted = torch.stack([module(images) for images in x])
    assert torch.equal(torch.vmap(module)(x), wanted)


@layers
def test_an_activation_is_fused(name: str) -> None:
    torch.manual_seed(0)
    layer, shape = LAYERS[name]
    module, x = quantized(layer), torch.randn(shape)
    assert torch.equal(module(x, clamp=(-0.1, 0.2)), module(x).clamp(-0.1, 0.2))
    last = module(x, channels_last=True)
    assert torch.equal(last, module(x))
    assert last.stride(1) == 1
    if isinstance(layer, nn.Conv3d):
        added = torch.randn_like(last)
        torch.testing.assert_close(module(x, added, clamp=(0, 1)), (module(x) + added).clamp(0, 1), rtol=1e-5, atol=1e-5)


def test_gathered_frames_take_bounded_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(0)
    x, added = torch.randn(2, 32, 9, 6, 5), torch.randn(2, 24, 7, 6, 5)
    for layer in (LAYERS["causal"][0], nn.Conv3d(32, 32, 3, padding=(0, 1, 1), groups=32)):
        module = quantized(layer)
        more = added if layer.groups == 1 else None
        wanted = module(x, more)
        with_taps = Mock(wraps=folded._images)
        monkeypatch.setattr(folded, "_images", with_taps)
        monkeypatch.setattr(folded, "GATHERED_BYTES", 3 * 32 * 2 * 30 * 4 * 2)  # two frames of both videos
        torch.testing.assert_close(module(x, more), wanted, rtol=1e-5, atol=1e-6)
        assert max(call.args[0].shape[2] for call in with_taps.call_args_list) <= 2
        monkeypatch.undo()


def test_phases_of_a_transposed_convolution() -> None:
    """The example of `_Axis`, of 3 inputs: outputs 1, 3 are phase 0's (taps 0 and 2), outputs 0, 2, 4 are phase 1's (tap 1)."""
    axis = _Axis.of(3, steps=2, phases=2, stride=2, dilation=1, padding=(1, 1), out=5)
    assert axis.phase_of_residue() == {0: (0, 0), 1: (1, 0)}
    assert (axis.sides, axis.per_residue, axis.skip) == ((1, 0), 3, 1)
    gaps = _Axis.of(3, steps=1, phases=1, stride=2, dilation=1, padding=(0, 0), out=5)
    assert gaps.phase_of_residue() == {0: (0, 0)}, "no tap reaches outputs 1 and 3"


def test_output_size_chooses_among_those_that_a_stride_allows() -> None:
    layer = nn.ConvTranspose2d(8, 4, 3, (2, 3), 1)
    module, x = quantized(layer), torch.randn(2, 8, 4, 5)
    for size in ([7, 13], [8, 15], (2, 4, 8, 14)):
        check(layer, module, x, size)
    assert module(x[0], [4, 8, 15]).shape == (4, 8, 15)
    for wrong in ([9, 13], [6, 13], [7], [7, 13, 1]):
        with pytest.raises(ArgumentError, match=r"from \[7, 13\] to \[8, 15\]"):
            module(x, wrong)


@pytest.mark.parametrize(
    ("name", "x", "error"),
    [
        ("causal", torch.zeros(1, 31, 4, 7, 5), r"takes \[B, 32, D, H, W\], got \[1, 31"),
        ("causal", torch.zeros(1, 32, 2, 7, 5), "a kernel that reaches over 3 x 3 x 3"),
        ("causal", torch.zeros(32, 5), r"takes \[B, 32, D, H, W\]"),
        ("causal", torch.zeros(1, 32, 4, 7, 5, dtype=torch.float64), "float32, bfloat16 or float16"),
        ("lines", torch.zeros(1, 31, 4), r"takes \[B, 32, L\]"),
        ("overlapping", torch.zeros(1, 32), r"takes \[B, 32, H, W\]"),
    ],
)
def test_what_a_layer_does_not_take(name: str, x: Tensor, error: str) -> None:
    with pytest.raises(ArgumentError, match=error):
        quantized(LAYERS[name][0])(x)


@pytest.mark.parametrize("mode", ["reflect", "replicate", "circular"])
def test_lines_and_images_are_padded_with_their_own_values(mode: str) -> None:
    torch.manual_seed(0)
    for layer, shape in (
        (nn.Conv1d(16, 8, 3, 2, 2, padding_mode=mode), (2, 16, 9)),
        (nn.Conv2d(16, 8, 3, 1, (2, 1), padding_mode=mode), (16, 5, 6)),
    ):
        module, x = quantized(layer), torch.randn(shape)
        batch = x if x.dim() == len(layer.kernel_size) + 2 else x[None]  # torch does not pad a single image circularly
        (wanted, bound), y = exact(layer, module, batch), module(x)
        assert bool(((y.double().view_as(wanted) - wanted).abs() <= bound).all())
        if mode != "replicate":
            with pytest.raises(ArgumentError, match=f"{mode}.*with sizes"):
                module(x.narrow(-len(layer.kernel_size), 0, 1))

"""Convolutions of codes beside ONNX Runtime's QLinearConv: the same codes, but where the real value lies next to a tie.

QLinearConv rounds sum * (x_scale * w_scale / y_scale) to the nearest integer and then adds the zero point; here the zero point is added
before, in one fused multiply-add (`kernels/cpu/linear/tile.py`). The multiplier is rounded to float32 once more there. So where the real
value lies within float32's error of a tie, either may round up, and the codes differ by one.

Without dot-product instructions ONNX Runtime adds pairs of products in int16, which may saturate: weights here are -64 … 64.
"""

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx_graph import model
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.formats import Codes, as_format
from halfbyte.kernels import conv_reference
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter, channels_first
from halfbyte.ops.conv import functions as ops

onnx = pytest.importorskip("onnx", reason="onnx is not installed: pip install onnx")
onnxruntime = pytest.importorskip("onnxruntime", reason="ONNX Runtime is not installed: pip install onnxruntime")


def qlinearconv(x: Tensor, weight: Tensor, scale: Tensor, bias: Tensor, window: Window, groups: int, **scales: float) -> Tensor:
    """int8 codes through a model of one node, in unsigned codes, which are 128 more."""
    unsigned = {"in_zero": scales["in_zero"] + 128, "out_zero": scales["out_zero"] + 128}
    constants = {
        "x_scale": torch.tensor(scales["in_scale"]),
        "x_zero": torch.tensor(unsigned["in_zero"], dtype=torch.uint8),
        "w": weight.contiguous(),
        "w_scale": scale,
        "w_zero": torch.zeros(len(weight), dtype=torch.int8),
        "y_scale": torch.tensor(scales["out_scale"]),
        "y_zero": torch.tensor(unsigned["out_zero"], dtype=torch.uint8),
        "bias": bias,
    }
    top, bottom, left, right = window.padding
    settings = {"strides": window.stride, "pads": (top, left, bottom, right), "dilations": window.dilation, "group": groups}
    conv = onnx.helper.make_node("QLinearConv", ("x", *constants), ["y"], **settings)
    written = model([conv], constants, [("x", "UINT8", x.shape)], [("y", "UINT8", ["b", "c", "h", "w"])])
    session = onnxruntime.InferenceSession(written, providers=["CPUExecutionProvider"])
    (y,) = session.run(None, {"x": (x.int() + 128).to(torch.uint8).contiguous().numpy()})
    return torch.from_numpy(y.astype(np.int16) - 128)


@st.composite
def layers(draw: st.DrawFn) -> tuple[Filter, Window, tuple[int, int, int, int]]:
    depthwise = draw(st.booleans())
    groups = draw(st.integers(1, 20)) if depthwise else draw(st.sampled_from((1, 1, 2, 3)))
    channels, out = (1, 1) if depthwise else (draw(st.sampled_from((1, 3, 8, 20, 32, 64))), draw(st.sampled_from((1, 5, 32, 33))))
    kernel, pair = draw(st.tuples(*[st.integers(1, 4)] * 2)), st.tuples(*[st.integers(1, 3)] * 2)
    window = Window(draw(pair), draw(st.tuples(*[st.integers(0, 3)] * 4)), draw(pair))
    image = draw(st.integers(1, 2)), channels * groups, draw(st.integers(1, 12)), draw(st.integers(1, 12))
    try:
        window.out_size(image[2:], kernel)
    except ArgumentError:
        assume(False)
    return Filter(as_format("int8_channel"), out * groups, channels, kernel, groups), window, image


@settings(max_examples=70, suppress_health_check=[HealthCheck.filter_too_much])
@given(layers(), st.integers(-128, 127), st.integers(-128, 127), st.integers(0, 2**16))
def test_codes_are_those_of_onnx_runtime(layer, in_zero: int, out_zero: int, seed: int) -> None:
    (sizes, window, image), rng = layer, torch.Generator().manual_seed(seed)
    values = torch.randint(-64, 65, sizes.codes_shape, generator=rng)
    codes = Codes.from_values(sizes.format, values, torch.rand(sizes.out, 1, generator=rng) * 0.01 + 0.001)
    x = torch.randint(-128, 128, image, generator=rng, dtype=torch.int8)
    whole = torch.randint(-5000, 5000, (sizes.out,), generator=rng, dtype=torch.int32)  # QLinearConv's bias: steps of in_scale * scale
    bias = (whole.double() * 0.02 * codes.scale.flatten().double()).float()
    scales = {"in_scale": 0.02, "in_zero": in_zero, "out_scale": 0.01 * sizes.k**0.5, "out_zero": out_zero}
    padding = (window.padding[:2], window.padding[2:])
    weight = ops.pack_conv(codes, sizes.kernel, sizes.groups)
    ours = ops.qconv2d(x, weight, bias, window.stride, padding, window.dilation, **scales).int()
    expected = qlinearconv(x, channels_first(codes.data, sizes.kernel), codes.scale.flatten(), whole, window, sizes.groups, **scales).int()
    assert int((ours - expected).abs().max()) <= 1
    real = conv_reference.qconv2d(x, codes, sizes.kernel, window, bias, groups=sizes.groups, **scales).real
    differs = ours != expected
    from_tie, size = (real - real.floor() - 0.5).abs()[differs], real.abs()[differs] + abs(out_zero) + 1
    assert bool((from_tie <= 2.0**-21 * size).all())  # four roundings of numbers of that size

"""Biases take back what rounding shifts, and heads of networks give floats."""

from __future__ import annotations

import copy

import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.static.bias_correction import BiasCorrector, LayerWeight, channel_means
from halfbyte.nn.static.integer import IntegerConv2d, IntegerLinear, Requantize


def quantized(weight: Tensor, bias: Tensor | None) -> LayerWeight:
    return LayerWeight(hb.pack(hb.quantize(weight, "int4_channel")), bias)


@torch.no_grad()
def test_the_means_of_layers_become_those_of_the_float_network() -> None:
    """In the order of the layers, so that the second is corrected for the input that the first gives; ReLU is not linear."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(32, 24), nn.ReLU(), nn.Linear(24, 8), nn.ReLU(), nn.Linear(8, 4, bias=False)).eval()
    x = torch.rand(256, 32) + 1
    traced = torch.fx.symbolic_trace(model)
    means, y = {}, x
    for name, layer in model.named_children():
        y = layer(y)
        if isinstance(layer, nn.Linear):
            means[name] = channel_means(layer, y)
    corrector = BiasCorrector(traced, lambda name, layer: quantized(layer.weight, layer.bias))
    corrector.collect(x[:128], means)  # the means of all images stand for those of each half
    corrector.collect(x[128:], means)
    corrected, weights = copy.deepcopy(model), corrector.weights()
    for name, layer in corrected.named_children():
        if isinstance(layer, nn.Linear):
            weight = weights(name, layer)
            assert isinstance(weight, LayerWeight)
            layer.weight.copy_(hb.dequantize(weight.packed))
            assert (layer.bias is None) == (weight.bias is None)
            if weight.bias is not None:
                layer.bias.copy_(weight.bias)
    # Each half is corrected by its own shift, and the bias by their mean: the first layer's means are equal but for float32's rounding.
    torch.testing.assert_close(channel_means(corrected[0], corrected[0](x)), means["0"], rtol=1e-5, atol=1e-5)
    plain = copy.deepcopy(model)
    for layer in plain:
        if isinstance(layer, nn.Linear):
            layer.weight.copy_(hb.quantize(layer.weight, "int4_channel").dequantize())
    shift, without = (float((channel_means(m[2], m[:3](x)) - means["2"]).norm()) for m in (corrected, plain))
    assert shift < without / 5


@torch.no_grad()
def test_the_head_gives_floats_and_padding_runs_in_the_convolution() -> None:
    torch.manual_seed(0)
    pad = nn.ZeroPad2d((0, 1, 1, 2))
    model = nn.Sequential(pad, nn.Conv2d(3, 8, 3, 2), nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(8, 5)).eval()
    x = torch.randn(16, 3, 11, 12)
    network = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations="static"), [x])
    kinds = [type(module) for module in network.modules()]
    assert (kinds.count(nn.ZeroPad2d), kinds.count(IntegerConv2d), kinds.count(QuantLinear)) == (0, 1, 1)
    assert hb.report(network).notes == ()
    assert float((network(x) - model(x)).norm() / model(x).norm()) < 0.02
    assert len(network(x).unique()) > 70  # of 80 logits: codes would have left fewer than 256 values in all, and many ties
    shared = nn.Sequential(nn.ZeroPad2d(1), nn.MaxPool2d(2), nn.Conv2d(3, 4, 1)).eval()  # a pool reads the zeros
    network = hb.quantize_(shared, hb.Config("int8_channel", activations="static"), [x])
    assert any("ZeroPad2d" in note for note in hb.report(network).notes)


@torch.no_grad()
def test_sums_of_numbers_are_numbers() -> None:
    """An addition whose two operands are computed in floating point runs there; one of two with codes does not."""

    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.a, self.b, self.c = nn.Conv2d(4, 4, 1), nn.Conv2d(4, 4, 3, padding=1), nn.Conv2d(4, 4, 1)

        def forward(self, x: Tensor) -> Tensor:
            return self.c(torch.relu(self.a(x) + self.b(x)))  # type: ignore[no-any-return]

    x = torch.randn(4, 4, 9, 9)
    for skip, on_codes in ((["a", "b"], False), (["a"], True), ([], True)):
        network = hb.quantize_(Sum().eval(), hb.Config("int8_channel", activations="static", skip=skip), [x])
        assert any(isinstance(module, Requantize) for module in network.modules()) is on_codes


def test_a_linear_layer_before_a_relu_is_no_head() -> None:
    model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 4)).eval()
    hb.quantize_(model, hb.Config("int8_channel", activations="static"), [torch.randn(16, 8)])
    assert isinstance(model.get_submodule("0"), IntegerLinear)
    assert isinstance(model.get_submodule("2"), QuantLinear)

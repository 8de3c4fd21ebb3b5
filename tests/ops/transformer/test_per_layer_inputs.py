"""Layers with an input of their own on a CPU: what their steps take, as `ops` tells it. `test_decoder_families.py` compares results."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.ops.transformer.decoder import DecoderLayer, why_not
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm, PerLayerInput
from halfbyte.ops.transformer.weights import Weight
from halfbyte.ops.transformer.whole_model_decode import PerLayerInputs, WholeModelDecode

K, P = 64, 32
NORM = Norm(torch.ones(K), 1e-6)


def weight(n: int, k: int) -> Weight:
    return Weight(ops.pack(ops.quantize(torch.randn(n, k) / k**0.5, "q4_0")), None, "float", "block")


def halves(**heads: Any) -> tuple[Attention, MLP, PerLayerInput]:
    of_heads = Heads(4, 2, 16, 0.25, (Norm(torch.ones(16), 1e-6), Norm(torch.ones(16), 1e-6)))._replace(**heads)
    attention = Attention((weight(of_heads.outputs, K),), weight(K, 64), NORM, of_heads, NORM)
    return (
        attention,
        MLP(weight(192, K), weight(K, 96), NORM, NORM),
        PerLayerInput(weight(P, K), weight(K, P), NORM, layer_scale=torch.ones(1)),
    )


def call(layer: DecoderLayer, extra: Tensor | None, dtype: torch.dtype = torch.float32) -> Tensor:
    generator = torch.Generator().manual_seed(3)
    x, keys, values = (torch.randn(*shape, generator=generator).to(dtype) for shape in ((2, 3, K), (2, 2, 9, 16), (2, 2, 9, 16)))
    rope = torch.ones(1, 3, 16)
    return layer(x, (rope, rope), keys, values, 5, None, extra)


@pytest.mark.parametrize("projections", ["qkv", "qk", "q"])
def test_inputs_as_they_lie(projections: str) -> None:
    """A part of a row of all layers' inputs, tokens that lie apart, another type: the same bits as of those that lie side by side."""
    layer = DecoderLayer(*halves(projections=projections, v_norm=projections != "q"))
    wide = torch.randn(2, 3, 5, P).bfloat16().float()
    extra = wide[:, :, 3].contiguous()
    expected = call(layer, extra)
    for other in (wide[:, :, 3], extra.bfloat16(), wide.transpose(0, 1).contiguous().transpose(0, 1)[:, :, 3], extra.mT.contiguous().mT):
        assert torch.equal(call(layer, other), expected)
    assert not torch.equal(call(layer, wide[:, :, 2]), expected)


def test_layers_of_what_does_not_fit() -> None:
    attention, dense, custom = halves()
    layer, plain = DecoderLayer(attention, dense, custom), DecoderLayer(attention, dense)
    extra = torch.zeros(2, 3, P)
    for one, wrong in ((layer, None), (layer, extra[:, :2]), (layer, extra[..., 1:]), (plain, extra)):
        with pytest.raises(ArgumentError, match="a per-layer input is on the CPU"):
            call(one, wrong)
    short = Norm(torch.ones(3), 0.0)
    for wrong_input in (
        custom._replace(projection=weight(K, 64)),
        custom._replace(post_norm=short),
        custom._replace(layer_scale=torch.ones(2)),
    ):
        with pytest.raises(ArgumentError, match="the last half of a decoder layer takes weights"):
            DecoderLayer(attention, dense, wrong_input)
    with pytest.raises(ArgumentError, match="the attention half of a decoder layer takes weights"):
        DecoderLayer(attention._replace(heads=attention.heads._replace(projections="qk")), dense)
    with pytest.raises(ArgumentError, match="the feed-forward half of a decoder layer takes weights"):
        DecoderLayer(attention, dense._replace(layer_scale=torch.ones(3)))
    narrow = PerLayerInput(weight(24, K), weight(K, 24), NORM)
    assert why_not(attention, dense, narrow) == "the 24 elements of its per-layer input are no multiple of 32"
    assert why_not(attention, dense, custom._replace(activation="swiglu")) == "its activation is swiglu, not silu or gelu_tanh or relu2"
    normless = attention._replace(heads=attention.heads._replace(qk_norm=None, v_norm=True))
    assert why_not(normless, dense) == "its values have a norm, but its queries have none, or one over all heads together"
    scaled = dense._replace(post_norm=None, layer_scale=torch.ones(1))
    assert why_not(attention, scaled) == "it has a layer scale without a norm of its MLP's output"


def test_models_of_what_does_not_fit() -> None:
    layers = [DecoderLayer(*halves()) for _ in range(2)]
    table, of_layers = torch.randn(9, K), torch.randn(9, 2 * P)
    inputs = PerLayerInputs(of_layers, 4.0, weight(2 * P, K), 0.1, Norm(torch.ones(P), 1e-6), 0.5)
    WholeModelDecode(layers, table, NORM, None, per_layer_inputs=inputs)
    for wrong in (
        inputs._replace(table=of_layers[:, :P]),
        inputs._replace(projection=weight(P, K)),
        inputs._replace(norm=Norm(torch.ones(2 * P), 1e-6)),
        inputs._replace(norm=Norm(torch.ones(P), 1e-6, layer_norm=True)),
    ):
        with pytest.raises(ArgumentError, match="inputs of 2 layers' own are made by an RMS norm"):
            WholeModelDecode(layers, table, NORM, None, per_layer_inputs=wrong)
    with pytest.raises(ArgumentError, match="inputs of 2 layers' own"):
        WholeModelDecode([DecoderLayer(*halves()[:2]) for _ in range(2)], table, NORM, None, per_layer_inputs=inputs)

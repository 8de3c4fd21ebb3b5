"""Layers of vLLM whose rows come from several modules, and weights of other projects, as halfbyte's kernels compute them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.formats import Codes
from halfbyte.integrations.vllm.foreign import int8_codes, weight_only_codes, weight_only_format
from halfbyte.integrations.vllm.packed import PackedLayer, Part

K = 64


def weight(n: int, seed: int = 0) -> Tensor:
    return torch.randn(n, K, generator=torch.Generator().manual_seed(seed))


def part(fmt: str, n: int, order: Tensor | None = None) -> Part:
    return Part(hb.quantize(weight(n), fmt), "float", "block", order)


def dequantized(one: Part) -> Tensor:
    """The weight [N, K] whose columns are in the order of the inputs, in float64."""
    found = one.weight.dequantize(torch.float64) if isinstance(one.weight, Codes) else one.weight.double()
    return found if one.input_order is None else found[:, one.input_order.argsort()]


def check(layer: PackedLayer, parts: list[Part]) -> None:
    """Compares with the float64 product: float32 sums of K products err by at most K * 2^-24 of the sum of magnitudes."""
    x, bias = torch.randn(5, K, generator=torch.Generator().manual_seed(1)), torch.randn(sum(layer.sizes))
    together = torch.cat(list(map(dequantized, parts)))
    bound = (K + 2) * 2**-24 * (x.double().abs() @ together.abs().T + bias.double().abs())
    assert bool(((layer(x, bias).double() - (x.double() @ together.T + bias.double())).abs() <= bound).all())
    assert torch.equal(layer(x), torch.cat([product(x, None) for product in layer.products], -1))


def test_parts_of_one_format_are_one_product() -> None:
    parts = [part("q4_0", 48), part("q4_0", 16), part("q4_0", 16)]
    layer = PackedLayer(parts)
    assert layer.sizes == [80]
    check(layer, parts)


def test_mixed_formats_are_several() -> None:
    parts = [part("int4_g32_offset", 48), part("int5_g32_offset", 16), part("int6_g16", 16)]
    layer = PackedLayer(parts)
    assert layer.sizes == [48, 16, 16]
    check(layer, parts)
    assert layer.describe(torch.float32).count(" and ") == 2


def test_scales_of_tensors_become_scales_of_rows() -> None:
    parts = [Part(hb.quantize(scale * weight(n), "int8_tensor"), "float") for n, scale in ((48, 1.0), (16, 7.0))]
    layer = PackedLayer(parts)
    assert layer.sizes == [64]
    check(layer, parts)
    assert str(PackedLayer(parts[:1]).products[0].packed.format) == "int8_tensor"  # type: ignore[union-attr]


def test_a_part_in_floating_point() -> None:
    parts = [part("q4_0", 32), Part(weight(16)), Part(weight(8))]
    layer = PackedLayer(parts)
    assert layer.sizes == [32, 24]
    check(layer, parts)
    assert layer.describe(torch.float32).endswith("and floating point")


def test_reordered_inputs() -> None:
    order, other = torch.arange(K - 1, -1, -1), torch.arange(K).roll(3)
    parts = [part("int4_g32", 32, order), part("int4_g32", 16, order.clone()), part("int4_g32", 16, other), part("int4_g32", 16)]
    layer = PackedLayer(parts)
    assert layer.sizes == [48, 16, 16]
    check(layer, parts)


def test_a_layer_compiles_without_graph_breaks() -> None:
    layer = PackedLayer([part("q4_0", 32), part("int6_g16", 16)])
    x, bias = torch.randn(3, K), torch.randn(48)
    compiled = torch.compile(layer, fullgraph=True, backend="eager")
    torch.testing.assert_close(compiled(x, bias), layer(x, bias))


@pytest.mark.parametrize("bits", [4, 8])
@pytest.mark.parametrize("points", [False, True])
@pytest.mark.parametrize("group", [32, -1])
def test_weight_only_checkpoints(bits: int, points: bool, group: int) -> None:
    fmt = weight_only_format(bits, group, zero_points=points, scale=torch.bfloat16)
    stored = torch.randint(0, 1 << bits, (8, K), dtype=torch.int32)
    blocks = 1 if group == -1 else K // group
    scale = torch.rand(8, blocks).bfloat16()
    zero = torch.randint(0, 1 << bits, (8, blocks), dtype=torch.int32) if points else None
    middle = torch.full((8, blocks), 1 << (bits - 1)) if zero is None else zero
    wanted = (stored - middle.repeat_interleave(K // blocks, 1)).double() * scale.double().repeat_interleave(K // blocks, 1)
    assert torch.equal(weight_only_codes(fmt, stored, scale, zero).dequantize(torch.float64), wanted)


@pytest.mark.parametrize("scale", [torch.rand(12, 1), torch.rand(12), torch.rand(1), torch.tensor([0.5, 2.0])])
def test_int8_checkpoints(scale: Tensor) -> None:
    codes = torch.randint(-128, 128, (12, K), dtype=torch.int8)
    of_rows = torch.tensor([0.5] * 8 + [2.0] * 4) if len(scale) == 2 else scale.flatten().expand(12)
    assert torch.equal(int8_codes(codes, scale, [8, 4]).dequantize(), codes.float() * of_rows[:, None])

"""Which transformer blocks a native call computes, and for which inputs."""

from dataclasses import replace

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.ops.transformer.cross_block import CrossBlock
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight


def weight(n: int, k: int) -> Weight:
    return Weight(hb.pack(hb.quantize(torch.randn(n, k), "int8_channel")), None, "int8", "block")


def block(k: int = 32, inner: int = 64, heads: int = 4, down: int | None = None) -> CrossBlock:
    norms = [Norm(torch.ones(k), 1e-5, layer_norm=True) for _ in range(3)]
    self_attention, cross = (weight(3 * k, k), weight(k, k)), (weight(k, k), weight(2 * k, 16), weight(k, k))
    return CrossBlock(self_attention, cross, (weight(2 * inner, k), weight(k, down or inner)), norms, heads)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [({"heads": 5}, "5 heads of 32"), ({"heads": 16}, "multiple of 4"), ({"inner": 40}, "whole panels"), ({"down": 96}, "its weights are")],
)
def test_other_blocks_are_refused(settings: dict[str, int], reason: str) -> None:
    with pytest.raises(hb.errors.ArgumentError, match=reason):
        block(**settings)


def test_inputs() -> None:
    native, x, context = block(), torch.randn(2, 5, 32), torch.randn(2, 3, 16)
    others: list[tuple[Tensor, Tensor]] = [(x.half(), context), (x[:1], context), (x[..., :16], context), (x, x), (x[:, :0], context)]
    assert native.fits(x, context)
    assert not any(native.fits(*other) for other in others)
    wanted = native(x, context)
    assert torch.equal(native(x.mT.contiguous().mT, context), wanted)


def test_biases_in_sixteen_bits_are_read_anew() -> None:
    self_attention = Weight(weight(96, 32).packed, torch.zeros(96, dtype=torch.bfloat16), "int8", "block")
    norms = [Norm(torch.ones(32), 1e-5, layer_norm=True) for _ in range(3)]
    products = (weight(32, 32), weight(32, 32), weight(64, 16), weight(32, 32), weight(128, 32), weight(32, 64))
    native = CrossBlock((self_attention, products[0]), products[1:4], products[4:], norms, 4)
    x, context = torch.randn(1, 4, 32), torch.randn(1, 3, 16)
    before = native(x, context)
    assert self_attention.bias is not None
    self_attention.bias.fill_(2)
    assert not torch.equal(native(x, context), before)
    self_attention.bias.zero_()
    assert torch.equal(native(x, context), before)
    assert replace(self_attention.packed).shape == (96, 32)

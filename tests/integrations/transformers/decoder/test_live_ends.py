"""The output embedding of a live model: which modules have a specification, and when two are one."""

from __future__ import annotations

import torch
from torch import nn

import halfbyte as hb
from halfbyte.integrations.transformers.decoder.live_ends import Head


def test_heads() -> None:
    torch.manual_seed(3)
    quantized, other = (hb.quantize_(nn.Sequential(nn.Linear(32, 40)), "q8_0")[0] for _ in range(2))
    plain = nn.Linear(32, 40)
    heads = [Head.of(module) for module in (quantized, other, plain, nn.Linear(32, 40))]
    for i, head in enumerate(heads):
        assert head is not None
        assert [head.is_same(one) for one in heads if one is not None] == [i == j for j in range(4)]
    again = Head.of(plain)
    assert again is not None
    assert heads[2] is not None
    assert again.is_same(heads[2])
    assert torch.equal(again.weight, plain.weight)  # type: ignore[arg-type]
    plain.register_forward_hook(lambda *_: None)
    assert Head.of(plain) is None
    assert Head.of(nn.Identity()) is None

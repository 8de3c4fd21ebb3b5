"""torch's attention with linear layers of its own: the same outputs, and quantized, saved and loaded as others are."""

from __future__ import annotations

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.errors import UnsupportedError
from halfbyte.nn.modules.attention import Attention
from halfbyte.nn.modules.quantized import QuantLinear


def built(**settings: Any) -> nn.MultiheadAttention:
    torch.manual_seed(0)
    module = nn.MultiheadAttention(24, 3, **settings).eval()
    for parameter in module.parameters():
        nn.init.normal_(parameter, 0, 0.3)
    return module


@pytest.mark.parametrize("batch_first", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_the_same_outputs(batch_first: bool, bias: bool) -> None:
    expected = built(batch_first=batch_first, bias=bias)
    ours = Attention(expected)
    x, y, z = (torch.randn(2, tokens, 24) for tokens in (5, 7, 7))
    padding, hidden = torch.zeros(2, 7, dtype=torch.bool), torch.rand(6, 5, 7) < 0.3
    padding[1, 4:], hidden[..., 0] = True, False
    x, y, z = (t if batch_first else t.transpose(0, 1) for t in (x, y, z))
    causal = torch.zeros(5, 5).masked_fill(torch.ones(5, 5).triu(1).bool(), -torch.inf)
    calls: list[tuple[tuple[Tensor, ...], dict[str, Any]]] = [
        ((x, x, x), {}),
        ((x, x, x), {"attn_mask": causal, "is_causal": True}),
        ((x, y, y), {"key_padding_mask": padding}),
        ((x, y, z), {"key_padding_mask": padding, "attn_mask": hidden}),
        ((x, y, z), {"attn_mask": torch.randn(5, 7), "average_attn_weights": False}),
        ((x[0], x[0], x[0]), {}),
    ]
    for inputs, settings in calls:
        for need_weights in (True, False):
            wanted, found = (module(*inputs, need_weights=need_weights, **settings) for module in (expected, ours))
            torch.testing.assert_close(found, wanted)  # float32: sums in another order


@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors")
@torch.inference_mode()
def test_encoders_and_decoders(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = nn.Transformer(32, 4, 1, 1, 64, batch_first=True, activation="gelu")
    model.encoder.use_nested_tensor = False
    model.eval()
    x, y = torch.randn(2, 6, 32), torch.randn(2, 4, 32)
    padding = torch.zeros(2, 6, dtype=torch.bool)
    padding[1, 4:] = True
    seen = {"src_key_padding_mask": padding, "memory_key_padding_mask": padding}
    expected = model(x, y, **seen)
    small = hb.quantize_(copy.deepcopy(model), hb.Config("q8_0", compute="float"))
    small.encoder.use_nested_tensor = True  # as torch has it, which does not get to it here
    names = [row.name for row in hb.report(small).rows if row.format is not None]
    assert len(names) == 10
    assert {"encoder.layers.0.self_attn.in_proj", "decoder.layers.0.multihead_attn.out_proj"} < set(names)
    found = small(x, y, **seen)
    assert float((found - expected).norm() / expected.norm()) < 0.02  # weights are off by .4 %, in 5 layers one after the other
    assert not torch.equal(found, expected)
    hb.save(small, tmp_path / "small")
    assert torch.equal(hb.load(tmp_path / "small", model=copy.deepcopy(model))(x, y, **seen), found)
    for other in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):  # noqa: S301
        assert torch.equal(other(x, y, **seen), found)
    assert small.encoder.layers[0].self_attn._float == ()
    with pytest.raises(UnsupportedError, match="nested"):
        small.encoder.layers[0].self_attn(*[torch.nested.as_nested_tensor([x[0]])] * 3)


def test_some_of_it_and_none(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model: Any = nn.TransformerEncoder(nn.TransformerEncoderLayer(32, 4, 64, batch_first=True), 2, enable_nested_tensor=False).eval()
    kept = copy.deepcopy(model)
    hb.quantize_(kept, hb.Config("q8_0", skip=["*_proj"]))
    assert type(kept.layers[0].self_attn) is nn.MultiheadAttention
    hb.report(kept)
    assert type(kept.layers[0].self_attn) is nn.MultiheadAttention
    x, called, forward = torch.randn(2, 6, 32), [], QuantLinear.forward
    monkeypatch.setattr(QuantLinear, "forward", lambda self, x: called.append(self) or forward(self, x))  # type: ignore[func-returns-value]
    with torch.inference_mode():
        kept(x)
    assert len(called) == 4, "torch computes from dequantized weights, without calling these modules"
    part = hb.quantize_(copy.deepcopy(model), hb.Config("q8_0", skip=["*linear?", "*.out_proj"]))
    assert isinstance(part.layers[1].self_attn.in_proj, QuantLinear)
    assert type(part.layers[1].self_attn.out_proj) is nn.Linear
    hb.save(part, tmp_path / "part")
    with torch.inference_mode():
        assert torch.equal(hb.load(tmp_path / "part", model=model)(x), part(x))

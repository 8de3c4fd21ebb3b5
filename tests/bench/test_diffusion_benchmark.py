"""What benchmarks/diffusion_gpu.py counts."""

from __future__ import annotations

import sys
from types import SimpleNamespace

import diffusion_gpu
import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn.modules.quantized import QuantLinear


class Two(nn.Module):
    """A layer of as many rows as x has, and one of a single row, which is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.many, self.one, self.unused = nn.Linear(64, 32), nn.Linear(64, 32), nn.Linear(64, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.many(x) + self.one(x[:, :20]).sum() + self.one(x[:, 0])[:, None]  # type: ignore[no-any-return]


def test_bytes_of_a_model() -> None:
    """Of packed weights, too, and of memory that two layers share once; scales of bitsandbytes are attributes of an attribute."""
    model = Two()
    layer = 4 * (64 * 32 + 32)
    assert diffusion_gpu.model_bytes(model) == 3 * layer
    model.unused.weight = model.one.weight
    assert diffusion_gpu.model_bytes(model) == 3 * layer - 4 * 64 * 32
    model = Two()
    hb.quantize_(model, hb.Config("q8_0", skip=["many"]))
    packed = sum(module.packed_data.untyped_storage().nbytes() for module in model.modules() if isinstance(module, QuantLinear))
    assert layer + packed + 2 * 4 * 32 <= diffusion_gpu.model_bytes(model) <= layer + packed + 2 * 4 * 32 + 200
    before = diffusion_gpu.model_bytes(model)
    state = type("QuantState", (), {})()
    state.absmax, state.state2 = torch.zeros(10), None
    model.many.weight.quant_state = state  # type: ignore[attr-defined]
    assert diffusion_gpu.model_bytes(model) == before + 40


def test_rows_of_linears() -> None:
    """The fewest of all calls; a layer that is not called has none."""
    model = Two()
    rows = diffusion_gpu.rows_of_linears(model, {"x": torch.randn(1, 40, 64)})
    assert rows == {model.many: 40, model.one: 1}
    assert not model.one._forward_pre_hooks


def test_layers_of_few_rows_are_left_by_torchao(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its int8 product refuses fewer than 17 rows."""
    taken: list[nn.Module] = []

    def quantize(model: nn.Module, config: object, filter_fn: object = lambda module, name: isinstance(module, nn.Linear)) -> None:
        taken.extend(module for name, module in model.named_modules() if filter_fn(module, name))  # type: ignore[operator]

    torchao = SimpleNamespace(Int8DynamicActivationInt8WeightConfig=object, quantize_=quantize)
    monkeypatch.setitem(sys.modules, "torchao", SimpleNamespace(quantization=torchao))
    monkeypatch.setitem(sys.modules, "torchao.quantization", torchao)
    model = Two()
    diffusion_gpu.torchao(model, {"x": torch.randn(1, 17, 64)})
    assert taken == [model.many]

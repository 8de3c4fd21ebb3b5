"""Samples from which `Config(low_rank=...)` finds the scales of inputs."""

import copy
from typing import Any

import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.formats.spec import as_format
from halfbyte.nn.calibration.low_rank import Quantization, branches


@torch.no_grad()
def test_samples_are_tensors_arguments_or_tokens() -> None:
    class Two(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first = nn.Linear(64, 48)

        def forward(self, x: Tensor, y: Tensor | None = None) -> Any:
            return self.first(x if y is None else x + y)

    torch.manual_seed(0)
    model, x, y = Two(), torch.randn(20, 64), torch.randn(20, 64)
    settings = hb.Config("int4_g64", low_rank=4)
    want = hb.quantize_(copy.deepcopy(model), settings, [x + y]).state_dict()
    for samples in ([(x, y)], [{"x": x, "y": y}], [{"x": part, "y": y[i * 5 : i * 5 + 5]} for i, part in enumerate(x.split(5))], x + y):
        found = hb.quantize_(copy.deepcopy(model), settings, samples).state_dict()
        assert all(torch.equal(tensor, found[name]) for name, tensor in want.items())
    tokens = nn.Sequential(nn.Embedding(50, 64), nn.Linear(64, 48))
    ids = torch.randint(50, (4, 16))
    small: Any = hb.quantize_(tokens, settings, hb.Calibration(ids))
    assert small[1].input_scale is not None
    found, notes = branches(Two(), {"first": as_format("int4_g64")}, Quantization(4), [])
    assert found["first"].input_scale is None
    assert notes == ["low_rank: no sample reaches first, whose inputs have no scale"]

"""Ops on a GPU read operands with gaps as they read contiguous ones, and take empty ones. Without a GPU kernels are interpreted."""

from __future__ import annotations

from contextlib import nullcontext
from types import ModuleType

import pytest
import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.kernels import reference
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu
from halfbyte.ops import cuda
from halfbyte.ops.functions import quantize, requantization_table
from halfbyte.ops.transformer import normed_linear, prefill_ops


def take_gpu_path(monkeypatch: pytest.MonkeyPatch, module: ModuleType, gpu: Gpu) -> None:
    """Let the ops of a module launch kernels on tensors of a CPU as on those of `gpu`."""
    for name, value in (("gpu", lambda _: gpu), ("on", lambda _: nullcontext()), ("replayed", lambda steps, *_, **__: steps())):
        monkeypatch.setattr(module, name, value)
    monkeypatch.setattr(Tensor, "is_cuda", property(lambda _: True))


def test_qlinear(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    codes = quantize(torch.randn(32, 128), "int8_channel")
    scales = {"in_scale": 0.02, "in_zero": 3, "out_scale": 0.1, "out_zero": -4}
    weight, rows = gpu_tiles.pack(codes), torch.randint(-128, 128, (128, 5), dtype=torch.int8)
    table = requantization_table(weight, None, **scales).to(device)
    expected = reference.qlinear(rows.T, codes, None, **scales)
    x, data = rows.to(device).T, weight.data.to(device)
    if interpreted:
        monkeypatch.setattr(cuda, "check_qlinear", lambda *_: None)
        take_gpu_path(monkeypatch, cuda, gpu)
    y = cuda.qlinear(x, data, table, "int8_channel", 32, 128, -128, 127)
    monkeypatch.undo()
    assert bool(expected.agrees(y.cpu()).all())


def test_sinks(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    queries, keys, values = (torch.randn(1, 5, 2, 64, device=device).half() for _ in range(3))
    keys, values, sinks = keys.transpose(1, 2), values.transpose(1, 2), torch.randn(2, 3, device=device)[:, 1]
    if interpreted:
        take_gpu_path(monkeypatch, prefill_ops, gpu)
    y, expected = (prefill_ops.attend_many(queries, keys, values, None, None, 0.1, sinks=each) for each in (sinks, sinks.clone()))
    monkeypatch.undo()
    assert torch.equal(y, expected)


def test_no_keys(monkeypatch: pytest.MonkeyPatch, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """Their sum is 0."""
    queries, keys = torch.randn(1, 5, 2, 64, device=device).half(), torch.empty(1, 1, 0, 64, device=device).half()
    mask = torch.ones(1, 5, 0, dtype=torch.bool, device=device)
    if interpreted:
        take_gpu_path(monkeypatch, prefill_ops, gpu)
    y = prefill_ops.attend_many(queries, keys, keys, None, mask, 0.1)
    monkeypatch.undo()
    assert torch.equal(y, torch.zeros(1, 5, 128, device=device).half())


@pytest.mark.parametrize("shape", [(3, 40), (2, 3, 40)])
def test_multiplier_of_gates(
    monkeypatch: pytest.MonkeyPatch, shape: tuple[int, ...], gpu: Gpu, device: torch.device, interpreted: bool
) -> None:
    y, multiplier = torch.randn(shape, device=device), torch.randn(shape[::-1], device=device).permute(*range(len(shape))[::-1])
    expected = torch.nn.functional.gelu(y.double(), approximate="tanh") * multiplier.double()
    if interpreted:
        take_gpu_path(monkeypatch, normed_linear, gpu)
    found = normed_linear.activated(y, "gelu_tanh", gated=False, multiplier=multiplier)
    monkeypatch.undo()
    assert torch.allclose(found.double(), expected, rtol=1e-5, atol=1e-6)


def test_low_rank_that_does_not_fit(monkeypatch: pytest.MonkeyPatch) -> None:
    """The op refuses it before a kernel reads it: branches share N equally, and rows are those of x."""
    x, weight, settings = torch.zeros(3, 5, 64), torch.zeros(1), ("int8_channel", 48, 64, "int8", "row")
    monkeypatch.setattr(cuda, "check_linear", lambda *_: None)
    monkeypatch.setattr(cuda, "on", lambda _: nullcontext())
    monkeypatch.setattr(cuda, "_low_rank_sums", lambda *_: x)
    for branches in (1, 3):
        assert cuda.linear_low_rank(x, torch.zeros(3, 5, 8 * branches), torch.zeros(48, 8), weight, torch.zeros(48), *settings) is x
    right = torch.zeros(3, 5, 8), torch.zeros(48, 8)
    wrong = [(right[0][:2], right[1]), (right[0], right[1][:47]), (right[0][..., :7], right[1]), (right[0].half(), right[1])]
    for inner, outer in [*wrong, (torch.zeros(3, 5, 40), right[1]), (right[0][0], right[1]), (right[0], right[1][:, :0])]:
        with pytest.raises(ArgumentError, match=r"low rank takes inner \[\.\.\., branches \* r\] and outer \[48, r\]"):
            cuda.linear_low_rank(x, inner, outer, weight, None, *settings)
    with pytest.raises(ArgumentError, match="the bias of 48 outputs"):
        cuda.linear_low_rank(x, *right, weight, torch.zeros(47), *settings)

"""torch.compile with the parts of torch's compiler that differ between versions: quantized modules whose weights are read, written to and
replaced."""

from __future__ import annotations

import copy
from collections.abc import Iterator

import pytest
import torch
from torch import Tensor, nn
from torch.func import functional_call

import halfbyte as hb


@pytest.fixture(autouse=True)
def _fresh_compiler() -> Iterator[None]:
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def network(seed: int) -> nn.Sequential:
    torch.manual_seed(seed)
    return hb.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval(), "q8_0")


X = torch.randn(2, 3, 8, 8, generator=torch.Generator().manual_seed(7))


@torch.no_grad()
def test_a_compiled_network_computes_with_its_state() -> None:
    a, b = network(0), network(1)
    of_a, of_b = a(X), b(X)
    compiled = torch.compile(copy.deepcopy(a), backend="eager", fullgraph=True)
    torch.testing.assert_close(compiled(X), of_a, rtol=1e-5, atol=1e-5)  # sums in another order
    for actual, other in zip(compiled._orig_mod.modules(), b.modules(), strict=True):
        actual._buffers.update(other._buffers)
        actual._parameters.update(other._parameters)
    torch.testing.assert_close(compiled(X), of_b, rtol=1e-5, atol=1e-5)
    within = torch.compile(lambda state, x: functional_call(a, state, (x,)), backend="eager")
    for model, expected in ((a, of_a), (b, of_b)):
        state = {**dict(model.named_parameters()), **dict(model.named_buffers())}
        torch.testing.assert_close(within(state, X), expected, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_computed_bytes_are_refused() -> None:
    a = network(0)
    a[3].packed_data.copy_(a[3].packed_data // 2)
    with pytest.raises(Exception, match="packed codes cannot be averaged"):  # torch.compile's own class
        torch.compile(a, backend="eager")(X)


@torch.no_grad()
def test_weights_are_read_and_written_to() -> None:
    linear, x = network(0)[3], torch.randn(3, 288)

    def read(x: Tensor) -> Tensor:
        weight = linear.weight
        return x.to(weight.dtype) @ weight.T + weight.data[:, 0] + weight[0].sum()

    def halve(x: Tensor) -> Tensor:
        linear.weight.div_(2)
        return linear(x)  # type: ignore[no-any-return]

    torch.testing.assert_close(torch.compile(read, backend="eager", fullgraph=True)(x), read(x))
    before = linear.weight.clone()
    torch.compile(halve, backend="eager")(x)
    assert torch.equal(linear.weight + 0, before / 2)
    torch.compiler.reset()
    with pytest.raises(Exception, match="quantized weight is frozen"):
        torch.compile(halve, backend="eager", fullgraph=True)(x)
    assert torch.equal(linear.weight + 0, before / 2)

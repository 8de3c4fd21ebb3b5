"""Networks whose modules have names of operations, and the values from which calibration chooses ranges."""

import copy

import pytest
import torch
from torch import Tensor, fx, nn

import halfbyte as hb
from halfbyte.nn.static.prepare import prepare
from halfbyte.nn.static.ranges import RangeObserver
from halfbyte.nn.static.rewriter import GraphRewriter

STATIC = hb.Config("int8_channel", activations="static")


class _Named(nn.Module):
    """Convolutions with a module between them whose name is that of a method of tensors."""

    def __init__(self, name: str, middle: nn.Module) -> None:
        super().__init__()
        self.first, self.last, self.name = nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), name
        self.add_module(name, middle)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.last(getattr(self, self.name)(self.first(x)))
        return y


@pytest.mark.parametrize("name", ["relu", "flatten", "squeeze"])
@pytest.mark.parametrize("middle", [nn.LeakyReLU(0.5), nn.Tanh()])
@torch.no_grad()
def test_a_module_is_not_taken_for_the_operation_of_its_name(name: str, middle: nn.Module) -> None:
    torch.manual_seed(0)
    model, x = _Named(name, middle).eval(), torch.randn(2, 3, 16, 16)
    wanted = model(x)
    static = hb.quantize_(copy.deepcopy(model), STATIC, [x])
    fused = hb.fuse_(hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel")))
    for network in (static, fused):  # 0.38 and 0.74 where `relu` was a ReLU
        assert float((network(x) - wanted).norm() / wanted.norm()) < 0.05


@torch.no_grad()
def test_percentiles_are_of_all_columns() -> None:
    """Of 2^18 values each fourth was taken, which in rows of 64 are those of columns 0, 4, 8, …"""
    traced, normed_layers = prepare(nn.Sequential(nn.Conv2d(16, 4, 1)))
    x = torch.rand(4, 16, 64, 64, generator=torch.Generator().manual_seed(0))
    x[..., ::4] = 0
    observer = RangeObserver(traced, "percentile", normed_layers, with_moments=False)
    observer.run(x)
    placeholder = next(node.name for node in traced.graph.nodes if node.op == "placeholder")
    step = observer.scales()[placeholder].step
    assert 0.99 / 255 < step <= 1 / 255


def test_a_network_without_scales_stays_in_floating_point() -> None:
    traced, _ = prepare(nn.Sequential(nn.Conv2d(3, 4, 1), nn.ReLU()))
    network = GraphRewriter(traced, {}, lambda name, layer: "").rewrite(())
    assert isinstance(network, fx.GraphModule)
    x = torch.randn(2, 3, 5, 5)
    assert torch.equal(network(x), traced(x))

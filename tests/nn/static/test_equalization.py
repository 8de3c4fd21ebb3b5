"""Channels get equal ranges, and the network computes the same in floating point."""

from __future__ import annotations

import copy
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, fx, nn
from torch.nn import functional as F

import halfbyte as hb
from halfbyte.errors import ArgumentError
from halfbyte.nn.static.equalization import equalize_

SPREAD = torch.logspace(-1, 0.8, 12)  # ranges of channels that differ 60-fold


class _Residual(nn.Module):
    """Streams of 12 channels through convolutions with groups, pools, a residual sum and a mean; `act` after the sum."""

    def __init__(self, act: Callable[[Tensor], Tensor] = F.relu) -> None:
        super().__init__()
        self.stem, self.down, self.up = nn.Conv2d(3, 12, 3, padding=1), nn.Conv2d(12, 8, 1, bias=False), nn.Conv2d(8, 12, 3, padding=1)
        self.depthwise, self.grouped = nn.Conv2d(12, 24, 3, 2, 1, groups=12), nn.Conv2d(24, 12, 1, groups=3)
        self.pool, self.mean, self.flat = nn.MaxPool2d(2), nn.AdaptiveAvgPool2d(1), nn.Flatten()
        self.head, self.act = nn.Linear(12, 5), act
        for layer in (self.stem, self.up, self.grouped):
            layer.weight.data *= SPREAD.view(-1, 1, 1, 1)
            layer.bias.data *= SPREAD  # type: ignore[union-attr]

    def forward(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.stem(x)))
        x = self.act(self.up(F.relu(self.down(x))) + x)
        x = F.relu(self.grouped(self.depthwise(x)))
        return self.head(self.flat(self.mean(x)))  # type: ignore[no-any-return]


def _ranges(traced: fx.GraphModule, layer: str, x: Tensor) -> Tensor:
    """The largest result of each channel of a layer, behind a ReLU."""
    results: list[Tensor] = []
    handle = traced.get_submodule(layer).register_forward_hook(lambda *call: results.append(call[2]))
    traced(x)
    handle.remove()
    return results[0].relu().amax((0, 2, 3))


@torch.no_grad()
def test_the_network_computes_the_same_with_channels_of_equal_ranges() -> None:
    torch.manual_seed(0)
    model, x = _Residual().double().eval(), torch.randn(32, 3, 12, 10, dtype=torch.float64)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    weights = {name: module.weight for name, module in traced.named_modules() if isinstance(module, nn.Conv2d | nn.Linear)}
    equalize_(traced, x.split(16))
    torch.testing.assert_close(traced(x), model(x), rtol=1e-10, atol=1e-10)
    assert all(weight is not traced.get_parameter(f"{name}.weight") for name, weight in weights.items())
    before, after = (_ranges(m, "grouped", x) for m in (fx.symbolic_trace(model), traced))
    assert float(before.amax() / before.amin()) > 20
    # Each channel reaches the range of the largest, but for those below a sixteenth of it.
    torch.testing.assert_close(after, (before / before.amax()).div((before / before.amax()).clamp(min=1 / 16)) * before.amax())


@pytest.mark.parametrize("act", [F.relu6, F.silu, torch.sigmoid], ids=lambda act: act.__name__)
@torch.no_grad()
def test_what_does_not_commute_with_scales_keeps_its_channels(act: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = _Residual(act).double().eval(), torch.randn(8, 3, 12, 10, dtype=torch.float64)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    equalize_(traced, [x])
    torch.testing.assert_close(traced(x), model(x), rtol=1e-10, atol=1e-10)
    assert torch.equal(traced.get_parameter("stem.weight"), model.stem.weight)  # of the sum that `act` reads
    assert not torch.equal(traced.get_parameter("grouped.weight"), model.grouped.weight)


class _Shared(nn.Module):
    """A layer that is called twice, and one whose weight is read."""

    def __init__(self) -> None:
        super().__init__()
        self.twice, self.read, self.other = nn.Linear(6, 6), nn.Linear(6, 6), nn.Linear(6, 6)
        self.other.weight = self.read.weight

    def forward(self, x: Tensor) -> Tensor:
        x = self.read(F.relu(self.twice(F.relu(self.twice(x))))) + self.read.weight.mean()
        return self.other(F.relu(self.other(x[:, None])))[:, 0]  # type: ignore[no-any-return]


@torch.no_grad()
def test_shared_layers_rows_and_images_without_numbers_change_nothing() -> None:
    torch.manual_seed(0)
    model, x = _Shared().eval(), torch.randn(16, 6)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    equalize_(traced, [x])
    assert all(torch.equal(value, model.state_dict()[name]) for name, value in traced.state_dict().items())
    blank = fx.symbolic_trace(copy.deepcopy(residual := _Residual().eval()))
    for images in ([], [torch.zeros(0, 3, 12, 10)], [torch.full((2, 3, 12, 10), torch.inf)]):
        equalize_(blank, images)
        assert all(torch.equal(value, residual.state_dict()[name]) for name, value in blank.state_dict().items())


@torch.no_grad()
def test_a_channel_that_no_image_shows_stays_as_it_is() -> None:
    torch.manual_seed(0)
    model, x = _Residual().double().eval(), torch.randn(8, 3, 12, 10, dtype=torch.float64)
    model.grouped.bias[3] = -1e3  # type: ignore[index]
    traced = fx.symbolic_trace(copy.deepcopy(model))
    equalize_(traced, [x])
    torch.testing.assert_close(traced(x), model(x), rtol=1e-10, atol=1e-10)
    changed = torch.ne(traced.get_parameter("grouped.bias"), model.grouped.bias)  # type: ignore[arg-type]
    assert not changed[3]
    assert changed.any()


class _Mixing(nn.Module):
    """Layers between which something mixes channels, or reads them by position."""

    def __init__(self, between: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.first, self.last, self.between = nn.Conv1d(3, 8, 3, padding=1), nn.Conv1d(8, 4, 1), between
        self.first.weight.data *= torch.logspace(-1, 1, 8).view(-1, 1, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.between(self.first(x)))  # type: ignore[no-any-return]


@pytest.mark.parametrize(
    "between",
    [
        nn.MaxPool2d(3, 1, 1),  # takes [B, C, L] for an image without a batch, and pools over channels
        nn.AvgPool2d(3, 1, 1),
        nn.ZeroPad2d((0, 0, 1, -1)),
        nn.Softmax(1),
        nn.PReLU(),
        lambda x: torch.cat([x[:, :4], x[:, :4]], 1),
        lambda x: torch.cat([x, x], 1)[:, 4:12],
        lambda x: x.flip(1),
        lambda x: x.unflatten(1, (2, 4)).transpose(1, 2).flatten(1, 2),
        lambda x: F.relu(x) + 1,
        lambda x: torch.add(x, F.relu(x), alpha=2),
        lambda x: F.relu(x) * x,
    ],
)
@torch.no_grad()
def test_what_mixes_channels_keeps_them(between: Callable[[Tensor], Tensor]) -> None:
    torch.manual_seed(0)
    model, x = _Mixing(between).double().eval(), torch.randn(5, 3, 9, dtype=torch.float64)
    traced = fx.symbolic_trace(copy.deepcopy(model))
    equalize_(traced, [x])
    torch.testing.assert_close(traced(x), model(x), rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_hook_on_a_module_between_keeps_channels() -> None:
    torch.manual_seed(0)
    model, x = _Residual().double().eval(), torch.randn(8, 3, 12, 10, dtype=torch.float64)
    for module in (model.flat, model.pool):
        module.register_forward_hook(lambda module, args, y: y.exp())
    traced = fx.symbolic_trace(model)
    wanted = traced(x)
    equalize_(traced, [x])
    torch.testing.assert_close(traced(x), wanted, rtol=1e-10, atol=1e-10)


@torch.no_grad()
def test_a_network_on_codes_is_nearer_to_float() -> None:
    """Against float64; the means of a network whose channels have one range are as near as without."""
    torch.manual_seed(0)
    model, x = _Residual().eval(), torch.randn(64, 3, 12, 10)
    wanted = copy.deepcopy(model).double()(x.double())

    def error(network: nn.Module) -> float:
        return float((network(x).double() - wanted).norm() / (wanted - wanted.mean(0)).norm())

    def on_codes(equalize: bool) -> float:
        config = hb.Config("int8_channel", activations="static", equalize=equalize)
        return error(hb.quantize_(copy.deepcopy(model), config, x.split(32)))

    assert on_codes(True) < on_codes(False) / 1.5


def test_dynamic_activations_have_no_ranges_to_equalize() -> None:
    with pytest.raises(ArgumentError, match="equalize goes with"):
        hb.Config("int8_channel", equalize=True)

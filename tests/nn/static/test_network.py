"""Networks on codes in one call: bit by bit what they give node by node, and node by node where somebody is watching."""

import copy
import inspect
import io
import threading

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn.described import Scale
from halfbyte.nn.static import network as networks
from halfbyte.nn.static import programs as native
from halfbyte.nn.static.integer import AveragePool
from halfbyte.nn.static.network import IntegerNetwork


class _Branches(nn.Module):
    """Results that are read twice, added to themselves, returned, and flattened while others still read them."""

    def __init__(self, middle: nn.Module) -> None:
        super().__init__()
        self.stem, self.pool = nn.Conv2d(3, 24, 3, 2, 1), nn.MaxPool2d(2)
        self.a, self.b, self.c = nn.Conv2d(24, 72, 1), nn.Conv2d(72, 72, 3, padding=1, groups=72), nn.Conv2d(72, 24, 1)
        self.d, self.middle = nn.Conv2d(24, 32, 3, 1, 1), middle
        self.end, self.flat, self.linear = nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = self.pool(torch.relu(self.stem(x)))
        y = self.c(torch.relu(self.b(torch.relu(self.a(x))))) + x
        z = self.end(self.middle(self.d(y + y)))
        return y, z, self.linear(self.flat(z))


def on_codes(middle: nn.Module) -> IntegerNetwork:
    torch.manual_seed(0)
    model = _Branches(middle).eval()
    built = hb.quantize_(model, hb.Config("int8_channel", activations="static"), images(4))
    assert isinstance(built, IntegerNetwork)
    return built


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 28, 36).contiguous(memory_format=torch.channels_last)


def programs(built: nn.Module) -> list[native._ProgramModule]:
    thread = networks._thread_graphs_of(built).graphs  # type: ignore[arg-type]
    assert thread is not None
    found = [one for one in thread._by_size.values() if isinstance(one, nn.Module)]
    return [module for one in found for module in one.modules() if isinstance(module, native._ProgramModule)]


def same(got: tuple[Tensor, ...], wanted: tuple[Tensor, ...]) -> bool:
    return all(torch.equal(a, b) and a.stride() == b.stride() for a, b in zip(got, wanted, strict=True))


@pytest.mark.parametrize(("middle", "count"), [(nn.ReLU6(), 1), (nn.GELU(), 2), (nn.AvgPool2d(3, 2, 1), 2)])
@torch.no_grad()
def test_one_call_gives_what_the_nodes_give(middle: nn.Module, count: int) -> None:
    built = on_codes(middle)
    for batch in (1, 3):
        for _ in range(4):
            x = images(batch)
            assert same(built(x), built.node_by_node(x))  # type: ignore[operator]
    found = programs(built)
    assert len(found) == 2 * (count + 1)  # the linear layer at the end splits the last one
    for program in found:  # what was there before is nobody's input
        program._program._memory.fill_(0x55)
    assert same(built(x), built.node_by_node(x))  # type: ignore[operator]
    overlaps: list[bool] = []
    thread = threading.Thread(target=lambda: overlaps.extend(same(built(x), built.node_by_node(x)) for _ in range(3)))  # type: ignore[operator]
    thread.start()
    thread.join()
    assert overlaps == [True] * 3
    for _ in range(3):  # images laid out in another way
        assert all(torch.equal(a, b) for a, b in zip(built(x.contiguous()), built(x), strict=True))


@torch.no_grad()
def test_weights_that_change_and_hooks_are_seen() -> None:
    built, x = on_codes(nn.ReLU6()), images(2)
    other = copy.deepcopy(built)
    for module in (built, other):
        for _ in range(3):
            module(x)
    assert programs(other)
    for layer in other.modules():
        if isinstance(layer, nn.Module) and hasattr(layer, "table"):
            layer.load_state_dict({name: torch.zeros_like(t) for name, t in layer.state_dict().items()})
    assert not same(other(x), built(x))
    other.load_state_dict(built.state_dict())
    for _ in range(3):
        assert same(other(x), built(x))
    for _ in range(3):
        other.get_submodule("d").bias.add_(0.5)  # type: ignore[operator, union-attr]
        changed = [other(x) for _ in range(4)]
        assert programs(other)
        assert not same(changed[0], built(x))
        other.get_submodule("d").refresh()  # type: ignore[operator]
        assert all(same(other(x), one) for one in changed)
    file = io.BytesIO()
    torch.save(built, file)
    file.seek(0)
    restored = torch.load(file, weights_only=False)
    assert isinstance(restored, IntegerNetwork)
    assert restored.meta == built.meta
    for _ in range(3):
        assert same(restored(x), built(x))
    called = []
    with built.get_submodule("b").register_forward_hook(lambda *_: called.append(1)):
        built(x)
    built(x)
    assert called == [1]


@torch.no_grad()
def test_a_layer_that_is_replaced_is_called() -> None:
    built, x = on_codes(nn.ReLU6()), images(2)
    for _ in range(3):
        built(x)
    called = []
    layer = built.get_submodule("b")
    built.set_submodule("b", nn.Sequential(layer))
    built.get_submodule("b").register_forward_hook(lambda *_: called.append(1))
    built(x)
    assert called == [1]


@torch.no_grad()
def test_convolutions_that_add_their_codes() -> None:
    built, x = on_codes(nn.ReLU6()), images(2)
    added = native.with_fused_additions(built)
    assert sum(isinstance(module, native._ConvAdd) for module in added.modules()) == 1
    assert same(added(x), built.node_by_node(x))  # type: ignore[operator]


@torch.no_grad()
def test_means_are_rounded_once() -> None:
    for size, channels in (((7, 7), 33), ((8, 2), 64), ((6, 6), 5), ((1, 1), 130)):
        x = torch.randint(-128, 128, (2, channels, *size), dtype=torch.int8)
        for zero in (-128, -3, 4, 127):
            wanted = ((x.double() - zero).mean((2, 3), keepdim=True).round() + zero).to(torch.int8)
            assert torch.equal(AveragePool(nn.AdaptiveAvgPool2d(1), Scale(0.1, zero))(x), wanted)


@torch.no_grad()
def test_inputs_keep_their_names() -> None:
    """torch.export and torch.compile take the inputs of a network, and of a fused one, as those of the float network."""
    x, three = images(4), images(3)
    folded = hb.optimize_(hb.quantize_(_Branches(nn.ReLU()).eval(), "int8_channel"))
    for network in (on_codes(nn.ReLU()), folded):
        assert list(inspect.signature(network.forward).parameters) == ["x"]
        for shapes in ({"x": {0: torch.export.Dim("batch")}}, ({0: torch.export.Dim("batch")},)):
            program = torch.export.export(network, (x,), dynamic_shapes=shapes).module()
            for got, wanted in zip(program(three), network(three), strict=True):
                torch.testing.assert_close(got, wanted)
        for got, wanted in zip(torch.compile(network, backend="eager", fullgraph=True)(x=three), network(three), strict=True):
            torch.testing.assert_close(got, wanted)

"""Ways to change a quantized model's state, by the model: each is seen by its calls, or refused."""

from __future__ import annotations

import copy
import io
import pickle
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_state import Attention, tensors
from torch import Tensor, nn
from torch.func import functional_call

import halfbyte as hb
from halfbyte.errors import UnsupportedError

IMAGES, ROWS = (torch.randn(shape, generator=torch.Generator().manual_seed(0)) for shape in ((2, 3, 8, 8), (3, 64)))


def network() -> nn.Module:
    config = hb.Config("int8_channel", activations="static")
    return hb.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Flatten(), nn.Linear(288, 5)).eval(), config, [IMAGES])


MODELS: dict[str, tuple[Callable[[], nn.Module], Tensor]] = {
    "linear": (lambda: hb.quantize_(nn.Sequential(nn.Linear(64, 32)), "q8_0"), ROWS),
    "fused": (lambda: hb.fuse_(hb.quantize_(nn.Sequential(Attention()), "q4_0")), ROWS),
    "conv": (lambda: hb.fuse_(hb.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU()).eval(), "int8_channel")), IMAGES),
    "network": (network, IMAGES),
}


def built(name: str, seed: int) -> Any:
    torch.manual_seed(seed)
    return MODELS[name][0]()


def of_weights(a: nn.Module, b: nn.Module) -> list[tuple[Tensor, Tensor]]:
    """The tensors of both, but for tables, which follow from them."""
    return [(t, u) for (name, t), (_, u) in zip(tensors(a), tensors(b), strict=True) if not name.endswith(".table")]


def loaded(a: Any, b: nn.Module, **how: Any) -> Any:
    a.load_state_dict(b.state_dict(), **how)
    return a


def emptied(a: Any, b: nn.Module) -> Any:
    return loaded(a.to_empty(device="cpu"), b)


def copied(a: Any, b: nn.Module) -> Any:
    with torch.no_grad():
        for actual, other in of_weights(a, b):
            actual.copy_(other)
    return a


def put(a: Any, b: nn.Module) -> Any:
    for actual, other in zip(a.modules(), b.modules(), strict=True):
        actual._buffers.update({name: t for name, t in other._buffers.items() if name != "table"})
        actual._parameters.update(other._parameters)
    return a


def unpickled(a: Any, b: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(loaded(a, b)))  # noqa: S301


def read(a: Any, b: nn.Module) -> Any:
    file = io.BytesIO()
    torch.save(loaded(a, b), file)
    file.seek(0)
    return torch.load(file, weights_only=False)


WAYS: dict[str, Callable[[Any, nn.Module], Any]] = {
    "load": loaded,
    "assign": lambda a, b: loaded(a, b, assign=True),
    "to_empty": emptied,
    "copy": copied,
    "put": put,
    "share_memory": lambda a, b: loaded(a, b).share_memory(),
    "deepcopy": lambda a, b: copy.deepcopy(loaded(a, b)),
    "pickle": unpickled,
    "save": read,
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("name", MODELS)
@torch.no_grad()
def test_a_call_sees_the_state(name: str, way: str) -> None:
    a, b, x = built(name, 0), built(name, 1), MODELS[name][1]
    expected = loaded(built(name, 0), b)(x)
    for _ in range(3):  # a network's programs are made at the second call
        before = a(x)
    changed = WAYS[way](a, b)
    assert not torch.equal(before, expected)
    for _ in range(3):
        assert torch.equal(changed(x), expected)


@pytest.mark.parametrize("way", ["load", "copy", "put"])
@pytest.mark.parametrize("name", ["linear", "fused"])
@torch.no_grad()
def test_a_compiled_model_sees_the_state(name: str, way: str) -> None:
    a, b, x = built(name, 0), built(name, 1), MODELS[name][1]
    compiled = torch.compile(a, backend="eager", fullgraph=True)
    compiled(x)
    WAYS[way](a, b)
    torch.testing.assert_close(compiled(x), b(x), rtol=1e-5, atol=1e-5)  # sums in another order


@pytest.mark.parametrize("name", ["linear", "fused"])
@torch.no_grad()
def test_a_compiled_functional_call_computes_with_its_state(name: str) -> None:
    a, b, x = built(name, 0), built(name, 1), MODELS[name][1]
    of_a, of_b = a(x), b(x)
    within = torch.compile(lambda state, x: functional_call(a, state, (x,)), backend="eager")
    around = torch.compile(a, backend="eager") if name == "linear" else a
    prefix = "_orig_mod." if name == "linear" else ""
    for model, expected in ((a, of_a), (b, of_b), (a, of_a)):
        state = dict(tensors(model))
        torch.testing.assert_close(within(state, x), expected, rtol=1e-5, atol=1e-5)
        given = {f"{prefix}{key}": tensor for key, tensor in state.items()}
        torch.testing.assert_close(functional_call(around, given, (x,)), expected, rtol=1e-5, atol=1e-5)
    assert torch.equal(a(x), of_a)


def test_compiling_bytes_that_were_averaged_is_refused() -> None:
    a, b = built("linear", 0), built("linear", 1)
    with torch.no_grad():
        for actual, other in of_weights(a, b):
            actual.copy_((actual.float() + other.float()) / 2)
    with pytest.raises(Exception, match="packed codes cannot be averaged"):  # torch.compile's own class
        torch.compile(a, backend="eager")(ROWS)
    with pytest.raises(Exception, match="packed codes cannot be averaged"):
        a.to(torch.float16)  # which computes the digest of other bytes anew


@pytest.mark.parametrize("name", MODELS)
def test_tensors_of_the_state_are_not_swapped(name: str) -> None:
    a, b = built(name, 0), built(name, 1)
    data = [[t for key, t in model.named_buffers() if key.endswith("packed_data")] for model in (a, b)]
    with pytest.raises(RuntimeError, match="Cannot swap"):
        torch.utils.swap_tensors(data[0][0], data[1][0])


def test_another_device_without_kernels_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="cannot be packed for device 'meta'"):
        built("linear", 0).to("meta")

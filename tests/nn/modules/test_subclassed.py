"""Subclasses of torch's convolutions with a forward of their own: quantized where that only calls `super().forward`."""

import copy
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import halfbyte as hb
from halfbyte.errors import ArgumentError
from halfbyte.nn.dequantized import dequantize_
from halfbyte.nn.modules import subclassed
from halfbyte.nn.modules.conv import QuantConv2d


class Causal(nn.Conv3d):
    """Pads time before the first frame, or continues after the frames of the last call."""

    def __init__(self, *sizes: Any, **settings: Any) -> None:
        super().__init__(*sizes, **settings)
        self.before = self.kernel_size[0] - 1
        self.last: Tensor | None = None

    def forward(self, x: Tensor, keep: bool = False) -> Tensor:
        x = functional.pad(x, (0, 0, 0, 0, self.before, 0)) if self.last is None else torch.cat([self.last, x], 2)
        self.last = x[:, :, -self.before :].clone() if keep else None
        return torch.cat([super(Causal, self).forward(x[:, :, i : i + self.before + 1]) for i in range(x.shape[2] - self.before)], 2)


class Padded(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (1, 1, 1, 1), mode="replicate"))


class Inner(Padded):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(2 * x).mul(3)


class Line(nn.Conv1d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(functional.pad(x, (2, 0)))


CASES: dict[str, tuple[type[nn.Module], tuple[int, ...], tuple[int, ...]]] = {
    "3d": (Causal, (16, 4, 3), (2, 16, 5, 6, 7)),
    "2d": (Padded, (32, 4, 3), (2, 32, 6, 7)),
    "twice": (Inner, (32, 4, 3), (2, 32, 6, 7)),
    "1d": (Line, (32, 4, 3), (2, 32, 9)),
}
cases = pytest.mark.parametrize("name", CASES)


def example(name: str) -> tuple[nn.Sequential, Tensor]:
    torch.manual_seed(0)
    kind, sizes, shape = CASES[name]
    return nn.Sequential(kind(*sizes)).eval(), torch.randn(shape)


@torch.no_grad()
@cases
@pytest.mark.parametrize("fmt", ["int8_channel", "q8_0"])
def test_the_subclass_computes_as_before(name: str, fmt: str) -> None:
    model, x = example(name)
    small: Any = hb.quantize_(copy.deepcopy(model), hb.Config(fmt, compute="float"))
    assert isinstance(small[0], QuantConv2d)
    assert isinstance(small[0], type(model[0]))
    assert hb.report(small).quantized[0].kind == small[0].kind == type(model[0]).__mro__[-4].__name__
    floats: Any = copy.deepcopy(small)
    dequantize_(floats)
    assert type(floats[0]) is type(model[0])
    # The same float32 numbers, summed in another order; 432 products of numbers near 1 at most, times 6.
    torch.testing.assert_close(small(x), floats(x), rtol=1e-5, atol=1e-4)
    assert float((small(x) - model(x)).norm() / model(x).norm()) < 0.02  # 8 bits
    for again in (copy.deepcopy(small), pickle.loads(pickle.dumps(small))):  # noqa: S301
        assert type(again[0]) is type(small[0])
        assert torch.equal(again(x), small(x))
    assert torch.equal(hb.fuse_(small)(x), again(x))


@torch.no_grad()
def test_frames_that_are_kept_for_the_next_call() -> None:
    model, x = example("3d")
    small: Any = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", compute="float"))
    want = small(x)
    parts = [small[0](part, keep=i < 2) for i, part in enumerate(x.split([2, 1, 2], 2))]
    torch.testing.assert_close(torch.cat(parts, 2), want, rtol=1e-5, atol=1e-5)  # other sizes take other kernels
    assert "_packed" not in vars(dequantize(small)[0])


def dequantize(model: Any) -> Any:
    dequantize_(model)
    return model


@cases
def test_saved_and_loaded(name: str, tmp_path: Path) -> None:
    model, x = example(name)
    small: Any = hb.quantize_(copy.deepcopy(model), "int8_channel")
    hb.save(small, tmp_path / "small")
    again: Any = hb.load(tmp_path / "small", model=model)
    assert type(again[0]) is type(small[0])
    assert torch.equal(again(x), small(x))


@cases
def test_compiled(name: str) -> None:
    model, x = example(name)
    small: Any = hb.quantize_(model, hb.Config("int8_channel", compute="float"))
    want = small(x)
    torch.compiler.reset()  # graphs of the forwards of Sequential and others: torch keeps eight
    compiled: Any = torch.compile(small, backend="aot_eager", fullgraph=True)
    torch.testing.assert_close(compiled(x), want, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_what_is_trained_or_on_codes_leaves_them() -> None:
    model, x = example("2d")
    model.append(nn.Conv2d(4, 32, 3))
    prepared = hb.prepare_qat_(copy.deepcopy(model), "int8_channel")
    assert "0 is not trained for int8_channel" in str(hb.report(prepared))
    assert type(prepared.get_submodule("0")) is Padded
    network = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations="static"), [x])
    want = model(x)
    assert float((network(x) - want).norm() / want.norm()) < 0.05


# Those that are left


class Standardized(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        weight = self.weight - self.weight.mean((1, 2, 3), keepdim=True)
        return functional.conv2d(x, weight, self.bias)


class Indirect(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x * getattr(self, "weight").sum())  # noqa: B009


class Other(nn.Conv2d):
    def forward(self, x: Tensor) -> Tensor:
        return x


class More(Padded):
    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.gain = nn.Parameter(torch.ones(1))


class Clash(Padded):
    def __init__(self, *sizes: Any) -> None:
        super().__init__(*sizes)
        self.fold = 3


class Loading(Padded):
    def _load_from_state_dict(self, *args: Any, **kwargs: Any) -> None:
        super()._load_from_state_dict(*args, **kwargs)


class Up(nn.ConvTranspose2d):
    def forward(self, x: Tensor) -> Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [
        (Standardized, "forward of its own, which reads its weight"),
        (Indirect, "forward of its own, which reads its weight"),
        (Other, r"forward of its own, which does not call super\(\)\.forward"),
        (More, "forward of its own, and more than a weight and a bias"),
        (Clash, "has a fold of its own, and so has its quantized form"),
        (Loading, "has a _load_from_state_dict of its own, and so has its quantized form"),
        (Up, "Up has a forward of its own"),
    ],
)
def test_reasons(kind: type[nn.Module], reason: str) -> None:
    with pytest.raises(ArgumentError, match=reason):
        hb.quantize_(nn.Sequential(kind(16, 16, 3)), "int8_channel")
    assert subclassed.why_not_forward(kind(16, 16, 3), nn.ConvTranspose2d if kind is Up else nn.Conv2d) is not None

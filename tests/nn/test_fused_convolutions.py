"""Convolutions that add and clamp what they give: the same numbers, in the same modules, wherever nobody watches these."""

import copy
import io

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.errors import UnsupportedError


class _Block(nn.Module):
    """Sums that a convolution can make, and sums that none may: of what is read twice, with itself, of another shape, or written into."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.d = (nn.Conv2d(16, 16, size, padding=size // 2) for size in (1, 3, 1, 3))
        self.line = nn.Conv1d(16, 16, 3, padding=1)
        self.act, self.short, self.drop, self.pool = nn.ReLU(inplace=True), nn.ReLU6(), nn.Dropout(0.5), nn.MaxPool2d(3, 1, 1)
        self.offset = nn.Parameter(torch.randn(1, 16, 1, 1))

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(self.b(self.act(self.a(x))))
        y += x  # 1, with the activation behind it
        y = self.act(y)
        y = self.short(self.c(y) + self.d(y))  # 2
        z = self.c(y)
        y = torch.relu(z) + z  # none: z is read twice
        y = nn.functional.relu6(self.offset + self.a(y))  # 3: of another shape, which the module adds itself
        w = self.b(y)
        y = torch.sigmoid(y) + (w + w)  # none
        kept = self.a(y)
        y = (self.c(y) + y) * self.act(y)  # none: y may be written into behind the convolution
        y = self.act(self.line(y.flatten(2))).view_as(y) - y
        return self.pool(kept.relu() + y)  # none: of an activation


class _Outer(nn.Module):
    """Which torch.fx cannot trace."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.Sequential(_Block(), _Block())

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) if x.sum() > -1e9 else x
        return x


def quantized(model: nn.Module, format: str = "int8_channel") -> nn.Module:
    return hb.quantize_(model.eval(), hb.Config(format, compute="float"))


def images() -> Tensor:
    return torch.randn(2, 16, 9, 7, generator=torch.Generator().manual_seed(0))


@pytest.fixture
def both() -> tuple[nn.Module, nn.Module]:
    """A model, and its copy that is fused."""
    torch.manual_seed(0)
    model = quantized(_Block())
    return model, hb.fuse_(copy.deepcopy(model))


@torch.no_grad()
def test_the_same_numbers(both: tuple[nn.Module, nn.Module]) -> None:
    model, fused = both
    assert "within the convolutions before them: 3 additions, 6 activations" in hb.report(fused).notes
    assert isinstance(fused, _Block)
    assert fused.state_dict().keys() == model.state_dict().keys()
    torch.testing.assert_close(fused(images()), model(images()), rtol=1e-5, atol=1e-5)  # of float32, added in the same order
    torch.testing.assert_close(fused(x=images()[0]), model(images()[0]), rtol=1e-5, atol=1e-5)
    x = images().bfloat16()  # a sum is rounded once instead of twice
    model.bfloat16(), fused.bfloat16()
    assert float((fused(x) - model(x)).norm()) < 0.02 * float(model(x).norm())


@torch.no_grad()
def test_copies_are_fused_too(both: tuple[nn.Module, nn.Module]) -> None:
    stored = io.BytesIO()
    torch.save(both[1], stored)
    stored.seek(0)
    for other in (copy.deepcopy(both[1]), torch.load(stored, weights_only=False), hb.fuse_(both[1])):
        assert type(other).__mro__[2] is _Block
        assert torch.equal(other(images()), both[1](images()))


def test_where_somebody_watches_modules_are_called_one_by_one(both: tuple[nn.Module, nn.Module]) -> None:
    seen: list[str] = []
    fused = both[1]
    fused.act.register_forward_hook(lambda *_: seen.append("act"))
    fused.eval()(images())
    assert len(seen) == 4
    x = images().requires_grad_()
    copy.deepcopy(both[0]).eval()(x).sum().backward()
    wanted, x.grad = x.grad, None
    hb.fuse_(both[0])(x).sum().backward()
    torch.testing.assert_close(x.grad, wanted, rtol=1e-4, atol=1e-4)
    both[0].train()
    assert not torch.equal(both[0](images()), both[0](images()))  # dropout


@torch.no_grad()
def test_parts_of_what_cannot_be_traced() -> None:
    model = quantized(_Outer())
    wanted = model(images())
    hb.fuse_(model)
    assert hb.report(model).notes == (
        "blocks: within the convolutions before them: 6 additions, 12 activations",
        "blocks.0 and 1 more: within the convolutions before them: 3 additions, 6 activations",
    )
    assert isinstance(model.blocks, nn.Sequential)
    assert len(model.blocks) == 2
    torch.testing.assert_close(model(images()), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_nothing_to_fuse() -> None:
    model = quantized(nn.Sequential(nn.Conv2d(16, 16, 1), nn.GELU()))
    assert type(hb.fuse_(model)) is nn.Sequential
    hooked = quantized(_Block())
    hooked.act.register_forward_hook(lambda *_: None)
    assert type(hb.fuse_(hooked)) is _Block
    assert hb.report(hooked).notes == ("nothing is fused into its own convolutions: act in it has hooks or a forward of its own",)


class _Branches(_Block):
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) if x.sum() > 0 else x


class _TwoInputs(_Block):
    def forward(self, x: Tensor, y: Tensor | None = None) -> Tensor:  # type: ignore[override]
        return super().forward(x)


@pytest.mark.parametrize(
    ("kind", "reason"),
    [(_Branches, "torch.fx cannot trace it (symbolically traced variables"), (_TwoInputs, "its forward takes more than one tensor")],
)
def test_the_report_says_why_nothing_is_fused(kind: type[_Block], reason: str) -> None:
    (note,) = hb.report(hb.fuse_(quantized(kind()))).notes
    assert note.startswith(f"nothing is fused into its own convolutions: {reason}")
    (note,) = hb.report(hb.fuse_(quantized(_Block()).train())).notes
    assert note == "nothing is fused into its own convolutions: it is in training mode"


def test_the_report_says_that_batch_norms_were_not_folded() -> None:
    model = nn.Sequential(nn.Conv2d(16, 16, 3), nn.BatchNorm2d(16), nn.ReLU())
    (note,) = hb.report(hb.fuse_(quantized(copy.deepcopy(model)))).notes
    assert note == "torch computes the batch norms behind 1 convolutions: call fold_batch_norms_ before quantize_"
    notes = hb.report(hb.fuse_(quantized(hb.fold_batch_norms_(model.eval())))).notes
    assert notes == ("within the convolutions before them: 0 additions, 1 activations", "1: folded into the layer before")


@torch.no_grad()
def test_modules_that_are_replaced_are_fused_anew(both: tuple[nn.Module, nn.Module]) -> None:
    model, fused = both
    for replaced in (nn.Conv2d(16, 16, 1), quantized(nn.Sequential(nn.Conv2d(16, 16, 1)))[0]):  # type: ignore[index]
        model.c = fused.c = replaced
        model.short = fused.short = nn.GELU()
        torch.testing.assert_close(fused(images()), model(images()), rtol=1e-5, atol=1e-5)
    assert "within the convolutions before them: 3 additions, 5 activations" in hb.report(fused).notes


class _Writes(nn.Module):
    """What is called y before shows the sum too."""

    def __init__(self, name: str) -> None:
        super().__init__()
        self.a, self.b, self.same, self.name = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 1), nn.Identity(), name

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x).relu()
        names = {"same": lambda: x, "module": lambda: self.same(x), "view": lambda: x[:, 8:], "another": lambda: x + 0, "out": lambda: x}
        y = names[self.name]()
        if self.name == "out":
            torch.add(x, self.b(x), out=x)
        else:
            x += self.b(x)
        return y * 2


@pytest.mark.parametrize("name", ["same", "module", "view", "another", "out"])
@torch.no_grad()
def test_sums_that_are_written_into_something(name: str) -> None:
    model, x = _Writes(name).eval(), images()
    wanted = model(x)
    on_codes, static = copy.deepcopy(model), hb.Config("int8_channel", activations="static")
    refused = {
        "view": r"^iadd writes to memory that getitem shows too .* in place",
        "out": r"^add writes into other memory \(out=\)",
    }
    if name in refused:
        with pytest.raises(UnsupportedError, match=refused[name]):
            hb.quantize_(on_codes, static, [x])
    else:
        assert float((hb.quantize_(on_codes, static, [x])(x) - wanted).norm() / wanted.norm()) < 0.05  # .3 where y is x before
    quantized(model)
    wanted = model(x)
    assert "1 activations" in str(hb.report(hb.fuse_(model)))
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_a_dropout_that_is_active_in_evaluation_drops() -> None:
    model, x = quantized(nn.Sequential(nn.Conv2d(16, 16, 1), nn.ReLU(), nn.Dropout(0.5))), images()
    wanted = model(x)
    assert "1 activations" in str(hb.report(hb.fuse_(model)))
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)
    model[2].train()  # Monte Carlo dropout
    torch.manual_seed(0)
    share = float((model(x) == 0).float().mean() - (wanted == 0).float().mean())
    assert share > 0.1  # of some half of the other half
    model[2].eval()
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)


class _WritesToView(nn.Module):
    """A sum of an image that is written to by way of a view, after the convolution and before the addition."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(16, 16, 1), nn.Conv2d(16, 16, 3, padding=1)

    def forward(self, x: Tensor) -> Tensor:
        y = self.a(x)
        view = y.flatten(2)
        z = self.b(x)
        view.relu_()
        return torch.relu(z + y)


@torch.no_grad()
def test_what_is_written_to_before_the_addition_is_not_a_residual() -> None:
    model = quantized(_WritesToView())
    expected = model(images())
    # One rounding of a sum less: within two units of float32's last place of sums below 64.
    torch.testing.assert_close(hb.fuse_(copy.deepcopy(model))(images()), expected, rtol=0, atol=64 * 2.0**-22)

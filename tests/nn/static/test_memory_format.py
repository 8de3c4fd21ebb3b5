"""Memory formats: a convolution's result is laid out as torch's own is, so that code behind it, such as a flatten by `view`, runs on; and
within an optimized network no convolution copies what another one gives it."""

import copy
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch._prims_common import suggest_memory_format
from torch._subclasses.fake_tensor import FakeTensorMode

import halfbyte as hb
from halfbyte.nn.static.memory_format import restore
from halfbyte.ops.conv import functions as conv
from halfbyte.ops.conv.images import is_channels_last

CHANNELS_LAST = {"memory_format": torch.channels_last}


def laid_out(x: Tensor) -> Iterator[Tensor]:
    """The same images in all kinds of memory formats."""
    wide = torch.cat((x, x), 1)
    yield from (x, x.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2), x.contiguous(**CHANNELS_LAST))  # type: ignore[call-overload]
    yield from (wide[:, : x.shape[1]], wide.permute(0, 2, 3, 1).contiguous().permute(0, 3, 1, 2)[:, : x.shape[1]])
    yield from (x.transpose(2, 3).contiguous().transpose(2, 3), x.transpose(0, 1).contiguous().transpose(0, 1))
    b, c, h, w = x.shape
    yield torch.empty_strided(x.shape, (h * w * c, 1, w * c, c)).copy_(x)  # also where sizes of 1 leave strides open
    yield x[:1].expand(b, c, h, w)


SIZES = [(2, 8, 5, 6), (1, 8, 5, 6), (2, 8, 1, 1), (2, 1, 5, 6), (2, 1, 1, 1), (2, 8, 1, 6), (2, 8, 5, 1)]


@pytest.mark.parametrize("size", SIZES)
@torch.no_grad()
def test_a_convolution_has_the_strides_of_torch(size: tuple[int, ...]) -> None:
    torch.manual_seed(0)
    for out in (1, 16):
        layer = nn.Conv2d(size[1], out, 3, padding=1)
        packed = hb.pack_conv(hb.quantize_conv(layer.weight, "int8_channel"), (3, 3))
        scales = {"in_scale": 0.02, "in_zero": 3, "out_scale": 0.05, "out_zero": 1}
        for x in laid_out(torch.randn(size)):
            wanted = layer(x)
            assert is_channels_last(x) == (suggest_memory_format(x) is torch.channels_last)
            assert hb.conv2d(x, packed, layer.bias, 1, 1).stride() == wanted.stride()
            codes = torch.empty_strided(x.shape, x.stride(), dtype=torch.int8).fill_(1)
            assert hb.qconv2d(codes, packed, layer.bias, 1, 1, **scales).stride() == wanted.stride()  # type: ignore[arg-type]
            assert hb.conv2d(x[0], packed, layer.bias, 1, 1).stride() == layer(x[0]).stride()


@torch.no_grad()
def test_a_convolution_of_lines_is_contiguous() -> None:
    layer = nn.Conv1d(8, 16, 3, padding=1)
    packed = hb.pack_conv(hb.quantize_conv(layer.weight, "int8_channel"), (3,))
    x = torch.randn(2, 8, 9)
    for lines in (x, x.mT.contiguous().mT, x[:, :, ::2], x[0], x[:, :, :1]):
        assert hb.conv1d(lines, packed, layer.bias, 1, 1).stride() == layer(lines).stride()


@pytest.mark.parametrize("size", SIZES)
def test_fake_kernels_have_the_strides_of_real_ones(size: tuple[int, ...]) -> None:
    packed = hb.pack_conv(hb.quantize_conv(torch.randn(16, size[1], 3, 3), "int8_channel"), (3, 3))
    numbers = 1, 1, 1, 1, 1, 1, 1, 1
    float_settings = (packed.name, packed.numbers, numbers, "auto", "block", None, None)
    table = hb.ops.conv.functions.conv_requantization_table(packed, None, in_scale=0.1, in_zero=0, out_scale=0.1, out_zero=0)
    calls: list[Callable[[Tensor, Callable[[Tensor], Tensor]], Tensor]] = [
        lambda x, to: torch.ops.halfbyte.conv2d.default(x, to(packed.data), None, None, *float_settings),
        lambda x, to: torch.ops.halfbyte.combine.default(x, 3.0, 1.0, torch.int8, None, 0.0, -128.0, 127.0),
        lambda x, to: torch.ops.halfbyte.qconv2d.default(
            x.to(torch.int8), to(packed.data), to(table), packed.name, packed.numbers, numbers, 0, -128, 127
        ),
    ]
    for x in laid_out(torch.randn(size)):
        for call in calls:
            real = call(x, lambda tensor: tensor)
            with FakeTensorMode() as mode:
                fake = call(mode.from_tensor(x), mode.from_tensor)
            assert (fake.shape, fake.dtype) == (real.shape, real.dtype)
            moved = [i for i, n in enumerate(real.shape) if n > 1 or real.dtype == torch.float32]  # torch.empty_like leaves others open
            assert [fake.stride(i) for i in moved] == [real.stride(i) for i in moved]


class _Classic(nn.Module):
    """The commonest of small networks, for images in any memory format."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.pool = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 32, 3), nn.MaxPool2d(2)
        self.c, self.head = nn.Conv2d(32, 16, 1), nn.Linear(16 * 9, 5)

    def features(self, x: Tensor) -> Tensor:
        x = self.pool(torch.relu(self.a(x)))
        return self.c(torch.nn.functional.silu(self.b(x)))  # type: ignore[no-any-return]

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.features(x)
        return y, self.head(y.flatten(1))


class _Flattened(_Classic):
    """Its features are flattened by `view`, as most are: for contiguous images alone."""

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.features(x)
        return y, self.head(y.view(x.size(0), -1))


class _Lines(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.head = nn.Conv1d(3, 16, 3), nn.Conv1d(16, 8, 3), nn.Linear(8 * 6, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.b(torch.nn.functional.gelu(self.a(x)))
        return y, self.head(y.view(x.size(0), -1))


def _qat(config: hb.Config) -> Callable[[nn.Module, Tensor], nn.Module]:
    return lambda model, _: hb.prepare_qat_(model, config)


WAYS: dict[str, Callable[[nn.Module, Tensor], nn.Module]] = {
    "weights": lambda model, _: hb.quantize_(model, hb.Config("int8_channel", compute="float")),
    "blocks": lambda model, _: hb.quantize_(model, hb.Config("q4_0")),
    "dynamic": lambda model, _: hb.quantize_(model, hb.Config("int8_channel", compute="int8", activation="row")),
    "of images": lambda model, _: hb.quantize_(model, hb.Config("int8_channel", activation="image")),
    "static": lambda model, x: hb.quantize_(model, hb.Config("int8_channel", activations="static"), [x]),
    "optimized": lambda model, _: hb.fuse_(hb.quantize_(model, "int8_channel")),
    "training": _qat(hb.Config("int8_channel", compute="float")),
    "training of rows": _qat(hb.Config("int8_channel", compute="int8", activation="row")),
    "training of images": _qat(hb.Config("int8_channel", compute="int8", activation="image")),
    "converted": lambda model, _: hb.convert_qat_(hb.prepare_qat_(model, "int8_channel")),
}


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize("lines", [False, True])
@torch.no_grad()
def test_what_leaves_a_network_is_laid_out_as_without_it(way: str, lines: bool) -> None:
    torch.manual_seed(0)
    model = (_Lines() if lines else _Flattened()).eval()
    x = torch.randn(2, 3, 10) if lines else torch.randn(2, 3, 10, 10)
    built = WAYS[way](copy.deepcopy(model), x)
    for _ in range(3):  # static networks: node by node, then as programs
        for wanted, got in zip(model(x), built(x), strict=True):
            assert got.stride() == wanted.stride()
            assert float((got - wanted).norm() / wanted.norm()) < (0.3 if way == "blocks" else 0.05)
    if not lines:  # channels_last in, channels_last out
        model, images = _Classic().eval(), x.contiguous(memory_format=torch.channels_last)
        built = WAYS[way](copy.deepcopy(model), x)
        for some in (images, images, x, images):
            assert [y.stride() for y in built(some)] == [y.stride() for y in model(some)]


@torch.no_grad()
def test_under_torch_compile_and_export() -> None:
    x = torch.randn(2, 3, 10, 10)
    built = WAYS["optimized"](_Flattened().eval(), x)
    compiled = torch.compile(built, fullgraph=True, backend="aot_eager")
    for wanted, got in zip(built(x), compiled(x), strict=True):
        assert got.stride() == wanted.stride()
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    sizes = {i: torch.export.Dim(name, min=4, max=64) for i, name in ((0, "batch"), (2, "height"), (3, "width"))}
    layer = WAYS["weights"](nn.Sequential(nn.Conv2d(3, 8, 3)), x)
    exported = torch.export.export(layer, (torch.randn(5, 3, 10, 10),), dynamic_shapes=({0: sizes[0], 2: sizes[2], 3: sizes[3]},)).module()
    y = exported(torch.randn(7, 3, 9, 5))
    assert y.shape == (7, 8, 7, 3)
    assert y.is_contiguous()


@pytest.fixture
def formats(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Of each convolution's input: whether it is channels_last."""
    seen: list[bool] = []
    for name in ("conv2d", "qconv2d_with"):
        run: Any = getattr(conv, name)

        def noted(x: Tensor, *others: Any, run: Any = run, **more: Any) -> Tensor:
            seen.append(is_channels_last(x))
            return run(x, *others, **more)  # type: ignore[no-any-return]

        monkeypatch.setattr(conv, name, noted)
    return seen


@pytest.mark.parametrize("way", ["static", "optimized"])
@torch.no_grad()
def test_no_convolution_copies_what_another_gives_it(way: str, formats: list[bool]) -> None:
    x = torch.randn(2, 3, 10, 10)
    built = WAYS[way](_Flattened().eval(), x)
    formats.clear()
    built(x)
    assert formats == [False, True, True]


@torch.no_grad()
def test_a_chain_without_anything_else_to_fuse(formats: list[bool]) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.SiLU(), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 4, 1)).eval()
    x = torch.randn(1, 3, 9, 9)
    wanted = hb.quantize_(model, hb.Config("int8_channel", compute="float"))(x)
    hb.fuse_(model)
    formats.clear()
    torch.testing.assert_close(model(x), wanted, rtol=1e-5, atol=1e-5)  # of float32, in the same order
    assert formats == [False, True, True]
    assert hb.report(model).notes == ("in channels_last from one convolution to the next: 2 convolutions",)


class _Parted(nn.Module):
    """Results that are parted, read by size, and handed to what torch does in one memory format only."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c, self.norm = nn.Conv2d(3, 16, 1), nn.Conv2d(8, 8, 3, padding=1), nn.Conv2d(8, 4, 1), nn.LayerNorm(6)

    def forward(self, x: Tensor) -> tuple[Any, ...]:
        first, second = self.a(x).chunk(2, 1)
        y = torch.cat((self.b(first) * 2 + second, self.b(second)[:, :4]), 1)
        z = self.norm(self.c(first))
        return y.view(-1), z, self.c(second).split(2, 1), y.shape[1], self.a(x).unfold(2, 3, 1)


class _Written(nn.Module):
    """What is written to in place is shown by views."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.SiLU(inplace=True)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y = self.a(x)
        view = y.view(-1)
        y += self.b(y)
        z = self.b(self.act(self.b(y)))
        z[:, 0] = 1
        return view * 2, z, self.b(z)


class _WrittenByFunctions(nn.Module):
    """What a function of torch writes to is read under its name of before."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Conv2d(3, 8, 3, padding=1), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 8, 1)

    def forward(self, x: Tensor) -> tuple[Tensor, ...]:
        y, z = self.b(self.a(x)), self.a(x)
        torch.sigmoid_(y)
        nn.functional.hardtanh_(z)
        return self.c(y) + y, self.c(z) + z


@pytest.mark.parametrize("kind", [_Parted, _Written, _WrittenByFunctions])
@torch.no_grad()
def test_optimized_networks_compute_the_same(kind: type[nn.Module]) -> None:
    torch.manual_seed(0)
    model = hb.quantize_(kind().eval(), hb.Config("int8_channel", compute="float"))
    fused, x = hb.fuse_(copy.deepcopy(model)), torch.randn(2, 3, 6, 6)
    got, wanted = fused(x), model(x)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert [y.stride() for y in got if isinstance(y, Tensor)] == [y.stride() for y in wanted if isinstance(y, Tensor)]


def test_what_is_restored() -> None:
    x = torch.randn(2, 8, 5, 6)
    y = x.contiguous(memory_format=torch.channels_last)
    assert [one.is_contiguous() for one in restore((y, y), x)] == [True, True]
    assert restore(y, y) is y
    assert restore(3, y) == 3


def test_gradients_in_every_memory_format() -> None:
    model = hb.fuse_(hb.quantize_(_Flattened().eval(), hb.Config("int8_channel", compute="float")))
    x, found = torch.randn(2, 3, 10, 10), []
    for network in (model, model.train()):  # fused, and layer by layer
        images = x.clone().requires_grad_()
        network(images)[1].sum().backward()
        found.append(images.grad)
    torch.testing.assert_close(found[0], found[1], rtol=1e-4, atol=1e-5)

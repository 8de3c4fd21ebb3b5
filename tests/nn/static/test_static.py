"""Networks on int8 codes: near the float network, on codes wherever that can be, and what cannot is said."""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.errors import ArgumentError, CheckpointError, UnsupportedError
from halfbyte.nn.described import Scale
from halfbyte.nn.modules.quantized import QuantLinear
from halfbyte.nn.report import CONFIG_ATTRIBUTE
from halfbyte.nn.static.integer import AveragePool, Dequantize, IntegerConv1d, IntegerConv2d, MaxPool, Quantize, Requantize


class Residual(nn.Module):
    def __init__(self, channels: int, out: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Sequential(nn.Conv2d(channels, out, 3, stride, 1, bias=False), nn.BatchNorm2d(out), nn.ReLU())
        self.second = nn.Sequential(nn.Conv2d(out, out, 3, 1, 1, bias=False), nn.BatchNorm2d(out))
        self.shortcut = nn.Sequential(nn.Conv2d(channels, out, 1, stride, bias=False), nn.BatchNorm2d(out)) if stride > 1 else nn.Identity()
        self.act = nn.ReLU()

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.second(self.first(x)) + self.shortcut(x))


class Joined(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.left, self.right = nn.Conv2d(32, 16, 1), nn.Conv2d(32, 16, 3, padding=1, groups=4)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat((self.left(x), nn.functional.max_pool2d(torch.relu(self.right(x)), 3, 1, 1)), 1)


def network(middle: nn.Module) -> nn.Sequential:
    torch.manual_seed(0)
    stem = nn.Conv2d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm2d(16), nn.ReLU6(), nn.MaxPool2d(3, 2, 1)
    body = Residual(16, 16, 1), Residual(16, 32, 2), Joined(), nn.Conv2d(32, 32, 3, 1, 1, groups=32), middle
    model = nn.Sequential(*stem, *body, nn.AvgPool2d(2, 1, 1), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Dropout(), nn.Linear(32, 10))
    for _ in range(3):
        model(images(8))
    return model.eval()


def images(count: int) -> Tensor:
    return torch.randn(count, 3, 40, 36)


def on_codes(model: nn.Module, batches: Iterable[object], **settings: object) -> nn.Module:
    return hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations="static", **settings), batches)  # type: ignore[arg-type]


def notes(model: nn.Module) -> tuple[str, ...]:
    return hb.report(model).notes


def kinds(model: nn.Module) -> list[type[nn.Module]]:
    return [type(module) for module in model.modules()]


@pytest.mark.parametrize("observer", ["minmax", "percentile", "mse"])
def test_a_network_on_codes_is_near_the_float_one(observer: str) -> None:
    model = network(nn.Identity())
    quantized = on_codes(model, [images(8) for _ in range(2)], observer=observer)
    x = images(4)
    with torch.no_grad():
        wanted, got = model(x), quantized(x)
    assert float((got - wanted).norm() / wanted.norm()) < 0.05
    assert notes(quantized) == ("6 batch norms were folded into the layers before",)
    found = kinds(quantized)
    assert found.count(Quantize) == found.count(Dequantize) == 1  # at the edges alone
    assert found.count(IntegerConv2d) == 9
    assert found.count(QuantLinear) == 1
    assert nn.BatchNorm2d not in found
    assert nn.ReLU not in found


def lines(count: int) -> Tensor:
    return torch.randn(count, 3, 120)


def network_of_lines() -> nn.Sequential:
    torch.manual_seed(1)
    model = nn.Sequential(
        nn.Conv1d(3, 16, 7, 2, 3, bias=False), nn.BatchNorm1d(16), nn.ReLU(), nn.MaxPool1d(3, 2, 1),
        nn.Conv1d(16, 32, 3, padding="same", dilation=2, groups=2), nn.ReLU6(), nn.Dropout1d(), nn.Conv1d(32, 32, 5, 1, 2, groups=32),
        nn.AvgPool1d(2, 1, 1), nn.Conv1d(32, 8, 1), nn.AdaptiveAvgPool1d(4), nn.Flatten(), nn.Linear(32, 10),
    )  # fmt: skip
    for _ in range(3):
        model(lines(8))
    return model.eval()


def test_a_network_of_lines_is_on_codes_too(tmp_path: Path) -> None:
    model, x = network_of_lines(), lines(4)
    quantized = on_codes(model, [lines(8) for _ in range(2)])
    with torch.no_grad():
        assert float((quantized(x) - model(x)).norm() / model(x).norm()) < 0.05
    assert notes(quantized) == ("1 batch norm was folded into the layers before",)
    found = kinds(quantized)
    assert found.count(Quantize) == found.count(Dequantize) == 1
    assert found.count(IntegerConv1d) == 4
    assert hb.report(quantized).rows[0].kind == "Conv1d"
    hb.save(quantized, tmp_path / "a")
    for floats in (network_of_lines(), network_of_lines().to("meta")):
        assert torch.equal(hb.load(tmp_path / "a", model=floats)(x), quantized(x))


def test_a_convolution_of_lines_is_that_of_images_of_one_line() -> None:
    for module in (
        nn.Conv1d(8, 16, 5, 3, 2, 2),
        nn.Conv1d(8, 16, 3, padding="same", dilation=3),
        nn.Conv1d(8, 8, 3, padding="valid", groups=8),
    ):
        x = torch.randn(2, 8, 40)
        built = on_codes(nn.Sequential(module).eval(), [x])
        layer = next(m for m in built.modules() if isinstance(m, IntegerConv1d))
        codes = Quantize(layer.source)(x)
        side = {(2,): 2, "same": 3, "valid": 0}[module.padding]
        window = {"stride": (1, module.stride[0]), "padding": (0, side), "dilation": (1, module.dilation[0])}
        wanted = hb.qconv2d(
            codes.unsqueeze(2), layer.packed, layer.bias, **window, in_scale=layer.source.step, in_zero=layer.source.zero,
            out_scale=layer.result.step, out_zero=layer.result.zero, clamp=layer.clamp,
        )  # fmt: skip
        assert torch.equal(layer(codes), wanted.squeeze(2))


def test_what_has_no_codes_runs_in_floating_point_and_is_named() -> None:
    model = network(nn.GELU())
    quantized = on_codes(model, [images(8)])
    assert len(notes(quantized)) == 2
    assert notes(quantized)[1] == "8 (GELU) runs in floating point"
    x = images(2)
    with torch.no_grad():
        assert float((quantized(x) - model(x)).norm() / model(x).norm()) < 0.05


class _Functions(nn.Module):
    """The same network with functions for modules."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Conv2d(3, 16, 3, padding=1), nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        y = nn.functional.hardtanh(self.a(input=x), 0.0, 6.0)
        y = nn.functional.avg_pool2d(nn.functional.relu6(self.b(y)), 3, stride=2, count_include_pad=False)
        return nn.functional.adaptive_avg_pool2d(y, 1)


def test_functions_are_on_codes_as_modules_are() -> None:
    model, x = _Functions(), images(4)
    modules = nn.Sequential(model.a, nn.ReLU6(), model.b, nn.ReLU6(), nn.AvgPool2d(3, 2, count_include_pad=False), nn.AdaptiveAvgPool2d(1))
    quantized = on_codes(model, [x])
    assert notes(quantized) == ()
    assert torch.equal(quantized(x), on_codes(modules, [x])(x))


def test_what_a_function_parts_is_concatenated() -> None:
    class Parted(nn.Sequential):
        def forward(self, x: Tensor) -> Tensor:
            return torch.cat(tensors=self[0](x).chunk(2, 1), dim=1)

    conv, x = nn.Conv2d(3, 8, 3), images(2)
    built = on_codes(Parted(conv), [x])
    assert "cat (cat) runs in floating point" in notes(built)
    assert torch.equal(built(x), on_codes(nn.Sequential(conv), [x])(x))


class _Enlarged(nn.Module):
    """An image, twice enlarged by the same module, and of another size."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.conv, self.up, self.mode = nn.Conv2d(3, 8, 3), nn.Upsample(scale_factor=(2, 3), mode=mode), mode

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        x = torch.relu(self.conv(x))
        return x, self.up(self.up(x)), nn.functional.interpolate(x, (9, 40), mode=self.mode)


@pytest.mark.parametrize("mode", ["nearest", "nearest-exact"])
@torch.no_grad()
def test_codes_are_enlarged_as_their_numbers_are(mode: str) -> None:
    model = _Enlarged(mode).eval()
    built = on_codes(copy.deepcopy(model), [images(2)])
    assert notes(built) == ()
    for _ in range(3):  # node by node, and as programs
        x, twice, other = built(images(2))
        assert torch.equal(twice, model.up(model.up(x)))
        assert torch.equal(other, nn.functional.interpolate(x, (9, 40), mode=mode))
    assert notes(on_codes(_Enlarged("bilinear").eval(), [images(2)])) != ()


class _Sized(nn.Module):
    """Sizes are numbers that the network computes, as in a ViT."""

    def __init__(self) -> None:
        super().__init__()
        self.patches, self.mlp = nn.Conv2d(3, 16, 4, 4), nn.Linear(16, 8)

    def forward(self, x: Tensor) -> Tensor:
        count, _, height, width = x.shape
        return self.mlp(self.patches(x).reshape(count, 16, (height // 4) * (width // 4)).permute(0, 2, 1))  # type: ignore[no-any-return]


@torch.no_grad()
def test_sizes_are_computed() -> None:
    model, x = _Sized().eval(), images(4)
    quantized = on_codes(model, [x])
    for some in (x, x, x[:2]):
        assert float((quantized(some) - model(some)).norm() / model(some).norm()) < 0.05


class _InPlace(nn.Module):
    """The shortcuts read what activations have written into their inputs."""

    def __init__(self, act: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.a, self.b, self.act = nn.Conv2d(3, 16, 3), nn.Conv2d(16, 16, 3, padding=1), act

    def forward(self, x: Tensor) -> Tensor:
        x = self.a(x)
        return self.b(self.act(x)) * 0.1 - x


ACTIVATIONS = (
    *(nn.ReLU(inplace=True), nn.Hardswish(inplace=True)),
    *(torch.relu_, partial(torch.clamp_, min=0, max=1), nn.functional.hardtanh_, partial(nn.functional.relu6, inplace=True)),
)


@pytest.mark.parametrize("act", ACTIVATIONS)
@torch.no_grad()
def test_what_is_written_in_place_is_read_behind(act: Callable[[Tensor], Tensor]) -> None:
    model, x = _InPlace(act).eval(), images(4)
    wanted = model(x)
    assert float((on_codes(model, [x])(x) - wanted).norm() / wanted.norm()) < 0.05  # 1 where the shortcut reads what was there before


def test_a_result_without_bounds_stays_in_floating_point() -> None:
    class Masked(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(8, 8), nn.Linear(8, 8)

        def forward(self, x: Tensor) -> Tensor:
            return self.last(torch.relu(self.first(x).masked_fill(x > 0, -torch.inf)))

    model, x = Masked().eval(), torch.randn(64, 8)
    with torch.no_grad():
        wanted = model(x)
        for scale in (1.0, 1e-40):
            got = on_codes(model, [x * scale])(x * scale)
            # 8 bits a weight and an activation; with values too small for a scale, the bias is left.
            assert float((got - wanted).norm() / wanted.norm()) < 0.05 or scale < 1
            assert torch.isfinite(got).all()


def test_a_norm_of_rows_is_not_taken_for_one_of_features() -> None:
    with pytest.raises(UnsupportedError, match=r"0 gives \[2, 8, 8\], whose batch norm is one of rows"):
        on_codes(nn.Sequential(nn.Linear(4, 8), nn.BatchNorm1d(8)).eval(), [torch.randn(2, 8, 4)])


def test_a_layer_that_is_skipped_runs_in_floating_point() -> None:
    model = network(nn.Identity())
    quantized = on_codes(model, [(images(8), torch.zeros(8))], skip=["13", "4.first.*"])
    rows = {row.name: row.reason for row in hb.report(quantized).kept}
    assert rows == {"4.first.0": "skip pattern '4.first.*'", "13": "skip pattern '13'"}
    assert "13 (Linear) runs in floating point: skip pattern '13'" in notes(quantized)
    x = images(2)
    with torch.no_grad():
        assert float((quantized(x) - model(x)).norm() / model(x).norm()) < 0.05


def test_the_model_is_replaced_in_place() -> None:
    inner = network(nn.Identity())
    outer = nn.ModuleDict({"inner": inner})
    hb.quantize_(inner, hb.Config("int8_channel", activations="static"), images(4))
    assert outer["inner"] is inner
    assert IntegerConv2d in kinds(outer)
    assert all(row.format is not None for row in hb.report(inner).rows)


def test_a_failure_leaves_the_model_as_it_was() -> None:
    model = network(nn.Identity())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError):
        hb.quantize_(model, hb.Config("int8_channel", activations="static"), [torch.zeros(1, 5, 9, 9)])
    assert type(model) is nn.Sequential
    assert all(torch.equal(a, b) for a, b in zip(before.values(), model.state_dict().values(), strict=True))


def test_what_is_saved_loads_as_it_was(tmp_path: Path) -> None:
    quantized, x = on_codes(network(nn.GELU()), [images(8)], skip=["13"]), images(2)
    hb.save(quantized, tmp_path / "a")
    floats = network(nn.GELU())
    for model in (floats, network(nn.GELU()).to("meta"), copy.deepcopy(quantized)):
        loaded = hb.load(tmp_path / "a", model=model)
        assert loaded is model
        assert torch.equal(loaded(x), quantized(x))
    with pytest.raises(CheckpointError, match="pass that, load"):
        hb.load(tmp_path / "a")
    with pytest.raises(CheckpointError, match="other scales than the model"):
        hb.load(tmp_path / "a", model=on_codes(network(nn.GELU()), [images(2)]))
    other = nn.Sequential(nn.Conv2d(3, 16, 3)).eval()
    with pytest.raises(CheckpointError, match="has no result"):
        hb.load(tmp_path / "a", model=other)
    assert type(other) is nn.Sequential


def test_a_state_dict_takes_weights_along() -> None:
    quantized, x = on_codes(network(nn.Identity()), [images(8)]), images(2)
    other = copy.deepcopy(quantized)
    for module in other.modules():
        if isinstance(module, IntegerConv2d):
            module.load_state_dict({name: torch.zeros_like(t) for name, t in module.state_dict().items()})
    assert not torch.equal(other(x), quantized(x))
    other.load_state_dict(quantized.state_dict())
    assert torch.equal(other(x), quantized(x))


def test_it_compiles() -> None:
    quantized = on_codes(network(nn.Identity()), [images(4)])
    x = images(2)
    with torch.no_grad():
        assert torch.equal(torch.compile(quantized, fullgraph=True, backend="aot_eager")(x), quantized(x))


def test_a_scale_has_a_code_for_zero() -> None:
    for low, high in ((-1.0, 3.0), (0.5, 2.0), (-4.0, -1.0), (0.0, 0.0), (-1e-9, 0.0)):
        scale = Scale.of_range(low, high)
        assert -128 <= scale.zero <= 127
        for end in (low, high, 0.0):
            assert abs((scale.code(end) - scale.zero) * scale.step - end) <= 0.5001 * scale.step
    assert Scale(0.1, 3).code(float("inf")) == 127
    assert Scale(0.1, 3).code(float("-inf")) == -128


def test_codes_are_added_as_their_numbers_are() -> None:
    a, b, result = Scale(0.02, -3), Scale(0.05, 7), Scale(0.06, 1)
    x, y = (torch.randint(-128, 128, (3, 5, 4, 4), dtype=torch.int8) for _ in range(2))
    got = Requantize((a, b), result, (-100, 90))(x.contiguous(memory_format=torch.channels_last), y)
    real = (x.double() - a.zero) * a.step + (y.double() - b.zero) * b.step
    wanted = (real / result.step + result.zero).clamp(-100, 90)
    assert float((got.double() - wanted).abs().max()) <= 0.5 + 1e-4


def test_the_largest_codes_are_those_of_torch() -> None:
    for channels, settings in ((1, (2,)), (17, (3, 2, 1)), (40, ((2, 3), (1, 2), (1, 0), (2, 1))), (130, (3, 3, 1, 2, False, True))):
        pool = nn.MaxPool2d(*settings)  # type: ignore[arg-type]
        for memory_format in (torch.contiguous_format, torch.channels_last):
            x = torch.randint(-128, 128, (2, channels, 9, 11), dtype=torch.int8).contiguous(memory_format=memory_format)
            assert torch.equal(MaxPool(pool)(x), pool(x.float()).to(torch.int8))
    with pytest.raises(RuntimeError, match="at most half"):
        MaxPool(nn.MaxPool2d(2, padding=2))(x)


def test_a_mean_whose_sum_int32_does_not_hold() -> None:
    side = 2902  # 255 * side^2 > 2^31
    x = torch.full((1, 1, side, side), 127, dtype=torch.int8)
    assert AveragePool(nn.AdaptiveAvgPool2d(1), Scale(1.0, -128))(x).item() == 127


def test_nan_becomes_the_least_code() -> None:
    x = torch.tensor([float("nan"), float("inf"), -float("inf"), 0.0])
    assert Quantize(Scale(0.1, 5))(x).tolist() == [-128, 127, -128, 5]


@pytest.mark.parametrize(
    ("settings", "words"),
    [
        ({"calibration": []}, "no calibration images"),
        ({"calibration": [{"x": 1}]}, r"got a dict of x: pass the images alone, such as \(batch"),
        ({"calibration": [images(1) * float("nan")]}, "hold numbers from nan to nan"),
        ({"calibration": [images(1).double()]}, "calibration takes images of float32, bfloat16 or float16, got torch.float64: convert"),
        ({"calibration": [images(1) * 1e30]}, "hold numbers from -"),
        (
            {"calibration": [images(1).to(torch.uint8)]},
            r"fails for calibration images of torch.uint8 \(.*: pass what it takes, such as images",
        ),
        ({"calibration": None}, "needs calibration, which was not given: pass calibration=images"),
        ({"calibration": 3}, "takes batches of images, got int: pass a DataLoader"),
        ({"calibration": hb.Calibration(torch.ones(1, 32, dtype=torch.int64))}, "takes batches of images, got halfbyte.Calibration"),
        ({"method": "awq"}, "has no use for awq"),
        ({"format": "q4_0"}, "one scale|a scale per channel"),
        ({"observer": "best"}, "observer is one of"),
        ({"activations": "fixed"}, "activations is one of"),
    ],
)
def test_bad_arguments(settings: dict[str, object], words: str) -> None:
    arguments: dict[str, Any] = {"format": "int8_channel", "activations": "static", "calibration": [images(1)]} | settings
    calibration = arguments.pop("calibration")
    with pytest.raises(ArgumentError, match=words):
        hb.quantize_(network(nn.Identity()), hb.Config(**arguments), calibration)


@pytest.mark.parametrize(
    ("built", "got"),
    [
        (Tensor.double, " of float32, bfloat16 or float16, got torch.float64: convert them first"),
        (Tensor.byte, " of float32, bfloat16 or float16, got torch.uint8: convert them first"),
        (Tensor.numpy, r", got numpy.ndarray: pass torch.as_tensor\(x\)"),
    ],
)
def test_images_of_another_type_are_named_as_the_users(built: Callable[[Tensor], Any], got: str) -> None:
    model = on_codes(network(nn.Identity()), [images(1)])
    for _ in range(3):  # node by node, then programs
        with pytest.raises(ArgumentError, match=f"^a network on int8 codes takes tensors{got}$"):
            model(built(images(1)))
        model(images(1))


def test_images_of_the_config() -> None:
    seen, model = images(2), network(nn.ReLU())
    by_config = hb.quantize_(copy.deepcopy(model), hb.Config("int8_channel", activations="static", calibration=[seen]))
    assert torch.equal(by_config(seen), on_codes(model, [seen])(seen))
    assert getattr(by_config, CONFIG_ATTRIBUTE).calibration is None, "the model would keep the images"


def test_a_model_on_disk_is_not_traced(tmp_path: Path) -> None:
    static = hb.Config("int8_channel", activations="static")
    for act in (lambda: hb.convert(tmp_path, tmp_path / "q", static, images(1)), lambda: hb.HalfbyteConfig(static, calibration=images(1))):
        with pytest.raises(UnsupportedError, match=r"in memory: use quantize_\(model, config, calibration=images\)"):
            act()

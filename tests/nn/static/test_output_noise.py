"""Results whose codes would be seen in the outputs stay in floating point, and the report says which."""

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

import halfbyte as hb
from halfbyte.nn.described import Scale
from halfbyte.nn.static import build
from halfbyte.nn.static.output_noise import output_noise
from halfbyte.nn.static.prepare import prepare
from halfbyte.nn.static.ranges import rounding_error


class _ClassToken(nn.Module):
    """A class token that is a thousand times smaller than the tokens of the image, and a norm that makes it as large as they are."""

    def __init__(self) -> None:
        super().__init__()
        self.patches = nn.Conv2d(3, 32, 4, 4)
        self.token = nn.Parameter(torch.randn(1, 1, 32) * 0.01)
        self.mix, self.norm, self.mlp, self.head = nn.Linear(32, 32), nn.LayerNorm(32), nn.Linear(32, 32), nn.Linear(32, 10)

    def forward(self, x: Tensor) -> Tensor:
        tokens = self.patches(x).flatten(2).transpose(1, 2) * 10
        x = torch.cat((self.token + 0.01 * tokens.mean(1, keepdim=True), tokens), 1)
        x = x + 0.001 * torch.relu(self.mix(self.norm(x)))
        return self.head(torch.relu(self.mlp(self.norm(x)[:, 0])))  # type: ignore[no-any-return]


def images(seed: int) -> Tensor:
    return torch.randn(4, 3, 16, 16, generator=torch.Generator().manual_seed(seed))


@torch.no_grad()
def test_a_class_token_smaller_than_a_step_of_codes_is_kept(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = _ClassToken().eval()
    x, expected = images(1), model(images(1))
    network = hb.quantize_(_copy(model), hb.Config("int8_channel", activations="static"), [images(0)])
    # Each result adds at most 10 %, five of them remain. Codes of all: 1.3.
    assert float((network(x) - expected).norm() / expected.norm()) < 0.1 * 5**0.5
    notes = [note for note in hb.report(network).notes if "relative error" in note]
    assert any(note.startswith("cat (cat) runs in floating point: quantizing cat to int8 would add") for note in notes)
    hb.save(network, tmp_path / "saved")
    loaded = hb.load(tmp_path / "saved", model=_copy(model))
    assert torch.equal(loaded(x), network(x))
    assert hb.report(loaded).notes == hb.report(network).notes


def test_noise_is_measured_in_inference_mode_too() -> None:
    torch.manual_seed(0)
    with torch.inference_mode():
        model = _ClassToken().eval()  # its parameters are inference tensors
        x, expected = images(1), model(images(1))
        network = hb.quantize_(model, hb.Config("int8_channel", activations="static"), [images(0)])
        assert float((network(x) - expected).norm() / expected.norm()) < 0.1 * 5**0.5


def _copy(model: nn.Module) -> nn.Module:
    copied = type(model)().eval()
    copied.load_state_dict(model.state_dict())
    return copied


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_the_noise_of_a_linear_network_is_that_of_its_codes(dtype: torch.dtype) -> None:
    """y = W₂ W₁ x has no other order than the first, so that the mean over probes is |W₂ e|² / |y|², for e the error of W₁ x."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(16, 16), nn.Linear(16, 4000)).to(dtype)
    traced, x = prepare(model).traced, torch.randn(1, 16, dtype=dtype)
    scale = Scale.of_range(-4, 4)
    noise = output_noise(traced, {"_0": scale}, x)
    with torch.no_grad():
        middle = model[0](x)
        output_error = rounding_error(middle, scale) @ model[1].weight.float().T
        expected = float(output_error.square().sum() / model(x).float().square().sum())
    assert expected / 4 < noise["_0"] ** 2 < expected * 4  # the mean of four probes, whose squares have a relative deviation of sqrt(2)


def test_results_that_are_written_to_are_measured_as_they_were() -> None:
    class Writes(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            y = x * 2
            y += 1
            return y.relu_() * x

    traced = prepare(Writes()).traced
    noise = output_noise(traced, {name: Scale.of_range(-1, 1) for name in ("mul", "iadd", "relu_")}, torch.rand(2, 8))
    assert noise.keys() == {"mul", "iadd", "relu_"}
    assert all(0 < value < 10 for value in noise.values())


def test_noise_is_relative_to_the_mean_power_of_the_images() -> None:
    """The last image's output is almost 0, where its own relative error would be huge. Probes of one output are exact."""
    torch.manual_seed(0)
    first, second = nn.Linear(16, 16, bias=False), nn.Linear(16, 1, bias=False)
    model = nn.Sequential(first, second)
    x, scale = torch.randn(4, 16), Scale.of_range(-4, 4)
    with torch.no_grad():
        row = second.weight @ first.weight
        x[3] -= (x[3] @ row.T) / row.square().sum() * row[0] * 0.99999
        output_error = rounding_error(first(x), scale) * second.weight
        power = torch.maximum(output_error.sum(1).square(), output_error.square().sum(1)).sum()
        expected = float((power / model(x).square().sum()).sqrt())
    assert output_noise(prepare(model).traced, {"_0": scale}, x)["_0"] == pytest.approx(expected, rel=1e-3)


def test_an_output_with_a_large_error_is_not_hidden_by_others() -> None:
    class ManyOutputs(nn.Module):
        def forward(self, x: Tensor) -> list[Tensor]:
            y = x * 1
            return [y, *(y + 1000 for _ in range(7))]

    x, scale = torch.rand(4, 1000), Scale(0.5, 0)
    expected = float(rounding_error(x, scale).norm() / x.norm())
    assert output_noise(prepare(ManyOutputs()).traced, {"mul": scale}, x)["mul"] > 0.6 * expected  # the mean: 0.35


@pytest.mark.parametrize("shape", [(64, 32), (64, 8, 4)])
def test_images_run_one_by_one(shape: tuple[int, ...]) -> None:
    largest = 0

    class Sizes(TorchDispatchMode):
        def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
            nonlocal largest
            result = func(*args, **(kwargs or {}))
            if isinstance(result, Tensor) and not func.is_view:
                largest = max(largest, result.numel())
            return result

    class Scaled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return torch.relu(x * 2)

    traced, x = prepare(Scaled()).traced, torch.rand(shape)
    with Sizes():
        noise = output_noise(traced, {"mul": Scale.of_range(-1, 1)}, x)
    assert noise.keys() == {"mul"}
    assert largest == 32


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_a_sensitive_activation_is_found_in_each_dtype(dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    model = _ClassToken().eval()
    with torch.no_grad():
        for parameter in model.head.parameters():
            parameter *= 3e-5  # the inverse of the outputs is infinite in float16
    network = hb.quantize_(model.to(dtype), hb.Config("int8_channel", activations="static"), [images(0).to(dtype)])
    assert any(note.startswith("cat (cat) runs in floating point: quantizing cat") for note in hb.report(network).notes)


@torch.no_grad()
def test_the_mean_of_sparse_activations_is_kept() -> None:
    """An average pool rounds to its input's scale, whose step is larger than most means."""
    torch.manual_seed(0)
    conv = nn.Conv2d(3, 32, 3)
    conv.bias = nn.Parameter(torch.full((32,), -2.5))
    nn.init.normal_(conv.weight, std=0.2)
    model = nn.Sequential(conv, nn.ReLU(), nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10, bias=False)).eval()
    x, expected = images(1), model(images(1))
    network = hb.quantize_(model, hb.Config("int8_channel", activations="static"), [images(0)])
    note = "2 (AdaptiveAvgPool2d) runs in floating point: quantizing _2 to int8 would add"
    assert any(n.startswith(note) for n in hb.report(network).notes), hb.report(network).notes
    assert float((network(x) - expected).norm() / expected.norm()) < 0.1


class _Heaviside(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return torch.heaviside(x, x)


class _Squeezed(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.adaptive_avg_pool2d(x, 1).squeeze().softmax(1)


@pytest.mark.parametrize(
    ("tail", "reason"),
    [(_Heaviside, "derivative for aten::heaviside is not implemented"), (_Squeezed, "Dimension out of range")],
)
def test_where_noise_cannot_be_measured_the_report_says_so(tail: Callable[[], nn.Module], reason: str) -> None:
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), tail()).eval()
    expected = model(images(1))
    network = hb.quantize_(model, hb.Config("int8_channel", activations="static"), [images(0)])
    notes = [note for note in hb.report(network).notes if note.startswith("how far int8 codes change the outputs was not measured: ")]
    assert len(notes) == 1
    assert reason in notes[0]
    assert network(images(1)).shape == expected.shape


def test_without_memory_for_gradients_the_report_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def output_noise(*_: object) -> dict[str, float]:
        raise torch.OutOfMemoryError("CUDA out of memory.\nTried")

    monkeypatch.setattr(build, "output_noise", output_noise)
    network = hb.quantize_(_ClassToken().eval(), hb.Config("int8_channel", activations="static"), [images(0)])
    assert "how far int8 codes change the outputs was not measured: CUDA out of memory." in hb.report(network).notes


def test_noise_that_is_no_number_is_too_much(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "output_noise", lambda *_: {"_1": float("nan")})
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3)).eval()
    network = hb.quantize_(model, hb.Config("int8_channel", activations="static"), [images(0)])
    assert any(note.startswith("1 (ReLU) runs in floating point: quantizing _1") for note in hb.report(network).notes)


class _WritesToInput(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 8, 3))

    def forward(self, x: Tensor) -> Tensor:
        return self.body(x.sub_(0.5).div_(2))  # type: ignore[no-any-return]


@pytest.mark.parametrize("inference", [True, False])
@pytest.mark.parametrize(("method", "equalize"), [("absmax", False), ("gptq", False), ("absmax", True)])
def test_calibration_images_are_not_written_to(method: str, equalize: bool, inference: bool) -> None:
    torch.manual_seed(0)
    with torch.inference_mode(inference), torch.no_grad():
        model, x = _WritesToInput().eval(), images(0)
        expected = model(images(0))
        network = hb.quantize_(model, hb.Config("int8_channel", method, activations="static", equalize=equalize), [x])
        assert torch.equal(x, images(0))
        assert float((network(images(0)) - expected).norm() / expected.norm()) < 0.05
    assert not any("not measured" in note for note in hb.report(network).notes)


@pytest.mark.parametrize(
    ("images", "raised"),
    [(images(0).to(torch.int64), RuntimeError("expected ids")), (images(0).to(torch.uint8), torch.OutOfMemoryError("out of memory"))],
)
def test_errors_of_other_causes_than_bytes_stay_as_they_are(images: Tensor, raised: RuntimeError, monkeypatch: pytest.MonkeyPatch) -> None:
    def run(*_: object) -> None:
        raise raised

    monkeypatch.setattr(build.RangeObserver, "run", run)
    with pytest.raises(RuntimeError) as error:
        hb.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3)), hb.Config("int8_channel", activations="static"), [images])
    assert error.value is raised

"""Results whose codes would be seen in the outputs stay in floating point, and the report says which."""

from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn.described import Scale
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

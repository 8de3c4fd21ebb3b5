"""LoRA on quantized convolutions, against peft's own on float ones with the dequantized weights."""

import copy
from typing import Any

import pytest
import torch
from torch import nn

pytest.importorskip("peft", reason="peft is not installed")

from peft import LoraConfig, get_peft_model

import halfbyte as hb
from halfbyte.errors import UnsupportedError
from halfbyte.integrations.peft import adapters
from halfbyte.nn.dequantized import dequantize_


class Network(nn.Module):
    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.conv, self.head = layer, nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.conv(x).flatten(2).mean(-1))


LAYERS: dict[str, tuple[Any, tuple[int, ...]]] = {
    "1d": (lambda: nn.Conv1d(32, 8, 3, 2, 1), (2, 32, 9)),
    "2d": (lambda: nn.Conv2d(32, 8, 3, (2, 1), 1, bias=False), (2, 32, 7, 6)),
    "1x1": (lambda: nn.Conv2d(32, 8, 1), (2, 32, 3, 3)),
    "3d": (lambda: nn.Conv3d(32, 8, 3, padding=(0, 1, 1)), (2, 32, 4, 5, 6)),
}
CONFIG = {"r": 2, "lora_alpha": 4, "target_modules": ["conv"]}


@pytest.mark.filterwarnings("ignore:merging rounds")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", LAYERS)
def test_as_on_float_layers(name: str, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    build, shape = LAYERS[name]
    small: Any = hb.quantize_(Network(build()).to(dtype), hb.Config("int8_channel", compute="float", skip=["head"]))
    floats, x = copy.deepcopy(small), torch.randn(shape).to(dtype)
    dequantize_(floats)
    plain, state = small(x), {key: tensor.clone() for key, tensor in small.state_dict().items()}
    adapted, oracle = (get_peft_model(one, LoraConfig(**CONFIG, init_lora_weights=False)) for one in (small, floats))
    layer: Any = adapted.base_model.model.conv
    assert isinstance(layer, adapters._QuantLoraConv)
    lora = {key: tensor for key, tensor in adapted.state_dict().items() if "lora" in key}
    oracle.load_state_dict(lora, strict=False)
    assert lora.keys() == {key for key in oracle.state_dict() if "lora" in key}
    # Sums of 864 products at most in float32 in another order; bfloat16 rounds some ten results by 2^-9.
    close = {"rtol": 1e-4, "atol": 1e-4} if dtype == torch.float32 else {"rtol": 2**-5, "atol": 2**-5}
    found = adapted(x)
    assert (found - plain).norm() > 0.01 * plain.norm()
    torch.testing.assert_close(found, oracle(x), **close)
    for one in (adapted, oracle):
        one(x).square().sum().backward()
    for key, parameter in adapted.named_parameters():
        if parameter.requires_grad:
            want = oracle.get_parameter(key).grad
            torch.testing.assert_close(parameter.grad, want, rtol=close["rtol"] * 4, atol=float(want.abs().max()) * close["rtol"] * 4)
    with torch.no_grad():
        layer.merge()
        merged = layer.get_base_layer().weight.clone().float()
        weight = oracle.base_model.model.conv.base_layer.weight.float() + layer.get_delta_weight("default").float()
        step = weight.flatten(1).abs().amax(1) / 127  # of int8 with one scale a channel, half of which rounding takes
        distance = (merged - weight).abs().flatten(1).amax(1)
        assert (distance <= step * 0.5 + weight.flatten(1).abs().amax(1) * (2**-8 if dtype == torch.bfloat16 else 1e-3)).all()
        layer.unmerge()
        again = adapted.unload()
    assert type(again.conv) is type(small.conv)
    assert all(torch.equal(tensor, again.state_dict()[key]) for key, tensor in state.items())


def test_what_cannot_be_adapted_or_merged() -> None:
    class Padded(nn.Conv2d):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return super().forward(nn.functional.pad(x, (1, 1, 1, 1)))

    for layer in (nn.ConvTranspose2d(32, 8, 2, 2), Padded(32, 8, 3)):
        model = hb.quantize_(Network(layer), hb.Config("int8_channel", skip=["head"]))
        with pytest.raises(
            UnsupportedError, match=r"peft's LORA cannot train conv, a Quant\w+: quantize the model with skip=\[\"\*conv\"\]"
        ):
            get_peft_model(model, LoraConfig(**CONFIG))  # type: ignore[arg-type]
    grouped = hb.quantize_(Network(nn.Conv2d(32, 8, 3, groups=2)), hb.Config("int8_channel", skip=["head"]))
    with pytest.warns(UserWarning, match="groups > 1"):
        adapted: Any = get_peft_model(grouped, LoraConfig(**CONFIG))  # type: ignore[arg-type]
    with pytest.raises(UnsupportedError, match="cannot be merged into a quantized weight if it is a convolution with groups: keep them"):
        adapted.base_model.model.conv.merge()
    assert adapted(torch.randn(1, 32, 5, 5)).shape == (1, 4)

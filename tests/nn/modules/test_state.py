"""The state of quantized modules on other ways than halfbyte's: other loaders fail loudly, and a module computes with its buffers."""

from __future__ import annotations

import copy
import io
import json
import pickle
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict, get_state_dict, set_model_state_dict
from torch.func import functional_call
from torch.optim.swa_utils import AveragedModel, get_ema_avg_fn, get_ema_multi_avg_fn

import halfbyte as hb
from halfbyte.errors import ArgumentError, HalfbyteError, UnsupportedError
from halfbyte.nn.fused import FusedLinear

LAYERS: dict[str, tuple[Callable[[], nn.Module], Callable[[], Tensor]]] = {
    "linear": (lambda: nn.Linear(64, 32), lambda: torch.randn(3, 64)),
    "embedding": (lambda: nn.Embedding(20, 64), lambda: torch.arange(5)),
    "bag": (lambda: nn.EmbeddingBag(20, 64), lambda: torch.arange(6).view(2, 3)),
    "conv": (lambda: nn.Conv2d(16, 8, 3), lambda: torch.randn(1, 16, 5, 5)),
    "conv1d": (lambda: nn.Conv1d(16, 8, 3), lambda: torch.randn(1, 16, 5)),
}
FORMATS = ("int8_channel", "int8_channel_offset")


def built(name: str, seed: int = 0, fmt: str = "int8_channel") -> Any:
    torch.manual_seed(seed)
    return hb.quantize_(nn.Sequential(LAYERS[name][0]()), hb.Config(fmt, embedding=fmt))


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(64, 32) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([self.q_proj(x), self.k_proj(x), self.v_proj(x)], dim=-1)


def siblings(seed: int) -> Any:
    """An attention whose three layers are fused."""
    torch.manual_seed(seed)
    return hb.fuse_(hb.quantize_(nn.Sequential(Attention()), "q4_0"))


# Guards


@pytest.mark.parametrize("name", LAYERS)
def test_a_float_module_refuses_the_state_however_leniently(name: str, tmp_path: Path) -> None:
    state = built(name).state_dict()
    model = nn.Sequential(LAYERS[name][0]())
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        model.load_state_dict(state, strict=False)
    assert torch.equal(model.state_dict()["0.weight"], before["0.weight"])
    safetensors.torch.save_file(state, tmp_path / "m.safetensors")
    with pytest.raises(RuntimeError, match=r"size mismatch for 0\.weight"):
        safetensors.torch.load_model(model, tmp_path / "m.safetensors", strict=False)


def test_other_libraries_fail_loudly(tmp_path: Path) -> None:
    """huggingface_hub's and diffusers' loaders are lenient: without a guard they gave random weights, with a warning at most."""
    hub = pytest.importorskip("huggingface_hub")

    class Net(nn.Module, hub.PyTorchModelHubMixin):  # type: ignore[misc, name-defined]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 32)

    hb.quantize_(Net(), "q8_0").save_pretrained(tmp_path / "hub")
    with pytest.raises(RuntimeError, match=r"size mismatch for layer\.weight"):
        Net.from_pretrained(tmp_path / "hub")


def test_diffusers_fails_loudly(tmp_path: Path) -> None:
    pytest.importorskip("diffusers")
    from diffusers.configuration_utils import ConfigMixin, register_to_config
    from diffusers.models.modeling_utils import ModelMixin

    class Net(ModelMixin, ConfigMixin):  # type: ignore[misc]
        @register_to_config  # type: ignore[untyped-decorator]
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(64, 32)

    hb.quantize_(Net(), "q8_0").save_pretrained(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text("utf-8"))
    del config["quantization_config"]  # without it halfbyte does not open the model
    (tmp_path / "config.json").write_text(json.dumps(config), "utf-8")
    for fast in (True, False):
        with pytest.raises((ValueError, RuntimeError), match=r"(?s)layer\.weight.*(shape|size)|size mismatch for layer\.weight"):
            Net.from_pretrained(tmp_path, low_cpu_mem_usage=fast)


@pytest.mark.parametrize("fmt", FORMATS)
def test_states_with_and_without_a_guard_are_loaded(fmt: str) -> None:
    """Older versions of halfbyte wrote none."""
    state, x = built("linear", 1, fmt).state_dict(), torch.randn(3, 64)
    want = built("linear", 1, fmt)(x)
    for given in (state, {key: tensor for key, tensor in state.items() if key != "0.weight"}):
        model = built("linear", 0, fmt)
        model.load_state_dict(given)
        assert torch.equal(model(x), want)
    with pytest.raises(RuntimeError, match=r"Unexpected key.*0\.weight"):
        built("linear", 0, fmt).load_state_dict(state | {"0.weight": torch.zeros(32, 64)})
    with pytest.raises(RuntimeError, match=r"Missing key.*0\.weight\.data"):
        built("linear", 0, fmt).load_state_dict({"0.weight": state["0.weight"], "0.bias": state["0.bias"]})


# Names


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize("name", [*LAYERS, "fused"])
def test_every_name_is_an_attribute(name: str, fmt: str) -> None:
    model = siblings(0) if name == "fused" else built(name, 0, fmt)
    for key, value in model.state_dict().items():
        found: Any = model
        for part in key.split("."):
            found = getattr(found, part)
        if key.endswith(("scale", "zero", "bias")):
            assert torch.equal(found, value), key


@pytest.mark.parametrize("name", LAYERS)
def test_distributed_checkpoints_name_the_state(name: str) -> None:
    model, other = nn.Sequential(built(name), nn.Linear(4, 4)), nn.Sequential(built(name, 1), nn.Linear(4, 4))
    state, x = get_model_state_dict(model), LAYERS[name][1]()
    assert state.keys() == model.state_dict().keys()
    get_state_dict(model, torch.optim.AdamW(model[1].parameters()))
    trained = get_model_state_dict(model, options=StateDictOptions(ignore_frozen_params=True))
    assert {"1.weight", "1.bias"} <= trained.keys()
    set_model_state_dict(other, state)
    assert torch.equal(other[0](x), model[0](x))


# Buffers in the places of others


def pickled(model: nn.Module) -> Any:
    return pickle.loads(pickle.dumps(model))  # noqa: S301


def tensors(model: nn.Module) -> list[tuple[str, Tensor]]:
    return [*model.named_parameters(), *model.named_buffers()]


def swapped(a: nn.Module, b: nn.Module, x: Tensor) -> Tensor:
    return functional_call(a, dict(tensors(b)), (x,))


@pytest.mark.parametrize("name", [*LAYERS, "fused", "static"])
def test_a_functional_call_computes_with_its_buffers(name: str) -> None:
    if name == "fused":
        a, b, x = siblings(0), siblings(1), torch.randn(3, 64)
        assert isinstance(a[0].q_proj, FusedLinear)
    elif name == "static":
        x = torch.randn(2, 3, 8, 8)
        config = hb.Config("int8_channel", activations="static")
        a, b = (hb.quantize_(nn.Sequential(nn.Conv2d(3, 8, 3), nn.ReLU(), nn.Conv2d(8, 4, 3)), config, [x]) for _ in range(2))
    else:
        a, b, x = built(name), built(name, 1), LAYERS[name][1]()
    of_a, of_b = a(x), b(x)
    assert not torch.equal(of_a, of_b)
    if name != "static":  # whose scales are no buffers
        assert torch.equal(swapped(a, b, x), of_b)
    assert torch.equal(swapped(a, a, x), of_a)
    assert torch.equal(a(x), of_a)  # they are put back


def test_codes_are_no_buffers() -> None:
    a, b = built("linear"), built("linear", 1)
    with pytest.raises((HalfbyteError, TypeError)):
        functional_call(a, b.state_dict(), (torch.randn(3, 64),))


def test_copies_of_fused_layers() -> None:
    """They stay fused, and those with other bytes keep them."""
    a, b, x = siblings(0), siblings(1), torch.randn(3, 64)
    of_a, of_b = a(x), b(x)
    for twin in (copy.deepcopy(a), pickled(a)):
        assert torch.equal(twin(x), of_a)
        assert len({id(part.together[0]) for part in twin[0].children()}) == 1
    for place, tensor in tensors(b):
        module, _, name = place.rpartition(".")
        setattr(a.get_submodule(module), name, tensor)
    for twin in (a, copy.deepcopy(a), pickled(a)):
        assert torch.equal(twin(x), of_b)


@pytest.mark.parametrize("name", LAYERS)
def test_buffers_that_were_set_or_copied(name: str) -> None:
    b, x = built(name, 1), LAYERS[name][1]()
    for put in (lambda old, new: old.copy_(new), None):
        a = built(name)
        with torch.no_grad():
            for (place, old), (_, new) in zip(tensors(a), tensors(b), strict=True):
                if put is None:
                    setattr(a[0], place.rpartition(".")[2], new)
                else:
                    put(old, new)
        assert torch.equal(a(x), b(x))
        assert torch.equal(a[0].codes().data, b[0].codes().data)
        assert torch.equal(a.state_dict()["0.weight.data"], b.state_dict()["0.weight.data"])


AVERAGES: dict[str, dict[str, Any]] = {
    "mean": {},
    "ema": {"avg_fn": get_ema_avg_fn(0.9)},
    "ema of many": {"multi_avg_fn": get_ema_multi_avg_fn(0.9)},
}


@pytest.mark.parametrize("how", AVERAGES)
@pytest.mark.parametrize("name", [*LAYERS, "fused"])
def test_bytes_that_were_averaged_are_refused(name: str, how: str) -> None:
    """`AveragedModel(use_buffers=True)` mixes bytes of packed codes, which give any number."""
    a, b = (siblings(0), siblings(1)) if name == "fused" else (built(name), built(name, 1))
    x = torch.randn(3, 64) if name == "fused" else LAYERS[name][1]()
    of_a = a(x)
    mean = AveragedModel(a, use_buffers=True, **AVERAGES[how])
    mean.update_parameters(a)
    assert torch.equal(mean(x), of_a)  # a copy
    mean.update_parameters(b)
    for use in (lambda: mean(x), mean.state_dict):
        with pytest.raises(ArgumentError, match="packed codes cannot be averaged"):
            use()


def test_the_remedy_for_averages(tmp_path: Path) -> None:
    """Without buffers the codes follow the last model, and its adapters or heads are averaged."""
    a, b = (nn.Sequential(built("linear", seed), nn.Linear(32, 4)) for seed in (0, 1))
    mean = AveragedModel(a)
    mean.update_parameters(a)
    mean.update_parameters(b)
    assert torch.equal(mean.module[0][0].codes().data, b[0][0].codes().data)
    torch.testing.assert_close(mean.module[1].weight, (a[1].weight + b[1].weight) / 2)


def test_other_bytes_are_refused() -> None:
    model, x = built("linear"), torch.randn(3, 64)
    data = model[0].packed_data
    for wrong in (data[:-1].clone(), data.float(), data.view(torch.int8).clone()):
        with pytest.raises(ArgumentError, match=r"packed_data of a QuantLinear is torch\.uint8 \[\d+\] on cpu, got torch\."):
            functional_call(model, {"0.packed_data": wrong}, (x,))
    with pytest.raises(ArgumentError, match="does not match packed_check"):
        functional_call(model, {"0.packed_data": built("linear", 1)[0].packed_data}, (x,))
    with pytest.raises(UnsupportedError, match="frozen"):
        model[0].weight = nn.Parameter(torch.zeros(32, 64))


def test_copies_and_pickles_are_checked_anew() -> None:
    """The version counters of their tensors begin at another number."""
    model, x = built("linear"), torch.randn(3, 64)
    file = io.BytesIO()
    torch.save(model, file)
    file.seek(0)
    for twin in (copy.deepcopy(model), torch.load(file, weights_only=False)):
        assert torch.equal(twin(x), model(x))
        for _ in range(3):  # whatever the counter was
            twin[0].packed_data.mul_(2)
            with pytest.raises(ArgumentError, match="does not match packed_check"):
                twin(x)


def test_tensors_without_versions() -> None:
    """Those that were made in inference mode."""
    with torch.inference_mode():
        model = built("linear")
        twin = copy.deepcopy(model)
        x = torch.randn(3, 64)
        assert torch.equal(twin(x), model(x))
    assert torch.equal(swapped(model, built("linear", 1), x), built("linear", 1)(x))


def test_an_optimized_model_follows_its_buffers() -> None:
    """Its fast paths hold weights that they have read before."""
    from transformers import LlamaConfig, LlamaForCausalLM

    sizes: dict[str, Any] = {"hidden_size": 64, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 64, "vocab_size": 40}
    models, ids = [], torch.arange(6)[None]
    for seed in (0, 1):
        torch.manual_seed(seed)
        models.append(
            hb.quantize_(LlamaForCausalLM(LlamaConfig(**sizes, num_key_value_heads=2)).eval(), hb.Config("q4_0", compute="float"))
        )
    with torch.no_grad():
        of_a, of_b = (model(ids).logits for model in models)
        a, b = (hb.optimize_(model) for model in models)
        torch.testing.assert_close(a(ids).logits, of_a, rtol=1e-4, atol=1e-5)  # sums in another order
        torch.testing.assert_close(functional_call(a, dict(tensors(b)), (ids,)).logits, of_b, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(a(ids).logits, of_a, rtol=1e-4, atol=1e-5)

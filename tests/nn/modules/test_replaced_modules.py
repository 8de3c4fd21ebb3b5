"""What replaces a module computes what that computes, by whatever method torch calls, and runs its hooks; or the module is left, and the
report says why."""

import copy
import warnings
from collections.abc import Callable
from types import MethodType
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import prune
from torch.nn.utils.weight_norm import WeightNorm

import halfbyte as hb
from halfbyte.nn.candidates import PARAMETRIZED
from halfbyte.nn.fused import FusedLinear
from halfbyte.nn.modules.attention import Attention
from halfbyte.nn.modules.conv import QuantConv2d
from halfbyte.nn.modules.quantized import QuantLinear

HOOKS = {
    "register_forward_hook": "forward",
    "register_forward_pre_hook": "forward",
    "register_full_backward_hook": "backward",
    "register_full_backward_pre_hook": "backward",
    "register_state_dict_post_hook": "state_dict",
    "register_state_dict_pre_hook": "state_dict",
    "register_load_state_dict_pre_hook": "load_state_dict",
    "register_load_state_dict_post_hook": "load_state_dict",
}


def _weight_normed(layer: nn.Module) -> nn.Module:
    """What the deprecated torch.nn.utils.weight_norm does."""
    with warnings.catch_warnings(action="ignore", category=FutureWarning):
        WeightNorm.apply(layer, "weight", 0)
    return layer


class _Standardized(nn.Conv2d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight - weight.mean((1, 2, 3), keepdim=True), bias)


class _StandardizedLine(nn.Conv1d):
    def _conv_forward(self, input: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return super()._conv_forward(input, weight * 2, bias)


class _Derived(nn.Linear):
    """Its weight is computed from a parameter of another name."""

    def __init__(self) -> None:
        super().__init__(16, 8)
        self.raw = nn.Parameter(self._parameters.pop("weight").detach())

    @property
    def weight(self) -> Tensor:
        return self.raw * 2


class _Converting(nn.Linear):
    def _call_impl(self, *args: Any, **kwargs: Any) -> Any:
        return -super()._call_impl(*args, **kwargs)  # type: ignore[misc]


class _Scaled(nn.Linear):
    def reset_parameters(self) -> None:
        for parameter in self.parameters():
            nn.init.normal_(parameter)

    def __getattr__(self, name: str) -> Any:
        value = super().__getattr__(name)
        return value * 2 if name == "bias" else value


def _patched(layer: nn.Module, name: str) -> nn.Module:
    method = getattr(layer, name)
    setattr(layer, name, MethodType(lambda self, *args: -method(*args), layer))
    return layer


SUBCLASSES: dict[str, Callable[[], nn.Module]] = {
    "_Standardized has a _conv_forward of its own": lambda: _Standardized(16, 8, 3),
    "_StandardizedLine has a _conv_forward of its own": lambda: _StandardizedLine(16, 8, 3),
    "Conv2d has a _conv_forward of its own": lambda: _patched(nn.Conv2d(16, 8, 3), "_conv_forward"),
    "Linear has a forward of its own": lambda: _patched(nn.Linear(16, 8), "forward"),
    "Linear has a _call_impl of its own": lambda: _patched(nn.Linear(16, 8), "_call_impl"),
    "_Converting has a _call_impl of its own": lambda: _Converting(16, 8),
    "_Derived has a weight of its own": _Derived,
    "_Scaled has a __getattr__ of its own": lambda: _Scaled(16, 8),
    PARAMETRIZED: lambda: nn.utils.parametrizations.weight_norm(nn.Conv2d(16, 8, 3)),
    "a hook computes its weight: torch.nn.utils.remove_weight_norm(module) makes it plain": lambda: _weight_normed(nn.Conv2d(16, 8, 3)),
    "a hook computes its weight: torch.nn.utils.remove_spectral_norm(module) makes it plain": lambda: nn.utils.spectral_norm(
        nn.Linear(16, 8)
    ),
    'a hook computes its weight: torch.nn.utils.prune.remove(module, "weight") makes it plain': lambda: prune.l1_unstructured(
        nn.Linear(16, 8), "weight", 0.5
    ),
}


@pytest.mark.parametrize("reason", SUBCLASSES)
def test_a_layer_that_computes_otherwise_stays(reason: str) -> None:
    torch.manual_seed(0)
    layer = SUBCLASSES[reason]()
    x = torch.randn({nn.Conv2d: (2, 16, 5, 5), nn.Conv1d: (2, 16, 5)}.get(next(c for c in type(layer).__mro__ if c in _KINDS), (2, 16)))
    model = nn.ModuleDict({"own": layer, "plain": nn.Linear(16, 8)}).eval()
    with torch.no_grad():
        wanted = model["own"](x)
        hb.prepare_qat_(model, "int8_channel")
        assert torch.equal(model["own"](x), wanted)
        hb.convert_qat_(model)
    assert isinstance(model["plain"], QuantLinear)
    assert {row.name: row.reason for row in hb.report(model).kept}["own"] == reason
    with torch.no_grad():
        assert torch.equal(model["own"](x), wanted)


def test_weights_that_are_made_plain_are_quantized() -> None:
    """As the reasons say."""
    reasons = [reason for reason in SUBCLASSES if reason.endswith("makes it plain")]
    layers = nn.ModuleList(SUBCLASSES[reason]() for reason in reasons)
    for layer, reason in zip(layers, reasons, strict=True):
        call = reason.partition(": torch.nn.utils.")[2].removesuffix(" makes it plain")
        eval(call, {"module": layer, **vars(nn.utils)})  # noqa: S307
    assert len(hb.report(hb.quantize_(layers, "int8_channel")).quantized) == 4


_KINDS = (nn.Linear, nn.Conv1d, nn.Conv2d)


@pytest.mark.parametrize("register", HOOKS)
def test_a_layer_with_hooks_stays_and_runs_them(register: str) -> None:
    model, runs = nn.Sequential(nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 4)), list[int]()
    getattr(model[0], register)(lambda *_, **__: runs.append(1))
    hb.quantize_(model, "int8_channel")
    assert [row.reason for row in hb.report(model).kept] == [f"it has {HOOKS[register]} hooks, which would be lost"]
    runs.clear()
    _use(model, torch.randn(2, 16))
    assert runs
    assert isinstance(model[2], QuantLinear)


def _use(model: nn.Module, x: Tensor) -> None:
    """All that runs a hook."""
    model(x.requires_grad_()).sum().backward()
    model.load_state_dict(model.state_dict())


@pytest.mark.parametrize("register", HOOKS)
def test_hooks_of_a_layer_in_training_are_kept(register: str) -> None:
    model, runs = hb.prepare_qat_(nn.Sequential(nn.Linear(16, 16), nn.Conv1d(2, 4, 3)), "int8_channel"), list[int]()
    handles = [getattr(layer, register)(lambda *_, **__: runs.append(1)) for layer in model]
    hb.convert_qat_(model)
    runs.clear()
    _use(model, torch.randn(3, 2, 16))
    assert len(runs) >= 2
    for handle in handles:
        handle.remove()
    runs.clear()
    _use(model, torch.randn(3, 2, 16))
    assert not runs


def test_a_load_hook_of_a_quantized_layer_sees_its_codes() -> None:
    model, x = hb.quantize_(nn.Sequential(nn.Linear(16, 8)), "int8_channel"), torch.randn(2, 16)
    wanted, state = model(x), {f"old.{name}": tensor for name, tensor in model[0].state_dict().items()}

    def rename(module: nn.Module, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
        for name in [name for name in state if name.startswith("old.")]:
            state[name.replace("old.", prefix)] = state.pop(name)

    other = hb.quantize_(nn.Sequential(nn.Linear(16, 8)), "int8_channel")[0]
    other.register_load_state_dict_pre_hook(rename)
    other.load_state_dict(state)
    assert torch.equal(other(x), wanted)


def test_hooks_of_a_quantized_layer_are_kept_when_it_is_loaded_or_fused(tmp_path: Any) -> None:
    model = nn.ModuleDict({name: nn.Linear(16, 16, bias=False) for name in ("q_proj", "k_proj", "v_proj")})
    hb.save(hb.quantize_(model, "int8_channel"), tmp_path / "a")
    runs = list[int]()
    model["q_proj"].register_full_backward_hook(lambda *_: runs.append(1))
    hb.load(tmp_path / "a", model=model)
    model["q_proj"](torch.randn(2, 16, requires_grad=True)).sum().backward()
    assert runs == [1]
    model["k_proj"].register_state_dict_post_hook(lambda *_: runs.append(2))
    hb.fuse_(model)
    assert not any(isinstance(layer, FusedLinear) for layer in model.values())
    model.state_dict()
    assert runs == [1, 2]


class _Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stage = nn.Sequential(nn.Conv2d(16, 16, 3, padding=1), nn.ReLU())
        self.last = nn.Conv2d(16, 16, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(self.stage(x)) + x  # type: ignore[no-any-return]


@pytest.mark.parametrize("place", ["stage", "stage.1", ""])
def test_gradient_hooks_of_parts_of_a_fused_network_run(place: str) -> None:
    model, runs = hb.fuse_(hb.quantize_(_Block().eval(), "int8_channel")), list[int]()
    assert isinstance(model.stage[0], QuantConv2d)
    assert "1 additions, 1 activations" in str(hb.report(model))
    model.get_submodule(place).register_full_backward_hook(lambda *_: runs.append(1))
    model(torch.randn(1, 16, 5, 5, requires_grad=True)).sum().backward()
    assert runs == [1]


def test_hooks_of_all_modules_run_in_a_fused_network() -> None:
    model, seen = hb.fuse_(hb.quantize_(_Block().eval(), "int8_channel")), list[str]()
    with nn.modules.module.register_module_forward_hook(lambda module, *_: seen.append(type(module).__name__)):
        model(torch.randn(1, 16, 5, 5))
    assert "ReLU" in seen


def test_a_norm_with_hooks_is_not_folded() -> None:
    model, runs = nn.Sequential(nn.Conv2d(3, 16, 3), nn.BatchNorm2d(16), nn.Conv2d(16, 8, 1), nn.BatchNorm2d(8)).eval(), list[int]()
    model[1].register_full_backward_hook(lambda *_: runs.append(1))
    hb.fold_batch_norms_(model)
    assert [type(module) for module in model[1::2]] == [nn.BatchNorm2d, nn.Identity]
    model(torch.randn(1, 3, 5, 5, requires_grad=True)).sum().backward()
    assert runs == [1]


@pytest.mark.parametrize("place", ["", "out_proj"])
def test_attention_with_hooks_stays(place: str) -> None:
    model = nn.ModuleDict({"attention": nn.MultiheadAttention(16, 2), "other": nn.MultiheadAttention(16, 2)})
    model["attention"].get_submodule(place).register_load_state_dict_pre_hook(lambda *_: None)
    hb.quantize_(copy.deepcopy(model), "int8_channel")
    hb.quantize_(model, "int8_channel")
    assert type(model["attention"]) is nn.MultiheadAttention
    assert isinstance(model["other"], Attention)


def test_a_model_of_transformers_that_is_dequantized_keeps_hooks() -> None:
    transformers = pytest.importorskip("transformers")
    sizes = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2, "intermediate_size": 32, "vocab_size": 20}
    model = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    hb.quantize_(model, "int8_channel")
    runs = list[int]()
    handle = model.model.layers[0].mlp.up_proj.register_forward_hook(lambda *_: runs.append(1))
    model.dequantize()
    assert type(model.model.layers[0].mlp.up_proj) is nn.Linear
    model(torch.arange(4)[None])
    handle.remove()
    model(torch.arange(4)[None])
    assert runs == [1]

"""transformers' Conv1D, whose weight is [K, N]: GPT-2 quantized, saved, loaded, trained, pruned and adapted as if it were made of Linears.

Its `c_proj` is square, so that no shape would tell that it is the wrong way round.
"""

from __future__ import annotations

from copy import deepcopy
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

import halfbyte as hb
from halfbyte.nn.modules.expanded import expanded
from halfbyte.nn.modules.quantized import QuantLinear

transformers = pytest.importorskip("transformers")
Conv1D = transformers.pytorch_utils.Conv1D

CONFIG = hb.Config("int4_g32", compute="float")
SKIP = hb.Config("int4_g32", compute="float", skip=["*.0.attn.c_proj"])
TOKENS = torch.randint(0, 101, (2, 17), generator=torch.Generator().manual_seed(1))
LAYERS = [f"transformer.h.{i}.{name}" for i in range(2) for name in ("attn.c_attn", "attn.c_proj", "mlp.c_fc", "mlp.c_proj")]


@pytest.fixture(scope="module")
def gpt2() -> Any:
    torch.manual_seed(0)
    sizes = {"vocab_size": 101, "n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 64, "bos_token_id": 0, "eos_token_id": 0}
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**sizes)).eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.1)
    return model


@torch.no_grad()
def logits(model: Any) -> Tensor:
    found: Tensor = model(TOKENS).logits
    return found


def close(a: Any, b: Any) -> bool:
    """Sums of at most 256 products in float32, in another order, through two layers."""
    return bool((logits(a) - logits(b)).abs().max() <= 2.0**-24 * 256 * 8 * logits(b).abs().max())


def test_it_computes_as_the_float_model_of_its_codes(gpt2: Any) -> None:
    model = hb.quantize_(deepcopy(gpt2), SKIP)
    assert type(model.get_submodule(LAYERS[1])) is Conv1D
    floats = deepcopy(gpt2)
    for name in [*LAYERS[:1], *LAYERS[2:]]:
        codes = model.get_submodule(name).codes()
        weight = floats.get_submodule(name).weight
        assert torch.equal(codes.data, hb.quantize(weight.detach().T, "int4_g32").data)
        weight.data = codes.dequantize().T
    floats.transformer.wte.weight.data = model.transformer.wte.weight + 0
    floats.transformer.wpe.weight.data = model.transformer.wpe.weight + 0
    assert close(model, floats)
    rows = {row.name: row for row in hb.report(model).rows}
    assert rows[LAYERS[0]].shape == (192, 64)
    assert rows[LAYERS[1]].reason == "skip pattern '*.0.attn.c_proj'"


@pytest.mark.parametrize("config", [CONFIG, SKIP], ids=["all", "but one"])
def test_every_way_in_and_out(gpt2: Any, config: hb.Config, tmp_path: Path) -> None:
    from_pretrained = transformers.AutoModelForCausalLM.from_pretrained
    gpt2.save_pretrained(tmp_path / "float")
    model = hb.quantize_(deepcopy(gpt2), config)
    expected = logits(model)
    hb.save(model, tmp_path / "saved")
    model.save_pretrained(tmp_path / "pretrained")
    hb.convert(tmp_path / "float", tmp_path / "converted", config)
    hb.export(tmp_path / "saved", tmp_path / "exported", "halfbyte")
    for folder in ("saved", "pretrained", "converted", "exported"):
        assert torch.equal(logits(hb.load(tmp_path / folder)), expected)
        assert torch.equal(logits(from_pretrained(tmp_path / folder)), expected)
    assert torch.equal(logits(hb.load(tmp_path / "saved", model=deepcopy(gpt2))), expected)
    assert torch.equal(logits(hb.load(tmp_path / "float", format=config)), expected)
    assert torch.equal(logits(from_pretrained(tmp_path / "float", quantization_config=hb.HalfbyteConfig(config))), expected)
    floats = model.dequantize()
    assert isinstance(floats.get_submodule(LAYERS[0]), Conv1D)
    floats.save_pretrained(tmp_path / "dequantized")
    assert torch.equal(logits(from_pretrained(tmp_path / "dequantized")), logits(floats))
    assert close(floats, hb.load(tmp_path / "saved"))


def test_other_projects(gpt2: Any, tmp_path: Path) -> None:
    """GPTQ's readers know Conv1D, and codes that are those of a Linear; others do not. What is float is as transformers has it."""
    model = hb.quantize_(deepcopy(gpt2), hb.Config("int4_g32", overrides={LAYERS[1]: "int8_channel"}, compute="float"))
    hb.save(model, tmp_path / "saved")
    hb.export(tmp_path / "saved", tmp_path / "gptq", "gptq")
    stored = load_file(tmp_path / "gptq" / "model.safetensors")
    assert stored[f"{LAYERS[0]}.qweight"].shape == (64 * 4 // 32, 192)
    assert torch.equal(stored[f"{LAYERS[1]}.weight"], model.get_submodule(LAYERS[1]).codes().dequantize().T)
    loaded = hb.load(tmp_path / "gptq")
    for module in loaded.modules():
        if isinstance(module, QuantLinear):
            module.compute = "float"
    assert close(loaded, model)
    assert sum(isinstance(module, QuantLinear) for module in loaded.modules()) == 7
    for kind in ("awq", "compressed-tensors"):
        with pytest.raises(hb.HalfbyteError, match="readers support Linear, but not Conv1D"):
            hb.export(tmp_path / "saved", tmp_path / kind, kind)


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_calibration(gpt2: Any, method: str, tmp_path: Path) -> None:
    tokens = torch.randint(0, 101, (8, 64), generator=torch.Generator().manual_seed(2))
    config = hb.Config("int4_g32", method=method, compute="float")
    model = hb.quantize_(deepcopy(gpt2), config, tokens)
    gpt2.save_pretrained(tmp_path / "float")
    hb.convert(tmp_path / "float", tmp_path / "converted", config, tokens)
    assert torch.equal(logits(hb.load(tmp_path / "converted")), logits(model))
    assert (logits(model) - logits(gpt2)).norm() < (logits(hb.quantize_(deepcopy(gpt2), CONFIG)) - logits(gpt2)).norm()


@pytest.mark.parametrize("scales", ["dynamic", "learned"])
def test_training(gpt2: Any, scales: str) -> None:
    model = deepcopy(gpt2)
    optimizer = torch.optim.SGD(model.parameters(), 1e-2)
    hb.prepare_qat_(model, CONFIG, scales=scales)
    assert model.state_dict().keys() >= gpt2.state_dict().keys()
    before = model.get_submodule(LAYERS[1]).weight.detach().clone()
    model.train()(TOKENS, labels=TOKENS).loss.backward()
    optimizer.step()
    assert not torch.equal(model.get_submodule(LAYERS[1]).weight, before)
    expected = logits(model.eval())
    hb.convert_qat_(model)
    assert (logits(model) - expected).abs().max() <= 2.0**-24 * 256 * 8 * expected.abs().max()
    assert isinstance(model.dequantize().get_submodule(LAYERS[1]), Conv1D)


def test_pruning(gpt2: Any) -> None:
    model = hb.prune_(deepcopy(gpt2), "2:4")
    for name in LAYERS:
        layer = model.get_submodule(name)
        assert type(layer) is Conv1D
        assert bool(((layer.weight.T.unflatten(-1, (-1, 4)) != 0).sum(-1) <= 2).all())


@pytest.mark.filterwarnings("ignore:merging rounds the sums:UserWarning")
@pytest.mark.filterwarnings("ignore:.*gradient_checkpointing.*:FutureWarning")
def test_adapters(gpt2: Any) -> None:
    """Merged the right way round, also where peft is told that weights are [K, N], as it has to be for a float GPT-2."""
    peft = pytest.importorskip("peft")
    model = hb.quantize_(deepcopy(gpt2), hb.Config("q8_0", compute="float"))
    adapted = peft.get_peft_model(model, peft.LoraConfig(target_modules=["c_proj", "c_attn"], r=4, fan_in_fan_out=True))
    torch.manual_seed(3)
    with torch.no_grad():
        for name, parameter in adapted.named_parameters():
            if "lora_" in name:
                parameter.normal_(0, 0.2)
    unmerged, unadapted = logits(adapted), logits(gpt2)
    adapted.merge_adapter()
    # 8 bits of the sum: a hundredth. The other way round it would be as far away as no adapter at all.
    assert (logits(adapted) - unmerged).norm() < 0.05 * (unmerged - unadapted).norm()


def test_shared_hooked_and_failing(gpt2: Any) -> None:
    model = deepcopy(gpt2)
    first, second, third = (model.get_submodule(name) for name in (LAYERS[1], LAYERS[5], LAYERS[4]))
    second.weight = first.weight
    third.register_forward_hook(lambda *args: None)
    hb.quantize_(model, CONFIG)
    first, second = (model.get_submodule(name) for name in (LAYERS[1], LAYERS[5]))
    assert first.packed_data is second.packed_data
    assert type(third) is Conv1D
    reasons = {row.name: row.reason for row in hb.report(model).kept}
    assert reasons[LAYERS[4]] == "it has forward hooks, which would be lost"

    bare = nn.Sequential(Conv1D(8, 8), nn.Linear(8, 8))
    bare[1].weight = bare[0].weight  # the same numbers, once this way round and once that
    with pytest.raises(hb.HalfbyteError, match="nothing to quantize in Sequential: 1 stays as it is"):
        hb.quantize_(bare, CONFIG)

    model, kinds = deepcopy(gpt2), [type(module) for module in gpt2.modules()]
    weight = model.get_submodule(LAYERS[7]).weight
    with torch.no_grad():
        weight[3, 4] = torch.nan
    with pytest.raises(hb.HalfbyteError, match=f"{LAYERS[7]}.weight"):
        hb.quantize_(model, CONFIG)
    assert [type(module) for module in model.modules()] == kinds
    assert model.get_submodule(LAYERS[7]).weight is weight


def test_inside_it_is_a_linear(gpt2: Any) -> None:
    model, expected = deepcopy(gpt2), logits(gpt2)
    with expanded(model):
        assert isinstance(model.get_submodule(LAYERS[0]), nn.Linear)
        assert (logits(model) - expected).abs().max() < 1e-4
    assert torch.equal(logits(model), expected)

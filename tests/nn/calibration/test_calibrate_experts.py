"""Calibration inside of mixtures of experts: what each expert learns from, what AWQ divides, who is left out and named."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import pytest
import torch
from test_moe_models import MODELS, build
from torch import Tensor

import halfbyte as hb
from halfbyte.formats import Codes, as_format
from halfbyte.nn.calibration import calibrate_experts
from halfbyte.nn.calibration.calibrate import Calibration, calibrate
from halfbyte.nn.calibration.runs import Moments, Runs, decoder_layers
from halfbyte.nn.modules.expanded import expanded
from halfbyte.quantizers.gptq import GPTQ, gptq

pytest.importorskip("transformers")

FORMAT = "int4_g32"
TOKENS = torch.randint(0, 101, (24, 32), generator=torch.Generator().manual_seed(5))
STACKS = ("mlp.experts.gate_up_proj", "mlp.experts.down_proj")


def skewed(name: str) -> Any:
    """A model whose hidden states have channels of all sizes, as those of trained ones do."""
    model = build(name)
    with torch.no_grad():
        for layer in model.model.layers:
            layer.post_attention_layernorm.weight.mul_(torch.linspace(-2, 2, 64).exp())
    return model


def sent(module: Any, model: Any) -> list[tuple[Tensor, Tensor]]:
    """What a module is called with in the first decoder layer: x and the ids of experts."""
    seen: list[tuple[Tensor, Tensor]] = []
    handle = module.register_forward_pre_hook(lambda _, args: seen.append((args[0], args[1])))
    with torch.no_grad():
        model(TOKENS)
    handle.remove()
    return seen


@pytest.mark.parametrize(("name", "at_a_time"), [("mixtral", 1), ("qwen3", 3), ("olmoe", 100)])
def test_each_expert_is_quantized_for_its_own_tokens(name: str, at_a_time: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The first layer, whose inputs are those of the float model; whatever number of experts is measured at a time."""
    measure = Runs.measure_experts
    passes: list[int] = []

    def watched(self: Runs, i: int, block: Any, stack: str, experts: range) -> list[Moments]:
        passes.append(len(experts))
        return measure(self, i, block, stack, experts)

    monkeypatch.setattr(Runs, "measure_experts", watched)
    model = skewed(name)
    with expanded(model):
        layer = decoder_layers(model)[1][0]
        if at_a_time < 100:  # as if the layer were small
            monkeypatch.setattr(calibrate_experts, "_floats", lambda block: at_a_time * 96 * 96)
        formats = {f"model.layers.0.{stack}": as_format(FORMAT) for stack in STACKS}
        results = {r.name: r.value for r in calibrate(model, formats, "gptq", Calibration(TOKENS))}
        for stack in STACKS:
            weight, codes = layer.get_submodule(stack).weight, results[f"model.layers.0.{stack}.weight"]
            assert isinstance(codes, Codes)
            ((x, ids),) = sent(layer.get_submodule(stack), model)
            for e in range(len(weight)):
                rows = x[ids == e] if x.dim() == 3 else x[(ids == e).any(-1)]
                moments = Moments(x.shape[-1], x.device)
                moments.add(rows)
                one = gptq(weight[e].detach(), as_format(FORMAT), moments.expected(), GPTQ())
                # Batches sum in another order, which may move a weight that lies between two codes to the other.
                assert (codes.data[e] != one.data).float().mean() < 0.01
    if at_a_time == 1:
        assert len(passes) > len(STACKS)
    assert sum(passes) == 2 * len(weight)


@pytest.mark.parametrize("name", MODELS)
def test_what_awq_scales_is_the_same_model(name: str) -> None:
    """Norms and routers have new values, and with what the codes stand for the layer is, at 8 bits, nearly the float one."""
    model = skewed(name)
    with expanded(model):
        stacks = {f"model.layers.0.{stack}": as_format("int8_g32") for stack in STACKS}
        results = {r.name: r.value for r in calibrate(model, stacks, "awq", Calibration(TOKENS))}
        changed = {key for key, value in results.items() if isinstance(value, Tensor)}
        # The shared expert of qwen2 reads the norm's output too, and is not quantized here.
        router = "router" if name == "gpt-oss" else "gate"
        norm = {"model.layers.0.post_attention_layernorm.weight", f"model.layers.0.mlp.{router}.weight"}
        assert changed == (set() if name == "qwen2" else norm)
        layer, seen = decoder_layers(model)[1][0], list[Tensor]()
        handle = layer.mlp.register_forward_hook(lambda *args: seen.append(args[2][0] if isinstance(args[2], tuple) else args[2]))
        for _ in range(2):
            with torch.no_grad():
                model(TOKENS)
            for key, value in results.items():
                model.get_parameter(key).data = value.dequantize() if isinstance(value, Codes) else value
        handle.remove()
    # 8-bit codes err by 2^-8 of a block's largest weight; a wrong scale by tenths.
    assert float((seen[1] - seen[0]).norm()) < 0.03 * float(seen[0].norm())


@pytest.mark.parametrize("method", ["gptq", "awq"])
def test_outputs_are_closer_than_without_calibration(method: str) -> None:
    """Of the experts of the first layer, on the tokens that they learned from."""
    model, error = skewed("mixtral"), {}
    layer = model.model.layers[0]
    seen: list[Tensor] = []
    layer.mlp.register_forward_hook(lambda *args: seen.append(args[2]))
    with torch.no_grad():
        model(TOKENS)
    for each in (method, "mse"):
        quantized = hb.quantize_(
            copy.deepcopy(model),
            hb.Config(FORMAT, method=each, skip=["lm_head", "*.self_attn.*", "model.layers.1.*", "model.embed_tokens"], compute="float"),
            TOKENS if each == method else None,
        )
        with torch.no_grad():
            quantized(TOKENS)
        error[each] = float((seen[-1] - seen[0]).norm() / seen[0].norm())
    assert error[method] < 0.9 * error["mse"]


def test_experts_that_few_tokens_reach_are_named() -> None:
    model = build("qwen3")
    weight = model.model.layers[1].mlp.experts.down_proj.detach().clone()
    hb.quantize_(model, hb.Config(FORMAT, method="gptq", compute="float"), TOKENS[:4])
    notes = hb.report(model).notes
    down = next(note for note in notes if note.startswith("model.layers.1.mlp.experts.down_proj: few calibration tokens reach experts "))
    few = down.removesuffix(": mse without calibration is used").partition(" experts ")[2].split(", ")
    assert few
    assert len(few) < 8
    codes = model.get_submodule("model.layers.1.mlp.experts.down_proj").codes()
    for entry in few:
        e, _, count = entry.partition(" ")
        assert not count or 0 < int(count.strip("()")) < calibrate_experts.FEW
        assert torch.equal(codes.data[int(e)], hb.quantize(weight[int(e)], FORMAT, "mse").data)


def test_one_scale_for_all_experts() -> None:
    model = build("mixtral")
    weight = model.model.layers[0].mlp.experts.down_proj.detach().clone()
    config = hb.Config(FORMAT, method="gptq", overrides={"*.experts.*": "int8_tensor"}, compute="float")
    hb.quantize_(model, config, TOKENS)
    assert "model.layers.0.mlp.experts.down_proj: one scale for all experts: mse without calibration is used" in hb.report(model).notes
    codes = model.get_submodule("model.layers.0.mlp.experts.down_proj").codes()
    assert torch.equal(codes.data, hb.quantize(weight, "int8_tensor", "mse").data)


def test_from_disk_as_in_memory(tmp_path: Path) -> None:
    model = skewed("qwen2")
    model.save_pretrained(tmp_path / "float")
    config = hb.Config(FORMAT, method="awq", compute="float")
    report = hb.convert(tmp_path / "float", tmp_path / "q", config, calibration=Calibration(TOKENS[:8]))
    expected = hb.quantize_(model, config, TOKENS[:8])
    assert sorted(report.notes) == sorted(hb.report(expected).notes)
    loaded = hb.load(tmp_path / "q")
    with torch.no_grad():
        assert torch.equal(loaded(TOKENS[:2]).logits, expected(TOKENS[:2]).logits)


def test_mixed_formats() -> None:
    """Stacks of experts count, and get formats of their own."""
    model = build("mixtral")
    config = hb.Config.auto(model, 5.5, TOKENS[:4], formats=["int4_g32", "q8_0"], compute="float")
    assert not any("experts" in name for name, _ in model.named_modules() if name.endswith("_proj") and "self_attn" not in name)
    report = hb.report(hb.quantize_(model, config))
    rows = [row for row in report.quantized if row.kind in ("Linear", "Experts")]
    assert {row.kind for row in rows} == {"Linear", "Experts"}
    assert {str(row.format) for row in rows} == {"int4_g32", "q8_0"}
    assert 8 * sum(row.bytes_after for row in rows) <= 5.5 * sum(torch.Size(row.shape).numel() for row in rows)

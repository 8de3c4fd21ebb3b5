"""The program of a decoder of every family, and which kernel computes each op. That programs compute the models is tested in
`families/test_language_families.py`."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

pytest.importorskip("transformers")

from language_model import make_decoder
from tiny_decoders import CASES, vary_

import halfbyte as hb
from halfbyte.decoder import kernels_gpu, lower_cpu
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.explain import explain_decoder
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.decoder.program import TORCH, Program, program_of
from halfbyte.decoder.spec import DecoderSpec
from halfbyte.dispatch.choose import choose
from halfbyte.errors import ArgumentError, UnsupportedError
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.step_sequence import StepSequence
from halfbyte.kernels.problem import AttentionProblem, NormedProblem, Problem
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.machine import GPUS, Gpu
from halfbyte.ops.transformer.weights import Weight


def spec_of(case: str, folder: Path, **settings: Any) -> DecoderSpec:
    torch.manual_seed(7)
    model = CASES[case]().eval()
    vary_(model)
    hb.save(hb.quantize_(model, hb.Config("q8_0", **settings)), folder)
    return build_spec(*open_checkpoint(folder))


def names_of(program: Program, layer: int | None) -> list[str]:
    return [op.name for op in program.ops if op.layer == layer]


LLAMA = ["attn_norm", "qkv", "rope", "attention", "o_proj", "attn_residual", "mlp_norm", "gate_up", "gate", "down_proj", "mlp_residual"]
SHARED = ["shared_expert.gate_up", "shared_expert.gate", "shared_expert.down_proj"]
EXPERTS = [*LLAMA[:7], "router", "experts.gate_up", "experts.gate", "experts.down_proj", "mlp_residual"]


GEMMA4 = ["qk_norm", *LLAMA[2:5], "attn_post_norm", *LLAMA[5:10], "mlp_post_norm", LLAMA[10]]
PER_LAYER = ["per_layer_input_gate", "per_layer_gate", "per_layer_projection", "per_layer_post_norm", "per_layer_residual"]


@pytest.mark.parametrize(
    ("case", "layer", "names"),
    [
        ("LlamaDecoderLayer", 0, LLAMA),
        ("Qwen3DecoderLayer", 0, [*LLAMA[:2], "qk_norm", *LLAMA[2:]]),
        ("HunYuanMoEV1DecoderLayer", 0, [*EXPERTS[:3], "qk_norm", *EXPERTS[3:-1], *SHARED, "mlp_residual"]),
        ("MixtralDecoderLayer", 1, EXPERTS),
        ("Qwen2MoeDecoderLayer", 0, [*EXPERTS[:-1], *SHARED, "shared_expert_gate", "mlp_residual"]),
        ("ArceeDecoderLayer", 0, [*LLAMA[:7], "up_proj", "activation", *LLAMA[9:]]),
        ("CohereDecoderLayer", 0, [*LLAMA[:6], *LLAMA[7:]]),
        ("SmolLM3DecoderLayer", 0, [*LLAMA[:2], *LLAMA[3:]]),
        ("SmolLM3DecoderLayer", 1, LLAMA),
        ("Olmo2DecoderLayer", 0, ["qkv", "qk_norm", *LLAMA[2:5], "attn_post_norm", LLAMA[5], *LLAMA[7:10], "mlp_post_norm", LLAMA[10]]),
        ("Gemma2DecoderLayer", 0, [*LLAMA[:5], "attn_post_norm", *LLAMA[5:10], "mlp_post_norm", LLAMA[10]]),
        ("Gemma4TextDecoderLayer", 1, ["attn_norm", "qk", *GEMMA4]),
        ("Gemma4TextDecoderLayer, shared keys", 3, ["attn_norm", "q_proj", *GEMMA4, *PER_LAYER]),
    ],
)
def test_the_ops_of_a_layer(case: str, layer: int, names: list[str], tmp_path: Path) -> None:
    program = program_of(spec_of(case, tmp_path / "m"))
    assert names_of(program, layer) == names
    inputs = ["embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm", "per_layer_inputs"]
    assert names_of(program, None)[: 3 + 4 * ("shared" in case)] == ["embed_tokens", *inputs * ("shared" in case), "norm", "lm_head"]


def test_settings_are_shown(tmp_path: Path) -> None:
    for case, texts in {
        "Gemma2DecoderLayer": ["sliding_window 6, softcap 3", "layers 0, 2\n", "layer 1\n", "softcap 2", "unit_offset", "multiplier 6.9"],
        "Gemma4TextDecoderLayer": ["values", "layer_scale", "kv_heads 1, head_dim 24", "rotary_dim 24, rope_parameters 0"],
        "Gemma4TextDecoderLayer, shared keys": ["sliding_window 6, kv_source 0", "kv_source 1", "gelu_tanh(gate) * input", "scale 0.707"],
        "GptOssDecoderLayer": ["sliding_window 6, sinks", "top_k 3, scores softmax, normalized, bias", "limit 7"],
        "CohereDecoderLayer": ["reads attn_norm", "interleaved", "factor 0.3", "layer_norm"],
        "GraniteDecoderLayer": ["multiplier 0.3", "multiplier 7", "divisor 3", "layers 0-2\n"],
        "Dots1DecoderLayer": ["scores sigmoid", "correction", "factor 2.5", "experts   [8, 128, 48]  q8_0"],
    }.items():
        text = str(program_of(spec_of(case, tmp_path / case)))
        assert [part for part in texts if part not in text] == [], text


def test_projections_in_formats_that_differ(tmp_path: Path) -> None:
    spec = spec_of("LlamaDecoderLayer", tmp_path / "m", overrides={"*v_proj": "int4_g32_zp", "*k_proj": "q4_0"}, skip=["lm_head"])
    program = program_of(spec)
    assert names_of(program, 0)[:6] == ["attn_norm", "q_proj", "k_proj", "v_proj", "rope", "attention"]
    assert [op.format for op in program.ops if op.layer == 0 and op.kind == "linear"][:3] == ["q8_0", "q4_0", "int4_g32_zp"]
    (norm, *_), (end, head) = lower_cpu.decode_kernels(program)[1:], lower_cpu.decode_kernels(program)[-2:]
    assert norm.fused_into == "q_proj"
    assert (end.kernel, head.kernel, head.reason) == ("norm", TORCH, "lm_head is float32, not quantized")
    assert (end.call, head.call) == ("decode step", None)


def test_the_decode_step_is_one_native_call(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[StepSequence] = []
    run = StepSequence.run
    monkeypatch.setattr(StepSequence, "run", lambda self: (calls.append(self), run(self))[1])
    spec = spec_of("Qwen2MoeDecoderLayer", tmp_path / "m")
    CpuModel(spec).decode([8], Cache(spec))
    assert len(calls) == len(explain_decoder(spec).native_calls) == 1


def test_gates_and_norms_within_products_on_a_gpu(tmp_path: Path) -> None:
    """As `choose` decides."""
    pytest.importorskip("triton")
    here = GPUS["sm_80"]
    spec = spec_of("LlamaDecoderLayer", tmp_path / "m")
    for rows in (1, 64):
        found = {lowered.op.name: lowered for lowered in kernels_gpu.decode_kernels(program_of(spec), here, rows) if lowered.op.layer == 0}
        for norm, product, gate in (("attn_norm", "qkv", None), ("mlp_norm", "gate_up", "gate")):
            part = found[product].op.part
            assert isinstance(part, Weight)
            n, k = part.packed.shape
            asked = NormedProblem(Problem("linear", rows, n, k, part.packed.format, torch.bfloat16), gated=gate is not None)
            taken = choose(asked, here).options[0]
            inside = taken.candidate.takes_norm(asked, taken.config)
            assert (found[norm].fused_into == product) == inside
            assert found[norm].kernel == ("" if inside else "norm")
            if gate is not None:
                assert (found[gate].fused_into == product) == (taken.candidate.home != "")
        assert [found[name].fused_into for name in ("rope", "attn_residual", "mlp_residual")] == ["attention", "o_proj", "down_proj"]


@pytest.mark.parametrize(
    ("device", "case", "kernels"),
    [
        ("cpu", "Gemma2DecoderLayer", {"attn_norm": "in qkv", "mlp_norm": "in gate_up", "attn_post_norm": "norm", "rope": "in attention"}),
        ("cpu", "Gemma2DecoderLayer", {"attn_residual": "in attn_post_norm", "mlp_residual": "in mlp_post_norm", "gate": "in gate_up"}),
        ("cpu", "GraniteDecoderLayer", {"attn_residual": "scale", "mlp_residual": "scale", "mlp_norm": "in gate_up"}),
        ("cpu", "Olmo2DecoderLayer", {"qk_norm": "norm", "attention": "attend"}),
        ("cpu", "Qwen2MoeDecoderLayer", {"mlp_norm": "in router", "shared_expert_gate": "in shared_expert.down_proj"}),
        ("cpu", "Qwen2MoeDecoderLayer", {"experts.gate": "in experts.gate_up", "mlp_residual": "in experts.down_proj"}),
        ("sm_80", "Gemma2DecoderLayer", {"attn_post_norm": "norm", "attn_residual": "in attn_post_norm", "mlp_norm": "in attn_post_norm"}),
        ("sm_80", "Gemma2DecoderLayer", {"mlp_post_norm": "norm", "mlp_residual": "in mlp_post_norm", "gate_up": "skinny"}),
        (
            "sm_80",
            "CohereDecoderLayer",
            {"attn_norm": "norm", "gate": "gates", "attn_residual": "in o_proj", "mlp_residual": "in down_proj"},
        ),
        ("sm_80", "Olmo2DecoderLayer", {"qk_norm": "norm", "rope": "in attention", "attention": "attend"}),
        ("sm_80", "Qwen3DecoderLayer", {"qk_norm": "in attention", "attn_norm": "in qkv"}),
        ("sm_80", "ArceeDecoderLayer", {"mlp_norm": "in up_proj", "activation": "gates"}),
        ("sm_80", "Qwen2MoeDecoderLayer", {"mlp_norm": "in router", "router": "routing", "shared_expert_gate": "in router"}),
        ("sm_80", "Qwen2MoeDecoderLayer", {"experts.gate_up": "grouped", "experts.gate": "in experts.gate_up", "mlp_residual": "routing"}),
        (
            "cpu",
            "Gemma4TextDecoderLayer, shared keys",
            {"per_layer_gate": "in per_layer_input_gate", "per_layer_residual": "in per_layer_post_norm"},
        ),
        ("sm_80", "Gemma4TextDecoderLayer, shared keys", {"per_layer_gate": "gates", "per_layer_residual": "in per_layer_post_norm"}),
        ("sm_80", "GptOssDecoderLayer", {"attention": "attend", "experts.gate": "gates", "experts.down_proj": "grouped"}),
    ],
)
def test_what_is_fused(device: str, case: str, kernels: dict[str, str], tmp_path: Path) -> None:
    if device != "cpu":
        pytest.importorskip("triton")
    found = {
        lowered.op.name: lowered for lowered in explain_decoder(spec_of(case, tmp_path / "m"), device).kernels if lowered.op.layer == 0
    }
    said = {name: f"in {found[name].fused_into}" if found[name].fused_into else found[name].kernel for name in kernels}
    assert said == kernels


def test_experts_have_as_many_rows_as_the_router_chooses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("triton")
    asked: set[tuple[str, int]] = set()
    real = kernels_gpu.choose

    def noted(problem: Problem | NormedProblem | AttentionProblem, here: Gpu) -> object:
        product = problem.product if isinstance(problem, NormedProblem) else problem
        if isinstance(product, Problem):
            asked.add((product.op, product.m))
        return real(problem, here)

    monkeypatch.setattr(kernels_gpu, "choose", noted)
    explain_decoder(spec_of("Qwen3MoeDecoderLayer", tmp_path / "m"), "sm_90", rows=5)
    assert asked == {("linear", 5), ("grouped_linear", 15)}


def test_what_kernels_of_a_gpu_do_not_compute(tmp_path: Path) -> None:
    pytest.importorskip("triton")
    amd = explain_decoder(spec_of("Gemma3DecoderLayer", tmp_path / "gemma3"), "gfx942").kernels
    reasons = {lowered.op.name: lowered.reason or "" for lowered in amd if lowered.op.layer == 0 and lowered.kernel == TORCH}
    assert {"attn_norm", "attention", "gate", "attn_residual"} <= {*reasons}
    assert all("NVIDIA GPUs only" in reason for reason in reasons.values())
    granite = spec_of("GraniteDecoderLayer", tmp_path / "granite", compute="int8")
    found = {lowered.op.name: lowered for lowered in explain_decoder(granite, "sm_80").kernels if lowered.op.layer == 0}
    assert (found["qkv"].kernel, found["attn_norm"].kernel, found["gate"].kernel) == ("gemm_int8", "norm", "gates")
    experts = spec_of("Qwen3MoeDecoderLayer", tmp_path / "moe", compute="int8")
    said = [
        lowered for lowered in explain_decoder(experts, "sm_90").kernels if lowered.op.layer == 0 and lowered.op.kind in ("router", "gate")
    ]
    assert [lowered.reason for lowered in said] == ["its experts compute in int8"] * 2


def test_explanation(tmp_path: Path) -> None:
    spec = spec_of("Qwen3MoeDecoderLayer", tmp_path / "m")
    found = explain_decoder(spec, rows=2)
    assert [group.layers for group in found.groups] == [(), (0, 2), (1,), (), ()][: len(found.groups)]
    document = json.loads(json.dumps(found.to_json(), allow_nan=False))
    assert (document["machine"], document["rows"], document["native_calls"]) == ("the CPU", 2, ["decode step"])
    ops = {op["name"]: op for op in document["groups"][1]["ops"]}
    assert ops["qkv"]["kernel"] == "int8"
    assert ops["mlp_norm"]["fused_into"] == "router"
    assert ops["experts.gate_up"]["shape"] == [8, 128, 48]
    assert "layers 0, 2\n" in str(found)
    assert str(found).startswith(
        "one new token of 2 sequences on the CPU, float32 activations\none native call (decode step)\nembed_tokens"
    )
    with pytest.raises(ArgumentError, match="decodes 1 to 21 sequences at a time on a CPU, got 22"):
        explain_decoder(spec, rows=22)
    with pytest.raises(ArgumentError, match="1 or more sequences, got 0"):
        explain_decoder(spec, rows=0)
    with pytest.raises(UnsupportedError, match="in float32, not in bfloat16"):
        explain_decoder(spec, dtype=torch.bfloat16)
    with pytest.raises(UnsupportedError, match="'abacus'"):
        explain_decoder(spec, "abacus")
    odd = spec_of("LlamaDecoderLayer", tmp_path / "odd")
    layer = odd.layers[0]
    narrow = replace(layer, mlp=layer.mlp._replace(activation="gelu"))  # type: ignore[union-attr]
    with pytest.raises(UnsupportedError, match="layer 0 has no kernel on a CPU: its activation is gelu"):
        explain_decoder(replace(odd, layers=(narrow, *odd.layers[1:])))


def test_sparse_weights_are_shown(tmp_path: Path) -> None:
    torch.manual_seed(7)
    model = make_decoder("Llama", hidden_size=64, num_attention_heads=4, num_key_value_heads=2, intermediate_size=96)
    hb.save(hb.quantize_(hb.prune_(model, "2:4"), "q8_0"), tmp_path / "m")
    for sparse in (True, False):
        program = program_of(build_spec(*open_checkpoint(tmp_path / "m", sparse=sparse)))
        qkv = next(op for op in program.ops if op.name == "qkv")
        assert (qkv.setting("sparsity") == "2:4") == (sparse and current().spreads)

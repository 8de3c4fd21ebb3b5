"""Architectures that are read from GGUF and not written: files as llama.cpp's converter makes them, against transformers and llama.cpp."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from ggml_blocks import to_blocks
from language_model import FloatTensors, make_tokenizer
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.checkpoint import describe, load
from halfbyte.checkpoint.gguf import vocabulary as gguf_vocabulary
from halfbyte.checkpoint.gguf.names import ARCHITECTURES, Architecture
from halfbyte.decoder.build import build_spec
from halfbyte.decoder.cache import Cache
from halfbyte.decoder.lower_cpu import CpuModel
from halfbyte.errors import CheckpointError, UnsupportedError
from halfbyte.io import gguf
from halfbyte.language.checkpoint_tensors import open_checkpoint
from halfbyte.nn.modules.quantized import QuantLinear

SIZES: dict[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 96,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
    "rope_parameters": {"rope_type": "default", "rope_theta": 1e4},
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
NUMBERS: dict[str, Any] = {
    "context_length": 128,
    "embedding_length": 64,
    "block_count": 3,
    "feed_forward_length": 96,
    "attention.head_count": 4,
    "attention.head_count_kv": 2,
    "attention.layer_norm_rms_epsilon": 1e-5,
    "rope.freq_base": 1e4,
}
EXPERTS = {"n_routed_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "n_shared_experts": 1, "first_k_dense_replace": 1}
ROUTING = {"norm_topk_prob": True, "routed_scaling_factor": 1.5, "n_group": 1, "topk_group": 1}
OF_EXPERTS = {"expert_count": 8, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_count": 1}
OF_EXPERTS |= {"leading_dense_block_count": 1, "expert_weights_scale": 1.5, "expert_weights_norm": True, "expert_gating_func": 2}
LATENT = {"kv_lora_rank": 32, "qk_rope_head_dim": 16, "qk_nope_head_dim": 32, "v_head_dim": 32, "num_key_value_heads": 4}
OLDER = {"attention.kv_lora_rank": 32, "attention.key_length": 48, "attention.value_length": 32, "rope.dimension_count": 16}
OF_LATENT = OLDER | {"attention.key_length_mla": 48, "attention.value_length_mla": 32, "attention.head_count_kv": 1}
YARN = {"rope_type": "yarn", "rope_theta": 1e4, "factor": 4.0, "original_max_position_embeddings": 32, "beta_fast": 32.0, "beta_slow": 1.0}
OF_YARN = {"type": "yarn", "factor": 4.0, "original_context_length": 32, "yarn_log_multiplier": 0.0707}
DELTA = {"linear_key_head_dim": 32, "linear_value_head_dim": 32, "linear_num_key_heads": 2, "linear_num_value_heads": 4, "head_dim": 64}
DELTA |= {"layer_types": ["linear_attention", "full_attention", "linear_attention"]}
DELTA |= {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.25, "mrope_section": [3, 3, 2]}}
OF_DELTA = {"full_attention_interval": 2, "ssm.conv_kernel": 4, "ssm.state_size": 32, "ssm.group_count": 2, "ssm.time_step_rank": 4}
OF_DELTA |= {"ssm.inner_size": 128, "attention.key_length": 64, "attention.value_length": 64, "rope.dimension_count": 16}
SHARING = {"num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "shared_expert_intermediate_size": 32}
OF_SHARING = {"expert_count": 2, "expert_used_count": 2, "expert_feed_forward_length": 32, "expert_shared_feed_forward_length": 32}
GEMMA3N_BASES = {"sliding_attention": 1e4, "full_attention": 1e6}
GEMMA4 = {"head_dim": 24, "global_head_dim": 32, "sliding_window": 16, "final_logit_softcapping": 30.0, "num_hidden_layers": 4}
GEMMA4 |= {"layer_types": ["sliding_attention", "full_attention"] * 2}
GEMMA4 |= {
    "rope_parameters": {
        "sliding_attention": {"rope_type": "default", "rope_theta": 1e4},
        "full_attention": {"rope_type": "proportional", "partial_rotary_factor": 0.25, "rope_theta": 1e6},
    }
}
OF_GEMMA4 = {"block_count": 4, "attention.key_length": 32, "attention.value_length": 32, "attention.key_length_swa": 24}
OF_GEMMA4 |= {"attention.value_length_swa": 24, "attention.sliding_window": 16, "attention.sliding_window_pattern": [True, False] * 2}
OF_GEMMA4 |= {"rope.freq_base": 1e6, "rope.freq_base_swa": 1e4, "rope.dimension_count": 32, "rope.dimension_count_swa": 24}
OF_GEMMA4 |= {"final_logit_softcapping": 30.0}
GRANITE: dict[str, Any] = {"embedding_multiplier": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.25, "logits_scaling": 3.0}
GRANITE |= {"mamba_n_heads": 8, "mamba_d_head": 16, "mamba_d_state": 16, "layer_types": ["mamba", "attention", "mamba"]}
GRANITE |= {"position_embedding_type": "nope", "tie_word_embeddings": True}
OF_GRANITE = {"embedding_scale": 2.0, "residual_scale": 0.5, "attention.scale": 0.25, "logit_scale": 3.0, "rope.scaling.finetuned": False}
OF_GRANITE |= {"ssm.conv_kernel": 4, "ssm.state_size": 16, "ssm.group_count": 1, "ssm.inner_size": 128, "ssm.time_step_rank": 8}
OF_GRANITE |= {"attention.head_count_kv": [0, 2, 0], "expert_shared_feed_forward_length": 96, "rope.dimension_count": 16}
# Name of the case: (class of transformers, settings of its config, metadata). llama.cpp takes a DeepSeek-V2 without q_lora_rank for one of
# 27 layers; that all experts are used keeps routes from depending on its rounding. Its interleaved M-RoPE rotates the pair i of text by
# section i % 3 only below 3 * that section's size, and other pairs not at all, so Qwen3-VL's sections here have all pairs.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen2vl": ("Qwen2ForCausalLM", {}, {"rope.dimension_sections": [2, 3, 3, 0]}),
    "qwen3vl": (
        "Qwen3ForCausalLM",
        {"head_dim": 16},
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 0},
    ),
    "qwen3vlmoe": (
        "Qwen3MoeForCausalLM",
        {"head_dim": 16, "num_experts": 2, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "norm_topk_prob": True},
        {"attention.key_length": 16, "attention.value_length": 16, "rope.dimension_sections": [3, 3, 2, 0], "n_deepstack_layers": 0}
        | {"expert_count": 2, "expert_used_count": 2, "expert_feed_forward_length": 32},
    ),
    "glm4moe": (
        "Glm4MoeForCausalLM",
        {**EXPERTS, **ROUTING, "head_dim": 16, "attention_bias": True, "use_qk_norm": True}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {**OF_EXPERTS, "attention.key_length": 16, "attention.value_length": 16, "rope.dimension_count": 8},
    ),
    "minimax-m2": (
        "MiniMaxM2ForCausalLM",
        {"head_dim": 32, "num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 64}
        | {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4, "partial_rotary_factor": 0.5}},
        {"expert_count": 4, "expert_used_count": 4, "feed_forward_length": 64, "expert_feed_forward_length": 64, "expert_gating_func": 2}
        | {"attention.key_length": 32, "attention.value_length": 32, "rope.dimension_count": 16},
    ),
    "dots1": (  # llama.cpp reads as many heads of keys as of queries, which the published models have
        "Dots1ForCausalLM",
        EXPERTS | ROUTING | {"num_key_value_heads": 4},
        OF_EXPERTS | {"rope.dimension_count": 16, "attention.head_count_kv": 4},
    ),
    "exaone": ("LlamaForCausalLM", {}, {"rope.dimension_count": 16}),
    "internlm2": ("LlamaForCausalLM", {}, {"rope.dimension_count": 16}),
    "deepseek2": (
        "DeepseekV3ForCausalLM",
        {**EXPERTS, **ROUTING, **LATENT, "q_lora_rank": 32, "rope_parameters": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0}},
        {**OF_EXPERTS, **OF_LATENT, "attention.q_lora_rank": 32}
        | {f"rope.scaling.{key}": value for key, value in (OF_YARN | {"yarn_log_multiplier": 0.1}).items()},
    ),
    "deepseek2, an older file": (
        "DeepseekV3ForCausalLM",
        {**EXPERTS, **ROUTING, **LATENT, "q_lora_rank": 32},
        {**OF_EXPERTS, **OLDER, "attention.head_count_kv": 4, "attention.q_lora_rank": 32},
    ),
    "deepseek2, DeepSeek-V2": (
        "DeepseekV2ForCausalLM",
        {**EXPERTS, **ROUTING, **LATENT, "q_lora_rank": None, "norm_topk_prob": False, "topk_method": "greedy", "num_hidden_layers": 27}
        | {"n_routed_experts": 2, "rope_parameters": YARN | {"mscale": 0.707, "mscale_all_dim": 0.707}},
        {**OF_EXPERTS, **OF_LATENT, "block_count": 27, "expert_gating_func": 1, "expert_weights_norm": False, "expert_count": 2}
        | {f"rope.scaling.{key}": value for key, value in OF_YARN.items()},
    ),
    "lfm2moe": (
        "Lfm2MoeForCausalLM",
        {"norm_eps": 1e-5, "num_dense_layers": 1, "num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
        | {"layer_types": ["conv", "full_attention", "conv"]},
        {"attention.head_count_kv": [0, 2, 0], "shortconv.l_cache": 3, "expert_count": 8, "expert_used_count": 2}
        | {"expert_feed_forward_length": 32, "leading_dense_block_count": 1, "expert_gating_func": 2},
    ),
    "qwen3next": ("Qwen3NextForCausalLM", DELTA | SHARING, OF_DELTA | OF_SHARING),
    "qwen35": ("Qwen3_5ForCausalLM", DELTA, OF_DELTA | {"rope.dimension_sections": [3, 3, 2, 0]}),
    "qwen35moe": (
        "Qwen3_5MoeForCausalLM",
        DELTA | SHARING,
        OF_DELTA | OF_SHARING | {"rope.dimension_sections": [3, 3, 2, 0], "feed_forward_length": None},
    ),
    "gemma3n": (
        "Gemma3nForCausalLM",
        {"head_dim": 16, "sliding_window": 16, "num_hidden_layers": 25, "num_kv_shared_layers": 5, "hidden_size_per_layer_input": 256}
        | {"rope_parameters": {kind: {"rope_type": "default", "rope_theta": base} for kind, base in GEMMA3N_BASES.items()}},
        {"block_count": 25, "attention.shared_kv_layers": 5, "embedding_length_per_layer_input": 256, "feed_forward_length": [96] * 25}
        | {"attention.key_length": 16, "attention.value_length": 16, "attention.sliding_window": 16, "rope.freq_base": 1e6}
        | {"rope.freq_base_swa": 1e4, "attention.sliding_window_pattern": [True, True, True, True, False] * 5},
    ),
    "gemma4": (
        "Gemma4ForCausalLM",
        GEMMA4 | {"hidden_size_per_layer_input": 32, "num_kv_shared_layers": 2, "use_double_wide_mlp": True},
        OF_GEMMA4 | {"embedding_length_per_layer_input": 32, "attention.shared_kv_layers": 2, "feed_forward_length": [96, 96, 192, 192]},
    ),
    "gemma4, with experts": (
        "Gemma4ForCausalLM",
        GEMMA4
        | {"hidden_size_per_layer_input": 0, "num_global_key_value_heads": 1, "attention_k_eq_v": True, "enable_moe_block": True}
        | {"num_experts": 4, "top_k_experts": 4, "moe_intermediate_size": 32},
        OF_GEMMA4
        | {"embedding_length_per_layer_input": 0, "attention.shared_kv_layers": 0, "attention.head_count_kv": [2, 1, 2, 1]}
        | {"expert_count": 4, "expert_used_count": 4, "expert_feed_forward_length": 32},
    ),
    "granitehybrid": (
        "GraniteMoeHybridForCausalLM",
        GRANITE | {"num_local_experts": 0, "shared_intermediate_size": 96},
        OF_GRANITE | {"expert_count": 0},
    ),
    "granitehybrid, with experts": (
        "GraniteMoeHybridForCausalLM",
        GRANITE | {"num_local_experts": 4, "num_experts_per_tok": 4, "intermediate_size": 32, "shared_intermediate_size": 96},
        OF_GRANITE | {"expert_count": 4, "expert_used_count": 4, "feed_forward_length": 32},
    ),
    "ernie4_5-moe": (
        "Ernie4_5_MoeForCausalLM",
        {"moe_num_experts": 4, "moe_k": 4, "moe_intermediate_size": 32, "moe_num_shared_experts": 2, "tie_word_embeddings": False},
        {"expert_count": 4, "expert_used_count": 4, "expert_feed_forward_length": 32, "expert_shared_count": 2}
        | {"expert_shared_feed_forward_length": 64, "leading_dense_block_count": 1, "interleave_moe_layer_step": 1},
    ),
    "apertus": ("ApertusForCausalLM", {}, {"rope.dimension_count": 16}),
    "gpt2": ("GPT2LMHeadModel", {}, {"attention.head_count_kv": 4, "attention.layer_norm_epsilon": 1e-5, "feed_forward_length": 256}),
}
TEXT = "the quick brown fox jumps over the lazy dog, 27 hens slept under an old oak tree"
UNREAD = ("attn_k.weight", "attn_v.weight", "attn_k_norm.weight")
XIELU = ("alpha_p", "alpha_n", "beta", "eps")


def make(case: str, folder: Path, *, quantized: bool = False) -> tuple[Any, list[int]]:
    """Writes m.gguf to the folder, its linear layers in Q8_0 if `quantized`; the model in it, whose numbers all matter, and tokens to try
    it with."""
    (kind, settings, numbers), name = CASES[case], case.partition(",")[0]
    sparse = bool(numbers.get("expert_count"))
    architecture = next(a for a in ARCHITECTURES if (a.name, a.model, a.expert_keys is not None) == (name, kind, sparse))
    tokenizer = make_tokenizer()
    cls: Any = getattr(transformers, kind)
    settings = settings | ({"vocab_size_per_layer_input": len(tokenizer)} if name in ("gemma3n", "gemma4") else {})
    torch.manual_seed(0)
    model = cls(cls.config_class(**{**SIZES, **settings, "vocab_size": len(tokenizer)})).eval()
    tensors: dict[str, Tensor] = {}
    types: dict[str, tuple[int, tuple[int, ...]]] = {}
    with torch.no_grad():
        for each, tensor in model.state_dict().items():
            if tensor.dim() == 1:
                tensor.normal_(0.0 if "bias" in each else 1.0, 0.3)
                if name == "gemma3n" and "post_" in each:  # the few activations that it leaves depend on llama.cpp's roundings
                    tensor.mul_(0.05)
            elif tensor.dim() > 1:
                tensor.normal_(0.0, tensor.shape[-1] ** -0.5)
        for each, tensor in model.state_dict().items():
            if quantized and any(copied in name for copied in ("qwen3", "hybrid", "internlm2")) and tensor.dim() > 1:
                tensor.copy_(ops.quantize(tensor, "q8_0").dequantize())
            for place, part in _parts(architecture, each, tensor, older="older" in case):
                small = any(kind in place for kind in ("_inp", "conv", "_coef")) or place.endswith((".ssm_a", ".ssm_d", "norm.weight"))
                kept = quantized and part.dim() > 1 and place.startswith(("blk.", "altup", "per_layer_model")) and not small
                types[place] = (8 if kept else 0, tuple(part.shape))
                codes = ops.quantize(part.contiguous(), "q8_0") if kept else None
                tensors[place] = part.contiguous() if codes is None else to_blocks(codes)
                if codes is not None:
                    part.copy_(codes.dequantize())
    if name == "gemma3n":
        for place in ("altup_proj.weight", "altup_unembd_proj.weight"):
            parts = [f"{place}.{i}" for i in range(3)]
            types[place], tensors[place] = (types[parts[0]][0], (3, 64, 64)), torch.stack([tensors[part] for part in parts])
            for part in parts:
                del types[part]
        for layer in range(20, 25):  # as in the files there are, though nothing reads them
            types |= {f"blk.{layer}.{part}": types[f"blk.0.{part}"] for part in UNREAD}
            tensors |= {f"blk.{layer}.{part}": tensors[f"blk.0.{part}"] for part in UNREAD}
    if model.config.tie_word_embeddings:
        del types["output.weight"]
    if name == "gemma4":
        tensors["rope_freqs.weight"], types["rope_freqs.weight"] = torch.tensor([1.0] * 4 + [1e30] * 12), (0, (16,))
    metadata: dict[str, Any] = {"general.architecture": name}
    numbers = {**NUMBERS, **numbers, "vocab_size": len(tokenizer)}
    metadata |= {f"{name}.{key}": value for key, value in numbers.items() if value is not None}
    if name == "apertus":
        state = model.state_dict()
        metadata |= {f"xielu.{part}": [float(state[f"model.layers.{i}.mlp.act_fn.{part}"]) for i in range(3)] for part in XIELU}
    tokenizer.save_pretrained(folder)
    metadata |= gguf_vocabulary.to_metadata(folder, {"model_type": name}, len(tokenizer))[0]
    writer = gguf.Writer(folder / "m.gguf", metadata, types)
    for place in types:
        writer.write(place, tensors[place].detach())
    writer.finish()
    return model, tokenizer(TEXT)["input_ids"]


def _parts(architecture: Architecture, name: str, tensor: Tensor, *, older: bool) -> list[tuple[str, Tensor]]:
    """What a tensor of the model is in a file: views of it by llama.cpp's names."""
    if "act_fn" in name:
        return []
    if ".altup_" in name:
        return [(f"altup_{'unembd_' * ('unembed' in name)}proj.weight.{name.split('.')[2]}", tensor)]
    if name.endswith("kv_b_proj.weight") and not older:
        heads, layer = tensor.view(4, 64, 32), f"blk.{name.split('.')[2]}"
        return [(f"{layer}.attn_k_b.weight", heads[:, :32].mT), (f"{layer}.attn_v_b.weight", heads[:, 32:])]
    if "qwen3" in architecture.name and (architecture.family.unit_offset or "linear_attn" in name):
        return _of_qwen(architecture, name, tensor)
    places = architecture.to_gguf(name)
    if architecture.name == "granitehybrid":  # llama.cpp's conversion/mamba.py and granite.py
        end = name.rpartition(".layers.")[2].partition(".")[2]
        if end == "shared_mlp.input_linear.weight":
            shared = "_shexp" * (architecture.expert_keys is not None)
            places = tuple(f"blk.{name.split('.')[2]}.ffn_{part}{shared}.weight" for part in ("gate", "up"))
            return list(zip(places, tensor.chunk(2), strict=True))
        if end in ("mamba.A_log", "mamba.D"):
            tensor = (-tensor.exp() if end == "mamba.A_log" else tensor)[:, None]
        elif end in ("mamba.norm.weight", "mamba.conv1d.weight"):
            tensor = tensor[None] if tensor.dim() == 1 else tensor[:, 0]
        elif end in ("self_attn.q_proj.weight", "self_attn.k_proj.weight"):
            tensor = tensor.view(4 if "q_proj" in end else 2, 2, 8, 64).transpose(1, 2).reshape(tensor.shape)
    if architecture.name == "internlm2" and name.endswith(("q_proj.weight", "k_proj.weight")):
        tensor = tensor.view(4 if "q_proj" in name else 2, 2, 8, 64).transpose(1, 2).reshape(tensor.shape)
    if architecture.gguf.inputs_first and tensor.dim() == 2 and ".h." in name:
        tensor = tensor.T
    if name.endswith("conv.conv.weight") or "moe_statics" in name:
        tensor = tensor.squeeze()
    return list(zip(places, tensor.chunk(len(places), dim=min(1, tensor.dim() - 1)), strict=True))


def _of_qwen(architecture: Architecture, name: str, tensor: Tensor) -> list[tuple[str, Tensor]]:
    """llama.cpp's conversion/qwen.py: 2 key heads and 4 value heads of 32."""
    end = name.rpartition("linear_attn.")[2]

    def tiled(values: Tensor) -> Tensor:
        return values if architecture.name == "qwen3next" else values.unflatten(0, (2, 2, -1)).transpose(0, 1).flatten(0, 2)

    if end == "in_proj_qkvz.weight":
        heads = tensor.view(2, 192, 64).split([32, 32, 64, 64], 1)
        q, k, v, z = (part.flatten(0, 1) for part in heads)
        layer = f"blk.{name.split('.')[2]}"
        return [(f"{layer}.attn_qkv.weight", torch.cat([q, k, v])), (f"{layer}.attn_gate.weight", z)]
    places, tensor = architecture.to_gguf(name), tensor.squeeze()
    if end in ("in_proj_qkv.weight", "conv1d.weight"):
        tensor = torch.cat([tensor[:128], tiled(tensor[128:])])
    elif end in ("in_proj_z.weight", "in_proj_a.weight", "in_proj_b.weight", "dt_bias", "A_log"):
        tensor = tiled(tensor)
    elif end == "out_proj.weight":
        tensor = tiled(tensor.T).T
    if end == "A_log":
        tensor = -tensor.exp()
    elif name.endswith("norm.weight") and end != "norm.weight":
        tensor = tensor + 1
    return list(zip(places, tensor.chunk(len(places), dim=min(1, tensor.dim() - 1)), strict=True))


def logits(model: nn.Module, ids: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize("case", CASES)
def test_a_file_is_the_model(case: str, tmp_path: Path) -> None:
    model, ids = make(case, tmp_path)
    loaded = load(tmp_path / "m.gguf")
    state = loaded.state_dict()
    assert state.keys() == model.state_dict().keys()
    # Of Qwen's newer models norms are stored plus one, and theirs and Granite's A as -exp: rounded to 2^-24.
    tolerance = 2e-6 if any(part in case for part in ("qwen35", "next", "hybrid")) else 0.0
    assert all(torch.allclose(state[name], tensor, rtol=0, atol=tolerance) for name, tensor in model.state_dict().items())
    assert torch.allclose(logits(loaded, ids), logits(model, ids), rtol=0, atol=50 * tolerance)
    assert ("takes images" in str(describe(tmp_path / "m.gguf"))) == any(part in case for part in ("vl", "qwen35", "gemma"))


@pytest.mark.parametrize("case", ["gpt2", "gemma3n", "deepseek2", "glm4moe", "qwen3next", "qwen35moe", "granitehybrid, with experts"])
def test_codes_are_kept(case: str, tmp_path: Path) -> None:
    """All but keys and values from latents, which no codes hold as transformers has them."""
    model, ids = make(case, tmp_path, quantized=True)
    loaded = load(tmp_path / "m.gguf")
    for module in loaded.modules():
        if hasattr(module, "compute"):
            module.compute = "float"
    assert torch.allclose(logits(loaded, ids), logits(model, ids), rtol=0, atol=1e-4)  # other orders of sums
    plain = {name.rpartition(".")[2] for name, module in loaded.named_modules() if type(module) is nn.Linear}
    small = {"shared_expert_gate", "prediction_coefs", "correction_coefs"}
    assert plain - small == {"lm_head"} | ({"kv_b_proj"} if case == "deepseek2" else set())
    assert any(isinstance(module, QuantLinear) for module in loaded.modules())


@pytest.mark.parametrize("case", ["gemma4", "glm4moe", "ernie4_5-moe", "minimax-m2", "dots1", "internlm2"])
def test_a_decoder_of_halfbytes_own_computes_the_same(case: str, tmp_path: Path) -> None:
    model, ids = make(case, tmp_path, quantized=True)
    native = CpuModel(build_spec(*open_floats(tmp_path / "m.gguf")))
    found, expected = native.prefill(ids, Cache(native.spec), every=True), logits(model, ids)
    assert torch.allclose(found, expected, rtol=0, atol=1e-4)  # other orders of sums


def open_floats(path: Path) -> tuple[dict[str, Any], Any]:
    config, tensors = open_checkpoint(path)
    return config, FloatTensors(tensors)


@pytest.mark.parametrize(
    ("case", "reason"), [("gemma4, with experts", "enable_moe_block = True"), ("gemma3n", "in no family"), ("qwen3next", "in no family")]
)
def test_what_that_decoder_does_not_compute(case: str, reason: str, tmp_path: Path) -> None:
    make(case, tmp_path)
    with pytest.raises(UnsupportedError, match=reason):
        build_spec(*open_floats(tmp_path / "m.gguf"))


@pytest.mark.parametrize("case", CASES)
def test_llama_cpp_computes_the_same(case: str, tmp_path: Path) -> None:
    """Its GELU is a table of float16: activations with errors of 2^-11, which add up over Gemma's layers. The rest is float32."""
    pytest.importorskip("xllamacpp")
    server = pytest.importorskip("llama_server").LlamaCpp
    model, ids = make(case, tmp_path)
    expected, reference = torch.log_softmax(logits(model, ids).double(), -1), server(tmp_path / "m.gguf")
    for count, found in reference.next_tokens(ids, 4, 10):
        for token, value in found.items():
            assert abs(value - float(expected[count - 1, token])) < 0.01


def test_layers_that_predict_further_tokens_are_left_out(tmp_path: Path) -> None:
    model, ids = make("glm4moe", tmp_path)
    file = gguf.read_header(tmp_path / "m.gguf")
    more = {name.replace("blk.2.", "blk.3."): entry for name, entry in file.entries.items() if name.startswith("blk.2.")}
    entries = {**file.entries, **more}
    metadata = {**file.metadata, "glm4moe.block_count": 4, "glm4moe.nextn_predict_layers": 1}
    writer = gguf.Writer(tmp_path / "n.gguf", metadata, {name: (entry.kind, entry.shape) for name, entry in entries.items()})
    for name, entry in entries.items():
        writer.write(name, gguf.read(entry))  # type: ignore[arg-type]
    writer.finish()
    assert torch.equal(logits(load(tmp_path / "n.gguf"), ids), logits(model, ids))


@pytest.mark.parametrize(
    ("case", "name", "other", "message"),
    [
        ("apertus", b"xielu.beta", b"xielu.bexx", "None for xielu.beta, a number for each layer"),
        ("deepseek2", b"blk.1.attn_v_b.weight", b"blk.1.attn_v_c.weight", "are not 4 heads of latent attention"),
        ("deepseek2", b"deepseek2.attention.kv_lora_rank", b"deepseek2.attention.kv_lora_rxnk", "None for sizes of latent attention"),
        ("glm4moe", b"glm4moe.expert_count", b"glm4moe.expert_coxnt", "glm4moe without experts"),
    ],
)
def test_damaged_files(case: str, name: bytes, other: bytes, message: str, tmp_path: Path) -> None:
    make(case, tmp_path)
    content = (tmp_path / "m.gguf").read_bytes()
    assert name in content
    (tmp_path / "m.gguf").write_bytes(content.replace(name, other))
    with pytest.raises(CheckpointError, match=message):
        load(tmp_path / "m.gguf")

"""Architectures beyond Llama's in GGUF: settings, names and orders of rows both ways, and what llama.cpp computes from such files."""

from __future__ import annotations

import math
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from language_model import make_tokenizer
from torch import Tensor, nn

from halfbyte.checkpoint import describe, export, load
from halfbyte.checkpoint.gguf import vocabulary as gguf_vocabulary
from halfbyte.checkpoint.gguf.config import to_config, to_metadata
from halfbyte.checkpoint.gguf.names import ARCHITECTURES, Architecture, architecture_of_config
from halfbyte.errors import CheckpointError
from halfbyte.formats import ggml
from halfbyte.io import gguf
from halfbyte.nn.modules.experts import QuantExperts

SMALL: dict[str, Any] = {
    "hidden_size": 32,
    "num_hidden_layers": 5,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "intermediate_size": 48,
    "max_position_embeddings": 128,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "pad_token_id": 0,
}
GRANITE = {"embedding_multiplier": 3.0, "logits_scaling": 2.0, "residual_multiplier": 0.5, "attention_multiplier": 0.3}
YARN = {"rope_type": "yarn", "rope_theta": 1e6, "factor": 4.0, "original_max_position_embeddings": 16, "beta_fast": 4.0, "beta_slow": 1.0}
MINISTRAL = {**YARN, "mscale": 1.0, "mscale_all_dim": 1.0, "llama_4_scaling_beta": 0.1}
OLMO3 = {
    "full_attention": YARN | {"rope_theta": 5e5, "attention_factor": 0.1 * math.log(4.0) + 1},
    "sliding_attention": {"rope_type": "default", "rope_theta": 5e5},
}
HUNYUAN = {"rope_type": "dynamic", "rope_theta": 1e4, "alpha": 50.0, "factor": 1.0}
NAMES = {"olmo3": "olmo2"}  # of files
# Windows and first contexts of 16 tokens are shorter than the texts of the tests.
CONFIGS: dict[str, tuple[str, dict[str, Any]]] = {
    "smollm3": ("SmolLM3", {}),
    "granite": ("Granite", {**GRANITE, "attention_bias": True}),
    "arcee": ("Arcee", {}),
    "ernie4_5": ("Ernie4_5", {"head_dim": 8}),
    "olmo2": ("Olmo2", {}),
    "exaone4": ("Exaone4", {"sliding_window": None, "layer_types": ["full_attention"] * 5}),
    "exaone4 of 64 layers": ("Exaone4", {"sliding_window": 16, "num_hidden_layers": 64}),
    "seed_oss": ("SeedOss", {"head_dim": 16}),
    "glm4": ("Glm4", {"head_dim": 16}),
    "starcoder2": ("Starcoder2", {}),
    "stablelm": ("StableLm", {"use_qkv_bias": True}),
    "nemotron": ("Nemotron", {"attention_bias": True, "mlp_bias": True}),
    "phi2": ("Phi", {"num_key_value_heads": 4, "partial_rotary_factor": 0.5}),
    "olmo3": ("Olmo3", {"sliding_window": 16, "rope_parameters": OLMO3}),
    "hunyuan-dense": ("HunYuanDenseV1", {"head_dim": 16, "rope_parameters": HUNYUAN}),
    "command-r": ("Cohere", {"logit_scale": 0.25}),
    "cohere2": ("Cohere2", {"sliding_window": 16, "logit_scale": 0.25}),
    "mistral3": ("Ministral3", {"head_dim": 16, "rope_parameters": MINISTRAL}),
    "llama": ("Llama", {"rope_parameters": YARN}),
    "lfm2": ("Lfm2", {"layer_types": ["conv", "full_attention", "conv", "conv", "full_attention"], "block_multiple_of": 32}),
}
TEXT = "the quick brown fox jumps over the lazy dog, 27 hens slept under an old oak tree"


def make(name: str, folder: Path) -> tuple[nn.Module, list[int]]:
    """Writes m.gguf to the folder; the model in it, whose numbers all matter, and tokens to try it with."""
    tokenizer, (model, settings) = make_tokenizer(), CONFIGS[name]
    config = getattr(transformers, f"{model}Config")(**{**SMALL, **settings, "vocab_size": len(tokenizer)})
    torch.manual_seed(0)
    built: Any = getattr(transformers, f"{model}ForCausalLM")(config).eval()
    with torch.no_grad():
        for parameter in built.parameters():
            parameter.normal_(1.0 if parameter.dim() == 1 else 0.0, 0.3 if parameter.dim() == 1 else parameter.shape[-1] ** -0.5)
    built.save_pretrained(folder / "float")
    tokenizer.save_pretrained(folder / "float")
    export(folder / "float", folder / "m.gguf", "gguf")
    return built, tokenizer(TEXT)["input_ids"]


def logits(model: nn.Module, ids: list[int]) -> Tensor:
    with torch.no_grad():
        found: Tensor = model(torch.tensor([ids])).logits[0]
    return found


@pytest.mark.parametrize("name", [name for name in CONFIGS if "64" not in name])
def test_a_model_comes_back(name: str, tmp_path: Path) -> None:
    model, ids = make(name, tmp_path)
    assert len(ids) > 20
    assert gguf.read_header(tmp_path / "m.gguf").metadata["general.architecture"] == NAMES.get(name, name.split(maxsplit=1)[0])
    # Norms of Nemotron are stored plus one, in float32, which rounds: an error of 2^-24 in a few of the terms.
    # The base of HunYuan's is a product, and rounded.
    tolerance = 1e-4 if name in ("nemotron", "hunyuan-dense") else 0.0
    assert torch.allclose(logits(load(tmp_path / "m.gguf"), ids), logits(model, ids), rtol=0, atol=tolerance)


@pytest.mark.parametrize("name", CONFIGS)
def test_llama_cpp_computes_the_same(name: str, tmp_path: Path) -> None:
    """From float32 weights; it keeps keys and values in float16, errors of 2^-11 that add up over 5 layers, or 64."""
    pytest.importorskip("xllamacpp")
    server = pytest.importorskip("llama_server").LlamaCpp
    model, ids = make(name, tmp_path)
    expected, reference = torch.log_softmax(logits(model, ids).double(), -1), server(tmp_path / "m.gguf")
    compared = 0
    for count, found in reference.next_tokens(ids, 4, 10):
        for token, value in found.items():
            assert abs(value - float(expected[count - 1, token])) < 0.02
            compared += 1
    assert compared >= 20


def test_every_architecture_has_a_class_of_transformers() -> None:
    for architecture in ARCHITECTURES:
        assert hasattr(transformers, architecture.model), architecture.name
        if architecture.gguf.written:
            assert architecture_of_config({"model_type": architecture.model_type}) is architecture
    with pytest.raises(CheckpointError, match="got model_type 'glm4_moe'"):
        architecture_of_config({"model_type": "glm4_moe"})


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("smollm3", {"no_rope_layers": [1, 1, 0, 1, 1]}, r"with no_rope_layers \[1, 1, 0, 1, 1\], llama.cpp computes \[1, 1, 1, 0, 1\]"),
        ("smollm3", {"no_rope_layer_interval": 3}, "with no_rope_layer_interval 3"),
        ("stablelm", {"use_parallel_residual": True}, "with use_parallel_residual True"),
        ("exaone4", {"sliding_window": 16}, "with sliding_window 16, llama.cpp computes None"),
        ("arcee", {"mlp_bias": True}, "with mlp_bias True"),
        ("nemotron", {"hidden_act": "silu"}, "with hidden_act 'silu', llama.cpp computes 'relu2'"),
        ("olmo3", {"layer_types": ["full_attention"] * 5}, "with layer_types .*full_attention.*, llama.cpp computes .*sliding_attention"),
        ("olmo3", {"rope_parameters": OLMO3 | {"sliding_attention": {"rope_theta": 1e4}}}, "'rope_theta': 10000.0}, .* rope_theta 500000"),
        ("command-r", {"use_qk_norm": True}, "with use_qk_norm True"),
        ("cohere2", {"layer_types": ["full_attention"] * 5}, "with layer_types .*full_attention.*, llama.cpp computes .*sliding_attention"),
        ("exaone4 of 64 layers", {"layer_types": ["full_attention"] * 64}, "with layer_types"),
        ("mistral3", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}, "not scaled by yarn with mscale 1.0"),
        ("llama", {"rope_parameters": {**YARN, "attention_factor": 2.0}}, "yarn with attention_factor"),
    ],
)
def test_what_llama_cpp_cannot_be_told(name: str, changes: dict[str, Any], message: str) -> None:
    model, settings = CONFIGS[name]
    config = getattr(transformers, f"{model}Config")(**{**SMALL, **settings, "vocab_size": 100}).to_dict()
    to_metadata(config)
    with pytest.raises(CheckpointError, match=message):
        to_metadata(config | changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"query_pre_attn_scalar": 10}, "with query_pre_attn_scalar 10, llama.cpp computes 256"),
        ({"layer_types": ["full_attention"] * 5}, "with layer_types .*full_attention.*, llama.cpp computes .*sliding_attention"),
        ({"sliding_attention": {"rope_type": "default", "rope_theta": 5e4}}, "50000.0, .*, llama.cpp computes rope_theta 10000"),
        ({"num_hidden_layers": None}, "config.json has no num_hidden_layers"),
    ],
)
def test_what_llama_cpp_takes_for_granted_of_gemma(changes: dict[str, Any], message: str) -> None:
    config = transformers.Gemma3TextConfig(**SMALL, vocab_size=100).to_dict()
    assert to_metadata(config)[0]["gemma3.attention.head_count"] == 4
    if "sliding_attention" in changes:
        changes = {"rope_parameters": config["rope_parameters"] | changes}
    with pytest.raises(CheckpointError, match=message):
        to_metadata(config | changes)


def test_a_file_with_tensors_that_the_model_has_no_place_for(tmp_path: Path) -> None:
    """Such as norms that a variant has: without them its numbers would be others. Rotary frequencies and draft layers do not matter."""
    make("stablelm", tmp_path)
    file = gguf.read_header(tmp_path / "m.gguf")

    def with_tensor(name: str) -> Path:
        types = {each: (entry.kind, entry.shape) for each, entry in file.entries.items()} | {name: (0, (8,))}
        (tmp_path / "n.gguf").unlink(missing_ok=True)
        writer = gguf.Writer(tmp_path / "n.gguf", file.metadata, types)
        for each, entry in file.entries.items():
            writer.write(each, gguf.read(entry))  # type: ignore[arg-type]
        writer.write(name, torch.zeros(8))
        writer.finish()
        return tmp_path / "n.gguf"

    for name in ("blk.0.attn_q_norm.weight", "blk.0.attn_sinks.weight", "token_embd_norm.weight"):
        with pytest.raises(CheckpointError, match=f"{name}', which StableLmForCausalLM does not have"):
            load(with_tensor(name))
    for name in ("blk.0.attn_rot_embd", "blk.5.nextn.enorm.weight", "blk.0.ffn_up.input_scale"):
        load(with_tensor(name))


def test_a_hostile_number_of_layers() -> None:
    metadata: dict[str, Any] = {
        "general.architecture": "exaone4",
        **{f"exaone4.{key}": 8 for key in ("context_length", "embedding_length", "feed_forward_length", "attention.head_count")},
        "exaone4.block_count": 1 << 39,
        "exaone4.attention.layer_norm_rms_epsilon": 1e-5,
    }
    assert len(to_config(metadata, [], lambda name: torch.zeros(1))["layer_types"]) < 1 << 20


# gpt-oss, as llama.cpp's converter writes it


def gpt_oss(folder: Path, kind: int, *, truncate: bool = False) -> tuple[nn.Module, list[int]]:
    """Writes m.gguf as llama.cpp's converter does, experts in one of ggml's types; the model, and tokens to try it with."""
    tokenizer = make_tokenizer()
    sizes = {**SMALL, "hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 2, "vocab_size": len(tokenizer)}
    rope = {
        "rope_type": "yarn",
        "rope_theta": 1.5e5,
        "factor": 4.0,
        "original_max_position_embeddings": 32,
        "beta_fast": 32.0,
        "beta_slow": 1.0,
    }
    more = {"head_dim": 16, "num_local_experts": 4, "num_experts_per_tok": 2, "sliding_window": 16, "tie_word_embeddings": False}
    config = transformers.GptOssConfig(**sizes, **more, rope_parameters=rope | {"truncate": truncate})
    torch.manual_seed(0)
    model: Any = transformers.GptOssForCausalLM(config).eval()
    tensors: dict[str, Tensor] = {}
    layer = {
        "self_attn.sinks": "attn_sinks.weight", "input_layernorm.weight": "attn_norm.weight", "mlp.router.weight": "ffn_gate_inp.weight",
        "mlp.router.bias": "ffn_gate_inp.bias", "post_attention_layernorm.weight": "post_attention_norm.weight",
        **{f"self_attn.{a}_proj.{end}": f"attn_{b}.{end}" for a, b in (("q", "q"), ("k", "k"), ("v", "v"), ("o", "output"))
           for end in ("weight", "bias")},
    }  # fmt: skip
    ends = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight", "lm_head.weight": "output.weight"}
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.normal_(1.0 if "norm" in name else 0.0, 0.3 if parameter.dim() == 1 else 64**-0.5)
            layer_name = name.removeprefix("model.layers.").partition(".")[2]
            block = f"blk.{name.split('.')[2]}." if layer_name in layer or ".experts." in name else ""
            if name in ends or layer_name in layer:
                tensors[ends.get(name) or block + layer[layer_name]] = parameter
            elif name.endswith("_bias"):
                parts = (
                    {"ffn_gate_exps": parameter[:, ::2], "ffn_up_exps": parameter[:, 1::2]}
                    if "gate_up" in name
                    else {"ffn_down_exps": parameter}
                )
                tensors |= {f"{block}{part}.bias": value for part, value in parts.items()}
            else:
                parts = (
                    {"ffn_gate_exps": parameter[..., ::2], "ffn_up_exps": parameter[..., 1::2]}
                    if "gate_up" in name
                    else {"ffn_down_exps": parameter}
                )
                for part, value in parts.items():
                    rows = value.transpose(1, 2).contiguous()
                    if kind:
                        tensors[f"{block}{part}.weight"] = raw = torch.randint(0, 256, (*rows.shape[:2], 34), dtype=torch.uint8)
                        raw[..., ::17] = torch.randint(120, 124, raw[..., ::17].shape, dtype=torch.uint8)
                        value.copy_(ggml.decode(ggml.TYPES[kind], tuple(rows.shape), raw).dequantize().transpose(1, 2))
                    else:
                        tensors[f"{block}{part}.weight"] = rows
    head = {"context_length": 128, "embedding_length": 64, "block_count": 2, "feed_forward_length": 64, "expert_feed_forward_length": 64}
    head |= {"expert_count": 4, "expert_used_count": 2, "vocab_size": len(tokenizer)}
    head |= {"attention.head_count": 4, "attention.head_count_kv": 2, "attention.key_length": 16, "attention.value_length": 16}
    numbers: dict[str, Any] = {**head, "attention.sliding_window": 16, "attention.layer_norm_rms_epsilon": 1e-5, "rope.freq_base": 1.5e5}
    numbers |= {
        "rope.dimension_count": 16,
        "rope.scaling.type": "yarn",
        "rope.scaling.factor": 4.0,
        "rope.scaling.original_context_length": 32,
    }
    metadata: dict[str, Any] = {"general.architecture": "gpt-oss", **{f"gpt-oss.{key}": value for key, value in numbers.items()}}
    tokenizer.save_pretrained(folder)
    metadata |= gguf_vocabulary.to_metadata(folder, {"model_type": "gpt_oss"}, len(tokenizer))[0]
    experts = {name for name in tensors if "_exps.weight" in name and kind}
    types = {
        name: (kind if name in experts else 0, (*t.shape[:2], 64) if name in experts else tuple(t.shape)) for name, t in tensors.items()
    }
    writer = gguf.Writer(folder / "m.gguf", metadata, types)
    for name, tensor in tensors.items():
        writer.write(name, tensor.detach().contiguous())
    writer.finish()
    return model, tokenizer(TEXT)["input_ids"]


@pytest.mark.parametrize("kind", [0, 39])
def test_gpt_oss_is_read(kind: int, tmp_path: Path) -> None:
    model, ids = gpt_oss(tmp_path, kind)
    loaded, state = load(tmp_path / "m.gguf"), dict[str, Tensor]()
    for name, module in loaded.named_modules():
        if isinstance(module, QuantExperts):
            assert kind
            assert str(module.packed.format) == "mxfp4"
            state[name], module.compute = module.codes().dequantize().mT, "float"
    state |= loaded.state_dict()
    for name, parameter in model.state_dict().items():
        assert torch.equal(state[name], parameter), name
    assert torch.allclose(logits(loaded, ids), logits(model, ids), rtol=0, atol=1e-5)  # other strides, other order of sums
    assert len(describe(tmp_path / "m.gguf").quantized) == (4 if kind else 0)
    assert len([m for m in load(tmp_path / "m.gguf", format="q4_0").modules() if isinstance(m, QuantExperts)]) == 4


@pytest.mark.parametrize("kind", [0, 39])
def test_llama_cpp_computes_the_same_of_gpt_oss(kind: int, tmp_path: Path) -> None:
    """It rounds what goes into MXFP4 to 8 bits, and where it begins to scale frequencies, which the model's own config does not."""
    pytest.importorskip("xllamacpp")
    server = pytest.importorskip("llama_server").LlamaCpp
    model, ids = gpt_oss(tmp_path, kind, truncate=True)
    expected, reference = torch.log_softmax(logits(model, ids).double(), -1), server(tmp_path / "m.gguf")
    for count, found in reference.next_tokens(ids, 4, 10):
        for token, value in found.items():
            assert abs(value - float(expected[count - 1, token])) < (0.05 if kind else 0.01)


def test_gpt_oss_without_biases(tmp_path: Path) -> None:
    gpt_oss(tmp_path, 0)
    content = (tmp_path / "m.gguf").read_bytes()
    (tmp_path / "m.gguf").write_bytes(content.replace(b"blk.1.ffn_up_exps.bias", b"blk.1.ffn_up_shxp.bias"))
    with pytest.raises(CheckpointError, match="no matching biases"):
        load(tmp_path / "m.gguf")


@pytest.mark.parametrize(
    "damaged",
    [{"rope.freq_base": -1.0}, {"rope.scaling.type": "linear", "rope.scaling.factor": -2.0}, {"nextn_predict_layers": -3}]
    + [{"nextn_predict_layers": count} for count in (2, 5)],
)
def test_numbers_without_a_meaning(damaged: dict[str, Any]) -> None:
    """Negative frequencies are NaN, and models of no or negative numbers of layers are none."""
    numbers = {"context_length": 64, "embedding_length": 64, "block_count": 2, "feed_forward_length": 64, "attention.head_count": 4}
    numbers |= {"vocab_size": 32, "attention.layer_norm_rms_epsilon": 1e-5, **damaged}
    metadata = {"general.architecture": "llama", **{f"llama.{key}": value for key, value in numbers.items()}}
    with pytest.raises(CheckpointError, match="damaged"):
        to_config(metadata, [], lambda name: torch.ones(1))


def test_names_of_layers_elsewhere() -> None:
    """All names of tensors in layers begin with the family's name of the list of layers."""
    qwen = next(a for a in ARCHITECTURES if a.model_type == "qwen3_moe")
    moved = Architecture("moved", qwen.family, replace(qwen.gguf, layers="decoder.blocks"))
    stack = moved.stack_of("blk.2.ffn_up_exps.weight")
    assert stack is not None
    assert stack.target == "decoder.blocks.2.mlp.experts.gate_up_proj"
    assert moved.to_gguf(stack.target) == stack.parts == ("blk.2.ffn_gate_exps.weight", "blk.2.ffn_up_exps.weight")
    assert moved.to_transformers("blk.2.attn_q.weight") == "decoder.blocks.2.self_attn.q_proj.weight"

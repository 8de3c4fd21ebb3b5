"""What llama.cpp calls the tensors of a model, and what transformers calls them; how the numbers of a few differ."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

_ENDS = {"token_embd": "model.embed_tokens", "output_norm": "model.norm", "output": "lm_head"}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_FUSED = {"attn_qkv": "self_attn.qkv_proj", "ffn_up": "mlp.gate_up_proj"}
_FOUR_NORMS = {
    "post_attention_norm": "post_attention_layernorm",
    "ffn_norm": "pre_feedforward_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_IN_LAYER = re.compile(r"blk\.(\d+)\.(\w+)\.(weight|bias)")
_IN_MODULES = re.compile(r"model\.layers\.(\d+)\.([\w.]+)\.(weight|bias)")


@dataclass(frozen=True)
class Architecture:
    """One of llama.cpp's.

    model     the class in transformers that reads it
    types     the model_types of transformers that are written as it
    layer     llama.cpp's names in a layer -> transformers'
    permuted  whether rows of Q and K are in llama.cpp's order, each head's two halves interleaved
    plus_one  whether the weights of norms are stored plus one
    """

    model: str
    types: tuple[str, ...]
    layer: Mapping[str, str]
    permuted: bool = False
    plus_one: bool = False

    def to_transformers(self, name: str) -> str | None:
        """transformers' name of a tensor of a file, None where it has none."""
        head, _, end = name.rpartition(".")
        if head in _ENDS and end in ("weight", "bias"):
            return f"{_ENDS[head]}.{end}"
        found = _IN_LAYER.fullmatch(name)
        inner = found and self.layer.get(found[2])
        return f"model.layers.{int(found[1])}.{inner}.{found[3]}" if found and inner else None

    def to_gguf(self, name: str) -> str | None:
        """The inverse."""
        head, _, end = name.rpartition(".")
        ends = {theirs: mine for mine, theirs in _ENDS.items()}
        if head in ends:
            return f"{ends[head]}.{end}"
        found = _IN_MODULES.fullmatch(name)
        inner = found and {theirs: mine for mine, theirs in self.layer.items()}.get(found[2])
        return f"blk.{found[1]}.{inner}.{found[3]}" if found and inner else None

    def rows(self, name: str, heads: int, kv_heads: int, rows: int) -> Tensor | None:
        """For a tensor by llama.cpp's name: which row of transformers' is each of its rows; None where they are the same."""
        found = _IN_LAYER.fullmatch(name)
        if not self.permuted or found is None or found[2] not in ("attn_q", "attn_k"):
            return None
        count = heads if found[2] == "attn_q" else kv_heads
        if count < 1 or rows % (2 * count):
            return None
        return torch.arange(rows).view(count, 2, -1).transpose(1, 2).flatten()

    def is_norm(self, name: str) -> bool:
        """Whether a tensor, by llama.cpp's name, is the weight of a norm."""
        return name.endswith("norm.weight")


ARCHITECTURES: dict[str, Architecture] = {
    "llama": Architecture("LlamaForCausalLM", ("llama", "mistral"), _LAYER, permuted=True),
    "qwen2": Architecture("Qwen2ForCausalLM", ("qwen2",), _LAYER),
    "qwen3": Architecture("Qwen3ForCausalLM", ("qwen3",), _LAYER),
    "phi3": Architecture("Phi3ForCausalLM", ("phi3",), {**_LAYER, **_FUSED}),
    "gemma": Architecture("GemmaForCausalLM", ("gemma",), _LAYER, plus_one=True),
    "gemma2": Architecture("Gemma2ForCausalLM", ("gemma2",), {**_LAYER, **_FOUR_NORMS}, plus_one=True),
    "gemma3": Architecture("Gemma3ForCausalLM", ("gemma3_text",), {**_LAYER, **_FOUR_NORMS}, plus_one=True),
}
BY_MODEL_TYPE = {model_type: name for name, architecture in ARCHITECTURES.items() for model_type in architecture.types}

"""The architectures that GGUF files are read and written for: llama.cpp's tensor names and transformers', and how values differ."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from reprlib import repr as short
from typing import Any

from torch import Tensor

from halfbyte.checkpoint.gguf_orders import Order, apart, halves, tiled
from halfbyte.errors import CheckpointError

_ENDS = {"token_embd": "model.embed_tokens", "output": "lm_head"}
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
_POST_NORMS = {"post_attention_norm": "post_attention_layernorm", "post_ffw_norm": "post_feedforward_layernorm"}
_GLM_NORMS = {"post_attention_norm": "post_self_attn_layernorm", "post_ffw_norm": "post_mlp_layernorm"}
_MLP = ("ffn_gate", "ffn_up", "ffn_down")
_GPT2 = {
    "attn_norm": "ln_1",
    "attn_qkv": "attn.c_attn",
    "attn_output": "attn.c_proj",
    "ffn_norm": "ln_2",
    "ffn_up": "mlp.c_fc",
    "ffn_down": "mlp.c_proj",
}
_GPT2_ENDS = {"token_embd": "transformer.wte", "position_embd": "transformer.wpe", "output": "lm_head"}
_LFM2 = {
    "attn_norm": "operator_norm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.out_proj",
    "attn_q_norm": "self_attn.q_layernorm",
    "attn_k_norm": "self_attn.k_layernorm",
    "shortconv.in_proj": "conv.in_proj",
    "shortconv.conv": "conv.conv",
    "shortconv.out_proj": "conv.out_proj",
    "ffn_norm": "ffn_norm",
    "ffn_gate": "feed_forward.w1",
    "ffn_up": "feed_forward.w3",
    "ffn_down": "feed_forward.w2",
}
_LFM2_SIZES = {"shortconv.l_cache": "conv_L_cache"}
# Gated delta nets. Of Qwen3-Next older files have queries, keys, values and gates in one tensor, as transformers has them.
_DELTA = {"ssm_conv1d": "linear_attn.conv1d", "ssm_norm": "linear_attn.norm", "ssm_out": "linear_attn.out_proj"}
_DELTA_NEXT = _DELTA | {"ssm_in": "linear_attn.in_proj_qkvz", "ssm_ba": "linear_attn.in_proj_ba"}
_DELTA_35 = _DELTA | {
    "attn_qkv": "linear_attn.in_proj_qkv",
    "attn_gate": "linear_attn.in_proj_z",
    "ssm_beta": "linear_attn.in_proj_b",
    "ssm_alpha": "linear_attn.in_proj_a",
}
_DELTA_WHOLE = {"ssm_dt.bias": "linear_attn.dt_bias", "ssm_a": "linear_attn.A_log"}
_DELTA_SIZES = {
    "ssm.conv_kernel": "linear_conv_kernel_dim",
    "ssm.state_size": "linear_key_head_dim",
    "ssm.group_count": "linear_num_key_heads",
    "ssm.time_step_rank": "linear_num_value_heads",
}

# Layers with Mamba 2 for attention, and a dense MLP that all tokens go to, whose gate and up transformers joins.
_MAMBA = {"ssm_in": "mamba.in_proj", "ssm_conv1d": "mamba.conv1d", "ssm_norm": "mamba.norm", "ssm_out": "mamba.out_proj"}
_MAMBA_WHOLE = {"ssm_dt.bias": "mamba.dt_bias", "ssm_a": "mamba.A_log", "ssm_d": "mamba.D"}
_MAMBA_SIZES = {
    "ssm.conv_kernel": "mamba_d_conv",
    "ssm.state_size": "mamba_d_state",
    "ssm.group_count": "mamba_n_groups",
    "ssm.time_step_rank": "mamba_n_heads",
}

_GEMMA3N = {
    **_LAYER,
    **_FOUR_NORMS,
    "inp_gate": "per_layer_input_gate",
    "proj": "per_layer_projection",
    "post_norm": "post_per_layer_input_norm",
    "altup_correct_coef": "altup.correction_coefs",
    "altup_predict_coef": "altup.prediction_coefs",
    "altup_router": "altup.modality_router",
    "altup_router_norm": "altup.router_norm",
    "laurel_l": "laurel.linear_left",
    "laurel_r": "laurel.linear_right",
    "laurel_post_norm": "laurel.post_laurel_norm",
}
_GEMMA4 = {
    **{name: module for name, module in _GEMMA3N.items() if not name.startswith(("altup", "laurel"))},
    "ffn_gate_inp": "router.proj",
    "pre_ffw_norm_2": "pre_feedforward_layernorm_2",
    "post_ffw_norm_1": "post_feedforward_layernorm_1",
    "post_ffw_norm_2": "post_feedforward_layernorm_2",
}
_GEMMA4_WHOLE = {
    "layer_output_scale.weight": "layer_scalar",
    "ffn_gate_inp.scale": "router.scale",
    "ffn_down_exps.scale": "router.per_expert_scale",
}
_GEMMA4_ENDS = _ENDS | {
    "per_layer_token_embd": "model.embed_tokens_per_layer",
    "per_layer_model_proj": "model.per_layer_model_projection",
    "per_layer_proj_norm": "model.per_layer_projection_norm",
}
_GEMMA3N_SIZES = {
    "embedding_length_per_layer_input": "hidden_size_per_layer_input",
    "attention.shared_kv_layers": "num_kv_shared_layers",
}
_GEMMA4_SIZES = {**_GEMMA3N_SIZES, "attention.key_length": "global_head_dim"}


def _without(*names: str) -> dict[str, str]:
    return {name: module for name, module in _LAYER.items() if name not in names}


_SPARSE = _without(*_MLP) | {"ffn_gate_inp": "mlp.gate"}
_QWEN35 = _without("ffn_norm") | {"post_attention_norm": "post_attention_layernorm"}
# Layers with experts that all tokens go to; the first layers have no other.
_SHARING = _LAYER | {f"{part}_shexp": _LAYER[part].replace("mlp", "mlp.shared_experts") for part in _MLP} | {"ffn_gate_inp": "mlp.gate"}
_LATENT = {
    **{name: module for name, module in _SHARING.items() if name not in ("attn_k", "attn_v", "attn_q_norm", "attn_k_norm")},
    "attn_q_a": "self_attn.q_a_proj",
    "attn_q_a_norm": "self_attn.q_a_layernorm",
    "attn_q_b": "self_attn.q_b_proj",
    "attn_kv_a_mqa": "self_attn.kv_a_proj_with_mqa",
    "attn_kv_a_norm": "self_attn.kv_a_layernorm",
    "attn_kv_b": "self_attn.kv_b_proj",
}
# Stacks of experts [E, N, K]: transformers' name and llama.cpp's, whose rows are concatenated in transformers; the last is of newer files.
_WRITTEN_STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_STACKS = (*_WRITTEN_STACKS.items(), ("gate_up_proj", ("ffn_gate_up_exps",)))
_SHARED = {
    "ffn_gate_inp_shexp": "mlp.shared_expert_gate",
    "ffn_gate_shexp": "mlp.shared_expert.gate_proj",
    "ffn_up_shexp": "mlp.shared_expert.up_proj",
    "ffn_down_shexp": "mlp.shared_expert.down_proj",
}
# Mixtral in llama.cpp before 2024, one tensor per expert, and the names in safetensors.
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_ONE_EXPERT_PARTS = {"gate": "w1", "down": "w2", "up": "w3"}
# Tensors that transformers' models do not use: multi-token prediction layers, scales of activations, and tensors that a config expresses
# by settings.
_NEXTN, _ROTARY = re.compile(r"blk\.\d+\.nextn\..*"), ("attn_rot_embd", "rope_freqs", "rope_factors_long", "rope_factors_short")
_IN_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_EXPERTS_IN_MODULES = re.compile(r"model\.layers\.(\d+)\.([\w.]*experts)\.(\w+?)(?:\.weight)?")
_SCORE_BIAS = {"exp_probs_b.bias": "mlp.gate.e_score_correction_bias"}


@dataclass(frozen=True)
class Architecture:
    """An architecture of llama.cpp, or the variant of it that one class of transformers implements. Keys of the metadata are given without
    the architecture's name.

    name      llama.cpp's
    model     the class in transformers
    types     the model_types of transformers that are written as it
    layer     llama.cpp's names in a layer -> transformers'
    order     of rows, where it is not transformers'
    plus_one  whether the weights of norms are stored plus one
    experts   of a mixture of experts: key of the metadata -> key of config.json
    normed    of a mixture of experts: whether the weights of a token's experts are normalized to sum to 1, which no file says
    untied    whether llama.cpp requires a separate output head
    epsilon   of norms: the key of the metadata and that of config.json
    keys      further required numbers: key of the metadata -> key of config.json
    sizes     the same of whole numbers
    biases    settings of config.json that follow from whether the first layer has a bias, or another tensor, of llama.cpp's name
    settings  of config.json, which llama.cpp assumes: a model with others is not written
    partial   whether only a part of a head may be rotated
    transposed  whether transformers' experts are [E, K, N] with biases, rows of gate and up interleaved
    written   whether files are also written
    routed    of a mixture of experts: whether the file says how the weights of a token's experts are normalized and scaled
    whole     of a layer, llama.cpp's and transformers' names of tensors that are not a module's weight or bias
    joined    of a layer, transformers' name of a matrix and llama.cpp's of those whose rows it concatenates
    layers    transformers' name of the list of layers
    first     llama.cpp's and transformers' names before the layers, and of the head
    turned    whether transformers keeps the weights of linear layers inputs first
    note      what a report says of such a file
    windowed  whether the file gives the width of sliding-window attention; llama.cpp knows in which layers
    known_by  keys of the metadata that distinguish its files from those of another architecture of the same name, with their values, or
              None for any value
    sparse    transformers' name of the experts in a layer
    norm      llama.cpp's and transformers' name of the last norm
    """

    name: str
    model: str
    types: tuple[str, ...]
    layer: Mapping[str, str]
    order: Order | None = None
    plus_one: bool = False
    experts: Mapping[str, str] | None = None
    normed: bool = False
    untied: bool = False
    epsilon: tuple[str, str] = ("attention.layer_norm_rms_epsilon", "rms_norm_eps")
    keys: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, Any] = field(default_factory=dict)
    partial: bool = False
    transposed: bool = False
    windowed: bool = True
    known_by: Mapping[str, Any] = field(default_factory=dict)
    sparse: str = "mlp.experts"
    norm: tuple[str, str] = ("output_norm", "model.norm")
    written: bool = True
    routed: bool = False
    whole: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    layers: str = "model.layers"
    first: Mapping[str, str] = field(default_factory=lambda: _ENDS)
    turned: bool = False
    note: str = ""

    @property
    def ends(self) -> dict[str, str]:
        """Names outside of layers."""
        return {**self.first, self.norm[0]: self.norm[1]}

    def to_transformers(self, name: str) -> str | None:
        """transformers' name of a tensor of a file, None where it has none. For stacks of experts see `stack`."""
        if self.experts and (one := _ONE_EXPERT.fullmatch(name)):
            return f"model.layers.{int(one[1])}.mlp.experts.{int(one[3])}.{_ONE_EXPERT_PARTS[one[2]]}.weight"
        head, _, end = name.rpartition(".")
        if head in self.ends and end in ("weight", "bias"):
            return f"{self.ends[head]}.{end}"
        found = _IN_LAYER.fullmatch(name)
        if found is None:
            return None
        inner = self.layer.get(found[2]) if found[3] else None
        whole = self.whole.get(name.split(".", 2)[2], inner and f"{inner}.{found[3]}")
        return whole and f"{self.layers}.{int(found[1])}.{whole}"

    def stack(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """For a stack of experts or a part of a `joined` matrix: transformers' name, and the names of all tensors whose rows it
        concatenates."""
        found = _IN_LAYER.fullmatch(name)
        if found is None or found[3] != "weight":
            return None
        stacks = [(f"{self.sparse}.{inner}", parts) for inner, parts in _STACKS] if self.experts else []
        for inner, parts in (*stacks, *self.joined.items()):
            if found[2] in parts:
                return f"model.layers.{int(found[1])}.{inner}", tuple(f"blk.{found[1]}.{part}.weight" for part in parts)
        return None

    def in_stack(self, name: str) -> bool:
        """Whether a tensor of a file is a stack of experts, or their biases."""
        if self.transposed and name.endswith(".bias"):
            name = f"{name.removesuffix('bias')}weight"
        return self.stack(name) is not None

    def to_gguf(self, name: str) -> tuple[str, ...]:
        """The inverse of both: no name, one, or the stacks that a stack is split into."""
        if self.experts and (found := _EXPERTS_IN_MODULES.fullmatch(name)) and found[2] == self.sparse:
            return tuple(f"blk.{found[1]}.{part}.weight" for part in _WRITTEN_STACKS.get(found[3], ()))
        head, _, end = name.rpartition(".")
        ends = {theirs: mine for mine, theirs in self.ends.items()}
        if head in ends:
            return (f"{ends[head]}.{end}",)
        found = re.fullmatch(rf"{re.escape(self.layers)}\.(\d+)\.([\w.]+)", name)
        if found is None:
            return ()
        modules = {theirs: mine for mine, theirs in self.layer.items()}
        whole = {theirs: mine for mine, theirs in self.whole.items()} | {
            f"{theirs}.{end}": f"{mine}.{end}" for theirs, mine in modules.items() for end in ("weight", "bias")
        }
        return (f"blk.{found[1]}.{whole[found[2]]}",) if found[2] in whole else ()

    def rows(self, name: str, config: Mapping[str, Any], rows: int) -> Tensor | None:
        """For a tensor by llama.cpp's name: the row of transformers' tensor for each of its rows; None where they are the same."""
        found = _IN_LAYER.fullmatch(name)
        return self.order(found[2], config, rows) if self.order and found else None

    def change(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """The function from a file's values of a tensor, by llama.cpp's name, to transformers' values; None where they are equal."""
        if name.endswith(".ssm_a"):
            return lambda a: (-a).log()
        return (lambda norm: norm - 1.0) if self.plus_one and self.is_norm(name) else None

    def is_norm(self, name: str) -> bool:
        """Whether a tensor, by llama.cpp's name, is the weight of a norm of this kind: the gated one of linear attention is not."""
        return name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def unimportant(name: str) -> bool:
    """Whether a model computes the same without a tensor that transformers has no name for."""
    parts = name.split(".")
    return _NEXTN.fullmatch(name) is not None or parts[-1] == "input_scale" or any(part in _ROTARY for part in parts)


def layer_of(name: str) -> int:
    """The layer of a tensor by llama.cpp's name; -1 for those outside of layers."""
    return int(name.split(".")[1]) if name.startswith("blk.") and name.split(".")[1].isdecimal() else -1


def routes(name: str) -> bool:
    """Whether a tensor, by llama.cpp's name, decides which experts a token goes to."""
    return "ffn_gate_inp" in name


def convolves(name: str) -> bool:
    """Whether a tensor, by llama.cpp's name, is the kernel of a depthwise convolution: a matrix there, [channels, 1, width] in
    transformers."""
    return name.endswith(("shortconv.conv.weight", "ssm_conv1d.weight"))


_COUNTS = {"expert_count": "num_experts", "expert_used_count": "num_experts_per_tok"}
_QWEN = {**_COUNTS, "expert_feed_forward_length": "moe_intermediate_size"}
_ROUTED = {
    "expert_count": "n_routed_experts",
    "expert_used_count": "num_experts_per_tok",
    "expert_feed_forward_length": "moe_intermediate_size",
    "expert_shared_count": "n_shared_experts",
    "expert_group_count": "n_group",
    "expert_group_used_count": "topk_group",
    "leading_dense_block_count": "first_k_dense_replace",
}
_TEXT_ONLY = "the model in the file also takes images; this is its language model"
_BIASES = {"attention_bias": "attn_q", "mlp_bias": "ffn_up"}
_UNBIASED = dict.fromkeys(_BIASES, False)
_RELU2 = {"hidden_act": "relu2"}
_GRANITE = {
    "embedding_scale": "embedding_multiplier",
    "residual_scale": "residual_multiplier",
    "attention.scale": "attention_multiplier",
    "logit_scale": "logits_scaling",
}
ARCHITECTURES: tuple[Architecture, ...] = (
    Architecture("llama", "LlamaForCausalLM", ("llama",), _LAYER, order=halves, biases=_BIASES),
    Architecture("llama", "MistralForCausalLM", ("mistral",), _LAYER, order=halves, known_by={"attention.sliding_window": None}),
    Architecture(
        "llama", "MixtralForCausalLM", ("mixtral",), _SPARSE, order=halves, normed=True,
        experts={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"},
    ),
    Architecture("qwen2", "Qwen2ForCausalLM", ("qwen2",), _LAYER, windowed=False),
    Architecture(
        "qwen2moe", "Qwen2MoeForCausalLM", ("qwen2_moe",), {**_SPARSE, **_SHARED}, untied=True, windowed=False,
        experts={**_QWEN, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    Architecture("qwen3", "Qwen3ForCausalLM", ("qwen3",), _LAYER, windowed=False),
    Architecture("qwen3moe", "Qwen3MoeForCausalLM", ("qwen3_moe",), _SPARSE, experts=_QWEN, normed=True, windowed=False),
    Architecture("olmoe", "OlmoeForCausalLM", ("olmoe",), _SPARSE, experts=_COUNTS, untied=True),
    Architecture(
        "gpt-oss", "GptOssForCausalLM", ("gpt_oss",),
        {**_without(*_MLP, "ffn_norm"), "post_attention_norm": "post_attention_layernorm", "ffn_gate_inp": "mlp.router"},
        experts={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}, untied=True, transposed=True,
        written=False, whole={"attn_sinks.weight": "self_attn.sinks"},
    ),
    Architecture(
        "granitemoe", "GraniteMoeForCausalLM", ("granitemoe",),
        {**_without(*_MLP), "ffn_gate_inp": "block_sparse_moe.router"}, order=halves, normed=True, sparse="block_sparse_moe.experts",
        experts={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}, keys=_GRANITE,
    ),
    Architecture(
        "granitehybrid", "GraniteMoeHybridForCausalLM", ("granitemoehybrid",),
        {**_without(*_MLP), **_MAMBA, "ffn_down": "shared_mlp.output_linear"}, order=halves, keys=_GRANITE, sizes=_MAMBA_SIZES,
        whole=_MAMBA_WHOLE, joined={"shared_mlp.input_linear.weight": ("ffn_gate", "ffn_up")}, settings={"num_local_experts": 0},
        written=False,
    ),
    Architecture(
        "granitehybrid", "GraniteMoeHybridForCausalLM", ("granitemoehybrid",),
        {**_without(*_MLP), **_MAMBA, "ffn_gate_inp": "block_sparse_moe.router", "ffn_down_shexp": "shared_mlp.output_linear"},
        order=halves, normed=True, sparse="block_sparse_moe.experts", keys=_GRANITE, sizes=_MAMBA_SIZES, whole=_MAMBA_WHOLE,
        experts={"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok"}, written=False,
        joined={"shared_mlp.input_linear.weight": ("ffn_gate_shexp", "ffn_up_shexp")},
    ),
    Architecture("phi3", "Phi3ForCausalLM", ("phi3",), {**_LAYER, **_FUSED}, partial=True),
    Architecture("gemma", "GemmaForCausalLM", ("gemma",), _LAYER, plus_one=True),
    Architecture("gemma2", "Gemma2ForCausalLM", ("gemma2",), {**_LAYER, **_FOUR_NORMS}, plus_one=True),
    Architecture("gemma3", "Gemma3ForCausalLM", ("gemma3_text",), {**_LAYER, **_FOUR_NORMS}, plus_one=True),
    Architecture("mistral3", "Ministral3ForCausalLM", ("ministral3",), _LAYER, order=halves),
    Architecture(
        "smollm3", "SmolLM3ForCausalLM", ("smollm3",), _LAYER, order=halves, windowed=False,
        settings={**_UNBIASED, "no_rope_layer_interval": 4, "use_sliding_window": False},
    ),
    Architecture("granite", "GraniteForCausalLM", ("granite",), _LAYER, order=halves, biases=_BIASES, keys=_GRANITE),
    Architecture(
        "lfm2", "Lfm2ForCausalLM", ("lfm2",), _LFM2, norm=("token_embd_norm", "model.embedding_norm"),
        epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"), settings={"conv_bias": False},
        sizes=_LFM2_SIZES,
    ),
    Architecture("arcee", "ArceeForCausalLM", ("arcee",), _without("ffn_gate"), order=halves, settings={**_UNBIASED, **_RELU2}),
    Architecture("ernie4_5", "Ernie4_5ForCausalLM", ("ernie4_5",), _LAYER, settings={"use_bias": False}),
    Architecture(
        "ernie4_5-moe", "Ernie4_5_MoeForCausalLM", ("ernie4_5_moe",), _SHARING, normed=True, settings={"use_bias": False}, written=False,
        experts={
            "expert_count": "moe_num_experts",
            "expert_used_count": "moe_k",
            "expert_feed_forward_length": "moe_intermediate_size",
            "expert_shared_count": "moe_num_shared_experts",
            "leading_dense_block_count": "moe_layer_start_index",
            "interleave_moe_layer_step": "moe_layer_interval",
        },
        whole={"exp_probs_b.bias": "mlp.gate.moe_statics.e_score_correction_bias"},
    ),
    Architecture("olmo2", "Olmo2ForCausalLM", ("olmo2",), {**_without("attn_norm", "ffn_norm"), **_POST_NORMS}, windowed=False),
    Architecture(
        "olmo2", "Olmo3ForCausalLM", ("olmo3",), {**_without("attn_norm", "ffn_norm"), **_POST_NORMS},
        known_by={"attention.sliding_window": None}, settings={"attention_bias": False},
    ),
    Architecture(
        "hunyuan-dense", "HunYuanDenseV1ForCausalLM", ("hunyuan_v1_dense",),
        {**_LAYER, "attn_q_norm": "self_attn.query_layernorm", "attn_k_norm": "self_attn.key_layernorm"}, windowed=False,
        settings={"attention_bias": False},
    ),
    Architecture("exaone4", "Exaone4ForCausalLM", ("exaone4",), {**_without("attn_norm", "ffn_norm"), **_POST_NORMS}),
    Architecture(
        "seed_oss", "SeedOssForCausalLM", ("seed_oss",),
        {**_without("ffn_norm"), "post_attention_norm": "post_attention_layernorm"},
        biases={"attention_bias": "attn_q"}, settings={"mlp_bias": False, "attention_out_bias": False},
    ),
    Architecture(
        "glm4", "Glm4ForCausalLM", ("glm4",), {**_without("ffn_gate"), "ffn_up": "mlp.gate_up_proj", **_GLM_NORMS},
        biases={"attention_bias": "attn_q"}, partial=True,
    ),
    Architecture(
        "starcoder2", "Starcoder2ForCausalLM", ("starcoder2",), {**_without("ffn_gate"), "ffn_up": "mlp.c_fc", "ffn_down": "mlp.c_proj"},
        epsilon=("attention.layer_norm_epsilon", "norm_epsilon"), settings={"use_bias": True},
    ),
    Architecture(
        "stablelm", "StableLmForCausalLM", ("stablelm",), _without("attn_q_norm", "attn_k_norm"), partial=True,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"), biases={"use_qkv_bias": "attn_q"},
        settings={"qk_layernorm": False, "use_parallel_residual": False},
    ),
    Architecture(
        "nemotron", "NemotronForCausalLM", ("nemotron",), _without("ffn_gate"), plus_one=True, partial=True,
        epsilon=("attention.layer_norm_epsilon", "norm_eps"), biases=_BIASES, settings=_RELU2,
    ),
    Architecture(
        "command-r", "CohereForCausalLM", ("cohere",), _without("ffn_norm", "attn_q_norm", "attn_k_norm"), windowed=False,
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"), keys={"logit_scale": "logit_scale"},
        settings={"attention_bias": False, "use_qk_norm": False},
    ),
    Architecture(
        "cohere2", "Cohere2ForCausalLM", ("cohere2",), _without("ffn_norm"),
        epsilon=("attention.layer_norm_epsilon", "layer_norm_eps"), keys={"logit_scale": "logit_scale"}, settings={"attention_bias": False},
    ),
    # Files of these are only read.
    Architecture("qwen2vl", "Qwen2ForCausalLM", ("qwen2",), _LAYER, windowed=False, written=False, note=_TEXT_ONLY),
    Architecture("qwen3vl", "Qwen3ForCausalLM", ("qwen3",), _LAYER, windowed=False, written=False, note=_TEXT_ONLY),
    Architecture(
        "qwen3vlmoe", "Qwen3MoeForCausalLM", ("qwen3_moe",), _SPARSE, experts=_QWEN, normed=True, windowed=False,
        written=False, note=_TEXT_ONLY,
    ),
    Architecture(
        "qwen3next", "Qwen3NextForCausalLM", ("qwen3_next",), {**_QWEN35, **_DELTA_NEXT, "ffn_gate_inp": "mlp.gate", **_SHARED},
        plus_one=True, order=apart, sizes=_DELTA_SIZES, whole=_DELTA_WHOLE, partial=True, windowed=False, normed=True, written=False,
        joined={"linear_attn.in_proj_qkvz.weight": ("attn_qkv", "attn_gate")},
        experts={**_QWEN, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"},
    ),
    Architecture(
        "qwen35", "Qwen3_5ForCausalLM", ("qwen3_5_text",), {**_QWEN35, **_DELTA_35}, plus_one=True, order=tiled, sizes=_DELTA_SIZES,
        whole=_DELTA_WHOLE, partial=True, windowed=False, written=False, note=_TEXT_ONLY,
    ),
    Architecture(
        "qwen35moe", "Qwen3_5MoeForCausalLM", ("qwen3_5_moe_text",), {**_QWEN35, **_DELTA_35, "ffn_gate_inp": "mlp.gate", **_SHARED},
        plus_one=True, order=tiled, sizes=_DELTA_SIZES, whole=_DELTA_WHOLE, partial=True, windowed=False, normed=True, written=False,
        experts={**_QWEN, "expert_shared_feed_forward_length": "shared_expert_intermediate_size"}, note=_TEXT_ONLY,
    ),
    Architecture(
        "gemma3n", "Gemma3nForCausalLM", ("gemma3n_text",), _GEMMA3N, first=_GEMMA4_ENDS, sizes=_GEMMA3N_SIZES, written=False,
        whole={"altup_correct_scale.weight": "altup.correct_output_scale"}, note=_TEXT_ONLY,
    ),
    Architecture(
        "gemma4", "Gemma4ForCausalLM", ("gemma4_text",), _GEMMA4, first=_GEMMA4_ENDS, whole=_GEMMA4_WHOLE, sizes=_GEMMA4_SIZES,
        written=False, note=_TEXT_ONLY,
    ),
    Architecture(
        "gemma4", "Gemma4ForCausalLM", ("gemma4_text",), _GEMMA4, first=_GEMMA4_ENDS, whole=_GEMMA4_WHOLE, sizes=_GEMMA4_SIZES,
        experts={**_QWEN, "expert_used_count": "top_k_experts"},
        sparse="experts", normed=True, settings={"enable_moe_block": True}, written=False, note=_TEXT_ONLY,
    ),
    Architecture(
        "glm4moe", "Glm4MoeForCausalLM", ("glm4_moe",),
        {**{name: module for name, module in _SHARING.items() if name != "ffn_norm"}, "post_attention_norm": "post_attention_layernorm"},
        experts=_ROUTED, routed=True, whole=_SCORE_BIAS, partial=True, biases={"use_qk_norm": "attn_q_norm.weight"}, written=False,
    ),
    Architecture(
        "deepseek2", "DeepseekV2ForCausalLM", ("deepseek_v2",), _LATENT, experts=_ROUTED, routed=True, written=False,
    ),
    Architecture(
        "deepseek2", "DeepseekV3ForCausalLM", ("deepseek_v3",), _LATENT, experts=_ROUTED, routed=True, written=False,
        whole=_SCORE_BIAS, known_by={"expert_gating_func": 2},
    ),
    Architecture(
        "lfm2moe", "Lfm2MoeForCausalLM", ("lfm2_moe",), {**_LFM2, "ffn_gate_inp": "feed_forward.gate"}, sparse="feed_forward.experts",
        norm=("token_embd_norm", "model.embedding_norm"), epsilon=("attention.layer_norm_rms_epsilon", "norm_eps"), normed=True,
        experts={**_QWEN, "leading_dense_block_count": "num_dense_layers"}, whole={"exp_probs_b.bias": "feed_forward.expert_bias"},
        settings={"conv_bias": False, "use_expert_bias": True}, sizes=_LFM2_SIZES, written=False,
    ),
    Architecture(
        "apertus", "ApertusForCausalLM", ("apertus",),
        {**_without("ffn_gate"), "attn_norm": "attention_layernorm", "ffn_norm": "feedforward_layernorm"},
        settings={"hidden_act": "xielu", "attention_bias": False}, written=False,
    ),
    Architecture(
        "gpt2", "GPT2LMHeadModel", ("gpt2",), _GPT2, epsilon=("attention.layer_norm_epsilon", "layer_norm_epsilon"), first=_GPT2_ENDS,
        norm=("output_norm", "transformer.ln_f"), layers="transformer.h", turned=True, written=False,
    ),
)  # fmt: skip


# What GGUF files hold besides models, by general.type or general.architecture, and what to do.
_WITH_MODEL = "name the GGUF file of the model"
_NO_MODELS = {
    "adapter": ("a LoRA adapter", f"{_WITH_MODEL} that it belongs to, into which llama.cpp's llama-export-lora merges it"),
    "imatrix": ("an importance matrix, which guides llama.cpp's quantization", _WITH_MODEL),
    "mmproj": ("the image or audio encoder of a model", f"{_WITH_MODEL} itself for text alone, or use its safetensors"),
    "clip": ("the image or audio encoder of a model", f"{_WITH_MODEL} itself for text alone, or use its safetensors"),
    "controlvector": ("a control vector", _WITH_MODEL),
    "vocab": ("a vocabulary", _WITH_MODEL),
}


def of_file(metadata: Mapping[str, Any]) -> Architecture:
    """The architecture of a file with this metadata; raises CheckpointError for an unknown one."""
    name = metadata.get("general.architecture")
    kind = next((each for each in (metadata.get("general.type"), name) if isinstance(each, str) and each in _NO_MODELS), None)
    if kind is not None:
        what, remedy = _NO_MODELS[kind]
        raise CheckpointError(f"the GGUF file holds {what}, not a model: {remedy}")
    sparse = bool(metadata.get(f"{name}.expert_count"))
    found = [a for a in ARCHITECTURES if a.name == name]
    if not found:
        known = ", ".join(dict.fromkeys(a.name for a in ARCHITECTURES))
        raise CheckpointError(f"the GGUF file holds a model of architecture {short(name)}, halfbyte reads {known}: use its safetensors")
    fits = [a for a in found if (a.experts is not None) == sparse and _known(a, metadata)]
    if not fits:
        what = "with experts" if sparse else "without experts"
        raise CheckpointError(f"the GGUF file holds a {name} {what}, which halfbyte does not read from GGUF: use its safetensors")
    return max(fits, key=lambda a: len(a.known_by))


def _known(architecture: Architecture, metadata: Mapping[str, Any]) -> bool:
    given = {key: metadata.get(f"{architecture.name}.{key}") for key in architecture.known_by}
    return all(value is not None and architecture.known_by[key] in (None, value) for key, value in given.items())


def of_config(config: Mapping[str, Any]) -> Architecture:
    """The architecture to write for the model of a config.json; raises CheckpointError where there is none."""
    model_type = config.get("model_type")
    by_type = {model_type: architecture for architecture in ARCHITECTURES if architecture.written for model_type in architecture.types}
    if not isinstance(model_type, str) or model_type not in by_type:
        raise CheckpointError(f"GGUF is written for {', '.join(by_type)}, got model_type {short(model_type)}")
    return by_type[model_type]

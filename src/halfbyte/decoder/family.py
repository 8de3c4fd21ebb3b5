"""What the table of model families, `families/`, says of each: the parts of its models, and which variant of a decoder they compute."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal, NamedTuple, Protocol, TypeAlias

if TYPE_CHECKING:
    from halfbyte.io.gguf import Value
    from halfbyte.io.gguf_metadata import Metadata

from halfbyte.kernels.layer_kinds import GateFunction, LogitsFunction, RouterScores

# Activation functions of configs, by the names that kernels use.
ACTIVATIONS: dict[str, GateFunction] = {
    "silu": "silu",
    "swish": "silu",
    "gelu_pytorch_tanh": "gelu_tanh",
    "gelu_new": "gelu_tanh",
    "relu2": "relu2",
}
Config: TypeAlias = Mapping[str, Any]  # the values of a config.json, which are those of JSON: its family says which it has
SLIDING = "sliding_attention"  # of a config's `layer_types`
# Per-layer inputs (Gemma 4): key of the config with the elements of each, 0 where layers have none; names within the model of the
# embedding, the projection and its norm that they are computed from; names within the layer of the gate, projection and norm.
PER_LAYER_SIZE = "hidden_size_per_layer_input"
PER_LAYER_INPUTS = "embed_tokens_per_layer", "per_layer_model_projection", "per_layer_projection_norm"
PER_LAYER_MODULES = "per_layer_input_gate", "per_layer_projection", "post_per_layer_input_norm"
SHARED_KV_LAYERS = "num_kv_shared_layers"  # key of the config: how many layers, the last ones, reuse keys and values of earlier ones


class ModelConfig(Protocol):
    """A configuration, of transformers or a `TextConfig`: its family decides which values it has, and of which types."""

    def __getattr__(self, name: str) -> Any: ...


@dataclass(frozen=True, slots=True)
class MoEFamily:
    """A mixture of experts: a router scores the experts of each token, and the top k of them are weighted and summed.

    Attributes:
        router: Name of the router within the MLP.
        router_weight: Name within the router of its weight, [E, K].
        router_bias: Whether the router has a bias.
        scores: "sigmoid" or "softmax" where scores are computed before the top k are chosen; "": logits, with a softmax over the chosen.
        correction: Name within the MLP of the expert bias correction, which is added to scores for the choice alone (DeepSeek-V3).
        norm_topk: Attribute of the router, and key of the config, that says whether the weights of a token are normalized to a sum of 1;
            None: they always are.
        scaling_factor: Attribute of the router, and key of the config, with the factor of the weights.
        groups: Attribute of the router with the number of groups among which experts are chosen; only 1 is supported.
        shared: Names of the expert that every token uses and of its gate, if any.
        top_k: Key of the config with the number of experts per token, or one for each layer.
        inputs_first: Whether floating-point checkpoints have stacks of experts as [E, K, N].
        clamped: Keys of alpha and limit of clamped gates, (up + 1) * gate * sigmoid(alpha * gate); None: gates are SwiGLU.
        names_in_files: Parts of names in checkpoints, and what they are in transformers' modules, where these differ.
    """

    router: str = "gate"
    router_weight: str = "weight"
    router_bias: bool = False
    scores: RouterScores = ""
    correction: str | None = None
    norm_topk: str | None = "norm_topk_prob"
    scaling_factor: str | None = None
    groups: str | None = None
    shared: tuple[str, str | None] | None = None
    top_k: str = "num_experts_per_tok"
    inputs_first: bool = False
    clamped: tuple[str, str] | None = None
    names_in_files: tuple[tuple[str, str], ...] = ()


class FullAttentionSize(NamedTuple):
    """A size that layers of full attention have in place of that of the whole config (Gemma 4).

    Attributes:
        name: Key of the config with the usual size, "head_dim" or "num_key_value_heads".
        key: Key of the config with theirs.
        condition: Key of the config that must be true for that; None: there is none.
    """

    name: str
    key: str
    condition: str | None = None


class RopeLayers(NamedTuple):
    """Which layers rotate queries and keys.

    Attributes:
        attributes: Attributes of self_attn in transformers.
        rotates: The decision from the values of these.
        from_config: The same decision from a config and a layer's index.
    """

    attributes: tuple[str, ...]
    rotates: Callable[..., bool]
    from_config: Callable[[ModelConfig, int], bool]


@dataclass(frozen=True, slots=True)
class GGUF:
    """GGUF files of a family: what does not follow from the other parts of its entry. Names of tensors and of keys of the metadata are
    llama.cpp's, the latter without the architecture's name; they stand before transformers' names and those of config.json.

    Attributes:
        architecture: `general.architecture` of the files.
        model_type: `model_type` of config.json where it is not the family's name.
        known_by: Keys, and their values or None for any, that distinguish the files from others of the same architecture.
        written: Whether files are also written.
        note: What a report says of a file.

        mlp_norm: Name of the norm before the MLP.
        tensors: Further names of modules in a layer, or others than usual; None where there is no such tensor.
        parameters: Names in a layer of further tensors that are not a module's weight or bias.
        joined: transformers' name in a layer of a matrix, and the names of those whose rows it concatenates.
        outer: Further names outside of layers, or others than usual.
        stacks: Names of stacks of matrices outside of layers, and of lists of modules.
        lists: Keys of a list with a number for each layer, and name and shape of the parameter.
        layers, attention: transformers' names of the list of layers and of attention in a layer.
        row_order: How rows differ from transformers': "interleaved" where the halves of each head are, for rope of adjacent elements;
            "tiled" where value heads of linear attention follow each other by key heads; "separate" where its queries, keys and values are.
        inputs_first: Whether transformers keeps the weights of linear layers as [K, N].

        experts: Keys of the sizes of the mixture of experts.
        experts_module: transformers' name in a layer of the experts, where they are not in the MLP.
        normalized: Whether the weights of a token's experts sum to 1, which files do not say and `norm_topk` of the family leaves open.
        untied: Whether llama.cpp requires an output embedding of its own.
        numbers, sizes: Further required keys, of floats and of integers.
        biases: Keys of config.json that follow from whether the first layer has a bias, or another tensor, of that name.
        settings: Keys of config.json and the only values that llama.cpp computes.
        implied: The same from the other values of config.json.
        sliding_window: Whether llama.cpp computes sliding windows.
        local_rope_base: Base of the rope of layers with a window where files have none; None: that of all layers.
        yarn: Parameters of yarn that files do not have; with `mscale`, llama.cpp computes no rope but yarn with this one.
        rope_alpha: Whether rope of type "dynamic" has a constant factor `alpha`.
        merges_by_index: Whether a SentencePiece vocabulary was learned in the order of its tokens, not of their scores.

        read_layers: From the metadata and the names of the tensors: values of config.json that differ between layers, and numbers in place
            of lists in the metadata.
        read_config: From the metadata and the other values of config.json: further values.
        write_config: From config.json: further metadata.
    """

    architecture: str
    model_type: str | None = None
    known_by: Mapping[str, object] = field(default_factory=dict)
    written: bool = True
    note: str = ""

    mlp_norm: str = "ffn_norm"
    tensors: Mapping[str, str | None] = field(default_factory=dict)
    parameters: Mapping[str, str] = field(default_factory=dict)
    joined: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    outer: Mapping[str, str] = field(default_factory=dict)
    stacks: Mapping[str, str] = field(default_factory=dict)
    lists: Mapping[str, tuple[str, tuple[int, ...]]] = field(default_factory=dict)
    layers: str = "model.layers"
    attention: str = "self_attn"
    row_order: Literal["", "interleaved", "tiled", "separate"] = ""
    inputs_first: bool = False

    experts: Mapping[str, str] | None = None
    experts_module: str | None = None
    normalized: bool = False
    untied: bool = False
    numbers: Mapping[str, str] = field(default_factory=dict)
    sizes: Mapping[str, str] = field(default_factory=dict)
    biases: Mapping[str, str] = field(default_factory=dict)
    settings: Mapping[str, object] = field(default_factory=dict)
    implied: Callable[[Config], dict[str, object]] = lambda config: {}
    sliding_window: bool = True
    local_rope_base: float | None = None
    yarn: Mapping[str, object] = field(default_factory=dict)
    rope_alpha: bool = False
    merges_by_index: bool = False

    read_layers: Callable[[Metadata, Sequence[str]], tuple[dict[str, object], Mapping[str, int]]] | None = None
    read_config: Callable[[Metadata, Config], dict[str, object]] | None = None
    write_config: Callable[[Config], dict[str, Value]] | None = None


@dataclass(frozen=True, slots=True)
class Family:
    """The parts of a model family, by their names, and its variants of a decoder.

    Attributes:
        name: What its classes in transformers.models begin with.
        layer_class: Class of its decoder layers; "": its name and "DecoderLayer".
        model_class: Class of its causal language model, the `architectures` of config.json; "": its name and "ForCausalLM"; None: it is
            only a part of other models.

        qkv: Names within self_attn of the projections of queries, keys and values, fused or apart.
        o_proj: Name within self_attn of the output projection.
        mlp: Name within the layer of the MLP or the mixture of experts.
        gate_up: Names within the MLP of gate and up, fused or apart; of up alone where the MLP is not gated.
        gated: Whether the MLP is gated (SwiGLU, GeGLU).
        down_proj: Name within the MLP.
        norms: Names within the layer of the norms before attention, after it, before the MLP and after it.
        final_norm: Name of the norm after the last layer.
        qk_norm: Names within self_attn of the norms of queries and keys.
        v_norm: Name within self_attn of the norm of values, which has no weight.
        sinks: Name within self_attn of the attention sinks.
        per_layer_input: Whether layers may have inputs of their own (Gemma 4).
        layer_scalar: Name of the layer's buffer with the factor of its output.

        parallel_residual: Whether the MLP reads what attention reads.
        qk_norm_whole: Whether these norms are over all heads of a token together (OLMo 2), not per head.
        norm_after_rope: Whether they come after rope.
        unit_offset: Whether norms multiply by 1 + weight.
        layer_norm: Whether norms are layer norms, not RMS norms.
        partial_rotary: Whether rope rotates only the config's `partial_rotary_factor` of each head.
        rope_interleaved: Rotation of adjacent elements: "" for halves; "half" where cosines have rotary_dim / 2 distinct columns first,
            "repeated" where each column comes twice.
        rope_layers: Which layers have rope, if not all.
        rope_per_type: Whether each of the config's `layer_types` has a rope of its own.
        mrope: Whether positions have three axes, for images and videos (Qwen2-VL).
        sliding_window: Which layers have the config's sliding window: "none", "all" or those of `layer_types`.
        kv_sharing: Whether layers may reuse keys and values of earlier ones (Gemma 4).
        values_are_keys: Key of the config: whether layers of full attention have no v_proj, as values are what k_proj gives.
        full_attention_sizes: Sizes that layers of full attention have in place of those of the whole config.
        full_attention_last: Whether the last layer has full attention, whatever `layer_types` says.
        moe: Its mixture of experts. Layers without experts have a plain MLP.

        activation: Key of the config with the activation function.
        default_activation: The function where the config has no such key, as in GGUF files.
        norm_eps: Key of the config with the eps of norms.
        attention_scale: Factor of attention scores from the config and head_dim.
        softcap: Key of the config, and attribute of self_attn, with the soft cap of attention scores.
        query_scale_from: Entry of `rope_parameters` with the position from which on queries have a factor of their own (Llama 4).
        residual_multiplier: Key of the config, and attribute of the layer, with the factor of what attention and MLP add.
        embedding_multiplier: Key of the config, and attribute of the model, with the factor of embeddings.
        sqrt_embedding: Whether embeddings are multiplied by sqrt(hidden_size).
        logits_divisor, logits_multiplier, logits_softcap: Keys of the config for the logits.
        tie_word_embeddings: Whether input and output embeddings are tied where config.json does not say.
        unsupported: Keys of the config that must be None, False or 0: with them layers compute something else.
        required: Keys of the config and the values that they must have.
        defaults: Keys and their values where config.json does not have them, if these differ from what `TextConfig` derives.
        gguf: Its GGUF files; None: halfbyte reads none.
        other_gguf: Those of other architectures of llama.cpp with this text model, or of variants with experts.
    """

    name: str
    layer_class: str = ""
    model_class: str | None = ""

    qkv: tuple[str, ...] = ("q_proj", "k_proj", "v_proj")
    o_proj: str = "o_proj"
    mlp: str = "mlp"
    gate_up: tuple[str, ...] = ("gate_proj", "up_proj")
    gated: bool = True
    down_proj: str = "down_proj"
    norms: tuple[str | None, str | None, str | None, str | None] = ("input_layernorm", None, "post_attention_layernorm", None)
    final_norm: str = "norm"
    qk_norm: tuple[str, str] | None = None
    v_norm: str | None = None
    sinks: str | None = None
    per_layer_input: bool = False
    layer_scalar: str | None = None

    parallel_residual: bool = False
    qk_norm_whole: bool = False
    norm_after_rope: bool = False
    unit_offset: bool = False
    layer_norm: bool = False
    partial_rotary: bool = False
    rope_interleaved: Literal["", "half", "repeated"] = ""
    rope_layers: RopeLayers | None = None
    rope_per_type: bool = False
    mrope: bool = False
    sliding_window: Literal["none", "all", "layer_types"] = "none"
    kv_sharing: bool = False
    values_are_keys: str | None = None
    full_attention_sizes: tuple[FullAttentionSize, ...] = ()
    full_attention_last: bool = False
    moe: MoEFamily | None = None

    activation: str = "hidden_act"
    default_activation: str = "silu"
    norm_eps: str = "rms_norm_eps"
    attention_scale: Callable[[ModelConfig, int], float] = lambda config, head_dim: head_dim**-0.5
    softcap: str | None = None
    query_scale_from: str | None = None
    residual_multiplier: str | None = None
    embedding_multiplier: str | None = None
    sqrt_embedding: bool = False
    logits_divisor: str | None = None
    logits_multiplier: str | None = None
    logits_softcap: str | None = None
    tie_word_embeddings: bool = False
    unsupported: tuple[str, ...] = ()
    required: tuple[tuple[str, object], ...] = ()
    defaults: tuple[tuple[str, object], ...] = ()
    gguf: GGUF | None = None
    other_gguf: tuple[GGUF, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "layer_class", self.layer_class or f"{self.name}DecoderLayer")
        object.__setattr__(self, "model_class", f"{self.name}ForCausalLM" if self.model_class == "" else self.model_class)

    @property
    def logits(self) -> list[tuple[LogitsFunction, str]]:
        """Functions of the logits, with the keys of the config of their constants."""
        keys: tuple[tuple[LogitsFunction, str | None], ...]
        keys = ("over", self.logits_divisor), ("times", self.logits_multiplier), ("cap", self.logits_softcap)
        return [(function, key) for function, key in keys if key is not None]

    def other_setting(self, get: Callable[[str], object]) -> str | None:
        """The setting, and its value, with which layers compute something else; None: there is none. get: Of a config by its key."""
        values = {name: get(name) for name in self.unsupported}
        others = {name: value for name, value in values.items() if value is not None and value is not False and value != 0}
        others |= {name: get(name) for name, wanted in self.required if get(name) != wanted}
        return next((f"{name} = {value!r:.99}" for name, value in others.items()), None)

"""llama.cpp's names of a model's tensors and transformers', and how their values differ: what follows from the table of families."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from reprlib import repr as short

from torch import Tensor

from halfbyte.checkpoint.gguf.orders import ORDERS
from halfbyte.decoder.families import FAMILIES, OTHERS
from halfbyte.decoder.family import GGUF, Config, Family
from halfbyte.errors import CheckpointError

# Stacks of experts [E, N, K]: transformers' name and llama.cpp's, whose rows are concatenated in transformers; the last is of newer files.
_WRITTEN_STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_STACKS = (*_WRITTEN_STACKS.items(), ("gate_up_proj", ("ffn_gate_up_exps",)))
# Mixtures of experts in llama.cpp before 2024, one tensor per expert, and the names in safetensors.
_ONE_EXPERT = re.compile(r"blk\.(\d+)\.ffn_(gate|up|down)\.(\d+)\.weight")
_ONE_EXPERT_PARTS = {"gate": "w1", "down": "w2", "up": "w3"}
# Tensors that transformers' models do not use: multi-token prediction layers, scales of activations, and tensors that a config expresses
# by settings.
_NEXTN, _ROTARY = re.compile(r"blk\.\d+\.nextn\..*"), ("attn_rot_embd", "rope_freqs", "rope_factors_long", "rope_factors_short")
_IN_LAYER = re.compile(r"blk\.(\d+)\.([\w.]+?)(?:\.(weight|bias))?")
_EXPERTS_IN_MODULES = re.compile(r"model\.layers\.(\d+)\.([\w.]*experts)\.(\w+?)(?:\.weight)?")


class Architecture:
    """An architecture of llama.cpp that is the text model of a family.

    Attributes:
        name: llama.cpp's.
        model: The class in transformers.
        model_type: The `model_type` in config.json.
    """

    def __init__(self, package: str, family: Family, gguf: GGUF) -> None:
        assert family.model_class is not None
        self.family, self.gguf = family, gguf
        self.name, self.model, self.model_type = gguf.architecture, family.model_class, gguf.model_type or package

    @property
    def experts(self) -> Mapping[str, str] | None:
        """Keys of the metadata and of config.json for the sizes of a mixture of experts; None where the model has none."""
        return self.gguf.experts

    @property
    def epsilon(self) -> tuple[str, str]:
        """The key of the metadata and that of config.json for the eps of norms."""
        return f"attention.layer_norm_{'' if self.family.layer_norm else 'rms_'}epsilon", self.family.norm_eps

    @property
    def numbers(self) -> dict[str, str]:
        """Keys of the metadata and of config.json for multipliers."""
        family = self.family
        names = {"embedding_scale": family.embedding_multiplier, "residual_scale": family.residual_multiplier, **self.gguf.numbers}
        names["logit_scale"] = family.logits_divisor or family.logits_multiplier
        return {name: key for name, key in names.items() if key is not None}

    @property
    def normalized(self) -> bool:
        """Whether the weights of a token's experts sum to 1."""
        return self.gguf.normalized or (self.family.moe is not None and self.family.moe.norm_topk is None)

    @cached_property
    def ends(self) -> dict[str, str]:
        """Names outside of layers."""
        family, root = self.family, self.gguf.layers.rpartition(".")[0]
        names = {"token_embd": f"{root}.embed_tokens", "output_norm": f"{root}.{family.final_norm}", "output": "lm_head"}
        if (inputs := family.per_layer_embedding) is not None:
            names |= {"per_layer_token_embd": f"{root}.{inputs.table}", "per_layer_model_proj": f"{root}.{inputs.projection}"}
            names["per_layer_proj_norm"] = f"{root}.{inputs.norm}"
        return names | dict(self.gguf.outer)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Names of modules in a layer."""
        family, attention = self.family, self.gguf.attention
        before, after, before_mlp, after_mlp = family.norms
        qkv = ("attn_q", "attn_k", "attn_v") if len(family.qkv) == 3 else ("attn_qkv",)
        names: dict[str, str | None] = {name: f"{attention}.{module}" for name, module in zip(qkv, family.qkv, strict=False)}
        names |= {
            "attn_norm": before,
            "post_attention_norm": after,
            "post_ffw_norm": after_mlp,
            "attn_output": f"{attention}.{family.o_proj}",
        }
        if before_mlp != before or before is None:
            names[self.gguf.mlp_norm] = before_mlp
        for name, norm in zip(("attn_q_norm", "attn_k_norm"), family.qk_norm or (), strict=False):
            names[name] = f"{attention}.{norm}"
        names |= dict(zip(("inp_gate", "proj", "post_norm"), family.per_layer_input or (), strict=False))
        return {name: module for name, module in (names | self._mlp() | dict(self.gguf.tensors)).items() if module}

    def _mlp(self) -> dict[str, str]:
        family, moe = self.family, self.family.moe
        gate_up = ("ffn_gate", "ffn_up") if len(family.gate_up) == 2 else ("ffn_up",)
        parts = dict(zip((*gate_up, "ffn_down"), (*family.gate_up, family.down_proj), strict=True))
        sparse = moe is not None and self.experts is not None
        dense = not sparse or "leading_dense_block_count" in (self.experts or {})
        names = {name: f"{family.mlp}.{part}" for name, part in parts.items() if dense}
        if moe is None or not sparse:
            return names
        names["ffn_gate_inp"] = f"{family.mlp}.{moe.router}.{moe.router_weight}".removesuffix(".weight")
        shared, gate = moe.shared or (None, None)
        names |= {f"{name}_shexp": f"{family.mlp}.{shared}.{part}" for name, part in parts.items() if shared}
        return names | ({"ffn_gate_inp_shexp": f"{family.mlp}.{gate}"} if gate else {})

    @cached_property
    def _tensors(self) -> dict[str, str]:
        """Names of tensors in a layer."""
        family = self.family
        names = {f"{gguf_name}.{end}": f"{module}.{end}" for gguf_name, module in self.modules.items() for end in ("weight", "bias")}
        names |= self.gguf.parameters
        if family.moe is not None and family.moe.correction is not None:
            names["exp_probs_b.bias"] = f"{family.mlp}.{family.moe.correction}"
        if family.sinks is not None:
            names["attn_sinks.weight"] = f"{self.gguf.attention}.{family.sinks}"
        return names | ({"layer_output_scale.weight": family.layer_scalar} if family.layer_scalar else {})

    @property
    def _sparse(self) -> str:
        return self.gguf.experts_module or f"{self.family.mlp}.experts"

    def to_transformers(self, name: str) -> str | None:
        """transformers' name of a tensor of a file, None where it has none. For stacks of experts see `stack`."""
        if self.experts and (one := _ONE_EXPERT.fullmatch(name)):
            return f"model.layers.{int(one[1])}.mlp.experts.{int(one[3])}.{_ONE_EXPERT_PARTS[one[2]]}.weight"
        head, _, end = name.rpartition(".")
        if head in self.ends and end in ("weight", "bias"):
            return f"{self.ends[head]}.{end}"
        found = _IN_LAYER.fullmatch(name)
        inner = self._tensors.get(name.split(".", 2)[2]) if found else None
        return f"{self.gguf.layers}.{int(found[1])}.{inner}" if found and inner else None

    def stack(self, name: str) -> tuple[str, tuple[str, ...]] | None:
        """For a stack of experts or a part of a `joined` matrix: transformers' name, and the names of all tensors whose rows it
        concatenates."""
        found = _IN_LAYER.fullmatch(name)
        if found is None or found[3] != "weight":
            return None
        stacks = [(f"{self._sparse}.{inner}", parts) for inner, parts in _STACKS] if self.experts else []
        for inner, parts in (*stacks, *self.gguf.joined.items()):
            if found[2] in parts:
                return f"model.layers.{int(found[1])}.{inner}", tuple(f"blk.{found[1]}.{part}.weight" for part in parts)
        return None

    @property
    def inputs_first_experts(self) -> bool:
        """Whether transformers' experts are [E, K, N] with biases, rows of gate and up interleaved."""
        return self.family.moe is not None and self.family.moe.inputs_first

    def in_stack(self, name: str) -> bool:
        """Whether a tensor of a file is a stack of experts, or their biases."""
        if self.inputs_first_experts and name.endswith(".bias"):
            name = f"{name.removesuffix('bias')}weight"
        return self.stack(name) is not None

    def to_gguf(self, name: str) -> tuple[str, ...]:
        """The inverse of both: no name, one, or the stacks that a stack is split into."""
        if self.experts and (found := _EXPERTS_IN_MODULES.fullmatch(name)) and found[2] == self._sparse:
            return tuple(f"blk.{found[1]}.{part}.weight" for part in _WRITTEN_STACKS.get(found[3], ()))
        head, _, end = name.rpartition(".")
        ends = {model_end: gguf_end for gguf_end, model_end in self.ends.items()}
        if head in ends:
            return (f"{ends[head]}.{end}",)
        found = re.fullmatch(rf"{re.escape(self.gguf.layers)}\.(\d+)\.([\w.]+)", name)
        inner = {model_end: gguf_end for gguf_end, model_end in self._tensors.items()}.get(found[2]) if found else None
        return (f"blk.{found[1]}.{inner}",) if found and inner else ()

    def rows(self, name: str, config: Config, rows: int) -> Tensor | None:
        """For a tensor by llama.cpp's name: the row of transformers' tensor for each of its rows; None where they are the same."""
        found, order = _IN_LAYER.fullmatch(name), self.gguf.row_order
        return ORDERS[order](found[2], config, rows) if order and found else None

    def change(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """The function from a file's values of a tensor, by llama.cpp's name, to transformers' values; None where they are equal."""
        if name.endswith(".ssm_a"):
            return lambda a: (-a).log()
        return (lambda norm: norm - 1.0) if self.has_unit_offset(name) else None

    def has_unit_offset(self, name: str) -> bool:
        """Whether a tensor, by llama.cpp's name, is the weight of a norm that is stored plus one: the gated one of linear attention is
        not."""
        return self.family.unit_offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


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


ARCHITECTURES = tuple(
    Architecture(package, family, gguf)
    for package, family in (FAMILIES | OTHERS).items()
    for gguf in (family.gguf, *family.other_gguf)
    if gguf is not None
)

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


def of_file(metadata: Mapping[str, object]) -> Architecture:
    """The architecture of a file with this metadata; raises CheckpointError for an unknown one."""
    name = metadata.get("general.architecture")
    kind = next((each for each in (metadata.get("general.type"), name) if isinstance(each, str) and each in _NO_MODELS), None)
    if kind is not None:
        what, remedy = _NO_MODELS[kind]
        raise CheckpointError(f"the GGUF file holds {what}, not a model: {remedy}")
    sparse = bool(metadata.get(f"{name}.expert_count"))
    found = [a for a in ARCHITECTURES if a.name == name]
    if not found:
        known = ", ".join(sorted({a.name for a in ARCHITECTURES}))
        raise CheckpointError(f"the GGUF file holds a model of architecture {short(name)}, halfbyte reads {known}: use its safetensors")
    fits = [a for a in found if (a.experts is not None) == sparse and _known(a, metadata)]
    if not fits:
        what = "with experts" if sparse else "without experts"
        raise CheckpointError(f"the GGUF file holds a {name} {what}, which halfbyte does not read from GGUF: use its safetensors")
    return max(fits, key=lambda a: len(a.gguf.known_by))


def _known(architecture: Architecture, metadata: Mapping[str, object]) -> bool:
    given = [(metadata.get(f"{architecture.name}.{key}"), known) for key, known in architecture.gguf.known_by.items()]
    return all(value is not None and known in (None, value) for value, known in given)


def of_config(config: Mapping[str, object]) -> Architecture:
    """The architecture to write for the model of a config.json; raises CheckpointError where there is none."""
    model_type = config.get("model_type")
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES if architecture.gguf.written}
    if not isinstance(model_type, str) or model_type not in by_type:
        raise CheckpointError(f"GGUF is written for {', '.join(sorted(by_type))}, got model_type {short(model_type)}")
    return by_type[model_type]

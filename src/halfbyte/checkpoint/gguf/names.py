"""Names of tensors in GGUF files and in transformers, and how values and orders of rows differ between them.

    in a file                      in transformers                           method of `Architecture`
    blk.0.attn_q.weight            model.layers.0.self_attn.q_proj.weight    to_transformers, to_gguf
    blk.0.ffn_gate_exps.weight,    model.layers.0.mlp.experts.gate_up_proj   stack_of, to_gguf
      blk.0.ffn_up_exps.weight

An `Architecture` derives all names from a family of `decoder/families` and one of its `GGUF` entries. `architecture_of_file` finds the one
of a file that is read (model.py, config.py, rope.py), `architecture_of_config` that of a model that is written (export.py).

"llama.cpp's name" is a name in files, "transformers' name" one in a state dict. Source of the former: llama.cpp, gguf-py/gguf/constants.py
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from functools import cached_property
from reprlib import repr as short
from typing import NamedTuple

from torch import Tensor

from halfbyte.checkpoint.gguf.orders import ORDERS
from halfbyte.decoder.families import FAMILIES, OTHERS
from halfbyte.decoder.family import GGUF, PER_LAYER_INPUTS, PER_LAYER_MODULES, Config, Family
from halfbyte.errors import CheckpointError

# Stacks of experts [E, N, K]: transformers' name, and llama.cpp's names of the tensors whose rows it concatenates.
_WRITTEN_STACKS = {"gate_up_proj": ("ffn_gate_exps", "ffn_up_exps"), "down_proj": ("ffn_down_exps",)}
_READ_STACKS = (*_WRITTEN_STACKS.items(), ("gate_up_proj", ("ffn_gate_up_exps",)))  # newer files have the last one
# Files of mixtures of experts from before 2024 have a tensor for each expert; its parts are called in safetensors as Mixtral's are.
_ONE_EXPERT = re.compile(r"blk\.(?P<layer>\d+)\.ffn_(?P<part>gate|up|down)\.(?P<expert>\d+)\.weight")
_ONE_EXPERT_PARTS = {"gate": "w1", "down": "w2", "up": "w3"}
# A tensor of a layer in a file: "blk.0.attn_q.weight" is tensor "attn_q" with the suffix "weight"; some have no suffix.
_IN_LAYER = re.compile(r"blk\.(?P<layer>\d+)\.(?P<tensor>[\w.]+?)(?:\.(?P<suffix>weight|bias))?")
_SUFFIXES = ("weight", "bias")
# Tensors that transformers' models do not use: multi-token prediction layers, and rope factors that config.json expresses by settings.
_NEXTN, _ROPE_TENSORS = re.compile(r"blk\.\d+\.nextn\..*"), {"attn_rot_embd", "rope_freqs", "rope_factors_long", "rope_factors_short"}

# What GGUF files hold besides models, by general.type or general.architecture: what it is, and what to do.
_WITH_MODEL = "name the GGUF file of the model"
_NO_MODELS = {
    "adapter": ("a LoRA adapter", f"{_WITH_MODEL} that it belongs to, into which llama.cpp's llama-export-lora merges it"),
    "imatrix": ("an importance matrix, which guides llama.cpp's quantization", _WITH_MODEL),
    "mmproj": ("the image or audio encoder of a model", f"{_WITH_MODEL} itself for text alone, or use its safetensors"),
    "clip": ("the image or audio encoder of a model", f"{_WITH_MODEL} itself for text alone, or use its safetensors"),
    "controlvector": ("a control vector", _WITH_MODEL),
    "vocab": ("a vocabulary", _WITH_MODEL),
}


def architecture_of_file(metadata: Mapping[str, object]) -> Architecture:
    """Return the architecture of a file with this metadata.

    Raises:
        CheckpointError: The file holds no model, or one of an unknown architecture.
    """
    name = metadata.get("general.architecture")
    kind = next((each for each in (metadata.get("general.type"), name) if isinstance(each, str) and each in _NO_MODELS), None)
    if kind is not None:
        what, remedy = _NO_MODELS[kind]
        raise CheckpointError(f"the GGUF file holds {what}, not a model: {remedy}")
    has_experts = bool(metadata.get(f"{name}.expert_count"))
    named = [a for a in ARCHITECTURES if a.name == name]
    if not named:
        readable = ", ".join(sorted({a.name for a in ARCHITECTURES}))
        raise CheckpointError(f"the GGUF file holds a model of architecture {short(name)}, halfbyte reads {readable}: use its safetensors")
    matching = [a for a in named if (a.expert_keys is not None) == has_experts and _matches(a, metadata)]
    if not matching:
        what = "with experts" if has_experts else "without experts"
        raise CheckpointError(f"the GGUF file holds a {name} {what}, which halfbyte does not read from GGUF: use its safetensors")
    return max(matching, key=lambda a: len(a.gguf.known_by))  # the most specific one


def _matches(architecture: Architecture, metadata: Mapping[str, object]) -> bool:
    """Return whether metadata has the keys, and the values where one is given, by which families of one name are told apart."""
    values = [(metadata.get(f"{architecture.name}.{key}"), wanted) for key, wanted in architecture.gguf.known_by.items()]
    return all(value is not None and wanted in (None, value) for value, wanted in values)


def architecture_of_config(config: Mapping[str, object]) -> Architecture:
    """Return the architecture to write for the model of a config.json.

    Raises:
        CheckpointError: GGUF is not written for it.
    """
    model_type = config.get("model_type")
    by_type = {architecture.model_type: architecture for architecture in ARCHITECTURES if architecture.gguf.written}
    if not isinstance(model_type, str) or model_type not in by_type:
        raise CheckpointError(f"GGUF is written for {', '.join(sorted(by_type))}, got model_type {short(model_type)}")
    return by_type[model_type]


class Stack(NamedTuple):
    """A tensor of transformers whose rows are those of several tensors of a file, concatenated.

    Attributes:
        target: transformers' name of it.
        parts: llama.cpp's names of the tensors, in the order of their rows.
    """

    target: str
    parts: tuple[str, ...]


class Architecture:
    """An architecture of llama.cpp that is the text model of a family.

    Attributes:
        family, gguf: The family and its entry for GGUF.
        name: llama.cpp's name, `general.architecture` of files.
        model: The class in transformers.
        model_type: The `model_type` in config.json.
    """

    def __init__(self, package: str, family: Family, gguf: GGUF) -> None:
        assert family.model_class is not None
        self.family, self.gguf = family, gguf
        self.name, self.model, self.model_type = gguf.architecture, family.model_class, gguf.model_type or package

    # Names

    def to_transformers(self, name: str) -> str | None:
        """Return transformers' name of a tensor by llama.cpp's; None where it has none. For tensors of `is_in_stack` see `stack_of`."""
        if self.expert_keys and (expert := _ONE_EXPERT.fullmatch(name)):
            part = _ONE_EXPERT_PARTS[expert["part"]]
            return f"{self._layer(expert['layer'])}.{self._experts_module}.{int(expert['expert'])}.{part}.weight"
        module, _, suffix = name.rpartition(".")
        if module in self.outer_modules and suffix in _SUFFIXES:
            return f"{self.outer_modules[module]}.{suffix}"
        if (match := _IN_LAYER.fullmatch(name)) is None:
            return None
        tensor = self._tensors.get(name.split(".", 2)[2])
        return None if tensor is None else f"{self._layer(match['layer'])}.{tensor}"

    def stack_of(self, name: str) -> Stack | None:
        """Return the stack of experts, or the `joined` matrix, of which a tensor by llama.cpp's name is a part; None for all others."""
        match = _IN_LAYER.fullmatch(name)
        if match is None or match["suffix"] != "weight":
            return None
        stacks = [(f"{self._experts_module}.{stack}", parts) for stack, parts in _READ_STACKS] if self.expert_keys else []
        for target, parts in (*stacks, *self.gguf.joined.items()):
            if match["tensor"] in parts:
                return Stack(f"{self._layer(match['layer'])}.{target}", tuple(f"blk.{match['layer']}.{part}.weight" for part in parts))
        return None

    def is_in_stack(self, name: str) -> bool:
        """Return whether a tensor by llama.cpp's name is a part of what `stack_of` returns, or the biases of one."""
        if self.inputs_first_experts and name.endswith(".bias"):
            name = f"{name.removesuffix('bias')}weight"
        return self.stack_of(name) is not None

    def to_gguf(self, name: str) -> tuple[str, ...]:
        """Return llama.cpp's names of a tensor by transformers' name: none where files do not have it, one, or those of the tensors that a
        stack of experts is divided into."""
        if self.expert_keys and (match := self._stack_pattern.fullmatch(name)):
            stack = match["stack"].removesuffix("_bias") if self.inputs_first_experts else match["stack"]
            suffix = "weight" if stack == match["stack"] else "bias"
            return tuple(f"blk.{match['layer']}.{part}.{suffix}" for part in _WRITTEN_STACKS.get(stack, ()))
        module, _, suffix = name.rpartition(".")
        if module in self._gguf_outer_modules:
            return (f"{self._gguf_outer_modules[module]}.{suffix}",)
        match = re.fullmatch(rf"{re.escape(self.gguf.layers)}\.(?P<layer>\d+)\.(?P<tensor>[\w.]+)", name)
        tensor = None if match is None else self._gguf_tensors.get(match["tensor"])
        return () if match is None or tensor is None else (f"blk.{match['layer']}.{tensor}",)

    def is_inputs_first(self, name: str) -> bool:
        """Return whether a tensor by transformers' name is a stack of experts [E, K, N], as some are in floating point."""
        match = self._stack_pattern.fullmatch(name) if self.inputs_first_experts else None
        return match is not None and match["stack"] in _WRITTEN_STACKS and not name.endswith(".weight")

    def _layer(self, number: str) -> str:
        return f"{self.gguf.layers}.{int(number)}"

    @cached_property
    def _stack_pattern(self) -> re.Pattern[str]:
        """The names of stacks of experts, and of their biases, in transformers and, with ".weight", in quantized models."""
        layers, experts = re.escape(self.gguf.layers), re.escape(self._experts_module)
        return re.compile(rf"{layers}\.(?P<layer>\d+)\.{experts}\.(?P<stack>\w+?)(?:\.weight)?")

    @property
    def _experts_module(self) -> str:
        """transformers' name of the module of experts in a layer."""
        return self.gguf.experts_module or f"{self.family.mlp}.experts"

    @cached_property
    def outer_modules(self) -> dict[str, str]:
        """Modules outside of layers: llama.cpp's name -> transformers'."""
        family, root = self.family, self.gguf.layers.rpartition(".")[0]
        names = {"token_embd": f"{root}.embed_tokens", "output_norm": f"{root}.{family.final_norm}", "output": "lm_head"}
        if family.per_layer_input:
            modules = (f"{root}.{name}" for name in PER_LAYER_INPUTS)
            names |= zip(("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"), modules, strict=True)
        return names | dict(self.gguf.outer)

    @cached_property
    def _gguf_outer_modules(self) -> dict[str, str]:
        """The inverse of `outer_modules`."""
        return {module: gguf_module for gguf_module, module in self.outer_modules.items()}

    @cached_property
    def modules(self) -> dict[str, str]:
        """Modules in a layer: llama.cpp's name -> transformers'."""
        return {name: module for name, module in (self._attention() | self._mlp() | dict(self.gguf.tensors)).items() if module}

    def _attention(self) -> dict[str, str | None]:
        """Modules of attention, norms and per-layer inputs; None where a family has no such norm."""
        family, attention = self.family, self.gguf.attention
        before, after, before_mlp, after_mlp = family.norms
        qkv = {0: (), 1: ("attn_qkv",), 3: ("attn_q", "attn_k", "attn_v")}[len(family.qkv)]
        names: dict[str, str | None] = {name: f"{attention}.{module}" for name, module in zip(qkv, family.qkv, strict=True)}
        names |= {
            "attn_norm": before,
            "post_attention_norm": after,
            "post_ffw_norm": after_mlp,
            "attn_output": f"{attention}.{family.o_proj}",
        }
        if before_mlp != before or before is None:
            names[self.gguf.mlp_norm] = before_mlp
        if family.qk_norm is not None:
            names |= {name: f"{attention}.{norm}" for name, norm in zip(("attn_q_norm", "attn_k_norm"), family.qk_norm, strict=True)}
        if family.per_layer_input:
            names |= zip(("inp_gate", "proj", "post_norm"), PER_LAYER_MODULES, strict=True)
        return names

    def _mlp(self) -> dict[str, str | None]:
        """Modules of the MLP or of the mixture of experts, without the stacks of experts; both where the first layers are dense."""
        family, moe = self.family, self.family.moe
        gate_up = ("ffn_gate", "ffn_up") if len(family.gate_up) == 2 else ("ffn_up",)
        parts = dict(zip((*gate_up, "ffn_down"), (*family.gate_up, family.down_proj), strict=True))
        dense: dict[str, str | None] = {name: f"{family.mlp}.{part}" for name, part in parts.items()}
        if moe is None or self.expert_keys is None:
            return dense
        names = dense if "leading_dense_block_count" in self.expert_keys else {}
        names["ffn_gate_inp"] = f"{family.mlp}.{moe.router}.{moe.router_weight}".removesuffix(".weight")
        shared, gate = moe.shared or (None, None)
        if shared:
            names |= {f"{name}_shexp": f"{family.mlp}.{shared}.{part}" for name, part in parts.items()}
        if gate:
            names["ffn_gate_inp_shexp"] = f"{family.mlp}.{gate}"
        return names

    @cached_property
    def _tensors(self) -> dict[str, str]:
        """Tensors in a layer: llama.cpp's name -> transformers'."""
        family = self.family
        names = {f"{gguf_name}.{suffix}": f"{module}.{suffix}" for gguf_name, module in self.modules.items() for suffix in _SUFFIXES}
        names |= self.gguf.parameters
        if family.moe is not None and family.moe.correction is not None:
            names["exp_probs_b.bias"] = f"{family.mlp}.{family.moe.correction}"
        if family.sinks is not None:
            names["attn_sinks.weight"] = f"{self.gguf.attention}.{family.sinks}"
        if family.layer_scalar:
            names["layer_output_scale.weight"] = family.layer_scalar
        return names

    @cached_property
    def _gguf_tensors(self) -> dict[str, str]:
        """The inverse of `_tensors`."""
        return {tensor: gguf_tensor for gguf_tensor, tensor in self._tensors.items()}

    # Values

    @property
    def inputs_first_experts(self) -> bool:
        """Whether transformers' experts are [E, K, N] with biases, rows of gate and up interleaved (gpt-oss)."""
        return self.family.moe is not None and self.family.moe.inputs_first

    def row_order(self, name: str, config: Config, rows: int) -> Tensor | None:
        """Return the row of transformers' tensor for each of the `rows` of a file's, by llama.cpp's name; None where they are the same."""
        match, order = _IN_LAYER.fullmatch(name), self.gguf.row_order
        return ORDERS[order](match["tensor"], config, rows) if order and match else None

    def value_conversion(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function from a file's values of a tensor, by llama.cpp's name, to transformers' values; None where they are equal."""
        if name.endswith(".ssm_a"):
            return lambda a: (-a).log()
        return (lambda norm: norm - 1.0) if self.has_unit_offset(name) else None

    def has_unit_offset(self, name: str) -> bool:
        """Return whether a tensor, by llama.cpp's name, is a norm's weight w that files store as 1 + w. The gated norm of linear attention
        (`ssm_norm`) has none in transformers, either."""
        return self.family.unit_offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")

    # Keys of the metadata, without the architecture's name -> those of config.json

    @property
    def expert_keys(self) -> Mapping[str, str] | None:
        """Keys of the sizes of a mixture of experts; None where the model has none."""
        return self.gguf.experts

    @property
    def eps_keys(self) -> tuple[str, str]:
        """The key of the metadata and that of config.json for the eps of norms."""
        return f"attention.layer_norm_{'' if self.family.layer_norm else 'rms_'}epsilon", self.family.norm_eps

    @property
    def multiplier_keys(self) -> dict[str, str]:
        """Keys of multipliers of embeddings, residual connections and logits, and of `GGUF.numbers`."""
        family = self.family
        names = {"embedding_scale": family.embedding_multiplier, "residual_scale": family.residual_multiplier, **self.gguf.numbers}
        names["logit_scale"] = family.logits_divisor or family.logits_multiplier
        return {name: key for name, key in names.items() if key is not None}

    @property
    def norm_topk(self) -> bool:
        """Whether the weights of a token's experts sum to 1, which files do not say."""
        return self.gguf.normalized or (self.family.moe is not None and self.family.moe.norm_topk is None)


ARCHITECTURES = tuple(
    Architecture(package, family, gguf)
    for package, family in (FAMILIES | OTHERS).items()
    for gguf in (family.gguf, *family.other_gguf)
    if gguf is not None
)


# What tensors are, by llama.cpp's names


def is_ignorable(name: str) -> bool:
    """Return whether a model computes the same without a tensor that transformers has no name for: see `_NEXTN`, and scales of activations
    by which other runtimes quantize."""
    words = name.split(".")
    return _NEXTN.fullmatch(name) is not None or words[-1] == "input_scale" or not _ROPE_TENSORS.isdisjoint(words)


def layer_of(name: str) -> int:
    """Return the number of the layer that a tensor is in; -1 for those outside of layers."""
    words = name.split(".")
    return int(words[1]) if name.startswith("blk.") and words[1].isdecimal() else -1


def is_router(name: str) -> bool:
    """Return whether a tensor is of a router, which chooses the experts of a token, or of the gate of a shared expert."""
    return "ffn_gate_inp" in name


def is_depthwise_kernel(name: str) -> bool:
    """Return whether a tensor is the kernel of a depthwise convolution: a matrix in files, [channels, 1, width] in transformers."""
    return name.endswith(("shortconv.conv.weight", "ssm_conv1d.weight"))

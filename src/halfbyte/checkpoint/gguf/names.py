"""Names of a model's tensors in GGUF files and in transformers, and how their values differ.

    in a file                      in transformers                           method of `Architecture`
    blk.0.attn_q.weight            model.layers.0.self_attn.q_proj.weight    to_transformers, to_gguf
    blk.0.ffn_gate_exps.weight,    model.layers.0.mlp.experts.gate_up_proj   stack, to_gguf
      blk.0.ffn_up_exps.weight

All follows from the table of families (`decoder/families`): an `Architecture` is a family with one of its entries for GGUF. `model.py`
reads files by it, `export.py` writes them, and `config.py` reads their metadata.
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


class Stack(NamedTuple):
    """A tensor of transformers whose rows are those of several tensors of a file, concatenated.

    Attributes:
        target: Its name in transformers.
        parts: The names in the file.
    """

    target: str
    parts: tuple[str, ...]


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
    def outer_modules(self) -> dict[str, str]:
        """Modules outside of layers: llama.cpp's name -> transformers'."""
        family, root = self.family, self.gguf.layers.rpartition(".")[0]
        names = {"token_embd": f"{root}.embed_tokens", "output_norm": f"{root}.{family.final_norm}", "output": "lm_head"}
        inputs = (f"{root}.{name}" for name in PER_LAYER_INPUTS if family.per_layer_input)
        names |= dict(zip(("per_layer_token_embd", "per_layer_model_proj", "per_layer_proj_norm"), inputs, strict=False))
        return names | dict(self.gguf.outer)

    @cached_property
    def modules(self) -> dict[str, str]:
        """Modules in a layer: llama.cpp's name -> transformers'."""
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
        names |= dict(zip(("inp_gate", "proj", "post_norm"), PER_LAYER_MODULES if family.per_layer_input else (), strict=False))
        return {name: module for name, module in (names | self._mlp() | dict(self.gguf.tensors)).items() if module}

    def _mlp(self) -> dict[str, str]:
        """Modules of the MLP or of the mixture of experts, without the stacks of experts; both where the first layers are dense."""
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
        """Tensors in a layer: llama.cpp's name -> transformers'."""
        family = self.family
        names = {f"{gguf_name}.{end}": f"{module}.{end}" for gguf_name, module in self.modules.items() for end in ("weight", "bias")}
        names |= self.gguf.parameters
        if family.moe is not None and family.moe.correction is not None:
            names["exp_probs_b.bias"] = f"{family.mlp}.{family.moe.correction}"
        if family.sinks is not None:
            names["attn_sinks.weight"] = f"{self.gguf.attention}.{family.sinks}"
        return names | ({"layer_output_scale.weight": family.layer_scalar} if family.layer_scalar else {})

    @property
    def _experts_module(self) -> str:
        """transformers' name of the module of experts in a layer."""
        return self.gguf.experts_module or f"{self.family.mlp}.experts"

    def to_transformers(self, name: str) -> str | None:
        """Return transformers' name of a tensor of a file; None where it has none. For stacks of experts see `stack`."""
        if self.experts and (expert := _ONE_EXPERT.fullmatch(name)):
            return f"model.layers.{int(expert[1])}.mlp.experts.{int(expert[3])}.{_ONE_EXPERT_PARTS[expert[2]]}.weight"
        module, _, kind = name.rpartition(".")
        if module in self.outer_modules and kind in ("weight", "bias"):
            return f"{self.outer_modules[module]}.{kind}"
        in_layer = _IN_LAYER.fullmatch(name)
        tensor = self._tensors.get(name.split(".", 2)[2]) if in_layer else None
        return f"{self.gguf.layers}.{int(in_layer[1])}.{tensor}" if in_layer and tensor else None

    def stack(self, name: str) -> Stack | None:
        """Return the stack of experts or the `joined` matrix of which a tensor of a file is a part; None for any other tensor."""
        in_layer = _IN_LAYER.fullmatch(name)
        if in_layer is None or in_layer[3] != "weight":
            return None
        stacks = [(f"{self._experts_module}.{tensor}", modules) for tensor, modules in _STACKS] if self.experts else []
        for tensor, modules in (*stacks, *self.gguf.joined.items()):
            if in_layer[2] in modules:
                parts = tuple(f"blk.{in_layer[1]}.{module}.weight" for module in modules)
                return Stack(f"model.layers.{int(in_layer[1])}.{tensor}", parts)
        return None

    @property
    def inputs_first_experts(self) -> bool:
        """Whether transformers' experts are [E, K, N] with biases, rows of gate and up interleaved."""
        return self.family.moe is not None and self.family.moe.inputs_first

    def is_inputs_first(self, name: str) -> bool:
        """Whether one of transformers' tensors is a stack of experts with inputs first, as it is in floating point."""
        stack = _EXPERTS_IN_MODULES.fullmatch(name) if self.inputs_first_experts else None
        return stack is not None and stack[2] == self._experts_module and stack[3] in _WRITTEN_STACKS and not name.endswith(".weight")

    def is_in_stack(self, name: str) -> bool:
        """Return whether a tensor of a file is a stack of experts, a part of a `joined` matrix, or the biases of a stack."""
        if self.inputs_first_experts and name.endswith(".bias"):
            name = f"{name.removesuffix('bias')}weight"
        return self.stack(name) is not None

    def to_gguf(self, name: str) -> tuple[str, ...]:
        """Return the names in a file of one of transformers' tensors, the inverse of `to_transformers` and `stack`: none where files do not
        have it, one, or those of the stacks that a stack is split into."""
        if self.experts and (stack := _EXPERTS_IN_MODULES.fullmatch(name)) and stack[2] == self._experts_module:
            part = stack[3].removesuffix("_bias") if self.inputs_first_experts else stack[3]
            end = "weight" if part == stack[3] else "bias"
            return tuple(f"blk.{stack[1]}.{module}.{end}" for module in _WRITTEN_STACKS.get(part, ()))
        module, _, kind = name.rpartition(".")
        outer_modules = {outer: gguf_module for gguf_module, outer in self.outer_modules.items()}
        if module in outer_modules:
            return (f"{outer_modules[module]}.{kind}",)
        in_layer = re.fullmatch(rf"{re.escape(self.gguf.layers)}\.(\d+)\.([\w.]+)", name)
        gguf_tensor = {tensor: gguf_tensor for gguf_tensor, tensor in self._tensors.items()}.get(in_layer[2]) if in_layer else None
        return (f"blk.{in_layer[1]}.{gguf_tensor}",) if in_layer and gguf_tensor else ()

    def rows(self, name: str, config: Config, rows: int) -> Tensor | None:
        """Return, for a tensor by llama.cpp's name, the row of transformers' tensor for each of its rows; None where they are the same."""
        in_layer, order = _IN_LAYER.fullmatch(name), self.gguf.row_order
        return ORDERS[order](in_layer[2], config, rows) if order and in_layer else None

    def change(self, name: str) -> Callable[[Tensor], Tensor] | None:
        """Return the function from a file's values of a tensor, by llama.cpp's name, to transformers' values; None where they are equal."""
        if name.endswith(".ssm_a"):
            return lambda a: (-a).log()
        return (lambda norm: norm - 1.0) if self.has_unit_offset(name) else None

    def has_unit_offset(self, name: str) -> bool:
        """Whether a tensor, by llama.cpp's name, is the weight of a norm that is stored plus one: the gated one of linear attention is
        not."""
        return self.family.unit_offset and name.endswith("norm.weight") and not name.endswith("ssm_norm.weight")


def is_ignorable(name: str) -> bool:
    """Return whether a model computes the same without a tensor that transformers has no name for."""
    words = name.split(".")
    return _NEXTN.fullmatch(name) is not None or words[-1] == "input_scale" or any(word in _ROTARY for word in words)


def layer_of(name: str) -> int:
    """Return the layer of a tensor by llama.cpp's name; -1 for those outside of layers."""
    return int(name.split(".")[1]) if name.startswith("blk.") and name.split(".")[1].isdecimal() else -1


def is_router(name: str) -> bool:
    """Return whether a tensor, by llama.cpp's name, is of a router, which chooses the experts of a token."""
    return "ffn_gate_inp" in name


def is_depthwise_kernel(name: str) -> bool:
    """Return whether a tensor, by llama.cpp's name, is the kernel of a depthwise convolution: a matrix in files, [channels, 1, width] in
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
    sparse = bool(metadata.get(f"{name}.expert_count"))
    named = [a for a in ARCHITECTURES if a.name == name]
    if not named:
        readable = ", ".join(sorted({a.name for a in ARCHITECTURES}))
        raise CheckpointError(f"the GGUF file holds a model of architecture {short(name)}, halfbyte reads {readable}: use its safetensors")
    matching = [a for a in named if (a.experts is not None) == sparse and _matches(a, metadata)]
    if not matching:
        what = "with experts" if sparse else "without experts"
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

"""Names: of tensors in halfbyte's checkpoints, of their quantized modules, and of vLLM's layers. Needs no vLLM.

A checkpoint stores a quantized weight as `<module>.weight.data`, `.scale` and perhaps `.zero`, and a guard of one byte as
`<module>.weight`. Names of parameters have no dots, so vLLM's layers have `weight_data`, `weight_scale` and `weight_zero` next to the guard
`weight`. Stacked experts, whose modules are called `experts.gate_up_proj` and `experts.down_proj`, become `experts.gate_up_proj_data`, …,
which vLLM's loader of experts maps to `w13_weight_data`, …
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence

from halfbyte.checkpoint.native.quantization_config import Module

PARTS = ("data", "scale", "zero")
_STACK = r"(?P<stack>(?:^|\.)experts\.(?:gate_up_proj|up_proj|down_proj))"
_PART = rf"(?P<part>{'|'.join(PARTS)})"
# Patterns of names in checkpoints, in the order of their application -> what replaces them; None: the tensor is not loaded.
RENAMED: Mapping[re.Pattern[str], str | None] = {
    re.compile(rf"{_STACK}\.weight$"): None,
    re.compile(rf"{_STACK}\.weight\.{_PART}$"): r"\g<stack>_\g<part>",
    re.compile(rf"\.weight\.{_PART}$"): r".weight_\g<part>",
}
# transformers 5 calls the layers of a CLIP or SigLIP tower `vision_tower.encoder…`; files of its earlier versions, as vLLM's models, have
# `vision_tower.vision_model.encoder…`.
TOWERS = ("clip_vision_model", "siglip_vision_model")
TOWER_RENAMED: Mapping[re.Pattern[str], str | None] = {
    re.compile(r"(^|\.)vision_tower\.(?=(?:embeddings|encoder|pre_layrnorm|post_layernorm|head)\.)"): r"\1vision_tower.vision_model."
}
# The fused layers of models that do not say what theirs consist of.
_FUSED: Mapping[str, Sequence[str]] = {"qkv_proj": ("q_proj", "k_proj", "v_proj"), "gate_up_proj": ("gate_proj", "up_proj")}
_EMBEDDING = "embed_tokens"


class QuantizedModules:
    """The quantized modules of a checkpoint, by the names that vLLM's layers have.

    Args:
        modules: By their names in the checkpoint, as in the `quantization_config` of its config.json.
    """

    def __init__(self, modules: Mapping[str, Module]) -> None:
        self._modules = dict(modules)

    def rename(self, renamed: Callable[[dict[str, Module]], dict[str, Module]]) -> None:
        """Apply the model's mapping from Hugging Face's names of tensors to vLLM's, a function of a dict by these names."""
        found = renamed({f"{name}.weight": module for name, module in self._modules.items()})
        self._modules = {name.removesuffix(".weight"): module for name, module in found.items()}

    def of_layer(self, prefix: str, fused: Mapping[str, Sequence[str]]) -> tuple[Module | None, ...]:
        """Return the modules whose rows are the rows of the layer called `prefix`, in order; None for one that is not quantized.

        Args:
            fused: The last names of fused layers -> those of their parts: the model's `packed_modules_mapping`.

        Returns:
            One module, or those of a fused layer's parts; no modules where none is quantized.
        """
        if prefix in self._modules:
            return (self._modules[prefix],)
        parent, dot, last = prefix.rpartition(".")
        found = tuple(self._modules.get(f"{parent}{dot}{part}") for part in fused.get(last) or _FUSED.get(last, ()))
        return found if any(found) else ()

    def of_experts(self, prefix: str) -> tuple[Module, Module] | None:
        """Return the stacks of gate and up projections and of down projections of the experts called `prefix`; None where neither is
        quantized.

        Raises:
            LookupError: Only one of them is.
        """
        up = self._modules.get(f"{prefix}.gate_up_proj") or self._modules.get(f"{prefix}.up_proj")
        down = self._modules.get(f"{prefix}.down_proj")
        if up is None and down is None:
            return None
        if up is None or down is None:
            raise LookupError(prefix)
        return up, down

    def of_embedding(self, prefix: str, rows: int, width: int) -> Module | None:
        """Return the embedding called `prefix`, with `rows` tokens of `width` elements; None where it is not quantized.

        Some models of vLLM, Llama among them, give their embedding no prefix: then it is the only one of that shape.
        """
        if prefix:
            return self._modules.get(prefix)
        named = (module for name, module in self._modules.items() if name.rpartition(".")[2] == _EMBEDDING)
        found = [module for module in named if module.shape == (rows, width)]
        return found[0] if len(found) == 1 else None

"""The quantization method "halfbyte": which of vLLM's layers are quantized, as a folder's config.json says.

Its `quantization_config` names the modules and their formats; its section of halfbyte (SECTION) also says of which kind they are.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import nn

from halfbyte.checkpoint.native.manifest import SECTION
from halfbyte.checkpoint.native.quantization_config import METHOD, Module, parse
from halfbyte.errors import UnsupportedError
from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.embedding import HalfbyteEmbeddingMethod
from halfbyte.integrations.vllm.experts import HalfbyteExpertsMethod
from halfbyte.integrations.vllm.linear import HalfbyteLinearMethod
from halfbyte.integrations.vllm.names import RENAMED, TOWER_RENAMED, TOWERS, QuantizedModules

__all__ = ["METHOD", "HalfbyteConfig"]

_KINDS = ("Linear", "Embedding", "Experts")
_POSITIONS = "position_embedding"  # of a vision tower: a plain nn.Embedding in vLLM
_HEAD = "lm_head"


class HalfbyteConfig(api.QuantizationConfig):
    """The modules that a halfbyte checkpoint has quantized, each with its format and settings."""

    def __init__(self, modules: Mapping[str, Module]) -> None:
        super().__init__()
        self.modules = QuantizedModules(modules)
        self._tied_head = False
        self._renamed = dict(RENAMED)

    @classmethod
    def from_config(cls, config: dict[str, object]) -> HalfbyteConfig:
        """Parse the section. Raises CheckpointError where it is damaged or of a newer version."""
        return cls(parse(config))

    def get_name(self) -> str:
        return METHOD

    def get_supported_act_dtypes(self) -> list[torch.dtype]:
        return [torch.float32, torch.bfloat16, torch.float16]

    @classmethod
    def get_min_capability(cls) -> int:
        return 80  # Ampere, the oldest GPUs of halfbyte's kernels

    @staticmethod
    def get_config_filenames() -> list[str]:
        return []  # config.json has it all

    def get_checkpoint_weight_mapper(self) -> object:
        return api.WeightsMapper(orig_to_new_regex=self._renamed)

    def apply_vllm_mapper(self, hf_to_vllm_mapper: api.WeightsMapper) -> None:
        self.modules.rename(hf_to_vllm_mapper.apply_dict)

    def maybe_update_config(self, model_name: str, hf_config: object = None, revision: str | None = None) -> None:
        """Look at the whole config.json, of which `from_config` got one section.

        Raises:
            UnsupportedError: Modules are quantized that vLLM has in floating point, such as convolutions.
        """
        self._check_kinds(hf_config)
        if getattr(getattr(hf_config, "vision_config", None), "model_type", None) in TOWERS:
            self.modules.rename(api.WeightsMapper(orig_to_new_regex=TOWER_RENAMED).apply_dict)
            self._renamed |= TOWER_RENAMED
        text = hf_config.get_text_config() if hasattr(hf_config, "get_text_config") else hf_config
        self._tied_head = bool(getattr(text, "tie_word_embeddings", False))  # then the files hold one weight for embedding and head

    def _check_kinds(self, hf_config: object) -> None:
        for name, weight in (getattr(hf_config, SECTION, None) or {}).get("weights", {}).items():
            module, kind = name.removesuffix(".weight"), weight.get("kind")
            if kind not in _KINDS or module.endswith(_POSITIONS):
                allowed = f"{', '.join(_KINDS)} alone" if kind not in _KINDS else "positions in floating point alone"
                raise UnsupportedError(
                    f"{module} is a quantized {kind}, and vLLM's models take {allowed}: "
                    f"leave it in floating point, with halfbyte.Config(…, skip=({module!r},))"
                )

    def get_quant_method(self, layer: nn.Module, prefix: str) -> object:
        """Return the method of a layer, by the name (`prefix`) that the model gives it.

        Returns None where the checkpoint has the layer in floating point; vLLM has a method of its own for linear layers of that kind.
        """
        if isinstance(layer, api.LinearBase):
            parts = self.modules.of_layer(prefix, self.packed_modules_mapping)
            return HalfbyteLinearMethod(parts, prefix) if parts else api.UnquantizedLinearMethod()
        if isinstance(layer, api.RoutedExperts):
            return self._experts_method(layer, prefix)
        if isinstance(layer, api.VocabParallelEmbedding):
            module = self._embedding(layer, prefix)
            return None if module is None else HalfbyteEmbeddingMethod(module, prefix)
        return None

    def _experts_method(self, layer: nn.Module, prefix: str) -> HalfbyteExpertsMethod | None:
        try:
            stacks = self.modules.of_experts(prefix)
        except LookupError as error:
            raise UnsupportedError(
                f"one of two stacks of experts of {prefix} is quantized, and vLLM loads both or neither: quantize both"
            ) from error
        return None if stacks is None else HalfbyteExpertsMethod(*stacks, layer.moe_config, prefix)

    def _embedding(self, layer: api.VocabParallelEmbedding, prefix: str) -> Module | None:
        shape = layer.org_vocab_size, layer.embedding_dim
        if not isinstance(layer, api.ParallelLMHead):
            return self.modules.of_embedding(prefix, *shape)
        head = self.modules.of_embedding(prefix or _HEAD, *shape)  # some models give it no prefix
        return self.modules.of_embedding("", *shape) if head is None and self._tied_head else head

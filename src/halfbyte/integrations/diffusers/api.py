"""All that halfbyte uses of diffusers beyond its documentation: the tables of quantizers, tensors of GGUF files, and the groups of modules
that group offloading moves. `halfbyte/versions.py` names the versions that were tested.

Parts of diffusers are imported in functions, as this file may be imported while they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from functools import wraps
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from halfbyte.nn.modules.quantized import QuantModule

if TYPE_CHECKING:
    from halfbyte.integrations.transformers.modules import Part

_CONFIG = "quantization_config"


def register(method: str, config: type, quantizer: type) -> None:
    """Add a quantization method to diffusers, which has no function for that."""
    auto = sys.modules["diffusers.quantizers.auto"]
    auto.AUTO_QUANTIZATION_CONFIG_MAPPING[method] = config
    auto.AUTO_QUANTIZER_MAPPING[method] = quantizer


def is_model(module: nn.Module) -> bool:
    """Whether it is a model of diffusers, which saves and loads itself."""
    models = sys.modules.get("diffusers.models.modeling_utils")
    return models is not None and isinstance(module, models.ModelMixin)


def ggml_type(tensor: object) -> int | None:
    """ggml's number of the type of a tensor that diffusers has read from a GGUF file as bytes; None for all other tensors."""
    found = getattr(tensor, "quant_type", None)
    return None if found is None else int(found)


def ggml_bytes(tensor: Tensor) -> Tensor:
    """The bytes of a tensor of a GGUF file, uint8 [..., bytes of a row]."""
    return torch.Tensor._make_subclass(Tensor, tensor.data)


def set_description(model: Part, description: object | None) -> None:
    """Set the `quantization_config` of a model's config, on whose `to_dict` diffusers calls when it saves; None removes it."""
    from diffusers.configuration_utils import FrozenDict

    config = {key: value for key, value in model._internal_dict.items() if key != _CONFIG}
    model._internal_dict = FrozenDict(config if description is None else config | {_CONFIG: description})


def _for_onload_device(init: Callable[..., None]) -> Callable[..., None]:
    """Decorate `ModuleGroup.__init__`: weights are packed for the device on which they compute, as the group moves their bytes."""

    @wraps(init)
    def prepared(
        self: object, modules: list[nn.Module], offload_device: object, onload_device: torch.device | str, *args: object, **kwargs: object
    ) -> None:
        for module in modules:
            for part in module.modules():
                if isinstance(part, QuantModule):
                    part.keep_layout_of(torch.device(onload_device))
        init(self, modules, offload_device, onload_device, *args, **kwargs)

    return prepared


def support_group_offloading() -> None:
    """Let group offloading move quantized layers, each as a leaf of its own where it moves leaves."""
    from diffusers.hooks import _common, group_offloading

    group_offloading.ModuleGroup.__init__ = _for_onload_device(group_offloading.ModuleGroup.__init__)
    leaves = (*_common._GO_LC_SUPPORTED_PYTORCH_LAYERS, QuantModule)
    group_offloading._GO_LC_SUPPORTED_PYTORCH_LAYERS = leaves

"""Linear layers of halfbyte checkpoints: loaded in canonical order, packed for the kernels once they are loaded."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.packed import PackedLayer, Part
from halfbyte.integrations.vllm.parameters import check_inputs, codes_parameters, float_parameters, fused_parameters, loaded_codes
from halfbyte.nn.described import ORDER
from halfbyte.nn.modules.quantized import guard


@api.register_weight_loader_v2_supported_method
class HalfbyteLinearMethod(api.LinearMethodBase):
    """y = x · Wᵀ + bias.

    Args:
        modules: Of the checkpoint, whose rows are the layer's, in order; None for those in floating point. A fused layer may be one module.
        prefix: The layer's name.
    """

    def __init__(self, modules: tuple[Module | None, ...], prefix: str) -> None:
        self.modules, self.prefix = modules, prefix

    def create_weights(
        self,
        layer: nn.Module,
        input_size_per_partition: int,
        output_partition_sizes: list[int],
        input_size: int,
        output_size: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: Any,
    ) -> None:
        k, loader = input_size_per_partition, extra_weight_attrs["weight_loader"]
        modules = self.modules * len(output_partition_sizes) if len(self.modules) == 1 else self.modules
        self._parts: list[tuple[Module | None, tuple[int, int], Mapping[str, nn.Parameter]]] = []
        for module, n in zip(modules, output_partition_sizes, strict=True):
            if module is not None:
                check_inputs(module, k, self.prefix)
            created = float_parameters(n, k, params_dtype, loader) if module is None else codes_parameters(module, n, k, loader)
            self._parts.append((module, (n, k), created))
        tensors = [created for _, _, created in self._parts]
        for name, parameter in (tensors[0] if len(tensors) == 1 else fused_parameters(tensors, loader)).items():
            layer.register_parameter(name, parameter)
        self._dtype = params_dtype

    def process_weights_after_loading(self, layer: api.LinearBase) -> None:
        """Pack what was loaded and free it. The guard stays as the layer's `weight`: LoRA looks there for the layer's device."""
        if not self._parts:
            return
        parts = [_part(*one) for one in self._parts]
        device = next(iter(self._parts[0][2].values())).device
        self._parts = []
        for name in [name for name, _ in layer.named_parameters(recurse=False) if name == ORDER or name.startswith("weight")]:
            delattr(layer, name)
        layer.weight = nn.Parameter(guard(device), requires_grad=False)
        layer.packed = PackedLayer(parts)
        api.log.info_once("halfbyte multiplies layers in %s", layer.packed.describe(self._dtype))

    def apply(self, layer: api.LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.packed(x, bias)  # type: ignore[no-any-return]


def _part(module: Module | None, shape: tuple[int, int], parameters: Mapping[str, nn.Parameter]) -> Part:
    if module is None:
        return Part(parameters["weight"].data)
    order = parameters[ORDER].data.long() if ORDER in parameters else None
    return Part(loaded_codes(module, shape, parameters), module.compute, module.activation, order)

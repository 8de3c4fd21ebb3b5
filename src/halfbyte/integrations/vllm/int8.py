"""halfbyte's kernels under compressed-tensors checkpoints with int8 weights and int8 activations (W8A8)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.foreign import int8_codes
from halfbyte.integrations.vllm.packed import PackedLayer, Part
from halfbyte.nn.modules.quantized import guard


class HalfbyteInt8Kernel(api.Int8ScaledMMLinearKernel):
    """y = x · Wᵀ + bias, with x quantized to int8 for each row as it comes, with a zero point or without."""

    @classmethod
    def is_supported(cls, compute_capability: int | None = None) -> tuple[bool, str | None]:
        """Return whether this machine runs it, and why not."""
        return (True, None) if api.current_platform.is_cpu() else (False, "runs on CPUs")

    @classmethod
    def can_implement(cls, c: api.Int8ScaledMMLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether a layer is computed by halfbyte, and why not."""
        if c.is_static_input_scheme:
            return False, "quantizes activations as they come, and the scheme has static scales of activations"
        return True, None

    def process_weights_after_loading(self, layer: api.LinearBase) -> None:
        weight_name, scale_name, *_ = self.layer_param_names
        weight, scale = getattr(layer, weight_name), getattr(layer, scale_name)
        codes = int8_codes(weight.data, scale.data, layer.logical_widths)
        layer.packed = PackedLayer([Part(codes, "int8", "row" if self.config.input_symmetric else "row_offset")])
        delattr(layer, scale_name)
        setattr(layer, weight_name, nn.Parameter(guard(weight.device), requires_grad=False))
        api.log.info_once("halfbyte multiplies layers in %s", layer.packed.describe(torch.get_default_dtype()))

    def apply_weights(self, layer: api.LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.packed(x, bias)  # type: ignore[no-any-return]

"""halfbyte's kernels under AWQ, GPTQ and compressed-tensors checkpoints with integer weights and float activations (W4A16, W8A16)."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.foreign import half_scale, weight_only_codes, weight_only_format, why_not_on_gpu
from halfbyte.integrations.vllm.packed import PackedLayer, Part
from halfbyte.machine import gpu
from halfbyte.nn.modules.quantized import guard

_SYMMETRIC = {api.scalar_types.uint4b8: 4, api.scalar_types.uint8b128: 8}
_WITH_ZERO_POINTS = {api.scalar_types.uint4: 4, api.scalar_types.uint8: 8}


class HalfbyteWNA16Kernel(api.MPLinearKernel):
    """y = x · Wᵀ + bias, with W in integers of 4 or 8 bits, in blocks or per channel, with or without zero points."""

    @classmethod
    def get_min_capability(cls) -> int:
        return 80

    @classmethod
    def can_implement(cls, c: api.MPLinearLayerConfig) -> tuple[bool, str | None]:
        """Return whether a layer is computed by halfbyte, and why not."""
        bits = (_WITH_ZERO_POINTS if c.zero_points else _SYMMETRIC).get(c.weight_type)
        if bits is None:
            return False, f"halfbyte has no kernels for weights of type {c.weight_type}"
        if c.group_size == 0 or c.group_size < -1:
            return False, f"halfbyte takes groups of 1 and more inputs, got {c.group_size}"
        if api.current_platform.is_cpu():
            return True, None
        k, n = c.partition_weight_shape
        fmt = weight_only_format(bits, c.group_size, zero_points=c.zero_points, scale=torch.float16)
        reason = why_not_on_gpu(fmt, (n, k), c.act_type, gpu(torch.cuda.current_device()))
        return reason is None, reason

    def process_weights_after_loading(self, layer: nn.Module) -> None:
        c = self.config
        quantized, scale, zero = self._get_weight_params(layer)
        stored = _rows_first(_unpacked(quantized, c.weight_type), quantized)
        points = None
        if c.zero_points and zero is not None:
            points = _rows_first(_unpacked(zero, c.weight_type), zero)
        scale_data = _rows_first(scale.data, scale)
        if scale_data.is_cuda:
            scale_data = half_scale(scale_data)
        bits = (_WITH_ZERO_POINTS if c.zero_points else _SYMMETRIC)[c.weight_type]
        fmt = weight_only_format(bits, c.group_size, zero_points=c.zero_points, scale=scale_data.dtype)
        layer.packed = PackedLayer([Part(weight_only_codes(fmt, stored, scale_data, points))])
        for name in (self.w_s_name, self.w_zp_name):
            if name and getattr(layer, name, None) is not None:
                delattr(layer, name)
        # LoRA looks under this name for the layer's device.
        setattr(layer, self.w_q_name, nn.Parameter(guard(quantized.device), requires_grad=False))
        api.log.info_once("halfbyte multiplies layers in %s", layer.packed.describe(c.act_type))

    def apply_weights(self, layer: api.LinearBase, x: Tensor, bias: Tensor | None = None) -> Tensor:
        return layer.packed(x, bias)  # type: ignore[no-any-return]


def _unpacked(parameter: api.BasevLLMParameter, weight_type: object) -> Tensor:
    values: Tensor = api.unpack_quantized_values_into_int32(parameter.data, weight_type, parameter.packed_dim)
    return values


def _rows_first(tensor: Tensor, parameter: api.BasevLLMParameter) -> Tensor:
    """[outputs, inputs or blocks], whichever order the parameter has."""
    return tensor if parameter.output_dim == 0 else tensor.t()

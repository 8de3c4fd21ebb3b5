"""Mixtures of experts in halfbyte checkpoints: two stacks of weights, [E, 2 I, K] and [E, K, I]."""

from __future__ import annotations

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.errors import UnsupportedError
from halfbyte.formats.dense import dense_tensors
from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.names import PARTS
from halfbyte.integrations.vllm.parameters import check_inputs, loaded_codes


class HalfbyteExpertsMethod(api.FusedMoEMethodBase):
    """y = sum over t of w[t] * (act(x · Wgate_up[id[t]]ᵀ) · Wdown[id[t]]ᵀ)

    Args:
        gate_up, down: Modules of the checkpoint.
        moe: vLLM's description of the layer.
        prefix: The layer's name.

    Raises:
        UnsupportedError: The experts have biases, or one scale for all.
    """

    def __init__(self, gate_up: Module, down: Module, moe: api.FusedMoEConfig, prefix: str) -> None:
        super().__init__(moe)
        self.stacks = {"w13": gate_up, "w2": down}
        self.prefix = prefix
        for module in self.stacks.values():
            if module.format.block == "tensor":
                raise UnsupportedError(
                    f"the experts of {prefix} are in {module.format}, and vLLM loads experts with scales for blocks or channels: "
                    "quantize them to int8_channel"
                )
        if moe.has_bias:
            raise UnsupportedError(f"the experts of {prefix} have biases, which the plugin does not add: use halfbyte.LanguageModel")

    def create_weights(
        self,
        layer: api.RoutedExperts,
        num_experts: int,
        hidden_size: int,
        intermediate_size_per_partition: int,
        params_dtype: torch.dtype,
        **extra_weight_attrs: object,
    ) -> None:
        rows = intermediate_size_per_partition * (2 if self.moe.is_act_and_mul else 1)
        self._shapes = {"w13": (num_experts, rows, hidden_size), "w2": (num_experts, hidden_size, intermediate_size_per_partition)}
        scopes = api.FusedMoeWeightScaleSupported
        for stack, module in self.stacks.items():
            shape = self._shapes[stack]
            check_inputs(module, shape[-1], self.prefix)
            scope = scopes.GROUP.value if isinstance(module.format.block, int) else scopes.CHANNEL.value
            for part, (dtype, size) in dense_tensors(module.format, shape, bytes_each=module.bytes_each).items():
                data = torch.zeros(size, dtype=dtype, device=torch.get_default_device())
                parameter = torch.nn.Parameter(data, requires_grad=False)
                layer.register_parameter(f"{stack}_weight_{part}", parameter)
                api.set_weight_attrs(parameter, {**extra_weight_attrs, "quant_method": scope})

    def process_weights_after_loading(self, layer: api.RoutedExperts) -> None:
        """Packs what was loaded and frees it."""
        if hasattr(self, "_packed"):
            return
        self._packed = {}
        for stack, module in self.stacks.items():
            names = [f"{stack}_weight_{part}" for part in PARTS if hasattr(layer, f"{stack}_weight_{part}")]
            loaded = {name.removeprefix(f"{stack}_"): getattr(layer, name) for name in names}
            codes = loaded_codes(module, self._shapes[stack], loaded)
            self._packed[stack] = ops.pack(codes, codes.data.device)
            for name in names:
                delattr(layer, name)
            # LoRA looks here for the layer's device.
            layer.register_parameter(f"{stack}_weight", torch.nn.Parameter(self._packed[stack].data, requires_grad=False))
        formats = " and ".join(dict.fromkeys(str(module.format) for module in self.stacks.values()))
        api.log.info_once("halfbyte multiplies experts in %s (halfbyte.grouped_linear)", formats)

    def get_fused_moe_quant_config(self, layer: object) -> object:
        """Not used: vLLM's own kernels for experts do not run."""
        return api.FUSED_MOE_UNQUANTIZED_CONFIG

    def apply(
        self,
        layer: api.RoutedExperts,
        x: Tensor,
        topk_weights: Tensor,
        topk_ids: Tensor,
        shared_experts: object,
        shared_experts_input: Tensor | None,
    ) -> Tensor:
        """x [M, K], weights and ids [M, T] -> [M, K]."""
        remote = topk_ids < 0  # experts of other processes: with expert parallelism the map has -1 for them
        topk_ids = topk_ids.long().clamp(min=0)
        if layer.expert_map is not None:
            topk_ids = layer.expert_map[topk_ids]
            remote |= topk_ids < 0
            topk_ids = topk_ids.clamp(min=0)
        gate_up, down = self._packed["w13"], self._packed["w2"]
        up, second = self.stacks["w13"], self.stacks["w2"]
        if layer.apply_router_weight_on_input:
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        inner = ops.grouped_linear(x, gate_up, topk_ids, compute=up.compute, activation=up.activation).flatten(0, 1)
        width = self._shapes["w2"][-1]
        activated = inner.new_empty((len(inner), width))
        api.apply_moe_activation(layer.activation, activated, inner, activation_config=self._activation())
        y = ops.grouped_linear(activated.view(*topk_ids.shape, width), down, topk_ids, compute=second.compute, activation=second.activation)
        # The first expert here was multiplied in the place of a remote one: what it gave, infinities too, does not count.
        return (y * topk_weights.to(y.dtype).unsqueeze(-1)).masked_fill_(remote.unsqueeze(-1), 0).sum(1)

    def _activation(self) -> object:
        return api.ApplyMoEActivationConfig.from_configs(self.moe, api.FUSED_MOE_UNQUANTIZED_CONFIG)

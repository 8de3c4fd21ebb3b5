"""Mixtures of experts in halfbyte checkpoints, for vLLM's fused MoE layers.

vLLM calls `create_weights`, loads each process's share of the codes into the parameters `w13_weight_data`, `w13_weight_scale`, …, calls
`process_weights_after_loading`, which packs them, and then `apply` with the router's choice for each token. "w13" and "w2" are vLLM's
names of the gate and up projections together and of the down projection.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

from halfbyte import ops
from halfbyte.checkpoint.native.quantization_config import Module
from halfbyte.errors import UnsupportedError
from halfbyte.formats.dense import dense_tensors
from halfbyte.integrations.vllm import api
from halfbyte.integrations.vllm.names import PARTS
from halfbyte.integrations.vllm.parameters import check_inputs, loaded_codes
from halfbyte.layouts.base import Packed


class _Stack:
    """The weights of all experts for one product, [E, N, K] in this process.

    Args:
        name: "w13" or "w2".
        module: The checkpoint's description of them.
    """

    packed: Packed

    def __init__(self, name: str, module: Module) -> None:
        self.name, self.module = name, module
        self.shape: tuple[int, int, int] = (0, 0, 0)  # known in create_parameters

    def create_parameters(self, layer: nn.Module, shape: tuple[int, int, int], prefix: str, attributes: dict[str, object]) -> None:
        """Give the layer parameters for the codes, which vLLM loads."""
        check_inputs(self.module, shape[-1], prefix)
        self.shape, fmt, scopes = shape, self.module.format, api.FusedMoeWeightScaleSupported
        scope = scopes.GROUP if isinstance(fmt.block, int) else scopes.CHANNEL
        for part, (dtype, size) in dense_tensors(fmt, shape).items():
            data = torch.zeros(size, dtype=dtype, device=torch.get_default_device())
            parameter = nn.Parameter(data, requires_grad=False)
            layer.register_parameter(f"{self.name}_weight_{part}", parameter)
            api.set_weight_attrs(parameter, {**attributes, "quant_method": scope.value})

    def pack(self, layer: nn.Module) -> None:
        """Pack the codes that were loaded, and free them."""
        parts = [f"weight_{part}" for part in PARTS if hasattr(layer, f"{self.name}_weight_{part}")]
        codes = loaded_codes(self.module, self.shape, {part: getattr(layer, f"{self.name}_{part}") for part in parts})
        self.packed = ops.pack(codes, codes.data.device)
        for part in parts:
            delattr(layer, f"{self.name}_{part}")
        # LoRA looks here for the layer's device.
        layer.register_parameter(f"{self.name}_weight", nn.Parameter(self.packed.data, requires_grad=False))

    def multiply(self, x: Tensor, ids: Tensor) -> Tensor:
        """Multiply x [M, K] or [M, T, K] by the experts ids [M, T] -> [M, T, N]."""
        return ops.grouped_linear(x, self.packed, ids, compute=self.module.compute, activation=self.module.activation)


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
        self._gate_up, self._down = _Stack("w13", gate_up), _Stack("w2", down)
        self._is_packed = False
        self._prefix = prefix
        for module in (gate_up, down):
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
        self._gate_up.create_parameters(layer, (num_experts, rows, hidden_size), self._prefix, extra_weight_attrs)
        down_shape = num_experts, hidden_size, intermediate_size_per_partition
        self._down.create_parameters(layer, down_shape, self._prefix, extra_weight_attrs)

    def process_weights_after_loading(self, layer: api.RoutedExperts) -> None:
        """Pack what was loaded and free it; vLLM may call this twice."""
        if self._is_packed:
            return
        self._gate_up.pack(layer)
        self._down.pack(layer)
        self._is_packed = True
        formats = " and ".join(dict.fromkeys(str(stack.module.format) for stack in (self._gate_up, self._down)))
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
        """x [M, K], weights and ids [M, T] -> [M, K]. vLLM's runner computes shared experts itself."""
        if layer.apply_router_weight_on_input:
            assert topk_weights.shape[-1] == 1, "vLLM defines weights of inputs for one expert a token"
            x, topk_weights = x * topk_weights.to(x.dtype), torch.ones_like(topk_weights)
        ids, remote = _local_ids(topk_ids, layer.expert_map)
        gate_up = self._gate_up.multiply(x, ids).flatten(0, 1)
        activated = gate_up.new_empty((len(gate_up), self._down.shape[-1]))
        config = api.ApplyMoEActivationConfig.from_configs(self.moe, api.FUSED_MOE_UNQUANTIZED_CONFIG)
        api.apply_moe_activation(layer.activation, activated, gate_up, activation_config=config)
        y = self._down.multiply(activated.view(*ids.shape, -1), ids)
        # The remote experts' results are another expert's, which may be infinite: a weight of 0 would not remove them.
        return (y * topk_weights.to(y.dtype).unsqueeze(-1)).masked_fill_(remote.unsqueeze(-1), 0).sum(1)


def _local_ids(ids: Tensor, expert_map: Tensor | None) -> tuple[Tensor, Tensor]:
    """Return the indices of experts [M, T] in this process's stacks, and where they are other processes' (there the index is 0).

    Such ids are -1 in `ids` or, with expert parallelism, in the map from all experts to this process's.
    """
    remote, ids = ids < 0, ids.long().clamp(min=0)
    if expert_map is not None:
        ids = expert_map[ids]
        remote |= ids < 0
        ids = ids.clamp(min=0)
    return ids, remote

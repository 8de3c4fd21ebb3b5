"""Everything of vLLM that the plugin uses. No other file imports vLLM, so that a new version of it is a look at this list.

The versions that were tested are in `halfbyte.versions`; in others `register` declines. Documented for plugins are `QuantizationConfig`,
`register_quantization_config` and the bases of methods. Private are the tables of kernels, which `prefer_kernel` changes, the classes of
parameters and what layers pass to their methods.
"""

from __future__ import annotations

import functools
import sys
from typing import Any

from vllm import envs as _envs
from vllm.distributed import get_tensor_model_parallel_world_size as tensor_parallel_size
from vllm.logger import init_logger
from vllm.model_executor.kernels import linear as linear_kernels
from vllm.model_executor.kernels.linear.mixed_precision.MPLinearKernel import MPLinearKernel, MPLinearLayerConfig
from vllm.model_executor.kernels.linear.scaled_mm.ScaledMMLinearKernel import Int8ScaledMMLinearKernel, Int8ScaledMMLinearLayerConfig
from vllm.model_executor.layers.fused_moe.activation import ApplyMoEActivationConfig, apply_moe_activation
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG
from vllm.model_executor.layers.fused_moe.fused_moe_method_base import FusedMoEMethodBase
from vllm.model_executor.layers.fused_moe.routed_experts import FusedMoeWeightScaleSupported, RoutedExperts
from vllm.model_executor.layers.linear import (
    LinearBase,
    LinearMethodBase,
    UnquantizedLinearMethod,
    register_weight_loader_v2_supported_method,
)
from vllm.model_executor.layers.quantization import QUANTIZATION_METHODS, register_quantization_config
from vllm.model_executor.layers.quantization.base_config import QuantizationConfig, QuantizeMethodBase
from vllm.model_executor.layers.quantization.utils.quant_utils import unpack_quantized_values_into_int32
from vllm.model_executor.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from vllm.model_executor.models.utils import WeightsMapper
from vllm.model_executor.parameter import (
    BasevLLMParameter,
    ChannelQuantScaleParameter,
    GroupQuantScaleParameter,
    ModelWeightParameter,
    PackedvLLMParameter,
    PerTensorScaleParameter,
)
from vllm.model_executor.utils import set_weight_attrs
from vllm.platforms import PlatformEnum, current_platform
from vllm.scalar_type import scalar_types
from vllm.triton_utils import dispatcher as _dispatcher

__all__ = [
    "FUSED_MOE_UNQUANTIZED_CONFIG",
    "QUANTIZATION_METHODS",
    "ApplyMoEActivationConfig",
    "BasevLLMParameter",
    "ChannelQuantScaleParameter",
    "FusedMoEMethodBase",
    "FusedMoeWeightScaleSupported",
    "GroupQuantScaleParameter",
    "Int8ScaledMMLinearKernel",
    "Int8ScaledMMLinearLayerConfig",
    "LinearBase",
    "LinearMethodBase",
    "MPLinearKernel",
    "MPLinearLayerConfig",
    "ModelWeightParameter",
    "PackedvLLMParameter",
    "ParallelLMHead",
    "PerTensorScaleParameter",
    "PlatformEnum",
    "QuantizationConfig",
    "QuantizeMethodBase",
    "RoutedExperts",
    "UnquantizedLinearMethod",
    "VocabParallelEmbedding",
    "WeightsMapper",
    "apply_moe_activation",
    "current_platform",
    "key_compiled_graphs",
    "linear_kernels",
    "log",
    "pass_over_llvmlite",
    "prefer_kernel",
    "register_quantization_config",
    "register_weight_loader_v2_supported_method",
    "scalar_types",
    "set_weight_attrs",
    "tensor_parallel_size",
    "unpack_quantized_values_into_int32",
]

# vLLM configures the loggers below its own.
log: Any = init_logger("vllm.halfbyte")


def prefer_kernel(kernel: type[MPLinearKernel | Int8ScaledMMLinearKernel]) -> None:
    """Puts a kernel before vLLM's own ones for CPUs, which follow where it cannot implement a layer."""
    weight_only = issubclass(kernel, MPLinearKernel)
    table = linear_kernels._POSSIBLE_KERNELS if weight_only else linear_kernels._POSSIBLE_INT8_KERNELS
    kernels = table[PlatformEnum.CPU]
    if kernel not in kernels:
        kernels.insert(0, kernel)


def key_compiled_graphs(value: str) -> None:
    """Makes `value` part of the key under which vLLM keeps compiled graphs on disk.

    A graph of a layer on halfbyte's kernels takes other weights than one on vLLM's, and the key has nothing else to tell them apart.
    """
    _envs.environment_variables["HALFBYTE"] = lambda: value


def pass_over_llvmlite() -> None:
    """Lets a worker start in a process that has imported llvmlite.

    vLLM 0.32 looks for its Triton kernels among the globals of all imported modules and calls `vars(value).get(…)` on each that has a
    `__dict__`. llvmlite's `ffi.lib` answers every name with a function of its library, also that one. It is hidden while vLLM looks.
    """
    if hasattr(_dispatcher._rebind_kernels, "__wrapped__"):
        return
    rebind_kernels = _dispatcher._rebind_kernels

    @functools.wraps(rebind_kernels)
    def without_llvmlite(*args: Any) -> None:
        ffi: Any = sys.modules.get("llvmlite.binding.ffi")
        if ffi is None:
            return rebind_kernels(*args)  # type: ignore[no-any-return]
        lib = ffi.lib
        del ffi.lib
        try:
            rebind_kernels(*args)
        finally:
            ffi.lib = lib

    _dispatcher._rebind_kernels = without_llvmlite

"""Everything of vLLM that the plugin uses. No other file imports vLLM, so that this list is what to check for a new version of it.

`register.py`, vLLM's entry point, imports this file only in the versions that `halfbyte.versions` lists as tested, and registers nothing in
others, as much of it is private to vLLM:

    documented for plugins  `QuantizationConfig`, `register_quantization_config`, the base classes `QuantizeMethodBase`, `LinearMethodBase`
                            and `FusedMoEMethodBase`
    private                 the tables of kernels, which `prefer_kernel` changes; the classes of parameters; the arguments that layers pass
                            to `create_weights` and `apply`; what `key_compiled_graphs` and `pass_over_llvmlite` patch
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
from vllm.model_executor.layers.fused_moe.config import FUSED_MOE_UNQUANTIZED_CONFIG, FusedMoEConfig
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
    "FusedMoEConfig",
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

# vLLM configures only loggers whose names begin with "vllm.".
log = init_logger("vllm.halfbyte")


def prefer_kernel(kernel: type[MPLinearKernel | Int8ScaledMMLinearKernel], *platforms: PlatformEnum) -> None:
    """Put a kernel first in vLLM's lists of linear kernels for some platforms. Repeated calls have no effect.

    vLLM takes the first kernel of the list whose `can_implement` accepts a layer: its own ones remain the fallback.

    Args:
        kernel: A weight-only kernel (W4A16 and the like: a subclass of MPLinearKernel) or one that multiplies int8 activations (W8A8).
        platforms: CPU and the like.
    """
    weight_only = issubclass(kernel, MPLinearKernel)
    table = linear_kernels._POSSIBLE_KERNELS if weight_only else linear_kernels._POSSIBLE_INT8_KERNELS
    for platform in platforms:
        if kernel not in table[platform]:
            table[platform].insert(0, kernel)


def key_compiled_graphs(value: str) -> None:
    """Make `value` a part of the key of vLLM's on-disk cache of torch.compile graphs.

    A layer's graph has other weights as inputs with halfbyte's kernels than with vLLM's, and nothing else in the key differs: a cached
    graph of one would be run with the weights of the other.

    Args:
        value: What tells graphs apart: halfbyte's version and whether its kernels are on.
    """
    # The key hashes each variable of this table by its value here. "HALFBYTE" is a name in the table alone, not in os.environ.
    _envs.environment_variables["HALFBYTE"] = lambda: value


def pass_over_llvmlite() -> None:
    """Monkey-patch vLLM so that a worker starts in a process that has imported llvmlite. Repeated calls have no effect.

    vLLM 0.32 searches the globals of all imported modules for its Triton kernels, and calls `vars(value).get(…)` on each global that has a
    `__dict__`. `llvmlite.binding.ffi.lib` wraps a shared library in a class with `__slots__`, so that even `__dict__` reaches its
    `__getattr__`, which returns a function wrapper; that has no `.get`. The patch removes this global for the duration of the search.
    """
    # The wrapper has `__wrapped__`, by functools.wraps: it is in place already.
    if hasattr(_dispatcher._rebind_kernels, "__wrapped__"):
        return
    rebind_kernels = _dispatcher._rebind_kernels

    @functools.wraps(rebind_kernels)
    def without_llvmlite(*args: object) -> None:
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

"""The entry point of the plugin."""

from __future__ import annotations

from halfbyte import __version__, env
from halfbyte.versions import why_untested


def register() -> None:
    """Register the quantization method "halfbyte", and halfbyte's kernels for the checkpoints of others. vLLM calls it in each process.

    In a version of vLLM that was not tested it registers nothing, and one warning says so.
    """
    if why_untested("vllm") is not None:
        return
    from halfbyte.integrations.vllm import api
    from halfbyte.integrations.vllm.config import METHOD, HalfbyteConfig

    api.pass_over_llvmlite()
    if METHOD not in api.QUANTIZATION_METHODS:
        api.register_quantization_config(METHOD)(HalfbyteConfig)
    api.key_compiled_graphs(f"{__version__}, kernels {'on' if env.vllm_kernels() else 'off'}")
    if env.vllm_kernels():
        from halfbyte.integrations.vllm.int8 import HalfbyteInt8Kernel
        from halfbyte.integrations.vllm.wna16 import HalfbyteWNA16Kernel

        api.prefer_kernel(HalfbyteWNA16Kernel, api.PlatformEnum.CPU, api.PlatformEnum.CUDA)
        api.prefer_kernel(HalfbyteInt8Kernel, api.PlatformEnum.CPU)

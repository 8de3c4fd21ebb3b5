"""halfbyte in vLLM, as a plugin that vLLM finds by the entry point `vllm.general_plugins`.

The engine, its scheduler, KV cache, sharding and weight loaders are vLLM's; halfbyte brings the quantization method "halfbyte" and kernels.

register.py    called by vLLM in each of its processes
api.py         everything of vLLM that the plugin uses: no other file imports vLLM
config.py      `QuantizationConfig`: which layers are quantized, and how
names.py       names of tensors and modules in halfbyte's checkpoints, and of vLLM's layers
parameters.py  the parameters that vLLM's loaders shard and fill
linear.py, embedding.py, experts.py    the methods of layers: `LinearMethodBase`, `QuantizeMethodBase`, `FusedMoEMethodBase`
packed.py      loaded codes, packed for halfbyte's kernels
wna16.py, int8.py    halfbyte's kernels for AWQ, GPTQ and compressed-tensors checkpoints
foreign.py     the tensors of these checkpoints as codes
"""

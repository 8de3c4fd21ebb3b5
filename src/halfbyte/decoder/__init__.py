"""What a decoder-only language model is, and a layer of an encoder, described once, and how it is computed.

families/      the table of model families: the only files that a new family touches; family.py: what it says of each
config.py      config.json, checked; rope.py: rotary position embeddings
spec.py        the specification of a model, with its tensors; build.py: makes it from a config and a checkpoint; build_layer.py: that of
               a layer, from a checkpoint or a live module
program.py     the specification as a list of ops; explain.py: prints it, with the kernel of each op
lower_cpu.py   computes a specification on a CPU, with the interface that a GPU has, too; cache.py: the KV cache
kernels_gpu.py says which kernels compute a program on a GPU
lower_gpu.py   computes a specification on a GPU; gpu_layer.py: the launches of a layer; gpu_step.py: a decode step as a CUDA graph
offload/       what of a model is on the CPU, where a GPU has no memory for all of it, and how that is computed
"""

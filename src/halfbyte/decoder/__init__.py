"""What a decoder-only language model is, described once, and how it is computed.

families.py    the table of model families: the only file that a new family touches; family.py: what it says of each
config.py      config.json, checked; rope.py: rotary position embeddings
spec.py        the specification of a model, with its tensors; build.py: makes it from a config and a checkpoint
lower_cpu.py   computes a specification on a CPU; cache.py: its KV cache
lower_gpu.py   computes a specification on a GPU; gpu_layer.py: the launches of a layer; gpu_step.py: a decode step as a CUDA graph
"""

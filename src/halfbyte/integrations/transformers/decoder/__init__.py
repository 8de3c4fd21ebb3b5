"""Compiled decoder stacks of transformers.

stack.py         the stack; compiled_layers.py: a call through its layers on a CPU; token_step.py: a decode step
live_layer.py    specifications of live decoder layers
live_ends.py     what is around the layers, and the specification of a whole live model, which `GpuModel` computes in `generate`
gpu_run.py       a call through the layers on a GPU; layer_gpu.py: lowers live layers
"""

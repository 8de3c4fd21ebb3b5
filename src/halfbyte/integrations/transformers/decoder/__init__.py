"""Compiled decoder stacks of transformers.

stack.py         the stack; token_step.py: a decode step on a CPU
run.py           a call through the layers of a stack; cpu_run.py: on a CPU; gpu_run.py: on a GPU, by layers that layer_gpu.py lowers
live_layer.py    specifications of live decoder layers
live_ends.py     what is around the layers, and the specification of a whole live model, which `GpuModel` computes in `generate`
"""

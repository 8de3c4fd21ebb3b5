"""`generate` of optimized models.

generating.py    writes tokens; steps.py: a model's call for each, without transformers' preparation; graphs.py: as a CUDA graph
gpu_text.py      on a GPU, by `GpuModel`
"""

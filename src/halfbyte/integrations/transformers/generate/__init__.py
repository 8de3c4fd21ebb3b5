"""`generate` of optimized models.

generating.py    writes tokens, for a call that request.py describes
steps.py         a model's call for each token, without transformers' preparation; graphs.py: as a CUDA graph
gpu_text.py      on a GPU, by `GpuModel`
"""

"""Training and pruning.

qat.py            quantization-aware training; fake_quantized.py: its modules
sparsity.py       `prune_`, `drop_zeros_`
"""

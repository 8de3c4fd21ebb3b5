"""Convolutions, and what lies between them in convolutional networks.

functions.py  the public functions, and the custom ops below them
folded.py     3-D convolutions by the 2-D op; transposed.py: transposed ones
cpu.py        the ops on the CPU; cuda.py: on GPUs
images.py     validation of arguments, on every device
weight_forms.py            weights as some kernels read them, cached
pool.py, elementwise.py    pools, and sums of tensors
group_norm.py              convolutions behind a GroupNorm, on the CPU; upsampled.py: of enlarged images
"""

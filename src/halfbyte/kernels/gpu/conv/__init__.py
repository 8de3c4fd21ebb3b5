"""Convolutions on GPUs, and what lies between them. docs/engineering/convolution-kernels.md says which one is taken when.

implicit_gemm.py, few.py, teams.py, hopper.py    products of patches; tile.py: parts of them; hopper_tile.py, hopper_write.py: the last
                                                 one's kernel
dynamic.py, image.py                             activations quantized on the fly
depthwise.py, stem.py, library.py                each channel by itself; images of few channels; cuDNN
pool.py, elementwise.py                          pools, and sums of tensors
"""

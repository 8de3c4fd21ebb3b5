"""The arithmetic on GPUs: Triton, and Gluon, its lower level, where a kernel is made for Hopper.

runtime/         launches, scratch buffers, and tapes, which replay launches
hopper/          parts of kernels for Hopper
linear/          linear layers: docs/engineering/gpu-kernels.md says which kernel is taken when
conv/            convolutions: docs/engineering/convolution-kernels.md; and what lies between them
experts/         mixtures of experts
transformer/     what lies between the products of a decoder layer
quantize/        numbers to codes and back
arithmetic.py    what kernels share; decode.py: bytes to floats in registers; weight_kinds.py: which kinds of zeros, scales and codebooks
                 they decode; epilogue.py: what happens to sums before they are written; values.py: the type of values in device code
"""

"""Conversion between floats and codes on GPUs.

quantize.py      float weights to codes
dequantize.py    codes of weights to floats, all or some rows, and sums of weights
activations.py   dynamic quantization of activations, for integer kernels
repack.py        weights of a CPU's layout in a GPU's
spread.py        the codes of 2:4 sparse weights with their zeros put back, for kernels that read all codes
"""

"""Numbers to codes and back on GPUs.

quantize.py      float weights to codes; dequantize.py: and back
activations.py   activations, quantized on the fly
repack.py        weights of a CPU's layout in a GPU's
spread.py        the codes of 2:4 sparse weights with their zeros put back, for kernels that read no sparse ones
"""

"""Networks on int8 codes.

build.py          makes one of a float network: prepare.py (tracing.py, batchnorm.py) -> ranges.py -> rewriter.py
equalization.py   equal ranges of channels; bias_correction.py: for what rounding shifts; moments.py: GPTQ
integer.py        the modules of the network; network.py: the network itself; programs.py: its faster graphs
output_noise.py   relative output error from quantizing each activation: sensitive ones stay in floating point
memory_format.py  channels_last within a network, here and in `fuse_`
"""

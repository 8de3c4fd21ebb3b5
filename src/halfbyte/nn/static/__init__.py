"""Networks on int8 codes.

codes.py          makes one of a traced network; tracing.py: what is looked for there; batchnorm.py: folded before;
                  equalization.py: equal ranges of channels; bias_correction.py: for what rounding shifts; moments.py: GPTQ
integer.py        its modules; network.py: all of them as one call
memory_format.py  channels_last within a network, here and in `fuse_`
"""

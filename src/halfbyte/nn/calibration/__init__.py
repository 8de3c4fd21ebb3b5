"""Calibrated quantization of language models.

calibrate.py, calibrate_experts.py    layer by layer, on text; runs.py: what each layer gets
low_rank.py       products of low rank, on any inputs of the model
folding.py        where scales of input channels can be folded; sensitivity.py: of single weights
"""

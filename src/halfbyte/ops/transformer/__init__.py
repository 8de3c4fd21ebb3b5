"""Layers of language models.

decode_ops.py  the steps of a decoder layer for one token, on all devices; norms.py: norms between them; routing.py: its half with experts
prefill_ops.py  those for many tokens
decoder.py    whole decoder layers in one native call; whole_model_decode.py: a model; experts.py: few rows of experts
encoder.py    whole encoder layers; embed.py: what is before them; cross_block.py: UNet blocks
weights.py    the weights of all these, by address
unrounded.py  outputs of layers before they were rounded to 16 bits
attention.py  attention of whole sequences on a CPU
"""

"""Layers of language models.

decoding.py   the steps of a decoder layer for one token, on all devices; norms.py: norms between them; routing.py: its half with experts
prompt.py     those for many tokens
decoder.py    whole decoder layers in one call on a CPU; decoding_step.py: all of a model for one token; experts.py: few rows of experts
encoder.py    whole encoder layers; embed.py: what is before them; layers.py: what these and decoder.py are made of
attention.py  attention of whole sequences on a CPU
"""

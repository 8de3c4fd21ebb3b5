"""Logits → the next token.

sampler.py    `Sampling`, `Sampler`: of one sequence
batched.py    `BatchSampler`: of several sequences, where their logits are
defaults.py   `sampling_defaults`: what a model's generation_config.json sets
"""

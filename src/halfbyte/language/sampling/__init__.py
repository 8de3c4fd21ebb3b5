"""Logits → the next token.

sampler.py    `Sampling`, `Sampler`: of one sequence; `BatchSampler`: of several, where their logits are
draw.py       a token of each row of scores
defaults.py   `sampling_defaults`: what a model's generation_config.json sets
"""

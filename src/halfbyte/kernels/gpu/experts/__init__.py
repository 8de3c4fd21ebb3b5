"""Mixtures of experts on GPUs.

linear layers of all experts   grouped.py (few rows per expert, any GPU), grouped_hopper.py (many rows), grouped_int8_hopper.py (W4A8),
                               grouped_dequantized.py (torch's grouped product, very many rows)
router, weighted sum           routing.py
experts on the CPU             crossing.py: transfers of activations
"""

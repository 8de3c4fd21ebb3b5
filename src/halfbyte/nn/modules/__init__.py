"""Modules with quantized weights.

quantized.py      QuantLinear, QuantEmbedding and their base; conv.py, subclassed.py, experts.py, permuted.py, scaled.py: others
weight_view.py, under_compile.py    their weights, as other code sees them
packed_check.py   whether other code has computed with their bytes; rescaled.py: weights that a model rescales as it runs
low_rank.py       linear layers whose outliers are a product of low rank
expanded.py       modules put in place for the moment, so that each weight is a module's: experts.py, transposed.py, attention.py
"""

"""Folders that other projects quantized.

folders.py    reads them: affine.py, floats.py, tensors.py
targets.py    writes them: which weights each kind holds
"""

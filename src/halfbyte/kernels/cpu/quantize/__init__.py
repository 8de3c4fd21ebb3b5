"""Weights, and images behind norms, on CPUs, at the speed of memory.

quantize.py      float weights to codes; dequantize.py: and back
pack.py          codes into the layout of tiles; extract.py: codes out of llama.cpp's blocks
group_norm.py    GroupNorm and SiLU of images, and their codes; images.py: codes of images as they are
"""

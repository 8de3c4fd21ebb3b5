"""Convolutions, pools and elementwise operations between them, on GPUs. docs/engineering/convolution-kernels.md says which kernel is taken
when. Each kernel's file has `supports`, `configs` (the best guess first) and `launch`.

implicit GEMM          implicit_gemm.py, with parts that are shared in tile.py; hopper.py (wgmma and TMA), whose kernel is hopper_tile.py
                       and hopper_write.py; few.py and teams.py for few pixels
dynamic quantization   dynamic.py (a scale for each block or patch), image.py (for each image)
other convolutions     depthwise.py; stem.py (few input channels); library.py (cuDNN)
other operations       pool.py; elementwise.py (sums and products of tensors)
"""

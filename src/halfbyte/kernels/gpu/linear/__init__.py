"""Linear layers on GPUs. docs/engineering/gpu-kernels.md says which kernel is taken when.

skinny.py, skinny_hopper.py                        floats, few rows; skinny_tile.py: the tile of the former;
                                                   skinny_config.py, skinny_hopper_config.py: what they are compiled for, the latter also
                                                   which tiles
gemm_hopper.py, dequantized.py, plain.py           floats, many rows
gemm_int8.py, skinny_int8_hopper.py, gemm_int8_hopper.py    integers
skinny_rounded.py, rounded.py                               integers, multiplied as floats
qlinear.py                                                  int8 codes in and out
"""

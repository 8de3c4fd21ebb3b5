"""Linear layers on GPUs. docs/engineering/gpu-kernels.md says which kernel is taken when.

Each kernel's file has `supports`, `configs` (the best guess first) and `launch`.

floats, few rows    skinny.py; its tile is in skinny_tile.py, its configs are in skinny_config.py. On Hopper skinny_hopper.py, with the tile
                    of hopper/skinny_tile.py and the configs of skinny_hopper_config.py
floats, many rows   gemm_hopper.py; dequantized.py (dequantizes the weight for cuBLAS); plain.py (torch's operations, without Triton)
int8, few rows      skinny_int8_hopper.py; skinny_rounded.py (integers that are multiplied as floats)
int8, many rows     gemm_int8.py, gemm_int8_hopper.py; rounded.py (as skinny_rounded.py)
int8 in and out     qlinear.py
"""

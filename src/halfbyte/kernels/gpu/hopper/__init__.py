"""The parts that kernels for Hopper compose, in Gluon.

ring.py          the ring of pipeline stages: barriers, stages and phases; sizes of a product
tile.py          operand loads and products of a tile of many rows of floats; int8_tile.py, int8_sums.py: of integers
skinny_tile.py   products of a panel of the weight and few rows; sparse_tile.py: of a 2:4 sparse weight
weights.py       the weight operand: codes dequantized to registers for wgmma
stream_k.py      the tile schedule of a persistent grid: whole tiles, then equal shares of K
reduction.py     reduction of partial sums across programs: split-K and stream-K
epilogue.py      sums to y, by threads or TMA
gluon_compat.py  differences of Gluon in versions of Triton
"""

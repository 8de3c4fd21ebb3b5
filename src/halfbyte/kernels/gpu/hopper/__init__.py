"""The parts that kernels for Hopper are made of, in Gluon.

stages.py        what they refuse, the stages of shared memory, how lanes hold operands
gluon_compat.py  what Gluon has in different ways in versions of Triton
weights.py       codes to an operand of wgmma, in registers
tile.py          a tile of many rows of floats; int8_tile.py: of integers
skinny_tile.py   a panel of the weight and a few rows; sparse_tile.py: of 2:4 sparse weights
"""

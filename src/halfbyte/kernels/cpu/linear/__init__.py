"""Linear layers on CPUs. To read it: linear.py, driver.py, then tile.py.

linear.py       the call: compiles kernels and plans their arguments; grouped.py: for the experts of a mixture
driver.py       the loops around tiles
activations.py  lays out rows of x for tiles
tile.py         the micro-kernel; tile_spec.py: what it is compiled for; block_end.py: scales a block's sums; epilogue.py: outputs;
                prefetch.py: its prefetches of weights
expanded.py, bracketed.py, amx.py    variants of the tile: codes expanded once, scale and offset multiplied at once, matrix units
sparse.py, packed_planes.py          unpack 2:4 sparse weights, and codes of 5 and 6 bits
"""

"""Linear layers on CPUs.

linear.py        the call: from arguments to a plan; grouped.py: of experts
tile.py          the micro-kernel; tile_spec.py: what it is compiled for; block_end.py: how a block's sums are scaled; epilogue.py: outputs
expanded.py, bracketed.py, amx.py    tiles on codes expanded once, with scale and offset multiplied at once, on matrix units
driver.py        the loops around tiles; prefetch.py: weights on their way before they are needed
activations.py   activations into the order of tiles
sparse.py        2:4 sparse weights; packed_planes.py: codes of 5 and 6 bits
"""

"""Convolutions on CPUs, and what lies between them. docs/engineering/convolution-kernels.md says which one is taken when.

planned.py      what all have in common: a convolution is planned once for images of each size
gathered.py     everything: patches are gathered for the tiles of linear layers; patches.py makes the code
direct.py       codes with one scale a patch are read where they lie; direct_call.py plans
arranged.py     the same by products of bytes on AVX2, in an order that arrange.py finds
unsigned.py     the same for images of few channels and for small ones behind a ReLU
amx.py          on matrix units
winograd/       3 x 3 by minimal filtering
depthwise.py, depthwise_dot.py    each channel by itself; the latter by products of four codes
pool.py, elementwise.py           pools, and sums of tensors
"""

"""Convolutions on CPUs, and the pools and sums between them. docs/engineering/convolution-kernels.md says which one is taken when.

Images and outputs are channels_last. `dispatch.cpu_conv` chooses a kernel, a subclass of `PlannedConv`, and `ops.conv.cpu` calls it.

planned.py      the base of all kernels: a call is planned once for images of each size, then run
depthwise_dot.py, depthwise.py    each channel by itself: codes by dot products of four bytes, and any images
amx.py          codes on matrix units
winograd/       codes, 3 x 3, by minimal filtering
arranged.py     codes on AVX2, by products of bytes in an order that arrange.py finds      with the loops of direct.py
unsigned.py     codes of stems, and of small images behind a ReLU                          with the loops of direct.py
direct.py       codes with one scale a patch, which tiles read where they lie; direct_call.py plans all calls with its loops
gathered.py     everything else: patches are gathered for the tiles of linear layers, by the code of patches.py
pool.py, elementwise.py           pools, and sums of tensors
"""

"""How kernels of GPUs are launched, and how recorded launches are replayed.

launch.py        starts kernels, records launches and the tensors that they write, compiles kernels side by side
scratch.py       memory of kernels that is no operand: workspaces, locks, double buffers; for each stream, and for each CUDA graph
tape.py          recorded launches, bound to the addresses of their operands and replayed
compile_time.py  the constants that kernels are compiled for: how compiled ones are found again on disk
clock.py         times on a GPU; probe.py: what it can do at the most
"""

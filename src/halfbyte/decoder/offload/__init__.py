"""Models that are larger than a GPU's memory: a part of them is computed on the CPU.

placement.py      which parts, computed from a specification and the memory given
host_layers.py    the first layers, computed on the CPU
host_experts.py   the routed experts of layers, computed on the CPU
"""

"""Models that are larger than a GPU's memory: a part of them is computed on the CPU.

placement.py         which parts, computed from a specification and the memory given
rates.py             what the CPU, the GPU and the link between them do in a second, measured
expected.py          the time that a token and a prompt are expected to take, and from how many tokens on streaming experts pays
host_layers.py       the first layers, computed on the CPU
host_experts.py      the routed experts of layers, computed on the CPU
streamed_experts.py  … of prompts, which cross to the GPU and are computed there; pinned.py: from memory that is pinned
crossing.py          the memory through which hidden states cross to these
"""

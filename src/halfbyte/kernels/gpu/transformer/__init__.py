"""The kernels of a decoder layer on GPUs, other than its linear layers.

attend.py        attention of a decode step (one token of each sequence), with rope, query and key norms and the KV cache's new entry
attend_token.py  what attend.py does with the new token: rope, norms, and the cache's new entry
attend_many.py   attention of a prefill (many tokens); rope.py: rope, norms and new cache entries before it
kv_codes.py      encoding and decoding of a KV cache in 8 bits, for attend.py
norm.py          RMSNorm, LayerNorm and residual connections
gates.py         activations and gated activations that no product's epilogue computes
"""

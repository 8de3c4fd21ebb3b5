"""What lies between the products of a decoder layer on GPUs.

attend.py        attention of one token of each sequence; attend_many.py: of many tokens; rope.py: queries, keys and values for it
kv_codes.py      a KV cache in 8 bits
norm.py          RMS norms; gates.py: gated activations
"""

"""KV caches of transformers.

int8_cache.py    in 8 bits; static_codes.py: on GPUs
growing.py       growing caches; rings.py: windows of static ones
kv_place.py      where keys and values of new tokens go
"""

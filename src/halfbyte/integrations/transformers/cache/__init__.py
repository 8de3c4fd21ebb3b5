"""KV caches of transformers: int8_cache.py one in 8 bits; growing.py and kv_entry.py write to growing ones in place, on a CPU; transfer.py
copies keys and values between these and the cache of `GpuModel`."""

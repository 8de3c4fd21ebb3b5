"""The process of one contender of the CPU benchmark: `halfbyte.bench.worker` that knows all of `cpu_contenders.py`."""

from __future__ import annotations

from cpu_contenders import ALL

from halfbyte.bench.worker import Bench, serve

if __name__ == "__main__":
    serve(Bench(ALL))

"""halfbyte as a contender."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.bench.workload import Built, Workload


def linear(work: Workload, format: str, compute: str, dtype: torch.dtype = torch.float32) -> Built:
    """`ops.linear` on activations of `dtype`."""
    slab = work.codes(format)
    copy_bytes = work.take(slab, 0).nbytes
    weights = [ops.pack(work.take(slab, copy)) for copy in range(work.copies(copy_bytes))]

    def bind(x: Tensor) -> Callable[[], Iterator[Tensor]]:
        x = x.to(dtype)
        return lambda: (ops.linear(x, weight, compute=compute) for weight in weights)

    return Built(slab.dequantize(torch.float64), copy_bytes, len(weights), bind, dtype)

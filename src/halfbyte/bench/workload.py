"""The operands of all contenders: weights [N, K] with the same numbers for all, and activations [M, K].

A slab of Gaussian rows is made and quantized once. A copy of the weight takes the slab's rows in turn from a starting
row of its own, so copies are cheap to make, all differ (ONNX Runtime merges equal initializers), and any row of any
product can be checked against the slab.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import UnsupportedError
from halfbyte.formats.codes import Codes

# With random replacement a cache still holds 2 % of what is read in turn from four times its size, 20 % from twice.
ROTATION = 4
MAX_COPIES = 256
# Primes, so that rows repeat with no period that a tile could share.
_SLAB_ROWS = 1021
_STRIDE = 379
# The standard deviation of a trained layer's weights, roughly.
SIGMA = 0.02


@dataclass(frozen=True)
class Workload:
    """One shape on one machine.

    n, k          the weight is [n, k]
    threads       that the contender may use
    cache_bytes   of the last-level cache; rotation passes over ROTATION times as much
    memory_bytes  that the copies of one contender may take
    """

    n: int
    k: int
    threads: int
    cache_bytes: int
    memory_bytes: int

    @cached_property
    def slab(self) -> Tensor:
        """float32 [rows, K]: the rows that every copy is made of."""
        return torch.randn(_SLAB_ROWS, self.k, generator=torch.Generator().manual_seed(0)) * SIGMA

    def codes(self, format: str) -> Codes:
        """The slab in a format of halfbyte's; peers hold the same codes and scales."""
        return ops.quantize(self.slab, format)

    def rows(self, copy: int) -> Tensor:
        """int64 [N]: the slab's row behind each row of a copy."""
        return (torch.arange(self.n) + copy * _STRIDE) % _SLAB_ROWS

    def take(self, codes: Codes, copy: int) -> Codes:
        """One copy of the weight from the slab's codes: [N, K]."""
        rows, one_scale = self.rows(copy), codes.format.block == "tensor"
        taken: dict[str, Any] = {name: t if name != "data" and one_scale else t[rows] for name, t in codes.tensors().items()}
        return replace(codes, shape=(self.n, self.k), **taken)

    def copies(self, copy_bytes: int) -> int:
        """How many copies to rotate over, at least 2. Raises UnsupportedError where two do not fit into the memory allowed."""
        if 2 * copy_bytes > self.memory_bytes:
            raise UnsupportedError(
                f"two copies of {copy_bytes / 2**20:.0f} MiB exceed the {self.memory_bytes / 2**20:.0f} MiB allowed: raise --memory"
            )
        wanted = -(-ROTATION * self.cache_bytes // max(copy_bytes, 1))
        return max(2, min(wanted, self.memory_bytes // max(copy_bytes, 1), MAX_COPIES))

    def activations(self, m: int) -> Tensor:
        """float32 [M, K], Gaussian."""
        return torch.randn(m, self.k, generator=torch.Generator().manual_seed(m))


@dataclass(frozen=True)
class Built:
    """A contender with prepared weights.

    weight      float64 [rows of the slab, K]: the weight in the contender's own numbers
    copy_bytes  of one weight as the contender stores it: codes, scales, zeros
    copies      that a pass goes over
    bind        float32 x [M, K] -> a function; each call of it is one pass, and yields x · copyᵀ [M, N] for each copy
    dtype       that `bind` rounds x to
    value       converts outputs to the numbers that they represent
    """

    weight: Tensor
    copy_bytes: int
    copies: int
    bind: Callable[[Tensor], Callable[[], Iterator[Tensor]]]
    dtype: torch.dtype = torch.float32
    value: Callable[[Tensor], Tensor] = Tensor.double


def relative_error(work: Workload, built: Built, m: int) -> float:
    """The largest ‖y - reference‖ / ‖reference‖ of the copies, over 256 rows of each (all, where N is smaller), in float64."""
    x = work.activations(m)
    probes = torch.linspace(0, work.n - 1, min(work.n, 256)).long()
    reference = x.to(built.dtype).double() @ built.weight.T
    worst = 0.0
    for copy, y in enumerate(built.bind(x)()):
        expected = reference[:, work.rows(copy)[probes]]
        error = float((built.value(y[:, probes]) - expected).norm() / expected.norm())
        worst = max(worst, error if error == error else float("inf"))  # noqa: PLR0124 - NaN
    return worst

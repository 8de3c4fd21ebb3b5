"""The operands of a benchmark of linear layers: weights [N, K], the same numbers for each library, and activations [M, K].

A contender is halfbyte in one format or a peer, such as torch. `bench/cpu.py` defines a `Workload` for each shape; a contender's `build`
(`contenders.py`) turns it into a `Built`; the contender's process (`worker.py`) checks that and times passes over it.

A pass multiplies x by many copies of the weight, one after the other, so that each is read from memory and not from the cache. The copies
share a slab of 1021 Gaussian rows, which is quantized once: row r of copy c is row (r + 379 c) mod 1021 of the slab. So copies need no
quantization of their own, all differ (ONNX Runtime merges equal initializers), and any row of any product can be checked against the slab.
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

# Bytes of a pass in multiples of the cache. With random replacement a cache still hits 2 % of what is read cyclically from 4 times its
# size, and 20 % from twice its size: the fraction h of hits solves h = exp(-ROTATION * (1 - h)).
ROTATION = 4
MAX_COPIES = 256  # for tiny weights, whose copies would be thousands
# Primes: rows repeat after 1021, which is no multiple of the rows of a tile, and the first 1021 copies all begin at different rows.
_SLAB_ROWS = 1021
_STRIDE = 379
# The standard deviation of a trained layer's weights, roughly.
SIGMA = 0.02


@dataclass(frozen=True)
class Workload:
    """One shape of a linear layer on one machine. It is sent to the contenders' processes as JSON.

    Attributes:
        n, k: The weight is [N, K].
        threads: Threads that a contender may use.
        cache_bytes: Size of the last-level cache; the copies together are ROTATION times as large.
        memory_bytes: Limit of the memory that all copies of one contender take (`--memory` of the command line).
    """

    n: int
    k: int
    threads: int
    cache_bytes: int
    memory_bytes: int

    @cached_property
    def slab(self) -> Tensor:
        """float32 [1021, K], Gaussian with deviation SIGMA: the rows that all copies consist of; the same in every process."""
        return torch.randn(_SLAB_ROWS, self.k, generator=torch.Generator().manual_seed(0)) * SIGMA

    def codes(self, format: str) -> Codes:
        """Quantize the slab to a format of halfbyte; peers repack these codes and scales into their own order."""
        return ops.quantize(self.slab, format)

    def rows(self, copy: int) -> Tensor:
        """Return int64 [N]: for each row of a copy, the number of the slab's row that it equals."""
        return (torch.arange(self.n) + copy * _STRIDE) % _SLAB_ROWS

    def take(self, codes: Codes, copy: int) -> Codes:
        """Gather copy number `copy` of the weight, Codes of [N, K], from the slab's codes [1021, K]."""
        # A scale or zero of the whole tensor has no rows to gather.
        rows, one_scale = self.rows(copy), codes.format.block == "tensor"
        gathered: dict[str, Any] = {name: t if name != "data" and one_scale else t[rows] for name, t in codes.tensors().items()}
        return replace(codes, shape=(self.n, self.k), **gathered)

    def copies(self, copy_bytes: int) -> int:
        """Return how many copies a pass reads: ceil(ROTATION * cache_bytes / copy_bytes), within 2 … MAX_COPIES and `memory_bytes`.

        Where `memory_bytes` or MAX_COPIES is the limit, a pass may fit into the cache in part.

        Args:
            copy_bytes: Bytes of one copy as the contender stores it.

        Raises:
            UnsupportedError: Two copies exceed `memory_bytes`; with one, weights would be read from the cache.
        """
        if 2 * copy_bytes > self.memory_bytes:
            raise UnsupportedError(
                f"two copies of {copy_bytes / 2**20:.0f} MiB exceed the {self.memory_bytes / 2**20:.0f} MiB allowed: raise --memory"
            )
        wanted = -(-ROTATION * self.cache_bytes // max(copy_bytes, 1))
        return max(2, min(wanted, self.memory_bytes // max(copy_bytes, 1), MAX_COPIES))

    def activations(self, m: int) -> Tensor:
        """Return float32 [M, K], Gaussian, the same numbers for each library."""
        return torch.randn(m, self.k, generator=torch.Generator().manual_seed(m))


@dataclass(frozen=True)
class Built:
    """A contender whose weights are prepared: quantized and packed for all copies.

    Attributes:
        weight: float64 [1021, K]: the slab as the contender represents it, dequantized after its own rounding.
        copy_bytes: Bytes of one copy as the contender stores it: codes, scales, zeros.
        copies: Copies that a pass reads.
        bind: float32 x [M, K] -> a function without arguments. Each call is one pass: an iterator over x · copyᵀ [M, N] for copies 0, 1, …,
            computed one by one where the runtime allows it, so that `worker.py` can run a single product to wake the threads.
        dtype: What `bind` rounds x to before it multiplies; the reference rounds x to it, too.
        value: Converts an output [M, …] to float64, for contenders whose outputs are int8 codes or quantized tensors.
    """

    weight: Tensor
    copy_bytes: int
    copies: int
    bind: Callable[[Tensor], Callable[[], Iterator[Tensor]]]
    dtype: torch.dtype = torch.float32
    value: Callable[[Tensor], Tensor] = Tensor.double


def relative_error(work: Workload, built: Built, m: int) -> float:
    """Compute the largest ‖y - reference‖ / ‖reference‖ of all copies, by Frobenius norms in float64.

    The reference is x, rounded to the contender's dtype, times the contender's own dequantized weight: the error is that of activation
    quantization and of sums, not that of the weight's format.

    Args:
        work: The shape.
        built: The contender.
        m: Rows of x.

    Returns:
        The error over 256 evenly spaced outputs of each copy, or all where N is smaller; inf where an output is NaN.
    """
    x = work.activations(m)
    probes = torch.linspace(0, work.n - 1, min(work.n, 256)).long()
    reference = x.to(built.dtype).double() @ built.weight.T  # [M, 1021], from which each copy's outputs are gathered
    worst = 0.0
    for copy, y in enumerate(built.bind(x)()):
        expected = reference[:, work.rows(copy)[probes]]
        error = float((built.value(y[:, probes]) - expected).norm() / expected.norm())
        worst = max(worst, error if error == error else float("inf"))  # noqa: PLR0124 - max() would drop a NaN
    return worst

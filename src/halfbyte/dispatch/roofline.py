"""The least time that a product can take: what must be moved and what must be computed, over what the machine can do."""

from __future__ import annotations

from typing import NamedTuple


class Ceilings(NamedTuple):
    """bandwidth in bytes a second, operations a second of the units that a kernel uses."""

    bandwidth: float
    operations: float


class Roofline(NamedTuple):
    """Bytes and operations of a product, and the seconds that each takes at least."""

    nbytes: int
    operations: int
    memory_seconds: float
    compute_seconds: float

    @property
    def seconds(self) -> float:
        return max(self.memory_seconds, self.compute_seconds)

    @property
    def bound(self) -> str:
        return "memory" if self.memory_seconds >= self.compute_seconds else "arithmetic"


def linear_roofline(m: int, n: int, k: int, weight_bytes: int, element_bytes: int, ceilings: Ceilings) -> Roofline:
    """Of x [m, k] times a weight of `weight_bytes`: weights, activations and outputs move once, 2mnk operations are done."""
    nbytes = weight_bytes + element_bytes * m * (k + n)
    operations = 2 * m * n * k
    return Roofline(nbytes, operations, nbytes / ceilings.bandwidth, operations / ceilings.operations)

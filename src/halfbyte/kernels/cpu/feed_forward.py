"""The feed-forward half of a decoder layer: h [m, K] -> y [m, K], float32.

    g = norm(h) · Wgate_upᵀ                  silu(gate) * up where the gates were
    y = g · Wdownᵀ + bias + h
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from halfbyte.kernels.cpu.arguments import Buffer
from halfbyte.kernels.cpu.chain import Product
from halfbyte.kernels.cpu.halves import OUT, Laid, Norm, room, shared

_pack_two = struct.Struct("<2q").pack_into


@dataclass(frozen=True, eq=False)
class Dense:
    """The weights, by their addresses. `before`: the norm of h."""

    gate_up: Product
    down: Product
    before: Norm

    @property
    def k(self) -> int:
        return self.down.n

    @property
    def work(self) -> int:
        return self.gate_up.n * self.gate_up.k

    def plan(self, m: int, threads: int, hidden: int) -> DensePlan:
        return DensePlan(self, m, threads, hidden)


class DensePlan:
    def __init__(self, half: Dense, m: int, threads: int, hidden: int) -> None:
        products, self._hidden = (half.gate_up, half.down), hidden
        memory = shared("feed_forward", (*Laid.sizes(products, m, threads), room(m) * half.gate_up.n * 4))
        laid, gates = Laid.of(products, m, threads, memory.starts), memory.starts[2]
        first = laid.steps(half.gate_up, hidden, gates, norm=half.before, gated=True)
        last = laid.steps(half.down, gates, 0, stride=4 * half.gate_up.n)
        self._last, self._kept = last.linear, (memory, first, last)
        self.blocks: list[Buffer] = [*first.blocks, *last.blocks]

    def point(self, out: int) -> None:
        _pack_two(self._last, OUT, out, self._hidden - out)

"""The feed-forward half of a decoder layer: h [m, K] -> y [m, K], float32.

    g = norm(h) · Wgate_upᵀ                  f(gate) * up where the gates were; or f of all
    y = h + factor * norm(g · Wdownᵀ + bias)

Either norm may be missing. Of parallel layers it is norm(x), of what the attention half reads. Of some y is multiplied by one number.
"""

from __future__ import annotations

import struct
from dataclasses import dataclass

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.step_sequence import Product
from halfbyte.kernels.cpu.transformer.halves import Added, Laid, Norm, needs_sums, room, shared
from halfbyte.kernels.layer_kinds import GateFunction

_X = LINEAR.offset("x")
_pack_one = struct.Struct("<q").pack_into


@dataclass(frozen=True, eq=False)
class MLP:
    """The MLP half of a layer, as `ops.transformer.decoder.MLP` has it, by the addresses of its tensors, which the caller must keep alive.

    `layer_scale`: the address of a float by which y is multiplied, or 0; where there is a `post_norm` alone.
    """

    gate_up: Product
    down_proj: Product
    pre_norm: Norm | None
    post_norm: Norm | None
    residual_multiplier: float
    activation: GateFunction
    gated: bool
    parallel_residual: bool
    layer_scale: int = 0

    @property
    def k(self) -> int:
        return self.down_proj.n

    @property
    def work(self) -> int:
        return self.gate_up.n * self.gate_up.k

    def plan(self, m: int, threads: int, hidden: int) -> MLPPlan:
        return MLPPlan(self, m, threads, hidden)


class MLPPlan:
    def __init__(self, half: MLP, m: int, threads: int, hidden: int) -> None:
        products, self._hidden, self._parallel = (half.gate_up, half.down_proj), hidden, half.parallel_residual
        widths = half.gate_up.n, half.k if needs_sums(half.post_norm, half.residual_multiplier) else 0
        memory = shared("feed_forward", (*Laid.sizes(products, m, threads), *(room(m) * 4 * n for n in widths)))
        laid, (gates, sums) = Laid.of(products, m, threads, memory.starts), memory.starts[2:]
        first = laid.steps(half.gate_up, hidden, gates, norm=half.pre_norm, gates=half.activation, gated=half.gated)
        self._last = Added(
            laid, half.down_proj, gates, 4 * half.gate_up.n, sums, half.post_norm, half.residual_multiplier, half.layer_scale
        )
        self._kept, self._first = (memory, first), first.linear
        self.blocks: list[Buffer] = [*first.blocks, *self._last.blocks]

    def point(self, out: int, x: int) -> None:
        self._last.point(out, self._hidden)
        if self._parallel:
            _pack_one(self._first, _X, x)

"""What some decoder layers do with an input of their own, last (Gemma 4's per-layer embeddings): h [m, K], e [m, P] -> y [m, K], float32.

g = f(h · Wgateᵀ) * e
y = s * (h + norm(g · Wprojectionᵀ))     s: one number, or 1
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.cpu.codegen.arguments import Buffer
from halfbyte.kernels.cpu.step_sequence import PRODUCT, Product
from halfbyte.kernels.cpu.transformer.halves import Added, Laid, Norm, room, shared
from halfbyte.kernels.layer_kinds import GateFunction

_pack = PRODUCT.struct("up", "up_row").pack_into
_UP = PRODUCT.offset("up")


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """What a layer does with its per-layer input, as `ops.transformer.decoder.PerLayerInput` has it, by addresses; `layer_scale`: of a
    float, or 0."""

    gate: Product
    projection: Product
    post_norm: Norm
    activation: GateFunction
    layer_scale: int


class PerLayerInputPlan:
    def __init__(self, half: PerLayerInput, m: int, threads: int, hidden: int) -> None:
        """hidden: where h is."""
        products, self._hidden = (half.gate, half.projection), hidden
        widths = half.gate.n, half.projection.n
        memory = shared("per_layer", (*Laid.sizes(products, m, threads), *(room(m) * 4 * n for n in widths)))
        laid, (inner, sums) = Laid.of(products, m, threads, memory.starts), memory.starts[2:]
        first = laid.steps(half.gate, hidden, inner, gates=half.activation, gated=False, external_up=True)
        self._last = Added(laid, half.projection, inner, 4 * half.gate.n, sums, half.post_norm, 1.0, half.layer_scale)
        self._kept, self._product = (memory, first), first.blocks[-1]
        self.blocks: list[Buffer] = [*first.blocks, *self._last.blocks]

    def point(self, out: int, per_layer_input: tuple[int, int]) -> None:
        """Set the address of y, and the address and row stride in bytes of the per-layer input."""
        self._last.point(out, self._hidden)
        _pack(self._product, _UP, *per_layer_input)

"""The last sublayer of decoder layers with a per-layer input e (Gemma 4): h [m, K], e [m, P] -> y [m, K], float32.

    g = f(h · Wgateᵀ) * e                                        Wgate [P, K]
    y = layer_scale * (h + post_norm(g · Wprojectionᵀ))          Wprojection [K, P]

`decoder.py` plans it, behind attention and feed-forward.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.cpu.codegen.arguments import Buffer
from halfbyte.kernels.cpu.step_sequence import PRODUCT, Product
from halfbyte.kernels.cpu.transformer.sublayers import Norm, ResidualProduct, Workspace, memory_rows
from halfbyte.kernels.layer_kinds import GateFunction

_pack = PRODUCT.struct("up", "up_row").pack_into
_UP = PRODUCT.offset("up")


@dataclass(frozen=True, eq=False)
class PerLayerInput:
    """What a layer does with its per-layer input, as `ops.transformer.sublayers.PerLayerInput` has it, by the addresses of its tensors.

    Attributes:
        activation: f
        layer_scale: Address of a float32; 0: 1.
    """

    gate: Product
    projection: Product
    post_norm: Norm
    activation: GateFunction
    layer_scale: int


class PerLayerInputPlan:
    """The steps for m rows h, contiguous float32 at the address `hidden`."""

    def __init__(self, spec: PerLayerInput, m: int, threads: int, hidden: int) -> None:
        self._hidden = hidden
        buffers = (memory_rows(m) * 4 * n for n in (spec.gate.n, spec.projection.n))
        self._workspace = Workspace.of("per_layer", (spec.gate, spec.projection), m, threads, buffers)
        inner, sums = self._workspace.buffers
        self._gate = self._workspace.product(spec.gate, hidden, inner, gates=spec.activation, gated=False, external_up=True)
        stride = 4 * spec.gate.n
        self._projection = ResidualProduct(
            self._workspace, spec.projection, inner, stride, sums, spec.post_norm, 1.0, spec.layer_scale
        )  # fmt: skip
        self.blocks: list[Buffer] = [*self._gate.blocks, *self._projection.blocks]

    def set_addresses(self, out: int, per_layer_input: tuple[int, int]) -> None:
        """Set the address of y, and the address and row stride in bytes of the per-layer input."""
        self._projection.set_addresses(out, self._hidden)
        _pack(self._gate.blocks[-1], _UP, *per_layer_input)

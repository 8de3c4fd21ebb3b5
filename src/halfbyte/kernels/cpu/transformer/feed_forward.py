"""The feed-forward sublayer of a decoder layer: h [m, K] -> y [m, K], float32, with K the hidden size and I the width of the MLP.

    g = f(gate) * up,  gate, up = pre_norm(h) · Wgate_upᵀ [2 I, K];     not gated: g = f(pre_norm(h) · Wupᵀ),  Wup [I, K]
    y = layer_scale * (h + residual_multiplier * post_norm(g · Wdownᵀ + bias))

Either norm may be missing. In a layer with a parallel residual pre_norm reads x, the layer's input, in place of h. `decoder.py` plans it.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.step_sequence import Product
from halfbyte.kernels.cpu.transformer.sublayers import Norm, ResidualProduct, Workspace, memory_rows, needs_sums
from halfbyte.kernels.layer_kinds import GateFunction

_X = LINEAR.offset("x")


@dataclass(frozen=True, eq=False)
class MLP:
    """The MLP of a layer, as `ops.transformer.sublayers.MLP` has it, by the addresses of its tensors, which the caller must keep alive.

    Attributes:
        residual_multiplier: 1 where there is a `post_norm`.
        activation: f
        layer_scale: Address of a float32; 0: none. It requires a `post_norm`.
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
    """The steps of an MLP for m rows (`sublayers.FeedForwardPlan`)."""

    def __init__(self, mlp: MLP, m: int, threads: int, hidden: int) -> None:
        self._hidden, self._parallel_residual = hidden, mlp.parallel_residual
        widths = mlp.gate_up.n, mlp.k if needs_sums(mlp.post_norm, mlp.residual_multiplier) else 0
        buffers = (memory_rows(m) * 4 * n for n in widths)
        self._workspace = Workspace.of("feed_forward", (mlp.gate_up, mlp.down_proj), m, threads, buffers)
        gates, sums = self._workspace.buffers
        self._gate_up = self._workspace.product(mlp.gate_up, hidden, gates, norm=mlp.pre_norm, gates=mlp.activation, gated=mlp.gated)
        stride = 4 * mlp.gate_up.n
        self._down = ResidualProduct(
            self._workspace, mlp.down_proj, gates, stride, sums, mlp.post_norm, mlp.residual_multiplier, mlp.layer_scale
        )
        self.blocks: list[Buffer] = [*self._gate_up.blocks, *self._down.blocks]

    def set_addresses(self, out: int, x: int) -> None:
        self._down.set_addresses(out, self._hidden)
        if self._parallel_residual:
            pack_integer(self._gate_up.linear, _X, x)

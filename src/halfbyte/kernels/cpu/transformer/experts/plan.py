"""Plans of a mixture of experts on the CPU for few rows: scratch memory, arguments and order of the steps that `steps.py` generates.

A plan is made once for a number of rows m, and runs in one native call (`step_sequence.StepSequence`). With R = m * top_k routed rows, one
for each row and expert, its steps are:

    rows             x normed and laid out in the order in which the tiles of the up product read it        m > 1
    logits, choose   router logits [m, E], then ids and weights [m, top_k]                                  with a router
    sort             the routed rows by expert                                                              m > 1, without a router
    shared expert    its two products                                                                       with a shared expert
    up               activations [R, I] = act(x · Wgate_upᵀ + bias) of each routed row's expert
    rows             activations laid out for the down product                                              m > 1
    down             y [m, K] = weighted sum of the routed rows' (activations · Wdownᵀ + bias), + the shared expert's output, + h

With m = 1 each thread lays out the row for itself within "logits", "up" and "down", so that no barrier is needed. If a GPU stores the rows
(`kernels/crossing.py`), "sort" waits for them and comes before the first "rows".

`Experts` is the feed-forward sublayer of a decoder layer (`decoder.py`), with a router. `Mixture` computes stacks of experts for ids and
weights that the caller gives (`ops/transformer/experts.py`), without a router, norm and residual connection.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer, pack_integer
from halfbyte.kernels.cpu.codegen.elements import Kind
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear.linear import WORK_A_THREAD
from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.kernels.cpu.step_sequence import Product, Step, StepSequence, phase, shares
from halfbyte.kernels.cpu.transformer.experts.steps import EXPERTS, Clamped, ExpertsStep, build
from halfbyte.kernels.cpu.transformer.sublayers import Fields, Norm, Workspace, linear_arguments, shared_memory
from halfbyte.kernels.layer_kinds import RouterScores
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import PANEL

_MOST_POLLS = 1 << 30  # of a GPU's flag before the wait fails: 16 to 50 s on x86, whose `pause` takes 15 to 50 ns
_pack_two_ints = EXPERTS.struct("ids", "weights").pack_into


@dataclass(frozen=True, eq=False)
class Router:
    """The router, which chooses the top_k experts of a row of x = pre_norm(h), and their weights, from logits x · Wᵀ + bias.

    Attributes:
        pre_norm: Norm of h; the experts read its result, too.
        weight: Address of W [E, K], contiguous.
        kind: Element type of W, and of the shared expert's gate.
        bias: Address of float32 [E]; 0: no bias.
        norm_topk: Whether the weights of a row are normalized to a sum of 1, before they are multiplied by `scaling_factor`.
        scores: "sigmoid" or "softmax": experts are chosen by scores of the logits plus the correction bias; "": by the logits.
        correction_bias: Address of float32 [E], which `scores` require; otherwise 0.
        scaling_factor: Factor of all weights.
    """

    pre_norm: Norm
    weight: int
    kind: Kind
    bias: int
    norm_topk: bool
    scores: RouterScores = ""
    correction_bias: int = 0
    scaling_factor: float = 1.0


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """The expert that all rows use: sigmoid(x · gate) * down(silu(g) * u), where g, u are the halves of gate_up(x).

    Attributes:
        gate_up: The product [2 I, K].
        down: The product [K, I].
        gate: Address of [K] in the router's element type; 0: there is no gate, and no sigmoid.
    """

    gate_up: Product
    down: Product
    gate: int


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts by the addresses of its tensors, which the caller must keep alive.

    Attributes:
        gate_up: The product of the first expert, [2 I, K]; weights and biases of the other experts follow in memory.
        down: The product of the first expert, [K, I]; likewise.
        num_experts: E.
        top_k: Experts per row.
        router: None: the caller gives ids and weights, and there is neither a norm nor a residual connection.
        shared: The shared expert, which requires a router.
        clamped: Parameters of clamped gates; None: the activation is silu(gate) * up.
    """

    gate_up: Product
    down: Product
    num_experts: int
    top_k: int
    router: Router | None = None
    shared: SharedExpert | None = None
    clamped: Clamped | None = None

    def __post_init__(self) -> None:
        assert self.shared is None or self.router is not None, "the router's step computes the shared expert's gate"

    @property
    def k(self) -> int:
        """Elements K of a row of h and y."""
        return self.down.n

    @property
    def work(self) -> int:
        """Multiplications for a row, approximately."""
        shared = 0 if self.shared is None else self.shared.gate_up.n
        return (self.top_k * self.gate_up.n + shared) * self.k

    def plan(self, m: int, threads: int, hidden: int, flags: int = 0) -> ExpertsPlan:
        """Plan the steps; the arguments are those of `ExpertsPlan`."""
        return ExpertsPlan(self, m, threads, hidden, flags)


class _Buffers(NamedTuple):
    """Scratch memory for what one step stores and a later one reads: sizes in bytes, or addresses."""

    normed: int  # float32 [m, K]: norm(h); one for each thread if m = 1
    up_rows: int  # x in the order of the up product's tiles; one for each thread if m = 1
    down_rows: int  # activations in the order of the down product's tiles; one for each thread if m = 1
    gate_up: int  # float32 [R, 2 I]; the activations replace its first half, unless gates are clamped
    products: int  # float32 [R, K]: outputs of the down product
    activations: int  # float32 [R, I], if gates are clamped
    logits: int  # float32 [m, E + 1]; the last one is that of the shared expert's gate
    ids: int  # int64 [R]
    weights: int  # float32 [R]
    order: int  # int64 [R]: the routed rows sorted by expert
    counts: int  # int64 [E]: routed rows of each expert

    @classmethod
    def sizes(cls, experts: Experts, m: int, threads: int) -> _Buffers:
        """Return the sizes in bytes."""
        routed_rows, copies = m * experts.top_k, threads if m == 1 else 1
        return cls(
            normed=copies * 4 * m * experts.k,
            up_rows=copies * _laid_out_bytes(experts.gate_up, m),
            down_rows=copies * _laid_out_bytes(experts.down, routed_rows),
            gate_up=4 * routed_rows * experts.gate_up.n,
            products=4 * routed_rows * experts.k,
            activations=0 if experts.clamped is None else 4 * routed_rows * experts.down.k,
            logits=4 * m * (experts.num_experts + 1),
            ids=8 * routed_rows,
            weights=4 * routed_rows,
            order=8 * routed_rows,
            counts=8 * experts.num_experts,
        )


class ExpertsPlan:
    """The steps of a mixture for m rows. Before a run `set_addresses` is called, or `set_all_addresses` if there is no router.

    Attributes:
        blocks: The arguments of the steps, in order.
    """

    def __init__(self, experts: Experts, m: int, threads: int, hidden: int, flags: int) -> None:
        """Plan the steps.

        Args:
            experts: The weights.
            m: Number of rows.
            threads: Number of threads that run the steps.
            hidden: Address of h, float32 [m, K]; ignored without a router.
            flags: Address of the words of a crossing (`kernels/crossing.py`); 0: no GPU gives the rows.
        """
        self._experts, self._m, self._threads, self._hidden, self._flags = experts, m, threads, hidden, flags
        single_row, routed_rows = m == 1, m * experts.top_k
        memory = shared_memory("experts", _Buffers.sizes(experts, m, threads))
        self._alive: list[object] = [memory]  # owners of memory whose addresses are in the arguments
        buffers = self._buffers = _Buffers(*memory.starts)
        if experts.clamped is None:
            activations, self._activations_stride = buffers.gate_up, 4 * experts.gate_up.n
        else:
            activations, self._activations_stride = buffers.activations, 4 * experts.down.k
        up_rows = _Rows(m, hidden, 4 * experts.k, buffers.up_rows, buffers.gate_up)
        down_rows = _Rows(routed_rows, activations, self._activations_stride, buffers.down_rows, buffers.products)
        self._up_linear = _row_by_row(experts.gate_up, up_rows, threads)
        self._down_linear = _row_by_row(experts.down, down_rows, threads)

        shared_blocks, shared_out = self._shared_expert()
        down_fields = {**self._down_fields(), "shared": shared_out}
        down_step = ExpertsStep("down", single_row=single_row, prepares=single_row, crosses=flags != 0)
        self._down = _block(down_step, down_fields)
        up_fields = {**self._up_fields(), "down": ctypes.addressof(self._down)}
        self._up = self._up_step(up_fields)
        routing = self._routing(up_fields)
        lay_out_x = [] if single_row else [arguments(EXPERTS, phase(self._rows_step()), up_fields)]
        lay_out_activations = [] if single_row else [arguments(EXPERTS, phase(Step("rows")), down_fields)]
        # "sort" is the step that waits for a GPU's rows.
        first = [*routing, *lay_out_x] if flags else [*lay_out_x, *routing]
        self.blocks = [*first, *shared_blocks, self._up, *lay_out_activations, self._down]
        self._reads_ids = [*routing, self._up, self._down]

    def set_addresses(self, out: int, _x: int = 0) -> None:
        """Set the address of y, float32 [m, K], contiguous; `_x` (`FeedForwardPlan`): only parallel layers read it."""
        pack_integer(self._down, EXPERTS.offset("out"), out)

    def set_all_addresses(self, x: int, ids: int, weights: int, out: int) -> None:
        """Set the addresses of x, float32 [m, K], ids, int64 [m, top_k], weights, float32 [m, top_k], and y; only without a router."""
        assert self._experts.router is None, "with a router, ids and weights are in the plan's own memory"
        pack_integer(self._up_linear, LINEAR.offset("x"), x)
        for block in self._reads_ids:
            _pack_two_ints(block, EXPERTS.offset("ids"), ids, weights)
        self.set_addresses(out)

    def _routing(self, up_fields: Fields) -> list[Buffer]:
        """Return the steps that compute ids and weights, or sort ids that are given; "choose" sorts, too."""
        router, single_row, crosses = self._experts.router, self._m == 1, self._flags != 0
        if router is None:
            return [] if single_row else [_block(ExpertsStep("sort", crosses=crosses), up_fields)]
        norm = router.pre_norm
        logits = ExpertsStep(
            "logits",
            single_row=single_row,
            prepares=single_row,
            router=router.kind,
            layer_norm=norm.layer_norm,
            unit_offset=norm.unit_offset,
        )
        choose = ExpertsStep("choose", single_row=single_row, normalized=router.norm_topk, scores=router.scores)
        return [_block(logits, up_fields), _block(choose, up_fields)]

    def _rows_step(self) -> Step:
        """Return the step that lays out x for the up product, with the router's norm."""
        router = self._experts.router
        return Step("rows") if router is None else router.pre_norm.step("rows")

    def _up_step(self, up_fields: Fields) -> Buffer:
        """Return the step of the up product. For a single row without a router it is the first one: it lays out x, and waits for a GPU."""
        experts, single_row = self._experts, self._m == 1
        step = ExpertsStep(
            "up",
            single_row=single_row,
            prepares=single_row and experts.router is None,
            clamped=experts.clamped is not None,
            crosses=single_row and self._flags != 0,
        )
        return _block(step, up_fields)

    def _shared_expert(self) -> tuple[list[Buffer], int]:
        """Return the steps of the shared expert, and the address of its output, 0 if there is none."""
        router, shared = self._experts.router, self._experts.shared
        if router is None or shared is None:
            return [], 0
        sizes = 4 * self._m * shared.gate_up.n, 4 * self._m * shared.down.n
        workspace = Workspace.of("shared expert", (shared.gate_up, shared.down), self._m, self._threads, sizes)
        gate_up, out = workspace.buffers
        up = workspace.product(shared.gate_up, self._hidden, gate_up, norm=router.pre_norm, gates="silu")
        down = workspace.product(shared.down, gate_up, out, stride=4 * shared.gate_up.n)
        self._alive += [workspace, up, down]
        return [*up.blocks, *down.blocks], out

    def _common_fields(self, panels: int) -> Fields:
        """Return the arguments that both products have; `panels`: all that the threads draw, in groups."""
        groups, buffers = shares(panels, self._threads), self._buffers
        table = (ctypes.c_int64 * len(groups))(*groups)
        self._alive.append(table)
        return {
            "rows": self._m,
            "experts": self._experts.num_experts,
            "top_k": self._experts.top_k,
            "flags": self._flags,
            "polls": _MOST_POLLS,
            "logits": buffers.logits,
            "ids": buffers.ids,
            "weights": buffers.weights,
            "order": buffers.order,
            "counts": buffers.counts,
            "groups": len(groups) - 1,
            "shares": ctypes.addressof(table),
        }

    def _up_fields(self) -> Fields:
        """Return the arguments of the up product and of the steps of routing."""
        experts, router, panels = self._experts, self._experts.router, self._experts.gate_up.n // PANEL // 2
        fields: Fields = {
            **self._common_fields(self._m * experts.top_k * panels),
            "linear": ctypes.addressof(self._up_linear),
            "private": _laid_out_bytes(experts.gate_up, 1) if self._m == 1 else 0,
            "normed": self._buffers.normed,
            "normed_row": 4 * experts.k,
            "normed_thread": 4 * experts.k if self._m == 1 else 0,
            "gate": panels,
            "expert_bytes": experts.gate_up.kernel.nbytes,
            "expert_bias": 4 * experts.gate_up.n,
            "activations": self._buffers.activations,
            "activations_stride": self._activations_stride,
            "alpha_limit": experts.clamped or (0.0, 0.0),
        }
        if router is None:
            return fields
        return fields | {
            "norm": router.pre_norm.weight,
            "shift": router.pre_norm.bias,
            "eps": (router.pre_norm.eps, 0.0),
            "router": router.weight,
            "router_bias": router.bias,
            "correction": router.correction_bias,
            "factor": (router.scaling_factor, 0.0),
            "shared_gate": 0 if experts.shared is None else experts.shared.gate,
        }

    def _down_fields(self) -> Fields:
        """Return the arguments of the down product."""
        experts = self._experts
        return {
            **self._common_fields(-(-experts.k // PANEL)),
            "linear": ctypes.addressof(self._down_linear),
            "private": _laid_out_bytes(experts.down, experts.top_k) if self._m == 1 else 0,
            "hidden": self._hidden,
            "expert_bytes": experts.down.kernel.nbytes,
            "expert_bias": 4 * experts.k,
        }


class CrossingAddresses(NamedTuple):
    """Where a GPU and the CPU exchange rows (`kernels/crossing.py`): addresses of the words, and of `set_all_addresses`' tensors."""

    flags: int
    x: int
    ids: int
    weights: int
    out: int


class Mixture:
    """E experts without a router: y[r] = sum over t of weights[r, t] * expert_ids[r, t](x[r]). Arguments are as for `Experts`."""

    def __init__(self, gate_up: Product, down: Product, num_experts: int, clamped: Clamped | None = None) -> None:
        self._stacks, self._work, self._clamped = (gate_up, down, num_experts), gate_up.n * gate_up.k, clamped
        self._plans: PlanCache[tuple[ExpertsPlan, StepSequence]] = PlanCache()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute y, float32 [m, K].

        Args:
            x: float32 [m, K]. All arguments are contiguous and on the CPU.
            ids: int64 [m, top_k], each in 0 … E - 1. The caller must check them: others are read out of bounds.
            weights: float32 [m, top_k].
        """
        m, top_k = ids.shape
        threads = self._threads(m, top_k)
        plan, sequence = self._plans.get((m, top_k, threads), lambda: self._plan(m, top_k, threads))
        out = torch.empty_like(x)
        plan.set_all_addresses(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        sequence.run()
        return out

    def serve(self, m: int, top_k: int, addresses: CrossingAddresses) -> None:
        """Wait until a GPU has stored m rows, ids and weights; then compute y at `addresses.out`, and tell the GPU."""
        threads = self._threads(m, top_k)
        _, sequence = self._plans.get((m, top_k, threads, addresses), lambda: self._plan(m, top_k, threads, addresses))
        sequence.run()

    def _threads(self, m: int, top_k: int) -> int:
        return runtime.useful_threads(m * top_k * self._work, WORK_A_THREAD)

    def _plan(self, m: int, top_k: int, threads: int, addresses: CrossingAddresses | None = None) -> tuple[ExpertsPlan, StepSequence]:
        flags = 0 if addresses is None else addresses.flags
        plan = Experts(*self._stacks, top_k, clamped=self._clamped).plan(m, threads, hidden=0, flags=flags)
        if addresses is not None:
            plan.set_all_addresses(addresses.x, addresses.ids, addresses.weights, addresses.out)
        return plan, StepSequence(plan.blocks, threads)


class _Rows(NamedTuple):
    """The rows of a product: their number, the addresses of x, of x in the order of tiles and of outputs, and bytes between rows of x."""

    number: int
    x: int
    x_stride: int
    laid_out: int
    out: int


def _row_by_row(product: Product, rows: _Rows, threads: int) -> Buffer:
    """Return the LINEAR arguments of a product of the first expert with row tiles of one row, as each row may have another expert."""
    linear = linear_arguments(product, 1, threads, rows.x, rows.laid_out, rows.out, rows.x_stride)
    for field in ("m", "tiles"):
        pack_integer(linear, LINEAR.offset(field), rows.number)
    return linear


def _laid_out_bytes(product: Product, rows: int) -> int:
    """Return the bytes of rows in the order in which tiles of one row read them, rounded up to cache lines."""
    return round_up(rows * product.kernel.scratch_bytes(1), 64)


def _block(step: ExpertsStep, fields: Fields) -> Buffer:
    return arguments(EXPERTS, compiled(build, step, current()), fields)

"""Plans of a mixture of experts for few rows: memory, arguments and order of the steps that `experts.py` defines and generates code for.

The order of steps, where those in brackets depend on the call (m rows, top_k experts of each):

    1. [rows]        m > 1: normed x is laid out for the up product
    2. [logits, choose] with a router;  [sort] if ids and weights are given and m > 1
    3. [shared expert's products]
    4. up            gate_up product and activation of the m * top_k routed rows
    5. [rows]        m > 1: activations are laid out for the down product
    6. down          down product, weighted sum, residual

With m = 1 each thread lays out rows for itself within the steps, without a barrier. Where a GPU gives the rows (`kernels/crossing.py`), 2
comes before 1, as it waits for them.

`Experts` is the sublayer of a decoder layer (`decoder.py`), which has a router; `Mixture` is a stack of experts that is given ids and
weights, for `ops/transformer/experts.py`.
"""

from __future__ import annotations

import ctypes
import struct
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.codegen.elements import Kind
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.linear.linear import CALL, WORK_A_THREAD, pack_call
from halfbyte.kernels.cpu.plan_cache import PlanCache
from halfbyte.kernels.cpu.step_sequence import Product, Step, StepSequence, phase, shares
from halfbyte.kernels.cpu.transformer.experts import EXPERTS, Clamped, ExpertsStep, build
from halfbyte.kernels.cpu.transformer.sublayers import Fields, Norm, Workspace, shared_memory
from halfbyte.kernels.layer_kinds import RouterScores
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import PANEL

_INFINITE = float("inf")
_POLLS = 1 << 30  # 16 to 50 s on x86, whose `pause` takes 15 to 50 ns
_pack_one, _pack_two = struct.Struct("<q").pack_into, struct.Struct("<2q").pack_into


@dataclass(frozen=True, eq=False)
class Router:
    """How the experts of a row and their weights follow from h, by the addresses of tensors.

    Attributes:
        pre_norm: Norm of h, whose result the experts read, too.
        weight: Address of [E, K].
        kind: Element type of `weight`, and of the shared expert's gate.
        bias: Address of float32 [E]; 0: none.
        norm_topk: Whether the weights of a row sum to 1, before `scaling_factor`.
        scores: As in ExpertsStep.
        correction_bias: Address of float32 [E], if there are scores.
        scaling_factor: Of the weights.
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
    """The expert that all rows use: sigmoid(x · gate) * down(silu(g) * u); `gate`: address of [K] of the router's kind, or 0."""

    gate_up: Product
    down: Product
    gate: int


@dataclass(frozen=True, eq=False)
class Experts:
    """A mixture of experts by the addresses of its tensors, which the caller must keep alive.

    Attributes:
        gate_up: Of the first expert, [2 I, K]; weights and biases of the others follow it in memory.
        down: The same, [K, I].
        num_experts: E
        top_k: Experts of a row.
        router: None: ids and weights are given, and there is neither norm nor residual connection.
        shared: The shared expert; only with a router.
        clamped: The activation, if it is not silu(gate) * up.
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
        return self.down.n

    @property
    def work(self) -> int:
        shared = 0 if self.shared is None else self.shared.gate_up.n
        return (self.top_k * self.gate_up.n + shared) * self.k

    def plan(self, m: int, threads: int, hidden: int, flags: int = 0) -> ExpertsPlan:
        return ExpertsPlan(self, m, threads, hidden, flags)


class _Buffers(NamedTuple):
    """What lies between the steps: sizes in bytes, or addresses. R = m * top_k is the number of routed rows."""

    normed: int  # float32 [m, K], for each thread if m = 1
    up_rows: int  # x as tiles of the up product read it, for each thread if m = 1
    down_rows: int  # activations as tiles of the down product read them, for each thread if m = 1
    gate_up: int  # float32 [R, 2 I]; the activation takes the place of the gates, unless it is clamped
    products: int  # float32 [R, K]
    activations: int  # float32 [R, I], of clamped gates alone
    logits: int  # float32 [m, E + 1]
    ids: int  # int64 [R]
    weights: int  # float32 [R]
    order: int  # int64 [R], routed rows by expert
    counts: int  # int64 [E]


class ExpertsPlan:
    """The steps of a mixture for m rows; all arguments are filled in but those that `point` sets, or `point_all` without a router.

    Attributes:
        blocks: The arguments of the steps, in order.
    """

    def __init__(self, experts: Experts, m: int, threads: int, hidden: int, flags: int) -> None:
        """Plan the steps.

        Args:
            experts: The weights.
            m: Rows.
            threads: That compute them.
            hidden: Address of h, float32 [m, K]; not read without a router.
            flags: Address of a crossing's words; 0: there is none.
        """
        self._experts, self._m, self._threads, self._hidden, self._flags = experts, m, threads, hidden, flags
        single_row, routed_rows, copies = m == 1, m * experts.top_k, threads if m == 1 else 1
        up_bytes = round_up(m * experts.gate_up.kernel.scratch_bytes(1), 64)
        down_bytes = round_up(routed_rows * experts.down.kernel.scratch_bytes(1), 64)
        sizes = _Buffers(
            normed=copies * 4 * m * experts.k,
            up_rows=copies * up_bytes,
            down_rows=copies * down_bytes,
            gate_up=4 * routed_rows * experts.gate_up.n,
            products=4 * routed_rows * experts.k,
            activations=0 if experts.clamped is None else 4 * routed_rows * experts.down.k,
            logits=4 * m * (experts.num_experts + 1),
            ids=8 * routed_rows,
            weights=4 * routed_rows,
            order=8 * routed_rows,
            counts=8 * experts.num_experts,
        )
        memory = shared_memory("experts", sizes)
        at = self._at = _Buffers(*memory.starts)
        inner, stride = (at.gate_up, 4 * experts.gate_up.n) if experts.clamped is None else (at.activations, 4 * experts.down.k)
        self._up_linear = _rows_of_one(experts.gate_up, m, threads, (hidden, 4 * experts.k, at.up_rows, at.gate_up))
        self._down_linear = _rows_of_one(experts.down, routed_rows, threads, (inner, stride, at.down_rows, at.products))
        self._alive: list[object] = [memory]  # what the addresses in arguments belong to
        shared_blocks, shared_out = self._shared_expert()
        down_fields = {**self._down_fields(down_bytes if single_row else 0), "shared": shared_out}
        self._down = _block(ExpertsStep("down", single_row, single_row, crosses=flags != 0), down_fields)
        up_fields = {**self._up_fields(up_bytes if single_row else 0, stride), "down": ctypes.addressof(self._down)}
        self._up = self._up_step(up_fields)
        routing = self._routing(up_fields)
        rows_up = [] if single_row else [arguments(EXPERTS, phase(self._rows_step()), up_fields)]
        rows_down = [] if single_row else [arguments(EXPERTS, phase(Step("rows")), down_fields)]
        first = [*routing, *rows_up] if flags else [*rows_up, *routing]
        self.blocks = [*first, *shared_blocks, self._up, *rows_down, self._down]
        self._given = [*routing, self._up, self._down] if experts.router is None else []

    def point(self, out: int, _x: int = 0) -> None:
        """Set the address of y, contiguous float32; `_x` is for parallel layers, which have no experts."""
        _pack_one(self._down, EXPERTS.offset("out"), out)

    def point_all(self, x: int, ids: int, weights: int, out: int) -> None:
        """Set the addresses of x, float32 [m, K], ids, int64 [m, top_k], weights, float32 [m, top_k], and y, where there is no router."""
        _pack_one(self._up_linear, LINEAR.offset("x"), x)
        for block in self._given:
            _pack_two(block, EXPERTS.offset("ids"), ids, weights)
        self.point(out)

    def _routing(self, up_fields: Fields) -> list[Buffer]:
        """Return the steps after which ids, weights and, for several rows, the order of experts are known."""
        router, single_row, crosses = self._experts.router, self._m == 1, self._flags != 0
        if router is None:
            return [] if single_row else [_block(ExpertsStep("sort", crosses=crosses), up_fields)]
        norm = router.pre_norm
        logits = ExpertsStep(
            "logits", single_row, single_row, router.kind, layer_norm=norm.layer_norm, unit_offset=norm.unit_offset
        )  # fmt: skip
        choose = ExpertsStep("choose", single_row, normalized=router.norm_topk, scores=router.scores)
        return [_block(logits, up_fields), _block(choose, up_fields)]

    def _rows_step(self) -> Step:
        """Return the step that lays out the rows of the up product."""
        router = self._experts.router
        return Step("rows") if router is None else router.pre_norm.step("rows")

    def _up_step(self, up_fields: Fields) -> Buffer:
        """Return the step of the up product; without a router it is the first one, which prepares a single row and waits for a GPU."""
        experts, single_row = self._experts, self._m == 1
        prepares, crosses = single_row and experts.router is None, single_row and self._flags != 0
        return _block(ExpertsStep("up", single_row, prepares, clamped=experts.clamped is not None, crosses=crosses), up_fields)

    def _shared_expert(self) -> tuple[list[Buffer], int]:
        """Return the steps of the shared expert, and the address of its output, 0 if there is none."""
        router, shared = self._experts.router, self._experts.shared
        if router is None or shared is None:
            return [], 0
        sizes = 4 * self._m * shared.gate_up.n, 4 * self._m * shared.down.n
        workspace = Workspace.of("shared expert", (shared.gate_up, shared.down), self._m, self._threads, sizes)
        gates, out = workspace.buffers
        first = workspace.product(shared.gate_up, self._hidden, gates, norm=router.pre_norm, gates="silu")
        last = workspace.product(shared.down, gates, out, stride=4 * shared.gate_up.n)
        self._alive += [workspace, first, last]
        return [*first.blocks, *last.blocks], out

    def _common_fields(self, panels: int) -> Fields:
        """Return the arguments that both products have, whose threads draw groups of so many panels."""
        groups = shares(panels, self._threads)
        table = (ctypes.c_int64 * len(groups))(*groups)
        self._alive.append(table)
        return {
            "rows": self._m,
            "experts": self._experts.num_experts,
            "top_k": self._experts.top_k,
            "flags": self._flags,
            "polls": _POLLS,
            "logits": self._at.logits,
            "ids": self._at.ids,
            "weights": self._at.weights,
            "order": self._at.order,
            "counts": self._at.counts,
            "groups": len(groups) - 1,
            "shares": ctypes.addressof(table),
        }

    def _up_fields(self, private: int, activations_stride: int) -> Fields:
        """Return the arguments of the up product, which are those of routing, too; `private`: bytes of a thread's copy of rows, or 0."""
        experts, router, panels = self._experts, self._experts.router, self._experts.gate_up.n // PANEL // 2
        fields: Fields = {
            **self._common_fields(self._m * experts.top_k * panels),
            "linear": ctypes.addressof(self._up_linear),
            "private": private,
            "normed": self._at.normed,
            "normed_row": 4 * experts.k,
            "normed_thread": 4 * experts.k if self._m == 1 else 0,
            "gate": panels,
            "expert_bytes": experts.gate_up.kernel.nbytes,
            "expert_bias": 4 * experts.gate_up.n,
            "gated": self._at.activations,
            "gated_stride": activations_stride,
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

    def _down_fields(self, private: int) -> Fields:
        """Return the arguments of the down product."""
        experts = self._experts
        return {
            **self._common_fields(-(-experts.k // PANEL)),
            "linear": ctypes.addressof(self._down_linear),
            "private": private,
            "hidden": self._hidden,
            "expert_bytes": experts.down.kernel.nbytes,
            "expert_bias": 4 * experts.k,
        }


class Crossed(NamedTuple):
    """The addresses of a crossing: its flags, x, ids, weights and y, as `ExpertsPlan.point_all` takes them."""

    flags: int
    x: int
    ids: int
    weights: int
    out: int


class Mixture:
    """E experts whose ids and weights are given: y [m, K] is the weighted sum of theirs. Arguments are as for `Experts`."""

    def __init__(self, gate_up: Product, down: Product, num_experts: int, clamped: Clamped | None = None) -> None:
        self._stacks, self._work, self._clamped = (gate_up, down, num_experts), gate_up.n * gate_up.k, clamped
        self._plans: PlanCache[tuple[ExpertsPlan, StepSequence]] = PlanCache()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """Compute y, float32 [m, K].

        Args:
            x: float32 [m, K], as all arguments contiguous on the CPU.
            ids: int64 [m, top_k], each in 0 … E - 1: the caller checks it, since others are addresses out of bounds.
            weights: float32 [m, top_k]
        """
        m, top_k = ids.shape
        threads = self._threads(m, top_k)
        plan, sequence = self._plans.get((m, top_k, threads), lambda: self._plan(m, top_k, threads))
        out = torch.empty_like(x)
        plan.point_all(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        sequence.run()
        return out

    def serve(self, m: int, top_k: int, rows: Crossed) -> None:
        """Wait for m rows and their experts that a GPU stores, and store y."""
        threads = self._threads(m, top_k)
        _, sequence = self._plans.get((m, top_k, threads, rows), lambda: self._plan(m, top_k, threads, rows))
        sequence.run()

    def _threads(self, m: int, top_k: int) -> int:
        return max(1, min(runtime.threads(), m * top_k * self._work // WORK_A_THREAD))

    def _plan(self, m: int, top_k: int, threads: int, rows: Crossed | None = None) -> tuple[ExpertsPlan, StepSequence]:
        plan = Experts(*self._stacks, top_k, clamped=self._clamped).plan(m, threads, 0, 0 if rows is None else rows.flags)
        if rows is not None:
            plan.point_all(*rows[1:])
        return plan, StepSequence(plan.blocks, threads)


def _rows_of_one(product: Product, rows: int, threads: int, places: tuple[int, int, int, int]) -> Buffer:
    """Return the arguments of a product whose rows are tiles of one row each, as each may have another expert.

    Args:
        product: Of the first expert.
        rows: How many.
        threads: That compute them.
        places: Address of x, bytes between its rows, addresses of the rows as tiles read them, and of outputs.
    """
    linear, _ = product.kernel.arguments(1, threads)
    x, stride, laid_out, out = places
    pack_call(linear, CALL, 0, x, stride, laid_out, product.weight, product.bias, out, 0, -_INFINITE, _INFINITE)
    for field in ("m", "tiles"):
        _pack_one(linear, LINEAR.offset(field), rows)
    return linear


def _block(step: ExpertsStep, fields: Fields) -> Buffer:
    return arguments(EXPERTS, compiled(build, step, current()), fields)

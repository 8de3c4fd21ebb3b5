"""Plans of a mixture of experts for few rows: the arguments of the steps of `experts.py`, and the memory between them."""

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
from halfbyte.kernels.cpu.transformer.halves import Fields, Laid, Norm, shared
from halfbyte.kernels.layer_kinds import RouterScores
from halfbyte.layouts.cpu_tiles import PANEL

_INFINITE = float("inf")
_POLLS = 1 << 30  # 16 to 50 s on x86, whose `pause` takes 15 to 50 ns
_pack_one, _pack_two = struct.Struct("<q").pack_into, struct.Struct("<2q").pack_into


@dataclass(frozen=True, eq=False)
class Router:
    """before      the norm of h
    weight      the address of [E, K], of `kind`
    bias        that of float32 [E], or 0
    normalized  weights of a row add up to 1, before their factor
    scores      as in ExpertsStep
    correction  the address of float32 [E], where there are scores
    factor      of weights
    """

    before: Norm
    weight: int
    kind: Kind
    bias: int
    normalized: bool
    scores: RouterScores = ""
    correction: int = 0
    factor: float = 1.0


@dataclass(frozen=True, eq=False)
class SharedExpert:
    """gate: the address of a weight [K] of the router's kind, or 0."""

    gate_up: Product
    down: Product
    gate: int


@dataclass(frozen=True, eq=False)
class Experts:
    """E experts, of which a row has T, by addresses: products are those of the first one, the others' weights and biases follow. Without a
    router ids and weights are given. clamped: what gates are, where they are not silu(gate) * up."""

    gate_up: Product
    down: Product
    experts: int
    chosen: int
    router: Router | None = None
    shared: SharedExpert | None = None
    clamped: Clamped | None = None

    @property
    def k(self) -> int:
        return self.down.n

    @property
    def work(self) -> int:
        common = 0 if self.shared is None else self.shared.gate_up.n
        return (self.chosen * self.gate_up.n + common) * self.k

    def plan(self, m: int, threads: int, hidden: int, flags: int = 0) -> ExpertsPlan:
        return ExpertsPlan(self, m, threads, hidden, flags)


class ExpertsPlan:
    """Steps for m rows, with all arguments but where y goes, or those that `point_all` takes. flags: address of a crossing's, or 0."""

    def __init__(self, half: Experts, m: int, threads: int, hidden: int, flags: int) -> None:
        alone, routed_rows, router, panels = m == 1, m * half.chosen, half.router, half.gate_up.n // PANEL // 2
        copies, normed = threads if alone else 1, 4 * m * half.k
        (up, up_row), (down, down_row) = (product.kernel.arguments(1, threads) for product in (half.gate_up, half.down))
        up_all, down_all = (rows * row + 63 & ~63 for rows, row in ((m, up_row), (routed_rows, down_row)))
        sizes = copies * normed, copies * up_all, copies * down_all, 4 * routed_rows * half.gate_up.n, 4 * routed_rows * half.k
        of_clamped = 0 if half.clamped is None else 4 * routed_rows * half.down.k
        memory = shared(
            "experts", (*sizes, of_clamped, 4 * m * (half.experts + 1), 8 * routed_rows, 4 * routed_rows, 8 * routed_rows, 8 * half.experts)
        )
        normed_at, up_at, down_at, gates, products, gated, logits, ids, weights, order, counts = memory.starts
        inner, stride = (gates, 4 * half.gate_up.n) if half.clamped is None else (gated, 4 * half.down.k)
        _fill(up, half.gate_up, m, (hidden, 4 * half.k, up_at, gates))
        _fill(down, half.down, routed_rows, (inner, stride, down_at, products))
        cuts = shares(routed_rows * panels, threads), shares(-(-half.k // PANEL), threads)
        tables = [(ctypes.c_int64 * len(cut))(*cut) for cut in cuts]
        common, crosses = {"rows": m, "experts": half.experts, "chosen": half.chosen, "flags": flags, "polls": _POLLS}, flags != 0
        common |= {"logits": logits, "ids": ids, "weights": weights, "order": order, "counts": counts}
        of_up: Fields = {
            **common,
            "linear": ctypes.addressof(up),
            "private": up_all if alone else 0,
            "normed": normed_at,
            "normed_row": 4 * half.k,
            "normed_thread": normed if alone else 0,
            "gate": panels,
            "groups": len(cuts[0]) - 1,
            "shares": ctypes.addressof(tables[0]),
            "expert_bytes": half.gate_up.kernel.nbytes,
            "expert_bias": 4 * half.gate_up.n,
            "gated": gated,
            "gated_stride": stride,
            "alpha_limit": half.clamped or (0.0, 0.0),
        }
        of_down: Fields = {
            **common,
            "linear": ctypes.addressof(down),
            "private": down_all if alone else 0,
            "hidden": hidden,
            "groups": len(cuts[1]) - 1,
            "shares": ctypes.addressof(tables[1]),
            "expert_bytes": half.down.kernel.nbytes,
            "expert_bias": 4 * half.k,
        }
        self._up, self._kept, of_all = up, [memory, tables, up, down], list[Buffer]()
        if router is not None:
            of_up |= {"norm": router.before.weight, "eps": (router.before.eps, 0.0), "router": router.weight, "router_bias": router.bias}
            of_up |= {"correction": router.correction, "factor": (router.factor, 0.0)}
        if router is not None and half.shared is not None:
            of_all, of_down["shared"] = self._of_all(half.shared, router, m, threads, hidden)
            of_up["shared_gate"] = half.shared.gate
        self._down = _block(ExpertsStep("down", alone, alone, crosses=crosses), of_down)
        of_up["down"] = ctypes.addressof(self._down)
        first = ExpertsStep("up", alone, alone and router is None, clamped=half.clamped is not None, crosses=alone and crosses)
        self._ups = [_block(first, of_up)]
        choosing = [_block(ExpertsStep("sort", crosses=crosses), of_up)] * (not alone)
        if router is not None:
            choosing = [_block(ExpertsStep("logits", alone, alone, router.kind), of_up)]
            choosing += [_block(ExpertsStep("choose", alone, normalized=router.normalized, scores=router.scores), of_up)]
        rows_up, rows_down = ([] if alone else [arguments(EXPERTS, phase(Step("rows")), of)] for of in (of_up, of_down))
        before = [*choosing, *rows_up] if crosses else [*rows_up, *choosing]  # rows are there when a thread has waited for them
        self.blocks = [*before, *of_all, *self._ups, *rows_down, self._down]
        self._given = [*choosing, *self._ups, self._down] if router is None else []

    def _of_all(self, half: SharedExpert, router: Router, m: int, threads: int, hidden: int) -> tuple[list[Buffer], int]:
        """The steps of the shared expert, and where its rows are."""
        products = half.gate_up, half.down
        memory = shared("shared expert", (*Laid.sizes(products, m, threads), 4 * m * half.gate_up.n, 4 * m * half.down.n))
        laid, (gates, out) = Laid.of(products, m, threads, memory.starts), memory.starts[2:]
        first = laid.steps(half.gate_up, hidden, gates, norm=router.before, gates="silu")
        last = laid.steps(half.down, gates, out, stride=4 * half.gate_up.n)
        self._kept += [memory, first, last]
        return [*first.blocks, *last.blocks], out

    def point(self, out: int, _x: int = 0) -> None:
        """From now on y, contiguous float32, goes to that address."""
        _pack_one(self._down, EXPERTS.offset("out"), out)

    def point_all(self, x: int, ids: int, weights: int, out: int) -> None:
        """What is given where there is no router: the addresses of x, float32 [m, K], ids, int64 [m, T], weights, float32 [m, T], and y."""
        _pack_one(self._up, LINEAR.offset("x"), x)
        for block in self._given:
            _pack_two(block, EXPERTS.offset("ids"), ids, weights)
        self.point(out)


class Crossed(NamedTuple):
    """The addresses of a crossing: its flags, x, ids, weights and y, as `ExpertsPlan.point_all` takes them."""

    flags: int
    x: int
    ids: int
    weights: int
    out: int


class Mixture:
    """E experts whose ids and weights are given: y [m, K] is the weighted sum of theirs."""

    def __init__(self, gate_up: Product, down: Product, experts: int, clamped: Clamped | None = None) -> None:
        self._stacks, self._work, self._clamped = (gate_up, down, experts), gate_up.n * gate_up.k, clamped
        self._plans: PlanCache[tuple[ExpertsPlan, StepSequence]] = PlanCache()

    def __call__(self, x: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """x [m, K], ids [m, T] in 0 … E - 1, int64, weights [m, T], the others float32, all contiguous -> y, float32."""
        m, chosen = ids.shape
        threads = self._threads(m, chosen)
        plan, sequence = self._plans.get((m, chosen, threads), lambda: self._plan(m, chosen, threads))
        out = torch.empty_like(x)
        plan.point_all(x.data_ptr(), ids.data_ptr(), weights.data_ptr(), out.data_ptr())
        sequence.run()
        return out

    def serve(self, m: int, chosen: int, rows: Crossed) -> None:
        """Wait for m rows and their experts that a GPU stores, and store y."""
        threads = self._threads(m, chosen)
        _, sequence = self._plans.get((m, chosen, threads, rows), lambda: self._plan(m, chosen, threads, rows))
        sequence.run()

    def _threads(self, m: int, chosen: int) -> int:
        return max(1, min(runtime.threads(), m * chosen * self._work // WORK_A_THREAD))

    def _plan(self, m: int, chosen: int, threads: int, rows: Crossed | None = None) -> tuple[ExpertsPlan, StepSequence]:
        plan = Experts(*self._stacks, chosen, clamped=self._clamped).plan(m, threads, 0, 0 if rows is None else rows.flags)
        if rows is not None:
            plan.point_all(*rows[1:])
        return plan, StepSequence(plan.blocks, threads)


def _fill(linear: Buffer, product: Product, rows: int, places: tuple[int, int, int, int]) -> None:
    """The arguments of a product of so many rows, each a tile; places: of rows, bytes between them, where they are laid out, of outputs."""
    x, stride, laid_out, out = places
    pack_call(linear, CALL, 0, x, stride, laid_out, product.weight, product.bias, out, 0, -_INFINITE, _INFINITE)
    for field in ("m", "tiles"):
        _pack_one(linear, LINEAR.offset(field), rows)


def _block(step: ExpertsStep, fields: Fields) -> Buffer:
    return arguments(EXPERTS, compiled(build, step, current()), fields)

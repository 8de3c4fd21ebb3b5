"""The kernels of a mixture of experts for few rows, as the feed-forward sublayer of a decoder layer: h [m, K] -> y [m, K], float32.

    x      = norm(h)
    l      = x · Wrouterᵀ + bias                         a logit for each of E experts; step "logits"
    id, w  = top_k of a row: the T largest logits, of equal ones the first, and their softmax, or their share of the softmax of all.
             With `scores`, s = sigmoid(l) or softmax(l): the T largest of s + correction, and s of them, or their share of these;
             step "choose"
    g[t]   = x · Wgate_up[id[t]]ᵀ + bias[id[t]]          silu(gate) * up of its halves, or `Clamped` gates; step "up"
    y      = h + factor * sum over t of w[t] * (g[t] · Wdown[id[t]]ᵀ + bias[id[t]])              step "down"
               + sigmoid(x · wgate) * shared(x)          where there is a shared expert, which may have no gate

`plan.py` plans the steps. Which experts a row takes is known within the native call alone, so that steps find their weights by the
ids that an earlier step has written. Where ids and weights are given, there are no norm, router and h: y is the sum. A GPU may give them
(`kernels/crossing.py`): threads wait for its flag before they read them, and the last thread that has stored its part of y sets the flag
that the GPU waits for.

Each row times an expert is a product of one row, with the tiles of `linear.py`. Panels are cut into groups over all experts of a row, or of
several rows, in the order of experts: rows that share an expert find its weights in the caches. All else is float32; sums over t are in the
order of ids, those over K of the router lane by lane, by fused multiply-adds.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal, NamedTuple

from halfbyte.errors import KernelError, unreachable
from halfbyte.kernels import crossing
from halfbyte.kernels.cpu.codegen.arguments import LINEAR
from halfbyte.kernels.cpu.codegen.elementary import exp
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter
from halfbyte.kernels.cpu.codegen.kernel import phase as emitted
from halfbyte.kernels.cpu.linear import driver
from halfbyte.kernels.cpu.step_sequence import PRODUCT, drawn_shares, prepare, through_gates
from halfbyte.kernels.layer_kinds import RouterScores
from halfbyte.layouts.cpu_tiles import PANEL

_INFINITE = float("inf")
_AT_BARRIER = 32 << 10  # bytes of weights that a thread prefetches before a barrier: some 3 µs of a core's share of the memory
_LEAST_SUM = 1e-20  # added to a sum of scores, which may be 0, as in transformers' routers
EXPERTS = PRODUCT.extended(
    *("rows", "experts", "top_k"),  # m, E, T
    # the router's weights [E, K] and biases float32 [E] or 0; weights [K] of the shared expert's gate, or 0; logits [m, E + 1], of
    # which the last one is that gate's; the correction of scores, float32 [E]
    *("router", "router_bias", "shared_gate", "logits", "correction"),
    # ids, int64, and weights, float32, of row r in places r * T … r * T + T - 1; places in the order of experts; memory of E int64
    *("ids", "weights", "order", "counts"),
    *("expert_bytes", "expert_bias"),  # bytes of an expert's weights, and of its biases
    *("activations", "activations_stride"),  # address of the rows of activations if gates are clamped, and bytes between them
    *("hidden", "shared", "out"),  # float32 [m, K]; 0 for no h, or no shared expert
    "down",  # in the block of step "up", the address of that of step "down"
    *("flags", "polls"),  # of a crossing, and how often a thread reads them until it gives up
    *("alpha_limit", "factor"),  # floats of clamped gates; the factor of weights and an unused float
    floats=["alpha_limit", "factor"],
)


class Clamped(NamedTuple):
    """Gates of gpt-oss: (u + 1) * g * sigmoid(alpha * g), g = min(gate, limit), u = up clamped to -limit … limit.

    A gate and its up are adjacent outputs, not in two halves.
    """

    alpha: float
    limit: float


@dataclass(frozen=True, slots=True)
class ExpertsStep:
    """What the code of a step is generated for.

    Attributes:
        kind: "logits", "choose" (top-k), "sort" (rows by expert), "up" or "down".
        single_row: There is one row, which each thread prepares for itself.
        prepares: It lays out rows before it multiplies, by the router or by the experts.
        router: Element type of the router's weights.
        normalized: Weights of a row sum to 1, before their factor.
        scores: "sigmoid" or "softmax" of logits, where experts are chosen by these and a correction.
        clamped: Gates are `Clamped`.
        crosses: A GPU gives ids and weights, and waits for y.
        layer_norm, unit_offset: Of the norm, as in `step_sequence.Step`, where the step prepares normed rows.
    """

    kind: Literal["logits", "choose", "sort", "up", "down"]
    single_row: bool = False
    prepares: bool = False
    router: Kind | Literal[""] = ""
    normalized: bool = False
    scores: RouterScores = ""
    clamped: bool = False
    crosses: bool = False
    layer_norm: bool = False
    unit_offset: bool = False


@emitted
def build(step: ExpertsStep, isa: ISA, f: Function) -> None:
    """Emit a step; its arguments are an EXPERTS block, its thread and the number of threads."""
    getattr(_Experts(step, isa, f), step.kind)()


class _Experts(Emitter):
    """Emits the steps, each by the method of its name.

    A `place` numbers a row's t-th expert, r * T + t; a `pair` numbers them in the order in which they are computed.
    """

    block = EXPERTS
    spec: ExpertsStep

    def __init__(self, spec: ExpertsStep, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, self.threads = f.parameters
        self.rows, self.experts, self.top_k = (self.get(name) for name in ("rows", "experts", "top_k"))

    @property
    def _router(self) -> Kind:
        assert self.spec.router, f"step {self.spec.kind} reads the router, whose element type is missing"
        return self.spec.router

    def _prepare(self) -> Value:
        """Emit norms and layout of all rows, by each thread for itself, if the step does that; return the product's arguments."""
        linear = self.pointer("linear")
        if self.spec.prepares:
            rows = self.f.value("i64", 0), LINEAR.load(linear, "m")
            prepare(self.f, self.isa, linear, rows, layer_norm=self.spec.layer_norm, unit_offset=self.spec.unit_offset)
        return linear

    def logits(self) -> None:
        """Emit the logits; threads share the experts evenly."""
        f, linear = self.f, self._prepare()
        k, router, element = LINEAR.load(linear, "k"), self.pointer("router"), element_of(self._router).size
        normed = self.pointer("normed") + self.thread * self.get("normed_thread")
        bias, gate = self.pointer("router_bias"), self.pointer("shared_gate")
        count = self.experts + gate.is_null().select(f.value("i64", 0), f.value("i64", 1))
        for e in f.share(count):
            of_expert = e < self.experts
            weights = of_expert.select(router + e * k * element, gate)
            biased = of_expert & bias.is_null().equals(0)
            for r in f.loop(self.rows):
                logit = f.variable(self._dot(weights, normed + r * self.get("normed_row"), k))
                with f.when(biased):
                    logit.value = logit.value + (bias + e * 4).load("float", 0, 4)
                (self._logits(r) + e * 4).store(logit.value, 0, 4)

    def _logits(self, row: Value) -> Value:
        return self.pointer("logits") + row * (self.experts + 1) * 4

    def _dot(self, weights: Value, x: Value, k: Value) -> Value:
        f, isa, kind = self.f, self.isa, self._router
        _, element, size = element_of(kind)
        lanes, step = isa.lanes, 4 * isa.lanes
        sums, whole = [f.variable(f.value(isa.floats, 0.0)) for _ in range(4)], k // step * step
        for i in f.loop(whole, step=step):
            for v, total in enumerate(sums):
                w = isa.to_float((weights + i * size).load(vector(element, lanes), v * lanes * size, size), kind)
                total.value = f.fma(w, (x + i * 4).load(isa.floats, v * lanes * 4, 4), total.value)
        total = f.variable(((sums[0].value + sums[1].value) + (sums[2].value + sums[3].value)).fold(lambda a, b: a + b))
        for i in f.loop(k, start=whole):
            w = isa.to_float((weights + i * size).load(element, 0, size), kind)
            total.value = f.fma(w, (x + i * 4).load("float", 0, 4), total.value)
        return total.value

    def choose(self) -> None:
        """Emit top-k of all rows, by one thread: to share it would cost one more barrier."""
        with self.f.when(self.thread.equals(0)):
            for r in self.f.loop(self.rows):
                self._choose(r)
            if not self.spec.single_row:
                self._sort()

    def sort(self) -> None:
        """Emit the sorting of given ids, by one thread."""
        with self.f.when(self.thread.equals(0)):
            self._wait()
            self._sort()

    def _flag(self, word: int) -> Value:
        """Return the address of a word of `kernels/crossing.py`."""
        return self.pointer("flags") + 8 * word

    def _wait(self) -> None:
        """Wait until the GPU's rows have arrived. Where one wait has failed, the others end, too."""
        if not self.spec.crosses:
            return
        f = self.f
        polls, most = f.variable(f.value("i64", 0)), self.get("polls")

        def poll() -> Value:
            arrived = f.acquire(self._flag(crossing.READY)).differs(f.acquire(self._flag(crossing.DONE)))
            polls.value = polls.value + 1
            return (arrived | f.acquire(self._flag(crossing.FAILED)).differs(0)).select(most, polls.value)

        for _ in f.draw(poll, most):
            self.isa.pause(f)
        with f.when(f.acquire(self._flag(crossing.READY)).equals(f.acquire(self._flag(crossing.DONE)))):
            f.release(self._flag(crossing.FAILED), f.value("i64", 1))

    def _publish_done(self) -> None:
        """Emit the flag that tells the GPU that y is complete, which the last thread sets."""
        if self.spec.crosses:
            f, arrived = self.f, self._flag(crossing.ARRIVED)
            with f.when((f.arrive(arrived) + 1).equals(self.threads)):
                f.release(arrived, f.value("i64", 0))
                f.release(self._flag(crossing.DONE), f.acquire(self._flag(crossing.READY)))

    def _choose(self, row: Value) -> None:
        """Emit top-k of a row, by insertion: `weights` hold its largest logits, or corrected scores, so far, in falling order."""
        f, logits, one = self.f, self._logits(row), self.f.value("float", 1.0)
        ids, weights = self.pointer("ids") + row * self.top_k * 8, self.pointer("weights") + row * self.top_k * 4
        scored, correction = self.spec.scores != "", self.pointer("correction")
        if scored:
            self._score(logits)
        for j in f.loop(self.top_k):
            (ids + j * 8).store(j, 0, 8)
            (weights + j * 4).store(f.value("float", -_INFINITE), 0, 4)
        for e in f.loop(self.experts):
            logit = (logits + e * 4).load("float", 0, 4)
            if scored:
                logit = logit + (correction + e * 4).load("float", 0, 4)
            with f.when(_larger(logit, (weights + (self.top_k - 1) * 4).load("float", 0, 4))):
                carried, number = f.variable(logit), f.variable(e)
                for j in f.loop(self.top_k):
                    here, expert = (weights + j * 4).load("float", 0, 4), (ids + j * 8).load("i64", 0, 8)
                    larger = _larger(carried.value, here)
                    (weights + j * 4).store(larger.select(carried.value, here), 0, 4)
                    (ids + j * 8).store(larger.select(number.value, expert), 0, 8)
                    carried.value, number.value = larger.select(here, carried.value), larger.select(expert, number.value)
        if scored:
            total = one
            if self.spec.normalized:
                total = self._sum(self.top_k, lambda j: _score_of(logits, ids, j)) + _LEAST_SUM
            for j in f.loop(self.top_k):
                self._store_weight(weights + j * 4, _score_of(logits, ids, j) / total)
        else:
            most, (values, count) = weights.load("float", 0, 4), (weights, self.top_k) if self.spec.normalized else (logits, self.experts)
            total = self._sum(count, lambda j: exp(f, (values + j * 4).load("float", 0, 4) - most))
            for j in f.loop(self.top_k):
                at = weights + j * 4
                self._store_weight(at, exp(f, at.load("float", 0, 4) - most) / total)
        gate, gated = logits + self.experts * 4, f.variable(one)
        with f.when(self.pointer("shared_gate").is_null().equals(0)):
            gated.value = self._sigmoid(gate.load("float", 0, 4))
        gate.store(gated.value, 0, 4)

    def _score(self, logits: Value) -> None:
        """Replace the logits of a row by its scores."""
        f = self.f
        match self.spec.scores:
            case "sigmoid":
                for e in f.loop(self.experts):
                    at = logits + e * 4
                    at.store(self._sigmoid(at.load("float", 0, 4)), 0, 4)
            case "softmax":
                self._softmax(logits)
            case "":
                raise KernelError("a row that chooses by logits has no scores: this is a fault in halfbyte, please report it")
            case _:
                raise unreachable(self.spec.scores, "the scores of a router,")

    def _softmax(self, logits: Value) -> None:
        f = self.f
        most = f.variable(f.value("float", -_INFINITE))
        for e in f.loop(self.experts):
            logit = (logits + e * 4).load("float", 0, 4)
            most.value = _larger(logit, most.value).select(logit, most.value)
        total = self._sum(self.experts, lambda e: exp(f, (logits + e * 4).load("float", 0, 4) - most.value))
        for e in f.loop(self.experts):
            at = logits + e * 4
            at.store(exp(f, at.load("float", 0, 4) - most.value) / total, 0, 4)

    def _sum(self, count: Value, part: Callable[[Value], Value]) -> Value:
        total = self.f.variable(self.f.value("float", 0.0))
        for i in self.f.loop(count):
            total.value = total.value + part(i)
        return total.value

    def _sigmoid(self, x: Value) -> Value:
        f = self.f
        return f.value("float", 1.0) / (exp(f, f.value("float", -0.0) - x) + 1.0)

    def _store_weight(self, at: Value, share: Value) -> None:
        """Store the weight of a chosen expert: its share of the scores, times `factor`."""
        factor, _ = EXPERTS.load_floats(self.args, "factor")
        at.store(share * factor, 0, 4)

    def _sort(self) -> None:
        """Emit the sorting of places by expert, by counting; those of an expert stay in the order of rows."""
        f, routed_rows = self.f, self.rows * self.top_k
        ids, order, counts = (self.pointer(name) for name in ("ids", "order", "counts"))
        none = f.value("i64", 0)
        for e in f.loop(self.experts):
            (counts + e * 8).store(none, 0, 8)
        for i in f.loop(routed_rows):
            at = counts + (ids + i * 8).load("i64", 0, 8) * 8
            at.store(at.load("i64", 0, 8) + 1, 0, 8)
        before = f.variable(none)
        for e in f.loop(self.experts):
            at, first = counts + e * 8, before.value
            before.value = first + at.load("i64", 0, 8)
            at.store(first, 0, 8)
        for i in f.loop(routed_rows):
            at = counts + (ids + i * 8).load("i64", 0, 8) * 8
            to = at.load("i64", 0, 8)
            (order + to * 8).store(i, 0, 8)
            at.store(to + 1, 0, 8)

    def _place(self, pair: Value) -> Value:
        """Return the place of a pair."""
        return pair if self.spec.single_row else (self.pointer("order") + pair * 8).load("i64", 0, 8)

    def _of_expert(self, linear: Value, place: Value) -> tuple[Value, Value]:
        """Return the addresses of the weights and bias of the expert at a place."""
        expert = (self.pointer("ids") + place * 8).load("i64", 0, 8)
        weights, bias = (LINEAR.load(linear, name, "ptr") for name in ("weights", "bias"))
        expert_bias = bias + expert * self.get("expert_bias")
        return weights + expert * self.get("expert_bytes"), bias.is_null().select(bias, expert_bias)

    def _laid_out(self, linear: Value, row: Value) -> Value:
        """Return the address of a row as tiles read it."""
        laid_out = LINEAR.load(linear, "scratch", "ptr") + self.thread * self.get("private")
        return laid_out + row * LINEAR.load(linear, "row_bytes")

    def up(self) -> None:
        """Emit the first product and its gates. Groups are cut from the panels of all pairs: each is a panel of gates and one of ups."""
        if self.spec.single_row:
            self._wait()
        f, linear, gate = self.f, self._prepare(), self.get("gate")
        tile, up_offset = (f.value("i64", 0), f.value("i64", 1)), gate * (4 * PANEL)
        panel_bytes, end = LINEAR.load(linear, "panel_bytes"), self.rows * self.top_k * gate
        for start, stop, following in drawn_shares(f):
            at = f.variable(start)
            for i in f.draw(lambda at=at: at.value, stop):  # type: ignore[misc]
                place, first = self._place(i // gate), i % gate
                last = f.umin(gate, first + (stop - i))
                weights, bias = self._of_expert(linear, place)
                after = i + (last - first)
                after = f.umin(after.below(stop).select(after, following), end - 1)  # at the end a panel that was read: harmless
                next_expert, _ = self._of_expert(linear, self._place(after // gate))
                next_weights = next_expert + after % gate * panel_bytes * (2 if self.spec.clamped else 1)
                a = self._laid_out(linear, f.value("i64", 0) if self.spec.single_row else place // self.top_k)
                out = LINEAR.load(linear, "out", "ptr") + place * LINEAR.load(linear, "out_stride")
                if self.spec.clamped:
                    driver.multiply(f, linear, tile, (first * 2, last * 2), a, out, weights, bias, next_weights=next_weights)
                    activations = self.pointer("activations") + place * self.get("activations_stride")
                    count, settings = (last - first) * PANEL, EXPERTS.load_floats(self.args, "alpha_limit")
                    clamped_gates(f, self.isa, out + first * (8 * PANEL), activations + first * (4 * PANEL), count, settings)
                else:
                    driver.multiply(f, linear, tile, (first, last), a, out, weights, bias, first + gate)
                    driver.multiply(f, linear, tile, (first + gate, last + gate), a, out, weights, bias, next_weights=next_weights)
                    begin = out + first * (4 * PANEL)
                    through_gates(f, self.isa, begin, (last - first) * PANEL, begin + up_offset)
                at.value = i + (last - first)
        self._prefetch_down()

    def _prefetch_down(self) -> None:
        """Emit prefetches of what this thread reads first in step "down", before the barrier."""
        f, down = self.f, self.pointer("down")
        shares, groups = EXPERTS.load(down, "shares", "ptr"), EXPERTS.load(down, "groups")
        share = shares + f.umin(self.thread, groups - 1) * 8
        start, stop = (share.load("i64", at, 8) for at in (0, 8))
        linear, expert = EXPERTS.load(down, "linear", "ptr"), (self.pointer("ids") + self._place(f.value("i64", 0)) * 8).load("i64", 0, 8)
        panel_bytes = LINEAR.load(linear, "panel_bytes")
        weights = LINEAR.load(linear, "weights", "ptr") + expert * EXPERTS.load(down, "expert_bytes") + start * panel_bytes
        for at in f.loop(f.umin((stop - start) * panel_bytes, f.value("i64", _AT_BARRIER)), step=64):
            f.prefetch(weights + at, 2)

    def down(self) -> None:
        """Emit the second product and y: groups are cut from its panels, and a thread computes a group for all pairs."""
        f, linear = self.f, self._prepare()
        tile, stride, n = (f.value("i64", 0), f.value("i64", 1)), LINEAR.load(linear, "out_stride"), LINEAR.load(linear, "n")
        pairs, panel_bytes = self.rows * self.top_k, LINEAR.load(linear, "panel_bytes")
        for start, stop, following in drawn_shares(f):
            for pair in f.loop(pairs):
                place, more = self._place(pair), (pair + 1).below(pairs)
                weights, bias = self._of_expert(linear, place)
                after, _ = self._of_expert(linear, self._place(more.select(pair + 1, 0)))
                next_weights = after + more.select(start, following) * panel_bytes
                out = LINEAR.load(linear, "out", "ptr") + place * stride
                driver.multiply(
                    f, linear, tile, (start, stop), self._laid_out(linear, place), out, weights, bias, next_weights=next_weights
                )
            columns = start * PANEL, f.umin(n, stop * PANEL)
            for r in f.loop(self.rows):
                self._add(linear, r, columns)
        self._publish_done()

    def _add(self, linear: Value, row: Value, columns: tuple[Value, Value]) -> None:
        """Emit the columns start … stop - 1 of a row of y."""
        f, isa, (start, stop) = self.f, self.isa, columns
        stride = LINEAR.load(linear, "out_stride")
        products = LINEAR.load(linear, "out", "ptr") + row * self.top_k * stride
        hidden, shared, out = (self.pointer(name) for name in ("hidden", "shared", "out"))
        weights, gate = self.pointer("weights") + row * self.top_k * 4, self._logits(row) + self.experts * 4
        has_hidden, has_shared = (part.is_null().equals(0) for part in (hidden, shared))
        places = [part + row * stride for part in (hidden, shared, out)]

        def columns_from(at: Value, type_: str, lanes: int) -> None:
            total = f.variable(f.value(type_, 0.0))
            with f.when(has_hidden):
                total.value = (places[0] + at).load(type_, 0, 4)
            for j in f.loop(self.top_k):
                y, weight = (products + j * stride + at).load(type_, 0, 4), (weights + j * 4).load("float", 0, 4)
                total.value = f.fma(y, weight.splat(lanes), total.value)
            with f.when(has_shared):
                total.value = f.fma((places[1] + at).load(type_, 0, 4), gate.load("float", 0, 4).splat(lanes), total.value)
            (places[2] + at).store(total.value, 0, 4)

        whole = start + (stop - start) // isa.lanes * isa.lanes
        for i in f.loop(whole, start, isa.lanes):
            columns_from(i * 4, isa.floats, isa.lanes)
        for i in f.loop(stop, whole):
            columns_from(i * 4, "float", 1)


def clamped_gates(f: Function, isa: ISA, gate_up: Value, to: Value, count: Value, alpha_limit: tuple[Value, Value]) -> None:
    """Emit `Clamped` of `count` adjacent pairs of a gate and its up, a multiple of the lanes; `alpha_limit`: its parameters."""
    n = isa.lanes
    alpha, limit = (part.splat(n) for part in alpha_limit)
    lowest = f.value(isa.floats, -0.0) - limit
    for i in f.loop(count, step=n):
        first, second = ((gate_up + i * 8).load(isa.floats, at, 4) for at in (0, 4 * n))
        gate, up = (first.shuffle(range(at, 2 * n, 2), second) for at in (0, 1))
        gate, up = gate.min_keeping_nan(limit), up.min_keeping_nan(limit).max_keeping_nan(lowest)
        sigmoid = f.value(isa.floats, 1.0) / (exp(f, (f.value(isa.floats, -0.0) - gate) * alpha) + 1.0)
        (to + i * 4).store((up + 1.0) * (gate * sigmoid), 0, 4)


def _score_of(scores: Value, ids: Value, j: Value) -> Value:
    """Return the score of the j-th chosen expert."""
    return (scores + (ids + j * 8).load("i64", 0, 8) * 4).load("float", 0, 4)


def _larger(a: Value, b: Value) -> Value:
    """Return a > b, where NaN is the largest, as in torch's topk: a NaN logit is chosen, and makes all weights of its row NaN."""
    return (a > b) | (a.is_nan() & b.equals(b))

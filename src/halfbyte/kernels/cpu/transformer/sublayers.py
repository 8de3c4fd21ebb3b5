"""What the sublayers of a decoder layer share: norms, memory for intermediate results, and products as steps.

    h = x + attention(x)         `attention_sublayer.py`
    y = h + feed_forward(h)      `feed_forward.py`, `experts/plan.py`; then `per_layer.py` in some models

A sublayer is planned once for each number of rows m. Its plan owns a `Workspace` and lists the argument blocks of the steps that
`step_sequence.py` runs. All fields are filled in but the addresses that change from call to call, which the plan's `set_addresses` writes.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import torch

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments
from halfbyte.kernels.cpu.linear import driver
from halfbyte.kernels.cpu.linear.linear import CALL, pack_call
from halfbyte.kernels.cpu.plan_cache import PLANS, Memory
from halfbyte.kernels.cpu.step_sequence import NORM, PRODUCT, Product, Step, StepKind, phase, shares
from halfbyte.kernels.layer_kinds import GateFunction
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import PANEL

MOST_STREAMED_TOKENS = 8  # `attend.py` reads the KV cache once for each token; for more tokens `attend_whole.py` lays out the keys first
_INFINITE = float("inf")
_ALIGNED = 64  # bytes
_ROW_STEP = 64  # rows: memory is for a multiple of so many
_pack_two = struct.Struct("<2q").pack_into
Fields = dict[str, int | tuple[float, float]]  # arguments of a step by the names of its block


class Norm(NamedTuple):
    """RMSNorm or LayerNorm, as `ops.transformer.sublayers.Norm` has it, by the addresses of its weight and bias, float32 [K]."""

    weight: int
    eps: float
    unit_offset: bool = False
    layer_norm: bool = False
    bias: int = 0

    def step(self, kind: StepKind, gates: GateFunction | Literal["none"] = "none", *, added: bool = False, scaled: bool = False) -> Step:
        """Return a step of this kind with this norm; the other arguments are `Step`'s."""
        return Step(kind, gates, self.layer_norm, self.unit_offset, added, scaled=scaled)

    @property
    def fields(self) -> Fields:
        """The arguments of a step of NORM that the norm decides."""
        return {"weight": self.weight, "shift": self.bias, "eps": (self.eps, 0.0)}


class FeedForward(Protocol):
    """The second sublayer of a layer, from h to y [m, K], float32: it applies its own norm and residual connection."""

    @property
    def k(self) -> int:
        """Elements of a row of h and y."""

    @property
    def work(self) -> int:
        """Multiplications for a row, approximately."""

    def plan(self, m: int, threads: int, hidden: int) -> FeedForwardPlan:
        """Plan the steps for m rows h, contiguous float32 at the address `hidden`."""


class FeedForwardPlan(Protocol):
    """The steps of a feed-forward sublayer."""

    @property
    def blocks(self) -> Sequence[Buffer]:
        """The arguments of the steps, in order."""

    def set_addresses(self, out: int, x: int) -> None:
        """Set the addresses of y, contiguous float32, and of the layer's input x, which parallel layers read."""


def shared_memory(name: str, sizes: tuple[int, ...]) -> Memory:
    """Return memory of these sizes in bytes, each aligned to 64: the same one for all calls in a Python thread with equal arguments.

    Two uses whose contents must live at the same time need different names. The caller keeps the result alive.
    """
    memory = PLANS.shared.get((name, sizes))
    if memory is None:
        memory = PLANS.shared[name, sizes] = _allocated(sizes)
    return memory


def _allocated(sizes: tuple[int, ...]) -> Memory:
    """Return memory of these sizes in one block."""
    starts = [0, *accumulate(round_up(size, _ALIGNED) for size in sizes)]
    block = torch.empty(starts[-1] + _ALIGNED, dtype=torch.uint8, device="cpu")
    base = round_up(block.data_ptr(), _ALIGNED)
    return Memory(block, tuple(base + start for start in starts[:-1]))


def memory_rows(m: int) -> int:
    """Return for how many rows, at least m, memory is allocated, so that prompts of all lengths share it."""
    return m if m <= MOST_STREAMED_TOKENS else round_up(m, _ROW_STEP)


def linear_arguments(product: Product, m: int, threads: int, x: int, laid_out: int, out: int, stride: int | None = None) -> Buffer:
    """Return the arguments of LINEAR of out = x · Wᵀ + bias for m rows, exclusive to the caller.

    Args:
        product: The weight and bias.
        m, threads: Rows, and threads that compute them.
        x, laid_out, out: Addresses of x [m, K], float32, of its rows as tiles read them, and of outputs; x and out may be filled in later.
        stride: Bytes between rows of x; None: they are contiguous.
    """
    linear, _ = product.kernel.arguments(m, threads)
    stride = 4 * product.k if stride is None else stride
    pack_call(linear, CALL, 0, x, stride, laid_out, product.weight, product.bias, out, 0, -_INFINITE, _INFINITE)
    return linear


class NormedRows(NamedTuple):
    """Where a step writes normed rows: from an address on, with so many bytes between those of threads, or between rows."""

    address: int
    thread_bytes: int
    row_bytes: int


def shared_product(linear: Buffer, norm: Norm | None = None, normed: NormedRows | None = None) -> tuple[Buffer, Buffer]:
    """Return the two steps of a product whose rows and panels all threads share, one after the other.

    Args:
        linear: Its `linear_arguments`, which become those of the second step.
        norm, normed: LayerNorm of rows of x before they are laid out, and where normed rows go; None: there is none.

    Returns:
        The step that norms rows and lays them out, and the one that multiplies them.
    """
    fields: Fields = {"linear": ctypes.addressof(linear)}
    if norm is not None and normed is not None:
        fields |= {"norm": norm.weight, "shift": norm.bias, "eps": (norm.eps, 0.0)}
        fields |= {"normed": normed.address, "normed_thread": normed.thread_bytes, "normed_row": normed.row_bytes}
    _pack_two(linear, LINEAR.offset("first_phase"), driver.phases(current())["panels"], 0)
    return arguments(PRODUCT, phase(Step("rows", layer_norm=True)), fields), linear


@dataclass(frozen=True, eq=False)
class Workspace:
    """Memory of a sublayer for m rows, and the steps of products and norms that use it.

    A product's rows are normed and then laid out as its tiles read them. With one row each thread does that for itself, into a copy of
    its own, so that no barrier is needed.

    Attributes:
        m: Rows.
        threads: That compute them.
        normed: Address of a normed row for each thread.
        normed_bytes: Bytes of a normed row.
        laid_out: Address of the rows as tiles read them.
        private: Bytes of a thread's own copy of these; 0: threads share one.
        buffers: Addresses of the sublayer's other intermediate results.
        memory: What all this lies in.
    """

    m: int
    threads: int
    normed: int
    normed_bytes: int
    laid_out: int
    private: int
    buffers: tuple[int, ...]
    memory: Memory

    @classmethod
    def of(cls, name: str, products: Sequence[Product], m: int, threads: int, buffers: Iterable[int] = ()) -> Workspace:
        """Return the memory that all sublayers of this name with the same sizes share.

        Args:
            name: As for `shared_memory`.
            products: All that are computed in it, one after the other.
            m: Rows.
            threads: That compute them.
            buffers: Sizes of further memory in bytes.
        """
        normed_bytes = 4 * max(product.k for product in products)
        laid_out_bytes = round_up(max(product.kernel.scratch_bytes(m) for product in products), _ALIGNED)
        laid_out_size = threads * laid_out_bytes if m == 1 else -(-laid_out_bytes // m) * memory_rows(m)
        memory = shared_memory(name, (threads * normed_bytes, laid_out_size, *buffers))
        normed, laid_out, *others = memory.starts
        return cls(m, threads, normed, normed_bytes, laid_out, laid_out_bytes if m == 1 else 0, tuple(others), memory)

    def product(
        self,
        product: Product,
        x: int,
        out: int,
        *,
        norm: Norm | None = None,
        gates: GateFunction | Literal["none"] = "none",
        gated: bool = True,
        external_up: bool = False,
        stride: int | None = None,
    ) -> ProductSteps:
        """Return the steps of out = activation(norm(x) · Wᵀ + bias).

        Args:
            product: The weight and bias.
            x, out: Addresses of x [m, K] and of contiguous rows of outputs, float32; or 0, to be filled in later.
            norm: Of x.
            gates: "none": no activation. Otherwise the function f of the activation: f(gate) * up of the product's two halves.
            gated: False: the activation is f of all outputs.
            external_up: f of all outputs is multiplied by a tensor whose address is PRODUCT's `up`.
            stride: Bytes between rows of x; None: they are contiguous.
        """
        linear = linear_arguments(product, self.m, self.threads, x, self.laid_out, out, stride)
        fields: Fields = {"normed": self.normed, "normed_thread": self.normed_bytes, "private": self.private}
        if norm is not None:
            fields |= {"norm": norm.weight, "shift": norm.bias, "eps": (norm.eps, 0.0)}
        step = replace(Step("", gates) if norm is None else norm.step("", gates), ungated=not gated, external_up=external_up)
        return product_steps(product.n, linear, fields, single_row=self.m == 1, threads=self.threads, step=step)

    def norm(self, norm: Norm, x: int, out: int, stride: int, k: int) -> Buffer:
        """Return the step of out = norm(x), for rows of k elements that lie `stride` bytes apart."""
        return rowwise_step(norm.step("norm"), self.m, k, stride, {"x": x, "out": out, **norm.fields})


class ResidualProduct:
    """The last product of a sublayer and its residual connection, for contiguous rows of float32:

        out = scale * (residual + multiplier * norm(x · Wᵀ + bias))

    Without norm and multiplier the product adds the residual itself. Otherwise it stores to `sums`, and one more step does the rest, at
    the cost of a barrier. A norm excludes a multiplier, and is an RMSNorm; a scale requires a norm.
    """

    def __init__(
        self,
        workspace: Workspace,
        product: Product,
        x: int,
        stride: int,
        sums: int,
        norm: Norm | None,
        multiplier: float,
        scale: int = 0,
    ) -> None:
        """Plan the steps.

        Args:
            workspace: Memory and sizes.
            product: W and bias.
            x, stride: Address of the first row of x, and bytes between rows.
            sums: Address of [m, N], where `needs_sums`.
            norm: Of the product's outputs; None: none.
            multiplier: Of these.
            scale: Address of a float; 0: none.
        """
        assert norm is None or (multiplier == 1.0 and not norm.layer_norm), "the step of a norm neither multiplies nor adds a bias"
        assert scale == 0 or norm is not None, "a scale is an argument of the norm's step"
        steps, m, n = workspace.product(product, x, sums, stride=stride), workspace.m, product.n
        self._steps = steps  # what its blocks point to
        self._last, self._out, self.blocks = steps.linear, LINEAR.offset("out"), steps.blocks
        if not needs_sums(norm, multiplier):
            return
        self._out = NORM.offset("out")
        if norm is not None:
            fields = norm.fields | ({"shift": scale} if scale else {})
            self._last = rowwise_step(norm.step("norm", added=True, scaled=scale != 0), m, n, 4 * n, {"x": sums, **fields})
        else:
            self._last = rowwise_step(Step("scale"), m, n, 4 * n, {"x": sums, "eps": (0.0, multiplier)})
        self.blocks = [*steps.blocks, self._last]

    def set_addresses(self, out: int, residual: int) -> None:
        """Set the addresses of `out` and `residual`."""
        _pack_two(self._last, self._out, out, residual - out)


def needs_sums(norm: Norm | None, multiplier: float) -> bool:
    """Return whether a `ResidualProduct` stores its outputs before it adds the residual."""
    return norm is not None or multiplier != 1.0


def rowwise_step(step: Step, m: int, k: int, stride: int, fields: Fields) -> Buffer:
    """Return the arguments of a step of NORM for m rows of k elements that lie `stride` bytes apart, in x and in out."""
    return arguments(NORM, phase(step), {"x_stride": stride, "out_stride": stride, "rows": m, "k": k, **fields})


class ProductSteps(NamedTuple):
    """The steps of a product.

    Attributes:
        blocks: Their arguments, of PRODUCT.
        linear: The arguments of the product itself, of LINEAR, to which they point.
        shares: How panels are cut into groups, to which they point.
    """

    blocks: list[Buffer]
    linear: Buffer
    shares: ctypes.Array[ctypes.c_int64]


def product_steps(n: int, linear: Buffer, fields: Fields, *, single_row: bool, threads: int, step: Step) -> ProductSteps:
    """Return the steps of a product: one for a single row, which each thread prepares for itself; else rows are prepared, then multiplied.

    Args:
        n: Outputs.
        linear: Its arguments.
        fields: Arguments of PRODUCT: the norm and where rows go.
        single_row: Whether there is one row.
        threads: That compute it.
        step: All but the kind of the steps.
    """
    gated = step.gates != "none" and not step.ungated
    panels = -(-n // PANEL) // (2 if gated else 1)
    groups = shares(panels, threads)
    table = (ctypes.c_int64 * len(groups))(*groups)
    fields = {
        **fields,
        "linear": ctypes.addressof(linear),
        "groups": len(groups) - 1,
        "shares": ctypes.addressof(table),
        "gate": panels if gated else 0,
    }
    if single_row:
        steps = [replace(step, kind="product")]
    else:
        prepare = replace(step, kind="rows", gates="none", ungated=False, external_up=False)
        steps = [prepare, Step("panels", step.gates, ungated=step.ungated, external_up=step.external_up)]
    return ProductSteps([arguments(PRODUCT, phase(one), fields) for one in steps], linear, table)

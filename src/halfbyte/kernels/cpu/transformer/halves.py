"""What the halves of a decoder layer share: memory, RMS norms, and products as steps of a chain.

A layer is two halves, h = x + attention(x) and y = h + feed_forward(h). Each is planned once for so many rows, to steps whose arguments
are filled in but for what changes from token to token.
"""

from __future__ import annotations

import ctypes
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Literal, NamedTuple, Protocol

import torch

from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Buffer
from halfbyte.kernels.cpu.codegen.kernel import arguments
from halfbyte.kernels.cpu.linear.linear import CALL, pack_call
from halfbyte.kernels.cpu.plan_cache import PLANS, Memory
from halfbyte.kernels.cpu.step_sequence import NORM, PRODUCT, Product, Step, StepKind, phase, shares
from halfbyte.kernels.layer_kinds import GateFunction
from halfbyte.layouts.base import round_up
from halfbyte.layouts.cpu_tiles import PANEL

FEW = 8  # tokens: for more of them keys are laid out before they are multiplied
_INFINITE = float("inf")
_STEP = 64  # rows: memory is for multiples of so many
OUT_STRIDE = LINEAR.offset("out_stride")
_pack_two = struct.Struct("<2q").pack_into
Fields = dict[str, int | tuple[float, float]]


class Norm(NamedTuple):
    """RMSNorm or LayerNorm, as `ops.transformer.decoder.Norm` has it, by the addresses of its weight and bias, float32 [K]."""

    weight: int
    eps: float
    unit_offset: bool = False
    layer_norm: bool = False
    bias: int = 0

    def step(self, kind: StepKind, gates: GateFunction | Literal["none"] = "none", *, added: bool = False, scaled: bool = False) -> Step:
        """One of this kind with this norm."""
        return Step(kind, gates, self.layer_norm, self.unit_offset, added, scaled=scaled)


class FeedForward(Protocol):
    """The second half of a layer, from h [m, K] to y [m, K]: it applies its own norm and residual connection.

    k     elements of a row of h and y
    work  multiplications for a row, or nearly
    """

    @property
    def k(self) -> int: ...

    @property
    def work(self) -> int: ...

    def plan(self, m: int, threads: int, hidden: int) -> HalfPlan:
        """The steps for m rows h, contiguous float32 at the address `hidden`."""


class HalfPlan(Protocol):
    """Steps of a feed-forward half."""

    @property
    def blocks(self) -> Sequence[Buffer]: ...

    def point(self, out: int, x: int) -> None:
        """From now on y, contiguous float32, goes to that address, and what the layer reads, as long, lies at x."""


def shared(name: str, sizes: tuple[int, ...]) -> Memory:
    """Memory of so many bytes each, all at multiples of 64: the same for all calls in a thread with this name and these sizes."""
    memory = PLANS.shared.get((name, sizes))
    if memory is None:
        memory = PLANS.shared[name, sizes] = _allocated(sizes)
    return memory


def _allocated(sizes: tuple[int, ...]) -> Memory:
    ends = [0, *accumulate(size + 63 & ~63 for size in sizes)]
    block = torch.empty(ends[-1] + 64, dtype=torch.uint8, device="cpu")
    start = block.data_ptr() + 63 & ~63
    return Memory(block, tuple(start + end for end in ends[:-1]))


def room(m: int) -> int:
    """For how many rows there is memory where there are m: so that prompts of all lengths share it."""
    return m if m <= FEW else round_up(m, _STEP)


@dataclass(frozen=True, eq=False)
class Laid:
    """Products of m rows by so many threads, and where their rows are laid out.

    private   bytes between the threads' own copies of what is laid out; 0 where they share one
    """

    m: int
    threads: int
    normed: int
    normed_thread: int
    laid_out: int
    private: int

    @staticmethod
    def sizes(products: Sequence[Product], m: int, threads: int) -> tuple[int, int]:
        """Bytes for normed rows and for what is laid out."""
        private = max(product.kernel.scratch_bytes(m) for product in products) + 63 & ~63
        return threads * max(p.k for p in products) * 4, threads * private if m == 1 else -(-private // m) * room(m)

    @classmethod
    def of(cls, products: Sequence[Product], m: int, threads: int, memory: Sequence[int]) -> Laid:
        """memory: the first two addresses of `shared` with `sizes`."""
        normed, laid_out = memory[:2]
        private = cls.sizes(products, 1, threads)[1] // threads if m == 1 else 0
        return cls(m, threads, normed, 4 * max(p.k for p in products), laid_out, private)

    def steps(
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
        """The product of (normed) rows at x, `stride` bytes apart, or contiguous ones. x and out may be filled in later.

        gates   their function, or, where outputs are not `gated`, that of all of these
        external_up  gates are multiplied by a tensor from outside, not by the product's up half
        """
        linear, _ = product.kernel.arguments(self.m, self.threads)
        stride = 4 * product.k if stride is None else stride
        pack_call(linear, CALL, 0, x, stride, self.laid_out, product.weight, product.bias, out, 0, -_INFINITE, _INFINITE)
        fields: Fields = {"normed": self.normed, "normed_thread": self.normed_thread, "private": self.private}
        if norm is not None:
            fields |= {"norm": norm.weight, "shift": norm.bias, "eps": (norm.eps, 0.0)}
        kind = replace(Step("", gates) if norm is None else norm.step("", gates), alone=not gated, external_up=external_up)
        blocks, table = product_steps(product.n, linear, fields, alone=self.m == 1, threads=self.threads, kind=kind)
        return ProductSteps(blocks, linear, table)

    def norm(self, norm: Norm, x: int, out: int, stride: int, k: int) -> Buffer:
        """The step of a norm alone, of rows of k elements that lie `stride` bytes apart."""
        return rows_step(norm.step("norm"), self.m, k, stride, {"x": x, "out": out, **of_norm(norm)})


class Added:
    """The last product of a half and the residual, out = residual + factor * norm(rows · Wᵀ + bias): within the product where there is
    nothing but that, and else with a step of its own, which takes about as long as threads take to meet."""

    def __init__(
        self, laid: Laid, product: Product, x: int, stride: int, sums: int, after: Norm | None, factor: float, scale: int = 0
    ) -> None:
        """sums: where the product goes before its norm; `factor` is 1 where there is one; scale: where there is one, the address of a float
        that `out` is multiplied by, or 0."""
        self._steps = laid.steps(product, x, sums, stride=stride)
        self.blocks, self._block, self._place = self._steps.blocks, self._steps.linear, LINEAR.offset("out")
        if after is not None:
            fields = of_norm(after) | ({"shift": scale} if scale else {})
            self._block = rows_step(after.step("norm", added=True, scaled=scale != 0), laid.m, product.n, 4 * product.n, fields)
        elif factor != 1.0:
            self._block = rows_step(Step("scale"), laid.m, product.n, 4 * product.n, {"eps": (0.0, factor)})
        if self._block is not self._steps.linear:
            self.blocks, self._place = [*self.blocks, self._block], NORM.offset("out")
            struct.pack_into("<q", self._block, NORM.offset("x"), sums)

    def point(self, out: int, residual: int) -> None:
        """Where `out` goes, and what is added to it: addresses of contiguous rows."""
        _pack_two(self._block, self._place, out, residual - out)


def needs_sums(after: Norm | None, factor: float) -> bool:
    """Whether the last product of a half goes to memory of its own."""
    return after is not None or factor != 1.0


def of_norm(norm: Norm) -> Fields:
    """The arguments of a norm's step that are its own."""
    return {"weight": norm.weight, "shift": norm.bias, "eps": (norm.eps, 0.0)}


def rows_step(step: Step, m: int, k: int, stride: int, fields: Fields) -> Buffer:
    """A step of m rows of k elements that lie `stride` bytes apart."""
    return arguments(NORM, phase(step), {"x_stride": stride, "out_stride": stride, "rows": m, "k": k, **fields})


class ProductSteps(NamedTuple):
    """Steps, the arguments of their product, and the other buffers that they read."""

    blocks: list[Buffer]
    linear: Buffer
    table: ctypes.Array[ctypes.c_int64]


def product_steps(
    n: int, linear: Buffer, fields: Mapping[str, int | tuple[float, float]], *, alone: bool, threads: int, kind: Step
) -> tuple[list[Buffer], ctypes.Array[ctypes.c_int64]]:
    """One step for one row (`alone`), two for more, with the arguments of the product with n outputs, and others of PRODUCT; and what they
    read, to be kept. kind: a Step with all but its `kind`."""
    gated = kind.gates != "none" and not kind.alone
    panels = -(-n // PANEL) // (2 if gated else 1)
    cut = shares(panels, threads)
    table = (ctypes.c_int64 * len(cut))(*cut)
    of_panels = {"groups": len(cut) - 1, "shares": ctypes.addressof(table), "gate": panels if gated else 0}
    rows = replace(kind, kind="rows", gates="none", alone=False, external_up=False)
    steps = (
        (replace(kind, kind="product"),) if alone else (rows, Step("panels", kind.gates, alone=kind.alone, external_up=kind.external_up))
    )
    return [arguments(PRODUCT, phase(step), {**fields, **of_panels, "linear": ctypes.addressof(linear)}) for step in steps], table

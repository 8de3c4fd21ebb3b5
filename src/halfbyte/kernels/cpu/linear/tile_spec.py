"""What a tile of a product on a CPU is compiled for: how it reads the weight and the activations, and how many outputs it computes.

`linear.specs` derives a `TileSpec` from a format, dtype and instruction set, `linear.LinearKernel.fields` adds the `Schedule` for a number
of rows; `tile.py`, `amx.py`, `expanded.py`, `bracketed.py` and the convolutions generate code from it. Its fields are a compiled kernel's
key, and its name: whatever generated code depends on is here, or in the instruction set.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfbyte.formats.spec import Family, Zero
from halfbyte.kernels.cpu.codegen.elements import Kind
from halfbyte.kernels.layer_kinds import Gelu

Inner = Literal["int8", "float", "bf16"]
# How the sum of a block's products becomes a float that the weight's scale multiplies. Accumulators begin at the row's correction, and
#   plain      are converted; sums of floating-point products are floats already
#   folded     begin at 0 instead: the correction is a float, times the activation's scale, and the multiply-add that scales subtracts it
#   biased     corrections have ROUND_BITS added, so that a block's sum is, bit for bit, the float ROUND + sum
#   bracketed  the activation's scale is multiplied last: by scale * sum of products + offset * sum of codes, rounded once
BlockSum = Literal["plain", "folded", "biased", "bracketed"]
FIELDS = 4  # of activations behind each block, 4 bytes for each row: `block_end.SCALE`, CORRECTION, SUM, OFFSET
ROUND = 12582912.0  # 1.5 * 2^23: adding it to a small float leaves the nearest integer, ties to even, in the low bits
ROUND_BITS = 0x4B400000  # of ROUND
ROUND_RANGE = 1 << 22  # integers of at most this magnitude, added to ROUND_BITS, are the bits of ROUND + integer


@dataclass(frozen=True, slots=True)
class WeightSpec:
    """How a weight is stored (`layouts/cpu_tiles.py`), and what is done to its codes in registers.

    Attributes:
        bits: Bits of a code, as products take it.
        scale, zero: As in the weight's format.
        pair_sums: Records hold sums of products of adjacent codes.
        sparse: 2:4 sparse (`sparse.py`).
        packed_bits: 5 or 6 where 8-bit codes are stored in so many bits (`packed_planes.py`), else 0.
        codebook: The format's family, where codes are indices in its codebook.
        subtracts_points: Zero points are subtracted from codes in registers; corrections do the rest (`block_end.correction_point`).
    """

    bits: int
    scale: Kind
    zero: Zero
    pair_sums: bool = False
    sparse: bool = False
    packed_bits: int = 0
    codebook: Family | Literal[""] = ""
    subtracts_points: bool = False

    @property
    def stored_bits(self) -> int:
        """Bits of a code in memory."""
        return self.packed_bits or (4 if self.codebook else self.bits)

    @property
    def signed(self) -> bool:
        """Whether codes are signed; otherwise they have a zero point or an offset."""
        return self.zero == "none"


@dataclass(frozen=True, slots=True)
class ActivationSpec:
    """How activations are laid out (`activations.py`), and what becomes of the sums of their products.

    Attributes:
        inner: Type of the products' operands.
        unit: Elements of K that are taken at a time.
        one_unit: A block is one unit of 32.
        has_offset: int8 activations have an offset.
        block_sum: How the sum of a block becomes a float.
    """

    inner: Inner
    unit: int
    one_unit: bool
    has_offset: bool = False
    block_sum: BlockSum = "plain"


@dataclass(frozen=True, slots=True)
class Schedule:
    """The size of a tile, and how it prefetches weights.

    Attributes:
        rows, vectors: R rows of activations by V vectors of outputs.
        panels: Most that one call takes, interleaved unit by unit, so that memory is read as several streams.
        locality: The cache that its own weights are prefetched to, as `Tuning.locality` has it.
        shares_prefetch: It may be called as one of several row tiles that share the prefetch of the next panel.
        expands: It expands the codes that later row tiles read (`expanded.py`).
    """

    rows: int
    vectors: int
    panels: int = 1
    locality: int | None = 3
    shares_prefetch: bool = False
    expands: bool = False


@dataclass(frozen=True, slots=True)
class TileSpec:
    """A tile of outputs. M, N, K and the block's length are arguments of the compiled function.

    Attributes:
        weight, activation, schedule: Above.
        scaled_at_end: A row has one activation scale, which its totals are multiplied by at the end.
        out: "f32", "bf16" or "f16", or "i8" for a tile that requantizes.
        gelu: Outputs go through `elementary.gelu`, or `gelu_tanh`.
    """

    weight: WeightSpec
    activation: ActivationSpec
    schedule: Schedule
    scaled_at_end: bool
    out: Kind
    gelu: Gelu = ""

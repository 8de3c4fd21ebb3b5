"""What a tile is compiled for, and what those who lay activations out for it have to know."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from halfbyte.formats.spec import Family, Zero
from halfbyte.kernels.cpu.codegen.elements import Kind

Inner = Literal["int8", "float", "bf16"]
FIELDS = 4  # scale, correction, sum, offset: 4 bytes each for every row and block
ROUND = 12582912.0  # 1.5 * 2^23: adding it to a small float leaves the nearest integer, ties to even, in the low bits
ROUND_BITS = 0x4B400000


@dataclass(frozen=True, slots=True)
class TileSpec:
    """What a tile is compiled for. M, N, K and the block's length are arguments.

    inner    what the products are made of
    bits (of a code), signed, scale ("f16", "bf16", "f32"), zero ("none", "point", "offset")   as in the weight's format
    pair_sums  records hold sums of products of adjacent codes
    unit     elements of K taken at a time; `single`: a block is one unit of 32
    by_row   one activation scale a row, multiplied at the end; `shifted`: activations have an offset
    rows     R
    out      "f32", "bf16" or "f16", or "i8" for a tile that requantizes
    gelu     outputs go through `gelu.gelu`
    folded   corrections are floats, times the activation's scale: taken off by the multiplication that scales
    panels   most that one call takes: several are interleaved unit by unit, so that memory is read as several streams
    shares_prefetch  may be called as one of several row tiles that share the prefetch of the next panel
    near     as `Tuning.locality` has it
    biased   corrections have ROUND_BITS added, so that a block's sum is, bit for bit, the float ROUND + sum
    points_off   points are taken off codes in registers; corrections do the rest (`highest_point`)
    bracketed    the activation's scale is multiplied last: by scale * sum of products + offset * sum of codes, rounded once
    expands, sparse, packed_bits   as in `expanded.py`, `sparse.py` and `packed_planes.py`
    table    the format's family, where its codes are in a codebook
    """

    inner: Inner
    bits: int
    scale: Kind
    zero: Zero
    pair_sums: bool
    unit: int
    single: bool
    by_row: bool
    shifted: bool
    rows: int
    vectors: int
    out: Kind
    gelu: bool = False
    folded: bool = False
    panels: int = 1
    shares_prefetch: bool = False
    near: int | None = 3
    biased: bool = False
    points_off: bool = False
    bracketed: bool = False
    expands: bool = False
    sparse: bool = False
    packed_bits: int = 0
    table: Family | Literal[""] = ""

    @property
    def signed(self) -> bool:
        return self.zero == "none"

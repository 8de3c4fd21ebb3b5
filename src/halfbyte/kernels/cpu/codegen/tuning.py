"""Numbers chosen by measurement for each microarchitecture: tile sizes, prefetch distances, and where one algorithm beats another.

An `ISA` has the instructions of a CPU, its `tuning` the choices among what they can do. Every choice is correct on every CPU, only some
are fast. The measurements, with those of rejected numbers: docs/engineering, `cpu-avx2.md`, `cpu-avx512.md`, `convolution-kernels.md`.

A tile is R rows of activations times V vectors of outputs. Its accumulators should stay in registers, with V vectors of unpacked weights:
more rows share each unpacked vector, more vectors share each broadcast activation.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal, NamedTuple

from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.layouts.cpu_tiles import PANEL, Geometry, has_pair_sums

Core = Literal["intel", "zen4", "zen5"]  # cores with AVX-512 VNNI whose tunings differ

LONG_PANEL = 1 << 16  # bytes: four panels in turn are read faster than one from this size on (Emerald Rapids)
_LONG_BLOCK = 512  # elements from which on the cost of a block's end does not matter
_UNLIMITED = 1 << 62


class Tiling(NamedTuple):
    """How outputs are cut into tiles.

    Attributes:
        rows: Most rows of activations of a tile, R.
        vectors: Vectors of outputs, V.
        panels: Panels that a tile of all rows takes in turn, so that weights are read as several streams.
        expanded: Codes are expanded to bytes once for all row tiles (`linear/expanded.py`).
    """

    rows: int
    vectors: int
    panels: int = 1
    expanded: bool = False


@dataclass(frozen=True, slots=True)
class Prefetching:
    """How tiles prefetch weights (`linear/prefetch.py`).

    Attributes:
        distance: Bytes ahead of the unit that a tile reads.
        stream_distance: The same for a tile that reads several panels in turn; 0: the CPU's own prefetcher follows the streams.
        streamed_rows: With at most so many rows, which read weights once, these are prefetched past the second-level cache.
        sharing_tiles: From so many row tiles of a panel on, each prefetches a share of the next panel; 0: never.
        most_sharing: How many of the row tiles, the last ones, have a share.
        sharing_bytes: Most bytes of panels and activations for which they share: these stay in the second-level cache meanwhile.
        contiguous: A share of 8-bit codes is contiguous lines, not every n-th unit.
        all_tiles: Every row tile that shares prefetches its own panel, too; else the first tile alone.
    """

    distance: int = 8192
    stream_distance: int = 0
    streamed_rows: int = 0
    sharing_tiles: int = 0
    most_sharing: int = _UNLIMITED
    sharing_bytes: int = _UNLIMITED
    contiguous: bool = False
    all_tiles: bool = False


@dataclass(frozen=True, slots=True)
class Expansion:
    """How codes are expanded once for all row tiles (`linear/expanded.py`).

    Attributes:
        longest_block: Most elements of a block, of which one at least is expanded at a time.
        record_bytes: Bytes that are expanded at a time: they stay in the first-level cache.
        chunk_bytes: Bytes of activations that pass over them together.
    """

    longest_block: int = 1 << 10
    record_bytes: int = 24 << 10
    chunk_bytes: int = _UNLIMITED


class Winograd(NamedTuple):
    """When 3 x 3 convolutions are computed by minimal filtering (`conv/winograd/`).

    Attributes:
        direct_rate, rate: Products per cycle of `conv/direct.py` and of `conv/winograd/`.
        tiles: Tiles of a chunk that are enough, with weights from the third-level cache and from the second.
    """

    direct_rate: float
    rate: float
    tiles: tuple[int, int] = (48, 48)


@dataclass(frozen=True, slots=True)
class Tuning:
    """The numbers of one microarchitecture. These defaults follow from 16 registers of 128 bits; nothing was measured for them.

    Attributes:
        conv_tile: Rows and vectors of a tile that convolves codes, or that multiplies sums (`ISA.multiplies_sums`).
        register_totals: Vectors of float totals that stay in registers with a block's accumulators; more lie in memory.
        prefetching: How tiles prefetch weights.
        expansion: How codes are expanded for several row tiles; None: they are unpacked in every tile.
        chunk_bytes: Bytes of activations that stay in a core's second-level cache while all panels pass.
        matrix_rows: Rows from which on int8 products go through the matrix unit.
        units_ahead: Units that are unpacked ahead of the matrix unit.
        bf16_pays: Dot products of bfloat16 are faster than float32 multiply-adds.
        biased: Block sums become floats by their initial value (`linear/block_end.py`).
        subtracts_points_up_to: Elements of a block up to which tiles subtract 4-bit points from codes: byte additions leave ports to
            products.
        bracketed_rows: Rows from which on tiles multiply scales and offsets at once (`linear/bracketed.py`); 0: never.
        winograd: When convolutions use minimal filtering; None: never.
        arranged_conv: int8 convolutions order codes for products of bytes (`conv/arrange.py`).
    """

    conv_tile: tuple[int, int] = (2, 4)
    register_totals: int = 8
    prefetching: Prefetching = Prefetching()
    expansion: Expansion | None = None
    chunk_bytes: int = _UNLIMITED
    matrix_rows: int = 0
    units_ahead: int = 0
    bf16_pays: bool = True
    biased: bool = False
    subtracts_points_up_to: int = 0
    bracketed_rows: int = 0
    winograd: Winograd | None = None
    arranged_conv: bool = False

    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        """Return the tiles for M rows of activations: all choices that depend on the format and on M. `codes`: int8 in, int8 out."""
        if geo.format.codebook:  # a look-up takes some fifty instructions
            return Tiling(min(m, 2), 2)
        return Tiling(1, 8) if m == 1 else Tiling(2, 4)

    def locality(self, m: int, inner: Inner, geo: Geometry) -> int | None:
        """Return where tiles of M rows prefetch their own weights to, as `llvm.prefetch` has it.

        3 is the first-level cache, 2 the second, 0 the first alone (`prefetchnta`); None: the CPU's own prefetcher does better.
        """
        return 0 if m <= self.prefetching.streamed_rows else 3

    def expands(self, geo: Geometry) -> bool:
        """Return whether tiles may gain by expanded codes: 4-bit ones, and 8-bit ones in blocks, whose scales are converted once, too."""
        fmt = geo.format
        gains = fmt.bits == 4 or (fmt.zero != "point" and (geo.sparse or isinstance(fmt.block, int)))
        return self.expansion is not None and gains and geo.padded <= self.expansion.longest_block


# x86-64


class _AVX2(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        fmt = geo.format
        # Float offsets take so many instructions at a block's end that expanding is slower.
        if inner == "int8" and self.expands(geo) and fmt.code_bits == 4 and fmt.zero != "offset" and m >= 48 and not codes:
            return Tiling(5, 2, expanded=True)
        # A core of Zen 3 reads 15 GB/s from one stream, however far ahead it prefetches, and 20 to 22 from four. More rows of 8-bit weights
        # do not wait for memory.
        panels = 4 if fmt.bits == 4 or m <= 2 else 1
        if inner == "int8" and has_pair_sums(fmt) and not 2 < m < 6:
            return Tiling(*self.conv_tile, panels)
        if m <= 2:
            return Tiling(m, 4, panels)
        return Tiling(5 if inner == "int8" and fmt.bits == 4 else 6, 2, panels)


class _AVX512(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        return Tiling(*self.conv_tile) if inner == "int8" and has_pair_sums(geo.format) else Tiling(min(m, 6), 2)


class _AVXVNNI(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        return Tiling(m, 4) if m <= 2 else Tiling(min(m, 5 if inner == "int8" else 6), 2)


class _Intel(Tuning):
    """Masks and shifts take slots that dot products could have: more rows share what is unpacked, with totals in memory."""

    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        block, few = geo.padded, m <= (3 if inner == "int8" else 2)
        panels = 4 if few and geo.panel_bytes >= LONG_PANEL else 1
        if inner != "int8":
            return Tiling(min(m, 6), 2, panels)
        if self.expands(geo) and m >= (25 if block < _LONG_BLOCK else 40) and not codes:
            return Tiling(6 if block <= 32 else 12, 2, expanded=True)  # the former's totals are in registers
        if block >= _LONG_BLOCK:
            return Tiling(min(m, 12 if geo.format.bits == 8 else 10), 2, panels)
        if 13 <= m <= 24:  # one tile of one vector takes all rows: weights are read and unpacked once
            return Tiling(m, 1)
        return Tiling(min(m, 12 if block > 32 else 8), 2, panels)


class _AMX(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        return Tiling(min(m, 32), 2)  # four products for four loads of tile registers


class _Zen5(Tuning):
    """Masks and shifts are free and stores are not: tiles have few rows, with totals in registers."""

    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        block = geo.padded
        if inner == "bf16":  # vdpbf16ps takes 6 cycles: 12 sums in turn keep its two ports just busy, if nothing else ever takes one
            return Tiling(min(m, 10), 2)
        if inner == "float":
            return Tiling(min(m, 8 if m <= 8 else 6), 2)
        if m <= 14 and block > 32 and geo.bits == 8 and not geo.sparse:  # one tile, all in registers, waits for memory less than two
            return Tiling(m, 2)
        if block >= _LONG_BLOCK:
            return Tiling(min(m, 10), 2)
        # Totals of more than 6 rows lie in memory, which takes stores at each block's end, and saves reading weights once more.
        if m <= 24 and (block > 32 or (geo.format.bits == 8 and m <= 16)):
            return Tiling(min(m, 10 if m <= 10 else 8), 2)
        return Tiling(min(m, 8 if m <= 8 else 7 if m <= 24 else 6), 2)


class _Zen4(_Zen5):
    """One product of 512 bits a cycle, half as many as Zen 5, and as many other operations."""

    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        if inner != "int8" and m >= (6 if inner == "bf16" else 4):  # products read activations themselves, for nothing
            return Tiling(min(m, 12), 1)
        return super().tile(m, inner, geo, codes=codes)

    def locality(self, m: int, inner: Inner, geo: Geometry) -> int | None:
        four = geo.bits == 4
        rows = m + (four and geo.format.zero == "point")  # subtracting points is as much work as a row
        if inner == "int8" and rows <= (2 if four else 5):
            return None
        return 0 if inner == "int8" and m <= 2 else 2


# Measured on a Zen 3; on an Emerald Rapids with `HALFBYTE_ISA=avx2`, nothing else was faster.
AVX2: Tuning = _AVX2(
    conv_tile=(4, 2), register_totals=4, expansion=Expansion(), winograd=Winograd(direct_rate=28, rate=22), arranged_conv=True
)
# Twice the registers of AVX2, twice as long; not measured, so that expansion and arranged convolutions are left out.
AVX512: Tuning = _AVX512(conv_tile=(10, 2), register_totals=12, winograd=AVX2.winograd)
# The numbers of AVX2; not measured on a CPU whose best instruction set this is.
AVX_VNNI: Tuning = _AVXVNNI(conv_tile=(5, 2), register_totals=4, biased=True)

# Measured on an Emerald Rapids, convolutions on a Sapphire Rapids. vdpbf16ps takes 1.6 times as long as the float32 products it stands for.
INTEL: Tuning = _Intel(
    conv_tile=(12, 2),
    register_totals=12,
    prefetching=Prefetching(distance=4096, stream_distance=1024, sharing_tiles=1, all_tiles=True),
    expansion=Expansion(longest_block=1 << 14, record_bytes=18 << 10, chunk_bytes=3 << 18),
    bf16_pays=False,
    biased=True,
    winograd=Winograd(direct_rate=112, rate=58),
)
# Without GFNI (Cascade Lake), whose affine map of bits unpacks a vector in one instruction, expanding was not measured.
CASCADE_LAKE: Tuning = replace(INTEL, expansion=None)
# Measured on a Zen 5. Runs of Winograd tiles are short, as its second-level cache is half as large as Intel's.
ZEN5: Tuning = _Zen5(
    conv_tile=(12, 2),
    register_totals=12,
    prefetching=Prefetching(streamed_rows=3, sharing_tiles=2, most_sharing=8, sharing_bytes=3 << 18, contiguous=True),
    subtracts_points_up_to=_LONG_BLOCK // 2,
    bracketed_rows=48,
    winograd=Winograd(direct_rate=112, rate=58, tiles=(20, 10)),
)
# Measured on a Zen 4, where a prefetch distance of whole pages is up to a third slower. Convolutions have Zen 5's numbers.
ZEN4: Tuning = _Zen4(
    conv_tile=(12, 2),
    register_totals=12,
    prefetching=replace(ZEN5.prefetching, distance=7 << 10),
    chunk_bytes=1 << 20,
    subtracts_points_up_to=ZEN5.subtracts_points_up_to,
    bracketed_rows=ZEN5.bracketed_rows,
    winograd=ZEN5.winograd,
)
AVX512_VNNI: dict[Core, Tuning] = {"intel": INTEL, "zen4": ZEN4, "zen5": ZEN5}
# Measured on a Sapphire Rapids: up to eight rows are one tile of dot products. The matrix unit's tiles have few registers for totals.
AMX: Tuning = replace(CASCADE_LAKE, matrix_rows=9, bf16_pays=True)
AMX_TILES: Tuning = _AMX(
    conv_tile=(12, 2),
    register_totals=0,
    prefetching=Prefetching(distance=8192, stream_distance=1024, all_tiles=True),
    chunk_bytes=1 << 20,
    units_ahead=1,
    biased=True,
    winograd=INTEL.winograd,
)

# 64-bit Arm and RISC-V: sizes follow from the number and the length of registers. No such CPU was measured.


class _Neon(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        if m <= 2:
            return Tiling(m, 4)
        return Tiling(4, 2) if inner == "int8" else Tiling(min(m, 4), 4)


class _NeonDotprod(_Neon):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        if inner == "int8":
            return Tiling(1, 8) if m == 1 else Tiling(min(m, 5), 4)
        return super().tile(m, inner, geo, codes=codes)


class _NeonI8mm(_NeonDotprod):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        return Tiling(min(m, 8), 2) if inner == "int8" and m > 1 else super().tile(m, inner, geo, codes=codes)


class _SVE(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        vectors = self.conv_tile[1]
        return Tiling(min(m, (20 if inner == "int8" else 16) // vectors), vectors)


class _Scalar(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        return Tiling(1, 1)


class _RVV(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        if m == 1:
            return Tiling(1, 4 if inner == "int8" else 2)
        return Tiling(2 if inner == "int8" else min(m, 4), 2)


NEON: Tuning = _Neon(conv_tile=(4, 2))
NEON_DOTPROD: Tuning = _NeonDotprod(conv_tile=(5, 4))
NEON_I8MM: Tuning = _NeonI8mm(conv_tile=(8, 2))
RV64GC: Tuning = _Scalar(conv_tile=(1, 1))
RVV: Tuning = _RVV(conv_tile=(2, 2), register_totals=4)


def sve(lanes: int) -> Tuning:
    """Return the numbers for SVE with vectors of so many floats."""
    vectors = min(4, PANEL // lanes)
    return _SVE(conv_tile=(20 // vectors, vectors))

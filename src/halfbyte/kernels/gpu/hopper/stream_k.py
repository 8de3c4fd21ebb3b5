"""The tile schedule of a persistent grid: whole tiles in turn, then equal shares of the K slabs of the tiles that are left over (Osama et
al., Stream-K, 2023). `S` has `rows` and `block_m`; a tile is 2 * S.rows rows of the weight by S.block_m rows of x."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.gpu.arithmetic import GROUP
from halfbyte.kernels.gpu.values import Value

_MOST = gl.constexpr(2**31 - 1)


class Share(NamedTuple):
    """A program's work, in K slabs.

    Attributes:
        end: How many K slabs it has in all.
        whole_tiles: How many tiles it has alone.
        start: Its first slab among those of the tiles that are cut.
        rest: The K slabs of all tiles that are cut.
    """

    end: Value
    whole_tiles: Value
    start: Value
    rest: Value


class Divisors(NamedTuple):
    """Divisors of `segment_at` and _MOST divided by them: of a tile's K slabs, a group's tiles, and the last group's tiles along M."""

    inverse_slabs: Value
    group_tiles: Value
    inverse_group: Value
    tiles_m: Value
    inverse_last: Value


class Segment(NamedTuple):
    """Consecutive K slabs of one tile: the tile's number and its place along M and N, the first slab, and their number."""

    tile: Value
    pm: Value
    pn: Value
    first: Value
    count: Value


@gluon.jit
def share_of_program(shape, S: gl.constexpr):
    """Return the `Share` of this program."""
    ROWS: gl.constexpr = S.rows
    tiles = gl.cdiv(shape.n, 2 * ROWS) * gl.cdiv(shape.m, S.block_m)
    whole_tiles = tiles // gl.num_programs(0)
    rest = (tiles - whole_tiles * gl.num_programs(0)) * shape.k_slabs
    sharers = sharers_of(rest, shape)
    start = gl.minimum(gl.program_id(0), sharers) * rest // sharers
    end = gl.minimum(gl.program_id(0) + 1, sharers) * rest // sharers
    return Share(whole_tiles * shape.k_slabs + end - start, whole_tiles, start, rest)


@gluon.jit
def sharers_of(rest, shape):
    """Return how many programs share the tiles that are cut: a whole number of them per tile where that leaves few idle."""
    most = gl.maximum(gl.minimum(rest, gl.num_programs(0)), 1)
    tiles = gl.maximum(rest // shape.k_slabs, 1)
    even = gl.minimum(gl.num_programs(0) // tiles, shape.k_slabs) * tiles
    return gl.where((rest > 0) & (8 * even >= 7 * most), even, most)


@gluon.jit
def _divided(n, by, inverse):
    """Return n // by, with `inverse` = _MOST // by: the division instruction takes many times as long, and wgmma would wait for it."""
    q = gl.umulhi(n + n, inverse)
    return gl.where(n - q * by >= by, q + 1, q)


@gluon.jit
def divisors_of(shape, S: gl.constexpr):
    """Return the `Divisors` for `segment_at`."""
    tiles_m = gl.cdiv(shape.m, S.block_m)
    width = GROUP * gl.cdiv(shape.n, 2 * S.rows)
    return Divisors(_MOST // shape.k_slabs, width, _MOST // width, tiles_m, _MOST // gl.maximum(tiles_m % GROUP, 1))


@gluon.jit
def segment_at(at, share, divisors, shape):
    """Return the `Segment` that begins with this program's K slab `at`.

    GROUP tiles along M follow each other for each tile along N, so that both operands are found in the L2 cache again.
    """
    inside = at < share.whole_tiles * shape.k_slabs
    slab = gl.where(inside, at, share.start + at - share.whole_tiles * shape.k_slabs)
    number = _divided(slab, shape.k_slabs, divisors.inverse_slabs)
    tile = gl.where(inside, number * gl.num_programs(0) + gl.program_id(0), share.whole_tiles * gl.num_programs(0) + number)
    first = slab - number * shape.k_slabs
    count = gl.minimum(shape.k_slabs - first, share.end - at)
    group = _divided(tile, divisors.group_tiles, divisors.inverse_group)
    within = tile - group * divisors.group_tiles
    size = gl.minimum(divisors.tiles_m - group * GROUP, GROUP)
    pn = _divided(within, size, gl.where(size == GROUP, _MOST // GROUP, divisors.inverse_last))
    return Segment(tile, group * GROUP + within - pn * size, pn, first, count)

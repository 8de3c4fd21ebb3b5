"""The tile schedule of persistent kernels for Hopper: every K slab of every tile is computed once, whatever the sizes."""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass

import gluon_interpreter
import pytest
import torch
import triton
from hypothesis import given, settings
from hypothesis import strategies as st
from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.gpu.hopper.ring import Shape
from halfbyte.kernels.gpu.hopper.stream_k import divisors_of, segment_at, share_of_program

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the schedule itself runs here")

MOST_SEGMENTS = gl.constexpr(256)  # of a program


@dataclass(frozen=True)
class Static:
    rows: int
    block_m: int


@gluon.jit
def _segments(found, shape, S: gl.constexpr):
    share = share_of_program(shape, S)
    divisors = divisors_of(shape, S)
    place = found + gl.program_id(0) * MOST_SEGMENTS * 5
    at = share.end - share.end
    while at < share.end:
        segment = segment_at(at, share, divisors, shape)
        gl.store(place, segment.tile)
        gl.store(place + 1, segment.pm)
        gl.store(place + 2, segment.pn)
        gl.store(place + 3, segment.first)
        gl.store(place + 4, segment.count)
        at += segment.count
        place += 5


def segments(m: int, n: int, k_slabs: int, programs: int, static: Static) -> list[list[list[int]]]:
    """[tile, pm, pn, first slab, slabs] of each program's segments, in their order."""
    found = torch.zeros(programs, MOST_SEGMENTS.value, 5, dtype=torch.int32)
    gluon_interpreter.run(_segments, (programs,), found, Shape(m, n, n, k_slabs), S=static)
    return [[segment for segment in program.tolist() if segment[4]] for program in found]


@settings(max_examples=40, deadline=None)
@given(m=st.integers(1, 700), n=st.integers(1, 900), k_slabs=st.integers(1, 9), programs=st.integers(1, 12))
def test_each_slab_of_each_tile_is_computed_once(m: int, n: int, k_slabs: int, programs: int) -> None:
    static = Static(rows=64, block_m=64)
    found = [segment for program in segments(m, n, k_slabs, programs, static) for segment in program]
    tiles_m, tiles_n = -(-m // static.block_m), -(-n // (2 * static.rows))
    slabs = Counter((pm, pn, slab) for _, pm, pn, first, count in found for slab in range(first, first + count))
    assert slabs == Counter((pm, pn, slab) for pm in range(tiles_m) for pn in range(tiles_n) for slab in range(k_slabs))
    assert len({(tile, pm, pn) for tile, pm, pn, _, _ in found}) == tiles_m * tiles_n, "a tile has one place"


def test_programs_have_equal_shares_of_the_tiles_that_are_cut() -> None:
    counts = [sum(count for *_, count in program) for program in segments(64, 128 * 5, 8, 4, Static(64, 64))]
    assert counts == [10, 10, 10, 10]


def test_whole_tiles_come_before_shares() -> None:
    for program in segments(64, 128 * 6, 8, 4, Static(64, 64)):
        assert program[0][3:] == [0, 8]

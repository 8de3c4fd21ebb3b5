"""Reduction of partial sums across programs that share a tile of a split-K or stream-K product: float32 or int32 in a workspace in global
memory.

Sums go through the workspace 16 bytes per thread, in the layout of `pack_sums`. Arrival counters are zero before and after each kernel.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.gpu.hopper.epilogue import QUARTERS, quarters_of, write_rows
from halfbyte.kernels.gpu.hopper.gluon_compat import FEWER_REGISTERS, thread_barrier
from halfbyte.kernels.gpu.hopper.stream_k import sharers_of

_MAX_POLLS = gl.constexpr(256)  # of an arrival counter, each a round trip to the L2 cache


@gluon.constexpr_function
def _packed_layout(layout):
    split = layout is not None and layout.warps_per_cta[1] == 2  # warps that have every other 8 columns
    return gl.BlockedLayout([1, 4], [1, 32], [2, 2] if split else [1, 4], [0, 1] if split else [1, 0])


@gluon.jit
def pack_sums(acc):
    """Reorder sums [rows, columns] to [rows * columns / 512, 512], where each thread has four consecutive ones. Moves no data."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    PACKED: gl.constexpr = _packed_layout(acc.type.layout)
    packed = acc.reshape([ROWS // 64, 4, 2, 8, WIDTH // 8, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    return gl.convert_layout(packed.reshape([ROWS * WIDTH // 512, 512]), PACKED, assert_trivial=True)


@gluon.jit
def unpack_sums(packed, ROWS: gl.constexpr):
    """Return the inverse of `pack_sums`, [ROWS, columns]."""
    WIDTH: gl.constexpr = packed.shape[0] * 512 // ROWS
    acc = packed.reshape([ROWS // 64, WIDTH // 8, 4, 8, 4, 2, 2]).permute([0, 2, 5, 3, 1, 4, 6])
    return acc.reshape([ROWS, WIDTH])


@gluon.jit
def sharers_of_tile(tile, rest, shape):
    """Return the first program that shares a tile, and the number of the others.

    Args:
        tile: Its number among the tiles that are cut.
        rest: The K slabs of all of these.
    """
    sharers = sharers_of(rest, shape)
    slab = tile * shape.k_slabs
    leader = ((slab + 1) * sharers - 1) // rest  # the program that has the tile's first K slab
    return leader, ((slab + shape.k_slabs) * sharers - 1) // rest - leader


@gluon.jit
def reduce_tile(acc, outputs, first_n, first_m, tile, sharing, busy, scratch, shape, HALF: gl.constexpr, S: gl.constexpr):
    """Reduce the partial sums of the programs that share a tile, each of which adds up some of the columns, and write y.

    A program that is not `busy` with another tile polls the arrival counter for the other programs, up to a limit, as they may not be able
    to start before it ends. Then, or when busy, it leaves its columns to the last program to arrive.

    Args:
        acc: float32 [rows, block_m], this program's sums.
        sharing: What `sharers_of_tile` returned.
        scratch: The workspace and two arrival counters per tile and warpgroup.
    """
    leader, others = sharing
    ROWS: gl.constexpr = S.rows
    BM: gl.constexpr = S.block_m
    WIDTH: gl.constexpr = BM // QUARTERS
    SMALL: gl.constexpr = ROWS * BM <= 8192
    SCARCE: gl.constexpr = FEWER_REGISTERS and not (SMALL and S.registers is None)
    TOGETHER: gl.constexpr = 2 if SMALL and not SCARCE else 1  # quarters that are loaded together: as many as there are registers for
    PROGRAMS: gl.constexpr = 1 if SCARCE and not SMALL else 2  # and programs
    LANES: gl.constexpr = gl.BlockedLayout([1, 4], [1, 32], [1, 4], [1, 0])
    rank = gl.program_id(0) - leader
    reducers = gl.minimum(others + 1, QUARTERS)  # programs that add up columns
    # A program has two slots: one for the end of a tile, one for the beginning of another (the leader's).
    slot_stride: gl.constexpr = 2 * ROWS * BM
    slot = scratch[0] + (leader.to(gl.int64) * 4 + HALF) * (ROWS * BM)
    slot += gl.expand_dims(gl.arange(0, ROWS * WIDTH // 512, layout=gl.SliceLayout(1, LANES)), 1) * 512
    slot += gl.expand_dims(gl.arange(0, 512, layout=gl.SliceLayout(0, LANES)), 0)
    rank_slot = slot + gl.where(rank == 0, 1, 2 * rank) * slot_stride
    quarters = quarters_of(acc)
    for i in gl.static_range(QUARTERS):
        gl.store(rank_slot + i * (ROWS * WIDTH), pack_sums(quarters[i]), mask=busy | (i * reducers // QUARTERS != rank))
    thread_barrier()  # orders this warpgroup's stores before its arrival
    # The counter's low 16 bits count arrivals; bit 16 + i says that reducer i leaves its columns to the last program to arrive.
    counter = scratch[1] + (tile * 2 + HALF) * 2
    left_to_last = gl.where(rank < reducers, 1 << (16 + gl.minimum(rank, QUARTERS)), 0)
    before = gl.atomic_add(counter, gl.where(busy, left_to_last, 0) + 1, sem="acq_rel")
    arrived = before + 1
    if (left_to_last > 0) & (not busy):
        polls = 0
        while (arrived % (1 << 16) <= others) & (polls < _MAX_POLLS):
            # One atomic operation for all warps, so that they agree on its value. Loads after it bypass the L1 cache (.cg).
            arrived = gl.atomic_add(counter, 0, sem="relaxed")
            polls += 1
        if arrived % (1 << 16) <= others:
            for i in gl.static_range(QUARTERS):
                gl.store(rank_slot + i * (ROWS * WIDTH), pack_sums(quarters[i]), mask=i * reducers // QUARTERS == rank)
            thread_barrier()
            arrived = gl.atomic_add(counter, left_to_last, sem="acq_rel")
    thread_barrier()
    for i in gl.static_range(0, QUARTERS, TOGETHER):
        first = _reduces(i, rank, reducers, others, arrived, before)
        second = _reduces(i + TOGETHER - 1, rank, reducers, others, arrived, before)
        if first | second:
            left, right = gl.zeros_like(pack_sums(quarters[i])), gl.zeros_like(pack_sums(quarters[i + TOGETHER - 1]))
            for j in range(0, others + 1, PROGRAMS):
                left = _add_sums(left, pack_sums(quarters[i]), slot + i * (ROWS * WIDTH), slot_stride, j, rank, others, first, PROGRAMS)
                if TOGETHER == 2:
                    right = _add_sums(
                        right, pack_sums(quarters[i + 1]), slot + (i + 1) * (ROWS * WIDTH), slot_stride, j, rank, others, second, PROGRAMS
                    )
            if first:
                total = gl.convert_layout(unpack_sums(left, ROWS), quarters[i].type.layout, assert_trivial=True)
                write_rows(total, outputs, first_n, first_m + i * WIDTH, None, shape, S)
            if TOGETHER == 2:
                if second:
                    total = gl.convert_layout(unpack_sums(right, ROWS), quarters[i].type.layout, assert_trivial=True)
                    write_rows(total, outputs, first_n, first_m + (i + 1) * WIDTH, None, shape, S)
    if gl.atomic_add(counter + 1, 1, sem="relaxed") == others:  # all programs have read the first counter
        gl.store(counter, 0)
        gl.store(counter + 1, 0)


@gluon.jit
def _reduces(quarter, rank, reducers, others, arrived, before):
    """Return whether a program adds up this quarter of the columns: its own, or one that was left to it as the last to arrive."""
    owner = quarter * reducers // QUARTERS
    owned = (owner == rank) & (arrived % (1 << 16) > others)
    return owned | ((before % (1 << 16) == others) & ((before >> (16 + owner)) % 2 == 1))


@gluon.jit
def _add_sums(total, rank_sums, slot, slot_stride, j, rank, others, wanted, PROGRAMS: gl.constexpr):
    """Return total + the sums of PROGRAMS programs, 1 or 2, from j on, of which this one's are in registers."""
    one = gl.load(slot + gl.where(j == 0, 1, 2 * j) * slot_stride, mask=(j != rank) & wanted, other=0.0, cache_modifier=".cg")
    if PROGRAMS == 1:
        return total + gl.where(j == rank, rank_sums, one)
    else:
        two = gl.load(slot + (2 * j + 2) * slot_stride, mask=(j < others) & (j + 1 != rank) & wanted, other=0.0, cache_modifier=".cg")
        return total + gl.where(j == rank, rank_sums, one) + gl.where(j + 1 == rank, rank_sums, two)


# Sums that a program polls for. A word in memory is 0 until it arrives: sums are stored xor a pattern that no sum has.


@gluon.jit
def _absent_pattern(DTYPE: gl.constexpr):
    """Return the bits of no sum: a NaN that arithmetic does not give, or the least integer."""
    PATTERN: gl.constexpr = -(2**31) if DTYPE == gl.int32 else -1
    return PATTERN


@gluon.jit
def send_sums(slot, sums):
    """Store sums for `poll_sums`; no word that is stored is 0."""
    bits = sums.to(gl.int32, bitcast=True)
    pattern = _absent_pattern(sums.dtype)
    gl.store(slot, gl.where(bits == pattern, bits ^ 1, bits) ^ pattern)


@gluon.jit
def poll_sums(slot, others, like, SLOT_STRIDE: gl.constexpr, MOST: gl.constexpr):
    """Wait for the sums that `others` <= MOST programs send, and add them up. Their memory is zero again afterwards.

    Args:
        slot: [1, 512] pointers to where the first program stores its sums.
        like: Packed sums of this program.
        SLOT_STRIDE: Distance of the slots of programs.
    """
    LANES: gl.constexpr = like.type.layout
    PATTERN: gl.constexpr = _absent_pattern(like.dtype)
    PIECES: gl.constexpr = like.shape[0]
    piece = gl.expand_dims(gl.arange(0, MOST * PIECES, layout=gl.SliceLayout(1, LANES)), 1)
    slot += piece // PIECES * SLOT_STRIDE + piece % PIECES * 512
    sent = piece // PIECES < others
    bits = gl.load(slot, mask=sent, other=PATTERN, volatile=True)
    while gl.max(gl.max((bits == 0).to(gl.int32), 0), 0) > 0:  # of a thread's words first
        bits = gl.load(slot, mask=sent, other=PATTERN, volatile=True)
    gl.store(slot, gl.zeros_like(bits), mask=sent)
    words = (bits ^ PATTERN).to(like.dtype, bitcast=True).reshape([MOST, PIECES, 512])
    return gl.convert_layout(gl.sum(words, 0), LANES, assert_trivial=True)

"""Sums over K on Hopper's integer tensor cores, for a panel of 64 rows n of the weight and some rows m of x: the loop of `int8_tile.py`.

    `sum_whole`    sum over k of q[n, k] * x[m, k]                       int32, where both operands have one scale along K
    `sum_blocks`   sum over blocks b of s[n, b] * C[n, m, b] (* a[m, b])    float32; C: the integer sum of a block, a K slab of 128

The accumulators of wgmma are converted to float without I2F, whose rate would be the limit (`gemm_int8.py`): they start so that their bits
are a float. The integers of one half of the rows of x are converted while the wgmma of the other half run, and those of the other
warpgroup.

    one by one   start: the bits of MAGIC = 1.5 * 2^23. Read as floats they are MAGIC + C, and of a scale s of 11 bits
                 fma(MAGIC + C, s, -MAGIC * s) = s * C, rounded once, as the product is exact before the addition.
    chained      where a row of x has one scale. Four blocks are accumulated from one start, A[i] = 2^23 + C[1] + … + C[i], |C| < 2^21:
                     sum(s[i] * C[i]) = sum(A[i] * (s[i] - s[i+1])) - 2^23 * s[1]         s[5] = 0
                 which is one instruction for each. The bits of an integer 0 <= p < 2^24 are the float p * 2^-149: sums are kept times
                 2^-38, and those under 2^-88 lose bits. float32 sums next to 2^24 * s[i] lose what `reference.error_bound` says.

`S` is an `int8_tile.Static`, `ring` an `int8_tile.Ring`; `zeros` are a pointer to the zeros, the rows of the weight and N padded.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait

from halfbyte.kernels.gpu.arithmetic import MAGIC
from halfbyte.kernels.gpu.hopper.gluon_compat import FEWER_REGISTERS
from halfbyte.kernels.gpu.hopper.ring import next_stage
from halfbyte.kernels.gpu.hopper.weights import load_nibbles

_DOWN, _UP = gl.constexpr(2.0**-38), gl.constexpr(2.0**38)  # factors of chained sums, and back
_FROM_BITS = gl.constexpr(2.0 ** (149 - 38))  # integers read as floats -> integers times _DOWN
_START = gl.constexpr(2.0 ** (23 - 38))  # a chain's start, times _DOWN


@gluon.jit
def _load_weight(ws, S: gl.constexpr):
    """Return a panel's slab as wgmma takes it: bytes in shared memory; nibbles as 16 * (u - 8) in registers, low and high ones [64, 64]
    each."""
    if S.bits == 4:
        OPERAND: gl.constexpr = S.operand
        return load_nibbles(ws, OPERAND)
    else:
        return ws


@gluon.jit
def _start_value(like, S: gl.constexpr):
    """Return where a block's integers start: 2^23, or the bits of 1.5 * 2^23. A new value each time: the compiler would compute one that
    two wgmma share once and copy it, and let the second wait for the first."""
    TEXT: gl.constexpr = "mov.b32 $0, 0x00800000;" if S.chained else "mov.b32 $0, 0x4B400000;"
    return gl.inline_asm_elementwise(TEXT, "=r,f", [like], dtype=gl.int32, is_pure=False, pack=1)


@gluon.jit
def _start_products(xt, w, acc, S: gl.constexpr):
    """Start acc + the integers of a K slab of some rows of x; w is what `_load_weight` returned."""
    if S.bits == 8:
        return warpgroup_mma(w, xt.permute([1, 0]), acc, is_async=True)
    else:
        acc = warpgroup_mma(w[0], xt.slice(0, 64, dim=1).permute([1, 0]), acc, is_async=True)
        return warpgroup_mma(w[1], xt.slice(64, 64, dim=1).permute([1, 0]), acc, is_async=True)


@gluon.jit
def sum_whole(ring, stage, phase, R, PANEL: gl.constexpr, S: gl.constexpr):
    """Return the int32 sums of R K slabs, and the stage and phase after them."""
    ROWS: gl.constexpr = S.mma_rows
    MMA: gl.constexpr = S.sums
    acc = gl.zeros([64, ROWS], gl.int32, layout=MMA)
    single = R
    if S.overlapped and S.bits == 4:  # the next slab's weights are converted while one is multiplied
        for _ in range(R // 2):
            acc = _add_slab_whole(ring, stage, phase, acc, PANEL, S)
            release = ring.empty.index(stage)
            stage, phase = next_stage(stage, phase, S.stages)
            acc = _add_slab_whole(ring, stage, phase, acc, PANEL, S)
            acc = warpgroup_mma_wait(2, deps=[acc])
            mbarrier.arrive(release, count=1)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, S.stages)
        single = R % 2
    if S.overlapped and S.bits == 8:  # the next slab's products start before the previous ones end
        for r in range(R):
            acc = _add_slab_whole(ring, stage, phase, acc, PANEL, S)
            acc = warpgroup_mma_wait(1, deps=[acc])
            # Not a variable for the previous stage: Triton 3.6 would keep its first value.
            mbarrier.arrive(ring.empty.index(gl.where(stage == 0, S.stages, stage) - 1), count=1, pred=r > 0)
            stage, phase = next_stage(stage, phase, S.stages)
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(ring.empty.index(gl.where(stage == 0, S.stages, stage) - 1), count=1)
    else:
        for _ in range(single):
            acc = _add_slab_whole(ring, stage, phase, acc, PANEL, S)
            acc = warpgroup_mma_wait(0, deps=[acc])
            mbarrier.arrive(ring.empty.index(stage), count=1)
            stage, phase = next_stage(stage, phase, S.stages)
    return acc, stage, phase


@gluon.jit
def _add_slab_whole(ring, stage, phase, acc, PANEL: gl.constexpr, S: gl.constexpr):
    """Start acc + the products of the slab of a stage."""
    xt = ring.x.index(stage)
    if S.stage_rows > 0:
        xt = xt.slice(0, S.block_m, dim=0)
    mbarrier.wait(ring.full.index(stage), phase)
    return _start_products(xt, _load_weight(ring.weight.index(stage * S.panels + PANEL), S), acc, S)


@gluon.jit
def sum_blocks(ring, stage, phase, first, count, zeros, PANEL: gl.constexpr, S: gl.constexpr):
    """Return the scaled float32 sums of `count` K slabs from `first` on, in two halves of the rows of x, and the stage and phase after
    them.

    While one half's wgmma run, the other's integers are converted.
    """
    ROWS: gl.constexpr = S.epilogue_rows
    MMA: gl.constexpr = S.sums
    left = gl.zeros([64, ROWS], gl.float32, layout=MMA)
    right = left
    end = first + count
    if S.chained:
        whole = first + count // 4 * 4
        for r in range(first, whole, 4):
            left, right, stage, phase = _add_group(ring, stage, phase, r, left, right, zeros, PANEL, 4, S)
        for r in range(whole, end):
            left, right, stage, phase = _add_group(ring, stage, phase, r, left, right, zeros, PANEL, 1, S)
    else:
        for r in range(first, end):
            left, right, stage, phase = _add_slab(ring, stage, phase, r, left, right, zeros, PANEL, S)
    if S.chained:
        left *= _UP
        right *= _UP
    return left, right, stage, phase


@gluon.jit
def _release(bar, READ: gl.constexpr):
    """Release a stage. If scales or sums of x were READ from it late, a fence orders these loads before TMA's writes: without it a load
    may still be in flight, on an H200 once in some thousand tiles of 64 rows."""
    if READ:
        fence_async_shared()
    mbarrier.arrive(bar, count=1)


@gluon.jit
def _add_slab(ring, stage, phase, r, left, right, zeros, PANEL: gl.constexpr, S: gl.constexpr):
    """Add a K slab: the wgmma of one half start before the integers of the other are converted."""
    xs, ws, a, m, s, _full, _empty = ring
    HALF: gl.constexpr = S.epilogue_rows
    GROUPS: gl.constexpr = 2 if S.bits == 4 else 1  # of wgmma per half
    LATE: gl.constexpr = S.zero != "none" or not S.row_scale
    mbarrier.wait(ring.full.index(stage), phase)
    w = _load_weight(ws.index(stage * S.panels + PANEL), S)
    pl = _start_products(xs.index(stage).slice(0, HALF, dim=0), w, _start_value(left, S), S)
    pr = _start_products(xs.index(stage).slice(HALF, HALF, dim=0), w, _start_value(left, S), S)
    w_params = _weight_params(s.index(stage * S.panels + PANEL), zeros, r, S)
    left_params = _x_params(a.index(stage), m.index(stage), w_params[0], 0, S)
    if not FEWER_REGISTERS:
        right_params = _x_params(a.index(stage), m.index(stage), w_params[0], HALF, S)
    pl = warpgroup_mma_wait(GROUPS, deps=[pl])
    left = _add_scaled(left, pl, w_params, left_params, S)
    if FEWER_REGISTERS:
        right_params = _x_params(a.index(stage), m.index(stage), w_params[0], HALF, S)
    pr = warpgroup_mma_wait(0, deps=[pr])
    _release(ring.empty.index(stage), LATE)
    right = _add_scaled(right, pr, w_params, right_params, S)
    stage, phase = next_stage(stage, phase, S.stages)
    return left, right, stage, phase


@gluon.jit
def _add_group(
    ring, stage, phase, r, left, right, zeros, PANEL: gl.constexpr, COUNT: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Add COUNT <= 4 K slabs as one chain, times _DOWN: while a slab's integers are converted, the next one's wgmma run. (The loop is
    unrolled: around a real one ptxas would let them wait for each other.)"""
    xs, ws, _a, m, s, _full, _empty = ring
    HALF: gl.constexpr = S.epilogue_rows
    GROUPS: gl.constexpr = 2 if S.bits == 4 else 1  # of wgmma per half and K slab
    LATE: gl.constexpr = S.zero != "none"
    MMA: gl.constexpr = S.sums
    mbarrier.wait(ring.full.index(stage), phase)
    w = _load_weight(ws.index(stage * S.panels + PANEL), S)
    pl = _start_products(xs.index(stage).slice(0, HALF, dim=0), w, _start_value(left, S), S)
    pr = _start_products(xs.index(stage).slice(HALF, HALF, dim=0), w, _start_value(left, S), S)
    scale, shift = _scale_and_shift(s.index(stage * S.panels + PANEL), zeros, r, S)
    left -= scale * _START
    right -= scale * _START
    for i in gl.static_range(COUNT):
        if LATE:  # while the products run
            left = gl.fma(shift, m.index(stage).slice(0, HALF, dim=1).load(MMA), left)
            right = gl.fma(shift, m.index(stage).slice(HALF, HALF, dim=1).load(MMA), right)
        release = ring.empty.index(stage)
        stage, phase = next_stage(stage, phase, S.stages)
        if i + 1 < COUNT:
            mbarrier.wait(ring.full.index(stage), phase)
            w = _load_weight(ws.index(stage * S.panels + PANEL), S)
            scale_after, shift_after = _scale_and_shift(s.index(stage * S.panels + PANEL), zeros, r + i + 1, S)
            step = (scale - scale_after) * _FROM_BITS
            pl = warpgroup_mma_wait(GROUPS, deps=[pl])
            left = _add_step(left, pl, step)
            pl = _start_products(xs.index(stage).slice(0, HALF, dim=0), w, pl, S)
            pr = warpgroup_mma_wait(GROUPS, deps=[pr])
            _release(release, LATE)
            right = _add_step(right, pr, step)
            pr = _start_products(xs.index(stage).slice(HALF, HALF, dim=0), w, pr, S)
            scale = scale_after
            shift = shift_after
        else:
            step = scale * _FROM_BITS
            pl = warpgroup_mma_wait(GROUPS, deps=[pl])
            left = _add_step(left, pl, step)
            pr = warpgroup_mma_wait(0, deps=[pr])
            _release(release, LATE)
            right = _add_step(right, pr, step)
    return left, right, stage, phase


@gluon.jit
def _scale_and_shift(s, zeros, row, S: gl.constexpr):
    """Return a slab's scale, and the factor of its sums of codes of x by its zero, times _DOWN."""
    scale, zero = _weight_params(s, zeros, row, S)
    scale = scale.to(gl.float32)
    shift = scale
    if S.zero == "point":
        shift = (8 - zero.to(gl.float32)) * 16 * scale if S.bits == 4 else (128 - zero.to(gl.float32)) * scale
    elif S.zero == "offset":
        shift = (8 * scale + zero.to(gl.float32)) * 16 if S.bits == 4 else 128 * scale + zero.to(gl.float32)
    return scale, shift * _DOWN


@gluon.jit
def _add_step(total, p, step):
    """Return total + integers p that start at 2^23, times the difference of their scales."""
    return _keep_order(gl.fma(p.to(gl.float32, bitcast=True), step, total))


@gluon.jit
def _keep_order(total):
    """Return total without an instruction, but in order: the integers were read before the next wgmma starts and takes their registers."""
    return gl.inline_asm_elementwise("// done", "=f,0", [total], dtype=gl.float32, is_pure=False, pack=1)


@gluon.jit
def _weight_params(s, zeros, row, S: gl.constexpr):
    """Load scale and zero (if there is one) of a slab, which is `row` of the zeros: [64, 1]."""
    MMA: gl.constexpr = S.sums
    scale = s.permute([1, 0]).load(MMA)
    zero = scale
    if S.zero != "none":  # TMA does not write lines of 64 bytes
        zero = gl.expand_dims(gl.load(zeros[0] + row * zeros[2] + zeros[1]), 1)
    return scale, zero


@gluon.jit
def _x_params(a, m, placeholder, FIRST: gl.constexpr, S: gl.constexpr):
    """Load a slab's scale and sums of half of the rows: [1, epilogue_rows]; `placeholder` where they are not needed."""
    ROWS: gl.constexpr = S.epilogue_rows
    MMA: gl.constexpr = S.sums
    scale = placeholder
    if not S.row_scale:
        scale = a.slice(FIRST, ROWS, dim=1).load(MMA)
    x_sums = scale
    if S.zero != "none":
        x_sums = m.slice(FIRST, ROWS, dim=1).load(MMA)
    return scale, x_sums


@gluon.jit
def _add_scaled(total, p, w, x, S: gl.constexpr):
    """Return total + integers p that start at the bits of 1.5 * 2^23, scaled; as `gemm_int8._add_scaled`."""
    v = p.to(gl.float32, bitcast=True)
    s = w[0].to(gl.float32)
    if S.zero == "none" and w[0].dtype == gl.float16:
        v = gl.fma(v, s, s * -MAGIC)
    else:
        v = scale_sums(v - MAGIC, s, w[1], x[1], S)
    if S.row_scale:
        total += v
    else:
        total += v * x[0]
    return _keep_order(total)


@gluon.jit
def scale_sums(v, s, z, m, S: gl.constexpr):
    """Return sums v of 16 * (u - 8) or u - 128 times the codes of x, as floats, times the weight's scale, and its zero's term."""
    if S.zero != "none":
        zero_point = gl.full_like(s, 0) if S.zero == "offset" else z.to(gl.float32)
        zero_point = (zero_point - 8) * 16 if S.bits == 4 else zero_point - 128
        v -= zero_point * m
    v *= s
    if S.zero == "offset":
        v += z.to(gl.float32) * (16 if S.bits == 4 else 1) * m
    return v

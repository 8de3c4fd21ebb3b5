"""The epilogue of Hopper's kernels: sums in wgmma's layout -> y = clamp(sum + bias + residual), written by threads or by TMA."""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared

from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.hopper.gluon_compat import async_store
from halfbyte.kernels.gpu.values import Value

QUARTERS = gl.constexpr(4)  # of a tile's columns, written one after the other
OUT = gl.constexpr(gl.BlockedLayout([8, 1], [2, 16], [4, 1], [0, 1]))  # of y, [rows of the weight, rows of x], when threads write it


class Outputs(NamedTuple):
    """y [M, N] and what the epilogue reads.

    Attributes:
        y: Pointer.
        y_tma: TMA descriptor of y; None where threads write it.
        bias: float32 [N] or None.
        residual: [M, N] in y's type, or None.
        low: Lower bound, if S.clamp.
        high: Upper bound.
    """

    y: Value
    y_tma: Value
    bias: Value
    residual: Value
    low: Value
    high: Value


@gluon.constexpr_function
def sums_layout(width, depth=16):
    """Return the layout of a warpgroup's sums [rows, width]; `depth`: elements along K of an instruction, 32 for integers."""
    return gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, width, depth])


@gluon.jit
def quarters_of(total):
    """Split the columns of sums in four: fewer sums at a time leave more registers for addresses."""
    left, right = halves_of(total)
    return halves_of(left) + halves_of(right)


@gluon.jit
def halves_of(total):
    """Split the columns of a warpgroup's sums in two."""
    WIDTH: gl.constexpr = total.shape[1] // 2
    MMA: gl.constexpr = sums_layout(WIDTH, 32 if total.dtype == gl.int32 else 16)
    left, right = total.reshape([total.shape[0], 2, WIDTH]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, MMA, assert_trivial=True), gl.convert_layout(right, MMA, assert_trivial=True)


@gluon.jit
def write_rows(total, outputs, first_n, first_m, row_ids, shape, S: gl.constexpr):
    """Write y of sums [rows, columns] with threads, which exchange only 16 bits per element, so that the shared memory fits next to
    the ring.

    Args:
        total: float32, in wgmma's layout.
        outputs: `Outputs`.
        first_n: First row of the weight.
        first_m: First row of x, if `row_ids` is None.
        row_ids: [columns] The rows of y, -1 for none; None: consecutive ones.
    """
    ROWS: gl.constexpr = S.rows
    WIDTH: gl.constexpr = total.shape[1]
    rn = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, OUT))
    if row_ids is None:
        rm = first_m + gl.arange(0, WIDTH, layout=gl.SliceLayout(0, OUT))
        inside = rm < shape.m
    else:
        rm = row_ids
        inside = rm >= 0
    mask = gl.expand_dims(rn < shape.n, 1) & gl.expand_dims(inside, 0)
    at = gl.expand_dims(rm, 0).to(gl.int64) * shape.n + gl.expand_dims(rn, 1)
    store_masked(total, outputs, first_n, at, mask, shape.n, OUT, S)


@gluon.jit
def store_masked(total, outputs, first_n, at, mask, N, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Store y of sums [rows, columns] at the elements `at` of y where `mask` holds; both are in LAYOUT."""
    ROWS: gl.constexpr = total.shape[0]
    MMA: gl.constexpr = total.type.layout
    DTYPE: gl.constexpr = outputs.y.dtype.element_ty
    row = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    if outputs.residual is not None:
        total += gl.convert_layout(gl.load(outputs.residual + at, mask=mask, other=0.0), MMA).to(gl.float32)
    y = finish(total, (outputs.bias, None), row, None, N, outputs.low, outputs.high, S.clamp, DTYPE, None)
    gl.store(outputs.y + at, gl.convert_layout(y, LAYOUT), mask=mask)


@gluon.jit
def send_tile(acc, outputs, stage, first_n, first_m, shape, HALF: gl.constexpr, S: gl.constexpr):
    """Write y of a warpgroup's sums by TMA, from a stage of x."""
    ROWS: gl.constexpr = S.rows
    MMA: gl.constexpr = acc.type.layout
    row = first_n + gl.arange(0, ROWS, layout=gl.SliceLayout(1, MMA))
    y = finish(acc, (outputs.bias, None), row, None, shape.n, outputs.low, outputs.high, S.clamp, outputs.y_tma.dtype, None)
    stage = stage.slice(HALF % S.store_sharers * ROWS, ROWS, dim=1)
    stage.permute([1, 0]).store(y)
    fence_async_shared()
    async_store(outputs.y_tma, [first_m, first_n], stage)

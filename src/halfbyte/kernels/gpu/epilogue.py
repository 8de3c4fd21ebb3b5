"""The epilogue of float32 sums: y = clamp(sum + bias + residual, low, high), rounded once to y's type.

bias is float32 [N], residual [M, N] in x's type; NaN stays NaN. Tiles are [rows of the weight, rows of x], so y is accessed transposed.
"""

from __future__ import annotations

import triton
import triton.language as tl

from halfbyte.kernels.gpu.arithmetic import clamped


@triton.jit
def finish(total, added, rn, rm, N, low, high, CLAMP: tl.constexpr, dtype: tl.constexpr, mask):
    """Return the finished tile in dtype of total float32 [len(rn), len(rm)]; `added` is (bias, residual), either may be None."""
    if added[0] is not None:
        total += tl.load(added[0] + rn, mask=rn < N, other=0.0)[:, None]
    if added[1] is not None:
        at = rm[None, :].to(tl.int64) * N + rn[:, None]
        total += tl.load(added[1] + at, mask=mask, other=0.0).to(tl.float32)
    if CLAMP:
        total = clamped(total, low, high)
    return total.to(dtype)


@triton.jit
def write(total, out, added, rn, rm, M, N, low, high, CLAMP: tl.constexpr):
    """Write the finished tile to out [M, N], masked."""
    mask = (rn < N)[:, None] & (rm < M)[None, :]
    y = finish(total, added, rn, rm, N, low, high, CLAMP, out.dtype.element_ty, mask)
    tl.store(out + rm[None, :].to(tl.int64) * N + rn[:, None], y, mask=mask)


@triton.jit
def gated(gate, up, factor, GATES: tl.constexpr):
    """Return factor * f(gate) * up in float32, where GATES names f."""
    return activated(gate, GATES) * up * factor


@triton.jit
def activated(x, GATES: tl.constexpr):
    """Return f(x) in float32: silu; gelu with tanh, which is x * sigmoid(t), too; or the square of relu. NaN stays NaN."""
    if GATES == "relu2":
        above = tl.where(x < 0, 0.0, x)
        return above * above
    else:
        if GATES == "gelu_tanh":
            t = 1.5957691216057308 * (x + 0.044715 * x * x * x)  # 2 sqrt(2 / pi)
        else:
            tl.static_assert(GATES == "silu", "a gate function that has no code for GPUs")
            t = x
        return times_sigmoid(x, t)


@triton.jit
def times_sigmoid(x, t):
    """Return x * sigmoid(t) in float32."""
    small = tl.exp(-tl.abs(t))
    return x * tl.where(t < 0, small, 1.0) / (1 + small)


@triton.jit
def squares_of(x, rows, K, stride, S: tl.constexpr):
    """Return squares of the rows of x as float32 [columns, …] to be summed, already added up as far as a thread has them.

    The [slices * columns] columns have the same rows in all slices. S: a `skinny_config.Static`.
    """
    SLICES: tl.constexpr = S.slices
    COLUMNS: tl.constexpr = S.columns
    CHUNK: tl.constexpr = 16 * S.threads // S.columns
    at = tl.arange(0, CHUNK)
    squares = tl.zeros((COLUMNS, CHUNK), tl.float32)
    row = tl.max(tl.reshape(rows, (SLICES, COLUMNS)), axis=0)
    for k in range(0, K, CHUNK):
        v = tl.load(x + row.to(tl.int64)[:, None] * stride + (k + at)[None, :], mask=(k + at < K)[None, :], other=0.0).to(tl.float32)
        squares += v * v
    return tl.sum(tl.reshape(squares, (COLUMNS, CHUNK // 8, 8)), axis=2)

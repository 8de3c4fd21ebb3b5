"""Small kernels in Triton, by which tests see how kernels are started, recorded, compiled and replayed."""

import triton
import triton.language as tl


@triton.jit
def add(x, y, pair, n, addend, BLOCK: tl.constexpr):
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < n
    total = tl.load(x + i, mask=mask) + addend
    if pair[0] is not None:
        total += tl.load(pair[0] + i, mask=mask)
    tl.store(y + i, total, mask=mask)

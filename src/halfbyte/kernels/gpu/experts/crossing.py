"""Transfers of activations between a GPU and experts on the CPU by kernels alone, without copies or host functions between launches:
kernels store to pinned memory and poll flags in it.

    send      z, ids, weights → pinned memory; then the number of crossings so far → flags[READY]
    receive   waits until flags[DONE] is that number; out = x + y + shared, with y from pinned memory

`kernels/cpu/transformer/experts.py` is the other side: it waits for READY, and sets DONE after it has stored y. Flags are written with
release and read with acquire semantics of system scope, so what was stored before a flag is visible after it. Polling ends after some 20 s,
with NaN in `out`, so that a failure of the host does not leave the GPU busy permanently.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels import crossing as words
from halfbyte.kernels.gpu.arithmetic import INTERPRETED, row_and_column
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.machine import Gpu

MOST_ROWS = 64  # that the one program of `_send` stores: more are copied before
_WIDE = 512  # elements of a program of `_receive`
_POLLS = 1 << 24  # each takes the link's latency, about 1 µs
_RELEASE = tl.constexpr("{st.release.sys.global.b64 [$1], $2; mov.b32 $0, 0;}")
_ACQUIRE = tl.constexpr("ld.acquire.sys.global.b64 $0, [$1];")
_READY, _DONE = tl.constexpr(words.READY), tl.constexpr(words.DONE)


def launch_send(gpu: Gpu, rows: tuple[Tensor, Tensor, Tensor], to: tuple[Tensor, Tensor, Tensor], count: Tensor, flags: Tensor) -> None:
    """Store z [M, K] as float32, ids [M, T] as int64, each in 0 … E - 1, and weights, float32 [M, T], in pinned memory.

    Args:
        gpu: Where.
        rows: z, ids and weights, contiguous.
        to: The same in pinned memory, float32, int64, float32. More than MOST_ROWS rows are not stored: the caller has copied them.
        count: int64 [1] on the GPU, the number of crossings so far: incremented.
        flags: int64 in pinned memory: READY becomes the new count.
    """
    (z, ids, weights), pdl = rows, launcher.starts_early(gpu)
    m = len(z) if len(z) <= MOST_ROWS else 0
    sizes = z.shape[1], ids.shape[1], triton.next_power_of_2(z.shape[1]), triton.next_power_of_2(ids.shape[1])
    launcher.run(_send, (1,), z, ids, weights, *to, count, flags, m, *sizes, pdl, num_warps=4, early=pdl)


def launch_receive(gpu: Gpu, x: Tensor, y: Tensor, shared: Tensor | None, out: Tensor, count: Tensor, flags: Tensor) -> None:
    """Wait until DONE of `flags` is `count`, then write out = x + (y + shared), rounded once.

    x and out are [M, K], y float32 [M, K] in pinned memory, shared float32 [M, K] or None.
    """
    (m, k), pdl = x.shape, launcher.starts_early(gpu)
    grid = launcher.flat_grid(m, -(-k // _WIDE))
    launcher.run(_receive, grid, x, y, shared, out, count, flags, k, _WIDE, _POLLS, pdl, num_warps=4, early=pdl)


@triton.jit(do_not_specialize=["M"])
def _send(z, ids, weights, to_z, to_ids, to_weights, count, flags, M, K, T, WIDE: tl.constexpr, SOME: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
        gdc_wait()
    number = tl.load(count) + 1
    i, t = tl.arange(0, WIDE), tl.arange(0, SOME)
    for row in range(M):
        tl.store(to_z + row * K + i, tl.load(z + row * K + i, mask=i < K, other=0.0).to(tl.float32), mask=i < K)
        tl.store(to_ids + row * T + t, tl.load(ids + row * T + t, mask=t < T, other=0).to(tl.int64), mask=t < T)
        tl.store(to_weights + row * T + t, tl.load(weights + row * T + t, mask=t < T, other=0.0), mask=t < T)
    tl.debug_barrier()  # all threads have read the count and stored their part
    tl.store(count, number)
    _release(flags + _READY, number)


@triton.jit
def _receive(x, y, shared, out, count, flags, K, WIDE: tl.constexpr, POLLS: tl.constexpr, PDL: tl.constexpr):
    if PDL:
        gdc_launch_dependents()
    row, column = row_and_column(tl.cdiv(K, WIDE))
    row, i = row.to(tl.int64), column * WIDE + tl.arange(0, WIDE)
    inside, at = i < K, row * K + i
    if PDL:
        gdc_wait()
    total = tl.load(x + at, mask=inside, other=0.0).to(tl.float32)
    number, polls = tl.load(count), 0
    done = _acquire(flags + _DONE)
    while (done != number) & (polls < POLLS):
        done = _acquire(flags + _DONE)
        polls += 1
    tl.debug_barrier()
    of_experts = tl.load(y + at, mask=inside, other=0.0, volatile=True)
    if shared is not None:
        of_experts += tl.load(shared + at, mask=inside, other=0.0)
    total = tl.where(done == number, total + of_experts, float("nan"))
    tl.store(out + at, total.to(out.dtype.element_ty), mask=inside)


@triton.jit
def _release(pointer, value):
    """Store an int64 after all that this program stored before its last barrier, for the whole system."""
    if INTERPRETED:
        tl.store(pointer, value)
    else:
        tl.inline_asm_elementwise(_RELEASE, "=r,l,l", [pointer.to(tl.int64), value], dtype=tl.int32, is_pure=False, pack=1)


@triton.jit
def _acquire(pointer):
    """Load an int64 before all that this program loads after it, from the whole system."""
    if INTERPRETED:
        return tl.load(pointer)
    else:
        return tl.inline_asm_elementwise(_ACQUIRE, "=l,l", [pointer.to(tl.int64)], dtype=tl.int64, is_pure=False, pack=1)

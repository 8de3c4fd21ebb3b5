"""What kernels made for Hopper share: what they refuse, the stages of shared memory through which one warp feeds the others, how lanes hold
sums, and fma of two elements at a time."""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier

from halfbyte.machine import Gpu
from halfbyte.versions import why_untested


def not_hopper(gpu: Gpu) -> str | None:
    """Why `gpu` does not run them, or None."""
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    return why_untested("gluon")


@gluon.constexpr_function
def of_second(registers):
    """Registers of a thread of the second warpgroup, of two beside a warp of 40 with so many on the average (None: all that there are): it
    and the first have what that one leaves."""
    return (3 * (registers or 168) - 40) // 16 * 8


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """COUNT of them, each of which is passed when so many have arrived."""
    made = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(made.index(i), count=ARRIVALS)
    return made


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """The stage after this one, and how often the stages were filled, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)


@gluon.jit
def fma(a, b, c):
    """a * b + c of float16 or bfloat16, two elements at a time."""
    if a.dtype == gl.float16:
        return gl.inline_asm_elementwise("fma.rn.f16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.float16, is_pure=True, pack=2)
    else:
        return gl.inline_asm_elementwise("fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [a, b, c], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.constexpr_function
def _lanes_of(layout):
    half = layout is not None and layout.warps_per_cta[1] == 2  # warps that take every other 8 columns
    return gl.BlockedLayout([1, 4], [1, 32], [2, 2] if half else [1, 4], [0, 1] if half else [1, 0])


@gluon.jit
def as_held(acc):
    """Sums [rows, columns] -> [., 512], four that one lane holds after the other: what is written and read 16 bytes at a time."""
    ROWS: gl.constexpr = acc.shape[0]
    WIDTH: gl.constexpr = acc.shape[1]
    LANES: gl.constexpr = _lanes_of(acc.type.layout)
    held = acc.reshape([ROWS // 64, 4, 2, 8, WIDTH // 8, 4, 2]).permute([0, 4, 1, 3, 5, 2, 6])
    return gl.convert_layout(held.reshape([ROWS * WIDTH // 512, 512]), LANES, assert_trivial=True)


@gluon.jit
def as_summed(held, ROWS: gl.constexpr):
    """The inverse."""
    WIDTH: gl.constexpr = held.shape[0] * 512 // ROWS
    acc = held.reshape([ROWS // 64, WIDTH // 8, 4, 8, 4, 2, 2]).permute([0, 2, 5, 3, 1, 4, 6])
    return acc.reshape([ROWS, WIDTH])

"""The ring of pipeline stages in shared memory, through which one producer warp feeds the consumer warpgroups of Hopper's kernels."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfbyte.kernels.gpu.values import Value
from halfbyte.machine import Gpu
from halfbyte.versions import why_untested


class Shape(NamedTuple):
    """Sizes of a product Y [M, N] = X · Wᵀ; `k_slabs` is how many slabs of 128 elements K has."""

    m: Value
    n: Value
    n_padded: Value
    k_slabs: Value


def why_not_hopper(gpu: Gpu) -> str | None:
    """Return the reason why `gpu` cannot run kernels for Hopper, or None."""
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    return why_untested("gluon")


def descriptor(
    tensor: Tensor, box: Sequence[int], *, flat: bool = False, shape: Sequence[int] | None = None, strides: Sequence[int] | None = None
) -> TensorDescriptor:
    """Return a TMA descriptor of boxes of a tensor.

    Args:
        tensor: Contiguous along its last dimension.
        box: Sizes of a box.
        flat: Boxes are in shared memory as they are, as scales; otherwise their lines of up to 128 bytes are swizzled, as wgmma reads them.
        shape, strides: Of the memory that begins with the tensor; None: those of the tensor.
    """
    swizzle = 0 if flat else min(128, box[-1] * tensor.itemsize)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=swizzle, element_bitwidth=8 * tensor.itemsize, rank=len(box))
    return TensorDescriptor(tensor, list(shape or tensor.shape), list(strides or tensor.stride()), list(box), layout)


@gluon.constexpr_function
def worker_registers(registers, producer=40):
    """Return the registers per thread of the second consumer warpgroup and of the producer warp, for an average of `registers`; the first
    warpgroup has the rest."""
    return [(3 * (registers or 168) - producer) // 16 * 8, producer]


@gluon.jit
def barriers(COUNT: gl.constexpr, ARRIVALS: gl.constexpr):
    """Allocate COUNT mbarriers, each of which completes a phase after ARRIVALS arrivals."""
    allocated = gl.allocate_shared_memory(gl.int64, [COUNT, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(COUNT):
        mbarrier.init(allocated.index(i), count=ARRIVALS)
    return allocated


@gluon.jit
def next_stage(stage, phase, STAGES: gl.constexpr):
    """Return the stage after this one, and its phase: how often the stages were filled, modulo 2."""
    last = stage == STAGES - 1
    return gl.where(last, 0, stage + 1), gl.where(last, phase ^ 1, phase)

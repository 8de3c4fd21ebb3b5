"""y = x · dequantize(W)ᵀ in torch's own operations, for GPUs where Triton is missing: right, and slow.

Arithmetic: the weight is dequantized to float32 in whole, the product is cuBLAS's in float32.
"""

from __future__ import annotations

from torch import Tensor

from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed


def linear(problem: Problem, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """x [m, k], weight uint8 in layout `gpu_tiles` or the paired one -> out [m, n]."""
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k), paired=problem.paired)
    packed = Packed(problem.format, (problem.n, problem.k), geo.layout, weight)
    y = x.float() @ gpu_tiles.unpack(packed).dequantize().T
    for addend in (epilogue.bias, epilogue.residual):
        if addend is not None:
            y += addend
    out.copy_(y.clamp_(epilogue.low, epilogue.high))

"""y [M, N] = x [M, K] · Wᵀ with the weight dequantized to memory and multiplied by cuBLAS (rocBLAS): for many rows.

In addition to the product it takes one pass over the weight, so it wins where the product takes long: for 8-bit weights, and on GPUs that
have no other kernel for many rows.

Arithmetic: the weight is rounded once to x's type, sums are float32 and rounded once. float32 is multiplied as torch's settings say.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.epilogue import write
from halfbyte.kernels.gpu.quantize import dequantize
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import workspace
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu

_LEAST_M = 256  # rows of x from which the product takes longer than to dequantize the weight
_TILE = 64  # rows and columns of y that a program of `_finish` takes


@dataclass(frozen=True)
class Config:
    """There is nothing to choose."""


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "linear" or problem.compute != "float":
        return f"it multiplies in floating point, not {problem.op} in {problem.compute}"
    if problem.m < _LEAST_M:
        return f"to write the weight out takes longer than to multiply {problem.m} rows by it: from {_LEAST_M} on"
    nbytes = problem.n * problem.k * problem.dtype.itemsize
    if nbytes > gpu.memory // 32:
        return f"the weight written out is {nbytes >> 20} MiB, over a 32nd of the memory of {gpu.name}"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    return (Config(),)


def launch(problem: Problem, config: Config, x: Tensor, weight: gpu_tiles.Views, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the kernels for x [M, K] and the weight's sections; out is [M, N], contiguous."""
    m, n, k, element = problem.m, problem.n, problem.k, problem.dtype.itemsize
    plain = epilogue.bias is None and epilogue.residual is None and not epilogue.clamps
    at = round_up(n * k * element, 256)
    memory = workspace(out.device, at + (0 if plain else 4 * m * n))
    dense = memory[: n * k * element].view(problem.dtype).view(n, k)
    geo = gpu_tiles.geometry(problem.format, (n, k), paired=problem.paired)
    dequantize.write(weight, geo, dense)
    if plain:
        launcher.run(_LIBRARY, (1,), x, dense, out)
        return
    sums = memory[at : at + 4 * m * n].view(torch.float32).view(m, n)
    launcher.run(_LIBRARY, (1,), x, dense, sums)
    grid = (-(-n // _TILE) * -(-m // _TILE),)  # CUDA's grids have at most 65535 programs along their other dimensions
    added, bounds = (epilogue.bias, epilogue.residual), (epilogue.low, epilogue.high)
    launcher.run(_finish, grid, sums, out, added, m, n, bounds, CLAMP=epilogue.clamps, TILE=_TILE)


class _Library:
    """torch's matrix product with the interface of a kernel, for `launch.run`. It is not replayed: tapes have Triton's launches only."""

    def __getitem__(self, grid: tuple[int, ...]) -> object:
        return self._multiply

    @staticmethod
    def _multiply(x: Tensor, weight: Tensor, out: Tensor) -> None:
        if x.dtype == out.dtype:
            torch.mm(x, weight.t(), out=out)
        elif x.is_cuda:
            torch.mm(x, weight.t(), out_dtype=out.dtype, out=out)
        else:
            torch.mm(x.float(), weight.t().float(), out=out)


_LIBRARY = _Library()


@triton.jit(do_not_specialize=["M"])
def _finish(sums, out, added, M, N, bounds, CLAMP: tl.constexpr, TILE: tl.constexpr):
    """Write a tile of the epilogue of `sums`, float32 [M, N]; `added`: bias and residual, `bounds`: those of the clamp."""
    tiles_n = tl.cdiv(N, TILE)
    rn = tl.program_id(0) % tiles_n * TILE + tl.arange(0, TILE)
    rm = tl.program_id(0) // tiles_n * TILE + tl.arange(0, TILE)
    mask = (rn < N)[:, None] & (rm < M)[None, :]
    total = tl.load(sums + rm[None, :].to(tl.int64) * N + rn[:, None], mask=mask, other=0.0)
    write(total, out, added, rn, rm, M, N, bounds[0], bounds[1], CLAMP)

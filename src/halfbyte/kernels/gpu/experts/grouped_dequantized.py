"""y [P, N] as in `grouped.py`, with the weights dequantized to memory and multiplied by torch's grouped product: for many rows per expert.

In addition to the product it takes one pass over all experts' weights, and memory for them, so it wins where each expert has hundreds of
rows. The host does not synchronize: only the device knows where each expert's rows end.

Arithmetic: weights are rounded once to bfloat16, sums are float32 and rounded once, and once more where there is a bias.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu.experts import grouped
from halfbyte.kernels.gpu.linear import skinny_config
from halfbyte.kernels.gpu.linear.dequantized import Config
from halfbyte.kernels.gpu.quantize import dequantize
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_BLOCK = 1024  # elements of y that a program of `_put` takes
# Rows per expert from which it is faster than the other kernels, by whether those scale sums or dequantize weights.
_LEAST_ROWS = {"sums": 384, "weights": 256}
_MEMORY_SHARE = 32  # dequantized weights take at most this part of the GPU's memory


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "grouped_linear":
        return f"it multiplies experts, not {problem.op}"
    if gpu.backend != "cuda" or gpu.capability[0] not in (9, 10) or not hasattr(torch, "_grouped_mm"):
        return f"torch has no grouped product that runs on {gpu.name} without waiting for it"
    if problem.dtype != torch.bfloat16 or problem.n % 8 or problem.k % 8:
        return "torch's grouped product takes bfloat16 and sizes that are multiples of 8"
    least = _LEAST_ROWS["sums" if skinny_config.mode(problem) == "sums" else "weights"]
    if problem.m < least * problem.experts:
        return f"to write the weights out takes longer than to multiply {problem.m} rows by them: from {least} rows an expert on"
    nbytes = 2 * problem.experts * problem.n * problem.k
    if nbytes > gpu.memory // _MEMORY_SHARE:
        return f"the weights written out are {nbytes >> 20} MiB, over 1 / {_MEMORY_SHARE} of the memory of {gpu.name}"
    return None


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return the only config."""
    return (Config(),)


def launch(problem: Problem, config: Config, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """Launch the grouped product; arguments as in `grouped.launch`."""
    pairs, experts, n, k = problem.m, problem.experts, problem.n, problem.k
    geo = gpu_tiles.geometry(problem.format, (n, k))
    dense = torch.empty(experts, n, k, dtype=problem.dtype, device=out.device)
    dequantize.write(gpu_tiles.views(weight, geo), geo, dense, experts)
    schedule = grouped.tile_schedule(ids, experts, grouped.MOST_COLUMNS)
    rows = x.index_select(0, schedule.order // (pairs // len(x)))
    y = torch._grouped_mm(rows, dense.transpose(1, 2), offs=schedule.expert_ends[:experts])
    grid = (pairs, -(-n // _BLOCK))
    launcher.run(_put, grid, y, schedule.order, ids, out, bias, n, experts, BLOCK=_BLOCK, num_warps=4)


@triton.jit(do_not_specialize=["experts"])
def _put(y, order, ids, out, bias, N, experts, BLOCK: tl.constexpr):
    """Write row program_id(0) of y [P, N], sorted by expert, with its expert's bias to row order[row] of out; NaN for an unknown expert."""
    row = tl.program_id(0).to(tl.int64)
    pair = tl.load(order + row).to(tl.int64)
    e = tl.load(ids + pair).to(tl.int64)
    valid = (e >= 0) & (e < experts)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.load(y + row * N + n, mask=valid & (n < N)).to(tl.float32)  # rows of unknown experts were not written
    if bias is not None:
        total += tl.load(bias + tl.where(valid, e, 0) * N + n, mask=n < N).to(tl.float32)
    tl.store(out + pair * N + n, tl.where(valid, total, float("nan")).to(out.dtype.element_ty), mask=n < N)

"""Grids of tensors with millions of rows or columns: CUDA takes at most 65 535 programs along the second and the third dimension."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from halfbyte.errors import KernelError
from halfbyte.formats import as_format
from halfbyte.kernels.gpu.conv import pool
from halfbyte.kernels.gpu.quantize import activations, dequantize, quantize, spread
from halfbyte.kernels.gpu.runtime import launch
from halfbyte.kernels.gpu.transformer import attend_many, gates
from halfbyte.kernels.problem import Problem, Window
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS

H, GPU = torch.float16, GPUS["sm_90"]
MOST = 65535


def meta(*shape: int, dtype: torch.dtype = H) -> Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def weight(n: int, k: int, name: str, *, sparse: bool = False) -> tuple[Tensor, gpu_tiles.Geometry]:
    geo = gpu_tiles.geometry(as_format(name), (n, k), sparse=sparse)
    return meta(geo.nbytes, dtype=torch.uint8), geo


def dequantize_rows() -> None:
    dequantize.dequantize(*weight(64 * MOST + 1, 64, "int4_g64"), H)


def spread_rows() -> None:
    spread.sections(*weight(64 * MOST + 1, 64, "int4_g64", sparse=True))


def embed_columns() -> None:
    dequantize.embedding(meta(1, dtype=torch.int64), *weight(1, 1024 * MOST + 1, "int4_g64"), H)


def sum_columns() -> None:
    data, geo = weight(1, 128 * MOST + 1, "int4_g64_zp")
    dequantize.write_sums(gpu_tiles.views(data, geo), geo, 64, (64, 64), meta(2 * (MOST + 1), 64, dtype=torch.float32))


def quantize_columns() -> None:
    quantize.quantize(torch.empty(1, 4096 * MOST + 1, dtype=H), as_format("int4_g64"))  # memory that nothing touches


def quantize_activation_columns() -> None:
    problem = Problem("linear", 1, 64, 1 << 30, as_format("int4_g128"), H, compute="int8")
    plan = activations.plan(problem)
    activations.quantize_activation(meta(1, problem.k), plan, meta(plan.nbytes, dtype=torch.uint8))


def gate_columns() -> None:
    n = 1024 * MOST + 1
    gates.launch(GPU, meta(1, 2 * n), meta(1, n), "silu")
    gates.launch_clamped(GPU, meta(1, 2 * n), meta(1, n), 1.7, 7.0)


def pool_channels() -> None:
    x = meta(1, 256 * MOST + 1, 2, 2).contiguous(memory_format=torch.channels_last)
    pool.pool(x, (2, 2), Window(), (1, 1))


def attend_tokens() -> None:
    tokens = 128 * MOST + 1
    x = meta(1, tokens, 1, 64)
    attend_many.launch(GPU, x, x.transpose(1, 2), x.transpose(1, 2), None, None, meta(1, tokens, 64), 1.0)


def attend_masks() -> None:
    x = meta(MOST + 1, 1, 1, 64)
    mask = meta(MOST + 1, 1, 1, dtype=torch.bool)
    attend_many.launch(GPU, x, x.transpose(1, 2), x.transpose(1, 2), None, mask, meta(MOST + 1, 1, 64), 1.0)


CALLS = (
    dequantize_rows, spread_rows, embed_columns, sum_columns, quantize_columns, quantize_activation_columns, gate_columns, pool_channels,
    attend_tokens, attend_masks,
)  # fmt: skip


@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_grids_fit(call: Callable[[], None]) -> None:
    with launch.recording(dry=True) as recorded:
        call()
    assert recorded.launches
    for one in recorded.launches:
        assert one.grid[0] < 1 << 31
        assert max(one.grid[1:], default=1) <= MOST


@pytest.mark.parametrize("grid", [(1 << 31,), (1, MOST + 1), (1, 1, MOST + 1)])
def test_a_grid_that_is_too_long_is_a_kernel_error(grid: tuple[int, ...]) -> None:
    class Kernel:
        __name__ = "kernel"

    with launch.recording(dry=True), pytest.raises(KernelError, match="split the tensors"):
        launch.run(Kernel(), grid)

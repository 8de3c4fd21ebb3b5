"""What compilers make of `grouped_hopper`."""

from __future__ import annotations

import torch
from aot import Job, compile_all

from halfbyte.formats import as_format
from halfbyte.kernels.gpu.experts import grouped_hopper, grouped_int8_hopper
from halfbyte.kernels.problem import Compute, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu


def launch(gpu: Gpu, format: str, tile: int, compute: Compute) -> None:
    """Every tile of `grouped_hopper` and `grouped_int8_hopper`, for the compiler."""
    file = grouped_hopper if compute == "float" else grouped_int8_hopper
    problem = Problem("grouped_linear", 1024, 4096, 2048, as_format(format), torch.bfloat16, compute, experts=8)
    nbytes = 8 * gpu_tiles.geometry(problem.format, (4096, 2048)).nbytes
    weight, ids = torch.empty(nbytes, dtype=torch.uint8, device="meta"), torch.empty(1024, dtype=torch.int64, device="meta")
    x, out = (torch.empty(1024, size, dtype=torch.bfloat16, device="meta") for size in (2048, 4096))
    config = next(c for c in file.configs(problem, gpu) if c.block_m == tile)
    file.launch(problem, config, x, weight, ids, out, torch.empty(8, 4096, device="meta"))


def test_nothing_spills_on_hopper() -> None:
    tiles = [("int4_g128", 64, "float"), ("int4_g128", 128, "float"), ("int4_g128", 256, "float"), ("q4_0", 128, "float")]
    tiles += [("q8_0", 256, "float"), ("int4_g128", 128, "int8")]
    home = "tests/kernels/gpu/experts/test_grouped_compiled.py:launch"
    jobs = [Job(home, "sm_90", dict(zip(("format", "tile", "compute"), tile, strict=True)), "resources") for tile in tiles]
    for tile, [*_, product] in zip(tiles, compile_all(jobs), strict=True):
        assert product.spills == 0, tile
        assert product.shared <= GPUS["sm_90"].shared, tile

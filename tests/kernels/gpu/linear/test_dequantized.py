"""The weight written out and multiplied by the library, against the reference."""

from __future__ import annotations

import pytest
import torch
from float_support import check_linear
from samples import random_codes

from halfbyte.formats import as_format
from halfbyte.kernels.gpu.linear import dequantized
from halfbyte.kernels.gpu.quantize import dequantize
from halfbyte.kernels.gpu.runtime.launch import recording
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS

H, B, F = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [H, B, F], ids=str)
@pytest.mark.parametrize("name", ["q4_1", "int8_channel", "int4_g20_zp", "q8_0"])
@pytest.mark.parametrize("epilogue", [False, True])
def test_against_the_reference(name: str, dtype: torch.dtype, epilogue: bool, device: torch.device, interpreted: bool) -> None:
    problem = Problem("linear", 70, 130, 300, as_format(name), dtype, paired=name == "q8_0")
    check_linear(dequantized, dequantized.Config(), problem, device, interpreted=interpreted, weight_rounded=dtype != F, epilogue=epilogue)


@pytest.mark.parametrize("paired", [False, True])
def test_rows(paired: bool, device: torch.device) -> None:
    codes = random_codes(as_format("int8_g64_zp"), (70, 300))
    geo, data = gpu_tiles.geometry(codes.format, codes.shape, paired=paired), gpu_tiles.pack(codes, paired=paired).data.to(device)
    ids = torch.tensor([69, 0, 33, 70, -1], device=device)
    rows, weight = dequantize.embedding(ids, data, geo, F).cpu(), codes.dequantize(F)
    assert torch.equal(rows[:3], weight[[69, 0, 33]])
    assert rows[3:].isnan().all()
    assert torch.equal(dequantize.dequantize(data, geo, F).cpu(), weight)


def test_what_it_refuses() -> None:
    fmt, gpu = as_format("int8_channel"), GPUS["sm_90"]
    assert dequantized.supports(Problem("linear", 256, 8192, 8192, fmt, B), gpu) is None
    assert "255 rows" in (dequantized.supports(Problem("linear", 255, 8192, 8192, fmt, B), gpu) or "")
    assert "memory" in (dequantized.supports(Problem("linear", 256, 262144, 65536, fmt, B), gpu) or "")


def test_grids_of_many_rows() -> None:
    """CUDA takes at most 65535 programs along the second dimension."""
    problem = Problem("linear", 65536 * 64, 64, 64, as_format("int8_channel"), H)
    geo = gpu_tiles.geometry(problem.format, (64, 64))
    weight = gpu_tiles.views(torch.empty(geo.nbytes, dtype=torch.uint8, device="meta"), geo)
    x, out = (torch.empty(problem.m, 64, dtype=H, device="meta") for _ in range(2))
    with recording(dry=True) as recorded:
        dequantized.launch(problem, dequantized.Config(), x, weight, out, Epilogue(torch.empty(64, device="meta")))
    assert all(max(launch.grid[1:], default=1) < 1 << 16 for launch in recorded.launches)

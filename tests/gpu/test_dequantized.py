"""The weight written out and multiplied by the library, against the reference."""

from __future__ import annotations

import pytest
import torch
from float_support import check_linear

from halfbyte.formats import as_format
from halfbyte.kernels.gpu import dequantized
from halfbyte.kernels.problem import Problem
from halfbyte.machine import GPUS

H, B, F = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize("dtype", [H, B, F], ids=str)
@pytest.mark.parametrize("name", ["q4_1", "int8_channel", "int4_g20_zp"])
@pytest.mark.parametrize("epilogue", [False, True])
def test_against_the_reference(name: str, dtype: torch.dtype, epilogue: bool, device: torch.device, interpreted: bool) -> None:
    problem = Problem("linear", 70, 130, 300, as_format(name), dtype)
    check_linear(dequantized, dequantized.Config(), problem, device, interpreted=interpreted, weight_rounded=dtype != F, epilogue=epilogue)


def test_what_it_refuses() -> None:
    fmt, gpu = as_format("int8_channel"), GPUS["sm_90"]
    assert dequantized.supports(Problem("linear", 256, 8192, 8192, fmt, B), gpu) is None
    assert "255 rows" in (dequantized.supports(Problem("linear", 255, 8192, 8192, fmt, B), gpu) or "")
    assert "memory" in (dequantized.supports(Problem("linear", 256, 262144, 65536, fmt, B), gpu) or "")

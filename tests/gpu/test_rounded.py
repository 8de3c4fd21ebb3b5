"""Quantized activations multiplied as floats: near what integers give."""

from __future__ import annotations

import pytest
import torch
from float_support import UNIT
from gluon_interpreter import interpreted as in_gluon
from samples import random_codes

from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu import gemm_hopper, rounded
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu


def check(name: str, dtype: torch.dtype, m: int, n: int, k: int, programs: int, device: torch.device) -> None:
    """`reference.error_bound` is that of sums of integers; here they are float32 sums of all products, aligned before they are added (twice
    the bound of compute="float"), of rounded activations (once) and weights (twice: the scale, the product)."""
    codes, x, bias = random_codes(as_format(name), (n, k)), torch.randn(m, k).to(dtype), torch.randn(n)
    problem = Problem("linear", m, n, k, codes.format, dtype, "int8", "block")
    views = gpu_tiles.views(gpu_tiles.pack(codes).data.to(device), gpu_tiles.geometry(codes.format, codes.shape))
    out = torch.full((m, n), torch.nan, dtype=dtype, device=device)
    config = rounded.Config(64, 64, 3, programs)
    rounded.launch(problem, config, x.to(device), *views, out, Epilogue(bias.to(device), None, -1.0, 6.0))
    expected = reference.linear(x, codes, bias, "int8", "block", (-1.0, 6.0))
    size = x.double().abs() @ codes.dequantize(torch.float64).abs().T
    error = 2 * reference.error_bound(x, codes, bias) + 3 * UNIT[dtype] * 1.01 * size
    assert reference.agrees(out.cpu(), expected, error).all()


@pytest.mark.parametrize(
    ("name", "dtype", "k"), [("q4_0", torch.float16, 640), ("q8_0", torch.float16, 456), ("int4_g64_zp", torch.bfloat16, 640)]
)
def test_near_the_reference(name: str, dtype: torch.dtype, k: int, device: torch.device, gpu: Gpu, interpreted: bool) -> None:
    if interpreted:
        with in_gluon(gemm_hopper):
            check(name, dtype, 70, 140, k, 3, device)
    elif gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    else:
        check(name, dtype, 70, 140, k, 3, device)
        check(name, dtype, 300, 333, k, 1, device)


def test_activations_are_those_of_the_reference(device: torch.device) -> None:
    x = (torch.randn(5, 450) * torch.logspace(-3, 3, 450)).half()
    x[0, 40], x[1, 70] = torch.nan, torch.inf
    out = torch.full_like(x, 7, device=device)
    rounded.round_activations(x.to(device), out, 32)
    quantized = reference.quantize_activation(x, 32, "block")
    wanted = (quantized.q.float() * quantized.scale.repeat_interleave(32, dim=1)[:, :450]).half()
    assert torch.equal(out.cpu().nan_to_num(-1), wanted.nan_to_num(-1))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("q4_0", {"compute": "float"}, "a scale per block, not linear in float"),
        ("q4_0", {"activation": "row"}, "with a scale per row"),
        ("int4_g128", {}, "not 128"),
        ("q4_0", {"m": 63}, "from 64 on"),
        ("q4_0", {"dtype": torch.float32}, "16 bits"),
    ],
)
def test_what_it_refuses(name: str, changes: dict[str, object], reason: str) -> None:
    asked = {"m": 64, "dtype": torch.bfloat16, "compute": "int8", "activation": "block", **changes}
    problem = Problem("linear", n=256, k=512, format=as_format(name), **asked)  # type: ignore[arg-type]
    assert reason in (rounded.supports(problem, GPUS["sm_90"]) or "")

"""Quantized activations multiplied as floats: near what integers give."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from float_support import UNIT
from gluon_interpreter import interpreted as in_gluon
from samples import random_codes

from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.linear import gemm_hopper, rounded, skinny_hopper, skinny_rounded
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.problem import Activation, Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu


def check(name: str, activation: Activation, dtype: torch.dtype, sizes: tuple[int, int, int], programs: int, device: torch.device) -> None:
    """`reference.error_bound` is that of sums of integers; here they are float32 sums of all products, aligned before they are added (twice
    the bound of compute="float"), of rounded activations (once) and weights (twice: the scale, the product)."""
    m, n, k = sizes
    codes, x, bias = random_codes(as_format(name), (n, k)), torch.randn(m, k).to(dtype), torch.randn(n)
    problem = Problem("linear", m, n, k, codes.format, dtype, "int8", activation)
    views = gpu_tiles.views(gpu_tiles.pack(codes).data.to(device), gpu_tiles.geometry(codes.format, codes.shape))
    out = torch.full((m, n), torch.nan, dtype=dtype, device=device)
    last = Epilogue(bias.to(device), None, -1.0, 6.0)
    if m > 64:
        rounded.launch(problem, rounded.Config(64, 64, 3, programs), x.to(device), views, out, last)
    else:
        config = replace(skinny_rounded.configs(problem, GPUS["sm_90"])[0], programs=programs)
        skinny_rounded.launch(problem, config, x.to(device), views, out, last)
    expected = reference.linear(x, codes, bias, "int8", activation, (-1.0, 6.0))
    size = x.double().abs() @ codes.dequantize(torch.float64).abs().T
    error = 2 * reference.error_bound(x, codes, bias) + 3 * UNIT[dtype] * 1.01 * size
    assert reference.agrees(out.cpu(), expected, error).all()


@pytest.mark.parametrize(
    ("name", "activation", "dtype", "k"),
    [
        ("q4_0", "block", torch.float16, 640),
        ("q8_0", "row", torch.float16, 456),
        ("int4_g64_zp", "block", torch.bfloat16, 640),
        ("int8_channel", "row_offset", torch.bfloat16, 456),
    ],
)
def test_near_the_reference(
    name: str, activation: Activation, dtype: torch.dtype, k: int, device: torch.device, gpu: Gpu, interpreted: bool
) -> None:
    if interpreted:
        with in_gluon(gemm_hopper, skinny_hopper):
            check(name, activation, dtype, (60 if name == "q4_0" else 70, 140, k), 3, device)
    elif gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    else:
        check(name, activation, dtype, (60, 140, k), 3, device)
        check(name, activation, dtype, (70, 140, k), 3, device)
        check(name, activation, dtype, (300, 333, k), 1, device)


@pytest.mark.parametrize(("activation", "block"), [("block", 32), ("row", 450), ("block_offset", 32)])
def test_activations_are_those_of_the_reference(activation: Activation, block: int, device: torch.device) -> None:
    x = (torch.randn(5, 450) * torch.logspace(-3, 3, 450)).half()
    x[0, 40], x[1, 70] = torch.nan, torch.inf
    out = torch.full_like(x, 7, device=device)
    plan = activations.plan(Problem("linear", 5, 8, 450, as_format("q4_0"), x.dtype, "int8", activation))
    activations.round_activation(x.to(device), plan, out)
    quantized = reference.quantize_activation(x, 32, activation)
    wanted = quantized.q.double() * quantized.scale.double().repeat_interleave(block, dim=1)[:, :450]
    if quantized.offset is not None:
        wanted += quantized.offset.double().repeat_interleave(block, dim=1)[:, :450]
    wanted = wanted.float().half()
    assert torch.equal(out.cpu().nan_to_num(-1), wanted.nan_to_num(-1))


@pytest.mark.parametrize(
    ("name", "changes", "reason"),
    [
        ("q4_0", {"compute": "float"}, "integers of a linear layer, not linear in float"),
        ("int4_g128", {}, "not of 128"),
        ("q4_0", {"m": 63}, "from 64 on"),
        ("q4_0", {"dtype": torch.float32}, "16 bits"),
    ],
)
def test_what_it_refuses(name: str, changes: dict[str, object], reason: str) -> None:
    asked = {"m": 64, "dtype": torch.bfloat16, "compute": "int8", "activation": "block", **changes}
    problem = Problem("linear", n=256, k=512, format=as_format(name), **asked)  # type: ignore[arg-type]
    assert reason in (rounded.supports(problem, GPUS["sm_90"]) or "")

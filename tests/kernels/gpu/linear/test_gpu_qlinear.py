"""int8 in, int8 out on the GPU: equal to the reference, but next to a tie within the kernel's error."""

from dataclasses import replace

import pytest
import torch
from samples import random_codes
from torch import Tensor

from halfbyte.formats import Codes, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.conv import hopper as conv_hopper
from halfbyte.kernels.gpu.conv import implicit_gemm as conv
from halfbyte.kernels.gpu.linear import qlinear
from halfbyte.kernels.problem import LONGEST_INTEGER_SUM, ConvProblem, Problem, Window
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import Gpu


def table(codes: Codes, bias: Tensor | None, in_scale: float, in_zero: int, out_scale: float, out_zero: int) -> Tensor:
    """As `ops.requantization_table` has it."""
    n = codes.shape[0]
    constant = torch.full((n,), float(out_zero), dtype=torch.float64) + (0 if bias is None else bias.double() / out_scale)
    multiplier = codes.scale.double().expand(n, 1).flatten() * (in_scale / out_scale)
    start = (codes.values().sum(1, dtype=torch.int32) * -in_zero).view(torch.float32)
    return torch.nn.functional.pad(torch.stack((constant.float(), multiplier.float(), start)), (0, -n % 32))


def run(
    x: Tensor,
    codes: Codes,
    bias: Tensor | None,
    clamp: tuple[int, int],
    gpu: Gpu,
    device: torch.device,
    split: int = 1,
    paired: bool = False,
    **s: float,
) -> Tensor:
    problem = Problem("qlinear", len(x), *codes.shape, codes.format, torch.int8, "int8", "row", paired=paired)
    assert qlinear.supports(problem, gpu) is None
    geo = gpu_tiles.geometry(codes.format, codes.shape, paired=paired)
    views = gpu_tiles.views(gpu_tiles.pack(codes, paired=paired).data.to(device), geo)
    out = torch.full((len(x), codes.shape[0]), 77, dtype=torch.int8, device=device)
    config = replace(qlinear.configs(problem, gpu)[0], split=split)
    qlinear.launch(problem, config, x.to(device), views, table(codes, bias, **s).to(device), out, clamp)
    return out.cpu()


@pytest.mark.parametrize("name", ["int8_channel", "int4_channel", "int8_tensor", "int4_tensor_f16"])
def test_products_are_those_of_the_reference(name: str, gpu: Gpu, device: torch.device) -> None:
    for m, n, k, clamp, in_zero, out_zero, bias, split in (
        (1, 1, 1, (-128, 127), 3, -3, False, 1),
        (5, 70, 300, (0, 127), -128, 127, True, 1),
        (17, 64, 256, (-20, 33), 127, 5, True, 2),
        (3, 33, 128, (5, 5), 0, 0, False, 1),
    ):
        rng = torch.Generator().manual_seed(m)
        codes = random_codes(as_format(name), (n, k), m)
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8, generator=rng)
        added = torch.randn(n, generator=rng) * 10 if bias else None
        scales = {"in_scale": 0.02, "in_zero": in_zero, "out_scale": 0.003 * k**0.5 * 2**codes.format.bits, "out_zero": out_zero}
        wanted = reference.qlinear(x, codes, added, **scales, clamp=clamp)
        for paired in {False, codes.format.bits == 8}:
            assert wanted.agrees(run(x, codes, added, clamp, gpu, device, split, paired, **scales)).all()


@pytest.mark.parametrize("bits", [4, 8])
def test_one_hot_rows_give_the_codes_and_ties_go_to_even(bits: int, gpu: Gpu, device: torch.device) -> None:
    codes = random_codes(as_format(f"int{bits}_channel"), (37, 41))
    codes.scale.fill_(1)
    eye = torch.eye(41, dtype=torch.int8)
    same = {"in_scale": 1.0, "in_zero": 0, "out_scale": 1.0, "out_zero": 0}
    assert torch.equal(run(eye, codes, None, (-128, 127), gpu, device, **same), codes.values().T.to(torch.int8))
    least = run(eye * -128, codes, None, (-128, 127), gpu, device, **same)
    assert torch.equal(least, (codes.values().T * -128).clamp(-128, 127).to(torch.int8))
    halves = run(eye, codes, None, (-128, 127), gpu, device, **{**same, "out_scale": 2.0})
    assert torch.equal(halves, torch.round(codes.values().T / 2).to(torch.int8))


def test_refusals(gpu: Gpu) -> None:
    cases = (("q8_0", 64, "one scale per channel"), ("int8_channel_zp", 64, "symmetric"), ("int8_channel", 200000, "overflow"))
    for name, k, words in cases:
        assert words in str(qlinear.supports(Problem("qlinear", 2, 3, k, as_format(name), torch.int8, "int8", "row"), gpu))


@pytest.mark.parametrize(("x", "in_zero", "code"), [(127, -128, 127), (-128, 127, 127)])
def test_the_longest_sums_are_exact_and_longer_ones_refused(x: int, in_zero: int, code: int, gpu: Gpu, device: torch.device) -> None:
    k = LONGEST_INTEGER_SUM
    codes = Codes.zeros(as_format("int8_channel"), (1, k))
    codes.data.fill_(code)
    codes.scale.fill_(1.0)
    rows = torch.full((1, k), x, dtype=torch.int8)
    scales = {"in_scale": 1.0, "in_zero": in_zero, "out_scale": 255 * k / 100, "out_zero": 0}
    y = run(rows, codes, None, (-128, 127), gpu, device, **scales)
    assert bool(reference.qlinear(rows, codes, None, **scales).agrees(y).all())
    reason = qlinear.supports(Problem("qlinear", 1, 1, k + 1, codes.format, torch.int8, "int8", "row"), gpu)
    assert reason == f"sums of {k + 1} products may overflow an int32"
    problem = ConvProblem(Filter(codes.format, 64, 7312, (3, 3)), Window(), 1, (14, 14), torch.int8)
    assert all(module.supports(problem, gpu) == "sums of 65808 products may overflow an int32" for module in (conv, conv_hopper))

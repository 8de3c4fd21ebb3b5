"""Integer products on the GPU against the reference: every kind of format, of scaling of x, and of epilogue."""

import re
from dataclasses import replace

import numpy as np
import pytest
import torch
from aot import compile_all, linear_job
from samples import random_codes
from torch import Tensor

from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.linear import gemm_int8, gemm_int8_hopper
from halfbyte.kernels.problem import Activation, Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

WAYS = ("block", "row", "block_offset", "row_offset")


@pytest.fixture(autouse=True)
def _quiet() -> object:
    with np.errstate(all="ignore"):
        yield


class Case:
    """One product, run by a kernel's file with each of its configs, and compared."""

    def __init__(
        self, name: str, m: int, n: int, k: int, dtype: torch.dtype, activation: Activation, device: torch.device, paired: bool = False
    ):
        rng = torch.Generator().manual_seed(m + n + k)
        self.codes = random_codes(as_format(name), (n, k), 0)
        self.x = (torch.randn(m, k, generator=rng) * 3 ** torch.randn(m, k, generator=rng) + 0.3).to(dtype)
        self.problem = Problem("linear", m, n, k, self.codes.format, dtype, "int8", activation, paired=paired)
        self.device = device
        self.bias = torch.randn(n, generator=rng)

    def run(self, file: object, config: object, epilogue: Epilogue | None = None) -> Tensor:
        problem, device = self.problem, self.device
        packed = gpu_tiles.pack(self.codes, paired=problem.paired)
        views = gpu_tiles.views(packed.data.to(device), gpu_tiles.geometry(packed.format, packed.shape, paired=problem.paired))
        out = torch.full((problem.m, problem.n), torch.nan, dtype=problem.dtype, device=device)
        file.launch(problem, config, self.x.to(device), views, out, epilogue or Epilogue())
        return out.cpu()

    def check(self, y: Tensor, bias: Tensor | None = None, clamp: tuple[float, float] | None = None) -> None:
        activation = self.problem.activation
        wanted = reference.linear(self.x, self.codes, bias, "int8", activation, clamp)
        error = reference.error_bound(self.x, self.codes, bias, "int8", activation)
        right = reference.agrees(y, wanted, error)
        worst = ((y.double() - wanted).abs() / error).nan_to_num(0).max()
        assert right.all(), (
            f"{int((~right).sum())} of {right.numel()} wrong, worst {worst:.3g} bounds, first at {(~right).nonzero()[0].tolist()}"
        )


@pytest.mark.parametrize("activation", WAYS)
@pytest.mark.parametrize(
    "name",
    ["q4_0", "q4_1", "q8_0", "int4_g20_zp", "int4_g64_zp", "int8_g33_offset", "int4_g128", "int8_g128_zp", "int4_g200_offset",
     "int8_g256_f32", "int4_channel", "int8_channel_zp", "int4_tensor_offset", "int8_tensor", "int6_g16_f32", "int8_g16_offset",
     "int8_g12_zp", "int4_g16", "int4_g16_zp", "int4_g9_offset"],
)  # fmt: skip
def test_formats(name: str, activation: Activation, gpu: Gpu, device: torch.device) -> None:
    case = Case(name, 3, 65, 450, torch.float16, activation, device)
    assert gemm_int8.supports(case.problem, gpu) is None
    for config in gemm_int8.configs(case.problem, gpu)[:1]:
        case.check(case.run(gemm_int8, config))


@pytest.mark.parametrize("activation", ["block", "row_offset"])
@pytest.mark.parametrize("name", ["q8_0", "int8_g16_zp", "int8_g33_offset", "int8_g128_zp", "int8_channel"])
def test_paired_bytes(name: str, activation: Activation, gpu: Gpu, device: torch.device) -> None:
    case = Case(name, 3, 65, 450, torch.float16, activation, device, paired=True)
    case.check(case.run(gemm_int8, gemm_int8.configs(case.problem, gpu)[0]))


@pytest.mark.parametrize("activation", ["block", "row_offset"])
@pytest.mark.parametrize("name", ["q4_0", "int4_g128_zp", "int4_g256", "int8_channel", "int4_channel_offset", "q8_0", "int4_g16"])
def test_split_k(name: str, activation: Activation, gpu: Gpu, device: torch.device) -> None:
    """The parts of K are added in order: the same bits each time. A part may be empty."""
    case = Case(name, 2, 65, 700, torch.float32, activation, device)
    config = replace(gemm_int8.configs(case.problem, gpu)[0], split=4, records=1)
    y = case.run(gemm_int8, config)
    case.check(y)
    assert torch.equal(y, case.run(gemm_int8, config))


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (9, 64, 128), (18, 66, 40)])
def test_shapes_and_epilogue(m: int, n: int, k: int, gpu: Gpu, device: torch.device) -> None:
    for name in ("q4_0", "int4_g128", "int8_channel"):
        case = Case(name, m, n, k, torch.float16, "block", device)
        config = replace(gemm_int8.configs(case.problem, gpu)[0], block_m=16)
        residual = torch.randn(m, n).half()
        y = case.run(gemm_int8, config, Epilogue(case.bias.to(device), None, -1.0, 6.0))
        case.check(y, case.bias, (-1.0, 6.0))
        y = case.run(gemm_int8, config, Epilogue(None, residual.to(device)))
        wanted = reference.linear(case.x, case.codes, None, "int8") + residual.double()
        error = reference.error_bound(case.x, case.codes, None, "int8") + 2**-23 * wanted.abs()
        assert reference.agrees(y, wanted, error).all()


def test_one_hot_rows_give_back_the_weight(gpu: Gpu, device: torch.device) -> None:
    """x = 127 * identity has the scale 127/127 = 1 in each block."""
    for name in ("int4_g20_zp", "q8_0", "int4_g64"):
        case = Case(name, 40, 66, 40, torch.float32, "block", device)
        case.x = torch.eye(40) * 127
        y = case.run(gemm_int8, gemm_int8.configs(case.problem, gpu)[0])
        scale = reference.quantize_activation(case.x[:1], 1, "row").scale.item()
        assert torch.allclose(y.double(), case.codes.dequantize(torch.float64).T * 127 * scale, rtol=1e-6, atol=1e-6)


def test_a_nan_stays_in_its_row(gpu: Gpu, device: torch.device) -> None:
    for name, activation in (("int4_g128", "block"), ("int8_channel", "row"), ("q4_1", "block_offset")):
        case = Case(name, 4, 20, 300, torch.float32, activation, device)
        case.x[1, 200], case.x[2, 3] = torch.nan, torch.inf
        y = case.run(gemm_int8, gemm_int8.configs(case.problem, gpu)[0])
        assert torch.isnan(y).all(dim=1).tolist() == [False, True, True, False]
        assert torch.isfinite(y[[0, 3]]).all()


@pytest.mark.parametrize("activation", ["block", "row"])
@pytest.mark.parametrize(
    "name",
    [
        "int4_channel",
        "int8_channel_zp",
        "int4_tensor_offset",
        "int4_g128",
        "int4_g128_zp",
        "int8_g128_offset",
        "int8_g128",
        "int4_g100",
    ],
)
def test_hopper(name: str, activation: Activation, gpu: Gpu, device: torch.device) -> None:
    case = Case(name, 300, 200, 450, torch.bfloat16, activation, device, paired=as_format(name).bits == 8)
    if device.type != "cuda" or gemm_int8_hopper.supports(case.problem, gpu):
        pytest.skip("no Hopper GPU here")
    configs = gemm_int8_hopper.configs(case.problem, gpu)
    for config in configs[:2]:
        case.check(case.run(gemm_int8_hopper, config))
    y = case.run(gemm_int8_hopper, configs[0], Epilogue(case.bias.to(device), None, -1.0, 6.0))
    case.check(y, case.bias, (-1.0, 6.0))


@pytest.mark.parametrize(
    ("name", "activation"), [("int4_g128", "row"), ("int4_g128_zp", "block"), ("int8_g128", "block"), ("int8_channel", "row")]
)
def test_hopper_with_every_config(name: str, activation: Activation, gpu: Gpu, device: torch.device) -> None:
    """More tiles than programs, of 256 rows some halved, or three programs a tile, an odd number of records, and the same bits each time,
    started early or not."""
    case = Case(name, 300, 448, 2176, torch.bfloat16, activation, device, paired=as_format(name).bits == 8)
    if device.type != "cuda" or gemm_int8_hopper.supports(case.problem, gpu):
        pytest.skip("no Hopper GPU here")
    for config in gemm_int8_hopper.configs(case.problem, gpu):
        few = replace(config, programs=7)
        y = case.run(gemm_int8_hopper, few)
        case.check(y)
        assert torch.equal(y, case.run(gemm_int8_hopper, replace(few, early=not few.early)))
        shared = replace(config, programs=3 * -(-300 // config.block_m) * -(-448 // (64 * config.panels)))
        y = case.run(gemm_int8_hopper, shared)
        case.check(y)
        assert torch.equal(y, case.run(gemm_int8_hopper, shared))


@pytest.mark.parametrize("branches", [1, 3])
def test_hopper_low_rank(branches: int, gpu: Gpu, device: torch.device) -> None:
    """More tiles than programs, of 256 rows some halved; branches of low rank are added to the sums."""
    n = 384
    case = Case("int4_channel", 1100, n, 2176, torch.bfloat16, "row", device)
    if device.type != "cuda" or gemm_int8_hopper.supports(case.problem, gpu):
        pytest.skip("no Hopper GPU here")
    inner, outer = torch.randn(1100, 32 * branches).bfloat16(), torch.randn(n, 32).bfloat16()
    pairs = list(zip(inner.double().chunk(branches, 1), outer.double().chunk(branches), strict=True))
    branch, terms = (torch.cat([a @ b.T for a, b in some], 1) for some in (pairs, [(a.abs(), b.abs()) for a, b in pairs]))
    wanted = reference.linear(case.x, case.codes, case.bias, "int8", "row", residual=branch)
    # 32 products and their sum with the others are rounded to float32.
    bound = reference.error_bound(case.x, case.codes, case.bias, "int8", "row", residual=branch) + 34 * 2**-24 * terms
    for config in gemm_int8_hopper.configs(case.problem, gpu):
        for programs in (7, config.programs):
            one = replace(config, programs=programs)
            if gemm_int8_hopper.why_no_low_rank(case.problem, one, branches) is None:
                ends = Epilogue(case.bias.to(device), low_rank=(inner.to(device), outer.to(device)))
                assert reference.agrees(case.run(gemm_int8_hopper, one, ends), wanted, bound).all(), one


def test_hopper_assembly() -> None:
    """wgmma on integers, no spills, room beside for what quantizes the next x; some run while weights go to registers, and while sums of
    blocks become floats without conversions."""
    shape = {"m": 1024, "n": 14336, "k": 4096, "dtype": "bfloat16", "compute": "int8", "wanted": "product"}
    home = "halfbyte.kernels.gpu.linear.gemm_int8_hopper"
    ways = (("int4_channel", "row", 0), ("int4_channel", "row", 4), ("int4_g128", "row", 0), ("int8_g128", "block", 0))
    jobs = [linear_job(home, "sm_90", format=name, activation=way, low_rank=rank, configs=[0], **shape) for name, way, rank in ways]
    for (name, _, rank), [quantization, product] in zip(ways, compile_all(jobs), strict=True):
        assert product.spills == 0
        assert rank or 384 * product.registers + 128 * quantization.registers <= 1 << 16
        assert "IGMMA" in product.assembly
        assert ("HGMMA" in product.assembly) == bool(rank)
        assert name == "int4_channel" or product.assembly.count("I2F") < 32
        assert re.search(r"WARPGROUP.DEPBAR.LE gsb0, 0x[12]", product.assembly), "wgmma wait for each other"

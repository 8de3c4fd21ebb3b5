"""Many rows times a weight on Hopper: formats, odd sizes, tiles cut by any number of programs. Runs on a Hopper GPU only."""

from __future__ import annotations

import pytest
import torch
from float_support import check_linear

from halfbyte.formats import as_format
from halfbyte.kernels.gpu.hopper.tile import Static, one_block
from halfbyte.kernels.gpu.linear import gemm_hopper
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu

H, B = torch.float16, torch.bfloat16
CONFIGS = {
    4: [(64, 256, 6), (64, 128, 5), (128, 128, 4), (128, 64, 6)],
    8: [(64, 256, 5), (64, 128, 4), (64, 64, 6), (64, 32, 9), (128, 128, 3), (128, 64, 4)],
}
FORMATS = {
    4: [
        "int4_g128",
        "int4_g128_zp",
        "q4_0",
        "q4_1",
        "fp4_g32",
        "fp4_g16",
        "int4_g16_zp",
        "int4_g64_zp",
        "int4_channel_f16",
        "int4_channel",
        "int4_g256_f16",
    ],
    8: [
        "q8_0",
        "int8_g16",
        "int8_g16_zp",
        "int8_channel",
        "int8_channel_zp",
        "int8_g128",
        "int8_g64_zp",
        "int8_g32_offset",
        "int8_g256_f16",
    ],
}


def problem(name: str, m: int = 256, n: int = 4096, k: int = 4096, dtype: torch.dtype = B, *, paired: bool = False) -> Problem:
    return Problem("linear", m, n, k, as_format(name), dtype, paired=paired)


@pytest.fixture
def hopper(device: torch.device, gpu: Gpu) -> torch.device:
    if device.type != "cuda" or gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return device


@pytest.mark.parametrize(("name", "tile"), [(name, tile) for bits in (4, 8) for name in FORMATS[bits] for tile in CONFIGS[bits]])
@pytest.mark.parametrize("dtype", [H, B], ids=str)
def test_formats_and_shares(name: str, dtype: torch.dtype, tile: tuple[int, int, int], hopper: torch.device) -> None:
    """Each format and tile with another number of programs, so that all meet some: to compile them takes the time."""
    rows, block_m, stages = tile
    bits = as_format(name).bits
    rope = FORMATS[bits].index(name) + CONFIGS[bits].index(tile) + (dtype == H)
    m, n, k, programs = ((300, 333, 1024, 1), (130, 512, 2048, 7), (77, 640, 2048, 29))[rope % 3]
    for paired in {False, bits == 8}:
        asked = problem(name, m, n, k, dtype, paired=paired)
        most = gemm_hopper.most_stages(gpu_tiles.geometry(asked.format, (n, k)), rows, block_m, GPUS["sm_90"])
        config = gemm_hopper.Config(rows, block_m, min(stages, most), programs)
        rounded = {"weight_rounded": True, "point_rounded": gemm_hopper.subnormal_codes(asked) and asked.format.zero == "point"}
        check_linear(gemm_hopper, config, asked, hopper, interpreted=False, epilogue=m == 77, **rounded)


def test_k_need_not_be_whole_records(hopper: torch.device) -> None:
    for name in ("q4_0", "q8_0"):
        for config in (gemm_hopper.Config(64, 256, 4, 3), gemm_hopper.Config(64, 64, 5, 16)):  # a record in halves, and as a whole
            asked = problem(name, 200, 200, 1000, paired=name == "q8_0")
            check_linear(gemm_hopper, config, asked, hopper, interpreted=False, weight_rounded=True)


def test_x_need_not_be_aligned(hopper: torch.device) -> None:
    asked = problem("int4_g128", 70, 200, 1024)
    check_linear(
        gemm_hopper, gemm_hopper.configs(asked, GPUS["sm_90"])[0], asked, hopper, interpreted=False, weight_rounded=True, x_offset=3
    )


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem("int4_g128"), "sm_80", "Hopper's instructions"),
        (problem("q8_0", 15), "sm_90", "from 16 on"),
        (problem("int4_g128", 63), "sm_90", "from 64 on"),
        (problem("int4_g128", dtype=torch.float32), "sm_90", "16 bits"),
        (problem("int4_g32_f32", dtype=H), "sm_90", "16 bits"),
        (problem("int4_g20"), "sm_90", "TMA reads x in rows"),
        (problem("int4_g128", k=4095), "sm_90", "TMA reads x in rows"),
    ],
)
def test_what_it_refuses(asked: Problem, arch: str, reason: str) -> None:
    assert reason in (gemm_hopper.supports(asked, GPUS[arch]) or "")


@pytest.mark.parametrize("name", ["int4_g128", "q4_1", "q8_0", "int8_g32_offset"])
@pytest.mark.parametrize("m", [64, 65, 256, 1024, 8192])
def test_configs_fit(name: str, m: int) -> None:
    gpu = GPUS["sm_90"]
    for n, k in ((64, 128), (4096, 4096), (28672, 8192), (151936, 896)):
        asked = problem(name, m, n, k)
        assert gemm_hopper.supports(asked, gpu) is None
        geo = gpu_tiles.geometry(asked.format, (n, k))
        read = [] if one_block(geo) else [asked.format.scale]
        read += [] if geo.zero_dtype is None else [geo.zero_dtype]
        what = geo.blocks_a_record, geo.records_a_block, one_block(geo), asked.format.zero
        for config in gemm_hopper.configs(asked, gpu):
            tiles = -(-n // (2 * config.rows)) * -(-m // config.block_m)
            assert 1 <= config.programs <= gpu.sms
            assert config.programs <= tiles * -(-k // 128)
            assert config.stages >= 2
            ring = Static(config.rows, config.block_m, config.stages, asked.format.bits, *what, clamp=False)
            codes = ring.weight_stages * ring.block_n * (64 if ring.bits == 4 else ring.stage_k)
            scales = ring.scale_slots * ring.blocks_per_slab * ring.block_n * sum(dtype.itemsize for dtype in read)
            assert 2 * ring.stages * ring.block_m * ring.stage_k + codes + scales + gemm_hopper.RESERVED_BYTES <= gpu.shared

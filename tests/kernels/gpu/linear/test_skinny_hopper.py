"""Few rows times a weight on Hopper: formats, odd sizes, tiles cut by any number of programs. Runs on a Hopper GPU only."""

from __future__ import annotations

import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from aot import compile_all, linear_job
from float_support import check_linear
from samples import random_codes

from halfbyte import dispatch
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.linear import skinny_hopper, skinny_hopper_config, skinny_int8_hopper
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu

H, B = torch.float16, torch.bfloat16
FORMATS = ["int4_g128", "q4_0", "int4_g64", "int4_channel_f16", "int4_channel", "int4_g256_f16"]
FORMATS += ["fp4_g32", "q8_0", "int8_channel", "int8_g128", "int8_g64", "int4_g128_zp", "int4_g32_zp", "int4_channel_zp", "int8_g64_zp"]
FORMATS += ["int8_g16", "fp4_g16", "int4_g16_zp"]
INTEGERS = {"compute": "int8", "activation": "row"}


def problem(name: str, m: int = 8, n: int = 4096, k: int = 4096, dtype: torch.dtype = B, **ways: Any) -> Problem:
    return Problem("linear", m, n, k, as_format(name), dtype, **ways)


@pytest.fixture
def hopper(device: torch.device, gpu: Gpu) -> torch.device:
    if device.type != "cuda" or gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    return device


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize("dtype", [H, B], ids=str)
def test_formats_and_shares(name: str, dtype: torch.dtype, hopper: torch.device) -> None:
    """With each number of rows another config, and with each format and dtype others: to compile them takes the time."""
    number = FORMATS.index(name) + 2 * (dtype == H)
    narrow = 640, 1000 if name in ("q4_0", "q8_0") else 1152
    for m, n, k in ((7, 333, 1024), (16, 512, 2048), (1, *narrow), (60, 333, 1024), (150, 333, 1024)):
        asked = problem(name, m, n, k, dtype)
        configs = skinny_hopper.configs(asked, GPUS["sm_90"])
        number += 1
        for programs in (7, 132):
            config = configs[number % len(configs)]
            cut, paired = replace(config, programs=min(programs, config.programs)), programs == 7 and asked.format.bits == 8
            ways = {"interpreted": False, "weight_rounded": True, "epilogue": m in (7, 150)}
            check_linear(skinny_hopper, cut, replace(asked, paired=paired), hopper, **ways)


@pytest.mark.parametrize("name", ["int4_channel", "int8_channel"])
def test_integers(name: str, hopper: torch.device) -> None:
    for m, n, k in ((7, 333, 1000), (64, 640, 2048), (1, 64, 64), (2, 70, 32)):
        asked = problem(name, m, n, k, **INTEGERS, paired=name == "int8_channel")
        codes, x, bias = random_codes(asked.format, (n, k)), torch.randn(m, k).to(B), torch.randn(n)
        geo = gpu_tiles.geometry(codes.format, codes.shape, paired=asked.paired)
        views = gpu_tiles.views(gpu_tiles.pack(codes, paired=asked.paired).data.to(hopper), geo)
        expected = reference.linear(x, codes, bias, "int8", "row", (-1.0, 6.0))
        error = reference.error_bound(x, codes, bias, "int8", "row")
        for config in skinny_int8_hopper.configs(asked, GPUS["sm_90"])[: 2 if k < 128 else None]:
            out = torch.full((m, n), torch.nan, dtype=B, device=hopper)
            skinny_int8_hopper.launch(asked, config, x.to(hopper), views, out, Epilogue(bias.to(hopper), None, -1.0, 6.0))
            assert reference.agrees(out.cpu(), expected, error).all(), config


def test_x_need_not_be_aligned(hopper: torch.device) -> None:
    asked = problem("int4_g128", 7, 200, 1024)
    config = skinny_hopper.configs(asked, GPUS["sm_90"])[0]
    check_linear(skinny_hopper, config, asked, hopper, interpreted=False, weight_rounded=True, x_offset=3)


@pytest.mark.parametrize(
    ("asked", "arch", "reason"),
    [
        (problem("int4_g128"), "sm_80", "Hopper's instructions"),
        (problem("q8_0", 129), "sm_90", "128 rows of x at most where N is 4096"),
        (problem("q8_0", 65, 8192), "sm_90", "64 rows of x at most"),
        (problem("int4_g128_offset"), "sm_90", "has offsets"),
        (problem("int4_g128", dtype=torch.float32), "sm_90", "16 bits"),
        (problem("int8_g32_f32", dtype=H), "sm_90", "16 bits"),
        (problem("int4_g20"), "sm_90", "TMA reads x in rows"),
        (problem("int8_g16", sparse=True), "sm_90", "32 elements of K"),
        (problem("int4_g128", k=4095), "sm_90", "TMA reads x in rows"),
        (problem("int4_g128", n=1 << 26, k=1 << 15), "sm_90", "in 32 bits"),
        (problem("int8_channel", 65, **INTEGERS), "sm_90", "64 rows of x at most"),
        (problem("int8_channel", compute="int8", activation="row_offset"), "sm_90", "no offset"),
        (problem("int8_channel_zp", **INTEGERS), "sm_90", "no offset"),
        (problem("q8_0", **INTEGERS), "sm_90", "one scale each"),
    ],
)
def test_what_it_refuses(asked: Problem, arch: str, reason: str) -> None:
    module = skinny_int8_hopper if asked.compute == "int8" else skinny_hopper
    assert reason in (module.supports(asked, GPUS[arch]) or "")


@pytest.mark.parametrize("ways", [{}, INTEGERS], ids=["floats", "integers"])
@pytest.mark.parametrize("name", ["int4_channel", "q4_0", "int4_g32_zp", "int8_channel", "q8_0", "int6_g16_f32", "nvfp4"])
def test_configs_fit(name: str, ways: dict[str, Any]) -> None:
    gpu = GPUS["sm_90"]
    for m in (1, 9, 32, 64, 128):
        for n, k in ((64, 128), (4096, 4096), (28672, 8192), (151936, 896)):
            asked = problem(name, m, n, k, **ways)
            module = skinny_int8_hopper if ways else skinny_hopper
            if module.supports(asked, gpu) is None:
                for config in module.configs(asked, gpu):
                    static = skinny_hopper_config.compiled_for(asked, config, clamp=False)
                    steps = -(-n // static.rows) * -(-k // (128 * static.stage_slabs))
                    together = 4 // config.partitions
                    # Each has a step, or who is to come last is counted wrongly.
                    assert 1 <= config.programs <= min(steps, together * gpu.sms // -(-m // config.columns))
                    assert config.columns >= min(m, 64) or (config.panels == 1 and m <= 64)
                    assert config.stages >= 2
                    assert together * config.stages * static.stage_bytes + (8 << 10) <= gpu.shared


def test_measured_times_are_those_of_todays_configs() -> None:
    """Tables have configs as text: with another name of a field none of their times would be found."""
    for path in Path(dispatch.__file__).with_name("tables").glob("*.json"):
        configs = set(re.findall(r"Config\(columns=\d+, panels=[^)]*\)", path.read_text()))
        assert configs, path
        for text in configs:
            fields = {name: int(value) for name, value in re.findall(r"(\w+)=(\d+)", text)}
            assert str(skinny_hopper_config.Config(**fields)) == text


def test_rows_are_shared_out_where_panels_leave_programs_idle() -> None:
    gpu = GPUS["sm_90"]
    tiles = {(config.columns, config.programs) for config in skinny_hopper.configs(problem("int4_g128", 16), gpu)}
    assert {(16, 64), (8, 64)} <= tiles, "64 panels: whole tiles, and two programs for each, with 8 rows of x"
    assert all(config.columns == 16 for config in skinny_hopper.configs(problem("int4_g128", 16, n=8192), gpu))
    assert skinny_hopper.supports(problem("int4_g128", 128), gpu) is None
    times = [skinny_hopper.seconds(problem("int4_g128", 128), config) for config in skinny_hopper.configs(problem("int4_g128", 128), gpu)]
    assert times == sorted(times)  # type: ignore[type-var]
    assert skinny_hopper.seconds(problem("int4_g128", 64), skinny_hopper.configs(problem("int4_g128", 64), gpu)[0]) is None


def test_what_it_is_made_of() -> None:
    asked: dict[str, Any] = {"n": 8192, "k": 8192, "format": "int4_g128_zp", "dtype": "bfloat16", "configs": [0], "wanted": "resources"}
    jobs = [linear_job("halfbyte.kernels.gpu.linear.skinny_hopper", "sm_90", m=m, **asked) for m in (8, 32)]
    configs = skinny_hopper.configs(problem("int4_g128_zp", n=8192, k=8192), GPUS["sm_90"])
    alone = next(i for i, config in enumerate(configs) if config.panels == 4)  # each partition has rows of its own
    jobs.append(linear_job("halfbyte.kernels.gpu.linear.skinny_hopper", "sm_90", m=8, **asked | {"configs": [alone]}))
    jobs.append(linear_job("halfbyte.kernels.gpu.linear.skinny_hopper", "sm_90", m=32, **asked | {"n": 4096}))  # two programs for each tile
    [[few], [many], [no_split], [waits]] = compile_all(jobs)
    assert few.spills == many.spills == waits.spills == 0
    assert waits.ptx.count("ld.volatile.global.v4.b32") == 2 * 32 * 64 // (4 * 128)  # sums that are waited for, the first time and again
    records = 2 * 4  # of a stage, in four partitions
    assert few.ptx.count("mma.sync.aligned.m16n8k16") == 8 * records
    assert few.ptx.count("fma.rn.bf16x2") == 32 * records  # what takes point and constant off two weights of a lane, and nothing else
    assert "0x43004300" not in few.ptx  # into which codes would be put that are shifted plane by plane, not two by two
    assert many.ptx.count("wgmma.mma_async") == 8 * 4
    assert no_split.ptx.count("mbarrier.init") == 2 * configs[alone].stages  # and none that nobody waits for
    # Weights, x, scales, points: once for the first stages and once for the others.
    assert few.ptx.count("cp.async.bulk.tensor") == 2 * 4

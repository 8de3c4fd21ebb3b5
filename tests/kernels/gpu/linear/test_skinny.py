"""Few rows times a weight: every format, odd shapes, all activations, against the reference."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from float_support import check_linear

from halfbyte.formats import as_format
from halfbyte.kernels.gpu.linear import skinny, skinny_config
from halfbyte.kernels.problem import Problem
from halfbyte.machine import GPUS, Gpu

H, B, F = torch.float16, torch.bfloat16, torch.float32
FORMATS = [
    "int4_g128",
    "int4_g128_zp",
    "q4_0",
    "q4_1",
    "q8_0",
    "int8_channel",
    "int8_channel_zp",
    "int4_g20_zp",
    "int8_g64_offset",
    "int4_g288_zp_bf16",
    "int4_tensor",
    "int4_g32_f32",
    "int8_g128_zp",
    "int4_channel_zp",
    "mxfp4",
]
CONFIGS = {
    1: {"columns": 1, "slices": 8, "bands": 2, "warps": 8, "ahead": 2, "stages": 1},
    3: {"columns": 4, "slices": 2, "bands": 2, "warps": 4, "split": 3},
    4: {"columns": 4, "slices": 2, "bands": 1, "batch": 4, "warps": 4, "stages": 1},
    7: {"columns": 8, "slices": 1, "bands": 4, "batch": 4, "warps": 4, "split": 2, "stages": 1},
    17: {"columns": 16, "slices": 1, "bands": 8, "warps": 8, "split": 2, "records": 2, "ahead": 8},
}


def run(name: str, m: int, n: int, k: int, dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool, **how: object) -> None:
    problem = Problem("linear", m, n, k, as_format(name), dtype, paired=bool(how.pop("paired", False)))
    changes = {key: how.pop(key) for key in list(how) if key in skinny_config.Config.__dataclass_fields__}
    config = replace(skinny.configs(problem, gpu)[0], **changes)
    rounded = skinny_config.mode(problem) != "sums" and dtype != F
    check_linear(skinny, config, problem, device, interpreted=interpreted, weight_rounded=rounded, **how)


@pytest.mark.parametrize(("name", "m"), [(name, m) for i, name in enumerate(FORMATS) for m in CONFIGS if m not in (4, 7) or i % 4 == 0])
def test_every_format(name: str, m: int, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    dtype = (H, B, F)[(FORMATS.index(name) + m) % 3]
    run(name, m, 70, 300, dtype, gpu, device, interpreted, **CONFIGS[m], epilogue=m == 3)


@pytest.mark.parametrize("name", FORMATS)
@pytest.mark.parametrize(
    ("m", "how"),
    [
        (1, {"columns": 1, "slices": 8, "bands": 2, "warps": 8, "ahead": 2}),
        (1, {"columns": 1, "slices": 8, "bands": 1, "warps": 4, "records": 2}),
        (2, {"columns": 2, "slices": 4, "bands": 2, "warps": 4, "split": 2, "records": 4}),
        (3, {"columns": 4, "slices": 2, "bands": 1, "warps": 4, "ahead": 4}),
        (7, {"columns": 8, "slices": 1, "bands": 2, "warps": 4, "records": 4}),
    ],
)
def test_warps_multiply_by_themselves(name: str, m: int, how: dict[str, Any], gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """As with Triton 3.8 and later, where only a batch makes warps multiply eight columns by instructions of their own."""
    how = {"stages": 1, "batch": 1, "split": 1, "separate_warps": True, **how}
    static, _ = skinny_config.compiled_for(Problem("linear", m, 70, 1100, as_format(name), H), skinny_config.Config(**how), clamps=False)
    assert static.batch == how["warps"]
    run(name, m, 70, 1100, (H, B, F)[(FORMATS.index(name) + m) % 3], gpu, device, interpreted, **how, epilogue=m == 3)


@pytest.mark.parametrize(
    ("name", "m"), [("q8_0", 1), ("int8_channel_zp", 1), ("int8_g64_offset", 3), ("q8_0", 4), ("int8_channel", 7), ("int8_g48_zp", 17)]
)
def test_paired_bytes(name: str, m: int, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    for dtype in (F, (H, B)[m % 2]):
        run(name, m, 70, 300, dtype, gpu, device, interpreted, **CONFIGS[m], epilogue=m == 3, paired=True)


@pytest.mark.parametrize("name", ["int6_g16_f32", "int8_g16_zp", "int8_g12_offset", "int4_g16", "int4_g16_zp", "int4_g9_offset", "nvfp4"])
def test_blocks_of_16(name: str, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """Each step of a matrix instruction has a scale of its own."""
    for i, (m, changes) in enumerate((*CONFIGS.items(), (8, {}), (16, {}), (64, {}))):
        dtype = (H, B, F)[(i + len(name)) % 3]
        run(name, m, 70, 300, dtype, gpu, device, interpreted, **changes, paired="int8" in name and m < 4)


@pytest.mark.parametrize("name", ["int4_g128", "int4_g128_zp", "q8_0"])
@pytest.mark.parametrize("dtype", [H, B, F], ids=str)
def test_whole_tiles(name: str, dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """Shapes for which no mask is compiled."""
    run(name, 8, 128, 512, dtype, gpu, device, interpreted, columns=8, slices=1, records=2, split=2)


def test_long_blocks(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    for name in ("int4_g256_zp", "int8_g384", "int4_g256_offset"):
        run(name, 5, 80, 600, H, gpu, device, interpreted)


@pytest.mark.parametrize("shape", [(1, 1, 1), (2, 65, 129), (1, 100, 33), (9, 64, 128)])
def test_small_and_odd_shapes(shape: tuple[int, int, int], gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    for name in ("q4_0", "int8_g64_offset"):
        run(name, *shape, H, gpu, device, interpreted, epilogue=True)


def test_a_block_for_each_element(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    run("int4_g1_zp", 2, 17, 13, H, gpu, device, interpreted)


def test_rows_of_x_may_lie_apart(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    run("int4_g128", 3, 64, 256, H, gpu, device, interpreted, x_offset=3)


@pytest.mark.parametrize("arch", GPUS)
@pytest.mark.parametrize("m", [1, 2, 8, 16, 33, 64, 100, 128])
def test_a_config_for_every_shape(arch: str, m: int) -> None:
    matrix_columns = 8 if GPUS[arch].backend == "cuda" else 16  # that a matrix instruction has at least
    for n, k in ((1, 1), (4096, 4096), (151936, 896), (8192, 28672), (33, 100000)):
        for name in ("int4_g128", "int8_g128"):
            problem = Problem("linear", m, n, k, as_format(name), H)
            assert skinny.supports(problem, GPUS[arch]) is None
            found = skinny.configs(problem, GPUS[arch])
            assert found
            for config in found:
                assert config.columns * config.slices >= matrix_columns
                assert config.stages >= 1
                assert config.warps == config.batch or (config.batch == 1 and config.warps <= config.bands * config.slices)

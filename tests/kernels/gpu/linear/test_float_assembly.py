"""What compilers make of the floating-point kernels, for every architecture: the instructions that the design claims, and no spills."""

from __future__ import annotations

import re

import pytest
import torch
from aot import Binary, Job, compile_all, linear_job

from halfbyte.formats import as_format
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu

SKINNY = "halfbyte.kernels.gpu.linear.skinny"
HOPPER = "halfbyte.kernels.gpu.linear.gemm_hopper"
PROBLEMS = {
    "one row": {"m": 1, "n": 4096, "k": 4096, "format": "int4_g128"},
    "bfloat16, blocks of 32": {"m": 16, "n": 4096, "k": 4096, "format": "q4_0", "dtype": "bfloat16"},
    "many rows, points": {"m": 100, "n": 4096, "k": 4096, "format": "int4_g128_zp"},
    "bytes": {"m": 32, "n": 4096, "k": 4096, "format": "int8_channel", "dtype": "bfloat16"},
    "bytes, one row": {"m": 1, "n": 4096, "k": 4096, "format": "int8_channel", "dtype": "bfloat16"},
}
# What dispatch takes is compiled for sm_89 too, in test_ahead_of_time.py, as are odd sizes in float32: here its instructions are sm_80's.
ARCHES = ("sm_80", "sm_90", "sm_100", "sm_120", "gfx942")
SPILLS_ALONE = ("bfloat16, blocks of 32", "many rows, points")  # is what these are compiled for, once of each kind of matrix unit
SAME_PATH = ("sm_80", "sm_100", "gfx942")
BYTES = ("sm_80", "sm_90", "sm_100", "gfx942")  # and sm_120 as sm_80


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[str, str], Binary]:
    """The best guess for each problem, all compiled at once."""
    arches = {what: SAME_PATH if what in SPILLS_ALONE else BYTES if what.startswith("bytes") else ARCHES for what in PROBLEMS}
    keys = [(what, arch) for what in PROBLEMS for arch in arches[what]]
    wanted = {what: "resources" if what in SPILLS_ALONE else "assembly" for what in PROBLEMS}
    found = compile_all([linear_job(SKINNY, arch, configs=[0], wanted=wanted[what], **PROBLEMS[what]) for what, arch in keys])
    return {key: binaries[0] for key, binaries in zip(keys, found, strict=True)}


def test_nothing_spills(compiled: dict[tuple[str, str], Binary]) -> None:
    assert not {key: binary.spills for key, binary in compiled.items() if binary.spills}


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch.startswith("sm_")])
def test_weights_go_from_memory_to_the_matrix_unit_as_designed(arch: str, compiled: dict[tuple[str, str], Binary]) -> None:
    one = compiled["one row", arch].assembly
    assert "HMMA.16816.F32" in one  # tensor cores for a single row
    assert re.search(r"(LDGSTS\S*\.128|LDG\S*\.128)", one)  # 16 bytes a lane
    assert re.search(r"LOP3.LUT \S+ \S+ (0x64006400|0xf000f0|0xf000f|R)", one)
    assert not re.search(r"I2F(P)?\.F16", one)  # codes become numbers by their bits
    # Eight weights: a shift, four LOP3 and four fused multiply-adds. A record is 64 weights a lane and band.
    bands = len(re.findall("HMMA", one)) // 8
    assert len(re.findall("HFMA2", one)) <= 32 * bands + 4
    if arch not in BYTES:
        return
    assert "PRMT" in compiled["bytes", arch].assembly
    # Four bytes: a shift, four LOP3 and two fused multiply-adds. A record is 64 bytes a lane and band.
    one = compiled["bytes, one row", arch].assembly
    bands = len(re.findall("HMMA", one)) // 8
    assert re.search(r"LDG\S*\.128", one)
    assert "LDSM" not in one
    assert len(re.findall("LOP3", one)) <= 64 * bands + 40
    assert len(re.findall("HFMA2", one)) <= 32 * bands + 4


def test_hopper_reads_with_tma_and_multiplies_from_registers() -> None:
    jobs = [
        linear_job(HOPPER, "sm_90", configs=[0], m=512, n=4096, k=4096, format=name, dtype=dtype)
        for name, dtype in (("int4_g128", "bfloat16"), ("q4_1", "float16"), ("int4_g64_zp", "float16"))
    ]
    for [binary] in compile_all(jobs):
        assert binary.spills == 0
        assert "UTMALDG.2D" in binary.assembly
        assert re.search(r"HGMMA\.64x\d+x16\.F32(\.BF16)? R\d+, R\d+, gdesc", binary.assembly)  # A from registers
        assert re.search(r"wgmma\.wait_group\.sync\.aligned\s+2\b", binary.ptx)  # while two planes are multiplied the next two are made
        assert "STSM.16.MT88.4" in binary.assembly  # sums turn on their way to shared memory,
        assert "UTMASTG.2D" in binary.assembly  # from which TMA writes them


def test_bytes_are_read_by_twos_on_hopper() -> None:
    """Two bytes are next to each other in the register that wgmma takes: no single ones are loaded, none go from lane to lane.

    No tile is cut here: where sums meet, a lane tells the others what it found.
    """
    problem = {"m": 1024, "n": 4096, "k": 4096, "dtype": "bfloat16", "configs": [0]}
    for [binary] in compile_all([linear_job(HOPPER, "sm_90", format=name, **problem) for name in ("q8_0", "int8_channel")]):
        assert binary.spills == 0
        assert re.search(r"HGMMA\.64x\d+x16\.F32\.BF16 R\d+, R\d+, gdesc", binary.assembly)
        assert binary.assembly.count("LDS.U16") == 96  # 16 for a tile's first two planes, 32 for each record; two warpgroups
        assert "SHFL" not in binary.assembly
        assert len(re.findall(r"\bLDS\.[SU]8\b", binary.assembly)) <= 8  # of Triton's own, at the start of each partition


def test_paired_bytes_are_read_by_ldmatrix_on_hopper() -> None:
    """16 rows by 32 k of a warp at once, in order; where few rows are multiplied, too."""
    many = {"m": 1024, "n": 4096, "k": 4096, "dtype": "bfloat16", "configs": [0], "paired": True}
    jobs = [linear_job(HOPPER, "sm_90", format=name, **many) for name in ("q8_0", "int8_channel")]
    few = many | {"m": 16, "n": 8192}  # a tile for each program: no sums meet
    jobs.append(linear_job("halfbyte.kernels.gpu.linear.skinny_hopper", "sm_90", format="int8_channel", **few))
    for [binary], count in zip(compile_all(jobs), (12, 12, 16), strict=True):  # 2 for a tile's first planes, 4 for a record
        assert binary.spills == 0
        assert binary.assembly.count("LDSM.16.M88.4") == count
        assert not re.search(r"\bLDS\.[SU]16\b|SHFL", binary.assembly)


def launch_hopper(gpu: Gpu, format: str, rows: int, block_m: int, stages: int) -> None:
    """A tile of the kernel for Hopper with all that may be done at its end, for an odd N, and programs that cut tiles."""
    from halfbyte.kernels.gpu.linear import gemm_hopper

    problem = Problem("linear", 300, 4173, 4096, as_format(format), torch.bfloat16)
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    views = gpu_tiles.views(torch.empty(geo.nbytes, dtype=torch.uint8, device="meta"), geo)
    x, out = (torch.empty(problem.m, size, dtype=problem.dtype, device="meta") for size in (problem.k, problem.n))
    ends = Epilogue(torch.empty(problem.n, device="meta"), torch.empty_like(out), -1.0, 2.0)
    gemm_hopper.launch(problem, gemm_hopper.Config(rows, block_m, stages, programs=29), x, views, out, ends)


def test_every_tile_for_hopper_fits_in_shared_memory() -> None:
    from halfbyte.kernels.gpu.linear import gemm_hopper

    gpu = GPUS["sm_90"]
    tiles = set()
    for name, with_zero in (("int4_g128", "int4_g128_zp"), ("q8_0", "int8_g128_zp")):
        problems = (Problem("linear", m, n, 4096, as_format(name), torch.bfloat16) for m in (64, 256, 4096) for n in (4096, 28672))
        found = (config for asked in problems for config in gemm_hopper.configs(asked, gpu))
        tiles |= {(with_zero, config.rows, config.block_m, config.stages) for config in found}
    assert tiles >= {("int4_g128_zp", *tile) for tile in ((64, 256, 6), (64, 128, 5), (128, 128, 4), (128, 64, 6))}
    assert tiles >= {("int8_g128_zp", *tile) for tile in ((64, 256, 5), (64, 128, 4), (128, 128, 3), (128, 64, 4))}
    names, function = ("format", "rows", "block_m", "stages"), "tests/kernels/gpu/linear/test_float_assembly.py:launch_hopper"
    jobs = [Job(function, "sm_90", dict(zip(names, tile, strict=True)), "shared") for tile in tiles]
    for tile, [binary] in zip(tiles, compile_all(jobs), strict=True):
        assert 0 < binary.shared <= gpu.shared, tile
    # That is what the compiler says in the end, for those of them that are compiled soonest.
    tile = ("int4_g128_zp", 64, 64, 8)
    early, late = (Job(function, "sm_90", dict(zip(names, tile, strict=True)), wanted) for wanted in ("shared", "resources"))
    [[first], [last]] = compile_all([early, late])
    assert first.shared == last.shared
    assert last.spills == 0


def test_reductions_of_programs_that_share_tiles_spill_nothing() -> None:
    """With Triton 3.9 those of the widest tile did, and of the smallest."""
    cases = ((1024, "int4_g128", 4, "block_m=256"), (128, "int4_channel", 1, "block_m=64"), (128, "q8_0", 2, "block_m=64"))
    common = {"n": 4096, "k": 4096, "dtype": "bfloat16", "wanted": "resources"}
    jobs = [linear_job(HOPPER, "sm_90", m=m, format=name, configs=[config], **common) for m, name, config, _ in cases]
    for (*_, tile), [binary] in zip(cases, compile_all(jobs), strict=True):
        assert tile in binary.options
        assert "scratch=None" not in binary.options
        assert binary.spills == 0


def launch_rounded(gpu: Gpu, format: str) -> None:
    """Of tiles that get few registers the one that takes most, with all that may be done at its end, cut by programs."""
    from halfbyte.kernels.gpu.linear import gemm_hopper, rounded

    problem = Problem("linear", 256, 4173, 4096, as_format(format), torch.bfloat16, "int8", "block")
    geo = gpu_tiles.geometry(problem.format, (problem.n, problem.k))
    views = gpu_tiles.views(torch.empty(geo.nbytes, dtype=torch.uint8, device="meta"), geo)
    x, out = (torch.empty(problem.m, size, dtype=problem.dtype, device="meta") for size in (problem.k, problem.n))
    ends = Epilogue(torch.empty(problem.n, device="meta"), torch.empty_like(out), -1.0, 2.0)
    rounded.launch(problem, rounded.Config(64, 128, gemm_hopper.most_stages(geo, 64, 128, gpu), programs=128), x, views, out, ends)


def test_products_leave_registers_for_the_pass_that_rounds_and_spill_none() -> None:
    jobs = [
        Job("tests/kernels/gpu/linear/test_float_assembly.py:launch_rounded", "sm_90", {"format": name}, "resources")
        for name in ("q4_0", "int4_g64")
    ]
    for [_, product] in compile_all(jobs):
        assert product.registers == 128
        assert product.spills == 0


def test_configs_for_few_rows_fit_in_shared_memory() -> None:
    common = {"n": 4173, "k": 4096, "bias": True, "residual": True, "configs": [0], "wanted": "shared"}
    jobs = [
        linear_job(SKINNY, arch, m=m, format=name, dtype="bfloat16", **common)
        for arch, name, m in (
            *(("sm_90", name, m) for name in ("int4_g128", "q8_0") for m in (16, 128)),
            *(("sm_89", "int4_g128", m) for m in (16, 128)),
        )
    ]
    for job, binaries in zip(jobs, compile_all(jobs), strict=True):
        for binary in binaries:
            assert 0 < binary.shared <= GPUS[job.arch].shared, job

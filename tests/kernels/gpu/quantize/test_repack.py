"""Weights from a CPU's layout to a GPU's: the bytes that packing their codes for the GPU gives."""

from dataclasses import replace

import pytest
import torch
from aot import Job, compile_all
from samples import random_codes

from halfbyte.formats import as_format
from halfbyte.kernels.gpu.quantize import repack
from halfbyte.layouts import cpu_tiles, gpu_tiles
from halfbyte.machine import Gpu

FILE = "tests/kernels/gpu/quantize/test_repack.py"
FORMATS = (
    "q4_0", "q4_1", "q8_0", "int5_g32", "int5_g20_offset", "int6_g16", "int6_g32", "iq4_nl", "mxfp4", "nvfp4", "int4_g32_offset_f16",
    "int4_g128_zp", "int4_channel", "int8_channel", "int8_channel_zp", "int8_g16_f16", "int4_g20_zp", "int8_g33_offset", "int4_g12_zp",
    "int8_tensor",
)  # fmt: skip


@pytest.mark.parametrize("fmt", FORMATS)
@pytest.mark.parametrize(("count", "n", "k"), [(3, 96, 160), (1, 33, 96), (2, 64, 384), (1, 70, 132)])
def test_the_bytes_of_packing(fmt: str, count: int, n: int, k: int, device: torch.device) -> None:
    """Stacks of matrices, with rows and blocks that fill no panel and no record."""
    weights = [random_codes(as_format(fmt), (n, k), seed) for seed in range(count)]
    source, data = cpu_tiles.geometry(weights[0].format, (n, k)), torch.cat([cpu_tiles.pack(one).data for one in weights])
    kept = weights[0].format.family == "fp4"
    expected = [gpu_tiles.pack(one if kept or not one.format.has_limited_codes else one.integers()) for one in weights]
    target = gpu_tiles.geometry(expected[0].format, (n, k))
    assert repack.why_not(source, target) is None
    out = torch.zeros(count * target.nbytes, dtype=torch.uint8, device=device)
    repack.repack(data.to(device), source, target, out, count)
    assert torch.equal(out.cpu(), torch.cat([one.data for one in expected]))


def test_what_is_not_moved() -> None:
    """Other codes, zeros that are left out, and blocks that a CPU splits."""
    fmt, shape = as_format("q8_0"), (64, 128)
    source, target = cpu_tiles.geometry(fmt, shape), gpu_tiles.geometry(fmt, shape)
    assert repack.why_not(source, target) is None
    long = as_format("int8_channel"), (64, cpu_tiles.LONGEST_BLOCK + 32)
    for first, second, reason in (
        (source, gpu_tiles.geometry(as_format("q4_0"), shape), "does not hold the codes"),
        (replace(source, sparse=True), target, "left out"),
        (source, replace(target, paired=True), "in pairs"),
        (cpu_tiles.geometry(*long), gpu_tiles.geometry(*long), "split"),
    ):
        assert reason in str(repack.why_not(first, second))


def launch_on_meta(_: Gpu, fmt: str) -> None:
    source, target = cpu_tiles.geometry(as_format(fmt), (768, 2048)), gpu_tiles.geometry(as_format(fmt).integers, (768, 2048))
    data, out = (torch.empty(8 * one.nbytes, dtype=torch.uint8, device="meta") for one in (source, target))
    repack.repack(data, source, target, out, 8)


@pytest.mark.parametrize("fmt", ["q4_0", "int6_g16", "iq4_nl"])
def test_it_compiles_without_spills(fmt: str) -> None:
    """Codes of 4 bits, planes, and indices."""
    jobs = [Job(f"{FILE}:launch_on_meta", arch, {"fmt": fmt}, wanted="resources") for arch in ("sm_80", "sm_90", "sm_120", "gfx942")]
    assert [[binary.spills for binary in found] for found in compile_all(jobs)] == [[0]] * len(jobs)

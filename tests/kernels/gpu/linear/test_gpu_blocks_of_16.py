"""What compilers make of the kernels for weights with blocks of 16 (Q6_K, NVFP4): twice as many scales as blocks of 32 have,
which all have to fit in registers."""

from __future__ import annotations

from typing import Any

import pytest
from aot import Job, compile_all, grouped_job, linear_job

from halfbyte.kernels.gpu.linear import gemm_hopper, gemm_int8, skinny, skinny_hopper
from halfbyte.machine import GPUS

FORMATS = ("int6_g16", "nvfp4", "int8_g16")  # Q6_K's blocks, NVIDIA's, and bytes
SIZES: dict[str, Any] = {"n": 4096, "k": 4096, "dtype": "bfloat16"}
# Rows of x for which each kernel's first config is compiled: it is what dispatch takes where nothing was measured.
FLOATS = {
    (skinny.__name__, "sm_80"): (1, 8, 64),
    (skinny.__name__, "sm_90"): (1, 64),
    (skinny_hopper.__name__, "sm_90"): (1, 16, 64),
    (gemm_hopper.__name__, "sm_90"): (128, 1024),
}


def _spills(jobs: dict[str, Job]) -> dict[str, int]:
    """Compile jobs, and return the bytes that each kernel spills, if any; no kernel has more shared memory than its GPU."""
    found = {}
    for (name, job), binaries in zip(jobs.items(), compile_all([*jobs.values()]), strict=True):
        for binary in binaries:
            assert 0 < binary.registers <= 255
            assert binary.shared <= GPUS[job.arch].shared, name
            if binary.spills:
                found[f"{name}: {binary.kernel}"] = binary.spills
    return found


@pytest.mark.parametrize("format", FORMATS)
def test_floats_spill_nothing(format: str) -> None:
    jobs = {
        f"{module} for {arch}, {m} rows": linear_job(module, arch, configs=[0], wanted="resources", m=m, format=format, **SIZES)
        for (module, arch), rows in FLOATS.items()
        for m in rows
    }
    assert not _spills(jobs)


@pytest.mark.parametrize("arch", ["sm_80", "sm_90"])
def test_integers_and_experts_spill_nothing(arch: str) -> None:
    jobs = {
        f"gemm_int8, {m} rows of {format}, {activation}": linear_job(
            gemm_int8.__name__, arch, wanted="resources", m=m, format=format, compute="int8", activation=activation, **SIZES
        )
        for m, format, activation in ((4, "int8_g16", "block"), (64, "int6_g16", "block"), (64, "int4_g16", "block_offset"))
    }
    jobs |= {
        f"grouped, {rows} rows of {format}": grouped_job(arch, rows, 8, 4096, 2048, format)
        for rows, format in ((8, "nvfp4"), (256, "int6_g16"))
    }
    assert not _spills(jobs)

"""Kernels in Gluon for Hopper GPUs, compiled here by the Triton that torch brings: one of each file that makes views of shared memory."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton", reason="torch for CPUs brings none")

from aot import Job, compile_all, linear_job

from halfbyte.machine import GPUS
from halfbyte.versions import TESTED, why_untested

if (_reason := why_untested("gluon")) is not None and " older than " in _reason:
    pytest.skip(_reason, allow_module_level=True)

HOME = "halfbyte.kernels.gpu.linear"
MANY: dict[str, Any] = {"m": 512, "n": 4096, "k": 4096, "dtype": "bfloat16", "configs": [0], "wanted": "resources"}
FEW: dict[str, Any] = {**MANY, "m": 8, "n": 8192}
CONV: dict[str, Any] = {"dtype": "int8", "format": "int8_channel", "channels": 128, "outputs": 128, "size": 28}
JOBS = {
    "gemm_hopper": linear_job(f"{HOME}.gemm_hopper", "sm_90", **MANY, format="q4_1"),
    "gemm_int8_hopper": linear_job(f"{HOME}.gemm_int8_hopper", "sm_90", **MANY, format="int8_channel", compute="int8", activation="row"),
    "skinny_hopper": linear_job(f"{HOME}.skinny_hopper", "sm_90", **FEW, format="int8_g64_zp"),
    "skinny_hopper, 2:4 sparse": linear_job(f"{HOME}.skinny_hopper", "sm_90", **FEW, format="int4_g128", sparse=True),
    "skinny_int8_hopper": linear_job(f"{HOME}.skinny_int8_hopper", "sm_90", **FEW, format="int4_channel", compute="int8", activation="row"),
    "grouped_hopper": Job(
        "tests/kernels/gpu/experts/test_grouped_compiled.py:launch", "sm_90", {"format": "q8_0", "tile": 64, "compute": "float"}
    ),
    "conv_hopper": Job("tests/kernels/gpu/conv/test_gpu_conv_compiled.py:launch_hopper", "sm_90", CONV, "resources"),
    "conv_teams": Job(
        "tests/kernels/gpu/conv/test_gpu_conv_compiled.py:launch_teams",
        "sm_90",
        {"dtype": "bfloat16", "format": "int8_channel", "channels": 512, "outputs": 512, "size": 3},
        "resources",
    ),
}


def test_the_installed_triton_is_tested() -> None:
    assert why_untested("gluon") is None, f"raise the newest of {TESTED['gluon']} in halfbyte/versions.py"


@pytest.mark.parametrize("name", JOBS)
def test_kernels_for_hopper_compile(name: str) -> None:
    [[*_, kernel]] = compile_all([JOBS[name]])
    assert kernel.spills == 0
    assert 0 < kernel.shared <= GPUS["sm_90"].shared

"""What dispatch takes compiles for every architecture, without spills, and into the instructions that the choice is made for."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aot import Binary, Job, compile_all, linear_job

from halfbyte.kernels.gpu.transformer import gates
from halfbyte.machine import GPUS, Gpu

ARCHES = ("sm_80", "sm_89", "sm_90", "sm_100", "sm_120", "gfx942")
ODD = ("sm_80", "sm_90", "gfx942")  # where what has no fast path is compiled
# With sm_80's matrix unit and tiles, in fewer stages as they have less shared memory: one row shows that the compiler knows them.
SAME_UNITS = ("sm_89", "sm_120")
PROBLEMS: dict[str, dict[str, Any]] = {
    "one row": {"m": 1, "n": 4096, "k": 4096, "format": "int4_g128", "dtype": "float16"},
    "some rows": {"m": 64, "n": 4096, "k": 4096, "format": "q4_0", "dtype": "bfloat16"},
    "many rows": {"m": 2048, "n": 4096, "k": 4096, "format": "int4_g128", "dtype": "bfloat16"},
    "int8": {"m": 64, "n": 4096, "k": 4096, "format": "int4_channel", "dtype": "bfloat16", "compute": "int8", "activation": "row"},
    "odd": {"m": 3, "n": 100, "k": 1000, "format": "int4_g48_offset", "dtype": "float32", "bias": True, "residual": True},
}


def compiled_for(what: str) -> tuple[str, ...]:
    if what == "odd":
        return ODD
    return ARCHES if what == "one row" else tuple(arch for arch in ARCHES if arch not in SAME_UNITS)


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[str, str], list[Binary]]:
    keys = [(what, arch) for arch in ARCHES for what in PROBLEMS if arch in compiled_for(what)]
    wanted = {what: "resources" if what in ("many rows", "odd") else "product" for what in PROBLEMS}
    jobs = [linear_job(None, arch, wanted=wanted[what], **PROBLEMS[what]) for what, arch in keys]
    return dict(zip(keys, compile_all(jobs), strict=True))


@pytest.mark.parametrize("arch", ARCHES)
def test_compiles_without_spills(arch: str, binaries: dict[tuple[str, str], list[Binary]]) -> None:
    for what, binary in ((what, binary) for (what, on), found in binaries.items() for binary in found if on == arch):
        assert 0 < binary.registers <= (255 if arch.startswith("sm_") else 512)
        assert binary.shared <= GPUS[arch].shared
        # float32 activations in three pieces, an offset and blocks with gaps together take more registers than there are.
        assert binary.spills <= (256 if what == "odd" else 0), f"{binary.kernel}: {binary.spills}"


def test_stages_fit_where_there_is_less_shared_memory() -> None:
    jobs = [linear_job(None, arch, wanted="shared", **PROBLEMS[what]) for arch in SAME_UNITS for what in ("some rows", "int8")]
    for job, binaries in zip(jobs, compile_all(jobs), strict=True):
        assert all(binary.shared <= GPUS[job.arch].shared for binary in binaries), job


@pytest.mark.parametrize("arch", ARCHES)
def test_matrix_units_are_used(arch: str, binaries: dict[tuple[str, str], list[Binary]]) -> None:
    floats, integers = (
        (("HMMA", "HGMMA", "tcgen05", "UTCHMMA"), ("IMMA", "IGMMA", "UTCIMMA"))
        if arch.startswith("sm_")
        else (("mfma_f32",), ("mfma_i32",))
    )
    for what, wanted in (("one row", floats), ("some rows", floats), ("int8", integers)):
        if arch in compiled_for(what):
            text = binaries[what, arch][-1].assembly
            assert any(word in text for word in wanted), f"{what}: none of {wanted}"


@pytest.mark.parametrize("arch", [arch for arch in ARCHES if arch.startswith("sm_")])
def test_weights_are_read_16_bytes_at_a_time(arch: str, binaries: dict[tuple[str, str], list[Binary]]) -> None:
    text = binaries["one row", arch][-1].assembly
    assert "LDG.E.128" in text or "LDGSTS.E.BYPASS.128" in text or "LDG.E.ENL2.256" in text
    assert "LOP3" in text


def launch_unknown_gate(gpu: Gpu) -> None:
    name: Any = "new"
    gates.launch(gpu, torch.empty(1, 64, device="meta"), torch.empty(1, 32, device="meta"), name)


def test_a_gate_function_without_code_does_not_compile() -> None:
    job = Job("tests/kernels/gpu/test_ahead_of_time.py:launch_unknown_gate", "sm_90", wanted="resources")
    with pytest.raises(AssertionError, match="a gate function that has no code for GPUs"):
        compile_all([job])

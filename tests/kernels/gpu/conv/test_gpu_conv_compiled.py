"""The kernels of convolutions compile for every GPU, and keep what they hold in registers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aot import Binary, Job, compile_all

from halfbyte.formats import as_format
from halfbyte.kernels.gpu.conv import depthwise as conv_depthwise
from halfbyte.kernels.gpu.conv import dynamic as conv_dynamic
from halfbyte.kernels.gpu.conv import few as conv_few
from halfbyte.kernels.gpu.conv import hopper as conv_hopper
from halfbyte.kernels.gpu.conv import image as conv_image
from halfbyte.kernels.gpu.conv import implicit_gemm as conv
from halfbyte.kernels.gpu.conv import teams as conv_teams
from halfbyte.kernels.problem import Activation, ConvProblem, Epilogue, Window
from halfbyte.layouts import convolution
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import Gpu

ARCHES = ("sm_80", "sm_100", "sm_120", "gfx942")  # sm_89 has the instructions of sm_80
FILE = "tests/kernels/gpu/conv/test_gpu_conv_compiled.py"
# What is launched, with (dtype, format, channels, outputs, size)
CASES = {
    "int8": ("launch", "int8", "int8_channel", 128, 128, 28),
    "int8, small": ("launch", "int8", "int8_channel", 64, 64, 7),
    "stem": ("launch", "int8", "int8_channel", 3, 64, 56),
    "float, 8 bits": ("launch", "float16", "int8_channel", 128, 128, 28),
    "float, 4 bits": ("launch", "float16", "int4_g32", 128, 128, 28),
    "dynamic": ("launch_dynamic", "float16", "int8_channel", 128, 128, 28),
    "dynamic, blocks": ("launch_dynamic", "float16", "int4_g32", 128, 128, 28),
    "offsets of rows": ("launch_row_offset", "float16", "int8_channel", 128, 128, 28),
    "offsets of blocks": ("launch_block_offset", "float16", "int4_g32", 128, 128, 28),
    "images": ("launch_image", "float16", "int8_channel", 128, 128, 28),
    "float32": ("launch", "float32", "int8_channel", 128, 128, 28),
    "few, 4 bits": ("launch_few", "bfloat16", "int4_g32", 256, 256, 5),
    "depthwise": ("launch_depthwise", "float16", "int8_channel", 1, 128, 28),
}
HOPPER = {
    "int8": ("launch_hopper", "int8", "int8_channel", 128, 128, 28),
    "int8, 64": ("launch_hopper", "int8", "int8_channel", 64, 64, 56),
    "int8, 7": ("launch_hopper", "int8", "int8_channel", 512, 512, 7),
    "float": ("launch_hopper", "float16", "int4_g32", 128, 128, 28),
    "teams": ("launch_teams", "bfloat16", "int4_g32", 512, 512, 3),
    "teams, 8 bits": ("launch_teams", "bfloat16", "int8_channel", 512, 512, 3),
}


def _problem(dtype: str, format: str, channels: int, outputs: int, size: int) -> ConvProblem:
    sizes = Filter(as_format(format), outputs, channels, (3, 3), outputs if channels == 1 else 1)
    return ConvProblem(sizes, Window((1, 1), (1, 1, 1, 1)), 8, (size, size), getattr(torch, dtype))


def _tensors(problem: ConvProblem) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, weight, table and out, without memory."""
    sizes = problem.sizes
    channels = convolution.padded_for_gpu(sizes).channels if sizes.groups == 1 else sizes.out
    x = torch.empty(problem.batch, *problem.image, channels, dtype=problem.dtype, device="meta")
    weight = torch.empty(convolution.gpu_geometry(sizes).nbytes, dtype=torch.uint8, device="meta")
    return (
        x,
        weight,
        torch.empty(1, 4 + sizes.taps, sizes.out, device="meta"),
        torch.empty(problem.m, sizes.out, dtype=x.dtype, device="meta"),
    )


def launch(gpu: Gpu, **case: int) -> None:
    problem = _problem(**case)  # type: ignore[arg-type]
    x, weight, table, out = _tensors(problem)
    config = conv.configs(problem, gpu)[0]
    if problem.dtype == torch.int8:
        conv.launch(problem, config, x, weight, out, Epilogue.of_codes(table, -3, (-128, 127)))
    else:
        conv.launch(problem, config, x, weight, out, Epilogue(table[0, 0], out, 0.0, 6.0))


def launch_dynamic(gpu: Gpu, activation: Activation = "block", **case: int) -> None:
    problem = replace(_problem(**case), activation=activation)  # type: ignore[arg-type]
    x, weight, _, out = _tensors(problem)
    conv_dynamic.launch(problem, conv_dynamic.configs(problem, gpu)[0], x, weight, out, Epilogue())


def launch_row_offset(gpu: Gpu, **case: int) -> None:
    launch_dynamic(gpu, "row_offset", **case)


def launch_block_offset(gpu: Gpu, **case: int) -> None:
    launch_dynamic(gpu, "block_offset", **case)


def launch_image(gpu: Gpu, **case: int) -> None:
    problem = _problem(**case)  # type: ignore[arg-type]
    x, weight, table, out = _tensors(problem)
    conv_image.launch(problem, conv_image.configs(problem, gpu)[0], x, weight, out, Epilogue(table[0, 0], out, 0.0, 6.0))


def launch_depthwise(gpu: Gpu, **case: int) -> None:
    problem = _problem(**case)  # type: ignore[arg-type]
    x, _, table, out = _tensors(problem)
    conv_depthwise.launch(problem, conv_depthwise.configs(problem, gpu)[0], x, table[0, 4:], out, Epilogue())


def launch_few(gpu: Gpu, **case: int) -> None:
    problem = _problem(**case)  # type: ignore[arg-type]
    assert conv_few.supports(problem, gpu) is None
    x, weight, table, out = _tensors(problem)
    conv_few.launch(problem, conv_few.configs(problem, gpu)[0], x, weight, out, Epilogue(table[0, 0], out, 0.0, 6.0))


def launch_hopper(gpu: Gpu, **case: int) -> None:
    problem = _problem(**case)  # type: ignore[arg-type]
    assert conv_hopper.supports(problem, gpu) is None
    x, weight, table, out = _tensors(problem)
    config = conv_hopper.configs(problem, gpu)[0]
    if problem.dtype == torch.int8:
        conv_hopper.launch(problem, config, x, weight, out, Epilogue.of_codes(table, -3, (-128, 127)))
    else:
        conv_hopper.launch(problem, config, x, weight, out, Epilogue(table[0, 0], out, 0.0, 6.0))


def launch_teams(gpu: Gpu, **case: int) -> None:
    problem = _problem(**case)  # type: ignore[arg-type]
    assert conv_teams.supports(problem, gpu) is None
    x, weight, table, out = _tensors(problem)
    conv_teams.launch(problem, conv_teams.configs(problem, gpu)[0], x, weight, out, Epilogue(table[0, 0], out, 0.0, 6.0))


NAMES = [
    *(("sm_90", case) for case in CASES),
    *(("sm_90", f"Hopper {case}") for case in HOPPER),
    *((arch, case) for arch in ARCHES for case in ("int8", "float, 4 bits")),
    ("sm_80", "dynamic, blocks"),
    *((arch, case) for arch in ("sm_80", "gfx942") for case in ("offsets of rows", "images", "float32")),
    ("gfx942", "offsets of blocks"),
]


@pytest.fixture(scope="module")
def binaries() -> dict[tuple[str, str], list[Binary]]:
    jobs = []
    for arch, name in NAMES:
        function, *case = HOPPER[name.removeprefix("Hopper ")] if name.startswith("Hopper") else CASES[name]
        kwargs = dict(zip(("dtype", "format", "channels", "outputs", "size"), case, strict=True))
        jobs.append(Job(f"{FILE}:{function}", arch, kwargs, "resources"))
    return dict(zip(NAMES, compile_all(jobs), strict=True))


@pytest.mark.parametrize(("arch", "name"), NAMES)
def test_nothing_is_spilled(arch: str, name: str, binaries: dict[tuple[str, str], list[Binary]], gpu: Gpu) -> None:
    for binary in binaries[arch, name]:
        assert binary.spills == 0, f"{binary.kernel} for {arch} spills {binary.spills} bytes: {binary.options}"


@pytest.mark.parametrize("name", ["int8", "float, 8 bits"])
def test_matrix_units_fed_asynchronously(name: str, binaries: dict[tuple[str, str], list[Binary]]) -> None:
    binary = binaries["sm_90", name][-1]
    assert "wgmma.mma_async" in binary.ptx
    assert "cp.async.cg.shared.global" in binary.ptx

"""Hopper's kernels without a GPU, in an interpreter of our own: numbers, barriers, and places in memory."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import gluon_interpreter
import numpy as np
import pytest
import torch
import triton
from float_support import check_linear
from gluon_interpreter import interpreted
from samples import random_codes
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfbyte.errors import KernelError
from halfbyte.formats import as_format
from halfbyte.kernels import conv_reference, reference
from halfbyte.kernels.gpu.conv import hopper as conv_hopper
from halfbyte.kernels.gpu.hopper.gluon_compat import LARGER_VIEWS, async_load
from halfbyte.kernels.gpu.linear import gemm_hopper, gemm_int8_hopper, skinny_hopper, skinny_hopper_config, skinny_int8_hopper
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.runtime import launch
from halfbyte.kernels.problem import Activation, ConvProblem, Epilogue, Problem, Window
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import GPUS
from halfbyte.ops.row_codes import quantize_rows

GPU = GPUS["sm_90"]
CPU = torch.device("cpu")

pytestmark = pytest.mark.skipif(not triton.knobs.runtime.interpret, reason="the kernels themselves run here")


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with np.errstate(all="ignore"):
        yield


@pytest.mark.parametrize(
    ("name", "dtype", "tile", "programs", "n"),
    [
        ("int4_g128", torch.bfloat16, (64, 64, 3), 3, 140),
        ("int4_g128", torch.bfloat16, (64, 64, 2), 8, 256),
        ("fp4_g32", torch.float16, (64, 128, 2), 2, 144),
        ("int4_g64", torch.bfloat16, (64, 256, 6), 3, 256),
        ("int4_g64_zp", torch.bfloat16, (128, 64, 2), 1, 140),
        ("int4_g64_zp", torch.bfloat16, (128, 64, 3), 9, 256),
        ("int4_channel", torch.bfloat16, (64, 64, 4), 5, 144),
        ("q8_0", torch.bfloat16, (64, 64, 3), 5, 140),
        ("q8_0", torch.bfloat16, (64, 64, 4), 3, 144),
        ("int8_channel", torch.bfloat16, (64, 128, 3), 2, 140),
        ("int8_g64_offset", torch.bfloat16, (128, 64, 4), 1, 140),
        ("int8_g128_zp", torch.bfloat16, (64, 32, 5), 3, 144),
        ("int8_g16", torch.bfloat16, (64, 64, 3), 5, 140),
        ("int8_g16_zp", torch.float16, (64, 32, 5), 3, 144),
        ("int8_g16_offset", torch.bfloat16, (128, 64, 3), 2, 140),
        ("int4_g16_zp", torch.bfloat16, (64, 256, 4), 3, 140),
        ("fp4_g16", torch.bfloat16, (64, 128, 3), 2, 144),
    ],
)
def test_gemm_hopper(name: str, dtype: torch.dtype, tile: tuple[int, int, int], programs: int, n: int) -> None:
    """More tiles than programs or the other way round, so that tiles are shared and sums meet; TMA writes where it can."""
    config = gemm_hopper.Config(*tile, programs)
    problem = Problem("linear", 70, n, 640, as_format(name), dtype)
    with interpreted(gemm_hopper):
        rounded = {"weight_rounded": True, "point_rounded": gemm_hopper.subnormal_codes(problem) and problem.format.zero == "point"}
        check_linear(gemm_hopper, config, problem, CPU, interpreted=False, epilogue=n == 140 and programs > 1, **rounded)


@pytest.mark.parametrize(
    ("name", "dtype", "m", "config"),  # columns, panels, each, stages, programs, partitions
    [
        ("mxfp4", torch.bfloat16, 7, (8, 1, 1, 3, 3)),
        ("int4_g128", torch.float16, 9, (16, 2, 2, 2, 2)),
        ("int4_g128", torch.bfloat16, 7, (8, 1, 1, 3, 3)),
        ("int4_channel", torch.bfloat16, 3, (8, 4, 1, 3, 4)),
        ("q8_0", torch.bfloat16, 16, (16, 1, 2, 2, 2)),
        ("int8_g64_zp", torch.float16, 30, (32, 4, 1, 3, 4)),
        ("int8_channel", torch.bfloat16, 60, (64, 2, 1, 2, 3)),
        ("int8_g128_zp", torch.bfloat16, 40, (64, 4, 1, 2, 3)),
        ("int8_g128", torch.bfloat16, 5, (8, 2, 1, 4, 5, 2)),
        ("int4_g128_zp", torch.bfloat16, 7, (8, 1, 1, 3, 3, 2)),
        ("int4_g32_zp", torch.float16, 3, (8, 2, 2, 2, 4)),
        ("int4_g256_zp", torch.bfloat16, 20, (32, 1, 1, 2, 3)),
        ("int4_channel_zp", torch.float16, 33, (64, 4, 1, 3, 2)),
        ("q4_0", torch.bfloat16, 32, (32, 2, 1, 2, 3)),
        ("int4_g128", torch.bfloat16, 71, (64, 1, 1, 3, 3)),
        ("q8_0", torch.float16, 130, (64, 2, 1, 2, 3)),
        ("int4_g128", torch.bfloat16, 6, (8, 1, 1, 3, 3)),
        ("q4_0", torch.bfloat16, 20, (8, 1, 2, 2, 3)),
        ("int8_g64_zp", torch.bfloat16, 9, (16, 1, 1, 2, 3)),
        ("int8_g128_zp", torch.float16, 2, (8, 4, 1, 3, 3)),
        ("int4_g128", torch.bfloat16, 7, (8, 2, 1, 3, 6)),  # each tile has three programs, which wait for each other
        ("q4_0", torch.bfloat16, 12, (16, 2, 1, 3, 6)),
        ("q8_0", torch.bfloat16, 71, (32, 1, 1, 2, 6)),
        ("int6_g16_f32", torch.bfloat16, 1, (8, 1, 1, 3, 3)),
        ("int6_g16_f32", torch.bfloat16, 40, (64, 2, 1, 2, 3)),
        ("int8_g16_zp", torch.float16, 16, (16, 2, 1, 2, 3)),
        ("int8_g16_zp", torch.float16, 20, (32, 4, 1, 2, 3)),
        ("int4_g16", torch.float16, 3, (8, 2, 2, 2, 4)),
        ("int4_g16_zp", torch.bfloat16, 16, (16, 1, 2, 2, 2)),
        ("nvfp4", torch.bfloat16, 8, (8, 1, 2, 3, 3)),
        ("nvfp4", torch.bfloat16, 64, (64, 1, 1, 3, 3)),
    ],
)
def test_skinny_hopper(name: str, dtype: torch.dtype, m: int, config: tuple[int, ...]) -> None:
    """Stages that end beyond K, panels that are not there, tiles that programs share."""
    problem = Problem("linear", m, 140, 640, as_format(name), dtype)
    assert skinny_hopper.supports(problem, GPU) is None
    with interpreted(skinny_hopper):
        ways = {"interpreted": False, "weight_rounded": True, "epilogue": m in (7, 71)}
        check_linear(skinny_hopper, skinny_hopper_config.Config(*config), problem, CPU, **ways)


@pytest.mark.parametrize(
    ("name", "activation", "config"),  # of gemm_int8_hopper the number of programs
    [
        ("int4_channel", "row", 8),
        ("int8_channel", "row", 2),
        ("int8_channel", "row", 3),
        ("int4_g128", "row", 2),
        ("int8_g128_zp", "row", 12),
        ("int8_g128", "block", 1),
        ("int4_channel", "row", skinny_hopper_config.Config(64, 1, 1, 3, 2)),
        ("int8_channel", "row", skinny_hopper_config.Config(64, 2, 1, 2, 3)),
        ("int8_channel", "row", skinny_hopper_config.Config(64, 2, 1, 2, 4)),
        ("int8_g64", "block", skinny_hopper_config.Config(64, 1, 1, 2, 3)),
    ],
)
def test_gemm_int8_hopper(name: str, activation: Activation, config: skinny_hopper_config.Config | int) -> None:
    """Some tiles for a program or two programs for a tile, chains of four records and of one, tiles of 256 rows of which the last
    is halved, results by TMA and without; with few rows skinny_int8_hopper, also of a block that is shorter than a slab."""
    m, k = (70, 600) if isinstance(config, int) else (60, 64 if name == "int8_g64" else 450)
    n = {2: 140, 3: 400}.get(config, 136) if isinstance(config, int) else 136
    codes, x, bias = random_codes(as_format(name), (n, k)), torch.randn(m, k).to(torch.bfloat16), torch.randn(n)
    problem = Problem("linear", m, n, k, codes.format, x.dtype, "int8", activation)
    views = gpu_tiles.views(gpu_tiles.pack(codes).data, gpu_tiles.geometry(codes.format, codes.shape))
    module = gemm_int8_hopper if isinstance(config, int) else skinny_int8_hopper
    assert module.supports(problem, GPU) is None
    out = torch.full((m, n), torch.nan, dtype=x.dtype)
    with interpreted(gemm_int8_hopper, skinny_hopper):
        if isinstance(config, int):
            found = module.configs(problem, GPU)
            config = replace(found[-1] if config == 3 else found[0], programs=config)
        module.launch(problem, config, x, views, out, Epilogue(bias, None, -1.0, 6.0))
    expected = reference.linear(x, codes, bias, "int8", activation, (-1.0, 6.0))
    assert reference.agrees(out, expected, reference.error_bound(x, codes, bias, "int8", activation)).all()


def test_gemm_int8_hopper_of_codes() -> None:
    """Rows that were quantized before, one tile of 256."""
    m, n, k = 256, 72, 256
    codes, x, bias = random_codes(as_format("int8_channel"), (n, k)), torch.randn(m, k).to(torch.bfloat16), torch.randn(n)
    problem = Problem("linear", m, n, k, codes.format, x.dtype, "int8", "row")
    views = gpu_tiles.views(gpu_tiles.pack(codes).data, gpu_tiles.geometry(codes.format, codes.shape))
    rows = activations.quantized(activations.plan(problem), *quantize_rows(x))
    out = torch.full((m, n), torch.nan, dtype=x.dtype)
    with interpreted(gemm_int8_hopper):
        config = replace(gemm_int8_hopper.configs(problem, GPU)[0], programs=1)
        gemm_int8_hopper.launch(problem, config, rows, views, out, Epilogue(bias))
    expected = (rows.q.double() * rows.scale.view(m, 1)) @ codes.dequantize(torch.float64).T + bias.double()
    assert reference.agrees(out, expected, reference.error_bound(x, codes, bias, "int8", "row")).all()
    with pytest.raises(KernelError, match="whole tiles"):
        activations.quantized(activations.plan(replace(problem, m=300)), rows.q, rows.scale)


@pytest.mark.parametrize(("m", "block_m", "programs", "branches"), [(70, 64, 1, 2), (300, 256, 3, 1), (70, 128, 2, 2)])
def test_gemm_int8_hopper_with_branches_of_low_rank(m: int, block_m: int, programs: int, branches: int) -> None:
    """Branches of one and of several tiles, tiles of 256 rows of which the last is halved, more tiles than stages."""
    n, k = 256, 600
    codes, x = random_codes(as_format("int4_channel"), (n, k)), torch.randn(m, k).to(torch.bfloat16)
    inner, outer = (torch.randn(*shape).to(torch.bfloat16) for shape in ((m, 32 * branches), (n, 32)))
    problem = Problem("linear", m, n, k, codes.format, x.dtype, "int8", "row")
    views = gpu_tiles.views(gpu_tiles.pack(codes).data, gpu_tiles.geometry(codes.format, codes.shape))
    out, bias = torch.full((m, n), torch.nan, dtype=x.dtype), torch.randn(n)
    with interpreted(gemm_int8_hopper):
        config = gemm_int8_hopper.Config(block_m, 2, programs)
        gemm_int8_hopper.launch(problem, config, x, views, out, Epilogue(bias, low_rank=(inner, outer)))
    parts = zip(inner.double().chunk(branches, 1), outer.double().chunk(branches), strict=True)
    branch, inner, outer = torch.cat([a @ b.T for a, b in parts], 1), inner.abs(), outer.abs()
    # 32 products and their sum with the others are rounded to float32.
    bound = reference.error_bound(x, codes, bias, "int8", "row", residual=branch)
    terms = torch.cat([a @ b.T for a, b in zip(inner.double().chunk(branches, 1), outer.double().chunk(branches), strict=True)], 1)
    expected = reference.linear(x, codes, bias, "int8", "row", residual=branch)
    assert reference.agrees(out, expected, bound + 34 * 2**-24 * terms).all()
    with pytest.raises(KernelError, match="low rank"), interpreted(gemm_int8_hopper):
        gemm_int8_hopper.launch(problem, replace(config, programs=99), x, views, out, Epilogue(bias, low_rank=(inner, outer)))


@pytest.mark.parametrize(
    ("name", "outputs", "rows", "pixels", "sweep"),
    [
        ("int4_g32", 80, 64, 128, False),
        ("int8_channel", 144, 256, 128, False),
        ("int4_g32", 80, 64, 256, True),
        ("int8_channel", 80, 128, 128, True),
    ],
)
def test_conv_hopper(name: str, outputs: int, rows: int, pixels: int, sweep: bool) -> None:
    window = Window((1, 1), (1, 1, 0, 2))
    codes = random_codes(as_format(name), (outputs, 9, 64) if name != "int8_channel" else (outputs, 9 * 64))
    sizes = convolution.filter_of(codes, (3, 3), 1)
    problem = ConvProblem(sizes, window, 16, (4, 9), torch.float16)
    x, bias, residual = torch.randn(16, 64, 4, 9).half(), torch.randn(outputs), 100 * torch.randn(problem.m, outputs).half()
    asked = rows, pixels, sweep
    if sweep and not LARGER_VIEWS:
        pytest.skip("this Triton has no views that begin anywhere")
    config = next(config for config in conv_hopper.configs(problem, GPU) if (config.rows, config.pixels, config.sweep) == asked)
    out = torch.full((problem.m, outputs), torch.nan, dtype=x.dtype)
    with interpreted(conv_hopper):
        memory, weight = x.permute(0, 2, 3, 1).contiguous(), convolution.pack_gpu(codes, sizes).data
        conv_hopper.launch(problem, replace(config.with_residual or config, programs=2), memory, weight, out, Epilogue(bias, residual))
    y = (out.double() - residual).view(16, *problem.out, outputs).permute(0, 3, 1, 2)
    expected = conv_reference.conv2d(x, codes, (3, 3), window, bias, 1)
    size = conv_reference.conv2d(x.abs(), codes, (3, 3), window, None, 1).abs()
    error = 2 * conv_reference.error_bound(x, codes, (3, 3), window, bias, 1)
    assert reference.agrees(y, expected, error + 2.0**-9 * (size.amax() + error)).all()


# What it is for: a ring with mistakes.


@gluon.jit
def _fetch(xd, xs, full, empty, STEPS: gl.constexpr):
    for step in range(STEPS):
        stage = step % 2
        mbarrier.wait(empty.index(stage), ((step // 2) & 1) ^ 1)
        mbarrier.expect(full.index(stage), 64 * 64 * 2)
        async_load(xd, [0, step * 64], full.index(stage), xs.index(stage))


@gluon.jit
def _multiply(xs, full, empty, out, STEPS: gl.constexpr, MISTAKE: gl.constexpr):
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 64, 16])
    acc = gl.zeros([64, 64], gl.float32, layout=MMA)
    for step in range(STEPS):
        stage = step % 2
        mbarrier.wait(full.index(stage), (step // 2) & 1)
        acc = warpgroup_mma(xs.index(stage), xs.index(stage).permute([1, 0]), acc, is_async=True)
        if MISTAKE != "not finished":
            # Two left to do: the products of a step are made when the next but one, which fills the same buffer, is there.
            acc = warpgroup_mma_wait(2 if MISTAKE == "too early" else 0, deps=[acc])
        if MISTAKE != "no arrival":
            mbarrier.arrive(empty.index(stage), count=2 if MISTAKE == "too many" else 1)
    if MISTAKE == "too early":
        acc = warpgroup_mma_wait(0, deps=[acc])
    row = gl.arange(0, 64, layout=gl.SliceLayout(1, MMA))
    column = gl.arange(0, 64, layout=gl.SliceLayout(0, MMA))
    gl.store(out + gl.expand_dims(row, 1) * (65 if MISTAKE == "outside" else 64) + gl.expand_dims(column, 0), acc)


@gluon.jit
def _square(xd, out, STEPS: gl.constexpr, MISTAKE: gl.constexpr):
    xs = gl.allocate_shared_memory(xd.dtype, [2, 64, 64], xd.layout)
    full = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [2, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(2):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    gl.warp_specialize([(_multiply, (xs, full, empty, out, STEPS, MISTAKE)), (_fetch, (xd, xs, full, empty, STEPS))], [1], [40])


class _File:
    """What stands for a kernel's file."""

    run = staticmethod(launch.run)


def _squared(mistake: str) -> tuple[torch.Tensor, torch.Tensor]:
    x, out = torch.randn(64, 512).half(), torch.full((64, 64), torch.nan)
    layout = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    file: Any = _File
    with interpreted(file):
        file.run(_square, (1,), TensorDescriptor.from_tensor(x, [64, 64], layout), out, STEPS=8, MISTAKE=mistake)
    return out.double(), x.double() @ x.double().T


def test_a_ring_of_buffers_works() -> None:
    assert torch.allclose(*_squared(""), rtol=1e-5, atol=1e-4)


def test_a_buffer_given_back_too_early_is_seen() -> None:
    assert not torch.allclose(*_squared("too early"), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize(
    ("mistake", "said"),
    [
        ("not finished", "not waited for"),
        ("too many", "more arrive"),
        ("no arrival", "nobody completes"),
        ("outside", "places 0 to 4158 of 4096"),
    ],
)
def test_what_cannot_be_is_said(mistake: str, said: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if mistake == "no arrival":  # in the others the mistake must be seen first
        monkeypatch.setattr(gluon_interpreter, "SECONDS", 1.0)
    with pytest.raises(AssertionError, match=said):
        _squared(mistake)

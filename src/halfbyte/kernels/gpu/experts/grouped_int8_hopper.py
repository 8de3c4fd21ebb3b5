"""Grouped linear layers of experts (`grouped.py`) on Hopper's integer tensor cores: the tiles of `hopper/int8_tile.py` in a `TileSchedule`.

Rows of x are quantized in the order of their experts, once for each expert that takes them. Weight: 4 bits. Arithmetic: that of
`gemm_int8.py`. An id outside of [0, E) gives a row of NaN.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.experts import grouped
from halfbyte.kernels.gpu.experts.grouped_hopper import NARROWEST, PUBLISHED, next_tile, publish_tile, receive_tile, tile_at, with_width_of
from halfbyte.kernels.gpu.hopper.epilogue import Outputs
from halfbyte.kernels.gpu.hopper.int8_tile import Operands, RowOrder, Target, WeightOffset, allocate_ring, load_tile, multiply_tile
from halfbyte.kernels.gpu.hopper.ring import Shape, descriptor
from halfbyte.kernels.gpu.linear import gemm_int8_hopper
from halfbyte.kernels.gpu.linear.gemm_int8_hopper import Config, compiled_for
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.runtime.launch import output, run
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_LEAST_ROWS = 48  # per expert on average
_MANY_ROWS = 192  # per expert on average, from which on tiles of 256 are faster (H200)
_ALIGN = 4  # rows of x: TMA reads their float32 scales from multiples of 16 bytes


class ExpertStrides(NamedTuple):
    """Distance of the matrices of experts.

    Attributes:
        lines: In lines of 128 bytes.
        scale_rows: In rows of 64 scales, as TMA reads them.
        scales: In scales.
        zeros: In zeros.
    """

    lines: int
    scale_rows: int
    scales: int
    zeros: int


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if problem.op != "grouped_linear" or problem.compute != "int8":
        return f"it multiplies experts in integers, not {problem.op} in {problem.compute}"
    if problem.format.bits != 4:
        return f"it reads 4 bits, not {problem.format.bits}"
    if problem.m < _LEAST_ROWS * problem.experts:
        return f"{problem.m} rows for {problem.experts} experts do not fill its tiles: from {_LEAST_ROWS} an expert on"
    return gemm_int8_hopper.supports(_linear(problem), gpu)


def _linear(problem: Problem) -> Problem:
    return replace(problem, op="linear", experts=1)


def configs(problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first."""
    linear = _linear(problem)
    sizes = (128, 64)
    if activations.plan(linear).whole:
        sizes = (256, 128) if problem.m > _MANY_ROWS * problem.experts else (128, 256)
    candidates = []
    for block_m in sizes:
        one = Config(block_m, 1, gpu.sms)
        stages = min(8, (gpu.shared - (32 << 10)) // compiled_for(linear, one, clamp=False).stage_bytes)
        candidates.append(replace(one, stages=stages))
    return tuple(candidates)


def launch(problem: Problem, config: Config, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """Launch the grouped product; arguments as in `grouped.launch`."""
    experts, n, k, linear = problem.experts, problem.n, problem.k, _linear(problem)
    geo, static = gpu_tiles.geometry(problem.format, (n, k)), compiled_for(linear, config, clamp=False)
    schedule = grouped.tile_schedule(ids, experts, config.block_m, NARROWEST.value, _ALIGN)
    plan = activations.plan(replace(linear, m=len(schedule.order)))
    memory = output(torch.empty(plan.nbytes, dtype=torch.uint8, device=out.device))
    rows = activations.quantize_activation(x, plan, memory, order=schedule.order, share=problem.m // len(x))
    scale = weight[geo.scale_offset :].view(geo.format.scale)  # of the first expert, and so on
    zero = scale if geo.zero_dtype is None else weight[geo.zero_offset :].view(geo.zero_dtype)
    lines = weight.view(geo.format.scale).view(-1, 64)
    strides = ExpertStrides(geo.nbytes // 128, *(geo.nbytes // size for size in (64 * lines.itemsize, scale.itemsize, zero.itemsize)))
    run(
        _grouped,
        (config.programs,),
        descriptor(rows.q, [NARROWEST.value, 128]),
        descriptor(weight.view(torch.int8).view(-1, 128), [32, 128]),
        None if static.whole or static.row_scale else descriptor(rows.scale, [1, config.block_m], flat=True),
        None if static.whole or rows.sums is None else descriptor(rows.sums, [1, config.block_m], flat=True),
        None if static.whole else descriptor(lines, [1, 64], flat=True),
        (rows.scale, rows.sums),
        (scale, zero),
        strides,
        geo.scale_offset // (64 * lines.itemsize),
        schedule,
        out,
        bias,
        experts,
        Shape(0, n, geo.n_padded, geo.records),
        static,
        num_warps=4,
        early=True,
    )


# `S` is an int8_tile.Static, `shape` a Shape without M; `first_scale` is where the first expert's scales begin, in rows of 64.


@gluon.jit
def _produce(operands, strides, first_scale, published, ring, schedule, experts, shape, S: gl.constexpr):
    """The producer warp: take tiles, publish them, and load their stages."""
    stage = 0
    phase = 1
    tile, _pm = tile_at(gl.program_id(0), schedule, shape, 64 * S.panels)
    publish_tile(published, ring.full, ring.empty, tile, stage, phase)
    while tile.rows > 0:
        following, _pm = tile_at(next_tile(schedule), schedule, shape, 64 * S.panels)
        expert = gl.minimum(tile.expert, experts - 1)
        offset = WeightOffset(expert * strides.lines, first_scale + expert * strides.scale_rows)
        stage, phase = with_width_of(
            load_tile, (operands, offset, ring, tile.start, tile.pn, 0, shape.k_slabs, stage, phase, shape), tile.rows, S
        )  # fmt: skip
        tile = following
        publish_tile(published, ring.full, ring.empty, tile, stage, phase)


@gluon.jit
def _consume(published, ring, x_params, w_params, strides, schedule, out, bias, experts, shape, PANEL: gl.constexpr, S: gl.constexpr):
    """A consumer warpgroup: multiply its panel of the published tiles, and write y."""
    stage = 0
    phase = 0
    tile = receive_tile(published, ring.full, stage, phase)
    while tile.rows > 0:
        expert = gl.minimum(tile.expert, experts - 1).to(gl.int64)
        params = (w_params[0] + expert * strides.scales, w_params[1] + expert * strides.zeros)
        expert_bias = None
        if bias is not None:
            expert_bias = bias + expert * shape.n
        outputs = Outputs(out, None, expert_bias, None, 0.0, 0.0)
        target = Target(outputs, None, RowOrder(schedule.order, tile.start + tile.rows, tile.expert < experts), shape)
        n = (tile.pn * S.panels + PANEL) * 64
        # The tuple is not assigned to a variable, which would not keep PANEL a constexpr.
        stage, phase = with_width_of(
            multiply_tile, (ring, x_params, params, target, None, 0, tile.start, n, 0, shape.k_slabs, stage, phase, PANEL), tile.rows, S
        )  # fmt: skip
        tile = receive_tile(published, ring.full, stage, phase)


@gluon.jit(do_not_specialize=["experts"])
def _grouped(
    xd, wd, ad, md, sd, x_params, w_params, strides, first_scale, schedule, out, bias, experts, shape, S: gl.constexpr
):  # fmt: skip
    gdc_launch_dependents()
    operands = Operands(xd, wd, ad, md, sd, None, None, None)
    ring = allocate_ring(operands, S)
    published = gl.allocate_shared_memory(gl.int32, [S.stages * 4, 1], PUBLISHED)
    gdc_wait()
    gl.warp_specialize(
        [
            (_consume, (published, ring, x_params, w_params, strides, schedule, out, bias, experts, shape, 0, S)),
            (_consume, (published, ring, x_params, w_params, strides, schedule, out, bias, experts, shape, 1, S)),
            (_produce, (operands, strides, first_scale, published, ring, schedule, experts, shape, S)),
        ],
        [4, 1],
        [232, 40],
    )

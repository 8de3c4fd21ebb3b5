"""y [P, N] as in `grouped.py`, on Hopper's integer tensor cores: the tiles of `gemm_int8_hopper.py` in the list of `grouped_hopper.py`.

Rows of x are quantized in the order of their experts, each as often as experts take it. Weight: 4 bits. Arithmetic: that of
`gemm_int8.py`. An id that is no expert's gives a row of NaN.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.experts import grouped
from halfbyte.kernels.gpu.experts.grouped_hopper import NARROWEST, TOLD, as_narrow, learn, tell, tile_of, untaken
from halfbyte.kernels.gpu.linear import gemm_int8_hopper
from halfbyte.kernels.gpu.linear.gemm_int8_hopper import Config, compiled_for, descriptor, load_tile, multiply_tile, ring
from halfbyte.kernels.gpu.quantize import activations
from halfbyte.kernels.gpu.runtime.launch import output, run
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import Gpu

_LEAST_ROWS = 48  # of an expert on the average
_MANY_ROWS = 192  # of an expert on the average, from which on tiles of 256 are faster (H200)
_ALIGNED = 4  # rows of x: TMA reads their scales, float32, from multiples of 16 bytes on


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
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
    """The best guess first."""
    linear = _linear(problem)
    sizes = (128, 64)
    if activations.plan(linear).whole:
        sizes = (256, 128) if problem.m > _MANY_ROWS * problem.experts else (128, 256)
    found = []
    for block_m in sizes:
        one = Config(block_m, 1, gpu.sms)
        stages = min(8, (gpu.shared - (32 << 10)) // compiled_for(linear, one, clamp=False).stage_bytes)
        found.append(replace(one, stages=stages))
    return tuple(found)


def launch(problem: Problem, config: Config, x: Tensor, weight: Tensor, ids: Tensor, out: Tensor, bias: Tensor | None) -> None:
    """As `grouped.launch`."""
    experts, n, k, linear = problem.experts, problem.n, problem.k, _linear(problem)
    geo, static = gpu_tiles.geometry(problem.format, (n, k)), compiled_for(linear, config, clamp=False)
    table = grouped.sorted_by_expert(ids, experts, config.block_m, NARROWEST.value, _ALIGNED)
    plan = activations.plan(replace(linear, m=len(table[0])))
    memory = output(torch.empty(plan.nbytes, dtype=torch.uint8, device=out.device))
    rows = activations.quantize_activation(x, plan, memory, order=table[0], share=problem.m // len(x))
    scale = weight[geo.scale_offset :].view(geo.format.scale)  # of the first expert, and so on
    zero = scale if geo.zero_dtype is None else weight[geo.zero_offset :].view(geo.zero_dtype)
    lines = weight.view(geo.format.scale).view(-1, 64)
    steps = (geo.nbytes // 128, *(geo.nbytes // size for size in (64 * lines.itemsize, scale.itemsize, zero.itemsize)))
    run(
        _grouped,
        (config.programs,),
        descriptor(rows.q, NARROWEST.value, 128),
        descriptor(weight.view(torch.int8).view(-1, 128), 32, 128),
        None if static.whole or static.row else descriptor(rows.scale, 1, config.block_m),
        None if static.whole or rows.sums is None else descriptor(rows.sums, 1, config.block_m),
        None if static.whole else descriptor(lines, 1, 64),
        (rows.scale, rows.sums),
        (scale, zero),
        steps,
        geo.scale_offset // (64 * lines.itemsize),
        table,
        out,
        bias,
        experts,
        (0, n, geo.n_padded, geo.records),
        static,
        num_warps=4,
        early=True,
    )


# `S` is an int8_hopper_tile.Static; `sizes` is (unused, N, N padded, records of a tile).


@gluon.jit
def _produce(xd, wd, ad, md, sd, steps, first_scale, told, buffers, full, empty, table, experts, sizes, S: gl.constexpr):
    stage = 0
    phase = 1
    e, first, count, pn, _pm = tile_of(gl.program_id(0), table, sizes, 64 * S.panels)
    tell(told, full, empty, (e, first, count, pn), stage, phase)
    while count > 0:
        following = tile_of(untaken(table), table, sizes, 64 * S.panels)
        e = gl.minimum(e, experts - 1)
        before = (e * steps[0], first_scale + e * steps[1])
        stage, phase = as_narrow(
            load_tile, (xd, wd, ad, md, sd, before, buffers, full, empty, first, pn, 0, sizes[3], stage, phase, sizes), count, S
        )
        e, first, count, pn, _pm = following
        tell(told, full, empty, (e, first, count, pn), stage, phase)


@gluon.jit
def _consume(told, buffers, full, empty, of_x, of_w, steps, table, out, bias, experts, sizes, W: gl.constexpr, S: gl.constexpr):
    stage = 0
    phase = 0
    e, first, count, pn = learn(told, full, stage, phase)
    while count > 0:
        at = gl.minimum(e, experts - 1).to(gl.int64)
        mine = (of_w[0] + at * steps[2], of_w[1] + at * steps[3])
        added = (None, None)
        if bias is not None:
            added = (bias + at * sizes[1], None)
        to = (None, None, out, (table[0], first + count, e < experts), added, sizes, (0.0, 0.0))
        n = (pn * S.panels + W) * 64
        stage, phase = as_narrow(
            multiply_tile, (buffers, full, empty, of_x, mine, to, None, 0, first, n, 0, sizes[3], stage, phase, W), count, S
        )
        e, first, count, pn = learn(told, full, stage, phase)


@gluon.jit(do_not_specialize=["experts"])
def _grouped(xd, wd, ad, md, sd, of_x, of_w, steps, first_scale, table, out, bias, experts, sizes, S: gl.constexpr):
    gdc_launch_dependents()
    buffers, full, empty = ring(xd, wd, ad, md, sd, S)
    told = gl.allocate_shared_memory(gl.int32, [S.stages * 4, 1], TOLD)
    gdc_wait()
    gl.warp_specialize(
        [
            (_consume, (told, buffers, full, empty, of_x, of_w, steps, table, out, bias, experts, sizes, 0, S)),
            (_consume, (told, buffers, full, empty, of_x, of_w, steps, table, out, bias, experts, sizes, 1, S)),
            (_produce, (xd, wd, ad, md, sd, steps, first_scale, told, buffers, full, empty, table, experts, sizes, S)),
        ],
        [4, 1],
        [232, 40],
    )

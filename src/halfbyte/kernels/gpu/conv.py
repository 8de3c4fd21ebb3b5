"""y = x * W, a convolution, as a product of patches that are never written out (implicit GEMM).

    y[m, n] = sum over tap, c of  w[n, tap, c] * x[pixel(m) + tap, c]        m = (image, row, column) of y; x and y channels_last

W is the matrix of `layouts/convolution.py` in the order of `layouts/gpu_tiles.py`, one for each group. K runs over (tap, channel):
columns k of patches are gathered by pointers, 16 bytes at a time, asynchronously and several steps ahead. Where a step lies inside
one tap its place is a number, otherwise a vector. Yᵀ = W · Xᵀ, so that weights may be made in registers, where tensor cores take them.

    float    x float16, bfloat16 or float32; weights are made in x's type (for float32: in float32). What lies outside of the image is 0
    int8     x int8, `table` of `ops.cuda_conv`: exact sums, requantized as `qlinear.py` has it. Outside of the image lies in_zero, which
             is read from the table, so that no correction is needed

Arithmetic: one scale a channel: the matrix unit sums (q - point) * x in float32, and the sum is multiplied by the scale. Otherwise a
weight is rounded to x's type (the scale, then the product or the fused multiply-add). K may be split over programs: the last to arrive
adds up in order, so that results do not vary.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import triton
import triton.language as tl
from torch import Tensor

from halfbyte.kernels.gpu import decode, dequantize
from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.gemm_int8 import requantized
from halfbyte.kernels.problem import Epilogue, Window
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.convolution import Filter
from halfbyte.machine import Gpu

INTERPRETED = tl.constexpr(triton.knobs.runtime.interpret)
_LARGEST = 1 << 31


@dataclass(frozen=True)
class Convolution:
    """What is asked for: a weight, a window, and images [batch, channels, height, width] of `dtype`."""

    sizes: Filter
    window: Window
    batch: int
    image: tuple[int, int]
    dtype: torch.dtype

    @property
    def out(self) -> tuple[int, int]:
        return self.window.out_size(self.image, self.sizes.kernel)

    @property
    def m(self) -> int:
        return self.batch * self.out[0] * self.out[1]

    @property
    def n(self) -> int:
        """Outputs of one group."""
        return self.sizes.out // self.sizes.groups


@dataclass(frozen=True)
class Config:
    """block_n rows of the weight by block_m patches a program, `step` of K at a time; K split over `split` programs. `written`: the weight
    is written out in x's type first, in memory that later calls use again. `ptx`: inline PTX.
    `chosen`: where a patch leaves the image its address is chosen, elsewhere what was read (Triton's passes for AMD know no such address).
    """

    block_n: int
    block_m: int
    step: int
    stages: int
    warps: int
    split: int = 1
    written: bool = False
    ptx: bool = True
    chosen: bool = True


@dataclass(frozen=True)
class Static:
    """What the kernel is compiled for.

    whole     one scale a channel
    channels, block, padded   of a tap: with all padding; elements of a block without and with its padding (channels: no blocks)
    real      channels that x has are fewer, or blocks are padded: their number is looked at
    bounded   patches may reach beyond the image
    fill      they then read the table's last row
    mode      "int8", "sums", "weights": see the text of this file; "exact": weights in float32, where x or the scale has its range
    """

    config: Config
    bits: int
    zero: str
    mode: str
    taps: int
    kernel_w: int
    whole: bool
    channels: int
    block: int
    padded: int
    real: bool
    bounded: bool
    fill: bool
    clamp: bool

    @property
    def block_n(self) -> int:
        return self.config.block_n

    @property
    def block_m(self) -> int:
        return self.config.block_m

    @property
    def step(self) -> int:
        """Of x: 4 bits of the integer way are multiplied plane by plane."""
        return 32 if self.mode in ("int8", "dynamic") and self.bits == 4 else self.config.step

    @property
    def record(self) -> int:
        """Of the weight."""
        return 128 if self.bits == 4 else self.config.step

    @property
    def apart(self) -> int:
        """Distance of records: words, bytes, or elements."""
        return 2048 if self.bits == 4 else self.record

    @property
    def stages(self) -> int:
        return self.config.stages

    @property
    def split(self) -> bool:
        return self.config.split > 1

    @property
    def ptx(self) -> bool:
        return self.config.ptx

    @property
    def chosen(self) -> bool:
        return self.config.chosen

    @property
    def bitwise(self) -> bool:
        """Where patches reach beyond the image is looked up."""
        return self.bounded and self.taps < 32

    @property
    def scaled(self) -> bool:
        """Weights are, before they are multiplied."""
        return self.mode in ("weights", "exact")

    @property
    def groups(self) -> int:
        """Blocks that a step of the weight touches."""
        return max(1, self.record // self.padded)


def supports(problem: Convolution, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    sizes = problem.sizes
    if not problem.m or not sizes.out or not sizes.k:
        return "there is nothing to multiply"
    if problem.image[0] * problem.image[1] * sizes.channels * sizes.groups >= _LARGEST:
        return f"an image of {problem.image[0]} x {problem.image[1]} x {sizes.channels * sizes.groups} has 2^31 elements or more"
    if problem.dtype == torch.int8 and (sizes.format.zero != "none" or isinstance(sizes.format.block, int)):
        return f"integers take symmetric weights with one scale a channel or a tensor, not {sizes.format}"
    return None


def configs(problem: Convolution, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first."""
    geo, bits = convolution.gpu_geometry(problem.sizes), problem.sizes.format.bits
    integer, wide = problem.dtype == torch.int8, problem.dtype == torch.float32
    whole = geo.block_rows == 1
    largest = 32 if wide else 128 if integer else 64
    step = 128 if bits == 4 else largest if whole else min(largest, geo.padded)
    while bits == 8 and step > 32 and padded_channels(problem.sizes) % step and padded_channels(problem.sizes) >= 32:
        step //= 2
    few = padded_channels(problem.sizes) < 16  # in pieces of less than 16 bytes, which takes registers
    if few and bits == 8:
        step = 32
    n, m = problem.n, problem.m
    block_n = 64 if n <= 64 or wide else 128
    block_m = 128 if block_n * m > 64 * 128 * gpu.sms and not wide else 64
    if few:
        block_m = 64
    if wide or (few and bits == 4):
        block_n, block_m = 64, 32
    elif bits == 4 and not integer and gpu.capability < (9, 0):
        block_n = 64
    if -(-n // 64) * -(-m // 64) * problem.sizes.groups <= gpu.sms:  # few tiles: as small as they can be
        block_n, block_m = 64, 32
    tiles = -(-n // block_n) * -(-m // block_m) * problem.sizes.groups
    # To share K takes time of its own; 4 bits, made floats in registers, are worth more of it.
    slow = bits == 4 and not integer
    steps, least, most = geo.k_padded // step, 6 if slow else 16, 2 * gpu.sms if slow else gpu.sms
    split = 1
    while 2 * tiles * split <= most and steps >= least * split and split < 16:
        split *= 2
    ptx = gpu.backend == "cuda" and not triton.knobs.runtime.interpret
    stages = 1 if gpu.backend == "hip" else 2 if wide else 4 if gpu.shared > 120 << 10 else 3
    warps = 8 if block_n * block_m >= 128 * 128 else 4
    return (Config(block_n, block_m, step, stages, warps, split, False, ptx, gpu.backend == "cuda"),)


def padded_channels(sizes: Filter) -> int:
    """Of a tap, with all padding."""
    geo, padded = convolution.gpu_geometry(sizes), convolution.padded_for_gpu(sizes)
    if not isinstance(sizes.format.block, int):
        return padded.channels
    return padded.padded // geo.block * geo.padded


def _mode(geo: gpu_tiles.Geometry, dtype: torch.dtype) -> str:
    if geo.block_rows == 1 and geo.format.zero != "offset":
        return "sums"
    return "exact" if dtype == torch.float32 or (dtype == torch.float16 and geo.format.scale != dtype) else "weights"


def launch(problem: Convolution, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """x [B, H, W, C] in memory, weight of layout "gpu_tiles", out [M, Co]; bias [Co] and residual [M, Co] in the epilogue."""
    _start(problem, config, x, weight, out, epilogue, None, 0)


def launch_integer(
    problem: Convolution, config: Config, x: Tensor, weight: Tensor, table: Tensor, out: Tensor, in_zero: int, clamp: tuple[int, int]
) -> None:
    """The same of int8, with the table [groups, 4 + taps, at least Co/groups] of `ops.cuda_conv`."""
    _start(problem, config, x, weight, out, Epilogue(None, None, float(clamp[0]), float(clamp[1])), table, in_zero)


def _start(
    problem: Convolution, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue, table: Tensor | None, in_zero: int
) -> None:
    sizes, window, geo = problem.sizes, problem.window, convolution.gpu_geometry(problem.sizes)
    n, integer = problem.n, table is not None
    of_x = x.shape[3] // sizes.groups  # may be padded already
    tiles = -(-n // config.block_n) * -(-problem.m // config.block_m)
    count = tiles * sizes.groups
    partials = 4 * config.split * count * config.block_n * config.block_m if config.split > 1 else 0
    written = sizes.groups * n * geo.k * x.element_size() if config.written else 0
    memory = launcher.workspace(out.device, written + partials) if written + partials else None
    if config.written and memory is not None:
        channels = block = padded = geo.k // sizes.taps
        rows = memory[:written].view(x.dtype).view(sizes.groups, n, geo.k)
        for group in range(sizes.groups):
            dequantize.write(gpu_tiles.views(weight[group * geo.nbytes :][: geo.nbytes], geo), geo, rows[group])
        operands: tuple[Tensor, Tensor | None, Tensor | None] = rows, None, None
        bits, mode, zero, whole, places = 16, "written", "none", True, (n, geo.k, n * geo.k * x.element_size())
    else:
        channels, whole, bits, zero = padded_channels(sizes), geo.block_rows == 1, geo.format.bits, geo.format.zero
        block, padded = (channels, channels) if whole else (geo.block, geo.padded)
        operands = gpu_tiles.views(weight[: geo.nbytes], geo)
        mode, places = "int8" if integer else _mode(geo, problem.dtype), (geo.n_padded, geo.k_padded, geo.nbytes)
    record = 128 if bits == 4 else config.step
    static = Static(
        config=replace(config, split=min(2, config.split)),
        bits=bits,
        zero=zero,
        mode=mode,
        taps=sizes.taps,
        kernel_w=sizes.kernel[1],
        whole=whole,
        channels=channels,
        block=block,
        padded=padded,
        real=of_x != channels or block != padded,
        bounded=any(window.padding) or sizes.taps * channels % record != 0,
        fill=integer and in_zero != 0,
        clamp=epilogue.clamps,
    )
    scratch: tuple[Tensor, Tensor] | None = None
    if memory is not None and partials:
        scratch = memory[written:].view(torch.int32 if integer else torch.float32), launcher.locks(out.device, count)
    top, _, left, _ = window.padding
    launcher.run(
        _conv,
        (tiles, config.split, sizes.groups),
        x,
        tuple(operands),
        table,
        out,
        (epilogue.bias, epilogue.residual),
        scratch,
        problem.m,
        n,
        (*places, -(-sizes.taps * channels // record)),
        (*problem.image, *problem.out, x.shape[3], of_x),
        (*window.stride, top, left, *window.dilation),
        (epilogue.low, epilogue.high),
        (0, 0) if table is None else (table.stride(1), table.stride(0)),
        static,
        num_warps=config.warps,
    )


# The kernel. `S` is a Static.


@triton.jit
def reach(y0, x0, height, width, window, S: tl.constexpr):
    """Which taps of each patch lie inside of the image, as bits: [block_m]."""
    TAPS: tl.constexpr = S.taps
    bits = tl.zeros_like(y0)
    for tap in tl.static_range(TAPS):
        iy = y0 + tap // S.kernel_w * window[4]
        ix = x0 + tap % S.kernel_w * window[5]
        bits |= ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width)).to(tl.int32) << tap
    return bits


@triton.jit
def patches(x, fill, y0, x0, reached, step, image, window, S: tl.constexpr, STEP: tl.constexpr):
    """Columns step * STEP … of the patches, [STEP, block_m]."""
    height, width, _ho, _wo, pixel, channels = image
    i = tl.arange(0, STEP)
    if S.channels % STEP == 0:  # inside one tap
        PIECES: tl.constexpr = S.channels // STEP
        tap = step // PIECES
        p = step % PIECES * STEP + i
        ky = tap // S.kernel_w * window[4]
        kx = tap % S.kernel_w * window[5]
        at = ((y0 * width + x0) * pixel)[None, :] + (ky * width + kx) * pixel
        if S.bitwise:
            inside = (reached >> tap & 1 != 0)[None, :]  # none of those taps that there are not
        else:
            iy = y0 + ky
            if S.taps * S.channels % S.record != 0:
                iy = tl.where(tap < S.taps, iy, -1)
            ix = x0 + kx
            inside = ((iy >= 0) & (iy < height) & (ix >= 0) & (ix < width))[None, :]
        real = p >= 0
    else:
        k = step * STEP + i
        tap = k // S.channels
        p = k % S.channels
        iy = y0[None, :] + (tap // S.kernel_w * window[4])[:, None]
        ix = x0[None, :] + (tap % S.kernel_w * window[5])[:, None]
        real = tap < S.taps
        inside = (iy >= 0) & (iy < height) & (ix >= 0) & (ix < width) & real[:, None]
        at = (iy * width + ix) * pixel
    c = p
    if S.block != S.padded:
        within = p % S.padded
        c = p // S.padded * S.block + within
        real = real & (within < S.block)
    pointers = x + (at + c[:, None])
    if S.real:
        real = real & (c < channels)
        if S.fill and S.chosen:
            pointers = tl.where(inside, pointers, fill + i[:, None])
            return tl.load(pointers, mask=real[:, None] | (inside ^ True), other=0)
        elif S.fill:
            return tl.where(inside, tl.load(pointers, mask=inside & real[:, None], other=0), tl.load(fill))
        else:
            return tl.load(pointers, mask=inside & real[:, None], other=0)
    elif S.bounded:
        if S.fill and S.chosen:
            return tl.load(tl.where(inside, pointers, fill + i[:, None]))
        elif S.fill:
            return tl.where(inside, tl.load(pointers, mask=inside, other=0), tl.load(fill))
        else:
            return tl.load(pointers, mask=inside, other=0)
    else:
        return tl.load(pointers)


@triton.jit
def _tails(values, t, rn, n_padded, S: tl.constexpr):
    """Scales (or zeros) of step t: [block_n, groups]."""
    at = (t * S.record // S.padded + tl.arange(0, S.groups))[None, :]
    return tl.load(values + at * n_padded + rn[:, None])


@triton.jit
def words_of(codes, S: tl.constexpr):
    """Words of a record [block_n / 64, 2048] -> [block_n, 32], in the order of K."""
    words = tl.reshape(codes, (S.block_n // 64, 2, 4, 8, 4, 2, 2, 2))  # panel, kt, nt, row, k4, khalf, rowhalf, k
    return tl.reshape(tl.permute(words, (0, 2, 6, 3, 1, 5, 4, 7)), (S.block_n, 32))


@triton.jit
def _weights(codes, scale, zero, DTYPE: tl.constexpr, S: tl.constexpr):
    """What was read -> the A operand [block_n, record], in "sums" without its scale."""
    if S.bits == 4:
        values = decode.nibbles(words_of(codes, S)[:, None, :], DTYPE, S.ptx)
    else:
        values = decode.int8_values(codes, DTYPE, S.ptx)
    if S.zero == "point":
        values = decode.minus(values, _spread(zero, S), S.bits, S.ptx)
    elif S.zero == "offset":
        values = decode.minus(values, _spread(tl.full((S.block_n, S.groups), 0, tl.int16), S), S.bits, S.ptx)
    elif S.bits == 4 or DTYPE == tl.float16:
        values = decode.minus(values, None, S.bits, S.ptx)
    if S.mode == "weights":
        scale = _spread(scale, S).to(DTYPE)
        offset = tl.full(scale.shape, -0.0, tl.float32).to(DTYPE)
        if S.zero == "offset":
            offset = _spread(zero, S).to(DTYPE)
        values = decode.fma(values, scale, offset, S.ptx)
    return _joined(values, S)


@triton.jit
def _weights_exact(codes, scale, zero, S: tl.constexpr):
    """The same in float32."""
    if S.bits == 4:
        values = (words_of(codes, S).to(tl.int32)[:, None, :] >> (tl.arange(0, 4) * 4)[None, :, None]) & 15
        least = 8
    else:
        values = codes.to(tl.int32) + 128
        least = 128
    if S.zero == "none":
        values -= least
    elif S.zero == "point":
        values -= _spread(zero, S).to(tl.int32)
    values = values.to(tl.float32)
    if S.mode == "exact":
        values *= _spread(scale, S).to(tl.float32)
        if S.zero == "offset":
            values += _spread(zero, S).to(tl.float32)
    return _joined(values, S)


@triton.jit
def _joined(values, S: tl.constexpr):
    if S.bits == 4:
        return tl.reshape(values, (S.block_n, 128))
    else:
        return values


@triton.jit
def _spread(values, S: tl.constexpr):
    """[block_n, groups] -> what broadcasts to weights: 8 bits [block_n, 1]; 4 bits [block_n, planes or 1, 1]."""
    if S.bits == 8:
        return values
    elif S.groups == 1:
        return values[:, :, None]
    else:
        EACH: tl.constexpr = S.record // 32 // S.groups
        wide = tl.broadcast_to(values[:, :, None], (S.block_n, S.groups, EACH))
        return tl.reshape(wide, (S.block_n, S.record // 32))[:, :, None]


@triton.jit
def _dot(w, x, acc):
    if INTERPRETED:  # which multiplies bfloat16 wrongly
        return tl.dot(w.to(tl.float32), x.to(tl.float32), acc, input_precision="ieee")
    elif x.dtype == tl.float32:
        return tl.dot(w, x, acc, input_precision="ieee")
    else:
        return tl.dot(w, x, acc)


@triton.jit(do_not_specialize=["M"])
def _conv(x, weight, table, out, added, scratch, M, N, packed, image, window, bounds, rows, S: tl.constexpr):
    BN: tl.constexpr = S.block_n
    BM: tl.constexpr = S.block_m
    n_padded, k_padded, group_bytes, steps = packed
    height, width, ho, wo, pixel, channels = image
    group = tl.program_id(2)
    tiles_n = tl.cdiv(N, BN)
    pn = tl.program_id(0) % tiles_n
    pm = tl.program_id(0) // tiles_n
    rn = pn * BN + tl.arange(0, BN)
    rm = pm * BM + tl.arange(0, BM)
    rni = tl.minimum(rn, n_padded - 1)
    # What lies outside is computed from the last patch's data and not written.
    m = tl.minimum(rm, M - 1)
    b = m // (ho * wo)
    y0 = m // wo % ho * window[0] - window[2]
    x0 = m % wo * window[1] - window[3]
    reached = y0
    if S.bitwise:
        reached = reach(y0, x0, height, width, window, S)
    xp = x + b.to(tl.int64)[None, :] * (height * width * pixel) + group * channels
    fill = x
    if S.fill:
        fill = (table + group * rows[1] + 3 * rows[0]).to(tl.pointer_type(tl.int8))
    first, end = 0, steps
    if S.split:
        share = tl.cdiv(steps, tl.num_programs(1))
        first = tl.program_id(1) * share
        end = tl.minimum(first + share, steps)
    codes = (weight[0].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[0].dtype)
    scale = codes
    if S.mode != "written":
        scale = (weight[1].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[1].dtype)
    zero = scale
    if S.zero != "none":
        zero = (weight[2].to(tl.pointer_type(tl.int8)) + group.to(tl.int64) * group_bytes).to(weight[2].dtype)
    if S.bits == 4:
        panel = tl.minimum(pn * (BN // 64) + tl.arange(0, BN // 64), n_padded // 64 - 1).to(tl.int64)[:, None] * (k_padded // 128)
        wp = codes + panel * 2048 + tl.arange(0, 2048)[None, :]
    else:
        wp = codes + rni[:, None].to(tl.int64) * k_padded + tl.arange(0, S.record)[None, :]
    if S.mode == "int8":
        acc = tl.zeros([BN, BM], tl.int32)
        for t in tl.range(first, end, num_stages=S.stages):
            w = tl.load(wp + t * S.apart)
            if S.bits == 4:
                words = words_of(w, S)
                for j in tl.static_range(4):
                    q = ((words >> 4 * j & 15) - 8).to(tl.int8)
                    acc = tl.dot(q, patches(xp, fill, y0, x0, reached, t * 4 + j, image, window, S, 32), acc, out_dtype=tl.int32)
            else:
                acc = tl.dot(w, patches(xp, fill, y0, x0, reached, t, image, window, S, S.step), acc, out_dtype=tl.int32)
    else:
        acc = tl.zeros([BN, BM], tl.float32)
        s = rn
        z = rn
        if S.scaled:
            s = _tails(scale, first, rni, n_padded, S)
        if S.zero != "none":
            z = _tails(zero, first, rni, n_padded, S)
        for t in tl.range(first, end, num_stages=S.stages):
            # The next step's scales are fetched while this one is multiplied: they are too short for Triton to copy ahead.
            s_next = s
            z_next = z
            if not S.whole:
                s_next = _tails(scale, tl.minimum(t + 1, steps - 1), rni, n_padded, S)
                if S.zero != "none":
                    z_next = _tails(zero, tl.minimum(t + 1, steps - 1), rni, n_padded, S)
            w = tl.load(wp + t * S.apart)
            xs = patches(xp, fill, y0, x0, reached, t, image, window, S, S.step)
            if S.mode == "written":
                acc = _dot(w, xs, acc)
            elif x.dtype.element_ty == tl.float32 or S.mode == "exact":
                acc = _dot(_weights_exact(w, s, z, S).to(xs.dtype), xs, acc)
            else:
                acc = _dot(_weights(w, s, z, xs.dtype, S), xs, acc)
            s = s_next
            z = z_next
    if S.split:
        tile = group * tl.num_programs(0) + tl.program_id(0)
        place = scratch[0] + tile.to(tl.int64) * (BN * BM) + tl.arange(0, BN)[:, None] * BM + tl.arange(0, BM)[None, :]
        apart = (tl.num_programs(2) * tl.num_programs(0)).to(tl.int64) * (BN * BM)
        tl.store(place + tl.program_id(1) * apart, acc)
        tl.debug_barrier()  # what this block wrote comes before its arrival
        before = tl.atomic_add(scratch[1] + tile, 1, sem="acq_rel")
        if before != tl.num_programs(1) - 1:
            return
        acc = tl.zeros_like(acc)
        for i in range(tl.num_programs(1)):
            acc += tl.load(place + i * apart, cache_modifier=".cg")
        tl.store(scratch[1] + tile, 0)
    if S.mode == "int8":
        y = requantized(acc, table + group * rows[1], tl.minimum(rn, N - 1), rows[0], bounds[0], bounds[1], 8)
        at, mask = _places(rn, rm, M, N, group)
        tl.store(out + at, y, mask=mask)
    else:
        if S.mode == "sums":
            acc *= tl.load(scale + rni).to(tl.float32)[:, None]
        finish(acc, out, added, rn, rm, M, N, group, bounds, S)


@triton.jit
def _places(rn, rm, M, N, group):
    """Of outputs rn of a group and patches rm in y [M, Co], and which of them there are."""
    at = rm[None, :].to(tl.int64) * (N * tl.num_programs(2)) + (group * N + rn)[:, None]
    return at, (rn < N)[:, None] & (rm < M)[None, :]


@triton.jit
def finish(total, out, added, rn, rm, M, N, group, bounds, S: tl.constexpr):
    """y = clamp(total + bias + residual) of a tile [len(rn), len(rm)] into out [M, Co]."""
    at, mask = _places(rn, rm, M, N, group)
    if added[0] is not None:
        total += tl.load(added[0] + group * N + rn, mask=rn < N, other=0.0).to(tl.float32)[:, None]
    if added[1] is not None:
        total += tl.load(added[1] + at, mask=mask, other=0.0).to(tl.float32)
    if S.clamp:
        total = tl.maximum(total, bounds[0], propagate_nan=tl.PropagateNan.ALL)
        total = tl.minimum(total, bounds[1], propagate_nan=tl.PropagateNan.ALL)
    tl.store(out + at, total.to(out.dtype.element_ty), mask=mask)

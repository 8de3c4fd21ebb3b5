"""y = x * W, a convolution of few pixels in float16 or bfloat16 on Hopper: one tile per program, whose K is shared by its warpgroups.

Computes the sums of `implicit_gemm.py`, with weights dequantized in registers by `hopper/weights.py`, whose arithmetic it has. A tile is 64
outputs by a box of images x rows x columns of y. A program has five roles:

    producer warp   `_produce`: TMA loads the codes of the first K slabs while the preceding kernel is still running, then x, 64 channels of
                    a tap at a time, 0 outside of the image. Where there are fewer stages than K slabs, stages are reused
    four teams      `_consume`: team t, a warpgroup, dequantizes and multiplies K slabs t, t + 4, t + 8, …: one dequantizes while others
                    multiply. They synchronize once, when team 0 adds up the sums of all in shared memory, and writes y

With one image, what takes time is the latency from the first load to the last addition. Fastest where all programs run at once: up to about
8000 pixels of 64 outputs. `dispatch/gpu_conv.py` asks `supports`, `configs` and `tiles`.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, warpgroup_mma, warpgroup_mma_wait
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu.arithmetic import clamped
from halfbyte.kernels.gpu.conv.hopper import boxes_of, count_boxes
from halfbyte.kernels.gpu.conv.implicit_gemm import supports as supports_any
from halfbyte.kernels.gpu.hopper import tile as hopper_tile
from halfbyte.kernels.gpu.hopper.epilogue import sums_layout
from halfbyte.kernels.gpu.hopper.gluon_compat import async_load, reinterpret, thread_barrier
from halfbyte.kernels.gpu.hopper.ring import Shape, barriers, descriptor, why_not_hopper
from halfbyte.kernels.gpu.hopper.weights import dequantize_two_planes, high_bytes
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.values import Value
from halfbyte.kernels.problem import ConvProblem, Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import Gpu

_TEAMS = 4  # consumer warpgroups, as many as there are registers for
_RESERVED_BYTES = 8 << 10  # of shared memory outside of the stages and of the sums that teams exchange
_READ_RATIO = 60  # how many times as fast as one program all of an H100 reads


@dataclass(frozen=True)
class Config:
    """Tiles of 64 outputs by a `box` of (images, rows, columns) of y, whose product is a power of two, and `stages` K slabs in flight."""

    box: tuple[int, int, int]
    stages: int

    @property
    def pixels(self) -> int:
        return math.prod(self.box)


@dataclass(frozen=True)
class _Static(hopper_tile.Static):
    """What the kernel is compiled for, in addition to `tile.Static`, whose `block_m` are the pixels of a tile.

    Attributes:
        images, height, columns: Of a tile's box of y.
        kernel_w: Taps of a row of the filter.
        taps: Of the filter.
        tap_pieces: Pieces of 64 channels of a tap.
        k_slabs: K slabs of the weight.
    """

    images: int = 1
    height: int = 1
    columns: int = 1
    kernel_w: int = 1
    taps: int = 1
    tap_pieces: int = 1
    k_slabs: int = 1

    @property
    def teams(self) -> int:
        """Teams that have a K slab."""
        return min(_TEAMS, self.k_slabs)

    @property
    def block_n(self) -> int:
        """Rows of the weight in a stage."""
        return self.rows

    @property
    def stage_k(self) -> int:
        """Elements along K of a stage of the weight in 8 bits."""
        return 64

    @property
    def reuses_stages(self) -> bool:
        """Whether there are fewer stages than K slabs."""
        return self.stages < self.k_slabs


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if reason := supports_any(problem, gpu):
        return reason
    sizes, geo = problem.sizes, convolution.gpu_geometry(problem.sizes)
    if reason := why_not_hopper(gpu):
        return reason
    if problem.dtype not in (torch.float16, torch.bfloat16):
        return f"it takes 16 bits, not {problem.dtype}"
    if problem.window.stride != (1, 1) or sizes.groups > 1:
        return "it takes stride 1 and no groups"
    if sizes.channels % 64 or convolution.padded_for_gpu(sizes).padded != sizes.channels or problem.n % 8:
        return f"channels come by 64 and outputs by 8, not {sizes.channels} and {problem.n}"
    if not geo.contiguous:
        return f"blocks of {sizes.format} are padded"
    if geo.blocks_a_record > 4:
        return f"it has no registers for the scales of blocks of {sizes.format}, of 16 elements of K: from 32 on"
    if not hopper_tile.one_block(geo) and problem.dtype == torch.float16 and geo.format.scale != torch.float16:
        return f"it makes the weight in 16 bits, and {sizes.format} with activations of {problem.dtype} takes more"
    return None


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first: by the time to read a program's operands, and those of all."""
    candidates = []
    for pixels in (8, 16, 32, 64):
        box = min(boxes_of(pixels), key=lambda box: (count_boxes(problem, box), -box[2]))
        candidates.append(_config(problem, gpu, box))
    return tuple(sorted(candidates, key=lambda config: _cost(problem, gpu, config)))


def _config(problem: ConvProblem, gpu: Gpu, box: tuple[int, int, int]) -> Config:
    """Return the config with as many stages as fit in shared memory."""
    pixels = math.prod(box)
    room = gpu.shared - _RESERVED_BYTES - 4 * 64 * pixels * (_TEAMS - 1)
    return Config(box, min(convolution.gpu_geometry(problem.sizes).records, room // _slab_bytes(problem, pixels)))


def _slab_bytes(problem: ConvProblem, pixels: int) -> int:
    """Return the bytes of a K slab of both operands."""
    return gpu_tiles.RECORD * (2 * pixels + 64 * problem.sizes.format.bits // 8)


def _cost(problem: ConvProblem, gpu: Gpu, config: Config) -> int:
    """Estimate the time of reading, in no unit: that of one program and that of all."""
    programs = tiles(problem, config)
    return _slab_bytes(problem, config.pixels) * (_READ_RATIO + programs) * -(-programs // gpu.sms)


def tiles(problem: ConvProblem, config: Config) -> int:
    """Return the number of tiles."""
    return -(-problem.n // 64) * count_boxes(problem, config.box)


def launch(problem: ConvProblem, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M,
    Co]."""
    sizes, window, geo = problem.sizes, problem.window, convolution.gpu_geometry(problem.sizes)
    codes, scale, zero = gpu_tiles.views(weight, geo)
    static = _Static(
        rows=64,
        block_m=math.prod(config.box),
        stages=config.stages,
        clamp=epilogue.clamps,
        **hopper_tile.of_weight(geo),
        images=config.box[0],
        height=config.box[1],
        columns=config.box[2],
        kernel_w=sizes.kernel[1],
        taps=sizes.taps,
        tap_pieces=sizes.channels // 64,
        k_slabs=geo.records,
    )
    boxes = tuple(-(-size // side) for size, side in zip((problem.batch, *problem.out), config.box, strict=True))
    launcher.run(
        _conv,
        (tiles(problem, config),),
        descriptor(x, [*config.box, 64]),
        hopper_tile.codes_descriptor(codes, static),
        (scale, scale if zero is None else zero),
        out,
        (epilogue.bias, epilogue.residual),
        problem.n,
        geo.n_padded,
        boxes,
        (problem.batch, *problem.image, *problem.out),
        (window.padding[0], window.padding[2], *window.dilation),
        (epilogue.low, epilogue.high),
        static,
        num_warps=4,
        early=True,
    )


# The kernel. `S` is a _Static, `shape` a Shape; `params` are pointers to scales and zeros, or to scales twice; `outputs` y, bias and
# residual; `image` batch, height and width of x, and the last two of y; `window` padding above and on the left, and dilations.


class Ring(NamedTuple):
    """Shared memory of the stages, each a K slab, and their barriers.

    Attributes:
        x: [2 * stages, pixels, 64 channels]
        weight: [stages * bits / 4, …] Codes.
        x_full: [stages] x has arrived.
        weight_full: [stages] Codes have arrived.
        empty: [stages] The team that multiplied the stage arrives; a placeholder unless S.reuses_stages.
    """

    x: Value
    weight: Value
    x_full: Value
    weight_full: Value
    empty: Value


class Tile(NamedTuple):
    """A tile's first output, image, row and column of y."""

    n: Value
    image: Value
    row: Value
    column: Value


class Partials(NamedTuple):
    """The barrier at which all teams but the first arrive, and shared memory [teams - 1, 64, pixels] for their sums."""

    ready: Value
    sums: Value


@gluon.jit
def _load_weight(wd, ring, tile, r, S: gl.constexpr):
    """Load the codes of K slab r."""
    stage = r % S.stages
    bar = ring.weight_full.index(stage)
    mbarrier.expect(bar, 1024 * S.bits)
    if S.bits == 4:
        async_load(wd, [(tile.n // 64 * S.k_slabs + r) * 32, 0], bar, ring.weight.index(stage))
    else:
        for i in gl.static_range(2):
            async_load(wd, [tile.n, r * 128 + 64 * i], bar, ring.weight.index(2 * stage + i))


@gluon.jit
def _load_x(xd, ring, tile, r, window, S: gl.constexpr):
    """Load two pieces of 64 channels of K slab r; zeros behind the last tap."""
    BOX: gl.constexpr = xd.block_shape
    stage = r % S.stages
    bar = ring.x_full.index(stage)
    mbarrier.expect(bar, 256 * S.block_m)
    for i in gl.static_range(2):
        tap = (2 * r + i) // S.tap_pieces
        channel = gl.where(tap < S.taps, (2 * r + i) % S.tap_pieces, S.tap_pieces) * 64
        y = tile.row + tap // S.kernel_w * window[2] - window[0]
        x = tile.column + tap % S.kernel_w * window[3] - window[1]
        to = reinterpret(ring.x.index(stage * 2 + i), xd.dtype, BOX, xd.layout)
        async_load(xd, [tile.image, y, x, channel], bar, to)


@gluon.jit
def _produce(xd, wd, ring, tile, window, S: gl.constexpr):
    """The producer warp: load all K slabs."""
    for r in range(S.stages):
        _load_weight(wd, ring, tile, r, S)
    gdc_wait()
    for r in range(S.stages):
        _load_x(xd, ring, tile, r, window, S)
    if S.reuses_stages:
        for r in range(S.stages, S.k_slabs):
            mbarrier.wait(ring.empty.index(r % S.stages), ((r // S.stages) & 1) ^ 1)
            _load_weight(wd, ring, tile, r, S)
            _load_x(xd, ring, tile, r, window, S)


@gluon.jit
def _load_params(params, n_padded, r, rn, S: gl.constexpr):
    """Load the scales of the blocks of K slab r for rows rn of the weight, then their zeros."""
    BLOCKS: gl.constexpr = S.blocks_per_slab
    loaded = ()
    for i in gl.static_range(2):
        row = params[i if S.zero != "none" else 0] + (r // S.slabs_per_block * BLOCKS).to(gl.int64) * n_padded
        for _ in gl.static_range(BLOCKS):
            loaded += (gl.load(row + rn),)  # type: ignore[assignment]
            row += n_padded
    return loaded


@gluon.jit
def _dequantize_slab(ring, r, high, params, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return the planes of K slab r in DTYPE; `params` as `_load_params` returned them, `high` as `weights.high_bytes` did."""
    LAST: gl.constexpr = S.bits // 4 - 1
    stage = r % S.stages
    mbarrier.wait(ring.weight_full.index(stage), (r // S.stages) & 1)
    stage *= LAST + 1
    w0, w1 = dequantize_two_planes(ring.weight.index(stage), high, params, 0, 0, OPERAND, DTYPE, S)
    w2, w3 = dequantize_two_planes(ring.weight.index(stage + LAST), high, params, 2, 0, OPERAND, DTYPE, S)
    return w0, w1, w2, w3


@gluon.jit
def _multiply_slab(w, ring, r, acc, S: gl.constexpr):
    """Start acc + the products of K slab r with its planes w."""
    stage = r % S.stages
    mbarrier.wait(ring.x_full.index(stage), (r // S.stages) & 1)
    for i in gl.static_range(4):
        x = ring.x.index(stage * 2 + i // 2).slice(i % 2 * 32, 32, dim=1).permute([1, 0])
        acc = warpgroup_mma(w[i], x, acc, is_async=True)
    return acc


@gluon.jit
def _consume(ring, partials, params, outputs, shape, tile, image, bounds, TEAM: gl.constexpr, S: gl.constexpr):
    """A team, if it has a K slab."""
    if TEAM < S.teams:
        _multiply(ring, partials, params, outputs, shape, tile, image, bounds, TEAM, S)


@gluon.jit
def _multiply(ring, partials, params, outputs, shape, tile, image, bounds, TEAM: gl.constexpr, S: gl.constexpr):
    """Multiply every S.teams-th K slab; the first team adds up the sums of all, and writes y."""
    TEAMS: gl.constexpr = S.teams
    PIXELS: gl.constexpr = S.block_m
    LAST: gl.constexpr = TEAM + (S.k_slabs - 1 - TEAM) // TEAMS * TEAMS
    MMA: gl.constexpr = sums_layout(PIXELS)
    OPERAND: gl.constexpr = gl.DotOperandLayout(0, MMA, 2)
    DTYPE: gl.constexpr = outputs[0].dtype.element_ty
    high = high_bytes(DTYPE)
    rn = tile.n + gl.arange(0, 64, layout=gl.SliceLayout(1, OPERAND))
    row = gl.minimum(tile.n + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), shape.n - 1)
    # Loads of the epilogue are issued before the products.
    factor = row
    if S.one_block:
        factor = gl.load(params[0] + row)
    bias = row
    if outputs[1] is not None:
        bias = gl.load(outputs[1] + row).to(gl.float32)
    first = gl.to_tensor(TEAM)
    w = _dequantize_slab(ring, first, high, _load_params(params, shape.n_padded, first, rn, S), OPERAND, DTYPE, S)
    acc = gl.zeros([64, PIXELS], gl.float32, layout=MMA)
    for r in range(first, LAST, TEAMS):
        next_params = _load_params(params, shape.n_padded, r + TEAMS, rn, S)
        a = _multiply_slab(w, ring, r, acc, S)
        next_w = _dequantize_slab(ring, r + TEAMS, high, next_params, OPERAND, DTYPE, S)
        acc, _w0, _w1, _w2, _w3 = warpgroup_mma_wait(0, deps=[a, w[0], w[1], w[2], w[3]])
        if S.reuses_stages:
            mbarrier.arrive(ring.empty.index(r % S.stages), count=1)
        w = next_w
    a = _multiply_slab(w, ring, gl.to_tensor(LAST), acc, S)
    acc, _w0, _w1, _w2, _w3 = warpgroup_mma_wait(0, deps=[a, w[0], w[1], w[2], w[3]])
    if TEAM > 0:
        partials.sums.index(TEAM - 1).store(acc)
        thread_barrier()  # orders this team's stores before its arrival
        mbarrier.arrive(partials.ready, count=1)
    else:
        if TEAMS > 1:
            mbarrier.wait(partials.ready, 0)
            for i in gl.static_range(TEAMS - 1):
                acc += partials.sums.index(i).load(MMA)
        _write(acc, factor, bias, outputs, shape, tile, image, bounds, S)


@gluon.jit
def _write(acc, factor, bias, outputs, shape, tile, image, bounds, S: gl.constexpr):
    """Write y = clamp(acc * factor + bias + residual) of a tile."""
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    MMA: gl.constexpr = acc.type.layout
    DTYPE: gl.constexpr = outputs[0].dtype.element_ty
    i = gl.arange(0, S.block_m, layout=gl.SliceLayout(0, OUT))
    b = tile.image + i // (S.columns * S.height)
    y = tile.row + i // S.columns % S.height
    x = tile.column + i % S.columns
    rn = tile.n + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    place = gl.expand_dims(((b.to(gl.int64) * image[3] + y) * image[4] + x) * shape.n, 0) + gl.expand_dims(rn, 1)
    mask = gl.expand_dims(rn < shape.n, 1) & gl.expand_dims((b < image[0]) & (y < image[3]) & (x < image[4]), 0)
    if S.one_block:
        acc *= gl.expand_dims(factor.to(gl.float32), 1)
    if outputs[1] is not None:
        acc += gl.expand_dims(bias, 1)
    if outputs[2] is not None:
        gdc_wait()
        acc += gl.convert_layout(gl.load(outputs[2] + place, mask=mask, other=0.0), MMA).to(gl.float32)
    if S.clamp:
        acc = clamped(acc, bounds[0], bounds[1])
    gl.store(outputs[0] + place, gl.convert_layout(acc.to(DTYPE), OUT), mask=mask)


@gluon.jit
def _conv(xd, wd, block_params, out, added, N, n_padded, boxes, image, window, bounds, S: gl.constexpr):
    """Compute tile program_id(0). `boxes`: how many of them cover y along images, rows and columns."""
    STAGES: gl.constexpr = S.stages
    gdc_launch_dependents()
    LINES: gl.constexpr = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=2)
    PLAIN: gl.constexpr = gl.SwizzledSharedLayout(1, 1, 1, [1, 0])
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES * 2, S.block_m, 64], LINES)
    ws = gl.allocate_shared_memory(wd.dtype, [STAGES * (S.bits // 4), wd.block_shape[0], 64], wd.layout)
    sums = gl.allocate_shared_memory(gl.float32, [max(1, S.teams - 1), 64, S.block_m], PLAIN)
    x_full = barriers(STAGES, 1)
    weight_full = barriers(STAGES, 1)
    # Placeholders, not barriers without a waiting thread: the compiler would overlap their memory with y's.
    empty = x_full
    ready = x_full
    if S.reuses_stages:
        empty = barriers(STAGES, 1)
    if S.teams > 1:
        ready = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
        mbarrier.init(ready, count=S.teams - 1)
    fence_async_shared()
    ring = Ring(xs, ws, x_full, weight_full, empty)
    tiles_n = gl.cdiv(N, 64)
    box = gl.program_id(0) // tiles_n
    rest = box // boxes[2]
    tile = Tile(
        gl.program_id(0) % tiles_n * 64,
        rest // boxes[1] * S.images,
        rest % boxes[1] * S.height,
        box % boxes[2] * S.columns,
    )
    partials = Partials(ready, sums)
    outputs = (out, added[0], added[1])
    shape = Shape(0, N, n_padded, S.k_slabs)
    gl.warp_specialize(
        [
            (_consume, (ring, partials, block_params, outputs, shape, tile, image, bounds, 0, S)),
            (_consume, (ring, partials, block_params, outputs, shape, tile, image, bounds, 1, S)),
            (_consume, (ring, partials, block_params, outputs, shape, tile, image, bounds, 2, S)),
            (_consume, (ring, partials, block_params, outputs, shape, tile, image, bounds, 3, S)),
            (_produce, (xd, wd, ring, tile, window, S)),
        ],
        [4, 4, 4, 1],
        [112, 112, 112, 32],
    )

"""y = x * W, a convolution of stride 1 on Hopper's tensor cores: TMA, warp specialization, a persistent grid.

The sums of `conv.py`: int8 to int8, or in float16 and bfloat16 with the weight written out in x's type first. A program computes tiles
of 64 or 128 outputs by a box of images x rows x columns of y, one after the other. For each tap and each 128 bytes of channels one warp
asks TMA for the same box of x, moved by the tap: a patch is never addressed pixel by pixel, and what lies outside of the image comes
as 0. Two warpgroups multiply, both operands from shared memory.

Outside of the image lies in_zero, not 0, for integers: `table` holds in_zero * sum(q) of each tap, which is added to the sums of those
pixels whose tap is outside. All of it is exact.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfbyte.kernels.gpu import dequantize
from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.arithmetic import MAGIC
from halfbyte.kernels.gpu.conv import supports as supports_any
from halfbyte.kernels.gpu.conv_tile import Convolution
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.problem import Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import Gpu

_RESIDENT = 80 << 10  # bytes of a weight that may stay in shared memory


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` (64 or 128) outputs by a `box` of (images, rows, columns) of y, whose product is a power of two; `stages` steps
    of K in flight. `paired`: 64 bytes are all channels, so that two pixels are read as one line of 128, which TMA takes no longer for,
    and each warpgroup multiplies one of the two. `resident`: the weight stays in shared memory."""

    rows: int
    box: tuple[int, int, int]
    stages: int
    programs: int
    paired: bool = False
    resident: bool = False

    @property
    def pixels(self) -> int:
        return self.box[0] * self.box[1] * self.box[2]

    def tiles(self, problem: Convolution) -> int:
        return _count(problem, self.box) * -(-problem.n // self.rows)


@dataclass(frozen=True)
class _Static:
    """What the kernel is compiled for. columns: pixels of a warpgroup; parts: steps of a tap; step: channels of a step."""

    rows: int
    images: int
    height: int
    width: int
    stages: int
    kernel_w: int
    taps: int
    parts: int
    step: int
    paired: bool
    resident: bool
    bounded: bool
    clamp: bool

    @property
    def lines(self) -> int:
        """Of shared memory that a box of x takes."""
        return self.pixels // 2 if self.paired else self.pixels

    @property
    def line(self) -> int:
        """Elements of one."""
        return self.step * 2 if self.paired else self.step

    @property
    def steps(self) -> int:
        return self.taps * self.parts

    @property
    def kept(self) -> int:
        """Steps of the weight in shared memory."""
        return self.steps if self.resident else self.stages

    @property
    def pixels(self) -> int:
        return self.images * self.height * self.width

    @property
    def columns(self) -> int:
        return self.pixels * self.rows // 128


def supports(problem: Convolution, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if reason := supports_any(problem, gpu):
        return reason
    sizes, integer = problem.sizes, problem.dtype == torch.int8
    if gpu.backend != "cuda" or gpu.capability != (9, 0):
        return f"it is made of Hopper's instructions (sm_90), and {gpu.name} is {gpu.arch}"
    if problem.dtype == torch.float32 or (integer and sizes.format.bits != 8):
        return f"it takes 16 bits, or 8 bits and a weight of 8 bits, not {problem.dtype} and {sizes.format}"
    if problem.window.stride != (1, 1) or sizes.groups > 1:
        return "it takes stride 1 and no groups"
    if sizes.channels % 64 or convolution.padded_for_gpu(sizes).padded != sizes.channels or problem.n % 16:
        return f"channels come by 64 and outputs by 16, not {sizes.channels} and {problem.n}"
    return None


def configs(problem: Convolution, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first: the least of waves times pixels of a tile."""
    step, element = _step(problem), problem.dtype.itemsize
    found = []
    for rows, pixels in ((64, 128), (64, 256), (128, 128), (128, 256)):
        if rows > 64 >= problem.n:
            continue
        paired = rows == 64 and pixels == 256 and problem.sizes.channels * element == 64
        box = min((b for b in _boxes(pixels) if not paired or b[2] == 2), key=lambda box: (_count(problem, box), -box[2]))
        tiles = _count(problem, box) * -(-problem.n // rows)
        weight = rows * problem.sizes.k * element
        resident = problem.n <= rows and weight <= _RESIDENT and tiles > gpu.sms
        left = gpu.shared - (56 << 10 if element == 2 else 24 << 10) - (weight if resident else 0)
        stages = min(6, left // ((pixels + (0 if resident else rows)) * step * element))
        # A wave takes as long as its tile's products, and what reading it and writing it costs.
        read = pixels // (2 if paired else 1) + (0 if resident else rows)
        cost = -(-tiles // gpu.sms) * (rows * pixels / 128 + read / 4 + 16)
        found.append((cost, Config(rows, box, stages, min(gpu.sms, tiles), paired, resident)))
    return tuple(config for _, config in sorted(found, key=lambda pair: pair[0]))


def _boxes(pixels: int) -> list[tuple[int, int, int]]:
    powers = [1 << i for i in range(pixels.bit_length())]
    return [(pixels // h // w, h, w) for h in powers for w in powers if h * w <= pixels and w <= 64 and h <= 64]


def _count(problem: Convolution, box: tuple[int, int, int]) -> int:
    """Boxes that cover all of y."""
    return -(-problem.batch // box[0]) * -(-problem.out[0] // box[1]) * -(-problem.out[1] // box[2])


def _step(problem: Convolution) -> int:
    return 128 if problem.dtype == torch.int8 and problem.sizes.channels % 128 == 0 else 64


def launch(problem: Convolution, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """x [B, H, W, C] in memory, weight of layout "gpu_tiles", out [M, Co]; bias [Co] and residual [M, Co] in the epilogue."""
    geo = convolution.gpu_geometry(problem.sizes)
    nbytes = problem.n * geo.k * x.element_size()
    rows = launcher.workspace(out.device, nbytes)[:nbytes].view(x.dtype).view(problem.n, geo.k)
    dequantize.write(gpu_tiles.views(weight, geo), geo, rows)
    _start(problem, config, x, rows, out, epilogue, None)


def launch_integer(
    problem: Convolution, config: Config, x: Tensor, weight: Tensor, table: Tensor, out: Tensor, in_zero: int, clamp: tuple[int, int]
) -> None:
    """The same of int8, with the table [1, 4 + taps, at least Co] of `ops.cuda_conv`."""
    codes = gpu_tiles.views(weight, convolution.gpu_geometry(problem.sizes)).codes
    _start(problem, config, x, codes, out, Epilogue(None, None, float(clamp[0]), float(clamp[1])), table if in_zero else table[:, :4])


def _start(problem: Convolution, config: Config, x: Tensor, rows: Tensor, out: Tensor, epilogue: Epilogue, table: Tensor | None) -> None:
    window, step, bits = problem.window, _step(problem), 8 * x.element_size()
    line = step * (2 if config.paired else 1)
    of_rows = gl.NVMMASharedLayout(swizzle_byte_width=step * bits // 8, element_bitwidth=bits, rank=2)
    of_box = gl.NVMMASharedLayout(swizzle_byte_width=line * bits // 8, element_bitwidth=bits, rank=3 if config.paired else 4)
    box = [*config.box[: 2 if config.paired else 3], line]
    static = _Static(
        rows=config.rows,
        images=config.box[0],
        height=config.box[1],
        width=config.box[2],
        stages=config.stages,
        kernel_w=problem.sizes.kernel[1],
        taps=problem.sizes.taps,
        parts=problem.sizes.channels // step,
        step=step,
        paired=config.paired,
        resident=config.resident,
        bounded=table is not None and table.shape[1] > 4 and any(window.padding),
        clamp=epilogue.clamps,
    )
    covers = tuple(-(-size // side) for size, side in zip((problem.batch, *problem.out), config.box, strict=True))
    launcher.run(
        _conv,
        (config.programs,),
        TensorDescriptor.from_tensor(x.flatten(2) if config.paired else x, box, of_box),
        TensorDescriptor.from_tensor(rows, [config.rows, step], of_rows),
        table,
        out,
        (epilogue.bias, epilogue.residual),
        problem.n,
        (-(-problem.n // config.rows), *covers),
        (problem.batch, *problem.image, *problem.out),
        (window.padding[0], window.padding[2], *window.dilation),
        (epilogue.low, epilogue.high),
        0 if table is None else table.stride(1),
        static,
        num_warps=4,
    )


# The kernel. `S` is a _Static; `grid` counts tiles along outputs, images, rows and columns.


@gluon.jit
def _tile(tile, grid, S: gl.constexpr):
    """First output, image, row and column of a tile."""
    pn = tile % grid[0]
    rest = tile // grid[0]
    px = rest % grid[3]
    rest = rest // grid[3]
    return pn * S.rows, rest // grid[2] * S.images, rest % grid[2] * S.height, px * S.width


@gluon.jit
def _produce(xd, wd, xs, ws, full, empty, loaded, grid, window, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    STEPS: gl.constexpr = S.steps
    BYTES: gl.constexpr = xd.dtype.primitive_bitwidth // 8 * S.step
    BOX: gl.constexpr = [S.images, S.height, S.line] if S.paired else [S.images, S.height, S.width, S.step]
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.expect(loaded, STEPS * S.rows * BYTES)
        for t in range(STEPS):
            tma.async_copy_global_to_shared(wd, [0, t * S.step], loaded, ws.index(t))
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_n, b, y, x = _tile(tile, grid, S)
        for t in range(STEPS):
            tap = t // S.parts
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), (S.pixels if S.resident else S.pixels + S.rows) * BYTES)
            iy = y + tap // S.kernel_w * window[2] - window[0]
            ix = x + tap % S.kernel_w * window[3] - window[1]
            to = xs.index(stage)._reinterpret(xd.dtype, BOX, xd.layout)
            if S.paired:
                tma.async_copy_global_to_shared(xd, [b, iy, ix * S.step], full.index(stage), to)
            else:
                tma.async_copy_global_to_shared(xd, [b, iy, ix, t % S.parts * S.step], full.index(stage), to)
            if not S.resident:
                tma.async_copy_global_to_shared(wd, [first_n, t * S.step], full.index(stage), ws.index(stage))
            step += 1


@gluon.jit
def _pixels(first, b, y, x, image, S: gl.constexpr, LAYOUT: gl.constexpr):
    """Of a warpgroup's pixels: image, row, column, and which of them there are. They begin with `first` of the tile, or, where pixels
    are paired, are the first or second of each pair."""
    i = gl.arange(0, S.columns, layout=LAYOUT)
    if S.paired:
        i = i * 2
    i += first
    oy = y + i // S.width % S.height
    ox = x + i % S.width
    b += i // (S.width * S.height)
    return b, oy, ox, (b < image[0]) & (oy < image[3]) & (ox < image[4])


@gluon.jit
def _consume(xs, ws, full, empty, loaded, table, out, added, N, grid, image, window, bounds, row, W: gl.constexpr, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    INTEGER: gl.constexpr = table is not None
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, COLUMNS if COLUMNS < 128 else 128, 32 if INTEGER else 16]
    )
    PART: gl.constexpr = W if S.rows == 64 else 0
    HALF: gl.constexpr = 0 if S.rows == 64 else W
    FIRST: gl.constexpr = PART if S.paired else PART * COLUMNS
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.wait(loaded, 0)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_n, b, y, x = _tile(tile, grid, S)
        acc = gl.zeros([64, COLUMNS], gl.int32 if INTEGER else gl.float32, layout=MMA)
        for t in range(S.steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            if S.paired:
                xt = xs.index(stage).slice(PART * S.step, S.step, dim=1)
            else:
                xt = xs.index(stage).slice(PART * COLUMNS, COLUMNS, dim=0)
            acc = warpgroup_mma(ws.index(t if S.resident else stage).slice(HALF * 64, 64, dim=0), xt.permute([1, 0]), acc, is_async=True)
            acc = warpgroup_mma_wait(1, deps=[acc])  # for the step before
            if t > 0:
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        at = (first_n + HALF * 64, FIRST, b, y, x)
        if INTEGER:
            _write_codes(acc, table, out, N, at, image, window, bounds, row, S)
        else:
            _write(acc, out, added, N, at, image, bounds, S)


@gluon.jit
def _write_codes(acc, table, out, N, at, image, window, bounds, row, S: gl.constexpr):
    """Sums of codes -> codes."""
    MMA: gl.constexpr = acc.type.layout
    OUT: gl.constexpr = gl.BlockedLayout([16, 1], [4, 8], [1, 4], [0, 1])
    rn = gl.minimum(at[0] + gl.arange(0, 64, layout=gl.SliceLayout(1, MMA)), N - 1)
    acc += gl.expand_dims(gl.load(table + 2 * row + rn).to(gl.int32, bitcast=True), 1)
    if S.bounded:
        _, oy, ox, _ = _pixels(at[1], at[2], at[3], at[4], image, S, gl.SliceLayout(0, MMA))
        for tap in range(S.taps):
            iy = oy + tap // S.kernel_w * window[2] - window[0]
            ix = ox + tap % S.kernel_w * window[3] - window[1]
            outside = ((iy < 0) | (iy >= image[1]) | (ix < 0) | (ix >= image[2])).to(gl.int32)
            if gl.max(outside, axis=0) > 0:
                acc += gl.expand_dims(gl.load(table + (4 + tap) * row + rn).to(gl.int32, bitcast=True), 1) * gl.expand_dims(outside, 0)
    multiplier = gl.expand_dims(gl.load(table + row + rn), 1)
    constant = gl.expand_dims(gl.load(table + rn), 1)
    total = gl.fma(acc.to(gl.float32), multiplier.broadcast_to(acc.shape), constant.broadcast_to(acc.shape))
    total = gl.minimum(gl.maximum(total, bounds[0]), bounds[1]) + MAGIC
    codes = gl.convert_layout(total.to(gl.int32, bitcast=True).to(gl.int8), OUT)  # the low byte is the integer
    rn, m, mask = _places(at, N, image, S, OUT)
    gl.store(out + gl.expand_dims(m * N, 0) + gl.expand_dims(rn, 1), codes, mask=mask)


@gluon.jit
def _places(at, N, image, S: gl.constexpr, OUT: gl.constexpr):
    """Outputs, patches (rows of y) and which of them there are."""
    rn = at[0] + gl.arange(0, 64, layout=gl.SliceLayout(1, OUT))
    b, oy, ox, real = _pixels(at[1], at[2], at[3], at[4], image, S, gl.SliceLayout(0, OUT))
    m = (b.to(gl.int64) * image[3] + oy) * image[4] + ox
    return rn, m, gl.expand_dims(rn < N, 1) & gl.expand_dims(real, 0)


@gluon.jit
def _write(total, out, added, N, at, image, bounds, S: gl.constexpr):
    OUT: gl.constexpr = gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1])
    DTYPE: gl.constexpr = out.dtype.element_ty
    rn, m, mask = _places(at, N, image, S, OUT)
    if added[0] is None and added[1] is None and not S.clamp:
        y = gl.convert_layout(total.to(DTYPE), OUT)
    else:
        y = finish(gl.convert_layout(total, OUT), added, rn, m, N, bounds[0], bounds[1], S.clamp, DTYPE, mask)
    gl.store(out + gl.expand_dims(m * N, 0) + gl.expand_dims(rn, 1), y, mask=mask)


@gluon.jit
def _conv(xd, wd, table, out, added, N, grid, image, window, bounds, row, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    LINES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=xd.layout.swizzle_byte_width, element_bitwidth=xd.layout.element_bitwidth, rank=2
    )
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES, S.lines, S.line], LINES)
    ws = gl.allocate_shared_memory(xd.dtype, [S.kept, S.rows, S.step], wd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (xs, ws, full, empty, loaded, table, out, added, N, grid, image, window, bounds, row, 0, S)),
            (_consume, (xs, ws, full, empty, loaded, table, out, added, N, grid, image, window, bounds, row, 1, S)),
            (_produce, (xd, wd, xs, ws, full, empty, loaded, grid, window, S)),
        ],
        [4, 1],
        [232, 40],
    )

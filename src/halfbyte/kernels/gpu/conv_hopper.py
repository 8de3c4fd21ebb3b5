"""y = x * W, a convolution of stride 1 or 2 on Hopper's tensor cores: TMA, warp specialization, a persistent grid.

The sums of `conv.py`: int8 to int8, or in float16 and bfloat16 with the weight written out in x's type first. A program computes tiles
of 64 or 128 outputs by a box of images x rows x columns of y, one after the other. For each tap and each 128 bytes of channels one warp
asks TMA for the same box of x, moved by the tap: a patch is never addressed pixel by pixel, and what lies outside of the image comes
as 0. Two warpgroups multiply, both operands from shared memory. Where the stride is 2, a box is of every second row and column: x is then
[image, row / 2, row % 2, column / 2, column % 2 and channel].

Small tiles wait for shared memory, not for the matrix unit. There a box is a row of y, with its images next to each other in shared
memory and then its columns: a step to the right is then a step of whole buffers, and all taps of a row of the kernel (`sweep`) read one
copy of x.

Outside of the image lies in_zero, not 0, for integers: `table` holds in_zero * sum(q) of each tap, which is added to the sums of those
pixels whose tap is outside. All of it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma, warpgroup_mma, warpgroup_mma_wait
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor
from triton.language.extra.cuda import gdc_launch_dependents, gdc_wait

from halfbyte.kernels.gpu import dequantize
from halfbyte.kernels.gpu import launch as launcher
from halfbyte.kernels.gpu.conv import supports as supports_any
from halfbyte.kernels.gpu.conv_hopper_write import write, write_codes
from halfbyte.kernels.gpu.conv_tile import Convolution
from halfbyte.kernels.problem import Addition, Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.machine import Gpu

_RESIDENT = 80 << 10  # bytes of a weight that may stay in shared memory


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` (64 or 128) outputs by a `box` of (images, rows, columns) of y, whose product is a power of two; `stages` steps
    of K in flight. `paired`: 64 bytes are all channels, so that two pixels are read as one line of 128, which TMA takes no longer for,
    and each warpgroup multiplies one of the two. `resident`: the weight stays in shared memory. `sweep`: a step has all taps of a row of
    the kernel; a box has one row then, and a multiple of 8 images."""

    rows: int
    box: tuple[int, int, int]
    stages: int
    programs: int
    paired: bool = False
    resident: bool = False
    sweep: bool = False

    @property
    def pixels(self) -> int:
        return self.box[0] * self.box[1] * self.box[2]

    def tiles(self, problem: Convolution) -> int:
        return count_boxes(problem, self.box) * -(-problem.n // self.rows)


@dataclass(frozen=True)
class _Static:
    """What the kernel is compiled for. step: channels of a step, parts: steps of a tap; dilation: of columns; unit: divides the number of
    outputs; leads: of an Addition."""

    rows: int
    images: int
    height: int
    width: int
    stages: int
    kernel_w: int
    dilation: int
    taps: int
    parts: int
    step: int
    paired: bool
    resident: bool
    sweep: bool
    bounded: bool
    clamp: bool
    leads: bool
    unit: int
    stride: int

    @property
    def together(self) -> int:
        """Taps of a stage."""
        return self.kernel_w if self.sweep else 1

    @property
    def halo(self) -> int:
        """Columns of x beyond those of y that a stage has."""
        return (self.kernel_w - 1) * self.dilation if self.sweep else 0

    @property
    def piece(self) -> int:
        """Columns that are read at once."""
        return math.gcd(self.width, self.halo) if self.sweep else self.width

    @property
    def buffers(self) -> int:
        """That a stage of x has: one, or one for each column."""
        return self.width + self.halo if self.sweep else 1

    @property
    def lines(self) -> int:
        """Of shared memory in a buffer of x."""
        return self.images if self.sweep else self.pixels // 2 if self.paired else self.pixels

    @property
    def line(self) -> int:
        """Elements of one."""
        return self.step * 2 if self.paired else self.step

    @property
    def steps(self) -> int:
        """Stages that a tile takes."""
        return self.taps // self.together * self.parts

    @property
    def kept(self) -> int:
        """Pieces of the weight in shared memory."""
        return self.taps * self.parts if self.resident else self.stages * self.together

    @property
    def pixels(self) -> int:
        return self.images * self.height * self.width

    @property
    def columns(self) -> int:
        """Pixels that a warpgroup multiplies."""
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
    if problem.window.stride not in ((1, 1), (2, 2)) or sizes.groups > 1:
        return "it takes strides of 1 or 2 in both directions and no groups"
    if problem.window.stride == (2, 2) and (problem.image[0] % 2 or problem.image[1] % 2 or sizes.channels % 64):
        return f"with stride 2 it takes even sizes and channels by 64, not {problem.image} and {sizes.channels}"
    if problem.n % 8:
        return f"outputs come by 8, not {problem.n}"
    if sizes.taps > 1 and (sizes.channels % 64 or convolution.padded_for_gpu(sizes).padded != sizes.channels):
        return f"channels come by 64 where there are several taps, not {sizes.channels}"
    if sizes.channels * problem.dtype.itemsize % 16:
        return f"pixels are multiples of 16 bytes, not {sizes.channels * problem.dtype.itemsize}"
    return None


def configs(problem: Convolution, gpu: Gpu) -> tuple[Config, ...]:
    """The best guess first: the least clocks of a program."""
    found = []
    for rows, pixels in ((64, 128), (64, 256), (128, 128), (128, 256)):
        if rows > 64 >= problem.n:
            continue
        if problem.sizes.kernel[1] > 1 and problem.window.stride == (1, 1):
            sweeps = [(pixels // width, 1, width) for width in (2, 4, 8, 16) if 8 <= pixels // width <= problem.batch]
            if sweeps:
                box = min(sweeps, key=lambda box: (count_boxes(problem, box), -box[2]))
                found.append(_config(problem, gpu, rows, box, sweep=True))
        paired = rows == 64 and pixels == 256 and problem.sizes.channels * problem.dtype.itemsize == 64 and problem.window.stride == (1, 1)
        boxes = [box for box in boxes_of(pixels) if not paired or box[2] == 2]
        found.append(_config(problem, gpu, rows, min(boxes, key=lambda box: (count_boxes(problem, box), -box[2])), paired=paired))
    known = [config for config in found if config is not None]
    return tuple(sorted(known, key=lambda config: _clocks(problem, gpu, config)))


def _config(
    problem: Convolution, gpu: Gpu, rows: int, box: tuple[int, int, int], *, sweep: bool = False, paired: bool = False
) -> Config | None:
    """With what fits in shared memory, if that is enough."""
    line, pixels = _step(problem) * problem.dtype.itemsize, math.prod(box)
    weight = rows * problem.sizes.taps * _parts(problem) * line
    tiles = count_boxes(problem, box) * -(-problem.n // rows)
    resident = problem.n <= rows and weight <= _RESIDENT and tiles > gpu.sms
    left = gpu.shared - (16 << 10) - (weight if resident else 0)
    together = problem.sizes.kernel[1] if sweep else 1
    stage = line * (_lines(problem, box) if sweep else pixels) + (0 if resident else together * rows * line)
    stages = min(8, left // stage)
    return Config(rows, box, stages, min(gpu.sms, tiles), paired, resident, sweep) if stages > (2 if sweep else 1) else None


def _lines(problem: Convolution, box: tuple[int, int, int]) -> int:
    """Pixels of x that all taps of a row of the kernel read together."""
    return box[0] * (box[2] + (problem.sizes.kernel[1] - 1) * problem.window.dilation[1])


def _clocks(problem: Convolution, gpu: Gpu, config: Config) -> float:
    """Of a program, roughly, fitted to times of an H100: a step takes as long as its products, or as the lines of 128 bytes that shared
    memory gives and takes; a tile takes time of its own, by its size."""
    rows, pixels, step = config.rows, config.pixels, _step(problem)
    read = 128 + (2 if rows == 128 else 1) * pixels
    written = pixels / (2 if config.paired else 1)
    if config.sweep:
        written = _lines(problem, config.box) / problem.sizes.kernel[1]
    if not config.resident:
        written += rows
    lines = (0.9 * read + written) * step * problem.dtype.itemsize / 128
    multiplied = rows * pixels / 32 * step * problem.dtype.itemsize / 128
    steps = problem.sizes.taps * _parts(problem)
    clocks = -(-config.tiles(problem) // gpu.sms) * (steps * max(multiplied, lines) + rows * pixels / 8)
    # Of integers the largest tile takes longer than that, where several follow each other.
    return clocks * (1.25 if problem.dtype == torch.int8 and rows * pixels > 128 * 128 and config.tiles(problem) > gpu.sms else 1.0)


def boxes_of(pixels: int) -> list[tuple[int, int, int]]:
    powers = [1 << i for i in range(pixels.bit_length())]
    return [(pixels // h // w, h, w) for h in powers for w in powers if h * w <= pixels and w <= 64 and h <= 64]


def count_boxes(problem: Convolution, box: tuple[int, int, int]) -> int:
    """Boxes that cover all of y."""
    return -(-problem.batch // box[0]) * -(-problem.out[0] // box[1]) * -(-problem.out[1] // box[2])


def _step(problem: Convolution) -> int:
    return 128 if problem.dtype == torch.int8 and problem.sizes.channels % 128 == 0 else 64


def _parts(problem: Convolution) -> int:
    """Steps of a tap. Of the last one, what lies behind the channels of x comes as 0."""
    return -(-problem.sizes.channels // _step(problem))


def launch(problem: Convolution, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """x [B, H, W, C] in memory, weight of layout "gpu_tiles", out [M, Co]; bias [Co] and residual [M, Co] in the epilogue."""
    geo = convolution.gpu_geometry(problem.sizes)
    nbytes = problem.n * geo.k * x.element_size()
    rows = launcher.turns(out.device, nbytes)[:nbytes].view(x.dtype).view(problem.n, geo.k)
    dequantize.write(gpu_tiles.views(weight, geo), geo, rows, early=True)
    _start(problem, config, x, rows, out, epilogue, None)


def launch_integer(
    problem: Convolution,
    config: Config,
    x: Tensor,
    weight: Tensor,
    table: Tensor,
    out: Tensor,
    in_zero: int,
    clamp: tuple[int, int],
    addition: Addition | None = None,
) -> None:
    """The same of int8, with the table [1, 4 + taps, at least Co] of `ops.cuda_conv`."""
    codes = gpu_tiles.views(weight, convolution.gpu_geometry(problem.sizes)).codes
    epilogue = Epilogue(None, None, float(clamp[0]), float(clamp[1]))
    _start(problem, config, x, codes, out, epilogue, table if in_zero else table[:, :4], addition)


def _start(
    problem: Convolution,
    config: Config,
    x: Tensor,
    rows: Tensor,
    out: Tensor,
    epilogue: Epilogue,
    table: Tensor | None,
    addition: Addition | None = None,
) -> None:
    window, step, bits = problem.window, _step(problem), 8 * x.element_size()
    static = _Static(
        rows=config.rows,
        images=config.box[0],
        height=config.box[1],
        width=config.box[2],
        stages=config.stages,
        kernel_w=problem.sizes.kernel[1],
        dilation=window.dilation[1],
        taps=problem.sizes.taps,
        parts=_parts(problem),
        step=step,
        paired=config.paired,
        resident=config.resident,
        sweep=config.sweep,
        bounded=table is not None and table.shape[1] > 4 and any(window.padding),
        clamp=epilogue.clamps,
        leads=addition is not None and addition.leads,
        unit=16 if problem.n % 16 == 0 else 8,
        stride=window.stride[0],
    )
    if config.sweep:
        images, box = x.permute(1, 2, 0, 3), [1, static.piece, config.box[0], step]
    elif config.paired:
        images, box = x.flatten(2), [*config.box[:2], static.line]
    elif static.stride == 2:
        b, h, w, c = x.shape
        images, box = x.view(b, h // 2, 2, w // 2, 2 * c), [*config.box[:2], 1, config.box[2], step]
    else:
        images, box = x, [*config.box, step]
    of_rows = gl.NVMMASharedLayout(swizzle_byte_width=step * bits // 8, element_bitwidth=bits, rank=2)
    of_box = gl.NVMMASharedLayout(swizzle_byte_width=static.line * bits // 8, element_bitwidth=bits, rank=len(box))
    covers = tuple(-(-size // side) for size, side in zip((problem.batch, *problem.out), config.box, strict=True))
    launcher.run(
        _conv,
        (config.programs,),
        TensorDescriptor.from_tensor(images, box, of_box),
        TensorDescriptor.from_tensor(rows, [config.rows, step], of_rows),
        table,
        out,
        (epilogue.bias, epilogue.residual if addition is None else addition.other),
        problem.n // static.unit,
        (-(-problem.n // config.rows), *covers),
        (problem.batch, *problem.image, *problem.out),
        (window.padding[0], window.padding[2], *window.dilation),
        (epilogue.low, epilogue.high, *(() if addition is None else addition.numbers)),
        0 if table is None else table.stride(1),
        static,
        num_warps=4,
        launch_pdl=True,
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
def _fetch_x(xd, xs, full, stage, t, b, y, x, window, S: gl.constexpr):
    """Step t of x on its way to a stage."""
    COLUMNS: gl.constexpr = S.buffers // S.piece if S.sweep else 1
    BOX: gl.constexpr = xd.block_shape
    tap = t // S.parts * S.together
    part = t % S.parts * S.step
    down = tap // S.kernel_w * window[2] - window[0]
    right = tap % S.kernel_w * window[3] - window[1]
    iy = y + down
    ix = x + right
    if S.sweep:
        for i in gl.static_range(COLUMNS):
            to = xs.index(stage * S.buffers + i * S.piece)._reinterpret(xd.dtype, BOX, xd.layout)
            tma.async_copy_global_to_shared(xd, [iy, ix + i * S.piece, b, part], full.index(stage), to)
    elif S.paired:
        to = xs.index(stage)._reinterpret(xd.dtype, BOX, xd.layout)
        tma.async_copy_global_to_shared(xd, [b, iy, ix * S.step], full.index(stage), to)
    elif S.stride == 2:
        to = xs.index(stage)._reinterpret(xd.dtype, BOX, xd.layout)
        at = (right & 1) * (S.parts * S.step) + part
        tma.async_copy_global_to_shared(xd, [b, y + (down >> 1), down & 1, x + (right >> 1), at], full.index(stage), to)
    else:
        to = xs.index(stage)._reinterpret(xd.dtype, BOX, xd.layout)
        tma.async_copy_global_to_shared(xd, [b, iy, ix, part], full.index(stage), to)


@gluon.jit
def _produce(xd, wd, xs, ws, full, empty, loaded, grid, window, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    STEPS: gl.constexpr = S.steps
    TOGETHER: gl.constexpr = S.together
    KEPT: gl.constexpr = S.kept
    WEIGHTS: gl.constexpr = 0 if S.resident else S.rows * S.together
    BYTES: gl.constexpr = xd.dtype.primitive_bitwidth // 8 * (S.line * S.lines * S.buffers + WEIGHTS * S.step)
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.expect(loaded, KEPT * S.rows * S.step * (xd.dtype.primitive_bitwidth // 8))
        for t in range(KEPT):
            tma.async_copy_global_to_shared(wd, [0, t * S.step], loaded, ws.index(t))
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_n, b, y, x = _tile(tile, grid, S)
        for t in range(STEPS):
            stage = step % STAGES
            mbarrier.wait(empty.index(stage), ((step // STAGES) & 1) ^ 1)
            mbarrier.expect(full.index(stage), BYTES)
            _fetch_x(xd, xs, full, stage, t, b, y, x, window, S)
            if not S.resident:
                for i in gl.static_range(TOGETHER):
                    at = (t // S.parts * TOGETHER + i) * (S.parts * S.step) + t % S.parts * S.step
                    tma.async_copy_global_to_shared(wd, [first_n, at], full.index(stage), ws.index(stage * TOGETHER + i))
            step += 1


@gluon.jit
def _operands(xs, ws, stage, t, TAP: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """What a warpgroup multiplies of the TAPth tap of a stage: of the weight [64, k], of x [k, columns]."""
    COLUMNS: gl.constexpr = S.columns
    w = ws.index((t // S.parts * S.together + TAP) * S.parts + t % S.parts if S.resident else stage * S.together + TAP)
    if S.sweep:
        xt = xs.index(stage * S.buffers + TAP * S.dilation)._reinterpret(xs.dtype, [S.pixels, S.step], xs.layout)
    else:
        xt = xs.index(stage)
    if S.rows == 128:
        w = w.slice(W * 64, 64, dim=0)
    elif S.paired:
        xt = xt.slice(W * S.step, S.step, dim=1)
    else:
        xt = xt.slice(W * COLUMNS, COLUMNS, dim=0)
    return w, xt.permute([1, 0])


@gluon.jit
def _consume(xs, ws, full, empty, loaded, table, out, added, N, grid, image, window, bounds, row, W: gl.constexpr, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    COLUMNS: gl.constexpr = S.columns
    TOGETHER: gl.constexpr = S.together
    TOLD: gl.constexpr = S.taps if S.bounded else 0
    INTEGER: gl.constexpr = table is not None
    # Triton has no instruction of 256 columns for integers.
    MMA: gl.constexpr = gl.NVMMADistributedLayout(
        version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, 128 if INTEGER and COLUMNS > 128 else COLUMNS, 32 if INTEGER else 16]
    )
    WIDTH: gl.constexpr = COLUMNS if COLUMNS < 64 else 64
    PIECE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    PART: gl.constexpr = W if S.rows == 64 else 0
    HALF: gl.constexpr = 0 if S.rows == 64 else W
    FIRST: gl.constexpr = PART if S.paired else PART * COLUMNS
    NEXT: gl.constexpr = 2 * WIDTH if S.paired else WIDTH
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.wait(loaded, 0)
    step = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        first_n, b, y, x = _tile(tile, grid, S)
        told = ()
        if INTEGER:  # on its way while there is nothing to multiply yet
            rn = gl.minimum(first_n + HALF * 64 + gl.arange(0, 64, layout=gl.SliceLayout(1, PIECE)), N - 1)
            told = (rn, gl.load(table + rn), gl.load(table + row + rn))  # type: ignore[assignment]
            told += (gl.load(table + 2 * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
            for tap in gl.static_range(TOLD):
                told += (gl.load(table + (4 + tap) * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
        acc = gl.zeros([64, COLUMNS], gl.int32 if INTEGER else gl.float32, layout=MMA)
        for t in range(S.steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            for i in gl.static_range(TOGETHER):
                w, xt = _operands(xs, ws, stage, t, i, W, S)
                acc = warpgroup_mma(w, xt, acc, is_async=True)
            acc = warpgroup_mma_wait(TOGETHER, deps=[acc])  # for the step before
            if t > 0:
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        pieces = _pieces(acc)
        for i in gl.static_range(COLUMNS // WIDTH):
            at = (first_n + HALF * 64, FIRST + i * NEXT, b, y, x)
            if INTEGER:
                write_codes(pieces[i], table, told, out, added[1], N, at, image, window, bounds, row, S)
            else:
                write(pieces[i], out, added, N, at, image, bounds, S)


@gluon.jit
def _pieces(acc):
    """Of at most 64 columns: what is written from fewer registers leaves more of them for addresses."""
    if acc.shape[1] == 256:
        left, right = _halves(acc)
        return _halves(left) + _halves(right)
    elif acc.shape[1] == 128:
        return _halves(acc)
    else:
        return (acc,)


@gluon.jit
def _halves(acc):
    WIDTH: gl.constexpr = acc.shape[1] // 2
    DEPTH: gl.constexpr = 32 if acc.dtype == gl.int32 else 16
    MMA: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, DEPTH])
    left, right = acc.reshape([64, 2, WIDTH]).permute([0, 2, 1]).split()
    return gl.convert_layout(left, MMA, assert_trivial=True), gl.convert_layout(right, MMA, assert_trivial=True)


@gluon.jit
def _conv(xd, wd, table, out, added, units, grid, image, window, bounds, row, S: gl.constexpr):
    N = units * S.unit  # what divides it decides how many numbers are written at once
    STAGES: gl.constexpr = S.stages
    if table is not None:
        gdc_launch_dependents()
    LINES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=xd.layout.swizzle_byte_width, element_bitwidth=xd.layout.element_bitwidth, rank=2
    )
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES * S.buffers, S.lines, S.line], LINES)
    ws = gl.allocate_shared_memory(xd.dtype, [S.kept, S.rows, S.step], wd.layout)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gdc_wait()
    if table is None:  # the next one may write a weight from here on, as `launch.turns` has it
        gdc_launch_dependents()
    gl.warp_specialize(
        [
            (_consume, (xs, ws, full, empty, loaded, table, out, added, N, grid, image, window, bounds, row, 0, S)),
            (_consume, (xs, ws, full, empty, loaded, table, out, added, N, grid, image, window, bounds, row, 1, S)),
            (_produce, (xd, wd, xs, ws, full, empty, loaded, grid, window, S)),
        ],
        [4, 1],
        [232, 40],
    )

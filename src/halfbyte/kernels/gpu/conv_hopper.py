"""y = x * W, a convolution of stride 1 or 2 on Hopper's tensor cores: TMA, warp specialization, a persistent grid.

The sums of `conv.py`: int8 to int8, or in float16 and bfloat16 with the weight written out in x's type first. A program computes tiles
of 64 to 256 outputs by a box of images x rows x columns of y, one after the other. For each tap and each 128 bytes of channels one warp
asks TMA for the same box of x, moved by the tap: a patch is never addressed pixel by pixel, and what lies outside of the image comes
as 0. Two warpgroups multiply, both operands from shared memory. Where the stride is 2, a box is of every second row and column: x is then
[image, row / 2, row % 2, column / 2, column % 2 and channel].

Small tiles wait for shared memory, not for the matrix unit. There a box is a row of y, with its images next to each other in shared
memory and then its columns: a step to the right is then a step of whole buffers, and all taps of a row of the kernel (`sweep`) read one
copy of x.

Where floats' tiles have 128 pixels, these are the rows of the product, and outputs its columns (`direct`). TMA then fetches rows of the
weight in an order in which 8 sums of a thread lie next to each other in y, and are written 16 bytes at a time. Where something is added,
TMA brings it to shared memory before there are sums, and writes y from the same place. Elsewhere warps exchange sums through shared memory.

Outside of the image lies in_zero, not 0, for integers: `table` holds in_zero * sum(q) of each tap, which is added to the sums of those
pixels whose tap is outside. All of it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

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
from halfbyte.kernels.gpu.conv_hopper_write import GROUP, half_of, others_of, pieces_of, send, turned, write, write_codes
from halfbyte.kernels.gpu.conv_tile import Convolution
from halfbyte.kernels.gpu.hopper import barriers, not_hopper
from halfbyte.kernels.problem import Addition, Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu

_RESIDENT = 80 << 10  # bytes of a weight that may stay in shared memory
_PLACE = 2 * 64 * 128  # bytes of 64 outputs of 128 pixels


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` (64, 128 or 256) outputs by a `box` of (images, rows, columns) of y, whose product is 128 or 256; `stages` steps of K
    in flight. `resident`: the weight stays in shared memory. `sweep`: a step has all taps of a row of the kernel; a box has one row then,
    and a multiple of 8 images. `adding`: stages that are left where TMA reads what is added; 0 where it does not."""

    rows: int
    box: tuple[int, int, int]
    stages: int
    programs: int
    resident: bool = False
    sweep: bool = False
    adding: int = 0

    @property
    def pixels(self) -> int:
        return math.prod(self.box)

    @property
    def places(self) -> int:
        """In shared memory, of 64 outputs by 128 pixels, for what is added."""
        return min(4, self.rows // 32)

    def tiles(self, problem: Convolution) -> int:
        return count_boxes(problem, self.box) * -(-problem.n // self.rows)


@dataclass(frozen=True)
class _Static:
    """What the kernel is compiled for. step: channels of a step, parts: steps of a tap; dilation: of columns; unit: divides the number of
    outputs; leads: of an Addition. direct: warpgroups multiply 64 pixels by outputs, or else 64 outputs by pixels; ahead: what is added is
    read a tile before."""

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
    resident: bool
    sweep: bool
    direct: bool
    ahead: bool
    bounded: bool
    clamp: bool
    leads: bool
    unit: int
    stride: int
    places: int
    roomy: bool

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
        return self.images if self.sweep else self.pixels

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
    def half(self) -> tuple[int, int, int]:
        """Images, rows and columns of the pixels of a warpgroup, of `direct` tiles."""
        if self.images > 1 and not self.sweep:
            return self.images // 2, self.height, self.width
        return (self.images, self.height // 2, self.width) if self.height > 1 else (self.images, 1, self.width // 2)

    @property
    def columns(self) -> int:
        """Pixels, or outputs, that a warpgroup multiplies by 64 of the others."""
        return self.rows if self.direct else self.pixels * self.rows // 128


def supports(problem: Convolution, gpu: Gpu) -> str | None:
    """Why `problem` is not for this kernel, or None."""
    if reason := supports_any(problem, gpu):
        return reason
    sizes, integer = problem.sizes, problem.dtype == torch.int8
    if reason := not_hopper(gpu):
        return reason
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
    found, integer = [], problem.dtype == torch.int8
    for rows, pixels in ((64, 128), (64, 256), (128, 128), (128, 256), (256, 128)):
        if rows > 64 and rows >= 2 * problem.n:
            continue
        if rows < 256 and problem.sizes.kernel[1] > 1 and problem.window.stride == (1, 1):
            sweeps = [(pixels // width, 1, width) for width in (2, 4, 8, 16) if 8 <= pixels // width <= problem.batch]
            if sweeps:
                box = min(sweeps, key=lambda box: (count_boxes(problem, box), -box[2]))
                found.append(_config(problem, gpu, rows, box, sweep=True))
        if rows < 256 if integer else pixels == 128:
            found.append(_config(problem, gpu, rows, min(boxes_of(pixels), key=lambda box: (count_boxes(problem, box), -box[2]))))
    known = [config for config in found if config is not None]
    return tuple(sorted(known, key=lambda config: _clocks(problem, gpu, config)))


def _config(problem: Convolution, gpu: Gpu, rows: int, box: tuple[int, int, int], *, sweep: bool = False) -> Config | None:
    """With what fits in shared memory, if that is enough."""
    line, pixels = _step(problem) * problem.dtype.itemsize, math.prod(box)
    weight = rows * problem.sizes.taps * _parts(problem) * line
    tiles = count_boxes(problem, box) * -(-problem.n // rows)
    resident = problem.n <= rows and weight <= _RESIDENT and tiles > gpu.sms
    left = gpu.shared - (2 << 10 if _direct(problem, pixels) else 16 << 10) - (weight if resident else 0)
    left -= 6 << 10 if _roomy(problem, rows, pixels) else 0
    together = problem.sizes.kernel[1] if sweep else 1
    stage = line * (_lines(problem, box) if sweep else pixels) + (0 if resident else together * rows * line)
    least, stages = 3 if sweep else 2, min(8, left // stage)
    config = Config(rows, box, stages, min(gpu.sms, tiles), resident, sweep)
    adding = min(8, (left - config.places * _PLACE - 256) // stage)
    if _direct(problem, pixels) and adding >= least:
        config = replace(config, adding=adding)
    return config if stages >= least else None


def _lines(problem: Convolution, box: tuple[int, int, int]) -> int:
    """Pixels of x that all taps of a row of the kernel read together."""
    return box[0] * (box[2] + (problem.sizes.kernel[1] - 1) * problem.window.dilation[1])


def _clocks(problem: Convolution, gpu: Gpu, config: Config) -> float:
    """Of a program, roughly, fitted to times of an H100: a step takes as long as its products, or as the lines of 128 bytes that shared
    memory gives and takes; a tile takes time of its own, by its size."""
    rows, pixels, step = config.rows, config.pixels, _step(problem)
    read = 128 + (2 if rows == 128 else 1) * pixels
    if _direct(problem, pixels):
        read = pixels + 2 * rows
    written = _lines(problem, config.box) / problem.sizes.kernel[1] if config.sweep else pixels
    if not config.resident:
        written += rows
    lines = (0.9 * read + written) * step * problem.dtype.itemsize / 128
    multiplied = rows * pixels / 32 * step * problem.dtype.itemsize / 128
    steps = problem.sizes.taps * _parts(problem)
    own = rows * pixels / (16 if _direct(problem, pixels) else 8)
    clocks = -(-config.tiles(problem) // gpu.sms) * (steps * max(multiplied, lines) + own)
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


def _direct(problem: Convolution, pixels: int) -> bool:
    """Whether tiles of so many pixels are written from where the tensor cores leave their sums."""
    return problem.dtype != torch.int8 and pixels == 128


def _roomy(problem: Convolution, rows: int, pixels: int) -> bool:
    """Whether beside a program there is room for one that writes out the weight of the next convolution."""
    return _direct(problem, pixels) and rows <= 128 and problem.sizes.taps == 1


def _parts(problem: Convolution) -> int:
    """Steps of a tap. Of the last one, what lies behind the channels of x comes as 0."""
    return -(-problem.sizes.channels // _step(problem))


def launch(problem: Convolution, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """x [B, H, W, C] in memory, weight of layout "gpu_tiles", out [M, Co]; bias [Co] and residual [M, Co] in the epilogue."""
    geo = convolution.gpu_geometry(problem.sizes)
    padded = round_up(problem.n, GROUP.value)
    nbytes = padded * geo.k * x.element_size()
    rows = launcher.turns(out.device, nbytes)[:nbytes].view(x.dtype).view(padded, geo.k)
    dequantize.write(gpu_tiles.views(weight, geo), geo, rows[: problem.n], early=True)
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
    adds = (epilogue.residual if addition is None else addition.other) is not None
    sent = epilogue.residual is not None and config.adding > 0
    window, step, bits = problem.window, _step(problem), 8 * x.element_size()
    static = _Static(
        rows=config.rows,
        images=config.box[0],
        height=config.box[1],
        width=config.box[2],
        stages=config.adding if sent else config.stages,
        kernel_w=problem.sizes.kernel[1],
        dilation=window.dilation[1],
        taps=problem.sizes.taps,
        parts=_parts(problem),
        step=step,
        resident=config.resident,
        sweep=config.sweep,
        direct=_direct(problem, config.pixels),
        ahead=adds and table is not None and not config.sweep and config.tiles(problem) > config.programs,
        bounded=table is not None and table.shape[1] > 4 and any(window.padding),
        clamp=epilogue.clamps,
        leads=addition is not None and addition.leads,
        unit=16 if problem.n % 16 == 0 else 8,
        stride=window.stride[0],
        places=config.places if sent else 0,
        roomy=_roomy(problem, config.rows, config.pixels),
    )
    if config.sweep:
        images, box = x.permute(1, 2, 0, 3), [1, static.piece, config.box[0], step]
    elif static.stride == 2:
        b, h, w, c = x.shape
        images, box = x.view(b, h // 2, 2, w // 2, 2 * c), [*config.box[:2], 1, config.box[2], step]
    else:
        images, box = x, [*config.box, step]
    weights, part = rows, [config.rows, step]
    if static.direct:  # in an order in which a thread's sums are of 8 outputs next to each other
        weights, part = rows.view(-1, 4, 4, 2, rows.shape[1]).permute(0, 2, 1, 3, 4), [config.rows // GROUP.value, 4, 4, 2, step]
    of_rows = gl.NVMMASharedLayout(swizzle_byte_width=step * bits // 8, element_bitwidth=bits, rank=len(part))
    of_box = gl.NVMMASharedLayout(swizzle_byte_width=step * bits // 8, element_bitwidth=bits, rank=len(box))
    covers = tuple(-(-size // side) for size, side in zip((problem.batch, *problem.out), config.box, strict=True))
    half = [*static.half, 64]
    of_half = gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=16, rank=4)

    def halves(y: Tensor | None) -> TensorDescriptor | None:
        if not sent or y is None:
            return None
        pixels = y.view(problem.batch, *problem.out, problem.n)
        order = (1, 2, 0, 3) if config.sweep else (0, 1, 2, 3)
        return TensorDescriptor.from_tensor(pixels.permute(order), [half[i] for i in order], of_half)

    launcher.run(
        _conv,
        (config.programs,),
        TensorDescriptor.from_tensor(images, box, of_box),
        TensorDescriptor.from_tensor(weights, part, of_rows),
        table,
        halves(out),
        halves(epilogue.residual),
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
        early=True,
        **({"maxnreg": 152} if static.roomy else {}),
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
    elif S.stride == 2:
        to = xs.index(stage)._reinterpret(xd.dtype, BOX, xd.layout)
        at = (right & 1) * (S.parts * S.step) + part
        tma.async_copy_global_to_shared(xd, [b, y + (down >> 1), down & 1, x + (right >> 1), at], full.index(stage), to)
    else:
        to = xs.index(stage)._reinterpret(xd.dtype, BOX, xd.layout)
        tma.async_copy_global_to_shared(xd, [b, iy, ix, part], full.index(stage), to)


@gluon.jit
def _fetch_w(wd, ws, arrived, buffer, n, k, S: gl.constexpr):
    """Of the weight, columns k … of rows n …"""
    PART: gl.constexpr = wd.block_shape
    to = ws.index(buffer)
    if S.direct:
        tma.async_copy_global_to_shared(wd, [n // GROUP, 0, 0, 0, k], arrived, to._reinterpret(wd.dtype, PART, wd.layout))
    else:
        tma.async_copy_global_to_shared(wd, [n, k], arrived, to)


@gluon.jit
def _produce(xd, wd, rd, xs, ws, ys, full, empty, loaded, given, taken, grid, window, S: gl.constexpr):
    STAGES: gl.constexpr = S.stages
    STEPS: gl.constexpr = S.steps
    TOGETHER: gl.constexpr = S.together
    KEPT: gl.constexpr = S.kept
    WEIGHTS: gl.constexpr = 0 if S.resident else S.rows * S.together
    BYTES: gl.constexpr = xd.dtype.primitive_bitwidth // 8 * (S.step * S.lines * S.buffers + WEIGHTS * S.step)
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.expect(loaded, KEPT * S.rows * S.step * (xd.dtype.primitive_bitwidth // 8))
        for t in range(KEPT):
            _fetch_w(wd, ws, loaded, t, 0, t * S.step, S)
    step = 0
    adding = 0
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
                    _fetch_w(wd, ws, full.index(stage), stage * TOGETHER + i, first_n, at, S)
            step += 1
        if S.places:
            for g in range(S.rows // 64):
                place = adding % S.places
                mbarrier.wait(taken.index(place), ((adding // S.places) & 1) ^ 1)
                mbarrier.expect(given.index(place), 2 * 64 * 128)
                for i in gl.static_range(2):
                    to = ys.index(2 * place + i)._reinterpret(rd.dtype, rd.block_shape, rd.layout)
                    tma.async_copy_global_to_shared(rd, half_of((first_n + 64 * g, b, y, x), i, S), given.index(place), to)
                adding += 1


@gluon.jit
def _operands(xs, ws, stage, t, TAP: gl.constexpr, W: gl.constexpr, S: gl.constexpr):
    """What a warpgroup multiplies of the TAPth tap of a stage: of the weight [64, k], of x [k, columns]; or of x [64, k], of the
    weight [k, columns]."""
    COLUMNS: gl.constexpr = S.columns
    w = ws.index((t // S.parts * S.together + TAP) * S.parts + t % S.parts if S.resident else stage * S.together + TAP)
    if S.sweep:
        xt = xs.index(stage * S.buffers + TAP * S.dilation)._reinterpret(xs.dtype, [S.pixels, S.step], xs.layout)
    else:
        xt = xs.index(stage)
    if S.direct:
        return xt.slice(W * 64, 64, dim=0), w.permute([1, 0])
    elif S.rows == 128:
        return w.slice(W * 64, 64, dim=0), xt.permute([1, 0])
    else:
        return w, xt.slice(W * COLUMNS, COLUMNS, dim=0).permute([1, 0])


@gluon.jit
def _consume(held, W: gl.constexpr, S: gl.constexpr):
    xs, ws, ys, full, empty, loaded, given, taken, table, yd, out, added, N, grid, image, window, bounds, row = held
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
    AT_ONCE: gl.constexpr = GROUP if S.direct else WIDTH
    PIECE: gl.constexpr = gl.NVMMADistributedLayout(version=[3, 0], warps_per_cta=[4, 1], instr_shape=[16, WIDTH, 32])
    tiles = grid[0] * grid[1] * grid[2] * grid[3]
    if S.resident:
        mbarrier.wait(loaded, 0)
    others = ()
    if S.ahead:
        for i in gl.static_range(COLUMNS // AT_ONCE):
            at = _piece(gl.program_id(0), i * AT_ONCE, W, grid, S)
            others += (others_of(added[1], N, at, image, WIDTH, S),)  # type: ignore[assignment]
    step = 0
    adding = 0
    for tile in range(gl.program_id(0), tiles, gl.num_programs(0)):
        told = ()
        if INTEGER:  # on its way while there is nothing to multiply yet
            rn = gl.minimum(_piece(tile, 0, W, grid, S)[0] + gl.arange(0, 64, layout=gl.SliceLayout(1, PIECE)), N - 1)
            told = (rn, gl.load(table + rn), gl.load(table + row + rn))  # type: ignore[assignment]
            told += (gl.load(table + 2 * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
            for tap in gl.static_range(TOLD):
                told += (gl.load(table + (4 + tap) * row + rn).to(gl.int32, bitcast=True),)  # type: ignore[assignment]
        acc = gl.zeros([64, COLUMNS], gl.int32 if INTEGER else gl.float32, layout=MMA)
        for t in range(S.steps):
            stage = step % STAGES
            mbarrier.wait(full.index(stage), (step // STAGES) & 1)
            for i in gl.static_range(TOGETHER):
                left, right = _operands(xs, ws, stage, t, i, W, S)
                acc = warpgroup_mma(left, right, acc, is_async=True)
            acc = warpgroup_mma_wait(TOGETHER, deps=[acc])  # for the step before
            if t > 0:
                mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
            step += 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((step - 1) % STAGES), count=1)
        pieces = pieces_of(acc, AT_ONCE)
        following = ()
        if S.places:
            adding = send(pieces, yd, ys, added[0], given, taken, adding, N, _piece(tile, 0, W, grid, S), bounds, W, S)
        for i in gl.static_range(0 if S.places else COLUMNS // AT_ONCE):
            at = _piece(tile, i * AT_ONCE, W, grid, S)
            if S.ahead:
                other = others[i]  # type: ignore[var-annotated]
            elif added[1] is not None:
                other = others_of(added[1], N, at, image, WIDTH, S)
            else:
                other = None
            sums = pieces[i]
            if S.direct:
                sums = turned(sums)
            if INTEGER:
                write_codes(sums, table, told, out, other, N, at, image, window, bounds, row, S)
            else:
                write(sums, out, added[0], other, N, at, image, bounds, S)
            if S.ahead:
                at = _piece(tile + gl.num_programs(0), i * AT_ONCE, W, grid, S)
                following += (others_of(added[1], N, at, image, WIDTH, S),)  # type: ignore[assignment]
        others = following
    if S.places:
        tma.store_wait(0)


@gluon.jit
def _piece(tile, column, W: gl.constexpr, grid, S: gl.constexpr):
    """Where a piece of a warpgroup's sums, from a column on, belongs: first output, first pixel, and the tile's image, row and column."""
    first_n, b, y, x = _tile(tile, grid, S)
    if S.direct:
        return first_n + column, W * 64, b, y, x
    elif S.rows == 128:
        return first_n + W * 64, column, b, y, x
    else:
        return first_n, W * S.columns + column, b, y, x


@gluon.jit
def _conv(xd, wd, table, yd, rd, out, added, units, grid, image, window, bounds, row, S: gl.constexpr):
    N = units * S.unit  # what divides it decides how many numbers are written at once
    STAGES: gl.constexpr = S.stages
    if table is not None:
        gdc_launch_dependents()
    LINES: gl.constexpr = gl.NVMMASharedLayout(
        swizzle_byte_width=xd.layout.swizzle_byte_width, element_bitwidth=xd.layout.element_bitwidth, rank=2
    )
    xs = gl.allocate_shared_memory(xd.dtype, [STAGES * S.buffers, S.lines, S.step], LINES)
    ws = gl.allocate_shared_memory(xd.dtype, [S.kept, S.rows, S.step], LINES)
    full = barriers(STAGES, 1)
    empty = barriers(STAGES, 2)
    loaded = gl.allocate_shared_memory(gl.int64, [1], mbarrier.MBarrierLayout())
    mbarrier.init(loaded, count=1)
    ys = xs
    given = loaded
    taken = loaded
    if S.places:
        ys = gl.allocate_shared_memory(xd.dtype, [2 * S.places, 64, 64], LINES)
        given = barriers(S.places, 1)
        taken = barriers(S.places, 2)
    fence_async_shared()
    gdc_wait()
    if table is None:  # the next one may write a weight from here on, as `launch.turns` has it
        gdc_launch_dependents()
    held = (xs, ws, ys, full, empty, loaded, given, taken, table, yd, out, added, N, grid, image, window, bounds, row)
    gl.warp_specialize(
        [
            (_consume, (held, 0, S)),
            (_consume, (held, 1, S)),
            (_produce, (xd, wd, rd, xs, ws, ys, full, empty, loaded, given, taken, grid, window, S)),
        ],
        [4, 1],
        [208 if S.roomy else 232, 40],
    )

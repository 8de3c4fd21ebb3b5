"""y = x * W, a convolution of stride 1 or 2 on Hopper's tensor cores: TMA, warp specialization, a persistent grid.

Computes the sums of `implicit_gemm.py`: int8 to int8, or in float16 and bfloat16 with the weight dequantized to memory first. This file is
the host side; the kernel is in `hopper_tile.py`, its epilogue in `hopper_write.py`.

A program computes tiles of 64 to 256 outputs by a box of images x rows x columns of y, one after the other. A step of K is a tap and up to
128 bytes of channels: the producer warp loads by TMA the box of x that the tap reads, 0 outside of the image, and the weight. Two
warpgroups multiply both from shared memory. Four variants, which `Static` names:

    stride     with stride 2 a box has every second row and column: x is [image, row / 2, row % 2, column / 2, column % 2 and channel]
    sweep      a step has all taps of a row of the kernel, which read one copy of x: small tiles are limited by shared memory, not by wgmma.
               A box is one row of y then, with its images next to each other in shared memory, so that one column is a whole buffer
    direct     floats' tiles of 128 pixels: pixels are the rows of the product, outputs its columns, and TMA loads rows of the weight in an
               order in which 8 sums of a thread are adjacent in y. Elsewhere warps exchange sums through shared memory
    slots      TMA loads the residual to shared memory before the products end, and writes y from there. The epilogue of codes with a
               residual is long: two programs share a multiprocessor then, each with half of its registers (`Config.paired`)

Outside of the image x is in_zero, not 0, for integers: the table holds in_zero * sum(q) of each tap, which is added to the sums of pixels
whose tap is outside (`Static.padding_terms`). All of it is exact.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch
from torch import Tensor
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from halfbyte.kernels.gpu.conv.hopper_tile import Static, convolve
from halfbyte.kernels.gpu.conv.hopper_write import GROUP, Image, Taps
from halfbyte.kernels.gpu.conv.implicit_gemm import supports as supports_any
from halfbyte.kernels.gpu.hopper.gluon_compat import LARGER_VIEWS
from halfbyte.kernels.gpu.hopper.ring import descriptor, why_not_hopper
from halfbyte.kernels.gpu.quantize import dequantize
from halfbyte.kernels.gpu.runtime import launch as launcher
from halfbyte.kernels.gpu.runtime.scratch import double_buffer
from halfbyte.kernels.problem import ConvProblem, Epilogue
from halfbyte.layouts import convolution, gpu_tiles
from halfbyte.layouts.base import round_up
from halfbyte.machine import Gpu

_RESIDENT = 80 << 10  # bytes of a weight that may stay in shared memory


@dataclass(frozen=True)
class Config:
    """Tiles of `rows` (64, 128 or 256) outputs by a `box` of (images, rows, columns) of y, whose product is 128 or 256.

    Attributes:
        rows: Outputs.
        box: Of y.
        stages: Steps of K in flight.
        programs: Of the grid.
        resident: The weight stays in shared memory.
        sweep: A step has all taps of a row of the kernel; a box has one row then, and a multiple of 8 images; it needs LARGER_VIEWS.
        paired: Two programs share a multiprocessor.
        slots: Slots in shared memory, of 64 outputs by 128 pixels, for a residual that TMA loads; 0: threads load it.
        with_residual: The config to use instead if there is a residual.
    """

    rows: int
    box: tuple[int, int, int]
    stages: int
    programs: int
    resident: bool = False
    sweep: bool = False
    paired: bool = False
    slots: int = 0
    with_residual: Config | None = None

    @property
    def pixels(self) -> int:
        """Pixels of a tile."""
        return math.prod(self.box)

    def tiles(self, problem: ConvProblem) -> int:
        """Return the number of tiles."""
        return count_boxes(problem, self.box) * -(-problem.n // self.rows)


def supports(problem: ConvProblem, gpu: Gpu) -> str | None:
    """Return the reason why this kernel does not compute `problem`, or None."""
    if reason := supports_any(problem, gpu):
        return reason
    sizes, integer = problem.sizes, problem.dtype == torch.int8
    if reason := why_not_hopper(gpu):
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


def configs(problem: ConvProblem, gpu: Gpu) -> tuple[Config, ...]:
    """Return configs, the best guess first: by the clocks of a program."""
    candidates, integer = [], problem.dtype == torch.int8
    for rows, pixels in ((64, 128), (64, 256), (128, 128), (128, 256), (256, 128)):
        if rows > 64 and rows >= 2 * problem.n:
            continue
        if LARGER_VIEWS and rows < 256 and problem.sizes.kernel[1] > 1 and problem.window.stride == (1, 1):
            sweeps = [(pixels // width, 1, width) for width in (2, 4, 8, 16) if 8 <= pixels // width <= problem.batch]
            if sweeps:
                box = min(sweeps, key=lambda box: (count_boxes(problem, box), -box[2]))
                candidates.append(_config(problem, gpu, rows, box, sweep=True))
        if rows < 256 if integer else pixels == 128:
            candidates.append(_config(problem, gpu, rows, _box(problem, pixels)))
    fitting = [config for config in candidates if config is not None]
    return tuple(sorted(fitting, key=lambda config: _clocks(problem, gpu, config)))


def _box(problem: ConvProblem, pixels: int) -> tuple[int, int, int]:
    """Return the widest of the boxes of `pixels` pixels that cover y with the fewest."""
    return min(boxes_of(pixels), key=lambda box: (count_boxes(problem, box), -box[2]))


def _config(problem: ConvProblem, gpu: Gpu, rows: int, box: tuple[int, int, int], *, sweep: bool = False) -> Config | None:
    """Return a config with what fits in shared memory, None if that is too little."""
    config = _fitted(problem, gpu, Config(rows, box, 0, gpu.sms, sweep=sweep))
    if config is None:
        return None
    with_residual = None
    if _direct(problem, config.pixels):
        with_residual = _fitted(problem, gpu, replace(config, slots=min(4, rows // 32)))
    elif problem.sizes.taps == 1:  # sums of codes take long to write: one program does while another one multiplies
        slots = 2 if problem.n % 16 == 0 else 0
        with_residual = _fitted(problem, gpu, Config(64, _box(problem, 128), 0, 2 * gpu.sms, paired=True, slots=slots))
    return replace(config, with_residual=with_residual)


def _fitted(problem: ConvProblem, gpu: Gpu, config: Config) -> Config | None:
    """Return `config` with as many stages as fit in shared memory, None if these are too few."""
    rows, pixels, sweep = config.rows, config.pixels, config.sweep
    line, share = _step(problem) * problem.dtype.itemsize, 2 if config.paired else 1
    weight, tiles = rows * problem.sizes.taps * _steps_per_tap(problem) * line, config.tiles(problem)
    resident = problem.n <= rows and weight <= _RESIDENT // share and tiles > gpu.sms
    free = (gpu.shared - (1 << 10)) // share - (2 << 10 if _direct(problem, pixels) else 16 << 10) - (weight if resident else 0)
    free -= (6 << 10 if _roomy(problem, rows, pixels) else 0) + config.slots * 2 * 64 * 64 * problem.dtype.itemsize
    taps_per_stage = problem.sizes.kernel[1] if sweep else 1
    stage = line * (_lines(problem, config.box) if sweep else pixels) + (0 if resident else taps_per_stage * rows * line)
    stages = min(8, free // stage)
    if stages < (3 if sweep else 2):
        return None
    return replace(config, stages=stages, programs=min(config.programs, tiles), resident=resident)


def _lines(problem: ConvProblem, box: tuple[int, int, int]) -> int:
    """Return the pixels of x that all taps of a row of the kernel read together."""
    return box[0] * (box[2] + (problem.sizes.kernel[1] - 1) * problem.window.dilation[1])


def _clocks(problem: ConvProblem, gpu: Gpu, config: Config) -> float:
    """Estimate the clocks of a program, fitted to times of an H100: a step takes as long as its products, or as the lines of 128 bytes
    that shared memory reads and writes; a tile has an epilogue by its size."""
    rows, pixels, step = config.rows, config.pixels, _step(problem)
    read = 128 + (2 if rows == 128 else 1) * pixels
    if _direct(problem, pixels):
        read = pixels + 2 * rows
    written = _lines(problem, config.box) / problem.sizes.kernel[1] if config.sweep else pixels
    if not config.resident:
        written += rows
    lines = (0.9 * read + written) * step * problem.dtype.itemsize / 128
    multiplied = rows * pixels / 32 * step * problem.dtype.itemsize / 128
    steps = problem.sizes.taps * _steps_per_tap(problem)
    epilogue = rows * pixels / (16 if _direct(problem, pixels) else 8)
    if _direct(problem, pixels) and step < 64 and not config.resident:
        epilogue += 8 * rows  # short rows of the weight are slow to come
    clocks = -(-config.tiles(problem) // gpu.sms) * (steps * max(multiplied, lines) + epilogue)
    # The largest tile of integers takes longer than that, where several follow each other.
    return clocks * (1.25 if problem.dtype == torch.int8 and rows * pixels > 128 * 128 and config.tiles(problem) > gpu.sms else 1.0)


def boxes_of(pixels: int) -> list[tuple[int, int, int]]:
    """Return all boxes of `pixels` pixels."""
    powers = [1 << i for i in range(pixels.bit_length())]
    return [(pixels // h // w, h, w) for h in powers for w in powers if h * w <= pixels and w <= 64 and h <= 64]


def count_boxes(problem: ConvProblem, box: tuple[int, int, int]) -> int:
    """Return how many boxes cover y."""
    return -(-problem.batch // box[0]) * -(-problem.out[0] // box[1]) * -(-problem.out[1] // box[2])


def _step(problem: ConvProblem) -> int:
    """Return the channels of a step; TMA takes as long for channels that are out of bounds."""
    if problem.sizes.channels <= 32:
        return 16 if problem.sizes.channels <= 16 and problem.dtype != torch.int8 else 32
    return 128 if problem.dtype == torch.int8 and problem.sizes.channels % 128 == 0 else 64


def _direct(problem: ConvProblem, pixels: int) -> bool:
    """Return whether tiles of `pixels` pixels are written from the registers of the sums."""
    return problem.dtype != torch.int8 and pixels == 128


def _roomy(problem: ConvProblem, rows: int, pixels: int) -> bool:
    """Return whether a program leaves room for one that dequantizes the weight of the next convolution."""
    return _direct(problem, pixels) and rows <= 128 and problem.sizes.taps == 1


def _steps_per_tap(problem: ConvProblem) -> int:
    """Return the steps of a tap. In the last one, channels behind those of x are zero-filled."""
    return -(-problem.sizes.channels // _step(problem))


def launch(problem: ConvProblem, config: Config, x: Tensor, weight: Tensor, out: Tensor, epilogue: Epilogue) -> None:
    """Launch the convolution of x [B, H, W, C] in memory and a weight of layout "gpu_tiles"; out is [M, Co], bias [Co], residual [M, Co],
    the epilogue's table, of codes, [1, 4 + taps, at least Co]."""
    geo, residual, table = convolution.gpu_geometry(problem.sizes), epilogue.residual, epilogue.table
    if table is None:
        padded = round_up(problem.n, GROUP.value)
        nbytes = padded * geo.k * x.element_size()
        rows = double_buffer(out.device, nbytes)[:nbytes].view(x.dtype).view(padded, geo.k)
        dequantize.write(gpu_tiles.views(weight, geo), geo, rows[: problem.n], early=True)
    else:
        rows, table = gpu_tiles.views(weight, geo).codes, table if epilogue.outside else table[:, :4]
    if residual is not None and config.with_residual is not None:
        config = config.with_residual
    window, step = problem.window, _step(problem)
    roomy = _roomy(problem, config.rows, config.pixels)
    static = Static(
        outputs=config.rows,
        images=config.box[0],
        height=config.box[1],
        width=config.box[2],
        stages=config.stages,
        kernel_w=problem.sizes.kernel[1],
        dilation=window.dilation[1],
        taps=problem.sizes.taps,
        steps_per_tap=_steps_per_tap(problem),
        channels=step,
        resident=config.resident,
        sweep=config.sweep,
        direct=_direct(problem, config.pixels),
        padding_terms=table is not None and table.shape[1] > 4 and any(window.padding),
        clamp=epilogue.clamps,
        codes_first=epilogue.codes_first,
        outputs_divisor=16 if problem.n % 16 == 0 else 8,
        stride=window.stride[0],
        slots=config.slots,
        registers=(104, 32) if config.paired else (208, 40) if roomy else (232, 40),
    )
    if config.sweep:
        images, box = x.permute(1, 2, 0, 3), [1, static.columns_per_load, config.box[0], step]
    elif static.stride == 2:
        b, h, w, c = x.shape
        images, box = x.view(b, h // 2, 2, w // 2, 2 * c), [*config.box[:2], 1, config.box[2], step]
    else:
        images, box = x, [*config.box, step]
    weights, part = rows, [config.rows, step]
    if static.direct:  # in an order in which a thread's sums are of 8 outputs next to each other
        weights, part = rows.view(-1, 4, 4, 2, rows.shape[1]).permute(0, 2, 1, 3, 4), [config.rows // GROUP.value, 4, 4, 2, step]
    boxes = tuple(-(-size // side) for size, side in zip((problem.batch, *problem.out), config.box, strict=True))
    half = [*static.half, 64]

    def halves(y: Tensor | None) -> TensorDescriptor | None:
        if not config.slots or y is None:
            return None
        pixels = y.view(problem.batch, *problem.out, problem.n)
        order = (1, 2, 0, 3) if config.sweep else (0, 1, 2, 3)
        return descriptor(pixels.permute(order), [half[i] for i in order])

    launcher.run(
        convolve,
        (config.programs,),
        descriptor(images, box),
        descriptor(weights, part),
        table,
        halves(out),
        halves(residual),
        out,
        (epilogue.bias, residual),
        problem.n // static.outputs_divisor,
        (-(-problem.n // config.rows), *boxes),
        Image(problem.batch, *problem.image, *problem.out),
        Taps(window.padding[0], window.padding[2], *window.dilation),
        epilogue.numbers,
        0 if table is None else table.stride(1),
        static,
        num_warps=4,
        early=True,
        **({"maxnreg": 80} if config.paired else {"maxnreg": 152} if roomy else {}),
    )

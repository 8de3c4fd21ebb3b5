"""The epilogues of `hopper_tile.py`: a warpgroup's sums [outputs, pixels] become y, codes or floats, by stores or by TMA.

`write_codes` and `write` store from registers, to pixels of y in memory. `send_codes` and `send` take the residual from a slot in shared
memory, overwrite it with y, and store that by TMA. Arguments are those of `hopper_tile.py`, an `Image`, `Taps`, and of a piece of sums
its `Place` and, for codes, its `Requantization`.
"""

from __future__ import annotations

from typing import NamedTuple

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from halfbyte.kernels.gpu.arithmetic import MAGIC
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.hopper.epilogue import halves_of
from halfbyte.kernels.gpu.hopper.gluon_compat import async_store, reinterpret
from halfbyte.kernels.gpu.values import Value

GROUP = gl.constexpr(32)  # outputs that four threads write at once, if sums are not exchanged

# Layouts of y, [outputs, pixels], with 16 bytes per thread: of codes; of floats; of floats that wgmma's sums already have.
CODES = gl.constexpr(gl.BlockedLayout([16, 1], [4, 8], [1, 4], [0, 1]))
NUMBERS = gl.constexpr(gl.BlockedLayout([8, 1], [8, 4], [1, 4], [0, 1]))
SUMS = gl.constexpr(
    gl.DistributedLinearLayout(
        reg_bases=[[1, 0], [2, 0], [4, 0], [0, 8]],
        lane_bases=[[8, 0], [16, 0], [0, 1], [0, 2], [0, 4]],
        warp_bases=[[0, 16], [0, 32]],
        block_bases=[],
        shape=[GROUP.value, 64],
    )
)


class Image(NamedTuple):
    """The number of images, and the sizes of x and y."""

    batch: Value
    height: Value
    width: Value
    out_height: Value
    out_width: Value


class Taps(NamedTuple):
    """Where taps lie: padding at the top and at the left, and dilation along rows and along columns."""

    top: Value
    left: Value
    dilation_y: Value
    dilation_x: Value


class Place(NamedTuple):
    """Coordinates of a tile of sums in y: first output; first pixel within the tile's box; the box's first image, row and column."""

    output: Value
    pixel: Value
    image: Value
    row: Value
    column: Value


class Requantization(NamedTuple):
    """Constants that requantize the sums of 64 `outputs`: y = round(clamp((sum + addend) * multiplier + constant)).

    `padding_terms` has for each tap the integers that are added to `sum` where the tap is outside of the image.
    """

    outputs: Value
    constant: Value
    multiplier: Value
    addend: Value
    padding_terms: Value


class Slots(NamedTuple):
    """The slots in shared memory, and their barriers, as `hopper_tile.py` has them."""

    memory: Value
    full: Value
    free: Value


@gluon.jit
def pieces_of(acc, WIDTH: gl.constexpr):
    """Split sums into pieces of WIDTH columns: fewer sums at a time leave more registers for addresses."""
    if acc.shape[1] == WIDTH:
        return (acc,)
    else:
        left, right = halves_of(acc)
        return pieces_of(left, WIDTH) + pieces_of(right, WIDTH)


@gluon.jit
def _pixels(at, image, WIDTH: gl.constexpr, S: gl.constexpr, LAYOUT: gl.constexpr):
    """Return image, row and column of WIDTH pixels, and which are inside."""
    i = at.pixel + gl.arange(0, WIDTH, layout=LAYOUT)
    if S.sweep:
        b = at.image + i % S.images
        oy = at.row + gl.zeros_like(i)
        ox = at.column + i // S.images
    else:
        b = at.image + i // (S.width * S.height)
        oy = at.row + i // S.width % S.height
        ox = at.column + i % S.width
    return b, oy, ox, (b < image.batch) & (oy < image.out_height) & (ox < image.out_width)


@gluon.jit
def load_residual(added, N, at, image, WIDTH: gl.constexpr, S: gl.constexpr):
    """Load what is added to a piece."""
    OUT: gl.constexpr = SUMS if S.direct else CODES if added.dtype.element_ty == gl.int8 else NUMBERS
    rn, m, mask = _positions(at, N, image, WIDTH, S, OUT)
    return gl.load(added + (gl.expand_dims(m * N, 0) + gl.expand_dims(rn, 1)), mask=mask, other=0)


@gluon.jit
def write_codes(acc, table, requant, out, residual, N, at, image, window, bounds, table_stride, S: gl.constexpr):
    """Requantize sums, and write codes with threads."""
    codes = _codes(acc, table, requant, at, image, window, bounds, table_stride, S)
    rn, m, mask = _positions(at, N, image, codes.shape[1], S, CODES)
    if residual is not None:
        codes = _added(codes, residual, bounds, S)
    gl.store(out + (gl.expand_dims(m * N, 0) + gl.expand_dims(rn, 1)), codes, mask=mask)


@gluon.jit
def send_codes(
    acc, table, requant, y_desc, slots, step, at, image, window, bounds, table_stride, W: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Requantize sums, add the residual from slot `step`, and write 64 outputs of 64 pixels from there by TMA. Return the next step."""
    BOX: gl.constexpr = y_desc.block_shape
    tma.store_wait(0)  # the previous slot was read during the products
    mbarrier.arrive(slots.free.index((step + S.slots - 1) % S.slots), count=1, pred=step > 0)
    codes = _codes(acc, table, requant, at, image, window, bounds, table_stride, S)
    slot = step % S.slots
    mbarrier.wait(slots.full.index(slot), (step // S.slots) & 1)
    to = slots.memory.index(2 * slot + W)
    transposed_slot = to.permute([1, 0])
    transposed_slot.store(_added(codes, transposed_slot.load(CODES), bounds, S))
    fence_async_shared()
    coordinates = half_of(at.output, at.image, at.row, at.column, W, S)
    async_store(y_desc, coordinates, reinterpret(to, y_desc.dtype, BOX, y_desc.layout))
    return step + 1


@gluon.jit
def _codes(acc, table, requant, at, image, window, bounds, table_stride, S: gl.constexpr):
    """Return sums as codes."""
    acc += gl.expand_dims(requant.addend, 1)
    if S.padding_terms:
        acc = _add_padding_terms(acc, table, requant, at, image, window, table_stride, S)
    multiplier = gl.expand_dims(requant.multiplier, 1)
    constant = gl.expand_dims(requant.constant, 1)
    total = gl.fma(acc.to(gl.float32), multiplier.broadcast_to(acc.shape), constant.broadcast_to(acc.shape))
    total = gl.minimum(gl.maximum(total, bounds[0]), bounds[1]) + MAGIC
    return gl.convert_layout(total.to(gl.int32, bitcast=True).to(gl.int8), CODES)  # the low byte is the integer


@gluon.jit
def _added(codes, residual, bounds, S: gl.constexpr):
    """Return codes plus residual, requantized as in `arithmetic.added`."""
    first = codes if S.codes_first else residual
    second = residual if S.codes_first else codes
    _code_low, _code_high, first_scale, second_scale, offset, low, high = bounds
    LAYOUT: gl.constexpr = codes.type.layout
    first_scale = gl.full(codes.shape, first_scale, gl.float32, layout=LAYOUT)
    offset = gl.full(codes.shape, offset, gl.float32, layout=LAYOUT)
    total = gl.fma(first.to(gl.float32), first_scale, offset)
    total = gl.fma(second.to(gl.float32), gl.full(codes.shape, second_scale, gl.float32, layout=LAYOUT), total)
    total = gl.minimum(gl.maximum(total, low), high) + MAGIC
    return total.to(gl.int32, bitcast=True).to(gl.int8)


@gluon.jit
def _add_padding_terms(acc, table, requant, at, image, window, table_stride, S: gl.constexpr):
    """Add the terms of taps outside of the image: those above or below, and those left or right, less those counted twice."""
    KERNEL_H: gl.constexpr = S.taps // S.kernel_w
    KERNEL_W: gl.constexpr = S.kernel_w
    _b, oy, ox, _inside = _pixels(at, image, acc.shape[1], S, gl.SliceLayout(0, acc.type.layout))
    top = at.row * S.stride - window.top
    left = at.column * S.stride - window.left
    bottom = (gl.minimum(at.row + S.height, image.out_height) - 1) * S.stride - window.top
    right = (gl.minimum(at.column + S.width, image.out_width) - 1) * S.stride - window.left
    oy = oy * S.stride
    ox = ox * S.stride
    for ky in gl.static_range(KERNEL_H):
        if (top + ky * window.dilation_y < 0) | (bottom + ky * window.dilation_y >= image.height):
            term = requant.padding_terms[ky * KERNEL_W]
            for kx in gl.static_range(1, KERNEL_W):
                term += requant.padding_terms[ky * KERNEL_W + kx]
            iy = oy + ky * window.dilation_y - window.top
            acc += gl.expand_dims(term, 1) * gl.expand_dims(((iy < 0) | (iy >= image.height)).to(gl.int32), 0)
    for kx in gl.static_range(KERNEL_W):
        if (left + kx * window.dilation_x < 0) | (right + kx * window.dilation_x >= image.width):
            term = gl.zeros_like(requant.padding_terms[0])
            for ky in gl.static_range(KERNEL_H):  # with a box of one row all of a row of taps is outside, or none
                whole = (S.height == 1) & ((top + ky * window.dilation_y < 0) | (top + ky * window.dilation_y >= image.height))
                term += gl.where(whole, 0, requant.padding_terms[ky * KERNEL_W + kx])
            ix = ox + kx * window.dilation_x - window.left
            acc += gl.expand_dims(term, 1) * gl.expand_dims(((ix < 0) | (ix >= image.width)).to(gl.int32), 0)
    if S.height > 1:
        for tap in range(S.taps):
            y = tap // KERNEL_W * window.dilation_y
            x = tap % KERNEL_W * window.dilation_x
            tall = (top + y < 0) | (bottom + y >= image.height)
            if tall & ((left + x < 0) | (right + x >= image.width)):
                term = gl.load(table + (4 + tap) * table_stride + requant.outputs).to(gl.int32, bitcast=True)
                iy = oy + y - window.top
                ix = ox + x - window.left
                both = ((iy < 0) | (iy >= image.height)) & ((ix < 0) | (ix >= image.width))
                acc -= gl.expand_dims(term, 1) * gl.expand_dims(both.to(gl.int32), 0)
    return acc


@gluon.jit
def _positions(at, N, image, WIDTH: gl.constexpr, S: gl.constexpr, OUT: gl.constexpr):
    """Return outputs, patches (rows of y), and which are inside."""
    rn = at.output + gl.arange(0, GROUP if S.direct else 64, layout=gl.SliceLayout(1, OUT))
    b, oy, ox, inside = _pixels(at, image, WIDTH, S, gl.SliceLayout(0, OUT))
    m = (b.to(gl.int64) * image.out_height + oy) * image.out_width + ox
    return rn, m, gl.expand_dims(rn < N, 1) & gl.expand_dims(inside, 0)


@gluon.jit
def write(total, out, bias, residual, N, at, image, bounds, S: gl.constexpr):
    """Write floats with threads."""
    OUT: gl.constexpr = SUMS if S.direct else NUMBERS
    rn, m, mask = _positions(at, N, image, total.shape[1], S, OUT)
    to = gl.expand_dims(m * N, 0) + gl.expand_dims(rn, 1)
    y = _finish_sums(total, bias, residual, at.output, N, bounds, out.dtype.element_ty, S)
    gl.store(out + to, gl.convert_layout(y, OUT), mask=mask)


@gluon.jit
def _finish_sums(total, bias, residual, first_n, N, bounds, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return y of sums."""
    MMA: gl.constexpr = total.type.layout
    if residual is not None:
        total += gl.convert_layout(residual, MMA).to(gl.float32)
    row = first_n + gl.arange(0, total.shape[0], layout=gl.SliceLayout(1, MMA))
    return finish(total, (bias, None), row, None, N, bounds[0], bounds[1], S.clamp, DTYPE, None)


@gluon.jit
def transposed_sums(sums):
    """Return the sums of 64 pixels by GROUP outputs as outputs by pixels."""
    sums = sums.reshape([64, 4, 4, 2]).permute([0, 2, 1, 3]).reshape([64, GROUP]).permute([1, 0])
    return gl.convert_layout(sums, SUMS, assert_trivial=True)


@gluon.jit
def send(pieces, y_desc, slots, bias, step, N, at, bounds, W: gl.constexpr, S: gl.constexpr):
    """Add residuals from slots in shared memory, and write a warpgroup's sums from there by TMA, 64 outputs at a time. Return the next
    step."""
    BOX: gl.constexpr = y_desc.block_shape
    SLOTS: gl.constexpr = S.slots
    for g in gl.static_range(S.columns // 64):
        slot = step % SLOTS
        to = slots.memory.index(2 * slot + W)
        mbarrier.wait(slots.full.index(slot), (step // SLOTS) & 1)
        left = to.slice(0, GROUP, dim=1).permute([1, 0])
        right = to.slice(GROUP, GROUP, dim=1).permute([1, 0])
        residual = (left.load(SUMS), right.load(SUMS))
        output = at.output + 2 * g * GROUP
        y = _finish_sums(transposed_sums(pieces[2 * g]), bias, residual[0], output, N, bounds, y_desc.dtype, S)
        left.store(gl.convert_layout(y, SUMS))
        y = _finish_sums(transposed_sums(pieces[2 * g + 1]), bias, residual[1], output + GROUP, N, bounds, y_desc.dtype, S)
        right.store(gl.convert_layout(y, SUMS))
        fence_async_shared()
        coordinates = half_of(output, at.image, at.row, at.column, W, S)
        async_store(y_desc, coordinates, reinterpret(to, y_desc.dtype, BOX, y_desc.layout))
        tma.store_wait(1)  # the previous slot has been read
        mbarrier.arrive(slots.free.index((step + SLOTS - 1) % SLOTS), count=1, pred=step > 0)
        step += 1
    return step


@gluon.jit
def half_of(output, image, row, column, W: gl.constexpr, S: gl.constexpr):
    """Return the coordinates of a warpgroup's pixels in y, for TMA, from those of the tile."""
    HALF: gl.constexpr = S.half
    b = image + W * (S.images - HALF[0])
    y = row + W * (S.height - HALF[1])
    x = column + W * (S.width - HALF[2])
    if S.sweep:
        return [y, x, b, output]
    else:
        return [b, y, x, output]

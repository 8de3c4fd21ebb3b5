"""The epilogues of `hopper_tile.py`: a warpgroup's sums [outputs, pixels] become y, codes or floats, by stores or by TMA.

`write_codes` and `write` store from registers, to pixels of y in memory. `send_codes` and `send` take the residual from a slot in shared
memory, overwrite it with y, and store that by TMA. Arguments are those of `hopper_tile.py`, and

    at         where sums belong: the first output; the first pixel within the tile's box; the box's first image, row and column
    requant    of codes: the outputs [64]; their constants, multipliers and integers to add; then for each tap the integers to add where it
               is outside of the image. y = round(clamp((sum + integer) * multiplier + constant))
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import fence_async_shared, mbarrier, tma

from halfbyte.kernels.gpu.arithmetic import MAGIC
from halfbyte.kernels.gpu.epilogue import finish
from halfbyte.kernels.gpu.hopper.epilogue import halves_of
from halfbyte.kernels.gpu.hopper.gluon_compat import async_store, reinterpret

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
    i = at[1] + gl.arange(0, WIDTH, layout=LAYOUT)
    if S.sweep:
        b = at[2] + i % S.images
        oy = at[3] + gl.zeros_like(i)
        ox = at[4] + i // S.images
    else:
        b = at[2] + i // (S.width * S.height)
        oy = at[3] + i // S.width % S.height
        ox = at[4] + i % S.width
    return b, oy, ox, (b < image[0]) & (oy < image[3]) & (ox < image[4])


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
    acc,
    table,
    requant,
    y_desc,
    slot_smem,
    slot_full,
    slot_free,
    step,
    at,
    image,
    window,
    bounds,
    table_stride,
    W: gl.constexpr,
    S: gl.constexpr,
):
    """Requantize sums, add the residual from slot `step`, and write 64 outputs of 64 pixels from there by TMA. Returns the next step."""
    BOX: gl.constexpr = y_desc.block_shape
    tma.store_wait(0)  # the previous slot was read during the products
    mbarrier.arrive(slot_free.index((step + S.slots - 1) % S.slots), count=1, pred=step > 0)
    codes = _codes(acc, table, requant, at, image, window, bounds, table_stride, S)
    slot = step % S.slots
    mbarrier.wait(slot_full.index(slot), (step // S.slots) & 1)
    to = slot_smem.index(2 * slot + W)
    transposed_slot = to.permute([1, 0])
    transposed_slot.store(_added(codes, transposed_slot.load(CODES), bounds, S))
    fence_async_shared()
    async_store(y_desc, half_of((at[0], at[2], at[3], at[4]), W, S), reinterpret(to, y_desc.dtype, BOX, y_desc.layout))
    return step + 1


@gluon.jit
def _codes(acc, table, requant, at, image, window, bounds, table_stride, S: gl.constexpr):
    """Return sums as codes."""
    acc += gl.expand_dims(requant[3], 1)
    if S.padding_terms:
        acc = _add_padding_terms(acc, table, requant, at, image, window, table_stride, S)
    multiplier = gl.expand_dims(requant[2], 1)
    constant = gl.expand_dims(requant[1], 1)
    total = gl.fma(acc.to(gl.float32), multiplier.broadcast_to(acc.shape), constant.broadcast_to(acc.shape))
    total = gl.minimum(gl.maximum(total, bounds[0]), bounds[1]) + MAGIC
    return gl.convert_layout(total.to(gl.int32, bitcast=True).to(gl.int8), CODES)  # the low byte is the integer


@gluon.jit
def _added(codes, residual, bounds, S: gl.constexpr):
    """Return codes plus residual, requantized as in `arithmetic.added`."""
    first = codes if S.codes_first else residual
    second = residual if S.codes_first else codes
    LAYOUT: gl.constexpr = codes.type.layout
    scale = gl.full(codes.shape, bounds[2], gl.float32, layout=LAYOUT)
    offset = gl.full(codes.shape, bounds[4], gl.float32, layout=LAYOUT)
    total = gl.fma(first.to(gl.float32), scale, offset)
    total = gl.fma(second.to(gl.float32), gl.full(codes.shape, bounds[3], gl.float32, layout=LAYOUT), total)
    total = gl.minimum(gl.maximum(total, bounds[5]), bounds[6]) + MAGIC
    return total.to(gl.int32, bitcast=True).to(gl.int8)


@gluon.jit
def _add_padding_terms(acc, table, requant, at, image, window, table_stride, S: gl.constexpr):
    """Add the terms of taps outside of the image: those above or below, and those left or right, less those counted twice."""
    KERNEL_H: gl.constexpr = S.taps // S.kernel_w
    KERNEL_W: gl.constexpr = S.kernel_w
    _b, oy, ox, _inside = _pixels(at, image, acc.shape[1], S, gl.SliceLayout(0, acc.type.layout))
    top = at[3] * S.stride - window[0]
    left = at[4] * S.stride - window[1]
    bottom = (gl.minimum(at[3] + S.height, image[3]) - 1) * S.stride - window[0]
    right = (gl.minimum(at[4] + S.width, image[4]) - 1) * S.stride - window[1]
    oy = oy * S.stride
    ox = ox * S.stride
    for ky in gl.static_range(KERNEL_H):
        if (top + ky * window[2] < 0) | (bottom + ky * window[2] >= image[1]):
            term = requant[4 + ky * KERNEL_W]
            for kx in gl.static_range(1, KERNEL_W):
                term += requant[4 + ky * KERNEL_W + kx]
            iy = oy + ky * window[2] - window[0]
            acc += gl.expand_dims(term, 1) * gl.expand_dims(((iy < 0) | (iy >= image[1])).to(gl.int32), 0)
    for kx in gl.static_range(KERNEL_W):
        if (left + kx * window[3] < 0) | (right + kx * window[3] >= image[2]):
            term = gl.zeros_like(requant[4])
            for ky in gl.static_range(KERNEL_H):  # with a box of one row all of a row of taps is outside, or none
                whole = (S.height == 1) & ((top + ky * window[2] < 0) | (top + ky * window[2] >= image[1]))
                term += gl.where(whole, 0, requant[4 + ky * KERNEL_W + kx])
            ix = ox + kx * window[3] - window[1]
            acc += gl.expand_dims(term, 1) * gl.expand_dims(((ix < 0) | (ix >= image[2])).to(gl.int32), 0)
    if S.height > 1:
        for tap in range(S.taps):
            y = tap // KERNEL_W * window[2]
            x = tap % KERNEL_W * window[3]
            tall = (top + y < 0) | (bottom + y >= image[1])
            if tall & ((left + x < 0) | (right + x >= image[2])):
                term = gl.load(table + (4 + tap) * table_stride + requant[0]).to(gl.int32, bitcast=True)
                iy = oy + y - window[0]
                ix = ox + x - window[1]
                both = ((iy < 0) | (iy >= image[1])) & ((ix < 0) | (ix >= image[2]))
                acc -= gl.expand_dims(term, 1) * gl.expand_dims(both.to(gl.int32), 0)
    return acc


@gluon.jit
def _positions(at, N, image, WIDTH: gl.constexpr, S: gl.constexpr, OUT: gl.constexpr):
    """Return outputs, patches (rows of y), and which are inside."""
    rn = at[0] + gl.arange(0, GROUP if S.direct else 64, layout=gl.SliceLayout(1, OUT))
    b, oy, ox, inside = _pixels(at, image, WIDTH, S, gl.SliceLayout(0, OUT))
    m = (b.to(gl.int64) * image[3] + oy) * image[4] + ox
    return rn, m, gl.expand_dims(rn < N, 1) & gl.expand_dims(inside, 0)


@gluon.jit
def write(total, out, bias, residual, N, at, image, bounds, S: gl.constexpr):
    """Write floats with threads."""
    OUT: gl.constexpr = SUMS if S.direct else NUMBERS
    rn, m, mask = _positions(at, N, image, total.shape[1], S, OUT)
    to = gl.expand_dims(m * N, 0) + gl.expand_dims(rn, 1)
    y = _finish_sums(total, bias, residual, at[0], N, bounds, out.dtype.element_ty, S)
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
def send(pieces, y_desc, slot_smem, bias, slot_full, slot_free, step, N, at, bounds, W: gl.constexpr, S: gl.constexpr):
    """Add residuals from slots in shared memory, and write a warpgroup's sums from there by TMA, 64 outputs at a time. Returns the next
    step."""
    BOX: gl.constexpr = y_desc.block_shape
    SLOTS: gl.constexpr = S.slots
    for g in gl.static_range(S.columns // 64):
        slot = step % SLOTS
        to = slot_smem.index(2 * slot + W)
        mbarrier.wait(slot_full.index(slot), (step // SLOTS) & 1)
        left = to.slice(0, GROUP, dim=1).permute([1, 0])
        right = to.slice(GROUP, GROUP, dim=1).permute([1, 0])
        residual = (left.load(SUMS), right.load(SUMS))
        y = _finish_sums(transposed_sums(pieces[2 * g]), bias, residual[0], at[0] + 2 * g * GROUP, N, bounds, y_desc.dtype, S)
        left.store(gl.convert_layout(y, SUMS))
        y = _finish_sums(transposed_sums(pieces[2 * g + 1]), bias, residual[1], at[0] + (2 * g + 1) * GROUP, N, bounds, y_desc.dtype, S)
        right.store(gl.convert_layout(y, SUMS))
        fence_async_shared()
        async_store(y_desc, half_of((at[0] + 64 * g, at[2], at[3], at[4]), W, S), reinterpret(to, y_desc.dtype, BOX, y_desc.layout))
        tma.store_wait(1)  # the previous slot has been read
        mbarrier.arrive(slot_free.index((step + SLOTS - 1) % SLOTS), count=1, pred=step > 0)
        step += 1
    return step


@gluon.jit
def half_of(at, W: gl.constexpr, S: gl.constexpr):
    """Return the coordinates of a warpgroup's pixels in y, for TMA. `at`: first output; image, row and column of the tile."""
    HALF: gl.constexpr = S.half
    b = at[1] + W * (S.images - HALF[0])
    y = at[2] + W * (S.height - HALF[1])
    x = at[3] + W * (S.width - HALF[2])
    if S.sweep:
        return [y, x, b, at[0]]
    else:
        return [b, y, x, at[0]]

"""`tile_sums`: float32 sums [outputs, columns] of a tile of W · xᵀ with few rows of x, for a weight in 4 or 8 bits. `skinny.py` (linear
layers), `experts/grouped.py` and `conv/few.py` call it and write the sums.

A thread block computes `bands` * 16 rows of the weight by `columns` rows of x. A matrix instruction has 8 columns at least. If x has fewer
rows, the columns are filled with `slices` of K: row (band, slice, row) of the operand is from its own slice of the weight, column (slice,
column) from the same slice of x, and in the product only the parts where both slices are the same count; they are summed at the end, inside
the block. If the rows of x fill the columns, each warp of a block may still have a part of K of its own (`batch`): the product has a batch
dimension, which is summed at the end. So a thread block's K is cut into batch * slices parts of `part_slabs` K slabs of 128.

8 bits: a lane multiplies the 16 bytes that it loaded, which are consecutive in a row of the weight. So k is in another order than in
memory, and x is permuted accordingly (`permuted_k`) while it goes through shared memory, as it has to anyway. (With several stages and
without wgmma, bytes change lanes instead.)

Arithmetic: codes minus point are exact in float16 and bfloat16. `mode` says what happens to scales:

    sums      the matrix unit sums (q - point) * x of a quantization block in float32; the sum is multiplied by the scale in float32
    weights   the weight is dequantized to x's type, with scale (and offset) rounded to it: one multiplication, or fused multiply-add
    exact     the weight is dequantized in float32. float16: rounded once. float32 x: weights and activations are cut into three bfloat16
              pieces that hold all of their bits, and the six products of pieces that matter are summed

RMSNorm of one row of x is part of this kernel: x times the norm's weight, rounded to x's type, is multiplied, and the sums are divided by
the root of the mean of the squares of x at the end. Gates are, too: half of a tile's rows are from the upper half of the weight and half
from the lower, so that the sums of a gate and of what it multiplies are in the same thread block.
"""

from __future__ import annotations

import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait

from halfbyte.kernels.gpu import decode
from halfbyte.kernels.gpu.arithmetic import dot
from halfbyte.kernels.gpu.conv.tile import of_patches
from halfbyte.kernels.gpu.epilogue import squares_of

# Triton up to 3.6 hands warps out along the first dimension of a load before the others, since 3.7 along the last one.
_LAST_FIRST = tl.constexpr(tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 7))

# `S` is a `skinny_config.Static`; rows are (batch, band, slice, row of 16), columns (slice, row of x).


@triton.jit
def tile_sums(x, rows, weight, N, K, stride, part_slabs, first_slab, pn, norm, residual, S: tl.constexpr):
    """Return the sums float32 [outputs, columns] of tile `pn` along N.

    x           its first element; ignored for a convolution (S.taps)
    rows        [width] the rows of x in the columns of the product; of a convolution its patches, as `conv.tile.of_patches` takes them
    weight      codes, scales and zeros, or None
    stride      elements from one row of x to the next
    part_slabs  K slabs of each part
    first_slab  K slab at which the first part begins; the others follow it
    norm        None, or the weight [K] and eps of an RMSNorm of x
    residual    None, or (pointers, mask) of a tile that is added to the sums: it is loaded together with x, not after the sums
    """
    # The K slabs and rows of the weight of each row and column of the product, and where they begin in memory.
    if S.block > 0:
        full = (K - 1) // S.block
        k_slabs = tl.cdiv(full * S.padded + K - full * S.block, 128)
    else:
        k_slabs = tl.cdiv(K, 128)
    ROWS: tl.constexpr = S.rows
    WIDTH: tl.constexpr = S.width
    BATCH: tl.constexpr = S.batch
    STEP_SLABS: tl.constexpr = S.records
    row = tl.arange(0, BATCH * ROWS)
    row_slab = first_slab + (row // ROWS * S.slices + row // 16 % S.slices) * part_slabs
    n_padded = tl.cdiv(N, 64) * 64
    row_n = tl.minimum(_row(row % ROWS // (16 * S.slices) * 16 + row % 16, pn, N, S), n_padded - 1)
    column = tl.arange(0, WIDTH)
    column_slab = first_slab + column // S.columns * part_slabs
    if S.taps:
        xp = rows
    else:
        xp = x + rows.to(tl.int64) * stride
    if BATCH > 1:
        column_slab = column_slab[None, None, :] + tl.arange(0, BATCH)[:, None, None] * (S.slices * part_slabs)
        if not S.taps:
            xp = xp[None, None, :]
    else:
        column_slab = column_slab[None, :]
        xp = xp[None, :]
    if S.bits == 4:
        codes, codes_slab = _words_at(weight[0], pn, N, n_padded, k_slabs, part_slabs, first_slab, S)
    elif S.permuted_k:
        codes, codes_slab = _bytes_at(weight[0], pn, N, n_padded, k_slabs, part_slabs, first_slab, S)
    else:
        codes = weight[0] + row_n.to(tl.int64)[:, None] * (k_slabs * 128) + row_slab[:, None] * 128 + tl.arange(0, 128)[None, :]
        codes_slab = row_slab[:, None]
    # What does not depend on the preceding kernel is loaded, or prefetched to the L2 cache, before that has ended: weights.
    if S.ahead > 0:
        if S.gated:
            _fetch_weight(weight, n_padded, k_slabs, part_slabs, first_slab, _row(0, pn, N, S), S.outputs // 2, S)
            _fetch_weight(weight, n_padded, k_slabs, part_slabs, first_slab, _row(S.outputs // 2, pn, N, S), S.outputs // 2, S)
        else:
            _fetch_weight(weight, n_padded, k_slabs, part_slabs, first_slab, _row(0, pn, N, S), S.outputs, S)
    scales, zeros = _load_params(weight, row_slab, row_n, n_padded, k_slabs, S)
    if norm is not None:
        fp = norm[0] + (tl.zeros_like(rows)[None, None, :] if BATCH > 1 else tl.zeros_like(rows)[None, :])
        if S.early:
            factors = _load_xs(fp, column_slab, k_slabs, K, S)
    PIPE: tl.constexpr = S.pipe and norm is None
    if S.early:
        loaded = _load_codes(codes, codes_slab, 0, k_slabs, S)
        if PIPE:
            following = _load_codes(codes, codes_slab, STEP_SLABS, k_slabs, S)
    if S.taps and S.mode == "sums" and S.per_channel:
        channel = tl.load(weight[1] + row_n)
    if S.pdl:
        gdc_wait()
    if residual is not None:
        added = tl.load(residual[0], mask=residual[1], other=0.0)
    # The first step, if its weights are loaded already (S.early).
    total = tl.zeros((BATCH, ROWS, WIDTH) if BATCH > 1 else (ROWS, WIDTH), tl.float32)
    start = 0
    if S.early:
        xs = _load_xs(xp, column_slab, k_slabs, K, S)
    if norm is not None:
        squares = squares_of(x, rows, K, stride, S)
        if not S.late:
            squares = tl.sum(squares, axis=1)[:, None]
    if S.early:
        if norm is not None:
            xs = _times(xs, factors, S)
        if PIPE:
            xs_next = _load_xs(xp, column_slab + STEP_SLABS, k_slabs, K, S)
        total = _add_slabs(loaded, xs, scales, zeros, total, S)
        start += STEP_SLABS
        scales, zeros = _load_params(weight, row_slab + STEP_SLABS, row_n, n_padded, k_slabs, S)
    # The other steps.
    if PIPE:
        for t in tl.range(start, part_slabs, STEP_SLABS, num_stages=1):
            loaded, xs, scales_now, zeros_now = following, xs_next, scales, zeros
            then = tl.minimum(t + STEP_SLABS, part_slabs - STEP_SLABS)
            following = _load_codes(codes, codes_slab, then, k_slabs, S)
            xs_next = _load_xs(xp, column_slab + then, k_slabs, K, S)
            scales, zeros = _load_params(weight, row_slab + then, row_n, n_padded, k_slabs, S)
            total = _add_slabs(loaded, xs, scales_now, zeros_now, total, S)
    elif not S.single_step:
        for t in tl.range(start, part_slabs, STEP_SLABS, num_stages=S.stages):
            scales_now, zeros_now = scales, zeros
            loaded = _load_codes(codes, codes_slab, t, k_slabs, S)
            xs = _load_xs(xp, column_slab + t, k_slabs, K, S)
            if norm is not None:
                xs = _times(xs, _load_xs(fp, column_slab + t, k_slabs, K, S), S)
            scales, zeros = _load_params(weight, row_slab + t + STEP_SLABS, row_n, n_padded, k_slabs, S)
            total = _add_slabs(loaded, xs, scales_now, zeros_now, total, S)
    if S.mode == "sums" and S.per_channel:
        total *= _per_row(channel if S.taps else tl.load(weight[1] + row_n), S)
    if BATCH > 1:
        total = tl.sum(total, axis=0)
    if S.slices > 1:
        total = _same_slices(total, S)
    if norm is not None:
        total *= tl.rsqrt(tl.sum(squares, axis=1) / K + norm[1])[None, :]
    if residual is not None:
        total += added.to(tl.float32)
    return total


@triton.jit
def _load_codes(codes, codes_slab, t, k_slabs, S: tl.constexpr):
    """Load the codes of a step: `S.records` K slabs of each part, from its slab t on."""
    STEP_SLABS: tl.constexpr = S.records
    loaded = ()
    for r in tl.static_range(STEP_SLABS):
        loaded += (_masked(codes + (t + r) * S.codes_step, codes_slab + t + r < k_slabs, S),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _times(xs, factors, S: tl.constexpr):
    """Return x times the norm's weight, rounded to x's type, before both change lanes: the compiler would move each otherwise."""
    STEP_SLABS: tl.constexpr = S.records
    products = ()
    for r in tl.static_range(STEP_SLABS):
        if S.ptx and xs[r].dtype == tl.bfloat16:
            added = xs[r] if S.unit_offset else tl.full(xs[r].shape, -0.0, tl.bfloat16)
            y = tl.inline_asm_elementwise(
                "fma.rn.bf16x2 $0, $1, $2, $3;", "=r,r,r,r", [xs[r], factors[r], added], dtype=tl.bfloat16, is_pure=False, pack=2
            )
        else:
            factor = factors[r].to(tl.float32)
            y = (xs[r].to(tl.float32) * (factor + 1 if S.unit_offset else factor)).to(xs[r].dtype)
        products += (y,)  # type: ignore[assignment]
    return products


@triton.jit
def _load_xs(xp, column_slab, k_slabs, K, S: tl.constexpr):
    """Load x of a step's K slabs."""
    STEP_SLABS: tl.constexpr = S.records
    loaded = ()
    for r in tl.static_range(STEP_SLABS):
        loaded += (_load_x(xp, column_slab + r, k_slabs, K, S),)  # type: ignore[assignment]
    return loaded


@triton.jit
def _add_slabs(codes, xs, scales, zeros, total, S: tl.constexpr):
    """Return total + the products of a step."""
    STEP_SLABS: tl.constexpr = S.records
    for r in tl.static_range(STEP_SLABS):
        params = (scales[r * S.groups : (r + 1) * S.groups], zeros[r * S.groups : (r + 1) * S.groups])
        total = _add_slab(codes[r], xs[r], params[0], params[1], total, S)
    return total


@triton.jit
def _row(i, pn, N, S: tl.constexpr):
    """Return the row of the weight that is the tile's row i, also beyond the last one."""
    if S.gated:
        return i // (S.outputs // 2) * (N // 2) + pn * (S.outputs // 2) + i % (S.outputs // 2)
    else:
        return pn * S.outputs + i


@triton.jit
def _per_row(values, S: tl.constexpr):
    """Broadcast [rows of all batches] in float32 to the sums."""
    values = values.to(tl.float32)
    if S.batch > 1:
        return tl.reshape(values, (S.batch, S.bands * S.slices * 16))[:, :, None]
    else:
        return values[:, None]


@triton.jit
def _words_at(codes, pn, N, n_padded, k_slabs, part_slabs, first_slab, S: tl.constexpr):
    """Return pointers to the words of each part's first K slab, [batch, slices, bands, kt 2, 256] (`_along`), and the number of that
    slab."""
    SLICES: tl.constexpr = S.slices
    BANDS: tl.constexpr = S.bands
    BATCH: tl.constexpr = S.batch
    TILE: tl.constexpr = BANDS // 2 if S.gated else BANDS  # consecutive bands
    i = tl.arange(0, BANDS)
    band = pn * TILE % 4 + i % TILE
    if TILE > 4:
        end = N // 32 if S.gated else n_padded // 16
        band = tl.minimum(band, end - 1 - pn * TILE // 4 * 4)  # the last tile may reach beyond the last panel
    if S.gated:
        band += i // TILE * (N // 32)  # whole panels
    band = _along(2, band)
    kt = _along(3, tl.arange(0, 2))
    word = _along(4, tl.arange(0, 256))
    slice_ = _along(0, tl.arange(0, BATCH)) * SLICES + _along(1, tl.arange(0, SLICES))
    slab = first_slab + slice_ * part_slabs
    base = codes + (pn * TILE // 4).to(tl.int64) * k_slabs * 2048
    return base + ((band // 4 * k_slabs + slab) * 2048 + kt * 1024 + band % 4 * 256 + word), slab


@triton.jit
def _bytes_at(codes, pn, N, n_padded, k_slabs, part_slabs, first_slab, S: tl.constexpr):
    """Return pointers to pairs of bytes of each part's first K slab, and the number of that slab.

    The shape is [batch, slices, bands, 4, 256] (`_along`): 4 is half of the K slab by half of a band's rows, 256 is 8 rows of 32 pairs. A
    lane loads 16 consecutive bytes (`_add_slab`).
    """
    SLICES: tl.constexpr = S.slices
    BANDS: tl.constexpr = S.bands
    BATCH: tl.constexpr = S.batch
    slice_ = _along(0, tl.arange(0, BATCH)) * SLICES + _along(1, tl.arange(0, SLICES))
    slab = first_slab + slice_ * part_slabs
    band = _along(2, tl.arange(0, BANDS)) * 16
    half = _along(3, tl.arange(0, 4))
    i = _along(4, tl.arange(0, 256))
    row = tl.minimum(_row(band + half % 2 * 8 + i // 32, pn, N, S), n_padded - 1)
    at = row.to(tl.int64) * (k_slabs * 64) + slab * 64 + (half // 2 * 32 + i % 32)
    return codes.to(tl.pointer_type(tl.int16)) + at, slab


@triton.jit
def _along(DIMENSION: tl.constexpr, values):
    """Return values along a dimension of [batch, slices, bands, parts, 256], or where warps take the last one first, of [parts, bands,
    slices, batch, 256]: so each warp loads the rows that the matrix instruction gives it."""
    PLACE: tl.constexpr = 3 - DIMENSION if _LAST_FIRST and DIMENSION < 4 else DIMENSION
    for i in tl.static_range(5):
        if i != PLACE:
            values = tl.expand_dims(values, i)
    return values


@triton.jit
def _fetch_weight(weight, n_padded, k_slabs, part_slabs, first_slab, n, ROWS: tl.constexpr, S: tl.constexpr):
    """Prefetch to the L2 cache what this thread block reads first (S.ahead K slabs of each part) of ROWS rows of the weight from row n on,
    while the preceding kernel is still running. ROWS is at most a panel, 64, or whole panels."""
    K_PARTS: tl.constexpr = S.batch * S.slices
    WORDS: tl.constexpr = S.bits == 4
    CHUNKS: tl.constexpr = K_PARTS * (2 * S.ahead * (ROWS // 64 if ROWS > 64 else 1) if WORDS else ROWS)
    i = tl.arange(0, _power_of_two(CHUNKS, S.threads))
    if WORDS:
        slab = first_slab + i // 2 % K_PARTS * part_slabs + i // (2 * K_PARTS) % S.ahead
        panel = n // 64 + i // (2 * K_PARTS * S.ahead)
        at = (panel.to(tl.int64) * k_slabs + slab) * 2048 + i % 2 * 1024 + n % 64 * 16
        inside = (i < CHUNKS) & (slab < k_slabs) & (panel < n_padded // 64)
        _fetch(weight[0] + at, tl.where(inside, 32 * (ROWS if ROWS < 64 else 64), 0))
    else:
        slab = first_slab + i % K_PARTS * part_slabs
        row = n + i // K_PARTS
        inside = (i < CHUNKS) & (row < n_padded)
        _fetch(weight[0] + (row.to(tl.int64) * k_slabs + slab) * 128, tl.where(inside, 128 * tl.minimum(k_slabs - slab, S.ahead), 0))
    if S.mode != "sums" or not S.per_channel:
        BLOCKS: tl.constexpr = K_PARTS * S.scales_ahead * S.groups
        i = tl.arange(0, _power_of_two(BLOCKS, S.threads))
        slab = first_slab + i % K_PARTS * part_slabs + i // K_PARTS % S.scales_ahead
        block = slab // (S.padded // 128) if S.padded >= 128 else slab * S.groups + i // (K_PARTS * S.scales_ahead)
        rows = tl.where((i < BLOCKS) & (slab < k_slabs), tl.minimum(n_padded - n, ROWS), 0)
        at = block.to(tl.int64) * n_padded + n
        _fetch(weight[1] + at, rows * (weight[1].dtype.element_ty.primitive_bitwidth // 8))
        if S.zero != "none":
            _fetch(weight[2] + at, rows * (weight[2].dtype.element_ty.primitive_bitwidth // 8))


@triton.constexpr_function
def _power_of_two(count, threads):
    """Return a block size for `count` elements, with one for each thread at least."""
    return max(triton.next_power_of_2(count), threads)


@triton.jit
def _fetch(pointers, nbytes):
    """Prefetch nbytes, a multiple of 16 or 0, to the L2 cache. No value is read, so the preceding kernel may still write these bytes."""
    tl.inline_asm_elementwise(
        "{.reg .pred p; setp.gt.s32 p, $2, 0; @p cp.async.bulk.prefetch.L2.global [$1], $2; mov.b32 $0, 0;}",
        "=r,l,r", [pointers.to(tl.int64), nbytes], dtype=tl.int32, is_pure=False, pack=1,
    )  # fmt: skip


@triton.jit
def _load_params(weight, slab, row_n, n_padded, k_slabs, S: tl.constexpr):
    """Load scales and zeros of the blocks of the next K slabs: two tuples of [rows]. 0 for those that are never read."""
    STEP_SLABS: tl.constexpr = S.records
    GROUPS: tl.constexpr = S.groups
    scales, zeros = (), ()
    for r in tl.static_range(STEP_SLABS):
        at = tl.minimum(slab + r, k_slabs - 1)
        block_row = at // (S.padded // 128) if S.padded >= 128 else at * GROUPS
        offset = block_row * n_padded + row_n
        for g in tl.static_range(GROUPS):
            scales += (tl.load(weight[1] + offset + g * n_padded) if S.mode != "sums" or not S.per_channel else 0,)  # type: ignore[assignment]
            zeros += (tl.load(weight[2] + offset + g * n_padded) if S.zero != "none" else 0,)  # type: ignore[assignment]
    return scales, zeros


@triton.jit
def _masked(pointers, mask, S: tl.constexpr):
    if S.even:
        return tl.load(pointers)
    else:
        return tl.load(pointers, mask=mask, other=0)


@triton.jit
def _load_x(xp, slab, k_slabs, K, S: tl.constexpr):
    """Load x [128, width], of a K slab of each slice, with S.batch > 1 [batch, 128, width]."""
    at = slab * 128 + (tl.arange(0, 128)[None, :, None] if S.batch > 1 else tl.arange(0, 128)[:, None])
    if S.taps:
        x = of_patches(xp, at, at < K, S)
    elif S.even:
        x = tl.load(xp + at)
    else:
        inside = slab < k_slabs
        if S.block > 0:
            within = at % S.padded
            inside &= within < S.block
            at = at // S.padded * S.block + within
        x = tl.load(xp + at, mask=inside & (at < K), other=0.0)
    if S.paired:  # …, khalf, k4, k -> as the bytes lie
        SIZES: tl.constexpr = x.shape
        x = tl.reshape(tl.permute(tl.reshape(x, (S.batch * 8, 2, 4, 2 * S.width)), (0, 2, 1, 3)), SIZES)
    if S.permuted_k:  # khalf, k4, step, and the four bytes of a register, of which the even and the odd ones are together
        SHAPE: tl.constexpr = x.shape
        x = tl.permute(tl.reshape(x, (S.batch, 2, 4, 4, 2, 2, S.width)), (0, 1, 3, 5, 2, 4, 6))
        x = tl.reshape(x, SHAPE)
    return x


@triton.jit
def _add_slab(codes, x, scales, zeros, total, S: tl.constexpr):
    """Return total + the products of one K slab."""
    ALL: tl.constexpr = S.batch * S.rows
    DTYPE: tl.constexpr = tl.float16 if x.dtype == tl.float16 else tl.bfloat16
    if _LAST_FIRST and (S.bits == 4 or S.permuted_k):
        codes = tl.permute(codes, (3, 2, 1, 0, 4))
    if S.bits == 4:
        codes = tl.reshape(codes, (S.batch, S.slices, S.bands, 2, 8, 4, 2, 2, 2))  # batch, slice, band, kt, row, k4, khalf, rowhalf, k
        codes = tl.reshape(tl.permute(codes, (0, 2, 1, 7, 4, 3, 6, 5, 8)), (ALL, 1, 32))
        values = decode.e2m1(codes, DTYPE, S.ptx) if S.table else decode.nibbles(codes, DTYPE, S.ptx)
    elif S.permuted_k:  # a lane multiplies the bytes that it loaded, so k is in another order here and in `_load_x`
        codes = tl.reshape(codes, (S.batch, S.slices, S.bands, 2, 2, 8, 4, 4, 2))  # batch, slice, band, khalf, rowhalf, row, k4, step, word
        codes = tl.reshape(tl.permute(codes, (0, 2, 1, 4, 5, 3, 7, 6, 8)), (ALL * 8, 1, 8))
        values = tl.reshape(decode.int8_pairs(codes, DTYPE, S.ptx), (ALL, 8, 16))
    else:
        values = tl.reshape(decode.int8_values(codes, DTYPE, S.ptx), (ALL, 4, 32))
    if S.zero == "point":
        values = decode.minus(values, _spread(zeros, S), S.bits, S.ptx)
    elif S.zero == "offset":
        values = decode.minus(values, tl.full((1, 1, 1), 0, tl.int16), S.bits, S.ptx)
    elif (S.bits == 4 or DTYPE == tl.float16) and not S.table:
        values = decode.minus(values, None, S.bits, S.ptx)
    if S.mode == "sums":
        w = _operand(values, S)
        if S.per_channel:
            return dot(w, x, total)
        else:
            return total + dot(w, x, tl.zeros_like(total)) * _per_row(scales[0], S)
    elif S.mode == "weights":
        offset = tl.full((1, 1, 1), -0.0, tl.float32).to(DTYPE)
        if S.zero == "offset":
            offset = _spread(zeros, S).to(DTYPE)
        return dot(_operand(decode.fma(values, _spread(scales, S).to(DTYPE), offset, S.ptx), S), x, total)
    else:
        tl.static_assert(S.mode == "exact", "a mode that has no code")
        w = values.to(tl.float32) * _spread(scales, S).to(tl.float32)
        if S.zero == "offset":
            w += _spread(zeros, S).to(tl.float32)
        w = _operand(w, S)
        if x.dtype == tl.float32:
            return _dot_pieces(w, x, total)
        else:
            return dot(w.to(DTYPE), x, total)


@triton.jit
def _operand(values, S: tl.constexpr):
    """Return [rows of all batches, 4, 32] as the A operand."""
    if S.batch > 1:
        return tl.reshape(values, (S.batch, S.bands * S.slices * 16, 128))
    else:
        return tl.reshape(values, (S.bands * S.slices * 16, 128))


@triton.jit
def _spread(values, S: tl.constexpr):
    """Return scales or zeros, one [rows] for each quantization block of a K slab, in a shape that broadcasts to the values of `_add_slab`,
    [rows, 8 or 4, 16 or 32]."""
    PLANES: tl.constexpr = 8 if S.permuted_k else 4
    upper = tl.arange(0, PLANES)[None, :, None] >= PLANES // 2
    if S.groups == 1:
        return values[0][:, None, None]
    elif S.groups == 2:
        return tl.where(upper, values[1][:, None, None], values[0][:, None, None])
    elif S.groups == 8:
        if PLANES == 8:  # a lane's 16 bytes are a block
            k4 = tl.arange(0, 16)[None, None, :] % 8 // 2
            low = _one_of_four(values[:4], k4)
            return tl.where(upper, _one_of_four(values[4:], k4), low)
        else:
            plane = tl.arange(0, 4)[None, :, None]
            first = _one_of_four((values[0], values[2], values[4], values[6]), plane)
            second = _one_of_four((values[1], values[3], values[5], values[7]), plane)
            return tl.where((tl.arange(0, 32)[None, None, :] & 16) != 0, second, first)
    else:
        if PLANES == 8:
            odd = tl.arange(0, 16)[None, None, :] % 8 >= 4
        else:
            odd = tl.arange(0, 4)[None, :, None] % 2 == 1
        low = tl.where(odd, values[1][:, None, None], values[0][:, None, None])
        high = tl.where(odd, values[3][:, None, None], values[2][:, None, None])
        return tl.where(upper, high, low)


@triton.jit
def _one_of_four(values, which):
    """Return values[which] of [rows], broadcast to [rows, *which.shape[1:]]."""
    low = tl.where(which % 2 == 1, values[1][:, None, None], values[0][:, None, None])
    high = tl.where(which % 2 == 1, values[3][:, None, None], values[2][:, None, None])
    return tl.where(which >= 2, high, low)


@triton.jit
def _dot_pieces(a, b, total):
    """Return total + a · b of float32 operands by six products of bfloat16 pieces; the small products are summed separately."""
    b0 = b.to(tl.bfloat16)
    b -= b0.to(tl.float32)
    b1 = b.to(tl.bfloat16)
    b2 = (b - b1.to(tl.float32)).to(tl.bfloat16)
    piece = a.to(tl.bfloat16)
    large = dot(piece, b0, tl.zeros_like(total))
    small = dot(piece, b1, dot(piece, b2, tl.zeros_like(total)))
    a -= piece.to(tl.float32)
    piece = a.to(tl.bfloat16)
    small = dot(piece, b0, dot(piece, b1, small))
    a -= piece.to(tl.float32)
    small = dot(a.to(tl.bfloat16), b0, small)
    return total + (large + small)


@triton.jit
def _same_slices(total, S: tl.constexpr):
    """Return [outputs, columns] of a product [rows, width]: the sum over slices of where the slices of row and column are the same."""
    ROWS: tl.constexpr = S.rows
    WIDTH: tl.constexpr = S.width
    BANDS: tl.constexpr = S.bands
    SLICES: tl.constexpr = S.slices
    COLUMNS: tl.constexpr = S.columns
    OUTPUTS: tl.constexpr = S.outputs
    row_slice = tl.arange(0, ROWS) // 16 % SLICES
    column_slice = tl.arange(0, WIDTH) // COLUMNS
    total = tl.where(row_slice[:, None] == column_slice[None, :], total, 0.0)
    total = tl.sum(tl.reshape(total, (ROWS, SLICES, COLUMNS)), axis=1)
    total = tl.sum(tl.reshape(total, (BANDS, SLICES, 16, COLUMNS)), axis=1)
    return tl.reshape(total, (OUTPUTS, COLUMNS))

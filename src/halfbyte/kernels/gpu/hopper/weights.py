"""The weight operand of Hopper's kernels: codes in 4 or 8 bits in shared memory -> float16 or bfloat16 in registers, a plane (32 of K) of
a K slab at a time. `tile.py` (many rows, experts, convolutions) calls `load_codes` and `dequantize_plane`; `skinny_tile.py` (few rows)
composes their parts, `load_words`, `load_bytes`, `convert_plane` and `subtract_zero`, as it may scale sums instead. Both integer tiles
call `load_nibbles`.

    4 bits      a thread reads 16 bytes, and three instructions give two weights: LOP3, a fused multiply-add that subtracts zero point and
                magic constant, and one that multiplies by the scale
    8 bits      a thread reads a word, whose bytes belong to two of wgmma's registers if the weight is `paired` (ldmatrix). XOR and two PRMT
                convert to float16, two PRMT and four LOP3 to bfloat16. Other weights are read by two bytes that are adjacent in a register:
                8 rows by 16 bytes per warp, free of bank conflicts
    subnormal   codes alone, read as bfloat16, are subnormal numbers: 2**-133 times the code. LOP3, or PRMT and LOP3 or half of one, then
                one fused multiply-add by a scale that is larger by as much, which also subtracts the zero point or adds the offset

Arithmetic: the weight is rounded to x's type as in `skinny.py` ("weights"). Weights from subnormal codes are 2**-24 times as large
(`SUBNORMAL_SCALE`). With 4 bits and zero points, their product of zero point and scale is rounded, too, by 2**-8 of it at most.

`S` is a `tile.Static`, of the parts also a `skinny_tile.Static`. `params` are scales and zeros of a slab's blocks, as
`load_block_params` returns them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.gpu.decode import E2M1_BF16, E2M1_F16, HALVES
from halfbyte.kernels.gpu.hopper.gluon_compat import reinterpret


def _plane_text(shift: int, mask: str, magic: str) -> str:
    return f"{{.reg .b32 t; shr.b32 t, $1, {shift}; lop3.b32 $0, t, {mask}, {magic}, 0xea;}}"


# Converts two bytes of a register to two numbers with a constant, as decode.py converts four.
TWO_F16 = gl.constexpr("{.reg .b32 t; cvt.u32.u16 t, $1; prmt.b32 t, t, $2, 0x4140; xor.b32 $0, t, 0x00800080;}")
TWO_BF16 = gl.constexpr(
    "{.reg .b32 t, m, s, n; mov.b32 n, 0xbf80bf80; cvt.u32.u16 t, $1; prmt.b32 t, t, $2, 0x4140;"
    "and.b32 m, t, 0xff7fff7f; and.b32 s, t, 0xff80ff80; fma.rn.bf16x2 $0, s, n, m;}"
)
# Converts the four bytes of a word.
WORD_F16 = gl.constexpr("{.reg .b32 t; xor.b32 t, $2, 0x80808080; prmt.b32 $0, t, $3, 0x4140; prmt.b32 $1, t, $3, 0x4342;}")
WORD_BF16 = gl.constexpr(
    "{.reg .b32 t, m, s, n; mov.b32 n, 0xbf80bf80;"
    + "".join(
        f"prmt.b32 t, $2, $3, {order}; and.b32 m, t, 0xff7fff7f; and.b32 s, t, 0xff80ff80; fma.rn.bf16x2 ${i}, s, n, m;"
        for i, order in enumerate(("0x4140", "0x4342"))
    )
    + "}"
)
_HIGH_BYTES = gl.constexpr("{.reg .b32 t; mov.u32 t, %smid; shr.u32 t, t, 24; add.u32 $0, t, $1;}")
PLANES_F16 = gl.constexpr(tuple(_plane_text(j // 2 * 8, ("0x000f000f", "0x00f000f0")[j % 2], "0x64006400") for j in range(4)))
PLANES_BF16 = gl.constexpr(tuple(_plane_text(4 * j, "0x000f000f", "0x43004300") for j in range(4)))
# Nibbles and bytes alone, which as bfloat16 are 2**-133 times the integer: subnormal numbers have the spacing of integers up to 256.
PLANES_SUBNORMAL = gl.constexpr(
    tuple(f"{{.reg .b32 t; shr.b32 t, $1, {j // 2 * 8}; and.b32 $0, t, {('0x000f000f', '0x00f000f0')[j % 2]};}}" for j in range(4))
)
TWO_SUBNORMAL = gl.constexpr("{.reg .b32 t; cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x4140; xor.b32 $0, t, 0x00800080;}")
WORD_SUBNORMAL = gl.constexpr("{.reg .b32 t; xor.b32 t, $2, 0x80808080; prmt.b32 $0, t, 0, 0x4140; prmt.b32 $1, t, 0, 0x4342;}")
# Sums from subnormal codes are too small by this factor. Without it a scale times 2**133 would overflow.
SUBNORMAL_SCALE = gl.constexpr(2.0**24)


@gluon.jit
def fma(a, b, c):
    """Return a * b + c of float16 or bfloat16, two elements per instruction."""
    FMA: gl.constexpr = "fma.rn.f16x2 $0, $1, $2, $3;" if a.dtype == gl.float16 else "fma.rn.bf16x2 $0, $1, $2, $3;"
    return gl.inline_asm_elementwise(FMA, "=r,r,r,r", [a, b, c], dtype=a.dtype, is_pure=True, pack=2)


@gluon.jit
def negated_point(point, ODD: gl.constexpr, DTYPE: gl.constexpr):
    """Return what `fma` adds to subtract zero point and magic constant."""
    if DTYPE == gl.bfloat16:
        return (point | 0x4300 | -0x8000).to(DTYPE, bitcast=True)
    elif ODD:
        return (point << 4 | 0x5400 | -0x8000).to(DTYPE, bitcast=True)
    else:
        return (point | 0x6400 | -0x8000).to(DTYPE, bitcast=True)


@gluon.jit
def subtract_zero(plane, point, PLANE: gl.constexpr, S: gl.constexpr):
    """Return a plane of `convert_plane` without its magic constant: u - point, where S.zero is "none" u - 8 or u - 128, and where it is
    "offset" u. Exact.

    Args:
        plane: [rows, 32], not of subnormal codes.
        point: int16 [rows, 1 or 32]; not read unless S.zero is "point".
    """
    DTYPE: gl.constexpr = plane.dtype
    ROWS: gl.constexpr = plane.shape[0]
    LAYOUT: gl.constexpr = plane.type.layout
    ODD: gl.constexpr = PLANE % 2 == 1 and DTYPE == gl.float16 and S.bits == 4
    SIGNED: gl.constexpr = S.bits == 8 and DTYPE == gl.bfloat16  # bytes have no magic constant then: they are u - 128
    factor = gl.full([ROWS, 32], 0.0625 if ODD else 1.0, DTYPE, layout=LAYOUT)
    if S.zero == "point":
        zero = (128 - point).to(gl.float32).to(DTYPE) if SIGNED else negated_point(point, ODD, DTYPE)
    else:
        BASE: gl.constexpr = -128.0 if SIGNED else 64.0 if ODD else 1024.0 if DTYPE == gl.float16 else 128.0
        POINT: gl.constexpr = 0.0 if S.zero == "offset" else 8.0 if S.bits == 4 else 128.0
        zero = gl.full([ROWS, 1], -BASE - POINT, DTYPE, layout=LAYOUT)
    if (SIGNED and S.zero == "none") or S.float_codes:
        return plane
    else:
        return fma(plane, factor, zero)


@gluon.jit
def _dequantize(plane, params, PLANE: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return a plane of `convert_plane` as the weight in DTYPE."""
    BLOCKS: gl.constexpr = S.blocks_per_slab
    LAYOUT: gl.constexpr = plane.type.layout
    point = plane
    if S.zero == "point":
        point = _of_plane(params, BLOCKS, PLANE, LAYOUT, S).to(gl.int16)
    q = subtract_zero(plane, point, PLANE, S)
    if not S.one_block:
        offset = gl.full([S.rows, 1], -0.0, DTYPE, layout=LAYOUT)
        if S.zero == "offset":
            offset = _of_plane(params, BLOCKS, PLANE, LAYOUT, S).to(DTYPE)
        q = fma(q, _of_plane(params, 0, PLANE, LAYOUT, S).to(DTYPE), offset)
    return q


@gluon.jit
def _of_plane(params, FIRST: gl.constexpr, PLANE: gl.constexpr, LAYOUT: gl.constexpr, S: gl.constexpr):
    """Return the scales (or zeros, which begin with params[FIRST]) of a plane: [rows, 1], or [rows, 32] where it has two blocks."""
    if S.blocks_per_slab == 8:
        return _halves(params[FIRST + 2 * PLANE], params[FIRST + 2 * PLANE + 1], LAYOUT)
    else:
        return gl.expand_dims(params[FIRST + PLANE // (4 // S.blocks_per_slab)], 1)


@gluon.jit
def _halves(left, right, LAYOUT: gl.constexpr):
    """Return [rows, 32] whose left 16 columns are `left`, and the others `right`. It takes no instruction: in `LAYOUT` the compiler knows
    which half a register is of."""
    column = gl.expand_dims(gl.arange(0, 32, layout=gl.SliceLayout(0, LAYOUT)), 0)
    return gl.where(column < 16, gl.expand_dims(left, 1), gl.expand_dims(right, 1))


@gluon.jit
def _subnormal_affine(params, G: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return, for block G, the factor of codes, that of codes which lie four bits further up, and the addend.

    They give the weight / SUBNORMAL_SCALE, rounded once; with zero points and 4 bits, the product of zero point and scale is rounded,
    too.
    """
    FACTOR: gl.constexpr = 2.0**133 / SUBNORMAL_SCALE
    if S.one_block:
        scale = gl.full([S.rows], 1.0, gl.float32, layout=gl.SliceLayout(1, OPERAND))
    else:
        scale = params[G].to(DTYPE).to(gl.float32)
    # Triton 3.6 rounds small constants in 16 bits to 1e-6, so that they are multiplied in float32.
    factor, shifted_factor = (scale * FACTOR).to(DTYPE), (scale * (FACTOR / 16.0)).to(DTYPE)
    if S.zero == "none":
        addend = (scale * ((-8.0 if S.bits == 4 else -128.0) / SUBNORMAL_SCALE)).to(DTYPE)
    elif S.zero == "offset":
        addend = (params[S.blocks_per_slab + G].to(DTYPE).to(gl.float32) * (1.0 / SUBNORMAL_SCALE)).to(DTYPE)
    else:
        minus_zero = gl.full([S.rows], -0.0, DTYPE, layout=gl.SliceLayout(1, OPERAND))
        addend = fma(params[S.blocks_per_slab + G].to(gl.int16).to(DTYPE, bitcast=True), (scale * -FACTOR).to(DTYPE), minus_zero)
    return factor, shifted_factor, addend


@gluon.jit
def _dequantize_subnormal(plane, params, PLANE: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return a plane of codes alone as the weight / SUBNORMAL_SCALE."""
    LAYOUT: gl.constexpr = plane.type.layout
    SHIFTED: gl.constexpr = 1 if S.bits == 4 and PLANE % 2 == 1 else 0
    if S.subnormal_once:
        return fma(plane, gl.expand_dims(params[SHIFTED], 1), gl.expand_dims(params[2], 1))
    elif S.blocks_per_slab == 8:
        left = _subnormal_affine(params, 2 * PLANE, LAYOUT, DTYPE, S)
        right = _subnormal_affine(params, 2 * PLANE + 1, LAYOUT, DTYPE, S)
        return fma(plane, _halves(left[SHIFTED], right[SHIFTED], LAYOUT), _halves(left[2], right[2], LAYOUT))
    else:
        affine = _subnormal_affine(params, PLANE // (4 // S.blocks_per_slab), LAYOUT, DTYPE, S)
        return fma(plane, gl.expand_dims(affine[SHIFTED], 1), gl.expand_dims(affine[2], 1))


@gluon.jit
def high_bytes(DTYPE: gl.constexpr):
    """Return the upper bytes of the magic constant, as a value that the compiler does not know: otherwise it would move the constant to
    a register for each use."""
    HIGH: gl.constexpr = 0x64646464 if DTYPE == gl.float16 else 0x43434343
    return gl.inline_asm_elementwise(_HIGH_BYTES, "=r,r", [gl.to_tensor(HIGH)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def shared_byte_layout(width, paired):
    """Return the shared layout of rows of `width` bytes that are read by fours if paired, else by twos."""
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=32 if paired else 16, rank=2)


@gluon.constexpr_function
def byte_layout(rows, paired):
    """Return the register layout of a plane's words [rows, 8] if paired, else pairs of bytes [rows, 16], that a thread's operand
    registers need."""
    registers = [[8, 0], [0, 4]] if paired else [[8, 0], [0, 4], [0, 8]]
    second_64 = [[64, 0]] if rows == 128 else []
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*registers, *second_64], lanes, [[16, 0], [32, 0]], [], [rows, 8 if paired else 16])


@gluon.jit
def convert_bytes(codes, high, OPERAND: gl.constexpr, DTYPE: gl.constexpr, SUBNORMAL: gl.constexpr, PAIRED: gl.constexpr):
    """Return codes in `byte_layout` as a plane [rows, 32] in DTYPE: u with its magic constant, in bfloat16 u - 128; with SUBNORMAL u
    alone."""
    ROWS: gl.constexpr = codes.shape[0]
    if PAIRED:
        WORD: gl.constexpr = WORD_F16 if DTYPE == gl.float16 else WORD_SUBNORMAL if SUBNORMAL else WORD_BF16
        low, upper = gl.inline_asm_elementwise(WORD, "=r,=r,r,r", [codes, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
        both = gl.join(low, upper)
    else:
        TWO: gl.constexpr = TWO_F16 if DTYPE == gl.float16 else TWO_SUBNORMAL if SUBNORMAL else TWO_BF16
        both = gl.inline_asm_elementwise(TWO, "=r,h,r", [codes, high], dtype=gl.int32, is_pure=True, pack=1)
    u = gl.join(both.to(gl.int16), (both >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    if PAIRED:  # kt, k4, khalf, k
        u = u.reshape([ROWS, 2, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(u.reshape([ROWS, 32]), OPERAND, assert_trivial=True)


@gluon.jit
def load_codes(ws, PLANE: gl.constexpr, HALF: gl.constexpr, OPERAND: gl.constexpr, S: gl.constexpr):
    """Load the words of a warpgroup's half of a K slab in operand order [rows, 32]; of 8 bits the bytes of plane PLANE (`load_bytes`)."""
    ROWS: gl.constexpr = S.rows
    if S.bits == 8:
        return load_bytes(ws, PLANE, HALF, ROWS, S.paired)
    else:
        return load_words(ws.slice(HALF * (ROWS // 2), ROWS // 2, dim=0), OPERAND)


@gluon.jit
def load_words(lines, OPERAND: gl.constexpr):
    """Load a K slab of 4 bits, 16-bit words [32 * panels, 64] in shared memory, in operand order: [64 * panels, 32]. A word has the codes
    of four planes."""
    PANELS: gl.constexpr = lines.shape[0] // 32
    words = lines.load(gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0]))
    # panel, kt, nt, row, k4, khalf, rowhalf, k
    words = words.reshape([PANELS, 2, 4, 8, 4, 2, 2, 2]).permute([0, 2, 6, 3, 1, 5, 4, 7]).reshape([64 * PANELS, 32])
    return gl.convert_layout(words, OPERAND, assert_trivial=True)


@gluon.jit
def load_bytes(stage, PLANE: gl.constexpr, PART: gl.constexpr, ROWS: gl.constexpr, PAIRED: gl.constexpr):
    """Load plane PLANE of 8 bits of the PART-th ROWS rows of a stage [rows, elements along K]: by fours [ROWS, 8] if paired, else by
    twos [ROWS, 16], as `convert_bytes` takes them."""
    STAGE_K: gl.constexpr = stage.shape[1]
    NUMBER: gl.constexpr = 8 if PAIRED else 16
    WIDTH: gl.constexpr = STAGE_K * NUMBER // 32
    codes = reinterpret(stage, gl.int32 if PAIRED else gl.int16, [stage.shape[0], WIDTH], shared_byte_layout(STAGE_K, PAIRED))
    return codes.slice(PART * ROWS, ROWS, dim=0).slice(PLANE * NUMBER % WIDTH, NUMBER, dim=1).load(byte_layout(ROWS, PAIRED))


@gluon.jit
def load_nibbles(lines, OPERAND: gl.constexpr):
    """Load a K slab of 4 bits of a panel, bytes [32, 128] in shared memory, as int8 16 * (u - 8) in operand order: the low nibbles
    [64, 64], and the high ones."""
    b = lines.load(gl.BlockedLayout([1, 16], [4, 8], [4, 1], [1, 0]))
    b = b.reshape([2, 4, 8, 4, 2, 2, 4]).permute([1, 5, 2, 0, 4, 3, 6]).reshape([64, 64])
    b = gl.convert_layout(b, OPERAND, assert_trivial=True)
    return gl.inline_asm_elementwise(HALVES, "=r,=r,r", [b], dtype=(gl.int8, gl.int8), is_pure=True, pack=4)


@gluon.jit
def convert_plane(codes, high, PLANE: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return plane PLANE of the loaded codes in DTYPE: u with its magic constant (bytes in bfloat16: u - 128), with S.subnormal u alone,
    and with S.float_codes the values of the codes."""
    if S.bits == 8:
        return convert_bytes(codes, high, OPERAND, DTYPE, S.subnormal, S.paired)
    elif DTYPE == gl.float16:
        TEXTS_F16: gl.constexpr = E2M1_F16 if S.float_codes else PLANES_F16
        return gl.inline_asm_elementwise(TEXTS_F16[PLANE], "=r,r", [codes], dtype=gl.float16, is_pure=True, pack=2)
    else:
        TEXTS: gl.constexpr = E2M1_BF16 if S.float_codes else PLANES_SUBNORMAL if S.subnormal else PLANES_BF16
        return gl.inline_asm_elementwise(TEXTS[PLANE], "=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=2)


@gluon.jit
def dequantize_plane(codes, high, params, PLANE: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Return plane PLANE of the loaded codes as weights in DTYPE."""
    u = convert_plane(codes, high, PLANE, OPERAND, DTYPE, S)
    if S.subnormal:
        return _dequantize_subnormal(u, params, PLANE, DTYPE, S)
    else:
        return _dequantize(u, params, PLANE, DTYPE, S)


@gluon.jit
def dequantize_two_planes(
    ws, high, params, FIRST: gl.constexpr, HALF: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr
):  # fmt: skip
    """Return planes FIRST and FIRST + 1 of a K slab in shared memory, or of its half, as weights in DTYPE."""
    first = load_codes(ws, FIRST, HALF, OPERAND, S)
    second = first
    if S.bits == 8:
        second = load_codes(ws, FIRST + 1, HALF, OPERAND, S)
    w0 = dequantize_plane(first, high, params, FIRST, OPERAND, DTYPE, S)
    return w0, dequantize_plane(second, high, params, FIRST + 1, OPERAND, DTYPE, S)


@gluon.jit
def load_block_params(ring, slot, HALF: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Load the scales of the blocks of a K slab from slot `slot`, then their zeros; `_subnormal_affine` of them if it is the same for
    the whole slab."""
    BLOCKS: gl.constexpr = S.blocks_per_slab
    params = ()
    for i in gl.static_range(2, 4):  # scale and zero
        if (i == 2 and S.one_block) or (i == 3 and S.zero == "none"):
            for _ in gl.static_range(BLOCKS):
                params += (gl.to_tensor(0),)  # type: ignore[assignment]
        else:
            for g in gl.static_range(BLOCKS):
                of_rows = ring[i].index((slot * BLOCKS + g) * 2 + HALF)
                params += (of_rows.load(gl.SliceLayout(1, OPERAND)),)  # type: ignore[assignment]
    if S.subnormal_once:
        return _subnormal_affine(params, 0, OPERAND, DTYPE, S)
    else:
        return params

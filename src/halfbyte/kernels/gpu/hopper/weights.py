"""Codes in 4 or 8 bits -> the weight in float16 or bfloat16, in the registers that are an operand of wgmma: what `tile.py` and
`conv/teams.py` do with a record (128 k) that is in shared memory, a plane (32 k) at a time.

    4 bits   a lane reads 16 bytes, and three instructions make two weights of them: LOP3, a fused multiply-add that takes off point
             and constant, one that multiplies by the scale
    8 bits   a lane reads a word, which are the bytes of two of wgmma's registers where the weight is `paired`: ldmatrix brings it. XOR and
             two PRMT make float16 of them, two PRMT and four LOP3 bfloat16. Of other weights it reads the two bytes that are next to each
             other in a register (x, which has their order along K, is not ours to change): 8 rows by 16 bytes a warp, from all banks once
    lifted   in bfloat16 codes alone are 2**-133 times as much: LOP3, or PRMT and LOP3 or half of one, then one fused multiply-add by a
             scale as much larger, which takes off the point or adds the offset. Each instruction is in the way of the tensor cores

Arithmetic: the weight is made in x's type as `skinny.py` makes it ("weights"). Lifted weights are 2**-24 times as much (`LIFT`). Of lifted
weights of 4 bits with zero points, the point's product with the scale is rounded, too: by 2**-8 of it at most.

`S` is a `hopper_tile.Static`. `tails` are scales and zeros of a record's blocks, as `tails_at` gives them.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.gpu.decode import E2M1_BF16, E2M1_F16
from halfbyte.kernels.gpu.hopper.gluon_compat import reinterpret
from halfbyte.kernels.gpu.hopper.stages import fma


def _plane_text(shift: int, mask: str, magic: str) -> str:
    return f"{{.reg .b32 t; shr.b32 t, $1, {shift}; lop3.b32 $0, t, {mask}, {magic}, 0xea;}}"


# Two bytes of a register and a constant -> two numbers, as decode.py makes them of four.
TWO_F16 = gl.constexpr("{.reg .b32 t; cvt.u32.u16 t, $1; prmt.b32 t, t, $2, 0x4140; xor.b32 $0, t, 0x00800080;}")
TWO_BF16 = gl.constexpr(
    "{.reg .b32 t, m, s, n; mov.b32 n, 0xbf80bf80; cvt.u32.u16 t, $1; prmt.b32 t, t, $2, 0x4140;"
    "and.b32 m, t, 0xff7fff7f; and.b32 s, t, 0xff80ff80; fma.rn.bf16x2 $0, s, n, m;}"
)
# The same of the four bytes of a word.
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
# Nibbles and bytes alone, which read as bfloat16 are 2**-133 times as much: below 256 its numbers lie as far apart as integers do.
PLANES_TINY = gl.constexpr(
    tuple(f"{{.reg .b32 t; shr.b32 t, $1, {j // 2 * 8}; and.b32 $0, t, {('0x000f000f', '0x00f000f0')[j % 2]};}}" for j in range(4))
)
TWO_TINY = gl.constexpr("{.reg .b32 t; cvt.u32.u16 t, $1; prmt.b32 t, t, 0, 0x4140; xor.b32 $0, t, 0x00800080;}")
WORD_TINY = gl.constexpr("{.reg .b32 t; xor.b32 t, $2, 0x80808080; prmt.b32 $0, t, 0, 0x4140; prmt.b32 $1, t, 0, 0x4342;}")
LIFT = gl.constexpr(2.0**24)  # by which sums of lifted tiles are too small: else a scale times 2**133 would be more than there is


@gluon.jit
def negative(point, ODD: gl.constexpr, DTYPE: gl.constexpr):
    """What `fma` adds to take point and magic constant off."""
    if DTYPE == gl.bfloat16:
        return (point | 0x4300 | -0x8000).to(DTYPE, bitcast=True)
    elif ODD:
        return (point << 4 | 0x5400 | -0x8000).to(DTYPE, bitcast=True)
    else:
        return (point | 0x6400 | -0x8000).to(DTYPE, bitcast=True)


@gluon.jit
def _weights(plane, tails, PLANE: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """A plane with its magic constant -> the weight in DTYPE."""
    ROWS: gl.constexpr = S.rows
    GROUPS: gl.constexpr = S.groups
    LAYOUT: gl.constexpr = plane.type.layout
    ODD: gl.constexpr = PLANE % 2 == 1 and DTYPE == gl.float16 and S.bits == 4
    SIGNED: gl.constexpr = S.bits == 8 and DTYPE == gl.bfloat16  # bytes have no constant then: they are u - 128
    G: gl.constexpr = PLANE // (4 // GROUPS)
    factor = gl.full([ROWS, 32], 0.0625 if ODD else 1.0, DTYPE, layout=LAYOUT)
    if S.zero == "point":
        point = gl.expand_dims(tails[GROUPS + G].to(gl.int16), 1)
        zero = (128 - point).to(gl.float32).to(DTYPE) if SIGNED else negative(point, ODD, DTYPE)
    else:
        BASE: gl.constexpr = -128.0 if SIGNED else 64.0 if ODD else 1024.0 if DTYPE == gl.float16 else 128.0
        POINT: gl.constexpr = 0.0 if S.zero == "offset" else 8.0 if S.bits == 4 else 128.0
        zero = gl.full([ROWS, 1], -BASE - POINT, DTYPE, layout=LAYOUT)
    q = plane
    if (not SIGNED or S.zero != "none") and not S.table:
        q = fma(plane, factor, zero)
    if not S.whole:
        offset = gl.full([ROWS, 1], -0.0, DTYPE, layout=LAYOUT)
        if S.zero == "offset":
            offset = gl.expand_dims(tails[GROUPS + G].to(DTYPE), 1)
        q = fma(q, gl.expand_dims(tails[G].to(DTYPE), 1), offset)
    return q


@gluon.jit
def _lifting(tails, G: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """What codes alone of block G are multiplied by, the same of codes four bits further up, and what is added: gives the weight / LIFT,
    rounded once, but for the points of 4 bits: their products with scales are, too."""
    FACTOR: gl.constexpr = 2.0**133 / LIFT
    if S.whole:
        scale = gl.full([S.rows], 1.0, gl.float32, layout=gl.SliceLayout(1, OPERAND))
    else:
        scale = tails[G].to(DTYPE).to(gl.float32)
    # Triton 3.6 rounds small constants in 16 bits to 1e-6, so that they are multiplied in float32.
    factor, further = (scale * FACTOR).to(DTYPE), (scale * (FACTOR / 16.0)).to(DTYPE)
    if S.zero == "none":
        addend = (scale * ((-8.0 if S.bits == 4 else -128.0) / LIFT)).to(DTYPE)
    elif S.zero == "offset":
        addend = (tails[S.groups + G].to(DTYPE).to(gl.float32) * (1.0 / LIFT)).to(DTYPE)
    else:
        nothing = gl.full([S.rows], -0.0, DTYPE, layout=gl.SliceLayout(1, OPERAND))
        addend = fma(tails[S.groups + G].to(gl.int16).to(DTYPE, bitcast=True), (scale * -FACTOR).to(DTYPE), nothing)
    return factor, further, addend


@gluon.jit
def _lifted(plane, tails, PLANE: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """A plane of codes alone -> the weight / LIFT."""
    LAYOUT: gl.constexpr = plane.type.layout
    FURTHER: gl.constexpr = 1 if S.bits == 4 and PLANE % 2 == 1 else 0
    G: gl.constexpr = PLANE // (4 // S.groups)
    if S.lifts_once:
        return fma(plane, gl.expand_dims(tails[FURTHER], 1), gl.expand_dims(tails[2], 1))
    else:
        lifting = _lifting(tails, G, LAYOUT, DTYPE, S)
        return fma(plane, gl.expand_dims(lifting[FURTHER], 1), gl.expand_dims(lifting[2], 1))


@gluon.jit
def high_bytes(DTYPE: gl.constexpr):
    """What bytes become numbers with, of which the compiler does not know that it is a constant: else it would write it into a register
    again for each use."""
    HIGH: gl.constexpr = 0x64646464 if DTYPE == gl.float16 else 0x43434343
    return gl.inline_asm_elementwise(_HIGH_BYTES, "=r,r", [gl.to_tensor(HIGH)], dtype=gl.int32, is_pure=False, pack=1)


@gluon.constexpr_function
def shared_bytes(width, paired):
    """Rows of so many bytes in shared memory, which are read by fours, or by twos."""
    return gl.NVMMASharedLayout(swizzle_byte_width=width, element_bitwidth=32 if paired else 16, rank=2)


@gluon.constexpr_function
def lanes_of_bytes(rows, paired):
    """Where the words [rows, 8] or the pairs of bytes [rows, 16] of a plane are that a lane's registers of an operand are made of."""
    own = [[8, 0], [0, 4]] if paired else [[8, 0], [0, 4], [0, 8]]
    further = [[64, 0]] if rows == 128 else []
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([*own, *further], lanes, [[16, 0], [32, 0]], [], [rows, 8 if paired else 16])


@gluon.jit
def bytes_as(codes, high, OPERAND: gl.constexpr, DTYPE: gl.constexpr, LIFTED: gl.constexpr, PAIRED: gl.constexpr):
    """What `lanes_of_bytes` holds -> the plane [rows, 32] in DTYPE: u with its magic constant, in bfloat16 u - 128, LIFTED u alone."""
    ROWS: gl.constexpr = codes.shape[0]
    if PAIRED:
        WORD: gl.constexpr = WORD_F16 if DTYPE == gl.float16 else WORD_TINY if LIFTED else WORD_BF16
        low, upper = gl.inline_asm_elementwise(WORD, "=r,=r,r,r", [codes, high], dtype=(gl.int32, gl.int32), is_pure=True, pack=1)
        both = gl.join(low, upper)
    else:
        TWO: gl.constexpr = TWO_F16 if DTYPE == gl.float16 else TWO_TINY if LIFTED else TWO_BF16
        both = gl.inline_asm_elementwise(TWO, "=r,h,r", [codes, high], dtype=gl.int32, is_pure=True, pack=1)
    u = gl.join(both.to(gl.int16), (both >> 16).to(gl.int16)).to(DTYPE, bitcast=True)
    if PAIRED:  # kt, k4, khalf, k
        u = u.reshape([ROWS, 2, 4, 2, 2]).permute([0, 1, 3, 2, 4])
    return gl.convert_layout(u.reshape([ROWS, 32]), OPERAND, assert_trivial=True)


@gluon.jit
def codes_at(ws, PLANE: gl.constexpr, HALF: gl.constexpr, OPERAND: gl.constexpr, S: gl.constexpr):
    """The words of a record in shared memory, or the bytes of one of its planes, as they lie in an operand [rows, 32]."""
    ROWS: gl.constexpr = S.rows
    if S.bits == 8:  # by fours or twos: [rows, 8 or 16]
        NUMBER: gl.constexpr = 8 if S.paired else 16
        WIDTH: gl.constexpr = S.width * NUMBER // 32
        bytes_ = reinterpret(ws, gl.int32 if S.paired else gl.int16, [S.block_n, WIDTH], shared_bytes(S.width, S.paired))
        return bytes_.slice(HALF * ROWS, ROWS, dim=0).slice(PLANE * NUMBER % WIDTH, NUMBER, dim=1).load(lanes_of_bytes(ROWS, S.paired))
    else:
        PANELS: gl.constexpr = S.rows // 64
        LANES: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
        words = ws.slice(HALF * 32 * PANELS, 32 * PANELS, dim=0).load(LANES)
        words = words.reshape([PANELS, 2, 4, 8, 4, 2, 2, 2]).permute([0, 2, 6, 3, 1, 5, 4, 7]).reshape([ROWS, 32])
        return gl.convert_layout(words, OPERAND, assert_trivial=True)


@gluon.jit
def as_weights(codes, high, tails, PLANE: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Plane PLANE of the words, or its bytes, as weights in DTYPE."""
    if S.bits == 8:
        u = bytes_as(codes, high, OPERAND, DTYPE, S.lifted, S.paired)
    elif DTYPE == gl.float16:
        HALVES: gl.constexpr = E2M1_F16 if S.table else PLANES_F16
        u = gl.inline_asm_elementwise(HALVES[PLANE], "=r,r", [codes], dtype=gl.float16, is_pure=True, pack=2)
    else:
        TEXTS: gl.constexpr = E2M1_BF16 if S.table else PLANES_TINY if S.lifted else PLANES_BF16
        u = gl.inline_asm_elementwise(TEXTS[PLANE], "=r,r", [codes], dtype=gl.bfloat16, is_pure=True, pack=2)
    if S.lifted:
        return _lifted(u, tails, PLANE, DTYPE, S)
    else:
        return _weights(u, tails, PLANE, DTYPE, S)


@gluon.jit
def two_planes(ws, high, tails, FIRST: gl.constexpr, HALF: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Planes FIRST and FIRST + 1 of the record in shared memory, or of its half, as weights in DTYPE."""
    first = codes_at(ws, FIRST, HALF, OPERAND, S)
    second = first
    if S.bits == 8:
        second = codes_at(ws, FIRST + 1, HALF, OPERAND, S)
    return as_weights(first, high, tails, FIRST, OPERAND, DTYPE, S), as_weights(second, high, tails, FIRST + 1, OPERAND, DTYPE, S)


@gluon.jit
def tails_at(buffers, place, HALF: gl.constexpr, OPERAND: gl.constexpr, DTYPE: gl.constexpr, S: gl.constexpr):
    """Scales of the groups of the record in place `place` of shared memory, then their zeros; `_lifting` where that is for all of it."""
    GROUPS: gl.constexpr = S.groups
    found = ()
    for i in gl.static_range(2, 4):
        if (i == 2 and S.whole) or (i == 3 and S.zero == "none"):
            for _ in gl.static_range(GROUPS):
                found += (gl.to_tensor(0),)  # type: ignore[assignment]
        else:
            for g in gl.static_range(GROUPS):
                of_rows = buffers[i].index((place * GROUPS + g) * 2 + HALF)
                found += (of_rows.load(gl.SliceLayout(1, OPERAND)),)  # type: ignore[assignment]
    if S.lifts_once:
        return _lifting(found, 0, OPERAND, DTYPE, S)
    else:
        return found

"""Bytes to floating point in registers, exactly: w = u - point, from the words and bytes of `layouts/gpu_tiles.py`.

A float whose mantissa's low bits are a code is a constant plus the code: 0x6400 is 1024 in float16 and 0x6400 | u is 1024 + u;
0x4300 is 128 in bfloat16 and 0x4300 | u is 128 + u for u < 128. (Kim et al., Who Says Elephants Can't Run, 2022, section 3.)

    4 bits   float16    planes 0, 2: 1024 + u          (w & 0x000f) | 0x6400, one LOP3 for two elements; w >> 8 first for plane 2
                        planes 1, 3: 1024 + 16 * u     (w & 0x00f0) | 0x6400, so that one shift serves eight elements
             bfloat16   128 + u                        its mantissa is too short for 16 * u: a shift for each plane but the first
    8 bits   float16    1024 + (q + 128)               PRMT puts the bytes of w ^ 0x80808080 under 0x64
             bfloat16   (128 + low 7 bits) - (128 + 128 * sign bit) = q: two LOP3 and a subtraction, no constant left to take off
             Where neighbours are every other byte (`int8_pairs`), a shift of the word takes the place of its two PRMT.

4-bit floats (e2m1: a sign, two bits of exponent, one of mantissa) are floats once their bits are where those of float16 or bfloat16 are,
but for the exponent's bias: a multiplication, by 2^15 or 2^127, gives twice their value, subnormal ones included (`e2m1`).

`minus` takes the constant and the point off with one fused multiply-add for two elements, which also divides by 16. All of it is
exact, for points too: integers of at most 8 bits are numbers of all three types.

The functions take ASM: inline PTX where it is true, plain Triton (the interpreter, AMD) where not; the bits are the same. Integers
become bfloat16 by way of float32, as the interpreter knows no other way. What differs from plane to plane are operands, not
instructions: planes are in different registers of a lane, so that each of them is a constant of its instruction.
"""

from __future__ import annotations

import triton
import triton.language as tl

_NIBBLES_F16 = tl.constexpr(
    "{.reg .b32 s, t; and.b32 s, $2, 255; shr.b32 t, $1, s; lop3.b32 $0, t, $3, 0x64006400, 0xea;}"  # (w >> s & mask) | magic
)
_NIBBLES_BF16 = tl.constexpr("{.reg .b32 s, t; and.b32 s, $2, 255; shr.b32 t, $1, s; lop3.b32 $0, t, $3, 0x43004300, 0xea;}")
BYTES_F16 = tl.constexpr(
    "{.reg .b32 t; xor.b32 t, $2, 0x80808080; prmt.b32 $0, t, 0x64646464, 0x4140; prmt.b32 $1, t, 0x64646464, 0x4342;}"
)
BYTES_BF16 = tl.constexpr(
    "{.reg .b32 t, m, s, n; mov.b32 n, 0xbf80bf80;"  # -1
    + "".join(
        f"prmt.b32 t, $2, 0x43434343, {order}; and.b32 m, t, 0xff7fff7f; and.b32 s, t, 0xff80ff80; fma.rn.bf16x2 ${i}, s, n, m;"
        for i, order in enumerate(("0x4140", "0x4342"))
    )
    + "}"
)


def _e2m1(shifted: str, down: int, mask: str, power: str, fma: str) -> str:
    """`shifted` puts the four bits highest in each half of t: the sign is there then, and magnitudes go where those of a float are. Times a
    power of two; + 0, so that there is no -0."""
    return (
        f"{{.reg .b32 s, t, u; {shifted} shr.b32 u, t, {down}; and.b32 u, u, {mask}; lop3.b32 t, t, 0x80008000, u, 0xea;"
        f"mov.b32 s, 0; mov.b32 u, {power}; {fma} $0, t, u, s;}}"
    )


_F16, _BF16 = (3, "0x0e000e00", "0x78007800", "fma.rn.f16x2"), (6, "0x01c001c0", "0x7f007f00", "fma.rn.bf16x2")
_E2M1_F16, _E2M1_BF16 = (tl.constexpr(_e2m1("and.b32 s, $2, 255; shl.b32 t, $1, s;", *how)) for how in (_F16, _BF16))
# One function for each plane, for kernels that take planes one by one.
E2M1_F16, E2M1_BF16 = (tl.constexpr(tuple(_e2m1(f"shl.b32 t, $1, {12 - 4 * j};", *how) for j in range(4))) for how in (_F16, _BF16))
# t = each half of $1 >> its half of $2. In the layouts that kernels have the shifts are equal constants, and one instruction is left.
_SHIFTED = (
    "{.reg .pred p; .reg .b32 s, t, u, v; and.b32 s, $2, 0xffff; shr.b32 u, $2, 16; setp.eq.u32 p, s, u; shr.b32 t, $1, s;"
    "shr.b32 v, $1, 16; shr.b32 v, v, u; shl.b32 v, v, 16; and.b32 u, $1, 0xffff; shr.b32 u, u, s; or.b32 v, u, v; selp.b32 t, t, v, p;"
)
_PAIRS_F16 = tl.constexpr(_SHIFTED + "lop3.b32 $0, t, 0x00ff00ff, 0x64806480, 0x6a;}")  # (t & mask) ^ magic
_PAIRS_BF16 = tl.constexpr(
    _SHIFTED + ".reg .b32 m, n; mov.b32 n, 0xbf80bf80;"  # -1
    "lop3.b32 m, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 s, t, 0x00800080, 0x43004300, 0xea; fma.rn.bf16x2 $0, s, n, m;}"
)
# The low and the high nibbles of four bytes as int8 16 * (u - 8).
HALVES = tl.constexpr(
    "{.reg .b32 t; shl.b32 t, $2, 4; lop3.b32 $0, t, 0x80808080, 0xf0f0f0f0, 0x28; lop3.b32 $1, $2, 0x80808080, 0xf0f0f0f0, 0x28;}"
)
_FMA_F16 = tl.constexpr("fma.rn.f16x2 $0, $1, $2, $3;")
_FMA_BF16 = tl.constexpr("fma.rn.bf16x2 $0, $1, $2, $3;")


@triton.jit
def fma(a, b, c, ASM: tl.constexpr):
    """a * b + c in float16 or bfloat16, two elements at a time; b and c broadcast to a. Rounded once (without ASM: by way of float32)."""
    b = tl.broadcast_to(b, a.shape)
    c = tl.broadcast_to(c, a.shape)
    if not ASM:
        return (a.to(tl.float32) * b.to(tl.float32) + c.to(tl.float32)).to(a.dtype)
    FMA: tl.constexpr = _FMA_F16 if a.dtype == tl.float16 else _FMA_BF16
    return tl.inline_asm_elementwise(FMA, "=r,r,r,r", [a, b, c], dtype=a.dtype, is_pure=True, pack=2)


@triton.jit
def nibbles(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int16 words [rows, 1, columns] -> their planes [rows, 4, columns] in DTYPE, still with the constant that `minus` takes off."""
    SHAPE: tl.constexpr = (words.shape[0], 4, words.shape[2])
    words = tl.broadcast_to(words, SHAPE)
    plane = tl.arange(0, 4)[None, :, None]
    if DTYPE == tl.float16:
        shift = plane // 2 * 8
        mask = tl.where(plane % 2 == 0, 0x000F, 0x00F0)
    else:
        shift = plane * 4
        mask = plane * 0 + 0x000F
    if not ASM:
        code = words.to(tl.int32) >> shift & mask
        return ((1024 if DTYPE == tl.float16 else 128) + code).to(tl.float32).to(DTYPE)
    else:
        shift = tl.broadcast_to(shift.to(tl.int16), SHAPE)
        mask = tl.broadcast_to(mask.to(tl.int16), SHAPE)
        if DTYPE == tl.float16:
            return tl.inline_asm_elementwise(_NIBBLES_F16, "=r,r,r,r", [words, shift, mask], dtype=tl.float16, is_pure=True, pack=2)
        else:
            return tl.inline_asm_elementwise(_NIBBLES_BF16, "=r,r,r,r", [words, shift, mask], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def e2m1(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int16 words [rows, 1, columns] of 4-bit floats -> twice the values of their planes, [rows, 4, columns] in DTYPE."""
    SHAPE: tl.constexpr = (words.shape[0], 4, words.shape[2])
    words = tl.broadcast_to(words, SHAPE)
    plane = tl.arange(0, 4)[None, :, None]
    if not ASM:
        return e2m1_codes(words.to(tl.int32) >> 4 * plane & 15).to(tl.float32).to(DTYPE)
    shift = tl.broadcast_to((12 - 4 * plane).to(tl.int16), SHAPE)
    if DTYPE == tl.float16:
        return tl.inline_asm_elementwise(_E2M1_F16, "=r,r,r", [words, shift], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_E2M1_BF16, "=r,r,r", [words, shift], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def e2m1_codes(u):
    """4-bit floats, int32 -> twice their values."""
    magnitude = u & 7
    code = tl.where(magnitude < 2, magnitude, 2 + (magnitude & 1) << (magnitude >> 1) >> 1)
    return tl.where(u > 7, -code, code)


@triton.jit
def int8_values(q, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int8 -> DTYPE; in float16 still with the constant 1024 + 128 that `minus` takes off."""
    if not ASM:
        if DTYPE == tl.float16:
            return (1152 + q.to(tl.int32)).to(tl.float32).to(DTYPE)
        else:
            return q.to(tl.float32).to(DTYPE)
    elif DTYPE == tl.float16:
        return tl.inline_asm_elementwise(BYTES_F16, "=r,=r,r", [q], dtype=tl.float16, is_pure=True, pack=4)
    else:
        return tl.inline_asm_elementwise(BYTES_BF16, "=r,=r,r", [q], dtype=tl.bfloat16, is_pure=True, pack=4)


@triton.jit
def int8_pairs(words, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """int16 words [rows, 1, columns] of two int8 -> `int8_values` of these, [rows, 2, columns], the lower byte first."""
    SHAPE: tl.constexpr = (words.shape[0], 2, words.shape[2])
    words = tl.broadcast_to(words, SHAPE)
    shift = tl.arange(0, 2)[None, :, None] * 8
    if not ASM:
        return int8_values((words.to(tl.int32) << (24 - shift) >> 24).to(tl.int8), DTYPE, ASM)
    shift = tl.broadcast_to(shift.to(tl.int16), SHAPE)
    if DTYPE == tl.float16:
        return tl.inline_asm_elementwise(_PAIRS_F16, "=r,r,r", [words, shift], dtype=tl.float16, is_pure=True, pack=2)
    else:
        return tl.inline_asm_elementwise(_PAIRS_BF16, "=r,r,r", [words, shift], dtype=tl.bfloat16, is_pure=True, pack=2)


@triton.jit
def minus(values, point, BITS: tl.constexpr, ASM: tl.constexpr):
    """What `nibbles` ([rows, 4, columns]) or `int8_values` gave -> u - point, exactly.

    point  integers in the range of u, which broadcast to `values`; None for signed codes
    """
    DTYPE: tl.constexpr = values.dtype
    SHAPE: tl.constexpr = (1, 4, 1) if BITS == 4 else (1,) * len(values.shape)
    if point is None:
        point = tl.full(SHAPE, 1 << (BITS - 1), tl.int16)
    point = point.to(tl.int16)
    factor = tl.full(SHAPE, 1.0, tl.float32)
    if DTYPE == tl.float16:
        constant = _negative(point, 1024, 0x6400, 0, DTYPE, ASM)
        if BITS == 4:
            odd = tl.arange(0, 4)[None, :, None] % 2 == 1
            constant = tl.where(odd, _negative(point, 64, 0x5400, 4, DTYPE, ASM), constant)
            factor = tl.where(odd, 0.0625, factor)
    elif BITS == 4:
        constant = _negative(point, 128, 0x4300, 0, DTYPE, ASM)
    else:
        constant = (128 - point).to(tl.float32).to(DTYPE)
    return fma(values, factor.to(DTYPE), constant, ASM)


@triton.jit
def _negative(point, BASE: tl.constexpr, MAGIC: tl.constexpr, SHIFT: tl.constexpr, DTYPE: tl.constexpr, ASM: tl.constexpr):
    """-(BASE + point): MAGIC is BASE, in whose mantissa a unit is 1 << SHIFT."""
    if ASM:
        return (point << SHIFT | MAGIC | -0x8000).to(DTYPE, bitcast=True)
    else:
        return (-BASE - point).to(tl.float32).to(DTYPE)

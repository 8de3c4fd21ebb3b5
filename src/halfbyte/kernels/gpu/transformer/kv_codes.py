"""Keys and values in 8 bits, in registers: `layouts/records.py` has the format.

    encoded: float32 x -> codes, scales, x' = scale * code          decoded: codes, scales -> x'

Codes are read as words of four, and a head is in registers as its quarters: what comes from byte 0 of all words, from byte 1, and so on.
So two numbers that a matrix unit wants side by side come from the same byte of two words, and nothing is packed.

Arithmetic: as on a CPU, bit for bit; x' is exact in float32 and is rounded once, to the type of the product that reads it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from halfbyte.kernels.gpu.arithmetic import INTERPRETED, MAGIC
from halfbyte.layouts import records
from halfbyte.machine import Gpu

BLOCK = tl.constexpr(records.BLOCK)
MOST = tl.constexpr(float(records.MOST))
LEAST_SCALE = tl.constexpr(records.LEAST_SCALE)
INFINITY_BITS = tl.constexpr(0x7F800000)
LEAST_WIDE = 64  # elements of a head: fewer words are not for the matrix units
# Two words become 4 times two numbers. A code c becomes the float32 32768 + 128 + c, whose third byte is c + 128, as conversions of bytes
# take four instructions each: scale * c is that times scale, less 32896 * scale, both exact.
_PAIR = "prmt.b32 c, u, $10, {sel}; prmt.b32 d, v, $10, {sel}; fma.rn.f32 f, c, $6, $8; fma.rn.f32 g, d, $7, $9; "
_ASM = "{ .reg .b32 u, v, c, d; .reg .f32 f, g; xor.b32 u, $4, 0x80808080; xor.b32 v, $5, 0x80808080; "
_ASM += "".join(_PAIR.format(sel=f"0x74{i}4") + f"cvt.rn.TYPE.f32 ${i}, g, f; " for i in range(4)) + "}"
_TO_BFLOAT16 = tl.constexpr(_ASM.replace("TYPE", "bf16x2"))
_TO_FLOAT16 = tl.constexpr(_ASM.replace("TYPE", "f16x2"))
_REGISTERS = tl.constexpr("=r,=r,=r,=r,r,r,r,r,r,r,r,r")


class Tile(NamedTuple):
    """Tokens, warps and stages of a block; the blocks that a multiprocessor has room for; and about how many microseconds a block takes to
    begin and end, and for a tile."""

    tokens: int
    warps: int
    stages: int
    blocks: int
    start: float
    each: float


# Few blocks of four warps, or many of one, whose tiles no other warp waits for.
_TILES = (Tile(64, 4, 3, 3, 7.5, 1.7), Tile(16, 1, 3, 8, 10.0, 1.4))
_WIDE_TILES = (Tile(16, 4, 2, 2, 9.0, 1.9),)  # of what is too much for the registers of a warp
_WIDEST_TILES = (Tile(16, 8, 2, 2, 9.0, 1.9),)
_SPLIT = 0.3  # microseconds to add up what one block more has
_MOST_SPLITS = 64


def tiled(programs: int, rows: int, wide: int, size: int, dtype: torch.dtype, gpu: Gpu) -> tuple[Tile, int]:
    """The tile for caches of `size` tokens, and the blocks that share each of `programs` key heads, whose queries are `rows` of `wide`."""
    narrow = dtype != torch.float32 and rows * wide <= 2048
    tiles = _TILES if narrow else _WIDE_TILES if rows * wide <= 4096 else _WIDEST_TILES

    def us(tile: Tile, splits: int) -> float:
        rounds, longest = -(-programs * splits // (tile.blocks * gpu.sms)), -(-size // (tile.tokens * splits))
        return rounds * (tile.start + tile.each * longest) + _SPLIT * splits

    ways = [(tile, n) for tile in tiles for n in range(1, max(1, min(_MOST_SPLITS, -(-size // tile.tokens))) + 1)]
    return min(ways, key=lambda way: us(*way))


@triton.jit
def magic_bits():
    """The bits of float32 32768, from where the compiler does not know them: constants of `prmt` take it a move each, but for one."""
    if INTERPRETED:
        return 0x47000000
    else:
        asm: tl.constexpr = "{ .reg .b32 a; mov.u32 a, %lanemask_lt; mov.u32 $0, %lanemask_gt; and.b32 $0, $0, a; or.b32 $0, $0, $1; }"
        return tl.inline_asm_elementwise(asm, "=r,r", [tl.full((), 0x47000000, tl.int32)], dtype=tl.int32, is_pure=True, pack=1)


@triton.jit
def encoded(x, d, GROUPS: tl.constexpr):
    """x float32 [W], of the elements d -> codes int8 [W], scales float32 [GROUPS] that bfloat16 holds, and x' float32 [W]."""
    in_group = (d // BLOCK)[None, :] == tl.arange(0, GROUPS)[:, None]
    # Not of x in another shape: Triton 3.6 reduces wrongly where the lanes of a row are not side by side.
    bits = tl.abs(x).to(tl.int32, bitcast=True)  # in the order of the numbers, NaN last
    largest = tl.max(tl.where(in_group, bits[None, :], 0), axis=1)
    scales = largest.to(tl.float32, bitcast=True)
    scales = tl.div_rn(scales, tl.full(scales.shape, MOST, tl.float32))
    scales = tl.where(largest < INFINITY_BITS, _to_bfloat16(tl.where(scales < LEAST_SCALE, 0.0, scales)), float("nan"))
    of_each = tl.sum(tl.where(in_group, scales[:, None], 0.0), axis=0)
    codes = tl.where(of_each > 0, tl.div_rn(x, tl.where(of_each > 0, of_each, 1.0)), 0.0)
    codes = (codes + MAGIC) - MAGIC
    return codes.to(tl.int8), scales, codes * of_each


@triton.jit
def decoded(words, scales, magic, dtype: tl.constexpr):
    """words int32 [R, W / 4], scales bfloat16 [R, G] -> the `quarters` of x' [R, W] of `dtype`."""
    ROWS: tl.constexpr = words.shape[0]
    WORDS: tl.constexpr = words.shape[1]
    GROUPS: tl.constexpr = scales.shape[1]
    blocks = tl.reshape(words, (ROWS, GROUPS, WORDS // GROUPS))
    scales = tl.broadcast_to(scales.to(tl.float32)[:, :, None], blocks.shape)
    if INTERPRETED or dtype == tl.float32:
        x0 = ((blocks << 24 >> 24).to(tl.float32) * scales).to(dtype)
        x1 = ((blocks << 16 >> 24).to(tl.float32) * scales).to(dtype)
        x2 = ((blocks << 8 >> 24).to(tl.float32) * scales).to(dtype)
        x3 = ((blocks >> 24).to(tl.float32) * scales).to(dtype)
    else:
        operands = blocks, scales, scales * -32896.0, tl.broadcast_to(magic, blocks.shape)
        if dtype == tl.bfloat16:
            x0, x1, x2, x3 = tl.inline_asm_elementwise(
                _TO_BFLOAT16, _REGISTERS, operands, dtype=(tl.bfloat16, tl.bfloat16, tl.bfloat16, tl.bfloat16), is_pure=True, pack=2
            )
        else:
            x0, x1, x2, x3 = tl.inline_asm_elementwise(
                _TO_FLOAT16, _REGISTERS, operands, dtype=(tl.float16, tl.float16, tl.float16, tl.float16), is_pure=True, pack=2
            )
    shape: tl.constexpr = (ROWS, WORDS)
    return tl.reshape(x0, shape), tl.reshape(x1, shape), tl.reshape(x2, shape), tl.reshape(x3, shape)


@triton.jit
def quarters(x):
    """x [R, W] -> what comes from byte 0, 1, 2 and 3 of its words, [R, W / 4] each."""
    ROWS: tl.constexpr = x.shape[0]
    WORDS: tl.constexpr = x.shape[1] // 4
    even, odd = tl.split(tl.reshape(x, (ROWS, WORDS, 2, 2)))
    x0, x2 = tl.split(even)
    x1, x3 = tl.split(odd)
    return x0, x1, x2, x3


@triton.jit
def whole(x):
    """The inverse of `quarters`."""
    ROWS: tl.constexpr = x[0].shape[0]
    WORDS: tl.constexpr = x[0].shape[1]
    return tl.reshape(tl.join(tl.join(x[0], x[2]), tl.join(x[1], x[3])), (ROWS, 4 * WORDS))


@triton.jit
def _to_bfloat16(x):
    """x float32, finite, rounded to what bfloat16 holds, ties to even; Triton's interpreter would cut."""
    bits = x.to(tl.int32, bitcast=True)
    return ((bits + 0x7FFF + ((bits >> 16) & 1)) & -65536).to(tl.float32, bitcast=True)

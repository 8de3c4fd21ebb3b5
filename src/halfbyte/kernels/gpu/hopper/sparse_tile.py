"""Sums [64, columns] of a panel of a 2:4 sparse weight and a few rows of x, a K slab (128 of K) at a time, for `linear/skinny_hopper.py`:
non-zero codes are dequantized in registers, and mma.sp.m16n8k32 selects the elements of x that they multiply.

Weight: `layouts/gpu_sparse.py`. Only non-zero codes are dequantized, half as many instructions as for all. Tensors in registers are [tiles
of 8 columns, warp, lane] with one element per thread for each tile, so that an instruction for all elements is one of the warp.

Arithmetic: as in `skinny_tile.py` for few rows: u - zero point is exact, the sums of each block are float32 and multiplied by its scale.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl

from halfbyte.kernels.gpu.hopper.gluon_compat import reinterpret

WIDE = 32
_WORDS = gl.constexpr(gl.NVMMASharedLayout(swizzle_byte_width=128, element_bitwidth=32, rank=2))


@gluon.constexpr_function
def _lane_layout(columns):
    """Return the layout of registers. With many columns a warp has every other tile and every other 16 rows, so that two warps read x,
    not four."""
    return gl.BlockedLayout([1, 1, 1], [1, 1, 32], [2, 2, 1] if columns >= WIDE else [1, 4, 1], [2, 0, 1])


@gluon.constexpr_function
def _word_layout(columns, words):
    """Return the layout of lines of 32 words [4 * words, 32], `words` per thread for each 16 rows, for `_lane_layout`."""
    bits = [
        [0, 1 << i] if i < 5 else [1 << i - 5, 0] for i in range(words.bit_length() + 6)
    ]  # of a word's position: register, lane, 16 rows
    *registers, a, b, c, d, e, odd, second = bits
    if columns >= WIDE:
        return gl.DistributedLinearLayout([*registers, second], [a, b, c, d, e], [[0, 0], odd], [], [4 * words, 32])
    return gl.DistributedLinearLayout(registers, [a, b, c, d, e], [odd, second], [], [4 * words, 32])


@gluon.constexpr_function
def _product(kind, selector):
    """Return the sparse mma instruction."""
    shape = f"mma.sp::ordered_metadata.sync.aligned.m16n8k32.row.col.f32.{kind}.{kind}.f32"
    return f"{shape} {{$0, $1, $2, $3}}, {{$4, $5, $6, $7}}, {{$8, $9, $10, $11}}, {{$12, $13, $14, $15}}, $16, {selector};"


@gluon.constexpr_function
def _nibbles(j, kind):
    """Return code for nibble j of both halves of $1, as in decode.py: times 1 (or 1/16), plus $2."""
    if kind == "f16":
        shift, mask, magic, one = j // 2 * 8, ("0x000f000f", "0x00f000f0")[j % 2], "0x64006400", ("0x3c003c00", "0x2c002c00")[j % 2]
    else:
        shift, mask, magic, one = 4 * j, "0x000f000f", "0x43004300", "0x3f803f80"
    return (
        f"{{.reg .b32 t, o; mov.b32 o, {one}; shr.b32 t, $1, {shift}; lop3.b32 t, t, {mask}, {magic}, 0xea; fma.rn.{kind}x2 $0, t, o, $2;}}"
    )


@gluon.constexpr_function
def _bytes(j, kind):
    """Return code for byte j of both halves: signed, plus $2; in float16 plus 1152 as well."""
    if kind == "f16":
        return (
            f"{{.reg .b32 t, o; mov.b32 o, 0x3c003c00; shr.b32 t, $1, {8 * j}; lop3.b32 t, t, 0x00ff00ff, 0x64806480, 0x6a; "
            "fma.rn.f16x2 $0, t, o, $2;}"
        )
    return (
        f"{{.reg .b32 t, m, s, n, o; mov.b32 n, 0xbf80bf80; mov.b32 o, 0x3f803f80; shr.b32 t, $1, {8 * j}; "
        "lop3.b32 m, t, 0x007f007f, 0x43004300, 0xea; lop3.b32 s, t, 0x00800080, 0x43004300, 0xea; "
        "fma.rn.bf16x2 t, s, n, m; fma.rn.bf16x2 $0, t, o, $2;}"
    )


_OUT_IN = gl.constexpr("=f,=f,=f,=f,r,r,r,r,r,r,r,r,f,f,f,f,r")


@gluon.constexpr_function
def _x_layout(columns):
    """Return the layout of pairs of 32 k [columns, 16] that an instruction needs, as ldmatrix loads them; the same in all warps, or in
    two."""
    tiles = [[8 << i, 0] for i in range((columns // 8).bit_length() - 1)]
    warps = [tiles.pop(0), [0, 0]] if columns >= WIDE else [[0, 0], [0, 0]]
    lanes = [[0, 1], [0, 2], [1, 0], [2, 0], [4, 0]]
    return gl.DistributedLinearLayout([[0, 4], [0, 8], *tiles], lanes, warps, [], [columns, 16])


@gluon.jit
def _four_registers(words, LANES: gl.constexpr):
    """Split [a, b, lane, 2, 2] into its four registers [a, b, lane], in order."""
    even, odd = gl.split(words)
    first, third = gl.split(even)
    second, fourth = gl.split(odd)
    return (
        gl.convert_layout(first, LANES, assert_trivial=True),
        gl.convert_layout(second, LANES, assert_trivial=True),
        gl.convert_layout(third, LANES, assert_trivial=True),
        gl.convert_layout(fourth, LANES, assert_trivial=True),
    )


@gluon.jit
def _split_registers(acc, TILES: gl.constexpr, LANES: gl.constexpr):
    """Split sums [64, columns] into the four registers of each tile: [tiles, 4, 32]."""
    #                  nt rowhalf row tile k4 pair
    acc = acc.reshape([4, 2, 8, TILES, 4, 2]).permute([3, 0, 2, 4, 1, 5]).reshape([TILES, 4, 32, 2, 2])
    return _four_registers(acc, LANES)


@gluon.jit
def _join_registers(sums, TILES: gl.constexpr, MMA: gl.constexpr):
    """Return the inverse of `_split_registers`."""
    acc = gl.join(gl.join(sums[0], sums[2]), gl.join(sums[1], sums[3]))  # ..., rowhalf, pair
    acc = acc.reshape([TILES, 4, 8, 4, 2, 2]).permute([1, 4, 2, 0, 3, 5]).reshape([64, 8 * TILES])
    return gl.convert_layout(acc, MMA, assert_trivial=True)


@gluon.jit
def _negated_point(point, KIND: gl.constexpr, POSITION: gl.constexpr, S: gl.constexpr):
    """Return the addend that subtracts zero point and magic constant, twice in a register."""
    SHIFT: gl.constexpr = 4 if KIND == "f16" and S.bits == 4 and POSITION % 2 else 0  # a 16th of 1024 + 16 * u
    BASE: gl.constexpr = 0xC300 if KIND == "bf16" else 0xD400 if SHIFT else 0xE400  # -128, -64, -1024
    if KIND == "bf16" and S.bits == 8:  # signed codes are u - 128
        if S.has_points:
            half = (128 - point).to(gl.float32).to(gl.bfloat16).to(gl.int16, bitcast=True).to(gl.int32) & 0xFFFF
        else:
            half = gl.full([1, 4, 32], 0x8000, gl.int32, layout=_lane_layout(S.columns))
    elif S.has_points:
        half = (point << SHIFT) + BASE
    else:
        half = gl.full([1, 4, 32], BASE + ((1 << S.bits - 1) << SHIFT), gl.int32, layout=_lane_layout(S.columns))
    return half | half << 16


@gluon.jit
def _multiply(sums, words, points, metadata, x, J: gl.constexpr, S: gl.constexpr):
    """Return sums + the products of 32 k, those of instruction J of a K slab."""
    PER_WORD: gl.constexpr = 16 // S.bits
    TILES: gl.constexpr = S.columns // 8
    KIND: gl.constexpr = "f16" if x.dtype == gl.float16 else "bf16"
    TEXT: gl.constexpr = _nibbles(J, KIND) if S.bits == 4 else _bytes(J % PER_WORD, KIND)
    w = ()
    for r in gl.static_range(4):
        constant = _negated_point(points[r % 2 * 2], KIND, J % PER_WORD, S)
        w += (gl.inline_asm_elementwise(TEXT, "=r,r,r", [words[r], constant], dtype=gl.int32, is_pure=True, pack=1),)  # type: ignore[assignment]
    pairs = reinterpret(x, gl.int32, [S.columns, 32], _WORDS).slice(J % 2 * 16, 16, dim=1).load(_x_layout(S.columns))
    # tile, n, register, k4
    b = _four_registers(pairs.reshape([TILES, 8, 4, 4]).permute([0, 1, 3, 2]).reshape([TILES, 1, 32, 2, 2]), _lane_layout(S.columns))
    args = w + b + sums + (metadata,)
    return gl.inline_asm_elementwise(
        _product(KIND, J % 2), _OUT_IN, args, dtype=(gl.float32, gl.float32, gl.float32, gl.float32), is_pure=False, pack=1
    )


@gluon.jit
def add_sparse(acc, ring, stage, first, block, PANEL: gl.constexpr, SLAB: gl.constexpr, S: gl.constexpr):
    """Return acc + the products of a K slab. Its x begins with the `first` piece, its scales and zero points with the `block`-th of
    their buffers."""
    xs, ws, ss, zs, positions, _full, _empty = ring
    MMA: gl.constexpr = acc.type.layout
    TILES: gl.constexpr = S.columns // 8
    BLOCKS: gl.constexpr = S.blocks_per_slab
    PLANES: gl.constexpr = 4 // BLOCKS  # instructions of a block
    PER_WORD: gl.constexpr = 16 // S.bits  # codes per word of a thread
    SLAB_INDEX: gl.constexpr = PANEL * S.stage_slabs + SLAB
    HALVES: gl.constexpr = S.bits // 4
    LANES: gl.constexpr = _lane_layout(S.columns)
    pairs_of_words = positions.index(stage).slice(SLAB_INDEX * 8, 8, dim=0).load(_word_layout(S.columns, 2)).reshape([1, 4, 32, 2])
    low, high = gl.split(pairs_of_words)
    metadata = (gl.convert_layout(low, LANES, assert_trivial=True), gl.convert_layout(high, LANES, assert_trivial=True))
    words = ()
    for g in gl.static_range(BLOCKS):
        if S.one_block:
            sums = _split_registers(acc, TILES, LANES)
        else:
            zero = gl.zeros([TILES, 4, 32], gl.float32, layout=LANES)
            sums = (zero, zero, zero, zero)
        points = metadata + metadata  # a placeholder that is never read
        if S.has_points:
            points = zs.index(block + g).slice(PANEL * 64, 64, dim=1).permute([1, 0]).load(MMA).to(gl.int32)
            points = _split_registers(points + gl.zeros([64, 8], gl.int32, layout=MMA), 1, LANES)
        for i in gl.static_range(PLANES):
            if (g * PLANES + i) % PER_WORD == 0:
                at = (
                    ws.index(stage)
                    .slice((SLAB_INDEX * HALVES + (g * PLANES + i) // PER_WORD) * 16, 16, dim=0)
                    .load(_word_layout(S.columns, 4))
                )
                words = _four_registers(at.reshape([1, 4, 32, 2, 2]), LANES)
            sums = _multiply(
                sums, words, points, metadata[(g * PLANES + i) // 2], xs.index(first + (g * PLANES + i) // 2), g * PLANES + i, S
            )
        part = _join_registers(sums, TILES, MMA)
        if S.one_block:
            acc = part
        else:
            scale = ss.index(block + g).slice(PANEL * 64, 64, dim=1).permute([1, 0]).load(MMA)
            acc += part * scale.to(gl.float32)
    return acc

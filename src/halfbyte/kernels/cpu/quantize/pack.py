"""Canonical codes into the layout `cpu_tiles`, at the speed of memory: the same bytes that `layouts.cpu_tiles.pack` makes.

Each thread takes whole panels. Eight codes of a row are one or two 32-bit words both in canonical order and in the layout;
only the nibbles inside a word change places, and words of a row lie 128 bytes apart.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import PACK
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled, phase
from halfbyte.kernels.cpu.linear.packed_planes import eight_to_planes
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import PANEL

_ELEMENTS_A_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class PackSpec:
    """Bits of a code; whether it is signed; bytes of a scale and of a zero; whether there are sums of pairs; the fewer bits in which codes
    are laid out, and elements of a unit then."""

    bits: int
    signed: bool
    scale_bytes: int
    zero_bytes: int
    pair_sums: bool
    packed_bits: int = 0
    unit: int = 0


@phase
def build(spec: PackSpec, isa: ISA, f: Function) -> None:
    args, thread, threads = f.parameters
    data, scale, zero, out = (PACK.load(args, name, "ptr") for name in ("data", "scale", "zero", "out"))
    rows, stride, blocks = (PACK.load(args, name) for name in ("rows", "data_stride", "blocks"))
    scale_stride, panel_bytes = PACK.load(args, "scale_stride"), PACK.load(args, "panel_bytes")
    panels = (rows + (PANEL - 1)) // PANEL
    for p in f.loop((thread + 1) * panels // threads, thread * panels // threads):
        for lane in f.loop(PANEL):
            row = p * PANEL + lane
            real = row.below(rows)
            codes, record = f.variable(data + row * stride), f.variable(out + p * panel_bytes)
            for b in f.loop(blocks):
                ends = (b + 1).equals(blocks)
                groups = ends.select(PACK.load(args, "last_groups"), PACK.load(args, "groups"))
                padded = ends.select(PACK.load(args, "last_padded_groups"), PACK.load(args, "padded_groups"))
                to, tail = record.value + lane * 4, record.value + padded * (PANEL * (spec.packed_bits or spec.bits))
                stands_for_zero = f.variable(f.value("i32", (0x88888888 if spec.bits == 4 else 0x80808080) if spec.signed else 0))
                pair_totals = f.variable(f.value("<4 x i32>", 0))
                done = real.select(groups, 0)
                if spec.packed_bits:
                    _planes(spec, codes.value, done, padded, to)
                    done = padded
                with f.when(real):
                    for g in () if spec.packed_bits else f.loop(groups):
                        _eight(spec, codes.value + g * spec.bits, to + g * (PANEL * spec.bits))
                        if spec.pair_sums:
                            pair_totals.value = pair_totals.value + _pair_sum(spec, codes.value + g * spec.bits)
                    number = row * scale_stride + b
                    _copy(scale + number * spec.scale_bytes, tail + lane * spec.scale_bytes, spec.scale_bytes)
                    if spec.zero_bytes:
                        _copy(zero + number * spec.zero_bytes, tail + lane * spec.zero_bytes + PANEL * spec.scale_bytes, spec.zero_bytes)
                    if spec.zero_bytes == 1:
                        point = (zero + number).load("i8").to("i32", unsigned=True)
                        stands_for_zero.value = point * (0x11111111 if spec.bits == 4 else 0x01010101)
                for g in f.loop(padded, start=done):
                    for word in range(spec.bits // 4):
                        (to + g * (PANEL * spec.bits)).store(stands_for_zero.value, 4 * PANEL * word, 4)
                if spec.pair_sums:
                    fill = stands_for_zero.value & 255
                    total = pair_totals.value.reduce("add") + fill * fill * 4 * (padded - done).to("i32")
                    (tail + lane * 4).store(total, PANEL * (spec.scale_bytes + spec.zero_bytes), 4)
                codes.value = codes.value + groups * spec.bits
                record.value = tail + cpu_tiles.tail_bytes(spec.scale_bytes, spec.zero_bytes, pair_sums=spec.pair_sums)


def _eight(spec: PackSpec, source: Value, to: Value) -> None:
    """Eight codes of one row."""
    if spec.bits == 8:
        for word in range(2):
            codes = source.load("i32", 4 * word)
            to.store(codes ^ 0x80808080 if spec.signed else codes, 4 * PANEL * word, 4)
        return
    codes = source.load("i32")
    # From nibbles 01234567 (k = 0 … 7) to 04152637, by exchanging neighbours of 8 and then of 4 bits.
    for distance, mask in ((8, 0x0000FF00), (4, 0x00F000F0)):
        moved = (codes ^ (codes >> distance)) & mask
        codes = codes ^ moved ^ (moved << distance)
    to.store(codes, 0, 4)


def _planes(spec: PackSpec, source: Value, groups: Value, padded: Value, to: Value) -> None:
    """All codes of a block of one row, in units of two planes; those beyond so many groups of eight stand for 0."""
    f, eights, together = source.fn, spec.unit // 8, cpu_tiles.plane_groups(spec.packed_bits) // 2
    for u in f.loop(padded // eights):
        unit = to + u * (spec.unit // 8 * PANEL * spec.packed_bits)
        for byte in range(eights // together):
            second = f.value("i32", 0)
            for place in range(together):
                i = byte * together + place
                words = [f.variable(f.value("i32", 0)) for _ in range(2)]
                with f.when((u * eights + i).below(groups)):
                    for w, word in enumerate(words):
                        word.value = source.load("i32", (u * eights + i) * 8 + 4 * w)
                first, more = eight_to_planes(spec.packed_bits, spec.signed, [word.value for word in words], place)
                second = second | more
                unit.store(first, i * 4 * PANEL, 4)
            unit.store(second, (eights + byte) * 4 * PANEL, 4)


def _pair_sum(spec: PackSpec, source: Value) -> Value:
    """Four products of neighbours among eight codes of one row, as they are stored."""
    words = source.load("<4 x i16>")
    if spec.signed:
        words = words ^ 0x8080
    return (words & 255).to("i32", unsigned=True) * (words >> 8).to("i32", unsigned=True)


def _copy(source: Value, to: Value, size: int) -> None:
    to.store(source.load(f"i{8 * size}", 0, size), 0, size)


def supports(codes: Codes) -> str | None:
    """Why `pack` can't take these codes; None if it can."""
    geo = cpu_tiles.geometry(codes.format, codes.shape)
    if geo.nbytes == 0:
        return "there is nothing to pack"
    if geo.k % 8 or geo.block % 8:
        return f"it takes eight codes at a time, and K = {geo.k} or the block of {geo.block} is not a multiple of that"
    if geo.format.block == "tensor" or geo.blocks != codes.scale.shape[-1]:
        return "scales and records do not go one to one"
    return None


def pack(codes: Codes) -> Packed:
    """`layouts.cpu_tiles.pack(codes)`, fast. The caller asks `supports` first."""
    fmt, geo = codes.format, cpu_tiles.geometry(codes.format, codes.shape)
    data, scale = codes.data.reshape(geo.n, -1).contiguous(), codes.scale.contiguous()
    zero: Tensor | None = None if codes.zero is None else codes.zero.contiguous()
    out = cpu_tiles.allocate(geo.nbytes)
    unit = geo.unit if fmt.packed_bits else 0
    spec = PackSpec(fmt.bits, fmt.signed, geo.scale_bytes, geo.zero_bytes, cpu_tiles.has_pair_sums(fmt), fmt.packed_bits, unit)
    block = PACK.struct().pack(
        *(compiled(build, spec, current()), 0, runtime.openmp_address(), 0),
        *(data.data_ptr(), data.shape[1], geo.n, scale.data_ptr(), 0 if zero is None else zero.data_ptr(), geo.blocks),
        *(out.data_ptr(), geo.panel_bytes, geo.blocks, geo.block // 8, geo.padded // 8, geo.last // 8, geo.last_padded // 8),
    )
    runtime.run(block, geo.n * geo.k // _ELEMENTS_A_THREAD)
    return Packed(fmt, codes.shape, cpu_tiles.NAME, out)

"""Codes in canonical order -> the layout `cpu_tiles`, at the speed of memory: byte for byte what `layouts.cpu_tiles.pack` returns.

    canonical  [N, K]        row 0: | k = 0 … 7 | k = 8 … 15 | …
    panel of 32 rows         | k = 0 … 7 of row 0 | of row 1 | … | k = 8 … 15 of row 0 | … | scales | zeros | sums of pairs      a record

Eight codes of a row are one or two 32-bit words in both orders, so that only the nibbles inside of a word change places. `ops.functions`
packs by it where `supports` allows.
"""

from __future__ import annotations

from dataclasses import dataclass

from torch import Tensor

from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen.arguments import PACK
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, arguments, compiled, phase, run
from halfbyte.kernels.cpu.linear.packed_planes import eight_to_planes
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import PANEL

_ELEMENTS_A_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class PackSpec:
    """What the kernel is generated for.

    Attributes:
        bits: Bits of a canonical code.
        signed: Codes are signed; the layout has them unsigned.
        scale_bytes, zero_bytes: Bytes of a scale, and of a zero: 1 for points, 0 for none.
        pair_sums: Records have sums of products of adjacent codes.
        packed_bits: 5 or 6, where 8-bit codes are laid out in planes of so many bits; else 0.
        unit: Elements of a unit of these planes.
    """

    bits: int
    signed: bool
    scale_bytes: int
    zero_bytes: int
    pair_sums: bool
    packed_bits: int = 0
    unit: int = 0

    @property
    def zero_code(self) -> int:
        """A word of codes of signed 0, as the layout has them; with zero points, these are the code of 0."""
        return (0x88888888 if self.bits == 4 else 0x80808080) if self.signed else 0


@phase
def build(spec: PackSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel: threads take whole panels, row by row; rows that pad the last panel have codes of 0 and no scales."""
    _Packer(spec, isa, f).emit()


class _Packer(Emitter):
    block = PACK
    spec: PackSpec

    def __init__(self, spec: PackSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, self.threads = f.parameters
        self.data, self.scale, self.zero, self.out = map(self.pointer, ("data", "scale", "zero", "out"))
        self.rows, self.stride, self.blocks = map(self.get, ("rows", "data_stride", "blocks"))
        self.scale_stride, self.panel_bytes = self.get("scale_stride"), self.get("panel_bytes")

    def emit(self) -> None:
        f, spec = self.f, self.spec
        panels = (self.rows + (PANEL - 1)) // PANEL
        for p in f.share(panels):
            for lane in f.loop(PANEL):
                row = p * PANEL + lane
                real = row.below(self.rows)
                codes, record = f.variable(self.data + row * self.stride), f.variable(self.out + p * self.panel_bytes)
                for b in f.loop(self.blocks):
                    ends = (b + 1).equals(self.blocks)
                    groups = ends.select(self.get("last_groups"), self.get("groups"))
                    padded = ends.select(self.get("last_padded_groups"), self.get("padded_groups"))
                    to, tail = record.value + lane * 4, record.value + padded * (PANEL * (spec.packed_bits or spec.bits))
                    self._block(codes.value, to, (groups, padded), real, row * self.scale_stride + b, (tail, lane))
                    codes.value = codes.value + groups * spec.bits
                    record.value = tail + cpu_tiles.tail_bytes(spec.scale_bytes, spec.zero_bytes, pair_sums=spec.pair_sums)

    def _block(
        self, codes: Value, to: Value, sizes: tuple[Value, Value], real: Value, number: Value, metadata: tuple[Value, Value]
    ) -> None:
        """Emit one block of one row: its codes, padded with the code of 0, its scale, zero and sum of pairs.

        Args:
            codes: Address of the canonical codes.
            to: Address of the row's first word in the record.
            sizes: Eights of codes, without and with padding.
            real: Whether the row is one of the weight.
            number: Of the block's scale and zero.
            metadata: Address behind the record's codes, and number of the row in the panel.
        """
        spec, f, (groups, padded), (tail, lane) = self.spec, self.f, sizes, metadata
        zero_code, pair_total = f.variable(f.value("i32", spec.zero_code)), f.variable(f.value("<4 x i32>", 0))
        done = real.select(groups, 0)
        if spec.packed_bits:
            _planes(spec, codes, done, padded, to)
            done = padded
        with f.when(real):
            for g in () if spec.packed_bits else f.loop(groups):
                _eight(spec, codes + g * spec.bits, to + g * (PANEL * spec.bits))
                if spec.pair_sums:
                    pair_total.value = pair_total.value + _pair_sum(spec, codes + g * spec.bits)
            _copy(self.scale + number * spec.scale_bytes, tail + lane * spec.scale_bytes, spec.scale_bytes)
            if spec.zero_bytes:
                to_zero = tail + lane * spec.zero_bytes + PANEL * spec.scale_bytes
                _copy(self.zero + number * spec.zero_bytes, to_zero, spec.zero_bytes)
            if spec.zero_bytes == 1:
                point = (self.zero + number).load("i8").to("i32", unsigned=True)
                zero_code.value = point * (0x11111111 if spec.bits == 4 else 0x01010101)
        for g in f.loop(padded, start=done):
            for word in range(spec.bits // 4):
                (to + g * (PANEL * spec.bits)).store(zero_code.value, 4 * PANEL * word, 4)
        if spec.pair_sums:
            fill = zero_code.value & 255
            total = pair_total.value.reduce("add") + fill * fill * 4 * (padded - done).to("i32")
            (tail + lane * 4).store(total, PANEL * (spec.scale_bytes + spec.zero_bytes), 4)


def _eight(spec: PackSpec, source: Value, to: Value) -> None:
    """Emit eight codes of one row."""
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
    """Emit all codes of a block of one row in units of two planes; those beyond `groups` eights are the code of 0."""
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
    """Return the four products of neighbours among eight codes of one row, as the layout has them."""
    words = source.load("<4 x i16>")
    if spec.signed:
        words = words ^ 0x8080
    return (words & 255).to("i32", unsigned=True) * (words >> 8).to("i32", unsigned=True)


def _copy(source: Value, to: Value, size: int) -> None:
    to.store(source.load(f"i{8 * size}", 0, size), 0, size)


def supports(codes: Codes) -> str | None:
    """Return why `pack` does not support these codes, or None."""
    geo = cpu_tiles.geometry(codes.format, codes.shape)
    if geo.nbytes == 0:
        return "there is nothing to pack"
    if geo.k % 8 or geo.block % 8:
        return f"it takes eight codes at a time, and K = {geo.k} or the block of {geo.block} is not a multiple of that"
    if geo.format.block == "tensor" or geo.blocks != codes.scale.shape[-1]:
        return "scales and records do not go one to one"
    return None


def pack(codes: Codes) -> Packed:
    """Return `layouts.cpu_tiles.pack(codes)`, computed in parallel. The caller checks `supports` first."""
    fmt, geo = codes.format, cpu_tiles.geometry(codes.format, codes.shape)
    data, scale = codes.data.reshape(geo.n, -1).contiguous(), codes.scale.contiguous()
    zero: Tensor | None = None if codes.zero is None else codes.zero.contiguous()
    out = cpu_tiles.allocate(geo.nbytes)
    unit = geo.unit if fmt.packed_bits else 0
    spec = PackSpec(fmt.bits, fmt.signed, geo.scale_bytes, geo.zero_bytes, cpu_tiles.has_pair_sums(fmt), fmt.packed_bits, unit)
    fields = {
        "data": data.data_ptr(),
        "data_stride": data.shape[1],
        "rows": geo.n,
        "scale": scale.data_ptr(),
        "zero": 0 if zero is None else zero.data_ptr(),
        "scale_stride": geo.blocks,
        "out": out.data_ptr(),
        "panel_bytes": geo.panel_bytes,
        "blocks": geo.blocks,
        "groups": geo.block // 8,
        "padded_groups": geo.padded // 8,
        "last_groups": geo.last // 8,
        "last_padded_groups": geo.last_padded // 8,
    }
    run(arguments(PACK, compiled(build, spec, current()), fields), geo.n * geo.k // _ELEMENTS_A_THREAD)
    return Packed(fmt, codes.shape, cpu_tiles.NAME, out)

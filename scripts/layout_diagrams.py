"""Bit diagrams of weight layouts, computed from what the layouts' own code packs: the text of docs/layouts.md.

A probe packs codes in which chosen bits are set, and compares the result with that of codes that are all 0. So each bit of the result is
traced to the bit of the code that it holds, and each byte to the scale or zero that it belongs to. Called by scripts/generate_docs.py.
"""

from __future__ import annotations

import textwrap
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import groupby

import torch
from torch import Tensor

from halfbyte.formats import dense, ggml
from halfbyte.formats.codes import Codes
from halfbyte.formats.ggml_encoding import encode
from halfbyte.formats.spec import Format, as_format
from halfbyte.layouts import cpu_tiles, gpu_tiles

Pack = Callable[[Codes], Tensor]  # codes -> uint8 [bytes]
_PATTERN = 0x11  # of each byte of a scale or zero that is set: finite numbers in all of their dtypes


@dataclass(frozen=True)
class Bit:
    """Where a bit of the packed bytes comes from."""

    n: int
    k: int
    bit: int


@dataclass(frozen=True)
class Field:
    """What a packed byte holds: "codes", "scale", "zero" or "padding"; of a scale or zero, of which row and block."""

    kind: str
    n: int = 0
    block: int = 0


class Trace:
    """The origin of every bit and byte of a weight [n, k] of one format in one layout."""

    def __init__(self, pack: Pack, fmt: Format, n: int, k: int) -> None:
        self.fmt, self.shape, self._pack = fmt, (n, k), pack
        blocks_shape = fmt.scale_shape((n, k))
        self._codes = torch.zeros(n, k, dtype=torch.int64)
        self._scale = torch.zeros(blocks_shape, dtype=fmt.scale)
        self._zero = None if fmt.zero_dtype is None else torch.zeros(blocks_shape, dtype=fmt.zero_dtype)
        self._empty = self._packed(self._codes, self._scale, self._zero)
        self.bits: list[Bit | None] = self._trace_bits()
        self.fields: list[Field] = self._trace_bytes()

    def _packed(self, u: Tensor, scale: Tensor, zero: Tensor | None) -> Tensor:
        return self._pack(Codes.from_values(self.fmt, (u + self.fmt.q_min).to(torch.int16), scale, zero))

    def _changed(self, packed: Tensor) -> Tensor:
        """Bits that differ from those of the empty weight, bool [bytes * 8], the least significant bit of a byte first."""
        return ((packed ^ self._empty)[:, None] >> torch.arange(8, dtype=torch.uint8) & 1).bool().flatten()

    def _trace_bits(self) -> list[Bit | None]:
        n, k = self.shape
        index = torch.arange(n * k).view(n, k)
        found: list[Bit | None] = [None] * (self._empty.numel() * 8)
        for bit in range(self.fmt.stored_bits):
            there = self._changed(self._packed(torch.full_like(self._codes, 1 << bit), self._scale, self._zero))
            element = torch.zeros(there.numel(), dtype=torch.int64)
            for place in range((n * k - 1).bit_length()):
                chosen = (index >> place & 1) << bit
                element |= self._changed(self._packed(chosen, self._scale, self._zero)).long() << place
            for at in there.nonzero().flatten().tolist():
                found[at] = Bit(int(element[at]) // k, int(element[at]) % k, bit)
        return found

    def _trace_bytes(self) -> list[Field]:
        codes = [any(self.bits[8 * at : 8 * at + 8]) for at in range(self._empty.numel())]
        found = [Field("codes" if holds else "padding") for holds in codes]
        per_row = self._scale.shape[-1]
        for kind, empty in (("scale", self._scale), ("zero", self._zero)):
            if empty is None:
                continue
            index = torch.arange(empty.numel()).view(empty.shape)
            where = self._bytes_of(kind, torch.ones_like(index))
            element = torch.zeros(len(found), dtype=torch.int64)
            for place in range((empty.numel() - 1).bit_length()):
                element |= self._bytes_of(kind, index >> place & 1).long() << place
            for at in where.nonzero().flatten().tolist():
                found[at] = Field(kind, int(element[at]) // per_row, int(element[at]) % per_row)
        return found

    def _bytes_of(self, kind: str, chosen: Tensor) -> Tensor:
        """Bytes that change with the chosen scales, or zeros, bool [bytes]."""
        tensors = {"scale": self._scale.clone(), "zero": None if self._zero is None else self._zero.clone()}
        target = tensors[kind]
        assert target is not None
        raw = target.view(torch.uint8).view(*target.shape, -1)
        raw.copy_((chosen * _PATTERN).unsqueeze(-1).expand_as(raw))
        scale = tensors["scale"]
        assert scale is not None
        return self._packed(self._codes, scale, tensors["zero"]) != self._empty


def page() -> str:
    """docs/layouts.md."""
    return "\n".join(_lines()) + "\n"


def _lines() -> Iterator[str]:
    yield from ("# Bit layouts", "")
    yield from _paragraph(
        "A weight `[N, K]` has one order in files, the *canonical order*, and one for each kind of hardware. `hb.pack` arranges codes for "
        "a device, `hb.unpack` is its exact inverse; nothing that depends on hardware is stored. The diagrams on this page are computed: a "
        "script packs codes in which single bits are set and traces each bit of the result to the code it came from. `n` is the row "
        "(output), `k` the column (input)."
    )
    yield from _canonical()
    yield from _ggml()
    yield from _cpu()
    yield from _gpu()


def _canonical() -> Iterator[str]:
    yield from ("## In files", "", "Codes of 4 bits take half a byte, of 5 and 6 bits as many bits in checkpoints, of 8 bits a byte.", "")
    for name, count in (("q4_0", 8), ("int8_channel", 8)):
        trace = _trace(name, 1, 32, lambda codes: dense.to_dense(codes)["data"].view(torch.uint8).flatten())
        yield from (f"**{trace.fmt.stored_bits} bits** (`{name}`), one row:", "", *_fence(_nibbles(trace, range(count), rows=False)))
    for name, count in (("int5_g32", 5), ("int6_g32", 6)):
        trace = _trace(name, 1, 32, lambda codes: dense.to_dense(codes)["data"].flatten())
        yield from (f"**{trace.fmt.stored_bits} bits** (`{name}`), one row; each digit is the `k` whose bit is stored there:", "")
        yield from _fence(_each_bit(trace, range(count)))
    yield from _paragraph(
        "Signed codes of 4, 5 and 6 bits are stored as `q + 8`, `q + 16` and `q + 32`, of 8 bits as int8; unsigned codes as `q`; those of "
        "4-bit floats and `iq4` as their index in the table of 16 values. Scales, and zero points or offsets, are tensors of their own, "
        "`[N, blocks]`."
    )


def _ggml() -> Iterator[str]:
    yield from ("## In GGUF files", "", "ggml stores blocks of 32 weights with their scale. One row of one block:", "")
    for name in ("q4_0", "q4_1", "q8_0"):
        trace = _trace(name, 1, 32, partial(_encoded, ggml.TYPES[ggml.NUMBERS[name]]))
        yield from (f"**{name}**, {len(trace.fields)} bytes", "", *_sections(trace))
        first = next(at for at, field in enumerate(trace.fields) if field.kind == "codes")
        yield from _fence(_nibbles(trace, range(first, first + 6), rows=False))


def _encoded(kind: ggml.BlockType, codes: Codes) -> Tensor:
    return encode(kind, codes).flatten()


def _cpu() -> Iterator[str]:
    panel = cpu_tiles.PANEL
    yield from ("## On a CPU", "")
    yield from _paragraph(
        f"Layout `{cpu_tiles.NAME}`: panels of {panel} rows; in a panel a record for each block along K, in which the codes come first, "
        "then scales and zeros of the rows. Four consecutive bytes, one 32-bit lane, hold codes of one row: a dot-product instruction "
        "multiplies them by four activations."
    )
    for name in ("q4_0", "int4_g32_zp", "q8_0"):
        trace = _trace(name, panel, 32, lambda codes: cpu_tiles.pack(codes).data)
        yield from (f"**{name}**: a record of {len(trace.fields)} bytes, {panel} rows by 32 columns", "", *_sections(trace))
        yield from _fence(_nibbles(trace, [*range(9), 124, 127, 128, 129], rows=True))
    for name in ("int5_g32", "int6_g32"):
        trace = _trace(name, panel, 32, lambda codes: cpu_tiles.pack(codes).data)
        start = next(at for at in range(0, len(trace.fields), 128) if _known(trace, 8 * at).bit >= 4)
        yield from (f"**{name}**: the low 4 bits as above, then a plane of the highest bits, from byte {start} on:", "")
        yield from _fence(_plane(trace, range(start, start + 4)))


def _gpu() -> Iterator[str]:
    rows, columns = gpu_tiles.PANEL, gpu_tiles.RECORD
    yield from ("## On a GPU", "")
    yield from _paragraph(
        f"Layout `{gpu_tiles.NAME}`: three sections, codes, scales and zeros, that begin at multiples of 256 bytes. Codes of 4 bits lie in "
        f"panels of {rows} rows and records of {columns} columns, as the operands of tensor-core instructions (`mma.m16n8k16`, `wgmma`): "
        "the 16 bytes that one lane loads are its share of the A operand, four times."
    )
    trace = _trace("q4_0", rows, columns, lambda codes: gpu_tiles.pack(codes).data)
    yield from (f"**q4_0**, {rows} rows by {columns} columns", "", *_sections(trace))
    for lane in (0, 1, 4):
        yield from (f"Lane {lane}, bytes {16 * lane} to {16 * lane + 15} as 16-bit words:", "", *_fence(_words(trace, 16 * lane)))
    yield from _paragraph(
        f"**q8_0**: int8, row by row. Layout `{gpu_tiles.PAIRED}`, for linear layers on Hopper, reorders the pairs of each 16 bytes:"
    )
    plain = _trace("q8_0", 1, 32, lambda codes: gpu_tiles.pack(codes).data)
    paired = _trace("q8_0", 1, 32, lambda codes: gpu_tiles.pack(codes, paired=True).data)
    orders = [[name, *(_owner(trace, at)[0] for at in range(16))] for name, trace in ((gpu_tiles.NAME, plain), (gpu_tiles.PAIRED, paired))]
    yield from _fence(_table([["byte", *map(str, range(16))], *orders]))
    yield from textwrap.wrap(
        "Weights that are 2:4 sparse have layouts without their zeros, and convolutions are matrices of patches in the same layouts: the "
        "docstrings of `layouts/sparse.py`, `layouts/gpu_sparse.py` and `layouts/convolution.py` define them.",
        140,
    )


def _trace(name: str, n: int, k: int, pack: Pack) -> Trace:
    return Trace(pack, as_format(name), n, k)


def _owner(trace: Trace, at: int, low: int = 0, count: int = 8) -> tuple[str, str]:
    """(k, n) of the code whose lowest bits are `count` bits of byte `at` from bit `low` on, as text."""
    stored = trace.bits[8 * at + low : 8 * at + low + count]
    first = stored[0]
    assert first is not None
    assert stored == [Bit(first.n, first.k, bit) for bit in range(count)], f"byte {at} of {trace.fmt} holds parts of several codes"
    return f"k{first.k}", f"n{first.n}"


def _nibbles(trace: Trace, at: Sequence[int], *, rows: bool) -> list[str]:
    """A diagram of bytes that hold whole codes."""
    halves = [("bits 7-4", 4, 4), ("bits 3-0", 0, 4)] if trace.fmt.stored_bits < 8 else [("bits 7-0", 0, 8)]
    lines = [["byte", *map(str, at)]]
    lines += [[name, *(_owner(trace, byte, low, count)[0] for byte in at)] for name, low, count in halves]
    if rows:
        lines.append(["row", *(_owner(trace, byte, 0, halves[0][2])[1] for byte in at)])
    return _table(lines)


def _each_bit(trace: Trace, at: Sequence[int]) -> list[str]:
    """A diagram of bytes bit by bit, from the most significant to the least."""
    digits = ["".join(str(_known(trace, 8 * byte + bit).k) for bit in reversed(range(8))) for byte in at]
    return _table([["byte", *map(str, at)], ["bits 7-0", *digits]])


def _plane(trace: Trace, at: Sequence[int]) -> list[str]:
    """A diagram of bytes that hold the highest bits of several codes."""
    per_code = trace.fmt.stored_bits - 4
    lines = [["byte", *map(str, at)]]
    for low in reversed(range(0, 8, per_code)):
        name = f"bit {low}" if per_code == 1 else f"bits {low + per_code - 1}-{low}"
        lines.append([name, *(f"k{_known(trace, 8 * byte + low).k}" for byte in at)])
    lines.append(["row", *(f"n{_known(trace, 8 * byte).n}" for byte in at)])
    return _table(lines)


def _words(trace: Trace, start: int) -> list[str]:
    """A diagram of 16 bytes as eight words of four codes of 4 bits."""
    lines = [["word", *map(str, range(8))]]
    for nibble in reversed(range(4)):
        byte, low = nibble // 2, nibble % 2 * 4
        owners = (_owner(trace, start + 2 * word + byte, low, 4)[0] for word in range(8))
        lines.append([f"bits {4 * nibble + 3}-{4 * nibble}", *owners])
    lines.append(["row", *(_owner(trace, start + 2 * word, 0, 4)[1] for word in range(8))])
    return _table(lines)


def _known(trace: Trace, at: int) -> Bit:
    bit = trace.bits[at]
    assert bit is not None, f"bit {at} of {trace.fmt} holds no code"
    return bit


def _sections(trace: Trace) -> Iterator[str]:
    """A table of the runs of bytes that hold codes, scales, zeros or nothing."""
    names = {"scale": f"scales, {_dtype(trace.fmt.scale)}", "codes": "codes", "padding": "padding"}
    if trace.fmt.zero_dtype is not None:
        names["zero"] = f"{'zero points' if trace.fmt.zero == 'point' else 'offsets'}, {_dtype(trace.fmt.zero_dtype)}"
    yield from ("| bytes | |", "| --- | --- |")
    for kind, run in groupby(enumerate(trace.fields), key=lambda item: item[1].kind):
        stored = list(run)
        owners = list(dict.fromkeys((field.n, field.block) for _, field in stored))
        per = f", of rows n{owners[0][0]} to n{owners[-1][0]}" if kind in ("scale", "zero") and len(owners) > 1 else ""
        yield f"| {stored[0][0]} to {stored[-1][0]} | {names[kind]}{per} |"
    yield ""


def _dtype(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _table(lines: Sequence[Sequence[str]]) -> list[str]:
    """Cells in aligned columns."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return ["  ".join([line[0].ljust(widths[0]), *(cell.rjust(w) for cell, w in zip(line[1:], widths[1:], strict=True))]) for line in lines]


def _fence(lines: Sequence[str]) -> list[str]:
    return ["```text", *lines, "```", ""]


def _paragraph(text: str) -> list[str]:
    return [*textwrap.wrap(text, 140), ""]

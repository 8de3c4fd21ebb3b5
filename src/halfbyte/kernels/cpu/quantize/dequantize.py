"""w[n, k] = scale[n, b] * (q[n, k] - point[n, b]), or scale * q + offset, of all rows or of those that `ids` names.

Reads the layout `cpu_tiles` row by row, so that one packed weight serves as an embedding and as a linear layer.
Arithmetic: q - point is exact; one float32 multiplication, or one fused multiply-add where there is an offset; one rounding
to the output's dtype. To float32 that equals `Codes.dequantize`, which computes in float64, but for sums that float64 rounds to the middle
of two float32 (8 bits with an offset and float32 scales). To float16 and bfloat16 it does where the float32 is exact: without an offset and
with scales of 16 bits.
"""

from __future__ import annotations

import ctypes
import functools
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfbyte.formats.spec import Family, Zero, codebook, zero_size
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import DEQUANTIZE
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import compiled, phase, run
from halfbyte.kernels.cpu.linear import packed_planes, sparse
from halfbyte.layouts import cpu_tiles
from halfbyte.layouts.cpu_tiles import PANEL, Geometry

_ELEMENTS_A_THREAD = 1 << 17
_pack = DEQUANTIZE.struct().pack


@dataclass(frozen=True, slots=True)
class DequantizeSpec:
    """What the code is compiled for.

    Attributes:
        bits: Of a code, 4 or 8; those of `packed_bits` are unpacked to 8.
        scale: The element type of scales, and of offsets.
        zero, packed_bits: As in Format.
        unit: k of a unit, as in Geometry.
        out: The element type of the result: "f32", "bf16" or "f16".
        pair_sums, sparse: As in Geometry.
        table: The family whose codebook the codes index; "" where they are numbers.
    """

    bits: int
    scale: Kind
    zero: Zero
    unit: int
    out: Kind
    pair_sums: bool = False
    sparse: bool = False
    packed_bits: int = 0
    table: Family | Literal[""] = ""


@phase
def build(spec: DequantizeSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a DEQUANTIZE block, its thread and the number of threads. Threads share the rows evenly."""
    args = f.parameters[0]
    ids, out = DEQUANTIZE.load(args, "ids", "ptr"), DEQUANTIZE.load(args, "out", "ptr")
    has_ids = ids.is_null().equals(0)
    rows, stride = DEQUANTIZE.load(args, "rows"), DEQUANTIZE.load(args, "out_stride")
    weight_row = f.variable(f.value("i64", 0))
    for r in f.share(rows):
        weight_row.value = r
        with f.when(has_ids):
            weight_row.value = (ids + r * 8).load("i64", align=8)
        emit_row(f, spec, isa, args, weight_row.value, out + r * stride)


def emit_row(f: Function, spec: DequantizeSpec, isa: ISA, args: Value, row: Value, out_row: Value, *, add: bool = False) -> None:
    """Emit the dequantization of one row of a weight, eight k at a time.

    Args:
        f, spec, isa: As of `build`.
        args: A DEQUANTIZE block, of which the fields of `weight_fields` are read.
        row: The row of the weight, within 0 … N - 1.
        out_row: The address of K results.
        add: Whether they are added to what is there; `out` must be "f32" then.
    """
    assert not add or spec.out == "f32"
    weights, panel_bytes = DEQUANTIZE.load(args, "weights", "ptr"), DEQUANTIZE.load(args, "panel_bytes")
    blocks, block, last, units, last_units = (DEQUANTIZE.load(args, field) for field in ("blocks", "block", "last", "units", "last_units"))
    lane, out_bytes, scale_bytes = row % PANEL, element_of(spec.out).size, element_of(spec.scale).size  # lane: the row in its panel
    unit_bytes = cpu_tiles.data_bytes(spec.packed_bits or spec.bits, spec.unit, sparse=spec.sparse)
    zero_bytes = zero_size(spec.zero, scale_bytes)
    meta_bytes = cpu_tiles.tail_bytes(scale_bytes, zero_bytes, pair_sums=spec.pair_sums)
    record, out = f.variable(weights + row // PANEL * panel_bytes), f.variable(out_row)
    buffer = f.alloca("<8 x float>", 1, 32)
    for b in f.loop(blocks):
        is_last = (b + 1).equals(blocks)
        block_k, block_units = is_last.select(last, block), is_last.select(last_units, units)
        weight_meta = record.value + block_units * unit_bytes
        scale = _number(isa, weight_meta + lane * scale_bytes, spec.scale)
        point = (weight_meta + lane).load("i8", PANEL * scale_bytes).to("i32", unsigned=True).splat(8) if spec.zero == "point" else None
        for group in f.loop((block_k + 7) // 8):
            w = _minus_zero(spec, isa, _stored_codes(f, spec, record.value, unit_bytes, group, lane, point), point)
            if spec.zero == "offset":
                w = f.fma(w, scale.splat(8), _number(isa, weight_meta + lane * scale_bytes + PANEL * scale_bytes, spec.scale).splat(8))
            else:
                w = w * scale.splat(8)
            left, to = block_k - group * 8, out.value + group * (8 * out_bytes)
            whole = left > 7
            with f.when(whole):
                to.store(isa.from_float(w + to.load(w.type, 0, 4) if add else w, spec.out))
            with f.when(whole.equals(0)):
                buffer.store(isa.from_float(w, spec.out))
                for i in f.loop(left):
                    at = i * out_bytes
                    value = (buffer + at).load(element_of(spec.out).stored)
                    (to + at).store(value + (to + at).load("float", 0, 4) if add else value)
        record.value = weight_meta + meta_bytes
        out.value = out.value + block * out_bytes


def _stored_codes(
    f: Function, spec: DequantizeSpec, record: Value, unit_bytes: int, group: Value, lane: Value, point: Value | None
) -> Value:
    """Return eight codes of a block's row, unsigned as they are stored: k = 8 * group … 8 * group + 7, <8 x i32>."""
    if spec.sparse:
        return sparse.eight_codes(f, spec.bits, record + (group >> 2) * unit_bytes, group & 3, lane, point)
    if spec.packed_bits:
        return packed_planes.eight_codes(f, spec.packed_bits, spec.zero == "none", spec.unit, record, group, lane)
    return _eight(f, spec.bits, record + lane * 4 + group * (PANEL * spec.bits))


def _minus_zero(spec: DequantizeSpec, isa: ISA, stored: Value, point: Value | None) -> Value:
    """Return what the scale multiplies, <8 x float>: an entry of the codebook, or q - point; q is stored as q + 2^(bits - 1) if signed."""
    if spec.table:
        entries = isa.looked_up(stored.bits("<32 x i8>"), codebook(spec.table)).bits(stored.type)
        return (entries << 24).shift_signed(24).to("float")  # int8 in the low byte
    signed_zero = 1 << (spec.bits - 1) if spec.zero == "none" else 0
    return (stored - (signed_zero if point is None else point)).to("float")


def _number(isa: ISA, address: Value, kind: Kind) -> Value:
    return isa.to_float(address.load(element_of(kind).stored), kind)


def _eight(f: Function, bits: int, data: Value) -> Value:
    """Eight k of one row as they are stored, <8 x i32>."""
    if bits == 4:
        shifts = f.constant("<8 x i32>", [8 * (k % 4) + 4 * (k // 4) for k in range(8)])
        return (data.load("i32").splat(8) >> shifts) & 15
    shifts = f.constant("<4 x i32>", [0, 8, 16, 24])
    low, high = ((data.load("i32", at).splat(4) >> shifts) & 255 for at in (0, 4 * PANEL))
    return low.shuffle(range(8), high)


@functools.lru_cache(maxsize=1024)
def spec_of(geo: Geometry, out: Kind) -> DequantizeSpec:
    fmt = geo.format
    how = geo.pair_sums, geo.sparse, fmt.packed_bits, fmt.family if fmt.codebook else ""
    return DequantizeSpec(fmt.bits, kind_of(fmt.scale), fmt.zero, geo.unit, out, *how)


def weight_fields(weights: int, geo: Geometry) -> dict[str, int]:
    """The fields of DEQUANTIZE that describe a weight, by the address of its packed bytes."""
    sizes = {"panel_bytes": geo.panel_bytes, "blocks": geo.blocks, "block": geo.block, "last": geo.last}
    return {"weights": weights, **sizes, "units": geo.padded // geo.unit, "last_units": geo.last_padded // geo.unit}


def dequantize(weights: Tensor, geo: Geometry, dtype: torch.dtype, ids: Tensor | None = None) -> Tensor:
    """Rows of the weight, [rows, K] in `dtype`; `ids` is int64 [rows], contiguous and within 0 … N - 1."""
    rows = geo.n if ids is None else ids.numel()
    out_dtype = torch.float32 if dtype == torch.float16 and not current().half_conversions else dtype
    out = torch.empty(rows, geo.k, dtype=out_dtype, device="cpu")
    if out.numel() == 0:
        return out.to(dtype)
    function = compiled(build, spec_of(geo, kind_of(out_dtype)), current())
    block = _pack(  # by position: for one row, names would take as long as the kernel
        *(function, 0, runtime.openmp_address(), 0, *weight_fields(weights.data_ptr(), geo).values()),
        *(0 if ids is None else ids.data_ptr(), rows, out.data_ptr(), geo.k * out.element_size()),
    )
    run(ctypes.create_string_buffer(block, len(block)), out.numel() // _ELEMENTS_A_THREAD)
    return out.to(dtype)

"""Codes out of the bit fields of ggml's blocks, as Codes store them: what `formats.ggml.extract` does, at the speed of memory.

Each thread takes whole blocks. A vector of codes is put together from as many bytes of each field, shifted and masked.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.formats.ggml import BitField, BlockType
from halfbyte.kernels.cpu.codegen.arguments import EXTRACT
from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase, run

_LANES = 32
_WEIGHTS_A_THREAD = 1 << 18


@dataclass(frozen=True, slots=True)
class ExtractSpec:
    """Weights and bytes of a block, bits of a code as it is stored, and what is added to it; its fields."""

    weights: int
    nbytes: int
    bits: int
    added: int
    fields: tuple[BitField, ...]


@phase
def build(spec: ExtractSpec, isa: ISA, f: Function) -> None:
    args = f.parameters[0]
    data, out, blocks = EXTRACT.load(args, "data", "ptr"), EXTRACT.load(args, "out", "ptr"), EXTRACT.load(args, "blocks")
    lanes = min([_LANES, *(field.run for field in spec.fields if field.run > 1)])
    for b in f.share(blocks):
        source, to = data + b * spec.nbytes, out + b * (spec.weights * spec.bits // 8)
        for first in range(0, spec.weights, lanes):
            q = f.value(f"<{lanes} x i8>", spec.added)
            for field in spec.fields:
                q = q + _part(field, source, first, q.type)
            if spec.bits == 4:
                pairs = q.bits(f"<{lanes // 2} x i16>")
                q = (pairs | pairs >> 4).to("i8")
            to.store(q, first * spec.bits // 8)


def _part(field: BitField, source: Value, first: int, type_: str) -> Value:
    """The bits of a field that belong to a vector of codes from the `first` on, at their place in them."""
    lanes = lanes_of(type_)
    if field.run == field.bits == 1:  # a bit for each code, in their order
        bits = source.load(f"i{lanes}", field.start + first // 8).bits(f"<{lanes} x i1>")
        return bits.to("i8", unsigned=True) << field.shift
    run, inside = divmod(first, field.run * 8 // field.bits)
    number, byte = divmod(inside, field.run)
    found = source.load(type_, field.start + run * field.run + byte) >> number * field.bits
    assert byte + lanes <= field.run
    return (found & (1 << field.bits) - 1) << field.shift


def extract(kind: BlockType, blocks: Tensor, out: Tensor | None = None) -> Tensor:
    """`formats.ggml.extract(kind, blocks, out)`, fast."""
    fmt, blocks = kind.format, blocks.contiguous()
    if out is None:
        dtype = torch.int8 if fmt.bits == 8 and fmt.signed else torch.uint8
        out = torch.empty(len(blocks), kind.weights * fmt.bits // 8, dtype=dtype, device="cpu")
    spec = ExtractSpec(kind.weights, kind.nbytes, fmt.bits, kind.codes_shift, kind.fields)
    values = {"data": blocks.data_ptr(), "out": out.data_ptr(), "blocks": len(blocks)}
    run(arguments(EXTRACT, compiled(build, spec, current()), values), out.numel() * 8 // fmt.bits // _WEIGHTS_A_THREAD)
    return out

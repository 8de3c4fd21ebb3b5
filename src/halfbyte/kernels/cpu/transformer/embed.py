"""Rows of up to three quantized tables, added and normed: what encoders begin with, in one pass over each token.

    y[b, t] = norm(dequantize(W0)[ids0[b, t]] + dequantize(W1)[ids1[b, t]] + …),  float32

Tables have layout `cpu_tiles` and one K. Rows are dequantized as in `quantize/dequantize.py` and added in that order, so that the sum is
torch's bit for bit; the norm is a layer norm as in `step_sequence.py`. An id that its table does not have raises a flag, and row 0 is
read in its place.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import DEQUANTIZE, LINEAR, Block
from halfbyte.kernels.cpu.codegen.ir import Function
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase
from halfbyte.kernels.cpu.quantize import dequantize
from halfbyte.kernels.cpu.quantize.dequantize import DequantizeSpec
from halfbyte.kernels.cpu.step_sequence import RowNorm
from halfbyte.layouts.cpu_tiles import Geometry

MOST_TABLES = 3
EMBED = Block(
    (
        *LINEAR.fields[:4],
        *("tokens", "rows", "out", "k", "weight", "shift", "eps"),
        # of each table: a block of DEQUANTIZE, its rows, and its ids, with the bytes between those of sequences and of tokens
        *(f"{field}{i}" for i in range(MOST_TABLES) for field in ("table", "n", "ids", "ids_batch", "ids_token")),
        "failed",
    ),
    frozenset({"eps"}),
)
_pack = EMBED.struct("tokens").pack_into
_ELEMENTS_A_THREAD = 1 << 14


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    tables: tuple[DequantizeSpec, ...]


@phase
def build(spec: EmbedSpec, isa: ISA, f: Function) -> None:
    args, thread, threads = f.parameters
    out, weight, shift = (EMBED.load(args, name, "ptr") for name in ("out", "weight", "shift"))
    tokens, rows, k = (EMBED.load(args, name) for name in ("tokens", "rows", "k"))
    norm = RowNorm(f, isa, k, (weight, shift), args + EMBED.offset("eps"), layer_norm=True)
    for r in f.loop((thread + 1) * rows // threads, thread * rows // threads):
        b, t, to = r // tokens, r % tokens, out + r * k * 4
        for i, table in enumerate(spec.tables):
            number, block, ids = EMBED.load(args, f"n{i}"), EMBED.load(args, f"table{i}", "ptr"), EMBED.load(args, f"ids{i}", "ptr")
            row = (ids + b * EMBED.load(args, f"ids_batch{i}") + t * EMBED.load(args, f"ids_token{i}")).load("i64", 0, 8)
            there = row.below(number)
            with f.when(there.equals(0)):
                f.raise_flag(args + EMBED.offset("failed"))
            dequantize.row(f, table, isa, block, there.select(row, 0), to, add=i > 0)
        norm.emit(to, to)


class Tables:
    """Tables, by the addresses of their packed bytes, and the norm behind them, by those of its weight and its shift, float32 [K];
    the caller must keep them alive."""

    def __init__(self, tables: Sequence[tuple[Geometry, int]], norm: tuple[int, int, float]) -> None:
        self._norm, self.k = norm, tables[0][0].k
        self._blocks = [DEQUANTIZE.buffer(dequantize.weight_fields(weights, geo)) for geo, weights in tables]
        self._fields = [(ctypes.addressof(block), geo.n) for block, (geo, _) in zip(self._blocks, tables, strict=True)]
        spec = EmbedSpec(tuple(dequantize.spec_of(geo, "f32") for geo, _ in tables))
        self._phase = compiled(build, spec, current())

    def __call__(self, ids: Sequence[Tensor], batch: int, tokens: int) -> Tensor | None:
        """ids int64 [B or 1, T] for each table -> float32 [B, T, K]; None where a table does not have an id."""
        out = torch.empty(batch, tokens, self.k, dtype=torch.float32, device="cpu")
        numbers = list[int]()
        for fields, which in zip(self._fields, ids, strict=True):
            numbers += (*fields, which.data_ptr(), 8 * which.stride(0) * (len(which) > 1), 8 * which.stride(1))
        numbers += [0] * (5 * (MOST_TABLES - len(ids)))
        weight, shift, eps = self._norm
        block = arguments(EMBED, self._phase, {})
        _pack(block, EMBED.offset("tokens"), tokens, batch * tokens, out.data_ptr(), self.k, weight, shift, eps, 0.0, *numbers, 0)
        threads = max(1, min(runtime.threads(), out.numel() // _ELEMENTS_A_THREAD))
        runtime.runner()(ctypes.addressof(block), threads)
        return None if any(block[EMBED.offset("failed") :]) else out

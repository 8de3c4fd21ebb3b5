"""The embeddings of an encoder on a CPU: rows of up to three quantized tables, added and normed, in one pass over each token.

    y[b, t] = norm(dequantize(W0)[ids0[b, t]] + dequantize(W1)[ids1[b, t]] + …),  float32

Tables, of words, positions and token types, have layout `cpu_tiles` and the same K. Rows are dequantized as in `quantize/dequantize.py` and
added in that order, so that the sum is torch's bit for bit; the norm is a layer norm as in `step_sequence.py`. For an id out of range the
kernel reads row 0 and sets the flag `failed`. `ops/transformer/embed.py` calls it.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen.arguments import DEQUANTIZE, Block
from halfbyte.kernels.cpu.codegen.ir import Function
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase, run
from halfbyte.kernels.cpu.quantize import dequantize
from halfbyte.kernels.cpu.quantize.dequantize import DequantizeSpec
from halfbyte.kernels.cpu.step_sequence import RowNorm
from halfbyte.layouts.cpu_tiles import Geometry

MOST_TABLES = 3
_TABLE_FIELDS = ("table", "n", "ids", "ids_batch", "ids_token")
EMBED = Block(
    *("tokens", "rows", "out", "k", "weight", "shift", "eps"),
    # each table: a block of DEQUANTIZE, its number of rows, and its ids, with their strides in bytes
    *(f"{field}{i}" for i in range(MOST_TABLES) for field in _TABLE_FIELDS),
    "failed",  # not 0: an id was out of range
    floats=["eps"],
)
_ELEMENTS_A_THREAD = 1 << 14


@dataclass(frozen=True, slots=True)
class EmbedSpec:
    """What the kernel is generated for: how the rows of each table are dequantized."""

    tables: tuple[DequantizeSpec, ...]


@phase
def build(spec: EmbedSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are an EMBED block, its thread and the number of threads. Threads share the tokens evenly."""
    args = f.parameters[0]
    out, weight, shift = (EMBED.load(args, name, "ptr") for name in ("out", "weight", "shift"))
    tokens, rows, k = (EMBED.load(args, name) for name in ("tokens", "rows", "k"))
    norm = RowNorm(f, isa, k, (weight, shift), args + EMBED.offset("eps"), layer_norm=True)
    for r in f.share(rows):
        b, t, y = r // tokens, r % tokens, out + r * k * 4
        for i, table in enumerate(spec.tables):
            n, block, ids = EMBED.load(args, f"n{i}"), EMBED.load(args, f"table{i}", "ptr"), EMBED.load(args, f"ids{i}", "ptr")
            token_id = (ids + b * EMBED.load(args, f"ids_batch{i}") + t * EMBED.load(args, f"ids_token{i}")).load("i64", 0, 8)
            in_range = token_id.below(n)
            with f.when(in_range.equals(0)):
                f.raise_flag(args + EMBED.offset("failed"))
            dequantize.emit_row(f, table, isa, block, in_range.select(token_id, 0), y, add=i > 0)
        norm.emit(y, y)


class Tables:
    """The tables and the norm of an encoder's embeddings."""

    def __init__(self, tables: Sequence[tuple[Geometry, int]], norm: tuple[int, int, float]) -> None:
        """Compile the kernel.

        Args:
            tables: Geometry of each table, and the address of its packed bytes.
            norm: Addresses of the norm's weight and bias, float32 [K], and its eps. The caller must keep all of this memory alive.
        """
        self.k = tables[0][0].k
        weight, shift, eps = norm
        self._fields: dict[str, int | tuple[float, float]] = {"k": self.k, "weight": weight, "shift": shift, "eps": (eps, 0.0)}
        self._blocks = [DEQUANTIZE.buffer(dequantize.weight_fields(weights, geo)) for geo, weights in tables]
        for i, (block, (geo, _)) in enumerate(zip(self._blocks, tables, strict=True)):
            self._fields |= {f"table{i}": ctypes.addressof(block), f"n{i}": geo.n}
        spec = EmbedSpec(tuple(dequantize.spec_of(geo, "f32") for geo, _ in tables))
        self._phase = compiled(build, spec, current())

    def __call__(self, ids: Sequence[Tensor], batch: int, tokens: int) -> Tensor | None:
        """Compute the embeddings of B = `batch` sequences of T = `tokens` tokens.

        Args:
            ids: For each table int64 [B or 1, T].
            batch, tokens: B and T.

        Returns:
            float32 [B, T, K]; None if an id is out of its table's range.
        """
        out = torch.empty(batch, tokens, self.k, dtype=torch.float32, device="cpu")
        fields = {**self._fields, "tokens": tokens, "rows": batch * tokens, "out": out.data_ptr()}
        for i, table_ids in enumerate(ids):
            batch_stride = 8 * table_ids.stride(0) * (len(table_ids) > 1)  # 0 where all sequences share the ids
            fields |= {f"ids{i}": table_ids.data_ptr(), f"ids_batch{i}": batch_stride, f"ids_token{i}": 8 * table_ids.stride(1)}
        block = arguments(EMBED, self._phase, fields)
        run(block, out.numel() // _ELEMENTS_A_THREAD)
        return None if any(block[EMBED.offset("failed") :]) else out

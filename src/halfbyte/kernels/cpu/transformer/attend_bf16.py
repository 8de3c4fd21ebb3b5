"""Attention of whole sequences by products of bfloat16 pairs, where every token sees every other, for layers that compute in int8.

    y[b, i, h] = sum over j of  p[j] * v[b, h, j] / sum over j of p[j],   p[j] = exp(scale * q[b, h, i] · k[b, h, j] - m)

Queries lie across the lanes, so that neither a maximum nor a sum is folded. A thread takes a head of a sequence, or a part of its queries,
converts its keys and values once, and then computes `_QUERIES` queries at a time:

    pairs of elements   q [2 d, 2 d + 1] of 16 queries in a vector, times a pair of a key that is broadcast    scores [keys, queries]
    pairs of keys       p [2 j, 2 j + 1] of 16 queries in a vector, times a pair of values that is broadcast   out [D + 1, queries]

A last column of values, 1 for each key, makes the sum of p. Keys are taken `_KEYS` at a time, with online softmax from block to block
(Milakov and Gimelshein, arXiv:1805.02867); m is the largest score so far.

Arithmetic: q * scale * log2(e), k, v and p <= 1 are rounded to bfloat16, products are exact and summed in float32, subnormals count as 0.
2^x of scores less m is within 2^-18 of itself, and 2^-120 at least. `attend_whole.py` is the same in float32, with masks.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, phase
from halfbyte.kernels.cpu.linear.tile_spec import ROUND, ROUND_BITS
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE, transposed
from halfbyte.layouts.base import round_up

_VECTORS = 2  # of queries in a tile
_KEYS = 128  # of a block, whose scores stay in the first-level cache
_TOGETHER = 8  # keys whose scores are summed together
_LEAST_SCORE, _LEAST_POWER = -3.4028234663852886e38, -120.0  # of float32; 2^-120 stays normal
# 2^x for |x| <= 1/2: a fit to the least maximum of the relative error, 2^-18.5.
_POWERS = (0.99999928, 0.69312179, 0.24024744, 0.055917859, 0.0095701003)


@dataclass(frozen=True, slots=True)
class AttendPairsSpec:
    """dim: D, a multiple of 4."""

    dim: int


@phase
def build(spec: AttendPairsSpec, isa: ISA, f: Function) -> None:
    _Attend(spec, isa, f).emit()


def sizes(length: int, dim: int) -> tuple[int, int]:
    """Keys with the padding of the last block, and the bytes that each thread takes."""
    padded, (columns, _) = round_up(length, _TOGETHER), _columns(dim)
    queries = 16 * _VECTORS
    return padded, 2 * padded * (dim + columns) + 2 * queries * dim + 4 * queries * (_KEYS + columns + 1)


def _columns(dim: int) -> tuple[int, int]:
    """The columns of values, D + 1 and zeros, and how many are summed together."""
    return min((round_up(dim + 1, together), together) for together in (8, 7, 6))


class _Attend(Emitter):
    """Emits the kernel.

    Scratch memory of a thread, where a pair is two bfloat16:

        keys     [padded, D / 2] pairs; those behind the last are the last again
        values   [padded / 2, columns] pairs; 0 behind the last
        queries  [D / 2, 32] pairs
        scores   [_KEYS, 32] float32, replaced by p, [_KEYS / 2, 32] pairs
        out      [columns, 32] float32
        largest  [32] float32
    """

    block = WHOLE
    spec: AttendPairsSpec

    def __init__(self, spec: AttendPairsSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, thread, _ = f.parameters
        self.floats, self.ints, self.row = isa.floats, isa.ints, 4 * isa.lanes * _VECTORS  # bytes of a row of queries
        self.columns, self.together = _columns(spec.dim)
        self.length, self.padded = self.get("length"), self.get("padded")
        self.keys = self.pointer("scratch") + thread * self.get("thread_bytes")
        self.values = self.keys + self.padded * (2 * spec.dim)
        self.queries = self.values + self.padded * (2 * self.columns)
        self.scores = self.queries + self.row * spec.dim // 2
        self.out = self.scores + self.row * _KEYS
        self.largest = self.out + self.row * self.columns

    def emit(self) -> None:
        """Emit the loops over work items, tiles of queries and blocks of keys."""
        f, heads, parts, queries = self.f, self.get("heads"), self.get("parts"), self.isa.lanes * _VECTORS
        tiles = (self.get("tokens") + (queries - 1)) // queries
        for item in f.draw_items(self.args + WHOLE.offset("counter"), self.get("batch") * heads * parts):
            head, part = item // parts, item % parts
            b, h = head // heads, head % heads
            q, k, v = (self.pointer(x) + b * self.get(f"{x}_batch") + h * self.get(f"{x}_head") for x in "qkv")
            self._convert_keys(k)
            self._convert_values(v)
            out = self.pointer("out") + (b * self.get("tokens") * heads + h) * (4 * self.spec.dim)
            for tile in f.loop((part + 1) * tiles // parts, part * tiles // parts):
                self._convert_queries(q, tile)
                for start in f.loop(self.padded, step=_KEYS):
                    count = f.umin(self.padded - start, f.value("i64", _KEYS))
                    factors = self._write_powers(start, count)
                    self._add_values(start, count, factors)
                self._write(out, tile)

    def _vectors(self) -> list[tuple[int, int]]:
        """The first element of each vector of a head, and how many there are."""
        return [(d, min(self.isa.lanes, self.spec.dim - d)) for d in range(0, self.spec.dim, self.isa.lanes)]

    def _load(self, row: Value, first: int, count: int) -> Value:
        """Load `count` elements of a head as a vector, filled up with zeros."""
        lanes = self.isa.lanes
        part = row.load(vector("float", count), 4 * first, 4)
        return part if count == lanes else part.shuffle([min(i, count) for i in range(lanes)], self.f.value(part.type, 0.0))

    def _convert_keys(self, k: Value) -> None:
        for j in self.f.loop(self.padded):
            row, to = k + self.f.umin(j, self.length - 1) * self.get("k_token"), self.keys + j * (2 * self.spec.dim)
            for first, count in self._vectors():
                x = self._load(row, first, count)
                codes = self.isa.bf16_pairs(self.f, x, x).bits(vector("i16", 2 * self.isa.lanes)).shuffle(range(0, 2 * count, 2))
                to.store(codes, 2 * first, 2)

    def _convert_values(self, v: Value) -> None:
        f, lanes = self.f, self.isa.lanes
        for j in f.loop(self.padded // 2):
            inside = [j * 2 + i < self.length for i in (0, 1)]
            rows = [v + f.umin(j * 2 + i, self.length - 1) * self.get("v_token") for i in (0, 1)]
            to = self.values + j * (4 * self.columns)
            ones = [each.select(f.value("float", 1.0), 0.0).splat(lanes) for each in inside]
            last = self.isa.bf16_pairs(f, *ones)
            for first, count in self._vectors():
                x = [each.select(self._load(row, first, count), 0.0) for each, row in zip(inside, rows, strict=True)]
                pairs = self.isa.bf16_pairs(f, *x)
                to.store(pairs if count == lanes else pairs.shuffle(range(count)), 4 * first, 4)
            for column in range(self.spec.dim, self.columns):
                to.store(last.lane(0) if column == self.spec.dim else f.value("i32", 0), 4 * column, 4)

    def _convert_queries(self, q: Value, tile: Value) -> None:
        """Lay out the queries of a tile, and reset its outputs."""
        f, lanes = self.f, self.isa.lanes
        scale = (WHOLE.load_floats(self.args, "scale")[0] * math.log2(math.e)).splat(lanes)
        for n in range(_VECTORS):
            rows = [q + self._query(tile, n * lanes + i) * self.get("q_token") for i in range(lanes)]
            for first, count in self._vectors():
                columns = transposed([self._load(row, first, count) * scale for row in rows])
                for d in range(0, count, 2):
                    pairs = self.isa.bf16_pairs(f, columns[d], columns[d + 1])
                    self.queries.store(pairs, (first + d) // 2 * self.row + n * 4 * lanes, 4)
            self.largest.store(f.value(self.floats, _LEAST_SCORE), n * 4 * lanes, 4)
        for column in f.loop(self.columns):
            for n in range(_VECTORS):
                (self.out + column * self.row).store(f.value(self.floats, 0.0), n * 4 * lanes, 4)

    def _query(self, tile: Value, i: int) -> Value:
        """The token of query `i` of a tile; those behind the last are the last again."""
        return self.f.umin(tile * (self.isa.lanes * _VECTORS) + i, self.get("tokens") - 1)

    def _pair(self, at: Value, offset: int) -> Value:
        """A pair, broadcast."""
        return at.load("i32", offset, 4).splat(self.isa.lanes)

    def _row(self, at: Value, kind: str) -> list[Value]:
        return [at.load(kind, n * 4 * self.isa.lanes, 4) for n in range(_VECTORS)]

    def _write_powers(self, start: Value, count: Value) -> list[Value]:
        """Write p of a block of keys; return by which factors outputs so far are multiplied for their new maximum."""
        f, dim = self.f, self.spec.dim
        before = self._row(self.largest, self.floats)
        largest = [f.variable(value) for value in before]
        for j in f.loop(count, step=_TOGETHER):
            totals = [f.variable(f.value(self.floats, 0.0)) for _ in range(_TOGETHER * _VECTORS)]
            keys = self.keys + (start + j) * (2 * dim)
            for pair in f.loop(dim // 2):
                q = self._row(self.queries + pair * self.row, self.ints)
                for i in range(_TOGETHER):
                    self._dot(totals[i * _VECTORS : (i + 1) * _VECTORS], q, self._pair(keys + pair * 4, 2 * dim * i))
            for i, total in enumerate(totals):
                (self.scores + j * self.row).store(total.value, 4 * self.isa.lanes * i, 4)
                largest[i % _VECTORS].value = total.value.max_keeping_nan(largest[i % _VECTORS].value)
        now = [each.value for each in largest]
        for j in f.loop(count // 2):
            first, second = (self._row(self.scores + (j * 2 + i) * self.row, self.floats) for i in (0, 1))
            for n, (a, b) in enumerate(zip(first, second, strict=True)):
                pairs = self.isa.bf16_pairs(f, self._power(a - now[n]), self._power(b - now[n]))
                (self.scores + j * self.row).store(pairs, n * 4 * self.isa.lanes, 4)
        for n, value in enumerate(now):
            self.largest.store(value, n * 4 * self.isa.lanes, 4)
        return [self._power(old - new) for old, new in zip(before, now, strict=True)]

    def _power(self, x: Value) -> Value:
        """2^x for x <= 0; NaN stays NaN."""
        f = self.f
        inside = x.max_keeping_nan(_LEAST_POWER)
        shifted = inside + ROUND
        rest = inside - (shifted - ROUND)
        total = f.value(x.type, _POWERS[-1])
        for c in _POWERS[-2::-1]:
            total = f.fma(total, rest, f.value(x.type, c))
        return (total.bits(self.ints) + ((shifted.bits(self.ints) - ROUND_BITS) << 23)).bits(x.type)

    def _add_values(self, start: Value, count: Value, factors: list[Value]) -> None:
        """out = out * factors + values · p"""
        f = self.f
        for column in f.loop(self.columns, step=self.together):
            rows = [self.out + (column + c) * self.row for c in range(self.together)]
            totals = [f.variable(x * by) for row in rows for x, by in zip(self._row(row, self.floats), factors, strict=True)]
            values = self.values + start * (2 * self.columns) + column * 4
            for j in f.loop(count // 2):
                p = self._row(self.scores + j * self.row, self.ints)
                at = values + j * (4 * self.columns)
                for c in range(self.together):
                    self._dot(totals[c * _VECTORS : (c + 1) * _VECTORS], p, self._pair(at, 4 * c))
            for i, total in enumerate(totals):
                rows[i // _VECTORS].store(total.value, i % _VECTORS * 4 * self.isa.lanes, 4)

    def _dot(self, totals: list[Variable], rows: list[Value], pair: Value) -> None:
        for total, row in zip(totals, rows, strict=True):
            total.value = self.isa.bf16_multiply(self.f, total.value, row, pair)

    def _write(self, out: Value, tile: Value) -> None:
        """Divide by the sums of p, and write the rows of a tile."""
        f, lanes = self.f, self.isa.lanes
        for n in range(_VECTORS):
            inverse = f.value(self.floats, 1.0) / (self.out + self.spec.dim * self.row).load(self.floats, n * 4 * lanes, 4)
            for first, count in self._vectors():
                columns = [(self.out + (first + min(i, count - 1)) * self.row).load(self.floats, n * 4 * lanes, 4) for i in range(lanes)]
                for i, y in enumerate(transposed([column * inverse for column in columns])):
                    row = out + self._query(tile, n * lanes + i) * self.get("heads") * (4 * self.spec.dim)
                    row.store(y if count == lanes else y.shuffle(range(count)), 4 * first, 4)

"""Attention of the newest tokens of each sequence to a cache, which they enter: queries and keys get their rotary positions here.

    q, k, v = a token's row of [H + 2 Hkv, D]
    q, k    = norm(q), norm(k)                             where heads have norms (Qwen3): x / sqrt(mean(x²) + eps) * weight, or 1 + weight;
                                                           v, too, without a weight (Gemma 4)
    q, k    = rope(q), rope(k)                            x * cos + (-x[R/2:R], x[:R/2]) * sin, the first R elements of D (Su et al.,
                                                           RoFormer, 2021); none where R is 0; or adjacent elements, x * cos +
                                                           (-x[1], x[0], -x[3], x[2], …) * sin (GLM, Cohere). Or before norms (Hunyuan)
    cache   takes k and v                                  where they are the layer's own (Gemma 4: or v is k, before norm and position)
    y       = softmax(scale * q · Kᵀ) · V                  over the tokens so far and itself, where the mask lets it; of capped scores
                                                           cap * tanh(score / cap) (Gemma 2); where heads have sinks (gpt-oss)
                                                           exp(sink) is added to the sum of exponentials

Arithmetic: float32, but that keys and values are rounded to the cache's type before they are multiplied, which may be the 8 bits of
`layouts/records.py`. Scores of 32 tokens at a time are exponentiated less the largest so far, sums scaled anew where that grows (Milakov
and Gimelshein, arXiv:1805.02867); each is one pass of fused multiply-adds over D, lane by lane. A query that may see nothing gets 0, as
torch's attention gives it. A NaN in q or in a key that may be seen makes y NaN; what may not be seen has weight 0.

Query heads that share a key head are taken together: keys and values come from memory once. Threads share sequences and key heads.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.errors import unreachable
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Block
from halfbyte.kernels.cpu.codegen.elements import KINDS, Kind, element_of
from halfbyte.kernels.cpu.codegen.exponential import exp, tanh
from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, phase
from halfbyte.kernels.layer_kinds import Projections, RopeInterleaved, is_interleaved, key_value_heads
from halfbyte.layouts.records import BLOCK, LEAST_SCALE, MOST, record_bytes

ATTEND = Block(
    (
        *LINEAR.fields[:4],
        # what changes from call to call; strides are in bytes
        *("cos", "sin", "rotary_batch", "rotary_token"),  # float32, of a token R / 2 elements, and any behind them; or each of these twice
        *("keys", "key_batch", "key_head", "key_token", "values", "value_batch", "value_head", "value_token"),
        *("mask", "mask_batch", "mask_token"),  # a byte a token of the cache
        "length",  # tokens that are in the cache
        # rows of queries, keys and values, float32, and of y
        *("qkv", "qkv_stride", "out", "out_stride"),
        *("batch", "tokens", "kv_heads"),  # `tokens`: new ones of each sequence
        *("q_norm", "k_norm", "sinks"),
        *("scale_eps", "cap"),
    ),
    frozenset({"scale_eps", "cap"}),
)
CacheKind = Kind | Literal["int8"]
CACHES: dict[torch.dtype, CacheKind] = {**KINDS, torch.int8: "int8"}  # of keys and values; "int8": records, `layouts/records.py`
_CHUNK = 32  # tokens of the cache
_LEAST = -3.0e38  # what scores are compared with at first: finite, so that exp(-inf - it) is 0
MOST_GROUP = 16
_ROUNDING = 1.5 * 2.0**23  # plus what is between -2^22 and 2^22: a float whose unit is 1


@dataclass(frozen=True, slots=True)
class AttendSpec:
    """What a kernel of attention is generated for.

    Attributes:
        dim: Elements of a head, D.
        group: Query heads of a key-value head, H / Hkv.
        kind: Of the cache: "f32", "bf16", "f16", or "int8" for records of codes and scales.
        normed: Whether queries and keys have norms.
        masked: Whether there is a mask.
        enters: Whether keys and values are only written to the cache, and queries normed and rotated in place, for `attend_whole.py`.
        rotary_dim: As in `ops.transformer.decoder.Heads`.
        unit_offset: Whether norms multiply by 1 + weight.
        capped: Whether scores have a soft cap.
        sinks: Whether there are attention sinks, float32 [H].
        rope_interleaved, norm_after_rope, projections, v_norm: As in `ops.transformer.decoder.Heads`.
    """

    dim: int
    group: int
    kind: CacheKind
    normed: bool
    masked: bool
    enters: bool = False
    rotary_dim: int | None = None
    unit_offset: bool = False
    capped: bool = False
    sinks: bool = False
    rope_interleaved: RopeInterleaved = ""
    norm_after_rope: bool = False
    projections: Projections = "qkv"
    v_norm: bool = False


def supports(heads: int, kv_heads: int, dim: int, rotary_dim: int | None = None) -> str | None:
    """Why these heads are not computed here; None where they are."""
    if dim % 8:
        return f"heads of {dim} are not a multiple of 8"
    if rotary_dim is not None and (rotary_dim % 8 or not 0 <= rotary_dim <= dim):
        return f"{rotary_dim} of the {dim} elements of a head, which have positions, are not a multiple of 8"
    if heads % kv_heads or heads // kv_heads > MOST_GROUP:
        return f"{heads} query heads for {kv_heads} of keys are not 1 to {MOST_GROUP} for each"
    return None


@phase
def build(spec: AttendSpec, isa: ISA, f: Function) -> None:
    _Attend(spec, isa, f).emit()


class _Attend(Emitter):
    block = ATTEND
    spec: AttendSpec

    def __init__(self, spec: AttendSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.rotary_dim = spec.dim if spec.rotary_dim is None else spec.rotary_dim
        self.lanes = next(n for n in (16, 8, 4) if n <= isa.lanes and spec.dim // 2 % n == 0 and self.rotary_dim // 2 % n == 0)
        self.floats, self.bytes = vector("float", self.lanes), 4 * self.lanes
        self.vectors = spec.dim // self.lanes
        self.queries, self.totals, self.scores = (f.alloca("float", spec.group * n, 64) for n in (spec.dim, spec.dim, _CHUNK))
        self.products = f.alloca(self.floats, spec.group * self.lanes, self.bytes)
        self.largest, self.sums = (f.alloca(self.floats, spec.group, self.bytes) for _ in range(2))

    def emit(self) -> None:
        f, spec = self.f, self.spec
        _, thread, threads = f.parameters
        tokens, kv_heads, length = (self.get(name) for name in ("tokens", "kv_heads", "length"))
        items, head_bytes = self.get("batch") * kv_heads, 4 * spec.dim
        for item in f.loop((thread + 1) * items // threads, thread * items // threads):
            b, h = item // kv_heads, item % kv_heads
            keys = self.pointer("keys") + b * self.get("key_batch") + h * self.get("key_head")
            values = self.pointer("values") + b * self.get("value_batch") + h * self.get("value_head")
            for j in f.loop(tokens) if key_value_heads(spec.projections) else ():
                row = self.pointer("qkv") + (b * tokens + j) * self.get("qkv_stride")
                key = row + (kv_heads * spec.group + h) * head_bytes
                keep(self.isa, spec.kind, keys + (length + j) * self.get("key_token"), self._placed(key, "k_norm", b, j))
                value = self._loaded(key if key_value_heads(spec.projections) == 1 else key + kv_heads * head_bytes)
                parts = self._normed(value, None) if spec.v_norm else value
                keep(self.isa, spec.kind, values + (length + j) * self.get("value_token"), parts)
            for j in f.loop(tokens):
                row = b * tokens + j
                queries = self.pointer("qkv") + row * self.get("qkv_stride") + h * (spec.group * head_bytes)
                scale = ATTEND.load_floats(self.args, "scale_eps")[0].splat(self.lanes)
                for g in range(spec.group):
                    for at, x in enumerate(self._placed(queries + g * head_bytes, "q_norm", b, j)):
                        if spec.enters:
                            (queries + g * head_bytes).store(x, at * self.bytes, 4)
                        else:
                            self.queries.store(x * scale, (g * self.vectors + at) * self.bytes, self.bytes)
                if spec.enters:
                    continue
                mask = self.pointer("mask") + b * self.get("mask_batch") + j * self.get("mask_token") if spec.masked else None
                self._begin(h)
                self._attend(keys, values, length + j + 1, mask)
                self._write(self.pointer("out") + row * self.get("out_stride") + h * (spec.group * head_bytes))

    def _placed(self, x: Value, norm: str, b: Value, j: Value) -> list[Value]:
        """A head with its norm and its position."""
        parts = self._loaded(x)
        if not self.spec.normed:
            return self._rotated(parts, b, j)
        if self.spec.norm_after_rope:
            return self._normed(self._rotated(parts, b, j), norm)
        return self._rotated(self._normed(parts, norm), b, j)

    def _loaded(self, x: Value) -> list[Value]:
        return [x.load(self.floats, at * self.bytes, 4) for at in range(self.vectors)]

    def _normed(self, parts: list[Value], norm: str | None) -> list[Value]:
        """norm: the name of its weight, if it has one."""
        f = self.f
        total = f.value(self.floats, 0.0)
        for part in parts:
            total = f.fma(part, part, total)
        eps = ATTEND.load_floats(self.args, "scale_eps")[1]
        root = inverse_root(f, total.fold(lambda a, b: a + b) * (1 / self.spec.dim) + eps).splat(self.lanes)
        if norm is None:
            return [part * root for part in parts]
        weights = self._loaded(self.pointer(norm))
        return [part * root * (w + 1.0 if self.spec.unit_offset else w) for part, w in zip(parts, weights, strict=True)]

    def _rotated(self, parts: list[Value], b: Value, j: Value) -> list[Value]:
        f = self.f
        if not self.rotary_dim:
            return parts
        angles = b * self.get("rotary_batch") + j * self.get("rotary_token")
        cos, sin = self.pointer("cos") + angles, self.pointer("sin") + angles
        half, out = self.rotary_dim // self.lanes // 2, []
        for at, part in enumerate(parts[: 2 * half]):
            if is_interleaved(self.spec.rope_interleaved):
                other = part.shuffle([i ^ 1 for i in range(self.lanes)]) * f.constant(self.floats, [-1.0, 1.0] * (self.lanes // 2))
            else:
                other = f.value(self.floats, -0.0) - parts[at + half] if at < half else parts[at - half]
            c, s = (self._of_table(table, at, half) for table in (cos, sin))
            out.append(f.fma(part, c, other * s))
        return [*out, *parts[2 * half :]]

    def _of_table(self, table: Value, at: int, half: int) -> Value:
        """The cosines, or sines, of vector `at` of a head of which rope rotates 2 * `half`."""
        match self.spec.rope_interleaved:
            case "":
                return table.load(self.floats, at % half * self.bytes, 4)
            case "repeated":
                return table.load(self.floats, at * self.bytes, 4)
            case "half":
                some = table.load(vector("float", self.lanes // 2), at * self.bytes // 2, 4)
                return some.shuffle([i // 2 for i in range(self.lanes)])
            case _:
                raise unreachable(self.spec.rope_interleaved, "the interleaving of rope,")

    def _kept(self, row: Value, at: int) -> Value:
        return kept(self.isa, self.spec.kind, self.spec.dim, row, at * self.lanes, self.lanes)

    def _begin(self, h: Value) -> None:
        """What there is before the keys of head h."""
        f, spec = self.f, self.spec
        for g in range(spec.group):
            largest, total = f.value(self.floats, _LEAST), f.value(self.floats, 0.0)
            if spec.sinks:
                sink = (self.pointer("sinks") + (h * spec.group + g) * 4).load("float", 0, 4).splat(self.lanes)
                largest = sink.max_or(_LEAST)
                first = f.constant(vector("i32", self.lanes), range(self.lanes)) < 1
                total = first.select(exp(f, sink - largest), 0.0)
            self.largest.store(largest, g * self.bytes, self.bytes)
            self.sums.store(total, g * self.bytes, self.bytes)
            for at in range(self.vectors):
                self.totals.store(f.value(self.floats, 0.0), (g * self.vectors + at) * self.bytes, self.bytes)

    def _attend(self, keys: Value, values: Value, seen: Value, mask: Value | None) -> None:
        f, spec = self.f, self.spec
        for start in f.loop(seen, step=_CHUNK):
            count = f.umin(seen - start, f.value("i64", _CHUNK))
            self._score(keys, values, start, count, seen - 1, mask)
            for g in range(spec.group):
                self._weigh(g, count)
            self._add(values + start * self.get("value_token"), keys + (start + _CHUNK) * self.get("key_token"), count)

    def _score(self, keys: Value, values: Value, start: Value, count: Value, last: Value, mask: Value | None) -> None:
        """Scores of a chunk, as many tokens at a time as a vector has lanes; behind `count` there may be anything."""
        f, spec, lanes = self.f, self.spec, self.lanes
        together = min(lanes, max(1, 8 // (1 << (spec.group - 1).bit_length())))
        for first in f.loop(count, step=lanes):
            for i in f.loop(f.umin(count - first, f.value("i64", lanes)), step=together):
                for p in range(together):
                    token = f.umin(start + first + i + p, last)
                    self._ask(values + token * self.get("value_token"))
                    row, sums = keys + token * self.get("key_token"), [f.value(self.floats, 0.0)] * spec.group
                    for at in range(self.vectors):
                        key = self._kept(row, at)
                        for g in range(spec.group):
                            query = self.queries.load(self.floats, (g * self.vectors + at) * self.bytes, self.bytes)
                            sums[g] = f.fma(key, query, sums[g])
                    may = None if mask is None else (mask + token).load("i8").equals(0)
                    for g, total in enumerate(sums):
                        score = total if may is None else may.select(f.value(self.floats, float("-inf")), total)
                        self.products.store(score, ((i + p) + lanes * g) * self.bytes, self.bytes)
            for g in range(spec.group):
                parts = [self.products.load(self.floats, (lanes * g + t) * self.bytes, self.bytes) for t in range(lanes)]
                self.scores.store(_sums(parts), first * 4 + 4 * _CHUNK * g, self.bytes)

    def _weigh(self, g: int, count: Value) -> None:
        """exp(score - largest so far) in the place of a head's scores, and what that makes of its sums."""
        f, lanes = self.f, self.lanes
        scores = []
        for v in range(_CHUNK // lanes):
            inside = f.constant(vector("i32", lanes), range(v * lanes, (v + 1) * lanes)) < count.to("i32").splat(lanes)
            score = self.scores.load(self.floats, 4 * _CHUNK * g + v * self.bytes, self.bytes)
            if self.spec.capped:
                score = capped(f, score, ATTEND.load_floats(self.args, "cap")[0])
            scores.append(inside.select(score, float("-inf")))
        largest = scores[0]
        for score in scores[1:]:
            largest = largest.max_or(score)
        before = self.largest.load(self.floats, g * self.bytes, self.bytes)
        now = largest.fold(Value.max_or).splat(lanes).max_or(before)
        shrunk, total = exp(f, before - now), f.value(self.floats, 0.0)
        for v, score in enumerate(scores):
            weight = exp(f, score - now)
            self.scores.store(weight, 4 * _CHUNK * g + v * self.bytes, self.bytes)
            total = total + weight
        sums = self.sums.load(self.floats, g * self.bytes, self.bytes)
        self.sums.store(f.fma(sums, shrunk, total), g * self.bytes, self.bytes)
        self.largest.store(now, g * self.bytes, self.bytes)
        for at in range(self.vectors):
            place = (g * self.vectors + at) * self.bytes
            self.totals.store(self.totals.load(self.floats, place, self.bytes) * shrunk, place, self.bytes)

    def _ask(self, row: Value) -> None:
        """For a token's head, which is needed in some hundred cycles: CPUs themselves read ahead in one of keys and values, not in both."""
        size = record_bytes(self.spec.dim) if self.spec.kind == "int8" else self.spec.dim * element_of(self.spec.kind).size
        for at in range(0, size, 64):
            self.f.prefetch(row + at)

    def _add(self, values: Value, after: Value, count: Value) -> None:
        """A chunk's values by their weights to the heads' sums, as many of these at a time as there are registers for."""
        f, most = self.f, 2 * self.isa.register_totals
        for begin in range(0, self.spec.group, most):
            heads = range(begin, min(begin + most, self.spec.group))
            step = max(1, most // len(heads))
            for first in range(0, self.vectors, step):
                some = range(first, min(first + step, self.vectors))
                places = [(g * self.vectors + at) * self.bytes for at in some for g in heads]
                totals = [f.variable(self.totals.load(self.floats, place, self.bytes)) for place in places]
                for i in f.loop(count):
                    weights = [self.scores.load("float", i * 4 + 4 * _CHUNK * g, 4).splat(self.lanes) for g in heads]
                    if (begin, first) == (0, 0):
                        self._ask(after + i * self.get("key_token"))
                    row = values + i * self.get("value_token")
                    value = [self._kept(row, at) for at in some]
                    for n, total in enumerate(totals):
                        total.value = f.fma(weights[n % len(heads)], value[n // len(heads)], total.value)
                for place, total in zip(places, totals, strict=True):
                    self.totals.store(total.value, place, self.bytes)

    def _write(self, to: Value) -> None:
        f = self.f
        for g in range(self.spec.group):
            total = self.sums.load(self.floats, g * self.bytes, self.bytes).fold(lambda a, b: a + b)
            inverse = total.equals(0.0).select(f.value("float", 0.0), f.value("float", 1.0) / total).splat(self.lanes)
            for at in range(self.vectors):
                place = (g * self.vectors + at) * self.bytes
                to.store(self.totals.load(self.floats, place, self.bytes) * inverse, place, 4)


def capped(f: Function, score: Value, cap: Value) -> Value:
    """cap * tanh(score / cap), but -inf of what may not be seen."""
    most = cap.splat(lanes_of(score.type))
    return (score < _LEAST).select(score, tanh(f, score / most) * most)


def inverse_root(f: Function, x: Value) -> Value:
    return f.value(x.type, 1.0) / f.call(x.type, "llvm.sqrt.f32", x)


def kept(isa: ISA, kind: CacheKind, dim: int, row: Value, at: int, lanes: int) -> Value:
    """So many elements from `at` on of a cached head of `dim`, whose bytes begin at `row`: float."""
    if kind != "int8":
        _, element, size = element_of(kind)
        return isa.to_float(row.load(vector(element, lanes), at * size, size), kind)
    scale = isa.to_float(row.load("i16", dim + at // BLOCK * 2), "bf16")
    return row.load(vector("i8", lanes), at).to("i32").to("float") * scale.splat(lanes)


def keep(isa: ISA, kind: CacheKind, row: Value, parts: list[Value]) -> None:
    """A head's elements, vector by vector, to their place in the cache; what `kept` reads."""
    lanes = lanes_of(parts[0].type)
    if kind != "int8":
        size = element_of(kind).size
        for at, x in enumerate(parts):
            row.store(isa.from_float(x, kind), at * lanes * size, size)
        return
    ints = vector("i32", lanes)
    for first in range(0, len(parts), BLOCK // lanes):
        block = parts[first : first + BLOCK // lanes]
        # Absolute values have the same order as their bits read as integers, and NaN is the largest.
        largest = functools.reduce(Value.max_or, [x.bits(ints) & 0x7FFFFFFF for x in block]).fold(Value.max_or).bits("float")
        scale = largest / float(MOST)
        stored = isa.from_float((scale < LEAST_SCALE).select(row.fn.value("float", 0.0), scale), "bf16")
        row.store(stored, len(parts) * lanes + first * lanes // BLOCK * 2)
        divisor = isa.to_float(stored, "bf16").splat(lanes)
        for at, x in enumerate(block, first):
            rounded = (x / divisor + _ROUNDING).bits(ints)  # its last bits are the integer
            row.store(rounded.to("i8"), at * lanes)


def _sums(parts: list[Value]) -> Value:
    """The sum of each of as many vectors as they have lanes, in one."""
    n = len(parts)
    while len(parts) > 1:
        half, merged = len(parts) // 2, []
        for a, b in zip(parts[:half], parts[half:], strict=True):
            kept_half = a.shuffle([j if not j & half else n + j for j in range(n)], b)
            merged.append(kept_half + a.shuffle([j + half if not j & half else n + j - half for j in range(n)], b))
        parts = merged
    return parts[0]

"""Attention of the newest tokens of each sequence to a cache, which they enter: queries and keys get their rotary positions here.

    q, k, v = a token's row of [H + 2 Hkv, D]
    q, k    = norm(q), norm(k)                             where heads have norms (Qwen3): x / sqrt(mean(x²) + eps) * weight
    q, k    = turned by the token's position               x * cos + (-x[D/2:], x[:D/2]) * sin  (Su et al., RoFormer, 2021)
    cache   takes k and v
    y       = softmax(scale * q · Kᵀ) · V                  over the tokens so far and itself, where the mask lets it

Arithmetic: float32, but that keys and values are rounded to the cache's type before they are multiplied. Scores of 32 tokens at a time
are exponentiated less the largest so far, sums scaled anew where that grows (Milakov and Gimelshein, arXiv:1805.02867); each is one pass of
fused multiply-adds over D. A query that may see nothing gets 0, as torch's attention gives it. A NaN in q or in a key that may be seen
makes y NaN; what may not be seen has weight 0.

Query heads that share a key head are taken together: keys and values come from memory once. Threads share sequences and key heads.
"""

from __future__ import annotations

from dataclasses import dataclass

from halfbyte.kernels.cpu.arguments import LINEAR, Block
from halfbyte.kernels.cpu.exponential import exp
from halfbyte.kernels.cpu.ir import Function, Value, vector
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.kernel import Emitter, phase

ATTEND = Block(
    (
        *LINEAR.fields[:4],
        # what changes from call to call; strides are in bytes
        *("cos", "sin", "rotary_batch", "rotary_token"),  # float32
        *("keys", "key_batch", "key_head", "key_token", "values", "value_batch", "value_head", "value_token"),
        *("mask", "mask_batch", "mask_token"),  # a byte a token of the cache
        "length",  # tokens that are in the cache
        # rows of queries, keys and values, float32, and of y
        *("qkv", "qkv_stride", "out", "out_stride"),
        *("batch", "tokens", "kv_heads"),  # `tokens`: new ones of each sequence
        *("q_norm", "k_norm"),
        "scale_eps",
    ),
    frozenset({"scale_eps"}),
)
_CHUNK = 32  # tokens of the cache
_LEAST = -3.0e38  # what scores are compared with at first: finite, so that exp(-inf - it) is 0
MOST_GROUP = 16


@dataclass(frozen=True, slots=True)
class AttendSpec:
    """dim: D; group: H / Hkv; kind: of the cache, "f32", "bf16" or "f16"; normed: heads have norms; masked: there is a mask; enters: all
    that is done is that the cache gets its entries, and queries norms and positions where they are, for `attend_whole.py`."""

    dim: int
    group: int
    kind: str
    normed: bool
    masked: bool
    enters: bool = False


def supports(heads: int, kv_heads: int, dim: int) -> str | None:
    """Why these heads are not computed here; None where they are."""
    if dim % 8:
        return f"heads of {dim} are not a multiple of 8"
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
        self.lanes = next(n for n in (16, 8, 4) if n <= isa.lanes and spec.dim // 2 % n == 0)
        self.floats, self.bytes = vector("float", self.lanes), 4 * self.lanes
        self.element, self.element_bytes = ("float", 4) if spec.kind == "f32" else ("i16", 2)
        self.vectors = spec.dim // self.lanes
        self.queries, self.totals, self.scores = (f.alloca("float", spec.group * n, 64) for n in (spec.dim, spec.dim, _CHUNK))
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
            for j in f.loop(tokens):
                row = self.pointer("qkv") + (b * tokens + j) * self.get("qkv_stride")
                key = row + (kv_heads * spec.group + h) * head_bytes
                for at, x in enumerate(self._turned(key, "k_norm", b, j)):
                    self._keep(keys + (length + j) * self.get("key_token"), at, x)
                value = key + kv_heads * head_bytes
                for at in range(self.vectors):
                    self._keep(values + (length + j) * self.get("value_token"), at, value.load(self.floats, at * self.bytes, 4))
            for j in f.loop(tokens):
                row = b * tokens + j
                queries = self.pointer("qkv") + row * self.get("qkv_stride") + h * (spec.group * head_bytes)
                scale = ATTEND.load_floats(self.args, "scale_eps")[0].splat(self.lanes)
                for g in range(spec.group):
                    for at, x in enumerate(self._turned(queries + g * head_bytes, "q_norm", b, j)):
                        if spec.enters:
                            (queries + g * head_bytes).store(x, at * self.bytes, 4)
                        else:
                            self.queries.store(x * scale, (g * self.vectors + at) * self.bytes, self.bytes)
                if spec.enters:
                    continue
                mask = self.pointer("mask") + b * self.get("mask_batch") + j * self.get("mask_token") if spec.masked else None
                self._attend(keys, values, length + j + 1, mask)
                self._write(self.pointer("out") + row * self.get("out_stride") + h * (spec.group * head_bytes))

    def _turned(self, x: Value, norm: str, b: Value, j: Value) -> list[Value]:
        """A head with its norm and its position."""
        f, half = self.f, self.vectors // 2
        parts = [x.load(self.floats, at * self.bytes, 4) for at in range(self.vectors)]
        if self.spec.normed:
            total = f.value(self.floats, 0.0)
            for part in parts:
                total = f.fma(part, part, total)
            eps = ATTEND.load_floats(self.args, "scale_eps")[1]
            root = inverse_root(f, total.fold(lambda a, b: a + b) * (1 / self.spec.dim) + eps).splat(self.lanes)
            weight = self.pointer(norm)
            parts = [part * root * weight.load(self.floats, at * self.bytes, 4) for at, part in enumerate(parts)]
        turn = b * self.get("rotary_batch") + j * self.get("rotary_token")
        cos, sin = self.pointer("cos") + turn, self.pointer("sin") + turn
        out = []
        for at, part in enumerate(parts):
            other = f.value(self.floats, -0.0) - parts[at + half] if at < half else parts[at - half]
            c, s = (table.load(self.floats, at * self.bytes, 4) for table in (cos, sin))
            out.append(f.fma(part, c, other * s))
        return out

    def _keep(self, to: Value, at: int, x: Value) -> None:
        size = self.element_bytes
        to.store(self.isa.from_float(x, self.spec.kind), at * self.lanes * size, size)

    def _kept(self, row: Value, at: int) -> Value:
        size = self.element_bytes
        return self.isa.to_float(row.load(vector(self.element, self.lanes), at * self.lanes * size, size), self.spec.kind)

    def _attend(self, keys: Value, values: Value, seen: Value, mask: Value | None) -> None:
        f, spec = self.f, self.spec
        for g in range(spec.group):
            self.largest.store(f.value(self.floats, _LEAST), g * self.bytes, self.bytes)
            self.sums.store(f.value(self.floats, 0.0), g * self.bytes, self.bytes)
            for at in range(self.vectors):
                self.totals.store(f.value(self.floats, 0.0), (g * self.vectors + at) * self.bytes, self.bytes)
        for start in f.loop(seen, step=_CHUNK):
            count = f.umin(seen - start, f.value("i64", _CHUNK))
            self._score(keys, start, count, seen - 1, mask)
            for g in range(spec.group):
                self._weigh(g, count)
            for g in range(spec.group):
                self._add(g, values + start * self.get("value_token"), count)

    def _score(self, keys: Value, start: Value, count: Value, last: Value, mask: Value | None) -> None:
        """Scores of a chunk, some tokens at a time; behind `count` they are those of the last token."""
        f, spec = self.f, self.spec
        together = max(1, 8 // (1 << (spec.group - 1).bit_length()))
        for i in f.loop(count, step=together):
            for p in range(together):
                token = f.umin(start + i + p, last)
                row, sums = keys + token * self.get("key_token"), [f.value(self.floats, 0.0)] * spec.group
                for at in range(self.vectors):
                    key = self._kept(row, at)
                    for g in range(spec.group):
                        query = self.queries.load(self.floats, (g * self.vectors + at) * self.bytes, self.bytes)
                        sums[g] = f.fma(key, query, sums[g])
                may = None if mask is None else (mask + token).load("i8").equals(0)
                for g, total in enumerate(sums):
                    score = total.fold(lambda a, b: a + b)
                    score = score if may is None else may.select(f.value("float", float("-inf")), score)
                    self.scores.store(score, (i + p) * 4 + 4 * _CHUNK * g, 4)

    def _weigh(self, g: int, count: Value) -> None:
        """exp(score - largest so far) in the place of a head's scores, and what that makes of its sums."""
        f, lanes = self.f, self.lanes
        scores = []
        for v in range(_CHUNK // lanes):
            inside = f.constant(vector("i32", lanes), range(v * lanes, (v + 1) * lanes)) < count.to("i32").splat(lanes)
            score = self.scores.load(self.floats, 4 * _CHUNK * g + v * self.bytes, self.bytes)
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

    def _add(self, g: int, values: Value, count: Value) -> None:
        """A chunk's values by their weights to a head's sums, eight vectors at a time."""
        f, step = self.f, 8
        for first in range(0, self.vectors, step):
            some = range(first, min(first + step, self.vectors))
            places = [(g * self.vectors + at) * self.bytes for at in some]
            totals = [f.variable(self.totals.load(self.floats, place, self.bytes)) for place in places]
            for i in f.loop(count):
                weight = self.scores.load("float", i * 4 + 4 * _CHUNK * g, 4).splat(self.lanes)
                row = values + i * self.get("value_token")
                for at, total in zip(some, totals, strict=True):
                    total.value = f.fma(weight, self._kept(row, at), total.value)
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


def inverse_root(f: Function, x: Value) -> Value:
    return f.value(x.type, 1.0) / f.call(x.type, "llvm.sqrt.f32", x)

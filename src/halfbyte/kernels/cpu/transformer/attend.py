"""Decode attention on a CPU: qk_norm and rope of a few new tokens, their keys and values into the KV cache, causal attention to it.

`attention_sublayer.py` plans it between qkv and o_proj; for many tokens it does the first two only (`enters`), `attend_whole.py` the rest.
H query heads, Hkv key-value heads, D elements of a head, R of which rope rotates, T tokens in the cache. For each new token:

    q, k, v  = the token's row of qkv: [H, D], [Hkv, D], [Hkv, D]
    q, k     = norm(q), norm(k)              qk_norm (Qwen3): x / sqrt(mean(x²) + eps) * weight, or * (1 + weight); v without a weight
                                             (Gemma 4)
    q, k     = rope(q), rope(k)              the first R elements: x * cos + (-x[R/2:R], x[:R/2]) * sin (Su et al., RoFormer, 2021), or,
                                             interleaved, x * cos + (-x[1], x[0], -x[3], x[2], …) * sin (GLM, Cohere); before the norm
                                             where `norm_after_rope` (Hunyuan)
    K, V     = cache with k, v appended      `projections`: "qk": v is the k of qkv, before norm and rope (Gemma 4); "q": nothing is
                                             appended, as the cache is that of another layer and has the tokens already (kv_source)
    score    = scale * q · Kᵀ                [H, T]; cap * tanh(score / cap) where there is a softcap (Gemma 2); -inf where masked
    y        = exp(score) · V / (sum of exp(score) + exp(sink))         [H, D]; without exp(sink) where there are no sinks (gpt-oss)

Arithmetic: float32; K and V are first rounded to the cache's dtype, which may be the int8 records of `layouts/records.py`. A score is one
pass of fused multiply-adds over D, into a partial sum for each lane. Softmax is online (Milakov and Gimelshein, arXiv:1805.02867), as in
FlashAttention: for 32 tokens of the cache at a time (`_CHUNK`) it subtracts the running maximum, and rescales the sums so far where that
grows. A query whose keys are all masked gets 0, as in torch. A NaN in q or in an unmasked key makes y NaN; a masked key has weight 0.

A work item is one key-value head of one sequence with the H / Hkv query heads that share it (GQA), so that K and V are read from memory
once. Each thread takes a contiguous range of the items.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass
from typing import Literal

import torch

from halfbyte.errors import unreachable
from halfbyte.kernels.cpu.codegen.arguments import Block
from halfbyte.kernels.cpu.codegen.elementary import exp, tanh
from halfbyte.kernels.cpu.codegen.elements import KINDS, Kind, element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import Emitter, phase
from halfbyte.kernels.layer_kinds import Projections, RopeInterleaved, is_interleaved, num_kv_projections
from halfbyte.layouts.records import BLOCK, LEAST_SCALE, MOST, record_bytes

ATTEND = Block(
    # From "cos" to "length": packed anew for each call. Names are those of addresses, and of strides in bytes.
    # rope caches, float32: for each token the R / 2 cosines of its angles, or R for `rope_interleaved` "repeated"; more are ignored
    *("cos", "sin", "rotary_batch", "rotary_token"),
    *("keys", "key_batch", "key_head", "key_token", "values", "value_batch", "value_head", "value_token"),
    *("mask", "mask_batch", "mask_token"),  # a byte for each token of the cache, new ones included: 0 is masked
    "length",  # tokens in the cache before the new ones, the same for all sequences
    *("qkv", "qkv_stride", "out", "out_stride"),  # float32, a row for each new token
    *("batch", "tokens", "kv_heads"),  # `tokens`: new ones of each sequence
    *("q_norm", "k_norm", "sinks"),  # weights of norms [D] and logits of sinks [H], float32
    *("scale_eps", "cap"),  # pairs of float32: the factor of scores and the eps of norms; the softcap and an unused one
    floats=["scale_eps", "cap"],
)
CacheKind = Kind | Literal["int8"]
CACHES: dict[torch.dtype, CacheKind] = {**KINDS, torch.int8: "int8"}  # of keys and values; "int8": records, `layouts/records.py`
_CHUNK = 32  # tokens of the cache between two rescalings of online softmax
LEAST_SCORE = -3.0e38  # the running maximum at first: finite, so that exp(-inf - LEAST_SCORE) of a masked score is 0, not exp(NaN)
MOST_GROUP = 16  # query heads of a key-value head: the code is unrolled over them
_ROUNDING = 1.5 * 2.0**23  # x + it rounds |x| < 2^22 to an integer, ties to even, which the low bits of the sum's mantissa hold


@dataclass(frozen=True, slots=True)
class AttendSpec:
    """The constants that a kernel is generated for; all sizes that change are fields of ATTEND.

    Attributes:
        dim: Elements of a head, D.
        group: Query heads of a key-value head, H / Hkv.
        kind: Element type of the cache: "f32", "bf16", "f16", or "int8" for records of codes and scales.
        normed: Whether queries and keys have norms (qk_norm).
        masked: Whether there is a mask in addition to the causal one.
        enters: Whether the kernel does not attend: keys and values enter the cache, and queries are normed and rotated in place, for
            `attend_whole.py`.
        rotary_dim: Elements that rope rotates, R; None: D; 0: no rope.
        unit_offset: Whether norms multiply by 1 + weight.
        capped: Whether scores have a softcap.
        sinks: Whether there are attention sinks, float32 [H].
        rope_interleaved, norm_after_rope, projections, v_norm: As in `ops.transformer.sublayers.Heads`.
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
    """Return the reason why these heads are not supported; None if they are.

    Args:
        heads, kv_heads: Numbers of query and of key-value heads, H and Hkv.
        dim: Elements of a head, D.
        rotary_dim: Elements that rope rotates, R; None: D.
    """
    if dim % 8:
        return f"heads of {dim} are not a multiple of 8"
    if rotary_dim is not None and (rotary_dim % 8 or not 0 <= rotary_dim <= dim):
        return f"{rotary_dim} of the {dim} elements of a head, which have positions, are not a multiple of 8"
    if heads % kv_heads or heads // kv_heads > MOST_GROUP:
        return f"{heads} query heads for {kv_heads} of keys are not 1 to {MOST_GROUP} for each"
    return None


@phase
def build(spec: AttendSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel for a specification; its arguments are an ATTEND block, its thread and the number of threads."""
    _Attend(spec, isa, f).emit()


class _Attend(Emitter):
    """Emits the kernel.

    Vectors have `lanes` floats, `bytes` bytes; a head is `vectors` of them, a list of Values in registers. `at` numbers the vectors of a
    head, g the G query heads of the group, b sequences, h key-value heads, j new tokens. The state of a group is on the stack, as it does
    not fit into registers:

        queries   float [G, D]             q * scale
        scores    float [G, _CHUNK]        of a chunk; `_update_softmax` replaces them by weights exp(score - largest)
        products  float [G, lanes, lanes]  q * k before the sum over lanes, of `lanes` tokens
        largest   float [G, lanes]         the running maximum, the same in all lanes
        sums      float [G, lanes]         sums of weights so far, a part in each lane
        totals    float [G, D]             sums of weight * v so far
    """

    block = ATTEND
    spec: AttendSpec

    def __init__(self, spec: AttendSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        self.rotary_dim = spec.dim if spec.rotary_dim is None else spec.rotary_dim
        # A vector may not lie across the middle of a head, nor of its rotated part.
        self.lanes = next(n for n in (16, 8, 4) if n <= isa.lanes and spec.dim // 2 % n == 0 and self.rotary_dim // 2 % n == 0)
        self.floats, self.bytes = vector("float", self.lanes), 4 * self.lanes
        self.vectors = spec.dim // self.lanes
        self.queries, self.totals, self.scores = (f.alloca("float", spec.group * n, 64) for n in (spec.dim, spec.dim, _CHUNK))
        self.products = f.alloca(self.floats, spec.group * self.lanes, self.bytes)
        self.largest, self.sums = (f.alloca(self.floats, spec.group, self.bytes) for _ in range(2))

    def emit(self) -> None:
        """Emit the loops over work items and new tokens."""
        f, spec = self.f, self.spec
        tokens, kv_heads, length = (self.get(name) for name in ("tokens", "kv_heads", "length"))
        items, head_bytes = self.get("batch") * kv_heads, 4 * spec.dim
        for item in f.share(items):
            b, h = item // kv_heads, item % kv_heads
            keys = self.pointer("keys") + b * self.get("key_batch") + h * self.get("key_head")
            values = self.pointer("values") + b * self.get("value_batch") + h * self.get("value_head")
            # Keys and values of all new tokens enter the cache, before a query reads them there.
            for j in f.loop(tokens) if num_kv_projections(spec.projections) else ():
                row = self.pointer("qkv") + (b * tokens + j) * self.get("qkv_stride")
                key = row + (kv_heads * spec.group + h) * head_bytes
                store_head(self.isa, spec.kind, keys + (length + j) * self.get("key_token"), self._load_normed_rotated(key, "k_norm", b, j))
                value = self._load(key if num_kv_projections(spec.projections) == 1 else key + kv_heads * head_bytes)
                value = self._normed(value, None) if spec.v_norm else value
                store_head(self.isa, spec.kind, values + (length + j) * self.get("value_token"), value)
            # Queries of one token after the other: norm, rope and scale, then attention to the tokens up to it.
            for j in f.loop(tokens):
                row = b * tokens + j
                queries = self.pointer("qkv") + row * self.get("qkv_stride") + h * (spec.group * head_bytes)
                scale = ATTEND.load_floats(self.args, "scale_eps")[0].splat(self.lanes)
                for g in range(spec.group):
                    for at, x in enumerate(self._load_normed_rotated(queries + g * head_bytes, "q_norm", b, j)):
                        if spec.enters:
                            (queries + g * head_bytes).store(x, at * self.bytes, 4)
                        else:
                            self.queries.store(x * scale, (g * self.vectors + at) * self.bytes, self.bytes)
                if spec.enters:
                    continue
                mask = self.pointer("mask") + b * self.get("mask_batch") + j * self.get("mask_token") if spec.masked else None
                self._init_softmax(h)
                self._attend(keys, values, length + j + 1, mask)  # causal: new tokens after it are not seen
                self._write_output(self.pointer("out") + row * self.get("out_stride") + h * (spec.group * head_bytes))

    def _load_normed_rotated(self, x: Value, norm: str, b: Value, j: Value) -> list[Value]:
        """Load the head at address `x`, of token j of sequence b, and apply qk_norm and rope; norm: the field of the norm's weight."""
        head = self._load(x)
        if not self.spec.normed:
            return self._rotated(head, b, j)
        if self.spec.norm_after_rope:
            return self._normed(self._rotated(head, b, j), norm)
        return self._rotated(self._normed(head, norm), b, j)

    def _load(self, x: Value) -> list[Value]:
        """Load the D floats at address `x`, aligned to 4 bytes."""
        return [x.load(self.floats, at * self.bytes, 4) for at in range(self.vectors)]

    def _normed(self, parts: list[Value], norm: str | None) -> list[Value]:
        """Apply RMSNorm to a head; norm: the field of its weight, None for a norm without a weight."""
        f = self.f
        total = f.value(self.floats, 0.0)
        for part in parts:
            total = f.fma(part, part, total)
        eps = ATTEND.load_floats(self.args, "scale_eps")[1]
        root = inverse_root(f, total.fold(lambda a, b: a + b) * (1 / self.spec.dim) + eps).splat(self.lanes)
        if norm is None:
            return [part * root for part in parts]
        weights = self._load(self.pointer(norm))
        return [part * root * (w + 1.0 if self.spec.unit_offset else w) for part, w in zip(parts, weights, strict=True)]

    def _rotated(self, parts: list[Value], b: Value, j: Value) -> list[Value]:
        """Apply rope, at the position of token j of sequence b, to the first R elements of a head."""
        f = self.f
        if not self.rotary_dim:
            return parts
        position = b * self.get("rotary_batch") + j * self.get("rotary_token")  # bytes
        cos, sin = self.pointer("cos") + position, self.pointer("sin") + position
        half, out = self.rotary_dim // self.lanes // 2, []
        for at, part in enumerate(parts[: 2 * half]):
            if is_interleaved(self.spec.rope_interleaved):
                partner = part.shuffle([i ^ 1 for i in range(self.lanes)]) * f.constant(self.floats, [-1.0, 1.0] * (self.lanes // 2))
            else:
                partner = f.value(self.floats, -0.0) - parts[at + half] if at < half else parts[at - half]  # -0.0 - x is -x, also of 0
            c, s = (self._rope_vector(table, at, half) for table in (cos, sin))
            out.append(f.fma(part, c, partner * s))
        return [*out, *parts[2 * half :]]

    def _rope_vector(self, table: Value, at: int, half: int) -> Value:
        """Load the cosines, or sines, for vector `at` of a head, 2 * `half` vectors of which rope rotates; table: a token's rope cache."""
        match self.spec.rope_interleaved:
            case "":
                return table.load(self.floats, at % half * self.bytes, 4)
            case "repeated":
                return table.load(self.floats, at * self.bytes, 4)
            case "half":
                pair_values = table.load(vector("float", self.lanes // 2), at * self.bytes // 2, 4)
                return pair_values.shuffle([i // 2 for i in range(self.lanes)])  # each one twice, for a pair of elements
            case _:
                raise unreachable(self.spec.rope_interleaved, "the interleaving of rope,")

    def _load_cached(self, row: Value, at: int) -> Value:
        """Load vector `at` of the cached head at address `row`, as floats."""
        return load_head(self.isa, self.spec.kind, self.spec.dim, row, at * self.lanes, self.lanes)

    def _init_softmax(self, h: Value) -> None:
        """Initialize the state of the query heads of key-value head h: empty sums, or the sink's exponential alone."""
        f, spec = self.f, self.spec
        for g in range(spec.group):
            largest, total = f.value(self.floats, LEAST_SCORE), f.value(self.floats, 0.0)
            if spec.sinks:
                sink = (self.pointer("sinks") + (h * spec.group + g) * 4).load("float", 0, 4).splat(self.lanes)
                largest = sink.max_keeping_nan(LEAST_SCORE)
                first_lane = f.constant(vector("i32", self.lanes), range(self.lanes)) < 1  # as `sums` are added over lanes in the end
                total = first_lane.select(exp(f, sink - largest), 0.0)
            self.largest.store(largest, g * self.bytes, self.bytes)
            self.sums.store(total, g * self.bytes, self.bytes)
            for at in range(self.vectors):
                self.totals.store(f.value(self.floats, 0.0), (g * self.vectors + at) * self.bytes, self.bytes)

    def _attend(self, keys: Value, values: Value, seen: Value, mask: Value | None) -> None:
        """Add the first `seen` tokens of a key-value head's cache to the state, chunk by chunk; mask: of the query's token, a byte each."""
        f, spec = self.f, self.spec
        for start in f.loop(seen, step=_CHUNK):
            count = f.umin(seen - start, f.value("i64", _CHUNK))
            self._write_scores(keys, values, start, count, seen - 1, mask)
            for g in range(spec.group):
                self._update_softmax(g, count)
            self._accumulate_values(values + start * self.get("value_token"), keys + (start + _CHUNK) * self.get("key_token"), count)

    def _write_scores(self, keys: Value, values: Value, start: Value, count: Value, last: Value, mask: Value | None) -> None:
        """Write the scores of a chunk of `count` tokens from `start` on, -inf where masked; those after `count` are undefined.

        q * k is summed over lanes for `lanes` tokens at once, by a transposition in registers (`_sums_over_lanes`); they are computed
        `together` at a time, so that the sums of all query heads fit into registers. After `last`, the last token of the cache, it is
        repeated.
        """
        f, spec, lanes = self.f, self.spec, self.lanes
        # About 8 accumulators, tokens x query heads; a power of two, as it has to divide `lanes`.
        together = min(lanes, max(1, 8 // (1 << (spec.group - 1).bit_length())))
        for first in f.loop(count, step=lanes):
            for i in f.loop(f.umin(count - first, f.value("i64", lanes)), step=together):
                for p in range(together):
                    token = f.umin(start + first + i + p, last)
                    self._prefetch_head(values + token * self.get("value_token"))
                    row, sums = keys + token * self.get("key_token"), [f.value(self.floats, 0.0)] * spec.group
                    for at in range(self.vectors):
                        key = self._load_cached(row, at)
                        for g in range(spec.group):
                            query = self.queries.load(self.floats, (g * self.vectors + at) * self.bytes, self.bytes)
                            sums[g] = f.fma(key, query, sums[g])
                    is_masked = None if mask is None else (mask + token).load("i8").equals(0)
                    for g, total in enumerate(sums):
                        score = total if is_masked is None else is_masked.select(f.value(self.floats, float("-inf")), total)
                        self.products.store(score, ((i + p) + lanes * g) * self.bytes, self.bytes)
            for g in range(spec.group):
                products = [self.products.load(self.floats, (lanes * g + t) * self.bytes, self.bytes) for t in range(lanes)]
                self.scores.store(_sums_over_lanes(products), first * 4 + 4 * _CHUNK * g, self.bytes)

    def _update_softmax(self, g: int, count: Value) -> None:
        """Do online softmax's step for a chunk: replace a head's scores by weights, and rescale its sums to the new maximum.

        The new maximum is max(old, scores); a weight is exp(score - new); `sums` = `sums` * exp(old - new) + weights; `totals` are
        multiplied by exp(old - new). The maximum may pass over a NaN score, but its weight is NaN, and so are the sums.
        """
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
            largest = largest.max_keeping_nan(score)
        old = self.largest.load(self.floats, g * self.bytes, self.bytes)
        new = largest.fold(Value.max_keeping_nan).splat(lanes).max_keeping_nan(old)
        rescale, total = exp(f, old - new), f.value(self.floats, 0.0)
        for v, score in enumerate(scores):
            weight = exp(f, score - new)
            self.scores.store(weight, 4 * _CHUNK * g + v * self.bytes, self.bytes)
            total = total + weight
        sums = self.sums.load(self.floats, g * self.bytes, self.bytes)
        self.sums.store(f.fma(sums, rescale, total), g * self.bytes, self.bytes)
        self.largest.store(new, g * self.bytes, self.bytes)
        for at in range(self.vectors):
            place = (g * self.vectors + at) * self.bytes
            self.totals.store(self.totals.load(self.floats, place, self.bytes) * rescale, place, self.bytes)

    def _prefetch_head(self, row: Value) -> None:
        """Prefetch a token's head, which is needed in some hundred cycles: hardware prefetchers follow keys or values, not both in turn."""
        size = record_bytes(self.spec.dim) if self.spec.kind == "int8" else self.spec.dim * element_of(self.spec.kind).size
        for at in range(0, size, 64):
            self.f.prefetch(row + at)

    def _accumulate_values(self, values: Value, after: Value, count: Value) -> None:
        """Add weight * v of a chunk of `count` tokens to `totals`.

        `totals` stay in registers over the chunk: tiles of some query heads x some vectors, as many as there are registers for.

        Args:
            values: Address of the chunk's first value.
            after: Address of the first key of the next chunk, which the first tile prefetches.
            count: Tokens of the chunk.
        """
        f, registers = self.f, 2 * self.isa.tuning.register_totals
        for begin in range(0, self.spec.group, registers):
            heads = range(begin, min(begin + registers, self.spec.group))
            step = max(1, registers // len(heads))
            for first in range(0, self.vectors, step):
                columns = range(first, min(first + step, self.vectors))
                places = [(g * self.vectors + at) * self.bytes for at in columns for g in heads]
                totals = [f.variable(self.totals.load(self.floats, place, self.bytes)) for place in places]
                for i in f.loop(count):
                    weights = [self.scores.load("float", i * 4 + 4 * _CHUNK * g, 4).splat(self.lanes) for g in heads]
                    if (begin, first) == (0, 0):
                        self._prefetch_head(after + i * self.get("key_token"))
                    row = values + i * self.get("value_token")
                    value = [self._load_cached(row, at) for at in columns]
                    for n, total in enumerate(totals):
                        total.value = f.fma(weights[n % len(heads)], value[n // len(heads)], total.value)
                for place, total in zip(places, totals, strict=True):
                    self.totals.store(total.value, place, self.bytes)

    def _write_output(self, to: Value) -> None:
        """Write y [G, D] = totals / sums to address `to`; 0 where all keys are masked, whose sum is 0."""
        f = self.f
        for g in range(self.spec.group):
            total = self.sums.load(self.floats, g * self.bytes, self.bytes).fold(lambda a, b: a + b)
            inverse = total.equals(0.0).select(f.value("float", 0.0), f.value("float", 1.0) / total).splat(self.lanes)
            for at in range(self.vectors):
                place = (g * self.vectors + at) * self.bytes
                to.store(self.totals.load(self.floats, place, self.bytes) * inverse, place, 4)


def capped(f: Function, score: Value, cap: Value) -> Value:
    """Return the softcap of scores, cap * tanh(score / cap); a masked score stays -inf, as -cap would have a weight."""
    caps = cap.splat(lanes_of(score.type))
    return (score < LEAST_SCORE).select(score, tanh(f, score / caps) * caps)


def inverse_root(f: Function, x: Value) -> Value:
    """Return 1 / sqrt(x) of a float, by a square root and a division, not an approximation."""
    return f.value(x.type, 1.0) / f.call(x.type, "llvm.sqrt.f32", x)


def load_head(isa: ISA, kind: CacheKind, dim: int, row: Value, at: int, lanes: int) -> Value:
    """Load `lanes` elements of a cached head, from element `at` on, as floats; dequantize int8.

    Args:
        isa: Converts bfloat16 and float16.
        kind: Element type of the cache.
        dim: Elements of a head, D: an int8 record has D codes, then a bfloat16 scale for each 32.
        row: Address of the head.
        at: Multiple of `lanes`, so that the elements share a scale.
        lanes: Number of elements, at most 32.
    """
    if kind != "int8":
        _, element, size = element_of(kind)
        return isa.to_float(row.load(vector(element, lanes), at * size, size), kind)
    scale = isa.to_float(row.load("i16", dim + at // BLOCK * 2), "bf16")
    return row.load(vector("i8", lanes), at).to("i32").to("float") * scale.splat(lanes)


def store_head(isa: ISA, kind: CacheKind, row: Value, parts: list[Value]) -> None:
    """Store a head in the cache, rounded or quantized to its element type: the inverse of `load_head`.

    Args:
        isa: Converts to bfloat16 and float16.
        kind: Element type of the cache.
        row: Address of the head.
        parts: The D floats, as vectors.
    """
    lanes = lanes_of(parts[0].type)
    if kind != "int8":
        size = element_of(kind).size
        for at, x in enumerate(parts):
            row.store(isa.from_float(x, kind), at * lanes * size, size)
        return
    # int8: scale = bfloat16(max |x| / 127) of each 32 elements, code = round(x / scale). A scale that would be denormal is stored as 0: the
    # codes, of x / 0, are then arbitrary, and dequantize to 0. A NaN or infinite element makes the scale not finite, and the block NaN.
    ints = vector("i32", lanes)
    for first in range(0, len(parts), BLOCK // lanes):
        block = parts[first : first + BLOCK // lanes]
        # Absolute values have the same order as their bits read as integers, and NaN is the largest.
        magnitudes = [x.bits(ints) & 0x7FFFFFFF for x in block]
        largest = functools.reduce(Value.max_keeping_nan, magnitudes).fold(Value.max_keeping_nan).bits("float")
        scale = largest / float(MOST)
        stored = isa.from_float((scale < LEAST_SCALE).select(row.fn.value("float", 0.0), scale), "bf16")
        row.store(stored, len(parts) * lanes + first * lanes // BLOCK * 2)
        divisor = isa.to_float(stored, "bf16").splat(lanes)
        for at, x in enumerate(block, first):
            rounded = (x / divisor + _ROUNDING).bits(ints)  # its low 8 bits are the code
            row.store(rounded.to("i8"), at * lanes)


def _sums_over_lanes(parts: list[Value]) -> Value:
    """Return the vector of the sums over lanes of n vectors of n lanes: element i is the sum of parts[i].

    Each round halves the number of vectors: half of the lanes of two vectors are exchanged, as in a transposition, and added.
    """
    n = len(parts)
    while len(parts) > 1:
        half, merged = len(parts) // 2, []
        for a, b in zip(parts[:half], parts[half:], strict=True):
            in_place = a.shuffle([j if not j & half else n + j for j in range(n)], b)
            merged.append(in_place + a.shuffle([j + half if not j & half else n + j - half for j in range(n)], b))
        parts = merged
    return parts[0]

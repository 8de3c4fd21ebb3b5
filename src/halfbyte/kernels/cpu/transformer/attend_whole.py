"""Attention of many queries on a CPU: of whole sequences, as encoders compute it, or of a decoder's prompt to its KV cache.

    y[b, i, h] = sum over j of  p[j] * v[b, h, j],   p = softmax over j of scale * q[b, h, i] · k[b, h, j] + bias[b, h, i, j]

over the keys j that the mask lets query i see; in a decoder (`causal`) those up to its own position. `attention_sublayer.py` and
`encoder.py` plan it as a step; `attend` is the call of `ops/transformer/attention.py`.

A work item is one key-value head of one sequence, or a part of its queries, those of all query heads that share it (GQA). The thread lays
out keys, transposed, and values, up to MOST_AT_ONCE at a time, in memory of its own, which stays in its caches. Then tiles of _ROWS queries
attend to all of these keys, so that their scores stay in the first-level cache, too.

Arithmetic: float32. Each score is one pass of fused multiply-adds over D, then multiplied by `scale`; a bias is added without a rounding
between. Weights are exponentials (`elementary.py`) of scores less the largest; each output is one pass of fused multiply-adds over the
keys, divided by the sum of exponentials. For more than MOST_AT_ONCE keys softmax is online: outputs so far are rescaled (Milakov and
Gimelshein, arXiv:1805.02867). A query whose keys are all masked gets 0, as in torch. A masked key has weight 0; 0 * NaN is NaN.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Block, Buffer
from halfbyte.kernels.cpu.codegen.elementary import exp
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, arguments, compiled, phase, run
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.cpu.transformer.attend import LEAST_SCORE, CacheKind, capped, load_head
from halfbyte.layouts.base import round_up

WHOLE = Block(
    *("q", "q_batch", "q_head", "q_token"),  # strides are in bytes; the D elements of a token's head lie side by side
    *("before", "length"),  # keys before that of the first query, and all keys
    *("k", "k_batch", "k_head", "k_token"),
    *("v", "v_batch", "v_head", "v_token"),
    *("mask", "mask_batch", "mask_token"),  # a byte for each key: 0 is masked
    *("bias", "bias_batch", "bias_head", "bias_token"),  # of scores, float32
    *("out", "batch", "heads", "tokens", "padded", "parts"),  # key-value heads; most keys at a time; parts of a head's queries
    *("scratch", "thread_bytes"),  # memory of all threads, and of one
    "sinks",  # float32, a logit of each query head
    "scale",  # two floats: the scale of scores and the softcap
    floats=["scale"],
)
_pack = WHOLE.struct().pack
MOST_AT_ONCE = 512  # keys that are laid out at a time
_ROWS, _VECTORS = 6, 2  # queries of a tile, and vectors of keys, or of outputs, that they are multiplied with at a time
_WORK_A_THREAD = 1 << 17  # multiplications for which another thread is worth waking
_ROWS_A_PART = 64  # least queries of a part of a head


@dataclass(frozen=True, slots=True)
class WholeSpec:
    """What a kernel is generated for.

    Attributes:
        dim: Elements of a head, D.
        masked: There is a mask.
        biased: A bias is added to scores.
        group: Query heads that share a key-value head.
        kind: Element type of keys and values, as in AttendSpec.
        causal: No query sees keys behind its own.
        capped, sinks: As in AttendSpec.
    """

    dim: int
    masked: bool
    biased: bool = False
    group: int = 1
    kind: CacheKind = "f32"
    causal: bool = False
    capped: bool = False
    sinks: bool = False


class _Query(NamedTuple):
    """A row of a tile: its elements' address, the first masked key in each lane, and the addresses of its mask and bias."""

    x: Value
    limits: Value
    mask: Value
    bias: Value


@phase
def build(spec: WholeSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel; its arguments are a WHOLE block, its thread and the number of threads."""
    _Whole(spec, isa, f).emit()


class _Whole(Emitter):
    """Emits the kernel.

    A work item is a part of the query rows of one key-value head of one sequence: rows are its tokens times the query heads that share
    the head (GQA), `_ROWS` of them a tile. A block of at most MOST_AT_ONCE keys and values is laid out in the thread's scratch memory, and
    all tiles of the item go over it, with online softmax from block to block.

    Scratch memory of a thread, float32:

        keys    [padded, D]       transposed in groups of _VECTORS vectors of keys
        values  [padded, D]       with D padded to whole vectors
        scores  [_ROWS, padded]   of a tile; `_exponentiate` replaces them by exp(score - largest)
        sums    [rows, 2]         the running maximum of each row, and the sum of its exponentials
    """

    block = WHOLE
    spec: WholeSpec

    def __init__(self, spec: WholeSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, self.threads = f.parameters
        # Heads of float32 end with a vector that is partly masked; those of other types are loaded in whole vectors.
        self.lanes = next(n for n in (16, 8, 4) if n <= isa.lanes and (spec.kind == "f32" or spec.dim % n == 0))
        self.floats, self.bytes = vector("float", self.lanes), 4 * self.lanes
        self.rows, self.padded = self.get("tokens") * spec.group, self.get("padded")
        self.keys = self.pointer("scratch") + self.thread * self.get("thread_bytes")
        self.values = self.keys + self.padded * (4 * spec.dim)
        self.value_bytes = 4 * round_up(spec.dim, self.lanes)
        self.scores = self.values + self.padded * self.value_bytes
        self.sums = self.scores + self.padded * (4 * _ROWS)

    def emit(self) -> None:
        """Emit the loops over work items, blocks of keys and tiles of rows."""
        f, heads, parts, group = self.f, self.get("heads"), self.get("parts"), self.spec.group
        tiles = (self.rows + (_ROWS - 1)) // _ROWS
        for item in f.draw_items(self.args + WHOLE.offset("counter"), self.get("batch") * heads * parts):
            head, part = item // parts, item % parts
            b, h = head // heads, head % heads
            k, v = (self.pointer(x) + b * self.get(f"{x}_batch") + h * self.get(f"{x}_head") for x in "kv")
            first, stop = part * tiles // parts, (part + 1) * tiles // parts
            visible = self._visible_keys(f.umin(stop * _ROWS, self.rows) - 1)
            for start in f.loop((visible + (self.padded - 1)) // self.padded):
                start = start * self.padded
                count = f.umin(visible - start, self.padded)
                self._transpose(k + start * self.get("k_token"), count)
                for j in f.loop(count):
                    for at in range(0, self.spec.dim, self.lanes):
                        value = self._load(v + (start + j) * self.get("v_token"), at)
                        self.values.store(value, j * self.value_bytes + 4 * at, self.bytes)
                begin = first
                if self.spec.causal:  # skips rows that see none of these keys
                    first_key = start - self.get("before")
                    begin = (first_key > 0).select(first_key, 0) * group // _ROWS
                    begin = (begin < first).select(first, begin)
                for tile in f.loop(stop, begin):
                    # Rows after the last are the last again, computed and written more than once.
                    self._tile(b, h, [f.umin(tile * _ROWS + i, self.rows - 1) for i in range(_ROWS)], start, count)

    def _visible_keys(self, row: Value) -> Value:
        """Return how many keys this row, and those before it, may attend to."""
        return self.get("before") + row // self.spec.group + 1 if self.spec.causal else self.get("length")

    def _tile(self, b: Value, h: Value, rows: list[Value], start: Value, count: Value) -> None:
        """Attend from a tile of rows to the block of `count` keys from `start` on: online softmax's step, and the output so far."""
        group, dim = self.spec.group, self.spec.dim
        places = [(row // group, h * group + row % group) for row in rows]
        columns = self.f.umin(self._visible_keys(rows[-1]) - start, count)
        is_first = start.equals(0)
        initial, states = [self._initial_state(head) for _, head in places], [self.sums + row * 8 for row in rows]
        before = [is_first.select(largest, at.load("float", 0, 4)) for (largest, _), at in zip(initial, states, strict=True)]
        before_sums = [is_first.select(total, at.load("float", 4, 4)) for (_, total), at in zip(initial, states, strict=True)]
        queries = [
            self._query((b, head, token), start, self._visible_keys(row) - start) for (token, head), row in zip(places, rows, strict=True)
        ]
        largest = self._write_scores(queries, columns, before)
        sums = [
            self._exponentiate(i, columns, now, so_far, total)
            for i, (now, so_far, total) in enumerate(zip(largest, before, before_sums, strict=True))
        ]
        for at, now, (total, _) in zip(states, largest, sums, strict=True):
            at.store(now, 0, 4)
            at.store(total, 4, 4)
        heads = self.get("heads") * group
        outputs = [((b * self.get("tokens") + token) * heads + head) * (4 * dim) for token, head in places]
        self._write_output(outputs, sums, columns, is_first)

    def _initial_state(self, head: Value) -> tuple[Value, Value]:
        """Return the running maximum and the sum of exponentials of a query head before any key: the sink's alone, where there is one."""
        f = self.f
        if not self.spec.sinks:
            return f.value("float", LEAST_SCORE), f.value("float", 0.0)
        sink = (self.pointer("sinks") + head * 4).load("float", 0, 4)
        largest = sink.max_keeping_nan(LEAST_SCORE)
        return largest, exp(f, sink - largest)

    def _head_pointer(self, name: str, b: Value, head: Value) -> Value:
        return self.pointer(name) + b * self.get(f"{name}_batch") + head * self.get(f"{name}_head")

    def _load(self, row: Value, at: int) -> Value:
        """Load a vector of a cached head, from element `at` on, as floats; 0 behind its last element."""
        count = min(self.lanes, self.spec.dim - at)
        return self._widened(load_head(self.isa, self.spec.kind, self.spec.dim, row, at, count))

    def _widened(self, part: Value) -> Value:
        """Fill a vector of the last elements of a head up with zeros."""
        count = lanes_of(part.type)
        if count == self.lanes:
            return part
        return part.shuffle([min(i, count) for i in range(self.lanes)], self.f.value(part.type, 0.0))

    def _transpose(self, k: Value, count: Value) -> None:
        """Lay out `count` keys so that the vectors that are multiplied together are contiguous for each element.

        `lanes` keys by `lanes` elements are transposed in registers at a time; keys after the last are the last again.
        """
        f, n = self.f, self.lanes
        step = _VECTORS * n
        for block in f.loop((count + (step - 1)) // step * _VECTORS):
            rows = [k + f.umin(block * n + i, count - 1) * self.get("k_token") for i in range(n)]
            place = self.keys + block // _VECTORS * (4 * step * self.spec.dim) + block % _VECTORS * self.bytes
            for d in range(0, self.spec.dim, n):
                for i, column in enumerate(transposed([self._load(row, d) for row in rows])[: self.spec.dim - d]):
                    place.store(column, (d + i) * (4 * step), self.bytes)

    def _query(self, place: tuple[Value, Value, Value], start: Value, limit: Value) -> _Query:
        """Return the addresses of the row of a (sequence, head, token), which attends to keys start … limit - 1."""
        b, head, token = place
        mask = self.pointer("mask") + b * self.get("mask_batch") + token * self.get("mask_token") + start
        bias = self._head_pointer("bias", b, head) + token * self.get("bias_token") + start * 4
        limits = limit.to("i32").splat(self.lanes)
        return _Query(self._head_pointer("q", b, head) + token * self.get("q_token"), limits, mask, bias)

    def _write_scores(self, queries: list[_Query], columns: Value, before: list[Value]) -> list[Value]:
        """Write the scores of at least `columns` keys, -inf where masked; return the new maximum of each query, from the one `before`."""
        f, step = self.f, _VECTORS * self.lanes
        largest = [f.variable(so_far.splat(self.lanes)) for so_far in before]
        vectors = (columns + (self.lanes - 1)) // self.lanes
        for j in f.loop(vectors // _VECTORS):
            self._score_vectors(queries, j * step, _VECTORS, largest)
        with f.when((vectors % _VECTORS).differs(0)):
            self._score_vectors(queries, vectors // _VECTORS * step, 1, largest)
        return [each.value.fold(lambda x, y: x.max_keeping_nan(y)) for each in largest]

    def _score_vectors(self, queries: list[_Query], first: Value, vectors: int, largest: list[Variable]) -> None:
        """Store the scores of so many vectors of keys from key `first` on, where a group of contiguous keys begins."""
        f, n, step = self.f, self.lanes, _VECTORS * self.lanes
        totals = [f.variable(f.value(self.floats, 0.0)) for _ in range(_ROWS * vectors)]
        column, ints = self.keys + first * (4 * self.spec.dim), vector("i32", self.lanes)
        for d in f.loop(self.spec.dim):
            self._multiply_add(totals, [query.x + d * 4 for query in queries], column + d * (4 * step))
        scale, cap = WHOLE.load_floats(self.args, "scale")
        scale = scale.splat(n)
        for i, query in enumerate(queries):
            for v in range(vectors):
                at, score = first + v * n, totals[i * vectors + v].value
                visible = at.to("i32").splat(n) + f.constant(ints, range(n)) < query.limits
                if self.spec.masked:
                    visible = visible & ((query.mask + at).load(vector("i8", n)).to("i32").equals(0).select(f.value(ints, 0), 1) > 0)
                score = f.fma(score, scale, (query.bias + at * 4).load(self.floats, 0, 4)) if self.spec.biased else score * scale
                if self.spec.capped:
                    score = capped(f, score, cap)
                score = visible.select(score, float("-inf"))
                self.scores.store(score, (self.padded * i + at) * 4, self.bytes)
                largest[i].value = score.max_keeping_nan(largest[i].value)

    def _multiply_add(self, totals: list[Variable], factors: list[Value], vectors: Value) -> None:
        """Add each row's factor times the same vectors to the row's totals."""
        count = len(totals) // _ROWS
        loaded = [vectors.load(self.floats, v * self.bytes, self.bytes) for v in range(count)]
        for i, factor in enumerate(factors):
            x = factor.load("float", 0, 4).splat(self.lanes)
            for total, w in zip(totals[i * count :], loaded, strict=False):
                total.value = self.f.fma(w, x, total.value)

    def _exponentiate(self, i: int, columns: Value, now: Value, before: Value, sum_before: Value) -> tuple[Value, Value]:
        """Replace the scores of row `i` by exponentials; return their sum over all blocks so far, and the part of it of earlier blocks.

        Args:
            i: The row of the tile.
            columns: Keys of this block that the row may attend to.
            now, before: The running maximum with and without this block.
            sum_before: The sum of exponentials of earlier blocks, relative to `before`; it is rescaled to `now`.
        """
        f, row, top = self.f, self.scores + self.padded * (4 * i), now.splat(self.lanes)
        total = f.variable(f.value(self.floats, 0.0))
        for j in f.loop((columns + (self.lanes - 1)) // self.lanes):
            at = row + j * self.bytes
            weight = exp(f, at.load(self.floats, 0, self.bytes) - top)
            at.store(weight, 0, self.bytes)
            total.value = total.value + weight
        rescaled = exp(f, before.splat(self.lanes) - top).shuffle((0, 1)).fold(lambda x, _: x) * sum_before
        return total.value.fold(lambda x, y: x + y) + rescaled, rescaled

    def _write_output(self, places: list[Value], sums: list[tuple[Value, Value]], columns: Value, is_first: Value) -> None:
        """Write the softmax-weighted sums of the values of all blocks so far.

        Args:
            places: Offsets of the rows in the output.
            sums: Of exponentials: over all blocks so far, and over the earlier ones, by which what the output has is weighted.
            columns: Keys of this block.
            is_first: Whether it is the first block, so that the output is undefined yet.
        """
        f, out, vectors = self.f, self.pointer("out"), -(-self.spec.dim // self.lanes)
        counts = [min(self.lanes, self.spec.dim - v * self.lanes) for v in range(vectors)]
        inverse = [s.equals(0.0).select(f.value("float", 0.0), f.value("float", 1.0) / s).splat(self.lanes) for s, _ in sums]
        earlier = [part.splat(self.lanes) for _, part in sums]
        for first in range(0, vectors, _VECTORS):
            some = range(first, min(first + _VECTORS, vectors))
            totals = []
            for place, part in zip(places, earlier, strict=True):
                for v in some:
                    so_far = self._widened((out + place).load(vector("float", counts[v]), v * self.bytes, 4)) * part
                    totals.append(f.variable(is_first.select(f.value(self.floats, 0.0), so_far)))
            for j in f.loop(columns):
                weights = [self.scores + (self.padded * i + j) * 4 for i in range(_ROWS)]
                self._multiply_add(totals, weights, self.values + j * self.value_bytes + first * self.bytes)
            for i, place in enumerate(places):
                for v in some:
                    y = totals[i * len(some) + v - first].value * inverse[i]
                    (out + place).store(y if counts[v] == self.lanes else y.shuffle(range(counts[v])), v * self.bytes, 4)


def transposed(rows: Sequence[Value]) -> list[Value]:
    """Return the columns of as many vectors as each has lanes, a power of two."""
    n, square = len(rows), list(rows)
    half = n // 2
    while half:  # swap the halves of squares of 2 * half that lie off their diagonals
        for i in range(n):
            if not i & half:
                a, b = square[i], square[i + half]
                square[i] = a.shuffle([j if not j & half else n + j - half for j in range(n)], b)
                square[i + half] = a.shuffle([j + half if not j & half else n + j for j in range(n)], b)
        half //= 2
    return square


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Return whether `attend` takes these tensors.

    Args:
        query: [B, H, T, D] float32 on the CPU, D contiguous and a positive multiple of 4, T > 0.
        key, value: [B, H, S, D] The same, S > 0.
        mask: [B or 1, 1, T or 1, S] bool on the CPU, S contiguous.
    """
    if not all(x.dim() == 4 and x.dtype == torch.float32 and x.is_cpu and x.stride(3) == 1 for x in (query, key, value)):
        return False
    (batch, heads, tokens, dim), length = query.shape, key.shape[2]
    if not (key.shape == value.shape == (batch, heads, length, dim) and tokens > 0 and length > 0 and dim > 0 and dim % 4 == 0):
        return False
    if mask is None:
        return True
    fits = mask.dim() == 4 and mask.shape[0] in (1, batch) and mask.shape[2] in (1, tokens) and mask.shape[1::2] == (1, length)
    return fits and mask.dtype == torch.bool and mask.is_cpu and mask.stride(3) == 1


def sizes(length: int, rows: int, dim: int, isa: ISA) -> tuple[int, int]:
    """Return how many of `length` keys are laid out at a time, padded to whole vectors, and the bytes of scratch memory of a thread.

    Args:
        length: Keys; MOST_AT_ONCE stands for any number.
        rows: Queries of a key-value head of one sequence: tokens times the query heads that share it.
        dim: Elements of a head.
        isa: The instruction set.
    """
    lanes = min(16, isa.lanes)
    padded = round_up(min(length, MOST_AT_ONCE), _VECTORS * lanes)
    return padded, 4 * padded * (dim + round_up(dim, lanes) + _ROWS) + 8 * round_up(rows, 8)


def parts(heads: int, rows: int, threads: int) -> int:
    """Return into how many parts the `rows` queries of each of so many key-value heads are cut, so that all threads have some."""
    return max(1, min(4 * threads // heads, rows // _ROWS_A_PART)) if heads else 1


class Heads(NamedTuple):
    """The heads of a tensor [B, T, H * D] in memory, float32.

    Attributes:
        address: Of the first head of the first token.
        row_bytes: From a token to the next.
        tokens: T
    """

    address: int
    row_bytes: int
    tokens: int


class SequenceAttention(NamedTuple):
    """Attention of whole sequences, with as many heads of keys as of queries.

    Attributes:
        batch, heads, head_dim: B, H and D.
        scale: What q · k is multiplied by.
        threads: That compute it.
    """

    batch: int
    heads: int
    head_dim: int
    scale: float
    threads: int


class AttentionScratch(NamedTuple):
    """Scratch memory of attention.

    Attributes:
        address: Of all threads' memory.
        padded, thread_bytes: What `sizes` returned, here or in `attend_bf16.py`.
    """

    address: int
    padded: int
    thread_bytes: int


def sequence_step(
    function: int, attention: SequenceAttention, queries: Heads, keys: Heads, values: Heads, out: int, scratch: AttentionScratch
) -> Buffer:
    """Return the arguments of attention of whole sequences as a step, without mask and bias.

    Args:
        function: Address of the code: `build` compiled, or that of `attend_bf16.py`.
        attention: Sizes, scale and threads.
        queries, keys, values: Where they are.
        out: Address of the result [B, T, H * D], contiguous float32.
        scratch: Memory of the threads.
    """
    fields: dict[str, int | tuple[float, float]] = {"tokens": queries.tokens, "length": keys.tokens, "out": out}
    for name, heads in (("q", queries), ("k", keys), ("v", values)):
        fields |= {name: heads.address, f"{name}_batch": heads.tokens * heads.row_bytes}
        fields |= {f"{name}_head": 4 * attention.head_dim, f"{name}_token": heads.row_bytes}
    fields |= {
        "batch": attention.batch,
        "heads": attention.heads,
        "parts": parts(attention.batch * attention.heads, queries.tokens, attention.threads),
        "scratch": scratch.address,
        "padded": scratch.padded,
        "thread_bytes": scratch.thread_bytes,
        "scale": (attention.scale, 0.0),
    }
    return arguments(WHOLE, function, fields)


def readable(scores: Tensor) -> Tensor:
    """Return a mask or bias whose rows are padded to whole vectors, which the kernel loads."""
    more = -scores.shape[3] % 16
    return torch.nn.functional.pad(scores, (0, more)) if more else scores


def mask_fields(mask: Tensor | None) -> tuple[int, ...]:
    """Return the fields `mask`, `mask_batch` and `mask_token`."""
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *_strides(mask, 0, 2))


def bias_fields(bias: Tensor | None) -> tuple[int, ...]:
    """Return the fields `bias`, `bias_batch`, `bias_head` and `bias_token`."""
    return (0, 0, 0, 0) if bias is None else (bias.data_ptr(), *_strides(bias, 0, 1, 2))


def _strides(scores: Tensor, *dimensions: int) -> tuple[int, ...]:
    """Return the strides of these dimensions in bytes; 0 where they are broadcast."""
    return tuple(scores.itemsize * scores.stride(i) * (scores.shape[i] > 1) for i in dimensions)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, bias: Tensor | None = None) -> Tensor:
    """Compute attention of tensors that `supports` accepts.

    Args:
        query: [B, H, T, D].
        key, value: [B, H, S, D].
        mask: True where a key is seen; None: all are.
        scale: Of scores.
        bias: [B or 1, H or 1, T or 1, S] float32 with contiguous last dimension, added to scores.

    Returns:
        [B, T, H, D].
    """
    length = key.shape[2]
    batch, heads, tokens, dim = query.shape
    isa = current()
    out = torch.empty(batch, tokens, heads, dim, dtype=torch.float32, device="cpu")
    padded, thread_bytes = sizes(length, tokens, dim, isa)
    work = 2 * batch * heads * tokens * length * dim
    threads = runtime.useful_threads(work, _WORK_A_THREAD)
    mask, bias = (None if scores is None else readable(scores) for scores in (mask, bias))
    _memory, scratch = PLANS.memory(threads * thread_bytes)
    q, k, v = ((x.data_ptr(), *(4 * s for s in x.stride()[:3])) for x in (query, key, value))
    numbers = batch, heads, tokens, padded, parts(batch * heads, tokens, threads), scratch, thread_bytes
    function = compiled(build, WholeSpec(dim, mask is not None, bias is not None), isa)
    scores = *mask_fields(mask), *bias_fields(bias)
    # Arguments go by position: for a few tokens, names would take as long as the kernel.
    block = _pack(function, 0, runtime.openmp_address(), 0, *q, 0, length, *k, *v, *scores, out.data_ptr(), *numbers, 0, scale, 0.0)
    run(ctypes.create_string_buffer(block, len(block)), threads)
    return out

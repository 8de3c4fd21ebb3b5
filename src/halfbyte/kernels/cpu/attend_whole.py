"""Attention of whole, short sequences, as encoders have it: every token sees every other, where a mask lets it.

    y[b, i, h] = sum over j of  p[j] * v[b, h, j],   p = softmax over j of scale * q[b, h, i] · k[b, h, j] + bias[b, h, i, j]

A thread takes one head of one sequence after the other. It writes the keys transposed, and the values, into memory of its own, which
stays in its caches; then a few queries at a time meet all keys, so that their scores stay in the first-level cache too.

Arithmetic: float32. Each score is one pass of fused multiply-adds over D, then multiplied by `scale`, and the bias added, if
there is one, without a rounding between; exponentials (`exponential.py`)
of scores less the largest; each output one pass of fused multiply-adds over the tokens, then divided by the sum of exponentials. A query
that may see nothing gets 0, as torch's attention gives it. What may not be seen has weight 0, though 0 * NaN is NaN.

It wins where torch's kernel, which is made for long sequences, spends its time around small products; `MOST_TOKENS` is where that ends.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.kernels.cpu import runtime
from halfbyte.kernels.cpu.arguments import LINEAR, Block
from halfbyte.kernels.cpu.exponential import exp
from halfbyte.kernels.cpu.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current
from halfbyte.kernels.cpu.kernel import Emitter, compiled, phase
from halfbyte.kernels.cpu.linear import thread as thread_memory
from halfbyte.layouts.base import round_up

WHOLE = Block(
    (
        *LINEAR.fields[:4],
        *("q", "q_batch", "q_head", "q_token"),  # strides are in bytes; the D elements of a token's head lie side by side
        *("k", "k_batch", "k_head", "k_token"),
        *("v", "v_batch", "v_head", "v_token"),
        *("mask", "mask_batch", "mask_token"),  # a byte for each token that is seen
        *("bias", "bias_batch", "bias_head", "bias_token"),  # of scores, float32
        *("out", "batch", "heads", "tokens", "padded"),
        *("scratch", "thread_bytes"),
        "scale",
    ),
    frozenset({"scale"}),
)
_pack = WHOLE.struct().pack
MOST_TOKENS = 512
_ROWS, _VECTORS = 6, 2  # a tile of accumulators
_LEAST = -3.0e38  # what scores are compared with at first: finite, so that exp(-inf - it) is 0
_WORK_A_THREAD = 1 << 17  # multiplications


@dataclass(frozen=True, slots=True)
class WholeSpec:
    """dim: D; masked: there is a mask; biased: something is added to scores."""

    dim: int
    masked: bool
    biased: bool = False


@phase
def build(spec: WholeSpec, isa: ISA, f: Function) -> None:
    _Whole(spec, isa, f).emit()


class _Whole(Emitter):
    block = WHOLE
    spec: WholeSpec

    def __init__(self, spec: WholeSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, self.threads = f.parameters
        self.lanes = next(n for n in (16, 8, 4) if n <= isa.lanes and spec.dim % n == 0)
        self.floats, self.bytes = vector("float", self.lanes), 4 * self.lanes
        self.tokens, self.padded = self.get("tokens"), self.get("padded")
        self.keys = self.pointer("scratch") + self.thread * self.get("thread_bytes")
        self.values = self.keys + self.padded * (4 * spec.dim)
        self.scores = self.values + self.padded * (4 * spec.dim)

    def emit(self) -> None:
        f, heads = self.f, self.get("heads")
        items = self.get("batch") * heads
        for item in f.loop((self.thread + 1) * items // self.threads, self.thread * items // self.threads):
            b, h = item // heads, item % heads
            q, k, v = (self.pointer(x) + b * self.get(f"{x}_batch") + h * self.get(f"{x}_head") for x in "qkv")
            self._transpose(k)
            for j in f.loop(self.tokens):
                for at in range(0, 4 * self.spec.dim, self.bytes):
                    self.values.store((v + j * self.get("v_token")).load(self.floats, at, 4), j * (4 * self.spec.dim) + at, self.bytes)
            for tile in f.loop((self.tokens + (_ROWS - 1)) // _ROWS):
                # Behind the last token it comes again: the same is computed and written more than once.
                tokens = [f.umin(tile * _ROWS + i, self.tokens - 1) for i in range(_ROWS)]
                self._score([q + token * self.get("q_token") for token in tokens])
                sums = [self._exponentiate(i, b, h, token) for i, token in enumerate(tokens)]
                self._write([((b * self.tokens + token) * heads + h) * (4 * self.spec.dim) for token in tokens], sums)

    def _transpose(self, k: Value) -> None:
        """The keys, `lanes` of them and of their elements at a time; behind the last token it comes again."""
        f, n = self.f, self.lanes
        for block in f.loop(self.padded // n):
            rows = [k + f.umin(block * n + i, self.tokens - 1) * self.get("k_token") for i in range(n)]
            for d in range(0, self.spec.dim, n):
                square = [row.load(self.floats, 4 * d, 4) for row in rows]
                half = n // 2
                while half:  # swap the halves of squares of 2 * half that lie off their diagonals
                    for i in range(n):
                        if not i & half:
                            a, b = square[i], square[i + half]
                            square[i] = a.shuffle([j if not j & half else n + j - half for j in range(n)], b)
                            square[i + half] = a.shuffle([j + half if not j & half else n + j for j in range(n)], b)
                    half //= 2
                for i, column in enumerate(square):
                    self.keys.store(column, (self.padded * (d + i) + block * n) * 4, self.bytes)

    def _score(self, queries: list[Value]) -> None:
        """scores[i] = q[i] · keys, `padded` of them."""
        f, step = self.f, _VECTORS * self.lanes
        for j in f.loop(self.padded // step):
            totals, column = self._totals(_VECTORS), self.keys + j * (4 * step)
            for d in f.loop(self.spec.dim):
                self._multiply_add(totals, [q + d * 4 for q in queries], column + d * (self.padded * 4))
            for i in range(_ROWS):
                for v in range(_VECTORS):
                    self.scores.store(totals[i * _VECTORS + v].value, (self.padded * i + j * step + v * self.lanes) * 4, self.bytes)

    def _totals(self, vectors: int) -> list[Variable]:
        return [self.f.variable(self.f.value(self.floats, 0.0)) for _ in range(_ROWS * vectors)]

    def _multiply_add(self, totals: list[Variable], factors: list[Value], vectors: Value) -> None:
        """Adds each row's factor times the same vectors."""
        count = len(totals) // _ROWS
        loaded = [vectors.load(self.floats, v * self.bytes, self.bytes) for v in range(count)]
        for i, factor in enumerate(factors):
            x = factor.load("float", 0, 4).splat(self.lanes)
            for total, w in zip(totals[i * count :], loaded, strict=False):
                total.value = self.f.fma(w, x, total.value)

    def _exponentiate(self, i: int, b: Value, h: Value, token: Value) -> Value:
        """Scores to exponentials; their sum."""
        f, n = self.f, self.lanes
        scale = WHOLE.load_floats(self.args, "scale")[0].splat(n)
        row, ints = self.scores + self.padded * (4 * i), vector("i32", n)
        largest = f.variable(f.value(self.floats, _LEAST))
        mask = self.pointer("mask") + b * self.get("mask_batch") + token * self.get("mask_token")
        bias = self.pointer("bias") + b * self.get("bias_batch") + h * self.get("bias_head")
        bias = bias + token * self.get("bias_token")
        for j in f.loop(self.padded // n):
            at = row + j * self.bytes
            here = (j * n).to("i32").splat(n) + f.constant(ints, range(n))
            seen = here < self.tokens.to("i32").splat(n)
            if self.spec.masked:
                seen = seen & ((mask + j * n).load(vector("i8", n)).to("i32").equals(0).select(f.value(ints, 0), 1) > 0)
            score = at.load(self.floats, 0, self.bytes)
            score = f.fma(score, scale, (bias + j * self.bytes).load(self.floats, 0, 4)) if self.spec.biased else score * scale
            score = seen.select(score, float("-inf"))
            at.store(score, 0, self.bytes)
            largest.value = score.max_or(largest.value)
        top = largest.value.fold(lambda x, y: x.max_or(y)).splat(n)
        total = f.variable(f.value(self.floats, 0.0))
        for j in f.loop(self.padded // n):
            at = row + j * self.bytes
            weight = exp(f, at.load(self.floats, 0, self.bytes) - top)
            at.store(weight, 0, self.bytes)
            total.value = total.value + weight
        return total.value.fold(lambda x, y: x + y)

    def _write(self, places: list[Value], sums: list[Value]) -> None:
        f, out, vectors = self.f, self.pointer("out"), self.spec.dim // self.lanes
        inverse = [s.equals(0.0).select(f.value("float", 0.0), f.value("float", 1.0) / s).splat(self.lanes) for s in sums]
        for first in range(0, vectors, _VECTORS):
            some = min(_VECTORS, vectors - first)
            totals = self._totals(some)
            for j in f.loop(self.tokens):
                weights = [self.scores + (self.padded * i + j) * 4 for i in range(_ROWS)]
                self._multiply_add(totals, weights, self.values + j * (4 * self.spec.dim) + first * self.bytes)
            for i, place in enumerate(places):
                for v in range(some):
                    (out + place).store(totals[i * some + v].value * inverse[i], (first + v) * self.bytes, 4)


def supports(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None) -> bool:
    """Whether `attend` takes these: float32 [B, H, T, D] on the CPU, of one shape, a head's elements side by side; mask bool
    [B or 1, 1, T or 1, T] with its tokens side by side."""
    shape = query.shape
    alike = query.dim() == 4 and key.shape == shape and value.shape == shape and 0 < shape[2] <= MOST_TOKENS and shape[3] % 4 == 0
    plain = all(x.dtype == torch.float32 and x.is_cpu and x.stride(3) == 1 for x in (query, key, value))
    if mask is None or not (alike and plain):
        return alike and plain and shape[3] > 0
    fits = mask.dim() == 4 and mask.shape[3] == shape[2] and mask.shape[2] in (1, shape[2]) and mask.shape[1] == 1
    return fits and mask.shape[0] in (1, shape[0]) and mask.dtype == torch.bool and mask.stride(3) == 1


def sizes(tokens: int, dim: int, isa: ISA) -> tuple[int, int]:
    """Up to how many tokens keys and scores have places, and the bytes of memory that each thread takes."""
    step = _VECTORS * next(n for n in (16, 8, 4) if n <= isa.lanes and dim % n == 0)
    padded = round_up(tokens, step)
    return padded, 4 * padded * (2 * dim + _ROWS)


def readable(scores: Tensor, padded: int) -> Tensor:
    """A mask or bias with whole vectors to read: `padded` elements for each query."""
    more = padded - scores.shape[3]
    return torch.nn.functional.pad(scores, (0, more)) if more else scores


def mask_fields(mask: Tensor | None) -> tuple[int, ...]:
    """`mask`, `mask_batch` and `mask_token`."""
    return (0, 0, 0) if mask is None else (mask.data_ptr(), *_strides(mask, 0, 2))


def bias_fields(bias: Tensor | None) -> tuple[int, ...]:
    """`bias`, `bias_batch`, `bias_head` and `bias_token`."""
    return (0, 0, 0, 0) if bias is None else (bias.data_ptr(), *_strides(bias, 0, 1, 2))


def _strides(scores: Tensor, *dimensions: int) -> tuple[int, ...]:
    """In bytes; 0 where all share one."""
    return tuple(scores.itemsize * scores.stride(i) * (scores.shape[i] > 1) for i in dimensions)


def attend(query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float, bias: Tensor | None = None) -> Tensor:
    """[B, H, T, D] each, mask bool, True where a token is seen -> [B, T, H, D]. The caller has asked `supports`.

    bias  float32 [B or 1, H or 1, T or 1, T] with contiguous last dimension
    """
    batch, heads, tokens, dim = query.shape
    isa = current()
    out = torch.empty(batch, tokens, heads, dim, dtype=torch.float32, device="cpu")
    padded, thread_bytes = sizes(tokens, dim, isa)
    work = 2 * batch * heads * tokens * tokens * dim
    threads = max(1, min(runtime.threads(), batch * heads, work // _WORK_A_THREAD))
    mask, bias = (None if scores is None else readable(scores, padded) for scores in (mask, bias))
    strides = [n for x in (query, key, value) for n in (x.data_ptr(), *(4 * s for s in x.stride()[:3]))]
    _memory, scratch = thread_memory.memory(threads * thread_bytes)
    numbers = batch, heads, tokens, padded, scratch, thread_bytes
    function = compiled(build, WholeSpec(dim, mask is not None, bias is not None), isa)
    scores = *mask_fields(mask), *bias_fields(bias)
    block = _pack(function, 0, runtime.openmp_address(), 0, *strides, *scores, out.data_ptr(), *numbers, scale, 0.0)
    buffer = ctypes.create_string_buffer(block, len(block))
    runtime.runner()(ctypes.addressof(buffer), threads)
    return out

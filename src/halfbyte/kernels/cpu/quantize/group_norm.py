"""GroupNorm and SiLU of images in channels_last in one native call, and their quantization with one scale for each image.

    y = silu((x + a - mean) / sqrt(var + eps) * weight + bias)          x [B, C, H, W], mean and var over a group's channels and pixels
    scale = max|y| * (1/127),  codes = round(y * (127 / max|y|))        as `images.py`

(Y. Wu, K. He, arXiv:1803.08494.) `a` [B, C], what a residual block of a diffusion model adds for its time step, is optional, as SiLU is.
Images are read twice, for sums and for y. max|y| needs no pass of its own: it follows from the least and the largest x of each channel, as
SiLU falls from 0 to -0.2785 at -1.2785 and rises from there on. Where the least y before it is below that, 0.2785 counts as reached.

Arithmetic: float32. Each channel is summed less the mean of 16 of its pixels, so that a mean far from 0 costs the variance no digits, in
blocks of 64 pixels, whose sums are added. A group's variance is that within its channels plus that of their means. The scale of an image
with a NaN or infinite y is NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Block
from halfbyte.kernels.cpu.codegen.elementary import rounded_codes, silu
from halfbyte.kernels.cpu.codegen.elements import KINDS, Kind, element_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, bytes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, arguments, compiled, phase
from halfbyte.kernels.cpu.plan_cache import Call
from halfbyte.kernels.cpu.transformer.attend import inverse_root

GROUP_NORM = Block(
    *("x", "out", "weight", "bias", "added", "scales"),  # what changes from call to call; all but x and codes are float32
    *("sums", "affine", "batch", "pixels", "channels", "groups", "threads"),  # threads: that share the pixels; any more are idle
    "eps",
    floats=["eps"],
)
pack_tensors, TENSORS = GROUP_NORM.struct("x", "scales").pack_into, GROUP_NORM.offset("x")
_TOGETHER = 4  # vectors
_SAMPLES, _BLOCK = 16, 64  # pixels
_SUMS = 5  # rows
_ELEMENTS_A_THREAD = 1 << 14
_LOWEST_AT, _LOWEST = -1.2784645, 0.2784646  # where SiLU is least, and its magnitude there, rounded up
_Work = Literal["sums", "write"]


@dataclass(frozen=True, slots=True)
class GroupNormSpec:
    """work: which pass; kind: elements of x; codes: y is quantized; activated: there is a SiLU; added: something is added to x."""

    work: _Work
    kind: Kind
    codes: bool
    activated: bool
    added: bool


@phase
def build(spec: GroupNormSpec, isa: ISA, f: Function) -> None:
    _GroupNorm(spec, isa, f).emit()


class _GroupNorm(Emitter):
    """Emits a pass. Threads share the pixels of each image.

    Memory, float32:

        sums    [threads, B, 5, C]   what is subtracted; sums of differences and of their squares; for codes the least and the largest x
        affine  [threads, 2, C]      factor and summand of x, which every thread computes for itself; means and squares before that
    """

    block = GROUP_NORM
    spec: GroupNormSpec

    def __init__(self, spec: GroupNormSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.thread, threads = f.parameters
        self.threads = f.umin(threads, self.get("threads"))
        self.lanes, self.bytes, self.size = isa.lanes, 4 * isa.lanes, element_of(spec.kind).size
        self.batch, self.pixels, self.channels = (self.get(name) for name in ("batch", "pixels", "channels"))
        self.row = self.channels * 4  # bytes of floats, one for each channel
        self.sums_row = self.row * _SUMS  # bytes of an image's sums
        self.affine = self.pointer("affine") + self.thread * (self.row * 2)

    def emit(self) -> None:
        with self.f.when(self.thread < self.threads):
            for b in self.f.loop(self.batch):
                if self.spec.work == "sums":
                    self._over_channels(functools.partial(self._sum, b))
                    continue
                self._write_affine(b)
                self._write(b)

    def _over_channels(self, body: Callable[[Value, int], None]) -> None:
        """body(first channel, vectors) for all channels, `_TOGETHER` vectors at a time and what is left one by one."""
        step = _TOGETHER * self.lanes
        whole = self.channels // step * step
        for c in self.f.loop(whole, step=step):
            body(c, _TOGETHER)
        for c in self.f.loop(self.channels, start=whole, step=self.lanes):
            body(c, 1)

    def _range(self) -> tuple[Value, Value]:
        """The first of the thread's pixels, and the end."""
        return self.thread * self.pixels // self.threads, (self.thread + 1) * self.pixels // self.threads

    def _load(self, b: Value, pixel: Value, c: Value) -> Value:
        """A vector of channels of a pixel, as floats."""
        at = self.pointer("x") + ((b * self.pixels + pixel) * self.channels + c) * self.size
        return self.isa.to_float(at.load(vector(element_of(self.spec.kind).stored, self.lanes), 0, self.size), self.spec.kind)

    def _floats(self, at: Value) -> Value:
        return at.load(self.isa.floats, 0, 4)

    def _sum(self, b: Value, c: Value, vectors: int) -> None:
        """The sums of some channels over the thread's pixels."""
        f, zero = self.f, self.f.value(self.isa.floats, 0.0)
        places = [c + v * self.lanes for v in range(vectors)]
        shifts = [f.variable(zero) for _ in places]
        for i in f.loop(_SAMPLES):
            for shift, place in zip(shifts, places, strict=True):
                shift.value = f.fma(self._load(b, i * self.pixels // _SAMPLES, place), f.value(zero.type, 1 / _SAMPLES), shift.value)
        means = [shift.value for shift in shifts]
        first, stop = self._range()
        totals = [f.variable(zero) for _ in range(2 * vectors)]
        extremes = [f.variable(f.value(zero.type, x)) for x in (float("inf"), float("-inf")) for _ in places] if self.spec.codes else []
        for start in f.loop(stop, first, _BLOCK):
            sums = [f.variable(zero) for _ in totals]
            for pixel in f.loop(f.umin(start + _BLOCK, stop), start):
                for v, place in enumerate(places):
                    x = self._load(b, pixel, place)
                    if extremes:
                        extremes[v].value = x.min_keeping_nan(extremes[v].value)
                        extremes[vectors + v].value = x.max_keeping_nan(extremes[vectors + v].value)
                    difference = x - means[v]
                    sums[v].value = sums[v].value + difference
                    sums[vectors + v].value = f.fma(difference, difference, sums[vectors + v].value)
            for total, part in zip(totals, sums, strict=True):
                total.value = total.value + part.value
        to = self.pointer("sums") + (self.thread * self.batch + b) * self.sums_row
        for n, value in enumerate([*means, *(each.value for each in (*totals, *extremes))]):
            (to + self.row * (n // vectors) + places[n % vectors] * 4).store(value, 0, 4)

    def _of_threads(self, sums: Value, row: int, first: Value, combine: Callable[[Value, Value], Value]) -> Value:
        """A row of the sums, combined over the threads."""
        total = self.f.variable(first)
        for t in self.f.loop(self.threads):
            total.value = combine(self._floats(sums + t * self.batch * self.sums_row + self.row * row), total.value)
        return total.value

    def _write_affine(self, b: Value) -> None:
        """Factors and summands of all channels from the sums of all threads."""
        f, count, zero, affine = self.f, self.pixels.to("float"), self.f.value(self.isa.floats, 0.0), self.affine
        sums, added = self.pointer("sums") + b * self.sums_row, self.pointer("added") + b * self.row
        for c in f.loop(self.channels, step=self.lanes):
            total, squares = (self._of_threads(sums + c * 4, row, zero, lambda x, y: x + y) for row in (1, 2))
            mean = total / count.splat(self.lanes)
            within = squares - total * mean
            mean = mean + self._floats(sums + c * 4)
            if self.spec.added:
                mean = mean + self._floats(added + c * 4)
            (affine + c * 4).store(mean, 0, 4)
            (affine + self.row + c * 4).store(within, 0, 4)
        size = self.channels // self.get("groups")
        elements = size.to("float") * count
        for g in f.loop(self.get("groups")):
            first, stop = g * size, (g + 1) * size
            sum_of_means, within_sum, between = (f.variable(f.value("float", 0.0)) for _ in range(3))
            for c in f.loop(stop, first):
                sum_of_means.value = sum_of_means.value + (affine + c * 4).load("float", 0, 4)
                within_sum.value = within_sum.value + (affine + self.row + c * 4).load("float", 0, 4)
            mean = sum_of_means.value / size.to("float")
            for c in f.loop(stop, first):
                difference = (affine + c * 4).load("float", 0, 4) - mean
                between.value = f.fma(difference, difference, between.value)
            variance = (within_sum.value + between.value * count) / elements
            root = inverse_root(f, variance.max_keeping_nan(0.0) + GROUP_NORM.load_floats(self.args, "eps")[0])
            for c in f.loop(stop, first):
                factor = (self.pointer("weight") + c * 4).load("float", 0, 4) * root
                less = (added + c * 4).load("float", 0, 4) - mean if self.spec.added else f.value("float", -0.0) - mean
                (affine + c * 4).store(factor, 0, 4)
                (affine + self.row + c * 4).store(f.fma(less, factor, (self.pointer("bias") + c * 4).load("float", 0, 4)), 0, 4)

    def _normed(self, x: Value, c: Value) -> Value:
        """A vector of channels, normed."""
        return self.f.fma(x, self._floats(self.affine + c * 4), self._floats(self.affine + self.row + c * 4))

    def _inverse_scale(self, b: Value) -> Value:
        """127 / max|y| of an image, 0 where that is not finite; the first thread writes its scale."""
        f, zero = self.f, self.f.value(self.isa.floats, 0.0)
        low, high, not_finite = (f.variable(f.value(zero.type, x)) for x in (float("inf"), float("-inf"), 0.0))
        sums = self.pointer("sums") + b * self.sums_row
        for c in f.loop(self.channels, step=self.lanes):
            least = self._of_threads(sums + c * 4, 3, f.value(zero.type, float("inf")), Value.min_keeping_nan)
            most = self._of_threads(sums + c * 4, 4, f.value(zero.type, float("-inf")), Value.max_keeping_nan)
            for y in (self._normed(least, c), self._normed(most, c)):  # either is the larger one, by the sign of the factor
                low.value, high.value = y.min_keeping_nan(low.value), y.max_keeping_nan(high.value)
                not_finite.value = f.fma(y, zero, not_finite.value)  # NaN from the first NaN or infinity on
        least, most = low.value.fold(Value.min_keeping_nan), high.value.fold(Value.max_keeping_nan)
        if self.spec.activated:
            rising = least > _LOWEST_AT
            least, most = rising.select(silu(f, least), -_LOWEST), silu(f, most)
        most = most.max_keeping_nan(f.value("float", -0.0) - least) + not_finite.value.fold(lambda x, y: x + y)
        finite, inverse = most < float("inf"), f.value("float", 127.0) / most
        with f.when(self.thread.equals(0)):
            (self.pointer("scales") + b * 4).store(finite.select(most * (1 / 127), float("nan")), 0, 4)
        return (finite & (inverse < float("inf"))).select(inverse, 0.0)

    def _write(self, b: Value) -> None:
        inverse = self._inverse_scale(b).splat(self.lanes) if self.spec.codes else None
        first, stop = self._range()
        for pixel in self.f.loop(stop, first):

            def body(c: Value, vectors: int, pixel: Value = pixel) -> None:
                places = [c + v * self.lanes for v in range(vectors)]
                values = [self._normed(self._load(b, pixel, place), place) for place in places]
                values = [silu(self.f, value) for value in values] if self.spec.activated else values
                at = (b * self.pixels + pixel) * self.channels + c
                if inverse is None:
                    self._store(at, values)
                else:
                    self._store_codes(at, [value * inverse for value in values])

            self._over_channels(body)

    def _store(self, at: Value, values: list[Value]) -> None:
        for v, value in enumerate(values):
            y = self.isa.from_float(value, self.spec.kind)
            (self.pointer("out") + at * self.size).store(y, v * bytes_of(y.type), self.size)

    def _store_codes(self, at: Value, values: list[Value]) -> None:
        f, out = self.f, self.pointer("out") + at
        low = f.value(self.isa.floats, -127.0)
        values = [low.max_keeping_nan(value).min_keeping_nan(127.0) for value in values]  # in this order a NaN becomes low
        if self.isa.narrows and len(values) == _TOGETHER:
            out.store(self.isa.narrowed(f, values))
            return
        for v, value in enumerate(values):
            out.store(rounded_codes(value), v * self.lanes)


def supports(dtype: torch.dtype, channels: int, isa: ISA) -> str | None:
    """The reason why images of this dtype and with so many channels are not for it; None if they are."""
    if channels % isa.lanes:
        return f"{channels} channels are not a multiple of {isa.lanes}"
    if dtype not in KINDS or dtype == torch.int8 or (dtype == torch.float16 and not isa.half_conversions):
        return f"it has no conversion from and to {dtype}"
    return None


def prepare(shape: Sequence[int], dtype: torch.dtype, groups: int, eps: float, *, added: bool, activated: bool, codes: bool) -> Call:
    """Return the call for images [B, C, H, W] of this shape, exclusive to the caller.

    `pack_tensors(buffer, TENSORS, *addresses)` completes it with those of x, with channels_last strides; y in x's dtype, or its `codes`;
    weight and bias [C]; `added` [B, C], or 0; and the codes' scales [B], or 0: contiguous float32. The caller has checked `supports`,
    that x is not empty, and that `groups` divides C.
    """
    batch, channels, height, width = shape
    isa, pixels = current(), height * width
    threads = runtime.useful_threads(batch * channels * pixels, _ELEMENTS_A_THREAD)
    sums, affine = _SUMS * threads * batch * channels, 2 * threads * channels
    memory = torch.empty(sums + affine, dtype=torch.float32, device="cpu")
    specs = [GroupNormSpec(work, KINDS[dtype], codes, activated, added) for work in get_args(_Work)]
    first, second = (compiled(build, spec, isa) for spec in specs)
    fields: dict[str, int | tuple[float, float]] = {
        "second_phase": second,
        "sums": memory.data_ptr(),
        "affine": memory.data_ptr() + 4 * sums,
        "batch": batch,
        "pixels": pixels,
        "channels": channels,
        "groups": groups,
        "threads": threads,
        "eps": (eps, 0.0),
    }
    return Call.of(arguments(GROUP_NORM, first, fields), threads, memory)

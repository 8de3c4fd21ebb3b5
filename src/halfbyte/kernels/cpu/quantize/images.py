"""Images as codes with one scale each, in one native call: x [B, C, H, W] -> codes int8 of the same strides, scales float32 [B].

    scale = max|x| * (1/127),  codes = round(x * (127 / max|x|))                both rounded to float32 at each step, ties to even

The scale of an image with a NaN or infinity is NaN. Images lie one after the other; the order of their elements does not matter. Threads
share the elements of each image; the second phase reads what the first one found in the shares of all.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import torch

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Block
from halfbyte.kernels.cpu.codegen.elementary import rounded_codes
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, arguments, compiled, phase
from halfbyte.kernels.cpu.plan_cache import Call

IMAGES = Block("x", "out", "scales", "extremes", "batch", "elements", "threads")
pack_tensors, TENSORS = IMAGES.struct("x", "scales").pack_into, IMAGES.offset("x")
_TOGETHER = 4  # vectors
_ROW = 12  # bytes of what a thread finds
_ELEMENTS_A_THREAD = 1 << 14
_INFINITE = float("inf")
_Work = Literal["extremes", "write"]


@dataclass(frozen=True, slots=True)
class ImagesSpec:
    """work: which pass; kind: elements of x."""

    work: _Work
    kind: Kind


@phase
def build(spec: ImagesSpec, isa: ISA, f: Function) -> None:
    _Images(spec, isa, f).emit()


class _Images(Emitter):
    """Emits a pass.

    `extremes` [B, threads, 3], float32, has the least and the largest element of a thread's share, and 0, or NaN if one is not finite.
    """

    block = IMAGES
    spec: ImagesSpec

    def emit(self) -> None:
        f, get = self.f, self.get
        _, thread, threads = f.parameters
        threads, elements, size = f.umin(threads, get("threads")), get("elements"), element_of(self.spec.kind).size
        with f.when(thread < threads):
            start, stop = thread * elements // threads, (thread + 1) * elements // threads
            for b in f.loop(get("batch")):
                x, extremes = self.pointer("x") + b * (elements * size), self.pointer("extremes") + b * (threads * _ROW)
                if self.spec.work == "extremes":
                    self._extremes(x, start, stop, extremes + thread * _ROW)
                else:
                    inverse = self._inverse_scale(extremes, threads, self.pointer("scales") + b * 4, thread.equals(0))
                    self._write(x, self.pointer("out") + b * elements, start, stop, inverse)

    def _load(self, x: Value, i: Value, lanes: int) -> Value:
        element = element_of(self.spec.kind)
        return self.isa.to_float((x + i * element.size).load(vector(element.stored, lanes), 0, element.size), self.spec.kind)

    def _extremes(self, x: Value, start: Value, stop: Value, to: Value) -> None:
        f, lanes = self.f, self.isa.lanes
        step = _TOGETHER * lanes
        whole = start + (stop - start) // step * step
        starts = [f.value(self.isa.floats, start) for start in (_INFINITE, -_INFINITE, 0.0)]
        found = [[f.variable(start) for start in starts] for _ in range(_TOGETHER)]
        for i in f.loop(whole, start, step):
            for v, row in enumerate(found):
                self._meet(row, self._load(x, i + v * lanes, lanes))
        total = [f.variable(f.value("float", start)) for start in (_INFINITE, -_INFINITE, 0.0)]
        for row in found:
            least, most, not_finite = (each.value for each in row)
            total[0].value = least.fold(Value.min_keeping_nan).min_keeping_nan(total[0].value)
            total[1].value = most.fold(Value.max_keeping_nan).max_keeping_nan(total[1].value)
            total[2].value = total[2].value + not_finite.fold(lambda a, b: a + b)
        for i in f.loop(stop, whole):
            self._meet(total, self._load(x, i, 1))
        for n, each in enumerate(total):
            to.store(each.value, 4 * n, 4)

    def _meet(self, row: Sequence[Variable], x: Value) -> None:
        """The least and the largest element so far, and 0 or NaN, of one more vector."""
        least, most, not_finite = row
        least.value, most.value = x.min_keeping_nan(least.value), x.max_keeping_nan(most.value)
        not_finite.value = self.f.fma(x, self.f.value(x.type, 0.0), not_finite.value)

    def _inverse_scale(self, extremes: Value, threads: Value, scale: Value, writes: Value) -> Value:
        """127 / max|x| of an image, 0 where that is not finite; where `writes`, its scale is written."""
        f = self.f
        largest, not_finite = (f.variable(f.value("float", 0.0)) for _ in range(2))
        for t in f.loop(threads):
            least, most, more = ((extremes + t * _ROW).load("float", at, 4) for at in (0, 4, 8))
            largest.value = most.max_keeping_nan(f.value("float", -0.0) - least).max_keeping_nan(largest.value)
            not_finite.value = not_finite.value + more
        amax = largest.value + not_finite.value
        finite, inverse = amax < _INFINITE, f.value("float", 127.0) / amax
        with f.when(writes):
            scale.store(finite.select(amax * (1 / 127), float("nan")), 0, 4)
        return (finite & (inverse < _INFINITE)).select(inverse, 0.0)

    def _write(self, x: Value, out: Value, start: Value, stop: Value, inverse: Value) -> None:
        f, isa, lanes = self.f, self.isa, self.isa.lanes
        step = _TOGETHER * lanes
        whole = start + (stop - start) // step * step

        def clamped(i: Value, lanes: int) -> Value:
            scaled = self._load(x, i, lanes) * (inverse.splat(lanes) if lanes > 1 else inverse)
            return f.value(scaled.type, -127.0).max_keeping_nan(scaled).min_keeping_nan(127.0)  # in this order a NaN becomes -127

        for i in f.loop(whole, start, step):
            values = [clamped(i + v * lanes, lanes) for v in range(_TOGETHER)]
            if isa.narrows:
                (out + i).store(isa.narrowed(f, values))
                continue
            for v, value in enumerate(values):
                (out + i).store(rounded_codes(value), v * lanes)
        for i in f.loop(stop, whole):
            (out + i).store(rounded_codes(clamped(i, 1)))


def prepare(batch: int, elements: int, dtype: torch.dtype) -> Call:
    """Return the call for `batch` images of so many elements each, exclusive to the caller.

    `pack_tensors(buffer, TENSORS, *addresses)` completes it with those of x, codes and scales, float32 [B].
    """
    threads = runtime.useful_threads(batch * elements, _ELEMENTS_A_THREAD)
    memory = torch.empty(batch * threads * _ROW // 4, dtype=torch.float32, device="cpu")
    first, second = (compiled(build, ImagesSpec(work, kind_of(dtype)), current()) for work in get_args(_Work))
    fields = {"second_phase": second, "extremes": memory.data_ptr(), "batch": batch, "elements": elements, "threads": threads}
    return Call.of(arguments(IMAGES, first, fields), threads, memory)

"""Float weights to codes, with the arithmetic of `quantizers/absmax.py` bit for bit, at the speed of memory.

Each thread takes whole rows. A block is read twice (from cache the second time): for its extremes, then for its codes, which
are collected one byte each in a row of scratch and packed from there. A NaN, an infinity or a scale that overflows raises a
flag; the slow path then finds the place and names it.
"""

from __future__ import annotations

import functools
from dataclasses import dataclass

import torch
from torch import Tensor

from halfbyte.errors import lookup
from halfbyte.formats.codes import Codes, stored_tensors
from halfbyte.formats.spec import Family, Format, Zero, zero_size
from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import QUANTIZE
from halfbyte.kernels.cpu.codegen.elements import KINDS, Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, Variable
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import Emitter, arguments, compiled, phase, run
from halfbyte.kernels.cpu.linear.tile_spec import ROUND, ROUND_BITS

_CHUNK = 32
_FLOATS, _INTS, _BYTES = f"<{_CHUNK} x float>", f"<{_CHUNK} x i32>", f"<{_CHUNK} x i8>"

_ELEMENTS_A_THREAD = 1 << 16
_FAMILIES = ("int", "ggml", "inferllm")  # of formats, whose rules are written here


@dataclass(frozen=True, slots=True)
class QuantizeSpec:
    """`source` is the weight's dtype, `scale` that of scales and offsets ("f32", "bf16", "f16"); the rest is as in Format."""

    source: Kind
    bits: int
    zero: Zero
    scale: Kind
    family: Family

    @property
    def signed(self) -> bool:
        return self.zero == "none"

    @property
    def q_max(self) -> int:
        return (1 << (self.bits - 1)) - 1 if self.signed else (1 << self.bits) - 1

    @property
    def q_min(self) -> int:
        return -(1 << (self.bits - 1)) if self.signed else 0


@phase
def build(spec: QuantizeSpec, isa: ISA, f: Function) -> None:
    _Rows(spec, isa, f).emit()


class _Rows(Emitter):
    block = QUANTIZE
    spec: QuantizeSpec

    def __init__(self, spec: QuantizeSpec, isa: ISA, f: Function) -> None:
        super().__init__(spec, isa, f)
        _, self.element, self.element_bytes = element_of(spec.source)
        self.buffer = f.alloca(self.element, _CHUNK, 64)

    def emit(self) -> None:
        f, spec = self.f, self.spec
        thread = f.parameters[1]
        weight, data, scale, zero, codes = map(self.pointer, ("weight", "data", "scale", "zero", "scratch"))
        stride, rows, k, block, blocks, data_stride = map(self.get, ("stride", "rows", "k", "block", "blocks", "data_stride"))
        codes = codes + thread * ((k + 127) // 64 * 64)
        number_bytes = element_of(spec.scale).size
        for r in f.share(rows):
            for b in f.loop(blocks):
                at = b * block
                x, real = weight + r * stride + at * self.element_bytes, f.umin(block, k - at)
                stored_scale, stored_zero, encode = self._grid(x, real)
                index = r * blocks + b
                (scale + index * number_bytes).store(stored_scale)
                if stored_zero is not None:
                    (zero + index * zero_size(spec.zero, number_bytes)).store(stored_zero)
                for u in f.loop((real + (_CHUNK - 1)) // _CHUNK):
                    values, _ = self._chunk(x, real, u)
                    (codes + at + u * _CHUNK).store(encode(values).to("i8"))  # what is beyond the block is overwritten by the next
            (codes + k).store(f.value(_BYTES, 0))
            self._pack(codes, k, data + r * data_stride)

    def _chunk(self, x: Value, real: Value, u: Value) -> tuple[Value, Value]:
        """The u-th chunk of a block as floats, zero beyond its end, and how many elements are left from its start on."""
        f = self.f
        left = real - u * _CHUNK
        short = left < _CHUNK
        source = x + u * (_CHUNK * self.element_bytes)
        with f.when(short):
            self.buffer.store(f.value(f"<{_CHUNK} x {self.element}>", 0), align=64)
            for i in f.loop(left):
                at = i * self.element_bytes
                self.buffer.store(source.load(self.element, at), at)
        raw = short.select(self.buffer, source).load(f"<{_CHUNK} x {self.element}>", align=self.element_bytes)
        return self.isa.to_float(raw, self.spec.source), left

    # One block's scale and zero

    def _grid(self, x: Value, real: Value) -> tuple[Value, Value | None, functools.partial[Value]]:
        """Scale and zero as they are stored, and the function from a chunk of weights to its codes (bytes to store, as i32)."""
        f, spec = self.f, self.spec
        amax, low, high = self._extremes(x, real)
        if spec.family == "ggml" and spec.bits == 4 and spec.signed:
            d = self._peak(x, real, amax) / -8.0
            inverse = d.equals(0.0).select(f.value("float", 0.0), 1.0 / d)
            return self._stored(d), None, functools.partial(self._truncated, inverse, None, 8.5)
        if spec.zero == "none":
            exact, lo = amax / float(spec.q_max), None
        else:
            if spec.zero == "point":
                low, high = low.min_keeping_nan(0.0), high.max_keeping_nan(0.0)
            exact, lo = (high - low) / float(spec.q_max), low
        stored = self._stored(exact)
        if spec.family != "int":
            inverse = self._inverse(exact)
            round_up = functools.partial(self._away_from_zero, inverse)
            truncated = functools.partial(self._truncated, inverse, lo, 0.5)
            encode = lookup(
                {"ggml": truncated if spec.bits == 4 else round_up, "inferllm": round_up}, spec.family, "the rounding of the family"
            )
            return stored, None if lo is None else self._stored(lo), encode
        inverse = self._inverse(self.isa.to_float(stored, spec.scale))
        if lo is None:
            return stored, None, functools.partial(self._nearest, inverse, None, None)
        if spec.zero == "point":
            point = (f.value("float", -0.0) - lo) * inverse
            point = self._rounded(point.max_keeping_nan(0.0).min_keeping_nan(float(spec.q_max)))
            return stored, point.to("i8"), functools.partial(self._nearest, inverse, None, point)
        zero = f.value("float", 0.0)
        vanishes = inverse.equals(0.0) & (lo < 0.0) & ((f.value("float", -0.0) - lo) < exact * float(spec.q_max))
        offset = self._stored(vanishes.select(zero, lo))
        return stored, offset, functools.partial(self._nearest, inverse, self.isa.to_float(offset, spec.scale), None)

    def _extremes(self, x: Value, real: Value) -> tuple[Value, Value, Value]:
        """Largest magnitude, least and greatest value of a block; a zero is +0."""
        f = self.f
        size = f.variable(f.value(_INTS, 0))
        low, high = (f.variable(f.value(_FLOATS, v)) for v in (float("inf"), float("-inf")))
        for u in f.loop((real + (_CHUNK - 1)) // _CHUNK):
            v, left = self._chunk(x, real, u)
            size.value = f.call(_INTS, f"llvm.umax.v{_CHUNK}i32", size.value, v.bits(_INTS) & 0x7FFFFFFF)
            if not self.spec.signed:
                inside = f.constant(_INTS, range(_CHUNK)) < left.to("i32").splat(_CHUNK)
                low.value = low.value.min_keeping_nan(inside.select(v, float("inf")))
                high.value = high.value.max_keeping_nan(inside.select(v, float("-inf")))
        bits = size.value.reduce("umax")
        self._fail_unless(bits < 0x7F800000)
        if self.spec.signed:
            return bits.bits("float"), bits.bits("float"), bits.bits("float")
        return bits.bits("float"), low.value.fold(Value.min_keeping_nan) + 0.0, high.value.fold(Value.max_keeping_nan) + 0.0

    def _peak(self, x: Value, real: Value, amax: Value) -> Value:
        """The first of the weights whose magnitude is the block's largest."""
        f = self.f
        peak: Variable = f.variable(f.value("float", 0.0))
        chunks = (real + (_CHUNK - 1)) // _CHUNK
        for i in f.loop(chunks):  # from the last chunk to the first, so that the first has the last word
            u = chunks - 1 - i
            v, _ = self._chunk(x, real, u)
            equal = (v.bits(_INTS) & 0x7FFFFFFF).equals(amax.bits("i32").splat(_CHUNK))
            mask = equal.bits(f"i{_CHUNK}")
            with f.when(mask.differs(0)):
                lane = f.call("i32", "llvm.cttz.i32", mask, f.value("i1", 1))
                peak.value = f.emit("float", f"extractelement {v.type} {v.name}, i32 {lane.name}")
        return peak.value

    def _stored(self, exact: Value) -> Value:
        """A scale or an offset rounded to the dtype it is stored in; the flag is raised where it overflows."""
        stored = self.isa.from_float(exact, self.spec.scale)
        back = self.isa.to_float(stored, self.spec.scale)
        self._fail_unless((back.bits("i32") & 0x7FFFFFFF) < 0x7F800000)
        return stored

    def _fail_unless(self, good: Value) -> None:
        f = self.f
        with f.when(good.equals(0)):
            f.raise_flag(self.args + QUANTIZE.offset("failed"))

    def _inverse(self, scale: Value) -> Value:
        inverse = 1.0 / scale
        return (inverse < float("inf")).select(inverse, 0.0)

    # A chunk's codes, as i32 whose low byte is stored: u for 4 bits, q for 8

    def _finished(self, q: Value) -> Value:
        return q - self.spec.q_min if self.spec.bits == 4 else q

    def _rounded(self, v: Value) -> Value:
        return (v + ROUND).bits("i32" if v.type == "float" else _INTS) - ROUND_BITS

    def _nearest(self, inverse: Value, start: Value | None, point: Value | None, x: Value) -> Value:
        if start is not None:
            x = x - start.splat(_CHUNK)
        v = x * inverse.splat(_CHUNK)
        if point is not None:
            q = self._rounded(v.max_keeping_nan(-1024.0).min_keeping_nan(1024.0)) + point.splat(_CHUNK)
            return self._finished(q.max_keeping_nan(self.spec.q_min).min_keeping_nan(self.spec.q_max))
        return self._finished(self._rounded(v.max_keeping_nan(float(self.spec.q_min)).min_keeping_nan(float(self.spec.q_max))))

    def _truncated(self, inverse: Value, lo: Value | None, half: float, x: Value) -> Value:
        if lo is not None:
            x = x - lo.splat(_CHUNK)
        v = x * inverse.splat(_CHUNK) + half
        finite = (v.bits(_INTS) & 0x7FFFFFFF) < 0x7F800000  # as ggml on x86: what is not finite becomes the byte 0
        u = finite.select(v, 0.0).to("i32")
        return u.max_keeping_nan(0).min_keeping_nan(15)

    def _away_from_zero(self, inverse: Value, x: Value) -> Value:
        v = x * inverse.splat(_CHUNK)
        whole = v.to("i32")
        rest = v - whole.to("float")
        q = whole + (rest >= 0.5).to("i32", unsigned=True) - ((self.f.value(_FLOATS, -0.0) - rest) >= 0.5).to("i32", unsigned=True)
        return self._finished(q.max_keeping_nan(self.spec.q_min).min_keeping_nan(self.spec.q_max))

    def _pack(self, codes: Value, k: Value, row: Value) -> None:
        """A row of bytes to the canonical order: as they are, or two to a byte."""
        f = self.f
        width = k if self.spec.bits == 8 else (k + 1) // 2
        step = _CHUNK if self.spec.bits == 8 else _CHUNK // 2
        for g in f.loop((width + (step - 1)) // step):
            u = (codes + g * _CHUNK).load(_BYTES)
            if self.spec.bits == 4:
                u = u.shuffle(range(0, _CHUNK, 2)) | u.shuffle(range(1, _CHUNK, 2)) << 4
            left, to = width - g * step, row + g * step
            whole = left > step - 1
            with f.when(whole):
                to.store(u)
            with f.when(whole.equals(0)):
                self.buffer.store(u)
                for i in f.loop(left):
                    (to + i).store((self.buffer + i).load("i8"))


def supports(weight: Tensor, fmt: Format) -> str | None:
    """Why `quantize` can't take this weight; None if it can."""
    if weight.device.type != "cpu":
        return "the weight is not on the CPU"
    if fmt.family not in _FAMILIES:
        return f"it does not know the rules of {fmt.family}"
    if weight.dtype not in KINDS or weight.dtype == torch.int8:
        return f"it takes float32, bfloat16 or float16, not {weight.dtype}"
    if fmt.block == "tensor":
        return "one scale for a whole tensor takes two passes over it"
    if fmt.scale == torch.float16 and not current().half_conversions:
        return f"{current().name} has no instruction that rounds to float16"
    return None


def quantize(weight: Tensor, fmt: Format) -> Codes | None:
    """`quantizers.absmax.absmax(weight, fmt)`, fast; None where a value or a scale is not finite. The caller asks `supports` first."""
    shape, k = tuple(weight.shape), weight.shape[-1]
    outputs = {name: torch.empty(size, dtype=dtype, device="cpu") for name, (dtype, size) in stored_tensors(fmt, shape).items()}
    data, scale, zero = outputs["data"], outputs["scale"], outputs.get("zero")
    if weight.numel():
        flat = weight.reshape(-1, k)
        if flat.stride(1) != 1:
            flat = flat.contiguous()
        spec = QuantizeSpec(kind_of(weight.dtype), fmt.bits, fmt.zero, kind_of(fmt.scale), fmt.family)
        threads = runtime.useful_threads(weight.numel(), _ELEMENTS_A_THREAD)
        scratch = torch.empty(threads * ((k + 127) // 64 * 64), dtype=torch.uint8, device="cpu")
        fields = {
            "weight": flat.data_ptr(),
            "stride": flat.stride(0) * flat.element_size(),
            "rows": len(flat),
            "k": k,
            "block": fmt.block_size(k),
            "blocks": -(-k // fmt.block_size(k)),
            "data": data.data_ptr(),
            "data_stride": data.shape[-1],
            "scale": scale.data_ptr(),
            "zero": 0 if zero is None else zero.data_ptr(),
            "scratch": scratch.data_ptr(),
        }
        block = arguments(QUANTIZE, compiled(build, spec, current()), fields)
        run(block, threads)
        if any(block[QUANTIZE.offset("failed") :]):
            return None
    return Codes.from_tensors(fmt, shape, outputs)

"""The kernel of `problem.Combination` on CPUs: y = clamp(b * scale_b + (a * scale_a + offset), low, high), element by element.

Networks on int8 codes q, with numbers scale * (q - zero), quantize and dequantize tensors by it, change their scale and add two of them.
`ops/conv/elementwise.py` checks tensors and calls `combine`, or `program_step` for a step of a program (`kernels/cpu/steps.py`).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import Block
from halfbyte.kernels.cpu.codegen.elementary import rounded_codes
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, bytes_of, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase
from halfbyte.kernels.cpu.plan_cache import PLANS, Call
from halfbyte.kernels.cpu.steps import ProgramStep
from halfbyte.kernels.problem import Combination

ELEMENTWISE = Block(
    *("a", "b", "out", "n"),
    *("scales", "offset", "clamp"),  # (scale_a, scale_b), (offset, 0), (low, high)
    floats=["scales", "offset", "clamp"],
)
_A, _B, _OUT = (ELEMENTWISE.offset(name) for name in ("a", "b", "out"))
_pack_addresses = ELEMENTWISE.struct("a", "out").pack_into
_UNROLL = 4  # vectors of an iteration: as many as `ISA.narrowed` makes bytes of
_MIN_ELEMENTS_PER_THREAD = 1 << 16


@dataclass(frozen=True, slots=True)
class ElementwiseSpec:
    """The element types of a kernel.

    Attributes:
        a, b: Of the inputs, "f32", "bf16", "f16" or "i8"; b is "" where there is one input.
        out: Of the result.
    """

    a: Kind
    b: Kind | Literal[""]
    out: Kind


def combine(a: Tensor, how: Combination, b: Tensor | None = None) -> Tensor:
    """Compute the combination of a, or of a and b.

    Args:
        a: Tensor on the CPU, of an element type of ELEMENTS, dense in some order of its dimensions. The caller has checked that.
        how: Scales, offset, clamp and dtype of the result. For int8 the clamp lies within [-128, 127].
        b: Tensor of the shape and strides of a; None: there is one input.

    Returns:
        Tensor of the shape and strides of a, in `how.dtype`.
    """
    out_dtype = torch.float32 if _is_converted_later(how) else how.dtype
    out = torch.empty_like(a, dtype=out_dtype)
    key = a.dtype, None if b is None else b.dtype, how, a.numel(), runtime.threads()
    call = PLANS.elementwise.get(key)
    if call is None:
        call = PLANS.elementwise[key] = _plan(a, b, out_dtype, how)
    _pack_addresses(call.buffer, _A, a.data_ptr(), 0 if b is None else b.data_ptr(), out.data_ptr())
    runtime.runner()(call.address, call.threads)
    return out if out.dtype == how.dtype else out.to(how.dtype)


def program_step(a: Tensor, how: Combination, b: Tensor | None = None) -> ProgramStep | None:
    """Return `combine` of tensors of these sizes and types as a step of a program; None where the kernel cannot write `how.dtype`."""
    if _is_converted_later(how):
        return None
    call = _plan(a, b, how.dtype, how)
    return ProgramStep(call.buffer, call.threads, a.numel() * how.dtype.itemsize, (_A,) if b is None else (_A, _B), _OUT)


def _is_converted_later(how: Combination) -> bool:
    """Whether the kernel writes float32, which torch converts to float16, as the CPU has no instruction for that."""
    return how.dtype == torch.float16 and not current().half_conversions


def _plan(a: Tensor, b: Tensor | None, out_dtype: torch.dtype, how: Combination) -> Call:
    """Compile the kernel, and fill in its arguments but for the addresses of tensors."""
    spec = ElementwiseSpec(kind_of(a.dtype), "" if b is None else kind_of(b.dtype), kind_of(out_dtype))
    numbers = {"scales": (how.scale_a, how.scale_b), "offset": (how.offset, 0.0), "clamp": (how.low, how.high)}
    buffer = arguments(ELEMENTWISE, compiled(build, spec, current()), {"n": a.numel(), **numbers})
    return Call.of(buffer, runtime.useful_threads(a.numel(), _MIN_ELEMENTS_PER_THREAD))


@phase
def build(spec: ElementwiseSpec, isa: ISA, f: Function) -> None:
    """Emit the kernel: each thread takes an equal range of the n elements, by `_UNROLL` vectors, and the last ones one by one."""
    args, thread, threads = f.parameters
    n, unrolled = ELEMENTWISE.load(args, "n"), isa.lanes * _UNROLL
    start = thread * n // threads
    stop = (thread + 1) * n // threads
    vector_stop = start + (stop - start) // unrolled * unrolled
    out = ELEMENTWISE.load(args, "out", "ptr")
    for i in f.loop(vector_stop, start=start, step=unrolled):
        if spec.out == "i8" and isa.narrows:
            out.store(isa.narrowed(f, [_combine(spec, isa, f, i + v * isa.lanes, isa.lanes) for v in range(_UNROLL)]), i)
            continue
        for v in range(_UNROLL):
            _store(spec, isa, out, _combine(spec, isa, f, i + v * isa.lanes, isa.lanes), i + v * isa.lanes)
    for i in f.loop(stop, start=vector_stop):
        _store(spec, isa, out, _combine(spec, isa, f, i, 1), i)


def _combine(spec: ElementwiseSpec, isa: ISA, f: Function, i: Value, lanes: int) -> Value:
    """Emit the float32 results, clamped and not yet rounded, of the `lanes` elements from index i on."""
    args = f.parameters[0]
    (scale_a, scale_b), (offset, _), (low, high) = (
        [number.splat(lanes) for number in ELEMENTWISE.load_floats(args, field)] for field in ("scales", "offset", "clamp")
    )
    total = f.fma(_load(isa, ELEMENTWISE.load(args, "a", "ptr"), i, spec.a, lanes), scale_a, offset)
    if spec.b:
        total = f.fma(_load(isa, ELEMENTWISE.load(args, "b", "ptr"), i, spec.b, lanes), scale_b, total)
    if spec.out == "i8":
        return low.max_keeping_nan(total).min_keeping_nan(high)  # in this order a NaN becomes low
    return total.max_keeping_nan(low).min_keeping_nan(high)


def _store(spec: ElementwiseSpec, isa: ISA, out: Value, total: Value, i: Value) -> None:
    """Emit the store of results, float32, as elements from index i on; those of int8 are rounded to nearest, ties to even."""
    if spec.out == "i8":
        out.store(rounded_codes(total), i)
    else:
        y = isa.from_float(total, spec.out)
        element_bytes = bytes_of(y.type) // lanes_of(total.type)
        out.store(y, i * element_bytes, element_bytes)


def _load(isa: ISA, tensor: Value, i: Value, kind: Kind, lanes: int) -> Value:
    """Emit the load of the `lanes` elements from index i on, as float32."""
    _, stored, element_bytes = element_of(kind)
    return isa.to_float(tensor.load(vector(stored, lanes), i * element_bytes if element_bytes > 1 else i, element_bytes), kind)

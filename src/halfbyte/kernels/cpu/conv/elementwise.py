"""Sums of one or two tensors with scales, element by element: `problem.Combination`, what int8 networks do between their products.

With codes that stand for scale * (q - zero) this quantizes, dequantizes, changes a scale, and adds two tensors.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.arguments import LINEAR, Block
from halfbyte.kernels.cpu.codegen.elements import Kind, element_of, kind_of
from halfbyte.kernels.cpu.codegen.ir import Function, Value, bytes_of, lanes_of, vector
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import current
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled, phase
from halfbyte.kernels.cpu.linear.tile_spec import ROUND
from halfbyte.kernels.cpu.plan_cache import PLANS, Call
from halfbyte.kernels.cpu.steps import ProgramStep
from halfbyte.kernels.problem import Combination

ELEMENTWISE = Block((*LINEAR.fields[:4], "a", "b", "out", "n", "scales", "offset", "clamp"), frozenset({"scales", "offset", "clamp"}))
_TENSORS = ELEMENTWISE.offset("a")
_pack_tensors = ELEMENTWISE.struct("a", "out").pack_into
_TOGETHER = 4  # vectors in flight
_ELEMENTS_A_THREAD = 1 << 16


@dataclass(frozen=True, slots=True)
class ElementwiseSpec:
    """Kinds "f32", "bf16", "f16" or "i8" of the inputs and the output; b is "" where there is only one input."""

    a: Kind
    b: Kind | Literal[""]
    out: Kind


@phase
def build(spec: ElementwiseSpec, isa: ISA, f: Function) -> None:
    args, thread, threads = f.parameters
    n, step = ELEMENTWISE.load(args, "n"), isa.lanes * _TOGETHER
    start = thread * n // threads
    stop = (thread + 1) * n // threads
    whole = start + (stop - start) // step * step
    out = ELEMENTWISE.load(args, "out", "ptr")
    for i in f.loop(whole, start=start, step=step):
        if spec.out == "i8" and isa.narrows:
            out.store(isa.narrowed(f, [_sum(spec, isa, f, i + v * isa.lanes, isa.lanes) for v in range(_TOGETHER)]), i)
            continue
        for v in range(_TOGETHER):
            _store(spec, isa, out, _sum(spec, isa, f, i + v * isa.lanes, isa.lanes), i + v * isa.lanes)
    for i in f.loop(stop, start=whole):
        _store(spec, isa, out, _sum(spec, isa, f, i, 1), i)


def _sum(spec: ElementwiseSpec, isa: ISA, f: Function, i: Value, lanes: int) -> Value:
    """The clamped sums of so many elements from the i-th on."""
    args = f.parameters[0]
    (scale_a, scale_b), (offset, _), (low, high) = (
        [half.splat(lanes) for half in ELEMENTWISE.load_floats(args, field)] for field in ("scales", "offset", "clamp")
    )
    total = f.fma(_load(isa, ELEMENTWISE.load(args, "a", "ptr"), i, spec.a, lanes), scale_a, offset)
    if spec.b:
        total = f.fma(_load(isa, ELEMENTWISE.load(args, "b", "ptr"), i, spec.b, lanes), scale_b, total)
    if spec.out == "i8":
        return low.max_keeping_nan(total).min_keeping_nan(high)  # in this order a NaN becomes low
    return total.max_keeping_nan(low).min_keeping_nan(high)


def _store(spec: ElementwiseSpec, isa: ISA, out: Value, total: Value, i: Value) -> None:
    if spec.out == "i8":
        out.store((total + ROUND).bits(vector("i32", lanes_of(total.type))).to("i8"), i)
    else:
        y = isa.from_float(total, spec.out)
        size = bytes_of(y.type) // lanes_of(total.type)
        out.store(y, i * size, size)


def _load(isa: ISA, x: Value, i: Value, kind: Kind, lanes: int) -> Value:
    _, stored, size = element_of(kind)
    return isa.to_float(x.load(vector(stored, lanes), i * size if size > 1 else i, size), kind)


def combine(a: Tensor, how: Combination, b: Tensor | None = None) -> Tensor:
    """The sum of `a` and, where it is there, `b`, of the same shape and strides -> the same shape and strides in `how.dtype`.

    The caller has checked: tensors on the CPU without gaps (dense in some order of dimensions), of the dtypes that results may have.
    """
    isa = current()
    out = torch.empty_like(a, dtype=how.dtype if isa.half_conversions or how.dtype != torch.float16 else torch.float32)
    key = a.dtype, None if b is None else b.dtype, how, a.numel(), runtime.threads()
    call = PLANS.elementwise.get(key)
    if call is None:
        call = PLANS.elementwise[key] = _prepare(a, b, out.dtype, how)
    _pack_tensors(call.buffer, _TENSORS, a.data_ptr(), 0 if b is None else b.data_ptr(), out.data_ptr())
    runtime.runner()(call.address, call.threads)
    return out if out.dtype == how.dtype else out.to(how.dtype)


def step(a: Tensor, how: Combination, b: Tensor | None = None) -> ProgramStep | None:
    """`combine` of tensors of these sizes; None where it would be followed by a conversion."""
    if how.dtype == torch.float16 and not current().half_conversions:
        return None
    call = _prepare(a, b, how.dtype, how)
    inputs = tuple(ELEMENTWISE.offset(name) for name in ("a", "b")[: 1 if b is None else 2])
    return ProgramStep(call.buffer, call.threads, a.numel() * how.dtype.itemsize, inputs, ELEMENTWISE.offset("out"))


def _prepare(a: Tensor, b: Tensor | None, out: torch.dtype, how: Combination) -> Call:
    spec = ElementwiseSpec(kind_of(a.dtype), "" if b is None else kind_of(b.dtype), kind_of(out))
    numbers = {"scales": (how.scale_a, how.scale_b), "offset": (how.offset, 0.0), "clamp": (how.low, how.high)}
    buffer = arguments(ELEMENTWISE, compiled(build, spec, current()), {"n": a.numel(), **numbers})
    return Call(buffer, ctypes.addressof(buffer), max(1, min(runtime.threads(), a.numel() // _ELEMENTS_A_THREAD)))

"""A kernel: one function, generated from a specification for an instruction set, and compiled when it is first needed."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping
from dataclasses import fields, is_dataclass
from typing import Any, ClassVar, TypeVar

from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.arguments import Block, Buffer
from halfbyte.kernels.cpu.codegen.ir import Function, Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA

Spec = TypeVar("Spec")  # a specification: a frozen dataclass
Target = TypeVar("Target", bound=ISA)


def function(*types: str) -> Callable[[Callable[[Spec, Target, Function], None]], Callable[[Spec, Target], Module]]:
    """Decorates `emit(spec, isa, f)`, which emits the body of a function with parameters of these types.

    The result, `build(spec, isa)`, makes the module that holds this function alone.
    """

    def decorate(emit: Callable[[Spec, Target, Function], None]) -> Callable[[Spec, Target], Module]:
        @functools.wraps(emit)
        def build(spec: Spec, isa: Target) -> Module:
            module = Module(isa.attributes)
            emit(spec, isa, module.function(_name(emit, spec), types))
            return module

        return build

    return decorate


phase = function("ptr", "i64", "i64")  # (arguments, thread, threads): see `runtime.py`


@functools.cache
def compiled(build: Callable[[Spec, Target], Module], spec: Spec, isa: Target) -> int:
    """The address of the function that `build` makes."""
    name = _name(build, spec)
    return jit.load(name, functools.partial(build, spec), isa)[name]


def arguments(block: Block, phase: int, values: Mapping[str, int | tuple[float, float]]) -> Buffer:
    """The arguments of a kernel with one phase, which lies at an address, with 0 in all fields that `values` lacks."""
    return block.buffer({"first_phase": phase, "openmp": runtime.openmp_address(), **values})


class Emitter:
    """Emits one function: its specification, the instruction set, and the arguments to which the first parameter points."""

    block: ClassVar[Block]

    def __init__(self, spec: Any, isa: ISA, f: Function) -> None:
        self.spec, self.isa, self.f, self.args = spec, isa, f, f.parameters[0]

    def get(self, field: str) -> Value:
        return self.block.load(self.args, field)

    def pointer(self, field: str) -> Value:
        return self.block.load(self.args, field, "ptr")


def _name(build: Callable[..., object], spec: object) -> str:
    return f"{build.__module__.rpartition('.')[2]}_{_label(spec)}"


def _label(spec: Any) -> str:
    """A specification's fields in one word: "rows_4_out_f32_gelu"."""
    words = []
    for field in fields(spec):
        value = getattr(spec, field.name)
        if isinstance(value, bool):
            words += [field.name] * value
        elif is_dataclass(value):
            words.append(_label(value))
        else:
            words += map(_label, value) if isinstance(value, tuple) else [f"{field.name}_{value}"]
    return "_".join(words).replace("-", "m")

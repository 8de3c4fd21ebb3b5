"""A kernel: one function, generated from a specification for an instruction set, and compiled when it is first needed.

    @phase
    def build(spec: MySpec, isa: ISA, f: Function) -> None:    emits the body; MySpec is a frozen dataclass
        args, thread, threads = f.parameters
        …
    address = compiled(build, MySpec(…), current())            of the machine code
    block = arguments(MY_BLOCK, address, {…})                  arguments of a kernel with one phase
    run(block, most_threads)

The specification, the instruction set and the source files are the kernel's key in the cache of `jit.py`: `build` reads nothing else.
"""

from __future__ import annotations

import ctypes
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
    """Return a decorator of `emit(spec, isa, f)`, which emits the body of a function with parameters of these LLVM types.

    It turns it into `build(spec, isa)`, which returns a module of that function alone.
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
    """Return the address of the compiled function that `build` generates."""
    name = _name(build, spec)
    return jit.load(name, functools.partial(build, spec), isa)[name]


def arguments(block: Block, phase: int, values: Mapping[str, int | tuple[float, float]]) -> Buffer:
    """Return the arguments of a kernel with one phase.

    Args:
        block: Names of the fields.
        phase: Address of the function.
        values: Values of fields; the others are 0.
    """
    return block.buffer({"first_phase": phase, "openmp": runtime.openmp_address(), **values})


def run(block: Buffer, most_threads: int) -> None:
    """Run the kernel whose arguments `block` holds on at most so many threads, at least one. The kernel may store its results there."""
    runtime.runner()(ctypes.addressof(block), max(1, min(runtime.threads(), most_threads)))


class Emitter:
    """Base class of what emits one function.

    Attributes:
        block: Names of the arguments, to which the first parameter points.
        spec, isa, f: What the function is compiled for, what emits its instructions, and where to.
        args: The first parameter.
    """

    block: ClassVar[Block]

    def __init__(self, spec: Any, isa: ISA, f: Function) -> None:
        self.spec, self.isa, self.f, self.args = spec, isa, f, f.parameters[0]

    def get(self, field: str) -> Value:
        """Load an integer argument."""
        return self.block.load(self.args, field)

    def pointer(self, field: str) -> Value:
        """Load an argument that is an address."""
        return self.block.load(self.args, field, "ptr")


def _name(build: Callable[..., object], spec: object) -> str:
    """Return the name of the function, for people: the file's and the specification's."""
    return f"{build.__module__.rpartition('.')[2]}_{_label(spec)}"


def _label(spec: Any) -> str:
    """Return a specification's fields in one word: "rows_4_out_f32_gelu"."""
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

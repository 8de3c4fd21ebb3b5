"""What the tests of generated code share: functions made on the spot, and the instruction sets that this CPU runs."""

import ctypes
import itertools
from collections.abc import Callable

import torch
from torch import Tensor

from halfbyte.kernels.cpu import jit
from halfbyte.kernels.cpu.ir import Function, Module, Value
from halfbyte.kernels.cpu.isa import ISA, ISAS, current

RUNNABLE = [isa for isa in ISAS if isa.missing() is None]
IR_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
_numbers = itertools.count()


def call(body: Callable[..., None], *tensors: Tensor, isa: ISA | None = None) -> None:
    """Compile body(f, address of each tensor) as a function of its own and run it."""
    isa = isa or current()
    module = Module(isa.vector_bits)
    name = f"test{next(_numbers)}"
    f = module.function(name, ["ptr"] * len(tensors))
    body(f, *f.parameters)
    address = jit.load(name, lambda _: module, isa)[name]
    ctypes.CFUNCTYPE(None, *[ctypes.c_void_p] * len(tensors))(address)(*[t.data_ptr() for t in tensors])


def elementwise(op: Callable[..., Value], out: torch.dtype, *inputs: Tensor, isa: ISA | None = None) -> Tensor:
    """op on vectors of 16 lanes of each input [n], n a multiple of 16; `out` is the dtype of what it gives."""
    result = torch.empty(inputs[0].shape, dtype=out)

    def body(f: Function, to: Value, *sources: Value) -> None:
        for i in f.loop(inputs[0].numel() // 16):
            values = [p.load(f"<16 x {IR_TYPES[t.dtype]}>", i * (16 * t.element_size())) for p, t in zip(sources, inputs, strict=True)]
            to.store(op(*values), i * (16 * result.element_size()))

    call(body, result, *inputs, isa=isa)
    return result

"""What the tests of generated code share: functions made on the spot, and the instruction sets that this CPU runs."""

import ctypes
import functools
import itertools
import re
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import fields, replace
from typing import Any

import pytest
import torch
from llvmlite import binding
from torch import Tensor

from halfbyte import env
from halfbyte.formats.spec import Zero
from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.codegen.elements import Kind
from halfbyte.kernels.cpu.codegen.ir import Function, Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isas import ISAS, current
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import ActivationSpec, Inner, Schedule, TileSpec, WeightSpec
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.layouts.base import Packed

AVAILABLE = [isa for isa in ISAS if isa.missing() is None]
RUNNABLE = [isa for isa in AVAILABLE if env.isa() in (None, isa.name)]  # what tests run on
IR_TYPES = {
    torch.float32: "float",
    torch.float64: "double",
    torch.int8: "i8",
    torch.uint8: "i8",
    torch.int16: "i16",
    torch.int32: "i32",
    torch.int64: "i64",
}
LLVM = binding.llvm_version_info[0]  # 20 up to llvmlite 0.47
_numbers = itertools.count()


def examples(isa: ISA, most: int) -> int:
    """Of a random sweep on each instruction set: `most` on the best that the CPU has, and on others, which share most code, half."""
    return most if isa is RUNNABLE[0] else most // 2


def tile_spec(
    inner: Inner,
    bits: int,
    zero: Zero,
    unit: tuple[int, bool],
    rows: int,
    vectors: int,
    *,
    scale: Kind = "f16",
    out: Kind = "f32",
    **more: Any,
) -> TileSpec:
    """A tile of weights with such codes, in units of so many k, a block of which is a single one or not; `more` as for `changed`."""
    plain = TileSpec(WeightSpec(bits, scale, zero), ActivationSpec(inner, *unit), Schedule(rows, vectors), scaled_at_end=False, out=out)
    return changed(plain, **more)


def changed(spec: TileSpec, **values: Any) -> TileSpec:
    """The specification with other values in fields of its records."""
    for name in ("weight", "activation", "schedule"):
        record = getattr(spec, name)
        here = {field.name for field in fields(record)} & {*values}
        spec = replace(spec, **{name: replace(record, **{field: values.pop(field) for field in here})})
    return replace(spec, **values)


def skip_what_crashes(isa: ISA) -> None:
    if isa.name == "rvv" and LLVM <= 20:
        pytest.skip("LLVM 20 crashes; pyproject.toml asks for a newer one on such CPUs")


def call(body: Callable[..., None], *tensors: Tensor, isa: ISA | None = None) -> None:
    """Compile body(f, address of each tensor) as a function of its own and run it."""
    isa = isa or current()
    module = Module(isa.attributes)
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


def poisoned(*shape: int, dtype: torch.dtype, fill: float = torch.nan) -> tuple[Tensor, Callable[[], bool]]:
    """A contiguous tensor full of `fill` in the midst of more of it, and whether all around it is still as it was."""
    margin, count = 64, torch.Size(shape).numel()
    memory = torch.full((count + 2 * margin,), fill, dtype=dtype)
    around = torch.cat((memory[:margin], memory[-margin:])).clone()

    def untouched() -> bool:
        return torch.equal(torch.cat((memory[:margin], memory[-margin:])).view(torch.uint8), around.view(torch.uint8))

    return memory[margin : margin + count].view(shape), untouched


def run_linear(
    kernel: LinearKernel,
    x: Tensor,
    packed: Packed,
    bias: Tensor | None = None,
    clamp: tuple[float, float] = (-torch.inf, torch.inf),
    residual: Tensor | None = None,
) -> Tensor:
    """The kernel's result in x's dtype, made in memory that is NaN before: the output, what surrounds it, and the scratch memory."""
    with torch.inference_mode():  # in which an earlier test may have made it larger
        PLANS.scratch.fill_(255)
    fill = torch.nan if kernel.out_dtype.is_floating_point else 77
    out, untouched = poisoned(x.shape[0], packed.shape[0], dtype=kernel.out_dtype, fill=fill)
    if residual is not None:
        residual = residual.to(out.dtype)
    kernel._pass(x, x.shape[0], packed.data.data_ptr(), bias, *clamp, out, 0 if residual is None else residual.data_ptr() - out.data_ptr())
    assert untouched()
    return out.to(kernel.dtype)


def activations(m: int, k: int, dtype: torch.dtype, seed: int, stride: int = 0) -> Tensor:
    """[m, k] with some large values, some zeros and one row all zero; between the rows, NaN that no kernel should read."""
    rng = torch.Generator().manual_seed(seed)
    x = torch.randn(m, k, generator=rng) * 30 ** torch.randn(m, k, generator=rng).clamp(-3, 1.2)
    x[torch.rand(m, k, generator=rng) < 0.1] = 0
    x[seed % (m + 5) : seed % (m + 5) + 1] = 0
    whole = torch.full((m, k + stride), torch.nan, dtype=dtype)
    whole[:, :k] = x
    return whole[:, :k]


def covering(modules: Iterable[Module]) -> list[Module]:
    """Some of the modules, in which each instruction of all stands with the types that it has in them: enough to show that a target's
    compiler knows them all."""
    found = {module: _instructions(module) for module in modules}
    uses = Counter(instruction for instructions in found.values() for instruction in instructions)
    for module in sorted(found, key=lambda module: len(module.text()), reverse=True):  # the largest take longest
        if all(uses[instruction] > 1 for instruction in found[module]):
            uses.subtract(found.pop(module))
    return list(found)


def _instructions(module: Module) -> set[str]:
    """Each line without the names and numbers of its operands."""
    lines = (line for line in module.text().splitlines() if line.startswith("  "))
    plain = (re.sub(r"%[\w.]+|\bi32 \d+\b|(?<![\w.<])-?(?:\d[\d.e+-]*|0x\w+)(?![\w.]| x )", "_", line) for line in lines)
    return {re.sub(r"!\w+|<(?:\w+ _(?:, )?)+>", "_", line) for line in plain}


def pairwise(*dimensions: Sequence[object]) -> list[tuple[object, ...]]:
    """Few combinations in which each value of a dimension meets each value of every other."""
    missing = {(i, a, j, b) for i, j in itertools.combinations(range(len(dimensions)), 2) for a in dimensions[i] for b in dimensions[j]}
    chosen = []

    def unmet(row: dict[int, object], d: int, v: object) -> int:
        return sum(_pair(d, v, e, w) in missing for e, w in row.items())

    while missing:
        i, a, j, b = min(missing, key=str)
        row: dict[int, object] = {i: a, j: b}
        for d in range(len(dimensions)):
            if d not in row:  # the value that meets most that it has not met yet
                row[d] = max(dimensions[d], key=functools.partial(unmet, row, d))
        chosen.append(tuple(row[d] for d in range(len(dimensions))))
        missing -= {_pair(i, row[i], j, row[j]) for i, j in itertools.combinations(range(len(dimensions)), 2)}
    return chosen


def _pair(i: int, a: object, j: int, b: object) -> tuple[int, object, int, object]:
    return (i, a, j, b) if i < j else (j, b, i, a)

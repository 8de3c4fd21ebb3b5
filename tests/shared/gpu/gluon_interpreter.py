"""Runs Gluon kernels for Hopper on the CPU, which Triton's interpreter does not: values only, no layouts.

What a kernel says is executed as Python on torch tensors, each warp-specialized partition of each program in a thread of its own. What
is asynchronous on the GPU is late here: a wgmma reads shared memory and registers, a TMA store shared memory only when it is waited for,
so that buffers given back too early, waits that are missing and barriers that nobody arrives at are seen as wrong numbers, as errors or
as a timeout. Pointers and boxes of TMA are checked against the tensors that they belong to. Inline PTX is interpreted.

    with interpreted(gemm_hopper):
        gemm_hopper.launch(problem, config, x, views, out, epilogue)
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import itertools
import math
import threading
import types
from collections.abc import Callable, Iterator, Sequence
from typing import Any, ClassVar

import ptx
import torch
import triton
from torch import Tensor
from triton.experimental.gluon import language as real
from triton.runtime.interpreter import InterpretedFunction
from triton.runtime.jit import JITFunction

from halfbyte.kernels.gpu.hopper import gluon_compat
from halfbyte.kernels.gpu.runtime import launch

SECONDS = 30.0  # that a barrier is waited for at most while nothing comes to any barrier
_TORCH = {
    real.int8: torch.int8, real.uint8: torch.uint8, real.int16: torch.int16, real.int32: torch.int32, real.int64: torch.int64,
    real.int1: torch.bool, real.float16: torch.float16, real.bfloat16: torch.bfloat16, real.float32: torch.float32,
}  # fmt: skip
_GLUON = {dtype: name for name, dtype in _TORCH.items()}
_here = threading.local()
_failed = threading.Event()  # a partition of the kernel that runs


class Value:
    """A tensor in registers, or a scalar."""

    def __init__(self, t: Tensor) -> None:
        self._t: Tensor | None = t

    @property
    def t(self) -> Tensor:
        assert self._t is not None, "a product is read that was not waited for"
        return self._t

    @property
    def dtype(self) -> Any:
        return _GLUON[self.t.dtype]

    @property
    def shape(self) -> list[int]:
        return list(self.t.shape)

    @property
    def type(self) -> Any:
        return types.SimpleNamespace(layout=None, shape=self.shape)

    def to(self, dtype: Any, bitcast: bool = False) -> Value:
        if bitcast:
            return Value(self.t.view(_TORCH[dtype]))
        if dtype.is_int() and not self.dtype.is_int():
            return Value(self.t.trunc().to(_TORCH[dtype]))
        return Value(self.t.to(_TORCH[dtype]))

    def reshape(self, shape: list[int]) -> Value:
        return Value(self.t.reshape([int(size) for size in shape]))

    def permute(self, order: list[int]) -> Value:
        return Value(self.t.permute(order))

    def broadcast_to(self, shape: list[int]) -> Value:
        return Value(self.t.broadcast_to(shape))

    def split(self) -> tuple[Value, Value]:
        return Value(self.t[..., 0]), Value(self.t[..., 1])

    def __getitem__(self, at: Any) -> Value:
        return Value(self.t[at])

    def __index__(self) -> int:
        return int(self.t)

    def __bool__(self) -> bool:
        return bool(self.t)

    def __neg__(self) -> Value:
        return Value(-self.t)


def _raw(value: Any) -> Any:
    value = getattr(value, "value", value)  # of a constexpr
    return value.t if isinstance(value, Value) else value


def _operator(name: str, work: Any) -> None:
    def forward(self: Value, other: Any) -> Any:
        return NotImplemented if isinstance(other, Pointer) else Value(work(self.t, _raw(other)))

    def backward(self: Value, other: Any) -> Value:
        return Value(work(torch.as_tensor(_raw(other), dtype=self.t.dtype if not isinstance(_raw(other), float) else None), self.t))

    setattr(Value, f"__{name}__", forward)
    setattr(Value, f"__r{name}__", backward)


def _divided(a: Tensor, b: Any) -> Tensor:
    return torch.div(a, b, rounding_mode="trunc")


for _name, _work in {
    "add": torch.add, "sub": torch.sub, "mul": torch.mul, "truediv": torch.div, "floordiv": _divided, "mod": torch.fmod,
    "and": torch.bitwise_and, "or": torch.bitwise_or, "xor": torch.bitwise_xor, "lshift": torch.bitwise_left_shift,
    "rshift": torch.bitwise_right_shift,
}.items():  # fmt: skip
    _operator(_name, _work)
for _name in ("lt", "le", "gt", "ge", "eq", "ne"):
    _operator(_name, getattr(torch, _name))


class Pointer:
    """Places in a tensor's memory, counted in its elements."""

    def __init__(self, memory: Tensor, at: Tensor) -> None:
        self.memory, self.at = memory, at

    @property
    def dtype(self) -> Any:
        return types.SimpleNamespace(element_ty=_GLUON[self.memory.dtype])

    def __add__(self, other: Any) -> Pointer:
        return Pointer(self.memory, self.at + _raw(other))

    def places(self, mask: Any, like: Any = None) -> tuple[Tensor, Tensor]:
        mask = torch.as_tensor(True if mask is None else _raw(mask))
        at, mask = torch.broadcast_tensors(self.at, mask) if like is None else torch.broadcast_tensors(self.at, mask, like)[:2]
        used = at[mask]
        wrong = used.numel() and (int(used.min()) < 0 or int(used.max()) >= self.memory.numel())
        assert not wrong, f"places {int(used.min())} to {int(used.max())} of {self.memory.numel()} elements"
        return at, mask


class Descriptor:
    """Of TMA."""

    def __init__(self, of: Any) -> None:
        self.base = of.base.as_strided(of.shape, of.strides)
        self.block_shape, self.layout, self.dtype = of.block_shape, of.layout, _GLUON[of.base.dtype]


class Shared:
    """Shared memory."""

    def __init__(self, t: Tensor | None) -> None:
        self._t = t

    @property
    def t(self) -> Tensor:
        assert self._t is not None, "what lies outside of shared memory is read"
        return self._t

    def index(self, i: Any) -> Shared:
        return Shared(self.t[int(i)] if 0 <= int(i) < self.t.shape[0] else None)

    def slice(self, start: int, length: int, dim: int = 0) -> Shared:
        if self._t is None:
            return self
        assert start + length <= self.t.shape[dim]
        return Shared(self.t.narrow(dim, start, length))

    def permute(self, order: list[int]) -> Shared:
        return Shared(self.t.permute(order))

    @property
    def dtype(self) -> Any:
        return _GLUON[self.t.dtype]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(self.t.shape)

    layout = None

    def reinterpret(self, dtype: Any, shape: list[int], layout: Any) -> Shared:
        """From where it begins; with LARGER_VIEWS perhaps beyond its end: torch refuses what lies outside of the whole allocation."""
        sizes = [int(size) for size in shape]
        if not gluon_compat.LARGER_VIEWS:
            assert self.t.nbytes == math.prod(sizes) * _TORCH[dtype].itemsize, "a view of another size"
        strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
        return Shared(self.t.view(_TORCH[dtype]).as_strided(sizes, strides))

    def load(self, layout: Any) -> Value:
        return Value(self.t.clone())

    def store(self, value: Value) -> None:
        self.t.copy_(value.t)


class Barrier:
    """A phase ends when all have arrived and all bytes are there."""

    last: ClassVar[object] = None  # another one with each step of any barrier

    def __init__(self) -> None:
        self.changed = threading.Condition()
        self.count = self.phase = self.left = self.bytes = 0
        self.coming: list[tuple[Tensor, Tensor]] = []  # what TMA brings is there for those who wait for it

    def index(self, i: int) -> Barrier:
        return self

    def step(self, arrivals: int, nbytes: int) -> None:
        with self.changed:
            Barrier.last = object()
            assert arrivals <= self.left, "more arrive than are expected"
            self.left, self.bytes = self.left - arrivals, self.bytes + nbytes
            if self.left == 0 and self.bytes == 0:
                self.phase, self.left = self.phase + 1, self.count
                self.changed.notify_all()

    def wait(self, parity: int) -> None:
        last: object = None
        still = 0  # tenths of a second without a step: a machine may be slow
        with self.changed:
            while still < 10 * SECONDS:
                if self.changed.wait_for(lambda: self.phase & 1 != parity, 0.1):
                    while self.coming:
                        to, box = self.coming.pop(0)
                        to.copy_(box)
                    return
                assert not _failed.is_set(), "another partition failed"
                last, still = Barrier.last, still + 1 if last is Barrier.last else 0
        raise AssertionError("a barrier is waited for that nobody completes")


class _Barriers:
    def __init__(self, count: int) -> None:
        self.all = [Barrier() for _ in range(count)]

    def index(self, i: Any) -> Barrier:
        assert 0 <= int(i) < len(self.all)
        return self.all[int(i)]


class Mbarrier:
    MBarrierLayout = staticmethod(lambda: "barriers")

    @staticmethod
    def init(bar: Barrier, count: int) -> None:
        bar.count = bar.left = count

    @staticmethod
    def expect(bar: Barrier, nbytes: Any, pred: Any = True) -> None:
        if _raw(pred):
            bar.step(1, int(nbytes))

    @staticmethod
    def arrive(bar: Barrier, count: int, pred: Any = True) -> None:
        if _raw(pred):
            bar.step(count, 0)

    @staticmethod
    def wait(bar: Barrier, phase: Any, pred: Any = True) -> None:
        if _raw(pred):
            bar.wait(int(phase))


class Tma:
    @staticmethod
    def async_load(source: Descriptor, at: list[Any], bar: Barrier, to: Shared, pred: Any = True) -> None:
        """What lies outside of the tensor is 0."""
        if not _raw(pred):
            return
        assert list(to.t.shape) == list(source.block_shape), f"a box of {source.block_shape} into {list(to.t.shape)}"
        first = list(map(int, at))
        box = torch.zeros_like(to.t)
        inside = [(max(i, 0), min(i + size, whole)) for i, size, whole in zip(first, to.t.shape, source.base.shape, strict=True)]
        if all(a < b for a, b in inside):
            there = source.base[tuple(slice(a, b) for a, b in inside)]
            box[tuple(slice(a - i, b - i) for (a, b), i in zip(inside, first, strict=True))] = there
        bar.coming.append((to.t, box))
        bar.step(0, -box.numel() * box.element_size())

    @staticmethod
    def async_store(to: Descriptor, at: list[Any], source: Shared) -> None:
        """Shared memory is read when it is waited for."""
        assert list(source.t.shape) == list(to.block_shape), f"a box of {to.block_shape} from {list(source.t.shape)}"
        _here.stores.append((to.base, list(map(int, at)), source.t))

    @staticmethod
    def store_wait(pendings: int) -> None:
        while len(_here.stores) > pendings:
            base, first, box = _here.stores.pop(0)
            to = [slice(i, min(i + size, whole)) for i, size, whole in zip(first, box.shape, base.shape, strict=True)]
            if all(part.start < part.stop for part in to):
                base[tuple(to)] = box[tuple(slice(0, part.stop - part.start) for part in to)]


# wgmma


class _Product(Value):
    def __init__(self, a: Any, b: Shared, before: Value | None) -> None:
        self.operands, self._t = (a, b, before), None

    def finish(self) -> None:
        a, b, before = self.operands
        assert before is None or before._t is not None
        wide = torch.int32 if b.t.dtype == torch.int8 else torch.float64
        a = a.t.to(wide)
        self._t = (a.double() @ b.t.double()).to(torch.int32 if wide == torch.int32 else torch.float32)
        if before is not None:
            self._t = self._t + before.t


def _warpgroup_mma(a: Any, b: Shared, acc: Value, use_acc: bool = True, is_async: bool = False) -> Value:
    assert a.t.dtype == b.t.dtype, f"{a.t.dtype} times {b.t.dtype}"
    assert a.t.shape[1] == b.t.shape[0], f"{a.t.shape} times {b.t.shape}"
    product = _Product(a, b, acc if use_acc else None)
    _here.products.append(product)
    if not is_async:
        _warpgroup_mma_wait(0, [])
    return product


def _warpgroup_mma_wait(left: int, deps: list[Any]) -> Any:
    while len(_here.products) > left:
        _here.products.pop(0).finish()
    return deps[0] if len(deps) == 1 else tuple(deps)


def _mma_v2(a: Value, b: Value, acc: Value) -> Value:
    assert a.t.dtype == b.t.dtype, f"{a.t.dtype} times {b.t.dtype}"
    return Value((a.t.double() @ b.t.double()).to(acc.t.dtype) + acc.t)


# PTX


def _inline_asm(text: Any, constraints: str, args: list[Any], dtype: Any, is_pure: bool, pack: int) -> Any:
    if isinstance(args[0], Pointer):  # a prefetch: only of what is there
        return Value(torch.zeros_like(args[0].places(None)[0]))
    shape = torch.broadcast_shapes(*(arg.t.shape for arg in args))
    words = [_registers(arg.t.broadcast_to(shape), pack) for arg in args]
    dtypes = dtype if isinstance(dtype, tuple) else (dtype,)
    text, outputs = getattr(text, "value", text), constraints.count("=")
    if text.startswith("mma.sp"):
        return _sparse_product(text, [arg.t.broadcast_to(shape) for arg in args])
    if outputs == 1 and constraints.endswith(",0"):  # the output is the input's register
        return args[0]
    found = ptx.run(text, [word for of_arg in words for word in of_arg], outputs)
    values, each = [], outputs // len(dtypes)
    for i, kind in enumerate(dtypes):
        bits = torch.stack(found[i * each : (i + 1) * each], -1)
        bits = torch.where(bits > 0x7FFFFFFF, bits - (1 << 32), bits).to(torch.int32).contiguous()
        values.append(Value(bits.view(_TORCH[kind]).reshape(shape)))
    return tuple(values) if isinstance(dtype, tuple) else values[0]


def _sparse_product(text: str, args: list[Tensor]) -> tuple[Value, ...]:
    """mma.sp.m16n8k32 of tensors [..., lane] that have one element a lane, as PTX has its fragments: A in four registers of two numbers,
    B in four, sums in four, and positions; its last operand says which two of four lanes the positions are taken from."""
    dtype = torch.bfloat16 if ".bf16." in text else torch.float16
    of_a, of_b, of_c, positions = args[:4], args[4:8], args[8:12], args[12].reshape(*args[12].shape[:-1], 8, 4)
    numbers = [t.contiguous().view(dtype).double().reshape(*t.shape[:-1], 8, 4, 2) for t in (*of_a, *of_b)]
    # ..., row of A or column of B, lane % 4, 2
    a = torch.stack((torch.cat((numbers[0], numbers[2]), -2), torch.cat((numbers[1], numbers[3]), -2)), -4).flatten(-4, -3)  # ..., 16, 8, 2
    b = torch.stack(numbers[4:], -3).flatten(-3)  # ..., 8 columns, 32 k
    chosen = positions[..., 2:] if text.rstrip(" ;").endswith("1") else positions[..., :2]
    nibbles = chosen.unsqueeze(-1) >> torch.arange(0, 32, 4) & 15  # ..., 8, lane, rowhalf and four
    nibbles = nibbles.unflatten(-1, (2, 4)).movedim(-2, -4).flatten(-4, -3).flatten(-2)  # ..., 16 rows, 8
    dense = torch.zeros(*a.shape[:-1], 4, dtype=torch.float64)
    for i in range(2):
        dense.scatter_add_(-1, (nibbles >> 2 * i & 3).long().unsqueeze(-1), a[..., i : i + 1])
    sums = (dense.flatten(-2) @ b.transpose(-1, -2)).unflatten(-2, (2, 8)).unflatten(-1, (4, 2))  # ..., rowhalf, row, lane % 4, 2
    parts = [sums[..., i // 2, :, :, i % 2].flatten(-2) for i in range(4)]
    return tuple(Value((part + c).float()) for part, c in zip(parts, of_c, strict=True))


def _registers(t: Tensor, pack: int) -> list[Tensor]:
    """Elements `pack` by `pack` in 32-bit registers, or single ones in 16 bits."""
    if pack * t.element_size() == 2:
        return [t.reshape(-1).view(torch.int16).long() & 0xFFFF]
    bits = t.contiguous().reshape(-1, pack).view(torch.int32)
    return [bits[:, i].long() & 0xFFFFFFFF for i in range(bits.shape[1])]


# The language


def _minimum(a: Any, b: Any, **_: Any) -> Value:
    a, b = torch.as_tensor(_raw(a)), torch.as_tensor(_raw(b))
    return Value(torch.minimum(a, b.to(a.dtype) if b.dim() == 0 else b))


def _maximum(a: Any, b: Any, **_: Any) -> Value:
    a, b = torch.as_tensor(_raw(a)), torch.as_tensor(_raw(b))
    return Value(torch.maximum(a, b.to(a.dtype) if b.dim() == 0 else b))


def _load(pointer: Pointer, mask: Any = None, other: Any = None, **_: Any) -> Value:
    at, mask = pointer.places(mask)
    return Value(torch.where(mask, pointer.memory[torch.where(mask, at, 0)], torch.tensor(other or 0, dtype=pointer.memory.dtype)))


def _store(pointer: Pointer, value: Any, mask: Any = None, **_: Any) -> None:
    value = torch.as_tensor(_raw(value))
    at, mask = pointer.places(mask, value)
    pointer.memory[at[mask]] = value.broadcast_to(at.shape)[mask].to(pointer.memory.dtype)


_atomics = threading.Lock()


def _atomic_add(pointer: Pointer, value: Any, **_: Any) -> Value:
    with _atomics:
        at, _mask = pointer.places(None)
        before = pointer.memory[at].clone()
        pointer.memory[at] += _raw(value)
    return Value(before)


def _allocate(dtype: Any, shape: list[int], layout: Any) -> Any:
    if layout == "barriers":
        return _Barriers(shape[0]) if len(shape) == 2 else Barrier()
    nbytes = torch.empty(0, dtype=_TORCH[dtype]).element_size() * math.prod(shape)
    return Shared(torch.randint(-128, 127, (nbytes,), dtype=torch.int8).view(_TORCH[dtype]).view([int(size) for size in shape]))


def _warp_specialize(parts: list[Any], warps: list[int], registers: list[int]) -> None:
    program = _here.program

    def work(function: Any, args: tuple[Any, ...]) -> None:
        _here.program, _here.products, _here.stores = program, [], []
        function(*args)
        assert not _here.products + _here.stores, "products or stores are not waited for"

    _together([functools.partial(work, *part) for part in parts])


def _scalar(value: int) -> Value:
    return Value(torch.tensor(value, dtype=torch.int32))


def _range(*bounds: Any) -> Iterator[Value]:
    return map(_scalar, range(*(int(bound) for bound in bounds)))


class _Language(types.SimpleNamespace):
    def __getattr__(self, name: str) -> Any:
        return getattr(real if hasattr(real, name) else triton.language, name)


def _where(condition: Any, a: Any, b: Any) -> Value:
    return Value(torch.where(torch.as_tensor(_raw(condition)), _raw(a), _raw(b)))


def _static_assert(condition: bool, message: str = "") -> None:
    assert condition, message


_LANGUAGE = _Language(
    program_id=lambda axis: _scalar(_here.program[0][axis]),
    num_programs=lambda axis: _scalar(_here.program[1][axis]),
    static_range=range,
    static_assert=_static_assert,
    arange=lambda start, end, layout=None: Value(torch.arange(start, end, dtype=torch.int32)),
    zeros=lambda shape, dtype, layout=None: Value(torch.zeros(shape, dtype=_TORCH[dtype])),
    full=lambda shape, value, dtype, layout=None: Value(torch.full(shape, _raw(value), dtype=_TORCH[dtype])),
    to_tensor=_scalar,
    zeros_like=lambda like: Value(torch.zeros_like(like.t)),
    full_like=lambda like, value: Value(torch.full_like(like.t, value)),
    expand_dims=lambda value, axis: Value(value.t.unsqueeze(axis)),
    sum=lambda value, axis: Value(value.t.sum(axis)),
    convert_layout=lambda value, layout, assert_trivial=False: value,
    join=lambda a, b: Value(torch.stack((a.t, b.t), -1)),
    split=lambda value: value.split(),
    cdiv=lambda a, b: (a + (b - 1)) // b,
    fma=lambda a, b, c: Value((a.t.double() * b.t.double() + c.t.double()).float()),
    max=lambda value, axis: Value(value.t.amax(axis)),
    exp=lambda value: Value(value.t.exp()),
    abs=lambda value: Value(value.t.abs()),
    where=_where,
    minimum=_minimum,
    umulhi=lambda a, b: Value((a.t.long() * torch.as_tensor(_raw(b)).long() >> 32).to(torch.int32)),
    maximum=_maximum,
    load=_load,
    store=_store,
    atomic_add=_atomic_add,
    inline_asm_elementwise=_inline_asm,
    allocate_shared_memory=_allocate,
    warp_specialize=_warp_specialize,
)
_NAMES: dict[str, Any] = {
    "gl": _LANGUAGE, "tl": _LANGUAGE, "mbarrier": Mbarrier, "tma": Tma, "warpgroup_mma": _warpgroup_mma,
    "warpgroup_mma_wait": _warpgroup_mma_wait, "mma_v2": _mma_v2, "fence_async_shared": lambda: None, "gdc_wait": lambda: None,
    "gdc_launch_dependents": lambda: None, "range": _range, "reinterpret": Shared.reinterpret, "async_load": Tma.async_load,
    "async_store": Tma.async_store, "thread_barrier": lambda: None,
}  # fmt: skip


class _Globals(dict[str, Any]):
    """A module's names, its kernels' functions as Python."""

    def __init__(self, names: dict[str, Any]) -> None:
        super().__init__(names)
        self.update({name: value for name, value in _NAMES.items() if name in names or name == "range"})
        for name, value in names.items():
            if isinstance(value, JITFunction | InterpretedFunction):
                self[name] = _python(value, self if value.fn.__globals__ is names else None)
            elif isinstance(value, real.constexpr):
                self[name] = value.value


def _python(kernel: Any, names: _Globals | None = None) -> Any:
    function = kernel.fn
    return types.FunctionType(
        function.__code__, _Globals(function.__globals__) if names is None else names, function.__name__, function.__defaults__
    )


def _argument(value: Any) -> Any:
    if isinstance(value, Tensor):
        flat = value.as_strided((value.numel(),), (1,))  # contiguous
        return Pointer(flat, torch.tensor(0))
    if isinstance(value, tuple):
        parts = [_argument(part) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else tuple(parts)
    if type(value).__name__ == "TensorDescriptor":
        return Descriptor(value)
    if isinstance(value, bool | str) or value is None or dataclasses.is_dataclass(value):
        return value
    return Value(torch.tensor(value, dtype=torch.int32 if isinstance(value, int) else torch.float32))


def run(kernel: Any, grid: tuple[int, ...], *args: Any, **options: Any) -> None:
    """As `launch.run`: Gluon kernels here, others as they are run there."""
    if not isinstance(kernel, JITFunction) or not kernel.is_gluon():
        return launch.run(kernel, grid, *args, **options)
    constants = {name: value for name, value in options.items() if name in kernel.arg_names}
    function, converted = _python(kernel), [_argument(arg) for arg in args]
    _failed.clear()
    places = itertools.product(*map(range, reversed(grid)))
    _together([functools.partial(_program, (place[::-1], grid), function, converted, constants) for place in places])
    return None


def _program(place: tuple[tuple[int, ...], tuple[int, ...]], function: Any, args: list[Any], constants: dict[str, Any]) -> None:
    _here.program = place
    function(*args, **constants)


def _together(work: Sequence[Callable[[], None]]) -> None:
    """Each in a thread of its own. The first error of any is raised."""
    errors: list[BaseException] = []

    def one(part: Callable[[], None]) -> None:
        try:
            part()
        except BaseException as error:
            errors.append(error)
            _failed.set()

    threads = [threading.Thread(target=one, args=(part,), daemon=True) for part in work]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


@contextlib.contextmanager
def interpreted(*modules: Any) -> Iterator[None]:
    """Gluon kernels that these files launch run here meanwhile."""
    places = [(module, name) for module in modules for name in ("launcher", "run") if hasattr(module, name)]
    before = [getattr(module, name) for module, name in places]
    for module, name in places:
        there = getattr(module, name)
        setattr(module, name, run if name == "run" else types.SimpleNamespace(**{**vars(there), "run": run}))
    try:
        yield
    finally:
        for (module, name), value in zip(places, before, strict=True):
            setattr(module, name, value)

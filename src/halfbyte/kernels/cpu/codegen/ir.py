"""A small emitter of LLVM IR: a Python loop unrolls its body, `for i in f.loop(n)` emits it once and runs it n times.

A `Value` is one SSA value with Python's operators. A `Variable` is a stack slot that LLVM turns into a register.
A `Function` collects the text of one function, a `Module` that of all its functions and the intrinsics they call.

    module = Module()
    f = module.function("add_one", ["ptr", "i64"])
    x, n = f.parameters
    for i in f.loop(n):
        (x + i * 4).store((x + i * 4).load("float") + 1.0)

Arithmetic means what it says: no fast-math flags, no contraction; where a fused multiply-add is meant, `Function.fma` says so.
Offsets of pointers are bytes. Integers are signed unless a method's name says otherwise. Types are LLVM's own spelling
("i32", "<16 x float>", "ptr"), made by `vector`.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

# jit.py does not key by sources that were changed after this time: each generator imports this file before its own text runs.
IMPORTED = time.time_ns()
_FLOATS = {"half", "bfloat", "float", "double"}
_BITS = {"i1": 1, "i8": 8, "i16": 16, "i32": 32, "i64": 64, "half": 16, "bfloat": 16, "float": 32, "double": 64, "ptr": 64}


def vector(element: str, lanes: int) -> str:
    """Return the type of so many lanes: that of an element for one."""
    return f"<{lanes} x {element}>" if lanes > 1 else element


def lanes_of(type_: str) -> int:
    return int(type_[1:].split(" ", 1)[0]) if type_[0] == "<" else 1


def element_of(type_: str) -> str:
    return type_[:-1].rsplit(" ", 1)[1] if type_[0] == "<" else type_


def bytes_of(type_: str) -> int:
    return -(-lanes_of(type_) * _BITS[element_of(type_)] // 8)


def alignment_of(type_: str) -> int:
    """Return the alignment of a variable of this type: its size, up to the next power of two."""
    return 1 << (bytes_of(type_) - 1).bit_length()


def is_float(type_: str) -> bool:
    return element_of(type_) in _FLOATS


def mangled(type_: str) -> str:
    """Return the suffix of an intrinsic's overload for `type_`: "<8 x float>" -> "v8f32"."""
    element, lanes = element_of(type_), lanes_of(type_)
    name = "bf16" if element == "bfloat" else f"f{_BITS[element]}" if element in _FLOATS else element
    return f"v{lanes}{name}" if lanes > 1 else name


def literal(type_: str, x: float) -> str:
    """Return a constant in LLVM's spelling, rounded to a float type. Raise ValueError for an integer type and a fraction."""
    element = element_of(type_)
    if element not in _FLOATS:
        if x != int(x):
            raise ValueError(f"{x} is no constant of {type_}")
        return str(int(x))
    if element == "half":
        return f"0xH{struct.unpack('<H', struct.pack('<e', x))[0]:04X}"
    if element == "bfloat":
        bits = struct.unpack("<I", struct.pack("<f", x))[0]
        return f"0xR{(bits + 0x7FFF + (bits >> 16 & 1)) >> 16:04X}"  # to the nearest, ties to even
    if element == "float":
        x = struct.unpack("<f", struct.pack("<f", x))[0]
    return f"0x{struct.unpack('<Q', struct.pack('<d', x))[0]:016X}"  # LLVM spells both by the bits of the double that equals it


class Value:
    """One SSA value: operators emit instructions into the function that it belongs to."""

    __slots__ = ("fn", "name", "type")

    def __init__(self, fn: Function, type_: str, name: str) -> None:
        self.fn, self.type, self.name = fn, type_, name

    def _binary(self, integer: str, floating: str, other: Value | float, swap: bool = False) -> Value:
        right = self.fn.value(self.type, other)
        a, b = (right, self) if swap else (self, right)
        op = floating if is_float(self.type) else integer
        if not op:
            raise TypeError(f"{integer or floating} has no meaning for {self.type}")
        return self.fn.emit(self.type, f"{op} {self.type} {a.name}, {b.name}")

    def __add__(self, other: Value | float) -> Value:
        if self.type != "ptr":
            return self._binary("add", "fadd", other)
        if not isinstance(other, Value) and other == 0:
            return self
        return self.fn.emit("ptr", f"getelementptr i8, ptr {self.name}, i64 {self.fn.value('i64', other).name}")

    __radd__ = __add__

    def __eq__(self, other: object) -> bool:
        raise TypeError("== compares while the code is generated: use equals()")

    __hash__ = object.__hash__

    def __bool__(self) -> bool:
        raise TypeError("a value is not known while the code is generated: use select() or Function.when()")

    def __sub__(self, other: Value | float) -> Value:
        if self.type == "ptr":
            raise TypeError("pointers are not subtracted: add a negative offset, or use distance()")
        return self._binary("sub", "fsub", other)

    def __rsub__(self, other: Value | float) -> Value:
        return self._binary("sub", "fsub", other, swap=True)

    def __mul__(self, other: Value | float) -> Value:
        return self._binary("mul", "fmul", other)

    __rmul__ = __mul__

    def __truediv__(self, other: Value | float) -> Value:
        return self._binary("", "fdiv", other)

    def __rtruediv__(self, other: Value | float) -> Value:
        return self._binary("", "fdiv", other, swap=True)

    def __floordiv__(self, other: Value | float) -> Value:
        """Divide unsigned numbers, as sizes and indices are; `%` is unsigned, too."""
        return self._binary("udiv", "", other)

    def __mod__(self, other: Value | float) -> Value:
        return self._binary("urem", "", other)

    def __and__(self, other: Value | int) -> Value:
        return self._binary("and", "", other)

    def __or__(self, other: Value | int) -> Value:
        return self._binary("or", "", other)

    def __xor__(self, other: Value | int) -> Value:
        return self._binary("xor", "", other)

    def __lshift__(self, other: Value | int) -> Value:
        return self._binary("shl", "", other)

    def __rshift__(self, other: Value | int) -> Value:
        """Shift logically: zeros come in from the left."""
        return self._binary("lshr", "", other)

    def shift_signed(self, other: Value | int) -> Value:
        return self._binary("ashr", "", other)

    def _compare(self, integer: str, floating: str, other: Value | float) -> Value:
        right = self.fn.value(self.type, other)
        op, kind = ("fcmp", floating) if is_float(self.type) else ("icmp", integer)
        if not kind:
            raise TypeError(f"{integer or floating} has no meaning for {self.type}")
        return self.fn.emit(vector("i1", lanes_of(self.type)), f"{op} {kind} {self.type} {self.name}, {right.name}")

    def __lt__(self, other: Value | float) -> Value:
        """Compare signed integers, or floats: false where either is NaN."""
        return self._compare("slt", "olt", other)

    def __gt__(self, other: Value | float) -> Value:
        return self._compare("sgt", "ogt", other)

    def __ge__(self, other: Value | float) -> Value:
        return self._compare("sge", "oge", other)

    def equals(self, other: Value | float) -> Value:
        return self._compare("eq", "oeq", other)

    def differs(self, other: Value | int) -> Value:
        return self._compare("ne", "", other)

    def below(self, other: Value | int) -> Value:
        """Compare unsigned: a negative number is not below a size."""
        return self._compare("ult", "", other)

    def is_nan(self) -> Value:
        return self._compare("", "uno", self)

    def distance(self, other: Value) -> Value:
        """Return the bytes from this pointer to another."""
        here, there = (self.fn.emit("i64", f"ptrtoint ptr {p.name} to i64") for p in (self, other))
        return there - here

    def is_null(self) -> Value:
        return self.fn.emit("i1", f"icmp eq ptr {self.name}, null")

    def select(self, yes: Value, no: Value | float) -> Value:
        """Return `yes` where this condition holds, else `no`."""
        other = self.fn.value(yes.type, no)
        return self.fn.emit(yes.type, f"select {self.type} {self.name}, {yes.type} {yes.name}, {other.type} {other.name}")

    def max_keeping_nan(self, other: Value | float) -> Value:
        """Return max(self, other), but self where either is NaN."""
        right = self.fn.value(self.type, other)
        return (self < right).select(right, self)

    def min_keeping_nan(self, other: Value | float) -> Value:
        """Return min(self, other), but self where either is NaN."""
        right = self.fn.value(self.type, other)
        return (self > right).select(right, self)

    def to(self, element: str, *, unsigned: bool = False) -> Value:
        """Convert each element to another type.

        Integers are extended or truncated. From and to floats the number is converted, towards zero to integers. A true i1 is -1, or 1 if
        `unsigned`.
        """
        source, type_ = element_of(self.type), vector(element, lanes_of(self.type))
        if source == element:
            return self
        wider = _BITS[element] > _BITS[source]
        if source in _FLOATS:
            op = ("fpext" if wider else "fptrunc") if element in _FLOATS else ("fptoui" if unsigned else "fptosi")
        elif element in _FLOATS:
            op = "uitofp" if unsigned else "sitofp"
        else:
            op = ("zext" if unsigned else "sext") if wider else "trunc"
        return self.fn.emit(type_, f"{op} {self.type} {self.name} to {type_}")

    def bits(self, type_: str) -> Value:
        """Return the same bits as another type of the same size."""
        return self if type_ == self.type else self.fn.emit(type_, f"bitcast {self.type} {self.name} to {type_}")

    def splat(self, lanes: int) -> Value:
        if lanes == 1:
            return self
        type_ = vector(self.type, lanes)
        first = self.fn.emit(type_, f"insertelement {type_} poison, {self.type} {self.name}, i32 0")
        return self.fn.emit(type_, f"shufflevector {type_} {first.name}, {type_} poison, <{lanes} x i32> zeroinitializer")

    def shuffle(self, picks: Sequence[int], other: Value | None = None) -> Value:
        """Return the lanes of these numbers. Those of `other` are counted after this value's; a negative number is an undefined lane."""
        if len(picks) == 1:
            raise ValueError("one lane is no vector: use lane()")
        type_ = vector(element_of(self.type), len(picks))
        mask = ", ".join(f"i32 {'poison' if p < 0 else p}" for p in picks)
        second = "poison" if other is None else other.name
        return self.fn.emit(type_, f"shufflevector {self.type} {self.name}, {self.type} {second}, <{len(picks)} x i32> <{mask}>")

    def lane(self, i: int) -> Value:
        return self.fn.emit(element_of(self.type), f"extractelement {self.type} {self.name}, i32 {i}")

    def fold(self, op: Callable[[Value, Value], Value]) -> Value:
        """Return one number of all lanes, a power of two of them, by `op` on halves, quarters, …: a fixed order, for floats."""
        value, n = self, lanes_of(self.type)
        if n < 2 or n & (n - 1):
            raise ValueError(f"the lanes of {self.type} can't be halved until one is left")
        while (n := lanes_of(value.type)) > 2:
            value = op(value.shuffle(range(n // 2)), value.shuffle(range(n // 2, n)))
        first, second = value.lane(0), value.lane(1)
        return op(first, second)

    def reduce(self, op: str) -> Value:
        """Return one number of all integer lanes: op is "add", "umax" … as in llvm.vector.reduce.<op>."""
        element = element_of(self.type)
        return self.fn.call(element, f"llvm.vector.reduce.{op}.{mangled(self.type)}", self)

    def load(self, type_: str, offset: Value | int = 0, align: int = 1) -> Value:
        """Load from this address plus `offset` bytes, a multiple of `align`."""
        return self.fn.emit(type_, f"load {type_}, ptr {(self + offset).name}, align {align}")

    def store(self, value: Value, offset: Value | int = 0, align: int = 1) -> None:
        """Store at this address plus `offset` bytes, a multiple of `align`."""
        self.fn.line(f"store {value.type} {value.name}, ptr {(self + offset).name}, align {align}")


class Variable:
    """A variable: `.value` reads and assigns. LLVM keeps it in a register."""

    def __init__(self, fn: Function, start: Value) -> None:
        self._fn, self._type, self._slot = fn, start.type, fn.alloca(start.type, 1, alignment_of(start.type))
        self.value = start

    @property
    def value(self) -> Value:
        return self._slot.load(self._type, align=alignment_of(self._type))

    @value.setter
    def value(self, new: Value) -> None:
        self._slot.store(new, align=alignment_of(self._type))


class Function:
    """One function under construction.

    Attributes:
        module, name, returns: What it belongs to, its name, and the type of its result.
        parameters: Its parameters.
    """

    def __init__(self, module: Module, name: str, types: Sequence[str], returns: str = "void") -> None:
        self.module, self.name, self.returns = module, name, returns
        self._count, self._entry, self._body = 0, list[str](), list[str]()
        self.parameters = [Value(self, type_, f"%p{i}") for i, type_ in enumerate(types)]
        self._result: Value | None = None
        module.functions.append(self)

    def _fresh(self, prefix: str) -> str:
        self._count += 1
        return f"{prefix}{self._count}"

    def line(self, text: str) -> None:
        """Append an instruction without a result."""
        self._body.append("  " + text)

    def _label(self, name: str) -> None:
        self._body.append(name + ":")

    def emit(self, type_: str, text: str) -> Value:
        """Append an instruction with a result of this type, and return it."""
        name = self._fresh("%v")
        self.line(f"{name} = {text}")
        return Value(self, type_, name)

    def value(self, type_: str, x: Value | float) -> Value:
        """Return a constant of `type_`, the same in all lanes; a Value is returned as it is."""
        if isinstance(x, Value):
            return x
        return self.constant(type_, [x] * lanes_of(type_))

    def constant(self, type_: str, lanes: Sequence[float]) -> Value:
        """Return a constant with these lanes."""
        element = element_of(type_)
        texts = [literal(element, x) for x in lanes]
        return Value(self, type_, texts[0] if len(texts) == 1 else "<" + ", ".join(f"{element} {t}" for t in texts) + ">")

    def alloca(self, type_: str, count: int, align: int) -> Value:
        """Return the address of stack memory for `count` of `type_`, which is allocated when the function is entered."""
        name = self._fresh("%s")
        self._entry.append(f"  {name} = alloca {type_}, i64 {count}, align {align}")
        return Value(self, "ptr", name)

    def variable(self, start: Value) -> Variable:
        """Return a variable that has this value."""
        return Variable(self, start)

    def loop(self, stop: Value | int, start: Value | int = 0, step: int = 1) -> Iterator[Value]:
        """`for i in f.loop(n):` the body is emitted once and runs for i = start, start + step, … below stop (unsigned).

        The body must not be left by `break` or `return`: the loop's end is emitted behind it.
        """
        index, label = self.variable(self.value("i64", start)), self._fresh("loop")
        self.line(f"br label %{label}.head")
        self._label(f"{label}.head")
        i = index.value
        inside = i.below(stop)
        self.line(f"br i1 {inside.name}, label %{label}.body, label %{label}.exit")
        self._label(f"{label}.body")
        yield i
        index.value = i + step
        self.line(f"br label %{label}.head")
        self._label(f"{label}.exit")

    def draw(self, emit_next: Callable[[], Value], stop: Value) -> Iterator[Value]:
        """`for i in f.draw(emit_next, n):` the body runs for each i that `emit_next()` emits, while i is below n (unsigned)."""
        label = self._fresh("draw")
        self.line(f"br label %{label}.head")
        self._label(f"{label}.head")
        i = emit_next()
        inside = i.below(stop)
        self.line(f"br i1 {inside.name}, label %{label}.body, label %{label}.exit")
        self._label(f"{label}.body")
        yield i
        self.line(f"br label %{label}.head")
        self._label(f"{label}.exit")

    def share(self, items: Value) -> Iterator[Value]:
        """`for i in f.share(n):` threads share the items 0 … n - 1 evenly, each a contiguous range of them.

        The function's three parameters are its arguments, the number of the thread, and how many threads there are.
        """
        _, thread, threads = self.parameters
        return self.loop((thread + 1) * items // threads, thread * items // threads)

    def draw_items(self, counter: Value, items: Value) -> Iterator[Value]:
        """`for i in f.draw_items(counter, n):` threads share the items 0 … n - 1: each draws the next one from a common counter.

        Parameters are as for `share`. Where there are one or two threads, the first goes up from item 0 and the second down from the last,
        so that from one call to the next a thread finds in its cache what it wrote itself; they draw only to know when all items are taken.
        """
        _, thread, threads = self.parameters
        drawn_before = self.variable(self.value("i64", 0))

        def item_of(drawn: Value) -> Value:
            count = drawn_before.value
            drawn_before.value = count + 1
            return (threads < 3).select(thread.equals(0).select(count, items - 1 - count), drawn)

        for drawn in self.draw(lambda: self.fetch_add(counter), items):
            yield item_of(drawn)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        """`with f.when(c):` the body runs where c holds."""
        label = self._fresh("when")
        self.line(f"br i1 {condition.name}, label %{label}.yes, label %{label}.no")
        self._label(f"{label}.yes")
        yield
        self.line(f"br label %{label}.no")
        self._label(f"{label}.no")

    def call(self, returns: str, name: str, *args: Value) -> Value:
        """Call an intrinsic or a function of this module by name."""
        self.module.declare(returns, name, [a.type for a in args])
        return self._call(returns, f"@{name}", args)

    def call_pointer(self, pointer: Value, *args: Value) -> None:
        """Call the function without result whose address is `pointer`."""
        self._call("void", pointer.name, args)

    def _call(self, returns: str, target: str, args: Sequence[Value]) -> Value:
        text = f"call {returns} {target}({', '.join(f'{a.type} {a.name}' for a in args)})"
        if returns != "void":
            return self.emit(returns, text)
        self.line(text)
        return Value(self, "void", "")

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """Return a * b + c, rounded once."""
        return self.call(a.type, f"llvm.fma.{mangled(a.type)}", a, b, c)

    def umin(self, a: Value, b: Value) -> Value:
        return self.call(a.type, f"llvm.umin.{mangled(a.type)}", a, b)

    def prefetch(self, address: Value, locality: int = 3) -> None:
        """Prefetch the cache line at `address`, which need not be mapped, to the cache that `locality` names (`Tuning.locality`)."""
        self.module.declare("void", "llvm.prefetch.p0", ["ptr", "i32", "i32", "i32"])
        self.line(f"call void @llvm.prefetch.p0(ptr {address.name}, i32 0, i32 {locality}, i32 1)")

    def fence(self) -> None:
        """Keep loads on their side of this point. Costs nothing at run time.

        LLVM's machine scheduler hoists the loads of a big unrolled tile, runs out of registers and spills; between the
        steps of a tile this empty statement stops it, for this function alone.
        """
        self.line('call void asm sideeffect "", "~{memory}"()')

    def pinned(self, value: Value, register: str) -> Value:
        """Return the same value, computed before this point and opaque to the optimizer. Costs nothing at run time.

        LLVM's schedulers put off some of the chains of sums of an unrolled tile, and keep the operands of all their steps until then;
        and LLVM reassociates a chain of integer additions to a tree. Both take more registers than there are.

        Args:
            value: Of a type that fits one register.
            register: LLVM's letter for the class of registers that holds it.
        """
        return self.emit(value.type, f'call {value.type} asm sideeffect "", "={register},0"({value.type} {value.name})')

    def fetch_add(self, address: Value) -> Value:
        """Add 1 to the i64 at `address`, atomically; returns what it was."""
        return self.emit("i64", f"atomicrmw add ptr {address.name}, i64 1 monotonic")

    def acquire(self, address: Value) -> Value:
        """Load the i64 at `address`, before all later loads: a thread or a device may store it by a release."""
        return self.emit("i64", f"load atomic i64, ptr {address.name} acquire, align 8")

    def release(self, address: Value, value: Value) -> None:
        """Store an i64, after all earlier stores."""
        self.line(f"store atomic i64 {value.name}, ptr {address.name} release, align 8")

    def arrive(self, address: Value) -> Value:
        """`fetch_add`, after all earlier stores of this thread, and before all its later loads."""
        return self.emit("i64", f"atomicrmw add ptr {address.name}, i64 1 acq_rel")

    def raise_flag(self, address: Value) -> None:
        """Set the i64 at `address` to 1, atomically."""
        self.line(f"store atomic i64 1, ptr {address.name} monotonic, align 8")

    def set_result(self, value: Value) -> None:
        """Make the function return `value` at its end."""
        self._result = value

    def text(self) -> str:
        """Return the function's IR."""
        parameters = ", ".join(f"{p.type} {p.name}" for p in self.parameters)
        if (self._result is None) != (self.returns == "void"):
            raise ValueError(f"{self.name} returns {self.returns}, got {'no result' if self._result is None else 'a result'}")
        end = "ret void" if self._result is None else f"ret {self.returns} {self._result.name}"
        lines = [f"define {self.returns} @{self.name}({parameters}) #0 {{", "entry:", *self._entry, *self._body, f"  {end}", "}"]
        return "\n".join(lines)


class Module:
    """The functions that are compiled together; `attributes`, in LLVM's spelling, are those of each."""

    def __init__(self, attributes: str = "") -> None:
        self.functions: list[Function] = []
        self._declarations: dict[str, str] = {}
        self._attributes = f"nounwind {attributes}".rstrip()

    def function(self, name: str, types: Sequence[str], returns: str = "void") -> Function:
        return Function(self, name, types, returns)

    def declare(self, returns: str, name: str, types: Sequence[str]) -> None:
        """Declare a function that is called; the first declaration of a name counts."""
        self._declarations.setdefault(name, f"declare {returns} @{name}({', '.join(types)})")

    def text(self) -> str:
        """Return the module's IR."""
        defined = {f.name for f in self.functions}
        declarations = [text for name, text in self._declarations.items() if name not in defined]
        return "\n".join([*declarations, *(f.text() for f in self.functions), f"attributes #0 = {{ {self._attributes} }}", ""])

"""The emitter: each operator, loop and conversion against Python and torch, through compiled functions."""

import math
import operator
from collections.abc import Callable

import pytest
import torch
from support import RUNNABLE, call, covering, elementwise
from torch import Tensor

from halfbyte.kernels.cpu.codegen import ir
from halfbyte.kernels.cpu.codegen.ir import Function, Module, Value
from halfbyte.kernels.cpu.codegen.isa import ISA

I32, F32 = torch.int32, torch.float32
EDGES = [0, 1, -1, 2, 7, -7, 127, -128, 255, 32767, -32768, 65535, 2**31 - 1, -(2**31), 12345678, -12345678]
FLOATS = [0.0, -0.0, 1.0, -1.5, 1e-45, -1e-38, 3e38, -3e38, math.inf, -math.inf, math.nan, 0.1, 16777217.0, -2.5, 1 / 3, 1e10]
isas = pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)


def pairs(values: list[float], dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Each of 16 values with each."""
    v = torch.tensor(values, dtype=dtype)
    return v.repeat_interleave(16).contiguous(), v.repeat(16).contiguous()


def same(a: Tensor, b: Tensor) -> bool:
    """Bit for bit, but any NaN is as good as another."""
    nan = a.isnan()
    bits = {2: torch.int16, 4: torch.int32}[a.element_size()]
    return a.dtype == b.dtype and torch.equal(nan, b.isnan()) and torch.equal(a.view(bits)[~nan], b.view(bits)[~nan])


def unsigned(t: Tensor) -> Tensor:
    return t.long() & 0xFFFFFFFF


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.and_, operator.or_, operator.xor])
def test_integers(op: Callable) -> None:
    a, b = pairs(EDGES, I32)
    assert torch.equal(elementwise(op, I32, a, b), op(a, b))


def test_unsigned_division() -> None:
    a, b = pairs([x or 3 for x in EDGES], I32)
    assert torch.equal(unsigned(elementwise(operator.floordiv, I32, a, b)), unsigned(a) // unsigned(b))
    assert torch.equal(unsigned(elementwise(operator.mod, I32, a, b)), unsigned(a) % unsigned(b))


def test_shifts() -> None:
    a, by = pairs(EDGES, I32)
    by = by & 31
    assert torch.equal(unsigned(elementwise(lambda x, n: x << n, I32, a, by)), unsigned(a) << by & 0xFFFFFFFF)
    assert torch.equal(unsigned(elementwise(lambda x, n: x >> n, I32, a, by)), unsigned(a) >> by)
    assert torch.equal(elementwise(Value.shift_signed, I32, a, by), (a.long() >> by).int())


@pytest.mark.parametrize("op", [operator.add, operator.sub, operator.mul, operator.truediv])
def test_floats(op: Callable) -> None:
    a, b = pairs(FLOATS, F32)
    assert same(elementwise(op, F32, a, b), op(a, b))
    # A product and a sum stay two roundings: nothing is contracted unless fma says so.
    assert same(elementwise(lambda x, y: x * y + x, F32, a, b), a * b + a)


def test_python_numbers_on_either_side() -> None:
    a = torch.tensor(EDGES, dtype=I32)
    assert torch.equal(elementwise(lambda x: 3 - x + 5 + (7 + x * 2) + 3 * x, I32, a), 3 - a + 5 + (7 + a * 2) + 3 * a)
    x = torch.tensor(FLOATS)
    assert same(elementwise(lambda v: (1.0 - v) / 3.0, F32, x), (1.0 - x) / 3.0)
    # torch makes a product with the reciprocal of number / tensor.
    assert same(elementwise(lambda v: 127.0 / v * 0.1, F32, x), torch.full_like(x, 127.0) / x * 0.1)


def test_comparisons() -> None:
    for dtype, values in ((I32, EDGES), (F32, FLOATS)):
        a, b = pairs(values, dtype)
        for actual, expected in ((operator.lt, torch.lt), (operator.gt, torch.gt), (operator.ge, torch.ge), (Value.equals, torch.eq)):
            assert torch.equal(
                elementwise(lambda x, y, op=actual: op(x, y).to("i8", unsigned=True), torch.int8, a, b).bool(), expected(a, b)
            )


def test_max_and_min_keep_a_nan_on_the_left_and_drop_one_on_the_right() -> None:
    a, b = pairs(FLOATS, F32)
    for actual, expected in ((Value.max_keeping_nan, torch.maximum), (Value.min_keeping_nan, torch.minimum)):
        wanted = torch.where(a.isnan() | b.isnan(), a, expected(a, b))
        assert torch.equal(elementwise(actual, F32, a, b).nan_to_num(nan=-7), wanted.nan_to_num(nan=-7))  # either zero will do


@isas
def test_fma_rounds_once(isa: ISA) -> None:
    a, b = torch.randn(2, 1024)
    rounded = a * b
    # What a rounding took off a product of float32 is itself a float32, and exact in float64.
    wanted = (a.double() * b.double() - rounded.double()).float()
    assert wanted.count_nonzero() > 500
    assert same(elementwise(lambda x, y, z: x.fn.fma(x, y, z), F32, a, b, -rounded, isa=isa), wanted)


def test_select_takes_values_and_numbers() -> None:
    a, b = pairs(EDGES, I32)
    assert torch.equal(elementwise(lambda x, y: (x < y).select(x, y), I32, a, b), torch.minimum(a, b))
    assert torch.equal(elementwise(lambda x, y: (x < y).select(x, 99), I32, a, b), torch.where(a < b, a, 99))


def test_shuffle_and_splat() -> None:
    a, b = torch.arange(16, dtype=I32), torch.arange(100, 116, dtype=I32)
    assert torch.equal(elementwise(lambda x: x.shuffle(range(15, -1, -1)), I32, a), a.flip(0))
    picks = [0, 16, 1, 17, 5, 5, 31, 30, 2, 3, 4, 6, 7, 8, 9, 10]
    assert torch.equal(elementwise(lambda x, y: x.shuffle(picks, y), I32, a, b), torch.cat((a, b))[picks])
    out = torch.empty(8)
    call(lambda f, to, x: to.store(x.load("float").splat(8)), out, torch.tensor([2.5]))
    assert out.tolist() == [2.5] * 8


def test_fold_adds_halves_then_quarters() -> None:
    x, out = torch.randn(16), torch.empty(2)

    def body(f: Function, to: Value, source: Value) -> None:
        value = source.load("<16 x float>")
        to.store(value.fold(operator.add))
        to.store(value.fold(lambda a, b: a.max_keeping_nan(b)), 4)

    call(body, out, x)
    v = x
    while len(v) > 1:
        v = v[: len(v) // 2] + v[len(v) // 2 :]
    assert out.tolist() == [v.item(), x.max().item()]


def test_reduce() -> None:
    x, out = torch.tensor(EDGES, dtype=I32), torch.empty(2, dtype=I32)

    def body(f: Function, to: Value, source: Value) -> None:
        value = source.load("<16 x i32>")
        to.store(value.reduce("add"))
        to.store(value.reduce("umax"), 4)

    call(body, out, x)
    assert out.tolist() == [x.sum(dtype=I32).item(), -1]


def test_loops_nest_and_may_run_no_times() -> None:
    out = torch.zeros(4, dtype=torch.int64)

    def body(f: Function, to: Value) -> None:
        total, runs = f.variable(f.value("i64", 0)), f.variable(f.value("i64", 0))
        for i in f.loop(5):
            for j in f.loop(i):
                total.value = total.value + i * 10 + j
                runs.value = runs.value + 1
        to.store(total.value)
        to.store(runs.value, 8)
        last = f.variable(f.value("i64", 0))
        for i in f.loop(20, 3, 4):  # 3, 7, 11, 15, 19
            last.value = last.value * 100 + i
        to.store(last.value, 16)
        for i in f.loop(3, 7):
            to.store(i, 24)

    call(body, out)
    wanted = sum(i * 10 + j for i in range(5) for j in range(i))
    assert out.tolist() == [wanted, 10, 307111519, 0]


def test_draw_asks_for_the_next_until_the_end() -> None:
    counter, out = torch.tensor([2]), torch.zeros(8, dtype=torch.int64)

    def body(f: Function, next_: Value, to: Value) -> None:
        for i in f.draw(lambda: f.fetch_add(next_), f.value("i64", 7)):
            to.store(i + 1, i * 8)

    call(body, counter, out)
    assert out.tolist() == [0, 0, 3, 4, 5, 6, 7, 0]
    assert counter.item() == 8  # 7 was drawn and found to be the end


def test_when_and_variables() -> None:
    out = torch.zeros(16, dtype=torch.int64)

    def body(f: Function, to: Value) -> None:
        best = f.variable(f.value("i64", -1))
        for i in f.loop(16):
            with f.when((i % 3).equals(0)):
                best.value = i
                with f.when(i > 8):
                    best.value = i * 100
            to.store(best.value, i * 8)

    call(body, out)
    assert out.tolist() == [0, 0, 0, 3, 3, 3, 6, 6, 6, 900, 900, 900, 1200, 1200, 1200, 1500]


def test_functions_call_one_another_and_return() -> None:
    out = torch.zeros(2, dtype=torch.int64)
    module = Module()
    square = module.function("square", ["i64"], "i64")
    square.set_result(square.parameters[0] * square.parameters[0])
    store = module.function("store", ["ptr", "i64"])
    store.parameters[0].store(store.call("i64", "square", store.parameters[1]))
    f = module.function("start", ["ptr"])
    f.call("void", "store", f.parameters[0], f.value("i64", 7))
    f.call_pointer(Value(f, "ptr", "@store"), f.parameters[0] + 8, f.value("i64", 9))

    from ctypes import CFUNCTYPE, c_int64, c_void_p

    from halfbyte.kernels.cpu.codegen import jit

    addresses = jit.load("three", lambda _: module, RUNNABLE[0])
    assert set(addresses) == {"square", "store", "start"}
    CFUNCTYPE(None, c_void_p)(addresses["start"])(out.data_ptr())
    assert out.tolist() == [49, 81]
    assert CFUNCTYPE(c_int64, c_int64)(addresses["square"])(-12) == 144


def test_conversions_between_integers() -> None:
    x = torch.tensor(EDGES, dtype=I32)
    assert torch.equal(elementwise(lambda v: v.to("i8"), torch.int8, x), x.to(torch.int8))
    assert torch.equal(elementwise(lambda v: v.to("i8").to("i32"), I32, x), x.to(torch.int8).int())
    assert torch.equal(elementwise(lambda v: v.to("i8").to("i32", unsigned=True), I32, x), x.to(torch.uint8).int())
    assert torch.equal(elementwise(lambda v: v.to("i64"), torch.int64, x), x.long())


def test_conversions_between_numbers() -> None:
    x = torch.tensor(EDGES, dtype=I32)
    assert torch.equal(elementwise(lambda v: v.to("float"), F32, x), x.float())
    assert torch.equal(elementwise(lambda v: v.to("float", unsigned=True), F32, x), unsigned(x).float())
    y = torch.tensor([0.0, 0.9, -0.9, 1.5, -1.5, 2e9, -2e9, 127.99, 1e-30, -1e-30, 3, 4, 5, 6, 7, 8])
    assert torch.equal(elementwise(lambda v: v.to("i32"), I32, y), y.int())
    z = torch.tensor(FLOATS)
    assert same(elementwise(lambda v: v.to("double").to("float"), F32, z), z)
    assert torch.equal(elementwise(lambda v: v.bits("<16 x i32>"), I32, z), z.view(I32))
    assert torch.equal(elementwise(lambda v: v.to("double"), torch.float64, z[:10].repeat(8)), z[:10].repeat(8).double())


def test_constants_are_exact() -> None:
    out = torch.empty(16)
    call(lambda f, to: to.store(f.constant("<16 x float>", FLOATS)), out)
    assert same(out, torch.tensor(FLOATS))
    one = torch.empty(1)
    call(lambda f, to: to.store(f.value("float", 0.1)), one)
    assert one.item() == torch.tensor(0.1).item()


@isas
@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_every_half_becomes_its_float(isa: ISA, kind: str, dtype: torch.dtype) -> None:
    raw = torch.arange(-(2**15), 2**15).to(torch.int16)
    assert same(elementwise(lambda v: isa.to_float(v, kind), F32, raw, isa=isa), raw.view(dtype).float())


@isas
@pytest.mark.parametrize(("kind", "dtype"), [("f16", torch.float16), ("bf16", torch.bfloat16)])
def test_floats_become_the_nearest_half(isa: ISA, kind: str, dtype: torch.dtype) -> None:
    if kind == "f16" and not isa.half_conversions:
        pytest.skip(f"{isa.name} leaves the conversion to float16 to torch")
    halves = torch.arange(-(2**15), 2**15).to(torch.int16).view(dtype).float()
    # Every half, the points midway to its neighbours (ties), and the floats beside those.
    spread = torch.cat([(halves.view(I32) + d).view(F32) for d in (0, 1, -1, 0x7FFF, 0x8000, 0x8001, 0xFFF, 0x1000, 0x1001)])
    x = torch.cat((spread, torch.randint(-(2**31), 2**31, (2**16,)).int().view(F32)))
    got = elementwise(lambda v: isa.from_float(v, kind), torch.int16, x, isa=isa).view(dtype)
    assert same(got, x.to(dtype))


def test_operators_without_a_meaning_are_errors_when_emitted() -> None:
    f = Module().function("f", ["i32", "float"])
    i, x = f.parameters
    p = Module().function("g", ["ptr"]).parameters[0]
    for wrong in (
        lambda: i / 2, lambda: x // 2, lambda: x % 2, lambda: x & 1, lambda: x << 1, lambda: 1 / i, lambda: x.differs(1.0),
        lambda: x.below(1.0), i.is_nan,
    ):  # fmt: skip
        with pytest.raises(TypeError, match="has no meaning for"):
            wrong()
    with pytest.raises(TypeError, match="are not subtracted"):
        p - 4
    with pytest.raises(TypeError, match=r"use equals\(\)"):
        bool(i == 3)
    with pytest.raises(TypeError, match=r"use select\(\)"):
        bool(i < 3)


def test_what_would_be_other_numbers_is_an_error() -> None:
    f = Module().function("f", ["i32", "<6 x float>"], "i32")
    i, six = f.parameters
    with pytest.raises(ValueError, match="no constant of i32"):
        i * 0.5
    with pytest.raises(ValueError, match=r"use lane\(\)"):
        six.shuffle([2])
    for wrong in (six, six.shuffle([0, 1, 2]), six.lane(0)):
        with pytest.raises(ValueError, match="can't be halved"):
            wrong.fold(operator.add)
    with pytest.raises(ValueError, match="f returns i32, got no result"):
        f.text()
    f.set_result(i)
    assert "ret i32 %p0" in f.text()
    f.returns = "void"
    with pytest.raises(ValueError, match="f returns void, got a result"):
        f.text()


@pytest.mark.parametrize("kind", ["half", "bfloat", "float", "double"])
@isas
def test_constants_are_rounded_to_their_type(isa: ISA, kind: str) -> None:
    dtype = {"half": torch.float16, "bfloat": torch.bfloat16, "float": F32, "double": torch.float64}[kind]
    numbers = [0.1, -1 / 3, 1.0, 0.0, -0.0, 65504.0, 1 + 2**-8 + 2**-20, math.inf]
    out = torch.zeros(len(numbers), dtype=dtype)

    def body(f: Function, to: Value) -> None:
        for i, x in enumerate(numbers):
            to.store(f.value(kind, x), i * out.element_size())

    call(body, out, isa=isa)
    assert out.tolist() == torch.tensor(numbers, dtype=torch.float64).to(dtype).tolist()


def test_variables_of_any_size() -> None:
    out = torch.zeros(2, dtype=I32)

    def body(f: Function, to: Value) -> None:
        flag = f.variable(f.value("i64", 2) < 3)
        flag.value = f.value("i64", 5) < 3
        three = f.variable(f.constant("<3 x float>", [1, 2, 3]))
        to.store(flag.value.to("i32", unsigned=True) + 7)
        to.store(three.value.lane(2).to("i32"), 4)

    call(body, out)
    assert out.tolist() == [7, 3]


def test_unsigned_conversions() -> None:
    x = torch.tensor([200.0, 127.9, 0.5, 255.0] * 4)
    assert elementwise(lambda v: v.to("i8", unsigned=True).to("i32", unsigned=True), I32, x).tolist() == [200, 127, 0, 255] * 4


def test_types() -> None:
    assert ir.vector("float", 1) == "float"
    assert ir.vector("float", 8) == "<8 x float>"
    assert (ir.lanes_of("<8 x i16>"), ir.element_of("<8 x i16>"), ir.bytes_of("<8 x i16>")) == (8, "i16", 16)
    assert (ir.lanes_of("ptr"), ir.element_of("ptr"), ir.bytes_of("ptr")) == (1, "ptr", 8)
    types = ("float", "<8 x float>", "<32 x bfloat>", "<4 x i8>", "half")
    assert [ir.alignment_of(t) for t in ("i1", "i8", "<3 x float>", "<16 x float>", "ptr")] == [1, 1, 16, 64, 8]
    assert [ir.mangled(t) for t in types] == ["f32", "v8f32", "v32bf16", "v4i8", "f16"]


def test_covering_modules_have_each_instruction_of_all() -> None:
    def module(*types: str) -> Module:
        built = Module()
        f = built.function("f", ["ptr"] * 2)
        for kind in types:
            f.parameters[0].store(f.parameters[1].load(kind, 8) + f.parameters[1].load(kind), 4)
        return built

    whole, part, other = module("i32", "<4 x i32>"), module("<4 x i32>"), module("float")
    assert covering([part, whole, other]) == [whole, other]
    assert covering([module("i32"), part, whole]) != [whole], "the smaller ones take less to compile"

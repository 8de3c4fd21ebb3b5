"""Machine code for every instruction set, also those that this CPU lacks: it has the instructions that its speed rests on."""

import functools
import itertools
import re
from dataclasses import replace

import pytest
from support import LLVM, RUNNABLE, changed, covering, pairwise, skip_what_crashes, tile_spec

from halfbyte.formats import Format, as_format
from halfbyte.kernels.cpu import probe
from halfbyte.kernels.cpu.codegen import isa_x86, jit, runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512BF16, AVX512VNNI
from halfbyte.kernels.cpu.codegen.isas import ISAS
from halfbyte.kernels.cpu.codegen.tuning import Core
from halfbyte.kernels.cpu.linear import activations, bracketed, driver, expanded, tile
from halfbyte.kernels.cpu.linear.activations import RowSpec
from halfbyte.kernels.cpu.linear.tile_spec import ActivationSpec, Inner, TileSpec
from halfbyte.kernels.cpu.quantize import dequantize, quantize
from halfbyte.kernels.cpu.quantize.dequantize import DequantizeSpec
from halfbyte.kernels.cpu.quantize.quantize import QuantizeSpec
from halfbyte.layouts.cpu_tiles import PANEL, Geometry, tail_bytes
from halfbyte.machine import machine

BY_NAME = {isa.name: isa for isa in ISAS}
UNITS = ((32, True), (32, False), (8, False))
LOOPED = UNITS[1:]


@functools.cache
def assembly(isa: ISA, spec: TileSpec) -> str:
    return jit.compile_assembly(tile.build(spec, isa), isa)


def spec_of(
    isa: ISA, inner: Inner, bits: int, zero: str, unit: tuple[int, bool], m: int, has_offset: bool = False, out: str = "f32"
) -> TileSpec:
    tiling = isa.tuning.tile(m, inner, geometry(bits, zero))
    rows = min(m, tiling.rows)
    return tile_spec(inner, bits, zero, unit, rows, tiling.vectors, out=out, has_offset=has_offset)


def geometry(bits: int, zero: str, block: int = 32) -> Geometry:
    return Geometry(Format(bits, block, zero), 32, 4096)


def between(text: str, instruction: str) -> list[str]:
    """The lines from the first to the last that have `instruction`."""
    lines = text.splitlines()
    at = [i for i, line in enumerate(lines) if re.match(rf"\s({{vex}}\s+)?{instruction}[.\s]", line)]
    assert at, f"no {instruction}"
    return lines[at[0] : at[-1] + 1]


def count(lines: list[str], instruction: str) -> int:
    return sum(bool(re.match(rf"\s({{vex}}\s+)?{instruction}[.\s]", line)) for line in lines)


def spills(lines: list[str]) -> list[str]:
    """Loads and stores of vector registers on the stack."""
    return [line for line in lines if re.search(r"%r[sb]p.*%[xyz]mm|%[xyz]mm.*%r[sb]p|\bq\d+.*\[sp", line)]


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize(("zero", "has_offset"), [("none", False), ("point", False), ("offset", True)])
@pytest.mark.parametrize("bits", [4, 8])
def test_avx512_int8_tiles_are_dot_products_in_registers(bits: int, zero: str, has_offset: bool, unit: tuple[int, bool]) -> None:
    for isa, m in itertools.product((AVX512VNNI("zen5"), AVX512VNNI("intel")), (1, 6, 8, 10, 20)):
        if m == 10 and unit[1]:
            continue  # such tiles are for long blocks
        spec = spec_of(isa, "int8", bits, zero, unit, m, has_offset)
        text = assembly(isa, spec)
        loop = between(text, "vpdpbusd")
        dots = [line for line in loop if "vpdpbusd" in line]
        # Four k of 16 outputs each; where activations have an offset the sums of the weights are one more row.
        assert len(dots) == (spec.schedule.rows + has_offset) * spec.schedule.vectors * unit[0] // 4
        assert all(line.count("%zmm") == 3 or (line.count("%zmm") == 2 and "(" in line) for line in dots)
        # On AMD's CPUs it takes a slot of its own; on Intel's, where tiles of one vector are, it does not.
        assert not any("{1to16}" in line for line in dots) or (isa.core == "intel" and spec.schedule.vectors == 1)
        unpacking = count(loop, "vgf2p8affineqb"), count(loop, "vps?rl[wdq]")
        steps = spec.schedule.vectors * unit[0] // 8 if bits == 4 else 0
        assert max(unpacking) <= 2 * steps
        assert isa.core != "intel" or unpacking[1] == 0
        assert not spills(loop)


@pytest.mark.parametrize("zero", ["none", "point", "offset"])
def test_on_zen_5_up_to_14_rows_of_8_bits_are_one_tile_in_registers(zero: str) -> None:
    isa, long = AVX512VNNI("zen5"), geometry(8, zero, 128)
    assert [isa.tuning.tile(m, "int8", long).rows for m in (11, 14, 15)] == [11, 14, 8]
    assert isa.tuning.tile(14, "int8", geometry(8, zero, 1024)).rows == 14
    assert isa.tuning.tile(14, "int8", geometry(4, zero, 128)).rows == isa.tuning.tile(14, "int8", geometry(8, zero)).rows == 8
    for rows, most in ((13, 0), (14, 9)):
        spec = changed(spec_of(isa, "int8", 8, zero, (32, False), 8), rows=rows)
        loop = between(assembly(isa, spec), "vpdpbusd")
        assert count(loop, "vpdpbusd") == rows * 2 * 8
        assert len(spills(loop)) <= most


@pytest.mark.parametrize(
    ("name", "lookup"), [("avx512_vnni", "vpermb"), ("avx512", "vpshufb"), ("avx2", "vpshufb"), ("neon_dotprod", "tbl")]
)
def test_codes_of_a_table_are_looked_up_once_a_byte(name: str, lookup: str) -> None:
    isa = AVX512VNNI("intel") if name == "avx512_vnni" else BY_NAME[name]
    for m in (1, 6, 20):
        tiling = isa.tuning.tile(m, "int8", Geometry(as_format("mxfp4"), 32, 4096))
        spec = changed(spec_of(isa, "int8", 8, "none", (32, True), m), rows=min(m, tiling.rows), vectors=tiling.vectors, codebook="fp4")
        loop = between(assembly(isa, spec), lookup)
        assert count(loop, lookup) == spec.schedule.vectors * 8
        assert name == "avx2" or not spills(loop)


@pytest.mark.parametrize("zero", ["none", "point", "offset"])
def test_biased_sums_take_two_multiplications_and_no_conversion(zero: str) -> None:
    isa = AVX512VNNI("intel")
    for bits, block in ((4, 32), (4, 128), (8, 32)):
        spec = changed(spec_of(isa, "int8", bits, zero, (32, block == 32), 6), block_sum="biased")
        geo = geometry(bits, zero, block)
        tiles = [tile.build(changed(spec, rows=isa.tuning.tile(31, "int8", geo).rows), isa)]
        shape = isa.tuning.tile(64, "int8", geo)
        if bits == 4 or zero != "point":
            tiles.append(expanded.build(changed(spec, rows=shape[0]), isa))
        packed, *read = [jit.compile_assembly(module, isa).splitlines() for module in tiles]
        for lines in (packed, *read):
            assert not count(lines, "vcvtdq2ps")
        for lines in read:
            assert count(lines, "vpdpbusd") == shape[0] * spec.schedule.vectors * 8
            assert not count(lines, "vgf2p8affineqb") + count(lines, "vpdpwssd")
            assert not [line for line in between("\n".join(lines), "vpdpbusd") if re.search(r"%rsp.*%zmm|%zmm.*%rsp", line)]


def test_scales_and_offsets_at_once_take_two_multiplications() -> None:
    isa = AVX512VNNI("zen5")
    spec = changed(spec_of(isa, "int8", 4, "offset", (32, True), isa.tuning.bracketed_rows), block_sum="bracketed")
    products = spec.schedule.rows * spec.schedule.vectors
    for module, pairs, multiplications in ((bracketed.build(spec, isa), products, products), (tile.build(spec, isa), 0, 3 * products)):
        text = jit.compile_assembly(module, isa)
        loop = between(text, r"(?:vpdpbusd|vfmadd\d+ps)")
        assert (count(loop, "vpdpbusd"), count(loop, "vcvtdq2ps"), count(loop, "vpmaddwd")) == (8 * products, products, pairs)
        assert count(loop, r"vfmadd\d+ps") + count(loop, "vmulps") == multiplications
        assert not spills(loop)


@pytest.mark.parametrize("unit", UNITS)
@pytest.mark.parametrize("zero", ["none", "point", "offset"])
def test_avx512_bfloat16_tiles_are_dot_products_in_registers(zero: str, unit: tuple[int, bool]) -> None:
    isa = AVX512BF16("zen5")
    for m in (1, 6, 8):
        spec = spec_of(isa, "bf16", 4, zero, unit, m)
        text = assembly(isa, spec)
        loop = between(text, "vdpbf16ps")
        assert sum("vdpbf16ps" in line for line in loop) == spec.schedule.rows * spec.schedule.vectors * unit[0] // 2
        assert text.count("\tvpermw\t") == spec.schedule.vectors * unit[0] // 2  # a lookup makes two weights of each lane
        assert not spills(loop)


@pytest.mark.parametrize("zero", ["none", "point", "offset"])
@pytest.mark.parametrize("unit", UNITS)
def test_zen_4_multiplies_floats_in_tiles_of_one_vector(zero: str, unit: tuple[int, bool]) -> None:
    isa, products = AVX512BF16("zen4"), {"float": "vfmadd231ps", "bf16": "vdpbf16ps"}
    for (inner, product), bits in (*itertools.product(products.items(), (4,)), (("float", "vfmadd231ps"), 8)):
        two = 6 if inner == "bf16" else 4  # rows from which on it is one
        assert [isa.tuning.tile(m, inner, geometry(bits, zero))[:2] for m in (two - 1, two, 12, 30)] == [
            (two - 1, 2),
            (two, 1),
            (12, 1),
            (12, 1),
        ]
        loop = between(assembly(isa, spec_of(isa, inner, bits, zero, unit, 30)), product)
        assert count(loop, product) >= 12 * unit[0] // (2 if inner == "bf16" else 1)
        assert sum("{1to16}" in line for line in loop if product in line) >= 12 * unit[0] // (4 if inner == "bf16" else 2)
        assert not spills(loop)


@pytest.mark.parametrize("unit", [(32, True), (32, False)])
@pytest.mark.parametrize(("panels", "shares_prefetch"), [(1, False), (1, True), (4, False)])
def test_each_line_of_weights_is_asked_for_once_by_each_way(unit: tuple[int, bool], panels: int, shares_prefetch: bool) -> None:
    isa = AVX512VNNI("intel")
    spec = changed(spec_of(isa, "int8", 4, "point", unit, 2), panels=panels, shares_prefetch=shares_prefetch)
    text, outputs = assembly(isa, spec), spec.schedule.rows * spec.schedule.vectors  # a line each, asked for by tiles of one panel
    lines = (PANEL * 32 // 2 + tail_bytes(2, 1, pair_sums=False)) // 64  # of a unit, and of what is behind its block
    assert count(text.splitlines(), "prefetcht0") == lines + (outputs if panels == 1 else 0)
    assert count(text.splitlines(), "prefetcht1") == (lines if shares_prefetch else 0)
    once = assembly(isa, changed(spec, locality=0)).splitlines()
    assert count(once, "prefetchnta") == lines
    assert count(once, "prefetcht0") == (outputs if panels == 1 else 0)
    alone = assembly(isa, changed(spec, locality=None)).splitlines()
    assert count(alone, "prefetch[a-z0-9]+") == (outputs if panels == 1 else 0) + (lines if shares_prefetch else 0)


def test_a_zen_4_reads_the_weights_of_few_rows_by_itself() -> None:
    def asked(core: Core, bits: int, zero: str, inner: Inner = "int8") -> list[int | None]:
        return [AVX512VNNI(core).tuning.locality(m, inner, geometry(bits, zero)) for m in (1, 2, 3, 5, 6, 100)]

    assert asked("zen4", 4, "none") == asked("zen4", 4, "offset") == [None, None, 2, 2, 2, 2]
    assert asked("zen4", 4, "point") == [None, 0, 2, 2, 2, 2]
    assert asked("zen4", 8, "point") == [None, None, None, None, 2, 2]
    assert asked("zen4", 8, "none", "float") == [2] * 6
    assert asked("zen5", 4, "none") == asked("zen5", 8, "none", "float") == [0, 0, 0, 3, 3, 3]
    assert asked("intel", 4, "none") == [3] * 6
    assert [AVX512VNNI(core).tuning.prefetching.distance for core in ("zen4", "zen5", "intel")] == [7168, 8192, 4096]
    assert [AVX512VNNI(core).tuning.chunk_bytes for core in ("zen4", "zen5", "intel")] == [1 << 20, 1 << 62, 1 << 62]


def test_whose_rules_are_followed(monkeypatch: pytest.MonkeyPatch) -> None:
    for vendor, llvm, core in (
        ("Intel", "sapphirerapids", "intel"),
        ("AMD", "znver4", "zen4"),
        ("AMD", "znver5", "zen5"),
        (None, "x86-64", "zen5"),
    ):
        here = replace(machine(), vendor=vendor, llvm_cpu=llvm)
        monkeypatch.setattr(isa_x86, "machine", lambda here=here: here)
        assert isa_x86.core_at_hand() == AVX512VNNI().core == core


def test_avx512_float_tiles_look_nibbles_up() -> None:
    for core, vectors in (("intel", 2), ("zen5", 2), ("zen4", 1)):
        isa = AVX512VNNI(core)
        text = assembly(isa, spec_of(isa, "float", 4, "none", (32, True), 4))
        loop = between(text, "vfmadd231ps")
        lookups = sum(bool(re.search(r"\tvperm(ps|d)\t", line)) for line in text.splitlines())  # the same lookup, whatever its name
        assert lookups == vectors * 32
        assert not spills(loop)
        assert "vcvtph2ps" in text


@pytest.mark.parametrize("unit", LOOPED)
@pytest.mark.parametrize("bits", [4, 8])
def test_avx_vnni_tiles_are_dot_products_of_half_the_width(bits: int, unit: tuple[int, bool]) -> None:
    isa = BY_NAME["avx_vnni"]
    for m in (1, 5):
        spec = spec_of(isa, "int8", bits, "point", unit, m)
        text = assembly(isa, spec)
        loop = between(text, "vpdpbusd")
        assert count(loop, "vpdpbusd") == spec.schedule.rows * spec.schedule.vectors * unit[0] // 4
        assert not spills(loop)
        assert "zmm" not in text
        assert "{evex}" not in text


@pytest.mark.parametrize(("name", "register"), [("avx2", "%ymm"), ("avx512", "%zmm")])
def test_tiles_without_dot_products(name: str, register: str) -> None:
    isa = BY_NAME[name]
    for unit in UNITS:  # 4 bits: a product of bytes for eight k of four outputs, one addition to each but the first, 32 k summed as int16
        loop = between(assembly(isa, spec_of(isa, "int8", 4, "none", unit, 4)), "vpmaddubsw")
        assert count(loop, "vpmaddubsw") == 4 * 2 * unit[0] // 4
        assert all(register in line for line in loop if "vpmaddubsw" in line)
        assert len(spills(loop)) <= 1
    # 8 bits, short blocks: two products of int16 and two additions for four k; their weights cost a mask and a shift.
    short = spec_of(isa, "int8", 8, "none", (32, False), 6)
    text = assembly(isa, short)
    loop = between(text, "vpmaddwd")
    assert count(loop, "vpmaddwd") == 6 * 2 * 16
    assert count(loop, "vpsrlw") + count(loop, "vpand[dq]?") <= 2 * 2 * 8 + 1
    assert len(spills(loop)) <= (12 if LLVM > 20 else 17)
    # Whole rows: products of sums, one for four k of an output, between two additions and one.
    rows, vectors = isa.tuning.conv_tile
    for out in ("f32", "i8"):
        spec = changed(short, pair_sums=True, rows=rows, vectors=vectors, out=out)
        text = assembly(isa, spec)
        assert count(text.splitlines(), "vpmaddwd") == rows * vectors * 8
        assert count(text.splitlines(), "vpaddw") == 2 * rows * vectors * 8
        assert len(spills(between(text, "vpmaddwd"))) <= (2 if LLVM > 20 else 7)
        assert "vpdp" not in text


@pytest.mark.parametrize("bits", [4, 8])
def test_neon_tiles_multiply_bytes_to_int16(bits: int) -> None:
    isa = BY_NAME["neon"]
    text = assembly(isa, spec_of(isa, "int8", bits, "none", (32, False), 4))
    assert count(text.splitlines(), "sm(la|ul)l2?") == 2 * 4 * 2 * 8  # eight products each
    assert "dot" not in text


@pytest.mark.parametrize("unit", LOOPED)
@pytest.mark.parametrize("bits", [4, 8])
def test_dotprod_tiles_are_dot_products_in_registers(bits: int, unit: tuple[int, bool]) -> None:
    isa = BY_NAME["neon_dotprod"]
    for m in (1, 4, 5):
        spec = spec_of(isa, "int8", bits, "point", unit, m)
        loop = between(assembly(isa, spec), "sdot")
        assert count(loop, "sdot") == spec.schedule.rows * spec.schedule.vectors * unit[0] // 4
        assert not spills(loop)


@pytest.mark.parametrize("unit", LOOPED)
@pytest.mark.parametrize("bits", [4, 8])
def test_i8mm_tiles_are_matrix_products_in_registers(bits: int, unit: tuple[int, bool]) -> None:
    isa = BY_NAME["neon_i8mm"]
    for m in (2, 5, 8):
        spec = spec_of(isa, "int8", bits, "point", unit, m)
        text = assembly(isa, spec)
        loop = between(text, "smmla")
        assert count(loop, "smmla") == spec.schedule.rows // 2 * 2 * spec.schedule.vectors * unit[0] // 8
        assert count(text.splitlines(), "sdot") == spec.schedule.rows % 2 * spec.schedule.vectors * unit[0] // 4  # the odd row
        assert not spills(loop)


def test_avx2_tiles() -> None:
    isa = BY_NAME["avx2"]
    text = assembly(isa, spec_of(isa, "int8", 4, "none", (32, True), 4))
    assert text.count("\tvpmaddwd\t") == 4 * 2  # eight steps of 4-bit weights are summed as int16
    for bits in (4, 8):
        floats = assembly(isa, spec_of(isa, "float", bits, "point", (32, True), 6))
        assert floats.count("\tvfmadd231ps\t") >= 6 * 2 * 32
        for each in (text, floats):
            assert "zmm" not in each
            assert "{%k" not in each
            assert "vpdpbusd" not in each


@pytest.mark.skipif(machine().arch != "x86_64", reason="generic code is for the machine at hand")
def test_generic_code_keeps_to_what_every_x86_has() -> None:
    for inner in ("int8", "float"):
        text = assembly(BY_NAME["generic"], spec_of(BY_NAME["generic"], inner, 4, "point", (32, True), 2))
        assert not re.search(r"%[yz]mm|\tv[a-z]+\t|\tpshufb|\tpmulld|\tpblend", text)


# Everything that is compiled at run time, for each instruction set that this CPU has not: the other files run it on those that it has.
# That an intrinsic is unknown to a target shows here.


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa not in RUNNABLE], ids=lambda isa: isa.name)
def test_all_is_compiled_for_other_instruction_sets(isa: ISA) -> None:
    skip_what_crashes(isa)
    halves = ("f32", "bf16", "f16") if isa.half_conversions else ("f32", "bf16")
    some = itertools.cycle(halves)
    modules = [driver.build(isa), runtime.build(isa), probe.build(isa)]
    for source, inner in (("f32", "int8"), ("bf16", "float"), ("f16", "int8"), ("i8", "int8")):
        modules.append(activations.build(RowSpec(source, ActivationSpec(inner, 32, one_unit=True), 8, False, False, -8, "values"), isa))
        for by_row, has_offset in ((True, False), (False, True)) if source != "i8" else ():
            modules.append(
                activations.build(RowSpec(source, ActivationSpec(inner, 8, False, has_offset), 8, False, by_row, -8, "values"), isa)
            )
    if isa.bf16_dot:
        modules.append(activations.build(RowSpec("bf16", ActivationSpec("bf16", 32, one_unit=True), 8, False, False, 0, "values"), isa))
    for bits, zero in itertools.product((4, 8), ("none", "point", "offset")):
        modules.append(dequantize.build(DequantizeSpec(bits, "f16", zero, 8, next(some)), isa))
        modules.append(quantize.build(QuantizeSpec("f16", bits, zero, next(some), "int"), isa))
    for family, bits, zero in (("ggml", 4, "none"), ("ggml", 4, "offset"), ("ggml", 8, "none"), ("inferllm", 4, "none")):
        modules.append(quantize.build(QuantizeSpec("bf16", bits, zero, "f32", family), isa))
    for inner, bits, out in (*pairwise(("int8", "float"), (4, 8), halves), ("int8", 4, "i8"), ("int8", 8, "i8")):
        modules.append(tile.build(spec_of(isa, inner, bits, "none", (8, False), 3, out=out), isa))
    for module in covering(modules):
        text = jit.compile_assembly(module, isa)
        assert all(f"\n{function.name}:" in text for function in module.functions)

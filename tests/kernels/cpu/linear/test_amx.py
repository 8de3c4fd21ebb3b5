"""Tiles of AMX, whose registers are emulated where the CPU has none; a CPU that has them runs all other tests with them too."""

import itertools
import re
from dataclasses import replace

import pytest
import torch
from emulated.amx import EmulatedAMX, EmulatedTiles
from samples import largest_sums, random_codes
from support import activations, changed, pairwise, run_linear, tile_spec

from halfbyte import ops
from halfbyte.formats import Format, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen import isa_amx, jit, runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.isa_amx import AMXInt8, AMXTiles
from halfbyte.kernels.cpu.codegen.isa_x86 import nibble_map
from halfbyte.kernels.cpu.codegen.isas import ISAS
from halfbyte.kernels.cpu.codegen.kernel import compiled
from halfbyte.kernels.cpu.codegen.tuning import AMX_TILES
from halfbyte.kernels.cpu.linear import amx, linear
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import TileSpec
from halfbyte.kernels.problem import Activation
from halfbyte.layouts.cpu_tiles import LONGEST_BLOCK, pack

runs = pytest.mark.skipif(EmulatedTiles().missing() is not None, reason=str(EmulatedTiles().missing()))

KINDS = list(itertools.product((4, 8), ("none", "point", "offset")))
WAYS = ("block", "row", "block_offset", "row_offset")
DTYPES = (torch.float32, torch.bfloat16, torch.float16)
CASES = pairwise(KINDS, WAYS, (32, 128, 33, "channel"), DTYPES)
MS, NS, KS = (17, 3, 16, 33, 40, 9), (45, 32, 1, 70, 31), (333, 70, 64, 601, 1)


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)


@runs
@pytest.mark.parametrize(("name", "m", "k"), [("q4_0", 17, 333), ("int4_g128_zp", 33, 320), ("mxfp4", 5, 70), ("int4_channel_zp", 40, 64)])
def test_products_of_bfloat16_are_those_of_the_reference(name: str, m: int, k: int) -> None:
    n, fmt = 45, as_format(name)
    codes, x, bias = random_codes(fmt, (n, k)), activations(m, k, torch.bfloat16, 1, 2), torch.randn(n)
    x[-1, 0] = torch.nan
    kernel = LinearKernel(fmt, n, k, torch.bfloat16, "bf16", "block", isa=EmulatedTiles())
    y = run_linear(kernel, x, pack(codes), bias)
    error = reference.error_bound(x, codes, bias)
    assert bool(reference.agrees(y, reference.linear(x, codes, bias), error).all())
    whole = LinearKernel(fmt, n, k, torch.bfloat16, "bf16", "block", isa=EmulatedAMX())  # the unit, however few rows there are
    for rows in (1, 2, 4):
        assert torch.equal(run_linear(whole, x[:rows], pack(codes), bias), y[:rows])
    one_hot = run_linear(kernel, torch.eye(k).bfloat16(), pack(codes))
    assert torch.equal(one_hot, codes.dequantize(torch.float64).float().T.bfloat16())


def kernel_of(fmt: Format, n: int, k: int, dtype: torch.dtype, activation: Activation = "block") -> LinearKernel:
    return LinearKernel(fmt, n, k, dtype, "int8", activation, isa=EmulatedAMX())


@runs
@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_products_are_those_of_the_reference(number: int) -> None:
    (bits, zero), way, block, dtype = CASES[number]
    fmt = Format(bits, block, zero, (torch.float16, torch.bfloat16, torch.float32)[number % 3])
    if (bits, zero) == (4, "none") and number % 2:
        fmt = replace(fmt, family="fp4")
    m, n, k = MS[number % len(MS)], NS[number % len(NS)], KS[number % len(KS)]
    codes, x, bias, residual = random_codes(fmt, (n, k), number), activations(m, k, dtype, number, 3), torch.randn(n), torch.randn(m, n)
    residual = residual.to(dtype)
    y = run_linear(kernel_of(fmt, n, k, dtype, way), x, pack(codes), bias, (-50.0, torch.inf), residual)
    wanted = reference.linear(x, codes, bias, "int8", way, (-50.0, torch.inf), residual)
    assert bool(reference.agrees(y, wanted, reference.error_bound(x, codes, bias, "int8", way, residual)).all())


@runs
@pytest.mark.parametrize(("name", "way"), [("q4_0", "block"), ("int8_g128_zp", "row_offset"), ("int4_channel_offset", "block_offset")])
def test_a_row_does_not_depend_on_how_many_there_are(name: str, way: Activation, monkeypatch: pytest.MonkeyPatch) -> None:
    n, k, fmt = 75, 192, as_format(name)
    kernel, packed, x = kernel_of(fmt, n, k, torch.float32, way), pack(random_codes(fmt, (n, k))), torch.randn(40, k)
    x[7, 5] = torch.nan
    whole = run_linear(kernel, x, packed)
    assert whole[7].isnan().all()
    for m in (1, 2, 3, 17, 33):  # the first two without the unit
        assert torch.equal(run_linear(kernel, x[:m], packed).nan_to_num(), whole[:m].nan_to_num())
    for ahead in (1, 3, 7):
        assert kernel.isa.matrix is not None
        monkeypatch.setattr(kernel.isa.matrix, "tuning", replace(AMX_TILES, units_ahead=8 - ahead, chunk_bytes=2500 * ahead))
        again = kernel_of(fmt, n, k, torch.float32, way)
        compiled.cache_clear()
        assert torch.equal(run_linear(again, x, packed).nan_to_num(), whole.nan_to_num())


@pytest.mark.parametrize("isa", [isa for isa in (*ISAS, EmulatedAMX()) if isa.matrix is not None], ids=lambda isa: isa.name)
def test_few_rows_are_summed_as_the_unit_sums_many(isa: ISA) -> None:
    # What makes a block's sums apart may round a correction (`folded`), which exact sums of codes do not have.
    assert isa.matrix is not None
    assert not any(part.narrow_accumulators(bits) for part in (isa, isa.matrix) for bits in (4, 8))


@runs
@pytest.mark.parametrize(("bits", "zero"), [(4, "none"), (8, "none"), (8, "point")])
def test_the_largest_sums_do_not_overflow(bits: int, zero: str) -> None:
    codes, x = largest_sums(bits, zero)
    y = run_linear(kernel_of(codes.format, *codes.shape, torch.float32), x, pack(codes))
    error = reference.error_bound(x, codes, None, "int8", "block")
    assert bool(reference.agrees(y, reference.linear(x, codes, None, "int8", "block"), error).all())


@runs
@pytest.mark.parametrize("bits", [4, 8])
def test_integers_in_integers_out(bits: int) -> None:
    for scope, m, n, k in (("channel", 7, 45, 97), ("tensor", 33, 33, 200), ("channel", 17, 64, LONGEST_BLOCK + 40)):
        codes = random_codes(Format(bits, scope, "none", torch.float32), (n, k))
        x = torch.randint(-128, 128, (m, k), dtype=torch.int8)
        x[0] = -128
        scales = {"in_scale": 0.02, "in_zero": -3, "out_scale": 0.003 * k**0.5 * 2**bits, "out_zero": 5}
        bias, packed = torch.randn(n) * 10, pack(codes)
        kernel = LinearKernel(codes.format, n, k, torch.int8, "int8", "block", isa=EmulatedAMX())
        y = run_linear(kernel, x, packed, ops.requantization_table(packed, bias, **scales), (-100, 127))
        assert bool(reference.qlinear(x, codes, bias, **scales, clamp=(-100, 127)).agrees(y).all())


# The machine code, for any CPU


def assembly(spec: TileSpec) -> list[str]:
    return jit.compile_assembly(amx.build(spec, AMXTiles()), AMXTiles()).splitlines()


def count(lines: list[str], instruction: str) -> int:
    return sum(line.startswith(f"\t{instruction}\t") for line in lines)


SHORT = tile_spec("int8", 4, "none", (32, True), 32, 2, block_sum="biased")
LONG = tile_spec("int8", 4, "none", (64, False), 32, 2, block_sum="biased")


@pytest.mark.parametrize("spec", [SHORT, LONG])
def test_totals_are_read_and_written_once_a_block(spec: TileSpec) -> None:
    lines = assembly(spec)
    start = next(i for i, line in enumerate(lines) if "\tvfmadd" in line)
    stop = max(i for i, line in enumerate(lines) if "\tvfmadd" in line)
    scaling = lines[start : stop + 3]
    assert sum("\tvfmadd" in line for line in scaling) == 2 * 64
    assert sum(bool(re.match(r"\tvmovap[sd]\t%zmm\d+, .*\(", line)) for line in scaling) == 64


def test_four_products_for_four_loads() -> None:
    short, long = assembly(SHORT), assembly(LONG)
    assert count(short, "tdpbssd") == 4
    assert count(short, "tileloadd") == 4 + 4  # the latter of what sums begin at
    assert count(long, "tdpbssd") == 2 * 4  # of a block's first unit, and of the others
    assert count(long, "tileloadd") == 2 * 4 + 4
    for lines in (short, long):
        assert count(lines, "tilestored") == 2 * 4  # of the block before, and of the last one
        assert count(lines, "ldtilecfg") == sum("tilerelease" in line for line in lines) == 1


def test_sums_are_stored_between_the_first_products_of_the_next_block() -> None:
    names = [line.split()[0] for line in assembly(SHORT) if line.startswith(("\ttdp", "\ttilestored"))]
    assert names[:8] == ["tilestored", "tdpbssd"] * 4


@pytest.mark.parametrize("zero", ["none", "point"])
def test_nibbles_are_unpacked_by_one_instruction_each(zero: str) -> None:
    lines = assembly(changed(LONG, zero=zero, block_sum="plain"))
    assert count(lines, "vgf2p8affineqb") == 3 * 2 * 2 * 8  # at three places: low and high, two vectors, eight rows of eight k
    assert not any(re.match(r"\tv(psrl|psll|psub)", line) for line in lines)


@pytest.mark.parametrize("signed", [True, False])
@pytest.mark.parametrize("first", [0, 4])
def test_the_map_of_bits_gives_the_code(first: int, signed: bool) -> None:
    matrix, inverted = nibble_map(first, signed)
    for byte in range(256):
        bits = [((matrix >> 8 * (7 - i) & byte).bit_count() & 1) ^ (inverted >> i & 1) for i in range(8)]
        code = (byte >> first & 15) - (8 if signed else 0)
        assert sum(bit << i for i, bit in enumerate(bits)) == code & 255


def test_bytes_are_multiplied_where_they_lie() -> None:
    lines = assembly(changed(LONG, bits=8, block_sum="plain"))
    assert count(lines, "tdpbsud") == 2 * 4
    assert not count(lines, "vgf2p8affineqb")


def test_why_not(monkeypatch: pytest.MonkeyPatch) -> None:
    assert isinstance(ISAS[0], AMXInt8)
    monkeypatch.setattr(isa_amx.sys, "platform", "plan9")
    isa_amx.refusal.cache_clear()
    monkeypatch.setattr(isa_amx.AVX512BF16, "missing", lambda self: None)
    for isa in (AMXInt8(), AMXTiles()):
        assert isa.missing() == "this operating system is not known to save the tile registers of AMX"
    isa_amx.refusal.cache_clear()


class _Refusing:
    def syscall(self, *_: int) -> int:
        isa_amx.ctypes.set_errno(95)
        return -1


def test_a_kernel_that_refuses_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(isa_amx.sys, "platform", "linux")
    monkeypatch.setattr(isa_amx.platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(isa_amx.ctypes, "CDLL", lambda *_, **__: _Refusing())
    isa_amx.refusal.cache_clear()
    assert isa_amx.refusal() == "the kernel does not let this process use the tile registers of AMX (Operation not supported)"
    isa_amx.refusal.cache_clear()

"""Tiles that read expanded codes give, bit for bit, what tiles give that unpack for themselves, which `test_linear.py` checks."""

import copy
import itertools
import math
from dataclasses import replace

import pytest
import torch
from samples import random_codes
from support import RUNNABLE, activations, run_linear

from halfbyte.errors import ArgumentError
from halfbyte.formats import Format
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.linear import expanded
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.layouts.cpu_tiles import pack

ISAS = [isa for isa in RUNNABLE if isa.tuning.expansion]
LONGEST = {isa: isa.tuning.expansion.longest_block for isa in ISAS if isa.tuning.expansion}
pytestmark = pytest.mark.skipif(not ISAS, reason="this CPU's tiles read packed codes")

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
CASES = [
    (4, "none", 32, F16, F32, "block"), (4, "point", 32, BF16, F16, "row_offset"), (4, "none", 128, F32, BF16, "row"),
    (4, "point", 128, F16, F32, "block"), (4, "none", 20, BF16, F32, "block_offset"), (4, "point", 33, F32, F32, "row"),
    (4, "none", "channel", F16, BF16, "row_offset"), (4, "point", 300, F32, F16, "block_offset"), (4, "none", 300, F16, F32, "block"),
    (8, "none", 32, F16, F32, "block"), (8, "offset", 40, F16, F16, "block"), (8, "none", 300, F32, BF16, "row_offset"),
]  # fmt: skip
# (M, N, K): some of the rows whose sums wait, and more; parts of a panel; K in several chunks of blocks, and in one
SHAPES = ((67, 81, 2900), (5 * expanded.PARTIAL_ROWS + 1, 47, 40))


def plain(isa: ISA) -> ISA:
    """The same, but that it expands no codes."""
    other = copy.copy(isa)
    other.tuning = replace(isa.tuning, expansion=None)
    return other


@pytest.mark.parametrize(("bits", "zero", "block", "scale", "dtype", "way"), CASES)
def test_results_are_those_of_packed_codes(
    bits: int, zero: str, block: int | str, scale: torch.dtype, dtype: torch.dtype, way: str
) -> None:
    fmt = Format(bits, block, zero, scale)
    for isa, (m, n, k) in itertools.product([i for i in ISAS if bits == 4 or i.mixed_dot], SHAPES):
        kernel, packing = (LinearKernel(fmt, n, k, dtype, "int8", way, isa=one) for one in (isa, plain(isa)))
        if block != "channel" or k <= LONGEST[isa]:
            assert kernel.fields(m)["panel_function"]
        packed, x, residual = pack(random_codes(fmt, (n, k), m)), activations(m, k, dtype, 1, n % 3), activations(m, n, dtype, 2)
        for bias, clamp, added in ((torch.randn(n), (-3.0, 4.0), residual), (None, (-torch.inf, torch.inf), None)):
            y, wanted = (run_linear(one, x, packed, bias, clamp, added) for one in (kernel, packing))
            assert torch.equal(y, wanted)


def test_few_rows_long_blocks_and_float_offsets_are_not_expanded() -> None:
    isa = ISAS[0]
    for fmt, m, takes in (
        (Format(4, 32), 48, True),
        (Format(4, 32), 24, False),
        (Format(4, "channel"), 100, False),
        (Format(4, 32, "offset"), 100, isa.mixed_dot),
        (Format(8, 32), 100, isa.mixed_dot),
        (Format(8, 32, "point"), 100, False),
        (Format(8, "channel"), 100, False),
    ):
        kernel = LinearKernel(fmt, 32, LONGEST[isa] + 32, torch.float32, "int8", "block", isa=isa)
        assert ("panel_function" in kernel.fields(m)) == takes


def test_gelu_and_nan() -> None:
    fmt, (m, n, k) = Format(4, 32), (70, 40, 96)
    packed, x = pack(random_codes(fmt, (n, k))), torch.randn(m, k)
    x[7, 50] = torch.nan
    kernel, packing = (LinearKernel(fmt, n, k, torch.float32, "int8", "block", gelu="none", isa=isa) for isa in (ISAS[0], plain(ISAS[0])))
    y = run_linear(kernel, x, packed)
    assert y[7].isnan().all()
    assert not y[torch.arange(m) != 7].isnan().any()
    assert torch.equal(run_linear(packing, x, packed).nan_to_num(nan=-7), y.nan_to_num(nan=-7))


def test_gelu_with_a_clamp_is_refused() -> None:
    kernel = LinearKernel(Format(4, 32), 40, 96, torch.float32, "float", "block", gelu="none", isa=ISAS[0])
    with pytest.raises(ArgumentError, match=r"followed by GELU is not clamped, got clamp=\(0.0, inf\)"):
        kernel(torch.randn(3, 96), pack(random_codes(Format(4, 32), (40, 96))).data.data_ptr(), None, 0.0, math.inf)

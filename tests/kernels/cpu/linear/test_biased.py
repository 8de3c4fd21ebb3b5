"""Sums of blocks that become floats by what they begin at, codes from which points are taken, and tiles of dot products that read expanded
codes, on any x86."""

import itertools
from dataclasses import replace

import pytest
import torch
from emulated.amx import EmulatedDotProducts
from samples import random_codes
from support import activations, pairwise, run_linear

from halfbyte.formats import Codes, Format
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen.tuning import AVX_VNNI, Expansion, Tiling, Tuning
from halfbyte.kernels.cpu.linear.block_end import biasable
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.kernels.cpu.linear.tile_spec import Inner
from halfbyte.kernels.problem import Activation
from halfbyte.layouts.cpu_tiles import Geometry, pack


class ExpandingEarly(Tuning):
    def tile(self, m: int, inner: Inner, geo: Geometry, *, codes: bool = False) -> Tiling:
        if m < 6 or codes or not self.expands(geo):
            return AVX_VNNI.tile(m, inner, geo, codes=codes)
        return Tiling(2 if geo.padded <= 32 else 4, 2, expanded=True)  # totals in registers, and in memory


class Expanding(EmulatedDotProducts):
    name = "avx_vnni_expanding"
    tuning = ExpandingEarly(AVX_VNNI.conv_tile, AVX_VNNI.register_totals, expansion=Expansion(), biased=True)


class TakingPointsOff(EmulatedDotProducts):
    name = "avx_vnni_subtracts_points"
    tuning = replace(AVX_VNNI, biased=False, subtracts_points_up_to=256)


pytestmark = pytest.mark.skipif(Expanding().missing() is not None, reason=str(Expanding().missing()))

KINDS = list(itertools.product((4, 8), ("none", "point", "offset")))
CASES = pairwise(KINDS, (32, 128, 20, 300, "channel"), (torch.float32, torch.bfloat16, torch.float16))
MOST = {(4, "none"): 4128, (4, "point"): 258, (4, "offset"): 2201, (8, "none"): 258, (8, "point"): 129, (8, "offset"): 129}


@pytest.mark.parametrize("number", range(len(CASES)), ids=lambda i: "-".join(map(str, CASES[i])))
def test_products_are_those_of_the_reference_for_any_number_of_rows(number: int) -> None:
    (bits, zero), block, dtype = CASES[number]
    m, n, k, fmt = 13, 45 + 20 * (number % 2), (700, 333)[number % 2], Format(bits, block, zero)
    codes, x = random_codes(fmt, (n, k), number), activations(m, k, dtype, number, 3)
    packed, kernel = pack(codes), LinearKernel(fmt, n, k, dtype, "int8", "block", isa=Expanding())
    assert (kernel.tile_spec.activation.block_sum == "biased") == (fmt.block_size(k) <= MOST[bits, zero])
    assert ("panel_function" in kernel.fields(m)) == (bits == 4 or (zero != "point" and block != "channel"))
    y = run_linear(kernel, x, packed)
    error = reference.error_bound(x, codes, None, "int8", "block")
    assert bool(reference.agrees(y, reference.linear(x, codes, None, "int8", "block"), error).all())
    for rows in (1, 5):
        assert torch.equal(run_linear(kernel, x[:rows], packed), y[:rows])


@pytest.mark.parametrize("activation", ["block", "row", "row_offset"])
@pytest.mark.parametrize("block", [32, 128, 20, 300])
def test_points_that_tiles_take_off_codes(block: int, activation: Activation) -> None:
    m, n, k, fmt = 13, 45, 333, Format(4, block, "point")
    codes, x = random_codes(fmt, (n, k), block), activations(m, k, torch.float32, block, 3)
    packed, kernel = pack(codes), LinearKernel(fmt, n, k, x.dtype, "int8", activation, isa=TakingPointsOff())
    assert kernel.tile_spec.weight.subtracts_points == (block <= 256 and activation != "row_offset")
    y = run_linear(kernel, x, packed)
    error = reference.error_bound(x, codes, None, "int8", activation)
    assert bool(reference.agrees(y, reference.linear(x, codes, None, "int8", activation), error).all())
    for rows in (1, 5):
        assert torch.equal(run_linear(kernel, x[:rows], packed), y[:rows])
    if activation != "row_offset":
        one = torch.eye(k)[:: k // 7]  # its sums are exact: the weight comes back
        assert torch.equal(run_linear(kernel, one, packed), codes.dequantize().T[:: k // 7])


@pytest.mark.parametrize("activation", ["row", "block_offset", "row_offset"])
def test_other_scales_of_activations_are_not_biased(activation: Activation) -> None:
    kernel = LinearKernel(Format(4, 32), 32, 64, torch.float32, "int8", activation, isa=Expanding())
    assert kernel.tile_spec.activation.block_sum == "plain"


@pytest.mark.parametrize(("bits", "zero"), KINDS)
def test_the_largest_sums(bits: int, zero: str) -> None:
    """Of the longest blocks whose sums are biased, and of which one more element would be too many."""
    n, most = 3, MOST[bits, zero]
    assert biasable(Format(bits, most, zero), most)
    assert not biasable(Format(bits, most + 1, zero), most + 1)
    assert not biasable(Format(bits, 32, zero, torch.float32), 32)  # ROUND times such a scale would be rounded
    block = most // 32 * 32
    fmt, k = Format(bits, block, zero), 2 * block
    values = torch.full((n, k), fmt.q_max)
    values[1] = fmt.q_min
    values[2, ::2] = fmt.q_min
    points, offsets = torch.tensor([[0], [fmt.q_max], [7]], dtype=torch.uint8), torch.tensor([[0.5], [-1.0], [3.0]]).half()
    zeros = {"none": None, "point": points.expand(n, 2), "offset": offsets.expand(n, 2)}[zero]
    codes = Codes.from_values(fmt, values, torch.full((n, 2), 0.01).half(), zeros)
    x = torch.ones(8, k)
    x[1] = -1
    x[2, ::2] = x[3, 1::2] = -1
    kernel = LinearKernel(fmt, n, k, torch.float32, "int8", "block", isa=Expanding())
    assert kernel.tile_spec.activation.block_sum == "biased"
    error = reference.error_bound(x, codes, None, "int8", "block")
    wanted = reference.linear(x, codes, None, "int8", "block")
    for rows in (4, 8):
        assert bool(reference.agrees(run_linear(kernel, x[:rows], pack(codes)), wanted[:rows], error[:rows]).all())

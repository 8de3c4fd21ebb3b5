"""Weights whose products of bytes are summed as int16: the bound holds for any activations."""

import pytest
import torch
from support import RUNNABLE, tile_spec
from torch import Tensor

from halfbyte.formats import as_format
from halfbyte.formats.codes import Codes
from halfbyte.kernels.cpu.codegen import jit, runtime
from halfbyte.kernels.cpu.codegen.isas import ISAS
from halfbyte.kernels.cpu.conv import arrange, arranged, planned
from halfbyte.kernels.cpu.conv.arrange import COUPLED_HALVES, LANE, Arranged
from halfbyte.kernels.cpu.conv.arranged import ArrangedConvKernel
from halfbyte.kernels.cpu.conv.gathered import ConvKernel
from halfbyte.kernels.problem import Window
from halfbyte.layouts.convolution import Filter
from halfbyte.ops.conv import functions as ops

isas = pytest.mark.parametrize("isa", [isa for isa in RUNNABLE if isa.tuning.arranged_conv], ids=lambda isa: isa.name)
INT8 = as_format("int8_channel")


@pytest.fixture(autouse=True)
def _two_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(planned, "WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)


def gaussian(shape: tuple[int, ...], rng: torch.Generator) -> Tensor:
    """Codes as those of a weight with a scale for each output."""
    w = torch.randn(shape, generator=rng)
    return (w / w.abs().amax((-1, -2), keepdim=True) * 127).round().to(torch.int8)


def weights() -> list[Tensor]:
    rng = torch.Generator().manual_seed(0)
    return [
        gaussian((3, 16, 8, LANE), rng),
        gaussian((2, 16, 60, LANE), rng) // 2,
        torch.randint(-128, 128, (2, 16, 3, LANE), generator=rng, dtype=torch.int8),
        torch.full((1, 16, 2, LANE), 127, dtype=torch.int8),
        torch.full((1, 8, 2, LANE), -128, dtype=torch.int8),
        torch.zeros(2, 4, 1, LANE, dtype=torch.int8),
        torch.cat((gaussian((1, 16, 4, LANE), rng), torch.full((1, 16, 4, LANE), 127, dtype=torch.int8))),
    ]


def by_slot(built: Arranged) -> Tensor:
    """int64 [groups, chunks, 16, rows]"""
    return built.weights.long().transpose(-1, -2).flatten(2, 3)


@pytest.mark.parametrize("case", range(7))
def test_sums_obey_the_bound_for_any_activations(case: int) -> None:
    built = arrange.arrange(weights()[case])
    w = by_slot(built)
    coupled = [[halves for halves, n in zip(COUPLED_HALVES, counts, strict=True) for _ in range(n)] for counts in built.counts.tolist()]
    for g, of_group in enumerate(coupled):
        assert not w[g, len(of_group) :].any()
        for chunk, coupled_halves in zip(w[g], of_group, strict=False):
            for signed in (chunk.clamp(min=0), -chunk.clamp(max=0)):
                pairs = signed.view(8, 2, -1).sum(1)
                assert 255 * pairs.max() < 2**15
                for half in range(coupled_halves):
                    four = pairs[4 * half : 4 * half + 4]
                    assert 255 * (four[:2] + four[2:]).max() < 2**15


@pytest.mark.parametrize("case", range(7))
def test_the_products_are_those_of_the_codes(case: int) -> None:
    codes = weights()[case]
    built, rng = arrange.arrange(codes), torch.Generator().manual_seed(case)
    for x in (
        torch.randint(-128, 128, codes.shape[2:], generator=rng, dtype=torch.int8),
        *(torch.full(codes.shape[2:], v) for v in (-128, 127)),
    ):
        seen = x.to(torch.int8).view(torch.uint8)[built.lanes] ^ built.xor_mask
        shuffle = built.shuffle.long()
        slots = seen.gather(2, shuffle % LANE).where(shuffle < LANE, torch.tensor(0, dtype=torch.uint8))
        sums = (by_slot(built) * slots.long().unsqueeze(-1)).sum((1, 2))
        assert torch.equal(sums + built.corrections, (codes.long() * x.long()).sum((2, 3)))


def test_weights_of_a_layer_take_few_more_chunks() -> None:
    """1: one in a hundred lanes is split at most; and four of ten lanes have sums of four."""
    codes = gaussian((8, 16, 64, LANE), torch.Generator().manual_seed(0))
    built = arrange.arrange(codes)
    assert built.counts.sum() <= 8 * 64 * 1.01
    assert built.counts[:, :2].sum() > 0.4 * 8 * 64


@isas
@pytest.mark.parametrize("code", [-128, 127])
def test_extreme_weights_go_another_way_or_are_exact(isa, code: int, monkeypatch) -> None:
    monkeypatch.setenv("HALFBYTE_ISA", isa.name)
    sizes, window = Filter(INT8, 16, 64, (1, 1)), Window((1, 1), (0,) * 4, (1, 1))
    codes = Codes(INT8, (16, 64), torch.full((16, 64), code, dtype=torch.int8), torch.ones(16, 1, dtype=INT8.scale), None)
    kernel = ArrangedConvKernel(sizes, window, ConvKernel(sizes, torch.int8, "int8", "block").linear)
    assert (kernel.weights_of(codes) is None) == (code == -128)  # 127 and -127 are a pair
    for value in (-128, 127):
        x = torch.full((1, 3, 3, 64), value, dtype=torch.int8).permute(0, 3, 1, 2)
        more = {"in_scale": 1.0, "in_zero": 0, "out_scale": 64 * 128 * 128 / 100, "out_zero": 0}
        y = ops.qconv2d(x, ops.pack_conv(codes, 1), None, **more)  # type: ignore[arg-type]
        assert y.unique().tolist() == [round(code * value / 128**2 * 100)]


@pytest.mark.parametrize("isa", [isa for isa in ISAS if isa.tuning.arranged_conv], ids=lambda isa: isa.name)
def test_products_are_made_in_registers(isa) -> None:
    """A loop for each kind of chunk: 16 codes of each row times two vectors, and no accumulator leaves its register."""
    rows, vectors = isa.tuning.conv_tile
    spec = tile_spec("int8", 8, "none", (32, False), rows, vectors, scale="f32", out="i8", pair_sums=True)
    loops = [part.splitlines() for part in jit.compile_assembly(arranged.build_tile(spec, isa), isa).split("\n.L") if "vpmaddubsw" in part]
    count = 4 * rows * vectors
    assert [sum("vpmaddubsw" in line for line in loop) for loop in loops] == [count] * 3
    assert sorted(sum("vpmaddwd" in line for line in loop) for loop in loops) == [count // 2, count * 3 // 4, count]
    assert not any("%rsp" in line for loop in loops for line in loop if "mm" in line)

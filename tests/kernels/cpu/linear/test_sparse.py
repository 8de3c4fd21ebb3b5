"""2:4 sparse weights: results are, bit for bit, those of the dense layout, which other tests compare with the reference."""

import itertools
import re
from copy import deepcopy

import pytest
import torch
from samples import random_codes, same_codes, sparse_codes
from support import RUNNABLE, activations, run_linear, tile_spec

import halfbyte as hb
from halfbyte.errors import ArgumentError, FormatError, KernelError
from halfbyte.formats import Codes, Format
from halfbyte.formats.spec import Zero
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen import jit
from halfbyte.kernels.cpu.codegen.isa_x86 import AVX512VNNI
from halfbyte.kernels.cpu.linear import sparse, tile
from halfbyte.kernels.cpu.linear.linear import LinearKernel
from halfbyte.layouts.base import Packed
from halfbyte.layouts.cpu_tiles import NAME, SPARSE, unpack
from halfbyte.ops.functions import pack_dense

F16, BF16, F32 = torch.float16, torch.bfloat16, torch.float32
needs_vbmi2 = pytest.mark.skipif(not RUNNABLE[0].spreads, reason="this CPU's kernels leave no zeros out")
CASES = [  # one row of several panels in turn; tiles of two vectors and of one; codes that are expanded; parts of panels and of groups
    (4, "none", 128, F16, F32, "block", (1, 545, 1500)), (4, "none", 32, F16, BF16, "block", (53, 47, 643)),
    (4, "point", 128, F16, F32, "block", (53, 81, 643)), (4, "point", 96, F32, F16, "block_offset", (12, 40, 290)),
    (4, "none", "channel", BF16, F32, "float", (5, 33, 801)), (8, "none", "channel", F16, F32, "block", (53, 81, 643)),
    (8, "none", "tensor", F32, F32, "row", (19, 47, 1310)), (8, "point", 300, F16, F32, "block", (5, 33, 801)),
    (8, "point", 32, F16, F32, "float", (3, 40, 290)),
]  # fmt: skip


@needs_vbmi2
@pytest.mark.parametrize(("bits", "zero", "block", "scale", "dtype", "way", "shape"), CASES)
def test_products_and_codes_are_those_of_the_dense_layout(
    bits: int, zero: Zero, block: int | str, scale: torch.dtype, dtype: torch.dtype, way: str, shape: tuple[int, int, int]
) -> None:
    fmt, (m, n, k) = Format(bits, block, zero, scale), shape
    codes = sparse_codes(fmt, (n, k), m)
    packed, dense, x = hb.pack(codes), pack_dense(codes), activations(m, k, dtype, 1, n % 3)
    assert packed.layout == SPARSE
    assert packed.nbytes < (0.8 if bits == 4 else 0.67) * dense.nbytes
    assert same_codes(hb.unpack(packed), codes)
    assert same_codes(unpack(packed), codes)
    inner, activation = ("float", "block") if way == "float" else ("int8", way)
    kernels = (LinearKernel(fmt, n, k, dtype, inner, activation, sparse=packed is one) for one in (packed, dense))
    y, wanted = (run_linear(one, x, weight, torch.ones(n)) for one, weight in zip(kernels, (packed, dense), strict=True))
    assert torch.equal(y, wanted)
    ids = torch.tensor([n - 1, 0, 7])
    assert torch.equal(hb.embedding(ids, packed), reference.dequantize(codes).float()[ids])


@needs_vbmi2
@pytest.mark.parametrize("bits", [4, 8])
def test_codes_in_and_out(bits: int) -> None:
    codes = sparse_codes(Format(bits, "channel"), (70, 352))
    x, scales = torch.randint(-128, 128, (15, 352), dtype=torch.int8), {"in_scale": 0.1, "in_zero": -3, "out_scale": 9.0, "out_zero": 5}
    assert torch.equal(*(hb.qlinear(x, packed, torch.ones(70), **scales) for packed in (hb.pack(codes), pack_dense(codes))))


@needs_vbmi2
def test_places_of_groups_with_fewer_than_two_codes() -> None:
    """All of them, and none."""
    values = torch.zeros(35, 64, dtype=torch.int16)
    for row, places in enumerate(itertools.combinations(range(4), 2)):
        values[row, list(places)] = torch.tensor([3, -5], dtype=torch.int16)
        values[row + 6, 60 + places[0]] = -8
    codes = Codes.from_values(Format(4, 32), values, torch.ones(35, 2, dtype=F16))
    packed = hb.pack(codes)
    assert packed.layout == SPARSE
    assert same_codes(hb.unpack(packed), codes)
    places = packed.data.view(2, 2, -1)[:, :, 256:384]
    assert set(torch.cat((places & 15, places >> 4)).flatten().tolist()) == {3, 5, 6, 9, 10, 12}


@needs_vbmi2
def test_weights_that_are_packed_as_any_other() -> None:
    assert "multiples of 32" in str(sparse.why_not(sparse_codes(Format(4, 40), (33, 80))))
    assert "no code that means 0" in str(sparse.why_not(random_codes(Format(4, 32, "offset"), (33, 80))))
    assert "more than 2" in str(sparse.why_not(random_codes(Format(4, 32), (33, 80))))
    stacked = sparse_codes(Format(4, 32), (2, 33, 64))
    assert hb.pack(stacked).layout == "stacked_cpu_tiles"
    assert same_codes(hb.unpack(hb.pack(stacked)), stacked)


def test_errors() -> None:
    fmt = Format(4, 32)
    weak = next(isa for isa in RUNNABLE if not isa.spreads)
    with pytest.raises(KernelError, match=f"{weak.name} has no kernels for 2:4 sparse weights"):
        LinearKernel(fmt, 32, 64, F32, "int8", "block", sparse=True, isa=weak)
    with pytest.raises(FormatError, match="takes 896 bytes in layout cpu_tiles_2_4, got 7"):
        unpack(Packed(fmt, (32, 64), SPARSE, torch.zeros(7, dtype=torch.uint8)))
    for nbytes in (895, 897):  # 896 sparse, 1152 dense
        with pytest.raises(FormatError, match="is 1152 packed bytes"):
            hb.linear(torch.ones(1, 64), Packed(fmt, (32, 64), SPARSE, torch.zeros(nbytes, dtype=torch.uint8)))


@pytest.mark.parametrize(
    ("bits", "zero", "rows", "vectors", "panels"), [(4, "none", 8, 2, 1), (8, "point", 16, 1, 1), (4, "point", 1, 2, 4)]
)
def test_a_vector_is_one_expansion(bits: int, zero: str, rows: int, vectors: int, panels: int) -> None:
    """And all accumulators stay in registers. Compiling needs no such machine."""
    spec = tile_spec(
        "int8", bits, zero, (32, False), rows, vectors, panels=panels, sparse=True, block_sum="biased" if bits == 4 else "plain"
    )
    isa = AVX512VNNI("intel" if panels == 1 else "zen5")
    text = jit.compile_assembly(tile.build(spec, isa), isa).splitlines()
    at = [i for i, line in enumerate(text) if "vpexpandb" in line]
    assert len(at) == 8 * vectors
    assert not [line for line in text[at[0] : at[-1]] if re.search(r"%r[sb]p.*%[xyz]mm|%[xyz]mm.*%r[sb]p", line)]


@needs_vbmi2
def test_report_and_explain_say_it() -> None:
    mlp = torch.nn.ModuleDict({name: torch.nn.Linear(64, 96) for name in ("gate_proj", "up_proj")})
    x = torch.randn(3, 64)
    hb.quantize_(hb.prune_(mlp, "2:4"), "int8_channel")
    alone = [mlp[name](x) for name in mlp]
    assert "2:4: half of the codes, zeros, are left out of 2 of 2 weights in memory" in str(hb.report(mlp))
    hb.fuse_(mlp)
    assert mlp["up_proj"].packed.layout == SPARSE
    assert all(torch.equal(mlp[name](x), y) for name, y in zip(mlp, alone, strict=True))
    with pytest.raises(ArgumentError, match="call drop_zeros_ first, then fuse_"):
        hb.drop_zeros_(mlp)
    asked = {"m": 1, "n": 64, "k": 64, "sparse": True, "measured": False}
    assert "2:4: half of the codes" in str(hb.explain(**asked, format="int8_g64"))
    assert "not 2:4: formats with float offsets" in str(hb.explain(**asked, format="q4_1"))
    assert "not 2:4: experts" in str(hb.explain(**asked, format="q4_0", experts=2))
    hopper = hb.explain(**asked, format="q4_0", device="sm_90")
    assert "2:4: half of the codes" in str(hopper)
    assert hopper.to_json()["sparsity"] == "2:4"
    assert "not 2:4: it is made of Hopper's" in str(hb.explain(**asked, format="q4_0", device="sm_80"))
    assert "not 2:4: experts" in str(hb.explain(**asked, format="q4_0", experts=2, device="sm_90"))


@needs_vbmi2
def test_zeros_of_a_model_are_left_out_as_asked() -> None:
    head, table = torch.nn.Linear(64, 96, bias=False), torch.nn.Embedding(96, 64)
    model = torch.nn.ModuleList([head, table])
    hb.prune_(torch.nn.ModuleList([head]), "2:4")
    table.weight = head.weight
    hb.quantize_(model, hb.Config("int8_channel", embedding=None))
    x, before = torch.randn(3, 64), model[0].packed
    y = model[0](x)
    hb.drop_zeros_(model, sparse=False)
    assert (before.layout, model[0].packed.layout) == (SPARSE, NAME)
    assert model[0].packed.data is model[1].packed.data
    assert torch.equal(model[0](x), y)
    model.load_state_dict(model.state_dict())
    copy = deepcopy(model)
    assert [module.packed.layout for module in (*model, *copy)] == [NAME] * 4
    assert hb.drop_zeros_(copy)[1].packed.layout == SPARSE

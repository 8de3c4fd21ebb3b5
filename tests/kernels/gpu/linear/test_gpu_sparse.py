"""2:4 sparse weights on GPUs: their layout bit by bit, their kernels in an interpreter and on a Hopper GPU, and what these are made of."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import gluon_interpreter
import pytest
import torch
from aot import compile_all, linear_job
from float_support import launched
from samples import same_codes, sparse_codes

import halfbyte as hb
from halfbyte.dispatch.choose import choose, report_failure
from halfbyte.dispatch.gpu import why_no_sparse_layout
from halfbyte.errors import FormatError
from halfbyte.formats import Codes, as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.linear import skinny_hopper, skinny_hopper_config
from halfbyte.kernels.gpu.quantize import spread
from halfbyte.kernels.problem import Epilogue, NormedProblem, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu
from halfbyte.ops.transformer.normed_linear import normed_linear
from halfbyte.ops.transformer.sublayers import Norm

H, B, F = torch.float16, torch.bfloat16, torch.float32
FORMATS = ["int4_g128", "int4_g128_zp", "q4_0", "int4_g64_zp", "int4_channel", "int8_channel", "int8_g128", "q8_0", "int8_g64_zp"]


def test_bits_of_the_layout() -> None:
    """One code that is not 0, at places all over a record: its word and position are where the docstring says."""
    for bits, places in ((4, [(0, 0), (9, 3), (37, 45)]), (8, [(63, 127), (16, 66), (37, 45)])):
        for n, k in places:
            values = torch.zeros(64, 128, dtype=torch.int16)
            values[n, k] = 5
            words = gpu_tiles.pack(Codes.from_values(as_format(f"int{bits}_channel"), values, torch.ones(64, 1)), sparse=True)
            words = words.data.view(torch.int16).int()
            nt, rowhalf, row = n // 16, n // 8 % 2, n % 8
            fours, kept = k // 4, k // 4 * 2 + (k % 4 > 0)  # of one code that is not 0, the first other is kept, too
            half, j, kq = (kept // 32, kept // 16 % 2, kept % 16) if bits == 8 else (0, kept // 16, kept % 16)
            at = ((((half * 4 + nt) * 8 + row) * 4 + kq % 8 // 2) * 2 + kq // 8) * 4 + rowhalf * 2 + kq % 2
            assert words[at] >> bits * j & (1 << bits) - 1 == (13 if bits == 4 else 5)
            place = (((nt * 8 + row) * 4 + k % 64 // 16) * 2 + k // 64) * 2 + rowhalf
            assert words[256 * bits + place] >> 4 * (fours % 4) & 15 == max(k % 4, 1) << 2


@pytest.mark.parametrize("name", FORMATS)
def test_zeros_are_put_back(name: str, device: torch.device) -> None:
    for n, k in ((70, 200), (5, 64)):
        codes = sparse_codes(as_format(name), (n, k), n)
        packed, dense = gpu_tiles.pack(codes, sparse=True), gpu_tiles.pack(codes)
        assert packed.layout == gpu_tiles.SPARSE
        assert packed.nbytes < (0.8 if codes.format.bits == 4 else 0.67) * dense.nbytes
        found = spread.sections(packed.data.to(device), gpu_tiles.geometry_of(codes.format, n, k, packed.nbytes)).codes
        data = torch.cat((found.view(torch.uint8).flatten().cpu(), dense.data[found.nbytes :]))
        assert same_codes(gpu_tiles.unpack(replace(dense, data=data)), codes)


def test_errors() -> None:
    with pytest.raises(FormatError, match="keeps 2 of 4"):
        gpu_tiles.pack(hb.quantize(torch.randn(64, 128), "int4_g128"), sparse=True)


CASES = [("int4_g128_zp", B, 7, 100, 256), ("int4_g64_zp", H, 20, 64, 256), ("int8_channel", B, 3, 64, 256), ("q4_0", B, 9, 64, 264)]
LARGE = [(name, dtype, m, 333, 1024) for name in FORMATS for dtype, m in ((B, 1), (H, 30))]
LARGE += [(name, B, m, 333, 1024) for name in ("int4_g128", "int4_g64_zp", "int8_channel") for m in (16, 64)]


@pytest.mark.parametrize(("name", "dtype", "m", "n", "k"), CASES + LARGE)
def test_products(name: str, dtype: torch.dtype, m: int, n: int, k: int, device: torch.device, gpu: Gpu) -> None:
    """Sums of float32, twice the bound as `float_support.check_linear` has it."""
    hopper = device.type == "cuda" and gpu.capability == (9, 0)
    if not hopper and (device.type == "cuda" or n == 333):
        pytest.skip("needs a Hopper GPU, or takes long in an interpreter")
    codes, x, bias = sparse_codes(as_format(name), (n, k)), torch.randn(m, k).to(dtype), torch.randn(n)
    asked = Problem("linear", m, n, k, as_format(name), dtype, sparse=True)
    packed = gpu_tiles.pack(codes, sparse=True)
    sections = gpu_tiles.views(packed.data.to(device), gpu_tiles.geometry(codes.format, codes.shape, sparse=True))
    expected, error = reference.linear(x, codes, bias), 2 * reference.error_bound(x, codes, bias)
    ends = Epilogue(bias.to(device))
    for config in skinny_hopper.configs(asked, GPUS["sm_90"])[: 2 if hopper else 1]:
        config = replace(config, programs=min(config.programs, 7 if hopper else 3), stages=config.stages if hopper else 2)

        def launch(out: torch.Tensor, config: skinny_hopper_config.Config = config) -> None:
            skinny_hopper.launch(asked, config, x.to(device), sections, out, ends)

        if hopper:
            y = launched(launch, (m, n), dtype, device)
        else:
            with gluon_interpreter.interpreted(skinny_hopper):
                y = launched(launch, (m, n), dtype, device)
        assert reference.agrees(y, expected, error).all(), config


def test_what_it_is_made_of() -> None:
    asked: dict[str, Any] = {"n": 8192, "k": 8192, "format": "int4_g128", "dtype": "bfloat16", "configs": [3], "wanted": "resources"}
    ((binary,),) = compile_all([linear_job("halfbyte.kernels.gpu.linear.skinny_hopper", "sm_90", m=16, sparse=True, **asked)])
    assert binary.spills == 0
    assert binary.ptx.count("mma.sp::ordered_metadata.sync.aligned.m16n8k32") == 4 * 4 * 2  # records of a stage, instructions, columns / 8
    assert binary.ptx.count("fma.rn.bf16x2") == 4 * 16  # of kept codes only


def test_what_is_chosen() -> None:
    """Few rows are multiplied by what is kept, many by all codes; a kernel that fails with these is not asked again with zeros put back."""
    gpu, asked = GPUS["sm_90"], Problem("linear", 1, 8192, 8192, as_format("int4_g128"), B, sparse=True)
    for m, compute, name in ((1, "float", "sparse"), (64, "float", "sparse"), (8, "int8", "sparse_rounded"), (512, "float", "gemm_hopper")):
        taken = choose(replace(asked, m=m, compute=compute), gpu).taken  # type: ignore[arg-type]
        assert taken is not None
        assert taken.candidate.name == name
    dense = choose(replace(asked, m=512, sparse=False), gpu)
    assert taken.seconds > dense.options[0].seconds
    report_failure(replace(asked, m=512), gpu, choose(replace(asked, m=512), gpu).options[0], "a test")
    assert choose(replace(asked, m=512, sparse=False), gpu).options[0].config != dense.options[0].config
    choice = choose(NormedProblem(replace(asked, m=4, n=28672, k=4096), gated=True), gpu)
    assert choice.taken is not None
    assert (choice.taken.candidate.name, choice.problem.product.sparse, choice.taken.config is None) == ("skinny_hopper", True, False)


@pytest.mark.parametrize("name", ["int4_g128", "int8_channel", "q4_0", "int8_g64_zp"])
def test_operations(name: str, device: torch.device, gpu: Gpu) -> None:
    """Of the public functions: as with the same codes packed as any others, up to the rounding of products in another order."""
    if device.type != "cuda" or gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    n, k = 1024, 1536
    codes = sparse_codes(as_format(name), (n, k)).to(device)
    packed, dense = hb.pack(codes, device, sparse=True), hb.pack(codes, device)
    others = gpu_tiles.PAIRED if codes.format.bits == 8 else gpu_tiles.NAME
    assert (packed.layout, dense.layout) == (gpu_tiles.SPARSE, others)
    assert hb.pack(sparse_codes(as_format(name), (n, 20)), device, sparse=True).layout == others
    assert same_codes(hb.unpack(packed), codes)
    ids = torch.tensor([0, n - 1, 5, 5], device=device)
    assert torch.equal(hb.dequantize(packed), hb.dequantize(dense))
    assert torch.equal(hb.embedding(ids, packed), hb.embedding(ids, dense))
    for m, dtype, compute in ((1, B, "float"), (16, H, "int8"), (64, B, "auto"), (5, F, "float"), (200, B, "int8"), (300, B, "float")):
        x = torch.randn(m, k, device=device).to(dtype)
        y = hb.linear(x, packed, compute=compute)
        wanted = hb.linear(x, dense, compute=compute).double()
        assert (y.double() - wanted).norm() < 6e-3 * wanted.norm()
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = hb.linear(x, packed, compute=compute)
        out.zero_()
        graph.replay()
        assert torch.equal(out, y)
        assert torch.equal(hb.linear(x, packed, compute=compute), y)
    many = sparse_codes(as_format(name), (16384, 256)).to(device)  # with so many outputs their gates are computed with them
    x, norm = torch.randn(3, 256, device=device).to(B), torch.rand(256, device=device).to(B)
    for gates in ("", "silu"):
        y, wanted = (normed_linear(x, Norm(norm, 1e-5), hb.pack(many, device, sparse=way), gates=gates).double() for way in (True, False))
        assert (y - wanted).norm() < 8e-3 * wanted.norm()
    if name == "int8_channel":
        x, scales = torch.randint(-128, 128, (33, k), dtype=torch.int8, device=device), {"in_scale": 0.02, "out_scale": 9.0}
        y, wanted = (hb.qlinear(x, one, in_zero=-3, out_zero=5, **scales) for one in (packed, dense))
        assert torch.equal(y, wanted)


def test_a_model(device: torch.device, gpu: Gpu) -> None:
    if device.type != "cuda" or gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    mlp = torch.nn.ModuleDict({name: torch.nn.Linear(256, 512) for name in ("gate_proj", "up_proj")}).to(device, B)
    hb.drop_zeros_(hb.quantize_(hb.prune_(mlp, "2:4"), "int4_g128"))
    x = torch.randn(3, 256, device=device).to(B)
    alone = [mlp[name](x) for name in mlp]
    assert "2:4: half of the codes, zeros, are left out of 2 of 2 weights in memory" in str(hb.report(mlp))
    assert torch.equal(torch.compile(mlp["up_proj"], fullgraph=True)(x), alone[1])
    state = {name: tensor.clone() for name, tensor in mlp.state_dict().items()}
    mlp.cpu().to(device).load_state_dict(state)
    assert all(torch.equal(mlp[name](x), y) for name, y in zip(mlp, alone, strict=True))
    hb.fuse_(mlp)
    assert mlp["up_proj"].packed.layout == gpu_tiles.SPARSE
    assert all((mlp[name](x) - y).norm() < 6e-3 * y.norm() for name, y in zip(mlp, alone, strict=True))


def test_blocks_of_16_are_packed_with_their_zeros() -> None:
    """No kernel multiplies 2:4 sparse weights that have a scale for fewer elements than a sparse matrix instruction multiplies."""
    for name in ("int8_g16", "int4_g16"):
        assert "32 elements of K" in (why_no_sparse_layout(as_format(name), (4096, 4096), GPUS["sm_90"]) or "")
    assert why_no_sparse_layout(as_format("int8_g32"), (4096, 4096), GPUS["sm_90"]) is None

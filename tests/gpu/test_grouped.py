"""Linear layers of experts: every format and activation against the reference, ids of all kinds, and what compilers make of it."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from aot import Binary, compile_all, grouped_job
from samples import random_codes

import halfbyte as hb
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu import grouped, skinny
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import experts, gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.machine import GPUS, Gpu

H, B, F = torch.float16, torch.bfloat16, torch.float32
UNIT = {H: 2.0**-11, B: 2.0**-8, F: 0.0}


def run(
    name: str,
    ids: torch.Tensor,
    sizes: tuple[int, int, int],
    dtype: torch.dtype,
    gpu: Gpu,
    device: torch.device,
    *,
    share: int = 1,
    bias: bool = False,
    index: int = 0,
    interpreted: bool,
) -> None:
    """Twice on NaN-poisoned memory: the same bits, near the reference (see float_support.check_linear for how near), unknown ids NaN."""
    fmt, (count, n, k) = as_format(name), sizes
    codes = random_codes(fmt, sizes)
    packed = experts.pack(codes, gpu_tiles.pack, gpu_tiles.NAME).data.to(device)
    x = torch.randn(len(ids) // share, k).to(dtype)
    biases = torch.randn(count, n) if bias else None
    problem = Problem("grouped_linear", len(ids), n, k, fmt, dtype, experts=count)
    config = grouped.configs(problem, gpu)[index]
    found = []
    for _ in range(2):
        out = torch.full((len(ids), n), torch.nan, dtype=dtype, device=device)
        grouped.launch(problem, config, x.to(device), ids.to(device), packed, out, None if biases is None else biases.to(device))
        found.append(out.cpu())
    assert torch.equal(found[0].view(torch.uint8), found[1].view(torch.uint8))
    known = (ids >= 0) & (ids < count)
    assert found[0][~known].isnan().all()
    rounded = skinny.mode(replace(problem, op="linear")) != "sums" and dtype != F
    for row in known.nonzero().flatten().tolist():
        matrix, inputs = experts.matrix_of(codes, int(ids[row])), x[row // share : row // share + 1]
        one = None if biases is None else biases[ids[row]]
        expected, error = reference.linear(inputs, matrix, one), 2 * reference.error_bound(inputs, matrix, one)
        size = inputs.double().abs() @ matrix.dequantize(torch.float64).abs().T
        error = error + (2 * UNIT[dtype] * size if rounded else 0)
        if interpreted and dtype == B:  # cuts float32 to bfloat16, where a GPU rounds
            error = error + UNIT[dtype] * (expected.abs() + error) + (4 * UNIT[dtype] * size if rounded else 0)
        assert reference.agrees(found[0][row : row + 1], expected, error).all(), f"row {row} of expert {int(ids[row])}"


def random_ids(pairs: int, count: int) -> torch.Tensor:
    return torch.randint(0, count, (pairs,), generator=torch.Generator().manual_seed(pairs * count))


@pytest.mark.parametrize("name", ["int4_g128", "int4_g128_zp", "q4_0", "q4_1", "q8_0", "int8_channel", "int8_g64_offset", "int4_tensor"])
@pytest.mark.parametrize("pairs", [2, 15])
def test_every_format(name: str, pairs: int, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    dtype = (H, F)[(len(name) + pairs) % 2] if interpreted else (H, B, F)[(len(name) + pairs) % 3]
    run(name, random_ids(pairs, 6), (6, 70, 300), dtype, gpu, device, bias=pairs == 2, interpreted=interpreted)


@pytest.mark.parametrize("dtype", [H, B, F], ids=str)
def test_experts_of_a_token_share_its_row(dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    for share, pairs in ((2, 2), (4, 12)):
        run("int4_g128", random_ids(pairs, 7), (7, 64, 256), dtype, gpu, device, share=share, interpreted=interpreted)


@pytest.mark.parametrize("ids", ["one expert for all", "the last expert", "unknown", "none is known", "int32"])
def test_ids(ids: str, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    some = {
        "one expert for all": torch.full((40,), 2),
        "the last expert": torch.full((9,), 4),
        "unknown": torch.tensor([0, 5, 3, -1, 4, 1 << 40, 4]),
        "none is known": torch.tensor([5, -1, 7]),
        "int32": torch.tensor([4, 0, 4, 1, 1], dtype=torch.int32),
    }[ids]
    run("q4_0", some, (5, 66, 130), H, gpu, device, bias=True, interpreted=interpreted)


def test_one_expert_and_many(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    run("q8_0", random_ids(5, 1), (1, 33, 64), H, gpu, device, interpreted=interpreted)
    run("q4_0", random_ids(3, 130), (130, 32, 64), H, gpu, device, interpreted=interpreted)
    run("q4_0", random_ids(50, 130), (130, 32, 64), H, gpu, device, interpreted=interpreted)


def test_every_config(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    problem = Problem("grouped_linear", 24, 80, 256, as_format("int4_g128"), H, experts=3)
    for index in range(len(grouped.configs(problem, gpu))):
        run("int4_g128", random_ids(24, 3), (3, 80, 256), H, gpu, device, index=index, interpreted=interpreted)


def test_more_pairs_than_one_program_sorts_at_once(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    run("q4_0", random_ids(1100, 300), (300, 16, 32), H, gpu, device, interpreted=interpreted)


MIXTRAL, SMALL = (8, 28672, 4096), (128, 1536, 2048)
PROBLEMS = [(8, SMALL, "q4_0"), (2, MIXTRAL, "int4_g128"), (16, MIXTRAL, "int4_g128"), (512, SMALL, "int4_g128"), (1024, MIXTRAL, "q4_0")]
ARCHES = ("sm_80", "sm_90")


@pytest.fixture(scope="module")
def compiled() -> dict[tuple[int, str], list[Binary]]:
    keys = [(i, arch) for i in range(len(PROBLEMS)) for arch in ARCHES]
    jobs = [grouped_job(arch, PROBLEMS[i][0], *PROBLEMS[i][1], PROBLEMS[i][2]) for i, arch in keys]
    return dict(zip(keys, compile_all(jobs), strict=True))


@pytest.mark.parametrize("arch", ARCHES)
@pytest.mark.parametrize("problem", range(len(PROBLEMS)))
def test_nothing_spills(problem: int, arch: str, compiled: dict[tuple[int, str], list[Binary]]) -> None:
    binaries = compiled[problem, arch]
    assert [binary.spills for binary in binaries] == [0] * len(binaries)
    assert len(binaries) == (1 if 3 * PROBLEMS[problem][0] <= PROBLEMS[problem][1][0] else 2)
    assert all(binary.shared <= GPUS[arch].shared for binary in binaries)
    assert "LDG.E.128" in binaries[-1].assembly or "LDGSTS.E.BYPASS.128" in binaries[-1].assembly


# The operation, on a GPU


def _layer(device: torch.device) -> tuple[Packed, torch.Tensor, torch.Tensor]:
    """(packed experts, x, ids): 20 tokens with 3 of 9 experts each."""
    codes = random_codes(as_format("int4_g128"), (9, 96, 256))
    return hb.pack(codes, device), torch.randn(20, 256, device=device, dtype=H), random_ids(60, 9).view(20, 3).to(device)


@pytest.mark.skipif(not torch.cuda.is_available(), reason="operations on GPUs need one")
def test_the_operation_is_captured_and_compiled(device: torch.device) -> None:
    packed, x, ids = _layer(device)
    weight = hb.dequantize(packed, torch.float64)
    expected = torch.einsum("mk,mtnk->mtn", x.double(), weight[ids])
    y = hb.grouped_linear(x, packed, ids)
    assert (y.double() - expected).abs().max() <= 4e-3 * expected.abs().max()
    compiled = torch.compile(lambda x, ids: hb.grouped_linear(x, packed, ids), fullgraph=True)(x, ids)
    assert torch.equal(compiled, y)
    graph, other = torch.cuda.CUDAGraph(), ids.clone()
    with torch.cuda.graph(graph):
        captured = hb.grouped_linear(x, packed, other)
    for change in (ids, ids.flip(0)):
        other.copy_(change)
        graph.replay()
        assert torch.equal(captured, hb.grouped_linear(x, packed, change))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="operations on GPUs need one")
def test_codes_and_gradients_on_a_gpu(device: torch.device) -> None:
    packed, x, ids = _layer(device)
    codes = random_codes(as_format("int4_g128"), (9, 96, 256))
    there = hb.unpack(hb.pack(codes, device))
    assert all(torch.equal(a.cpu(), b) for a, b in zip(there.tensors().values(), codes.tensors().values(), strict=True))
    x.requires_grad_()
    hb.grouped_linear(x, packed, ids).sum().backward()
    expected = hb.dequantize(packed, torch.float32)[ids].sum((1, 2))
    assert x.grad is not None
    assert (x.grad.float() - expected).abs().max() <= 1e-2 * expected.abs().max()
    with pytest.raises(hb.HalfbyteError, match="floating point on GPUs, got compute='int8'"):
        hb.grouped_linear(x, packed, ids, compute="int8")

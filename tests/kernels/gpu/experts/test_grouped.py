"""Linear layers of experts: every format and activation against the reference, ids of all kinds, and what compilers make of it."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any

import gluon_interpreter
import pytest
import torch
from aot import Binary, compile_all, grouped_job
from float_support import launched
from samples import random_codes

import halfbyte as hb
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.experts import grouped, grouped_dequantized, grouped_hopper, grouped_int8_hopper  # fmt: skip
from halfbyte.kernels.gpu.linear import gemm_hopper, gemm_int8_hopper, skinny_config  # fmt: skip
from halfbyte.kernels.gpu.quantize import dequantize  # fmt: skip
from halfbyte.kernels.problem import Activation, Compute, Problem
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
    given: tuple[Any, Any] | None = None,
    activation: Activation | None = None,
) -> None:
    """What is `launched` is near the reference (see float_support.check_linear for how near), unknown ids NaN."""
    fmt, (count, n, k) = as_format(name), sizes
    codes = random_codes(fmt, sizes)
    packed = experts.pack(codes, gpu_tiles.pack, gpu_tiles.NAME).data.to(device)
    x = torch.randn(len(ids) // share, k).to(dtype)
    biases = torch.randn(count, n) if bias else None
    compute: Compute = "float" if activation is None else "int8"
    problem = Problem("grouped_linear", len(ids), n, k, fmt, dtype, compute, activation or "block", experts=count)
    file, config = given or (grouped, grouped.configs(problem, gpu)[index])
    operands = x.to(device), packed, ids.to(device)
    added = None if biases is None else biases.to(device)
    y = launched(lambda out: file.launch(problem, config, *operands, out, added), (len(ids), n), dtype, device)
    known = (ids >= 0) & (ids < count)
    assert y[~known].isnan().all()
    how = () if activation is None else ("int8", activation)
    rounded = activation is None and (skinny_config.mode(replace(problem, op="linear")) != "sums" or file is grouped_hopper) and dtype != F
    for expert in ids[known].unique().tolist():
        rows = (ids == expert).nonzero().flatten()
        matrix, inputs = codes.select(expert), x[rows // share]
        one = None if biases is None else biases[expert]
        expected, error = reference.linear(inputs, matrix, one, *how), 2 * reference.error_bound(inputs, matrix, one, *how)
        size = inputs.double().abs() @ matrix.dequantize(torch.float64).abs().T
        error = error + (2 * UNIT[dtype] * size if rounded else 0)
        if file is grouped_hopper and fmt.zero == "point" and matrix.zero is not None and gemm_hopper.subnormal_codes(problem):
            points = matrix.spread(matrix.zero.double() * matrix.scale.double()).abs()
            error = error + UNIT[dtype] * (inputs.double().abs() @ points.T)
        if interpreted and dtype == B:  # cuts float32 to bfloat16, where a GPU rounds
            error = error + UNIT[dtype] * (expected.abs() + error) + (4 * UNIT[dtype] * size if rounded else 0)
        agree = reference.agrees(y[rows], expected, error).all(1)
        assert agree.all(), f"rows {rows[~agree].tolist()} of expert {expert}"


def random_ids(pairs: int, count: int) -> torch.Tensor:
    return torch.randint(0, count, (pairs,), generator=torch.Generator().manual_seed(pairs * count))


@pytest.mark.parametrize(
    "name", ["int4_g128", "int4_g128_zp", "q4_0", "q4_1", "mxfp4", "int8_channel", "int8_g64_offset", "int4_tensor", "int8_g16", "fp4_g16"]
)
@pytest.mark.parametrize("pairs", [2, 9])
def test_every_format(name: str, pairs: int, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    dtype = (H, F)[(len(name) + pairs) % 2] if interpreted else (H, B, F)[(len(name) + pairs) % 3]
    run(name, random_ids(pairs, 6), (6, 33, 160), dtype, gpu, device, bias=pairs == 2, interpreted=interpreted)


@pytest.mark.parametrize("dtype", [H, B, F], ids=str)
def test_experts_of_a_token_share_its_row(dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    for share, pairs in ((2, 2), (4, 12)):
        run("int4_g128", random_ids(pairs, 7), (7, 32, 128), dtype, gpu, device, share=share, interpreted=interpreted)


@pytest.mark.parametrize("ids", ["one expert for all", "the last expert", "unknown", "none is known", "int32"])
def test_ids(ids: str, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    some = {
        "one expert for all": torch.full((12,), 2),
        "the last expert": torch.full((9,), 4),
        "unknown": torch.tensor([0, 5, 3, -1, 4, 1 << 40, 4]),
        "none is known": torch.tensor([5, -1, 7]),
        "int32": torch.tensor([4, 0, 4, 1, 1], dtype=torch.int32),
    }[ids]
    run("q4_0", some, (5, 34, 66), H, gpu, device, bias=True, interpreted=interpreted)


def test_one_expert_and_many(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    run("q8_0", random_ids(5, 1), (1, 33, 64), H, gpu, device, interpreted=interpreted)
    run("q4_0", random_ids(3, 130), (130, 16, 32), H, gpu, device, interpreted=interpreted)


def test_every_config(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    problem = Problem("grouped_linear", 6, 20, 128, as_format("int4_g128"), H, experts=3)
    for index in range(len(grouped.configs(problem, gpu))):
        run("int4_g128", random_ids(6, 3), (3, 20, 128), H, gpu, device, index=index, interpreted=interpreted)


@pytest.mark.parametrize(("pairs", "count", "columns"), [(1, 3, 1), (40, 3, 8), (1100, 5, 4), (300, 20, 16)])
def test_the_table_of_tiles(pairs: int, count: int, columns: int, device: torch.device) -> None:
    """Every pair once, in order within its expert; tiles of one expert each, full but for an expert's last; the rest empty."""
    ids = random_ids(pairs, count + 1) - (pairs % 2)  # some are unknown
    table = grouped.tile_schedule(ids.to(device), count, columns)
    order, experts_of, first, size, ends, (count_of_tiles, *_) = (part.tolist() for part in table)
    numbers = [e if 0 <= e < count else count for e in ids.tolist()]
    assert order == sorted(range(pairs), key=numbers.__getitem__)
    used = [i for i, e in enumerate(experts_of) if e >= 0]
    assert used == list(range(count_of_tiles))
    assert experts_of[len(used) :] == [-1] * (len(experts_of) - len(used))
    met = [numbers[order[at]] for i in used for at in range(first[i], first[i] + size[i])]
    assert met == sorted(numbers)
    assert [e for i in used for e in [experts_of[i]] * size[i]] == met
    assert len(used) == sum(-(-numbers.count(e) // columns) for e in set(numbers))
    assert all(1 <= size[i] <= columns for i in used)
    assert ends == [sum(number <= e for number in numbers) for e in range(count + 1)]


@pytest.mark.parametrize(("pairs", "count"), [(700, 3), (2600, 9)])
def test_wide_tiles_come_before_narrow_ones(pairs: int, count: int, device: torch.device) -> None:
    """Each expert's rows once, its last tile of 16, 32 or 64 columns as narrow as may be."""
    ids = random_ids(pairs, count + 1)
    ids[ids == 1] = 0
    order, experts_of, first, size, ends, (used, *_) = (part.tolist() for part in grouped.tile_schedule(ids.to(device), count, 64, 16))
    assert order == ids.argsort(stable=True).tolist()
    tiles = list(zip(experts_of, first, size, strict=True))[:used]
    assert set(experts_of[used:]) <= {-1}
    classes = [max(16, 1 << (columns - 1).bit_length()) for _, _, columns in tiles]
    assert classes == sorted(classes, reverse=True)
    for e in range(count + 1):
        number = int((ids == e).sum())
        sizes = [64] * (number // 64) + [number % 64] * (number % 64 > 0)
        assert [columns for expert, _, columns in tiles if expert == e] == sizes
        assert [at for expert, at, _ in tiles if expert == e] == [ends[e] - number + 64 * i for i in range(len(sizes))]


@pytest.mark.parametrize(("pairs", "count"), [(700, 3), (2600, 9)])
def test_tiles_of_an_expert_are_about_as_wide(pairs: int, count: int, device: torch.device) -> None:
    """Each expert's rows once, in as few tiles of 64 columns as may be, which differ by 16 columns at most; wide ones first."""
    ids = random_ids(pairs, count + 1)
    ids[ids == 1] = 0
    table = grouped.tile_schedule(ids.to(device), count, 64, 16, balanced=True)
    order, experts_of, first, size, ends, (used, *_) = (part.tolist() for part in table)
    assert order == ids.argsort(stable=True).tolist()
    tiles = list(zip(experts_of, first, size, strict=True))[:used]
    assert set(experts_of[used:]) <= {-1}
    widths = [-(-columns // 16) for _, _, columns in tiles]
    assert widths == sorted(widths, reverse=True)
    for e in range(count + 1):
        number, actual = int((ids == e).sum()), [i for i in range(used) if experts_of[i] == e]
        assert len(actual) == -(-number // 64)
        assert sum(widths[i] for i in actual) == -(-number // 16)
        assert not actual or widths[actual[0]] - widths[actual[-1]] <= 1
        starts = [ends[e] - number + sum(size[i] for i in actual[:j]) for j in range(len(actual) + 1)]
        assert [first[i] for i in actual] == starts[:-1]
        assert starts[-1] == ends[e]


@pytest.mark.parametrize("name", ["int4_g128_zp", "q4_1", "q8_0"])
def test_stacked_weights_are_written_out(name: str, device: torch.device) -> None:
    codes = random_codes(as_format(name), (3, 70, 160))
    packed = experts.pack(codes, gpu_tiles.pack, gpu_tiles.NAME).data.to(device)
    geo = gpu_tiles.geometry(codes.format, (70, 160))
    out = torch.full((3, 70, 160), torch.nan, device=device)
    dequantize.write(gpu_tiles.views(packed, geo), geo, out, 3)
    assert torch.equal(out.cpu(), codes.dequantize())


def test_many_rows_an_expert(gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """The weights written out: near the reference, unknown ids NaN, the same bits again, and what the operation takes."""
    sizes, pairs = (5, 136, 264), 60 if interpreted else 2600
    codes = random_codes(as_format("q4_0"), sizes)
    packed = experts.pack(codes, gpu_tiles.pack, gpu_tiles.NAME).data.to(device)
    ids, x, bias = random_ids(pairs, 6).to(device), torch.randn(pairs // 2, 264, device=device).to(B), torch.randn(5, 136, device=device)
    problem = Problem("grouped_linear", pairs, 136, 264, codes.format, B, experts=5)
    assert (grouped_dequantized.supports(problem, gpu) is None) == (not interpreted)
    found = []
    for _ in range(2):
        out = torch.full((pairs, 136), 7.0, dtype=B, device=device)
        grouped_dequantized.launch(problem, grouped_dequantized.Config(), x, packed, ids, out, bias)
        found.append(out)
    known = ids < 5
    assert found[0][~known].isnan().all()
    assert torch.equal(found[0][known], found[1][known])
    outputs = found[:1]
    if not interpreted:
        outputs.append(hb.grouped_linear(x, hb.pack(codes, device), ids.clamp(max=4).view(-1, 2), bias).flatten(0, 1))
    weight = codes.dequantize(torch.float64).to(device)
    for e in range(5):
        rows = x.double().repeat_interleave(2, 0)[ids == e]
        error = 2 * UNIT[B] * (rows.abs() @ weight[e].abs().T + bias[e].double().abs()) + 2 * UNIT[B] * (rows @ weight[e].T).abs()
        for y in outputs:
            assert ((y[ids == e].double() - rows @ weight[e].T - bias[e].double()).abs() <= error + 2.0**-7 * error).all()


@pytest.mark.parametrize(
    "name", ["int4_g128", "q4_0", "q4_1", "fp4_g32", "fp4_g16", "int4_g64_zp", "int4_channel", "q8_0", "int8_g16", "int8_channel"]
)
@pytest.mark.parametrize("tile", [(256, 6), (128, 5), (64, 6)])
def test_many_rows_an_expert_on_hopper(name: str, tile: tuple[int, int], gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """Tiles cut short by the next expert, experts without rows, unknown ids, more tiles than programs; N and K that tiles do not divide."""
    if interpreted and tile[0] > 64 and (tile[0], name) != (256, "int4_g128"):
        pytest.skip("the interpreter takes the smallest tile, and the one whose stages are half records")
    if not interpreted and gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    pairs, sizes = (120, (3, 140, 320)) if interpreted else (1500, (5, 200, 1000))
    block_m, geo = tile[0], gpu_tiles.geometry(as_format(name), sizes[1:])
    config = grouped_hopper.Config(64, block_m, min(tile[1], gemm_hopper.most_stages(geo, 64, block_m, GPUS["sm_90"])), 7)
    for dtype, share in ((H, 1), (B, 2)):
        ids = random_ids(pairs, sizes[0] + 1)
        ids[ids == 1] = 0
        with gluon_interpreter.interpreted(grouped_hopper) if interpreted else nullcontext():
            run(name, ids, sizes, dtype, gpu, device, share=share, bias=share == 1, interpreted=interpreted, given=(grouped_hopper, config))


@pytest.mark.parametrize(
    ("name", "activation"), [("int4_g128", "block"), ("int4_g128_zp", "row"), ("int4_channel", "row"), ("int4_g128_f32", "row")]
)
@pytest.mark.parametrize("block_m", [128, 64])
def test_integers_of_experts(name: str, activation: Activation, block_m: int, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """As above, by `grouped_int8_hopper`."""
    if interpreted and (block_m == 128) != (name == "int4_g128"):
        pytest.skip("the interpreter takes one tile of each")
    if not interpreted and gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    pairs, sizes = (180, (3, 140, 320)) if interpreted else (1500, (5, 200, 1000))
    for dtype, share in ((H, 1), (B, 2)):
        ids = random_ids(pairs, sizes[0] + 1)
        ids[ids == 1] = 0
        problem = Problem("grouped_linear", pairs, *sizes[1:], as_format(name), dtype, "int8", activation, experts=sizes[0])
        found = grouped_int8_hopper.configs(problem, GPUS["sm_90"])
        config = replace(found[0], block_m=block_m, programs=7, stages=min(config.stages for config in found))
        files = (grouped_int8_hopper, gemm_int8_hopper)
        with gluon_interpreter.interpreted(*files) if interpreted else nullcontext():
            run(
                name, ids, sizes, dtype, gpu, device, share=share, bias=share == 1, interpreted=interpreted,
                given=(grouped_int8_hopper, config), activation=activation,
            )  # fmt: skip


def test_what_hopper_refuses() -> None:
    def asked(rows: int, name: str = "int4_g128", k: int = 512) -> Problem:
        return Problem("grouped_linear", rows, 256, k, as_format(name), B, experts=4)

    assert grouped_hopper.supports(asked(256), GPUS["sm_90"]) is None
    assert "Hopper's instructions" in (grouped_hopper.supports(asked(256), GPUS["sm_80"]) or "")
    assert "do not fill" in (grouped_hopper.supports(asked(20), GPUS["sm_90"]) or "")
    assert "TMA reads x" in (grouped_hopper.supports(asked(256, k=500), GPUS["sm_90"]) or "")


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
    weight = hb.dequantize(packed).double()
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
    assert torch.equal(hb.grouped_linear(x, packed, ids, compute="int8"), hb.grouped_linear(x, packed, ids))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="operations on GPUs need one")
def test_calls_are_replayed_with_other_operands(device: torch.device) -> None:
    packed, x, ids = _layer(device)
    first = hb.grouped_linear(x, packed, ids)
    other = hb.pack(random_codes(as_format("int4_g128"), (9, 96, 256), seed=5), device)
    for weight, rows, which in ((packed, x, ids), (other, -x, ids.flip(0)), (packed, x.flip(0), ids), (packed, x, ids)):
        y = hb.grouped_linear(rows, weight, which)
        expected = torch.einsum("mk,mtnk->mtn", rows.double(), hb.dequantize(weight).double()[which])
        assert (y.double() - expected).abs().max() <= 4e-3 * expected.abs().max()
    assert torch.equal(y, first)


@pytest.mark.filterwarnings("ignore:TensorFloat32", "ignore:The CUDA Graph is empty")
@pytest.mark.skipif(not torch.cuda.is_available(), reason="operations on GPUs need one")
def test_a_model_with_experts(device: torch.device) -> None:
    """On the GPU as on the CPU, and compiled as not compiled."""
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 101, "hidden_size": 256, "intermediate_size": 192, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = transformers.MixtralConfig(**sizes, num_key_value_heads=2, num_local_experts=8, num_experts_per_tok=2, pad_token_id=0)
    torch.manual_seed(0)
    model = hb.quantize_(transformers.MixtralForCausalLM(config).eval(), hb.Config("q4_0", compute="float"))
    tokens = torch.randint(1, 101, (3, 11))
    with torch.no_grad():
        expected = model(tokens).logits
        model.to(device)
        tokens = tokens.to(device)
        eager = model(tokens).logits
        assert (eager.cpu() - expected).abs().max() <= 1e-3 * expected.abs().max()
        compiled = torch.compile(model, fullgraph=True)(tokens, use_cache=False).logits
        assert (compiled - eager).abs().max() <= 1e-3 * expected.abs().max()
    how = {"max_new_tokens": 6, "do_sample": False, "attention_mask": torch.ones_like(tokens)}
    assert torch.equal(model.generate(tokens, **how, cache_implementation="static"), model.generate(tokens, **how))

"""What lies around the products of experts: a kernel each, and the product with gates, against float64; and the op made of them."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from aot import Job, compile_all
from float_support import UNIT, terms
from samples import random_codes
from torch import Tensor

from halfbyte import ops
from halfbyte.errors import ArgumentError, FormatError
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.experts import grouped, routing
from halfbyte.kernels.gpu.linear import skinny_config
from halfbyte.kernels.gpu.transformer import attend, gates
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.layouts.base import Packed
from halfbyte.machine import GPUS, Gpu
from halfbyte.ops.transformer.experts import Clamped, Experts, SharedExpert
from halfbyte.ops.transformer.routing import add_experts
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight

H, B, F = torch.float16, torch.bfloat16, torch.float32
EPS = 1e-5


@pytest.mark.parametrize("unit_offset", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "experts", "dtype", "of_router"),
    [
        (1, 2048, 16, B, B),
        (3, 300, 5, H, F),
        (2, 8, 1, F, F),
        (1, 5000, 3, H, H),
        (64, 200, 70, H, H),
        (67, 130, 5, B, F),
        (70, 64, 130, F, F),
    ],
)
def test_logits(
    m: int,
    k: int,
    experts: int,
    dtype: torch.dtype,
    of_router: torch.dtype,
    unit_offset: bool,
    gpu: Gpu,
    device: torch.device,
    interpreted: bool,
) -> None:
    """Of what was written to z: sums of k products in float32, whose order is a tree's."""
    x, factor = (torch.randn(m, k) * 3).to(dtype), (1 + torch.randn(k) / 4).to(dtype)
    bias, shared_gate = (torch.randn(experts).to(of_router), torch.randn(k).to(dtype)) if unit_offset else (None, None)
    router = (torch.randn(experts, k) / 8).to(of_router)
    z, logits = torch.full((m, k), torch.nan, dtype=dtype, device=device), torch.full((m, experts), torch.nan, device=device)
    share = torch.full((m,), torch.nan, device=device)
    shared = None if shared_gate is None else (shared_gate.to(device), share)
    spec = routing.Router(router.to(device), None if bias is None else bias.to(device), shared)
    routing.launch_logits(gpu, x.to(device), (factor.to(device), EPS, unit_offset), spec, z, logits)
    wide = x.double()
    expected = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * (factor.double() + unit_offset)
    unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)  # the interpreter cuts where a GPU rounds
    assert bool(((z.cpu().double() - expected).abs() <= (unit + 2.0**-19) * expected.abs() + 1e-7).all())
    found, sizes = z.cpu().double() @ router.double().T, z.cpu().double().abs() @ router.double().abs().T
    if bias is not None:
        found, sizes = found + bias.double(), sizes + bias.double().abs()
    assert bool(((logits.cpu().double() - found).abs() <= 2.0**-19 * sizes).all())
    if shared_gate is not None:
        found, sizes = z.cpu().double() @ shared_gate.double(), z.cpu().double().abs() @ shared_gate.double().abs()
        assert bool(((share.cpu().double() - found).abs() <= 2.0**-19 * sizes).all())


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("m", "experts", "chosen"), [(1, 128, 8), (3, 7, 2), (2, 1, 1), (1, 5, 5), (1, 1000, 10)])
def test_the_choice(m: int, experts: int, chosen: int, normalized: bool, gpu: Gpu, device: torch.device) -> None:
    """The first of equal ones; a float32's exponential is off by some roundings."""
    logits = torch.randn(m, experts) * 4
    logits[0, experts // 2 :] = logits[0, experts // 2]
    ids = torch.full((m, chosen), -1, dtype=torch.int32, device=device)
    weights = torch.full((m, chosen), torch.nan, device=device)
    routing.launch_choice(gpu, logits.to(device), ids, weights, routing.Choice(normalized))
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :chosen]
    assert torch.equal(ids.cpu().long(), order)
    shares = logits.double().softmax(1).gather(1, order)
    if normalized:
        shares = shares / shares.sum(1, keepdim=True)
    assert bool(((weights.cpu().double() - shares).abs() <= 2.0**-17 * shares).all())


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize("scores", ["sigmoid", "softmax"])
@pytest.mark.parametrize(("m", "experts", "chosen"), [(1, 128, 8), (3, 7, 2), (2, 1, 1), (1, 5, 5), (1, 1000, 10)])
def test_the_choice_by_scores(m: int, experts: int, chosen: int, scores: str, normalized: bool, gpu: Gpu, device: torch.device) -> None:
    """A correction decides on the choice alone. It lies on a grid, so that a score that is off by some roundings changes no choice."""
    logits, correction = torch.randn(m, experts), torch.randperm(experts) * 2.0
    shares = logits.double().sigmoid() if scores == "sigmoid" else logits.double().softmax(1)
    for added in (correction, None):
        ids = torch.full((m, chosen), -1, dtype=torch.int32, device=device)
        weights = torch.full((m, chosen), torch.nan, device=device)
        choice = routing.Choice(normalized, scores, None if added is None else added.to(device), 2.5)
        routing.launch_choice(gpu, logits.to(device), ids, weights, choice)
        expected = (logits if added is None else shares + added).topk(chosen, 1).indices
        assert torch.equal(ids.cpu().long(), expected)
        found = shares.gather(1, expected)
        found = 2.5 * (found / found.sum(1, keepdim=True) if normalized else found)
        assert bool(((weights.cpu().double() - found).abs() <= 2.0**-17 * found).all())


@pytest.mark.parametrize("scores", ["", "sigmoid", "softmax"])
@pytest.mark.parametrize("normalized", [False, True])
def test_a_logit_that_is_no_number(normalized: bool, scores: str, gpu: Gpu, device: torch.device) -> None:
    """Its row's weights are NaN, of whatever experts there are, or of none; other rows keep theirs."""
    logits = torch.randn(2, 5)
    logits[0, 2] = torch.nan
    ids, weights = torch.zeros(2, 2, dtype=torch.int32, device=device), torch.zeros(2, 2, device=device)
    routing.launch_choice(gpu, logits.to(device), ids, weights, routing.Choice(normalized, scores))
    assert bool((ids >= 0).all())
    assert weights.isnan().tolist() == [[True, True], [False, False]]
    assert torch.equal(ids[1].cpu().long(), logits[1].topk(2).indices)


@pytest.mark.parametrize("with_one", ["", "alone", "with a gate"])
@pytest.mark.parametrize(("m", "k", "chosen", "dtype"), [(1, 2048, 8, B), (3, 300, 2, H), (2, 1, 1, F)])
def test_the_sum(m: int, k: int, chosen: int, dtype: torch.dtype, with_one: str, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    y, residual, weights = torch.randn(m * chosen, k).to(dtype), torch.randn(m, k).to(dtype), torch.rand(m, chosen)
    share, one = torch.randn(m), torch.randn(m, k).to(dtype)
    out = torch.full((m, k), torch.nan, dtype=dtype, device=device)
    shared = (share.to(device) if with_one == "with a gate" else None, one.to(device)) if with_one else None
    routing.launch_sum(gpu, y.to(device), weights.to(device), residual.to(device), out, shared)
    parts = y.double().view(m, chosen, k) * weights.double().unsqueeze(-1)
    expected, size = parts.sum(1) + residual.double(), parts.abs().sum(1) + residual.double().abs()
    if with_one:  # the sigmoid is off by a few roundings
        part = (share.double().sigmoid().unsqueeze(-1) if with_one == "with a gate" else 1) * one.double()
        expected, size = expected + part, size + 4 * part.abs()
    unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)
    assert bool(((out.cpu().double() - expected).abs() <= unit * expected.abs() + (chosen + 2) * 2.0**-23 * size + 2.0**-24).all())


def test_the_sum_leaves_out_outputs_of_weight_0(gpu: Gpu, device: torch.device) -> None:
    """They may be infinite or NaN: `add_first` has such weights. Weights that are NaN stay so."""
    y, weights = torch.ones(4, 5, device=device), torch.tensor([[0.0, 0.5], [torch.nan, 0.5]], device=device)
    y[0, :2] = torch.tensor([torch.inf, torch.nan])
    out = torch.empty(2, 5, device=device)
    routing.launch_sum(gpu, y, weights, torch.ones(2, 5, device=device), out)
    assert out[0].tolist() == [1.5] * 5
    assert out[1].isnan().all()


@pytest.mark.parametrize(
    ("name", "pairs", "experts", "dtype", "sort"),
    [("int4_g128", 2, 8, B, False), ("q4_0", 3, 4, H, False), ("q4_0", 7, 3, H, True), ("int8_channel", 2, 2, F, False)],
)
def test_a_product_with_gates(
    name: str, pairs: int, experts: int, dtype: torch.dtype, sort: bool, gpu: Gpu, device: torch.device, interpreted: bool
) -> None:
    """Of each pair's expert; one that there is not gives NaN."""
    n, k = 256, 384
    problem = Problem("grouped_linear", pairs, n, k, as_format(name), dtype, experts=experts)
    fitting = (
        grouped.gated(problem, config) for config in grouped.configs(replace(problem, m=pairs), gpu) if config.sort == sort or not sort
    )
    config = next(config for config in fitting if config is not None)
    config = replace(config, sort=sort or config.sort)
    codes = [random_codes(problem.format, (n, k)) for _ in range(experts)]
    weight = torch.cat([gpu_tiles.pack(one).data for one in codes]).to(device)
    ids = torch.arange(pairs, dtype=torch.int32) % experts
    ids[-1] = experts
    x, out = (torch.randn(pairs, k) / 8).to(dtype), torch.full((pairs, n // 2), torch.nan, dtype=dtype, device=device)
    grouped.launch(problem, config, x.to(device), weight, ids.to(device), out, None, gates="silu")
    mode = skinny_config.mode(replace(problem, op="linear", experts=1))
    assert bool(out[-1].isnan().all())
    for row, expert in enumerate(ids[:-1].tolist()):
        one = x[row : row + 1]
        expected, error = reference.linear(one, codes[expert]), 2 * reference.error_bound(one, codes[expert])
        if (mode != "sums" and dtype != F) or (interpreted and dtype == B):
            error = error + 4 * UNIT[dtype] * (one.double().abs() @ terms(codes[expert]).T)
        (gate, up), (of_gate, of_up) = expected.chunk(2, 1), error.chunk(2, 1)
        expected = torch.nn.functional.silu(gate) * up
        error = 1.1 * of_gate * (up.abs() + of_up) + torch.nn.functional.silu(gate).abs() * of_up + 2.0**-20 * expected.abs()
        unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)
        assert bool(((out[row].cpu().double() - expected[0]).abs() <= error[0] + unit * (expected[0].abs() + error[0]) + 2.0**-24).all())


# The op


def half(k: int = 96, inner: int = 64, experts: int = 6, **how: Any) -> Experts:
    def stack(n: int, c: int) -> Weight:
        return Weight(ops.pack(ops.quantize(torch.randn(experts, n, c) / c**0.5, "q8_0")), None, "float", "block")

    router = torch.randn(experts, k) / k**0.5
    return Experts(
        stack(2 * inner, k), stack(k, inner), router, **{"top_k": 2, "norm_topk": True, "pre_norm": Norm(torch.rand(k), EPS)} | how
    )


def by_hand(x: Tensor, spec: Experts) -> Tensor:
    """In float64."""
    wide = x.double()
    z = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * spec.pre_norm.weight.double()
    up, down = (ops.dequantize(weight.packed, torch.float32).double() for weight in (spec.gate_up, spec.down_proj))
    logits = z @ spec.router.double().T + (0 if spec.router_bias is None else spec.router_bias.double())
    shares = logits.sigmoid() if spec.scores == "sigmoid" else logits.softmax(-1)
    ids = (shares if spec.correction_bias is None else shares + spec.correction_bias.double()).topk(spec.top_k, -1).indices
    shares = shares.gather(1, ids)
    if spec.norm_topk:
        shares = shares / shares.sum(-1, keepdim=True)
    shares = shares * spec.scaling_factor
    rows = []
    for row, chosen, weights in zip(z, ids, shares, strict=True):
        rows.append(torch.zeros_like(row))
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            both = up[e] @ row + (0 if spec.gate_up.bias is None else spec.gate_up.bias[e].double())
            gate, middle = both.chunk(2)
            if spec.clamped is None:
                inner = torch.nn.functional.silu(gate) * middle
            else:
                gate, middle = both[::2].clamp(max=spec.clamped.limit), both[1::2].clamp(-spec.clamped.limit, spec.clamped.limit)
                inner = (middle + 1) * gate * torch.sigmoid(spec.clamped.alpha * gate)
            rows[-1] += weight * (down[e] @ inner + (0 if spec.down_proj.bias is None else spec.down_proj.bias[e].double()))
    total = wide + torch.stack(rows)
    if spec.shared_expert is not None:
        up, down = (ops.dequantize(weight.packed, torch.float32).double() for weight in spec.shared_expert[:2])
        gate, middle = (z @ up.T + (0 if spec.shared_expert.gate_up.bias is None else spec.shared_expert.gate_up.bias.double())).chunk(
            2, -1
        )
        inner = torch.nn.functional.silu(gate) * middle
        shared_gate = spec.shared_expert.gate
        total += (1 if shared_gate is None else torch.sigmoid(z @ shared_gate.double()).unsqueeze(-1)) * (inner @ down.T)
    return total


def there(part: Any, device: torch.device) -> Any:
    """Tensors, weights and tuples of them on a device."""
    if isinstance(part, Tensor):
        return part.to(device)
    if isinstance(part, Packed):
        return ops.pack(ops.unpack(part), str(device))
    return type(part)(*(there(each, device) for each in part)) if isinstance(part, tuple) else part


def like_gpt_oss(spec: Experts) -> Experts:
    gate_up, down = (weight._replace(bias=torch.randn(weight.packed.shape[:2])) for weight in (spec.gate_up, spec.down_proj))
    return spec._replace(gate_up=gate_up, down_proj=down, router_bias=torch.randn(len(spec.router)), clamped=Clamped(1.7, 1.5))


def with_shared(spec: Experts) -> Experts:
    k, inner = spec.down_proj.packed.shape[1], 160

    def weight(n: int, c: int) -> Weight:
        return Weight(ops.pack(ops.quantize(torch.randn(n, c) / c**0.5, "q8_0")), None, "float", "block")

    return spec._replace(shared_expert=SharedExpert(weight(2 * inner, k), weight(k, inner), torch.randn(k) / k**0.5))


def like_glm(spec: Experts) -> Experts:
    shared = with_shared(spec).shared_expert
    assert shared is not None
    how: dict[str, Any] = {"scores": "sigmoid", "correction_bias": torch.randn(len(spec.router)), "scaling_factor": 1.5}
    return spec._replace(shared_expert=shared._replace(gate=None), **how)


def like_ernie(spec: Experts) -> Experts:
    return like_glm(spec)._replace(scores="softmax")


@pytest.mark.parametrize(
    "other", [lambda spec: spec, like_gpt_oss, with_shared, lambda spec: with_shared(like_gpt_oss(spec)), like_glm, like_ernie]
)
@pytest.mark.parametrize(("rows", "normalized"), [(5, False), (5, True), (100, True)])
def test_the_half_of_a_layer(rows: int, normalized: bool, other: Any, device: torch.device) -> None:
    """Sums of a hundred products in float32."""
    x, spec = torch.randn(rows, 96), other(half(norm_topk=normalized))
    y = add_experts(x.to(device), there(spec, device)).cpu()
    assert torch.allclose(y.double(), by_hand(x, spec), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("m", "inner", "dtype"), [(1, 96, B), (3, 2500, H), (5, 17, F)])
def test_clamped_gates(m: int, inner: int, dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    """The sigmoid is off by a few roundings of float32, and of its argument, by that of it; the result by that of its type."""
    x, out = (torch.randn(m, 2 * inner) * 4).to(dtype), torch.full((m, inner), torch.nan, dtype=dtype, device=device)
    x[0, 2], x[0, 5] = torch.nan, torch.nan  # a gate, and an up
    gates.launch_clamped(gpu, x.to(device), out, 1.702, 7.0)
    gate, up = x.double()[:, ::2].clamp(max=7), x.double()[:, 1::2].clamp(-7, 7)
    expected = (up + 1) * gate * torch.sigmoid(1.702 * gate)
    assert torch.equal(out.cpu().isnan(), expected.isnan())
    assert int(expected.isnan().sum()) == 2
    unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)
    error = (unit + 2.0**-20 + 2.0**-21 * 1.702 * gate.abs()) * expected.abs() + (2.0**-24 if dtype == H else 2.0**-126)
    assert bool(((out.cpu().double() - expected).abs() <= error)[~expected.isnan()].all())


def test_arguments() -> None:
    right, shared = torch.randn(1, 96), with_shared(half()).shared_expert
    assert shared is not None
    wrong = shared._replace(gate=shared.gate[1:])
    others = (
        {"top_k": 7},
        {"router_bias": torch.randn(5)},
        {"shared_expert": wrong},
        {"correction_bias": torch.randn(5), "scores": "sigmoid"},
    )
    for x, changed in ((right[:, 1:], {}), (right.half(), {}), *((right, other) for other in others)):
        with pytest.raises(ArgumentError, match=r"experts take x \[\.\.\., K\]"):
            add_experts(x, half(**changed))
    with pytest.raises(ArgumentError, match="scores are '' or 'sigmoid' or 'softmax'"):
        add_experts(right, half(correction_bias=torch.randn(6)))


def test_a_stack_of_another_size(device: torch.device) -> None:
    spec, short = there(half(), device), there(half(experts=5).gate_up.packed, device)
    gate_up = spec.gate_up._replace(packed=replace(short, shape=spec.gate_up.packed.shape))
    with pytest.raises(FormatError, match=r"q8_0 of shape \[6, 128, 96\]"):
        add_experts(torch.randn(1, 96, device=device), spec._replace(gate_up=gate_up))


# Ahead of time: what layers of other families have that those of Llama (test_decoding_kernels.py) have not

KERNELS = ["_logits", "_choose", "_sum", "_clamped", "_gates", "_gates", "_norm", "_added", "_added", "_sections"]
KERNELS += [*["_attend", "_add_up"] * 9, "_logits", "_sum", "_choose", "_choose", "_sum", "_norm", "_logits_of_many", "_logits_of_many"]


def test_what_families_add_compiles_without_spills() -> None:
    """The other GPUs of NVIDIA take the same tiles with the matrix unit of sm_80; sm_120 starts kernels early, as sm_90 does.

    Attention of one token is the same on sm_100 and sm_90: there its first kind is compiled, and its last, whose tiles are streamed.
    """
    attends = [i for i, name in enumerate(KERNELS) if name == "_attend"]
    others = [i for i, name in enumerate(KERNELS) if name not in ("_attend", "_add_up")]
    launches = {"sm_80": range(len(KERNELS)), "sm_90": range(len(KERNELS)), "sm_100": sorted((attends[0], attends[-1], *others))}
    for size in (512, 128, 65536):
        tiles = (attend.static(1, 32, 8, size, 128, B, gpu)[0] for gpu in GPUS.values() if gpu.backend == "cuda")
        assert len({replace(tile, pdl=False) for tile in tiles}) == 1
    jobs = [Job("aot:launch_families", arch, wanted="resources", only=[*places]) for arch, places in launches.items()]
    for (arch, places), binaries in zip(launches.items(), compile_all(jobs), strict=True):
        assert [binary.kernel for binary in binaries] == [KERNELS[i] for i in places]
        for binary in binaries:
            assert (binary.spills, binary.stack) == (0, 0), f"{binary.kernel} on {arch}"
            assert ("griddepcontrol.wait" in binary.ptx) == (GPUS[arch].capability >= (9, 0)), f"{binary.kernel} on {arch}"

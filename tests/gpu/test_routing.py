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
from halfbyte.kernels.gpu import grouped, routing, skinny_config
from halfbyte.kernels.problem import Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu
from halfbyte.ops.decoder import Norm
from halfbyte.ops.experts import Experts
from halfbyte.ops.layers import Weight
from halfbyte.ops.routing import add_experts

H, B, F = torch.float16, torch.bfloat16, torch.float32
EPS = 1e-5


@pytest.mark.parametrize("plus_one", [False, True])
@pytest.mark.parametrize(
    ("m", "k", "experts", "dtype", "of_router"), [(1, 2048, 16, B, B), (3, 300, 5, H, F), (2, 8, 1, F, F), (1, 5000, 3, H, H)]
)
def test_logits(
    m: int,
    k: int,
    experts: int,
    dtype: torch.dtype,
    of_router: torch.dtype,
    plus_one: bool,
    gpu: Gpu,
    device: torch.device,
    interpreted: bool,
) -> None:
    """Of what was written to z: sums of k products in float32, whose order is a tree's."""
    x, factor = (torch.randn(m, k) * 3).to(dtype), (1 + torch.randn(k) / 4).to(dtype)
    router = (torch.randn(experts, k) / 8).to(of_router)
    z, logits = torch.full((m, k), torch.nan, dtype=dtype, device=device), torch.full((m, experts), torch.nan, device=device)
    routing.launch_logits(gpu, x.to(device), (factor.to(device), EPS, plus_one), router.to(device), z, logits)
    wide = x.double()
    expected = wide * (wide.square().mean(1, keepdim=True) + EPS).rsqrt() * (factor.double() + plus_one)
    unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)  # the interpreter cuts where a GPU rounds
    assert bool(((z.cpu().double() - expected).abs() <= (unit + 2.0**-19) * expected.abs() + 1e-7).all())
    found, sizes = z.cpu().double() @ router.double().T, z.cpu().double().abs() @ router.double().abs().T
    assert bool(((logits.cpu().double() - found).abs() <= 2.0**-19 * sizes).all())


@pytest.mark.parametrize("normalized", [False, True])
@pytest.mark.parametrize(("m", "experts", "chosen"), [(1, 128, 8), (3, 7, 2), (2, 1, 1), (1, 5, 5), (1, 1000, 10)])
def test_the_choice(m: int, experts: int, chosen: int, normalized: bool, gpu: Gpu, device: torch.device) -> None:
    """The first of equal ones; a float32's exponential is off by some roundings."""
    logits = torch.randn(m, experts) * 4
    logits[0, experts // 2 :] = logits[0, experts // 2]
    ids = torch.full((m, chosen), -1, dtype=torch.int32, device=device)
    weights = torch.full((m, chosen), torch.nan, device=device)
    routing.launch_choice(gpu, logits.to(device), ids, weights, normalized=normalized)
    order = torch.sort(logits, dim=1, descending=True, stable=True).indices[:, :chosen]
    assert torch.equal(ids.cpu().long(), order)
    shares = logits.double().softmax(1).gather(1, order)
    if normalized:
        shares = shares / shares.sum(1, keepdim=True)
    assert bool(((weights.cpu().double() - shares).abs() <= 2.0**-17 * shares).all())


@pytest.mark.parametrize("normalized", [False, True])
def test_a_logit_that_is_no_number(normalized: bool, gpu: Gpu, device: torch.device) -> None:
    """Its row's weights are NaN, of whatever experts there are, or of none; other rows keep theirs."""
    logits = torch.randn(2, 5)
    logits[0, 2] = torch.nan
    ids, weights = torch.zeros(2, 2, dtype=torch.int32, device=device), torch.zeros(2, 2, device=device)
    routing.launch_choice(gpu, logits.to(device), ids, weights, normalized=normalized)
    assert bool((ids >= 0).all())
    assert weights.isnan().tolist() == [[True, True], [False, False]]
    assert torch.equal(ids[1].cpu().long(), logits[1].topk(2).indices)


@pytest.mark.parametrize(("m", "k", "chosen", "dtype"), [(1, 2048, 8, B), (3, 300, 2, H), (2, 1, 1, F)])
def test_the_sum(m: int, k: int, chosen: int, dtype: torch.dtype, gpu: Gpu, device: torch.device, interpreted: bool) -> None:
    y, residual, weights = torch.randn(m * chosen, k).to(dtype), torch.randn(m, k).to(dtype), torch.rand(m, chosen)
    out = torch.full((m, k), torch.nan, dtype=dtype, device=device)
    routing.launch_sum(gpu, y.to(device), weights.to(device), residual.to(device), out)
    parts = y.double().view(m, chosen, k) * weights.double().unsqueeze(-1)
    expected, size = parts.sum(1) + residual.double(), parts.abs().sum(1) + residual.double().abs()
    unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)
    assert bool(((out.cpu().double() - expected).abs() <= unit * expected.abs() + (chosen + 2) * 2.0**-23 * size + 2.0**-24).all())


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
        return Weight(ops.pack(ops.quantize(torch.randn(experts, n, c) / c**0.5, "q8_0")), None, "auto", "block")

    router = torch.randn(experts, k) / k**0.5
    return Experts(
        stack(2 * inner, k), stack(k, inner), router, **{"chosen": 2, "normalized": True, "before": Norm(torch.rand(k), EPS)} | how
    )


def by_hand(x: Tensor, mine: Experts) -> Tensor:
    """In float64."""
    wide = x.double()
    z = wide * (wide.square().mean(-1, keepdim=True) + EPS).rsqrt() * mine.before.weight.double()
    up, down = (ops.dequantize(weight.packed, torch.float32).double() for weight in (mine.gate_up, mine.down))
    shares, ids = (z @ mine.router.double().T).softmax(-1).topk(mine.chosen, -1)
    if mine.normalized:
        shares = shares / shares.sum(-1, keepdim=True)
    rows = []
    for row, chosen, weights in zip(z, ids, shares, strict=True):
        rows.append(torch.zeros_like(row))
        for e, weight in zip(chosen.tolist(), weights, strict=True):
            gate, middle = (up[e] @ row).chunk(2)
            rows[-1] += weight * (down[e] @ (torch.nn.functional.silu(gate) * middle))
    return wide + torch.stack(rows)


@pytest.mark.parametrize("normalized", [False, True])
def test_the_half_of_a_layer(normalized: bool, device: torch.device) -> None:
    """Sums of a hundred products in float32."""
    x, mine = torch.randn(5, 96), half(normalized=normalized)
    expected = by_hand(x, mine)
    gate_up, down = (weight._replace(packed=ops.pack(ops.unpack(weight.packed), str(device))) for weight in (mine.gate_up, mine.down))
    there = mine._replace(
        gate_up=gate_up, down=down, router=mine.router.to(device), before=mine.before._replace(weight=mine.before.weight.to(device))
    )
    y = add_experts(x.to(device), there).cpu()
    assert torch.allclose(y.double(), expected, rtol=1e-4, atol=1e-4)


def test_arguments() -> None:
    for x, changed in ((torch.randn(1, 95), {}), (torch.randn(1, 96).half(), {}), (torch.randn(1, 96), {"chosen": 7})):
        with pytest.raises(ArgumentError, match=r"experts take x \[\.\.\., K\]"):
            add_experts(x, half(**changed))


def test_a_stack_of_another_size(device: torch.device) -> None:
    mine = half()
    short = ops.pack(ops.unpack(half(experts=5).gate_up.packed), str(device))
    gate_up = mine.gate_up._replace(packed=replace(short, shape=mine.gate_up.packed.shape))
    down = mine.down._replace(packed=ops.pack(ops.unpack(mine.down.packed), str(device)))
    norm = mine.before._replace(weight=mine.before.weight.to(device))
    there = mine._replace(gate_up=gate_up, down=down, router=mine.router.to(device), before=norm)
    with pytest.raises(FormatError, match=r"q8_0 of shape \[6, 128, 96\]"):
        add_experts(torch.randn(1, 96, device=device), there)


# Ahead of time: what layers of other families have that those of Llama (test_decoding_kernels.py) have not

KERNELS = ["_logits", "_choose", "_sum", "_gates", "_layer_norm", "_added", "_parts", *["_attend", "_add_up"] * 3]


def test_what_families_add_compiles_without_spills() -> None:
    archs = [name for name in GPUS if name.startswith("sm_")]
    for arch, binaries in zip(archs, compile_all([Job("aot:launch_families", arch, wanted="resources") for arch in archs]), strict=True):
        assert [binary.kernel for binary in binaries] == KERNELS
        for binary in binaries:
            assert (binary.spills, binary.stack) == (0, 0), f"{binary.kernel} on {arch}"
            assert ("griddepcontrol.wait" in binary.ptx) == (GPUS[arch].capability >= (9, 0)), f"{binary.kernel} on {arch}"

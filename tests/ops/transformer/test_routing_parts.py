"""The experts half of a layer whose weights compute in different ways: each product as its weight says, also those of the shared expert."""

from __future__ import annotations

from itertools import product

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.ops.grouped import grouped_linear
from halfbyte.ops.transformer.experts import Experts, SharedExpert
from halfbyte.ops.transformer.norms import normed
from halfbyte.ops.transformer.routing import add_experts, mixed, route, shared_output
from halfbyte.ops.transformer.sublayers import Norm
from halfbyte.ops.transformer.weights import Weight

K, INNER, EXPERTS = 96, 64, 5


def weight(*shape: int, compute: str) -> Weight:
    return Weight(ops.pack(ops.quantize(torch.randn(shape) / shape[-1] ** 0.5, "q8_0")), None, compute, "block")


def gated(both: Tensor) -> Tensor:
    gate, up = both.chunk(2, -1)
    return functional.silu(gate) * up


@pytest.mark.parametrize("computes", [c for c in product(("float", "int8"), repeat=4) if len({*c}) > 1], ids="-".join)
def test_each_product_computes_as_its_weight_says(computes: tuple[str, str, str, str]) -> None:
    torch.manual_seed(3)
    up, down, shared_up, shared_down = computes
    first, second = weight(EXPERTS, 2 * INNER, K, compute=up), weight(EXPERTS, K, INNER, compute=down)
    shared = SharedExpert(weight(2 * INNER, K, compute=shared_up), weight(K, INNER, compute=shared_down), torch.randn(K) / K**0.5)
    half = Experts(first, second, torch.randn(EXPERTS, K) / K**0.5, 2, True, Norm(torch.rand(K) + 0.5, 1e-5), shared)
    x = torch.randn(30, K)
    z, ids, weights, gate = route(x, half)
    assert torch.equal(z, normed(x, half.pre_norm))
    inner = gated(grouped_linear(z, first.packed, ids, compute=up))
    of_experts = (grouped_linear(inner, second.packed, ids, compute=down) * weights.unsqueeze(-1)).sum(1)
    of_shared = ops.linear(gated(ops.linear(z, shared.gate_up.packed, compute=shared_up)), shared.down_proj.packed, compute=shared_down)
    assert gate is not None
    wanted = x + of_experts + torch.sigmoid(gate).unsqueeze(-1) * of_shared
    # The same products; float32 sums and activations in another order move some int8 codes of the second products' inputs by one.
    close = 1e-2 if "int8" in (down, shared_down) else 1e-5
    difference = add_experts(x, half) - wanted
    assert difference.norm() <= close * (wanted - x).norm()
    assert torch.allclose(mixed(z, ids, weights, half), of_experts, atol=close * float(of_experts.abs().max()))


def mixture(down: str = "float") -> Experts:
    """Experts with a shared expert; `down` is the compute of the second stack."""
    first, second = weight(EXPERTS, 2 * INNER, K, compute="float"), weight(EXPERTS, K, INNER, compute=down)
    shared = SharedExpert(weight(2 * INNER, K, compute="float"), weight(K, INNER, compute="float"), None)
    return Experts(first, second, torch.randn(EXPERTS, K), 2, True, Norm(torch.rand(K), 1e-5), shared)


@pytest.mark.parametrize("down", ["float", "int8"])
def test_stacks_that_do_not_fit_are_refused(down: str) -> None:
    """A kernel would read beyond the rows of each expert."""
    right, x = mixture(down), torch.randn(3, K)
    routed = route(x, right)
    half_up = right._replace(gate_up=weight(EXPERTS, INNER, K, compute="float"))
    for call in (lambda: add_experts(x, half_up), lambda: route(x, half_up), lambda: mixed(*routed[:3], half_up)):
        with pytest.raises(ArgumentError, match=rf"experts have stacks \[E, 2 I, K\] .*, got \[\({EXPERTS}, {INNER}, {K}\)"):
            call()
    fewer = right._replace(router=right.router[1:])
    with pytest.raises(ArgumentError, match=rf"take a router \[{EXPERTS}, {K}\], got \[{EXPERTS - 1}, {K}\]"):
        add_experts(x, fewer)
    assert right.shared_expert is not None
    narrow = right._replace(shared_expert=right.shared_expert._replace(down_proj=weight(1, INNER, compute="float")))
    for call in (lambda: add_experts(x, narrow), lambda: shared_output(routed, narrow)):
        with pytest.raises(ArgumentError, match=rf"weights \[2 I, {K}\] and \[{K}, I\], got .* and \[1, {INNER}\]"):
            call()


def test_rows_that_do_not_fit_are_refused() -> None:
    right = mixture()
    z, ids, weights, _ = route(torch.randn(3, K), right)
    assert mixed(z, ids, weights, right).shape == (3, K)
    for operands in (
        (torch.randn(3, K + 1), ids, weights),
        (z, ids, weights[:, :1]),
        (z[:2], ids, weights),
        (z.view(3, 1, K), ids, weights),
    ):
        with pytest.raises(ArgumentError, match=rf"these experts take z \[M, {K}\], and ids and weights \[M, T\]"):
            mixed(*operands, right)


@pytest.mark.parametrize("down", ["float", "int8"])
def test_all_parts_refuse_a_layer_norm(down: str) -> None:
    right, x = mixture(down), torch.randn(3, K)
    routed = route(x, right)
    wrong = right._replace(pre_norm=right.pre_norm._replace(layer_norm=True, bias=torch.randn(K)))
    calls = (
        lambda: add_experts(x, wrong),
        lambda: route(x, wrong),
        lambda: mixed(*routed[:3], wrong),
        lambda: shared_output(routed, wrong),
    )
    for call in calls:
        with pytest.raises(ArgumentError, match="got a layer norm"):
            call()

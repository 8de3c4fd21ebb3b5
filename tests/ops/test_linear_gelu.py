"""GELU within a product, exact or by tanh, against float64."""

from typing import Literal

import pytest
import torch
from torch.nn import functional

from halfbyte import ops
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen.elementary import GELU_BOUND

Approximate = Literal["none", "tanh"]
approximations = pytest.mark.parametrize("approximate", ["none", "tanh"])


@approximations
@pytest.mark.parametrize("how", ["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("shape", [(1, 33, 40), (7, 64, 96), (130, 100, 72), (0, 8, 32)])
def test_the_reference(shape: tuple[int, int, int], dtype: torch.dtype, how: Literal["float", "int8"], approximate: Approximate) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    codes = ops.quantize(torch.randn(n, k, generator=generator), "q4_0")
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator)
    y = ops.linear_gelu(x, ops.pack(codes), bias, compute=how, approximate=approximate)
    exact, bound = reference.linear(x, codes, bias, how), reference.error_bound(x, codes, bias, how)
    # The slope of GELU is at most 1.13; tanh's exponent has three roundings, whose effect is within the same bound as the polynomial's.
    bound = 1.13 * bound + GELU_BOUND * (exact.abs() + bound)
    assert y.dtype == dtype
    assert reference.agrees(y, functional.gelu(exact, approximate=approximate), bound).all()


@approximations
def test_gradients_and_graphs(approximate: Approximate) -> None:
    packed, x = ops.pack(ops.quantize(torch.randn(16, 32), "q8_0")), torch.randn(3, 32, requires_grad=True)
    ops.linear_gelu(x, packed, approximate=approximate).square().sum().backward()
    want = x.detach().requires_grad_()
    functional.gelu(ops.linear(want, packed), approximate=approximate).square().sum().backward()
    assert torch.equal(x.grad, want.grad)  # type: ignore[arg-type]

    def run(x: torch.Tensor) -> torch.Tensor:
        return ops.linear_gelu(x, packed, approximate=approximate)

    with torch.no_grad():
        assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))

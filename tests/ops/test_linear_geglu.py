"""GEGLU within the products of both halves of a weight, against float64."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from halfbyte import ops
from halfbyte.errors import ArgumentError
from halfbyte.kernels import reference
from halfbyte.kernels.cpu.codegen.elementary import GELU_BOUND


def torch_geglu(y: Tensor) -> Tensor:
    up, gate = y.chunk(2, -1)
    return up * functional.gelu(gate)


@pytest.mark.parametrize("with_bias", [True, False])
@pytest.mark.parametrize("how", ["float", "int8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [(1, 64, 40), (7, 192, 96), (130, 128, 72), (5, 66, 64), (3, 2, 33), (0, 64, 32), (2, 64, 0), (4, 0, 32)])
@pytest.mark.parametrize("fmt", ["q4_0", "int8_channel"])
def test_the_reference(fmt: str, shape: tuple[int, int, int], dtype: torch.dtype, how: Literal["float", "int8"], with_bias: bool) -> None:
    m, n, k = shape
    generator = torch.Generator().manual_seed(0)
    codes = ops.quantize(torch.randn(n, k, generator=generator), fmt)
    x, bias = torch.randn(m, k, generator=generator).to(dtype), torch.randn(n, generator=generator) if with_bias else None
    y = ops.linear_geglu(x, ops.pack(codes), bias, compute=how)
    assert (y.shape, y.dtype) == ((m, n // 2), dtype)
    (up, gate), (up_bound, gate_bound) = (
        function(x, codes, bias, how).chunk(2, -1) for function in (reference.linear, reference.error_bound)
    )
    # The slope of GELU is at most 1.13. The first product is rounded to the dtype, and GELU, too, where torch gates.
    eps = torch.finfo(dtype).eps
    active = functional.gelu(gate)
    active_bound = 1.13 * (gate_bound + eps * gate.abs()) + GELU_BOUND * (gate.abs() + gate_bound) + eps * active.abs()
    up_bound = up_bound + eps * up.abs()
    bound = up.abs() * active_bound + active.abs() * up_bound + up_bound * active_bound
    bound += 2.0**-24 * (0.5 if dtype == torch.float16 else 0)  # subnormal numbers of float16
    assert reference.agrees(y, up * active, bound).all()


@pytest.mark.parametrize("how", ["float", "int8"])
def test_one_hot_rows_and_nan(how: str) -> None:
    """An input that is 1 once gives back one column of the weight, gated; a NaN stays in its row."""
    codes = ops.quantize(torch.randn(128, 64), "q8_0")
    weight, x = codes.dequantize().mT, torch.eye(64)
    y = ops.linear_geglu(x, ops.pack(codes), compute=how)
    bound = weight[:, :64].abs() * GELU_BOUND * weight[:, 64:].abs()
    if how == "float":
        assert ((y - torch_geglu(weight)).abs() <= bound + 2.0**-22 * y.abs()).all()
    x[3, 5] = torch.nan
    broken = ops.linear_geglu(x, ops.pack(codes), compute=how)
    assert broken[3].isnan().all()
    rows = torch.arange(64) != 3
    assert torch.equal(broken[rows], y[rows])


def test_the_epilogue_gates(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where halves are whole panels, torch is not asked for GELU."""

    def never(*_: object, **__: object) -> Tensor:
        raise AssertionError("torch's GELU")

    packed, x = ops.pack(ops.quantize(torch.randn(128, 64), "q4_0")), torch.randn(2, 3, 64)
    want = torch_geglu(ops.linear(x, packed))
    monkeypatch.setattr(functional, "gelu", never)
    torch.testing.assert_close(ops.linear_geglu(x, packed), want, rtol=1e-5, atol=1e-5)


def test_gradients_graphs_and_modes() -> None:
    packed, x = ops.pack(ops.quantize(torch.randn(64, 32), "q8_0")), torch.randn(3, 32, requires_grad=True)
    ops.linear_geglu(x, packed).square().sum().backward()
    want = x.detach().requires_grad_()
    torch_geglu(ops.linear(want, packed)).square().sum().backward()
    assert x.grad is not None
    assert want.grad is not None
    assert torch.equal(x.grad, want.grad)

    def run(x: Tensor) -> Tensor:
        return ops.linear_geglu(x, packed)

    with torch.no_grad():
        assert torch.equal(torch.compile(run, fullgraph=True, backend="aot_eager")(x), run(x))
        torch.testing.assert_close(torch.vmap(run)(x), run(x), rtol=1e-5, atol=1e-5)  # torch's GELU
        with torch.autocast("cpu", torch.bfloat16):
            assert run(x).dtype == torch.bfloat16


def test_bad_input() -> None:
    packed = ops.pack(ops.quantize(torch.randn(33, 32), "q8_0"))
    with pytest.raises(ArgumentError, match=r"an even number of rows, the two halves, got \[33, 32\]"):
        ops.linear_geglu(torch.randn(2, 32), packed)
    with pytest.raises(ArgumentError, match="31"):
        ops.linear_geglu(torch.randn(2, 31), ops.pack(ops.quantize(torch.randn(64, 32), "q8_0")))

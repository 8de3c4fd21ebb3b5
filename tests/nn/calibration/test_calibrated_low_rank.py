"""The scales of low-rank branches: searched on samples, by the error of outputs against float64 products."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import halfbyte as hb
from halfbyte import ops
from halfbyte.formats.spec import as_format
from halfbyte.kernels import reference
from halfbyte.nn.calibration.low_rank import ALPHAS, Inputs, Quantization, nearest, output_error
from halfbyte.nn.modules.low_rank import LowRankLinear
from halfbyte.quantizers.low_rank import balancing_scale

N, K = 48, 192


def layer_and_inputs(outliers: str, dtype: torch.dtype = torch.float32) -> tuple[nn.Linear, Tensor]:
    torch.manual_seed(0)
    linear, x = nn.Linear(K, N), torch.randn(60, K)
    with torch.no_grad():
        linear.weight.normal_()
        if outliers in ("weights", "both"):
            linear.weight[:, ::40] *= 30
        if outliers in ("inputs", "both"):
            x[:, ::50] *= 100
    return linear.to(dtype), x.to(dtype)


@torch.no_grad()
def reference_error(branch: LowRankLinear, weight: Tensor, x: Tensor, how: Quantization) -> float:
    """||y - x W^T||² of a branch of the float weight W, with y from the float64 reference."""
    codes = ops.quantize(branch.rest(), "int4_g64", how.method)
    compute = "float" if how.compute == "float" else "int8"
    y = reference.low_rank_linear(x, codes, branch.low_rank_in, branch.low_rank_out, None, compute, branch.input_scale)
    return float((y - x.double() @ weight.double().mT).square().sum())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("compute", ["float", "int8", "auto"])
@pytest.mark.parametrize("outliers", ["none", "weights", "inputs", "both"])
def test_no_worse_than_any_of_the_grid(outliers: str, compute: str, dtype: torch.dtype) -> None:
    """The reference computes the same codes and sums by other steps: in float64, but for x, which is rounded to float32 again after its
    quantization, by 2^-24 of it. Errors are 2^-9 of outputs at the least, from which that is 2^-15."""
    linear, x = layer_and_inputs(outliers, dtype)
    how = Quantization(8, compute=compute)
    weight = linear.weight.detach()
    chosen = nearest(linear, Inputs.of(x), as_format("int4_g64"), how)
    scales = [None, *(balancing_scale(x.abs().amax(0).float(), weight.float(), alpha) for alpha in ALPHAS)]
    errors = [reference_error(LowRankLinear.of(linear, 8, scale), weight, x, how) for scale in scales]
    assert reference_error(chosen, weight, x, how) <= min(errors) * (1 + 2.0**-14)
    if outliers in ("inputs", "both"):
        assert max(errors) > 1.2 * min(errors)  # there is something to choose
    codes = ops.quantize(chosen.rest(), "int4_g64")
    assert output_error(chosen, codes, x, how) == pytest.approx(reference_error(chosen, weight, x, how), rel=2.0**-14)


def test_weights_and_inputs_with_outliers_take_other_scales() -> None:
    """Without products of int8 nothing is gained by smaller ranges of inputs; with them, inputs of 100 leave others a step or two."""
    chosen = {}
    for outliers in ("none", "inputs"):
        linear, x = layer_and_inputs(outliers)
        branch = nearest(linear, Inputs.of(x), as_format("int4_g64"), Quantization(8, compute="int8"))
        chosen[outliers] = branch.input_scale
    assert chosen["inputs"] is not None
    assert chosen["none"] is None or not torch.allclose(chosen["none"], chosen["inputs"])
    assert chosen["inputs"][::50].max() < chosen["inputs"].median() / 4  # sqrt(100) at alpha = 1/2, 2.5 at 0.2


def test_rows_of_all_calls() -> None:
    """Of ten calls with 1000 rows each 128 rows are kept, 8 to 18 of each call; of three with two rows, all."""
    calls = [torch.full((1000, 4), float(i)) for i in range(10)]
    inputs = Inputs.of(calls[0])
    for call in calls[1:]:
        inputs.add(call)
    assert inputs.rows.shape == (128, 4)
    counts = inputs.rows[:, 0].long().bincount(minlength=10)
    assert ((counts >= 8) & (counts <= 18)).all()
    assert torch.equal(inputs.ranges, torch.full((4,), 9.0))
    few = Inputs.of(torch.zeros(2, 4))
    for i in (1.0, 2.0):
        few.add(torch.full((2, 4), i))
    assert few.rows[:, 0].tolist() == [0, 0, 1, 1, 2, 2]


@torch.no_grad()
def test_quantize_searches_with_the_settings_of_the_config() -> None:
    linear, x = layer_and_inputs("inputs")
    model = nn.Sequential(nn.Linear(K, N))
    model.load_state_dict({f"0.{name}": tensor for name, tensor in linear.state_dict().items()})
    settings = {"method": "mse", "compute": "int8"}
    small = hb.quantize_(model, hb.Config("int4_g64", low_rank=8, activation="row", **settings), [x])  # type: ignore[arg-type]
    how = Quantization(8, activation="row", **settings)
    want = nearest(linear, Inputs.of(x), as_format("int4_g64"), how)
    found = small[0]
    assert isinstance(found, LowRankLinear)
    assert want.input_scale is not None
    assert found.input_scale is not None
    assert torch.equal(found.input_scale, want.input_scale)
    assert torch.equal(found.low_rank_in, want.low_rank_in)


@torch.no_grad()
def test_a_format_that_no_scale_makes_fit() -> None:
    """Weights near the least float16 have blocks whose scales are 0 there, also with scales: the layer stays in floating point."""
    linear, x = layer_and_inputs("none")
    linear.weight *= 1e-30
    model = nn.Sequential(linear, nn.Linear(N, N))
    small = hb.quantize_(model, hb.Config("int4_g64", low_rank=8), [x])
    assert isinstance(small[0], LowRankLinear)
    assert type(small[0].residual) is nn.Linear

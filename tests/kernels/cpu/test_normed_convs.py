"""Norms and convolutions as steps of one sequence: which are, and plans that share memory; see also ops/conv/test_normed_conv2d.py."""

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.kernels.cpu.normed_convs import NormedConvsPlan, Stage, why_not
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.ops.conv import cpu
from halfbyte.ops.conv.functions import window_numbers

SHAPE = (1, 32, 5, 6)


def stage(seed: int) -> Stage:
    torch.manual_seed(seed)
    packed = hb.pack_conv(hb.quantize_conv(torch.randn(32, 32, 3, 3), "int8_channel"), 3)
    like = torch.empty(SHAPE, device="meta")
    found = cpu.kernel_for(like, packed, window_numbers((3, 3), 1, 1, 1), "int8", "block")
    assert found is not None
    kernel, weights, window, _ = found
    assert why_not(kernel, torch.float32) is None
    assert "does not read and write" in (why_not(kernel, torch.bfloat16) or "")
    return Stage(4, 1e-5, torch.randn(32), torch.randn(32), True, kernel, window, weights, None)  # type: ignore[arg-type]


def test_what_is_no_step() -> None:
    assert "nothing to multiply" in (why_not(None, torch.float32) or "")


@pytest.mark.parametrize("residual", [False, True])
def test_plans_of_one_size_share_memory(residual: bool) -> None:
    """Calls in turn give what each plan gives alone; nothing is read that no step has written."""
    plans = [NormedConvsPlan([stage(seed), stage(seed + 9)], SHAPE, torch.float32, added=True, residual=residual) for seed in range(2)]
    x, added = torch.randn(SHAPE).to(memory_format=torch.channels_last), torch.randn(1, 32)
    other = torch.randn(SHAPE).to(memory_format=torch.channels_last) if residual else None

    def results() -> list[Tensor]:
        return [plan.run(x, added, other) for plan in plans]

    PLANS.scratch = torch.empty(1 << 21, dtype=torch.uint8)
    wanted = results()
    PLANS.scratch = torch.full((1 << 22,), 255, dtype=torch.uint8)  # elsewhere, and NaN in float32
    for y, again in zip(wanted, results(), strict=True):
        assert not y.isnan().any()
        assert torch.equal(y, again)

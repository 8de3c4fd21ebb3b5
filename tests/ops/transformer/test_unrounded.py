"""Outputs of layers are known in float32 to the layer that reads them, as long as they are what the layer returned."""

import gc

import pytest
import torch

from halfbyte.ops.transformer.unrounded import _unrounded, rounded, unrounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_last_output_is_known_until_it_is_written_to(dtype: torch.dtype) -> None:
    hidden = torch.randn(2, 3, 8)
    first, last = rounded([hidden + 1, hidden], dtype)
    assert last.dtype == dtype
    assert torch.equal(unrounded(last), hidden)
    assert torch.equal(unrounded(first), first.float())
    assert torch.equal(unrounded(last.clone()), last.float()), "another tensor of the same values"
    last[0, 0, 0] += 1
    assert torch.equal(unrounded(last), last.float())


def test_what_is_not_rounded_is_itself() -> None:
    (same,) = rounded([hidden := torch.randn(4, 8)], torch.float32)
    assert same is hidden
    assert unrounded(hidden.T).is_contiguous()
    assert torch.equal(unrounded(hidden.T), hidden.T)


def test_outputs_are_forgotten_with_the_tensor() -> None:
    gc.collect()
    before = len(_unrounded)
    kept = rounded([torch.randn(4)], torch.bfloat16)
    assert len(_unrounded) == before + 1
    del kept
    gc.collect()
    assert len(_unrounded) == before

"""`unrounded` gives the float32 output of a layer for the rounded tensor that it returned, until that is written to or freed."""

import gc

import pytest
import torch

from halfbyte.ops.transformer.unrounded import _unrounded, rounded, unrounded


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_the_last_output_is_exact_until_it_is_written_to(dtype: torch.dtype) -> None:
    hidden = torch.randn(2, 3, 8)
    first, last = rounded([hidden + 1, hidden], dtype)
    assert last.dtype == dtype
    assert torch.equal(unrounded(last), hidden)
    assert torch.equal(unrounded(first), first.float())
    assert torch.equal(unrounded(last.clone()), last.float()), "another tensor of the same values"
    last[0, 0, 0] += 1
    assert torch.equal(unrounded(last), last.float())


def test_float32_outputs_are_returned_as_they_are() -> None:
    (same,) = rounded([hidden := torch.randn(4, 8)], torch.float32)
    assert same is hidden
    assert unrounded(hidden.T).is_contiguous()
    assert torch.equal(unrounded(hidden.T), hidden.T)


def test_an_entry_is_removed_with_its_tensor() -> None:
    gc.collect()
    before = len(_unrounded)
    outputs = rounded([torch.randn(4)], torch.bfloat16)
    assert len(_unrounded) == before + 1
    del outputs
    gc.collect()
    assert len(_unrounded) == before

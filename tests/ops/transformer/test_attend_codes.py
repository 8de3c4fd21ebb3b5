"""`attend` with a cache in 8 bits: codes with scales, here in torch's operations."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.layouts.records import from_codes, to_codes
from halfbyte.ops.transformer.attend import attend
from halfbyte.ops.transformer.sublayers import Heads


def rounded(x: Tensor) -> Tensor:
    return from_codes(*to_codes(x), x.dtype)


def test_the_new_token_is_what_the_cache_holds() -> None:
    """One token of a cache that was empty sees itself alone: its value, as its codes have it."""
    heads = Heads(2, 1, 40, 0.2, rotary_dim=0)
    keys, values = torch.zeros(2, 2, 1, 4, 40, dtype=torch.int8)
    scales = torch.zeros(2, 1, 4, 2, dtype=torch.bfloat16)
    both, qkv = (scales, scales.clone()), torch.randn(2, 4 * 40)
    y = attend(qkv, None, keys, values, torch.zeros(1, dtype=torch.int64), None, heads, scales=both)
    new = qkv.view(2, 4, 40)
    assert torch.allclose(y.view(2, 2, 40), rounded(new[:, 3:]).expand(2, 2, 40), rtol=1e-6)
    for codes, of_codes, x in ((keys, both[0], new[:, 2]), (values, both[1], new[:, 3])):
        assert torch.equal(from_codes(codes, of_codes, torch.float32)[:, 0, 0], rounded(x))
        assert not codes[:, :, 1:].any()


def test_scales_that_do_not_fit() -> None:
    heads, length = Heads(2, 1, 40, 0.2, rotary_dim=0), torch.zeros(1, dtype=torch.int64)
    keys, scales = torch.zeros(2, 1, 4, 40, dtype=torch.int8), torch.zeros(2, 1, 4, 2, dtype=torch.bfloat16)
    for cache, both in ((keys.float(), (scales, scales)), (keys, (scales[..., :1], scales)), (keys, (scales.float(),) * 2), (keys, None)):
        with pytest.raises(ArgumentError, match="or int8 with scales"):
            attend(torch.zeros(2, 160), None, cache, copy.copy(cache), length, None, heads, scales=both)

"""Which elements of a head rope rotates together."""

from __future__ import annotations

from typing import Literal

import pytest
import torch
import triton
import triton.language as tl

from halfbyte.kernels.gpu.runtime.launch import run
from halfbyte.kernels.gpu.transformer.attend import Static
from halfbyte.kernels.gpu.transformer.attend_token import rotated_with


@triton.jit
def _write(out, S: tl.constexpr):
    d = tl.arange(0, S.wide)
    tl.store(out + d, rotated_with(d, S))


@pytest.mark.parametrize("rope_interleaved", ["", "half", "repeated"])
@pytest.mark.parametrize("rotary_dim", [0, 2, 6, 10])
def test_rotated_pairs(rotary_dim: int, rope_interleaved: Literal["", "half", "repeated"], device: torch.device) -> None:
    static = Static(10, 16, 1, 16, 16, 4, 1, False, rotary_dim, rope_interleaved=rope_interleaved)
    out = torch.empty(16, dtype=torch.int32, device=device)
    run(_write, (1,), out, static)
    rotated = torch.arange(rotary_dim).view(-1, 2).flip(1) if rope_interleaved else torch.arange(rotary_dim).view(2, -1).flip(0)
    assert out.tolist() == [*rotated.flatten().tolist(), *range(rotary_dim, 16)]

"""Attention by products of bfloat16 pairs against float64, from operands that are rounded as the kernel rounds them."""

import ctypes
import math

import pytest
import torch
from support import RUNNABLE, poisoned
from torch import Tensor

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.transformer import attend_bf16, attend_whole
from halfbyte.kernels.cpu.transformer.attend_bf16 import AttendPairsSpec
from halfbyte.kernels.cpu.transformer.attend_whole import WHOLE

isas = pytest.mark.parametrize("isa", [isa for isa in RUNNABLE if isa.bf16_dot], ids=lambda isa: isa.name)
# p is rounded by 2^-9 of itself in each sum, beside 2^-18 of its power and of the factor of each of three blocks, and roundings of float32.
BOUND = 2**-8 + 2**-13


def attend(q: Tensor, kv: Tensor, heads: int, isa: ISA, threads: int = 2) -> tuple[Tensor, bool]:
    """q [B, T, H D], kv [B, S, 2 H D] -> y [B, T, H D], and whether memory around it is untouched."""
    (batch, tokens, width), length = q.shape, kv.shape[1]
    dim, out = width // heads, poisoned(*q.shape, dtype=torch.float32)
    padded, thread_bytes = attend_bf16.sizes(length, dim)
    scratch = torch.full((threads * thread_bytes + 64,), 255, dtype=torch.uint8)  # NaN
    fields: dict[str, int | tuple[float, float]] = {"out": out[0].data_ptr(), "batch": batch, "heads": heads, "tokens": tokens}
    fields |= {"length": length, "padded": padded, "scratch": scratch.data_ptr() + 63 & ~63, "thread_bytes": thread_bytes}
    fields |= {"parts": attend_whole.parts(batch * heads, tokens, threads), "scale": (dim**-0.5, 0.0)}
    for name, at, row, count in (("q", q, 1, tokens), ("k", kv, 2, length), ("v", kv[..., width:], 2, length)):
        fields |= {name: at.data_ptr(), f"{name}_batch": count * row * 4 * width, f"{name}_head": 4 * dim, f"{name}_token": row * 4 * width}
    block = arguments(WHOLE, compiled(attend_bf16.build, AttendPairsSpec(dim), isa), fields)
    runtime.runner()(ctypes.addressof(block), threads)
    return out[0], out[1]() and bool((scratch[-(-scratch.data_ptr() % 64) :] == 255).all() if scratch.data_ptr() % 64 else True)


def reference(q: Tensor, kv: Tensor, heads: int) -> tuple[Tensor, Tensor]:
    """y of operands in bfloat16, and the sums of p * |v|."""
    dim, (k, v) = q.shape[2] // heads, kv.chunk(2, -1)
    scale = torch.tensor(dim**-0.5, dtype=torch.float32) * torch.tensor(math.log2(math.e), dtype=torch.float32)
    q, k, v = (x.bfloat16().double().unflatten(-1, (heads, dim)).transpose(1, 2) for x in (q * scale, k, v))
    weights = (q @ k.mT * math.log(2)).softmax(-1)
    y, size = ((weights @ x).transpose(1, 2).flatten(2) for x in (v, v.abs()))
    return y, size


@isas
@pytest.mark.parametrize(
    ("batch", "heads", "tokens", "keys", "dim"),
    [(1, 1, 1, 1, 4), (2, 3, 5, 5, 8), (1, 2, 9, 77, 20), (2, 1, 70, 130, 40), (1, 2, 6, 9, 80), (1, 1, 130, 300, 64), (1, 1, 31, 128, 16)],
)
def test_against_float64(batch: int, heads: int, tokens: int, keys: int, dim: int, isa: ISA) -> None:
    generator = torch.Generator().manual_seed(0)
    q, kv = (torch.randn(batch, n, f * heads * dim, generator=generator) for n, f in ((tokens, 1), (keys, 2)))
    q[:, 0] *= 40  # a softmax that is nearly one key's
    y, untouched = attend(q, kv, heads, isa)
    wanted, size = reference(q, kv, heads)
    assert bool(((y.double() - wanted).abs() <= BOUND * size + 2.0**-100).all())
    assert untouched


@isas
def test_scores_far_below_zero_and_not_finite(isa: ISA) -> None:
    """Padding counts for nothing, where all scores are far below that of zeros; NaN and infinity stay in their rows."""
    q, kv = torch.full((1, 40, 8), -60.0), torch.ones(1, 13, 16)
    kv[..., 8:] = torch.arange(13.0).unsqueeze(-1)
    q[0, 3, 2], q[0, 5, 1] = torch.nan, torch.inf
    y, _ = attend(q, kv, 1, isa)
    others = [i for i in range(40) if i not in (3, 5)]
    assert bool(((y[0, others] - 6).abs() <= 6 * BOUND).all())
    assert bool(y[0, [3, 5]].isnan().all())


@isas
@pytest.mark.parametrize("sign", [-1, 1])
@pytest.mark.parametrize("size", [1e13, 1e15, 1e17])
def test_scores_of_any_size(size: float, sign: int, isa: ISA) -> None:
    """Softmax depends on differences of scores alone: with 1e34 between them it is that of one key."""
    q, kv = torch.full((1, 5, 8), sign * size), torch.ones(1, 300, 16)
    kv[..., :8] *= (1 + torch.arange(300.0) % 7).unsqueeze(-1) * size
    kv[..., 8:] = (torch.arange(300.0) % 7).unsqueeze(-1)
    y, _ = attend(q, kv, 1, isa)
    assert bool(((y - (6 if sign > 0 else 0)).abs() <= 6 * BOUND).all())

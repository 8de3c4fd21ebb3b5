"""Attention of one token to a cache of 8 bits, against float64: the entry that is written, and what is read."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from aot import Binary, Job, compile_all
from float_support import UNIT
from test_decoding_kernels import EPS, Kind, attention, streamed
from torch import Tensor

from halfbyte.kernels.gpu.transformer import attend
from halfbyte.layouts.records import from_codes, to_codes
from halfbyte.machine import GPUS, Gpu

H, B, F = torch.float16, torch.bfloat16, torch.float32


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "size", "length", "dtype", "how", "kind"),
    [
        (1, 8, 2, 64, 100, 57, F, {}, Kind()),
        (3, 6, 3, 80, 77, 76, H, {}, Kind(rotary_dim=10)),
        (2, 3, 1, 16, 100, 0, B, {}, Kind()),
        (2, 4, 4, 128, 65, 40, B, {}, Kind(rotary_dim=96)),
        (1, 2, 1, 256, 40, 33, B, {}, Kind(normed=True, unit_offset=True, factor=0.4)),
        (3, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(normed=True, unit_offset=True)),
        (3, 4, 2, 96, 37, 30, B, {"splits": 2}, Kind()),
        (5, 14, 2, 64, 130, 64, H, {"splits": 2, "tokens": 64}, Kind(rotary_dim=32, factor=2.5)),
        (66, 2, 1, 128, 12, 11, B, {"splits": 1, "warps": 1}, Kind()),
        (2, 4, 2, 64, 70, 59, B, {}, Kind(added=True, sinks=True)),
        (1, 6, 2, 80, 50, 39, H, {"splits": 2}, Kind(added=True, rope_interleaved="repeated")),
        (2, 3, 1, 16, 70, 9, B, {"splits": 5}, Kind(sinks=True)),  # some blocks see nothing
        (3, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(normed=True, projections="qk", v_norm=True)),
        (1, 8, 1, 512, 40, 33, B, {}, Kind(normed=True, projections="qk", v_norm=True)),
        (3, 6, 3, 48, 77, 76, H, {"splits": 3}, Kind(projections="q", added=True)),
    ],
)
def test_attention_to_codes(
    batch: int,
    heads: int,
    kv_heads: int,
    dim: int,
    size: int,
    length: int,
    dtype: torch.dtype,
    how: dict[str, int],
    kind: Kind,
    gpu: Gpu,
    device: torch.device,
    interpreted: bool,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """What is not there yet has NaN as its scales; with an even length it is masked, and the last of the batch is padded on the left."""
    masked = length % 2 == 0 or kind.added
    assert attend.supports(heads, kv_heads, dim, dtype, codes=True) is None
    if how:
        monkeypatch.setattr(attend, "static", streamed(**how))
    there_already = int(kind.projections == "q")
    qkv = torch.randn(batch, (heads + (len(kind.projections) - 1) * kv_heads) * dim).to(dtype)
    rotary_dim = dim if kind.rotary_dim is None else kind.rotary_dim
    rotary: Any = tuple(torch.randn(batch, rotary_dim).to(dtype) for _ in range(2))
    cache: Any = tuple(to_codes(torch.randn(batch, kv_heads, size, dim) * 10 ** torch.randn(size, 1)) for _ in range(2))
    for codes, scales in cache:
        scales[:, :, length + there_already :] = torch.nan
        codes[:, :, length + there_already :] = 111
    mask: Tensor | None = None
    if masked:
        mask = torch.rand(batch, size) < 0.7
        mask[-1] = torch.arange(size) >= length // 2
        mask[:, length] = True
        if kind.added:
            mask = torch.where(mask, torch.randn(batch, size), torch.finfo(dtype).min).to(dtype)
    sinks = torch.randn(heads).to(dtype) * 2 if kind.sinks else None
    norms: Any = tuple(((1 + torch.randn(dim) / 4).to(dtype), EPS, kind.unit_offset) for _ in range(2)) if kind.normed else None

    out = torch.full((batch, heads * dim), torch.nan, dtype=dtype, device=device)
    (k, ks), (v, vs) = (tuple(t.contiguous().to(device, copy=True) for t in part) for part in cache)
    variant = kind.norm_after_rope, len(kind.projections) - 1, kind.v_norm
    sink = None if sinks is None else sinks.to(device)
    how_else = attend.How(kind.factor, rotary_dim, kind.rope_interleaved, sink, *variant)
    count = torch.tensor([length + there_already], device=device)
    rope_cache: Any = tuple(t.to(device) for t in rotary)
    at_mask, factors = None if mask is None else mask.to(device), norms and tuple((w.to(device), *rest) for w, *rest in norms)
    attend.launch(gpu, qkv.to(device), rope_cache, (k, v, ks, vs), count, at_mask, out, dim**-0.5, 1 - there_already, factors, how_else)
    assert count.item() == length + 1

    unit = max(UNIT[dtype], 2.0**-24)
    cut = 2.0**-7 if interpreted and dtype == B else 0.0  # what a GPU rounds
    near = [from_codes(codes.cpu(), scales.cpu(), torch.float64) for codes, scales in ((k, ks), (v, vs))]
    others = torch.arange(size) != length if kind.projections != "q" else torch.ones(size, dtype=torch.bool)
    for (codes, scales), found, found_scales in zip(cache, (k, v), (ks, vs), strict=True):
        assert torch.equal(found.cpu()[:, :, others], codes[:, :, others]), "nothing else is written"
        assert torch.equal(found_scales.cpu()[:, :, others].nan_to_num(9), scales[:, :, others].nan_to_num(9))
    empty = [t.nan_to_num(0) for t in near]
    if kind.projections != "q":
        _, *wanted = attention(qkv, rotary, empty, length, mask, heads, norms, kind, sinks)
        for x, y, part in zip(wanted, near, (k, v), strict=True):
            x, y = x[:, :, length], y[:, :, length]
            # Half a code and half a unit of the scale, and the roundings of what was encoded.
            assert bool(((x - y).abs() <= x.abs().amax(-1, keepdim=True) * (0.51 / 127 + 2.0**-9 + 8 * unit + cut)).all())
            assert int(part.abs().amax()) <= 127
    rounded = tuple(t.to(dtype).double() for t in empty)
    of_queries = kind._replace(projections="q")
    expected, _, values = attention(qkv[:, : heads * dim], rotary, rounded, length, mask, heads, norms, of_queries, sinks)
    size_of = float(qkv.double().square().mean().sqrt() * rounded[0].abs().max()) * (10 if kind.unit_offset else 4)
    # Scores are off by the roundings of queries, the result by those of weights and values.
    error = (2.0**-22 * dim + (max(unit, cut) if dtype != F else 0) * dim**0.5) * size_of + 4 * unit + cut
    largest = float(values.abs().max()) * kind.factor
    assert bool(((out.cpu().double() - expected).abs() <= error * largest + (2 * unit + cut) * expected.abs()).all())


def test_what_is_not_finite_and_what_is_nothing(gpu: Gpu, device: torch.device) -> None:
    """A block of the new value with a NaN or an infinity becomes NaN, and no other; zeros and what is smaller than a scale become 0."""
    qkv = torch.randn(3, 3 * 96)
    qkv[0, 192 + 40], qkv[1, 192 + 3], qkv[2, 192:256] = torch.nan, torch.inf, 1e-37
    cache = [torch.zeros(3, 1, 5, 96, dtype=torch.int8, device=device) for _ in range(2)]
    scales = [torch.zeros(3, 1, 5, 3, dtype=torch.bfloat16, device=device) for _ in range(2)]
    out = torch.full((3, 96), -1.0, device=device)
    attend.launch(gpu, qkv.to(device), None, (*cache, *scales), torch.tensor([0], device=device), None, out, 0.1)
    expected = qkv[:, 192:].view(3, 3, 32).clone()
    expected[0, 1], expected[1, 0], expected[2, :2] = torch.nan, torch.nan, 0
    assert torch.allclose(out.cpu().view(3, 3, 32), expected, atol=4 / 127, equal_nan=True)
    found = from_codes(cache[1][:, 0, 0].cpu(), scales[1][:, 0, 0].cpu(), torch.float32)
    assert torch.equal(found.isnan(), expected.flatten(1).isnan())


def test_heads_of_odd_width() -> None:
    assert "whole words" in (attend.supports(4, 2, 42, B, codes=True) or "")
    assert attend.supports(4, 2, 42, B) is None


COMPILED = [("sm_80", 1, 128), ("sm_90", 128, 128), ("sm_90", 3, 256)]


@pytest.fixture(scope="module")
def compiled() -> list[list[Binary]]:
    jobs = [Job("aot:launch_codes", arch, {"rows": rows, "dim": dim}, "resources") for arch, rows, dim in COMPILED]
    return compile_all(jobs)


@pytest.mark.parametrize("index", range(len(COMPILED)), ids=["-".join(map(str, case)) for case in COMPILED])
def test_it_compiles_without_spills(index: int, compiled: list[list[Binary]]) -> None:
    first, _ = compiled[index]
    assert first.spills == 0
    assert "prmt.b32" in first.ptx, "codes become floats by their bits"
    assert first.shared <= GPUS[COMPILED[index][0]].shared

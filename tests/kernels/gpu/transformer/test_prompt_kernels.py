"""Many tokens' queries, keys and values, and their attention: a kernel each, against float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from aot import Binary, Job, compile_all
from float_support import UNIT, launched
from torch import Tensor

from halfbyte.errors import ArgumentError
from halfbyte.kernels.gpu.transformer import attend_many, rope
from halfbyte.machine import GPUS, Gpu
from halfbyte.ops.transformer import prefill_ops
from halfbyte.ops.transformer.sublayers import Heads, Norm

H, B = torch.float16, torch.bfloat16
EPS = 1e-5


class Sizes(NamedTuple):
    """Of a call: sequences, tokens, query and key heads of `dim` elements, `turned` of which have positions, and a cache of `size` that has
    `length` tokens."""

    batch: int
    tokens: int
    heads: int
    kv_heads: int
    dim: int
    rotary_dim: int
    size: int
    length: int


class Where(NamedTuple):
    gpu: Gpu
    device: torch.device
    interpreted: bool


@pytest.fixture
def where(gpu: Gpu, device: torch.device, interpreted: bool) -> Where:
    return Where(gpu, device, interpreted)


def cache_of(at: Sizes, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Keys and values, NaN where no token is yet."""
    found = torch.full((2, at.batch, at.kv_heads, at.size, at.dim), torch.nan, dtype=dtype)
    found[..., : at.length, :] = torch.randn(2, at.batch, at.kv_heads, at.length, at.dim)
    return found[0], found[1]


def tables(at: Sizes, rope_interleaved: str, batch: int) -> tuple[Tensor, Tensor] | None:
    if not at.rotary_dim:
        return None
    angles = torch.randn(batch, at.tokens, at.rotary_dim // 2)
    if rope_interleaved == "":
        angles = torch.cat((angles, angles), -1)
    elif rope_interleaved == "repeated":
        angles = angles.repeat_interleave(2, -1)
    return angles.cos(), angles.sin()


def rotary_dim(x: Tensor, rotary: tuple[Tensor, Tensor] | None, rope_interleaved: str) -> Tensor:
    """Of x [B, T, heads, D] in float64."""
    if rotary is None:
        return x
    cos, sin = (t.double().unsqueeze(2) for t in rotary)
    if rope_interleaved == "half":
        cos, sin = cos.repeat_interleave(2, -1), sin.repeat_interleave(2, -1)
    first = torch.arange(cos.shape[-1] // 2) * (2 if rope_interleaved else 1)
    second = first + (1 if rope_interleaved else cos.shape[-1] // 2)
    y, a, b = x.clone(), x[..., first], x[..., second]
    y[..., first], y[..., second] = a * cos[..., first] - b * sin[..., first], b * cos[..., second] + a * sin[..., second]
    return y


def placed(x: Tensor, norm: Norm | None, rotary: tuple[Tensor, Tensor] | None, rope_interleaved: str, normed: str) -> Tensor:
    """Of x [B, T, heads, D] in float64, with its norm "before" or "after" its positions."""
    if norm is None:
        return rotary_dim(x, rotary, rope_interleaved)
    x = rotary_dim(x, rotary, rope_interleaved) if normed == "after" else x
    x = x * (x.square().mean(-1, keepdim=True) + EPS).rsqrt() * (1 + norm.weight.double())
    return x if normed == "after" else rotary_dim(x, rotary, rope_interleaved)


CALLS = [
    (Sizes(1, 5, 4, 2, 32, 32, 16, 0), H, "", ""),
    (Sizes(2, 17, 6, 2, 48, 24, 40, 7), H, "", "before"),
    (Sizes(2, 3, 40, 8, 64, 64, 40, 30), B, "", ""),
    (Sizes(1, 9, 6, 3, 32, 32, 100, 7), H, "half", "before"),
    (Sizes(2, 9, 6, 6, 80, 32, 9, 0), B, "repeated", ""),
    (Sizes(1, 4, 3, 1, 256, 0, 8, 2), torch.float32, "", "before"),
    (Sizes(2, 9, 6, 2, 64, 64, 40, 7), H, "", "after"),
    (Sizes(1, 5, 4, 4, 48, 24, 16, 0), B, "half", "after"),
]


@pytest.mark.parametrize(("at", "dtype", "rope_interleaved", "normed"), CALLS)
def test_turning(at: Sizes, dtype: torch.dtype, rope_interleaved: str, normed: str, where: Where) -> None:
    """Float32 is rounded a few times, its result once; what is no new entry of the cache stays as it is."""
    qkv = torch.randn(at.batch, at.tokens, (at.heads + 2 * at.kv_heads) * at.dim).to(dtype)
    rotary = tables(at, rope_interleaved, 1 if at.batch > 1 and at.tokens == 3 else at.batch)
    norms = tuple(Norm((torch.randn(at.dim) / 4).to(dtype), EPS, True) for _ in range(2)) if normed else None
    keys, values = cache_of(at, dtype)
    there = [t.to(where.device) for t in (keys, values)]
    of_norms = norms and tuple((norm.weight.to(where.device), EPS, True) for norm in norms)
    begin = torch.tensor([at.length], device=where.device) if at.length else None
    on_device = None if rotary is None else (rotary[0].to(where.device), rotary[1].to(where.device))
    flat = qkv.view(at.batch * at.tokens, -1).to(where.device)

    def start(out: Tensor) -> None:
        how = at.rotary_dim, rope_interleaved, normed == "after"
        rope.launch(where.gpu, flat, on_device, out, (there[0], there[1]), begin, of_norms, *how)  # type: ignore[arg-type]

    found = launched(start, (at.batch, at.tokens, at.heads, at.dim), dtype, where.device)
    q, k, v = qkv.view(at.batch, at.tokens, -1, at.dim).double().split((at.heads, at.kv_heads, at.kv_heads), 2)
    unit = UNIT[dtype] * (2 if where.interpreted and dtype == B else 1)  # the interpreter cuts where a GPU rounds
    new = slice(at.length, at.length + at.tokens)
    for got, x, norm in zip((found, there[0].cpu()[:, :, new].transpose(1, 2)), (q, k), norms or (None, None), strict=True):
        expected = placed(x, norm, rotary, rope_interleaved, normed)
        most = expected.abs().amax(-1, keepdim=True)
        assert bool(((got.double() - expected).abs() <= unit * expected.abs() + 2.0**-19 * most + 2.0**-25).all())
    assert torch.equal(there[1].cpu()[:, :, new].transpose(1, 2), v.to(dtype))
    for before, after in zip((keys, values), there, strict=True):
        after[:, :, new] = torch.nan
        before[:, :, new] = torch.nan
        assert torch.equal(after.cpu().nan_to_num(9), before.nan_to_num(9))


@pytest.mark.parametrize(("projections", "v_norm"), [("qkv", True), ("qk", True), ("qk", False), ("q", False)])
@pytest.mark.parametrize("dtype", [H, torch.float32])
def test_what_is_made(projections: str, v_norm: bool, dtype: torch.dtype, where: Where) -> None:
    """Values with a norm, or of what keys are made of; queries alone, which leave the cache as it is."""
    at = Sizes(2, 9, 6, 2, 48, 24, 40, 7)
    qkv = torch.randn(at.batch, at.tokens, (at.heads + (len(projections) - 1) * at.kv_heads) * at.dim).to(dtype)
    rotary, (keys, values) = tables(at, "", at.batch), cache_of(at, dtype)
    assert rotary is not None
    norms = [Norm((torch.randn(at.dim) / 4).to(dtype), EPS, True) for _ in range(2)]
    there, flat = [t.to(where.device) for t in (keys, values)], qkv.view(at.batch * at.tokens, -1).to(where.device)
    begin, of_norms = torch.tensor([at.length], device=where.device), [(norm.weight.to(where.device), EPS, True) for norm in norms]
    on_device = rotary[0].to(where.device), rotary[1].to(where.device)

    def start(out: Tensor) -> None:
        how = at.rotary_dim, "", False, len(projections) - 1, v_norm
        rope.launch(where.gpu, flat, on_device, out, (there[0], there[1]), begin, (of_norms[0], of_norms[1]), *how)

    found = launched(start, (at.batch, at.tokens, at.heads, at.dim), dtype, where.device)
    x, new = qkv.view(at.batch, at.tokens, -1, at.dim).double(), slice(at.length, at.length + at.tokens)
    wanted = [(found, placed(x[:, :, : at.heads], norms[0], rotary, "", "before"))]
    if projections == "q":
        assert all(torch.equal(a.cpu().nan_to_num(9), b.nan_to_num(9)) for a, b in zip(there, (keys, values), strict=True))
    else:
        k, v = x[:, :, at.heads : at.heads + at.kv_heads], x[:, :, -at.kv_heads :]
        v = v * (v.square().mean(-1, keepdim=True) + EPS).rsqrt() if v_norm else v
        kept = [t.cpu()[:, :, new].transpose(1, 2) for t in there]
        wanted += [(kept[0], placed(k, norms[1], rotary, "", "before")), (kept[1], v)]
    for got, expected in wanted:
        most = expected.abs().amax(-1, keepdim=True)
        assert bool(((got.double() - expected).abs() <= UNIT[dtype] * expected.abs() + 2.0**-19 * most + 2.0**-25).all())


def test_no_room_for_new_tokens(where: Where) -> None:
    """Their queries are NaN, and what is behind the cache is not written."""
    at = Sizes(1, 5, 4, 2, 32, 32, 16, 12)
    memory = torch.full((2, 2 * 16 * 32 + 512), 7.0, dtype=H, device=where.device)
    cache = tuple(part[: 2 * 16 * 32].view(1, 2, 16, 32) for part in memory)
    flat = torch.randn(5, 8 * 32, device=where.device).to(H)
    out = torch.zeros(1, 5, 4, 32, dtype=H, device=where.device)
    rope.launch(where.gpu, flat, None, out, (cache[0], cache[1]), torch.tensor([at.length], device=where.device))
    assert out.isnan().all()
    assert bool((memory == 7).all())


ATTENDING = [
    (Sizes(1, 5, 4, 2, 32, 0, 16, 0), H, "", False),
    (Sizes(2, 70, 4, 2, 64, 0, 100, 17), H, "", False),
    (Sizes(1, 130, 4, 1, 48, 0, 130, 0), H, "", True),
    (Sizes(1, 200, 2, 2, 128, 0, 300, 60), B, "", False),
    (Sizes(1, 70, 4, 1, 256, 0, 90, 20), H, "", False),
    (Sizes(1, 40, 4, 1, 512, 0, 90, 20), B, "window", False),
    (Sizes(2, 70, 4, 2, 32, 0, 300, 7), H, "any", False),
    (Sizes(3, 140, 2, 2, 64, 0, 600, 400), H, "window", True),
    (Sizes(1, 33, 3, 3, 96, 0, 64, 31), B, "window", False),
]


@pytest.mark.parametrize("given", [True, False])
@pytest.mark.parametrize(("at", "dtype", "kind", "sink"), ATTENDING)
def test_attending(at: Sizes, dtype: torch.dtype, kind: str, sink: bool, given: bool, where: Where) -> None:
    """Weights and the result are rounded to the type; a score is off by a rounding for each of its products, and so is its exponential.

    given  the cache's length is: without, all of it is there
    """
    if not given and not kind:
        at = at._replace(length=0)
    queries = torch.randn(at.batch, at.tokens, at.heads, at.dim).to(dtype)
    keys, values = cache_of(at._replace(length=at.length + at.tokens if given else at.size), dtype)
    key, last = torch.arange(at.size), torch.arange(at.tokens)[:, None] + at.length
    seen = (key <= last)[None].expand(at.batch, -1, -1)
    mask = None
    if kind:
        shown = torch.rand(at.batch, at.tokens, at.size) < 0.4 if kind == "any" else (key > last - 40).expand(at.batch, -1, -1)
        seen = seen & shown
        seen[0, :3] = False
        mask = seen.to(where.device)
    sinks, scale, factor = torch.randn(at.heads).to(dtype) if sink else None, at.dim**-0.5, 0.7
    on_device = [t.to(where.device) for t in (queries, keys, values)]
    length = torch.tensor([at.length], device=where.device) if given else None
    of_sinks = None if sinks is None else sinks.to(where.device)

    def start(out: Tensor) -> None:
        attend_many.launch(where.gpu, on_device[0], on_device[1], on_device[2], length, mask, out, scale, factor, of_sinks)

    found = launched(start, (at.batch, at.tokens, at.heads * at.dim), dtype, where.device)
    expected, error = attended(queries, keys.nan_to_num(0), values.nan_to_num(0), seen, scale, sinks)
    unit = UNIT[dtype] * (2 if where.interpreted and dtype == B else 1)
    expected, error = factor * expected, factor * 2 * unit * error[0] + factor * error[1] + unit * factor * expected.abs() + 2.0**-24
    assert bool(((found.double() - expected).abs() <= error).all())


def attended(
    queries: Tensor, keys: Tensor, values: Tensor, seen: Tensor, scale: float, sinks: Tensor | None
) -> tuple[Tensor, tuple[Tensor, Tensor]]:
    """In float64: the result [B, T, H * D], what it is with the values' magnitudes, and what roundings of scores in float32 come to."""
    group = queries.shape[2] // keys.shape[1]
    q, k, v = queries.double().transpose(1, 2), *(t.double().repeat_interleave(group, 1) for t in (keys, values))
    scores = (q @ k.transpose(2, 3) * scale).masked_fill(~seen[:, None], -torch.inf)
    off = 2.0**-22 * (q.shape[3] + 4) * scale * (q.abs() @ k.abs().transpose(2, 3)).amax(-1, keepdim=True)
    if sinks is not None:
        sink_scores = sinks.double().view(1, -1, 1, 1).expand(*scores.shape[:3], 1)
        weights = torch.cat((scores, sink_scores), -1).softmax(-1)[..., :-1]
    else:
        weights = scores.softmax(-1).nan_to_num(0)
    found = [weights @ v, weights @ v.abs(), 2 * off * (weights @ v.abs())]
    y, most, of_scores = (t.transpose(1, 2).flatten(2) for t in found)
    return y, (most, of_scores)


def test_nan_of_a_key_comes_back(where: Where) -> None:
    at = Sizes(1, 70, 2, 1, 64, 0, 70, 0)
    queries, (keys, values) = torch.randn(1, 70, 2, 64).to(H), cache_of(at._replace(length=70), H)
    keys[0, 0, 40, 3] = torch.nan
    out = torch.zeros(1, 70, 128, dtype=H, device=where.device)
    on_device = [t.to(where.device) for t in (queries, keys, values)]
    attend_many.launch(where.gpu, on_device[0], on_device[1], on_device[2], None, None, out, 0.1)
    assert out[:, 40:].isnan().all()
    assert not out[:, :40].isnan().any()


# The ops


@pytest.mark.parametrize(("at", "dtype", "rope_interleaved", "normed"), CALLS)
def test_torch_operations_say_the_same(at: Sizes, dtype: torch.dtype, rope_interleaved: str, normed: str) -> None:
    """What CPUs compute, and GPUs without Triton."""
    qkv, rotary = torch.randn(at.batch, at.tokens, (at.heads + 2 * at.kv_heads) * at.dim).to(dtype), tables(at, rope_interleaved, at.batch)
    norms = (Norm(torch.rand(at.dim).to(dtype), EPS, True), Norm(torch.rand(at.dim).to(dtype), EPS, True)) if normed else None
    heads = Heads(
        at.heads,
        at.kv_heads,
        at.dim,
        at.dim**-0.5,
        norms,
        False,
        at.rotary_dim,
        rope_interleaved=rope_interleaved,
        norm_after_rope=normed == "after",
    )
    keys, values = cache_of(at, dtype)
    queries = prefill_ops.apply_rope(qkv, rotary, keys, values, torch.tensor([at.length]), heads)
    q, k, v = qkv.view(at.batch, at.tokens, -1, at.dim).double().split((at.heads, at.kv_heads, at.kv_heads), 2)
    new = slice(at.length, at.length + at.tokens)
    for got, x, norm in zip((queries, keys[:, :, new].transpose(1, 2)), (q, k), norms or (None, None), strict=True):
        expected = placed(x, norm, rotary, rope_interleaved, normed)
        most = expected.abs().amax(-1, keepdim=True)
        assert bool(((got.double() - expected).abs() <= UNIT[dtype] * expected.abs() + 2.0**-19 * most + 2.0**-25).all())
    y = prefill_ops.attend_many(queries, keys, values, torch.tensor([at.length]), None, heads.scale, factor=0.5)
    seen = (torch.arange(at.size) <= torch.arange(at.tokens)[:, None] + at.length)[None]
    expected, _ = attended(queries, keys.nan_to_num(0), values.nan_to_num(0), seen, heads.scale, None)
    assert bool(((y.double() - expected / 2).abs() <= UNIT[dtype] * expected.abs() + 2.0**-18).all())
    assert torch.equal(v.to(dtype), values[:, :, new].transpose(1, 2))


def test_what_does_not_fit() -> None:
    qkv, cache, heads = torch.zeros(1, 3, 8 * 32), torch.zeros(1, 2, 8, 32), Heads(4, 2, 32, 1.0)
    with pytest.raises(ArgumentError, match=r"apply_rope takes qkv"):
        prefill_ops.apply_rope(qkv, None, cache.half(), cache.half(), None, heads)
    with pytest.raises(ArgumentError, match=r"apply_rope takes qkv"):
        prefill_ops.apply_rope(qkv, (torch.zeros(1, 2, 32), torch.zeros(1, 2, 32)), cache, cache, None, heads)
    norms = Norm(torch.zeros(5), 0.0), Norm(torch.zeros(5), 0.0)
    with pytest.raises(ArgumentError, match="apply_rope takes qkv"):
        prefill_ops.apply_rope(qkv, None, cache, cache, None, heads._replace(qk_norm=norms))
    of_all = Norm(torch.zeros(4 * 32), 0.0), Norm(torch.zeros(2 * 32), 0.0)
    with pytest.raises(ArgumentError, match="apply_rope takes qkv"):
        prefill_ops.apply_rope(qkv, None, cache, cache, None, heads._replace(qk_norm=of_all, qk_norm_whole=True, norm_after_rope=True))
    queries: Any = torch.zeros(1, 3, 4, 32)
    with pytest.raises(ArgumentError, match="a mask bool"):
        prefill_ops.attend_many(queries, cache, cache, None, torch.zeros(1, 3, 7, dtype=torch.bool), 1.0)
    with pytest.raises(ArgumentError, match="scale above 0"):
        prefill_ops.attend_many(queries, cache, cache, None, None, 0.0)
    with pytest.raises(ArgumentError, match="of one type"):
        prefill_ops.attend_many(queries.half(), cache, cache, None, None, 1.0)
    assert prefill_ops.why_not_many(Heads(4, 2, 1024, 1.0), B, GPUS["sm_90"]) == "heads of 1024 are wider than 512"
    assert "not torch.float32" in (prefill_ops.why_not_many(heads, torch.float32, GPUS["sm_90"]) or "")
    assert prefill_ops.why_not_many(heads, B, GPUS["sm_90"]) is None


# Compiled

UNITS = {"sm_90": "wgmma", "sm_100": "tcgen05", "gfx942": "mfma"}


def test_compiled_for_every_gpu() -> None:
    """Matrix units, asynchronous copies to shared memory, and no or few spills.

    A tile is compiled once for each kind of matrix unit. Ampere, Ada and the consumer Blackwell GPUs share one, and most tiles.
    """
    calls = [(128, 4096, True), (128, 512, False), (256, 4096, True), (256, 48, False), (512, 2048, True)]
    tiles = {}
    for arch, (dim, tokens, masked) in itertools.product(GPUS, calls):
        tile = replace(attend_many.static(1, tokens, 32, dim, GPUS[arch]), pdl=False)
        tiles.setdefault((UNITS.get(arch, "mma"), tile, masked), (arch, {"dim": dim, "tokens": tokens, "masked": masked}))
    jobs = [Job("aot:launch_prompt", "sm_90", {"dim": 64, "tokens": 512, "masked": False})]
    jobs += [Job("aot:launch_prompt", arch, how, "assembly" if arch == "sm_90" else "resources") for arch, how in tiles.values()]
    assert {job.arch for job in jobs} == {"sm_80", "sm_89", *UNITS}
    for job, binaries in zip(jobs, compile_all(jobs), strict=True):
        kernels: dict[str, Binary] = {binary.kernel: binary for binary in binaries}
        assert set(kernels) == ({"_rope", "_find", "_attend"} if job.kwargs["masked"] else {"_rope", "_attend"})
        assert all(binary.spills <= 64 for binary in binaries), job
        if job.arch == "sm_90":
            assert ("HGMMA" in kernels["_attend"].assembly) == (job.kwargs["dim"] <= 256)
            assert "LDGSTS" in kernels["_attend"].assembly
            assert ".128" in kernels["_rope"].assembly or ".64" in kernels["_rope"].assembly

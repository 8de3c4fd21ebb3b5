"""A norm, a product with gates, one token's attention: a kernel each, against float64."""

from __future__ import annotations

from contextlib import nullcontext
from dataclasses import replace
from typing import Any, NamedTuple

import gluon_interpreter
import pytest
import torch
from aot import Binary, compile_all, layer_job
from float_support import UNIT, launched, terms
from samples import random_codes
from torch import Tensor

from halfbyte.errors import KernelError
from halfbyte.formats import as_format
from halfbyte.kernels import reference
from halfbyte.kernels.gpu.linear import skinny, skinny_config, skinny_hopper, skinny_hopper_config, skinny_tile
from halfbyte.kernels.gpu.transformer import attend, gates
from halfbyte.kernels.problem import Epilogue, Problem
from halfbyte.layouts import gpu_tiles
from halfbyte.machine import GPUS, Gpu

Where = tuple[Gpu, torch.device, bool]
H, B, F = torch.float16, torch.bfloat16, torch.float32
EPS = 1e-5


def run(name: str, m: int, n: int, k: int, dtype: torch.dtype, where: Where, kind: str = "silu", **how: Any) -> None:
    gpu = where[0]
    problem = Problem("linear", m, n, k, as_format(name), dtype)
    config = skinny.gated(problem, replace(skinny.configs(problem, gpu)[0], **how))
    assert config is not None
    check(skinny, config, problem, where, skinny_config.mode(problem) != "sums" and dtype != F, kind)


def of_gates(kind: str, gate: Tensor) -> Tensor:
    if kind == "relu2":
        return gate.relu().square()
    return torch.nn.functional.silu(gate) if kind == "silu" else torch.nn.functional.gelu(gate, approximate="tanh")


def check(module: Any, config: Any, problem: Problem, where: Where, rounded: bool, kind: str) -> None:
    """Gates: what is `launched` is near the reference. The sigmoid is off by a few roundings of float32. No slope of either function of
    gates is more than 1.13.

    rounded  the weight is, to x's type
    """
    factor = 1.0 if kind == "silu" else 0.3
    _gpu, device, interpreted = where
    m, n, k, dtype = problem.m, problem.n, problem.k, problem.dtype
    codes = random_codes(problem.format, (n, k))
    views = gpu_tiles.views(gpu_tiles.pack(codes).data.to(device), gpu_tiles.geometry(problem.format, (n, k)))
    x, residual = (torch.randn(m, k) / 8).to(dtype), torch.randn(m, n // 2).to(dtype)
    epilogue, there = Epilogue(None, residual.to(device), gates=kind, factor=factor), x.to(device)
    with gluon_interpreter.interpreted(module) if interpreted and module is skinny_hopper else nullcontext():
        y = launched(lambda out: module.launch(problem, config, there, views, out, epilogue), (m, n // 2), dtype, device)
    expected, error = reference.linear(x, codes), 2 * reference.error_bound(x, codes)
    cut = interpreted and dtype == B  # where a GPU rounds: the weight, the result
    if rounded or cut:
        error = error + (4 if cut else 2) * UNIT[dtype] * (x.double().abs() @ terms(codes).T)
    gate, up = expected.chunk(2, 1)
    of_gate, of_up = error.chunk(2, 1)
    expected = of_gates(kind, gate) * up * factor
    error = factor * (1.13 * of_gate * (up.abs() + of_up) + of_gates(kind, gate).abs() * of_up) + 2.0**-20 * expected.abs()
    expected = expected + residual.double()
    error = error + 2.0**-22 * (expected.abs() + residual.double().abs())
    if cut:
        error = error + UNIT[dtype] * (expected.abs() + error)
    wrong = ~reference.agrees(y, expected, error)
    worst = float(((y.double() - expected).abs() / error).nan_to_num(nan=torch.inf).max())
    assert not wrong.any(), f"{int(wrong.sum())} of {wrong.numel()} are off by up to {worst:.2f} times the bound"


@pytest.fixture
def where(gpu: Gpu, device: torch.device, interpreted: bool) -> Where:
    return gpu, device, interpreted


@pytest.mark.parametrize(
    ("name", "m", "dtype", "how"),
    [
        ("int4_g128", 1, B, {"bands": 4, "records": 1, "kind": "gelu_tanh"}),
        ("int4_g128", 1, H, {"bands": 2, "records": 2}),
        ("int4_g128_zp", 3, H, {}),
        ("int4_g128", 1, B, {"separate_warps": True, "split": 1}),
        ("q8_0", 1, H, {"separate_warps": True, "split": 1}),
        ("q4_0", 1, B, {}),
        ("q4_0", 7, H, {"kind": "gelu_tanh"}),
        ("q8_0", 1, H, {"split": 1}),
        ("int8_channel_zp", 2, F, {"split": 1}),
        ("int4_g20_zp", 2, H, {}),
        ("int4_g128", 16, B, {}),
        ("q4_0", 33, H, {"split": 1}),
        ("int4_g128", 64, H, {"split": 1}),
    ],
)
def test_gates(name: str, m: int, dtype: torch.dtype, how: dict[str, Any], where: Any) -> None:
    run(name, m, 256, 384, dtype, where, **how)


@pytest.mark.parametrize(
    ("name", "m", "dtype", "config", "kind"),  # columns, panels, each, stages, programs
    [
        ("int4_g128", 5, B, (8, 4, 2, 3, 2), "silu"),
        ("int8_channel", 20, H, (32, 4, 1, 2, 1), "gelu_tanh"),
        ("int4_g256_zp", 9, H, (16, 4, 2, 2, 3), "silu"),
        ("int8_g128", 40, B, (64, 4, 1, 2, 2), "gelu_tanh"),
    ],
)
def test_gates_on_hopper(name: str, m: int, dtype: torch.dtype, config: tuple[int, ...], kind: str, where: Any) -> None:
    """Whole tiles for each program, two or one."""
    gpu, _device, interpreted = where
    if not interpreted and gpu.capability != (9, 0):
        pytest.skip("needs a Hopper GPU")
    problem = Problem("linear", m, 768, 384, as_format(name), dtype)
    fitting = skinny_hopper_config.gated(problem, skinny_hopper_config.Config(*config), replace(GPUS["sm_90"], sms=4))
    assert fitting is not None
    static = skinny_hopper_config.compiled_for(problem, fitting, clamp=False, gates=kind)
    check(skinny_hopper, fitting, problem, where, static.scaled, kind)


@pytest.mark.parametrize("bands", [2, 8, 16])
def test_wide_tiles_of_gates(bands: int, where: Any) -> None:
    """Tiles of the upper half that reach over its end."""
    run("int4_g128", 1, 384, 256, H, where, bands=bands, columns=1, slices=8, records=1)


@pytest.mark.parametrize("gated", [True, False, None], ids=["gated", "alone", "beside"])
@pytest.mark.parametrize("kind", ["silu", "gelu_tanh", "relu2"])
@pytest.mark.parametrize(("m", "half", "dtype"), [(1, 96, B), (3, 2500, H), (64, 17, F)])
def test_gates_by_themselves(m: int, half: int, dtype: torch.dtype, kind: str, gated: bool | None, where: Any) -> None:
    """The sigmoid is off by a few roundings of float32, and of its argument t by t of them; and the result by that of its type."""
    gpu, device, interpreted = where
    x = (torch.randn(m, half * (2 if gated else 1)) * 6).to(dtype)
    multiplier = torch.randn(m, 3, half).to(dtype)[:, 1]  # rows of a wider one
    out = torch.full((m, half), torch.nan, dtype=dtype, device=device)
    x[0, 0], x[0, 1] = -200.0, torch.nan
    gates.launch(gpu, x.to(device), out, kind, 0.7, gated=gated is True, multiplier=multiplier.to(device) if gated is None else None)
    assert bool(out[0, 1].isnan()), "a NaN stays"
    x[0, 1], out[0, 1] = 0.0, 0.0
    gate, up = x.double().chunk(2, 1) if gated else (x.double(), torch.ones(()) if gated is False else multiplier.double())
    # torch's 1 + tanh(u) cancels where 2 sigmoid(2 u) does not.
    argument = gate if kind == "silu" else 2 * (2 / torch.pi) ** 0.5 * (gate + 0.044715 * gate**3)
    if kind == "relu2":
        argument = torch.zeros_like(gate)
    expected = (of_gates(kind, gate) if kind == "relu2" else gate * argument.sigmoid()) * up * 0.7
    unit = UNIT[dtype] * (2 if interpreted and dtype == B else 1)  # the interpreter cuts where a GPU rounds
    least = 2.0**-24 if dtype == H else 2.0**-126
    error = unit + 2.0**-20 + 2.0**-21 * argument.abs()
    assert bool(((out.cpu().double() - expected).abs() <= error * expected.abs() + least).all())


def test_what_gates_do_not_fit(gpu: Gpu) -> None:
    problem = Problem("linear", 1, 192, 256, as_format("int4_g128"), H)
    config = skinny.configs(problem, gpu)[0]
    assert skinny.gated(problem, config) is None, "half of 192 rows are not whole panels"
    assert skinny.gated(replace(problem, n=256), replace(config, split=2)) is None
    hopper, large = GPUS["sm_90"], skinny_hopper_config.Config(8, 4, 1, 3, 100)
    assert skinny_hopper_config.gated(replace(problem, n=28672 + 128), large, hopper) is None, "half of them are not whole tiles"
    assert skinny_hopper_config.gated(replace(problem, n=4096), large, hopper) is None, "16 tiles leave most multiprocessors without one"
    assert skinny_hopper_config.gated(replace(problem, n=28672, format=as_format("q4_0")), large, hopper) is None
    assert skinny_hopper_config.gated(replace(problem, n=28672), large, hopper) is not None
    x, out = torch.zeros(1, 256, dtype=H), torch.zeros(1, 96, dtype=H)
    with pytest.raises(KernelError, match="takes no gates"):
        skinny.launch(problem, config, x, gpu_tiles.Views(x, x, None), out, Epilogue(gates="silu"))


@pytest.mark.parametrize(
    ("name", "m", "n", "k", "dtype", "how", "unit_offset"),
    [
        ("int4_g128", 1, 70, 1024, B, {"records": 1}, False),
        ("int4_g128", 1, 70, 1024, B, {"records": 1}, True),
        ("int4_g128", 1, 70, 2048, H, {"records": 2}, True),
        ("q4_0", 1, 70, 300, F, {"split": 1}, True),
        ("int4_g128_zp", 1, 70, 384, H, {}, False),
        ("int4_g128", 1, 70, 2048, H, {"separate_warps": True}, True),
        ("q4_0", 1, 70, 1100, F, {"separate_warps": True, "split": 1}, False),
        ("int4_g128_zp", 1, 70, 384, B, {"separate_warps": True}, False),
    ],
)
def test_a_norm_in_the_product(
    name: str, m: int, n: int, k: int, dtype: torch.dtype, how: dict[str, Any], unit_offset: bool, where: Any
) -> None:
    """As if its input were x times the norm's weight, rounded, and then by the root, which is off by a few roundings of float32."""
    gpu, device, interpreted = where
    problem = Problem("linear", m, n, k, as_format(name), dtype)
    config = replace(skinny.configs(problem, gpu)[0], **how)
    assert skinny.takes_norm(config)
    codes = random_codes(problem.format, (n, k))
    views = gpu_tiles.views(gpu_tiles.pack(codes).data.to(device), gpu_tiles.geometry(problem.format, (n, k)))
    x, factor = (torch.randn(m, k) * 3).to(dtype), (1 + torch.randn(k) / 4).to(dtype)
    z = (x.float() * (factor.float() + unit_offset)).to(dtype)
    out = torch.full((m, n), torch.nan, dtype=dtype, device=device)
    skinny.launch(problem, config, x.to(device), views, out, Epilogue(), (factor.to(device), EPS, unit_offset))
    root = (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    expected, error = reference.linear(z, codes), 2 * reference.error_bound(z, codes)
    if (skinny_config.mode(problem) != "sums" and dtype != F) or (interpreted and dtype == B):
        error = error + 4 * UNIT[dtype] * (z.double().abs() @ terms(codes).T)
    expected, error = expected * root, error * root + 2.0**-19 * (expected * root).abs()
    error = error + (2 * UNIT[dtype] if interpreted else 0) * expected.abs()
    assert bool(reference.agrees(out.cpu(), expected, error).all())


@pytest.mark.parametrize(
    ("name", "k", "dtype", "how", "normed"),
    [
        ("int4_g128", 4096, B, {"records": 4}, False),  # one step
        ("int4_g128", 14336, H, {"records": 4}, False),  # four, and the last reaches over the end
        ("int4_g128", 14336, B, {"records": 2}, False),  # seven, each of which is read while the one before is multiplied
        ("int4_g128", 4000, H, {"records": 1}, False),
        ("int4_g128_zp", 3100, H, {"records": 1}, True),
        ("int4_g128", 4096, H, {"records": 2}, True),
        ("q4_0", 6144, H, {"records": 2}, False),
        ("q8_0", 2048, H, {"records": 1}, False),
    ],
)
def test_what_comes_before_the_kernel_before_has_ended(
    name: str, k: int, dtype: torch.dtype, how: dict[str, Any], normed: bool, where: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One row, as on a GPU where kernels start early; the interpreter has nothing to wait for."""
    _, device, interpreted = where
    if interpreted:
        for module in (skinny, skinny_tile):
            monkeypatch.setattr(module, "gdc_wait", lambda: None, raising=False)
        monkeypatch.setattr(skinny, "gdc_launch_dependents", lambda: None)
        monkeypatch.setattr(skinny.launcher, "run", lambda *a, early, run=skinny.launcher.run, **o: run(*a, **o))
    problem = Problem("linear", 1, 40, k, as_format(name), dtype)
    config = skinny_config.Config(1, 1, 8, ahead=4, ptx=not interpreted, **how)
    static, part_slabs = skinny_config.compiled_for(problem, config, clamps=False)
    assert static.early
    assert static.pipe == (problem.format.bits == 4 and how["records"] <= 2 and part_slabs >= 3 * how["records"])
    codes = random_codes(problem.format, (40, k))
    views = gpu_tiles.views(gpu_tiles.pack(codes).data.to(device), gpu_tiles.geometry(problem.format, (40, k)))
    x, factor, out = torch.randn(1, k).to(dtype), (1 + torch.randn(k) / 4).to(dtype), torch.full((1, 40), torch.nan, dtype=dtype)
    out = out.to(device)
    skinny.launch(problem, config, x.to(device), views, out, Epilogue(), (factor.to(device), EPS, False) if normed else None)
    z, root = x, torch.ones(1, 1, dtype=torch.float64)
    if normed:
        z, root = (x.float() * factor.float()).to(dtype), (x.double().square().mean(1, keepdim=True) + EPS).rsqrt()
    expected, error = reference.linear(z, codes), 2 * reference.error_bound(z, codes)
    if skinny_config.mode(problem) != "sums" or (interpreted and dtype == B):
        error = error + 4 * UNIT[dtype] * (z.double().abs() @ terms(codes).T)
    expected, error = expected * root, error * root + 2.0**-19 * (expected * root).abs()
    error = error + (2 * UNIT[dtype] if interpreted else 0) * expected.abs()
    assert bool(reference.agrees(out.cpu(), expected, error).all())


class Kind(NamedTuple):
    """What attention of a token is like. turned: of a head; None: all. added: masks are added to scores. short: tables have half as many
    numbers. turned_first: before norms. made: of queries, keys and values; without keys the new token is in the cache."""

    rotary_dim: int | None = None
    normed: bool = False
    unit_offset: bool = False
    factor: float = 1.0
    rope_interleaved: str = ""
    added: bool = False
    sinks: bool = False
    short: bool = False
    norm_after_rope: bool = False
    projections: str = "qkv"
    v_norm: bool = False


def attention(
    qkv: Tensor,
    rotary: Any,
    cache: Any,
    length: int,
    mask: Tensor | None,
    heads: int,
    norms: Any = None,
    kind: Kind = Kind(),  # noqa: B008
    sinks: Tensor | None = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """In float64, from the formulas of the kernel's text: y, keys, values."""
    keys, values = (t.double().clone() for t in cache)
    batch, kv_heads, size, dim = keys.shape
    x = qkv.double().view(batch, heads + (len(kind.projections) - 1) * kv_heads, dim)

    def normed(x: Tensor) -> Tensor:
        if norms is None:
            return x
        factors = [norms[0][0].double() + kind.unit_offset] * heads + [norms[1][0].double() + kind.unit_offset] * kv_heads
        x, factors = x.clone(), factors[: x.shape[1]]
        x[:, : len(factors)] *= (x[:, : len(factors)].square().mean(-1, keepdim=True) + EPS).rsqrt() * torch.stack(factors)
        return x

    def rotary_dim(x: Tensor) -> Tensor:
        if rotary is None:
            return x
        r = rotary[0].shape[1]
        cos, sin = (t.double().expand(batch, r)[:, None] for t in rotary)
        if kind.short:
            r = 2 * r
            cos, sin = (torch.cat((t, t), -1) for t in (cos, sin))
        part = x[..., :r]
        other = torch.cat((-part[..., r // 2 :], part[..., : r // 2]), -1)
        if kind.rope_interleaved:
            other = torch.stack((-part[..., 1::2], part[..., ::2]), -1).flatten(-2)
        if kind.rope_interleaved == "half":
            cos, sin = (t[..., torch.arange(r) // 2] for t in (cos, sin))
        return torch.cat((part * cos + other * sin, x[..., r:]), -1)

    placed = normed(rotary_dim(x)) if kind.norm_after_rope else rotary_dim(normed(x))
    q = placed[:, :heads]
    if kind.projections != "q":
        k, v = placed[:, heads : heads + kv_heads], x[:, -kv_heads:]
        if kind.v_norm:
            v = v * (v.square().mean(-1, keepdim=True) + EPS).rsqrt()
        keys[:, :, length], values[:, :, length] = k.to(qkv.dtype).double(), v.to(qkv.dtype).double()
    scores = torch.einsum("bkgd,bktd->bkgt", q.view(batch, kv_heads, -1, dim), keys) * dim**-0.5
    seen = (torch.arange(size) <= length).expand(batch, size)
    if mask is not None:
        if kind.added:
            scores = scores + mask.double()[:, None, None]
        else:
            seen = seen & mask
    scores = scores.masked_fill(~seen[:, None, None], -torch.inf)
    if sinks is not None:
        scores = torch.cat((scores, sinks.double().view(1, kv_heads, -1, 1).expand(batch, -1, -1, -1)), -1)
    y = torch.einsum("bkgt,bktd->bkgd", scores.softmax(-1)[..., :size], values).reshape(batch, heads * dim)
    return y * kind.factor, keys, values


STREAMED = {"tokens": 16, "warps": 4, "stages": 3}


def streamed(splits: int, **how: int) -> Any:
    """In place of `attend.static`: with as many blocks and tiles of another kind."""
    static = attend.static
    return lambda *sizes, **kind: (replace(static(*sizes, **kind)[0], **{**STREAMED, **how}), splits)


@pytest.mark.parametrize(
    ("batch", "heads", "kv_heads", "dim", "size", "length", "dtype", "how", "kind"),
    [
        (1, 8, 2, 64, 100, 57, F, {}, Kind()),
        (3, 6, 3, 20, 77, 76, H, {}, Kind(rotary_dim=10)),
        (2, 3, 1, 16, 300, 0, B, {}, Kind()),
        (2, 4, 4, 128, 65, 40, B, {}, Kind(rotary_dim=96)),
        (1, 8, 1, 32, 200, 150, H, {}, Kind(rotary_dim=0)),
        (1, 2, 1, 256, 40, 33, B, {}, Kind(normed=True, unit_offset=True, factor=0.4)),
        (1, 8, 2, 64, 100, 57, F, {"splits": 1}, Kind()),
        (3, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(normed=True, unit_offset=True)),
        (2, 3, 1, 16, 70, 0, B, {"splits": 5}, Kind(rotary_dim=0, normed=True)),
        (5, 14, 2, 64, 130, 64, H, {"splits": 2, "tokens": 64}, Kind(rotary_dim=32, factor=2.5)),
        (1, 5, 1, 128, 33, 32, B, {"splits": 1, "tokens": 32}, Kind()),
        (16, 2, 1, 16, 21, 17, B, {"splits": 2}, Kind()),
        (64, 1, 1, 16, 12, 11, H, {"splits": 1}, Kind()),
        (1, 8, 2, 64, 100, 57, F, {}, Kind(rotary_dim=32, rope_interleaved="half")),
        (3, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(rotary_dim=18, normed=True, rope_interleaved="half")),
        (2, 4, 2, 64, 130, 64, B, {}, Kind(rope_interleaved="repeated")),
        (1, 6, 2, 32, 70, 59, H, {"splits": 2}, Kind(rope_interleaved="repeated")),
        (1, 8, 2, 64, 100, 57, F, {}, Kind(added=True, short=True)),
        (3, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(rotary_dim=12, added=True, sinks=True, short=True)),
        (1, 4, 2, 32, 40, 30, H, {}, Kind(rotary_dim=24, short=True, rope_interleaved="half")),
        (2, 4, 2, 64, 150, 139, B, {}, Kind(added=True, sinks=True)),
        (1, 6, 2, 64, 130, 119, H, {"splits": 2}, Kind(added=True)),
        (2, 3, 1, 16, 70, 9, B, {"splits": 5}, Kind(sinks=True)),  # some blocks see nothing
        (2, 4, 2, 64, 100, 57, F, {}, Kind(normed=True, norm_after_rope=True)),
        (1, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(rotary_dim=12, normed=True, norm_after_rope=True, short=True)),
        (1, 8, 2, 64, 100, 57, F, {}, Kind(normed=True, v_norm=True)),
        (3, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(normed=True, projections="qk", v_norm=True)),
        (2, 4, 2, 64, 150, 139, B, {}, Kind(projections="qk")),
        (1, 8, 1, 512, 40, 33, B, {}, Kind(normed=True, projections="qk", v_norm=True)),
        (1, 8, 2, 64, 100, 57, F, {}, Kind(normed=True, projections="q")),
        (3, 6, 3, 20, 77, 76, H, {"splits": 3}, Kind(projections="q", added=True)),
        (2, 3, 1, 16, 70, 0, B, {"splits": 5}, Kind(projections="q")),
        (2, 2, 1, 16, 90, 79, F, {"splits": 4}, Kind(projections="q", added=True)),
    ],
)
@pytest.mark.parametrize("masked", [False, True])
def test_attention_of_one_token(
    batch: int,
    heads: int,
    kv_heads: int,
    dim: int,
    size: int,
    length: int,
    dtype: torch.dtype,
    how: dict[str, int],
    kind: Kind,
    masked: bool,
    where: Any,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Where it is masked, the last of the batch is padded on the left, and heads have norms: up to the last token, all by themselves."""
    gpu, device, _ = where
    assert attend.supports(heads, kv_heads, dim, dtype) is None
    if how:
        monkeypatch.setattr(attend, "static", streamed(**how))
    there_already = int(kind.projections == "q")
    qkv = torch.randn(batch, (heads + (len(kind.projections) - 1) * kv_heads) * dim).to(dtype)
    rotary_dim = dim if kind.rotary_dim is None else kind.rotary_dim
    rotary: Any = (
        tuple(torch.randn(1 if masked else batch, rotary_dim // (1 + kind.short)).to(dtype) for _ in range(2)) if rotary_dim else None
    )
    cache: Any = tuple(torch.randn(batch, kv_heads, size, dim).to(dtype) for _ in range(2))
    for tensor in cache:
        tensor[:, :, length + there_already :] = torch.nan  # what is not there yet
    mask: Tensor | None = None
    norms: Any = None
    if masked:
        mask = torch.rand(batch, size) < 0.7
        mask[-1] = torch.arange(size) >= length // 2
        mask[:, length] = True
        if kind.added:
            mask = torch.where(mask, torch.randn(batch, size), torch.finfo(dtype).min).to(dtype)
    sinks = torch.randn(heads).to(dtype) * 2 if kind.sinks else None
    if masked or kind.normed:
        norms = tuple(((1 + torch.randn(dim) / 4).to(dtype), EPS, kind.unit_offset) for _ in range(2))
    clean = tuple(t.nan_to_num(0) for t in cache)
    expected, keys, values = attention(qkv, rotary, clean, length, mask, heads, norms, kind, sinks)
    bits = []
    for advance in (0, 1 - there_already):
        out = torch.full((batch, heads * dim), torch.nan, dtype=dtype, device=device)
        there: Any = tuple(t.to(device, copy=True) for t in cache)
        count = torch.tensor([length + there_already], device=device)
        at_mask = None if mask is None else mask.to(device)
        rope_cache: Any = None if rotary is None else tuple(t.to(device) for t in rotary)
        factors: Any = None if norms is None else tuple((weight.to(device), *rest) for weight, *rest in norms)
        variant = kind.norm_after_rope, len(kind.projections) - 1, kind.v_norm
        how_else = attend.How(kind.factor, rotary_dim, kind.rope_interleaved, None if sinks is None else sinks.to(device), *variant)
        attend.launch(gpu, qkv.to(device), rope_cache, there, count, at_mask, out, dim**-0.5, advance, factors, how_else)
        assert count.item() == length + there_already + advance
        bits.append(out.cpu())
    assert torch.equal(bits[0].view(torch.uint8), bits[1].view(torch.uint8)), "the second run gave other bits"
    # Scores are off by some roundings of float32 for each number that is summed, relative to the sum of magnitudes; keys by one of their
    # type, where float32 and float64 round to different sides.
    found, unit = bits[0].double(), max(UNIT[dtype], 2.0**-24)
    size_of = float(qkv.double().square().mean().sqrt() * clean[0].double().abs().max()) * (10 if kind.unit_offset else 4)
    error = (2.0**-22 * dim * size_of + (2 * unit if dtype != F else 0) * size_of) * float(values.abs().max()) * kind.factor
    assert bool(((found - expected).abs() <= error + 2 * unit * expected.abs()).all())
    for cached, before, wanted in zip(there, cache, (keys, values), strict=True):
        assert bool(
            ((cached[:, :, length].cpu().double() - wanted[:, :, length]).abs() <= 2 * unit * (1 + wanted[:, :, length].abs() * 2)).all()
        )
        others = torch.arange(size) != length
        assert torch.equal(cached[:, :, others].cpu().nan_to_num(9), before[:, :, others].nan_to_num(9)), "nothing else is written"


def test_a_token_that_may_not_see_itself(where: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its key and value enter the cache all the same."""
    gpu, device, _ = where
    for how in (attend.static, streamed(2)):
        monkeypatch.setattr(attend, "static", how)
        qkv, rope = torch.randn(2, 3 * 16), (torch.ones(1, 16), torch.zeros(1, 16))
        cache: Any = tuple(torch.randn(2, 1, 40, 16) for _ in range(2))
        mask = torch.arange(40).expand(2, 40) < 20
        expected, keys, values = attention(qkv, rope, cache, 20, mask, 1)
        for shown in (mask, torch.zeros(2, 40).masked_fill(~mask, -torch.inf)):
            out, there = torch.full((2, 16), torch.nan, device=device), tuple(t.to(device, copy=True) for t in cache)
            rope_cache: Any = tuple(t.to(device) for t in rope)
            attend.launch(gpu, qkv.to(device), rope_cache, there, torch.tensor([20], device=device), shown.to(device), out, 0.25)  # type: ignore[arg-type]
            assert torch.allclose(out.cpu().double(), expected, rtol=1e-5, atol=1e-5)
            assert torch.allclose(there[0].cpu().double(), keys, rtol=1e-6, atol=1e-6)
            assert torch.equal(there[1].cpu().double(), values)


@pytest.mark.parametrize("batch", [1, 2, 4, 8, 16, 33, 64])
@pytest.mark.parametrize("size", [1, 64, 576, 4096])
def test_how_tokens_are_dealt_out(batch: int, size: int) -> None:
    """Few tiles are read to registers; of more, all multiprocessors have some, and none much more than others."""
    gpu = GPUS["sm_90"]
    s, splits = attend.static(batch, 32, 8, size, 128, B, gpu)
    tiles, blocks = -(-size // s.tokens), 8 * batch * splits
    assert 1 <= splits <= min(64, tiles)
    if s.stages == 1:
        assert -(-tiles // splits) <= 2
    else:
        assert blocks >= gpu.sms
        most = -(-blocks // gpu.sms) * -(-tiles // splits)
        assert most <= 1.3 * 8 * batch * tiles / gpu.sms + 2
    assert attend.static(batch, 32, 8, size, 128, F, gpu)[0].stages == 1


def test_caches_of_many_sizes_take_few_kernels() -> None:
    """One for short caches and one for long ones: what depends on the size are numbers."""
    found = {attend.static(1, 32, 8, 64 * n, 128, B, GPUS["sm_90"]) for n in range(1, 200)}
    assert len({static for static, _ in found}) == 2
    assert len({splits for _, splits in found}) > 10


def test_a_full_cache_gives_nan(where: Any) -> None:
    gpu, device, _ = where
    qkv, rope = torch.randn(1, 4 * 16, device=device), torch.ones(1, 16, device=device)
    cache: Any = tuple(torch.randn(1, 1, 5, 16, device=device) for _ in range(2))
    before, out = [t.clone() for t in cache], torch.zeros(1, 32, device=device)
    attend.launch(gpu, qkv, (rope, rope), cache, torch.tensor([5], device=device), None, out, 0.25)
    assert bool(out.isnan().all())
    assert all(torch.equal(a, b) for a, b in zip(before, cache, strict=True))


def test_what_attention_is_not_for() -> None:
    assert "share" in (attend.supports(7, 2, 64, B) or "")
    assert "two halves" in (attend.supports(2, 2, 63, B) or "")
    assert "float64" in (attend.supports(2, 2, 64, torch.float64) or "")
    assert "registers" in (attend.supports(64, 1, 128, B) or "")


# Ahead of time

LAYERS = [("sm_80", 1, 6), ("sm_90", 1, 7), ("sm_90", 16, 7), ("sm_90", 64, 7)]  # sequences, different kernels


@pytest.fixture(scope="module")
def layers() -> list[list[Binary]]:
    sizes = {"hidden": 4096, "inner": 14336, "heads": 32, "kv_heads": 8, "size": 576}
    return compile_all([layer_job(arch, **sizes, rows=rows, head_norms=rows == 16) for arch, rows, _ in LAYERS])


@pytest.mark.parametrize("index", range(len(LAYERS)), ids=[f"{arch}-{rows}" for arch, rows, _ in LAYERS])
def test_a_layer_compiles_without_spills(index: int, layers: list[list[Binary]]) -> None:
    arch, _, kernels = LAYERS[index]
    assert len(layers[index]) == kernels
    for binary in layers[index]:
        # Three numbers that the partitions of a product with gates read once.
        assert binary.spills <= (12 if "gates='silu'" in binary.options else 0), f"{binary.kernel} {binary.options}: {binary.spills}"
        assert binary.shared <= GPUS[arch].shared
        overlaps = "griddepcontrol.wait" in binary.ptx and "griddepcontrol.launch_dependents" in binary.ptx
        assert overlaps == (arch == "sm_90"), "on Hopper each kernel of the chain may start before the one before it has ended"

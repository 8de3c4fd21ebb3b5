"""Attention of new tokens to a cache, and the exponentials that it and SiLU take, against float64."""

import ctypes
import functools
import itertools

import pytest
import torch
from support import RUNNABLE, elementwise, pairwise
from torch import Tensor

from halfbyte.kernels.cpu import jit, runtime
from halfbyte.kernels.cpu.attend import ATTEND, AttendSpec, build, supports
from halfbyte.kernels.cpu.chain import shares
from halfbyte.kernels.cpu.exponential import BOUND, exp, silu
from halfbyte.kernels.cpu.isa import ISA
from halfbyte.kernels.cpu.isas import current

KINDS = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}
ISAS = [isa for isa in RUNNABLE if isa.arch]


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_the_error_of_exponentials_is_within_its_bound(isa: ISA) -> None:
    x = torch.cat((torch.arange(-87 << 9, 88 << 9) / 2.0**9, torch.zeros(8), torch.logspace(-38, 1, 1 << 12)))
    x = x[: len(x) // 16 * 16]
    found, exact = elementwise(lambda v: exp(v.fn, v), torch.float32, x, isa=isa).double(), x.double().exp()
    assert bool(((found - exact).abs() <= BOUND * exact).all())
    # A quotient and a sum more, each rounded: 3 * 2^-24; subnormal results are rounded to 2^-149.
    gates = torch.cat((x, -x))
    found, exact = elementwise(lambda v: silu(v.fn, v), torch.float32, gates, isa=isa).double(), torch.nn.functional.silu(gates.double())
    assert bool(((found - exact).abs() <= (BOUND + 2.0**-22) * exact.abs() + 2.0**-149).all())


@pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)
def test_exponentials_of_what_is_not_finite(isa: ISA) -> None:
    x = torch.tensor([torch.nan, torch.inf, -torch.inf, -88.0]).repeat(4)
    found = elementwise(lambda v: exp(v.fn, v), torch.float32, x, isa=isa)[:4]
    assert bool(found[0].isnan())
    assert found[1] > 1e38
    assert found[2:].tolist() == [0, 0]
    gates = elementwise(lambda v: silu(v.fn, v), torch.float32, x, isa=isa)[:4]
    assert bool(gates[0].isnan())
    assert gates[1] == torch.inf
    assert abs(float(gates[3])) < 1e-35


def attended(
    isa: ISA,
    spec: AttendSpec,
    qkv: Tensor,
    rotary: tuple[Tensor, Tensor],
    cache: tuple[Tensor, Tensor],
    length: int,
    mask: Tensor | None,
    norms: tuple[Tensor, Tensor] | None,
    threads: int,
) -> Tensor:
    """qkv [B, t, (G + 2) * Hkv * D], rotary [B, t, D], cache [B, Hkv, T, D], mask [B, t, T] -> [B, t, G * Hkv * D]."""
    b, t, width = qkv.shape
    kv_heads, dim = cache[0].shape[1], spec.dim
    out = torch.full((b, t, spec.group * kv_heads * dim), torch.nan)
    fields: dict[str, int | tuple[float, float]] = {
        "first_phase": jit.load(spec.name, functools.partial(build, spec), isa)[spec.name],
        "openmp": runtime.openmp_address(),
        **{name: turn.data_ptr() for name, turn in zip(("cos", "sin"), rotary, strict=True)},
        "rotary_batch": 4 * t * dim,
        "rotary_token": 4 * dim,
        "length": length,
        "qkv": qkv.data_ptr(),
        "qkv_stride": 4 * width,
        "out": out.data_ptr(),
        "out_stride": 4 * out.shape[2],
        "batch": b,
        "tokens": t,
        "kv_heads": kv_heads,
        "scale_eps": (dim**-0.5, 1e-5),
    }
    for name, tensor in zip(("key", "value"), cache, strict=True):
        strides = [s * tensor.element_size() for s in tensor.stride()]
        fields |= {f"{name}s": tensor.data_ptr(), f"{name}_batch": strides[0], f"{name}_head": strides[1], f"{name}_token": strides[2]}
    if mask is not None:
        fields |= {"mask": mask.data_ptr(), "mask_batch": mask.stride(0), "mask_token": mask.stride(1)}
    if norms is not None:
        fields |= {"q_norm": norms[0].data_ptr(), "k_norm": norms[1].data_ptr()}
    block = ATTEND.buffer(fields)
    runtime.runner()(ctypes.addressof(block), threads)
    return out


CASES = pairwise((8, 24, 64), (1, 3, 7), tuple(KINDS), (False, True), (False, True), (0, 31, 32, 77), (1, 2, 5))


@pytest.mark.parametrize("isa", ISAS or RUNNABLE, ids=lambda isa: isa.name)
def test_attention_is_that_of_float64(isa: ISA) -> None:
    for number, (dim, group, kind, normed, masked, length, t) in enumerate(CASES):
        if kind == "f16" and not isa.half_conversions:
            continue
        torch.manual_seed(number)
        b, kv_heads, size = 1 + number % 3, 1 + number % 2, length + t + number % 4
        qkv = torch.randn(b, t, (group + 2) * kv_heads * dim) * 3
        angles = torch.randn(b, t, dim // 2).repeat(1, 1, 2)
        rotary = angles.cos(), angles.sin()
        norms = (torch.rand(dim) + 0.5, torch.rand(dim) + 0.5) if normed else None
        # Between tokens and heads, and from the tokens' own place on, there may be anything.
        cache = tuple(torch.full((b, kv_heads, size + 3, dim + 8), torch.nan, dtype=KINDS[kind])[:, :, :size, :dim] for _ in range(2))
        for part in cache:
            part[:, :, :length] = torch.randn(b, kv_heads, length, dim).to(part.dtype)
        mask = torch.rand(b, t, size) > 0.4 if masked else None
        if mask is not None:
            mask[:, :, length : length + t] |= torch.eye(t, dtype=torch.bool)
        spec = AttendSpec(dim, group, kind, normed, masked)
        y = attended(isa, spec, qkv, rotary, (cache[0], cache[1]), length, mask, norms, 1 + number % 2)

        heads = qkv.double().view(b, t, -1, dim)
        q, k, v = heads.split([group * kv_heads, kv_heads, kv_heads], 2)
        if norms is not None:
            q, k = (x * (x.square().mean(-1, keepdim=True) + 1e-5).rsqrt() * w.double() for x, w in zip((q, k), norms, strict=True))
        cos, sin = (turn.double()[:, :, None] for turn in rotary)
        q, k = (x * cos + torch.cat((-x[..., dim // 2 :], x[..., : dim // 2]), -1) * sin for x in (q, k))
        there = slice(length, length + t)
        # k is rounded to the cache's type, after the norm (2^-21 of its size covers mean, root and two products) and two products.
        unit = {"f32": 0.0, "bf16": 2.0**-8, "f16": 2.0**-11}[kind]
        wanted = k.transpose(1, 2)
        error = (unit + 2.0**-20) * wanted.abs() + 2.0**-21 * (wanted.abs().amax(-1, keepdim=True)) + 2.0**-24
        assert bool(((cache[0][:, :, there].double() - wanted).abs() <= error).all()), (spec, length, t)
        assert torch.equal(cache[1][:, :, there], v.transpose(1, 2).to(cache[1].dtype)), (spec, length, t)

        seen = torch.ones(t, length + t, dtype=torch.bool).tril(length)
        seen = seen.expand(b, t, -1) if mask is None else seen & mask[:, :, : length + t]
        keys, values = (part[:, :, : length + t].double().repeat_interleave(group, 1) for part in cache)
        scores = q.transpose(1, 2) @ keys.transpose(2, 3) * dim**-0.5
        weights = scores.masked_fill(~seen[:, None], -torch.inf).softmax(-1)
        exact = (weights @ values).transpose(1, 2).reshape(b, t, -1)
        # A score is a sum of `dim` products of q, which has an error of 2^-20 of its largest as k above: that goes into each weight twice
        # (its own and the sum of all); sums over the tokens and exponentials round in 2^-24 and 2^-22.
        sizes = q.abs().amax(-1).transpose(1, 2)[..., None] * keys.abs().sum(-1)[:, :, None] * dim**-0.5
        relative = 2 * (dim * 2.0**-24 + 2.0**-19) * float(sizes.max()) + (length + t) * 2.0**-23 + 2.0**-20
        assert bool(((y.double() - exact).abs() <= relative * float(values.abs().max())).all()), (spec, length, t)


def test_one_token_gets_its_own_value_exactly() -> None:
    spec, dim = AttendSpec(16, 2, "f32", normed=False, masked=False), 16
    qkv, turn = torch.randn(1, 1, 4 * dim), torch.ones(1, 1, dim)
    cache = torch.full((1, 1, 1, dim), torch.nan), torch.full((1, 1, 1, dim), torch.nan)
    y = attended(current(), spec, qkv, (turn, turn * 0), cache, 0, None, None, 1)
    assert torch.equal(y.view(2, dim), qkv[0, 0, -dim:].expand(2, dim))


def test_what_may_not_be_seen() -> None:
    spec, dim, length = AttendSpec(16, 1, "f32", normed=False, masked=True), 16, 40
    qkv, turn = torch.randn(2, 1, 3 * dim), torch.ones(2, 1, dim)
    keys, values = torch.randn(2, 1, length + 1, dim), torch.randn(2, 1, length + 1, dim)
    keys[0, 0, 3] = torch.nan
    mask = torch.ones(2, 1, length + 1, dtype=torch.bool)
    mask[0, 0, 3] = False
    mask[1] = False
    y = attended(current(), spec, qkv, (turn, turn * 0), (keys, values), length, mask, None, 2)
    assert bool(y[0].isfinite().all()), "a NaN that is masked"
    assert bool((y[1] == 0).all()), "nothing to see, as torch has it"
    mask[0, 0, 3] = True
    y = attended(current(), spec, qkv, (turn, turn * 0), (keys, values), length, mask, None, 2)
    assert bool(y[0].isnan().all()), "a NaN that is not"


def test_heads_that_are_not_computed_here() -> None:
    assert supports(24, 8, 64) is None
    assert "no multiple of 8" in (supports(24, 8, 20) or "")
    assert "are not 1 to 16 for each" in (supports(34, 2, 64) or "")
    assert "are not 1 to 16 for each" in (supports(5, 2, 64) or "")


def test_shares_are_all_panels_in_ever_smaller_groups() -> None:
    for panels, threads in itertools.product((0, 1, 2, 3, 48, 80, 1000), (1, 2, 7, 64)):
        cut = shares(panels, threads)
        sizes = [b - a for a, b in itertools.pairwise(cut)]
        assert cut[0] == 0
        assert cut[-1] == panels
        assert sizes == sorted(sizes, reverse=True)
        assert 0 not in sizes
        assert len(sizes) >= min(panels, threads)

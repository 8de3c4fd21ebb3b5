"""A NaN or infinity in a decoder layer's input, cache or weight reaches the outputs that its formula says, and no others."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
import torch
from torch import Tensor

from halfbyte import ops
from halfbyte.kernels.cpu.transformer.attend_whole import _ROWS
from halfbyte.layouts.records import to_records
from halfbyte.ops.transformer.decoder import DecoderLayer
from halfbyte.ops.transformer.sublayers import MLP, Attention, Heads, Norm
from halfbyte.ops.transformer.weights import Weight

HEADS, KV_HEADS, DIM, K, INNER, LENGTH = 4, 2, 16, 48, 32, 9
BOTH = (HEADS + 2 * KV_HEADS) * DIM
SHAPES = {"qkv": (BOTH, K), "o": (K, HEADS * DIM), "gate_up": (2 * INNER, K), "down": (K, INNER)}
FORMULAS = "llama", "gemma", "granite", "olmo", "cohere", "starcoder"
COMPUTES = "float", "int8"
CACHES = torch.float32, torch.bfloat16, torch.int8


def shapes(formula: str) -> dict[str, tuple[int, int]]:
    return SHAPES | ({"gate_up": (INNER, K)} if formula == "starcoder" else {})


def layer(formula: str, compute: str, broken: tuple[str, int] | None = None) -> DecoderLayer:
    """broken: a weight, and in which of its rows one block's scale is NaN."""
    torch.manual_seed(3)
    weights = {}
    for name, (n, k) in shapes(formula).items():
        codes = ops.quantize(torch.randn(n, k) / k**0.5, "q8_0")
        if broken is not None and broken[0] == name:
            codes.scale[broken[1], 0] = torch.nan
        weights[name] = Weight(ops.pack(codes), None, compute, "block")
    qkv, o, gate_up, down = weights.values()

    def norm(k: int) -> Norm:
        layer_norm, shift = formula in ("cohere", "starcoder"), torch.randn(k) if formula == "starcoder" else None
        return Norm(torch.rand(k) + 0.5, 1e-5, formula == "gemma", layer_norm, shift)

    heads = Heads(HEADS, KV_HEADS, DIM, 0.3)
    if formula == "gemma":
        heads = heads._replace(qk_norm=(norm(DIM), norm(DIM)), softcap=5.0)
        return DecoderLayer(Attention((qkv,), o, norm(K), heads, norm(K)), MLP(gate_up, down, norm(K), norm(K), activation="gelu_tanh"))
    if formula == "granite":
        return DecoderLayer(Attention((qkv,), o, norm(K), heads, None, 0.3), MLP(gate_up, down, norm(K), None, 0.3))
    if formula == "olmo":
        heads = heads._replace(qk_norm=(norm(HEADS * DIM), norm(KV_HEADS * DIM)), qk_norm_whole=True)
        return DecoderLayer(Attention((qkv,), o, None, heads, norm(K)), MLP(gate_up, down, None, norm(K)))
    if formula == "cohere":
        half = Attention((qkv,), o, norm(K), heads._replace(rope_interleaved="repeated"))
        return DecoderLayer(half, MLP(gate_up, down, norm(K), parallel_residual=True))
    if formula == "starcoder":
        return DecoderLayer(Attention((qkv,), o, norm(K), heads), MLP(gate_up, down, norm(K), activation="relu2", gated=False))
    return DecoderLayer(Attention((qkv,), o, norm(K), heads), MLP(gate_up, down, norm(K)))


def cache(kind: torch.dtype, room: int) -> tuple[Tensor, Tensor]:
    """Return keys and values of two sequences: LENGTH tokens, and room for more that holds NaN."""
    generator = torch.Generator().manual_seed(5)
    both = torch.randn(2, 2, KV_HEADS, LENGTH + room, DIM, generator=generator)
    both[:, :, :, LENGTH:] = torch.nan
    if kind == torch.int8:
        return to_records(both[0]), to_records(both[1])
    return both[0].to(kind), both[1].to(kind)


def not_finite(built: DecoderLayer, x: Tensor, caches: tuple[Tensor, Tensor], mask: Tensor | None = None) -> Tensor:
    """Return which outputs of the layer are not finite [2, t, K]."""
    angles = torch.linspace(0, 3, x.shape[1] * DIM // 2).view(1, -1, DIM // 2).repeat(1, 1, 2)
    return ~built(x, (angles.cos(), angles.sin()), *caches, LENGTH, mask).isfinite()


def tokens(t: int) -> Tensor:
    return torch.randn(2, t, K, generator=torch.Generator().manual_seed(7))


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("compute", COMPUTES)
def test_in_a_token(formula: str, compute: str) -> None:
    """It reaches its own output and those of later tokens, which attend to it, but no earlier token and not the other sequence."""
    built = layer(formula, compute)
    for t, kind, bad in itertools.product((1, 5), CACHES, (torch.nan, torch.inf)):
        assert not not_finite(built, tokens(t), cache(kind, t)).any()
        x = tokens(t)
        x[1, t // 2, 20] = bad
        found = not_finite(built, x, cache(kind, t))
        assert found[1, t // 2 :].all()
        assert not found[1, : t // 2].any()
        assert not found[0].any()


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("compute", COMPUTES)
def test_in_many_tokens(formula: str, compute: str) -> None:
    """As in `test_in_a_token`, but earlier tokens in its tile of attention may get it: a masked key has weight 0, and 0 * NaN is NaN."""
    built, t, at = layer(formula, compute), 40, 32
    tile = _ROWS // (HEADS // KV_HEADS)
    first = at // tile * tile
    assert first < at
    for kind in CACHES:
        assert not not_finite(built, tokens(t), cache(kind, t)).any()
        x = tokens(t)
        x[1, at, 20] = torch.nan
        found = not_finite(built, x, cache(kind, t))
        assert found[1, at:].all()
        assert not found[1, :first].any()
        assert not found[0].any()


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("t", [1, 5, 20])
def test_in_a_cached_key(formula: str, compute: str, t: int) -> None:
    """It reaches every token that attends to the key, and none from which a mask hides it."""
    built = layer(formula, compute)
    for kind in CACHES[:2]:
        keys, values = cache(kind, t)
        keys[1, 0, 4, 3] = torch.nan
        found = not_finite(built, tokens(t), (keys.clone(), values.clone()))
        assert found[1].all()
        assert not found[0].any()
        mask = torch.ones(2, 1, t, LENGTH + t, dtype=torch.bool).tril(LENGTH)
        mask[1, :, :, 4] = False
        assert not not_finite(built, tokens(t), (keys.clone(), values.clone()), mask).any()
        mask[1, :, -1, 4] = True
        found = not_finite(built, tokens(t), (keys.clone(), values.clone()), mask)
        assert found[1, -1].all()
        assert not found[1, :-1].any()
        assert not found[0].any()


@pytest.mark.parametrize("formula", FORMULAS)
@pytest.mark.parametrize("compute", COMPUTES)
@pytest.mark.parametrize("t", [1, 5, 20])
def test_in_the_scale_of_a_weight(formula: str, compute: str, t: int) -> None:
    """A row of `down` reaches one column of y unless a norm follows; so does a row of `o` with a parallel residual, where no MLP reads
    attention's output. Everywhere else products carry it into all columns."""
    places: dict[str, tuple[Any, ...]] = {"qkv": (3, HEADS * DIM + 5, BOTH - 1), "o": (7,), "gate_up": (2, INNER + 2), "down": (7,)}
    if formula == "starcoder":
        places["gate_up"] = (2,)
    for name, rows in places.items():
        for row in rows:
            found = not_finite(layer(formula, compute, (name, row)), tokens(t), cache(torch.float32, t))
            if (name == "down" and formula not in ("gemma", "olmo")) or (name == "o" and formula == "cohere"):
                assert found[..., row].all()
                assert found.sum() == found[..., row].sum()
            else:
                assert found.all()

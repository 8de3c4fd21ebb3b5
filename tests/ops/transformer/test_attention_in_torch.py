"""Rope and attention in torch's operations: prefills against float64, decode steps against prefills, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import halfbyte as hb
from halfbyte.errors import ArgumentError
from halfbyte.ops.transformer.attend import attend, why_not_normed_on_gpu
from halfbyte.ops.transformer.normed_linear import activated, normed_linear
from halfbyte.ops.transformer.prefill_ops import apply_rope, attend_many
from halfbyte.ops.transformer.sublayers import Heads, Norm

H, KV, D, T = 4, 2, 16, 5
HEADS = Heads(H, KV, D, 0.3)
NORMS = Norm(torch.linspace(0.5, 1.5, D), 1e-5), Norm(torch.linspace(1.5, 0.5, D), 1e-5)
CASES = {
    "rope": HEADS,
    "some of each head": HEADS._replace(rotary_dim=8),
    "no rope": HEADS._replace(rotary_dim=0),
    "interleaved": HEADS._replace(rope_interleaved="half"),
    "norms": HEADS._replace(qk_norm=NORMS, v_norm=True),
    "norms after rope": HEADS._replace(qk_norm=NORMS, norm_after_rope=True),
    "softcap, sinks": HEADS._replace(softcap=2.0, sinks=torch.linspace(-1, 1, H)),
    "values are keys": HEADS._replace(projections="qk"),
}


def tables(tokens: int, width: int) -> tuple[Tensor, Tensor]:
    angles = torch.arange(tokens)[:, None] * 10000 ** (-torch.arange(width // 2) * 2 / max(width, 1))
    return angles.cos()[None], angles.sin()[None]


@pytest.mark.parametrize("heads", CASES.values(), ids=[*CASES])
def test_tokens_one_by_one_are_as_all_at_once(heads: Heads) -> None:
    """The same float32 formula, whose sums have T terms in scores of order 1: equal up to some units in the last place."""
    torch.manual_seed(0)
    qkv, cos_sin = torch.randn(2, T, heads.outputs), None if heads.rotary_width == 0 else tables(T, heads.rotary_width)
    caches = [torch.full((2, 2, KV, T + 2, D), torch.nan) for _ in range(2)]  # unused entries may be NaN
    queries = apply_rope(qkv, cos_sin, *caches[0], None, heads)
    length = torch.zeros(1, dtype=torch.int64)
    wanted = attend_many(queries, *caches[0], length, None, heads.scale, factor=0.5, sinks=heads.sinks, softcap=heads.softcap)
    steps = []
    for i in range(T):
        rotary = None if cos_sin is None else (cos_sin[0][:, i], cos_sin[1][:, i])
        steps.append(attend(qkv[:, i], rotary, *caches[1], length, None, heads, factor=0.5))
    assert int(length) == T
    torch.testing.assert_close(torch.stack(steps, 1), wanted, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(caches[1], caches[0], rtol=1e-5, atol=1e-6, equal_nan=True)
    assert caches[1][:, :, :, T:].isnan().all()


@pytest.mark.parametrize("changed", [{"eps": 1e-3}, {"unit_offset": True}], ids=lambda changed: next(iter(changed)))
def test_norms_of_one_token_have_one_eps_and_one_unit_offset(changed: dict[str, float]) -> None:
    heads = HEADS._replace(qk_norm=(NORMS[0], NORMS[1]._replace(**changed)), rotary_dim=0)  # type: ignore[arg-type]
    cache = torch.zeros(2, 1, KV, T, D)
    with pytest.raises(ArgumentError, match="one eps and one unit_offset"):
        attend(torch.zeros(1, heads.outputs), None, cache[0], cache[1], torch.zeros(1, dtype=torch.int64), None, heads)


def test_which_norms_of_heads_gpu_kernels_apply() -> None:
    q_norm, k_norm = NORMS
    assert why_not_normed_on_gpu(None) is why_not_normed_on_gpu(NORMS) is None
    for other in (k_norm._replace(eps=1e-3), k_norm._replace(weight=torch.ones(D, 2)[:, 0]), k_norm._replace(weight=torch.ones(D).half())):
        assert "must be" in (why_not_normed_on_gpu((q_norm, other)) or "")
    assert why_not_normed_on_gpu((q_norm, k_norm._replace(layer_norm=True))) == "they apply RMSNorms, not LayerNorms"


@pytest.mark.parametrize("sinks", [None, torch.linspace(-1, 1, H)], ids=["", "sinks"])
def test_many_tokens_against_float64(sinks: Tensor | None) -> None:
    torch.manual_seed(1)
    queries, keys, values = torch.randn(2, T, H, D), torch.randn(2, KV, T, D), torch.randn(2, KV, T, D)
    mask = torch.rand(2, T, T) < 0.6
    mask[0, 1] = False  # a query that sees nothing gets 0
    y = attend_many(queries, keys, values, None, mask, 0.3, factor=0.5, sinks=sinks, softcap=2.0)
    for b in range(2):
        for t in range(T):
            for h in range(H):
                scores = keys[b, h // (H // KV)].double() @ queries[b, t, h].double() * 0.3
                weights = (2 * (scores / 2).tanh()).exp() * mask[b, t]
                total = weights.sum() + (0 if sinks is None else sinks[h].double().exp())
                expected = 0.5 * (weights / total.clamp(min=1e-300)) @ values[b, h // (H // KV)].double()
                torch.testing.assert_close(y[b, t, h * D : (h + 1) * D].double(), expected, rtol=1e-5, atol=1e-6)


def test_floating_point_masks_are_added_to_scores() -> None:
    torch.manual_seed(2)
    qkv, cache, length = torch.randn(2, HEADS.outputs), torch.randn(2, 2, KV, 4, D), torch.tensor([3])
    hidden = torch.tensor([[True, False, True, True]])
    by_bool, by_sum = (
        attend(qkv, None, *cache.clone(), length.clone(), mask, HEADS)
        for mask in (hidden, torch.zeros(1, 4).masked_fill(~hidden, -torch.inf))
    )
    torch.testing.assert_close(by_sum, by_bool, rtol=1e-6, atol=1e-6)


def test_what_gates_do_not_take() -> None:
    packed = hb.pack(hb.quantize(torch.randn(8, 32), "q8_0"))
    with pytest.raises(ArgumentError, match="a factor multiplies the output of gates"):
        normed_linear(torch.randn(1, 32), None, packed, factor=2.0)
    with pytest.raises(ArgumentError, match="gated y has two halves"):
        activated(torch.randn(2, 7), "silu")
    y = torch.randn(3, 7)
    torch.testing.assert_close(activated(y, "silu", 2.0, gated=False), 2 * torch.nn.functional.silu(y))


@pytest.mark.parametrize(
    "wrong", [{"keys": (2, KV, 4)}, {"keys": (2, 0, 4, D)}, {"length": (2,)}, {"mask": (2, 3)}, {"cos": (1, D + 2)}], ids=str
)
def test_shapes_that_attention_refuses(wrong: dict[str, tuple[int, ...]]) -> None:
    shapes = {"keys": (2, KV, 4, D), "length": (1,), "mask": (2, 4), "cos": (1, D), **wrong}
    cache, cos = torch.zeros(shapes["keys"]), torch.ones(shapes["cos"])
    length, mask = torch.zeros(shapes["length"], dtype=torch.int64), torch.ones(shapes["mask"], dtype=torch.bool)
    with pytest.raises(ArgumentError, match="attend takes qkv"):
        attend(torch.zeros(2, HEADS.outputs), (cos, cos), cache, cache.clone(), length, mask, HEADS)

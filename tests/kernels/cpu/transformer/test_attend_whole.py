"""Attention of whole sequences against float64, its op, and encoders that take it."""

import ctypes
import math

import pytest
import torch
from attention import KINDS, entered
from encoder_parts import attention as reference
from encoder_parts import heads
from support import RUNNABLE, poisoned
from torch.nn import functional

from halfbyte.kernels.cpu.codegen import runtime
from halfbyte.kernels.cpu.codegen.isa import ISA
from halfbyte.kernels.cpu.codegen.kernel import arguments, compiled
from halfbyte.kernels.cpu.plan_cache import PLANS
from halfbyte.kernels.cpu.transformer import attend_whole
from halfbyte.layouts.records import from_records
from halfbyte.ops.transformer import attention

isas = pytest.mark.parametrize("isa", RUNNABLE, ids=lambda isa: isa.name)


@isas
@pytest.mark.parametrize(
    ("batch", "count", "tokens", "keys", "dim"),
    [(1, 1, 1, 1, 4), (2, 3, 5, 5, 8), (3, 2, 73, 73, 32), (1, 3, 40, 40, 20), (1, 1, 130, 130, 64), (2, 3, 33, 77, 40), (1, 2, 70, 9, 60)],
)
def test_against_float64(batch: int, count: int, tokens: int, keys: int, dim: int, isa: ISA, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also of queries that attend to other tokens than their own (cross-attention)."""
    monkeypatch.setattr(attend_whole, "current", lambda: isa)
    monkeypatch.setattr(attend_whole, "_WORK_A_THREAD", 1)
    monkeypatch.setattr(runtime, "threads", lambda: 2)
    q, k, v = heads(batch, count, max(tokens, keys), dim)
    q, k, v = q[:, :, :tokens], k[:, :, :keys], v[:, :, :keys]
    some = torch.rand(batch, 1, tokens, keys) < 0.6
    some[0, 0, tokens // 2] = False  # a query that may see nothing
    bias = 3 * torch.randn(batch, count, tokens, keys)
    for mask, added in ((None, None), (some, None), (some[:, :, :1], bias[:1]), (some[:1], bias[:, :1]), (None, bias[:, :, :1])):
        PLANS.scratch = torch.full((1 << 20,), 255, dtype=torch.uint8)  # NaN
        out, untouched = poisoned(batch, tokens, count, dim, dtype=torch.float32)
        with monkeypatch.context() as patch:
            patch.setattr(torch, "empty", lambda *_, out=out, **__: out)
            assert attend_whole.supports(q, k, v, mask)
            y = attend_whole.attend(q, k, v, mask, dim**-0.5, added)
        wanted, error = reference(q, k, v, mask, dim**-0.5, bias=added)
        assert bool(((y.double() - wanted).abs() <= error).all())
        assert untouched()


@isas
@pytest.mark.parametrize(
    ("dim", "group", "kind", "before", "tokens"),
    [(64, 3, "f32", 0, 41), (8, 1, "bf16", 37, 1), (20, 4, "f32", 5, 30), (16, 2, "f16", 64, 33), (40, 2, "int8", 3, 40)],
)
@pytest.mark.parametrize("masked", [False, True])
def test_prompts_see_what_is_before_them(
    dim: int, group: int, kind: str, before: int, tokens: int, masked: bool, isa: ISA, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Keys come 32 at a time, on two threads, from a cache with other things behind them."""
    if kind == "f16" and not isa.half_conversions:
        pytest.skip("no conversions")
    monkeypatch.setattr(attend_whole, "MOST_AT_ONCE", 32)
    batch, kv_heads, length = 2, 2, before + tokens
    q = torch.randn(batch, tokens, kv_heads * group, dim)
    kept = entered(torch.randn(2, batch, kv_heads, length, dim), KINDS[kind])
    cache = kept.new_full((2, batch, kv_heads, length + 2, kept.shape[-1] + 4), -1 if kind == "int8" else torch.nan)
    cache[..., :length, : kept.shape[-1]] = kept
    mask = torch.rand(batch, 1, tokens, length) < 0.7
    sinks = torch.randn(kv_heads * group) * 3 if group > 1 else None
    padded, nbytes = attend_whole.sizes(length, tokens * group, dim, isa)
    scratch, seen = torch.full((2 * nbytes,), 255, dtype=torch.uint8), attend_whole.readable(mask)
    y, untouched = poisoned(batch, tokens, kv_heads * group, dim, dtype=torch.float32)
    fields: dict[str, int | tuple[float, float]] = {
        **dict(zip(("mask", "mask_batch", "mask_token"), attend_whole.mask_fields(seen), strict=True)),
        "before": before,
        "length": length,
        "out": y.data_ptr(),
        "batch": batch,
        "heads": kv_heads,
        "tokens": tokens,
        "padded": padded,
        "parts": 3 if tokens > 20 else 1,
        "scratch": scratch.data_ptr(),
        "thread_bytes": nbytes,
        "sinks": 0 if sinks is None else sinks.data_ptr(),
        "scale": (0.3, 0.0),
    }
    for x, part in zip("qkv", (q.transpose(1, 2), *cache), strict=True):
        fields[x] = part.data_ptr()
        fields |= {f"{x}_{name}": part.element_size() * part.stride(i) for i, name in enumerate(("batch", "head", "token"))}
    spec = attend_whole.WholeSpec(dim, masked, group=group, kind=kind, causal=True, sinks=sinks is not None)
    block = arguments(attend_whole.WHOLE, compiled(attend_whole.build, spec, isa), fields)
    runtime.runner()(ctypes.addressof(block), 2)
    k, v = (from_records(kept, dim, torch.float32) if kind == "int8" else kept.float()).repeat_interleave(group, 2)
    before_them = torch.ones(tokens, length, dtype=torch.bool).tril(before)
    wanted, error = reference(q.transpose(1, 2), k, v, before_them & mask if masked else before_them[None, None], 0.3, sinks=sinks)
    # Outputs are rounded, and their weights' exponentials anew, for each of the times that keys come.
    more = (2 + length // 32) * 2.0**-21 * float(v.abs().max())
    assert bool(((y.double() - wanted).abs() <= error + more).all())
    assert untouched()


def test_nan_stays_in_its_query_and_what_is_masked_counts_nothing() -> None:
    q, k, v = heads(1, 2, 20, 16)
    clean = attend_whole.attend(q, k, v, None, 0.25)
    q[0, 1, 3, 5] = torch.nan
    y = attend_whole.attend(q, k, v, None, 0.25)
    assert bool(y[0, 3, 1].isnan().all())
    y[0, 3, 1] = clean[0, 3, 1]
    assert torch.equal(y, clean)
    mask = torch.ones(1, 1, 1, 20, dtype=torch.bool)
    mask[..., 7:] = False
    short = attend_whole.attend(q[:, :1, :7], k[:, :1, :7], v[:, :1, :7], None, 0.25)
    torch.testing.assert_close(attend_whole.attend(q[:, :1], k[:, :1], v[:, :1], mask, 0.25)[:, :7], short)


def test_what_is_not_supported() -> None:
    q, k, v = heads(2, 2, 6, 8)
    assert attention.supports(q, k, v, None)
    assert not attention.supports(q.requires_grad_(), k, v, None)
    q = q.detach()
    others = (q.bfloat16(), q[:, :1], q[..., :6], q.mT.contiguous().mT, q[:, :, :0], q[0], q.to("meta"))
    assert not any(attention.supports(other, k, v, None) for other in others)
    assert not attention.supports(q[..., :6], k[..., :6], v[..., :6], None)
    masks = (torch.zeros(2, 1, 6, 6), torch.ones(2, 2, 6, 6, dtype=torch.bool), torch.ones(2, 1, 6, 5, dtype=torch.bool))
    assert not any(attention.supports(q, k, v, mask) for mask in (*masks, torch.ones(2, 1, 6, 6, dtype=torch.bool, device="meta")))


def test_the_op() -> None:
    arguments = (*heads(2, 2, 6, 8), torch.rand(2, 1, 1, 6) < 0.8, 0.3)
    torch.library.opcheck(torch.ops.halfbyte.attend_whole.default, arguments, test_utils=("test_schema", "test_faketensor"))


def test_encoders_take_it(monkeypatch: pytest.MonkeyPatch) -> None:
    transformers = pytest.importorskip("transformers")
    from halfbyte.integrations.transformers.attention import NAME

    config = transformers.BertConfig(
        hidden_size=64, num_attention_heads=4, num_hidden_layers=2, intermediate_size=64, vocab_size=50, attn_implementation="sdpa"
    )
    model, ids = transformers.BertModel(config).eval(), torch.randint(50, (3, 21))
    seen = torch.ones(3, 21, dtype=torch.int64)
    padded = (torch.arange(21) < torch.tensor([[21], [9], [1]])).long()
    with torch.inference_mode():
        wanted = [model(input_ids=ids, attention_mask=mask).last_hidden_state for mask in (seen, padded)]
        model.set_attn_implementation(NAME)
        calls, attend = [], attend_whole.attend
        monkeypatch.setattr(attend_whole, "attend", lambda *args: calls.append(args) or attend(*args))
        got = [model(input_ids=ids, attention_mask=mask).last_hidden_state for mask in (seen, padded)]
    assert len(calls) == 4
    for y, other, mask in zip(got, wanted, (seen, padded), strict=True):
        torch.testing.assert_close(y[mask.bool()], other[mask.bool()], rtol=1e-4, atol=1e-5)
    # A decoder's tokens do not see what follows them: that is left to torch.
    q, k, v = heads(1, 2, 6, 8)
    module = torch.nn.Module()
    module.is_causal = True
    y, _ = transformers.AttentionInterface()[NAME](module, q, k, v, None)
    assert len(calls) == 4
    torch.testing.assert_close(y, functional.scaled_dot_product_attention(q, k, v, is_causal=True, scale=1 / math.sqrt(8)).transpose(1, 2))

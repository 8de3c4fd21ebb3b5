"""What a plan cuts where, on models without data: all of a weight, in whole heads and blocks, for any number of processes."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from halfbyte.formats.spec import as_format
from halfbyte.nn.parallel.plan import Holder, Plan, _spread_heads, holders, make_plan

transformers = pytest.importorskip("transformers")

LLAMA = {"hidden_size": 4096, "num_hidden_layers": 1, "num_attention_heads": 32, "num_key_value_heads": 8, "intermediate_size": 14336}
LAYER = "model.layers.0"


def plan_of(sizes: dict[str, Any], fmt: str | None, count: int, device: str = "cpu", *, compute: str = "float") -> tuple[Any, Plan]:
    config = transformers.LlamaConfig(**sizes, vocab_size=128256, tie_word_embeddings=False)
    with torch.device("meta"):
        model = transformers.LlamaForCausalLM(config)
    found: dict[str, Holder] = holders(model)
    if fmt is not None:
        found = {name: replace(holder, format=as_format(fmt), compute=compute) for name, holder in found.items()}
    return found, make_plan(model, found, None, count, device=device, exact=False)


@pytest.mark.parametrize("count", [2, 3, 4, 5, 8, 12, 16, 32])
def test_a_large_llama_is_cut_to_the_last_row(count: int) -> None:
    found, plan = plan_of(LLAMA, "int4_g128", count)
    for name, cut in plan.cuts.items():
        size = found[name].shape[cut.dim]
        covered = {i for part in cut.parts for start, stop in part for i in range(start, stop)}
        assert covered == set(range(size)), name
        assert len(cut.parts) == count
        if cut.along == "inputs":
            assert all(start % 128 == 0 for part in cut.parts for start, _ in part)
    assert plan.cuts[f"{LAYER}.mlp.down_proj"].along == "inputs"
    assert [part[0] for part in plan.cuts[f"{LAYER}.mlp.up_proj"].parts] == [p[0] for p in plan.cuts[f"{LAYER}.mlp.down_proj"].parts]
    queries, keys = (plan.cuts[f"{LAYER}.self_attn.{name}"].parts for name in ("q_proj", "k_proj"))
    for rank, ((a, b),) in enumerate(queries):
        ((c, d),) = keys[rank]
        assert a // 512 * 128 == c, "its first query head reads its first key head"
        assert (b - a) == (d - c) * plan.groups[f"{LAYER}.self_attn"][rank]


def test_more_processes_than_heads() -> None:
    _, plan = plan_of({**LLAMA, "num_attention_heads": 4, "num_key_value_heads": 2}, "q4_0", 6)
    assert plan.cuts[f"{LAYER}.self_attn.q_proj"].after == "gather"
    assert plan.cuts[f"{LAYER}.self_attn.q_proj"].why == "4 heads are fewer than 6 processes"
    assert plan.cuts[f"{LAYER}.self_attn.o_proj"].before == "split"


@pytest.mark.parametrize(
    ("fmt", "compute", "device", "why"),
    [
        ("int8_channel", "int8", "cpu", "one scale for all inputs"),
        ("int8_channel", "auto", "cuda", ""),
        ("int8_channel", "float", "cpu", ""),
        ("int4_g96", "float", "cpu", "blocks reach from one head into the next"),
        ("int4_g4096", "float", "cpu", "blocks reach from one head into the next"),
    ],
)
def test_columns_that_cannot_be_cut_become_rows(fmt: str, compute: str, device: str, why: str) -> None:
    _, plan = plan_of(LLAMA, fmt, 2, device, compute=compute)
    cut = plan.cuts[f"{LAYER}.self_attn.o_proj"]
    assert cut.along == ("outputs" if why else "inputs")
    assert (cut.before, cut.after) == (("gather", "gather") if why else ("", "reduce"))
    assert why in cut.why


@given(st.integers(1, 6), st.integers(1, 8), st.data())
def test_heads(kv_heads: int, group: int, data: st.DataObject) -> None:
    """Each process has some heads, those before it the ones before, and key heads that its query heads read, in groups of one size."""
    heads = kv_heads * group
    count = data.draw(st.integers(1, heads))
    actual, keys = _spread_heads(heads, kv_heads, count)
    assert [start for start, _ in actual] == [0, *(stop for _, stop in actual[:-1])]
    assert actual[-1][1] == heads
    for (a, b), (c, d) in zip(actual, keys, strict=True):
        assert a < b
        assert (b - a) % (d - c) == 0
        size = (b - a) // (d - c)
        assert all((head // group) == c + (head - a) // size for head in range(a, b))

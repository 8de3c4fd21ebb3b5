"""Expected times of a plan: what they add up to, and what it gives that experts of prompts are computed on both devices."""

from __future__ import annotations

from math import isclose

from hypothesis import given
from hypothesis import strategies as st

from halfbyte.decoder.offload.expected import expected, prompt_seconds, token_seconds
from halfbyte.decoder.offload.placement import CHUNK, LayerSize, Placement, Plan, Request, Sizes
from halfbyte.decoder.offload.rates import Rates

COUNTS = st.integers(0, 10**9)
LAYER = st.builds(LayerSize, COUNTS, st.one_of(st.just(0), COUNTS), COUNTS, st.floats(0.01, 1.0), COUNTS, COUNTS, st.just(0))
SIZES = st.builds(Sizes, st.lists(LAYER, min_size=1, max_size=6).map(tuple), COUNTS, COUNTS, COUNTS, st.none(), COUNTS)
RATES = st.builds(Rates, *(st.floats(1e9, 1e12) for _ in range(3)), *(st.floats(1e11, 1e15) for _ in range(2)), st.booleans())
MACHINE = Rates(1e11, 1e12, 5e10, 4e12, 4e14)


def plans(sizes: Sizes) -> list[Plan]:
    return [Plan(Request(None), placement, sizes, streams=sizes.stream_buffers(placement) > 0) for placement in sizes.placements()]


@given(SIZES, st.floats(1e9, 1e12))
def test_a_token_reads_all_weights_once(sizes: Sizes, bandwidth: float) -> None:
    """Of the routed experts the active ones, wherever they are; with equal bandwidths the sum is that of one device."""
    read = sizes.head + sum(layer.rest + layer.experts * layer.active for layer in sizes.layers)
    equal = Rates(bandwidth, bandwidth, bandwidth, 1e30, 1e30)
    for plan in plans(sizes):
        gpu, cpu, crossings = token_seconds(plan, equal)
        assert isclose(gpu + cpu, read / bandwidth, rel_tol=1e-9, abs_tol=1e-15)
        on_cpu = sum(bool(layer.experts) for layer in sizes.layers[plan.placement.layers : plan.placement.experts])
        assert isclose(crossings, 5e-6 * (on_cpu + (plan.placement.layers > 0)), abs_tol=1e-15)


@given(SIZES, RATES)
def test_a_prompt_of_one_token_is_a_token(sizes: Sizes, rates: Rates) -> None:
    for plan in plans(sizes):
        crossing = 5e-6 * (plan.placement.layers > 0)  # whole layers pass a prompt on once
        assert isclose(prompt_seconds(plan, 1, rates) + crossing, sum(token_seconds(plan, rates)), rel_tol=1e-9, abs_tol=1e-12)


@given(SIZES, RATES, st.integers(1, CHUNK))
def test_longer_prompts_take_longer(sizes: Sizes, rates: Rates, tokens: int) -> None:
    for plan in plans(sizes):
        for streamed in (False, True):
            shorter, longer = (prompt_seconds(plan, count, rates, streamed=streamed) for count in (tokens, 2 * tokens))
            assert shorter <= longer * (1 + 1e-9)
        if not plan.streams:
            assert prompt_seconds(plan, tokens, rates, streamed=True) == prompt_seconds(plan, tokens, rates)


def test_by_hand() -> None:
    """Two layers, of whose 100 experts a token chooses 2; those of both are on the CPU."""
    layer = LayerSize(10**8, 10**10, 0, 0.02, 2 * 10**8, 2 * 10**10)
    plan = Plan(Request(None), Placement(2), Sizes((layer, layer), 10**8, 0, 10**8), streams=True)
    gpu, cpu, crossings = token_seconds(plan, MACHINE)
    assert isclose(gpu, 3e8 / 1e12)
    assert isclose(cpu, 4e8 / 1e11)
    assert isclose(crossings, 1e-5)
    # On the CPU each token takes 2 * 0.02 * 2e10 operations of each layer; the link takes 0.2 s for each layer, the first one waits for it.
    assert isclose(prompt_seconds(plan, 1000, MACHINE), 1e-4 + 2 * (1e-3 + 1000 * 8e8 / 4e12 + 5e-6), rel_tol=1e-9)
    # The GPU waits for the first ones, which it reads in 10 ms; the second ones cross meanwhile.
    assert isclose(prompt_seconds(plan, 1000, MACHINE, streamed=True), 1e-4 + (1e-3 + 0.2 + 0.01) + 0.2, rel_tol=1e-8)
    found = expected(plan, MACHINE, prompt_tokens=1000)
    assert "402 ms with experts computed on the CPU, 411 ms where they cross to the GPU" in str(found)
    assert found.to_json()["token_seconds"] == gpu + cpu + crossings
    several = expected(plan, MACHINE, 8)
    assert isclose(several.cpu_seconds, 2 * 1e10 * (1 - 0.98**8) / 1e11)
    assert "a token of each of 8 sequences: " in str(several)
    whole = expected(Plan(Request(None), Placement(), plan.sizes), MACHINE)
    assert (whole.streamed_seconds, whole.cpu_seconds) == (None, 0.0)
    assert "experts" not in str(whole)

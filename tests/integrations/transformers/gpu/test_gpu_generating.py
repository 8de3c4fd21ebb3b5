"""Tokens that are written with CUDA graphs are those that transformers writes, and graphs leave nothing behind."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("needs a GPU", allow_module_level=True)
pytest.importorskip("transformers")

from captured_graphs import count_replays
from test_generating import ASKED, FAMILIES, AfterThree, Odd, both, make, make_family, prompt, unpatched
from transformers import DynamicCache, LogitsProcessorList, StaticCache, StoppingCriteriaList

import halfbyte as hb
from halfbyte.integrations.transformers.decoder.stack import is_compiled_stack
from halfbyte.integrations.transformers.generate.request import likeliest
from halfbyte.kernels.gpu.runtime import scratch


@pytest.fixture(scope="module")
def model() -> Any:
    return make().cuda()


@pytest.fixture(scope="module")
def quantized() -> Any:
    """With compiled layers."""
    model = make(num_hidden_layers=3, hidden_size=256, intermediate_size=512).cuda()
    hb.optimize_(hb.quantize_(model, "q4_0"))
    assert is_compiled_stack(model.model)
    return model


@pytest.fixture(autouse=True)
def captures(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The replays of each graph."""
    return count_replays(monkeypatch)


def there(*lengths: int) -> dict[str, Any]:
    return {name: tensor.cuda() for name, tensor in prompt(*lengths).items()}


@pytest.mark.parametrize("asked", ASKED.values(), ids=ASKED.keys())
@pytest.mark.parametrize("lengths", [(9,), (9, 5, 1)])
def test_tokens_are_transformers_own(model: Any, lengths: tuple[int, ...], asked: dict[str, Any], captures: list[int]) -> None:
    found, expected = both(model, {**there(*lengths), "max_new_tokens": 25, **asked})
    assert torch.equal(found, expected)
    assert len(captures) == (found.shape[1] - max(lengths) > 2)


@pytest.mark.parametrize("lengths", [(9,), (9, 5, 1)])
@pytest.mark.parametrize("name", ["greedy", "sampled", "penalty", "ends"])
def test_compiled_layers(quantized: Any, lengths: tuple[int, ...], name: str, captures: list[int]) -> None:
    found, expected = both(quantized, {**there(*lengths), "max_new_tokens": 60, "eos_token_id": None, **ASKED[name]})
    assert torch.equal(found, expected)
    assert len(captures) == (found.shape[1] - max(lengths) > 2)


@pytest.mark.parametrize("lengths", [(5,), (30,), (9, 5, 1), (30, 5, 13)])
@pytest.mark.parametrize("family", FAMILIES)
def test_families_and_windows(family: str, lengths: tuple[int, ...], captures: list[int]) -> None:
    model = make_family(family).cuda()
    found, expected = both(model, {**there(*lengths), "max_new_tokens": 30, "eos_token_id": None})
    assert torch.equal(found, expected)
    assert len(captures) == 1 + (max(lengths) < 16 and "sliding_window" in FAMILIES[family])


CACHES: dict[str, Callable[[Any], Any]] = {
    "growing": lambda model: DynamicCache(config=model.config),
    "static": lambda model: StaticCache(config=model.config, max_cache_len=80),
    "8 bits": lambda model: hb.Int8Cache(model.config),
}


@pytest.mark.parametrize("cache", CACHES)
@pytest.mark.parametrize("lengths", [(9,), (9, 5, 1)])
def test_a_cache_of_the_caller(quantized: Any, lengths: tuple[int, ...], cache: str, captures: list[int]) -> None:
    """By `GpuModel`: it has all tokens but the last one in the end, and another call goes on with it."""
    found = []
    for is_custom in (False, True):
        asked, past = there(*lengths), CACHES[cache](quantized)
        with unpatched(quantized) if is_custom else nullcontext():
            for _ in range(2):
                ids = quantized.generate(**asked, past_key_values=past, max_new_tokens=20, eos_token_id=None, disable_compile=True)
                assert int(past.get_seq_length()) == ids.shape[1] - 1
                ids = torch.cat((ids, ids[:, :3]), 1)
                seen = torch.nn.functional.pad(asked["attention_mask"], (0, ids.shape[1] - asked["input_ids"].shape[1]), value=1)
                asked = {"input_ids": ids, "attention_mask": seen}
        found.append(ids)
    assert torch.equal(*found)
    assert len(captures) == 2


def test_processors_and_criteria_of_the_caller(model: Any) -> None:
    def settings() -> dict[str, Any]:
        custom = {"logits_processor": LogitsProcessorList([Odd()]), "stopping_criteria": StoppingCriteriaList([AfterThree()])}
        return {**there(9, 5, 1), "max_new_tokens": 20, "eos_token_id": None, **custom}

    found, expected = both(model, settings)
    assert torch.equal(found, expected)


def test_what_waits_for_the_gpu(quantized: Any) -> None:
    """It is written without a graph, which is said once; later random numbers, graphs and memory are as ever."""

    def waits(module: Any, inputs: Any, output: Any) -> None:
        assert float(output[0].sum()) < 1e9

    waiting = make().cuda()
    waiting.model.layers[1].register_forward_hook(waits)
    settings = {**there(9, 2), "max_new_tokens": 20, "do_sample": True, "temperature": 2.0}
    with pytest.warns(UserWarning, match="LlamaForCausalLM .* as torch cannot capture its step"):
        found, expected = both(waiting, settings)
    assert torch.equal(found, expected)
    found, expected = both(waiting, settings)
    assert torch.equal(found, expected)
    found, expected = both(quantized, settings)
    assert torch.equal(found, expected)


def test_graphs_leave_nothing_behind(quantized: Any, captures: list[int]) -> None:
    settings = {**there(9), "max_new_tokens": 12, "eos_token_id": None}
    expected, known = quantized.generate(**settings), []
    for _ in range(20):
        assert torch.equal(quantized.generate(**settings), expected)
        arenas = [arena for buffers in scratch._devices.values() for arena in (buffers.lock_arena, buffers.buffer_arena)]
        left = [arena.numel() for arena in arenas if arena is not None]
        known.append((left, torch.cuda.memory_allocated(), torch.cuda.memory_reserved()))
    assert len(captures) == 21
    assert known[-1] == known[4]


@pytest.mark.parametrize("v", [7, 400, 32000, 128256])
def test_likeliest_is_the_first_of_the_largest(v: int) -> None:
    scores = torch.randint(0, 9, (5, v), device="cuda").float()
    expected = [row.index(max(row)) for row in scores.tolist()]
    assert likeliest(scores).tolist() == expected
